"""One engine in a thread of its own.

    with EngineLoop(Engine(lm)) as loop:
        inbox = Inbox()                       # in an event loop
        answer = loop.submit("def fib(n):", SamplingParams(max_tokens=64), reader=inbox)
        for sample, delta in await inbox.take(): ...

Only this thread touches the engine. Between two steps it does what others have asked for, in their
order: add a request, drop one. A request whose client has left is therefore dropped before the next
step, and its blocks are free.

A request that fails ends with RequestFailed, and no other (see `minikv.serving.apart`). One whose
prompt is to be scored comes to the engine when it is; its prompt is computed a piece at a time,
between the steps of the others.
"""

import logging
import os
from collections.abc import Callable, Hashable, Sequence as Seq
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic, sleep
from typing import NamedTuple, Protocol

from minikv.engine import Engine
from minikv.outputs import RequestOutput, Stats
from minikv.sampling import SamplingParams
from minikv.sequence import Request
from minikv.serving.apart import Steps
from minikv.serving.block_life import BlockLife
from minikv.serving.inbox import RequestFailed, as_it_stands
from minikv.serving.scores import Asked, Scored, Scoring
from minikv.validation import Prompt, make_request

log = logging.getLogger("minikv")


class Health(NamedTuple):
    """How an engine is. `age`: seconds since the step under way began, 0 if there is none."""

    pid: int | None  # None: it is down
    age: float
    stats: Stats | None
    can_answer: bool = True  # False: it computes prompts for others
    life: BlockLife | None = None  # of its prefix cache's blocks, if somebody listens


class Reader(Protocol):
    """Takes what an engine has for one request. Must not block, and not raise. While it has an
    attribute `has_news` that is true, only the end is put: it reads the request itself."""

    def put(self, found: RequestOutput | Exception) -> None: ...


class Watcher(Protocol):
    """Looks at an engine between two steps, in its thread, with its unfinished requests. `pace`:
    how many seconds the next step then waits."""

    pace: float

    def show(self, engine: Engine, requests: Seq[Request]) -> None: ...


class Answer:
    """A request under way."""

    def __init__(self, loop: "EngineLoop", request: Request, reader: Reader):
        self._loop, self.request, self.reader = loop, request, reader

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_cached(self) -> int:
        """Of those, how many the prefix cache had. Known when there is a first token."""
        return self.request.sequences[0].num_cached

    @property
    def has_begun(self) -> bool:
        """Whether some of its tokens are being computed, or were."""
        first = self.request.sequences[0]
        return first.table is not None or first.num_output > 0

    def cancel(self) -> None:
        """Stop the request before the next step, unless it is over."""
        self._loop.cancel(self)


class EngineLoop:
    """Steps an engine whenever it has something to do. Give it an engine that no other thread
    uses."""

    def __init__(
        self, engine: Engine, life: BlockLife | None = None, clock: Callable[[], float] = monotonic
    ):
        """`life`: a listener that the engine was made with, for the metrics."""
        self.engine, self.tokenizer, self._life = engine, engine.lm.tokenizer, life
        self.clock = clock
        engine.runner.sampler = Scored(engine.runner)
        config = engine.config
        self._decode = engine.lm.text_of  # the engine's own tokens need not be checked
        self.max_length = min(engine.lm.config.max_context, config.num_blocks * config.block_size)
        self.vocab_size = engine.lm.config.vocab_size
        self.config, self.num_engines = config, 1
        engine.generate([[0]], SamplingParams(max_tokens=2, ignore_eos=True))  # compiles
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()  # for between two steps
        self._answers: dict[int, Answer] = {}  # to unfinished requests, by their ids in the engine
        self._scoring: dict[Answer, Scoring] = {}  # whose prompts are scored first
        # This thread must not end with readers that wait.
        self._steps = Steps(engine, self._fail_one, caught=BaseException)
        self._watchers: list[Watcher] = []
        self._busy_since: float | None = None  # when a step began, or None
        self._lock = Lock()  # guards `_is_over`
        self._is_over = False
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "EngineLoop":
        return self

    def __exit__(self, *unused) -> None:
        self.close()

    def submit(
        self, prompt: Prompt, params: SamplingParams, session: Hashable = None, *, reader: Reader
    ) -> Answer:
        """Queue a prompt, text or token ids. Raises ValueError, naming the argument, for what
        cannot run, and RequestFailed after `close`. `session` matters to a cluster only."""
        request = make_request(-1, prompt, params, self.engine.lm, self.engine.config)
        answer = Answer(self, request, reader)
        with self._lock:
            if self._is_over:
                raise RequestFailed("the engine is closed")
            self._calls.put(partial(self._add, answer))
        return answer

    def cancel(self, answer: Answer) -> None:
        self._calls.put(partial(self._drop, answer))

    def watch(self, watcher: Watcher) -> None:
        """Let somebody look between two steps, until `unwatch`."""
        self._calls.put(partial(self._watchers.append, watcher))

    def unwatch(self, watcher: Watcher) -> None:
        self._calls.put(partial(self._forget, watcher))

    def health(self) -> list[Health]:
        """Of the engine. A step that never ends shows in `age`."""
        since = self._busy_since
        age = 0.0 if since is None else self.clock() - since
        pid = None if self._is_over else os.getpid()
        return [Health(pid, age, self.engine.stats(), life=self._life)]

    def close(self) -> None:
        """End the thread after its step; unfinished requests end with RequestFailed."""
        with self._lock:
            self._is_over = True
        self._calls.put(lambda: None)  # wakes it
        self._thread.join()

    # ── The engine's thread ───────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._is_over:
            if self._watchers:
                self._show()
            self._do_calls(waits=not self._answers and not self._scoring)
            if self._scoring:
                self._score()
            if not self._answers:
                continue
            self._busy_since = self.clock()
            self._hand_over(self._steps.take(self._requests))
            self._busy_since = None
        self._do_calls(waits=False)  # nothing is submitted any more
        self._fail("the engine is closed")

    def _do_calls(self, waits: bool) -> None:
        """Do all that was asked for; if `waits`, wait for the first."""
        try:
            while True:
                self._calls.get(block=waits)()
                waits = False
        except Empty:
            pass

    def _add(self, answer: Answer) -> None:
        checked = answer.request
        if isinstance(checked.params, Asked) and checked.params.scores_prompt:
            self._scoring[answer] = Scoring(self.engine.runner, checked.prompt_ids, checked.params)
        else:
            self._begin(answer, checked.params)

    def _score(self) -> None:
        """Compute one piece of the first prompt that is scored."""
        answer, scoring = next(iter(self._scoring.items()))
        try:
            if scoring.advance():
                del self._scoring[answer]
                self._begin(answer, scoring.params)
        except Exception as error:
            log.exception("a prompt cannot be scored")
            self._scoring.pop(answer, None)
            answer.reader.put(_failed(error))

    def _begin(self, answer: Answer, params: SamplingParams) -> None:
        try:
            request_id = self.engine.add_request(answer.request.prompt_ids, params)
        except Exception as error:  # it was checked: what is left is a part of the engine's
            log.exception("a request cannot be added")
            answer.reader.put(_failed(error))
            return
        answer.request = self.engine.request(request_id)
        self._answers[request_id] = answer

    def _requests(self) -> list[Request]:
        return [answer.request for answer in self._answers.values()]

    def _show(self) -> None:
        requests = self._requests()
        for watcher in list(self._watchers):
            try:
                watcher.show(self.engine, requests)
            except Exception:
                log.exception("a watcher has failed")
                self._forget(watcher)
        if self._answers:
            sleep(max((watcher.pace for watcher in self._watchers), default=0))

    def _forget(self, watcher: Watcher) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def _drop(self, answer: Answer) -> None:
        self._scoring.pop(answer, None)
        request_id = answer.request.request_id
        if self._answers.pop(request_id, None) is not None:
            with suppress(ValueError):  # the failed step before had finished it
                self.engine.abort(request_id)

    def _hand_over(self, requests: Seq[Request]) -> None:
        for request in requests:
            answer = self._answers.get(request.request_id)
            if answer is None:  # it was dropped after a failed step
                continue
            if None not in [one.finish_reason for one in request.sequences]:
                del self._answers[request.request_id]
            elif getattr(answer.reader, "has_news", False):
                continue
            answer.reader.put(as_it_stands(request, self._decode))

    def _fail_one(self, request_id: int, error: BaseException) -> None:
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            answer.reader.put(_failed(error))

    def _fail(self, why: str) -> None:
        """End all requests."""
        for answer in [*self._answers.values(), *self._scoring]:
            answer.reader.put(RequestFailed(why))  # first: a reader may look at the request now
            self._drop(answer)


def _failed(error: BaseException) -> RequestFailed:
    """What a client is told. The error is not quoted: it may have words of others."""
    return RequestFailed(f"the engine has failed: {type(error).__name__}")
