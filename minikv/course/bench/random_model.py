"""A model of any size with random weights: what they are does not change how long a step takes."""

import torch

import minikv
from minikv.model import Transformer

HEAD_DIM = 64


def random_model(
    *, vocab_size: int, hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int,
    num_kv_heads: int, max_context: int, device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[minikv.LanguageModel, int]:  # fmt: skip
    """A Llama of this shape, embeddings tied, and how many bytes its weights are."""
    config = minikv.ModelConfig(
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, HEAD_DIM,
        max_context, rms_norm_eps=1e-6, tie_embeddings=True, attention_bias=False,
        output_bias=False, mlp_bias=False, qk_norm=False, rope_theta=10_000.0, rope_scaling=None,
        windows=(None,) * num_layers, eos_ids=(),
    )  # fmt: skip
    hidden, inner = (hidden_size,), intermediate_size
    heads, kv_heads = num_heads * HEAD_DIM, num_kv_heads * HEAD_DIM
    of_a_layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads, *hidden), "self_attn.k_proj": (kv_heads, *hidden),
        "self_attn.v_proj": (kv_heads, *hidden), "self_attn.o_proj": (*hidden, heads),
        "mlp.gate_proj": (inner, *hidden), "mlp.up_proj": (inner, *hidden),
        "mlp.down_proj": (*hidden, inner),
        "input_layernorm": hidden, "post_attention_layernorm": hidden,
    }  # fmt: skip
    shapes = {"model.norm": hidden, "model.embed_tokens": (vocab_size, *hidden)}
    for i in range(num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_a_layer.items()}
    draw = torch.Generator(device).manual_seed(0)
    weights = {
        f"{name}.weight": 0.02 * torch.randn(shape, generator=draw, device=device, dtype=dtype)
        for name, shape in shapes.items()
    }
    transformer = Transformer(config, weights, torch.device(device), dtype)
    size = sum(weight.nbytes for weight in weights.values())
    return minikv.LanguageModel("random", transformer, None), size
