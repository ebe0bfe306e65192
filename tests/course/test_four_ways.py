"""Every check, four ways: the skeleton is refused, the reference passes, a right solution
that is written otherwise passes, and each plausible mistake is caught and named."""

import ast
from operator import attrgetter
from traceback import walk_tb

import pytest
from four_ways import (
    EXERCISES,
    all_mistakes,
    different,
    is_representative,
    on_the_way,
    reference_sources,
    right,
    text_with,
)
from thorough import thorough_after

from minikv.course.exercise_data.manifest import chapters, find
from minikv.course.exercise_data.mistakes import mistake_named, mistakes_of, text_of_mistake
from minikv.course.exercise_data.skeletons import definitions, skeleton, targets
from minikv.course.judge import process, scenarios
from minikv.course.judge.checking import CHECKS, MODEL_RUNS
from minikv.course.judge.examine import COMPILES, examine, import_checks
from minikv.course.judge.scenarios import Difference, Outcome, Played, diagnose
from minikv.course.reports.report import Report


def case(exercise, *more):
    """Named by its exercise, and by the mistake if there is one."""
    name = ": ".join([exercise.id, *(mistake.name for mistake in more)])
    thorough = not is_representative(exercise, *more)
    return pytest.param(exercise, *more, id=name, marks=[pytest.mark.thorough] * thorough)


EACH = [case(exercise) for exercise in EXERCISES]
MISTAKES = [case(*pair) for pair in all_mistakes()]


@pytest.mark.parametrize("exercise", EACH)
def test_the_skeleton_is_not_a_solution(exercise, monkeypatch):
    import_checks(exercise.id)
    monkeypatch.setitem(CHECKS, exercise.id, not_compiled(exercise))
    report = examine(exercise, skeleton(exercise.chapter))
    assert report.status == "not started"
    assert any(not line.ok for line in report.lines), "no check fails on the skeleton"
    failures = [line for line in report.lines if not line.ok]
    if exercise.kind == "debug":  # the symptom, and not its cause
        assert not any(line.cause or line.look for line in failures)
    else:
        assert any(f"Exercise {exercise.id}" in line.what for line in failures)


KERNELS = [  # but for a formula, and tensors
    e for e in EXERCISES if e.id[:2] in ("08", "09") and e.id not in ("09.3", "09.7")
]


@pytest.mark.parametrize("exercise", [case(e) for e in KERNELS])
def test_a_case_that_goes_well_is_not_told(exercise, request):
    """Of kernels a program is several cases in turn, and only one that goes wrong has a story."""
    import_checks(exercise.id)
    if exercise.chapter.needs == "triton":
        request.getfixturevalue("quick_interpreter")
    for scenario in scenarios.SCENARIOS[exercise.id]:
        for group in scenario.groups:
            for place in range(len(group.programs)):
                events = scenario.expected(group, place)
                assert events and not any(one.error or one.text for one in events), group.name


def not_compiled(exercise):
    """The checks that ask no GPU's compiler, a process of its own."""
    return [check for check in CHECKS[exercise.id] if check.name != COMPILES]


RUN = "01.1", "03.1", "13.1"  # by attention, by a cache, by two engines


@pytest.fixture
def examined(pytestconfig, monkeypatch):
    """`examined(exercise, text)`: its report. What `test_journey` runs the model on, too, does
    not run it here, and a GPU's compiler is not asked again; and what it does not build on a
    reader's parts, it plays as it is played here. Without it, the model runs on a few.
    """
    with_journey = not pytestconfig.option.markexpr  # which is thorough

    def report(exercise, text):
        import_checks(exercise.id)
        there = text == text_with(exercise, on_the_way(exercise))
        elsewhere = there and not pytestconfig.getoption("chapter")
        if elsewhere:
            if exercise.kind != "build" and with_journey:
                pytest.skip("test_journey checks the same text")
            monkeypatch.setitem(CHECKS, exercise.id, not_compiled(exercise))
        if elsewhere or not (with_journey or exercise.id in RUN):
            monkeypatch.delitem(MODEL_RUNS, exercise.id, raising=False)
        return examine(exercise, text)

    return report


@pytest.mark.thorough
@pytest.mark.parametrize("exercise", EACH)
def test_the_reference_passes(exercise, exercises):
    """As a reader's solution: in its own process, behind its fences, and the model runs on it."""
    (exercises / exercise.chapter.file_name).write_text(right(exercise))
    report = Report.of(process.run(exercise))
    assert report.passed, report.text()


PASSED_ON = "what `copy` raises", "the caller gets the error", "Raises what was put"


@pytest.mark.parametrize("exercise", EACH)
def test_each_error_that_is_asked_for_is_in_the_contract(exercise):
    """It is named in the docstring of a function that raises it, or that passes it on."""
    import_checks(exercise.id)
    found = definitions(ast.parse(skeleton(exercise.chapter)))
    asked = {path: ast.get_docstring(found[path]) or "" for path in reference_sources(exercise)}
    for scenario in scenarios.SCENARIOS.get(exercise.id, ()):
        for group in scenario.groups:
            for place in range(len(group.programs)):
                for event in scenario.expected(group, place):
                    error = event.error and event.error._tell.args[0].__traceback__
                    codes = [frame.f_code for frame, _ in walk_tb(error)] if error else []
                    own = [asked[code.co_qualname] for code in codes if code.co_qualname in asked]
                    said = " ".join(" ".join(text.split()) for text in own)
                    assert not own or any(one in said for one in (event.error.name, *PASSED_ON)), (
                        f"{event.text} raises {event.error.name}"
                    )


def share_a_class():
    """Exercises whose methods are in a class with those of others."""
    for exercise in EXERCISES:
        owners = {path.partition(".")[0]: set() for path in exercise.chapter.places if "." in path}
        for path, id_ in exercise.chapter.places.items():
            owners.get(path.partition(".")[0], set()).add(id_)
        if any(exercise.id in ids and len(ids) > 1 for ids in owners.values()):
            yield exercise


@pytest.mark.parametrize("exercise", thorough_after(1, share_a_class()), ids=attrgetter("id"))
def test_mistakes_in_the_others_of_its_class_are_not_its_own(exercise, monkeypatch):
    import_checks(exercise.id)
    monkeypatch.delitem(MODEL_RUNS, exercise.id, raising=False)
    others = [mistakes_of(one)[0].sources for one in exercise.chapter.exercises]
    sources = {path: text for one in others for path, text in one.items()}
    report = examine(exercise, text_with(exercise, sources | reference_sources(exercise)))
    assert report.passed, report


@pytest.mark.parametrize("exercise", EACH)
def test_a_solution_written_otherwise_passes(exercise, examined):
    text = different(exercise)
    assert text != right(exercise)
    report = examined(exercise, text)
    assert report.passed, report


def begun(played, mistake, most_right):
    """The outcome of a line's first programs, those that a diagnosis looks at in any case."""
    differs, right = {}, []
    for place in range(len(played.group.programs)):
        wrong = played.scenario.symptoms_of(mistake, played.group, place)
        if wrong:
            differs[place] = Difference("", "", wrong, None)
        else:
            right.append(place)
        if len(differs) == scenarios.LEAST_DIFFERING or len(right) == most_right:
            break
    return Outcome(played, differs, right)


def is_named_early(exercise, mistake):
    """Whether the first programs of some lines are enough to name the mistake. Then all programs
    of all lines name it, too: the mistake is like itself in whatever else is looked at, and none
    that was less like it becomes more so."""
    lines = [line for line in CHECKS[exercise.id] if isinstance(line, Played)]
    outcomes = []
    for line in lines:
        outcomes.append(begun(line, mistake, scenarios.looked_at_right(len(lines))))
        if outcomes[-1].differs and mistake in diagnose(outcomes).values():
            return True
    return False


@pytest.mark.parametrize(("exercise", "mistake"), MISTAKES)
def test_a_mistake_is_caught_and_named(exercise, mistake, monkeypatch):
    """An exercise's first mistake, and what few programs do not name, is checked as a reader's."""
    # A slow machine is not a failure.
    monkeypatch.setattr(scenarios, "PLAY_LIMIT", 60.0)
    monkeypatch.setattr(scenarios, "DIAGNOSIS_LIMIT", 60.0)
    import_checks(exercise.id)
    # First, because it raises if the record no longer fits, which would then look like itself.
    text = text_of_mistake(exercise, mistake)
    if mistake is not mistakes_of(exercise)[0] and is_named_early(exercise, mistake):
        return
    with monkeypatch.context() as without:
        without.setitem(CHECKS, exercise.id, not_compiled(exercise))
        report = examine(exercise, text)
    if mistake.cause not in [line.cause for line in report.lines]:
        report = examine(exercise, text)
    assert not report.passed
    causes = [line.cause for line in report.lines if line.cause]
    assert mistake.cause in causes, report
    for line in report.lines:  # a failure always says what differs and where to look
        assert line.ok or (line.what and line.look), line


def half_fixed():
    """Exercises that break two functions, with one left broken, and how many bugs that are."""
    for id_, more in {"07.4": {}, "07.5": {"Scheduler.look_up": 2}, "08.6": {}}.items():
        for path, target in targets(find(id_).chapter).items():
            if target.exercise == id_:
                values = find(id_), path, target.skeleton, more.get(path, 1)
                marks = [pytest.mark.thorough] * (path != "RadixCache.unlock")
                yield pytest.param(*values, id=f"{id_}: {path}", marks=marks)


@pytest.mark.parametrize(("exercise", "path", "broken", "bugs"), list(half_fixed()))
def test_what_is_left_of_a_broken_pair_is_named_on_every_line(
    exercise, path, broken, bugs, monkeypatch
):
    monkeypatch.setattr(scenarios, "DIAGNOSIS_LIMIT", 60.0)  # a slow machine is not a failure
    report = examine(exercise, text_with(exercise, reference_sources(exercise) | {path: broken}))
    causes = {line.cause for line in report.lines if not line.ok}
    there = {mistake.cause for mistake in mistakes_of(exercise) if [*mistake.sources] == [path]}
    assert len(causes) == bugs and causes <= there, report


def test_a_line_that_tells_another_mistake_is_not_called_the_same():
    exercise = find("05.4")
    forgets = mistake_named(exercise, "forgets the token")
    [(path, source)] = forgets.sources.items()
    assert mistake_named(exercise, "never releases").sources == {
        path: reference_sources(exercise)[path].replace("parent.table.release()", "pass")
    }
    source = source.replace("parent.table.release()", "pass")
    report = examine(exercise, text_with(exercise, {path: source}))
    causes = {line.name: line.cause for line in report.lines}
    assert causes["one parent, four children"] == forgets.cause
    assert causes["nothing is chosen: everything is given back"] != forgets.cause


MOST_MISTAKES = 20  # of one exercise: what comes after these names hardly any reader's solution
MORE = {"13.2": (24, "without any of these, its mistake would be told as another")}


@pytest.mark.parametrize("exercise", EXERCISES, ids=attrgetter("id"))
def test_there_are_a_few_mistakes_and_each_line_says_where_to_look(exercise):
    import_checks(exercise.id)
    mistakes = mistakes_of(exercise)
    most, _ = MORE.get(exercise.id, (MOST_MISTAKES, ""))
    assert 4 <= len(mistakes) <= most, "the most natural come first: take out the last"
    assert all(check.look for check in CHECKS[exercise.id] if isinstance(check, Played))


def test_every_chapter_has_four_to_nine_exercises_of_several_kinds():
    first, *others = chapters().values()
    assert [exercise.id for exercise in first.exercises] == ["00.1"]  # three lines, by hand
    for chapter in others:
        assert 4 <= len(chapter.exercises) <= 9
        kinds = {exercise.kind for exercise in chapter.exercises}
        assert {"build", "debug"} <= kinds
