"""Chapter 03: right solutions that are written otherwise than the reference."""

DIFFERENT = {
    "03.1": {
        "kv_bytes_per_token": """
def kv_bytes_per_token(shape, bytes_per_number=2):
    total = 0
    for _layer in range(shape.num_layers):
        if shape.latent_dim > 0:
            total += shape.latent_dim
            continue
        for _head in range(shape.num_kv_heads):
            for _vector in ("key", "value"):
                total += shape.head_dim
    return total * bytes_per_number
""",
    },
    "03.2": {
        "shape_of": """
def shape_of(config):
    if "text_config" in config:
        config = config["text_config"]
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads")
    if num_kv_heads is None:
        num_kv_heads = num_heads
    head_dim = None
    for key in ("head_dim", "v_head_dim"):
        if head_dim is None and config.get(key) is not None:
            head_dim = config[key]
    if head_dim is None:
        head_dim = int(config["hidden_size"] / num_heads)
    latent = 0
    if config.get("kv_lora_rank") is not None:
        latent = sum(config[key] for key in ("kv_lora_rank", "qk_rope_head_dim"))
    return Shape(
        num_layers=config["num_hidden_layers"], num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=head_dim, latent_dim=latent,
    )
""",
    },
    "03.3": {
        "decode_ceiling": """
def decode_ceiling(weight_bytes, bandwidth, batch=1, kv_bytes=0):
    seconds_per_step = weight_bytes / bandwidth
    for _ in range(batch):
        seconds_per_step += kv_bytes / bandwidth
    return batch / seconds_per_step
""",
        "judge_claims": '''
def judge_claims():
    """As typed by hand."""
    wrong = {
        "3B token": "Groups of four",
        "1B speed": "a batch ",
        "11B token": "hidden size",
        "70B 8K": "another depth",
    }
    return {key: wrong.get(key) for key in (*wrong, "1B token", "7B 4K")}
''',
    },
    "03.4": {
        "slots_at": """
def slots_at(reserved, prompt, output, step):
    states = ["internal"] * reserved
    for position in range(prompt + output - 1):
        if position >= reserved:
            raise ValueError("too long for its reservation")
        states[position] = "used" if position < prompt + step - 1 else "future"
    return tuple(states.count(state) for state in ("used", "future", "internal"))
""",
        "shares_over_lives": """
def shares_over_lives(lengths, reserve):
    sums = np.zeros(3)
    for length in lengths:
        reserved = reserve(length)
        used = length.prompt + np.arange(length.output)
        final = length.prompt + length.output - 1
        sums += [used.sum(), (final - used).sum(), length.output * (reserved - final)]
    return sums / sums.sum()
""",
        "": "import numpy as np",
    },
    "03.5": {
        "five_processes": """
def five_processes():
    return {"free": 8, "largest": 4, "pairs": 4, "triples": 9, "most": 12}
""",
    },
    "03.6": {
        "ContiguousMemory.allocate": """
def allocate(self, size):
    owner = [False] * self.size
    for start, length in self.pieces.items():
        owner[start : start + length] = [True] * length
    for start in range(self.size - size + 1):
        if not any(owner[start : start + size]):
            self.pieces[start] = size
            owner[start : start + size] = [True] * size
            self._note_holes(owner)
            return start
    raise NoHole(needed=size, largest=self.largest_hole, free=self.num_free)
""",
        "ContiguousMemory.release": """
def release(self, start):
    if self.pieces.get(start) is None:
        raise ValueError(start)
    del self.pieces[start]
    owner = [False] * self.size
    for begin, length in self.pieces.items():
        owner[begin : begin + length] = [True] * length
    self._note_holes(owner)

def _note_holes(self, owner):
    self.holes.clear()
    for unit, taken in enumerate(owner):
        if taken:
            continue
        if self.holes and sum(self.holes[-1]) == unit:
            self.holes[-1] = (self.holes[-1][0], self.holes[-1][1] + 1)
        else:
            self.holes.append((unit, 1))
""",
    },
}
