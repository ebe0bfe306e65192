"""A ring of cells against paged blocks, both of this engine: one table, measured as it is made."""

from statistics import median

from minikv.blocks import BlockPool, BlockTable
from minikv.config import EngineConfig
from minikv.course.chapters.ch11_ring_cache.rung import run_in_ring
from minikv.course.pictures.table import Table
from minikv.course.workloads.running_table import TOGETHER, WORKLOAD, Run, machine, run_in_engine
from minikv.course.workloads.timing import REPEATS
from minikv.language_model import LanguageModel
from minikv.ring import Cells, OutOfCells, RingCache

SLOTS, BLOCK = 512, 16  # of both: the same memory
NEW = 24  # tokens of each answer


class Comparison(Table):
    """Memory, speed, sharing and the end of the text, for both ways to keep K and V.

    Raises AssertionError if the two give different tokens.
    """

    def __init__(self, lm: LanguageModel, repeats: int = REPEATS):
        self.lm, self.ids = lm, lm.encode(WORKLOAD)
        self.caption = (
            f"{len(self.ids)} prompt tokens, {NEW} new ones; median of {repeats} runs. {lm.name}, "
            f"{machine(lm)}."
        )
        ways = {
            "one": (lambda: self._ring(1), lambda: self._paged(1)),
            "many": (lambda: self._ring(TOGETHER), lambda: self._paged(TOGETHER)),
        }
        self.speed: dict[str, tuple[float, float]] = {}
        for name, pair in ways.items():
            for run in pair if repeats > 1 else ():  # the first run of anything is slower
                run()
            turns = [tuple(run() for run in pair) for _ in range(repeats)]
            tokens = {tuple(run.token_ids) for turn in turns for run in turn}
            if len(tokens) > 1:
                raise AssertionError("the ring and the blocks give different tokens")
            self.speed[name] = tuple(  # type: ignore[assignment]
                median(run.answers * NEW / run.seconds for run in runs)
                for runs in zip(*turns, strict=True)
            )

    def _ring(self, num_seqs: int) -> Run:
        return run_in_ring(self.lm, self.ids, NEW, num_seqs)

    def _paged(self, samples: int) -> Run:
        return run_in_engine(self.lm, self.ids, NEW, samples=samples)

    def rows(self) -> list[tuple[str, ...]]:
        config, prompt = self.lm.config, len(self.ids)
        each = config.kv_bytes_per_token(self.lm.dtype)
        ring_bytes = RingCache(config, SLOTS).num_bytes
        cells, slots = held_in_cells(prompt, 1, NEW), held_in_blocks(prompt, 1, NEW)
        shared, in_blocks = (
            held_in_cells(prompt, TOGETHER, NEW),
            held_in_blocks(prompt, TOGETHER, NEW),
        )
        batch, by_index = largest_batch(True), largest_batch(False)
        return [
            ("", "ring of cells", f"blocks of {BLOCK}"),
            ("reserved at the start", size(ring_bytes), size(SLOTS * each)),
            ("slots for one text", f"{cells}", f"{slots}"),
            (f"slots for {TOGETHER} texts, one prompt", f"{shared}", f"{in_blocks}"),
            (
                f"largest batch if every second {BLOCK} slots are free",
                f"{batch} (by index: {by_index})",
                f"{SLOTS // 2}",
            ),
            ("tokens per second, one text", *(f"{speed:,.0f}" for speed in self.speed["one"])),
            (
                f"tokens per second, {TOGETHER} texts",
                *(f"{speed:,.0f}" for speed in self.speed["many"]),
            ),
            ("a prefix that another request computed", "by seq_cp, if it is known", "found (07)"),
            ("more requests than fit", "turned away", "wait, are preempted (06)"),
            (f"text beyond {config.max_context:,} tokens", "goes on: positions move", "ends"),
        ]


def size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB"


def held_in_cells(num_prompt: int, n: int, num_new: int) -> int:
    """Cells of `n` sequences that share a prompt."""
    cells = Cells(SLOTS)
    cells.place(list(range(num_prompt)), [0] * num_prompt)
    for seq in range(1, n):
        cells.seq_cp(0, seq)
    for seq in range(n):
        cells.place(list(range(num_prompt, num_prompt + num_new)), [seq] * num_new)
    return cells.num_used


def held_in_blocks(num_prompt: int, n: int, num_new: int) -> int:
    """Slots of the blocks of `n` forks of a prompt."""
    tables = [BlockTable(BlockPool(EngineConfig().num_blocks), BLOCK)]
    tables[0].grow(num_prompt)
    tables += [tables[0].fork() for _ in range(n - 1)]
    for table in tables:
        for position in range(num_prompt, num_prompt + num_new):
            table.grow(1)
            table.writable_slot(position)
    pool = tables[0].pool
    return (pool.num_blocks - pool.num_free) * BLOCK


def largest_batch(contiguous: bool) -> int:
    """How many tokens find room if every second run of BLOCK cells is in use."""
    cells = Cells(SLOTS, contiguous)
    cells.place(list(range(SLOTS)), [0] * SLOTS)
    cells.free(cell for cell in range(SLOTS) if cell // BLOCK % 2)
    count = SLOTS // 2
    while count:
        try:
            (cells.find_slot if contiguous else cells.find_cells)(count)
            return count
        except OutOfCells:
            count -= 1
    return 0
