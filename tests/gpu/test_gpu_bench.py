"""What `bench gpu` would measure, at tiny sizes and by a clock that makes times up.

That inputs, outputs, bytes, shares and verdicts are right needs no GPU.
"""

import json
from types import SimpleNamespace

import paged_case
import pytest
import torch

from minikv.course.bench import gpu, gpu_clock, gpu_kernels, harness
from minikv.course.bench.gpu_kernels import Case
from minikv.course.bench.random_model import random_model
from minikv.course.commands import main
from minikv_kernels.mode import INTERPRETED

DEVICE = torch.device(paged_case.DEVICE)
pytestmark = pytest.mark.usefixtures("quick_interpreter")
interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="compiles for minutes where there is a GPU: run the command itself"
)
SHAPE = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_layers=1, num_heads=2,
             num_kv_heads=1, max_context=64)  # fmt: skip
STEPS = gpu.DecodeSteps(context=20, steps=2, warm_up=1, batch_tokens=40)


class MadeUpClock:
    """Runs the work once; every call takes 2 s."""

    device, l2_bytes, free = DEVICE, 4000, 10**12

    def __init__(self, command=""):
        pass

    def free_bytes(self):
        return self.free

    def captured(self, work):
        return lambda: work()

    def seconds(self, work):
        work()
        return 2.0


@pytest.fixture
def small(monkeypatch):
    """Small copies and products, one launch of each region."""
    monkeypatch.setattr(gpu_kernels, "LAUNCHES", 1)
    monkeypatch.setattr(gpu_clock, "COPIED", 4096)
    monkeypatch.setattr(gpu_clock, "SIDE", 16)
    monkeypatch.setattr(gpu, "CudaClock", MadeUpClock)


# ── Kernels ───────────────────────────────────────────────────────────────────

CASES = {
    "even": Case(16, (40, 40), block_size=16, num_heads=4, num_kv_heads=2),
    "skewed": Case(16, (3, 70, 9), block_size=4, num_heads=4, num_kv_heads=2),
    "int8": Case(16, (40, 33), "int8", block_size=16, num_heads=4, num_kv_heads=2),
    "prefill": Case(16, (37,), "prefill", block_size=8, num_heads=4, num_kv_heads=2),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_operations_equal_an_independent_count(name):
    case = CASES[name]
    slots = sum(case.lens)  # no two contexts share one
    queries = slots if name == "prefill" else len(case.lens)
    k_or_v = 16 * 1 + 2 if name == "int8" else 16 * 2  # codes and a scale, or bfloat16
    assert case.num_bytes == slots * 2 * (2 * k_or_v) + queries * 2 * (4 * 16 * 2)
    if name == "prefill":
        seen = sum(position + 1 for position in range(37))  # keys, over all queries
        exact = seen * 2 * (2 * 16) * 4  # q k^T, and the weights times v
        assert case.num_flops == pytest.approx(exact, rel=1 / 37)
    else:
        assert case.num_flops == 0


def test_what_the_goals_are_about():
    cases = {name: case for name, (case, _) in gpu_kernels.CASES.items()}
    # Llama's 8 KV heads of 64, K and V, two bytes: 2 KiB a token. 32 heads of q and out beside.
    assert cases["decode, head dim 64, batch 64, context 8k"].num_bytes == 64 * (8192 + 4) * 2048
    for other in (gpu_kernels.SKEWED, gpu_kernels.COARSE):
        assert cases[other].num_bytes == cases[gpu_kernels.FULL].num_bytes
    lens = cases[gpu_kernels.SKEWED].lens
    assert max(lens) > 10 * 4096 and 0 < min(lens) < 4096 / 4 and list(lens) != sorted(lens)
    for case in cases.values():
        for l2_bytes in (50_000_000, 126_000_000):
            assert (case.num_regions(l2_bytes) - 1) * case.num_bytes >= 2 * l2_bytes
            assert case.needed_bytes(l2_bytes) < 16e9


@pytest.mark.parametrize("name", CASES)
def test_attention_is_of_random_blocks_region_after_region(name, small):
    case, work = CASES[name], CASES[name].work(MadeUpClock())
    dealt = work.tables[work.tables >= 0].tolist()
    assert len(set(dealt)) == len(dealt), "a block is in two regions, or twice in one"
    assert dealt != sorted(dealt) and max(dealt) < case.num_blocks(4000) >= 1.25 * len(dealt)
    for tables in work.tables:
        held = [int((row >= 0).sum()) for row in tables]
        assert held == [-(-length // case.block_size) for length in case.lens]
    assert work.launches == len(work.tables) > 1
    work.poison()
    work.run()
    work.check()
    kept = work.out.clone()
    work.out[-1, -1, -1, -1] = float("nan")
    with pytest.raises(RuntimeError, match="not written"):
        work.check()
    work.out.copy_(kept.flip(0))  # as if the kernel had read another region
    with pytest.raises(RuntimeError, match="is wrong by"):
        work.check()


# ── Decode steps ──────────────────────────────────────────────────────────────


def test_the_model_has_the_size_of_llama_3_2_1b():
    c = gpu.SHAPE
    attention = c["hidden_size"] * 64 * 2 * (c["num_heads"] + c["num_kv_heads"])
    layer = attention + c["hidden_size"] * (3 * c["intermediate_size"] + 2)
    whole = (c["vocab_size"] + 1) * c["hidden_size"] + c["num_layers"] * layer
    assert whole == 1_235_814_400
    small = dict(vocab_size=10, hidden_size=64, intermediate_size=8, num_heads=1, num_kv_heads=1)
    _, size = random_model(**small, num_layers=2, max_context=9)
    assert size == 4 * (11 * 64 + 2 * (64 * 64 * 4 + 64 * (3 * 8 + 2)))


@pytest.fixture(scope="module")
def model():
    return random_model(**SHAPE, device=DEVICE)


def test_turns_count_what_the_steps_read(model, monkeypatch):
    contexts = []  # of each step: the keys that each row attends to

    class Recording(gpu.minikv.Engine):
        def step(self):
            outputs = super().step()
            contexts.append([len(o.prompt_ids) + len(o.token_ids) - 1 for o in outputs])
            return outputs

    monkeypatch.setattr(gpu.minikv, "Engine", Recording)
    rounds = gpu.decode_rounds(model[0], 3, STEPS, repeats=5)
    measured = contexts[-5 * STEPS.steps :]
    by_hand = [sum(map(sum, measured[at : at + 2])) for at in range(0, 10, 2)]
    assert [gpu.tokens_read(first, 2) for _, first in rounds] == by_hand
    assert all(seconds > 0 for seconds, _ in rounds)
    assert abs(sum(by_hand) / 30 - STEPS.context) <= 2
    with pytest.raises(ValueError, match="--repeats: 100 rounds"):
        gpu.decode_rounds(model[0], 1, STEPS, repeats=100)


def test_the_roofline_from_made_up_times(model, small, monkeypatch):
    lm, weight_bytes = model
    monkeypatch.setattr(gpu, "decode_rounds", lambda *_: [(4.0, [100, 50])] * 3)
    table = gpu.BenchTable("gpu", 3)
    gpu.add_steps(table, MadeUpClock(), gpu_clock.Copy(DEVICE), lm, weight_bytes, {2: 55}, STEPS)
    [row] = table.rows
    read = (100 + 50 + 101 + 51) * (2 * 1 * 1 * 64 * 4)
    assert row["%"].values == pytest.approx([100 * (2 * weight_bytes + read) / 8192 / 4.0] * 3)
    assert row["µs"].median == 2e6 and row["tokens/s"].median == 1.0


# ── The command ───────────────────────────────────────────────────────────────


@interpreted
def test_the_command_from_end_to_end(small, monkeypatch, tmp_path, capsys):
    """A call takes 2 s: so 4,096 bytes are copied twice, read and written, at 8,192 bytes/s."""
    cases = {
        gpu_kernels.FULL: (CASES["even"], 80), gpu_kernels.SKEWED: (CASES["skewed"], None),
        "prefill": (CASES["prefill"], 45), "large": (Case(256, (10**9,)), 1),
    }  # fmt: skip
    monkeypatch.setattr(gpu_kernels, "CASES", cases)
    monkeypatch.setattr(gpu, "SHAPE", SHAPE)
    monkeypatch.setattr(gpu, "GOALS", {1: 55})
    monkeypatch.setattr(gpu, "DecodeSteps", lambda: STEPS)
    file = tmp_path / "figures.json"
    assert main(["bench", "gpu", "--repeats", "2", "--json", str(file)]) == 0
    printed, rows = capsys.readouterr().out, json.loads(file.read_text())["tables"]["gpu"]["rows"]
    assert all(row["what"] in printed for row in rows) and "GB/s, read and written" in printed
    even, skewed, prefill, large, over, engine = rows
    limits = {"even": (even, 8192), "skewed": (skewed, 8192), "prefill": (prefill, 16**3)}
    for name, (row, limit) in limits.items():
        case, launches = CASES[name], CASES[name].num_regions(MadeUpClock.l2_bytes)
        share = 100 * (case.num_flops or case.num_bytes) * launches / 2 / limit
        assert row["%"]["values"] == pytest.approx([share] * 2)
        assert row["µs"]["median"] == 2e6 / launches
    assert large["of"].startswith("left out: needs ") and "%" not in large
    assert over["times"]["median"] == even["%"]["median"] / skewed["%"]["median"]
    assert engine["tokens/s"]["median"] > 0
    bounds = [row["goal"]["bound"] if "goal" in row else None for row in rows]
    assert bounds == [80, None, 45, None, 1.25, 55]


def test_without_a_gpu_one_plain_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "gpu"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert gpu.COMMAND in line and "needs a CUDA GPU" in line
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("minikv_kernels.mode.INTERPRETED", True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Made up")
    assert main(["bench", "gpu"]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
    where = harness.environment()
    assert "Made up" in harness.headline(where) and "triton" in where["versions"]


def test_a_gpu_that_is_too_full_is_refused(small, monkeypatch, capsys):
    monkeypatch.setattr(MadeUpClock, "free", 10**9)
    assert main(["bench", "gpu"]) == 2
    assert "needs 6 GB of free memory" in capsys.readouterr().err


# ── The clock ─────────────────────────────────────────────────────────────────


def test_a_copy_and_a_product_count_what_they_do(small):
    copy, product = gpu_clock.Copy(DEVICE), gpu_clock.Product(DEVICE)
    assert copy.rate(MadeUpClock()) == 2 * (2 * 4096) / 2.0
    assert torch.equal(copy.target, copy.sources[1]) and not torch.equal(*copy.sources)
    assert product.rate(MadeUpClock()) == 2 * 16**3 / 2.0
    expected = product.x.float() @ product.weight.float().T
    torch.testing.assert_close(product.out.float(), expected, rtol=2e-2, atol=0.2)


@pytest.mark.parametrize(
    ("first", "calls"),
    [(2.0, 25), (50.0, 5), (1e-3, 1000)],  # 0.05 s of calls, but 5 at least and 1,000 at most
)
def test_a_time_is_the_median_of_many_calls(first, calls, monkeypatch):
    elapsed = [first, *([7.0] * (calls - 2) + [900.0, 800.0])]  # ms, by pairs of events
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda end: elapsed.pop(0))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    waits, done = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(done)))
    clock = object.__new__(gpu_clock.CudaClock)
    assert clock.seconds(lambda: done.append(1)) == 0.007
    assert waits == [2, 2 + calls]  # a warm-up and the first; then all, waited for once
    assert elapsed == []
