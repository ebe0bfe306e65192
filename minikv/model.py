"""The transformer, run over a flat batch of tokens.

    token_ids (T,), positions (T,)  ->  hidden (T, hidden_size)  ->  logits (S, vocab_size)

The model does not know how keys and values are kept. It hands q, k and v of the
new tokens to `attend(layer, q, k, v)` and takes back the attention's output; naive
attention, a growing cache and paged blocks are three ways to write that function.
That is why one model serves every chapter, and why their results can be compared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minikv.attention import naive_attention
from minikv.config import ModelConfig
from minikv.errors import CheckpointError
from minikv.fast import FastLinear, FastRMSNorm

# attend(layer, q (T, H, D), k (T, K, D), v (T, K, D)) -> (T, H, D)
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Weights = Mapping[str, torch.Tensor]  # by the names of a `transformers` checkpoint
Op = Callable[[torch.Tensor], torch.Tensor]  # a norm or a matrix product, with its weights


class Linear:
    """y = x W^T + b."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        """weight (outputs, inputs), bias (outputs,) or None."""
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, inputs) -> (T, outputs)."""
        return F.linear(x, self.weight, self.bias)


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich, 2019), over the last dimension.

    Computed in float32, whatever comes in.
    """

    def __init__(self, weight: torch.Tensor, eps: float):
        """weight (D,)."""
        self.weight, self.eps = weight.float(), eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., D) -> (..., D), of the same dtype."""
        wide = x.float()
        mean_square = wide.pow(2).mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + self.eps) * self.weight).to(x.dtype)


@dataclass(slots=True)
class Layer:
    """One layer. q, k, v are one matrix, so are gate and up: fewer, larger products."""

    norm_1: Op
    qkv: Op  # hidden -> (H + 2 K) * D
    q_norm: Op | None  # over the head dim
    k_norm: Op | None
    out: Op  # H * D -> hidden
    norm_2: Op
    gate_up: Op  # hidden -> 2 * intermediate
    down: Op  # intermediate -> hidden


class Unread:
    """The weights of a checkpoint that no part of the model has taken yet."""

    def __init__(
        self, config: ModelConfig, state: Weights, device: torch.device, dtype: torch.dtype
    ):
        self.config, self.device, self.dtype = config, device, dtype
        self.left, self.total = dict(state), len(state)
        on_cpu = device.type == "cpu" and dtype == torch.float32
        self.make_norm = FastRMSNorm if on_cpu else RMSNorm
        self.make_linear = FastLinear if on_cpu and FastLinear.pays(config.hidden_size) else Linear

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self.left:
            raise CheckpointError(f"weights: {name} is missing")
        tensor = self.left.pop(name)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
            found = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else tensor
            raise CheckpointError(f"weights: {name} is {found}, config.json says {shape}")
        return tensor.to(self.device, self.dtype)

    def norm(self, name: str, size: int) -> Op:
        weight = self.take(name, size).float() + self.config.norm_offset
        return self.make_norm(weight, self.config.rms_norm_eps)

    def linear(self, prefix: str, outputs: dict[str, int], inputs: int, has_bias: bool) -> Op:
        """One product from the weights `prefix` with each name in it, in a row."""
        names = [(prefix.format(name), rows) for name, rows in outputs.items()]
        weight = torch.cat([self.take(name + "weight", rows, inputs) for name, rows in names])
        if not has_bias:
            return self.make_linear(weight)
        bias = torch.cat([self.take(name + "bias", rows) for name, rows in names])
        return self.make_linear(weight, bias)

    def mlp(self, at: str) -> dict[str, Op]:
        """What every layer has behind its first half."""
        c, name = self.config, at + "mlp.{}_proj."
        sizes = {"gate": c.intermediate_size, "up": c.intermediate_size}
        return dict(
            norm_2=self.norm(at + "post_attention_layernorm.weight", c.hidden_size),
            gate_up=self.linear(name, sizes, c.hidden_size, c.mlp_bias),
            down=self.linear(name, {"down": c.hidden_size}, c.intermediate_size, c.mlp_bias),
        )

    def require_none(self) -> None:
        """Raises CheckpointError if there is more than the model has parts for."""
        # Old checkpoints have a table of angles, which is computed here.
        if unread := [name for name in self.left if "rotary_emb.inv_freq" not in name]:
            raise CheckpointError(
                f"weights: {len(unread)} of {self.total} tensors are for something that the engine "
                f"or config.json does not know, such as {min(unread)}: quantised weights, biases, "
                "more layers; the model would not be the one that was trained"
            )


class Transformer:
    """Llama and its kin (see `minikv.checkpoint`), for inference only."""

    def __init__(
        self, config: ModelConfig, state: Weights, device: torch.device, dtype: torch.dtype
    ):
        """Raises CheckpointError if a tensor is missing, has another shape than `config` says, or
        is for something that `config` does not have."""
        self.config, self.device, self.dtype = config, device, dtype
        c, left = config, Unread(config, state, device, dtype)
        self.embedding = left.take("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        self.layers = [self.make_layer(left, f"model.layers.{i}.", i) for i in range(c.num_layers)]
        self.norm = left.norm("model.norm.weight", c.hidden_size)
        head = self.embedding
        if not c.tie_embeddings or "lm_head.weight" in state:  # there: it counts, tied or not
            head = left.take("lm_head.weight", c.vocab_size, c.hidden_size)
        self.head = left.make_linear(head)
        left.require_none()
        self.rope_table = rope_table(c).to(device, dtype)  # (P, 2, D)
        self.project, self.mix = project, mix  # `minikv.gpu` replaces them by compiled ones

    def make_layer(self, left: Unread, at: str, i: int) -> Layer:
        """Layer `i`, whose weights' names begin with `at`."""
        c = self.config
        heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attn, qkv = at + "self_attn.{}_proj.", {"q": heads, "k": kv_heads, "v": kv_heads}
        q_norm, k_norm = (at + f"self_attn.{name}_norm.weight" for name in "qk")
        return Layer(
            norm_1=left.norm(at + "input_layernorm.weight", c.hidden_size),
            qkv=left.linear(attn, qkv, c.hidden_size, c.attention_bias),
            q_norm=left.norm(q_norm, c.head_dim) if c.qk_norm else None,
            k_norm=left.norm(k_norm, c.head_dim) if c.qk_norm else None,
            out=left.linear(attn, {"o": c.hidden_size}, heads, c.output_bias),
            **left.mlp(at),
        )

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """token_ids (T,), positions (T,), int64 -> hidden (T, hidden_size) after the last norm."""
        c = self.config
        cos, sin = self.rope_table.index_select(0, positions).split(1, dim=1)  # (T, 1, D) each
        x = self.embedding.index_select(0, token_ids)  # (T, hidden)
        for i, layer in enumerate(self.layers):
            q, k, v = self.project(layer, x, cos, sin, c.num_heads, c.num_kv_heads)
            x = self.mix(layer, x, attend(i, q, k, v))
        return self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (S, hidden_size) -> (S, vocab_size)."""
        return self.head(hidden)

    def attend_naively(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """The `attend` that keeps nothing: the batch is one whole sequence."""
        return naive_attention(q, k, v, self.config.windows[layer])


def project(
    layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The part of a layer before attention: x (T, hidden) -> q (T, H, D), k and v (T, K, D)."""
    qkv = layer.qkv(layer.norm_1(x)).view(len(x), -1, cos.shape[-1])  # (T, H + 2 K, D)
    qk, v = qkv.split([heads + kv_heads, kv_heads], 1)  # (T, H + K, D) and (T, K, D)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = qk.tensor_split([heads], dim=1)
        qk = torch.cat([layer.q_norm(q), layer.k_norm(k)], 1)
    q, k = rotate(qk, cos, sin).tensor_split([heads], dim=1)
    return q, k, v


def mix(layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """The part after attention: x (T, hidden), attended (T, H, D) -> the layer's (T, hidden)."""
    x = x + layer.out(attended.flatten(1))
    gate, up = layer.gate_up(layer.norm_2(x)).chunk(2, -1)  # (T, intermediate) each
    return x + layer.down(F.silu(gate) * up)


def rope_table(config: ModelConfig) -> torch.Tensor:
    """cos and sin of every position's angles, (max_context, 2, D), the first half of sin negated.

    A pair (a, b) of channels turned by an angle is (a cos - b sin, b cos + a sin): the first of
    the two takes minus sin. With the sign in the table, `rotate` treats both alike.
    """
    angles = torch.arange(config.max_context)[:, None] * config.inverse_frequencies()  # (P, D / 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE (Su et al., 2021): turn channel pairs (i, i + D / 2) by the position's angle.

    x (T, heads, D), which is not changed; cos, sin (T, 1, D), the first half of sin negated.
    Adding the angles of two turns is turning by their sum, so q . k depends on distance alone.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)  # the halves of each head's channels, swapped
    return torch.addcmul(x * cos, swapped, sin)  # x cos + swapped sin, with one pass less
