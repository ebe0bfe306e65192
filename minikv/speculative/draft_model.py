"""A small model that drafts, with K and V of its own under the target's block tables.

    block_tables     [5, 3, 8]                     one table for both
    target's store   … 3 … 5 … 8 …                 two stores, addressed by the same block ids
    draft's store    … 3 … 5 … 8 … | scratch       drafts that go beyond the table's last block

So whatever happens to the target's blocks is right for the draft model, too: they are shared, found
again by a prefix hit, given back. Of each block it is noted how many tokens the draft model has
read since the block was last free. Whatever comes into a block in another way (copy-on-write, a
swap, a tier, a session, another engine) is not copied here: the draft model reads these tokens
again, as it reads a prompt. That is cheap, for it is small.

The draft model's own drafts are never noted as read, so a wrong one is simply written over.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from minikv.backend import MakeBackend
from minikv.batch import Batch
from minikv.blocks import BlockPool, blocks_for
from minikv.checkpoint import load
from minikv.config import EngineConfig
from minikv.events import Listener
from minikv.language_model import LanguageModel
from minikv.paged import KVStore
from minikv.runner import Runner
from minikv.sampling import Sampler
from minikv.sequence import Sequence
from minikv.speculative.drafters import Drafter, Proposal, in_a_row

DRAFT_MODELS = {"tinypy": Path(__file__).parents[1] / "models" / "tinypy-draft"}


def draft_model_of(lm: LanguageModel, config: EngineConfig) -> LanguageModel:
    """The model that `config.draft_model` names. Raises ValueError if it cannot draft for `lm`, or
    is not in float32 on a CPU."""
    named = config.draft_model or DRAFT_MODELS.get(lm.name)
    if named is None:
        raise ValueError(
            f"speculative: no model that drafts for {lm.name} is bundled; give one as draft_model, "
            "or use 'suffix'"
        )
    draft = named if isinstance(named, LanguageModel) else load(named)
    if draft.config.vocab_size != lm.config.vocab_size:
        raise ValueError(
            f"draft_model: must have the target's tokens, {lm.config.vocab_size} of them; "
            f"{draft.name} has {draft.config.vocab_size}"
        )
    _require_same_tokens(draft, lm)
    if draft.config.keeps_states:
        raise ValueError(
            f"draft_model: what it drafts is forgotten again, and {draft.name} has layers with a "
            "state, which cannot be cut; use a model whose layers all attend, or 'suffix'"
        )
    if draft.device.type != "cpu" or draft.dtype != torch.float32:
        raise ValueError(
            f"draft_model: must be in float32 on a CPU, was {draft.dtype} on {draft.device}"
        )
    return draft


def _require_same_tokens(draft: LanguageModel, lm: LanguageModel) -> None:
    """Raises ValueError if an id is one token in one model and another in the other. Not known
    where a model has no tokenizer; a token that only one of them has cannot be drafted wrongly."""
    if draft.tokenizer is None or lm.tokenizer is None:
        return
    theirs, ours = (
        {token_id: token for token, token_id in one.get_vocab().items()}
        for one in (draft.tokenizer, lm.tokenizer)
    )
    differing = [one for one in theirs.keys() & ours.keys() if theirs[one] != ours[one]]
    if differing:
        first = min(differing)
        raise ValueError(
            f"draft_model: must have the target's tokens; {first} is {ours[first]!r} in {lm.name} "
            f"and {theirs[first]!r} in {draft.name}"
        )


class ModelDrafter(Drafter, Listener):
    """Greedy drafts of a small model. It belongs to one engine, whose pool it listens to."""

    DEPTH = 5  # drafts in a row
    LEAST = 0.35  # how sure it must be that all of them are right
    READS = 128  # tokens in one step; a longer prompt is read in several, each paid for

    def __init__(self, lm: LanguageModel, config: EngineConfig, make: MakeBackend):
        """`make`: the backend of its attention."""
        self.lm, self.config, self.make = lm, config, make
        self.num_scratch = blocks_for(self.DEPTH, config.block_size)  # blocks of a row
        self.runner: Runner | None = None

    # ── What happens to blocks ────────────────────────────────────────────────

    def begin(self, pool: BlockPool, cache: Any) -> None:
        self.num_read = [0] * pool.num_blocks  # tokens of each block, from its first on

    def freeing(self, block_id: int) -> None:
        self.num_read[block_id] = 0

    # ── Drafts ────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def propose_all(
        self, sequences: list[Sequence], most: list[int], hidden: torch.Tensor
    ) -> list[Proposal | None]:
        runner, size = self.runner or self.make_runner(), self.config.block_size
        longest = self.lm.config.max_context - self.DEPTH
        places, starts, tokens, budget = [], [], [], self.READS
        for place, sequence in enumerate(sequences):
            start, known = self.find_start(sequence), len(sequence.token_ids)
            end = min(known, start + budget)
            if known <= longest and start < end:
                budget -= end - start
                places.append(place)
                starts.append(start)
                tokens.append(sequence.token_ids[start:end])
                self.note_read(sequence, start, end)
        proposals: list[Proposal | None] = [None] * len(sequences)
        if not places:
            return proposals
        tables = self.tables_of([sequences[place] for place in places])
        logits = runner.compute(batch_of(tokens, starts, tables, size))
        ends = [start + len(ids) for start, ids in zip(starts, tokens, strict=True)]
        ready = [i for i, at in enumerate(places) if ends[i] == len(sequences[at].token_ids)]
        if not ready:
            return proposals
        logits, tables = logits[ready], tables[ready]
        ends, places = [ends[i] for i in ready], [places[i] for i in ready]

        def guess(depth: int, newest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = logits
            if depth > 0:
                ids = [[token] for token in newest.tolist()]
                positions = [end + depth - 1 for end in ends]
                found = runner.compute(batch_of(ids, positions, tables, size))
            p, token_ids = found.softmax(-1).max(-1)
            return p, token_ids

        found = in_a_row(guess, [most[place] for place in places], self.DEPTH, self.LEAST)
        for place, proposal in zip(places, found, strict=True):
            proposals[place] = proposal
        return proposals

    def make_runner(self) -> Runner:
        """Made at the first proposal: on the one thread that proposals are computed on."""
        config, num_scratch = self.config, self.config.max_num_seqs * self.num_scratch
        num_blocks = len(self.num_read) + num_scratch
        store = KVStore(self.lm.config, num_blocks, config.block_size, "cpu", torch.float32)
        attention = self.make(self.lm.config, store)
        self.runner = Runner(self.lm, config, Sampler(), store, store, attention)
        return self.runner

    def find_start(self, sequence: Sequence) -> int:
        """The first token to read. The newest one is always read: drafts follow from it."""
        start, size = 0, self.config.block_size
        for block_id in sequence.table.block_ids:
            start += self.num_read[block_id]
            if self.num_read[block_id] < size:
                break
        return min(start, len(sequence.token_ids) - 1)

    def note_read(self, sequence: Sequence, start: int, end: int) -> None:
        """At once, so that of two rows of one batch that share blocks one reads them."""
        size, block_ids = self.config.block_size, sequence.table.block_ids
        for index in range(start // size, blocks_for(end, size)):
            self.num_read[block_ids[index]] = min(size, end - index * size)

    def tables_of(self, sequences: list[Sequence]) -> np.ndarray:
        """(S, B): each sequence's blocks, then scratch blocks of its row's own."""
        lists = [sequence.table.block_ids for sequence in sequences]
        tables = np.zeros((len(lists), max(map(len, lists)) + self.num_scratch), dtype=np.int64)
        scratch = len(self.num_read) + np.arange(self.num_scratch)
        for row, block_ids in enumerate(lists):
            count = len(block_ids)
            tables[row, :count] = block_ids
            tables[row, count : count + self.num_scratch] = scratch + row * self.num_scratch
        return tables


def batch_of(tokens: list[list[int]], starts: list[int], tables: np.ndarray, size: int) -> Batch:
    """Each row's tokens, the first of them at `starts[row]`."""
    first, counts = np.array(starts), np.array([len(ids) for ids in tokens])
    query_start = np.concatenate([[0], counts.cumsum()])
    rows = np.repeat(np.arange(len(tokens)), counts)
    positions = np.arange(len(rows)) + (first - query_start[:-1])[rows]
    slots = tables[rows, positions // size] * size + positions % size
    context_lens, longer = first + counts, counts > 1
    tables = np.ascontiguousarray(tables[:, : blocks_for(int(context_lens.max()), size)])
    return Batch(
        token_ids=torch.tensor([token for ids in tokens for token in ids]),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots),
        block_tables=torch.from_numpy(tables),
        context_lens=torch.from_numpy(context_lens), context_lens_host=context_lens,
        query_start=torch.from_numpy(query_start), query_start_host=query_start,
        num_decodes=int(longer.argmax()) if longer.any() else len(tokens),
    )  # fmt: skip
