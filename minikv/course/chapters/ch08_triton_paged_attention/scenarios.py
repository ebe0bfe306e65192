"""Chapter 08 as programs: kernels in Triton's interpreter, from adding two vectors to splits.

Each runs under a `Watch`, and what that sees is compared like the result: which program reads how
much, which writes where. What a GPU's compiler says of a kernel is the last check of each exercise.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

import minikv
from minikv.course.chapters.ch04_paged_blocks.block_by_block import DecodesTogether
from minikv.course.chapters.ch08_triton_paged_attention.watch import (
    Watch,
    compiled,
    shown_elements,
)
from minikv.course.judge.checking import Wrong, check, runs_model
from minikv.course.judge.examine import COMPILES
from minikv.course.judge.programs import advice, at_most, decoded, line
from minikv.course.judge.scenarios import Log, scenario
from minikv.course.pictures.snapshot import counted

# ── Under the watch ───────────────────────────────────────────────────────────


def run(
    log: Log, what: str, call: Callable, inputs: tuple, more: Callable, backwards: bool = False
) -> None:
    """Note what a launch gives and touches, and what `more(seen)` says and sees besides."""
    with Watch(backwards) as seen:
        found = log.call(what, call, see=False)
    if log.events[-1].error is not None:
        return
    is_nan = isinstance(found, torch.Tensor) and bool(found.isnan().any())
    missing = seen.never_written(found)
    said, sights = more(seen)
    said = seen.unwritten[:1] + seen.races[:1] + said
    if is_nan and seen.undefined:
        said.insert(0, f"{seen.undefined[0]} has a masked load without `other`")
    if missing:
        said.insert(0, f"no program writes {shown_elements(missing)} of the result")
    written = [
        name
        for name, value in seen.launches[0].arguments.items()
        if any(value is one for one in inputs) and value.data_ptr() in seen.written
    ]
    log(
        said[0] if said else "",
        {
            "result": exact(found),
            "largest number of the result:": largest(found),
            "elements that no program writes:": len(missing),
            "masked loads without `other`, which give NaN:": len(seen.undefined) * is_nan,
            "reads of elements that no program has written:": len(seen.unwritten),
            "elements with two or more writers:": len(seen.races),
            "inputs that are written to:": written,
            **sights,
        },
    )


def exact(found):
    """Whole numbers are compared as such, other results to rounding."""
    is_whole = isinstance(found, torch.Tensor) and not found.is_floating_point()
    return found.tolist() if is_whole else found


def largest(found) -> float | None:
    """Results that differ by a factor are not alike: a sum that is never divided, say."""
    is_some = isinstance(found, torch.Tensor) and found.numel()
    return round(float(found.double().nan_to_num().abs().max()), 2) if is_some else None


def argument(seen: Watch, place: int) -> str:
    """What the reader calls an argument of the first kernel that was started."""
    return list(seen.launches[0].arguments)[place]


PRINTS, NO_KERNEL = (
    advice("08.1", name) for name in ("leaves a print in", "is Python, and no kernel")
)
NO_DOT, TO_TF32 = (
    advice("08.4", name) for name in ("multiplies without tl.dot", "leaves float32 to tf32")
)


def compiles(exercise: str, call: Callable, num_products: int = 0) -> None:
    """Make what a GPU's compiler says of the kernels that `call(mine)` starts a line."""

    @check(exercise, COMPILES, hands_over=False)
    def _(mine):
        with Watch(dry=True) as seen:
            call(mine)
        for result in compiled(mine.__file__, seen.launches):
            kernel = result["kernel"]
            if "error" in result:
                why = PRINTS if "is not string" in result["error"] else NO_KERNEL
                raise Wrong(
                    f"{Path(mine.__file__).name}, line {result['line']}, in {kernel}: "
                    f"{result['error']}",
                    *why,
                )
            if kernel != "join_kernel" and result["dots"] < num_products:
                raise Wrong(
                    f"{kernel} has {result['dots']} `tl.dot`, expected {num_products}", *NO_DOT
                )
            if result["tf32"]:
                raise Wrong(
                    f"{kernel}: compiled for sm_90, a `tl.dot` rounds float32 to tf32", *TO_TF32
                )


# ── 08.1 A tile for each program ──────────────────────────────────────────────

# A case is (elements, TILE), and the dtype where it is not float32.


def sums(mine, program, log: Log) -> None:
    size, tile, *dtype = program
    generator = torch.Generator().manual_seed(size)
    x, y = torch.randint(-80, 80, (2, size), generator=generator) / 4
    if dtype:
        x, y = ((4 * value).to(*dtype) for value in (x, y))
    if dtype == [torch.int64]:
        x, y = x + 2**40, y + 2**24

    def more(seen: Watch) -> tuple[list[str], dict]:
        writers = seen.writers.get(argument(seen, 2))
        programs = range(-(-size // tile))
        shares = [[] if writers is None else (writers == p).nonzero()[0].tolist() for p in programs]
        # What a mask leaves out may also be a second look at the last element.
        counts = [sum(seen.reads[argument(seen, place)].values()) for place in (0, 1)]
        reads = [at_most(tile * len(programs), read) for read in counts]
        return [], {
            "elements that programs 0, 1, … write:": shares,
            "stores of programs 0, 1, …:": [seen.stores[p] for p in programs],
            "elements read of x and of y:": reads,
        }

    what = f"{counted(size, 'element')}, tiles of {tile}"
    what += f", {str(dtype[0]).removeprefix('torch.')}" if dtype else ""
    run(log, what, partial(mine.add, x, y, tile), (x, y), more)


scenario("08.1", sums,
    line("one full tile", "`tl.load(x + element)`, and a store to `out + element`", (4, 4), (1, 1),
         (16, 16)),
    line("several full tiles", "which elements belong to program 2?", (5, 1), (8, 4), (12, 4),
         (128, 64)),
    line("the example: 10 elements, three programs", "the mask of the last tile", (10, 4)),
    line("any length, any tile", "the mask of the last tile", (1, 4), (3, 2), (3, 4), (6, 4),
         (9, 4), (11, 8), (100, 16), (7, 64), (65, 64)),
    line("any type of number", "is the type of x kept from the load to the store?",
         (5, 4, torch.int64), (5, 4, torch.int32), (5, 4, torch.float16), (5, 4, torch.float64)),
    in_turn=True,
)  # fmt: skip
compiles("08.1", lambda mine: mine.add(torch.ones(10), torch.ones(10)))


# ── 08.2 A running softmax ────────────────────────────────────────────────────


def draw(length: int, kv_heads: int, dim: int, heads: int, generator) -> tuple[torch.Tensor, ...]:
    """q (H, D); k, v (L, K, D)."""
    q = 2 * torch.randn(heads, dim, generator=generator)
    return q, *torch.randn(2, length, kv_heads, dim, generator=generator)


def lifted(scores: str, tile: int, q, k, v) -> tuple[torch.Tensor, ...]:
    """The same with scores of about that: the keys point along the queries, which all do alike."""
    if not scores:
        return q, k, v
    unit = q[:1] / q[:1].norm()
    if scores == FAR_BELOW:  # no rounding can tell these scores from one another
        # Small values: one logarithm of a sum is right, too, and has errors of 0.1 % there.
        return (q * 0 + unit) * q.shape[1] ** 0.5, k * 0 - 20_000.0 * unit, v / 40
    signs = torch.ones(len(q))
    if scores == HEADS_DIFFER:
        signs[1::2] = -1
    size = torch.full((len(k),), -300.0 if scores.startswith("-") else 300.0)
    if "after" in scores:
        size[tile:] = -300.0
    if "rising" in scores:
        size = torch.arange(len(k)) * 20.0 - 300
    return signs[:, None] * unit * q.shape[1] ** 0.5, k + size[:, None, None] * unit, v


HEADS_DIFFER = "300, and for head 1 of -300"
FAR_BELOW = "-20,000"
LOUD = ("300", "-300", "300, after the first tile -300", "-300, rising")

# A case is (context, head dim, TILE, how large the scores are: drawn at random if "").


def attends(mine, program, log: Log) -> None:
    length, dim, tile, scores = program
    q, k, v = draw(length, 1, dim, 1, torch.Generator().manual_seed(length))
    q, k, v = (value[..., 0, :].clone() for value in lifted(scores, tile, q, k, v))
    q = q.view(dim)

    def more(seen: Watch) -> tuple[list[str], dict]:
        names = argument(seen, 1), argument(seen, 2)
        most = max(seen.largest[name] for name in names) // dim
        reads = [tokens(sum(seen.reads[name].values()), dim) for name in names]
        return [], {
            "keys and values that are read:": reads,
            "keys held at a time:": at_most(tile, most),
        }

    what = f"{counted(length, 'token')}, tiles of {tile}, head_dim {dim}" + of_about(scores)
    run(log, what, partial(mine.attend, q, k, v, tile), (q, k, v), more)


def tokens(numbers: int, each: int) -> int | float:
    return numbers // each if numbers % each == 0 else numbers / each


def of_about(scores: str) -> str:
    return f", scores of about {scores}" if scores else ""


scenario("08.2", attends,
    line("one full tile", "scores, weights, the weighted sum of values, the division",
         (4, 16, 4, ""), (1, 16, 1, ""), (16, 4, 16, "")),
    line("several full tiles", "what is carried from tile to tile", (8, 16, 4, ""), (3, 16, 1, ""),
         (32, 4, 16, "")),
    line("a last tile that is not full", "which keys of the last tile exist?", (10, 2, 4, ""),
         (7, 16, 4, ""), (3, 16, 4, ""), (1, 16, 4, ""), (9, 32, 8, "")),
    line("scores far above and far below 0", "what is subtracted from a score",
         *((11, 16, 4, scores) for scores in (*LOUD, FAR_BELOW))),
    line("any sizes", "which keys of the last tile exist?", (7, 32, 64, ""), (70, 64, 16, ""),
         (23, 2, 8, ""), (9, 16, 2, "")),
    in_turn=True,
)  # fmt: skip
compiles("08.2", lambda mine: mine.attend(torch.ones(8), torch.ones(11, 8), torch.ones(11, 8)))


# ── 08.3 Through the block table ──────────────────────────────────────────────

QUIET, LOUDER = 2.0, 1000.0  # what lies in slots without a token


@dataclass(frozen=True, eq=False)
class Case:
    """Sequences in one pool, their blocks anywhere. What is not theirs holds other numbers."""

    lens: tuple[int, ...]
    block_size: int = 4
    heads: int = 1
    kv_heads: int = 1
    dim: int = 16
    fill: float = QUIET
    scores: str = ""
    splits: int = 0

    @cached_property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """q, kv, block tables, context lengths."""
        seed = sum(self.lens)
        generator = torch.Generator().manual_seed(seed)
        widths = [self.blocks(length) for length in self.lens]
        pool = sum(widths) + 2
        ids = random.Random(seed).sample(range(pool), sum(widths))
        shape = (pool, self.block_size, 2, self.kv_heads, self.dim)
        kv = self.fill * torch.randn(shape, generator=generator)
        # Beyond a context a table names blocks that do not exist.
        tables = torch.full((len(self.lens), max(widths) + 1), 10**9)
        queries = []
        for row, (length, width) in enumerate(zip(self.lens, widths, strict=True)):
            drawn = draw(length, self.kv_heads, self.dim, self.heads, generator)
            q, k, v = lifted(self.scores, self.block_size, *drawn)
            tables[row, :width] = torch.tensor(ids[:width])
            slots = [
                ids[p // self.block_size] * self.block_size + p % self.block_size
                for p in range(length)
            ]
            kv.flatten(0, 1)[slots] = torch.stack([k, v], 1)
            del ids[:width]
            queries.append(q)
        return torch.stack(queries), kv, tables, torch.tensor(self.lens)

    def blocks(self, length: int) -> int:
        return -(-length // self.block_size)

    @property
    def what(self) -> str:
        lens = list(self.lens)
        some = f"context lengths {lens}" if len(lens) > 1 else f"context {lens[0]}"
        heads = f"{counted(self.heads, 'query head')} on {counted(self.kv_heads, 'KV head')}"
        what = f"{some}, blocks of {self.block_size}, {heads}, head_dim {self.dim}"
        what += f", {counted(self.splits, 'split')}" if self.splits else ""
        what += "" if self.fill == QUIET else f", other slots {self.fill:g}"
        return what + of_about(self.scores)


def decodes(function: str, mine, case: Case, log: Log) -> None:
    """A case is a Case. Those of a sequence and head, or group of heads, are `splits`."""
    arguments = tuple(value.clone() for value in case.arguments)
    options = {"splits": case.splits} if case.splits else {}
    splits, width = case.splits or 1, arguments[2].shape[1]

    def more(seen: Watch) -> tuple[list[str], dict]:
        kv, tables = argument(seen, 1), argument(seen, 2)
        by_program = seen.looked_up[tables]
        entries = sorted(set().union(*by_program.values()))
        beyond = [
            f"entry {i} of block table {row} is read, but {counted(case.lens[row], 'token')} need "
            f"{counted(case.blocks(case.lens[row]), 'block')}"
            for row, i in (divmod(entry, width) for entry in entries)
            if i >= case.blocks(case.lens[row])
        ]
        num_programs = len(case.lens) * seen.launches[0].grid[1]
        reads = [0] * num_programs
        for program, count in seen.reads[kv].items():
            reads[program // splits] += count
        who = "each program reads" if splits == 1 else "all splits of a KV head read"
        sights = {
            "entries of the block tables that are read past a context:": len(beyond),
            f"tokens that {who}:": [tokens(count, 2 * case.dim) for count in reads],
            "tokens held at a time:": at_most(
                max(32, case.block_size), seen.largest[kv] // case.dim
            ),
        }
        if splits > 1:
            most = max(map(len, by_program.values()), default=0)
            share = -(-case.blocks(max(case.lens)) // splits)
            sights["blocks that one split reads:"] = at_most(share, most)
            per_row = seen.launches[0].grid[1] * splits  # programs of a sequence
            sights["splits that read more blocks than their share:"] = sum(
                len(read) > -(-case.blocks(case.lens[program // per_row]) // splits)
                for program, read in by_program.items()
            )
        return beyond, sights

    call = partial(getattr(mine, function), *arguments, **options)
    run(log, case.what, call, arguments, more)


scenario("08.3", partial(decodes, "decode"),
    line("one sequence, one full block", "the addresses: which block, which head", Case((4,))),
    line("one sequence, several blocks", "what is loaded before the keys?", Case((7,)),
         Case((3,), 1), Case((37,), 16, dim=8), Case((150,), 4, dim=8)),
    line("several heads", "which KV head does query head 1 read?", Case((3,), 4, 4, 2),
         Case((1,), 2, 3, 3)),
    line("several sequences", "the row of q, of the table, of the lengths", Case((6, 3)),
         Case((1, 9), 4, 2, 1, 8)),
    line("anything in slots without a token", "the masks of the loads", Case((6,), fill=LOUDER),
         Case((3,), fill=torch.nan)),
    line("scores far above and far below 0", "what is subtracted from a score",
         *(Case((7,), scores=scores) for scores in (*LOUD[:3], FAR_BELOW))),
    in_turn=True,
)  # fmt: skip
compiles("08.3", lambda mine: mine.decode(*Case((5, 2), 4, 4, 2).arguments))


# ── 08.4 A group in one product ───────────────────────────────────────────────

scenario("08.4", partial(decodes, "decode_packed"),
    line("one query head per KV head",
         "the shapes: (ROWS, …) for what each row has; and `other` of each masked load",
         Case((16,), 16), Case((32,), 32), Case((19,), 16, 2, 2, 32), Case((150,), 16)),
    line("groups of 2, 3 and 4", "6 heads on 2 KV heads: which are the rows of group 1?",
         Case((19,), 16, 2), Case((5,), 16, 6, 2), Case((37,), 16, 4)),
    line("a group of 20", "ROWS is given: at least 16, and a power of two", Case((20,), 16, 20)),
    line("several sequences", "the row of q, of the table, of the lengths", Case((17, 3), 16, 2),
         Case((1, 33), 32, 4, 2)),
    line("anything in slots without a token", "the masks of the loads",
         Case((21,), 16, 2, fill=LOUDER), Case((1,), 16, 2, fill=torch.nan)),
    line("scores far above and far below 0", "what is subtracted from a score",
         *(Case((21,), 16, 2, scores=scores) for scores in (HEADS_DIFFER, *LOUD[:3], FAR_BELOW))),
    in_turn=True,
)  # fmt: skip
compiles("08.4", lambda mine: mine.decode_packed(*Case((5, 20), 16, 4, 2).arguments), 2)


# ── 08.5 Split and join ───────────────────────────────────────────────────────


def split(splits: int, *lens: int, **options) -> Case:
    return Case(lens, 16, **options, splits=splits)


scenario("08.5", partial(decodes, "decode_split"),
    line("one split: nothing to join", "what is stored for a split, and where?",
         split(1, 19, heads=2)),
    line("two and four splits, with equally many blocks", "which blocks belong to split 1?",
         split(2, 32), split(4, 64)),
    line("splits of different lengths", "a split has whole blocks: how many does each get?",
         split(2, 35), split(2, 75)),
    line("an empty split", "what does an empty split store?", split(2, 5), split(4, 32),
         split(4, 69)),
    line("several heads and sequences of very different lengths",
         "each has its own split size, and its own places in `partial` and `lse`",
         split(2, 19, heads=2, kv_heads=2), split(2, 40, 3, heads=2)),
    line("scores far above and far below 0", "what is subtracted before `exp`",
         split(2, 5, scores="-300"), *(split(2, 35, scores=scores) for scores in LOUD[:3])),
    in_turn=True,
)  # fmt: skip
compiles("08.5", lambda mine: mine.decode_split(*Case((5, 20), 16, 4, 2).arguments), 2)


# ── 08.6 Right on this machine ────────────────────────────────────────────────

# A case is (context lengths, block size, what is looked at).


def packs(mine, program, log: Log) -> None:
    lens, block_size, looks = program
    _, kv, tables, context_lens = Case(lens, block_size, 1, 2, 8).arguments
    tables = tables.masked_fill(tables == 10**9, 0)[:, :-1].contiguous()
    backwards = looks == "backwards"
    what = f"packing {', '.join(map(str, lens))} tokens, blocks of {block_size}"
    what += ", programs from the last to the first" if backwards else ""
    with Watch(backwards) as seen:
        found = log.call(what, mine.gather, kv, tables, context_lens, see=False)
    if log.events[-1].error is not None:
        return
    races = seen.races if looks == "writers" else []
    log("; ".join(races[:1]), {"result": found, "elements with two or more writers:": len(races)})


LAST_BLOCK = "for which positions is `held` true, in the last block of a sequence?"

scenario("08.6", packs,
    line("packing: blocks that are full", "which rows does each program write?",
         *(((2 * size, size), size, "") for size in (4, 1, 16))),
    line("packing: 5, 7 and 8 tokens", "which rows does each program write?", ((5, 7, 8), 4, ""),
         ((1, 16), 16, "")),
    line("packing: the same, programs in another order", LAST_BLOCK, ((5, 7, 8), 4, "backwards"),
         ((1, 16), 16, "backwards")),
    line("packing: no row has two writers", LAST_BLOCK, ((5, 7, 8), 4, "writers"),
         ((3, 1, 1, 2), 2, "writers"), ((17, 16), 16, "writers")),
    line("packing: the last sequence ends inside a block", LAST_BLOCK, ((3,), 4, "writers"),
         ((8, 5), 4, "writers"), ((4, 4, 9), 8, "writers")),
    in_turn=True,
)  # fmt: skip


class Recording:
    """A captured step's recording; counts how often it is played."""

    def __init__(self, graph: Callable):
        self.graph, self.played = graph, 0

    def __call__(self) -> None:
        self.played += 1
        self.graph()

    def __getattr__(self, name: str):
        return getattr(self.graph, name)


# A case is a tuple of steps: what is told of it, and for each sequence its length and blocks,
# which have 4 slots. A step gets the tensors of the one before again, changed, where they fit.


def steps(mine, case, log: Log) -> None:
    generator = torch.Generator().manual_seed(8)
    kv = torch.randn(24, 4, 2, 1, 16, generator=generator)
    decode = mine.CapturedDecode(kv, 1, max_seqs=2, max_blocks=4)
    decode.graph = recording = Recording(decode.graph)
    held = {name: getattr(decode, name) for name in ("q", "block_tables", "context_lens")}
    log("blocks of 4")
    old = [torch.zeros(0)] * 3
    for what, *rows in case:
        width = max(len(blocks) for _, blocks in rows)
        now = [
            2 * torch.randn(len(rows), 1, 16, generator=generator),
            torch.tensor([blocks + (0,) * (width - len(blocks)) for _, blocks in rows]),
            torch.tensor([length for length, _ in rows]),
        ]
        if all(one.shape == other.shape for one, other in zip(old, now, strict=True)):
            now = [one.copy_(other) for one, other in zip(old, now, strict=True)]
        old, before = now, recording.played
        lens = f"context {' and '.join(str(length) for length, _ in rows)}"
        with Watch():
            found = log.call(what + lens, decode.replay, *now, see=False)
        if log.events[-1].error is not None:
            return
        other = [name for name, value in held.items() if getattr(decode, name) is not value]
        sights = {
            "inputs of the recording that were replaced by other tensors:": other,
            "result": found,
            "times that the recording was played:": recording.played - before,
            "context lengths of the rows that no sequence uses:": decode.context_lens[len(rows) :],
        }
        log("", sights)


def going_on(turns: int, *starts: tuple[int, tuple]) -> tuple:
    """`turns` steps, in each of which every sequence has one more token."""
    return tuple(
        ("", *((n + turn, blocks[: -(-(n + turn) // 4)]) for n, blocks in starts))
        for turn in range(turns)
    )


A, B, C = (7, 20, 3), (12, 9), (5, 16, 22)

scenario("08.6", steps,
    line("a step: the first, and the next", "which inputs does `replay` copy?", going_on(2, (5, A)),
         going_on(2, (2, B), (9, C))),
    line("a step in which a sequence opens a block", "which inputs can change?",
         going_on(3, (3, A)), going_on(2, (8, A), (4, B))),
    line("a step after a shared block was copied", "which inputs can change?",
         (("", (6, A[:2])), ("block 20 was copied to 4, ", (7, (7, 4)))),
         (("", (2, B), (6, A[:2])), ("block 7 was copied to 8, ", (3, B), (7, (8, 20))))),
    line("a step of another batch", "which inputs can change?",
         (("", (5, A[:2])), ("another sequence, ", (6, B))),
         (("", (5, A[:2])), ("another sequence, ", (5, (9, 18)))),
         (("", (5, A[:2]), (2, B[:1])), ("two others, ", (6, (13, 14)), (3, (15,))),
         ("one more, ", (4, (1,))), ("two more, ", (1, (6,)), (7, (2, 3))))),
    line("a step with fewer sequences than there are rows", "what do the other rows hold?",
         (("", (8, A[:2]), (3, B[:1])), ("the second has ended, ", (9, A))),
         (("", (9, C), (6, A[:2])), ("the first has ended, ", (7, A[:2])),
         ("two again, ", (8, A), (3, B)))),
    in_turn=True,
)  # fmt: skip


# ── The reader's parts in the engine ──────────────────────────────────────────

PROMPTS = ("class Stack:\n    def push(self, item):\n", "import os\n")
NEW_TOKENS = 4


def generate(lm: minikv.LanguageModel, attend_all: Callable) -> str:
    """tinypy with decodes by `attend_all`, prefills by the reference; a sentence about it."""
    prompts = [lm.encode(text) for text in PROMPTS]
    engine = minikv.Engine(
        lm,
        minikv.EngineConfig(num_blocks=16, block_size=16, prefix_cache=False),
        attention=partial(DecodesTogether, attend_all=attend_all),
    )
    params = minikv.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    return decoded(lm, prompts, engine.generate(prompts, params))


class Programs:
    """Calls a function, and counts the programs that it starts."""

    def __init__(self, function: Callable):
        self.function, self.calls, self.rows = function, 0, 0

    def __call__(self, q, kv, block_tables, context_lens):
        self.calls += 1
        self.rows += len(q)
        return self.function(q, kv, block_tables, context_lens)


def run_decodes(name: str, each: Callable, mine, lm: minikv.LanguageModel) -> str:
    function = Programs(getattr(mine, name))
    said = generate(lm, function)
    programs = function.rows * each(lm.config)
    return f"{said}: {function.calls} calls of `{name}`, {programs:,} programs of your kernel."


def by_heads(config) -> int:
    return config.num_heads


def by_kv_heads(config) -> int:
    return config.num_kv_heads


def by_splits(config) -> int:
    return 4 * config.num_kv_heads


runs_model("08.3")(partial(run_decodes, "decode", by_heads))
runs_model("08.4")(partial(run_decodes, "decode_packed", by_kv_heads))
runs_model("08.5")(partial(run_decodes, "decode_split", by_splits))


@runs_model("08.6")
def _(mine, lm: minikv.LanguageModel) -> str:
    """tinypy on a captured step for each layer."""
    steps = {}

    def replay(q, kv, block_tables, context_lens):
        if kv.data_ptr() not in steps:  # a layer's
            step = mine.CapturedDecode(kv, q.shape[1], max_seqs=2, max_blocks=4)
            step.graph = Recording(step.graph)
            steps[kv.data_ptr()] = step
        return steps[kv.data_ptr()].replay(q, block_tables, context_lens).clone()

    said = generate(lm, replay)
    played = sum(step.graph.played for step in steps.values())
    return f"{said}: {len(steps)} recordings, one a layer, played {played} times."
