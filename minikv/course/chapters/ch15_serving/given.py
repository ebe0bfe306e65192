"""Chapter 15: what the notebook serves, asks and measures."""

import asyncio
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Timer
from time import monotonic, perf_counter
from types import SimpleNamespace
from typing import Any, NamedTuple

from minikv.config import EngineConfig
from minikv.course.pictures.block_viewer import History
from minikv.engine import Engine
from minikv.language_model import LanguageModel
from minikv.sampling import SamplingParams
from minikv.scheduler import Scheduler
from minikv.serving import EngineLoop, Inbox

# ── An address ────────────────────────────────────────────────────────────────


@contextmanager
def server(
    lm: LanguageModel, seconds: float = 60.0, **config: Any
) -> Iterator[tuple[str, EngineLoop]]:
    """tinypy behind a free port: yields the address of OpenAI's interface, and the loop behind it.
    After `seconds` all that is under way fails, so that no cell can hang. Clients that are made
    meanwhile go there directly, whatever proxy the environment names."""
    from minikv.serving.app import make_app
    from minikv.serving.server import served

    with EngineLoop(Engine(lm, EngineConfig(**config))) as loop:
        deadline = Timer(seconds, loop.close)
        deadline.daemon = True
        deadline.start()
        before = os.environ.get("no_proxy")
        others = before or os.environ.get("NO_PROXY") or "localhost"
        os.environ["no_proxy"] = f"{others},127.0.0.1"
        try:
            with served(make_app(loop, "tinypy"), drain=1) as (host, port):
                yield f"http://{host}:{port}/v1", loop
        finally:
            deadline.cancel()
            del os.environ["no_proxy"]
            if before is not None:
                os.environ["no_proxy"] = before


# ── One after the other, or together ──────────────────────────────────────────


def one_after_the_other(
    lm: LanguageModel, prompts: Sequence[str], max_tokens: int
) -> list[tuple[float, float]]:
    """Seconds until each user sees its first token and its last, if the server answers one call
    after the other: then both come together."""
    engine = Engine(lm)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.generate("warm", params)
    started, seen = perf_counter(), []
    for prompt in prompts:
        engine.generate(prompt, params)
        seen.append((perf_counter() - started,) * 2)
    return seen


async def together(
    lm: LanguageModel, prompts: Sequence[str], max_tokens: int
) -> list[tuple[float, float]]:
    """The same with one thread that steps, and a reader for each user."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)

    async def read(inbox: Inbox) -> tuple[float, float]:
        while (await inbox.take())[-1][1].finish_reason is None:
            pass
        return (inbox.first or 0.0) - started, monotonic() - started

    with EngineLoop(Engine(lm)) as loop:
        started, inboxes = monotonic(), [Inbox() for _ in prompts]
        for prompt, inbox in zip(prompts, inboxes, strict=True):
            loop.submit(prompt, params, reader=inbox)
        return await asyncio.gather(*map(read, inboxes))


async def readers(
    lm: LanguageModel, make_inbox: Callable, pauses: Sequence[float], max_tokens: int = 60
) -> list[tuple[list[int], float]]:
    """How many tokens each reader got each time that it took, if it pauses so many seconds in
    between, and its seconds per token. All have the same prompt; raises AssertionError if they get
    different tokens."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)

    async def read(inbox: Any, pause: float) -> tuple[list[list[int]], float]:
        found, is_over, started = [], False, monotonic()
        while not is_over:
            delta = await inbox.take()
            found.append(delta.token_ids)
            is_over = delta.finish_reason is not None
            if not is_over:
                await asyncio.sleep(pause)
        return found, (monotonic() - started) / max_tokens

    with EngineLoop(Engine(lm)) as loop:
        inboxes = [make_inbox() for _ in pauses]
        for inbox in inboxes:
            loop.submit("def area(", params, reader=inbox)
        pieces = await asyncio.gather(*map(read, inboxes, pauses))
    expected = lm.generate_naively(lm.encode("def area("), max_tokens)
    if any([token for piece in one for token in piece] != expected for one, _ in pieces):
        raise AssertionError("a reader got other tokens than the oracle's")
    return [([len(token_ids) for token_ids in one], each) for one, each in pieces]


# ── A client leaves ───────────────────────────────────────────────────────────


def leaving(lm: LanguageModel, make_front: Callable, max_tokens: int = 24) -> tuple[History, int]:
    """A and B are answered, and A leaves after a few steps. The blocks, step by step, and how many
    tokens were written for A afterwards."""
    engine = Engine(lm, EngineConfig(12, 4, prefix_cache=False, attention="torch"))
    front, history = make_front(engine), History(engine.pool)
    prompts = {"A": lm.encode("class Stack:\n    def"), "B": lm.encode("import os")}
    ids = {
        name: front.submit(name, prompt, max_tokens if name == "A" else 14, stream=name == "B")
        for name, prompt in prompts.items()
    }
    requests = {name: engine.request(number) for name, number in ids.items()}

    def snap(words: str) -> None:
        sequences = {name: request.sequences[0] for name, request in requests.items()}
        running = {name: one for name, one in sequences.items() if one.table is not None}
        texts = {
            name: [lm.decode([token]) for token in one.token_ids[: one.num_computed]]
            for name, one in running.items()
        }
        tables = {
            name: SimpleNamespace(
                block_ids=one.table.block_ids, block_size=4, num_tokens=one.num_computed
            )
            for name, one in running.items()
        }
        history.snap(words, tables, texts)

    left_with = 0
    for step in range(1, 40):
        if not engine.has_unfinished:
            break
        front.step()
        snap("both prompts" if step == 1 else "one more token each")
        if step == 4:
            left_with = requests["A"].sequences[0].num_output
            front.leave("A")
            snap("A's client is gone")
    return history, requests["A"].sequences[0].num_output - left_with


# ── What was asked, and found ─────────────────────────────────────────────────


class Lookup(NamedTuple):
    """A request that was looked up in the prefix cache, to be admitted."""

    num_tokens: int  # looked up
    num_found: int  # of those, in the cache
    is_admitted: bool  # in this step
    num_preemptions: int  # of the request, before


def lookups(lm: LanguageModel, num_requests: int = 20, num_blocks: int = 40) -> list[Lookup]:
    """All look-ups while requests with random prompts, which share nothing, are answered in a pool
    that is too small for those that run."""
    found: list[Lookup] = []

    class Recording(Scheduler):
        def look_up(self, sequence):
            match = super().look_up(sequence)
            num_found = match.num_tokens if match is not None else 0
            seen.append((sequence, len(sequence.token_ids), num_found, sequence.num_preemptions))
            return match

        def schedule(self):
            seen.clear()
            plan = super().schedule()
            found.extend(
                Lookup(tokens, hit, sequence.table is not None, preempted)
                for sequence, tokens, hit, preempted in seen
            )
            return plan

    seen: list[tuple] = []
    draw = random.Random(1)
    config = EngineConfig(num_blocks, max_num_seqs=8, attention="torch")
    engine = Engine(lm, config, scheduler=Recording)
    size = lm.config.vocab_size
    prompts = [[draw.randrange(size) for _ in range(64)] for _ in range(num_requests)]
    engine.generate(prompts, SamplingParams(max_tokens=64, ignore_eos=True))
    stats = engine.stats()
    counted = [one for one in found if one.is_admitted and not one.num_preemptions]
    assert sum(one.num_found for one in counted) == stats.hit_tokens
    assert sum(one.num_tokens for one in counted) == stats.looked_up_tokens
    return found


def buckets(metrics: str, name: str) -> tuple[list[float], list[int]]:
    """Limits and cumulative counts of one histogram in a text of /metrics."""
    lines = re.findall(rf'^vllm:{name}_bucket{{.*?le="(.+?)".*?}} (\S+)$', metrics, re.MULTILINE)
    return [float(limit) for limit, _ in lines], [int(float(count)) for _, count in lines]


# ── A bill ────────────────────────────────────────────────────────────────────


def dollars(
    usages: Sequence[Mapping[str, Any]], fresh: float, cached: float, answer: float
) -> float:
    """What these `usage` records cost at prices per million tokens: of prompt tokens that were
    computed, of those that were cached, and of new ones."""
    total = 0.0
    for usage in usages:
        found = usage["prompt_tokens_details"]["cached_tokens"]  # part of prompt_tokens
        total += (usage["prompt_tokens"] - found) * fresh + found * cached
        total += usage["completion_tokens"] * answer
    return total / 1e6


# ── Load ──────────────────────────────────────────────────────────────────────


class Answered(NamedTuple):
    """How one request went, in seconds; infinite if it did not come to that."""

    first: float  # until its first token
    between: float  # from token to token, on average


class Trial(NamedTuple):
    """What came of a load. All rates are per second."""

    offered: float
    finished: float
    refused: float
    good: float  # finished within both limits


async def offer(
    loop: EngineLoop, rate: float, seconds: float, limits: Answered, admission: Any = None,
    num_prompt: int = 160, num_new: int = 32,
) -> Trial:  # fmt: skip
    """Let requests come at random (Poisson), `rate` per second, whether others are answered or not.
    Random prompts share nothing. What is not over a second after the last came is given up."""
    draw, at, started = random.Random(7), 0.0, monotonic()
    params = SamplingParams(max_tokens=num_new, ignore_eos=True)
    size = loop.engine.lm.config.vocab_size
    answered: list[Answered] = []
    num_refused = 0

    async def ask(key: str, prompt: list[int]) -> None:
        nonlocal num_refused
        came = monotonic()
        if admission is not None and admission.enter(key, num_prompt, came):
            num_refused += 1
            return
        inbox = Inbox()
        answer = loop.submit(prompt, params, reader=inbox)
        try:
            [(_, delta)] = await inbox.take()
            if admission is not None:
                admission.first_token(key, inbox.first)
            while delta.finish_reason is None:
                [(_, delta)] = await inbox.take()
            first = inbox.first or 0.0
            answered.append(Answered(first - came, (monotonic() - first) / (num_new - 1)))
        finally:
            answer.cancel()  # nothing, if it is over

    tasks: list[asyncio.Task] = []
    while (at := at + draw.expovariate(rate)) < seconds:
        prompt = [draw.randrange(size) for _ in range(num_prompt)]
        await asyncio.sleep(max(0.0, started + at - monotonic()))
        tasks.append(asyncio.create_task(ask(str(len(tasks)), prompt)))
    with suppress(TimeoutError):  # all that is not over is cancelled then
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 1.0)
    good = sum(one.first <= limits.first and one.between <= limits.between for one in answered)
    return Trial(*(n / seconds for n in (len(tasks), len(answered), num_refused, good)))


async def at_once(loop: EngineLoop, number: int, num_prompt: int = 160, num_new: int = 32) -> float:
    """Answers per second if so many requests come at once."""
    draw = random.Random(3)
    params = SamplingParams(max_tokens=num_new, ignore_eos=True)
    size = loop.engine.lm.config.vocab_size
    started, inboxes = monotonic(), [Inbox(patient=True) for _ in range(number)]
    for inbox in inboxes:
        loop.submit([draw.randrange(size) for _ in range(num_prompt)], params, reader=inbox)

    async def end(inbox: Inbox) -> None:
        while (await inbox.take())[0][1].finish_reason is None:
            pass

    await asyncio.gather(*map(end, inboxes))
    return number / (monotonic() - started)
