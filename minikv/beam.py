"""Beam search as forks and releases: every step, each live beam forks into its best
children, and a beam that left no child gives its blocks back.

Chapter 05. Scores and the rule for stopping are those of `transformers`
`generate(num_beams=…, early_stopping=False)`.
"""

import torch

from minikv.blocks import blocks_for
from minikv.language_model import LanguageModel
from minikv.outputs import BeamOutput
from minikv.paged import KVStore
from minikv.runner import Runner
from minikv.scheduler import Scheduler
from minikv.sequence import Request, Sequence


def beam_search(
    lm: LanguageModel, scheduler: Scheduler, runner: Runner, request: Request, width: int,
    penalty: float,
) -> list[BeamOutput]:  # fmt: skip
    """The `width` best continuations of a request's prompt, best first. `penalty` is the power of
    the length that a score is divided by.

    Runs to its end on the scheduler's pool, beside requests that are waiting or running. The pool
    must have `blocks_needed` free blocks.
    """
    root, max_tokens = request.sequences[0], request.params.max_tokens
    root.table = scheduler.block_table(scheduler.pool, scheduler.config.block_size)
    beams, scores = [root], torch.zeros(1, dtype=torch.float64)
    finished: list[tuple[float, list[int]]] = []  # (score, tokens), best first
    ends = set(lm.config.eos_ids)
    while beams and not _decided(finished, float(scores[0]), beams[0].num_output, width, penalty):
        log_probs = log_probs_of(runner, beams).double().cpu() + scores[:, None]  # (beams, V)
        count = min(width * max(2, 1 + len(ends)), log_probs.numel())
        best, flat = log_probs.flatten().topk(count)
        chosen: list[tuple[int, int]] = []  # (which beam, its next token)
        chosen_scores = []
        for rank, (score, index) in enumerate(zip(best.tolist(), flat.tolist(), strict=True)):
            row, token_id = divmod(index, log_probs.shape[1])
            length = beams[row].num_output + 1
            if token_id in ends or length == max_tokens:
                if rank < width:
                    tokens = [*beams[row].output_ids, token_id]
                    finished.append((score / length**penalty, tokens))
            elif len(chosen) < width:
                chosen.append((row, token_id))
                chosen_scores.append(score)
        beams = next_beams(beams, chosen)
        scores = torch.tensor(chosen_scores, dtype=torch.float64)
        finished = sorted(finished, key=lambda one: -one[0])[:width]
    for beam in beams:
        beam.table.release()
    decode = lm.decode if lm.tokenizer is not None else lambda tokens: ""
    return [BeamOutput(tokens, decode(tokens), score) for score, tokens in finished]


def next_beams(beams: list[Sequence], chosen: list[tuple[int, int]]) -> list[Sequence]:
    """Return one new beam for each (index of its parent in `beams`, next token), in that order.

    A new beam is a fork of its parent with the token at the end of `token_ids`. The token's K and
    V are not computed yet, so `num_computed` is the parent's. `Sequence.fork` copies the token ids
    and takes an index, which may be any.

    A parent may have several children, or none; `chosen` may be empty. Once the children hold what
    they need, all parents' tables are released or handed on to a child. Then blocks without a
    holder are free, and no block of a new beam was ever free in between.
    """
    children = []
    for index, (row, token_id) in enumerate(chosen):
        child = beams[row].fork(index)
        child.token_ids.append(token_id)
        children.append(child)
    for parent in beams:
        parent.table.release()
    return children


def blocks_needed(request: Request, width: int, block_size: int) -> int:
    """How many blocks a search needs if its beams share no more than the prompt's full blocks."""
    shared = len(request.prompt_ids) // block_size
    return shared + width * (blocks_for(request.max_length, block_size) - shared)


def make_room(scheduler: Scheduler, store: KVStore, needed: int) -> bool:
    """Evict until `needed` blocks are free. Returns False if that is not enough."""
    short = needed - store.num_free(scheduler.pool)
    if short > 0 and scheduler.cache is not None:
        short -= scheduler.cache.evict(short)
    return short <= 0


def _decided(finished: list, score: float, length: int, width: int, penalty: float) -> bool:
    """Whether no live beam, the best of which has this score and so many new tokens, would beat
    the worst of `width` finished ones, if it ended here."""
    if len(finished) < width or length == 0:
        return False
    return score / length**penalty <= finished[-1][0]


def log_probs_of(runner: Runner, beams: list[Sequence]) -> torch.Tensor:
    """Compute what the beams have not computed, in as many steps as it takes; log probabilities
    of the token that follows each: (beams, vocab_size)."""
    while True:
        counts, slots, copies = [], [], []
        for beam in beams:
            left = len(beam.token_ids) - beam.num_computed
            count = min(left, runner.max_batch_tokens)
            beam.table.grow(beam.num_computed + count - beam.table.num_tokens)
            slot, copy = beam.table.writable_slot(beam.num_computed)
            beam.table_version += 1
            counts.append(count)
            slots.append(slot)
            copies += [copy] if copy is not None else []
        runner.attention.copy_blocks(copies)
        logits = runner.forward(beams, counts, slots)
        for beam, count in zip(beams, counts, strict=True):
            beam.num_computed += count
        if beams[0].num_computed == len(beams[0].token_ids):
            return logits.float().log_softmax(-1)
