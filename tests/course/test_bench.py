"""The benchmarks run, say where and how often they measured, and refuse what they cannot read.

No test looks at a clock: what a figure is depends on the machine, that it is there does not.
"""

import argparse
import json
import operator
import os
import statistics
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from thorough import thorough_after

from minikv import Engine, EngineConfig
from minikv.course.bench import (
    BENCHMARKS,
    ON_A_GPU,
    cpu,
    decode,
    harness,
    ladder,
    paging,
    peers,
    scheduler,
    server,
    tiers,
)
from minikv.course.commands import main
from minikv.course.workloads.running_table import RunningTable
from minikv.course.workloads.workload import Length
from minikv.serving import EngineLoop
from minikv.serving.app import make_app
from minikv.serving.server import served

SMALL = {
    "ladder": "",
    "decode": "--models tinypy --batch 1 3 --prompt 20 --tokens 5",
    "ragged": "--models tinypy --requests 5 --prompts 3 9 --outputs 2 6 --static 2 5",
    "cpu": "--layers 1 --prompt 20 --tokens 2",
    "step": "--batch 1 3 --context 20 --steps 2",
    "scheduler": "--running 4 64 --steps 20",
    "arrivals": "--requests 6 --seats 2",
    "server": "--clients 2 --prompt 8 --tokens 4",
    "radix": "--nodes 1000 2000 --requests 3 --tokens 20",
    "endless": "--tokens 40",
    "cluster": "--workers 1 2 --hidden 64 --layers 2 --length 64",
    "hybrid": "--hidden 64 --window 16 --lengths 64 --conversations 2 --turns 2 --contexts 40",
    "speculative": "--batch 1 2 --prompt 90 --tokens 6",
    "tiers": "--hidden 64 --layers 2 --length 64 --conversations 3 --turns 2",
    "paging": "--requests 20 --block-sizes 1 16 --pools 50 100",
    "kv": "--formats auto int8 int4 --contexts 32 --batch 2 --steps 1 --attention torch",
    "kv-quality": "--tokens 70 --modules 2",
}


def is_long(name: str) -> bool:
    """Also when small: some seconds."""
    return name not in ("step", "scheduler", "cluster", "paging", "kv", "hybrid")


@pytest.fixture
def small(monkeypatch):
    """What no option makes small."""
    monkeypatch.setattr(ladder, "RunningTable", partial(RunningTable, max_tokens=4))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(cpu, "SIZES", ((2, 32), (1, 64)))
    monkeypatch.setattr(cpu, "CONTEXT", 16)
    sizes = dict(hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1)
    monkeypatch.setattr(cpu, "LARGE", cpu.LARGE | sizes)
    step_times = tiers._step_times

    def some_step_times(lm, block_size, repeats):
        return step_times(lm, 16, repeats) if block_size == 16 else [1.0] * repeats

    monkeypatch.setattr(tiers, "_step_times", some_step_times)


@pytest.mark.parametrize("name", thorough_after(0, sorted(BENCHMARKS, key=is_long)))
def test_prints_a_table_and_writes_json(name, small, tmp_path, capsys):
    file = tmp_path / "figures.json"
    command = ["bench", name, "--repeats", "2", "--json", str(file), *SMALL[name].split()]
    assert main(command) == 0
    printed, written = capsys.readouterr().out, json.loads(file.read_text())

    assert os.listdir(tmp_path) == ["figures.json"]
    assert written["machine"]["cores"] >= 1 and written["machine"]["threads"] >= 1
    assert written["machine"]["cpu"] in printed
    assert written["versions"].keys() == {"python", "torch", "transformers", "minikv"}
    assert all(f"{key} {version}" in printed for key, version in written["versions"].items())
    assert written["repeats"] == 2
    table = written["tables"][name]
    assert table["title"] in printed
    without_clock = name in ("kv-quality", "cluster")
    assert table["repeats"] == (1 if without_clock else 2)
    spreads = [cell for row in table["rows"] for cell in row.values() if _is_spread(cell)]
    if name != "cluster":  # it has some where there is a server for the store
        assert bool(spreads) == (not without_clock)
    for spread in spreads:
        least, greatest = sorted(spread["values"])
        middle = statistics.median(spread["values"])
        assert (spread["min"], spread["median"], spread["max"]) == (least, middle, greatest)
    judged = [row for row in table["rows"] if "goal" in row]
    without_goals = ("ladder", "arrivals", "kv-quality", "endless")
    assert bool(judged) == (name not in without_goals)
    for row in judged:
        figure, goal = row[row["goal"]["column"]], row["goal"]
        figure = figure["median"] if _is_spread(figure) else figure
        compare = {">=": operator.ge, "<=": operator.le, "<": operator.lt}[goal["sign"]]
        assert row["met"] == compare(figure, goal["bound"])
    assert printed.count(": met") + printed.count(": missed") == len(judged)


@pytest.mark.thorough
def test_a_server_has_room_for_what_one_client_asks(lm, monkeypatch):
    """Also where `--tokens` is less. A peer refuses what is longer than it was told."""

    @contextmanager
    def strict(lengths):
        config = EngineConfig(num_blocks=max(lengths), block_size=1, attention="torch")
        with EngineLoop(Engine(lm, config)) as loop, served(make_app(loop, "peer")) as address:
            yield address

    monkeypatch.setattr(server, "their_server", strict)
    arguments = "--clients 1 --prompt 8 --tokens 4 --repeats 1 --peer llama.cpp"
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int)
    server.add_arguments(parser)
    rows = server.run(parser.parse_args(arguments.split())).rows
    assert [row["errors"] for row in rows if "errors" in row] == [0, 0]


def decoded(*options):
    parser = argparse.ArgumentParser()
    decode.add_arguments(parser)
    words = "--models tinypy --batch 2 --prompt 20 --tokens 5"
    args = parser.parse_args([*words.split(), *options], argparse.Namespace(repeats=1))
    table = decode.run(args)
    return {row["beside"]: row for row in table.rows}, table.notes


def test_peers_have_the_same_tokens_or_say_why_they_do_not_run(monkeypatch):
    def broken(*_):
        raise RuntimeError("has lost its way")

    monkeypatch.setitem(decode.PEERS, "openvino", broken)
    rows, notes = decoded("--peers", "generate", "openvino", "generate_batch")
    assert list(rows) == ["generate", "openvino", "generate_batch"]
    for same in ("generate", "generate_batch"):
        assert rows[same]["rows that differ"] == "0 of 4" and rows[same]["its tokens/s"].median > 0
    assert rows["openvino"]["its tokens/s"] == "does not run" and "ratio" not in rows["openvino"]
    assert notes == ["openvino: has lost its way"]


@pytest.mark.thorough
def test_some_peers_are_compared_in_float32_alone():
    rows, notes = decoded("--peers", "generate", "llama.cpp", "--dtype", "bfloat16")
    assert notes == ["llama.cpp: is compared in float32 alone"] and "ratio" in rows["generate"]


def test_a_shape_has_the_weights_of_its_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**peers.SHAPES["random-135m"]))
    assert model.num_parameters() == 134_515_008  # of SmolLM2-135M, whose head is its embedding


def _is_spread(cell) -> bool:
    return isinstance(cell, dict) and "median" in cell


def test_all_runs_each_with_its_defaults(tmp_path, monkeypatch, capsys):
    seen = {}
    for name, (module, _) in BENCHMARKS.items():

        def run(options, name=name):
            seen[name] = vars(options)
            return harness.BenchTable(name, options.repeats, rows=[{"what": "x"}], goals=[None])

        monkeypatch.setattr(module, "run", run)
    assert main(["bench", "all", "--repeats", "3", "--json", str(tmp_path / "all.json")]) == 0
    assert list(seen) == list(BENCHMARKS)
    assert all(options["repeats"] == 3 for options in seen.values())
    assert seen["decode"]["batch"] == (1, 8, 32)
    assert json.loads((tmp_path / "all.json").read_text())["tables"].keys() == BENCHMARKS.keys()


@pytest.fixture
def old(tmp_path):
    file = tmp_path / "figures.json"
    file.write_text("of last week")
    yield file
    assert file.read_text() == "of last week"
    assert os.listdir(tmp_path) == ["figures.json"]


def test_control_c_leaves_the_old_file(old, monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(paging, "run", interrupted)
    assert main(["bench", "paging", "--json", str(old)]) == 130
    assert "Stopped" in capsys.readouterr().err


def test_a_write_that_fails_leaves_the_old_file(old):
    with pytest.raises(TypeError):
        harness.write_json(old, {"figure": object()})


def test_a_folder_that_is_not_there_is_said_before_measuring(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paging, "run", lambda options: pytest.fail("was measured"))
    assert main(["bench", "paging", "--json", str(tmp_path / "no" / "figures.json")]) == 2
    assert str(tmp_path / "no") in capsys.readouterr().err


@pytest.mark.parametrize("repeats", ["0", "-1", "two", "1.5"])
def test_repeats_are_at_least_one(repeats, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "paging", "--repeats", repeats])
    assert repeats in capsys.readouterr().err


@pytest.mark.thorough
def test_an_unknown_model_is_named(capsys):
    assert main(["bench", "decode", "--models", "no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err


# ── Tables and figures ────────────────────────────────────────────────────────


def test_a_spread_and_a_goal():
    spread = harness.Spread([3.0, 1.0, 2.0, 1234.5])
    assert (spread.median, spread.min, spread.max) == (2.5, 1.0, 1234.5)
    assert str(spread) == "2.5 (1..1,234)"
    row = {"figure": spread, "exactly": 4}
    assert harness.Aim("figure", "<=", 2.5).met(row)
    assert not harness.Aim("figure", ">=", 2.6).met(row)
    assert not harness.Aim("exactly", "<", 4).met(row)


def test_a_table_lines_up():
    table = harness.BenchTable("title", 1, notes=["note"])
    table.add({"what": "one", "figure": 10_000}, harness.Aim("figure", ">=", 2))
    table.add({"what": "another", "figure": 0.12345})
    assert str(table).splitlines() == [
        "title",
        "  note",
        "",
        "what     figure  goal",
        "───────  ──────  ────────────────",
        "one      10,000  figure >= 2: met",
        "another  0.123",
    ]


def test_a_race_takes_turns_and_drops_the_warm_up():
    calls = []

    def contender(name):
        return lambda one: calls.append((name, one)) or one

    with harness.bar(6, "test") as progress:
        result = harness.race({"a": contender("a"), "b": contender("b")}, [0, 1, 2], progress)
    assert calls == [("b", 0), ("a", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    assert result.results == {"a": [0, 1, 2], "b": [0, 1, 2]}
    assert {name: len(seconds) for name, seconds in result.seconds.items()} == {"a": 2, "b": 2}


# ── What is measured ──────────────────────────────────────────────────────────


@pytest.mark.parametrize("cached", [True, False])
def test_the_scheduler_benchmark_times_decode_steps_alone(cached):
    engine = scheduler.decoding_engine(running=5, steps=40, cached=cached, seed=0)
    before = engine.stats()
    assert before.running == 5 and before.waiting == 0 and before.generated_tokens == 5
    scheduler.take_steps(engine, 39)
    after = engine.stats()
    assert after.running == 5
    assert after.computed_tokens - before.computed_tokens == 5 * 39
    assert after.preemptions == 0 and after.hit_tokens == 0
    assert (after.blocks_cached > 0) == cached
    engine.check()


def test_waste_of_paging_by_hand():
    # Prompt of 3, two tokens: 3 then 4 of 4 slots. Prompt of 4, two: 4 of 4 then 5 of 8.
    lengths = [Length(3, 2), Length(4, 2)]
    assert paging.paged_waste(lengths, 4) == 1 - (3 + 4 + 4 + 5) / (4 + 4 + 4 + 8)
    assert paging.paged_waste(lengths, 1) == 0
    assert paging.paged_waste([Length(1, 1)], 16) == 15 / 16
    assert paging.reserved_waste(lengths, 10) == 1 - (3 + 4 + 4 + 5) / 40


def test_a_trace_is_read(tmp_path, capsys):
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,374,44\n2023-11-16,1,7\n")
    assert paging.trace_lengths(file) == [Length(374, 44), Length(1, 7)]
    assert main(f"bench paging --trace {file} --block-sizes 16 --pools 9".split()) == 0
    assert "2 requests (trace.csv)" in capsys.readouterr().out
    file.unlink()
    assert main(["bench", "paging", "--trace", str(file)]) == 2
    assert f"{file} cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("name", [*BENCHMARKS, *ON_A_GPU, "all"])
def test_help(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["bench", name, "--help"])
    printed = capsys.readouterr().out
    assert "--repeats" in printed and "--json FILE" in printed
    assert ("github.com/Azure/AzurePublicDataset" in printed) == (name == "paging")
