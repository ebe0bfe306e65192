"""Decode steps with states, compiled for the CPU.

A layer is five phases there: a product, attention, three products. The three are alike in both
kinds of layers. The first gives rows of one size, which each kind reads in its own way:

    attends   [ q | gate | … | k | v ]      linear   [ channels | z | b | a | … ]

Between them this file has what a layer does in the place of writing K and V, and of attending. A
row is one token of one sequence, so it finds its state as the token before left it.
"""

import math
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F

from minikv.backend import AttentionBackend, Computed
from minikv.batch import Batch
from minikv.cpu import (
    CompiledSteps,
    CpuAttention,
    apart,
    attend_decode,
    exp,
    norm_heads,
    norm_weight,
    part,
    plain,
    rotate,
    unpacked,
    write_new,
)  # fmt: skip
from minikv.model import Attend, Layer, Linear, Transformer
from minikv.states.config import HybridConfig
from minikv.states.memory import StateMemory
from minikv.states.model import GatedLayer, HybridTransformer, LinearLayer
from minikv.states.steps import StateBatch

zero, one, tiny = np.float32(0), np.float32(1), np.float32(1e-6)


class StateParts(NamedTuple):
    """What the kernels know of a model's layers, by kind: A that attend, R that are linear."""

    is_linear: np.ndarray  # (L,): 1 or 0
    place: np.ndarray  # (L,): which of its kind
    kv: np.ndarray  # (A, num_blocks, block_size, 2, K, D)
    matrices: np.ndarray  # (num_slots, R, H, N, D)
    inputs: np.ndarray  # (num_slots, R, W - 1, C)
    slots: np.ndarray  # (S,): of each row, its state
    positions: np.ndarray  # (S,): and its position
    rope: np.ndarray  # (P, 2, D)
    eps: np.ndarray  # (1,)
    num_heads: np.ndarray  # (1,): query heads
    q_norm: np.ndarray  # (A, D)
    k_norm: np.ndarray
    convolution: np.ndarray  # (R, W, C)
    rate: np.ndarray  # (R, H)
    offset: np.ndarray
    out_norm: np.ndarray  # (R, D)


def compiled_decodes(attention: AttentionBackend, memory: StateMemory) -> AttentionBackend | None:
    """What computes decodes beside this backend; None if that is none of compiled kernels, or the
    model is in bfloat16."""
    if type(attention) is not CpuAttention or memory.dtype != torch.float32:
        return None
    return CompiledStates(attention, memory)


class CompiledStates(CompiledSteps):
    """Whole steps of decodes in one call."""

    def __init__(self, attention: CpuAttention, memory: StateMemory):
        self.store, self.memory = attention.store, memory
        self.of: Transformer | None = None

    def bind(self, batch: Batch) -> Attend:
        raise NotImplementedError  # layer by layer is another's

    def compute(self, transformer: Transformer, batch: Batch) -> Computed | None:
        """None if there is more than decodes."""
        assert isinstance(transformer, HybridTransformer) and isinstance(batch, StateBatch)
        if len(batch.slots) < len(batch.token_ids):
            return None
        if self.of is not transformer:
            self.of = transformer
            kv = parts_of(transformer, self.store.blocks.numpy(), self.memory)
            self.compile_over(kv, _attend_or_recall, _write_or_convolve)
        count = len(batch.slots)
        self.kv.slots[:count] = batch.slots.numpy()
        self.kv.positions[:count] = batch.positions.numpy()
        return super().compute(as_usual(transformer), batch)


_usual: WeakKeyDictionary[Transformer, Transformer] = WeakKeyDictionary()


def as_usual(transformer: HybridTransformer) -> Transformer:
    """The same weights as a transformer whose layers are all of one shape, for `Program`."""
    if transformer not in _usual:
        c, usual = transformer.config, copy(transformer)
        gated = 2 * (c.num_heads + c.num_kv_heads)
        linear = c.channels + (c.value_dim + 2) * c.value_heads
        num_rows = max(gated, -(-linear // c.head_dim)) * c.head_dim
        found = max(c.num_heads, -(-c.value_heads * c.value_dim // c.head_dim)) * c.head_dim
        usual.layers = [
            Layer(
                norm_1=layer.norm_1, qkv=_rows(c, layer, num_rows), q_norm=None,
                k_norm=None, out=_columns(layer, found), norm_2=layer.norm_2,
                gate_up=layer.gate_up, down=layer.down,
            )
            for layer in transformer.layers
        ]  # fmt: skip
        # To divide the work: all rows of a linear layer cost the same.
        usual.config = replace(c, windows=tuple(int(one) for one in c.is_linear))
        usual.rope_table = transformer.rope_table[:0]
        _usual[transformer] = usual
    return _usual[transformer]


def _rows(c: HybridConfig, layer: Any, num_rows: int) -> Linear:
    """The weight of a layer's first product, with rows of zeros where it has fewer."""
    weight = plain(layer.qkv.weight)
    rows = np.zeros((num_rows, c.hidden_size), np.float32)
    if isinstance(layer, LinearLayer):
        rows[: len(weight)] = weight
        return Linear(torch.from_numpy(rows))
    queries, keys = c.num_heads * c.head_dim, 2 * c.num_kv_heads * c.head_dim
    rows[:queries], rows[-keys:] = weight[:queries], weight[queries:]
    rows[queries : 2 * queries] = plain(layer.gate.weight)
    return Linear(torch.from_numpy(rows))


def _columns(layer: Any, num_columns: int) -> Linear:
    """The product behind the middle, with columns of zeros where its kind has fewer heads."""
    weight = torch.from_numpy(plain(layer.out.weight))
    return Linear(F.pad(weight, (0, num_columns - weight.shape[1])))


def parts_of(transformer: HybridTransformer, kv: np.ndarray, memory: StateMemory) -> StateParts:
    layers: list[Any] = transformer.layers
    c = transformer.config
    linear: list[Any] = [layer for layer in layers if isinstance(layer, LinearLayer)]
    gated = [layer for layer in layers if isinstance(layer, GatedLayer)]
    kinds = [gated, linear]

    def of_each(found: list[np.ndarray]) -> np.ndarray:
        return np.ascontiguousarray(np.stack(found))

    return StateParts(
        is_linear=np.array(c.is_linear, np.int64),
        place=np.array([kinds[c.is_linear[i]].index(layer) for i, layer in enumerate(layers)]),
        kv=kv, matrices=memory.matrices.numpy(), inputs=memory.inputs.numpy(),
        slots=np.zeros(memory.num_running, np.int64),
        positions=np.zeros(memory.num_running, np.int64),
        rope=plain(transformer.rope_table), eps=np.array([c.rms_norm_eps], np.float32),
        num_heads=np.array([c.num_heads]),
        q_norm=of_each([norm_weight(layer.q_norm) for layer in gated]),
        k_norm=of_each([norm_weight(layer.k_norm) for layer in gated]),
        convolution=of_each([plain(layer.convolution).T for layer in linear]),
        rate=of_each([plain(layer.rate) for layer in linear]),
        offset=of_each([plain(layer.offset) for layer in linear]),
        out_norm=of_each([plain(layer.out_norm.weight) for layer in linear]),
    )  # fmt: skip


# ── Between a layer's products ────────────────────────────────────────────────


@apart
def _write_or_convolve(packed, layer, heads, slots, num_tokens):
    """What is done for all rows before any goes on."""
    s = unpacked(packed)
    i = s.place[layer]
    if s.is_linear[layer]:
        scratch, rows = np.empty(s.inputs.shape[3], np.float32), heads.reshape(len(heads), -1)
        for t in range(num_tokens):
            _convolve(s, i, s.slots[t], rows[t], scratch)
        return
    num_heads, kv_heads, rows = s.num_heads[0], s.kv.shape[4], heads[:num_tokens]
    values = heads.shape[1] - kv_heads
    norm_heads(rows, 0, num_heads, s.q_norm[i], s.eps[0])
    norm_heads(rows, values - kv_heads, values, s.k_norm[i], s.eps[0])
    rotate(heads, 0, num_heads, s.rope, s.positions, 0, num_tokens)
    rotate(heads, values - kv_heads, values, s.rope, s.positions, 0, num_tokens)
    for kv_head in range(kv_heads):
        write_new(s.kv[i], heads, slots, kv_head, 0, num_tokens)


@apart
def _attend_or_recall(
    packed, layer, q, tables, lens, query_start, window, out, first, last, border
):
    """What stands behind q and K: items first to last, KV head i % K of row i // K, and of a linear
    layer the same share of its heads."""
    s = unpacked(packed)
    i, kv_heads = s.place[layer], s.kv.shape[4]
    if s.is_linear[layer]:
        num_heads, scratch = s.matrices.shape[2], np.empty((2, s.matrices.shape[4]), np.float32)
        rows, outs = q.reshape(len(q), -1), out.reshape(len(out), -1)
        for item in range(first, last):
            row, share = item // kv_heads, item % kv_heads
            for head in range(share * num_heads // kv_heads, (share + 1) * num_heads // kv_heads):
                _recall(s, i, s.slots[row], head, rows[row], outs[row], scratch)
        return
    num_heads = s.num_heads[0]
    group = num_heads // kv_heads
    attend_decode(q, s.kv[i], tables, lens, window, out[:, :num_heads], first, last)
    for item in range(first, last):
        row, share = item // kv_heads, item % kv_heads
        for head in range(share * group, (share + 1) * group):
            found, gate = out[row, head], q[row, num_heads + head]
            for d in range(len(found)):
                found[d] *= one / (one + exp(-gate[d]))


@part
def _convolve(s, i, slot, row, mixed):
    """`delta.convolve`, the lengths of q and k, and the two gates, in place: the channels of the
    row become q, k and v; b becomes beta, and a becomes e^g."""
    num_heads, size, dim = s.matrices.shape[2], s.matrices.shape[3], s.matrices.shape[4]
    num_channels, num_last = s.inputs.shape[3], s.inputs.shape[2]
    new, weight = row[:num_channels], s.convolution[i]
    newest = weight[num_last]
    for c in range(num_channels):
        mixed[c] = new[c] * newest[c]
    for w in range(num_last):
        last, factor = s.inputs[slot, i, w], weight[w]
        for c in range(num_channels):
            mixed[c] += last[c] * factor[c]
        after = s.inputs[slot, i, w + 1] if w + 1 < num_last else new
        for c in range(num_channels):
            last[c] = after[c]
    for c in range(num_channels):
        new[c] = mixed[c] / (one + exp(-mixed[c]))
    keys = (num_channels - num_heads * dim) // 2
    for at in range(0, 2 * keys, size):
        x, total = row[at : at + size], zero
        for n in range(size):
            total += x[n] * x[n]
        scale = np.float32(one / math.sqrt(total + tiny))
        if at < keys:
            scale = np.float32(scale / math.sqrt(size))
        for n in range(size):
            x[n] *= scale
    b = num_channels + num_heads * dim
    for head in range(num_heads):
        a = b + num_heads + head
        row[b + head] = one / (one + exp(-row[b + head]))
        x = row[a] + s.offset[i, head]
        row[a] = math.exp(-s.rate[i, head] * (x if x > 20 else math.log1p(math.exp(x))))


@part
def _recall(s, i, slot, head, row, out, scratch):
    """`delta.decode` of one head, with one pass that reads the state and one that writes it: what
    is read afterwards is what was read before, and q . k times what is written. Then norm and gate.
    """
    num_heads, size, dim = s.matrices.shape[2], s.matrices.shape[3], s.matrices.shape[4]
    num_channels = s.inputs.shape[3]
    keys, gates = (num_channels - num_heads * dim) // 2, num_channels + num_heads * dim
    at = head * (keys // size) // num_heads * size
    q, k = row[at : at + size], row[keys + at : keys + at + size]
    at = head * dim
    v, z = row[2 * keys + at :][:dim], row[num_channels + at :][:dim]
    beta, fade = row[gates + head], row[gates + num_heads + head]
    state, found, r = s.matrices[slot, i, head], out[at : at + dim], scratch[0]
    read = scratch[1]
    for d in range(dim):
        r[d], read[d] = zero, zero
    both = zero
    for n in range(size):
        line, of_k, of_q = state[n], k[n] * fade, q[n] * fade
        both += k[n] * q[n]
        for d in range(dim):
            r[d] += of_k * line[d]
            read[d] += of_q * line[d]
    total = zero
    for d in range(dim):
        r[d] = beta * (v[d] - r[d])
        read[d] += both * r[d]
        total += read[d] * read[d]
    for n in range(size):
        line, of_k = state[n], k[n]
        for d in range(dim):
            line[d] = fade * line[d] + of_k * r[d]
    scale = np.float32(one / math.sqrt(total / np.float32(dim) + s.eps[0]))
    weight = s.out_norm[i]
    for d in range(dim):
        found[d] = read[d] * scale * weight[d] * z[d] / (one + exp(-z[d]))
