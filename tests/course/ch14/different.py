"""Chapter 14: right solutions that are written otherwise than the reference."""

DIFFERENT = {
    "14.1": {
        "keep_equal": """
def keep_equal(drafts, token_ids):
    written = []
    for place, token_id in enumerate(token_ids):
        written.append(token_id)
        if place == len(drafts) or drafts[place] != token_id:
            return written
    return written
""",
    },
    "14.2": {
        "BlockTable.shrink": """
def shrink(self, num_tokens):
    left = self.num_tokens - num_tokens
    if num_tokens < 0 or left < 0:
        raise ValueError(f"cannot take back {num_tokens} of {self.num_tokens} tokens")
    while (len(self.block_ids) - 1) * self.block_size >= left and self.block_ids:
        self.pool.release(self.block_ids.pop())
    self.num_tokens = left
""",
    },
    "14.3": {
        "propose_ngram": """
def propose_ngram(token_ids, width, most):
    ids = tuple(token_ids)
    end = ids[len(ids) - width :] if len(ids) >= width else None
    places = [p for p in range(width, len(ids)) if ids[p - width : p] == end]
    if not places:
        return []
    period = ids[places[-1] :]
    return [period[i % len(period)] for i in range(most)]
""",
    },
    "14.4": {
        "settle": """
def settle(table, cache, token_ids, num_computed):
    size = table.block_size
    whole = num_computed - num_computed % size
    cache.insert(list(token_ids)[:whole], list(table.block_ids)[: whole // size])
    table.shrink(max(0, table.num_tokens - num_computed))
    return whole // size
""",
    },
    "14.5": {  # in plain Python, the last token first
        "rejection_sample": """
def rejection_sample(p, q, drafts, uniform):
    written = []
    for place in range(len(drafts)):
        x = drafts[place]
        ratio = float(p[place][x]) / float(q[place][x])
        if 1 - uniform() < ratio:
            written.append(x)
            continue
        missing = [max(0.0, float(a) - float(b)) for a, b in zip(p[place], q[place])]
        break
    else:
        missing = [float(a) for a in p[-1]]
    number = uniform() * sum(missing)
    for token in reversed(range(len(missing))):
        number -= missing[token]
        if number < 0:
            break
    return written + [token]
""",
    },
    "14.6": {
        "two_reports": """
def two_reports():
    return {
        "matched": 0.5 * 0.2 + 0.3 * 0.2 + 0.2 * 0.6,
        "matched distance": 0,
        "top": 0.2,
        "top distance": 0.2 * (1 - 0.5),
        "rejection": 0.2 + 0.2 + 0.2,
        "right report": "2",
    }
""",
    },
    "14.7": {
        "expected_tokens": """
def expected_tokens(num_drafts, acceptance):
    tokens, chance = 1.0, 1.0
    for _ in range(num_drafts):
        chance *= acceptance
        tokens += chance
    return tokens
""",
        "drafts_that_pay": """
def drafts_that_pay(cost, acceptance):
    best, tokens = 0, 1.0
    for k in range(1, len(cost)):
        more = expected_tokens(k, acceptance)
        if more * cost[best] > tokens * cost[k]:
            best, tokens = k, more
    return best
""",
    },
}
