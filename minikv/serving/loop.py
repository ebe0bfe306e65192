"""One engine in a thread of its own.

    with EngineLoop(Engine(lm)) as loop:
        inbox = Inbox()                       # in an event loop
        answer = loop.submit("def fib(n):", SamplingParams(max_tokens=64), reader=inbox)
        for sample, delta in await inbox.take(): ...

Only this thread touches the engine. Between two steps it does what others have asked for, in their
order: add a request, drop one. A request whose client has left is therefore dropped before the next
step, and its blocks are free.

A step that fails, in whatever way, is tried once more, for an engine loses no request (see
`minikv.engine`). If that fails too, all requests under way end with RequestFailed: which of them is
to blame is not known. The thread goes on.
"""

import logging
import os
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
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
from minikv.serving.block_life import BlockLife
from minikv.serving.inbox import RequestFailed, as_it_stands
from minikv.serving.scores import Scored
from minikv.validation import Prompt, make_request

log = logging.getLogger("minikv")

ATTEMPTS = 2  # of a step


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

    def cancel(self) -> None:
        """Stop the request before the next step, unless it is over."""
        self._loop.cancel(self)


class EngineLoop:
    """Steps an engine whenever it has something to do. Give it an engine that no other thread
    uses."""

    def __init__(self, engine: Engine, life: BlockLife | None = None):
        """`life`: one that was given to the engine as a listener, for the metrics."""
        self.engine, self.tokenizer, self._life = engine, engine.lm.tokenizer, life
        engine.runner.sampler = Scored(engine.runner)
        config = engine.config
        # The engine's own tokens need not be checked, as `lm.decode` does.
        self._decode = engine.lm.decode if self.tokenizer is None else self.tokenizer.decode
        self.max_length = min(engine.lm.config.max_context, config.num_blocks * config.block_size)
        self.vocab_size = engine.lm.config.vocab_size
        engine.generate([[0]], SamplingParams(max_tokens=2, ignore_eos=True))  # compiles
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()  # for between two steps
        self._answers: dict[int, Answer] = {}  # unfinished ones, by request id of the engine
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
        """Of this one engine. A step that never ends shows in `age`."""
        since = self._busy_since
        age = 0.0 if since is None else monotonic() - since
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
        num_failures = 0
        while not self._is_over:
            if self._watchers:
                self._show()
            self._do_calls(waits=not self._answers)
            if not self._answers:
                continue
            self._busy_since = monotonic()
            try:
                outputs = self.engine.step()
            except BaseException as error:  # this thread must not end with readers that wait
                num_failures += 1
                log.error("a step has failed", exc_info=error)
                if num_failures == ATTEMPTS:
                    self._fail(f"the engine has failed: {type(error).__name__}")
                    num_failures = 0
            else:
                num_failures = 0
                self._hand_over(outputs.requests)
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
        request_id = self.engine.add_request(checked.prompt_ids, checked.params)
        answer.request = self.engine.request(request_id)
        self._answers[request_id] = answer

    def _show(self) -> None:
        requests = [answer.request for answer in self._answers.values()]
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

    def _fail(self, why: str) -> None:
        """End all requests under way. What failed is not quoted: it may have words of others."""
        for answer in list(self._answers.values()):
            answer.reader.put(RequestFailed(why))  # first: a reader may look at the request now
            self._drop(answer)
