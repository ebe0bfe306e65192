"""A step that verifies drafts: k + 1 rows for a sequence with k drafts, over one block table.

    positions      [ 8 | 9 10 11 | 5 ]        the sequence at 8 has 3 drafts, the other has none
    context_lens   [ 9, 10, 11, 12, 6 ]
    block_tables   [[2, 7, 4], … three times more …, [5, 3, 0]]

Every layer writes the K and V of all rows before any row attends, so the row of a draft finds those
of the drafts before it where the table says. For attention these are decodes like all others: every
backend can compute them, with the same kernel and the same order of sums as without speculation.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch

from minikv.batch import Batch
from minikv.blocks import blocks_for
from minikv.runner import Runner
from minikv.scheduler import Plan
from minikv.sequence import Sequence


@torch.inference_mode()
def run_with_drafts(
    runner: Runner, plan: Plan, drafts: Seq[Seq[int]]
) -> tuple[list[int], list[list[int]]]:
    """Compute a plan, and after each of its decodes the drafts, whose blocks are reserved. Returns
    what `Runner.run` returns, and for each decode the target's own tokens after its drafts."""
    runner.move_blocks(plan)
    started = perf_counter()
    batch = runner.builder.build(plan.sequences, plan.num_tokens, plan.slots)
    logits = runner.compute(expand(batch, plan.sequences, drafts, runner.builder.block_size))
    params, draws = [], []
    for sequence, ids in zip(plan.sequences, drafts, strict=False):
        for ahead in range(len(ids) + 1):
            params.append(sequence.request.params)
            draws.append(sequence.draw(ahead=ahead))
    rows = as_list(runner.sampler(logits[: len(draws)], params, draws))
    token_ids, after, row = [], [], 0
    for ids in drafts:
        token_ids.append(rows[row])
        after.append(rows[row + 1 : row + 1 + len(ids)])
        row += 1 + len(ids)
    if plan.num_decodes < len(plan.sequences):
        first = plan.num_decodes
        chunks = replace(
            plan,
            num_decodes=0,
            sequences=plan.sequences[first:],
            num_tokens=plan.num_tokens[first:],
        )
        token_ids += as_list(runner.sample(logits[row:], chunks))
    runner.seconds += perf_counter() - started
    runner.num_tokens += sum(plan.num_tokens) + row - len(drafts)
    return token_ids, after


def expand(batch: Batch, sequences: Seq[Sequence], drafts: Seq[Seq[int]], block_size: int) -> Batch:
    """The batch with a row for each draft, behind the row of its sequence: `drafts[i]` belong to
    the decode at i."""
    num_decodes, num_seqs = batch.num_decodes, len(batch.context_lens_host)
    drafts = [*drafts, *[()] * (num_decodes - len(drafts))]  # none for a chunk of one token
    counts = np.ones(num_seqs, dtype=np.int64)  # rows of each sequence
    counts[:num_decodes] += [len(ids) for ids in drafts]
    num_rows = int(counts.sum())
    which = np.repeat(np.arange(num_seqs), counts)
    ahead = np.arange(num_rows) - np.repeat(counts.cumsum() - counts, counts)
    context_lens = batch.context_lens_host[which] + ahead
    decodes = num_rows - (num_seqs - num_decodes)  # rows of one query

    width = blocks_for(int(context_lens.max()), block_size)
    tables = np.zeros((num_seqs, width), dtype=np.int64)
    tables[:, : batch.block_tables.shape[1]] = batch.block_tables.numpy()
    for row, ids in enumerate(drafts):
        if ids:
            block_ids = sequences[row].table.block_ids
            tables[row, : len(block_ids)] = block_ids
    tables = tables[which]

    old_ids = batch.token_ids.tolist()
    token_ids = [one for token, ids in zip(old_ids, drafts, strict=False) for one in (token, *ids)]
    positions = context_lens[:decodes] - 1
    blocks = tables[np.arange(decodes), positions // block_size]
    slots = blocks * block_size + positions % block_size
    chunks = batch.query_start_host[num_decodes:] + (decodes - num_decodes)
    query_start = np.concatenate([np.arange(decodes), chunks])

    def joined(first: np.ndarray, old: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([first, old[num_decodes:].numpy()]))

    return Batch(
        token_ids=joined(np.array(token_ids, dtype=np.int64), batch.token_ids),
        positions=joined(positions, batch.positions),
        slot_mapping=joined(slots, batch.slot_mapping),
        block_tables=torch.from_numpy(tables),
        context_lens=torch.from_numpy(context_lens), context_lens_host=context_lens,
        query_start=torch.from_numpy(query_start), query_start_host=query_start,
        num_decodes=decodes,
    )  # fmt: skip


def as_list(token_ids: torch.Tensor | list[int]) -> list[int]:
    return token_ids.tolist() if isinstance(token_ids, torch.Tensor) else token_ids
