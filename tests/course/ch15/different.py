"""Chapter 15: right solutions that are written otherwise than the reference."""

DIFFERENT = {
    "15.1": {  # counts what was put and what was seen; the lock is held in two short places
        "Inbox.put": """
def put(self, found):
    wakes = False
    self.lock.acquire()
    try:
        is_error = isinstance(found, BaseException)
        self.error = found if is_error else self.error
        self.output = self.output if is_error else found
        wakes, self.is_waking = not self.is_waking, True
    finally:
        self.lock.release()
    if wakes and not self.loop.is_closed():
        try:
            self.loop.call_soon_threadsafe(lambda: self.woken.set())
        except RuntimeError:
            pass
""",
        "Inbox.collect": """
def collect(self):
    with self.lock:
        self.woken = asyncio.Event()
        self.is_waking = False
        newest = self.output
        if self.error:
            raise self.error
    old_ids, old_chars = self.num_tokens, self.num_chars
    ids = list(newest.token_ids)
    self.num_tokens, self.num_chars = len(ids), len(newest.text)
    text = newest.text[old_chars:]
    return Delta(ids[old_ids:], text, finish_reason=newest.finish_reason)
""",
    },
    "15.2": {
        "visible_text": """
def visible_text(text, stop, finished):
    for place in range(len(text)):
        if any(text.startswith(one, place) for one in stop):
            return text[:place]
    if not finished:
        while text and text[-1] == "\\ufffd":
            text = text[:-1]
        for place in range(len(text)):
            if any(one.startswith(text[place:]) for one in stop):
                return text[:place]
    return text
""",
        "TextStream.add": """
def add(self, token_ids, finished):
    self.token_ids.extend(token_ids)
    known = self.decode(self.prompt_ids)
    while known.endswith("\\ufffd"):
        known = known[:-1]
    whole = self.decode([*self.prompt_ids, *self.token_ids])
    seen = visible_text(whole.removeprefix(known), self.stop, finished)
    already, self.num_sent = self.num_sent, len(seen)
    return seen[already:]
""",
    },
    "15.3": {
        "Front.leave": """
def leave(self, client):
    gone = [number for number in self.owners if self.owners[number] == client]
    for number in reversed(gone):
        self.engine.abort(number)
    for number in gone:
        del self.owners[number]
    self.streams -= set(gone)
""",
    },
    "15.4": {
        "Admission.enter": """
def enter(self, key, num_tokens, now):
    ahead = sum(self.waiting.values())
    if self.rate and ahead:
        late = (ahead + num_tokens) / self.rate - self.target
        late = min(late, ahead / self.rate)
        if late > 1e-9:
            return int(-(-late // 1))
    self.waiting = {**self.waiting, key: num_tokens}
    self.began.update({key: (now, ahead + num_tokens)})
    return 0
""",
        "Admission.first_token": """
def first_token(self, key, now):
    self.waiting.pop(key)
    since, computed = self.began.pop(key)
    self.measured.append((computed, now - since))
""",
    },
    "15.5": {  # bucket by bucket, from the top
        "quantile": """
def quantile(bounds, before, after, share):
    total = after[-1] - before[-1]
    if not total:
        return None
    best = None
    for place in reversed(range(len(bounds))):
        if after[place] - before[place] < share * total:
            break
        best = place
    if bounds[best] == float("inf"):
        return bounds[best - 1]
    low, under = 0.0, 0
    if best > 0:
        low, under = bounds[best - 1], after[best - 1] - before[best - 1]
    part = (share * total - under) / (after[best] - before[best] - under)
    return (1 - part) * low + part * bounds[best]
""",
        "hit_rate": """
def hit_rate(lookups):
    tokens = found = 0
    for num_tokens, num_found, admitted, preemptions in lookups:
        if admitted and not preemptions:
            tokens, found = tokens + num_tokens, found + num_found
    return found / max(tokens, 1)
""",
    },
    "15.6": {
        "on_paper": """
def on_paper():
    def rate(n):
        return n * 1000 / (50 * (6 + n))

    good = rate(10)
    return {
        "tokens": 50 * rate(16),
        "most": 10,
        "goodput": good,
        "throughput": rate(64),
        "goodput of 64": 0,
        "refused": (20 - good) / 20,
        "wait": 450 / good,
    }
""",
    },
}
