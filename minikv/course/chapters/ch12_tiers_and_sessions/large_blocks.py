"""Large blocks on a disk: what a cold prefix gains if several of its blocks are one entry.

    streams = ids_of_jobs(conversations(lm, 200, turns=6, real_answers=False))
    found = kept_as(streams, length=4, room=2000)        # 4 small blocks per large one
    found.found, found.entries, found.reads              # what it finds, and how often it reads
    found.seconds(per_entry=0.02, per_block=1e-4)        # to bring a returning prefix back

    a prefix      |0 1 2 3|4 5 6 7|8 9      4 per large block: two large ones, and its edge
    another       |0 1 2 3|4 5 10 11|       it parts from the first within the second large block

There is no model and no device: every prompt is looked up on the disk, and then written to it. A
large block is found by prompts that have all of it, because its name is that of its last tokens. So
the edge of a prefix stays small, and so does a large block in which two prefixes are known to part.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from minikv.course.chapters.ch07_radix_prefix_cache.hit_rate import Ids
from minikv.tiers.disk import DiskTier

Entry = tuple[int, int]  # the id of its last block, and how many blocks it has


class LargeBlocks:
    """A disk with room for so many small blocks, whose entries have one block or `length`."""

    def __init__(self, length: int, room: int):
        self.length, self.room = length, room
        self.entries: OrderedDict[Entry, None] = OrderedDict()  # the least recently used first
        self.blocks = 0  # in all entries
        self.next_ids: dict[int, int] = {}  # by block, the first successor seen
        self.branches: set[int] = set()  # blocks with more than one successor

    def serve(self, ids: Ids) -> tuple[int, int]:
        """(blocks found, entries read for them); then the disk has the whole prompt."""
        used = self._find(ids)
        found = sum(size for _, size in used)
        for before, after in pairwise(ids):
            if self.next_ids.setdefault(before, after) != after:
                self.branches.add(before)
        for entry in reversed([*used, *self._pack(ids, found)]):  # a prompt loses its end first
            self._use(entry)
        return found, len(used)

    def _find(self, ids: Ids) -> list[Entry]:
        """The entries of a prefix, up to the first block that none of them has."""
        used: list[Entry] = []
        place = 0
        while place < len(ids):
            end = place + self.length
            large = (ids[end - 1], self.length) if end <= len(ids) else None
            small = ids[place], 1
            if place % self.length == 0 and large is not None and large in self.entries:
                used.append(large)
            elif small in self.entries:
                used.append(small)
            else:
                break
            place += used[-1][1]
        return used

    def _pack(self, ids: Ids, found: int) -> list[Entry]:
        """The entries to write for the blocks from the first one that was not found."""
        entries: list[Entry] = []
        for start in range(found - found % self.length, len(ids), self.length):
            group = ids[start : start + self.length]
            is_whole = len(group) == self.length and not self.branches.intersection(group[:-1])
            if is_whole:
                entries.append((group[-1], self.length))
            else:
                entries += [(one, 1) for one in group[max(0, found - start) :]]
        return entries

    def _use(self, entry: Entry) -> None:
        if entry not in self.entries:
            self.blocks += entry[1]
            while self.blocks > self.room and self.entries:
                self.blocks -= self.entries.popitem(last=False)[0][1]
        self.entries[entry] = None
        self.entries.move_to_end(entry)


class Kept(NamedTuple):
    """What a disk of large blocks has done."""

    found: float  # share of all blocks asked for
    entries: int  # on the disk at the end
    blocks: float  # found per returning prefix
    reads: float  # entries read per returning prefix

    def seconds(self, per_entry: float, per_block: float) -> float:
        """To read a returning prefix, one entry after the other."""
        return self.reads * per_entry + self.blocks * per_block


def kept_as(streams: Sequence[Ids], length: int, room: int) -> Kept:
    """Serve all prompts from an empty disk with room for `room` small blocks. A returning prefix is
    one of which something is found."""
    disk = LargeBlocks(length, room)
    served = [disk.serve(ids) for ids in streams]
    returning = [(found, reads) for found, reads in served if found]
    found, reads = (sum(part) for part in zip(*returning, strict=True))
    return Kept(
        found / sum(map(len, streams)), len(disk.entries), found / len(returning),
        reads / len(returning),
    )  # fmt: skip


def measure_entries(folder: str | Path, block_bytes: int, repeats: int = 9) -> tuple[float, float]:
    """(seconds per entry, seconds per block) of the engine's disk tier in this folder: the same
    bytes are read as 64 entries of one block, and as 4 entries of 16. The least of some repeats;
    the system may have all of it in memory."""
    disk, seconds = DiskTier(folder, 1 << 30), {}
    for length in (1, 16):
        names = [bytes([length, i]) * 16 for i in range(64 // length)]
        disk.put_many(dict.fromkeys(names, bytes(length * block_bytes)))
        times = []
        for _ in range(repeats):
            started = perf_counter()
            disk.get_many(names)
            times.append(perf_counter() - started)
        seconds[length] = min(times)
    disk.close()
    per_entry = max(0.0, (seconds[1] - seconds[16]) / (64 - 4))
    return per_entry, max(0.0, seconds[16] - 4 * per_entry) / 64
