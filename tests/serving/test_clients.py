"""Clients that others have made, beside OpenAI's own: `make test-class` installs them."""

import json
import subprocess
import sys
from os import environ
from pathlib import Path

import pytest
from serving_case import CONFIG, KEY, server

import minikv
from minikv import Engine, SamplingParams

PROMPT = "def fib(n):"


@pytest.fixture(scope="module")
def at(tinypy):
    with server(tinypy.lm) as at:
        yield at


@pytest.fixture(scope="module")
def expected(tinypy):
    """What an engine answers to a prompt, and to the same as a message."""
    prompts = [PROMPT, PROMPT + "\n"]
    return [one.text for one in Engine(tinypy.lm, CONFIG).generate(prompts, SamplingParams(12))]


def test_langchain(at, expected):
    """Its completions' client sends a list of prompts."""
    langchain = pytest.importorskip("langchain_openai", reason="needs langchain-openai")
    common = {"model": "tinypy", "base_url": f"{at.url}/v1", "api_key": KEY, "max_tokens": 12,
              "temperature": 0, "max_retries": 0}  # fmt: skip
    complete, chat = langchain.OpenAI(**common), langchain.ChatOpenAI(**common)
    assert complete.invoke(PROMPT) == expected[0]
    assert complete.batch([PROMPT, PROMPT]) == [expected[0]] * 2
    assert "".join(complete.stream(PROMPT)) == expected[0]
    whole = chat.invoke(PROMPT)
    assert whole.content == expected[1]
    pieces = list(chat.stream(PROMPT, stream_usage=True))
    assert "".join(one.content for one in pieces) == expected[1]
    for usage in (whole.usage_metadata, sum(pieces[1:], pieces[0]).usage_metadata):
        assert usage["output_tokens"] == 12
        assert (
            usage["input_tokens"] == at.ask("/tokenize", {"prompt": PROMPT + "\n"}).json()["count"]
        )


def test_litellm(at, expected, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch prices
    litellm = pytest.importorskip("litellm", reason="needs litellm")
    common = {"api_base": f"{at.url}/v1", "api_key": KEY, "max_tokens": 12, "temperature": 0}
    chat = common | {"model": "openai/tinypy", "messages": [{"role": "user", "content": PROMPT}]}
    assert litellm.completion(**chat).choices[0].message.content == expected[1]
    chunks = litellm.completion(**chat, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == expected[1]
    complete = common | {"model": "text-completion-openai/tinypy", "prompt": PROMPT}
    assert litellm.text_completion(**complete).choices[0].text == expected[0]
    chunks = litellm.text_completion(**complete, stream=True)
    assert "".join(one.choices[0].text or "" for one in chunks) == expected[0]
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**chat | {"temperature": -1})


def test_guidellm(tinypy, tmp_path):
    """A benchmark of 24 requests, four at a time, with texts that it makes by tinypy's tokenizer.
    It and the server count the same."""
    command = Path(sys.executable).with_name("guidellm")
    if not command.exists():
        pytest.skip("needs guidellm")
    model = Path(minikv.__file__).with_name("models") / "tinypy"
    with server(tinypy.lm, keys=()) as at:
        asked = [
            command, "run", "--backend", f"kind=openai_http,target={at.url}",
            "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=24",
            "--data", "kind=synthetic_text,prompt_tokens=60,output_tokens=24",
            "--tokenizer", f"kind=huggingface_auto,model={model}",
            "--output", f"kind=json,path={tmp_path}/found.json", "--disable-console",
        ]  # fmt: skip
        env = environ | {"HF_HUB_OFFLINE": "1"}
        ran = subprocess.run(asked, env=env, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        metrics = at.ask("/metrics").text
    [found] = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert totals == {"successful": 24, "errored": 0, "incomplete": 0, "total": 24}
    for name, number in (("generation_tokens_total", 24 * 24), ("request_prompt_tokens_count", 24)):
        assert f'vllm:{name}{{engine="0",model_name="tinypy"}} {number:.1f}' in metrics
