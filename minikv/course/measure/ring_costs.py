"""What a context shift and a fragmented ring cost in time."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

from minikv.course.measure.timing import timed
from minikv.language_model import LanguageModel
from minikv.ring import OutOfCells, RingCache, context_shift, defragment


class ShiftCosts(NamedTuple):
    """Seconds to have half of a full ring at its new positions."""

    turned: float  # K turned where it lies
    computed_again: float  # the same tokens through the model from scratch


def shift_costs(
    lm: LanguageModel, ids: Sequence[int], num_cells: int, repeats: int = 5
) -> ShiftCosts:
    """Both ways to go on after a full ring, the best of `repeats`. `ids` has num_cells tokens."""

    def turned() -> float:
        cache = RingCache(lm.config, num_cells)
        cache.append(lm, ids[:num_cells])
        context_shift(cache)
        return timed(cache.apply_shifts)[0]

    def computed_again() -> float:
        cache = RingCache(lm.config, num_cells)
        return timed(lambda: cache.append(lm, ids[num_cells // 2 : num_cells]))[0]

    return ShiftCosts(*(min(way() for _ in range(repeats)) for way in (turned, computed_again)))


class FragmentationCosts(NamedTuple):
    """A ring of which every other run of cells was freed: seconds, and what fits."""

    scattered_step: float  # one token, with the holes
    defragmentation: float  # closing all holes
    compact_step: float  # one token, without them
    fits_in_a_run: bool  # a batch of half the free cells, before defragmentation
    fits_by_index: bool  # the same batch, written by index
    by_index_batch: float  # its step
    in_a_run_batch: float  # the same batch in one run, after defragmentation


def fragmentation_costs(
    lm: LanguageModel, ids: Sequence[int], num_cells: int, run: int = 8, repeats: int = 5
) -> FragmentationCosts:
    """Two sequences lie in turns, `run` cells each; one ends. `ids` has num_cells tokens."""

    def fill(contiguous: bool) -> RingCache:
        cache = RingCache(lm.config, num_cells, contiguous=contiguous)
        for i in range(num_cells // run):
            half = ids[i // 2 * run : (i // 2 + 1) * run]
            cache.append(lm, half, seq=i % 2)
        cache.seq_rm(0)
        return cache

    filled = {contiguous: fill(contiguous) for contiguous in (True, False)}

    def ring(contiguous: bool) -> RingCache:
        return deepcopy(filled[contiguous])

    def best(work: Callable[[RingCache], Any], contiguous: bool, compact: bool) -> float:
        seconds = []
        for _ in range(repeats):
            cache = ring(contiguous)
            if compact:
                defragment(cache)
            seconds.append(timed(partial(work, cache))[0])
        return min(seconds)

    def fits(contiguous: bool) -> bool:
        try:
            batch(ring(contiguous))
        except OutOfCells:
            return False
        return True

    def step(cache: RingCache) -> None:
        cache.append(lm, ids[:1], seq=1)

    def batch(cache: RingCache) -> None:
        cache.append(lm, ids[: num_cells // 4], seq=1)

    return FragmentationCosts(
        scattered_step=best(step, contiguous=True, compact=False),
        defragmentation=best(defragment, contiguous=True, compact=False),
        compact_step=best(step, contiguous=True, compact=True),
        fits_in_a_run=fits(contiguous=True),
        fits_by_index=fits(contiguous=False),
        by_index_batch=best(batch, contiguous=False, compact=False),
        in_a_run_batch=best(batch, contiguous=True, compact=True),
    )
