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
from itertools import accumulate
from time import perf_counter

import numpy as np
import torch

from minikv.batch import Batch, BatchBuilder
from minikv.blocks import blocks_for
from minikv.runner import Runner
from minikv.scheduler import Plan


@torch.inference_mode()
def run_with_drafts(
    runner: Runner, plan: Plan, drafts: Seq[Seq[int]]
) -> tuple[list[int], list[list[int]]]:
    """Compute a plan, and after each of its decodes the drafts, whose blocks are reserved. Returns
    what `Runner.run` returns, and for each decode the target's own tokens after its drafts. Raises
    ValueError if the sampler chooses more tokens, or fewer, than there are rows."""
    runner.move_blocks(plan)
    started = perf_counter()
    logits = runner.compute(build(runner.builder, plan, drafts))
    params, draws = [], []
    for sequence, ids in zip(plan.sequences, drafts, strict=False):
        for ahead in range(len(ids) + 1):
            params.append(sequence.request.params.after(sequence, ids[:ahead]))
            draws.append(sequence.draw(ahead=ahead))
    rows = runner.as_ids(runner.sampler(logits[: len(draws)], params, draws))
    if len(rows) != len(draws):
        raise ValueError(f"sampler: must choose {len(draws)} tokens, has chosen {rows!r}")
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
        token_ids += runner.as_ids(runner.sample(logits[row:], chunks))
    runner.seconds += perf_counter() - started
    runner.num_tokens += sum(plan.num_tokens) + row - len(drafts)
    return token_ids, after


def build(builder: BatchBuilder, plan: Plan, drafts: Seq[Seq[int]]) -> Batch:
    """The plan's batch, with a row for each draft behind the row of its sequence: `drafts[i]`
    belong to the decode at i."""
    size = builder.block_size
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    counts: list[int] = []  # tokens of each row
    of_row: list[int] = []  # its sequence
    for i, (sequence, count) in enumerate(zip(plan.sequences, plan.num_tokens, strict=True)):
        start, block_ids = sequence.num_computed, sequence.table.block_ids
        ids = drafts[i] if i < len(drafts) else ()
        token_ids += sequence.token_ids[start : start + count]
        token_ids += ids
        counts += [count] + [1] * len(ids)
        of_row += [i] * (1 + len(ids))
        places = range(start, start + count + len(ids))
        positions += places
        slots += [block_ids[at // size] * size + at % size for at in places]
    query_start = np.array([0, *accumulate(counts)], dtype=np.int64)
    flat = np.array([token_ids, positions, slots], dtype=np.int64)  # (3, T)
    context_lens = flat[1, query_start[1:] - 1] + 1
    starts = np.array([sequence.num_computed for sequence in plan.sequences])
    tables = builder.tables(plan.sequences, starts, np.array(plan.slots))
    tables = tables[:, : blocks_for(max(positions) + 1, size)]
    tokens, at_positions, to_slots = map(torch.from_numpy, flat)
    batch = Batch(
        token_ids=tokens, positions=at_positions, slot_mapping=to_slots,
        block_tables=torch.from_numpy(tables.take(of_row, 0)),
        context_lens=torch.from_numpy(context_lens), context_lens_host=context_lens,
        query_start=torch.from_numpy(query_start), query_start_host=query_start,
        num_decodes=next((row for row, count in enumerate(counts) if count > 1), len(counts)),
    )  # fmt: skip
    return builder.placed(batch, plan.sequences, plan.num_tokens, drafts)
