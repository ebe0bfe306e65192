"""The engine: requests in, outputs out, one batch per step.

    add_request ─> waiting ─> Scheduler.schedule ─> Plan ─> Runner.run ─> token ids
                                                                             │
    outputs <─ finished? <─ append <─ Scheduler.commit <─────────────────────┘

Data flows one way. The parts (block pool, block table, prefix cache, scheduler,
policy, sampler, attention backend) are handed in, and only their public methods are used. What is
made for a configuration (stores, tiers, the loop) is decided in `minikv.assembly`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

from minikv.backend import MakeBackend
from minikv.beam import beam_search, blocks_needed, make_room
from minikv.blocks import BlockPool, BlockTable
from minikv.config import EngineConfig
from minikv.errors import OutOfBlocks, blame, require_int, require_number
from minikv.events import Listener, LowerTiers, blamed, listen
from minikv.invariants import check, why_stuck
from minikv.language_model import LanguageModel
from minikv.model import Weights
from minikv.outputs import BeamOutput, Delta, Outputs, RequestOutput, SoFar, Stats, hits_stop_string
from minikv.radix import RadixCache
from minikv.runner import ChooseTokens, Runner
from minikv.sampling import Sampler, SamplingParams
from minikv.scheduler import COUNTERS, Policy, Scheduler, first_come_first_served
from minikv.sequence import Request, Sequence
from minikv.validation import Prompt, check_params, make_request, pair_up


class Loop:
    """The plain order of work: a step begins when the one before has ended."""

    ahead = 0  # tokens that a step may write behind the next one
    listeners: Seq[Listener] = ()  # of its own, to the engine's pool and prefix cache

    def step(self, engine: "Engine") -> bool:
        """Schedule, run, append. Returns False if nothing can run.

        The scheduler's `schedule()` makes a plan, and the runner's `run(plan)` returns the new
        token ids. The scheduler's `commit(plan)` counts what was computed, and returns the
        sequences that get these tokens, in the same order. A plan without sequences is run as
        well, for it may move blocks.
        """
        plan = engine.scheduler.schedule()
        token_ids = engine.runner.run(plan)
        engine.append(engine.scheduler.commit(plan), token_ids)
        return len(plan.sequences) > 0

    def start_over(self) -> None:
        """Forget what is under way: between two steps, nothing."""

    def stats(self) -> Any:
        """What a loop of another kind counts: for `Stats.speculation`."""


log = logging.getLogger("minikv")

# What makes a pool for a number of blocks, a table, and a prefix cache.
Classes = tuple[Callable[[int], BlockPool], type[BlockTable], Callable[..., RadixCache]]


class Parts(NamedTuple):
    """What an engine keeps for good, made for its configuration by `minikv.assembly`."""

    config: EngineConfig  # fitted to the model
    runner: Runner
    loop: Loop
    tiers: LowerTiers | None
    listeners: list[Listener]  # to its pool and its prefix cache
    classes: Classes


class Engine:
    """Serves one model from one pool of blocks.

    What is true of a request is in `_requests` and in the tokens of its sequences. Blocks, tables,
    the prefix cache and the queues follow from that, so an interrupt (or any failure) may leave
    them in any state. The next call throws them away, makes them again, empty, and lets all
    unfinished requests compute their K and V again. Nothing half done is ever read.
    """

    assemble: ClassVar[Callable[..., Parts]]  # given by `minikv.assembly`

    def __init__(
        self, lm: LanguageModel, config: EngineConfig | None = None, *,
        block_pool: type[BlockPool] = BlockPool, block_table: type[BlockTable] = BlockTable,
        prefix_cache: Callable[..., RadixCache] = RadixCache,
        scheduler: type[Scheduler] = Scheduler, policy: Policy = first_come_first_served,
        sampler: ChooseTokens | None = None, attention: MakeBackend | None = None,
        listeners: Iterable[Listener] = (),
    ):  # fmt: skip
        """`listeners` are told what happens to blocks: see `minikv.events`. Raises ValueError,
        naming the argument, for anything that cannot be used."""
        if not isinstance(lm, LanguageModel):
            raise ValueError(f"lm: must be a model from minikv.load, was {lm!r}")
        config = EngineConfig() if config is None else config
        if not isinstance(config, EngineConfig):
            raise ValueError(f"config: must be EngineConfig, was {config!r}")
        classes = block_pool, block_table, prefix_cache
        parts = self.assemble(lm, config, sampler or Sampler(), attention, classes)
        self.lm, self.config, self.runner, self.loop = lm, parts.config, parts.runner, parts.loop
        self.store, self.attention = self.runner.store, self.runner.attention
        self.tiers, self._listeners = parts.tiers, [*listeners, *parts.listeners]
        self._make_pool, self.block_table, make = parts.classes
        self._make_cache = make if prefix_cache is RadixCache else partial(blamed, make)
        self._make_scheduler = partial(scheduler, block_table=self.block_table,
                                       policy=partial(blame, "policy", policy))  # fmt: skip
        self._make_parts()
        self._requests: dict[int, Request] = {}  # unfinished
        self._moved: dict[int, Request] = {}  # have new tokens that no step has returned yet
        self._next_id = 0
        self._is_sound = True  # between two calls; False: one was left before its end
        self._steps = self._generated = 0
        self._host_seconds = 0.0

    def _make_parts(self) -> None:
        config = self.config
        self.pool = self._make_pool(config.num_blocks)
        self.cache = self._make_cache(self.pool, config.block_size) if config.prefix_cache else None
        listen(self._listeners, self.pool, self.cache)
        self.scheduler = self._make_scheduler(config, self.pool, self.cache)
        if self.tiers is not None:
            self.tiers.hold_back(self.scheduler)

    # ── Requests ──────────────────────────────────────────────────────────────

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests or self._moved)

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a prompt (text or token ids); returns its request id.

        Raises ValueError for an empty prompt, an unknown token id, and for a request
        that could never run: longer than the context or the pool, or n over max_num_seqs.
        """
        request = make_request(self._next_id, prompt, params, self.lm, self.config)
        with self.changing_state():
            self._next_id += 1
            self.scheduler.add(request.sequences[0])
            self._requests[request.request_id] = request
        return request.request_id

    def request(self, request_id: int) -> Request:
        """An unfinished request as it stands between two steps: its sequences have their tokens
        and, if they run, their block tables. Raises ValueError if it is not unfinished."""
        self.recover()
        request = self._requests.get(require_int("request_id", request_id))
        if request is None:
            raise ValueError(f"request_id: {request_id} is not an unfinished request")
        return request

    def abort(self, request_id: int) -> None:
        """Stop a request and free its blocks. Raises ValueError if it is not unfinished."""
        request = self.request(request_id)
        with self.changing_state():
            del self._requests[request_id]
            self._moved.pop(request_id, None)
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    sequence.finish_reason = "abort"
                    self.scheduler.remove(sequence)

    def generate(
        self,
        prompts: Seq[Prompt] | Prompt,
        params: Seq[SamplingParams] | SamplingParams | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; returns one output per prompt, in their order.

        `params`: one for all, or one per prompt. If this is interrupted, its requests are
        aborted; the engine can still be used. What other requests get meanwhile, the next `step`
        returns.
        """
        first, moved = self._next_id, dict[int, Request]()
        try:
            for prompt, one in pair_up(prompts, params):
                self.add_request(prompt, one)
            ids = range(first, self._next_id)
            while any(request_id in self._requests for request_id in ids):
                moved |= {request.request_id: request for request in self.step().requests}
        finally:
            self._end(range(first, self._next_id), moved.values())
        return list(Outputs([moved[request_id] for request_id in ids], self.lm.decode))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Continue one prompt, yielding what each step adds. The texts join to the output's text.

        Leaving the loop early aborts the request.
        """
        params = check_params(params)
        if params.n > 1:
            raise ValueError(f"n: a stream has one sample, was {params.n}; use generate")
        request_id = self.add_request(prompt, params)
        return self._stream(self._requests[request_id])

    def _stream(self, request: Request) -> Iterator[Delta]:
        decode = self.lm.decode if self.lm.tokenizer is not None else lambda *_: ""
        so_far, moved, num_tokens, finish_reason = SoFar(), dict[int, Request](), 0, None
        try:
            while finish_reason is None:
                if request.sequences[0].num_output == num_tokens:  # else another's step moved it
                    moved |= {request.request_id: request for request in self.step().requests}
                [output] = Outputs([request], decode)
                delta = so_far.news(output.samples[0])
                num_tokens, finish_reason = num_tokens + len(delta.token_ids), delta.finish_reason
                if delta.token_ids or finish_reason is not None:
                    yield delta
        finally:
            self._end([request.request_id], moved.values())

    def _end(self, request_ids: Seq[int], moved: Iterable[Request]) -> None:
        """Abort what is unfinished of these requests. Of those that have `moved`, the others are
        kept for the next call of `step`."""
        self.recover()  # which may find that some are finished
        for request_id in request_ids:
            if request_id in self._requests:
                self.abort(request_id)
            self._moved.pop(request_id, None)
        for request in moved:
            is_aborted = any(one.finish_reason == "abort" for one in request.sequences)
            if request.request_id not in request_ids and not is_aborted:
                self._moved[request.request_id] = request

    # ── One step ──────────────────────────────────────────────────────────────

    def step(self) -> Outputs:
        """Run one batch. Returns the requests that got tokens, as they stand now.

        Raises RuntimeError, saying why, if nothing can run. If a step is interrupted or fails,
        no request is lost: the next one computes all of them again from their tokens, and
        returns also what the failed one should have returned.
        """
        self.recover()
        if not self.has_unfinished:
            return Outputs([], self.lm.decode)
        started, in_runner = perf_counter(), self.runner.seconds
        moved, self._is_sound = self._moved, False
        try:
            can_run = not self._requests or self.loop.step(self)
            if can_run or moved:
                self._steps += 1
                self._host_seconds += perf_counter() - started - (self.runner.seconds - in_runner)
                outputs = Outputs(moved.values(), self.lm.decode)
                self._moved, self._is_sound = {}, True
                return outputs
            self._is_sound = True
        except BaseException:  # Ctrl-C, too, even at the `return` above
            self._moved, self._is_sound = moved, False
            raise
        raise RuntimeError(why_stuck(self.scheduler))

    def append(self, sequences: list[Sequence], token_ids: list[int]) -> None:
        """Give each sequence its new token, share the block that a decode has filled, and remove
        each sequence that is finished.

        `self._moved[request_id]` is set to each request that got a token: `step` returns them.
        `self._generated` counts the tokens. `self.scheduler.share_full_blocks(sequence)` is called
        while the sequence still has its table. If it `_finishes`, `self.scheduler.remove(sequence)`
        frees its blocks; after its last sequence, a request leaves the dict `self._requests`.
        """
        size, shares = self.config.block_size, self.cache is not None
        self._generated += len(token_ids)
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            request = sequence.request
            self._moved[request.request_id] = request
            sequence.token_ids.append(token_id)
            filled = shares and sequence.num_computed // size > sequence.num_inserted
            if filled and sequence.table is not None:
                self.scheduler.share_full_blocks(sequence)
            ends = len(sequence.token_ids) == request.max_length or token_id in request.stop_ids
            if (ends or request.longest_stop > 0) and self._finishes(sequence):
                self.scheduler.remove(sequence)
                if all(sequence.finish_reason for sequence in request.sequences):
                    del self._requests[request.request_id]

    def _finishes(self, sequence: Sequence) -> bool:
        """Whether the newest token of a sequence is its last. If so, `finish_reason` says why:
        "stop" if the token is in its request's `stop_ids`, or if the request's `longest_stop` is
        above 0 and `hits_stop_string(sequence, self.lm.decode)`; otherwise "length" when the
        sequence has `max_length` tokens, prompt included."""
        request = sequence.request
        if sequence.token_ids[-1] in request.stop_ids or (
            request.longest_stop > 0 and hits_stop_string(sequence, self.lm.decode)
        ):
            sequence.finish_reason = "stop"
        elif len(sequence.token_ids) == request.max_length:
            sequence.finish_reason = "length"
        return sequence.finish_reason is not None

    # ── After a failure ───────────────────────────────────────────────────────

    @contextmanager
    def changing_state(self) -> Iterator[None]:
        """In here blocks, the pool, the prefix cache or the queues may be changed between two
        steps: if what is done inside fails, the next call of the engine recovers."""
        self.recover()
        self._is_sound = False
        yield
        self._is_sound = True

    def recover(self) -> None:
        """If a call was left before its end, make every part again, empty, and let all unfinished
        sequences compute the K and V of their tokens again. Every call begins with it. Call it,
        too, before you read the engine's parts between two steps.

        Of what was there it reads requests, their tokens and counters. If it is interrupted as
        well, the next call begins with it. A request that cannot be queued again is aborted.
        """
        if self._is_sound:
            return
        self.loop.start_over()
        before = self.scheduler
        self._make_parts()
        for name in COUNTERS:
            setattr(self.scheduler, name, getattr(before, name))
        for request in list(self._requests.values()):
            left = [s for s in request.start_over() if not s.num_output or not self._finishes(s)]
            try:
                for sequence in left:
                    self.scheduler.add(sequence)
            except Exception as error:  # the policy's, which has no place for it
                log.error("request %d is aborted", request.request_id, exc_info=error)
                self._moved[request.request_id] = request
                self.scheduler.waiting = [s for s in self.scheduler.waiting if s not in left]
                while left:
                    left.pop().finish_reason = "abort"
            if not left:
                del self._requests[request.request_id]
        self._is_sound = True

    # ── Everything else ───────────────────────────────────────────────────────

    def beam_search(
        self, prompt: Prompt, beam_width: int = 4, max_tokens: int = 32, length_penalty: float = 1.0
    ) -> list[BeamOutput]:
        """The `beam_width` best continuations, best first: see `minikv.beam`."""
        params, most = SamplingParams(max_tokens=max_tokens), self.config.max_num_seqs
        request = make_request(-1, prompt, params, self.lm, self.config)  # is never queued
        if (width := require_int("beam_width", beam_width, 1)) > most:
            raise ValueError(f"beam_width: {width} beams do not fit max_num_seqs={most}")
        penalty = require_number("length_penalty", length_penalty)
        needed = blocks_needed(request, width, self.config.block_size)
        with self.changing_state():
            if make_room(self.scheduler, self.store, needed):
                return beam_search(self.lm, self.scheduler, self.runner, request, width, penalty)
        raise OutOfBlocks(needed, self.pool.num_free)

    def update_weights(self, state_dict: Weights) -> None:
        """Continue with other weights (same shapes, `transformers` names).

        Every cached prefix is dropped, and running requests compute their tokens' K and V
        again: old K/V never meets new weights. `lm` itself keeps its weights, so that other
        engines can share it. Raises CheckpointError, changing nothing, for a bad state_dict.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"state_dict: must map names to tensors, was {state_dict!r}")
        make = type(self.lm.transformer)
        transformer = make(self.lm.config, state_dict, self.lm.device, self.lm.dtype)
        self._is_sound = False  # so that an interrupt here is followed by the recovery, too
        self.runner.use(transformer)
        self.recover()

    def stats(self) -> Stats:
        """What the engine has done so far and what its pool holds now."""
        num_free, total = self.store.num_free(self.pool), self.config.num_blocks
        return Stats(
            blocks_total=total, blocks_free=num_free, blocks_used=total - num_free,
            bytes_per_token=self.store.bytes_per_token,
            blocks_cached=self.store.num_cached(self.cache) if self.cache is not None else 0,
            running=len(self.scheduler.running), waiting=len(self.scheduler.waiting),
            **{name.removeprefix("num_"): getattr(self.scheduler, name) for name in COUNTERS},
            steps=self._steps, host_seconds=self._host_seconds, generated_tokens=self._generated,
            computed_tokens=self.runner.num_tokens, model_seconds=self.runner.seconds,
            tiers=self.tiers.stats() if self.tiers is not None else {},
            speculation=self.loop.stats(), states=(own := self.attention.states) and own.counts(),
        )  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError, naming what is broken, unless every invariant holds."""
        self.recover()
        check(self.scheduler, self._requests.values())
        if (states := self.attention.states) is not None:
            states.check_slots([one.table for one in self.scheduler if one.table is not None])
        if self.tiers is not None:
            self.tiers.check()
