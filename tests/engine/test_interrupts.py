"""An interrupt at every line of engine.py and of the loop that runs ahead, and at many lines of the
parts, one line at a time: nothing is broken afterwards, and every request gets the tokens that it
gets without interrupts."""

import itertools
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers import run_ahead, small
from programs import model, weights
from thorough import thorough_after

import minikv
from minikv import Engine, LanguageModel, OutOfBlocks, SamplingParams

NAMES = "engine scheduler radix blocks sequence runner batch beam gpu/ahead gpu/runner"
# They change requests and blocks. Of the files that only compute, the runner stands for all.
FILES = {str(Path(minikv.__file__).parent / f"{name}.py") for name in NAMES.split()}


@pytest.fixture(scope="module")
def lm():
    """Of one layer, and with text."""
    return LanguageModel(
        "one layer", model(1, (None,)).transformer, minikv.load("tinypy").tokenizer
    )


SWAP = dict(num_blocks=5, preemption="swap", host_blocks=2)  # when the host is full: recompute
# (the engine's numbers, whether it runs ahead, one of how many lines is taken, and every line of)
SITUATIONS = {
    "no prefix cache": (dict(num_blocks=5, prefix_cache=False), False, 15, "no file"),
    "ahead": (SWAP, True, 12, "gpu"),
    "in turns": (SWAP, False, 3, "engine.py"),
}
SPARING = [("no prefix cache", 2), *((name, 1) for name in SITUATIONS)]  # so many times fewer lines
PREFIX = [7, 3, 9, 9, 4, 1, 8, 2, 5]


class Play:
    """One run of a program: whatever is interrupted is tried again."""

    def __init__(self, lm, situation):
        changes, ahead, *_ = SITUATIONS[situation]
        self.engine = Engine(lm, small(max_num_seqs=4, max_batch_tokens=8, **changes))
        if ahead:
            run_ahead(self.engine)
        self.lm, self.new_weights = lm, weights(2, 1)
        self.interrupts = 0
        self.ids, self.outputs = {}, {}
        self.found = {}  # what must be the same in every run

    def retry(self, action):
        """Do it until it is not interrupted; between the attempts the engine is sound."""
        failed = False
        while True:
            try:
                if failed:
                    self.engine.check()
                return action()
            except KeyboardInterrupt:
                failed = True
                self.interrupts += 1
                assert self.interrupts < 5

    def add(self, name, prompt, max_tokens, **params):
        """An interrupted `add_request` has added its request or has not."""

        def action():
            before = self.engine._next_id
            if name in self.ids and self.ids[name] in self.engine._requests:
                return
            self.ids[name] = before
            self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, **params))

        self.retry(action)

    def step(self, times=1):
        for _ in range(times):
            for output in self.retry(self.engine.step):
                self.outputs[output.request_id] = output

    def abort(self, name):
        def action():
            if self.ids[name] in self.engine._requests:
                self.engine.abort(self.ids[name])

        self.retry(action)

    def beams(self, prompt):
        """As soon as there is room for them."""
        while True:
            try:
                beams = self.retry(lambda: self.engine.beam_search(prompt, 2, 3))
            except OutOfBlocks:
                self.step()
            else:
                self.found["beams"] = [beam.token_ids for beam in beams]
                return

    def drain(self):
        for _ in range(300):
            if not self.retry(lambda: self.engine.has_unfinished):
                return
            self.step()
        raise AssertionError("no end in sight")

    def run(self):
        """Requests that share prefixes, samples, preemptions, an abort, beams, new weights."""
        engine = self.engine
        self.add("alone", [6, 6, 1], 5)
        self.add("prefix", [*PREFIX, 1], 9)
        self.add("samples", [*PREFIX, 2], 6, n=2, temperature=1.0, seed=1)
        self.step(3)
        self.add("twin", [*PREFIX, 1], 7, stop=(6,))
        self.add("aborted", [*PREFIX, 3], 10, n=2)
        self.step(4)
        self.beams([4, 2])
        self.abort("aborted")
        text = self.lm.decode([35])  # its third token
        self.add("stopped", [1, 2, 3, 4, 5], 9, stop=(text,))
        self.drain()
        prompts = [[*PREFIX, 2], [9, 8]]
        outputs = self.retry(lambda: engine.generate(prompts, SamplingParams(max_tokens=4)))
        self.found["generate"] = self.retry(lambda: [output.token_ids for output in outputs])
        self.add("new weights", [*PREFIX, 1], 3)
        self.retry(lambda: engine.update_weights(self.new_weights))
        self.drain()
        params = SamplingParams(max_tokens=3)
        deltas = self.retry(lambda: list(engine.stream([*PREFIX, 2], params)))
        self.found["stream"] = [token_id for delta in deltas for token_id in delta.token_ids]

    def results(self):
        engine = self.engine
        engine.check()
        stats = engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.blocks_used == stats.blocks_cached
        for name, request_id in self.ids.items():
            if name != "aborted":
                samples = self.outputs[request_id].samples
                self.found[name] = [(one.token_ids, one.finish_reason) for one in samples]
        return self.found


def count_lines(action):
    """How often each line of the engine runs in an action: {(code, line): count}."""
    counts = Counter()

    def trace(frame, event, _):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            counts[frame.f_code, frame.f_lineno] += 1
        return trace

    run_traced(action, trace)
    return counts


def run_traced(action, trace):
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)


def interrupt(action, code, line, occurrence=1):
    """Run `action` with a KeyboardInterrupt when a line runs for the `occurrence`-th time."""
    left = occurrence

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == line:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt  # this also ends the tracing
        return trace

    run_traced(action, trace)


@pytest.mark.parametrize(("situation", "fewer"), thorough_after(1, SPARING))
def test_an_interrupt_at_any_line_loses_nothing(lm, situation, fewer):
    first = Play(lm, situation)
    counts = count_lines(first.run)
    expected = first.results()
    assert expected["alone"][0][0] == lm.generate_naively([6, 6, 1], 5)
    assert expected["prefix"][0][0] == lm.generate_naively([*PREFIX, 1], 9)
    assert expected["stopped"][0][1] == "stop"
    stats = first.engine.stats()
    assert stats.preemptions > 0
    assert stats.preemptions > stats.swaps_out > 0 or situation == "no prefix cache"
    assert (stats.hit_tokens > 0) == (situation != "no prefix cache")
    *_, stride, every_line_of = SITUATIONS[situation]
    for place, ((code, line), count) in enumerate(counts.items()):
        if place % (stride * fewer) == 0 or every_line_of in code.co_filename:
            play = Play(lm, situation)
            occurrence = 1 + place * 7 % count  # the first time, or a later one
            interrupt(play.run, code, line, occurrence)
            where = f"{Path(code.co_filename).name}:{line}, time {occurrence} of {count}"
            assert play.interrupts == 1, where
            assert play.results() == expected, where


@pytest.mark.parametrize("stride", thorough_after(1, [4, 1]))
def test_an_interrupt_while_recovering_is_made_good(lm, stride):
    """The recovery itself is interrupted, at every line; the next call begins with it."""

    def play_with(recover):
        """Fail in the seventh step, and recover in this way that one time."""
        play = Play(lm, "in turns")
        steps, run = itertools.count(), play.engine.runner.run
        plain = play.engine.recover

        def fail_once(plan):
            if next(steps) == 7:
                play.engine.recover = this_time
                raise KeyboardInterrupt
            return run(plan)

        def this_time():
            del play.engine.recover
            recover(plain)

        play.engine.runner.run = fail_once
        play.run()
        return play

    counts = Counter()
    expected = play_with(lambda plain: counts.update(count_lines(plain))).results()
    assert len(counts) > 30
    for code, line in list(counts)[::stride]:
        play = play_with(lambda plain: interrupt(plain, code, line))  # noqa: B023
        assert play.interrupts == 2
        assert play.results() == expected, f"{Path(code.co_filename).name}:{line}"
