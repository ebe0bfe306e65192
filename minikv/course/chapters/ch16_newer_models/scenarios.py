"""Chapter 16 as programs: what is dead, what is found, what is multiplied."""

import random
from functools import partial

import torch

import minikv
from minikv.course.chapters.ch16_newer_models.choosing import SIZE
from minikv.course.chapters.ch16_newer_models.given import with_windows
from minikv.course.chapters.ch16_newer_models.latent import normed, queries, random_weights, turn
from minikv.course.judge.checking import in_place_of, runs_model, same_as_oracle
from minikv.course.judge.programs import OperationMode
from minikv.course.judge.scenarios import Group, Log, scenario
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


scenario("16.1", first_blocks,
    Group("one token per block", [(position, 3, 1) for position in (2, 3, 4, 9)],
          "how many tokens does a window of 3 show, the query's own included?"),
    Group("a block stays while one of its tokens is seen",
          [(position, 6, 4) for position in (5, 8, 9, 12, 13, 16, 17)],
          "the earliest token that the query sees: in which block is it?"),
    Group("near the beginning", [(0, 6, 4), (3, 6, 4), (4, 6, 4), (0, 1, 1), (7, 100, 16)],
          "what does a query see if there are fewer tokens than a window?"),
    Group("windows and blocks of any size",
          [(p, w, s) for w in (1, 2, 7, 16, 64) for s in (1, 3, 16)
          for p in (w, 2 * w, 40 * w + 5)],
          "the window is in tokens, and need not be whole blocks"),
)  # fmt: skip


def random_prefill(seed: int) -> tuple[int, int, int, int]:
    draw = random.Random(seed)
    return draw.randint(1, 90), draw.randint(1, 40), draw.randint(1, 30), draw.choice((1, 3, 4, 16))


scenario("16.1", chunks,
    Group("one token per step", [(6, 1, 3, 1), (12, 1, 4, 4), (9, 1, 6, 4)],
          "a decode step: the token that it writes is one of its window"),
    Group("chunks longer than the window", [(16, 8, 6, 4), (24, 12, 4, 4), (10, 5, 2, 1),
          (64, 32, 8, 16)], "which query of the chunk looks back furthest?"),
    Group("chunks shorter than the window", [(16, 4, 9, 4), (20, 2, 7, 4), (30, 3, 10, 1)],
          "what was written before the chunk, and is still seen?"),
    Group("what is left at the end", [(5, 8, 6, 4), (17, 8, 6, 4), (13, 4, 5, 3)],
          "the last chunk may be shorter"),
    Group("any prefill", [random_prefill(seed) for seed in range(40)],
          "which blocks does the first query of this chunk see, and which the last?"),
)  # fmt: skip


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


scenario("16.2", hits,
    Group("everything is there, or nothing",
          [("", 6, 4), ("+", 6, 4), ("++++", 6, 4), ("-", 6, 4), ("----", 6, 4), ("+++", 100, 1)],
          "which prefix is valid if no block has its windows?"),
    Group("what is behind the window may be missing",
          [("-++", 6, 4), ("+-++", 6, 4), ("---++", 6, 4), ("----+", 4, 4), ("--++++", 4, 1)],
          "which blocks does the first query after the prefix look at?"),
    Group("a block within the window is missing",
          [("+-+", 6, 4), ("++-+", 6, 4), ("++-", 6, 4), ("++++-", 2, 4), ("+++-", 3, 1)],
          "try the next shorter prefix, with a window of its own"),
    Group("several are missing", [("+--+", 6, 4), ("+-+-+", 6, 4), ("-+-+", 6, 4),
          ("++-+-+", 10, 4), ("-++-+-", 5, 2)], "the prefix that is left must be valid, too"),
    Group("the edge of the window", [("-+", 5, 4), ("-+", 6, 4), ("+-+", 5, 4), ("-++", 3, 1),
          ("-++", 4, 1), ("-+", 1, 4), ("+-", 1, 4), ("--", 1, 1)],
          "the first query stands behind the last block, and sees itself"),
    Group("any blocks", [random_hit(seed) for seed in range(60)],
          "which prefix is whole in each group, and which is the longest in all?"),
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


scenario("16.3", caching,
    Group("the entry of a token", [(1, 4, 2, 4, 6, 1), (2, 4, 4, 4, 6, 3), (2, 3, 2, 5, 8, 2),
          (4, 6, 8, 6, 6, 5)],
          "which part is normed, which part is turned, and what do all heads share?"),
)  # fmt: skip
scenario("16.3", absorbing,
    Group("one head, one token", [(1, 4, 2, 4, 6, 1, 1), (1, 4, 2, 4, 4, 1, 4),
          (1, 3, 4, 5, 8, 1, 2)],
          "with one token the weight is 1: what is left is W_UV times its latent"),
    Group("several tokens of one block", [(1, 4, 2, 4, 6, 3, 4), (2, 4, 2, 4, 6, 4, 4),
          (3, 2, 8, 5, 7, 5, 5)], "the scores: both parts of q and of the entry, and the scale"),
    Group("several blocks", [(2, 4, 2, 4, 6, 6, 2), (2, 4, 4, 4, 4, 11, 4),
          (4, 8, 4, 8, 16, 20, 4)],
          "which blocks hold the context, in which order, and how much of the last?"),
    Group("layers of any size", [(1 + i % 4, 2 + i % 5, 2 + 2 * (i % 3), 2 + i % 7, 3 + i,
          1 + 3 * i, 1 + i % 4) for i in range(16)],
          "which sizes are equal in the lines above, and are not here?"),
)  # fmt: skip
scenario("16.3", products,
    Group("no key and no value is made", [(2, 8, 4, 8, 16, 0, 4), (4, 16, 4, 16, 32, 0, 2),
          (4, 8, 2, 8, 8, 0, 4)],
          "is `up_key` or `up_value` multiplied with every token, or once with q and the sum?"),
)  # fmt: skip


# ── 16.4 Which blocks a query reads ─────────────────────────────────────────────

# A program is (tokens, blocks to choose, wishes). A wish is (KV head, query head of its group,
# place of a block, score): in a channel of its own the query head has 1, or -1 for a score below 0,
# and one key of that block has the score. Everything else is 0.


def choosing(mine, program, log: Log) -> None:
    tokens, most, wishes = program
    kv_heads, group = (1 + max(wish[place] for wish in wishes) for place in (0, 1))
    q, k = torch.zeros(kv_heads, group, len(wishes)), torch.zeros(tokens, kv_heads, len(wishes))
    for channel, (head, own, place, size) in enumerate(wishes):
        sign = 1.0 if size > 0 else -1.0
        q[head, own, channel] = sign
        k[place * SIZE + channel % SIZE, head, channel] = float(size)
    log(f"{tokens} tokens in blocks of {SIZE}, {counted(kv_heads, 'KV head')}")
    for head, own, place, size in wishes:
        log(f"query head {own} of KV head {head} scores {abs(size)} in block {place}")
    log.call(f"by_bounds(q, k, {most})", mine.by_bounds, q, k, most)


def far_below(mine, program, log: Log) -> None:
    """A query whose product with one block is far below zero, and with another a little above."""
    tokens, most, low, high = program
    q, k = torch.ones(1, 1, 2), torch.full((tokens, 1, 2), 0.1)
    k[low * SIZE : (low + 1) * SIZE, 0, 0] = -9.0
    k[high * SIZE, 0, 1] = 1.0
    log(f"{tokens} tokens, 1 head; its scores are far below 0 in block {low}, highest in {high}")
    log.call(f"by_bounds(q, k, {most})", mine.by_bounds, q, k, most)


def random_choice(seed: int) -> tuple:
    draw = random.Random(seed)
    kv_heads, group, blocks = draw.randint(1, 4), draw.randint(1, 3), draw.randint(2, 7)
    sizes = draw.sample(range(1, 60), 12)
    wishes = [(h, own, draw.randrange(blocks), draw.choice((-1, 1)) * sizes[h * group + own])
              for h in range(kv_heads) for own in range(group)]  # fmt: skip
    return blocks * SIZE + draw.randint(1, SIZE), 1, wishes


scenario("16.4", choosing,
    Group("one head", [(50, 1, [(0, 0, 1, 5)]), (50, 1, [(0, 0, 2, -5)]),
          (50, 2, [(0, 0, 2, 7), (0, 0, 0, -5)]), (66, 2, [(0, 0, 3, 9), (0, 0, 1, 4)])],
          "the larger of two products in each channel: is the sign looked at?"),
    Group("the heads of a group", [(50, 1, [(0, 0, 1, 5), (0, 1, 2, 7)]),
          (50, 1, [(0, 0, 1, 7), (0, 1, 2, 5)]),
          (66, 1, [(0, 0, 1, 5), (0, 1, 1, 5), (0, 2, 3, 8)]),
          (66, 2, [(0, 0, 3, 7), (0, 1, 0, 5)])], "the highest bound of the group counts"),
    Group("several KV heads", [(50, 1, [(0, 0, 0, 5), (1, 0, 2, 7)]),
          (50, 1, [(0, 0, 2, 7), (1, 0, 0, 5)]),
          (66, 1, [(0, 0, 1, 5), (1, 0, 3, -9), (2, 0, 0, 2)])],
          "whose keys does a group of query heads read?"),
    Group("the newest token's own block, and short texts",
          [(48, 9, [(0, 0, 2, 5), (1, 0, 0, 2)]), (32, 1, [(0, 0, 1, 5), (0, 0, 0, 2)]),
          (33, 9, [(0, 0, 1, 5)]), (16, 2, [(0, 0, 0, 5)]), (17, 2, [(0, 0, 0, 5)])],
          "how many whole blocks are before the newest token's own?"),
)  # fmt: skip
scenario("16.4", far_below,
    Group("scores below zero", [(66, 1, 1, 2), (50, 1, 0, 1)], "is a score of -9 a high one?"),
)  # fmt: skip
scenario("16.4", choosing,
    Group("any heads", [random_choice(seed) for seed in range(40)],
          "for which head was the block chosen that differs, and who else reads it?"),
)  # fmt: skip
