"""Chapter 01: right solutions that are written otherwise, and plausible mistakes."""

from four_ways import Edit, Rewrite

DIFFERENT = {
    "01.1": {
        "attend_one_query": """
def attend_one_query(query, keys, values):
    q, k, v = (np.array(x, dtype=float) for x in (query, keys, values))
    logs = k @ q / np.sqrt(len(q))
    logs = logs - np.logaddexp.reduce(logs)
    return tuple(np.exp(logs) @ v)
""",
        "": "import numpy as np",
    },
    "01.2": {
        "causal_mask": """
def causal_mask(num_queries, num_keys, window=None):
    rows = []
    for i in range(num_queries):
        position = num_keys - num_queries + i
        oldest = 0 if window is None else max(0, position - window + 1)
        rows.append([oldest <= j <= position for j in range(num_keys)])
    return torch.tensor(rows)
""",
    },
    "01.3": {
        "naive_attention": """
def naive_attention(q, k, v, window=None):
    T, H, D = q.shape
    L, K, _ = k.shape
    result = torch.empty(T, H, v.shape[-1], dtype=torch.float64)
    for h in range(H):
        keys = k[:, h * K // H].double()
        values = v[:, h * K // H].double()
        for t in range(T):
            last = L - T + t
            first = 0 if window is None else max(0, last - window + 1)
            scores = keys[first : last + 1] @ q[t, h].double() / D**0.5
            weights = (scores - scores.max()).exp()
            result[t, h] = (weights / weights.sum()) @ values[first : last + 1]
    return result.to(q.dtype)
""",
    },
    "01.4": {
        "grouped_attention": """
def grouped_attention(q, k, v, window=None):
    group = q.shape[1] // k.shape[1]
    mask = causal_mask(len(q), len(k), window)
    heads = []
    for kv_head in range(k.shape[1]):
        mine = q[:, kv_head * group : (kv_head + 1) * group].transpose(0, 1)
        scores = mine @ k[:, kv_head].T / q.shape[-1] ** 0.5
        scores = scores + torch.where(mask, 0.0, -torch.inf)
        heads.append(scores.softmax(-1) @ v[:, kv_head])
    return torch.cat(heads).transpose(0, 1)
""",
    },
    "01.5": {
        "rotate": """
def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    angles = torch.complex(cos[..., half:], sin[..., half:])
    turned = pairs * angles
    return torch.cat([turned.real, turned.imag], -1)
""",
    },
    "01.6": {
        "work_of_generation": """
def work_of_generation(prompt_tokens, new_tokens):
    ids, rows, scores = prompt_tokens, 0, 0
    computed, needed = set(), 0
    for _ in range(new_tokens):
        for row in range(ids):
            if row not in computed:
                needed += row + 1
            computed.add(row)
        rows, scores, ids = rows + ids, scores + ids**2, ids + 1
    return {"new scores": needed, "scores": scores, "new rows": len(computed), "rows": rows}
""",
    },
}

WRONG = {
    "01.1": (
        Edit(
            "no scale",
            {"attend_one_query": (("len(query) ** -0.5", "1.0"),)},
            "the scores are not scaled",
        ),
        Edit(
            "divides by D",
            {"attend_one_query": (("** -0.5", "** -1"),)},
            "divided by D, not by its square root",
        ),
        Edit(
            "exp of the score itself",
            {"attend_one_query": (("math.exp(score - top)", "math.exp(score)"),)},
            "exp of a large score overflows",
        ),
        Edit(
            "takes off the smallest score",
            {"attend_one_query": (("max(scores)", "min(scores)"),)},
            "what is taken off is not the largest score",
        ),
        Edit(
            "takes off the first score",
            {"attend_one_query": (("max(scores)", "scores[0]"),)},
            "so an exponent can still be large",
        ),
        Rewrite(
            "as wide as the query",
            {
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
            "values need not be as wide as keys",
        ),
        Edit(
            "weights that are not divided by their sum",
            {"attend_one_query": ((") / total", ")"),)},
            "the weights don't add up to 1",
        ),
        Edit(
            "largest score off above only",
            {
                "attend_one_query": (
                    ("total = sum(weights)", "total = sum(math.exp(s) for s in scores)"),
                )
            },
            "not in the sum below",
        ),
        Rewrite(
            "returns the weights",
            {
                "attend_one_query": """
def attend_one_query(query, keys, values):
    scores = torch.tensor(keys, dtype=torch.float64) @ torch.tensor(query, dtype=torch.float64)
    return (scores / len(query) ** 0.5).softmax(0).tolist()
"""
            },
            "these are the weights",
        ),
        Rewrite(
            "the best key alone",
            {
                "attend_one_query": """
def attend_one_query(query, keys, values):
    scores = [sum(q * k for q, k in zip(query, key)) for key in keys]
    return values[scores.index(max(scores))]
"""
            },
            "which is a hard choice",
        ),
        Rewrite(
            "scales the query it was given",
            {
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
            "handed in is written to",
        ),
        Rewrite(
            "prints instead of returning",
            {
                "attend_one_query": """
def attend_one_query(query, keys, values):
    print(query)
"""
            },
            "nothing is returned",
        ),
    ),
    "01.2": (
        Edit(
            "queries at the first positions",
            {"causal_mask": (("num_keys - num_queries, num_keys", "num_queries"),)},
            "but they are the last ones",
        ),
        Edit(
            "does not see itself",
            {"causal_mask": (("key <= query", "key < query"),)},
            "does not see its own position",
        ),
        Edit(
            "upside down comparison",
            {"causal_mask": (("key <= query", "key > query"),)},
            "True and False are the wrong way round",
        ),
        Edit(
            "window one too wide",
            {"causal_mask": (("key > query - window", "key >= query - window"),)},
            "one key too wide",
        ),
        Edit(
            "window one too narrow",
            {"causal_mask": (("key > query - window", "key > query - window + 1"),)},
            "one key too narrow",
        ),
        Edit(
            "window ignored",
            {"causal_mask": (("mask & (key > query - window)", "mask"),)},
            "the window is ignored",
        ),
        Edit(
            "rows and columns exchanged",
            {
                "causal_mask": (
                    ("num_keys)[:, None]", "num_keys)"),
                    ("key = torch.arange(num_keys)", "key = torch.arange(num_keys)[:, None]"),
                )
            },
            "they have changed places",
        ),
        Rewrite(
            "0 and -inf, to be added",
            {
                "causal_mask": """
def causal_mask(num_queries, num_keys, window=None):
    mask = torch.full((num_queries, num_keys), -torch.inf)
    return mask.triu(num_keys - num_queries + 1)
"""
            },
            "numbers instead of True and False",
        ),
    ),
    "01.3": (
        Edit(
            "tiles K and V",
            {
                "naive_attention": (
                    ("k.repeat_interleave(group, dim=1)", "k.repeat(1, group, 1)"),
                    ("v.repeat_interleave(group, dim=1)", "v.repeat(1, group, 1)"),
                )
            },
            "as if the KV heads were tiled",
        ),
        Edit(
            "no scale",
            {"naive_attention": ((" * q.shape[-1] ** -0.5", ""),)},
            "the scores are not scaled",
        ),
        Edit(
            "divides by head_dim",
            {"naive_attention": (("** -0.5", "** -1"),)},
            "divided by head_dim, not by its square root",
        ),
        Edit(
            "scale from the number of heads",
            {"naive_attention": (("q.shape[-1] ** -0.5", "q.shape[1] ** -0.5"),)},
            "the scale is taken from the number of heads",
        ),
        Edit(
            "softmax over the heads",
            {"naive_attention": ((".softmax(-1)", ".softmax(0)"),)},
            "the softmax runs over the heads",
        ),
        Edit(
            "softmax over the queries",
            {"naive_attention": ((".softmax(-1)", ".softmax(1)"),)},
            "the softmax runs over the queries",
        ),
        Edit(
            "masks what may be seen",
            {"naive_attention": (("masked_fill(~mask", "masked_fill(mask"),)},
            "the keys that may be seen get -inf",
        ),
        Edit(
            "masks after the softmax",
            {
                "naive_attention": (
                    (
                        "scores.masked_fill(~mask, -torch.inf).softmax(-1)",
                        "scores.softmax(-1).masked_fill(~mask, 0)",
                    ),
                )
            },
            "the mask comes after the softmax",
        ),
        Edit(
            "hides with 0",
            {"naive_attention": (("~mask, -torch.inf", "~mask, 0"),)},
            "and exp(0) is 1",
        ),
        Edit(
            "hides with a finite number",
            {"naive_attention": (("~mask, -torch.inf", "~mask, -1e4"),)},
            "a finite number in place of -inf",
        ),
        Edit(
            "reshapes where it should transpose",
            {
                "naive_attention": (
                    (
                        'torch.einsum("htl,lhd->thd", weights, v)',
                        'torch.einsum("htl,lhd->htd", weights, v).reshape(q.shape)',
                    ),
                )
            },
            "reshape does not exchange dimensions",
        ),
        Edit(
            "square mask",
            {
                "naive_attention": (
                    (
                        "causal_mask(len(q), len(k), window)",
                        "torch.ones(len(q), len(k), dtype=torch.bool).tril()",
                    ),
                )
            },
            "but they are the last ones",
        ),
        Edit(
            "forgets the window",
            {"naive_attention": (("len(k), window)", "len(k))"),)},
            "the window is ignored",
        ),
        Edit(
            "forgets the mask",
            {"naive_attention": (("scores.masked_fill(~mask, -torch.inf)", "scores"),)},
            "no key is masked",
        ),
        Edit(
            "half precision all the way",
            {
                "naive_attention": (
                    ("k.repeat_interleave(group, dim=1).float()", "k.repeat_interleave(group, 1)"),
                    ("v.repeat_interleave(group, dim=1).float()", "v.repeat_interleave(group, 1)"),
                    ("q.float()", "q"),
                )
            },
            "rounded to half precision on the way",
        ),
        Edit(
            "returns float32",
            {"naive_attention": ((".to(q.dtype)", ""),)},
            "not turned back into q's dtype",
        ),
        Edit(
            "heads first",
            {"naive_attention": (('htl,lhd->thd", weights', 'htl,lhd->htd", weights'),)},
            "the heads come first in the result",
        ),
        Rewrite(
            "its own softmax, without the largest score",
            {
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
            "exp of a large score overflows",
        ),
        Rewrite(
            "scales q in place",
            {
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
            "wrote to an argument",
        ),
    ),
    "01.4": (
        Rewrite(
            "only the split is mended",
            {
                "grouped_attention": """
def grouped_attention(q, k, v, window=None):
    mask = causal_mask(len(q), len(k), window)
    q = q.unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
    scores = torch.einsum("tgkd,lkd->kgtl", q, k)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("kgtl,lkd->tgkd", weights, v).flatten(1, 2)
"""
            },
            "two dimensions that are equally long in tinypy alone",
        ),
        Edit(
            "the result is joined in the old order",
            {"grouped_attention": (("kgtl,lkd->tkgd", "kgtl,lkd->tgkd"),)},
            "every head is computed right, but the heads are returned in another order",
        ),
        Edit(
            "the queries are split in the old order",
            {
                "grouped_attention": (
                    ("(k.shape[1], -1)", "(-1, k.shape[1])"),
                    ("tkgd,lkd->kgtl", "tgkd,lkd->kgtl"),
                )
            },
            "reads KV head h % K, and the heads are returned in another order",
        ),
        Rewrite(
            "tiles K and V instead",
            {
                "grouped_attention": """
def grouped_attention(q, k, v, window=None):
    group = q.shape[1] // k.shape[1]
    return naive_attention(q, k.repeat(1, group, 1), v.repeat(1, group, 1), window)
"""
            },
            "as if the KV heads were tiled",
        ),
        Rewrite(
            "calls the oracle",
            {
                "grouped_attention": """
def grouped_attention(q, k, v, window=None):
    return naive_attention(q, k, v, window)
"""
            },
            "K and V are copied",
        ),
        Rewrite(
            "copies K and V itself",
            {
                "grouped_attention": """
def grouped_attention(q, k, v, window=None):
    heads = torch.arange(q.shape[1]) * k.shape[1] // q.shape[1]
    scores = torch.einsum("thd,lhd->htl", q, k[:, heads]) * q.shape[-1] ** -0.5
    mask = causal_mask(len(q), len(k), window)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, v[:, heads])
"""
            },
            "the exercise is to do without",
        ),
        Edit(
            "loses the scale while mending",
            {"grouped_attention": ((" * q.shape[-1] ** -0.5", ""),)},
            "the scores are not scaled",
        ),
    ),
    "01.5": (
        Edit(
            "turns backwards",
            {
                "rotate": (
                    (
                        "torch.addcmul(x * cos, swapped, sin)",
                        "torch.addcmul(x * cos, swapped, -sin)",
                    ),
                )
            },
            "the pairs turn the other way round",
        ),
        Rewrite(
            "negates the first half once more",
            {
                "rotate": """
def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
"""
            },
            "the first half is negated twice",
        ),
        Rewrite(
            "pairs neighbours, as the paper writes it",
            {
                "rotate": """
def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    cos, sin = cos[..., half:], sin[..., half:]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
"""
            },
            "neighbours are paired",
        ),
        Edit(
            "adds no partner",
            {"rotate": (("torch.addcmul(x * cos, swapped, sin)", "x * cos + x * sin"),)},
            "no swap: every channel meets itself",
        ),
        Edit(
            "exchanges sin and cos",
            {"rotate": (("x * cos, swapped, sin", "x * sin, swapped, cos"),)},
            "sin and cos are exchanged",
        ),
        Rewrite(
            "reverses the channels",
            {
                "rotate": """
def rotate(x, cos, sin):
    return x * cos + x.flip(-1) * sin
"""
            },
            "the channels are reversed",
        ),
        Edit(
            "rolls the heads",
            {"rotate": (("x.shape[-1] // 2, -1", "x.shape[1] // 2, 1"),)},
            "the heads change places",
        ),
        Edit(
            "rolls by one",
            {"rotate": (("x.shape[-1] // 2, -1", "1, -1"),)},
            "each channel takes its neighbour's value",
        ),
        Rewrite(
            "in place",
            {
                "rotate": """
def rotate(x, cos, sin):
    swapped = x.roll(x.shape[-1] // 2, -1)
    x *= cos
    x += swapped * sin
    return x
"""
            },
            "an operation in place wrote to x",
        ),
    ),
    "01.6": (
        Edit(
            "every pass has the prompt's length",
            {"work_of_generation": (("sum(passes),", "prompt_tokens * new_tokens,"),)},
            "every pass is as long as the prompt here",
        ),
        Edit(
            "counts a pass with its new token",
            {
                "work_of_generation": (
                    (
                        "range(prompt_tokens, prompt_tokens + new_tokens)",
                        "range(prompt_tokens + 1, prompt_tokens + new_tokens + 1)",
                    ),
                )
            },
            "a pass is counted with the token it gives",
        ),
        Edit(
            "a pass too many in the scores",
            {
                "work_of_generation": (
                    ("length in passes)", "length in range(prompt_tokens, longest + 2))"),
                )
            },
            "one pass too many",
        ),
        Edit(
            "the whole square of the first pass",
            {
                "work_of_generation": (
                    ("longest * (longest + 1) // 2", "prompt_tokens**2 + sum(passes[1:])"),
                )
            },
            "the masked ones of the first pass are counted",
        ),
        Edit(
            "counts the last new token as a row",
            {"work_of_generation": (('"new rows": longest', '"new rows": longest + 1'),)},
            "the last new token is counted",
        ),
        Edit(
            "leaves the prompt out",
            {"work_of_generation": (('"new rows": longest', '"new rows": new_tokens'),)},
            "the rows of the prompt are left out",
        ),
        Edit(
            "counts what the mask leaves",
            {"work_of_generation": (("sum(length * length", "sum(length * (length + 1) // 2"),)},
            "only what the mask leaves is counted",
        ),
        Edit(
            "needs the whole square",
            {"work_of_generation": (("longest * (longest + 1) // 2", "longest * longest"),)},
            "what is masked is counted",
        ),
        Edit(
            "needs the last row of each pass only",
            {"work_of_generation": (("longest * (longest + 1) // 2", "sum(passes)"),)},
            "the last row of each pass is counted",
        ),
    ),
}
