"""Blocks, slots and copies of states, request by request, over a live engine.

    film = StateFilm(engine)
    film.serve({"A": first, "B": second}, max_tokens=4)
    film.picture(steps=[0, 2]); film.widget()

A row is a request, a column a block of its text, with the block's id. The last row are the slots of
the state memory. A `StatesSnapshot` is plain data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from minikv.course.pictures import style
from minikv.course.pictures.box_drawing import Board, Box, BoxRecording
from minikv.engine import Engine
from minikv.radix import RadixCache
from minikv.sampling import SamplingParams
from minikv.states import StatePool, StateTable

COMPUTED, AGAIN, FOUND, FREE = "filled", "hatched", "pale", "absent"  # looks of a block, of a slot
MARK = ("c", style.INK)
GREY = style.PALETTE[7]


@dataclass(frozen=True)
class StatesSnapshot:
    """After a step."""

    words: str
    rows: Mapping[str, tuple[tuple[int, str, bool], ...]]  # request -> block id, look, has a copy
    slots: tuple[tuple[str, str], ...]  # what is in it: "" or its request, and after which token
    recomputed: int  # tokens so far that were computed again for want of a copy
    warnings: tuple[str, ...] = ()


class StateFilm(BoxRecording):
    """Snapshots of an engine whose model keeps states."""

    title = "Blocks, slots and copies"
    meanings = MappingProxyType(
        {
            "computed": Box("", GREY, COMPUTED),
            "found in the cache; in a slot: a copy": Box("", GREY, FOUND),
            "computed again for want of a copy": Box("", GREY, AGAIN),
            "free slot": Box("", GREY, FREE),
            "with c: has a copy of the state after it": Box("", style.PAPER, COMPUTED),
        }
    )
    steps: list[StatesSnapshot]

    def __init__(self, engine: Engine):
        super().__init__()
        self.engine = engine
        self.texts: dict[str, list[int]] = {}  # by request: its tokens so far
        self.looks: dict[str, list[str]] = {}  # by request: of its blocks
        self.begins: dict[str, int] = {}  # by request: how many tokens it found

    @property
    def rows(self) -> Sequence[str]:  # type: ignore[override]
        return [*self.texts, "slots"]

    def serve(self, prompts: Mapping[str, Sequence[int]], max_tokens: int) -> dict[str, list[int]]:
        """Serve them one after the other; a snapshot when a prompt is computed, and when the answer
        is. Returns the answers."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        answers: dict[str, list[int]] = {}
        for name, prompt in prompts.items():
            before = self.engine.stats()
            self.engine.add_request(list(prompt), params)
            self.texts[name] = list(prompt)
            outputs = self.engine.step()
            self.looks[name] = self._looks(before)
            self.begins[name] = self.engine.stats().hit_tokens - before.hit_tokens
            self.snap(f"{name} begins at token {self.begins[name]}, and its prompt is computed")
            while self.engine.has_unfinished:
                outputs = self.engine.step() or outputs
            answers[name] = outputs[-1].token_ids
            self.texts[name] += answers[name]
            self.snap(f"{name} has its answer, and gives back its slot")
        return answers

    def _looks(self, before) -> list[str]:
        """Of the blocks of the request that has just computed its prompt."""
        now, size = self.engine.stats(), self.engine.config.block_size
        found = (now.hit_tokens - before.hit_tokens) // size
        again = (now.states.recomputed_tokens - before.states.recomputed_tokens) // size
        return [FOUND] * found + [AGAIN] * again

    def snap(self, words: str) -> StatesSnapshot:
        """Copy what the engine holds now."""
        pool, cache, size = self.engine.pool, self.engine.cache, self.engine.config.block_size
        assert isinstance(pool, StatePool) and cache is not None
        running = [one.table for one in self.engine.scheduler.running]
        slots = [("", "")] * pool.memory.num_slots
        rows = {}
        for name, text in self.texts.items():
            ids = RadixCache.match(cache, text).block_ids
            if running and name == list(self.texts)[-1]:
                [table] = running
                assert isinstance(table, StateTable) and table.slot is not None
                slots[table.slot], ids = (name, "now"), table.block_ids
            looks = self.looks[name] + [COMPUTED] * len(ids)
            rows[name] = tuple(
                (id_, look, id_ in pool.copies) for id_, look in zip(ids, looks, strict=False)
            )
            for place, id_ in enumerate(ids):
                if id_ in pool.copies and not slots[pool.copies[id_]][0]:
                    slots[pool.copies[id_]] = (name, str(size * (place + 1)))
        counts = self.engine.stats().states
        self.steps.append(StatesSnapshot(words, rows, tuple(slots), counts.recomputed_tokens))
        return self.steps[-1]

    def describe(self, i: int, before: int | None) -> str:
        copies = [f"{name} after {after}" for name, after in self.steps[i].slots
                  if after not in ("", "now")]  # fmt: skip
        return f"copies: {', '.join(copies) or 'none'}."

    def counted(self, i: int) -> dict[str, int]:
        return {"tokens computed again": self.steps[i].recomputed}

    def boards(self, chosen: Sequence[int]) -> list[Board]:
        return [self._board(self.steps[i]) for i in chosen]

    def _board(self, step: StatesSnapshot) -> Board:
        names = list(self.texts)
        shade = {name: style.color(place) for place, name in enumerate(names)}
        boxes = {
            (names.index(name), place): Box(
                str(id_), shade[name], look, marks=(MARK,) if has_copy else ()
            )
            for name, blocks in step.rows.items()
            for place, (id_, look, has_copy) in enumerate(blocks)
        }
        for place, (name, after) in enumerate(step.slots):
            text = f"{name} {after}".strip()
            look = COMPUTED if after == "now" else FOUND if name else FREE
            boxes[len(names), place] = Box(text, shade.get(name, GREY), look)
        return Board(boxes)
