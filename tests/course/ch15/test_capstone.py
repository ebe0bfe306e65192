"""The capstone: its load, its clock, what it refuses, and what it finds wrong."""

import json

import pytest

from minikv import Engine, EngineConfig
from minikv.course.chapters.ch15_serving import capstone
from minikv.course.commands import main


def start():
    space = {}
    exec(capstone.START, space)
    return space["make_engine"]


def test_a_seed_is_one_load_that_the_budget_can_serve(lm):
    talks = capstone.load_of(lm, 3)
    assert talks == capstone.load_of(lm, 3) != capstone.load_of(lm, 4)
    assert {talk.kind for talk in talks} == {"agent", "chat", "document"}
    for talk in talks:
        longest = len(talk.said) + sum(len(one.new_ids) + one.num_new for one in talk.turns)
        assert longest <= min(capstone.BUDGET, lm.config.max_context) - 16


@pytest.mark.thorough
def test_time_is_that_of_the_steps_and_tokens_are_the_oracles(lm):
    talks = [talk for talk in capstone.load_of(lm, 1) if talk.kind != "document"][:3]
    begins = talks[0].begins
    engine = start()(lm, capstone.BUDGET)
    asked, seconds = capstone.play(engine, talks)
    assert len(asked) == sum(len(talk.turns) for talk in talks)
    stats = engine.stats()
    busy = capstone.STEP * stats.steps + capstone.PER_TOKEN * stats.computed_tokens
    assert busy <= seconds - begins + 1e-9
    assert all(one.came < one.first <= one.last <= seconds for one in asked)
    assert capstone.wrong_tokens(lm, asked) == []
    asked[0].token_ids = [*asked[0].token_ids[:-1], 1]
    assert len(capstone.wrong_tokens(lm, asked)) == 1


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(capstone.BUDGET // 16 + 1),
        EngineConfig(8, host_blocks=4),
        EngineConfig(8, kv_dtype="int8"),
    ],
)
def test_the_budget_is_kept(lm, config):
    with pytest.raises(ValueError, match="make_engine"):
        capstone.measure(lm, lambda lm, num_tokens: Engine(lm, config), 1)


def test_a_file_from_begin_to_report(tmp_path, monkeypatch, capsys):
    load_of = capstone.load_of
    monkeypatch.setattr(capstone, "load_of", lambda lm, seed: load_of(lm, seed)[:2])
    mine, report = tmp_path / "mine.py", tmp_path / "report.json"
    assert main(["capstone", "--begin", str(mine)]) == 0
    assert main(["capstone", "--begin", str(mine)]) == 2
    assert main(["capstone", str(mine), "--report", str(report)]) == 0
    found = json.loads(report.read_text())
    assert found["wrong"] == [] and 0 < found["in time"] <= found["of"] and found["seed"] == 1
    assert "goodput" in capsys.readouterr().out
    mine.write_text("x = 1\n")
    assert main(["capstone", str(mine)]) == 2 and "make_engine" in capsys.readouterr().err
