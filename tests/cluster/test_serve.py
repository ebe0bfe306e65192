"""A front over workers in this process: tokens are one engine's, whatever fails."""

import itertools
import json
import random
import re
import signal
import sys
import threading
from argparse import ArgumentParser, ArgumentTypeError
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
import torch
from cluster_case import CONFIG, Fragile, assert_all_free, one_engine, params_of, prompts_of, tokens
from serving_case import Cluster, server
from store_case import needs_a_store
from thorough import thorough_after
from tiers_case import fetch_everything
from waiting import PATIENCE, until

from minikv import Engine, EngineConfig, SamplingParams
from minikv.cluster.front import ATTEMPTS, CROWD, Busy, Front, RequestFailed
from minikv.cluster.local_server import local_server
from minikv.cluster.ray_cluster import connected
from minikv.cluster.routing import EVERY_POLICY, ByPrefix, LeastLoaded, RoundRobin
from minikv.cluster.simulate import StepSeconds
from minikv.cluster.worker import EngineWorker, WorkerJob
from minikv.course import serve
from minikv.course.bench import cluster as bench_cluster, cluster_real
from minikv.course.commands import main
from minikv.course.serve import add_arguments, from_to, numbers_of
from minikv.serving import app, server as server_module
from minikv.serving.server import served
from minikv.tiers.names import block_names, root_name


@pytest.mark.parametrize("policy", thorough_after(1, EVERY_POLICY.values()), ids=EVERY_POLICY)
def test_tokens_are_those_of_one_engine(tinypy, policy):
    prompts, params = prompts_of(tinypy.lm, 12), params_of(12)
    expected = one_engine(tinypy.lm, prompts, params)
    workers = [Fragile(tinypy.lm) for _ in range(3)]
    with Front(workers, policy) as front:
        streams = [
            front.submit(prompt, one, session=i % 4)
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        assert [tokens(one) for one in streams] == expected
        assert front.router.loads == [0] * 3 and front.num_requests == 0
        assert all(lane.stats is not None for lane in front.lanes)
    for one in workers:
        one.worker.engine.check()


class Unpicklable:
    """Can be hashed, and not be sent."""

    def __init__(self, *errors):
        self.errors = errors

    def __reduce__(self):
        raise self.errors[0]


@pytest.mark.parametrize("salt", thorough_after(2, [
    threading.Lock(), Unpicklable(RecursionError("deep")), lambda: 0, Unpicklable(KeyError("x")),
    (("a", Unpicklable(TypeError("no"))),),
]))  # fmt: skip
def test_a_salt_that_cannot_be_sent_is_refused(tinypy, salt):
    with Front([Fragile(tinypy.lm)], ByPrefix) as front:
        with pytest.raises(ValueError, match="cache_salt: it goes to a worker"):
            front.submit([1, 2, 3], SamplingParams(cache_salt=salt))
        assert front.num_requests == 0
        for good in ("a", ("a", 1), None, frozenset([1])):
            assert len(tokens(front.submit([1, 2, 3], SamplingParams(2, cache_salt=good)))) > 0


@pytest.mark.parametrize("seed", thorough_after(0, range(3)))
def test_tokens_are_those_of_one_engine_though_workers_die(tinypy, seed):
    """At random moments, with requests that are cancelled at random. Nothing is left anywhere."""
    prompts, params = prompts_of(tinypy.lm, 40, seed), params_of(40)
    expected = one_engine(tinypy.lm, prompts, params)
    draws = [random.Random(10 * seed + i) for i in range(3)]
    workers = [Fragile(tinypy.lm, dies=lambda draw=one: draw.random() < 0.02) for one in draws]
    draw, num_whole = random.Random(seed), 0
    with Front(workers, ByPrefix) as front:
        pairs = zip(prompts, params, strict=True)
        streams = [front.submit(prompt, one) for prompt, one in pairs]
        for stream, want in zip(streams, expected, strict=True):
            got = []
            try:
                for delta in stream:
                    got += delta.token_ids
                    if draw.random() < 0.03:
                        break
            except RequestFailed:
                pass  # ATTEMPTS workers died with it
            assert got == want[: len(got)]
            num_whole += got == want
        assert num_whole > 10
        assert front.num_requests == 0 and front.router.loads == [0] * 3
        assert not front.waiting and not any(lane.requests for lane in front.lanes)
    assert front.num_lost == sum(one.num_deaths for one in workers) > 0
    assert_all_free(workers)


def test_a_request_that_kills_its_workers_is_given_up(tinypy):
    workers = [Fragile(tinypy.lm, dies=lambda: True) for _ in range(2)]
    with Front(workers, LeastLoaded) as front:
        with pytest.raises(RequestFailed, match=f"{ATTEMPTS} workers have died"):
            tokens(front.submit([5, 6, 7]))
        for one in workers:
            one.dies = lambda: False
        assert len(tokens(front.submit([5, 6, 7], SamplingParams(3, ignore_eos=True)))) == 3


@pytest.mark.thorough
def test_text_that_a_client_has_is_not_sent_twice(tinypy):
    params = SamplingParams(max_tokens=40, stop=("return",), ignore_eos=True)
    [expected] = Engine(tinypy.lm, CONFIG).generate(["def fib(n):"], params)
    deaths = iter([False] * 12 + [True] + [False] * 1000)
    workers = [Fragile(tinypy.lm, dies=lambda: next(deaths)) for _ in range(2)]
    with Front(workers, LeastLoaded) as front:
        deltas = list(front.submit("def fib(n):", params))
        assert front.num_lost == 1
    assert "".join(delta.text for delta in deltas) == expected.text
    assert [i for delta in deltas for i in delta.token_ids] == expected.token_ids
    assert deltas[-1].finish_reason == expected.finish_reason


def test_without_a_worker_requests_end_and_are_refused(tinypy):
    workers = [Fragile(tinypy.lm, dies=lambda: True) for _ in range(2)]
    with Front(workers, LeastLoaded) as front:
        for one in workers:
            one.is_gone = True
        with pytest.raises(RequestFailed):
            tokens(front.submit([5, 6, 7]))
        with pytest.raises(RequestFailed, match="no worker is left"):
            for _ in range(100):
                tokens(front.submit([5]))


def test_workers_are_started_when_requests_pile_up(tinypy):
    prompts, params = prompts_of(tinypy.lm, 2 * CROWD + 1), params_of(2 * CROWD + 1)
    expected = one_engine(tinypy.lm, prompts, params)
    workers = [Fragile(tinypy.lm) for _ in range(4)]
    with Front(workers, LeastLoaded, at_first=1) as front:
        for one in workers:
            one.paused.clear()
        pairs = list(zip(prompts, params, strict=True))
        streams = [front.submit(*pair) for pair in pairs[:CROWD]]
        assert front.num_started == 1 and front.router.up == [True, False, False, False]
        streams += [front.submit(*pair) for pair in pairs[CROWD:-1]]
        assert front.num_started == 2
        streams.append(front.submit(*pairs[-1]))
        assert front.num_started == 3
        until(lambda: front.router.up == [True, True, True, False])
        for one in workers[1:]:
            one.paused.set()
        late = front.submit([5], SamplingParams(2, ignore_eos=True))
        assert late.worker in (1, 2) and len(tokens(late)) == 2
        workers[0].paused.set()
        assert [tokens(one) for one in streams] == expected
        assert front.lanes[3].pid is None and front.num_lost == 0


@pytest.mark.thorough
def test_workers_that_were_added_are_ended_when_idle_and_started_again(tinypy):
    prompts, params = prompts_of(tinypy.lm, 2 * CROWD + 1), params_of(2 * CROWD + 1)
    expected = one_engine(tinypy.lm, prompts, params)
    workers = [Fragile(tinypy.lm) for _ in range(4)]
    with Front(workers, LeastLoaded, at_first=1) as front:
        for ends in ([0, 1, 1, 0], [0, 2, 2, 0]):
            front.idle = PATIENCE
            for one in workers:
                one.paused.clear()
            streams = [front.submit(*pair) for pair in zip(prompts, params, strict=True)]
            assert front.num_started == 3
            until(lambda: front.router.up == [True, True, True, False])
            late = [front.submit([5], SamplingParams(2, ignore_eos=True)) for _ in range(2)]
            assert all(front.lanes[index].requests for index in (1, 2))
            front.idle = 0.01  # from their next call on
            for one in workers:
                one.paused.set()
            assert [tokens(one) for one in streams] == expected
            assert [len(tokens(one)) for one in late] == [2, 2]
            until(lambda ends=ends: [one.num_ends for one in workers] == ends)
            assert front.num_started == 1 and front.router.up == [True, False, False, False]
            assert [lane.pid is None for lane in front.lanes] == [False, True, True, True]
        last = front.submit([5], SamplingParams(2, ignore_eos=True))
        assert last.worker == 0 and len(tokens(last)) == 2
        assert front.num_lost == 0


def test_a_worker_that_is_gone_is_replaced_by_one_that_was_not_started(tinypy):
    workers = [Fragile(tinypy.lm, dies=lambda: True), Fragile(tinypy.lm)]
    with Front(workers, LeastLoaded, at_first=1) as front:
        workers[0].is_gone = True
        assert len(tokens(front.submit([5, 6], SamplingParams(3, ignore_eos=True)))) == 3
        assert front.lanes[0].is_over and front.num_started == 2


def test_numbers_of_workers_are_read():
    assert from_to("4") == (4, 4) and from_to("1:4") == (1, 4)
    for wrong in ("", "0", "4:1", "1:", "a", "1:2:3"):
        with pytest.raises(ArgumentTypeError):
            from_to(wrong)


def test_workers_of_two_kinds_are_given_together(capsys):
    for options, numbers in (
        ([], (1, 1, 0)),
        (["--replicas", "1:4"], (1, 4, 0)),
        (["--prefill", "1", "--decode", "3"], (4, 4, 1)),
    ):
        parser = ArgumentParser()
        add_arguments(parser)
        assert numbers_of(parser.parse_args(options)) == numbers
    for wrong, says in (
        (["--prefill", "1"], "--prefill and --decode"),
        (["--decode", "1"], "--prefill and --decode"),
        (["--prefill", "1", "--decode", "1", "--replicas", "2"], "--replicas"),
    ):
        assert main(["serve", *wrong]) == 2
        assert says in capsys.readouterr().err


def test_no_more_is_taken_than_the_bound(tinypy):
    worker = Fragile(tinypy.lm)
    with Front([worker], LeastLoaded, max_requests=2) as front:
        worker.paused.clear()
        streams = [front.submit([5, 6], SamplingParams(2, ignore_eos=True)) for _ in range(2)]
        with pytest.raises(Busy, match="2 requests"):
            front.submit([5])
        streams[0].cancel()
        assert list(streams[0])[-1].finish_reason == "abort"
        again = front.submit([5], SamplingParams(2, ignore_eos=True))
        worker.paused.set()
        assert [len(tokens(one)) for one in (streams[1], again)] == [2, 2]


def test_closing_ends_what_is_unfinished(tinypy):
    worker = Fragile(tinypy.lm)
    with Front([worker], LeastLoaded) as front:
        worker.paused.clear()
        stream = front.submit([5, 6], SamplingParams(50, ignore_eos=True))
        go_on = worker.paused.set
        threading.Thread(target=lambda: until(lambda: front.is_closed) and go_on()).start()
    assert list(stream)[-1].finish_reason == "abort"
    with pytest.raises(RequestFailed):
        front.submit([5])


def test_what_can_never_run_is_refused(tinypy):
    with Front([Fragile(tinypy.lm)], LeastLoaded) as front:
        with pytest.raises(ValueError, match="make 20064 tokens"):
            tokens(front.submit([5] * 20_000))
        with pytest.raises(ValueError, match="token id"):
            tokens(front.submit([10**6]))
        with pytest.raises(ValueError, match="prompt"):
            front.submit([-1])
        with pytest.raises(ValueError, match="n: "):
            front.submit([5], SamplingParams(n=2))
        assert front.num_requests == 0


def test_workers_that_differ_are_refused(tinypy):
    other = EngineConfig(num_blocks=64, block_size=8, attention="torch")
    with pytest.raises(ValueError, match="same EngineConfig"):
        Front([Fragile(tinypy.lm), Fragile(tinypy.lm, other)], LeastLoaded)


class Faulty(Fragile):
    """Its first calls, or its later starts, fail in a way that nobody foresees."""

    def __init__(self, lm, faults, later=None):
        super().__init__(lm)
        self.faults, self.later, self.num_starts = list(faults), later, 0

    def start(self):
        self.num_starts += 1
        if self.later is not None and self.num_starts > 1:
            raise self.later
        return super().start()

    def work(self, jobs, cancelled):
        assert self.paused.wait(PATIENCE)
        fault = self.faults.pop(0) if self.faults and jobs else None
        if isinstance(fault, BaseException):
            raise fault
        return fault or super().work(jobs, cancelled)


@pytest.mark.parametrize(
    "fault",
    thorough_after(1, [
        RuntimeError("a secret"), KeyboardInterrupt(), KeyError(1), MemoryError(), SystemExit(1),
        "no work",
    ]),
    ids=repr,
)  # fmt: skip
def test_a_call_that_fails_ends_its_requests_and_no_others(tinypy, caplog, fault):
    prompts, params = prompts_of(tinypy.lm, 4), params_of(4)
    expected = one_engine(tinypy.lm, prompts, params)
    with Front([Faulty(tinypy.lm, [fault, fault]), Fragile(tinypy.lm)], RoundRobin) as front:
        for _ in range(3):
            pairs = zip(prompts, params, strict=True)
            streams = [front.submit(prompt, one) for prompt, one in pairs]
            for stream, want in zip(streams, expected, strict=True):
                try:
                    assert tokens(stream) == want
                except RequestFailed as error:
                    assert stream.worker == 0 or stream.worker is None
                    assert "has failed" in str(error) and "secret" not in str(error)
            until(lambda: all(lane.pid is not None for lane in front.lanes))
        assert front.num_requests == 0 and front.router.loads == [0, 0]
    assert "worker 0 has failed" in caplog.text and caplog.records[0].exc_info is not None


def test_a_worker_that_cannot_be_started_again_is_gone(tinypy, caplog):
    workers = [Faulty(tinypy.lm, [RuntimeError("x")], later=OSError("no model"))]
    with Front(workers, ByPrefix) as front:
        workers[0].paused.clear()
        streams = [front.submit([i]) for i in range(3)]
        workers[0].paused.set()
        for stream in streams:
            with pytest.raises(RequestFailed):
                tokens(stream)
        until(lambda: front.lanes[0].is_over)
        with pytest.raises(RequestFailed, match="no worker is left"):
            front.submit([1])
    assert "worker 0 cannot be started" in caplog.text


@pytest.mark.parametrize("num_late", [2, 3])
def test_ray_is_started_again_if_a_busy_machine_was_too_slow(num_late):
    """Stands in for Ray: its first nodes are late."""
    calls = []

    def init(*_, **__):
        calls.append("init")
        if calls.count("init") <= num_late:
            raise Exception("The current node timed out during startup")

    ray = SimpleNamespace(init=init, shutdown=lambda: calls.append("shutdown"))
    late = pytest.raises(RuntimeError, match="does not start: The current node timed out")
    with late if num_late == 3 else nullcontext(), connected(ray, None, 2):
        calls.append("used")
    again = ["init", "shutdown"] * num_late
    assert calls == again + ["init", "used"] * (num_late == 2) + ["shutdown"]


def test_a_request_that_cannot_be_placed_is_not_counted(tinypy):
    with Front([Fragile(tinypy.lm)], ByPrefix) as front:
        for salt in (10**5000, (10**5000,)):  # no text is made of so many digits
            with pytest.raises(ValueError):
                front.submit([1] * 40, SamplingParams(cache_salt=salt))
        assert front.num_requests == 0 and front.router.loads == [0]


@pytest.mark.parametrize("host_blocks", thorough_after(1, [24, 0]))
def test_a_router_is_told_what_workers_hold(tinypy, host_blocks):
    """What was told, stored less removed, is what the device and the tiers below it hold."""
    config = EngineConfig(num_blocks=24, max_num_seqs=4, attention="torch", host_blocks=host_blocks)
    worker, told, num_removed = EngineWorker(tinypy.lm, config, 0.0), set(), 0
    worker.start()
    jobs = [
        WorkerJob(i, prompt, SamplingParams(20, ignore_eos=True))
        for i, prompt in enumerate(prompts_of(tinypy.lm, 30))
    ]
    while jobs or worker.jobs:
        done = worker.work([jobs.pop()] if jobs else [], [])
        assert told.isdisjoint(done.stored) and told >= set(done.removed)
        told = (told | set(done.stored)) - set(done.removed)
        num_removed += len(done.removed)
        held = set(worker.held.names.values())
        assert set(worker.held.names) == set(worker.engine.cache.block_ids())
        if host_blocks:
            held |= {name for name, _ in worker.engine.tiers.host}
        assert told == held
    assert num_removed > 10
    assert bool(worker.held.identity) == bool(host_blocks)


def test_by_prefix_also_knows_of_answers(tinypy):
    """The next turn of a conversation goes where its answer was computed, by that block too."""
    workers = [Fragile(tinypy.lm) for _ in range(2)]
    with Front(workers, ByPrefix) as front:
        prompt = prompts_of(tinypy.lm, 1)[0]
        stream = front.submit(prompt, SamplingParams(40, ignore_eos=True))
        whole = prompt + tokens(stream)
        names = block_names(root_name(b""), whole[:-1], CONFIG.block_size)
        assert front.router.hits(names) == {stream.worker: len(names)}


@needs_a_store
def test_a_store_gives_a_worker_what_another_has_computed(tinypy):
    """Also one that begins anew: its engine is empty, the store is not."""
    prompt, params = prompts_of(tinypy.lm, 1)[0], SamplingParams(6, ignore_eos=True)
    [expected] = Engine(tinypy.lm, CONFIG).generate([prompt], params)
    with local_server("64 MiB") as server:
        config = replace(CONFIG, host_blocks=32, store=server.url)
        workers = [Fragile(tinypy.lm, config) for _ in range(2)]
        for one in workers:
            fetch_everything(one.worker.engine)
        with Front(workers, RoundRobin) as front:
            streams = []
            for _ in range(2):
                streams.append(front.submit(prompt, params))
                assert tokens(streams[-1]) == expected.token_ids
                for one in workers:
                    one.worker.engine.tiers.flush()
            assert [one.worker for one in streams] == [0, 1]
            assert front.lanes[1].stats.tiers["store"].hits == len(prompt) // CONFIG.block_size
            deaths = iter([True])
            workers[0].dies = lambda: next(deaths, False)
            assert tokens(front.submit(prompt, params)) == expected.token_ids
            assert front.num_lost == 1


def test_what_was_cancelled_before_it_was_computed_is_not_believed_to_be_held(tinypy):
    worker = Fragile(tinypy.lm)
    with Front([worker], ByPrefix) as front:
        prompt = prompts_of(tinypy.lm, 1)[0]
        tokens(front.submit(prompt, SamplingParams(2, ignore_eos=True)))
        held = dict(front.router.holders)
        worker.paused.clear()
        before = front.submit([5], SamplingParams(2, ignore_eos=True))
        until(lambda: front.lanes[0].busy_since is not None)  # a call without it is under way
        front.submit(prompt[:32] + [7] * 40).cancel()
        worker.paused.set()
        assert len(tokens(before)) == 2
        assert front.router.holders == held and len(held) == 2


def test_a_router_sends_nothing_to_a_worker_that_is_down():
    for policy in EVERY_POLICY.values():
        router = policy(3, 16)
        first = router.route(["a"], 16, "session")
        router.lost(first.worker)
        others = [router.route(["a"], 16, "session").worker for _ in range(6)]
        assert first.worker not in others
        router.back(first.worker)
        assert first.worker in {router.route([i], 16, i).worker for i in range(9)}
    by_prefix = ByPrefix(2, 16)
    by_prefix.stored(0, ["a", "b"])
    by_prefix.lost(0)
    assert by_prefix.holders == {}
    turns = RoundRobin(2)
    turns.lost(0)
    turns.lost(1)
    with pytest.raises(StopIteration):
        turns.route([], 1)


@pytest.mark.thorough
@needs_a_store
def test_the_benchmark_of_real_workers(tinypy, monkeypatch, capsys):
    """On workers in this process."""

    @contextmanager
    def here(number, model, config):
        yield [Fragile(tinypy.lm, replace(config, attention="torch")) for _ in range(number)]

    monkeypatch.setattr(cluster_real, "ray_workers", here)
    monkeypatch.setattr(bench_cluster, "measured_costs", lambda lm: StepSeconds(1e-3, 1e-5, 1e-4))
    small = {"TALKS": 2, "TURNS": 2, "LOAD": 0.15, "AT_ONCE": 2, "PROMPT": 20, "OUTPUT": 4}
    for name, value in small.items():
        monkeypatch.setattr(cluster_real, name, value)
    assert main(["bench", "cluster", "--real", "2"]) == 0
    rows = [
        line.split("  ")
        for line in capsys.readouterr().out.splitlines()
        if re.match(r"[12]  ", line)
    ]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [row[1] for row in cells] == [
        "by prefix, simulated", "by prefix", "round robin", "round robin, a store",
    ]  # fmt: skip
    hits = [float(row[2]) for row in cells]
    assert all(0 < one < 1 for one in hits)
    assert hits[0] == pytest.approx(hits[1], abs=0.2)  # each turn comes when the one before is over


# ── Behind the application, whose other tests are in tests/serving ────────────


def test_a_killed_worker_loses_no_request(tinypy):
    """Streams of two samples over HTTP, each worker dies once: nothing twice, nothing lost."""
    bodies = [
        {"prompt": "def f(n):\n" * 8 + f"{i}", "max_tokens": 14, "temperature": 0.8, "seed": i,
         "n": 2, "ignore_eos": i % 2 > 0, "stream": True, "stream_options": {"include_usage": True}}
        for i in range(8)
    ]  # fmt: skip
    names = "max_tokens", "temperature", "seed", "n", "ignore_eos"
    params = [SamplingParams(**{name: one[name] for name in names}) for one in bodies]
    expected = Engine(tinypy.lm, CONFIG).generate([one["prompt"] for one in bodies], params)
    asked = [itertools.count() for _ in range(2)]  # each dies once, a request less than ATTEMPTS
    workers = [Fragile(tinypy.lm, dies=lambda one=one: next(one) == 15) for one in asked]
    with server(tinypy.lm, served_by=Cluster(tinypy.lm, workers)) as at:
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda body: at.ask(body=body).text, bodies))
        assert at.by.target.num_lost == 2
        until(at.by.is_idle)
    for answer, output in zip(answers, expected, strict=True):
        *chunks, last = [json.loads(one[6:]) for one in answer.split("\n\n")[:-2]]
        num_tokens = sum(len(one.token_ids) for one in output.samples)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == num_tokens
        for index, sample in enumerate(output.samples):
            pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert [i for one in pieces for i in one["token_ids"]] == sample.token_ids
            assert "".join(one["text"] for one in pieces) == sample.text
            reasons = [one["finish_reason"] for one in pieces]
            assert reasons[-1] == sample.finish_reason and not any(reasons[:-1])


def test_cached_tokens_are_those_of_the_worker_that_computed_the_prompt(tinypy):
    """Not those that its K and V make of it on the worker that goes on."""
    workers = [Fragile(tinypy.lm) for _ in range(2)]
    with server(tinypy.lm, served_by=Cluster(tinypy.lm, workers, num_prefill=1)) as at:
        body = {"prompt": list(range(1, 101)), "max_tokens": 3}
        found = [at.ask(body=body).json()["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert found == [{"cached_tokens": 0}, {"cached_tokens": 96}]


def test_health_says_whether_a_worker_can_answer(tinypy):
    """The clock goes on by the time of a hung call whenever it is read."""
    workers = [Fragile(tinypy.lm) for _ in range(3)]
    with (
        server(tinypy.lm, served_by=Cluster(tinypy.lm, workers, num_prefill=1)) as at,
        ThreadPoolExecutor() as threads,
    ):
        front, later = at.by.target, itertools.count(step=app.HANGS)
        front.clock = lambda: next(later)

        def state():
            found = at.ask("/health")
            hangs = [one["seconds_in_step"] > 0 for one in found.json()["workers"]]
            return found.status_code, hangs

        assert state() == (200, [False] * 3)
        for one in workers[1:]:
            one.paused.clear()
        body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
        waiting = [threads.submit(at.ask, body=body)]
        until(lambda: state()[1] in ([False, True, False], [False, False, True]))
        assert state()[0] == 200, "one of two hangs"
        waiting.append(threads.submit(at.ask, body=body))
        until(lambda: state() == (503, [False, True, True]))
        for one in workers[1:]:
            one.paused.set()
        assert [one.result().status_code for one in waiting] == [200, 200]
        for one in workers:
            one.is_gone, one.dies = True, lambda: True
        assert at.ask(body=body).status_code == 500
        until(lambda: all(lane.is_over for lane in front.lanes[1:]))
        assert state()[0] == 503 and at.ask(body=body).status_code == 500


@pytest.mark.parametrize(
    "words", thorough_after(1, [["--prefill", "1", "--decode", "1"], ["--replicas", "2"]])
)
def test_the_commands_serve_workers(tinypy, monkeypatch, capsys, words):
    """On workers in this process."""

    @contextmanager
    def here(number, model, config, address, dtype):
        assert (number, model, address, dtype) == (2, "tinypy", None, torch.float32)
        for one in (signal.SIGINT, signal.SIGTERM):  # Ray does this, and its own end at once
            signal.signal(one, lambda *_: sys.exit("streams are cut"))
        yield [Fragile(tinypy.lm, replace(config, attention="torch")) for _ in range(number)]

    @contextmanager
    def asked(*arguments):
        with served(*arguments) as address:
            url = "http://{}:{}".format(*address)
            asked = {"prompt": "x", "max_tokens": 3}
            answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE)
            assert answer.status_code == 200
            assert len(httpx.get(f"{url}/health", timeout=PATIENCE).json()["workers"]) == 2
            signal.raise_signal(signal.SIGTERM)
            yield address

    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(serve, "ray_workers", here)
    monkeypatch.setattr(server_module, "served", asked)
    try:
        assert main(["serve", *words, "--port", "0"]) == 0
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    assert capsys.readouterr().out.startswith("http://127.0.0.1:")
