"""A step over blocks and slots: each sequence's new tokens go through its state, in order.

    query_start   [0, 1, 2, 6]     as in `minikv.batch`: two decodes and a chunk of four
    slots         [3, 0, 5]        of each sequence
    copies        [(2, 3, 7)]      of sequence 2, the state after its token 3 goes to slot 7 as well

Decodes are computed together. A chunk is cut where a copy is due: what the next token makes of a
state cannot be undone.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from minikv.backend import AttentionBackend, Computed
from minikv.batch import Batch, BatchBuilder
from minikv.errors import blame
from minikv.model import Attend, Transformer
from minikv.sequence import Sequence
from minikv.states.delta import convolve, decode, prefill
from minikv.states.memory import StateMemory
from minikv.states.model import HybridTransformer, Recall, split_heads


class Piece(NamedTuple):
    """Tokens of a chunk, `first` to `last` of the flat batch, and where the state after them is
    copied to, if anywhere."""

    slot: int
    first: int
    last: int
    copy: int | None


@dataclass(slots=True)
class StateBatch(Batch):
    """A batch, and where its states are."""

    slots: torch.Tensor  # (num_decodes,) int64
    pieces: list[Piece]  # of the chunks, in order
    copies: list[tuple[int, int]]  # (from, to): slots of decodes, when the step is done


class StateBuilder(BatchBuilder):
    """Builds batches with slots; plans the copies that the step makes."""

    def build(self, sequences: Seq[Sequence], num_tokens: Seq[int], slots: Seq[int]) -> StateBatch:
        plain = super().build(sequences, num_tokens, slots)
        tables: list[Any] = [sequence.table for sequence in sequences]  # StateTables
        tables[0].pool.begin_step()
        pieces: list[Piece] = []
        copies: list[tuple[int, int]] = []
        for row, (sequence, table) in enumerate(zip(sequences, tables, strict=True)):
            start, slot = sequence.num_computed, table.slot
            planned = table.plan_copies(sequence, start + num_tokens[row])
            if row < plain.num_decodes:
                copies += [(slot, copy) for _, copy in planned]
                continue
            first, end = map(int, plain.query_start_host[row : row + 2])
            origin = first - start  # of this sequence's positions, in the flat batch
            for position, copy in planned:
                pieces.append(Piece(slot, first, origin + position, copy))
                first = origin + position
            if first < end:
                pieces.append(Piece(slot, first, end, None))
        own = torch.tensor([table.slot for table in tables[: plain.num_decodes]], dtype=torch.int64)
        plain_fields = {one.name: getattr(plain, one.name) for one in fields(plain)}
        return StateBatch(**plain_fields, slots=own, pieces=pieces, copies=copies)


class StateAttention(AttentionBackend):
    """A backend for the layers that attend, and states for the others."""

    def __init__(self, inner: AttentionBackend, memory: StateMemory):
        self.inner, self.memory, self.store = inner, memory, inner.store

    def bind(self, batch: Batch) -> Attend:
        return self.inner.bind(batch)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.inner.copy_blocks(pairs)

    def compute(self, transformer: Transformer, batch: Batch) -> Computed:
        """As `Runner.hidden`, with `recall`."""
        assert isinstance(transformer, HybridTransformer) and isinstance(batch, StateBatch)
        attend: Attend = blame("attention", self.bind, batch)
        recall = self.recall_of(batch)
        hidden = transformer.forward(batch.token_ids, batch.positions, attend, recall)
        for source, target in batch.copies:
            self.memory.copy(source, target)
        if len(hidden) > len(batch.context_lens):
            hidden = hidden[batch.query_start[1:] - 1]  # (S, hidden)
        return transformer.logits(hidden), hidden

    def recall_of(self, batch: StateBatch) -> Recall:
        """The `recall` of this batch."""
        matrices, last_inputs, c = self.memory.matrices, self.memory.inputs, self.memory.config
        own, count = batch.slots, batch.num_decodes

        def recall(
            i: int, weight: torch.Tensor, inputs: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
        ) -> torch.Tensor:
            out = g.new_empty(len(g), c.value_heads, c.value_dim)
            if count > 0:
                mixed, last = convolve(inputs[:count, None], last_inputs[own, i], weight)
                state = matrices[own, i]  # (S, H, N, D), gathered
                heads = split_heads(c, mixed[:, 0])
                out[:count] = decode(state, *heads, g[:count], beta[:count])
                matrices[own, i], last_inputs[own, i] = state, last
            for slot, first, end, copy in batch.pieces:
                part, state = slice(first, end), matrices[slot, i]
                mixed, last = convolve(inputs[None, part], last_inputs[slot, i][None], weight)
                out[part] = prefill(state, *split_heads(c, mixed[0]), g[part], beta[part])
                last_inputs[slot, i] = last[0]
                if copy is not None:
                    matrices[copy, i], last_inputs[copy, i] = state, last[0]
            return out

        return recall
