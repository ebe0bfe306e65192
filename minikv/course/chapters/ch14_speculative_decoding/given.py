"""Chapter 14: what the notebook measures, and the film of drafts over blocks."""

from collections.abc import Callable, Sequence
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import minikv
from minikv import BlockPool, BlockTable
from minikv.course.pictures.block_viewer import History
from minikv.course.pictures.snapshot import counted
from minikv.language_model import LanguageModel
from minikv.speculative import Drafter, Proposal, keep_equal

COPY = """\
def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("negative")
    return width * height


def new_area(width, height):
    if width < 0"""  # a function, and the beginning of a copy

FILMED = "    self.a = a\n    self.b = b\n    self."  # the film's prompt, in four blocks of 4


class Fixed(Drafter):
    """Always the same number of drafts, and nearly always wrong ones."""

    def __init__(self, num_drafts: int):
        self.num_drafts = num_drafts

    def propose(self, sequence: Any, most: int) -> Proposal | None:
        return Proposal([1] * min(most, self.num_drafts)) if self.num_drafts else None


def seconds_by_tokens(
    lm: LanguageModel, sizes: Sequence[int], attention: str, steps: int = 25, context: int = 128
) -> list[float]:
    """The least time of a step over n tokens of one sequence, the newest and n - 1 drafts."""
    engines = []
    for size in sizes:
        config = minikv.EngineConfig(speculative=Fixed(size - 1), attention=attention)
        engine = minikv.Engine(lm, config)
        loop: Any = engine.loop  # verifies all that is proposed
        loop.chances = SimpleNamespace(of_drafts=lambda _, n: [0.99] * n, compare=lambda *_: None)
        loop.costs = SimpleNamespace(of=lambda _: 1.0, row=0.0, note=lambda *_: 1.0)
        params = minikv.SamplingParams(max_tokens=600, ignore_eos=True)
        engine.add_request([2 + size, *range(2, 1 + context)], params)
        for _ in range(3):
            engine.step()
        engines.append(engine)
    times: list[list[float]] = [[] for _ in sizes]
    for _ in range(steps):  # in turns, so that a busy moment does not fall on one size alone
        for engine, found in zip(engines, times, strict=True):
            started = perf_counter()
            engine.step()
            found.append(perf_counter() - started)
    return [min(found) for found in times]


def film(
    lm: LanguageModel,
    prompt_ids: Sequence[int],
    propose: Callable[[list[int]], list[int]],
    num_tokens: int = 12,
    block_size: int = 4,
) -> History:
    """Drafts of `propose` over the blocks of a table, until `num_tokens` are written. The target's
    tokens are those of naive attention. A draft has a question mark until it is verified."""
    tokens = list(prompt_ids)
    pool = BlockPool(-(-(len(tokens) + num_tokens + 8) // block_size))
    table = BlockTable(pool, block_size)
    table.grow(len(tokens))
    history = History(pool)

    def texts(drafts: Sequence[int] = ()) -> dict[str, list[str]]:
        told = [f"?{lm.decode([one])}" for one in drafts]
        return {"A": [lm.decode([one]) for one in tokens] + told}

    history.snap("the prompt is computed", {"A": table}, texts())
    tokens += lm.generate_naively(tokens, 1)
    while len(tokens) < len(prompt_ids) + num_tokens:
        drafts = propose(tokens)
        table.grow(1 + len(drafts))
        words = counted(len(drafts), "draft") if drafts else "no drafts"
        history.snap(words, {"A": table}, texts(drafts))
        own = [int(row.argmax()) for row in lm.logits(tokens + drafts)[len(tokens) - 1 :]]
        written = keep_equal(drafts, own)
        tokens += written
        table.shrink(len(drafts) - (len(written) - 1))
        if drafts:
            kept = len(written) - 1
            words = f"{kept} of {len(drafts)} kept, 1 from the target"
            history.snap(words, {"A": table}, texts())
    return history
