"""Agents that come back, through the engine's prefix cache and no model: what is computed again?

    turns = agent_load(seed=1)
    again = recomputed(turns, sizes=[2048, 4096, 8192])
    retention_picture(again)

The load has the shape of recorded ones. A median agent takes 43 turns, and a median request has
142,000 tokens in and 444 out (vLLM #57103). Of an agent's next requests 86 % come within 1 s and
95 % within 10 s (vLLM router #285); the others take up to ten minutes here. Between them come
chats, whose people read and type for a minute, and single requests over a document that nobody asks
for again; how many is our choice. A prompt is the ids of its blocks, as in `hit_rate`.

Requests are served in the moment in which they come, one after the other. So every policy sees the
same requests at the same times, and nothing is said about seconds: a token that is computed again
is counted, whatever it costs.
"""

import itertools
import math
import random
import sys
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from functools import partial
from statistics import NormalDist, median
from typing import NamedTuple

from tqdm import tqdm

from minikv.blocks import BlockPool
from minikv.course.pictures import style
from minikv.radix import Node
from minikv.retention import (
    Policy,
    Rank,
    RetainingCache,
    by_age,
    pinned,
    time_to_live,
    whole_conversations,
)

BLOCK = 512  # tokens
HINT = 10  # seconds, of an agent whose tool runs


class Turn(NamedTuple):
    """One request, `at` seconds after the first."""

    at: float
    ids: Seq[int]  # of the blocks of its prompt: equal ids, equal prefixes
    retain_s: int  # its hint; 0 if there is none
    kind: str  # "agent", "chat", "single"


# ── The load ──────────────────────────────────────────────────────────────────


def agent_load(
    seed: int = 1, agents: int = 24, singles_per_s: float = 2.0, chats_per_s: float = 0.1
) -> list[Turn]:
    """All requests in the order in which they come; agents begin in the first five minutes."""
    draw, new = random.Random(seed), itertools.count()
    system = [next(new) for _ in range(16)]  # prompt and tools, which all agents share

    def grow(ids: list[int], blocks: float) -> list[int]:
        return ids + [next(new) for _ in range(max(1, round(blocks)))]

    turns: list[Turn] = []
    for agent in range(agents):
        at, ids = draw.uniform(0, 300), grow(system, draw.uniform(8, 40))
        # Log-normal around 43, as evenly as so few agents can be.
        spread = NormalDist(0, 0.4).inv_cdf((agent + 0.5) / agents)
        number = max(2, round(43 * math.exp(spread)))
        for left in range(number - 1, -1, -1):
            turns.append(Turn(at, ids, HINT if left else 0, "agent"))
            at, ids = at + pause(draw), grow(ids, draw.expovariate(1 / 11))
    end = max(turn.at for turn in turns)
    for at in arrivals(draw, singles_per_s, end):
        turns.append(Turn(at, grow([], draw.uniform(4, 28)), 0, "single"))
    for at in arrivals(draw, chats_per_s, end):
        ids = grow([], draw.uniform(2, 6))
        for _ in range(6):
            turns.append(Turn(at, ids, 0, "chat"))
            at, ids = at + draw.uniform(20, 120), grow(ids, draw.uniform(1, 3))
    return sorted(turns, key=lambda turn: turn.at)


def pause(draw: random.Random) -> float:
    """Seconds until an agent's next request."""
    low, high = draw.choices([(0.1, 1), (1, 10), (10, 600)], [86.46, 8.66, 4.88])[0]
    return low * (high / low) ** draw.random()


def arrivals(draw: random.Random, per_s: float, end: float) -> Iterator[float]:
    at = 0.0
    while per_s and (at := at + draw.expovariate(per_s)) < end:
        yield at


def shape(turns: Seq[Turn]) -> dict[str, float]:
    """What the recorded figures are, of this load."""
    agents: dict[int, list[Turn]] = {}
    for turn in turns:
        if turn.kind == "agent":
            agents.setdefault(turn.ids[16], []).append(turn)
    gaps = [b.at - a.at for one in agents.values() for a, b in itertools.pairwise(one)]
    return {
        "turns of a median agent": median(map(len, agents.values())),
        "tokens in, median": BLOCK * median(len(t.ids) for one in agents.values() for t in one),
        "back within 1 s, %": 100 * sum(gap <= 1 for gap in gaps) / len(gaps),
        "back within 10 s, %": 100 * sum(gap <= 10 for gap in gaps) / len(gaps),
    }


# ── Serving it ────────────────────────────────────────────────────────────────

MakeCache = Callable[..., RetainingCache]  # of a pool and a `clock`


def knows_the_future(turns: Seq[Turn]) -> Policy:
    """Evicts what is needed again last, or never (Belady, 1966): no policy computes less again."""
    uses: dict[int, list[float]] = {}
    for turn in turns:
        for id_ in turn.ids:
            uses.setdefault(id_, []).append(turn.at)

    def policy(cache: RetainingCache, leaf: Node) -> Rank:
        times = uses[leaf.keys[-1][0]]
        later = bisect(times, cache.clock())
        return Rank(0.0, -times[later] if later < len(times) else -math.inf)

    return policy


def serve(turns: Seq[Turn], num_blocks: int, make: MakeCache) -> tuple[int, RetainingCache]:
    """Tokens of all prompts that are computed though they had been computed before. Also returns
    the cache as it is then."""
    now = 0.0
    pool = BlockPool(num_blocks)
    cache = make(pool, clock=lambda: now)
    seen: set[int] = set()
    again = 0
    for turn in turns:
        now, ids = turn.at, turn.ids[:num_blocks]
        hit = cache.match(ids)
        cache.lock(hit.node)
        rest = ids[hit.num_tokens :]
        again += len(seen.intersection(rest))
        seen.update(rest)
        cache.evict(max(0, len(rest) - pool.num_free))
        new = [pool.allocate() for _ in rest]
        node = cache.insert(ids, hit.block_ids + new).node
        for block_id in new:
            pool.release(block_id)  # the cache holds it
        cache.unlock(hit.node)
        if turn.retain_s:
            cache.pin(node, turn.retain_s)
    return BLOCK * again, cache


# ── The policies ──────────────────────────────────────────────────────────────


def recomputed(
    turns: Seq[Turn], sizes: Seq[int] = (1024, 2048, 4096, 8192)
) -> dict[str, list[int]]:
    """Tokens that each policy computes again, with each size of the pool, in blocks."""
    no_hints = [turn._replace(retain_s=0) for turn in turns]
    until_back = [turn._replace(retain_s=turn.retain_s and 600) for turn in turns]
    plans: dict[str, tuple[Seq[Turn], Policy]] = {
        "age": (no_hints, by_age),
        "30 s to live": (no_hints, time_to_live(30)),
        "whole conversations": (no_hints, whole_conversations),
        f"pinned for {HINT} s": (turns, pinned),
        "pinned for 600 s": (until_back, pinned),
        "knows the future": (no_hints, knows_the_future(turns)),
    }
    found: dict[str, list[int]] = {}
    with tqdm(total=len(plans) * len(sizes), leave=False, disable=not sys.stderr.isatty()) as bar:
        for name, (load, policy) in plans.items():
            make = partial(RetainingCache, block_size=1, policy=policy)
            found[name] = []
            for size in sizes:
                found[name].append(serve(load, size, make)[0])
                bar.update()
    return found


def retention_picture(
    again: Mapping[str, Seq[int]], sizes: Seq[int] = (1024, 2048, 4096, 8192)
) -> style.Picture:
    """Tokens that are computed again over the size of the pool, a line for each policy."""
    title = "A pin pays if it lasts until the tool is done and the pool has room for it"
    figure, axes = style.new_axes(
        title, f"pool (blocks of {BLOCK} tokens)", "tokens computed again (millions)", height=3.6
    )
    same: dict[tuple[int, ...], list[str]] = {}  # policies by what they compute again
    for name, tokens in again.items():
        same.setdefault(tuple(tokens), []).append(name)
    for place, (tokens, names) in enumerate(same.items()):
        axes.plot(sizes, [count / 1e6 for count in tokens], "oxs^Dv"[place], label=", ".join(names),
                  color=style.PALETTE[(0, 1, 5, 7, 3, 2)[place]], markerfacecolor="none",
                  linewidth=1.8, linestyle=("-", "--", "-", "-.", ":", "-")[place],
                  clip_on=False)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_ylim(0)
    axes.legend(frameon=False, fontsize=9)
    words = "; ".join(
        f"{', '.join(names)}: " + ", ".join(f"{count / 1e6:.2f} M with {size:,}"
                                            for size, count in zip(sizes, tokens, strict=True))
        for tokens, names in same.items()
    )  # fmt: skip
    return style.Picture(figure, f"{title}. Tokens computed again over blocks: {words}.")
