"""Chapter 01 as programs: one query, the mask, heads in groups, RoPE, what is recomputed."""

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

import minikv
from minikv.course.judge.checking import mismatch, plain, runs_model, witness
from minikv.course.judge.scenarios import Group, Log, Words, same, scenario
from minikv.course.pictures.snapshot import counted
from minikv.model import rotate

EARLIER = "the smallest shape that differs: which of its sizes is in no line above?"


def call(log: Log, text: str, function: Callable, **arguments: Any) -> Any:
    """What `function` returns; logs its kind, and whether the arguments were modified."""
    before = deepcopy(arguments)
    found = log.call(text, partial(function, *arguments.values()), see=False)
    changed = [name for name, value in arguments.items() if not same(value, before[name])]
    told = f"{' and '.join(changed)} changed" if changed else text
    log(told, {"the arguments are": Words("modified" if changed else "unchanged")})
    log(text, {"what comes back is": Words(kind_of(found))})
    return found


def kind_of(found: Any) -> str:
    if isinstance(found, torch.Tensor):
        return f"a tensor of shape {tuple(found.shape)}"
    if isinstance(found, list) and all(isinstance(x, int | float) for x in found):
        return counted(len(found), "number")
    return "nothing" if found is None else f"a {type(found).__name__}"


# ── 01.1 One query ────────────────────────────────────────────────────────────

# A program is (what it is, query, keys, values).


def one_query(mine, program, log: Log) -> None:
    what, query, keys, values = deepcopy(program)

    def attend(*vectors):
        return plain(mine.attend_one_query(*vectors))

    found = call(log, what, attend, query=query, keys=keys, values=values)
    if kind_of(found).partition(" ")[2].startswith("number"):
        log(what, {"result": [round(x, 3) for x in found]})


def vectors(num_keys: int, dim: int, width: int, seed: int = 0, key: list | None = None) -> tuple:
    """Drawn vectors; with `key`, that is every key."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(dim, generator=generator)
    keys = torch.randn(num_keys, dim, generator=generator)
    values = 4 * torch.randn(num_keys, width, generator=generator) + torch.arange(width)
    keys_ = counted(num_keys, "equal key" if key else "key")
    what = f"{keys_} of {counted(dim, 'number')}, values of {counted(width, 'number')}"
    return what, query.tolist(), [key] * num_keys if key else keys.tolist(), values.tolist()


def scored(scores: list[float], dim: int) -> tuple:
    """Keys that have these scores, in vectors of `dim` numbers."""
    keys = [[score * dim**0.5, *[0.0] * (dim - 1)] for score in scores]
    values = [[float(2**i), float(-i)] for i in range(len(scores))]
    listed = ", ".join(f"{score:,.0f}" for score in scores)
    return f"the scores {listed}, with D = {dim}", [1.0, *[2.0] * (dim - 1)], keys, values


LN_3 = [[0.0] * 4, [math.log(3), 5.0, -1.0, 2.0]]

scenario("01.1", one_query,
    Group("equal keys: the plain mean of the values",
          [*(vectors(*shape, key=[0.5, -1.0]) for shape in ((4, 2, 3), (4, 2, 1), (7, 2, 2))),
          ("the docstring's example", [1.0, 2.0], [[3.0, 0.0]] * 2, [[10.0], [20.0]])],
          "if all keys are equal, what are the weights?"),
    Group("one key: its value, whatever its score",
          [vectors(1, 3, 2, 2), vectors(1, 3, 4, 3), vectors(1, 1, 1, 4)],
          "the weight of the only key"),
    Group("a score larger by ln 3 gets three times the weight",
          [("weights 1/4 and 3/4 on 8 and 16", [2.0, 0.0, 0.0, 0.0], LN_3, [[8.0], [16.0]])],
          "the steps from product to weight"),
    Group("many keys, several dimensions", [vectors(*shape, seed)
          for seed, shape in enumerate([(2, 1, 1), (5, 3, 2),
          *product((2, 3, 9, 40), (1, 2, 5, 16, 64), (1, 3, 7, 16))])],
          "the formula, line by line"),
    Group("scores up to 10,000 and down to -10,000",
          [scored([sign * score for score in scores], dim) for dim in (1, 16, 3)
          for sign in (1.0, -1.0) for scores in ([9_990.0, 10_000.0, 9_999.0], [10_000.0],
          [800.0, 799.0])], "what may be subtracted from every score without changing a weight?"),
    Group("scores far apart, from -10,000 to 10,000",
          [*(scored(scores, dim) for dim in (1, 16)
          for scores in ([-1e4, 0.0, 1e4], [1e4, 0.0, -1e4], [0.0, 1e4, 9_998.0, -1e4])),
          ("a weight of 1/3,000 on a million", [1.0], [[8.0], [0.0]], [[0.0], [1e6]])],
          "which score must be subtracted so that no exponent is above 0?"),
)  # fmt: skip


# ── 01.2 The causal mask ──────────────────────────────────────────────────────

# A program is (queries, keys) or (queries, keys, window).


def masks(mine, program, log: Log) -> None:
    num_queries, num_keys, *window = program
    text = f"causal_mask({num_queries}, {num_keys}" + "".join(f", window={w}" for w in window) + ")"
    ask = partial(mine.causal_mask, window=window[0]) if window else mine.causal_mask
    found = call(log, text, ask, num_queries=num_queries, num_keys=num_keys)
    if isinstance(found, torch.Tensor) and found.dim() == 2:
        holds = "True and False" if found.dtype == torch.bool else "numbers"
        log(text, {"the mask holds": holds})
        rows = ["".join("01"[bool(sees)] for sees in row) for row in found.tolist()]
        log("a row for each query", {"result": rows})


OLDEST = "which is the oldest key that a query still sees?"

scenario("01.2", masks,
    Group("a square: as many queries as keys", [(4, 4), (1, 1), (3, 3), (7, 7)],
          "which keys may query 0 see?"),
    Group("one query, the last: it sees every key", [(1, 5), (1, 2), (1, 30)],
          "with more keys than queries: at which position does query 0 stand?"),
    Group("a rectangle: a chunk after a prefix", [(2, 5), (3, 4), (5, 13), (4, 3000)],
          "the position of query 0"),
    Group("a window on a square", [(5, 5, 2), (5, 5, 1), (5, 5, 3)], OLDEST),
    Group("a window on a rectangle", [(2, 6, 3), (3, 9, 1), (4, 7, 5)], OLDEST),
    Group("one query and a window", [(1, 6, 3), (1, 6, 1), (1, 2, 1), (1, 900, 70)],
          "the case of one query: which keys are too old for it?"),
    Group("a window as wide as the keys, or wider", [(4, 4, 4), (2, 6, 50), (2, 6, 6), (1, 3, 3)],
          "such a window hides nothing"),
    Group("every small mask", [(num_queries, num_keys, *window) for num_keys in range(1, 8)
          for num_queries in range(1, num_keys + 1)
          for window in ((), (None,), *((w,) for w in range(1, num_keys + 2)))],
          "the smallest mask that differs: which row, and at which of its two ends?"),
)  # fmt: skip


# ── 01.3 and 01.4 Attention with many heads ───────────────────────────────────

LARGE, HIDDEN = "scores of 10,000", "visible scores near -20,000, hidden ones of 0"
HEADS_FIRST, PARTS = "heads first in memory", "q, k and v are parts of larger tensors"
TWICE, COPIES = "called twice", "keys and values are not repeated"
HALF = {
    "bfloat16": (torch.bfloat16,) * 3,
    "float16": (torch.float16,) * 3,
    "q in bfloat16, k and v in float32": (torch.bfloat16, torch.float32, torch.float32),
    "q in float32, k and v in float16": (torch.float32, torch.float16, torch.float16),
    "float64": (torch.float64,) * 3,
}


class Case(NamedTuple):
    """A call of attention: T queries at the end of L positions, H query heads on K KV heads."""

    T: int
    L: int
    H: int
    K: int
    D: int
    window: int | None = None
    how: str = ""  # what is special about its tensors

    def __str__(self) -> str:
        T, L, H, K, D, window, how = self
        tokens = f"{counted(T, 'query', 'queries')} at the end of {L} positions"
        heads = counted(H, "head") if H == K else f"{H} query heads on {counted(K, 'KV head')}"
        told = f"{counted(T, 'token') if T == L else tokens}, {heads} of {D}"
        return f"{how}: " * bool(how) + told + f", window {window}" * bool(window)

    def draw(self) -> list[torch.Tensor]:
        """q (T, H, D), k and v (L, K, D). No head, token or channel is like another."""
        T, L, H, K, D, window, how = self
        generator = torch.Generator().manual_seed(T + L + H + K + D + (window or 0))
        q = 2 * torch.randn(T, H, D, generator=generator)
        k, v = torch.randn(2, L, K, D, generator=generator)
        v = v + torch.arange(K)[:, None]
        if how == LARGE:
            q, k = 100 * q, 100 * k
        if how == HIDDEN:  # scores of -20,000 to -20,003, exactly, and a last one of 0
            q, k = torch.zeros_like(q), torch.zeros_like(k)
            q[..., 0] = 64 * D**0.5
            k[:-1, :, 0] = -312.5 - torch.arange(L - 1)[:, None] / 64
        if how == HEADS_FIRST:
            return [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
        if how == PARTS:  # NaN around them
            larger = [torch.full([size + 3 for size in x.shape], torch.nan) for x in (q, k, v)]
            parts = [x[1:-2, 2:-1, :-3] for x in larger]
            return [part.copy_(x) for part, x in zip(parts, (q, k, v), strict=True)]
        dtypes = HALF.get(how, (torch.float32,) * 3)
        return [x.to(dtype) for x, dtype in zip((q, k, v), dtypes, strict=True)]


class Copies(TorchFunctionMode):
    """Notes which operations write a tensor of this size: keys or values, repeated."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.writers: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        repeated = isinstance(out, torch.Tensor) and out.numel() == self.size
        if repeated and out.untyped_storage().nbytes() >= out.nbytes:  # not an expanded view
            self.writers.append(
                f"`{function.__name__}` writes a tensor of shape {tuple(out.shape)}"
            )
        return out


def attention(name: str, mine, case: Case, log: Log) -> None:
    """A play, of the function of this name."""
    attend = getattr(mine, name)
    if case.window is not None:
        attend = partial(attend, window=case.window)
    (q, k, v), text = case.draw(), str(case)
    if case.how == COPIES:
        with Copies(case.L * case.H * case.D) as copies:
            log.call(text, attend, q, k, v, see=False)
        log("".join(copies.writers[:1]), {"k or v is repeated:": bool(copies.writers)})
        return
    for turn in range(2 if case.how == TWICE else 1):
        if turn:
            text = "the same tensors, with other numbers in them"
            for x in (q, k, v):
                x.copy_(x.flip(0) - 0.5)
        found = call(log, text, attend, q=q, k=k, v=v)
        if not isinstance(found, torch.Tensor) or found.shape != q.shape:
            return
        if q.dtype not in (torch.bfloat16, torch.float16):
            log("the result, [query, head, channel]", {"result": found})
            log(text, {"dtype": str(found.dtype)})
            continue
        exact = minikv.naive_attention(q.float(), k.float(), v.float(), case.window)
        error, least = ((x.float() - exact).abs() for x in (found, exact.to(q.dtype)))
        verdict = "rounded at the end only" if (error <= least + 1e-5).all() else "rounded before"
        if mismatch(found, exact, 0.05) is not None:
            verdict = "another"
        log(text, {"dtype": str(found.dtype), "the result is": verdict})


def cases(*shapes: tuple, how: tuple[str, ...] = ("",)) -> list[Case]:
    return [Case(*shape)._replace(how=one) for one in how for shape in shapes]


SPECIAL = (5, 5, 2, 2, 4), (3, 9, 6, 3, 8), (4, 4, 3, 1, 6, 2), (1, 7, 4, 4, 9)
HIDING = (2, 5, 2, 2, 4), (4, 4, 6, 3, 16)
EVERY = [
    Case(*lengths, *heads, dim, window)
    for lengths in ((1, 1), (3, 3), (1, 4), (2, 5), (4, 9))
    for heads in ((4, 4), (4, 2), (4, 1), (6, 3), (6, 2), (8, 2), (12, 3), (5, 1), (1, 1))
    for dim in (9, 12)
    for window in (None, 1, 2, lengths[1] + 1)
]
EVERY += cases((3, 5, 4, 2, 1), (1, 4, 2, 1, 1), (4, 4, 1, 1, 1, 2))  # squeeze() has much to take
EVERY += cases((130, 130, 4, 2, 64), (1, 300, 4, 2, 128), (5, 300, 4, 4, 80, 40),
               (70, 1100, 2, 1, 16), (1, 700, 4, 2, 24, 129))  # fmt: skip

scenario("01.3", partial(attention, "naive_attention"),
    Group("one head, as many queries as keys",
          cases((5, 5, 1, 1, 2), (1, 1, 1, 1, 9), (7, 7, 1, 1, 16), (3, 3, 1, 1, 5)),
          "by which size are the scores scaled, over which dimension is the softmax?"),
    Group("many heads, each with its own keys and values",
          cases((5, 5, 4, 4, 8), (3, 3, 5, 5, 2), (8, 8, 3, 3, 3), (4, 4, 4, 4, 4)),
          "which dimension is which, and does `reshape` swap two?"),
    Group("query heads share KV heads in groups",
          cases(*((6, 6, *heads, 8) for heads in ((4, 2), (6, 3), (6, 2), (5, 1), (8, 2)))),
          "which query heads use KV head 0?"),
    Group("a chunk after a prefix", cases((3, 8, 4, 2, 8), (1, 6, 4, 2, 8), (5, 6, 4, 2, 8)),
          "what causal_mask is called with"),
    Group("a sliding window", cases((7, 7, 4, 2, 8, 3), (2, 9, 4, 2, 8, 4), (4, 4, 4, 2, 8, 1),
          (1, 8, 4, 2, 8, 3)), "where `window` goes"),
    Group("half precision: computed in float32, returned in q's dtype",
          cases((6, 40, 4, 2, 12), (5, 5, 2, 2, 8), (1, 17, 6, 3, 10, 5), how=tuple(HALF)),
          "which line makes the first difference? Print the dtypes"),
    Group("scores of 10,000", cases(*SPECIAL, how=(LARGE,)), "the softmax of large scores"),
    Group("a hidden key that scores far higher than the visible ones",
          cases(*HIDING, how=(HIDDEN,)), "what do the hidden scores become before the softmax?"),
    Group("tensors with another layout in memory, and two calls",
          cases(*SPECIAL, how=(PARTS, HEADS_FIRST, TWICE)),
          "what do you keep between calls, and what depends on the strides?"),
    Group("every other shape", EVERY, EARLIER),
)  # fmt: skip

ORDER = "in every line that names KV head and place in the group: which comes first?"

scenario("01.4", partial(attention, "grouped_attention"),
    Group("as many KV heads as query heads", cases((5, 5, 4, 4, 8), (3, 3, 5, 5, 6)),
          "each head alone, as in 01.1: the scale, the mask, the softmax over the keys"),
    Group("a single KV head", cases((5, 5, 4, 1, 8), (3, 3, 5, 1, 6)), ORDER),
    Group("4 query heads on 2 KV heads, as in tinypy", cases((6, 6, 4, 2, 8)), ORDER),
    Group("groups of other sizes", cases(*((5, 5, *heads, 4)
          for heads in ((6, 3), (6, 2), (8, 2), (12, 3)))), ORDER),
    Group("a chunk after a prefix, and a window",
          cases((3, 9, 6, 2, 8), (3, 9, 6, 2, 8, 3), (5, 5, 6, 2, 8, 2), (1, 9, 6, 2, 8, 3)),
          "the mask, and where it meets the scores"),
    Group("large scores, other layouts in memory, two calls",
          cases(*HIDING, how=(HIDDEN,)) + cases(*SPECIAL, how=(LARGE, PARTS, HEADS_FIRST, TWICE)),
          "the softmax, and what you keep between calls"),
    Group("every other shape", EVERY, EARLIER),
    Group("keys and values are not repeated",
          cases((3, 11, 6, 2, 8), (2, 7, 4, 1, 6), how=(COPIES,)),
          "which line gives every query head its own keys or values, here or in a call?"),
)  # fmt: skip


# ── 01.5 RoPE ─────────────────────────────────────────────────────────────────

# A program is (what it is, x, positions), or cos and sin in the place of positions.


def turns(positions: list[int], dim: int, base: float = 100.0) -> tuple[torch.Tensor, ...]:
    """cos and sin (T, 1, D) as the model hands them to `rotate`: parts of one table."""
    angles = torch.tensor(positions)[:, None] * base ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos(), angles.sin()  # (T, D / 2)
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
    return table.split(1, dim=1)


def rotation(mine, program, log: Log) -> None:
    what, x, angles = deepcopy(program)
    cos, sin = turns(angles, x.shape[-1]) if isinstance(angles, list) else angles
    found = call(log, what, mine.rotate, x=x, cos=cos, sin=sin)
    if isinstance(found, torch.Tensor):
        log("[token, head, channel]", {"result": found})


def many(positions: list[int], heads: int, dim: int, heads_first: bool = False) -> tuple:
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(len(positions), heads, dim, generator=generator)
    if heads_first:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    what = f"positions {positions}, {counted(heads, 'head')} of {dim}"
    return what + f", {HEADS_FIRST}" * heads_first, x, positions


PAIRS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0], [0.0, -3.0]])[:, None]
TURNED = "(1, 0), (0, 1) and three more, rotated with cos 0.6 and sin 0.8"
# Not a quarter turn: with cos = 0 too many mistakes look alike.
ANGLE = torch.full((5, 1, 2), 0.6), torch.tensor([[[-0.8, 0.8]]] * 5)

scenario("01.5", rotation,
    Group("position 0: nothing rotates", [many([0], 3, 8), many([0, 0], 1, 16)],
          "cos is 1 there, sin is 0; x (T, heads, D) stays"),
    Group("one pair", [(TURNED, PAIRS, ANGLE)],
          "(1, 0) becomes (0.6, 0.8), and (0, 1) becomes (-0.8, 0.6)"),
    Group("each channel has its partner",
          [(f"{dim} tokens, token i is 1 in channel i and 0 elsewhere", torch.eye(dim)[:, None],
          [3] * dim) for dim in (8, 4, 6, 16)], "which channel is the partner of channel 0?"),
    Group("many tokens, heads and positions",
          [many([0, 1, 2, 3, 4], 4, 8), many([7, 1000], 6, 64), many([5], 2, 6),
          many([3, 3, 9], 2, 2)] + [many([dim + 3 * i for i in range(tokens)], heads, dim,
          heads_first) for tokens, heads, dim, heads_first in product((1, 2, 4, 9), (1, 2, 4, 8),
          (8, 10, 32, 128), (False, True))], "shapes: x (T, heads, D), cos and sin (T, 1, D)"),
    Group("the same distance at other positions",
          [many(positions, 1, 16) for positions in ([12, 5], [107, 100], [0, 7], [993, 1000])],
          "write down both channels of one pair, and the angle that each of them gets"),
)  # fmt: skip


# ── tinypy on the reader's parts ──────────────────────────────────────────────

PROMPT = "def area(width, height):\n    return"


def run(
    lm: minikv.LanguageModel, part: str, attend, prompt: str, new_tokens: int, rotation=rotate
) -> str:
    """Generate naively with `attend`, and say so. Raises if the oracle's tokens are others."""
    prompt_ids = lm.encode(prompt)
    expected = lm.generate_naively(prompt_ids, new_tokens)
    ids, rows = list(prompt_ids), 0
    with torch.inference_mode(), mock.patch("minikv.model.rotate", rotation):
        for _ in range(new_tokens):
            positions = torch.arange(len(ids))
            hidden = lm.transformer.forward(torch.tensor(ids), positions, attend)
            ids.append(int(lm.transformer.logits(hidden[-1:]).argmax()))
            rows += len(positions)
    found = ids[len(prompt_ids) :]
    witness(found)
    if found != expected:
        raise AssertionError(f"tinypy wrote {found}, the oracle {expected}")
    return (
        f"tinypy ran on {part}: {new_tokens} tokens, the same as the oracle's, "
        f"{rows} token rows computed for them"
    )


@runs_model("01.1")
def _(mine, lm: minikv.LanguageModel) -> str:
    def attend(layer, q, k, v):
        group = q.shape[1] // k.shape[1]
        keys, values = k.transpose(0, 1).tolist(), v.transpose(0, 1).tolist()  # by KV head
        rows = [
            [
                mine.attend_one_query(query, keys[h // group][:end], values[h // group][:end])
                for h, query in enumerate(heads)
            ]
            for end, heads in enumerate(q.tolist(), start=1)
        ]
        return torch.tensor(plain(rows), dtype=q.dtype)

    # A short text: plain Python is slow.
    return run(lm, "your attention for one query, in plain Python", attend, "import os\n", 3)


@runs_model("01.2", "01.3", "01.5")
def _(mine, lm: minikv.LanguageModel) -> str:
    def attend(layer, q, k, v):
        with mock.patch("minikv.attention.causal_mask", mine.causal_mask):
            return mine.naive_attention(q, k, v, lm.config.windows[layer])

    parts = {
        "mask": mine.causal_mask is not minikv.causal_mask,
        "attention": mine.naive_attention is not minikv.naive_attention,
        "rotation": mine.rotate is not rotate,
    }
    own = ", ".join(f"your {name}" for name, is_own in parts.items() if is_own)
    return run(lm, own, attend, PROMPT, 12, mine.rotate)


@runs_model("01.4")
def _(mine, lm: minikv.LanguageModel) -> str:
    def attend(layer, q, k, v):
        return mine.grouped_attention(q, k, v, lm.config.windows[layer])

    return run(lm, "your grouped attention", attend, PROMPT, 12)
