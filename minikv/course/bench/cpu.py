"""The engine on a CPU: how near it comes to the memory's rate, prefill, and a busy machine.

A decode step at batch 1 reads every weight once. If the weights do not fit the processor's
caches, the memory's rate is the limit; it is measured here by a sum over as many bytes. A busy
machine is one where another process keeps each core busy.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import minikv
from minikv.course.bench import peers
from minikv.course.bench.harness import Aim, BenchTable, Spread, bar, positive, race
from minikv.course.measure.timing import timed
from minikv.model import Transformer

PLAIN: dict[str, Any] = dict(
    vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_heads=16, num_kv_heads=8,
    head_dim=64, max_context=512, rms_norm_eps=1e-6, tie_embeddings=True, attention_bias=False,
    output_bias=False, mlp_bias=False, qk_norm=False, rope_theta=10_000.0, rope_scaling=None,
    eos_ids=(),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=positive, default=10, help="of the large model")
    parser.add_argument("--prompt", type=positive, default=512, help="tokens to prefill")
    parser.add_argument("--tokens", type=positive, default=32, help="decode steps in a repeat")


def run(args: argparse.Namespace) -> BenchTable:
    table = BenchTable("cpu: memory rate, prefill, a busy machine", args.repeats)
    with bar(5 * (args.repeats + 1), "cpu") as progress:
        lm, size = large_model(args.layers)
        table.notes.append(f"the large model has {size / 1e6:.0f} MB of weights, in float32")
        rate, steps, share = [], [], []
        for _ in range(args.repeats + 1):
            rate.append(memory_rate(size))
            steps.append(decode_seconds(lm, args.tokens))
            share.append(100 * size / steps[-1] / rate[-1])
            progress.update(2)
        row = {"what": "memory read by a sum", "GB/s": Spread([one / 1e9 for one in rate[1:]])}
        table.add(row)
        reads = Spread([size / one / 1e9 for one in steps[1:]])
        row = {"what": "decode at batch 1", "GB/s": reads, "% of it": Spread(share[1:])}
        table.add(row, Aim("% of it", ">=", 75))
        del lm

        lm, peer = peers.load_pair("tinypy")
        engine = minikv.Engine(lm, minikv.EngineConfig(prefix_cache=False))
        inputs = [peers.random_prompts(lm, [args.prompt], i) for i in range(args.repeats + 1)]

        def ours(prompts):
            return engine.generate(prompts, minikv.SamplingParams(max_tokens=1))

        def theirs(prompts):
            return peers.generate(peer, prompts, 1)

        times = race({"minikv": ours, "generate": theirs}, inputs, progress)
        row = {"what": f"prefill of {args.prompt} tokens, over transformers'"}
        row["times"] = times.ratio("generate", "minikv")
        table.add(row, Aim("times", ">=", 1.2))

        ratios = []
        for _ in range(args.repeats + 1):
            alone = decode_seconds(lm, 8 * args.tokens)
            with busy_cores():
                ratios.append(decode_seconds(lm, 8 * args.tokens) / alone)
            progress.update()
        row = {"what": "decode on a busy machine, over alone", "times": Spread(ratios[1:])}
        table.add(row, Aim("times", "<=", 3))
    return table


def decode_seconds(lm: minikv.LanguageModel, num_steps: int) -> float:
    """Seconds per step of one sequence."""
    engine = minikv.Engine(lm, minikv.EngineConfig(num_blocks=64, prefix_cache=False))
    engine.add_request([1, 2, 3], minikv.SamplingParams(max_tokens=num_steps + 3, ignore_eos=True))
    for _ in range(2):
        engine.step()
    seconds, _ = timed(lambda: [engine.step() for _ in range(num_steps)])
    return seconds / num_steps


def memory_rate(num_bytes: int) -> float:
    """Bytes per second of a sum over an array of this size, on torch's threads; best of five."""
    values = torch.ones(num_bytes // 4)
    return num_bytes / min(timed(values.sum)[0] for _ in range(5))


@contextmanager
def busy_cores() -> Iterator[None]:
    """Beside a process per core that never rests."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def large_model(num_layers: int) -> tuple[minikv.LanguageModel, int]:
    """Random weights, about 47 MB per layer; and how many bytes they are."""
    config = minikv.ModelConfig(**PLAIN, num_layers=num_layers, windows=(None,) * num_layers)
    weights = _weights(config)
    transformer = Transformer(config, weights, torch.device("cpu"), torch.float32)
    size = sum(weight.nbytes for weight in weights.values())
    return minikv.LanguageModel("random", transformer, None), size


def _weights(config: minikv.ModelConfig) -> dict[str, torch.Tensor]:
    c, heads = config, config.num_heads * config.head_dim
    kv_heads, hidden, inner = c.num_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    shapes["model.embed_tokens.weight"] = c.vocab_size, hidden
    for i in range(c.num_layers):
        at = f"model.layers.{i}."
        for name, shape in {
            "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv_heads, hidden),
            "self_attn.v_proj": (kv_heads, hidden), "self_attn.o_proj": (hidden, heads),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():  # fmt: skip
            shapes[f"{at}{name}.weight"] = shape
    torch.manual_seed(0)
    return {name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}
