"""What several test files share: small random models, oracles, and ways to drive an engine."""

import copy
import dataclasses
import functools
import itertools
import random
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from hypothesis import given, settings

import minikv
from minikv import Engine, EngineConfig, RadixCache, SamplingParams, gpu
from minikv.speculative import Drafter, Proposal

VOCAB = 300
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LINEAR = ROPE | {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip

# name: (class in transformers, what differs from a plain model)
ARCHITECTURES = {
    "llama": ("Llama", {}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": LINEAR}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 8, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
HYBRID = {  # layers that keep a state beside those that attend
    "qwen3.5": (
        "Qwen3_5",
        {
            "head_dim": 32,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.25},
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
        },
    )
}
WINDOW, FULL = "sliding_attention", "full_attention"
ALTERNATING = {  # layers that see different lengths, in the patterns of models on the hub
    "like-gemma3": (
        "Qwen3",
        {
            "head_dim": 32, "num_hidden_layers": 6, "use_sliding_window": True,
            "sliding_window": 8, "layer_types": [WINDOW] * 5 + [FULL],
        },
    ),
    "like-gpt-oss": (
        "Ministral",
        {
            "num_hidden_layers": 4, "sliding_window": 8, "head_dim": 16,
            "layer_types": [WINDOW, FULL] * 2,
        },
    ),
    "ministral": ("Ministral", {"sliding_window": 8, "head_dim": 16}),
    "cwm": (
        "Cwm",
        {
            "num_hidden_layers": 4, "sliding_window": 8, "head_dim": 16,
            "rope_parameters": LLAMA3, "bos_token_id": 1,
        },
    ),
}  # fmt: skip


def make_model(name: str, seed: int = 0, **overrides):
    """A random model in `transformers`, two layers, no end token.

    Large initial weights make greedy margins large; norms and biases, which
    `transformers` sets to 1 and 0, are random too, or they would not be tested.
    """
    import transformers

    family, differences = (ARCHITECTURES | HYBRID | ALTERNATING)[name]
    sizes = dict(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.2, tie_word_embeddings=False, rope_parameters=ROPE,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    make_config = getattr(transformers, f"{family}TextConfig", None)  # of a model with pictures
    make_config = make_config or getattr(transformers, f"{family}Config")
    config = make_config(**sizes | differences | overrides)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            with torch.no_grad():
                low = -0.4 if parameter_name.endswith("bias") else 0.5
                low = -3.0 if parameter_name.endswith("A_log") else low  # or it forgets at once
                parameter.uniform_(low, low + 0.8)
    return model


def assert_reached(seen: Counter, least: dict[str, int]) -> None:
    """Random tests prove nothing about what they hardly meet: fails where cases came too seldom."""
    rare = [f"{what} {seen[what]} of {count} times" for what, count in least.items()]
    rare = [text for text, what in zip(rare, least, strict=True) if seen[what] < least[what]]
    assert not rare, f"met too seldom: {', '.join(rare)}"


def meets(seen: Counter, least: dict[str, int]):
    """For a property whose examples count in `seen` which cases they met."""

    def decorate(test):
        @functools.wraps(test)
        def counted(*arguments, **named):
            seen.clear()
            test(*arguments, **named)
            assert_reached(seen, least)

        return counted

    return decorate


def meet(seen: Counter, least: dict[str, int], examples: int, check, fixture, **strategies):
    """`check` this many examples, as `meets` does, where their number is a parameter of a test."""
    meets(seen, least)(settings(max_examples=examples)(given(**strategies)(check)))(fixture)


def meet_contexts(seen: Counter, lens, chunks=None, block_size=1, group=1, window=None) -> None:
    """Count what attention may get wrong: `lens` tokens, the last `chunks[i]` ask, 1 if None."""
    queries = chunks or [1] * len(lens)
    seen["other lengths"] += len(set(lens)) > 1
    seen["several blocks"] += max(lens) > block_size
    seen["a block that is not full"] += any(n % block_size for n in lens)
    seen["groups of heads"] += group > 1
    seen["a window that hides"] += bool(window) and max(lens) > window
    seen["a chunk after a prefix"] += any(
        1 < count < n for n, count in zip(lens, queries, strict=True)
    )


class Pair:
    """One checkpoint, loaded by `transformers` (the reference) and by minikv."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder
        self.lm = minikv.load(folder)
        self.vocab_size = self.lm.config.vocab_size
        self._greedy: dict[tuple[int, ...], list[int]] = {}

    @functools.cached_property
    def hf(self):
        """Not every test needs it, and its library takes seconds to import."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        return model

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The tokens of `transformers` `generate`, no end token."""
        known = self._greedy.get(tuple(prompt), [])
        if len(known) < num_tokens:
            ids = torch.tensor([prompt])
            out = self.hf.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
            known = self._greedy[tuple(prompt)] = out[0, len(prompt) :].tolist()
        return known[:num_tokens]

    def prompts(self, *lengths: int, seed: int = 0) -> list[list[int]]:
        """Random prompts of these lengths."""
        rng = random.Random(seed)
        return [[rng.randrange(1, self.vocab_size) for _ in range(n)] for n in lengths]

    def with_eos(self, *eos_ids: int) -> minikv.LanguageModel:
        """The same model with these end tokens."""
        transformer = copy.copy(self.lm.transformer)
        transformer.config = dataclasses.replace(transformer.config, eos_ids=eos_ids)
        return minikv.LanguageModel(self.name, transformer, self.lm.tokenizer)


def small(**changes) -> EngineConfig:
    """An engine with small numbers, so that a test meets borders of blocks and batches."""
    values = dict(
        num_blocks=128, block_size=4, max_num_seqs=8, max_batch_tokens=64, min_prefix_tokens=0
    )
    values |= changes
    if values.get("preemption") == "swap":
        values.setdefault("host_blocks", 64)
    values["max_num_seqs"] = min(values["max_num_seqs"], values["max_batch_tokens"])
    return EngineConfig(**values)


def greedy(num_tokens: int, **others) -> SamplingParams:
    """So many of the likeliest tokens."""
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **others)


def run_ahead(engine: Engine) -> None:
    """Let a new engine on a CPU run ahead, as one on a GPU does."""
    engine.runner, engine.loop = gpu.run_ahead(engine.runner, engine.config.max_num_seqs)
    if engine.tiers is not None:
        engine.tiers.runner = engine.runner


class Clairvoyant(Drafter):
    """Knows the model's next tokens without the engine, and says a share of `wrong` ones."""

    def __init__(self, seed: int = 0, wrong: float = 0.25, most: int = 6):
        self.rng, self.wrong, self.most = random.Random(seed), wrong, most
        self.engine: Engine | None = None  # set by `fearless`
        self.gone: list = []  # sequences that it was told have left

    def propose(self, sequence, most):
        ids, drafts = list(sequence.token_ids), []
        transformer = self.engine.runner.transformer
        for ahead in range(self.rng.randint(0, min(most, self.most))):
            draw = sequence.draw(ahead=ahead)
            logits = _naive_logits(transformer, tuple(ids))
            ids.append(int(minikv.Sampler()(logits, [sequence.request.params], [draw])))
            is_wrong = self.rng.random() < self.wrong
            vocab_size = transformer.config.vocab_size
            drafts.append(self.rng.randrange(vocab_size) if is_wrong else ids[-1])
        return Proposal(drafts)

    def left(self, sequence):
        self.gone.append(sequence)


@functools.lru_cache(maxsize=4096)
def _naive_logits(transformer, token_ids: tuple[int, ...]) -> torch.Tensor:
    """Those after the last token, nothing cached, (1, vocabulary). Many tests ask of the same."""
    return minikv.LanguageModel("", transformer, None).logits(list(token_ids))[-1:]


def fearless(engine: Engine) -> Engine:
    """The engine, or its parts, which from now on verifies all that its drafter proposes."""
    engine.loop.drafter.engine = engine
    chances = SimpleNamespace(of_drafts=lambda _, count: [0.99] * count, compare=lambda *_: None)
    engine.loop.chances = chances
    engine.loop.costs = SimpleNamespace(of=lambda num_tokens: 1.0, row=0.0, note=lambda *_: 1.0)
    engine.loop.account = SimpleNamespace(is_open=True, note=lambda *_, **__: None)
    return engine


def step(engine: Engine, outputs: dict | None = None) -> dict:
    """One step and a check of every invariant; adds to `outputs`, by request id."""
    outputs = {} if outputs is None else outputs
    outputs |= {output.request_id: output for output in engine.step()}
    engine.check()
    return outputs


def drain(engine: Engine, outputs: dict | None = None, limit: int = 3000) -> dict:
    """Step until nothing is unfinished, checking every invariant after each step."""
    outputs = {} if outputs is None else outputs
    for _ in range(limit):
        if not engine.has_unfinished:
            return outputs
        step(engine, outputs)
    raise AssertionError(f"still unfinished after {limit} steps: {engine.stats()}")


def generate(engine: Engine, prompts, params) -> list:
    """`engine.generate`, with every invariant checked after every step."""
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    ids = [engine.add_request(*pair) for pair in zip(prompts, params, strict=True)]
    outputs = drain(engine)
    return [outputs[request_id] for request_id in ids]


def requests_of(lm, seed, count):
    """`count` random prompts, each with its SamplingParams."""
    rng = random.Random(seed)
    for _ in range(count):
        prompt = [rng.randint(1, 5) for _ in range(rng.randint(1, 20))]
        rule = dict(temperature=rng.choice([0.0, 1.0]), seed=rng.randint(0, 9))
        yield prompt, SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=True, **rule)


def naively(lm, prompt: list[int], num_tokens: int) -> list[int]:
    """`lm.generate_naively`, remembered."""
    return list(_naive(lm, tuple(prompt), num_tokens))


@functools.lru_cache(maxsize=10_000)
def _naive(lm, prompt, num_tokens):
    return tuple(lm.generate_naively(prompt, num_tokens))


def assert_empty(engine: Engine) -> None:
    """Nothing runs, and every block is free once the prefix cache lets go."""
    engine.check()
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.blocks_used == stats.blocks_cached
    if engine.cache is not None:
        assert engine.cache.num_evictable_blocks == stats.blocks_cached
        assert engine.cache.evict(stats.blocks_cached) == stats.blocks_cached
    assert engine.pool.num_free == engine.config.num_blocks
    if engine.scheduler.host_pool is not None:
        assert engine.scheduler.host_pool.num_free == engine.scheduler.host_pool.num_blocks
    engine.check()


def cached_prefixes(cache: minikv.RadixCache) -> dict[tuple, tuple[int, int]]:
    """Everything in a radix tree: (salt, tokens of the prefix): (block, lock count)."""
    found = {}

    def walk(salt, node, tokens):
        for key, block_id in zip(node.keys, node.block_ids, strict=True):
            tokens += key
            found[salt, tokens] = block_id, node.lock_count
        for child in node.children.values():
            walk(salt, child, tokens)

    for salt, root in cache._roots.items():
        walk(salt, root, ())
    return found


def naive_kv(lm, token_ids) -> torch.Tensor:
    """K and V of these tokens without any paging: (num_layers, T, 2, K, D)."""
    cache = minikv.ConcatCache(lm.config)
    lm.logits(token_ids, cache)
    return torch.stack([torch.stack(pair, 1) for pair in zip(cache.k, cache.v, strict=True)])


def assert_kv(
    store: minikv.KVStore, block_ids, expected: torch.Tensor, seen_from=None, tolerance=1e-4
) -> None:
    """The blocks hold these K and V, position by position, but for rounding: a number may be off
    by that part of the largest one in its row (of one layer, token and head). With groups: those
    parts of the blocks that they have; all that a query at `seen_from` sees, if it is given.

    The row's own size counts because weights of size 1 make it about 10. Behind the first layer,
    scores of about 40 and cancelled sums magnify what float32 rounds. Against the same formulas in
    float64, compiled steps and PyTorch are off alike: 4e-7 of a row in the median, 2.5e-5 at most
    in 3,000 rows. A number kept in float16 would be off by 5e-4.
    """
    size, num_tokens = store.block_size, expected.shape[1]
    layout = getattr(store, "layout", None)
    groups = layout.groups if layout is not None else [range(len(expected))]
    for group, layers in enumerate(groups):
        parts, want = torch.tensor(block_ids), expected[list(layers)]
        has = torch.ones(num_tokens, dtype=torch.bool)
        if layout is not None:
            parts = torch.from_numpy(store.part_of[group])[parts]
            has = (parts >= 0).repeat_interleave(size)[:num_tokens]
            if seen_from is not None:
                window = layout.window_of(group)
                first = 0 if window is None else max(seen_from - window + 1, 0)
                assert has[first:].all(), f"group {group} has lost what it sees"
        found = store.blocks[:, parts].flatten(1, 2)[:, :num_tokens]
        off = (found - want).abs() / want.abs().amax(-1, keepdim=True)  # (L, T, 2, K, D)
        bad = ~(off[:, has] <= tolerance)
        assert not bad.any(), (
            f"off by {off.max():.1e} of a row, first at {bad.nonzero()[0].tolist()}"
        )


def scattered(lens, block_size, kv_heads, head_dim, fill=torch.nan, no_block=-1, seed=0):
    """Random K and V (n, 2, K, D); in random blocks, with `fill` elsewhere; block tables (S, B)."""
    torch.manual_seed(seed)
    needs = [-(-n // block_size) for n in lens]
    order = iter(torch.randperm(sum(needs) + 3).tolist())
    kv = torch.full((sum(needs) + 3, block_size, 2, kv_heads, head_dim), fill)
    values = [torch.randn(n, 2, kv_heads, head_dim) for n in lens]
    tables = torch.full((len(lens), max([0, *needs]) + 1), no_block)
    for row, (tokens, need) in enumerate(zip(values, needs, strict=True)):
        for i in range(need):
            tables[row, i] = block_id = next(order)
            part = tokens[i * block_size : (i + 1) * block_size]
            kv[block_id, : len(part)] = part
    return values, kv, tables


class RecordingSampler(minikv.Sampler):
    """Samples as usual; `calls` keeps the logits of every step."""

    def __init__(self):
        self.calls: list[torch.Tensor] = []

    def __call__(self, logits, params, draws):
        self.calls.append(logits.clone())
        return super().__call__(logits, params, draws)


class ScriptedSampler:
    """Says these tokens, one a row, whatever the logits."""

    def __init__(self, token_ids):
        self.token_ids = list(token_ids)

    def __call__(self, logits, params, draws):
        return [self.token_ids.pop(0) for _ in draws]


class CarefulAttention(minikv.TorchAttention):
    """Sees to it that writes are to blocks of one sequence, and positions go on. Set `engine`."""

    engine: minikv.Engine

    def bind(self, batch):
        pool = self.engine.pool
        size = self.store.block_size
        slots = batch.slot_mapping.tolist()
        assert len(set(slots)) == len(slots), "two tokens go to one slot"
        shared = [slot // size for slot in slots if pool.ref_count(slot // size) != 1]
        assert not shared, f"writes land in blocks {shared} that have not exactly one holder"
        borders = batch.query_start.tolist()
        for row, (start, end) in enumerate(itertools.pairwise(borders)):
            context = int(batch.context_lens[row])
            positions = list(range(context - (end - start), context))
            assert batch.positions[start:end].tolist() == positions
            table = batch.block_tables[row].tolist()
            assert slots[start:end] == [table[p // size] * size + p % size for p in positions]
        return super().bind(batch)


class InterruptedAttention(CarefulAttention):
    """Raises `error`, once, in the middle of a step: after `countdown` calls of `attend`."""

    error: BaseException | None = None
    countdown = 0

    def bind(self, batch):
        attend = super().bind(batch)

        def attend_or_raise(*arguments):
            if self.error is not None:
                self.countdown -= 1
                if self.countdown < 0:
                    error, self.error = self.error, None
                    raise error
            return attend(*arguments)

        return attend_or_raise

    def interrupt(self, error: BaseException, countdown: int = 0) -> None:
        self.error, self.countdown = error, countdown


def careful_engine(lm, config: EngineConfig, **parts) -> Engine:
    """An engine whose every write is looked at, and whose attention can be interrupted."""
    engine = Engine(lm, config, attention=InterruptedAttention, **parts)
    own = getattr(engine.attention, "inner", engine.attention)  # of the layers that attend
    own.engine = engine
    return engine


def drafting_engine(lm, config: EngineConfig, drafter, make=careful_engine, **parts) -> Engine:
    """An engine that verifies every draft."""
    draft_model = lm if drafter == "model" else None  # which is always right, if it is nothing else
    engine = make(lm, replace(config, speculative=drafter, draft_model=draft_model), **parts)
    engine.loop.drafter.LEAST = 1e-9  # drafts that are not sure, too
    return fearless(engine)


def with_weights(lm, state: dict) -> minikv.LanguageModel:
    """The same model with other weights."""
    transformer = type(lm.transformer)(lm.config, state, lm.device, lm.dtype)
    return minikv.LanguageModel(lm.name, transformer, lm.tokenizer)


def with_windows(lm, *windows):
    """The same weights with these windows, layer by layer."""
    transformer = copy.copy(lm.transformer)
    transformer.config = dataclasses.replace(lm.config, windows=windows)
    return minikv.LanguageModel(lm.name, transformer, lm.tokenizer)


class NaiveBackend(minikv.AttentionBackend):
    """An attention backend in the plainest form: naive attention over each block table's tokens."""

    def __init__(self, config, store):
        self.config, self.store = config, store

    def bind(self, batch):
        borders = batch.query_start.tolist()
        rows = list(zip(borders, borders[1:], batch.context_lens.tolist(), strict=False))

        def attend(layer, q, k, v):
            slots = self.store.slots[layer]
            slots[batch.slot_mapping, 0], slots[batch.slot_mapping, 1] = k, v
            out = torch.empty_like(q)
            for (start, end, context), table in zip(rows, batch.block_tables, strict=True):
                kv = self.store.blocks[layer, table].flatten(0, 1)[:context]
                out[start:end] = minikv.naive_attention(
                    q[start:end], kv[:, 0], kv[:, 1], self.config.windows[layer]
                )
            return out

        return attend


class QueuePool:
    """A block pool whose blocks come back in turn: the one that was free longest is next."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.queue = deque(range(num_blocks))
        self.holders = {}

    @property
    def num_free(self):
        return len(self.queue)

    def allocate(self):
        if not self.queue:
            raise minikv.OutOfBlocks(1, 0)
        block_id = self.queue.popleft()
        self.holders[block_id] = 1
        return block_id

    def acquire(self, block_id):
        self.holders[block_id] += 1

    def release(self, block_id):
        self.holders[block_id] -= 1
        if not self.holders[block_id]:
            del self.holders[block_id]
            self.queue.append(block_id)

    def ref_count(self, block_id):
        return self.holders.get(block_id, 0)


class LocksOnlyAncestors(RadixCache):
    """Broken: the matched node itself stays evictable."""

    def lock(self, node):
        if node.parent is not None:
            super().lock(node.parent)

    def unlock(self, node):
        if node.parent is not None:
            super().unlock(node.parent)
