"""Chapter 03: right solutions written otherwise, and plausible wrong ones."""

from four_ways import Edit, Rewrite

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
    """By hand, with the figures rounded as one writes them down."""
    return {
        "7B 4K": [2 * 32 * 32 * 128 * 2 * 4096, "right"],
        "70B 32K": [10.737e9, "Right"],
        "70B 8K GQA": [2.6844e9, "wrong"],
        "70B 8K MHA": [21.475e9, "wrong"],
        "1B token": [32 * 1024, "right"],
        "3B token": [112 * 1024.0, "wrong"],
        "11B token": [160 * 1024, "wrong"],
        "11B 4 x 128K": [85.9e9, "wrong "],
        "1B speed": [407.8, "impossible"],
        "1B batch": [5.0, "possible"],
    }
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

FORMULA = "2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * bytes_per_number"
LATENT = "shape.num_layers * shape.latent_dim * bytes_per_number"

SHRINK = "self.holes[index] = (start + size, room - size)"
LOOP = "for index, (start, room) in enumerate(self.holes):"
BEST = "in sorted(enumerate(self.holes), key=lambda hole: hole[1][1]):"
BACKWARDS = "in reversed(list(enumerate(self.holes))):"

WRONG = {
    "03.1": (
        Edit(
            "counts query heads",
            {"kv_bytes_per_token": ((FORMULA, FORMULA.replace("num_kv_heads", "num_heads")),)},
            says="query heads are counted, though nobody keeps a query",
        ),
        Edit(
            "forgets K or V",
            {"kv_bytes_per_token": ((FORMULA, FORMULA.removeprefix("2 * ")),)},
            says="only K or only V is counted",
        ),
        Edit(
            "one layer",
            {"kv_bytes_per_token": ((FORMULA, FORMULA.replace("shape.num_layers * ", "")),)},
            says="one layer is counted, not all of them",
        ),
        Edit(
            "numbers, not bytes",
            {"kv_bytes_per_token": ((FORMULA, FORMULA.removesuffix(" * bytes_per_number")),)},
            says="numbers are counted, not their bytes",
        ),
        Edit(
            "always fp16",
            {"kv_bytes_per_token": ((FORMULA, FORMULA.replace("bytes_per_number", "2")),)},
            says="every number takes two bytes, whatever was asked for",
        ),
        Edit(
            "prints",
            {"kv_bytes_per_token": ((f"return {FORMULA}", f"print({FORMULA})"),)},
            says="nothing is returned",
        ),
        Edit(
            "two latents",
            {"kv_bytes_per_token": ((LATENT, "2 * " + LATENT),)},
            says="the latent is counted twice",
        ),
        Edit(
            "a latent for every head",
            {"kv_bytes_per_token": ((LATENT, "shape.num_heads * " + LATENT),)},
            says="every head has a latent of its own",
        ),
        Edit(
            "no latent",
            {"kv_bytes_per_token": (("if shape.latent_dim:", "if False:"),)},
            says="the latent is ignored",
        ),
    ),
    "03.2": (
        Edit(
            "mends the head dim alone",
            {"shape_of": (('text.get("num_key_value_heads") or heads', "heads // 4"),)},
            says="four query heads are taken to share a KV head",
        ),
        Edit(
            "mends the KV heads alone",
            {"shape_of": (('text["hidden_size"] // heads', 'text["hidden_size"]'),)},
            says="one head is given the whole hidden size",
        ),
        Edit(
            "takes the query heads",
            {"shape_of": (('text.get("num_key_value_heads") or heads', "heads"),)},
            says="the query heads are taken, though the config states the KV heads",
        ),
        Edit(
            "passes null on",
            {
                "shape_of": (
                    (
                        'text.get("num_key_value_heads") or heads',
                        'text.get("num_key_value_heads", heads)',
                    ),
                )
            },
            says="the file says null",
        ),
        Edit(
            "demands the KV heads",
            {
                "shape_of": (
                    (
                        'text.get("num_key_value_heads") or heads',
                        'text["num_key_value_heads"]',
                    ),
                )
            },
            says="a field is demanded that need not be there",
        ),
        Edit(
            "always shares the hidden size out",
            {"shape_of": (('text.get("head_dim") or text.get("v_head_dim") or ', ""),)},
            says="the hidden size is shared out, though the config states the head dim",
        ),
        Edit(
            "divides into a float",
            {"shape_of": (('text["hidden_size"] // heads', 'text["hidden_size"] / heads'),)},
            says="a shape has whole numbers",
        ),
        Edit(
            "shares it among the KV heads",
            {"shape_of": (('text["hidden_size"] // heads', 'text["hidden_size"] // kv_heads'),)},
            says="the KV heads share the hidden size",
        ),
        Edit(
            "the other meaning of groups",
            {
                "shape_of": (
                    (
                        'kv_heads = text.get("num_key_value_heads") or heads',
                        'kv_heads = heads // (text.get("num_key_value_heads") or 1)',
                    ),
                )
            },
            says="the size of a group is taken for the number of KV heads",
        ),
    ),
    "03.3": (
        Edit(
            "K and V for nothing",
            {"decode_ceiling": (("(weight_bytes + batch * kv_bytes)", "weight_bytes"),)},
            says="K and V are not read",
        ),
        Edit(
            "steps, not tokens",
            {"decode_ceiling": (("batch * bandwidth", "bandwidth"),)},
            says="these are the steps a second",
        ),
        Edit(
            "K and V are shared",
            {"decode_ceiling": (("batch * kv_bytes", "kv_bytes"),)},
            says="the batch shares one K and V",
        ),
        Edit(
            "weights for everyone",
            {
                "decode_ceiling": (
                    ("(weight_bytes + batch * kv_bytes)", "(batch * (weight_bytes + kv_bytes))"),
                )
            },
            says="the weights are read again for each sequence",
        ),
        Edit(
            "seconds",
            {
                "decode_ceiling": (
                    (
                        "return batch * bandwidth / (weight_bytes + batch * kv_bytes)",
                        "return (weight_bytes + batch * kv_bytes) / bandwidth / batch",
                    ),
                )
            },
            says="these are the seconds a token takes",
        ),
        Edit(
            "gigabytes",
            {"judge_claims": (("        key: (figure, ", "        key: (figure / 1e9, "),)},
            says="the figure is in GB, not in bytes",
        ),
        Edit(
            "K is a thousand",
            {"judge_claims": (('"70B 8K GQA": 8 * 1024', '"70B 8K GQA": 8 * 1000'),)},
            says="K is taken for 1,000 tokens",
        ),
        Edit(
            "MHA with 8 KV heads",
            {"judge_claims": (("kv_bytes_per_token(with_mha)", "kv_bytes_per_token(llama_70b)"),)},
            says="the shape still has 8 KV heads",
        ),
        Edit(
            "one context",
            {"judge_claims": (("4 * 128 * 1024", "128 * 1024"),)},
            says="one context is counted, not four",
        ),
        Edit(
            "believes everything",
            {"judge_claims": (("<= 0.1", "<= 100"),)},
            says="the verdict does not follow from claim and figure",
        ),
        Edit(
            "one byte a weight",
            {"judge_claims": (("weights = 2 * llama", "weights = llama"),)},
            says="a weight is taken for one byte",
        ),
        Edit(
            "rounds down",
            {"judge_claims": (("math.ceil", "math.floor"),)},
            says="with a batch of 4 the claim is still impossible",
        ),
        Edit(
            "a speed is right or wrong",
            {"judge_claims": (('"impossible" if CLAIMS', '"wrong" if CLAIMS'),)},
            says="the verdict of a speed",
        ),
    ),
    "03.4": (
        Edit(
            "stores the last token",
            {"slots_at": (("prompt + output - 1", "prompt + output"),)},
            says="the last token counts as stored",
        ),
        Edit(
            "stores a token at once",
            {"slots_at": (("prompt + step - 1", "prompt + step"),)},
            says="a token counts as stored in the step that gives it",
        ),
        Edit(
            "future and internal",
            {"slots_at": (("final - used, reserved - final", "reserved - final, final - used"),)},
            says="future and internal have changed places",
        ),
        Edit(
            "everything is future",
            {"slots_at": (("final - used, reserved - final", "reserved - used, 0"),)},
            says="all that is not used is called future",
        ),
        Edit(
            "everything is internal",
            {"slots_at": (("final - used, reserved - final", "0, reserved - used"),)},
            says="all that is not used is called internal",
        ),
        Edit(
            "takes what it can get",
            {"slots_at": (("if final > reserved:", "if False:"),)},
            says="nothing compares what is needed with what is reserved",
        ),
        Edit(
            "wants one slot more",
            {"slots_at": (("if final > reserved:", "if final >= reserved:"),)},
            says="a reservation that is just enough is refused",
        ),
        Rewrite(
            "begins with step 0",
            {
                "shares_over_lives": """
def shares_over_lives(lengths, reserve):
    sums = [0, 0, 0]
    for length in lengths:
        for step in range(length.output):
            use = slots_at(reserve(length), length.prompt, length.output, step)
            sums = [total + count for total, count in zip(sums, use, strict=True)]
    return [total / sum(sums) for total in sums]
""",
            },
            says="a life begins with step 0 here",
        ),
        Edit(
            "passes the function on",
            {"shares_over_lives": (("length.output, reserve(length)", "length.output, reserve"),)},
            says="`reserve` is a function: call it",
        ),
        Rewrite(
            "averages percentages",
            {
                "shares_over_lives": """
def shares_over_lives(lengths, reserve):
    shares = [0.0, 0.0, 0.0]
    for length in lengths:
        reserved = reserve(length)
        steps = range(1, length.output + 1)
        uses = [slots_at(reserved, length.prompt, length.output, step) for step in steps]
        for index in range(3):
            mean = sum(use[index] for use in uses) / (reserved * length.output)
            shares[index] += mean / len(lengths)
    return shares
""",
            },
            says="each request's own shares are averaged",
        ),
        Rewrite(
            "looks at the end",
            {
                "shares_over_lives": """
def shares_over_lives(lengths, reserve):
    uses = [slots_at(reserve(one), one.prompt, one.output, one.output) for one in lengths]
    sums = [sum(column) for column in zip(*uses, strict=True)]
    return [count / sum(sums) for count in sums]
""",
            },
            says="only the end of each life is looked at",
        ),
        Edit(
            "slots, not shares",
            {
                "shares_over_lives": (
                    ("[used / held, future / held, internal / held]", "[used, future, internal]"),
                )
            },
            says="these are slots, not shares of them",
        ),
    ),
    "03.5": tuple(
        Rewrite(
            name,
            {"five_processes": f"def five_processes():\n    return {numbers}\n"},
            says,
        )
        for name, numbers, says in (
            (
                "what is held",
                {"free": 12, "largest": 4, "pairs": 4, "triples": 9, "most": 12},
                "this is what is still held",
            ),
            (
                "free is free",
                {"free": 8, "largest": 8, "pairs": 10, "triples": 10, "most": 4},
                "8 KB are free, but not in one piece: C lies between",
            ),
            (
                "memory is a ring",
                {"free": 8, "largest": 4, "pairs": 5, "triples": 9, "most": 12},
                "memory does not go round",
            ),
            (
                "three in a row",
                {"free": 8, "largest": 4, "pairs": 4, "triples": 3, "most": 12},
                "two in a row are enough",
            ),
            (
                "two holes at most",
                {"free": 8, "largest": 4, "pairs": 4, "triples": 9, "most": 8},
                "a third process can leave and touch neither",
            ),
            (
                "leaves one out",
                {"free": 8, "largest": 4, "pairs": 4, "triples": 9},
                "a key is missing",
            ),
        )
    ),
    "03.6": (
        Edit(
            "does not cut the hole",
            {"ContiguousMemory.allocate": ((SHRINK, "pass"), ("del self.holes[index]", "pass"))},
            says="the hole is not cut",
        ),
        Edit(
            "keeps empty holes",
            {"ContiguousMemory.allocate": (("if room > size:", "if True:"),)},
            says="a hole of size 0 is kept",
        ),
        Edit(
            "puts what is left at the end",
            {
                "ContiguousMemory.allocate": (
                    (
                        SHRINK,
                        "del self.holes[index]; self.holes.append((start + size, room - size))",
                    ),
                )
            },
            says="what is left of the hole isn't at its place",
        ),
        Edit(
            "takes from the end",
            {
                "ContiguousMemory.allocate": (
                    (
                        SHRINK,
                        "self.holes[index], start = (start, room - size), start + room - size",
                    ),
                )
            },
            says="pieces are taken from the end of the hole",
        ),
        Edit(
            "returns the index",
            {"ContiguousMemory.allocate": (("return start", "return index"),)},
            says="what is returned is not where the piece starts",
        ),
        Edit(
            "notes nothing",
            {"ContiguousMemory.allocate": (("self.pieces[start] = size", "pass"),)},
            says="the piece is not noted",
        ),
        Edit(
            "another error",
            {
                "ContiguousMemory.allocate": (
                    ("raise NoHole(size, self.largest_hole, self.num_free)", "raise ValueError"),
                )
            },
            says="an error of another kind is raised",
        ),
        Edit(
            "changes first, asks then",
            {
                "ContiguousMemory.release": (
                    ("raise ValueError(", "self.holes.append((start, 1)); raise ValueError("),
                )
            },
            says="something is changed before the error is raised",
        ),
        Edit(
            "never sorts",
            {"ContiguousMemory.release": (("sorted(self.holes)", "self.holes"),)},
            says="what comes back isn't at its place",
        ),
        Edit(
            "passes over an exact fit",
            {"ContiguousMemory.allocate": (("if room >= size:", "if room > size:"),)},
            says="a hole that is exactly as large as the piece is passed over",
        ),
        Edit(
            "compares with the sum",
            {"ContiguousMemory.allocate": (("if room >= size:", "if self.num_free >= size:"),)},
            says="the free units are compared as a sum",
        ),
        Edit(
            "best fit",
            {
                "ContiguousMemory.allocate": (
                    (
                        LOOP,
                        LOOP.replace("in enumerate(self.holes):", BEST),
                    ),
                )
            },
            says="best fit",
        ),
        Edit(
            "from the last hole",
            {
                "ContiguousMemory.allocate": (
                    (
                        LOOP,
                        LOOP.replace("in enumerate(self.holes):", BACKWARDS),
                    ),
                )
            },
            says="another order than that of their addresses",
        ),
        Rewrite(
            "never joins",
            {
                "ContiguousMemory.release": """
def release(self, start):
    if start not in self.pieces:
        raise ValueError(start)
    self.holes.append((start, self.pieces.pop(start)))
    self.holes.sort()
""",
            },
            says="neighbouring holes are not joined",
        ),
        Rewrite(
            "joins with the hole before only",
            {
                "ContiguousMemory.release": """
def release(self, start):
    if start not in self.pieces:
        raise ValueError(start)
    size = self.pieces.pop(start)
    for index, (begin, room) in enumerate(self.holes):
        if begin + room == start:
            self.holes[index] = (begin, room + size)
            return
    self.holes.append((start, size))
    self.holes.sort()
""",
            },
            says="joined with the hole on one side only",
        ),
        Rewrite(
            "joins with one hole",
            {
                "ContiguousMemory.release": """
def release(self, start):
    if start not in self.pieces:
        raise ValueError(start)
    size = self.pieces.pop(start)
    for index, (begin, room) in enumerate(self.holes):
        if begin + room == start:
            self.holes[index] = (begin, room + size)
            return
        if start + size == begin:
            self.holes[index] = (start, size + room)
            return
    self.holes.append((start, size))
    self.holes.sort()
""",
            },
            says="a piece between two holes is joined with one of them only",
        ),
        Rewrite(
            "forgets nothing",
            {
                "ContiguousMemory.release": """
def release(self, start):
    if start not in self.pieces:
        raise ValueError(start)
    self.holes.append((start, self.pieces[start]))
    merged = []
    for begin, size in sorted(self.holes):
        if merged and sum(merged[-1]) == begin:
            begin, before = merged.pop()
            size += before
        merged.append((begin, size))
    self.holes = merged
""",
            },
            says="the piece is still noted as handed out",
        ),
        Edit(
            "asks nothing",
            {
                "ContiguousMemory.release": (
                    ("if start not in self.pieces:", "if False:"),
                    ("self.pieces.pop(start)", "self.pieces.pop(start, 0)"),
                )
            },
            says="nothing asks whether a piece starts there",
        ),
    ),
}
