"""Models in bfloat16 in the compiled step: weights, K and V of 16 bits, sums in float32.

They are compared with a model in float32 that has the same weights. What may differ then comes from
the rounding of K and V.
"""

import pytest
import torch
from helpers import (
    ARCHITECTURES,
    Clairvoyant,
    Pair,
    RecordingSampler,
    fearless,
    make_model,
    small,
    with_weights,
)
from thorough import thorough_after

import minikv
from minikv import Engine, SamplingParams

pytest.importorskip("numba", reason="the engine runs without it, and this is about it")
import numpy as np

from minikv.cpu.attention import CpuAttention
from minikv.cpu.step import InPanels
from minikv.quant import QuantisedAttention

NAMES = "qkv", "out", "gate_up", "down"
PRODUCTS = [(i, name) for i in range(2) for name in NAMES]


def both(pair):
    """The model in bfloat16, and with the same weights in float32."""
    state = {name: one.bfloat16().float() for name, one in pair.hf.state_dict().items()}
    return minikv.load(pair.folder, dtype=torch.bfloat16), with_weights(pair.lm, state)


def most_lost(wide, prompts, outputs):
    """By how much the logit of a chosen token, and of another position's, is below the best one."""
    lost, other = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor(output.token_ids)
        logits = wide.logits([*prompt, *output.token_ids])[len(prompt) - 1 : -1]
        best = logits.amax(-1)
        lost.append(best - logits.gather(1, ids[:, None])[:, 0])
        other.append(best - logits.gather(1, ids.roll(1)[:, None])[:, 0])
    return torch.cat(lost).max(), torch.cat(other).median()


def assert_right(wide, engine, prompts, num_tokens=20):
    outputs = engine.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    lost, other = most_lost(wide, prompts, outputs)
    assert lost < 0.05 * other, f"{lost:.3f} below the best, another token {other:.3f}"
    return outputs


def program_of(engine):
    program = engine.attention.program
    assert program is not None and program.weights.qkv.dtype == np.uint32
    return program


@pytest.mark.parametrize(
    "pair", thorough_after(2, ["llama", "tinypy", *list(ARCHITECTURES)[1:]]), indirect=True
)
def test_tokens(pair):
    half, wide = both(pair)
    prompts = pair.prompts(33, 17, 1, 70, seed=5)
    prompts.append(prompts[0][:16] + prompts[1][:3])
    engine = Engine(half, small(attention="cpu"))
    assert_right(wide, engine, prompts)
    program_of(engine)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["like-gpt-oss"])
def test_groups_of_layers(checkpoint, name):
    half, wide = both(checkpoint(name))
    engine = Engine(half, small(attention="cpu"))
    assert_right(wide, engine, checkpoint(name).prompts(40, 9, seed=1), 30)
    program_of(engine)


def test_codes_invariance_and_drafts(llama):
    half, wide = both(llama)
    prompts = llama.prompts(20, 3, 50, seed=2)
    for changes in ({"kv_dtype": "int8"}, {"batch_invariant": True}, {"kv_dtype": "bfloat16"}):
        engine = Engine(half, small(attention="cpu", **changes))
        assert_right(wide, engine, prompts)
        program_of(engine)
    engine = fearless(Engine(half, small(attention="cpu", speculative=Clairvoyant(wrong=0.2))))
    assert_right(wide, engine, prompts)
    assert engine.stats().speculation.accepted > 10
    program_of(engine)


def test_logits_are_nearer_to_float32s_than_those_of_transformers(tinypy):
    from transformers import AutoModelForCausalLM

    half, wide = both(tinypy)
    theirs = AutoModelForCausalLM.from_pretrained(tinypy.folder, dtype=torch.bfloat16).eval()
    sampler = RecordingSampler()
    engine = Engine(half, small(attention="cpu"), sampler=sampler)
    prompt, params = half.encode("def mean(values):\n"), SamplingParams(max_tokens=60)
    ids = prompt + engine.generate([prompt], params)[0].token_ids
    found = torch.cat(sampler.calls)  # after the prompt's last token and each that was drawn
    at = slice(len(prompt) - 1, len(prompt) - 1 + len(found))
    exact = wide.logits(ids)[at]
    with torch.inference_mode():
        other = theirs(torch.tensor([ids])).logits[0, at].float()
    ours, others = (found - exact).abs(), (other - exact).abs()
    assert ours.mean() < others.mean() / 2 and ours.max() < others.max()
    first, second = exact.topk(2).values.T
    is_clear = first - second > 2 * others.max()
    assert is_clear.sum() > 20
    for one in (found, other):
        assert torch.equal(one.argmax(-1)[is_clear], exact.argmax(-1)[is_clear])


@pytest.mark.parametrize("name", ["llama-bias", "qwen2"])
def test_weights_lie_in_panels_alone_and_are_what_they_were(tmp_path, name):
    make_model(name, intermediate_size=104).save_pretrained(tmp_path)  # last panels are not full
    pair = Pair(name, tmp_path)
    (half, wide), fresh = both(pair), minikv.load(pair.folder, dtype=torch.bfloat16)
    prompts = pair.prompts(12, 30, seed=3)
    assert_right(wide, Engine(half, small(attention="cpu")), prompts)
    pairs = [(half.transformer.head, fresh.transformer.head)]
    for i, product in PRODUCTS:
        layers = half.transformer.layers[i], fresh.transformer.layers[i]
        pairs.append(tuple(getattr(layer, product) for layer in layers))
    for ours, before in pairs:
        assert type(ours) is InPanels and torch.equal(ours.weight, before.weight)
        assert (ours.bias is None) == (before.bias is None)
    x = torch.randn(3, half.config.hidden_size).bfloat16()
    for ours, before in pairs[:2]:
        assert torch.equal(ours(x), before(x))
    assert_right(wide, Engine(half, small(attention="torch")), prompts)  # layer by layer, on panels


def test_where_it_falls_back(llama):
    half = minikv.load(llama.folder, dtype=torch.bfloat16)
    engine = Engine(half, small(kv_dtype="int4", block_size=16))
    assert type(engine.attention) is QuantisedAttention
    assert len(engine.generate([[1, 2, 3]])[0].token_ids) == 64
    with pytest.raises(ValueError, match=r"'int4' for models in float32 only, .*use 'int8'"):
        Engine(half, small(kv_dtype="int4", block_size=16, attention="cpu"))


@pytest.mark.thorough
def test_states_are_computed_layer_by_layer(checkpoint):
    states = minikv.load(checkpoint("qwen3.5").folder, dtype=torch.bfloat16)
    engine = Engine(states, small())
    assert engine.attention.decodes is None
    assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=9))[0].token_ids) == 9


@pytest.mark.thorough
def test_without_a_program_inputs_lie_in_order(tmp_path):
    make_model("llama", intermediate_size=127).save_pretrained(tmp_path)
    odd = Pair("odd", tmp_path)
    half, wide = both(odd)
    engine = Engine(half, small(attention="cpu"))
    assert_right(wide, engine, odd.prompts(12, 30, seed=3))  # in a program they lie in pairs
    assert type(engine.attention) is CpuAttention and engine.attention.program is None
