"""OpenAI's own client is the judge of the server: every endpoint and option, and errors."""

import asyncio
import re

import httpx
import openai
import pytest
import torch
from cluster_case import Fragile
from serving_case import CONFIG, KEY, LIMITS, Cluster, OneEngine, server
from thorough import thorough_after
from waiting import PATIENCE

from minikv import Engine
from minikv.serving import Scored
from minikv.serving.scores import Asked

PROMPT = "def fib(n):"
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module", params=thorough_after(1, ["an engine", "a cluster"]))
def at(tinypy, request):
    """The cluster's prompts are computed by one worker and continued by another."""
    workers = [Fragile(tinypy.lm, CONFIG) for _ in range(2)]
    is_one = request.param == "an engine"
    by = OneEngine(tinypy.lm) if is_one else Cluster(tinypy.lm, workers, num_prefill=1)
    with server(tinypy.lm, served_by=by) as at:
        yield at


@pytest.fixture(scope="module")
def client(at):
    http = httpx.Client(timeout=PATIENCE, limits=LIMITS)
    options = {"api_key": KEY, "max_retries": 0, "timeout": PATIENCE, "http_client": http}
    with openai.OpenAI(base_url=f"{at.url}/v1", **options) as client:
        yield client


@pytest.fixture(scope="module")
def expected(tinypy):
    """`expected(prompt, **params)`: an engine's own samples."""
    engine = Engine(tinypy.lm, CONFIG)
    engine.runner.sampler = Scored(engine.runner)

    def samples(prompt, **params):
        params = Asked(**{"max_tokens": 16, **params})
        return engine.generate([prompt], params)[0].samples

    return samples


def whole(found, is_chat=False):
    """(text, token ids, reason) of each choice of a reply, or of a stream's chunks."""
    if not isinstance(found, openai.Stream):
        return [
            (one.message.content if is_chat else one.text, one.token_ids, one.finish_reason)
            for one in found.choices
        ]
    parts = {}
    for chunk in found:
        for one in chunk.choices:
            text, ids, reason = parts.get(one.index, ("", [], None))
            assert reason is None  # nothing comes after the end
            new = one.delta.content if is_chat else one.text
            parts[one.index] = text + new, ids + one.token_ids, one.finish_reason
    return [parts[index] for index in sorted(parts)]


def samples_as(expected):
    return [(one.text, one.token_ids, one.finish_reason) for one in expected]


# What the client is given, and the same for the engine.
OPTIONS = [
    ({}, {}),
    ({"temperature": 1, "seed": 5, "n": 3}, {"temperature": 1, "seed": 5, "n": 3}),
    ({"stop": [" =", "zz"], "max_tokens": 40}, {"stop": (" =", "zz"), "max_tokens": 40}),
    ({"frequency_penalty": 1.5, "presence_penalty": -0.5, "temperature": 1, "seed": 2, "n": 3},
     {"frequency_penalty": 1.5, "presence_penalty": -0.5, "temperature": 1, "seed": 2, "n": 3}),
    ({"max_tokens": 1}, {"max_tokens": 1}),
    ({"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "seed": 3}),
    ({"temperature": 1, "top_p": 0.6, "seed": 4}, {"temperature": 1, "top_p": 0.6, "seed": 4}),
    ({"stop": "\n"}, {"stop": ("\n",)}),
    ({"extra_body": {"top_k": 4}, "temperature": 1, "seed": 1},
     {"top_k": 4, "temperature": 1, "seed": 1}),
    ({"extra_body": {"ignore_eos": True}, "max_tokens": 50},
     {"ignore_eos": True, "max_tokens": 50}),
    ({"presence_penalty": 2, "max_tokens": 40}, {"presence_penalty": 2, "max_tokens": 40}),
    ({"extra_body": {"repetition_penalty": 1.3}, "max_tokens": 30},
     {"repetition_penalty": 1.3, "max_tokens": 30}),
    ({"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "stop": None, "n": None,
      "seed": None, "user": "ann", "temperature": None, "top_p": None,
      "extra_body": {"repetition_penalty": 1}}, {}),
]  # fmt: skip


@pytest.mark.usual(stream=True, given={})
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("given", "params"), thorough_after(4, OPTIONS))
def test_completions(client, expected, given, params, stream):
    found = client.completions.create(model="tinypy", prompt=PROMPT, stream=stream, **given)
    assert whole(found) == samples_as(expected(PROMPT, **params))


@pytest.mark.usual(stream=False, given={})
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("given", "params"), thorough_after(3, OPTIONS))
def test_chat(client, expected, given, params, stream):
    """The bundled template joins messages, one below the other."""
    given = {"max_tokens": 16, **given}
    found = client.chat.completions.create(
        model="tinypy", messages=MESSAGES, stream=stream, **given
    )
    assert whole(found, is_chat=True) == samples_as(expected(PROMPT + "\n", **params))


@pytest.mark.parametrize(
    "prompt",
    thorough_after(2, [[PROMPT, "import "], [5, 6, 7], [PROMPT], [[5, 6, 7]], [[5], [6, 7]]]),
)
@pytest.mark.parametrize("stream", thorough_after(1, [False, True]))
def test_prompts_of_every_form(client, expected, prompt, stream):
    found = client.completions.create(model="tinypy", prompt=prompt, stream=stream)
    each = prompt if isinstance(prompt[0], str | list) else [prompt]
    assert whole(found) == samples_as([expected(one)[0] for one in each])


@pytest.mark.parametrize("stream", thorough_after(1, [True, False]))
def test_an_echo_of_the_prompt(client, expected, tinypy, stream):
    prompts, params = [[5, 6], [7]], {"n": 2, "temperature": 1, "seed": 9}
    found = client.completions.create(
        model="tinypy", prompt=prompts, echo=True, stream=stream, **params
    )
    assert whole(found) == [
        (tinypy.lm.decode(prompt) + text, *rest)
        for prompt in prompts for text, *rest in samples_as(expected(prompt, **params))
    ]  # fmt: skip
    assert stream or [one.index for one in found.choices] == [0, 1, 2, 3]


def logprobs_of(found, is_chat):
    """(token, log-probability, likeliest ones) of every token of a reply or a stream."""
    told = []
    for one in [choice for part in found for choice in part.choices if choice.logprobs]:
        if is_chat:
            told += [
                (each.token, each.logprob, {top.token: top.logprob for top in each.top_logprobs})
                for each in one.logprobs.content
            ]
        else:
            parts = one.logprobs
            told += zip(parts.tokens, parts.token_logprobs, parts.top_logprobs, strict=True)
    return told


@pytest.mark.parametrize(
    "params", thorough_after(1, [{"frequency_penalty": 2}, {"temperature": 1}, {}])
)
@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("stream", thorough_after(1, [True, False]))
def test_logprobs_are_those_of_the_model(client, expected, tinypy, params, is_chat, stream):
    """Before temperature and penalties."""
    params = {"seed": 3, "max_tokens": 12} | params
    common = params | {"model": "tinypy", "stream": stream}
    if is_chat:
        found = client.chat.completions.create(
            messages=MESSAGES, logprobs=True, top_logprobs=3, **common
        )
    else:
        found = client.completions.create(prompt=PROMPT, logprobs=3, **common)
    told = logprobs_of(found if stream else [found], is_chat)
    prompt = tinypy.lm.encode(PROMPT + ("\n" if is_chat else ""))
    [sample] = expected(prompt, **params)
    rows = tinypy.lm.logits([*prompt, *sample.token_ids])[len(prompt) - 1 : -1].log_softmax(-1)
    assert len(told) == len(sample.token_ids) == len(rows)
    for (token, value, top), token_id, row in zip(told, sample.token_ids, rows, strict=True):
        assert token == tinypy.lm.decode([token_id])
        assert value == pytest.approx(row[token_id].item(), abs=1e-3)
        best = {
            tinypy.lm.decode([other]): row[other].item() for other in row.topk(3).indices.tolist()
        }
        assert top == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("max_tokens", thorough_after(1, [6, 0]))
@pytest.mark.parametrize("stream", thorough_after(1, [False, True]))
def test_logprobs_of_a_prompt(client, expected, tinypy, max_tokens, stream):
    """As lm-evaluation-harness asks for them."""
    prompts = [tinypy.lm.encode(PROMPT), tinypy.lm.encode("x = 1; " * 90), [40]]
    params = {"temperature": 1, "seed": 3, "max_tokens": max(1, max_tokens)}
    samples = [expected(prompt, **params)[0] for prompt in prompts]
    params |= {"max_tokens": max_tokens, "echo": True, "logprobs": 2}
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    found = client.completions.create(model="tinypy", prompt=prompts, **params, **more)
    chunks = list(found) if stream else [found]
    assert chunks[-1].usage.prompt_tokens == sum(map(len, prompts))
    assert chunks[-1].usage.completion_tokens == 3 * max_tokens
    for index, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        parts = [one for chunk in chunks for one in chunk.choices if one.index == index]
        new = sample.token_ids[:max_tokens]
        ids, text = [*prompt, *new], "".join(one.text for one in parts)
        assert text == tinypy.lm.decode(prompt) + (sample.text if new else "")
        assert [token_id for one in parts for token_id in one.token_ids] == new
        assert parts[-1].finish_reason == (sample.finish_reason if new else "length")
        told = [one.logprobs for one in parts if one.logprobs]
        first, *values = [value for one in told for value in one.token_logprobs]
        none, *top = [best for one in told for best in one.top_logprobs]
        assert first is None and none is None
        rows = tinypy.lm.logits(ids)[: len(ids) - 1].log_softmax(-1)
        right = rows.gather(1, torch.tensor(ids)[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(values), right, atol=1e-3, rtol=1e-3)
        best = [max(one, key=one.get) for one in top]
        assert best == [tinypy.lm.decode([one]) for one in rows.argmax(-1).tolist()]
        at = [(at, token) for one in told
              for at, token in zip(one.text_offset, one.tokens, strict=True)]  # fmt: skip
        assert len(at) == len(ids) and "".join(token for _, token in at) == text
        assert all(text[start:].startswith(token) for start, token in at)


@pytest.mark.parametrize("n", thorough_after(1, [2, 1]))
@pytest.mark.parametrize("logprobs", thorough_after(1, [1, None]))
def test_the_best_of_several_samples(client, expected, tinypy, n, logprobs):
    """By the mean log-probability of their tokens; some samples end early."""
    params = {"temperature": 1, "seed": 3, "stop": ["i"], "max_tokens": 12}
    prompts = [tinypy.lm.encode(PROMPT), [5, 6]]
    found = client.completions.create(
        model="tinypy", prompt=prompts, n=n, best_of=6, logprobs=logprobs, **params
    )
    best, num_tokens = [], 0
    for prompt in prompts:
        samples = expected(prompt, **params | {"n": 6, "stop": ("i",)})
        means = {}
        for sample in samples:
            ids = [*prompt, *sample.token_ids]
            rows = tinypy.lm.logits(ids)[len(prompt) - 1 : -1].log_softmax(-1)
            means[sample] = rows.gather(1, torch.tensor(sample.token_ids)[:, None]).mean().item()
        assert len({len(sample.token_ids) for sample in samples}) > 1
        best += sorted(samples, key=means.get, reverse=True)[:n]
        num_tokens += sum(len(sample.token_ids) for sample in samples)
    assert whole(found) == samples_as(best)
    assert [one.index for one in found.choices] == list(range(2 * n))
    assert found.usage.completion_tokens == num_tokens
    told = [one.logprobs is not None for one in found.choices]
    assert told == [logprobs is not None] * 2 * n


def test_offsets_of_tokens_are_in_the_text(client):
    chunks = list(client.completions.create(
        model="tinypy", prompt=PROMPT, logprobs=0, stream=True, max_tokens=20
    ))  # fmt: skip
    text = "".join(one.choices[0].text for one in chunks)
    parts = [one.choices[0].logprobs for one in chunks if one.choices[0].logprobs]
    tokens = [(at, token) for one in parts
              for at, token in zip(one.text_offset, one.tokens, strict=True)]  # fmt: skip
    assert len(tokens) == 20 and "".join(token for _, token in tokens) == text
    assert all(text[at:].startswith(token) for at, token in tokens)


@pytest.mark.parametrize("n", thorough_after(1, [3, 1]))
def test_a_bias_forbids_or_forces_a_token(client, expected, tinypy, n):
    [first, *_] = expected(PROMPT)[0].token_ids
    params = {"n": n, "temperature": int(n > 1), "seed": 1}
    plain = client.completions.create(model="tinypy", prompt=PROMPT, **params)
    assert any(first in choice.token_ids for choice in plain.choices)
    for bias, told in ((-100, lambda ids: first not in ids), (100, lambda ids: {first} == {*ids})):
        found = client.completions.create(
            model="tinypy", prompt=PROMPT, logit_bias={str(first): bias}, **params
        )
        assert all(told(choice.token_ids) for choice in found.choices)


@pytest.mark.parametrize("messages", thorough_after(2, [
    [{"role": "system", "content": "import os"}, {"role": "user", "content": PROMPT}],
    [{"role": "user", "content": [{"type": "text", "text": "import os"}]},
     {"role": "assistant", "content": None}, {"role": "user", "content": PROMPT, "name": "ann"}],
    [{"role": "user", "content": "import os"}, {"role": "assistant"},
     {"role": "user", "content": PROMPT}],
]))  # fmt: skip
def test_messages_of_every_form(client, expected, messages):
    found = client.chat.completions.create(model="tinypy", messages=messages, max_tokens=9)
    text = "import os\n" + ("\n" if len(messages) == 3 else "") + PROMPT + "\n"
    assert whole(found, is_chat=True) == samples_as(expected(text, max_tokens=9))
    assert found.choices[0].message.role == "assistant"


def test_the_newer_name_of_a_limit_is_known(client, expected):
    found = client.chat.completions.create(
        model="tinypy", messages=MESSAGES, max_completion_tokens=5, prompt_cache_key="talk 1"
    )
    assert whole(found, is_chat=True) == samples_as(expected(PROMPT + "\n", max_tokens=5))


@pytest.mark.thorough
def test_a_chat_without_a_limit_may_fill_the_context(client):
    found = client.chat.completions.create(
        model="tinypy", messages=[{"role": "user", "content": "x " * 500}]
    )
    assert found.usage.total_tokens <= 1024 and found.usage.completion_tokens > 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_chat", thorough_after(1, [True, False]))
def test_usage_and_cached_tokens(client, stream, is_chat):
    text = f"# {stream} {is_chat}\n" + "import os\n" * 20
    usages = []
    for _ in range(2):
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        if is_chat:
            found = client.chat.completions.create(
                model="tinypy", messages=[{"role": "user", "content": text}], max_tokens=5, **more
            )
        else:
            found = client.completions.create(model="tinypy", prompt=text, max_tokens=5, **more)
        if stream:
            *chunks, found = found
            assert chunks and found.choices == []
            assert all(one.usage is None and one.choices for one in chunks)
            assert len({one.id for one in [*chunks, found]}) == 1
        usages.append(found.usage)
    first, second = usages
    assert first.completion_tokens == second.completion_tokens == 5
    assert first.prompt_tokens == second.prompt_tokens > 40
    assert first.total_tokens == first.prompt_tokens + 5
    assert first.prompt_tokens_details.cached_tokens == 0
    cached = second.prompt_tokens_details.cached_tokens
    assert cached == (second.prompt_tokens - 1) // 16 * 16


def test_usage_in_every_chunk(client):
    chunks = list(client.completions.create(
        model="tinypy", prompt=PROMPT, max_tokens=6, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ))  # fmt: skip
    counts = [one.usage.completion_tokens for one in chunks]
    assert counts == sorted(counts) and counts[-1] == 6 and counts[0] >= 1


def test_a_stream_without_options_has_no_usage(client):
    chunks = list(client.completions.create(model="tinypy", prompt=PROMPT, stream=True))
    assert all(one.usage is None and one.choices for one in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(one.choices[0].finish_reason is None for one in chunks[:-1])


def test_only_the_first_delta_of_a_choice_has_its_role(client):
    chunks = client.chat.completions.create(
        model="tinypy", messages=MESSAGES, stream=True, n=2, max_tokens=6, temperature=1
    )
    roles = {}
    for chunk in chunks:
        for one in chunk.choices:
            roles.setdefault(one.index, []).append(one.delta.role)
    for of_one in roles.values():
        assert of_one[0] == "assistant" and not any(of_one[1:])


def test_models(client):
    [model] = client.models.list()
    assert model.id == "tinypy" and model.object == "model" and model.created > 0
    assert client.models.retrieve("tinypy") == model


C, H = "completions", "chat"
REFUSED = [
    (C, {"model": "other"}, openai.NotFoundError, "'other'"),
    (H, {"model": "other"}, openai.NotFoundError, "'other'"),
    (C, {"prompt": ""}, openai.BadRequestError, "prompt: is empty"),
    (C, {"prompt": []}, openai.BadRequestError, "prompt: is empty"),
    (C, {"prompt": None}, openai.BadRequestError, "prompt"),
    (C, {"prompt": [1, "2"]}, openai.BadRequestError, "token id"),
    (C, {"prompt": [10**9]}, openai.BadRequestError, "token id"),
    (C, {"prompt": [PROMPT, ""]}, openai.BadRequestError, "prompt: is empty"),
    (C, {"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
    (C, {"max_tokens": 10**6}, openai.BadRequestError, "context"),
    (C, {"max_tokens": "9"}, openai.BadRequestError, "max_tokens"),
    (C, {"temperature": -1}, openai.BadRequestError, "temperature"),
    (C, {"top_p": 0}, openai.BadRequestError, "top_p"),
    (C, {"n": 0}, openai.BadRequestError, "n: "),
    (C, {"n": 17}, openai.BadRequestError, "n: 17"),
    (C, {"best_of": 17}, openai.BadRequestError, "best_of: (17 samples|a stream)"),
    (C, {"best_of": 10, "prompt": ["a"] * 20}, openai.BadRequestError,
     "best_of: (at most 128|a stream)"),
    (C, {"best_of": 2, "n": 3}, openai.BadRequestError, "best_of: must be .* is 3, was 2"),
    (C, {"best_of": 0}, openai.BadRequestError, "best_of: must be .* is 1, was 0"),
    (C, {"best_of": 1.5}, openai.BadRequestError, "best_of: .*integer, was 1.5"),
    (H, {"extra_body": {"best_of": 2}}, openai.BadRequestError, "best_of: is not supported"),
    (C, {"n": 10, "prompt": ["a"] * 20}, openai.BadRequestError, "n: at most 128"),
    (C, {"seed": -1}, openai.BadRequestError, "seed"),
    (C, {"stop": ""}, openai.BadRequestError, "stop"),
    (C, {"logprobs": 6}, openai.BadRequestError, "logprobs: "),
    (C, {"max_tokens": -1, "echo": True}, openai.BadRequestError, "max_tokens"),
    (H, {"extra_body": {"echo": True}}, openai.BadRequestError, "echo: is not supported"),
    (C, {"logit_bias": {"5": 101}}, openai.BadRequestError, "logit_bias: must be from"),
    (C, {"logit_bias": {"-5": 1}}, openai.BadRequestError, "logit_bias: must have token ids"),
    (C, {"logit_bias": {"99999": 1}}, openai.BadRequestError, "logit_bias: 99999 is no token id"),
    (C, {"frequency_penalty": 2.5}, openai.BadRequestError, "frequency_penalty: .* 2, was 2.5"),
    (H, {"frequency_penalty": -3}, openai.BadRequestError, "frequency_penalty: .* -2, was -3"),
    (C, {"presence_penalty": "1"}, openai.BadRequestError, "presence_penalty: .* number, was '1'"),
    (C, {"extra_body": {"repetition_penalty": 0}}, openai.BadRequestError,
     "repetition_penalty: .* greater than or equal to 0.01, was 0"),
    (C, {"extra_body": {"repetition_penalty": 1e-38}, "temperature": 1}, openai.BadRequestError,
     "repetition_penalty: .* was 1e-38"),
    (C, {"extra_body": {"repetition_penalty": 1e38}}, openai.BadRequestError,
     "repetition_penalty: .* equal to 100, was 1e"),
    (C, {"extra_body": {"top_k": 10**400}, "temperature": 1}, openai.BadRequestError,
     "top_k: .* was 1000"),
    (C, {"seed": 2**64, "temperature": 1}, openai.BadRequestError, "seed: .* was 1844"),
    (C, {"logit_bias": {"01": 1}}, openai.BadRequestError, "logit_bias: must have token ids"),
    (C, {"logit_bias": {"2048": 5}}, openai.BadRequestError, "logit_bias: 2048 is no token id"),
    (C, {"extra_body": {"logit_bias": [1]}}, openai.BadRequestError, "logit_bias: must be an obj"),
    (C, {"extra_body": {"logit_bias": {"1": "x"}}}, openai.BadRequestError, "logit_bias: .* 'x'"),
    (C, {"extra_body": {"stop": [2048]}}, openai.BadRequestError, "stop: 2048 is no token id"),
    (C, {"stop": ["a"] * 17}, openai.BadRequestError, "stop: at most 16 .* were 17"),
    (C, {"stop": "y" * 500_000}, openai.BadRequestError, "stop: .* 1000 characters, had 500000"),
    (C, {"user": "y" * 1001}, openai.BadRequestError, "user: .* 1000 characters"),
    (C, {"extra_body": {"cache_salt": "y" * 1001}}, openai.BadRequestError, "cache_salt: "),
    (C, {"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options"),
    (C, {"extra_body": {"invented": 1}}, openai.BadRequestError, "invented: is not supported"),
    (H, {"messages": []}, openai.BadRequestError, "messages: is empty"),
    (H, {"messages": [{"role": "king", "content": "x"}]}, openai.BadRequestError,
     "messages.0.role"),
    (H, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
     openai.BadRequestError, "messages.0.content"),
    (H, {"top_logprobs": 3}, openai.BadRequestError, "top_logprobs: need logprobs"),
    (H, {"logprobs": True, "top_logprobs": 21}, openai.BadRequestError, "top_logprobs: "),
    (H, {"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError,
     "tools: is not supported"),
]  # fmt: skip


@pytest.mark.parametrize("stream", thorough_after(1, [False, True]))
@pytest.mark.parametrize(("kind", "given", "error", "says"), thorough_after(24, REFUSED))
def test_errors_by_their_type(client, kind, given, error, says, stream):
    if kind == C:
        create, usual = client.completions.create, {"prompt": PROMPT}
    else:
        create, usual = client.chat.completions.create, {"messages": MESSAGES}
    if stream and "stream_options" in given:
        pytest.skip("a stream may have them")
    with pytest.raises(error) as caught:
        create(**{"model": "tinypy", "stream": stream} | usual | given)
    body = caught.value.body
    assert re.search(says, body["message"]) and body["type"] == "invalid_request_error"
    assert {"param", "code"} <= body.keys()


def test_a_stream_is_not_the_best_of_several(client, expected):
    create = client.completions.create
    with pytest.raises(
        openai.BadRequestError, match=r"best_of: a stream cannot .* best of 3"
    ) as caught:
        create(model="tinypy", prompt=PROMPT, stream=True, best_of=3)
    assert caught.value.param == "best_of"
    found = create(model="tinypy", prompt=PROMPT, stream=True, best_of=2, n=2)
    assert whole(found) == samples_as(expected(PROMPT, n=2))


def test_a_model_that_is_not_there(client):
    with pytest.raises(openai.NotFoundError, match="'gone'"):
        client.models.retrieve("gone")


@pytest.mark.thorough
def test_the_asynchronous_client(at, expected):
    """24 at once, each the engine's own tokens; half of them streams."""

    async def one(client, i):
        prompt, params = f"def f{i}(", {"max_tokens": 5 + i, "temperature": i % 2, "seed": i}
        found = await client.completions.create(
            model="tinypy", prompt=prompt, stream=i % 4 < 2, **params
        )
        text = ""
        if i % 4 < 2:
            async for chunk in found:
                text += chunk.choices[0].text
        else:
            text = found.choices[0].text
        return text, expected(prompt, **params)[0].text

    async def everybody():
        async with openai.AsyncOpenAI(
            base_url=f"{at.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE
        ) as client:
            return await asyncio.gather(*(one(client, i) for i in range(24)))

    for found, wanted in asyncio.run(everybody()):
        assert found == wanted
