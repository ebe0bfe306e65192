"""Chapter 02: mistakes that a reader may make, each as a wrong solution."""

from minikv.course.exercises.mistakes import Mistake

CONCAT = "ConcatCache.attend"
LOOP = "generate_with_cache"
WRITTEN = "tokens_written"
IN_PLACE = "PreallocatedCache.attend"
FUSED = "fused_attention"
SHARED = "SharedPrefix.logits"

KEEP = "self.k[layer], self.v[layer] = k, v"
NEWEST = "k[-len(q) :], v[-len(q) :]"
POSITIONS = "cache.num_tokens + torch.arange(len(fed), device=lm.device)"
COUNT = "if layer == len(self.kv) - 1:"
ROOM = "if end > self.capacity:"
MASK = "    mask = causal_mask(len(q), len(k)).to(q.device)  # (T, L)\n"
REWIND = "self.cache.num_tokens = self.num_prefix  # forget the request before"


def of(path: str, *records: tuple) -> tuple[Mistake, ...]:
    """Mistakes in one place: (name, (old, new) pairs or whole definitions, cause, look)."""
    return tuple(
        Mistake(name, cause, look, sources=change)
        if isinstance(change, dict)
        else Mistake(name, cause, look, edits={path: change})
        for name, change, cause, look in records
    )


def slots(k: str, v: str) -> tuple[tuple[str, str], ...]:
    """Other keys and values to attend over, in 02.4."""
    return ("self.kv[layer, 0, :end]", k), ("self.kv[layer, 1, :end]", v)


def writes(k: str, v: str) -> tuple[tuple[str, str], ...]:
    """Other ways to write the two, in 02.4."""
    return ("self.kv[layer, 0, start:end] = k", k), ("self.kv[layer, 1, start:end] = v", v)


def mask(visible: str) -> tuple[tuple[str, str], ...]:
    """Another mask, in 02.5."""
    return (("causal_mask(len(q), len(k)).to(q.device)", visible),)


ONES = "torch.ones(len(q), len(k), dtype=torch.bool)"
FITS = "k[: self.capacity - start]", "v[: self.capacity - start]"
FITTING = writes(
    f"self.kv[layer, 0, start:end] = {FITS[0]}", f"self.kv[layer, 1, start:end] = {FITS[1]}"
)

WHEN = "how many tokens are in the cache when a pass begins?"
COUNTS = "under which condition does `num_tokens` change?"
ASKS = "compare with `capacity` before you write anything, in every layer"
FIRST = "the position of the request's first token"
COUNTED = "how many of the cached tokens count when a request begins?"

MISTAKES = {
    "02.1": of(
        CONCAT,
        ("attends over the new tokens alone", (("(q, k, v, ", f"(q, {NEWEST}, "),),
         "the new queries see only the new keys: the cached ones are never used",
         "over which k and v do you compute attention?"),
        ("attends before it appends",
         (("    return",
           "    if len(k) > len(q):\n        k, v = k[: -len(q)], v[: -len(q)]\n    return"),),
         "the new tokens' own keys are missing: a query must also see its own position",
         "do you attend over the tokens of this call as well?"),
        ("new tokens in front",
         (("[self.k[layer], k]", "[k, self.k[layer]]"),
          ("[self.v[layer], v]", "[v, self.v[layer]]")),
         "the new keys come before the old ones", "in which order are old and new joined?"),
        ("keeps the first chunk and no more",
         ((KEEP, f"if self.k[layer] is None:\n        {KEEP}"),),
         "the joined tensors are never kept: the next call finds only the first chunk",
         "what is `self.k[layer]` after the second call?"),
        ("keeps the newest chunk alone", ((KEEP, f"self.k[layer], self.v[layer] = {NEWEST}"),),
         "only the newest tokens are kept",
         "are the older tokens still part of `self.k[layer]`?"),
        ("joins along the heads",
         (("[self.k[layer], k])", "[self.k[layer], k], 1)"),
          ("[self.v[layer], v])", "[self.v[layer], v], 1)")),
         "old and new are joined along the heads, dimension 1, not along the tokens, dimension 0",
         "the dimension in torch.cat"),
        ("forgets the window", (("v, self.windows[layer])", "v)"),),
         "the layer's sliding window is not used",
         "what does naive_attention take besides q, k and v?"),
        ("one window for all layers", (("self.windows[layer]", "self.windows[0]"),),
         "every layer gets the window of layer 0", "which element of `self.windows`?"),
        ("keeps K as V", ((KEEP, "self.k[layer], self.v[layer] = v, k"),),
         "keys are kept as values, and values as keys", "which of the two goes where?"),
        ("keeps K twice", ((KEEP, "self.k[layer], self.v[layer] = k, k"),),
         "keys are kept in place of the values", "what is assigned to `self.v[layer]`?"),
        ("one place for all layers",
         ((KEEP, "self.k, self.v = [k] * len(self.k), [v] * len(self.v)"),),
         "all layers keep their tokens in the same place",
         "each layer has its own element in `self.k` and `self.v`"),
        ("keeps nothing", ((f"    {KEEP}\n", ""),),
         "nothing is kept", "what is assigned to `self.k[layer]` and `self.v[layer]`?"),
    ),
    "02.2": of(
        LOOP,
        ("feeds everything again",
         (("fed = new_ids[-1:]", "fed = list(prompt_ids) + new_ids"),
          (POSITIONS, "torch.arange(len(fed), device=lm.device)")),
         "every pass feeds the whole sequence again: nothing is saved, and all of it is "
         "cached again", "what is new since the previous pass?"),
        ("positions from 0 in every pass",
         ((POSITIONS, "torch.arange(len(fed), device=lm.device)"),),
         "in decode the positions start again at 0", WHEN),
        ("one position too late", ((POSITIONS, f"{POSITIONS} + (1 if new_ids else 0)"),),
         "in decode tokens stand one position too late", WHEN),
        ("one position too early", ((POSITIONS, f"{POSITIONS} - (1 if new_ids else 0)"),),
         "in decode tokens stand one position too early", WHEN),
        ("the first row's token", (("hidden[-1:]", "hidden[:1]"),),
         "the token is taken after the first row of a pass, not after the last",
         "which row of the logits says what comes next?"),
        ("feeds the last token",
         (("range(max_tokens)", "range(max_tokens + 1)"),
          ("return new_ids", "return new_ids[:-1]")),
         "the last new token is fed, but the token after it is not needed",
         "how many passes give how many tokens?"),
        ("one token too few", (("range(max_tokens)", "range(max_tokens - 1)"),),
         "one new token is missing: the prefill gives a token too",
         "how many passes give how many tokens?"),
        ("stops at the end token",
         (("fed = new_ids[-1:]",
           "fed = new_ids[-1:]\n        if fed[0] in lm.config.eos_ids:\n            break"),),
         "the loop stops at the end token, but it must return exactly `max_tokens` tokens",
         "what does the docstring say about the end token?"),
        ("stops at a repetition",
         (("fed = new_ids[-1:]",
           "fed = new_ids[-1:]\n        if len(new_ids) > 2 and len(set(new_ids[-3:])) == 1:\n"
           "            break"),),
         "the loop stops when a token repeats, but it must return exactly `max_tokens` tokens",
         "what does the docstring say about how many tokens are returned?"),
        ("counts from the prompt's own start",
         (("new_ids, fed = [], list(prompt_ids)", "new_ids, fed, n = [], list(prompt_ids), 0"),
          (POSITIONS, "n + torch.arange(len(fed), device=lm.device)"),
          ("fed = new_ids[-1:]", "n, fed = n + len(fed), new_ids[-1:]")),
         "positions count from the start of the prompt, but the cache is not empty", WHEN),
        ("returns the prompt too", (("return new_ids", "return list(prompt_ids) + new_ids"),),
         "the prompt is returned as well", "return only the new tokens"),
        ("token by token from the start",
         (("new_ids, fed = [], list(prompt_ids)",
           "new_ids, fed = [], list(prompt_ids)[-1:]\n"
           "    for token in prompt_ids[:-1]:\n        lm.logits([token], cache)"),),
         "the prompt is fed token by token: that gives the right tokens, but the whole prompt is "
         "known and can share one pass", "the first pass"),
        ("appends to the caller's list",
         (("new_ids, fed = [], list(prompt_ids)",
           "start, new_ids, fed = len(prompt_ids), prompt_ids, list(prompt_ids)"),
          ("return new_ids", "return new_ids[start:]")),
         "the new tokens are appended to the caller's own list", "to which list do you append?"),
        ("forgets to return", (("return new_ids", "new_ids"),),
         "nothing is returned", "what comes after the loop?"),
    ),
    "02.3": of(
        WRITTEN,
        ("a step too many", (("steps = new_tokens - 1", "steps = new_tokens"),),
         "one decode step too many: the last new token is never fed", "the number of decode steps"),
        ("only the old tokens", (("(steps + 1) // 2", "(steps - 1) // 2"),),
         "only the old tokens are counted; the new tensor also holds the new one",
         "how many tokens does the tensor hold that torch.cat makes in the first step?"),
        ("the prompt copied too",
         (("steps * prompt_tokens", "prompt_tokens + steps * prompt_tokens"),),
         "the prompt is counted, but it is kept as the model made it",
         "what does the docstring say about the prompt?"),
        ("every step as long as the last", (("steps * (steps + 1) // 2", "steps * steps"),),
         "every step is counted as if it were the last, the longest",
         "how long is the tensor in the first step?"),
        ("every step as long as the first", (("steps * (steps + 1) // 2", "steps"),),
         "every step is counted as if it were the first, the shortest",
         "how long is the tensor in the last step?"),
        ("nothing is copied",
         (("steps * prompt_tokens + steps * (steps + 1) // 2", "prompt_tokens + steps"),),
         "this is what is written in place, but torch.cat writes the old tokens again",
         "what is in the tensor that torch.cat makes?"),
        ("in place without the prompt",
         (('"in place": prompt_tokens + steps', '"in place": steps'),),
         "the prompt is missing: in place, it must be written like everything else",
         "what is written in the prefill?"),
        ("in place with the token that is never fed",
         (('"in place": prompt_tokens + steps', '"in place": prompt_tokens + new_tokens'),),
         "the last new token is counted, but it is never fed",
         "which tokens go through the model?"),
        ("two numbers, not a dict", (("return {", "return list({"), ("    }", "    }.values())")),
         "the result is not a dictionary with the keys of the docstring",
         'return {"concat": …, "in place": …}'),
    ),
    "02.4": of(
        IN_PLACE,
        ("every layer counts", ((COUNT, "if True:"), ("num_tokens = end", "num_tokens += len(k)")),
         "every layer counts the tokens, so each token counts once per layer", COUNTS),
        ("the first layer counts", ((COUNT, "if layer == 0:"),),
         "the first layer counts the tokens: the other layers then write after them, and a pass "
         "that fails halfway has counted tokens that not all layers have", COUNTS),
        ("the last layer but one counts", ((COUNT, "if layer == len(self.kv) - 2:"),),
         "num_tokens moves one layer too early", "the last layer's number"),
        ("never counts", (("self.num_tokens = end", "pass"),),
         "num_tokens never changes", "which layer must change it?"),
        ("the counter is set to the chunk",
         (("self.num_tokens = end", "self.num_tokens = len(k)"),),
         "num_tokens is set to the number of new tokens instead of increased by it", COUNTS),
        ("counts before it attends",
         (("    return", "    end = self.num_tokens + len(k)\n    return"),),
         "the last layer increases num_tokens before it attends, and then counts the new "
         "tokens once more", "what is num_tokens when the last layer attends?"),
        ("attends over the whole storage", slots("self.kv[layer, 0]", "self.kv[layer, 1]"),
         "slots without a token are read: nothing was ever written there",
         "up to which slot do you attend? A mask alone does not keep NaN out"),
        ("attends over the new tokens alone", slots("k", "v"),
         "the new queries see only the new keys: the cached ones are never used",
         "over which k and v do you compute attention?"),
        ("attends over what was there before",
         slots("self.kv[layer, 0, :start]", "self.kv[layer, 1, :start]"),
         "the new tokens' own keys are missing: a query must also see its own position",
         "do you attend over the tokens of this call as well?"),
        ("forgets the window", ((", self.windows[layer]", ""),),
         "the layer's sliding window is not used",
         "what does naive_attention take besides q, k and v?"),
        ("never asks for room", ((ROOM, "if False:"),),
         "the error is not a ValueError; it may be PyTorch's own, from the assignment",
         ASKS),
        ("drops what does not fit", (("raise ValueError", "print"), *FITTING),
         "tokens that do not fit are accepted without an error", ASKS),
        ("refuses what just fits", ((ROOM, "if end >= self.capacity:"),),
         "tokens that just fit are refused", "do exactly `capacity` tokens fit?"),
        ("refuses in the first layer alone", ((ROOM, "if layer == 0 and end > self.capacity:"),),
         "only layer 0 checks whether the tokens fit", ASKS),
        ("refuses in the last layer alone",
         ((ROOM, "if layer == len(self.kv) - 1 and end > self.capacity:"), *FITTING,),
         "only the last layer refuses: by then the others have written", ASKS),
        ("writes what it can, then refuses",
         {IN_PLACE: f'''
def attend(self, layer, q, k, v):
    start, end = self.num_tokens, self.num_tokens + len(k)
    self.kv[layer, 0, start:end], self.kv[layer, 1, start:end] = {", ".join(FITS)}
    if end > self.capacity:
        raise ValueError("full")
    if layer == len(self.kv) - 1:
        self.num_tokens = end
    return naive_attention(q, *self.kv[layer, :, :end], self.windows[layer])
'''},
         "some of the tokens were written before they were refused",
         "check first, then write"),
        ("always from slot 0",
         writes("self.kv[layer, 0, : len(k)] = k", "self.kv[layer, 1, : len(v)] = v"),
         "the new tokens overwrite cached ones", "the first slot of a chunk"),
        ("K where V should be",
         writes("self.kv[layer, 1, start:end] = k", "self.kv[layer, 0, start:end] = v"),
         "keys and values are swapped", "kv[layer, 0] holds the keys"),
        ("writes K twice",
         writes("self.kv[layer, 0, start:end] = k", "self.kv[layer, 1, start:end] = k"),
         "both places hold the keys; the values are missing",
         "what is assigned to kv[layer, 1]?"),
        ("a longer tensor in place of the storage",
         (("    self.kv[layer, 0, start:end] = k",
           "    self.kv = self.kv.clone()\n    self.kv[layer, 0, start:end] = k"),),
         "a new tensor replaces the storage: this cache exists to avoid such copies",
         "what is assigned to `self.kv`? A slice of it, or all of it?"),
    ),
    "02.5": of(
        FUSED,
        ("the triangle only where it is square",
         ((MASK, ""), ("attn_mask=mask", "is_causal=len(q) == len(k)")),
         "there is no mask: queries see the tokens that come after them",
         "when may the mask be left out?"),
        ("a rectangle from the wrong corner", mask(f"{ONES}.tril()"),
         "the triangle starts in the upper left corner, as if nothing came before",
         "which position does query 0 of the chunk have?"),
        ("the chunk alone",
         ((MASK, "    k, v = k[-len(q) :], v[-len(q) :]\n"),
          ("attn_mask=mask", "is_causal=True")),
         "the prefix is hidden: queries see only keys of their own chunk",
         "what does a later chunk need from the tokens before it?"),
        ("the mask, and is_causal as well",
         (("attn_mask=mask", "attn_mask=mask, is_causal=len(q) > 1"),),
         "a mask and `is_causal` exclude each other: pass only the mask",
         "which of the two knows where the queries stand?"),
        ("upside down", (("attn_mask=mask", "attn_mask=~mask"),),
         "the mask is inverted: True must mean that the query sees the key",
         "what does True mean in `attn_mask`?"),
        ("numbers for a mask", (("attn_mask=mask", "attn_mask=mask.float()"),),
         "a float mask is added to the scores, so 0 and 1 hide nothing: use bool",
         "the dtype of the mask"),
        ("rows for columns", mask(f"{ONES}.triu(len(k) - len(q))"),
         "the mask is transposed: queries see their own key and those that come after it",
         "a row of the mask is a query, a column a key"),
        ("one off to the right", mask(f"{ONES}.tril(len(k) - len(q) + 1)"),
         "a query sees one later token", "the position that is compared with the key's"),
        ("one off to the left", mask(f"{ONES}.tril(len(k) - len(q) - 1)"),
         "a query does not see its own key", "< or <=?"),
        ("heads repeated in the wrong order",
         tuple((f"{x}.transpose(0, 1)",
                f"{x}.repeat(1, q.shape[1] // {x}.shape[1], 1).transpose(0, 1)")
               for x in "kv"),
         "query heads meet the wrong KV heads: the heads of a group are neighbours",
         "repeat, or repeat_interleave?"),
    ),
    "02.6": of(
        SHARED,
        ("positions fixed, the counter not", ((f"    {REWIND}\n", ""),),
         "this request sees what earlier requests left in the cache", COUNTED),
        ("the counter fixed, positions not", (("self.num_prefix + torch.arange", "torch.arange"),),
         "the positions of a request start again at 0, as if there were no prefix", FIRST),
        ("the counter set back too far", ((REWIND, "self.cache.num_tokens = 0"),),
         "the prefix is lost: the request is read as if it stood alone", COUNTED),
        ("the storage emptied instead of the counter set back",
         ((REWIND, "self.cache.kv[:, :, self.num_prefix :] = 0"),),
         "the rows of earlier requests are erased, but they still count as tokens", COUNTED),
        ("positions continue over all requests",
         ((f"    {REWIND}\n",
           "    first = getattr(self, 'first', self.num_prefix)\n"
           "    self.first = first + len(request_ids)\n"
           f"    {REWIND}\n"),
          ("self.num_prefix + torch.arange", "first + torch.arange")),
         "positions are counted across all requests", FIRST),
        ("one position too late", (("self.num_prefix + torch", "self.num_prefix + 1 + torch"),),
         "the request starts one position too late", FIRST),
        ("one position too early", (("self.num_prefix + torch", "self.num_prefix - 1 + torch"),),
         "the request starts one position too early", FIRST),
        ("reads 16 tokens of a request",
         (("    positions = self.num_prefix", "    token_ids = token_ids[:16]\n"
           "    positions = self.num_prefix"), ("torch.arange(len(request_ids)",
                                                "torch.arange(len(token_ids)")),
         "only the first tokens of a long request are read",
         "how many rows must the logits of a request have?"),
        ("computes the prefix again",
         {"SharedPrefix.__init__": '''
def __init__(self, lm, prefix_ids, capacity):
    self.lm, self.prefix_ids = lm, list(prefix_ids)
    self.cache = PreallocatedCache(lm.config, capacity, lm.dtype, lm.device)
''',
          SHARED: '''
def logits(self, request_ids):
    self.cache.num_tokens = 0
    return self.lm.logits(self.prefix_ids + request_ids, self.cache)[len(self.prefix_ids) :]
'''},
         "every request computes the prefix again, but it was kept to save that work",
         "the tokens that the pass is given"),
    ),
}  # fmt: skip
