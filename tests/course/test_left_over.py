"""Nothing is left of an exercise that was taken out, or that has another number now: whatever
names one names one that there is. `mistakes.toml` and `chapter.toml` are refused when they are
read; here are all other places, with one message."""

import ast
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minikv.course.exercise_data.manifest import chapters

ROOT = Path(__file__).parents[2]
ID = re.compile(r"\d\d\.[1-9]")
IN_TEXT = re.compile(r"(?i)(?:exercises? |\(\"|^\| .*\| |, )(\d\d\.[1-9])(?=$|[\"),;:|]| to | \|)")
THERE = {exercise.id for chapter in chapters().values() for exercise in chapter.exercises}


def in_python(text: str) -> Iterator[tuple[str, str]]:
    """(id, what stands around it) of each text that is an id and nothing else."""
    for outer in ast.walk(ast.parse(text if re.search(f"[\"']{ID.pattern}[\"']", text) else "")):
        for node in ast.iter_child_nodes(outer):
            if isinstance(getattr(node, "value", None), str) and ID.fullmatch(node.value):
                yield node.value, ast.unparse(outer).partition("\n")[0][:60]


def in_toml(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(id, the keys that lead to it) of each key and text, and of a route's numbers."""
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        path = f"{name}.{key}" if name else str(key)
        yield from ((text, path) for text in (key, one) if ID.fullmatch(str(text)))
        if key == "exercises":
            yield from ((f"{name[-2:]}.{n}", path) for n in one if isinstance(n, int))
        if isinstance(one, dict | list):
            yield from in_toml(one, path)


def in_prose(text: str) -> Iterator[tuple[str, str]]:
    """(id, its line) of what a page or a notebook calls an exercise."""
    for line in text.splitlines():
        yield from ((found, line.strip()[:60]) for found in IN_TEXT.findall(line))


def in_notebook(text: str) -> Iterator[tuple[str, str]]:
    """As `in_prose`, of its cells without their outputs."""
    yield from in_prose("\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"]))


KINDS = {
    "minikv/course/**/*.py": in_python,
    "minikv/course/**/*.toml": lambda text: in_toml(tomllib.loads(text)),
    "tests/course/ch*/different.toml": lambda text: in_toml(tomllib.loads(text)),
    "docs/**/*.md": in_prose,
    "*.md": in_prose,
    "notebooks/*.ipynb": in_notebook,
}


def left_over(file: str, text: str, kind: str) -> list[str]:
    found = dict.fromkeys(KINDS[kind](text))
    return [
        f"{file}: there is no exercise {id_}: {name}" for id_, name in found if id_ not in THERE
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_exercise_that_is_named_is_there(kind):
    names = [path.relative_to(ROOT).as_posix() for path in ROOT.glob(kind)]
    found = [left_over(name, (ROOT / name).read_text("utf-8"), kind) for name in names]
    assert names and [one for each in found for one in each] == []


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("minikv/course/**/*.py", 'scenario("05.9", tables)', "05.9: scenario('05.9', tables)"),
        ("minikv/course/**/*.toml", '["05.9"]\nworks = ""', "05.9: 05.9"),
        ("minikv/course/**/*.toml", '[week."05"]\nexercises = [1, 9]', "05.9: week.05.exercises"),
        ("docs/**/*.md", "| 5 | copies | 05.1, 05.9 |", "05.9: | 5 | copies | 05.1, 05.9 |"),
        (
            "notebooks/*.ipynb",
            '{"cells": [{"source": ["check(\\"05.9\\")"]}]}',
            '05.9: check("05.9")',
        ),
    ],
)
def test_what_is_left_over_is_told_by_file_exercise_and_name(kind, text, says):
    assert left_over("a/file", text, kind) == [f"a/file: there is no exercise {says}"]


def test_no_answer_is_left_over():
    """What a chapter's `answers.py` defines is named somewhere else, too."""
    files = [*ROOT.glob("minikv/course/**/*"), *ROOT.glob("notebooks/*.ipynb")]
    texts = {f: f.read_text("utf-8") for f in files if f.suffix in (".py", ".toml", ".ipynb")}
    words = {file: re.findall(r"\w+", text) for file, text in texts.items()}
    used = Counter(word for found in words.values() for word in found)
    for file in (file for file in texts if file.name == "answers.py"):
        names = [getattr(node, "name", "main") for node in ast.parse(texts[file]).body]
        assert [name for name in names if used[name] < 2] == [], f"{file}: nothing names these"
