"""A plain model of a prefix cache, with which the radix tree is compared."""

from collections.abc import Hashable, Sequence as Seq

Name = tuple[Hashable, tuple[int, ...]]  # (salt, the tokens up to the end of a block)


class PrefixModel:
    """What a prefix cache must do, as a dictionary of prefixes and nothing else.

    It knows no tree and no hash: an entry is the whole prefix up to the end of a block, with its
    salt. The oldest unlocked entry that is not the beginning of another is evicted first.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.blocks: dict[Name, int] = {}
        self.locks: dict[Name, int] = {}
        self._age: dict[Name, tuple[int, int]] = {}  # (last use of it or of an extension, -depth)
        self._clock = 0

    def names(self, token_ids: Seq[int], salt: Hashable = None) -> list[Name]:
        """The prefixes that end with a whole block, shortest first."""
        size = self.block_size
        ends = range(size, len(token_ids) + 1, size)
        return [(salt, tuple(token_ids[:end])) for end in ends]

    def cached(self, token_ids: Seq[int], salt: Hashable = None) -> list[Name]:
        """Those of them that are there, up to the first that is not."""
        names = self.names(token_ids, salt)
        missing = (place for place, name in enumerate(names) if name not in self.blocks)
        return names[: next(missing, len(names))]

    def match(self, token_ids: Seq[int], salt: Hashable = None) -> list[int]:
        """The blocks of the longest cached prefix, made the most recently used."""
        names = self.cached(token_ids, salt)
        self._touch(names)
        return [self.blocks[name] for name in names]

    def insert(self, token_ids: Seq[int], block_ids: Seq[int], salt: Hashable = None) -> list[int]:
        """Cache what is not there yet; the blocks that are there then, most recently used."""
        names = self.names(token_ids, salt)
        for name, block_id in zip(names, block_ids, strict=False):
            self.blocks.setdefault(name, block_id)
            self.locks.setdefault(name, 0)
        self._touch(names)
        return [self.blocks[name] for name in names]

    def lock(self, names: Seq[Name]) -> None:
        for name in names:
            self.locks[name] += 1

    def unlock(self, names: Seq[Name]) -> None:
        """Undo one lock. Entries that are unlocked by it become the most recently used."""
        for name in names:
            self.locks[name] -= 1
        self._touch([name for name in names if self.locks[name] == 0])

    def evict(self, num_blocks: int) -> list[int]:
        """The blocks that go, in order."""
        gone: list[int] = []
        while len(gone) < num_blocks:
            inner = {(salt, prefix[: -self.block_size]) for salt, prefix in self.blocks}
            leaves = [n for n in self.blocks if n not in inner and not self.locks[n]]
            if not leaves:
                break
            oldest = min(leaves, key=self._age.__getitem__)
            gone.append(self.blocks.pop(oldest))
            del self.locks[oldest], self._age[oldest]
        return gone

    def clear(self) -> None:
        self.blocks.clear()
        self.locks.clear()
        self._age.clear()

    @property
    def num_evictable(self) -> int:
        return sum(count == 0 for count in self.locks.values())

    def _touch(self, names: Seq[Name]) -> None:
        self._clock += 1
        for name in names:
            self._age[name] = self._clock, -len(name[1])
