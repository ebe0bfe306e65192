"""The engine: requests in, outputs out, one batch per step.

    add_request ─> waiting ─> Scheduler.schedule ─> Plan ─> Runner.run ─> token ids
                                                                             │
    outputs <─ finished? <─ append <─ Scheduler.commit <─────────────────────┘

Data flows one way. The parts (block pool, block table, prefix cache, scheduler,
policy, sampler, attention backend) are handed in, and only their public methods are used.
"""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from numbers import Integral
from time import perf_counter
from typing import cast

import torch

from minikv.backend import TorchAttention
from minikv.beam import beam_search, blocks_needed, make_room
from minikv.blocks import BlockPool, BlockTable, blocks_for
from minikv.config import EngineConfig
from minikv.errors import OutOfBlocks, require_int, require_number
from minikv.invariants import check, why_stuck
from minikv.language_model import LanguageModel
from minikv.outputs import BeamOutput, Delta, RequestOutput, Stats, hits_stop_string
from minikv.radix import RadixCache
from minikv.runner import ChooseTokens, MakeBackend, Runner
from minikv.sampling import Sampler, SamplingParams
from minikv.scheduler import COUNTERS, Policy, Scheduler, first_come_first_served
from minikv.sequence import Request, Sequence

Prompt = str | Seq[int]


class Loop:
    """The plain order of work: a step begins when the one before has ended."""

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


class Engine:
    """Serves one model from one pool of blocks.

    What is true of a request is in `_requests` and in the tokens of its sequences. Blocks, tables,
    the prefix cache and the queues follow from that, so an interrupt (or any failure) may leave
    them in any state: they are thrown away and made again, empty, and the tokens of all
    unfinished requests are computed again. Nothing half done is ever read.
    """

    def __init__(
        self,
        lm: LanguageModel,
        config: EngineConfig | None = None,
        *,
        block_pool: type[BlockPool] = BlockPool,
        block_table: type[BlockTable] = BlockTable,
        prefix_cache: type[RadixCache] = RadixCache,
        scheduler: type[Scheduler] = Scheduler,
        policy: Policy = first_come_first_served,
        sampler: ChooseTokens | None = None,
        attention: MakeBackend | None = None,
    ):
        """Raises ValueError, naming the argument, for anything that cannot be used."""
        if not isinstance(lm, LanguageModel):
            raise ValueError(f"lm: must be a model from minikv.load, was {lm!r}")
        config = EngineConfig() if config is None else config
        if not isinstance(config, EngineConfig):
            raise ValueError(f"config: must be EngineConfig, was {config!r}")
        self.lm = lm
        self.config = config
        self.block_table = block_table
        self._parts = block_pool, prefix_cache, scheduler, policy
        self._make_parts()
        self.runner = Runner(lm, config, sampler or Sampler(), attention or _backend(config))
        self.store, self.attention = self.runner.store, self.runner.attention
        self.loop = Loop()
        self._requests: dict[int, Request] = {}  # unfinished
        self._moved: dict[int, Request] = {}  # have new tokens that no step has returned yet
        self._next_id = 0
        self._is_sound = True  # between two calls; False: one was left before its end
        self._steps = self._generated = 0
        self._host_seconds = 0.0
        if lm.device.type == "cuda":
            from minikv.gpu import run_ahead  # here, because only a GPU needs it

            run_ahead(self)

    def _make_parts(self) -> None:
        block_pool, prefix_cache, scheduler, policy = self._parts
        self.pool, size = block_pool(self.config.num_blocks), self.config.block_size
        self.cache = prefix_cache(self.pool, size) if self.config.prefix_cache else None
        self.scheduler = scheduler(
            self.config, self.pool, self.cache, block_table=self.block_table, policy=policy
        )

    # ── Requests ──────────────────────────────────────────────────────────────

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests or self._moved)

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a prompt (text or token ids); returns its request id.

        Raises ValueError for an empty prompt, an unknown token id, and for a request
        that could never run: longer than the context or the pool, or n over max_num_seqs.
        """
        params = _check_params(params)
        prompt_ids = self._check_prompt(prompt)
        self._check_fits(len(prompt_ids), params.max_tokens)
        if self.lm.tokenizer is None and any(isinstance(item, str) for item in params.stop):
            raise ValueError(
                f"stop: strings need a tokenizer, and {self.lm.name} has no tokenizer.json; use ids"
            )
        if params.n > self.config.max_num_seqs:
            raise ValueError(
                f"n: {params.n} samples do not fit max_num_seqs={self.config.max_num_seqs}"
            )
        request = Request(self._next_id, prompt_ids, params, self.lm.config.eos_ids)
        self._next_id += 1
        with self._start_over_on_failure():
            self.scheduler.add(request.sequences[0])
            self._requests[request.request_id] = request
        return request.request_id

    def abort(self, request_id: int) -> None:
        """Stop a request and free its blocks. Raises ValueError if it is not unfinished."""
        request = self._requests.get(require_int("request_id", request_id))
        if request is None:
            raise ValueError(f"request_id: {request_id} is not an unfinished request")
        with self._start_over_on_failure():
            del self._requests[request_id]
            self._moved.pop(request_id, None)
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    sequence.finish_reason = "abort"
                    self.scheduler.remove(sequence)

    def generate(
        self,
        prompts: Seq[Prompt] | Prompt,
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; returns one output per prompt, in their order.

        `params`: one for all, or one per prompt. If this is interrupted, its requests are
        aborted; the engine can still be used.
        """
        if not isinstance(prompts, Seq):
            raise ValueError(f"prompts: must be a list of texts or token ids, was {prompts!r}")
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
            prompts = [cast(Prompt, prompts)]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not isinstance(params, Seq):
            raise ValueError(f"params: must be SamplingParams or a list of them, was {params!r}")
        if len(params) != len(prompts):
            raise ValueError(f"params: {len(params)} for {len(prompts)} prompts")
        first, outputs = self._next_id, {}
        try:
            for prompt, one in zip(cast(Seq[Prompt], prompts), params, strict=True):
                self.add_request(prompt, one)
            ids = range(first, self._next_id)
            while any(request_id in self._requests for request_id in ids):
                outputs |= {output.request_id: output for output in self.step()}
        finally:
            self._abort_rest(range(first, self._next_id))
        return [outputs[request_id] for request_id in ids]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Continue one prompt, yielding what each step adds. The texts join to the output's text.

        Leaving the loop early aborts the request.
        """
        params = _check_params(params)
        if params.n > 1:
            raise ValueError(f"n: a stream has one sample, was {params.n}; use generate")
        request_id = self.add_request(prompt, params)
        return self._stream(self._requests[request_id])

    def _stream(self, request: Request) -> Iterator[Delta]:
        num_tokens, num_chars, finish_reason = 0, 0, None
        try:
            while finish_reason is None:
                if request.sequences[0].num_output == num_tokens:
                    self.step()  # else a step called elsewhere has moved it
                output = RequestOutput(request, self.lm.decode)
                token_ids, finish_reason = output.token_ids, output.finish_reason
                if len(token_ids) > num_tokens or finish_reason is not None:
                    text = output.text if self.lm.tokenizer is not None else ""
                    yield Delta(token_ids[num_tokens:], text[num_chars:], finish_reason)
                    num_tokens, num_chars = len(token_ids), len(text)
        finally:
            self._abort_rest([request.request_id])

    def _abort_rest(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            if request_id in self._requests:
                self.abort(request_id)
            self._moved.pop(request_id, None)

    # ── One step ──────────────────────────────────────────────────────────────

    def step(self) -> list[RequestOutput]:
        """Run one batch. Returns the requests that got tokens, as they stand now.

        Raises RuntimeError, saying why, if nothing can run. If a step is interrupted or fails,
        no request is lost: the next one computes all of them again from their tokens, and
        returns also what the failed one should have returned.
        """
        if not self._is_sound:
            self._start_over()
        if not self.has_unfinished:
            return []
        started, in_runner = perf_counter(), self.runner.seconds
        moved, self._is_sound = self._moved, False
        try:
            can_run = not self._requests or self.loop.step(self)
            if can_run or moved:
                self._steps += 1
                self._host_seconds += perf_counter() - started - (self.runner.seconds - in_runner)
                outputs = [RequestOutput(request, self.lm.decode) for request in moved.values()]
                self._moved, self._is_sound = {}, True
                return outputs
            self._is_sound = True
        except BaseException:
            self._moved = moved
            self._start_over()
            raise
        raise RuntimeError(why_stuck(self.scheduler))

    def append(self, sequences: list[Sequence], token_ids: list[int]) -> None:
        """Give each sequence its new token, share the block that a decode has filled, and remove
        each sequence that is finished.

        `self._moved` notes the requests that got a token, by their ids: `step` returns them.
        `self._generated` counts the tokens. The scheduler's `share_full_blocks` is called while
        the sequence still has its table. A sequence that `_finishes` is removed from the
        scheduler, which frees its blocks; after its last sequence, a request leaves
        `self._requests`.
        """
        size, shares = self.config.block_size, self.cache is not None
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            request = sequence.request
            self._moved[request.request_id] = request
            sequence.token_ids.append(token_id)
            self._generated += 1
            filled = shares and sequence.num_computed // size > sequence.num_inserted
            if filled and sequence.table is not None:
                self.scheduler.share_full_blocks(sequence)
            if self._finishes(sequence):
                self.scheduler.remove(sequence)
                if all(sequence.finish_reason for sequence in request.sequences):
                    del self._requests[request.request_id]

    def _finishes(self, sequence: Sequence) -> bool:
        """Whether the newest token of a sequence is its last. If so, `finish_reason` says why:
        "stop" if the token is in its request's `stop_ids`, or if the request's `longest_stop` is
        above 0 and `hits_stop_string` says so; otherwise "length" when the sequence has
        `max_length` tokens, prompt included."""
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
    def _start_over_on_failure(self) -> Iterator[None]:
        if not self._is_sound:
            self._start_over()
        self._is_sound = False
        try:
            yield
        except BaseException:
            self._start_over()
            raise
        self._is_sound = True

    def _start_over(self) -> None:
        """Make every part again, empty, and let all unfinished sequences compute their tokens' K
        and V again.

        Of what was there it reads requests, their tokens and counters. If it is interrupted as
        well, the next call of the engine begins with it.
        """
        self._is_sound = False
        self.loop.start_over()
        before = self.scheduler
        self._make_parts()
        for name in COUNTERS:
            setattr(self.scheduler, name, getattr(before, name))
        for request in list(self._requests.values()):
            unfinished = [
                sequence
                for sequence in request.start_over()
                if sequence.num_output == 0 or not self._finishes(sequence)
            ]
            for sequence in unfinished:
                self.scheduler.add(sequence)
            if not unfinished:
                del self._requests[request.request_id]
        self._is_sound = True

    # ── Everything else ───────────────────────────────────────────────────────

    def beam_search(
        self,
        prompt: Prompt,
        beam_width: int = 4,
        max_tokens: int = 32,
        length_penalty: float = 1.0,
    ) -> list[BeamOutput]:
        """The `beam_width` best continuations, best first: see `minikv.beam`."""
        require_int("beam_width", beam_width, 1)
        require_int("max_tokens", max_tokens, 1)
        require_number("length_penalty", length_penalty)
        prompt_ids = self._check_prompt(prompt)
        self._check_fits(len(prompt_ids), max_tokens)
        if beam_width > self.config.max_num_seqs:
            raise ValueError(
                f"beam_width: {beam_width} beams do not fit a batch of "
                f"max_num_seqs={self.config.max_num_seqs}"
            )
        needed = blocks_needed(len(prompt_ids), beam_width, max_tokens, self.config.block_size)
        with self._start_over_on_failure():
            if make_room(self.scheduler, needed):
                return beam_search(
                    self.lm, self.scheduler, self.runner,
                    prompt_ids, beam_width, max_tokens, length_penalty,
                )  # fmt: skip
        raise OutOfBlocks(needed, self.pool.num_free)

    def update_weights(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Continue with other weights (same shapes, `transformers` names).

        Every cached prefix is dropped, and running requests compute their tokens' K and V
        again: old K/V never meets new weights. `lm` itself keeps its weights, so that other
        engines can share it. Raises CheckpointError, changing nothing, for a bad state_dict.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"state_dict: must map names to tensors, was {state_dict!r}")
        transformer = self.runner.with_weights(state_dict)
        self._is_sound = False  # so that even an interrupt here is followed by the line below
        self.runner.use(transformer)
        self._start_over()

    def forward(
        self, sequences: Seq[Sequence], num_tokens: Seq[int], slots: Seq[int]
    ) -> torch.Tensor:
        """`Runner.forward`, for sequences that you hold yourself, on blocks of `pool`.

        After a failure, and after new weights, `pool` is another one, and your blocks are lost.
        """
        return self.runner.forward(sequences, num_tokens, slots)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy-on-write for such sequences: blocks (from, to), read before they are written."""
        self.attention.copy_blocks(pairs)

    def stats(self) -> Stats:
        """What the engine has done so far and what its pool holds now."""
        scheduler, pool = self.scheduler, self.pool
        return Stats(
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_used=pool.num_blocks - pool.num_free,
            blocks_cached=self.cache.num_cached_blocks if self.cache is not None else 0,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            looked_up_tokens=scheduler.num_looked_up_tokens,
            hit_tokens=scheduler.num_hit_tokens,
            preemptions=scheduler.num_preemptions,
            swaps_out=scheduler.num_swaps_out,
            swaps_in=scheduler.num_swaps_in,
            steps=self._steps,
            computed_tokens=self.runner.num_tokens,
            generated_tokens=self._generated,
            model_seconds=self.runner.seconds,
            host_seconds=self._host_seconds,
        )

    def check(self) -> None:
        """Raise AssertionError, naming what is broken, unless every invariant holds."""
        if not self._is_sound:
            self._start_over()
        check(self.scheduler, self._requests.values())

    def _check_prompt(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, Iterable):
            raise ValueError(f"prompt: must be text or token ids, was {prompt!r}")
        ids = self.lm.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ValueError("prompt: is empty; give at least one token")
        last = self.lm.config.vocab_size - 1
        return [require_int("prompt: a token id", token_id, 0, last) for token_id in ids]

    def _check_fits(self, num_prompt: int, max_tokens: int) -> None:
        total, config = num_prompt + max_tokens, self.config
        request = f"a prompt of {num_prompt} tokens and max_tokens={max_tokens} make {total} tokens"
        if total > self.lm.config.max_context:
            raise ValueError(f"{request}; the model's context is {self.lm.config.max_context}")
        needed = blocks_for(total, config.block_size)
        if needed > config.num_blocks:
            raise ValueError(
                f"{request}, {needed} blocks of {config.block_size}; the pool has "
                f"{config.num_blocks}: raise num_blocks or lower max_tokens"
            )


def _backend(config: EngineConfig) -> MakeBackend:
    if config.attention == "torch":
        return TorchAttention
    from minikv.gpu.attention import TritonAttention  # here, because it needs Triton

    return TritonAttention


def _check_params(params: SamplingParams | None) -> SamplingParams:
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params: must be SamplingParams, was {params!r}")
    return params
