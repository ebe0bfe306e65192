"""What an engine is doing, for the page that draws it.

    engine's thread ── show(engine, requests) between two steps ──> View ── await take() ──> JSON

A view takes a picture every `INTERVAL` seconds, and notes each step in between. Its reader gets
the newest picture and all those steps. An engine that nobody watches has no view, and does nothing
for it.
"""

import asyncio
from collections.abc import Callable, Hashable, Sequence as Seq
from contextlib import suppress
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple

from minikv.engine import Engine
from minikv.outputs import Stats
from minikv.radix import Node, Root
from minikv.sequence import Request

INTERVAL = 0.05  # seconds between two pictures
BEGINNING = 24  # tokens of a prompt or a node that are shown as text
MOST_STEPS = 500  # that are kept for a reader who takes nothing


class Held(NamedTuple):
    """The blocks of one request, all samples together."""

    request_id: int
    salt: Hashable
    beginning: list[int]  # tokens
    num_tokens: int
    num_cached: int
    block_ids: list[int]


class Cached(NamedTuple):
    """A node of the radix tree. Its first block names it; `parent` is its parent's name."""

    parent: int | None
    salt: Hashable
    beginning: list[int]
    block_ids: list[int]


class EnginePicture(NamedTuple):
    """An engine between two steps."""

    stats: Stats
    held: list[Held]
    cached: list[Cached]


class View:
    """Somebody who watches an engine. Made inside the event loop of the reader.

    pace: seconds that the engine waits before each step, for eyes to follow.
    sees: whether the reader may read texts of a salt.
    """

    def __init__(
        self, pace: float = 0.0, sees: Callable[[Hashable], bool] = lambda salt: True,
        clock: Callable[[], float] = monotonic,
    ):  # fmt: skip
        self.pace, self._sees, self._clock = pace, sees, clock
        self._loop, self._woken = asyncio.get_running_loop(), asyncio.Event()
        self._lock = Lock()  # guards what follows
        self._picture: EnginePicture | None = None
        self._steps: list[tuple[int, int]] = []  # (tokens computed, tokens generated)
        self._is_over = False
        self._before: Stats | None = None  # only the engine's thread uses these
        self._last = 0.0

    # ── The engine's thread ───────────────────────────────────────────────────

    def show(self, engine: Engine, requests: Seq[Request]) -> None:
        """Note the step before, and take a picture if it is time."""
        stats, before = engine.stats(), self._before
        self._before = stats
        steps = []
        if before is not None and stats.steps > before.steps:
            computed = stats.computed_tokens - before.computed_tokens
            steps.append((computed, stats.generated_tokens - before.generated_tokens))
        is_time = not requests or self.pace > 0 or self._clock() - self._last >= INTERVAL
        picture = picture_of(engine, stats, requests) if is_time else None
        with self._lock:
            self._steps = [*self._steps, *steps][-MOST_STEPS:]
            self._picture = picture or self._picture
        if picture is not None:
            self._last = self._clock()
            self._wake()

    # ── The event loop ────────────────────────────────────────────────────────

    async def take(self) -> tuple[EnginePicture, list[tuple[int, int]]] | None:
        """The newest picture and the steps since the last one; None at the end."""
        await self._woken.wait()
        with self._lock:
            self._woken.clear()
            picture, steps, self._steps = self._picture, self._steps, []
        return None if self._is_over or picture is None else (picture, steps)

    def end(self) -> None:
        """Let `take` return None."""
        self._is_over = True
        self._woken.set()

    def as_json(
        self, engine: Engine, picture: EnginePicture, steps: list[tuple[int, int]]
    ) -> dict[str, Any]:
        """For the page: block ids, and texts where the reader may read them."""

        def text(token_ids: list[int], salt: Hashable) -> str | None:
            return engine.lm.decode(token_ids) if self._sees(salt) else None

        stats = picture.stats
        return {
            "blocks": stats.blocks_total, "block_size": engine.config.block_size,
            "ids": engine.pool.num_blocks, "used": stats.blocks_used,
            "running": stats.running, "waiting": stats.waiting,
            "preemptions": stats.preemptions, "steps": steps, "hit_rate": stats.hit_rate,
            "requests": [
                {
                    "id": one.request_id, "text": text(one.beginning, one.salt),
                    "tokens": one.num_tokens, "cached": one.num_cached, "blocks": one.block_ids,
                }
                for one in picture.held
            ],
            "tree": [
                {
                    "parent": one.parent, "text": text(one.beginning, one.salt),
                    "blocks": one.block_ids,
                }
                for one in picture.cached
            ],
        }  # fmt: skip

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the event loop is closed: there is no reader any more
            self._loop.call_soon_threadsafe(self._woken.set)


def picture_of(engine: Engine, stats: Stats, requests: Seq[Request]) -> EnginePicture:
    """Lists of its own, which later steps do not change."""
    held = []
    for request in requests:
        tables = [one.table for one in request.sequences if one.table is not None]
        block_ids = dict.fromkeys(block_id for table in tables for block_id in table.block_ids)
        held.append(Held(
            request.request_id, request.params.cache_salt, request.prompt_ids[:BEGINNING],
            sum(one.num_tokens for one in request.sequences), request.sequences[0].num_cached,
            list(block_ids),
        ))  # fmt: skip
    nodes = engine.cache.nodes() if engine.cache is not None else ()
    return EnginePicture(stats, held, [_cached(node) for node in nodes])


def _cached(node: Node) -> Cached:
    parent, top = node.parent, node
    while top.parent is not None:
        top = top.parent
    tokens = [token_id for key in node.keys[:4] for token_id in key]
    name = parent.block_ids[0] if parent.block_ids else None
    assert isinstance(top, Root)
    return Cached(name, top.salt, tokens[:BEGINNING], list(node.block_ids))
