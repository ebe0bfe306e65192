"""Chapter 02: right solutions written otherwise, and plausible wrong ones."""

from four_ways import Edit, Rewrite

DIFFERENT = {
    # New storage of the right length, filled piece by piece; attention by PyTorch's function.
    "02.1": {
        "": """
def joined(old, new):
    if old is None:
        return new.clone()
    out = new.new_empty(len(old) + len(new), *new.shape[1:])
    out[: len(old)], out[len(old) :] = old, new
    return out
""",
        "ConcatCache.attend": '''
def attend(self, layer, q, k, v):
    """As the reference, without torch.cat."""
    self.k[layer] = joined(self.k[layer], k)
    self.v[layer] = joined(self.v[layer], v)
    num_keys, window = len(self.k[layer]), self.windows[layer]
    distance = torch.arange(num_keys - len(q), num_keys)[:, None] - torch.arange(num_keys)
    visible = (distance >= 0) & (distance < (window or num_keys))
    heads = [x.transpose(0, 1) for x in (q, self.k[layer], self.v[layer])]
    out = F.scaled_dot_product_attention(*heads, attn_mask=visible, enable_gqa=True)
    return out.transpose(0, 1)
''',
    },
    # The model's own loop does the pass; positions come from the cache there, too.
    "02.2": {
        "generate_with_cache": '''
def generate_with_cache(lm, cache, prompt_ids, max_tokens):
    """By `lm.logits`, in two parts."""
    answer = [lm.logits(prompt_ids, cache)[-1].argmax().item()]
    while len(answer) < max_tokens:
        answer.append(lm.logits([answer[-1]], cache)[0].argmax().item())
    return answer
'''
    },
    "02.3": {
        "tokens_written": '''
def tokens_written(prompt_tokens, new_tokens):
    """By counting."""
    lengths = range(prompt_tokens + 1, prompt_tokens + new_tokens)
    return {"in place": prompt_tokens + len(lengths), "concat": sum(lengths)}
'''
    },
    # index_copy_ along the slots; the last layer is asked of the config's windows.
    "02.4": {
        "PreallocatedCache.attend": '''
def attend(self, layer, q, k, v):
    """By slot numbers."""
    slots = self.num_tokens + torch.arange(len(k))
    if len(k) > self.capacity - self.num_tokens:
        raise ValueError(f"{len(k)} tokens, room for {self.capacity - self.num_tokens}")
    self.kv[layer].index_copy_(1, slots, torch.stack([k, v]).to(self.kv.dtype))
    keys, values = self.kv[layer].narrow(1, 0, self.num_tokens + len(k))
    if layer + 1 == len(self.windows):
        self.num_tokens += len(k)
    return naive_attention(q, keys, values, window=self.windows[layer])
'''
    },
    # The causal triangle only where it is square; query by query otherwise.
    "02.5": {
        "fused_attention": '''
def fused_attention(q, k, v):
    """A query at a time: each sees a prefix of the keys, and needs no mask."""
    rows = []
    for i in range(len(q)):
        seen = len(k) - len(q) + i + 1
        heads = [x.transpose(0, 1) for x in (q[i : i + 1], k[:seen], v[:seen])]
        rows.append(F.scaled_dot_product_attention(*heads, enable_gqa=True).transpose(0, 1))
    return torch.cat(rows)
'''
    },
    # Rewinds after the request instead of before it.
    "02.6": {
        "SharedPrefix.logits": '''
def logits(self, request_ids):
    """`lm.logits` takes the positions from the cache."""
    try:
        return self.lm.logits(request_ids, self.cache)
    finally:
        self.cache.num_tokens = self.num_prefix
'''
    },
}

CONCAT = "ConcatCache.attend"
LOOP = "generate_with_cache"
IN_PLACE = "PreallocatedCache.attend"
SHARED = "SharedPrefix.logits"
POSITIONS = "cache.num_tokens + torch.arange(len(fed), device=lm.device)"
REWIND = "self.cache.num_tokens = self.num_prefix  # whatever the request before has left behind"

WRONG = {
    "02.1": (
        Rewrite(
            "attends over the new tokens alone",
            {
                CONCAT: """
def attend(self, layer, q, k, v):
    old_k, old_v = self.k[layer], self.v[layer]
    self.k[layer] = k if old_k is None else torch.cat([old_k, k])
    self.v[layer] = v if old_v is None else torch.cat([old_v, v])
    return naive_attention(q, k, v, self.windows[layer])
"""
            },
            says="what is cached is never looked at",
        ),
        Rewrite(
            "attends before it appends",
            {
                CONCAT: """
def attend(self, layer, q, k, v):
    if self.k[layer] is None:
        self.k[layer], self.v[layer] = k, v
        return naive_attention(q, k, v, self.windows[layer])
    out = naive_attention(q, self.k[layer], self.v[layer], self.windows[layer])
    self.k[layer] = torch.cat([self.k[layer], k])
    self.v[layer] = torch.cat([self.v[layer], v])
    return out
"""
            },
            says="the new tokens' own keys are missing",
        ),
        Edit(
            "new tokens in front",
            {
                CONCAT: (
                    ("[self.k[layer], k]", "[k, self.k[layer]]"),
                    ("[self.v[layer], v]", "[v, self.v[layer]]"),
                )
            },
            says="the new keys stand before the old ones",
        ),
        Rewrite(
            "keeps the first chunk and no more",
            {
                CONCAT: """
def attend(self, layer, q, k, v):
    if self.k[layer] is None:
        self.k[layer], self.v[layer] = k, v
    else:
        k = torch.cat([self.k[layer], k])
        v = torch.cat([self.v[layer], v])
    return naive_attention(q, k, v, self.windows[layer])
"""
            },
            says="what is joined is never kept",
        ),
        Edit(
            "joins along the heads",
            {
                CONCAT: (
                    ("[self.k[layer], k])", "[self.k[layer], k], 1)"),
                    ("[self.v[layer], v])", "[self.v[layer], v], 1)"),
                )
            },
            says="joined along the heads, dimension 1",
        ),
        Edit(
            "forgets the window",
            {CONCAT: (("v, self.windows[layer])", "v)"),)},
            says="the layer's sliding window is not used",
        ),
        Edit(
            "one window for all layers",
            {CONCAT: (("self.windows[layer]", "self.windows[0]"),)},
            says="every layer gets the window of layer 0",
        ),
        Edit(
            "keeps K as V",
            {
                CONCAT: (
                    ("self.k[layer], self.v[layer] = k, v", "self.k[layer], self.v[layer] = v, k"),
                )
            },
            says="K is kept as V, and V as K",
        ),
        Rewrite(
            "one place for all layers",
            {
                CONCAT: """
def attend(self, layer, q, k, v):
    if self.k[-1] is not None:
        k, v = torch.cat([self.k[-1], k]), torch.cat([self.v[-1], v])
    self.k = [k] * len(self.k)
    self.v = [v] * len(self.v)
    return naive_attention(q, k, v, self.windows[layer])
"""
            },
            says="all layers keep their tokens in one place",
        ),
        Rewrite(
            "keeps nothing",
            {
                CONCAT: """
def attend(self, layer, q, k, v):
    return naive_attention(q, k, v, self.windows[layer])
"""
            },
            says="nothing is kept",
        ),
    ),
    "02.2": (
        Edit(
            "feeds everything again",
            {
                LOOP: (
                    ("fed = new_ids[-1:]", "fed = list(prompt_ids) + new_ids"),
                    (POSITIONS, "torch.arange(len(fed), device=lm.device)"),
                )
            },
            says="the whole sequence is fed in every pass",
        ),
        Edit(
            "positions from 0 in every pass",
            {LOOP: ((POSITIONS, "torch.arange(len(fed), device=lm.device)"),)},
            says="in decode the positions begin again at 0",
        ),
        Edit(
            "one position too late",
            {LOOP: ((POSITIONS, f"{POSITIONS} + (1 if new_ids else 0)"),)},
            says="in decode tokens stand one position too late",
        ),
        Edit(
            "one position too early",
            {LOOP: ((POSITIONS, f"{POSITIONS} - (1 if new_ids else 0)"),)},
            says="in decode tokens stand one position too early",
        ),
        Edit(
            "the first row's token",
            {LOOP: (("hidden[-1:]", "hidden[:1]"),)},
            says="the token is taken after the first row of a pass",
        ),
        Edit(
            "feeds the last token",
            {
                LOOP: (
                    ("range(max_tokens)", "range(max_tokens + 1)"),
                    ("return new_ids", "return new_ids[:-1]"),
                )
            },
            says="the last new token is fed, though nobody asks what follows it",
        ),
        Edit(
            "counts from the prompt's own start",
            {
                LOOP: (
                    (
                        "new_ids, fed = [], list(prompt_ids)",
                        "new_ids, fed, n = [], list(prompt_ids), 0",
                    ),
                    (POSITIONS, "n + torch.arange(len(fed), device=lm.device)"),
                    ("fed = new_ids[-1:]", "n, fed = n + len(fed), new_ids[-1:]"),
                )
            },
            says="positions count from the prompt's own start, though the cache is not empty",
        ),
        Edit(
            "returns the prompt, too",
            {LOOP: (("return new_ids", "return list(prompt_ids) + new_ids"),)},
            says="the prompt is returned, too",
        ),
        Rewrite(
            "token by token from the start",
            {
                LOOP: """
def generate_with_cache(lm, cache, prompt_ids, max_tokens):
    for token in prompt_ids:
        logits = lm.logits([token], cache)
    new_ids = [int(logits[-1].argmax())]
    while len(new_ids) < max_tokens:
        new_ids.append(int(lm.logits(new_ids[-1:], cache)[-1].argmax()))
    return new_ids
"""
            },
            says="the prompt is fed token by token",
        ),
        Rewrite(
            "appends to the caller's list",
            {
                LOOP: """
def generate_with_cache(lm, cache, prompt_ids, max_tokens):
    start, fed = len(prompt_ids), prompt_ids
    for _ in range(max_tokens):
        prompt_ids.append(int(lm.logits(fed, cache)[-1].argmax()))
        fed = prompt_ids[-1:]
    return prompt_ids[start:]
"""
            },
            says="the new tokens are appended to the caller's own list",
        ),
        Edit(
            "forgets to return",
            {LOOP: (("return new_ids", "new_ids"),)},
            says="nothing is returned",
        ),
    ),
    "02.3": (
        Edit(
            "a step too many",
            {"tokens_written": (("steps = new_tokens - 1", "steps = new_tokens"),)},
            says="one decode step too many",
        ),
        Edit(
            "only the old tokens",
            {"tokens_written": (("(steps + 1) // 2", "(steps - 1) // 2"),)},
            says="only the old tokens are counted",
        ),
        Edit(
            "the prompt copied, too",
            {
                "tokens_written": (
                    ("steps * prompt_tokens", "prompt_tokens + steps * prompt_tokens"),
                )
            },
            says="the prompt is counted, but it is kept as the model made it",
        ),
        Edit(
            "every step as long as the last",
            {
                "tokens_written": (
                    (
                        "steps * prompt_tokens + steps * (steps + 1) // 2",
                        "steps * (prompt_tokens + steps)",
                    ),
                )
            },
            says="as if it were the last, the longest",
        ),
        Edit(
            "every step as long as the first",
            {
                "tokens_written": (
                    (
                        "steps * prompt_tokens + steps * (steps + 1) // 2",
                        "steps * (prompt_tokens + 1)",
                    ),
                )
            },
            says="as if it were the first, the shortest",
        ),
        Edit(
            "in place without the prompt",
            {"tokens_written": (('"in place": prompt_tokens + steps', '"in place": steps'),)},
            says="the prompt is missing",
        ),
        Edit(
            "in place with the token that is never fed",
            {
                "tokens_written": (
                    ('"in place": prompt_tokens + steps', '"in place": prompt_tokens + new_tokens'),
                )
            },
            says="the last new token is counted, but never fed",
        ),
        Edit(
            "two numbers, not a dict",
            {"tokens_written": (("return {", "return list({"), ("    }", "    }.values())"))},
            says="the keys are not those of the docstring",
        ),
    ),
    "02.4": (
        Edit(
            "every layer counts",
            {
                IN_PLACE: (
                    ("layer == len(self.kv) - 1", "True"),
                    ("self.num_tokens = end", "self.num_tokens += len(k)"),
                )
            },
            says="so they count once a layer",
        ),
        Edit(
            "the first layer counts",
            {IN_PLACE: (("layer == len(self.kv) - 1", "layer == 0"),)},
            says="the first layer counts the tokens",
        ),
        Edit(
            "never counts",
            {IN_PLACE: (("self.num_tokens = end", "pass"),)},
            says="num_tokens never changes",
        ),
        Edit(
            "attends over the whole storage",
            {
                IN_PLACE: (
                    ("self.kv[layer, 0, :end]", "self.kv[layer, 0]"),
                    ("self.kv[layer, 1, :end]", "self.kv[layer, 1]"),
                )
            },
            says="NaN",
        ),
        Edit(
            "attends over the new tokens alone",
            {
                IN_PLACE: (
                    ("self.kv[layer, 0, :end]", "k"),
                    ("self.kv[layer, 1, :end]", "v"),
                )
            },
            says="what is cached is never looked at",
        ),
        Edit(
            "no question of room",
            {
                IN_PLACE: (
                    ("raise ValueError", "print"),
                    ("self.kv[layer, 0, start:end] = k", "self.kv[layer, 0, start:end] = k[:room]"),
                    ("self.kv[layer, 1, start:end] = v", "self.kv[layer, 1, start:end] = v[:room]"),
                    (
                        "start, end = self.num_tokens, self.num_tokens + len(k)",
                        "start, end = self.num_tokens, self.num_tokens + len(k)\n"
                        "    room = self.capacity - start",
                    ),
                )
            },
            says="too many tokens are not refused with a ValueError",
        ),
        Edit(
            "refuses what just fits",
            {IN_PLACE: (("if end > self.capacity", "if end >= self.capacity"),)},
            says="tokens that just fit are refused",
        ),
        Rewrite(
            "writes what it can, then refuses",
            {
                IN_PLACE: """
def attend(self, layer, q, k, v):
    start, end = self.num_tokens, self.num_tokens + len(k)
    room = self.capacity - start
    self.kv[layer, 0, start:end] = k[:room]
    self.kv[layer, 1, start:end] = v[:room]
    if end > self.capacity:
        raise ValueError("full")
    if layer == len(self.kv) - 1:
        self.num_tokens = end
    return naive_attention(
        q, self.kv[layer, 0, :end], self.kv[layer, 1, :end], self.windows[layer]
    )
"""
            },
            says="some of the tokens were written before they were refused",
        ),
        Edit(
            "always from slot 0",
            {
                IN_PLACE: (
                    ("self.kv[layer, 0, start:end] = k", "self.kv[layer, 0, : len(k)] = k"),
                    ("self.kv[layer, 1, start:end] = v", "self.kv[layer, 1, : len(v)] = v"),
                )
            },
            says="the new tokens are written over cached ones",
        ),
        Edit(
            "K where V should be",
            {
                IN_PLACE: (
                    ("self.kv[layer, 0, start:end]", "self.kv[layer, 1, start:end]"),
                    ("self.kv[layer, 1, start:end] = v", "self.kv[layer, 0, start:end] = v"),
                )
            },
            says="K lies where V should, and V where K",
        ),
        Edit(
            "writes K twice",
            {IN_PLACE: (("self.kv[layer, 1, start:end] = v", "self.kv[layer, 1, start:end] = k"),)},
            says="K was written where V belongs, too",
        ),
        Edit(
            "attends over what was there before",
            {
                IN_PLACE: (
                    ("self.kv[layer, 0, :end]", "self.kv[layer, 0, :start]"),
                    ("self.kv[layer, 1, :end]", "self.kv[layer, 1, :start]"),
                )
            },
            says="the new tokens' own keys are missing",
        ),
        Rewrite(
            "refuses in the last layer alone",
            {
                IN_PLACE: """
def attend(self, layer, q, k, v):
    start, end = self.num_tokens, self.num_tokens + len(k)
    room = min(end, self.capacity) - start
    self.kv[layer, 0, start:end], self.kv[layer, 1, start:end] = k[:room], v[:room]
    if layer == len(self.kv) - 1:
        if end > self.capacity:
            raise ValueError("full")
        self.num_tokens = end
    return naive_attention(
        q, self.kv[layer, 0, :end], self.kv[layer, 1, :end], self.windows[layer]
    )
"""
            },
            says="layer 0 was accepted",
        ),
        Edit(
            "the counter is set to the chunk",
            {IN_PLACE: (("self.num_tokens = end", "self.num_tokens = len(k)"),)},
            says="num_tokens is set to the new tokens, not raised by them",
        ),
        Rewrite(
            "a longer tensor in place of the storage",
            {
                IN_PLACE: """
def attend(self, layer, q, k, v):
    start, end = self.num_tokens, self.num_tokens + len(k)
    if end > self.capacity:
        raise ValueError("full")
    new = self.kv.clone()
    new[layer, 0, start:end], new[layer, 1, start:end] = k, v
    self.kv = new
    if layer == len(self.kv) - 1:
        self.num_tokens = end
    return naive_attention(
        q, self.kv[layer, 0, :end], self.kv[layer, 1, :end], self.windows[layer]
    )
"""
            },
            says="a new tensor takes the storage's place",
        ),
    ),
    "02.5": (
        Edit(
            "the triangle only where it is square",
            {
                "fused_attention": (
                    ("    mask = causal_mask(len(q), len(k)).to(q.device)  # (T, L)\n", ""),
                    ("attn_mask=mask", "is_causal=len(q) == len(k)"),
                )
            },
            says="there is no mask: queries see the tokens that come after them",
        ),
        Edit(
            "a rectangle from the wrong corner",
            {
                "fused_attention": (
                    (
                        "causal_mask(len(q), len(k)).to(q.device)",
                        "torch.ones(len(q), len(k), dtype=torch.bool).tril()",
                    ),
                )
            },
            says="the triangle begins in the upper left corner",
        ),
        Edit(
            "the chunk alone",
            {
                "fused_attention": (
                    (
                        "    mask = causal_mask(len(q), len(k)).to(q.device)  # (T, L)\n",
                        "    k, v = k[-len(q) :], v[-len(q) :]\n",
                    ),
                    ("attn_mask=mask", "is_causal=True"),
                )
            },
            says="the prefix is hidden",
        ),
        Edit(
            "upside down",
            {"fused_attention": (("attn_mask=mask", "attn_mask=~mask"),)},
            says="the mask is upside down",
        ),
        Edit(
            "numbers for a mask",
            {"fused_attention": (("attn_mask=mask", "attn_mask=mask.float()"),)},
            says="a float mask is added to the scores",
        ),
        Edit(
            "rows for columns",
            {
                "fused_attention": (
                    (
                        "causal_mask(len(q), len(k)).to(q.device)",
                        "torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q))",
                    ),
                )
            },
            says="the mask is transposed",
        ),
        Edit(
            "one off to the right",
            {
                "fused_attention": (
                    (
                        "causal_mask(len(q), len(k)).to(q.device)",
                        "torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q) + 1)",
                    ),
                )
            },
            says="a query sees one token of its future",
        ),
        Edit(
            "one off to the left",
            {
                "fused_attention": (
                    (
                        "causal_mask(len(q), len(k)).to(q.device)",
                        "torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q) - 1)",
                    ),
                )
            },
            says="a query does not see its own key",
        ),
        Edit(
            "heads repeated in the wrong order",
            {
                "fused_attention": (
                    (
                        "k.transpose(0, 1)",
                        "k.repeat(1, q.shape[1] // k.shape[1], 1).transpose(0, 1)",
                    ),
                    (
                        "v.transpose(0, 1)",
                        "v.repeat(1, q.shape[1] // v.shape[1], 1).transpose(0, 1)",
                    ),
                )
            },
            says="query heads meet the wrong KV heads",
        ),
    ),
    "02.6": (
        Edit(
            "positions mended, the counter not",
            {SHARED: ((f"    {REWIND}\n", ""),)},
            says="what earlier requests left in the cache is seen by this one",
        ),
        Edit(
            "the counter mended, positions not",
            {SHARED: (("self.num_prefix + torch.arange", "torch.arange"),)},
            says="the positions of a request begin again at 0",
        ),
        Edit(
            "the counter set back too far",
            {SHARED: ((REWIND, "self.cache.num_tokens = 0"),)},
            says="the prefix is lost",
        ),
        Edit(
            "positions go on over all requests",
            {
                SHARED: (
                    (
                        f"    {REWIND}\n",
                        "    first = getattr(self, 'first', self.num_prefix)\n"
                        "    self.first = first + len(request_ids)\n"
                        f"    {REWIND}\n",
                    ),
                    ("self.num_prefix + torch.arange", "first + torch.arange"),
                )
            },
            says="positions are counted over all requests",
        ),
        Edit(
            "one position too late",
            {SHARED: (("self.num_prefix + torch", "self.num_prefix + 1 + torch"),)},
            says="the request begins one position too late",
        ),
        Edit(
            "one position too early",
            {SHARED: (("self.num_prefix + torch", "self.num_prefix - 1 + torch"),)},
            says="the request begins one position too early",
        ),
        Rewrite(
            "computes the prefix again",
            {
                "SharedPrefix.__init__": """
def __init__(self, lm, prefix_ids, capacity):
    self.lm, self.prefix_ids = lm, list(prefix_ids)
    self.cache = PreallocatedCache(lm.config, capacity, lm.dtype, lm.device)
""",
                SHARED: """
def logits(self, request_ids):
    self.cache.num_tokens = 0
    return self.lm.logits(self.prefix_ids + request_ids, self.cache)[len(self.prefix_ids) :]
""",
            },
            says="the prefix is computed again for every request",
        ),
    ),
}
