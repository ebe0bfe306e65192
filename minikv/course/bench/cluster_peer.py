"""Routing by SGLang's router beside ours: the same conversations, by HTTP, to the same workers.

`sglang-router` (`pip install sglang-router`) knows prompts by their text, and workers by what it
has sent to them. Ours knows blocks, from the workers' own events. All workers are in this process,
so times would say little. Compared are the hit rate, and how evenly prompts are divided.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from statistics import mean
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from minikv import EngineConfig
from minikv.cluster.front import Front
from minikv.cluster.local_server import free_port
from minikv.cluster.routing import EVERY_POLICY, RoundRobin
from minikv.cluster.worker import EngineWorker
from minikv.course.bench.harness import BenchTable, bar
from minikv.course.workloads.workload import Job, conversations
from minikv.language_model import LanguageModel
from minikv.serving.app import make_app
from minikv.serving.server import served

NAME = "sglang-router"
OURS = "round robin", "by prefix", "by own prefix"
THEIRS = "round_robin", "cache_aware"
CONFIG = EngineConfig(num_blocks=4096)
TALKS, TURNS = 8, 4  # conversations per worker, and their length
SECONDS = 20.0  # over which they arrive
DIRECT = build_opener(ProxyHandler({}))  # a proxy cannot reach an address of this machine
STARTING = 60  # seconds that the router has to find the workers


def add_rows(table: BenchTable, number: int, lm: LanguageModel) -> None:
    """A row for each policy. Raises ImportError without the router."""
    if find_spec("sglang_router") is None:
        raise ImportError(f"{NAME} is not installed: pip install {NAME}")
    jobs = conversations(lm, TALKS * number, turns=TURNS, real_answers=False)
    last = max(job.arrival for job in jobs)
    jobs = [job._replace(arrival=job.arrival * SECONDS / last) for job in jobs]
    ways = [partial(by_ours, policy=EVERY_POLICY[name]) for name in OURS]
    ways += [partial(by_theirs, policy=policy) for policy in THEIRS]
    names = [*OURS, *(f"{NAME}, {policy}" for policy in THEIRS)]
    with bar(len(ways) * len(jobs), NAME) as progress:
        for name, way in zip(names, ways, strict=True):
            workers = [EngineWorker(lm, CONFIG) for _ in range(number)]
            with way(workers) as url:
                send(url, jobs, lm, progress.update)
            stats = [worker.engine.stats() for worker in workers]
            looked_up = [one.looked_up_tokens for one in stats]
            row = {
                "workers": number,
                "routing": name,
                "hit rate": sum(one.hit_tokens for one in stats) / sum(looked_up),
                "prompts, busiest / mean": max(looked_up) / mean(looked_up),
            }
            table.add(row)


@contextmanager
def by_ours(workers: list[EngineWorker], policy) -> Iterator[str]:
    with Front(workers, policy, 1000) as front, served(make_app(front, "tinypy")) as address:
        yield url_of(address)


@contextmanager
def by_theirs(workers: list[EngineWorker], policy: str) -> Iterator[str]:
    """Each worker behind an address of its own, and the router before them."""
    with ExitStack() as stack:
        fronts = [stack.enter_context(Front([one], RoundRobin, 1000)) for one in workers]
        apps = [make_app(front, "tinypy") for front in fronts]
        urls = [url_of(stack.enter_context(served(app))) for app in apps]
        port, metrics = free_port(), free_port()
        command = [
            sys.executable, "-m", "sglang_router.launch_router", "--policy", policy,
            "--host", "127.0.0.1", "--port", str(port),
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics),
            "--worker-urls", *urls,
        ]  # fmt: skip
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        router = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        stack.callback(router.wait)
        stack.callback(router.kill)
        url = f"http://127.0.0.1:{port}"
        wait_for_all(url, len(workers))
        yield url


def url_of(address: tuple[str, int]) -> str:
    return "http://{}:{}".format(*address)


def wait_for_all(url: str, number: int) -> None:
    """Until the router has found that many workers."""
    end = time.monotonic() + STARTING
    while True:
        try:
            with DIRECT.open(f"{url}/workers") as answer:
                workers = json.load(answer)["workers"]
        except OSError:
            workers = []
        if sum(worker["is_healthy"] for worker in workers) == number:
            return
        if time.monotonic() > end:
            raise RuntimeError(f"{NAME} has found {len(workers)} of {number} workers")
        time.sleep(0.2)


def send(url: str, jobs: list[Job], lm: LanguageModel, sent) -> None:
    """Send each job when it arrives, and wait for all."""
    started = time.monotonic()
    with ThreadPoolExecutor(64) as threads:
        waiting = []
        for job in jobs:
            time.sleep(max(0.0, started + job.arrival - time.monotonic()))
            prompt = lm.decode(job.prompt_ids)
            waiting.append(threads.submit(complete, url, prompt, job.max_tokens))
        for one in waiting:
            one.result()
            sent()


def complete(url: str, prompt: str, max_tokens: int) -> None:
    body = {"model": "tinypy", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    head = {"Content-Type": "application/json"}
    try:
        asked = Request(f"{url}/v1/completions", json.dumps(body).encode(), head)
        with DIRECT.open(asked) as answer:
            answer.read()
    except HTTPError as error:
        raise OSError(f"{error}: {error.read().decode(errors='replace')}") from error
