"""The tiers under the radix tree: where a block goes when the device needs its room, and back.

    device     the radix tree's blocks. An evicted block is copied to the host.
    host       blocks by name (`HostPool`), in the memory that preemption by swap uses, too.
               A block that has to make room is written to the disk.
    disk       entries by name, read and written by a thread beside the engine (`Background`)
    store      entries by name on a server, which other engines read and write as well (`Shared`)

Each tier drops its least recently used block first; what the last tier drops is forgotten. A block
that was brought back stays in the lower tiers as well, so it need not be copied when it is evicted
again.

Going down: the pool tells (`minikv.events`) when the last holder of a named block releases it.
That happens while a step is planned. The copy is made when the plan is complete and before it runs,
because until then nothing overwrites the block. Every full block is also copied to the store as
soon as it is in the tree, for other engines.

Coming back: before a step is planned, `bring_back` looks up the blocks of the sequences that could
be admitted. Those on the host are copied into the tree, where the scheduler finds them like any
other prefix. Those on the disk are fetched while other sequences run; their sequence stays out of
the queue for that time, but no longer than computing the tokens would take. The store is asked
first, once per sequence, about all blocks that are nowhere else, and is given only a moment: no
answer is a miss. A step copies no more tokens than it may compute (`max_batch_tokens`), so a decode
is not delayed by more than one chunk.
"""

from collections.abc import Callable, Hashable, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any
from weakref import finalize

from minikv.blocks import BlockPool, blocks_for
from minikv.config import EngineConfig
from minikv.engine import Engine
from minikv.errors import OutOfBlocks, parse_bytes
from minikv.events import LowerTiers, wrap
from minikv.paged import KVStore
from minikv.radix import MatchResult, RadixCache
from minikv.runner import Runner
from minikv.scheduler import Plan, Scheduler
from minikv.sequence import Sequence
from minikv.tiers import entry
from minikv.tiers.blocks import parts_of, read_block, read_blocks, write_block
from minikv.tiers.costs import FAST_ENOUGH, FittedLine, Link, Prefill, blocks_to_fetch
from minikv.tiers.disk import DiskTier
from minikv.tiers.host import HostPool
from minikv.tiers.identity import model_fingerprint
from minikv.tiers.moves import Place, demote, promote
from minikv.tiers.names import Name, block_names, identity_of, name_new, root_name
from minikv.tiers.shared import Shared
from minikv.tiers.store import FORGET_AFTER, Background, Fetch, Question, SharedTier, Unpack, log
from minikv.version import __version__

UNKNOWN_RATE = 100.0  # tokens per second: slow, until a prefill is measured
AT_ONCE = 0.001  # seconds that the engine waits for the store's answer, before the next step
ANSWER_SOON = 0.05  # seconds that a sequence waits for it at most, while others run


@dataclass
class TierStats:
    """What one tier below the device has done."""

    blocks: int = 0  # that are there now
    hits: int = 0  # blocks that sequences got from there
    bytes_in: int = 0  # written to the tier
    bytes_out: int = 0  # read from it
    seconds_in: float = 0.0
    seconds_out: float = 0.0
    dropped: int = 0  # blocks that the tier could not take, or refused to give


@dataclass
class Returning:
    """What is known about a waiting sequence's blocks below the device."""

    names: list[Name]
    coming: list[Fetch | Question] = field(default_factory=list)
    until: float = 0.0  # when the sequence stops waiting for them
    in_store: set[Name] = field(default_factory=set)
    fetched: dict[Name, str] = field(default_factory=dict)  # from which tier; each only once


class LastHold(BlockPool):
    """The device's pool as `demote` sees it for a block whose last holder is about to release it:
    the block is not released twice."""

    def __init__(self, pool: BlockPool):
        self.pool = pool

    def ref_count(self, block_id: int) -> int:
        return self.pool.ref_count(block_id)

    def acquire(self, block_id: int) -> None:
        self.pool.acquire(block_id)

    def release(self, block_id: int) -> None:
        if self.pool.ref_count(block_id) > 1:
            self.pool.release(block_id)


class Tiers(LowerTiers):
    """The host and the disk of one engine, and its way to a store. It listens to the engine's pool
    and prefix cache, and plans each step with its scheduler."""

    pool: BlockPool  # the engine's, and its prefix cache
    cache: RadixCache

    def __init__(
        self, runner: Runner, config: EngineConfig, shared: SharedTier | None = None,
        clock: Callable[[], float] = perf_counter,
    ):  # fmt: skip
        """`shared`: the store that `config.store` names."""
        self.runner, self.config, self.clock = runner, config, clock
        self.store, self.host_store = runner.store, runner.host_store
        self.host_moves = TierStats()
        self.fetched_hits = {"disk": 0, "store": 0}
        self.copying = FittedLine(FORGET_AFTER, clock)  # seconds of a copy from the host, by bytes
        self.prefilling = FittedLine()  # seconds of a step, by tokens
        self.block_shapes = {
            name: (part.shape[0], *part.shape[2:]) for name, part in parts_of(self.store).items()
        }
        self.block_bytes = sum(
            part[:, 0].numel() * part.element_size() for part in parts_of(self.store).values()
        )
        self.disk: Background | None = None
        self.start_over()
        if config.disk_path is not None:
            max_bytes = parse_bytes("disk_bytes", config.disk_bytes)
            tier = DiskTier(config.disk_path, max_bytes)
            self.disk = Background(tier)
            finalize(self, self.disk.close)
        self.shared: Shared | None = None
        if shared is not None:
            self.shared = Shared(shared)
            finalize(self, self.shared.close)

    def start_over(self) -> None:
        """Begin with an empty device and host. The disk keeps its entries, because their names
        depend on the weights that computed them."""
        self.host = HostPool(self.config.host_blocks, self._leave_host)
        self.names: dict[int, Name] = {}  # of the device blocks in the tree
        self.going_down: dict[int, int] = {}  # host block: device block; planned, not copied yet
        self.returning: dict[Sequence, Returning] = {}
        self.is_planning, self.may_wait = False, True
        self.identity = identity_of(self._facts())
        self._before, self._last_chunk = self.runner.seconds, 0

    def _facts(self) -> dict[str, str]:
        """What K and V depend on besides the tokens. Nothing, if only this engine's host has
        them."""
        if self.config.disk_path is None and self.config.store is None:
            return {}
        return {
            "course": __version__,
            "model": model_fingerprint(self.runner.transformer),
            "kv_dtype": self.config.kv_dtype,
            "layout": str([(name, str(part.dtype), self.block_shapes[name])
                           for name, part in parts_of(self.store).items()]),
        }  # fmt: skip

    # ── Planning ──────────────────────────────────────────────────────────────

    def hold_back(self, scheduler: Scheduler) -> None:
        scheduler.host_pool = self.host
        wrap(scheduler, "schedule", partial(self.plan, scheduler))

    def plan(self, scheduler: Scheduler, schedule: Callable[[], Plan]) -> Plan:
        """Bring blocks back, then plan without the sequences that still wait for some. If nothing
        else can run, wait for these."""
        plan, held = self._plan_once(scheduler, schedule)
        while held and self.may_wait and not (plan.sequences or scheduler.running):
            self.runner.move_blocks(plan)  # before anything is brought back over them
            self.wait(held)
            plan, held = self._plan_once(scheduler, schedule)
        return plan

    def _plan_once(
        self, scheduler: Scheduler, schedule: Callable[[], Plan]
    ) -> tuple[Plan, list[Sequence]]:
        """A plan, and the sequences that had to wait. Copies to the host are collected while it is
        made; they are made when it is complete."""
        self.is_planning = True
        try:
            with self.host.plan():
                held = self.bring_back(scheduler)
                for sequence in held:
                    scheduler.waiting.remove(sequence)
                plan = schedule()
                self.copy_down()
        finally:
            self.is_planning = False
        self.measure(plan)
        for sequence in held:
            scheduler.add(sequence)
        return plan, held

    # ── What the pool and the prefix cache tell ───────────────────────────────

    def begin(self, pool: BlockPool, cache: RadixCache | None) -> None:
        assert cache is not None, "an engine without a prefix cache has no tiers"
        self.pool, self.cache = pool, cache
        self.start_over()

    def clearing(self) -> None:
        """Forget everything on the device and on the host."""
        self.names.clear()
        self.host.forget_all()

    def stored(self, token_ids: Seq[int], block_ids: Seq[int], salt: Hashable) -> None:
        """Name those of the tree's blocks of a prefix that have no name yet."""
        size = self.config.block_size
        new = name_new(self.names, self.identity, salt, token_ids, block_ids, size)
        if self.config.write_through:
            self._write_through(new)
        if self.shared is not None:
            self._share(self.shared, new)

    def freeing(self, block_id: int) -> None:
        """If the block has a name, let the host keep its content."""
        name = self.names.pop(block_id, None)
        if name is None:
            return
        place = Place(block_id, self.host.find(name))
        is_there = place.host is not None
        try:
            demote(place, LastHold(self.pool), self.host, self._plan_copy)
        except OutOfBlocks:  # all of the host is in use by swapped-out sequences
            self.host_moves.dropped += 1
            return
        if is_there:
            self.host.touch(name)
            return
        self._keep(place.host, name)
        if not self.is_planning:
            self.copy_down()

    # ── Down ──────────────────────────────────────────────────────────────────

    def copy_down(self) -> None:
        """Make the planned copies to the host."""
        if self.going_down:
            pairs = [(device, host) for host, device in self.going_down.items()]
            self.going_down = {}
            started = self.clock()
            self.store.copy_to(self.host_store, pairs)
            self.host_moves.seconds_in += max(0.0, self.clock() - started)
            self.host_moves.bytes_in += len(pairs) * self.block_bytes

    def _plan_copy(self, device: int, host: int) -> None:
        self.going_down[host] = device

    def _keep(self, host_block: int | None, name: Name) -> None:
        """Name a host block that was just allocated, and release it."""
        assert host_block is not None
        self.host.remember(host_block, name)
        self.host.release(host_block)

    def _leave_host(self, block_id: int, name: Name) -> None:
        """A host block is about to be allocated for something else: write it to the disk."""
        if block_id in self.going_down:
            self.copy_down()
        if self.disk is not None:
            self._put(self.host_store, block_id, name)

    def _put(self, store: KVStore, block_id: int, name: Name) -> None:
        """Write a block to the disk, unless it is there."""
        assert self.disk is not None
        if name not in self.disk:
            self.disk.put(name, self.identity, read_block(store, block_id))

    def _write_through(self, block_ids: Seq[int]) -> None:
        """Copy new blocks of the tree to the host, and to the disk, at once."""
        new: list[tuple[int, Name]] = []
        for block_id in block_ids:
            name = self.names[block_id]
            if name not in self.host and self.host.num_free > 0:
                new.append((self.host.allocate(), name))
                self._plan_copy(block_id, new[-1][0])
        self.copy_down()
        for host_block, name in new:
            self._keep(host_block, name)
            self._leave_host(host_block, name)

    def _share(self, shared: Shared, block_ids: Seq[int]) -> None:
        """Send new blocks of the tree to the store."""
        new = [block_id for block_id in block_ids if self.names[block_id] not in shared]
        for block_id, data in zip(new, read_blocks(self.store, new), strict=True):
            shared.put(self.names[block_id], self.identity, data)

    def flush(self) -> None:
        """Write every named block to the disk, if there is one, for the next process, within
        `disk_bytes`. Returns when the disk and the store have what was sent to them. If a write
        fails (another process holds the database, the disk is full) or takes for ever, the rest is
        left out, and the log says so."""
        if self.shared is not None:
            self.shared.wait()
        if self.disk is None:
            return
        self.copy_down()
        blocks = [(self.host_store, block_id, name) for name, block_id in self.host]
        blocks += [(self.store, block_id, name) for block_id, name in self.names.items()]
        at_once = max(1, self.disk.BATCH // self.block_bytes)
        parts = [blocks[start : start + at_once] for start in range(0, len(blocks), at_once)]
        for part in [[], *parts]:  # first there has to be room for them
            for block in part:
                self._put(*block)
            if not self.disk.wait():
                log.warning("flush: the disk did not take all blocks; they will be computed again")
                return

    # ── Back ──────────────────────────────────────────────────────────────────

    def bring_back(self, scheduler: Scheduler) -> list[Sequence]:
        """For the next sequences in the queue, copy blocks from the host into the tree, and begin
        to fetch those on the disk. Returns the sequences that must wait for more blocks."""
        # A sequence whose seat was taken by another meanwhile keeps what came for it.
        self.returning = {
            sequence: state
            for sequence, state in self.returning.items()
            if sequence.table is None and sequence.finish_reason is None
        }
        below = self.shared is not None or (self.disk is not None and bool(self.disk.known))
        if self.host.num_named == 0 and not below:
            return []
        budget = max(1, self.config.max_batch_tokens // self.config.block_size)
        room = self.pool.num_free + self.cache.num_evictable_blocks
        room -= len(scheduler.running)
        held: list[Sequence] = []
        seats = max(0, self.config.max_num_seqs - len(scheduler.running))
        for sequence in scheduler.waiting[:seats]:
            if sequence.host_block_ids is not None:
                continue
            state = self.returning.get(sequence)
            if state is None:
                root = root_name(self.identity, sequence.request.params.cache_salt)
                tokens = sequence.token_ids[:-1]
                names = block_names(root, tokens, self.config.block_size) if root else []
                state = Returning(names)
                self._ask_store(state, sequence)
                self.returning[sequence] = state
            copied, used, waits = self._bring_one_back(sequence, state, scheduler, budget, room)
            budget -= copied
            room -= used
            if waits:
                held.append(sequence)
            if room <= 0:
                break
        return held

    def _bring_one_back(
        self, sequence: Sequence, state: Returning, scheduler: Scheduler, budget: int, room: int
    ) -> tuple[int, int, bool]:
        """(blocks copied, blocks that the sequence will need, whether it has to wait)."""
        size, cache = self.config.block_size, self.cache
        if state.coming and not self._has_arrived(state):
            return 0, 0, True
        token_ids, salt = sequence.token_ids, sequence.request.params.cache_salt
        match = cache.match(token_ids[:-1], salt)
        needed = blocks_for(len(token_ids), size) - len(match.block_ids)
        first = len(match.block_ids)
        tiers = self._tiers_from(state, first)
        if not tiers or needed > room:
            return 0, needed, False
        if (first + len(tiers)) * size < max(1, self.config.min_prefix_tokens):
            return 0, needed, False
        count = blocks_to_fetch(tiers, self.block_bytes, size, *self.rates())
        on_host = next((i for i, tier in enumerate(tiers[:count]) if tier != "host"), count)
        names = state.names[first : first + min(on_host, budget)]
        copied = self._copy_up(sequence, match, names) if names else 0
        if copied < len(names):  # the device has less room than it seemed
            return copied, needed, False
        if copied < on_host:
            return copied, needed, True
        if on_host < count:
            most = max(1, self.config.host_blocks // 2)
            start = first + on_host
            end = start + min(count - on_host, most, max(1, budget))
            self._fetch(state, start, tiers[on_host:][: end - start])
            state.until = self.clock() + self.rates()[1].seconds((end - start) * size)
            return copied, needed, True
        return copied, needed, False

    def _fetch(self, state: Returning, start: int, tiers: list[str]) -> None:
        """Begin to fetch the blocks of a prefix from `start` on, each from its tier."""
        for tier, below in (("disk", self.disk), ("store", self.shared)):
            indices = [start + i for i, one in enumerate(tiers) if one == tier]
            if indices and below is not None:
                names = [state.names[index] for index in indices]
                state.coming.append(below.get(names, self._unpacker()))
                state.fetched |= dict.fromkeys(names, tier)

    def _ask_store(self, state: Returning, sequence: Sequence) -> None:
        """Begin to ask the store for all blocks after those that are here."""
        if self.shared is None:
            return
        match = self.cache.match(sequence.token_ids[:-1], sequence.request.params.cache_salt)
        first = len(match.block_ids)
        names = state.names[first + len(self._tiers_from(state, first)) :]
        if names and len(state.names) * self.config.block_size >= self.config.min_prefix_tokens:
            question = self.shared.ask(names)
            state.coming.append(question)
            computing = self.rates()[1].seconds(len(names) * self.config.block_size)
            state.until = self.clock() + min(ANSWER_SOON, computing)
            question.done.wait(min(AT_ONCE, computing))

    def _tiers_from(self, state: Returning, first: int) -> list[str]:
        """The tier of each block after the device's hit, up to the first that is nowhere."""
        tiers = []
        for name in state.names[first:]:
            if name in self.host:
                tiers.append("host")
            elif name in state.fetched:  # but not on the host: it is lost, or comes too late
                break
            elif self.disk is not None and name in self.disk:
                tiers.append("disk")
            elif name in state.in_store:
                tiers.append("store")
            else:
                break
        return tiers

    def _copy_up(self, sequence: Sequence, match: MatchResult, names: list[Name]) -> int:
        """Copy these host blocks into the tree, behind `match`; returns how many."""
        cache, pool = self.cache, self.pool
        sources = [block for block in map(self.host.find, names) if block is not None]
        for block_id in sources:  # before room is made, which may demote and push these out
            self.host.acquire(block_id)
        cache.lock(match.node)
        pairs: list[tuple[int, int]] = []
        new: list[int] = []
        try:
            short = len(sources) - pool.num_free
            if short > 0:
                cache.evict(short)
            self.copy_down()  # what was evicted, before anything is written over it
            for source in sources[: pool.num_free]:
                promote(
                    Place(None, source),
                    pool,
                    self.host,
                    lambda *pair: pairs.append(pair),
                    keep=True,
                )
                new.append(pairs[-1][1])
            started = self.clock()
            self.host_store.copy_to(self.store, pairs)
            seconds = self.clock() - started
        finally:
            cache.unlock(match.node)
            for block_id in reversed(sources):  # the first one is the most recently used
                self.host.release(block_id)
        if not new:
            return 0
        num_bytes = len(new) * self.block_bytes
        self.copying.add(num_bytes, seconds)
        self.host_moves.seconds_out += max(0.0, seconds)
        self.host_moves.bytes_out += num_bytes
        state = self.returning[sequence]
        for name in names[: len(new)]:
            if name in state.fetched:
                self.fetched_hits[state.fetched[name]] += 1
            else:
                self.host_moves.hits += 1
        block_ids = [*match.block_ids, *new]
        token_ids = sequence.token_ids[: len(block_ids) * self.config.block_size]
        cache.insert(token_ids, block_ids, sequence.request.params.cache_salt)
        for block_id in new:
            pool.release(block_id)  # the tree holds it now
        return len(new)

    def _has_arrived(self, state: Returning) -> bool:
        """Whether everything has come, or has taken too long; then it may still come for others.
        What has come goes to the host."""
        is_late = self.clock() >= state.until
        if not (is_late or all(one.done.is_set() for one in state.coming)):
            return False
        for one in reversed(state.coming):
            if not one.done.is_set():
                continue
            if isinstance(one, Question):
                state.in_store |= one.there
            else:
                self._take_in(one)
        state.coming = []
        return True

    def _take_in(self, fetch: Fetch) -> None:
        """Put what was fetched on the host, as far as there is room; the beginning of the prefix as
        the most recently used."""
        for name in reversed(fetch.names):
            data = fetch.found.get(name)
            if data is None or name in self.host:
                continue
            try:
                block_id = self.host.allocate()
            except OutOfBlocks:
                break
            write_block(self.host_store, block_id, data)
            self._keep(block_id, name)

    def rates(self) -> tuple[dict[str, Link], Prefill]:
        """What has been measured so far. What has not been measured counts as fast enough: small
        reads say nothing about large reads, which would otherwise never be tried."""
        start, rate = self.prefilling.fit() or (0.0, UNKNOWN_RATE)
        host = self.copying.fit(flat=True) or (0.0, FAST_ENOUGH)
        links = {"host": Link(*host)}
        for name, below in (("disk", self.disk), ("store", self.shared)):
            if below is not None:
                latency, bandwidth = below.reading.fit(flat=True) or (0.0, FAST_ENOUGH)
                # A block from there goes to the host first.
                links[name] = Link(latency + host[0], 1 / (1 / bandwidth + 1 / host[1]))
        return links, Prefill(start, rate)

    def measure(self, plan: Plan) -> None:
        """Note how long the step before this plan took, if most of it was prefill."""
        seconds = self.runner.seconds
        tokens, took = self._last_chunk, seconds - self._before
        if tokens:
            self.prefilling.add(tokens, took)
        chunks = sum(plan.num_tokens[plan.num_decodes :])
        self._before = seconds
        self._last_chunk = chunks if chunks >= max(16, 4 * plan.num_decodes) else 0

    def wait(self, held: Seq[Sequence]) -> None:
        """Wait a moment for one of the blocks or answers that these sequences need. For when
        nothing else can run."""
        for sequence in held:
            state = self.returning[sequence]
            for one in state.coming:
                if not one.done.is_set():
                    one.done.wait(min(0.05, max(1e-4, state.until - self.clock())))
                    return

    def _unpacker(self) -> Unpack:
        """What opens entries, with the present identity, even if the weights change meanwhile."""
        return partial(entry.unpack, identity=self.identity, num_bytes=self.block_bytes)

    # ── To look at ────────────────────────────────────────────────────────────

    def where(self, token_ids: Seq[int], salt: Hashable = None) -> list[str]:
        """For each whole block of a prefix the fastest tier that has it: "device", "host", "disk",
        "store", or "" if none has."""
        return [next(iter(tiers), "") for tiers in self.everywhere(token_ids, salt)]

    def everywhere(self, token_ids: Seq[int], salt: Hashable = None) -> list[list[str]]:
        """For each whole block of a prefix all tiers that have it, the fastest first. The store is
        not asked: it counts as having what this engine has written or seen there."""
        root = root_name(self.identity, salt)
        names = block_names(root, token_ids, self.config.block_size) if root else []
        tiers: dict[str, Any] = {
            "device": set(self.names.values()),
            "host": self.host,
            "disk": self.disk if self.disk is not None else (),
            "store": self.shared if self.shared is not None else (),
        }
        return [[tier for tier, known in tiers.items() if name in known] for name in names]

    def stats(self) -> dict[str, TierStats]:
        """By tier."""
        host = TierStats(**vars(self.host_moves))
        host.blocks = self.host.num_named
        tiers = {"host": host}
        both = [("disk", self.disk, self.disk)] if self.disk is not None else []
        if self.shared is not None:
            both.append(("store", self.shared.reader, self.shared.writer))
        for tier, reader, writer in both:
            tiers[tier] = TierStats(
                len(writer.known), self.fetched_hits[tier], writer.num_bytes_out,
                reader.num_bytes_in, writer.seconds_out, reader.seconds_in,
                writer.num_dropped + reader.num_bad,
            )  # fmt: skip
        return tiers

    def check(self) -> None:
        """Raise AssertionError, naming what is broken, unless every invariant holds."""
        self.host.check()
        cached = set(self.cache.block_ids())
        if not self.names.keys() <= {b for b in self.names if self.pool.ref_count(b) > 0}:
            raise AssertionError("tiers: a free device block has a name")
        if len(set(self.names.values())) != len(self.names):
            raise AssertionError("tiers: two device blocks have one name")
        if self.going_down or self.is_planning:
            raise AssertionError("tiers: a copy is still planned")
        if not cached >= self.names.keys():
            raise AssertionError("tiers: a named block is not in the tree")


def tiers_of(engine: Engine) -> Tiers:
    """The tiers below an engine's device. Raises ValueError if it has none."""
    if not isinstance(engine.tiers, Tiers):
        raise ValueError("engine: has no tiers; set EngineConfig.host_blocks, with a prefix cache")
    return engine.tiers
