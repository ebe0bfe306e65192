"""What the GPU benchmarks would measure, at tiny sizes and with clocks that make figures up.

Whatever a figure is here, it is no measurement: files go to tmp_path, machines are called
"Made up". That inputs, checks, counts and verdicts are right needs no GPU.
"""

import importlib.util
import json
import math
import os
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton here (it is for Linux)", allow_module_level=True)

from minikv.__main__ import main
from minikv.course.bench import gpu, gpu_clock, gpu_goals, gpu_kernels, kernel_workloads, peers
from minikv.course.bench.goals_table import goals_table
from minikv.course.bench.harness import BenchTable, Race
from minikv.course.bench.kernel_workloads import Case, Contiguous, Workload
from minikv_kernels.mode import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = pytest.mark.usefixtures("quick_interpreter")
L2 = 4000  # bytes
interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="compiles for minutes where there is a GPU: run the command itself"
)
TINY = dict(head_dim=16, num_heads=4, num_kv_heads=2)
WHERE = {
    "machine": {key: "1.0" for key in gpu_goals.MACHINE} | {"gpu": "Made up GPU (no such thing)"},
    "date": "2000-01-01T00:00:00+00:00",
}


class MadeUpClock:
    """Runs the work once; says 1 s, 2 s, 3 s, …"""

    device, l2_bytes = DEVICE, L2

    def __init__(self, command=""):
        self.calls = []

    def require_memory(self, needed):
        pass

    def captured(self, work):
        return lambda: work()

    def seconds(self, work):
        work()
        self.calls.append(work)
        return float(len(self.calls))


def values(numel=200_000):
    return gpu_clock.random_values(numel, kernel_workloads.DTYPE, DEVICE)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Small copies and products, one lap, results in tmp_path."""
    monkeypatch.setattr(kernel_workloads, "LAUNCHES", 1)
    for module in (gpu_kernels, gpu_clock, gpu):
        monkeypatch.setattr(module, "COPIED", 4096)
    monkeypatch.setattr(gpu_kernels, "SIDE", 16)
    monkeypatch.setattr(gpu_goals, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_kernels, "CudaClock", MadeUpClock)
    monkeypatch.setattr(gpu_kernels, "where", lambda: WHERE)
    monkeypatch.setattr(gpu, "CudaClock", MadeUpClock)
    monkeypatch.setattr(gpu, "where", lambda: WHERE)


# ── Workloads ─────────────────────────────────────────────────────────────────

CASES = {
    "even": Case(**TINY, lens=(40, 40), block_size=16),
    "skewed": Case(**TINY, lens=(3, 70, 9), block_size=4),
    "coarse": Case(**TINY, lens=(40, 40), block_size=64),
    "one": Case(**TINY, lens=(150,), block_size=16),
    "prefill": Case(**TINY, lens=(37,), block_size=8, prefill=True),
}


@pytest.fixture(params=CASES)
def workload(request, small):
    return Workload(CASES[request.param], values(), L2)


def test_blocks_are_random_dealt_once_and_fewer_than_the_pool(workload):
    case = workload.case
    dealt = workload.tables[workload.tables >= 0].tolist()
    assert len(set(dealt)) == len(dealt), "a block is in two regions, or twice in one"
    assert len(workload.kv) >= 1.25 * len(dealt)
    assert max(dealt) < len(workload.kv)
    assert dealt != sorted(dealt)
    for tables in workload.tables:
        for row, length in zip(tables, case.lens, strict=True):
            held = row[row >= 0]
            assert len(held) == -(-length // case.block_size)
            assert (row[: len(held)] >= 0).all()
            if len(held) > 4:
                assert (held.diff() != 1).any(), "the blocks of a context lie side by side"


def test_between_two_launches_on_a_region_the_others_fill_the_cache_twice(workload):
    slot_bytes = workload.kv[0, 0].nbytes  # K and V of a token
    others = (len(workload.tables) - 1) * sum(workload.case.lens) * slot_bytes
    assert others >= 2 * L2
    order = []
    workload.launch = order.append
    workload.laps = 3
    workload.run()
    assert order == list(range(len(workload.tables))) * 3
    assert workload.launches == len(order)


def test_bytes_and_operations_equal_an_independent_count(workload):
    case = workload.case
    slots = set()
    for row, length in zip(workload.tables[0].tolist(), case.lens, strict=True):
        slots |= {(row[key // case.block_size], key % case.block_size) for key in range(length)}
    assert case.kv_bytes == len(slots) * workload.kv[0, 0].nbytes
    if case.prefill:
        [length] = case.lens
        seen = sum(position + 1 for position in range(length))  # keys, over all queries
        exact = seen * 2 * (2 * case.head_dim) * case.num_heads  # q k^T, and the weights times v
        assert case.prefill_flops == pytest.approx(exact, rel=1 / length)
        assert case.prefill_flops <= exact


def test_values_are_random_and_enough(workload):
    assert workload.kv.nbytes <= values().nbytes
    numbers = workload.kv.float()
    assert abs(float(numbers.mean())) < 0.1 and abs(float(numbers.std()) - 1) < 0.1
    assert workload.case.num_values(L2) == workload.kv.numel()


def test_every_region_is_right_after_a_run(workload):
    workload.poison()
    assert workload.out.isnan().all()
    workload.run()
    assert workload.check() < kernel_workloads.TOLERANCE


def test_an_output_that_was_not_written_is_found(workload):
    workload.run()
    workload.out[-1, -1, -1, -1] = float("nan")
    with pytest.raises(RuntimeError, match="not written"):
        workload.check()


def test_a_wrong_output_is_found(workload):
    workload.run()
    workload.tables = workload.tables.flip(0)  # as if the kernel had read another region
    with pytest.raises(RuntimeError, match="is wrong by"):
        workload.check()


@pytest.mark.parametrize("name", ["even", "one", "prefill"])
def test_torchs_attention_on_contiguous_values_is_the_same_work(name, small, monkeypatch):
    case, pool = CASES[name], values()
    workload = Workload(case, pool, L2)
    other = Contiguous(workload, pool)
    assert [kv.nbytes for kv in other.kv] == [case.kv_bytes] * len(workload.tables)
    outs, attention = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: outs.append(attention(*args, **kwargs)),
    )
    other.run()
    assert len(outs) == workload.launches
    # The same K and V, laid into blocks in order, give the same output.
    kv = other.kv[0].permute(1, 3, 0, 2, 4)  # (S, L, 2, K, D)
    blocks = -(-case.lens[0] // case.block_size)
    padded = torch.zeros(len(kv), blocks * case.block_size, *kv.shape[2:], dtype=kv.dtype)
    padded[:, : case.lens[0]] = kv.cpu()
    workload.kv = padded.view(-1, *case.block_shape).to(DEVICE)
    workload.tables = torch.arange(len(workload.kv), device=DEVICE).view(1, len(kv), blocks)
    workload.launch(0)
    out = outs[0][0].transpose(0, 1) if case.prefill else outs[0].squeeze(2)
    torch.testing.assert_close(out, workload.out[0], rtol=2e-2, atol=2e-2)


def test_a_prefill_of_two_prompts_is_refused():
    with pytest.raises(ValueError, match="one prompt"):
        Case(**TINY, lens=(3, 4), prefill=True)


def test_skewed_lengths_have_the_same_sum():
    lens = kernel_workloads.skewed(64 * 4096, 64)
    assert len(lens) == 64 and sum(lens) == 64 * 4096
    assert max(lens) > 10 * 4096 and 0 < min(lens) < 4096 / 4
    assert list(lens) != sorted(lens)


def test_what_the_goals_measure():
    cases = gpu_kernels.all_cases()
    assert len(gpu_kernels.EVEN) == 2 * 2 * 5
    assert all((case.num_heads, case.num_kv_heads) == (32, 8) for case in cases.values())
    assert {c.block_size for name, c in cases.items() if name != gpu_kernels.COARSE} == {16}
    # Llama's 8 KV heads of 64, K and V, two bytes: 2 KiB a token.
    assert cases[gpu_kernels.decode(64, 64, "8k")].kv_bytes == 64 * 8192 * 2048
    assert cases[gpu_kernels.decode(128, 1, "8k")].kv_bytes == 8192 * 4096
    assert cases[gpu_kernels.SKEWED].kv_bytes == cases[gpu_kernels.FULL].kv_bytes
    assert cases[gpu_kernels.COARSE].kv_bytes == cases[gpu_kernels.FULL].kv_bytes
    assert cases[gpu_kernels.PREFILL].prefill_flops == 4 * 8192 * 8192 / 2 * 32 * 128
    for case in cases.values():
        for l2_bytes in (50_000_000, 126_000_000):
            assert (case.num_regions(l2_bytes) - 1) * case.kv_bytes >= 2 * l2_bytes
            assert case.num_values(l2_bytes) * 2 < 16e9


# ── Peers and clock ───────────────────────────────────────────────────────────


def test_a_copy_counts_bytes_read_and_written():
    copy = gpu_clock.Copy(values(1000))
    copy.work()
    assert torch.equal(copy.target, copy.sources[1])
    assert copy.bytes == 2 * (2 * 500 * 2)  # two copies of 500 numbers of two bytes
    assert copy.rate(MadeUpClock()) == copy.bytes / 1.0
    assert not torch.equal(*copy.sources)


def test_a_product_counts_multiplications_and_additions():
    product = gpu_clock.Product(values(2 * 32**2))
    product.work()
    expected = product.x.float() @ product.weight.float().T
    torch.testing.assert_close(product.out.float(), expected, rtol=2e-2, atol=0.2)
    assert product.flops == 2 * 32 * 32 * 32
    assert product.rate(MadeUpClock()) == product.flops / 1.0


class MadeUpEvent:
    elapsed: list[float]  # ms, what each pair of events will say

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def elapsed_time(self, end):
        return MadeUpEvent.elapsed.pop(0)


@pytest.mark.parametrize(
    ("first", "calls"),
    [(2.0, 25), (50.0, 5), (1e-3, 1000)],  # 0.05 s of calls, but 5 at least and 1,000 at most
)
def test_a_time_is_the_median_of_many_calls(first, calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", MadeUpEvent)
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(done)))
    MadeUpEvent.elapsed = [first, *([7.0] * (calls - 2) + [900.0, 800.0])]
    done = []
    made_up = object.__new__(gpu_clock.CudaClock)
    assert made_up.seconds(lambda: done.append(1)) == 0.007  # milliseconds to seconds
    assert waits == [2, 2 + calls]  # a warm-up and the first; then all, waited for once
    assert MadeUpEvent.elapsed == []


def test_a_graph_is_captured_after_the_work_has_run(monkeypatch):
    events = []

    class Stream:
        def wait_stream(self, other):
            events.append("wait")

    class Graph:
        def replay(self):
            events.append("replay")

    @contextmanager
    def during(name):
        events.append(name)
        yield
        events.append(f"end {name}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: during("side"))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: during("capture"))
    replay = object.__new__(gpu_clock.CudaClock).captured(lambda: events.append("work"))
    replay()
    ran = ["wait", "side", "work", "work", "end side", "wait"]
    assert events == [*ran, "capture", "work", "end capture", "replay"]


def test_where_names_all_that_a_result_must_name(monkeypatch):
    device = SimpleNamespace(
        name="Made up", major=9, minor=0, total_memory=1, L2_cache_size=1, multi_processor_count=1
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(torch.version, "cuda", "0.0")
    found = gpu_clock.where()
    assert set(gpu_goals.MACHINE) <= found["machine"].keys()
    assert all(isinstance(found["machine"][key], str) for key in gpu_goals.MACHINE)


def test_measuring_poisons_checks_and_times_each_in_every_round(small):
    cases = {"decode": CASES["skewed"], "prefill": CASES["prefill"]}
    poisoned = []

    class Watching(MadeUpClock):
        def captured(self, work):
            return work  # still bound to its workload

        def seconds(self, work):
            if isinstance(work.__self__, Workload):
                poisoned.append(bool(work.__self__.out.isnan().all()))
            return super().seconds(work)

    found = gpu_kernels.measure(cases, Watching(), 3)
    assert poisoned == [True] * (2 * 2 * 3)  # cases, graph and eager, rounds
    assert len(found["copy"]) == len(found["product"]) == 3
    for name in cases:
        assert len(found["graph"][name]) == len(found["eager"][name]) == 3
        assert len(found["error"][name]) == 6
    assert len(found["torch"]["prefill"]) == 3
    assert found["torch"]["decode"] == []  # torch has no contexts of several lengths
    # The clock says 1 s more with each call; a call is of several launches.
    launches = Workload(cases["decode"], values(), L2).launches
    assert found["graph"]["decode"][0] * launches == 3.0
    assert found["eager"]["decode"][0] * launches == 4.0


def test_figures_from_made_up_times():
    cases = gpu_kernels.all_cases()
    copy, product = [4e12, 2e12, 1e12], [8e14, 4e14, 2e14]
    # The i-th case takes i times as long as the copy takes for as many bytes.
    times = {name: place for place, name in enumerate(cases, 1)}
    graph = {name: [c.kv_bytes / rate * times[name] for rate in copy] for name, c in cases.items()}
    slow = gpu_kernels.decode(64, 24, "4k")
    graph[slow][1] *= 80
    graph[gpu_kernels.SKEWED] = [3 * seconds for seconds in graph[gpu_kernels.FULL]]
    graph[gpu_kernels.COARSE] = [seconds / 1.25 for seconds in graph[gpu_kernels.FULL]]
    graph[gpu_kernels.PREFILL] = [
        cases[gpu_kernels.PREFILL].prefill_flops / rate * 4 for rate in product
    ]
    found = gpu_kernels.figures(cases, {"graph": graph, "copy": copy, "product": product})
    worst = max(times[name] for name in gpu_kernels.EVEN)
    expected = {
        "decode-64-4k": [1 / times["decode, head dim 64, batch 64, context 4k"]] * 3,
        "decode-64-8k": [1 / times["decode, head dim 64, batch 64, context 8k"]] * 3,
        "decode-128-4k": [1 / times["decode, head dim 128, batch 64, context 4k"]] * 3,
        "decode-128-8k": [1 / times["decode, head dim 128, batch 64, context 8k"]] * 3,
        "floor-64-batch-8": [times["decode, head dim 64, batch 8, context 4k"]] * 3,
        "floor-128-batch-1": [times["decode, head dim 128, batch 1, context 8k"]] * 3,
        "no-cliff": [1 / worst, 1 / (80 * times[slow]), 1 / worst],  # the worst of each round
        "skewed": [3] * 3,
        "block-size": [1.25] * 3,
        "prefill-128-8k": [0.25] * 3,
    }
    assert found.keys() == {
        name for name, goal in gpu_goals.GOALS.items() if goal.bench == "kernels"
    }
    for name, ratios in found.items():
        assert ratios == pytest.approx(expected[name]), name


# ── The commands ──────────────────────────────────────────────────────────────


def tiny_cases():
    """All names of the real cases, each a case that takes no time."""
    return {
        name: Case(16, (5,), block_size=4, prefill=case.prefill, num_heads=1, num_kv_heads=1)
        for name, case in REAL.items()
    }


REAL = gpu_kernels.all_cases()


def test_the_kernels_command_from_end_to_end(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_kernels, "all_cases", tiny_cases)
    monkeypatch.setattr(MadeUpClock, "l2_bytes", 100)
    other = tmp_path / "elsewhere"
    other.mkdir()
    assert main(["bench", "kernels", "--repeats", "3", "--json", str(other / "figures.json")]) == 0
    printed = capsys.readouterr().out
    name = "made-up-gpu-no-such-thing.kernels.json"
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", name]
    written = json.loads((tmp_path / name).read_text())
    assert (other / "figures.json").exists()
    assert written["machine"] == WHERE["machine"] and written["repeats"] == 3
    assert {case["regions"] for case in written["cases"].values()} == {2}
    assert written["cases"].keys() == written["measured"]["graph"].keys() == REAL.keys()
    for goal_id, goal in gpu_goals.GOALS.items():
        if goal.bench == "kernels":
            assert goal.text in printed
            figure = written["goals"][goal_id]
            assert figure["low"] <= figure["value"] <= figure["high"]
            assert figure["met"] == goal.met(figure["value"])
    [result] = gpu_goals.results()
    assert result.machine["gpu"] == "Made up GPU (no such thing)"


TINY_MODEL = gpu.SHAPE | dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, vocab_size=300,
)  # fmt: skip
TINY_SIZES = gpu.Sizes(
    batches=(1, 8), context=20, steps=2, warm_up=1, batch_tokens=40, requests=2, new_tokens=3
)


@pytest.fixture(scope="module")
def pair():
    return gpu.make_pair(TINY_MODEL, DEVICE, torch.float32)


def test_both_sides_have_the_same_weights(pair):
    lm, peer = pair
    ids = torch.arange(1, 12)
    expected = peer(ids[None].to(DEVICE)).logits[0]
    torch.testing.assert_close(lm.logits(ids.tolist()), expected, rtol=1e-4, atol=1e-4)
    assert lm.config.rope_scaling["rope_type"] == "llama3"


def test_the_shape_is_the_one_of_llama_3_2_1b():
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**gpu.SHAPE))
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_235_814_400
    assert model.config.head_dim == 64 and model.config.tie_word_embeddings


def test_windows_count_what_the_steps_read(pair, small):
    lm, _ = pair
    batch, repeats = 3, 5
    contexts = []  # of each step of decodes alone: the keys that each row attends to

    class Recording(gpu.minikv.Engine):
        def step(self):
            outputs = super().step()
            contexts.append([len(o.prompt_ids) + len(o.token_ids) - 1 for o in outputs])
            return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu.minikv, "Engine", Recording)
        windows = gpu.decode_windows(lm, batch, TINY_SIZES, repeats)
    measured = contexts[-repeats * TINY_SIZES.steps :]
    assert all(len(step) == batch for step in measured)
    by_hand = [sum(map(sum, measured[at : at + 2])) for at in range(0, len(measured), 2)]
    assert [window.kv_tokens for window in windows] == by_hand
    assert [window.tokens for window in windows] == [batch * TINY_SIZES.steps] * repeats
    assert all(window.seconds > 0 for window in windows)
    around = sum(map(sum, measured)) / sum(map(len, measured))
    assert abs(around - TINY_SIZES.context) <= 2


def test_rounds_that_do_not_fit_into_the_context(pair):
    with pytest.raises(ValueError, match="longer than"):
        gpu.decode_windows(pair[0], 1, TINY_SIZES, 100)


def test_the_roofline_from_made_up_times(pair, small, monkeypatch):
    lm, peer = pair
    # A window of 2 steps that took 4 s and read K and V of 1,000 tokens.
    monkeypatch.setattr(gpu, "decode_windows", lambda *_: [gpu.Window(4.0, 16, 2, 1000)] * 3)
    monkeypatch.setattr(gpu.Copy, "rate", lambda self, clock: 1e6)
    table = BenchTable("gpu", 3)
    figures = gpu.decode_steps(lm, peer, MadeUpClock(), TINY_SIZES, 3, table)
    weights = sum(tensor.nbytes for tensor in peer.state_dict().values())
    weights -= peer.lm_head.weight.nbytes  # the embedding once more
    share = (2 * weights + 1000 * 2 * 1 * 1 * 16 * 4) / 1e6 / 4
    assert figures == {"engine-1": [share] * 3, "engine-8": [share] * 3}
    assert [str(row["tokens/s"]) for row in table.rows] == ["4 (4..4)"] * 2
    assert [goal.bound for goal in table.goals] == [0.55, 0.55]


def test_whole_calls_from_made_up_times(pair, small, monkeypatch):
    def race(contenders, inputs, progress):
        assert len(inputs) == 4 and [len(prompt) for prompt in inputs[0]] == [20, 20]
        assert inputs[0] != inputs[1]
        return Race({name: [2.0 + 10 * i] * 3 for i, name in enumerate(contenders)}, {})

    def fastest(peer, ways, inputs, sizes):
        return (None, {"a way": "no"}) if "static cache" in ways else (list(ways)[-1], {})

    monkeypatch.setattr(gpu, "race", race)
    monkeypatch.setattr(gpu, "_fastest", fastest)
    table = BenchTable("gpu", 3)
    figures = gpu.whole_calls(*pair, TINY_SIZES, 3, table)
    assert figures == {"generate": [6.0] * 3, "generate_batch": [11.0] * 3}
    rows = {row["what"]: row for row in table.rows}
    assert rows["whole calls, compiled generate, a way"]["is"] == "failed: no"
    assert rows["whole calls, minikv"]["tokens/s"].median == 2 * 3 / 2.0
    assert rows["whole calls, generate_batch, with CUDA graphs"]["figure"].median == 11.0
    assert sum(goal is not None for goal in table.goals) == 2


@interpreted
def test_the_gpu_command_from_end_to_end(pair, small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "make_pair", lambda *_: pair)
    monkeypatch.setattr(gpu, "Sizes", lambda: replace(TINY_SIZES, batches=(1,)))
    assert main(["bench", "gpu", "--repeats", "3"]) == 0
    printed = capsys.readouterr().out
    name = "made-up-gpu-no-such-thing.gpu.json"
    assert os.listdir(tmp_path) == [name] and name in printed
    [result] = gpu_goals.results()
    assert set(result.goals) == {"engine-1", "generate", "generate_batch"}
    rows = json.loads((tmp_path / name).read_text())["measured"]
    assert [row["what"] for row in rows[:2]] == ["decode steps, batch 1", "whole calls, minikv"]
    assert "failed" not in printed
    shown = str(goals_table())
    assert "Made up GPU (no such thing)" in shown and "engine, batch 256" in shown


@interpreted
@pytest.mark.parametrize("way", ["generate", "generate_batch"])
def test_transformers_says_the_engines_tokens(pair, way, small):
    lm, peer = pair
    prompts = peers.random_prompts(lm, [9, 9], seed=0)
    expected = [lm.generate_naively(prompt, 3) for prompt in prompts]
    if way == "generate":
        assert gpu.generate(peer, prompts, 3) == expected
        assert gpu.generate(peer, prompts, 3, "static") == expected
    else:
        assert gpu.generate_batch(peer, prompts, 3, 8) == expected
        peer.destroy_cached_continuous_batching_manager()


def test_the_fastest_way_counts_and_one_that_fails_says_why(pair):
    def broken(prompts):
        raise NotImplementedError("not on this machine\nsecond line")

    def short(prompts):
        return [[1]] * len(prompts)

    ways = {"broken": broken, "short": short, "right": lambda prompts: [[1, 2, 3]] * len(prompts)}
    inputs = [[[5], [6]]] * 2
    best, failures = gpu._fastest(pair[1], ways, inputs, TINY_SIZES)
    assert best == "right"
    assert failures == {
        "broken": "NotImplementedError: not on this machine",
        "short": "RuntimeError: gave too few tokens",
    }
    for failing in ("broken", "short"):
        assert gpu._fastest(pair[1], {failing: ways[failing]}, inputs, TINY_SIZES)[0] is None


@pytest.mark.parametrize("command", ["kernels", "gpu"])
def test_without_a_gpu_one_plain_line(command, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_kernels, "measure", lambda *_: pytest.fail("was measured"))
    assert main(["bench", command]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert gpu_goals.COMMANDS[command] in line and "needs a CUDA GPU" in line


@pytest.mark.parametrize("command", ["kernels", "gpu"])
def test_fewer_than_three_rounds_are_refused(command, capsys):
    assert main(["bench", command, "--repeats", "2"]) == 2
    assert "at least 3 rounds" in capsys.readouterr().err


def test_the_interpreter_is_not_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("minikv_kernels.mode.INTERPRETED", True)
    with pytest.raises(ValueError, match="TRITON_INTERPRET is set"):
        gpu_clock.CudaClock("a command")


def test_a_gpu_that_is_too_small_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 10**9, 8 * 10**9))
    small_clock = object.__new__(gpu_clock.CudaClock)
    small_clock.device = DEVICE
    small_clock.require_memory(2 * 10**9)
    with pytest.raises(ValueError, match=r"3.0 GB free, and this takes 9.0 GB"):
        small_clock.require_memory(9 * 10**9)


def test_control_c_writes_nothing(small, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_kernels, "measure", interrupted)
    assert main(["bench", "kernels"]) == 130
    assert "nothing was written" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_said_first(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_kernels, "measure", lambda *_: pytest.fail("was measured"))
    assert main(["bench", "kernels", "--json", str(tmp_path / "no" / "figures.json")]) == 2
    assert str(tmp_path / "no") in capsys.readouterr().err


def test_help_says_what_is_measured(capsys):
    for command in ("kernels", "gpu"):
        with pytest.raises(SystemExit) as stop:
            main(["bench", command, "--help"])
        assert stop.value.code == 0
        printed = capsys.readouterr().out
        assert "--repeats" in printed and "--json FILE" in printed


# ── Goals and results ─────────────────────────────────────────────────────────


def judged(**figures):
    by_goal = {name.replace("_", "-"): values for name, values in figures.items()}
    return {"repeats": 3, "goals": gpu_goals.judge(by_goal)}


def test_a_goal_is_met_by_the_median():
    high = gpu_goals.GOALS["decode-64-4k"]
    assert high.aim == "≥ 80 %" and high.met(0.8) and not high.met(0.799)
    low = gpu_goals.GOALS["floor-128-batch-1"]
    assert low.aim == "≤ 2.5 ×" and low.met(2.5) and not low.met(2.51)
    found = gpu_goals.judge({"decode-64-4k": [0.9, 0.5, 0.81], "skewed": [1.3, 1.2, 1.4]})
    assert found["decode-64-4k"] == {
        "value": 0.81, "low": 0.5, "high": 0.9, "goal": [">=", 0.8], "met": True,
    }  # fmt: skip
    assert not found["skewed"]["met"]
    assert not gpu_goals.judge({"no-cliff": [0.9, 0.5, 0.6]})["no-cliff"]["met"]


def test_the_goals_are_those_that_were_set():
    assert {name: goal.aim for name, goal in gpu_goals.GOALS.items()} == {
        "decode-64-4k": "≥ 80 %", "decode-64-8k": "≥ 85 %",
        "decode-128-4k": "≥ 87 %", "decode-128-8k": "≥ 88 %",
        "floor-64-batch-8": "≤ 2 ×", "floor-128-batch-1": "≤ 2.5 ×", "no-cliff": "≥ 70 %",
        "skewed": "≤ 1.25 ×", "block-size": "≤ 1.05 ×", "prefill-128-8k": "≥ 45 %",
        "engine-1": "≥ 55 %", "engine-8": "≥ 55 %", "engine-64": "≥ 65 %", "engine-256": "≥ 70 %",
        "generate": "≥ 3 ×", "generate_batch": "≥ 3 ×",
    }  # fmt: skip
    assert [f"engine-{batch}" in gpu_goals.GOALS for batch in gpu.Sizes().batches] == [True] * 4


def test_what_nobody_measured_says_so(tmp_path):
    table = goals_table(tmp_path / "no such folder")
    header, *lines = table.rows()
    assert header[2:] == ("measured",)
    assert [line[0] for line in lines] == [goal.text for goal in gpu_goals.GOALS.values()]
    assert {line[2] for line in lines} == {"not measured"}
    assert all(command in table.caption for command in gpu_goals.COMMANDS.values())
    assert table._repr_html_().count("not measured") == len(gpu_goals.GOALS)
    assert table.markdown().splitlines()[1] == "| --- | --- | --- |"
    assert len(table.markdown().splitlines()) == 2 + len(gpu_goals.GOALS)


def test_results_stand_under_their_machine(tmp_path):
    gpu_goals.save(
        "kernels", WHERE, judged(decode_64_4k=[0.8, 0.9, 0.7], skewed=[1.5] * 3), tmp_path
    )
    other = {**WHERE, "machine": WHERE["machine"] | {"gpu": "Made up 2"}}
    path = gpu_goals.save("gpu", other, judged(engine_1=[0.5, 0.6, 0.6]), tmp_path)
    assert path.name == "made-up-2.gpu.json"
    table = goals_table(tmp_path)
    header, *lines = table.rows()
    assert header[2:] == ("Made up 2", "Made up GPU (no such thing)")
    rows = dict(zip(gpu_goals.GOALS, lines, strict=True))
    assert rows["decode-64-4k"][2:] == ("not measured", "80 % (70 %..90 %), met")
    assert rows["skewed"][2:] == ("not measured", "1.50 × (1.50 ×..1.50 ×), missed")
    assert rows["engine-1"][2:] == ("60 % (50 %..60 %), met", "not measured")
    assert rows["generate"][2:] == ("not measured",) * 2
    assert "Not measured yet" not in table.caption
    for text in ("driver 1.0", "torch 1.0", "3 rounds", "2000-01-01"):
        assert text in table.caption


DAMAGES = {
    "no gpu": (lambda c: c["machine"].pop("gpu"), "gpu is None"),
    "no driver": (lambda c: c["machine"].update(driver=""), "driver is ''"),
    "another gpu": (lambda c: c["machine"].update(gpu="Made up 2"), "figures of Made up 2"),
    "no machine": (lambda c: c.pop("machine"), "has no machine"),
    "bench": (lambda c: c.update(bench="speed"), "bench is 'speed'"),
    "date": (lambda c: c.pop("date"), "has no date"),
    "repeats": (lambda c: c.update(repeats=1), "repeats is 1"),
    "goals": (lambda c: c.pop("goals"), "has no goals"),
    "goal": (lambda c: c["goals"].update(fast={}), "'fast' is no goal"),
    "of the other": (lambda c: c["goals"].update(generate={}), "'generate' is no goal"),
    "no figure": (lambda c: c["goals"].update(skewed=1.2), "skewed: is 1.2"),
    "spread": (lambda c: c["goals"]["skewed"].update(low=7), "in this order"),
    "nan": (lambda c: c["goals"]["skewed"].update(value=math.nan), "not positive numbers"),
    "met": (lambda c: c["goals"]["skewed"].update(met=True), "differ from the table of goals"),
    "bound": (lambda c: c["goals"]["skewed"].update(goal=["<=", 2]), "differ from the table"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_result_that_is_not_whole_is_refused(damage, tmp_path):
    path = gpu_goals.save("kernels", WHERE, judged(skewed=[1.5, 1.4, 1.6]), tmp_path)
    assert [result.bench for result in gpu_goals.results(tmp_path)] == ["kernels"]
    content = json.loads(path.read_text())
    change, said = DAMAGES[damage]
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError) as error:
        goals_table(tmp_path)
    assert said in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_a_file_that_is_no_result_is_refused(text, tmp_path):
    (tmp_path / "x.kernels.json").write_text(text)
    with pytest.raises(ValueError, match=r"x.kernels.json: not"):
        gpu_goals.results(tmp_path)


def test_a_result_that_would_be_refused_is_not_written(tmp_path):
    nameless = {**WHERE, "machine": WHERE["machine"] | {"torch": None}}
    with pytest.raises(ValueError, match="torch is None"):
        gpu_goals.save("kernels", nameless, judged(skewed=[1.5] * 3), tmp_path)
    assert os.listdir(tmp_path) == []


def test_what_is_kept_in_the_repository_is_whole():
    for result in gpu_goals.results():
        assert "made up" not in result.machine["gpu"].lower()
