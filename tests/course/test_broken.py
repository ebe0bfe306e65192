"""A broken check is told as the course's own error, to students and before a class is graded."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from four_ways import different
from thorough import thorough_after

import minikv
from minikv.course.exercise_data.manifest import find

ONE = find("04.1")
HOME = Path("minikv/course/chapters/ch04_paged_blocks")
WRONG = 'raise KeyError("ours")'
PLAY = f"""
def broken(mine, program, log):
    {WRONG}
scenario("04.1", broken, Group("a line", [1], look="here"))
"""
BOTH = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from minikv.__main__ import run
told = []
for arguments in json.loads(sys.argv[1]):
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = run(arguments)
    told.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(told))
"""
BY_HAND = f"""
from minikv.course.judge.checking import check
@check("04.1", "by hand")
def _(mine):
    {WRONG}
"""
PLANTS = {  # file: what is added to it; what is said, and whether `grade` says so before it begins
    "a record": ("mistakes.toml", '["04.1"."ours"]\nedit = "gone => gone"\ncause = "a"\nlook = "b"',
                 ("mistakes.toml", "04.1, ours"), True),
    "a target": ("chapter.toml", ('"minikv.blocks:BlockPool"', '"minikv.blocks:Pool"'),
                 ("chapter.toml, 04.1, target minikv.blocks:Pool: ", "has no Pool"), True),
    "a method": ("chapter.toml", ('allocate = "04.1"', 'alocate = "04.1"'),
                 ("chapter.toml, 04.1, target", "has no BlockPool.alocate"), True),
    "an import": ("scenarios.py", WRONG, ("scenarios.py, line", "KeyError: 'ours'"), True),
    "a play": ("scenarios.py", PLAY, ("scenarios.py, line", "04.1, a line", "ours"), False),
    "a check by hand": ("scenarios.py", BY_HAND, ("scenarios.py, line", "KeyError"), False),
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a copy of the course."""
    root = tmp_path_factory.mktemp("broken")
    leave = shutil.ignore_patterns("*.pyc.*", "*.tmp.*")
    shutil.copytree(Path(minikv.__file__).parent, root / "minikv", ignore=leave)
    return root


@pytest.mark.parametrize("plant", thorough_after(1, PLANTS))
def test_an_error_of_ours_is_not_told_as_the_students(root, tmp_path, plant):
    file, more, says, at_once = PLANTS[plant]
    text = different(ONE).replace("def allocate(self)", "def allocate(self, one)")
    (tmp_path / ONE.chapter.file_name).write_text(text)

    table = tmp_path / "marks.csv"
    both = ["check", ONE.id], ["grade", str(tmp_path), "--csv", str(table), "--jobs", "1"]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{os.getenv('PYTHONPATH', '')}"}
    environment["MINIKV_EXERCISES"] = str(tmp_path)
    place = root / HOME / file
    before = place.read_text()
    place.write_text(before.replace(*more) if isinstance(more, tuple) else f"{before}\n{more}\n")
    try:
        command = [sys.executable, "-c", BOTH, json.dumps(both)]
        said = subprocess.check_output(command, cwd=root, env=environment, text=True)
    finally:
        place.write_text(before)
    check, grade = json.loads(said)
    for said in (" ".join(check[2].split()), grade[2] if at_once else table.read_text()):
        assert "the check itself is broken, and no solution is to blame" in said, grade
        assert all(one in said for one in says), said
    assert check[:2] == [2, ""] and grade[0] == (2 if at_once else 1)
    assert table.exists() != at_once
