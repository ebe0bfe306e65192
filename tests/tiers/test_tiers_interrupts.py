"""Interrupts inside the calls of a tier, and tiers that never answer: every wait has an end."""

import gc
import random
import signal
import sys
import threading

import pytest
from tiers_case import SlowTier, ends
from waiting import PATIENCE, until

from minikv.tiers.store import Background

NAMES = [bytes([i]) * 32 for i in range(4)]


def use(background):
    """Every call that an engine makes."""
    for name in NAMES[:3]:
        background.put(name, NAMES[3], bytes(300))
    assert background.get(NAMES, lambda entry, name: memoryview(entry)).done.wait(PATIENCE)
    assert background.ask(NAMES).done.wait(PATIENCE)
    assert background.wait(PATIENCE)


def assert_usable(background):
    """What another thread hands over is written, read and found, and the tier can be closed."""
    done = []

    def finish():
        assert background.put(b"n" * 32, NAMES[3], b"bytes of a block")
        fetch = background.get([b"n" * 32], lambda entry, name: memoryview(entry)[-16:])
        assert fetch.done.wait(PATIENCE) and bytes(fetch.found[b"n" * 32]) == b"bytes of a block"
        assert background.wait(PATIENCE) and b"n" * 32 in background.tier.entries
        question = background.ask([b"n" * 32])
        assert question.done.wait(PATIENCE) and question.there
        background.close()
        done.append(True)

    ends(finish)
    background._thread.join(PATIENCE)  # it says so just before it ends
    assert done and not background._thread.is_alive()


def interrupt_at(number, action):
    """Run with a KeyboardInterrupt before instruction `number`; returns how many there were."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        if count == number:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return count


def test_an_interrupt_at_any_instruction_leaves_a_tier_usable():
    background = Background(SlowTier())
    length = interrupt_at(-1, lambda: use(background))
    background.close()
    assert length > 300
    for number in range(1, length, 4):
        background = Background(SlowTier())
        assert interrupt_at(number, lambda: use(background)) <= number  # noqa: B023
        assert_usable(background)


def test_an_interrupt_at_any_moment_leaves_a_tier_usable():
    """By real signals, which arrive inside locks as well."""
    rng = random.Random(0)

    def stop(*_):
        raise KeyboardInterrupt

    def until_interrupted(background):
        while True:
            use(background)

    before = signal.signal(signal.SIGALRM, stop)
    gc.disable()  # Python would drop an interrupt of what garbage still does
    try:
        for _ in range(150):
            background = Background(SlowTier())
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 3e-3))
                until_interrupted(background)
            assert_usable(background)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.enable()
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("patience", [None, 0.1])
def test_nobody_waits_for_a_tier_that_never_answers(patience):
    tier = SlowTier()
    tier.go.clear()
    background = Background(tier, stuck=0.1)
    fetch = background.get(NAMES, lambda entry, name: memoryview(entry))
    results = []

    def give_up():
        results.append(background.wait(patience))
        background.close(patience)
        results.append(fetch.done.wait(0))

    ends(give_up)
    assert results == [False, False]
    tier.go.set()
    ends(background._thread.join)
    assert fetch.done.is_set()
    ends(lambda: background.get(NAMES, memoryview).done.wait(PATIENCE))


def test_a_wait_ends_with_the_first_write_that_fails(monkeypatch):
    """Each may take seconds: nobody waits for all of them."""
    monkeypatch.setattr(Background, "BATCH", 1)
    go, writes, results = threading.Event(), [], []

    class Failing(SlowTier):
        def put_many(self, entries):
            writes.append(list(entries))
            until(lambda: len(writes) > 1 or background._waits)
            assert len(writes) == 1 or go.wait(PATIENCE)
            raise OSError("no")

    background = Background(Failing())
    for name in NAMES:
        background.put(name, NAMES[3], bytes(10))
    ends(lambda: results.append(background.wait()))
    assert results == [False] and writes[0] == [NAMES[0]] and len(writes) <= 2
    go.set()
    background.close()
