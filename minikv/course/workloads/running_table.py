"""The table that every chapter ends with: each rung so far, on one workload, in this very run.

A rung is a way to generate greedily. All rungs must give the same tokens, or there is no table.
Each shows the way that its chapter builds, so the rungs in the engine name their attention. Up to
chapter 07 that is PyTorch's.
"""

import os
import platform
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from minikv.config import EngineConfig
from minikv.course.chapters import each
from minikv.course.pictures.table import Table
from minikv.course.workloads.timing import REPEATS, full_size
from minikv.engine import Engine
from minikv.kv_cache import PreallocatedCache
from minikv.language_model import LanguageModel
from minikv.sampling import SamplingParams

# The prompt of every notebook's table, so that their lines can be compared.
WORKLOAD = '''"""Tickets, handed out in the order of their numbers."""

import heapq


class TicketQueue:
    """Keeps tickets; the smallest number leaves first."""

    def __init__(self, tickets=()):
        self.tickets = list(tickets)
        heapq.heapify(self.tickets)

    def push(self, ticket):
        """Add a ticket."""
        heapq.heappush(self.tickets, ticket)

    def pop(self):
        """Remove the smallest ticket and return it."""
'''


TOGETHER = 8  # how often the request is asked for at once, on the rungs about company
NEW_TOKENS = full_size(32, trial=4)


@dataclass(frozen=True)
class Run:
    """One run of one rung."""

    token_ids: list[int]
    seconds: float
    kv_bytes_per_token: int  # kept from one step to the next, of each token of each sequence
    wasted: float | None  # share of the reserved token slots that held no token, mean over steps
    answers: int = 1  # so many times these tokens were generated


def run_cache(
    lm: LanguageModel, prompt_ids: list[int], max_tokens: int, cache, capacity: int | None
) -> Run:
    """Chapters 02 and 03: one sequence's own cache. `capacity`: token slots that it reserves;
    None for one that grows."""
    started = perf_counter()
    token_ids, new = [], prompt_ids
    held = reserved = 0
    for _ in range(max_tokens):
        new = [int(lm.logits(new, cache)[-1].argmax())]
        token_ids += new
        held += cache.num_tokens
        reserved += cache.num_tokens if capacity is None else capacity
    seconds = perf_counter() - started
    return Run(token_ids, seconds, lm.config.kv_bytes_per_token(lm.dtype), 1 - held / reserved)


def run_reserved(lm: LanguageModel, prompt_ids: list[int], max_tokens: int, capacity: int) -> Run:
    """A cache that is written in place, with room for `capacity` tokens."""
    cache = PreallocatedCache(lm.config, capacity, lm.dtype, lm.device)
    return run_cache(lm, prompt_ids, max_tokens, cache, capacity)


def run_in_engine(
    lm: LanguageModel, prompt_ids: list[int], max_tokens: int,
    requests: int = 1, samples: int = 1, asked_before: bool = False, attention: str = "torch",
    kv_dtype: str = "auto", speculative: str = "off",
) -> Run:  # fmt: skip
    """Chapters 04 and later: in the engine. `attention` is PyTorch's, whatever would be fastest on
    this machine, unless the rung is about kernels."""
    config = EngineConfig(
        prefix_cache=asked_before, attention=attention, kv_dtype=kv_dtype, kv_groups="one",
        speculative=speculative,
    )  # fmt: skip
    engine = Engine(lm, config)
    if asked_before:
        engine.generate(prompt_ids, SamplingParams(max_tokens=1))
    return run_on(engine, prompt_ids, max_tokens, requests, samples)


def run_on(
    engine: Engine, prompt_ids: list[int], max_tokens: int, requests: int = 1, samples: int = 1
) -> Run:
    """The same on an engine that may have something of the prompt already."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=samples)
    outputs, counts, seconds = [], [], 0.0
    for _ in range(requests):
        engine.add_request(prompt_ids, params)
    while engine.has_unfinished:
        started = perf_counter()
        outputs = list(engine.step())
        seconds += perf_counter() - started
        counts.append(_slots(engine))  # not in the engine's time
    found = [sample.token_ids for output in outputs for sample in output.samples]
    if any(token_ids != found[0] for token_ids in found):
        raise AssertionError(f"equal requests, greedy, and different tokens: {found}")
    # The last step gave all back. With a single token there is no other, and nothing to count.
    seen, stored, reserved = (sum(count[i] for count in counts[:-1]) for i in range(3))
    return Run(
        found[0],
        seconds,
        round(engine.store.bytes_per_token * (stored / seen if seen else 1)),
        1 - stored / reserved if reserved else None,
        len(found),
    )


def _slots(engine: Engine) -> tuple[int, int, int]:
    """(tokens that the running sequences have stored, slots that these take, slots reserved)."""
    size, seen = engine.config.block_size, 0
    filled: dict[int, int] = {}  # by block id
    for sequence in engine.scheduler.running:
        seen += sequence.num_computed
        for index, block_id in enumerate(sequence.table.block_ids):
            count = max(0, min(size, sequence.num_computed - index * size))
            filled[block_id] = max(count, filled.get(block_id, 0))
    return seen, sum(filled.values()), size * len(filled)


@dataclass(frozen=True)
class Rung:
    """One line of the table. A chapter's `rung.py` says them: `RUNS`, name -> how it runs, and
    `why_not(lm)`, if there are machines or models that say nothing about it."""

    chapter: str
    run: Callable[[LanguageModel, list[int], int], Run]
    why_not: Callable[[LanguageModel], str]  # "" where it is measured


@cache
def rungs() -> dict[str, Rung]:
    """Every rung of every chapter by its name, in order."""
    return {
        f"{number} {name}": Rung(number, run, getattr(module, "why_not", lambda lm: ""))
        for number, module in each("rung")
        for name, run in module.RUNS.items()
    }


class RunningTable(Table):
    """Tokens per second, bytes per token and memory wasted, for each rung, measured as it is made.

    `upto`: the chapter whose rung is the last. `only`: chapters, if not all up to there.
    `enough`: a rung whose first run takes so many seconds is not run again.
    Raises AssertionError if two rungs give different tokens.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompt: str = WORKLOAD,
        max_tokens: int = NEW_TOKENS,
        repeats: int = REPEATS,
        upto: str = "99",
        only: Collection[str] = (),
        enough: float = 0.5,
    ):
        prompt_ids = lm.encode(prompt)
        chosen = {
            name: rung
            for name, rung in rungs().items()
            if rung.chapter <= upto and (not only or rung.chapter in only)
        }
        self.runs: dict[str, list[Run]] = {}
        self.missing: dict[str, str] = {}
        company = ""
        for name, rung in chosen.items():
            if why := rung.why_not(lm):
                self.missing[name] = why
                continue
            if repeats > 1:  # not counted: the first run of anything is slower
                rung.run(lm, prompt_ids, 2)
            self.runs[name] = [rung.run(lm, prompt_ids, max_tokens)]
            if self.runs[name][0].seconds < enough:
                more = range(repeats - 1)
                self.runs[name] += [rung.run(lm, prompt_ids, max_tokens) for _ in more]
            if self.runs[name][0].answers > 1 and not company:
                company = f", from {rung.chapter} on {self.runs[name][0].answers} times at once"
        once = any(len(runs) < repeats for runs in self.runs.values())
        slow = f", one run if it takes {enough} s or more" if once else ""
        self.caption = (
            f"One request, {len(prompt_ids)} prompt tokens, {max_tokens} new ones, greedy"
            f"{company}; median of {repeats} runs (slowest to fastest){slow}. "
            f"{lm.name}, {machine(lm)}."
            + "".join(f" Not in the table: {name} ({why})." for name, why in self.missing.items())
        )
        expected = next(iter(self.runs.values()))[0].token_ids
        for name, runs in self.runs.items():
            for run in runs:
                if run.token_ids != expected:
                    raise AssertionError(f"{name} gives other tokens than naive attention")

    def rows(self) -> list[tuple[str, ...]]:
        """The table's text, with its header. Speeds of two days differ by more than those of two
        rungs, so each is also told relative to rung 04, where that is in the table."""
        table: list[tuple[str, ...]] = [
            ("rung", "tokens per second", "bytes per token", "memory wasted")
        ]
        found = {rung: self._speeds(rung) for rung in self.runs}
        base = next((median(found[rung]) for rung in found if rung.startswith("04 ")), None)
        if base is not None:
            table[0] += ("speed, rung 04 = 1",)
        for rung, runs in self.runs.items():
            speeds = found[rung]
            spread = f" ({speeds[0]:,.0f} to {speeds[-1]:,.0f})"
            kept, wasted = runs[0].kv_bytes_per_token, runs[0].wasted
            table.append(
                (
                    rung,
                    f"{median(speeds):,.0f}" + (spread if len(speeds) > 1 else ""),
                    f"{kept:,}" if kept else "none kept",
                    f"{wasted:.1%}" if wasted is not None else "–",
                )
            )
            if base is not None:
                table[-1] += (f"{median(speeds) / base:.2g}",)
        return table

    def _speeds(self, rung: str) -> list[float]:
        """Tokens per second of each run, the slowest first."""
        return sorted(run.answers * len(run.token_ids) / run.seconds for run in self.runs[rung])


def machine(lm: LanguageModel | None = None) -> str:
    """What a measurement depends on: processor, threads, versions and number format."""
    parts = [processor(), f"{torch.get_num_threads()} of {os.cpu_count()} cores"]
    if lm is not None:
        if lm.device.type == "cuda":
            parts.insert(0, torch.cuda.get_device_name(lm.device))
        parts.append(str(lm.dtype).removeprefix("torch."))
    parts += [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    return ", ".join(parts)


def processor() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
