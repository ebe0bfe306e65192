"""What others have published: the shapes of models, and figures about their KV caches."""

from typing import NamedTuple

# By hub id, what each config.json says of attention, and for one model of its weights. Where a
# number of KV heads or a head dim is missing here, it is missing there.
CONFIGS: dict[str, dict] = {
    "facebook/opt-13b": {
        "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
    },
    "meta-llama/Llama-2-7b-hf": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "meta-llama/Llama-2-70b-hf": {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "meta-llama/Meta-Llama-3-70B": {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "meta-llama/Llama-3.1-8B": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.2-1B": {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
        "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.2-3B": {
        "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "head_dim": 128,
    },
    "meta-llama/Llama-3.2-11B-Vision": {
        "text_config": {
            "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
            "num_key_value_heads": 8, "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
        },
    },
    "mistralai/Mistral-7B-v0.1": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen/Qwen2.5-7B": {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "Qwen/Qwen3.5-35B-A3B": {
        "text_config": {
            "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4,
        },
    },
    "google/gemma-2b": {
        "hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 256,
    },
    "deepseek-ai/DeepSeek-V2": {
        "hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128,
        "num_key_value_heads": 128, "v_head_dim": 128, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
    "deepseek-ai/DeepSeek-V3": {
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "v_head_dim": 128, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
}  # fmt: skip


class Claim(NamedTuple):
    """A published figure. Some are wrong."""

    words: str
    model: str  # hub id, as in CONFIGS
    said: float  # bytes (KB: 2^10, MB: 2^20, GB: 10^9), or tokens per second


BANDWIDTH = 1_008e9  # bytes per second: a large consumer GPU's, as in the claim about speed

CLAIMS: dict[str, Claim] = {
    "7B 4K": Claim("Llama-2-7B at 4,096 tokens takes about 2 GB", "meta-llama/Llama-2-7b-hf", 2e9),
    "70B 8K": Claim(
        "Llama-3-70B at 8K in fp16 takes 4 GB with GQA, and 16 GB with MHA",
        "meta-llama/Meta-Llama-3-70B",
        4e9,
    ),
    "1B speed": Claim(
        "1,990 tokens per second with Llama-3.2-1B on one consumer GPU of 1,008 GB/s",
        "meta-llama/Llama-3.2-1B",
        1990,
    ),
}

# What may have gone wrong in a published figure.
MISTAKES = {
    "query heads": "K and V are counted for every query head",
    "groups of four": "four query heads share a KV head, whatever the config says",
    "another depth": "64 layers, and groups of four, whatever the config says",
    "hidden size": "each head is as large as the whole hidden size",
    "only keys": "keys are counted, and values are not",
    "fp32": "a number takes four bytes, not two",
    "a batch": "these are the tokens of several sequences, and it is not said of how many",
}
