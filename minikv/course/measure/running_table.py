"""The table that every chapter ends with: each rung so far, on one workload, in this very run.

A rung is a way to generate greedily. All rungs must give the same tokens, or there is no table.
"""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from minikv.config import EngineConfig
from minikv.course.pictures.table import Table
from minikv.engine import Engine
from minikv.kv_cache import ConcatCache, PreallocatedCache
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


@dataclass(frozen=True)
class Run:
    """One run of one rung."""

    token_ids: list[int]
    seconds: float
    kv_bytes_per_token: int  # kept from one step to the next, of each token of each sequence
    wasted: float | None  # share of the reserved token slots that held no token, mean over steps
    answers: int = 1  # so many times these tokens were generated


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
    """Chapter 04: the whole engine. What is reserved are the blocks in use."""
    return _run_in_engine(lm, prompt_ids, max_tokens)


def run_samples(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """Chapter 05: several samples of one request share its prompt's blocks."""
    return _run_in_engine(lm, prompt_ids, max_tokens, samples=TOGETHER)


def run_together(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """Chapter 06: several requests in one batch, each with blocks of its own."""
    return _run_in_engine(lm, prompt_ids, max_tokens, requests=TOGETHER)


def run_again(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """Chapter 07: the same, and somebody has asked before: the prompt is in the prefix cache."""
    return _run_in_engine(lm, prompt_ids, max_tokens, requests=TOGETHER, asked_before=True)


def run_kernels(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """Chapter 08: the same with Triton's kernels, on a GPU: see `not_measured`."""
    return _run_in_engine(
        lm, prompt_ids, max_tokens, requests=TOGETHER, asked_before=True, attention="triton"
    )


def _run_in_engine(
    lm: LanguageModel, prompt_ids: list[int], max_tokens: int,
    requests: int = 1, samples: int = 1, asked_before: bool = False, attention: str = "torch",
) -> Run:  # fmt: skip
    engine = Engine(lm, EngineConfig(prefix_cache=asked_before, attention=attention))
    if asked_before:
        engine.generate(prompt_ids, SamplingParams(max_tokens=1))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=samples)
    outputs, counts, seconds = [], [], 0.0
    for _ in range(requests):
        engine.add_request(prompt_ids, params)
    while engine.has_unfinished:
        started = perf_counter()
        outputs = engine.step()
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
        round(lm.config.kv_bytes_per_token(lm.dtype) * (stored / seen if seen else 1)),
        1 - stored / reserved if reserved else None,
        len(found),
    )


def _slots(engine: Engine) -> tuple[int, int, int]:
    """(tokens that the running sequences have stored, slots that these take, slots reserved)."""
    size, filled, seen = engine.config.block_size, {}, 0
    for sequence in engine.scheduler.running:
        seen += sequence.num_computed
        for index, block_id in enumerate(sequence.table.block_ids):
            count = max(0, min(size, sequence.num_computed - index * size))
            filled[block_id] = max(count, filled.get(block_id, 0))
    return seen, sum(filled.values()), size * len(filled)


RUNGS: dict[str, tuple[str, Callable[[LanguageModel, list[int], int], Run]]] = {
    # name: (the chapter that adds it, how it runs)
    "01 naive attention": ("01", run_naive),
    "02 cache that grows by copying": ("02", run_concat),
    "02 cache for the whole context": ("02", run_preallocated),
    "03 cache for the longest answer": ("03", run_limited),
    "04 paged blocks, in the engine": ("04", run_engine),
    f"05 {TOGETHER} samples, shared blocks": ("05", run_samples),
    f"06 {TOGETHER} requests, one batch": ("06", run_together),
    f"07 {TOGETHER} requests, prompt cached": ("07", run_again),
    f"08 {TOGETHER} requests, Triton kernels": ("08", run_kernels),
}


def not_measured(rung: str, lm: LanguageModel) -> str:
    """Why a rung is not measured with this model, "" if it is. Without a GPU kernels are
    interpreted, and how long that takes says nothing about them."""
    is_interpreted = RUNGS[rung][0] == "08" and lm.device.type != "cuda"
    return "not on a GPU: not measured" if is_interpreted else ""


class RunningTable(Table):
    """Tokens a second, bytes a token and memory wasted, for each rung, measured as it is made.

    `upto`: the chapter whose rung is the last; without it, the first and the last rung that
    can be measured. Raises AssertionError if two rungs give different tokens.
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
        names = [name for name, (chapter, _) in RUNGS.items() if upto and chapter <= upto]
        possible = [name for name in RUNGS if not not_measured(name, lm)]
        names = names or [possible[0], possible[-1]]
        company = ""
        if any(name[:2] > "04" for name in names):
            company = f", from 05 on {TOGETHER} times at once"
        self.caption = (
            f"One request, {len(prompt_ids)} prompt tokens, {max_tokens} new ones, greedy"
            f"{company}; median of {repeats} runs (slowest to fastest). {lm.name}, {machine(lm)}."
        )
        self.runs: dict[str, list[Run]] = {}
        self.missing = {rung: not_measured(rung, lm) for rung in names if rung not in possible}
        for rung in [name for name in names if name in possible]:
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
            speeds = sorted(run.answers * len(run.token_ids) / run.seconds for run in runs)
            kept, wasted = runs[0].kv_bytes_per_token, runs[0].wasted
            table.append(
                (
                    rung,
                    f"{median(speeds):,.0f} ({speeds[0]:,.0f} to {speeds[-1]:,.0f})",
                    f"{kept:,}" if kept else "none kept",
                    f"{wasted:.1%}" if wasted is not None else "–",
                )
            )
        return table + [(rung, why, "–", "–") for rung, why in self.missing.items()]


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
