"""Text without end in constant memory, and several sequences over one prompt."""

from collections.abc import Sequence

import torch

from minikv.errors import require_int
from minikv.language_model import LanguageModel
from minikv.ring.cache import RingCache
from minikv.ring.cells import ALL, Cells
from minikv.ring.defrag import defragment


def greedy(logits: torch.Tensor) -> int:
    """The likeliest token."""
    return int(logits.argmax())


def context_shift(cache: Cells, n_keep: int = 0, seq: int = 0, n_discard: int | None = None) -> int:
    """Make room at the end of a sequence: keep its first `n_keep` positions, discard the next
    `n_discard` (half of the rest, if None), and move what remains down. Returns `n_discard`.

    K moves by turning, so nothing is computed again. The tokens that remain have seen those that
    go: their K and V stay as they were, and differ from what a fresh start would compute.

    Raises ValueError, changing nothing, if fewer than two positions follow the first `n_keep` (also
    when `n_discard` is given), if `n_discard` is not from 1 to their number, or if a cell to be
    moved is shared with another sequence.
    """
    end = cache.seq_pos_max(seq) + 1
    require_int("n_keep", n_keep, 0)
    left = end - n_keep
    if left < 2:
        raise ValueError(f"n_keep: {n_keep} of {end} positions leave too little to discard half of")
    n_discard = left // 2 if n_discard is None else require_int("n_discard", n_discard, 1, left)
    cache.drop(seq, n_keep, n_keep + n_discard)
    return n_discard


def generate_with_ring(
    lm: LanguageModel,
    cache: RingCache,
    prompt_ids: Sequence[int],
    max_tokens: int,
    n_keep: int = 0,
    seq: int = 0,
) -> list[int]:
    """Continue sequence `seq` by `prompt_ids` and exactly `max_tokens` new tokens; returns the
    latter.

    The memory never grows: when the ring is full, or the sequence is at the model's last position,
    `context_shift` makes room, with `n_keep`. Up to the first shift the tokens are those of
    `lm.generate_naively`.

    Raises ValueError, changing nothing, if the prompt does not fit, or if a shift will be needed
    that `n_keep` makes impossible.
    """
    require_int("max_tokens", max_tokens, 1)
    start = cache.seq_pos_max(seq) + 1
    room = min(cache.num_free, lm.config.max_context - start)
    if not 1 <= len(prompt_ids) <= room:
        raise ValueError(
            f"prompt_ids: must be 1 to {room} tokens, the free cells, was "
            f"{len(prompt_ids)}; take more cells, or remove what is not needed"
        )
    if len(prompt_ids) + max_tokens - 1 > room:
        _require_can_shift(cache, seq, start + room, n_keep)
    _make_run(cache, len(prompt_ids))
    new = [greedy(cache.append(lm, prompt_ids, seq)[-1])]
    while len(new) < max_tokens:
        make_room(lm, cache, [seq], n_keep)
        new.append(greedy(cache.append(lm, new[-1:], seq)[-1]))
    return new


def _require_can_shift(cache: Cells, seq: int, length: int, n_keep: int) -> None:
    """Raise ValueError unless a shift of a sequence of `length` positions is possible, and frees
    cells."""
    pairs = zip(cache.positions, cache.sequences, strict=True)
    shared = max((p + 1 for p, owners in pairs if seq in owners and len(owners) > 1), default=0)
    if not shared <= require_int("n_keep", n_keep, 0) <= length - 2:
        raise ValueError(
            f"n_keep: must be at least {shared}, the positions shared with other sequences, and "
            f"at most {length - 2}, 2 less than fit, was {n_keep}; take more cells"
        )


def _make_run(cache: RingCache, num_tokens: int) -> None:
    """Defragment if a batch of `num_tokens` needs a run of cells and there is none."""
    if cache.contiguous and cache.longest_run < num_tokens:
        defragment(cache)


def make_room(lm: LanguageModel, cache: RingCache, seqs: Sequence[int], n_keep: int) -> int:
    """Make room for one more token of each of `seqs`; returns how many shifts it took.

    A sequence at the model's last position is shifted. Then, while there are too few free cells,
    the longest sequence is shifted.
    """
    num_shifted = 0
    for seq in seqs:
        if cache.seq_pos_max(seq) + 1 >= lm.config.max_context:
            context_shift(cache, n_keep, seq)
            num_shifted += 1
    while cache.num_free < len(seqs):
        context_shift(cache, n_keep, max(seqs, key=cache.seq_pos_max))
        num_shifted += 1
    _make_run(cache, len(seqs))
    return num_shifted


def generate_in_parallel(
    lm: LanguageModel,
    cache: RingCache,
    shared_ids: Sequence[int],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> list[list[int]]:
    """Continue `shared_ids + prompts[i]` for every i, side by side in one ring.

    The shared tokens are computed once, by sequence 0, and `seq_cp` shares them with the others. A
    context shift keeps them. Returns the new tokens of each prompt.

    The cache must be empty, and is emptied if anything goes wrong. Raises ValueError if the tokens
    do not fit; a prompt counts as at least two tokens.
    """
    require_int("max_tokens", max_tokens, 1)
    if cache.num_used > 0:
        raise ValueError(f"cache: has {cache.num_used} used cells; take an empty one")
    if not shared_ids or not prompts or not all(prompts):
        raise ValueError("prompts: give at least one token to share, and one for each prompt")
    needed = len(shared_ids) + sum(max(2, len(prompt)) for prompt in prompts)
    if needed > cache.num_cells:
        raise ValueError(f"prompts: need {needed} cells, the ring has {cache.num_cells}")
    seqs, first = range(len(prompts)), len(shared_ids)
    try:
        cache.append(lm, shared_ids, 0)
        for seq in seqs[1:]:
            cache.seq_cp(0, seq)
        batch = [(token, first + i, seq) for seq in seqs for i, token in enumerate(prompts[seq])]
        logits = cache.decode(lm, *map(list, zip(*batch, strict=True)))
        ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
        new = [[greedy(row)] for row in logits[ends]]
        for _ in range(max_tokens - 1):
            make_room(lm, cache, seqs, first)
            positions = [cache.seq_pos_max(seq) + 1 for seq in seqs]
            logits = cache.decode(lm, [tokens[-1] for tokens in new], positions, list(seqs))
            for tokens, row in zip(new, logits, strict=True):
                tokens.append(greedy(row))
    except BaseException:
        cache.seq_rm(ALL)
        raise
    return new
