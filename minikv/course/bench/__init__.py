"""What the engine costs, measured on this machine.

    python -m minikv bench decode --repeats 5 --json decode.json
    python -m minikv bench all

Each subcommand prints one table. Its last column says what was aimed at, and
whether this machine got there.
"""

import argparse
import sys
from pathlib import Path

from minikv.course.arguments import positive
from minikv.course.bench import (
    arrivals,
    cluster,
    cpu,
    decode,
    endless,
    gpu,
    hybrid,
    kv,
    kv_quality,
    ladder,
    paging,
    radix,
    ragged,
    scheduler,
    server,
    speculative,
    step,
    tiers,
)
from minikv.course.bench.harness import environment, headline, write_json
from minikv.course.reports import markup

BENCHMARKS = {
    "ladder": (ladder, "every rung of the course, on one request"),
    "decode": (decode, "tokens per second against transformers, batches of equal length"),
    "ragged": (ragged, "requests of mixed lengths against static batches in transformers"),
    "cpu": (cpu, "the engine beside the memory's rate, at prefill, and on a busy machine"),
    "step": (step, "parts of a compiled decode step, beside what the machine can do"),
    "scheduler": (scheduler, "host time of a decode step, the model left out"),
    "arrivals": (arrivals, "requests that arrive at random: static batches, continuous, cached"),
    "server": (
        server,
        "the server over HTTP: tokens per second, first tokens, llama.cpp's beside it",
    ),
    "radix": (radix, "the prefix cache: match, insert, evict, growth, and its price"),
    "cluster": (cluster, "many workers, simulated: hit rate, first token and balance, by routing"),
    "endless": (endless, "text beyond the trained length: bits per byte by position"),
    "paging": (paging, "slots that paging leaves unused, and the cost of a block"),
    "kv": (kv, "quantised K and V: bytes per token, batch in a pool, decode tokens per second"),
    "kv-quality": (kv_quality, "quantised K and V: bits per byte, KL and changed tokens"),
    "hybrid": (hybrid, "layers with a window that give back K and V: memory, sequences, hits"),
    "speculative": (speculative, "speculative decoding over the same engine without drafts"),
    "tiers": (tiers, "host and disk under the prefix cache: hits, first tokens, what they cost"),
}

ON_A_GPU = {"gpu": (gpu, "kernels and decode steps on a CUDA GPU, beside what it can reach")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="SUBCOMMAND")
    for name, (module, text) in (BENCHMARKS | ON_A_GPU).items():
        said = markup.filled(module.__doc__ or "", markup.terminal_width() - 2)
        command = commands.add_parser(name, help=text, description=said)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        _add_common(command)
        module.add_arguments(command)
    text = "every one of them that runs on a CPU, each as it is without options"
    _add_common(commands.add_parser("all", help=text, description=text))


def run(args: argparse.Namespace) -> int:
    """Print the tables; 0 even where a goal is missed, 2 for a bad argument, 130 for Control-C."""
    if args.json and not args.json.parent.is_dir():
        print(f"--json: no folder {args.json.parent}", file=sys.stderr)
        return 2
    where, tables = environment(), {}
    try:
        chosen = BENCHMARKS if args.benchmark == "all" else BENCHMARKS | ON_A_GPU
        for name, (module, _) in chosen.items():
            if args.benchmark not in (name, "all"):
                continue
            options = args
            if args.benchmark == "all":
                defaults = argparse.ArgumentParser()
                module.add_arguments(defaults)
                options = defaults.parse_args([], argparse.Namespace(repeats=args.repeats))
            tables[name] = module.run(options)
            print(f"{tables[name]}\n", flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped; nothing was written.", file=sys.stderr)
        return 130
    repeats = max(table.repeats for table in tables.values())
    how = f"{repeats} repeats: median (least..greatest)" if repeats > 1 else "Measured once"
    print(f"{how}. {headline(where)}")
    if args.json:
        content = {name: table.as_json() for name, table in tables.items()}
        write_json(args.json, {**where, "repeats": args.repeats, "tables": content})
    return 0


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=positive, default=5, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
