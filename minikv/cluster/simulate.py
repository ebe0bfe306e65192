"""Requests through many workers, without computing a token: when would each have its answer?

    costs = StepSeconds(start=5e-3, prefill=1e-4, decode=1e-4)
    report = simulate(requests, ByPrefix(8, block_size=512), costs, cache_blocks=1000)
    print(report.hit_rate, report.ttft(99), report.imbalance)

A worker computes prompts one after the other, in chunks, beside its decodes, as the engine does. A
step takes

    start + prefill · (tokens of the chunk) + decode · (sequences that decode)     seconds

and three events can change what a step contains: a request arrives, a prompt is computed, an answer
is complete. Between two events all steps of a worker are alike, so it advances by any number of
steps at once. That is why a trace of thousands of requests on a thousand workers takes only
seconds. Fractions of steps are counted, so a time may be wrong by a step or two.

Left out: attention that takes longer with longer contexts, preemption, and sharing of the network.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from minikv.cluster.routing import LeastLoaded, Name, Router, Ticket
from minikv.errors import require_int


class StepSeconds(NamedTuple):
    """What a worker's step takes, in seconds."""

    start: float  # per step, whatever is in it
    prefill: float  # per prompt token
    decode: float  # per sequence that decodes


class NetworkLink(NamedTuple):
    """A way for K and V between machines."""

    latency: float  # seconds
    bandwidth: float  # bytes per second
    block_bytes: int

    def seconds(self, num_blocks: int) -> float:
        return self.latency + num_blocks * self.block_bytes / self.bandwidth if num_blocks else 0.0


class Arrival(NamedTuple):
    """A request."""

    time: float  # seconds after the first
    names: Seq[Name]  # of the prompt's blocks, in order; the last one may be partly filled
    num_tokens: int  # of the prompt
    num_output: int
    session: Hashable = None


class Blocks:
    """The blocks that a worker or a store holds, by name; the least recently used go first, and of
    one prompt its last block before its first."""

    def __init__(self, num_blocks: int | None = None):
        self.num_blocks = num_blocks  # None: no bound
        self.names: OrderedDict[Name, None] = OrderedDict()

    def hits(self, names: Seq[Name]) -> int:
        """How many of the first blocks are here."""
        return next((i for i, name in enumerate(names) if name not in self.names), len(names))

    def put(self, names: Seq[Name]) -> tuple[int, list[Name]]:
        """Hold these blocks as the newest. Returns how many are new, and which were evicted."""
        held = len(self.names)
        for name in reversed(names):
            self.names[name] = None
            self.names.move_to_end(name)
        num_new = len(self.names) - held
        evicted = []
        while self.num_blocks is not None and len(self.names) > self.num_blocks:
            evicted.append(self.names.popitem(last=False)[0])
        return num_new, evicted


@dataclass(slots=True)
class SimulatedJob:
    """A request in the cluster, and what became of it. Times in seconds after the first arrival."""

    arrival: Arrival
    ticket: Ticket
    to_compute: float = 0  # prompt tokens; set when its prefill begins
    num_hits: int = 0  # blocks that its worker held, or fetched
    num_fetched: int = 0
    first_token: float = 0.0
    end: float = 0.0
    in_prefill: bool = False

    @property
    def ttft(self) -> float:
        """Seconds from arrival to first token."""
        return self.first_token - self.arrival.time

    @property
    def tbt(self) -> float:
        """Mean seconds between its tokens; 0 if it has one."""
        return (self.end - self.first_token) / max(self.arrival.num_output - 1, 1)


@dataclass(slots=True)
class SimulatedWorker:
    """One engine: a queue of prompts, sequences that decode, and the blocks that it holds."""

    costs: StepSeconds
    chunk: int  # prompt tokens per step, at most
    max_num_seqs: int
    blocks: Blocks
    queue: deque[SimulatedJob] = field(default_factory=deque)
    decoding: list[tuple[float, int, SimulatedJob]] = field(default_factory=list)  # by last step
    steps: float = 0.0
    now: float = 0.0  # the time up to which it is simulated
    busy: float = 0.0  # seconds in which it had something to do
    version: int = 0  # of its next event

    @property
    def prefills(self) -> bool:
        """Whether a prompt is being computed: the first in the queue, if there is a seat for it."""
        return bool(self.queue) and len(self.decoding) < self.max_num_seqs

    @property
    def step_seconds(self) -> float:
        chunk = self.chunk if self.prefills else 0
        return (
            self.costs.start + self.costs.prefill * chunk + self.costs.decode * len(self.decoding)
        )

    def move_to(self, time: float) -> None:
        """Let it work until `time`; nothing begins or ends before that."""
        passed = time - self.now
        if self.prefills or self.decoding:
            steps = passed / self.step_seconds
            self.busy += passed
            self.steps += steps
            if self.prefills:
                self.queue[0].to_compute -= steps * self.chunk
        self.now = time

    def next_event(self) -> float | None:
        """When a prompt will be computed or an answer complete, if nothing arrives before."""
        steps = [self.decoding[0][0] - self.steps] if self.decoding else []
        if self.prefills:
            steps.append(self.queue[0].to_compute / self.chunk)
        return self.now + max(0.0, min(steps)) * self.step_seconds if steps else None


class FleetReport(NamedTuple):
    """The result of a simulation."""

    jobs: list[SimulatedJob]
    busy: list[float]  # seconds of each worker that computes prompts
    network_bytes: int

    @property
    def hit_rate(self) -> float:
        """The share of the prompts' blocks that were not computed."""
        total = sum(len(job.arrival.names) for job in self.jobs)
        return sum(job.num_hits for job in self.jobs) / max(total, 1)

    @property
    def imbalance(self) -> float:
        """Busy seconds of the busiest worker over the mean."""
        return max(self.busy) * len(self.busy) / max(sum(self.busy), 1e-12)

    def ttft(self, percent: float) -> float:
        """Seconds from arrival to first token, at a percentile."""
        return percentile([job.ttft for job in self.jobs], percent)

    def tbt(self, percent: float) -> float:
        """Mean seconds between the tokens of a request, at a percentile of the requests."""
        return percentile([job.tbt for job in self.jobs if job.arrival.num_output > 1], percent)

    def in_time(self, ttft: float, tbt: float) -> float:
        """The share of requests within both limits. Goodput counts only these, per second."""
        return sum(job.ttft <= ttft and job.tbt <= tbt for job in self.jobs) / len(self.jobs)


def simulate(
    arrivals: Iterable[Arrival],
    router: Router,
    costs: StepSeconds,
    *,
    cache_blocks: int | None = None,
    chunk: int = 512,
    max_num_seqs: int = 256,
    store: NetworkLink | None = None,
    store_blocks: int | None = None,
    decode_workers: int = 0,
    hand_over: NetworkLink | None = None,
) -> FleetReport:
    """Serve `arrivals` (ascending in time) by the router's workers.

    cache_blocks: of each worker, None for no bound. store: the link to a store behind all workers,
    of `store_blocks`; blocks are fetched if that is quicker than computing them. decode_workers: so
    many additional workers decode, and those of the router only compute prompts; a prompt's K and V
    go over the link `hand_over`.
    """
    if decode_workers and hand_over is None:
        raise ValueError("hand_over: workers that only decode need a link to them")
    cluster = _Cluster(router, costs, cache_blocks, chunk, max_num_seqs)
    cluster.store = store
    cluster.stored = Blocks(store_blocks)
    cluster.hand_over = hand_over
    cluster.add_decoders(require_int("decode_workers", decode_workers, 0))
    for arrival in arrivals:
        cluster.run_until(arrival.time)
        cluster.arrive(arrival)
    cluster.run_until(float("inf"))
    computing = cluster.workers[: len(router.loads)]
    return FleetReport(cluster.jobs, [worker.busy for worker in computing], cluster.network_bytes)


class _Cluster:
    """The workers and the queue of what happens next."""

    store: NetworkLink | None
    stored: Blocks
    hand_over: NetworkLink | None

    def __init__(
        self,
        router: Router,
        costs: StepSeconds,
        cache_blocks: int | None,
        chunk: int,
        max_num_seqs: int,
    ):
        self.router = router
        self.shape = (
            costs,
            require_int("chunk", chunk, 1),
            require_int("max_num_seqs", max_num_seqs, 1),
        )
        self.workers = [SimulatedWorker(*self.shape, Blocks(cache_blocks)) for _ in router.loads]
        self.placement: Router | None = None  # of sequences on workers that only decode
        self.jobs: list[SimulatedJob] = []
        self.events: list[tuple[float, int, int, int, SimulatedJob | None]] = []
        self.num_events = 0
        self.network_bytes = 0

    def add_decoders(self, number: int) -> None:
        if number:
            self.placement = LeastLoaded(number)
            self.workers += [SimulatedWorker(*self.shape, Blocks(0)) for _ in range(number)]

    def arrive(self, arrival: Arrival) -> None:
        ticket = self.router.route(arrival.names, arrival.num_tokens, arrival.session)
        job = SimulatedJob(arrival, ticket)
        self.jobs.append(job)
        wait = self._fetch(job)
        if wait:
            self._plan(arrival.time + wait, ticket.worker, job)
        else:
            self._enqueue(ticket.worker, job, arrival.time)

    def _fetch(self, job: SimulatedJob) -> float:
        """Bring blocks from the store if that is quicker than computing them; returns seconds."""
        if self.store is None:
            return 0.0
        names, blocks = job.arrival.names, self.workers[job.ticket.worker].blocks
        held = blocks.hits(names)
        found = self.stored.hits(names)
        size, costs = self.router.block_size, self.shape[0]
        if (
            found <= held
            or self.store.seconds(found - held) >= (found - held) * size * costs.prefill
        ):
            return 0.0
        job.num_fetched = found - held
        self.network_bytes += job.num_fetched * self.store.block_bytes
        return self.store.seconds(job.num_fetched)

    def _enqueue(self, index: int, job: SimulatedJob, time: float) -> None:
        worker = self.workers[index]
        worker.move_to(time)
        if job.num_fetched:
            _, evicted = worker.blocks.put(job.arrival.names[: self.stored.hits(job.arrival.names)])
            self.router.removed(index, evicted)
        worker.queue.append(job)
        self._begin(worker)
        self._next(index)

    def _begin(self, worker: SimulatedWorker) -> None:
        """Look up the blocks of the prompt that is computed next, once."""
        if worker.prefills and not worker.queue[0].in_prefill:
            job = worker.queue[0]
            names, num_tokens = job.arrival.names, job.arrival.num_tokens
            size = self.router.block_size
            # One token at least is computed: without it there are no logits.
            job.num_hits = worker.blocks.hits(names)
            job.to_compute = max(1, num_tokens - job.num_hits * size)
            job.in_prefill = True

    def _next(self, index: int) -> None:
        time = self.workers[index].next_event()
        self.workers[index].version += 1
        if time is not None:
            self._plan(time, index, None)

    def _plan(self, time: float, index: int, job: SimulatedJob | None) -> None:
        self.num_events += 1
        version = self.workers[index].version if job is None else -1
        heapq.heappush(self.events, (time, self.num_events, index, version, job))

    def run_until(self, end: float) -> None:
        while self.events and self.events[0][0] <= end:
            time, _, index, version, job = heapq.heappop(self.events)
            if job is not None:
                (self._decode if job.first_token else self._enqueue)(index, job, time)
            elif version == self.workers[index].version:
                self._happen(index, time)

    def _happen(self, index: int, time: float) -> None:
        """A prompt is computed, or answers are complete."""
        worker = self.workers[index]
        worker.move_to(time)
        while worker.decoding and worker.decoding[0][0] <= worker.steps + 1e-9:
            job = heapq.heappop(worker.decoding)[2]
            job.end = time
            if self.placement is not None:
                self.placement.computed(Ticket(index - len(self.router.loads), 1))
        if worker.prefills and worker.queue[0].in_prefill and worker.queue[0].to_compute <= 1e-6:
            self._prompt_done(index, worker.queue.popleft(), time)
        self._begin(worker)
        self._next(index)

    def _prompt_done(self, index: int, job: SimulatedJob, time: float) -> None:
        job.first_token = job.end = time
        self.router.computed(job.ticket)
        names = job.arrival.names
        _, evicted = self.workers[index].blocks.put(names)
        self.router.removed(index, evicted)
        if self.store is not None:
            num_new, _ = self.stored.put(names)
            self.network_bytes += num_new * self.store.block_bytes
        if job.arrival.num_output == 1:
            return
        if self.placement is None:
            self._add_decode(index, job)
            return
        assert self.hand_over is not None  # `simulate` has made sure
        self.network_bytes += len(names) * self.hand_over.block_bytes
        ticket = self.placement.route((), 1)
        target = len(self.router.loads) + ticket.worker
        self._plan(time + self.hand_over.seconds(len(names)), target, job)

    def _decode(self, index: int, job: SimulatedJob, time: float) -> None:
        self.workers[index].move_to(time)
        self._add_decode(index, job)
        self._next(index)

    def _add_decode(self, index: int, job: SimulatedJob) -> None:
        worker = self.workers[index]
        last = worker.steps + job.arrival.num_output - 1
        self.num_events += 1
        heapq.heappush(worker.decoding, (last, self.num_events, job))


def percentile(values: Iterable[float], percent: float) -> float:
    """The least value that at least `percent` % of the values do not exceed; of none, 0. Of fewer
    than 100 values the 99th percentile is the largest."""
    ordered = sorted(values) or [0.0]
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
