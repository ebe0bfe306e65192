"""The compiled backend: kernels against the oracle, then the engine on them, then what happens
where they cannot be used."""

import logging
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from helpers import (
    Clairvoyant,
    assert_empty,
    fearless,
    meet_contexts,
    meets,
    naively,
    scattered,
    small,
    step,
    with_weights,
)
from hypothesis import given, settings, strategies as st
from waiting import PATIENCE

import minikv
from minikv import Engine, EngineConfig, SamplingParams, TorchAttention, naive_attention

pytest.importorskip("numba", reason="the engine runs without it, and this is about it")
import numba
from numba import njit

from minikv.cpu import attention, compiler, helpers, kernels, plain, step as cpu_step, tiles
from minikv.cpu.attention import CpuAttention
from minikv.cpu.compiler import FASTMATH, kernel
from minikv.cpu.tiles import in_panels
from minikv.machine import attention as choice


@kernel
def exp_of(x, out):
    for i in range(len(x)):
        out[i] = kernels.exp(x[i])


# ── Kernels ───────────────────────────────────────────────────────────────────


MET = Counter()


@meets(MET, {
    "other lengths": 12, "several blocks": 20, "a block that is not full": 20,
    "groups of heads": 25, "a window that hides": 12, "a chunk after a prefix": 8,
})  # fmt: skip
@given(
    lens=st.lists(st.integers(1, 70), min_size=1, max_size=4), block_size=st.integers(1, 64),
    kv_heads=st.integers(1, 3), group=st.integers(1, 4), head_dim=st.sampled_from([2, 16, 24, 64]),
    window=st.sampled_from([0, 1, 7, 33]), chunk=st.integers(1, 70),
)  # fmt: skip
@settings(max_examples=60)
def test_attention_equals_the_oracle(lens, block_size, kv_heads, group, head_dim, window, chunk):
    values, kv, tables = scattered(lens, block_size, kv_heads, head_dim)
    chunks = [min(chunk, n) for n in lens]
    meet_contexts(MET, lens, chunks, block_size, group, window)
    heads = kv_heads * group
    q = torch.randn(sum(chunks), heads, head_dim)
    starts = np.cumsum([0, *chunks])
    arrays = kv.numpy(), tables.numpy(), np.array(lens)
    found = torch.full_like(q, torch.nan)
    items = len(lens) * kv_heads
    for first, last in ((0, items // 2), (items // 2, items)):
        kernels.attend_prefill(q.numpy(), *arrays, starts, window, found.numpy(), first, last)
    for row, one in enumerate(values):
        queries = q[starts[row] : starts[row + 1]]
        expected = naive_attention(queries, one[:, 0], one[:, 1], window or None)
        torch.testing.assert_close(found[starts[row] : starts[row + 1]], expected)
    last_ones = starts[1:] - 1
    decoded = torch.full((len(lens), heads, head_dim), torch.nan)
    kernels.attend_decode(q[last_ones].numpy(), *arrays, window, decoded.numpy(), 0, items)
    torch.testing.assert_close(decoded, found[last_ones])


@given(
    rows=st.integers(0, 40), size=st.integers(1, 40), outputs=st.integers(1, 99),
    to=st.integers(0, 3), add=st.booleans(), is_bfloat16=st.booleans(),
)  # fmt: skip
def test_matmul(rows, size, outputs, to, add, is_bfloat16):
    torch.manual_seed(0)
    size *= 1 + is_bfloat16
    x, weight = torch.randn(rows, size), torch.randn(outputs, size)
    panels = in_panels(weight.numpy())
    if is_bfloat16:
        panels, weight = in_panels(plain(weight.bfloat16())), weight.bfloat16().float()
        assert panels.nbytes == -(-outputs // kernels.UNIT) * kernels.UNIT * size * 2
    out = torch.randn(rows, to + outputs + 2)
    expected, first = out.clone(), outputs // 3 // kernels.UNIT * kernels.UNIT
    columns = slice(to + first, to + outputs)
    expected[:, columns] = x @ weight[first:].T + (out[:, columns] if add else 0)
    kernels.matmul(x.numpy(), panels, out.numpy(), to, add, first, outputs)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@kernel
def dots(q, codes, begin, stride, count, out):
    tiles.dot_rows(q, 0, len(q), codes, begin, stride, count, out, 1)


@kernel
def sums(weights, codes, begin, stride, count, out):
    tiles.add_rows(weights, 1, 0, len(out), codes, begin, stride, count, out)


@pytest.mark.parametrize("dtype", ["float32", "uint16", "int8", "uint8"])
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_rows_of_floats_and_codes(dtype, dim):
    rng, count = np.random.default_rng(dim), 21
    numbers = rng.integers(-100, 100, (count + 2, 2, dim))
    codes, values = numbers.astype(dtype), numbers.astype(np.float32)
    if dtype == "uint16":  # bfloat16
        codes = (values.view(np.uint32) >> 16).astype(dtype)
    if dtype == "uint8":  # int4
        codes = codes[:, :, : dim // 2].copy()
        values = np.concatenate([codes & 15, codes >> 4], -1).astype(np.float32)
    values = values[1 : 1 + count, 1]
    place = 3 * codes.shape[2], 2 * codes.shape[2], count
    for heads in range(1, tiles.HEADS + 1):
        q = rng.standard_normal((heads, dim), np.float32)
        scores = np.full((heads, 1 + count + tiles.KEYS), 7, np.float32)
        dots(q, codes, *place, scores)
        np.testing.assert_allclose(scores[:, 1 : 1 + count], q @ values.T, 1e-4, 1e-2)
        assert (scores[:, 0] == 7).all()
        weights = rng.standard_normal((heads, count + 3), np.float32)
        found = rng.standard_normal((heads, dim), np.float32)
        expected = found + weights[:, 1 : 1 + count] @ values
        sums(weights, codes, *place, found)
        np.testing.assert_allclose(found, expected, 1e-4, 1e-2)


@given(size=st.integers(0, 300), num_chunks=st.integers(1, 40), multiple=st.sampled_from([1, 32]))
def test_chunks_cover_all_and_the_larger_ones_come_first(size, num_chunks, multiple):
    bounds = [kernels._bounds(size, i, num_chunks, multiple) for i in range(num_chunks)]
    assert [0, *(last for _, last in bounds)] == [*(first for first, _ in bounds), size]
    units = [-(-(last - first) // multiple) for first, last in bounds]
    assert units == sorted(units, reverse=True) and units[0] - units[-1] <= 1


@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 90)), max_size=12),
    num_decodes=st.integers(0, 12), window=st.sampled_from([0, 1, 20]),
    kv_heads=st.integers(1, 3), num_chunks=st.integers(1, 9),
)  # fmt: skip
def test_chunks_of_attention_cover_all_with_about_the_same_work(
    rows, num_decodes, window, kv_heads, num_chunks
):
    queries = [1 if row < num_decodes else count for row, (_, count) in enumerate(rows)]
    lens = np.array([before + count for (before, _), count in zip(rows, queries, strict=True)], int)
    starts, border = np.cumsum([0, *queries]), min(num_decodes, len(rows)) * kv_heads
    args = lens, starts, window, kv_heads, border
    shares = [kernels.share(*args, i, num_chunks) for i in range(num_chunks)]
    items = len(rows) * kv_heads
    assert [0, *(last for _, last in shares)] == [*(first for first, _ in shares), items]
    work = []
    for row, (length, count) in enumerate(zip(lens, queries, strict=True)):
        keys = min(length - count // 2, window or length)
        work += kv_heads * [keys * (kernels.DECODE if row < num_decodes else count)]
    for first, last in shares:
        most = max(work[first:last], default=0)
        assert sum(work[first:last]) <= sum(work) / num_chunks + most


def test_exp():
    x = np.linspace(-86, 87, 10_001).astype(np.float32)
    found = np.empty_like(x)
    exp_of(x, found)
    assert np.abs(found / np.exp(x.astype(np.float64)) - 1).max() < 4e-7
    exp_of(np.array([-np.inf, -1e9, 0], np.float32), found)
    assert found[0] < 1e-37 and found[1] < 1e-37 and found[2] == 1


def test_silu_mul():
    torch.manual_seed(0)
    gate_up, out = torch.randn(3, 20), torch.zeros(3, 10)
    kernels.silu_mul(gate_up.numpy(), out.numpy(), 2, 10)
    expected = torch.nn.functional.silu(gate_up[:, :10]) * gate_up[:, 10:]
    torch.testing.assert_close(out[:, 2:], expected[:, 2:])
    assert not out[:, :2].any()


# ── The engine ────────────────────────────────────────────────────────────────


def poison(engine):
    """NaN in every slot that no token owns."""
    owned = torch.zeros(engine.store.slots.shape[1], dtype=torch.bool)
    size = engine.config.block_size
    blocks = Counter(engine.cache.block_ids()) if engine.cache is not None else {}
    for block_id in blocks:
        owned[block_id * size : (block_id + 1) * size] = True
    for sequence in engine.scheduler.running:
        for position in range(sequence.num_computed):
            slot = sequence.table.block_ids[position // size] * size + position % size
            owned[slot] = True
    engine.store.slots[:, ~owned] = torch.nan


def run_poisoned(engine, prompts, params):
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    outputs = {}
    while engine.has_unfinished:
        poison(engine)
        step(engine, outputs)
    assert_empty(engine)
    return [outputs[i] for i in ids]


def cpu(lm, **changes):
    """In one group of layers, for `poison` asks the tables which slots are owned."""
    return Engine(lm, small(attention="cpu", kv_groups="one", **changes))


@pytest.mark.usual(pair="llama", block_size=4)
@pytest.mark.parametrize(
    ("block_size", "prefix_cache"), [(1, False), (4, True), (16, False), (64, True)]
)
def test_greedy_tokens(pair, block_size, prefix_cache):
    """Prompts longer and shorter than what one program takes, on every architecture."""
    prompts = pair.prompts(33, 17, 1, 33, 7, seed=5)
    prompts.append(prompts[0][:16] + prompts[1][:3])
    config = dict(block_size=block_size, num_blocks=640 // block_size, prefix_cache=prefix_cache)
    engine = cpu(pair.lm, **config)
    outputs = run_poisoned(engine, prompts, SamplingParams(max_tokens=12))
    assert [o.token_ids for o in outputs] == [pair.greedy(prompt, 12) for prompt in prompts]
    assert isinstance(engine.attention, CpuAttention) and engine.attention.program is not None


def test_new_weights(llama):
    """A program is of one transformer: other weights, another program."""
    prompt, params, engine = [1, 2, 3], SamplingParams(max_tokens=9), cpu(llama.lm)
    before = engine.generate([prompt], params)[0].token_ids
    state = {name: 1.1 * tensor for name, tensor in llama.hf.state_dict().items()}
    engine.update_weights(state)
    after = engine.generate([prompt], params)[0].token_ids
    assert after == naively(with_weights(llama.lm, state), prompt, 9) != before


def test_a_helper_that_comes_early_finds_nothing(llama, monkeypatch):
    """Before the first step, between two steps and after the last, no chunk is open. Once a new
    engine looked as if some were: a helper that began before the leader then counted chunks as
    done, and the leader went on without those that were still computed."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    engine = cpu(llama.lm)
    engine.generate([[1]], SamplingParams(max_tokens=1))
    program = engine.runner.attention.program
    parts = program.store, program.kv, program.attend
    fresh = cpu_step.Program(llama.lm.transformer, *parts, 1, (64, 64, 8))
    for one in (fresh, program):
        shared = one.buffers.shared
        before = shared.copy()
        kernels.run_step(*one.arguments, 0, 1000)  # helps, alone
        assert shared.tolist() == before.tolist()


def test_threads_that_help(checkpoint, monkeypatch):
    """Two engines in two threads of Python, each helped by others."""
    monkeypatch.setattr(cpu_step, "LONG", 60)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pairs = [checkpoint("llama"), checkpoint("qwen3")]
        prompts = [pair.prompts(5, 9, 20, 1, seed=1) for pair in pairs]
        found = [None, None]

        def work(i):
            engine = Engine(pairs[i].lm, EngineConfig(attention="cpu", num_blocks=64))
            for _ in range(5):
                outputs = engine.generate(prompts[i], SamplingParams(max_tokens=30))
                found[i] = [o.token_ids for o in outputs]

        workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(PATIENCE)
            assert not worker.is_alive()
        for pair, several, tokens in zip(pairs, prompts, found, strict=True):
            assert tokens == [pair.greedy(prompt, 30) for prompt in several]
        assert len(helpers._pool) >= 2
    finally:
        torch.set_num_threads(threads)


# ── Where it cannot be used ───────────────────────────────────────────────────


def test_auto_is_the_default(llama):
    found = Engine(llama.lm).attention
    assert type(found) is CpuAttention


def test_float16_falls_back(llama):
    lm = minikv.load(llama.folder, dtype=torch.float16)
    engine = Engine(lm)
    assert type(engine.attention) is TorchAttention
    assert len(engine.generate([[1, 2, 3]])[0].token_ids) == 64
    with pytest.raises(ValueError, match=r"'cpu' .*torch\.float16.* leave attention at 'auto'"):
        Engine(lm, EngineConfig(attention="cpu"))


def test_without_numba(llama, monkeypatch, caplog):
    monkeypatch.setattr(choice, "numba_problem", lambda: "ImportError: no module")
    choice.say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "minikv"):
        engines = [Engine(llama.lm) for _ in range(2)]
    assert [type(engine.attention) for engine in engines] == [TorchAttention] * 2
    [record] = caplog.records
    assert "no module" in record.getMessage()
    choice.say_once.cache_clear()
    with pytest.raises(ValueError, match=r"attention: 'cpu' needs Numba, .*no module.*'auto'"):
        Engine(llama.lm, EngineConfig(attention="cpu"))


BROKEN = """
import sys
sys.modules["numba"] = None
import minikv
from minikv.machine import numba_problem
assert "numba" in numba_problem(), numba_problem()
engine = minikv.Engine(minikv.load("tinypy"))
print(type(engine.attention).__name__, len(engine.generate(["def"])[0].token_ids))
"""


@pytest.mark.thorough
def test_a_process_without_numba():
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True)
    assert done.stdout.split()[0] == "TorchAttention", done.stderr
    assert "minikv" not in done.stderr or "Traceback" not in done.stderr


@pytest.mark.thorough
def test_a_transformer_of_another_kind_is_computed_layer_by_layer(llama, monkeypatch):
    monkeypatch.setattr(attention, "can_compile", lambda transformer: False)
    engine, prompts = cpu(llama.lm), llama.prompts(5, 20, seed=4)
    outputs = run_poisoned(engine, prompts, SamplingParams(max_tokens=8))
    assert [o.token_ids for o in outputs] == [llama.greedy(prompt, 8) for prompt in prompts]
    assert engine.attention.program is None


def test_what_was_compiled_is_of_these_sources(tmp_path, monkeypatch):
    """A step of int8 is compiled from functions in another file than its own."""

    def stamp():
        return compiler.MachineCodeCache(exp_of.py_func)._cache_file._source_stamp

    (tmp_path / "kernels.py").write_text("x = 1")
    monkeypatch.setattr(compiler, "SOURCES", [tmp_path])
    before = stamp()
    assert stamp() == before
    (tmp_path / "kernels.py").write_text("x = 10")
    assert stamp() != before


@pytest.mark.thorough
def test_another_process_compiles_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compiled, x = kernel(kernels.rms_norm.py_func), np.ones((2, 16), np.float32)
    arguments = x, x[0], np.float32(0), x.copy()
    with compiler.compiled_beside(compiled, *arguments):
        pass
    compiled(*arguments)
    assert sum(compiled.stats.cache_hits.values()) == 1
    with pytest.raises(OSError, match="of mine"), compiler.compiled_beside(compiled, *arguments):
        raise OSError("of mine")


def test_what_names_a_type_that_is_gone_is_compiled_again(tmp_path, monkeypatch):
    def twice(x):
        return 2 * x

    def hits():
        compiled = kernel(twice)
        assert compiled(3.0) == 6.0
        return sum(compiled.stats.cache_hits.values())

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert (hits(), hits()) == (0, 1)
    [index] = tmp_path.rglob("*.nbi")
    index.write_bytes(pickle.dumps(numba.__version__) + b"cminikv.cpu.kernels\nGone\n.")
    assert (hits(), hits()) == (0, 1)


@njit(fastmath=FASTMATH, error_model="numpy")  # not kept on disk: it must be of these kernels
def run_in_order(weights, buffers, order):
    for part in range(kernels.PHASES * len(weights.qkv) + 1):
        kernels._prepare(weights, buffers, part)
        for chunk in order:
            kernels._compute(weights, buffers, part, chunk, len(order))


@pytest.mark.thorough
def test_chunks_of_a_phase_may_be_computed_in_any_order(llama, monkeypatch):
    """Any may be late. With drafts a row reads K and V that other rows write in the same step."""
    rng, plain = np.random.default_rng(0), cpu_step.run_step

    def run_step(weights, buffers, num_chunks, patience):
        if num_chunks == 0:
            return plain(weights, buffers, num_chunks, patience)
        run_in_order(weights, buffers, rng.permutation(8))
        return 0

    monkeypatch.setattr(cpu_step, "run_step", run_step)
    monkeypatch.setattr(cpu_step, "compiled_beside", lambda *_: nullcontext())
    engine = fearless(cpu(llama.lm, speculative=Clairvoyant(wrong=0.1)))
    prompts = llama.prompts(3, 20, 40, seed=8)
    outputs = engine.generate(prompts, SamplingParams(max_tokens=30))
    assert [o.token_ids for o in outputs] == [llama.greedy(prompt, 30) for prompt in prompts]
    assert engine.stats().speculation.accepted > 30


def test_a_helper_that_is_about_to_be_free_takes_the_next_job():
    """It waits for Python's lock: left out, the whole step would be computed on one thread."""
    held, begun, done = threading.Event(), threading.Event(), threading.Event()
    never = []

    def first():
        begun.set()
        held.wait()

    helpers.offer(first, 1)
    assert begun.wait(PATIENCE)
    helpers.offer(done.set, 1)
    helpers.offer(lambda: never.append(1), 1)
    held.set()
    assert done.wait(PATIENCE)
    assert helpers._pool[0].jobs.empty() and not never


ENDS = """
import atexit, threading
atexit.register(lambda: print(threading.active_count()))  # runs after what minikv registers
import torch
torch.set_num_threads(2)
import minikv
from minikv.cpu import helpers
engine = minikv.Engine(minikv.load("tinypy"))
engine.add_request([1, 2, 3], minikv.SamplingParams(max_tokens=9))
engine.step(), engine.step()
assert len(helpers._pool) == 1
"""


@pytest.mark.thorough
def test_an_interpreter_ends_right_after_a_step():
    """Its helper still waits in compiled code, and must end before the interpreter does."""
    for _ in range(30):
        done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


SPINS = """
import os, signal, threading, time, torch
torch.set_num_threads(2)
import minikv

def num_threads():  # of the system, not of Python alone
    return len(os.listdir("/proc/self/task"))

engine = minikv.Engine(minikv.load("tinypy"))
engine.add_request([1, 2, 3], minikv.SamplingParams(max_tokens=9))
engine.step(), engine.step()
before, values = num_threads(), torch.ones(1 << 20)
values.sum()
assert num_threads() == before + 1
engine.step()
deadline = time.monotonic() + 120
while num_threads() > before and time.monotonic() < deadline:
    time.sleep(0.01)  # one that has ended is still listed for a moment
assert num_threads() == before
values.sum()
child = os.fork()
if child == 0:
    signal.alarm(120)  # ends it, if it waits for threads that it does not have
    engine.step()
    os._exit(0 if values.sum() == 1 << 20 else 3)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.thorough
@pytest.mark.skipif(not helpers._RUNTIMES, reason="torch has another runtime of OpenMP")
def test_torchs_threads_end_before_a_step():
    """They never stop spinning otherwise. And a process that is forked is not left to wait."""
    environment = os.environ | {"OMP_WAIT_POLICY": "ACTIVE"}
    command = [sys.executable, "-W", "ignore", "-c", SPINS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_on_a_busy_machine_one_thread_computes(llama, monkeypatch):
    """After three steps that took longer than one thread would have, or nine in which others
    computed nothing. A step that was long in all, or one such step, changes nothing."""
    crowd, offers = cpu_step.Crowd(2), []
    fine = (0.01, 0.1, 0.5, 1), (0.0, 0.0006, 0.5, 1), (0.0, 0.0006, 0.0, 0), (0.001, 0.003, 0.5, 2)
    for step_of in [*fine] * 500 + [(0.003, 0.004, 0.5, 1)]:
        crowd.judge(*step_of)
        assert not crowd.goes_alone()
    for _ in range(20):
        crowd.judge(0.0, 0.001, 0.5, 1)
    bad = (0.003, 0.004, 0.5, 1), (0.001, 0.003, 0.01, 1), (0.003, 0.004, 0.7, 1)
    for turn in range(3):  # found busy; back together, and a step is bad: twice as long
        for one in bad[: 1 if turn else 3]:
            assert not crowd.goes_alone()
            crowd.judge(*one)
        steps = 1
        while crowd.goes_alone():
            steps += 1
        assert steps == 16 << turn
    for one in [(0.0, 0.001, 0.5, 1)] * 8 + [(0.0, 0.001, 0.0, 1)] * 9:
        assert not crowd.goes_alone()  # after good steps, as if it had never been busy
        crowd.judge(*one)
    assert crowd.goes_alone()  # nine steps without help

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cpu_step.Crowd, "judge", lambda self, *step_of: JUDGE(self, 1, 1, 0, 0))
    monkeypatch.setattr(helpers, "offer", lambda job, count: offers.append(count))
    (prompt,) = llama.prompts(9, seed=3)
    engine = cpu(llama.lm)
    assert engine.generate([prompt], SamplingParams(max_tokens=40))[0].token_ids == llama.greedy(
        prompt, 40
    )
    assert offers == [1] * 4  # of 40 steps: three, then 15 alone, one, then 31 alone


JUDGE = cpu_step.Crowd.judge
