"""Decode steps as CUDA graphs: recorded once, then replayed with other contents.

A decode step of a small batch is some hundred short kernels. Launched one by one from Python,
they take longer to launch than to run; a graph launches all of them in one call. A graph records
addresses and sizes. So it reads its batch from buffers that never move, and there is one graph
per batch size:

    batch of 5 -> the graph for 8 -> rows 0 1 2 3 4 and three of padding

A row of padding writes no K and V (slot -1) and attends to nothing (context length 0).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from minikv.gpu.tokens import DeviceBatch


class DecodeGraphs:
    """Runs batches of decodes through graphs. The first batch of each size pauses to record its."""

    def __init__(
        self,
        compute: Callable[[DeviceBatch, torch.Tensor], None],
        max_num_seqs: int,
        max_blocks: int,
        logits: torch.Tensor,
    ):
        """compute(batch, logits (S, vocab_size)): the step to record. It runs on the device of
        the `logits` that it fills, (max_num_seqs, vocab_size), and must depend on nothing but
        the contents of the batch's tensors.
        """
        self.compute, self.logits, self.max_rows = compute, logits, max_num_seqs
        pinned = logits.device.type == "cuda"
        size = max_num_seqs * (5 + max_blocks)
        # Two, used alternately: one may be on its way while the next step is prepared.
        self._host = [torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)] if pinned else []
        self._arrived = torch.zeros(size, dtype=torch.int64, device=logits.device)
        # What the graphs read: token ids, where in the pool newer ones are, positions, slots,
        # context lengths; and block tables.
        self._fields = self._arrived.new_zeros(5, max_num_seqs)
        self._tables = self._arrived.new_zeros(max_num_seqs, max_blocks)
        self._query_start = torch.arange(max_num_seqs + 1, device=logits.device)
        self._stream = torch.cuda.Stream() if pinned else None  # to record on
        self._replays: dict[int, Callable[[], None]] = {}  # by rows
        self._pool: Any = None  # of memory: graphs never run at once, so one serves them all

    def run(self, batch: DeviceBatch) -> torch.Tensor:
        """batch: decodes only, on the CPU -> logits (S, vocab_size), until the next call."""
        rows = self.rows_for(batch.num_decodes)
        self._fill(batch, rows)
        if rows in self._replays:
            self._replays[rows]()
        else:
            step = self._step(rows)
            self._warm_up(step)
            self._replays[rows] = self._record(step)
        return self.logits[: batch.num_decodes]

    def rows_for(self, num_decodes: int) -> int:
        """The size of the graph: 1, 2, 4 or a multiple of 8, at most max_num_seqs."""
        rows = -(-num_decodes // 8) * 8 if num_decodes > 4 else 1 << (num_decodes - 1).bit_length()
        return min(rows, self.max_rows)

    def _fill(self, batch: DeviceBatch, rows: int) -> None:
        """Put the batch, padded to `rows`, where the graphs read it; sent in one piece."""
        self._host.reverse()
        self._sent.reverse()
        if self._sent:
            self._sent[0].synchronize()  # the copy of two steps ago must have left this buffer
        n, width = batch.block_tables.shape  # of this step: most of a long table is not in use
        end = rows * (5 + width)
        host, arrived = self._host[0][:end], self._arrived[:end]
        fields, tables = host[: 5 * rows].view(5, rows), host[5 * rows :].view(rows, width)
        fields[:, n:] = torch.tensor([[0], [-1], [0], [-1], [0]])
        fields[0, :n], fields[1, :n] = batch.token_ids, batch.from_rows
        fields[2, :n], fields[3, :n] = batch.positions, batch.slot_mapping
        fields[4, :n] = batch.context_lens
        tables[:n] = batch.block_tables
        arrived.copy_(host, non_blocking=True)
        if self._sent:
            self._sent[0].record()
        self._fields[:, :rows] = arrived[: 5 * rows].view(5, rows)
        self._tables[:rows, :width] = arrived[5 * rows :].view(rows, width)

    def _step(self, rows: int) -> Callable[[], None]:
        token_ids, from_rows, positions, slot_mapping, context_lens = self._fields[:, :rows]
        nothing = np.empty(0, dtype=np.int64)  # a graph cannot ask the host
        batch = DeviceBatch(
            token_ids, positions, slot_mapping, self._tables[:rows], context_lens,
            query_start=self._query_start[: rows + 1], num_decodes=rows,
            context_lens_host=nothing, query_start_host=nothing, from_rows=from_rows,
        )  # fmt: skip
        return lambda: self.compute(batch, self.logits[:rows])

    def _warm_up(self, step: Callable[[], None]) -> None:
        """Run the step itself on the stream that will record it, so that everything is compiled
        and set up before the recording."""
        if self._stream is None:
            return step()
        now = torch.cuda.current_stream()
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            step()
        now.wait_stream(self._stream)

    def _record(self, step: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: calls from other threads must not break the recording.
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with torch.inference_mode(False), recording, torch.inference_mode():
            step()
        self._pool = graph.pool()
        return graph.replay
