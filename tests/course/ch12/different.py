"""Chapter 12: right solutions that are written otherwise than the reference."""

DIFFERENT = {
    "12.1": {  # as expressions
        "what_two_tiers_find": """
def what_two_tiers_find():
    conversations, size, device = 12, 10, 60
    blocks = conversations * size

    def loop(capacity):
        return 100.0 if capacity >= blocks else 0.0

    return {
        "device alone": loop(device),
        "write-back, 80": loop(device + 80),
        "on the device": loop(device),
        "write-through, 80": loop(max(device, 80)),
        "write-through, 120": loop(max(device, 120)),
        "random order": 100 * (device // size) / conversations,
        "blocks written down": size,
    }
""",
    },
    "12.2": {  # with a stack of what has to be undone, and checks written out
        "demote": """
def demote(place, device, host, copy):
    source = place.device
    if source is None:
        raise ValueError("not on the device")
    if device.ref_count(source) > 1:
        raise ValueError("in use")
    target = place.host
    if target is None:
        target = host.allocate()
        done = False
        try:
            copy(source, target)
            done = True
        finally:
            if not done:
                host.release(target)
    place.device, place.host = None, target
    device.release(source)
""",
        "promote": """
def promote(place, device, host, copy, keep=False):
    if place.host is None:
        raise ValueError("not on the host")
    source = place.host
    host.acquire(source)
    try:
        if place.device is None:
            target = device.allocate()
            try:
                copy(source, target)
                place.device, target = target, None
            finally:
                if target is not None:
                    device.release(target)
        if not keep:
            place.host = None
            host.release(source)
    finally:
        host.release(source)
""",
    },
    "12.3": {  # writes before it looks for the name, counts with a generator
        "HostTier.store": """
def store(self, names, contents):
    for place in range(len(names)):
        name = names[place]
        if name not in self.blocks:
            while not self.pool.num_free:
                oldest = next(iter(self.blocks))
                self.pool.release(self.blocks.pop(oldest))
            block, written = self.pool.allocate(), False
            try:
                self.write(self.memory, block, contents[place])
                written = True
            except OSError:
                written = False
            if written:
                self.blocks[name] = block
            else:
                self.pool.release(block)
""",
        "HostTier.find": """
def find(self, names):
    here = [name in self.blocks for name in names]
    return here.index(False) if False in here else len(here)
""",
    },
    "12.4": {  # every count by itself
        "break_even": """
def break_even(bytes_per_token, link, prefill):
    fetch, compute = bytes_per_token / link.bandwidth, 1 / prefill.rate
    if fetch >= compute:
        return math.inf
    return link.latency / (compute - fetch)
""",
        "blocks_to_fetch": """
def blocks_to_fetch(tiers, block_bytes, block_size, links, prefill):
    def seconds(count):
        fetched = tiers[:count]
        time = sum(links[tier].latency for tier in set(fetched))
        time += sum(block_bytes / links[tier].bandwidth for tier in fetched)
        return round(time + (len(tiers) - count) * block_size / prefill.rate, 12)

    return min(range(len(tiers) + 1), key=seconds)
""",
        "": "import math",
    },
    "12.5": {  # another temporary name, and a flag
        "save": """
def save(folder, name, data):
    part, done = "." + name + ".new", False
    try:
        folder.write(part, data)
        folder.sync(part)
        folder.rename(part, name)
        done = True
    finally:
        if not done:
            folder.remove(part)
    folder.sync_folder()
""",
    },
    "12.6": {  # one text per tensor; what is wrong is collected first
        "add_tensors": """
def add_tensors(digest, tensors):
    for name in sorted(tensors):
        one = tensors[name]
        data = bytes(bytes_of(one))
        digest.update(repr((name, one.dtype, tuple(one.shape), len(data))).encode())
        digest.update(data)
""",
        "check_session": """
def check_session(header, tensors, expected):
    wrong = [name for name in expected if header.get(name) != expected[name]]
    if not wrong and header.get("shapes") != json.dumps(shapes_of(tensors), sort_keys=True):
        wrong = ["shapes"]
    if not wrong and "tokens" not in tensors:
        wrong = ["tokens"]
    if not wrong and header.get("num_tokens") != str(len(tensors["tokens"])):
        wrong = ["num_tokens"]
    if not wrong and header.get("checksum") != checksum_of(header, tensors):
        wrong = ["checksum"]
    if wrong:
        raise SessionError(f"{wrong[0]} differs")
""",
    },
}
