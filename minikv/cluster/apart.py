"""Prefill and decode on different workers: each is an engine and the messages that it sends.

    front ── submit ──> decode worker ── prefill ──> prefill worker
                           allocates blocks              computes the prompt; after each layer's
                           (or refuses)                  attention, the blocks that are full leave
                                         <── layer, layer, …
                                         <── finished, with the first token
      <── progress ──   decodes

The prompt's whole blocks are handed over; the decode worker computes the few tokens after them, as
after every prefix-cache hit. The blocks enter its prefix cache, so the scheduler treats them like
all others, and a request that loses them computes them again.

If anything fails between the two, the decode worker computes the prompt itself: the prefill worker
may be dead, slow or full, a block damaged, or its K and V those of other weights. Who may use a
block, and when, is in `handover`.

Workers are driven by `step`, which never waits: by a loop in a process of their own
(`apart_front`), or, as in the tests, by hand, several in one process.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any

from minikv.assembly import backend_of
from minikv.backend import AttentionBackend
from minikv.batch import Batch
from minikv.beam import make_room
from minikv.blocks import blocks_for
from minikv.cluster.connector import (
    Mail,
    Message,
    Receiver,
    Save,
    Sender,
    digest,
    fill,
    identity_for,
    log,
    views,
)
from minikv.cluster.handover import Landings, Sendings, Ticket
from minikv.config import EngineConfig, ModelConfig
from minikv.engine import Engine
from minikv.errors import require_ids, require_int
from minikv.invariants import check
from minikv.language_model import LanguageModel
from minikv.model import Attend
from minikv.outputs import RequestOutput
from minikv.paged import KVStore
from minikv.radix import Node, RadixCache
from minikv.sampling import SamplingParams
from minikv.scheduler import Plan, Scheduler
from minikv.sequence import Sequence
from minikv.tiers import Name, block_names, drop_open, root_name
from minikv.validation import make_request

Clock = Callable[[], float]
PLAIN_SALTS = str | int | float | bool | None  # those that JSON has


class Worker:
    """What both kinds of worker do: read their mail, and notice which peers are silent.

    lease: seconds after which a silent peer is given up. It must be longer than the longest step,
    because a worker does not answer while it computes.
    """

    def __init__(self, engine: Engine, mail: Mail, lease: float, clock: Clock):
        if engine.lm.device.type != "cpu":
            raise ValueError(f"lm: hand-over needs a model on the CPU, was on {engine.lm.device}")
        self.engine, self.mail, self.lease, self.clock = engine, mail, lease, clock
        self.heard: dict[str, float] = {}  # when, by peer of a request that is under way
        self._last_ping = clock()
        self._identity: tuple[Any, bytes] = None, b""

    @property
    def identity(self) -> bytes:
        """What K and V here depend on besides the tokens."""
        transformer = self.engine.runner.transformer
        if self._identity[0] is not transformer:
            self._identity = transformer, identity_for(self.engine)
        return self._identity[1]

    def send(self, peer: str, kind: str, ticket: Ticket = "", **body: Any) -> bool:
        return self.mail.send(peer, Message(kind, self.mail.address, ticket, body))

    def read_mail(self) -> None:
        """Handle all messages. A message that cannot be understood is logged and dropped."""
        for message in self.mail.receive():
            if message.sender in self.heard:
                self.heard[message.sender] = self.clock()
            handle = getattr(self, f"on_{message.kind}", None)
            try:
                if handle is None:
                    raise ValueError(f"kind: {message.kind!r} is not known")
                handle(message)
            except (KeyError, TypeError, ValueError) as error:
                log.warning("%s from %s is dropped: %s", message.kind, message.sender, error)

    def on_ping(self, message: Message) -> None:
        self.send(message.sender, "pong", message.ticket)

    def on_pong(self, message: Message) -> None:
        pass  # `read_mail` has noted that it came

    def silent_peers(self, waits_for: Iterable[tuple[Ticket, str]]) -> list[str]:
        """The peers of these tickets that were silent for a lease. The others are asked for a sign
        of life now and then."""
        now = self.clock()
        tickets: dict[str, list[Ticket]] = {}
        for ticket, peer in waits_for:
            tickets.setdefault(peer, []).append(ticket)
        self.heard = {peer: self.heard.get(peer, now) for peer in tickets}
        if now - self._last_ping > self.lease / 3:
            self._last_ping = now
            for peer, its in tickets.items():
                self.send(peer, "ping", tickets=its)
        return [peer for peer in tickets if self.is_silent(peer)]

    def is_silent(self, peer: str, grace: float = 0.0) -> bool:
        """Whether we wait for this peer, and have not heard of it for a lease and `grace`."""
        return self.clock() - self.heard.get(peer, self.clock()) > self.lease + grace


def names_of(
    identity: bytes, prompt_ids: list[int], params: SamplingParams, block_size: int
) -> list[Name]:
    """Names of the prompt's whole blocks; none if the salt has no fixed spelling."""
    root = root_name(identity, params.cache_salt)
    return block_names(root, prompt_ids, block_size) if root is not None else []


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """Raises ValueError for a salt that JSON does not have."""
    if not isinstance(params.cache_salt, PLAIN_SALTS):
        raise ValueError(
            f"cache_salt: must be a string, a number or None here, was {params.cache_salt!r}"
        )
    return asdict(params)


# ── Prefill ───────────────────────────────────────────────────────────────────


class NotingScheduler(Scheduler):
    """Remembers its last plan, because a batch does not say whose tokens it has."""

    plan = Plan()

    def schedule(self) -> Plan:
        self.plan = super().schedule()
        return self.plan


class SavingAttention(AttentionBackend):
    """A backend that says when a layer has written its K and V. It always computes layer by layer:
    if a batch is computed in one call, there is no moment at which one layer is ready."""

    def __init__(self, inner: AttentionBackend, save_layer: Callable[[int], None]):
        self.inner, self.store, self.save_layer = inner, inner.store, save_layer

    def bind(self, batch: Batch) -> Attend:
        attend = self.inner.bind(batch)

        def attend_and_save(layer, q, k, v):
            out = attend(layer, q, k, v)
            self.save_layer(layer)
            return out

        return attend_and_save

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.inner.copy_blocks(pairs)


@dataclass
class Job:
    """A prompt that a decode worker waits for."""

    ticket: Ticket
    peer: str
    request_id: int
    names: list[Name]  # of its whole blocks
    target: Any  # where they go: see `Receiver.start_load_kv`
    first: int  # the peer has the blocks before this one already
    sent: list[int]  # by layer: the first block that has not been sent
    failed: str = ""  # why, if a save did not go well
    answer: dict[str, Any] = field(default_factory=dict)  # of "finished", once it is known


class PrefillWorker(Worker):
    """Computes prompts, and writes their K and V into the blocks of decode workers."""

    REMEMBERED = 10_000  # finished tickets

    def __init__(
        self,
        lm: LanguageModel,
        config: EngineConfig | None,
        sender: Sender,
        *,
        most_waiting: int = 64,
        lease: float = 10.0,
        clock: Clock = time.monotonic,
    ):
        """most_waiting: prompts that may be unfinished at a time; more are refused."""
        self.sender, self.most_waiting = sender, require_int("most_waiting", most_waiting, 1)
        self.jobs: dict[Ticket, Job] = {}
        self._by_request: dict[int, Job] = {}
        self._posted: dict[int, Job] = {}  # by number of the save
        self.over: OrderedDict[Ticket, None] = OrderedDict()  # "finished" has been said
        engine = Engine(lm, config, scheduler=NotingScheduler, attention=self._attention(config))
        super().__init__(engine, sender, lease, clock)
        self.sendings = Sendings()
        sender.register_kv_caches(engine.store)

    def _attention(self, config: EngineConfig | None) -> Callable[..., AttentionBackend]:
        make = backend_of(config or EngineConfig())

        def saving(model: ModelConfig, store: KVStore) -> AttentionBackend:
            return SavingAttention(make(model, store), self._save_layer)

        return saving

    def step(self) -> bool:
        """Read mail, compute a batch, say what is done. Returns whether anything is left to do."""
        self.read_mail()
        self._collect()
        if self.engine.has_unfinished:
            for output in self.engine.step():
                job = self._by_request.get(output.request_id)
                if job is not None and output.finish_reason is not None:
                    self._end(job, token_ids=[one.token_ids[0] for one in output.samples])
        self._collect()
        for peer in self.silent_peers((one.ticket, one.peer) for one in self.jobs.values()):
            for job in [job for job in self.jobs.values() if job.peer == peer]:
                self._stop(job, "no sign of life")
            self.sender.forget(peer)
        return bool(self.jobs or self.engine.has_unfinished)

    def on_prefill(self, message: Message) -> None:
        """A decode worker has allocated blocks for a prompt."""
        body, ticket = message.body, message.ticket
        if ticket in self.jobs or ticket in self.over:
            return  # sent twice, or overtaken by its abort: the blocks may be another's by now
        reason = ""
        if len(self.jobs) >= self.most_waiting:
            reason = f"{len(self.jobs)} prompts wait here already"
        elif body["identity"] != self.identity.hex():
            reason = "the models, their weights or their EngineConfig differ"
        if not reason:
            try:
                params = SamplingParams(**body["params"] | {"max_tokens": 1})
                request_id = self.engine.add_request(body["prompt_ids"], params)
            except (TypeError, ValueError) as error:
                reason = str(error)
        if reason:
            self._finished(message.sender, ticket, token_ids=None, reason=reason)
            return
        size, first = self.engine.config.block_size, body["first"]
        names = names_of(self.identity, body["prompt_ids"], params, size)
        sent = [first] * self.engine.lm.config.num_layers
        job = Job(ticket, message.sender, request_id, names, body["target"], first, sent)
        self.jobs[ticket] = self._by_request[request_id] = job

    def on_abort(self, message: Message) -> None:
        """The request is gone. Say "finished" when no transfer is under way."""
        job = self.jobs.get(message.ticket)
        if job is None:
            self._finished(message.sender, message.ticket, token_ids=None, reason="unknown")
        else:
            self._stop(job, "aborted")

    def on_ping(self, message: Message) -> None:
        super().on_ping(message)
        for ticket in message.body.get("tickets", ()):
            if ticket not in self.jobs:  # "prefill" was lost, or "finished" was
                self._finished(message.sender, ticket, token_ids=None, reason="unknown")

    def _save_layer(self, layer: int) -> None:
        """Attention of one layer has run: send its full blocks while the next layers run."""
        plan = self.engine.scheduler.plan  # type: ignore[attr-defined]
        size, store = self.engine.config.block_size, self.engine.store
        for sequence, num_tokens in zip(plan.sequences, plan.num_tokens, strict=True):
            job = self._by_request.get(sequence.request.request_id)
            if job is None or job.failed or job.answer:
                continue
            start = job.sent[layer]
            end = min((sequence.num_computed + num_tokens) // size, len(job.names))
            if end <= start:
                continue
            block_ids = sequence.table.block_ids[start:end]
            digests = [
                digest(self.identity, name, layer, views(store, layer, block_id))
                for name, block_id in zip(job.names[start:end], block_ids, strict=True)
            ]
            body = {"layer": layer, "first": start - job.first, "digests": digests}
            notice = Message("layer", self.mail.address, job.ticket, body)
            number = self.sendings.post(job.ticket, self.engine.pool, block_ids)
            job.sent[layer], self._posted[number] = end, job
            self.sender.save_kv_layer(
                Save(number, job.peer, layer, block_ids, job.target, start - job.first, notice)
            )

    def _collect(self) -> None:
        """Release blocks that are not read any more, and say "finished" after a job's last ones."""
        for number, went_well in self.sender.get_finished():
            job = self._posted.pop(number)
            if not went_well:
                job.failed = "a transfer failed"
            if self.sendings.done(number) is not None:
                self._say_finished(job)
            elif job.failed:
                self._stop(job, job.failed)

    def _stop(self, job: Job, reason: str) -> None:
        if job.answer:  # its last transfers are under way
            return
        self.engine.abort(job.request_id)
        self._end(job, token_ids=None, reason=reason)

    def _end(self, job: Job, **answer: Any) -> None:
        """Nothing more will be computed or posted for this job."""
        job.answer = answer
        if self.sendings.close(job.ticket):
            self._say_finished(job)

    def _say_finished(self, job: Job) -> None:
        del self.jobs[job.ticket], self._by_request[job.request_id]
        if job.failed:
            job.answer = {"token_ids": None, "reason": job.failed}
        self._finished(job.peer, job.ticket, **job.answer)

    def _finished(self, peer: str, ticket: Ticket, **answer: Any) -> None:
        """Promise that nothing will be written for this ticket, now or later."""
        self.over[ticket] = None
        while len(self.over) > self.REMEMBERED:
            self.over.popitem(last=False)
        self.send(peer, "finished", ticket, **answer)

    def check(self) -> None:
        """Raise AssertionError, naming what is broken, unless every invariant holds."""
        self.engine.recover()
        held = self.sendings.block_ids(self.engine.pool)
        check(self.engine.scheduler, self.engine._requests.values(), held)


# ── Decode ────────────────────────────────────────────────────────────────────


@dataclass
class Load:
    """A request whose K and V are on their way."""

    peer: str
    prompt_ids: list[int]
    params: SamplingParams
    names: list[Name]  # of the prompt's whole blocks
    node: Node  # locked: ends the prefix that the cache had
    hit_ids: list[int]  # its blocks
    block_ids: list[int]  # those that the peer writes
    first_tokens: Any = None  # the peer's, once it has finished
    is_bad: bool = False  # something that it wrote was refused


class DecodeWorker(Worker):
    """Lets prefill workers write into its blocks, verifies what they wrote, and continues."""

    REMEMBERED = 1000  # requests whose last message is kept, in case the front has not got it

    def __init__(
        self,
        lm: LanguageModel,
        config: EngineConfig | None,
        receiver: Receiver,
        *,
        most_waiting: int = 64,
        lease: float = 10.0,
        clock: Clock = time.monotonic,
    ):
        """most_waiting: requests that may be unfinished at a time; more are refused."""
        engine = Engine(lm, config)
        if engine.cache is None:
            raise ValueError("prefix_cache: must be True, because what arrives is put into it")
        super().__init__(engine, receiver, lease, clock)
        self.receiver, self.most_waiting = receiver, require_int("most_waiting", most_waiting, 1)
        self.landings = Landings(engine.pool, engine.lm.config.num_layers)
        self.loads: dict[Ticket, Load] = {}
        self.fronts: dict[Ticket, str] = {}  # who asked, of every unfinished request
        self.running: dict[int, Ticket] = {}  # by the engine's request id
        self.told: OrderedDict[Ticket, dict[str, Any]] = (
            OrderedDict()
        )  # the last "progress" of finished requests
        self.num_taken = 0  # hand-overs that went well
        self.num_computed_here = 0  # prompts that another worker should have computed
        self.num_bad = 0  # layers of blocks that were refused
        receiver.register_kv_caches(engine.store)

    @property
    def cache(self) -> RadixCache:
        """The engine's prefix cache; another one after an interrupt."""
        assert self.engine.cache is not None
        return self.engine.cache

    def step(self) -> bool:
        """Read mail, run one batch, tell the fronts. Returns whether anything is left to do."""
        self._start_over_if_broken()
        self.read_mail()
        landings = self.landings.landings.items()
        for peer in self.silent_peers([(ticket, one.peer) for ticket, one in landings]):
            self.receiver.forget(peer)
            for ticket in self.landings.given_up(peer):
                self._compute_here(ticket)
            if self.is_silent(peer, self.receiver.grace):
                self.landings.lost(peer)
        if self.engine.has_unfinished and not self._must_wait():
            for output in self.engine.step():
                self._tell(self.running[output.request_id], output)
        return bool(self.fronts or self.landings.landings)

    def _must_wait(self) -> bool:
        """Whether nothing can run before a landing ends, because the queue needs its blocks."""
        engine = self.engine
        scheduler = engine.scheduler
        if scheduler.running or not scheduler.waiting or not self.landings.landings:
            return False
        needed = blocks_for(len(scheduler.waiting[0].token_ids), engine.config.block_size)
        return needed > engine.pool.num_free + self.cache.num_evictable_blocks

    # ── Requests ──────────────────────────────────────────────────────────────

    def on_submit(self, message: Message) -> None:
        """A front's request. It is refused for good if it could never run here, or for now if there
        is no room."""
        ticket, body = message.ticket, message.body
        if ticket in self.told:  # sent again: the answer may have been lost
            self.send(message.sender, "progress", ticket, **self.told[ticket])
        if ticket in self.told or ticket in self.fronts:
            return
        engine = self.engine
        try:
            params = SamplingParams(**body["params"])
            request = make_request(-1, body["prompt_ids"], params, engine.lm, engine.config)
        except (TypeError, ValueError) as error:
            self.send(message.sender, "refused", ticket, reason=str(error), for_good=True)
            return
        if len(self.fronts) >= self.most_waiting:
            reason = f"{len(self.fronts)} requests are unfinished here"
        else:
            reason = self._accept(ticket, request.prompt_ids, params, body["prefill"])
        if reason:
            self.send(message.sender, "refused", ticket, reason=reason, for_good=False)
        else:
            self.fronts[ticket] = message.sender

    def on_abort(self, message: Message) -> None:
        """Stop a request. An abort that comes before its "submit" is remembered, too."""
        ticket = message.ticket
        if ticket in self.told:
            return
        self._remember(ticket, {"token_ids": [], "finish_reasons": ["abort"]})
        if ticket not in self.fronts:
            return
        if ticket in self.loads:
            load = self._let_go(ticket)
            self.landings.aborted(ticket)
            self.send(load.peer, "abort", ticket)
        else:
            [request_id] = [one for one, its in self.running.items() if its == ticket]
            self.engine.abort(request_id)
            del self.running[request_id]
        del self.fronts[ticket]

    def on_stats(self, message: Message) -> None:
        """Answer with how hand-overs went."""
        self.send(
            message.sender, "stats", message.ticket, taken=self.num_taken,
            computed_here=self.num_computed_here, bad=self.num_bad,
        )  # fmt: skip

    def _accept(
        self, ticket: Ticket, prompt_ids: list[int], params: SamplingParams, peer: str | None
    ) -> str:
        """Begin with a request; returns why there is no room for it now, or ""."""
        engine, cache, scheduler = self.engine, self.cache, self.engine.scheduler
        size = engine.config.block_size
        names = names_of(self.identity, prompt_ids, params, size)
        hit = cache.match(prompt_ids[: len(names) * size], params.cache_salt)
        first = len(hit.block_ids)
        if (
            peer is None
            or self.is_silent(peer)  # perhaps dead, and what it gets is kept for a while
            or first == len(names)
            or len(names) * size < engine.config.min_prefix_tokens
        ):
            self.running[engine.add_request(prompt_ids, params)] = ticket
            return ""
        # Running and waiting requests go first, and each running one may need one block more.
        waiting = sum(blocks_for(len(one.token_ids), size) for one in scheduler.waiting)
        needed = blocks_for(len(prompt_ids) + 1, size) - first
        cache.lock(hit.node)
        room = engine.pool.num_free + cache.num_evictable_blocks - waiting - len(scheduler.running)
        if needed > room or not make_room(scheduler, needed):
            cache.unlock(hit.node)
            return f"it needs {needed} blocks, there is room for {max(0, room)}"
        for block_id in hit.block_ids:
            engine.pool.acquire(block_id)
        block_ids = self.landings.begin(ticket, peer, len(names) - first)
        for block_id in block_ids:
            drop_open(engine.store, block_id)
        self.loads[ticket] = Load(
            peer, prompt_ids, params, names, hit.node, hit.block_ids, block_ids
        )
        self.send(
            peer, "prefill", ticket, prompt_ids=prompt_ids, params=params_to_json(params),
            first=first, identity=self.identity.hex(),
            target=self.receiver.start_load_kv(peer, block_ids),
        )  # fmt: skip
        self.heard.setdefault(peer, self.clock())  # now: the first load from a peer takes its time
        return ""

    def _compute_here(self, ticket: Ticket) -> None:
        """The hand-over has failed: this engine computes the prompt."""
        load = self._let_go(ticket)
        self.num_computed_here += 1
        self.running[self.engine.add_request(load.prompt_ids, load.params)] = ticket

    def _let_go(self, ticket: Ticket) -> Load:
        """Forget a load, and release the prefix that it held for it."""
        load = self.loads.pop(ticket)
        self.cache.unlock(load.node)
        for block_id in reversed(load.hit_ids):
            self.engine.pool.release(block_id)
        return load

    def _tell(self, ticket: Ticket, output: RequestOutput) -> None:
        samples = output.samples
        body = {
            "token_ids": [one.token_ids for one in samples],
            "finish_reasons": [one.finish_reason for one in samples],
        }
        self.send(self.fronts[ticket], "progress", ticket, **body)
        if output.finish_reason is not None:
            del self.fronts[ticket], self.running[output.request_id]
            self._remember(ticket, body)

    def _remember(self, ticket: Ticket, body: dict[str, Any]) -> None:
        self.told[ticket] = body
        while len(self.told) > self.REMEMBERED:
            self.told.popitem(last=False)

    # ── Hand-over ─────────────────────────────────────────────────────────────

    def on_layer(self, message: Message) -> None:
        """Blocks of one layer, in the message or in the store already. Both are verified."""
        body, load, store = message.body, self.loads.get(message.ticket), self.engine.store
        if load is None or load.peer != message.sender:
            return
        layer, first, digests = body["layer"], body["first"], body["digests"]
        require_int("layer", layer, 0, self.engine.lm.config.num_layers - 1)
        require_int("first", first, 0, len(load.block_ids) - len(digests))
        for i, (expected, block_id) in enumerate(
            zip(digests, load.block_ids[first:], strict=False), start=first
        ):
            name = load.names[len(load.hit_ids) + i]
            if message.data is None:
                pieces: Seq[memoryview | bytes] = views(store, layer, block_id)
            else:
                size = sum(view.nbytes for view in views(store, layer, block_id))
                pieces = [message.data[(i - first) * size : (i - first + 1) * size]]
                if len(pieces[0]) != size:
                    raise ValueError(f"data: {len(message.data)} bytes for {len(digests)} blocks")
            if digest(self.identity, name, layer, pieces) != expected:
                self.num_bad, load.is_bad = self.num_bad + 1, True
                log.warning("a block of %s is refused: its checksum is wrong", message.sender)
            elif self.landings.arrived(message.ticket, layer, i) and message.data is not None:
                fill(store, layer, block_id, pieces[0])
        if load.first_tokens is not None:
            self._conclude_if_complete(message.ticket, load)

    def on_finished(self, message: Message) -> None:
        """The prefill worker will write no more. Its message has first tokens, unless it failed."""
        ticket, token_ids = message.ticket, message.body["token_ids"]
        landing, load = self.landings.landings.get(ticket), self.loads.get(ticket)
        if landing is None or landing.peer != message.sender:
            return
        if load is None:
            self.landings.finished(ticket)  # aborted
        elif token_ids is None or load.first_tokens is not None:
            # It has failed, or it has forgotten the ticket: no notice will follow.
            log.info("%s: the prompt is computed here: %s", ticket, message.body.get("reason"))
            self._conclude(ticket, load, token_ids)
        else:
            load.first_tokens = token_ids
            self._conclude_if_complete(ticket, load)

    def _conclude_if_complete(self, ticket: Ticket, load: Load) -> None:
        """The peer has finished: continue if the notices of all that it wrote are here."""
        if load.is_bad or not self.landings.landings[ticket].missing:
            self._conclude(ticket, load, load.first_tokens)

    def _conclude(self, ticket: Ticket, load: Load, token_ids: Any) -> None:
        """End a landing: with the peer's first tokens, or without."""
        block_ids = self.landings.finished(ticket)
        if block_ids is not None:
            self._share(load, block_ids)
        try:
            if block_ids is None:
                raise ValueError("blocks are missing")
            first_tokens = require_ids("token_ids", token_ids, self.engine.lm.config.vocab_size)
            if len(first_tokens) != load.params.n:
                raise ValueError(f"token_ids: {len(first_tokens)} for n={load.params.n}")
        except ValueError as error:
            log.info("the first tokens of %s are not used: %s", load.peer, error)
            self._compute_here(ticket)
            return
        self._let_go(ticket)
        self.num_taken += 1
        self.running[resume(self.engine, load.prompt_ids, load.params, first_tokens)] = ticket

    def _share(self, load: Load, block_ids: list[int]) -> None:
        """Give the prefix cache the blocks that have arrived, and release them."""
        engine = self.engine
        tokens = load.prompt_ids[: len(load.names) * engine.config.block_size]
        self.cache.insert(tokens, [*load.hit_ids, *block_ids], load.params.cache_salt)
        for block_id in reversed(block_ids):
            engine.pool.release(block_id)

    def _start_over_if_broken(self) -> None:
        """After an interrupt or new weights the engine begins with an empty pool. Peers still
        write, so their blocks are held in the new pool, too; what they write is not used."""
        self.engine.recover()
        if self.landings.pool is self.engine.pool:
            return
        self.landings.hold_again(self.engine.pool)
        for ticket, load in list(self.loads.items()):
            load.node.parent, load.hit_ids = None, []  # their cache and pool are gone
            self.landings.aborted(ticket)
            self.send(load.peer, "abort", ticket)
            self._compute_here(ticket)

    def check(self) -> None:
        """Raise AssertionError, naming what is broken, unless every invariant holds."""
        self._start_over_if_broken()
        held = [block for one in self.landings.landings.values() for block in one.block_ids]
        held += [block for one in self.loads.values() for block in one.hit_ids]
        check(self.engine.scheduler, self.engine._requests.values(), held)


def resume(
    engine: Engine, prompt_ids: list[int], params: SamplingParams, first_tokens: list[int]
) -> int:
    """Continue a request whose first tokens, one per sample, are known; returns its id. The
    scheduler finds the prompt's K and V in the prefix cache, or computes them."""
    request = make_request(engine._next_id, prompt_ids, params, engine.lm, engine.config)
    samples = [Sequence(request, i, [*prompt_ids, one]) for i, one in enumerate(first_tokens)]
    with engine.changing_state():
        engine._next_id += 1
        request.sequences = samples
        for sequence in samples:
            sequence.must_fork = False
        left = [sequence for sequence in samples if not engine._finishes(sequence)]
        engine._moved[request.request_id] = request
        if left:
            engine._requests[request.request_id] = request
        for sequence in left:
            engine.scheduler.add(sequence)
    return request.request_id
