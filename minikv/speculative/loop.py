"""The engine's loop with drafts: schedule, draft, run, keep what is right, give back the rest.

The scheduler knows nothing of drafts. They take what its plan has left over: tokens of the budget,
and blocks that are free or evictable. So they never delay a request, and never preempt one.
Between two steps every table, counter and queue is as without speculation.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from minikv.blocks import blocks_for
from minikv.engine import Engine, Loop
from minikv.errors import OutOfBlocks, require_ids, require_int
from minikv.events import Listener
from minikv.scheduler import Plan
from minikv.sequence import Sequence
from minikv.speculative.acceptance import keep_equal
from minikv.speculative.decide import MOST, TOGETHER, Account, Chances, Costs, how_many
from minikv.speculative.drafters import Drafter, Proposal
from minikv.speculative.verify import run_with_drafts

log = logging.getLogger("minikv")


@dataclass
class Speculation:
    """What speculation has done since the engine was made. Tokens that come after a sequence's last
    one are not counted as accepted: nobody gets them."""

    verified: int = 0  # how often a sequence had drafts in a step
    drafts: int = 0  # tokens
    accepted: int = 0  # of those
    drafts_at: list[int] = field(default_factory=lambda: [0] * MOST)  # by position, the first first
    accepted_at: list[int] = field(default_factory=lambda: [0] * MOST)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a sequence got from a step with drafts, the target's own included."""
        return 1 + self.accepted / self.verified if self.verified else 1.0

    def note(self, num_drafts: int, num_accepted: int) -> None:
        self.verified += 1
        self.drafts += num_drafts
        self.accepted += num_accepted
        for place in range(num_drafts):
            self.drafts_at[place] += 1
            self.accepted_at[place] += place < num_accepted


class SpeculativeLoop(Loop):
    """Drafts, and verifies as many of them as pay."""

    ahead = MOST

    def __init__(
        self, drafter: Drafter, on_one_thread: Callable = lambda ask: ask,
        clock: Callable[[], float] = perf_counter,
    ):  # fmt: skip
        """`on_one_thread` is that of the attention's backend, for what computes beside it."""
        self.drafter, self.ask = drafter, on_one_thread(drafter.propose_all)
        self.name = f"drafter {type(drafter).__name__}"
        self.clock = clock
        self.listeners = [drafter] if isinstance(drafter, Listener) else []
        self.counts = Speculation()
        self.chances, self.costs, self.account = Chances(), Costs(), Account()
        self.known: set[Sequence] = set()  # that the drafter was asked for
        # Of the last step: the hidden states, and the row of each sequence that got a token.
        self.hidden, self.rows = torch.empty(0), dict[Sequence, int]()

    def stats(self) -> Speculation:
        return self.counts

    def start_over(self) -> None:
        self.known.clear()
        self.rows.clear()
        try:
            self.drafter.start_over()
        except Exception:  # its drafts may be wrong now, which costs no token
            log.exception("%s cannot start over", self.name)

    def step(self, engine: Engine) -> bool:
        """A step: plain, or with the drafts that pay."""
        started = self.clock()
        plan = engine.scheduler.schedule()
        drafts: list[list[int]] = []
        written: list[list[int]] = []
        if plan.num_decodes > 0 and self.account.is_open:
            ready, drafts, written = self.draft_and_run(engine, plan, started)
        else:
            token_ids = engine.runner.run(plan)
            ready = engine.scheduler.commit(plan)
            engine.append(ready, token_ids)
            if 0 < plan.num_decodes == len(plan.sequences):
                self.costs.note(plan.num_decodes, self.clock() - started)
                self.account.note()
        if self.drafter.reads_hidden and self.account.is_open:
            self.remember(engine.runner.last_hidden, plan, ready, drafts, written)
        return len(plan.sequences) > 0

    def draft_and_run(
        self, engine: Engine, plan: Plan, started: float
    ) -> tuple[list[Sequence], list[list[int]], list[list[int]]]:
        """Run a plan with the drafts that pay, perhaps none. Returns the sequences that got a
        token; for each decode its drafts and what was written, if there were drafts. What
        speculation does beside the step is timed apart from it, for the account."""
        planned = self.clock()
        decodes = plan.sequences[: plan.num_decodes]
        lengths = [len(sequence.token_ids) for sequence in decodes]
        proposals = self.propose(engine, decodes)
        drafts, worth = self.choose(engine, plan, proposals) if any(proposals) else ([], 0.0)
        drafted = self.clock()
        if any(drafts):
            token_ids, after = run_with_drafts(engine.runner, plan, drafts)
            written = [
                keep_equal(ids, [token_ids[row], *after[row]]) for row, ids in enumerate(drafts)
            ]
            engine.attention.keep(list(map(len, written)))
        else:
            token_ids, written = engine.runner.run(plan), []
        ready = engine.scheduler.commit(plan)
        engine.append(ready, token_ids)
        if written:
            self.append_rest(engine, decodes, written)
            for sequence, ids, length in zip(decodes, drafts, lengths, strict=True):
                self.settle(sequence, len(ids), len(sequence.token_ids) - length - 1)
        ended = self.clock()
        for sequence, proposal, length in zip(decodes, proposals, lengths, strict=True):
            if proposal is not None:
                self.chances.compare(
                    proposal.levels, proposal.token_ids, sequence.token_ids[length:]
                )
        if len(decodes) == len(plan.sequences):
            seconds = ended - drafted + planned - started
            seconds = self.costs.note(len(decodes) + sum(map(len, drafts)), seconds)
            plain, gained = self.costs.of(len(decodes)), 0.0
            cost = self.clock() - ended + drafted - planned
            if written:
                cost += seconds - plain
                gained = worth * (sum(map(len, written)) - len(decodes))
            self.account.note(gained - cost / plain)
        return ready, drafts, written

    def remember(
        self, hidden: torch.Tensor, plan: Plan, ready: list[Sequence], drafts: list[list[int]],
        written: list[list[int]],
    ) -> None:  # fmt: skip
        """Note which row of the hidden states the newest token of each sequence is from. They are
        read before the next step."""
        self.hidden, self.rows, first = hidden, {}, 0
        rows = {}
        for place, sequence in enumerate(plan.sequences):
            rows[sequence] = first
            if written and place < plan.num_decodes:
                rows[sequence] += len(written[place]) - 1
                first += len(drafts[place])
            first += 1
        row = 0
        for sequence in ready:
            row = rows.get(sequence, row)  # a fork follows the sample that it forks from
            self.rows[sequence] = row

    def propose(self, engine: Engine, decodes: list[Sequence]) -> list[Proposal | None]:
        """What the drafter has for each decode: no more than may be written, nor, with int4, than
        may be written over again."""
        for sequence in [one for one in self.known if one.finish_reason is not None]:
            self.known.remove(sequence)
            self.drafter.left(sequence)
        self.known.update(decodes)
        asked, limits, hidden = [], [], self.hidden
        each = min(MOST, max(1, TOGETHER // len(decodes)))
        for sequence in decodes:
            most = min(each, sequence.request.max_length - len(sequence.token_ids) - 1)
            if engine.store.open is not None:
                # A block that is full is closed for good, so a draft must not fill one.
                size = engine.config.block_size
                most = min(most, size - 2 - sequence.num_computed % size)
            if most > 0 and (sequence in self.rows or not self.drafter.reads_hidden):
                asked.append(sequence)
                limits.append(most)
        if not asked:
            return [None] * len(decodes)
        if self.drafter.reads_hidden:
            hidden = hidden[[self.rows[sequence] for sequence in asked]]
        before = [(len(one.token_ids), one.token_ids[-1]) for one in asked]
        try:
            given = self.ask(asked, limits, hidden)
        except Exception as error:
            error.add_note(f"in the {self.name}")
            raise
        if before != [(len(one.token_ids), one.token_ids[-1]) for one in asked]:
            raise ValueError(f"{self.name}: has changed the token_ids of a sequence")
        found = dict(zip(asked, self.checked(given, limits, engine), strict=True))
        answers = [found.get(sequence) for sequence in decodes]
        return [one if one is not None and one.token_ids else None for one in answers]

    def checked(self, given: Any, limits: list[int], engine: Engine) -> list[Proposal | None]:
        """What a drafter has given, if it can be verified: an unknown token would be read from
        memory that is no embedding's. Raises ValueError, naming the drafter."""
        if not isinstance(given, list | tuple) or len(given) != len(limits):
            raise ValueError(f"{self.name}: was asked for {len(limits)} proposals, gave {given!r}")
        found: list[Proposal | None] = []
        for one, most in zip(given, limits, strict=True):
            if one is None:
                found.append(None)
                continue
            if not isinstance(one, Proposal):
                raise ValueError(f"{self.name}: must give a Proposal or None, gave {one!r}")
            name = f"{self.name}: token_ids"
            ids = require_ids(name, one.token_ids, engine.lm.config.vocab_size)
            if len(ids) > most:
                raise ValueError(f"{name}: at most {most} were asked for, gave {len(ids)}")
            levels = one.levels
            if not isinstance(levels, range) and set(map(type, levels)) != {int}:
                levels = [require_int(f"{self.name}: a level", level) for level in levels]
            if ids and min(levels, default=0) < 0:
                raise ValueError(f"{self.name}: levels must be at least 0, gave {levels!r}")
            found.append(Proposal(ids, levels))
        return found

    def choose(
        self, engine: Engine, plan: Plan, proposals: list[Proposal | None]
    ) -> tuple[list[list[int]], float]:
        """The drafts of each decode that are verified in this step, with blocks for them; and what
        a token that they give is worth, in steps."""
        num_tokens = sum(plan.num_tokens)
        counts, worth = how_many(
            [self.chances.of_drafts(one.levels, len(one.token_ids)) if one is not None else ()
             for one in proposals],
            self.costs.of(num_tokens), self.costs.row, engine.config.max_batch_tokens - num_tokens,
        )  # fmt: skip
        drafts: list[list[int]] = [[] for _ in proposals]
        for row, (proposal, count) in enumerate(zip(proposals, counts, strict=True)):
            if proposal is not None and count > 0:
                room = reserve(engine, plan, plan.sequences[row], count)
                drafts[row] = proposal.token_ids[:room]
        return drafts, worth

    def append_rest(
        self, engine: Engine, decodes: list[Sequence], written: list[list[int]]
    ) -> None:
        """Give each sequence its second token, then the third, …: each goes the way that every
        token goes, so a stop or a limit ends a sequence where it would without drafts."""
        place = 1
        while True:
            longer = [
                (sequence, tokens[place])
                for sequence, tokens in zip(decodes, written, strict=True)
                if len(tokens) > place and sequence.finish_reason is None
            ]
            if not longer:
                return
            for sequence, _ in longer:
                sequence.num_computed += 1  # the draft that was right
            engine.append([sequence for sequence, _ in longer], [token for _, token in longer])
            place += 1

    def settle(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Count a sequence's drafts, and give back the blocks that only wrong ones needed."""
        if num_drafts > 0:
            sequence.next_slot = None  # it was a draft's
            self.counts.note(num_drafts, num_accepted)
            self.drafter.accepted(sequence, num_drafts, num_accepted)
        table = sequence.table
        if table is None:  # it has ended, and its blocks are gone
            return
        room = blocks_for(sequence.num_computed, table.block_size) * table.block_size
        if table.num_tokens > room:
            table.shrink(table.num_tokens - room)


def reserve(engine: Engine, plan: Plan, sequence: Sequence, num_drafts: int) -> int:
    """Make room for drafts behind the token that the plan computes, in blocks that may be written.
    Returns for how many there is room."""
    table, size = sequence.table, engine.config.block_size
    first = sequence.num_computed + 1
    missing = first + num_drafts - table.num_tokens
    if missing > 0:
        try:
            make_free(engine, plan, blocks_for(first + num_drafts, size) - len(table.block_ids))
            table.grow(missing)
            sequence.table_version += 1
        except OutOfBlocks:
            num_drafts = table.num_tokens - first
    for position in range(blocks_for(first, size) * size, first + num_drafts, size):
        try:
            _, copy = table.writable_slot(position)
        except OutOfBlocks:
            return position - first
        if copy is not None:
            plan.copies.append(copy)
            sequence.table_version += 1
    return num_drafts


def make_free(engine: Engine, plan: Plan, num_blocks: int) -> None:
    """Evict what is missing: the blocks that the sequence would take anyway within a few steps. Not
    while host blocks wait to be read: what is evicted may be written over them."""
    missing = num_blocks - engine.pool.num_free
    if missing > 0 and engine.cache is not None and not plan.swap_in:
        engine.cache.evict(missing)
