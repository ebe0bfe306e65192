"""What six published models say of their layers, and what each layer keeps."""

# By hub id: https://huggingface.co/<id>/blob/main/config.json. `layer_types` is written out where
# the file has a pattern (every sixth, every fourth layer) or where all layers are alike, and
# `head_dim` where the file leaves it to the model's class in transformers. "latent_attention" is
# this course's word: DeepSeek's file only has the two sizes.
MODELS: dict[str, dict] = {
    "meta-llama/Llama-3.1-8B": {
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "layer_types": ["full_attention"] * 32,
    },
    "mistralai/Mistral-7B-v0.1": {
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "sliding_window": 4096, "layer_types": ["sliding_attention"] * 32,
    },
    "google/gemma-3-12b-it": {
        "hidden_size": 3840, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    },
    "openai/gpt-oss-20b": {
        "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "deepseek-ai/DeepSeek-V3": {
        "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "layer_types": ["latent_attention"] * 61,
    },
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {
        "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    },
}  # fmt: skip
