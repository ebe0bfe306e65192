"""Running states: one matrix in place of a list of tokens, and what an engine makes of it.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("17.1") in the notebook, or in a terminal: python -m minikv check 17.1
"""

import torch

from minikv.states import slots


# ── 17.1 From attention to a state ────────────────────────────────────────────────
def decode(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """One token of each of S sequences: its state fades by e^g; of what it then does not say about
    k, beta is written; and q reads.

    state (S, H, N, D) float32, which is changed; q, k (S, H, N), v (S, H, D), g, beta (S, H)
    -> (S, H, D).

    Worked example, N = D = 1: the state is 4, k = 1, v = 8, e^g = 0.5, beta = 0.75. It fades to 2,
    so 6 is not yet said; 0.75 of it is written, and the state is 6.5. A query of 2 reads 13.
    """
    raise NotImplementedError("Exercise 17.1: decode")


# ── 17.2 A chunk at once ──────────────────────────────────────────────────────────
def chunk_at_once(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """C tokens of one sequence, heads first: what `decode` makes of them one by one, with a number
    of passes over the state that does not grow with C.

    state (H, N, D) float32, which is changed; q, k (H, C, N), v (H, C, D), g, beta (H, C)
    -> (H, C, D).

    Let G_i be the sum of g up to token i, and r_j what token j has written. Then before token i
    writes, S = e^G_i (S_0 + sum over j < i of e^-G_j beta_j k_j r_j^T), so

        r_i + sum over j < i of e^(G_i - G_j) beta_j (k_i . k_j) r_j = v_i - e^G_i S_0^T k_i

    which is one triangular system for all r of the chunk (Yang et al., 2024).
    """
    raise NotImplementedError("Exercise 17.2: chunk_at_once")


class StatePool(slots.StatePool):
    """Counts blocks, and the slots of a memory of states."""

    # ── 17.3 Somebody else's text: broken, fix it ─────────────────────────────────
    def take_slot(self, source: int | None = None) -> int:
        """A slot for a sequence, with a copy of the state in `source`; None: at its start."""
        slot = self._free_slots.pop()
        if source is not None:
            self.memory.copy(source, slot)
        return slot

    # ── 17.3 Somebody else's text: broken, fix it ─────────────────────────────────
    def give_slot(self, slot: int) -> None:
        """The sequence has ended, or is preempted: its slot is free."""
        self.memory.zero(slot)
        self._free_slots.append(slot)

    def plan_copy(self, block_id: int) -> int | None:
        """A slot for the copy that a block will carry when this step has ended. The least recently
        used copy goes for it if need be; None if all others are of this step, too."""
        if len(self.copies) == self.memory.num_copies:
            oldest = next(iter(self.copies), None)
            if oldest is None or oldest in self._planned:
                return None
            self.drop_copy(oldest)
        self.copies[block_id] = self._free_slots.pop()
        self._planned.add(block_id)
        self.memory.counts.made += 1
        return self.copies[block_id]

    def drop_copy(self, block_id: int) -> None:
        """If the block carries a copy, it does no longer."""
        if block_id in self.copies:
            self._free_slots.append(self.copies.pop(block_id))
