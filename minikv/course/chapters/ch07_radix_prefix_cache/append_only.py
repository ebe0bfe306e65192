"""A chat whose template leaves the model's reasoning out of the next prompt."""

import random
from collections.abc import Callable, Sequence as Seq
from typing import NamedTuple

import minikv
from minikv.course.chapters.ch05_copy_on_write.given import go_on
from minikv.sequence import Request

Parts = Seq[tuple[list[int], bool]]  # of a turn: tokens, and whether the next prompt has them
Insert = Callable[[minikv.RadixCache, Parts, list[int]], int]


def two_turns(
    lm: minikv.LanguageModel, insert_turn: Insert
) -> tuple[int, int, list[int], list[int]]:
    """One turn with reasoning in it, then the next, without: (dead blocks of the first turn, tokens
    that the second found, its 12 new tokens, the oracle's)."""
    config = minikv.EngineConfig(num_blocks=64, block_size=4, min_prefix_tokens=0)
    engine = minikv.Engine(lm, config)
    assert engine.cache is not None  # the default
    prompt = lm.encode("class Stack:\n    def push(self, item):\n")
    turn = Request(-1, prompt, minikv.SamplingParams()).sequences[0]
    turn.table = minikv.BlockTable(engine.pool, config.block_size)
    go_on(engine, turn, 25)
    written = turn.token_ids[len(prompt) : turn.num_computed]  # the last one has no K and V yet
    reasoning, answer = written[:12], written[12:]
    parts = [(prompt, True), (reasoning, False), (answer, True)]
    dead = insert_turn(engine.cache, parts, turn.table.block_ids)
    turn.table.release()
    later = [*prompt, *answer, *lm.encode("\n    def pop(self):\n")]
    [output] = engine.generate([later], minikv.SamplingParams(max_tokens=12, ignore_eos=True))
    return dead, engine.stats().hit_tokens, output.token_ids, lm.generate_naively(later, 12)


class Served(NamedTuple):
    prompt_tokens: int  # of all turns
    computed: int  # of these
    dead: int  # blocks of all turns that no later prompt can find


def insert_all(cache: minikv.RadixCache, parts: Parts, block_ids: list[int]) -> int:
    """What a cache does that knows nothing of templates. What is dead is not its business: 0."""
    cache.insert([token for tokens, _ in parts for token in tokens], block_ids)
    return 0


def agents(insert_turn: Insert, num_blocks: int, append_only: bool = False) -> Served:
    """Twelve agents take turns, five each, on one cache with blocks of 16. A turn is a message of
    40 tokens, and four times reasoning (60 tokens) and a tool's call and result (100). The next
    prompt leaves out the reasoning, unless the template is `append_only`. No model is needed."""
    draw, size = random.Random(7), 16
    pool = minikv.BlockPool(num_blocks)
    cache = minikv.RadixCache(pool, size)

    def new(count: int) -> list[int]:
        return draw.choices(range(10_000), k=count)

    system, asked, computed, dead = new(320), 0, 0, 0
    histories = [system] * 12
    for _ in range(5):
        for i, history in enumerate(histories):
            prompt = history + new(40)
            parts = [(prompt, True)]
            for _ in range(4):
                parts += [(new(60), append_only), (new(100), True)]
            hit, table = cache.match(prompt), minikv.BlockTable(pool, size)
            cache.lock(hit.node)
            table.share(hit.block_ids)
            length = sum(len(tokens) for tokens, _ in parts)
            cache.evict(max(0, length // size - len(hit.block_ids) - pool.num_free))
            table.grow(length // size * size - hit.num_tokens)
            dead += insert_turn(cache, parts, table.block_ids)
            cache.unlock(hit.node)
            table.release()
            asked, computed = asked + len(prompt), computed + len(prompt) - hit.num_tokens
            histories[i] = [token for tokens, again in parts if again for token in tokens]
    return Served(asked, computed, dead)
