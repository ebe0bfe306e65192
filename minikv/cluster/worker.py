"""An engine as a worker of many: it is given jobs and computes for a short time at each call.

    worker = EngineWorker("tinypy", EngineConfig())
    worker.start()
    done = worker.work([WorkerJob(0, prompt_ids, SamplingParams())], [])    # 20 ms of steps
    done.progress        # the new tokens of each job that has some
    done.stored          # the names of blocks that it holds since then

One call gives jobs, cancels jobs, computes and reports, so a worker needs no thread and no lock. It
can be called in the same process, as tests do, or be a Ray actor (`minikv.cluster.actors`). A call
ends with the step that is under way when its time is over: the shorter the calls, the sooner a new
job begins, and the more calls there are.
"""

import os
from collections import deque
from collections.abc import Hashable, Sequence as Seq
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

import torch

from minikv.blocks import BlockPool
from minikv.checkpoint import load
from minikv.config import EngineConfig, ModelConfig
from minikv.engine import Engine
from minikv.errors import OutOfBlocks
from minikv.events import Listener
from minikv.language_model import LanguageModel
from minikv.outputs import Outputs, RequestOutput, Stats
from minikv.radix import RadixCache
from minikv.sampling import SamplingParams
from minikv.sequence import Request
from minikv.serving import Asked, RequestFailed, Scored, Scoring, Steps
from minikv.tiers import (
    Name,
    Tiers,
    blocks_of_prefix,
    model_fingerprint,
    name_new,
    put_prefix,
    tiers_of,
)


class WorkerJob(NamedTuple):
    """A request on its way to a worker. What the client already has, from a worker that died, is
    computed again but not reported again."""

    job_id: int
    prompt_ids: list[int]
    params: SamplingParams
    sent: dict[int, tuple[int, int]] = {}  # noqa: RUF012  sample: tokens, characters it has
    hands_over: bool = False  # ends with the first token, and with K and V of the prompt
    prefix: Any = None  # K and V of the prompt, from a worker that has handed it over


class SampleProgress(NamedTuple):
    """What a call added to a sample of a job. The last of a sample has a finish_reason; the last of
    a job may have an error or a prefix instead."""

    job_id: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    sample: int = 0
    num_cached: int = 0  # tokens of the prompt that the prefix cache had
    error: Exception | None = None  # why it cannot run, or has failed
    prefix: Any = None  # K and V of the prompt: the job goes to another worker with them


class WorkDone(NamedTuple):
    """What a worker reports after a call."""

    progress: list[SampleProgress]
    stored: list[Name]
    removed: list[Name]
    stats: Stats


class Hello(NamedTuple):
    """What a worker reports when it is ready."""

    pid: int
    identity: bytes  # from which the names of its blocks are made
    config: EngineConfig
    name: str  # of the model
    model: ModelConfig
    tokenizer: str | None  # in JSON


class EngineWorker:
    """One engine. `work_seconds`: how long a call computes."""

    def __init__(
        self, model: str | LanguageModel, config: EngineConfig, work_seconds: float = 0.02,
        dtype: torch.dtype = torch.float32,
    ):  # fmt: skip
        self.lm = load(model, dtype=dtype) if isinstance(model, str) else model
        self.work_seconds = work_seconds
        self.held = HeldNames()
        self.engine = Engine(self.lm, config, listeners=[self.held])
        self.engine.runner.sampler = Scored(self.engine.runner)
        self.steps = Steps(self.engine, self._fail)
        if self.engine.tiers is not None:
            self.held.tiers = tiers_of(self.engine)
        self.arrived: deque[WorkerJob] = deque()  # not yet given to the engine
        self.unscored: dict[int, tuple[WorkerJob, Scoring]] = {}  # before that, by job id
        self.jobs: dict[int, WorkerJob] = {}  # unfinished, by request id of the engine
        self.failed: list[SampleProgress] = []  # not yet reported

    def start(self) -> Hello:
        """Be ready: without jobs of an earlier caller, and with everything compiled."""
        self.end()
        self.engine.generate([[0]], SamplingParams(max_tokens=2, ignore_eos=True))
        tokenizer = self.lm.tokenizer.to_str() if self.lm.tokenizer is not None else None
        config, model = self.engine.config, self.lm.config
        return Hello(os.getpid(), self.held.identity, config, self.lm.name, model, tokenizer)

    def end(self) -> None:
        """Drop all jobs."""
        self._cancel([job.job_id for job in (*self.arrived, *self.jobs.values())])
        self.unscored.clear()

    def work(self, jobs: Seq[WorkerJob], cancelled: Seq[int]) -> WorkDone:
        """Take new jobs, drop cancelled ones, and compute until the time is over or nothing is
        left to do."""
        for job in map(self._fetched, jobs):
            params = job.params
            if isinstance(params, Asked) and params.scores_prompt and job.prefix is None:
                scoring = Scoring(self.engine.runner, job.prompt_ids, params)
                self.unscored[job.job_id] = job, scoring
            else:
                self.arrived.append(job)
        self._cancel(cancelled)
        progress: list[SampleProgress] = []
        moved: dict[int, RequestOutput] = {}
        end = perf_counter() + self.work_seconds
        while self.arrived or self.unscored or self.engine.has_unfinished:
            if self.unscored:
                self._score()
            progress += self._add_arrived()
            for output in Outputs(self.steps.take(self._requests), self.lm.decode):
                if self.jobs[output.request_id].hands_over and output.finish_reason is None:
                    progress += self._hand_over(output)
                else:
                    moved[output.request_id] = output
            if perf_counter() >= end:
                break
        for request_id, output in moved.items():
            if request_id in self.jobs:  # else it has failed since
                progress += self._progress(output)
        progress += self.failed
        self.failed = []
        return WorkDone(progress, *self.held.news(), self.engine.stats())

    def share(self, thing: Any) -> Any:
        """Make something readable for the other workers; returns what `fetch` needs there."""
        return thing

    def fetch(self, shared: Any) -> Any:
        """What another worker has shared; None if it is lost."""
        return shared

    def _add_arrived(self) -> list[SampleProgress]:
        """Give the engine what has arrived, in order; returns what it refuses.

        A job that brings K and V waits until the engine has no waiting request, whose K and V it
        might evict, and room for its own. With nothing else to do, it has to compute them."""
        refused = []
        while self.arrived:
            job = self.arrived[0]
            if job.prefix is not None and (
                self.engine.stats().waiting or (not self._put(job) and self.engine.has_unfinished)
            ):
                break
            self.arrived.popleft()
            try:
                if job.hands_over and self.engine.cache is None:
                    raise ValueError("prefix_cache: must be True where prefill is apart")
                self.jobs[self.engine.add_request(job.prompt_ids, job.params)] = job
            except ValueError as error:
                refused.append(SampleProgress(job.job_id, [], "", error=error))
        return refused

    def _score(self) -> None:
        """Compute one piece of the first prompt that is scored."""
        job, scoring = next(iter(self.unscored.values()))
        try:
            if scoring.advance():
                del self.unscored[job.job_id]
                self.arrived.append(job._replace(params=scoring.params))
        except Exception as error:
            del self.unscored[job.job_id]
            self._end(job, error)

    def _requests(self) -> list[Request]:
        """The engine's, without those that have ended in this call."""
        found = []
        for request_id in self.jobs:
            with suppress(ValueError):
                found.append(self.engine.request(request_id))
        return found

    def _fail(self, request_id: int, error: BaseException) -> None:
        self._end(self.jobs.pop(request_id), error)

    def _end(self, job: WorkerJob, error: BaseException) -> None:
        """A request has failed. The error is not quoted: it may have words of others."""
        text = f"the engine has failed: {type(error).__name__}"
        self.failed.append(SampleProgress(job.job_id, [], "", error=RequestFailed(text)))

    def _fetched(self, job: WorkerJob) -> WorkerJob:
        """The job with the K and V that it refers to; without them, if they are lost, or of other
        weights. Then its request computes them."""
        if job.prefix is None:
            return job
        weights, shared = job.prefix
        return job._replace(prefix=self.fetch(shared) if weights == self._weights else None)

    def _put(self, job: WorkerJob) -> bool:
        """Put K and V that come with a job where its request will look for them, if there is
        room."""
        try:
            put_prefix(self.engine, job.prompt_ids, job.prefix, job.params.cache_salt)
        except OutOfBlocks:
            return False
        return True

    def _hand_over(self, output: RequestOutput) -> list[SampleProgress]:
        """End a job after its first token, with K and V of its prompt."""
        *others, last = self._progress(output)
        job = self.jobs[output.request_id]
        parts = blocks_of_prefix(self.engine, job.prompt_ids, job.params.cache_salt)
        self._cancel([job.job_id])
        shared = self.share({name: part.cpu() for name, part in parts.items()})
        return [*others, last._replace(prefix=(self._weights, shared))]

    @property
    def _weights(self) -> str:
        return model_fingerprint(self.engine.runner.transformer)

    def _cancel(self, job_ids: Seq[int]) -> None:
        """Drop these jobs, but for those that are finished."""
        self.arrived = deque(job for job in self.arrived if job.job_id not in job_ids)
        for job_id in job_ids:
            self.unscored.pop(job_id, None)
        for request_id, job in list(self.jobs.items()):
            if job.job_id in job_ids:
                del self.jobs[request_id]
                self.engine.abort(request_id)

    def _progress(self, output: RequestOutput) -> list[SampleProgress]:
        """What each sample has got that the client has not."""
        job, news = self.jobs[output.request_id], []
        sent, sequences = dict(job.sent), output.request.sequences
        for index, sample in enumerate(output.samples):
            token_ids = sample.token_ids
            text = sample.text if self.lm.tokenizer is not None else ""
            tokens, chars = sent.get(index, (0, 0))
            news.append(SampleProgress(
                job.job_id, token_ids[tokens:], text[chars:], sample.finish_reason, index,
                sequences[0].num_cached,
            ))  # fmt: skip
            sent[index] = max(tokens, len(token_ids)), max(chars, len(text))
        if output.finish_reason is None:
            self.jobs[output.request_id] = job._replace(sent=sent)
        else:
            del self.jobs[output.request_id]
        return news


class HeldNames(Listener):
    """The names of the blocks that an engine holds, and what changed since the last `news`.

    With tiers below the device, a block counts as removed when host and disk have dropped it, too.
    """

    def __init__(self) -> None:
        self.tiers: Tiers | None = None
        self.block_size = 0
        self.names: dict[int, Name] = {}  # of the device's blocks
        self.below: dict[Name, None] = {}  # have left the device; perhaps a tier has them
        self.new: dict[Name, None] = {}
        self.told: set[Name] = set()

    @property
    def identity(self) -> bytes:
        return self.tiers.identity if self.tiers is not None else b""

    def stored(self, token_ids: Seq[int], block_ids: Seq[int], salt: Hashable) -> None:
        """Name those of the tree's blocks of a prefix that have no name yet."""
        size = self.block_size
        for block_id in name_new(self.names, self.identity, salt, token_ids, block_ids, size):
            self.new[self.names[block_id]] = None
            self.below.pop(self.names[block_id], None)

    def freeing(self, block_id: int) -> None:
        name = self.names.pop(block_id, None)
        if name is not None:
            self.below[name] = None
            self.new.pop(name, None)

    def begin(self, pool: BlockPool, cache: RadixCache | None) -> None:
        self.block_size = cache.block_size if cache is not None else 0
        for block_id in list(self.names):
            self.freeing(block_id)

    def news(self) -> tuple[list[Name], list[Name]]:
        """(stored, removed) since the last call."""
        stored = [name for name in self.new if name not in self.told]
        self.told.update(stored)
        removed = [name for name in self.below if not self._in_a_tier(name)]
        for name in removed:
            del self.below[name]
        removed = [name for name in removed if name in self.told]
        self.told.difference_update(removed)
        self.new.clear()
        return stored, removed

    def _in_a_tier(self, name: Name) -> bool:
        tiers = self.tiers
        return tiers is not None and (
            name in tiers.host or (tiers.disk is not None and name in tiers.disk)
        )
