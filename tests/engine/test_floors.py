"""The core has one reading order, and arrows that go down."""

import ast
import re
from pathlib import Path

import pytest

import minikv

ROOT = Path(__file__).parents[2]
CORE = {path.stem for path in (ROOT / "minikv").glob("*.py")} - {"__init__", "__main__", "testing"}
[LIST] = re.findall(r"those before it\..*?\n\n(.+)\Z", minikv.__doc__, re.DOTALL)
ORDER = re.findall(r"\w+", LIST)


def imports(path: Path, anywhere: bool = False) -> list[str]:
    """The modules that a file imports: at the top, under TYPE_CHECKING and in `try` too, but in
    functions only if `anywhere`."""
    found, nodes = [], [ast.parse(path.read_text())]
    while nodes:
        for node in ast.iter_child_nodes(nodes.pop()):
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module, f"{path}: a relative import"
                found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif anywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                nodes.append(node)
    return found


def rooms(path: Path) -> set[str]:
    """The core's own files that a file imports when it is loaded."""
    names = [name.split(".") for name in imports(path)]
    return {name[1] for name in names if name[0] == "minikv" and len(name) > 1}


def test_the_reading_order_names_every_file_once():
    assert sorted(ORDER) == sorted(CORE)


def test_the_readme_has_the_same_order():
    table = re.findall(
        r"^\| \[(\w+)\.py\]\(\.\./minikv/\w+\.py", (ROOT / "docs" / "ENGINE.md").read_text(), re.M
    )
    assert table == ORDER


@pytest.mark.parametrize("name", ORDER)
def test_a_file_imports_only_what_is_read_before_it(name):
    path = ROOT / "minikv" / f"{name}.py"
    assert rooms(path) <= set(ORDER[: ORDER.index(name)])
    assert not [module for module in imports(path) if module.startswith("minikv_kernels")]


def test_the_gpu_wing_stands_on_the_core_the_formats_and_the_kernels():
    for path in (ROOT / "minikv" / "gpu").glob("*.py"):
        assert rooms(path) <= {*ORDER, "gpu", "quant"}, path


def test_the_wing_of_quantised_kv_stands_on_the_core():
    for path in (ROOT / "minikv" / "quant").glob("*.py"):
        assert rooms(path) <= {*ORDER, "cpu", "quant"}, path


def test_the_kernels_stand_on_nothing_of_ours():
    for path in (ROOT / "kernels").glob("*.py"):
        ours = [m for m in imports(path, anywhere=True) if m.split(".")[0] in ("minikv", "tests")]
        assert ours == [], path


def test_the_course_is_imported_by_no_file_of_the_engine():
    files = [*(ROOT / "minikv").glob("*.py"), *(ROOT / "minikv" / "gpu").glob("*.py")]
    for path in files:
        course = [m for m in imports(path, anywhere=True) if m.startswith("minikv.course")]
        assert course == [] or path.name == "__main__.py", path
