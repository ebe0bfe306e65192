"""A mark comes from what was seen of a solution, which the solution itself cannot write."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from four_ways import text_with
from thorough import thorough_after

from minikv.course.exercise_data.manifest import find
from minikv.course.judge import process
from minikv.course.judge.observing import Confused, There
from minikv.course.judge.plain_data import Unreadable, Words, kept, pack, unpack
from minikv.course.judge.scenarios import same

APART = pytest.mark.skipif(not process.FORKS, reason="judged in the process that runs the code")
SLOTS, POOL = find("04.3"), find("04.1")
WRONG = {"slot_mapping": "def slot_mapping(block_ids, block_size, start, end):\n    return {}"}

FORGED = """
import json, struct
line = {"name": "all", "ok": True}
report = {"exercise": "04.3", "status": "passed", "total": 1, "lines": [line]}
LINES = "".join(json.dumps(one) + "\\n" for one in (
    {"said": {"report": report}}, {"report": report}, {"said": {"end": True}}, {"end": True},
    {"status": 0, "over": None},
)).encode()
body = json.dumps([["0" * 16, "done", []], []]).encode()
frame = struct.pack("<Q", len(body)) + body
FRAME = struct.pack("<Q", len(frame)) + frame
"""

WRITES = (
    FORGED
    + """
import os
for number in range(256):
    try:
        os.write(number, LINES)
    except OSError:
        pass
"""
)

ATTACKS = {  # what runs when the file is imported; the solution itself is wrong
    "patches the comparison": """
from minikv.course.judge import checking, examine, observing, result, scenarios
for module in (scenarios, observing, examine):
    module.difference = module.symptoms = lambda *_: None
    module._first_difference = lambda *_: None
    module.same = lambda *_: True
    module.disagreement = lambda *_: None
checking.mismatch = scenarios.mismatch = lambda *_: None
scenarios.Played.run = lambda self, player: scenarios.Outcome(self, {}, [])
result.Result.passed = True
""",
    "writes verdicts to every open file": WRITES,
    "writes a verdict and exits": WRITES + "os._exit(0)",
    "answers every question before it is asked": FORGED + """
import os
for number in range(3, 256):
    try:
        os.write(number, FRAME * 50)
    except OSError:
        pass
""",
    "raises SystemExit(0)": "raise SystemExit(0)",
    "writes a verdict when it ends": FORGED + """
import atexit, os, tempfile
@atexit.register
def forge():
    for name in ("messages", "verdict", "report"):
        with open(os.path.join(tempfile.gettempdir(), name), "wb") as file:
            file.write(LINES)
""",
    "replaces what tensors are compared with": """
import math, operator, torch
torch.equal = torch.allclose = lambda *_, **__: True
torch.Tensor.__eq__ = lambda *_: True
math.isclose = operator.eq = lambda *_, **__: True
""",
    "kills the process above": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "closes every file": "import os\nos.closerange(3, 256)",
}  # fmt: skip

EQUAL = """
class {name}({base}):
    __eq__ = lambda *_: True
    __ne__ = lambda *_: False
    __lt__ = __le__ = __gt__ = __ge__ = lambda *_: True
    __contains__ = __instancecheck__ = lambda *_: True
    __hash__ = lambda self: 0
"""
LIARS = {  # a class, and what the solution returns
    "equal to everything": (EQUAL.format(name="Yes", base="object"), "Yes()"),
    "a list that is equal to everything": (EQUAL.format(name="Yes", base="list"), "Yes([1])"),
    "a number that is": (EQUAL.format(name="Yes", base="int"), "[Yes(i) for i in range(end)]"),
    "a text that is": (EQUAL.format(name="Yes", base="str"), "Yes('')"),
    "a tensor that is": (
        "import torch\nclass Yes(torch.Tensor):\n    @classmethod\n"
        "    def __torch_function__(cls, function, types, args=(), kwargs=None):\n"
        "        return True",
        "torch.zeros(end - start).as_subclass(Yes)",
    ),
    "a class with another's name": ("class list(list):\n    __len__ = lambda _: 0", "list([1])"),
}


@pytest.fixture
def check(exercises):
    """`check(exercise, sources)`: the report of a file with these parts."""

    def run(exercise, sources):
        (exercises / exercise.chapter.file_name).write_text(text_with(exercise, sources))
        return process.run(exercise)

    return run


@APART
@pytest.mark.parametrize("attack", thorough_after(2, ATTACKS))
def test_no_verdict_can_be_written(check, attack):
    report = check(SLOTS, {"": ATTACKS[attack], **WRONG})
    assert report.status == "failed", report.text()
    assert any(not line.ok and line.what for line in report.lines), report.text()
    if "kills" in attack:
        assert check(SLOTS, {"slot_mapping": right_slots()}).passed, "the next check is not harmed"


@APART
@pytest.mark.parametrize("liar", thorough_after(2, LIARS))
def test_what_is_returned_is_looked_at_and_not_asked(check, liar):
    above, returned = LIARS[liar]
    body = f"def slot_mapping(block_ids, block_size, start, end):\n    return {returned}"
    report = check(SLOTS, {"": above, "slot_mapping": body})
    assert report.status == "failed" and len(report.lines) == report.total, report.text()


def right_slots():
    return (
        "def slot_mapping(block_ids, block_size, start, end):\n"
        "    return [block_ids[p // block_size] * block_size + p % block_size "
        "for p in range(start, end)]"
    )


@APART
def test_the_answers_are_in_no_memory_that_a_solution_can_read(check):
    spy = """
import gc
from minikv.course.judge.scenarios import Event, Scenario
print("events:", sum(issubclass(type(one), Event) for one in gc.get_objects()))
print("remembered:", Scenario.expected.cache_info().currsize)
"""
    check(SLOTS, {"slot_mapping": right_slots()})  # the judge knows the answers from here on
    report = check(SLOTS, {"": spy, **WRONG})
    assert "events: 0" in report.printed and "remembered: 0" in report.printed, report.printed


@APART
def test_a_comparison_with_the_model_is_repeated_where_nobody_can_touch_it(check):
    """The pool loses what it gets, and the engine's own look at the tokens is switched off."""
    patch = """
import minikv
minikv.LanguageModel.generate_naively = lambda self, ids, n: Same()
class Same(list):
    __eq__ = lambda *_: True
    __ne__ = lambda *_: False
class Tokens(list):
    __eq__ = lambda *_: True
    __ne__ = lambda *_: False
from minikv.course.chapters.ch04_paged_blocks import scenarios
original = scenarios.run
scenarios.run = lambda *_: (Tokens([[1], [2], [3]]), 3)
"""
    parts = {path: source for path, source in sources_of(POOL).items()}
    report = check(POOL, {"": patch, **parts})
    assert report.status == "failed", report.text()
    assert all(line.ok for line in report.lines[:-1]), report.text()
    assert "what it says is right is not what the reference gives" in report.lines[-1].what


def sources_of(exercise):
    from minikv.course.exercise_data.mistakes import reference_sources

    return reference_sources(exercise)


# ── Plain data ────────────────────────────────────────────────────────────────

VALUES = [
    None, True, -3, 10**30, 2.5, float("inf"), "ä\ud800", Words("unquoted"), [1, [2.0, "x"]],
    {"a": [1], 2: None}, {1, (2, 3)}, torch.arange(6).reshape(2, 3), torch.ones(0, 4),
    torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor([True, False]),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_arrives_as_it_was(value):
    found = unpack(pack(kept(value)))
    assert type(found) is type(value)
    if isinstance(value, torch.Tensor):
        assert found.dtype == value.dtype and torch.equal(found, value)
    else:
        assert found == value


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 8, b"\xff" * 20, pack([1])[:-1], pack([1]) + b"x",
     pack([torch.ones(3)])[:-4],
     pack(torch.ones(0)).replace(b"[0], 0", b"[9], 0"),
     pack(torch.ones(0)).replace(b"[0], 0", b"[0,-1],0"),
     pack(torch.ones(4)).replace(b"[4], 0", b"[-1],0"),
     pack(["int64"]).replace(b'"int64"', b'{"a":1}'),
     b"\x0b\0\0\0\0\0\0\0" + b"[[[[[[[[[[[",
     pack("x").replace(b'"x"', b"{1}")],
)  # fmt: skip
def test_what_is_no_plain_data_is_refused(data):
    with pytest.raises(Unreadable):
        unpack(data)


class Spy:
    """Notes that it was asked."""

    asked: ClassVar[list[str]] = []

    def __getattribute__(self, name):
        Spy.asked.append(name)
        return super().__getattribute__(name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        Spy.asked.append(str(function))
        return 1

    def __iter__(self):
        Spy.asked.append("iter")
        return iter(())


def a_spy_on(base, *arguments):
    methods = dict.fromkeys(("items", "tolist", "__str__", "__int__", "__float__"), Spy.__iter__)
    return type("Liar", (Spy, base), methods)(*arguments)


@pytest.mark.parametrize("base", [list, tuple, set, frozenset, dict, str, int, float, object])
def test_a_class_of_the_readers_is_not_asked(base):
    value = base() if base is object else base({1: 2} if base is dict else [1] if base in
        (list, tuple, set, frozenset) else 1)  # fmt: skip
    spy = a_spy_on(base) if base is object else a_spy_on(base, value)
    Spy.asked.clear()
    found = kept([spy, (spy,)])
    assert not Spy.asked
    assert found[0] == ("a Liar" if base is object else kept(value)) and found[1] == [found[0]]
    assert type(found[0]) in (list, set, dict, str, int, float)


def test_a_tensor_of_the_readers_class_is_not_asked():
    for spy in (torch.ones(2).as_subclass(type("Liar", (Spy, torch.Tensor), {})),
                np.ones(2).view(type("Liar", (Spy, np.ndarray), {}))):  # fmt: skip
        Spy.asked.clear()
        assert kept([spy]) == ["a Liar"] and not Spy.asked
    assert type(kept(torch.nn.Parameter(torch.ones(2)))) is torch.Tensor
    assert kept([np.int64(3), np.ones(2), np.bool_(True)]) == [3, [1.0, 1.0], True]


def test_a_value_too_large_for_a_float_is_another_value():
    assert not same(10**400, 1.5) and not same(1.5, 10**400)


@pytest.mark.parametrize(
    "answer",
    [7, "no list", [1], [["text"]], [["text", {}, False, [[], 3]]], [[3, {}, False, None]],
     [["text", [], False, None]], [["text", {1: 2}, False, None]], {"a": 1}],
    ids=str,
)  # fmt: skip
def test_an_answer_of_another_form_confuses(answer, monkeypatch):
    player = There.__new__(There)
    player._places = {id(None): 0}
    monkeypatch.setattr(player, "_ask", lambda *_: answer, raising=False)
    with pytest.raises(Confused):
        player.events(None, 0, 0)
