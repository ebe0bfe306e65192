"""One engine in a thread, many readers: its own tokens, whoever fails, is slow or leaves."""

import asyncio
import logging
import pickle
import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import assert_empty, careful_engine
from serving_case import whole
from thorough import thorough_after
from waiting import PATIENCE, until

from minikv import Engine, EngineConfig, Sampler, SamplingParams
from minikv.cluster.worker import EngineWorker, WorkerJob
from minikv.outputs import Delta
from minikv.serving import Asked, EngineLoop, Inbox, RequestFailed, Steps
from minikv.serving.inbox import Rounds
from minikv.serving.scores import Token

CONFIG = EngineConfig(num_blocks=128, max_num_seqs=8, attention="torch")


def cases(lm, number, seed=0):
    """Greedy and drawn requests of several lengths, one in four with three samples."""
    rng = random.Random(seed)
    for i in range(number):
        prompt = [rng.randrange(lm.config.vocab_size) for _ in range(rng.randint(1, 40))]
        yield prompt, SamplingParams(
            max_tokens=rng.randint(1, 14), temperature=0.8 * (i % 2), seed=i,
            n=3 if i % 4 == 0 else 1, ignore_eos=i % 3 > 0,
        )  # fmt: skip


def samples_of(output):
    return [(one.token_ids, one.text, one.finish_reason) for one in output.samples]


async def ask(loop, prompt, params, patient=False, pause=0.0):
    inbox = Inbox(patient)
    answer = loop.submit(prompt, params, reader=inbox)
    await asyncio.sleep(pause)
    return await whole(inbox, params.n), answer


@pytest.mark.parametrize("patient", thorough_after(1, [False, True]))
def test_answers_are_those_of_generate(tinypy, patient):
    prompts, params = zip(*cases(tinypy.lm, 14), strict=True)
    expected = Engine(tinypy.lm, CONFIG).generate(prompts, params)

    async def everybody(loop):
        pauses = [0.02 * (i % 5) for i in range(len(prompts))]
        asked = zip(prompts, params, pauses, strict=True)
        return await asyncio.gather(*(ask(loop, p, q, patient, s) for p, q, s in asked))

    engine = careful_engine(tinypy.lm, CONFIG)
    with EngineLoop(engine) as loop:
        found = asyncio.run(everybody(loop))
    assert [one for one, _ in found] == [samples_of(output) for output in expected]
    assert_empty(engine)


@pytest.mark.thorough
def test_nothing_piles_up_for_a_slow_reader(tinypy):
    async def slow(loop):
        inbox = Inbox()
        loop.submit([5], SamplingParams(100, ignore_eos=True), reader=inbox)
        for i in range(3):  # others are served meanwhile
            [(ids, _, _)], _ = await ask(loop, [i], SamplingParams(8, ignore_eos=True))
            assert len(ids) == 8
        await asyncio.to_thread(until, lambda: not loop._answers)
        return await inbox.take()

    [expected] = Engine(tinypy.lm, CONFIG).generate([[5]], SamplingParams(100, ignore_eos=True))
    with EngineLoop(Engine(tinypy.lm, CONFIG)) as loop:
        [(index, delta)] = asyncio.run(slow(loop))
    assert (index, delta) == (0, Delta(expected.token_ids, expected.text, "length"))


def test_a_reader_with_news_is_told_the_end_alone(tinypy):
    told = {}

    class Told:
        def __init__(self, has_news):
            self.has_news, self.is_over = has_news, threading.Event()

        def put(self, found):
            told.setdefault(self.has_news, []).append(len(found.token_ids))
            if found.finish_reason is not None:
                self.is_over.set()

    with EngineLoop(Engine(tinypy.lm, CONFIG)) as loop:
        for has_news in (False, True):
            reader = Told(has_news)
            loop.submit([5], SamplingParams(6, ignore_eos=True), reader=reader)
            assert reader.is_over.wait(PATIENCE)
    assert told == {False: [1, 2, 3, 4, 5, 6], True: [6]}


def test_a_token_goes_to_another_process_with_what_is_known_of_it():
    token = Token(7)
    token.logprob, token.top = -0.5, [(7, -0.5)]
    [found] = pickle.loads(pickle.dumps([token]))
    assert (found, found.logprob, found.top) == (7, -0.5, [(7, -0.5)])


def test_what_comes_within_a_round_is_taken_together_and_the_ends_at_once(monkeypatch):
    """And for a round, the event loop is called once."""
    calls = []

    async def takes():
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda *args: (calls.append(args), call(*args))
        )
        rounds = Rounds(lambda: 3600.0)
        inboxes, found = [Inbox(rounds=rounds) for _ in range(2)], []
        for inbox in inboxes:
            for text in "ab":
                inbox.put(Delta([1], text, None))
            found.append(await inbox.take())  # the first does not wait
        for texts in ("cd", "ef"):
            for inbox, text in zip(inboxes, texts, strict=True):
                inbox.put(Delta([2], text, None))
        assert len(calls) == 2 + 1
        for inbox in inboxes:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(inbox.take(), 0.05)
        for inbox in inboxes:  # nor the end
            inbox.put(Delta([3], "z", "stop"))
            found.append(await inbox.take())
        inbox = Inbox(rounds=Rounds(lambda: 0.1))
        for text in "gh":
            inbox.put(Delta([4], text, None))
            found.append(await inbox.take())
        return [delta for [(_, delta)] in found]

    assert asyncio.run(takes()) == [
        *[Delta([1, 1], "ab", None)] * 2,
        Delta([2, 2, 3], "cez", "stop"), Delta([2, 2, 3], "dfz", "stop"),
        Delta([4], "g", None), Delta([4], "h", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "error", thorough_after(1, [RuntimeError("once"), KeyboardInterrupt(), SystemExit(1)])
)
def test_a_step_that_fails_once_is_not_noticed(tinypy, error):
    engine = careful_engine(tinypy.lm, CONFIG)
    [expected] = Engine(tinypy.lm, CONFIG).generate([[7, 8, 9]], SamplingParams(12))

    async def interrupted(loop):
        inbox = Inbox()
        engine.attention.interrupt(error, countdown=13)
        loop.submit([7, 8, 9], SamplingParams(12), reader=inbox)
        return await whole(inbox)

    with EngineLoop(engine) as loop:
        assert asyncio.run(interrupted(loop)) == samples_of(expected)
    assert engine.attention.error is None  # it was raised
    assert_empty(engine)


def test_an_engine_that_fails_again_and_again_ends_its_requests_and_goes_on(tinypy, caplog):
    engine = Engine(tinypy.lm, CONFIG)
    step, is_broken = engine.step, threading.Event()

    def breaks():
        if is_broken.is_set():
            raise ValueError("a secret of somebody's prompt")
        return step()

    async def everybody(loop):
        is_broken.set()
        inboxes = [Inbox() for _ in range(3)]
        for inbox in inboxes:
            loop.submit([1, 2], SamplingParams(20, ignore_eos=True), reader=inbox)
        for inbox in inboxes:
            with pytest.raises(RequestFailed, match=r"^the engine has failed: ValueError$"):
                while True:
                    await inbox.take()
        is_broken.clear()
        return await ask(loop, [1, 2], SamplingParams(3, ignore_eos=True))

    with EngineLoop(engine) as loop, caplog.at_level(logging.ERROR, "minikv"):
        engine.step = breaks
        [(ids, _, reason)], _ = asyncio.run(everybody(loop))
    assert len(ids) == 3 and reason == "length"
    assert "a step has failed" in caplog.text
    assert_empty(engine)


class Poison(RuntimeError):
    pass


def poisoned(choose, row_is_bad):
    """A sampler that fails for rows of some requests, as long as they are in the batch."""

    def sampler(logits, params, draws):
        if any(map(row_is_bad, params)):
            raise Poison("a secret of somebody's prompt")
        return choose(logits, params, draws)

    return sampler


@pytest.mark.parametrize("served_by", thorough_after(1, ["loop", "worker"]))
def test_a_request_that_fails_ends_alone(tinypy, served_by, caplog):
    """Its neighbours have the tokens that they have without it; a prompt of several chunks, too."""
    config = replace(CONFIG, max_batch_tokens=16)
    cases = [(list(range(5, 45)), SamplingParams(9, ignore_eos=True)), ([7], SamplingParams(6)),
             ([8, 9], SamplingParams(7, temperature=1, seed=3, n=2))]  # fmt: skip
    expected = Engine(tinypy.lm, config).generate(*zip(*cases, strict=True))
    bad = SamplingParams(20, cache_salt="bad")
    engine = Engine(tinypy.lm, config, sampler=poisoned(Sampler(), lambda one: one is bad))
    with caplog.at_level(logging.ERROR, "minikv"):
        if served_by == "worker":
            worker = EngineWorker(tinypy.lm, config, work_seconds=3600)
            worker.engine = engine
            worker.steps = Steps(engine, worker._fail)
            jobs = [WorkerJob(i, *one) for i, one in enumerate([*cases, ([6] * 20, bad)])]
            done = worker.work(jobs, [])
            found = [
                [(one.token_ids, one.text, one.finish_reason) for one in done.progress
                 if one.job_id == i] for i in range(3)
            ]  # fmt: skip
            [error] = [one.error for one in done.progress if one.job_id == 3]
            assert not worker.jobs and not engine.has_unfinished
        else:

            async def everybody(loop):
                others = [asyncio.create_task(ask(loop, *one)) for one in cases]
                inbox = Inbox()
                loop.submit([6] * 20, bad, reader=inbox)
                with pytest.raises(RequestFailed) as told:
                    await inbox.take()
                return [samples for samples, _ in await asyncio.gather(*others)], told.value

            with EngineLoop(engine) as loop:
                found, error = asyncio.run(everybody(loop))
    assert found == [samples_of(output) for output in expected]
    assert str(error) == "the engine has failed: Poison"
    assert "failed alone" in caplog.text
    assert_empty(engine)


def test_a_request_that_the_engine_cannot_take_ends_alone(tinypy):
    """Nor a prompt that cannot be scored."""

    def no_lists(sequence):
        return {}[sequence.token_ids[0]] if sequence.token_ids[0] == 6 else sequence.order

    async def everybody(loop):
        inbox = Inbox()
        loop.submit([6], SamplingParams(3), reader=inbox)
        with pytest.raises(RequestFailed, match="KeyError"):
            await inbox.take()
        return await ask(loop, [1, 2], SamplingParams(3, ignore_eos=True))

    with EngineLoop(Engine(tinypy.lm, CONFIG, policy=no_lists)) as loop:
        [(ids, _, reason)], _ = asyncio.run(everybody(loop))
    assert len(ids) == 3 and reason == "length"
    assert_empty(loop.engine)


@pytest.mark.thorough
def test_prompts_are_scored_between_the_steps_of_others(tinypy):
    """A piece at a time: nobody waits for all of them."""
    asked = Asked(1, logprobs=0, scores_prompt=True)
    lengths, moved = [], threading.Event()

    class Told:
        def put(self, found):
            lengths.append(len(loop._scoring))
            if found.finish_reason is not None:
                moved.set()

    with EngineLoop(Engine(tinypy.lm, replace(CONFIG, num_blocks=512))) as loop:
        held = threading.Event()
        loop._calls.put(held.wait)  # until all have asked
        scored = [threading.Event() for _ in range(5)]
        for event in scored:
            reader = SimpleNamespace(put=lambda found, event=event: event.set())
            loop.submit(list(range(2, 700)), asked, reader=reader)
        loop.submit([5], SamplingParams(8, ignore_eos=True), reader=Told())
        held.set()
        assert moved.wait(60) and all(event.wait(60) for event in scored)
    assert lengths == [5] * 5 + [4] * 3  # a prompt is six pieces


def test_closing_ends_what_is_under_way(tinypy):
    loop = EngineLoop(Engine(tinypy.lm, CONFIG))

    async def closed():
        inboxes = [Inbox() for _ in range(10)]
        for inbox in inboxes:
            loop.submit([3], SamplingParams(900, ignore_eos=True), reader=inbox)
        await inboxes[0].take()
        loop.close()
        for inbox in inboxes:
            with pytest.raises(RequestFailed, match="closed"):
                while True:
                    await inbox.take()
        with pytest.raises(RequestFailed, match="closed"):
            loop.submit([3], SamplingParams(2), reader=Inbox())

    asyncio.run(closed())
    assert loop.health()[0].pid is None
    assert_empty(loop.engine)


def test_a_reader_whose_event_loop_has_ended_disturbs_nobody(tinypy):
    async def gone(loop):
        loop.submit([3], SamplingParams(30, ignore_eos=True), reader=Inbox())

    async def here(loop):
        return await ask(loop, [3], SamplingParams(5, ignore_eos=True))

    with EngineLoop(Engine(tinypy.lm, CONFIG)) as loop:
        asyncio.run(gone(loop))
        [(ids, _, _)], _ = asyncio.run(here(loop))
        assert len(ids) == 5
