"""Beam search as forks and releases: every step, each live beam forks into its best
children, and a beam that left no child gives its blocks back.

Chapter 05. Scores and the rule for stopping are those of `transformers`
`generate(num_beams=…, early_stopping=False)`.
"""

from typing import TYPE_CHECKING

import torch

from minikv.blocks import OutOfBlocks
from minikv.outputs import BeamOutput
from minikv.sampling import SamplingParams
from minikv.sequence import Request, Sequence

if TYPE_CHECKING:
    from minikv.engine import Engine


def beam_search(
    engine: "Engine", prompt_ids: list[int], width: int, max_tokens: int, length_penalty: float
) -> list[BeamOutput]:
    """The `width` best continuations of at most `max_tokens` tokens, best first.

    Runs to its end on the engine's pool, beside requests that are waiting or running.
    Raises OutOfBlocks, holding nothing, when the blocks that it may need cannot be had now.
    """
    _make_room(engine, len(prompt_ids), width, max_tokens)
    request = Request(-1, prompt_ids, SamplingParams(max_tokens=max_tokens))
    root = request.sequences[0]
    root.table = engine.block_table(engine.pool, engine.config.block_size)
    beams, scores = [root], torch.zeros(1, dtype=torch.float64)
    finished: list[tuple[float, list[int]]] = []  # (score, tokens), best first
    ends = set(engine.lm.config.eos_ids)
    try:
        while beams and not _decided(finished, scores, beams, width, length_penalty):
            log_probs = log_probs_of(engine, beams).double().cpu() + scores[:, None]  # (beams, V)
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
                        finished.append((score / length**length_penalty, tokens))
                elif len(chosen) < width:
                    chosen.append((row, token_id))
                    chosen_scores.append(score)
            beams = next_beams(beams, chosen)
            scores = torch.tensor(chosen_scores, dtype=torch.float64)
            finished = sorted(finished, key=lambda one: -one[0])[:width]
    finally:
        for beam in beams:
            beam.table.release()
    decode = engine.lm.decode if engine.lm.tokenizer is not None else lambda token_ids: ""
    return [BeamOutput(tokens, decode(tokens), score) for score, tokens in finished]


def next_beams(beams: list[Sequence], chosen: list[tuple[int, int]]) -> list[Sequence]:
    """One new beam for each (index of its parent in `beams`, next token), in that order.

    A parent may have several children, or none. All parents' tables are released, or handed on
    to a child, once the children hold what they need: what is left without a holder is free.
    """
    children = []
    for index, (parent, token_id) in enumerate(chosen):
        child = beams[parent].fork(index)
        child.token_ids.append(token_id)
        children.append(child)
    for parent in beams:
        parent.table.release()
    return children


def _make_room(engine: "Engine", num_prompt: int, width: int, max_tokens: int) -> None:
    """Evict until even beams that share no more than the prompt's full blocks would fit."""
    size = engine.config.block_size
    shared = num_prompt // size
    needed = shared + width * (-(-(num_prompt + max_tokens) // size) - shared)
    short = needed - engine.pool.num_free
    if short > 0 and engine.cache is not None:
        short -= engine.cache.evict(short)
    if short > 0:
        raise OutOfBlocks(needed, engine.pool.num_free)


def _decided(
    finished: list, scores: torch.Tensor, beams: list[Sequence], width: int, length_penalty: float
) -> bool:
    """Whether no live beam, ended here, would beat the worst of `width` finished ones."""
    if len(finished) < width or beams[0].num_output == 0:
        return False
    return float(scores[0]) / beams[0].num_output ** length_penalty <= finished[-1][0]


def log_probs_of(engine: "Engine", beams: list[Sequence]) -> torch.Tensor:
    """Compute what the beams have not computed; log probabilities of what follows: (beams, V)."""
    while True:
        counts, slots, copies = [], [], []
        for beam in beams:
            left = len(beam.token_ids) - beam.num_computed
            count = min(left, engine.config.max_batch_tokens)
            beam.table.grow(beam.num_computed + count - beam.table.num_tokens)
            slot, copy = beam.table.writable_slot(beam.num_computed)
            beam.table_version += 1
            counts.append(count)
            slots.append(slot)
            copies += [copy] if copy is not None else []
        engine.copy_blocks(copies)
        logits = engine.forward(beams, counts, slots)
        for beam, count in zip(beams, counts, strict=True):
            beam.num_computed += count
        if beams[0].num_computed == len(beams[0].token_ids):
            return logits.float().log_softmax(-1)
