"""The server beside the engine without it, and beside llama.cpp's server.

All clients ask at once, greedily and for streams; they are one process (`server_clients`). A row
has the tokens per second from the first request to the last token, and two times of the clients:
from the request to the first token, and from one piece of a stream to the next. A piece may have
several tokens. The engine's own rate is that of `generate` with the same prompts.

Then one client asks for the same prompts one after the other, over one connection. What its first
tokens take, less what they take in the engine's own process, is what the front adds.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import minikv
from minikv.cluster.simulate import percentile
from minikv.course.arguments import positive
from minikv.course.bench import llama_cpp, server_clients
from minikv.course.bench.harness import Aim, BenchTable, Spread, bar, over
from minikv.course.bench.peers import engine_for, ours, random_prompts
from minikv.course.workloads.timing import timed

PEER = "llama.cpp"
GOAL = 0.9  # of the engine's own tokens per second
ADDED = 2.0  # milliseconds until a first token
SHORT = 16  # new tokens of one client's requests


class Load(NamedTuple):
    """What the clients saw of one round."""

    rate: float  # tokens per second
    first: list[float]  # seconds
    gaps: list[float]
    num_errors: int  # requests that did not get all tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=positive, default=32, help="default: %(default)s")
    parser.add_argument("--prompt", type=positive, default=64, help="tokens; default: %(default)s")
    parser.add_argument("--tokens", type=positive, default=512, help="new; default: %(default)s")
    parser.add_argument("--peer", choices=(PEER,), help="pip install xllamacpp gguf")


def run(args: argparse.Namespace) -> BenchTable:
    lm = minikv.load("tinypy")
    lengths = [args.prompt + max(args.tokens, SHORT)] * args.clients
    params = minikv.SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    rounds = [
        random_prompts(lm, [args.prompt] * args.clients, seed) for seed in range(args.repeats + 1)
    ]
    ways = {"minikv": partial(our_server, lm, lengths)}
    if args.peer:
        ways[PEER] = partial(their_server, lengths)
    alone = engine_for(lm, lengths, prefix_cache=False)
    rates: list[float] = []
    firsts: list[tuple[float, float]] = []  # medians of a round: in the process, over HTTP
    loads: dict[str, list[Load]] = {way: [] for way in ways}
    with bar(len(rounds) * (1 + len(ways)), "server") as progress:
        for prompts in rounds:
            seconds, _ = timed(partial(ours, alone, prompts, params))
            rates.append(args.clients * args.tokens / seconds)
            progress.update()
            own = median(first_token(alone, prompt) for prompt in prompts)
            for way, start in ways.items():
                with start() as (host, port):
                    ask(host, port, [prompts[:1]], SHORT)  # compiles
                    loads[way].append(ask(host, port, [[one] for one in prompts], args.tokens))
                    if way == "minikv":
                        firsts.append((own, median(ask(host, port, [prompts], SHORT).first)))
                progress.update()
    notes = [f"{args.clients} clients, {args.prompt} prompt tokens, {args.tokens} new ones each"]
    table = BenchTable("server: streams over HTTP", args.repeats, notes)
    table.add({"way": "generate, no server", "tokens/s": Spread(rates[1:])})
    for way, found in loads.items():
        found = found[1:]  # the first round is the warm-up
        served = [one.rate for one in found]
        row = {"way": f"{way}'s server", "tokens/s": Spread(served)}
        row["over generate"] = over(served, rates[1:])
        for what, name in (("first", "first token"), ("gaps", "between pieces")):
            for percent in (50, 99):
                values = [1e3 * percentile(getattr(one, what), percent) for one in found]
                row[f"{name} P{percent}, ms"] = Spread(values)
        row["errors"] = sum(one.num_errors for one in found)
        table.add(row, Aim("over generate", ">=", GOAL) if way == "minikv" else None)
    firsts = firsts[1:]
    for at, way in enumerate(("no server", "minikv's server")):
        row = {"way": f"one client, {way}"}
        table.add(row | {"first token P50, ms": Spread([1e3 * one[at] for one in firsts])})
    row = {
        "way": "the front adds",
        "first token P50, ms": Spread([1e3 * (b - a) for a, b in firsts]),
    }
    table.add(row, Aim("first token P50, ms", "<=", ADDED))
    return table


def first_token(engine: minikv.Engine, prompt: list[int]) -> float:
    """Seconds, without a server."""
    started = perf_counter()
    request_id = engine.add_request(prompt, minikv.SamplingParams(SHORT, ignore_eos=True))
    [output] = engine.step()
    assert output.token_ids
    seconds = perf_counter() - started
    engine.abort(request_id)
    return seconds


def ask(host: str, port: int, clients: list[list[list[int]]], num_tokens: int) -> Load:
    """All clients at once; each asks for its prompts one after the other."""
    common = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True,
              "stream_options": {"include_usage": True}}  # fmt: skip
    bodies = [[{"prompt": one} | common for one in prompts] for prompts in clients]
    asked = {"host": host, "port": port, "clients": bodies}
    ran = subprocess.run(
        [sys.executable, server_clients.__file__], input=json.dumps(asked), capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    whole = [one for one in found if one["num_tokens"] == num_tokens]
    if not whole:
        raise ValueError(f"the server at {host}:{port} has answered none of {len(found)} requests")
    ends = [one["times"][-1] for one in whole]
    gaps = [after - before for one in whole for before, after in pairwise(one["times"])]
    return Load(
        len(whole) * num_tokens / (max(ends) - min(one["asked"] for one in found)),
        [one["times"][0] - one["asked"] for one in whole],
        gaps or [0.0],  # every answer came in one piece
        len(found) - len(whole),
    )


@contextmanager
def our_server(lm: minikv.LanguageModel, lengths: list[int]) -> Iterator[tuple[str, int]]:
    try:  # here, because the other benchmarks do without its packages
        from minikv.serving import EngineLoop
        from minikv.serving.app import make_app
        from minikv.serving.server import served
    except ImportError as error:
        raise ValueError(f'the server needs {error.name}: pip install "minikv[serve]"') from error
    engine = engine_for(lm, lengths, prefix_cache=False)
    with EngineLoop(engine) as loop, served(make_app(loop, "tinypy"), drain=1) as address:
        yield address


@contextmanager
def their_server(lengths: list[int]) -> Iterator[tuple[str, int]]:
    """In a process of its own, for its log."""
    command = [sys.executable, "-m", llama_cpp.__name__, str(len(lengths)), str(max(lengths))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()
            if not address:
                raise ValueError(llama_cpp.GONE)
            yield address[0], int(address[1])
        finally:
            process.kill()
