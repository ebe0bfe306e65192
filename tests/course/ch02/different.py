"""Chapter 02: right solutions that are written otherwise than the reference."""

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
