"""Checks of chapter 03: bytes a token, configs, claims, reservations, contiguous memory."""

import json
import random
from copy import deepcopy
from unittest.mock import patch

import torch

import minikv
from minikv.course.chapters.ch03_kv_memory import answers
from minikv.course.chapters.ch03_kv_memory.memory import (
    ContiguousMemory,
    NoHole,
    Shape,
    decode_ceiling,
    generate_in_pieces,
    llama_parameters,
    slots_at,
)
from minikv.course.chapters.ch03_kv_memory.published import BANDWIDTH, CLAIMS, CONFIGS
from minikv.course.harness.checking import (
    Suspect,
    Wrong,
    check,
    equal,
    plain,
    raises,
    runs_model,
    shown,
    tinypy,
)
from minikv.course.measure.workload import Length, chat_like
from minikv.kv_cache import PreallocatedCache

PROMPTS = (
    "class Stack:\n    def push(self, item):\n",
    "import os\n\ndef fib(n):",
    "for i in range(",
)


def near(found, expected, tolerance: float = 1e-6) -> bool:
    """Whether two numbers are the same but for rounding; anything else is not near."""
    try:
        return abs(float(found) - float(expected)) <= tolerance * max(1.0, abs(float(expected)))
    except (TypeError, ValueError):
        return False


# ── 03.1 Bytes a token ────────────────────────────────────────────────────────

FORMULA = "the factors of 2 · layers · KV heads · head dim · bytes: which is missing, or too many?"
KV_HEADS = "whose heads do you multiply by: those of the queries, or those of K and V?"


FORMAT = "what becomes of `bytes_per_number`?"
TWO_BYTES = "every number takes two bytes, whatever was asked for"


def bytes_of(mine, shape: Shape, *bytes_per_number: int) -> int:
    found = mine.kv_bytes_per_token(shape, *bytes_per_number)
    if found is None:
        look = "`print` shows a number, `return` hands it over"
        raise Wrong(f"kv_bytes_per_token({shape}): None", "nothing is returned", look)
    return found


@check("03.1", "grouped queries: keys and values, every layer, every KV head", look=FORMULA)
def _(mine):
    shape = Shape(num_layers=3, num_heads=10, num_kv_heads=2, head_dim=7)
    equal(
        bytes_of(mine, shape, 1),
        84,
        f"bytes of a token, {shape}, 1 byte a number",
        Suspect(420, "query heads are counted, though nobody keeps a query", KV_HEADS),
        Suspect(42, "only K or only V is counted", "where does the 2 of the formula come from?"),
        Suspect(28, "one layer is counted, not all of them", FORMULA),
        Suspect(12, "heads are counted, and not the numbers in each", FORMULA),
        Suspect(168, TWO_BYTES, FORMAT),
        Suspect(2 * 3 * 10 * 2 * 7, "query heads and KV heads are both counted", KV_HEADS),
        Suspect(
            2 * 3 * 5 * 7, "the size of a group is counted, not the number of KV heads", KV_HEADS
        ),
    )


@check("03.1", "many heads, and a single KV head", look=KV_HEADS)
def _(mine):
    shapes = [Shape(2, 6, 6, 8), Shape(5, 6, 1, 8), Shape(1, 1, 1, 1)]
    equal(
        [bytes_of(mine, shape, 1) for shape in shapes],
        [192, 80, 2],
        "bytes of a token with MHA (6 of 6 heads), with MQA (1 of 6), and of the smallest model",
        Suspect([192, 480, 2], "query heads are counted, though nobody keeps a query", KV_HEADS),
        Suspect([96, 40, 1], "only K or only V is counted", "where does the 2 come from?"),
        Suspect([384, 160, 4], TWO_BYTES, FORMAT),
    )


@check("03.1", "the number format, fp16 if none is named", look=FORMAT)
def _(mine):
    shape = Shape(3, 2, 2, 4)
    found = [bytes_of(mine, shape, size) for size in (1, 2, 4)]
    equal(
        [*found, bytes_of(mine, shape)],
        [48, 96, 192, 96],
        "bytes of a token in formats of 1, 2, 4 bytes, and by default",
        Suspect([48] * 4, "numbers are counted, not their bytes", FORMAT),
        Suspect([96] * 4, TWO_BYTES, FORMAT),
        Suspect([6, 12, 24, 12], "`bytes_per_number` is in bytes already, not in bits", FORMAT),
    )


@check("03.1", "a latent is kept once a layer, for all heads", look="the case `latent_dim` > 0")
def _(mine):
    shape = Shape(num_layers=3, num_heads=8, num_kv_heads=8, head_dim=4, latent_dim=10)
    equal(
        bytes_of(mine, shape),
        60,
        f"bytes of a token, {shape}, fp16",
        Suspect(
            120,
            "the latent is counted twice, but keys and values come from the same one",
            "does the 2 of K and V belong here?",
        ),
        Suspect(
            384,
            "the latent is ignored: these are the bytes of K and V heads that nobody keeps",
            "what is different when `latent_dim` is not 0?",
        ),
        Suspect(
            444,
            "the latent is kept in addition to K and V, and not in their place",
            "what is different when `latent_dim` is not 0?",
        ),
        Suspect(
            480,
            "every head has a latent of its own, but all heads share one",
            "how many latents are there in a layer?",
        ),
        Suspect(
            960,
            "every head has a latent of its own, for K and for V, but all heads share one",
            "how many latents are there in a layer?",
        ),
        Suspect(20, "one layer is counted, not all of them", FORMULA),
    )


@check("03.1", "models with published configs", look=FORMULA)
def _(mine):
    shapes = {
        "OPT-13B": Shape(40, 40, 40, 128),
        "Llama-3.2-1B": Shape(16, 32, 8, 64),
        "Qwen2.5-7B": Shape(28, 28, 4, 128),
        "DeepSeek-V3": Shape(61, 128, 128, 128, latent_dim=512 + 64),
    }
    equal(
        {name: bytes_of(mine, shape) for name, shape in shapes.items()},
        {
            "OPT-13B": 819_200,
            "Llama-3.2-1B": 32_768,
            "Qwen2.5-7B": 57_344,
            "DeepSeek-V3": 70_272,
        },
        "bytes of a token in fp16",
    )


@check("03.1", "the bytes that a cache of tinypy holds", look=FORMULA)
def _(mine):
    config = tinypy().config
    shape = Shape(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    for dtype in (torch.float32, torch.float16):
        cache = PreallocatedCache(config, capacity=13, dtype=dtype)
        equal(
            13 * bytes_of(mine, shape, dtype.itemsize),
            cache.kv.nbytes,
            f"13 tokens of tinypy, {dtype}, against `nbytes` of a cache",
        )


# ── 03.2 A config, read wrongly ───────────────────────────────────────────────


def same_shape(mine, name: str, config: dict, expected: Shape) -> None:
    """Raise Wrong, naming the field, unless the reader's `shape_of(config)` is `expected`."""
    try:
        found = mine.shape_of(config)
    except KeyError as error:
        raise Wrong(
            f"{name}: KeyError: {error}",
            "a field is demanded that need not be there",
            "what does the docstring say of a config without it?",
        ) from error
    text = config.get("text_config", config)
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    stated_heads = text.get("num_key_value_heads")
    stated_dim = text.get("head_dim") or text.get("v_head_dim")
    for field, right in vars(expected).items():
        value = getattr(found, field, None)
        if value == right and not isinstance(value, float):
            continue
        cause, look = None, f"where does `{field}` come from?"
        if value == right:
            cause, look = "a shape has whole numbers, and `/` gives a float", "`//`"
        elif field == "num_kv_heads":
            look = "what does the config say of KV heads, and what does its silence mean?"
            if value == heads // 4:
                cause = "four query heads are taken to share a KV head, whatever the config says"
            elif value is None:
                cause = "the file says null, which is as good as nothing, and null is passed on"
            elif value == heads and stated_heads:
                cause = "the query heads are taken, though the config states the KV heads"
            elif value == heads // stated_heads if stated_heads else value == 1:
                cause = "the size of a group is taken for the number of KV heads"
        elif field == "head_dim":
            look = "who shares the hidden size, and when does it matter at all?"
            if value == hidden:
                cause = "where no head dim is stated, one head is given the whole hidden size"
            elif value is None:
                cause = "the file says null, which is as good as nothing, and null is passed on"
            elif stated_dim and value == hidden // heads:
                cause = "the hidden size is shared out, though the config states the head dim"
            elif value == hidden // expected.num_kv_heads:
                cause = "the KV heads share the hidden size, but it is the query heads that do"
        elif field == "latent_dim":
            look = "what does a token leave behind in a layer: which two vectors, side by side?"
            if value == text.get("kv_lora_rank"):
                cause = "the key that carries the position is left out"
            elif value == 0:
                cause = "the latent is not read"
        raise Wrong(f"{name}: {field} is {shown(value)}, expected {right}", cause, look)


@check("03.2", "groups of two: tinypy's own config")
def _(mine):
    config = json.loads((minikv.BUNDLED["tinypy"] / "config.json").read_text(encoding="utf-8"))
    same_shape(mine, "tinypy", config, Shape(5, 4, 2, 64))


@check("03.2", "groups of three: 24 query heads on 8")
def _(mine):
    name = "meta-llama/Llama-3.2-3B"
    same_shape(mine, name, CONFIGS[name], Shape(28, 24, 8, 128))


@check("03.2", "a head dim that is not stated")
def _(mine):
    for name, shape in (
        ("meta-llama/Llama-3.1-8B", Shape(32, 32, 8, 128)),
        ("Qwen/Qwen2.5-7B", Shape(28, 28, 4, 128)),
        ("meta-llama/Meta-Llama-3-70B", Shape(80, 64, 8, 128)),
    ):
        same_shape(mine, name, CONFIGS[name], shape)


@check("03.2", "the language model of one for text and images")
def _(mine):
    name = "meta-llama/Llama-3.2-11B-Vision"
    same_shape(mine, name, CONFIGS[name], Shape(40, 32, 8, 128))


@check("03.2", "no KV heads stated, or null: as many as query heads")
def _(mine):
    opt = CONFIGS["facebook/opt-13b"]
    same_shape(mine, "facebook/opt-13b", opt, Shape(40, 40, 40, 128))
    null = dict(opt, num_key_value_heads=None, head_dim=None)
    same_shape(mine, "the same with null for both", null, Shape(40, 40, 40, 128))


@check("03.2", "a stated head dim that is not a share of the hidden size")
def _(mine):
    qwen3 = {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    same_shape(mine, "Qwen/Qwen3-0.6B", qwen3, Shape(28, 16, 8, 128))
    same_shape(mine, "google/gemma-2b", CONFIGS["google/gemma-2b"], Shape(18, 8, 1, 256))


@check("03.2", "multi-head latent attention")
def _(mine):
    for name, layers in (("deepseek-ai/DeepSeek-V3", 61), ("deepseek-ai/DeepSeek-V2", 60)):
        same_shape(mine, name, CONFIGS[name], Shape(layers, 128, 128, 128, latent_dim=576))


# ── 03.3 Published claims ─────────────────────────────────────────────────────

STEP = "what does one step read, and how many tokens does it give?"
RATIOS = (  # found / expected: what that means, where to look
    (1 / 2, "K or V is missing, or a number is taken for one byte", "2 · layers · … · 2 bytes"),
    (2, "a factor of 2 too many: four bytes a number, or K and V counted twice",
     "kv_bytes_per_token has both factors already"),
    *(
        (1 / size, f"the figure is in {unit}, not in bytes", "the units in the docstring")
        for unit, size in (
            ("GB", 1e9), ("GiB", 2**30), ("KB", 2**10), ("KB of 1,000 bytes", 1e3),
            ("MB", 2**20), ("TB", 1e12), ("TiB", 2**40),
        )
    ),
    (1000 / 1024, "K is taken for 1,000 tokens; with contexts it is 1,024", "8K, 32K, 128K tokens"),
)  # fmt: skip


def judged(mine, key: str) -> tuple[float, str]:
    """The reader's figure and verdict for one claim. The ceiling is the reference's: with a wrong
    one, a search for the smallest batch might never end."""
    try:
        with patch.object(mine, "decode_ceiling", decode_ceiling):
            found = mine.judge_claims()
    except NotImplementedError as error:  # a cause makes the report say so once
        what = f"not written yet: {error}"
        raise Wrong(what, "it is this exercise's second part", "its docstring") from error
    if not isinstance(found, dict) or key not in found:
        missing = "nothing is there" if not isinstance(found, dict) else f"no {key!r} in it"
        raise Wrong(
            f"judge_claims(): {missing}, expected a dict with the keys of the docstring",
            "a key is missing or spelled otherwise",
            "the keys in the docstring",
        )
    pair = found[key]
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], str):
        raise Wrong(
            f"{key!r}: {shown(pair)}, expected (figure, verdict)",
            "a figure without its verdict, or in another form",
            "the form in the docstring",
        )
    return pair[0], pair[1].strip().lower()


def figure(mine, key: str, *suspects: Suspect) -> None:
    """Raise Wrong unless the reader's figure is right to a tenth of a per cent."""
    found, _ = judged(mine, key)
    expected = answers.judge_claims()[key][0]
    if near(found, expected, 1e-3):
        return
    what = f"{key!r}: {shown(plain(found))}"
    if isinstance(found, int | float) and found > 0:  # how far off, and not what it should be
        what += f", {found / expected:.3g} times what arithmetic gives"
    if not isinstance(found, int | float):
        raise Wrong(what, "a figure is a number", "the form in the docstring")
    for suspect in suspects:
        if near(found, suspect.value, 1e-3):
            raise Wrong(what, suspect.cause, suspect.look)
    for ratio, cause, look in RATIOS:
        if near(found / expected / ratio, 1, 1e-3):
            raise Wrong(what, cause, look)
    raise Wrong(what, None, f"the config, the tokens and the contexts of {CLAIMS[key].words!r}")


@check("03.3", "one stream reads all weights for each token", look=STEP)
def _(mine):
    expected = 25.0
    found = [mine.decode_ceiling(4e9, 100e9), mine.decode_ceiling(4e9, 100e9, 1, 4e9)]
    if near(found[0], 1 / expected):
        raise Wrong(
            f"4 GB of weights at 100 GB/s: {found[0]:.3g}, expected {expected}",
            "these are the seconds a token takes, not the tokens a second",
            STEP,
        )
    if near(found[0], expected) and near(found[1], expected):
        raise Wrong(
            "4 GB of weights and 4 GB of K and V at 100 GB/s: 25, expected 12.5",
            "K and V are not read, though attention looks at all of them in each step",
            STEP,
        )
    if not (near(found[0], expected) and near(found[1], 12.5)):
        raise Wrong(
            f"4 GB of weights at 100 GB/s, with 0 and 4 GB of K and V: {shown(found)}, "
            f"expected {[expected, 12.5]}",
            None,
            STEP,
        )


@check("03.3", "a batch shares the weights, and nobody shares K and V", look=STEP)
def _(mine):
    found = mine.decode_ceiling(10, 100, batch=3, kv_bytes=5)
    for value, cause in (
        (4, "these are the steps a second: each gives every sequence of the batch a token"),
        (20, "the batch shares one K and V, but each sequence has its own"),
        (100 / 15, "the weights are read again for each sequence, but a step reads them once"),
        (30, "K and V are not read, though attention looks at all of them in each step"),
        (100 / 25 / 3, "the speed of the batch is divided among it twice"),
    ):
        if near(found, value):
            raise Wrong(f"the example in the docstring: {found:.4g}, expected 12", cause, STEP)
    if not near(found, 12):
        raise Wrong(f"the example in the docstring: {shown(plain(found))}, expected 12", None, STEP)


@check("03.3", "one context: Llama-2-7B, and a 70B")
def _(mine):
    figure(mine, "7B 4K")
    figure(
        mine,
        "70B 32K",
        Suspect(
            8 * answers.judge_claims()["70B 32K"][0],
            "query heads are counted: that is what MHA would take, eight times as much",
            "how many KV heads has this model?",
        ),
    )


@check("03.3", "the same context with GQA and with MHA")
def _(mine):
    right = answers.judge_claims()
    swapped = "GQA and MHA have changed places"
    heads = "how many KV heads are there as it is, and how many if every query head has its own?"
    figure(mine, "70B 8K GQA", Suspect(right["70B 8K MHA"][0], swapped, heads))
    figure(
        mine,
        "70B 8K MHA",
        Suspect(
            right["70B 8K GQA"][0],
            "MHA has the same figure as GQA: the shape still has 8 KV heads",
            "dataclasses.replace(shape, num_kv_heads=…)",
        ),
        Suspect(4 * right["70B 8K GQA"][0], "MHA is taken for 4 times GQA, as in the claim", heads),
    )


@check("03.3", "one token: 1B, 3B, 11B")
def _(mine):
    figure(mine, "1B token")
    figure(
        mine,
        "3B token",
        Suspect(
            84 * 1024,
            "this is the published figure: groups of four, which the 3B has not",
            "what does the config say of KV heads?",
        ),
    )
    figure(
        mine,
        "11B token",
        Suspect(
            5 * 2**20,
            "this is the published figure: the whole hidden size in place of a head's",
            "what is the head dim, where none is stated?",
        ),
        Suspect(
            128 * 1024,
            "the 8 cross-attention layers are left out. They do hold K and V of the image; "
            "asked for are all 40",
            "the line of this claim in the docstring",
        ),
    )


@check("03.3", "four contexts of 128K")
def _(mine):
    right = answers.judge_claims()["11B 4 x 128K"][0]
    figure(
        mine,
        "11B 4 x 128K",
        Suspect(right / 4, "one context is counted, not four", "the line of this claim"),
        Suspect(
            32 * right,
            "this is the published figure: the whole hidden size in place of a head's",
            "what is the head dim, where none is stated?",
        ),
        Suspect(
            right * 128_000 / (128 * 1024),
            "K is taken for 1,000 tokens; with contexts it is 1,024",
            "8K, 32K, 128K tokens",
        ),
    )


@check("03.3", "which memory claims are right")
def _(mine):
    right = {key: verdict for key, (_, verdict) in answers.judge_claims().items()}
    for key in list(right)[:8]:
        found, verdict = judged(mine, key)
        if verdict != right[key]:
            raise Wrong(
                f"{key!r}: {verdict!r} for {shown(plain(found))} bytes where "
                f"{CLAIMS[key].said:,.0f} were claimed",
                "the verdict does not follow from claim and figure: within 10 % is right"
                if verdict in ("right", "wrong")
                else "a verdict other than right and wrong",
                "figure / CLAIMS[key].said",
            )


@check("03.3", "a speed that one stream cannot have, and the batch that can")
def _(mine):
    right = answers.judge_claims()
    weights = llama_parameters(CONFIGS["meta-llama/Llama-3.2-1B"])
    figure(
        mine,
        "1B speed",
        Suspect(BANDWIDTH / weights, "a weight is taken for one byte; bf16 has two", STEP),
        Suspect(BANDWIDTH / weights / 4, "a weight is taken for four bytes; bf16 has two", STEP),
        Suspect(
            BANDWIDTH / 2e9,
            "the weights are taken for a round billion; count them",
            "llama_parameters",
        ),
        Suspect(BANDWIDTH / (2 * weights + 32_768), "K and V are counted; asked is without", STEP),
        Suspect(BANDWIDTH / 2**30 / (2 * weights / 1e9), "GB and GiB are mixed", STEP),
    )
    figure(
        mine,
        "1B batch",
        Suspect(
            4,
            "rounded down: with a batch of 4 the claim is still impossible",
            "claim / ceiling of one stream, rounded how?",
        ),
        Suspect(
            CLAIMS["1B speed"].said / right["1B speed"][0],
            "a batch is a whole number",
            "claim / ceiling of one stream, rounded how?",
        ),
        Suspect(6, "one too many: is a batch of 5 impossible?", "math.ceil rounds up already"),
    )
    for key in ("1B speed", "1B batch"):
        verdict = judged(mine, key)[1]
        if verdict != right[key][1]:
            raise Wrong(
                f"{key!r}: {verdict!r}",
                "the verdict of a speed: impossible above the ceiling, possible below",
                f"the ceiling, against the {CLAIMS['1B speed'].said:,} tokens/s of the claim",
            )


# ── 03.4 Used, for the future, never ──────────────────────────────────────────

LAST = "how many tokens are stored when the last one has been given?"


TOO_EARLY = "a token counts as stored in the step that gives it; it is stored in the next"
ALL_INTERNAL = "all that is not used is called internal; some of it will be"


def slot_suspects(reserved: int, prompt: int, output: int, step: int) -> list[Suspect]:
    """What known mistakes give for one call of `slots_at`."""
    final, used = prompt + output - 1, prompt + step - 1
    future, internal = final - used, reserved - final
    prefill, total = "what is stored after the prefill?", "the three add up to what is reserved"
    return [
        Suspect(*suspect)
        for suspect in (
            ([used, future + 1, internal - 1],
             "the last token counts as stored, but nobody asks what follows it", LAST),
            ([used + 1, future, internal - 1], TOO_EARLY, prefill),
            ([used + 1, future - 1, internal], TOO_EARLY, prefill),
            ([used, internal, future], "future and internal have changed places",
             "which of the two will this request fill?"),
            ([used, future + internal, 0],
             "all that is not used is called future; most of it never will be", LAST),
            ([used, 0, future + internal], ALL_INTERNAL, LAST),
            ([used, future, future + internal],
             "the slots of the future are counted as internal, too", total),
            ([used, final, internal],
             "all slots that are ever used are called future, also those used by now", total),
        )
    ]  # fmt: skip


def slots(mine, reserved: int, prompt: int, output: int, step: int) -> None:
    equal(
        mine.slots_at(reserved, prompt, output, step),
        slots_at(reserved, prompt, output, step),
        f"(used, future, internal) with {reserved} slots, prompt {prompt}, {output} output tokens, "
        f"after step {step}",
        *slot_suspects(reserved, prompt, output, step),
    )


@check(
    "03.4", "in the middle of its life", look="which slots hold a token, which will, which won't?"
)
def _(mine):
    slots(mine, 2048, 7, 4, 2)
    slots(mine, 512, 3, 3, 2)


@check("03.4", "after the prefill, and at the end", look=LAST)
def _(mine):
    slots(mine, 100, 30, 21, 1)
    slots(mine, 100, 30, 21, 21)
    slots(mine, 9, 5, 1, 1)


@check(
    "03.4",
    "a reservation that is just enough, and one that is not",
    cause="nothing compares what is needed with what is reserved",
    look="the first lines of `slots_at`",
)
def _(mine):
    try:
        slots(mine, 10, 7, 4, 3)
    except ValueError as error:
        raise Wrong(
            f"10 slots for a request that needs 10: ValueError ({error})",
            "a reservation that is just enough is refused",
            "`>` or `>=`? how many tokens are ever stored?",
        ) from error
    raises(
        ValueError,
        lambda: mine.slots_at(9, 7, 4, 1),
        "9 slots for a request that needs 10",
        "nothing compares what is needed with what is reserved",
        "the first lines of `slots_at`",
    )


def shares(mine, lengths, reserve, what: str) -> None:
    lengths = [Length(*length) for length in lengths]
    try:
        found = plain(mine.shares_over_lives(lengths, reserve))
    except TypeError as error:
        if "function" not in str(error):
            raise
        cause = "`reserve` is a function: call it"
        raise Wrong(f"{what}: TypeError: {error}", cause, "reserve(length)") from error
    steps = [
        (reserve(length), length.prompt, length.output, step)
        for length in lengths
        for step in range(1, length.output + 1)
    ]
    expected = _shares([slots_at(*one) for one in steps])
    if _near_all(found, expected):
        return
    what = f"{what}: {_rounded(found)}, expected {_rounded(expected)}"
    each = [
        _shares([slots_at(*one) for one in steps if one[:3] == (reserve(length), *length)])
        for length in lengths
    ]
    uses, which = [slots_at(*one) for one in steps], "over which steps do you add up?"
    suspects = (
        ([sum(column) / len(each) for column in zip(*each, strict=True)],
         "each request's own shares are averaged, but a long one holds its slots for longer",
         "when do you divide: for each request, or once?"),
        (_shares([slots_at(*one) for one in steps if one[3] == one[2]]),
         "only the end of each life is looked at; nothing is held for the future there", which),
        (_shares([slots_at(*one) for one in steps if one[3] == 1]),
         "only the prefill of each life is looked at", which),
        ([sum(column) for column in zip(*uses, strict=True)],
         "these are slots, not shares of them", "what do the three have to add up to?"),
        (_shares([slots_at(*one) for one in steps if one[3] < one[2]]),
         "the last step of each life is left out", "a life has `output` steps, from 1 on"),
        (_shares([slots_at(*one[:3], one[3] - 1) for one in steps]),
         "a life begins with step 0 here, but the prefill is step 1", which),
        (_shares([(used + 1, future, internal - 1) for used, future, internal in uses]),
         TOO_EARLY, "use slots_at for each step"),
        (_shares([(used, 0, future + internal) for used, future, internal in uses]),
         ALL_INTERNAL, "use slots_at for each step"),
    )  # fmt: skip
    for value, cause, look in suspects:
        if _near_all(found, value):
            raise Wrong(what, cause, look)
    raise Wrong(what, None, "the sums, by hand, for the example in the docstring")


def _shares(uses) -> list[float]:
    sums = [sum(column) for column in zip(*uses, strict=True)] or [0, 0, 0]
    return [count / (sum(sums) or 1) for count in sums]


def _near_all(found, expected) -> bool:
    return (
        isinstance(found, list)
        and len(found) == len(expected)
        and all(near(one, other) for one, other in zip(found, expected, strict=True))
    )


def _rounded(found) -> str:
    if isinstance(found, list) and all(isinstance(share, int | float) for share in found):
        return "[" + ", ".join(f"{share:.4f}" for share in found) + "]"
    return shown(found)


@check(
    "03.4", "shares of a single request", look="the sums, by hand, for the example in the docstring"
)
def _(mine):
    shares(mine, [(5, 4)], lambda length: 16, "16 slots for a prompt of 5 and 4 output tokens")


@check("03.4", "shares of several: slots are added up over all lives", look="when do you divide?")
def _(mine):
    shares(mine, [(1, 2), (3, 1)], lambda length: 4, "the example in the docstring")
    shares(mine, [(1, 30), (60, 2), (9, 9)], lambda length: 64, "three requests with 64 slots each")


@check(
    "03.4",
    "every request with a reservation of its own",
    look="what `reserve(length)` is asked for",
)
def _(mine):
    lengths = chat_like(40, seed=3)
    shares(mine, lengths, sum, "40 chat-like requests that reserve prompt + output")
    shares(
        mine,
        lengths,
        lambda length: length.prompt + 1024,
        "40 chat-like requests that reserve prompt + 1,024",
    )


# ── 03.5 Five processes ───────────────────────────────────────────────────────


def process(mine, key: str, look: str, causes: dict[int, str]) -> None:
    """Raise Wrong unless the reader's number is right; `causes` are known wrong ones."""
    found = mine.five_processes()
    if not isinstance(found, dict) or key not in found:
        raise Wrong(
            f"five_processes(): no {key!r} in {shown(found)}",
            "a key is missing or spelled otherwise",
            "the keys in the docstring",
        )
    value = plain(found[key])
    if value != answers.five_processes()[key]:  # the number itself is not given away
        cause = causes.get(value) if isinstance(value, int | float) else "a number is asked for"
        raise Wrong(f"{key!r}: {shown(value)} is not it", cause, look)


@check("03.5", "what is free once B and D have left")
def _(mine):
    causes = {
        12: "this is what is still held, by three processes",
        4: "this is one hole; two processes have left",
    }
    process(mine, "free", "who left, and how much had they?", causes)


@check("03.5", "what can then start")
def _(mine):
    causes = {
        8: "8 KB are free, but not in one piece: C lies between",
        5: "5 KB is what will be asked for; no hole is that large",
    }
    process(mine, "largest", "where are the two holes?", causes)


@check("03.5", "after how many of the 10 pairs 5 KB fit")
def _(mine):
    causes = {
        10: "8 KB are free after every pair, but only neighbours leave them in one piece",
        0: "no process alone leaves 5 KB, but two neighbours leave 8 in one piece",
        5: "E and A are no neighbours: memory does not go round",
        8: "AB and BA are one pair",
        6: "these are the pairs after which it does not fit",
    }
    process(mine, "pairs", "AB leaves one hole of 8; what does AC leave?", causes)


@check("03.5", "after how many of the 10 triples")
def _(mine):
    causes = {
        10: "there is one triple without any two neighbours",
        3: "these are the triples of three in a row; two in a row are enough",
        1: "this is the triple after which it does not fit",
    }
    process(mine, "triples", "which triples have no two neighbours in them?", causes)


@check("03.5", "the most that can be free in vain")
def _(mine):
    causes = {
        8: "a third process can leave and touch neither of the other two",
        4: "there can be several holes of 4 KB at once",
        16: "of any four of the five, two are neighbours",
        20: "a memory that is all free is one hole",
    }
    process(mine, "most", "how many can leave so that no two touch?", causes)


# ── 03.6 First fit, and holes that merge ──────────────────────────────────────

SPLIT = "what becomes of the hole that a piece is taken from?"
MERGE = "which holes does the piece touch: the one before, the one behind?"
FIRST = "which hole is taken when several are large enough?"
FROM_END = "pieces are taken from the end of the hole"
REST = "what is left of the hole isn't at its place in the order of addresses"
BACK = "what comes back isn't at its place in the order of addresses"
APART = "neighbouring holes are not joined, so nothing large ever fits again"


def holes_of(memory) -> list[tuple[int, int]]:
    return [(int(start), int(size)) for start, size in memory.holes]


def ailment(holes: list[tuple[int, int]], order: str = BACK) -> tuple[str, str] | None:
    """(cause, look) if something is wrong with these holes, whatever they should be."""
    if any(size == 0 for _, size in holes):
        return "a hole of size 0 is kept", "what if nothing is left of the hole?"
    if holes != sorted(holes):
        return order, "`holes` is in the order of addresses"
    return None


def holes_are(memory, expected, when: str, *suspects: Suspect, order: str = BACK) -> None:
    """Raise Wrong unless the memory has these holes; `order` is why they'd be in another order."""
    found = holes_of(memory)
    if found != expected and (known := ailment(found, order)):
        raise Wrong(f"holes {when}: {shown(found)}, expected {shown(expected)}", *known)
    equal(found, expected, f"holes {when}", *suspects)


def take(memory, size: int) -> int:
    """`allocate` where a hole is large enough: returns where the piece starts, if it is noted."""
    before, sizes = dict(memory.pieces), [room for _, room in holes_of(memory)]
    try:
        start = memory.allocate(size)
    except NoHole as error:
        cause = "a hole that is exactly as large as the piece is passed over"
        what = f"a piece of {size}, holes of {sizes}: NoHole"
        raise Wrong(what, cause if size in sizes else None, FIRST) from error
    if start is None:
        what = f"allocate({size}): None"
        raise Wrong(what, "nothing is returned", "what stands after the hole is cut?")
    noted = [at for at, room in memory.pieces.items() if before.get(at) != room]
    if memory.pieces.get(start) != size or (noted and start not in noted):
        if noted and memory.pieces[noted[0]] == size:
            what = f"allocate({size}) returns {start}; the piece is noted at {noted[0]}"
            cause = "what is returned is not where the piece starts, but a hole's index, perhaps"
            raise Wrong(what, cause, "the return value")
        what = f"`pieces` after allocate({size}) gave {start}: {shown(memory.pieces)}"
        cause = "the piece is not noted" + (" as start: size" if noted else "")
        raise Wrong(what, cause, "self.pieces[…] = …")
    return start


def refused(memory, kind, call, what: str, cause: str, look: str) -> Exception:
    """The error that `call` raises, having changed nothing."""
    before = deepcopy((memory.holes, memory.pieces))
    try:
        found = call()
    except kind as error:
        if (memory.holes, memory.pieces) != before:
            raise Wrong(
                f"{what}: holes and pieces were {shown(before)}, and are "
                f"{shown((memory.holes, memory.pieces))} after the error",
                "something is changed before the error is raised",
                "what stands above `raise`?",
            ) from error
        return error
    except Exception as error:
        what += f": {type(error).__name__} ({error}), expected {kind.__name__}"
        raise Wrong(what, "an error of another kind is raised", look) from error
    raise Wrong(f"{what}: no error, but {shown(found)}; expected {kind.__name__}", cause, look)


@check("03.6", "pieces lie side by side, and the rest stays a hole", look=SPLIT)
def _(mine):
    memory = mine.ContiguousMemory(10)
    equal(
        [take(memory, 4), take(memory, 3)],
        [0, 4],
        "where pieces of 4 and 3 start, in a memory of 10",
        Suspect([0, 0], "the hole is not cut, so the same units are given out twice", SPLIT),
        Suspect([6, 3], FROM_END, FIRST),
    )
    holes_are(
        memory,
        [(7, 3)],
        "after pieces of 4 and 3, in a memory of 10",
        Suspect([(0, 10)], "the hole is not cut, so the same units are given out twice", SPLIT),
        Suspect([(4, 3)], "the hole shrinks, and its start stays where it was", SPLIT),
        Suspect([(4, 6), (7, 3)], "the old hole stays beside what is left of it", SPLIT),
    )


@check("03.6", "a hole that is used up is gone", look=SPLIT)
def _(mine):
    memory = mine.ContiguousMemory(6)
    take(memory, 2), take(memory, 4)
    holes_are(memory, [], "of a memory of 6 after pieces of 2 and 4")


@check(
    "03.6",
    "no hole is large enough: NoHole, and nothing changes",
    look="what `allocate` does after the last hole",
)
def _(mine):
    memory = mine.ContiguousMemory(20)
    starts = [take(memory, 4) for _ in range(5)]
    memory.release(starts[1]), memory.release(starts[3])
    error = refused(
        memory,
        NoHole,
        lambda: memory.allocate(5),
        "a piece of 5, with holes of 4 and 4",
        "the free units are compared as a sum, but a piece lies in one hole",
        "with what is `size` compared, and what if no hole has it?",
    )
    order = "NoHole(size, largest_hole, num_free)"
    equal(
        (error.needed, error.largest, error.free),
        (5, 4, 8),
        "the error's (needed, largest, free)",
        Suspect((5, 8, 4), "`largest` and `free` have changed places", order),
        Suspect((4, 5, 8), "`needed` and `largest` have changed places", order),
    )
    holes_are(memory, [(4, 4), (12, 4)], "after that")
    equal(
        take(memory, 4),
        4,
        "where a piece of 4 then starts",
        Suspect(12, "holes are searched in another order than that of their addresses", FIRST),
    )


@check("03.6", "the first hole that is large enough", look=FIRST)
def _(mine):
    memory = mine.ContiguousMemory(30)
    starts = [take(memory, size) for size in (3, 2, 9, 2, 6, 2)]
    for start in (starts[0], starts[4], starts[2]):  # not in the order of their addresses
        memory.release(start)
    holes_are(
        memory,
        [(0, 3), (5, 9), (16, 6), (24, 6)],
        "after three pieces came back",
        Suspect([(24, 6)], "a piece that is given back does not become a hole", MERGE),
        Suspect([(0, 6), (8, 6), (16, 9), (27, 3)], FROM_END, FIRST),
    )
    equal(
        take(memory, 5),
        5,
        "where a piece of 5 starts; holes (start, size): (0, 3), (5, 9), (16, 6), (24, 6)",
        Suspect(16, "best fit: the tightest hole is taken, not the first", FIRST),
        Suspect(24, "holes are searched in another order than that of their addresses", FIRST),
        Suspect(0, "the size of the hole is not looked at", FIRST),
    )
    holes_are(memory, [(0, 3), (10, 4), (16, 6), (24, 6)], "after that piece of 5", order=REST)


@check("03.6", "a piece between two holes makes one of them", look=MERGE)
def _(mine):
    found = {}
    for words, order in (
        ("one after the other", (0, 1, 2)),
        ("from the last to the first", (2, 1, 0)),
        ("the middle one last", (0, 2, 1)),
    ):
        memory = mine.ContiguousMemory(14)
        starts = [take(memory, size) for size in (2, 3, 4, 5)]
        for index in order:
            memory.release(starts[index])
        found[words] = holes_of(memory)
    wrong = [words for words, holes in found.items() if holes != [(0, 9)]]
    if not wrong:
        return
    known = next(filter(None, map(ailment, found.values())), None)
    if known:
        cause, look = known
    elif any(sum(size for _, size in holes) != 9 for holes in found.values()):
        cause, look = "units are lost, or counted twice, where holes are joined", MERGE
    elif all(len(holes) == 1 for holes in found.values()):
        cause, look = FROM_END, FIRST
    elif all(len(holes) == 3 for holes in found.values()):
        cause, look = APART, MERGE
    elif wrong == ["the middle one last"]:
        cause, look = "a piece between two holes is joined with one of them only", MERGE
    else:
        cause = "a piece is joined with the hole on one side only, before it or behind it"
        look = MERGE
    raise Wrong(
        f"holes after pieces of 2, 3, 4 are given back, {wrong[0]}: {found[wrong[0]]}, "
        "expected [(0, 9)]",
        cause,
        look,
    )


@check("03.6", "giving back what is not there", look="the first lines of `release`")
def _(mine):
    memory = mine.ContiguousMemory(8)
    start, look = take(memory, 3), "the first lines of `release`"
    refused(
        memory,
        ValueError,
        lambda: memory.release(start + 1),
        f"release({start + 1}), with a piece of 3 at {start}",
        "nothing asks whether a piece starts there",
        look,
    )
    memory.release(start)
    refused(
        memory,
        ValueError,
        lambda: memory.release(start),
        "releasing the same piece again",
        "the piece is still noted as handed out after it came back",
        "what becomes of its entry in `pieces`?",
    )


@check(
    "03.6",
    "300 pieces, coming and going",
    look="after which step do holes and pieces first disagree?",
)
def _(mine):
    draw, memory, right = random.Random(0), mine.ContiguousMemory(200), ContiguousMemory(200)
    held: list[int] = []
    for step in range(300):
        if held and draw.random() < 0.45:
            start = held.pop(draw.randrange(len(held)))
            memory.release(start), right.release(start)
            holes_are(memory, right.holes, f"in step {step}, a piece came back")
            continue
        size = draw.randrange(1, 40)
        end = next((at + room for at, room in right.holes if room >= size), 0)
        what = f"step {step}: a piece of {size}"
        try:
            expected = right.allocate(size)
        except NoHole:
            cause = "a piece is given out though no hole has room for it"
            refused(memory, NoHole, lambda size=size: memory.allocate(size), what, cause, FIRST)
            continue
        equal(take(memory, size), expected, what, Suspect(end - size, FROM_END, FIRST))
        holes_are(memory, right.holes, f"after {what}", order=REST)
        held.append(expected)


# ── tinypy on the reader's parts ──────────────────────────────────────────────


def with_reservation(lm, prompt_ids: list[int], new: int, capacity: int):
    """Greedy tokens through a cache for `capacity` tokens, and after each step its tokens."""
    cache = PreallocatedCache(lm.config, capacity)
    ids, stored = [], []
    for _ in range(new):
        ids.append(int(lm.logits(ids[-1:] or prompt_ids, cache)[-1].argmax()))
        stored.append(cache.num_tokens)
    if ids != lm.generate_naively(prompt_ids, new):
        raise AssertionError(f"other tokens than the oracle's: {ids}")
    return ids, stored, cache


@runs_model("03.1", "03.2")
def _(mine, lm):
    config = json.loads((minikv.BUNDLED["tinypy"] / "config.json").read_text(encoding="utf-8"))
    each = mine.kv_bytes_per_token(mine.shape_of(config), lm.dtype.itemsize)
    prompt_ids = lm.encode(PROMPTS[0])
    ids, _, cache = with_reservation(lm, prompt_ids, 12, 64)
    if each * 64 != cache.kv.nbytes:
        raise AssertionError(
            f"{each * 64:,} bytes by your arithmetic, the cache has {cache.kv.nbytes:,}"
        )
    return (
        f"a cache of tinypy for 64 tokens has {cache.kv.nbytes:,} bytes, {each:,} a token, as your "
        f"arithmetic says; through it came {len(ids)} tokens, the same as the oracle's"
    )


@runs_model("03.4")
def _(mine, lm):
    lengths, capacity, sums = [], 64, [0, 0, 0]
    for text, new in zip(PROMPTS, (12, 20, 5), strict=True):
        prompt_ids = lm.encode(text)
        _, stored, _ = with_reservation(lm, prompt_ids, new, capacity)
        for step, tokens in enumerate(stored, start=1):
            use = mine.slots_at(capacity, len(prompt_ids), new, step)
            if use[0] != tokens:
                raise AssertionError(
                    f"step {step}: {use[0]} slots by your arithmetic, {tokens} used"
                )
            sums = [total + count for total, count in zip(sums, use, strict=True)]
        lengths.append(Length(len(prompt_ids), new))
    used, future, internal = mine.shares_over_lives(lengths, lambda length: capacity)
    if not near(used, sums[0] / sum(sums)):
        raise AssertionError(f"{used:.3f} by your arithmetic, {sums[0] / sum(sums):.3f} used")
    return (
        f"three requests of tinypy with {capacity} slots each wrote the oracle's tokens and used "
        f"{used:.0%} of their slots, step by step as you count them; {future:.0%} waited for their "
        f"future, {internal:.0%} were never used"
    )


@runs_model("03.6")
def _(mine, lm):
    prompts = [lm.encode(text) for text in (*PROMPTS, "import re\n", "class A:", "x = [")]
    new = [4, 10, 3, 8, 6, 5]
    memory = mine.ContiguousMemory(48)
    found, served = generate_in_pieces(lm, prompts, new, memory)
    for prompt_ids, count, ids in zip(prompts, new, found, strict=True):
        if ids != lm.generate_naively(prompt_ids, count):
            raise AssertionError(f"other tokens than the oracle's: {ids}")
    if memory.num_free != 48:
        raise AssertionError(f"{memory.num_free} of 48 slots came back")
    return (
        f"{len(prompts)} requests of tinypy shared one storage of 48 slots in pieces from your "
        f"memory, {served.running / served.steps:.1f} at a time, and wrote the oracle's tokens"
    )
