"""Chapter 02 as programs: two caches in chunks, the loop around them, a chunk and a request after
a prefix."""

import copy
import dataclasses
import random
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise, product
from typing import NamedTuple, cast

import torch

from minikv.course.judge.checking import plain, runs_model, same_as_oracle, tinypy, witness
from minikv.course.judge.scenarios import Group, Log, scenario
from minikv.course.pictures.snapshot import counted
from minikv.kv_cache import ConcatCache, PreallocatedCache
from minikv.language_model import Cache, LanguageModel
from minikv.model import Transformer

PROMPT = "def fib(n):\n    if n"
LINE_ENDS = "\n" * 6  # tinypy goes on with more of them
MAIN = "if __name__ == '__main__':"  # the fifth token after it is the end token
PREFIX = '"""Numbers in the order of their size."""\n\n\ndef '
REQUESTS = ("fib(n):\n    if n", "is_even(n):\n    return n", "area(width, height):\n    return")


# ── The models ────────────────────────────────────────────────────────────────

TINYPY, TWO_LAYERS = "tinypy", "the first two layers of tinypy"


class Watched:
    """A model's transformer, noting what goes through it."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.passes: list[tuple[list[int], list[int]]] = []  # token ids, positions

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def forward(self, token_ids, positions, attend):
        given = (torch.as_tensor(x).flatten().tolist() for x in (token_ids, positions))
        self.passes.append(tuple(given))
        return self.inner.forward(token_ids, positions, attend)


def watched(name: str) -> tuple[LanguageModel, Watched]:
    """tinypy; or two of its layers, one with a window: not much of a model, but quick."""
    transformer = Watched(tinypy().transformer)
    if name == TWO_LAYERS:
        two = transformer.inner = copy.copy(tinypy().transformer)
        two.layers = two.layers[:2]
        two.config = dataclasses.replace(two.config, num_layers=2, windows=(4, None))
    lm = LanguageModel(name, cast(Transformer, transformer), tinypy().tokenizer)
    return lm, transformer


def refusal(call: Callable, *arguments) -> str:
    """What a call raises that must raise a ValueError."""
    try:
        call(*arguments)
    except ValueError:
        return "ValueError"
    except Exception as error:
        return type(error).__name__
    return "nothing"


# ── 02.1 Append by concatenation, 02.3 Write in place ─────────────────────────

# A program is (shape, capacity or None, steps, what is looked at). Steps, cache by letter:
#     A+4     4 tokens, layer by layer         A+4@1   4 tokens, layer 1 alone
#     A+4-    all layers but the last          A<3     num_tokens is set back to 3


class Shape(NamedTuple):
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    windows: tuple[int | None, ...] = (None, None, None)  # of the layers
    dtype: torch.dtype = torch.float32


PLAIN = Shape()
ONES = Shape(1, 1, 1, (None,))  # one layer, head and number: squeeze() has much to take


class Fed:
    """A cache, and what it was given: every row of keys and values has a name, such as "k3"."""

    def __init__(self, mine, shape: Shape, capacity: int | None, seed: int):
        self.shape, self.capacity, self.length = shape, capacity, 0
        config = dataclasses.replace(
            tinypy().config, num_layers=len(shape.windows), num_heads=shape.heads,
            num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, windows=shape.windows,
        )  # fmt: skip
        if capacity is None:
            self.cache = mine.ConcatCache(config)
        else:
            self.cache = mine.PreallocatedCache(config, capacity, shape.dtype)
            self.cache.kv.fill_(torch.nan)  # so that reading an unwritten slot shows
            self.storage = self.cache.kv
        self.draw = torch.Generator().manual_seed(seed)
        self.names: dict[tuple, tuple[int, str]] = {}

    def rows(self, count: int, heads: int, letter: str = "") -> torch.Tensor:
        """q, k or v of the next tokens: (layers, T, heads, D)."""
        size = len(self.shape.windows), count, heads, self.shape.head_dim
        made = torch.randn(size, generator=self.draw).to(self.shape.dtype)
        for layer, some in enumerate(made.flatten(2).tolist() if letter else []):
            for place, row in enumerate(some, start=self.length):
                self.names[tuple(row)] = layer, f"{letter}{place}"
        return made if letter else 2 * made

    def held(self) -> dict[str, str]:
        """What is kept as keys and values in each layer, slot by slot."""
        found, one = {}, self.cache
        for index, letter in enumerate("kv"):
            for layer in range(len(self.shape.windows)):
                kept = one.kv[layer, index] if self.capacity else (one.k, one.v)[index][layer]
                found[f"{letter} of layer {layer}:"] = self.told(layer, kept)
        return found

    def told(self, layer: int, kept) -> str:
        if not isinstance(kept, torch.Tensor):
            return "nothing" if kept is None else f"a {type(kept).__name__}"
        if kept.shape[1:] != (self.shape.kv_heads, self.shape.head_dim):
            return f"a tensor of shape {tuple(kept.shape)}"
        empty, names = (layer, "·"), []  # nothing was written there
        for row in kept.flatten(1).tolist():
            of, name = self.names.get(tuple(row), empty if row[0] != row[0] else (layer, "?"))
            names.append(name if of == layer else f"{name} of layer {of}")
        return " ".join(names)

    def place(self) -> str:
        kv = self.cache.kv
        if not isinstance(kv, torch.Tensor) or kv.shape != self.storage.shape:
            return f"of shape {tuple(getattr(kv, 'shape', ()))}"
        return "where it was" if kv.data_ptr() == self.storage.data_ptr() else "somewhere else"


def caches(mine, program, log: Log) -> None:
    shape, capacity, steps, looks = program
    layers, live = len(shape.windows), {}
    facts = [] if capacity is None else [f"room for {capacity}"]
    facts += [] if layers == 3 else [counted(layers, "layer")]
    facts += [f"windows {shape.windows}"] if any(shape.windows) else []
    facts += [] if shape[:3] == PLAIN[:3] else ["{} heads on {} of {} numbers".format(*shape)]
    log(", ".join(facts))
    for step in steps.split():
        name, action, rest = step[0], step[1], step[2:]
        if name not in live:
            live[name] = Fed(mine, shape, capacity, ord(name))
        one = live[name]
        if action == "<":
            one.length = one.cache.num_tokens = int(rest)
            log(f"num_tokens is reset to {rest}")
            continue
        count, _, only = rest.rstrip("-").partition("@")
        called = [int(only)] if only else list(range(layers - rest.endswith("-")))
        whole, start, end = len(called) == layers, one.length, one.length + int(count)
        moves: list[int] = []
        text = f"{counted(int(count), 'token')} after {start}"
        text += f" in cache {name}" if "B" in steps else ""
        text += f", in layer {only} alone" if only else "" if whole else ", all layers but the last"

        def attend(q, k, v, called=called, one=one.cache, moves=moves):
            found = {}
            for i in called:
                found[f"attention of layer {i},"] = one.attend(i, q[i], k[i], v[i])
                moves.append(one.num_tokens)
            return found

        q = one.rows(int(count), shape.heads)
        k, v = (one.rows(int(count), shape.kv_heads, letter) for letter in "kv")
        if capacity is None or end <= capacity:
            found = log.call(text, attend, q, k, v, see=False)
            one.length = end if whole else start
            if "attention" in looks and found is not None:
                log("", found)
            if "count" in looks and whole and capacity is not None:
                log("", {"num_tokens after each layer": moves})
        else:
            log(text, {"it raises": refusal(attend, q, k, v)})
        if capacity is not None:
            k.fill_(1e4)  # the cache must not refer to the tensors it was given
            v.fill_(1e4)
        if "count" in looks:
            log("", {"num_tokens": one.cache.num_tokens})
        if "memory" in looks:
            log("", one.held())
        if "place" in looks:
            log("", {"the storage is": one.place()})


def fed(*steps: str, looks: str = "attention", shape: Shape = PLAIN, room: int | None = None):
    """A program for each text of steps."""
    return [(shape, room, text, looks) for text in steps]


def random_caches(seed: int, in_place: bool) -> tuple:
    """One to three caches in turns, of any shape; one in place is set back now and then."""
    draw = random.Random(seed)
    kv_heads, layers = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 5])
    heads, dim = kv_heads * draw.choice([1, 2, 3]), draw.choice([2, 4, 16, 24])
    windows = tuple(draw.choice([None, None, 1, 3, 5]) for _ in range(layers))
    steps, room = [], draw.choice([9, 14, 20])
    for _ in range(3 + seed // 7):
        name = draw.choice("ABC"[: 1 + seed // 12])
        steps.append(f"{name}+{draw.choice([1, 1, 2, 3, 7])}")
        if in_place and layers > 1 and draw.random() < 0.2:
            steps[-1] += draw.choice(["-", f"@{layers - 1}"])
        if in_place and draw.random() < 0.1:
            steps.append(f"{name}<{draw.choice([0, 1])}")
    shape = Shape(heads, kv_heads, dim, windows)
    return shape, room if in_place else None, " ".join(steps), "attention memory count"


def tinypy_in_chunks(mine, program, log: Log) -> None:
    """tinypy's logits at every position, tokens coming in chunks."""
    in_place, chunks = program
    lm = tinypy()
    token_ids = lm.encode(PROMPT + " == 0:\n        return")
    one = mine.PreallocatedCache(lm.config, 20) if in_place else mine.ConcatCache(lm.config)
    if in_place:
        one.kv.fill_(torch.nan)
    for start, end in pairwise(accumulate(chunks, initial=0)):
        text = f"{counted(end - start, 'token')} after {start}"
        found = log.call(text, lm.logits, token_ids[start:end], one, see=False)
        log("", {"logits of tinypy,": found, "num_tokens": one.num_tokens})


def attending(look: str, room: int | None) -> list[Group]:
    """What attention every cache has to give, with slots to spare where they are reserved."""
    shapes = [Shape(windows=windows) for windows in ((4, None, 2), (None, 3, 1), (2, 2, 5))]
    one_by_one = "A+1 A+1 A+1", "A+2 A+1 A+1 A+1 A+1"
    chunks = "A+4 A+3", "A+1 A+2 A+5", "A+7 A+1 A+3", "A+2 A+2 A+2 A+2"
    windows = [
        (shape, room, steps, "attention")
        for shape, steps in product(shapes, ("A+5 A+3 A+1", "A+1 A+1 A+4 A+3"))
    ]
    return [
        Group("tokens that come one by one see all tokens before them",
              fed(*one_by_one, room=room), look),
        Group("chunks of several tokens after a prefix",
              fed(*chunks, room=room) + fed(*chunks[1:3], room=room, shape=ONES), look),
        Group("each layer has its own sliding window", windows,
              "which window does this layer have, and which argument takes it?"),
    ]  # fmt: skip


PASS = "tinypy: logits with the cache equal logits without, at every position"
APPENDING = "over which k and v do you attend, and what do you keep for the next call?"
KEPT = "what is assigned to `self.k[layer]` and `self.v[layer]`?"
SLOTS = "which slots do you write, and over which do you attend?"
ABOVE = "the first call that differs: what did the one before it leave in the cache?"

scenario("02.1", caches,
    Group("the first tokens attend to each other", fed("A+1", "A+2", "A+6"), APPENDING),
    Group("keys and values of every layer are kept",
          fed("A+3 A+3", "A+1 A+1 A+1", "A+4 A+1 A+2", looks="memory"), KEPT),
    *attending(APPENDING, None),
    Group("num_tokens counts every token once",
          fed("A+1 A+1", "A+4 A+1 A+2", "A+3 A+3 A+3", looks="count"), KEPT),
    Group("40 random ones: several caches, other layers and heads",
          [random_caches(seed, in_place=False) for seed in range(40)], ABOVE),
)  # fmt: skip

scenario("02.3", caches,
    Group("num_tokens changes with the last layer, and with no other",
          [*fed("A+4 A+1", "A+1 A+2 A+1", looks="count", room=40),
          *((Shape(windows=(None,) * layers), 40, "A+2 A+1", "count") for layers in (1, 5))],
          "under which condition does `num_tokens` change?"),
    Group("keys and values are in their slots, and nowhere else",
          [*fed("A+4 A+1 A+1", "A+1 A+2", looks="memory", room=9),
          *fed("A+3 A+2", looks="memory", room=6, shape=Shape(dtype=torch.bfloat16))],
          "the slots of this chunk: from num_tokens up to num_tokens + T"),
    *attending(SLOTS, 16),
    Group("the storage stays where it is", fed("A+3 A+1", "A+8", "A+2 A+2 A+2 A+2", looks="place",
          room=8), "what is assigned to `self.kv`? A slice of it, or all of it?"),
    Group("what does not fit is refused, and nothing has changed",
          fed("A+4 A+3@0", "A+4 A+3@1", "A+4 A+3@2", "A+4 A+3", "A+4 A+5", "A+7", "A+7@2",
          "A+6 A+1", "A+6 A+1@1", looks="memory count", room=6),
          "what do you change before you know whether the tokens fit?"),
    Group("filled to the last slot, even after a refusal",
          fed("A+6", "A+4 A+2", "A+4 A+12 A+2", "A+4 A+3@2 A+2", "A+7 A+6 A+1", room=6), SLOTS),
    Group("a pass that fails halfway, and num_tokens reset",
          fed("A+4 A+2- A+2", "A+4 A+3- A+1 A+1", "A+5 A<2 A+1 A+2", "A+8 A<0 A+3", room=8),
          "which slots count, no matter what was written to them?"),
    Group("40 random ones: several caches, other layers and heads",
          [random_caches(seed, in_place=True) for seed in range(40)], ABOVE),
)  # fmt: skip

for exercise, in_place in (("02.1", False), ("02.3", True)):
    programs = [(in_place, chunks) for chunks in ((10, 1, 1, 1), (4, 7, 1, 3))]
    look = "the first position named here: which keys does it need?"
    scenario(exercise, tinypy_in_chunks, Group(PASS, programs, look))


# ── 02.2 Prefill once, then one token per step ────────────────────────────────

# A program is (model, cache, tokens cached at first, calls, what is looked at). A call is (text,
# where in its tokens the prompt begins and how long it is, new tokens).


class Bare:
    """A cache that has num_tokens and attend, and nothing else."""

    def __init__(self, config):
        self._inner = ConcatCache(config)
        self.attend = self._inner.attend

    num_tokens = property(lambda self: self._inner.num_tokens)


def loops(mine, program, log: Log) -> None:
    name, kind, cached, calls, looks = program
    lm, transformer = watched(name)
    if kind == "in place":
        needed = cached + sum(length + count - 1 for _, _, length, count in calls)
        one: Cache = PreallocatedCache(lm.config, needed)
        log(f"a PreallocatedCache, room for {needed}")
    else:
        one = Bare(lm.config) if kind == "bare" else ConcatCache(lm.config)
        log("a cache that has only num_tokens and attend" if kind == "bare" else "")
    if cached:
        lm.logits(lm.encode(PREFIX)[:cached], one)
        log(f"{counted(cached, 'token')} cached before")
    for text, start, length, count in calls:
        transformer.passes.clear()
        prompt = lm.encode(text)[start : start + length]
        what = f"{counted(count, 'new token')} after a prompt of {length}"
        found = log.call(what, mine.generate_with_cache, lm, one, prompt, count, see=False)
        if "passes" in looks:
            log("", {"tokens in each pass": [len(ids) for ids, _ in transformer.passes]})
        if "positions" in looks:
            positions = [position for _, some in transformer.passes for position in some]
            log("", {"positions of all passes": positions})
        if "tokens" in looks:
            log("", {"it returns": found})


def random_chat(seed: int) -> tuple:
    """A few messages, on a cache that may hold something at first."""
    draw, calls = random.Random(seed), []
    for _ in range(1 + seed // 8):
        text = draw.choice([PROMPT, MAIN, *REQUESTS])
        calls.append((text, draw.randrange(3), draw.randrange(1, 6), draw.choice([1, 2, 4])))
    kind = draw.choice(["concat", "in place", "bare"])
    return TWO_LAYERS, kind, draw.choice([0, 0, 1, 7]), tuple(calls), "passes positions tokens"


SHORT = tuple((PROMPT, 0, length, count) for length, count in ((4, 3), (1, 4), (4, 1)))
PASSES = "the tokens and the positions of each pass, and the row that its new token comes from"

scenario("02.2", loops,
    Group("one pass for the prompt, then one token per pass",
          [(TWO_LAYERS, "concat", 0, (call,), "passes") for call in SHORT], PASSES),
    Group("every token at its own position",
          [(TWO_LAYERS, "concat", 0, (call,), "positions") for call in SHORT], PASSES),
    Group("the oracle's tokens, from a ConcatCache",
          [(TINYPY, "concat", 0, ((PROMPT, 0, 10, 12),), "tokens")], PASSES),
    Group("the oracle's tokens, from a PreallocatedCache without a spare slot",
          [(TWO_LAYERS, "in place", 0, ((PROMPT, 0, 3, 1),), "tokens"),
          (TINYPY, "in place", 0, (("import os\n\nclass ", 0, 6, 8),), "tokens")],
          "how many tokens of prompt and answer must go through the model?"),
    Group("it continues after the end token, and when a token repeats",
          [(TINYPY, "concat", 0, ((MAIN, 0, 9, 10),), "tokens"),
          (TINYPY, "concat", 0, ((LINE_ENDS, 0, 6, 8),), "tokens")],
          "how many tokens must be returned?"),
    Group("a prompt that follows cached tokens",
          [(TWO_LAYERS, "concat", 6, ((PROMPT, 6, 4, 4),), "positions tokens"),
          (TWO_LAYERS, "bare", 1, ((PROMPT, 0, 1, 2),), "positions tokens"),
          (TINYPY, "in place", 3, ((PROMPT, 0, 5, 3),), "positions tokens")],
          "how many tokens are in the cache when a pass begins: where does the prompt start?"),
    Group("one new token; a prompt of one token",
          [(TINYPY, "concat", 0, ((PROMPT, 0, *call),), "tokens") for call in ((10, 1), (1, 3))],
          PASSES),
    Group("the same question twice, on one cache",
          [(TWO_LAYERS, "concat", 0, (call,) * 2, "passes positions tokens") for call in SHORT],
          "what does the second call find in the cache, and what do you keep elsewhere?"),
    Group("24 random chats", [random_chat(seed) for seed in range(24)], ABOVE),
)  # fmt: skip


# ── 02.4 A chunk after a prefix ───────────────────────────────────────────────

# A program is (queries, keys, heads, KV heads, head dim); with a head dim of 0 it shows which keys
# are seen.


def chunks_after(mine, program, log: Log) -> None:
    num_queries, num_keys, heads, kv_heads, dim = program
    text = f"{counted(num_queries, 'token')} after {num_keys - num_queries}"
    if dim:
        draw = torch.Generator().manual_seed(num_keys)
        q = 2 * torch.randn(num_queries, heads, dim, generator=draw)
        k, v = torch.randn(2, num_keys, kv_heads, dim, generator=draw)
        text += f", {counted(heads, 'query head')} on {kv_heads}"
    else:  # equal scores, and values that are unit vectors: a weight shows in its own channel
        q, k = torch.zeros(num_queries, heads, num_keys), torch.zeros(num_keys, kv_heads, num_keys)
        v = torch.eye(num_keys)[:, None].repeat(1, kv_heads, 1)
    out = log.call(text, mine.fused_attention, q, k, v, see=False)
    shape = tuple(out.shape) if isinstance(out, torch.Tensor) else "none"
    log("", {"shape of the result": f"{shape}"})
    if not dim and shape == q.shape:
        seen = [row.nonzero().flatten().tolist() for row in out[:, 0] > 1e-6]
        log("", {f"keys that query {i} sees": keys for i, keys in enumerate(seen)} | {"out": out})
    log("", {"attention": out})


def heads_of(heads: int, kv_heads: int, dim: int, *lengths: tuple[int, int]) -> list:
    return [(*length, heads, kv_heads, dim) for length in lengths]


class CacheWith(ConcatCache):
    """A ConcatCache that attends with another function."""

    def __init__(self, config, attend_over):
        super().__init__(config)
        self.attend_over = attend_over

    def attend(self, layer, q, k, v):
        super().attend(layer, q, k, v)
        return self.attend_over(q, self.k[layer], self.v[layer])


def cut_prompts(mine, cuts, log: Log) -> None:
    lm = tinypy()
    token_ids = lm.encode(PROMPT)
    edges = list(pairwise([0, *cuts, len(token_ids)]))
    log(f"after a prompt of {' + '.join(str(end - start) for start, end in edges)} tokens")
    one = CacheWith(lm.config, mine.fused_attention)
    for start, end in edges:
        row = lm.logits(token_ids[start:end], one)[-1]
    log("", {"the next token is": lm.decode([int(row.argmax())]), "logits": row})


MASK = "at which position does query i stand, and which keys may it see?"

scenario("02.4", chunks_after,
    Group("which keys each query sees", heads_of(2, 1, 0, (8, 8), (1, 8), (3, 8), (2, 3), (5, 6),
          (6, 33)), MASK),
    Group("a whole prompt", heads_of(4, 2, 16, (1, 1), (3, 3), (9, 9), (33, 33)), MASK),
    Group("one token after a prefix", heads_of(4, 2, 16, (1, 2), (1, 7), (1, 33)), MASK),
    Group("a chunk after a prefix", heads_of(4, 2, 16, (2, 3), (4, 9), (8, 16), (3, 50), (31, 33),
          (64, 130)), MASK),
    Group("heads in groups of one, two and three, and all in one group",
          [one for shape in ((3, 3, 16), (4, 2, 8), (6, 2, 64), (4, 1, 5), (1, 1, 2), (1, 1, 1),
          (12, 4, 32)) for one in heads_of(*shape, (3, 7), (5, 5), (1, 4))],
          "which KV head belongs to which query head?"),
)  # fmt: skip

scenario("02.4", cut_prompts,
    Group("tinypy: the token after a prompt that is cut in different ways",
          [(5,), (), (3,), (2, 6), tuple(range(1, 10))], MASK),
)  # fmt: skip


# ── 02.5 The request after the first ──────────────────────────────────────────

# A program is (model, prefixes, room, requests, what is looked at). A prefix is how many tokens of
# PREFIX, a request (number of the prefix, text, tokens of it), room the longest request's length.


def requests_after(mine, program, log: Log) -> None:
    name, prefixes, room, requests, looks = program
    lm, transformer = watched(name)
    shared = []
    for length in prefixes:
        text = f"a prefix of {counted(length, 'token')}, room for {room} more"
        prefix = lm.encode(PREFIX)[:length]
        shared.append(log.call(text, mine.SharedPrefix, lm, prefix, length + room, see=False))
    total = 0
    for count, (which, text, length) in enumerate(requests, start=1):
        request = (lm.encode(text) * 9)[:length]
        what = f"request {count}, of {counted(length, 'token')}"
        what += f", to prefix {which + 1}" if len(prefixes) > 1 else ""
        if length > room:
            log(what, {"it raises": refusal(shared[which].logits, request)})
            continue
        transformer.passes.clear()
        found = log.call(what, shared[which].logits, request, see=False)
        total += sum(len(token_ids) for token_ids, _ in transformer.passes)
        if "words" in looks:
            likeliest = "the most likely token after each of its tokens"
            log("", {likeliest: words_of(found), "logits": found})
    if "passes" in looks:
        log("in all", {"tokens that went through the model": total})


def words_of(logits) -> list[str]:
    """The most likely token after each row, with spaces and line ends visible."""
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2:
        return []
    texts = [tinypy().decode([int(row.argmax())]) for row in logits]
    return [text.replace(" ", "·").replace("\n", "↵") for text in texts]


def random_requests(seed: int) -> tuple:
    """Requests to one or two prefixes in turns; some are too long."""
    draw = random.Random(seed)
    prefixes = tuple(draw.randrange(1, 18) for _ in range(1 + seed % 2))
    requests = tuple(
        (draw.randrange(len(prefixes)), draw.choice(REQUESTS), draw.choice([1, 2, 5, 8, 8, 9]))
        for _ in range(2 + seed // 6)
    )
    return TWO_LAYERS, prefixes, 8, requests, "words passes"


FIB, EVEN, AREA = ((0, text, length) for text, length in zip(REQUESTS, (8, 9, 10), strict=True))
COUNTED = "how many of the cached tokens count when a request begins?"

scenario("02.5", requests_after,
    Group("the first request", [(TINYPY, (17,), one[2], (one,), "words")
          for one in (FIB, EVEN, AREA)], "which tokens does it see, and at which positions?"),
    Group("the second request", [(TINYPY, (17,), 19, (FIB, EVEN), "words"),
          (TWO_LAYERS, (17,), 9, (FIB, (0, REQUESTS[1], 8)), "words")],
          "which tokens does it see, and at which positions?"),
    Group("the same request three times: the same tokens",
          [(TINYPY, (17,), 24, (FIB,) * 3, "words"), (TWO_LAYERS, (5,), 30, (AREA,) * 3, "words")],
          COUNTED),
    Group("ten requests, room for the longest of them",
          [(TWO_LAYERS, (17,), 10, ((FIB, EVEN, AREA) * 4)[:10], "words")], COUNTED),
    Group("only the request goes through the model, not the prefix",
          [(TINYPY, (17,), 27, (FIB, EVEN, AREA), "passes"),
          (TWO_LAYERS, (3,), 9, (EVEN,), "passes"),
          (TWO_LAYERS, (17,), 70, ((0, REQUESTS[0], 70),), "passes")],
          "the tokens that the pass is given"),
    Group("a request that does not fit is refused; the next one is right",
          [(TINYPY, (17,), 9, (AREA, EVEN), "words"),
          (TWO_LAYERS, (17,), 9, (EVEN, AREA, EVEN, AREA, FIB), "words")], COUNTED),
    Group("a prefix of one token, requests of one token",
          [(TINYPY, (1,), 8, (FIB,), "words"),
          (TINYPY, (17,), 2, ((0, REQUESTS[0], 1), (0, REQUESTS[1], 1)), "words")],
          "the position of the request's first token"),
    Group("24 random ones, some to two prefixes in turns",
          [random_requests(seed) for seed in range(24)], ABOVE),
)  # fmt: skip


# ── tinypy on the reader's parts ──────────────────────────────────────────────


def run_caches(mine, lm: LanguageModel, makers: dict[str, Callable]) -> str:
    """Generate from a prompt in chunks, with the reader's loop and each of the caches."""
    prompt_ids, count = lm.encode(PROMPT), 24
    expected = lm.generate_naively(prompt_ids, count)
    for make, cuts in product(makers.values(), ([], [4], [1, 2, 7])):
        edges, one = [0, *cuts, len(prompt_ids)], make(lm.config, len(prompt_ids) + count - 1)
        for start, end in pairwise(edges[:-1]):
            lm.logits(prompt_ids[start:end], one)
        found = plain(mine.generate_with_cache(lm, one, prompt_ids[edges[-2] :], count))
        witness(found)
        if found != expected:
            raise AssertionError(
                f"prompt cut at {cuts}: tinypy writes {lm.decode(found)!r}, "
                f"the oracle {lm.decode(expected)!r}"
            )
    kept = one.num_tokens * lm.config.kv_bytes_per_token(lm.dtype)
    return (
        f"{count} tokens with {' and '.join(makers)}, the prompt in 1, 2 and 4 chunks: same tokens "
        f"as the oracle, {kept:,} bytes of keys and values kept"
    )


for exercise, makers in {
    "02.1": {"your ConcatCache": lambda mine, c, _: mine.ConcatCache(c)},
    "02.2": {
        "your loop on a ConcatCache": lambda mine, c, _: mine.ConcatCache(c),
        "on a PreallocatedCache": lambda mine, c, size: mine.PreallocatedCache(c, size),
    },
    "02.3": {"your PreallocatedCache": lambda mine, c, size: mine.PreallocatedCache(c, size)},
    "02.4": {"your fused_attention": lambda mine, c, _: CacheWith(c, mine.fused_attention)},
}.items():
    runs_model(exercise)(
        lambda mine, lm, makers=makers: run_caches(
            mine, lm, {name: partial(make, mine) for name, make in makers.items()}
        )
    )


@runs_model("02.5")
def _(mine, lm):
    prefix, *requests = (lm.encode(text) for text in (PREFIX, *REQUESTS))
    shared = mine.SharedPrefix(lm, prefix, len(prefix) + max(map(len, requests)))
    for request in requests:
        found = int(shared.logits(request)[-1].argmax())
        same_as_oracle(lm, prefix + request, [found])
    total, new = len(requests) * len(prefix) + sum(map(len, requests)), sum(map(len, requests))
    return (
        f"{len(requests)} requests after a prefix of {len(prefix)} tokens: same tokens as the "
        f"oracle, {new + len(prefix)} tokens computed instead of {total}"
    )
