"""An engine as a worker of many: it is given jobs and computes for a short turn at a time.

    worker = EngineWorker("tinypy", EngineConfig())
    worker.start()
    turn = worker.turn([Job(0, prompt_ids, SamplingParams())], [])    # 20 ms of steps
    turn.progress        # the new tokens of each job that has some
    turn.stored          # the names of blocks that it holds since then

One call gives jobs, cancels jobs, computes and reports, so a worker needs no thread and no lock. It
can be called in the same process, as tests do, or be a Ray actor (`minikv.cluster.actors`). A turn
ends with the step that is under way when its time is over: the shorter the turns, the sooner a new
job begins, and the more calls there are.
"""

import os
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from time import perf_counter
from typing import NamedTuple

from minikv.blocks import BlockPool
from minikv.checkpoint import load
from minikv.config import EngineConfig
from minikv.engine import Engine
from minikv.events import Listener
from minikv.language_model import LanguageModel
from minikv.outputs import RequestOutput, Stats
from minikv.radix import RadixCache
from minikv.sampling import SamplingParams
from minikv.tiers import Name, Tiers, block_name, root_name, tiers_of


class Job(NamedTuple):
    """A request on its way to a worker. What the client already has, from a worker that died, is
    computed again but not reported again."""

    job_id: int
    prompt_ids: list[int]
    params: SamplingParams
    num_tokens: int = 0  # of the output that the client has
    num_chars: int = 0


class Progress(NamedTuple):
    """What a turn added to a job. The last one has a finish_reason or an error."""

    job_id: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    error: str | None = None  # why it cannot run


class Turn(NamedTuple):
    """What a worker reports after a turn."""

    progress: list[Progress]
    stored: list[Name]
    removed: list[Name]
    stats: Stats


class Hello(NamedTuple):
    """What a worker reports when it is ready."""

    pid: int
    block_size: int
    identity: bytes  # from which the names of its blocks are made
    tokenizer: str | None  # in JSON


class EngineWorker:
    """One engine. `turn_seconds`: how long a turn computes."""

    def __init__(
        self, model: str | LanguageModel, config: EngineConfig, turn_seconds: float = 0.02
    ):
        self.lm = load(model) if isinstance(model, str) else model
        self.turn_seconds = turn_seconds
        self.held = Held()
        self.engine = Engine(self.lm, config, listeners=[self.held])
        if self.engine.tiers is not None:
            self.held.tiers = tiers_of(self.engine)
        self.jobs: dict[int, Job] = {}  # unfinished, by request id of the engine

    def start(self) -> Hello:
        """Be ready: without jobs of an earlier caller, and with everything compiled."""
        self.end()
        self.engine.generate([[0]], SamplingParams(max_tokens=2, ignore_eos=True))
        tokenizer = self.lm.tokenizer.to_str() if self.lm.tokenizer is not None else None
        return Hello(os.getpid(), self.engine.config.block_size, self.held.identity, tokenizer)

    def end(self) -> None:
        """Drop all jobs."""
        self._cancel([job.job_id for job in self.jobs.values()])

    def turn(self, jobs: Seq[Job], cancelled: Seq[int]) -> Turn:
        """Take new jobs, drop cancelled ones, and compute until the time is over or nothing is
        left to do."""
        progress = [refused for job in jobs if (refused := self._add(job)) is not None]
        self._cancel(cancelled)
        moved: dict[int, RequestOutput] = {}
        end = perf_counter() + self.turn_seconds
        while self.engine.has_unfinished:
            moved |= {output.request_id: output for output in self.engine.step()}
            if perf_counter() >= end:
                break
        progress += [self._progress(output) for output in moved.values()]
        return Turn(progress, *self.held.news(), self.engine.stats())

    def _add(self, job: Job) -> Progress | None:
        try:
            self.jobs[self.engine.add_request(job.prompt_ids, job.params)] = job
        except ValueError as error:
            return Progress(job.job_id, [], "", error=str(error))
        return None

    def _cancel(self, job_ids: Seq[int]) -> None:
        """Drop these jobs; finished ones are ignored."""
        for request_id, job in list(self.jobs.items()):
            if job.job_id in job_ids:
                del self.jobs[request_id]
                self.engine.abort(request_id)

    def _progress(self, output: RequestOutput) -> Progress:
        job = self.jobs[output.request_id]
        token_ids, finish_reason = output.token_ids, output.finish_reason
        text = output.text if self.lm.tokenizer is not None else ""
        if finish_reason is None:
            self.jobs[output.request_id] = job._replace(
                num_tokens=max(job.num_tokens, len(token_ids)),
                num_chars=max(job.num_chars, len(text)),
            )
        else:
            del self.jobs[output.request_id]
        return Progress(
            job.job_id, token_ids[job.num_tokens :], text[job.num_chars :], finish_reason
        )


class Held(Listener):
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
        size, first = self.block_size, len(block_ids)
        while first > 0 and block_ids[first - 1] not in self.names:
            first -= 1
        name = root_name(self.identity, salt) if first == 0 else self.names[block_ids[first - 1]]
        if name is None:
            return
        for index in range(first, len(block_ids)):
            name = block_name(name, token_ids[index * size : (index + 1) * size])
            self.names[block_ids[index]] = name
            self.new[name] = None
            self.below.pop(name, None)

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
