"""The newest tokens stay on the device: a pool of their ids, and batches that read from it."""

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from minikv.batch import Batch, BatchBuilder
from minikv.sequence import Sequence


class TokenPool:
    """The token ids of the newest step, by row: on the device, and on their way to the host."""

    def __init__(self, max_num_seqs: int, device: torch.device):
        pinned = device.type == "cuda"  # so that a copy can run while the host continues
        self._newest = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        # Two, used alternately: one step is read while the next one is on its way.
        self._host = [
            torch.zeros(max_num_seqs, dtype=torch.int64, pin_memory=pinned) for _ in range(2)
        ]

    def put(self, token_ids: torch.Tensor | list[int]) -> Callable[[], list[int]]:
        """Keep the ids of a step, one per row; returns the call that waits for them."""
        newest = self._newest[: len(token_ids)]
        newest.copy_(torch.as_tensor(token_ids), non_blocking=True)
        if isinstance(token_ids, list):
            return lambda: token_ids
        self._host.reverse()
        host = self._host[0][: len(token_ids)]
        host.copy_(newest, non_blocking=True)
        if self._newest.device.type != "cuda":
            return host.tolist
        arrived = torch.cuda.Event()
        arrived.record()

        def read() -> list[int]:
            arrived.synchronize()
            return host.tolist()

        return read

    def fill(self, token_ids: torch.Tensor, from_rows: torch.Tensor) -> torch.Tensor:
        """token_ids (T,) with token i replaced by the id in row `from_rows[i]`; -1 leaves it as it
        is. All int64, on the device."""
        newest = self._newest.index_select(0, from_rows.clamp(min=0))
        return torch.where(from_rows < 0, token_ids, newest)


@dataclass(slots=True)
class DeviceBatch(Batch):
    """A batch some of whose token ids are in the pool."""

    from_rows: torch.Tensor  # (T,) the row of the pool that has the id; -1: it is in token_ids

    def to(self, device: torch.device) -> "DeviceBatch":
        """The same batch on the device, sent in one piece, not waited for."""
        if device.type == "cpu":
            return self
        tensors = {
            field.name: value
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        packed = torch.cat([tensor.flatten() for tensor in tensors.values()]).pin_memory()
        sent = packed.to(device, non_blocking=True)
        pieces = sent.split([tensor.numel() for tensor in tensors.values()])
        shapes = [tensor.shape for tensor in tensors.values()]
        views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        return replace(self, **dict(zip(tensors, views, strict=True)))


class DeviceBuilder(BatchBuilder):
    """Builds batches for sequences whose newest token may be in the pool."""

    def ids_of_decodes(self, decodes: Seq[Sequence]) -> list[int]:
        return [one.token_ids[one.num_computed] if one.device_row is None else 0 for one in decodes]

    def build(self, sequences: Seq[Sequence], num_tokens: Seq[int], slots: Seq[int]) -> DeviceBatch:
        batch = super().build(sequences, num_tokens, slots)
        rows = np.full(len(batch.token_ids), -1, dtype=np.int64)
        rows[: batch.num_decodes] = [
            -1 if s.device_row is None else s.device_row for s in sequences[: batch.num_decodes]
        ]
        parts = {field.name: getattr(batch, field.name) for field in fields(Batch)}
        return DeviceBatch(**parts, from_rows=torch.from_numpy(rows))
