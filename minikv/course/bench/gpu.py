"""The kernels and the engine on a CUDA GPU, beside what this GPU can reach.

Kernels: the bytes that one launch must move, by the time that it takes, as a share of a copy's rate
in the same round; of a prefill, its operations as a share of a large matrix product's. Launches are
replayed from a CUDA graph and timed by CUDA events. Outputs are poisoned before and compared
with the reference after each timing. 32 query and 8 KV heads, bfloat16, blocks of 16.

Decode steps: the roofline reads all weights and the K and V of all contexts once a step, at the
copy's rate. A step's time goes from one return of `Engine.step` to the next, so all that a user
waits for is in it. The model has the shape of Llama-3.2-1B and random weights in bfloat16.
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

from tqdm import tqdm

import minikv
from minikv.course.bench import peers
from minikv.course.bench.gpu_clock import COPIED, DTYPE, Copy, CudaClock, Product
from minikv.course.bench.harness import Aim, BenchTable, Spread, over
from minikv.course.bench.random_model import random_model
from minikv.course.workloads.timing import no_gc

COMMAND = "python -m minikv bench gpu"
SHAPE: dict[str, Any] = dict(
    vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32,
    num_kv_heads=8, max_context=4096,
)  # fmt: skip
GOALS = {1: 55, 8: 55, 64: 65, 256: 70}  # % of the roofline, by batch
BLOCK = 16  # tokens


class DecodeSteps(NamedTuple):
    """How decode steps are measured."""

    context: int = 1024  # tokens, halfway
    steps: int = 32  # in a round
    warm_up: int = 16
    batch_tokens: int = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(args: argparse.Namespace) -> BenchTable:
    """Raises ValueError where there is no CUDA GPU."""
    clock = CudaClock(COMMAND)
    table = BenchTable("gpu: kernels and decode steps, beside this GPU's rates", args.repeats)
    if clock.free_bytes() < 6 * COPIED:
        raise ValueError(f"{COMMAND}: needs {6 * COPIED / 1e9:.0f} GB of free memory on the GPU")
    copy = Copy(clock.device)
    rates = [copy.rate(clock) / 1e9 for _ in range(args.repeats)]
    table.notes.append(f"a copy within the device: {Spread(rates)} GB/s, read and written")
    add_kernels(table, clock, copy)
    lm, weight_bytes = random_model(**SHAPE, device=clock.device, dtype=DTYPE)
    add_steps(table, clock, copy, lm, weight_bytes, GOALS, DecodeSteps())
    return table


# ── Kernels ───────────────────────────────────────────────────────────────────


def add_kernels(table: BenchTable, clock: CudaClock, copy: Copy) -> None:
    """A row for each of `gpu_kernels.CASES`, then one for each pair of `gpu_kernels.OVER`."""
    from minikv.course.bench import gpu_kernels  # not before: without Triton it raises

    product, shares = Product(clock.device), {}
    for name, (case, goal) in tqdm(gpu_kernels.CASES.items(), desc="kernels", leave=False):
        if fits(table, clock, name, case.needed_bytes(clock.l2_bytes)):
            limit = product if case.num_flops else copy
            seconds, shares[name] = measured(clock, case, limit, table.repeats)
            row = {"what": name, "µs": micro(seconds), "%": Spread(shares[name])}
            row["of"] = "a matrix product's rate" if case.num_flops else "the copy's rate"
            table.add(row, Aim("%", ">=", goal) if goal else None)
    for name, (other, most) in gpu_kernels.OVER.items():
        if name in shares and other in shares:
            row = {"what": name, "times": over(shares[other], shares[name])}
            row["of"] = f"the time of: {other}"
            table.add(row, Aim("times", "<=", most))


def measured(
    clock: CudaClock, case: Any, limit: Copy | Product, repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds of a launch, and % of what `limit` reaches in the same round; one a round."""
    work = case.work(clock)
    replay, seconds, shares = clock.captured(work.run), [], []
    for _ in range(repeats):
        rate = limit.rate(clock)
        work.poison()
        seconds.append(clock.seconds(replay) / work.launches)
        work.check()
        shares.append(100 * (case.num_flops or case.num_bytes) / rate / seconds[-1])
    return seconds, shares


# ── Decode steps ──────────────────────────────────────────────────────────────


def add_steps(
    table: BenchTable, clock: CudaClock, copy: Copy, lm: minikv.LanguageModel, weight_bytes: int,
    goals: Mapping[int, float], sizes: DecodeSteps,
) -> None:  # fmt: skip
    """A row for each batch of `goals`."""
    token_bytes = lm.config.kv_bytes_per_token(lm.dtype)
    for batch, goal in tqdm(goals.items(), desc="decode steps", leave=False):
        name = f"engine, batch {batch}, context {sizes.context:,}"
        if not fits(table, clock, name, 2 * (batch * sizes.context * token_bytes + COPIED)):
            continue
        rates = [copy.rate(clock) for _ in range(table.repeats)]
        shares, seconds = [], []
        rounds = decode_rounds(lm, batch, sizes, table.repeats)
        for rate, (taken, contexts) in zip(rates, rounds, strict=True):
            moved = sizes.steps * weight_bytes + tokens_read(contexts, sizes.steps) * token_bytes
            shares.append(100 * moved / rate / taken)
            seconds.append(taken / sizes.steps)
        row = {"what": name, "µs": micro(seconds), "%": Spread(shares)}
        row |= {"of": "the roofline", "tokens/s": Spread([batch / one for one in seconds])}
        table.add(row, Aim("%", ">=", goal))


def tokens_read(contexts: Sequence[int], steps: int) -> int:
    """Tokens whose K and V so many decode steps read. contexts: those of the first one's queries,
    their own tokens included; each grows by one a step."""
    return steps * sum(contexts) + len(contexts) * (steps * (steps - 1) // 2)


def decode_rounds(
    lm: minikv.LanguageModel, batch: int, sizes: DecodeSteps, repeats: int
) -> list[tuple[float, list[int]]]:
    """(seconds, contexts of the first step) of consecutive rounds, in which `batch` requests decode
    and none joins or leaves."""
    measured = repeats * sizes.steps
    length = sizes.context - sizes.warm_up - measured // 2
    if length < 1:
        raise ValueError(f"--repeats: {repeats} rounds of {sizes.steps} steps are too many")
    prefills = 2 + batch * length // (sizes.batch_tokens - batch)  # steps with a prefill, at most
    most = prefills + sizes.warm_up + measured + 2
    config = minikv.EngineConfig(
        num_blocks=batch * (1 + -(-(length + most) // BLOCK)),  # 1: the scheduler keeps some free
        block_size=BLOCK,
        max_num_seqs=batch,
        max_batch_tokens=max(sizes.batch_tokens, batch),
        attention="triton",
    )
    engine = minikv.Engine(lm, config)
    params = minikv.SamplingParams(max_tokens=most, ignore_eos=True)
    for prompt in peers.random_prompts(lm, [length] * batch, seed=batch):
        engine.add_request(prompt, params)
    while len(outputs := engine.step()) < batch:
        if not engine.has_unfinished:
            raise RuntimeError(f"{batch} requests were never in one step")
    taken = [outputs, *(engine.step() for _ in range(sizes.warm_up))]
    borders = []
    with no_gc():
        for _ in range(repeats):
            borders.append((perf_counter(), len(taken) - 1))
            taken += [engine.step() for _ in range(sizes.steps)]
        borders.append((perf_counter(), len(taken) - 1))
    if {len(outputs) for outputs in taken} != {batch}:
        raise RuntimeError(f"a step did not return all {batch} requests")
    # The query of a step is the token that the step before it returned.
    return [
        (end - start, [length + len(output.token_ids) for output in taken[at]])
        for (start, at), (end, _) in pairwise(borders)
    ]


# ── Both ──────────────────────────────────────────────────────────────────────


def fits(table: BenchTable, clock: CudaClock, name: str, needed: int) -> bool:
    """Whether so many bytes are free; if not, a row says so."""
    free = clock.free_bytes()
    if free < needed:
        text = f"left out: needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free"
        table.add({"what": name, "of": text})
    return free >= needed


def micro(seconds: list[float]) -> Spread:
    return Spread([1e6 * one for one in seconds])
