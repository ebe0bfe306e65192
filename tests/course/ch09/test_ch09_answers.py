"""Chapter 09's kernels in the engine; what its checks see and say."""

import importlib.util

import pytest
import torch
from four_ways import right
from thorough import thorough_after

if importlib.util.find_spec("numba") is None:
    pytest.skip("no Numba here", allow_module_level=True)

import numpy as np

import minikv
from minikv.course.chapters.ch09_cpu_kernels import answers as ch09, machine
from minikv.course.chapters.ch09_cpu_kernels.given import compiled, in_threads
from minikv.course.chapters.ch09_cpu_kernels.in_engine import KernelAttention, engine_by, speeds
from minikv.course.chapters.ch09_cpu_kernels.invariance import WAYS, find_tie, logits_of
from minikv.course.chapters.ch09_cpu_kernels.pictures import rates_picture, walk, walks_widget
from minikv.course.chapters.ch09_cpu_kernels.scenarios import Case
from minikv.course.chapters.ch09_cpu_kernels.watch import (
    Watch,
    Watched,
    compiled_code,
    in_turns,
    plainly,
    refusal,
    widens,
)
from minikv.course.exercise_data.manifest import chapter_of, find
from minikv.course.exercise_data.skeletons import broken, fill, skeleton
from minikv.course.judge import process
from minikv.course.reports.report import Report

DECODES = (ch09.decode, ch09.decode_by_group, ch09.decode_in_threads, ch09.decode_in_pieces)


def tensors(case):
    q, kv, tables, lens = (torch.from_numpy(np.array(value)) for value in case.arguments)
    return q, kv, tables[:, :-1].masked_fill(tables[:, :-1] == 10**9, 0), lens


@pytest.mark.thorough
def test_queries_may_be_slices_of_one_projection():
    q, *others = tensors(Case((18, 4), 4, 4, 2, 8))
    apart = torch.randn(2, 7, 8)
    apart[:, 1:5] = q
    for function in DECODES:
        torch.testing.assert_close(function(apart[:, 1:5], *others), function(q, *others))


RUNS = [{"step": ch09.decode_step}, *({"backend": KernelAttention.of(f)} for f in DECODES)]


@pytest.mark.parametrize("how", thorough_after(0, RUNS))
def test_the_engine_writes_the_oracles_tokens(tinypy, how):
    prompts = [tinypy.lm.encode(text) for text in ("import os\n", "def fib(n):\n    if", "x = [")]
    engine = engine_by(tinypy.lm, **how, num_blocks=24, max_num_seqs=2)
    params = minikv.SamplingParams(max_tokens=20, ignore_eos=True)
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        assert list(output.token_ids) == tinypy.lm.generate_naively(prompt, 20)
    engine.check()


def test_other_tokens_are_no_speed(tinypy):
    wrong = KernelAttention.of(lambda q, *others: torch.zeros_like(q))
    engines = {"right": engine_by(tinypy.lm), "wrong": engine_by(tinypy.lm, wrong)}
    with pytest.raises(AssertionError, match="wrong writes other tokens"):
        speeds(tinypy.lm, engines, batch=1)


# ── What is seen ──────────────────────────────────────────────────────────────────────────


def test_a_group_fetches_each_block_once_and_heads_twice():
    case, seen = Case((8, 5), 4, 4, 2), {}
    block, row = 4 * 2 * 2 * 4, 4
    for name, items in (("attend_heads", ()), ("attend_groups", (0, 4))):
        watch = Watch()
        q, kv, *others = case.arguments
        with plainly(ch09):
            getattr(ch09, name)(q, Watched(kv, "kv", watch), *others, np.empty_like(q), *items)
        seen[name] = watch.fetches("kv", lambda e: (e // block, e // row % 2))
        assert len(set(watch.reads["kv"])) == (8 + 5) * 2 * 2 * 4  # every token's, nothing else
    assert seen == {"attend_heads": 16, "attend_groups": 8}


def test_plainly_gives_the_kernels_back():
    kernel, empty = ch09.attend_heads, np.empty
    with pytest.raises(ZeroDivisionError), plainly(ch09):
        assert ch09.attend_heads is kernel.py_func and ch09.matmul is not kernel
        assert np.isnan(np.empty(2, np.float32)).all()
        raise ZeroDivisionError
    assert ch09.attend_heads is kernel and np.empty is empty


def test_turns_show_a_race_and_always_the_same():
    pieces, arguments = broken("09.4"), tensors(Case((4, 8), 4, 2))
    right_one = ch09.decode(*arguments)
    results, races = [], []
    for _ in range(2):
        results.append(pieces.decode_in_pieces(
            *arguments, run=lambda kernel, calls: races.append(in_turns(kernel.py_func, calls))
        ))  # fmt: skip
    assert torch.equal(*results) and races[0] == races[1] > 0
    assert not torch.allclose(results[0], right_one, atol=1e-2)
    one_by_one = pieces.decode_in_pieces(
        *arguments, run=lambda kernel, calls: [kernel.py_func(*call) for call in calls]
    )
    torch.testing.assert_close(one_by_one, right_one)


def test_an_error_in_a_piece_comes_out_of_the_turns():
    def fails(values):
        values[0] = 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_turns(fails, [(np.zeros(2),), (np.zeros(2),)])


def star(x):
    rows, *rest = x.shape
    return rows, rest


def missing(x):
    return x.no_such_thing


def unknown(x):
    return x[0, 0, 0]


@pytest.mark.parametrize(
    ("function", "says"), [(star, "opcode"), (missing, "no_such_thing"), (unknown, "getitem")]
)
def test_what_numba_refuses_is_one_sentence_with_its_line(function, says):
    with pytest.raises(Exception) as caught:
        compiled(function)(np.zeros((2, 2)))
    said, line = refusal(caught.value, __file__)
    assert says in said and "\n" not in said and len(said) <= 160
    assert line == function.__code__.co_firstlineno + 1


def test_float64_sums_are_seen():
    def total(values, sums):
        found = 0.0
        for i in range(len(values)):
            found += values[i] * values[i]
        sums[0] = found

    kernel = compiled(total)
    kernel(np.ones(9, np.float32), np.ones(1, np.float32))
    assert widens(compiled_code(kernel)) and not widens(compiled_code(ch09.matmul))


# ── In a process of its own ───────────────────────────────────────────────────────────────


def checked(exercises, id_, text):
    (exercises / chapter_of(id_).file_name).write_text(text)
    return Report.of(process.run(find(id_)))


@pytest.mark.thorough
def test_a_contained_check_compiles_and_passes(exercises):
    """One of them: `test_journey` has every exercise."""
    report = checked(exercises, "09.4", right(find("09.4")))
    assert report.passed and not report.printed, report.text()


def test_a_wild_index_ends_in_a_sentence(exercises):
    text = right(find("09.1")).replace(
        "block = block_tables[s, i]", "block = block_tables[s, i + 9]"
    )
    report = checked(exercises, "09.1", text)
    said = report.text()
    assert not report.passed and "IndexError" in said and "not compiled yet" in said, said


def test_a_kernel_without_its_decorator_is_told(exercises):
    text = right(find("09.5")).replace("@compiled\ndef matmul", "def matmul")
    assert "`@compiled` is missing above it" in checked(exercises, "09.5", text).text()


def test_what_numba_refuses_is_told_with_a_line(exercises):
    text = right(find("09.1")).replace("    num_seqs, heads, dim = q.shape\n",
                                       "    num_seqs, heads, *[dim] = q.shape\n")  # fmt: skip
    said = checked(exercises, "09.1", text).text()
    assert "Numba refuses line" in said and "*[dim]" in said, said


# ── Pictures, and what this machine can do ────────────────────────────────────────────────


def test_a_walk_is_what_the_kernel_reads():
    arguments = Case((8, 5), 4, 4, 2).arguments
    heads = walk("by head", ch09, [lambda *a: ch09.attend_heads(*a)], *arguments)
    groups = walk(
        "by group", ch09,
        [lambda *a: ch09.attend_groups(*a, 0, 2), lambda *a: ch09.attend_groups(*a, 2, 4)],
        *arguments,
    )  # fmt: skip
    assert (len(heads.threads), heads.last, groups.last) == (1, 16, 4)
    assert heads.num_bytes == 2 * groups.num_bytes == 16 * 4 * 2 * 4 * 4
    player = walks_widget([heads, groups])
    assert "by head: done, 2,048 bytes; ends at 16" in player.caption.value
    player.slider.value = 5
    assert "by head: 5 of 16 fetches" in player.caption.value
    assert "by group: done" in player.caption.value


def test_rates_are_drawn_with_their_numbers():
    picture = rates_picture({"whole tokens": 11.4e6, "in 8 bits": 34.42e6})
    assert picture.alt.endswith("whole tokens: 11.4; in 8 bits: 34.4.")


@pytest.mark.thorough
def test_measures_something_of_this_machine():
    assert machine.read_rate(2**16, total=2**20) > 1e6
    assert machine.product_rate(32) > 1e6
    assert machine.waking() > 0 and min(machine.kv_rates(8).values()) > 0


def test_a_failure_in_a_thread_is_not_lost():
    def fails(number):
        if number:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_threads(fails, [(0,), (1,)])


def test_unwritten_parts_do_not_stop_the_others():
    text = fill(skeleton(chapter_of("09")), {})
    assert "Exercise 09.6: decode_step" in text and "from numba" not in text


# ── The same text, other bits ─────────────────────────────────────────────────────────────


@torch.inference_mode()
def test_a_tie_that_flips_with_a_warm_cache():
    lm = minikv.load("tinypy")
    prompt = lm.encode("def area(width, height):\n    return width * height\n\n\n" * 5)[:65]
    tied = find_tie(lm, prompt)
    usual, fixed = (
        [logits_of(tied, prompt, way, batch_invariant=mode) for way in WAYS]
        for mode in (False, True)
    )
    assert usual[0].argmax() != usual[1].argmax()
    assert torch.allclose(usual[0], usual[1], atol=1e-4)
    assert all(torch.equal(fixed[0], other) for other in fixed)
    top = fixed[0].topk(3).values
    assert top[0] - top[1] < 1e-5 < top[1] - top[2]
