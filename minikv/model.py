"""The transformer, run over a flat batch of tokens.

    token_ids (T,), positions (T,)  ->  hidden (T, hidden_size)  ->  logits (S, vocab_size)

The model does not know how keys and values are kept. It hands q, k and v of the
new tokens to `attend(layer, q, k, v)` and takes back the attention's output; naive
attention, a growing cache and paged blocks are three ways to write that function.
That is why one model serves every chapter, and why their results can be compared.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minikv.attention import naive_attention
from minikv.config import CheckpointError, ModelConfig

# attend(layer, q (T, H, D), k (T, K, D), v (T, K, D)) -> (T, H, D)
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Layer:
    """Weights of one layer; q, k, v are one matrix, so are gate and up: fewer, larger products."""

    norm_1: torch.Tensor  # (hidden,)
    qkv: torch.Tensor  # ((H + 2 K) * D, hidden)
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # (D,)
    k_norm: torch.Tensor | None  # (D,)
    out: torch.Tensor  # (hidden, H * D)
    out_bias: torch.Tensor | None
    norm_2: torch.Tensor  # (hidden,)
    gate_up: torch.Tensor  # (2 * intermediate, hidden)
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # (hidden, intermediate)
    down_bias: torch.Tensor | None


class Transformer:
    """Llama, Mistral, Qwen2 and Qwen3 for inference. Weights are shared by reference."""

    def __init__(
        self,
        config: ModelConfig,
        state: dict[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ):
        """`state` has the names of a `transformers` checkpoint. Raises CheckpointError
        when a tensor is missing or has another shape than `config` says."""
        self.config, self.device, self.dtype = config, device, dtype
        c = config

        def take(name: str, *shape: int) -> torch.Tensor:
            if name not in state:
                raise CheckpointError(f"weights: {name} is missing")
            if tuple(state[name].shape) != shape:
                raise CheckpointError(
                    f"weights: {name} has shape {tuple(state[name].shape)}, config.json says {shape}"
                )
            return state[name].to(device, dtype).contiguous()

        def join(prefix: str, names: dict[str, int], *rest: int) -> torch.Tensor:
            return torch.cat([take(prefix.format(n), rows, *rest) for n, rows in names.items()])

        qkv = {"q": c.num_heads * c.head_dim}
        qkv |= dict.fromkeys(("k", "v"), c.num_kv_heads * c.head_dim)
        gate_up = dict.fromkeys(("gate", "up"), c.intermediate_size)
        self.embedding = take("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        self.layers = []
        for i in range(c.num_layers):
            at = f"model.layers.{i}."
            attn, mlp = at + "self_attn.{}_proj.", at + "mlp.{}_proj."
            self.layers.append(
                Layer(
                    norm_1=take(at + "input_layernorm.weight", c.hidden_size),
                    qkv=join(attn + "weight", qkv, c.hidden_size),
                    qkv_bias=join(attn + "bias", qkv) if c.attention_bias else None,
                    q_norm=take(at + "self_attn.q_norm.weight", c.head_dim) if c.qk_norm else None,
                    k_norm=take(at + "self_attn.k_norm.weight", c.head_dim) if c.qk_norm else None,
                    out=take(attn.format("o") + "weight", c.hidden_size, c.num_heads * c.head_dim),
                    out_bias=take(attn.format("o") + "bias", c.hidden_size)
                    if c.output_bias
                    else None,
                    norm_2=take(at + "post_attention_layernorm.weight", c.hidden_size),
                    gate_up=join(mlp + "weight", gate_up, c.hidden_size),
                    gate_up_bias=join(mlp + "bias", gate_up) if c.mlp_bias else None,
                    down=take(mlp.format("down") + "weight", c.hidden_size, c.intermediate_size),
                    down_bias=take(mlp.format("down") + "bias", c.hidden_size)
                    if c.mlp_bias
                    else None,
                )
            )
        self.norm = take("model.norm.weight", c.hidden_size)
        self.head = (
            self.embedding
            if c.tie_embeddings
            else take("lm_head.weight", c.vocab_size, c.hidden_size)
        )
        angles = torch.arange(c.max_context)[:, None] * c.inverse_frequencies()  # (P, D / 2)
        angles = torch.cat([angles, angles], -1)
        sign = torch.ones(c.head_dim)
        sign[: c.head_dim // 2] = -1  # the first half takes -sin times the second
        self.cos = angles.cos().to(device, dtype)  # (P, D)
        self.sin = (angles.sin() * sign).to(device, dtype)  # (P, D)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """token_ids (T,) int64, positions (T,) int64 -> hidden (T, hidden_size), after the last norm."""
        c = self.config
        cos, sin = self.cos[positions, None], self.sin[positions, None]  # (T, 1, D)
        x = self.embedding[token_ids]  # (T, hidden)
        for i, layer in enumerate(self.layers):
            qkv = F.linear(self._norm(x, layer.norm_1), layer.qkv, layer.qkv_bias)
            qkv = qkv.view(len(x), -1, c.head_dim)  # (T, H + 2 K, D)
            qk = qkv[:, : c.num_heads + c.num_kv_heads]  # (T, H + K, D)
            if layer.q_norm is not None:
                q, k = qk.tensor_split([c.num_heads], dim=1)
                qk = torch.cat([self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)], 1)
            qk = rotate(qk, cos, sin)
            q, k = qk.tensor_split([c.num_heads], dim=1)  # (T, H, D), (T, K, D)
            v = qkv[:, c.num_heads + c.num_kv_heads :]  # (T, K, D)
            x = x + F.linear(attend(i, q, k, v).flatten(1), layer.out, layer.out_bias)
            gate_up = F.linear(self._norm(x, layer.norm_2), layer.gate_up, layer.gate_up_bias)
            gate, up = gate_up.chunk(2, -1)  # (T, intermediate) each
            x = x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        return self._norm(x, self.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (S, hidden_size) -> (S, vocab_size) float32."""
        return F.linear(hidden, self.head).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def attend_naively(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """The `attend` that keeps nothing: the batch is one whole sequence."""
        return naive_attention(q, k, v, self.config.windows[layer])


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE (Su et al., 2021): turn channel pairs (i, i + D / 2) by the position's angle.

    x (T, heads, D); cos, sin (T, 1, D), the first half of sin negated. Adding the
    angles of two turns is turning by their sum, so q . k depends on distance alone.
    """
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], -1)
    return torch.addcmul(x * cos, swapped, sin)
