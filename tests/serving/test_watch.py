"""Views of an engine: they disturb nobody, cost nothing if there are none, and tell no secrets."""

import asyncio
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import httpx
import pytest
from serving_case import CONFIG, KEY, OneEngine, server, whole
from waiting import PATIENCE, until

from minikv import Engine, SamplingParams
from minikv.serving import EngineLoop, Inbox, app as app_module
from minikv.serving.watch import View


def three_hold_blocks(picture):
    return [bool(one.block_ids) for one in picture.held] == 3 * [True]


def test_every_step_is_told_and_pictures_are_whole(tinypy):
    """Each picture's blocks are those that the pool says are in use."""
    by = OneEngine(tinypy.lm)

    async def watched(loop):
        view, found = View(clock=itertools.count().__next__), []  # each step has its picture
        steps, some = itertools.count(1), threading.Event()

        async def look():
            while (one := await view.take()) is not None:
                found.append(one)
                await asyncio.to_thread(some.wait, PATIENCE)

        def show(engine, requests):
            """The reader is some steps late, and sees all three at work before one of them ends."""
            View.show(view, engine, requests)
            if three_hold_blocks(view._picture) and next(steps) == 3:
                some.set()
                until(lambda: any(three_hold_blocks(picture) for picture, _ in found))

        view.show = show
        loop.watch(view)
        looking = asyncio.create_task(look())
        await asyncio.to_thread(until, lambda: found)  # it is seen before the first step
        before = by.engine.stats().steps
        params = SamplingParams(40, ignore_eos=True, n=2, temperature=1.0)
        inboxes = [Inbox() for _ in range(3)]
        by.open.clear()  # no step ends before all three are asked for
        for inbox in inboxes:
            loop.submit(list(range(1, 40)), params, reader=inbox)
        by.open.set()
        await asyncio.gather(*(whole(inbox, 2) for inbox in inboxes))
        loop.unwatch(view)  # after the last step, as all that is asked for
        await asyncio.to_thread(until, lambda: not loop._watchers and not view._steps)
        view.end()
        await looking
        return found, by.engine.stats().steps - before

    with by.target as loop:
        found, num_steps = asyncio.run(watched(loop))
    steps = [step for _, some in found for step in some]
    assert len(steps) == num_steps and sum(generated for _, generated in steps) == 3 * 2 * 40
    assert any(three_hold_blocks(picture) for picture, _ in found)
    for picture, _ in found:
        held = {block_id for one in picture.held for block_id in one.block_ids}
        cached = {block_id for one in picture.cached for block_id in one.block_ids}
        assert len(held | cached) == picture.stats.blocks_used
        assert len(cached) == picture.stats.blocks_cached
        names = {one.block_ids[0] for one in picture.cached}
        assert all(one.parent is None or one.parent in names for one in picture.cached)


def test_nobody_is_disturbed_by_a_watcher_that_fails(tinypy, caplog):
    class Broken:
        pace = 0.0

        def show(self, engine, requests):
            raise RuntimeError("x")

    async def answer(loop):
        loop.submit([5], SamplingParams(9), reader=(inbox := Inbox()))
        return await whole(inbox)

    engine = Engine(tinypy.lm, CONFIG)
    [expected] = Engine(tinypy.lm, CONFIG).generate([[5]], SamplingParams(9))
    with EngineLoop(engine) as loop:
        loop.watch(Broken())
        [(ids, _, _)] = asyncio.run(answer(loop))
        assert ids == expected.token_ids
        assert not loop._watchers and "a watcher has failed" in caplog.text


def first_event(url, key=KEY, **params):
    head = {"Authorization": f"Bearer {key}"} if key else {}
    options = {"params": params, "headers": head, "timeout": PATIENCE}
    with httpx.stream("GET", f"{url}/events", **options) as found:
        assert found.status_code == 200, found.read()
        for line in found.iter_lines():
            if line.startswith("data: "):
                return json.loads(line[6:])


def test_a_view_ends_when_its_page_is_closed_and_with_the_server(tinypy, monkeypatch):
    monkeypatch.setattr(app_module, "MAX_VIEWS", 2)
    head = {"Authorization": f"Bearer {KEY}"}

    def stay(url):
        stream = httpx.stream("GET", f"{url}/events", headers=head, timeout=PATIENCE)
        with suppress(httpx.RemoteProtocolError), stream as found:  # it was cut off
            for _ in found.iter_lines():
                pass

    with ThreadPoolExecutor() as threads, ExitStack() as stack:
        patient = {"drain": 2 * PATIENCE}  # with all others
        at = stack.enter_context(server(tinypy.lm, connections=patient))
        loop = at.by.target
        assert first_event(at.url)["blocks"] == CONFIG.num_blocks
        until(lambda: not loop._watchers)
        staying = [threads.submit(stay, at.url) for _ in range(2)]
        until(lambda: len(loop._watchers) == 2)
        assert at.ask("/events").status_code == 503
        staying.append(threads.submit(stack.close))
        for one in staying:
            one.result(PATIENCE)


def test_texts_are_told_to_those_who_sent_them(tinypy):
    with server(tinypy.lm, keys=("ann", "bob")) as at:
        for key in ("ann", "bob"):
            body = {"prompt": f"# {key}'s own\n" + "import os\n" * 9, "max_tokens": 1}
            assert at.ask(body=body, key=key).status_code == 200
        for key, other in (("ann", "bob"), ("bob", "ann")):
            tree = first_event(at.url, key)["tree"]
            texts = [node["text"] for node in tree]
            assert len(texts) == 2 and None in texts
            assert f"{key}'s own" in str(texts) and other not in json.dumps(tree)
        assert at.ask("/events", key="").status_code == 401


@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_a_pace_is_for_servers_without_keys(tinypy, keys):
    with server(tinypy.lm, keys=keys) as at:
        loop = at.by.target
        head = {"Authorization": f"Bearer {KEY}"}
        with httpx.stream("GET", f"{at.url}/events?pace=9", headers=head, timeout=PATIENCE):
            until(lambda: loop._watchers)
            [view] = loop._watchers
            assert view.pace == (0.0 if keys else app_module.MAX_PACE)
        for wrong in ("fast", "nan", ""):
            found = at.ask(f"/events?pace={wrong}")
            assert found.status_code == 400 and "pace" in found.json()["error"]["message"]


def test_the_page_needs_no_key_and_loads_nothing_from_elsewhere(tinypy):
    with server(tinypy.lm) as at:
        for path in app_module.PAGE:
            found = at.ask(path, key="")
            assert found.status_code == 200 and "default-src 'self'" in str(found.headers)
            assert "://" not in found.text and "tinypy" not in found.text
        assert at.ask("/page.py", key="").status_code == 401
