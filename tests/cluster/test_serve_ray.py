"""Engines as Ray actors, in processes of their own: tokens are one engine's, also after kill -9."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import httpx
import psutil
import pytest
from cluster_case import tokens
from serving_case import Cluster, server
from waiting import PATIENCE, until

from minikv import Engine, EngineConfig, SamplingParams
from minikv.cluster import actors
from minikv.cluster.front import Front, WorkerLost
from minikv.cluster.routing import ByPrefix
from minikv.cluster.worker import WorkerJob

CONFIG = EngineConfig(num_blocks=128, attention="torch")


@contextmanager
def nothing_is_left():
    """No process that was started inside outlives it."""
    before = {*children()}
    yield
    until(lambda: before.issuperset(children()))


def children():
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since
            if one.status() != psutil.STATUS_ZOMBIE:
                yield one.pid


@pytest.fixture(scope="module")
def workers():
    pytest.importorskip("ray", reason='needs Ray: pip install "minikv[distributed]"')
    with nothing_is_left(), actors.ray_workers(2, "tinypy", CONFIG, patience=120) as found:
        yield found


@pytest.fixture(scope="module")
def killed_command():
    """The answers of `serve`, its processes, and their addresses, until the command was killed."""
    pytest.importorskip("ray", reason='needs Ray: pip install "minikv[distributed]"')
    command = [sys.executable, "-m", "minikv", "serve", "--port", "0"]
    command += ["--prefill", "1", "--decode", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            reply = httpx.post(url, json=BODY, timeout=120).json()
            started, addresses = psutil.Process(process.pid).children(recursive=True), []
            for one in started:
                with suppress(psutil.NoSuchProcess):  # it has ended since
                    addresses += one.net_connections("tcp")
        finally:
            process.kill()
    listen = [one for one in addresses if one.status == "LISTEN"]
    return SimpleNamespace(reply=reply, started=started, listen=listen)


BODY = {"prompt": "def f(n):\n    return n\n" * 12, "max_tokens": 300, "ignore_eos": True}


@pytest.fixture
def front(workers):
    with Front(workers, ByPrefix) as front:
        yield front


@pytest.mark.thorough
def test_the_command_serves_this_machine_alone(killed_command):
    reply = killed_command.reply
    assert len(reply["choices"][0]["token_ids"]) == reply["usage"]["completion_tokens"] == 300
    assert killed_command.started and killed_command.listen
    assert all(address.laddr.ip.endswith("127.0.0.1") for address in killed_command.listen)


@pytest.mark.thorough
def test_an_answer_over_http_survives_the_death_of_its_worker(workers, tinypy):
    """Apart: one dies before it has computed a prompt, the other in the middle of a stream."""
    prompts = [f"# {i}\n{BODY['prompt']}" for i in range(2)]
    expected = Engine(tinypy.lm, CONFIG).generate(prompts, SamplingParams(700, ignore_eos=True))
    by = Cluster(tinypy.lm, workers, num_prefill=1)
    with server(tinypy.lm, keys=(), served_by=by) as at:
        prefill, decode = (lane.pid for lane in by.target.lanes)
        os.kill(prefill, signal.SIGKILL)
        for prompt, output in zip(prompts, expected, strict=True):
            body = BODY | {"prompt": prompt, "stream": True, "max_tokens": 700}
            url = f"{at.url}/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=120) as answer:
                lines = answer.iter_lines()
                first = next(lines)
                if prompt == prompts[1]:
                    os.kill(decode, signal.SIGKILL)
                pieces = [json.loads(one[6:]) for one in [first, *lines] if one[6:7] == "{"]
            choices = [choice for one in pieces for choice in one["choices"]]
            assert [i for one in choices for i in one["token_ids"]] == output.token_ids
            assert "".join(one["text"] for one in choices) == output.text
        assert by.target.num_lost == 2 and at.ask("/health").status_code == 200


@pytest.mark.thorough
def test_tokens_are_those_of_one_engine_before_and_after_a_kill(front, tinypy):
    prompts = [f"def function_{i}(n):\n    return n" for i in range(16)]
    params = [
        SamplingParams(900 if i == 0 else 150, temperature=0.7 * (i % 2), seed=i, ignore_eos=True)
        for i in range(16)
    ]
    expected = [one.token_ids for one in Engine(tinypy.lm, CONFIG).generate(prompts, params)]
    pairs = list(zip(prompts, params, strict=True))
    streams = [front.submit(*pair) for pair in pairs]
    assert [tokens(one) for one in streams] == expected
    assert {one.worker for one in streams} == {0, 1}

    pids = [lane.pid for lane in front.lanes]
    streams = [front.submit(*pair) for pair in pairs]
    begun = iter(streams[0])
    first = next(begun)
    killed = streams[0].worker
    os.kill(pids[killed], signal.SIGKILL)
    rest = [token_id for delta in begun for token_id in delta.token_ids]
    assert first.token_ids + rest == expected[0]
    assert [tokens(one) for one in streams[1:]] == expected[1:]
    assert front.num_lost == 1
    until(lambda: front.lanes[killed].pid is not None)
    assert front.lanes[killed].pid != pids[killed]
    streams = [front.submit(*pair) for pair in pairs]
    assert [tokens(one) for one in streams] == expected
    assert {one.worker for one in streams} == {0, 1}


@pytest.mark.thorough
def test_prefill_apart_before_and_after_kills_at_random_moments(workers, tinypy):
    rng = random.Random(3)
    prompts = [f"def function_{i}(n):\n    return n\n" * 12 for i in range(12)]
    params = [
        SamplingParams(max_tokens=40, temperature=0.7 * (i % 2), seed=i, ignore_eos=True)
        for i in range(12)
    ]
    expected = [one.token_ids for one in Engine(tinypy.lm, CONFIG).generate(prompts, params)]
    with Front(workers, ByPrefix, num_prefill=1) as front, ThreadPoolExecutor(12) as threads:
        before = [worker.work([], []).stats for worker in workers]
        for kills in ((), (0, 1), (1, 0)):
            streams = [front.submit(*pair) for pair in zip(prompts, params, strict=True)]
            answers = [threads.submit(tokens, one) for one in streams]
            for index in kills:
                time.sleep(rng.uniform(0, 0.3))
                if (pid := front.lanes[index].pid) is not None:  # else it is being started again
                    with suppress(ProcessLookupError):  # likewise, and the front has not noticed
                        os.kill(pid, signal.SIGKILL)
            assert [one.result(timeout=400) for one in answers] == expected
            if not kills:
                assert {one.worker for one in streams} == {1}
                first, second = [lane.stats for lane in front.lanes]
                assert first.generated_tokens - before[0].generated_tokens == 12
                computed = second.computed_tokens - before[1].computed_tokens
                assert computed < 12 * (CONFIG.block_size + 41)
        assert front.num_lost > 0


@pytest.mark.thorough
def test_an_object_whose_worker_has_died_is_a_miss(workers):
    prompt, params = list(range(5, 105)), SamplingParams(9, ignore_eos=True)
    pid = workers[0].start().pid
    [progress] = workers[0].work([WorkerJob(0, prompt, params, hands_over=True)], []).progress
    _, shared = progress.prefix
    assert len(progress.token_ids) == 1 and progress.finish_reason is None
    assert [part.shape[1] for part in actors.Actor.fetch(None, shared).values()] == [6]
    [progress] = workers[0].work([WorkerJob(1, prompt, params, hands_over=True)], []).progress
    _, shared = progress.prefix
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid not in children())
    until(lambda: actors.Actor.fetch(None, shared) is None)
    assert workers[0].start().pid != pid


@pytest.mark.thorough
def test_a_cancelled_request_is_dropped_by_its_worker(front):
    stream = front.submit([5, 6, 7], SamplingParams(900, ignore_eos=True))
    next(iter(stream))
    lane = front.lanes[stream.worker]
    stream.cancel()
    assert front.num_requests == 0
    tokens(front.submit([5, 6, 7], SamplingParams(2, ignore_eos=True)))
    until(lambda: lane.stats.running == 0)
    assert lane.stats.generated_tokens < 900


@pytest.mark.thorough
def test_another_process_needs_the_token_of_this_ray(workers, tmp_path):
    """A connection can run code. Another token gets none, and no file has the right one."""
    import ray

    address = ray.get_runtime_context().gcs_address
    connect = "import ray, sys; ray.init(sys.argv[1], logging_level='CRITICAL'); print('is in')"
    wrong = os.environ | {"RAY_AUTH_TOKEN": "0" * 64, "HOME": str(tmp_path)}
    command = [sys.executable, "-c", connect, address]
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with (
        subprocess.Popen(command, env=wrong, **pipe) as stranger,
        subprocess.Popen(command, **pipe) as friend,
    ):
        for process, is_in in ((stranger, False), (friend, True)):
            try:
                out, error = process.communicate(timeout=120)
            finally:
                process.kill()
            assert ("is in" in out) == is_in, error
    assert not (tmp_path / ".ray").exists()


@pytest.mark.thorough
def test_a_worker_that_hangs_is_started_again(workers):
    """A stopped process answers nothing: after its patience it is killed."""
    worker = actors.RayWorker(lambda: workers[0].actor, patience=1.0)
    pid = worker.start().pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerLost):
        worker.work([], [])
    assert worker.start().pid != pid
    worker.patience = PATIENCE
    assert worker.work([], []).progress == []


@pytest.mark.thorough
def test_an_ended_worker_leaves_no_process_and_can_be_started_again(workers):
    before = workers[1].start().pid
    workers[1].end()
    until(lambda: before not in children())
    assert workers[1].start().pid != before


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(ImportError, match=r'pip install "minikv\[distributed\]"'),
        actors.ray_workers(1, "tinypy", CONFIG),
    ):
        pass
    from minikv.course.commands import main

    assert main(["serve", "--replicas", "2"]) == 2
    assert "minikv[distributed]" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_killed_command_leaves_nothing(killed_command):
    """Last: some of Ray's processes look for the dead ones for a minute before they end."""
    until(lambda: not any(one.is_running() for one in killed_command.started))
