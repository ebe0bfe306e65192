"""The engine with quantised K and V: the same tokens as the plain formula over quantised K and V,
whatever happens to the blocks on the way; and scales that go where their blocks go."""

import pytest
import torch
from helpers import (
    InterruptedAttention,
    RecordingSampler,
    assert_empty,
    drain,
    generate,
    greedy,
    small,
)
from quant_case import check_open, make_store

import minikv
from minikv import Engine, EngineConfig, KVStore
from minikv.quant import COMPILED
from minikv.quant.attention import QuantisedAttention
from minikv.quant.formats import format_of
from minikv.quant.oracle import QuantisedOracle
from minikv.quant.store import QuantisedStore

DTYPES = ("float16", "bfloat16", "int8", "fp8", "int4")
FEW_BITS = ("int8", "int4")  # one that stores K by token, one by block


@pytest.fixture(scope="session")
def llama(checkpoint):
    """Heads of 32 channels: with fewer, steps over int4 do not run as one program."""
    return checkpoint("qwen3")


def assert_greedy(lm, prompt: list[int], tokens: list[int], config: EngineConfig) -> None:
    """Each token is the best after the text before it, by the plain formula: nothing cached.

    A number halfway between two codes becomes one or the other, as its sum was rounded: on another
    machine, or in another batch. That moved logits of the bundled model by up to 0.03, a fraction
    of what quantising does. A choice between two tokens that are as close may fall either way.
    """
    oracle = QuantisedOracle(
        lm.config, format_of(config.kv_dtype, config.block_size), config.block_size
    )
    text, last = prompt + tokens, slice(len(prompt) - 1, -1)
    logits = lm.logits(text, oracle)[last]
    close = min(0.05, (logits - lm.logits(text)[last]).abs().max().item())
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (logits.max(1).values - chosen).max() <= close


def assert_oracle(lm, outputs, config: EngineConfig) -> None:
    for output in outputs:
        for sample in output.samples:
            assert_greedy(lm, list(output.prompt_ids), sample.token_ids, config)


@pytest.fixture(params=["torch", "cpu"])
def attention(request):
    """Each way to read what is stored. Tests without it use the fastest."""
    if request.param == "cpu":
        pytest.importorskip("numba")
    return request.param


EVERY_WAY = pytest.mark.parametrize(
    ("kv_dtype", "attention"),
    [(name, "torch") for name in DTYPES] + [(name, "cpu") for name in DTYPES if name in COMPILED],
    indirect=["attention"],
)


# ── The same tokens as the plain formula ──────────────────────────────────────


@pytest.mark.usual(pair="llama", kv_dtype="int8", attention="torch")
@EVERY_WAY
def test_tokens_of_every_architecture(pair, kv_dtype, attention):
    config = small(kv_dtype=kv_dtype, attention=attention, max_batch_tokens=16, kv_groups="one")
    outputs = generate(Engine(pair.lm, config), pair.prompts(5, 1, 23, 8), greedy(14))
    assert_oracle(pair.lm, outputs, config)


@pytest.mark.usual(kv_dtype="int8", attention="cpu", block_size=3, max_batch_tokens=7)
@pytest.mark.parametrize("kv_dtype", FEW_BITS)
@pytest.mark.parametrize("block_size", [2, 3, 16])
@pytest.mark.parametrize("max_batch_tokens", [4, 7, 64])
def test_tokens_do_not_depend_on_how_a_prompt_is_cut(
    llama, kv_dtype, attention, block_size, max_batch_tokens
):
    config = small(
        kv_dtype=kv_dtype, attention=attention, block_size=block_size,
        max_batch_tokens=max_batch_tokens,
    )  # fmt: skip
    outputs = generate(Engine(llama.lm, config), llama.prompts(33, 16, 7), greedy(9))
    assert_oracle(llama.lm, outputs, config)


@pytest.mark.usual(kv_dtype="int8", attention="torch")
@EVERY_WAY
def test_logits_equal_the_plain_formula(llama, kv_dtype, attention):
    """Closer than one code of K: a wrong scale would show. On a miss as on a hit."""
    sampler = RecordingSampler()
    config = small(kv_dtype=kv_dtype, attention=attention, max_batch_tokens=8)
    engine = Engine(llama.lm, config, sampler=sampler)
    [prompt] = llama.prompts(21)
    oracle = QuantisedOracle(llama.lm.config, format_of(kv_dtype, 4), 4)
    for hit_tokens in (0, 20):
        sampler.calls.clear()
        [output] = generate(engine, [prompt], greedy(12))
        exact = llama.lm.logits(prompt + output.token_ids, oracle)[20:-1]
        torch.testing.assert_close(torch.cat(sampler.calls), exact, rtol=1e-3, atol=1e-3)
        assert engine.stats().hit_tokens == hit_tokens
    plain = llama.lm.logits(prompt + output.token_ids)[20:-1]
    if kv_dtype in FEW_BITS:
        assert (exact - plain).abs().max() > 0.01  # it really was quantised


# ── What happens to blocks ────────────────────────────────────────────────────


@pytest.mark.parametrize("kv_dtype", FEW_BITS)
def test_beams_fork_and_leave_open_blocks(llama, kv_dtype):
    config = small(kv_dtype=kv_dtype, prefix_cache=False)
    engine = Engine(llama.lm, config)
    [prompt] = llama.prompts(9)
    beams = engine.beam_search(prompt, beam_width=3, max_tokens=10)
    check_open(engine)
    assert_empty(engine)
    oracle = QuantisedOracle(llama.lm.config, format_of(kv_dtype, 4), 4)
    for beam in beams:
        log_probs = llama.lm.logits(prompt + beam.token_ids, oracle)[8:-1].log_softmax(-1)
        chosen = log_probs.gather(1, torch.tensor(beam.token_ids)[:, None])
        assert beam.score == pytest.approx(chosen.sum().item() / len(beam.token_ids), rel=1e-3)
    best = engine.beam_search(prompt, beam_width=1, max_tokens=10)[0]
    assert len(best.token_ids) == 10
    assert_greedy(llama.lm, prompt, best.token_ids, config)


def test_open_rows_are_added_when_beams_need_them(llama):
    config = small(kv_dtype="int4", max_num_seqs=3, prefix_cache=False)
    engine = Engine(llama.lm, config)
    for prompt in llama.prompts(5, 6, 7):
        engine.add_request(prompt, greedy(12))
    engine.step()
    assert len(engine.store.open.block_ids) == 3
    [prompt] = llama.prompts(9)
    beams = engine.beam_search(prompt, beam_width=3, max_tokens=6)
    assert engine.store.open.keys.shape[1] > 3
    alone = Engine(llama.lm, config).beam_search(prompt, beam_width=3, max_tokens=6)
    assert [beam.token_ids for beam in beams] == [beam.token_ids for beam in alone]
    assert_oracle(llama.lm, drain(engine).values(), config)


# ── The store ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_a_copy_reads_the_same_in_every_layer(llama, kv_dtype):
    """All parts of a block go along, into the same store and into another one."""
    store, other = (make_store(llama.lm.config, kv_dtype, 4, blocks=6) for _ in range(2))
    for part in store.parts.values():
        torch.manual_seed(part.ndim)
        part.copy_(torch.randint(0, 9, part.shape))
    before = [store.read(layer, torch.arange(6)) for layer in range(2)]
    store.copy_to(store, [(0, 3), (2, 0)])  # 0 is read before it is written
    store.copy_to(other, [(3, 1)])
    for layer in range(2):
        for was, now, there in zip(
            before[layer],
            store.read(layer, torch.arange(6)),
            other.read(layer, torch.arange(6)),
            strict=True,
        ):
            assert torch.equal(now[3], was[0]) and torch.equal(now[0], was[2])
            assert torch.equal(now[[1, 2, 4, 5]], was[[1, 2, 4, 5]])
            assert torch.equal(there[1], was[0]) and not there[0].any()


def test_a_copy_into_another_format_is_refused(llama):
    int8, int4 = (make_store(llama.lm.config, name, 4, blocks=6) for name in FEW_BITS)
    with pytest.raises(ValueError, match="other: must be a store of int8"):
        int8.copy_to(int4, [(0, 1)])
    plain = KVStore(llama.lm.config, 6, 4, torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="other: must be a store of int4"):
        int4.copy_to(plain, [(0, 1)])


def test_a_token_inside_a_closed_block_is_not_rewritten(llama):
    """A truncation, of rejected drafts say, would need it: int8 can, int4 says that it cannot."""

    def rewrite(kv_dtype):
        engine = Engine(llama.lm, small(kv_dtype=kv_dtype, prefix_cache=False))
        engine.add_request(llama.prompts(7)[0], greedy(8))
        engine.step()
        engine.step()  # 8 tokens: block 1 is closed
        [sequence] = engine.scheduler.running
        sequence.num_computed, sequence.next_slot = 6, None
        del sequence.token_ids[7:]
        return drain(engine)

    assert len(rewrite("int8")[0].token_ids) == 8
    with pytest.raises(RuntimeError, match=r"block 1 is closed.*int8"):
        rewrite("int4")


def test_a_quantised_store_has_no_floats(llama):
    store = make_store(llama.lm.config, "int8", 4, blocks=6)
    with pytest.raises(AttributeError, match=r"int8 has no floats.*parts"):
        _ = store.blocks
    with pytest.raises(AttributeError, match="no floats"):
        _ = store.slots


# ── Settings ──────────────────────────────────────────────────────────────────


def test_auto_is_what_it_was(llama):
    engine = Engine(llama.lm, small(attention="torch"))
    assert type(engine.store) is KVStore and type(engine.attention) is minikv.TorchAttention
    assert type(engine.pool) is minikv.BlockPool
    assert engine.stats().bytes_per_token == llama.lm.config.kv_bytes_per_token(torch.float32)


@pytest.mark.parametrize(
    ("kv_dtype", "bytes_per_token"),
    [
        ("auto", 5120), ("float16", 2560), ("bfloat16", 2560),
        ("int8", 1280 + 5 * 2 * 2 * 2),  # codes; layers x (K, V) x heads x a scale of 2 bytes
        ("fp8", 1280 + 5 * 2 * 2 * 2),
        # V: two groups of a head with scale and zero point; K: as many for 64 channels of a block
        ("int4", 640 + 5 * 2 * 2 * 4 + 5 * 2 * 64 * 4 / 16),
    ],
)  # fmt: skip
def test_stats_say_bytes_per_token(tinypy, kv_dtype, bytes_per_token):
    engine = Engine(tinypy.lm, EngineConfig(num_blocks=8, kv_dtype=kv_dtype))
    assert engine.stats().bytes_per_token == bytes_per_token
    if kv_dtype != "auto":
        held = sum(part.nbytes for part in engine.store.parts.values())
        assert held == bytes_per_token * 16 * 8


@pytest.mark.parametrize("kv_dtype", ["auto", *DTYPES])
@pytest.mark.parametrize("memory", ["1 MiB", "3 MiB", 10**7])
def test_a_pool_of_so_many_bytes(tinypy, kv_dtype, memory):
    config = EngineConfig(
        kv_dtype=kv_dtype, kv_memory=memory, max_num_seqs=8, max_batch_tokens=8, num_blocks=3
    )
    engine = Engine(tinypy.lm, config)
    limit = {"1 MiB": 2**20, "3 MiB": 3 * 2**20}.get(memory, memory)
    block = 16 * engine.stats().bytes_per_token

    def held(num_blocks):
        open_keys = min(8, num_blocks) * 16 * 2560 if kv_dtype == "int4" else 0
        return num_blocks * block + open_keys

    num_blocks = engine.stats().blocks_total
    assert held(num_blocks) <= limit < held(num_blocks + 1)
    tensors = [engine.store.blocks] if kv_dtype == "auto" else [*engine.store.parts.values()]
    tensors += [engine.store.open.keys] if kv_dtype == "int4" else []
    assert sum(tensor.nbytes for tensor in tensors) == held(num_blocks)
    assert engine.config.num_blocks == num_blocks


def test_the_same_memory_holds_more_tokens(tinypy):
    def blocks(**changes):
        config = EngineConfig(kv_memory="64 MiB", **changes)
        return Engine(tinypy.lm, config).stats().blocks_total * config.block_size

    assert blocks(kv_dtype="int8") / blocks() > 3.5
    assert blocks(kv_dtype="int4", block_size=32, max_num_seqs=16) / blocks(block_size=32) > 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_dtype": "int4", "block_size": 1}, "block_size: .*int4.* at least 2 tokens, was 1"),
        ({"kv_dtype": "fp8", "attention": "cpu"}, "kv_dtype: .*'fp8'; use attention='torch'"),
        ({"kv_memory": "1 KiB"}, "kv_memory: one block of 16 tokens takes [0-9,]+ bytes, was '1 K"),
    ],
)
def test_settings_that_cannot_work_are_refused(llama, changes, said):
    with pytest.raises(ValueError, match=said):
        Engine(llama.lm, EngineConfig(**changes))


def test_a_model_that_computes_in_that_dtype_needs_nothing(llama):
    lm = minikv.load(llama.folder, dtype=torch.bfloat16)
    engine = Engine(lm, small(kv_dtype="bfloat16"))
    assert type(engine.store) is KVStore
    assert type(Engine(lm, small(kv_dtype="int8")).store) is QuantisedStore


@pytest.mark.parametrize("kv_dtype", ["float16", "int8", "int4"])
def test_a_model_in_bfloat16(llama, kv_dtype):
    lm = minikv.load(llama.folder, dtype=torch.bfloat16)
    config = small(kv_dtype=kv_dtype)
    for output in generate(Engine(lm, config), llama.prompts(9, 14), greedy(8)):
        oracle = QuantisedOracle(lm.config, format_of(kv_dtype, 4), 4)
        logits = lm.logits(output.prompt_ids + output.token_ids, oracle)
        logits = logits[len(output.prompt_ids) - 1 : -1]
        chosen = logits[torch.arange(8), torch.tensor(output.token_ids)]
        assert (logits.max(-1).values - chosen).max() <= 0.5  # to the rounding of bfloat16


def test_a_backend_for_floats_cannot_read_codes(llama):
    with pytest.raises(AttributeError, match="int8 has no floats"):
        Engine(llama.lm, small(kv_dtype="int8"), attention=InterruptedAttention)
    with pytest.raises(ValueError, match=r"store: must be quantised.*kv_dtype"):
        Engine(llama.lm, small(), attention=QuantisedAttention)
