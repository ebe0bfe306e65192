"""Running states: one matrix in place of a list of tokens, and what an engine makes of it.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("17.1") in the notebook, or in a terminal: python -m minikv check 17.1
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from minikv.course.chapters.ch17_running_states.published import MODELS, Layers
from minikv.states import slots
from minikv.states.delta import convolve, prefill


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

    which is one triangular system for all r of the chunk (Yang et al., 2024). A query reads after
    its own token has written: there the sum is over j <= i.
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
        """Its sequence has ended, or its copy is dropped: the slot is free."""
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

    # ── 17.3 Somebody else's text: broken, fix it ─────────────────────────────────
    def drop_copy(self, block_id: int) -> None:
        """If the block carries a copy, it does no longer."""
        if block_id in self.copies:
            self._free_slots.append(self.copies.pop(block_id))


class Tried(NamedTuple):
    """What a layer would write for them, T tokens."""

    seen: torch.Tensor  # (W - 1 + T, C): the convolution's inputs, those before them included
    written: tuple[torch.Tensor, ...]  # q, k (T, H, N), v (T, H, D), g, beta (T, H)


# ── 17.4 Taking back drafts ───────────────────────────────────────────────────────
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
    raise NotImplementedError("Exercise 17.4: try_tokens")


# ── 17.4 Taking back drafts ───────────────────────────────────────────────────────
def write_tokens(
    state: torch.Tensor, last: torch.Tensor, tried: Tried, first: int, end: int
) -> None:
    """Let tokens `first` to `end` of those that were tried be in the state and in the last inputs,
    which hold what was before `first`, and are changed.

    Worked example: 3 tokens were tried, the decode and one draft are right. After
    write_tokens(state, last, tried, 0, 2) both tensors are as if the third had never been there.
    """
    raise NotImplementedError("Exercise 17.4: write_tokens")


# ── 17.5 Which copies to keep ─────────────────────────────────────────────────────
def copies_due(
    start: int, junction: int, num_tokens: int, block_size: int, interval: int = 0
) -> dict[int, bool]:
    """Where the state of a sequence is copied while its prompt is computed.

    start: the tokens that it need not compute, because a copy was found behind them; junction:
    where its prompt parts from one that the prefix cache has, `start` or more. Both are whole
    blocks. num_tokens: of the prompt. Returns positions in tokens, all of them ends of full blocks
    behind `start`. True is a copy that stays, because others may come who share these tokens: at
    the junction, and at multiples of `interval` (rounded down to blocks; 0: none). False is the
    last state, at the end of the last full block: it goes once the sequence has a later copy.

    Worked example, blocks of 4: a prompt of 23 tokens parts from another one after 12, and no copy
    is there: {12: True, 20: False}. The next one that shares these 12 starts there: {20: False}.
    """
    raise NotImplementedError("Exercise 17.5: copies_due")


# ── 17.6 What a state costs ───────────────────────────────────────────────────────
def states_on_paper() -> dict[str, float]:
    """What states cost, and what a hit is worth, from four config files: see `MODELS`.
    Matrices are float32; everything else has 2 bytes a number. The last 3 inputs of each channel
    count. Nothing is rounded, but "block".

    "Qwen3-Next", "Qwen3.5 4B", "Kimi Linear", "Nemotron-H 8B": at how many tokens does one
        attention layer of this model keep as many bytes as one of its linear layers?

    The others are of Qwen3.5 4B, whose 32 layers are linear or attend.

    "block": vLLM makes blocks so large that what one attention layer keeps of a block is at least
        as large as the state of one linear layer, in steps of 16 tokens. How many tokens is that?
    "interval": with a copy of all states every so many tokens, copies take as many bytes as K and V
        of all layers that attend.
    "short": the cache holds a prefix of 256 tokens: its K and V, and one copy. How many tokens does
        a hit save for each MiB (2^20 bytes) that is held?
    "long": the same for a prefix of 65,536 tokens.
    "attention": the same for a prefix of any length, if all 32 layers attended.
    """
    raise NotImplementedError("Exercise 17.6: states_on_paper")
