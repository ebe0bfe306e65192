"""The capstone: its load, its clock, what it refuses, and what it finds wrong."""

import json

import pytest

from minikv import Engine, EngineConfig
from minikv.course.chapters.ch15_serving import capstone
from minikv.course.commands import main
from minikv.radix import RadixCache


def start():
    space = {}
    exec(capstone.START, space)
    return space["make_engine"]


def without_a_model(engine):
    """Some token in place of the model's: what is computed, and when, is the same."""
    runner = engine.runner

    def run(plan):
        runner.num_tokens += sum(plan.num_tokens)
        pairs = zip(plan.sequences, plan.num_tokens, strict=True)
        complete = [one for one, count in pairs if one.num_computed + count == one.num_tokens]
        return [(one.token_ids[-1] * 31 + one.num_tokens) % 2000 + 1 for one in complete]

    runner.run = run
    return engine


class DocumentsFirst(RadixCache):
    """Evicts first what shares nothing with anybody: whole texts at the root."""

    def first_leaf(self):
        alone = (n for n in self.unlocked if not n.children and n.parent.parent is None)
        return next(alone, None) or super().first_leaf()


@pytest.mark.thorough
def test_eviction_matters_more_than_the_order_of_arrival(lm):
    """Answers in time, and the longest wait, over four seeds."""
    in_time, longest = {}, {}
    ways = {
        "template": {},
        "newest first": {"policy": lambda sequence: -sequence.order[0]},
        "documents first": {"prefix_cache": DocumentsFirst},
    }
    for name, parts in ways.items():
        in_time[name], longest[name] = 0, 0.0
        for seed in (2, 3, 4, 5):
            config = EngineConfig(capstone.BUDGET // 16, max_num_seqs=16, max_batch_tokens=512)
            engine = without_a_model(Engine(lm, config, **parts))
            evicted = capstone.count_evictions(engine)
            asked, _ = capstone.play(engine, capstone.load_of(lm, seed))
            in_time[name] += sum(not one.late for one in asked)
            longest[name] = max(longest[name], *(one.waited for one in asked))
            assert sum(evicted) > 100
    order, eviction = (in_time[name] - in_time["template"] for name in [*ways][1:])
    assert eviction >= 40 and eviction > 2 * order
    assert max(longest[name] for name in ways if name != "newest first") < capstone.LONGEST_WAIT


@pytest.mark.thorough
def test_who_lets_somebody_wait_too_long_is_not_ranked(lm, monkeypatch):
    load_of = capstone.load_of
    monkeypatch.setattr(capstone, "load_of", lambda lm, seed: load_of(lm, seed)[:1])
    monkeypatch.setattr(capstone, "LONGEST_WAIT", 1e-3)
    report = capstone.measure(lm, start(), 1)
    assert report["ranked"] == "no: somebody waited longer than 0.001 s"
    assert (
        report["late by the first token"] + report["late between tokens"] + report["in time"]
        == report["of"]
    )


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
    monkeypatch.setattr(capstone, "load_of", lambda lm, seed: load_of(lm, seed)[:1])
    mine, report = tmp_path / "mine.py", tmp_path / "report.json"
    assert main(["capstone", "--begin", str(mine)]) == 0
    assert main(["capstone", "--begin", str(mine)]) == 2
    assert main(["capstone", str(mine), "--report", str(report)]) == 0
    found = json.loads(report.read_text())
    assert found["wrong"] == [] and 0 < found["in time"] <= found["of"] and found["seed"] == 1
    assert found["ranked"] == "yes" and found["steps"] > found["of"]
    out, err = capsys.readouterr()
    assert "goodput" in out and f"{found['of']} of {found['of']} answered" in err
    mine.write_text("x = 1\n")
    assert main(["capstone", str(mine)]) == 2 and "make_engine" in capsys.readouterr().err
