"""Chapter 01: one query, the mask, many heads, packed groups, RoPE, and what is recomputed."""

import math
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

import minikv
from minikv.course.chapters.ch01_naive_attention.answers import work_of_generation
from minikv.course.harness.checking import Suspect, Wrong, check, close, equal, plain, runs_model
from minikv.model import rotate

# ── 01.1 One query ────────────────────────────────────────────────────────────


def vectors(seed: int, num_keys: int, dim: int, width: int) -> tuple[list, list, list]:
    """A query, keys and values, as lists."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(dim, generator=generator)
    keys = torch.randn(num_keys, dim, generator=generator)
    values = torch.randn(num_keys, width, generator=generator) + torch.arange(width)
    return query.tolist(), keys.tolist(), values.tolist()


def compare_one_query(mine, query: list, keys: list, values: list, what: str) -> None:
    # Copies: a solution that writes to its arguments fails one check, not all.
    found = plain(mine.attend_one_query(*plain([query, keys, values])))
    if not isinstance(found, list) or not all(isinstance(x, int | float) for x in found):
        raise Wrong(
            f"{what}: {found!r:.60}, expected a list of {len(values[0])} numbers",
            "nothing is returned" if found is None else "the result is not one vector of numbers",
            "what stands after `return`? One number for each place of a value",
        )
    if len(found) == len(query) and len(found) not in (len(keys), len(values[0])):
        raise Wrong(
            f"{what}: {len(found)} numbers, expected {len(values[0])}",
            "the result is as wide as the query; values need not be as wide as keys",
            "one number for each place of a value",
        )
    q, k, v = (torch.tensor(x, dtype=torch.float64) for x in (query, keys, values))
    products = k @ q
    scores = products / len(query) ** 0.5
    divided = "where is the sum of all exponentials used?"
    suspects = [
        Suspect(
            products.softmax(0) @ v,
            "the scores are not scaled",
            "what is the sum of the products divided by?",
        ),
        Suspect(
            (products / len(query)).softmax(0) @ v,
            "the scores are divided by D, not by its square root",
            "the divisor of the scores",
        ),
        Suspect(scores.exp() @ v, "the weights don't add up to 1", divided),
        Suspect((scores - scores.max()).exp() @ v, "the weights don't add up to 1", divided),
        Suspect(
            (scores - scores.max()).exp() @ v / scores.exp().sum(),
            "the largest score is taken off above, but not in the sum below",
            divided,
        ),
        Suspect(
            scores.softmax(0),
            "these are the weights; the weighted mean of the values is asked for",
            "what is done with `values`?",
        ),
        Suspect(
            v[int(scores.argmax())],
            "only the best key's value is returned, which is a hard choice",
            "every key has a weight, the small ones too",
        ),
        Suspect(
            scores @ v / scores.sum(),
            "the scores themselves are the weights, without exp",
            "how does a score become a weight?",
        ),
    ]
    suspects = [suspect for suspect in suspects if suspect.value.isfinite().all()]
    close(torch.tensor(found, dtype=torch.float64), scores.softmax(0) @ v, what, *suspects)


@check("01.1", "equal keys: the plain mean of the values", look="what are the weights?")
def _(mine):
    for width in (3, 1):
        query, _, values = vectors(1, 4, 2, width)
        compare_one_query(mine, query, [[0.5, -1.0]] * 4, values, f"4 equal keys, width {width}")


@check("01.1", "one key: its value, whatever its score", look="what is the only weight?")
def _(mine):
    for seed in (2, 3):
        compare_one_query(mine, *vectors(seed, 1, 3, 2), "a single key")


@check("01.1", "a score larger by ln 3 gets three times the weight", look="from product to weight")
def _(mine):
    query, keys = [2.0, 0.0, 0.0, 0.0], [[0.0] * 4, [math.log(3), 5.0, -1.0, 2.0]]
    compare_one_query(mine, query, keys, [[8.0], [16.0]], "weights 1/4 and 3/4 on 8 and 16")


@check("01.1", "many keys, several dimensions", look="the formula, line by line")
def _(mine):
    for seed, (num_keys, dim, width) in enumerate([(2, 1, 1), (5, 3, 2), (9, 16, 4), (40, 7, 7)]):
        what = f"{num_keys} keys of {dim} numbers, values of {width}"
        compare_one_query(mine, *vectors(10 + seed, num_keys, dim, width), what)


@check(
    "01.1",
    "scores up to 10,000 and down to -10,000",
    cause="exp of a large score overflows, and exp of small ones is 0 for all of them",
    look="what may be taken off every score without changing a weight?",
)
def _(mine):
    for sign in (1.0, -1.0):
        keys = [[sign * score] for score in (9_990.0, 10_000.0, 9_999.0)]
        what = f"scores near {sign * 10_000:,.0f}"
        compare_one_query(mine, [1.0], keys, [[1.0], [2.0], [4.0]], what)


@check(
    "01.1",
    "scores far apart, from -10,000 to 10,000",
    cause="what is taken off is not the largest score, so an exponent can still be large",
    look="which score has to be taken off so that no exponent is above 0?",
)
def _(mine):
    for scores in ([-1e4, 0.0, 1e4], [1e4, 0.0, -1e4]):
        keys = [[score] for score in scores]
        compare_one_query(mine, [1.0], keys, [[1.0], [2.0], [4.0]], f"the scores {scores}")


@check(
    "01.1",
    "leaves its arguments as they were",
    cause="one of the lists that were handed in is written to",
    look="which list do you change in place? Make a new one",
)
def _(mine):
    query, keys, values = vectors(20, 3, 2, 2)
    before = plain([query, keys, values])
    mine.attend_one_query(query, keys, values)
    equal([query, keys, values], before, "the arguments after the call")


# ── 01.2 The causal mask ──────────────────────────────────────────────────────


def mask_with(
    num_queries: int,
    num_keys: int,
    window: int | None = None,
    *,
    first: int | None = None,
    strict: bool = False,
    wider: int = 0,
) -> torch.Tensor:
    """The mask, or the mask with one mistake in it. `first` is where query 0 is taken to stand."""
    first = num_keys - num_queries if first is None else first
    query = first + torch.arange(num_queries)[:, None]
    key = torch.arange(num_keys)
    mask = key < query if strict else key <= query
    return mask if window is None else mask & (key > query - window - wider)


def pattern(mask: torch.Tensor) -> list[str]:
    return ["".join("01"[int(sees)] for sees in row) for row in mask]


def compare_mask(mine, num_queries: int, num_keys: int, window: int | None = None) -> None:
    found = mine.causal_mask(num_queries, num_keys, window)
    what = f"causal_mask({num_queries}, {num_keys}" + (f", window={window})" if window else ")")
    shape = (num_queries, num_keys)
    exchanged = "rows are queries and columns are keys; here they have changed places"
    upright = "which of the two ranges stands upright, [:, None]?"
    if not isinstance(found, torch.Tensor):
        raise Wrong(
            f"{what}: a {type(found).__name__}, expected a bool tensor of shape {shape}",
            "nothing is returned" if found is None else "the mask is not a tensor",
            "what stands after `return`?",
        )
    if tuple(found.shape) != shape:
        turned = tuple(found.shape) == shape[::-1]
        raise Wrong(
            f"{what}: shape {tuple(found.shape)}, expected {shape}",
            exchanged if turned else "the mask is made for another number of queries or keys",
            upright,
        )
    if found.dtype != torch.bool:
        raise Wrong(
            f"{what}: a tensor of {found.dtype}, expected torch.bool",
            "the mask holds numbers instead of True and False",
            "a comparison such as `a <= b` gives bool already",
        )
    args = (num_queries, num_keys, window)
    upside = "True and False are the wrong way round: True means that the query may see the key"
    mistakes = [
        (
            mask_with(*args, first=0),
            "the queries are taken to stand at the first positions, but they are the last ones",
            "the position of query 0 when there are more keys than queries",
        ),
        (mask_with(*args, strict=True), "a query does not see its own position", "`<` or `<=`?"),
        (~mask_with(*args), upside, "the direction of the comparison, or a `~` too many"),
        (~mask_with(*args[:2]), upside, "the direction of the comparison, or a `~` too many"),
        (mask_with(*args).T, exchanged, upright),
        (
            mask_with(*args).flip(0),
            "the rows are upside down",
            "row 0 is the earliest query and sees least",
        ),
        (
            mask_with(*args).flip(1),
            "the keys are counted from the wrong end",
            "column 0 is the oldest key",
        ),
        (torch.ones(shape, dtype=torch.bool), "nothing is masked", "which keys come too late?"),
    ]
    if window is not None:
        too_wide = "the window is one key too wide: it counts a query's own position, too"
        mistakes[:0] = [
            (mask_with(*args[:2]), "the window is ignored", "what does a window take away?"),
            (mask_with(*args, wider=1), too_wide, "with window=1 a query sees itself alone"),
            (
                mask_with(*args, wider=-1),
                "the window is one key too narrow",
                "with window=1 a query sees itself",
            ),
        ]
    suspects = [Suspect(pattern(wrong), cause, look) for wrong, cause, look in mistakes]
    equal(pattern(found), pattern(mask_with(*args)), f"{what}, a row for each query", *suspects)


@check("01.2", "a square: as many queries as keys", look="which keys may query 0 see?")
def _(mine):
    for size in (4, 1, 3, 7):
        compare_mask(mine, size, size)


@check("01.2", "one query, the last: it sees every key", look="the position of query 0")
def _(mine):
    compare_mask(mine, 1, 5)
    compare_mask(mine, 1, 2)


@check("01.2", "a rectangle: a chunk after a prefix", look="the position of query 0")
def _(mine):
    for num_queries, num_keys in ((2, 5), (3, 4), (5, 13)):
        compare_mask(mine, num_queries, num_keys)


@check("01.2", "a window on a square", look="which is the oldest key that a query still sees?")
def _(mine):
    for window in (2, 1, 3):
        compare_mask(mine, 5, 5, window)


@check("01.2", "a window on a rectangle", look="which is the oldest key that a query still sees?")
def _(mine):
    for num_queries, num_keys, window in ((2, 6, 3), (3, 9, 1), (4, 7, 5)):
        compare_mask(mine, num_queries, num_keys, window)


@check("01.2", "a window as wide as the keys, or wider", look="such a window takes nothing away")
def _(mine):
    compare_mask(mine, 4, 4, 4)
    compare_mask(mine, 2, 6, 50)


# ── 01.3 and 01.4 Attention with many heads ───────────────────────────────────


def draw(seed: int, num_queries: int, num_keys: int, heads: int, kv_heads: int, dim: int):
    """q (T, H, D), k and v (L, K, D). No head, token or channel is like another."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_queries, heads, dim, generator=generator)
    k, v = torch.randn(2, num_keys, kv_heads, dim, generator=generator)
    return 2 * q, k, v + torch.arange(kv_heads)[:, None]


def attention_with(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float | None = None,
    tiled: bool = False,
    mask_after: bool = False,
    hidden: float = -torch.inf,
    over: int = -1,
) -> torch.Tensor:
    """Naive attention, or naive attention with one mistake in it."""
    group = q.shape[1] // k.shape[1]
    if tiled:
        k, v = k.repeat(1, group, 1), v.repeat(1, group, 1)
    else:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,lhd->htl", q, k) * (scale or q.shape[-1] ** -0.5)
    if mask_after:
        weights = scores.softmax(-1).masked_fill(~mask, 0)
    else:
        weights = scores.masked_fill(~mask, hidden).softmax(over)
    return torch.einsum("htl,lhd->thd", weights, v)


def suspects_of_attention(q, k, v, window: int | None) -> list[Suspect]:
    num_queries, num_keys, kv_heads = len(q), len(k), k.shape[1]
    mask = minikv.causal_mask(num_queries, num_keys, window)

    def displaced(out: torch.Tensor) -> torch.Tensor:
        """The heads of each group apart from each other, as a tiling would have them."""
        return out.unflatten(1, (kv_heads, -1)).transpose(1, 2).flatten(1, 2)

    def wrong(mask: torch.Tensor = mask, **mistake) -> torch.Tensor:
        return attention_with(q, k, v, mask, **mistake)

    mistakes = [
        (
            lambda: wrong(tiled=True),
            "query head h reads KV head h % K, as if the KV heads were tiled 0, 1, 0, 1; "
            "a group is made of neighbours: 0, 0, 1, 1",
            "`repeat` or `repeat_interleave`? Where the query heads are split in two dimensions: "
            "which of the two, KV head or place in the group, is the outer one?",
        ),
        (
            lambda: displaced(wrong()),
            "every head is computed right, but the heads are returned in another order",
            "the order of the two head dimensions in the result, before they are joined",
        ),
        (
            lambda: displaced(wrong(tiled=True)),
            "query head h reads KV head h % K, and the heads are returned in another order",
            "where the query heads are split in two dimensions: which one is the outer one?",
        ),
        (lambda: wrong(scale=1.0), "the scores are not scaled", "where is 1 / sqrt(head_dim)?"),
        (
            lambda: wrong(scale=1 / q.shape[-1]),
            "the scores are divided by head_dim, not by its square root",
            "the factor beside q · k",
        ),
        (
            lambda: wrong(scale=q.shape[1] ** -0.5),
            "the scale is taken from the number of heads",
            "which dimension of q is head_dim?",
        ),
        (
            lambda: wrong(minikv.causal_mask(num_queries, num_keys)),
            "the window is ignored",
            "the third argument of causal_mask",
        ),
        (
            lambda: wrong(torch.ones_like(mask)),
            "no key is masked: a query also sees those that come after it",
            "where does the mask meet the scores?",
        ),
        (
            lambda: wrong(mask_with(num_queries, num_keys, window, first=0)),
            "the queries are taken to stand at the first positions, but they are the last ones",
            "the position of query 0 when there are more keys than queries",
        ),
        (
            lambda: wrong(mask_after=True),
            "the mask comes after the softmax, so the weights of a row don't add up to 1",
            "-inf into the scores before the softmax, instead of 0 into the weights after it",
        ),
        (
            lambda: wrong(hidden=0.0),
            "the hidden scores become 0, and exp(0) is 1: these keys keep a weight",
            "which score has the exponential 0?",
        ),
        (
            lambda: wrong(over=0),
            "the softmax runs over the heads, not over the keys",
            "the dimension that softmax is given",
        ),
        (
            lambda: wrong(over=1),
            "the softmax runs over the queries, not over the keys",
            "the dimension that softmax is given",
        ),
        (
            lambda: wrong(~mask),
            "the keys that may be seen get -inf, and the others don't",
            "True in the mask means: may be seen",
        ),
        (
            lambda: wrong().transpose(0, 1).reshape(q.shape),
            "the numbers are right but stand in (H, T) order; reshape does not exchange dimensions",
            "`transpose` or `reshape`?",
        ),
    ]
    return [Suspect(*mistake) for mistake in mistakes]


def compare_attention(
    attend, q, k, v, window: int | None, what: str, tolerance: float = 1e-4
) -> torch.Tensor:
    """`attend` against the oracle; returns what it found."""
    num_queries, heads, _ = q.shape
    found = attend(q.clone(), k.clone(), v.clone(), window)
    if getattr(found, "shape", None) == (heads, num_queries, v.shape[-1]) and heads != num_queries:
        raise Wrong(
            f"{what}: shape {tuple(found.shape)}, expected {(num_queries, heads, v.shape[-1])}",
            "the heads come first in the result; the queries come first, as in q",
            "the letters of the last einsum, or a transpose at the end",
        )
    what += ", [query, head, channel]"
    suspects = suspects_of_attention(q.float(), k.float(), v.float(), window)
    if isinstance(found, torch.Tensor) and found.isnan().any():
        for suspect in suspects:  # `close` takes no NaN for equal
            if torch.allclose(found.float(), suspect.value(), atol=tolerance, equal_nan=True):
                count = f"{int(found.isnan().sum())} of {found.numel()} values are NaN"
                raise Wrong(f"{what}: {count}", suspect.cause, suspect.look)
    expected = minikv.naive_attention(q, k, v, window)
    close(found, expected, what, *suspects, tolerance=tolerance)
    return found


@check("01.3", "one head, as many queries as keys", look="the formula, and every shape")
def _(mine):
    for seed, (length, dim) in enumerate([(4, 2), (1, 3), (7, 16)]):
        qkv = draw(seed, length, length, 1, 1, dim)
        compare_attention(mine.naive_attention, *qkv, None, f"{length} tokens, one head")


@check("01.3", "many heads, each with its own keys and values", look="which dimension is which?")
def _(mine):
    for seed, (length, heads, dim) in enumerate([(5, 4, 8), (3, 5, 2), (8, 3, 3)]):
        qkv = draw(seed, length, length, heads, heads, dim)
        compare_attention(mine.naive_attention, *qkv, None, f"{length} tokens, {heads} heads")


@check("01.3", "query heads share KV heads in groups", look="which query heads use KV head 0?")
def _(mine):
    for seed, (heads, kv_heads) in enumerate([(4, 2), (6, 3), (6, 2), (5, 1)]):
        qkv = draw(seed, 6, 6, heads, kv_heads, 8)
        what = f"6 tokens, {heads} query heads on {kv_heads} KV heads"
        compare_attention(mine.naive_attention, *qkv, None, what)


@check("01.3", "a chunk after a prefix", look="what causal_mask is called with")
def _(mine):
    for seed, (num_queries, num_keys) in enumerate([(3, 8), (1, 6), (5, 6)]):
        qkv = draw(seed, num_queries, num_keys, 4, 2, 8)
        what = f"{num_queries} queries at the end of {num_keys} positions"
        compare_attention(mine.naive_attention, *qkv, None, what)


@check("01.3", "a sliding window", look="where `window` goes")
def _(mine):
    for seed, (num_queries, num_keys, window) in enumerate([(7, 7, 3), (2, 9, 4), (4, 4, 1)]):
        qkv = draw(seed, num_queries, num_keys, 4, 2, 8)
        what = f"{num_queries} queries at the end of {num_keys} positions, window {window}"
        compare_attention(mine.naive_attention, *qkv, window, what)


@check(
    "01.3",
    "half precision: computed in float32, returned in q's dtype",
    look="which line is the first to make the difference? Print the dtypes",
)
def _(mine):
    exactly = draw(5, 6, 40, 4, 2, 16)
    compare_attention(mine.naive_attention, *exactly, None, "float32")
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = (x.to(dtype) for x in exactly)
        found = compare_attention(mine.naive_attention, q, k, v, None, str(dtype), tolerance=0.05)
        if found.dtype != dtype:
            raise Wrong(
                f"q is {dtype}, the result {found.dtype}",
                "the result is not turned back into q's dtype",
                "the last line",
            )
        once = minikv.naive_attention(q, k, v)
        exact = attention_with(q.float(), k.float(), v.float(), minikv.causal_mask(6, 40))
        error, rounding = (float((x.float() - exact).abs().mean()) for x in (found, once))
        if error > 1.5 * rounding:
            raise Wrong(
                f"{dtype}: off by {error:.5f} on average; one rounding at the end: {rounding:.5f}",
                "the products or the softmax are rounded to half precision on the way",
                "q, k and v to float32 first, the result to q's dtype at the very end",
            )


@check(
    "01.3", "scores of 10,000; q, k and v are not written to", look="large scores, or the writing"
)
def _(mine):
    q, k, v = draw(6, 5, 5, 2, 2, 4)
    arguments = (100 * q, 100 * k, v)
    before = [x.clone() for x in arguments]
    found = mine.naive_attention(*arguments)
    for name, now, then in zip("qkv", arguments, before, strict=True):
        if not torch.equal(now, then):
            raise Wrong(
                f"{name} is not what it was before the call",
                "an operation in place, such as `*=` or `masked_fill_`, wrote to an argument",
                f"which line changes {name}?",
            )
    finite = isinstance(found, torch.Tensor) and found.isfinite().all()
    if not finite and mine.naive_attention(q, k, v).isfinite().all():
        raise Wrong(
            "scores of 10,000 give NaN or inf, small ones don't",
            "exp of a large score overflows",
            "torch's softmax takes the largest score off first; do you use it?",
        )
    compare_attention(mine.naive_attention, *arguments, None, "scores of 10,000")


@check("01.3", "a hidden key that fits far better than those in sight", look="the hidden scores")
def _(mine):
    q, k = torch.zeros(2, 2, 4), torch.zeros(5, 2, 4)
    q[..., 0] = 128
    k[:4, :, 0] = -312.5 - torch.arange(4)[:, None] / 64  # scores of -20,000 to -20,003, exactly
    _, _, v = draw(7, 2, 5, 2, 2, 4)
    found = mine.naive_attention(q.clone(), k.clone(), v.clone())
    finite = Suspect(
        lambda: attention_with(q, k, v, mask_with(2, 5), hidden=-1e4),
        "a finite number in place of -inf, and the scores in sight are lower still",
        "what do the hidden scores become before the softmax?",
    )
    what = "query 0 sees scores near -20,000, [query, head, channel]"
    others = suspects_of_attention(q, k, v, None)
    close(found, minikv.naive_attention(q, k, v), what, finite, *others)


MIXED = dict(
    cause="KV heads meet places in the group, two dimensions that are equally long in tinypy alone",
    look="every line that names the two head dimensions has to name them in the same order",
)


@check("01.4", "as many KV heads as query heads", **MIXED)
def _(mine):
    qkv = draw(1, 5, 5, 4, 4, 8)
    compare_attention(mine.grouped_attention, *qkv, None, "4 query heads on 4 KV heads")


@check("01.4", "a single KV head", **MIXED)
def _(mine):
    qkv = draw(2, 5, 5, 4, 1, 8)
    compare_attention(mine.grouped_attention, *qkv, None, "4 query heads on 1 KV head")


@check("01.4", "4 query heads on 2 KV heads, as in tinypy", **MIXED)
def _(mine):
    qkv = draw(3, 6, 6, 4, 2, 8)
    compare_attention(mine.grouped_attention, *qkv, None, "4 query heads on 2 KV heads")


@check("01.4", "groups of other sizes", **MIXED)
def _(mine):
    for seed, (heads, kv_heads) in enumerate([(6, 3), (6, 2), (8, 2), (12, 3)]):
        qkv = draw(seed, 5, 5, heads, kv_heads, 4)
        what = f"{heads} query heads on {kv_heads} KV heads"
        compare_attention(mine.grouped_attention, *qkv, None, what)


@check("01.4", "a chunk after a prefix, and a window", **MIXED)
def _(mine):
    for seed, window in enumerate((None, 3)):
        what = f"3 queries at the end of 9 positions, window {window}"
        compare_attention(mine.grouped_attention, *draw(seed, 3, 9, 6, 2, 8), window, what)


class NoCopies(TorchFunctionMode):
    """Raises Wrong when a tensor of this many numbers is written: K or V, repeated."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        repeated = isinstance(out, torch.Tensor) and out.numel() == self.size
        if repeated and out.untyped_storage().nbytes() >= out.nbytes:  # an expanded view is none
            raise Wrong(
                f"`{function.__name__}` writes a tensor of shape {tuple(out.shape)}",
                "K and V are copied; the exercise is to do without",
                "the line that gives every query head its own K or V, here or in a call",
            )
        return out


@check("01.4", "K and V are not repeated", look="the shapes of all tensors, line by line")
def _(mine):
    q, k, v = draw(5, 3, 11, 6, 2, 8)
    with NoCopies(11 * 6 * 8):
        mine.grouped_attention(q, k, v)


# ── 01.5 RoPE ─────────────────────────────────────────────────────────────────


def turns(positions: list[int], dim: int, base: float = 100.0) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (T, 1, D) as the model hands them to `rotate`."""
    frequencies = base ** (-torch.arange(0, dim, 2) / dim)
    angles = torch.tensor(positions)[:, None] * frequencies  # (T, D / 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


def compare_rotation(mine, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, what: str):
    dim = x.shape[-1]
    half = dim // 2
    swapped = x.roll(half, -1)
    neighbours = x.unflatten(-1, (half, 2)).flip(-1).flatten(-2)
    split = torch.arange(dim).view(half, 2).T.flatten()  # even channels, then odd ones
    signs = "sin comes with its signs already in it"
    partner = "which channel changes places with channel 0?"
    paired = "neighbours are paired, (0, 1), (2, 3), …; the pairs are (i, i + D / 2)"
    mistakes = [
        (
            x * cos + x * sin,
            "no swap: every channel meets itself; its partner i + D/2 is missing",
            partner,
        ),
        (
            x * sin + swapped * cos,
            "sin and cos are exchanged: a channel's own value goes with cos",
            "which factor belongs to the channel, which to its partner?",
        ),
        (x * cos - swapped * sin, "the pairs turn the other way round: a minus too many", signs),
        (
            x * cos + swapped * sin[..., half:].repeat(1, 1, 2),
            "the first half is negated twice, in `sin` and by you, or not at all; lengths change",
            signs,
        ),
        (x * cos + neighbours * sin, paired, partner),
        (rotate(x[..., split], cos, sin)[..., split.argsort()], paired, partner),
        (
            x * cos + x.flip(-1) * sin,
            "the channels are reversed: 0 is paired with D - 1, 1 with D - 2, …",
            partner,
        ),
        (
            x * cos + x.roll(1, -1) * sin,
            "each channel takes its neighbour's value; whole halves have to change places",
            "by how many places do you roll?",
        ),
        (
            x * cos + x.roll(x.shape[1] // 2, 1) * sin,
            "the heads change places, not the halves of each head's channels",
            "which dimension is the last one?",
        ),
        (x * cos, "the part with sin is missing", "two products are added"),
        (x, "nothing is turned", "what do you return?"),
    ]
    suspects = [Suspect(*mistake) for mistake in mistakes]
    close(mine.rotate(x.clone(), cos, sin), rotate(x, cos, sin), what, *suspects)


@check("01.5", "position 0: nothing turns", look="cos is 1 there, sin is 0; x (T, heads, D) stays")
def _(mine):
    x, _, _ = draw(1, 1, 1, 3, 1, 8)
    compare_rotation(mine, x, *turns([0], 8), "one token at position 0, [token, head, channel]")


# Not a quarter turn: with cos = 0 too many mistakes look alike.
@check("01.5", "one pair", look="(1, 0) becomes (0.6, 0.8), and (0, 1) becomes (-0.8, 0.6)")
def _(mine):
    x = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    cos, sin = torch.full((2, 1, 2), 0.6), torch.tensor([[[-0.8, 0.8]]] * 2)
    what = "(1, 0) and (0, 1), turned with cos 0.6 and sin 0.8, [token, 0, place]"
    compare_rotation(mine, x, cos, sin, what)


@check("01.5", "each channel has its partner", look="which channel changes places with channel 0?")
def _(mine):
    x = torch.eye(8)[:, None]
    what = "8 tokens, token i is 1 in channel i and 0 elsewhere, [token, head, channel]"
    compare_rotation(mine, x, *turns([3] * 8, 8), what)


@check("01.5", "many tokens, heads and positions", look="shapes: x (T, heads, D), cos (T, 1, D)")
def _(mine):
    for seed, (positions, heads, dim) in enumerate(
        [([0, 1, 2, 3, 4], 4, 8), ([7, 1000], 6, 64), ([5], 1, 6), ([3, 3, 9], 2, 2)]
    ):
        x, _, _ = draw(seed, len(positions), 1, heads, 1, dim)
        what = f"positions {positions}, {heads} heads of {dim}, [token, head, channel]"
        compare_rotation(mine, x, *turns(positions, dim), what)


@check(
    "01.5",
    "q · k depends on distance alone, and no length changes",
    cause="a pair is not turned as a whole: both its channels need the same angle",
    look="write down both channels of one pair, and the angle that each of them gets",
)
def _(mine):
    pair = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(2))
    products = []
    for positions in ([12, 5], [107, 100]):
        q, k = mine.rotate(pair.clone(), *turns(positions, 16))[:, 0]
        products.append(torch.stack([q @ k, q.norm(), k.norm()]))
    what = "[q · k, length of q, length of k] at 107 and 100, against 12 and 5"
    close(products[1], products[0], what)


@check(
    "01.5",
    "x is not written to",
    cause="an operation in place wrote to x, which the caller still needs",
    look="`x * cos` makes a new tensor; `x *= cos` and `x[...] =` don't",
)
def _(mine):
    x, _, _ = draw(3, 3, 1, 2, 1, 4)
    before = x.clone()
    mine.rotate(x, *turns([1, 2, 3], 4))
    close(x, before, "x after the call, [token, head, channel]")


# ── 01.6 What is recomputed ───────────────────────────────────────────────────

LATE = "a pass is counted with the token it gives; it is fed only those before"
UNFED = "the last new token is counted, but it is never fed"
PASSES = "how many rows does each pass have? Write them down for a prompt of 2 and 3 new tokens"


def mistakes_of_work(prompt: int, new: int) -> dict[str, list[tuple[int, str, str]]]:
    """For each count: what plausible mistakes give, and their names."""
    passes = range(prompt, prompt + new)
    last = passes[-1]
    with_the_last = range(prompt, prompt + new + 1)
    return {
        "rows": [
            (sum(with_the_last[1:]), LATE, PASSES),
            (sum(with_the_last), "one pass too many: " + UNFED, PASSES),
            (prompt * new, "every pass is as long as the prompt here, but they grow", PASSES),
            (last, "each row is counted once, which is what a cache makes of it", PASSES),
        ],
        "new rows": [
            (last + 1, UNFED, PASSES),
            (new, "the rows of the prompt are left out; in the first pass they are new", PASSES),
            (
                new - 1,
                "the rows of the prompt are left out; in the first pass they are new",
                PASSES,
            ),
            (sum(passes), "all rows are counted, also those computed before", PASSES),
        ],
        "scores": [
            (
                sum(length * (length + 1) // 2 for length in passes),
                "only what the mask leaves is counted; the rest is computed, too, and thrown away",
                "does the mask come before or after q · k?",
            ),
            (sum(passes), "a row has one score here; it meets every key of its pass", PASSES),
            (last * last, "only the last pass is counted", PASSES),
            (sum(length * length for length in with_the_last[1:]), LATE, PASSES),
            (sum(n * n for n in with_the_last), "one pass too many: " + UNFED, PASSES),
        ],
        "new scores": [
            (last * last, "what is masked is counted; nothing needs it", "the shape of the mask"),
            (
                prompt * prompt + sum(passes[1:]),
                "the masked ones of the first pass are counted",
                "how many does its first row need?",
            ),
            ((last + 1) * (last + 2) // 2, UNFED, PASSES),
            (
                last * (last - 1) // 2,
                "a token's score with itself is left out",
                "the diagonal of the mask",
            ),
            (
                sum(passes),
                "the last row of each pass is counted; the prompt's other rows need scores, too",
                "which rows does the first pass compute?",
            ),
        ],
    }


def compare_work(mine, name: str) -> None:
    for prompt, new in ((2, 3), (12, 8), (1, 1), (5, 1), (1, 6), (170, 32)):
        found, expected = mine.work_of_generation(prompt, new), work_of_generation(prompt, new)
        what = f"a prompt of {prompt} and {new} new"
        if not isinstance(found, dict) or name not in found:
            raise Wrong(
                f"{what}: {found!r:.70}",
                "nothing is returned" if found is None else f"there is no {name!r} in the result",
                f"return a dict with the keys {', '.join(map(repr, expected))}",
            )
        suspects = [Suspect(*mistake) for mistake in mistakes_of_work(prompt, new)[name]]
        equal(found[name], expected[name], f"{name}, {what}", *suspects)


for name in work_of_generation(1, 1):

    @check("01.6", f"{name}, for six prompts", look="the worked example, then one case by hand")
    def _(mine, name=name):
        compare_work(mine, name)


# ── tinypy on the reader's parts ──────────────────────────────────────────────

PROMPT = "def area(width, height):\n    return"


def run(
    lm: minikv.LanguageModel, part: str, attend, prompt: str, new_tokens: int, rotation=rotate
) -> str:
    """Naive generation with `attend`, told in a sentence. Raises if the oracle writes otherwise."""
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
    return run(lm, "your attention of one query, in plain Python", attend, "import os\n", 3)


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
