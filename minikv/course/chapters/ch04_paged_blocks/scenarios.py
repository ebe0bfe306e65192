"""Checks of chapter 04: the pool, the table, slots, and attention over blocks."""

import random
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minikv
from minikv import OutOfBlocks, naive_attention
from minikv.course.chapters.ch04_paged_blocks.block_by_block import BlockByBlock, DecodesTogether
from minikv.course.harness.checking import (
    Suspect,
    Wrong,
    check,
    check_numbers,
    close,
    equal,
    raises,
    runs_model,
    tinypy,
)

TEXTS = ("class Stack:\n    def push(self, item):\n", "import os\n\ndef fib(n):", "for i in range(")


# ── 04.1 A pool of blocks ─────────────────────────────────────────────────────


@check("04.1", "each block is handed out once", look="what `allocate` takes, and what it returns")
def _(mine):
    pool = mine.BlockPool(5)
    found = [pool.allocate() for _ in range(5)]
    equal(
        found if None in found else sorted(found),
        [0, 1, 2, 3, 4],
        "5 allocations from a pool of 5",
        Suspect([None] * 5, "the block is taken, and not returned", "what stands after `return`?"),
        Suspect(
            [found[0]] * 5,
            "the block stays in the free list, so it is given out again",
            "does `allocate` take the block off the list, or only look at it?",
        ),
    )


@check(
    "04.1",
    "a block handed out has one holder, and is not free",
    look="what `allocate` changes: the free list and the block's count",
)
def _(mine):
    pool = mine.BlockPool(3)
    block_ids = [pool.allocate(), pool.allocate()]
    equal(
        [pool.ref_count(block_id) for block_id in block_ids],
        [1, 1],
        "reference counts of 2 blocks just allocated",
        Suspect(
            [0, 0],
            "the count of a block is not set when it is handed out, so it still counts as free",
            "who writes `_ref_counts` in `allocate`?",
        ),
    )
    equal(pool.num_free, 1, "num_free after 2 of 3 blocks")


@check("04.1", "an empty pool says OutOfBlocks", look="the first lines of `allocate`")
def _(mine):
    pool = mine.BlockPool(2)
    pool.allocate(), pool.allocate()
    equal(pool.num_free, 0, "num_free after 2 of 2 blocks")
    error = raises(
        OutOfBlocks,
        pool.allocate,
        "a third allocation from a pool of 2",
        "nothing asks whether a block is free before one is taken",
        "the first lines of `allocate`",
    )
    equal(
        (error.needed, error.free),
        (1, 0),
        "the error's `needed` and `free`",
        Suspect(
            (0, 1),
            "the two numbers of OutOfBlocks have changed places",
            "its signature: OutOfBlocks(needed, free)",
        ),
    )


@check(
    "04.1", "a shared block is freed by its last holder", look="what `release` changes, and when"
)
def _(mine):
    pool = mine.BlockPool(2)
    block_id = pool.allocate()
    pool.acquire(block_id)
    pool.acquire(block_id)
    found = [(pool.ref_count(block_id), pool.num_free)]
    for _ in range(3):
        if len(found) > 1 and found[-1][0] == 0:
            raise Wrong(
                f"a block with 3 holders has count 0 after {len(found) - 1} of 3 releases",
                "the first release ends the block for all its holders",
                "by how much does `release` lower the count?",
            )
        pool.release(block_id)
        found.append((pool.ref_count(block_id), pool.num_free))
    equal(
        found,
        [(3, 1), (2, 1), (1, 1), (0, 2)],
        "(count, num_free) of a block with 3 holders, before and after each of 3 releases",
        Suspect(
            [(3, 1), (2, 2), (1, 3), (0, 4)],
            "every release puts the block into the free list, though others still hold it",
            "for which count does the block become free?",
        ),
        Suspect(
            [(3, 1), (2, 1), (1, 1), (0, 1)],
            "the block is counted down to 0 and never comes back: the pool leaks",
            "who puts it back into the free list?",
        ),
        Suspect(
            [(3, 1), (3, 2), (3, 3), (3, 4)],
            "the block goes back, and its count is never lowered",
            "who writes `_ref_counts` in `release`?",
        ),
        Suspect(
            [(3, 1), (2, 1), (1, 2), (0, 2)],
            "the block is freed one holder too early: it is compared after the count was lowered",
            "is it the count before or after this release that you compare?",
        ),
    )


@check(
    "04.1",
    "a block that came back is handed out again",
    look="what `release` does when the last holder lets go, and whether `allocate` sees it",
)
def _(mine):
    pool = mine.BlockPool(3)
    block_ids = [pool.allocate() for _ in range(3)]
    pool.release(block_ids[1])
    again = pool.allocate()
    equal((again, pool.ref_count(again)), (block_ids[1], 1), "the only free block and its count")
    equal(pool.num_free, 0, "num_free when all 3 blocks are held again")


@check("04.1", "a free block cannot be released")
def _(mine):
    why = (
        "a block that is free already goes into the free list a second time: "
        "two requests will get it",
        "what does `release` do when the count is 0?",
    )
    pool = mine.BlockPool(3)
    block_id = pool.allocate()
    pool.release(block_id)
    before = (pool.num_free, [pool.ref_count(b) for b in range(3)])
    for name, free in (("just released", block_id), ("never handed out", 2 - block_id)):
        raises(ValueError, partial(pool.release, free), f"release of a block {name}", *why)
    found = (pool.num_free, [pool.ref_count(b) for b in range(3)])
    if found != before:
        raise Wrong(
            f"before a release that was refused, (num_free, counts) were {before}; now {found}",
            "something is changed before the error is raised",
            "the order of the lines in `release`: first look, then change",
        )


@check("04.1", "a block that is not in the pool cannot be released")
def _(mine):
    pool = mine.BlockPool(2)
    pool.allocate(), pool.allocate()
    for block_id in (-1, 2):
        raises(
            ValueError,
            partial(pool.release, block_id),
            f"release of block {block_id} in a pool of 2",
            "the id is used as an index without a look: -1 is the last element of a Python list, "
            "somebody's block",
            "which method of the pool knows the ids that exist?",
        )


@check("04.1", "nothing is lost or doubled in 500 random steps")
def _(mine):
    draw, pool, held = random.Random(4), mine.BlockPool(6), []
    for step in range(500):
        if held and draw.random() < 0.5:
            block_id = held.pop(draw.randrange(len(held)))
            pool.release(block_id)
            what = f"release({block_id})"
        elif held and draw.random() < 0.4:
            held.append(draw.choice(held))
            pool.acquire(held[-1])
            what = f"acquire({held[-1]})"
        elif pool.num_free:
            held.append(pool.allocate())
            what = f"allocate() -> {held[-1]}"
        else:
            continue
        found = ([pool.ref_count(b) for b in range(6)], pool.num_free)
        counts = [held.count(b) for b in range(6)]
        if found != (counts, counts.count(0)):
            raise Wrong(
                f"step {step}, {what}: (counts, num_free) are {found}, "
                f"expected {(counts, counts.count(0))}",
                "the free list and the counts no longer agree: one was changed without the other",
                "every line that changes one of the two",
            )


# ── 04.2 A table that grows ───────────────────────────────────────────────────


def table_of(mine, num_blocks: int, block_size: int):
    pool = minikv.BlockPool(num_blocks)
    return mine.BlockTable(pool, block_size), pool


def needed(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


REPLACED = (
    "the new blocks take the place of the old ones",
    "where do new ids go in `block_ids`? The list is in logical order",
)
MADE_UP = (
    "the ids are made up: 0, 1, 2, … are logical blocks, and the pool was not asked",
    "who knows which physical blocks are free?",
)


def blocks_by_mistake(amounts: list[int], block_size: int) -> tuple[Suspect, ...]:
    """How many blocks a table has after each growth, under mistakes that are easily made."""
    totals = [sum(amounts[: i + 1]) for i in range(len(amounts))]
    each = [needed(amount, block_size) for amount in amounts]
    afresh = [needed(total, block_size) for total in totals]
    replaced = [0]
    for count in afresh:  # the list is exchanged for the new blocks, where there are any
        replaced.append(max(count - replaced[-1], 0) or replaced[-1])
    return (
        Suspect(
            [total // block_size for total in totals],
            "the number of blocks is rounded down, so the last tokens have no block",
            "the division: 7 tokens in blocks of 4 need 2 blocks",
        ),
        Suspect(
            [sum(each[: i + 1]) for i in range(len(each))],
            "each growth is rounded up by itself: the last block's empty slots are never used",
            "what do you divide: the tokens that are added, or all there will be?",
        ),
        Suspect(
            [total // block_size + 1 for total in totals],
            "one block is added even where the tokens end exactly with a block",
            "the rounding: 8 tokens in blocks of 4 need 2 blocks, not 3",
        ),
        Suspect(
            [sum(afresh[: i + 1]) for i in range(len(afresh))],
            "the blocks that the table has already are not counted, and taken once more",
            "what do you subtract from the blocks that all tokens need?",
        ),
        Suspect(
            [0] * len(totals),
            "no block ever gets into the table",
            "what becomes of the ids that `allocate` returns?",
        ),
        Suspect(replaced[1:], *REPLACED),
    )


def check_growth(mine, amounts: list[int], block_size: int) -> None:
    table, _ = table_of(mine, 4 * sum(amounts) + 4, block_size)
    found = []
    for amount in amounts:
        table.grow(amount)
        found.append(len(table.block_ids))
    totals = [sum(amounts[: i + 1]) for i in range(len(amounts))]
    what = f"blocks of {block_size} after {', '.join(map(str, totals))} tokens"
    if table.num_tokens != totals[-1]:
        raise Wrong(
            f"{what}: {found}, and num_tokens is {table.num_tokens}, expected {totals[-1]}",
            "num_tokens is wrong, and the next growth counts from there",
            "what `grow` sets it to",
        )
    expected = [needed(total, block_size) for total in totals]
    equal(found, expected, what, *blocks_by_mistake(amounts, block_size))


@check(
    "04.2",
    "7 tokens, then the 8th, then the 9th",
    look="how many blocks of 4 do 7, 8 and 9 tokens need?",
)
def _(mine):
    check_growth(mine, [7, 1, 1], 4)


@check(
    "04.2",
    "no block too few or too many, at any block size",
    look="the case in which the new tokens end exactly with a block, and the one with none",
)
def _(mine):
    draw = random.Random(4)
    for block_size in (1, 3, 4, 16):
        check_growth(mine, [draw.randrange(0, 2 * block_size + 3) for _ in range(7)], block_size)
        check_growth(mine, [block_size, 0, block_size], block_size)


@check("04.2", "num_tokens is what was asked for", look="what `grow` does with `self.num_tokens`")
def _(mine):
    table, _ = table_of(mine, 32, 4)
    found = []
    for amount in (7, 1, 0, 3):
        table.grow(amount)
        found.append(table.num_tokens)
    equal(
        found,
        [7, 8, 8, 11],
        "num_tokens after growing by 7, 1, 0 and 3",
        Suspect([0] * 4, "num_tokens is never changed", "the last line of `grow`"),
        Suspect(
            [7, 1, 0, 3],
            "num_tokens is the last growth, not the sum of all",
            "the line that sets `self.num_tokens`: = or +=?",
        ),
        Suspect(
            [8, 12, 12, 16],
            "num_tokens is what the blocks can take, not what was asked for",
            "the class's docstring says what is promised",
        ),
    )


@check("04.2", "blocks stay in the order in which they came", look="what is done to `block_ids`")
def _(mine):
    check_growth(mine, [7, 2], 4)
    # A pool whose next blocks are 7, 1 and 3, and one to spare: given back last, used first.
    table, pool = table_of(mine, 8, 4)
    for _ in range(8):
        pool.allocate()
    for block_id in (5, 3, 1, 7):
        pool.release(block_id)
    found = []
    for amount in (7, 2):
        table.grow(amount)
        found.append(list(table.block_ids))
    look = REPLACED[1]
    equal(
        found,
        [[7, 1], [7, 1, 3]],
        "block_ids after 7 and after 9 tokens, when the pool hands out 7, 1, 3",
        Suspect([[7, 1], [3, 7, 1]], "a new block is put before the old ones", look),
        Suspect([[1, 7], [3, 1, 7]], "a new block is put before the old ones", look),
        Suspect([[1, 7], [1, 3, 7]], "the ids are sorted: then they name other tokens", look),
        Suspect([[0, 1], [0, 1, 2]], *MADE_UP),
    )


@check(
    "04.2",
    "every block of a table is held once, and by no other table",
    look="there should be one `allocate` for each id that is added",
)
def _(mine):
    check_growth(mine, [4, 1, 1, 6], 3)
    pool = minikv.BlockPool(30)
    tables = [mine.BlockTable(pool, 3) for _ in range(3)]
    for amount in (4, 1, 1, 6):
        for table in tables:
            table.grow(amount)
    ids = [block_id for table in tables for block_id in table.block_ids]
    if len(set(ids)) < len(ids) or pool.num_free != 18:
        raise Wrong(
            f"3 tables of 4 blocks each name {len(set(ids))} different blocks, and "
            f"{pool.num_free} of 30 are free; expected 12 and 18",
            "blocks are named in a table without being taken from the pool, or taken twice",
            "there should be one `allocate` for each id that is added",
        )
    equal([pool.ref_count(b) for b in ids], [1] * 12, "reference counts of their blocks")


def table_with_6_tokens(mine):
    check_growth(mine, [6, 6, 1], 4)
    table, pool = table_of(mine, 3, 4)
    table.grow(6)
    what = "free blocks of 3, when a table of 6 tokens has 2 of 4"
    equal(pool.num_free, 1, what, Suspect(3, *MADE_UP))
    return table, pool


@check(
    "04.2",
    "too few blocks: OutOfBlocks, and nothing has changed",
    look="what has happened before the error is raised",
)
def _(mine):
    table, pool = table_with_6_tokens(mine)
    before = list(table.block_ids)
    raises(
        OutOfBlocks,
        lambda: table.grow(7),
        "growing by 7 from 6 tokens, block size 4, with 1 block free",
        "the table takes what there is and says nothing, so its last tokens have no block",
        "what happens when the pool has fewer blocks than are needed?",
    )
    found = (list(table.block_ids), table.num_tokens, pool.num_free)
    taken = [b for b in range(3) if b not in before]
    equal(
        found,
        (before, 6, 1),
        "(block_ids, num_tokens, free blocks) after the growth that failed",
        Suspect(
            (before + taken, 6, 0),
            "the table keeps the blocks that it got before the pool ran dry",
            "ask the pool how many are free before you take the first",
        ),
        Suspect(
            (before, 6, 0),
            "blocks were taken, and then neither kept nor given back: the pool leaks",
            "what becomes of the blocks you have when the next one cannot be had?",
        ),
        Suspect(
            (before, 13, 1),
            "num_tokens is changed before it is known that the blocks can be had",
            "which line of `grow` should be the last?",
        ),
        Suspect(
            (before + taken, 13, 0),
            "num_tokens is changed, and blocks are taken, before it is known that all can be had",
            "ask the pool how many are free before you change anything",
        ),
        Suspect(
            ([], 0, 3),
            "the table gives back all it has, also what it held before",
            "give back only what this growth has taken, or take nothing before you know",
        ),
    )


@check("04.2", "the last free block can be used, and no tokens need none", look="what is compared")
def _(mine):
    table, pool = table_with_6_tokens(mine)
    try:
        table.grow(6)
    except OutOfBlocks as error:
        cause = (
            "the pool has as many blocks as are needed, and that is treated as too few: > or >=?"
        )
        if error.needed != error.free:
            cause = f"6 to 12 tokens need 1 more block, {error.needed} were asked for"
        what = "growing from 6 to 12 tokens, block size 4, with 1 block free: OutOfBlocks"
        raise Wrong(f"{what} ({error})", cause, "what is compared with `num_free`?") from error
    equal((len(table.block_ids), pool.num_free), (3, 0), "(blocks, free blocks) of a full pool")
    table.grow(0)
    equal((table.num_tokens, len(table.block_ids)), (12, 3), "(num_tokens, blocks) after grow(0)")


@check("04.2", "a negative number is refused", look="the first lines of `grow`")
def _(mine):
    table, _ = table_of(mine, 3, 4)
    table.grow(6)
    before = table.num_tokens
    raises(
        ValueError,
        lambda: table.grow(-1),
        "grow(-1)",
        "nothing looks at the sign: the table would promise fewer tokens than are stored",
        "the first lines of `grow`",
    )
    equal(table.num_tokens, before, "num_tokens after grow(-1) was refused")


# ── 04.3 Where a token goes ───────────────────────────────────────────────────


def slots_of(block_ids, block_size, start, end):
    return [block_ids[p // block_size] * block_size + p % block_size for p in range(start, end)]


def slots_by_mistake(block_ids, block_size, start, end) -> tuple[Suspect, ...]:
    size, positions, last = block_size, range(start, end), len(block_ids) - 1
    at = {p: block_ids[min(p // size, last)] for p in range(start, end + 1)}
    return (
        Suspect(
            list(positions),
            "the slots are the positions themselves: the block table is never read",
            "which physical block does logical block 0 lie on?",
        ),
        Suspect(
            [block_ids[i // size] * size + i % size for i in range(end - start)],
            "positions are counted from the start of the chunk, not of the sequence",
            "what is the first position of this call?",
        ),
        Suspect(
            [at[p] * size + i % size for i, p in enumerate(positions)],
            "the block is right, but its place in the block is counted from the chunk's start",
            "what do you divide to get the remainder?",
        ),
        Suspect(
            [at[p] + p % size for p in positions],
            "a block is taken for a slot: block b begins at slot b * block_size",
            "how many slots lie before block 7?",
        ),
        Suspect(
            [block_ids[0] * size + p for p in positions],
            "the slots run on from the first block, as if the blocks lay side by side",
            "where does the second logical block lie?",
        ),
        Suspect(
            [at[start] * size + start % size + i for i in range(end - start)],
            "the slots run on from the first one, over the end of its block",
            "where does the next logical block lie?",
        ),
        Suspect(
            [at[p] * size + p % size for p in range(start, end + 1)],
            "one slot too many: position `end` is not part of the range",
            "where does your loop stop?",
        ),
        Suspect(
            [at[p] * size for p in positions],
            "every token of a block goes to the block's first slot",
            "what is the remainder of position / block_size for?",
        ),
    )


def check_slots(mine, block_ids, block_size, start, end, what) -> None:
    equal(
        mine.slot_mapping(block_ids, block_size, start, end),
        slots_of(block_ids, block_size, start, end),
        f"{what}: from {start} up to, not including, {end}; blocks of {block_size}, "
        f"table {block_ids}",
        *slots_by_mistake(block_ids, block_size, start, end),
    )


@check("04.3", "the example: positions 2 to 5", look="the table in the docstring, column by column")
def _(mine):
    check_slots(mine, [7, 1, 3], 4, 2, 6, "the example")


@check(
    "04.3", "a whole prompt, at any block size", look="the last position, and the block's border"
)
def _(mine):
    for block_size in (1, 3, 4, 16):
        table = random.Random(block_size).sample(range(40), needed(21, block_size))
        for end in (1, block_size, block_size + 1, 21):
            check_slots(mine, table, block_size, 0, min(end, 21), "a prompt")


@check(
    "04.3", "a chunk that begins inside a block", look="a position counts from the sequence's start"
)
def _(mine):
    for block_size, start, end in ((3, 4, 11), (4, 6, 7), (4, 5, 15), (16, 13, 40)):
        table = random.Random(end).sample(range(40), needed(end, block_size))
        check_slots(mine, table, block_size, start, end, "a chunk")


@check("04.3", "a decode: one position", look="which block has it, and at which place?")
def _(mine):
    check_slots(mine, [7, 1, 3], 4, 2, 6, "the example")
    for position in range(12):
        check_slots(mine, [9, 2, 17, 5], 3, position, position + 1, "a decode")


@check("04.3", "no position, no slot", look="what comes out when `start` equals `end`?")
def _(mine):
    check_slots(mine, [7, 1, 3], 4, 6, 6, "none")


# ── 04.4 Attention, one block at a time ───────────────────────────────────────


def blocks_of(kv: torch.Tensor, block_size: int, seed: int):
    """kv (L, 2, K, D) laid out in blocks in any order, none in its own place; every other slot
    is loud.

    Returns (num_blocks, block_size, 2, K, D) and the block table.
    """
    draw = random.Random(seed)
    count = needed(len(kv), block_size)
    block_ids = [0]
    while any(block_id == i for i, block_id in enumerate(block_ids)):
        block_ids = draw.sample(range(count + 3), count)
    generator = torch.Generator().manual_seed(seed)
    blocks = 3 * torch.randn(count + 3, block_size, *kv.shape[1:], generator=generator)
    for position, token in enumerate(kv):
        blocks[block_ids[position // block_size], position % block_size] = token
    return blocks, block_ids


def attention_with_a_mistake(q, kv, block_ids, context_len, mistake: str) -> torch.Tensor:
    """blockwise_attention as it comes out with one thing wrong."""
    (heads, dim), (block_size, kv_heads) = q.shape, (kv.shape[1], kv.shape[3])
    if mistake == "last token":
        context_len -= 1
    count = needed(context_len, block_size)
    if mistake == "no partial block":
        count = context_len // block_size
    if mistake in ("whole table", "slice to a negative end"):
        count = len(block_ids)
    ids = range(count) if mistake == "no table" else block_ids[:count]
    kv_head = torch.arange(heads) // (heads // kv_heads)
    if mistake == "interleaved groups":
        kv_head = torch.arange(heads) % kv_heads
    q = q if mistake == "no scale" else q * dim**-0.5
    top, total, out = torch.full((heads, 1), -torch.inf), torch.zeros(heads, 1), 0 * q
    for i, block_id in enumerate(ids):
        filled = min(block_size, context_len - i * block_size)
        if mistake in ("unfilled slots", "whole table"):
            filled = block_size
        k, v = kv[block_id, :filled].permute(1, 2, 0, 3)[:, kv_head]  # (H, filled, D) each
        if mistake == "swapped":
            k, v = v, k
        scores = (k @ q[:, :, None])[..., 0]  # (H, filled)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, shrink = torch.exp(scores - new_top), torch.exp(top - new_top)
        if mistake == "mean of blocks":
            weights, shrink = scores.softmax(-1), torch.ones_like(shrink)
        if mistake == "last block only":
            shrink = torch.zeros_like(shrink)
        if mistake == "wrong sign" and i > 0:
            shrink = 1 / shrink
        rescale_total = mistake not in ("sum not rescaled", "nothing rescaled")
        rescale_out = mistake not in ("output not rescaled", "nothing rescaled")
        total = total * (shrink if rescale_total else 1) + weights.sum(-1, keepdim=True)
        out = out * (shrink if rescale_out else 1) + (weights[:, None] @ v)[:, 0]
        top = new_top
    return out if mistake == "not divided" else out / total


SUMS = "which sums were made relative to the old maximum? All of them need the factor"
ENOUGH = "how many blocks does the context need? Stop there"
MISTAKES = {  # what it is called above: (cause, where to look)
    "output not rescaled": ("the output so far is not rescaled when the maximum moves", SUMS),
    "sum not rescaled": (
        "the sum of the weights so far is not rescaled when the maximum moves",
        SUMS,
    ),
    "nothing rescaled": ("nothing is rescaled when the maximum moves: there are two scales", SUMS),
    "wrong sign": (
        "the factor is upside down: e^(new - old) where e^(old - new) is meant",
        "the factor when the maximum rises: is it below 1?",
    ),
    "swapped": (
        "keys and values have changed places",
        "`kv[b, i, 0]` is the key, `[b, i, 1]` the value",
    ),
    "last token": ("the last token is not seen", "how many slots of the last block are filled?"),
    "no partial block": (
        "only full blocks are read, so the newest tokens are missing",
        "how many blocks do 7 tokens in blocks of 4 have?",
    ),
    "no scale": (
        "the scores are not divided by sqrt(head_dim)",
        "the formula of attention: softmax(q k / sqrt(D)) v",
    ),
    "no table": (
        "logical block i is read from physical block i: the block table is never used",
        "what do you index `kv` with?",
    ),
    "unfilled slots": (
        "the last block is read to its end, also where nothing was written",
        "how many slots of the last block are filled?",
    ),
    "whole table": (
        "every block that the table names is read, also those beyond the context",
        ENOUGH,
    ),
    "slice to a negative end": (
        "beyond the context the number of filled slots goes below 0, and [:-2] is not empty",
        ENOUGH,
    ),
    "interleaved groups": (
        "query heads take turns over the KV heads; those of a group should lie side by side",
        "with 4 query heads and 2 KV heads, heads 0 and 1 share KV head 0",
    ),
    "not divided": (
        "the weighted sum of V is never divided by the sum of the weights",
        "the last line: what do the weights add up to?",
    ),
    "mean of blocks": (
        "every block gets a softmax of its own, and the blocks are averaged",
        "a block with larger scores has to count for more than another",
    ),
    "last block only": (
        "each block overwrites what the blocks before it gave: only the last one counts",
        "what has to be carried from one block to the next?",
    ),
}
NAN = (
    "inf * 0: is the factor e^(old - new)? Or 0 / 0: is any token seen at all?",
    "the factor at the first block, when the largest score so far is -inf",
)


def compare_blockwise(mine, what, q, blocks, block_ids, context_len, expected, nan=NAN) -> None:
    """`nan`: the cause if the result is not finite. Nothing is told by NaN being equal to NaN."""
    found = mine.blockwise_attention(q, blocks, list(block_ids), context_len)
    if isinstance(found, torch.Tensor) and not found.isfinite().all():
        raise Wrong(f"{what}: NaN or infinite values", *nan)
    arguments = (q, blocks, block_ids, context_len)
    suspects = [
        Suspect(partial(attention_with_a_mistake, *arguments, mistake), *why)
        for mistake, why in MISTAKES.items()
    ]
    close(found, expected, what, *suspects)


def check_blockwise(mine, q, kv, block_size, what, context_len=None, nan=NAN) -> None:
    """Against naive attention of the last position: q (H, D), kv (L, 2, K, D). What is in `kv`
    beyond the context is in the table, and must not be seen."""
    n = len(kv) if context_len is None else context_len
    expected = naive_attention(q[None], *kv[:n].unbind(1))[0]
    compare_blockwise(mine, what, q, *blocks_of(kv, block_size, seed=4), n, expected, nan)


def draw_attention(length, heads, kv_heads, dim=8, seed=0):
    """q (H, D), kv (L, 2, K, D)."""
    generator = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(heads, dim, generator=generator)
    return q, torch.randn(length, 2, kv_heads, dim, generator=generator)


@check(
    "04.4", "three tokens by hand: weights 1/8, 2/8, 5/8", look="the worked example in the notebook"
)
def _(mine):
    # Scores 0, ln 2 and ln 5 in two blocks of two, the second of them half filled.
    kv = torch.zeros(2, 2, 2, 1, 1)
    kv[1, :, 0, 0, 0] = torch.tensor([0.0, 2.0]).clamp_min(1).log()
    kv[1, :, 1, 0, 0] = torch.tensor([8.0, 16.0])
    kv[0, :, 0, 0, 0] = torch.tensor([5.0, 9.0]).log()
    kv[0, :, 1, 0, 0] = torch.tensor([24.0, 900.0])
    q = torch.ones(1, 1)
    what = "scores 0, ln 2 | ln 5, values 8, 16 | 24"
    compare_blockwise(mine, what, q, kv, [1, 0], 3, torch.tensor([[20.0]]))


@check(
    "04.4", "one block", look="scores, weights and output of a single block, without any carrying"
)
def _(mine):
    for length in (3, 4, 1):
        q, kv = draw_attention(length, heads=1, kv_heads=1, seed=length)
        check_blockwise(mine, q, kv, 4, f"{length} of a block's 4 slots filled, 1 head")


@check("04.4", "several blocks, anywhere in the pool", look="what is carried from block to block")
def _(mine):
    for block_size, length in ((1, 5), (3, 7), (4, 8), (4, 21), (16, 37)):
        q, kv = draw_attention(length, heads=2, kv_heads=2, seed=length)
        check_blockwise(mine, q, kv, block_size, f"{length} tokens in blocks of {block_size}")


@check("04.4", "a table longer than the context", look="how many of the table's blocks are read?")
def _(mine):
    q, kv = draw_attention(12, heads=2, kv_heads=1, seed=6)
    check_blockwise(mine, q, kv, 4, "6 tokens in blocks of 4, a table of 3 blocks", context_len=6)


@check(
    "04.4",
    "the largest score comes first, last, or in the middle",
    look="what happens to the sums so far when a block has a larger score than all before it",
)
def _(mine):
    for where in (0, 6, 13):
        q, kv = draw_attention(14, heads=2, kv_heads=1, seed=where)
        distance = (torch.arange(14) - where).abs()[:, None, None]
        kv[:, 0] = q.mean(0) * (2 - 0.4 * distance) + 0.3 * kv[:, 0]
        check_blockwise(mine, q, kv, 4, f"14 tokens, the one at position {where} scores highest")


@check("04.4", "heads of a group share a KV head", look="which KV head does query head h read?")
def _(mine):
    for heads, kv_heads in ((4, 2), (6, 3), (8, 1), (6, 2)):
        q, kv = draw_attention(10, heads, kv_heads, seed=heads)
        check_blockwise(mine, q, kv, 4, f"{heads} query heads on {kv_heads} KV heads, 10 tokens")


@check("04.4", "scores of 300, and of -300", look="the largest argument that `exp` gets")
def _(mine):
    q, kv = draw_attention(12, heads=2, kv_heads=2, seed=11)
    check_blockwise(mine, q, kv, 4, "11 tokens, scores of about 0", context_len=11)
    causes = {  # in this order: each is right for whoever has only the mistake of a later one
        "300": "exp of a large number overflows: it is taken before the largest is subtracted",
        "0, and 300 where no token is": "the largest score is sought in unfilled slots, too",
        "-300": "the largest score is taken to be 0 at least, so that every weight is 0, and 0 / 0",
        "300, after the first block -300": "the maximum is that of the new block alone, so that "
        "e^(old - new) overflows",
        "300 and, for the other head, -300": "one maximum serves all heads: where scores are far "
        "below it every weight is 0",
    }
    row, both = torch.arange(12)[:, None], torch.full((12, 2), 300.0)
    up_and_down = both * (1 - 2 * (row >= 4))
    scores = [both, both * (row == 11), -both, up_and_down, both * torch.tensor([1, -1])]
    q = q / q.norm(dim=-1, keepdim=True) * 8**0.5
    for (name, cause), extra in zip(causes.items(), scores, strict=True):
        louder = torch.stack([kv[:, 0] + extra[..., None] * q / 8**0.5, kv[:, 1]], 1)
        nan = cause, "what is subtracted from a score, and the largest argument that `exp` gets"
        check_blockwise(mine, q, louder, 4, f"11 tokens, scores of about {name}", 11, nan)


class Copies(TorchDispatchMode):
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


@check("04.4", "one block at a time", look="which line reads `kv`, and how much of it at once?")
def _(mine):
    q, kv = draw_attention(46, heads=2, kv_heads=2, seed=46)
    blocks, block_ids = blocks_of(kv, 4, seed=46)
    with Copies(blocks) as copies:
        mine.blockwise_attention(q, blocks, block_ids, 46)
    if copies.largest > blocks[0].numel():
        raise Wrong(
            f"{copies.largest:,} numbers copied at once; a block has {blocks[0].numel()}",
            "all blocks are gathered first, and then attended to like contiguous memory",
        )


@check(
    "04.4", "tinypy: every layer, at every position", look="the first position is a context of 1"
)
def _(mine):
    lm, seen = tinypy(), {}

    def attend(layer, q, k, v):
        seen[layer] = q, torch.stack([k, v], 1)
        return lm.transformer.attend_naively(layer, q, k, v)

    ids = torch.tensor(lm.encode(TEXTS[0]))
    with torch.inference_mode():
        lm.transformer.forward(ids, torch.arange(len(ids)), attend)
        for layer, (q, kv) in seen.items():
            for position in reversed(range(len(ids))):
                what = f"layer {layer}, position {position}, blocks of 4"
                check_blockwise(mine, q[position], kv[: position + 1], 4, what)


# ── 04.5 Other words in company ───────────────────────────────────────────────


def batched_by_mistake(q, kv, block_tables, context_lens, which: str) -> torch.Tensor:
    """batched_attention with another idea of what is visible."""
    size, keys = kv.shape[1], torch.arange(block_tables.shape[1] * kv.shape[1])
    lens = context_lens[:, None]
    visible = {
        "one more": keys <= lens,
        "one less": keys < lens - 1,
        "to the end of the block": keys < (lens + size - 1) // size * size,
        "to the longest": keys < lens.max(),
        "to the first row's": keys < lens[:1],
        "everything": keys < len(keys) + 0 * lens,
        "right": keys < lens,
    }[which.partition(", ")[0]]
    visible = visible.expand(len(q), -1)
    k, v = kv[block_tables].flatten(1, 2).permute(2, 0, 3, 1, 4)
    q = q.view(len(q), k.shape[1], -1, q.shape[-1]) * q.shape[-1] ** -0.5
    scores, hidden = q @ k.transpose(2, 3), ~visible[:, None, None]
    if not which.endswith("after"):
        zero = which.endswith(("as 0", "emptied"))
        scores = scores.masked_fill(hidden, 0.0 if zero else -torch.inf)
    weights = scores.softmax(-1)
    if which.endswith(("after", "emptied")):
        weights = weights.masked_fill(hidden, 0.0)
    return (weights @ v).flatten(1, 2)


BORDER = "the border: n tokens stand at positions 0 … n - 1"
OWN = "each row has a border of its own"
VISIBLE = {
    "one more": ("each sequence still sees the slot after its newest token, one too many", BORDER),
    "one less": ("each sequence no longer sees its own newest token", BORDER),
    "to the end of the block": (
        "a sequence sees its last block to the end, also the slots that hold no token",
        "the border is a number of tokens, not of blocks",
    ),
    "to the longest": ("all sequences see as far as the longest of the batch", OWN),
    "to the first row's": ("all sequences see as far as the first of the batch", OWN),
    "everything": (
        "nothing is hidden any more: the padding of the tables is read",
        "what do the zeros at the end of a shorter table name?",
    ),
    "right, as 0": (
        "what is hidden gets a score of 0, and e^0 is a weight of 1",
        "which score gives a weight of 0?",
    ),
    "right, emptied": (
        "K and V of what is not visible are 0, but it still has a weight: e^0",
        "-inf before the softmax",
    ),
    "right, after": (
        "what is not visible still has a weight in the softmax, and is taken out too late",
        "-inf before the softmax",
    ),
}


def company(lens, block_size, heads, kv_heads, seed, loud=40.0):
    """Sequences of these lengths in one pool: (q, blocks, tables padded with 0, lens), and
    naive attention for each."""
    pairs = [draw_attention(n, heads, kv_heads, seed=seed + i) for i, n in enumerate(lens)]
    width = needed(max(lens), block_size)
    ids = random.Random(seed).sample(range(1, len(lens) * width + 2), len(lens) * width)
    ids[0] = 0  # somebody's block is the one that pads all tables
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lens) * width + 2, block_size, 2, kv_heads, 8)
    blocks = loud * torch.randn(shape, generator=generator)
    tables = torch.zeros(len(lens), width, dtype=torch.long)
    for row, (_, kv) in enumerate(pairs):
        count = needed(len(kv), block_size)
        tables[row, :count] = torch.tensor(ids[row * width : row * width + count])
        for position, token in enumerate(kv):
            blocks[tables[row, position // block_size], position % block_size] = token
    expected = [naive_attention(q[None], *kv.unbind(1))[0] for q, kv in pairs]
    q = torch.stack([q for q, _ in pairs])
    return (q, blocks, tables, torch.tensor(list(lens))), torch.stack(expected)


def check_company(mine, lens, block_size, what, heads=2, kv_heads=1, seed=4, loud=40.0) -> None:
    arguments, expected = company(lens, block_size, heads, kv_heads, seed, loud)
    suspects = [
        Suspect(partial(batched_by_mistake, *arguments, which), *why)
        for which, why in VISIBLE.items()
    ]
    close(mine.batched_attention(*arguments), expected, what, *suspects)


@check("04.5", "alone, a context that ends with a block", look="nothing needs to be hidden here")
def _(mine):
    for blocks in (1, 2, 3):
        check_company(
            mine, [4 * blocks], 4, f"1 sequence, context length {4 * blocks}, blocks of 4"
        )


@check("04.5", "alone, a context that ends inside a block", look="the border of what is visible")
def _(mine):
    for length in (5, 2, 3, 7, 9, 1):
        check_company(mine, [length], 4, f"1 sequence, context length {length}, blocks of 4")


@check("04.5", "in company: every row as if it were alone", look="the border of each row")
def _(mine):
    for lens in ([4, 9, 6, 1], [1, 4, 9, 6], [8, 8, 4]):
        check_company(mine, lens, 4, f"{len(lens)} sequences, context lengths {lens}, blocks of 4")


@check("04.5", "other block sizes, other heads", look="shapes: (S, H, D) in, (S, H, D) out")
def _(mine):
    for block_size in (3, 16, 1):
        what = f"context lengths [5, 17, 12], blocks of {block_size}, 4 query heads on 2 KV heads"
        check_company(mine, [5, 17, 12], block_size, what, 4, 2)
    check_company(mine, [5, 3], 4, "context lengths [5, 3], 6 query heads on 3 KV heads", 6, 3)


@check(
    "04.5",
    "whatever lies in slots that are not theirs",
    look="what a row sees beyond its own tokens",
)
def _(mine):
    for loud in (0.0, 1000.0):
        what = f"3 sequences, every other slot filled with values of about {loud:.0f}"
        check_company(mine, [6, 3, 9], 4, what, loud=loud)


@check(
    "04.5",
    "tinypy writes in company what it writes alone",
    cause="a decode sees a token that is not of its own sequence, or misses one that is",
    look="the checks above: which of them fails?",
)
def _(mine):
    lm = tinypy()
    prompts = [lm.encode(text) for text in TEXTS]
    config = minikv.EngineConfig(num_blocks=256, block_size=4, prefix_cache=False)
    backend = partial(DecodesTogether, attend_all=mine.batched_attention)
    found, _ = run(minikv.Engine(lm, config, attention=backend), prompts, 12)  # as the notebook
    for text, prompt, tokens in zip(TEXTS, prompts, found, strict=True):
        expected = lm.generate_naively(prompt, 12)
        if tokens != expected:
            raise Wrong(
                f"{text!r} in company of two others goes on with {lm.decode(tokens)!r}, "
                f"expected {lm.decode(expected)!r}"
            )


# ── 04.6 How large is a block? ────────────────────────────────────────────────


SWEEP = {  # key: (what it is, the answer, where to look, suspects)
    "blocks of 16": (
        ("blocks of 16 for 1,300 tokens", 82, "1300 / 16, and what becomes of the rest"),
        Suspect(81, "the last 4 tokens have no block", "the rounding: up or down?"),
        Suspect(81.25, "there is no quarter of a block", "the rounding: up or down?"),
        Suspect(20800, "1,300 blocks of 16 are too many", "do you divide or multiply?"),
    ),
    "empty slots": (
        ("empty slots in them", 12, "the slots of all blocks, less the tokens"),
        Suspect(4, "4 is how many slots of the last block are filled", "and how many are not?"),
        Suspect(0, "1,300 is no multiple of 16", "how full is the last block?"),
    ),
    "entries at 1": (
        ("entries of the block table in blocks of 1", 1300, "one entry a block"),
        Suspect(82, "that is the table for blocks of 16", "how many blocks of one token?"),
        Suspect(1, "every block has its entry", "how many blocks of one token?"),
    ),
    "average at 16": (
        ("average number of empty slots in the last block of 16", 7.5, "(15 + 14 + … + 0) / 16"),
        Suspect(
            8,
            "half a block would be right if the last block could be all empty, but it is opened "
            "for a token",
            "the list 15, 14, … 0: does it have 16 in it?",
        ),
        Suspect(8.5, "8.5 is the average number of slots that are filled", "how many are empty?"),
        Suspect(15, "15 is the worst case", "the average over 1, 2, … 16 filled slots"),
        Suspect(7, "an average need not be a whole number", "the sum over 1, 2, … 16, divided"),
    ),
    "largest under 4 %": (
        ("largest power of two under 4 %", 64, "(b - 1) / 2 against 4 % of the slots held"),
        Suspect(32, "32 keeps even the worst case under 4 %", "the average is asked for"),
        Suspect(128, "63.5 empty slots are more than 4 % of 1,363.5", "empty slots / slots held"),
        Suspect(104, "104 is close to the border, but no power of two", "the ones below it"),
        Suspect(
            52, "52 is 4 % of the tokens, and not a block size", "blocks with fewer empty slots"
        ),
    ),
}


check_numbers("04.6", "before_the_sweep", SWEEP)


# ── The reader's parts in the engine ──────────────────────────────────────────


def run(engine: minikv.Engine, prompts, num_tokens: int) -> tuple[list[list[int]], int]:
    """New tokens of each prompt, all served at once, and the most blocks held at any time."""
    params = minikv.SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    order = [engine.add_request(prompt, params) for prompt in prompts]
    outputs, most = {}, 0
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
    backends = {
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
        if found != expected:
            raise AssertionError(f"blocks of {block_size}: {found}, the oracle: {expected}")
    lengths = ", ".join(str(len(prompt)) for prompt in prompts)
    reserved = len(prompts) * lm.config.max_context
    return (
        f"{len(prompts)} requests at once ({lengths} prompt tokens, {new} new ones each), "
        f"same tokens as the oracle; at most {held[4]} blocks of 4 held, or {held[16]} of 16: "
        f"{4 * held[4]} and {16 * held[16]} slots, where reservation would hold {reserved:,}."
    )
