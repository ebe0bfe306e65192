"""What a cache saves, on a clock: both ways to generate in turns."""

from time import perf_counter

import torch

from minikv.course.workloads.timing import REPEATS
from minikv.kv_cache import ConcatCache
from minikv.language_model import LanguageModel


def clock_steps(
    lm: LanguageModel, cache: ConcatCache | None, prompt_ids: list[int], count: int
) -> tuple[list[int], list[float]]:
    """(new tokens, seconds that each took); without a cache all tokens are fed again."""
    new_ids: list[int] = []
    fed, seconds = list(prompt_ids), []
    for _ in range(count):
        started = perf_counter()
        new_ids.append(int(lm.logits(fed, cache)[-1].argmax()))
        seconds.append(perf_counter() - started)
        fed = [*prompt_ids, *new_ids] if cache is None else new_ids[-1:]
    return new_ids, seconds


def times_faster(lm: LanguageModel, prompt_ids: list[int], count: int) -> torch.Tensor:
    """Time without a cache over time with one, from the start to each new token, (count,).

    Of each step the fastest of some runs counts, for other programs only add time; the first run
    of each kind warms up. Raises AssertionError if the two do not write the same tokens.
    """
    fastest = torch.full((2, count), torch.inf)
    for turn in range(REPEATS + 1):
        new = count if turn else 4
        slow_ids, slow = clock_steps(lm, None, prompt_ids, new)
        fast_ids, fast = clock_steps(lm, ConcatCache(lm.config), prompt_ids, new)
        if slow_ids != fast_ids:
            raise AssertionError(f"without a cache: {slow_ids}, with one: {fast_ids}")
        if turn:
            fastest = fastest.minimum(torch.tensor([slow, fast]))
    without, with_one = fastest.cumsum(1)
    return without / with_one
