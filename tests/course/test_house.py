"""What the repository promises about itself."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WING = re.compile(r"minikv\.(cpu|gpu|quant|tiers)\b")
QUIET = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def count_code_lines(source: str) -> int:
    """Lines that hold code: not blank, not only a comment, not part of a docstring."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in QUIET:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_counting_lines():
    source = '"""Doc\nstring."""\n\nx = 1  # why\n# a comment\ny = """two\nlines"""\n'
    assert count_code_lines(source) == 3


def test_the_core_stays_near_two_thousand_lines():
    files = set((ROOT / "minikv").glob("*.py"))
    files -= {ROOT / "minikv" / name for name in ("testing.py", "__main__.py")}  # of the course
    core = sum(count_code_lines(path.read_text()) for path in files)
    assert 1000 < core <= 2100
    [claim] = re.findall(r"([\d,]+) lines of code", (ROOT / "README.md").read_text())
    assert abs(int(claim.replace(",", "")) - core) <= 50, f"README says {claim}, there are {core}"


def test_the_bundled_model_is_at_most_eight_megabytes():
    files = list((ROOT / "minikv" / "models" / "tinypy").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        file.name for file in files
    }
    assert sum(file.stat().st_size for file in files) <= 8_000_000


# ── Floors: which module may import which ─────────────────────────────────────


def modules():
    """Every module of ours by its name."""
    files = [*ROOT.glob("minikv/**/*.py"), *ROOT.glob("kernels/**/*.py")]
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)
    names = (re.sub(r"^kernels\b", "minikv_kernels", name) for name in names)
    return dict(zip((name.removesuffix(".__init__") for name in names), files, strict=True))


MODULES = modules()


@cache
def imports(name):
    """The modules of ours that a module imports, anywhere in its text."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {one if one in MODULES else node.module for one in inner}
    return (found & set(MODULES)) - {name}


# The rooms of the course, from the ground up. Chapters are found, not named, by what lies below.
ROOMS = ("pictures", "measure", "exercises", "judge", "reports", "reader", "grading", "maker")


def floor(name):
    """(floor, number of the chapter): a module imports from its own floor and lower ones."""
    room = re.match(r"minikv\.course\.(\w+)", name)
    if name.startswith("minikv_kernels"):
        return 0, None
    if room is None and name != "minikv.__main__":
        return 1, None
    if room and room[1] in ROOMS:
        return 3 + ROOMS.index(room[1]), None
    if name == "minikv.course.chapters":  # finds the chapters, names none
        return 2, None
    if room and room[1] == "chapters":
        return 20, name.removeprefix("minikv.course.chapters.ch")[:2]
    return 21, None  # benchmarks, and what a reader calls


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down(name):
    level, chapter = floor(name)
    for other in imports(name):
        below, their_chapter = floor(other)
        assert below <= level, f"{name} imports {other}, which lies above it"
        if chapter and their_chapter:
            assert their_chapter <= chapter, f"{name} imports {other}, of a later chapter"


def test_no_two_modules_import_each_other():
    done, order, path = set(), [], []

    def visit(name):
        assert name not in path, f"a circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name in done:
            return
        path.append(name)
        for other in sorted(imports(name)):
            # The core reaches its wings in functions, which import them then.
            if not (WING.match(other) and floor(name)[0] == 1 and not WING.match(name)):
                visit(other)
        path.pop()
        done.add(name)
        order.append(name)

    for name in sorted(MODULES):
        visit(name)
    assert len(order) == len(MODULES)
