"""Chapter 17 as programs: what goes through a state, and who has which slot."""

import math
import random
from functools import partial
from itertools import pairwise
from typing import Any

import torch

import minikv
from minikv.course.chapters.ch17_running_states.given import random_tokens
from minikv.course.judge.checking import in_place_of, runs_model, same_as_oracle
from minikv.course.judge.programs import OperationMode
from minikv.course.judge.scenarios import Group, Log, numbers, scenario
from minikv.course.pictures.snapshot import counted
from minikv.states import HybridConfig, StateMemory

# ── 17.1 From attention to a state ────────────────────────────────────────────

# A program is (state, q, k, v, share that stays, beta), or (sequences, heads, N, D, tokens).


def by_hand(mine, program, log: Log) -> None:
    """One sequence, one head, N = D = 1."""
    state, q, k, v, stays, beta = program
    log(f"a state of {state}; q {q}, k {k}, v {v}, e^g {stays}, beta {beta}")
    tensor = torch.full((1, 1, 1, 1), float(state))
    tokens = (torch.full((1, 1, 1), float(one)) for one in (q, k, v))
    gates = (torch.full((1, 1), float(one)) for one in (math.log(stays), beta))
    log.call("decode", partial(mine.decode, tensor, *tokens, *gates))
    log("", {"the state afterwards:": tensor})


def decodes(mine, program, log: Log) -> None:
    sequences, heads, n, d, tokens = program
    log(f"{counted(sequences, 'sequence')}, {counted(heads, 'head')}, N = {n}, D = {d}")
    draw = torch.Generator().manual_seed(sum(program))
    state = torch.randn(sequences, heads, n, d, generator=draw)
    for token in range(tokens):
        of_all = random_tokens(sequences, heads, n, d, seed=token)
        log.call(f"decode, token {token}", partial(mine.decode, state, *of_all))
        log("", {"the state afterwards:": state})


scenario("17.1", by_hand,
    Group("a state of one number", [(0, 1, 1, 8, 1, 1), (4, 1, 1, 8, 1, 1), (4, 2, 1, 8, 1, 0.5),
          (4, 1, 1, 8, 0.5, 1), (4, 2, 1, 8, 0.5, 0.75), (4, 3, 0, 8, 0.5, 0.75),
          (2, 3, 0.6, 5, 0.25, 0.5)],
          "the worked example: which line sees the state before, and which after?"),
)  # fmt: skip
scenario("17.1", decodes,
    Group("one head of one sequence", [(1, 1, 2, 2, 1), (1, 1, 3, 3, 1), (1, 1, 2, 5, 1),
          (1, 1, 4, 3, 1)], "keys have N channels, values D: over which is each sum?"),
    Group("several heads", [(1, 2, 3, 3, 1), (1, 3, 3, 2, 1), (1, 4, 4, 4, 1)],
          "each head has a matrix, a g and a beta of its own"),
    Group("several sequences", [(2, 1, 3, 3, 1), (3, 2, 3, 4, 1), (4, 4, 4, 4, 1)],
          "each sequence has a state of its own"),
    Group("token after token", [(1, 1, 3, 3, 4), (2, 2, 4, 3, 6), (3, 2, 2, 5, 9)],
          "the tensor that you were given is the state: is it changed?"),
)  # fmt: skip


# ── 17.2 A chunk at once ──────────────────────────────────────────────────────

# A program is (heads, N, D, tokens, how fast the state fades, how full it is before).


def chunk_of(program) -> list[torch.Tensor]:
    heads, n, d, tokens, fast, full = program
    draw = torch.Generator().manual_seed(tokens + n)
    q, k, v, g, beta = (one.transpose(0, 1) for one in random_tokens(tokens, heads, n, d, tokens))
    return [full * torch.randn(heads, n, d, generator=draw), q, k, v, fast * g, beta]


def chunks(mine, program, log: Log) -> None:
    heads, n, d, tokens, fast, full = program
    before = "a state" if full else "an empty state"
    fading = f", g down to {-fast:g}" if fast else ", nothing fades"
    log(f"{before}, {counted(heads, 'head')}, N = {n}, D = {d}{fading}")
    state, *rest = chunk_of(program)
    log.call(f"a chunk of {counted(tokens, 'token')}", partial(mine.chunk_at_once, state, *rest))
    log("", {"the state afterwards:": state})


class Passes(OperationMode):
    """Counts operations that read a matrix of a state's size."""

    def __init__(self, shape: tuple[int, int]):
        super().__init__()
        self.shapes, self.total = (shape, shape[::-1]), 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.total += any(
            isinstance(one, torch.Tensor) and tuple(one.shape[-2:]) in self.shapes for one in args
        )
        return op(*args, **(kwargs or {}))


def passes(mine, program, log: Log) -> None:
    heads, n, d, few, more = program
    totals = []
    for tokens in (few, more):
        chunk = chunk_of((heads, n, d, tokens, 1.0, 1.0))
        with Passes((n, d)) as counter:
            text = f"a chunk of {counted(tokens, 'token')}"
            log.call(text, partial(mine.chunk_at_once, *chunk), see=False)
        if log.events[-1].error is not None:
            return
        totals.append(counter.total)
    each = (totals[1] - totals[0]) / (more - few)
    seen = "none" if each <= 0 else f"{each:g} per token"
    log("for the longer one", {"further passes over the state:": seen})


scenario("17.2", chunks,
    Group("one token", [(1, 2, 2, 1, 0, 0), (1, 2, 3, 1, 0, 1), (2, 3, 2, 1, 1, 1)],
          "what `decode` does, with heads first"),
    Group("an empty state, and nothing fades", [(1, 2, 2, 2, 0, 0), (1, 2, 3, 3, 0, 0),
          (2, 4, 3, 5, 0, 0), (3, 3, 4, 12, 0, 0)],
          "two tokens: what does the second find under its key, and what does it then write?"),
    Group("a state before the chunk", [(1, 2, 2, 2, 0, 1), (2, 3, 4, 4, 0, 1), (3, 4, 2, 9, 0, 2)],
          "what the state says about a key counts in r, too"),
    Group("it fades", [(1, 2, 2, 2, 1, 0), (1, 2, 2, 2, 1, 1), (2, 3, 4, 5, 1, 1),
          (4, 4, 3, 16, 0.3, 1), (2, 5, 5, 33, 0.1, 2)],
          "from which token to which has each thing faded?"),
    Group("what is forgotten at once", [(1, 2, 2, 3, 90.0, 1), (2, 3, 2, 8, 200.0, 1),
          (2, 3, 4, 64, 30.0, 1)],
          "exp of a large number is infinite, and infinity times 0 is not a number"),
    Group("any chunk", [(1 + i % 4, 2 + i % 5, 2 + i % 3, 1 + 5 * i, 0.4 * (i % 4), i % 3)
          for i in range(14)], "compare with `decode`, token by token"),
)  # fmt: skip
scenario("17.2", passes,
    Group("a longer chunk costs no further pass over the state", [(2, 13, 11, 4, 9),
          (3, 17, 19, 3, 14)], "is there a loop over tokens with the state in it?"),
)  # fmt: skip


# ── 17.3 Somebody else's text ─────────────────────────────────────────────────

# A program is (running slots, slots for copies, steps). "+A" begins A, "-A" ends it; "A>1" keeps a
# copy of A's state in block 1, "1>B" begins B with that copy, "!1" drops it, "A=B" forks A.

SMALL = HybridConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=1, num_kv_heads=1,
    head_dim=4, max_context=64, rms_norm_eps=1e-6, tie_embeddings=True, attention_bias=False,
    output_bias=False, mlp_bias=False, qk_norm=True, rope_theta=1e4, rope_scaling=None,
    windows=(None,), eos_ids=(), is_linear=(True, False), key_heads=1, value_heads=2, key_dim=3,
    value_dim=2, width=3, rotary_dim=4,
)  # fmt: skip


def text_in(memory: StateMemory, slot: int) -> str:
    """Whose text made what is in a slot."""
    found = []
    for part in (memory.matrices, memory.inputs):
        kinds = sorted(set(part[slot].flatten().tolist()))
        found.append("+".join("nobody's" if one == 0 else f"{chr(int(one))}'s" for one in kinds))
    return found[0] if found[0] == found[1] else f"{found[0]}, and {found[1]} in the convolution"


def owners(mine, program, log: Log) -> None:
    running, copies, steps = program
    memory = StateMemory(SMALL, torch.float32, running, copies, 0)
    pool = mine.StatePool(8, memory)
    slots: dict[str, int] = {}
    log(f"{counted(running, 'slot')} for sequences, {copies} for copies")
    for step in steps.split():
        name, first = step[-1], step[0]
        if first == "-":
            log.call(f"{name} ends", pool.give_slot, slots.pop(name), see=False)
        elif first == "!":
            log.call(f"the copy in block {name} is dropped", pool.drop_copy, int(name), see=False)
        elif step[1] == ">" and name.isdigit():
            copy = log.call(f"{first}'s state is copied for block {name}", pool.plan_copy,
                            int(name), see=False)  # fmt: skip
            if copy is not None:
                memory.copy(slots[first], copy)
            pool.begin_step()
        else:
            source = pool.copies.get(int(first)) if first.isdigit() else slots.get(first)
            words = {"+": f"{name} begins", "=": f"{first} is forked: {name}"}
            said = words.get(step[-2], f"{name} begins with the copy in block {first}")
            slot = log.call(said, pool.take_slot, source, see=False)
            if log.events[-1].error is not None:
                return
            log("", {f"{name}'s state begins as": text_in(memory, slot)})
            slots[name] = slot
            if source is None:
                memory.matrices[slot], memory.inputs[slot] = ord(name), ord(name)
    kept = {f"{name}'s state is": text_in(memory, slot) for name, slot in slots.items()}
    kept |= {f"the copy in block {one} is": text_in(memory, pool.copies[one])
             for one in sorted(pool.copies)}  # fmt: skip
    log("at the end", {**kept, "free slots:": pool.num_free_slots})


def random_owners(seed: int) -> tuple[int, int, str]:
    draw = random.Random(seed)
    steps: list[str] = []
    running: list[str] = []
    copies: list[str] = []
    for name in "ABCDEFGHIJKLMNOP":
        if len(running) == 3:
            steps.append("-" + running.pop(draw.randrange(3)))
        if copies and draw.random() < 0.4:
            steps.append("!" + copies.pop(draw.randrange(len(copies))))
        begin = draw.choice(["+", "+", *(f"{one}>" for one in copies),
                             *(f"{one}=" for one in running)])  # fmt: skip
        steps.append(begin + name)
        running.append(name)
        if len(copies) < 2 and draw.random() < 0.5:
            block = next(one for one in "1234" if one not in copies)
            steps.append(f"{name}>{block}")
            copies.append(block)
    return 3, 2, " ".join(steps)


scenario("17.3", owners,
    Group("memory that nobody has used", [(2, 0, "+A"), (2, 0, "+A +B"), (3, 2, "+A +B +C")],
          "a new sequence begins with zeros"),
    Group("after another sequence", [(1, 0, "+A -A +B"), (2, 0, "+A +B -A +C -B -C +D"),
          (1, 0, "+A -A +B -B +C")], "what must be in a slot before its first token?"),
    Group("forks, and prefixes that are found", [(2, 0, "+A A=B"), (2, 1, "+A A>1 -A 1>B"),
          (3, 1, "+A A>1 1>B 1>C"), (2, 1, "+A A>1 +B -B 1>C -A -C 1>D"),
          (3, 2, "+A +B A>1 B>2 -A -B 2>C 1>D")],
          "which state does the sequence begin with?"),
    Group("after a copy was dropped", [(1, 1, "+A A>1 !1 -A +B"), (2, 1, "+A A>1 !1 +B"),
          (2, 2, "+A A>1 A>2 -A !2 +B !1 +C"), (2, 1, "+A A>1 !1 +B B>2 -B !2 +C"),
          (2, 2, "+A A>1 +B B>2 -A !1 +C")], "who had this slot last?"),
    Group("any operations", [random_owners(seed) for seed in range(30)],
          "follow one slot: who had it, and what did he leave?"),
)  # fmt: skip


# ── The reader's parts in the engine ──────────────────────────────────────────

PROMPT = "class A:\n    def first(self):\n        return self.items[0]\n\n    def last(self):\n"
TINY: dict[str, Any] = dict(block_size=4, max_num_seqs=2, min_prefix_tokens=0, attention="torch")


@runs_model("17.1", "17.2", "17.3")
def _(mine, _lm: minikv.LanguageModel) -> str:
    """tinypy-states: three requests in chunks and decodes, then two that begin with copies."""
    lm = minikv.load("tinypy-states")
    assert isinstance(lm.config, HybridConfig)
    size = lm.config.state_bytes(lm.dtype)
    config = minikv.EngineConfig(24, max_batch_tokens=12, state_bytes=2 * size, **TINY)
    prompt_ids = lm.encode(PROMPT)
    rule = minikv.SamplingParams(max_tokens=8, ignore_eos=True)
    with (
        in_place_of("minikv.states.steps:decode", mine.decode),
        in_place_of("minikv.states.delta:chunk_at_once", mine.chunk_at_once),
        in_place_of("minikv.states.slots:StatePool", mine.StatePool),
    ):
        engine = minikv.Engine(lm, config)
        for prompt in (prompt_ids, prompt_ids[5:], prompt_ids[:9], [*prompt_ids[:24], 5],
                       [*prompt_ids, 6]):  # fmt: skip
            [output] = engine.generate([prompt], rule)
            engine.check()
            same_as_oracle(lm, prompt, output.token_ids)
    used = engine.stats().states.used
    return f"Your state ran five requests: the oracle's 40 tokens; {used} began with a copy."


# ── 17.4 Taking back drafts ───────────────────────────────────────────────────

# A program is (heads, key dim, value dim, width), tokens of each step, and the ends of the pieces
# that are written after it.


def splitter(heads: int, n: int, d: int):
    """What makes queries, keys and values of a layer's convolved channels."""

    def split(mixed):
        q, k, v = mixed.split([heads * n, heads * n, heads * d], -1)
        q, k = (one.view(-1, heads, n) / one.view(-1, heads, n).norm(dim=-1, keepdim=True)
                for one in (q, k))  # fmt: skip
        return q / n**0.5, k, v.view(-1, heads, d)

    return split


def taking_back(mine, program, log: Log) -> None:
    (heads, n, d, width), *steps = program
    channels = heads * (2 * n + d)
    generator = torch.Generator().manual_seed(channels + 7 * width)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    state, last, weight = draw(heads, n, d), draw(width - 1, channels), draw(channels, width)
    log(f"{counted(heads, 'state')} of {n} by {d}, a convolution over {width} tokens")
    for num_tokens, *ends in steps:
        g, beta = -draw(num_tokens, heads).abs(), draw(num_tokens, heads).sigmoid()
        inputs = draw(num_tokens, channels)
        seen = partial(mine.try_tokens, state, last, inputs, weight, splitter(heads, n, d), g, beta)
        found = log.call(f"a decode and {counted(num_tokens - 1, 'draft')} are tried", seen,
                         see=False)  # fmt: skip
        if log.events[-1].error is not None:
            return
        read, tried = found
        log("", {"what they read:": read, "the state then:": state, "the last inputs then:": last})
        for first, end in pairwise([0, *ends]):
            write = partial(mine.write_tokens, state, last, tried, first, end)
            log.call(f"tokens {first} to {end} are written", write, see=False)
            log("", {"the state after that:": state, "the last inputs after that:": last})


NARROW = 1, 2, 3, 3  # heads, key dim, value dim, width
scenario("17.4", taking_back,
    Group("a decode without drafts", [(NARROW, (1, 1)), ((2, 3, 2, 4), (1, 1), (1, 1))],
          "what does `convolve` return? And a token reads the state with itself in it"),
    Group("nothing is written while nobody knows what is right",
          [(NARROW, (2,)), (NARROW, (3,), (2,)), ((2, 3, 2, 4), (4,), (3,))],
          "which tensors does `try_tokens` change?"),
    Group("all drafts are right", [(NARROW, (2, 2)), (NARROW, (4, 4)), ((2, 3, 2, 4), (5, 5))],
          "are state and last inputs those after the last token?"),
    Group("some are wrong", [(NARROW, (3, 1)), (NARROW, (3, 2)), (NARROW, (5, 2)),
          ((2, 3, 2, 4), (6, 1)), ((2, 3, 2, 4), (6, 4)), ((2, 2, 4, 2), (3, 1))],
          "both tensors must be as if the wrong drafts had never been there"),
    Group("written in pieces, for a copy in between",
          [(NARROW, (4, 2, 4)), (NARROW, (5, 1, 3)), ((2, 3, 2, 4), (6, 2, 3, 5))],
          "what is in the state already when a second piece is written?"),
    Group("step after step", [((1 + i % 3, 2 + i % 2, 2 + i % 4, 2 + i % 3),
          (1 + i % 5, 1 + i % (1 + i % 5)), (4, 1 + i % 4), (3, 2)) for i in range(20)],
          "which tokens does the next step believe to be in the text?"),
)  # fmt: skip


# ── 17.5 Which copies to keep ─────────────────────────────────────────────────

# A program is (start, junction, tokens of the prompt, block size, interval).


def due(mine, program, log: Log) -> None:
    start, junction, num_tokens, size, interval = program
    parts = f", and parts from another at {junction}" if junction > start else ""
    log(f"a prompt of {num_tokens} tokens, blocks of {size}, starts at {start}{parts}")
    text = f"copies_due({start}, {junction}, {num_tokens}, {size}, interval={interval})"

    def in_order() -> Any:  # for the report: the earliest place first
        found = mine.copies_due(*program)
        return dict(sorted(found.items())) if isinstance(found, dict) else found

    log.call(text, in_order)


def random_prompt(seed: int) -> tuple[int, int, int, int, int]:
    draw = random.Random(seed)
    size = draw.choice((1, 3, 4, 16))
    blocks = draw.randint(0, 12)
    junction = draw.randint(0, blocks)
    start = draw.choice((0, junction, draw.randint(0, junction)))
    interval = draw.choice((0, 0, size, 2 * size + 1, 3 * size))
    return start * size, junction * size, blocks * size + draw.randint(1, size), size, interval


scenario("17.5", due,
    Group("a prompt that nobody knows", [(0, 0, 8, 4, 0), (0, 0, 11, 4, 0), (0, 0, 3, 4, 0),
          (0, 0, 5, 1, 0)], "which block is the last that is full?"),
    Group("a chat goes on", [(8, 8, 17, 4, 0), (8, 8, 12, 4, 0), (8, 8, 10, 4, 0)],
          "is there a copy where it starts already?"),
    Group("a junction", [(0, 8, 17, 4, 0), (4, 12, 23, 4, 0), (0, 4, 7, 4, 0)],
          "up to where do others share this prompt, and from where must it be computed?"),
    Group("a junction at the end", [(0, 8, 9, 4, 0), (0, 12, 15, 4, 0), (4, 8, 11, 4, 0)],
          "one copy at one place: does it stay?"),
    Group("every so many tokens", [(0, 0, 17, 4, 8), (0, 0, 16, 4, 8), (8, 8, 25, 4, 8),
          (12, 12, 27, 4, 8), (0, 0, 17, 4, 9), (0, 0, 9, 4, 3), (0, 8, 17, 4, 12)],
          "multiples of the interval, in whole blocks, behind the start, up to the end"),
    Group("any prompt", [random_prompt(seed) for seed in range(60)],
          "the first place that differs: whose copy is it, and does it stay?"),
)  # fmt: skip


# ── 17.6 What a state costs ───────────────────────────────────────────────────

LAYER = "bytes of one linear layer's state, over bytes of a token in one attention layer"
HELD = "tokens saved, over MiB that are held"
numbers(
    "17.6",
    "states_on_paper",
    {
        "Qwen3-Next": ("tokens of a Qwen3-Next layer that are as large as a state", LAYER),
        "Qwen3.5 4B": ("the same, Qwen3.5 4B", LAYER),
        "Kimi Linear": ("the same, Kimi Linear", f"{LAYER}: a latent, kept once"),
        "Nemotron-H 8B": ("the same, Nemotron-H 8B", LAYER),
        "block": ("tokens of a block that holds a state", "rounded up, in steps of 16"),
        "interval": ("tokens from copy to copy, if copies are to take as much as K and V",
                     "how many layers of each kind are there?"),
        "short": ("tokens saved per MiB, 256 tokens", HELD),
        "long": ("tokens saved per MiB, 65,536 tokens", HELD),
        "attention": ("tokens saved per MiB, if all layers attended", HELD),
    },
    near=0.003,
)  # fmt: skip


@runs_model("17.4")
def _(mine, _lm: minikv.LanguageModel) -> str:
    """tinypy-states with drafts, most of which are wrong."""
    lm = minikv.load("tinypy-states")
    config = minikv.EngineConfig(64, speculative="ngram", **TINY)
    prompts = [lm.encode(PROMPT * 2), lm.encode(PROMPT)]
    with (
        in_place_of("minikv.states.steps:try_tokens", mine.try_tokens),
        in_place_of("minikv.states.steps:write_tokens", mine.write_tokens),
    ):
        engine = minikv.Engine(lm, config)
        rule = minikv.SamplingParams(max_tokens=24, ignore_eos=True)
        for prompt, output in zip(prompts, engine.generate(prompts, rule), strict=True):
            same_as_oracle(lm, prompt, output.token_ids)
        engine.check()
    drafts = engine.stats().speculation
    return (
        f"Your state took back {drafts.drafts - drafts.accepted} of {drafts.drafts} drafts; the "
        "tokens are the oracle's."
    )


@runs_model("17.5")
def _(mine, _lm: minikv.LanguageModel) -> str:
    """tinypy-states: prompts of a kind, and a chat that goes on."""
    lm = minikv.load("tinypy-states")
    engine = minikv.Engine(lm, minikv.EngineConfig(64, **TINY))
    rule, prompt_ids = minikv.SamplingParams(max_tokens=8, ignore_eos=True), lm.encode(PROMPT)
    with in_place_of("minikv.states.slots:copies_due", mine.copies_due):
        for prompt in ([*prompt_ids, 5], [*prompt_ids, 6], [*prompt_ids, 7]):
            [output] = engine.generate([prompt], rule)
            same_as_oracle(lm, prompt, output.token_ids)
        chat = [*prompt, *output.token_ids, 9]
        same_as_oracle(lm, chat, engine.generate([chat], rule)[0].token_ids)
        engine.check()
    stats = engine.stats()
    return (
        f"Your rule kept {stats.states.copies} copies; {stats.hit_tokens} tokens were found, "
        f"{stats.states.recomputed_tokens} computed again. The tokens are the oracle's."
    )
