"""`python -m minikv serve-cluster --workers 4`: engines behind one address.

Each worker is a process with one core. A request goes to the worker that has
most of its prefix and not too much to do. A worker that dies is replaced, and
its requests are computed by others. With `--address`, the workers are placed on
the machines of a Ray cluster. With `--store`, each finds what the others have
computed. With `--prefill 1 --decode 3`, one worker computes prompts and three
continue them, so that no answer waits for another one's prompt.

    curl -N localhost:8000/v1/completions \\
        -H "Authorization: Bearer $MINIKV_TOKEN" \\
        -d '{"prompt": "def f(", "stream": true}'

Requests need a token: that of `--token-file`, else that of MINIKV_TOKEN, else
one that is made up and printed. Control-C ends it.
"""

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

import minikv
from minikv.cluster.actors import ray_workers
from minikv.cluster.front import Front, WorkerLost
from minikv.cluster.routing import EVERY_POLICY
from minikv.cluster.serve import Server
from minikv.course.bench.harness import positive

ROUTINGS = [name.replace(" ", "-") for name in EVERY_POLICY]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--workers", type=from_to, metavar="N",
        help="default: 2; 1:4 begins with 1, starts more, up to 4, when requests pile up, and ends "
        "those that have nothing to do",
    )  # fmt: skip
    parser.add_argument(
        "--prefill", type=positive, metavar="N",
        help="workers that compute prompts and hand them over; needs --decode",
    )  # fmt: skip
    parser.add_argument("--decode", type=positive, metavar="M", help="workers that continue them")
    parser.add_argument("--model", default="tinypy", help="bundled name, folder or hub id")
    parser.add_argument("--address", help="of a Ray cluster (default: a Ray on this machine)")
    parser.add_argument(
        "--routing", choices=ROUTINGS, metavar="POLICY", default="by-own-prefix",
        help=f"one of {', '.join(ROUTINGS)} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--num-blocks", type=positive, default=512, help="of each worker's pool")
    parser.add_argument(
        "--store", default=os.environ.get("MINIKV_STORE"), metavar="URL",
        help="of a Valkey or Redis server; one with a password is better put into MINIKV_STORE",
    )  # fmt: skip
    parser.add_argument("--max-requests", type=positive, help="at a time (default: 64 per worker)")
    parser.add_argument("--token-file", type=Path, help="has what requests must show")
    parser.add_argument("--host", default="127.0.0.1", help="to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: any (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """0 after Control-C or SIGTERM; 2 if it cannot start, saying why."""
    policy = EVERY_POLICY[args.routing.replace("-", " ")]
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    try:
        token = given_token(args.token_file)
        at_first, most, num_prefill = numbers_of(args)
        config = minikv.EngineConfig(
            num_blocks=args.num_blocks,
            store=args.store,
            host_blocks=args.num_blocks if args.store is not None else 0,  # fetched by way of it
        )
        with (
            ray_workers(most, args.model, config, address=args.address) as workers,
            Front(workers, policy, args.max_requests, at_first, num_prefill) as front,
            Server(front, args.model, args.host, args.port, token) as server,
        ):
            threading.Thread(target=server.serve_forever, daemon=True).start()
            print(f"http://{args.host}:{server.server_port}/v1/completions", flush=True)
            if not token:
                print(f"Authorization: Bearer {server.token}", flush=True)
            over.wait()
            server.shutdown()
    except (ImportError, OSError, RuntimeError, ValueError, WorkerLost) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def from_to(text: str) -> tuple[int, int]:
    """An argument such as 4, or 1:4."""
    least, colon, most = text.partition(":")
    found = positive(least), positive(most if colon else least)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"must be in ascending order, was {text!r}")
    return found


def numbers_of(args: argparse.Namespace) -> tuple[int, int, int]:
    """(workers at first, at most, of which so many only compute prompts). Raises ValueError for
    options that do not go together."""
    if args.prefill is None and args.decode is None:
        return *(args.workers or (2, 2)), 0
    if args.prefill is None or args.decode is None:
        raise ValueError("--prefill and --decode: give both, or neither")
    if args.workers is not None:
        raise ValueError("--workers: the number is that of --prefill and --decode together")
    number = args.prefill + args.decode
    return number, number, args.prefill


def given_token(file: Path | None) -> str:
    """The file's token, or that of MINIKV_TOKEN; "" if there is neither."""
    if file is None:
        return os.environ.get("MINIKV_TOKEN", "")
    token = file.read_text().strip()
    if not token:
        raise ValueError(f"--token-file: {file} is empty")
    return token
