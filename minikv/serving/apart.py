"""Steps of an engine that end no request but those that fail.

A step that fails, in whatever way, is tried once more, for an engine loses no request (see
`minikv.engine`). If a step fails again before every request has got a token, each is computed alone
until it has one. Who fails alone is ended; the others go on together, with the tokens that they
would have had.
"""

import logging
from collections.abc import Callable, Sequence as Seq

from minikv.engine import Engine
from minikv.sequence import Request

log = logging.getLogger("minikv")


class Steps:
    """Takes one step after the other. `fails` is told of a request that ends, and why, before its
    end shows. caught: what a step may raise."""

    def __init__(
        self,
        engine: Engine,
        fails: Callable[[int, BaseException], None],
        caught: type[BaseException] = Exception,
    ):
        self._engine, self._fails, self._caught = engine, fails, caught
        self._suspects: set[int] = set()  # requests without a token since a step has failed

    def take(self, requests: Callable[[], Seq[Request]]) -> list[Request]:
        """One step. `requests()`: all that the engine has. Returns those that got tokens."""
        try:
            moved = self._engine.step().requests
            if self._suspects:
                self._suspects -= {request.request_id for request in moved}
            return moved
        except self._caught as error:
            log.error("a step has failed", exc_info=error)
        all_of_them, found = requests(), dict[int, Request]()
        ids = {request.request_id for request in all_of_them}
        if self._suspects.isdisjoint(ids):
            self._suspects = ids
            return []
        self._suspects = set()
        for request in all_of_them:
            try:
                found |= {one.request_id: one for one in self._alone(request)}
            except self._caught as error:
                log.error("request %d has failed alone", request.request_id, exc_info=error)
                found.pop(request.request_id, None)
                self._fails(request.request_id, error)
                self._drop(request)
        return list(found.values())

    def _alone(self, request: Request) -> list[Request]:
        """Compute one request until it has a token more, while the others are put aside. Returns
        the requests that have got tokens: also those of which a failed step did not tell."""
        engine, moved = self._engine, list[Request]()
        engine.recover()
        aside = [one for one in engine.scheduler if one.request is not request]
        for sequence in aside:
            engine.scheduler.remove(sequence)
        try:
            before = _num_tokens(request)
            while _num_tokens(request) == before and _is_unfinished(request):
                moved += engine.step().requests
        finally:
            engine.recover()
            here = set(engine.scheduler)
            for sequence in aside:
                if sequence not in here:
                    engine.scheduler.add(sequence)
        return moved

    def _drop(self, request: Request) -> None:
        try:
            if _is_unfinished(request):
                self._engine.abort(request.request_id)
        except Exception as error:
            log.error("request %d cannot be dropped", request.request_id, exc_info=error)


def _num_tokens(request: Request) -> int:
    return sum(len(one.token_ids) for one in request.sequences if one.num_output)


def _is_unfinished(request: Request) -> bool:
    return None in [one.finish_reason for one in request.sequences]
