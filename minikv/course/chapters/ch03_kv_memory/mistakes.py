"""Chapter 03: mistakes that a reader may make, each as a wrong solution."""

from minikv.course.harness.mistakes import Mistake

FORMULA = "2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * bytes_per_number"
LATENT = "shape.num_layers * shape.latent_dim * bytes_per_number"

SHRINK = "self.holes[index] = (start + size, room - size)"
LOOP = "for index, (start, room) in enumerate(self.holes):"
BEST = "in sorted(enumerate(self.holes), key=lambda hole: hole[1][1]):"
BACKWARDS = "in reversed(list(enumerate(self.holes))):"


def processes(**numbers: int) -> dict[str, str]:
    """An answer to exercise 03.5."""
    return {"five_processes": f"def five_processes():\n    return {numbers}\n"}


MISTAKES = {
    "03.1": (
        Mistake(
            "counts query heads",
            edits={
                "kv_bytes_per_token": ((FORMULA, FORMULA.replace("num_kv_heads", "num_heads")),)
            },
            cause="query heads are counted, though nobody keeps a query",
            look="whose heads do you multiply by: those of the queries, or those of K and V?",
        ),
        Mistake(
            "forgets K or V",
            edits={"kv_bytes_per_token": ((FORMULA, FORMULA.removeprefix("2 * ")),)},
            cause="only K or only V is counted",
            look="where does the 2 of the formula come from?",
        ),
        Mistake(
            "one layer",
            edits={"kv_bytes_per_token": ((FORMULA, FORMULA.replace("shape.num_layers * ", "")),)},
            cause="one layer is counted, not all of them",
            look="the factors of 2 · layers · KV heads · head dim · bytes: which is missing, or "
            "too many?",
        ),
        Mistake(
            "numbers, not bytes",
            edits={"kv_bytes_per_token": ((FORMULA, FORMULA.removesuffix(" * bytes_per_number")),)},
            cause="numbers are counted, not their bytes",
            look="what becomes of `bytes_per_number`?",
        ),
        Mistake(
            "always fp16",
            edits={"kv_bytes_per_token": ((FORMULA, FORMULA.replace("bytes_per_number", "2")),)},
            cause="every number takes two bytes, whatever was asked for",
            look="what becomes of `bytes_per_number`?",
        ),
        Mistake(
            "prints",
            edits={"kv_bytes_per_token": ((f"return {FORMULA}", f"print({FORMULA})"),)},
            cause="nothing is returned",
            look="`print` shows a number, `return` hands it over",
        ),
        Mistake(
            "two latents",
            edits={"kv_bytes_per_token": ((LATENT, "2 * " + LATENT),)},
            cause="the latent is counted twice, but keys and values come from the same one",
            look="does the 2 of K and V belong here?",
        ),
        Mistake(
            "a latent for every head",
            edits={"kv_bytes_per_token": ((LATENT, "shape.num_heads * " + LATENT),)},
            cause="every head has a latent of its own, but all heads share one",
            look="how many latents are there in a layer?",
        ),
        Mistake(
            "no latent",
            edits={"kv_bytes_per_token": (("if shape.latent_dim:", "if False:"),)},
            cause="the latent is ignored: these are the bytes of K and V heads that nobody keeps",
            look="what is different when `latent_dim` is not 0?",
        ),
    ),
    "03.2": (
        Mistake(
            "mends the head dim alone",
            edits={"shape_of": (('text.get("num_key_value_heads") or heads', "heads // 4"),)},
            cause="four query heads are taken to share a KV head, whatever the config says",
            look="what does the config say of KV heads, and what does its silence mean?",
        ),
        Mistake(
            "mends the KV heads alone",
            edits={"shape_of": (('text["hidden_size"] // heads', 'text["hidden_size"]'),)},
            cause="where no head dim is stated, one head is given the whole hidden size",
            look="who shares the hidden size, and when does it matter at all?",
        ),
        Mistake(
            "takes the query heads",
            edits={"shape_of": (('text.get("num_key_value_heads") or heads', "heads"),)},
            cause="the query heads are taken, though the config states the KV heads",
            look="what does the config say of KV heads, and what does its silence mean?",
        ),
        Mistake(
            "passes null on",
            edits={
                "shape_of": (
                    (
                        'text.get("num_key_value_heads") or heads',
                        'text.get("num_key_value_heads", heads)',
                    ),
                )
            },
            cause="the file says null, which is as good as nothing, and null is passed on",
            look="what does the config say of KV heads, and what does its silence mean?",
        ),
        Mistake(
            "demands the KV heads",
            edits={
                "shape_of": (
                    (
                        'text.get("num_key_value_heads") or heads',
                        'text["num_key_value_heads"]',
                    ),
                )
            },
            cause="a field is demanded that need not be there",
            look="what does the docstring say of a config without it?",
        ),
        Mistake(
            "always shares the hidden size out",
            edits={"shape_of": (('text.get("head_dim") or text.get("v_head_dim") or ', ""),)},
            cause="the hidden size is shared out, though the config states the head dim",
            look="who shares the hidden size, and when does it matter at all?",
        ),
        Mistake(
            "divides into a float",
            edits={"shape_of": (('text["hidden_size"] // heads', 'text["hidden_size"] / heads'),)},
            cause="a shape has whole numbers, and `/` gives a float",
            look="`//`",
        ),
        Mistake(
            "shares it among the KV heads",
            edits={
                "shape_of": (('text["hidden_size"] // heads', 'text["hidden_size"] // kv_heads'),)
            },
            cause="the KV heads share the hidden size, but it is the query heads that do",
            look="who shares the hidden size, and when does it matter at all?",
        ),
        Mistake(
            "the other meaning of groups",
            edits={
                "shape_of": (
                    (
                        'kv_heads = text.get("num_key_value_heads") or heads',
                        'kv_heads = heads // (text.get("num_key_value_heads") or 1)',
                    ),
                )
            },
            cause="the size of a group is taken for the number of KV heads",
            look="what does the config say of KV heads, and what does its silence mean?",
        ),
    ),
    "03.3": (
        Mistake(
            "K and V for nothing",
            edits={"decode_ceiling": (("(weight_bytes + batch * kv_bytes)", "weight_bytes"),)},
            cause="K and V are not read, though attention looks at all of them in each step",
            look="what does one step read, and how many tokens does it give?",
        ),
        Mistake(
            "steps, not tokens",
            edits={"decode_ceiling": (("batch * bandwidth", "bandwidth"),)},
            cause="these are the steps a second: each gives every sequence of the batch a token",
            look="what does one step read, and how many tokens does it give?",
        ),
        Mistake(
            "K and V are shared",
            edits={"decode_ceiling": (("batch * kv_bytes", "kv_bytes"),)},
            cause="the batch shares one K and V, but each sequence has its own",
            look="what does one step read, and how many tokens does it give?",
        ),
        Mistake(
            "weights for everyone",
            edits={
                "decode_ceiling": (
                    ("(weight_bytes + batch * kv_bytes)", "(batch * (weight_bytes + kv_bytes))"),
                )
            },
            cause="the weights are read again for each sequence, but a step reads them once",
            look="what does one step read, and how many tokens does it give?",
        ),
        Mistake(
            "seconds",
            edits={
                "decode_ceiling": (
                    (
                        "return batch * bandwidth / (weight_bytes + batch * kv_bytes)",
                        "return (weight_bytes + batch * kv_bytes) / bandwidth / batch",
                    ),
                )
            },
            cause="these are the seconds a token takes, not the tokens a second",
            look="what does one step read, and how many tokens does it give?",
        ),
        Mistake(
            "gigabytes",
            edits={"judge_claims": (("        key: (figure, ", "        key: (figure / 1e9, "),)},
            cause="the figure is in GB, not in bytes",
            look="the units in the docstring",
        ),
        Mistake(
            "K is a thousand",
            edits={"judge_claims": (('"70B 8K GQA": 8 * 1024', '"70B 8K GQA": 8 * 1000'),)},
            cause="K is taken for 1,000 tokens; with contexts it is 1,024",
            look="8K, 32K, 128K tokens",
        ),
        Mistake(
            "MHA with 8 KV heads",
            edits={
                "judge_claims": (("kv_bytes_per_token(with_mha)", "kv_bytes_per_token(llama_70b)"),)
            },
            cause="MHA has the same figure as GQA: the shape still has 8 KV heads",
            look="dataclasses.replace(shape, num_kv_heads=…)",
        ),
        Mistake(
            "one context",
            edits={"judge_claims": (("4 * 128 * 1024", "128 * 1024"),)},
            cause="one context is counted, not four",
            look="the line of this claim",
        ),
        Mistake(
            "believes everything",
            edits={"judge_claims": (("<= 0.1", "<= 100"),)},
            cause="the verdict does not follow from claim and figure: within 10 % is right",
            look="figure / CLAIMS[key].said",
        ),
        Mistake(
            "one byte a weight",
            edits={"judge_claims": (("weights = 2 * llama", "weights = llama"),)},
            cause="a weight is taken for one byte; bf16 has two",
            look="what does one step read, and how many tokens does it give?",
        ),
        Mistake(
            "rounds down",
            edits={"judge_claims": (("math.ceil", "math.floor"),)},
            cause="rounded down: with a batch of 4 the claim is still impossible",
            look="claim / ceiling of one stream, rounded how?",
        ),
        Mistake(
            "a speed is right or wrong",
            edits={"judge_claims": (('"impossible" if CLAIMS', '"wrong" if CLAIMS'),)},
            cause="the verdict of a speed: impossible above the ceiling, possible below",
            look="the ceiling, against the 1,990 tokens/s of the claim",
        ),
    ),
    "03.4": (
        Mistake(
            "stores the last token",
            edits={"slots_at": (("prompt + output - 1", "prompt + output"),)},
            cause="the last token counts as stored, but nobody asks what follows it",
            look="how many tokens are stored when the last one has been given?",
        ),
        Mistake(
            "stores a token at once",
            edits={"slots_at": (("prompt + step - 1", "prompt + step"),)},
            cause="a token counts as stored in the step that gives it; it is stored in the next",
            look="what is stored after the prefill?",
        ),
        Mistake(
            "future and internal",
            edits={
                "slots_at": (("final - used, reserved - final", "reserved - final, final - used"),)
            },
            cause="future and internal have changed places",
            look="which of the two will this request fill?",
        ),
        Mistake(
            "everything is future",
            edits={"slots_at": (("final - used, reserved - final", "reserved - used, 0"),)},
            cause="all that is not used is called future; most of it never will be",
            look="how many tokens are stored when the last one has been given?",
        ),
        Mistake(
            "everything is internal",
            edits={"slots_at": (("final - used, reserved - final", "0, reserved - used"),)},
            cause="all that is not used is called internal; some of it will be",
            look="how many tokens are stored when the last one has been given?",
        ),
        Mistake(
            "takes what it can get",
            edits={"slots_at": (("if final > reserved:", "if False:"),)},
            cause="nothing compares what is needed with what is reserved",
            look="the first lines of `slots_at`",
        ),
        Mistake(
            "wants one slot more",
            edits={"slots_at": (("if final > reserved:", "if final >= reserved:"),)},
            cause="a reservation that is just enough is refused",
            look="`>` or `>=`? how many tokens are ever stored?",
        ),
        Mistake(
            "begins with step 0",
            sources={
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
            cause="a life begins with step 0 here, but the prefill is step 1",
            look="over which steps do you add up?",
        ),
        Mistake(
            "passes the function on",
            edits={
                "shares_over_lives": (("length.output, reserve(length)", "length.output, reserve"),)
            },
            cause="`reserve` is a function: call it",
            look="reserve(length)",
        ),
        Mistake(
            "averages percentages",
            sources={
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
            cause="each request's own shares are averaged, but a long one holds its slots for "
            "longer",
            look="when do you divide: for each request, or once?",
        ),
        Mistake(
            "looks at the end",
            sources={
                "shares_over_lives": """
def shares_over_lives(lengths, reserve):
    uses = [slots_at(reserve(one), one.prompt, one.output, one.output) for one in lengths]
    sums = [sum(column) for column in zip(*uses, strict=True)]
    return [count / sum(sums) for count in sums]
""",
            },
            cause="only the end of each life is looked at; nothing is held for the future there",
            look="over which steps do you add up?",
        ),
        Mistake(
            "slots, not shares",
            edits={
                "shares_over_lives": (
                    ("[used / held, future / held, internal / held]", "[used, future, internal]"),
                )
            },
            cause="these are slots, not shares of them",
            look="what do the three have to add up to?",
        ),
    ),
    "03.5": (
        Mistake(
            "what is held",
            sources=processes(free=12, largest=4, pairs=4, triples=9, most=12),
            cause="this is what is still held, by three processes",
            look="who left, and how much had they?",
        ),
        Mistake(
            "free is free",
            sources=processes(free=8, largest=8, pairs=10, triples=10, most=4),
            cause="8 KB are free, but not in one piece: C lies between",
            look="where are the two holes?",
        ),
        Mistake(
            "memory is a ring",
            sources=processes(free=8, largest=4, pairs=5, triples=9, most=12),
            cause="E and A are no neighbours: memory does not go round",
            look="AB leaves one hole of 8; what does AC leave?",
        ),
        Mistake(
            "three in a row",
            sources=processes(free=8, largest=4, pairs=4, triples=3, most=12),
            cause="these are the triples of three in a row; two in a row are enough",
            look="which triples have no two neighbours in them?",
        ),
        Mistake(
            "two holes at most",
            sources=processes(free=8, largest=4, pairs=4, triples=9, most=8),
            cause="a third process can leave and touch neither of the other two",
            look="how many can leave so that no two touch?",
        ),
        Mistake(
            "leaves one out",
            sources=processes(free=8, largest=4, pairs=4, triples=9),
            cause="a key is missing or spelled otherwise",
            look="the keys in the docstring",
        ),
    ),
    "03.6": (
        Mistake(
            "does not cut the hole",
            edits={
                "ContiguousMemory.allocate": ((SHRINK, "pass"), ("del self.holes[index]", "pass"))
            },
            cause="the hole is not cut, so the same units are given out twice",
            look="what becomes of the hole that a piece is taken from?",
        ),
        Mistake(
            "keeps empty holes",
            edits={"ContiguousMemory.allocate": (("if room > size:", "if True:"),)},
            cause="a hole of size 0 is kept",
            look="what if nothing is left of the hole?",
        ),
        Mistake(
            "puts what is left at the end",
            edits={
                "ContiguousMemory.allocate": (
                    (
                        SHRINK,
                        "del self.holes[index]; self.holes.append((start + size, room - size))",
                    ),
                )
            },
            cause="what is left of the hole isn't at its place in the order of addresses",
            look="`holes` is in the order of addresses",
        ),
        Mistake(
            "takes from the end",
            edits={
                "ContiguousMemory.allocate": (
                    (
                        SHRINK,
                        "self.holes[index], start = (start, room - size), start + room - size",
                    ),
                )
            },
            cause="pieces are taken from the end of the hole",
            look="which hole is taken when several are large enough?",
        ),
        Mistake(
            "returns the index",
            edits={"ContiguousMemory.allocate": (("return start", "return index"),)},
            cause="what is returned is not where the piece starts, but a hole's index, perhaps",
            look="the return value",
        ),
        Mistake(
            "notes nothing",
            edits={"ContiguousMemory.allocate": (("self.pieces[start] = size", "pass"),)},
            cause="the piece is not noted",
            look="self.pieces[…] = …",
        ),
        Mistake(
            "another error",
            edits={
                "ContiguousMemory.allocate": (
                    ("raise NoHole(size, self.largest_hole, self.num_free)", "raise ValueError"),
                )
            },
            cause="an error of another kind is raised",
            look="with what is `size` compared, and what if no hole has it?",
        ),
        Mistake(
            "changes first, asks then",
            edits={
                "ContiguousMemory.release": (
                    ("raise ValueError(", "self.holes.append((start, 1)); raise ValueError("),
                )
            },
            cause="something is changed before the error is raised",
            look="what stands above `raise`?",
        ),
        Mistake(
            "never sorts",
            edits={"ContiguousMemory.release": (("sorted(self.holes)", "self.holes"),)},
            cause="what comes back isn't at its place in the order of addresses",
            look="`holes` is in the order of addresses",
        ),
        Mistake(
            "passes over an exact fit",
            edits={"ContiguousMemory.allocate": (("if room >= size:", "if room > size:"),)},
            cause="a hole that is exactly as large as the piece is passed over",
            look="which hole is taken when several are large enough?",
        ),
        Mistake(
            "compares with the sum",
            edits={
                "ContiguousMemory.allocate": (("if room >= size:", "if self.num_free >= size:"),)
            },
            cause="the free units are compared as a sum, but a piece lies in one hole",
            look="with what is `size` compared, and what if no hole has it?",
        ),
        Mistake(
            "best fit",
            edits={
                "ContiguousMemory.allocate": (
                    (
                        LOOP,
                        LOOP.replace("in enumerate(self.holes):", BEST),
                    ),
                )
            },
            cause="best fit: the tightest hole is taken, not the first",
            look="which hole is taken when several are large enough?",
        ),
        Mistake(
            "from the last hole",
            edits={
                "ContiguousMemory.allocate": (
                    (
                        LOOP,
                        LOOP.replace("in enumerate(self.holes):", BACKWARDS),
                    ),
                )
            },
            cause="holes are searched in another order than that of their addresses",
            look="which hole is taken when several are large enough?",
        ),
        Mistake(
            "never joins",
            sources={
                "ContiguousMemory.release": """
def release(self, start):
    if start not in self.pieces:
        raise ValueError(start)
    self.holes.append((start, self.pieces.pop(start)))
    self.holes.sort()
""",
            },
            cause="neighbouring holes are not joined, so nothing large ever fits again",
            look="which holes does the piece touch: the one before, the one behind?",
        ),
        Mistake(
            "joins with the hole before only",
            sources={
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
            cause="a piece is joined with the hole on one side only, before it or behind it",
            look="which holes does the piece touch: the one before, the one behind?",
        ),
        Mistake(
            "joins with one hole",
            sources={
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
            cause="a piece between two holes is joined with one of them only",
            look="which holes does the piece touch: the one before, the one behind?",
        ),
        Mistake(
            "forgets nothing",
            sources={
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
            cause="the piece is still noted as handed out after it came back",
            look="what becomes of its entry in `pieces`?",
        ),
        Mistake(
            "asks nothing",
            edits={
                "ContiguousMemory.release": (
                    ("if start not in self.pieces:", "if False:"),
                    ("self.pieces.pop(start)", "self.pieces.pop(start, 0)"),
                )
            },
            cause="nothing asks whether a piece starts there",
            look="the first lines of `release`",
        ),
    ),
}
