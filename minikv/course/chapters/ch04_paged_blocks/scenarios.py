"""Chapter 04 as programs: the pool, the table, slots, and attention over blocks."""

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from string import ascii_letters, ascii_uppercase
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import minikv
from minikv import OutOfBlocks
from minikv.backend import AttentionBackend
from minikv.course.chapters.ch04_paged_blocks.block_by_block import BlockByBlock, DecodesTogether
from minikv.course.judge.checking import plain, runs_model, tinypy, witness
from minikv.course.judge.programs import OperationMode, scramble
from minikv.course.judge.scenarios import Group, Log, scenario

TEXTS = ("class Stack:\n    def push(self, item):\n", "import os\n\ndef fib(n):", "for i in range(")


def quietly(call: Callable, argument: int) -> None:
    """What is returned does not matter, only whether an error is raised."""
    call(argument)


# ── 04.1 A pool of blocks ─────────────────────────────────────────────────────

# A program is (blocks in the pool, steps, what is looked at). Which block is handed out is up to
# the pool, so blocks have letters, in the order in which they come:
#     +   the next one     A-  A is released     A&  A gets one more holder
#     ?-  a block that was never handed out is released     -1-  block -1 is released


def pools(mine, program, log: Log) -> None:
    num_blocks, steps, looks = program
    pool, other = mine.BlockPool(num_blocks), mine.BlockPool(num_blocks)
    ids: dict[str, int] = {}
    held: list[str] = []  # a letter for each holder
    log(f"a pool of {num_blocks}")
    for step in steps.split():
        name = step[:-1]
        if step == "+":
            name = ascii_uppercase[len(ids)]
            text = f"{name} = allocate()"
            found = log.call(text, pool.allocate, see=False)
            error = log.events[-1].error
            if isinstance(error, OutOfBlocks) and "error" in looks:
                log(text, {"(needed, free) of the error:": [error.needed, error.free]})
            if error is None:
                kind = kind_of_block(found, num_blocks, {ids[one]: one for one in held})
                log(text, {"what comes back is": kind})
                if kind != "a free block":
                    return
                ids[name] = found
                held.append(name)
        elif step[-1] == "&":
            log.call(f"acquire({name})", pool.acquire, ids[name])
            held.append(name)
        else:
            never = (one for one in range(num_blocks) if one not in ids.values())
            block_id = next(never) if name == "?" else ids[name] if name in ids else int(name)
            text = f"release({name if name != '?' else block_id})"
            text += " once more" * (log.events[-2:][0].text == text)
            log.call(text, quietly, pool.release, block_id)
            if name in held:
                held.remove(name)
            elif log.events[-1].error is None:  # what became of it tells one mistake from another
                count = pool.ref_count(block_id) if block_id in range(num_blocks) else "none"
                log.events[-1].seen["result"] = f"num_free {pool.num_free}, ref_count {count}"
        taken = {ids[name]: name for name in sorted(held)}
        free = [one for one in range(num_blocks) if one not in taken]
        seen = {
            f"ref_count of {', '.join(taken.values())}:": [pool.ref_count(one) for one in taken],
            "ref_count of the free blocks:": [pool.ref_count(one) for one in free],
            "num_free": pool.num_free,
        }
        log("", seen if "counts" in looks else {})
    log("a second, unused pool", {"num_free": other.num_free})


def kind_of_block(found, num_blocks: int, taken: dict[int, str]) -> str:
    if found is None:
        return "nothing"
    if not isinstance(found, int) or found not in range(num_blocks):
        return f"{found!r}, which is not a block of this pool"
    return f"block {found}, which is {taken[found]} already" if found in taken else "a free block"


def random_holders(seed: int, num_blocks: int, length: int):
    """Blocks that are taken, shared and released, at random; sometimes from an empty pool."""
    draw, used = random.Random(seed), 0
    held: list[str] = []
    steps: list[str] = []
    for _ in range(length):
        kind = draw.choice("++&---")
        if kind == "+" or not held:
            steps.append("+")
            if len(set(held)) < num_blocks:
                held.append(ascii_uppercase[used])
                used += 1
        elif kind == "&":
            held.append(draw.choice(held))
            steps.append(f"{held[-1]}&")
        else:
            steps.append(f"{held.pop(draw.randrange(len(held)))}-")
    return num_blocks, " ".join(steps), "counts error"


scenario("04.1", pools,
    Group("each block is handed out once", [(n, "+ " * n, "") for n in (1, 2, 5, 16)],
          "what `allocate` takes, and what it returns"),
    Group("a block handed out has one holder, and is not free",
          [(3, "+ " * n, "counts") for n in (1, 2, 3)],
          "which line of `allocate` writes `_ref_counts`?"),
    Group("an empty pool says OutOfBlocks", [(n, "+ " * n + "+ +", "error") for n in (1, 2)],
          "the first lines of `allocate`"),
    Group("a shared block is freed by its last holder",
          [(2, "+ A-", "counts"), (2, "+ A& A- A-", "counts"),
          (3, "+ + B& B& B- B- B- A-", "counts")], "what `release` changes, and when"),
    Group("a block that came back is handed out again",
          [(1, "+ A- + B- +", "counts"), (3, "+ + + B- +", "counts"),
          (3, "+ + + C- A- + +", "counts"), (3, "+ + + + A& A- A- + D- B- +", "counts error")],
          "what `release` does for the last holder, and whether `allocate` sees it"),
    Group("a free block cannot be released",
          [(3, "+ A- A-", "counts"), (3, "+ ?-", "counts"), (1, "?-", "counts"),
          (3, "+ + B& A- A- B- B- B- A-", "counts"), (2, "+ A- A- A- + + +", "counts error"),
          (7, "+ + + + + + A- B- C- D- E- F- A-", "counts")],
          "what `release` does when the count is 0"),
    Group("a block that is not in the pool cannot be released",
          [(2, f"+ + {block_id}-", "counts") for block_id in (-1, 2, -2, 3, 100)]
          + [(1, "-1-", "counts"), (1, "+ 1-", "counts")],
          "which method of the pool knows the ids that exist? -1 is an index, too"),
    Group("nothing is lost or doubled in 90 random traces",
          [random_holders(seed, 1 + seed % 6, 4 + seed // 3) for seed in range(90)],
          "every line that changes the free list or a count: the two belong together"),
)  # fmt: skip


# ── 04.2 A table that grows ───────────────────────────────────────────────────

# A program is (block size, blocks in the pool, steps, what is looked at). Steps, table by letter:
#     A+7   grows by 7 tokens        A-    gives all back

ALL = "blocks tokens order counts pool"


def tables(mine, program, log: Log) -> None:
    size, num_blocks, steps, looks = program
    pool = scramble(minikv.BlockPool(num_blocks))
    live: dict[str, Any] = {}
    promised: dict[str, int] = {}  # tokens, by table
    letters: dict[str, dict[int, str]] = {}  # of each table's blocks
    log(f"blocks of {size}, {num_blocks} in the pool")
    for step in steps.split():
        name, action, amount = step[0], step[1], int(step[2:] or 0)
        if name not in live:
            live[name] = mine.BlockTable(pool, size)
        table = live[name]
        text = f"table {name}: " if "B" in steps else ""
        if action == "+":
            text += f"grow({amount})" + f" to {promised.get(name, 0) + amount}" * (amount > 0)
            text += f" with {pool.num_free} free" * ("error" in looks)
            log.call(text, quietly, table.grow, amount)
            if log.events[-1].error is None:
                promised[name] = promised.get(name, 0) + amount
        else:
            text += "release()"
            log.call(text, table.release)
            promised[name], letters[name] = 0, {}
        # Which of the free blocks it takes first does not matter, so they have letters here.
        known, ids = letters.setdefault(name, {}), list(table.block_ids)
        order = [known.setdefault(one, ascii_letters[len(known) % 52]) for one in ids]
        everything = {
            "blocks": ("blocks in the table:", len(ids)),
            "tokens": ("num_tokens", table.num_tokens),
            "order": ("order of the blocks:", " ".join(order)),
            "counts": ("ref_count of its blocks:", [count_of(pool, one) for one in ids]),
            "pool": ("free blocks:", pool.num_free),
        }
        log(text, dict(value for look, value in everything.items() if look in looks))
    held = [block_id for table in live.values() for block_id in table.block_ids]
    log("all tables together", {"different blocks:": len(set(held))} if "counts" in looks else {})


def count_of(pool, block_id) -> int | str:
    known = isinstance(block_id, int) and 0 <= block_id < pool.num_blocks
    return pool.ref_count(block_id) if known else f"{block_id!r} is not a block of the pool"


def random_growths(seed: int, length: int):
    """Tables that grow and end, at random, often in a pool with too few blocks."""
    draw, size, steps = random.Random(seed), (1, 3, 4, 16)[seed % 4], []
    for _ in range(length):
        action = draw.choice("+++++-")
        amount = str(draw.randrange(2 * size + 3)) if action == "+" else ""
        steps.append(draw.choice("ABC"[: 1 + seed % 3]) + action + amount)
    num_blocks = draw.randrange(2, 8) if seed % 3 else 3 * length
    return size, num_blocks, " ".join(steps), ALL


scenario("04.2", tables,
    Group("7 tokens, then the 8th, then the 9th", [(4, 20, "A+7 A+1 A+1", "blocks")],
          "how many blocks of 4 do 7, 8 and 9 tokens need?"),
    Group("no block too few or too many, at any block size",
          [(size, 200, " ".join(f"A+{amount}" for amount in amounts), "blocks")
          for size in (1, 3, 4, 16) for amounts in ((1,), (size,), (size + 1,), (size, 0, size),
          (1, 1, size - 1, 1), (size, 1, size), (2 * size - 1, 1, 2 * size, 2), (0, 3 * size, 5),
          (7 * size + 2, 0, 9, 1), (1,) * (2 * size + 2))],
          "the case in which the new tokens end exactly with a block, and the one with none"),
    Group("num_tokens is what was asked for",
          [(4, 20, "A+7 A+1 A+0 A+3", "tokens"), (3, 20, "A+3 A+4 A+0 A+1 A+9", "tokens")],
          "what `grow` does with `self.num_tokens`"),
    Group("blocks stay in the order in which they came",
          [(4, 20, "A+7 A+2", "order"), (1, 20, "A+1 A+1 A+1 A+4 A+1", "order"),
          (3, 20, "A+4 B+4 A+3 B+3 A+3 B+3", "order")],
          "what is done to `block_ids`: the list is in logical order"),
    Group("every block of a table is held once, and by no other table",
          [(4, 20, "A+7", "counts pool"), (3, 30, "A+4 A+1 A+1 A+6", "counts pool"),
          (3, 30, "A+4 B+4 C+4 A+1 B+1 C+1 A+6 B+6 C+6", "counts pool"),
          (4, 9, "A+7 B+9 A- C+8 B+4", ALL)],
          "which blocks are free, and is there one `allocate` for each id?"),
    Group("the last free block can be used, and no tokens need none",
          [(size, num_blocks, steps, f"error {ALL}")
          for size, num_blocks, steps in ((4, 3, "A+6 A+6"), (4, 1, "A+4 A+0"), (4, 1, "A+3 A+1"),
          (3, 2, "A+1 A+5 A+0"), (4, 1, "A+4 B+0"), (4, 4, "A+6 A+10"))],
          "the comparison with the number of free blocks"),
    Group("too few blocks: OutOfBlocks, and nothing has changed",
          [(size, num_blocks, steps, f"error {ALL}")
          for size, num_blocks, steps in ((4, 3, "A+6 A+7"), (4, 1, "A+5"), (4, 3, "A+6 A+15 A+7"),
          (1, 2, "A+2 A+1"), (4, 4, "A+4 B+8 A+12 B+9 B+4 A+4"), (4, 3, "A+4 B+4 A+9 B- A+8 A+1"))],
          "what has changed before the error is raised"),
    Group("a negative number is refused", [(4, 3, "A+6 A+-1", ALL), (4, 3, "A+-1 A+5", ALL),
          (4, 3, "A+9 A+-9 A+-20", ALL), (4, 1, "A+4 A+-1", ALL)], "the first lines of `grow`"),
    Group("90 random traces", [random_growths(seed, 3 + seed // 10) for seed in range(90)],
          "before the step that differs: was a `grow` refused, or a table released?"),
)  # fmt: skip


# ── 04.3 Where a token goes ───────────────────────────────────────────────────

# A program is (block table, block size, start, end).


def slots(mine, program, log: Log) -> None:
    block_ids, size, start, end = program
    text = f"table {block_ids}, blocks of {size}, start {start}, end {end}"
    found = plain(log.call(text, mine.slot_mapping, list(block_ids), size, start, end, see=False))
    if isinstance(found, list) and any(isinstance(slot, float) for slot in found):
        found = "floats, and no tensor can be indexed with floats"
    log(text, {"result": found})


def positions(size: int, start: int, end: int, spare: int = 0):
    """A table in any order, and positions in it."""
    count = -(-end // size) + spare
    return random.Random(size + end).sample(range(count + 40), count), size, start, end


scenario("04.3", slots,
    Group("the example: positions 2 to 5", [([7, 1, 3], 4, 2, 6)],
          "the table in the docstring, column by column"),
    Group("a whole prompt, at any block size",
          [positions(size, 0, end) for size in (1, 3, 4, 16) for end in (1, size, size + 1, 21)],
          "the last position, and the first of the next block"),
    Group("a chunk that begins inside a block",
          [positions(size, *chunk) for size, *chunk in ((3, 4, 11), (4, 6, 7), (4, 5, 15),
          (4, 4, 8), (16, 13, 40), (1, 2, 5))] + [positions(size, start, end, 2) for size in (3, 4)
          for start in range(9) for end in range(start + 1, 10)],
          "positions count from the start of the sequence"),
    Group("a decode: one position", [([9, 2, 17, 5], 3, position, position + 1)
          for position in range(12)] + [positions(16, 1000, 1001), ([3, 10**6], 16, 31, 32),
          ([5, 0], 4, 4, 5)], "which block is it in, and at which place?"),
    Group("no position, no slot", [([7, 1, 3], 4, 6, 6), ([7, 1, 3], 4, 0, 0),
          ([7, 1, 3], 4, 12, 12), ([], 4, 0, 0)], "what is returned if `start` equals `end`?"),
)  # fmt: skip


# ── 04.4 Attention, one block at a time ───────────────────────────────────────

Scores = Callable[[int, int], float]  # of the token at a position, for a query head


def draw_attention(length, heads, kv_heads, dim, seed, scores: Scores | None = None):
    """q (H, D), kv (L, 2, K, D). `scores` are what q . k / sqrt(D) gives, exactly if D is 16."""
    generator = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(heads, dim, generator=generator)
    kv = torch.randn(length, 2, kv_heads, dim, generator=generator)
    if scores is not None:
        q = dim**0.5 * torch.eye(heads, dim)
        for head in range(heads):
            asked = [scores(place, head) for place in range(length)]
            kv[:, 0, head * kv_heads // heads, head] = torch.tensor(asked)
    return q, kv


def lay_out(sequences: list[torch.Tensor], size: int, noise: float, seed: int):
    """K and V of sequences in one pool, and noise in all other slots: (blocks, block tables). No
    block lies in its own place, and block 0 belongs to a sequence, if that is possible."""
    counts = [-(-len(kv) // size) for kv in sequences]
    draw, pool = random.Random(seed), sum(counts) + 3
    tables, free = [[0]], []
    while any(table[i] == i for table in tables for i in range(len(table))) or (
        0 in free and max(counts) > 1
    ):
        free = draw.sample(range(pool), pool)
        tables = [[free.pop() for _ in range(count)] for count in counts]
    shape = (pool, size, *sequences[0].shape[1:])
    blocks = noise * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    for kv, table in zip(sequences, tables, strict=True):
        for place, token in enumerate(kv):
            blocks[table[place // size], place % size] = token
    return blocks, tables


@dataclass(frozen=True)
class Context:
    """One query, and its context in blocks anywhere in a pool."""

    length: int  # tokens that the query sees
    size: int = 4
    heads: int = 2
    kv_heads: int = 2
    dim: int = 8
    written: int = 0  # tokens that the table has, if they are more
    noise: float = 3.0  # how large the values are where no token lies
    scores: Scores | None = None
    values: Callable[[int], float] | None = None
    note: str = ""
    watch: bool = False  # how much is copied together?
    again: bool = False  # a second call, after memory has changed

    @property
    def text(self) -> str:
        text = f"{self.length} token{'s' * (self.length > 1)} in blocks of {self.size}"
        if self.written and not self.scores:
            text += f", a table of {-(-self.written // self.size)} blocks"
        if self.heads != self.kv_heads:
            text += f", {self.heads} query heads on {self.kv_heads} KV head"
            text += "s" * (self.kv_heads > 1)
        return text + ", NaN in all other slots" * math.isnan(self.noise) + self.note

    def lay_out(self):
        """q, the pool's blocks, and the block table."""
        written, seed = max(self.length, self.written), self.length
        q, kv = draw_attention(written, self.heads, self.kv_heads, self.dim, seed, self.scores)
        if self.values is not None:
            kv[:, 1, 0, 0] = torch.tensor([self.values(place) for place in range(written)])
        if math.isnan(self.noise):
            kv[self.length :] = self.noise
        blocks, [table] = lay_out([kv], self.size, self.noise, seed)
        return q, blocks, table


def blockwise(mine, program: Context, log: Log) -> None:
    q, blocks, block_ids = program.lay_out()
    copies = Copies(blocks)

    def attend(*arguments):
        with copies if program.watch else nullcontext():
            return mine.blockwise_attention(*arguments)

    see(log.call(program.text, attend, q, blocks, block_ids, program.length, see=False), log)
    if program.watch:
        share, block = copies.largest, blocks[0].numel()
        kind = "at most a block" if share <= block else f"{share:,} numbers; a block has {block}"
        log(program.text, {"what is copied of `kv` at once is": kind})
    if program.again:
        blocks.neg_()
        text = "a second call, after all signs in `kv` have changed"
        log.call(text, attend, q, blocks, block_ids, program.length)


def see(found, log: Log) -> None:
    """Note a result, a few numbers with as many digits as one likes to read."""
    text = log.events[-1].text
    if isinstance(found, torch.Tensor):
        few = found.numel() <= 8
        log(text, {"result": found.double().mul(1e3).round().div(1e3) if few else found})
        log(text, {"dtype": str(found.dtype)})
    else:
        log(text, {"result": found})


class Copies(OperationMode):
    """How many numbers of `kv` are ever brought together in one piece of new memory.

    Only what moves them counts; a product of them may be as large as it likes. All that was
    moved is kept, so that no address is used twice.
    """

    MOVES = (
        "index", "index_select", "masked_select", "gather", "take", "embedding", "cat", "stack",
        "clone", "repeat", "_to_copy", "copy", "copy_", "index_copy_", "index_put_",
    )  # fmt: skip

    def __init__(self, kv: torch.Tensor):
        super().__init__()
        self.moved, self.largest = {kv.untyped_storage().data_ptr(): kv}, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op.overloadpacket.__name__ in self.MOVES:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            if any(tensor.untyped_storage().data_ptr() in self.moved for tensor in tensors):
                memory = out.untyped_storage()
                self.moved[memory.data_ptr()] = out
                self.largest = max(self.largest, memory.nbytes() // out.element_size())
        return out


def highest_at(top: int) -> Scores:
    return lambda place, _: -abs(place - top)


def scored(note: str, scores: Scores, length: int = 11, **other) -> Context:
    return Context(length, dim=16, written=length + 1, note=f", {note}", scores=scores, **other)


SHAPES = [  # with one group at most: a wrong order of heads is not told as a slot that was read
    Context(1), Context(3), Context(5, 1), Context(7, 3), Context(6, heads=4, kv_heads=1),
    Context(9, heads=3, kv_heads=3, dim=4), Context(17, 16), Context(6, written=12),
    Context(4, written=12), Context(3, 16, 4, 1, written=40), Context(10, 3, written=12),
]  # fmt: skip

scenario("04.4", blockwise,
    Group("three tokens by hand: weights 1/8, 2/8, 5/8",
          [Context(3, 2, 1, 1, 1, 4, scores=lambda place, head: math.log((1, 2, 5, 9)[place]),
          values=lambda place: (8, 16, 24, 900)[place],
          note=": scores 0, ln 2 | ln 5, values 8, 16 | 24")],
          "the worked example in the notebook"),
    Group("one block", [Context(length) for length in (3, 4, 1, 2)],
          "softmax(q k / sqrt(D)) v, without any carrying: which part is not there?"),
    Group("several blocks, anywhere in the pool",
          [Context(length, size) for size, length in ((1, 5), (3, 7), (4, 8), (4, 21), (16, 37))]
          + [Context(9, dim=16), Context(11, 3, 1, 1, dim=5), Context(6, again=True)],
          "what is carried from block to block"),
    Group("a table longer than the context",
          [Context(length, 4, 2, 1, written=12) for length in (6, 4, 1, 8, 9)]
          + [Context(7, 3, written=30), Context(2, 1, written=5)],
          "how many of the table's blocks are read?"),
    Group("the largest score comes first, last, or in the middle",
          [scored(f"that at position {top} scores highest", highest_at(top), length)
          for top, length in ((0, 14), (6, 14), (13, 14), (4, 8), (3, 5))],
          "what happens to the sums if a block has a larger score than all before it"),
    Group("heads of a group share a KV head",
          [Context(10, heads=heads, kv_heads=kv_heads)
          for heads, kv_heads in ((4, 2), (6, 3), (8, 1), (6, 2), (3, 1), (5, 5))],
          "which KV head does query head h read?"),
    Group("scores of 300, and of -300",
          [scored("scores of 300", lambda place, _: 300 + place % 3),
           scored("scores of -300", lambda place, _: -300 - place % 3),
           scored("scores of 300 in one block, then -300", lambda place, _: (-300, 300)[place < 4]),
           scored("scores of -300 in one block, then 300", lambda place, _: (300, -300)[place < 4]),
           scored("scores of 300, -300 on the other head", lambda _, head: 300 - 600 * head),
           scored("scores of 300 and -300", lambda _, head: 300 - 600 * head, kv_heads=1),
           # float32 has steps of 0.0001 there: enough for a solution with one logarithm of a sum.
           scored("scores of -1,000", lambda place, _: -1000 - place % 3)],
          look="what is subtracted from a score, and the largest argument that `exp` gets"),
    Group("anything may be in slots that are not the context's",
          [scored("scores of 0, 300 behind the last token", lambda place, _: 300 * (place > 10))]
          + [replace(shape, noise=math.nan) for shape in SHAPES],
          "when is the last block cut to its filled slots? 0 times NaN is NaN"),
    Group("one block at a time", [Context(8, watch=True), Context(46, watch=True),
          Context(7, 3, written=12, watch=True)],
          "which line reads `kv`, and how much of it at once?"),
)  # fmt: skip


# ── 04.5 Wrong only in a batch ────────────────────────────────────────────────

# A program is (context lengths, block size, query heads, KV heads, how large the values are
# where no token lies, the scores).


def company(lens, size, heads, kv_heads, noise, scores):
    """Sequences in one pool: q, blocks, tables padded with 0, lens."""
    pairs = [draw_attention(n, heads, kv_heads, 16, 4 + i, scores) for i, n in enumerate(lens)]
    blocks, tables = lay_out([kv for _, kv in pairs], size, noise, seed=4)
    width = max(map(len, tables))
    padded = torch.tensor([table + [0] * (width - len(table)) for table in tables])
    return torch.stack([q for q, _ in pairs]), blocks, padded, torch.tensor(lens)


def together(mine, program, log: Log) -> None:
    lens, size, heads, kv_heads, noise, scores = program
    text = f"context lengths {list(lens)}" if len(lens) > 1 else f"1 sequence of {lens[0]}"
    text += f", blocks of {size}"
    if (heads, kv_heads) != (2, 1):
        text += f", {heads} query heads on {kv_heads} KV heads"
    text += f", values of about {noise:,.0f} in all other slots" * (noise != 40)
    text += ", scores of -20,000" * (scores is not None)
    see(log.call(text, mine.batched_attention, *company(*program), see=False), log)


def engine_in_company(mine, texts, log: Log) -> None:
    lm = tinypy()
    config = minikv.EngineConfig(num_blocks=256, block_size=4, prefix_cache=False)
    backend = partial(DecodesTogether, attend_all=mine.batched_attention)
    engine = minikv.Engine(lm, config, attention=backend)  # as in the notebook
    found, _ = run(engine, [lm.encode(text) for text in texts], 12)
    for text, tokens in zip(texts, found, strict=True):
        log(f"{len(texts)} requests at once; {text!r}", {"continues with": lm.decode(tokens)})


scenario("04.5", together,
    Group("alone, a context that ends with a block",
          [((length,), 4, 2, 1, 40, None) for length in (4, 8, 12)],
          "nothing needs to be hidden here"),
    Group("alone, a context that ends inside a block",
          [((length,), 4, 2, 1, 40, None) for length in (5, 2, 3, 7, 9, 1)],
          "the border of what is visible"),
    Group("in a batch: every row as if it were alone",
          [(lens, 4, 2, 1, 40, None) for lens in ((1, 4, 9, 6), (4, 9, 6, 1), (8, 8, 4), (3, 3),
          (13, 1))], "the border of each row"),
    Group("other block sizes, other heads",
          [((5, 17, 12), size, 4, 2, 40, None) for size in (3, 16, 1)]
          + [((5, 3), 4, 6, 3, 40, None), ((2, 7), 4, 3, 3, 40, None), ((6, 2), 4, 8, 2, 40, None)],
          "shapes: (S, H, D) in, (S, H, D) out"),
    Group("anything may be in slots that are not theirs",
          [((6, 3, 9), 4, 2, 1, noise, None) for noise in (0, 1000)]
          + [((6, 3, 9), 4, 2, 1, 40, lambda place, _: -20000 - place % 3)],
          "what a row sees beyond its own tokens"),
)  # fmt: skip
scenario("04.5", engine_in_company,
    Group("tinypy writes in a batch what it writes alone", [TEXTS],
          "at the first token that differs: which slots does the row see that are not its own?"),
)  # fmt: skip


# ── The reader's parts in the engine ──────────────────────────────────────────


def run(engine: minikv.Engine, prompts, num_tokens: int) -> tuple[list[list[int]], int]:
    """New tokens of each prompt, all served at once, and the most blocks held at any time."""
    params = minikv.SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    order = [engine.add_request(prompt, params) for prompt in prompts]
    outputs: dict[int, list[int]] = {}
    most = 0
    while engine.has_unfinished:
        outputs |= {output.request_id: output.token_ids for output in engine.step()}
        most = max(most, engine.stats().blocks_used)
        engine.check()
    return [outputs[request_id] for request_id in order], most


@runs_model("04.1", "04.2", "04.3", "04.4", "04.5")
def _(mine, lm: minikv.LanguageModel) -> str:
    """tinypy on the reader's pool, table, slots and attention, in blocks of 4 and of 16."""
    prompts, new = [lm.encode(text) for text in TEXTS], 12
    expected = [lm.generate_naively(prompt, new) for prompt in prompts]
    parts = {"attend_one": mine.blockwise_attention, "slot_mapping": mine.slot_mapping}
    backends: dict[int, Callable[..., AttentionBackend]] = {
        4: partial(BlockByBlock, **parts),
        16: partial(DecodesTogether, attend_all=mine.batched_attention, **parts),
    }
    held = {}
    for block_size, backend in backends.items():
        num_blocks = 3 * lm.config.max_context // block_size
        engine = minikv.Engine(
            lm,
            minikv.EngineConfig(num_blocks=num_blocks, block_size=block_size, prefix_cache=False),
            block_pool=mine.BlockPool,
            block_table=mine.BlockTable,
            attention=backend,
        )
        found, held[block_size] = run(engine, prompts, new)
        witness(found)
        if found != expected:
            raise AssertionError(f"blocks of {block_size}: {found}, the oracle: {expected}")
    lengths = ", ".join(str(len(prompt)) for prompt in prompts)
    reserved = len(prompts) * lm.config.max_context
    return (
        f"{len(prompts)} requests at once ({lengths} prompt tokens, {new} new ones each), "
        f"same tokens as the oracle; at most {held[4]} blocks of 4 held, or {held[16]} of 16: "
        f"{4 * held[4]} and {16 * held[16]} slots, where reservation would hold {reserved:,}."
    )
