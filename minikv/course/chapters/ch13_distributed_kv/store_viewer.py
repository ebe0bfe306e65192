"""Blocks between engines and what lies between them, step by step.

    flow = StoreFlow({"prompt 1": first_ids, "prompt 2": second_ids})
    flow.snap("A computes prompt 1", {"engine A": engine_a, "engine B": None})
    flow.picture(); flow.widget()

A column is a block of the prompts; blocks that both begin with are one column. A row is an engine's
device, or the store. Where a block is, the engines' tiers say. A `FlowSnapshot` is plain data.

Blocks that an engine has fetched are hatched, on paper, with letters in a white field; those that
it has computed are filled. So they also differ in print and without colours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import ref

from minikv.course.pictures import style
from minikv.course.pictures.box_drawing import Board, Box, BoxRecording
from minikv.course.pictures.snapshot import counted

STORE = "the store"
COLORS = tuple(style.PALETTE[i] for i in (0, 5, 4))  # by row
Key = tuple[int, ...]  # all tokens up to the end of a block


@dataclass(frozen=True)
class FlowSnapshot:
    """Who holds which blocks, at one moment."""

    words: str
    held: Mapping[str, frozenset[Key]]  # by row
    fetched: Mapping[str, frozenset[Key]]  # those of `held` that came from the store, by engine
    num_fetched: int  # since the snapshot before
    warnings: tuple[str, ...] = ()


class StoreFlow(BoxRecording):
    """Snapshots of some engines and of the store between them."""

    title = "Blocks between engines"
    meanings = MappingProxyType(
        {
            "computed, or written": Box("", style.PALETTE[7]),
            "fetched from the store": Box("", style.PALETTE[7], "hatched"),
            "not there": Box("", style.PAPER, "absent"),
            "came in this step": Box("", style.PAPER, new=True),
        }
    )
    steps: list[FlowSnapshot]

    def __init__(self, texts: Mapping[str, Sequence[int]], block_size: int = 16):
        super().__init__()
        self.texts, self.block_size = texts, block_size
        self.hits: dict[str, tuple[ref, int]] = {}  # of each row: its engine, and its hits so far
        self.keys: dict[Key, str] = {}  # what is written into each block
        for place, ids in enumerate(texts.values(), 1):
            for end in range(block_size, len(ids), block_size):
                key = tuple(ids[:end])
                self.keys[key] = f"{self.keys[key]} {place}" if key in self.keys else str(place)

    def snap(self, words: str, engines: Mapping[str, Any]) -> FlowSnapshot:
        """Copy where all blocks are now. An engine that does not run is None. Between two snapshots
        an engine serves at most one of the prompts: the first blocks that are new are then those
        that it has fetched."""
        held: dict[str, frozenset[Key]] = {}
        fetched: dict[str, frozenset[Key]] = {}
        stored: set[Key] = set()
        before = self.steps[-1] if self.steps else None
        num_fetched = 0
        for row, engine in engines.items():
            here, below = self._places(engine) if engine is not None else ([], set())
            stored |= below
            known = before.held[row] if before else frozenset()
            count = self._count_fetched(row, engine) if engine is not None else 0
            came = [key for key in here if key not in known][:count]
            stay = before.fetched[row] if before else frozenset()
            held[row] = frozenset(here)
            fetched[row] = (stay & held[row]) | frozenset(came)
            num_fetched += len(came)
        held[STORE] = frozenset(stored)
        self.steps.append(FlowSnapshot(words, held, fetched, num_fetched))
        return self.steps[-1]

    def _places(self, engine: Any) -> tuple[list[Key], set[Key]]:
        """The blocks on the engine's device, in order, and those it knows to be in the store."""
        here: dict[Key, None] = {}
        below: set[Key] = set()
        for ids in self.texts.values():
            for i, tiers in enumerate(engine.tiers.everywhere(ids, None), 1):
                key = tuple(ids[: i * self.block_size])
                if "device" in tiers:
                    here[key] = None
                if "disk" in tiers or "store" in tiers:
                    below.add(key)
        return list(here), below

    def _count_fetched(self, row: str, engine: Any) -> int:
        """How many blocks this engine has fetched since the last snapshot."""
        tiers = engine.stats().tiers
        hits = sum(tiers[name].hits for name in ("disk", "store") if name in tiers)
        known, before = self.hits.get(row, (None, 0))
        self.hits[row] = ref(engine), hits
        return hits - before if known is not None and known() is engine else hits

    def describe(self, i: int, before: int | None) -> str:
        held = self.steps[i].held
        told = ", ".join(f"{row} {counted(len(keys), 'block')}" for row, keys in held.items())
        return f"{told}; {self.steps[i].num_fetched} fetched."

    def counted(self, i: int) -> dict[str, int]:
        counts = {f"blocks in {row}": len(keys) for row, keys in self.steps[i].held.items()}
        return counts | {"fetched in this step": self.steps[i].num_fetched}

    @property
    def rows(self) -> list[str]:  # type: ignore[override]
        """The store between the engines."""
        first, *others = (row for row in self.steps[0].held if row != STORE)
        return [first, STORE, *others]

    def boards(self, chosen: Sequence[int]) -> list[Board]:
        return [self._board(i) for i in chosen]

    def _board(self, i: int) -> Board:
        """Step `i`, and what came in it, whichever steps are shown."""
        step, before = self.steps[i], self.steps[i - 1].held if i else {}
        boxes = {}
        for r, row in enumerate(self.rows):
            for column, (key, text) in enumerate(self.keys.items()):
                look = "absent" if key not in step.held[row] else "filled"
                if key in step.fetched.get(row, frozenset()):
                    look = "hatched"
                new = look != "absent" and key not in before.get(row, frozenset())
                boxes[r, column] = Box(text, COLORS[r % 3], look, new)
        return Board(boxes)
