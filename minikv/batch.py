"""The flat batch: what the model needs to know about one step, and nothing else.

Three sequences, the third with a chunk of four tokens; block size 4:

    token_ids     [ 41 | 7 | 9 12 5 3 ]     T = 6, no padding
    positions     [  5 | 2 | 4  5 6 7 ]
    slot_mapping  [ 29 | 2 | 12 13 14 15]   slot = block * block_size + position % block_size
    query_start   [0, 1, 2, 6]              S + 1 = 4 borders
    context_lens  [ 6, 3, 8 ]               tokens each sequence attends to, new ones included
    block_tables  [[2, 7], [0, 0], [5, 3]]  padded with 0

A decode is a sequence with one query; nothing else sets it apart from prefill.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from minikv.blocks import blocks_for
from minikv.sequence import Sequence


@dataclass(slots=True)
class Batch:
    """All int64. The tensors are where the model is, the NumPy arrays are for Python to read."""

    token_ids: torch.Tensor  # (T,)
    positions: torch.Tensor  # (T,)
    slot_mapping: torch.Tensor  # (T,)
    block_tables: torch.Tensor  # (S, B)
    context_lens: torch.Tensor  # (S,)
    query_start: torch.Tensor  # (S + 1,)
    num_decodes: int  # number of sequences at the front that have one query each
    context_lens_host: np.ndarray
    query_start_host: np.ndarray


class BatchBuilder:
    """Builds batches on the CPU. Keeps the last block tables, for most rows do not change."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int):
        self.max_blocks, self.block_size = max_blocks, block_size
        self._tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self._counting = np.arange(max_num_seqs + 1)  # the borders of decodes: one token each
        # What the rows hold: the tables of these sequences, in these versions.
        self._held: list[Sequence] = []
        self._versions: list[int] = []

    def build(self, sequences: Seq[Sequence], num_tokens: Seq[int], slots: Seq[int]) -> Batch:
        """The next `num_tokens[i]` tokens of each sequence, the first of them at `slots[i]`."""
        num_decodes, query_start = len(sequences), self._counting[: len(sequences) + 1]
        if num_tokens.count(1) < num_decodes:
            num_decodes = next(i for i, count in enumerate(num_tokens) if count > 1)
            query_start = np.array([0, *accumulate(num_tokens)])
        starts, size = [sequence.num_computed for sequence in sequences], self.block_size
        token_ids = self.ids_of_decodes(sequences[:num_decodes])
        positions, slot_mapping = starts[:num_decodes], list(slots[:num_decodes])
        for i in range(num_decodes, len(sequences)):
            sequence, span = sequences[i], range(starts[i], starts[i] + num_tokens[i])
            token_ids += sequence.token_ids[span.start : span.stop]
            positions += span
            block_ids = sequence.table.block_ids
            slot_mapping += [block_ids[at // size] * size + at % size for at in span]
        flat = np.array([token_ids, positions, slot_mapping], dtype=np.int64)  # (3, T)
        context_lens = flat[1, query_start[1:] - 1] + 1
        width = blocks_for(int(context_lens.max()), size)
        tables = self.tables(sequences, flat[1, :num_decodes], flat[2, :num_decodes])
        ids, places, targets = map(torch.from_numpy, flat)
        batch = Batch(
            token_ids=ids, positions=places, slot_mapping=targets,
            block_tables=torch.from_numpy(tables[:, :width].copy()),
            context_lens=torch.from_numpy(context_lens), context_lens_host=context_lens,
            query_start=torch.from_numpy(query_start), query_start_host=query_start,
            num_decodes=num_decodes,
        )  # fmt: skip
        return self.placed(batch, sequences, num_tokens, ())

    def placed(self, batch: Batch, of: Seq[Sequence], counts: Seq[int], drafts: Seq) -> Batch:
        """With what else a step must know of the sequences that a batch is of. `counts[i]` tokens
        are of sequence i, and then, if it is among the first, `drafts[i]`."""
        return batch

    def ids_of_decodes(self, decodes: Seq[Sequence]) -> list[int]:
        """The token of each that this step computes."""
        return [one.token_ids[one.num_computed] for one in decodes]

    def tables(self, sequences: Seq[Sequence], starts: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Block tables of the sequences: (S, max_blocks), a view of this builder's own array.

        starts (N,), slots (N,): where the first N begin to write. These name the blocks that the
        step has added to tables.
        """
        versions, at = [one.table_version for one in sequences], starts // self.block_size
        if versions != self._versions or sequences != self._held:
            held = list(zip(self._held, self._versions, strict=True))
            self._held, self._versions = [], []  # until all rows are written
            for row, of in enumerate(zip(sequences, versions, strict=True)):
                if row >= len(held) or of != held[row]:
                    block_ids = sequences[row].table.block_ids
                    self._tables[row, : len(block_ids)] = block_ids
                    self._tables[row, len(block_ids) :] = 0
            self._held, self._versions = list(sequences), versions
        self._tables[self._counting[: len(at)], at] = slots // self.block_size
        return self._tables[: len(sequences)]
