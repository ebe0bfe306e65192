"""Chapter 16: references of exercises that the engine does not have."""

from collections.abc import Mapping
from typing import Any

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
    numbers = 0
    for kind in config["layer_types"]:
        if kind == "linear_attention":
            matrix = config["linear_key_head_dim"] * config["linear_value_head_dim"]
            numbers += config["linear_num_value_heads"] * matrix
        elif kind == "latent_attention":
            numbers += num_tokens * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
        else:
            seen = num_tokens
            if kind == "sliding_attention":
                seen = min(num_tokens, config["sliding_window"])
            numbers += 2 * seen * config["num_key_value_heads"] * config["head_dim"]
    return 2 * numbers
