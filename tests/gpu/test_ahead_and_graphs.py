"""What the engine does on a GPU, as far as a CPU can show it: graphs, run-ahead, block copies.

A graph is stood in for by the function that would have been recorded, called again on the
same buffers: what it can show is that these buffers alone decide what comes out. That the
device reads them so is for tests/gpu.
"""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from helpers import NaiveBackend, make_model, naively, requests_of, run_ahead, small, with_weights
from hypothesis import given, settings, strategies as st
from thorough import thorough_after
from torch.utils._python_dispatch import TorchDispatchMode

import minikv
from minikv import Engine, SamplingParams
from minikv.events import wrap
from minikv.gpu.ahead import plan_without
from minikv.gpu.graphs import DecodeGraphs
from minikv.gpu.runner import with_compiled_layers
from minikv.gpu.tokens import DeviceBatch, TokenPool


class Replays(DecodeGraphs):
    """Plays a step again on the same buffers, as a graph would; counts."""

    replayed = 0

    def _record(self, step):
        def replay():
            self.replayed += 1
            step()

        return replay


class DeviceAttention(NaiveBackend):
    """Knows padding by what the tensors hold, as the kernels do, and leaves it out."""

    recordable = True

    def bind(self, batch):
        n = int((batch.context_lens > 0).sum())
        if n == len(batch.context_lens):
            return super().bind(batch)
        names = ("slot_mapping", "block_tables", "context_lens")
        rows = {name: getattr(batch, name)[:n] for name in names}
        attend = super().bind(replace(batch, query_start=batch.query_start[: n + 1], **rows))
        return lambda layer, q, k, v: torch.cat(
            [attend(layer, q[:n], k[:n], v[:n]), torch.zeros_like(q[n:])]
        )


def on_buffers(engine: Engine) -> Engine:
    """The engine as it is on a GPU, but for the GPU."""
    run_ahead(engine)
    runner, rows = engine.runner, engine.config.max_num_seqs

    def compute(batch, logits):
        logits.copy_(runner.compute_on_device(batch))

    def prepare():
        logits = torch.full((rows, engine.lm.config.vocab_size), torch.nan)
        runner.graphs = Replays(compute, rows, runner.builder.max_blocks, logits)

    runner._prepare = prepare
    prepare()
    return engine


@pytest.mark.parametrize("name", thorough_after(1, ["llama", "qwen2-window", "qwen3"]))
@pytest.mark.parametrize(
    "config", thorough_after(1, [{"num_blocks": 14}, {}, {"max_num_seqs": 11}]), ids=str
)
def test_an_engine_on_buffers_says_what_one_without_says(checkpoint, name, config):
    lm = checkpoint(name).lm
    config = small(**config, prefix_cache=name != "qwen3")
    requests = list(requests_of(lm, 3, 16))
    expected = [Engine(lm, config).generate([p], params)[0].token_ids for p, params in requests]
    engine = on_buffers(Engine(lm, config, attention=DeviceAttention))
    found = engine.generate(*zip(*requests, strict=True))
    assert [output.token_ids for output in found] == expected
    assert engine.runner.graphs.replayed > 10
    engine.check()
    for (prompt, params), output in zip(requests, found, strict=True):
        if params.temperature == 0:
            assert output.token_ids == naively(lm, prompt, params.max_tokens)


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here (it is for Linux)")
def test_the_kernels_take_padded_buffers(llama, request):
    from minikv_kernels.mode import INTERPRETED

    if not INTERPRETED:
        pytest.skip("kernels are compiled here: tests/gpu has them in graphs")
    request.getfixturevalue("quick_interpreter")
    engine = on_buffers(Engine(llama.lm, small(max_num_seqs=4, attention="triton")))
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [8]]
    outs = engine.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.token_ids == naively(llama.lm, prompt, 4)
    assert engine.runner.graphs.replayed


def test_new_weights_meet_no_old_graph(llama):
    other = {k: v.detach() for k, v in make_model("llama", seed=99).state_dict().items()}
    engine = on_buffers(Engine(llama.lm, small(), attention=DeviceAttention))
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True)
    assert engine.generate(prompt, params)[0].token_ids == naively(llama.lm, prompt, 9)
    graphs = engine.runner.graphs
    engine.update_weights(other)
    assert engine.runner.graphs is not graphs
    found = engine.generate(prompt, params)[0].token_ids
    assert found == naively(with_weights(llama.lm, other), prompt, 9)


# ── The buffers ───────────────────────────────────────────────────────────────


FIELDS = ("token_ids", "from_rows", "positions", "slot_mapping", "context_lens")


class Recorded:
    """A compute that keeps what it was given."""

    def __init__(self):
        self.batches, self.contents = [], []

    def __call__(self, batch: DeviceBatch, logits: torch.Tensor) -> None:
        names = (*FIELDS, "block_tables")
        self.contents.append({name: getattr(batch, name).clone() for name in names})
        self.batches.append({name: getattr(batch, name).data_ptr() for name in names})
        logits.copy_(batch.token_ids[:, None].expand_as(logits))


@settings(max_examples=60)
@given(st.data())
def test_the_buffers_hold_the_batch_and_padding_that_does_nothing(data):
    rows, width = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 6))
    recorded = Recorded()
    graphs = Replays(recorded, rows, width, torch.empty(rows, 3))
    addresses = {}
    for _ in range(data.draw(st.integers(1, 8))):
        n, w = data.draw(st.integers(1, rows)), data.draw(st.integers(1, width))
        random_ = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
        fields = torch.randint(1, 100, (5, n), generator=random_)
        tables = torch.randint(1, 100, (n, w), generator=random_)
        batch = DeviceBatch(
            **dict(zip(FIELDS, fields, strict=True)), block_tables=tables,
            query_start=torch.arange(n + 1), num_decodes=n,
            context_lens_host=None, query_start_host=None,
        )  # fmt: skip
        logits = graphs.run(batch)
        assert torch.equal(logits, fields[0][:, None].expand(n, 3).float())
        found = recorded.contents[-1]
        size = len(found["token_ids"])
        assert n <= size <= rows and size in (1, 2, 4, rows, -(-n // 8) * 8)
        for field, name in zip(fields, FIELDS, strict=True):
            assert torch.equal(found[name][:n], field)
        assert torch.equal(found["block_tables"][:n, :w], tables)
        assert (found["slot_mapping"][n:] == -1).all() and (found["context_lens"][n:] == 0).all()
        assert (found["token_ids"][n:] == 0).all() and (found["positions"][n:] == 0).all()
        assert (found["from_rows"][n:] == -1).all()
        # A graph replays on the addresses that it was recorded with.
        assert addresses.setdefault(size, recorded.batches[-1]) == recorded.batches[-1]
    assert graphs.replayed == len(recorded.batches) - len(addresses)


def test_padding_writes_nothing(llama):
    """Three rows in the graph for four: nothing but the blocks of the three is touched."""
    engine = on_buffers(Engine(llama.lm, small(prefix_cache=False), attention=DeviceAttention))
    for prompt in ([1, 2], [3, 4, 5], [6]):
        engine.add_request(prompt, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    held = {b for s in engine.scheduler.running for b in s.table.block_ids}
    free = [b for b in range(engine.config.num_blocks) if b not in held]
    engine.store.blocks[:, free] = torch.nan
    for _ in range(2):
        engine.step()
    held = {b for s in engine.scheduler.running for b in s.table.block_ids}
    assert engine.runner.graphs.replayed
    assert engine.store.blocks[:, [b for b in free if b not in held]].isnan().all()


# ── Tokens on their way ───────────────────────────────────────────────────────


@pytest.mark.parametrize("as_list", [False, True])
def test_tokens_reach_the_next_step_and_the_host(as_list):
    pool = TokenPool(4, torch.device("cpu"))
    first, second = [7, 8, 9], [4, 5]
    read_first = pool.put(first if as_list else torch.tensor(first))
    ids, rows = torch.tensor([0, 30, 0, 0, 0]), torch.tensor([1, -1, 0, -1, 2])
    assert pool.fill(ids, rows).tolist() == [8, 30, 7, 0, 9]
    read_second = pool.put(second if as_list else torch.tensor(second))
    assert pool.fill(torch.tensor([0, 0]), torch.tensor([0, 1])).tolist() == second
    assert (read_first(), read_second()) == (first, second)
    # What a sampler of its own knows of its tokens comes along.
    assert (read_second() is second) == as_list


def test_nobody_sees_a_token_that_is_not_known(llama):
    engine = Engine(llama.lm, small())
    run_ahead(engine)
    params = SamplingParams(max_tokens=6, ignore_eos=True, n=2, temperature=1.0, seed=1)
    expected = Engine(llama.lm, small()).generate([1, 2, 3], params)[0]
    engine.add_request([1, 2, 3], params)
    counts = []
    while engine.has_unfinished:
        for output in engine.step():
            counts.append(len(output.token_ids))
            for sample, whole in zip(output.samples, expected.samples, strict=True):
                assert sample.token_ids == whole.token_ids[: counts[-1]]
                assert sample.finish_reason == (None if counts[-1] < 6 else "length")
    assert counts == [1, 2, 3, 4, 5, 6]
    assert engine.stats().generated_tokens == 12
    deltas = list(engine.stream([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True)))
    assert [len(delta.token_ids) for delta in deltas] == [1] * 5


def test_what_comes_after_a_stop_is_thrown_away(llama):
    """Ahead, one token more is computed: it is in nobody's output, and no block stays behind."""
    prompt = [1, 2, 3]
    tokens = naively(llama.lm, prompt, 8)
    end = next(i for i in range(2, 8) if tokens[i] not in tokens[:i])
    engine = Engine(llama.lm, small(prefix_cache=False))
    run_ahead(engine)
    params = SamplingParams(max_tokens=8, stop=(tokens[end],), ignore_eos=True)
    [output] = engine.generate(prompt, params)
    assert (output.token_ids, output.finish_reason) == (tokens[: end + 1], "stop")
    stats = engine.stats()
    assert stats.generated_tokens == end + 1
    assert stats.computed_tokens == len(prompt) + end + 1  # one more than in turns
    assert stats.blocks_free == stats.blocks_total
    assert engine.step() == []
    [again] = engine.generate(prompt, params)
    assert again.token_ids == output.token_ids


def test_a_plan_without_those_that_leave_keeps_their_places_and_waits_for_nothing(llama):
    engine, waits = Engine(llama.lm, small(host_blocks=4)), []
    for prompt in ([1, 2, 3], [4, 5]):
        engine.add_request(prompt, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    first, second = engine.scheduler.running
    wrap(engine.scheduler, "schedule", lambda plan: waits.append(engine.tiers.may_wait) or plan())
    assert plan_without([first], engine).sequences == [second]
    assert engine.scheduler.running == [first, second]
    assert waits == [False] and engine.tiers.may_wait


def test_a_last_sequence_that_is_swapped_out_while_another_ends(tinypy):
    """The plan has moves and nobody to run: they must be made."""
    lm = tinypy.lm
    config = small(
        num_blocks=8, max_num_seqs=4, max_batch_tokens=16, prefix_cache=False,
        preemption="swap", host_blocks=24,
    )  # fmt: skip
    prompts = [[5] * 12, [6] * 3, [7] * 10, [8] * 3, [9] * 10, [10] * 7]
    engine = Engine(lm, config)
    run_ahead(engine)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (7, 10, 2, 5, 8, 10)]
    for prompt, rule, output in zip(prompts, params, engine.generate(prompts, params), strict=True):
        assert output.token_ids == naively(lm, prompt, rule.max_tokens)
    assert engine.stats().swaps_in > 0


# ── No waiting ────────────────────────────────────────────────────────────────


class NoWaiting(TorchDispatchMode):
    """Raises where the host waits for a GPU: a value or a shape that is read from a tensor."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = name in ("index", "index_put_") and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if masks or name in self.WAITS:
            raise AssertionError(f"{name} waits for the device")
        return function(*args, **(kwargs or {}))


class NoAttention(minikv.AttentionBackend):
    recordable = True

    def __init__(self, config, store):
        self.store = store

    def bind(self, batch):
        return lambda layer, q, k, v: q


def test_a_launch_reads_nothing_back(llama):
    engine = on_buffers(Engine(llama.lm, small(), attention=NoAttention))
    rules = [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}, {"top_k": 9, "top_p": 0.9}]
    for i, rule in enumerate(rules):
        rule = {"temperature": 0.8, "seed": i} | rule
        engine.add_request([i + 1] * 9, SamplingParams(max_tokens=20, ignore_eos=True, **rule))
    for _ in range(8):
        with NoWaiting():
            launched = engine.loop.launch(engine.scheduler, engine.scheduler.schedule())
        engine.loop.receive(engine, launched)
    with pytest.raises(AssertionError, match="waits"), NoWaiting():
        torch.ones(3)[torch.tensor([True, False, True])].sum().item()


# ── Compiled ──────────────────────────────────────────────────────────────────


@pytest.mark.thorough
def test_a_layer_is_compiled_for_one_token_and_for_any_number(monkeypatch):
    """Two parts, twice each: for all layers and all lengths, that of the hidden size too."""
    from torch._dynamo.testing import CompileCounter  # here, since it takes seconds to import

    lm = minikv.load("tinypy", dtype=torch.bfloat16)
    ids = [token % 99 for token in range(lm.config.hidden_size)]
    lengths = [12, 5, 1, 2, len(ids), 1, 33]
    expected = [lm.logits(ids[:n]) for n in lengths]
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter, fullgraph=True))
    lm.transformer = with_compiled_layers(lm.transformer)
    for n, logits in zip(lengths, expected, strict=True):
        torch.testing.assert_close(lm.logits(ids[:n]), logits)
    assert counter.frame_count == 4
