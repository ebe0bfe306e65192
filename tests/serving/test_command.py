"""`python -m minikv serve`, as its reader starts and ends it."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
from argparse import ArgumentParser
from types import SimpleNamespace

import httpx
import pytest
import torch
from serving_case import server
from waiting import PATIENCE

import minikv
from minikv.cluster.worker import EngineWorker
from minikv.course.commands import main
from minikv.course.serve import add_arguments, engines, keys_of


def parsed(*words):
    parser = ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.thorough
def test_it_serves_what_it_says_and_ends_when_its_requests_have():
    command = [sys.executable, "-m", "minikv", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url, curl = process.stdout.readline().strip(), process.stdout.readline()
            words = shlex.split(curl)  # the line to try
            assert words[:3] == ["curl", "-N", url] and words[3] == "-d"
            found = httpx.post(words[2], content=words[4], timeout=PATIENCE)
            assert found.text.endswith("data: [DONE]\n\n")

            body = json.dumps({"prompt": "x", "max_tokens": 700, "ignore_eos": True,
                               "stream": True})  # fmt: skip
            with httpx.stream("POST", url, content=body, timeout=PATIENCE) as answer:
                events = answer.iter_lines()
                first = next(events)
                process.send_signal(signal.SIGTERM)
                told = [json.loads(one[6:]) for one in [first, *events] if one[6:7] == "{"]
            assert sum(len(one["choices"][0]["token_ids"]) for one in told) == 700
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def test_weights_are_loaded_as_asked():
    with engines(parsed("--dtype", "bfloat16")) as served:
        assert served.engine.lm.dtype == torch.bfloat16
    worker = EngineWorker("tinypy", minikv.EngineConfig(), dtype=torch.float16)
    assert worker.lm.dtype == torch.float16


def test_a_hint_keeps_an_agents_prefix():
    """`retain_s` over HTTP, while others fill the pool; without the hint the prefix goes by age."""
    served = SimpleNamespace(target=engines(parsed("--num-blocks", "24")))
    with server(None, keys=(), served_by=served) as at:

        def cached(prompt, **more):
            answer = at.ask(body={"prompt": prompt, "max_tokens": 1, **more})
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        for number, seconds in enumerate([0, 60]):
            agent = [5 + number] * 100
            assert cached(agent, retain_s=seconds) == 0
            for other in range(4):
                cached([20 + 4 * number + other] * 150)
            assert (cached(agent) > 0) == (seconds > 0)
        refused = at.ask(body={"prompt": "x", "retain_s": -1})
        assert refused.status_code == 400 and "retain_s" in refused.text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_this_machine_needs_no_key(monkeypatch, host):
    monkeypatch.delenv("MINIKV_API_KEY", raising=False)
    assert keys_of(parsed("--host", host)) == ([], False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_others_need_one_which_is_made_up_if_none_is_given(monkeypatch, host):
    monkeypatch.delenv("MINIKV_API_KEY", raising=False)
    made = [keys_of(parsed("--host", host)) for _ in range(2)]
    assert all(is_made_up and len(keys[0]) > 40 for keys, is_made_up in made)
    assert made[0] != made[1]
    monkeypatch.setenv("MINIKV_API_KEY", "given")
    assert keys_of(parsed("--host", host)) == (["given"], False)
    assert keys_of(parsed("--api-key", "a", "--api-key", "b")) == (["a", "b"], False)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_none(monkeypatch, capsys, host, key):
    monkeypatch.delenv("MINIKV_API_KEY", raising=False)
    assert main(["serve", "--host", host, "--api-key", "k", "--api-key", key]) == 2
    assert "--api-key: is empty" in capsys.readouterr().err
    monkeypatch.setenv("MINIKV_API_KEY", " ")
    assert main(["serve", "--host", host]) == 2


@pytest.mark.parametrize("port", ["65536", "70000", "-1", "x", "9" * 5000])
def test_a_port_that_is_none_is_said(capsys, port):
    with pytest.raises(SystemExit) as ended:
        main(["serve", f"--port={port}"])
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())  # in a terminal of any width
    assert "--port: must be from 0 to 65535, was" in said
    assert [parsed("--port", one).port for one in ("0", "65535")] == [0, 65535]


def test_what_it_cannot_serve_is_said(tmp_path, capsys):
    ignored = shutil.ignore_patterns("tokenizer.json")
    without = shutil.copytree(minikv.BUNDLED["tinypy"], tmp_path / "tinypy", ignore=ignored)
    for words, says in (
        (["no/such/folder/here"], "no/such/folder/here"),
        (["--host", "203.0.113.1", "--api-key", "k"], "203.0.113.1"),
        ([str(without)], f"{without} has no tokenizer.json"),
    ):
        assert main(["serve", *words]) == 2
        assert says in capsys.readouterr().err
