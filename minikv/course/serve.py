"""`python -m minikv serve`: engines behind an address, until Control-C.

    curl -N localhost:8000/v1/completions \\
        -d '{"prompt": "def f(", "stream": true}'

It speaks to OpenAI's clients. On 127.0.0.1 no key is asked for, unless one is
given: --api-key, or MINIKV_API_KEY. At any other address one is needed; without
either, it is made up and printed. SIGTERM and Control-C let requests that are
under way end.

With `--replicas 4`, four workers compute, each a process with one core; Ray
runs them. A request goes to the worker that has most of its prefix and not too
much to do. A worker that dies is replaced, and its requests are computed by
others. With `--prefill 1 --decode 3`, one worker computes prompts and three
continue them, so that no answer waits for another one's prompt. With
`--address`, the workers are placed on the machines of a Ray cluster. With
`--store`, each finds what the others have computed.
"""

import argparse
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from ipaddress import ip_address

import torch

import minikv
from minikv.cluster.actors import ray_workers
from minikv.cluster.front import Front, WorkerLost
from minikv.cluster.routing import EVERY_POLICY
from minikv.config import DRAFTERS
from minikv.course.arguments import dtype, positive
from minikv.serving import EngineLoop
from minikv.serving.block_life import BlockLife

ROUTINGS = [name.replace(" ", "-") for name in EVERY_POLICY]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", nargs="?", default="tinypy", help="bundled name, folder or hub id")
    parser.add_argument(
        "--dtype", type=dtype, default=torch.float32,
        help="of the weights: float32 (default), float16 or bfloat16",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="to listen at (default: %(default)s)")
    parser.add_argument("--port", type=port, default=8000, help="0: any (default: %(default)s)")
    parser.add_argument(
        "--api-key", action="append", default=None, metavar="KEY",
        help="may be given several times; clients with different keys share no prefix. Others on "
        "this machine can read a command line: MINIKV_API_KEY is better",
    )  # fmt: skip
    parser.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN",
        help="of a page, such as http://localhost:3000, that may use the server from a browser; "
        "may be given several times (default: none but the server's own)",
    )  # fmt: skip
    parser.add_argument("--num-blocks", type=positive, default=512, help="of each engine's pool")
    parser.add_argument(
        "--speculative",
        choices=DRAFTERS,
        default="off",
        metavar="WHO",
        help="who drafts: off, ngram, suffix, head or model",
    )
    parser.add_argument(
        "--replicas", type=from_to, metavar="N",
        help="engines (default: 1, which needs no Ray); 1:4 begins with 1, starts more, up to 4, "
        "when requests pile up, and ends those that have nothing to do",
    )  # fmt: skip
    parser.add_argument(
        "--prefill", type=positive, metavar="N",
        help="workers that compute prompts and hand them over; needs --decode",
    )  # fmt: skip
    parser.add_argument("--decode", type=positive, metavar="M", help="workers that continue them")
    parser.add_argument(
        "--routing", choices=ROUTINGS, metavar="POLICY", default="by-own-prefix",
        help=f"one of {', '.join(ROUTINGS)} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--address", help="of a Ray cluster (default: a Ray on this machine)")
    parser.add_argument(
        "--store", default=os.environ.get("MINIKV_STORE"), metavar="URL",
        help="of a Valkey or Redis server; one with a password is better put into MINIKV_STORE",
    )  # fmt: skip
    parser.add_argument(
        "--max-requests", type=positive, help="at a time, of workers (default: 64 for each)"
    )


def run(args: argparse.Namespace) -> int:
    """0 after Control-C or SIGTERM; 2 if it cannot start, saying why."""
    from minikv.serving.app import make_app  # needs what `minikv[serve]` brings
    from minikv.serving.chat import ChatTemplate
    from minikv.serving.server import served

    over = threading.Event()

    def end_on_signals() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: over.set())

    end_on_signals()
    try:
        keys, is_made_up = keys_of(args)
        template, origins = ChatTemplate(args.model), args.allow_origin
        with closing(template), ExitStack() as stack:
            target = stack.enter_context(engines(args))
            end_on_signals()  # Ray has put handlers of its own in their place
            app = make_app(target, args.model, keys, template, origins=origins)
            address = stack.enter_context(served(app, args.host, args.port))
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            url = f"http://{host}:{address[1]}"
            print(f"{url}/v1/completions", flush=True)
            if is_made_up:
                print(f"Authorization: Bearer {keys[0]}", flush=True)
            key = ' -H "Authorization: Bearer KEY"' if keys else ""
            body = '{"prompt": "def f(", "stream": true}'
            print(f"curl -N {url}/v1/completions{key} -d '{body}'", flush=True)
            print(f"{url}/ shows the cache at work", flush=True)
            over.wait()
    except (ImportError, OSError, RuntimeError, ValueError, WorkerLost) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


@contextmanager
def engines(args: argparse.Namespace) -> Iterator[EngineLoop | Front]:
    """What is served: an engine in this process, or workers."""
    at_first, most, num_prefill = numbers_of(args)
    config = minikv.EngineConfig(
        num_blocks=args.num_blocks,
        speculative=args.speculative,
        retention="pinned",  # requests may say `retain_s`
        store=args.store,
        host_blocks=args.num_blocks if args.store is not None else 0,  # fetched by way of it
        kv_groups="one" if args.store is not None or num_prefill else "auto",  # whole blocks travel
    )
    if most == 1 and args.address is None:
        life = BlockLife()
        engine = minikv.Engine(minikv.load(args.model, dtype=args.dtype), config, listeners=[life])
        with EngineLoop(engine, life) as loop:
            yield loop
        return
    policy = EVERY_POLICY[args.routing.replace("-", " ")]
    with (
        ray_workers(most, args.model, config, address=args.address, dtype=args.dtype) as workers,
        Front(workers, policy, args.max_requests, at_first, num_prefill) as front,
    ):
        yield front


def port(text: str) -> int:
    """An argument from 0 to 65535."""
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, was {text!r}")
    return int(text)


def from_to(text: str) -> tuple[int, int]:
    """An argument such as 4, or 1:4."""
    least, colon, most = text.partition(":")
    found = positive(least), positive(most if colon else least)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"must be in ascending order, was {text!r}")
    return found


def numbers_of(args: argparse.Namespace) -> tuple[int, int, int]:
    """(engines at first, at most, of which so many only compute prompts). Raises ValueError for
    options that do not go together."""
    if args.prefill is None and args.decode is None:
        return *(args.replicas or (1, 1)), 0
    if args.prefill is None or args.decode is None:
        raise ValueError("--prefill and --decode: give both, or neither")
    if args.replicas is not None:
        raise ValueError("--replicas: the number is that of --prefill and --decode together")
    number = args.prefill + args.decode
    return number, number, args.prefill


def keys_of(args: argparse.Namespace) -> tuple[list[str], bool]:
    """The keys that let clients in, and whether one was made up. Raises ValueError for one that a
    client could show without knowing it."""
    from_environment = os.environ.get("MINIKV_API_KEY")
    keys = args.api_key or ([from_environment] if from_environment else [])
    if not all(key.strip() for key in keys):
        raise ValueError("--api-key: is empty; leave it out, and one is made up where it is needed")
    if keys or is_local(args.host):
        return keys, False
    return [secrets.token_urlsafe(32)], True


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return False
