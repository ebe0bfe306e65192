"""Checks of chapter 05: forks, copies on first write, beams, branches, and the copies of a step."""

import random
import re
from collections import Counter
from functools import partial

import torch

import minikv
from minikv import OutOfBlocks, beam
from minikv.course.answers.ch05 import go_on, sample_naively
from minikv.course.checking import Suspect, Wrong, check, equal, plain, raises, runs_model, tinypy
from minikv.sequence import Request, Sequence

PROMPT = "class Queue:\n    def push(self, item):\n        self."
SAMPLES = minikv.SamplingParams(n=4, max_tokens=24, temperature=0.8, seed=1, ignore_eos=True)


def scrambled_pool(num_blocks: int, seed: int = 5) -> minikv.BlockPool:
    """A pool that hands out its blocks in any order, so that no id is a logical block's number."""
    pool = minikv.BlockPool(num_blocks)
    ids = [pool.allocate() for _ in range(num_blocks)]
    random.Random(seed).shuffle(ids)
    for block_id in ids:
        pool.release(block_id)
    return pool


def table_of(mine, num_tokens: int, block_size: int, num_blocks: int = 24):
    """The reader's table with so many tokens, and its pool."""
    pool = scrambled_pool(num_blocks)
    table = mine.BlockTable(pool, block_size)
    table.grow(num_tokens)
    return table, pool


def counts_of(pool, block_ids) -> list[int]:
    return [pool.ref_count(block_id) for block_id in block_ids]


class Memory:
    """What lies in the slots of a pool: written where tables say, copied when they ask for it."""

    def __init__(self):
        self.slots: dict[int, str] = {}

    def write(self, table, position: int, value: str) -> None:
        size = table.block_size
        slot, copy = slot_and_copy(table, position, f"position {position}, blocks of {size}")
        if copy is not None:
            source, target = copy
            for offset in range(size):
                self.slots[target * size + offset] = self.slots.get(source * size + offset)
        self.slots[slot] = value

    def fill(self, table, values: str) -> None:
        for position, value in enumerate(values):
            self.write(table, position, value)

    def read(self, table, num_tokens: int) -> str:
        """What stands at positions 0 … num_tokens - 1; "?" where nothing was ever written."""
        size, ids = table.block_size, table.block_ids
        room = range(min(num_tokens, len(ids) * size))
        found = [self.slots.get(ids[p // size] * size + p % size) or "?" for p in room]
        return "".join(found).ljust(num_tokens, "?")


# ── 05.1 A fork ───────────────────────────────────────────────────────────────


NEVER_SET = "num_tokens of the fork is never set", "the fields of the new table"


def forked(table):
    try:
        twin = table.fork()
    except TypeError as error:
        if not re.search(r"'(list|tuple)'", str(error)):
            raise
        raise Wrong(
            f"fork(): TypeError ({error})",
            "`acquire` takes one block id, not a list of them",
            "a loop over `self.block_ids`",
        ) from error
    if twin is None:
        raise Wrong("fork() gives None", "nothing is returned", "what stands at the end of `fork`?")
    if twin is table:
        raise Wrong(
            "fork() gives the same table, not a second one",
            "both samples would write their tokens into one table",
            "make a new table in `fork`",
        )
    if not isinstance(twin, type(table)):
        raise Wrong(
            f"fork() gives a {type(twin).__name__} that is not of the table's own class",
            "the fork is chapter 04's class, with its methods and not with yours",
            "use `type(self)` or `BlockTable`",
        )
    if not isinstance(twin.block_ids, list):
        raise Wrong(
            f"block_ids of the fork is a {type(twin.block_ids).__name__}",
            "block_ids must be a list: the fork grows at its end",
            "which call makes a second list of a list?",
        )
    if twin.pool is not table.pool:
        raise Wrong(
            "the fork has a pool of its own",
            "the pool was copied, too: what is counted there no longer says who holds a block",
            "hand the pool itself to the new table",
        )
    return twin


@check("05.1", "the same tokens, in the same blocks", look="the fields of the new table")
def _(mine):
    table, _ = table_of(mine, 7, 4)
    before = list(table.block_ids)
    twin = forked(table)
    equal(
        twin.block_ids,
        before,
        "block_ids of the fork of a table of 7 tokens, blocks of 4",
        Suspect([], "the new table begins without blocks", "what its `block_ids` should be"),
        Suspect(
            before[:1],
            "only the full block is shared: the last 3 tokens have none",
            "which blocks hold tokens that both have?",
        ),
    )
    equal(table.block_ids, before, "block_ids of the table that was forked")
    equal(
        (twin.num_tokens, twin.block_size),
        (7, 4),
        "num_tokens and block_size of the fork",
        Suspect((0, 4), *NEVER_SET),
        Suspect(
            (8, 4),
            "num_tokens is what the blocks can take, not what was asked for",
            "the table that was forked knows its number",
        ),
    )


@check("05.1", "every block gains a holder", look="how often the pool's `acquire` is called")
def _(mine):
    for num_tokens in (7, 12):
        table, pool = table_of(mine, num_tokens, 4)
        ids = list(table.block_ids)
        forked(table)
        blocks, last = len(ids), ids[-1:]
        equal(
            counts_of(pool, ids),
            [2] * blocks,
            f"counts of the {blocks} blocks after a fork of {num_tokens} tokens, blocks of 4",
            Suspect(
                [1] * blocks,
                "the pool is never told: the first sample to end frees the other's blocks",
                "which method of the pool counts one more holder?",
            ),
            Suspect(
                [1 + (block_id in last) for block_id in ids],
                "only the last block is counted: the full ones are freed with the first sample",
                "a block that nobody writes to can still be freed",
            ),
            Suspect(
                [2] * (blocks - 1) + [1],
                "the last block is not counted, and it is the one that will be written to",
                "which blocks does the fork name?",
            ),
            Suspect(
                [2] + [1] * (blocks - 1),
                "only the first block is counted",
                "a loop over all of them",
            ),
            Suspect(
                [3] * blocks,
                "every block is counted twice: it will never be free again",
                "one fork is one more holder",
            ),
        )


@check("05.1", "nothing is taken from the pool", look="a fork never calls `allocate`")
def _(mine):
    table, pool = table_of(mine, 7, 4)
    free = pool.num_free
    forked(table)
    equal(
        pool.num_free,
        free,
        "free blocks after a fork",
        Suspect(
            free - 2,
            "the fork takes blocks of its own: that is a copy, and K and V are not in them",
            "which blocks should the fork name?",
        ),
    )


@check("05.1", "each grows on its own", look="whose list is `block_ids`?")
def _(mine):
    table, _ = table_of(mine, 8, 4)
    twin = forked(table)
    before = list(table.block_ids)
    equal(twin.num_tokens, 8, "num_tokens of the fork of 8 tokens", Suspect(0, *NEVER_SET))
    twin.grow(1)
    if len(table.block_ids) > len(before):
        raise Wrong(
            f"the fork grows by 1 token, and the table it came from now has "
            f"{len(table.block_ids)} blocks, expected {len(before)}",
            "both have one and the same list of block ids",
            "a list is handed over, not copied, by `=`",
        )
    table.grow(1)
    equal(
        (len(set(twin.block_ids) - set(table.block_ids)), table.num_tokens, twin.num_tokens),
        (1, 9, 9),
        "(blocks that only the fork has, num_tokens of both) after each has grown by 1",
    )


@check("05.1", "the first to end leaves the other its blocks", look="what is counted, and when")
def _(mine):
    for first in ("the table", "the fork"):
        table, pool = table_of(mine, 7, 4)
        twin = forked(table)
        ending, staying = (table, twin) if first == "the table" else (twin, table)
        ids = list(staying.block_ids)
        ending.release()
        equal(
            (list(staying.block_ids), counts_of(pool, ids)),
            (ids, [1] * len(ids)),
            f"(block_ids, their counts) of the other when {first} is released",
            Suspect(
                (ids, [0] * len(ids)),
                "they are free, though a table still reads them",
                "does every block gain a holder in `fork`?",
            ),
        )
        staying.release()
        equal(pool.num_free, pool.num_blocks, "free blocks when both have ended")


@check(
    "05.1", "a fork of a fork, and of an empty table", look="every fork counts each block once more"
)
def _(mine):
    table, pool = table_of(mine, 5, 3)
    second = forked(table)
    third = forked(second)
    equal(counts_of(pool, table.block_ids), [3, 3], "counts with a fork and a fork of that")
    for one in (second, table, third):
        one.release()
    equal(pool.num_free, pool.num_blocks, "free blocks when all three have ended")
    empty = forked(mine.BlockTable(pool, 3))
    equal((empty.block_ids, empty.num_tokens), ([], 0), "(block_ids, num_tokens) of an empty fork")


# ── 05.2 Copy on first write ──────────────────────────────────────────────────


def two_samples(mine):
    """The walk-through: 7 tokens in blocks of 4, A and its fork B, each with room for the 8th."""
    a, pool = table_of(mine, 7, 4)
    b = a.fork()
    a.grow(1), b.grow(1)
    return a, b, pool


def slot_and_copy(table, position: int, what: str):
    """What writable_slot says, as (slot, copy as a tuple or None).

    Refuses what is wrong wherever it happens: a copy of a block with one holder, and a pair
    that is turned round or names slots.
    """
    index, size = position // table.block_size, table.block_size
    old = table.block_ids[index]
    alone = table.pool.ref_count(old) == 1
    try:
        found = table.writable_slot(position)
    except OutOfBlocks as error:
        if not alone:
            raise
        raise Wrong(f"{what}: OutOfBlocks ({error})", *ALWAYS_COPIES) from error
    if not isinstance(found, tuple) or len(found) != 2:
        raise Wrong(
            f"{what}: {found!r}, expected a pair",
            "writable_slot returns two things: a slot, and the copy or None",
            "what stands after `return`?",
        )
    slot, copy = found
    if copy is None:
        return plain(slot), None
    copy, new = tuple(plain(copy)), table.block_ids[index]
    if alone:
        raise Wrong(f"{what}: the copy {copy}, expected None", *ALWAYS_COPIES)
    if new != old and copy == (new, old):
        raise Wrong(
            f"{what}: the copy {copy}, expected {(old, new)}",
            "the pair is turned round: an empty block would be copied over the others' tokens",
            "(from_block, to_block)",
        )
    starts, offset = (old * size, new * size), position % size
    if new != old and copy != (old, new) and copy in (starts, tuple(s + offset for s in starts)):
        raise Wrong(
            f"{what}: the copy {copy}, expected {(old, new)}",
            "these are slots: block numbers are asked for",
            "(from_block, to_block)",
        )
    return plain(slot), copy


NEVER_COPIES = (
    "the block is written in place, though others hold it: their tokens are overwritten",
    "what does the pool count for this block?",
)
NOT_RELEASED = (
    "the old block was never released, so B will copy, too, and the block leaks when both finish",
    "what happens to the old block after you take the new one?",
)
ALWAYS_COPIES = (
    "a block with a single owner is copied: nobody else would have seen the write",
    "for which count may you write in place?",
)


@check("05.2", "one owner: written in place", look="the case in which the count is 1")
def _(mine):
    table, pool = table_of(mine, 8, 4)
    ids = list(table.block_ids)
    for position in (7, 4, 2, 0):
        what = f"one owner, position {position}, blocks of 4, table {ids}"
        slot, _ = slot_and_copy(table, position, what)
        block_id = ids[position // 4]
        equal(
            slot,
            block_id * 4 + position % 4,
            f"{what}: the slot",
            Suspect(
                position,
                "the position is taken for a slot: the table is not read",
                "slot = physical block * block_size + place in it",
            ),
            Suspect(
                block_id,
                "the block is taken for a slot",
                "slot = physical block * block_size + place in it",
            ),
            Suspect(
                ids[-1] * 4 + position % 4,
                "the slot is in the last block, whatever the position",
                "position / block_size says which block",
            ),
            Suspect(
                ids[0] * 4 + position % 4,
                "the slot is in the first block, whatever the position",
                "position / block_size says which block",
            ),
        )
    equal((table.block_ids, pool.num_free), (ids, 22), "(block_ids, free blocks) afterwards")


@check("05.2", "two owners: the first writer copies", look="what is returned for a shared block")
def _(mine):
    a, b, _ = two_samples(mine)
    first, old = a.block_ids
    slot, copy = slot_and_copy(a, 7, "A writes position 7")
    if copy is None:
        raise Wrong("A writes position 7, block 1 is B's, too: no copy is asked for", *NEVER_COPIES)
    if list(b.block_ids) != [first, old]:
        raise Wrong(
            f"A writes position 7: the table of B changes from {[first, old]} to {b.block_ids}",
            "B is given the new block, or both have one list",
            "only the writer's own table changes",
        )
    new = a.block_ids[1]
    if a.block_ids[0] != first:
        raise Wrong(
            f"A writes position 7: its table changes from {[first, old]} to {a.block_ids}",
            "the first block is copied instead of the one that is written to",
            "position / block_size says which",
        )
    if new == old:
        raise Wrong(
            f"A writes position 7: its table is {a.block_ids} as before, and the copy is {copy}",
            "the copy is asked for, and the table still names the old block",
            "what becomes of `self.block_ids[index]`?",
        )
    equal(
        copy,
        (old, new),
        f"A writes position 7, its table was {[first, old]} and is {a.block_ids}: the copy",
    )
    equal(
        slot,
        new * 4 + 3,
        f"A writes position 7, its new block is {new}: the slot",
        Suspect(
            old * 4 + 3,
            "the slot is in the old block: the copy is made, and B's block is written to",
            "from which block is the slot counted?",
        ),
        Suspect(new, "the new block is taken for a slot", "its slots begin at block * block_size"),
        Suspect(
            new * 4,
            "the slot is the new block's first, but the copied tokens keep their places",
            "the place in the block is the same in the copy",
        ),
    )


@check("05.2", "reference counts after the copy", look="who holds the old block, who the new one?")
def _(mine):
    a, _, pool = two_samples(mine)
    first, old = a.block_ids
    a.writable_slot(7)
    new = a.block_ids[1]
    if new == old:
        raise Wrong(
            "after A writes position 7, its table names the block that B names, too",
            "A has not left the shared block",
            "what does `self.block_ids` name afterwards?",
        )
    equal(
        counts_of(pool, (first, old, new)),
        [2, 1, 1],
        "after A writes position 7: counts of logical block 0, B's block 1, A's block 1",
        Suspect([2, 2, 1], *NOT_RELEASED),
        Suspect(
            [2, 2, 2],
            "the old block was never released, and the new one is counted twice",
            "`allocate` has counted its holder already",
        ),
        Suspect(
            [2, 1, 2],
            "the new block is counted twice: once by `allocate`, once more by you",
            "`allocate` has counted its holder already",
        ),
        Suspect(
            [2, 0, 1],
            "the old block was released twice: B still reads it, and it is free",
            "one holder has gone, A",
        ),
        Suspect(
            [1, 1, 1],
            "the first block was released, too, but A still reads it",
            "only the block that was replaced has lost a holder",
        ),
    )


@check("05.2", "the second writer writes in place", look="the counts after the first writer's copy")
def _(mine):
    a, b, _ = two_samples(mine)
    old = a.block_ids[1]
    a.writable_slot(7)
    equal(
        slot_and_copy(b, 7, "B writes position 7"),
        (old * 4 + 3, None),
        "B writes position 7 after A: (slot, copy)",
        Suspect(
            lambda: (b.block_ids[1] * 4 + 3, (old, b.block_ids[1])),
            *NOT_RELEASED,
        ),
    )
    before = list(a.block_ids)
    equal(
        slot_and_copy(a, 7, "A once more"),
        (before[1] * 4 + 3, None),
        "A writes position 7 once more: (slot, copy)",
    )


@check(
    "05.2",
    "each reads what it wrote, and the prompt",
    cause="the new slot, the copy and the table do not name the same block",
    look="what A reads and what B reads, position by position",
)
def _(mine):
    prompt = "abcdefghijklmnopqrst"
    for size, length in ((4, 7), (4, 5), (4, 4), (3, 7), (1, 3), (16, 20), (16, 3), (16, 15)):
        a, _ = table_of(mine, length, size)
        memory = Memory()
        memory.fill(a, prompt[:length])
        b = a.fork()
        for position in range(length, length + 2 * size + 1):
            for table, letter in ((a, "A"), (b, "B")):
                table.grow(1)
                memory.write(table, position, letter)
        for table, letter in ((a, "A"), (b, "B")):
            expected = prompt[:length] + letter * (2 * size + 1)
            found = memory.read(table, len(expected))
            what = f"{length} tokens, blocks of {size}, A and B write in turn: {letter} reads"
            if "A" in found and "B" in found:
                raise Wrong(
                    f"{what} {found}, expected {expected}",
                    "one reads what the other wrote: both write to the same block",
                    "whose block is the slot in?",
                )
            equal(found, expected, what)
        table.release()


@check("05.2", "any block, not only the last", look="which block the position is in")
def _(mine):
    for position in (8, 0, 5, 2):
        a, _ = table_of(mine, 11, 4)
        b = a.fork()
        before, index = list(a.block_ids), position // 4
        what = f"a shared table of 3 blocks, position {position}, blocks of 4"
        slot, copy = slot_and_copy(a, position, what)
        if copy is None and position == 8:
            raise Wrong(f"{what}: no copy", *NEVER_COPIES)
        if copy is None:
            raise Wrong(
                f"{what}: no copy, but logical block {index} has 2 holders",
                "only the last block is looked at, and this one is shared as well",
                "which block's count do you ask for?",
            )
        changed = [i for i in range(3) if a.block_ids[i] != before[i]]
        equal(
            changed,
            [index],
            f"{what}: the logical blocks that are new in the writer's table",
            Suspect(
                [2],
                "the last block is copied, whatever the position",
                "position / block_size says which block",
            ),
            Suspect(
                [0],
                "the first block is copied, whatever the position",
                "position / block_size says which block",
            ),
            Suspect(
                [0, 1, 2],
                "all blocks are copied: that is a copy of the whole table",
                "only the block that is written to",
            ),
        )
        equal(copy, (before[index], a.block_ids[index]), f"{what}: the copy")
        equal(slot, a.block_ids[index] * 4 + position % 4, f"{what}: the slot")
        equal(list(b.block_ids), before, f"{what}: the other's block_ids")


@check("05.2", "three owners, and a fork of a fork", look="the count decides, not who is who")
def _(mine):
    a, pool = table_of(mine, 3, 4)
    b = a.fork()
    c = b.fork()
    (old,) = a.block_ids
    copies = [slot_and_copy(table, 2, "three owners")[1] for table in (b, c, a)]
    equal(
        [copy is not None for copy in copies],
        [True, True, False],
        "three owners write one after the other: who asks for a copy",
        Suspect(
            [True, False, False],
            "the second writes in place, though the third still reads the block",
            "for which counts is a copy due?",
        ),
        Suspect([True, True, True], *NOT_RELEASED),
        Suspect(
            [False] * 3,
            "a block with three holders is written in place, though the other two read it",
            "for which counts is a copy due?",
        ),
    )
    equal([source for source, _ in copies[:2]], [old, old], "the blocks that are copied from")
    equal(pool.num_free, 21, "free blocks of 24 afterwards")


@check("05.2", "a holder that is no table counts, too", look="ask the pool, not the tables")
def _(mine):
    table, pool = table_of(mine, 7, 4)
    old = table.block_ids[1]
    pool.acquire(old)  # as the prefix cache does
    what = "a write to a block that the prefix cache holds as well"
    _, copy = slot_and_copy(table, 6, what)
    if copy is None:
        raise Wrong(f"{what}: no copy is asked for", *NEVER_COPIES)
    equal(copy[0], old, f"{what}: the block that is copied from")
    equal(
        pool.ref_count(old),
        1,
        "count of the old block: the prefix cache's",
        Suspect(2, *NOT_RELEASED),
    )


@check(
    "05.2",
    "an empty pool: OutOfBlocks, and nothing has changed",
    look="which of your lines can fail, and what has happened before it",
)
def _(mine):
    a, pool = table_of(mine, 8, 4, num_blocks=2)
    b = a.fork()
    ids = list(a.block_ids)
    raises(
        OutOfBlocks,
        lambda: a.writable_slot(7),
        "a write to a shared block when no block is free",
        "the error is swallowed, and the shared block is written to",
        "let OutOfBlocks through: the caller makes room and asks again",
    )
    found = (list(a.block_ids), a.num_tokens, counts_of(pool, ids))
    equal(
        found,
        (ids, 8, [2, 2]),
        "(block_ids, num_tokens, counts) after the write that failed",
        Suspect(
            (ids, 8, [2, 1]),
            "the old block is released before the new one is there: A reads it and doesn't hold it",
            "`allocate` can fail, so it comes first",
        ),
        Suspect(
            (ids[:1], 8, [2, 2]),
            "the table has lost its block before the new one is there",
            "`allocate` can fail, so it comes first",
        ),
        Suspect(
            ([ids[0], None], 8, [2, 2]),
            "the table has lost its block before the new one is there",
            "`allocate` can fail, so it comes first",
        ),
    )
    b.release()
    equal(
        slot_and_copy(a, 7, "once B has gone"),
        (ids[1] * 4 + 3, None),
        "the same write when the other has gone: (slot, copy)",
    )


@check("05.2", "a position without a token is refused", look="the first lines of `writable_slot`")
def _(mine):
    accepted = set()
    for position in (-1, 6, 7, 8):
        a, _ = table_of(mine, 6, 4)
        _keep = a.fork()
        try:
            a.writable_slot(position)
            accepted.add(position)
        except Exception as error:
            if not isinstance(error, ValueError):
                accepted.add(position)
    cause = (
        "nobody asks whether the table has this position: -1 is the last block of a Python list, "
        "and 6 has a slot that was not promised"
    )
    if -1 not in accepted:
        cause = (
            "what the blocks can take is no promise: the last position is num_tokens - 1"
            if 7 in accepted
            else "one position too many: the last one is num_tokens - 1"
        )
    elif accepted == {-1}:
        cause = "a position below 0 is accepted: -1 is the last block of a Python list"
    a, pool = table_of(mine, 6, 4)
    b = a.fork()
    for position in (-1, 6, 7, 8):
        before = (list(a.block_ids), pool.num_free)
        raises(
            ValueError,
            partial(a.writable_slot, position),
            f"position {position} of a table of 6 tokens, blocks of 4",
            cause,
            "0 up to, not including, `self.num_tokens`",
        )
        equal((list(a.block_ids), pool.num_free), before, "(block_ids, free) after it was refused")
    b.release()


@check("05.2", "all blocks come back when all have finished", look="the counts after each copy")
def _(mine):
    for size, length in ((4, 7), (3, 3), (1, 2), (16, 9)):
        first, pool = table_of(mine, length, size)
        tables = [first, *(first.fork() for _ in range(3))]
        for table in tables:
            table.grow(1)
            table.writable_slot(length)
        for table in tables:
            table.release()
        equal(
            pool.num_free,
            pool.num_blocks,
            f"free blocks when 4 samples of {length} tokens, blocks of {size}, have finished",
        )


@check(
    "05.2",
    "300 random steps, at several block sizes",
    cause="some order of forks, writes and releases goes wrong",
    look="the checks above: which of them fails?",
)
def _(mine):
    for size in (1, 3, 4):
        draw, pool, memory = random.Random(size), scrambled_pool(20, size), Memory()
        live: list[tuple[object, str]] = []  # (table, what it should read)
        for step in range(300):
            if not live or (len(live) < 5 and draw.random() < 0.1):
                live.append((mine.BlockTable(pool, size), ""))
                continue
            i = draw.randrange(len(live))
            table, text = live[i]
            action = draw.choice(["append", "append", "append", "rewrite", "fork", "release"])
            what = f"block size {size}, step {step}, {action}"
            try:
                if action == "append":
                    if table.num_tokens == len(text):
                        table.grow(1)
                    memory.write(table, len(text), chr(97 + step % 26))
                    live[i] = table, text + chr(97 + step % 26)
                elif action == "rewrite" and text:
                    position = draw.randrange(len(text))
                    memory.write(table, position, "*")
                    live[i] = table, text[:position] + "*" + text[position + 1 :]
                elif action == "fork" and len(live) < 6:
                    live.append((table.fork(), text))
                elif action == "release":
                    live.pop(i)[0].release()
            except OutOfBlocks:
                live.pop(i)[0].release()
            holders = Counter(b for table, _ in live for b in table.block_ids)
            counts = counts_of(pool, range(20))
            equal(counts, [holders[b] for b in range(20)], f"{what}: counts of blocks 0 to 19")
            for table, text in live:
                equal(memory.read(table, len(text)), text, f"{what}: what a table reads")


# ── 05.3 How many blocks? ─────────────────────────────────────────────────────


def counted(n: int, num_prompt: int, num_new: int, block_size: int) -> tuple[int, int]:
    """(shared, copied), counted on real tables."""
    found = []
    for fork in (True, False):
        pool = minikv.BlockPool(n * -(-(num_prompt + num_new) // block_size))
        tables = [minikv.BlockTable(pool, block_size)]
        tables[0].grow(num_prompt)
        for _ in range(n - 1):
            tables.append(tables[0].fork() if fork else minikv.BlockTable(pool, block_size))
            tables[-1].grow(num_prompt - tables[-1].num_tokens)
        for position in range(num_prompt, num_prompt + num_new):
            for table in tables:
                table.grow(1)
                table.writable_slot(position)
        found.append(pool.num_blocks - pool.num_free)
    return tuple(found)


def up(a: int, b: int) -> int:
    return -(-a // b)


MISTAKES = {  # shared, as a mistake would give it: (formula of n, each, full, begun, new), why
    "nothing is shared": (
        lambda n, each, full, begun, new: n * each,
        "which blocks does nobody ever write to?",
    ),
    "before anybody has written, the block in which the prompt ends is shared, too": (
        lambda n, each, full, begun, new: full + n * (each - full),
        "what if num_new is 0?",
    ),
    "the full blocks of the prompt are left out": (
        lambda n, each, full, begun, new: n * (each - full) if new else each,
        "they are there once, for all",
    ),
    "all samples write into the same blocks": (
        lambda n, each, full, begun, new: each,
        "what happens at the first write to a shared block?",
    ),
    "the block in which the prompt ends is counted once, but everybody writes to it": (
        lambda n, each, full, begun, new: begun + n * (each - begun),
        "what happens at the first write to a shared block?",
    ),
    "each sample begins a block for its new tokens, though its last one has room": (
        lambda n, each, full, begun, new: begun + n * new,
        "how many tokens does one sample have altogether?",
    ),
    "the tokens of the prompt in its last block are forgotten": (
        lambda n, each, full, begun, new: full + n * new if new else each,
        "the copy holds them, too, and has fewer slots left",
    ),
    "the original is counted beside the copies, but the last writer keeps it": (
        lambda n, each, full, begun, new: begun + n * (each - full) if new else each,
        "n samples: how many copies are made?",
    ),
    "the block of the first token after the prompt is counted once, but everybody writes to it": (
        lambda n, each, full, begun, new: full + 1 + n * (each - full - 1) if new else each,
        "the first token after a full block opens a new one: whose?",
    ),
    "a prompt that ends with a block: the next one is counted once, but each sample opens one": (
        lambda n, each, full, begun, new: (
            full + (begun == full) + n * (each - full - (begun == full)) if new else each
        ),
        "the first token after a full block opens a new one: whose?",
    ),
}
COPIED = {
    "one block too many where the tokens end with a block": (
        lambda n, tokens, begun, new, size: n * (tokens // size + 1),
        "8 tokens in blocks of 4 need 2 blocks",
    ),
    "the number of blocks is rounded down, so the last tokens have none": (
        lambda n, tokens, begun, new, size: n * (tokens // size),
        "7 tokens in blocks of 4 need 2 blocks",
    ),
    "prompt and new tokens are rounded up apart: the last block's empty slots are not used": (
        lambda n, tokens, begun, new, size: n * (begun + new),
        "how many tokens does one sample have altogether?",
    ),
    "that is one sample's": (
        lambda n, tokens, begun, new, size: up(tokens, size),
        "how many samples are there?",
    ),
    "the new tokens are left out": (
        lambda n, tokens, begun, new, size: n * begun,
        "how many tokens does one sample have altogether?",
    ),
}


def shared_by(formula, n: int, num_prompt: int, num_new: int, size: int) -> int:
    each, full = up(num_prompt + num_new, size), num_prompt // size
    return formula(n, each, full, up(num_prompt, size), up(num_new, size))


def copied_by(formula, n: int, num_prompt: int, num_new: int, size: int) -> int:
    return formula(n, num_prompt + num_new, up(num_prompt, size), up(num_new, size), size)


def check_counts(mine, cases) -> None:
    for n, num_prompt, num_new, size in cases:
        found = plain(mine.blocks_for_samples(n, num_prompt, num_new, size))
        tokens = f"{num_new} new token{'s' * (num_new != 1)} each"
        what = f"{n} samples, a prompt of {num_prompt}, {tokens}, blocks of {size}"
        if not isinstance(found, list) or len(found) != 2:
            raise Wrong(
                f"{what}: {found!r}", "two numbers are expected", "return shared, copied: a pair"
            )
        shared, copied = counted(n, num_prompt, num_new, size)
        if found == [copied, shared] and copied != shared:
            raise Wrong(
                f"{what}: {found}", "the two numbers have changed places", "(shared, copied)"
            )
        for place, expected, name, mistakes, by in (
            (1, copied, "copied", COPIED, copied_by),
            (0, shared, "shared", MISTAKES, shared_by),
        ):
            if found[place] == expected:
                continue
            message = f"{what}: {name} {found[place]}, expected {expected}"
            for cause, (formula, look) in mistakes.items():
                if all(  # the mistake that explains every answer, not this one alone
                    plain(mine.blocks_for_samples(*case))[place] == by(formula, *case)
                    for case in ALL_CASES
                ):
                    raise Wrong(message, cause, look)
            raise Wrong(message)


COUNTS = {  # what the check is called: (n, num_prompt, num_new, block_size) …
    "the walk-through": ((2, 7, 1, 4), (2, 7, 2, 4), (2, 7, 0, 4)),
    "before anybody has written": ((8, 100, 0, 16), (3, 8, 0, 4), (5, 1, 0, 16)),
    "one token each": ((8, 100, 1, 16), (4, 3, 1, 4), (3, 6, 1, 3)),
    "a prompt that ends with a block": ((4, 48, 1, 16), (4, 48, 16, 16), (4, 48, 17, 16)),
    "long answers": ((4, 50, 500, 16), (16, 7, 99, 4), (2, 5, 6, 1)),
    "one sample": ((1, 50, 0, 16), (1, 50, 20, 16), (1, 48, 1, 16)),
}
ALL_CASES = [case for cases in COUNTS.values() for case in cases]
for name, cases in COUNTS.items():
    check("05.3", name, look="draw the blocks of two samples, full ones and the last")(
        partial(check_counts, cases=cases)
    )


@check("05.3", "every other number", look="the checks above: which of them fails?")
def _(mine):
    for size in (1, 3, 4, 16):
        for num_prompt in (1, 2, size, size + 1, 3 * size - 1, 3 * size):
            for num_new in (0, 1, 2, size, 2 * size + 1):
                for n in (1, 2, 5):
                    check_counts(mine, [(n, num_prompt, num_new, size)])


# ── 05.4 Beams fork and end ───────────────────────────────────────────────────


class Beams:
    """Live beams over a pool of their own, and what each of them should read."""

    def __init__(self, mine, prompt: list[int], block_size: int, num_blocks: int = 60):
        self.mine, self.pool, self.memory = mine, scrambled_pool(num_blocks), Memory()
        root = Request(-1, prompt, minikv.SamplingParams()).sequences[0]
        root.table = minikv.BlockTable(self.pool, block_size)
        self.live = [root]
        self.compute()

    def compute(self) -> None:
        """As a step does: K and V of the tokens that have none yet are written. Here a token
        stands for its own K and V."""
        for one in self.live:
            one.table.grow(len(one.token_ids) - one.table.num_tokens)
            for position in range(one.num_computed, len(one.token_ids)):
                self.memory.write(one.table, position, chr(one.token_ids[position]))
            one.num_computed = len(one.token_ids)

    def split(self, letters: str) -> None:
        """A child of the prompt's beam for each letter, by the reference, and the next step."""
        self.live = beam.next_beams(self.live, [(0, ord(letter)) for letter in letters])
        self.compute()

    def choose(self, chosen: list[tuple[int, str]], what: str) -> None:
        """next_beams, looked at, and then the next step."""
        parents = [list(one.token_ids) for one in self.live]
        blocks = [list(one.table.block_ids) for one in self.live]
        given = list(self.live)
        pairs = [(parent, ord(letter)) for parent, letter in chosen]
        expected = [[*parents[parent], token] for parent, token in pairs]
        children = self.mine.next_beams(list(self.live), list(pairs))
        if not isinstance(children, list | tuple) or not all(
            isinstance(child, Sequence) for child in children
        ):
            raise Wrong(
                f"{what}: {children!r:.80}",
                "a list of sequences is expected, one for each that was chosen",
                "what stands after `return`?",
            )
        found = [list(child.token_ids) for child in children]
        if len(set(map(id, children))) < len(children):
            raise Wrong(
                f"{what}: two of the {len(children)} beams are one and the same object",
                "a parent is handed out for two children: each token is written to both",
                "one fork for each that was chosen",
            )
        letters = [[chr(token) for token in tokens] for tokens in found]
        equal(
            ["".join(tokens) for tokens in letters],
            ["".join(map(chr, tokens)) for tokens in expected],
            f"{what}: the tokens of the new beams",
            *self._tokens_by_mistake(parents, pairs),
        )
        self._check_tables(children, [blocks[parent] for parent, _ in pairs], what)
        computed = [child.num_computed for child in children]
        equal(
            computed,
            [len(tokens) - 1 for tokens in found],
            f"{what}: num_computed of the new beams",
            Suspect(
                [len(tokens) for tokens in found],
                "the new token is counted as computed, but nobody has written its K and V",
                "a fork has computed what its parent has",
            ),
            Suspect(
                [0] * len(found),
                "the new beams are counted as not computed at all: everything is done again",
                "a fork has computed what its parent has",
            ),
        )
        holders = Counter(b for child in children for b in child.table.block_ids)
        self._check_counts(holders, children, given, {parent for parent, _ in pairs}, what)
        self.live = list(children)

    @staticmethod
    def _tokens_by_mistake(parents, pairs):
        def text(rows):
            return ["".join(map(chr, tokens)) for tokens in rows]

        extended = [list(tokens) for tokens in parents]
        grown = []
        for parent, token in pairs:
            extended[parent].append(token)
            grown.append(list(extended[parent]))
        doubled = [[*tokens, token] for tokens, (_, token) in zip(grown, pairs, strict=True)]
        in_turn = [
            [*parents[min(i, len(parents) - 1)], token] for i, (_, token) in enumerate(pairs)
        ]
        by_parent = sorted(range(len(pairs)), key=lambda i: pairs[i][0])
        return (
            Suspect(
                text([parents[parent] for parent, _ in pairs]),
                "the new token is in none of them",
                "what is appended to a child's `token_ids`?",
            ),
            Suspect(
                text(grown),
                "a child has the tokens of its sibling, too: the parent was extended, then forked",
                "whose `token_ids` gets the new token?",
            ),
            Suspect(
                text(doubled),
                "the new token is appended to the parent and to the child",
                "whose `token_ids` gets the new token?",
            ),
            Suspect(
                text([[*parents[pairs[i][0]], pairs[i][1]] for i in by_parent]),
                "the new beams are in the order of their parents, and scores are not",
                "the order of `chosen`",
            ),
            Suspect(
                text(in_turn),
                "child i is a fork of beam i, whoever its parent is",
                "the first number of each pair says which beam",
            ),
        )

    def _check_tables(self, children, expected: list[list[int]], what: str) -> None:
        tables = [child.table for child in children]
        if any(table is None for table in tables):
            raise Wrong(
                f"{what}: a new beam has no block table",
                "a new sequence was made without a table",
                "which method of a sequence gives a second one over the same blocks?",
            )
        if len(set(map(id, tables))) < len(tables):
            raise Wrong(
                f"{what}: two of the new beams have one and the same block table",
                "the table is handed over, not forked: what one writes, both have written",
                "which method of a sequence gives a second one over the same blocks?",
            )
        found = [list(table.block_ids) for table in tables]
        for ids, wanted in zip(found, expected, strict=True):
            if not ids and wanted:
                raise Wrong(
                    f"{what}: a new beam has an empty table, expected blocks {wanted}",
                    "its parent's table was released before the fork, so there was nothing left",
                    "when is the last child of a parent forked, and when is the parent released?",
                )
            for block_id in ids:
                if self.pool.ref_count(block_id) == 0:
                    raise Wrong(
                        f"{what}: block {block_id} is in a new beam's table, and free",
                        "a released block is handed over: anybody may get it now",
                        "who holds a block between the parent's release and the child's writing?",
                    )
        equal(found, expected, f"{what}: the block ids of the new beams")

    def _check_counts(self, holders, children, given, chosen: set[int], what: str) -> None:
        kept = {id(child) for child in children}
        ids = range(self.pool.num_blocks)
        counts, wanted = counts_of(self.pool, ids), [holders[b] for b in ids]
        if counts == wanted:
            return
        wrong = next(b for b in ids if counts[b] != wanted[b])
        message = (
            f"{what}: block {wrong} has count {counts[wrong]}, and {wanted[wrong]} of the new "
            f"beams hold it"
        )
        left = [i for i, one in enumerate(given) if one.table.block_ids and id(one) not in kept]
        if counts[wrong] < wanted[wrong]:
            raise Wrong(
                message,
                "a table is read by a beam that was never counted as its holder",
                "every child is a fork, and every parent is released once",
            )
        if left and not chosen & set(left):
            raise Wrong(
                message,
                "a beam without children never gives its blocks back: it is pruned, and they leak",
                "which of `beams` are released?",
            )
        if left and set(left) <= chosen:
            raise Wrong(
                message,
                "a parent that has children is not released: what it held stays held when it has "
                "gone",
                "the children hold blocks of their own account; who lets go of the parent's?",
            )
        raise Wrong(
            message,
            "no parent is released: what they held stays held when they have gone"
            if len(left) == len(given)
            else "not every parent is released"
            if left
            else "a block is counted for somebody who is not there",
            "every child is a fork, and every parent is released once",
        )

    def check_contents(self, what: str) -> None:
        for one in self.live:
            text = "".join(map(chr, one.token_ids))
            equal(self.memory.read(one.table, len(text)), text, f"{what}: what a beam reads")


def start(mine, prompt: str = "abcdefg", block_size: int = 4, **other) -> Beams:
    return Beams(mine, [ord(letter) for letter in prompt], block_size, **other)


LOOK_BEAMS = "the two rounds: what the children get, what the parents give back"


@check("05.4", "one parent, four children", look=LOOK_BEAMS)
def _(mine):
    beams = start(mine)
    beams.choose([(0, "P"), (0, "Q"), (0, "R"), (0, "S")], "4 children of the prompt's beam")
    used = beams.pool.num_blocks - beams.pool.num_free
    equal(used, 2, "blocks of the 4 before anybody writes, 7 tokens in blocks of 4")
    beams.compute()
    beams.check_contents("4 children, each has written its token")


@check("05.4", "one child each, in any order", look=LOOK_BEAMS)
def _(mine):
    beams = start(mine)
    beams.choose([(0, "P"), (0, "Q"), (0, "R")], "3 children of the prompt's beam")
    beams.compute()
    beams.choose([(2, "X"), (0, "Y"), (1, "Z")], "3 beams, one child each, best first: 2, 0, 1")
    beams.compute()
    beams.check_contents("3 beams, one child each")


@check("05.4", "a beam without children is given back at once", look="which tables are released")
def _(mine):
    beams = start(mine)
    beams.split("PQR")
    free = beams.pool.num_free
    beams.choose([(1, "X"), (1, "Y"), (1, "Z")], "3 beams, and all children are beam 1's")
    equal(beams.pool.num_free, free + 2, "free blocks when 2 of 3 beams are pruned, a block each")
    beams.compute()
    beams.check_contents("3 children of beam 1")


@check("05.4", "children first, then the parents' release", look=LOOK_BEAMS)
def _(mine):
    beams = start(mine, "abcde", num_blocks=4)
    beams.choose([(0, "P"), (0, "Q")], "2 children of the prompt's beam")
    beams.compute()
    beams.choose([(0, "X"), (1, "Y")], "2 beams, one child each")
    beams.compute()
    beams.choose([(1, "X"), (0, "Y"), (1, "Z")], "2 beams, the second has two children")
    beams.compute()
    beams.check_contents("2 beams, 3 children, in a pool of 4 blocks")


@check("05.4", "nobody is chosen: all is given back", look="`chosen` may be empty, `beams` is not")
def _(mine):
    beams = start(mine)
    beams.choose([(0, "P"), (0, "Q")], "2 children of the prompt's beam")
    beams.compute()
    beams.choose([], "2 beams, and no child")
    equal(beams.pool.num_free, beams.pool.num_blocks, "free blocks when no beam is left")


@check("05.4", "60 random steps, at several block sizes", look="the checks above: which fails?")
def _(mine):
    for size in (1, 3, 4, 16):
        draw, beams = random.Random(size), start(mine, "abcde", size, num_blocks=400)
        for step in range(60):
            width = draw.randrange(1, 5)
            chosen = [
                (draw.randrange(len(beams.live)), chr(draw.randrange(97, 123)))
                for _ in range(width)
            ]
            what = f"blocks of {size}, step {step}"
            beams.choose(chosen, what)
            beams.compute()
            beams.check_contents(what)


# ── 05.5 A branch in the middle ───────────────────────────────────────────────


def branched(mine, table, num_tokens: int):
    branch = mine.copy_prefix(table, num_tokens)
    if branch is None or branch is table:
        raise Wrong(
            f"copy_prefix gives {'None' if branch is None else 'the same table'}",
            "a second table is expected",
            "what stands after `return`?",
        )
    size = table.block_size
    equal(
        branch.num_tokens,
        num_tokens,
        f"the first {num_tokens} of {table.num_tokens} tokens, blocks of {size}: num_tokens of "
        "the branch",
        Suspect(
            up(num_tokens, size) * size,
            "num_tokens is what its blocks can take: the next token would leave a gap",
            "the last line: what the branch has, not what it could hold",
        ),
        Suspect(
            table.num_tokens,
            "the branch has all tokens of the table, not the first few",
            "which number of tokens was asked for?",
        ),
        Suspect(
            num_tokens // size * size,
            "the tokens after the last full block are cut off",
            "they were computed, too, and lie in a block of the table",
        ),
    )
    return branch


def conversation(block_size: int, text: str = "abcdefghijk", num_blocks: int = 20):
    """A table in which every token stands for its own K and V, its pool and its memory."""
    pool, memory = scrambled_pool(num_blocks), Memory()
    table = minikv.BlockTable(pool, block_size)
    table.grow(len(text))
    memory.fill(table, text)
    return table, pool, memory


LEFT_BEHIND = (
    "the blocks after the prefix have a holder that no longer names them",
    "what was forked and is not kept has to be released",
)


def check_branch(mine, num_tokens: int, block_size: int, text: str = "abcdefghijk") -> None:
    table, pool, memory = conversation(block_size, text)
    before = list(table.block_ids)
    branch = branched(mine, table, num_tokens)
    what = f"the first {num_tokens} of {len(text)} tokens, blocks of {block_size}"
    size, room = block_size, len(branch.block_ids) * block_size
    if room < num_tokens:
        raise Wrong(
            f"{what}: {len(branch.block_ids)} blocks, room for {room} tokens",
            "the block in which the prefix ends is left out",
            "how many blocks hold the first tokens? Rounded up or down?",
        )
    found = memory.read(branch, num_tokens)
    own = [b for b in branch.block_ids if b not in before]
    if found != text[:num_tokens]:
        cause, look = (
            "the branch reads other blocks than those in which its tokens lie",
            "which block of the table holds the last of these tokens?",
        )
        if own and "?" in found:
            cause = "the last tokens of the prefix are in a block that nobody has written to"
        raise Wrong(f"{what}: the branch reads {found}, expected {text[:num_tokens]}", cause, look)
    equal(
        list(branch.block_ids),
        before[: up(num_tokens, size)],
        f"{what}: block_ids of the branch",
        Suspect(
            before[:1] if num_tokens == 0 else None,
            "a branch of no tokens holds a block, and needs none",
            "how many blocks do 0 tokens need?",
        ),
        Suspect(
            before[: num_tokens // size + 1],
            "one block too many where the prefix ends with a block",
            "how many blocks do 8 tokens in blocks of 4 need?",
        ),
        Suspect(
            before,
            "the branch holds all blocks of the table, also those after the prefix",
            "how many blocks hold the first tokens?",
        ),
    )
    equal(list(table.block_ids), before, f"{what}: block_ids of the table")
    equal(
        counts_of(pool, before),
        [2 if i < len(branch.block_ids) else 1 for i in range(len(before))],
        f"{what}: counts of the table's blocks",
        Suspect(
            [2 if i < num_tokens // size else 1 for i in range(len(before))],
            "the block in which the prefix ends is in both tables and counted once",
            "every block of the branch gains a holder, also the last",
        ),
        Suspect(
            [1] * len(before),
            "the pool is never told that the blocks have another holder",
            "every block of the branch gains a holder",
        ),
        Suspect([2] * len(before), *LEFT_BEHIND),
    )


@check("05.5", "a prefix that ends with a block", look="the full blocks of the prefix")
def _(mine):
    for num_tokens, size in ((8, 4), (4, 4), (6, 3), (5, 1), (9, 3)):
        check_branch(mine, num_tokens, size)


@check("05.5", "a prefix that ends inside a block", look="the block in which the prefix ends")
def _(mine):
    for num_tokens, size in ((6, 4), (5, 4), (7, 4), (3, 4), (7, 3), (1, 16), (10, 16), (9, 4)):
        check_branch(mine, num_tokens, size)


@check("05.5", "nothing is taken from the pool", look="which line of `copy_prefix` takes a block?")
def _(mine):
    table, _, memory = conversation(4, num_blocks=3)
    try:
        branch = branched(mine, table, 6)
    except OutOfBlocks as error:
        raise Wrong(
            f"a branch at 6 tokens, with all 3 blocks of the pool in use: OutOfBlocks ({error})",
            "a block is taken for tokens that have one already",
            "which line of `copy_prefix` takes a block?",
        ) from error
    equal(memory.read(branch, 6), "abcdef", "what a branch of 6 tokens reads in a full pool")


@check("05.5", "each goes on alone", look="who holds the block in which the prefix ends?")
def _(mine):
    for num_tokens in (4, 5, 6, 8, 11):
        table, _, memory = conversation(4)
        branch = branched(mine, table, num_tokens)
        for other, letter in ((branch, "B"), (table, "A")):
            for _ in range(5):
                other.grow(1)
                memory.write(other, other.num_tokens - 1, letter)
        what = f"branched off after {num_tokens} of 11 tokens, then 5 more each"
        equal(
            memory.read(branch, num_tokens + 5),
            "abcdefghijk"[:num_tokens] + "BBBBB",
            f"{what}: what the branch reads",
        )
        found = memory.read(table, 16)
        if "B" in found:
            raise Wrong(
                f"{what}: the table reads {found}, expected abcdefghijkAAAAA",
                "the branch has written into a block that the table reads, and it was not copied",
                "does the pool know of two holders?",
            )
        equal(found, "abcdefghijkAAAAA", f"{what}: what the table reads")


@check("05.5", "the conversation ends, the branch goes on", look="every block needs its holder")
def _(mine):
    for num_tokens in (5, 8):
        table, pool, memory = conversation(4)
        branch = branched(mine, table, num_tokens)
        table.release()
        stranger = minikv.BlockTable(pool, 4)
        stranger.grow(4 * pool.num_free)
        memory.fill(stranger, "x" * stranger.num_tokens)
        what = f"a branch of {num_tokens} tokens when the table has ended and others have come"
        found = memory.read(branch, num_tokens)
        if "x" in found:
            raise Wrong(
                f"{what}: it reads {found}",
                "a block of the branch was freed with the table, and somebody else has it now",
                "every block of the branch gains a holder",
            )
        equal(found, "abcdefghijk"[:num_tokens], f"{what}: it reads")
        stranger.release()
        branch.release()
        leaked = 3 - up(num_tokens, 4)
        equal(
            pool.num_free,
            pool.num_blocks,
            "free blocks when all have ended",
            Suspect(pool.num_blocks - leaked, *LEFT_BEHIND),
        )


@check("05.5", "no tokens, all tokens, too many", look="the first lines of `copy_prefix`")
def _(mine):
    check_branch(mine, 0, 4)
    check_branch(mine, 11, 4)
    table, pool, _ = conversation(4)
    for num_tokens in (12, -1):
        raises(
            ValueError,
            lambda n=num_tokens: getattr(mine.copy_prefix(table, n), "block_ids", None),
            f"the first {num_tokens} of 11 tokens",
            "nothing asks whether the table has so many tokens",
            "the first lines of `copy_prefix`",
        )
    equal(counts_of(pool, table.block_ids), [1, 1, 1], "counts after it was refused")


def branch_on_tinypy(mine, lm, cut: int, block_size: int = 4) -> tuple[list[int], list[int]]:
    """A conversation of tinypy branches off after `cut` tokens: (its tokens, the oracle's)."""
    prompt = lm.encode(PROMPT)
    engine = minikv.Engine(
        lm, minikv.EngineConfig(num_blocks=64, block_size=block_size, prefix_cache=False)
    )
    first = Request(-1, prompt, minikv.SamplingParams()).sequences[0]
    first.table = mine.BlockTable(engine.pool, block_size)
    go_on(engine, first, 10)
    tokens = first.token_ids[:cut] + lm.encode("return")
    other = Request(-2, tokens, minikv.SamplingParams()).sequences[0]
    other.table, other.num_computed = branched(mine, first.table, cut), cut
    return go_on(engine, other, 8), lm.generate_naively(tokens, 8)


@check(
    "05.5",
    "tinypy: a branch writes what it would write alone",
    cause="the branch attends to a block that does not hold its tokens",
    look="the checks above: which of them fails?",
)
def _(mine):
    lm = tinypy()
    for cut in (20, 24, 22, 19):
        found, expected = branch_on_tinypy(mine, lm, cut)
        if found != expected:
            raise Wrong(
                f"branched off after {cut} tokens, blocks of 4, it goes on with "
                f"{lm.decode(found)!r}, expected {lm.decode(expected)!r}"
            )


# ── 05.6 Right for two ────────────────────────────────────────────────────────


def make_copies(mine, blocks, copies, what: str) -> None:
    try:
        mine.copy_blocks(blocks, list(copies))
    except Exception as error:
        message = f"{what}, copies {list(copies)}: {type(error).__name__} ({error})"
        if not copies:
            raise Wrong(
                message,
                "most steps ask for no copy: the list is empty",
                "what does your code do with an empty list?",
            ) from error
        if re.search("shape mismatch|must match", str(error)):
            raise Wrong(
                message,
                "`blocks[:, source]` has no dimension for the targets: `blocks[:, [source]]` "
                "keeps one",
                "the shapes on both sides of `=`, or one target after the other",
            ) from error
        raise


def check_copies(mine, copies, what: str, shape=(4, 6, 4, 2, 2, 3)) -> None:
    """One block after the other by hand, and then the reader's way."""
    before = torch.randn(shape, generator=torch.Generator().manual_seed(len(copies)))
    expected = before.clone()
    for source, target in copies:
        expected[:, target] = expected[:, source]
    found = before.clone()
    make_copies(mine, found, copies, what)
    wrong = [b for b in range(shape[1]) if not torch.equal(found[:, b], expected[:, b])]
    if not wrong:
        return
    targets, sources = {t for _, t in copies}, {s for s, _ in copies}
    untouched = [b for b in wrong if torch.equal(found[:, b], before[:, b])]
    turned = before.clone()
    for source, target in copies:
        turned[:, source] = turned[:, target]
    backwards, by_number = before.clone(), before.clone()
    for source, target in reversed(copies):
        backwards[:, target] = backwards[:, source]
    for source, target in sorted(copies):
        by_number[:, target] = by_number[:, source]
    message = f"{what}, copies {copies}: blocks {wrong} do not hold what they should"
    if torch.equal(found, before):
        cause, look = "nothing is copied", "what is written to `blocks`, in place?"
    elif torch.equal(found, turned):
        cause, look = (
            "copied the wrong way round: over the block that others still read",
            "(from_block, to_block)",
        )
    elif list(copies) != sorted(copies) and torch.equal(found, by_number):
        cause, look = (
            "the copies are made in the order of the blocks' numbers, and a source was overwritten "
            "before it was read",
            "the order of `copies`",
        )
    elif len(copies) > 1 and torch.equal(found, backwards):
        cause, look = (
            "the copies are made in another order than they were asked for, and a source was "
            "overwritten before it was read",
            "the order of `copies`",
        )
    elif untouched == wrong and set(wrong) <= targets:
        cause, look = (
            f"of several targets of one source not all are filled: {wrong} are as they were",
            "how many targets can one source have, and how many do you keep?",
        )
    elif set(wrong) & sources - targets:
        cause, look = "a block that is only read was changed", "which index is written to?"
    elif torch.equal(found[0], expected[0]) and shape[0] > 1:
        cause, look = (
            "only the first layer is copied: all others read what was there before",
            "the first dimension of `blocks`",
        )
    elif torch.equal(found[:, :, :, 0], expected[:, :, :, 0]):
        cause, look = "keys are copied and values are not", "the fourth dimension of `blocks`"
    elif torch.equal(found[:, :, 0], expected[:, :, 0]):
        cause, look = "not all slots of a block are copied", "the third dimension of `blocks`"
    else:
        cause, look = "other blocks are copied than were asked for", "which dimension is which?"
    raise Wrong(message, cause, look)


@check("05.6", "one copy, or none", look="what is written to, and what is read")
def _(mine):
    check_copies(mine, [(1, 2)], "two samples")
    check_copies(mine, [], "a step without copies")
    check_copies(mine, [(4, 0)], "two samples")


@check("05.6", "one source, several targets", look="what is kept of the copies of one source")
def _(mine):
    check_copies(mine, [(1, 2), (1, 3), (1, 4)], "four samples")
    check_copies(mine, [(5, 0), (5, 3)], "three samples")


@check("05.6", "several requests in one step", look="every pair of `copies`")
def _(mine):
    check_copies(mine, [(1, 2), (0, 4)], "two requests with two samples each")
    check_copies(mine, [(1, 2), (0, 4), (1, 5), (0, 3)], "two requests with three samples each")


@check("05.6", "all layers, all slots, K and V", look="the dimensions of `blocks`")
def _(mine):
    for shape in ((3, 6, 4, 2, 1, 2), (7, 6, 1, 2, 1, 2), (5, 6, 16, 2, 2, 8), (6, 6, 3, 2, 1, 1)):
        check_copies(mine, [(3, 5), (3, 0)], f"three samples, memory of shape {shape}", shape)


@check("05.6", "a source that is taken over later in the step", look="the order of `copies`")
def _(mine):
    # The last holder of block 1 was preempted after the first copy was planned, and block 1 given
    # to another request: it is read first, and written to later.
    check_copies(mine, [(1, 2), (5, 1)], "a block that changes hands within the step")
    check_copies(mine, [(5, 4), (1, 5)], "a block that changes hands within the step")
    check_copies(
        mine, [(1, 2), (1, 3), (5, 1), (5, 4)], "a block that changes hands within the step"
    )


@check(
    "05.6",
    "tinypy: four samples write what each would write alone",
    cause="some sample reads a block that was never filled",
    look="the checks above: which of them fails?",
)
def _(mine):
    lm = tinypy()
    prompt = lm.encode(PROMPT)
    for n in (2, 4):
        params = minikv.SamplingParams(n=n, max_tokens=6, temperature=0.8, seed=1, ignore_eos=True)
        found, _ = sample(mine, lm, prompt, params)
        for index, tokens in enumerate(found):
            expected = sample_naively(lm, prompt, params, index)
            if tokens != expected:
                raise Wrong(
                    f"{n} samples, blocks of 4: sample {index} goes on with {lm.decode(tokens)!r}, "
                    f"expected {lm.decode(expected)!r}"
                )


# ── The reader's parts in the engine ──────────────────────────────────────────


def engine_on(mine, lm, block_size: int = 4) -> minikv.Engine:
    """An engine on the reader's tables, whose copies the reader's function makes."""
    config = minikv.EngineConfig(num_blocks=128, block_size=block_size, prefix_cache=False)
    engine = minikv.Engine(lm, config, block_table=mine.BlockTable)
    engine.store.copy_to = lambda other, pairs: make_copies(mine, other.blocks, pairs, "tinypy")
    return engine


class Watch:
    """Keeps the most blocks that an engine holds while the model runs."""

    def __init__(self, engine: minikv.Engine):
        self.engine, self.most, self._forward = engine, 0, engine.runner.forward
        engine.runner.forward = self.forward

    def forward(self, *arguments):
        self.most = max(self.most, self.engine.stats().blocks_used)
        return self._forward(*arguments)


def sample(mine, lm, prompt: list[int], params) -> tuple[list[list[int]], int]:
    """Tokens of all samples of one request, and the most blocks held at any time."""
    engine = engine_on(mine, lm)
    watch = Watch(engine)
    engine.add_request(prompt, params)
    while engine.has_unfinished:
        [output] = engine.step()
        engine.check()
    return [one.token_ids for one in output.samples], watch.most


def search(engine: minikv.Engine, prompt: list[int], width: int, num_tokens: int, next_beams):
    """(beams, the most blocks held) of a beam search that forks and releases by `next_beams`."""
    watch, original = Watch(engine), beam.next_beams
    beam.next_beams = next_beams
    try:
        return engine.beam_search(prompt, width, num_tokens), watch.most
    finally:
        beam.next_beams = original


@runs_model("05.1", "05.2", "05.4", "05.5", "05.6")
def _(mine, lm: minikv.LanguageModel) -> str:
    """tinypy on the reader's table, beams, branch and copies, in blocks of 4."""
    prompt, width = lm.encode(PROMPT), SAMPLES.n
    total = len(prompt) + SAMPLES.max_tokens - 1  # the last token is never stored
    tokens, held = sample(mine, lm, prompt, SAMPLES)
    for index, one in enumerate(tokens):
        expected = sample_naively(lm, prompt, SAMPLES, index)
        if one != expected:
            raise AssertionError(f"sample {index}: {one}, the oracle: {expected}")
    found, most = search(engine_on(mine, lm), prompt, width, SAMPLES.max_tokens, mine.next_beams)
    for place, one in enumerate(found):
        naive = naive_score(lm, prompt, one.token_ids)
        if abs(naive - one.score) > 1e-3:
            raise AssertionError(f"beam {place} has score {one.score}, the oracle: {naive}")
    expected, _ = search(minikv.Engine(lm), prompt, width, SAMPLES.max_tokens, beam.next_beams)
    if [one.token_ids for one in found] != [one.token_ids for one in expected]:
        raise AssertionError("the beams are not the reference's")
    branch, alone = branch_on_tinypy(mine, lm, 22)
    if branch != alone:
        raise AssertionError(f"a branch after 22 tokens: {branch}, the oracle: {alone}")
    copied = width * up(total, 4)
    return (
        f"{width} samples of {SAMPLES.max_tokens} tokens, same tokens as the oracle, {held} blocks "
        f"({copied} without sharing); {width} beams of {SAMPLES.max_tokens} tokens, the oracle's "
        f"scores, {most} blocks ({copied} without sharing); a branch in the middle, same tokens "
        "as the oracle."
    )


def naive_score(lm: minikv.LanguageModel, prompt: list[int], tokens: list[int]) -> float:
    """Log probability of `tokens` after the prompt, by naive attention, a token."""
    log_probs = lm.logits(prompt + tokens).log_softmax(-1)[len(prompt) - 1 : -1]
    return float(log_probs[torch.arange(len(tokens)), tokens].mean())
