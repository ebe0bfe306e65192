"""Clients that others have made, beside OpenAI's own: `make test-class` installs them."""

import json
import shutil
import subprocess
import sys
from os import environ
from pathlib import Path
from time import perf_counter

import pytest
from serving_case import CONFIG, KEY, metrics_of, server

import minikv
from minikv import Engine, SamplingParams

PROMPT = "def fib(n):"
MODEL = minikv.BUNDLED["tinypy"]


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


PROMPT_TOKENS, NEW_TOKENS, REQUESTS = 700, 24, 20


def benchmark(command, **environment):
    """Returns the milliseconds that it ran."""
    started = perf_counter()
    ran = subprocess.run(
        [str(word) for word in command], env=environ | environment, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return 1e3 * (perf_counter() - started)


def agrees_with_metrics(at, most, first, between):
    """It and the server count the same. Its mean times, in milliseconds, begin before the server's
    and end after them, all within `most`; how much, a busy machine decides."""
    found = metrics_of(at)
    assert found["vllm:request_prompt_tokens_count",] == REQUESTS
    assert found["vllm:generation_tokens_total",] == REQUESTS * NEW_TOKENS
    whole = first + (NEW_TOKENS - 1) * between
    assert 0 < first < whole <= most / REQUESTS
    for name, told in (("time_to_first_token", first), ("e2e_request_latency", whole)):
        assert found[f"vllm:{name}_seconds_count",] == REQUESTS
        assert told > 1e3 * found[f"vllm:{name}_seconds_sum",] / REQUESTS, name


def test_guidellm(tinypy, tmp_path):
    """Four at a time, with texts that it makes by tinypy's tokenizer."""
    command = Path(sys.executable).with_name("guidellm")
    if not command.exists():
        pytest.skip("needs guidellm")
    with server(tinypy.lm, keys=()) as at:
        ran = benchmark([
            command, "run", "--backend", f"kind=openai_http,target={at.url}",
            "--profile", "kind=concurrent,streams=4",
            "--constraint", f"kind=max_requests,count={REQUESTS}", "--data",
            f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={NEW_TOKENS}",
            "--tokenizer", f"kind=huggingface_auto,model={MODEL}",
            "--output", f"kind=json,path={tmp_path}/found.json", "--disable-console",
        ], HF_HUB_OFFLINE="1")  # fmt: skip
        [found] = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
        metrics = found["metrics"]
        totals = {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
        assert metrics["request_totals"] == totals
        names = "time_to_first_token_ms", "inter_token_latency_ms"
        agrees_with_metrics(at, 4 * ran, *(metrics[name]["successful"]["mean"] for name in names))


def test_aiperf(tinypy, tmp_path):
    """Needs an older huggingface-hub than the course: MINIKV_AIPERF names another's program."""
    command = shutil.which(environ.get("MINIKV_AIPERF", "aiperf"))
    if command is None:
        pytest.skip("needs aiperf, on the path or named by MINIKV_AIPERF")
    with server(tinypy.lm, keys=()) as at:
        ran = benchmark([
            command, "profile", "--model", "tinypy", "--tokenizer", MODEL, "--url", at.url,
            "--endpoint-type", "completions", "--streaming", "--use-server-token-count",
            "--concurrency", 1, "--request-count", REQUESTS, "--random-seed", 1,
            "--isl", PROMPT_TOKENS, "--isl-stddev", 0, "--osl", NEW_TOKENS,
            "--extra-inputs", "ignore_eos:true", "--ui", "none",
            "--output-artifact-dir", tmp_path,
        ], HF_ENDPOINT="http://127.0.0.1:9")  # fmt: skip
        found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
        assert found["request_count"]["avg"] == REQUESTS and not found["error_summary"]
        names = "time_to_first_token", "inter_token_latency"
        agrees_with_metrics(at, ran, *(found[name]["avg"] for name in names))
