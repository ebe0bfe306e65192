"""Decode steps as CUDA graphs: recorded once, then replayed with other contents.

A decode step of a small batch is some hundred short kernels. Started one by one from Python
they take longer to start than to run; a graph starts all of them by one call. What is
recorded are addresses and sizes, so a graph reads its batch from buffers that never move,
and there is one graph for each size of batch:

    batch of 5 -> the graph for 8 -> rows 0 1 2 3 4 and three of padding

A row of padding writes no K and V (slot -1) and attends to nothing (context length 0).
"""

from collections.abc import Callable

import torch

from minikv.batch import Batch


class DecodeGraphs:
    """Runs batches of decodes through graphs, each recorded when a batch first needs it."""

    def __init__(
        self,
        compute: Callable[[Batch, torch.Tensor], None],
        max_num_seqs: int,
        max_blocks: int,
        logits: torch.Tensor,
    ):
        """compute(batch, logits (S, vocab_size)): the step to record. It runs on the device of
        the `logits` that it fills, (max_num_seqs, vocab_size), and must depend on nothing but
        the contents of the batch's tensors.
        """
        self.compute, self.logits = compute, logits
        self.rows, self.width = max_num_seqs, max_blocks
        pinned = logits.device.type == "cuda"
        size = self.rows * (4 + self.width)
        self._buffer = torch.zeros(size, dtype=torch.int64, device=logits.device)
        # Two, in turns: one may be on its way while the next step is prepared.
        self._host = [torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in "ab"]
        self._sent = [torch.cuda.Event() for _ in "ab"] if pinned else []
        self._replays: dict[int, Callable[[], None]] = {}  # by rows
        self._pool = None  # graphs never run at once: one piece of memory serves them all

    def run(self, batch: Batch) -> torch.Tensor:
        """batch: decodes only, on the CPU -> logits (S, vocab_size), until the next call."""
        rows = self.rows_for(batch.num_decodes)
        self._fill(batch, rows)
        if rows in self._replays:
            self._replays[rows]()
        else:
            step = self._step(rows)
            step()  # now, and compiles whatever has to be
            self._replays[rows] = self._record(step)
        return self.logits[: batch.num_decodes]

    def rows_for(self, num_decodes: int) -> int:
        """The size of the graph: 1, 2, 4 or a multiple of 8, at most max_num_seqs."""
        rows = -(-num_decodes // 8) * 8 if num_decodes > 4 else 1 << (num_decodes - 1).bit_length()
        return min(rows, self.rows)

    def _fill(self, batch: Batch, rows: int) -> None:
        """Put the batch, padded to `rows`, into the buffer that the graphs read."""
        self._host.reverse()
        self._sent.reverse()
        if self._sent:
            self._sent[0].synchronize()  # of two steps ago: has happened long since
        host, n = self._host[0], batch.num_decodes
        fields, tables = self._views(host)
        fields[:, n:rows] = torch.tensor([[0], [0], [-1], [0]])
        fields[0, :n], fields[1, :n] = batch.token_ids, batch.positions
        fields[2, :n], fields[3, :n] = batch.slot_mapping, batch.context_lens
        tables[:n, : batch.block_tables.shape[1]] = batch.block_tables
        end = 4 * self.rows + rows * self.width
        self._buffer[:end].copy_(host[:end], non_blocking=True)
        if self._sent:
            self._sent[0].record()

    def _views(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(4, rows) token ids, positions, slots, context lengths; (rows, width) block tables."""
        fields, tables = buffer.split([4 * self.rows, self.rows * self.width])
        return fields.view(4, self.rows), tables.view(self.rows, self.width)

    def _step(self, rows: int) -> Callable[[], None]:
        fields, tables = self._views(self._buffer)
        token_ids, positions, slot_mapping, context_lens = fields[:, :rows]
        batch = Batch(
            token_ids, positions, slot_mapping, tables[:rows], context_lens,
            query_start=torch.arange(rows + 1, device=self._buffer.device), num_decodes=rows,
            context_lens_host=None, query_start_host=None,  # a graph cannot ask the host
        )  # fmt: skip
        return lambda: self.compute(batch, self.logits[:rows])

    def _record(self, step: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        self._pool = graph.pool()
        return graph.replay
