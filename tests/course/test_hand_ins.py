"""What a class has handed in, as platforms give it, and what a plan makes of it."""

import csv
import io
import re
import zipfile
from argparse import Namespace

import pytest
from four_ways import different, right

from minikv.course.commands import main
from minikv.course.exercise_data import plan as plans
from minikv.course.exercise_data.manifest import ReaderError, find
from minikv.course.exercise_data.skeletons import skeleton, solved
from minikv.course.grading import class_page, grade, release, tables
from minikv.course.grading.hand_ins import Student, find_student, students_in
from minikv.course.grading.similarity import nearness
from minikv.course.judge.result import Line, Result
from minikv.course.reader import progress_file, routes, start
from minikv.course.reader.overview import Overview

ONE, TWO = find("04.1"), find("04.2")
FILE = ONE.chapter.file_name
STEM = FILE.removesuffix(".py")
MOODLE = "_4711_assignsubmission_file"


def zipped(**files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "/") + ".py", text)
    return out.getvalue()


DOWNLOADS = {  # where a file lies in a download: whose it is, and their number there
    f"Ada Lovelace{MOODLE}_/{FILE}": ("Ada Lovelace", "4711"),  # Moodle, in folders
    f"Ada Lovelace{MOODLE}/{STEM} (1).py": ("Ada Lovelace", "4711"),
    f"Ada Lovelace{MOODLE}_{FILE}": ("Ada Lovelace", "4711"),  # Moodle, without
    f"lovelaceada_4711_2342_{FILE}": ("lovelaceada", "4711"),  # Canvas
    f"lovelaceada_LATE_4711_2342_{STEM}-1.py": ("lovelaceada", "4711"),
    f"Ada Lovelace{MOODLE}_/hand-in.zip": ("Ada Lovelace", "4711"),
    "lovelaceada_4711_2342_hand-in.zip": ("lovelaceada", "4711"),
}


@pytest.mark.parametrize("place", DOWNLOADS)
def test_a_platforms_download_is_read_as_it_is(tmp_path, place):
    file = tmp_path / place
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(zipped(**{f"me__{STEM}": "mine", "__MACOSX___x": ""}) if ".zip" in place
                     else b"mine")  # fmt: skip
    other = tmp_path / place.replace("4711", "12").replace("Ada", "Bea").replace("ada", "bea")
    other.parent.mkdir(exist_ok=True)
    other.write_text("a damaged archive, or another's file")
    one, two = sorted(students_in([tmp_path], {}), key=lambda one: -len(one.id))
    assert (one.name, one.id, one.file(ONE)) == (*DOWNLOADS[place], b"mine")
    assert "ea" in two.name and two.id == "12"
    if ".zip" in place:
        with pytest.raises(OSError, match="zip"):
            two.file(ONE)


@pytest.mark.parametrize("places", [
    [f"Ada Lovelace{MOODLE}/{FILE}", "Ada Lovelace_4711_assignsubmission_onlinetext/text.html"],
    [f"Ada Lovelace{MOODLE}_{FILE}", "Ada Lovelace_4711_assignsubmission_onlinetext_text.html"],
    [f"Ada Lovelace{MOODLE}_me.zip", "Ada Lovelace_4711_assignsubmission_onlinetext_text.html"],
    [f"lovelaceada_4711_2342_{FILE}", "lovelaceada_LATE_4711_2343_ch05_copy_on_write.py"],
])  # fmt: skip
def test_all_that_a_platform_has_of_one_student_is_theirs(tmp_path, places):
    for place in map(tmp_path.joinpath, places):
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(zipped(**{STEM: "mine"}) if place.suffix == ".zip" else b"mine")
    [one] = students_in([tmp_path], {})
    assert one.file(ONE) == b"mine" and one.on_canvas == places[0].startswith("lovelace")


@pytest.mark.parametrize("kinds", [("file", "onlinetext"), ("onlinetext", "file")])
def test_a_students_folders_given_one_by_one_are_one_student(tmp_path, kinds):
    """As a shell makes them of `download/*`. Of whom there is a text alone, there is a row."""
    for name, kind in [*(("Ada_4711", kind) for kind in kinds), ("Ben_12", "onlinetext")]:
        (folder := tmp_path / f"{name}_assignsubmission_{kind}").mkdir()
        (folder / (FILE if kind == "file" else "text.html")).write_text("mine")
    given = [tmp_path / f"Ada_4711_assignsubmission_{kind}" for kind in kinds]
    one, two = students_in([*given, tmp_path / "Ben_12_assignsubmission_onlinetext"], {})
    assert (one.name, one.file(ONE)) == ("Ada", b"mine")
    assert (two.name, two.file(ONE)) == ("Ben", None)


def test_names_are_the_rosters_and_two_of_one_name_are_told_apart(tmp_path):
    for number in (1, 2):
        (tmp_path / f"Jo Li_{number}_assignsubmission_file").mkdir()
    error, *found = students_in([tmp_path], {"Jo Li 2": "li2", "Al": "al"})
    assert "roster: has no name 'Jo Li 1'" in str(error)
    assert {one.name: one.file(ONE) for one in found} == dict.fromkeys(("Jo Li 1", "li2", "al"))
    assert not [*students_in([tmp_path / "none"], {"Al": "al"})][1:], "no folder, and no marks"


@pytest.mark.parametrize("other", [FILE, f"{STEM} (2).py"])
def test_of_two_files_none_is_guessed(other, tmp_path):
    """Also if one has the name itself: it may be what the student began with."""
    for name in (f"{STEM} (1).py", other):
        (tmp_path / name).touch()
    with pytest.raises(OSError, match="which one is meant"):
        find_student(tmp_path).file(ONE)


@pytest.mark.thorough
def test_a_hand_in_without_a_file_has_a_row_and_no_advice(tmp_path, capsys):
    """What lies there under another name is named, with the name that is asked for."""
    (tmp_path / "plan.toml").write_text(f'roster = "roster.csv"\n{PLAN}')
    (tmp_path / "by-hand.csv").write_text("student,exercise,points,why\n")
    (tmp_path / "roster.csv").write_text("name,username\nada,ada\nben,ben\ncleo,cleo\n")
    for name, file in (("ada", FILE), ("ben", "ch4_blocks.py")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(skeleton(ONE.chapter))
    command = ["grade", *(str(tmp_path / name) for name in ("ada", "ben")), "--jobs", "1"]
    command += ["--plan", str(tmp_path / "plan.toml"), "--csv", str(tmp_path / "marks.csv")]
    assert main([*command, "--page", str(tmp_path / "page")]) == 0
    rows = {(row["student"], row["exercise"]): row
            for row in csv.DictReader((tmp_path / "marks.csv").open())}  # fmt: skip
    there = f"no {FILE} was handed in; there is ch4_blocks.py: rename what is meant"
    for name, message in (("ben", there), ("cleo", "nothing was handed in")):
        for exercise in (ONE, TWO):
            row = rows[name, exercise.id]
            assert (row["status"], row["points"], row["message"]) == ("not started", "0", message)
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[1:3] for line in said[1:4]] == [["·", "·"], ["-", "-"], ["-", "-"]]
    assert f"ben: {there}" in said and there in (tmp_path / "page").read_text()


# ── A plan ────────────────────────────────────────────────────────────────────

PLAN = """
name = "Two weeks"
partial = true
overrides = "by-hand.csv"
[[week]]
deadline = 2027-03-05T23:59:00
exercises = ["04.1"]
[[week]]
exercises = ["04.2"]
points."04.2" = 8
"""


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "by-hand.csv").write_text("student,exercise,points,why\nben,04.1,1.5,talked to\n")
    return plans.read(tmp_path / "plan.toml")


WRONG_TABLES = {
    "ben,04.1,9,why": r"ben, 04.1: points must be a number from 0 to 2, was '9'",
    "ben,04.1,-1,why": "from 0 to 2, was '-1'",
    "ben,04.1,one,why": "from 0 to 2, was 'one'",
    "ben,04.1,nan,why": "from 0 to 2, was 'nan'",
    "ben,04.1,1, ": "ben, 04.1: why: the student will ask",
    "ben,05.1,1,why": "ben, 05.1: the exercise is in no week",
    "ben,04.1,1,why\nben,04.1,2,why": "ben, 04.1: there are two rows",
    "b\xe9n,04.1,1,why": "by-hand.csv: must be UTF-8",
}


@pytest.mark.parametrize("rows", WRONG_TABLES)
def test_an_override_that_no_mark_can_follow_is_refused(plan, rows, tmp_path):
    text = f"student,exercise,points,why\n{rows}\n"
    (tmp_path / "by-hand.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(ReaderError, match=WRONG_TABLES[rows]):
        plans.read(tmp_path / "plan.toml")


def test_a_table_that_is_not_there_two_of_one_name_and_no_yes_or_no_are_refused(plan, tmp_path):
    file = tmp_path / "plan.toml"
    (tmp_path / "roster.csv").write_text("name,username\nAda,al\nBen,al\n")
    for line, says in {
        'roster = "roster.csv"': "roster: username: twice, al",
        'roster = "none.csv"': "none.csv: is not beside the plan; begin it with name,username",
        'partial = "no"': "partial: must be true or false, was 'no'",
    }.items():
        file.write_text(line + "\n" + PLAN.replace("partial = true\n", ""))
        with pytest.raises(ReaderError, match=says):
            plans.read(file)


def test_an_override_of_nobody_is_told(plan, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grade, "grades", lambda *_: iter(()))
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / FILE).write_text(skeleton(ONE.chapter))
    command = ["grade", str(tmp_path / "ada"), "--plan", str(tmp_path / "plan.toml")]
    assert main([*command, "--week", "1", "--jobs", "1"]) == 0
    assert "overrides: not among these hand-ins: ben" in capsys.readouterr().err


@pytest.fixture
def results(tmp_path):
    """Ada and Ben: one of two checks of 04.1, and all of 04.2."""
    lines = [Line("a", True), Line("b", False, "what")]
    return [
        (Student(name, tmp_path), result)
        for name in ("ada", "ben")
        for result in (Result("04.1", "failed", 2, lines), Result("04.2", "passed", 2))
    ]


def test_points_are_the_plans_by_lines_and_by_hand(plan, results):
    head, ada, ben = csv.reader(io.StringIO(tables.for_moodle(results, plan)))
    assert head == ["username", "minikv week 1 (of 2)", "minikv week 2 (of 8)", "minikv (of 10)"]
    assert ada == ["ada", "1.0", "8", "9.0"]  # one of two lines of two points
    assert ben == ["ben", "1.5", "8", "9.5"]
    rows = {(r["student"], r["exercise"]): r
            for r in csv.DictReader(io.StringIO(tables.as_csv(results, plan)))}  # fmt: skip
    assert (
        rows["ben", "04.1"]["overridden"] == "talked to" and rows["ben", "04.1"]["points"] == "1.5"
    )
    page = class_page.as_page(results, plan)
    row = re.sub("</td><td[^>]*>", "|", page)
    assert "ben|04.1|failed|1|1.5|talked to" in row and "ben *|1.5|8|9.5" in row
    assert "Two weeks: week 1 until Fri 05 March 2027, 23:59, week 2." in page
    assert "ben, 04.1: 1.5 instead of 1 points: talked to" in tables.as_text(results, plan)
    thirds = [
        (results[0][0], Result(id_, "failed", 3, results[0][1].lines)) for id_ in ("04.1", "04.2")
    ]
    assert tables.for_moodle(thirds, plan).splitlines()[1] == "ada,0.67,2.67,3.34"
    found = Result("04.1", "not started", 2, [Line("a", True)])  # a bug as it was found
    assert tables.given(results[0][0], found, plan) == 0
    without = plans.NO_PLAN
    assert (
        next(csv.reader(io.StringIO(tables.for_moodle(results, without))))[1] == "minikv 04 (of 4)"
    )


def test_a_week_of_the_plan_is_graded(tmp_path, plan, monkeypatch):
    asked = []
    monkeypatch.setattr(grade, "grades", lambda pool, store, students, exercises: iter(
        asked.append([exercise.id for exercise in exercises]) or ()))  # fmt: skip
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / FILE).touch()
    for more, ids in ([], ["04.1", "04.2"]), (["--week", "2"], ["04.2"]):
        command = ["grade", str(tmp_path / "ada"), "--plan", str(tmp_path / "plan.toml")]
        assert main([*command, *more]) == 0 and asked.pop() == ids


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('["04.2"]', '["04.9"]', "chapter 04 has the exercises"),
        ("04.2", "04.1", "in two weeks: 04.1"),
        ('points."04.2"', 'points."04.1"', "week 2: points: must be"),
        ("2027-03-05T23:59:00", '"soon"', "week 1: deadline: must be like"),
        ("[[week]]\ndead", "[[week]]\nroom = 3\ndead", "week 1: there is no field room"),
        ("partial", "partially", "partially"),
        ("by-hand", "gone", "gone.csv"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(tmp_path, plan, old, new, says):
    assert old in PLAN
    (tmp_path / "plan.toml").write_text(PLAN.replace(old, new))
    with pytest.raises(ReaderError, match=says) as error:
        plans.read(tmp_path / "plan.toml")
    assert "plan.toml" in str(error.value)


@pytest.mark.parametrize(("name", "weeks"), [("six_weeks", 6), ("fourteen_weeks", 14)])
def test_two_plans_come_along(name, weeks):
    assert len(plans.read(name).weeks) == weeks
    with pytest.raises(ReaderError, match=r"a file, or .*six_weeks"):
        plans.read("seven_weeks")


@pytest.mark.thorough
def test_progress_follows_the_plan_in_the_readers_folder(exercises, tmp_path, plan):
    assert start.run(Namespace(folder=tmp_path, route=None, no_lab=True, plan="six_weeks")) == 0
    assert len(routes.chosen().weeks) == 6
    (tmp_path / "class.toml").write_text(PLAN)
    routes.follow(str(tmp_path / "class.toml"))
    assert "overrides" not in (tmp_path / "plan.toml").read_text()
    told = Overview().on_route()
    assert told.startswith(
        "Two weeks (»): 0 of 2 exercises passed. Week 1, until Fri 05 March 2027"
    )
    assert progress_file.to_do_next().id == "04.1"


def test_a_week_is_released_with_its_exercises_points_and_deadline(tmp_path, plan):
    made = release.assignment("1", str(tmp_path / "plan.toml"))
    release.write_source(made, tmp_path / "course")
    folder = tmp_path / "course" / "source" / "week01"
    assert {path.name for path in folder.iterdir()} == {FILE, "week01.ipynb"}
    cells = {cell.id: cell for cell in release.source(made).cells}
    assert "until Fri 05 March 2027, 23:59" in cells["opening"].source
    assert "`release(0)` | `ValueError`" in cells["asked-04-1"].source
    assert cells["check-04-1"].source == 'must_pass("04.1", partly=2)'
    assert not any("04-2" in name for name in cells)
    assert release.assignment("2", str(tmp_path / "plan.toml")).points == 8


# ── Copies ────────────────────────────────────────────────────────────────────


def test_equal_files_are_groups_however_many_have_them(tmp_path):
    results = []
    for name in ("ada", "ben", "cleo", "dan", "eva"):
        (tmp_path / name).mkdir()
        text = skeleton(ONE.chapter) if name in ("dan", "eva") else right(ONE)
        (tmp_path / name / FILE).write_text(text)
        results.append((find_student(tmp_path / name), Result(ONE.id, "passed", 1)))
    page = class_page.as_page(results, plans.NO_PLAN)
    assert '<td>04</td><td class="n">3</td><td>ada, ben, cleo</td>' in page
    assert "dan, eva" not in page, "what nobody has written is no copy"


def test_the_reference_is_seen_under_other_names():
    given, reference = skeleton(ONE.chapter), solved(ONE.chapter)
    copied = reference.replace("num_new", "how_many").replace("block_ids", "places")
    assert nearness(copied, given, reference) > 0.9
    assert nearness(given, given, reference) == 0
    own = different(find("04.4"))
    assert nearness(own, given, reference) < 0.6
