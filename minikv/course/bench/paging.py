"""Slots that a request holds and never uses, by block size, with the engine's own block
pool and block table; beside it, the reservation of a model's whole context.

Waste is averaged over time: after every token of every request's life, from its whole
prompt to the last token that is stored, slots are counted as held and as used.

Lengths come from the seeded generator of chat-like requests in `minikv.course.workloads.workload`.
`--trace FILE` reads a trace itself: a csv with the columns ContextTokens and
GeneratedTokens, as AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset,
or a jsonl file as those of github.com/kvcache-ai/Mooncake.
"""

import argparse
from pathlib import Path

import minikv
from minikv.course.arguments import positive
from minikv.course.bench.harness import Aim, BenchTable, Spread, bar
from minikv.course.workloads.timing import timed
from minikv.course.workloads.workload import Length, chat_like, read_trace

CONTEXT = 2048  # tokens, a usual model's maximum when paging was invented


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="lengths from this csv or jsonl file"
    )
    parser.add_argument("--requests", type=positive, default=2000, help="how many to generate")
    parser.add_argument(
        "--block-sizes", type=positive, nargs="+", default=(1, 2, 4, 8, 16, 32, 64, 128, 256)
    )
    parser.add_argument(
        "--pools", type=positive, nargs="+", default=(1_000, 1_000_000), help="blocks of a pool"
    )


def run(args: argparse.Namespace) -> BenchTable:
    lengths = trace_lengths(args.trace) if args.trace else chat_like(args.requests)
    table = BenchTable("paging: slots held and never used, and the cost of a block", args.repeats)
    source = args.trace.name if args.trace else "generated, seed 0"
    prompts, outputs = (sum(column) / len(lengths) for column in zip(*lengths, strict=True))
    table.notes.append(
        f"{len(lengths):,} requests ({source}), on average {prompts:,.0f} + {outputs:,.0f} tokens"
    )
    with bar(len(lengths) * len(args.block_sizes), "paging") as progress:
        for block_size in args.block_sizes:
            percent = 100 * paged_waste(lengths, block_size, progress)
            row = {"what": f"waste in blocks of {block_size}", "figure": percent}
            row["unit"] = "% of slots"
            table.add(row, Aim("figure", "<", 4) if block_size == 16 else None)
    longest = max(map(sum, lengths))
    for reserved in sorted({CONTEXT, longest}):
        fitting = [length for length in lengths if sum(length) <= reserved]
        if fitting:
            percent = 100 * reserved_waste(fitting, reserved)
            unit = "% of slots"
            if len(fitting) < len(lengths):
                unit += f"; {len(lengths) - len(fitting):,} requests are longer"
            table.add({"what": f"waste, {reserved:,} reserved", "figure": percent, "unit": unit})
    for num_blocks in args.pools:
        for what, figure in block_price(num_blocks, args.repeats).items():
            row = {"what": f"{what}, pool of {num_blocks:,}", "figure": figure}
            table.add(row | {"unit": "µs per block"}, Aim("figure", "<=", 1))
    return table


def trace_lengths(path: Path) -> list[Length]:
    try:
        return [request.length for request in read_trace(path)]
    except ValueError as error:
        raise ValueError(f"--trace: {error}") from None


def paged_waste(lengths: list[Length], block_size: int, progress=None) -> float:
    """The share of slots held but not used, over all requests and all tokens of their lives."""
    pool = minikv.BlockPool(-(-max(map(sum, lengths)) // block_size))
    held = used = 0
    for prompt, output in lengths:
        table = minikv.BlockTable(pool, block_size)
        table.grow(prompt)
        for _ in range(output):  # the last token is sampled, and never stored
            held += pool.num_blocks - pool.num_free
            used += table.num_tokens
            table.grow(1)
        table.release()
        if progress is not None:
            progress.update()
    return 1 - used / (held * block_size)


def reserved_waste(lengths: list[Length], reserved: int) -> float:
    """The same for a cache that reserves room for `reserved` tokens, come what may."""
    used = sum(output * prompt + output * (output - 1) // 2 for prompt, output in lengths)
    return 1 - used / (reserved * sum(output for _, output in lengths))


def block_price(num_blocks: int, repeats: int) -> dict[str, Spread]:
    """µs to allocate and to release one of 1,000 blocks, the rest of the pool free."""
    pool = minikv.BlockPool(num_blocks)
    count = min(1_000, num_blocks)
    times: dict[str, list[float]] = {"allocate": [], "release": []}
    for _ in range(repeats + 1):
        seconds, block_ids = timed(lambda: [pool.allocate() for _ in range(count)])
        times["allocate"].append(1e6 * seconds / count)

        def release(block_ids=block_ids):
            for block_id in block_ids:
                pool.release(block_id)

        times["release"].append(1e6 * timed(release)[0] / count)
    return {what: Spread(values[1:]) for what, values in times.items()}
