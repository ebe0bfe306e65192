"""The front of a cluster: it takes requests, sends each to a worker, and answers even if workers
die.

    with Front(workers, ByPrefix) as front:
        for delta in front.submit("def fib(n):", SamplingParams(max_tokens=64)):
            print(delta.text, end="")

One thread per worker calls its `work` again and again (`minikv.cluster.worker`), as long as it has
jobs. The new tokens of a call go to the streams of its requests; the names of the blocks that the
worker stored or removed go to the router.

If a worker dies, its requests are sent to other workers, which compute them again from the prompt.
A draw depends only on seed and position, and the seed is fixed here, so the tokens are the same;
those that a client has already are not sent twice. If `ATTEMPTS` workers die while they compute a
request, without a new token in between, the request is given up: perhaps it kills them.

At most `max_requests` requests are taken at a time; for one more, `Busy` is raised. What a reader
has not read waits for it, at most the tokens of its request, so a slow reader delays no other
request. A request is cancelled when its stream is left early. An application of `minikv.serving`
reads by an `Inbox` instead, which is given to `submit` and may have several samples.

If a call fails in any other way, which is a fault of this program, the log has its traceback. The
worker's requests end with RequestFailed, and it is started again.

With `num_prefill`, the first so many workers compute prompts, and the others decode: see
`minikv.cluster.split`.

With `at_first`, only that many workers are started. The others follow one by one, when more than
`CROWD` requests per worker are under way or when a worker will never serve again. The newest added
worker is ended when it has had nothing to do for `idle` seconds, then the next newest. What its
prefix cache held is lost, unless a store has it, too.
"""

import logging
import pickle
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf
from queue import SimpleQueue
from random import getrandbits
from time import monotonic
from typing import NamedTuple, Protocol, cast

from tokenizers import Tokenizer

from minikv.cluster.routing import Router, Ticket
from minikv.cluster.split import SplitRouter
from minikv.cluster.worker import Hello, SampleProgress, WorkDone, WorkerJob
from minikv.config import ModelConfig
from minikv.errors import require_int, require_text
from minikv.language_model import LanguageModel
from minikv.outputs import Delta, Stats
from minikv.sampling import SamplingParams
from minikv.serving import Busy, Health, RequestFailed
from minikv.tiers import Name, block_names, root_name
from minikv.validation import Prompt, check_params, make_request

log = logging.getLogger("minikv")

ATTEMPTS = 3
CROWD = 16  # requests per worker; above that, another worker is started
IDLE = 60.0  # seconds without a request, after which a worker that was added is ended


class WorkerLost(Exception):
    """A worker has died, or does not answer."""


class Worker(Protocol):
    """A worker as the front sees it."""

    def start(self) -> Hello:
        """Wait until it can serve. Called first, and again after each loss; raises WorkerLost if
        it will never serve again."""
        ...

    def work(self, jobs: Seq[WorkerJob], cancelled: Seq[int]) -> WorkDone:
        """As `EngineWorker.work`. Raises WorkerLost, after which all its jobs are forgotten."""
        ...

    def end(self) -> None:
        """End it. It may be started again."""
        ...


class AnswerReader(Protocol):
    """Takes what workers have for one request: what a sample of it has got, or why it failed. Must
    not block, and not raise."""

    def put(self, found: Delta | Exception, sample: int = 0) -> None: ...


class _Queue(SimpleQueue):
    """The reader of a stream, which has one sample."""

    def put(self, found: Delta | Exception, sample: int = 0) -> None:  # type: ignore[override]
        super().put(found)


class _Model(NamedTuple):
    """What is known here of a model that workers have."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer | None

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("prompt: the model has no tokenizer; give token ids, not text")
        return self.tokenizer.encode(require_text("prompt", text)).ids


class Stream:
    """The answer to one request: iterate over its deltas, unless it has another reader, or `cancel`
    it."""

    def __init__(self, front: "Front", request: "_Request"):
        self._front, self._request = front, request

    def __iter__(self) -> Iterator[Delta]:
        """What each call adds. Raises ValueError for a request that can never run, RequestFailed
        if the request was given up."""
        reader = self._request.reader
        assert isinstance(reader, _Queue)
        try:
            while True:
                found = reader.get()
                if isinstance(found, Exception):
                    raise found
                yield found
                if found.finish_reason is not None:
                    return
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Stop the request, unless it is over. Its iterator ends with "abort"."""
        self._front.cancel(self._request)

    @property
    def job_id(self) -> int:
        return self._request.job.job_id

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self._request.job.prompt_ids)

    @property
    def num_cached(self) -> int:
        """Of those, how many its first worker's prefix cache had. Known when there is a token."""
        return self._request.num_cached

    @property
    def has_begun(self) -> bool:
        """Whether a worker has told of a token."""
        return self._request.first != inf

    @property
    def worker(self) -> int | None:
        """The worker that has the request now, or had it last."""
        return self._request.worker

    @property
    def times(self) -> tuple[float, float, float]:
        """When it was taken, had its first token, and ended, by the front's clock; infinity for
        what has not happened."""
        request = self._request
        return request.taken, request.first, request.ended


@dataclass(eq=False)
class _Request:
    job: WorkerJob
    session: Hashable
    reader: AnswerReader
    open: set[int]  # samples that are unfinished
    taken: float  # when, as `first` and `ended`
    num_cached: int = 0
    worker: int | None = None
    ticket: Ticket | None = None  # until its first token
    names: list[Name] = field(default_factory=list)  # that the worker has to compute for it
    losses: int = 0  # workers that died with it since its newest token
    first: float = inf
    ended: float = inf


class _Lane:
    """What one worker has to do."""

    def __init__(self) -> None:
        self.new: list[WorkerJob] = []
        self.cancelled: list[int] = []
        self.requests: dict[int, _Request] = {}  # new and running
        self.stats: Stats | None = None
        self.pid: int | None = None  # None: it is down
        self.busy_since: float | None = None  # when the call under way began
        self.is_over = False  # it will never serve again


class Front:
    """Requests in, streams out, over any number of workers."""

    def __init__(
        self,
        workers: Seq[Worker],
        policy: type[Router],
        max_requests: int | None = None,
        at_first: int | None = None,
        num_prefill: int = 0,
        idle: float = IDLE,
        clock: Callable[[], float] = monotonic,
    ):
        self.workers, self.idle, self.clock = list(workers), idle, clock
        number = len(self.workers)
        self.num_prefill = require_int("num_prefill", num_prefill, 0)
        if num_prefill and (num_prefill >= number or at_first not in (None, number)):
            raise ValueError(
                f"num_prefill: {num_prefill} of {number} workers, with {at_first or number} at "
                "first; some must decode, and all must be started at first"
            )
        self.at_first = self.num_started = min(
            require_int("at_first", at_first or number, 1), number
        )
        with ThreadPoolExecutor(self.at_first) as threads:  # starting takes seconds
            first = self.workers[: self.at_first]
            hellos = list(threads.map(lambda worker: worker.start(), first))
        _, self.identity, self.config, name, model, text = hellos[0]
        if any(hello[1:] != hellos[0][1:] for hello in hellos):
            raise ValueError("workers: all need the same model and the same EngineConfig")
        self.tokenizer = Tokenizer.from_str(text) if text is not None else None
        self.model = _Model(name, model, self.tokenizer)
        self.block_size = self.config.block_size
        self.max_length = min(model.max_context, self.config.num_blocks * self.block_size)
        self.vocab_size = model.vocab_size
        self.router: Router | SplitRouter = policy(number, self.block_size)
        if num_prefill:
            self.router = SplitRouter(policy, num_prefill, number - num_prefill, self.block_size)
        self.max_requests = require_int("max_requests", max_requests or 64 * len(workers), 1)
        self.lanes = [_Lane() for _ in self.workers]
        for lane, hello in zip(self.lanes, hellos, strict=False):
            lane.pid = hello.pid
        for index in range(self.at_first, number):
            self.router.lost(index)  # until it is started
        self.waiting: list[_Request] = []  # for a worker, while all are down
        self.num_requests = self.num_lost = self._next_id = 0
        self.is_closed = False
        self._changed = threading.Condition()  # guards everything above
        self._threads = [
            threading.Thread(target=self._run, args=(index,), daemon=True)
            for index in range(len(self.workers))
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "Front":
        return self

    def __exit__(self, *unused) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; unfinished requests end with "abort". The workers stay."""
        with self._changed:
            self.is_closed = True
            for request in self._unfinished():
                self._end(request, Delta([], "", "abort"))
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        session: Hashable = None,
        *,
        reader: AnswerReader | None = None,
    ) -> Stream:
        """Queue a prompt, text or token ids. Raises ValueError, naming the argument, for what
        cannot run; Busy, if too much is under way; RequestFailed, if there is no worker left."""
        params = check_params(params)
        if params.n != 1 and reader is None:
            raise ValueError(f"n: a stream has one sample, was {params.n}")
        if params.seed is None:  # every worker that computes this request must draw alike
            params = replace(params, seed=getrandbits(63))
        _require_picklable(params.cache_salt)
        # Of a model, checking needs what `_Model` has.
        checked = make_request(-1, prompt, params, cast(LanguageModel, self.model), self.config)
        with self._changed:
            if self.is_closed or all(lane.is_over for lane in self.lanes[self.num_prefill :]):
                raise RequestFailed("no worker is left")
            if self.num_requests >= self.max_requests:
                raise Busy(f"{self.num_requests} requests are under way, the most that are taken")
            job = WorkerJob(self._next_id, checked.prompt_ids, params)
            samples = set(range(params.n))
            request = _Request(job, session, reader or _Queue(), samples, self.clock())
            self._place(request)
            self._next_id += 1
            self.num_requests += 1
            if self.num_requests > CROWD * self.num_started:
                self._grow()
        return Stream(self, request)

    @property
    def num_engines(self) -> int:
        """That decode."""
        return max(1, self.num_started - self.num_prefill)

    def cancel(self, request: _Request) -> None:
        with self._changed:
            if request.ended == inf:
                if request.worker is not None:
                    self.lanes[request.worker].cancelled.append(request.job.job_id)
                self._end(request, Delta([], "", "abort"))
                self._changed.notify_all()

    def health(self) -> list[Health]:
        """Of each worker. A call that never ends shows in `age`."""
        now = self.clock()
        with self._changed:
            return [
                Health(
                    None if self.is_closed else lane.pid,
                    0.0 if lane.busy_since is None else now - lane.busy_since,
                    lane.stats,
                    can_answer=index >= self.num_prefill,
                )
                for index, lane in enumerate(self.lanes)
            ]

    # ── Under the lock ────────────────────────────────────────────────────────

    def _unfinished(self) -> list[_Request]:
        return [*self.waiting, *(one for lane in self.lanes for one in lane.requests.values())]

    def _place(self, request: _Request) -> None:
        """Send a request to the worker that the router chooses."""
        if not any(self.router.up):
            self.waiting.append(request)
            return
        job = request.job
        root = root_name(self.identity, job.params.cache_salt)
        names = block_names(root, job.prompt_ids, self.block_size) if root else []
        asked = names, len(job.prompt_ids), request.session
        if isinstance(self.router, SplitRouter):
            request.ticket = self.router.route(*asked, is_computed=job.prefix is not None)
            hands_over = self.router.is_prefill(request.ticket.worker)
            request.job = job = job._replace(hands_over=hands_over)
        else:
            request.ticket = self.router.route(*asked)
        request.worker = request.ticket.worker
        num_hits = (len(job.prompt_ids) - request.ticket.num_tokens) // self.block_size
        request.names = names[num_hits:]
        lane = self.lanes[request.worker]
        lane.requests[job.job_id] = request
        lane.new.append(job)
        self._changed.notify_all()

    def _end(self, request: _Request, last: Delta | Exception, sample: int = 0) -> None:
        if request.ticket is not None:  # it has ended before its prompt was computed
            self.router.removed(request.ticket.worker, request.names)
            self._computed(request)
        request.ended = self.clock()
        request.reader.put(last, sample)
        self.num_requests -= 1
        if request.worker is None:
            self.waiting.remove(request)
        else:
            del self.lanes[request.worker].requests[request.job.job_id]

    def _computed(self, request: _Request) -> None:
        if request.ticket is not None:
            self.router.computed(request.ticket)
            request.ticket = None

    def _apply(self, index: int, done: WorkDone) -> None:
        """Pass on what a call has brought."""
        lane = self.lanes[index]
        lane.stats = done.stats
        self.router.stored(index, done.stored)
        self.router.removed(index, done.removed)
        for progress in done.progress:
            request = lane.requests.get(progress.job_id)
            if request is not None:  # else it was cancelled meanwhile
                self._advance(request, progress)

    def _advance(self, request: _Request, progress: SampleProgress) -> None:
        if progress.error is not None:
            self._end(request, progress.error)
            return
        if request.first == inf:
            request.first, request.num_cached = self.clock(), progress.num_cached
        if progress.token_ids:
            request.losses = 0
        self._computed(request)
        job, sample = request.job, progress.sample
        tokens, chars = job.sent.get(sample, (0, 0))
        sent = {sample: (tokens + len(progress.token_ids), chars + len(progress.text))}
        request.job = job._replace(
            sent=job.sent | sent,
            prefix=progress.prefix,  # a worker that has a token for it needs this no more
        )
        delta = Delta(progress.token_ids, progress.text, progress.finish_reason)
        is_news = sample in request.open  # else its end was sent, and it was computed again
        if delta.finish_reason is not None:
            request.open.discard(sample)
            if not request.open:
                self._end(request, delta, sample)
                return
        if is_news and (delta.token_ids or delta.text or delta.finish_reason):
            request.reader.put(delta, sample)
        if progress.prefix is not None:  # its worker was the first of two
            assert request.worker is not None
            del self.lanes[request.worker].requests[job.job_id]
            request.worker = None
            self._place(request)

    def _lost(self, index: int) -> None:
        """A worker has died: send its requests elsewhere."""
        lane, self.lanes[index] = self.lanes[index], _Lane()
        self.num_lost += 1
        self.router.lost(index)
        for request in lane.requests.values():
            self._computed(request)
            request.worker = None
            request.losses += 1
            if request.losses >= ATTEMPTS:
                self.waiting.append(request)
                text = f"{request.losses} workers have died computing it"
                self._end(request, RequestFailed(text))
            else:
                self._place(request)

    def _failed(self, index: int, error: BaseException) -> None:
        """A worker's `work` has raised what nobody expects: its requests end with an error. That
        does not quote it, for it may have words of other requests."""
        log.error("worker %d has failed, and its requests with it", index, exc_info=error)
        for request in list(self.lanes[index].requests.values()):
            self._end(request, RequestFailed(f"worker {index} has failed: {type(error).__name__}"))
        self._lost(index)

    def _back(self, index: int, pid: int) -> None:
        self.lanes[index].pid = pid
        self.router.back(index)
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            self._place(request)

    def _grow(self) -> None:
        """Start one more worker, if there is one."""
        self.num_started = min(self.num_started + 1, len(self.workers))
        self._changed.notify_all()

    def _shrink(self, index: int) -> None:
        """Stop using the worker that was started last."""
        self.num_started = index
        self.lanes[index] = _Lane()
        self.router.lost(index)

    def _gone(self, index: int) -> None:
        """A worker will never serve again."""
        self.lanes[index].is_over = True
        self._grow()
        if all(lane.is_over for lane in self.lanes[self.num_prefill :]):
            for request in list(self.waiting):
                self._end(request, RequestFailed("no worker is left"))

    # ── A worker's thread ─────────────────────────────────────────────────────

    def _run(self, index: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.is_closed or index < self.num_started)
                if self.is_closed:
                    return
                is_up = self.lanes[index].pid is not None
            if not (is_up or self._start(index)):
                return
            self._serve(index)

    def _serve(self, index: int) -> None:
        """One call after the other, until the worker is lost or ended, or the front is closed."""
        worker, lane = self.workers[index], self.lanes[index]
        while True:
            with self._changed:
                has_work = self._changed.wait_for(
                    lambda: self.is_closed or lane.requests or lane.cancelled,
                    self.idle if index >= self.at_first else None,
                )
                if self.is_closed:
                    return
                if not has_work and index == self.num_started - 1:
                    self._shrink(index)
                    break
                jobs, lane.new = lane.new, []
                cancelled, lane.cancelled = lane.cancelled, []
                lane.busy_since = self.clock()
            try:
                done = worker.work(jobs, cancelled)
                with self._changed:
                    lane.busy_since = None
                    self._apply(index, done)
            except WorkerLost:
                with self._changed:
                    self._lost(index)
                return
            except BaseException as error:  # this thread must not end with requests in its lane
                with self._changed:
                    self._failed(index, error)
                return
        try:
            worker.end()
        except Exception:
            log.exception("worker %d cannot be ended", index)

    def _start(self, index: int) -> bool:
        """Wait for a worker. Returns whether it serves."""
        try:
            hello = self.workers[index].start()
        except BaseException as error:
            if not isinstance(error, WorkerLost):
                log.error("worker %d cannot be started", index, exc_info=error)
            with self._changed:
                self._gone(index)
            return False
        with self._changed:
            self._back(index, hello.pid)
        return True


def _require_picklable(salt: Hashable) -> None:
    """Raises ValueError for a salt that cannot be sent to a worker."""
    try:
        pickle.loads(pickle.dumps(salt))
    except Exception as error:  # an object's own methods may raise anything
        raise ValueError(
            f"cache_salt: it goes to a worker and must be picklable, was {type(salt).__name__} "
            f"({error}); give a string"
        ) from error
