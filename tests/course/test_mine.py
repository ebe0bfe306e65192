"""What `mine` gives a cell: the reader's own part once it has passed, else the reference's."""

import re

import pytest
import torch
from four_ways import reference_sources

import minikv
from minikv.course import lab
from minikv.course.chapters.ch04_paged_blocks import answers
from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import Chapter, chapter_of, chapters, find
from minikv.course.exercise_data.skeletons import fill, skeleton
from minikv.course.judge.checking import tinypy
from minikv.course.reader import progress_file
from minikv.course.reader.parts import PartsRun
from minikv.course.reports.report import in_terminal


@pytest.fixture(autouse=True)
def begun(exercises):
    """Nothing is solved."""
    for chapter in chapters().values():
        (exercises / chapter.file_name).write_text(skeleton(chapter))


def file_of(exercises, exercise_id):
    return exercises / chapter_of(exercise_id).file_name


def edit(exercises, exercise_id, old, new):
    file = file_of(exercises, exercise_id)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def solve(exercises, *ids):
    """As if these had passed: their checks have tests of their own."""
    for id_ in ids:
        exercise, file = find(id_), file_of(exercises, id_)
        file.write_text(fill(file.read_text(), reference_sources(exercise)))
        mark = reader_files.read(exercise.chapter).fingerprint(exercise)
        progress_file.save(id_, progress_file.Entry(1, 1.0, 2.0, fingerprint=mark, solved=True))


def is_own(part):
    return part.__module__.startswith("exercises.")


def test_until_it_is_passed_it_is_the_references(exercises, capsys):
    assert lab.mine("04.1") is minikv.BlockPool
    assert capsys.readouterr().out == "BlockPool: the reference's, until you pass 04.1\n"


def test_then_it_is_yours(exercises, capsys):
    solve(exercises, "04.1")
    pool = lab.mine("04.1")
    assert is_own(pool) and pool(4).allocate() in range(4)
    assert capsys.readouterr().out == "BlockPool: yours (04.1)\n"
    assert minikv.BlockPool is not pool  # nothing else is on it


def test_several_come_in_the_order_of_the_exercises(exercises, capsys):
    solve(exercises, "03.4")
    slots_at, shares_over_lives = lab.mine("03.4")
    assert (slots_at.__name__, shares_over_lives.__name__) == ("slots_at", "shares_over_lives")
    table, mapping, table_only = *lab.mine("04.2", "04.3"), lab.mine("04.2")
    assert (table, mapping.__name__) == (table_only, "slot_mapping")


def test_a_class_of_several_exercises_has_the_passed_methods(exercises, capsys):
    solve(exercises, "06.1", "06.3")
    own = lab.mine("06.1", "06.2", "06.3")
    assert is_own(own) and is_own(own._add_chunk) and is_own(own.schedule)
    assert own._admit is minikv.Scheduler._admit
    said = capsys.readouterr().out
    assert said == "Scheduler: yours (06.1, 06.3); else the reference's, until you pass 06.2\n"


def test_a_written_method_that_has_not_passed_is_not_used(exercises):
    solve(exercises, "06.1")
    edit(exercises, "06.2", 'raise NotImplementedError("Exercise 06.2', "return 1 / 0  # ('")
    assert lab.mine("06.1")._admit is minikv.Scheduler._admit


def test_a_class_of_several_chapters(exercises, capsys):
    solve(exercises, "04.2", "05.2")
    table = lab.mine("05.1")
    assert is_own(table.grow) and is_own(table.writable_slot)
    assert table.fork is minikv.BlockTable.fork
    said = capsys.readouterr().out
    assert said == "BlockTable: yours (04.2, 05.2); else the reference's, until you pass 05.1\n"
    assert lab.mine("04.2").writable_slot is minikv.BlockTable.writable_slot  # no later chapter's


def test_it_is_what_is_saved_now(exercises, capsys):
    solve(exercises, "04.3")
    right = file_of(exercises, "04.3").read_text()
    edit(exercises, "04.3", "def slot_mapping", "# a remark\n\n\ndef slot_mapping")
    assert is_own(lab.mine("04.3"))
    file_of(exercises, "04.3").write_text(changed(right))
    capsys.readouterr()
    assert lab.mine("04.3") is answers.slot_mapping
    assert capsys.readouterr().out == (
        'slot_mapping: the reference\'s, your 04.3 has changed since it passed: check("04.3")\n'
    )
    assert progress_file.changed() == {"04.3"} and progress_file.passed() == set()
    file_of(exercises, "04.3").write_text(right)  # and it is passed again, without a check
    assert is_own(lab.mine("04.3")) and progress_file.passed() == {"04.3"}


def changed(text):
    """A file with another slot_mapping, which uses what the reader has added."""
    added = "EXTRA = None\n\n\ndef helper():\n    return EXTRA\n"
    body = "def slot_mapping(block_ids, block_size, start, end):\n    return helper()"
    return fill(text, {"": added, "slot_mapping": body})


def test_what_a_solution_uses_is_part_of_it(exercises):
    solve(exercises, "04.2", "04.3")
    text = changed(file_of(exercises, "04.3").read_text())
    file_of(exercises, "04.3").write_text(text)
    assert progress_file.changed() == {"04.3"}  # and 04.2, which does not use it, is as it was
    slots = find("04.3")
    marks = {
        reader_files.parsed(slots.chapter, text.replace(old, new)).fingerprint(slots)
        for old, new in (("", ""), ("EXTRA = None", "EXTRA = 0"), ("return EXTRA", "return None"))
    }
    assert len(marks) == 3


@pytest.mark.parametrize(
    ("added", "says"),
    [
        ("\nraise KeyError('no')\n", "cannot be imported: KeyError: 'no'"),
        ("\nimport sys\nsys.exit('bye')\n", "cannot be imported: SystemExit: bye"),
        ("\ndef broken(:\n", "Python cannot read this"),
    ],
)
def test_a_file_that_fails_is_told_and_passed_by(exercises, capsys, added, says):
    solve(exercises, "04.1", "05.1")
    file = file_of(exercises, "04.1")
    file.write_text(file.read_text() + added)
    assert lab.mine("04.1") is minikv.BlockPool
    [said] = capsys.readouterr().out.splitlines()
    assert said.startswith("BlockPool: the reference's, exercises/ch04") and says in said
    assert is_own(lab.mine("05.1").fork)
    lab.own_engine(tinypy())
    said = capsys.readouterr().out
    assert "yours are BlockTable (05.1)" in said and says in said


@pytest.mark.skipif(bool(chapters()["08"].cannot_run), reason="needs Triton")
def test_a_kernel_comes_with_what_starts_it(exercises, capsys):
    solve(exercises, "08.1")
    edit(exercises, "08.1", "    return out", "    return out, 'mine'")  # of the given function
    add = lab.mine("08.1")
    file_of(exercises, "08.1").write_text("")  # another text by the time it runs
    total, whose = add(torch.ones(10), torch.ones(10))
    assert whose == "mine" and total.tolist() == [2.0] * 10
    assert capsys.readouterr().out == "add: yours (08.1)\n"


def test_an_engine_on_them(exercises, capsys):
    lm = tinypy()
    params = minikv.SamplingParams(max_tokens=6, ignore_eos=True)
    plain = lab.own_engine(lm)
    assert not is_own(type(plain.attention))
    [expected] = plain.generate([[1, 2, 3]], params)
    solve(exercises, *(e.id for n in ("04", "05", "06", "07") for e in chapters()[n].exercises))
    engine = lab.own_engine(lm, minikv.EngineConfig(num_blocks=16, block_size=4))
    for part in (engine.pool, engine.scheduler, engine.cache, engine.block_table):
        assert is_own(part)
    assert is_own(engine.attention.attend_all)
    [found] = engine.generate([[1, 2, 3]], params)
    assert found.token_ids == expected.token_ids
    engine.beam_search([1, 2, 3], 2, 4)
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("engine: on the reference's parts, until")
    assert re.search(r"yours are BlockPool \(04.1\), BlockTable \(04.2, 05.1, 05.2\)", last)


@pytest.mark.thorough
def test_what_was_checked_again_need_not_be_checked(exercises):
    solve(exercises, "04.3")
    file = file_of(exercises, "04.3")
    file.write_text(changed(file.read_text()))
    assert 'changed since it passed: check("04.3")' in repr(PartsRun())
    assert not lab.check("04.3").passed
    assert "04.3 slot_mapping: changed since it passed, and does not pass now" in repr(PartsRun())


def test_your_parts_name_what_has_changed_and_what_runs_nowhere(exercises):
    solve(exercises, "04.1", "04.3", "05.3")
    file = file_of(exercises, "04.3")
    file.write_text(changed(file.read_text()))
    parts = lab.your_parts()
    said = repr(parts)
    assert said.startswith(parts.written.text) and parts.same and parts.written.same
    assert "04.1 BlockPool.allocate, BlockPool.release: yours\n" in said
    assert "05.3 blocks_for_samples: yours; no model calls it\n" in said
    assert '04.3 slot_mapping: changed since it passed: check("04.3")\n' in said
    others = "04.2, 04.4, 04.5, 05.1, 05.2, 05.4, 05.5, all of 00, 01, 02, 03, 06"
    words = " ".join(said.split())  # wherever a line ends
    assert words.count("The reference's") == 1 and f"The reference's: {others}" in words
    assert "BlockTable.grow" not in said
    told = " ".join(parts.text(in_terminal).split())
    assert "changed since it passed: python -m minikv check 04.3" in told
    shown = parts._repr_html_()
    assert "BlockPool.allocate" in shown and "ok    04.1: 3 requests at once" in shown
    assert [proof.ids for proof in parts.proofs] == [["04.1"]]


@pytest.mark.thorough
def test_a_run_names_the_parts_that_it_called(exercises):
    solve(exercises, "04.3", "05.1", "05.5", "06.4")
    parts = lab.your_parts()
    assert parts.same, parts
    ran = {proof.which: proof.ids for proof in parts.proofs}
    assert ran == {
        "04": ["04.3"], "05": ["05.1", "05.5"], "06": ["06.4"],
        "together": ["04.3", "05.1", "06.4"],
    }  # fmt: skip
    assert parts.written.on == "your parts of 04"


@pytest.mark.thorough
@pytest.mark.skipif(bool(chapters()["08"].cannot_run), reason="needs Triton")
def test_a_run_names_the_kernels_that_it_started(exercises):
    solve(exercises, "04.3", "08.3", "08.4")
    parts = lab.your_parts()
    ran = [proof.ids for proof in parts.proofs]
    assert ran == [["04.3"], ["08.3"], ["08.4"], ["04.3", "08.4"]], parts


@pytest.mark.thorough
def test_in_a_notebook_your_parts_are_those_up_to_its_chapter(exercises, tmp_path, monkeypatch):
    solve(exercises, "04.1", "07.8", "05.3")
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "05_copy_on_write.ipynb"))
    said = repr(lab.your_parts())
    assert "04.1" in said and "05.3" in said
    assert "07.8" not in said and "02, 03" in said and "03, 06" not in said
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "03_kv_memory.ipynb"))
    assert "No part of yours" in repr(lab.your_parts())
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "notes.ipynb"))
    assert "07.8 guess_prompt: yours; no model calls it" in repr(lab.your_parts())


@pytest.mark.thorough
def test_your_parts_before_an_engine_can_run_on_them(exercises):
    solve(exercises, "01.3")
    parts = lab.your_parts()
    assert parts.same and parts.written.on == "your parts of 01" and parts.written.same
    solve(exercises, "03.1")
    (exercises / chapter_of("01").file_name).write_text("")
    parts = lab.your_parts()
    assert parts.same and parts.written is None and len(parts.proofs) == 1


def test_a_wrong_call_says_what_there_is(exercises, monkeypatch):
    with pytest.raises(ValueError, match="at least one"):
        lab.mine()
    with pytest.raises(ValueError, match=r"04\.9"):
        lab.mine("04.9")
    monkeypatch.setattr(Chapter, "cannot_run", property(lambda chapter: "needs Triton"))
    with pytest.raises(ValueError, match=r"08\.1: needs Triton"):
        lab.mine("08.1")


def test_the_engine_of_the_finale(exercises, capsys):
    solve(exercises, "07.7")
    loop, engine_class = lab.mine("07.7")
    engine = lab.own_engine(tinypy())
    assert isinstance(engine, engine_class.__mro__[1]) and is_own(type(engine).append)
    assert is_own(type(engine.loop).step) and type(engine.loop).__name__ == loop.__name__
    [output] = engine.generate("import os\n", minikv.SamplingParams(max_tokens=3))
    assert len(output.token_ids) == 3
    assert "yours are Loop (07.7), Engine (07.7)" in capsys.readouterr().out
