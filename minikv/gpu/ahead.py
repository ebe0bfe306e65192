"""Running ahead: launch the next step before the last one's tokens have come back.

A GPU works through what it is given while the host goes on. If the host asked for the
tokens of a step before it prepared the next, the GPU would stand still meanwhile:

    host    plan 1 │ plan 2 │ read 1, plan 3 │ read 2, plan 4 │
    GPU            │ step 1 │ step 2         │ step 3         │

To plan a step only how many tokens there are matters. So a token whose id is not known yet
stands in `Sequence.token_ids` as -1 - row, the row of the last step that samples it, and the
ids themselves go from one step to the next on the device. What the host learns too late is
that a token ended its sequence: that sequence has been given one token more, which is thrown
away.
"""

from collections.abc import Callable

import torch


class TokenRelay:
    """Hands the sampled token ids of one step to the next one, and to the host."""

    def __init__(self, max_num_seqs: int, device: torch.device):
        pinned = device.type == "cuda"  # or a copy could not go on beside the host
        self._newest = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        # Two, in turns: one step is read while the next one is on its way.
        self._host = [torch.zeros(max_num_seqs, dtype=torch.int64, pin_memory=pinned) for _ in "ab"]

    def send(self, token_ids: torch.Tensor | list[int]) -> Callable[[], list[int]]:
        """Take the ids of a step, one a row; returns the call that waits for them."""
        token_ids = torch.as_tensor(token_ids)
        newest = self._newest[: len(token_ids)]
        newest.copy_(token_ids, non_blocking=True)
        self._host.reverse()
        host = self._host[0][: len(token_ids)]
        host.copy_(newest, non_blocking=True)
        if self._newest.device.type != "cuda":
            return host.tolist
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> list[int]:
            arrived.synchronize()
            return host.tolist()

        return wait

    def resolve(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids (T,) of a step, on the device, with the newest in place of -1 - row."""
        rows = (-1 - token_ids).clamp(min=0)
        return torch.where(token_ids < 0, self._newest.index_select(0, rows), token_ids)
