"""A pool and some block tables at one moment, as plain data: what the viewer draws."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class SeenTable:
    """What one block table said."""

    block_ids: tuple[int, ...]
    num_tokens: int
    texts: tuple[str, ...] = ()  # of the tokens, as far as known


@dataclass(frozen=True)
class SeenBlock:
    """One physical block, as the pool and the tables have it. They may not agree."""

    id: int
    ref_count: int  # what the pool says
    named_by: tuple[str, ...]  # tables, in order; twice the same if it names the block twice
    slots: tuple[tuple[str, ...], ...]  # for each slot the tables that fill it
    state: str  # "used", "shared", "cached" (by a prefix cache alone), "held" (unseen), "free"
    warning: str  # "" while the count fits the tables


class Filled(dict[tuple[int, int], frozenset[str]]):
    """By (block id, offset), the tables that fill a slot; none if a prefix cache alone has it."""

    def __sub__(self, before: "Filled") -> frozenset[tuple[int, int]]:
        """The slots that are new: empty before, or somebody else's, and not shared since."""
        return frozenset(
            slot
            for slot, names in self.items()
            if slot not in before or (names and before[slot] and not names & before[slot])
        )


@dataclass(frozen=True)
class Snapshot:
    """A pool and some block tables at one moment."""

    words: str
    block_size: int
    num_free: int
    ref_counts: tuple[int, ...]  # by block id
    tables: Mapping[str, SeenTable]
    cached: frozenset[int] = frozenset()  # blocks that a prefix cache holds

    def filled(self, name: str, index: int) -> int:
        """How many slots of a table's logical block hold one of its tokens."""
        return max(0, min(self.block_size, self.tables[name].num_tokens - index * self.block_size))

    @cached_property
    def blocks(self) -> tuple[SeenBlock, ...]:
        """Every physical block of the pool."""
        named: dict[int, list[tuple[str, int]]] = {}
        for name, table in self.tables.items():
            for index, block_id in enumerate(table.block_ids):
                named.setdefault(block_id, []).append((name, self.filled(name, index)))
        return tuple(self._block(id_, named.get(id_, [])) for id_ in range(len(self.ref_counts)))

    def _block(self, block_id: int, named: list[tuple[str, int]]) -> SeenBlock:
        count = self.ref_counts[block_id]
        names = tuple(name for name, _ in named)
        slots = tuple(
            tuple(dict.fromkeys(name for name, filled in named if offset < filled))
            for offset in range(self.block_size)
        )
        if names:
            state = "shared" if len(names) > 1 else "used"
        elif block_id in self.cached:
            state = "cached"
        else:
            state = "held" if count else "free"
        warning, who = "", " and ".join(dict.fromkeys(names))
        if len(set(names)) < len(names):
            twice = " and ".join(name for name in dict.fromkeys(names) if names.count(name) > 1)
            warning = f"more than once in the table of {twice}"
        elif names and count == 0:
            warning = f"free, yet in the table of {who}"
        elif names and not 0 <= count - len(names) <= (block_id in self.cached):
            warning = f"count {count}, but in {counted(len(names), 'table')} here: {who}"
        return SeenBlock(block_id, count, names, slots, state, warning)

    @cached_property
    def filled_slots(self) -> "Filled":
        """Every slot that holds a token, or did when it was cached, and whose that is."""
        return Filled(
            ((block.id, offset), frozenset(names))
            for block in self.blocks
            for offset, names in enumerate(block.slots)
            if names or block.id in self.cached
        )

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Where the pool and the tables contradict each other: in a sound engine, nowhere."""
        found = [f"block {block.id}: {block.warning}" for block in self.blocks if block.warning]
        for name, table in self.tables.items():
            room = len(table.block_ids) * self.block_size
            if table.num_tokens > room:
                found.append(f"{name}: {counted(table.num_tokens, 'token')}, but room for {room}")
            for block_id in table.block_ids:
                if not 0 <= block_id < len(self.ref_counts):
                    found.append(f"{name}: names block {block_id}, which the pool does not have")
        uncounted = self.ref_counts.count(0)
        if self.num_free != uncounted:
            found.append(f"the pool says {self.num_free} are free, but {uncounted} have count 0")
        return tuple(found)

    def describe(self) -> str:
        """The picture in words."""
        parts = [f"{self.num_free} of {len(self.ref_counts)} blocks free."]
        for name, table in self.tables.items():
            blocks = ", ".join(
                f"{block_id} ({self.filled(name, index)} of {self.block_size} filled)"
                for index, block_id in enumerate(table.block_ids)
            )
            tokens = counted(table.num_tokens, "token")
            parts.append(
                f"{name}, {tokens}, in blocks {blocks}." if blocks else f"{name}, {tokens}."
            )
        for block in self.blocks:
            if block.state == "shared":
                who = " and ".join(dict.fromkeys(block.named_by))
                parts.append(f"Block {block.id} is shared by {who}, count {block.ref_count}.")
        unused = {"cached": "Cached and unused", "held": "In use, by no table here"}
        for state, meaning in unused.items():
            ids = [str(block.id) for block in self.blocks if block.state == state]
            if ids:
                parts.append(f"{meaning}: {', '.join(ids)}.")
        parts += [f"Warning: {warning}." for warning in self.warnings]
        return " ".join(parts)


def counted(count: float, thing: str, things: str = "") -> str:
    """ "1 head", "2 heads"; `things` where an s is not enough."""
    return f"{count} {thing if count == 1 else things or thing + 's'}"
