"""Chapter 03 as programs: bytes per token, configs, claims, reservations, contiguous memory."""

import json
from copy import deepcopy
from functools import partial
from itertools import product

import minikv
from minikv.course.chapters.ch03_kv_memory import answers
from minikv.course.chapters.ch03_kv_memory.claims import figure
from minikv.course.chapters.ch03_kv_memory.given import Shape
from minikv.course.chapters.ch03_kv_memory.published import CLAIMS, CONFIGS, MISTAKES
from minikv.course.judge.checking import plain, runs_model, same_as_oracle, shown, witness
from minikv.course.judge.scenarios import Group, Log, Words, scenario
from minikv.course.pictures.snapshot import counted
from minikv.course.workloads.workload import Length, chat_like
from minikv.kv_cache import PreallocatedCache


def whole(value):
    """A number that has to be an int: 8.0 is told from 8."""
    value = plain(value)
    return Words(f"{value} (a float)") if isinstance(value, float) else value


# ── 03.1 Bytes a token ────────────────────────────────────────────────────────


def bytes_of_a_token(mine, program, log: Log) -> None:
    shape, *number = program
    text = (
        f"{counted(shape.num_layers, 'layer')}, {counted(shape.num_heads, 'query head')} on "
        f"{counted(shape.num_kv_heads, 'KV head')}, head dim {shape.head_dim}"
    )
    text += f", latent dim {shape.latent_dim}" if shape.latent_dim else ""
    text += f", {counted(number[0], 'byte')} per number" if number else ", no number format named"
    log(text, {"result": whole(log.call(text, mine.kv_bytes_per_token, *program, see=False))})


scenario("03.1", bytes_of_a_token,
    Group("grouped queries: keys and values, every layer, every KV head",
          [(Shape(3, 10, 2, 7), 1), (Shape(5, 12, 4, 3), 1)],
          "the factors of 2 · layers · KV heads · head dim · bytes: which is wrong?"),
    Group("many heads, and a single KV head",
          [(Shape(2, 6, 6, 8), 1), (Shape(5, 6, 1, 8), 1), (Shape(1, 1, 1, 1), 1)],
          "whose heads do you multiply by: those of the queries, or those of K and V?"),
    Group("the number format, fp16 if none is named",
          [(Shape(3, 2, 2, 4), *number) for number in ((4,), (1,), (2,), (), (8,))],
          "what becomes of `bytes_per_number`?"),
    Group("a latent is kept once per layer, for all heads",
          [(Shape(*shape), *number) for number in ((4,), (), (1,))
          for shape in ((3, 8, 8, 4, 10), (3, 8, 2, 4, 10), (5, 6, 1, 8, 7), (3, 5, 5, 4, 1))],
          "the case `latent_dim` > 0: how many latents are there in a layer?"),
    Group("models with published configs: OPT-13B, Llama-3.2-1B, Qwen2.5-7B, DeepSeek-V3, tinypy",
          [(Shape(40, 40, 40, 128),), (Shape(16, 32, 8, 64),), (Shape(28, 28, 4, 128),),
          (Shape(61, 128, 128, 128, latent_dim=512 + 64),), (Shape(5, 4, 2, 64), 4)],
          "for which models does it fail: only for the one with a latent?"),
    Group("any shape in any format", [(Shape(layers, group * kv_heads, kv_heads, dim, latent),
          *number) for layers, kv_heads, group, dim, latent, number in product((1, 2, 7), (1, 2, 5),
          (1, 3), (1, 48), (0, 9), ((1,), (4,), ()))],
          "divide the smallest number that differs by the right one: which factor is left?"),
)  # fmt: skip


# ── 03.2 A config, read wrongly ───────────────────────────────────────────────

# A program is (name, config, further configs): the further ones are put into the same dict, one
# after the other, and read again. Without a name the config itself is shown.
FIELDS = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "latent_dim")


def shapes(mine, program, log: Log) -> None:
    name, *configs = program
    config: dict = {}
    for one in configs:
        config |= deepcopy(one)
        text = name or f"shape_of({config})"
        found = log.call(text, mine.shape_of, config, see=False)
        log(text, {f"{field} is": whole(getattr(found, field, None)) for field in FIELDS})


def config_of(hidden: int, heads: int, **fields) -> dict:
    sizes = {"num_hidden_layers": 3, "hidden_size": hidden, "num_attention_heads": heads}
    return sizes | fields


def published(*names: str) -> list:
    return [(name, CONFIGS[name]) for name in names]


TINYPY = json.loads((minikv.BUNDLED["tinypy"] / "config.json").read_text(encoding="utf-8"))
OPT, LLAMA_8B = CONFIGS["facebook/opt-13b"], CONFIGS["meta-llama/Llama-3.1-8B"]
Fields = dict[str, int | None]
LATENTS: list[Fields] = [{}, {"kv_lora_rank": 48, "qk_rope_head_dim": 10}, {"kv_lora_rank": None}]
KV_HEADS: list[Fields] = [{}, *({"num_key_value_heads": n} for n in (1, 2, 4, 12, None))]
HEAD_DIMS: list[Fields] = [{"head_dim": 40}, {"head_dim": None}, {"v_head_dim": 24}, {}]
ANY_FIELDS = [
    config_of(240, 12, **latent, **kv_heads, **head_dim)
    for latent, kv_heads, head_dim in product(LATENTS, KV_HEADS, HEAD_DIMS)
]

scenario("03.2", shapes,
    Group("groups of two: tinypy's own config",
          [("tinypy", TINYPY), ("", config_of(48, 6, num_key_value_heads=3, head_dim=8))],
          "where does each of the five numbers come from?"),
    Group("groups of three: 24 query heads on 8",
          [*published("meta-llama/Llama-3.2-3B"),
          ("", config_of(96, 6, num_key_value_heads=2, head_dim=16))],
          "what does the config say of KV heads?"),
    Group("a head dim that is not stated", published("meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B",
          "meta-llama/Meta-Llama-3-70B"),
          "which heads share the hidden size, and when does it matter at all?"),
    Group("the language model of one for text and images",
          [*published("meta-llama/Llama-3.2-11B-Vision"),
          ('Llama-3.1-8B as "text_config", beside the numbers of a model of images',
          config_of(640, 10, num_key_value_heads=5, head_dim=99) | {"text_config": LLAMA_8B})],
          "whose numbers are these: the language model's, or those beside it?"),
    Group("no KV heads stated, or null: as many as query heads",
          [("facebook/opt-13b", OPT), ("facebook/opt-13b with null for KV heads",
          OPT | {"num_key_value_heads": None}),
          ("facebook/opt-13b with null for the head dim", OPT | {"head_dim": None}),
          ("google/gemma-2b without KV heads", config_of(2048, 8, head_dim=256))],
          "what does the config say about KV heads, and what if it says nothing?"),
    Group("a stated head dim that is not a share of the hidden size",
          [("Qwen/Qwen3-0.6B", config_of(1024, 16, num_key_value_heads=8, head_dim=128)),
          *published("google/gemma-2b")], "when is the head dim computed at all?"),
    Group("multi-head latent attention", published("deepseek-ai/DeepSeek-V3",
          "deepseek-ai/DeepSeek-V2"),
          "what does a token leave behind in a layer: which two vectors, side by side?"),
    Group("any fields stated, missing or null",
          [*(("", config) for config in ANY_FIELDS),
          *(("", {"text_config": config}) for config in ANY_FIELDS[::5]),
          ("one config, changed and read again", OPT, LLAMA_8B, {"head_dim": 96})],
          'this config: which of its fields is missing, null or inside "text_config"?'),
)  # fmt: skip


# ── 03.3 Published claims ─────────────────────────────────────────────────────

# A program is (bytes of the weights, bytes per second, sequences, bytes of K and V).
STEP = "what does one step read, and how many tokens does it give?"
RATIO = "the claim, divided by the right figure: which factor of the formula is off by that much?"


def amount(number: float) -> str:
    return f"{number / 1e9:g} GB" if number >= 1e6 else counted(number, "byte")


def ceiling(mine, program, log: Log) -> None:
    weights, bandwidth, *rest = program
    text = f"weights of {amount(weights)}"
    text += f", {counted(rest[0], 'sequence')} of {amount(rest[1])} each" if rest else ""
    text += f", {amount(bandwidth)} per second"
    options = dict(zip(("batch", "kv_bytes"), rest, strict=False))
    call = partial(mine.decode_ceiling, weights, bandwidth, **options)
    log(text, {"result": plain(log.call(text, call, see=False))})


scenario("03.3", ceiling,
    Group("one stream reads all weights for each token",
          [(10, 100), (4e9, 100e9), (4e9, 100e9, 1, 4e9), (7.0, 3.0, 1, 0.5)], STEP),
    Group("a batch shares the weights; each sequence has its own K and V",
          [(10, 100, 3, 5), (7, 1000, 4, 0), (2.5e9, 1e12, 100, 3e7)], STEP),
    Group("any weights, batch and context",
          list(product((3, 2.5e9), (17, 1e12), (1, 2, 7, 64), (0, 11, 1.3e8))), STEP),
)  # fmt: skip

# A program is the key of a claim.


def judgements(mine, key: str, log: Log) -> None:
    found = plain(log.call("judge_claims()", mine.judge_claims, see=False))
    answer = found.get(key, Words("missing")) if isinstance(found, dict) else found
    text = f"{key!r}"
    if isinstance(answer, str) and not isinstance(answer, Words):
        answer = answer.strip().lower()
        if answer in MISTAKES and key != "1B speed":
            times = CLAIMS[key].said / figure(key, answer)
            text += f", claim divided by what this mistake gives: {times:.3g}"
        elif answer not in MISTAKES:
            answer = Words(f"{answer!r}, which is not among MISTAKES")
    # The right answer is not given away.
    right = answer == RIGHT[key]
    log(text, {"your answer is": Words("another one" if right else shown(answer))})


RIGHT = answers.judge_claims()

scenario(
    "03.3",
    judgements,
    *(Group(CLAIMS[key].words, [key], RATIO) for key in list(CLAIMS)[:-1]),
    Group(CLAIMS["1B speed"].words, ["1B speed"], STEP),
)


# ── 03.4 Used, for the future, never ──────────────────────────────────────────

# A program is (slots, prompt, output, step).


def slots(mine, program, log: Log) -> None:
    reserved, prompt, output, step = program
    text = (
        f"{counted(reserved, 'slot')}, a prompt of {prompt}, "
        f"{counted(output, 'output token')}: (used, future, internal) after step {step}"
    )
    log.call(text, mine.slots_at, *program)


# A program is (lengths, reserve).
RESERVE = {
    "prompt + output slots each": lambda length: length.prompt + length.output,
    "prompt + 1,024 slots each": lambda length: length.prompt + 1024,
    "exactly what each needs": lambda length: length.prompt + length.output - 1,
    "2 · prompt + 2 · output slots each": lambda length: 2 * sum(length),
} | {f"{n} slots each": lambda length, n=n: n for n in (4, 16, 64)}


def shares(mine, program, log: Log) -> None:
    pairs, reserve = program
    words = ", ".join(f"{prompt} + {output}" for prompt, output in pairs)
    who = f"requests of {words} tokens" if len(pairs) < 6 else f"{len(pairs)} chat-like requests"
    given = [Length(*pair) for pair in pairs], RESERVE[reserve]
    text = f"{who}, {reserve}"
    log(text, {"result": plain(log.call(text, mine.shares_over_lives, *given, see=False))})


scenario("03.4", slots,
    Group("in the middle of its life", [(2048, 7, 4, 2), (512, 3, 3, 2), (20, 5, 9, 4)],
          "how many slots hold a token by now, and how many when the request ends?"),
    Group("after the prefill, and at the end", [(100, 30, 21, 1), (100, 30, 21, 21), (9, 5, 1, 1)],
          "how many tokens are stored when the last one has been given?"),
    Group("a reservation that is just enough, and one that is not",
          [(10, 7, 4, 3), (9, 7, 4, 1), (9, 7, 4, 4), (1, 1, 1, 1), (3, 5, 1, 1), (4, 5, 1, 1),
          (7, 7, 1, 1), (0, 1, 1, 1), (4, 1, 4, 2), (3, 1, 4, 1), (12, 3, 100, 2)],
          "the first lines of `slots_at`"),
    Group("any step of any life", [(prompt + output - 1 + spare, prompt, output, step)
          for prompt, output, spare in product((1, 2, 9), (1, 2, 3, 8), (0, 1, 5, 100))
          for step in range(1, output + 1)],
          "the three add up to all slots: which is off, and by how many?"),
)  # fmt: skip

scenario("03.4", shares,
    Group("shares of a single request", [([pair], "16 slots each")
          for pair in ((5, 4), (1, 1), (3, 14), (16, 1))],
          "over which steps do you add up? By hand, for the example in the docstring"),
    Group("shares of several: slots are added up over all lives",
          [([(1, 2), (3, 1)], "4 slots each"), ([(1, 30), (60, 2), (9, 9)], "64 slots each"),
          ([(2, 3), (2, 3), (9, 1)], "16 slots each")],
          "when do you divide: for each request, for each step, or once?"),
    Group("each request with its own reservation",
          [(pairs, reserve) for pairs in ([(1, 2), (8, 5)], [(3, 7), (3, 7), (1, 1)],
          chat_like(40, seed=3)) for reserve in list(RESERVE)[:4]],
          "what `reserve(length)` is asked for"),
)  # fmt: skip


# ── tinypy on the reader's parts ──────────────────────────────────────────────

STACK = "class Stack:\n    def push(self, item):\n"
PROMPTS = (STACK, "import os\n\ndef fib(n):", "for i in range(")


def with_reservation(lm, prompt_ids: list[int], new: int, capacity: int):
    """Greedy tokens through a cache for `capacity` tokens, and after each step its tokens."""
    cache = PreallocatedCache(lm.config, capacity)
    ids: list[int] = []
    stored: list[int] = []
    for _ in range(new):
        ids.append(int(lm.logits(ids[-1:] or prompt_ids, cache)[-1].argmax()))
        stored.append(cache.num_tokens)
    same_as_oracle(lm, prompt_ids, ids)
    return ids, stored, cache


@runs_model("03.1", "03.2")
def _(mine, lm):
    config = json.loads((minikv.BUNDLED["tinypy"] / "config.json").read_text(encoding="utf-8"))
    each = mine.kv_bytes_per_token(mine.shape_of(config), lm.dtype.itemsize)
    prompt_ids = lm.encode(PROMPTS[0])
    ids, _, cache = with_reservation(lm, prompt_ids, 12, 64)
    witness(each)
    if each * 64 != cache.kv.nbytes:
        raise AssertionError(
            f"{each * 64:,} bytes by your arithmetic, the cache has {cache.kv.nbytes:,}"
        )
    return (
        f"a cache of tinypy for 64 tokens has {cache.kv.nbytes:,} bytes, {each:,} per token, as "
        f"your arithmetic says; with it tinypy wrote {len(ids)} tokens, the same as the oracle"
    )


@runs_model("03.4")
def _(mine, lm):
    lengths, capacity, sums = [], 64, [0, 0, 0]
    for text, new in zip(PROMPTS, (12, 20, 5), strict=True):
        prompt_ids = lm.encode(text)
        _, stored, _ = with_reservation(lm, prompt_ids, new, capacity)
        for step, tokens in enumerate(stored, start=1):
            use = mine.slots_at(capacity, len(prompt_ids), new, step)
            witness(use)
            if use[0] != tokens:
                raise AssertionError(
                    f"step {step}: {use[0]} slots by your arithmetic, {tokens} used"
                )
            sums = [total + count for total, count in zip(sums, use, strict=True)]
        lengths.append(Length(len(prompt_ids), new))
    used, future, internal = mine.shares_over_lives(lengths, lambda length: capacity)
    witness(used, future, internal)
    if abs(used - sums[0] / sum(sums)) > 1e-6:
        raise AssertionError(f"{used:.3f} by your arithmetic, {sums[0] / sum(sums):.3f} used")
    return (
        f"three requests of tinypy with {capacity} slots each wrote the oracle's tokens and used "
        f"{used:.0%} of their slots, in every step as many as you count; {future:.0%} were "
        f"reserved for the future, {internal:.0%} were never used"
    )
