"""Block tables and their pool, seen step by step: copied from live objects, then drawn.

    history = History(pool)
    history.snap("a prompt of 7 tokens", {"A": table})     # copies what is there now
    table.grow(1)
    history.snap("the 8th token", {"A": table})
    history.picture()                                      # all steps, from left to right
    history.widget()                                       # a player

A `Snapshot` says in plain data what is drawn, so a test can ask it. It reads the public
surface alone, of the engine's own classes or of a reader's: `num_blocks`, `num_free` and
`ref_count(block_id)` of the pool; `block_ids`, `block_size` and `num_tokens` of a table.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import index as as_int
from typing import Any

from minikv.course.pictures import block_drawing
from minikv.course.pictures.recording import Recording, check_letter, check_surface
from minikv.course.pictures.scene import Scene
from minikv.course.pictures.snapshot import SeenTable, Snapshot


def _copy_table(name: str, table, texts: Sequence[str]) -> SeenTable:
    check_letter("tables", name)
    try:
        block_ids = tuple(as_int(block_id) for block_id in table.block_ids)
        return SeenTable(block_ids, as_int(table.num_tokens), tuple(texts))
    except TypeError as error:
        raise TypeError(
            f"table {name}: block_ids must be a list of ints and num_tokens an int, "
            f"were {table.block_ids!r} and {table.num_tokens!r}"
        ) from error


class History(Recording):
    """Snapshots of a pool and the block tables over it, in the order they were taken."""

    title = "Block tables"
    steps: list[Snapshot]

    def begin(self) -> int:
        held = (i for i, step in enumerate(self.steps) if step.num_free < len(step.ref_counts))
        return next(held, 0)

    def __init__(self, pool):
        super().__init__()
        check_surface("pool", pool, ("num_blocks", "num_free", "ref_count"))
        self.pool = pool

    def snap(
        self,
        words: str,
        tables: Mapping[str, Any] | None = None,
        texts: Mapping[str, Sequence[str]] | None = None,
        cached: Iterable[int] = (),
    ) -> Snapshot:
        """Copy what is there now; later changes of the live objects don't reach the copy.

        `tables` are by letter: {"A": table}. `texts` gives a table's tokens, which are
        written into its slots. `cached` names the blocks that a prefix cache holds.
        """
        tables, texts = tables or {}, texts or {}
        if unknown := texts.keys() - tables.keys():
            raise ValueError(f"texts: no table {', '.join(sorted(unknown))} to put them on")
        sizes = {step.block_size for step in self.steps if step.tables}
        sizes |= {as_int(table.block_size) for table in tables.values()}
        if len(sizes) > 1:
            raise ValueError(f"tables: one block size a history, were {sorted(sizes)}")
        counts = []
        for block_id in range(self.pool.num_blocks):
            count = self.pool.ref_count(block_id)
            try:
                counts.append(as_int(count))
            except TypeError as error:
                raise TypeError(
                    f"pool.ref_count({block_id}): must be an int, was {count!r}"
                ) from error
        step = Snapshot(
            words,
            sizes.pop() if sizes else 4,  # no table has said: nothing of it is seen
            as_int(self.pool.num_free),
            tuple(counts),
            {name: _copy_table(name, table, texts.get(name, ())) for name, table in tables.items()},
            frozenset(cached),
        )
        return self.keep(step)

    def counted(self, i: int) -> dict[str, int]:
        step = self.steps[i]
        return {f"blocks in use of {len(step.ref_counts)}": len(step.ref_counts) - step.num_free}

    def scene(self, chosen: Sequence[int], alone: bool) -> Scene:
        return block_drawing.scene([self.steps[i] for i in chosen], alone)
