"""What the programs of several chapters are made with."""

import random
from collections.abc import Callable

from torch.utils._python_dispatch import TorchDispatchMode

from minikv.blocks import BlockPool
from minikv.course.exercise_data.manifest import find
from minikv.course.exercise_data.mistakes import mistake_named
from minikv.course.judge.checking import Wrong, witness
from minikv.course.judge.scenarios import Group
from minikv.kv_cache import PreallocatedCache
from minikv.language_model import LanguageModel


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


def advice(exercise: str, name: str) -> tuple[str, str | None]:
    """Cause and look of a known mistake, for a check that finds it out by itself. Asked when the
    checks are imported: where they run, nobody can read about mistakes."""
    mistake = mistake_named(find(exercise), name)
    return mistake.cause, mistake.look


def line(name: str, look: str, *cases) -> Group:
    """A line whose cases are one program, for a scenario that plays them in turn: each is slow."""
    return Group(name, [cases], look)
