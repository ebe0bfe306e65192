"""What four published models keep in their layers."""

from typing import NamedTuple


class Layers(NamedTuple):
    """Of one model. A linear layer keeps its matrices in float32, four bytes a number, and the last
    3 inputs of each channel of its convolution. These, and what attention keeps, have two bytes."""

    linear: int  # layers with a state
    matrices: int  # of each of them
    rows: int  # of a matrix
    columns: int
    channels: int  # of the convolution
    attention: int  # layers that attend
    cached: int  # numbers that each of them keeps of a token: K and V, or a latent


# From https://huggingface.co/<id>/blob/main/config.json of
#
# Qwen/Qwen3-Next-80B-A3B-Instruct and Qwen/Qwen3.5-4B (its `text_config`)
#   matrices    linear_num_value_heads, each linear_key_head_dim by linear_value_head_dim
#   channels    2 linear_num_key_heads * linear_key_head_dim, and those of the values
#   cached      2 num_key_value_heads * head_dim, in every fourth layer (full_attention_interval)
# moonshotai/Kimi-Linear-48B-A3B-Instruct
#   matrices    num_heads of linear_attn_config, each head_dim by head_dim, in its kda_layers
#   channels    3 num_heads * head_dim: queries, keys and values
#   cached      kv_lora_rank + qk_rope_head_dim, in its full_attn_layers: a latent
# nvidia/Nemotron-H-8B-Base-8K
#   matrices    mamba_num_heads, each mamba_head_dim by ssm_state_size, for each M in
#               hybrid_override_pattern
#   channels    mamba_num_heads * mamba_head_dim + 2 n_groups * ssm_state_size
#   cached      2 num_key_value_heads * head_dim, for each * in the pattern
MODELS = {
    "Qwen3-Next": Layers(36, 32, 128, 128, 2 * 16 * 128 + 32 * 128, 12, 2 * 2 * 256),
    "Qwen3.5 4B": Layers(24, 32, 128, 128, 2 * 16 * 128 + 32 * 128, 8, 2 * 4 * 256),
    "Kimi Linear": Layers(20, 32, 128, 128, 3 * 32 * 128, 7, 512 + 64),
    "Nemotron-H 8B": Layers(24, 128, 64, 128, 128 * 64 + 2 * 8 * 128, 4, 2 * 8 * 128),
}
