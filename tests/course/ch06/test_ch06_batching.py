"""One workload served in several ways: the same tokens, and records that add up. Hit rates against
a model that is too simple to be wrong. No time is asserted: only the order of what was noted."""

import math
import random
import sys
from dataclasses import replace

import pytest

from minikv import EngineConfig
from minikv.cluster.simulate import percentile
from minikv.course.chapters.ch06_continuous_batching.batching import (
    WAYS,
    Comparison,
    Entry,
    Run,
    Served,
    Step,
    compare,
    preemption_costs,
    serve,
    static_rate,
)
from minikv.course.chapters.ch06_continuous_batching.pictures import (
    filled_picture,
    latency_picture,
    preemption_picture,
    stretches,
    timeline_picture,
)
from minikv.course.chapters.ch07_radix_prefix_cache.block_ids import ids_of_jobs, ids_of_trace
from minikv.course.pictures import style
from minikv.course.workloads.workload import Job, Length, TraceRequest, shared_prompts

SMALL = EngineConfig(max_num_seqs=4, max_batch_tokens=48, num_blocks=80)


@pytest.fixture(scope="module")
def jobs(lm):
    """Ten requests of two groups; the first three are there at once, the rest come one by one."""
    drawn = shared_prompts(lm, 10, groups=2, shared=32, seed=3)
    return [
        job._replace(max_tokens=min(12, job.max_tokens), arrival=max(0, index - 2) * 0.005)
        for index, job in enumerate(drawn)
    ]


@pytest.fixture(scope="module")
def comparison(lm, jobs):
    return compare(lm, jobs, SMALL, repeats=2, oracle=2)


@pytest.fixture(scope="module")
def squeezed(lm, jobs):
    """The same with a pool that is too small, both ways."""
    longer = [job._replace(max_tokens=30, arrival=0.0) for job in jobs[:7]]
    config = EngineConfig(max_num_seqs=6, num_blocks=16, prefix_cache=False)
    ways = {"recompute": {}, "swap": {"preemption": "swap", "host_blocks": 40}}
    return compare(lm, longer, config, ways, oracle=1)


# ── Serving ───────────────────────────────────────────────────────────────────


def test_every_way_gives_the_tokens_of_the_oracle(lm, jobs, comparison):
    expected = [lm.generate_naively(job.prompt_ids, job.max_tokens) for job in jobs[:2]]
    for runs in comparison.runs.values():
        for run in runs:
            assert [one.job for one in run.served] == jobs
            assert [one.token_ids for one in run.served[:2]] == expected


def check_records(run: Run):
    """What must hold of any run."""
    seats = run.config.max_num_seqs
    for earlier, later in zip(run.steps, run.steps[1:], strict=False):
        assert earlier.start < earlier.end <= later.start
    for step in run.steps:
        assert 0 < len(step.entries) <= step.running <= seats
        assert len({entry.request_id for entry in step.entries}) == len(step.entries)
        assert all(entry.num_tokens == 1 for entry in step.entries if entry.kind == "decode")
        assert 0 <= step.blocks_held + step.blocks_cached <= run.config.num_blocks
        assert 0 < step.host_seconds < step.seconds
    ends = {step.end for step in run.steps}
    for request_id, one in enumerate(run.served):
        assert one.job.arrival < one.first_token <= one.finish
        assert one.time_to_first_token <= one.latency
        assert one.token_times == sorted(set(one.token_times))
        assert set(one.token_times) <= ends
        assert len(one.token_times) == len(one.token_ids) == one.job.max_tokens
        mine = [s for s in run.steps for e in s.entries if e.request_id == request_id]
        assert mine[0].start >= one.job.arrival
        assert mine[-1].end == one.finish
        assert one.preemptions == sum(step.preempted.count(request_id) for step in run.steps)
        assert 0 <= one.cached_tokens < len(one.job.prompt_ids)
        assert one.cached_tokens % run.config.block_size == 0
    assert 0 < run.seats_filled <= 1 and 0 < run.blocks_filled <= 1
    assert 0 <= run.holes <= 1 - run.seats_filled + 1e-9
    assert run.seconds == run.steps[-1].end - run.served[0].job.arrival


def test_the_records_add_up(comparison, squeezed):
    for runs in [*comparison.runs.values(), *squeezed.runs.values()]:
        for run in runs:
            check_records(run)


def test_computed_is_what_was_asked_for_less_what_was_found(comparison):
    for way, runs in comparison.runs.items():
        for run in runs:
            # The last output token is never computed.
            asked = sum(len(one.job.prompt_ids) + one.job.max_tokens - 1 for one in run.served)
            found = sum(one.cached_tokens for one in run.served)
            assert run.computed_tokens == asked - found
            assert (found > 0) == (run.hit_rate > 0) == ("cache" in way)


def admissions(run: Run):
    """For each step: which requests are in the batch for the first time, and which still are."""
    last = {entry.request_id: i for i, step in enumerate(run.steps) for entry in step.entries}
    seen: set[int] = set()
    for index, step in enumerate(run.steps):
        here = {entry.request_id for entry in step.entries}
        yield here - seen, {id_ for id_ in seen if last[id_] >= index}
        seen |= here


def test_a_static_batch_admits_no_request(comparison):
    [static, continuous, _] = [runs[0] for runs in comparison.runs.values()]
    joins = [(new, still) for new, still in admissions(static) if new]
    assert len(joins) > 1 and all(not still for _, still in joins)
    assert any(new and still for new, still in admissions(continuous))
    budget = SMALL.max_batch_tokens
    tokens = [sum(entry.num_tokens for entry in step.entries) for step in static.steps]
    assert max(tokens) > budget  # a static batch prefills at once
    for step in continuous.steps:
        assert sum(entry.num_tokens for entry in step.entries) <= budget


def test_the_clock_jumps_over_idle_time(lm, jobs):
    run = serve(lm, [jobs[0], jobs[1]._replace(arrival=1e6)], SMALL)
    check_records(run)
    second = next(step for step in run.steps if step.entries[0].request_id == 1)
    assert second.start == 1e6
    assert run.served[0].finish < 1e6 < run.seconds


def test_jobs_may_come_in_any_order(lm, jobs):
    run = serve(lm, jobs[::-1], SMALL)
    assert [one.job.arrival for one in run.served] == [job.arrival for job in jobs]


def test_a_salt_is_passed_on(lm, jobs):
    alone = [job._replace(salt=str(index)) for index, job in enumerate(jobs)]
    assert serve(lm, alone, SMALL).hit_rate == 0


def test_the_rate_of_static_batches_is_that_of_a_full_queue(lm, jobs, monkeypatch):
    module, runs = sys.modules[serve.__module__], []

    def recorded(lm, jobs, *args, **parts):
        runs.append(serve(lm, jobs, *args, **parts))
        return runs[-1]

    monkeypatch.setattr(module, "serve", recorded)
    rate = static_rate(lm, jobs, SMALL)
    _, run = runs  # the first warms up
    assert rate == run.requests_per_second
    assert all(one.job.arrival == 0 for one in run.served) and run.hit_rate == 0
    kinds = [{entry.kind for entry in step.entries} for step in run.steps]
    assert sum("prefill" in kind for kind in kinds) == math.ceil(len(jobs) / SMALL.max_num_seqs)


def test_what_cannot_be_served(lm, jobs):
    with pytest.raises(ValueError, match="jobs: is empty"):
        serve(lm, [])
    with pytest.raises(ValueError, match="the model's context is 1024"):
        serve(lm, [jobs[0]._replace(max_tokens=1024)])


def test_preemption_by_recompute_and_by_swap(squeezed):
    [recompute], [swap] = squeezed.runs.values()
    assert min(recompute.preemptions, swap.preemptions) > 0
    asked = sum(len(one.job.prompt_ids) + one.job.max_tokens - 1 for one in swap.served)
    assert swap.computed_tokens == asked < recompute.computed_tokens


# ── Comparing ─────────────────────────────────────────────────────────────────


def test_other_tokens_are_refused(lm, comparison, jobs):
    runs = {way: list(runs) for way, runs in comparison.runs.items()}
    run = runs["continuous"][1]
    wrong = replace(run.served[4], token_ids=[*run.served[4].token_ids[:-1], 0])
    served = [wrong if index == 4 else one for index, one in enumerate(run.served)]
    runs["continuous"][1] = replace(run, served=served)
    with pytest.raises(AssertionError, match="request 4 has other tokens with continuous than"):
        Comparison(lm, runs)

    def last_token(logits, params, draws):
        return [7] * len(logits)

    with pytest.raises(AssertionError, match=r"request \d+ has other tokens than the oracle's"):
        compare(lm, jobs[:3], SMALL, {"mine": {"sampler": last_token}}, oracle=1)


def test_the_table(comparison, squeezed):
    head, *rows = comparison.rows()
    assert [row[0] for row in rows] == list(WAYS)
    assert all(len(row) == len(head) for row in rows)
    assert head[-1] == "prompt tokens from the cache" and rows[1][-1] == "0%" != rows[2][-1]
    assert " to " in rows[0][1]  # the spread of two repeats
    assert squeezed.rows()[0][-2:] == ("preemptions", "computed tokens")
    assert " to " not in squeezed.rows()[1][1]
    text = repr(comparison)
    assert "4 seats, 80 blocks of 16; median of 2 runs each" in text
    assert "torch" in text and "tinypy" in text
    assert comparison._repr_html_().count("<tr>") == 4


def test_the_typical_run_is_the_lower_median(lm, comparison):
    run = comparison.runs["continuous"][0]

    def lasting(seconds):
        moved = replace(run.steps[-1], start=seconds - 1, end=seconds)
        return replace(run, steps=[*run.steps[:-1], moved])

    slow, fast, middle = lasting(9.0), lasting(5.0), lasting(7.0)
    assert Comparison(lm, {"it": [slow, fast, middle]}).typical("it") is middle
    assert Comparison(lm, {"it": [slow, fast]}).typical("it") is fast


def test_percentiles():
    draw = random.Random(0)
    for count in (1, 2, 3, 10, 99, 100, 101, 250):
        values = [draw.random() for _ in range(count)]
        for percent in (0, 1, 50, 90, 99, 100):
            least = min(v for v in values if 100 * sum(x <= v for x in values) >= percent * count)
            assert percentile(values, percent) == least


def made_run(batches, seats=2, waiting=(), preempted=()) -> Run:
    """A run of steps of 1 s; each batch is a list of (request id, kind)."""
    steps = [
        Step(
            start=float(index),
            end=index + 1.0,
            host_seconds=0.1,
            entries=tuple(Entry(request_id, kind, 1) for request_id, kind in batch),
            preempted=tuple(request_id for at, request_id in preempted if at == index),
            running=len(batch),
            waiting=int(index in waiting),
            blocks_held=1,
            blocks_cached=0,
        )
        for index, batch in enumerate(batches)
    ]
    ids = sorted({entry.request_id for step in steps for entry in step.entries})
    served = [Served(Job([1], 1), [1], [float(len(steps))]) for _ in ids]
    return Run(EngineConfig(max_num_seqs=seats, num_blocks=10), served, steps)


def test_measures_of_a_run_worked_out_by_hand():
    p, d = "prefill", "decode"
    run = made_run([[(0, p), (1, p)], [(0, d)], [(0, d), (2, p)], [(2, d)]], waiting=(0, 1))
    assert run.seats_filled == 6 / 8
    assert run.holes == 1 / 8  # the second step
    assert run.blocks_filled == 1 / 10
    assert run.seconds == 4.0
    assert run.requests_per_second == run.tokens_per_second == 3 / 4
    assert run.computed_tokens == 6


# ── Pictures ──────────────────────────────────────────────────────────────────


def test_seats_worked_out_by_hand():
    p, d = "prefill", "decode"
    run = made_run(
        [[(0, p), (1, p)], [(0, d), (1, d)], [(0, d)], [(0, d), (2, p)], [(2, d)], [(1, p)]],
        preempted=[(2, 1)],
    )
    assert [tuple(one) for one in stretches(run)] == [
        (0, 0, p, 0, 0, ""),
        (1, 1, p, 0, 0, ""),
        (0, 0, d, 1, 3, "finished"),
        (1, 1, d, 1, 1, "preempted"),
        (1, 2, p, 3, 3, ""),
        (1, 2, d, 4, 4, "finished"),
        (0, 1, p, 5, 5, "finished"),
    ]


def test_every_entry_has_a_seat_of_its_own(comparison, squeezed):
    for runs in [*comparison.runs.values(), *squeezed.runs.values()]:
        run = runs[0]
        taken = {}
        for one in stretches(run):
            for index in range(one.first, one.last + 1):
                assert taken.setdefault((index, one.seat), one) is one
                assert one.seat < run.config.max_num_seqs
        kinds = {
            (index, one.request_id, one.kind)
            for (index, _), one in taken.items()
            if one.kind != "idle"
        }
        assert kinds == {
            (index, entry.request_id, entry.kind)
            for index, step in enumerate(run.steps)
            for entry in step.entries
        }
        ends = [one.ends for one in stretches(run)]
        assert ends.count("finished") == len(run.served)
        assert ends.count("preempted") == run.preemptions


def shown(picture: style.Picture) -> str:
    assert style.png(picture.figure, 50).startswith(b"\x89PNG")
    return picture.alt


def test_pictures_of_a_comparison(comparison):
    assert "P99" in shown(latency_picture(comparison))
    assert "first token" in shown(latency_picture(comparison, "first token"))
    assert "of the blocks" in shown(filled_picture(comparison))
    with pytest.raises(ValueError, match="upto: must be"):
        latency_picture(comparison, "second token")


@pytest.mark.thorough
def test_pictures_of_the_batch(comparison, squeezed):
    runs = {way: comparison.typical(way) for way in WAYS}
    assert all(way in shown(timeline_picture(runs)) for way in WAYS)
    steps = len(runs["static batches"].steps)
    assert f"Static batches: {steps} steps" in shown(timeline_picture(runs, "steps"))
    [run] = squeezed.runs["recompute"]
    assert f"{run.preemptions} preemptions" in shown(timeline_picture({"recompute": run}))
    with pytest.raises(ValueError, match="by: must be"):
        timeline_picture(runs, "tokens")


def test_costs_of_preemption_and_their_pictures(lm):
    costs = preemption_costs(lm, lengths=(8, 40), block_size=16, repeats=2)
    assert [cost.num_tokens for cost in costs] == [8, 40]
    for cost in costs:
        assert len(cost.recompute) == len(cost.swap) == 2
        assert min(cost.recompute + cost.swap) > 0
    assert "40 tokens" in shown(preemption_picture(costs))


# ── Ids of blocks ─────────────────────────────────────────────────────────────────


def random_jobs(seed: int) -> list[Job]:
    """Prompts over two tokens, so that many share beginnings; some salted."""
    draw = random.Random(seed)
    return [
        Job(draw.choices((1, 2), k=draw.randint(0, 14)), 1, salt=draw.choice((None, None, "a")))
        for _ in range(60)
    ]


def test_equal_ids_are_equal_prefixes():
    jobs = random_jobs(0)
    streams = ids_of_jobs(jobs, block_size=3)
    meant: dict[int, tuple] = {}
    for job, ids in zip(jobs, streams, strict=True):
        assert len(ids) == len(job.prompt_ids) // 3
        for place, id_ in enumerate(ids):
            prefix = (job.salt, tuple(job.prompt_ids[: 3 * (place + 1)]))
            assert meant.setdefault(id_, prefix) == prefix
    assert len(set(meant.values())) == len(meant)


def test_hash_ids_of_a_trace():
    trace = [TraceRequest(Length(900, 1), 0.0, (1, 2)), TraceRequest(Length(1000, 1), 1.0, (1, 3))]
    assert ids_of_trace(trace) == [(1, 2), (1, 3)]
    with pytest.raises(ValueError, match="have no hash_ids"):
        ids_of_trace([TraceRequest(Length(900, 1), 0.0)])
