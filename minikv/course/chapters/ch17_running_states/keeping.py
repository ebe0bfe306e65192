"""Chapter 17: which copies of states to keep, tried on loads without computing a model.

    load = agents(512)
    again = served(load, copies_due, num_copies=64).recomputed_tokens

The engine's own pool, tables and prefix cache serve the requests one after the other, and a
function in the place of `minikv.states.slots.copies_due` says where states are copied. States are
of one number, because nobody reads them. Blocks of K and V are never evicted, so a token whose K
and V the cache has is computed again only for want of a copy of the state.
"""

from collections.abc import Callable, Mapping, Sequence as Seq
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

from minikv.blocks import blocks_for
from minikv.course.chapters.ch07_radix_prefix_cache.retention import BLOCK, agent_load
from minikv.course.judge.checking import in_place_of
from minikv.course.pictures import style
from minikv.course.workloads.timing import REPEATS
from minikv.course.workloads.workload import conversations
from minikv.language_model import LanguageModel
from minikv.sampling import SamplingParams
from minikv.sequence import Request
from minikv.states import Counts, StateCache, StateMemory, StatePool, StateTable
from minikv.states.slots import copies_due

CopiesDue = Callable[..., dict[int, bool]]  # as `copies_due`


class Load(NamedTuple):
    """Requests in their order, each as (its prompt, all its tokens in the end)."""

    requests: Seq[tuple[Seq[int], Seq[int]]]
    block_size: int  # in what the lists hold
    unit: int  # tokens that one number of the lists stands for
    step: int  # how many of them a step computes at most


# ── The loads ─────────────────────────────────────────────────────────────────


def agents(number: int = 4 * REPEATS) -> Load:
    """Chapter 07's agents, chats and single requests. A number stands for a block of 512 tokens."""
    turns = agent_load(agents=number, singles_per_s=0.2)
    return Load([(turn.ids, turn.ids) for turn in turns], 1, BLOCK, 16)


def chats(lm: LanguageModel, number: int = 12, turns: int = 6) -> Load:
    """Conversations that share a system prompt; a turn's prompt holds all answers before it."""
    jobs = conversations(lm, number, turns, real_answers=False)
    requests = []
    for place, job in enumerate(jobs):
        prompt, end = job.prompt_ids, len(job.prompt_ids) + job.max_tokens
        said = [one.prompt_ids[:end] for one in jobs[place + 1 :]]
        later = next((ids for ids in said if ids[: len(prompt)] == prompt), prompt)
        requests.append((prompt, later))
    return Load(requests, 16, 1, 256)


def groups(shared: int = 1500, own: int = 700, number: int = 8, each: int = 8) -> Load:
    """Prompts of several groups, in turns: all of a group begin with the same `shared` tokens."""
    prompts = [
        [*range(group, group + shared), *([10_000 + group * each + i] * own)]
        for i in range(each)
        for group in range(0, number * shared, shared)
    ]
    return Load([(prompt, prompt) for prompt in prompts], 528, 1, 2048)


# ── Serving them ──────────────────────────────────────────────────────────────


class Served(NamedTuple):
    hits: int  # requests that began with a copy
    counts: Counts
    recomputed_tokens: int


def served(load: Load, due: CopiesDue, num_copies: int = 100_000, interval: int = 0) -> Served:
    """Serve a load with room for so many copies."""
    size, hits = load.block_size, 0
    shape: Any = SimpleNamespace(
        num_linear=1, value_heads=1, key_dim=1, value_dim=1, width=1, channels=1,
        state_bytes=lambda dtype: 4,
    )  # fmt: skip
    memory = StateMemory(shape, torch.float32, 1, num_copies, interval)
    pool = StatePool(sum(blocks_for(len(end), size) for _, end in load.requests), memory)
    cache = StateCache(pool, size)
    with in_place_of("minikv.states.slots:copies_due", due):
        for number, (prompt, end) in enumerate(load.requests):
            request = Request(number, list(prompt), SamplingParams(max_tokens=1))
            [sequence] = request.sequences
            hit = cache.match(prompt[:-1])
            cache.lock(hit.node)
            hits += hit.num_tokens > 0
            sequence.table = table = StateTable(pool, size)
            table.share(hit.block_ids)
            sequence.num_computed = hit.num_tokens
            while sequence.num_computed < len(end):
                left = len(prompt) - sequence.num_computed
                done = sequence.num_computed + min(left, load.step) if left > 0 else len(end)
                table.grow(done - table.num_tokens)
                pool.begin_step()
                table.plan_copies(sequence, done)
                sequence.num_computed = done
                full = done // size
                found = cache.insert(end[: full * size], table.block_ids).block_ids
                for index, block_id in enumerate(found):
                    if table.block_ids[index] != block_id:  # the cache had it
                        table.replace(index, block_id)
            table.release()
            cache.unlock(hit.node)
    counts = pool.counts()
    return Served(hits, counts, counts.recomputed_tokens * load.unit)


# ── The policies ──────────────────────────────────────────────────────────────


def last_only(start, junction, num_tokens, block_size, interval=0):
    return copies_due(start, start, num_tokens, block_size)


def every(blocks: int) -> CopiesDue:
    """A copy at each multiple of so many blocks, and the last state."""

    def due(start, junction, num_tokens, block_size, interval=0):
        return copies_due(start, start, num_tokens, block_size, blocks * block_size)

    return due


def compared(
    load: Load, sizes: Seq[int], yours: CopiesDue, blocks: int = 8
) -> dict[str, list[int]]:
    """Tokens that each policy computes again, with room for so many copies."""
    plans = {
        "every block": every(1),
        f"every {blocks} blocks": every(blocks),
        "the last state": last_only,
        "last state and junction": yours,
    }
    return {name: [served(load, due, size).recomputed_tokens for size in sizes]
            for name, due in plans.items()}  # fmt: skip


def copies_picture(again: Mapping[str, Mapping[float, Mapping[str, int]]]) -> style.Picture:
    """Tokens that are computed again, over the MiB that copies may take: for each load, by MiB,
    what each policy computes again."""
    title = "Few copies at the right places beat many"
    figure = Figure(figsize=(style.WIDTH, 3.6), layout="constrained", facecolor=style.PAPER)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=style.INK)
    told = []
    panels = figure.subplots(1, len(again), squeeze=False)[0]
    for axes, (name, by_size) in zip(panels, again.items(), strict=True):
        for place, policy in enumerate(next(iter(by_size.values()))):
            tokens = [found[policy] for found in by_size.values()]
            line, shade = ("o--", "s-.", "^:", "D-")[place], style.PALETTE[(1, 5, 0, 3)[place]]
            thousands = [one / 1000 for one in tokens]
            axes.plot(list(by_size), thousands, line, color=shade, markersize=5, label=policy)
            told.append(f"{name}, {policy}: {', '.join(f'{one:,}' for one in tokens)}")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0)
        axes.set_xticks(
            list(by_size),
            labels=[f"{size:,.3g}" if size < 20 else f"{size:,.0f}" for size in by_size],
        )
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xlabel("copies may take (MiB)")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("tokens computed again (thousands)")
    panels[-1].legend(frameon=False, fontsize=9)
    return style.Picture(figure, f"{title}. Tokens computed again, {'; '.join(told)}.")
