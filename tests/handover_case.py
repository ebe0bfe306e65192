"""What the tests of the hand-over share: workers in one process, a clock that is moved by hand, and
a network that loses, delays, repeats, reorders and damages."""

import random

from helpers import small

from minikv import SamplingParams
from minikv.cluster.apart import DecodeWorker, PrefillWorker
from minikv.cluster.apart_front import Front
from minikv.cluster.connector import LocalNetwork
from minikv.tiers.blocks import parts_of

LEASE = 10.0


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class SlowNetwork(LocalNetwork):
    """Delivers when asked to: `deliver_next`, in any order."""

    def __init__(self):
        super().__init__()
        self.on_the_way = []

    def carry(self, parcel):
        self.on_the_way.append(parcel)

    def deliver_next(self, index=0):
        self.deliver(self.on_the_way.pop(index))

    def deliver_all(self):
        while self.on_the_way:
            self.deliver_next()


class ChaosNetwork(SlowNetwork):
    """Delivers in a random order; at times it loses, repeats or damages a parcel."""

    def __init__(self, rng: random.Random):
        super().__init__()
        self.rng, self.is_faulty, self.num_faults = rng, True, 0

    def deliver_some(self):
        for _ in range(self.rng.randint(0, len(self.on_the_way))):
            parcel = self.on_the_way.pop(self.rng.randrange(len(self.on_the_way)))
            fault = self.rng.random() if self.is_faulty else 1.0
            self.num_faults += fault < 0.15
            if fault < 0.05:
                self._lose(parcel)
            elif fault < 0.10 and parcel.save is not None:
                self.deliver(parcel)
                self._damage(parcel)
            elif fault < 0.15 and parcel.save is None:
                self.deliver(parcel)
                self.carry(parcel)
            else:
                self.deliver(parcel)

    def _lose(self, parcel):
        sender = self.ends.get(parcel.message.sender)
        if parcel.save is not None and sender is not None:
            sender.ended.append((parcel.save.number, False))

    def _damage(self, parcel):
        end, save = self.ends.get(parcel.receiver), parcel.save
        # Only where a peer may still write: what was fenced is not damaged either.
        if end is not None and end.keys.get(parcel.message.sender) == save.target["key"]:
            part = next(iter(parts_of(end.store).values()))
            block_id = save.target["block_ids"][save.first]
            part[save.layer, block_id] = part[save.layer, block_id] * 2 + 1


class World:
    """Some prefill workers, some decode workers and a front, in one process."""

    def __init__(self, lm, prefill=1, decode=1, network=None, most_waiting=64, **config):
        self.lm, self.most_waiting = lm, most_waiting
        self.config = small(**{"attention": "torch", "max_batch_tokens": 16, **config})
        self.network, self.clock = network or LocalNetwork(), Clock()
        self.workers, self._num_started = {}, 0
        prefills = [self.start("prefill") for _ in range(prefill)]
        decodes = [self.start("decode") for _ in range(decode)]
        mail = self.network.connect("front")
        self.front = Front(mail, prefills, decodes, lease=LEASE, clock=self.clock)

    def start(self, role: str) -> str:
        """Start a worker; returns its address."""
        address, self._num_started = f"{role} {self._num_started}", self._num_started + 1
        kind = PrefillWorker if role == "prefill" else DecodeWorker
        self.workers[address] = kind(
            self.lm, self.config, self.network.connect(address), clock=self.clock, lease=LEASE,
            most_waiting=self.most_waiting,
        )  # fmt: skip
        return address

    def kill(self, address: str) -> None:
        """It does nothing any more, and nothing reaches it."""
        self.workers.pop(address).mail.close()

    def of(self, role: str) -> list:
        return [one for address, one in self.workers.items() if address.startswith(role)]

    def step(self) -> None:
        """One step of everybody, and a check of every invariant."""
        for worker in list(self.workers.values()):
            worker.step()
            worker.check()
        self.front.poll()

    def drain(self, limit=3000, seconds=0.01) -> None:
        """Step until every request is answered and no worker has anything left to do."""
        for _ in range(limit):
            busy = [worker.step() for worker in self.workers.values()]
            for worker in self.workers.values():
                worker.check()
            if isinstance(self.network, ChaosNetwork):
                self.network.deliver_some()
            self.front.poll()
            self.clock.now += seconds
            if not self.front.asked and not any(busy):
                return
        raise AssertionError(f"still unfinished after {limit} steps: {self.front.asked}")

    def generate(self, prompts, params) -> list:
        """The tokens of every prompt's samples."""
        numbers = [self.front.submit(prompt, params) for prompt in prompts]
        self.drain()
        return [self.front.answers[number].token_ids for number in numbers]


def greedy(max_tokens=5, **more):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)


def expected(engine, prompts, params) -> list:
    """What one engine says."""
    outputs = engine.generate(prompts, params)
    return [[sample.token_ids for sample in output.samples] for output in outputs]
