"""Scores of one query, compiled by Numba: over keys in float32, and over int8 codes.

What chapter 09's kernels do in their innermost loop, and nothing else. Needs Numba.
"""

from collections.abc import Callable
from time import perf_counter

import numpy as np
from numba import njit

from minikv.cpu.compiler import FASTMATH


@njit(fastmath=FASTMATH, error_model="numpy", nogil=True)
def float_scores(q, keys, out):
    """q (D,), keys (T, D) float32 -> out (T,)"""
    for token in range(keys.shape[0]):
        score = np.float32(0)
        for channel in range(keys.shape[1]):
            score += q[channel] * keys[token, channel]
        out[token] = score


@njit(fastmath=FASTMATH, error_model="numpy", nogil=True)
def int8_scores(q, codes, scale, out):
    """q (D,), codes (T, D) int8, scale (T,) float32 -> out (T,)"""
    for token in range(codes.shape[0]):
        score = np.float32(0)
        for channel in range(codes.shape[1]):
            score += q[channel] * np.float32(codes[token, channel])
        out[token] = score * scale[token]


def seconds_by_context(contexts: list[int], dim: int = 64, turns: int = 9) -> dict[str, list]:
    """Seconds of one pass over the keys, by context: "float32" and "int8", in turns, the least of
    them. What else the machine does can only make a pass slower."""
    draw = np.random.default_rng(0)
    q = draw.standard_normal(dim, dtype=np.float32)
    found: dict[str, list] = {"float32": [], "int8": []}
    for context in contexts:
        keys = draw.standard_normal((context, dim), dtype=np.float32)
        scale = np.abs(keys).max(1) / np.float32(127)
        codes = np.round(keys / scale[:, None]).astype(np.int8)
        out = np.empty((2, context), dtype=np.float32)
        work: dict[str, Callable] = {
            "float32": lambda keys=keys, out=out: float_scores(q, keys, out[0]),
            "int8": lambda c=codes, s=scale, out=out: int8_scores(q, c, s, out[1]),
        }
        times: dict[str, list] = {name: [] for name in work}
        repeats = max(1, 100_000 // context)
        for turn in range(turns + 1):
            for name, run in work.items():
                started = perf_counter()
                for _ in range(repeats):
                    run()
                if turn:  # the first compiles, and warms up
                    times[name].append((perf_counter() - started) / repeats)
        bound = np.abs(q).sum() * scale / 2
        if not (np.abs(out[0] - out[1]) <= bound * 1.001 + 1e-4).all():
            raise AssertionError("a score is further off than its bound")
        for name in found:
            found[name].append(min(times[name]))
    return found
