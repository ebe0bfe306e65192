"""The engine: requests in, tokens out, one batch a step.

    add_request -> waiting -> Scheduler.schedule -> Batch -> Transformer.forward
                                                                 |  writes K/V to slots,
    outputs <- finished? <- Sampler <- logits <------------------+  attends through block tables

Data flows one way. The parts (block pool, block table, prefix cache, scheduler,
policy, sampler, attention backend) are handed in, and only their public methods are used.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter
from weakref import WeakMethod

import torch

from minikv.backend import TorchAttention
from minikv.batch import Batch, BatchBuilder
from minikv.beam import beam_search
from minikv.blocks import BlockPool, BlockTable
from minikv.config import EngineConfig, require_int
from minikv.gpu.ahead import TokenRelay
from minikv.gpu.graphs import DecodeGraphs
from minikv.language_model import LanguageModel
from minikv.model import Transformer
from minikv.outputs import BeamOutput, Delta, RequestOutput, find_stop
from minikv.paged import KVStore
from minikv.radix import RadixCache
from minikv.sampling import Sampler, SamplingParams
from minikv.scheduler import Plan, Policy, Scheduler, first_come_first_served
from minikv.sequence import Request, Sequence

Prompt = str | Seq[int]


@dataclass(frozen=True)
class Stats:
    """Counters since the engine was made, and the pool as it is now."""

    blocks_total: int
    blocks_free: int
    blocks_used: int  # held by sequences or the prefix cache
    blocks_cached: int  # of those, held by the prefix cache (sequences may share them)
    running: int
    waiting: int
    looked_up_tokens: int  # tokens of admitted requests, looked up in the prefix cache
    hit_tokens: int  # of those, found
    preemptions: int
    swaps_out: int
    swaps_in: int
    steps: int
    computed_tokens: int  # tokens that went through the model
    generated_tokens: int
    model_seconds: float  # forward pass and sampling
    host_seconds: float  # all the rest of step(): scheduling and bookkeeping

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.looked_up_tokens if self.looked_up_tokens else 0.0


@dataclass(slots=True)
class Launched:
    """A step under way: who gets a token, at which place of its `token_ids`, and which."""

    ready: list[Sequence]
    places: list[int]
    token_ids: Callable[[], list[int]]  # waits for the ids


class Engine:
    """Serves one model from one pool of blocks."""

    @torch.inference_mode(False)  # its buffers are written in any mode
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
        sampler: Callable | None = None,
        attention: type[TorchAttention] | None = None,
    ):
        if not isinstance(lm, LanguageModel):
            raise ValueError(f"lm: must be a model from minikv.load, was {lm!r}")
        config = EngineConfig() if config is None else config
        if not isinstance(config, EngineConfig):
            raise ValueError(f"config: must be EngineConfig, was {config!r}")
        self.lm = lm
        self.transformer = lm.transformer
        self.config = config
        self.pool = block_pool(config.num_blocks)
        self.cache = prefix_cache(self.pool, config.block_size) if config.prefix_cache else None
        self.block_table = block_table
        self.scheduler = scheduler(
            config, self.pool, self.cache, block_table=block_table, policy=policy
        )
        self.sampler = sampler or Sampler()
        self.store = KVStore(lm.config, config.num_blocks, config.block_size, lm.device, lm.dtype)
        host = torch.device("cpu")
        self.host_store = KVStore(lm.config, config.swap_blocks, config.block_size, host, lm.dtype)
        self.attention = (attention or _backend(config.attention))(lm.config, self.store)
        most = min(lm.config.max_context, config.num_blocks * config.block_size)  # tokens
        self._max_blocks = -(-most // config.block_size)  # of a sequence
        self._builder = BatchBuilder(config.max_num_seqs, self._max_blocks, config.block_size)
        on_gpu, index = lm.device.type == "cuda", lm.device.index
        if on_gpu and index not in (None, torch.cuda.current_device()):
            raise ValueError(
                f"lm: is on {lm.device}, and kernels run on the current device, "
                f"cuda:{torch.cuda.current_device()}: call torch.cuda.set_device({index}) first"
            )
        self.relay = TokenRelay(config.max_num_seqs, lm.device) if on_gpu else None
        self.graphs = self._make_graphs()
        self._ahead: Launched | None = None  # the step under way
        self._requests: dict[int, Request] = {}  # unfinished
        self._next_id = 0
        self._steps = self._computed = self._generated = 0
        self._model_seconds = self._host_seconds = 0.0

    @torch.inference_mode(False)
    def _make_graphs(self) -> DecodeGraphs | None:
        if self.lm.device.type != "cuda" or not getattr(self.attention, "recordable", False):
            return None
        shape = self.config.max_num_seqs, self.lm.config.vocab_size
        logits = torch.empty(shape, dtype=self.lm.dtype, device=self.lm.device)
        compute = WeakMethod(self._compute)  # else the two would hold each other, and the memory
        return DecodeGraphs(
            lambda batch, out: compute()(batch, out), shape[0], self._max_blocks, logits
        )

    # ── Requests ──────────────────────────────────────────────────────────────

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

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
        self._requests[request.request_id] = request
        self.scheduler.add(request.sequences[0])
        return request.request_id

    def abort(self, request_id: int) -> None:
        """Stop a request and free its blocks. Raises ValueError if it is not unfinished."""
        request = self._requests.get(request_id) if isinstance(request_id, int) else None
        if request is None:
            raise ValueError(f"request_id: {request_id!r} is not an unfinished request")
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._finish(sequence, "abort")

    def generate(
        self,
        prompts: Seq[Prompt] | Prompt,
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; one output a prompt, in their order.

        `params`: one for all, or one a prompt. If this is interrupted, its requests
        are aborted and the engine can be used on.
        """
        if not isinstance(prompts, Seq):
            raise ValueError(f"prompts: must be a list of texts or token ids, was {prompts!r}")
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            prompts = [prompts]
        if params is None or isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if not isinstance(params, Seq):
            raise ValueError(f"params: must be SamplingParams or a list of them, was {params!r}")
        if len(params) != len(prompts):
            raise ValueError(f"params: {len(params)} for {len(prompts)} prompts")
        ids: list[int] = []
        outputs: dict[int, RequestOutput] = {}
        try:
            for prompt, one in zip(prompts, params, strict=True):
                ids.append(self.add_request(prompt, one))
            while any(request_id in self._requests for request_id in ids):
                outputs |= {output.request_id: output for output in self.step()}
        finally:
            self._abort_rest(ids)
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
                    self.step()  # else somebody else's step has moved it
                output = RequestOutput(request, self.lm.decode)
                token_ids, finish_reason = output.token_ids, output.finish_reason
                if len(token_ids) > num_tokens or finish_reason is not None:
                    text = output.text if self.lm.tokenizer is not None else ""
                    yield Delta(token_ids[num_tokens:], text[num_chars:], finish_reason)
                    num_tokens, num_chars = len(token_ids), len(text)
        finally:
            self._abort_rest([request.request_id])

    def _abort_rest(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            if request_id in self._requests:
                self.abort(request_id)

    # ── One step ──────────────────────────────────────────────────────────────

    def step(self) -> list[RequestOutput]:
        """Run one batch. Returns the requests that got tokens, as they stand now.

        On a GPU the next batch is launched before this one's tokens are read (`minikv.ahead`).
        If it is interrupted or fails, no request is lost: all are computed again
        from their tokens.
        """
        if not self._requests:
            return []
        started, model_seconds = perf_counter(), self._model_seconds
        try:
            launched, self._ahead = self._ahead or self._launch(), None
            if launched is None:
                raise RuntimeError(self._why_stuck())
            if self.relay is not None:
                self._ahead = self._launch_ahead()
            waiting = perf_counter()
            token_ids = launched.token_ids()
            self._model_seconds += perf_counter() - waiting
            outputs = self._append(launched, token_ids)
        except BaseException:
            self._start_over()
            raise
        self._steps += 1
        model_seconds = self._model_seconds - model_seconds
        self._host_seconds += perf_counter() - started - model_seconds
        return outputs

    def _start_over(self) -> None:
        """Compute every K and V again, from the tokens that are known."""
        self._ahead = None
        for sequence in self.scheduler:
            sequence.forget_unknown()
        self.scheduler.recompute_all()

    def _launch(self) -> Launched | None:
        """Plan a step and start it; None if nothing can run now."""
        plan = self.scheduler.schedule()
        self._move_blocks(plan)
        if not plan.sequences:  # the last to run may have been swapped out
            return None
        started = perf_counter()
        logits = self.forward(plan.sequences, plan.num_tokens, plan.slots)
        ready, rows = self._commit(plan)
        token_ids = self._sample(logits, ready, rows)
        self._computed += sum(plan.num_tokens)
        places = []
        for row, sequence in enumerate(ready):
            places.append(len(sequence.token_ids))
            sequence.num_computed = places[-1]
            sequence.token_ids.append(-1 - row)  # until it is known
        self._model_seconds += perf_counter() - started
        return Launched(ready, places, token_ids)

    def _launch_ahead(self) -> Launched | None:
        """Start the step after the one under way, without those that get their last token there."""
        last = [s for s in self.scheduler.running if len(s.token_ids) == s.request.max_length]
        for sequence in last:
            self.scheduler.running.remove(sequence)
        try:
            return self._launch()
        finally:
            for sequence in last:
                self.scheduler.add_running(sequence)

    def _move_blocks(self, plan: Plan) -> None:
        """Bring blocks where the batch expects them, each read before it is overwritten."""
        self.store.copy_to(self.host_store, plan.swap_out)
        self.copy_blocks(plan.copies)
        self.host_store.copy_to(self.store, plan.swap_in)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy-on-write: blocks (from, to) of the store, each read before it is overwritten."""
        if hasattr(self.attention, "copy_blocks"):  # a backend may have a kernel for it
            self.attention.copy_blocks(pairs)
        else:
            self.store.copy_to(self.store, pairs)

    @torch.inference_mode()
    def forward(
        self, sequences: Seq[Sequence], num_tokens: Seq[int], slots: Seq[int]
    ) -> torch.Tensor:
        """Compute the next `num_tokens[i]` tokens of each sequence; logits after the last
        of each: (S, vocab_size)."""
        batch = self._builder.build(sequences, num_tokens, slots)
        if self.graphs is not None and batch.num_decodes == len(sequences):
            return self.graphs.run(batch)
        return self._compute(batch.to(self.lm.device))

    def _compute(self, batch: Batch, out: torch.Tensor | None = None) -> torch.Tensor:
        token_ids = batch.token_ids
        if self.relay is not None:
            token_ids = self.relay.resolve(token_ids)
        attend = self.attention.bind(batch)
        hidden = self.transformer.forward(token_ids, batch.positions, attend)  # (T, hidden)
        num_seqs = len(batch.context_lens)
        if len(hidden) > num_seqs:
            hidden = hidden[batch.query_start[1:] - 1]  # (S, hidden)
        return self.transformer.logits(hidden, out)

    def _commit(self, plan: Plan) -> tuple[list[Sequence], list[int]]:
        """Count what the chunks computed, share their blocks, fork finished prompts. (A decode's
        one token is counted where it gets the next, in `_launch`.)

        Returns the sequences that get a token, and for each its row in the step's logits.
        """
        ready, rows = plan.sequences[: plan.num_decodes], list(range(plan.num_decodes))
        for row in range(plan.num_decodes, len(plan.sequences)):
            sequence = plan.sequences[row]
            sequence.num_computed += plan.num_tokens[row]
            self.scheduler.share_full_blocks(sequence)
            if sequence.num_computed == len(sequence.token_ids):
                ready.append(sequence)
                rows.append(row)
                for index in range(1, sequence.request.params.n if sequence.must_fork else 1):
                    ready.append(self._fork(sequence, index))
                    rows.append(row)
                sequence.must_fork = False
        return ready, rows

    def _fork(self, sequence: Sequence, index: int) -> Sequence:
        """Sample `index` of a request begins here, on the blocks of the prompt."""
        twin = sequence.fork(index)
        if sequence.node is not None:
            self.cache.lock(sequence.node)
            twin.node = sequence.node
        sequence.request.sequences.append(twin)
        self.scheduler.add_running(twin)
        return twin

    def _sample(
        self, logits: torch.Tensor, ready: list[Sequence], rows: list[int]
    ) -> Callable[[], list[int]]:
        """Choose their tokens; returns the call that waits for the ids."""
        if not ready:
            return list
        if len(rows) != len(logits) or rows[-1] != len(rows) - 1:
            logits = logits[torch.tensor(rows).to(logits.device, non_blocking=True)]
        params = [sequence.request.params for sequence in ready]
        draws = [
            sequence.draw() if param.temperature > 0 else None
            for sequence, param in zip(ready, params, strict=True)
        ]
        token_ids = self.sampler(logits, params, draws)
        if self.relay is not None:
            return self.relay.send(token_ids)
        return token_ids.tolist if isinstance(token_ids, torch.Tensor) else lambda: token_ids

    def _append(self, launched: Launched, token_ids: list[int]) -> list[RequestOutput]:
        """Give each sequence its token, let go of those that are finished."""
        size, shares = self.config.block_size, self.cache is not None
        moved: dict[Request, None] = {}  # once each, in order
        num_known = 0
        for sequence, place, token_id in zip(
            launched.ready, launched.places, token_ids, strict=True
        ):
            if sequence.finish_reason is not None:  # known only after this step was launched
                continue
            request = sequence.request
            moved[request] = None
            sequence.token_ids[place] = token_id
            num_known += 1
            # A block more is full than before this step, and it was not taken away meanwhile.
            filled = shares and sequence.num_computed // size > (place - 1) // size
            if filled and sequence.table is not None:
                self.scheduler.share_full_blocks(sequence)
            if token_id in request.stop_ids or (
                request.longest_stop > 0 and self._hits_stop_string(sequence)
            ):
                self._finish(sequence, "stop")
            elif place + 1 == request.max_length:
                self._finish(sequence, "length")
        self._generated += num_known
        return [RequestOutput(request, self.lm.decode) for request in moved]

    def _hits_stop_string(self, sequence: Sequence) -> bool:
        """Whether the newest token completed a stop string: looked for at the end of the text,
        then once more in all of it, because a tail alone may decode differently."""
        longest = sequence.request.longest_stop
        output, stop = sequence.output_ids, sequence.request.params.stop
        width = longest + 4
        tail = self.lm.decode(output[-width:])
        while len(tail) < longest and width < len(output):  # special tokens have no text
            width *= 2
            tail = self.lm.decode(output[-width:])
        if find_stop(tail, stop) is None:
            return False
        return find_stop(self.lm.decode(output), stop) is not None

    def _finish(self, sequence: Sequence, reason: str) -> None:
        """A sequence gives its blocks back; with the last of its request the request is done."""
        self.scheduler.remove(sequence)
        sequence.forget_unknown()
        sequence.finish_reason = reason
        request = sequence.request
        if all(sequence.finish_reason for sequence in request.sequences):
            del self._requests[request.request_id]
        if not self._requests:
            self._ahead = None

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
        if isinstance(length_penalty, bool) or not (
            isinstance(length_penalty, int | float) and math.isfinite(length_penalty)
        ):
            raise ValueError(f"length_penalty: must be a finite number, was {length_penalty!r}")
        prompt_ids = self._check_prompt(prompt)
        self._check_fits(len(prompt_ids), max_tokens)
        if beam_width > self.config.max_num_seqs:
            raise ValueError(
                f"beam_width: {beam_width} beams do not fit a batch of "
                f"max_num_seqs={self.config.max_num_seqs}"
            )
        return beam_search(self, prompt_ids, beam_width, max_tokens, length_penalty)

    def update_weights(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Go on with other weights (same shapes, `transformers` names).

        Every cached prefix is dropped, and running requests compute their tokens' K and V
        again: old K/V never meets new weights. `lm` itself keeps its weights, so that other
        engines can share it. Raises CheckpointError, changing nothing, for a bad state_dict.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"state_dict: must map names to tensors, was {state_dict!r}")
        old = self.transformer
        self.transformer = Transformer(old.config, state_dict, old.device, old.dtype)
        self.graphs = self._make_graphs()  # the old ones read the old weights
        self._start_over()
        if self.cache is not None:
            self.cache.clear()

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
            computed_tokens=self._computed,
            generated_tokens=self._generated,
            model_seconds=self._model_seconds,
            host_seconds=self._host_seconds,
        )

    def check(self) -> None:
        """Raise AssertionError, naming what is broken, unless every invariant holds."""
        holders: Counter[int] = Counter()
        host_holders: Counter[int] = Counter()
        for sequence in self.scheduler:
            host_holders.update(sequence.host_block_ids or ())
            if sequence.table is not None:
                holders.update(sequence.table.block_ids)
                if len(sequence.table.block_ids) * self.config.block_size < sequence.num_computed:
                    raise AssertionError(
                        f"request {sequence.order}: computed tokens without a block"
                    )
        if self.cache is not None:
            self.cache.check()
            holders.update(self.cache.block_ids())
            evictable = self.cache.num_evictable_blocks
            if evictable + self.pool.num_free > self.pool.num_blocks:
                raise AssertionError("evictable and free blocks are more than the pool")
        pools = [(self.pool, holders)]
        if self.scheduler.host_pool is not None:
            pools.append((self.scheduler.host_pool, host_holders))
        for pool, expected in pools:
            counts = [pool.ref_count(block_id) for block_id in range(pool.num_blocks)]
            for block_id, count in enumerate(counts):
                if count != expected[block_id]:
                    raise AssertionError(
                        f"block {block_id}: reference count {count}, {expected[block_id]} holders"
                    )
            if pool.num_free != counts.count(0):
                raise AssertionError(
                    f"{pool.num_free} free blocks, {counts.count(0)} without a holder"
                )
        live = {sequence for request in self._requests.values() for sequence in request.sequences}
        if {sequence for sequence in self.scheduler} != {s for s in live if not s.finish_reason}:
            raise AssertionError("the scheduler has other sequences than the unfinished requests")

    def _check_prompt(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, Iterable):
            raise ValueError(f"prompt: must be text or token ids, was {prompt!r}")
        ids = self.lm.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ValueError("prompt: is empty; give at least one token")
        vocab_size = self.lm.config.vocab_size
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise ValueError(f"prompt: token ids must be ints, found {token_id!r}")
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"prompt: token id {token_id} is not in [0, {vocab_size})")
        return ids

    def _check_fits(self, num_prompt: int, max_tokens: int) -> None:
        total, config = num_prompt + max_tokens, self.config
        request = f"a prompt of {num_prompt} tokens and max_tokens={max_tokens} make {total} tokens"
        if total > self.lm.config.max_context:
            raise ValueError(f"{request}; the model's context is {self.lm.config.max_context}")
        needed = -(-total // config.block_size)
        if needed > config.num_blocks:
            raise ValueError(
                f"{request}, {needed} blocks of {config.block_size}; the pool has "
                f"{config.num_blocks}: raise num_blocks or lower max_tokens"
            )

    def _why_stuck(self) -> str:
        if not self.scheduler.waiting:
            return "no request can run: the scheduler gave none of the running sequences a token"
        first = self.scheduler.waiting[0]
        needed = -(-len(first.token_ids) // self.config.block_size)
        evictable = self.cache.num_evictable_blocks if self.cache is not None else 0
        return (
            f"no request can run: the first in the queue, {first.request.request_id}, needs "
            f"{needed} blocks; {self.pool.num_free} are free and {evictable} can be evicted of "
            f"{self.pool.num_blocks}. Release what is held outside the engine, or abort the request"
        )


def _backend(name: str) -> type[TorchAttention]:
    if name == "torch":
        return TorchAttention
    from minikv.gpu.attention import TritonAttention  # not before it is wanted: it needs Triton

    return TritonAttention


def _check_params(params: SamplingParams | None) -> SamplingParams:
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params: must be SamplingParams, was {params!r}")
    return params
