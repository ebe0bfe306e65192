"""The run of all parts in one engine needs every part: each broken one is noticed there."""

import re

import pytest
from helpers import LocksOnlyAncestors
from thorough import thorough_after

import minikv
from minikv.course.chapters.ch04_paged_blocks import together


@pytest.fixture(scope="module")
def expected(lm):
    return together.expect(lm)


def test_the_reference_gets_through_and_every_part_was_needed(lm, expected):
    said = together.run(lm, expected)
    preemptions = [int(count) for count in re.findall(r"(\d+) preemptions", said)]
    hits = [int(share) for share in re.findall(r"(\d+)% of the prompt tokens", said)]
    [swaps] = re.findall(r"(\d+) by swap", said)
    assert min(preemptions) > 0 and min(hits) > 10 and int(swaps) > 0, said


class NoCopy(minikv.BlockTable):
    __slots__ = ()

    def writable_slot(self, position):
        index, offset = divmod(position, self.block_size)
        return self.block_ids[index] * self.block_size + offset, None


class ForkWithoutHolders(minikv.BlockTable):
    __slots__ = ()

    def fork(self):
        twin = type(self)(self.pool, self.block_size)
        twin.block_ids, twin.num_tokens = self.block_ids.copy(), self.num_tokens
        return twin


class LeakyTable(minikv.BlockTable):
    __slots__ = ()

    def release(self):
        self.block_ids, self.num_tokens = [], 0


class TwiceFree(minikv.BlockPool):
    def release(self, block_id):
        super().release(block_id)
        if self.ref_count(block_id) == 0:
            self._free.append(block_id)


class WholePromptHits(minikv.Scheduler):  # nothing is left to compute
    def look_up(self, sequence):
        if self.cache is None or sequence.host_block_ids is not None:
            return None
        match = self.cache.match(sequence.token_ids, sequence.request.params.cache_salt)
        return match if match.num_tokens > 0 else None


class KeepsItsOwnCopies(minikv.Scheduler):
    def share_full_blocks(self, sequence):
        before = list(sequence.table.block_ids)
        super().share_full_blocks(sequence)
        sequence.table.block_ids = before


class RemembersHits(minikv.Scheduler):  # of before an eviction
    def look_up(self, sequence):
        known = vars(self).setdefault("known", {})
        if sequence not in known:
            known[sequence] = super().look_up(sequence)
        return known[sequence]


@pytest.mark.parametrize(
    "part",
    thorough_after(0, [
        NoCopy, LeakyTable, RemembersHits, ForkWithoutHolders, TwiceFree, LocksOnlyAncestors,
        WholePromptHits, KeepsItsOwnCopies,
    ]),
    ids=lambda part: part.__name__,
)  # fmt: skip
def test_a_broken_part_is_noticed(lm, expected, monkeypatch, part):
    monkeypatch.setattr(minikv, part.__base__.__name__, part)
    with pytest.raises((AssertionError, ValueError, IndexError, RuntimeError, StopIteration)):
        together.run(lm, expected)


@pytest.mark.thorough
def test_beams_go_the_way_of_next_beams(lm, expected, monkeypatch):
    def next_beams(beams, chosen):  # the first parent's child, every time
        children = [beams[0].fork(index) for index in range(len(chosen))]
        for child, (_, token_id) in zip(children, chosen, strict=True):
            child.token_ids.append(token_id)
        for beam in beams:
            beam.table.release()
        return children

    monkeypatch.setattr(minikv.beam, "next_beams", next_beams)
    with pytest.raises(AssertionError, match="beam search"):
        together.run(lm, expected)
