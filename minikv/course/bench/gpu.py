"""The engine on a CUDA GPU: decode steps against the roofline, whole calls against transformers.

A model of the shape of Llama-3.2-1B with random weights in bfloat16, both sides the same ones.
Decode steps: tokens per second while a batch decodes at contexts around 1,024, from one return
of `step` to a later one, so all that a user waits for is in it. The roofline reads the weights
and all K and V once per step, as fast as a copy measured in the same run. Whole calls: 64
prompts of 1,024 tokens and 128 new ones each, prefill included, new prompts in every turn.
The figures are kept in `results/` beside this file as well.
"""

import argparse
import gc
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import minikv
from minikv.checkpoint import read_config
from minikv.course.bench import gpu_goals, peers
from minikv.course.bench.gpu_clock import COPIED, Copy, CudaClock, random_values, where
from minikv.course.bench.harness import Aim, BenchTable, Spread, bar, race
from minikv.course.chapters.ch03_kv_memory.published import CONFIGS
from minikv.course.measure.timing import no_gc, timed
from minikv.model import Transformer

COMMAND = gpu_goals.COMMANDS["gpu"]
ROPE = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
SHAPE = CONFIGS["meta-llama/Llama-3.2-1B"] | {
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_parameters": ROPE,
}  # fmt: skip
CONDITIONS = "the model's shape is Llama-3.2-1B's, its weights random, bfloat16"


@dataclass(frozen=True)
class Sizes:
    """What is measured; the tests take smaller ones."""

    batches: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 1024
    steps: int = 32  # of a round
    warm_up: int = 16  # steps
    batch_tokens: int = 8192
    requests: int = 64  # of a whole call
    new_tokens: int = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(args: argparse.Namespace) -> BenchTable:
    """Raises ValueError where there is no CUDA GPU."""
    gpu_goals.require_rounds(args.repeats)
    clock, here, sizes = CudaClock(COMMAND), where(), Sizes()
    clock.require_memory(32 * COPIED)
    lm, peer = make_pair(SHAPE, clock.device, torch.bfloat16)
    table = BenchTable("gpu: the engine", args.repeats, [f"{here['machine']['gpu']}; {CONDITIONS}"])
    figures = decode_steps(lm, peer, clock, sizes, args.repeats, table)
    figures |= whole_calls(lm, peer, sizes, args.repeats, table)
    content = {
        "repeats": args.repeats,
        "goals": gpu_goals.judge(figures),
        "sizes": asdict(sizes),
        "measured": table.as_json()["rows"],
    }
    path = gpu_goals.save("gpu", here, content, gpu_goals.RESULTS)
    table.notes.append(f"kept in {path}")
    return table


def make_pair(shape: dict[str, Any], device: torch.device, dtype: torch.dtype):
    """One set of random weights, made on the device: (LanguageModel, transformers model)."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # imported here: it takes seconds
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # failures are rows
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config.architectures = ["LlamaForCausalLM"]
    torch.manual_seed(0)
    with torch.device(device):
        peer = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    peer.generation_config.pad_token_id = 0
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model_config = read_config(Path(folder))
    transformer = Transformer(model_config, peer.state_dict(), device, dtype)
    return minikv.LanguageModel("random", transformer, None), peer


# ── Decode steps ──────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Window:
    """A round of decode steps."""

    seconds: float
    tokens: int
    steps: int
    kv_tokens: int  # whose K and V the steps had to read, all together


def decode_steps(
    lm: minikv.LanguageModel, peer, clock: CudaClock, sizes: Sizes, repeats: int, table: BenchTable
) -> dict[str, list[float]]:
    """By goal, the share of the roofline's tokens per second, one per round."""
    weight_bytes = sum(parameter.nbytes for parameter in peer.parameters())  # tied ones once
    token_bytes = lm.config.kv_bytes_per_token(lm.dtype)
    copy = Copy(random_values(2 * COPIED // lm.dtype.itemsize, lm.dtype, lm.device))
    figures: dict[str, list[float]] = {}
    with bar(len(sizes.batches), "decode steps") as progress:
        for batch in sizes.batches:
            rates = [copy.rate(clock) for _ in range(repeats)]
            windows = decode_windows(lm, batch, sizes, repeats)
            _free_memory()  # of that engine
            shares = [
                (w.steps * weight_bytes + w.kv_tokens * token_bytes) / rate / w.seconds
                for w, rate in zip(windows, rates, strict=True)
            ]
            row = {
                "what": f"decode steps, batch {batch}",
                "tokens/s": Spread([w.tokens / w.seconds for w in windows]),
                "figure": Spread(shares),
                "is": "of the roofline",
                "copy GB/s": Spread([rate / 1e9 for rate in rates]),
            }
            table.add(row, _goal(f"engine-{batch}", figures, shares))
            progress.update()
    return figures


def decode_windows(
    lm: minikv.LanguageModel, batch: int, sizes: Sizes, repeats: int
) -> list[Window]:
    """Consecutive rounds of steps in which `batch` requests decode, none joins or leaves."""
    measured = repeats * sizes.steps
    length = sizes.context - sizes.warm_up - measured // 2  # so that contexts are around 1k
    if length < 1:
        raise ValueError(f"--repeats: {repeats} rounds of {sizes.steps} steps are longer than 1k")
    prefills = 2 + batch * length // (sizes.batch_tokens - batch)  # steps with a prefill, at most
    most = prefills + sizes.warm_up + measured + 2
    engine = _engine(lm, batch, length + most, sizes)
    params = minikv.SamplingParams(max_tokens=most, ignore_eos=True)
    for prompt in peers.random_prompts(lm, [length] * batch, seed=batch):
        engine.add_request(prompt, params)

    seen: set[int] = set()
    while len(seen) < batch:
        seen |= {output.request_id for output in engine.step()}
    borders = []
    with no_gc():
        outputs = _take(engine, sizes.warm_up)
        for _ in range(repeats):
            borders.append((perf_counter(), _counts(outputs)))
            outputs = _take(engine, sizes.steps)
        borders.append((perf_counter(), _counts(outputs)))

    windows = []
    for (start, before), (end, after) in pairwise(borders):
        tokens = sum(after.values()) - sum(before.values())
        if not len(before) == len(after) == batch or tokens != batch * sizes.steps:
            raise RuntimeError(f"{sizes.steps} steps of {batch} requests gave {tokens} tokens")
        # The t-th new token comes from a step that reads the prompt and the t - 1 before it.
        read = sum(
            (length - 1) * (after[i] - before[i]) + sum(range(before[i] + 1, after[i] + 1))
            for i in after
        )
        windows.append(Window(end - start, tokens, sizes.steps, read))
    for request_id in seen:
        engine.abort(request_id)
    return windows


def _take(engine: minikv.Engine, steps: int) -> list[minikv.RequestOutput]:
    for _ in range(steps):
        outputs = engine.step()
    return outputs


def _counts(outputs: list[minikv.RequestOutput]) -> dict[int, int]:
    """New tokens so far, by request."""
    return {output.request_id: len(output.token_ids) for output in outputs}


def _engine(lm: minikv.LanguageModel, requests: int, length: int, sizes: Sizes) -> minikv.Engine:
    """Room for so many requests of `length` tokens, prompt and answer."""
    return minikv.Engine(
        lm,
        minikv.EngineConfig(
            num_blocks=requests * (1 + -(-length // 16)),  # 1: the scheduler keeps some free
            max_num_seqs=requests,
            max_batch_tokens=max(sizes.batch_tokens, requests),
            attention="triton",
        ),
    )


def _free_memory() -> None:
    """Give back what nothing holds any more: transformers sizes itself by what is free."""
    gc.collect()
    torch.cuda.empty_cache()


def _goal(name: str, figures: dict[str, list[float]], values: list[float]) -> Aim | None:
    """Note the values of a goal; None if there is no such goal."""
    if name not in gpu_goals.GOALS:
        return None
    figures[name] = values
    return Aim("figure", gpu_goals.GOALS[name].sign, gpu_goals.GOALS[name].bound)


# ── Whole calls ───────────────────────────────────────────────────────────────

Prompts = Sequence[Sequence[int]]
Way = Callable[[Prompts], list[list[int]]]  # prompts to new tokens

# `generate_batch` chooses most by itself. Without flash-attn it captures no CUDA graphs, since
# they pad its masks; whether that serves it here, a trial says.
BATCH_SETTINGS = {"as it comes": {}, "with CUDA graphs": {"use_cuda_graph": True}}


def whole_calls(
    lm: minikv.LanguageModel, peer, sizes: Sizes, repeats: int, table: BenchTable
) -> dict[str, list[float]]:
    """By goal, tokens per second of the engine over those of transformers, one per turn.

    Of the ways to call a peer the fastest counts. One that does not run on this machine has a
    row that says why, and no figure.
    """
    engine = _engine(lm, sizes.requests, sizes.context + sizes.new_tokens, sizes)
    params = minikv.SamplingParams(max_tokens=sizes.new_tokens, ignore_eos=True)

    def ours(prompts: Prompts) -> list[list[int]]:
        return [output.token_ids for output in engine.generate(prompts, params)]

    lengths = [sizes.context] * sizes.requests
    inputs = [peers.random_prompts(lm, lengths, seed) for seed in range(repeats + 1)]
    contenders: dict[str, Way] = {"minikv": ours}
    figures: dict[str, list[float]] = {}
    ways = _ways(peer, sizes)
    with bar(len(ways), "trials of transformers") as progress:
        for peer_name, tried in ways.items():
            # Where there is a choice, in the second call: the first one compiles and captures.
            best, failures = _fastest(peer, tried, inputs[: len(tried)], sizes)
            if best is not None:
                contenders[f"{peer_name}, {best}"] = tried[best]
            for way, error in failures.items():
                table.add({"what": f"whole calls, {peer_name}, {way}", "is": f"failed: {error}"})
            progress.update()
    with bar(len(contenders) * len(inputs), "whole calls") as progress:
        result = race(contenders, inputs, progress)
    for name, contender in contenders.items():
        row: dict[str, Any] = {
            "what": f"whole calls, {name}",
            "tokens/s": result.rate(name, sizes.requests * sizes.new_tokens),
        }
        goal = None
        if contender is not ours:
            row["figure"] = result.ratio(name, "minikv")
            row["is"] = "times as long as minikv"
            goal = _goal(name.partition(",")[0], figures, row["figure"].values)
        table.add(row, goal)
    return figures


def _ways(peer, sizes: Sizes) -> dict[str, dict[str, Way]]:
    """How transformers is called: by name, the ways of which the fastest counts."""
    new_tokens = sizes.new_tokens
    # Pages of 256 tokens, and more than needed: it holds requests back while few are free.
    blocks = sizes.requests * (2 + -(-(sizes.context + new_tokens) // 256))

    def batch_way(options: dict[str, Any]) -> Way:
        return lambda prompts: generate_batch(peer, prompts, new_tokens, blocks, **options)

    return {
        "generate": {"as it comes": lambda prompts: generate(peer, prompts, new_tokens)},
        "compiled generate": {
            "static cache": lambda prompts: generate(peer, prompts, new_tokens, "static")
        },
        "generate_batch": {name: batch_way(options) for name, options in BATCH_SETTINGS.items()},
    }


def _fastest(
    peer, ways: dict[str, Way], inputs: Sequence[Prompts], sizes: Sizes
) -> tuple[str | None, dict[str, str]]:
    """(the fastest way in its last call, or None; what was wrong with those that failed)"""
    seconds: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name, way in ways.items():
        try:
            for prompts in inputs:
                seconds[name], tokens = timed(partial(way, prompts))
                if [len(row) for row in tokens] != [sizes.new_tokens] * len(prompts):
                    raise RuntimeError("gave too few tokens")
        except Exception as error:  # whatever it is, it is theirs, and the rest can be measured
            seconds.pop(name, None)
            failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        peer.destroy_cached_continuous_batching_manager()  # or the next way would get it
        _free_memory()
    return min(seconds, key=seconds.__getitem__, default=None), failures


def generate(peer, prompts: Prompts, max_tokens: int, cache: str | None = None) -> list[list[int]]:
    """Greedy tokens from `transformers`, one batch of prompts of one length. A "static" cache
    makes it compile its decode steps."""
    ids = torch.tensor(prompts, device=peer.device)  # (S, P)
    with torch.inference_mode(cache is None):
        output = peer.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens,
            cache_implementation=cache,
        )  # fmt: skip
    return output[:, ids.shape[1] :].tolist()


def generate_batch(
    peer, prompts: Prompts, max_tokens: int, num_blocks: int, **options: Any
) -> list[list[int]]:
    """Greedy tokens from the continuous batching of `transformers`. What it sets up is kept
    for the next call."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    outputs = peer.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=num_blocks, **options),
        persistent_manager=True,
    )
    for output in outputs.values():
        if output.error is not None:
            raise RuntimeError(output.error)
    return [list(output.generated_tokens) for output in outputs.values()]
