"""Chapter 01: mistakes that a reader may make, each as a wrong solution."""

from minikv.course.exercises.mistakes import Mistake


def of(path: str, *records: tuple) -> tuple[Mistake, ...]:
    """Mistakes in one function: (name, (old, new) pairs or a whole definition, cause, look)."""
    nothing = f"def {path}(*arguments, **options):\n    return None\n"
    return tuple(
        Mistake(name, cause, look, sources={path: change})
        if isinstance(change, str)
        else Mistake(name, cause, look, edits={path: change})
        for name, change, cause, look in (
            *records,
            ("returns nothing", nothing, "nothing is returned", "what comes after `return`?"),
        )
    )


def query_with(result: str) -> str:
    """attend_one_query by torch, with another last line."""
    return f"""
def attend_one_query(query, keys, values):
    q, k, v = (torch.tensor(x, dtype=torch.float64) for x in (query, keys, values))
    scores = k @ q / len(query) ** 0.5
    return ({result}).tolist()
"""


NOT_LARGEST = (
    "what is subtracted is not the largest score, so an exponent can still be large",
    "which score must be subtracted so that no exponent is above 0?",
)
FIRST_POSITIONS = (
    "the queries are assumed to stand at the first positions, but they stand at the last ones",
    "the position of query 0 when there are more keys than queries",
)
TILED = (
    "query head h reads KV head h % K, as if the KV heads were tiled 0, 1, 0, 1; a group consists "
    "of neighbours: 0, 0, 1, 1",
    "`repeat` or `repeat_interleave`? Where the query heads are split into two dimensions, which "
    "one is the outer: KV head, or place in the group?",
)
ROUNDED = (
    "the products or the softmax are rounded to half precision on the way",
    "convert q, k and v to float32 first, and the result to q's dtype at the very end",
)
WRITTEN_TO = "an in-place operation, such as `*=` or `masked_fill_`, modifies the caller's tensor"
COPIED = (
    "keys or values are copied; the exercise is to do without copies",
    "the line that gives every query head its own keys or values, here or in a call",
)
PASSES = "how many rows does each pass have? Write them down for a prompt of 2 and 3 new tokens"
LAST_UNFED = "the last new token is counted, but it is never fed"
NO_PROMPT = "the rows of the prompt are not counted, but in the first pass they are new"

ATTENTION = (  # what can be wrong in 01.3 and 01.4
    ("no scale", ((" * q.shape[-1] ** -0.5", ""),),
     "the scores are not scaled", "where is 1 / sqrt(head_dim)?"),
    ("divides by head_dim", (("** -0.5", "** -1"),),
     "the scores are divided by head_dim, not by its square root", "the factor next to q · k"),
    ("masks what may be seen", (("masked_fill(~mask", "masked_fill(mask"),),
     "the keys that may be seen get -inf, and the others do not",
     "True in the mask means: may be seen"),
    ("masks after the softmax",
     (("scores.masked_fill(~mask, -torch.inf).softmax(-1)",
       "scores.softmax(-1).masked_fill(~mask, 0)"),),
     "the mask comes after the softmax, so the weights of a row do not add up to 1",
     "put -inf into the scores before the softmax, not 0 into the weights after it"),
    ("hides with 0", (("~mask, -torch.inf", "~mask, 0"),),
     "the hidden scores become 0, and exp(0) is 1: these keys keep a weight",
     "for which score is the exponential 0?"),
    ("hides with a finite number", (("~mask, -torch.inf", "~mask, -1e4"),),
     "hidden scores become a finite number instead of -inf, and the visible scores are lower "
     "still",
     "what do the hidden scores become before the softmax?"),
    ("square mask",
     (("causal_mask(len(q), len(k), window)",
       "torch.ones(len(q), len(k), dtype=torch.bool).tril()"),),
     *FIRST_POSITIONS),
    ("forgets the window", (("len(k), window)", "len(k))"),),
     "the window is ignored", "the third argument of causal_mask"),
    ("no mask for a single query",
     (("scores.masked_fill(~mask, -torch.inf)",
       "(scores if len(q) == 1 else scores.masked_fill(~mask, -torch.inf))"),),
     "a single query gets no mask, and therefore no window",
     "which keys does a window hide from a single query?"),
    ("forgets the mask", (("scores.masked_fill(~mask, -torch.inf)", "scores"),),
     "no key is masked: a query also sees those that come after it",
     "where does the mask meet the scores?"),
    ("its own softmax, without the largest score",
     (("    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)",
       "    weights = scores.exp() * mask\n    weights /= weights.sum(-1, keepdim=True)"),),
     "exp of a large score overflows",
     "torch's softmax subtracts the largest score first; do you use it?"),
    ("the window beside a prefix is ignored",
     (("len(k), window)", "len(k), window if len(q) == len(k) else None)"),),
     "the window is ignored when there are more keys than queries",
     "the positions of the queries, in the lines about the window"),
    ("the largest score, hidden or not",
     (("scores.masked_fill(~mask, -torch.inf).softmax(-1)",
       "(scores - scores.amax(-1, keepdim=True)).exp() * mask\n"
       "    weights /= weights.sum(-1, keepdim=True)"),),
     "the largest score is subtracted even if it is hidden: then every exp is 0",
     "mask first, then find the largest score"),
)  # fmt: skip

MISTAKES = {
    "01.1": of(
        "attend_one_query",
        ("no scale", (("len(query) ** -0.5", "1.0"),),
         "the scores are not scaled", "by what is the sum of the products divided?"),
        ("divides by D", (("** -0.5", "** -1"),),
         "the scores are divided by D, not by its square root", "the divisor of the scores"),
        ("divides by D, and exp of the score itself",
         (("** -0.5", "** -1"), ("math.exp(score - top)", "math.exp(score)")),
         "the scores are divided by D, not by its square root; and exp of a large score overflows",
         "the divisor of the scores; then what may be subtracted from every score"),
        ("no scale, and exp of the score itself",
         (("len(query) ** -0.5", "1.0"), ("math.exp(score - top)", "math.exp(score)")),
         "the scores are not scaled; and exp of a large score overflows",
         "by what is the sum of the products divided? Then: what may be subtracted from every "
         "score?"),
        ("exp of the score itself", (("math.exp(score - top)", "math.exp(score)"),),
         "exp of a large score overflows, and if all scores are low, every exp is 0",
         "what may be subtracted from every score without changing a weight?"),
        ("takes off the smallest score", (("max(scores)", "min(scores)"),), *NOT_LARGEST),
        ("takes off the first score", (("max(scores)", "scores[0]"),), *NOT_LARGEST),
        ("the largest score starts at 0", (("max(scores)", "max(0.0, *scores)"),),
         "the search for the largest score starts at 0: if all scores are far below 0, every exp "
         "is 0",
         "what is the largest of the scores -9,990 and -10,000 in your code?"),
        ("the largest product", (("max(scores)", "max(scores) / scale"),),
         "the largest product is subtracted, not the largest score: every exp is 0",
         "subtract the largest of the numbers that go into exp"),
        ("as wide as the query", """
def attend_one_query(query, keys, values):
    scores = [sum(q * k for q, k in zip(query, key)) / len(query) ** 0.5 for key in keys]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    result = [0.0] * len(query)
    for weight, value in zip(weights, values):
        for j in range(len(query)):
            result[j] += weight / sum(weights) * value[j]
    return result
""",
         "the result is as wide as the query, but values need not be as wide as keys",
         "the result has one number for each element of a value"),
        ("weights that are not divided by their sum", ((") / total", ")"),),
         "the weights do not add up to 1", "where is the sum of all exponentials used?"),
        ("largest score off above only",
         (("total = sum(weights)", "total = sum(math.exp(s) for s in scores)"),),
         "the largest score is subtracted in the weights, but not in their sum",
         "where is the sum of all exponentials used?"),
        ("scores as weights", query_with("scores @ v / scores.sum()"),
         "the scores themselves are the weights, without exp", "how does a score become a weight?"),
        ("returns the weights", query_with("scores.softmax(0)"),
         "these are the weights; the result should be the weighted mean of the values",
         "where are `values` used?"),
        ("the best key alone", query_with("v[int(scores.argmax())]"),
         "only the value of the best key is returned",
         "every key has a weight, even if it is a small one"),
        ("scales the query it was given", """
def attend_one_query(query, keys, values):
    for i in range(len(query)):
        query[i] /= math.sqrt(len(query))
    scores = [sum(q * k for q, k in zip(query, key)) for key in keys]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    columns = zip(*values)
    return [sum(w * x for w, x in zip(weights, xs)) / sum(weights) for xs in columns]
""",
         "one of the arguments is modified",
         "which list do you change in place? Make a new one"),
    ),
    "01.2": of(
        "causal_mask",
        ("queries at the first positions", (("num_keys - num_queries, num_keys", "num_queries"),),
         *FIRST_POSITIONS),
        ("does not see itself", (("key <= query", "key < query"),),
         "a query does not see its own position", "`<` or `<=`?"),
        ("upside down comparison", (("key <= query", "key > query"),),
         "True and False are swapped: True means that the query may see the key",
         "the direction of the comparison, or one `~` too many"),
        ("nothing is masked", (("key <= query", "key < query + num_keys"),),
         "keys that come after the query are not masked", "which keys come too late?"),
        ("rows upside down", (("num_keys)[:, None]", "num_keys).flip(0)[:, None]"),),
         "the rows are upside down", "row 0 is the earliest query and sees the fewest keys"),
        ("keys from the other end",
         (("key = torch.arange(num_keys)", "key = torch.arange(num_keys).flip(0)"),),
         "the keys are counted from the wrong end", "column 0 is the oldest key"),
        ("window one too wide", (("key > query - window", "key >= query - window"),),
         "the window is one key too wide: it must include the query's own key",
         "with window=1, a query sees only itself"),
        ("window one too narrow", (("key > query - window", "key > query - window + 1"),),
         "the window is one key too narrow",
         "with window=1, a query still sees itself"),
        ("window ignored", (("mask & (key > query - window)", "mask"),),
         "the window is ignored", "what does a window take away?"),
        ("window ignored by a single query",
         (("window is None", "window is None or num_queries == 1"),),
         "a single query ignores the window and sees every key; a window limits it too",
         "the case of one query: which keys are too old for it?"),
        ("rows and columns swapped",
         (("num_keys)[:, None]", "num_keys)"),
          ("key = torch.arange(num_keys)", "key = torch.arange(num_keys)[:, None]")),
         "rows must be queries and columns keys; here they are swapped",
         "which of the two ranges is the column, with [:, None]?"),
        ("0 and -inf, to be added", """
def causal_mask(num_queries, num_keys, window=None):
    mask = torch.full((num_queries, num_keys), -torch.inf)
    return mask.triu(num_keys - num_queries + 1)
""",
         "the mask holds numbers instead of True and False",
         "a comparison such as `a <= b` already gives bool"),
    ),
    "01.3": of(
        "naive_attention",
        *ATTENTION,
        ("tiles K and V",
         (("k.repeat_interleave(group, dim=1)", "k.repeat(1, group, 1)"),
          ("v.repeat_interleave(group, dim=1)", "v.repeat(1, group, 1)")),
         *TILED),
        ("scale from the number of heads", (("q.shape[-1] ** -0.5", "q.shape[1] ** -0.5"),),
         "the scale is taken from the number of heads", "which dimension of q is head_dim?"),
        ("scale from the number of queries", (("q.shape[-1] ** -0.5", "q.shape[0] ** -0.5"),),
         "the scale is taken from the number of queries", "which dimension of q is head_dim?"),
        ("softmax over the heads", ((".softmax(-1)", ".softmax(0)"),),
         "the softmax runs over the heads, not over the keys",
         "the dimension that softmax is given"),
        ("softmax over the queries", ((".softmax(-1)", ".softmax(1)"),),
         "the softmax runs over the queries, not over the keys",
         "the dimension that softmax is given"),
        ("reshapes where it should transpose",
         (('torch.einsum("htl,lhd->thd", weights, v)',
           'torch.einsum("htl,lhd->htd", weights, v).reshape(q.shape)'),),
         "the numbers are right but in (H, T) order; reshape does not swap dimensions",
         "`transpose` or `reshape`?"),
        ("half precision all the way",
         (("k.repeat_interleave(group, dim=1).float()", "k.repeat_interleave(group, 1)"),
          ("v.repeat_interleave(group, dim=1).float()", "v.repeat_interleave(group, 1)"),
          ("q.float()", "q")),
         *ROUNDED),
        ("half precision in the weights", ((".softmax(-1)", ".softmax(-1).to(q.dtype).float()"),),
         *ROUNDED),
        ("returns float32", ((".to(q.dtype)", ""),),
         "the result is not converted back to q's dtype", "the last line"),
        ("heads first", (('htl,lhd->thd", weights', 'htl,lhd->htd", weights'),),
         "the heads come first in the result; the queries should come first, as in q",
         "the letters of the last einsum, or a transpose at the end"),
        ("scales q in place",
         (("    group =", "    qs = q.float()\n    qs *= q.shape[-1] ** -0.5\n    group ="),
          ("q.float(), k) * q.shape[-1] ** -0.5", "qs, k)")),
         WRITTEN_TO, "which line changes q? `q.float()` of a float32 tensor is q itself"),
    ),
    "01.4": of(
        "grouped_attention",
        ("only the split is fixed",
         (("tkgd,lkd->kgtl", "tgkd,lkd->kgtl"), ("kgtl,lkd->tkgd", "kgtl,lkd->tgkd")),
         "one line names the two head dimensions as (KV head, place in the group), another names "
         "them the other way round; shapes fit only where the two are equal, as in tinypy",
         "every line that names the two head dimensions must name them in the same order"),
        ("the result is joined in the old order", (("kgtl,lkd->tkgd", "kgtl,lkd->tgkd"),),
         "every head is computed correctly, but the heads are returned in the wrong order",
         "the order of the two head dimensions in the result, before they are joined"),
        ("the queries are split in the old order",
         (("(k.shape[1], -1)", "(-1, k.shape[1])"), ("tkgd,lkd->kgtl", "tgkd,lkd->kgtl")),
         "query head h reads KV head h % K, and the heads are returned in the wrong order",
         "where the query heads are split into two dimensions: which is the outer one?"),
        ("tiles K and V instead", """
def grouped_attention(q, k, v, window=None):
    group = q.shape[1] // k.shape[1]
    return naive_attention(q, k.repeat(1, group, 1), v.repeat(1, group, 1), window)
""", *TILED),
        ("calls the oracle", """
def grouped_attention(q, k, v, window=None):
    return naive_attention(q, k, v, window)
""", *COPIED),
        ("copies K and V itself", """
def grouped_attention(q, k, v, window=None):
    heads = torch.arange(q.shape[1]) * k.shape[1] // q.shape[1]
    scores = torch.einsum("thd,lhd->htl", q, k[:, heads]) * q.shape[-1] ** -0.5
    mask = causal_mask(len(q), len(k), window)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, v[:, heads])
""", *COPIED),
        ("scales q in place, through a view",
         (("    q = q.unflatten(1, (k.shape[1], -1)) * q",
           "    q = q.unflatten(1, (k.shape[1], -1))\n    q *= q"),),
         WRITTEN_TO, "`unflatten` returns a view: whose numbers does a `*=` change?"),
        *ATTENTION,
    ),
    "01.5": of(
        "rotate",
        ("turns backwards", (("swapped, sin)", "swapped, -sin)"),),
         "the pairs rotate backwards: there is one minus too many",
         "sin already contains its signs"),
        ("negates the first half once more", """
def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
""",
         "the first half is negated twice, in `sin` and by you; the lengths change",
         "sin already contains its signs"),
        ("pairs neighbours, as the paper writes it", """
def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    cos, sin = cos[..., half:], sin[..., half:]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
""",
         "neighbours are paired, (0, 1), (2, 3), …; the pairs are (i, i + D / 2)",
         "which channel is the partner of channel 0?"),
        ("swaps neighbours", """
def rotate(x, cos, sin):
    return x * cos + x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * sin
""",
         "neighbours are swapped, (0, 1), (2, 3), …; the partners are i and i + D / 2",
         "which channel is the partner of channel 0?"),
        ("adds no partner", (("torch.addcmul(x * cos, swapped, sin)", "x * cos + x * sin"),),
         "there is no swap: every channel meets itself instead of its partner, i + D / 2",
         "which channel is the partner of channel 0?"),
        ("swaps sin and cos", (("x * cos, swapped, sin", "x * sin, swapped, cos"),),
         "sin and cos are swapped: a channel's own value goes with cos",
         "which factor belongs to the channel, and which to its partner?"),
        ("leaves sin out", (("torch.addcmul(x * cos, swapped, sin)", "x * cos"),),
         "the part with sin is missing", "the result is the sum of two products"),
        ("reverses the channels", (("x.roll(x.shape[-1] // 2, -1)", "x.flip(-1)"),),
         "the channels are reversed: 0 is paired with D - 1, 1 with D - 2, …",
         "which channel is the partner of channel 0?"),
        ("rolls the heads", (("x.shape[-1] // 2, -1", "x.shape[1] // 2, 1"),),
         "the heads are swapped, not the halves of each head's channels",
         "which dimension holds the channels?"),
        ("rolls by one", (("x.shape[-1] // 2, -1", "1, -1"),),
         "each channel takes its neighbour's value; the two halves have to be swapped",
         "by how many places do you roll?"),
        ("in place", """
def rotate(x, cos, sin):
    swapped = x.roll(x.shape[-1] // 2, -1)
    x *= cos
    x += swapped * sin
    return x
""",
         "an in-place operation modifies an argument that the caller still needs",
         "`x * cos` makes a new tensor; `x *= cos` and `x[...] =` do not"),
    ),
    "01.6": of(
        "work_of_generation",
        ("every pass has the prompt's length", (("sum(passes),", "prompt_tokens * new_tokens,"),),
         "every pass is counted with the prompt's length, but each has one row more than the one "
         "before", PASSES),
        ("each row once", (('"rows": sum(passes)', '"rows": longest'),),
         "each row is counted once, as if there were a cache", PASSES),
        ("counts a pass with its new token",
         (("range(prompt_tokens, prompt_tokens + new_tokens)",
           "range(prompt_tokens + 1, prompt_tokens + new_tokens + 1)"),),
         "a pass is counted with the token it produces, but it is fed only those before", PASSES),
        ("a pass too many in the rows", (("sum(passes)", "sum(passes) + longest + 1"),),
         "one pass too many: " + LAST_UNFED, PASSES),
        ("a pass too many in the scores",
         (("length in passes)", "length in range(prompt_tokens, longest + 2))"),),
         "one pass too many: " + LAST_UNFED, PASSES),
        ("counts the last new token as a row",
         (('"new rows": longest', '"new rows": longest + 1'),),
         LAST_UNFED, PASSES),
        ("leaves the prompt out", (('"new rows": longest', '"new rows": new_tokens'),),
         NO_PROMPT, PASSES),
        ("leaves the first pass out", (('"new rows": longest', '"new rows": new_tokens - 1'),),
         NO_PROMPT, PASSES),
        ("calls every row new", (('"new rows": longest', '"new rows": sum(passes)'),),
         "rows that an earlier pass has computed are counted too", PASSES),
        ("counts what the mask leaves",
         (("sum(length * length", "sum(length * (length + 1) // 2"),),
         "masked scores are not counted, but naive generation computes them too and throws them "
         "away",
         "does the mask come before or after q · k?"),
        ("a score per row", (("length * length", "length"),),
         "each row is given one score, but it meets every key of its pass", PASSES),
        ("the last pass only",
         (("sum(length * length for length in passes)", "longest * longest"),),
         "only the last pass is counted", PASSES),
        ("the whole square of the first pass",
         (("longest * (longest + 1) // 2", "prompt_tokens**2 + sum(passes[1:])"),),
         "the masked scores of the first pass are counted too",
         "how many scores does its first row need?"),
        ("needs the whole square", (("longest * (longest + 1) // 2", "longest * longest"),),
         "masked scores are counted, but nothing needs them", "the shape of the mask"),
        ("no score with itself",
         (("longest * (longest + 1) // 2", "longest * (longest - 1) // 2"),),
         "a token's score with itself is not counted", "the diagonal of the mask"),
        ("needs the last row of each pass only",
         (("longest * (longest + 1) // 2", "sum(passes)"),),
         "only the last row of each pass is counted; the prompt's other rows need scores too",
         "which rows does the first pass compute?"),
        ("needs the last new token's scores",
         (("longest * (longest + 1) // 2", "(longest + 1) * (longest + 2) // 2"),),
         LAST_UNFED, PASSES),
    ),
}  # fmt: skip
