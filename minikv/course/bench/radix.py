"""The prefix cache: what match, insert and evict cost, how that grows, and what it costs
to have it switched on when nothing is ever found.

The trees are made of combs, the hard case: prompts of 62 blocks, each block a node of its
own because another prompt branches off there. Small and large trees are probed in turns.
`hot` matches few prompts again and again, so time is what the algorithm does; `cold`
matches prompts from all over, so in a large tree it waits for memory too.
"""

import argparse
import gc
import random
import tracemalloc
from functools import partial
from statistics import median
from time import perf_counter

import minikv
from minikv.course.arguments import positive
from minikv.course.bench import peers
from minikv.course.bench.harness import Aim, BenchTable, Spread, bar, over
from minikv.course.workloads.timing import no_gc, timed

BLOCK = 16  # tokens
DEPTH = 62  # blocks of a prompt, 992 tokens
COMB = 2 * DEPTH  # nodes of a comb: a prompt, and a branch of one block at each
ROUNDS = 5  # in a repeat of the on-off comparison
PROBES = 8  # prompts matched in a repeat; half as many combs are evicted and inserted

PROBED = {  # what: (unit, goal in µs, whether its growth has a goal)
    "match, hot": ("1,000 tokens", 50, True),
    "match, cold": ("1,000 tokens", None, False),
    "evict": ("block", 5, True),
    "insert": ("1,000 tokens", None, False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes", type=positive, nargs="+", default=(1_000, 10_000, 100_000, 1_000_000),
        help="sizes of the trees; the largest needs 2 GB a million (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--requests", type=positive, default=16, help="of the on-off comparison")
    parser.add_argument("--tokens", type=positive, default=64, help="prompt and output of each")


def run(args: argparse.Namespace) -> BenchTable:
    table = BenchTable("radix: the prefix cache", args.repeats)
    add_probes(table, args)
    table.add({"what": "memory", "figure": bytes_per_node(), "unit": "bytes a node of one block"})
    row = {"what": "switched on, no hits", "figure": switched_on(args), "unit": "% more time"}
    table.add(row, Aim("figure", "<=", 1))
    table.notes.append(
        f"switched on: {args.requests} requests of {args.tokens} + {args.tokens} tokens through "
        "tinypy, two engines in turns step by step, their pools full of old requests' blocks; "
        f"each step the median of {ROUNDS} rounds"
    )
    return table


def add_probes(table: BenchTable, args: argparse.Namespace) -> None:
    sizes = sorted(args.nodes)
    with bar(sum(sizes) // COMB, "radix: growing trees") as progress:
        trees = [Tree(nodes, progress) for nodes in sizes]
    # Matching makes prompts recent, evicting takes the others: one phase after the other.
    for probe in (Tree.match, Tree.evict_and_insert):
        for _ in range(args.repeats + 1):
            for tree in trees:
                probe(tree)
    first, last = trees[0], trees[-1]
    for what, (unit, bound, judged) in PROBED.items():
        for tree in trees:
            figure = Spread(tree.times[what][1:])
            row = {"what": what, "nodes": tree.num_nodes, "figure": figure, "unit": f"µs a {unit}"}
            table.add(row, Aim("figure", "<=", bound) if bound else None)
        growth = over(last.times[what][1:], first.times[what][1:])
        unit = f"times that of {first.num_nodes:,}"
        row = {"what": "  growth", "nodes": last.num_nodes, "figure": growth, "unit": unit}
        table.add(row, Aim("figure", "<=", 1.3) if judged else None)


class Tree:
    """A radix cache of about `num_nodes` nodes of one block, and what it took, in µs."""

    def __init__(self, num_nodes: int, progress=None):
        self.draw = random.Random(num_nodes)
        combs = max(PROBES, round(num_nodes / COMB))
        self.num_nodes = combs * COMB
        self.pool = minikv.BlockPool(self.num_nodes + DEPTH)
        self.cache = minikv.RadixCache(self.pool, BLOCK)
        self.prompts = []
        for _ in range(combs):
            self.prompts.append(self.new_tokens(DEPTH))
            self.insert(self.prompts[-1])
            self.add_branches(self.prompts[-1])
            if progress is not None:
                progress.update()
        self.times: dict[str, list[float]] = {what: [] for what in PROBED}

    def new_tokens(self, num_blocks: int) -> list[int]:
        return self.draw.choices(range(1000, 5000), k=num_blocks * BLOCK)

    def insert(self, token_ids: list[int]) -> float:
        """As an engine does: blocks for all, and those that the tree has already go back."""
        block_ids = [self.pool.allocate() for _ in range(len(token_ids) // BLOCK)]
        seconds, _ = timed(lambda: self.cache.insert(token_ids, block_ids))
        for block_id in block_ids:
            self.pool.release(block_id)
        return seconds

    def add_branches(self, prompt: list[int]) -> None:
        for at in range(0, len(prompt), BLOCK):
            self.insert(prompt[:at] + self.new_tokens(1))

    def match(self) -> None:
        cold = self.draw.sample(self.prompts, PROBES)
        self.match_all(self.prompts[-PROBES:])  # what is hot was there a moment ago
        for what, prompts in (("match, hot", self.prompts[-PROBES:]), ("match, cold", cold)):
            seconds, _ = timed(partial(self.match_all, prompts))
            self.times[what].append(1e6 * seconds / (PROBES * DEPTH * BLOCK / 1000))

    def match_all(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            self.cache.match(prompt)

    def evict_and_insert(self) -> None:
        """The same number of nodes before and after, each of one block."""
        combs = PROBES // 2
        seconds, freed = timed(lambda: self.cache.evict(combs * COMB))
        self.times["evict"].append(1e6 * seconds / freed)
        prompts = [self.new_tokens(DEPTH) for _ in range(combs)]
        seconds = sum(self.insert(prompt) for prompt in prompts)
        self.times["insert"].append(1e6 * seconds / (combs * DEPTH * BLOCK / 1000))
        for prompt in prompts:
            self.add_branches(prompt)


def bytes_per_node() -> int:
    """All that a tree allocates: nodes, keys, the tokens' ints, the list of unlocked nodes."""
    tracemalloc.start()
    try:
        tree = Tree(10 * COMB)
        tree.prompts.clear()
        gc.collect()
        return round(tracemalloc.get_traced_memory()[0] / tree.num_nodes)
    finally:
        tracemalloc.stop()


def switched_on(args: argparse.Namespace) -> Spread:
    """How much longer, in %, the same steps take with the prefix cache than without."""
    lm = minikv.load("tinypy")
    num_blocks = args.requests * (-(-2 * args.tokens // BLOCK) + 1)
    off, on = (
        minikv.Engine(
            lm,
            minikv.EngineConfig(
                num_blocks=num_blocks,
                block_size=BLOCK,
                max_num_seqs=args.requests,
                max_batch_tokens=args.requests * args.tokens,
                prefix_cache=prefix_cache,
            ),
        )
        for prefix_cache in (False, True)
    )
    params = minikv.SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    percent = []
    for repeat in range(args.repeats + 1):
        # Seconds of each step in each round: the medians over rounds leave out what hit one
        # step alone, and keep what a step does in every round, such as sharing its blocks.
        seconds: dict[minikv.Engine, list[list[float]]] = {off: [], on: []}
        for round_ in range(ROUNDS):
            seed = repeat * ROUNDS + round_
            for prompt in peers.random_prompts(lm, [args.tokens] * args.requests, seed):
                off.add_request(prompt, params)
                on.add_request(prompt, params)
            for times in seconds.values():
                times.append([])
            with no_gc():
                while off.has_unfinished:
                    for engine in (off, on) if (off.stats().steps + round_) % 2 else (on, off):
                        started = perf_counter()
                        engine.step()
                        seconds[engine][round_].append(perf_counter() - started)
        cost_off, cost_on = (
            sum(median(steps) for steps in zip(*times, strict=True)) for times in seconds.values()
        )
        percent.append(100 * (cost_on / cost_off - 1))
    if on.stats().hit_tokens or on.stats().steps != off.stats().steps:
        raise RuntimeError("switched on: the workload was to have no hits, and equally many steps")
    return Spread(percent[1:])
