"""Chapter 08's kernels, seen from outside: in the interpreter, and compiled, without a GPU."""

import importlib.util
import inspect

import pytest
import torch
from four_ways import right

if importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton here (it is for Linux)", allow_module_level=True)

from thorough import thorough_after

import minikv
from minikv import naive_attention
from minikv.course.chapters.ch04_paged_blocks import together
from minikv.course.chapters.ch08_triton_paged_attention import (
    answers as ch08,
    scenarios as checks,
    watch,
)
from minikv.course.chapters.ch08_triton_paged_attention.watch import Watch, compiled
from minikv.course.exercise_data.manifest import find
from minikv.course.exercise_data.skeletons import broken
from minikv.course.judge import process
from minikv.course.judge.checking import Wrong
from minikv_kernels.mode import INTERPRETED

triton, tl = ch08.triton, ch08.tl  # imported after `minikv_kernels`, which may turn interpreting on
DEVICE = "cpu" if INTERPRETED else "cuda"
DECODES = (ch08.decode, ch08.decode_packed, ch08.decode_split)
watched = pytest.mark.skipif(not INTERPRETED, reason="only the interpreter can be watched")
pytestmark = pytest.mark.usefixtures("quick_interpreter")


def batch(lens, block_size=16, heads=4, kv_heads=2, dim=16, seed=0):
    """q, kv, tables, lens: blocks in any order, NaN in slots without a token, no block behind."""
    generator = torch.Generator().manual_seed(seed)
    widths = [-(-n // block_size) for n in lens]
    kv = torch.full((sum(widths) + 1, block_size, 2, kv_heads, dim), torch.nan)
    tables = torch.full((len(lens), max(widths)), 10**9)
    order = torch.randperm(len(kv), generator=generator)[: sum(widths)].split(widths)
    for row, (length, block_ids) in enumerate(zip(lens, order, strict=True)):
        tables[row, : len(block_ids)] = block_ids
        token = torch.randn(length, 2, kv_heads, dim, generator=generator)
        for i, block_id in enumerate(block_ids):
            part = token[i * block_size : (i + 1) * block_size]
            kv[block_id, : len(part)] = part
    q = torch.randn(len(lens), heads, dim, generator=generator)
    return tuple(value.to(DEVICE) for value in (q, kv, tables, torch.tensor(lens)))


def expected(q, kv, tables, lens):
    rows = []
    for row, length in enumerate(lens.tolist()):
        table = tables[row, : -(-length // kv.shape[1])]
        k, v = kv[table].flatten(0, 1)[:length].unbind(1)
        rows.append(naive_attention(q[row : row + 1], k, v)[0])
    return torch.stack(rows)


def test_queries_may_be_slices_of_one_projection():
    q, kv, tables, lens = batch([18, 4])
    apart = torch.randn(2, 3, *q.shape[1:], device=DEVICE)
    apart[:, 0] = q
    for function in DECODES:
        found = function(apart[:, 0], kv, tables, lens)
        torch.testing.assert_close(found, expected(q, kv, tables, lens))


# ── Seen from outside ─────────────────────────────────────────────────────────


CALLS = {
    "add": lambda: ch08.add(torch.ones(10), torch.ones(10)),
    "attend": lambda: ch08.attend(torch.ones(8), torch.ones(11, 8), torch.ones(11, 8)),
    "decode": lambda: ch08.decode(*batch([5, 20])),
    "decode_packed": lambda: ch08.decode_packed(*batch([5, 20])),
    "decode_split": lambda: ch08.decode_split(*batch([5, 20])),
    "gather": lambda: ch08.gather(*batch([16, 16], dim=8)[1:]),
}


@pytest.mark.parametrize("compiles", thorough_after(1, [False, True]))  # as notebook 08 does, too
@watched
def test_nothing_is_read_or_written_that_is_not_theirs(compiles):
    launches = []
    for call in CALLS.values():
        with Watch() as seen:
            call()
        assert not seen.races and not seen.unwritten
        launches += seen.launches
    kernels = {name for name in vars(ch08) if name.endswith("_kernel")}
    assert {launch.kernel.__name__ for launch in launches} == kernels
    results = compiled(inspect.getsourcefile(ch08), launches) if compiles else []
    assert {result["kernel"] for result in results} == (kernels if compiles else set())
    for result in results:
        assert "error" not in result and not result["tf32"]
        assert result["dots"] == (2 if result["kernel"] in ("packed_kernel", "split_kernel") else 0)


@watched
def test_the_watch_sees_what_a_gpu_would_not_say():
    kernel = ch08.add_kernel
    x, y, out = torch.ones(10), torch.ones(10), torch.zeros(10)
    with pytest.raises(Exception) as caught, Watch():
        kernel[(3,)](x, y, out, 12, TILE=4)  # 12 elements of 10
    assert isinstance(caught.value.__cause__, Wrong)
    assert "program 2 reads elements 10 and 11 of `x`, which has 10" in str(caught.value.__cause__)
    with Watch() as seen:
        kernel[(3, 2)](x, y, out, 10, TILE=4)  # every tile twice
    assert "element 0 of `out` is written by program (0, 0) and by program (0, 1)" in seen.races[0]
    assert torch.equal(out, x + y) and seen.launches[0].grid == (3, 2)
    assert seen.reads["x"] == seen.reads["y"] == {0: 4, 1: 4, 2: 4, 3: 4, 4: 2, 5: 2}
    assert (
        seen.stores == dict.fromkeys(range(6), 1)
        and seen.writers["out"].tolist() == [1] * 4 + [3] * 4 + [5] * 2
    )
    with Watch() as seen:
        ch08.decode(*batch([5, 40]))
    rows = {0: {0}, 1: {0}, 2: {0}, 3: {0}, 4: {3, 4, 5}, 5: {3, 4, 5}, 6: {3, 4, 5}, 7: {3, 4, 5}}
    assert seen.looked_up["block_tables"] == rows
    assert seen.largest["kv"] == 16 * 16 and seen.written == {
        seen.launches[0].arguments["out"].data_ptr()
    }


@watched
def test_a_number_of_its_own_is_not_called_a_tile():
    q, kv, tables, lens = batch([16])
    with pytest.raises(Exception) as caught, Watch():
        ch08.decode(q, kv, tables, lens + 1)  # a second block, of a table of one
    assert isinstance(caught.value.__cause__, Wrong)
    assert caught.value.__cause__.cause is None
    assert "how often does the loop run" in caught.value.__cause__.look


@watched
def test_a_compiler_that_is_not_done_is_no_endless_loop(monkeypatch):
    monkeypatch.setattr(watch, "COMPILER_LIMIT", 0.01)
    with Watch() as seen:
        CALLS["add"]()
    with pytest.raises(Wrong, match="the compiler did not finish") as caught:
        compiled(inspect.getsourcefile(ch08), seen.launches)
    assert "busy" in caught.value.cause and "try again" in caught.value.look


@watched
def test_the_watch_lets_go():
    empty, run = torch.empty, type(ch08.add_kernel).run
    with pytest.raises(ZeroDivisionError), Watch():
        assert torch.empty(2).isnan().all()
        raise ZeroDivisionError
    assert torch.empty is empty and type(ch08.add_kernel).run is run


# ── The exercises around them ─────────────────────────────────────────────────


@watched
def test_the_broken_pieces_run_and_hide_it():
    pieces = broken("08.6")
    _, kv, tables, lens = batch([5, 7, 8], 4, dim=8)
    tables = tables.masked_fill(tables == 10**9, 0)
    right = ch08.gather(kv, tables, lens)
    assert torch.equal(pieces.gather(kv, tables, lens), right)
    with Watch(backwards=True) as seen:
        assert not torch.equal(pieces.gather(kv, tables, lens), right)
    assert seen.races


@watched
def test_an_atomic_sum_is_refused_and_a_block_pointer_is_watched():
    @triton.jit
    def sums(x, out):
        tl.atomic_add(out, tl.load(x))

    @triton.jit
    def copies(x, out, SIZE: tl.constexpr, CHECK: tl.constexpr):
        whole = tl.make_block_ptr(x, (SIZE,), (1,), (0,), (4,), (0,))
        there = tl.make_block_ptr(out, (SIZE,), (1,), (0,), (4,), (0,))
        if CHECK:
            values = tl.load(whole, boundary_check=(0,), padding_option="zero")
            tl.store(there, values, boundary_check=(0,))
        else:
            tl.store(there, tl.load(whole))

    x, out = torch.ones(3), torch.zeros(3)
    with pytest.raises(Exception, match="atomic operation"), Watch():
        sums[(1,)](x, out)
    with Watch() as seen:
        copies[(1,)](x, out, SIZE=3, CHECK=True)
    assert torch.equal(x, out) and seen.reads["x"] == {0: 3}
    with pytest.raises(Exception, match="element 3 of `x`, which has 3"), Watch():
        copies[(1,)](x, out, SIZE=3, CHECK=False)


@watched
def test_a_dry_watch_starts_nothing():
    with Watch(dry=True) as seen:
        assert CALLS["add"]().isnan().all()
    assert [launch.kernel.__name__ for launch in seen.launches] == ["add_kernel"]
    assert not seen.reads


@pytest.mark.thorough
@watched
def test_the_compiler_has_a_time_of_its_own(exercises, monkeypatch):
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "2")
    exercise = find("08.1")
    slow = "\n\nquick = add\n\n\ndef add(x, y, *tile):\n    if not tile:  # for the compiler\n"
    slow += "        import time\n\n        begun = time.process_time()\n"
    slow += "        while time.process_time() - begun < 4:\n            pass\n"
    slow += "    return quick(x, y, *tile)\n"
    (exercises / exercise.chapter.file_name).write_text(right(exercise) + slow)
    report = process.run(exercise)
    assert report.passed and report.seconds > 4, report.text()


@watched
def test_other_tokens_than_the_oracles_are_said_with_a_place_to_look(tinypy):
    with pytest.raises(Wrong, match="the oracle") as caught:
        checks.generate(tinypy.lm, lambda q, *others: torch.zeros_like(q))
    assert caught.value.cause and "tokens or more, in blocks of 16" in caught.value.look


@pytest.mark.thorough
@watched
def test_one_engine_of_all_parts_decodes_by_a_kernel(tinypy):
    prompts = [tinypy.lm.encode("import os\n"), tinypy.lm.encode("def fib(n):")]
    jobs = [together.Job(prompt, minikv.SamplingParams(max_tokens=4)) for prompt in prompts]
    oracle = [tinypy.lm.generate_naively(prompt, 4) for prompt in prompts]
    expected = together.Expected(jobs, oracle, beams=[])
    together.decode_by(ch08.decode_packed, tinypy.lm, expected)

    def nothing(q, *others):
        return torch.zeros_like(q)

    with pytest.raises(AssertionError, match="by nothing"):
        together.decode_by(nothing, tinypy.lm, expected)
