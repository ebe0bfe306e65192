"""Chapter 13: right solutions that are written otherwise than the reference."""

DIFFERENT = {
    "13.1": {  # lengths before everything
        "identity_of": """
def identity_of(facts):
    digest = hashlib.blake2b(digest_size=32)
    for name in sorted(facts):
        for text in (name, facts[name]):
            data = text.encode()
            digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()
""",
        "spell": """
def spell(salt):
    kind = type(salt)
    if kind is tuple:
        text = f"tuple {len(salt)} "
        for one in salt:
            part = spell(one)
            if part is None:
                return None
            text += f"{len(part)} {part}"
        return text
    if kind in (type(None), str, bytes, int, bool, float):
        return f"{kind.__name__} {salt!r}"
""",
        "block_name": """
def block_name(parent, token_ids):
    digest = hashlib.sha3_256(parent)
    digest.update((" ".join(str(one) for one in token_ids) + "!").encode())
    return digest.digest()
""",
    },
    "13.2": {  # early returns, and a loop that counts
        "fetch_prefix": """
def fetch_prefix(names, store, unpack, link, block_bytes, block_seconds):
    good = []
    try:
        wanted = []
        if names:
            for name, is_here in zip(names, store.contains(names)):
                if not is_here:
                    break
                wanted.append(name)
        gain = len(wanted) * (block_seconds - block_bytes / link.bandwidth) - link.latency
        if wanted and gain > 1e-12:
            entries = store.get_many(wanted)
            for name, entry in zip(wanted, entries):
                if entry is None:
                    return good
                good.append(unpack(entry, name))
    except (OSError, EntryError):
        pass
    return good
""",
    },
    "13.3": {  # worker by worker, and a sorted list
        "ByPrefix.hits": """
def hits(self, names):
    found = {}
    for worker in range(len(self.loads)):
        count = 0
        for name in names:
            if worker not in self.holders.get(name, ()):
                break
            count += 1
        if count:
            found[worker] = count
    return found
""",
        "ByPrefix.choose": """
def choose(self, names, num_tokens, session):
    mean = (sum(self.sent) + num_tokens) / len(self.loads)
    hits, candidates = self.hits(names), []
    least = self.least_loaded()
    for worker in range(len(self.loads)):
        held = hits.get(worker, 0)
        if held and self.sent[worker] > self.bound * mean:
            held = 0
        if held or worker == least:
            waits = self.loads[worker] - held * self.block_size
            candidates.append((waits, self.sent[worker], worker, held))
    _, _, worker, held = sorted(candidates)[0]
    for name in names:
        if name not in self.holders:
            self.holders[name] = set()
        self.holders[name].add(worker)
    while held * self.block_size >= num_tokens:
        held -= 1
    return worker, max(held, 0)
""",
    },
    "13.4": {  # without an early return
        "Receiver.stopped": """
def stopped(self, number, num_written):
    if number in self.transfers and not self.transfers[number].complete:
        transfer = self.transfers[number]
        missing = len(transfer.blocks) - num_written
        if missing or not transfer.wanted:
            for block in transfer.blocks:
                self.pool.release(block)
            del self.transfers[number]
        else:
            transfer.complete = True
""",
        "Receiver.cancel": """
def cancel(self, number):
    if number in self.transfers:
        if self.transfers[number].complete:
            self.forget(number)
        else:
            self.transfers[number].wanted = False
""",
        "Receiver.died": """
def died(self, sender):
    over = []
    for number in self.transfers:
        transfer = self.transfers[number]
        if not transfer.complete and transfer.sender == sender:
            over.append(number)
    for number in over:
        self.forget(number)
""",
    },
    "13.5": {  # simulated
        "what_many_caches_find": """
def what_many_caches_find():
    def use(cache, ids, most):
        for id_ in reversed(ids):
            cache.pop(id_, None)
            cache[id_] = None
        while len(cache) > most:
            del cache[next(iter(cache))]

    def loop(count, workers, blocks, store=0, by_prefix=False):
        caches, shared, found = [{} for _ in range(workers)], {}, []
        for turn in range(20 * count):
            conversation = turn % count
            ids = [10 * conversation + i for i in range(10)]
            cache = caches[(conversation if by_prefix else turn) % workers]
            hits = fetched = 0
            for id_ in ids:
                if id_ not in cache:
                    if id_ not in shared:
                        break
                    fetched += 1
                hits += 1
            use(cache, ids, blocks)
            use(shared, ids, store)
            found.append((hits, fetched))
        late = found[10 * count :]
        return sum(f for f, _ in late) * 10 / len(late), sum(n for _, n in late) / len(late)

    answers = {
        "one worker, 13": loop(13, 1, 160)[0],
        "round robin, 12": loop(12, 4, 40)[0],
        "round robin, 13": loop(13, 4, 40)[0],
        "by prefix, 13": loop(13, 4, 40, by_prefix=True)[0],
        "random, second turn": 100 / 4,
        "random, third turn": 100 * (1 - 0.75**2),
        "8 workers, second": 100 / 8,
    }
    answers["shared store, 13"], answers["blocks fetched"] = loop(13, 4, 40, 160)
    return answers
""",
    },
    "13.6": {  # it counts the failed trials, and computes the waits from that
        "Breaker.allows": """
def allows(self):
    with self._lock:
        now = self.clock()
        if self.is_open and now < self._next_trial:
            return False
        if self.is_open:
            self.trials += 1
            self.wait = min(self.first * 2**self.trials, self.most)
            self._next_trial = now + self.wait
        return True
""",
        "Breaker.worked": """
def worked(self):
    with self._lock:
        before, self.wait = self.wait, 0
        return before != 0
""",
        "Breaker.failed": """
def failed(self):
    with self._lock:
        opens = self.wait == 0
        if opens:
            self.trials = 0
            self.wait = self.first
        self._next_trial = self.clock() + self.wait
        return opens
""",
    },
}
