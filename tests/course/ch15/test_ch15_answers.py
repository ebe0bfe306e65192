"""Chapter 15: its references, its film, its picture, and its server."""

import asyncio
import json
import os
import random
from functools import partial
from threading import Event
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.request import Request, urlopen

import httpx
import pytest
from waiting import PATIENCE

from minikv.course.chapters.ch15_serving import given
from minikv.course.chapters.ch15_serving.answers import (
    Front,
    Inbox,
    TextStream,
    hit_rate,
    on_paper,
    quantile,
)
from minikv.course.chapters.ch15_serving.given import (
    Answered,
    Trial,
    at_once,
    buckets,
    dollars,
    leaving,
    lookups,
    offer,
    readers,
    server,
)
from minikv.course.chapters.ch15_serving.pictures import box_picture, load_picture
from minikv.course.exercise_data.skeletons import broken
from minikv.outputs import visible_text
from minikv.serving import EngineLoop
from minikv.serving.admission import Admission

INF = float("inf")


def test_the_docstrings_examples():
    stop = ("END", "class")
    assert [visible_text(one, stop, False) for one in ("a E", "a cla", "a END b")] == ["a "] * 3
    stream = TextStream(lambda ids: bytes(ids).decode("utf-8", "replace"), [0xC3])
    assert stream.add([0xA9], False) == "é"
    assert quantile((1.0, 2.0, INF), (0, 0, 0), (2, 6, 6), 0.5) == 1.25
    assert quantile((0.1, 0.25, 0.5, INF), (2, 2, 3, 3), (4, 8, 11, 11), 0.5) == 0.175


def test_who_is_let_in_has_its_first_token_in_time():
    """At a rate that does not change."""
    rng = random.Random(2)
    for _ in range(300):
        admission, rate = Admission(target=2.0), 100.0
        assert admission.enter("first", 100, 0.0) == 0
        admission.first_token("first", 1.0)
        done = 0.0  # when all that was let in is computed
        for name in map(str, range(12)):
            tokens = rng.randrange(1, 190)
            was_empty = admission.queued == 0
            retry = admission.enter(name, tokens, 0.0)
            if retry == 0:
                done += tokens / rate
                assert done <= 2.0 + 1e-9 or was_empty
            else:
                left = max(0.0, done - retry)  # what is still queued when it comes again
                assert left == 0 or left + tokens / rate <= 2.0 + 1e-9


def test_the_paper_server_by_simulating_it():
    """Ten seats; a request every 50 ms; each answer takes 50 steps of 16 ms."""
    free, waited = [0.0] * 10, 0.0
    for number in range(20 * 60):
        came, at = number / 20, free.index(min(free))
        waited = max(0.0, free[at] - came)
        free[at] = max(free[at], came) + 50 * 0.016
    assert waited == pytest.approx(on_paper()["wait"], rel=0.05)


def test_a_client_that_has_left_costs_nothing(lm):
    history, for_nobody = leaving(lm, Front)
    words = [step.words for step in history.steps]
    gone = words.index("A's client is gone")
    assert for_nobody == 0 and "A" not in history.steps[gone].tables
    assert history.steps[gone].num_free > history.steps[gone - 1].num_free
    late, for_nobody = leaving(lm, broken("15.3"))
    assert for_nobody == 24 - 4
    assert late.steps[gone].num_free == late.steps[gone - 1].num_free


def test_readers_of_any_speed_get_the_oracles_tokens(lm, monkeypatch):
    both, is_second, submit = Event(), iter([False, True]), given.EngineLoop.submit

    def together(loop, prompt, params, reader):
        """Neither is served before both have asked."""
        loop._calls.put(partial(both.wait, PATIENCE))
        submit(loop, prompt, params, reader=reader)
        if next(is_second):
            both.set()

    monkeypatch.setattr(given.EngineLoop, "submit", together)
    found = asyncio.run(readers(lm, Inbox, [0.0, 0.1], max_tokens=20))
    assert [sum(sizes) for sizes, _ in found] == [20, 20]
    assert len(found[1][0]) <= len(found[0][0]) and all(each > 0 for _, each in found)


def test_the_picture_of_two_threads_is_what_an_inbox_does():
    async def play(takes: tuple[int, ...]) -> list[str]:
        inbox, told = Inbox(), []
        for step in range(1, 7):
            was_waking, so_far = inbox.is_waking, [0] * step
            inbox.put(SimpleNamespace(token_ids=so_far, text="", finish_reason=None))
            told.append("" if was_waking else "wakes")
            if step in takes:
                told.append(f"takes {len(inbox.collect().token_ids)} new")
        return told

    for takes in ((1, 4, 6), (2, 3)):
        lines = box_picture(6, takes).alt.split(". ")[1].split("; ")
        expected = asyncio.run(play(takes))
        assert len(lines) == len(expected)
        for line, one in zip(lines, expected, strict=True):
            assert one in line if one else "wakes" not in line


@pytest.mark.thorough
def test_own_blocks_are_found_after_a_preemption(lm):
    found = lookups(lm)  # compares itself with the engine's counters
    assert any(one.num_preemptions for one in found)
    everything = sum(one.num_found for one in found) / sum(one.num_tokens for one in found)
    assert everything > 0.1 and hit_rate(found) == 0.0


def test_the_server_ends_at_its_deadline(lm, monkeypatch):
    """It comes when the test says so."""
    timers = []
    monkeypatch.setattr(given, "Timer", lambda *told: timers.append(told) or Mock())
    body = {"prompt": "def f(", "max_tokens": 4}
    with server(lm, seconds=2.0, attention="torch") as (url, _):

        def ask() -> dict:
            request = Request(f"{url}/completions", json.dumps(body).encode(), method="POST")
            with urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)

        assert ask()["usage"]["completion_tokens"] == 4
        with urlopen(url.removesuffix("/v1") + "/metrics", timeout=PATIENCE) as answer:
            bounds, counts = buckets(answer.read().decode(), "time_to_first_token_seconds")
        assert bounds[-1] == INF and counts[-1] == 1 and bounds == sorted(bounds)
        [(seconds, at_the_end)] = timers
        assert seconds == 2.0
        at_the_end()
        with pytest.raises(OSError, match="500"):
            ask()


def test_no_proxy_stands_between_a_client_and_the_server(lm, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("no_proxy", "elsewhere")
    with server(lm) as (url, _):
        assert httpx.get(f"{url}/models", timeout=PATIENCE).status_code == 200
        with urlopen(f"{url}/models", timeout=PATIENCE) as answer:
            assert answer.status == 200
    assert os.environ["no_proxy"] == "elsewhere"


def test_a_bill():
    usage = {
        "prompt_tokens": 1000, "completion_tokens": 100,
        "prompt_tokens_details": {"cached_tokens": 600},
    }  # fmt: skip
    assert dollars([usage, usage], 2.0, 1.0, 10.0) == pytest.approx(
        2 * (400 * 2 + 600 + 1000) / 1e6
    )


@pytest.mark.thorough
def test_load_is_offered_counted_and_drawn(lm):
    async def run() -> tuple[float, Trial, Trial]:
        from minikv import Engine, EngineConfig

        with EngineLoop(Engine(lm, EngineConfig(64, prefix_cache=False))) as loop:
            full = await at_once(loop, 2, num_prompt=20, num_new=4)
            slow = Answered(INF, INF)
            all_in = await offer(loop, 10.0, 0.5, slow, num_prompt=20, num_new=4)
            limit = Admission(0.0)
            limit.measured.append((100, 1.0))
            return full, all_in, await offer(loop, 60.0, 0.5, slow, limit, 20, 4)

    full, all_in, limited = asyncio.run(run())
    assert full > 0 and all_in.refused == 0
    assert all_in.good == all_in.finished <= all_in.offered
    assert 0 < limited.finished + limited.refused <= limited.offered
    picture = load_picture({"all": [all_in], "limit": [limited]})
    assert "in time" in picture.alt
