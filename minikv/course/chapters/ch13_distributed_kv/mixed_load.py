"""What prefill apart is worth: two real workers under mixed load, with and without the split."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from minikv.cluster.front import Front, RequestFailed, Stream, WorkerLost
from minikv.cluster.routing import ByOwnPrefix
from minikv.cluster.simulate import percentile
from minikv.config import EngineConfig
from minikv.course.workloads.workload import write_code
from minikv.language_model import LanguageModel
from minikv.sampling import SamplingParams

CONFIG = EngineConfig(num_blocks=1024, attention="torch")
WAYS = {"both do both": 0, "one prefills, one decodes": 1}  # workers that only compute prompts
PROMPT, OUTPUT, PAUSE = 768, 8, 0.4  # of those that arrive: tokens, tokens, seconds between them
READER_PROMPT = 32  # tokens
MOST = 4  # of them at a time
READERS, READ = 6, 100  # requests that decode all the while, and their tokens


class Times(NamedTuple):
    """In seconds."""

    first: list[float]  # from a long prompt's arrival to its first token
    between: list[float]  # the tokens of the requests that decode


def measured(
    lm: LanguageModel, rounds: int = 2, deadline: float = 240.0, workers: Any = None
) -> dict[str, Times]:
    """Times by way: both in turns, `rounds` times each. Every round has other texts, and a way's
    first round, in which everything is warmed up, does not count. workers: a context manager that
    starts two; default: on Ray. Raises ImportError without Ray; RuntimeError, saying why, if the
    workers do not start, or `deadline` seconds are over."""
    end = time.monotonic() + deadline
    found = {way: Times([], []) for way in WAYS}
    try:
        with workers or ray_pair() as pair:
            for number in range(1 + rounds):
                for way, num_prefill in WAYS.items():
                    with Front(pair, ByOwnPrefix, num_prefill=num_prefill) as front:
                        times = under_load(front, partial(text, lm, number, way), end)
                    if number > 0:
                        found[way].first.extend(times.first)
                        found[way].between.extend(times.between)
    except (WorkerLost, RequestFailed) as error:
        raise RuntimeError(f"the workers do not work here: {error}") from error
    return found


@contextmanager
def ray_pair() -> Iterator[list[Any]]:
    """Two workers on Ray. A call is one step: each token comes as soon as it is there."""
    from minikv.cluster.actors import ray_workers  # here, because only this needs Ray

    with ray_workers(2, "tinypy", CONFIG, work_seconds=0.0) as workers:
        yield workers


def text(lm: LanguageModel, number: int, way: str, what: str, num_tokens: int) -> list[int]:
    return write_code(lm, num_tokens, f"{what}, turn {number}, {way}")


def under_load(front: Front, prompt: Callable[[str, int], list[int]], end: float) -> Times:
    """Some requests decode. Until they are done, one long prompt after the other arrives."""
    reading = SamplingParams(READ, ignore_eos=True)
    readers = [Reader(front.submit(prompt(f"{i}", READER_PROMPT), reading)) for i in range(READERS)]
    arrived: list[Reader] = []
    while time.monotonic() < end and (not arrived or any(one.is_alive() for one in readers)):
        if sum(one.is_alive() for one in arrived) < MOST:
            ids = prompt(f"long {len(arrived)}", PROMPT)
            arrived.append(Reader(front.submit(ids, SamplingParams(OUTPUT, ignore_eos=True))))
        time.sleep(PAUSE)
    for reader in (*readers, *arrived):
        reader.join(max(0.0, end - time.monotonic()))
        if reader.is_alive():
            raise RuntimeError("the time for this measurement is over: the machine is too busy")
        if reader.error is not None:
            raise reader.error
    first = [reader.at[0] - reader.stream.times[0] for reader in arrived]
    gaps = [b - a for one in readers for a, b in zip(one.at, one.at[1:], strict=False)]
    return Times(first, gaps)


class Reader(threading.Thread):
    """Notes when each token of a stream comes; `error` is why it ended early."""

    def __init__(self, stream: Stream):
        super().__init__(daemon=True)
        self.stream, self.at = stream, list[float]()
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for delta in self.stream:
                self.at += [time.monotonic()] * len(delta.token_ids)
        except Exception as error:
            self.error = error


def rows(found: dict[str, Times]) -> list[str]:
    """As lines of text, with their header."""
    lines = [f"{'':28}first token P50    P99    between tokens P50    P99    longest"]
    for way, (first, between) in found.items():
        figures = [
            1e3 * one
            for one in (
                percentile(first, 50), percentile(first, 99),
                percentile(between, 50), percentile(between, 99), max(between),
            )
        ]  # fmt: skip
        widths = 12, 7, 19, 7, 8
        cells = [f"{one:{width}.0f} ms" for one, width in zip(figures, widths, strict=True)]
        lines.append(f"{way:28}" + "".join(cells))
    return lines
