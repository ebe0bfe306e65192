"""Chapter 16 as programs: what is dead, what is found, what is kept."""

import random

from minikv.course.judge.programs import LINES_ABOVE
from minikv.course.judge.scenarios import Group, Log, scenario

# ── 16.1 Behind the window ────────────────────────────────────────────────────

# A program is (position, window, block size), or (tokens, chunk, window, block size).


def first_blocks(mine, program, log: Log) -> None:
    position, window, size = program
    text = f"a query at {position}, window {window}, blocks of {size}"
    log.call(text, mine.first_seen, position, window, size)


def chunks(mine, program, log: Log) -> None:
    tokens, chunk, window, size = program
    text = f"{tokens} tokens in chunks of {chunk}, window {window}, blocks of {size}"
    held = log.call(text, mine.held_in_chunks, tokens, chunk, window, size, see=False)
    if log.events[-1].error is None:
        log("", {"blocks of each step:": list(held)})


scenario(
    "16.1",
    first_blocks,
    Group(
        "one token per block",
        [(position, 3, 1) for position in (2, 3, 4, 9)],
        look="how many tokens does a window of 3 show, the query's own included?",
    ),
    Group(
        "a block stays while one of its tokens is seen",
        [(position, 6, 4) for position in (5, 8, 9, 12, 13, 16, 17)],
        look="the earliest token that the query sees: in which block is it?",
    ),
    Group(
        "near the beginning",
        [(0, 6, 4), (3, 6, 4), (4, 6, 4), (0, 1, 1), (7, 100, 16)],
        look="what does a query see if there are fewer tokens than a window?",
    ),
    Group(
        "windows and blocks of any size",
        [(p, w, s) for w in (1, 2, 7, 16, 64) for s in (1, 3, 16) for p in (w, 2 * w, 40 * w + 5)],
        look="the window is in tokens, and need not be whole blocks",
    ),
)


def random_prefill(seed: int) -> tuple[int, int, int, int]:
    draw = random.Random(seed)
    return draw.randint(1, 90), draw.randint(1, 40), draw.randint(1, 30), draw.choice((1, 3, 4, 16))


scenario(
    "16.1",
    chunks,
    Group(
        "one token per step",
        [(6, 1, 3, 1), (12, 1, 4, 4), (9, 1, 6, 4)],
        look="a decode step: the window's blocks, and the one that is written",
    ),
    Group(
        "chunks longer than the window",
        [(16, 8, 6, 4), (24, 12, 4, 4), (10, 5, 2, 1), (64, 32, 8, 16)],
        look="which query of the chunk looks back furthest?",
    ),
    Group(
        "chunks shorter than the window",
        [(16, 4, 9, 4), (20, 2, 7, 4), (30, 3, 10, 1)],
        look="what was written before the chunk, and is still seen?",
    ),
    Group(
        "what is left at the end",
        [(5, 8, 6, 4), (17, 8, 6, 4), (13, 4, 5, 3)],
        look="the last chunk may be shorter",
    ),
    Group("any prefill", [random_prefill(seed) for seed in range(40)], look=LINES_ABOVE),
)
