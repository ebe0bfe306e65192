"""`TritonAttention` in the engine: the oracle's tokens, whatever the batch."""

import dataclasses

import pytest
import torch
from helpers import greedy
from paged_case import DEVICE
from thorough import thorough_after

import minikv
from minikv import Engine, EngineConfig
from minikv.gpu.attention import TritonAttention
from minikv.groups import GroupedAttention
from minikv.paged import KVStore

pytestmark = pytest.mark.usefixtures("quick_interpreter")


def make_engine(lm, **config):
    engine = Engine(lm, EngineConfig(attention="triton", **config))
    has_groups = any(lm.config.windows) and DEVICE == "cpu"
    kind = GroupedAttention if has_groups else TritonAttention
    assert isinstance(engine.attention, kind)
    return engine


def test_the_bundled_model_says_what_the_oracle_says():
    lm = minikv.load("tinypy", device=DEVICE)
    # Blocks of 8, steps of 12 tokens: chunks after prefixes, mixed with decodes; the second
    # prompt begins with the first, so that its prefix is a hit.
    first = lm.encode("def add(a, b):\n    return a +")
    prompts = [first, first + lm.encode(" b\n\ndef sub("), lm.encode("import")]
    engine = make_engine(
        lm, num_blocks=24, block_size=8, max_num_seqs=3, max_batch_tokens=12, min_prefix_tokens=8
    )
    outs = engine.generate(prompts, greedy(3))
    engine.check()
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.token_ids == lm.generate_naively(prompt, 3)


@pytest.mark.parametrize("name", thorough_after(1, ["qwen2-window", "mistral", "qwen3"]))
def test_windows_and_other_architectures(name, checkpoint):
    lm = minikv.load(checkpoint(name).folder, device=DEVICE)
    prompts = [list(range(3, 3 + n)) for n in (2, 11)]
    engine = make_engine(lm, num_blocks=16, block_size=5, max_num_seqs=2, max_batch_tokens=8)
    outs = engine.generate(prompts, greedy(4))
    assert [out.token_ids for out in outs] == [lm.generate_naively(p, 4) for p in prompts]


@pytest.mark.thorough
def test_forks_and_preemption(llama):
    # 6 blocks of 4 for 2 x 17 tokens: a sequence has to give way and is computed again.
    lm = minikv.load(llama.folder, device=DEVICE)
    engine = make_engine(
        lm, num_blocks=6, block_size=4, max_num_seqs=4, max_batch_tokens=16, prefix_cache=False
    )
    prompts = [[7, 8, 9, 10, 11], [20, 21, 22, 23, 24]]
    outs = engine.generate(prompts, greedy(12))
    assert engine.stats().preemptions > 0
    assert [out.token_ids for out in outs] == [lm.generate_naively(p, 12) for p in prompts]
    [out] = engine.generate([prompts[0]], greedy(3, n=2))
    assert {tuple(sample.token_ids) for sample in out.samples} == {tuple(outs[0].token_ids[:3])}


def test_a_head_dim_that_the_kernels_do_not_take(llama):
    config = dataclasses.replace(llama.lm.config, head_dim=512)
    store = KVStore(config, 1, 1, torch.device(DEVICE), torch.float32)
    with pytest.raises(ValueError, match=r"head_dim is 512 .* at most 256; leave attention at"):
        TritonAttention(config, store)
