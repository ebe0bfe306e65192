"""On a CUDA device only: compiled kernels at real sizes, inside CUDA graphs, and the engine.

Where there is such a device, the tests of kernels run compiled, too: their comparisons
are not repeated here. What the interpreter cannot show is: races, and replays.
"""

import pytest
import torch
from helpers import RecordingSampler, fearless, make_model, requests_of, small
from paged_case import DEVICE, DTYPES, TOLERANCE, Paged

import minikv
from minikv import Engine, SamplingParams
from minikv.course.bench.gpu_clock import CudaClock
from minikv_kernels.cache_write import write_cache
from minikv_kernels.paged_decode import paged_decode
from minikv_kernels.paged_prefill import paged_prefill
from minikv_kernels.splits import make_scratch

if DEVICE == "cpu":
    pytest.skip("no CUDA device: kernels ran in the interpreter only", allow_module_level=True)

LENS = [4096, 1, 777, 30_000, 0, 2048, 15, 512]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
def test_attention_at_real_sizes(head_dim, dtype):
    sizes = dict(kv_heads=4, group=4, head_dim=head_dim, block_size=16, dtype=dtype)
    decodes = Paged(LENS, **sizes)
    for window in (None, 1000):
        decodes.assert_equal(decodes.decode(window, setting=None), window)
    prefills = Paged([1500, 3000, 900, 64], [1500, 500, 1, 64], **sizes)
    for window in (None, 300):
        prefills.assert_equal(prefills.prefill(window, setting=None), window)


def test_repeats_agree_to_the_last_bit():
    # Splits are joined in a fixed order: a difference would be a race.
    paged = Paged(LENS, kv_heads=8, group=4, head_dim=128, block_size=16, dtype=torch.bfloat16)
    once = paged.decode(setting=None)
    for _ in range(20):
        assert torch.equal(paged.decode(setting=None), once)


CAPTURED = CudaClock("tests/gpu").captured


def test_a_captured_decode_step_replays_with_other_contents():
    # The replays have other lengths than the recording: some are split, some are empty.
    paged = Paged([3000, 40, 900], kv_heads=4, group=4, head_dim=64, block_size=16)
    out, scratch = torch.empty_like(paged.q), make_scratch(16, 4, 64, paged.q.device)
    k, v = torch.randn(2, 3, 4, 64, device="cuda")
    slots = torch.full((3,), -1, device="cuda")

    def step():
        write_cache(k, v, paged.kv, slots)
        paged_decode(paged.q, paged.kv, paged.tables, paged.lens, out=out, scratch=scratch)

    replay, dense = CAPTURED(step), paged.dense
    for lens in ([1, 1, 1], [500, 0, 899], [3000, 40, 900], [17, 3, 64]):
        paged.lens.copy_(torch.tensor(lens))
        paged.dense = [tokens[:n] for tokens, n in zip(dense, lens, strict=True)]
        paged.q.copy_(torch.randn_like(paged.q))
        out.fill_(float("nan"))
        replay()
        paged.assert_equal(out)

    # Sequence 0 gets another second block, and the replay writes its 17th token there.
    used = set(paged.tables.flatten().tolist())
    free = next(block for block in range(len(paged.kv)) if block not in used)
    paged.tables[0, 1] = free
    slots[0] = free * 16
    replay()
    paged.dense[0] = torch.cat([dense[0][:16], torch.stack([k[0], v[0]])[None]])
    paged.assert_equal(out)


def test_a_captured_prefill_replays_with_other_chunks():
    first = Paged([300, 100], [60, 4], kv_heads=2, group=4, head_dim=64, block_size=16)
    second = Paged([200, 200], [4, 60], kv_heads=2, group=4, head_dim=64, block_size=16, seed=1)
    width = max(first.tables.shape[1], second.tables.shape[1])
    tables = torch.zeros(2, width, dtype=torch.int64, device="cuda")
    kv = torch.cat([first.kv, second.kv])
    q, lens, start = first.q.clone(), first.lens.clone(), first.start.clone()
    out = torch.empty_like(q)
    replay = CAPTURED(lambda: paged_prefill(q, kv, tables, lens, start, out=out))
    for paged, offset in ((first, 0), (second, len(first.kv)), (first, 0)):
        tables[:, : paged.tables.shape[1]] = paged.tables + offset
        for mine, theirs in ((q, paged.q), (lens, paged.lens), (start, paged.start)):
            mine.copy_(theirs)
        replay()
        torch.testing.assert_close(out, paged.expected(), **TOLERANCE[q.dtype])


# ── The engine ────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def lm():
    return minikv.load("tinypy", device="cuda")


@pytest.mark.parametrize("config", [{}, {"num_blocks": 14}, {"max_num_seqs": 11}], ids=str)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_the_engine_says_on_a_gpu_what_it_says_on_a_cpu(lm, backend, config):
    requests = list(requests_of(lm, 3, 16))
    on_cpu = Engine(minikv.load("tinypy"), small(**config))
    expected = [on_cpu.generate([prompt], rule)[0].token_ids for prompt, rule in requests]
    engine = Engine(lm, small(**config, attention=backend))
    found = engine.generate(*zip(*requests, strict=True))
    assert [output.token_ids for output in found] == expected
    assert (engine.runner.graphs is not None) == (backend == "triton")
    engine.check()


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_drafts_change_no_token(lm, drafter):
    requests = list(requests_of(lm, 3, 16))
    on_cpu = Engine(minikv.load("tinypy"), small())
    expected = [on_cpu.generate([prompt], rule)[0].token_ids for prompt, rule in requests]
    engine = fearless(Engine(lm, small(attention="triton", speculative=drafter)))
    found = engine.generate(*zip(*requests, strict=True))
    assert [output.token_ids for output in found] == expected
    assert engine.stats().speculation.drafts > 0
    engine.check()


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "fp8"])
def test_codes_are_read_as_on_a_cpu(lm, kv_dtype):
    """A prefill over codes, then a decode: its logits, whose keys are the same codes."""
    logits = []
    for model, backend in ((minikv.load("tinypy"), "torch"), (lm, "triton")):
        sampler = RecordingSampler()
        config = small(attention=backend, kv_dtype=kv_dtype)
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        Engine(model, config, sampler=sampler).generate([list(range(3, 40))], params)
        logits.append(torch.cat([call[:1] for call in sampler.calls]).float().cpu())
    expected, found = logits
    assert found.shape == expected.shape == (2, lm.config.vocab_size)
    assert (found - expected).norm() <= 0.02 * expected.norm()


def test_beams_forks_swaps_and_new_weights(lm):
    prompt, on_cpu = [5, 9, 31, 7], minikv.load("tinypy")
    config = dict(num_blocks=16, preemption="swap", host_blocks=16)
    engine, other = (Engine(x, small(**config, attention=a)) for x, a in
                     ((lm, "triton"), (on_cpu, "torch")))  # fmt: skip
    beams = [[b.token_ids for b in e.beam_search(prompt, 3, 9)] for e in (engine, other)]
    assert beams[0] == beams[1]
    rule = SamplingParams(max_tokens=20, ignore_eos=True, n=3, temperature=1.0, seed=4)
    prompts = [prompt, prompt[::-1]]
    found, expected = (e.generate(prompts, rule) for e in (engine, other))
    for a, b in zip(found, expected, strict=True):
        assert [s.token_ids for s in a.samples] == [s.token_ids for s in b.samples]
    assert engine.stats().preemptions > 0
    state = minikv.checkpoint.read_weights(minikv.BUNDLED["tinypy"])
    state = {name: tensor * 1.01 for name, tensor in state.items()}
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    for e in (engine, other):
        e.update_weights(state)
    found, expected = (e.generate(prompt, greedy)[0].token_ids for e in (engine, other))
    assert found == expected


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bfloat16_logits_are_as_exact_as_those_of_transformers(tmp_path, name):
    """Prefill, then decodes through graphs, against one pass of `transformers` over the same
    tokens. Each side rounds at places of its own, so both are compared with that pass in float32:
    our error, ||a - exact||, is at most 1.5 times theirs."""
    model = make_model(name, seed=5).to("cuda", torch.bfloat16)
    model.save_pretrained(tmp_path)
    lm = minikv.load(tmp_path, device="cuda", dtype=torch.bfloat16)
    sampler = RecordingSampler()
    engine = Engine(lm, small(attention="triton"), sampler=sampler)
    prompt = list(range(3, 40))
    [output] = engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))
    ids = torch.tensor([prompt + output.token_ids[:-1]], device="cuda")
    with torch.inference_mode():
        theirs = model(ids).logits[0, len(prompt) - 1 :].float()
        exact = model.float()(ids).logits[0, len(prompt) - 1 :]
    ours = torch.cat([call[:1] for call in sampler.calls]).float()
    assert ours.shape == exact.shape
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


def test_a_step_neither_waits_nor_asks_the_driver_for_memory(lm):
    engine = Engine(lm, minikv.EngineConfig(attention="triton", max_num_seqs=8))
    for i in range(8):
        rule = SamplingParams(max_tokens=64, ignore_eos=True, temperature=i % 2, seed=i)
        engine.add_request([5 + i, 9, 31], rule)
    for _ in range(8):  # compiles, records, fills PyTorch's own store of memory
        engine.step()
    asked = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            assert len(engine.step()) == 8
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["num_device_alloc"] == asked
