"""Chapter 16: the reference of an exercise that the engine does not have."""

from minikv.blocks import blocks_for
from minikv.groups.blocks import first_seen


def held_in_chunks(num_tokens: int, chunk: int, window: int, block_size: int) -> list[int]:
    """How many blocks each step of a prefill needs in the layers with a window.

    Each step computes `chunk` tokens, the last one what is left. It writes K and V of its own
    tokens, and its queries read what their window shows them. Blocks that no query of this step and
    no later one looks at are given back before it.

    Worked example, 16 tokens in chunks of 8, window 6, blocks of 4: the first step needs blocks 0
    and 1. The first query of the second one is at 8 and sees 3 to 8, so it needs blocks 0 to 3:
    [2, 4].
    """
    held = []
    for start in range(0, num_tokens, chunk):
        end = min(start + chunk, num_tokens)
        held.append(blocks_for(end, block_size) - first_seen(start, window, block_size))
    return held
