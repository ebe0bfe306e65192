"""Which lines of a solution a person should read: all that is not plain code over allowed names.

Nothing is looked for that is bad; what is allowed is listed. A line is named for

- a name of Python's own that plain code has no use for (`eval`, `open`, `vars`), or one with two
  underscores (`__name__`, `__globals__`), a frame's, or a private one of somebody else's;
- an import beyond those of the skeleton and of `PLAIN`; what is no function or class of such a
  module, as `torch.sys` is not; a module by itself, which could be handed on;
- a new value for something of the engine's or of a module's: `torch.equal = …`;
- data: many numbers in a row, or a long text.

A solution that has such a line may be right, and a mark does not depend on it.
"""

import ast
import builtins
import re
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from minikv.course.exercise_data import reader_files
from minikv.course.exercise_data.manifest import Chapter
from minikv.course.exercise_data.skeletons import lines_of, skeleton, solved

# Modules that are for computing, and the parts of them that are, too.
PLAIN = {
    "__future__", "abc", "bisect", "collections", "collections.abc", "contextlib", "copy",
    "dataclasses", "enum", "functools", "hashlib", "heapq", "itertools", "math", "numpy",
    "numpy.linalg", "numpy.random", "operator", "random", "torch", "torch.linalg", "torch.nn",
    "torch.nn.functional", "triton", "triton.language", "typing",
}  # fmt: skip
BUILTINS = {
    "abs", "all", "any", "bool", "bytearray", "bytes", "callable", "chr", "classmethod", "complex",
    "dict", "divmod", "enumerate", "filter", "float", "format", "frozenset", "hash", "hex", "id",
    "input", "int", "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min", "next",
    "object", "oct", "ord", "pow", "print", "property", "range", "repr", "reversed", "round",
    "set", "slice", "sorted", "staticmethod", "str", "sum", "super", "tuple", "zip", "Ellipsis",
    "NotImplemented",
}  # fmt: skip
METHODS = re.compile(
    r"__(init|name|len|iter|next|getitem|setitem|delitem|contains|eq|ne|hash|repr|str|lt|le|gt|ge|"
    r"post_init|call|enter|exit|bool|add|radd|sub|mul|neg|int|float|index|slots)__"
)
# Names without underscores that lead to frames, files, memory, or to any attribute.
LEADS_ON = re.compile(
    r"(gi|cr|ag)_\w+|tb_(frame|next)|f_(back|globals|locals|builtins|code)|mro|ctypes|attrgetter|"
    r"methodcaller|get_type_hints|ForwardRef|make_dataclass|file_digest|memmap|loads?|loadtxt|"
    r"genfromtxt|from_?file|fromregex|tofile|save|savez|savez_compressed|savetxt|dumps?|compile|"
    r"import_ir_module\w*|sys|os|builtins|inspect|importlib|gc|subprocess|pickle|modules"
)
MANY = 64  # constants in one list, set or dictionary
LONG = 1_000  # letters of one text
SHOWN = 80  # letters of a line


def beyond(text: str, chapter: Chapter) -> tuple[str, ...]:
    """The lines of a solution that a person should read: "line 12: import gc"."""
    return _beyond(text.removeprefix("\ufeff"), chapter)


@cache
def _beyond(text: str, chapter: Chapter) -> tuple[str, ...]:
    try:
        reader = _Reader(reader_files.parsed(chapter, text).tree, chapter)
    except reader_files.WorkbookError:
        return ()  # its report says so
    lines = lines_of(text)
    found = sorted({node.lineno for node in reader.nodes if reader.is_beyond(node)})
    texts = ((n, printable(lines[n - 1].strip())) for n in found)
    return tuple(f"line {n}: {t[:SHOWN]}{'…' * (len(t) > SHOWN)}" for n, t in texts)


def printable(text: str) -> str:
    """With an escape for each letter that would do something to a terminal or a table."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class _Reader:
    """Goes through one file."""

    def __init__(self, tree: ast.Module, chapter: Chapter):
        self.nodes: list[Any] = list(ast.walk(tree))
        self.imports, self.given, usual = _known(chapter)
        self.usual = set(usual)  # names behind dots
        self.bound: set[str] = set()
        self.stands_for: dict[str, Any] = {}  # by name: what is imported
        self.plain: set[int] = set()  # parts of what may be where they are
        for node in self.nodes:
            match node:
                case ast.FunctionDef(name):
                    self.usual.add(name)
                case ast.Name(name, ast.Store()) | ast.arg(name):
                    self.bound.add(name)
                case ast.Attribute(ast.Name("self"), name, ast.Store()):
                    self.usual.add(name)
                case ast.Import() | ast.ImportFrom():
                    self._note(node)
        for node in self.nodes:
            match node:
                case ast.Assign([ast.Name(name)], value):  # another name for the same
                    if (stands := self._stands_for(value)) is not None:
                        self.stands_for[name] = stands
                case ast.Attribute(value) | ast.Expr(ast.Constant() as value):
                    self.plain.add(id(value))
                case ast.Call(ast.Name("getattr" | "hasattr"), [_, ast.Constant(str(at)), *_]):
                    if self._may_follow(at, None):
                        self.plain.add(id(node.func))
                case ast.Call(ast.Name("type"), [_]):
                    self.plain.add(id(node.func))
                case ast.Subscript(ast.Name("type") as value):
                    self.plain.add(id(value))
                case ast.Call() if ast.dump(node) in self.given:
                    self.plain.add(id(node.func))

    def is_beyond(self, node: ast.AST) -> bool:
        match node:
            case ast.Import() | ast.ImportFrom():
                return not all(self._may_import(*pair) for pair in _pairs(node))
            case ast.Name(name):
                if isinstance(self.stands_for.get(name), ModuleType) and name not in self.bound:
                    return id(node) not in self.plain  # it could be handed on
                is_python = name.startswith("__") or hasattr(builtins, name)
                return is_python and id(node) not in self.plain and not _is_plain(name)
            case ast.Attribute(value, name, context):
                stands = self._stands_for(value)
                if ast.dump(node) in self.given:
                    return False
                if not isinstance(context, ast.Load) and (stands is not None or _asks_type(value)):
                    return True  # it is given another value
                return not self._may_follow(name, stands)
            case ast.MatchClass(kwd_attrs=names):
                return not all(self._may_follow(name, None) for name in names)
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                return name.startswith("__") and not METHODS.fullmatch(name)
            case ast.List() | ast.Tuple() | ast.Set() | ast.Dict():
                return sum(isinstance(part, ast.Constant) for part in ast.walk(node)) > MANY
            case ast.Constant(str(value) | bytes(value)):
                return len(value) > LONG and id(node) not in self.plain
            case ast.Constant(int(value)):
                return value.bit_length() > LONG
        return False

    def _may_follow(self, name: str, owner: Any) -> bool:
        """Whether `.name` may stand behind `owner`; None: behind some object."""
        if isinstance(owner, ModuleType):
            return self._is_public(owner, name)
        if name.startswith("__"):
            return bool(METHODS.fullmatch(name))
        return name in self.usual or not (name.startswith("_") or LEADS_ON.fullmatch(name))

    def _is_public(self, module: ModuleType, name: str) -> bool:
        """Whether a module has it for others to compute with."""
        value = getattr(module, name, None)
        if isinstance(value, ModuleType):
            return self._may_import(value.__name__, None)
        if name.startswith("_"):
            return False
        if module.__name__.partition(".")[0] in sys.stdlib_module_names:
            return name in getattr(module, "__all__", [name]) and not LEADS_ON.fullmatch(name)
        return module.__name__ == "triton.language" or not LEADS_ON.fullmatch(name)

    def _may_import(self, module: str, name: str | None) -> bool:
        if (module, name) in self.imports:
            return True
        if name is None or name == "*" or module not in PLAIN:
            return name is None and module in PLAIN
        return self._is_public(import_module(module), name)

    def _note(self, node: ast.Import | ast.ImportFrom) -> None:
        """What the names of an import stand for, of those that may be there."""
        for alias, (module, name) in zip(node.names, _pairs(node), strict=True):
            if not self._may_import(module, name):
                continue
            if name is None and alias.asname is None:
                module = module.partition(".")[0]
            with suppress(ImportError):  # a package that is not here
                value = import_module(module)
                self.stands_for[alias.asname or name or module] = (
                    value if name is None else getattr(value, name, None)
                )

    def _stands_for(self, node: ast.AST) -> Any:
        """What an expression is, if that is something imported, or something behind it."""
        match node:
            case ast.Name(name):
                return self.stands_for.get(name)
            case ast.Attribute(value, name):
                owner = self._stands_for(value)
                return None if owner is None else getattr(owner, name, None)
        return None


@cache
def _known(chapter: Chapter) -> tuple[set, set[str], set[str]]:
    """What the skeleton imports; attributes and calls of the skeleton and the reference, as they
    are; and their names behind dots."""
    given = list(ast.walk(ast.parse(skeleton(chapter))))
    usual = [*given, *ast.walk(ast.parse(solved(chapter)))]
    looks = [node for node in usual if isinstance(node, ast.Attribute)]
    calls = [node for node in usual if isinstance(node, ast.Call)]
    imports = {pair for node in given for pair in _pairs(node)}
    return imports, set(map(ast.dump, [*looks, *calls])), {node.attr for node in looks}


def _pairs(node: ast.AST) -> list[tuple[str, str | None]]:
    """What an import names: (module, name in it or None)."""
    match node:
        case ast.Import(names):
            return [(alias.name, None) for alias in names]
        case ast.ImportFrom(module, names, level):
            return [(f"{'.' * level}{module or ''}", alias.name) for alias in names]
    return []


def _is_plain(name: str) -> bool:
    """Whether a name of Python's own is one that plain code has a use for."""
    value = getattr(builtins, name, None)
    return name in BUILTINS or (isinstance(value, type) and issubclass(value, BaseException))


def _asks_type(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"
