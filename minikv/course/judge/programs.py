"""What the programs of several chapters are made with."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from types import ModuleType

from torch.utils._python_dispatch import TorchDispatchMode

from minikv.blocks import BlockPool
from minikv.course.exercises.manifest import find
from minikv.course.exercises.mistakes import mistake_named
from minikv.course.judge.checking import Wrong, witness
from minikv.course.judge.scenarios import Group, Log, difference, reference_module, sealed
from minikv.kv_cache import PreallocatedCache
from minikv.language_model import LanguageModel

LINES_ABOVE = "the lines above: which of them fails?"  # where to look, of random programs


def at_most(limit: int, found: int) -> int | str:
    """What is seen of a number that may be anything up to `limit`."""
    return f"at most {limit}" if found <= limit else found


class OperationMode(TorchDispatchMode):
    """Sees each of torch's operations: what inherits from it writes `__torch_dispatch__`."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # to tell torch's compiler to skip this, torch would import it: two seconds


def scramble(pool: BlockPool, seed: int = 5) -> BlockPool:
    """Let a pool hand out its blocks in any order, so that no id is a place in a table."""
    ids = [pool.allocate() for _ in range(pool.num_blocks)]
    random.Random(seed).shuffle(ids)
    for block_id in ids:
        pool.release(block_id)
    return pool


def under(*settings) -> Callable[..., list]:
    """Programs with the same settings: under(8)("A+6", "A+8") is [(8, "A+6"), (8, "A+8")]."""
    return lambda *programs: [(*settings, one) for one in programs]


def blocks_of(lm: LanguageModel, prompt: list[int], size: int) -> list:
    """K and V of a prompt's whole blocks, but for the one that holds its last token."""
    cache = PreallocatedCache(lm.config, 256)
    lm.logits(prompt, cache)
    return list(cache.kv[:, :, : (len(prompt) - 1) // size * size].clone().split(size, 2))


def go_on(lm: LanguageModel, prompt: list[int], blocks: list) -> list[int]:
    """8 tokens after a prompt whose first blocks are these."""
    cache = PreallocatedCache(lm.config, 256)
    for block in blocks:
        cache.kv[:, :, cache.num_tokens : cache.num_tokens + block.shape[2]] = block
        cache.num_tokens += block.shape[2]
    new: list[int] = []
    while len(new) < 8:
        logits = lm.logits(new[-1:] or prompt[cache.num_tokens :], cache)
        new.append(int(logits[-1].argmax()))
    return new


def decoded(lm: LanguageModel, prompts: list[list[int]], outputs: list) -> str:
    """A sentence about requests that an engine has decoded by the reader's kernel. Raises Wrong for
    other tokens than the oracle's."""
    for prompt, output in zip(prompts, outputs, strict=True):
        found = list(output.token_ids)
        expected = lm.generate_naively(prompt, len(found))
        witness(found)
        if found != expected:
            raise Wrong(
                f"{found}, the oracle: {expected}",
                "something that no check covers: other lengths or tables, slots with old tokens",
                f"your kernel on contexts of {len(prompt)} tokens or more, in blocks of 16",
            )
    lengths = " and ".join(str(len(prompt)) for prompt in prompts)
    return f"{lengths} prompt tokens, {len(found)} new ones each, same tokens as the oracle"


def advice(exercise: str, name: str) -> tuple[str, str]:
    """Cause and look of a known mistake, for a check that finds it out by itself."""
    mistake = mistake_named(find(exercise), name)
    return mistake.cause, mistake.look


def line(name: str, look: str, *cases) -> Group:
    """A line whose cases are one program, which `until_wrong` plays."""
    return Group(name, [cases], look)


def until_wrong(
    exercise: str,
    play: Callable,
    around: Callable[[ModuleType], AbstractContextManager] = lambda mine: nullcontext(),
    tell: Callable[[ModuleType], None] = lambda mine: None,
) -> Callable:
    """Plays a program of several cases up to the first that goes wrong: each of them is slow.

    Every case is played inside `around(mine)`, and `tell(mine)` is called if one goes wrong.
    """

    def events_of(mine, case) -> list:
        log = Log()
        with around(mine):
            play(mine, case, log)
        return sealed(log.events)

    @cache
    def expected(case) -> list:
        return events_of(reference_module(exercise), case)

    def in_turn(mine, cases, log: Log) -> None:
        for case in cases:
            right = expected(case)
            events = right if mine is reference_module(exercise) else events_of(mine, case)
            is_wrong = difference(events, right) is not None
            log.events += [replace(one, text=one.text if is_wrong else "") for one in events]
            if is_wrong:
                tell(mine)
                return

    return in_turn
