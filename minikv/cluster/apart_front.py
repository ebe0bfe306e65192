"""The front of prefill and decode workers: requests in, tokens out, even if workers die.

    python -m minikv.cluster.apart_front prefill MODEL
    python -m minikv.cluster.apart_front decode MODEL

start one worker in this process, over ZMQ unless `--transport nixl`. It prints its address, and
ends when its input ends.

`Front` chooses the workers of each request. A refused request goes to another worker, or later to
the same one. If a decode worker dies, another one computes its requests from the beginning: the
seed is fixed, so the same tokens come again. `local_workers` starts processes on this machine.
"""

import argparse
import json
import random
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from minikv.cluster.apart import Clock, DecodeWorker, PrefillWorker, params_to_json
from minikv.cluster.connector import Mail, Message, log
from minikv.cluster.handover import Ticket
from minikv.cluster.zmq_connector import ZmqConnector, cluster_key
from minikv.config import EngineConfig
from minikv.sampling import SamplingParams


@dataclass
class Answer:
    """What is known of a request. `error` says why it was refused for good."""

    token_ids: list[list[int]] = field(default_factory=list)  # by sample
    finish_reasons: list[str | None] = field(default_factory=list)
    error: str = ""

    @property
    def is_finished(self) -> bool:
        return bool(self.error) or (bool(self.finish_reasons) and None not in self.finish_reasons)


@dataclass
class Asked:
    """A request that is not finished."""

    prompt_ids: list[int]
    params: dict[str, Any]
    decode: str | None = None  # None: it waits for a worker
    ticket: Ticket = ""  # of this attempt
    prefill: str | None = None
    not_before: float = 0.0  # try again then
    last_sign: float = 0.0


class Front:
    """Gives requests to workers, by their addresses. Driven by `poll`, which never waits."""

    def __init__(
        self,
        mail: Mail,
        prefill: Seq[str],
        decode: Seq[str],
        *,
        lease: float = 10.0,
        clock: Clock = time.monotonic,
    ):
        """prefill: may be empty; then the decode workers compute the prompts, too."""
        if not decode:
            raise ValueError("decode: at least one decode worker is needed")
        self.mail, self.lease, self.clock = mail, lease, clock
        self.prefill, self.decode = list(prefill), list(decode)
        self.heard = {worker: clock() for worker in [*prefill, *decode]}  # and when, last
        self.asked: dict[int, Asked] = {}
        self.answers: dict[int, Answer] = {}
        self._by_ticket: dict[Ticket, int] = {}
        self._num_requests = 0
        self._last_ping = clock()

    def submit(self, prompt_ids: list[int], params: SamplingParams | None = None) -> int:
        """Queue a prompt; returns its number. Its answer stays in `answers` until you take it out.
        Raises ValueError for a salt that cannot be sent."""
        params = SamplingParams() if params is None else params
        if params.seed is None:
            params = replace(params, seed=random.getrandbits(32))
        asked = Asked(list(prompt_ids), params_to_json(params))
        number, self._num_requests = self._num_requests, self._num_requests + 1
        self.asked[number], self.answers[number] = asked, Answer()
        self._give(number, asked)
        return number

    def abort(self, number: int) -> None:
        """Stop a request; its tokens so far are in its answer. A finished one stays as it is."""
        asked = self.asked.pop(number, None)
        if asked is None:
            return
        self._take_back(asked)
        answer = self.answers[number]
        answer.finish_reasons = [one or "abort" for one in answer.finish_reasons] or ["abort"]

    def poll(self) -> set[int]:
        """Read mail, place waiting requests, notice silent workers. Returns the requests that have
        news in `answers`."""
        news: set[int] = set()
        for message in self.mail.receive():
            if message.sender in self.heard:
                self.heard[message.sender] = self.clock()
            try:
                self._handle(message, news)
            except (KeyError, TypeError, ValueError) as error:
                log.warning("%s from %s is dropped: %s", message.kind, message.sender, error)
        self._look_after()
        return news

    def generate(
        self, prompts: Seq[list[int]], params: SamplingParams, timeout: float = 60.0
    ) -> list[Answer]:
        """Answers to all prompts. Raises TimeoutError if they take longer; the rest is aborted."""
        numbers = [self.submit(prompt, params) for prompt in prompts]
        end = self.clock() + timeout
        try:
            while any(number in self.asked for number in numbers):
                if self.clock() > end:
                    raise TimeoutError(f"no answer in {timeout} seconds; are workers alive?")
                if not self.poll():
                    time.sleep(0.001)
        finally:
            for number in numbers:
                self.abort(number)
        return [self.answers.pop(number) for number in numbers]

    def _handle(self, message: Message, news: set[int]) -> None:
        number = self._by_ticket.get(message.ticket)
        if number is None:
            if message.kind == "progress" and None in message.body["finish_reasons"]:
                self._send(message.sender, "abort", message.ticket)  # of an earlier attempt
        elif message.kind == "progress":
            self._on_progress(number, message, news)
        elif message.kind == "refused":
            self._on_refused(number, message, news)

    # ── Workers ───────────────────────────────────────────────────────────────

    def add_worker(self, role: str, address: str) -> None:
        """Use a worker that was started later, for "prefill" or "decode"."""
        {"prefill": self.prefill, "decode": self.decode}[role].append(address)
        self.heard[address] = self.clock()

    def alive(self, workers: list[str]) -> list[str]:
        """Those heard of within the last lease."""
        return [one for one in workers if self.clock() - self.heard[one] <= self.lease]

    def _give(self, number: int, asked: Asked) -> None:
        """Send a request to the least loaded workers that are alive; if none is, it waits."""
        decode = self._least_loaded(self.decode, "decode")
        if decode is None:
            return
        asked.decode, asked.prefill = decode, self._least_loaded(self.prefill, "prefill")
        asked.ticket, asked.last_sign = secrets.token_hex(16), self.clock()
        self._by_ticket[asked.ticket] = number
        self._submit(asked)

    def _submit(self, asked: Asked) -> None:
        self._send(
            asked.decode, "submit", asked.ticket, prompt_ids=asked.prompt_ids,
            params=asked.params, prefill=asked.prefill,
        )  # fmt: skip

    def _least_loaded(self, workers: list[str], role: str) -> str | None:
        load = {one: 0 for one in self.alive(workers)}
        for asked in self.asked.values():
            worker = getattr(asked, role)
            if worker in load:
                load[worker] += 1
        return min(load, key=lambda one: load[one], default=None)

    def _take_back(self, asked: Asked) -> None:
        """Let the worker of this attempt forget it, and make its ticket invalid."""
        if asked.decode is not None:
            del self._by_ticket[asked.ticket]
            self._send(asked.decode, "abort", asked.ticket)
            asked.decode = asked.prefill = None

    def _look_after(self) -> None:
        now = self.clock()
        if now - self._last_ping > self.lease / 3:
            self._last_ping = now
            for worker in self.heard:
                self._send(worker, "ping", "")
        alive = set(self.alive(self.decode))
        for number, asked in list(self.asked.items()):
            if asked.decode is not None and asked.decode not in alive:
                self._take_back(asked)
            if asked.decode is None and now >= asked.not_before:
                self._give(number, asked)
            elif asked.decode is not None and now - asked.last_sign > self.lease / 3:
                asked.last_sign = now  # a message may have been lost: send it again
                self._submit(asked)

    def _on_progress(self, number: int, message: Message, news: set[int]) -> None:
        asked, answer = self.asked[number], self.answers[number]
        asked.last_sign = self.clock()
        before = answer.token_ids or [[] for _ in message.body["token_ids"]]
        both = zip(message.body["token_ids"], before, strict=True)
        # Messages may come out of order, and another attempt begins with the first token.
        answer.token_ids = [new if len(new) >= len(old) else old for new, old in both]
        news.add(number)
        if None not in message.body["finish_reasons"]:
            answer.token_ids = message.body["token_ids"]
            answer.finish_reasons = message.body["finish_reasons"]
            del self.asked[number], self._by_ticket[message.ticket]

    def _on_refused(self, number: int, message: Message, news: set[int]) -> None:
        asked = self.asked[number]
        del self._by_ticket[message.ticket]
        asked.decode = asked.prefill = None
        if message.body["for_good"]:
            del self.asked[number]
            self.answers[number].error = message.body["reason"]
            news.add(number)
        else:
            asked.not_before = self.clock() + min(0.02, self.lease / 10)

    def _send(self, peer: str | None, kind: str, ticket: Ticket, **body: Any) -> None:
        if peer is not None:
            self.mail.send(peer, Message(kind, self.mail.address, ticket, body))


# ── Processes ─────────────────────────────────────────────────────────────────


@dataclass
class Process:
    """A worker in a process of its own."""

    role: str
    address: str
    process: subprocess.Popen

    def kill(self) -> None:
        """End it as kill -9 does, without a last message."""
        self.process.kill()
        self.process.wait()


@contextmanager
def local_workers(
    model: str,
    config: dict[str, Any],
    *,
    prefill: int = 1,
    decode: int = 1,
    transport: str = "zmq",
    lease: float = 10.0,
) -> Iterator[list[Process]]:
    """Worker processes on this machine, all with this model and these values of EngineConfig. They
    are killed at the end, whatever happens; they end by themselves if this process dies."""
    cluster_key()  # before they start: they inherit it
    roles = ["prefill"] * prefill + ["decode"] * decode
    processes: list[subprocess.Popen] = []
    try:
        for role in roles:
            command = [sys.executable, "-m", "minikv.cluster.apart_front", role, str(model)]
            command += ["--config", json.dumps(config), "--transport", transport]
            command += ["--lease", str(lease)]
            processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        workers = []
        for role, process in zip(roles, processes, strict=True):
            assert process.stdout is not None
            for line in process.stdout:  # a library may say something first
                if line.startswith("address "):
                    workers.append(Process(role, line.split()[1], process))
                    break
            else:
                raise RuntimeError(f"a {role} worker did not start: see what it wrote above")
        yield workers
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


def make_connector(transport: str) -> Any:
    """ "zmq" sends K and V as messages, "nixl" writes them into the peer's memory."""
    if transport == "nixl":
        from minikv.cluster.nixl_connector import NixlConnector

        return NixlConnector()
    return ZmqConnector()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m minikv.cluster.apart_front", description=__doc__
    )
    parser.add_argument("role", choices=["prefill", "decode"])
    parser.add_argument("model", help="a folder, or the name of a bundled model")
    parser.add_argument("--config", type=json.loads, default={}, help="EngineConfig, as JSON")
    parser.add_argument("--transport", choices=["zmq", "nixl"], default="zmq")
    parser.add_argument("--lease", type=float, default=10.0, help="seconds of silence")
    options = parser.parse_args()
    import torch

    import minikv

    torch.set_num_threads(1)
    parent_is_gone = threading.Event()
    threading.Thread(target=_wait_for_end, args=[parent_is_gone.set], daemon=True).start()
    connector = make_connector(options.transport)
    kind = PrefillWorker if options.role == "prefill" else DecodeWorker
    worker = kind(
        minikv.load(options.model), EngineConfig(**options.config), connector, lease=options.lease
    )
    print("address", connector.address, flush=True)
    try:
        while not parent_is_gone.is_set():
            if not worker.step():
                connector.wait(0.02)
            elif not worker.engine.has_unfinished:
                connector.wait(0.001)
    finally:
        connector.close()


def _wait_for_end(then: Callable[[], None]) -> None:
    """Call `then` when the parent ends: it holds the other end of our input."""
    while sys.stdin.read(1):
        pass
    then()


if __name__ == "__main__":
    main()
