"""The table that every chapter ends with: each rung so far, on one workload, in this very run.

A rung is a way to generate greedily. All rungs must give the same tokens, or there is no table.
"""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from minikv.config import EngineConfig
from minikv.engine import Engine
from minikv.kv_cache import ConcatCache, PreallocatedCache
from minikv.loader import LanguageModel
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


@dataclass(frozen=True)
class Run:
    """One run of one rung."""

    token_ids: list[int]
    seconds: float
    kv_bytes_per_token: int  # kept from one step to the next; 0: nothing is kept
    wasted: float | None  # share of the reserved token slots that held no token, mean over steps


def run_naive(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """Chapter 01: nothing is kept, everything is computed at every step."""
    started = perf_counter()
    token_ids = lm.generate_naively(prompt_ids, max_tokens)
    return Run(token_ids, perf_counter() - started, 0, None)


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


def run_concat(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """Chapter 02: every step copies all that is kept."""
    return run_cache(lm, prompt_ids, max_tokens, ConcatCache(lm.config), None)


def run_preallocated(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """Chapter 02: written in place, into room for the model's whole context."""
    return _run_reserved(lm, prompt_ids, max_tokens, lm.config.max_context)


def run_limited(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """Chapter 03: the same with room for the longest answer that was asked for. Its last token
    is never stored."""
    return _run_reserved(lm, prompt_ids, max_tokens, len(prompt_ids) + max_tokens - 1)


def _run_reserved(lm: LanguageModel, prompt_ids: list[int], max_tokens: int, capacity: int) -> Run:
    cache = PreallocatedCache(lm.config, capacity, lm.dtype, lm.device)
    return run_cache(lm, prompt_ids, max_tokens, cache, capacity)


def run_engine(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """The whole engine, with an empty prefix cache. What is reserved are the blocks in use."""
    engine = Engine(lm, EngineConfig(prefix_cache=False))
    started = perf_counter()
    engine.add_request(prompt_ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    after_step = []
    while engine.has_unfinished:
        [output] = engine.step()
        after_step.append(engine.stats())
    seconds = perf_counter() - started
    reserved = [stats.blocks_used * engine.config.block_size for stats in after_step[:-1]]
    held = [stats.computed_tokens for stats in after_step[:-1]]  # the last step gave all back
    wasted = 1 - sum(held) / sum(reserved) if reserved else None
    return Run(output.token_ids, seconds, lm.config.kv_bytes_per_token(lm.dtype), wasted)


RUNGS: dict[str, tuple[str, Callable[[LanguageModel, list[int], int], Run]]] = {
    # name: (the chapter that adds it, how it runs)
    "01 naive attention": ("01", run_naive),
    "02 cache that grows by copying": ("02", run_concat),
    "02 cache for the whole context": ("02", run_preallocated),
    "03 cache for the longest answer": ("03", run_limited),
    "04 paged blocks, in the engine": ("04", run_engine),
}


class RunningTable:
    """Tokens a second, bytes a token and memory wasted, for each rung, measured as it is made.

    `upto`: the chapter whose rung is the last; without it, the first and the last rung there
    are. Raises AssertionError if two rungs give different tokens.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompt: str = WORKLOAD,
        max_tokens: int = 32,
        repeats: int = 3,
        upto: str | None = None,
    ):
        prompt_ids = lm.encode(prompt)
        self.caption = (
            f"One request, {len(prompt_ids)} prompt tokens, {max_tokens} new ones, greedy; "
            f"median of {repeats} runs (slowest to fastest). {lm.name}, {machine(lm)}."
        )
        names = [name for name, (chapter, _) in RUNGS.items() if upto and chapter <= upto]
        names = names or [next(iter(RUNGS)), next(reversed(RUNGS))]
        self.runs: dict[str, list[Run]] = {}
        for rung in names:
            run = RUNGS[rung][1]
            run(lm, prompt_ids, 2)  # not counted: the first run of anything is slower
            self.runs[rung] = [run(lm, prompt_ids, max_tokens) for _ in range(repeats)]
        expected = next(iter(self.runs.values()))[0].token_ids
        for rung, runs in self.runs.items():
            for run in runs:
                if run.token_ids != expected:
                    raise AssertionError(f"{rung} gives other tokens than naive attention")

    def rows(self) -> list[tuple[str, str, str, str]]:
        """The table's text, with its header."""
        table = [("rung", "tokens a second", "bytes a token", "memory wasted")]
        for rung, runs in self.runs.items():
            speeds = sorted(len(run.token_ids) / run.seconds for run in runs)
            kept, wasted = runs[0].kv_bytes_per_token, runs[0].wasted
            table.append(
                (
                    rung,
                    f"{median(speeds):,.0f} ({speeds[0]:,.0f} to {speeds[-1]:,.0f})",
                    f"{kept:,}" if kept else "none kept",
                    f"{wasted:.1%}" if wasted is not None else "–",
                )
            )
        return table

    def __repr__(self) -> str:
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, "", self.caption])

    def _repr_html_(self) -> str:
        head, *body = self.rows()

        def line(row: tuple[str, ...], tag: str) -> str:
            sides = ["left"] + ["right"] * (len(row) - 1)
            return "".join(
                f"<{tag} style='text-align:{side}'>{escape(cell)}</{tag}>"
                for side, cell in zip(sides, row, strict=True)
            )

        lines = "".join(f"<tr>{line(row, 'td')}</tr>" for row in body)
        return (
            f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>{lines}</tbody></table>"
            f"<p>{escape(self.caption)}</p>"
        )


def machine(lm: LanguageModel | None = None) -> str:
    """What a measurement depends on: processor, threads, versions and number format."""
    parts = [_processor(), f"{torch.get_num_threads()} of {os.cpu_count()} cores"]
    if lm is not None:
        if lm.device.type == "cuda":
            parts.insert(0, torch.cuda.get_device_name(lm.device))
        parts.append(str(lm.dtype).removeprefix("torch."))
    parts += [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    return ", ".join(parts)


def _processor() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
