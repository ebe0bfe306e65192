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
from minikv.loader import LanguageModel
from minikv.sampling import SamplingParams


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


RUNGS: dict[str, Callable[[LanguageModel, list[int], int], Run]] = {
    "naive attention (01)": run_naive,
    "the engine (04 to 07)": run_engine,
}


class RunningTable:
    """Tokens a second, bytes a token and memory wasted, for each rung, measured as it is made.

    Raises AssertionError if two rungs give different tokens.
    """

    def __init__(self, lm: LanguageModel, prompt: str, max_tokens: int, repeats: int = 5):
        prompt_ids = lm.encode(prompt)
        self.caption = (
            f"One request, {len(prompt_ids)} prompt tokens, {max_tokens} new ones, greedy; "
            f"median of {repeats} runs (slowest to fastest). {lm.name}, {machine(lm)}."
        )
        self.runs: dict[str, list[Run]] = {}
        for rung, run in RUNGS.items():
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
