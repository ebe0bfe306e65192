"""Chapter 02: mistakes that a reader may make, each as a wrong solution."""

from minikv.course.harness.mistakes import Mistake

CONCAT = "ConcatCache.attend"
LOOP = "generate_with_cache"
IN_PLACE = "PreallocatedCache.attend"
SHARED = "SharedPrefix.logits"
POSITIONS = "cache.num_tokens + torch.arange(len(fed), device=lm.device)"
REWIND = "self.cache.num_tokens = self.num_prefix  # whatever the request before has left behind"

MISTAKES = {
    "02.1": (
        Mistake(
            "attends over the new tokens alone",
            sources={
                CONCAT: """
def attend(self, layer, q, k, v):
    old_k, old_v = self.k[layer], self.v[layer]
    self.k[layer] = k if old_k is None else torch.cat([old_k, k])
    self.v[layer] = v if old_v is None else torch.cat([old_v, v])
    return naive_attention(q, k, v, self.windows[layer])
"""
            },
            cause="the new queries see only the new keys: what is cached is never looked at",
            look="over which k and v is attention computed? And is anything kept?",
        ),
        Mistake(
            "attends before it appends",
            sources={
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
            cause="the new tokens' own keys are missing: a query has to see its own position, too",
            look="is attention computed over the tokens of this call as well?",
        ),
        Mistake(
            "new tokens in front",
            edits={
                CONCAT: (
                    ("[self.k[layer], k]", "[k, self.k[layer]]"),
                    ("[self.v[layer], v]", "[v, self.v[layer]]"),
                )
            },
            cause="the new keys stand before the old ones",
            look="the order in which old and new are joined",
        ),
        Mistake(
            "keeps the first chunk and no more",
            sources={
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
            cause="what is joined is never kept: the next call finds the first chunk alone",
            look="what is `self.k[layer]` after the second call?",
        ),
        Mistake(
            "joins along the heads",
            edits={
                CONCAT: (
                    ("[self.k[layer], k])", "[self.k[layer], k], 1)"),
                    ("[self.v[layer], v])", "[self.v[layer], v], 1)"),
                )
            },
            cause="joined along the heads, dimension 1, not along the tokens, dimension 0",
            look="the dimension along which old and new are joined",
        ),
        Mistake(
            "forgets the window",
            edits={CONCAT: (("v, self.windows[layer])", "v)"),)},
            cause="the layer's sliding window is not used",
            look="what does naive_attention take besides q, k and v?",
        ),
        Mistake(
            "one window for all layers",
            edits={CONCAT: (("self.windows[layer]", "self.windows[0]"),)},
            cause="every layer gets the window of layer 0",
            look="which element of `self.windows`?",
        ),
        Mistake(
            "keeps K as V",
            edits={
                CONCAT: (
                    ("self.k[layer], self.v[layer] = k, v", "self.k[layer], self.v[layer] = v, k"),
                )
            },
            cause="K is kept as V, and V as K",
            look="which of the two goes where?",
        ),
        Mistake(
            "one place for all layers",
            sources={
                CONCAT: """
def attend(self, layer, q, k, v):
    if self.k[-1] is not None:
        k, v = torch.cat([self.k[-1], k]), torch.cat([self.v[-1], v])
    self.k = [k] * len(self.k)
    self.v = [v] * len(self.v)
    return naive_attention(q, k, v, self.windows[layer])
"""
            },
            cause="all layers keep their tokens in one place",
            look="each layer has an element of its own in `self.k` and `self.v`",
        ),
        Mistake(
            "keeps nothing",
            sources={
                CONCAT: """
def attend(self, layer, q, k, v):
    return naive_attention(q, k, v, self.windows[layer])
"""
            },
            cause="nothing is kept",
            look="what is assigned to `self.k[layer]` and `self.v[layer]`?",
        ),
    ),
    "02.2": (
        Mistake(
            "feeds everything again",
            edits={
                LOOP: (
                    ("fed = new_ids[-1:]", "fed = list(prompt_ids) + new_ids"),
                    (POSITIONS, "torch.arange(len(fed), device=lm.device)"),
                )
            },
            cause="the whole sequence is fed in every pass, so nothing is gained and all is "
            "cached twice",
            look="what is new since the pass before?",
        ),
        Mistake(
            "positions from 0 in every pass",
            edits={LOOP: ((POSITIONS, "torch.arange(len(fed), device=lm.device)"),)},
            cause="in decode the positions begin again at 0",
            look="how many tokens are in the cache when a pass begins?",
        ),
        Mistake(
            "one position too late",
            edits={LOOP: ((POSITIONS, f"{POSITIONS} + (1 if new_ids else 0)"),)},
            cause="in decode tokens stand one position too late",
            look="how many tokens are in the cache when a pass begins?",
        ),
        Mistake(
            "one position too early",
            edits={LOOP: ((POSITIONS, f"{POSITIONS} - (1 if new_ids else 0)"),)},
            cause="in decode tokens stand one position too early",
            look="how many tokens are in the cache when a pass begins?",
        ),
        Mistake(
            "the first row's token",
            edits={LOOP: (("hidden[-1:]", "hidden[:1]"),)},
            cause="the token is taken after the first row of a pass, not after the last",
            look="which row of the logits says what comes next?",
        ),
        Mistake(
            "feeds the last token",
            edits={
                LOOP: (
                    ("range(max_tokens)", "range(max_tokens + 1)"),
                    ("return new_ids", "return new_ids[:-1]"),
                )
            },
            cause="the last new token is fed, though nobody asks what follows it",
            look="how many passes give how many tokens?",
        ),
        Mistake(
            "counts from the prompt's own start",
            edits={
                LOOP: (
                    (
                        "new_ids, fed = [], list(prompt_ids)",
                        "new_ids, fed, n = [], list(prompt_ids), 0",
                    ),
                    (POSITIONS, "n + torch.arange(len(fed), device=lm.device)"),
                    ("fed = new_ids[-1:]", "n, fed = n + len(fed), new_ids[-1:]"),
                )
            },
            cause="positions count from the prompt's own start, though the cache is not empty",
            look="how many tokens are in the cache when a pass begins?",
        ),
        Mistake(
            "returns the prompt, too",
            edits={LOOP: (("return new_ids", "return list(prompt_ids) + new_ids"),)},
            cause="the prompt is returned, too",
            look="only the new tokens are asked for",
        ),
        Mistake(
            "token by token from the start",
            sources={
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
            cause="the prompt is fed token by token: right, but its tokens are all known and can "
            "share one pass",
            look="the first pass",
        ),
        Mistake(
            "appends to the caller's list",
            sources={
                LOOP: """
def generate_with_cache(lm, cache, prompt_ids, max_tokens):
    start, fed = len(prompt_ids), prompt_ids
    for _ in range(max_tokens):
        prompt_ids.append(int(lm.logits(fed, cache)[-1].argmax()))
        fed = prompt_ids[-1:]
    return prompt_ids[start:]
"""
            },
            cause="the new tokens are appended to the caller's own list",
            look="which list is appended to?",
        ),
        Mistake(
            "forgets to return",
            edits={LOOP: (("return new_ids", "new_ids"),)},
            cause="nothing is returned",
            look="what stands after the loop?",
        ),
    ),
    "02.3": (
        Mistake(
            "a step too many",
            edits={"tokens_written": (("steps = new_tokens - 1", "steps = new_tokens"),)},
            cause="one decode step too many: the last new token is never fed",
            look="the number of decode steps",
        ),
        Mistake(
            "only the old tokens",
            edits={"tokens_written": (("(steps + 1) // 2", "(steps - 1) // 2"),)},
            cause="only the old tokens are counted; the new tensor holds the new one as well",
            look="how many tokens has the tensor that torch.cat makes in the first step?",
        ),
        Mistake(
            "the prompt copied, too",
            edits={
                "tokens_written": (
                    ("steps * prompt_tokens", "prompt_tokens + steps * prompt_tokens"),
                )
            },
            cause="the prompt is counted, but it is kept as the model made it",
            look="what does the docstring say of the prompt?",
        ),
        Mistake(
            "every step as long as the last",
            edits={
                "tokens_written": (
                    (
                        "steps * prompt_tokens + steps * (steps + 1) // 2",
                        "steps * (prompt_tokens + steps)",
                    ),
                )
            },
            cause="every step is counted as if it were the last, the longest",
            look="how long is the tensor in the first step?",
        ),
        Mistake(
            "every step as long as the first",
            edits={
                "tokens_written": (
                    (
                        "steps * prompt_tokens + steps * (steps + 1) // 2",
                        "steps * (prompt_tokens + 1)",
                    ),
                )
            },
            cause="every step is counted as if it were the first, the shortest",
            look="how long is the tensor in the last step?",
        ),
        Mistake(
            "in place without the prompt",
            edits={"tokens_written": (('"in place": prompt_tokens + steps', '"in place": steps'),)},
            cause="the prompt is missing: in place it has to be written like everything else",
            look="what is written in the prefill?",
        ),
        Mistake(
            "in place with the token that is never fed",
            edits={
                "tokens_written": (
                    ('"in place": prompt_tokens + steps', '"in place": prompt_tokens + new_tokens'),
                )
            },
            cause="the last new token is counted, but never fed",
            look="which tokens go through the model?",
        ),
        Mistake(
            "two numbers, not a dict",
            edits={"tokens_written": (("return {", "return list({"), ("    }", "    }.values())"))},
            cause="the keys are not those of the docstring",
            look='what is asked for: {"concat": …, "in place": …}',
        ),
    ),
    "02.4": (
        Mistake(
            "every layer counts",
            edits={
                IN_PLACE: (
                    ("layer == len(self.kv) - 1", "True"),
                    ("self.num_tokens = end", "self.num_tokens += len(k)"),
                )
            },
            cause="every layer counts the tokens, so they count once a layer",
            look="under which condition does `num_tokens` change?",
        ),
        Mistake(
            "the first layer counts",
            edits={IN_PLACE: (("layer == len(self.kv) - 1", "layer == 0"),)},
            cause="the first layer counts the tokens: the others then write behind them, and a "
            "pass that dies halfway has counted tokens that not all layers have",
            look="under which condition does `num_tokens` change?",
        ),
        Mistake(
            "never counts",
            edits={IN_PLACE: (("self.num_tokens = end", "pass"),)},
            cause="num_tokens never changes",
            look="which layer is to change it?",
        ),
        Mistake(
            "attends over the whole storage",
            edits={
                IN_PLACE: (
                    ("self.kv[layer, 0, :end]", "self.kv[layer, 0]"),
                    ("self.kv[layer, 1, :end]", "self.kv[layer, 1]"),
                )
            },
            cause="NaN: a softmax over nothing but -inf, 0 / 0, or memory that was never written",
            look="which of these can happen here?",
        ),
        Mistake(
            "attends over the new tokens alone",
            edits={
                IN_PLACE: (
                    ("self.kv[layer, 0, :end]", "k"),
                    ("self.kv[layer, 1, :end]", "v"),
                )
            },
            cause="the new queries see only the new keys: what is cached is never looked at",
            look="over which k and v is attention computed? And is anything kept?",
        ),
        Mistake(
            "no question of room",
            edits={
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
            cause="too many tokens are not refused with a ValueError: refuse in every layer, "
            "before writing",
            look="compare with `capacity` before anything is written",
        ),
        Mistake(
            "refuses what just fits",
            edits={IN_PLACE: (("if end > self.capacity", "if end >= self.capacity"),)},
            cause="tokens that just fit are refused",
            look="is `capacity` itself too many?",
        ),
        Mistake(
            "writes what it can, then refuses",
            sources={
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
            cause="some of the tokens were written before they were refused",
            look="the order of asking and writing",
        ),
        Mistake(
            "always from slot 0",
            edits={
                IN_PLACE: (
                    ("self.kv[layer, 0, start:end] = k", "self.kv[layer, 0, : len(k)] = k"),
                    ("self.kv[layer, 1, start:end] = v", "self.kv[layer, 1, : len(v)] = v"),
                )
            },
            cause="the new tokens are written over cached ones",
            look="the first slot of a chunk",
        ),
        Mistake(
            "K where V should be",
            edits={
                IN_PLACE: (
                    ("self.kv[layer, 0, start:end]", "self.kv[layer, 1, start:end]"),
                    ("self.kv[layer, 1, start:end] = v", "self.kv[layer, 0, start:end] = v"),
                )
            },
            cause="K lies where V should, and V where K",
            look="kv[layer, 0] is K",
        ),
        Mistake(
            "writes K twice",
            edits={
                IN_PLACE: (
                    ("self.kv[layer, 1, start:end] = v", "self.kv[layer, 1, start:end] = k"),
                )
            },
            cause="K was written where V belongs, too: both hold the keys",
            look="what is assigned to kv[layer, 1]?",
        ),
        Mistake(
            "attends over what was there before",
            edits={
                IN_PLACE: (
                    ("self.kv[layer, 0, :end]", "self.kv[layer, 0, :start]"),
                    ("self.kv[layer, 1, :end]", "self.kv[layer, 1, :start]"),
                )
            },
            cause="the new tokens' own keys are missing: a query has to see its own position, too",
            look="is attention computed over the tokens of this call as well?",
        ),
        Mistake(
            "refuses in the last layer alone",
            sources={
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
            cause="too many tokens are not refused with a ValueError: refuse in every layer, "
            "before writing",
            look="compare with `capacity` before anything is written",
        ),
        Mistake(
            "the counter is set to the chunk",
            edits={IN_PLACE: (("self.num_tokens = end", "self.num_tokens = len(k)"),)},
            cause="num_tokens is set to the new tokens, not raised by them",
            look="under which condition does `num_tokens` change?",
        ),
        Mistake(
            "a longer tensor in place of the storage",
            sources={
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
            cause="a new tensor takes the storage's place: that is the copying this cache avoids",
            look="what is assigned to `self.kv`? A slice of it, or all of it?",
        ),
    ),
    "02.5": (
        Mistake(
            "the triangle only where it is square",
            edits={
                "fused_attention": (
                    ("    mask = causal_mask(len(q), len(k)).to(q.device)  # (T, L)\n", ""),
                    ("attn_mask=mask", "is_causal=len(q) == len(k)"),
                )
            },
            cause="there is no mask: queries see the tokens that come after them",
            look="when may the mask be left out?",
        ),
        Mistake(
            "a rectangle from the wrong corner",
            edits={
                "fused_attention": (
                    (
                        "causal_mask(len(q), len(k)).to(q.device)",
                        "torch.ones(len(q), len(k), dtype=torch.bool).tril()",
                    ),
                )
            },
            cause="the triangle begins in the upper left corner, as if nothing came before",
            look="which position does query 0 of the chunk have?",
        ),
        Mistake(
            "the chunk alone",
            edits={
                "fused_attention": (
                    (
                        "    mask = causal_mask(len(q), len(k)).to(q.device)  # (T, L)\n",
                        "    k, v = k[-len(q) :], v[-len(q) :]\n",
                    ),
                    ("attn_mask=mask", "is_causal=True"),
                )
            },
            cause="the prefix is hidden: queries see only keys of their own chunk",
            look="what does a later chunk need from the tokens before it?",
        ),
        Mistake(
            "upside down",
            edits={"fused_attention": (("attn_mask=mask", "attn_mask=~mask"),)},
            cause="the mask is upside down: True has to mean that the key is seen",
            look="what `attn_mask` means by True",
        ),
        Mistake(
            "numbers for a mask",
            edits={"fused_attention": (("attn_mask=mask", "attn_mask=mask.float()"),)},
            cause="a float mask is added to the scores, so 0 and 1 hide nothing: use bool",
            look="the dtype of the mask",
        ),
        Mistake(
            "rows for columns",
            edits={
                "fused_attention": (
                    (
                        "causal_mask(len(q), len(k)).to(q.device)",
                        "torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q))",
                    ),
                )
            },
            cause="the mask is transposed: queries see their own key and those that come after it",
            look="a row of the mask is a query, a column a key",
        ),
        Mistake(
            "one off to the right",
            edits={
                "fused_attention": (
                    (
                        "causal_mask(len(q), len(k)).to(q.device)",
                        "torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q) + 1)",
                    ),
                )
            },
            cause="a query sees one token of its future",
            look="the position that is compared with the key's",
        ),
        Mistake(
            "one off to the left",
            edits={
                "fused_attention": (
                    (
                        "causal_mask(len(q), len(k)).to(q.device)",
                        "torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q) - 1)",
                    ),
                )
            },
            cause="a query does not see its own key",
            look="< or <=?",
        ),
        Mistake(
            "heads repeated in the wrong order",
            edits={
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
            cause="query heads meet the wrong KV heads: a group is 2 neighbours",
            look="repeat, or repeat_interleave?",
        ),
    ),
    "02.6": (
        Mistake(
            "positions mended, the counter not",
            edits={SHARED: ((f"    {REWIND}\n", ""),)},
            cause="what earlier requests left in the cache is seen by this one",
            look="how many of the cached tokens count when a request begins?",
        ),
        Mistake(
            "the counter mended, positions not",
            edits={SHARED: (("self.num_prefix + torch.arange", "torch.arange"),)},
            cause="the positions of a request begin again at 0, as if no prefix came before it",
            look="the position of the request's first token",
        ),
        Mistake(
            "the counter set back too far",
            edits={SHARED: ((REWIND, "self.cache.num_tokens = 0"),)},
            cause="the prefix is lost: the request is read as if it stood alone",
            look="how many of the cached tokens count when a request begins?",
        ),
        Mistake(
            "positions go on over all requests",
            edits={
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
            cause="positions are counted over all requests",
            look="the position of the request's first token",
        ),
        Mistake(
            "one position too late",
            edits={SHARED: (("self.num_prefix + torch", "self.num_prefix + 1 + torch"),)},
            cause="the request begins one position too late",
            look="the position of the request's first token",
        ),
        Mistake(
            "one position too early",
            edits={SHARED: (("self.num_prefix + torch", "self.num_prefix - 1 + torch"),)},
            cause="the request begins one position too early",
            look="the position of the request's first token",
        ),
        Mistake(
            "computes the prefix again",
            sources={
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
            cause="the prefix is computed again for every request: that is the work it was kept "
            "for",
            look="the pass's tokens",
        ),
    ),
}
