"""The engine against `transformers`: tokens, logits, beams; then sampling, stops, streams."""

import dataclasses
import itertools
import json
import math
import re
import shutil
from collections import Counter

import pytest
import torch
from helpers import (
    ALTERNATING,
    ARCHITECTURES,
    HYBRID,
    RecordingSampler,
    ScriptedSampler,
    assert_empty,
    careful_engine,
    drain,
    generate,
    make_model,
    meet,
    small,
    step,
)
from hypothesis import given, settings, strategies as st
from thorough import thorough_after
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import minikv
from minikv import Engine, LanguageModel, SamplingParams
from minikv.checkpoint import read_weights
from minikv.model import Transformer
from minikv.outputs import REPLACEMENT
from minikv.sampling import probabilities

BLOCK_SIZES = [1, 4, 16, 64]


@pytest.fixture(scope="session", params=[*ARCHITECTURES, *HYBRID, "tinypy"])
def pair(request, checkpoint):
    """Every architecture in turn."""
    return checkpoint(request.param)


def mixed_prompts(pair):
    """Different lengths, some with common beginnings, two the same, two just at block borders."""
    long, other, short = pair.prompts(33, 17, 1, seed=5)
    return [long, short, long[:16] + other[:3], other, long[:16], long[:7], other]


# ── The models themselves ─────────────────────────────────────────────────────


def test_logits_of_every_architecture(pair):
    (tokens,) = pair.prompts(150, seed=1)
    with torch.inference_mode():
        expected = pair.hf(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(pair.lm.logits(tokens), expected, rtol=1e-3, atol=1e-3)


READ_BY = {
    "attention_bias": r"[qkv]_proj\.bias", "output_bias": r"o_proj\.bias",
    "mlp_bias": r"mlp\..*\.bias", "qk_norm": r"[qk]_norm",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama3-rope", {"rope_scaling": None}),
        ("llama-linear-rope", {"rope_scaling": None}),
        ("llama-bias", {"attention_bias": False}),
        ("llama-bias", {"output_bias": False}),
        ("llama-bias", {"mlp_bias": False}),
        ("mistral", {"windows": (None, None)}),
        ("mistral", {"windows": (9, 9)}),
        ("qwen2", {"attention_bias": False}),
        ("qwen2-window", {"windows": (None, None)}),
        ("qwen2-window", {"windows": (6, 6)}),
        ("qwen3", {"qk_norm": False}),
        ("llama", {"rope_theta": 20_000.0}),
        ("llama", {"rms_norm_eps": 0.1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_each_feature_matters(checkpoint, name, change):
    """The comparison above can fail: without it logits differ, or its tensors are refused."""
    pair = checkpoint(name)
    (tokens,) = pair.prompts(60, seed=1)
    config = dataclasses.replace(pair.lm.config, **change)
    state, here = read_weights(pair.folder), (pair.lm.device, pair.lm.dtype)
    if read := [READ_BY[flag] for flag in change if flag in READ_BY]:
        with pytest.raises(minikv.CheckpointError, match="are for something that"):
            Transformer(config, state, *here)
        state = {name: one for name, one in state.items() if not re.search(read[0], name)}
    without = LanguageModel(name, Transformer(config, state, *here), None)
    assert (without.logits(tokens) - pair.lm.logits(tokens)).abs().max() > 0.05


# ── Greedy tokens ─────────────────────────────────────────────────────────────


@pytest.mark.usual(pair="qwen3", block_size=1, drafts=None)
@pytest.mark.parametrize(
    ("block_size", "prefix_cache"),
    thorough_after(2, [(1, True), (64, False), (4, False), (16, True)]),
)
@pytest.mark.parametrize(
    "pair", thorough_after(4, [*HYBRID, "tinypy", *reversed(ARCHITECTURES)]), indirect=True
)
def test_greedy_alone_and_in_a_mixed_batch(pair, block_size, prefix_cache):
    prompts = mixed_prompts(pair)
    expected = [pair.greedy(prompt, 12) for prompt in prompts]
    config = small(block_size=block_size, num_blocks=640 // block_size, prefix_cache=prefix_cache)
    engine = careful_engine(pair.lm, config)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    batch = generate(engine, prompts, params)
    assert [output.token_ids for output in batch] == expected
    # One after another, on an engine that has seen them all: full hits, partial hits, misses.
    for prompt, tokens in zip(prompts[:4], expected, strict=False):
        assert engine.generate([prompt], params)[0].token_ids == tokens
    if prefix_cache and block_size <= 16:  # of a state, a copy must lie in the prefix
        assert engine.stats().hit_tokens >= (1 if pair.lm.config.keeps_states else 16)
    if not prefix_cache:
        assert engine.stats().hit_tokens == engine.stats().blocks_cached == 0
    assert_empty(engine)


def test_end_tokens(checkpoint):
    """Generation stops where `transformers` stops, and goes on with ignore_eos."""
    pair = checkpoint("qwen2")
    (prompt,) = pair.prompts(8, seed=6)
    whole = pair.greedy(prompt, 20)
    for eos in ([whole[4]], [whole[9], whole[6]]):
        ids = torch.tensor([prompt])
        out = pair.hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False,
            eos_token_id=eos, pad_token_id=0,
        )  # fmt: skip
        expected = out[0, len(prompt) :].tolist()
        assert len(expected) < 20 and expected[-1] in eos
        lm = pair.with_eos(*eos)
        stopped, ignored = generate(
            Engine(lm, small()),
            [prompt, prompt],
            [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, ignore_eos=True)],
        )
        assert (stopped.token_ids, stopped.finish_reason) == (expected, "stop")
        assert (ignored.token_ids, ignored.finish_reason) == (whole, "length")


# ── Logits on a hit ───────────────────────────────────────────────────────────


@pytest.mark.usual(pair="llama", block_size=4)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_logits_on_a_hit_equal_logits_on_a_miss(pair, block_size):
    (prompt,) = pair.prompts(35, seed=8)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    recorded, hits = [], []
    for warm in ([], [prompt[:20]], [prompt], [prompt[:32], prompt[:20] + prompt[:9]]):
        sampler = RecordingSampler()
        engine = careful_engine(pair.lm, small(block_size=block_size), sampler=sampler)
        for one in warm:
            engine.generate([one], params)
        before = engine.stats().hit_tokens
        tokens = engine.generate([prompt], params)[0].token_ids
        hits.append(engine.stats().hit_tokens - before)
        recorded.append(torch.cat(sampler.calls[-4:]))
    whole = 34 // block_size * block_size
    if not pair.lm.config.keeps_states:
        assert hits == [0, 20 // block_size * block_size, whole, min(whole, 32)]
    elif block_size == 4:  # the last state of the second prompt's request lies behind its end
        assert hits == [0, 20, 0, 32]
    expected = pair.lm.logits(prompt + tokens)[34:-1]
    for logits in recorded:
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


# ── Beam search ───────────────────────────────────────────────────────────────


def reference_beams(pair, prompt, width, max_tokens, length_penalty, eos):
    """(tokens up to the end token, score) of each returned beam of `transformers`."""
    ids = torch.tensor([prompt])
    out = pair.hf.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width,
        max_new_tokens=max_tokens, do_sample=False, length_penalty=length_penalty,
        early_stopping=False, eos_token_id=list(eos) or None, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    beams = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        ends = [i for i, token in enumerate(tokens) if token in eos]
        beams.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return beams


def assert_beams(found, expected):
    assert [beam.token_ids for beam in found] == [tokens for tokens, _ in expected]
    scores = torch.tensor([beam.score for beam in found])
    torch.testing.assert_close(
        scores, torch.tensor([score for _, score in expected]), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("num_eos", thorough_after(2, [30, 0, 1, 4]))
@pytest.mark.usual(num_eos=30, length_penalty=-0.5)
@pytest.mark.parametrize("length_penalty", thorough_after(2, [-0.5, 1.0, 0.0, 0.6, 2.0]))
def test_beams(checkpoint, length_penalty, num_eos):
    for name, width in (("llama", 4), ("mistral", 3), ("qwen3", 2)):
        pair = checkpoint(name)
        (prompt,) = pair.prompts(9, seed=width)
        free = reference_beams(pair, prompt, width, 12, 1.0, ())
        likely = [token for tokens, _ in free for token in tokens[3:]]
        eos = tuple(dict.fromkeys([*likely, *range(pair.vocab_size)]))[:num_eos]
        expected = reference_beams(pair, prompt, width, 12, length_penalty, eos)
        if num_eos and length_penalty <= 0:  # else long ones win
            assert any(len(tokens) < 12 for tokens, _ in expected)
        engine = careful_engine(pair.with_eos(*eos), small())
        found = engine.beam_search(prompt, width, 12, length_penalty)
        assert_beams(found, expected)
        assert_empty(engine)


def test_beams_are_as_many_as_before_though_most_likely_tokens_end_them(llama):
    """For each beam, as many candidates are looked at as there are tokens that end it, and one."""
    (prompt,) = llama.prompts(9, seed=4)
    eos = llama.lm.logits(prompt)[-1].topk(13).indices[3:].tolist()
    found = Engine(llama.with_eos(*eos), small()).beam_search(prompt, 4, 12)
    assert_beams(found, reference_beams(llama, prompt, 4, 12, 1.0, eos))


def test_beams_of_the_bundled_model(tinypy):
    prompt = tinypy.lm.encode("def fib(n):\n    if")
    engine = careful_engine(tinypy.lm, small(block_size=16))
    found = engine.beam_search("def fib(n):\n    if", beam_width=4, max_tokens=16)
    expected = reference_beams(tinypy, prompt, 4, 16, 1.0, tinypy.lm.config.eos_ids)
    assert_beams(found, expected)
    assert [beam.text for beam in found] == [tinypy.lm.decode(tokens) for tokens, _ in expected]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_beams_beside_running_requests(llama, block_size):
    """Neither disturbs the other, and a prompt longer than the budget is cut."""
    engine = careful_engine(llama.lm, small(block_size=block_size, max_batch_tokens=8))
    prompt, other = llama.prompts(21, 10, seed=2)
    request_id = engine.add_request(other, SamplingParams(max_tokens=15))
    outputs = {}
    for _ in range(4):
        step(engine, outputs)
    found = engine.beam_search(prompt, 4, 10)
    engine.check()
    drain(engine, outputs)
    assert_beams(found, reference_beams(llama, prompt, 4, 10, 1.0, ()))
    assert outputs[request_id].token_ids == llama.greedy(other, 15)
    assert_empty(engine)


def test_one_beam_is_greedy(llama):
    (prompt,) = llama.prompts(6, seed=3)
    (beam,) = Engine(llama.lm, small()).beam_search(prompt, beam_width=1, max_tokens=10)
    tokens = llama.greedy(prompt, 10)
    assert beam.token_ids == tokens
    log_probs = llama.lm.logits(prompt + tokens).log_softmax(-1)[5:-1]
    total = float(log_probs[torch.arange(10), torch.tensor(tokens)].sum())
    assert math.isclose(beam.score, total / 10, rel_tol=1e-4)


def test_beams_share_blocks(llama):
    """Four beams of a long prompt need the prompt's blocks once."""
    (prompt,) = llama.prompts(40, seed=4)
    usual = Engine(llama.lm, small(num_blocks=99)).beam_search(prompt)
    assert [len(beam.token_ids) for beam in usual] == [32] * 4
    engine = careful_engine(llama.lm, small(num_blocks=10 + 4 * 2, prefix_cache=False))
    assert len(engine.beam_search(prompt, 4, 8)) == 4
    with pytest.raises(minikv.OutOfBlocks, match="blocks needed: 22, free: 18"):
        engine.beam_search(prompt, 4, 12)
    assert engine.pool.num_free == 18


# ── Loading ───────────────────────────────────────────────────────────────────


@pytest.mark.usual(pair="llama", dtype=torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(pair, dtype):
    """As far off as `transformers` in the same dtype; its own tokens, up to near ties."""
    from transformers import AutoModelForCausalLM

    (tokens,) = pair.prompts(40, seed=2)
    lm = minikv.load(pair.folder, dtype=dtype)
    hf = AutoModelForCausalLM.from_pretrained(pair.folder, dtype=dtype).eval()
    assert lm.dtype == dtype and lm.logits(tokens).dtype == torch.float32
    exact = pair.lm.logits(tokens)
    with torch.inference_mode():
        theirs = (hf(torch.tensor([tokens])).logits[0].float() - exact).abs()
    ours = (lm.logits(tokens) - exact).abs()
    assert ours.mean() <= 1.5 * theirs.mean() and ours.max() <= 2 * theirs.max()
    assert ours.mean() > 0  # it really computed in this dtype
    # The engine in this dtype: every token is, to rounding, the likeliest of its own naive pass.
    engine = careful_engine(lm, small())
    (output,) = generate(engine, [tokens], SamplingParams(max_tokens=12, ignore_eos=True))
    logits = lm.logits(tokens + output.token_ids)[39:-1]
    behind = logits.max(-1).values - logits[torch.arange(12), torch.tensor(output.token_ids)]
    assert behind.max() <= 2 * theirs.max()
    assert engine.store.blocks.dtype == dtype


def test_shards_give_the_same_model(llama, tmp_path):
    llama.hf.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    lm = minikv.load(str(tmp_path))
    (tokens,) = llama.prompts(10)
    torch.testing.assert_close(lm.logits(tokens), llama.lm.logits(tokens), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama3-rope", "llama-linear-rope", "qwen2-window", "mistral"])
def test_configs_of_earlier_transformers(checkpoint, name, tmp_path):
    """RoPE's numbers used to stand beside each other, and layer types not at all."""
    pair = checkpoint(name)
    shutil.copytree(pair.folder, tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] != "default":
        raw["rope_scaling"] = {"type" if key == "rope_type" else key: v for key, v in rope.items()}
    raw.pop("layer_types", None)
    raw.pop("head_dim", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = minikv.load(tmp_path).config
    torch.testing.assert_close(
        config.inverse_frequencies(), pair.lm.config.inverse_frequencies(), rtol=0, atol=0
    )
    assert dataclasses.replace(config, rope_scaling=pair.lm.config.rope_scaling) == pair.lm.config


MISSING = object()
# What generation_config.json says (None: it is not there), config.json, the tokenizer; and what
# ends an answer.
ENDS = [
    ({"eos_token_id": [5, 9]}, MISSING, None, (5, 9)),
    ({"eos_token_id": 5}, [7, 8], None, (5,)),  # the older one is stale
    ({}, 7, None, (7,)), ({"eos_token_id": None}, [7, 8], None, (7, 8)),
    (None, 7, None, (7,)), (None, [7, 8], None, (7, 8)), (None, None, None, ()),
    (None, MISSING, None, ()), ({"eos_token_id": []}, 7, None, ()),
    ({"eos_token_id": 5}, 7, "<end>", (5, 1)), (None, None, {"content": "<end>"}, (1,)),
    ({"eos_token_id": [5, 1]}, MISSING, "<end>", (5, 1)), (None, 7, "<no token>", (7,)),
]  # fmt: skip


@pytest.mark.parametrize(("generation", "config", "token", "ends"), ENDS)
def test_what_ends_an_answer(llama, tmp_path, generation, config, token, ends):
    """All that `transformers` stops at, and what stands in config.json and in the tokenizer."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(llama.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    raw = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": config}
    raw = {name: value for name, value in raw.items() if value is not MISSING}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    if token is not None:
        vocabulary = WordLevel({"a": 0, "<end>": 1}, unk_token="a")
        Tokenizer(vocabulary).save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    assert minikv.load(tmp_path).config.eos_ids == ends
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = model.generation_config.eos_token_id
    assert {*ends} >= {*([] if theirs is None else [theirs] if isinstance(theirs, int) else theirs)}


def test_every_architecture_is_tested():
    tested = ARCHITECTURES | HYBRID | ALTERNATING
    assert {f"{family}ForCausalLM" for family, _ in tested.values()} == set(
        minikv.checkpoint.ARCHITECTURES
    )


# ── Sampling ──────────────────────────────────────────────────────────────────

P = [0.125, 0.5, 0.25, 0.125]  # of tokens 0 … 3


def test_of_equal_logits_the_lowest_token_comes_first():
    """In any batch: which of them a draw takes must not depend on the other rows."""
    logits = torch.randint(0, 3, (8, 300), generator=torch.Generator().manual_seed(0)).float()
    _, token_ids = probabilities(logits, [SamplingParams(temperature=1.0)] * 8)
    for row, ids in zip(logits.tolist(), token_ids.tolist(), strict=True):
        assert ids == sorted(range(300), key=lambda token: (-row[token], token))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {0: 1 / 8, 1: 1 / 2, 2: 1 / 4, 3: 1 / 8}),
        ({"top_k": 2}, {1: 2 / 3, 2: 1 / 3}),
        ({"top_k": 1}, {1: 1.0}),
        ({"top_k": 9}, {0: 1 / 8, 1: 1 / 2, 2: 1 / 4, 3: 1 / 8}),
        ({"top_p": 0.4}, {1: 1.0}),
        ({"top_p": 0.6}, {1: 2 / 3, 2: 1 / 3}),  # the token that crosses 0.6 is kept
        ({"top_p": 1e-9}, {1: 1.0}),
        ({"top_k": 2, "top_p": 0.6}, {1: 1.0}),  # top-p over what top-k left: 2/3 is enough
        ({"temperature": 0.5}, {0: 1 / 22, 1: 16 / 22, 2: 4 / 22, 3: 1 / 22}),  # squares
        ({"temperature": 0.5, "top_p": 0.8}, {1: 16 / 20, 2: 4 / 20}),
        ({"temperature": 1e-300}, {1: 1.0}),
        ({"temperature": 5e-324}, {1: 1.0}),
    ],
    ids=str,
)
def test_the_distribution_by_hand(params, expected):
    params = SamplingParams(**{"temperature": 1.0} | params)
    p, token_ids = (x[0] for x in probabilities(torch.tensor([P]).log() + 3, [params]))
    found = {token: x for token, x in zip(token_ids.tolist(), p.tolist(), strict=True) if x > 0}
    assert p.tolist() == sorted(p.tolist(), reverse=True)
    assert found == pytest.approx(expected, rel=1e-5)


@settings(max_examples=50)
@given(
    temperature=st.floats(0.3, 3), top_k=st.integers(0, 60), top_p=st.floats(0.05, 0.999),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_the_distribution_against_transformers(temperature, top_k, top_p, seed):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * 3
    warped = TemperatureLogitsWarper(temperature)(None, logits[None].double())
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    warped = TopPLogitsWarper(top_p)(None, warped)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    p, token_ids = (x[0] for x in probabilities(logits[None], [params]))
    found = torch.zeros(50, dtype=torch.float64)
    found[token_ids] = p
    torch.testing.assert_close(found, warped.softmax(-1)[0], rtol=1e-6, atol=1e-9)


def chi_square(counts, expected, total):
    return sum((counts[t] - total * p) ** 2 / (total * p) for t, p in expected.items())


def test_a_draw_is_looked_up_in_the_cumulative_distribution():
    """Ordered by probability: token 1 to 0.5, token 2 to 0.75, then 0 and 3."""
    sampler, logits = minikv.Sampler(), torch.tensor([P]).log()
    params = [SamplingParams(temperature=1.0)]
    found = [int(sampler(logits, params, [d])) for d in (0.0, 0.4999, 0.5001, 0.7499)]
    assert found == [1, 1, 2, 2]
    assert {int(sampler(logits, params, [d])) for d in (0.8, 0.999999999)} == {0, 3}
    assert sampler(logits, params, [None]).tolist() == [1]


def test_borders_of_top_p_and_of_a_draw():
    """Of two equal tokens the first reaches top_p, and a draw at their border takes the second."""
    sampler, equal = minikv.Sampler(), torch.zeros(1, 2)
    p, _ = probabilities(equal, [SamplingParams(temperature=1.0, top_p=0.5)])
    assert p.tolist() == [[1.0, 0.0]]
    assert sampler(equal, [SamplingParams(temperature=1.0)], [0.5]).tolist() == [1]
    p, _ = probabilities(torch.tensor([[0.0, -50, -60]]), [SamplingParams(temperature=1.0)])
    assert (
        p > 0
    ).all()  # top_p of 1 leaves nothing out, not even behind a sum that is rounded to 1


def test_a_draw_above_the_rounded_sum_takes_the_last_token_that_may_come():
    sampler, most = minikv.Sampler(), math.nextafter(1, 0)
    params = [SamplingParams(temperature=1.0, top_k=k) for k in (1, 7)]
    rounded_down = 0
    for seed in range(60):
        logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(seed))
        p, token_ids = probabilities(logits, params)
        rounded_down += bool(p[1].cumsum(-1)[-1] <= most)
        assert sampler(logits, params, [most] * 2).tolist() == [token_ids[0, 0], token_ids[1, 6]]
    assert rounded_down > 3


def test_samples_follow_the_distribution(llama):
    """1,600 first and second tokens: chi-square, 5 degrees of freedom, below its 99.9 % point."""
    (prompt,) = llama.prompts(12, seed=1)
    params = dict(max_tokens=2, temperature=1.5, top_k=6, n=32)
    engine = Engine(llama.lm, small(num_blocks=512, max_num_seqs=32))
    firsts, seconds = Counter(), Counter()
    for seed in range(50):
        (output,) = engine.generate([prompt], SamplingParams(**params, seed=seed))
        pairs = [sample.token_ids for sample in output.samples]
        firsts.update(first for first, _ in pairs)
        seconds.update(tuple(pair) for pair in pairs)
    rule = SamplingParams(temperature=1.5, top_k=6)

    def possible(tokens):
        p, ids = (x[0].tolist() for x in probabilities(llama.lm.logits(tokens)[-1:], [rule]))
        return {token: x for token, x in zip(ids, p, strict=True) if x > 0}

    expected = possible(prompt)
    assert set(firsts) <= set(expected)
    assert chi_square(firsts, expected, 1600) < 20.5
    # The second draw is independent of the first: look at those that follow the likeliest.
    first = next(iter(expected))
    expected = {(first, token): x for token, x in possible([*prompt, first]).items()}
    assert chi_square(seconds, expected, firsts[first]) < 20.5


def test_without_a_seed_every_run_is_another(llama):
    engine = Engine(llama.lm, small())
    params = SamplingParams(max_tokens=20, temperature=2.0)
    runs = {tuple(engine.generate([[1, 2, 3]], params)[0].token_ids) for _ in range(3)}
    assert len(runs) == 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_first_tokens_are_drawn_at_any_temperature(llama, temperature):
    params = SamplingParams(max_tokens=1, temperature=temperature, seed=0, n=4)
    [output] = Engine(llama.lm, small()).generate([[1, 2, 3]], params)
    assert len({sample.token_ids[0] for sample in output.samples}) > 1


# ── Parallel sampling ─────────────────────────────────────────────────────────


def test_samples_share_the_prompts_blocks(llama):
    (prompt,) = llama.prompts(18, seed=6)  # four full blocks and a half
    engine = careful_engine(llama.lm, small(prefix_cache=False))
    engine.add_request(prompt, SamplingParams(max_tokens=8, n=4, temperature=1.0, seed=0))
    outputs = step(engine)
    sequences = list(engine.scheduler)
    assert len(sequences) == len(outputs[0].samples) == 4
    assert len({tuple(s.table.block_ids) for s in sequences}) == 1
    assert engine.stats().blocks_used == 5
    assert [engine.pool.ref_count(b) for b in sequences[0].table.block_ids] == [4] * 5
    step(engine)  # each writes its own token into the half-full block: three copies
    assert engine.stats().blocks_used == 4 + 4
    assert [engine.pool.ref_count(s.table.block_ids[4]) for s in sequences] == [1] * 4
    drain(engine)
    assert_empty(engine)


def test_samples_end_one_by_one(llama):
    """A request goes on until its last sample is finished."""
    (prompt,) = llama.prompts(6, seed=9)
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=1, n=4)
    tokens = [s.token_ids for s in Engine(llama.lm).generate(prompt, params)[0].samples]
    end = tokens[0][2]
    cut = [t[: t.index(end) + 1] if end in t else t for t in tokens]
    assert len(cut[0]) == 3 and any(len(one) == 12 for one in cut)
    engine = careful_engine(llama.lm, small())
    engine.add_request(prompt, dataclasses.replace(params, stop=(end,)))
    reasons = []
    while engine.has_unfinished:
        output = step(engine)[0]
        reasons.append(output.finish_reason)
    assert [sample.token_ids for sample in output.samples] == cut
    assert reasons == [None] * 11 + ["stop"]
    assert [s.finish_reason for s in output.samples] == [
        "stop" if one[-1] == end else "length" for one in cut
    ]


# ── Stops, text and streams ───────────────────────────────────────────────────


@pytest.fixture(scope="module")
def talker(tinypy, tmp_path_factory):
    """The bundled tokenizer and end token on a small random model: tokens are handed in."""
    folder = tmp_path_factory.mktemp("talker")
    config = tinypy.lm.config
    make_model("llama", vocab_size=config.vocab_size, num_hidden_layers=1).save_pretrained(folder)
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(tinypy.folder / name, folder / name)
    lm = minikv.load(folder)
    assert lm.config.eos_ids == config.eos_ids != ()
    return lm


def scripted(talker, token_ids, params):
    """What the engine makes of exactly these tokens: the outputs of all steps, and a stream."""
    params = dataclasses.replace(params, max_tokens=len(token_ids))
    engine = Engine(talker, small(), sampler=ScriptedSampler(token_ids))
    engine.add_request([1, 2, 3], params)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    engine = Engine(talker, small(), sampler=ScriptedSampler(token_ids))
    deltas = list(engine.stream([1, 2, 3], params))
    assert not engine.has_unfinished
    return outputs, deltas


MET = Counter()


@pytest.mark.parametrize("examples", thorough_after(1, [12, 80]))
def test_stops_and_streams_of_any_text(talker, examples):
    least = {"stopped": examples // 10, "half a character": examples}
    least |= {"held back for a stop": examples // 4}
    text = st.text("ab \né中🙂", min_size=1, max_size=25)
    stops = st.lists(st.text("ab é中🙂", min_size=1, max_size=4), max_size=3)
    meet(MET, least, examples, assert_stops_and_streams, talker, text=text, stops=stops)


def assert_stops_and_streams(talker, text, stops):
    """Stop at the first token that completes a stop string; show all that cannot begin one."""
    ids = talker.encode(text)
    expected, count, reason, shown = text, len(ids), "length", []
    for k in range(1, len(ids) + 1):
        so_far = talker.decode(ids[:k])
        found = [so_far.find(stop) for stop in stops if stop in so_far]
        if found:
            expected, count, reason = so_far[: min(found)], k, "stop"
            MET["stopped"] += 1
            break
        MET["half a character"] += so_far.endswith(REPLACEMENT)
        so_far = so_far.rstrip(REPLACEMENT)
        ends = range(len(so_far) + 1)
        may_stop = (end for end in ends if any(one.startswith(so_far[end:]) for one in stops))
        shown.append(so_far[: next(may_stop, len(so_far))])
        MET["held back for a stop"] += len(shown[-1]) < len(so_far)
    outputs, deltas = scripted(talker, ids, SamplingParams(stop=tuple(stops), ignore_eos=True))
    final = outputs[-1]
    assert (final.text, final.token_ids, final.finish_reason) == (expected, ids[:count], reason)
    shown = [*shown[: count - 1], expected]
    assert [output.text for output in outputs] == shown
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (count - 1)
    assert [output.token_ids for output in outputs] == [ids[:k] for k in range(1, count + 1)]
    assert list(itertools.accumulate(delta.text for delta in deltas)) == shown
    assert [token for delta in deltas for token in delta.token_ids] == ids[:count]
    assert [delta.finish_reason for delta in deltas] == [None] * (count - 1) + [reason]


def test_an_end_inside_a_character(talker):
    """max_tokens may cut one: the text says so at the end, and the stream joins to it."""
    ids = talker.encode("a🙂")[:-1]
    outputs, deltas = scripted(talker, ids, SamplingParams())
    assert outputs[-1].text.rstrip(REPLACEMENT) == "a" != outputs[-1].text
    assert "".join(delta.text for delta in deltas) == outputs[-1].text


def test_a_stop_string_around_special_tokens(talker):
    """They decode to nothing, so the text before and after them is adjacent."""
    (eos,) = talker.config.eos_ids
    ids = [*talker.encode("xa"), *[eos] * 12, *talker.encode("bc"), *talker.encode("de")]
    outputs, _ = scripted(talker, ids, SamplingParams(stop=("ab",), ignore_eos=True))
    assert (outputs[-1].text, outputs[-1].finish_reason) == ("x", "stop")
    assert talker.decode(outputs[-1].token_ids).startswith("xab")
    assert "de" not in talker.decode(outputs[-1].token_ids)


def test_end_token_and_ignore_eos(talker):
    (eos,) = talker.config.eos_ids
    ids = [*talker.encode("one"), eos, *talker.encode(" two")]
    outputs, _ = scripted(talker, ids, SamplingParams())
    assert (outputs[-1].text, outputs[-1].finish_reason) == ("one", "stop")
    outputs, _ = scripted(talker, ids, SamplingParams(ignore_eos=True))
    assert (outputs[-1].text, outputs[-1].finish_reason) == ("one two", "length")
    outputs, _ = scripted(talker, ids, SamplingParams(ignore_eos=True, stop=(eos,)))
    assert outputs[-1].finish_reason == "stop"


def test_text_prompts(tinypy):
    """Text, its token ids, and a list of both give the same."""
    text = "def fib(n):"
    ids = tinypy.lm.encode(text)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    engine = Engine(tinypy.lm)
    outputs = [engine.generate(one, params)[0] for one in (text, [text], ids, [ids])]
    outputs += engine.generate([text, ids], params)
    assert [output.token_ids for output in outputs] == [tinypy.greedy(ids, 8)] * 6
    assert outputs[0].prompt_ids == ids
    assert outputs[0].text == tinypy.lm.decode(outputs[0].token_ids)


def test_leaving_a_stream_aborts_its_request(tinypy):
    engine = Engine(tinypy.lm, small())
    for delta in engine.stream("import os", SamplingParams(max_tokens=50, ignore_eos=True)):
        assert len(delta.token_ids) == 1
        if engine.stats().steps == 3:
            break
    del delta
    import gc

    gc.collect()
    assert not engine.has_unfinished
    assert_empty(engine)


def test_two_streams_and_a_batch_together(tinypy):
    engine = Engine(tinypy.lm, small())
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = tinypy.prompts(4, 9, seed=1)
    first = engine.stream(prompts[0], params)
    tokens = [token for _ in range(5) for token in next(first).token_ids]
    second = engine.stream(prompts[1], params)
    other = [token for delta in second for token in delta.token_ids]  # moves the first one too
    tokens += [token for delta in first for token in delta.token_ids]
    assert other == tinypy.greedy(prompts[1], 12)
    assert tokens == tinypy.greedy(prompts[0], 12)
