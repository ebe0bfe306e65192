"""Chapter 03: mistakes that a reader may make, each as a wrong solution."""

from minikv.course.harness.mistakes import Mistake

RELEASE = """
def release(self, start):
    if start not in self.pieces:
        raise ValueError(start)
    size = self.pieces.pop(start)
"""
LOOP = "for index, (start, room) in enumerate(self.holes):"
SHRINK = "self.holes[index] = (start + size, room - size)"
SLOTS = "used, final - used, reserved - final"
KV_HEADS = 'text.get("num_key_value_heads") or heads'
SHARED_OUT = 'text["hidden_size"] // heads'
FIGURE, JUDGED = "        key: (figure, ", "    judged = {\n"
CLAIMED = ("7B 4K", "70B 32K", "70B 8K GQA", "70B 8K MHA", "1B token", "3B token", "11B token",
           "11B 4 x 128K", "1B speed", "1B batch")  # fmt: skip
THOUSANDS = (("4096", "4000"), ("32 * 1024", "32 * 1000"), ('GQA": 8 * 1024',
             'GQA": 8 * 1000'), ('MHA": 8 * 1024', 'MHA": 8 * 1000'),
             ("128 * 1024", "128 * 1000"))  # fmt: skip
NO_KEY = ("a key is missing or spelled otherwise", "the keys in the docstring")
EACH_STEP = """
def shares_over_lives(lengths, reserve):
    uses = [
        slots_at(reserve(length), length.prompt, length.output, step)
        for length in lengths
        for step in STEPS
    ]
    sums = [sum(column) for column in zip(*uses, strict=True)]
    return [count / (sum(sums) or 1) for count in sums]
"""
WEIGHTED = """
def shares_over_lives(lengths, reserve):
    sums = [0, 0, 0]
    for length in lengths:
        for step in range(1, length.output + 1):
            uses = slots_at(reserve(length), length.prompt, length.output, step)
            sums = [total + use / (WEIGHT) for total, use in zip(sums, uses)]
    return [total / sum(sums) for total in sums]
"""

# Where to look, if several mistakes are to be seen in one place.
FACTORS = "the factors of 2 · layers · KV heads · head dim · bytes: which is wrong?"
HEADS = "whose heads do you multiply by: those of the queries, or those of K and V?"
FORMAT = "what becomes of `bytes_per_number`?"
LATENTS = "how many latents are there in a layer?"
SILENCE = "what does the config say of KV heads, and what does its silence mean?"
SIZE = "who shares the hidden size, and when does it matter at all?"
STEP = "what does one step read, and how many tokens does it give?"
UNITS = "the units in the docstring"
ROUNDED = "claim / ceiling of one stream, rounded how?"
AS_IT_IS = "how many KV heads are there as it is, and how many if every query head has its own?"
LAST = "how many tokens are stored when the last one has been given?"
DIVIDE = "when do you divide: for each request, for each step, or once?"
OVER = "over which steps do you add up?"
ADDS_UP = "the three add up to what is reserved"
SPLIT = "what becomes of the hole that a piece is taken from?"
FIRST = "which hole is taken when several are large enough?"
MERGE = "which holes does the piece touch: the one before, the one behind?"
NO_HOLE = "with what is `size` compared, and what if no hole has it?"
SORTED = "`holes` is in the order of addresses"


def made(path: str, *records: tuple) -> tuple[Mistake, ...]:
    """Mistakes in one place: (name, change, cause, look) each. A change is either the whole
    definition, or what is exchanged in the reference's: old, new, old, new, …"""
    return tuple(
        Mistake(name, cause, look, sources={path: change})
        if isinstance(change, str)
        else Mistake(
            name, cause, look, edits={path: tuple(zip(change[::2], change[1::2], strict=True))}
        )
        for name, change, cause, look in records
    )


FIVE = {"free": 8, "largest": 4, "pairs": 4, "triples": 9, "most": 12}


def processes(key: str, number: int | None, cause: str, look: str, **others: int) -> Mistake:
    """A wrong answer to exercise 03.5, or none, and wrong ones that go with it."""
    answer = {one: n for one, n in (FIVE | {key: number} | others).items() if n is not None}
    text = f"def five_processes():\n    return {answer}\n"
    name = f"{key}: {number}" + " …" * bool(others)
    return Mistake(name, cause, look, sources={"five_processes": text})


MISTAKES = {
    "03.1": made(
        "kv_bytes_per_token",
        ("counts query heads", ("shape.num_kv_heads", "shape.num_heads"),
         "query heads are counted, though nobody keeps a query", HEADS),
        ("counts all heads", ("shape.num_kv_heads", "shape.num_heads * shape.num_kv_heads"),
         "query heads and KV heads are both counted", HEADS),
        ("counts groups", ("shape.num_kv_heads", "(shape.num_heads // shape.num_kv_heads)"),
         "the size of a group is counted, not the number of KV heads", HEADS),
        ("forgets K or V", ("2 * shape", "shape"),
         "only K or only V is counted", "where does the 2 of the formula come from?"),
        ("one layer", ("2 * shape.num_layers * ", "2 * "),
         "one layer is counted, not all of them", FACTORS),
        ("one number per head", (" * shape.head_dim", ""),
         "heads are counted, and not the numbers in each", FACTORS),
        ("numbers, not bytes", ("head_dim * bytes_per_number", "head_dim"),
         "numbers are counted, not their bytes", FORMAT),
        ("always fp16", ("head_dim * bytes_per_number", "head_dim * 2"),
         "every number takes two bytes, whatever was asked for", FORMAT),
        ("bits", ("head_dim * bytes_per_number", "head_dim * bytes_per_number // 8"),
         "`bytes_per_number` is in bytes already, not in bits", FORMAT),
        ("fp32 if none is named", ("bytes_per_number: int = 2", "bytes_per_number: int = 4"),
         "the default is another number format than fp16", "the default of `bytes_per_number`"),
        ("returns nothing", ("return 2 * shape", "number = 2 * shape"),
         "nothing is returned", "`print` shows a number, `return` hands it over"),
        ("two latents", ("return shape", "return 2 * shape"),
         "the latent is counted twice, but keys and values come from the same one",
         "does the 2 of K and V belong here?"),
        ("a latent for every head", ("return shape", "return shape.num_heads * shape"),
         "every head has a latent of its own, but all heads share one", LATENTS),
        ("a latent for every KV head", ("return shape", "return shape.num_kv_heads * shape"),
         "every KV head has a latent of its own, but all heads share one", LATENTS),
        ("two latents for every head", ("return shape", "return 2 * shape.num_heads * shape"),
         "every head has a latent of its own, for K and for V, but all heads share one", LATENTS),
        ("a latent in one layer", ("shape.num_layers * shape.latent_dim", "shape.latent_dim"),
         "the latent of one layer is counted, and every layer keeps one", LATENTS),
        ("a latent in fp16", ("shape.latent_dim * bytes_per_number", "shape.latent_dim * 2"),
         "every number of a latent takes two bytes, whatever was asked for", FORMAT),
        ("no latent", ("if shape.latent_dim:", "if False:"),
         "the latent is ignored: these are the bytes of K and V heads that nobody keeps",
         "what is different when `latent_dim` is not 0?"),
        ("a latent, and K and V", (
         "    if shape.latent_dim:\n        return shape", "    latent = shape",
         "    return 2 * shape", "    return latent + 2 * shape"),
         "the latent is kept in addition to K and V, and not in their place",
         "what is different when `latent_dim` is not 0?"),
    ),
    "03.2": made(
        "shape_of",
        ("mends the head dim alone", (KV_HEADS, "heads // 4"),
         "four query heads are taken to share a KV head, whatever the config says", SILENCE),
        ("mends the KV heads alone", (SHARED_OUT, 'text["hidden_size"]'),
         "where no head dim is stated, one head is given the whole hidden size", SIZE),
        ("takes the query heads", (KV_HEADS, "heads"),
         "the query heads are taken, though the config states the KV heads", SILENCE),
        ("passes null on", (KV_HEADS, 'text.get("num_key_value_heads", heads)'),
         "the file says null, which is as good as nothing, and null is passed on", SILENCE),
        ("passes null on for the head dim", (
         'text.get("head_dim") or text.get("v_head_dim") or text["hidden_size"] // heads',
         'text.get("head_dim", text.get("v_head_dim", text["hidden_size"] // heads))'),
         "the file says null for the head dim, which is as good as nothing, and null is passed on",
         SIZE),
        ("demands the KV heads", (KV_HEADS, 'text["num_key_value_heads"]'),
         "a field is demanded that need not be there",
         "what does the docstring say of a config without it?"),
        ("one KV head if none is stated", (KV_HEADS, 'text.get("num_key_value_heads") or 1'),
         "a config without KV heads is taken for MQA; it is MHA", SILENCE),
        ("always shares the hidden size out", (
         'text.get("head_dim") or text.get("v_head_dim") or ', ""),
         "the hidden size is shared out, though the config states the head dim", SIZE),
        ("knows no v_head_dim", (' or text.get("v_head_dim")', ""),
         'the head dim is stated as "v_head_dim" here, and the hidden size is shared out',
         "which names can the head dim have?"),
        ("divides into a float", (SHARED_OUT, 'text["hidden_size"] / heads'),
         "a shape has whole numbers, and `/` gives a float", "`//`"),
        ("shares it among the KV heads", (SHARED_OUT, 'text["hidden_size"] // kv_heads'),
         "the KV heads share the hidden size, but it is the query heads that do", SIZE),
        ("the other meaning of groups", (
         KV_HEADS, 'heads // (text.get("num_key_value_heads") or 1)'),
         "the size of a group is taken for the number of KV heads", SILENCE),
        ("reads the outer config", ('config.get("text_config", config)',
         '{**config.get("text_config", {}), **config}'),
         "what stands beside the language model is read, not the language model",
         'where is "text_config", and what may stand beside it?'),
        ("leaves the position out", (' + text["qk_rope_head_dim"]', ""),
         "the key that carries the position is left out",
         "what does a token leave behind in a layer: which two vectors, side by side?"),
        ("reads no latent", ('if text.get("kv_lora_rank")', "if False"),
         "the latent is not read", "the line for the latent was right"),
    ),
    "03.3": (
        *made(
            "decode_ceiling",
            ("K and V for nothing", ("(weight_bytes + batch * kv_bytes)", "weight_bytes"),
             "K and V are not read, though attention looks at all of them in each step", STEP),
            ("steps, not tokens", ("batch * bandwidth", "bandwidth"),
             "these are the steps a second: each gives every sequence of the batch a token", STEP),
            ("divided among the batch", ("batch * bandwidth", "bandwidth / batch"),
             "the speed of the batch is divided among its sequences", STEP),
            ("K and V are shared", ("batch * kv_bytes", "kv_bytes"),
             "the batch shares one K and V, but each sequence has its own", STEP),
            ("weights for everyone", (
             "(weight_bytes + batch * kv_bytes)", "(batch * (weight_bytes + kv_bytes))"),
             "the weights are read again for each sequence, but a step reads them once", STEP),
            ("seconds", ("return batch * bandwidth / (weight_bytes + batch * kv_bytes)",
             "return (weight_bytes + batch * kv_bytes) / bandwidth / batch"),
             "these are the seconds a token takes, not the tokens a second", STEP),
            ("whole steps", ("batch * bandwidth / ", "batch * bandwidth // "),
             "the ceiling is rounded down to a whole number", "`/` or `//`?"),
        ),
        *made(
            "judge_claims",
            *(
                (f"everything in {unit}", (FIGURE, FIGURE.replace("figure", f"figure / {size}")),
                 f"the figure is in {unit}, not in bytes", UNITS)
                for unit, size in (
                    ("GB", "1e9"), ("GiB", "2**30"), ("KB", "2**10"), ("MB", "2**20"),
                )
            ),
            ("the units of the claims", (FIGURE, FIGURE.replace("figure", 'figure / {"1B": 2**10, '
             '"3B": 2**10, "11B token": 2**20, "11B 4 x 128K": 1e12}'
             '.get(key if "11B" in key else key[:2], 1e9)')),
             "the figure has the unit of the claim, and is asked for in bytes", UNITS),
            ("one byte per number", (JUDGED,
             "    figures = {key: figure / 2 for key, figure in figures.items()}\n" + JUDGED),
             "K or V is missing, or a number is taken for one byte", "2 · layers · … · 2 bytes"),
            ("four bytes per number", (JUDGED,
             "    figures = {key: figure * 2 for key, figure in figures.items()}\n" + JUDGED),
             "a factor of 2 too many: four bytes per number, or K and V counted twice",
             "kv_bytes_per_token has both factors already"),
            *(
                (f"K is a thousand, {number}", change,
                 "K is taken for 1,000 tokens; with contexts it is 1,024", "8K, 32K, 128K tokens")
                for number, change in enumerate((sum(THOUSANDS[1:], ()), *THOUSANDS))
            ),
            ("a 70B with MHA", ("32 * 1024 * kv_bytes_per_token(llama_70b)",
             "32 * 1024 * kv_bytes_per_token(with_mha)"),
             "query heads are counted: that is what MHA would take, eight times as much",
             "how many KV heads has this model?"),
            ("MHA with 8 KV heads", ("per_token(with_mha)", "per_token(llama_70b)"),
             "MHA has the same figure as GQA: the shape still has 8 KV heads",
             "dataclasses.replace(shape, num_kv_heads=…)"),
            ("MHA is 4 × GQA", ("8 * 1024 * kv_bytes_per_token(with_mha)",
             "4 * 8 * 1024 * kv_bytes_per_token(llama_70b)"),
             "MHA is taken for 4 times GQA, as in the claim", AS_IT_IS),
            ("swaps GQA and MHA", ('"70B 8K GQA": 8', '"70B 8K XXX": 8', '"70B 8K MHA": 8',
             '"70B 8K GQA": 8', JUDGED,
             '    figures["70B 8K MHA"] = figures.pop("70B 8K XXX")\n' + JUDGED),
             "GQA and MHA have changed places", AS_IT_IS),
            ("the config becomes MHA", (JUDGED,
             '    CONFIGS["meta-llama/Meta-Llama-3-70B"]["num_key_value_heads"] = 64\n' + JUDGED),
             "CONFIGS itself is changed: after that the model has MHA for everybody",
             "dataclasses.replace(shape, num_kv_heads=…) makes a second shape"),
            ("the published 84 KB", ('kv_bytes_per_token(shapes["Llama-3.2-3B"])', "84 * 1024"),
             "this is the published figure: groups of four, which the 3B has not",
             "what does the config say of KV heads?"),
            ("the published 5 MB", (
             'vision = kv_bytes_per_token(shapes["Llama-3.2-11B-Vision"])', "vision = 5 * 2**20"),
             "this is the published figure: the whole hidden size in place of a head's",
             "what is the head dim, where none is stated?"),
            ("without cross-attention", (
             'kv_bytes_per_token(shapes["Llama-3.2-11B-Vision"])', "128 * 1024"),
             "the 8 cross-attention layers are left out. They do hold K and V of the image; "
             "asked for are all 40", "the line of this claim in the docstring"),
            ("one context", ("4 * 128 * 1024", "128 * 1024"),
             "one context is counted, not four", "the line of this claim"),
            ("believes everything", ("<= 0.1", "<= 100"),
             "the verdict does not follow from claim and figure: within 10 % is right",
             "figure / CLAIMS[key].said"),
            ("other words", ('"right" if abs', '"true" if abs', '1 else "wrong"', '1 else "false"'),
             "a verdict other than right and wrong", "the words in the docstring"),
            ("judges exactly", ("<= 0.1", "<= 0.05"),
             "a claim that is 7 % off is called wrong, though within 10 % is right",
             "figure / CLAIMS[key].said"),
            *(
                (f"no {key}", ("    return judged", f"    del judged[{key!r}]\n    return judged"),
                 *NO_KEY)
                for key in CLAIMED
            ),
            ("figures without verdicts", ("    return judged", "    return {k: v for k, (v, _) in "
             "judged.items()}"),
             "a figure without its verdict, or in another form", "the form in the docstring"),
            ("one byte a weight", ("weights = 2 * llama", "weights = llama"),
             "a weight is taken for one byte; bf16 has two", STEP),
            ("four bytes a weight", ("weights = 2 * llama", "weights = 4 * llama"),
             "a weight is taken for four bytes; bf16 has two", STEP),
            ("weights not tied", ('CONFIGS["meta-llama/Llama-3.2-1B"])',
             'CONFIGS["meta-llama/Llama-3.2-1B"] | {"tie_word_embeddings": False})'),
             "the embeddings are counted twice, and this config ties them to the output",
             "llama_parameters"),
            ("a round billion", ('2 * llama_parameters(CONFIGS["meta-llama/Llama-3.2-1B"])', "2e9"),
             "the weights are taken for a round billion; count them", "llama_parameters"),
            ("GB and GiB", ("decode_ceiling(weights, BANDWIDTH)",
             "decode_ceiling(weights, BANDWIDTH * 1e9 / 2**30)"),
             "GB and GiB are mixed", STEP),
            ("rounds down", ("math.ceil", "math.floor"),
             "rounded down: with a batch of 4 the claim is still impossible", ROUNDED),
            ("one more", ("math.ceil", "1 + math.ceil"),
             "one too many: is a batch of 5 impossible?", "math.ceil rounds up already"),
            ("a part of a sequence", ("math.ceil", ""), "a batch is a whole number", ROUNDED),
            ("a speed is right or wrong", ('"impossible" if CLAIMS', '"wrong" if CLAIMS'),
             "the verdict of a speed: impossible above the ceiling, possible below",
             "the ceiling, against the 1,990 tokens/s of the claim"),
        ),
    ),
    "03.4": (
        *made(
            "slots_at",
            ("stores the last token", ("prompt + output - 1", "prompt + output"),
             "the last token counts as stored, but nobody asks what follows it", LAST),
            ("stores a token at once", ("prompt + step - 1", "prompt + step"),
             "a token counts as stored in the step that gives it; it is stored in the next",
             "what is stored after the prefill?"),
            ("future and internal", (SLOTS, "used, reserved - final, final - used"),
             "future and internal have changed places",
             "which of the two will this request fill?"),
            ("everything is future", (SLOTS, "used, reserved - used, 0"),
             "all that is not used is called future; most of it never will be", LAST),
            ("everything is internal", (SLOTS, "used, 0, reserved - used"),
             "all that is not used is called internal; some of it will be", LAST),
            ("future twice", (SLOTS, "used, final - used, reserved - used"),
             "the slots of the future are counted as internal, too", ADDS_UP),
            ("used twice", (SLOTS, "used, final, reserved - final"),
             "all slots that are ever used are called future, also those used by now", ADDS_UP),
            ("takes what it can get", ("if final > reserved:", "if False:"),
             "nothing compares what is needed with what is reserved",
             "the first lines of `slots_at`"),
            ("compares the prompt", ("final > reserved:", "prompt > reserved:"),
             "only the prompt is compared with what is reserved", "the first lines of `slots_at`"),
            ("looks at the present only", ("final > reserved:", "prompt + step > reserved + 1:"),
             "a request that will need more than is reserved is refused only once it does",
             "how many slots does it need in the end?"),
            ("wants one slot more", ("if final > reserved:", "if final >= reserved:"),
             "a reservation that is just enough is refused",
             "`>` or `>=`? how many tokens are ever stored?"),
        ),
        *made(
            "shares_over_lives",
            ("begins with step 0", EACH_STEP.replace("STEPS", "range(length.output)"),
             "a life begins with step 0 here, but the prefill is step 1", OVER),
            ("leaves the last step out", EACH_STEP.replace("STEPS", "range(1, length.output)"),
             "the last step of each life is left out", "a life has `output` steps, from 1 on"),
            ("looks at the end", EACH_STEP.replace("STEPS", "[length.output]"),
             "only the end of each life is looked at; nothing is held for the future there", OVER),
            ("looks at the prefill", EACH_STEP.replace("STEPS", "[1]"),
             "only the prefill of each life is looked at", OVER),
            ("passes the function on", ("length.output, reserve(length)", "length.output, reserve"),
             "`reserve` is a function: call it", "reserve(length)"),
            ("averages percentages", WEIGHTED.replace("WEIGHT", "length.output * reserve(length)"),
             "each request's own shares are averaged, but a long one holds its slots for longer",
             DIVIDE),
            ("averages slots", WEIGHTED.replace("WEIGHT", "length.output"),
             "the slots of each request are averaged over its steps, but a long one has more steps",
             DIVIDE),
            ("averages steps", WEIGHTED.replace("WEIGHT", "reserve(length)"),
             "the shares of each step are averaged, but a large reservation holds more slots",
             DIVIDE),
            ("reserves for all alike", ("length.output, reserve(length)",
             "length.output, reserve(lengths[0])"),
             "every request gets the slots of the first", "what `reserve(length)` is asked for"),
            ("slots, not shares", (
             "[used / held, future / held, internal / held]", "[used, future, internal]"),
             "these are slots, not shares of them", "what do the three have to add up to?"),
        ),
    ),
    "03.5": (
        processes("free", 12, "this is what is still held, by three processes",
                  "who left, and how much had they?"),
        processes("free", 4, "this is one hole; two processes have left",
                  "who left, and how much had they?"),
        processes("largest", 8, "8 KB are free, but not in one piece: C lies between",
                  "where are the two holes?"),
        processes("largest", 8, "free KB are counted, wherever they lie; a process needs one piece",
                  "where are the two holes?", pairs=10, triples=10, most=4),
        processes("largest", 5, "5 KB is what will be asked for; no hole is that large",
                  "where are the two holes?"),
        *(
            processes("pairs", number, cause, "AB leaves one hole of 8; what does AC leave?")
            for number, cause in {
                10: "8 KB are free after every pair, but only neighbours leave them in one piece",
                0: "no process alone leaves 5 KB, but two neighbours leave 8 in one piece",
                5: "E and A are no neighbours: memory does not go round",
                8: "AB and BA are one pair",
                6: "these are the pairs after which it does not fit",
            }.items()
        ),
        *(
            processes("triples", number, cause, "which triples have no two neighbours in them?")
            for number, cause in {
                10: "there is one triple without any two neighbours",
                3: "these are the triples of three in a row; two in a row are enough",
                1: "this is the triple after which it does not fit",
            }.items()
        ),
        *(
            processes("most", number, cause, "how many can leave so that no two touch?")
            for number, cause in {
                8: "a third process can leave and touch neither of the other two",
                4: "there can be several holes of 4 KB at once",
                16: "of any four of the five, two are neighbours",
                20: "a memory that is all free is one hole",
            }.items()
        ),
        *(processes(key, None, *NO_KEY) for key in FIVE),
    ),
    "03.6": (
        *made(
            "ContiguousMemory.allocate",
            ("does not cut the hole", (SHRINK, "pass", "del self.holes[index]", "pass"),
             "the hole is not cut, so the same units are given out twice", SPLIT),
            ("cuts the size only", (SHRINK, "self.holes[index] = (start, room - size)"),
             "the hole shrinks, and its start stays where it was", SPLIT),
            ("keeps the old hole", (
             SHRINK, "self.holes.insert(index + 1, (start + size, room - size))"),
             "the old hole stays beside what is left of it", SPLIT),
            ("keeps empty holes", ("if room > size:", "if True:"),
             "a hole of size 0 is kept", "what if nothing is left of the hole?"),
            ("puts what is left at the end", (
             SHRINK, "del self.holes[index]; self.holes.append((start + size, room - size))"),
             "what is left of the hole isn't at its place in the order of addresses", SORTED),
            ("takes from the end", (
             SHRINK, "self.holes[index], start = (start, room - size), start + room - size"),
             "pieces are taken from the end of the hole", FIRST),
            ("returns the index", ("return start", "return index"),
             "what is returned is not where the piece starts, but a hole's index, perhaps",
             "the return value"),
            ("returns nothing", ("return start", "return"),
             "nothing is returned", "what stands after the hole is cut?"),
            ("notes nothing", ("self.pieces[start] = size", "pass"),
             "the piece is not noted", "self.pieces[…] = …"),
            ("notes the end", ("self.pieces[start] = size", "self.pieces[start] = start + size"),
             "the piece is noted with its end, not as start: size", "self.pieces[…] = …"),
            ("another error", ("raise NoHole(size, self.largest_hole, self.num_free)",
             "raise ValueError"),
             "an error of another kind than NoHole is raised", NO_HOLE),
            ("swaps largest and free", ("self.largest_hole, self.num_free",
             "self.num_free, self.largest_hole"),
             "`largest` and `free` have changed places", "NoHole(size, largest_hole, num_free)"),
            ("passes over an exact fit", ("if room >= size:", "if room > size:"),
             "a hole that is exactly as large as the piece is passed over", FIRST),
            ("compares with the sum", ("if room >= size:", "if self.num_free >= size:"),
             "the free units are compared as a sum, but a piece lies in one hole", NO_HOLE),
            ("best fit", (LOOP, LOOP.replace("enumerate(self.holes)",
             "sorted(enumerate(self.holes), key=lambda hole: hole[1][1])")),
             "best fit: the tightest hole is taken, not the first", FIRST),
            ("worst fit", (LOOP, LOOP.replace("enumerate(self.holes)",
             "sorted(enumerate(self.holes), key=lambda hole: -hole[1][1])")),
             "worst fit: the largest hole is taken, not the first", FIRST),
            ("from the last hole", (
             LOOP, LOOP.replace("enumerate(self.holes)", "reversed(list(enumerate(self.holes)))")),
             "holes are searched in another order than that of their addresses", FIRST),
        ),
        *made(
            "ContiguousMemory.release",
            ("changes first, asks then", (
             "raise ValueError(", "self.holes.append((start, 1)); raise ValueError("),
             "something is changed before the error is raised", "what stands above `raise`?"),
            ("never sorts", ("sorted(self.holes)", "self.holes"),
             "what comes back isn't at its place in the order of addresses", SORTED),
            ("gives nothing back", RELEASE,
             "a piece that is given back does not become a hole", MERGE),
            ("never joins", RELEASE + """
    self.holes.append((start, size))
    self.holes.sort()
""",
             "neighbouring holes are not joined, so nothing large ever fits again", MERGE),
            *(
                (f"joins with the hole {which} only", RELEASE + f"""
    for index, (begin, room) in enumerate(self.holes):
        if {"begin + room == start" if which == "before" else "start + size == begin"}:
            self.holes[index] = (min(begin, start), room + size)
            return
    self.holes.append((start, size))
    self.holes.sort()
""",
                 f"a piece is joined with the hole {which} it only, not on the other side", MERGE)
                for which in ("before", "behind")
            ),
            ("joins with one hole", RELEASE + """
    for index, (begin, room) in enumerate(self.holes):
        if begin + room == start or start + size == begin:
            self.holes[index] = (min(begin, start), room + size)
            return
    self.holes.append((start, size))
    self.holes.sort()
""",
             "a piece between two holes is joined with one of them only", MERGE),
            ("loses units", ("size += before", "size = max(size, before)"),
             "units are lost, or counted twice, where holes are joined", MERGE),
            ("forgets nothing", ("self.pieces.pop(start)", "self.pieces[start]"),
             "the piece is still noted as handed out after it came back",
             "what becomes of its entry in `pieces`?"),
            ("asks nothing", (
             "if start not in self.pieces:", "if False:", "self.pieces.pop(start)",
             "self.pieces.pop(start, 0)"),
             "nothing asks whether a piece starts there", "the first lines of `release`"),
            ("lets pop complain", ("if start not in self.pieces:", "if False:"),
             "`pop` and `[…]` raise KeyError where ValueError is asked for",
             "the first lines of `release`"),
        ),
    ),
}  # fmt: skip
