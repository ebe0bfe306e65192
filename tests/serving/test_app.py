"""Clients without manners: bad requests, slow readers, leavers. And health, metrics, strangers."""

import asyncio
import gc
import json
import logging
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from select import select
from types import SimpleNamespace

import httpx
import psutil
import pytest
from bad_requests import FIELDS, attack
from helpers import assert_empty, fearless
from pydantic import ValidationError
from serving_case import CONFIG, KEY, Cluster, OneEngine, metrics_of, samples, server
from starlette.requests import Request
from thorough import thorough_after
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from waiting import PATIENCE, until

from minikv import Engine, EngineConfig, LanguageModel, SamplingParams
from minikv.outputs import Delta
from minikv.serving import Busy, Inbox, app as app_module, server as server_module
from minikv.serving.admission import Admission, Room
from minikv.serving.app import Api, ClientLeft, Work
from minikv.serving.block_life import BlockLife
from minikv.serving.metrics import Metrics
from minikv.serving.requests import HINTS, NEUTRAL, ChatRequest, CompletionRequest
from minikv.serving.server import served

LONG = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}


def events(text):
    """Of a stream's body, without the last."""
    *found, done = [line[6:] for line in text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(one) for one in found]


@pytest.fixture(params=thorough_after(1, ["engine", "cluster"]))
def by_kind(request):
    """What is served, of a model."""
    return OneEngine if request.param == "engine" else Cluster


@pytest.fixture
def by(by_kind, tinypy):
    """What is served."""
    return by_kind(tinypy.lm)


@pytest.mark.usual(by_kind="engine", stop=[" = ", "=="])
@pytest.mark.parametrize("stop", thorough_after(1, [[" = ", "=="], ["\n    "], ["\n"], ["zzzz"]]))
def test_no_part_of_a_stop_string_is_sent(tinypy, by, stop):
    """Every prefix that a client has seen begins the whole text, which has no stop string."""
    params = SamplingParams(60, temperature=1, seed=2, stop=tuple(stop))
    [expected] = Engine(tinypy.lm, CONFIG).generate(["def f("], params)
    with server(tinypy.lm, served_by=by) as at:
        body = {"prompt": "def f(", "max_tokens": 60, "temperature": 1, "seed": 2, "stop": stop}
        found = at.ask(body=body | {"stream": True})
        assert found.headers["Content-Type"].split(";")[0] == "text/event-stream"
        texts = [one["choices"][0]["text"] for one in events(found.text)]
        whole = at.ask(body=body).json()["choices"][0]["text"]
    assert "".join(texts) == whole == expected.text
    assert not any(one in whole for one in stop)


@pytest.mark.parametrize("stream", thorough_after(1, [True, False]))
def test_a_stop_string_that_is_a_special_token_stops(tinypy, stream):
    """No text has it."""
    data = json.loads(tinypy.lm.tokenizer.to_str())
    [plain] = Engine(tinypy.lm, CONFIG).generate(["def f("], SamplingParams(9, ignore_eos=True))
    third = plain.token_ids[2]
    assert third not in plain.token_ids[:2]
    added = {"id": third, "special": True, "normalized": False, "single_word": False,
             "lstrip": False, "rstrip": False}  # fmt: skip
    content = tinypy.lm.tokenizer.id_to_token(third)
    data["added_tokens"].append(added | {"content": content})
    lm = LanguageModel("x", tinypy.lm.transformer, Tokenizer.from_str(json.dumps(data)))
    with server(lm) as at:
        body = {"prompt": [*tinypy.lm.encode("def f(")], "max_tokens": 9, "stream": stream}
        found = at.ask(body=body | {"stop": [content, "zzz"], "ignore_eos": True})
        told = events(found.text) if stream else [found.json()]
    choices = [one["choices"][0] for one in told]
    assert choices[-1]["finish_reason"] == "stop"
    ids = [token_id for one in choices for token_id in one["token_ids"]]
    assert ids == plain.token_ids[:3]


def test_no_character_is_split(tinypy, by):
    """Tokens of drawn bytes, many of them parts of a character: no piece changes what was sent."""
    params = SamplingParams(30, temperature=3.0, seed=1, ignore_eos=True)
    prompt = list("é😀".encode())
    [expected] = Engine(tinypy.lm, CONFIG).generate([prompt], params)
    assert "\ufffd" in expected.text or any(ord(one) > 127 for one in expected.text)
    with server(tinypy.lm, served_by=by) as at:
        body = {"prompt": prompt, "max_tokens": 30, "temperature": 3.0, "seed": 1}
        found = events(at.ask(body=body | {"ignore_eos": True, "stream": True}).text)
    assert "".join(one["choices"][0]["text"] for one in found) == expected.text


def test_fields_that_ask_for_what_is_done_anyway_are_taken(tinypy):
    with server(tinypy.lm) as at:
        body = {"prompt": "def f(", "max_tokens": 2}
        plain = at.ask(body=body).json()["choices"]
        neutral = {name: values[0] for name, values in NEUTRAL.items()}
        found = at.ask(body=body | neutral | dict.fromkeys(HINTS, "x") | {"unknown": None})
        assert found.status_code == 200 and found.json()["choices"] == plain
        for name in NEUTRAL:
            found = at.ask(body=body | {name: "something else"})
            assert found.status_code == 400
            assert f"{name}: is not supported" in found.json()["error"]["message"]


@pytest.mark.usual(by_kind="engine", body=b"no json")
@pytest.mark.parametrize(
    ("body", "status", "says"),
    thorough_after(4, [
        (b"no json", 400, "Expecting value"),
        (b'{"prompt": "a\\ud800"}', 400, r"prompt: character \d is '\\ud"),
        (b'{"prompt": "' + b"x" * 2**20 + b'"}', 413, "1048576 bytes"),
        (b'{"prompt": "' + b"x " * 5000 + b'"}', 400, "context is 1024"),
        (b"[]", 400, "object"),
        (b"[" * 100_000, 400, "recursion"),
        (b"{}", 400, "prompt: is missing"),
        (b'{"prompt": "x", "stream": "yes"}', 400, "stream"),
        (b'{"prompt": "x", "stop": {"a": 1}}', 400, "stop: must be"),
        (b'{"prompt": "x", "stop": "\\udfff"}', 400, r"stop: character \d is '\\ud"),
    ]),
)  # fmt: skip
def test_a_wrong_request_is_refused(tinypy, by, body, status, says):
    with server(tinypy.lm, served_by=by) as at:
        found = at.ask(method="POST", content=body)
        error = found.json()["error"]
        assert found.status_code == status and re.search(says, error["message"])
        assert error["type"] == "invalid_request_error" and {"param", "code"} <= error.keys()
        assert by.is_idle()
        assert at.ask("/nowhere").status_code == at.ask("/nowhere", {}).status_code == 404
        assert at.ask("/v1/completions").status_code == 405


@pytest.mark.parametrize("num_named", thorough_after(1, [290, 310]))
def test_a_bias_is_for_tokens_that_the_model_has(llama, by_kind, num_named):
    """Its tokenizer may have more tokens, or fewer: then rows of the model were filled up."""
    words = {f"w{i}": i for i in range(num_named)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    lm = LanguageModel("it", llama.lm.transformer, tokenizer)
    assert lm.config.vocab_size == 300
    with server(lm, served_by=by_kind(lm)) as at:
        body = {"prompt": [1, 2, 3], "max_tokens": 1, "model": "tinypy"}
        found = at.ask(body=body | {"logit_bias": {"299": 100}}).json()
        assert found["choices"][0]["token_ids"] == [299]
        for token_id in (300, 305):
            found = at.ask(body=body | {"logit_bias": {str(token_id): 100}})
            assert found.status_code == 400
            assert f"{token_id} is no token id; there are 300" in found.json()["error"]["message"]


@pytest.mark.usual(by_kind="engine", key="")
@pytest.mark.parametrize(
    "key", thorough_after(3, ["", "Bearer é", "{}", "Bearer", "Bearer wrong", "Basic {}"])
)
def test_without_a_key_nothing_is_told(tinypy, by, key):
    with server(tinypy.lm, served_by=by) as at:
        shown = {"Authorization": key.format(KEY).encode()} if key else {}
        computed = by.engine.stats().computed_tokens
        for path, method in [
            ("/v1/completions", "POST"), ("/v1/models", "GET"), ("/x", "GET"), ("/metrics", "GET"),
        ]:  # fmt: skip
            found = at.ask(path, {"prompt": "x"}, None, method, headers=shown)
            assert found.status_code == 401 and found.headers["WWW-Authenticate"] == "Bearer"
            assert KEY not in found.text and "tinypy" not in found.text
        assert by.engine.stats().computed_tokens == computed
        found = at.ask("/health", key=None, headers=shown)  # a load balancer's
        assert (found.status_code, found.text) == (200, "{}")


def test_prefixes_are_shared_within_a_key_and_a_salt_alone(tinypy, by):
    """Whatever a client says of its salt, it never meets another key's prefixes."""
    with server(tinypy.lm, served_by=by, keys=("ann", "bob")) as at:

        def cached(key, **more):
            body = {"prompt": "import os\n" * 20, "max_tokens": 1, **more}
            usage = at.ask(body=body, key=key).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert cached("ann") == 0 and cached("ann") > 0
        [ours] = [salt for salt in by.engine.cache._roots if salt is not None]
        assert cached("bob") == cached("bob", cache_salt=ours) == 0
        assert cached("bob") > 0
        assert cached("ann", cache_salt="x") == 0 and cached("ann", cache_salt="x") > 0
        assert cached("bob", cache_salt="x") == cached("ann", cache_salt="") == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", thorough_after(1, ["/v1/completions", "/v1/chat/completions"]))
def test_a_client_that_leaves_frees_its_blocks(tinypy, by, stream, path):
    with server(tinypy.lm, served_by=by) as at:
        body = {**LONG, "messages": [{"role": "user", "content": "x"}], "stream": stream}
        del body["messages" if path == "/v1/completions" else "prompt"]
        data = json.dumps(body).encode()
        with socket.create_connection(at.address) as client:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

            def is_being_answered():
                """A refusal would come at once, and nothing after it."""
                if select([client], [], [], 0)[0]:
                    said = client.recv(999, socket.MSG_PEEK)
                    assert said.startswith(b"HTTP/1.1 200"), said
                return by.engine.stats().generated_tokens > 5

            until(is_being_answered)
            by.open.clear()
        # The server has noticed, though a step hangs; or it was quicker.
        until(by.has_dropped)
        generated = by.engine.stats().generated_tokens
        by.open.set()
        until(by.is_idle)
        assert by.engine.stats().generated_tokens <= generated + 1
    assert_empty(by.engine)


@pytest.mark.parametrize("count", thorough_after(1, [60, 200]))
def test_clients_that_leave_at_random_moments_leave_no_trace(tinypy, by, capfd, count):
    """Before, while and after they ask; with a reset, so that writing fails."""
    rng = random.Random(0)
    body = json.dumps({"prompt": "x", "max_tokens": 40, "stream": True}).encode()
    with server(tinypy.lm, served_by=by) as at:
        for i in range(count):
            data = body if i % 2 else body.replace(b"true", b"false")
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
            head += b"Authorization: Bearer %s\r\n" % KEY.encode()
            data = head + b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
            with socket.create_connection(at.address) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(data[: rng.randint(0, len(data)) if i % 3 == 0 else len(data)])
                time.sleep(rng.random() / 50)
        # Some of them may have to be taken yet: it is full, as it says, and asked again.
        until(lambda: at.ask(body={"prompt": "x", "max_tokens": 2}).status_code == 200)
        until(by.is_idle)
    assert_empty(by.engine)
    assert "Traceback" not in capfd.readouterr().err


def test_every_field_of_a_request_is_sent_wrong_values():
    """By the next test: a new field is one of its `FIELDS`."""
    assert CompletionRequest.model_fields.keys() == FIELDS.keys()


def test_five_hundred_bad_requests_have_five_hundred_answers(tinypy, by, capfd):
    with server(tinypy.lm, served_by=by) as at:
        found = attack(at.address, KEY, 500)
        until(by.is_idle)
        assert at.ask(body={"prompt": "x", "max_tokens": 2}).json()["choices"]
    assert_empty(by.engine)
    assert len(found) == 500
    statuses = Counter(status for _, status, _ in found)
    assert not [one for one in found if one[1] >= 500], statuses
    assert statuses[400] > 200 and statuses[200] > 20 and statuses[401] > 20
    refused = [
        json.loads(body)["error"]["message"]
        for _, status, body in found
        if status == 400 and body[:1] == b"{"
    ]
    assert refused and all(refused)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("num_slow", thorough_after(0, (50, 200)))
def test_idle_and_slow_clients_keep_nobody_waiting(tinypy, by, num_slow, capfd):
    """300 that ask for nothing, and some that do not read what they asked for."""
    if isinstance(by, Cluster):
        by.target.max_requests = 2 * num_slow  # it would refuse the 65th
    with server(tinypy.lm, served_by=by) as at:
        assert at.ask(body={"prompt": "x", "max_tokens": 2}).status_code == 200
        before, memory = threading.active_count(), psutil.Process().memory_info().rss
        idle = [socket.create_connection(at.address) for _ in range(300)]
        slow, data = [], json.dumps({**LONG, "max_tokens": 60, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        for _ in range(num_slow):
            slow.append(socket.create_connection(at.address))
            slow[-1].sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        for _ in range(3):
            assert at.ask(body={"prompt": "x", "max_tokens": 2}).status_code == 200
        assert threading.active_count() - before <= 1
        until(by.is_idle)  # those that do not read are computed, and hold no blocks
        assert psutil.Process().memory_info().rss - memory < 2**25
        for one in idle + slow:
            one.close()
    assert_empty(by.engine)
    assert "Traceback" not in capfd.readouterr().err


CHUNKED = b"Host: x\r\nTransfer-Encoding: chunked\r\n"
GET, ENDS = b"GET /health HTTP/1.1\r\nHost: x\r\n", b"\r\n"
WITH_KEY = f"POST /tokenize HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\n".encode() + CHUNKED + ENDS
PIECE = b"1\r\nx\r\n"
UNENDING = {  # what a client sends first, what it then sends again and again, the first answer
    "nothing": (b"", b"", b""),
    "a head": (b"GET /health HTTP/1.1\r\nX: ", b"x", b""),
    "a head behind an answer": (GET + ENDS + GET + b"X: ", b"x", b"200"),
    "empty lines behind an answer": (GET + ENDS, ENDS, b"200"),
    "a body": (WITH_KEY, PIECE, b"408"),
    "part of a body": (WITH_KEY + PIECE, b"", b"408"),
    "trailers": (WITH_KEY + b"0\r\nX: ", b"x", b"408"),
    "an extension of a chunk": (WITH_KEY + b"1;", b"x", b"408"),
    "a body that nobody wants": (b"GET / HTTP/1.1\r\n" + CHUNKED + ENDS, PIECE, b"200"),
    "a body without a key": (b"POST /tokenize HTTP/1.1\r\n" + CHUNKED + ENDS, PIECE, b"401"),
    "a body for events": (
        f"GET /events HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\n".encode() + CHUNKED + ENDS,
        PIECE, b"200",
    ),
}  # fmt: skip


def until_closed(client, piece):
    """Sends a piece again and again until the server ends the connection; what it has answered."""
    answer = b""
    client.settimeout(0.02)
    with suppress(ConnectionError):
        for _ in range(1000):
            with suppress(TimeoutError):  # while the server does not read
                client.sendall(piece)
            with suppress(TimeoutError):
                if not (found := client.recv(2**16)):
                    return answer
                answer += found
        raise AssertionError(f"still open: {answer}")
    return answer


@pytest.mark.parametrize("name", thorough_after(2, UNENDING))
def test_who_never_asks_or_never_ends_asking_is_cut_off(tinypy, name):
    """However slowly it sends, and whether or not it has an answer already."""
    first, again, status = UNENDING[name]
    with server(tinypy.lm, connections={"silence": 0.3}) as at:

        def is_cut_off():
            with socket.create_connection(at.address, timeout=PATIENCE) as client:
                with suppress(ConnectionError):
                    client.sendall(first)
                answer = until_closed(client, again)
            return answer.split(b" ", 2)[1:2] == ([status] if status else [])

        def is_served():
            with suppress(httpx.TransportError):
                return at.ask(body={"prompt": "x", "max_tokens": 2}).status_code == 200

        until(is_cut_off)  # not at once where this thread comes too late itself
        until(is_served)


def test_who_sends_much_more_behind_an_answer_is_cut_off(tinypy):
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    with server(tinypy.lm, connections={"silence": 3600}) as at:
        for size in (2**19, 2**23):
            with socket.create_connection(at.address, timeout=PATIENCE) as client:
                client.sendall(head % size)
                assert client.recv(2**16).startswith(b"HTTP/1.1 401")
                if size == 2**23:
                    assert b"HTTP" not in until_closed(client, b"x" * 2**16)
                else:  # what clients that did not expect a refusal send is read
                    client.sendall(b"x" * size + GET + ENDS)
                    answers = b""  # the first one's text may still come
                    while b"HTTP/1.1 200" not in answers:
                        answers += (piece := client.recv(2**16))
                        assert piece, answers


def test_too_many_requests_ahead_of_an_answer_end_a_connection(tinypy):
    with server(tinypy.lm, connections={"silence": 3600}) as at:
        with socket.create_connection(at.address, timeout=PATIENCE) as client:
            client.sendall((GET + ENDS) * 50)
            answer = b""
            while answer.count(b"HTTP/1.1 200") < 50:
                answer += client.recv(2**16)
        with socket.create_connection(at.address, timeout=PATIENCE) as client:
            until_closed(client, (GET + ENDS) * 1000)


@pytest.mark.thorough
def test_of_too_many_connections_the_one_goes_that_has_waited_the_longest(tinypy):
    """And none that waits for its answer."""
    by = OneEngine(tinypy.lm)
    with (
        server(tinypy.lm, served_by=by, connections={"silence": 3600, "most": 6}) as at,
        ThreadPoolExecutor() as threads,
    ):
        by.open.clear()
        asked = {"prompt": "x", "max_tokens": 3}
        waiting = threads.submit(at.ask, body=asked)
        until(by.is_stepping)
        idle = [socket.create_connection(at.address, timeout=PATIENCE) for _ in range(5)]
        assert at.ask("/health").status_code == 200
        with suppress(ConnectionError):
            assert idle[0].recv(1) == b""
        by.open.set()
        assert waiting.result().status_code == 200
        for one in idle:
            one.close()


@pytest.mark.parametrize("stream", thorough_after(1, [True, False]))
def test_a_client_of_http_1_0_is_sent_no_chunks(tinypy, stream):
    """An answer whose length is not known ends with the connection."""
    asked = {"prompt": "def f(", "max_tokens": 5}
    body = json.dumps(asked | {"stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nAuthorization: Bearer {KEY}\r\n"
    with server(tinypy.lm) as at, socket.create_connection(at.address, timeout=PATIENCE) as client:
        whole = at.ask(body=asked).json()["choices"][0]["text"]
        client.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        found = b""
        while piece := client.recv(2**16):
            found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower() and head.startswith(b"HTTP/1.1 200")
    told = events(body.decode()) if stream else [json.loads(body)]
    assert "".join(one["choices"][0]["text"] for one in told) == whole


def test_a_head_without_end_is_refused(tinypy):
    """And several of some length, on one connection, are not."""
    with server(tinypy.lm) as at:
        for _ in range(3):
            assert at.ask("/health", key="x" * 30_000).status_code == 200
        with socket.create_connection(at.address, timeout=PATIENCE) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nX: ")
            with suppress(ConnectionError):  # that is not read
                for _ in range(1000):
                    client.sendall(b"x" * 2**16)
            assert client.recv(100).startswith(b"HTTP/1.1 400")


def test_the_last_events_and_the_end_of_an_answer_are_one_piece():
    """Each piece is a call of the operating system, and wakes the client."""
    sent, left = [], [b"a", b"b"]

    async def send(message):
        sent.append(message)

    async def events():
        while left:
            yield left.pop(0)

    asyncio.run(app_module.Events(events(), lambda: not left)({}, None, send))
    assert [(one["body"], one["more_body"]) for one in sent[1:]] == [(b"a", True), (b"b", False)]


def test_a_request_that_fails_has_the_status_500_or_an_event(tinypy, caplog):
    """Before the first token, and after it. The text of the error is not told to clients."""
    engine = Engine(tinypy.lm, CONFIG)
    with server(tinypy.lm, keys=(), served_by=OneEngine(tinypy.lm, engine)) as at:
        step, steps_left, has_status = engine.step, [0], threading.Event()
        has_status.set()

        def breaks():
            steps_left[0] -= 1
            if steps_left[0] < 0:
                assert has_status.wait(PATIENCE)
                raise ValueError("somebody's secret")
            return step()

        engine.step = breaks
        found = at.ask(body=LONG | {"stream": True})
        assert found.status_code == 500 and found.json()["error"]["type"] == "server_error"
        steps_left[0] = 4
        has_status.clear()
        url, body = f"{at.url}/v1/completions", LONG | {"stream": True}
        with httpx.stream("POST", url, json=body, timeout=PATIENCE) as found:
            has_status.set()
            found.read()
        assert found.status_code == 200
        *_, last = [json.loads(one[6:]) for one in found.text.split("\n\n") if one]
        assert "failed: ValueError" in last["error"]["message"] and "[DONE]" not in found.text
        steps_left[0] = 4
        assert at.ask(body=LONG).status_code == 500
        assert "secret" not in found.text
        engine.step = step
        assert at.ask(body={"prompt": "x", "max_tokens": 2}).status_code == 200
    assert_empty(engine)


def test_a_fault_of_the_server_leaves_its_trace_in_the_log(tinypy, caplog, monkeypatch):
    """Also one that comes when a part of the answer has been sent."""
    with server(tinypy.lm) as at, caplog.at_level(logging.ERROR, "minikv"):
        chunk, calls = app_module.Completion.chunk, []

        def breaks(*arguments, **options):
            calls.append(1)
            return chunk(*arguments, **options) if len(calls) < 3 else {}[7]

        monkeypatch.setattr(app_module.Completion, "chunk", breaks)
        with pytest.raises(httpx.RemoteProtocolError):
            at.ask(body=LONG | {"stream": True})
        assert "POST '/v1/completions' has failed" in caplog.text and "KeyError: 7" in caplog.text
        caplog.clear()
        monkeypatch.setattr(at.by.target, "tokenizer", None)
        found = at.ask("/tokenize", {"prompt": "secret"})
        assert found.status_code == 500 and "AttributeError" in found.text
        assert "POST '/tokenize' has failed" in caplog.text and "Traceback" in caplog.text


def test_health_tells_an_engine_that_hangs(tinypy, by):
    with server(tinypy.lm, served_by=by) as at, ThreadPoolExecutor() as threads:
        assert at.ask("/health").status_code == 200
        at.ask(body={"prompt": "x", "max_tokens": 3, "ignore_eos": True})
        found = at.ask("/health")
        assert found.status_code == 200
        assert found.json()["workers"][0]["stats"]["generated_tokens"] == 2 + 3
        until(lambda: not by.is_stepping())  # an answer is sent before its step has ended
        by.open.clear()
        waiting = threads.submit(at.ask, body={"prompt": "x"})
        until(by.is_stepping)
        assert at.ask("/health").status_code == 200
        clock = by.target.clock
        by.target.clock = lambda: clock() + app_module.HANGS
        found = at.ask("/health")
        assert found.status_code == 503
        assert found.json()["workers"][0]["seconds_in_step"] >= app_module.HANGS
        by.open.set()
        assert waiting.result().status_code == 200
        assert at.ask("/health").status_code == 200
    assert by.target.health()[0].pid is None


def test_metrics_under_the_names_of_vllm(tinypy, by):
    with server(tinypy.lm, served_by=by) as at:
        for stream in (False, True):
            body = {"prompt": "import os\n" * 20, "max_tokens": 7, "ignore_eos": True}
            usage = at.ask(body=body | {"stream": stream})
            usage.raise_for_status()
        num_prompt = at.ask("/tokenize", {"prompt": body["prompt"]}).json()["count"]
        found = metrics_of(at)
        num_hits = (num_prompt - 1) // 16 * 16
        assert found["vllm:prompt_tokens_total",] == 2 * num_prompt
        assert found["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == num_hits
        assert found["vllm:prefix_cache_hits_total",] == num_hits
        assert found["vllm:prefix_cache_queries_total",] == 2 * num_prompt + 1  # one is a warm-up
        assert found["vllm:generation_tokens_total",] == 14
        assert found["vllm:request_success_total", "length"] == 2
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds",
                     "request_prompt_tokens", "request_generation_tokens"):  # fmt: skip
            assert found[f"vllm:{name}_count",] == 2
        assert found["vllm:inter_token_latency_seconds_count",] == 12  # none for a first token
        assert found["vllm:request_generation_tokens_sum",] == 14
        assert found["vllm:num_requests_running",] == found["vllm:kv_cache_usage_perc",] == 0
        assert found["vllm:num_preemptions_total",] == 0


def test_metrics_of_times():
    """By a clock that stands still between two events."""

    async def told():
        now, metrics = [10.0], Metrics(list, "tinypy")
        clock = partial(now.__getitem__, 0)
        work = Work(metrics, SamplingParams(), 10.0, set(), lambda inbox: None, False, clock)
        inbox = Inbox(clock=clock)
        work.add(SimpleNamespace(num_prompt=5, num_cached=3), inbox)
        deltas = work.deltas()
        for put, taken, ids, reason in (
            (13.0, 13.5, [1], None),  # it is taken half a second after it came
            (14.0, 14.0, [2], None),
            (17.0, 17.0, [3, 4], None),
            (18.0, 18.0, [5], "length"),
        ):
            now[0] = put
            inbox.put(Delta(ids, "", reason))
            now[0] = taken
            await anext(deltas)
        return samples(metrics.text().decode())

    found = asyncio.run(told())
    for name, count, total in (
        ("time_to_first_token", 1, 3.5),  # since the request came, until the client has it
        ("inter_token_latency", 4, 0.5 + 3.0 + 1.0),
        ("request_time_per_output_token", 1, 5 / 4),  # since there was the first
        ("request_decode_time", 1, 5.0),
        ("e2e_request_latency", 1, 8.0),
    ):
        assert found[f"vllm:{name}_seconds_count",] == count
        assert found[f"vllm:{name}_seconds_sum",] == total, name


def test_metrics_of_a_blocks_life(tinypy):
    now, life = [0.0], BlockLife(lambda: now[0])
    engine = Engine(tinypy.lm, EngineConfig(num_blocks=8, block_size=16), listeners=[life])
    by = OneEngine(tinypy.lm, engine, life)
    with server(tinypy.lm, served_by=by) as at:
        for now[0], first in ((10, 5), (11, 5), (31, 5), (34, 6), (100, 7)):
            at.ask(body={"prompt": [first] * 49, "max_tokens": 1}).raise_for_status()
        found = metrics_of(at)
    # Three blocks are found after 1 s, and again after 20. At 100 two of them are evicted.
    for name, count, seconds in (
        ("reuse_gap", 6, 3 * 1 + 3 * 20), ("lifetime", 2, 2 * 90), ("idle_before_evict", 2, 2 * 69),
    ):  # fmt: skip
        assert found[f"vllm:kv_block_{name}_seconds_count",] == count
        assert found[f"vllm:kv_block_{name}_seconds_sum",] == seconds


def test_metrics_of_drafts_and_of_what_comes_back(tinypy):
    """A request that was preempted finds its own blocks in the cache: that is no hit."""
    config = replace(CONFIG, num_blocks=12, speculative="ngram")
    by = OneEngine(tinypy.lm, fearless(Engine(tinypy.lm, config)))
    with server(tinypy.lm, served_by=by) as at, ThreadPoolExecutor() as threads:
        common = {"max_tokens": 120, "ignore_eos": True, "logprobs": 1}
        calls, both = by.target._calls, threading.Event()
        calls.put(partial(both.wait, PATIENCE))  # there it stays until both have asked
        until(calls.empty)
        asked = [threads.submit(at.ask, body=common | {"prompt": [5 + i]}) for i in range(2)]
        until(lambda: calls.qsize() == 2)
        both.set()
        for found in (one.result() for one in asked):
            details = found.json()["usage"]["prompt_tokens_details"]
            assert details == {"cached_tokens": 0}
            [choice] = found.json()["choices"]
            told = choice["logprobs"]["token_logprobs"]
            assert len(told) == 120 and all(value <= 0 for value in told)
        found, stats = metrics_of(at), by.engine.stats()
        assert found["vllm:num_preemptions_total",] == stats.preemptions > 0
        assert found["vllm:prefix_cache_hits_total",] == 0
        drafted = stats.speculation
        for name, number in (("drafts", drafted.verified), ("draft_tokens", drafted.drafts),
                             ("accepted_tokens", drafted.accepted)):  # fmt: skip
            assert found[f"vllm:spec_decode_num_{name}_total",] == number > 0


def test_a_full_queue_is_told_to_come_again(tinypy, by):
    with server(tinypy.lm, served_by=by, max_queued_tokens=50) as at:
        by.open.clear()
        with ThreadPoolExecutor() as threads:
            asked = {"prompt": [5] * 40, "max_tokens": 2}
            first = threads.submit(at.ask, body=asked)
            until(by.is_stepping)
            found = at.ask(body=asked)
            assert found.status_code == 503 and found.headers["Retry-After"] == "1"
            assert found.json()["error"]["type"] == "server_error"
            by.open.set()
            assert first.result().status_code == 200
        assert at.ask(body=asked).status_code == 200
        assert metrics_of(at)["vllm:admission_rejections_total", "capacity"] == 1
    assert_empty(by.engine)


def test_who_may_wait_is_decided_by_how_fast_others_were_served(tinypy):
    async def measured():
        target = SimpleNamespace(health=lambda: [], num_engines=1, tokenizer=tinypy.lm.tokenizer)
        now = SimpleNamespace(seconds=0.0)
        clock = partial(getattr, now, "seconds")
        api = Api(target, "tinypy", None, Admission(2.5, enough=256), 2000, clock)
        first, second = Inbox(clock=clock), Inbox()
        api.enter(first, 3000)  # never refused if nothing waits
        with pytest.raises(Busy, match="3000 prompt tokens") as told:
            api.enter(second, 1)  # a rate is not known
        assert told.value.seconds == 1
        now.seconds = 3.0
        first.put(Delta([1], "a", None))  # 1,000 tokens per second
        api.enter(second, 1000)
        assert api.admission.rate == 1000
        api.enter(Inbox(), 1000)
        with pytest.raises(Busy, match="2000 prompt tokens") as told:
            api.enter(Inbox(), 1700)
        assert told.value.seconds == 2  # until 800 are ahead of it
        second.put(ClientLeft())
        api.leave(second)
        assert api.admission.queued == 1000 and len(api.admission.measured) == 1

    asyncio.run(measured())


def test_who_may_wait_for_room_is_decided_by_how_fast_others_end():
    room = Room(30, crowd=8)
    assert [room.enter(name, 0.5, 1, now=0) for name in "abcd"] == [0] * 4  # c and d wait
    assert room.full_since == 0 and room.missing(1) == 1
    for key in "ab":
        room.leave(key, 1)
    assert room.full_since is None  # c and d fit
    assert [room.enter(name, 0.5, 1, now=100) for name in "efgh"] == [0] * 4
    room.leave("c", 1)
    # Half an engine's room in 20 s; 2 are missing: 80 s, and 30 of them may be waited for.
    assert room.enter("i", 0.5, 1, now=120) == 50
    assert room.enter("i", 0.5, 3, now=120) == 0  # two more engines were started
    idle = Room(30, crowd=8)
    assert idle.enter("a", 9.0, 1, now=0) == 0  # alone
    assert idle.enter("b", 0.1, 1, now=0) == 1  # more than a crowd, and nothing is known
    quiet = Room(30, crowd=8)
    found = [quiet.enter(name, 1, 1, now) for name, now in (("a", 0), ("b", 0), ("c", 31))]
    assert found == [0, 0, 1]  # nobody has ended for 31 s


@pytest.mark.thorough
def test_who_has_no_first_token_in_time_because_of_others_is_told_so(tinypy):
    """Whoever is let in has a token in time, or 503; whoever is computed is never refused."""
    engine = Engine(tinypy.lm, replace(CONFIG, max_num_seqs=2))
    by = OneEngine(tinypy.lm, engine)
    step, go = engine.step, threading.Event()

    def steps():
        assert not engine.stats().running or go.wait(PATIENCE)  # while others wait for a seat
        return step()

    engine.step = steps
    with server(tinypy.lm, served_by=by, first_token=0.3) as at, ThreadPoolExecutor(4) as threads:
        body = {"prompt": "x", "max_tokens": 200, "n": 2, "temperature": 1, "ignore_eos": True}
        long = threads.submit(at.ask, body=body)
        until(lambda: engine.stats().running == 2)
        found = at.ask(body=body | {"max_tokens": 2})
        assert found.status_code == 503 and int(found.headers["Retry-After"]) >= 1
        assert found.json()["error"]["type"] == "server_error"
        go.set()
        assert long.result().status_code == 200
        until(lambda: at.ask(body=body | {"max_tokens": 2}).status_code == 200)
        until(by.is_idle)


def test_events_wait_for_no_acknowledgement_of_those_before(tinypy, monkeypatch):
    """Nagle's algorithm is off on each connection."""
    is_off, made = [], server_module.Connection.connection_made

    def noted(self, transport):
        made(self, transport)
        sock = transport.get_extra_info("socket")
        is_off.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0)

    monkeypatch.setattr(server_module.Connection, "connection_made", noted)
    with server(tinypy.lm) as at:
        assert at.ask("/health").status_code == 200
    assert is_off == [True]


def test_a_client_that_reads_nothing_is_cut_off_after_a_while():
    """What it was not sent is not even made, and the application hears that it has left."""
    made, is_over = [], threading.Event()

    async def app(scope, receive, send):
        leaves = asyncio.create_task(app_module.client_leaves(Request(scope, receive)))

        async def events():
            while not leaves.done():
                made.append(1)
                yield bytes(2**20)
                await asyncio.sleep(0)

        await app_module.Events(events())(scope, receive, send)
        is_over.set()

    def reads_nothing():
        with suppress(ConnectionError), socket.create_connection(address) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            return is_over.wait(5)  # or it was cut off before it had asked

    with served(app, silence=0.2) as address:
        until(reads_nothing)
    assert len(made) < 20


@pytest.mark.thorough
def test_pages_of_other_origins_are_let_in_if_they_are_named(tinypy):
    page = {"Origin": "http://localhost:3000"}
    ask = page | {"Access-Control-Request-Method": "POST",
                  "Access-Control-Request-Headers": "authorization"}  # fmt: skip
    for origins, allowed in (((), None), (["http://localhost:3000"], "http://localhost:3000")):
        with server(tinypy.lm, origins=origins) as at:
            first = at.ask(method="OPTIONS", key=None, headers=ask)
            assert first.status_code == (200 if origins else 401)
            found = at.ask(body={"prompt": "x", "max_tokens": 2}, headers=page)
            assert found.status_code == 200
            for one in (first, found):
                assert one.headers.get("Access-Control-Allow-Origin") == allowed
            assert at.ask("/v1/models", key=None, headers=page).status_code == 401


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": [1] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "x"}] * 1000}]}),
        (CompletionRequest, {"prompt": "x", "stop": ["a"] * 1000}),
        (CompletionRequest, {"prompt": "x"} | {f"a{i}": 1 for i in range(1000)}),
    ],
)
def test_a_long_request_is_refused_at_the_first_thing_that_is_wrong(kind, body):
    """A list of all that is wrong would take long, while others wait."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 3  # of one value: it is no text, and no list of parts


HERE = "http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def open_to_all(tinypy):
    """A server without keys, and a client."""
    with (
        server(tinypy.lm, keys=(), origins=["http://friend.example"]) as at,
        httpx.Client(timeout=PATIENCE) as client,
    ):
        yield at, client


@pytest.mark.parametrize(
    ("head", "is_let_in"),
    [
        ({}, True),
        ({"Host": "localhost:{port}"}, True),
        ({"Host": "[::1]:{port}"}, True),
        ({"Host": "192.168.1.2"}, True),
        ({"Host": "evil.example"}, False),
        ({"Host": "evil.example:{port}"}, False),
        ({"Host": "127.0.0.1.evil.example"}, False),
        ({"Host": "localhost.evil.example"}, False),
        ({"Host": "127.0.0.1@evil.example"}, False),
        ({"Host": "["}, False),
        ({"Origin": HERE, "Sec-Fetch-Site": "same-origin"}, True),
        ({"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}, False),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "none"}, True),
        ({"Origin": "http://friend.example", "Sec-Fetch-Site": "cross-site"}, True),
    ],
)
def test_a_page_of_elsewhere_does_not_drive_a_server_without_keys(open_to_all, head, is_let_in):
    at, client = open_to_all
    head = {name: value.format(port=at.address[1]) for name, value in head.items()}
    form = head | {"Content-Type": "text/plain"}  # no browser asks first for such a one
    body = json.dumps({"prompt": "x", "max_tokens": 1})
    computed = at.by.engine.stats().computed_tokens
    for found in (
        client.post(f"{at.url}/v1/completions", content=body, headers=form),
        client.get(f"{at.url}/metrics", headers=head),
    ):
        assert found.status_code == (200 if is_let_in else 403)
    assert (at.by.engine.stats().computed_tokens > computed) == is_let_in
    is_named = is_let_in or not {"Host", "Origin"} & head.keys()
    page = client.get(at.url, headers=head)  # where a link leads
    assert page.status_code == (200 if is_named else 403)


@pytest.mark.thorough
def test_garbage_is_looked_for_among_what_requests_make(tinypy):
    """What a process had before is set apart from it; behind the end only if it was so before."""
    gc.freeze()
    with server(tinypy.lm):
        pass
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        with server(tinypy.lm):
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.collect()
        gc.freeze()


def test_with_keys_a_server_may_have_any_name(tinypy):
    with server(tinypy.lm) as at:
        head = {"Host": "engine.example", "Origin": "http://a"}
        assert at.ask("/v1/models", headers=head).status_code == 200
        with pytest.raises(ValueError, match="keys: one is empty"):
            app_module.make_app(at.by.target, "tinypy", ["a", " "])


def test_tokenize(tinypy):
    with server(tinypy.lm) as at:
        found = at.ask("/tokenize", {"prompt": "def f("}).json()
        assert found == {"count": 3, "max_model_len": 1024, "tokens": tinypy.lm.encode("def f(")}
        messages = [{"role": "user", "content": "def f("}]
        found = at.ask("/tokenize", {"messages": messages}).json()
        assert found["tokens"] == tinypy.lm.encode("def f(\n")
        assert at.ask("/tokenize", {"prompt": [5, 7]}).json()["tokens"] == [5, 7]
        both = {"prompt": "x", "messages": messages}
        wrong = (5, 1.5, True, {}, {"a": 1}, ["a"], [None], [2048], [-1], [[1]], "\ud800")
        for body in ({}, both, *({"prompt": one} for one in wrong)):
            found = at.ask("/tokenize", content=json.dumps(body), method="POST")
            assert found.status_code == 400 and found.json()["error"]["param"] == "prompt"


def test_the_server_ends_when_its_requests_have(tinypy, by):
    """Draining: what was asked for is answered in full, and nobody new is let in."""
    with ThreadPoolExecutor() as threads:
        with server(tinypy.lm, keys=(), served_by=by) as at:
            by.open.clear()
            url, body = f"{at.url}/v1/completions", LONG | {"max_tokens": 9}
            waiting = threads.submit(httpx.post, url, json=body, timeout=PATIENCE)
            until(by.is_stepping)
            threading.Timer(0.3, by.open.set).start()
        assert len(waiting.result().json()["choices"][0]["token_ids"]) == 9
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{at.url}/health")
    assert_empty(by.engine)
