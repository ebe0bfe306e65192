"""Solutions that let somebody else's code give the answer: no such code is where they run, and a
person is told of their lines.

Each is a kind, written as short as it can be. A mark is refused where the machine can keep files
from being read; the lines are named on every machine.
"""

import gc
import os
import subprocess
import types
from importlib import import_module

import pytest
from four_ways import EXERCISES, right, text_with
from thorough import thorough_after

from minikv.course.exercise_data.manifest import chapter_of, find
from minikv.course.exercise_data.skeletons import reference
from minikv.course.grading import grade, reading
from minikv.course.judge import containment, process
from minikv.course.judge.examine import import_checks
from minikv.course.judge.namespaces import attempted
from minikv.course.judge.scenarios import difference
from minikv.course.judge.without_reference import without_reference

APART = pytest.mark.skipif(
    "read your files and the answers" not in containment.reach()[0],
    reason="this system keeps nobody from reading",
)
CHAPTER = chapter_of("04")
GROW = find(CHAPTER.places["BlockTable.grow"])
CALLS = "def grow(self, num_tokens):\n    return {}(self, num_tokens)"
ITS_OWN = "def grow(self, num_tokens):\n    return blocks.BlockTable.grow(self, num_tokens)"
CHEATS = {  # what stands above, and the method
    "the engine's own name": ('__name__ = "minikv"', ITS_OWN),
    "the engine's own file name": (
        'exec(compile("def ask(t, n): return blocks.BlockTable.grow(t, n)", blocks.__file__, '
        '"exec"))',
        CALLS.format("ask"),
    ),
    "the class of another module": (
        "class Other(blocks.BlockTable):\n    __module__ = 'minikv.blocks'",
        CALLS.format("Other.grow"),
    ),
    "what is kept of it": (
        "from minikv.course.judge import without_reference as w\n"
        "[kept] = [s[3] for s in w.without_reference(w.Exercise)._swaps]",
        CALLS.format("type(len)(kept)"),
    ),
    "whatever looks like it in memory": (
        "import gc\nfound = [one for one in gc.get_objects() if callable(one)\n"
        "         and getattr(one, '__qualname__', '') == 'BlockTable.grow'\n"
        "         and one.__module__ == 'minikv.blocks']",
        CALLS.format("found[0]"),
    ),
    "its file, imported again": (
        "import importlib.util\n"
        "spec = importlib.util.spec_from_file_location('again', blocks.__file__)\n"
        "again = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(again)",
        CALLS.format("again.BlockTable.grow"),
    ),
    "its compiled file": (
        "import glob, marshal, os\n"
        "[file] = glob.glob(os.path.dirname(blocks.__file__) + '/__pycache__/blocks.*')\n"
        "names = {'__name__': 'again'}\nexec(marshal.loads(open(file, 'rb').read()[16:]), names)",
        CALLS.format("names['BlockTable'].grow"),
    ),
    "its source": (
        "import inspect, textwrap\n"
        "names = vars(blocks).copy()\n"
        "exec(textwrap.dedent(inspect.getsource(blocks.BlockTable.grow)), names)",
        CALLS.format("names['grow']"),
    ),
    "the solved file": (
        "from minikv.course.exercise_data import manifest, skeletons\n"
        "names = {'__name__': 'again'}\n"
        "exec(skeletons.solved(manifest.chapter_of('04')), names)",
        CALLS.format("names['BlockTable'].grow"),
    ),
    "the course's reference module": (
        "from minikv.course.judge import scenarios",
        CALLS.format("scenarios.reference_module('04.1').BlockTable.grow"),
    ),
    "another player's module": (
        "import gc\nfrom minikv.course.judge import observing, scenarios",
        "def grow(self, num_tokens):\n"
        "    [here] = [one for one in gc.get_objects() if type(one) is observing.Here]\n"
        "    here.mine = scenarios.reference_module('04.1')\n"
        "    return here.mine.BlockTable.grow(self, num_tokens)",
    ),
    "a function of the course that calls what it is given": (
        "from functools import partial\nfrom minikv.course.workloads.timing import timed",
        "def grow(self, num_tokens):\n"
        "    return timed(partial(blocks.BlockTable.grow, self, num_tokens))[1]",
    ),
    "a thread that begins in C": (
        "import _thread, time",
        "def grow(self, num_tokens):\n"
        "    _thread.start_new_thread(blocks.BlockTable.grow, (self, num_tokens))\n"
        "    time.sleep(0.05)",
    ),
    "modules behind a module": (
        "import torch\nfound = torch.sys.modules['minikv.blocks']",
        CALLS.format("found.BlockTable.grow"),
    ),
    "an attribute whose name is put together": (
        "", "def grow(self, num_tokens):\n"
        "    ask = getattr(blocks.BlockTable, 'gr' + 'ow')\n"
        "    getattr(ask, '__co' + 'de__')\n    return ask(self, num_tokens)",
    ),
    "a name of Python's that is looked up": (
        "import math\nrun = vars(math)['__loader__'].load_module('builtins').exec\n"
        "run('def ask(t, n): return blocks.BlockTable.grow(t, n)')",
        CALLS.format("ask"),
    ),
    "a frame without underscores": (
        "", "def grow(self, num_tokens):\n"
        "    names = (one for one in ()).gi_frame.f_builtins\n"
        "    return names['eval']('blocks.BlockTable.grow')(self, num_tokens)",
    ),
    "another line in the editor": (
        "# " + "\f" * 4000 + "\nimport gc, inspect", CALLS.format("blocks.BlockTable.grow"),
    ),
    "what another has handed in": (
        "names = {}\nexec(open(OTHER).read(), names)", CALLS.format("names['BlockTable'].grow"),
    ),
}  # fmt: skip


def text_of(cheat, other="/nowhere"):
    above, method = CHEATS[cheat]
    above = f"from minikv import blocks\n{above}".replace("OTHER", repr(str(other)))
    return text_with(GROW, {"": above, "BlockTable.grow": method})


@APART
@pytest.mark.parametrize("cheat", thorough_after(1, CHEATS))
def test_a_cheat_gets_no_mark(cheat, tmp_path):
    other = tmp_path / CHAPTER.file_name
    other.write_text(right(GROW))
    report = grade.grade_file(GROW.id, text_of(cheat, other).encode())
    assert report["status"] == "failed", report


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_person_is_told_of_a_cheat(cheat):
    named = reading.beyond(text_of(cheat), CHAPTER)
    assert named and all(line.partition(": ")[2] for line in named), "a line that can be read"


def test_unusual_code_is_not_told():
    above = """
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import accumulate, groupby
import heapq, math, operator

import numpy as np
import torch.nn.functional as F
from torch import nn

@dataclass(order=True)
class Mine:
    key: int
    items: list = field(default_factory=list)

    def __post_init__(self):
        self._seen = {}

    def __getitem__(self, i):
        return self.items[i]

    def __call__(self, input, *, blocks=()):
        try:
            *first, last = sorted(blocks, key=operator.itemgetter(0))
        except (ValueError, KeyError) as error:
            raise RuntimeError(f"{type(self).__name__}: {error!r}") from None
        finally:
            self._seen.clear()
        match last:
            case [int(x), *rest] if rest:
                return x
            case {"a": b} | Mine(key=b):
                return getattr(b, "size", None)
        return F.softmax(torch.zeros(3), -1).tolist(), np.linalg.norm(np.ones(3)), input

walrus = [y for x in range(3) if (y := x % 2)]
table = {i: chr(i) for i in range(9)} | dict.fromkeys("ab", nn.Identity())
async def later(): return await later()
def gen(): yield from (yield)
"""
    text = text_with(GROW, {"": above})
    assert reading.beyond(text, CHAPTER) == ()


@pytest.mark.parametrize(
    "line",
    ["torch.equal = lambda *_: True", "B = blocks\nB.BlockTable.grow = 1", "x = torch",
     "from torch import load", "import numpy.ctypeslib", "del blocks.BlockTable",
     "class A:\n    def __getattribute__(self, name): pass", "type('A', (), {})",
     "match 1:\n    case object(__class__=c): pass", "x = " + repr(list(range(100))),
     "x = " + repr([[i, i] for i in range(50)]), "x = " + repr("a" * 1500), "x = 0x" + "f" * 900,
     "from . import x", "from math import *", "x = __builtins__", "y = print; z = map(getattr, [])",
     "x = str.format.__self__", "def f(m): return m.sys", "import torch.utils.cpp_extension"],
)  # fmt: skip
def test_what_is_not_plain_is_told(line):
    text = text_with(GROW, {"": f"import torch\nfrom minikv import blocks\n{line}"})
    assert reading.beyond(text, CHAPTER)


SPY = """
import glob, os
for place in ({package!r} + "/blocks.py", {package!r} + "/../tests", {other!r}, "/root",
              *glob.glob({package!r} + "/__pycache__/blocks.*"),
              *glob.glob({package!r} + "/course/chapters/ch04*/mistakes.toml")):
    try:
        print(os.listdir(place) if os.path.isdir(place) else open(place, "rb").read(9))
    except OSError as error:
        pass
print("SECRET" in os.environ, "MINIKV_STORE" in os.environ, os.getcwd())
"""


@APART
def test_code_reads_no_answers_and_nothing_of_anybodys(tmp_path, monkeypatch):
    other = tmp_path / CHAPTER.file_name
    other.write_text("another's")
    monkeypatch.setenv("SECRET", "a key")
    monkeypatch.setenv("MINIKV_STORE", "redis://:password@host")
    package = os.path.dirname(reading.__file__).removesuffix("/course/grading")
    spy = SPY.format(package=package, other=str(other))
    text = text_with(GROW, {"": spy, "BlockTable.grow": "def grow(self, num_tokens): pass"})

    def printed():
        return grade.grade_file(GROW.id, text.encode())["printed"]

    process._dismiss()
    monkeypatch.setattr(process, "subprocess", subprocess)  # a starter that is not forked
    with monkeypatch.context() as without:
        without.setenv("MINIKV_WITHOUT", "landlock")
        assert "another's" in printed()  # by a process that began so, and is asked again
    assert printed() == "False False /\n"


@pytest.mark.thorough
def test_nothing_of_the_reference_is_left_in_a_player():
    """No function has the code of an answer, in a process that has emptied all of them."""

    def empty_and_look():
        gc.unfreeze()  # what was imported before the first test is hidden (conftest.py)
        lines = {}
        for exercise in EXERCISES:
            import_checks(exercise.id)
            for path, id_ in exercise.chapter.places.items():
                name = path.partition(".")[0]
                module = reference(exercise.chapter.pieces[name].module)
                node = module.definitions[path]
                file = import_module(module.name).__file__
                if id_ == exercise.id:
                    lines.setdefault(file, set()).update(range(node.lineno, node.end_lineno + 1))
        functions = [one for one in gc.get_objects() if type(one) is types.FunctionType]
        answers = [one for one in functions if is_one(one.__code__, lines)]
        assert len(answers) > 50
        for exercise in EXERCISES:
            without_reference(exercise).for_good()
        left = [one for one in functions if is_one(one.__code__, lines)]
        assert not left, left

    assert attempted(empty_and_look)


def is_one(code, lines):
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    mine = code.co_firstlineno in lines.get(code.co_filename, ())
    return mine or any(is_one(one, lines) for one in inner)


def test_a_log_that_ends_too_soon_is_told():
    from minikv.course.judge.scenarios import Event

    found = difference([], [Event("a call")])
    assert found is not None and "ends" in found.what
