"""Layers that keep a state: beside `transformers`, and random programs beside the recurrence."""

import functools
import json
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    Clairvoyant,
    Pair,
    assert_empty,
    assert_reached,
    careful_engine,
    drafting_engine,
    drain,
    generate,
    greedy,
    make_model,
    small,
    step,
)
from thorough import thorough_after

import minikv
from minikv import (
    BUNDLED,
    BlockPool,
    BlockTable,
    CheckpointError,
    Engine,
    EngineConfig,
    SamplingParams,
)
from minikv.checkpoint import read_weights
from minikv.serving.metrics import STATES, Metrics
from minikv.states import (
    StateAttention,
    StateBuilder,
    StateCache,
    StateMemory,
    StatePool,
    StateTable,
    delta as rules,
)
from minikv.states.model import split_heads
from minikv.tiers import load_session, save_session


@pytest.fixture(scope="session")
def hybrid(checkpoint):
    return checkpoint("qwen3.5")


# ── The rule ──────────────────────────────────────────────────────────────────


def recur(state, q, k, v, g, beta):
    """The four lines, token by token, in float64. state (H, N, D), which is not changed; q, k
    (T, H, N), v (T, H, D), g, beta (T, H) -> the states after each token (T, H, N, D), and what is
    read (T, H, D)."""
    q, k, v, g, beta = (one.double() for one in (q, k, v, g, beta))
    states, out = [state.double()], []
    for t in range(len(q)):
        state = states[-1] * g[t].exp()[:, None, None]
        r = v[t] - (state * k[t][:, :, None]).sum(1)  # (H, D)
        states.append(state + beta[t][:, None, None] * k[t][:, :, None] * r[:, None])
        out.append((states[-1] * q[t][:, :, None]).sum(1))
    return torch.stack(states[1:]), torch.stack(out)


def inputs_of(num_tokens, seed=0, heads=3, n=6, d=5, fast=1.0):
    torch.manual_seed(seed)
    q, k = torch.nn.functional.normalize(torch.randn(2, num_tokens, heads, n), dim=-1)
    v = torch.randn(num_tokens, heads, d)
    g = -fast * torch.rand(num_tokens, heads)
    return torch.randn(heads, n, d), q, k, v, g, torch.rand(num_tokens, heads)


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("fast", [0.01, 1.0, 200.0])  # what is forgotten at once is not infinite
def test_a_chunk_equals_the_recurrence(num_tokens, fast):
    state, *rest = inputs_of(num_tokens, fast=fast)
    states, expected = recur(state, *rest)
    out = rules.prefill(state, *rest)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, states[-1].float(), rtol=1e-4, atol=1e-4)


def test_decodes_equal_the_recurrence():
    rows = [inputs_of(4, seed) for seed in range(5)]
    state = torch.stack([row[0] for row in rows])
    for t in range(4):
        out = rules.decode(state, *(torch.stack([row[i][t] for row in rows]) for i in range(1, 6)))
        for s, row in enumerate(rows):
            states, expected = recur(*row)
            torch.testing.assert_close(out[s], expected[t].float(), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(state[s], states[t].float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cuts", [[9], [1] * 9, [2, 1, 6], [5, 4]])
def test_a_convolution_goes_on_where_it_was(cuts):
    torch.manual_seed(0)
    inputs, weight = torch.randn(1, 9, 3), torch.randn(3, 4)
    padded = torch.cat([torch.zeros(3, 3), inputs[0]]).double()
    expected = torch.stack(
        [sum(padded[t + i] * weight[:, i].double() for i in range(4)) for t in range(9)]
    )
    expected *= torch.sigmoid(expected)
    last, found = torch.zeros(1, 3, 3), []
    for part in inputs.split(cuts, 1):
        out, last = rules.convolve(part, last, weight)
        found.append(out[0])
    torch.testing.assert_close(torch.cat(found), expected.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(last[0], inputs[0, -3:])


# ── Checkpoints ───────────────────────────────────────────────────────────────

SHAPES = {
    "tied": {"tie_word_embeddings": True},
    "all-turn": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                     "partial_rotary_factor": 1.0}},
    "as-many-key-heads": {"linear_num_key_heads": 4, "linear_key_head_dim": 8},
    "wider": {"linear_conv_kernel_dim": 2, "linear_value_head_dim": 24},
    "by-interval": {"num_hidden_layers": 4, "layer_types": None},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_checkpoints(shape, tmp_path):
    """In bfloat16 files, computed in float32."""
    make_model("qwen3.5", seed=3, **SHAPES[shape]).to(torch.bfloat16).save_pretrained(tmp_path)
    pair = Pair(shape, tmp_path)
    lm, (tokens,) = pair.lm, pair.prompts(90)
    with torch.inference_mode():
        expected = pair.hf(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(lm.logits(tokens), expected, rtol=1e-3, atol=1e-3)
    out = Engine(lm, small()).generate([tokens[:30]], greedy(8))[0].token_ids
    assert out == pair.greedy(tokens[:30], 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": ["linear_attention"] * 2}, "layer_types: needs layers of both kinds"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types: .*sliding"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads: must be a multiple of the 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"attention_bias": True}, "attention_bias: not supported in a model with linear layers"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                              "partial_rotary_factor": 0.05}}, "partial_rotary_factor: must leave"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "mixture of experts"),
        ({"architectures": ["NemotronHForCausalLM"]}, "Mamba layers"),
        ({"architectures": ["Lfm2ForCausalLM"]}, "short convolutions"),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"]}, "pictures"),
    ],
)  # fmt: skip
def test_other_hybrids_are_refused_by_what_they_have(change, said, hybrid, tmp_path):
    raw = json.loads((hybrid.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(CheckpointError, match=said):
        minikv.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_dtype", "int8"), ("host_blocks", 4),
        ("retention", "pinned"), ("batch_invariant", True), ("attention", "triton"),
    ],
)  # fmt: skip
def test_what_is_for_k_and_v_alone_is_refused(name, value, hybrid):
    with pytest.raises(ValueError, match=f"{name}: .*layers with a state"):
        Engine(hybrid.lm, EngineConfig(**{name: value}))


def test_sessions_are_refused(hybrid, tmp_path):
    engine = Engine(hybrid.lm, small())
    for call in (
        lambda: save_session(engine, [1, 2, 3], tmp_path / "file"),
        lambda: load_session(engine, tmp_path / "file"),
    ):
        with pytest.raises(ValueError, match="session: a file has no place for states"):
            call()


def test_parts_that_count_no_slots_are_refused(hybrid):
    with pytest.raises(ValueError, match=r"prefix_cache: .* only the engine's own classes"):
        Engine(hybrid.lm, block_table=type("Own", (BlockTable,), {}))


def test_a_cache_of_k_and_v_has_no_states(hybrid):
    with pytest.raises(ValueError, match="this cache has no states"):
        hybrid.lm.logits([1, 2], minikv.ConcatCache(hybrid.lm.config))


# ── The bundled model ─────────────────────────────────────────────────────────


def test_tinypy_states_is_tinypy_but_for_what_learned():
    folder = BUNDLED["tinypy-states"]
    ours, tinypys = read_weights(folder), read_weights(BUNDLED["tinypy"])
    same = {name for name in ours.keys() & tinypys if torch.equal(ours[name], tinypys[name])}
    kept = ("mlp.", "embed_tokens", "o_proj")
    assert same == {name for name in ours if any(part in name for part in kept)}
    assert (folder / "attention.safetensors").stat().st_size <= 2_500_000
    text = "def fib(n):"
    assert minikv.load("tinypy-states").encode(text) == minikv.load("tinypy").encode(text)


def test_tinypy_states_equals_transformers(checkpoint):
    pair = checkpoint("tinypy-states")
    assert sum(pair.lm.config.is_linear) >= 2
    prompts = pair.prompts(3, 40, 70, 70)
    prompts[3][:50] = prompts[2][:50]
    engine = careful_engine(pair.lm, small(max_batch_tokens=16))
    for _ in range(2):  # the second time with hits
        outputs = engine.generate(prompts, greedy(8))
        assert [one.token_ids for one in outputs] == [pair.greedy(ids, 8) for ids in prompts]
    assert engine.stats().hit_tokens > 0


# ── Which copies there are ────────────────────────────────────────────────────


def copies_of(engine) -> list[tuple[int, ...]]:
    """The tokens in front of each copy that a hit can find, shortest first."""
    return sorted(tokens for tokens, _ in copies_by_tokens(engine))


def copies_by_tokens(engine):
    """(tokens in front of it, slot) of each copy in the prefix cache."""
    copies = engine.pool.copies

    def walk(node, tokens):
        for key, block_id in zip(node.keys, node.block_ids, strict=True):
            tokens += key
            if block_id in copies:
                yield tokens, copies[block_id]
        for child in node.children.values():
            yield from walk(child, tokens)

    for root in engine.cache._roots.values():
        yield from walk(root, ())


def lengths_of(engine, prompt):
    return [len(one) for one in copies_of(engine) if one == tuple(prompt[: len(one)])]


def assert_copies(engine, oracle, least):
    kept = list(copies_by_tokens(engine))
    assert len(kept) >= least
    for tokens, slot in kept:
        oracle.assert_state(engine.pool.memory, slot, tokens)


def test_a_copy_is_the_state_after_the_tokens_in_front_of_it(hybrid):
    """Also of one that is made in a decode, and one within a chunk."""
    first, second = hybrid.prompts(21, 30, seed=7)
    engine, oracle = careful_engine(hybrid.lm, small(block_size=4)), Oracle(hybrid.lm)
    for prompt in (first, first[:11] + second):
        engine.add_request(prompt, greedy(14))
        while engine.has_unfinished:
            step(engine)
            assert_copies(engine, oracle, 1)
    assert_copies(engine, oracle, 3)
    assert_empty(engine)  # and with their blocks, copies go
    assert engine.stats().states.copies == 0


def test_the_last_state_is_kept_and_a_chat_goes_on_there(hybrid):
    (prompt,) = hybrid.prompts(21, seed=1)
    engine = careful_engine(hybrid.lm, small(block_size=4))
    answer = engine.generate([prompt], greedy(9))[0].token_ids
    whole = prompt + answer
    assert lengths_of(engine, whole) == [28]  # 29 tokens are computed
    turn = [*whole, 7, 8, 9]
    engine.generate([turn], greedy(2))
    stats = engine.stats()
    assert (stats.hit_tokens, stats.states.used, stats.states.recomputed_tokens) == (28, 1, 0)
    assert lengths_of(engine, turn) == [28, 32]
    assert stats.states.copies == 2
    assert stats.states.copied_bytes == 2 * hybrid.lm.config.state_bytes(torch.float32)


def test_the_third_prompt_of_a_kind_begins_at_the_junction(hybrid):
    system, *rest = hybrid.prompts(18, 9, 9, 9, seed=2)
    engine, hits = careful_engine(hybrid.lm, small(block_size=4)), []
    for user in rest:
        engine.generate([system + user], greedy(3))
        hits.append(engine.stats().hit_tokens)
    assert hits == [0, 0, 16]
    assert engine.stats().states.recomputed_tokens == 16
    assert lengths_of(engine, system) == [16]


def test_the_fourth_finds_it_again(hybrid):
    system, *rest = hybrid.prompts(18, 9, 9, 9, 9, seed=2)
    engine = careful_engine(hybrid.lm, small(block_size=4))
    outputs = [engine.generate([system + user], greedy(3))[0].token_ids for user in rest]
    assert outputs == [hybrid.greedy(system + user, 3) for user in rest]
    assert engine.stats().hit_tokens == 2 * 16 and engine.stats().states.used == 2


def test_metrics_count_copies(hybrid):
    system, *rest = hybrid.prompts(18, 9, 9, 9, seed=2)
    engine = Engine(hybrid.lm, small(block_size=4))
    engine.generate([system + rest[0]], greedy(3))
    engine.generate([system + rest[1], rest[2]], greedy(3))
    health = SimpleNamespace(stats=engine.stats(), life=None)
    text = Metrics(lambda: [health], "m").text().decode()
    for name, field in STATES.items():
        count = getattr(engine.stats().states, field[1])
        assert f'vllm:{name}_total{{engine="0",model_name="m"}} {float(count)}' in text
    assert engine.stats().states.recomputed_tokens == 16


@pytest.mark.parametrize("length", [18, 20])  # within a block, and at its end
def test_the_same_prompt_for_the_third_time(length, hybrid):
    (prompt,) = hybrid.prompts(length, seed=8)
    engine, hits = careful_engine(hybrid.lm, small(block_size=4)), []
    for _ in range(4):
        assert engine.generate([prompt], greedy(9))[0].token_ids == hybrid.greedy(prompt, 9)
        hits.append(engine.stats().hit_tokens)
    assert hits == [0, 0, 16, 32]


def test_copies_at_intervals_are_there_for_the_second_prompt(hybrid):
    system, *rest = hybrid.prompts(18, 9, 9, seed=2)
    engine = careful_engine(hybrid.lm, small(block_size=4, state_interval=9))
    for user in rest:
        engine.generate([system + user], greedy(3))
    assert lengths_of(engine, system + rest[0]) == [8, 16, 24]
    assert engine.stats().hit_tokens == 16 and engine.stats().states.recomputed_tokens == 0


def test_copies_have_a_budget_of_their_own(hybrid):
    size = hybrid.lm.config.state_bytes(torch.float32)
    prompts = hybrid.prompts(9, 9, 9, 9, seed=3)
    engine = careful_engine(hybrid.lm, small(block_size=4, state_bytes=2 * size + 1))
    for prompt in prompts:
        engine.generate([prompt], greedy(3))
    assert [one[:9] for one in map(list, copies_of(engine))] != []
    assert engine.stats().states.copies == 2  # those of the last two
    assert all(tuple(prompt[:8]) in copies_of(engine) for prompt in prompts[2:])
    assert engine.stats().blocks_cached == 8  # the blocks of all four
    none = careful_engine(hybrid.lm, small(block_size=4, state_bytes=size - 1))
    assert [none.generate([prompts[0]], greedy(3))[0].token_ids for _ in range(2)] == [
        hybrid.greedy(prompts[0], 3)
    ] * 2
    assert none.stats().states.copies == none.stats().hit_tokens == 0


def test_where_a_sequence_ended_is_no_junction(hybrid):
    """Its copy is evicted when it comes back: there is nobody else to keep one for."""
    size = hybrid.lm.config.state_bytes(torch.float32)
    chat, *others = hybrid.prompts(13, 9, 9, seed=3)
    engine = careful_engine(hybrid.lm, small(block_size=4, state_bytes=2 * size + 1))
    for prompt in (chat, *others):
        engine.generate([prompt], greedy(1))
    assert lengths_of(engine, chat) == []
    chat = chat[:12] + others[0]
    engine.generate([chat], greedy(1))
    assert lengths_of(engine, chat) == [20]
    assert engine.stats().states.recomputed_tokens == 12


def test_another_salt_finds_no_state(hybrid):
    (prompt,) = hybrid.prompts(13, seed=4)
    engine = careful_engine(hybrid.lm, small(block_size=4))
    for salt in ("a", "b", "a"):
        engine.generate([[*prompt, 1]], greedy(1, cache_salt=salt))
    assert engine.stats().hit_tokens == 12


def test_a_draft_model_with_states_is_refused(hybrid):
    with pytest.raises(ValueError, match=r"draft_model: .* has layers with a state"):
        Engine(hybrid.lm, small(speculative="model", draft_model=hybrid.lm))


@pytest.mark.parametrize("wrong", thorough_after(1, [0.4, 0.0, 1.0]))
def test_tokens_with_drafts_are_those_without(wrong, hybrid):
    prompts = hybrid.prompts(21, 5, 33, seed=6)
    engine = drafting_engine(hybrid.lm, small(block_size=4), Clairvoyant(1, wrong=wrong))
    outputs = generate(engine, prompts, greedy(24))
    assert [one.token_ids for one in outputs] == [hybrid.greedy(one, 24) for one in prompts]
    drafts = engine.stats().speculation
    assert drafts.drafts > 20 and (drafts.accepted == drafts.drafts) == (wrong == 0.0)
    # A chat goes on where the copy of its last state lies, though drafts went past it.
    answered = [prompts[0] + outputs[0].token_ids]
    assert_copies(engine, Oracle(hybrid.lm), 3)
    before = engine.stats().hit_tokens
    generate(engine, [[*answered[0], 3]], greedy(2))
    assert engine.stats().hit_tokens - before >= 40
    assert_empty(engine)


def test_samples_and_beams_have_states_of_their_own(hybrid):
    (prompt,) = hybrid.prompts(10, seed=5)
    engine = careful_engine(hybrid.lm, small(block_size=4))
    params = [SamplingParams(max_tokens=8, temperature=1.0, seed=s, ignore_eos=True, n=3)
              for s in range(2)]  # fmt: skip
    together = generate(engine, [prompt, prompt], params)
    for one, param in zip(together, params, strict=True):
        alone = Engine(hybrid.lm, small(block_size=4, prefix_cache=False)).generate([prompt], param)
        assert [s.token_ids for s in one.samples] == [s.token_ids for s in alone[0].samples]
    beams = engine.beam_search(prompt, beam_width=3, max_tokens=6)
    assert len({tuple(beam.token_ids) for beam in beams}) == 3
    for beam in beams:
        logits = hybrid.lm.logits(prompt + beam.token_ids)[9:-1].log_softmax(-1)
        score = logits.gather(1, torch.tensor(beam.token_ids)[:, None]).sum() / 6
        assert abs(score - beam.score) < 1e-3
    assert_empty(engine)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda pool, table: pool._free_slots.pop(), "a slot is lost or held twice"),
        (lambda pool, table: pool.give_slot(table.slot), "a slot is lost or held twice"),
        (lambda pool, table: setattr(table, "slot", None), "a sequence runs without a slot"),
    ],
)
def test_the_engines_check_looks_at_slots(damage, says, hybrid):
    engine = Engine(hybrid.lm, small())
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=9))
    engine.step()
    engine.check()
    damage(engine.pool, engine.scheduler.running[0].table)
    with pytest.raises(AssertionError, match=says):
        engine.check()


# ── Random programs ───────────────────────────────────────────────────────────

VOCAB = 24


@pytest.fixture(scope="session")
def tiny_hybrid(tmp_path_factory):
    """A model so small that a step takes a millisecond."""
    folder = tmp_path_factory.mktemp("tiny")
    make_model(
        "qwen3.5", seed=1, vocab_size=VOCAB, hidden_size=16, intermediate_size=16, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=4, linear_value_head_dim=4,
        max_position_embeddings=128,
    ).save_pretrained(folder)  # fmt: skip
    return minikv.load(folder)


class Oracle:
    """The naive recurrence over all tokens, remembered by text."""

    def __init__(self, lm):
        self.lm, self.known = lm, functools.lru_cache(4000)(self._run)

    def _run(self, token_ids):
        """Logits after each token, and of each linear layer the states after each token."""
        transformer, c, states = self.lm.transformer, self.lm.config, []

        def recall(i, weight, inputs, g, beta):
            zeros = inputs.new_zeros(1, c.width - 1, c.channels)
            mixed = torch.cat([rules.convolve(inputs[None], zeros, weight)[0][0]])
            start = torch.zeros(c.value_heads, c.key_dim, c.value_dim)
            after, out = recur(start, *split_heads(c, mixed), g, beta)
            states.append((after.float(), torch.cat([zeros[0], inputs])))
            return out.float()

        with torch.inference_mode():
            hidden = transformer.forward(
                torch.tensor(token_ids), torch.arange(len(token_ids)),
                transformer.attend_naively, recall,
            )  # fmt: skip
            return transformer.logits(hidden), states

    def assert_state(self, memory, slot, token_ids):
        """The slot has the state after exactly these tokens."""
        for i, (after, inputs) in enumerate(self.known(tuple(token_ids))[1]):
            found = memory.matrices[slot, i]
            assert torch.allclose(found, after[-1], rtol=1e-3, atol=1e-3), f"a wrong state, {slot}"
            last = inputs[len(inputs) - len(memory.inputs[slot, i]) :]
            assert torch.allclose(memory.inputs[slot, i], last, rtol=1e-3, atol=1e-3)

    def assert_output(self, request, ids):
        """Each token was the likeliest, or has been drawn with its number."""
        if not ids:
            return
        logits = self.known((*request.prompt_ids, *ids))[0][len(request.prompt_ids) - 1 : -1]
        if request.params.temperature == 0:
            behind = logits.max(-1).values - logits[torch.arange(len(ids)), torch.tensor(ids)]
            assert behind.max() < 1e-3, f"{ids} are not the likeliest after {request.prompt_ids}"


class Player:
    """Does random things to an engine, and compares what comes of it."""

    def __init__(self, lm, oracle, seed, seen):
        self.rng, self.lm, self.oracle, self.seen = random.Random(seed), lm, oracle, seen
        draw, size = self.rng.choice, lm.config.state_bytes(torch.float32)
        # What decides which cases come is spread evenly: any eight seeds in a row have all of it.
        turn = seed % 8
        config = small(
            block_size=[1, 2, 4][seed % 3], num_blocks=[24, 40, 90][seed // 3 % 3],
            max_num_seqs=[3, 8][turn // 4], max_batch_tokens=draw([8, 24, 64]),
            prefix_cache=turn != 6, state_bytes=max(1, (turn != 1) * draw([2, 5, 60]) * size),
            state_interval=draw([0, 0, 8]),
        )  # fmt: skip
        make = [careful_engine, Engine][turn // 2 % 2]  # computed by PyTorch, or compiled
        if turn % 2:
            draft = Clairvoyant(seed, wrong=[0.1, 0.5][turn // 4])
            make = partial(drafting_engine, drafter=draft, make=make)
        self.engine = make(lm, config)
        self.texts = [self.text(self.rng.randint(4, 20)) for _ in range(3)]
        self.requests, self.done = {}, []

    def text(self, length):
        return [self.rng.randrange(VOCAB) for _ in range(length)]

    def play(self, num_operations):
        chances = dict(add=6, step=25, abort=1, interrupt=1, beams=0.2, drop=1, evict=1, clear=0.1)
        for name in self.rng.choices(list(chances), list(chances.values()), k=num_operations):
            getattr(self, name)()
            if self.rng.random() < 0.3:
                self.check()
        drain(self.engine)
        assert_empty(self.engine)
        stats = self.engine.stats()
        self.seen.update(
            hits=stats.states.used, recomputed=stats.states.recomputed_tokens > 0,
            preemptions=stats.preemptions, copies=stats.states.made,
        )  # fmt: skip
        if drafts := stats.speculation:
            self.seen["right drafts"] += drafts.accepted
            self.seen["wrong drafts"] += drafts.drafts - drafts.accepted
        for request in self.done:
            for sample in request.sequences:
                self.oracle.assert_output(request, sample.output_ids)

    def check(self):
        engine = self.engine
        engine.check()
        for sequence in engine.scheduler.running:
            if sequence.num_computed > 0:
                ids = sequence.token_ids[: sequence.num_computed]
                self.oracle.assert_state(engine.pool.memory, sequence.table.slot, ids)
                self.seen["states compared"] += 1
        if engine.cache is not None:
            for tokens, slot in copies_by_tokens(engine):
                self.oracle.assert_state(engine.pool.memory, slot, tokens)
                self.seen["copies compared"] += 1

    def add(self):
        if len(self.engine.scheduler.waiting) > 6:
            return
        n = self.rng.choice([1, 1, 1, 2, 3])
        prompt = self.rng.choice(self.texts) + self.text(self.rng.randint(0, 12))
        if self.done and self.rng.random() < 0.3:  # a chat goes on
            sequence = self.rng.choice(self.done).sequences[0]
            if len(sequence.token_ids) < 60:
                prompt = [*sequence.token_ids, *self.text(2)]
        params = SamplingParams(
            max_tokens=self.rng.randint(1, 20), ignore_eos=True, n=n, seed=self.rng.randrange(9),
            temperature=self.rng.choice([0.0, 0.0, 1.0]),
        )  # fmt: skip
        try:
            request_id = self.engine.add_request(prompt, params)
        except ValueError:  # too long for this pool
            return
        self.requests[request_id] = self.engine.request(request_id)
        self.seen["forks"] += n > 1

    def step(self):
        before = {s: s.num_computed for s in self.engine.scheduler.running}
        for output in self.engine.step():
            if output.finish_reason is not None:
                self.done.append(self.requests.pop(output.request_id))
        self.seen["compiled steps" if self.engine.attention.decodes else "steps"] += 1
        self.seen["chunks"] += any(
            s.num_computed - before.get(s, 0) > 1 and s.num_computed < len(s.token_ids)
            for s in self.engine.scheduler.running
        )  # fmt: skip

    def abort(self):
        if self.requests:
            request_id = self.rng.choice(list(self.requests))
            self.engine.abort(request_id)
            self.done.append(self.requests.pop(request_id))
            self.seen["aborts"] += 1

    def interrupt(self):
        if self.engine.has_unfinished and self.engine.attention.decodes is None:
            self.engine.attention.inner.interrupt(KeyboardInterrupt(), self.rng.randrange(2))
            try:
                self.step()
            except KeyboardInterrupt:
                self.seen["interrupts"] += 1
            self.engine.attention.inner.error = None

    def beams(self):
        prompt = self.rng.choice(self.texts)
        try:
            found = self.engine.beam_search(prompt, 2, 5)
        except (ValueError, minikv.OutOfBlocks):
            return
        logits = self.oracle.known((*prompt, *found[0].token_ids))[0][len(prompt) - 1 : -1]
        picked = logits.log_softmax(-1).gather(1, torch.tensor(found[0].token_ids)[:, None])
        assert abs(picked.sum().item() / 5 - found[0].score) < 1e-2
        self.seen["beams"] += 1

    def drop(self):
        """A copy goes, and its block stays."""
        if self.engine.pool.copies:
            self.engine.pool.drop_copy(self.rng.choice(list(self.engine.pool.copies)))
            self.seen["dropped copies"] += 1

    def evict(self):
        if self.engine.cache is not None:
            self.seen["evicted blocks"] += self.engine.cache.evict(self.rng.randint(1, 4))

    def clear(self):
        with self.engine.changing_state():
            if self.engine.cache is not None:
                self.engine.cache.clear()
        self.seen["cleared"] += 1


FLOORS = {  # of a thousand operations
    "hits": 20, "recomputed": 1, "preemptions": 4, "copies": 100, "forks": 20, "aborts": 5,
    "interrupts": 2, "beams": 1, "dropped copies": 4, "evicted blocks": 10, "chunks": 20,
    "states compared": 100, "copies compared": 100, "right drafts": 50, "wrong drafts": 50,
}  # fmt: skip


def play(lm, seeds, seen, each=250):
    oracle = Oracle(lm)
    for seed in seeds:
        Player(lm, oracle, seed, seen).play(each)


@pytest.mark.parametrize(
    ("seeds", "each"), thorough_after(1, [(range(8), 60), (range(8), 250), (range(8, 40), 250)])
)
def test_random_programs(seeds, each, tiny_hybrid):
    seen, thousands = Counter(), len(seeds) * each / 1000
    play(tiny_hybrid, seeds, seen, each)
    assert_reached(seen, {name: max(1, int(count * thousands)) for name, count in FLOORS.items()})


# ── Bugs that engines have shipped ────────────────────────────────────────────


def never_zeroed(patch):
    """A stranger's text in a new request (vLLM #56524, llama.cpp #29092)."""
    patch.setattr(StateMemory, "zero", lambda memory, slot: None)


def never_written(patch):
    """A copy that is known when it is planned, and nobody writes it (vLLM #56525)."""
    place = StateBuilder.placed

    def planned(self, *arguments):
        batch = place(self, *arguments)
        return replace(batch, copies=[], pieces=[one._replace(copy=None) for one in batch.pieces])

    patch.setattr(StateBuilder, "placed", planned)


def carried_too_early(patch):
    """The copy stands for more tokens than the block that carries it (sglang #34760)."""
    plan = StateTable._plan

    def early(self, position, is_rolling):
        carried = plan(self, max(self.block_size, position - self.block_size), is_rolling)
        return [(position, slot) for _, slot in carried]

    patch.setattr(StateTable, "_plan", early)


def gone_once_used(patch):
    """Whoever begins with a copy takes it away (llama.cpp #22534, #20428)."""
    grow = StateTable.grow

    def used(self, num_tokens):
        grow(self, num_tokens)
        if self._prefix_end is not None:
            self.pool.drop_copy(self._prefix_end)

    patch.setattr(StateTable, "grow", used)


def kept_by_who_is_not_admitted(patch):
    """A slot that was taken for a hit is lost if the request has to wait (sglang #16067)."""
    share = StateTable.share

    def taken(self, block_ids):
        share(self, block_ids)
        if len(self.pool._free_slots) > 4:
            self.slot = self.pool.take_slot(self.pool.copies[self._prefix_end])

    def release(self):
        slot, self.slot = self.slot, None
        if self.num_tokens != len(self.block_ids) * self.block_size and slot is not None:
            self.pool.give_slot(slot)
        BlockTable.release(self)

    patch.setattr(StateTable, "share", taken)
    patch.setattr(StateTable, "release", release)


def only_the_last_state(patch):
    """The only copy lies where no other request comes by: no hits, ever (vLLM #45238)."""
    patch.setattr(StateCache, "known", lambda *_: (0, False))


def copied_a_step_late(patch):
    """A copy of what the next step has overwritten already (sglang #22542)."""
    compute, late = StateAttention.compute, []

    def behind(self, transformer, batch):
        copies, due = batch.copies, late[:]
        late[:] = copies
        return compute(self, transformer, replace(batch, copies=due))

    patch.setattr(StateAttention, "compute", behind)


def rejected_drafts_stay(patch):
    """A state keeps what was drafted in vain (tpu-inference #3178, mlx-lm #1730)."""
    keep = StateAttention.keep

    def all_of(self, counts):
        longest = {one.row: one.last - one.first for one in self._tries}
        keep(self, [longest.get(row, count) for row, count in enumerate(counts)])

    patch.setattr(StateAttention, "keep", all_of)


def shared_by_forks(patch):
    """A fork goes on with its parent's state, as it does with its blocks."""
    patch.setattr(StateMemory, "copy", lambda memory, source, target: None)


def not_dropped_with_its_block(patch):
    """A block that is used again still carries the copy of what was in it."""
    patch.setattr(StatePool, "release", BlockPool.release)


BUGS = [
    never_zeroed, never_written, carried_too_early, gone_once_used, kept_by_who_is_not_admitted,
    only_the_last_state, copied_a_step_late, rejected_drafts_stay, shared_by_forks,
    not_dropped_with_its_block,
]  # fmt: skip


@pytest.mark.parametrize("plant", BUGS)
def test_bugs_of_other_engines_are_caught(plant, tiny_hybrid, hybrid, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_the_third_prompt_of_a_kind_begins_at_the_junction(hybrid)
        test_the_fourth_finds_it_again(hybrid)
        test_a_copy_is_the_state_after_the_tokens_in_front_of_it(hybrid)
        play(tiny_hybrid, range(2), Counter())
