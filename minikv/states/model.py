"""A transformer with linear layers beside those that attend: Qwen3.5, without pictures.

    attend(layer, q, k, v)                K and V of all tokens, as in every model
    recall(layer, weight, x, g, beta)     a state, whatever the number of tokens

Layers of each kind are counted apart, so a store of K and V has no place for linear ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minikv.model import Attend, Layer, Op, RMSNorm, Transformer, Unread
from minikv.states.config import HybridConfig
from minikv.states.delta import convolve, prefill

# recall(layer, weight (C, W), inputs (T, C), g (T, H), beta (T, H)) -> (T, H, D): what the states
# of a linear layer say after each token. H value heads of D; C and W are the convolution's.
Recall = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class GatedLayer(Layer):
    """A layer that attends."""

    gate: Op  # hidden -> H * D: how much of what was attended to goes on


@dataclass(slots=True)
class LinearLayer(Layer):
    """A layer that keeps a state. Its `qkv` has what is convolved, and then z, b and a."""

    convolution: torch.Tensor  # (C, W)
    rate: torch.Tensor  # (H,) float32: how fast a head forgets
    offset: torch.Tensor  # (H,) float32
    out_norm: Op  # over the value dim


class HybridTransformer(Transformer):
    """`Transformer`, with layers of two kinds."""

    config: HybridConfig

    def make_layer(self, left: Unread, at: str, i: int) -> Layer:
        make = self._linear_layer if self.config.is_linear[i] else self._gated_layer
        return make(left, at)

    def _gated_layer(self, left: Unread, at: str) -> GatedLayer:
        c, attn = self.config, at + "self_attn."
        # RoPE turns the first channels of a head, in pairs (i, i + rotary_dim / 2), and `rotate`
        # all, in pairs (i, i + D / 2). So channels change places, of queries and keys alike, and
        # those that do not turn have an angle of 0.
        half, turned = c.head_dim // 2, c.rotary_dim // 2
        still = list(range(c.rotary_dim, c.head_dim))
        first = [*range(turned), *still[: half - turned]]
        order = torch.tensor([*first, *range(turned, c.rotary_dim), *still[half - turned :]])
        order = order.to(left.device)
        q_gate = left.take(attn + "q_proj.weight", 2 * c.num_heads * c.head_dim, c.hidden_size)
        q, gate = q_gate.view(c.num_heads, 2, c.head_dim, -1).unbind(1)
        k, v = (
            left.take(f"{attn}{name}_proj.weight", c.num_kv_heads * c.head_dim, c.hidden_size)
            for name in "kv"
        )
        k = k.view(c.num_kv_heads, c.head_dim, -1)
        qkv = torch.cat([torch.cat([q, k])[:, order].flatten(0, 1), v])

        def norm(name: str) -> Op:
            weight = left.take(attn + name, c.head_dim).float()[order] + c.norm_offset
            return left.make_norm(weight, c.rms_norm_eps)

        return GatedLayer(
            norm_1=left.norm(at + "input_layernorm.weight", c.hidden_size),
            qkv=left.make_linear(qkv), gate=left.make_linear(gate.flatten(0, 1)),
            q_norm=norm("q_norm.weight"), k_norm=norm("k_norm.weight"),
            out=left.linear(attn + "{}_proj.", {"o": c.hidden_size}, len(q) * c.head_dim, False),
            **left.mlp(at),
        )  # fmt: skip

    def _linear_layer(self, left: Unread, at: str) -> LinearLayer:
        c, attn = self.config, at + "linear_attn."
        values = c.value_heads * c.value_dim
        sizes = {"qkv": c.channels, "z": values, "b": c.value_heads, "a": c.value_heads}
        # In float32, as the whole recurrence: a float16 rate may be infinite.
        rate = left.take(attn + "A_log", c.value_heads).float().exp()
        out_norm = left.take(attn + "norm.weight", c.value_dim)
        return LinearLayer(
            norm_1=left.norm(at + "input_layernorm.weight", c.hidden_size),
            qkv=left.linear(attn + "in_proj_{}.", sizes, c.hidden_size, False),
            q_norm=None, k_norm=None,
            convolution=left.take(attn + "conv1d.weight", c.channels, 1, c.width).squeeze(1),
            rate=rate, offset=left.take(attn + "dt_bias", c.value_heads).float(),
            out_norm=RMSNorm(out_norm, c.rms_norm_eps),
            out=left.linear(attn + "{}_proj.", {"out": c.hidden_size}, values, False),
            **left.mlp(at),
        )  # fmt: skip

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend,
        recall: Recall | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """token_ids (T,), positions (T,), int64 -> hidden (T, hidden_size) after the last norm.

        Without `recall`, the batch is one whole sequence. Raises ValueError if `attend` has earlier
        tokens of it.
        """
        c = self.config
        if recall is None and attend != self.attend_naively:
            raise ValueError("attend: this cache has no states, which the model's layers need; "
                             "use an Engine")  # fmt: skip
        recall = recall or self.recall_naively
        cos, sin = self.rope_table.index_select(0, positions).split(1, dim=1)  # (T, 1, D) each
        x = self.embedding.index_select(0, token_ids)  # (T, hidden)
        num_attending = num_linear = 0
        for layer in self.layers:
            if isinstance(layer, LinearLayer):
                x = self.mix(layer, x, self._recall(layer, x, num_linear, recall))
                num_linear += 1
            elif isinstance(layer, GatedLayer):
                q, k, v = self.project(layer, x, cos, sin, c.num_heads, c.num_kv_heads)
                gate = layer.gate(layer.norm_1(x)).sigmoid().view(q.shape)  # (T, H, D)
                x = self.mix(layer, x, attend(num_attending, q, k, v) * gate)
                num_attending += 1
        return self.norm(x)

    def _recall(self, layer: LinearLayer, x: torch.Tensor, i: int, recall: Recall) -> torch.Tensor:
        """What stands in the place of attention: x (T, hidden) -> (T, H, D)."""
        c = self.config
        sizes = [c.channels, c.value_heads * c.value_dim, c.value_heads, c.value_heads]
        inputs, z, b, a = layer.qkv(layer.norm_1(x)).split(sizes, -1)
        g = -layer.rate * F.softplus(a.float() + layer.offset)  # (T, H) float32
        out = recall(i, layer.convolution, inputs, g, b.sigmoid().float())
        z = z.view(-1, c.value_heads, c.value_dim)
        return layer.out_norm(out.to(x.dtype)) * F.silu(z.float()).to(x.dtype)

    def recall_naively(
        self, layer: int, weight: torch.Tensor, inputs: torch.Tensor, g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """The `recall` that keeps nothing: from a state of zeros, over one whole sequence."""
        c = self.config
        zeros = inputs.new_zeros(1, c.width - 1, c.channels)
        mixed, _ = convolve(inputs[None], zeros, weight)
        state = g.new_zeros(c.value_heads, c.key_dim, c.value_dim)
        return prefill(state, *split_heads(c, mixed[0]), g, beta)


def split_heads(
    config: HybridConfig, mixed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mixed (T, C), convolved -> q, k (T, H, key_dim) of length 1 and v (T, H, value_dim), all in
    float32; q is divided by sqrt(key_dim). H value heads: each key head serves several."""
    c, serves = config, config.value_heads // config.key_heads
    keys = c.key_heads * c.key_dim
    q, k, v = mixed.float().split([keys, keys, c.value_heads * c.value_dim], -1)
    q, k = (
        (x := one.reshape(-1, c.key_heads, c.key_dim))
        * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
        for one in (q, k)
    )
    q = q * c.key_dim**-0.5
    q, k = (one.repeat_interleave(serves, 1) if serves > 1 else one for one in (q, k))
    return q, k, v.reshape(-1, c.value_heads, c.value_dim)
