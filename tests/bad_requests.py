"""Bad requests for a completions server: whatever is sent, each gets an answer.

`found = attack(address, token, 500)` is of use for any server that speaks OpenAI's completions.
"""

import json
import random
import socket
from contextlib import suppress

# Right values of each field; whatever else a field is given may be refused or taken.
FIELDS = {
    "prompt": ["def f(", [1, 2, 3], "é\U0001f600"], "max_tokens": [1, 3], "temperature": [0, 0.7],
    "top_p": [1, 0.5], "top_k": [0, 5], "seed": [0, 7], "n": [1], "stop": ["\n", ["a", "b"], None],
    "stream": [True, False], "user": ["ann", None], "model": ["tinypy"], "ignore_eos": [True],
    "cache_salt": ["a", None], "echo": [False], "best_of": [1, 3],
    "frequency_penalty": [0, 1.5], "presence_penalty": [0, -1], "repetition_penalty": [1, 1.2],
    "prompt_cache_key": ["a", None], "retain_s": [0, 5], "logit_bias": [{"5": 1}, None],
    "logprobs": [0, 2], "stream_options": [None],
}  # fmt: skip
STRANGE = [
    None, True, False, -1, 0, 2**31, 2**63, 10**30, 1e308, -1e-9, float("nan"), float("inf"), "",
    "\x00", "\ud800", "ab\udfff", "9", "true", "x" * 5000, [], [[]], [None], [-1], [2**40], [1.5],
    ["\ud800"], [""], [1] * 3000, {}, {"a": 1}, [{}],
]  # fmt: skip
BODIES = [
    b"", b"no json", b"{", b"[]", b"null", b'"prompt"', b"[" * 100_000, b'{"a":' * 50_000,
    b'{"prompt": "\xff\xfe"}', b'{"prompt": "\\ud800"}', b"\x00" * 100, b'{"n": ' + b"9" * 9_000,
    b'{"prompt": "x", "prompt": 1}', json.dumps({"prompt": "x"}).encode("utf-16"),
]  # fmt: skip
HEADERS = [
    b"Content-Length: -1", b"Content-Length: x", b"Content-Length: 9" + b"9" * 40,
    b"Content-Type: text/html", b"Transfer-Encoding: nonsense", b"Expect: nothing",
    b"X: " + b"y" * 5000, b"Accept-Encoding: \xff", b"Content-Encoding: gzip",
]  # fmt: skip
PATHS = [b"/", b"/v1", b"/v1/completions/../..", b"/%00", b"/v1/completions?x=\xff", b"//", b"*"]


def request(rng: random.Random, token: str) -> tuple[bytes, str]:
    """A request as bytes, and in words what is wrong with it."""
    body = {name: rng.choice(values) for name, values in FIELDS.items() if rng.random() < 0.3}
    body |= {"prompt": rng.choice(FIELDS["prompt"]), "max_tokens": 2}
    method, path, more, kind = b"POST", b"/v1/completions", b"", rng.randrange(10)
    data, what = b"", ""
    if kind < 5:
        for name in rng.sample(list(FIELDS), rng.choice([1, 1, 2])):
            body[name] = rng.choice(STRANGE)
            what += f"{name}={str(body[name])[:40]!r} "
    elif kind == 5:
        body[rng.choice(["", "\ud800", "logprobs", "x" * 999])] = rng.choice(STRANGE)
        what = "an unknown field"
    elif kind == 6:
        data = rng.choice(BODIES)
        what = f"the body {data[:30]!r}"
    elif kind == 7:
        more = rng.choice(HEADERS)
        what = f"the header {more[:30]!r}"
    elif kind == 8:
        path = rng.choice(PATHS)
        what = f"the path {path!r}"
    else:
        method = rng.choice([b"GET", b"PUT", b"DELETE", b"BREW", b"\xff\xfe", b"POST POST"])
        what = f"the method {method!r}"
    data = data or (b"" if kind == 6 else json.dumps(body).encode())
    token = token if rng.random() < 0.9 else rng.choice(["", "wrong", "\u00e9"])
    head = [method + b" " + path + b" HTTP/1.1", b"Host: here", b"Connection: close"]
    head += [b"Authorization: Bearer " + token.encode(), b"Content-Type: application/json"]
    if not more.startswith(b"Content-Length"):
        head.append(b"Content-Length: %d" % len(data))
    return b"\r\n".join([*head, *filter(None, [more]), b"", data]), what


def ask(address: tuple[str, int], data: bytes) -> bytes:
    """Everything that is answered."""
    answer = b""
    with socket.create_connection(address, timeout=120) as client:
        with suppress(OSError):  # it has answered before it has read everything
            client.sendall(data)
        try:
            while piece := client.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass  # likewise: what it had sent before is here
    return answer


def attack(
    address: tuple[str, int], token: str, count: int, seed: int = 0
) -> list[tuple[str, int, bytes]]:
    """(what was wrong, status, body) of each. Raises AssertionError for one without an answer."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        data, what = request(rng, token)
        answer = ask(address, data)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1."), f"no answer to {what}: {answer[:200]!r}"
        found.append((what, int(head.split()[1]), body))
    return found
