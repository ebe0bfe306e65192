"""Chapter 03: mistakes that a reader may make, each as a wrong solution."""

from minikv.course.exercises.mistakes import Mistake

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
CLAIMED = ("7B 4K", "70B 8K", "1B token", "3B token", "11B token", "1B speed")
NO_KEY = ("a key is missing or misspelled", "the keys in the docstring")
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
FORMAT = "where do you use `bytes_per_number`?"
LATENTS = "how many latents are there in a layer?"
SILENCE = "what does the config say about KV heads, and what if it says nothing?"
SIZE = "which heads share the hidden size, and when does it matter at all?"
STEP = "what does one step read, and how many tokens does it give?"
LAST = "how many tokens are stored when the request ends?"
DIVIDE = "when do you divide: for each request, for each step, or once?"
OVER = "over which steps do you add up?"
ADDS_UP = "the three add up to what is reserved"
SPLIT = "what happens to the hole that a piece is taken from?"
FIRST = "which hole is taken if several are large enough?"
MERGE = "which holes does the piece touch: the one before it, the one after it?"
NO_HOLE = "what is `size` compared with, and what if no hole is large enough?"
SORTED = "`holes` is in the order of addresses"


def made(path: str, *records: tuple) -> tuple[Mistake, ...]:
    """Mistakes in one place: (name, change, cause, look) each. A change is either the whole
    definition, or edits of the reference's: old, new, old, new, …"""
    return tuple(
        Mistake(name, cause, look, sources={path: change})
        if isinstance(change, str)
        else Mistake(
            name, cause, look, edits={path: tuple(zip(change[::2], change[1::2], strict=True))}
        )
        for name, change, cause, look in records
    )


def judged(key: str, name: str | None, cause: str, look: str) -> Mistake:
    """A wrong answer to one claim of exercise 03.3."""
    shown = f'"{name}"' if name else "None"
    old = ANSWERS[key]
    edit = (f'"{key}": {old},', f'"{key}": {shown},')
    return Mistake(f"{key}: {name}", cause, look, edits={"judge_claims": (edit,)})


ANSWERS = {  # as they stand in the reference's text
    "7B 4K": "None", "70B 8K": '"another depth"', "1B token": "None",
    "3B token": '"groups of four"', "11B token": '"hidden size"', "1B speed": '"a batch"',
}  # fmt: skip
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
         "query heads are counted, though queries are not kept", HEADS),
        ("counts all heads", ("shape.num_kv_heads", "shape.num_heads * shape.num_kv_heads"),
         "query heads and KV heads are both counted", HEADS),
        ("counts groups", ("shape.num_kv_heads", "(shape.num_heads // shape.num_kv_heads)"),
         "the size of a group is counted, not the number of KV heads", HEADS),
        ("forgets K or V", ("2 * shape", "shape"),
         "only K or only V is counted", "where does the 2 of the formula come from?"),
        ("one layer", ("2 * shape.num_layers * ", "2 * "),
         "one layer is counted, not all of them", FACTORS),
        ("one number per head", (" * shape.head_dim", ""),
         "heads are counted, but not the numbers in each", FACTORS),
        ("numbers, not bytes", ("head_dim * bytes_per_number", "head_dim"),
         "numbers are counted, not their bytes", FORMAT),
        ("always fp16", ("head_dim * bytes_per_number", "head_dim * 2"),
         "every number takes two bytes, whatever was asked for", FORMAT),
        ("bits", ("head_dim * bytes_per_number", "head_dim * bytes_per_number // 8"),
         "`bytes_per_number` is in bytes, not in bits", FORMAT),
        ("fp32 if none is named", ("bytes_per_number: int = 2", "bytes_per_number: int = 4"),
         "the default is not fp16", "the default of `bytes_per_number`"),
        ("returns nothing", ("return 2 * shape", "number = 2 * shape"),
         "nothing is returned", "`print` shows a number, `return` returns it"),
        ("two latents", ("return shape", "return 2 * shape"),
         "the latent is counted twice, but keys and values are computed from the same one",
         "does the 2 of K and V belong here?"),
        ("a latent for every head", ("return shape", "return shape.num_heads * shape"),
         "every head has a latent of its own, but all heads share one", LATENTS),
        ("a latent for every KV head", ("return shape", "return shape.num_kv_heads * shape"),
         "every KV head has a latent of its own, but all heads share one", LATENTS),
        ("two latents for every head", ("return shape", "return 2 * shape.num_heads * shape"),
         "every head has a latent of its own, for K and for V, but all heads share one", LATENTS),
        ("a latent in one layer", ("shape.num_layers * shape.latent_dim", "shape.latent_dim"),
         "the latent of one layer is counted, but every layer keeps one", LATENTS),
        ("a latent in fp16", ("shape.latent_dim * bytes_per_number", "shape.latent_dim * 2"),
         "every number of a latent takes two bytes, whatever was asked for", FORMAT),
        ("no latent", ("if shape.latent_dim:", "if False:"),
         "the latent is ignored: these are the bytes of K and V heads that are not kept",
         "what is different when `latent_dim` is not 0?"),
        ("a latent, and K and V", (
         "    if shape.latent_dim:\n        return shape", "    latent = shape",
         "    return 2 * shape", "    return latent + 2 * shape"),
         "the latent is counted in addition to K and V, not in their place",
         "what is different when `latent_dim` is not 0?"),
    ),
    "03.2": made(
        "shape_of",
        ("fixes the head dim alone", (KV_HEADS, "heads // 4"),
         "four query heads share a KV head, whatever the config says", SILENCE),
        ("fixes the KV heads alone", (SHARED_OUT, 'text["hidden_size"]'),
         "if no head dim is stated, each head gets the whole hidden size", SIZE),
        ("uses the query heads", (KV_HEADS, "heads"),
         "the number of query heads is used, though the config states that of the KV heads",
         SILENCE),
        ("passes null on", (KV_HEADS, 'text.get("num_key_value_heads", heads)'),
         "the file says null, which means the same as a missing field, and null is passed on",
         SILENCE),
        ("passes null on for the head dim", (
         'text.get("head_dim") or text.get("v_head_dim") or text["hidden_size"] // heads',
         'text.get("head_dim", text.get("v_head_dim", text["hidden_size"] // heads))'),
         "the file says null for the head dim, and null is passed on", SIZE),
        ("demands the KV heads", (KV_HEADS, 'text["num_key_value_heads"]'),
         "a field is required that may be missing",
         "what does the docstring say of a config without it?"),
        ("one KV head if none is stated", (KV_HEADS, 'text.get("num_key_value_heads") or 1'),
         "a config without KV heads is read as MQA, but it is MHA", SILENCE),
        ("always divides the hidden size", (
         'text.get("head_dim") or text.get("v_head_dim") or ', ""),
         "the hidden size is divided, though the config states the head dim", SIZE),
        ("knows no v_head_dim", (' or text.get("v_head_dim")', ""),
         'the head dim is stated as "v_head_dim" here, but the hidden size is divided',
         "which names can the head dim have?"),
        ("divides into a float", (SHARED_OUT, 'text["hidden_size"] / heads'),
         "a shape has whole numbers, and `/` gives a float", "`//`"),
        ("divides it among the KV heads", (SHARED_OUT, 'text["hidden_size"] // kv_heads'),
         "the hidden size is divided by the KV heads, not by the query heads", SIZE),
        ("the other meaning of groups", (
         KV_HEADS, 'heads // (text.get("num_key_value_heads") or 1)'),
         "the size of a group is used as the number of KV heads", SILENCE),
        ("reads the outer config", ('config.get("text_config", config)',
         '{**config.get("text_config", {}), **config}'),
         "fields beside the language model are read instead of its own",
         'what is inside "text_config", and what may be beside it?'),
        ("leaves the position out", (' + text["qk_rope_head_dim"]', ""),
         "the key that carries the position is left out",
         "what does a token leave behind in a layer: which two vectors, side by side?"),
        ("reads no latent", ('if text.get("kv_lora_rank")', "if False"),
         "the latent is not read", "the line for the latent was right"),
    ),
    "03.3": (
        *made(
            "decode_ceiling",
            ("reads no K and V", ("(weight_bytes + batch * kv_bytes)", "weight_bytes"),
             "K and V are not read, though attention looks at all of them in each step", STEP),
            ("steps, not tokens", ("batch * bandwidth", "bandwidth"),
             "these are steps per second: each step gives every sequence of the batch a token",
             STEP),
            ("divided among the batch", ("batch * bandwidth", "bandwidth / batch"),
             "the speed of the batch is divided among its sequences", STEP),
            ("K and V are shared", ("batch * kv_bytes", "kv_bytes"),
             "the batch shares one K and V, but each sequence has its own", STEP),
            ("weights for each sequence", (
             "(weight_bytes + batch * kv_bytes)", "(batch * (weight_bytes + kv_bytes))"),
             "the weights are read again for each sequence, but a step reads them once", STEP),
            ("seconds", ("return batch * bandwidth / (weight_bytes + batch * kv_bytes)",
             "return (weight_bytes + batch * kv_bytes) / bandwidth / batch"),
             "these are seconds per token, not tokens per second", STEP),
            ("whole steps", ("batch * bandwidth / ", "batch * bandwidth // "),
             "the ceiling is rounded down to a whole number", "`/` or `//`?"),
        ),
        *(
            judged(key, name, cause, look)
            for key, wrong in {
                "7B 4K": (
                    ("fp32", "2 GB is within 10 % of 4,096 tokens of 512 KB, so the claim is right",
                     "4,096 · 2 · 32 layers · 32 KV heads · 128 · 2 bytes"),
                ),
                "70B 8K": (
                    (None, "with 80 layers and 8 KV heads it would be 2.7 GB",
                     "4 GB divided by the right figure: which factors are off by that much?"),
                    ("groups of four", "groups of four alone would make it 5.4 GB, with 80 layers",
                     "what else has to be smaller for a result of 4 GB?"),
                    ("fp32", "four bytes per number would make it 5.4 GB",
                     "4 GB divided by the right figure: which factors are off by that much?"),
                    ("query heads", "with MHA it would be 21 GB, and not 16 either",
                     "16 GB and 4 GB: which group size makes them differ by 4?"),
                ),
                "1B token": (
                    ("groups of four", "the 1B has groups of four, so here they are right",
                     "2 · 16 layers · 8 KV heads · 64 · 2 bytes"),
                ),
                "3B token": (
                    (None, "28 layers and 8 KV heads of 128 make 112 KB",
                     "84 KB divided by the right figure, times 8 KV heads"),
                    ("only keys", "keys alone would take half of the right figure",
                     "84 KB divided by the right figure"),
                    ("another depth", "64 layers would make it more, not less",
                     "84 KB divided by the right figure"),
                ),
                "11B token": (
                    (None, "40 layers and 8 KV heads of 128 make 160 KB",
                     "5 MB divided by the right figure: which factor is off by that much?"),
                    ("query heads", "with MHA it would be 640 KB",
                     "5 MB divided by the right figure: which factor is off by that much?"),
                    ("groups of four", "32 query heads on 8 KV heads are groups of four",
                     "5 MB divided by the right figure: which factor is off by that much?"),
                ),
                "1B speed": (
                    (None, "one stream would have to read all weights 1,990 times per second",
                     "decode_ceiling of 2 bytes per weight"),
                    ("fp32", "four bytes per number would make one stream slower, not faster",
                     "how can one reading of the weights give several tokens?"),
                ),
            }.items()
            for name, cause, look in wrong
        ),
        *made(
            "judge_claims",
            ("believes everything", "def judge_claims():\n    return dict.fromkeys(" + repr(CLAIMED)
             + ")\n", "no claim is called wrong, but four of the six are", "compute one of them"),
            ("right and wrong", "def judge_claims():\n    return "
             + repr({key: key in CLAIMED[::2] for key in CLAIMED}) + "\n",
             "True and False are not answers: the name of a mistake is asked for, or None",
             "the names that the notebook prints"),
            ("words of its own", ('"another depth"', '"70 layers"', '"hidden size"', '"head dim"',
             '"groups of four"', '"groups"'),
             "a mistake is called by a name that is not in the list",
             "the names that the notebook prints"),
            *(
                (f"no {key}", (f'        "{key}": ', f'        "{key}?": '), *NO_KEY)
                for key in CLAIMED
            ),
        ),
    ),
    "03.4": (
        *made(
            "slots_at",
            ("stores the last token", ("prompt + output - 1", "prompt + output"),
             "the last token counts as stored, but no later token needs its K and V", LAST),
            ("stores a token at once", ("prompt + step - 1", "prompt + step"),
             "a token counts as stored in the step that gives it; it is stored in the next",
             "what is stored after the prefill?"),
            ("future and internal", (SLOTS, "used, reserved - final, final - used"),
             "future and internal are swapped",
             "which of the two will this request fill?"),
            ("everything is future", (SLOTS, "used, reserved - used, 0"),
             "all unused slots are called future, but most of them will never be used", LAST),
            ("everything is internal", (SLOTS, "used, 0, reserved - used"),
             "all unused slots are called internal, but some of them will be used", LAST),
            ("future twice", (SLOTS, "used, final - used, reserved - used"),
             "the slots of the future are counted as internal, too", ADDS_UP),
            ("used twice", (SLOTS, "used, final, reserved - final"),
             "all slots that are ever used are called future, also those used by now", ADDS_UP),
            ("accepts any length", ("if final > reserved:", "if False:"),
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
             "only the last step of each life is counted; nothing is held for the future there",
             OVER),
            ("looks at the prefill", EACH_STEP.replace("STEPS", "[1]"),
             "only the prefill of each life is counted", OVER),
            ("passes the function on", ("length.output, reserve(length)", "length.output, reserve"),
             "`reserve` is a function, and is not called", "reserve(length)"),
            ("averages percentages", WEIGHTED.replace("WEIGHT", "length.output * reserve(length)"),
             "each request's own shares are averaged, but a long one holds its slots for longer",
             DIVIDE),
            ("averages slots", WEIGHTED.replace("WEIGHT", "length.output"),
             "the slots of each request are averaged over its steps, but a long one has more steps",
             DIVIDE),
            ("averages steps", WEIGHTED.replace("WEIGHT", "reserve(length)"),
             "the shares of each step are averaged, but a large reservation holds more slots",
             DIVIDE),
            ("reserves the same for all", ("length.output, reserve(length)",
             "length.output, reserve(lengths[0])"),
             "every request gets the slots of the first", "what `reserve(length)` is asked for"),
            ("slots, not shares", (
             "[used / held, future / held, internal / held]", "[used, future, internal]"),
             "these are slots, not shares of them", "what do the three have to add up to?"),
        ),
    ),
    "03.5": (
        processes("free", 12, "this is what three processes still hold",
                  "how much did B and D have?"),
        processes("free", 4, "this is one hole; two processes have left",
                  "how much did B and D have?"),
        processes("largest", 8, "8 KB are free, but not in one piece: C lies between",
                  "where are the two holes?"),
        processes("largest", 8, "free KB are added up wherever they lie; a process needs one piece",
                  "where are the two holes?", pairs=10, triples=10, most=4),
        processes("largest", 5, "5 KB is what will be asked for; no hole is that large",
                  "where are the two holes?"),
        *(
            processes("pairs", number, cause, "AB leaves one hole of 8; what does AC leave?")
            for number, cause in {
                10: "8 KB are free after every pair, but only neighbours leave them in one piece",
                0: "no process alone leaves 5 KB, but two neighbours leave 8 in one piece",
                5: "E and A are not neighbours: memory is not a ring",
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
                8: "a third process can leave that touches neither of the other two",
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
             "the hole shrinks, but its start stays where it was", SPLIT),
            ("keeps the old hole", (
             SHRINK, "self.holes.insert(index + 1, (start + size, room - size))"),
             "the old hole stays beside what is left of it", SPLIT),
            ("keeps empty holes", ("if room > size:", "if True:"),
             "a hole of size 0 is kept", "what if nothing is left of the hole?"),
            ("puts what is left at the end", (
             SHRINK, "del self.holes[index]; self.holes.append((start + size, room - size))"),
             "the rest of the hole isn't at its place in the order of addresses", SORTED),
            ("takes from the end", (
             SHRINK, "self.holes[index], start = (start, room - size), start + room - size"),
             "pieces are taken from the end of the hole", FIRST),
            ("returns the index", ("return start", "return index"),
             "the return value is not the start of the piece (is it a hole's index?)",
             "the return value"),
            ("returns nothing", ("return start", "return"),
             "nothing is returned", "the lines after the hole is cut"),
            ("notes nothing", ("self.pieces[start] = size", "pass"),
             "the piece is not entered in `pieces`", "self.pieces[…] = …"),
            ("notes the end", ("self.pieces[start] = size", "self.pieces[start] = start + size"),
             "the piece is entered with its end, not as start: size", "self.pieces[…] = …"),
            ("another error", ("raise NoHole(size, self.largest_hole, self.num_free)",
             "raise ValueError"),
             "the error raised is not NoHole", NO_HOLE),
            ("swaps largest and free", ("self.largest_hole, self.num_free",
             "self.num_free, self.largest_hole"),
             "`largest` and `free` are swapped", "NoHole(size, largest_hole, num_free)"),
            ("passes over an exact fit", ("if room >= size:", "if room > size:"),
             "a hole that is exactly as large as the piece is skipped", FIRST),
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
             "holes are not searched in the order of their addresses", FIRST),
        ),
        *made(
            "ContiguousMemory.release",
            ("changes first, checks later", (
             "raise ValueError(", "self.holes.append((start, 1)); raise ValueError("),
             "something is changed before the error is raised", "the lines above `raise`"),
            ("never sorts", ("sorted(self.holes)", "self.holes"),
             "the new hole is not at its place in the order of addresses", SORTED),
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
             "units are lost, or counted twice, when holes are joined", MERGE),
            ("forgets nothing", ("self.pieces.pop(start)", "self.pieces[start]"),
             "the piece is still in `pieces` after its release",
             "what happens to its entry in `pieces`?"),
            ("checks nothing", (
             "if start not in self.pieces:", "if False:", "self.pieces.pop(start)",
             "self.pieces.pop(start, 0)"),
             "nothing checks whether a piece starts there", "the first lines of `release`"),
            ("lets pop raise", ("if start not in self.pieces:", "if False:"),
             "`pop` and `[…]` raise KeyError instead of ValueError",
             "the first lines of `release`"),
        ),
    ),
}  # fmt: skip
