"""Chapter 16 as programs: what is dead, what is found, what is kept."""

import random

import minikv
from minikv.course.chapters.ch16_newer_models.given import with_windows
from minikv.course.chapters.ch16_newer_models.published import MODELS
from minikv.course.judge.checking import in_place_of, runs_model, same_as_oracle
from minikv.course.judge.programs import LINES_ABOVE
from minikv.course.judge.scenarios import Group, Log, scenario

PROMPT = "class A:\n    def first(self):\n        return self.items[0]\n\n    def last(self):\n"

# ── 16.1 Behind the window ────────────────────────────────────────────────────

# A program is (position, window, block size), or (tokens, chunk, window, block size).


def first_blocks(mine, program, log: Log) -> None:
    position, window, size = program
    text = f"a query at {position}, window {window}, blocks of {size}"
    log.call(text, mine.first_seen, position, window, size)


def chunks(mine, program, log: Log) -> None:
    tokens, chunk, window, size = program
    text = f"{tokens} tokens in chunks of {chunk}, window {window}, blocks of {size}"
    held = log.call(text, mine.held_in_chunks, tokens, chunk, window, size, see=False)
    if log.events[-1].error is None:
        log("", {"blocks of each step:": list(held)})


scenario(
    "16.1",
    first_blocks,
    Group(
        "one token per block",
        [(position, 3, 1) for position in (2, 3, 4, 9)],
        look="how many tokens does a window of 3 show, the query's own included?",
    ),
    Group(
        "a block stays while one of its tokens is seen",
        [(position, 6, 4) for position in (5, 8, 9, 12, 13, 16, 17)],
        look="the earliest token that the query sees: in which block is it?",
    ),
    Group(
        "near the beginning",
        [(0, 6, 4), (3, 6, 4), (4, 6, 4), (0, 1, 1), (7, 100, 16)],
        look="what does a query see if there are fewer tokens than a window?",
    ),
    Group(
        "windows and blocks of any size",
        [(p, w, s) for w in (1, 2, 7, 16, 64) for s in (1, 3, 16) for p in (w, 2 * w, 40 * w + 5)],
        look="the window is in tokens, and need not be whole blocks",
    ),
)


def random_prefill(seed: int) -> tuple[int, int, int, int]:
    draw = random.Random(seed)
    return draw.randint(1, 90), draw.randint(1, 40), draw.randint(1, 30), draw.choice((1, 3, 4, 16))


scenario(
    "16.1",
    chunks,
    Group(
        "one token per step",
        [(6, 1, 3, 1), (12, 1, 4, 4), (9, 1, 6, 4)],
        look="a decode step: the window's blocks, and the one that is written",
    ),
    Group(
        "chunks longer than the window",
        [(16, 8, 6, 4), (24, 12, 4, 4), (10, 5, 2, 1), (64, 32, 8, 16)],
        look="which query of the chunk looks back furthest?",
    ),
    Group(
        "chunks shorter than the window",
        [(16, 4, 9, 4), (20, 2, 7, 4), (30, 3, 10, 1)],
        look="what was written before the chunk, and is still seen?",
    ),
    Group(
        "what is left at the end",
        [(5, 8, 6, 4), (17, 8, 6, 4), (13, 4, 5, 3)],
        look="the last chunk may be shorter",
    ),
    Group("any prefill", [random_prefill(seed) for seed in range(40)], look=LINES_ABOVE),
)

# ── 16.2 The longest hit for all layers ───────────────────────────────────────

# A program is (blocks, window, block size): "+" has its windows, "-" does not.


def hits(mine, program, log: Log) -> None:
    blocks, window, size = program
    text = f"blocks {' '.join(blocks) or '(none)'}, window {window}, blocks of {size}"
    log.call(text, mine.longest_valid, [block == "+" for block in blocks], window, size)


def random_hit(seed: int) -> tuple[str, int, int]:
    draw = random.Random(seed)
    blocks = "".join(draw.choice("+++-") for _ in range(draw.randint(1, 14)))
    return blocks, draw.randint(1, 20), draw.choice((1, 2, 3, 4))


scenario(
    "16.2",
    hits,
    Group(
        "everything is there, or nothing",
        [("", 6, 4), ("+", 6, 4), ("++++", 6, 4), ("-", 6, 4), ("----", 6, 4), ("+++", 100, 1)],
        look="which prefix is valid if no block has its windows?",
    ),
    Group(
        "what is behind the window may be missing",
        [("-++", 6, 4), ("+-++", 6, 4), ("---++", 6, 4), ("----+", 4, 4), ("--++++", 4, 1)],
        look="which blocks does the first query after the prefix look at?",
    ),
    Group(
        "a block within the window is missing",
        [("+-+", 6, 4), ("++-+", 6, 4), ("++-", 6, 4), ("++++-", 2, 4), ("+++-", 3, 1)],
        look="try the next shorter prefix, with a window of its own",
    ),
    Group(
        "several are missing",
        [("+--+", 6, 4), ("+-+-+", 6, 4), ("-+-+", 6, 4), ("++-+-+", 10, 4), ("-++-+-", 5, 2)],
        look="the prefix that is left must be valid, too",
    ),
    Group(
        "the edge of the window",
        [("-+", 5, 4), ("-+", 6, 4), ("+-+", 5, 4), ("-++", 3, 1), ("-++", 4, 1), ("-+", 1, 4),
         ("+-", 1, 4), ("--", 1, 1)],
        look="the first query stands behind the last block, and sees itself",
    ),
    Group("any blocks", [random_hit(seed) for seed in range(60)], look=LINES_ABOVE),
)  # fmt: skip

# ── 16.3 What six models keep ─────────────────────────────────────────────────

# A program is (model, tokens); a model is a hub id, or a small config as text.

SMALL = {
    "heads of 4": {
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "sliding_window": 3, "kv_lora_rank": 10, "qk_rope_head_dim": 6, "linear_num_key_heads": 1,
        "linear_num_value_heads": 3, "linear_key_head_dim": 5, "linear_value_head_dim": 7,
    },
}  # fmt: skip


def kept_bytes(mine, program, log: Log) -> None:
    model, tokens, *kinds = program
    config = dict(MODELS[model]) if model in MODELS else dict(SMALL[model])
    text = f"{tokens:,} tokens, {model}"
    if kinds:
        config["layer_types"] = [f"{kind}_attention" for kind in kinds]
        text = f"{tokens} tokens, layers {', '.join(kinds)}, {model}"
    log.call(text, mine.cached_bytes, config, tokens)


def small(*kinds: str) -> list:
    return [("heads of 4", tokens, *kinds) for tokens in (1, 3, 4, 10)]


def published(*names: str) -> list:
    return [(name, tokens) for name in names for tokens in (1_000, 8_192, 131_072)]


FULL, WINDOWED, GEMMA, ALTERNATING, LATENT, STATE = MODELS

scenario(
    "16.3",
    kept_bytes,
    Group(
        "all layers keep everything",
        small("full") + small("full", "full") + published(FULL),
        look="K and V, KV heads, head_dim, two bytes",
    ),
    Group(
        "layers with a window",
        small("sliding") + small("full", "sliding") + published(WINDOWED, GEMMA, ALTERNATING),
        look="of how many tokens do K and V stay, in a short text and in a long one?",
    ),
    Group(
        "a latent",
        small("latent") + small("full", "latent") + published(LATENT),
        look="one vector for K and V of all heads, and the rotary part beside it",
    ),
    Group(
        "a state",
        small("linear") + small("linear", "linear", "full") + published(STATE),
        look="does a state grow with the text?",
    ),
)

# ── The reader's parts in the engine ──────────────────────────────────────────


@runs_model("16.1", "16.2")
def _(mine, lm: minikv.LanguageModel) -> str:
    """tinypy with windows of 16 in four layers: a prompt in chunks, then two that share a part."""
    windowed = with_windows(lm, 16, 16, 16, 16, None)
    config = minikv.EngineConfig(24, 4, max_num_seqs=4, max_batch_tokens=12, min_prefix_tokens=0)
    engine = minikv.Engine(windowed, config)
    prompt_ids = lm.encode(PROMPT)
    rule = minikv.SamplingParams(max_tokens=8, ignore_eos=True)
    with (
        in_place_of("minikv.groups.blocks:first_seen", mine.first_seen),
        in_place_of("minikv.groups.blocks:longest_valid", mine.longest_valid),
    ):
        for prompt in (prompt_ids, [*prompt_ids[:24], 5], [*prompt_ids, 6]):
            engine.add_request(prompt, rule)
            token_ids: list[int] = []
            while engine.has_unfinished:
                token_ids = next((one.token_ids for one in engine.step()), token_ids)
                engine.check()
            same_as_oracle(windowed, prompt, token_ids)
    found = engine.stats().hit_tokens
    return f"Your window ran three requests: 24 tokens, those of the oracle; {found} found."
