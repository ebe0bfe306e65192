"""Chapter 01: right solutions that are written otherwise than the reference."""

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
