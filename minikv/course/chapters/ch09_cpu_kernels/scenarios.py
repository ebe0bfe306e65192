"""Chapter 09 as programs: kernels as plain Python on small arrays, watched; then compiled.

What a watch sees is compared like the result: what is read, how often a cache would fetch it, who
writes what. Only a kernel that was right in Python is compiled: compiled code checks no address.
"""

import linecache
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numba.core import event
from numba.core.dispatcher import Dispatcher

import minikv
from minikv.course.chapters.ch03_kv_memory.given import Shape
from minikv.course.chapters.ch09_cpu_kernels.given import Cpu, Stored, Weights, weights_of
from minikv.course.chapters.ch09_cpu_kernels.in_engine import (
    KernelAttention,
    engine_by,
    with_products,
)
from minikv.course.chapters.ch09_cpu_kernels.watch import (
    Watch,
    Watched,
    compiled_code,
    in_turns,
    one_by_one,
    plainly,
    refusal,
    widens,
)
from minikv.course.judge.checking import (
    COMPILING,
    Wrong,
    check,
    mismatch,
    plain,
    runs_model,
    tinypy,
    witness,
)
from minikv.course.judge.programs import advice, at_most, decoded, line
from minikv.course.judge.scenarios import Group, Log, scenario
from minikv.course.pictures.snapshot import counted

COMPILES = "Numba compiles it, and the result is right as in Python"

NOT_YET = (
    "not compiled yet: the lines above come first, because compiled code does not check where it "
    "reads and writes"
)


def in_python(play: Callable) -> Callable:
    """Plays with the kernels of a module as the Python that they are written in."""

    def play_in_python(mine, case, log: Log) -> None:
        with plainly(mine):
            play(mine, case, log)

    return play_in_python


class Compiler(event.Listener):
    """Says when Numba compiles: on a busy machine that takes longer than the code it makes."""

    def on_start(self, event) -> None:
        for hear in COMPILING:
            hear(True)

    def on_end(self, event) -> None:
        for hear in COMPILING:
            hear(False)


event.register("numba:compile", Compiler())


def tensor(values) -> torch.Tensor:
    return torch.from_numpy(np.array(values))


# ── Sequences in one pool ─────────────────────────────────────────────────────────────────

QUIET = 2.0  # what lies in slots without a token


@dataclass(frozen=True, eq=False)
class Case:
    """Sequences in one pool, their blocks anywhere. What is not theirs holds other numbers."""

    lens: tuple[int, ...]
    block_size: int = 4
    heads: int = 1
    kv_heads: int = 1
    dim: int = 4
    fill: float = QUIET
    lift: float = 0.0  # of all scores
    items: tuple[int, int] | None = None
    more_heads: int = 0  # of q, after the queries
    pieces: int = 1
    turns: bool = False

    @cached_property
    def arguments(self) -> tuple[np.ndarray, ...]:
        """q, kv, block tables, context lengths."""
        seed = sum(self.lens) + self.heads
        draw = np.random.default_rng(seed)
        widths = [-(-length // self.block_size) for length in self.lens]
        ids = random.Random(seed).sample(range(sum(widths) + 2), sum(widths))
        shape = (sum(widths) + 2, self.block_size, 2, self.kv_heads, self.dim)
        kv = (self.fill * draw.standard_normal(shape)).astype(np.float32)
        q = 2 * draw.standard_normal((len(self.lens), self.heads, self.dim)).astype(np.float32)
        if self.lift:
            q[:, :, 0] = self.dim**0.5
        tables = np.full((len(self.lens), max(widths) + 1), 10**9)  # no block beyond a context
        for row, (length, width) in enumerate(zip(self.lens, widths, strict=True)):
            tables[row, :width], ids = ids[:width], ids[width:]
            for p in range(length):
                slot = kv[tables[row, p // self.block_size], p % self.block_size]
                slot[:] = draw.standard_normal(slot.shape)
                if self.lift:
                    sign = 1 if p < self.block_size else -1
                    slot[0, :, 0] = self.lift * sign * (-1.0) ** (np.arange(self.kv_heads) + row)
        return q, kv, tables, np.array(self.lens)

    @cached_property
    def owned(self) -> set[int]:
        """The slots that hold a token."""
        tables = self.arguments[2]
        return {
            int(tables[row, p // self.block_size]) * self.block_size + p % self.block_size
            for row, length in enumerate(self.lens)
            for p in range(length)
        }

    @property
    def what(self) -> str:
        some = (
            f"context lengths {list(self.lens)}"
            if len(self.lens) > 1
            else f"context {self.lens[0]}"
        )
        heads = f"{counted(self.heads, 'query head')} on {counted(self.kv_heads, 'KV head')}"
        what = f"{some}, blocks of {self.block_size}, {heads}, head_dim {self.dim}"
        what += "" if self.fill == QUIET else f", other slots {self.fill:g}"
        what += f", scores of about {self.lift:g} and {-self.lift:g}" if self.lift else ""
        what += f", {self.more_heads} more heads in q" if self.more_heads else ""
        what += f", items {self.items[0]} to {self.items[1] - 1}" if self.items else ""
        return what


def attends(kernel: str, mine, case: Case, log: Log) -> None:
    """One call of `attend_heads` or `attend_groups`."""
    watch, names = Watch(), ("q", "kv", "block_tables", "context_lens")
    before = [value.copy() for value in case.arguments]
    if case.more_heads:
        more = np.full((len(case.lens), case.more_heads, case.dim), np.nan, np.float32)
        before[0] = np.concatenate([before[0], more], 1)
    watched = [
        Watched(value.copy(), name, watch) for value, name in zip(before, names, strict=True)
    ]
    out = np.full(case.arguments[0].shape, np.nan, np.float32)
    rows = case.items or (0, len(case.lens) * case.kv_heads)
    items = rows if kernel == "attend_groups" else ()
    log.call(case.what, partial(getattr(mine, kernel), *watched, out, *items), see=False)
    if log.events[-1].error is not None:
        return
    slot, token = 2 * case.kv_heads * case.dim, case.dim
    kv_reads = watch.reads.get("kv", [])
    slots = {element // slot for element in kv_reads}
    width = before[2].shape[1]
    beyond = {
        element
        for element in watch.reads.get("block_tables", [])
        if element % width >= -(-case.lens[element // width] // case.block_size)
    }
    keys = sum(element % slot < slot // 2 for element in kv_reads)
    group = case.heads // case.kv_heads
    mine_rows = {
        (w // case.kv_heads, w % case.kv_heads * group + g)
        for w in range(*rows)
        for g in range(group)
    }
    others = sum(
        not np.isnan(out[s, h]).all()
        for s in range(len(case.lens))
        for h in range(case.heads)
        if (s, h) not in mine_rows
    )
    sights = {
        "result": tensor(out),
        "slots without a token that are read:": len(slots - case.owned),
        "entries of a block table past its context that are read:": len(beyond),
        "inputs that are written to:": sorted(watch.writes),
        "rows of `out` that belong to other items and are written:": others,
    }
    if kernel == "attend_heads":
        sights["keys that are read:"] = keys / token
        sights["values that are read:"] = (len(kv_reads) - keys) / token
    else:
        least = sum(-(-case.lens[w // case.kv_heads] // case.block_size) for w in range(*rows))
        block = case.block_size * slot
        fetches = watch.fetches("kv", lambda e: (e // block, e // token % case.kv_heads))
        sights["blocks that a cache with room for one block fetches:"] = at_most(least, fetches)
    log("", sights)


# ── Compiled ──────────────────────────────────────────────────────────────────────────────


IN_FLOAT64, NOT_FOR_NUMBA = (
    advice("09.1", name) for name in ("sums in float64", "writes Python for Numba")
)


def as_compiled(exercise: str, *names: str):
    """Make a line of "Numba compiles it": the decorated function calls kernels `names` on arrays
    of real size and raises `Wrong` if the result is. Then their code is looked at."""

    def register(run: Callable):
        @check(exercise, COMPILES, waits=NOT_YET)
        def _(mine):
            for name in names:
                if not isinstance(getattr(mine, name), Dispatcher):
                    raise Wrong(
                        f"{name} is plain Python: `@compiled` is missing above it",
                        "a kernel without `@compiled` runs in Python, and slowly",
                        f"the line above `def {name}`",
                    )
            call(partial(run, mine), mine.__file__)
            for name in names:
                code = compiled_code(getattr(mine, name))
                if widens(code):
                    raise Wrong(
                        f"{name}: a loop turns float32 into float64 before it adds", *IN_FLOAT64
                    )

        return run

    return register


def call(run: Callable, file: str) -> None:
    """Run what is compiled on its way, and word what Numba refuses."""
    try:
        run()
    except ImportError as error:
        raise Wrong(
            f"Numba cannot compile this: {error}",
            "Numba turns `@`, `np.dot` and `np.linalg` into calls of SciPy's libraries, which this "
            "course does not install",
            "which product of your code can be a loop, or a sum over a slice?",
        ) from None
    except Exception as error:
        if not type(error).__module__.startswith("numba"):
            raise
        said, at = refusal(error, file)
        where = "" if at is None else f"line {at}, `{linecache.getline(file, at).strip()}`: "
        raise Wrong(f"Numba refuses {where}{said}", *NOT_FOR_NUMBA) from None


def naive(q, kv, tables, lens) -> torch.Tensor:
    """Attention by the oracle, one sequence at a time."""
    rows = []
    for row, length in enumerate(lens):
        slots = kv[tables[row, : -(-length // kv.shape[1])]].reshape(-1, *kv.shape[2:])[:length]
        k, v = torch.from_numpy(slots).unbind(1)
        rows.append(minikv.naive_attention(torch.from_numpy(q[row : row + 1]), k, v)[0])
    return torch.stack(rows)


REAL = Case((130, 7, 64), 16, 4, 2, 64, fill=np.nan)


def compare(found: np.ndarray, expected: torch.Tensor, what: str) -> None:
    witness(torch.from_numpy(found))
    differs = mismatch(torch.from_numpy(found), expected, 1e-4)
    if differs is not None:
        raise Wrong(
            f"{what}: {differs}",
            "the compiled kernel does not do what it does in Python: an index that wraps around, "
            "an integer that overflows, or memory that was never written",
            "what does your kernel read that it has not written?",
        )


# ── 09.1 The loop, compiled ───────────────────────────────────────────────────────────────

ROOM_FOR = "for how many slots and channels is there room in each array that you make?"

scenario("09.1", in_python(partial(attends, "attend_heads")),
    line("one sequence, one full block", "scores, weights, the weighted sum, the division",
         Case((4,)), Case((1,), 1), Case((2,), 2, dim=3)),
    line("one sequence, several blocks", "what is carried from block to block?", Case((8,)),
         Case((3,), 1), Case((10,), 5)),
    line("a last block that is not full", "how many slots of block i are filled?", Case((7,)),
         Case((1,)), Case((9,), 4, fill=1000.0)),
    line("several query heads and KV heads", "which KV head does query head h read?",
         Case((5,), 4, 4, 2), Case((3,), 2, 3, 3), Case((3,), 4, 4, 1)),
    line("several sequences", "the row of q, of the table, of the lengths; what must be reset?",
         Case((6, 3)), Case((1, 9, 4), 4, 2, 1)),
    line("NaN in slots without a token", "what is read past the context?", Case((6,), fill=np.nan),
         Case((3, 5), 2, fill=np.nan)),
    line("scores far above and far below 0", "what is subtracted from a score before `exp`?",
         Case((7,), lift=300.0), Case((7,), lift=-300.0), Case((3,), lift=-300.0),
         Case((3, 7, 2), 4, 4, 2, lift=300.0), Case((3, 3), 4, 3, 3, lift=-300.0)),
    line("large blocks, long vectors and long contexts", ROOM_FOR, Case((20,), 20),
         Case((3,), dim=72), Case((1030,), 1030, dim=1), Case((1,), 1, dim=1030),
         Case((1030,), 10, dim=1)),
    in_turn=True,
)  # fmt: skip


@as_compiled("09.1", "attend_heads")
def _(mine):
    out = np.empty(REAL.arguments[0].shape, np.float32)
    mine.attend_heads(*REAL.arguments, out)
    compare(out, naive(*REAL.arguments), REAL.what)


# ── 09.2 K and V once for a group ─────────────────────────────────────────────────────────

scenario("09.2", in_python(partial(attends, "attend_groups")),
    line("one query head per KV head", "the shapes: (G, …) for what each head has", Case((4,)),
         Case((7,)), Case((3, 6), 2, 2, 2)),
    line("groups of 2, 3 and 4", "which query heads belong to the KV head?", Case((7,), 4, 2),
         Case((5,), 2, 6, 2), Case((9,), 4, 4)),
    line("more heads in q than there are queries", "what says how many query heads there are?",
         Case((5,), 4, 2, more_heads=2), Case((3, 6), 2, 4, 2, more_heads=4)),
    line("several sequences", "the row of q, of the table, of the lengths; what must be reset?",
         Case((6, 3), 4, 4, 2), Case((1, 9, 4), 4, 2)),
    line("some of the items", "which sequence and KV head is item w?",
         *(Case((6, 3, 9), 4, 4, 2, items=items) for items in ((0, 1), (3, 5), (5, 6), (2, 2)))),
    line("NaN in slots without a token", "what is read past the context?",
         Case((6,), 4, 2, fill=np.nan), Case((3, 5), 2, 4, 2, fill=np.nan)),
    line("scores far above and far below 0", "what is subtracted from a score before `exp`?",
         Case((7,), 4, 2, lift=300.0), Case((7,), 4, 2, lift=-300.0), Case((3,), 4, 2, lift=-300.0),
         Case((3, 7, 2), 4, 4, 2, lift=300.0), Case((3, 3), 4, 3, 3, lift=-300.0)),
    line("large groups and blocks, long vectors and contexts", ROOM_FOR, Case((20,), 20, 2),
         Case((3,), 4, 2, dim=72), Case((1,), 1, 72, dim=1), Case((1030,), 1030, dim=1),
         Case((1,), 1, dim=1030), Case((1030,), 10, dim=1)),
    in_turn=True,
)  # fmt: skip


@as_compiled("09.2", "attend_groups")
def _(mine):
    out = np.full(REAL.arguments[0].shape, np.nan, np.float32)
    for first, last in ((3, 6), (0, 3)):
        mine.attend_groups(*REAL.arguments, out, first, last)
    compare(out, naive(*REAL.arguments), f"{REAL.what}, in two calls")


# ── 09.3 What limits attention here ───────────────────────────────────────────────────────

# A program: context lengths, shape, format, machine, threads. With COUNT only bytes and operations
# are seen. Reading holds on SLOW, whose memory is full with two threads, and on WIDE, where each
# thread adds its rate; arithmetic on WEAK.
FLOAT32, INT8, INT4 = Stored(4.0), Stored(1.0, 4, 2), Stored(0.5, 2, 3)
COUNT = Cpu(1.0, 1.0, 1.0)
SLOW = Cpu(2e3, 3e3, 1e12)
WIDE = Cpu(2e3, 1e12, 1e12)
WEAK = Cpu(1e12, 1e12, 7e3)


def limits(mine, program, log: Log) -> None:
    lens, shape, stored, machine, threads = program
    lens = list(lens)
    text = f"contexts {lens if len(lens) < 9 else len(lens)}; " + "; ".join([
        f"{counted(shape.num_layers, 'layer')}, {counted(shape.num_heads, 'head')}, "
        f"{counted(shape.num_kv_heads, 'KV head')} of {shape.head_dim}",
        f"number_bytes {stored.number_bytes:g}, scale_bytes {stored.scale_bytes}, "
        f"convert {stored.convert}",
        *([] if machine == COUNT else [
            f"thread_rate {machine.thread_rate:,.0f}, memory_rate {machine.memory_rate:,.0f}, "
            f"flop_rate {machine.flop_rate:,.0f}, {counted(threads, 'thread')}"
        ]),
    ])  # fmt: skip
    more = (threads,) if threads > 1 else ()
    found = log.call(text, partial(mine.attention_limit, lens, shape, stored, machine, *more),
                     see=False)  # fmt: skip
    if log.events[-1].error is None:
        fields = ("num_bytes", "operations", "seconds", "holds")[: 2 if machine == COUNT else 4]
        log(text, {f"{name} is": plain(getattr(found, name, None)) for name in fields})


def random_limit(seed: int) -> tuple:
    draw = random.Random(seed)
    kv_heads, lens = draw.randrange(1, 5), [draw.randrange(1, 900) for _ in range(seed % 7 + 1)]
    shape = Shape(draw.randrange(1, 40), kv_heads * draw.randrange(1, 9), kv_heads, seed % 97 + 1)
    machine = Cpu(*(10 ** draw.uniform(9, 11) for _ in range(3)))
    return lens, shape, draw.choice((FLOAT32, INT8, INT4)), machine, draw.choice((1, 1, 2, 8, 64))


scenario("09.3", limits,
    Group("one token: its bytes and its operations",
          [((1,), shape, FLOAT32, COUNT, 1) for shape in (Shape(1, 1, 1, 5), Shape(3, 2, 2, 5))],
          "the factors: keys and values, layers, KV heads, head dim"),
    Group("several contexts", [((3, 8), Shape(2, 2, 2, 5), FLOAT32, COUNT, 1),
          ((9, 1, 1, 1), Shape(1, 3, 3, 7), FLOAT32, COUNT, 1)],
          "what does a short context read beside a long one?"),
    Group("groups of query heads", [((3,), Shape(2, 6, 2, 5), FLOAT32, COUNT, 1),
          ((4, 2), Shape(1, 8, 1, 3), FLOAT32, COUNT, 1)],
          "what is done once for a group, and what for each of its query heads?"),
    Group("formats of 8 and 4 bits", [((4,), Shape(2, 2, 2, 6), INT8, COUNT, 1),
          ((4,), Shape(2, 6, 2, 6), INT8, COUNT, 1), ((3, 5), Shape(2, 8, 2, 7), INT4, COUNT, 1),
          ((3,), Shape(1, 4, 2, 7), INT4, COUNT, 1)],
          "how many scales does a token have, and how often is a number converted?"),
    Group("one thread: reading holds, or arithmetic",
          [((4,), Shape(2, 4, 2, 5), FLOAT32, machine, 1) for machine in (SLOW, WEAK)],
          "which rate does one thread reach, and which of the two times is waited for?"),
    Group("several threads", [((7, 5), Shape(3, 6, 2, 8), FLOAT32, machine, n) for n in (2, 3)
          for machine in (SLOW, WIDE, WEAK)],
          "which rates are those of one thread, and which is that of all together?"),
    Group("reading and arithmetic take about as long",
          [((10,), Shape(1, 2, 1, 8), FLOAT32, Cpu(1e3, 1e9, rate), 1)
          for rate in (999.0, 1000.0, 1001.0, 3000.0)],
          "do reading and computing happen at the same time?"),
    Group("any machine", [random_limit(seed) for seed in range(120)],
          "which takes longer here, reading or arithmetic: do you return that one?"),
)  # fmt: skip


# ── 09.4 Two bugs ─────────────────────────────────────────────────────────────────────────


def in_pieces(mine, case: Case, log: Log) -> None:
    """`decode_in_pieces`, its calls one after another or in turns."""
    q, kv, tables, lens = (tensor(value) for value in case.arguments)
    tables = tables[:, :-1].masked_fill(tables[:, :-1] == 10**9, 0)
    inputs = [q, kv, tables, lens]
    before = [value.clone() for value in inputs]
    races, together = [0], []

    def run(kernel, calls):
        together.append(sum(call[-2] < call[-1] for call in calls))
        kernel = getattr(kernel, "py_func", kernel)
        if case.turns:
            races[0] = in_turns(kernel, calls)
        else:
            one_by_one(kernel, calls)

    how = "side by side" if case.turns else "one after another"
    what = f"{case.what}, {counted(case.pieces, 'piece')}"
    what += f" {how}" if case.pieces > 1 else ""
    found = log.call(
        what, partial(mine.decode_in_pieces, q, kv, tables, lens, case.pieces, run), see=False
    )
    if log.events[-1].error is None:
        changed = [
            not torch.equal(now.nan_to_num(), old.nan_to_num())
            for now, old in zip(inputs, before, strict=True)
        ]
        said = {
            "result": found,
            "pieces with work, in each call of `run`:": together,
            "inputs that have changed:": sum(changed),
        }
        if case.turns:
            said["numbers that one piece writes and another reads or writes:"] = races[0]
        log("", said)


LAST_SLOTS = "which slots of a sequence's last block does each loop read?"
ROOM = "for each array that a call gets: which other call gets it, and which calls write to it?"
scenario("09.4", in_python(in_pieces),
    line("blocks that are full", LAST_SLOTS, Case((4,)), Case((8, 4), 4, 2)),
    line("one piece, NaN in slots without a token", LAST_SLOTS, Case((3,), fill=np.nan),
         Case((6, 1), 4, 2, fill=np.nan), Case((5, 7), 4, 4, 2, fill=np.nan),
         Case((3,), fill=np.inf)),
    line("scores far above and far below 0", "what is subtracted from a score before `exp`?",
         Case((7,), lift=300.0), Case((3,), lift=-300.0), Case((3, 7, 2), 4, 4, 2, lift=300.0),
         Case((3, 3), 4, 3, 3, lift=-300.0, pieces=2)),
    line("two pieces, one after another", ROOM, Case((4, 4), pieces=2),
         Case((8, 4), 4, 4, 2, pieces=2)),
    line("two pieces, side by side", ROOM, Case((4, 4), pieces=2, turns=True),
         Case((4, 8), 4, 2, pieces=2, turns=True)),
    line("more pieces, side by side", ROOM, Case((4, 4, 4), pieces=3, turns=True),
         Case((4, 4, 4, 4), pieces=2, turns=True),
         Case((3, 5), 2, 4, 2, fill=np.nan, pieces=4, turns=True)),
    in_turn=True,
)  # fmt: skip


@as_compiled("09.4", "attend_piece")
def _(mine):
    q, kv, tables, lens = (tensor(value) for value in REAL.arguments)
    tables = tables[:, :-1].masked_fill(tables[:, :-1] == 10**9, 0)
    found = mine.decode_in_pieces(q, kv, tables, lens, 2)
    compare(found.numpy(), naive(*REAL.arguments), f"{REAL.what}, 2 pieces")


# ── 09.5 Weights once for a batch ─────────────────────────────────────────────────────────

# A case is (rows, inputs, outputs), and `add` and (first, last) where they are not the usual ones.


def multiplies(mine, case, log: Log) -> None:
    rows, inputs, outputs, *more = case
    add, (first, last) = more or (False, (0, outputs))
    draw = np.random.default_rng(rows + inputs)
    x, weight = (
        draw.integers(-4, 5, shape).astype(np.float32) / 2
        for shape in ((rows, inputs), (outputs, inputs))
    )
    out = draw.integers(10, 90, (rows, outputs)).astype(np.float32)
    watch = Watch()
    watched = [Watched(value, name, watch) for value, name in ((x, "x"), (weight, "weight"))]
    what = f"x ({rows}, {inputs}), weight ({outputs}, {inputs}), add {add}"
    what += f", outputs {first} to {last - 1}" if (first, last) != (0, outputs) else ""
    log.call(what, partial(mine.matmul, *watched, out, add, first, last), see=False)
    if log.events[-1].error is not None:
        return
    read = watch.reads.get("weight", [])
    log("", {
        "out": tensor(out),
        "rows of the weight that a cache with room for one row fetches:": at_most(
            last - first, watch.fetches("weight", lambda element: element // inputs)),
        "rows of the weight that are read and belong to other pieces:": len(
            {element // inputs for element in read} - set(range(first, last))),
        "inputs that are written to:": sorted(watch.writes),
    })  # fmt: skip


ROOM_FOR_SUMS = "for how many rows and inputs is there room in each array that you make?"

scenario("09.5", in_python(multiplies),
    line("one row", "a sum for each output; without `add`, what was in `out` does not count",
         (1, 1, 1), (1, 3, 2), (1, 8, 5)),
    line("several rows", "in which order are the loops nested?", (4, 3, 2), (8, 2, 3), (2, 3, 2),
         (3, 4, 1)),
    line("a number of rows that is not a multiple of four", "which rows are left over?", (5, 3, 2),
         (6, 2, 2), (7, 3, 3), (9, 2, 1)),
    line("added to what is there", "what does `add` add to?", (1, 3, 2, True, (0, 2)),
         (4, 3, 2, True, (0, 2)), (6, 2, 3, True, (0, 3))),
    line("some of the outputs", "which columns of `out` belong to this call?",
         (1, 3, 6, False, (2, 4)), (5, 2, 6, True, (5, 6)), (4, 2, 3, False, (1, 1))),
    line("many rows, inputs and outputs", ROOM_FOR_SUMS, (70, 1, 1), (1, 5, 7), (13, 6, 1),
         (1, 1030, 1), (1, 1, 1030), (530, 1, 1)),
    in_turn=True,
)  # fmt: skip


@as_compiled("09.5", "matmul")
def _(mine):
    draw = np.random.default_rng(0)
    x, weight = (draw.standard_normal(shape, np.float32) for shape in ((9, 256), (160, 256)))
    out = np.ones((9, 160), np.float32)
    for first, last in ((50, 160), (0, 50)):
        mine.matmul(x, weight, out, True, first, last)
    expected = 1 + torch.from_numpy(x) @ torch.from_numpy(weight).T
    compare(out, expected, "9 rows, 256 inputs, 160 outputs, in two calls")


# ── 09.6 A decode step as one program ─────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Step:
    """A decode of several sequences by a small random model."""

    lens: tuple[int, ...]
    layers: int = 1
    heads: int = 1
    kv_heads: int = 1
    dim: int = 4
    hidden: int = 6
    inner: int = 3
    block_size: int = 2
    eps: float = 1e-5

    @cached_property
    def arguments(self) -> tuple:
        case = Case(self.lens, self.block_size, self.heads, self.kv_heads, self.dim, fill=np.nan)
        draw = np.random.default_rng(sum(self.lens))

        def drawn(*shape: int) -> np.ndarray:
            return draw.standard_normal(shape).astype(np.float32)

        layers, hidden, inner = self.layers, self.hidden, self.inner
        rows = (self.heads + 2 * self.kv_heads) * self.dim
        angles = np.outer(np.arange(max(self.lens)), 0.7 ** np.arange(self.dim // 2))
        cos, sin = np.tile(np.cos(angles), 2), np.concatenate([-np.sin(angles), np.sin(angles)], 1)
        weights = Weights(
            embedding=drawn(9, hidden), norm_1=1 + drawn(layers, hidden) / 4,
            qkv=drawn(layers, rows, hidden), out=drawn(layers, hidden, self.heads * self.dim),
            norm_2=1 + drawn(layers, hidden) / 4, gate_up=drawn(layers, 2 * inner, hidden),
            down=drawn(layers, hidden, inner), norm=1 + drawn(hidden) / 4, head=drawn(9, hidden),
            rope=np.stack([cos, sin], 1).astype(np.float32), eps=np.float32(self.eps),
            block_size=self.block_size,
        )  # fmt: skip
        _, kv, tables, lens = case.arguments
        kv = np.stack([kv + layer for layer in range(layers)])
        size = self.block_size
        newest = [(row, n - 1) for row, n in enumerate(self.lens)]
        slots = np.array([tables[row, p // size] * size + p % size for row, p in newest])
        kv = kv.reshape(layers, -1, 2, self.kv_heads, self.dim)
        kv[:, slots] = np.nan  # the newest tokens' K and V are not there yet
        token_ids = draw.integers(0, 9, len(lens))
        return token_ids, lens - 1, tables, lens, slots, weights, kv

    @property
    def what(self) -> str:
        lens = ", ".join(map(str, self.lens[:8])) + ", …" * (len(self.lens) > 8)
        heads = f"{counted(self.heads, 'query head')} on {counted(self.kv_heads, 'KV head')}"
        return (
            f"contexts of {lens} with the new token, {counted(self.layers, 'layer')}, {heads}, "
            f"head_dim {self.dim}, hidden {self.hidden}, inner {self.inner}, blocks of "
            f"{self.block_size}, eps {self.eps:g}"
        )


def steps(mine, case: Step, log: Log) -> None:
    *inputs, weights, kv = case.arguments
    copies, kv = [value.copy() for value in inputs], kv.copy()
    old = [np.array(value) for value in weights]
    ours: Any = deepcopy(weights)
    logits = np.full((len(case.lens), 9), np.nan, np.float32)
    log.call(case.what, partial(mine.decode_step, *copies, ours, kv, logits), see=False)
    if log.events[-1].error is not None:
        return
    slots = inputs[4]
    others = np.ones(kv.shape[1], bool)
    others[slots] = False
    now: list[Any] = [*copies, kv[:, others]]
    before = [*inputs, case.arguments[-1][:, others]]
    same = [
        np.array_equal(one, other, equal_nan=True) for one, other in zip(now, before, strict=True)
    ]
    log("", {
        "logits": tensor(logits),
        "K of the new tokens, by layer,": tensor(kv[:, slots, 0]),
        "V of the new tokens, by layer,": tensor(kv[:, slots, 1]),
        "inputs that have changed, or slots of other tokens:": same.count(False),
        "weights that have changed:": sum(
            not np.array_equal(one, other) for one, other in zip(old, ours, strict=True)),
    })  # fmt: skip


scenario("09.6", in_python(steps),
    line("one token, one layer", "embedding, attention, MLP, the last norm, the head", Step((1,))),
    line("a token after others", "what must lie in the cache before attention reads it?",
         Step((3,)), Step((4,), heads=2)),
    line("several layers", "which layer's weights, and which layer's slots?", Step((2,), layers=2),
         Step((3,), 3, 2)),
    line("several sequences and heads", "what has a row for each sequence?", Step((3, 1), heads=2),
         Step((5, 2, 4), 2, 4, 2), Step((2, 2, 3, 1, 6), 1, 2, 2)),
    line("any sizes", "the shapes: hidden, heads * dim and inner are three different numbers",
         Step((3, 4), 2, 4, 2, 2, 5, 7), Step((5,), 1, 3, 1, 6, 4, 9, 4)),
    line("another eps, and many sequences", "`weights.eps`; and the rows of each array",
         Step((2, 1), eps=0.5), Step((1,) * 70, dim=2, hidden=2, inner=1, block_size=1)),
    in_turn=True,
)  # fmt: skip


@as_compiled("09.6", "decode_step")
def _(mine):
    lm = tinypy()
    prompt = lm.encode("import os\n")
    weights, c = weights_of(lm.transformer, 4), lm.config
    kv = np.full((c.num_layers, 16, 2, c.num_kv_heads, c.head_dim), np.nan, np.float32)
    logits = np.empty((1, c.vocab_size), np.float32)
    table = np.array([[2, 0, 3, 1]])
    for p, token_id in enumerate(prompt):
        slot = table[0, p // 4] * 4 + p % 4
        mine.decode_step(*(np.array([n]) for n in (token_id, p)), table, np.array([p + 1]),
                         np.array([slot]), weights, kv, logits)  # fmt: skip
    what = f"tinypy, {len(prompt)} tokens, one at a time: the last logits"
    compare(logits[0], lm.logits(prompt)[-1], what)


# ── 09.7 Two equal prompts, different tokens ──────────────────────────────────────────────

# A program is (tokens, borders of the steps that compute them, other sequences in each step). The
# first step's tokens may have come from the prefix cache: then only later ones are computed. With a
# fourth entry, the second half of the text has the keys of the first and the opposite values.


def rows_of(mine, q, k, v, borders, others: int, log: Log):
    """The rows of one sequence, step by step, beside others."""
    found = []
    for start, end in pairwise(borders):
        beside = [(5 + 3 * i, 1 + i % 3) for i in range(others)]
        more = [(q[:length][-own:], k[:length], v[:length]) for length, own in beside]
        step = [(q[start:end], k[:end], v[:end]), *more]
        parts = [[one.clone() for one in part] for part in zip(*step, strict=True)]
        rows = log.call("", partial(mine.attend_step, *parts), see=False)
        if log.events[-1].error is not None:
            return None
        found.append(rows[0])
    return torch.cat(found)


def same_bits(mine, program, log: Log) -> None:
    num_tokens, borders, others, *cancels = program
    draw = torch.Generator().manual_seed(num_tokens)
    q, k, v = torch.randn(3, num_tokens, 8, generator=draw)
    if cancels:
        half = num_tokens // 2
        k[half:], v[half:] = k[:half], -v[:half]
    steps = " ".join(f"{a}-{b}" for a, b in pairwise(borders))
    cached = f"{borders[0]} tokens cached, " if borders[0] else ""
    beside = f", beside {counted(others, 'other sequence')}" if others else ""
    halves = " whose halves cancel" if cancels else ""
    log(f"a text of {counted(num_tokens, 'token')}{halves}: {cached}steps {steps}{beside}")
    alone = rows_of(mine, q, k, v, [0, num_tokens], 0, log)
    found = rows_of(mine, q, k, v, borders, others, log) if alone is not None else None
    if found is None:
        return
    log("", {"result:": found})
    differ = int((found != alone[borders[0] :]).any(-1).sum())
    told = f"{differ} of {len(found)}" if differ else "none"
    log("the same text alone, in one step, with a cold cache", {"rows with other bits:": told})


def random_steps(seed: int) -> tuple[int, list[int], int]:
    draw = random.Random(seed)
    num_tokens = draw.randint(2, 70)
    places = sorted(draw.sample(range(num_tokens), draw.randint(1, min(4, num_tokens))))
    return num_tokens, [*places, num_tokens], draw.randrange(6)


scenario("09.7", same_bits,
    Group("alone, in one step", [(1, [0, 1], 0), (5, [0, 5], 0), (40, [0, 40], 0)],
          "which keys does each query see?"),
    Group("beside other sequences", [(20, [0, 20], 1), (40, [0, 40], 3), (40, [0, 40], 7),
          (70, [0, 70], 4)], "what in this function depends on how many sequences there are?"),
    Group("in chunks", [(20, [0, 5, 20], 0), (40, [0, 17, 40], 0), (40, [0, 16, 30, 40], 0),
          (50, [0, 49, 50], 0)], "where does a part begin, for a query of the second chunk?"),
    Group("with a warm cache", [(20, [19, 20], 0), (40, [20, 40], 0), (40, [37, 40], 0),
          (66, [65, 66], 0)], "where does a part begin, if most of the context was cached?"),
    Group("any steps", [random_steps(seed) for seed in range(40)],
          "which query differs: of a later chunk, behind a warm cache, or beside others?"),
    Group("where values cancel", [(num_tokens, [0, 17, num_tokens], 2, "cancels")
          for num_tokens in (20, 40, 60)], "are the sums the same, or only equal after rounding?"),
)  # fmt: skip


# ── The reader's parts in the engine ──────────────────────────────────────────────────────

PROMPTS = ("class Stack:\n    def push(self, item):\n", "import os\n")
NEW_TOKENS = 24


def generate(lm: minikv.LanguageModel, engine: minikv.Engine) -> str:
    """Two requests, twice, the second time on the clock; a sentence about it."""
    prompts = [lm.encode(text) for text in PROMPTS]
    params = minikv.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    for _ in range(2):
        started = perf_counter()
        outputs = engine.generate(prompts, params)
        seconds = perf_counter() - started
    speed = len(PROMPTS) * NEW_TOKENS / seconds
    return f"{decoded(lm, prompts, outputs)}, {speed:,.0f} tokens per second"


def run_decodes(name: str, mine, lm: minikv.LanguageModel) -> str:
    attention = KernelAttention.of(getattr(mine, name))
    return f"{generate(lm, engine_by(lm, attention))}: decodes by `{name}`."


runs_model("09.1")(partial(run_decodes, "decode"))
runs_model("09.2")(partial(run_decodes, "decode_by_group"))


@runs_model("09.4")
def _(mine, lm: minikv.LanguageModel) -> str:
    attention = KernelAttention.of(mine.decode_in_pieces)
    return f"{generate(lm, engine_by(lm, attention))}: in two pieces."


@runs_model("09.5")
def _(mine, lm: minikv.LanguageModel) -> str:
    engine = engine_by(with_products(lm, mine.matmul))
    return f"{generate(lm, engine)}: all matrix products by `matmul`."


@runs_model("09.6")
def _(mine, lm: minikv.LanguageModel) -> str:
    return f"{generate(lm, engine_by(lm, step=mine.decode_step))}: every decode step one program."


@runs_model("09.3")
def _(mine, lm: minikv.LanguageModel) -> str:
    engine = minikv.Engine(lm, minikv.EngineConfig(num_blocks=64))
    lens = [len(lm.encode(text)) for text in PROMPTS]
    limit = mine.attention_limit(lens, lm.config, FLOAT32, SLOW)
    witness(limit.num_bytes)
    kept = sum(lens) * engine.store.bytes_per_token
    if limit.num_bytes != kept:
        raise Wrong(f"{limit.num_bytes} bytes by your arithmetic, {kept} in the engine's store")
    return f"{sum(lens)} tokens of tinypy are {kept:,.0f} bytes in the engine's store, as you count"
