"""What the tests of tiers share: requests that meet again, a slow tier, damage."""

import itertools
import random
import threading

from helpers import generate
from waiting import PATIENCE

from minikv import SamplingParams
from minikv.tiers.costs import Link, Prefill
from minikv.tiers.shared import Shared
from minikv.tiers.store import Background

TINY = dict(num_blocks=12, max_num_seqs=3, max_batch_tokens=32)  # blocks of 4 tokens


def prompts_of(rng, documents, count):
    """Beginnings of documents, each with an end of its own."""
    return [
        rng.choice(documents)[: rng.randint(4, 32)] + [rng.randrange(1, 50) for _ in range(2)]
        for _ in range(count)
    ]


def documents_of(rng, count=6, length=32):
    return [[rng.randrange(1, 300) for _ in range(length)] for _ in range(count)]


def params(max_tokens=4, **more):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)


def fill(engine, count=4, seed=1, length=32, **more):
    """Serve unrelated prompts, so that everything else is evicted from the device."""
    prompts = documents_of(random.Random(seed), count, length)
    generate(engine, prompts, params(2, **more))


PROMPT = list(range(1, 34))  # 8 blocks and one token


class SlowTier:
    """A tier in a dictionary that answers when it may: `go` for entries, `tell` for questions."""

    timeout = PATIENCE

    def __init__(self):
        self.entries, self.go, self.tell = {}, threading.Event(), threading.Event()
        self.go.set()
        self.tell.set()
        self.awaited = set()  # events that it has waited for
        self.hours, self.has_given_up = itertools.count(1), False

    def late(self, event):
        """A clock that stands still until an event is waited for; then a look is an hour later."""
        return lambda: 3600.0 * next(self.hours) if event in self.awaited else 0.0

    def names(self):
        return list(self.entries)

    def contains(self, names):
        self.await_(self.tell)
        return [name in self.entries for name in names]

    def get_many(self, names):
        self.await_(self.go)
        return [self.entries.get(name) for name in names]

    def await_(self, event):
        self.awaited.add(event)
        self.has_given_up |= not event.wait(PATIENCE)
        assert not self.has_given_up

    def put_many(self, entries):
        self.entries |= entries
        return []

    def remove(self, name):
        self.entries.pop(name, None)

    def close(self):
        pass


def engine_over(engine_of, tier, tmp_path, below="disk", **config):
    """An engine whose disk, or store, is `tier`."""
    if below == "store":
        engine = engine_of(host_blocks=4, **config)
        engine.tiers.shared = Shared(tier)
        return engine
    engine = engine_of(**config, disk_path=tmp_path)
    engine.tiers.disk.close()
    engine.tiers.disk = Background(tier)
    return engine


def damaged(rng: random.Random, data: bytes) -> bytes:
    """One of: some bits flipped, cut off, something behind it, a piece from elsewhere."""
    bad = bytearray(data)
    kind = rng.randrange(4)
    if kind == 0:
        for _ in range(rng.randint(1, 4)):
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del bad[rng.randrange(len(bad)) :]
    elif kind == 2:
        bad += rng.randbytes(rng.randint(1, 9))
    else:
        start = rng.randrange(len(bad))
        bad[start : start + 8] = rng.randbytes(rng.randint(0, 12))
    return bytes(bad)


def fetch_everything(engine):
    """To fetch is quicker than to compute, and nothing is late: the clock stands still."""
    fast = dict.fromkeys(("host", "disk", "store"), Link(0, 1e9))
    engine.tiers.rates = lambda: (fast, Prefill(0, 1e-3))
    engine.tiers.clock = lambda: 0.0
    if engine.tiers.disk is not None:
        engine.tiers.disk.stuck = PATIENCE
    if engine.tiers.shared is not None:
        engine.tiers.shared.tier.timeout = PATIENCE
        engine.tiers.shared.reader.stuck = engine.tiers.shared.writer.stuck = PATIENCE


def ends(action):
    """Run something that must not wait for ever."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it waits for ever"
