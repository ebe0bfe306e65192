"""Caches of newer models: windows, hits for several groups of layers, latents, retention.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("16.1") in the notebook, or in a terminal: python -m minikv check 16.1
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

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


# ── 16.2 The longest hit for all layers ───────────────────────────────────────────
def longest_valid(has_windows: Seq[bool], window: int, block_size: int) -> int:
    """How many blocks of a cached prefix a sequence can begin with: the most that are valid for all
    layers.

    Layers that see everything have K and V of each block. `has_windows[i]` says whether the layers
    with a window still have theirs of block i. They need them only where a query after the prefix
    looks back, the first of which stands right behind it.

    Worked example, window 6, blocks of 4, + has them: of + - + + all 4 blocks are valid, because
    the query at 16 sees 11 to 16, in blocks 2 and 3. Of + - - + only 1 is: a query at 16 would miss
    block 2, one at 12 or 8 the blocks before it; one at 4 sees block 0.
    """
    raise NotImplementedError("Exercise 16.2: longest_valid")


# ── 16.3 What six models keep ─────────────────────────────────────────────────────
def cached_bytes(config: Mapping[str, Any], num_tokens: int) -> int:
    """The bytes that a sequence of `num_tokens` tokens keeps, with two bytes per number.

    config: fields of a model's config file, as in `published.py` of this chapter. `layer_types`
    names the kind of each layer:

    "full_attention"     K and V of all tokens, `num_key_value_heads` heads of `head_dim` each
    "sliding_attention"  the same, but only of the last `sliding_window` tokens
    "latent_attention"   `kv_lora_rank` + `qk_rope_head_dim` numbers per token, for K and V together
    "linear_attention"   a state: `linear_num_value_heads` matrices of `linear_key_head_dim` by
                         `linear_value_head_dim` numbers, however many tokens there are

    Whole blocks are not counted, only what tokens need. A linear layer also keeps the last tokens
    of a convolution, 5 % of its state in the model below; leave it out.

    Worked example, two KV heads of 4 numbers, a full layer and one with a window of 3, 10 tokens:
    2 * 2 * 4 numbers per token, for 10 + 3 tokens, 2 bytes each: 416.
    """
    raise NotImplementedError("Exercise 16.3: cached_bytes")
