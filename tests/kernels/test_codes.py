"""K and V as codes, in Triton: the same bits as PyTorch's, and the attention of the formula."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from helpers import greedy
from paged_case import DEVICE
from quant_case import Steps, make_store, one_layer
from thorough import thorough_after

import minikv
import minikv_kernels.settings
from minikv import Engine, EngineConfig
from minikv.batch import BatchBuilder
from minikv.gpu.codes import TritonCodes
from minikv.quant.attention import QuantisedAttention
from minikv.quant.formats import format_of
from minikv.quant.oracle import QuantisedOracle
from minikv_kernels.codes import NAMES, Codes
from minikv_kernels.codes_attention import FloatKeys, codes_decode, codes_prefill
from minikv_kernels.codes_write import write_codes

pytestmark = pytest.mark.usefixtures("quick_interpreter")


def poison(store):
    """What nothing may read: codes of all ones, scales and open keys of NaN."""
    for part in store.parts.values():
        if part.is_floating_point():
            part.fill_(torch.nan)
        else:
            part.fill_(-1 if part.dtype == torch.int8 else 255)
    if store.open is not None:
        store.open.keys.fill_(torch.nan)


class OnlyWrites(QuantisedAttention):
    """PyTorch's way as far as its codes. What it reads may hold no poison, not even unseen."""

    def bind(self, batch):
        write = self.store.plan_write(batch)
        return lambda layer, q, k, v: self.store.write(layer, write, k, v)


def grow(config, num_seqs, kv_dtype, block_size, dtype=torch.float32):
    """`Steps` in PyTorch and, in a pool of poison, in Triton."""
    kinds = OnlyWrites, QuantisedAttention, TritonCodes
    steps = Steps(config, num_seqs, kv_dtype, block_size, kinds, dtype, DEVICE)
    poison(steps.ways[0].store)
    poison(steps.ways[2].store)
    return steps


# ── What is written ───────────────────────────────────────────────────────────────────────


# Chunks that cut blocks and fill several, decodes, and a sequence that rests.
STEPS = [(7, 16, 1), (9, 3, 0), (1, 1, 5), (0, 1, 1), (1, 12, 1)]


@pytest.mark.parametrize("kv_dtype", thorough_after(1, reversed(NAMES)))
@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "window", "block_size"),
    thorough_after(1, [(20, 3, 1, 9, 5), (64, 4, 2, None, 16), (96, 1, 1, 3, 4)]),
)
def test_both_ways_and_the_formula(tinypy, kv_dtype, head_dim, heads, kv_heads, window, block_size):
    config = one_layer(tinypy.lm, head_dim, heads, kv_heads, window)
    steps = grow(config, 3, kv_dtype, block_size)
    for counts in STEPS:
        steps.step(counts)
    steps.assert_formula()
    steps.assert_same_codes()


@pytest.mark.parametrize("dtype", thorough_after(1, [torch.float16, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("kv_dtype", thorough_after(1, ["int4", "fp8", "int8"]))
def test_models_in_16_bits(tinypy, kv_dtype, dtype):
    steps = grow(one_layer(tinypy.lm), 2, kv_dtype, 4, dtype)
    for counts in [(7, 4), (1, 3), (1, 1)]:
        steps.step(counts)
    steps.assert_formula()
    steps.assert_same_codes()


@pytest.mark.parametrize(
    ("kv_dtype", "window"), thorough_after(0, [("int4", 50), ("int8", 50), ("int4", None)])
)
def test_splits(tinypy, kv_dtype, window, monkeypatch):
    """Contexts that several programs share, some of them with the open block and nothing else."""
    monkeypatch.setattr(minikv_kernels.settings, "MIN_SPLIT", 16)
    config = one_layer(tinypy.lm, kv_heads=1, window=window)
    steps = grow(config, 3, kv_dtype, 5)
    for counts in [(79, 33, 1), (1, 1, 1), (1, 1, 1)]:
        steps.step(counts)
    steps.assert_formula()


@pytest.mark.parametrize("kv_dtype", thorough_after(2, NAMES))
def test_the_same_bits_of_any_numbers(tinypy, kv_dtype):
    """Zeros, one huge channel, tiny numbers, halves of a code, NaN and infinity."""
    torch.manual_seed(0)
    x = torch.randn(24, 1, 70)
    x[0], x[1], x[2, 0, 3], x[3], x[4] = 0.0, -2.5, 1e5, x[3] * 1e-30, 0.5
    x[5, 0, 7], x[6, 0, 40], x[7, 0, 69] = torch.nan, torch.inf, -torch.inf
    x[8, 0] = torch.arange(70) / 2 - 17  # with int8 a scale of 18 / 127: many codes end in .5
    x[9, 0] = 127 * torch.cat([torch.ones(1), torch.arange(69) / 254])
    x[10, 0] = 448 * 2.0 ** -torch.arange(70)
    config = one_layer(tinypy.lm, 70, 1, 1)
    stores = [make_store(config, kv_dtype, 4, device=DEVICE, blocks=6) for _ in range(2)]
    table = SimpleNamespace(block_ids=[5, 0, 3, 1, 4, 2])
    sequence = SimpleNamespace(num_computed=0, token_ids=[1] * 24, table=table, table_version=0)
    batch = BatchBuilder(1, 6, 4).build([sequence], [24], [20])
    x = x.to(DEVICE)
    write = stores[0].plan_write(batch)
    stores[0].write(0, write, x, x.flip(0))
    way = TritonCodes(config, stores[1])
    way.bind(batch)(0, x, x, x.flip(0))
    for name, part in stores[0].parts.items():
        found, part = (
            p.view(torch.float8_e4m3fn) if kv_dtype == "fp8" and "codes" in name else p
            for p in (stores[1].parts[name], part)
        )
        torch.testing.assert_close(found.float(), part.float(), rtol=0, atol=0, equal_nan=True)


# ── The engine ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kv_dtype", thorough_after(0, ["int4", "fp8", "int8"]))
def test_the_engine_says_what_it_says_in_pytorch(llama, kv_dtype):
    lm = minikv.load(llama.folder, device=DEVICE)
    # Blocks of 8, steps of 12 tokens: chunks after prefixes, mixed with decodes; the second
    # prompt begins with the first, so that its prefix is a hit.
    long, other = llama.prompts(21, 2)
    prompts = [long[:13], long, other]

    def tokens(attention):
        engine = Engine(lm, EngineConfig(
            attention=attention, kv_dtype=kv_dtype, num_blocks=24, block_size=8, max_num_seqs=3,
            max_batch_tokens=12, min_prefix_tokens=8,
        ))  # fmt: skip
        outs = engine.generate(prompts, greedy(4))
        engine.check()
        assert isinstance(engine.attention, TritonCodes) == (attention == "triton")
        return [out.token_ids for out in outs]

    found = tokens("triton")
    assert found == tokens("torch")
    oracle = QuantisedOracle(lm.config, format_of(kv_dtype, 8), 8)
    for prompt, new in zip(prompts, found, strict=True):
        logits = lm.logits(prompt + new, oracle)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == new


def test_which_steps_can_be_recorded(llama):
    config = EngineConfig(attention="triton", num_blocks=8)
    for kv_dtype in NAMES:
        lm = minikv.load(llama.folder, device=DEVICE)
        engine = Engine(lm, dataclasses.replace(config, kv_dtype=kv_dtype))
        assert engine.attention.recordable == (kv_dtype != "int4")
    assert not Engine(lm, dataclasses.replace(config, attention="torch")).attention.recordable


def test_padding_of_a_recorded_batch(tinypy):
    """A row of padding has slot -1 and context 0: nothing is written, and zeros come out."""
    config = one_layer(tinypy.lm)
    store = make_store(config, "int8", 4, device=DEVICE)
    poison(store)
    before = {name: part.clone() for name, part in store.parts.items()}
    codes = Codes("int8", **{name: part[0] for name, part in store.parts.items()})
    q, k = torch.randn(2, 4, 16, device=DEVICE), torch.randn(2, 2, 16, device=DEVICE)
    nothing = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    write_codes(k, k, codes, nothing - 1)
    for name, part in store.parts.items():
        assert torch.equal(part.view(torch.int8), before[name].view(torch.int8))
    assert not codes_decode(q, codes, nothing[:, None], nothing).any()


# ── Bad arguments ─────────────────────────────────────────────────────────────────────────


def test_what_the_kernels_do_not_take(tinypy, llama):
    with pytest.raises(ValueError, match=r"head_dim is 512 .* at most 256; leave attention at"):
        config = one_layer(tinypy.lm, head_dim=512)
        TritonCodes(config, make_store(config, "int8", 4, device=DEVICE))
    with pytest.raises(ValueError, match=r"store: must be quantised.*kv_dtype"):
        TritonCodes(llama.lm.config, minikv.KVStore(llama.lm.config, 4, 4, DEVICE, torch.float32))


def arguments(tinypy, kv_dtype):
    store = make_store(one_layer(tinypy.lm), kv_dtype, 4, device=DEVICE, blocks=40)
    codes = Codes(kv_dtype, **{name: part[0] for name, part in store.parts.items()})
    one = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    k = torch.zeros(1, 2, 16, device=DEVICE)
    own = FloatKeys(k, store.open.keys[0], one) if store.open is not None else None
    return codes, k, one, own


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(name="int3"), r"codes is of format 'int3': want one of float16, .*int4"),
        (dict(name="fp8"), r"codes has k_codes .* torch.int8 .*: for this k want .* torch.uint8"),
        (dict(v_scale=None), r"codes of int8: v_scale is missing"),
        (dict(v_low=torch.zeros(1)), r"codes of int8: v_low is extra"),
        (dict(k_codes=torch.zeros(3)), r"codes has k_codes of shape \(3,\): want"),
    ],
)
def test_bad_codes(tinypy, change, message):
    codes, k, one, _ = arguments(tinypy, "int8")
    q, bad = torch.zeros(1, 4, 16, device=DEVICE), codes._replace(**change)
    with pytest.raises(ValueError, match=message):
        write_codes(k, k, bad, one)
    for call in (
        lambda: codes_decode(q, bad, one[None], one),
        lambda: codes_prefill(q, bad, one[None], one, torch.arange(2, device=DEVICE)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k=torch.zeros(1, 2)), r"k is \(1, 2\) .*: want \(T, num_kv_heads, head_dim\)"),
        (dict(v=torch.zeros(1, 2, 8)), r"v is \(1, 2, 8\) .*: want that of k, \(1, 2, 16\)"),
        (dict(k=torch.zeros(1, 16, 2).mT), r"k has strides .*: want each row contiguous"),
        (dict(slot_mapping=torch.zeros(2).long()), r"slot_mapping has shape \(2,\): want \(1,\)"),
        (dict(slot_mapping=torch.zeros(1)), r"slot_mapping is torch.float32 .*want int32 or int64"),
        (dict(open_keys=None), r"codes of int4: want open_keys, places and closing, too"),
        (
            dict(open_keys=torch.zeros(8, 2, 4, 8)),
            r"open_keys is \(8, 2, 4, 8\) .*: want \(rows, 2,",
        ),
        (dict(closing=torch.zeros(3).long()), r"closing has shape \(3,\): want \(C, 3\)"),
    ],
)
def test_bad_arguments_of_the_write(tinypy, change, message):
    codes, k, one, own = arguments(tinypy, "int4")
    good = dict(
        k=k, v=k, codes=codes, slot_mapping=one, open_keys=own.keys, places=one,
        closing=torch.zeros(0, 3, dtype=torch.int64, device=DEVICE),
    )  # fmt: skip
    write_codes(**good)
    moved = {n: v if v is None else v.to(DEVICE) for n, v in change.items()}
    with pytest.raises(ValueError, match=message):
        write_codes(**good | moved)


@pytest.mark.skipif(DEVICE != "cpu", reason="contents of GPU memory are not looked at")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(slot_mapping=torch.tensor([160])), r"slot_mapping has 160: want less than the 160"),
        (dict(places=torch.tensor([32])), r"places has 32: want less than the 32 open places"),
        (dict(closing=torch.tensor([[40, 0, 0]])), r"closing has 40: want less than the 40 blocks"),
        (dict(closing=torch.tensor([[0, 8, 0]])), r"closing has 8: want less than the 8 rows"),
    ],
)
def test_bad_contents_of_the_write(tinypy, change, message):
    test_bad_arguments_of_the_write(tinypy, change, message)


def test_bad_arguments_of_attention(tinypy):
    codes, k, one, own = arguments(tinypy, "int4")
    q, start = torch.zeros(1, 4, 16, device=DEVICE), torch.arange(2, device=DEVICE)
    for changes, message in (
        (dict(own=None), r"own is None: want the keys of open blocks, which int4 needs, too"),
        (
            dict(own=own._replace(k=k[:, :1])),
            r"own has k \(1, 1, 16\).*want a key for each row of q",
        ),
        (dict(own=own._replace(rows=one[:0])), r"own.rows has shape \(0,\): want one row"),
        (dict(q=q[:, :3]), r"q has 3 heads: want a multiple of kv's 2"),
        (dict(q=q[0]), r"q has shape \(4, 16\): want \(T, num_heads, head_dim\)"),
        (dict(window=0), r"window was 0: want at least 1"),
    ):
        good = dict(q=q, codes=codes, block_tables=one[None], context_lens=one, own=own)
        with pytest.raises(ValueError, match=message):
            codes_decode(**good | changes)
        with pytest.raises(ValueError, match=message):
            codes_prefill(**good | changes, query_start=start)
