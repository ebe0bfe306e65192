"""What the repository promises about itself."""

import ast
import io
import re
import shlex
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
QUIET = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip

MOST_OF_THE_CORE = 2190  # lines of code


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


def test_the_core_can_be_read_in_an_afternoon():
    files = set((ROOT / "minikv").glob("*.py"))
    files -= {ROOT / "minikv" / "__main__.py"}  # of the course
    core = sum(count_code_lines(path.read_text()) for path in files)
    assert 1000 < core <= MOST_OF_THE_CORE, (
        f"the core has {core} lines of code, and {MOST_OF_THE_CORE} are the most: what is not read "
        "by everybody goes to a wing, or something else out; see CONTRIBUTING.md, The house"
    )
    [claim] = re.findall(r"([\d,]+) lines of code", (ROOT / "README.md").read_text())
    assert abs(int(claim.replace(",", "")) - core) <= 50, f"README says {claim}, there are {core}"


MOST_OF_THE_DATA = 1_115  # lines per chapter; empty ones do not count


def test_the_data_of_the_course_stays_small():
    """All lines but empty ones of every TOML file, pyproject's too, and of `scenarios.py`."""
    scenarios = list(ROOT.glob("minikv/course/chapters/*/scenarios.py"))
    files = [file for top in ("minikv", "tests") for file in (ROOT / top).rglob("*.toml")]
    files += [ROOT / "pyproject.toml", *scenarios]
    lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
    found, most = sum(1 for line in lines if line.strip()), MOST_OF_THE_DATA * len(scenarios)
    assert most // 2 < found <= most, (
        f"TOML and scenarios have {found} lines, and {most} are the most: what does a "
        "line's `look` say as well as a mistake, which mistakes are one in several ways, and which "
        "programs are those of another line? "
        "See CONTRIBUTING.md, Add an exercise"
    )


MOST_OF_THE_PYTHON = 101_600  # lines, all of them


def test_the_python_of_the_repository_stays_what_one_person_can_know():
    """Without the exercises, which are made from the rest."""
    files = [file for top in ("minikv", "kernels", "tests", "docs")
             for file in (ROOT / top).rglob("*.py")]  # fmt: skip
    found = sum(file.read_bytes().count(b"\n") for file in [ROOT / "setup.py", *files])
    assert 50_000 < found <= MOST_OF_THE_PYTHON, (
        f"{found} lines of Python, and {MOST_OF_THE_PYTHON} are the most: what does the new say "
        "that is said already, and which of it does nobody need?"
    )


def test_the_bundled_model_is_at_most_eight_megabytes():
    files = list((ROOT / "minikv" / "models" / "tinypy").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        file.name for file in files
    }
    assert sum(file.stat().st_size for file in files) <= 8_000_000


# ── Which module may import which ─────────────────────────────────────────────

KERNELS = "minikv_kernels"  # what the folder kernels/ is imported as
WINGS = (
    "checkpoint", "cpu", "gpu", "groups", "quant", "ring", "tiers", "cluster", "speculative",
    "serving", "retention", "machine", "states",
)  # fmt: skip
ASSEMBLY = "minikv.assembly"  # puts the wings on, inside its functions
# The upward arrows that there are, and why. At most 5.
OF_ONE_PIECE = "the loops over codes are those of `cpu` with other innermost parts, and Numba "
OF_ONE_PIECE += "compiles them to one function: private helpers are shared, too"
EXCEPTIONS = {
    ("minikv.quant.kernels", "minikv.cpu.compiler"): OF_ONE_PIECE,
    ("minikv.quant.kernels", "minikv.cpu.kernels"): OF_ONE_PIECE,
    ("minikv.quant.kernels", "minikv.cpu.tiles"): OF_ONE_PIECE,
    ("minikv.quant.tiles", "minikv.cpu.tiles"): OF_ONE_PIECE,
    ("minikv", "minikv.checkpoint"): "`minikv.load` is where everybody begins; no part needs it",
}


class Import(NamedTuple):
    """One module imports another; `later`: when a function runs."""

    module: str
    other: str
    later: bool


def imports_in(node: ast.AST, later: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Each import below `node`, and whether it is in a function. Expressions have none."""
    for part in ("body", "orelse", "handlers", "finalbody", "cases"):
        for one in getattr(node, part, ()):
            if isinstance(one, ast.Import | ast.ImportFrom):
                yield one, later
            is_function = isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports_in(one, later or is_function)


def imports_of(module: str, source: str, known: Collection[str]) -> set[Import]:
    """What a module imports of those that are known, anywhere in its text."""
    found = set()
    for node, later in imports_in(ast.parse(source)):
        names: set[str] = set()
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: name what is imported in full"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names = {one if one in known else node.module for one in inner}
        found |= {Import(module, name, later) for name in names if name in known}
    return {one for one in found if one.other != module}


def graph_of(sources: Mapping[str, str]) -> set[Import]:
    return {one for name, text in sources.items() for one in imports_of(name, text, sources)}


def circle_in(graph: Iterable[Import]) -> list[str]:
    """Modules that import each other in a circle; none if there is no circle."""
    imported: dict[str, set[str]] = {}
    for one in graph:
        imported.setdefault(one.module, set()).add(one.other)
    done: set[str] = set()

    def visit(path: list[str]) -> list[str]:
        name = path[-1]
        if name in path[:-1]:
            return path[path.index(name) :]
        if name not in done:
            for other in sorted(imported.get(name, ())):
                if circle := visit([*path, other]):
                    return circle
            done.add(name)
        return []

    return next((circle for name in sorted(imported) if (circle := visit([name]))), [])


def room(name: str) -> str:
    """ "kernels", "course", a wing, or "core"."""
    if name.split(".")[0] == KERNELS:
        return "kernels"
    if name.startswith("minikv.course") or name == "minikv.__main__":
        return "course"
    part = name.split(".")[1] if "." in name else ""
    return part if part in WINGS else "core"


# The rooms that chapters share, from the ground up. Chapters are found there, and not named.
ROOMS = (
    "pictures", "workloads", "exercise_data", "judge", "reports", "reader", "grading", "authoring",
)  # fmt: skip


def place_in_course(name: str) -> tuple[int, str]:
    """(floor, number of the chapter): from what finds chapters to what calls chapters."""
    if chapter := re.match(r"minikv\.course\.chapters\.ch(\d\d)", name):
        return 20, chapter[1]
    if name == "minikv.course.chapters":  # finds the chapters, names none
        return 0, ""
    part = name.removeprefix("minikv.course").split(".")[1:2]
    return 1 + ROOMS.index(part[0]) if part and part[0] in ROOMS else 21, ""


def goes_up(one: Import, order: list[str]) -> bool:
    """Whether an import breaks the rule. `order`: the files of the core as they are read."""
    here, there = room(one.module), room(one.other)
    if here == "kernels" or there == "kernels":
        return here == "kernels" != there
    if here == "course" == there:
        (level, chapter), (other_level, other) = map(place_in_course, (one.module, one.other))
        return other_level > level or bool(chapter and other and other > chapter)
    if here == "course" or there == "course":
        return there == "course"
    if there == "core":
        known = {one.module, one.other} <= {*order}  # else another test says what to do
        return here == "core" and known and order.index(one.other) >= order.index(one.module)
    is_door = one.other == f"minikv.{there}"
    if here == "core":
        return not (one.module == ASSEMBLY and is_door and one.later)
    return here != there and not is_door


@cache
def sources() -> dict[str, str]:
    """Every module of ours by its name."""
    files = [*ROOT.glob("minikv/**/*.py"), *ROOT.glob("kernels/**/*.py")]
    paths = (path.relative_to(ROOT).with_suffix("").parts for path in files)
    names = (".".join([KERNELS if top == "kernels" else top, *rest]) for top, *rest in paths)
    texts = (path.read_text(encoding="utf-8") for path in files)
    return dict(zip((name.removesuffix(".__init__") for name in names), texts, strict=True))


def reading_order() -> list[str]:
    """The files of the core, as `minikv` lists them; what it imports itself comes last."""
    listed = re.search(r"(?<=says what is in them\.\n\n).*?\n(?=\"\"\")", sources()["minikv"], re.S)
    names = [f"minikv.{name}" for name in re.findall(r"\w+", listed[0])]
    return [*names, "minikv"]


def test_the_reading_order_names_every_file_of_the_core_once():
    core = sorted(name for name in sources() if room(name) == "core")
    assert sorted(reading_order()) == core, (
        "name each file where it is to be read: in minikv/__init__.py and docs/ENGINE.md"
    )


def test_a_public_class_name_means_one_thing():
    """Outside the chapters, which are read one at a time. (Words of a text count, too.)"""
    homes = defaultdict(list)
    for name, text in sources().items():
        if ".chapters." not in name:
            for one in re.findall(r"^ *class ([A-Za-z]\w*)", text, re.M):
                homes[one].append(name)
    twice = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert len(homes) > 300 and not twice, f"give each a name of its own: {twice}"


def test_the_documents_list_the_core_in_the_same_order():
    text = (ROOT / "docs" / "ENGINE.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| \[(\w+)\.py\]\(\.\./minikv/\w+\.py", text, re.M)
    assert [f"minikv.{name}" for name in table] == reading_order()[:-1]


# ── Names in texts ────────────────────────────────────────────────────────────

OF_OTHERS = {  # that comments and pages of ours speak of
    "chNN_name", "histogram_quantile", "load_back_threshold", "lock_ref", "match_prefix",
    "n_kv", "reshape_and_cache",
}  # fmt: skip
LIKE_A_NAME = re.compile(r"`([A-Za-z_][\w.]*)`")


def names_of(code: CodeType) -> set[str]:
    """Everything that a module defines or uses, and the words of its short texts."""
    found = {code.co_name, *code.co_names, *code.co_varnames, *code.co_cellvars}
    found = {part for name in found for part in name.split(".")}
    inside = list(code.co_consts)
    for one in inside:
        if isinstance(one, CodeType):
            found |= names_of(one)
        elif isinstance(one, tuple | frozenset):
            inside += one
        elif isinstance(one, str) and len(one) < 60:
            found |= set(re.findall(r"\w+", one))
    return found


def unknown_names(texts: Iterable[str], known: Collection[str]) -> set[str]:
    """Names in backquotes that look like a function's or a class's, and that nothing has."""
    names = [name for text in texts for name in LIKE_A_NAME.findall(text)]
    parts = {part for name in names for part in name.split(".")}
    return {part for part in parts if re.search("[a-z][A-Z]|_", part) and part not in known}


def test_names_in_backquotes_exist():
    ours = [
        file for top in ("minikv", "kernels", "tests", "docs") for file in (ROOT / top).rglob("*")
    ]
    code = {file: file.read_text("utf-8") for file in ours if file.suffix == ".py"}
    compiled = [SourceFileLoader("", str(file)).get_code("") for file in code]
    known = OF_OTHERS.union({file.stem for file in ours}, *map(names_of, compiled))
    pages = [file for file in (ROOT / "docs").glob("*.md") if file.stem != "REAL_ENGINES"]
    texts = [page.read_text("utf-8") for page in (*pages, ROOT / "CONTRIBUTING.md")]
    texts += [text for file, text in code.items() if "tests" not in file.parts]
    assert unknown_names(texts, known) == set(), "renamed, or removed? Of another engine: OF_OTHERS"
    assert unknown_names(["`Engine.step_on`, `step`, `x`"], {"Engine"}) == {"step_on"}


CLOCKS = {"sleep", "monotonic", "perf_counter", "process_time", "thread_time"}
MAY_KNOW_THE_TIME = {  # file of tests/: why
    "waiting.py": "here all tests wait, for events",
    "delays.py": "it slows tests down",
    "store_case.py": "a line to a store, as slow as a test wants it",
    "gpu/run.py": "measures on a GPU, and has a time for each part",
    "course/test_lab.py": "the time at which its clock stands still",
    "cluster/test_serve_ray.py": "a worker is killed at a random moment",
    "serving/test_app.py": "clients leave at random moments",
    "serving/test_clients.py": "no client's times are longer than its run",
    "serving/test_loop.py": "clients come at different moments",
    "tiers/test_tiers_faults.py": "a process is killed at a random moment",
}


def looks_at_the_time(source: str) -> bool:
    """Whether code sleeps or reads a clock; not whether it holds such code as text."""
    if not re.search(rf"time\s*\.\s*time|{'|'.join(CLOCKS)}", source):
        return False
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if name in CLOCKS or (name == "time" and ast.unparse(node) == "time.time"):
            return True
    return False


def is_left_alone(source: str) -> bool:
    """Whether code waits with patience and does not look whether that was over."""
    return "wait(PATIENCE)" in source and any(
        isinstance(node, ast.Expr) and ast.unparse(node).endswith(".wait(PATIENCE)")
        for node in ast.walk(ast.parse(source))
    )


HOST, NUMBER = r"""["'](127\.0\.0\.1|localhost)["']""", r"""["']?[1-9]\d+"""
FIXED_PORT = re.compile(rf"""port["']?\s*[=:,]\s*{NUMBER}|\({HOST}, {NUMBER}|--port {NUMBER}""")


def test_no_test_passes_because_its_patience_is_over_or_has_a_port_of_its_own():
    for file in (ROOT / "tests").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        assert not is_left_alone(source), f"{file}: `assert` what a wait says"
        assert not FIXED_PORT.search(source), f"{file}: port 0 is a free one"
    assert is_left_alone("if x:\n    event.wait(PATIENCE)")
    assert not is_left_alone("assert event.wait(PATIENCE)")
    assert FIXED_PORT.search("bind((" + "'127.0.0.1', 80))") and FIXED_PORT.search("port=" + "8080")


def test_no_test_sleeps_or_looks_at_a_clock_but_for_a_few():
    tests = ROOT / "tests"
    found = {
        file.relative_to(tests).as_posix()
        for file in tests.rglob("*.py")
        if looks_at_the_time(file.read_text(encoding="utf-8"))
    }
    assert found == set(MAY_KNOW_THE_TIME), (
        "wait for what you need with `until` (tests/waiting.py), and hand in a clock"
    )


@pytest.mark.parametrize("line", [
    "time.sleep(1)", "from time import sleep as wait\nsleep(0)", "await_ = time.time()",
    "patch(time.perf_counter)",
])  # fmt: skip
def test_a_clock_is_found(line):
    assert looks_at_the_time(line)
    assert not looks_at_the_time(f"x = {line!r}\nx.sleeping = time")


@pytest.fixture(scope="module")
def graph():
    return graph_of(sources())


def test_no_circle(graph):
    """Lazy imports counted. (A package's `__init__` counts where it is named.)"""
    assert circle_in(graph) == []


def test_imports_go_down_but_for_a_few(graph):
    order = reading_order()
    up = {(one.module, one.other) for one in graph if goes_up(one, order)}
    assert up == set(EXCEPTIONS)
    assert len(EXCEPTIONS) <= 5 and all(len(why) > 20 for why in EXCEPTIONS.values())


INVENTED = {
    f"{KERNELS}.write": "import torch",
    "minikv": "from minikv.engine import Engine",
    "minikv.blocks": "",
    "minikv.engine": "from minikv.blocks import BlockPool",
    "minikv.assembly": "def assemble():\n    from minikv.tiers import Tiers",
    "minikv.tiers": "from minikv.tiers.host import HostPool",
    "minikv.tiers.host": f"import {KERNELS}.write\nfrom minikv.blocks import BlockPool",
    "minikv.gpu": "from minikv.tiers import Tiers",
    "minikv.course.judge.names": "from minikv import engine",
    "minikv.course.chapters.ch04_paged": "from minikv.course.judge import names",
    "minikv.course.chapters.ch05_write": "from minikv.course.chapters import ch04_paged",
    "minikv.course.lab": "from minikv.course.chapters.ch05_write import x",
}
ORDER = ["minikv.blocks", "minikv.engine", "minikv.assembly", "minikv"]


def test_an_invented_house_is_in_order():
    graph = graph_of(INVENTED)
    assert len(graph) == 11 and circle_in(graph) == []
    assert not [one for one in graph if goes_up(one, ORDER)]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (f"{KERNELS}.write", "import minikv.blocks"),
        ("minikv.blocks", "from minikv import engine"),
        ("minikv.engine", "def step():\n    from minikv import tiers"),
        ("minikv.assembly", "from minikv.tiers import Tiers"),
        ("minikv.assembly", "def make():\n    from minikv.tiers.host import HostPool"),
        ("minikv.gpu", "from minikv.tiers.host import HostPool"),
        ("minikv.tiers.host", "class A:\n    from minikv.course.judge import names"),
        ("minikv.course.judge.names", "from minikv.course.chapters import ch04_paged"),
        ("minikv.course.chapters.ch04_paged", "import minikv.course.chapters.ch05_write"),
        ("minikv.course.chapters.ch04_paged", "from minikv.course import lab"),
    ],
)
def test_an_arrow_upwards_is_found(module, line):
    new = graph_of(INVENTED | {module: line}) - graph_of(INVENTED)
    assert [one.module for one in new if goes_up(one, ORDER)] == [module]


def test_a_circle_is_found_though_an_import_is_lazy():
    lazy = {"minikv.tiers.host": "def where():\n    import minikv.assembly"}
    circle = circle_in(graph_of(INVENTED | lazy))
    assert set(circle) == {"minikv.assembly", "minikv.tiers", "minikv.tiers.host"}
    assert circle[0] == circle[-1] and len(circle) == 4


def test_a_relative_import_is_refused():
    with pytest.raises(AssertionError, match="in full"):
        imports_of("minikv.a", "from . import b", {"minikv.b"})


def test_a_blank_in_the_path_separates_no_words(tmp_path):
    place = tmp_path / "a blank"
    place.mkdir()
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "docs"):
        (place / name).symlink_to(ROOT / name)
    goals = ["units", "test-class", "test-delays", "site", "slides", "notebooks", "gpu"]
    printed = subprocess.check_output(["make", "-n", *goals], cwd=place, text=True)
    lines = [line for line in printed.replace("\\\n", " ").splitlines() if str(place) in line]
    words = [word for line in lines for word in shlex.split(line)]
    assert len(lines) > 3 and f"PYTHONPATH={place}/tests/quick" in words
    assert not [word for word in words if word.startswith("blank")], "quote what holds the path"
