"""Lays out an empty chapter: its folder, its notebook, its tests. See CONTRIBUTING.md.

    python -m minikv.course new 20 sparse_attention

This is the smallest chapter that passes lint, with one exercise that you replace.
"""

import argparse
import re
import sys
from pathlib import Path

import nbformat

import minikv
from minikv.course.authoring import buttons
from minikv.course.chapters import folders

ROOT = Path(minikv.__file__).parents[1]

FILES = {
    "__init__.py": '"""Chapter {number}."""\n',
    "rung.py": '''"""Rung {number} of the ladder and of the running table."""

IDEA = "TODO: the one new idea, in one line"
RUNS: dict = {{}}  # TODO: name -> how it runs, as in an earlier rung.py
''',
    "answers.py": '''"""Chapter {number}: references of exercises that the engine does not have."""


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """How many blocks of `block_size` tokens hold `num_tokens` tokens, at least 0.

    Worked example: 7 tokens in blocks of 4 need 2.
    """
    return -(-num_tokens // block_size)
''',
    "chapter.toml": """\
# Chapter {number}: its skeleton and its exercises. exercise_data/manifest.py tells the form.

doc = "TODO: what the skeleton file is about, in one sentence."
skeleton = [
    {{ target = ".answers:blocks_needed", write = "{number}.1" }},
]

["{number}.1"]
about = "TODO · 10 min · difficulty 1 of 5 · build"
hint_1 = "TODO: a question."
hint_2 = "TODO: what to look at."
hint_3 = "TODO: pseudocode."
works = "TODO: why it works, in eight to twelve lines."
""",
    "scenarios.py": '''"""Chapter {number} as programs: what is asked, and what can be seen."""

from minikv.course.judge.scenarios import Group, Log, scenario


def blocks(mine, program, log: Log) -> None:
    num_tokens, block_size = program
    text = f"{{num_tokens}} tokens, blocks of {{block_size}}"
    log.call(text, mine.blocks_needed, num_tokens, block_size)


scenario(
    "{number}.1",
    blocks,
    Group(
        "whole blocks and a rest",
        [(tokens, size) for size in (1, 3, 4) for tokens in range(10)],
        look="the rounding: up or down?",
    ),
)
''',
    "mistakes.toml": """\
# Chapter {number}: mistakes that readers make. exercise_data/mistakes.py tells the form.

["{number}.1"."rounds down"]
edit = "return -(-num_tokens => return (num_tokens"
cause = "the number of blocks is rounded down, so the last tokens have no block"
look = "7 tokens in blocks of 4 need 2"
""",
}
DIFFERENT = """\
# Chapter {number}: right solutions that are written otherwise than the reference.

["{number}.1"]
source."blocks_needed" = '''
def blocks_needed(num_tokens, block_size):
    return len(range(0, num_tokens, block_size))'''
"""
OPENING = """# {number} · TODO

TODO: what this chapter is about, in a paragraph.

**You will be able to** TODO.

**You need** TODO.

**Minutes:** TODO.

**Where this rung stands**"""
EXERCISE = """### {number}.1 TODO · 10 min · difficulty 1 of 5
**Why it matters.** TODO: why it matters, in one line.

TODO: the contract, with shapes, and a small worked example.

**Write** `blocks_needed` in [exercises/ch{number}_{name}.py](../exercises/ch{number}_{name}.py)."""
CLOSING = {
    "summary": "## Summary\n\nTODO",
    "questions": "## Three open questions\n\n1. TODO\n2. TODO\n3. TODO",
    "reading": "## What to read next\n\nTODO: the paper, and a file of a real engine.",
    "parts": "## Your parts in the engine\n\nWith your predictions, and what came out.",
}
LEFT = """\
Laid out:
{files}
Left to do, in this order:
  1. answers.py and chapter.toml: four to six exercises (build, debug, predict), each of 5 to 40
     minutes
  2. scenarios.py and mistakes.toml: at least four mistakes that readers make per exercise
  3. tests/course/ch{number}/different.toml: a correct solution per exercise, written differently
  4. python -m minikv.course skeletons            writes exercises/ch{number}_{name}.py
  5. rung.py: its line in the ladder, and how it runs in the running table
  6. notebooks/{number}_{name}.ipynb: titles and reasons as chapter.toml has them, two predictions,
     a player with a picture beside it, a cell that raises AssertionError for other tokens than the
     oracle's. Then: make notebooks CHAPTER={number}
     and python -m minikv.course buttons
  7. README.md: the table of the ladder; CHANGELOG.md
  8. make test CHAPTER={number}, and before you are done: make test
"""


def lay_out(number: str, name: str, root: Path = ROOT) -> list[Path]:
    """Write the files of an empty chapter; returns them.

    Raises ValueError for a bad number or name, or a chapter that exists already.
    """
    if not re.fullmatch(r"\d\d", number):
        raise ValueError(f"number: must be two digits, such as 09, was {number!r}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"name: must be lower-case letters, digits and _, was {name!r}")
    if number in folders():
        raise ValueError(f"number: chapter {number} exists already: {folders()[number]}")
    folder = f"ch{number}_{name}"
    words = {"number": number, "name": name, "folder": folder}
    home = root / "minikv" / "course" / "chapters" / folder
    texts = {home / file: text for file, text in FILES.items()}
    texts[root / "tests" / "course" / f"ch{number}" / "different.toml"] = DIFFERENT
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(**words), encoding="utf-8")
    notebook = root / "notebooks" / f"{number}_{name}.ipynb"
    text = nbformat.writes(_notebook(words))
    text = buttons.in_notebook(notebook.name, text, buttons.repository())
    notebook.write_text(text, encoding="utf-8")
    return [*texts, notebook]


def _notebook(words: dict[str, str]) -> nbformat.NotebookNode:
    v4, number = nbformat.v4, int(words["number"])
    varies = {"tags": ["nbval-ignore-output"]}  # lists all chapters, so it changes with each
    cells = [
        ("opening", v4.new_markdown_cell(OPENING.format(**words))),
        ("ladder", v4.new_code_cell(
            "from minikv.course.reader.ladder import ladder\n\n"
            f"ladder(here={number})", metadata=varies,
        )),
        ("setup", v4.new_code_cell(
            "import minikv\nfrom minikv.course.lab import *  # check, hint, why, diff, …\n\n"
            'lm = minikv.load("tinypy")'
        )),
        ("exercise", v4.new_markdown_cell(EXERCISE.format(**words))),
        ("check", v4.new_code_cell(f'check("{words["number"]}.1")')),
        *((name, v4.new_markdown_cell(text.format(**words))) for name, text in CLOSING.items()),
        ("closing", v4.new_code_cell(f"closing({number})", metadata=varies)),
    ]  # fmt: skip
    for name, cell in cells:
        cell.id = name  # the same every time
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return v4.new_notebook(cells=[cell for _, cell in cells], metadata=metadata)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("number", help="two digits, such as 20")
    parser.add_argument("name", help="lower-case letters and _, such as sparse_attention")


def run(args: argparse.Namespace) -> int:
    """0, or 2 for a bad argument."""
    try:
        files = lay_out(args.number, args.name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    listed = "\n".join(f"  {file.relative_to(ROOT)}" for file in files)
    print(LEFT.format(files=listed, number=args.number, name=args.name))
    return 0
