"""Random programs for an engine with everything switched on, and a player that may interrupt them.

A program is a list of operations, each a name and its numbers, that makes sense whichever
operations are left out: so one that fails can be made shorter, by `shortened`.
"""

import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

import torch
from helpers import Clairvoyant, assert_kv, cached_prefixes, fearless, naive_kv, run_ahead, small
from quant_case import check_open
from safetensors.torch import save_file

import minikv
from minikv import Engine, LanguageModel, ModelConfig, OutOfBlocks, RadixCache, SamplingParams
from minikv.events import Listener
from minikv.groups import GroupPool
from minikv.model import Transformer
from minikv.quant.formats import format_of
from minikv.quant.oracle import QuantisedOracle
from minikv.retention import RetainingCache, whole_conversations
from minikv.sampling import probabilities
from minikv.speculative import HeadDrafter
from minikv.tiers import load_session, save_session
from minikv.tiers.costs import Link, Prefill
from minikv.tiers.identity import SessionError

PACKAGE = str(Path(minikv.__file__).parent)
VOCAB, HIDDEN, HEADS, HEAD_DIM = 40, 16, 2, 32  # with shorter heads, int4 is not one program
MOST_STEPS = 1500  # more than any program needs to drain
PATIENCE = 600  # seconds that a program may take, compiling included
KV_DTYPES = ("auto", "auto", "float16", "bfloat16", "int8", "int8", "int4", "int4")


def weights(seed: int, num_layers: int = 2) -> dict[str, torch.Tensor]:
    """Large ones, so that greedy margins are large."""
    q, kv = HEADS * HEAD_DIM, HEAD_DIM
    shapes = {
        "self_attn.q_proj": (q, HIDDEN), "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN), "self_attn.o_proj": (HIDDEN, q),
        "mlp.gate_proj": (16, HIDDEN), "mlp.up_proj": (16, HIDDEN), "mlp.down_proj": (HIDDEN, 16),
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    names = {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(num_layers) for name, shape in shapes.items()
    }  # fmt: skip
    names |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


@cache
def model(seed: int, windows: tuple[int | None, ...]) -> LanguageModel:
    """A small model that has a layer for each of these sliding windows."""
    config = ModelConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=16, num_heads=HEADS,
        num_kv_heads=1, head_dim=HEAD_DIM, num_layers=len(windows), windows=windows,
        max_context=96, rms_norm_eps=1e-6, tie_embeddings=True, attention_bias=False,
        output_bias=False, mlp_bias=False, qk_norm=False, rope_theta=100.0, rope_scaling=None,
        eos_ids=(),
    )  # fmt: skip
    state = weights(seed, len(windows))
    transformer = Transformer(config, state, torch.device("cpu"), torch.float32)
    return LanguageModel(f"model {seed}", transformer, None)


def random_head(lm: LanguageModel, folder: Path) -> HeadDrafter:
    """A head that is hardly ever right, and always drafts."""
    generator = torch.Generator().manual_seed(5)
    size = lm.config.hidden_size
    shapes = dict(from_hidden=(size, 8), from_tokens=(3, size, 8), to_hidden=(8, size))
    head = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(head | {"kept": torch.arange(lm.config.vocab_size)}, folder / "head.safetensors")
    drafter = HeadDrafter(lm, folder)
    drafter.LEAST = 1e-9
    return drafter


# ── Programs ──────────────────────────────────────────────────────────────────


def any_setup(rng: random.Random) -> dict:
    """Numbers of an engine: little room, so that everything is evicted, preempted and fetched."""
    block_size = rng.choice([1, 2, 3, 4, 8])
    prefix_cache, tiers = rng.random() < 0.9, rng.choice(["", "host", "disk", "disk"])
    config = dict(
        block_size=block_size,
        num_blocks=-(-rng.choice([32, 40, 64]) // block_size),
        max_num_seqs=rng.randint(2, 6),
        max_batch_tokens=rng.choice([6, 8, 16, 32]),
        min_prefix_tokens=rng.choice([0, 0, 6]),
        prefix_cache=prefix_cache,
        preemption=rng.choice(["swap", "recompute"]) if tiers else "recompute",
        host_blocks=rng.choice([3, 8, 24]) if tiers else 0,
        attention=rng.choice(["cpu", "cpu", "torch"]),
        kv_dtype=rng.choice(KV_DTYPES),
        kv_groups="one",
    )
    if config["attention"] == "cpu" and config["kv_dtype"] == "float16":
        config["kv_dtype"] = "auto"  # the compiled kernels read the others
    if config["kv_dtype"] == "int4" and block_size == 1:
        config["kv_dtype"] = "int8"  # keys of a block share their scales
    if tiers == "disk" and prefix_cache:
        config |= dict(disk_path="disk", write_through=rng.random() < 0.3)
        config["disk_bytes"] = rng.choice(["64 KiB", "1 MiB"])
    loop = rng.choice(["plain", "plain", "ahead", "drafts", "drafts"])
    if loop == "drafts":
        drafters = ["ngram", "suffix", "head", "model", "clairvoyant", "clairvoyant"]
        config["speculative"] = rng.choice(drafters)
    windows = rng.choice([(None, None), (None, None), (None, 6), (6, 6)])
    kind = rng.choice([RadixCache, RadixCache, TickingCache])
    return dict(config=config, loop=loop, windows=windows, cache=kind)


def grouped_setup(rng: random.Random) -> dict:
    """The same, for a model with KV groups."""
    setup = any_setup(rng)
    plain = dict(kv_dtype="auto", host_blocks=0, preemption="recompute", kv_groups="auto")
    config = setup["config"] | plain
    for name in ("disk_path", "disk_bytes", "write_through"):
        config.pop(name, None)
    windows = rng.choice([(None, 6), (6, 6), (11, None), (6, None, 6)])
    return setup | dict(config=config, windows=windows, cache=RadixCache)


OPERATIONS = {
    "add": 30, "step": 45, "steps": 12, "abort": 4, "fail": 2, "evict": 3, "clear": 1, "save": 3,
    "load": 3, "beams": 2, "weights": 1, "flush": 1, "restart": 1,
}  # fmt: skip


def program_of(rng: random.Random, length: int) -> list[tuple]:
    names = rng.choices(list(OPERATIONS), OPERATIONS.values(), k=length)
    heads = [[rng.randrange(1, VOCAB) for _ in range(16)] for _ in range(3)]

    def prompt():
        end = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 3))]
        return rng.choice(heads)[: rng.randint(0, 16)] + end

    def operation(name):
        if name == "add":
            stop = tuple(rng.sample(range(VOCAB), 4)) if rng.random() < 0.2 else ()
            params = dict(
                max_tokens=rng.randint(1, 14), n=rng.choice([1, 1, 2, 3]), stop=stop,
                temperature=rng.choice([0.0, 0.0, 1.0]), seed=rng.randrange(9),
                cache_salt=rng.choice([None, None, None, "salt"]), retain_s=rng.choice([0, 9, 50]),
            )  # fmt: skip
            return name, prompt(), params, rng.random() < 0.3
        if name == "beams":
            return name, prompt(), rng.randint(1, 3), rng.randint(1, 4)
        return name, rng.randrange(100)

    return [operation(name) for name in names]


# ── Playing one ───────────────────────────────────────────────────────────────


class TickingCache(RetainingCache):
    """A second passes with each look at the clock."""

    def __init__(self, pool, block_size):
        super().__init__(pool, block_size, whole_conversations, partial(next, itertools.count()))


def fetch_by_chance(tiers) -> None:
    """Whether it is quicker to fetch or to compute, and when it is too late, is drawn: no machine
    decides it."""
    draw = random.Random(0).random

    def rates():
        links = {name: Link(0, 1e-9 if draw() < 0.1 else 1e9) for name in ("host", "disk")}
        return links, Prefill(0, 1e-3)

    steps = iter(lambda: 3600.0 * (draw() < 0.005), None)
    tiers.rates, tiers.clock = rates, partial(next, itertools.accumulate(steps))


class CountEvicted(Listener):
    """Lets every prefix cache count the blocks that it evicts."""

    def begin(self, pool, cache):
        if cache is not None:
            cache.evicted, evict = 0, cache.evict

            def counting(num_blocks):
                freed = evict(num_blocks)
                cache.evicted += freed
                return freed

            cache.evict = counting


class Player:
    """Plays one program. With `interrupts`, random numbers, about every second step is cut off."""

    def __init__(self, setup: dict, folder: Path, seen: Counter, interrupts=None):
        self.setup, self.folder, self.seen, self.rng = setup, folder, seen, interrupts
        self.lm, self.number = model(1, setup["windows"]), 0  # of the weights
        self.countdown, self.saved = -1, {}  # sessions, and the number of their weights
        self.open()

    def open(self) -> None:
        config = dict(self.setup["config"])
        if "disk_path" in config:
            config["disk_path"] = self.folder / "disk"
        if config.get("speculative") == "clairvoyant":
            config["speculative"] = Clairvoyant()
        elif config.get("speculative") == "head":
            config["speculative"] = random_head(self.lm, self.folder)
        elif config.get("speculative") == "model":
            config["draft_model"] = self.lm  # knows what comes, until the weights change
        self.engine = Engine(
            self.lm, small(**config), prefix_cache=self.setup["cache"], listeners=[CountEvicted()]
        )
        if self.engine.tiers is not None:
            fetch_by_chance(self.engine.tiers)
        if self.setup["loop"] == "ahead":
            run_ahead(self.engine)
        elif self.setup["loop"] == "drafts":
            fearless(self.engine)
        self.engine.runner.run = self.failing(self.engine.runner.run)
        if self.number:
            self.engine.update_weights(self.state)
        self.requests, self.finished = {}, []  # id: [prompt, params, weights or None]
        self.served, self.texts = [], []  # requests; (salt, token ids) of sessions
        self.known, self.loose = (None, 0, set()), {}  # see `check_cache`

    def failing(self, run):
        def run_or_fail(plan):
            self.countdown -= 1
            if self.countdown == 0:
                raise OSError("the cable was pulled")
            self.seen["copies"] += len(plan.copies)
            return run(plan)

        return run_or_fail

    def play(self, program: list[tuple]) -> None:
        try:
            for name, *numbers in program:
                getattr(self, name)(*numbers)
                self.seen[name] += 1
            self.drain()
        finally:
            self.close()

    def close(self) -> None:
        if self.engine.tiers is not None and self.engine.tiers.disk is not None:
            self.engine.tiers.disk.close()

    def do(self, action):
        """Until it is not interrupted; afterwards, and whenever it was, the engine is sound."""
        self.seen["operations"] += 1
        done = self.try_often(action)
        self.engine.check()
        stats = self.engine.stats()
        assert stats.running <= self.engine.config.max_num_seqs
        assert stats.hit_tokens <= stats.looked_up_tokens
        if self.rng is None:
            self.check_cache()
            self.check_running()
            if self.setup["loop"] != "ahead":
                check_open(self.engine)
        return done

    def prefixes(self, salt, token_ids, end=None):
        size, tokens = self.engine.config.block_size, tuple(token_ids[:end])
        return [(salt, tokens[:border]) for border in range(size, len(tokens) + 1, size)]

    def check_cache(self) -> None:
        """Nothing is in the cache but what was served. What was there goes only if it is evicted.
        What a running sequence has computed is there."""
        engine, cache = self.engine, self.engine.cache
        if cache is None or engine.tiers is not None:
            return
        found, required = set(cached_prefixes(cache)), set()
        texts = self.texts + [
            (one.params.cache_salt, sample.token_ids)
            for one in self.served
            for sample in one.sequences
        ]
        assert found <= {prefix for text in texts for prefix in self.prefixes(*text)}
        for sequence, was_to_fork in list(self.loose.items()):
            if was_to_fork and not sequence.must_fork:  # its samples have the same beginning
                self.loose |= dict.fromkeys(sequence.request.sequences, False)
        for sequence in engine.scheduler:
            if sequence.table is None:
                self.loose.pop(sequence, None)
            elif sequence not in self.loose:  # whose beginning was cleared while it ran
                known = sequence.num_computed - self.is_under_way(sequence)
                salt = sequence.request.params.cache_salt
                required |= set(self.prefixes(salt, sequence.token_ids, known))
        assert required <= found
        if self.known[:2] == (cache, cache.evicted):
            assert self.known[2] <= found
        self.known = cache, cache.evicted, found
        self.seen["caches"] += 1

    def is_under_way(self, sequence) -> bool:
        """Whether a step that computes its newest token is not yet read: it is not yet shared."""
        return sequence.num_computed == len(sequence.token_ids)

    def try_often(self, action):
        if self.rng is None:
            return action()
        for interrupted, share in ((interrupt_by_signal, 0.6), (interrupt_inside, 0.12)):
            if self.rng.random() < share:
                try:
                    with interrupted(self.rng, self.engine):
                        return action()
                except KeyboardInterrupt as interrupt:
                    self.seen["interrupts inside" if interrupt.args[0] else "interrupts"] += 1
                    self.engine.check()
        return action()

    def one_step(self) -> None:
        found = []  # of the step: an interrupt in here has not lost it
        self.do(lambda: found.append(self.engine.step()))
        for output in found[0]:
            if output.finish_reason is not None:
                self.finish(output)

    def finish(self, output) -> None:
        prompt, params, lm = self.requests.pop(output.request_id)
        self.finished.append(output)
        self.seen["requests"] += 1
        if lm is None:  # the weights have changed under it
            return
        assert len(output.samples) == params.n
        for index, sample in enumerate(output.samples):
            self.require(prompt, params, lm, index, sample)
            self.seen["tokens"] += len(sample.token_ids)

    def require(self, prompt, params, lm, index, sample) -> None:
        """A sample is what the plain formula gives for the text before each of its tokens."""
        tokens, config = sample.token_ids, self.engine.config
        ends = [i for i, token in enumerate(tokens) if token in params.stop]
        expected = ("stop", ends[0] + 1) if ends else ("length", params.max_tokens)
        assert (sample.finish_reason, len(tokens)) == expected
        oracle, text = None, prompt + tokens
        if config.kv_dtype != "auto":
            kv_format = format_of(config.kv_dtype, config.block_size)
            oracle = QuantisedOracle(lm.config, kv_format, config.block_size)
        logits = lm.logits(text, oracle)[len(prompt) - 1 : -1]
        # A number between two codes becomes either: see `test_quant_engine.assert_greedy`.
        close = 1e-3
        if oracle is not None:
            close = max(close, (logits - lm.logits(text)[len(prompt) - 1 : -1]).abs().max().item())
        if params.temperature == 0:
            chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert (logits.max(1).values - chosen).max() <= close, (prompt, params, tokens)
            return
        p, order = probabilities(logits, [params] * len(tokens))
        for row, token in enumerate(tokens):
            draw = random.Random(f"{params.seed}/{index}/{row}").random()
            place = int((order[row] == token).nonzero())
            if oracle is None:  # equal logits may come in either order
                before, after = p[row, :place].sum(), p[row, : place + 1].sum()
                assert before - close <= draw <= after + close, (prompt, params, tokens)
            else:
                assert p[row, place] > 0

    # ── Operations ────────────────────────────────────────────────────────────

    def add(self, prompt, params, follow) -> None:
        if follow and self.finished:
            last = self.finished[-1]
            prompt = (list(last.prompt_ids) + last.samples[0].token_ids + prompt)[:40]
        params, config = SamplingParams(**params), self.engine.config
        needed = -(-(len(prompt) + params.max_tokens) // config.block_size)
        if needed > config.num_blocks or params.n > config.max_num_seqs:
            try:
                self.engine.add_request(prompt, params)
            except ValueError:
                return
            raise AssertionError("a request that can never run was taken")
        ids = []

        def action():
            """An interrupted `add_request` has added its request or has not."""
            if not ids or ids[-1] not in self.engine._requests:
                ids.append(self.engine._next_id)
                self.engine.add_request(prompt, params)

        self.do(action)
        self.requests[ids[-1]] = [prompt, params, self.now]
        self.served.append(self.engine.request(ids[-1]))

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return weights(1 + self.number, len(self.setup["windows"]))

    @property
    def now(self) -> LanguageModel:
        return model(1 + self.number, self.setup["windows"])

    def step(self, _) -> None:
        if self.engine.has_unfinished:
            self.one_step()

    def steps(self, number) -> None:
        for _ in range(number % 8):
            self.step(0)

    def drain(self) -> None:
        rng = self.rng
        for step in range(MOST_STEPS):
            if not self.engine.has_unfinished:
                break
            if step == MOST_STEPS // 2:  # every interrupt begins all prompts again
                self.rng = None
            self.one_step()
        self.rng = rng
        engine = self.engine
        assert not self.requests and not engine.has_unfinished, "a request is lost"
        stats = engine.stats()
        has_groups = isinstance(engine.pool, GroupPool)
        self.seen["engines with groups"] += has_groups
        assert has_groups or stats.blocks_used == stats.blocks_cached
        for name in ("preemptions", "swaps_in", "hit_tokens", "steps"):
            self.seen[name] += getattr(stats, name)
        if stats.speculation is not None:
            self.seen["drafts"] += stats.speculation.drafts
            self.seen["accepted drafts"] += stats.speculation.accepted
        for name, tier in stats.tiers.items():
            self.seen[f"hits of {name}"] += tier.hits
        if engine.cache is not None:
            self.check_contents()
            with engine.changing_state():
                engine.cache.evict(engine.cache.num_cached_blocks)
            assert engine.pool.num_free == engine.config.num_blocks

    def check_running(self) -> None:
        """With groups, a running sequence has K and V of all that its next query sees, and what it
        still has of the rest is right, too. A third layer of these large weights may be off by more
        than 1e-4 of a row where a sum was rounded; what is wrong, by more than a tenth."""
        if not isinstance(self.engine.pool, GroupPool):
            return
        store = self.engine.store
        for sequence in self.engine.scheduler.running:
            known = sequence.num_computed - self.is_under_way(sequence)
            if known == 0:
                continue
            expected = naive_kv(self.now, sequence.token_ids[:known])
            assert_kv(store, sequence.table.block_ids, expected, known, tolerance=1e-3)
            self.seen["sequences with groups"] += 1

    def check_contents(self) -> None:
        """K and V of every cached text are those that it has under these weights."""
        if self.engine.config.kv_dtype != "auto":
            return  # tokens are looked at, which read them
        cached, size = cached_prefixes(self.engine.cache), self.engine.config.block_size
        inner = {(salt, tokens[:-size]) for salt, tokens in cached}
        for salt, tokens in cached.keys() - inner:
            blocks = [cached[one][0] for one in self.prefixes(salt, tokens)]
            tolerance = 1e-3 if isinstance(self.engine.pool, GroupPool) else 1e-4
            assert_kv(self.engine.store, blocks, naive_kv(self.now, tokens), tolerance=tolerance)

    def abort(self, which) -> None:
        if self.requests:
            request_id = list(self.requests)[which % len(self.requests)]
            del self.requests[request_id]

            def action():
                if request_id in self.engine._requests:
                    self.engine.abort(request_id)
                self.engine._moved.pop(request_id, None)

            self.do(action)

    def fail(self, number) -> None:
        """A step that fails in the middle."""
        if self.engine.has_unfinished:
            self.countdown = 1
            try:
                for output in self.engine.step():
                    if output.finish_reason is not None:
                        self.finish(output)
            except OSError:
                self.seen["failures"] += 1
            self.countdown = -1

    def change_cache(self, action) -> None:
        def change():
            with self.engine.changing_state():
                if self.engine.cache is not None:
                    action(self.engine.cache)

        self.do(change)

    def evict(self, number) -> None:
        self.change_cache(lambda cache: cache.evict(number % 7))

    def clear(self, _) -> None:
        self.change_cache(self.clear_cache)

    def clear_cache(self, cache) -> None:
        cache.clear()
        self.known = None, 0, set()
        running = [one for one in self.engine.scheduler if one.table is not None]
        self.loose = {one: one.must_fork for one in running}

    def save(self, which) -> None:
        """A running request, or a finished one, in one of three files."""
        what = [*self.requests, *self.finished]
        if what:
            path, one = self.folder / f"session {which % 3}", what[which % len(what)]
            if not isinstance(one, int):
                self.texts.append((None, [*one.prompt_ids, *one.token_ids]))
            try:
                self.do(lambda: save_session(self.engine, one, path))
                self.saved[path] = self.number
            except (OutOfBlocks, ValueError):
                self.seen["not saved"] += 1

    def load(self, which) -> None:
        path = self.folder / f"session {which % 3}"
        if path in self.saved and self.engine.cache is not None:
            salt = [None, "salt"][which % 2]

            def load():
                self.texts.append((salt, load_session(self.engine, path, salt)))

            try:
                self.do(load)
            except SessionError:
                # Inside torch's reader an interrupt may come out as an error of the file.
                is_other = self.saved[path] != self.number
                assert is_other or self.rng is not None, "only one of other weights is refused"
            except OutOfBlocks:
                self.seen["not loaded"] += 1

    def beams(self, prompt, width, max_tokens) -> None:
        needed = -(-(len(prompt) + max_tokens) // self.engine.config.block_size)
        if needed > self.engine.config.num_blocks or width > self.engine.config.max_num_seqs:
            return
        try:
            found = self.do(lambda: self.engine.beam_search(prompt, width, max_tokens))
        except OutOfBlocks:
            return
        if self.engine.config.kv_dtype == "auto":
            alone = Engine(self.now, small(attention="torch"))
            expected = alone.beam_search(prompt, width, max_tokens)
            for one, other in zip(found, expected, strict=True):
                assert abs(one.score - other.score) < 1e-3

    def weights(self, _) -> None:
        number, changed = 1 - self.number, []
        for request_id, request in self.requests.items():
            with suppress(ValueError):  # it has ended, and the next step tells its last tokens
                sequences = self.engine.request(request_id).sequences
                request[2] = None if any(one.num_output for one in sequences) else request[2]
                changed.append(request)
        self.number = number
        self.do(lambda: self.engine.update_weights(self.state))
        for request in changed:
            request[2] = request[2] and self.now

    def flush(self, _) -> None:
        if self.engine.tiers is not None:
            self.do(self.engine.tiers.flush)

    def restart(self, _) -> None:
        """Another process finds what is on the disk, and nothing else."""
        self.drain()
        self.close()
        self.open()


# ── Interrupts ────────────────────────────────────────────────────────────────


def is_ours(frame) -> bool:
    """Whether it is called from within minikv, where Python would not drop it."""
    ours = False
    while frame is not None:
        if frame.f_code.co_filename.endswith(("weakref.py", "_weakrefset.py")):
            return False
        ours = ours or frame.f_code.co_filename.startswith(PACKAGE)
        frame = frame.f_back
    return ours


def is_inside(frame, engine) -> bool:
    """Whether a lock would be held: in a call of a tier's thread, or while an engine changes."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("tiers/store.py"):
            return True
        frame = frame.f_back
    return not engine._is_sound


@contextmanager
def interrupt_by_signal(rng, engine):
    """By a real signal, after a random time."""
    is_due = True

    def stop(_, frame):
        nonlocal is_due
        if not is_due:
            return
        if is_ours(frame):
            is_due = False
            raise KeyboardInterrupt(is_inside(frame, engine))
        signal.setitimer(signal.ITIMER_REAL, 1e-5)

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 10 ** rng.uniform(-5, -2.3))
    try:
        yield
    finally:
        is_due = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def interrupt_inside(rng, engine):
    """Before an instruction where a lock would be held."""
    left = int(10 ** rng.uniform(0, 3.3))
    only_tiers = rng.random() < 0.5 and engine.tiers is not None

    def trace(frame, event, _):
        nonlocal left
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) and "threading" not in file:
            return None
        if only_tiers and "/tiers/" not in file:
            return trace
        frame.f_trace_opcodes = True
        if event == "opcode" and is_inside(frame, engine):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt(True)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


# ── Many ──────────────────────────────────────────────────────────────────────


@contextmanager
def no_hanging():
    """A program that never ends fails."""

    def say(*_):
        raise AssertionError(f"it has not ended within {PATIENCE} seconds")

    before = signal.signal(signal.SIGUSR1, say)
    timer = threading.Timer(PATIENCE, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def play(
    seed: int, length: int, seen: Counter, interrupted: bool, setup_of: Callable, program=None
) -> None:  # fmt: skip
    rng = random.Random(seed)
    setup, whole = setup_of(rng), program_of(rng, length)
    folder = Path(tempfile.mkdtemp())
    try:
        with no_hanging():
            player = Player(setup, folder, seen, random.Random(-seed) if interrupted else None)
            player.play(whole if program is None else program)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shortened(
    seed: int, length: int, interrupted: bool, setup_of: Callable, attempts: int = 150
) -> list[tuple]:
    """A program that fails as well, with operations left out as long as it does."""
    rng = random.Random(seed)
    setup_of(rng)
    program = program_of(rng, length)
    size = len(program) // 2
    while size and attempts > 0:
        for start in range(0, len(program), size):
            shorter = program[:start] + program[start + size :]
            attempts -= 1
            try:
                play(seed, length, Counter(), interrupted, setup_of, shorter)
            except Exception:
                program = shorter
                break
        else:
            size //= 2
    return program


def play_many(
    seeds: range, length: int, interrupted: bool = False, setup_of: Callable = any_setup
) -> Counter:
    """What happened how often; an error names seed, engine and a shorter program that fails."""
    seen = Counter()
    for seed in seeds:
        try:
            play(seed, length, seen, interrupted, setup_of)
        except Exception as error:
            setup = setup_of(random.Random(seed))
            program = shortened(seed, length, interrupted, setup_of)
            lines = "\n".join(map(repr, program))
            raise AssertionError(f"seed {seed}, {length} operations: {setup}\n{lines}") from error
        seen["programs"] += 1
    return seen
