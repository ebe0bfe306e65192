"""`python -m minikv serve`: an engine behind an address, until Control-C.

    curl -N localhost:8000/v1/completions \\
        -d '{"prompt": "def f(", "stream": true}'

It speaks to OpenAI's clients. On 127.0.0.1 no key is asked for, unless one is
given: --api-key, or MINIKV_API_KEY. At any other address one is needed; without
either, it is made up and printed. SIGTERM and Control-C let requests that are
under way end. `serve-cluster` puts several engines behind one address.
"""

import argparse
import os
import secrets
import signal
import sys
import threading
from ipaddress import ip_address

import minikv
from minikv.course.bench.harness import positive
from minikv.serving import EngineLoop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", nargs="?", default="tinypy", help="bundled name, folder or hub id")
    parser.add_argument("--host", default="127.0.0.1", help="to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: any (default: %(default)s)")
    parser.add_argument(
        "--api-key", action="append", default=None, metavar="KEY",
        help="may be given several times; clients with different keys share no prefix. Others on "
        "this machine can read a command line: MINIKV_API_KEY is better",
    )  # fmt: skip
    parser.add_argument("--num-blocks", type=positive, default=512, help="of the pool")
    parser.add_argument(
        "--speculative",
        choices=("off", "ngram", "suffix", "head"),
        default="off",
        help="who drafts",
    )


def run(args: argparse.Namespace) -> int:
    """0 after Control-C or SIGTERM; 2 if it cannot start, saying why."""
    from minikv.serving.app import make_app  # needs what `minikv[serve]` brings
    from minikv.serving.chat import ChatTemplate
    from minikv.serving.server import served

    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    keys, is_made_up = keys_of(args)
    try:
        config = minikv.EngineConfig(num_blocks=args.num_blocks, speculative=args.speculative)
        lm, template = minikv.load(args.model), ChatTemplate(args.model)
        with (
            EngineLoop(minikv.Engine(lm, config)) as loop,
            served(make_app(loop, args.model, keys, template), args.host, args.port) as address,
        ):
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            url = f"http://{host}:{address[1]}"
            print(f"{url}/v1/completions", flush=True)
            if is_made_up:
                print(f"Authorization: Bearer {keys[0]}", flush=True)
            key = ' -H "Authorization: Bearer KEY"' if keys else ""
            body = '{"prompt": "def f(", "stream": true}'
            print(f"curl -N {url}/v1/completions{key} -d '{body}'", flush=True)
            over.wait()
    except (OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def keys_of(args: argparse.Namespace) -> tuple[list[str], bool]:
    """The keys that let clients in, and whether one was made up."""
    from_environment = os.environ.get("MINIKV_API_KEY")
    keys = args.api_key or ([from_environment] if from_environment else [])
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
