"""Chapter 01: mistakes that a reader may make, each as a wrong solution."""

from minikv.course.harness.mistakes import Mistake

MISTAKES = {
    "01.1": (
        Mistake(
            "no scale",
            edits={"attend_one_query": (("len(query) ** -0.5", "1.0"),)},
            cause="the scores are not scaled",
            look="what is the sum of the products divided by?",
        ),
        Mistake(
            "divides by D",
            edits={"attend_one_query": (("** -0.5", "** -1"),)},
            cause="the scores are divided by D, not by its square root",
            look="the divisor of the scores",
        ),
        Mistake(
            "exp of the score itself",
            edits={"attend_one_query": (("math.exp(score - top)", "math.exp(score)"),)},
            cause="exp of a large score overflows, and exp of small ones is 0 for all of them",
            look="what may be taken off every score without changing a weight?",
        ),
        Mistake(
            "takes off the smallest score",
            edits={"attend_one_query": (("max(scores)", "min(scores)"),)},
            cause="what is taken off is not the largest score, so an exponent can still be large",
            look="which score has to be taken off so that no exponent is above 0?",
        ),
        Mistake(
            "takes off the first score",
            edits={"attend_one_query": (("max(scores)", "scores[0]"),)},
            cause="what is taken off is not the largest score, so an exponent can still be large",
            look="which score has to be taken off so that no exponent is above 0?",
        ),
        Mistake(
            "as wide as the query",
            sources={
                "attend_one_query": """
def attend_one_query(query, keys, values):
    scores = [sum(q * k for q, k in zip(query, key)) / len(query) ** 0.5 for key in keys]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    result = [0.0] * len(query)
    for weight, value in zip(weights, values):
        for j in range(len(query)):
            result[j] += weight / sum(weights) * value[j]
    return result
"""
            },
            cause="the result is as wide as the query; values need not be as wide as keys",
            look="one number for each place of a value",
        ),
        Mistake(
            "weights that are not divided by their sum",
            edits={"attend_one_query": ((") / total", ")"),)},
            cause="the weights don't add up to 1",
            look="where is the sum of all exponentials used?",
        ),
        Mistake(
            "largest score off above only",
            edits={
                "attend_one_query": (
                    ("total = sum(weights)", "total = sum(math.exp(s) for s in scores)"),
                )
            },
            cause="the largest score is taken off above, but not in the sum below",
            look="where is the sum of all exponentials used?",
        ),
        Mistake(
            "returns the weights",
            sources={
                "attend_one_query": """
def attend_one_query(query, keys, values):
    scores = torch.tensor(keys, dtype=torch.float64) @ torch.tensor(query, dtype=torch.float64)
    return (scores / len(query) ** 0.5).softmax(0).tolist()
"""
            },
            cause="these are the weights; the weighted mean of the values is asked for",
            look="what is done with `values`?",
        ),
        Mistake(
            "the best key alone",
            sources={
                "attend_one_query": """
def attend_one_query(query, keys, values):
    scores = [sum(q * k for q, k in zip(query, key)) for key in keys]
    return values[scores.index(max(scores))]
"""
            },
            cause="only the best key's value is returned, which is a hard choice",
            look="every key has a weight, the small ones too",
        ),
        Mistake(
            "scales the query it was given",
            sources={
                "attend_one_query": """
def attend_one_query(query, keys, values):
    for i in range(len(query)):
        query[i] /= math.sqrt(len(query))
    scores = [sum(q * k for q, k in zip(query, key)) for key in keys]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    columns = zip(*values)
    return [sum(w * x for w, x in zip(weights, xs)) / sum(weights) for xs in columns]
"""
            },
            cause="one of the lists that were handed in is written to",
            look="which list do you change in place? Make a new one",
        ),
        Mistake(
            "prints instead of returning",
            sources={
                "attend_one_query": """
def attend_one_query(query, keys, values):
    print(query)
"""
            },
            cause="nothing is returned",
            look="what stands after `return`? One number for each place of a value",
        ),
    ),
    "01.2": (
        Mistake(
            "queries at the first positions",
            edits={"causal_mask": (("num_keys - num_queries, num_keys", "num_queries"),)},
            cause="the queries are taken to stand at the first positions, but they are the last "
            "ones",
            look="the position of query 0 when there are more keys than queries",
        ),
        Mistake(
            "does not see itself",
            edits={"causal_mask": (("key <= query", "key < query"),)},
            cause="a query does not see its own position",
            look="`<` or `<=`?",
        ),
        Mistake(
            "upside down comparison",
            edits={"causal_mask": (("key <= query", "key > query"),)},
            cause="True and False are the wrong way round: True means that the query may see the "
            "key",
            look="the direction of the comparison, or a `~` too many",
        ),
        Mistake(
            "window one too wide",
            edits={"causal_mask": (("key > query - window", "key >= query - window"),)},
            cause="the window is one key too wide: it counts a query's own position, too",
            look="with window=1 a query sees itself alone",
        ),
        Mistake(
            "window one too narrow",
            edits={"causal_mask": (("key > query - window", "key > query - window + 1"),)},
            cause="the window is one key too narrow",
            look="with window=1 a query sees itself",
        ),
        Mistake(
            "window ignored",
            edits={"causal_mask": (("mask & (key > query - window)", "mask"),)},
            cause="the window is ignored",
            look="what does a window take away?",
        ),
        Mistake(
            "rows and columns exchanged",
            edits={
                "causal_mask": (
                    ("num_keys)[:, None]", "num_keys)"),
                    ("key = torch.arange(num_keys)", "key = torch.arange(num_keys)[:, None]"),
                )
            },
            cause="rows are queries and columns are keys; here they have changed places",
            look="which of the two ranges stands upright, [:, None]?",
        ),
        Mistake(
            "0 and -inf, to be added",
            sources={
                "causal_mask": """
def causal_mask(num_queries, num_keys, window=None):
    mask = torch.full((num_queries, num_keys), -torch.inf)
    return mask.triu(num_keys - num_queries + 1)
"""
            },
            cause="the mask holds numbers instead of True and False",
            look="a comparison such as `a <= b` gives bool already",
        ),
    ),
    "01.3": (
        Mistake(
            "tiles K and V",
            edits={
                "naive_attention": (
                    ("k.repeat_interleave(group, dim=1)", "k.repeat(1, group, 1)"),
                    ("v.repeat_interleave(group, dim=1)", "v.repeat(1, group, 1)"),
                )
            },
            cause="query head h reads KV head h % K, as if the KV heads were tiled 0, 1, 0, 1; a "
            "group is made of neighbours: 0, 0, 1, 1",
            look="`repeat` or `repeat_interleave`? Where the query heads are split in two "
            "dimensions: which of the two, KV head or place in the group, is the outer one?",
        ),
        Mistake(
            "no scale",
            edits={"naive_attention": ((" * q.shape[-1] ** -0.5", ""),)},
            cause="the scores are not scaled",
            look="where is 1 / sqrt(head_dim)?",
        ),
        Mistake(
            "divides by head_dim",
            edits={"naive_attention": (("** -0.5", "** -1"),)},
            cause="the scores are divided by head_dim, not by its square root",
            look="the factor beside q · k",
        ),
        Mistake(
            "scale from the number of heads",
            edits={"naive_attention": (("q.shape[-1] ** -0.5", "q.shape[1] ** -0.5"),)},
            cause="the scale is taken from the number of heads",
            look="which dimension of q is head_dim?",
        ),
        Mistake(
            "softmax over the heads",
            edits={"naive_attention": ((".softmax(-1)", ".softmax(0)"),)},
            cause="the softmax runs over the heads, not over the keys",
            look="the dimension that softmax is given",
        ),
        Mistake(
            "softmax over the queries",
            edits={"naive_attention": ((".softmax(-1)", ".softmax(1)"),)},
            cause="the softmax runs over the queries, not over the keys",
            look="the dimension that softmax is given",
        ),
        Mistake(
            "masks what may be seen",
            edits={"naive_attention": (("masked_fill(~mask", "masked_fill(mask"),)},
            cause="the keys that may be seen get -inf, and the others don't",
            look="True in the mask means: may be seen",
        ),
        Mistake(
            "masks after the softmax",
            edits={
                "naive_attention": (
                    (
                        "scores.masked_fill(~mask, -torch.inf).softmax(-1)",
                        "scores.softmax(-1).masked_fill(~mask, 0)",
                    ),
                )
            },
            cause="the mask comes after the softmax, so the weights of a row don't add up to 1",
            look="-inf into the scores before the softmax, instead of 0 into the weights after it",
        ),
        Mistake(
            "hides with 0",
            edits={"naive_attention": (("~mask, -torch.inf", "~mask, 0"),)},
            cause="the hidden scores become 0, and exp(0) is 1: these keys keep a weight",
            look="which score has the exponential 0?",
        ),
        Mistake(
            "hides with a finite number",
            edits={"naive_attention": (("~mask, -torch.inf", "~mask, -1e4"),)},
            cause="a finite number in place of -inf, and the scores in sight are lower still",
            look="what do the hidden scores become before the softmax?",
        ),
        Mistake(
            "reshapes where it should transpose",
            edits={
                "naive_attention": (
                    (
                        'torch.einsum("htl,lhd->thd", weights, v)',
                        'torch.einsum("htl,lhd->htd", weights, v).reshape(q.shape)',
                    ),
                )
            },
            cause="the numbers are right but stand in (H, T) order; reshape does not exchange "
            "dimensions",
            look="`transpose` or `reshape`?",
        ),
        Mistake(
            "square mask",
            edits={
                "naive_attention": (
                    (
                        "causal_mask(len(q), len(k), window)",
                        "torch.ones(len(q), len(k), dtype=torch.bool).tril()",
                    ),
                )
            },
            cause="the queries are taken to stand at the first positions, but they are the last "
            "ones",
            look="the position of query 0 when there are more keys than queries",
        ),
        Mistake(
            "forgets the window",
            edits={"naive_attention": (("len(k), window)", "len(k))"),)},
            cause="the window is ignored",
            look="the third argument of causal_mask",
        ),
        Mistake(
            "forgets the mask",
            edits={"naive_attention": (("scores.masked_fill(~mask, -torch.inf)", "scores"),)},
            cause="no key is masked: a query also sees those that come after it",
            look="where does the mask meet the scores?",
        ),
        Mistake(
            "half precision all the way",
            edits={
                "naive_attention": (
                    ("k.repeat_interleave(group, dim=1).float()", "k.repeat_interleave(group, 1)"),
                    ("v.repeat_interleave(group, dim=1).float()", "v.repeat_interleave(group, 1)"),
                    ("q.float()", "q"),
                )
            },
            cause="the products or the softmax are rounded to half precision on the way",
            look="q, k and v to float32 first, the result to q's dtype at the very end",
        ),
        Mistake(
            "returns float32",
            edits={"naive_attention": ((".to(q.dtype)", ""),)},
            cause="the result is not turned back into q's dtype",
            look="the last line",
        ),
        Mistake(
            "heads first",
            edits={"naive_attention": (('htl,lhd->thd", weights', 'htl,lhd->htd", weights'),)},
            cause="the heads come first in the result; the queries come first, as in q",
            look="the letters of the last einsum, or a transpose at the end",
        ),
        Mistake(
            "its own softmax, without the largest score",
            sources={
                "naive_attention": """
def naive_attention(q, k, v, window=None):
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1).float()
    v = v.repeat_interleave(group, dim=1).float()
    scores = torch.einsum("thd,lhd->htl", q.float(), k) * q.shape[-1] ** -0.5
    weights = scores.exp() * causal_mask(len(q), len(k), window)
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("htl,lhd->thd", weights, v).to(q.dtype)
"""
            },
            cause="exp of a large score overflows",
            look="torch's softmax takes the largest score off first; do you use it?",
        ),
        Mistake(
            "scales q in place",
            sources={
                "naive_attention": """
def naive_attention(q, k, v, window=None):
    group = q.shape[1] // k.shape[1]
    dtype = q.dtype
    k = k.repeat_interleave(group, dim=1).float()
    v = v.repeat_interleave(group, dim=1).float()
    q = q.float()
    q *= q.shape[-1] ** -0.5
    scores = torch.einsum("thd,lhd->htl", q, k)
    mask = causal_mask(len(q), len(k), window)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, v).to(dtype)
"""
            },
            cause="an operation in place, such as `*=` or `masked_fill_`, wrote to an argument",
            look="which line changes q?",
        ),
    ),
    "01.4": (
        Mistake(
            "only the split is mended",
            sources={
                "grouped_attention": """
def grouped_attention(q, k, v, window=None):
    mask = causal_mask(len(q), len(k), window)
    q = q.unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
    scores = torch.einsum("tgkd,lkd->kgtl", q, k)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("kgtl,lkd->tgkd", weights, v).flatten(1, 2)
"""
            },
            cause="KV heads meet places in the group, two dimensions that are equally long in "
            "tinypy alone",
            look="every line that names the two head dimensions has to name them in the same order",
        ),
        Mistake(
            "the result is joined in the old order",
            edits={"grouped_attention": (("kgtl,lkd->tkgd", "kgtl,lkd->tgkd"),)},
            cause="every head is computed right, but the heads are returned in another order",
            look="the order of the two head dimensions in the result, before they are joined",
        ),
        Mistake(
            "the queries are split in the old order",
            edits={
                "grouped_attention": (
                    ("(k.shape[1], -1)", "(-1, k.shape[1])"),
                    ("tkgd,lkd->kgtl", "tgkd,lkd->kgtl"),
                )
            },
            cause="query head h reads KV head h % K, and the heads are returned in another order",
            look="where the query heads are split in two dimensions: which one is the outer one?",
        ),
        Mistake(
            "tiles K and V instead",
            sources={
                "grouped_attention": """
def grouped_attention(q, k, v, window=None):
    group = q.shape[1] // k.shape[1]
    return naive_attention(q, k.repeat(1, group, 1), v.repeat(1, group, 1), window)
"""
            },
            cause="query head h reads KV head h % K, as if the KV heads were tiled 0, 1, 0, 1; a "
            "group is made of neighbours: 0, 0, 1, 1",
            look="`repeat` or `repeat_interleave`? Where the query heads are split in two "
            "dimensions: which of the two, KV head or place in the group, is the outer one?",
        ),
        Mistake(
            "calls the oracle",
            sources={
                "grouped_attention": """
def grouped_attention(q, k, v, window=None):
    return naive_attention(q, k, v, window)
"""
            },
            cause="K and V are copied; the exercise is to do without",
            look="the line that gives every query head its own K or V, here or in a call",
        ),
        Mistake(
            "copies K and V itself",
            sources={
                "grouped_attention": """
def grouped_attention(q, k, v, window=None):
    heads = torch.arange(q.shape[1]) * k.shape[1] // q.shape[1]
    scores = torch.einsum("thd,lhd->htl", q, k[:, heads]) * q.shape[-1] ** -0.5
    mask = causal_mask(len(q), len(k), window)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, v[:, heads])
"""
            },
            cause="K and V are copied; the exercise is to do without",
            look="the line that gives every query head its own K or V, here or in a call",
        ),
        Mistake(
            "loses the scale while mending",
            edits={"grouped_attention": ((" * q.shape[-1] ** -0.5", ""),)},
            cause="the scores are not scaled",
            look="where is 1 / sqrt(head_dim)?",
        ),
    ),
    "01.5": (
        Mistake(
            "turns backwards",
            edits={
                "rotate": (
                    (
                        "torch.addcmul(x * cos, swapped, sin)",
                        "torch.addcmul(x * cos, swapped, -sin)",
                    ),
                )
            },
            cause="the pairs turn the other way round: a minus too many",
            look="sin comes with its signs already in it",
        ),
        Mistake(
            "negates the first half once more",
            sources={
                "rotate": """
def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
"""
            },
            cause="the first half is negated twice, in `sin` and by you, or not at all; lengths "
            "change",
            look="sin comes with its signs already in it",
        ),
        Mistake(
            "pairs neighbours, as the paper writes it",
            sources={
                "rotate": """
def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    cos, sin = cos[..., half:], sin[..., half:]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
"""
            },
            cause="neighbours are paired, (0, 1), (2, 3), …; the pairs are (i, i + D / 2)",
            look="which channel changes places with channel 0?",
        ),
        Mistake(
            "adds no partner",
            edits={"rotate": (("torch.addcmul(x * cos, swapped, sin)", "x * cos + x * sin"),)},
            cause="no swap: every channel meets itself; its partner i + D/2 is missing",
            look="which channel changes places with channel 0?",
        ),
        Mistake(
            "exchanges sin and cos",
            edits={"rotate": (("x * cos, swapped, sin", "x * sin, swapped, cos"),)},
            cause="sin and cos are exchanged: a channel's own value goes with cos",
            look="which factor belongs to the channel, which to its partner?",
        ),
        Mistake(
            "reverses the channels",
            sources={
                "rotate": """
def rotate(x, cos, sin):
    return x * cos + x.flip(-1) * sin
"""
            },
            cause="the channels are reversed: 0 is paired with D - 1, 1 with D - 2, …",
            look="which channel changes places with channel 0?",
        ),
        Mistake(
            "rolls the heads",
            edits={"rotate": (("x.shape[-1] // 2, -1", "x.shape[1] // 2, 1"),)},
            cause="the heads change places, not the halves of each head's channels",
            look="which dimension is the last one?",
        ),
        Mistake(
            "rolls by one",
            edits={"rotate": (("x.shape[-1] // 2, -1", "1, -1"),)},
            cause="each channel takes its neighbour's value; whole halves have to change places",
            look="by how many places do you roll?",
        ),
        Mistake(
            "in place",
            sources={
                "rotate": """
def rotate(x, cos, sin):
    swapped = x.roll(x.shape[-1] // 2, -1)
    x *= cos
    x += swapped * sin
    return x
"""
            },
            cause="an operation in place wrote to x, which the caller still needs",
            look="`x * cos` makes a new tensor; `x *= cos` and `x[...] =` don't",
        ),
    ),
    "01.6": (
        Mistake(
            "every pass has the prompt's length",
            edits={"work_of_generation": (("sum(passes),", "prompt_tokens * new_tokens,"),)},
            cause="every pass is as long as the prompt here, but they grow",
            look="how many rows does each pass have? Write them down for a prompt of 2 and 3 new "
            "tokens",
        ),
        Mistake(
            "counts a pass with its new token",
            edits={
                "work_of_generation": (
                    (
                        "range(prompt_tokens, prompt_tokens + new_tokens)",
                        "range(prompt_tokens + 1, prompt_tokens + new_tokens + 1)",
                    ),
                )
            },
            cause="a pass is counted with the token it gives; it is fed only those before",
            look="how many rows does each pass have? Write them down for a prompt of 2 and 3 new "
            "tokens",
        ),
        Mistake(
            "a pass too many in the scores",
            edits={
                "work_of_generation": (
                    ("length in passes)", "length in range(prompt_tokens, longest + 2))"),
                )
            },
            cause="one pass too many: the last new token is counted, but it is never fed",
            look="how many rows does each pass have? Write them down for a prompt of 2 and 3 new "
            "tokens",
        ),
        Mistake(
            "the whole square of the first pass",
            edits={
                "work_of_generation": (
                    ("longest * (longest + 1) // 2", "prompt_tokens**2 + sum(passes[1:])"),
                )
            },
            cause="the masked ones of the first pass are counted",
            look="how many does its first row need?",
        ),
        Mistake(
            "counts the last new token as a row",
            edits={"work_of_generation": (('"new rows": longest', '"new rows": longest + 1'),)},
            cause="the last new token is counted, but it is never fed",
            look="how many rows does each pass have? Write them down for a prompt of 2 and 3 new "
            "tokens",
        ),
        Mistake(
            "leaves the prompt out",
            edits={"work_of_generation": (('"new rows": longest', '"new rows": new_tokens'),)},
            cause="the rows of the prompt are left out; in the first pass they are new",
            look="how many rows does each pass have? Write them down for a prompt of 2 and 3 new "
            "tokens",
        ),
        Mistake(
            "counts what the mask leaves",
            edits={
                "work_of_generation": (("sum(length * length", "sum(length * (length + 1) // 2"),)
            },
            cause="only what the mask leaves is counted; the rest is computed, too, and thrown "
            "away",
            look="does the mask come before or after q · k?",
        ),
        Mistake(
            "needs the whole square",
            edits={"work_of_generation": (("longest * (longest + 1) // 2", "longest * longest"),)},
            cause="what is masked is counted; nothing needs it",
            look="the shape of the mask",
        ),
        Mistake(
            "needs the last row of each pass only",
            edits={"work_of_generation": (("longest * (longest + 1) // 2", "sum(passes)"),)},
            cause="the last row of each pass is counted; the prompt's other rows need scores, too",
            look="which rows does the first pass compute?",
        ),
    ),
}
