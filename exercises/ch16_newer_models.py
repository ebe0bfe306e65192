"""Caches of newer models: windows, hits for several groups of layers, latents, retention.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("16.1") in the notebook, or in a terminal: python -m minikv check 16.1
"""

from minikv.blocks import blocks_for


# ── 16.1 Behind the window ────────────────────────────────────────────────────────
def first_seen(position: int, window: int, block_size: int) -> int:
    """The first block that a query at `position`, or any later one, looks at through a window.

    A query sees its own token and the `window - 1` before it. All blocks before the answer are dead
    for the layers with this window; the sequence may still need them for others.

    Worked example, window 6, blocks of 4: a query at 13 sees 8 to 13, so block 2 is the first; one
    at 12 sees 7, too, and block 1.
    """
    raise NotImplementedError("Exercise 16.1: first_seen")


# ── 16.1 Behind the window ────────────────────────────────────────────────────────
def held_in_chunks(num_tokens: int, chunk: int, window: int, block_size: int) -> list[int]:
    """How many blocks each step of a prefill needs in the layers with a window.

    Each step computes `chunk` tokens, the last one what is left. It writes K and V of its own
    tokens, and its queries read what their window shows them. Blocks that no query of this step and
    no later one looks at are given back before it.

    Worked example, 16 tokens in chunks of 8, window 6, blocks of 4: the first step needs blocks 0
    and 1. The first query of the second one is at 8 and sees 3 to 8, so it needs blocks 0 to 3:
    [2, 4].
    """
    raise NotImplementedError("Exercise 16.1: held_in_chunks")
