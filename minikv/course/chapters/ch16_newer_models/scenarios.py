"""Chapter 16 as programs: what is dead, what is found, what is kept."""

import random
from collections import Counter
from functools import cache, partial, total_ordering
from types import SimpleNamespace

import torch

import minikv
from minikv.course.chapters.ch16_newer_models.given import with_windows
from minikv.course.chapters.ch16_newer_models.latent import normed, queries, random_weights, turn
from minikv.course.chapters.ch16_newer_models.retention import agent_load, serve
from minikv.course.judge.checking import in_place_of, runs_model, same_as_oracle
from minikv.course.judge.programs import LINES_ABOVE, OperationMode, at_most, under
from minikv.course.judge.scenarios import Group, Log, scenario
from minikv.course.judge.stand_ins import LoggingPool
from minikv.course.pictures.snapshot import counted

PROMPT = "class A:\n    def first(self):\n        return self.items[0]\n\n    def last(self):\n"

# ── 16.1 Behind the window ────────────────────────────────────────────────────

# A program is (position, window, block size), or (tokens, chunk, window, block size).


def first_blocks(mine, program, log: Log) -> None:
    position, window, size = program
    text = f"a query at {position}, window {window}, blocks of {size}"
    log.call(text, mine.first_seen, position, window, size)


def chunks(mine, program, log: Log) -> None:
    tokens, chunk, window, size = program
    text = f"{tokens} tokens in chunks of {chunk}, window {window}, blocks of {size}"
    held = log.call(text, mine.held_in_chunks, tokens, chunk, window, size, see=False)
    if log.events[-1].error is None:
        log("", {"blocks of each step:": list(held)})


scenario(
    "16.1",
    first_blocks,
    Group(
        "one token per block",
        [(position, 3, 1) for position in (2, 3, 4, 9)],
        look="how many tokens does a window of 3 show, the query's own included?",
    ),
    Group(
        "a block stays while one of its tokens is seen",
        [(position, 6, 4) for position in (5, 8, 9, 12, 13, 16, 17)],
        look="the earliest token that the query sees: in which block is it?",
    ),
    Group(
        "near the beginning",
        [(0, 6, 4), (3, 6, 4), (4, 6, 4), (0, 1, 1), (7, 100, 16)],
        look="what does a query see if there are fewer tokens than a window?",
    ),
    Group(
        "windows and blocks of any size",
        [(p, w, s) for w in (1, 2, 7, 16, 64) for s in (1, 3, 16) for p in (w, 2 * w, 40 * w + 5)],
        look="the window is in tokens, and need not be whole blocks",
    ),
)


def random_prefill(seed: int) -> tuple[int, int, int, int]:
    draw = random.Random(seed)
    return draw.randint(1, 90), draw.randint(1, 40), draw.randint(1, 30), draw.choice((1, 3, 4, 16))


scenario(
    "16.1",
    chunks,
    Group(
        "one token per step",
        [(6, 1, 3, 1), (12, 1, 4, 4), (9, 1, 6, 4)],
        look="a decode step: the token that it writes is one of its window",
    ),
    Group(
        "chunks longer than the window",
        [(16, 8, 6, 4), (24, 12, 4, 4), (10, 5, 2, 1), (64, 32, 8, 16)],
        look="which query of the chunk looks back furthest?",
    ),
    Group(
        "chunks shorter than the window",
        [(16, 4, 9, 4), (20, 2, 7, 4), (30, 3, 10, 1)],
        look="what was written before the chunk, and is still seen?",
    ),
    Group(
        "what is left at the end",
        [(5, 8, 6, 4), (17, 8, 6, 4), (13, 4, 5, 3)],
        look="the last chunk may be shorter",
    ),
    Group("any prefill", [random_prefill(seed) for seed in range(40)], look=LINES_ABOVE),
)


# ── 16.2 The longest hit for all layers ───────────────────────────────────────

# A program is (blocks, window, block size): "+" has its windows, "-" does not.


def hits(mine, program, log: Log) -> None:
    blocks, window, size = program
    text = f"blocks {' '.join(blocks) or '(none)'}, window {window}, blocks of {size}"
    log.call(text, mine.longest_valid, [block == "+" for block in blocks], window, size)


def random_hit(seed: int) -> tuple[str, int, int]:
    draw = random.Random(seed)
    blocks = "".join(draw.choice("+++-") for _ in range(draw.randint(1, 14)))
    return blocks, draw.randint(1, 20), draw.choice((1, 2, 3, 4))


scenario(
    "16.2",
    hits,
    Group(
        "everything is there, or nothing",
        [("", 6, 4), ("+", 6, 4), ("++++", 6, 4), ("-", 6, 4), ("----", 6, 4), ("+++", 100, 1)],
        look="which prefix is valid if no block has its windows?",
    ),
    Group(
        "what is behind the window may be missing",
        [("-++", 6, 4), ("+-++", 6, 4), ("---++", 6, 4), ("----+", 4, 4), ("--++++", 4, 1)],
        look="which blocks does the first query after the prefix look at?",
    ),
    Group(
        "a block within the window is missing",
        [("+-+", 6, 4), ("++-+", 6, 4), ("++-", 6, 4), ("++++-", 2, 4), ("+++-", 3, 1)],
        look="try the next shorter prefix, with a window of its own",
    ),
    Group(
        "several are missing",
        [("+--+", 6, 4), ("+-+-+", 6, 4), ("-+-+", 6, 4), ("++-+-+", 10, 4), ("-++-+-", 5, 2)],
        look="the prefix that is left must be valid, too",
    ),
    Group(
        "the edge of the window",
        [("-+", 5, 4), ("-+", 6, 4), ("+-+", 5, 4), ("-++", 3, 1), ("-++", 4, 1), ("-+", 1, 4),
         ("+-", 1, 4), ("--", 1, 1)],
        look="the first query stands behind the last block, and sees itself",
    ),
    Group("any blocks", [random_hit(seed) for seed in range(60)], look=LINES_ABOVE),
)  # fmt: skip


# ── The reader's parts in the engine ──────────────────────────────────────────


@runs_model("16.1", "16.2")
def _(mine, lm: minikv.LanguageModel) -> str:
    """tinypy with windows of 16 in four layers: a prompt in chunks, then two that share a part."""
    windowed = with_windows(lm, 16, 16, 16, 16, None)
    config = minikv.EngineConfig(
        24, 4, max_num_seqs=4, max_batch_tokens=12, min_prefix_tokens=0, attention="torch"
    )
    engine = minikv.Engine(windowed, config)
    prompt_ids = lm.encode(PROMPT)
    rule = minikv.SamplingParams(max_tokens=8, ignore_eos=True)
    with (
        in_place_of("minikv.groups.blocks:first_seen", mine.first_seen),
        in_place_of("minikv.groups.blocks:longest_valid", mine.longest_valid),
    ):
        for prompt in (prompt_ids, [*prompt_ids[:24], 5], [*prompt_ids, 6]):
            engine.add_request(prompt, rule)
            token_ids: list[int] = []
            while engine.has_unfinished:
                token_ids = next((one.token_ids for one in engine.step()), token_ids)
                engine.check()
            same_as_oracle(windowed, prompt, token_ids)
    found = engine.stats().hit_tokens
    return f"Your window ran three requests: 24 tokens, those of the oracle; {found} found."


# ── 16.3 Absorb the up-projection ─────────────────────────────────────────────

# A program is (H, N, R, V, C, tokens), or the same with a block size.


def layer(program):
    """Weights of these sizes, and x (T, E) of so many tokens."""
    *sizes, num_tokens = program[:6]
    weights = random_weights(*sizes, hidden=12, seed=num_tokens)
    x = torch.randn(num_tokens, 12, generator=torch.Generator().manual_seed(num_tokens))
    return weights, x


def entries_of(weights, x):
    """As they should be cached, whatever the reader's `cache_entry` does."""
    latent, key = (x @ weights.down.T).tensor_split([len(weights.norm)], -1)
    return torch.cat([normed(latent, weights.norm), turn(key, torch.arange(len(x)))], -1)


def caching(mine, program, log: Log) -> None:
    weights, x = layer(program)
    *_, rope, _, latent, count = program
    log(f"{counted(count, 'token')}, a latent of {latent}, a rotary key of {rope}")
    positions = 3 * torch.arange(count) + 1
    find = partial(mine.cache_entry, x, positions, weights)
    found = log.call(f"cache_entry at {positions.tolist()}", find, see=False)
    if isinstance(found, torch.Tensor):
        log("", {"shape:": list(found.shape)})
        log("", {"the latent:": found[:, :latent]})
        log("", {"the key:": found[:, latent:]})


def absorbing(mine, program, log: Log) -> None:
    weights, x = layer(program)
    heads, nope, rope, value, latent, count, size = program
    log(f"{counted(heads, 'head')} of {nope} + {rope}, values of {value}, latents of {latent}")
    entries, ids = entries_of(weights, x), [4 * i % 13 for i in range(-(-count // size))]
    blocks = torch.full((13, size, latent + rope), 9.0)  # what no query may see
    for i, entry in enumerate(entries):
        blocks[ids[i // size], i % size] = entry
    q = queries(x, torch.arange(count), weights)[-1]
    find = partial(mine.absorbed_attention, q, blocks, list(ids), count, weights)
    log.call(f"{counted(count, 'token')} in blocks {ids} of {size}", find)


class Products(OperationMode):
    """How many multiplications the products of matrices and vectors take."""

    KINDS = ("mm", "bmm", "mv", "dot")
    total = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op.overloadpacket.__name__ in self.KINDS:
            self.total += out.numel() * args[0].shape[-1]
        return out


def products(mine, program, log: Log) -> None:
    heads, _, rope, _, latent, _, size = program
    totals = []
    for count in (4 * size, 8 * size):
        weights, x = layer((*program[:5], count))
        blocks = entries_of(weights, x).view(-1, size, latent + rope)
        q = queries(x, torch.arange(count), weights)[-1]
        with Products() as counter:
            ids = list(range(len(blocks)))
            log.call("", mine.absorbed_attention, q, blocks, ids, count, weights, see=False)
        if log.events[-1].error is not None:
            return
        totals.append(counter.total)
    each, most = (totals[1] - totals[0]) / (4 * size * heads), 2 * latent + rope
    seen = "at most 2 C + R" if each <= most else f"{each:g}, and 2 C + R is {most}"
    log("8 blocks, and 4", {"multiplications per further token and head:": seen})


scenario(
    "16.3",
    caching,
    Group(
        "the entry of a token",
        [(1, 4, 2, 4, 6, 1), (2, 4, 4, 4, 6, 3), (2, 3, 2, 5, 8, 2), (4, 6, 8, 6, 6, 5)],
        look="which part is normed, which part is turned, and what do all heads share?",
    ),
)
scenario(
    "16.3",
    absorbing,
    Group(
        "one head, one token",
        [(1, 4, 2, 4, 6, 1, 1), (1, 4, 2, 4, 4, 1, 4), (1, 3, 4, 5, 8, 1, 2)],
        look="with one token the weight is 1: what is left is W_UV times its latent",
    ),
    Group(
        "several tokens of one block",
        [(1, 4, 2, 4, 6, 3, 4), (2, 4, 2, 4, 6, 4, 4), (3, 2, 8, 5, 7, 5, 5)],
        look="the scores: both parts of q and of the entry, and the scale",
    ),
    Group(
        "several blocks",
        [(2, 4, 2, 4, 6, 6, 2), (2, 4, 4, 4, 4, 11, 4), (4, 8, 4, 8, 16, 20, 4)],
        look="which blocks hold the context, in which order, and how much of the last?",
    ),
    Group(
        "layers of any size",
        [(1 + i % 4, 2 + i % 5, 2 + 2 * (i % 3), 2 + i % 7, 3 + i, 1 + 3 * i, 1 + i % 4)
         for i in range(16)],
        look=LINES_ABOVE,
    ),
)  # fmt: skip
scenario(
    "16.3",
    products,
    Group(
        "no key and no value is made",
        [(2, 8, 4, 8, 16, 0, 4), (4, 16, 4, 16, 32, 0, 2), (4, 8, 2, 8, 8, 0, 4)],
        look="is `up_key` or `up_value` multiplied with every token, or once with q and the sum?",
    ),
)


# ── 16.4 Retention on a trace ─────────────────────────────────────────────────

# A program is (blocks of the pool, block size, steps). A prompt is a word, a block for each letter:
#     +ab     it is computed           [ab ]ab  a request locks it, unlocks it     !ab  both at once
#     ^ab:9   it is pinned for 9 s     @9       9 seconds pass                     -2   evict(2)


def retaining(mine, program, log: Log) -> None:
    num_blocks, size, steps = program
    clock = SimpleNamespace(now=1000.0)
    pool, names = LoggingPool(num_blocks), {}
    cache = mine.RetainingCache(pool, size, mine.pinned, lambda: clock.now)
    nodes: dict[str, list] = {}
    log(f"a pool of {num_blocks} blocks of {size}")

    def find(word: str):
        return cache.match([ord(one) for one in word for _ in range(size)]).node

    for step in steps.split():
        what, word = step[0], step[1:]
        if what == "+":
            new = [pool.allocate() for _ in word]
            result = cache.insert([ord(one) for one in word for _ in range(size)], new)
            for place, block_id in enumerate(result.block_ids):
                names[block_id] = word[: place + 1]
            for block_id in new:
                pool.release(block_id)
            log(f"{word} is computed")
        elif what == "^":
            word, _, seconds = word.partition(":")
            log.call(f"pin({word}, {seconds})", cache.pin, find(word), int(seconds))
        elif what == "@":
            clock.now += float(word)
            log(f"{word} s pass")
        elif what == "-":
            pool.freed.clear()
            log.call(f"evict({word})", cache.evict, int(word))
            log("", {"it frees, in order:": [names[block_id] for block_id in pool.freed]})
            counts = [cache.num_cached_blocks, cache.num_evictable_blocks]
            log("", {"cached and evictable blocks:": counts})
        else:
            if what in "[!":
                nodes.setdefault(word, []).append(find(word))
                cache.lock(nodes[word][-1])
            if what in "]!":
                cache.unlock(nodes[word].pop())
            log({"[": f"{word} is locked", "]": f"{word} is unlocked"}.get(what, f"{word} is used"))


def random_retention(seed: int) -> tuple[int, int, str]:
    """Of words of two letters, at most 30 prefixes can be cached."""
    draw, steps = random.Random(seed), []
    for _ in range(4 + seed // 3):
        word = "".join(draw.choice("aab") for _ in range(draw.randint(1, 4)))
        steps += [f"+{word}", f"@{draw.choice((0.5, 1, 3))}"]
        if draw.random() < 0.5:
            steps.append(f"^{word}:{draw.choice((1, 5, 20))}")
        if draw.random() < 0.6:
            steps.append(f"-{draw.randint(1, 3)}")
    return 40, draw.choice((1, 2)), " ".join([*steps, "-9", "@30", "-99"])


small = under(16, 1)
scenario(
    "16.4",
    retaining,
    Group(
        "without a pin, by age",
        small("+a @1 +b @1 +c -2 -9", "+a @1 +b !a -1 -9", "+ab @1 +x @1 !ab -1 -9",
              "+a @1 +b @1 !a @1 !b -1"),
        look="`pinned`: what is compared if neither leaf is pinned?",
    ),
    Group(
        "leaves first, each from its end",
        [*small("+abc -1 -1 -9", "+ab +ac -1 -9", "+abc +abd -9 -1", "+ab +ac +ad -9"),
         (16, 3, "+abc +abd -1 -9")],
        look="when can a parent go?",
    ),
    Group(
        "what a pin holds goes last, with all above it",
        small("+a @1 +b ^a:20 -1 -9", "+ab @1 +ac @1 +x ^ab:20 -2 -9", "+abc +x ^abc:20 @1 +y -3",
              "+ab @1 +x ^ab:20 ^x:20 @1 +y @1 +z -2 -9",
              "+ab [ab ^ab:20 ]ab @1 +x -1"),
        look="`pinned`: what is `until` of a leaf without a pin?",
    ),
    Group(
        "a pin ends at its deadline",
        small("+a @1 +b ^a:10 @9 -1 -9", "+a ^a:10 @1 +b @9 -1", "+a ^a:10 @1 +b @12 -1",
              "+a ^a:20 @1 +b ^a:5 @1 +c @5 -2", "+a ^a:9 +b ^b:3 @1 +c @9 -2",
              "+a ^a:10 @1 +b @1 +c -1 @8 -1", "+a ^a:10 @1 +b @1 +c -1 @9 -1"),
        look="`first_leaf`: at the deadline itself, is the pin over?",
    ),
    Group(
        "pins yield if nothing else is left",
        small("+ab ^ab:20 -1 -9", "+a ^a:9 @1 +b ^b:9 -1 -1", "+ab ^ab:9 [ab -9 ]ab -9",
              "+a [a +ab ]a ^ab:9 -1 @1 +x -1 -9"),
        look="a pin is a wish: what is in `order`?",
    ),
    Group(
        "what is locked stays",
        small("+ab +x [ab -9 ]ab -9", "+abc @1 [a -9 ]a -9", "+abc +abd [ab -9 ]ab -1"),
        look="which nodes are in `unlocked`?",
    ),
    Group(
        "a parent takes over what its child had",
        small("+a [a +ab ]a @1 +z @1 !ab ^z:1 -1 @5 -1", "+a [a +ab ]a ^ab:50 -1 @1 +z -1",
              "+a [a +abc ]a ^abc:50 ^a:3 -2 @9 +z -1", "+a [a +ab ]a ^ab:3 ^a:50 -1 @9 +z -1",
              "+ab +ac @1 ^ab:3 ^ac:50 @1 -2 @9 +z -1"),
        look="`first_leaf`: which leaf stands where a child of it stood?",
    ),
    Group(
        "pins hold a share of the pool",
        under(8, 1)("+abcd ^abcd:9 -1", "+abcde ^abcde:9 @1 +x -1", "+abc ^abc:9 +abd ^abd:9 -9",
                    "+abc +x ^abc:9 ^x:9 +y ^y:9 @1 +z -1", "+abc ^abc:9 @9 +xyz ^xyz:9",
                    "+ab [ab +abcd ]ab ^abcd:9 +x ^x:9", "+ab [ab +abcde ]ab ^abcde:9",
                    "+ab ^ab:9 +abcde ^abcde:9 @1 +x -1", "+a ^b:9",
                    "+a @1 ^a:500 @1 +z @1 +y @1 -1 +abcde @1 ^abcde:500 @1 +x @1 -1 -1"),
        look="`pin`: which blocks does it keep, and which pins count?",
    ),
    Group(
        "and for a limited time",
        small("+a ^a:99999 @1 +b @598 -1", "+a ^a:99999 @1 +b @599 -1"),
        look="`pin`: what is LONGEST for?",
    ),
    Group(
        "how many were released",
        small("+ab -0 -1 -9 -1", "+ab -5", "+ab ^ab:9 --1", "+ab [ab -2"),
        look="`first_leaf`: which leaf is left?",
    ),
    Group("60 random programs", [random_retention(seed) for seed in range(60)], look=LINES_ABOVE),
)  # fmt: skip


@total_ordering
class Counted:
    """An age that counts how often it is compared."""

    def __init__(self, age, work: Counter):
        self.age, self.work = age, work

    def __lt__(self, other) -> bool:
        self.work["compared"] += 1
        return self.age < other.age

    def __eq__(self, other) -> bool:
        self.work["compared"] += 1
        return self.age == other.age


class CountedNodes(dict):
    """`unlocked`, which counts the nodes that somebody goes through."""

    def __init__(self, nodes, work: Counter):
        super().__init__(nodes)
        self.work = work

    def __iter__(self):
        for node in super().__iter__():
            self.work["looked at"] += 1
            yield node


def among_many(mine, program, log: Log) -> None:
    """What it takes to find a leaf: nodes, entries and ages that are looked at."""
    num_leaves, seconds = program
    clock = SimpleNamespace(now=1000.0)
    work: Counter[str] = Counter()

    def policy(cache, leaf):
        work["looked at"] += 1
        rank = mine.pinned(cache, leaf)
        return rank._replace(age=Counted(rank.age, work))

    pool = LoggingPool(num_leaves)
    cache = mine.RetainingCache(pool, 1, policy, lambda: clock.now)
    for token in range(num_leaves):
        new = [pool.allocate()]
        node = cache.insert([token], new).node
        pool.release(new[0])
        if seconds and token % 3 == 0:
            cache.pin(node, seconds)
    cache.unlocked = CountedNodes(cache.unlocked, work)
    pins = f", every third one pinned for {seconds} s" if seconds else ""
    log(f"{num_leaves:,} leaves{pins}")
    for _ in range(3):
        work.clear()
        log.call("evict(1)", cache.evict, 1)
        seen = work.total()
        log("", {"nodes, entries and ages that are looked at:": at_most(num_leaves // 3, seen)})


scenario(
    "16.4",
    among_many,
    Group(
        "among a thousand leaves, without looking at each",
        [(1000, 0), (1000, 60)],
        look="`first_leaf`: which leaf does `order` name first, and what may be wrong with it?",
    ),
)


@cache
def short_load(seed: int) -> list:
    return agent_load(seed, agents=3, singles_per_s=0.3, chats_per_s=0.02)


def on_a_trace(mine, program, log: Log) -> None:
    """Tokens that are computed again, in the simulator."""
    seed, num_blocks, seconds = program
    load = [turn._replace(retain_s=turn.retain_s and seconds) for turn in short_load(seed)]

    def make(pool, clock):
        return mine.RetainingCache(pool, 1, mine.pinned, clock)

    log(f"trace {seed}, {len(load)} requests, {num_blocks} blocks, pins of {seconds} s")
    log("", {"tokens that are computed again:": serve(load, num_blocks, make)[0]})


scenario(
    "16.4",
    on_a_trace,
    Group(
        "a trace of agents, chats and single requests",
        [(1, 512, 600), (2, 768, 600), (3, 512, 10)],
        look=LINES_ABOVE,
    ),
)


@runs_model("16.4")
def _(mine, lm: minikv.LanguageModel) -> str:
    """An agent whose tool runs while others use the pool."""
    engine = minikv.Engine(
        lm, minikv.EngineConfig(num_blocks=24, attention="torch"),
        prefix_cache=lambda pool, size: mine.RetainingCache(pool, size, mine.pinned),
    )  # fmt: skip
    text = lm.encode("def area(width, height):\n    return width * height\n\n\n" * 2)
    prompt = text[:80]
    for visit in range(3):
        before = engine.stats().hit_tokens
        params = minikv.SamplingParams(max_tokens=8, ignore_eos=True, retain_s=60)
        [output] = engine.generate([prompt], params)
        same_as_oracle(lm, prompt, output.token_ids)
        found = engine.stats().hit_tokens - before
        for other in range(3):
            engine.generate([[5 + visit, 7 + other] * 60], minikv.SamplingParams(max_tokens=4))
        engine.check()
        last, prompt = prompt, prompt + output.token_ids + text[:4]
    return f"an agent's third turn found {found} of {len(last)} tokens while others filled the pool"
