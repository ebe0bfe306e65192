"""Whatever a reader's code does, a check ends in a sentence, and soon."""

import ast
import re
import subprocess
import sys

import pytest
from four_ways import EXERCISES, right, text_with
from thorough import thorough_after

from minikv.course import lab
from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import chapter_of, find
from minikv.course.exercise_data.mistakes import reference_sources
from minikv.course.exercise_data.skeletons import body_of, definitions, fill, skeleton
from minikv.course.judge import examine, process
from minikv.course.reader import progress_file

ONE = find("04.1")  # BlockPool.allocate is one of its places
FILE = ONE.chapter.file_name


@pytest.fixture(autouse=True)
def begun(exercises):
    (exercises / FILE).write_text(skeleton(ONE.chapter))


def write(exercises, body, extra=None):
    """Put `body` into BlockPool.allocate."""
    indented = "\n".join("    " + line for line in body.splitlines())
    sources = {"BlockPool.allocate": f"def allocate(self):\n{indented}"}
    if extra:
        sources[""] = extra
    (exercises / FILE).write_text(text_with(ONE, sources))


def words(report):
    return re.sub(r"\s+", " ", report.text())


def test_nothing_written_is_no_try(exercises):
    report = lab.check("04.1")
    assert report.status == "not started"
    assert re.search(rf"exercises/{FILE}, line \d+: BlockPool.allocate raises", words(report))
    assert progress_file.entry("04.1").tries == 0


def test_half_written(exercises):
    write(exercises, "return self._free.pop()")
    report = lab.check("04.1")
    assert report.status == "failed"
    assert "BlockPool.release still raises NotImplementedError" in words(report)


def test_a_right_solution_passes_and_is_remembered(exercises):
    """Also one that begins with a byte order mark."""
    (exercises / FILE).write_text(right(ONE), encoding="utf-8-sig")
    report = lab.check("04.1")
    assert report.passed and report.total == len(report.lines), report.text()
    assert report.model, "tinypy did not run on it"
    assert "04.1" in progress_file.passed()
    (exercises / FILE).write_text(skeleton(ONE.chapter))
    write(exercises, "return 0")
    assert not lab.check("04.1").passed
    assert "04.1" not in progress_file.passed()
    assert "why it works" in repr(lab.why("04.1")), "what was passed once stays open"


@pytest.mark.thorough
def test_the_readers_engine_runs_on_other_parts_that_are_passed(exercises):
    """A player reads these files, and none with the answers of chapter 07."""
    for exercise in (ONE, find("07.7")):
        (exercises / exercise.chapter.file_name).write_text(right(exercise))
        report = lab.check(exercise.id)
        assert report.passed, report.text()
    assert report.model and "yours are BlockPool (04.1)" in report.model, report.model


def test_an_endless_loop_is_stopped_where_it_is(exercises, monkeypatch):
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "1")
    write(exercises, "n = 0\nwhile True:\n    n += 1")
    report = lab.check("04.1")
    assert "stopped: used 1 s of processor time" in words(report)
    assert re.search(r"line \d+, in allocate: (while True|n \+= 1)", words(report))
    assert "a loop that never ends" in words(report)


@pytest.mark.thorough
def test_an_endless_loop_at_import(exercises, monkeypatch):
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "2")
    write(exercises, "return 0", extra="while True:\n    pass")
    assert "stopped: used 2 s of processor time" in words(lab.check("04.1"))


@pytest.mark.thorough
def test_the_clock_stops_code_that_waits_for_itself(exercises):
    locked = "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()"
    write(exercises, "return 0", extra=locked)
    report = process.run(ONE, far=5)
    [line] = report.lines
    assert (report.status, line.name) == ("not finished", "the file can be imported")
    assert line.what.startswith("not finished after 5 s; it computed for less than 60 s")
    assert re.search(r"line \d+, in <module>: lock.acquire\(\)", line.what)


@pytest.mark.thorough
def test_the_processors_limit_counts_no_time_of_the_clock(exercises, monkeypatch):
    """Asleep, code uses as little as where other programs have the processor."""
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "2")
    (exercises / FILE).write_text("import time\n" + right(ONE) + "\ntime.sleep(4)\n")
    report = lab.check("04.1")
    assert report.passed and report.seconds > 4, report.text()


@pytest.mark.thorough
@pytest.mark.parametrize("id_", ["04.1", "07.7", "09.6"])
def test_a_right_solution_passes_beside_sixteen_busy_loops(exercises, id_):
    exercise = find(id_)
    (exercises / exercise.chapter.file_name).write_text(right(exercise))
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(16)]
    try:
        report = lab.check(id_)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert report.passed, report.text()


@pytest.mark.parametrize(
    ("body", "says"),
    thorough_after(4, [
        ("import os\nos._exit(0)", "the process ended itself with status 0"),
        ("import os\nos.abort()", "SIGABRT"),
        ("import sys\nsys.exit('bye')", "SystemExit: bye"),
        ("return self.allocate()", "calls itself without end"),
        ("held = {1: 1}\nfor one in held:\n    held[one + 1] = 1", "changes within the loop"),
        ("return input('block? ')", "EOFError"),
        ("return [0] * 10**12", "MemoryError"),
        ("return self.free_blocks.pop()", "AttributeError: 'BlockPool' object has no attribute"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ]),
)  # fmt: skip
def test_code_that_ends_badly_gets_a_sentence(exercises, body, says):
    write(exercises, body)
    report = lab.check("04.1")
    assert not report.passed
    assert says in words(report), report.text()
    assert report.lines and all(line.ok or line.look for line in report.lines)


def test_an_error_names_its_line(exercises):
    write(exercises, "x = 1\nreturn x / 0")
    text = (exercises / FILE).read_text().splitlines()
    line = text.index("        return x / 0") + 1
    report = lab.check("04.1", trace=True)
    assert f"exercises/{FILE}, line {line}: return x / 0" in words(report)
    assert "Traceback" in report.text()
    assert "Traceback" not in lab.check("04.1").text()


def test_what_ends_the_process_names_its_line(exercises):
    write(exercises, "import sys\nsys.exit('bye')")
    report = lab.check("04.1", trace=True)
    assert re.search(rf"exercises/{FILE}, line \d+: sys.exit\('bye'\)", words(report))
    assert "Traceback" in report.text() and "AttributeError" not in report.text()


@pytest.mark.thorough
def test_a_flood_of_print_is_cut(exercises, monkeypatch):
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "3")
    write(exercises, "for i in range(300_000):\n    print('x' * 100)\nreturn 0")
    report = lab.check("04.1")
    assert len(report.printed) < 2 * process.KEPT_OUTPUT
    assert "more bytes" in report.printed and "your code printed" in words(report)


def test_many_printed_lines_are_cut(exercises):
    write(exercises, "return 0")
    with (exercises / FILE).open("a") as file:
        file.write("\nprint(*range(100), sep='\\n')\n")
    printed = lab.check("04.1").printed.splitlines()
    assert len(printed) == process.KEPT_LINES + 1 and printed[-1] == "… and 88 more lines"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"def broken(:\n", "line 1: Python cannot read this"),
        (b"\xff\xfe\xfa", "is not UTF-8 text"),
        (b"x = 1\n", "has no BlockPool.allocate"),
        (b"x = '\0'\n", "Python cannot read this"),
        (b"#" * 2_000_000, "2,000,000 bytes"),
        (None, "is missing; reset"),
    ],
)
def test_a_file_that_is_no_solution(exercises, text, says):
    if text is None:
        (exercises / FILE).unlink()
    else:
        (exercises / FILE).write_bytes(text)
    report = lab.check("04.1")
    assert report.status == "failed"
    assert says in words(report), report.text()


def test_reset_keeps_a_copy_and_the_other_exercises(exercises):
    other = next(e for e in chapter_of("04").exercises if e.id == "04.2")
    text = right(ONE)
    (exercises / FILE).write_text(text + "\n\ndef helper():\n    return 1\n")
    said = lab.reset("04.1").text
    now = (exercises / FILE).read_text()
    assert now == skeleton(chapter_of("04")) + "\n\ndef helper():\n    return 1\n"
    [copy] = (exercises / ".progress" / "backups").iterdir()
    assert copy.name in said and copy.read_text().startswith(text)
    assert reader_files.parsed(other.chapter, now).progress_of(other).unwritten
    lab.reset("04")
    assert (exercises / FILE).read_text() == skeleton(chapter_of("04"))
    assert len(list((exercises / ".progress" / "backups").iterdir())) == 2


def test_an_exercise_begins_with_the_function_that_it_starts_from(exercises):
    chapter = chapter_of("08")
    file, first = exercises / chapter.file_name, find("08.2")
    own = reference_sources(first)["attend_kernel"]
    own = "@triton.jit\n" + own[own.index("def ") :].replace("    ", "  ")  # as some indent
    file.write_text(fill(skeleton(chapter), {"attend_kernel": own}))
    assert "decode_kernel has a copy of your attend_kernel" in lab.begin("08.3").text
    now = file.read_text()
    found = definitions(ast.parse(now))
    assert body_of(now, found["decode_kernel"]) == body_of(now, found["attend_kernel"])
    assert ast.get_docstring(found["decode_kernel"]).startswith("Program (s, h)")
    assert reader_files.parsed(chapter, now).progress_of(find("08.3")).started
    assert "has a body already" in lab.begin("08.3").text
    assert "has a copy" in lab.begin("08.4").text  # which starts from it in turn
    lab.reset("08.3")
    lab.reset("08.4")
    assert "decode_kernel is not written yet" in lab.begin("08.4").text
    with pytest.raises(ValueError, match=r"08\.2 does not start"):
        lab.begin("08.2")


def test_what_an_exercise_begins_with_is_there():
    for exercise in EXERCISES:
        if exercise.begins is not None:
            new, earlier = exercise.begins
            places = exercise.chapter.places
            assert places[new] == exercise.id and places[earlier] < exercise.id


def test_reset_brings_back_a_file_that_is_gone(exercises):
    (exercises / FILE).unlink()
    lab.reset("04.1")
    assert (exercises / FILE).read_text() == skeleton(chapter_of("04"))


def test_a_damaged_progress_file_is_put_aside(exercises):
    (exercises / ".progress").mkdir()
    (exercises / ".progress" / "progress.json").write_text("{half")
    assert progress_file.entries() == {}
    assert (exercises / ".progress" / "progress.damaged").read_text() == "{half"


def test_a_method_that_asks_the_reference_is_not_a_solution(exercises):
    fork = find("05.1")
    (exercises / fork.chapter.file_name).write_text(
        text_with(fork, {"BlockTable.fork": "def fork(self):\n    return super().fork()"})
    )
    report = lab.check(fork.id)
    assert not report.passed and report.total == len(report.lines)
    assert "BlockTable.fork of the engine was called, which is the answer" in words(report)


UNDER_OTHER_NAMES = {
    "imported": "    return __import__('minikv.blo' + 'cks', fromlist='x').BlockTable.fork(self)",
    "of a table": """\
    other = minikv.BlockTable(self.pool, self.block_size)
    vars(other).update(vars(self))
    return other.fork()""",
    "in a thread": """\
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor() as pool:
        return pool.submit(minikv.BlockTable.fork, self).result()""",
    "found": """\
    import gc, types
    if not hasattr(gc, "found"):
        functions = (one for one in gc.get_objects() if type(one) is types.FunctionType)
        name = "minikv.blocks", "BlockTable.fork"
        gc.found = next(one for one in functions if (one.__module__, one.__qualname__) == name)
    return gc.found(self)""",
}


@pytest.mark.parametrize("name", thorough_after(1, UNDER_OTHER_NAMES))
def test_the_reference_is_out_of_reach(name):
    fork = find("05.1")
    source = f"def fork(self):\n    import minikv\n{UNDER_OTHER_NAMES[name]}"
    report = examine.examine(fork, text_with(fork, {"BlockTable.fork": source}))
    assert not report.passed, report


def test_a_name_for_the_reference_is_not_a_solution():
    mask = find("01.2")
    text = text_with(mask, reference_sources(mask)) + "\ncausal_mask = minikv.causal_mask\n"
    report = examine.examine(mask, "import minikv\n" + text)
    assert "causal_mask of the engine was called, which is the answer" in report.lines[0].what


@pytest.mark.thorough
def test_tinypys_run_has_a_time_of_its_own(exercises, monkeypatch):
    (exercises / FILE).write_text(
        right(ONE)
        + "\n\ndef _slow(self, *args):\n    while True:\n        pass\n\n\n"
        + "BlockTable.__init__ = _slow\n"
    )
    monkeypatch.setenv("MINIKV_TIME_LIMIT", "2")
    report = lab.check(ONE.id)
    assert report.status == "failed" and report.total == len(report.lines), report.text()
    assert report.lines[-1].name == examine.MODEL_RUN
    assert all(line.ok for line in report.lines[:-1])
    assert "used 2 s of processor time" in words(report)


@pytest.mark.parametrize("text", [b"", b"\xff", None])
def test_a_file_that_changed_while_its_code_hung_is_no_error(exercises, text):
    stack = f'  File "{exercises / FILE}", line 40 in allocate\n'
    if text is None:
        (exercises / FILE).unlink()
    else:
        (exercises / FILE).write_bytes(text)
    ended = process._ending(None, stack, 10.0, 180.0)
    assert ended.at == 40 and ended.what.endswith(f"{FILE}, line 40, in allocate")
