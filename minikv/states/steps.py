"""A step over blocks and slots: each sequence's new tokens go through its state, in order.

    decodes   tokens 0 and 1 of the flat batch go through slots 3 and 0
    tries     a decode and its drafts: tokens 2 to 4 after the state in slot 1, which stays as it is
    pieces    of a chunk: tokens 5 to 8 through slot 5; the state after token 7 goes to slot 7, too

Decodes are computed together. A chunk is cut where a copy is due: what the next token makes of a
state cannot be undone.

Which of its drafts are right is known when the step is done. Blocks of wrong ones are just given
back. For a state there are three ways: a copy for each draft, or a copy for the step and the right
ones through the whole model again, or, as here, to keep what the drafts would have written (keys,
values, gates: some hundred numbers for each, beside a state of thousands), and to write it when it
is known to be right.
"""

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple, cast

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


class Try(NamedTuple):
    """A decode with its drafts, `first` to `last` of the flat batch."""

    row: int  # among the decodes
    sequence: Sequence
    first: int
    last: int


class Tried(NamedTuple):
    """What a layer would write for them, T tokens."""

    seen: torch.Tensor  # (W - 1 + T, C): the convolution's inputs, those before them included
    written: tuple[torch.Tensor, ...]  # q, k (T, H, N), v (T, H, D), g, beta (T, H)


def try_tokens(
    state: torch.Tensor, last: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor,
    split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], g: torch.Tensor, beta: torch.Tensor,
) -> tuple[torch.Tensor, Tried]:  # fmt: skip
    """A decode and its drafts in one layer, T tokens, before anybody knows which are right.

    state (H, N, D) float32 and last (W - 1, C), the convolution's last inputs, are those after the
    tokens so far, and stay as they are. inputs (T, C), before the convolution; weight (C, W), its
    weights; g, beta (T, H). Two functions of the engine help:

        mixed, _ = convolve(inputs=inputs[None], last=last[None], weight=weight)  (1, T, C)
        read = prefill(state, q, k, v, g, beta)  (T, H, D); it changes the state

    `split` makes q, k (T, H, N) and v (T, H, D) of `mixed[0]`. Returns what each token reads,
    (T, H, D), and what `write_tokens` needs.
    """
    mixed, _ = convolve(inputs[None], last[None], weight)
    written = *split(mixed[0]), g, beta
    return prefill(state.clone(), *written), Tried(torch.cat([last, inputs]), written)


def write_tokens(
    state: torch.Tensor, last: torch.Tensor, tried: Tried, first: int, end: int
) -> None:
    """Let tokens `first` to `end` of those that were tried be in the state and in the last inputs,
    which hold what was before `first`, and are changed.

    Worked example: 3 tokens were tried, the decode and one draft are right. After
    write_tokens(state, last, tried, 0, 2) both tensors are as if the third had never been there.
    """
    q, k, v, g, beta = (one[first:end] for one in tried.written)
    prefill(state, q, k, v, g, beta)
    last.copy_(tried.seen[end : end + len(last)])


@dataclass(slots=True)
class StateBatch(Batch):
    """A batch, and where its states are."""

    places: torch.Tensor  # (N,) int64: of the decodes without drafts, in the flat batch
    slots: torch.Tensor  # (N,) int64: theirs
    pieces: list[Piece]  # of the chunks, in order
    tries: list[Try]
    copies: list[tuple[int, int]]  # (from, to): slots of decodes, when the step is done


class StateBuilder(BatchBuilder):
    """Builds batches with slots; plans the copies that the step makes."""

    def placed(self, batch: Batch, of: Seq[Sequence], counts: Seq[int], drafts: Seq) -> StateBatch:
        pool: Any = of[0].table.pool  # a StatePool
        pool.begin_step()
        places: list[int] = []
        slots: list[int] = []
        pieces: list[Piece] = []
        tries: list[Try] = []
        copies: list[tuple[int, int]] = []
        first = 0
        for row, (sequence, count) in enumerate(zip(of, counts, strict=True)):
            table: Any = sequence.table  # a StateTable
            end = first + count + (len(drafts[row]) if row < len(drafts) else 0)
            if end - first > count:
                tries.append(Try(row, sequence, first, end))
                first = end
                continue
            start = sequence.num_computed
            planned = table.plan_copies(sequence, start + count)
            if count == 1:
                places.append(first)
                slots.append(table.slot)
                copies += [(table.slot, copy) for _, copy in planned]
                first = end
                continue
            origin = first - start  # of this sequence's positions, in the flat batch
            for position, copy in planned:
                pieces.append(Piece(table.slot, first, origin + position, copy))
                first = origin + position
            if first < end:
                pieces.append(Piece(table.slot, first, end, None))
            first = end
        same = {one.name: getattr(batch, one.name) for one in fields(batch)}
        at, own = torch.tensor([places, slots], dtype=torch.int64)
        return StateBatch(**same, places=at, slots=own, pieces=pieces, tries=tries, copies=copies)


class StateAttention(AttentionBackend):
    """A backend for the layers that attend, and states for the others."""

    def __init__(self, inner: AttentionBackend, memory: StateMemory):
        self.inner, self.memory, self.store = inner, memory, inner.store
        self.decodes: AttentionBackend | None = None  # computes steps of decodes alone
        self._tries: list[Try] = []  # of the last batch
        self._tried: list[list[Tried]] = []  # by layer, then by try

    def bind(self, batch: Batch) -> Attend:
        return self.inner.bind(batch)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.inner.copy_blocks(pairs)

    def compute(self, transformer: Transformer, batch: Batch) -> Computed:
        """As `Runner.hidden`, with `recall`."""
        assert isinstance(transformer, HybridTransformer) and isinstance(batch, StateBatch)
        self._tries, self._tried = batch.tries, []
        found = self.decodes.compute(transformer, batch) if self.decodes is not None else None
        if found is None:
            attend: Attend = blame("attention", self.bind, batch)
            recall = self.recall_of(batch)
            hidden = transformer.forward(batch.token_ids, batch.positions, attend, recall)
            if len(hidden) > len(batch.context_lens):
                hidden = hidden[batch.query_start[1:] - 1]  # (S, hidden)
            found = transformer.logits(hidden), hidden
        for source, target in batch.copies:
            self.memory.copy(source, target)
        return found

    def recall_of(self, batch: StateBatch) -> Recall:
        """The `recall` of this batch."""
        matrices, last_inputs, c = self.memory.matrices, self.memory.inputs, self.memory.config
        at, own = batch.places, batch.slots

        def recall(
            i: int, weight: torch.Tensor, inputs: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
        ) -> torch.Tensor:
            out = g.new_empty(len(g), c.value_heads, c.value_dim)
            if len(at) > 0:
                mixed, last = convolve(inputs[at][:, None], last_inputs[own, i], weight)
                state = matrices[own, i]  # (N, H, N, D), gathered
                heads = split_heads(c, mixed[:, 0])
                out[at] = decode(state, *heads, g[at], beta[at])
                matrices[own, i], last_inputs[own, i] = state, last
            for slot, first, end, copy in batch.pieces:
                part, state = slice(first, end), matrices[slot, i]
                mixed, last = convolve(inputs[None, part], last_inputs[slot, i][None], weight)
                out[part] = prefill(state, *split_heads(c, mixed[0]), g[part], beta[part])
                last_inputs[slot, i] = last[0]
                if copy is not None:
                    matrices[copy, i], last_inputs[copy, i] = state, last[0]
            tried = []
            for one in batch.tries:
                part, table = slice(one.first, one.last), cast(Any, one.sequence.table)
                state, last = matrices[table.slot, i], last_inputs[table.slot, i]
                out[part], kept = try_tokens(
                    state, last, inputs[part], weight, partial(split_heads, c), g[part], beta[part]
                )
                tried.append(kept)
            self._tried.append(tried)
            return out

        return recall

    @torch.inference_mode()
    def keep(self, counts: list[int]) -> None:
        """What is kept is written to the states, and the copies are made that are due there."""
        matrices, last_inputs = self.memory.matrices, self.memory.inputs
        for n, (row, sequence, _, _) in enumerate(self._tries):
            table: Any = sequence.table
            start, count, slot = sequence.num_computed, counts[row], table.slot
            planned = table.plan_copies(sequence, start + count)
            ends = [*((position - start, copy) for position, copy in planned), (count, None)]
            for i, tried in enumerate(self._tried):
                state, last, first = matrices[slot, i], last_inputs[slot, i], 0
                for end, copy in ends:
                    if first < end:
                        write_tokens(state, last, tried[n], first, end)
                        first = end
                    if copy is not None:
                        matrices[copy, i], last_inputs[copy, i] = state, last
        self._tries, self._tried = [], []
