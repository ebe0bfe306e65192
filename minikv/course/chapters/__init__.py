"""The chapters, one folder each. Nothing outside names a chapter: they are found."""

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from types import ModuleType


def folders() -> dict[str, str]:
    """The folder of each chapter by its number, in order: {"04": "ch04_paged_blocks"}."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)
    return {name[2:4]: name for name in names}


def title(number: str) -> str:
    """What a chapter is called: title("02") is "KV cache"."""
    first, *others = folders()[number][5:].split("_")
    words = [first.capitalize(), *others]
    return " ".join({"kv": "KV", "cpu": "CPU"}.get(word.lower(), word) for word in words)


def notebook(number: str) -> str:
    """The file of a chapter's notebook, which lies beside those of the others."""
    return f"{folders()[number][2:]}.ipynb"


def each(name: str) -> Iterator[tuple[str, ModuleType]]:
    """(number, module) of every chapter whose folder has a module of this name, in order."""
    for number, folder in folders().items():
        full = f"{__name__}.{folder}.{name}"
        if importlib.util.find_spec(full) is not None:
            yield number, importlib.import_module(full)
