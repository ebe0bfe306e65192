"""How long a prefix cache keeps blocks and how often they are used: three metrics of vLLM.

    stored ──── reuse gap ──── used ──── reuse gap ──── used ──── idle ──── evicted
       └───────────────────────────── lifetime ────────────────────────────────┘

A cache that is too small evicts what it would need soon: blocks live shorter than the gaps are.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from time import monotonic

from minikv.blocks import BlockPool
from minikv.events import Listener
from minikv.radix import RadixCache
from minikv.serving.gaps import Gaps

SECONDS = tuple(base * 10.0**power for power in range(-3, 4) for base in (1, 2, 5))


class BlockLife(Listener):
    """Listens to one engine, in its thread. A block is used whenever a sequence takes hold of it:
    after a hit, or as a sample of the same prompt."""

    def __init__(self, clock: Callable[[], float] = monotonic):
        self._clock = clock
        self.lifetime, self.idle_before_evict, self.reuse_gap = (Gaps(SECONDS) for _ in range(3))

    def begin(self, pool: BlockPool, cache: RadixCache | None) -> None:
        self._stored: dict[int, float] = {}  # when, by block
        self._used: dict[int, float] = {}
        pool.acquire = partial(self._acquire, pool.acquire)  # type: ignore[method-assign]

    def stored(self, token_ids: Sequence[int], block_ids: Sequence[int], salt: Hashable) -> None:
        now = self._clock()
        for block_id in block_ids:
            if block_id not in self._stored:
                self._stored[block_id] = self._used[block_id] = now

    def freeing(self, block_id: int) -> None:
        if block_id in self._stored:
            now = self._clock()
            self.lifetime.observe(now - self._stored.pop(block_id))
            self.idle_before_evict.observe(now - self._used.pop(block_id))

    def _acquire(self, acquire: Callable[[int], None], block_id: int) -> None:
        acquire(block_id)
        if block_id in self._stored:
            now = self._clock()
            self.reuse_gap.observe(now - self._used[block_id])
            self._used[block_id] = now
