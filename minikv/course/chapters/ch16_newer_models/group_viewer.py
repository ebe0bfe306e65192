"""A sequence's blocks in each group of layers, step by step.

    parts = GroupFilm(engine)
    parts.run(prompt_ids, max_tokens=6)
    parts.picture(steps=[0, 2]); parts.widget()

A column is a block of the text, a row a kind of layer. A `PartsSnapshot` is plain data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from minikv.course.pictures import style
from minikv.course.pictures.box_drawing import Board, Box, BoxRecording
from minikv.course.pictures.snapshot import counted
from minikv.engine import Engine
from minikv.sampling import SamplingParams

COLOR = style.PALETTE[4]
HELD, ROOM, NONE = "filled", "pale", "absent"  # looks of a block


@dataclass(frozen=True)
class PartsSnapshot:
    """What the next step can read in each kind of layer, after a step."""

    words: str
    looks: tuple[tuple[str, ...], tuple[str, ...]]  # by block: full layers, layers with a window
    warnings: tuple[str, ...] = ()


class GroupFilm(BoxRecording):
    """Snapshots of one sequence in an engine with groups."""

    title = "Blocks by kind of layer"
    rows = ("full", "with a window")
    meanings = MappingProxyType(
        {
            "has K and V": Box("", COLOR, HELD),
            "room, not yet computed": Box("", COLOR, ROOM),
            "no memory": Box("", COLOR, NONE),
        }
    )
    steps: list[PartsSnapshot]

    def __init__(self, engine: Engine):
        super().__init__()
        self.engine = engine

    def run(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Serve a prompt and take a snapshot before each step that computes; the tokens."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(list(prompt_ids), params)
        token_ids: list[int] = []
        while self.engine.has_unfinished:
            done = self.engine.stats().computed_tokens
            outputs = self.engine.step()
            num_tokens = self.engine.stats().computed_tokens - done
            for sequence in self.engine.scheduler.running:
                self.snap(sequence, num_tokens)
            token_ids = outputs[-1].token_ids if outputs else token_ids
        return token_ids

    def snap(self, sequence: Any, num_tokens: int) -> PartsSnapshot:
        """Copy what the step that has just run could read; it computed `num_tokens` tokens."""
        table, end = sequence.table, sequence.num_computed
        filled = -(-end // table.block_size)
        full = [HELD if i < filled else ROOM for i in range(len(table.block_ids))]
        has_windows = (table.pool.part_of[-1, table.block_ids] >= 0).tolist()
        windowed = [
            look if i >= table.first and has_windows[i] else NONE for i, look in enumerate(full)
        ]
        words = f"tokens {end - num_tokens} to {end - 1} are computed"
        if num_tokens == 1:
            words = f"token {end - 1} is computed"
        self.steps.append(PartsSnapshot(words, (tuple(full), tuple(windowed))))
        return self.steps[-1]

    def describe(self, i: int, before: int | None) -> str:
        full, windowed = self.steps[i].looks
        return (
            f"full layers have {counted(len(full), 'block')}; "
            f"layers with a window have {counted(len(windowed) - windowed.count(NONE), 'block')}."
        )

    def counted(self, i: int) -> dict[str, int]:
        full, windowed = self.steps[i].looks
        return {"blocks of full layers": len(full),
                "of layers with a window": len(windowed) - windowed.count(NONE)}  # fmt: skip

    def boards(self, chosen: Sequence[int]) -> list[Board]:
        return [
            Board({
                (row, place): Box(str(place), COLOR, look)
                for row, looks in enumerate(self.steps[i].looks)
                for place, look in enumerate(looks)
            })
            for i in chosen
        ]  # fmt: skip
