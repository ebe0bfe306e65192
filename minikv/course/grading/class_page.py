"""One page about a class: how the marks are spread, what went wrong most often, what to read."""

from collections import Counter, defaultdict
from collections.abc import Container
from html import escape
from statistics import median

from minikv.course.exercise_data.manifest import chapter_of, find
from minikv.course.exercise_data.mistakes import mistakes_of
from minikv.course.exercise_data.plan import TermPlan
from minikv.course.exercise_data.skeletons import skeleton, solved
from minikv.course.grading import tables
from minikv.course.grading.hand_ins import Student
from minikv.course.grading.similarity import ALIKE, nearness, pairs_alike
from minikv.course.grading.tables import Results, is_absent
from minikv.course.judge import containment

MOST = 40  # rows of a table
NONE = "<p>None.</p>"
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1b1b; background: #fff; }
.table { overflow-x: auto; }
table { border-collapse: collapse; min-width: 50%; margin: 1rem 0; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #ccc;
         vertical-align: top; overflow-wrap: break-word; }
td.n, th.n { text-align: right; white-space: nowrap; }
.bar { display: inline-block; height: .8rem; background: #0072b2; }
@media (prefers-color-scheme: dark) {
  body { color: #e8e8e8; background: #16181c; } th, td { border-color: #444; }
  .bar { background: #56b4e9; } }
"""


def as_page(results: Results, plan: TermPlan) -> str:
    parts = [
        _about(results, plan),
        _section("Points", _points(results, plan)),
        _section("How many exercises each student passed", _spread(results)),
        _section("Exercises", _exercises(results)),
        _section("What went wrong most often", _mistakes(results)),
        _section("Not checked", _not_checked(results)),
        _section("Marks of yours, which win over the checks", _overridden(results, plan)),
        _section("Equal files", _equal(results)),
        _section("Solutions that are alike", _alike(results)),
        _section("As the reference", _as_the_reference(results)),
        _section("Lines to read", _lines(results)),
        _section("How this was checked", _how(results)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>minikv: a class</title><style>{STYLE}</style></head><body>"
        f"<h1>minikv: a class</h1>{''.join(parts)}</body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>{body}" if body != NONE else ""


def _table(head: list[str], rows: list[list[str]], numbers: Container[int] = ()) -> str:
    """Cells are HTML; columns in `numbers` are set to the right."""

    def row(cells: list[str], tag: str) -> str:
        kind = [' class="n"' if i in numbers else "" for i in range(len(cells))]
        inner = "".join(f"<{tag}{k}>{c}</{tag}>" for k, c in zip(kind, cells, strict=True))
        return f"<tr>{inner}</tr>"

    more = f"<p>… and {len(rows) - MOST} more.</p>" if len(rows) > MOST else ""
    body = "".join(row(cells, "td") for cells in rows[:MOST])
    if not rows:
        return NONE
    return f'<div class="table"><table>{row(head, "th")}{body}</table></div>{more}'


def _bar(count: int, most: int) -> str:
    return f'<span class="bar" style="width:{20 * count / max(1, most):.2f}rem"></span>'


def _about(results: Results, plan: TermPlan) -> str:
    ids = {report.exercise for _, report in results}
    weeks = [week for week in plan.weeks if ids & {exercise.id for exercise in week.exercises}]
    told = ", ".join(f"week {week.number} {week.due}".strip() for week in weeks)
    names = {student.name for student, _ in results}
    nothing = names - {student.name for student, report in results if not is_absent(report)}
    return (
        (f"<p>{escape(plan.name)}: {told}.</p>" if weeks else "")
        + f"<p>{len(names)} students, {len(ids)} exercises."
        + (f" {len(nothing)} handed in no file that is asked for." if nothing else "")
        + "</p>"
    )


def _points(results: Results, plan: TermPlan) -> str:
    possible, reached = tables.points(results, plan)
    sums = {name: sum(mine) for name, mine in reached.items()}
    known = [one for one in sums.values() if one == one] or [0]
    said = (
        f"<p>From {min(known):g} to {max(known):g} of {sum(possible.values()):g}; "
        f"the median is {median(known):g}.</p>"
    )
    kind = "" if plan.weeks else "chapter "
    heads = [f"{kind}{part}, of {most:g}" for part, most in possible.items()]
    heads += ["in all"] if len(heads) > 1 else []
    by_hand = {name for name, *_ in tables.overridden(results, plan)}
    rows = [
        [escape(name) + (" *" if name in by_hand else ""),
         *map(tables.shown_points, [*mine, sums[name]][: len(heads)])]
        for name, mine in reached.items()
    ]  # fmt: skip
    star = "<p>* with a mark of yours, below.</p>" if by_hand else ""
    return said + _table(["student", *heads], rows, range(1, len(heads) + 1)) + star


def _spread(results: Results) -> str:
    passed = Counter({student.name: 0 for student, _ in results})
    passed.update(student.name for student, report in results if report.passed)
    total = len({report.exercise for _, report in results})
    step = max(1, -(-total // 20))
    spread = Counter(count // step for count in passed.values())
    rows = [
        [f"{k * step}" + (f" to {min(total, k * step + step - 1)}" if step > 1 else ""),
         str(spread[k]), _bar(spread[k], max(spread.values()))]
        for k in range(total // step + 1)
    ]  # fmt: skip
    return _table(["passed", "students", ""], rows, {0, 1})


def _exercises(results: Results) -> str:
    counts: dict[str, Counter] = defaultdict(Counter)
    for _, report in results:
        state = "not handed in" if is_absent(report) else report.status
        counts[report.exercise][state] += 1
    rows = [
        [f"{id_} {escape(find(id_).title)}", *(str(each[s]) for s in STATES),
         _bar(each["passed"], each.total())]
        for id_, each in sorted(counts.items())
    ]  # fmt: skip
    out, numbers = [], range(1, len(STATES) + 1)
    for start in range(0, len(rows), MOST):
        out.append(_table(["exercise", *STATES, ""], rows[start : start + MOST], numbers))
    return "".join(out)


STATES = ("passed", "failed", "not started", "not handed in", "not finished")


def _mistakes(results: Results) -> str:
    """By the names of the known mistakes; a failure that is none of them counts by its line."""
    made: Counter = Counter()
    for _, report in results:
        if report.status == "failed":
            causes = {line.cause for line in report.lines if not line.ok} - {None}
            known = {one.cause: one.name for one in mistakes_of(find(report.exercise))}
            named = {(known[cause], cause) for cause in causes if cause in known}
            first = next((line for line in report.lines if not line.ok), None)
            if not named and first is not None:
                named = {(first.name, first.cause or "none that is known")}
            made.update((report.exercise, *one) for one in named)
    rows = [
        [str(count), f"{id_} {escape(find(id_).title)}", escape(name), escape(cause)]
        for (id_, name, cause), count in made.most_common()
    ]
    return _table(["students", "exercise", "what", "cause"], rows, {0})


def _not_checked(results: Results) -> str:
    rows = [[escape(cell) for cell in row] for row in tables.not_checked(results)]
    return _table(["student", "why"], rows)


def _overridden(results: Results, plan: TermPlan) -> str:
    rows = [[escape(cell) for cell in row] for row in tables.overridden(results, plan)]
    head = ["student", "exercise", "its check", "points", "yours", "why"]
    return _table(head, rows, {3, 4})


def _texts(results: Results) -> dict[str, dict[str, str]]:
    """What was handed in, by chapter and student; no skeletons."""
    students = {student.name: student for student, _ in results}
    found: dict[str, dict[str, str]] = {}
    for number in sorted({report.exercise[:2] for _, report in results}):
        given = "", skeleton(chapter_of(number))
        texts = ((name, _written(one, number)) for name, one in students.items())
        found[number] = {name: text for name, text in texts if text not in given}
    return found


def _equal(results: Results) -> str:
    rows = []
    for number, texts in _texts(results).items():
        groups: dict[str, list[str]] = defaultdict(list)
        for name, text in texts.items():
            groups[text].append(name)
        alike = [names for names in groups.values() if len(names) > 1]
        rows += [[number, str(len(names)), escape(", ".join(names))] for names in alike]
    return _table(["chapter", "students", "who"], rows, {1})


def _as_the_reference(results: Results) -> str:
    rows = []
    for number, texts in _texts(results).items():
        given = skeleton(chapter_of(number)), solved(chapter_of(number))
        shares = ((nearness(text, *given), name) for name, text in texts.items())
        rows += [
            [f"{share:.0%}", number, escape(name)]
            for share, name in sorted(shares, reverse=True)
            if share >= ALIKE
        ]
    said = (
        "<p>The share of a solution's fingerprints that the reference has, too. It proves nothing: "
        "the reference is public, and right code is often written in the same way.</p>"
    )
    return said + _table(["as the reference", "chapter", "student"], rows, {0})


def _alike(results: Results) -> str:
    rows = []
    for number, texts in _texts(results).items():
        chapter = chapter_of(number)
        given = skeleton(chapter), solved(chapter)
        for share, one, other in pairs_alike(texts, given):
            rows.append([f"{share:.0%}", number, escape(one), escape(other)])
    said = (
        "<p>The share of the shorter solution's fingerprints that both have, without what the "
        "skeleton gives, the reference has, or a fifth of the class has. A high share is a reason "
        "to read both, and no more: short exercises have few right answers.</p>"
    )
    return said + _table(["in common", "chapter", "one", "the other"], rows, {0, 1})


def _written(student: Student, number: str) -> str:
    return student.text(chapter_of(number).exercises[0])


def _lines(results: Results) -> str:
    rows = [
        [escape(one), escape(name), f"<code>{escape(line)}</code>"]
        for one, name, line in tables.lines_to_read(results)
    ]
    said = "<p>They are not plain code: they could reach for more than an exercise needs.</p>"
    return said + _table(["student", "file", "line"], rows)


def _how(results: Results) -> str:
    lines = sorted({f"{r.exercise}: {name}" for _, r in results for name in r.on_its_word})
    word = (
        "<p>These lines rest on what the process says that runs the solution:</p><ul>"
        + "".join(f"<li>{escape(line)}</li>" for line in lines)
        + "</ul>"
    )
    cannot, can = containment.reach()
    return (
        "<p>On this machine a solution has limits on time, memory, processes and the size of files."
        + (f" It cannot {tables.in_words(cannot, 'or')}." if cannot else "")
        + (f" It can {tables.in_words(can, 'and')}." if can else "")
        + " Marks are written by a process that does not import it.</p>"
        + (word if lines else "")
    )
