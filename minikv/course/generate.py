"""`python -m minikv generate "def fib("`: text as the engine makes it."""

import argparse
import sys
from time import perf_counter

import minikv
from minikv.course.reports import markup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = minikv.SamplingParams()
    parser.add_argument("prompt")
    parser.add_argument("--model", default="tinypy", help="bundled name, folder or hub id")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=defaults.temperature)
    parser.add_argument("--top-k", type=int, default=defaults.top_k)
    parser.add_argument("--top-p", type=float, default=defaults.top_p)
    parser.add_argument("--seed", type=int, default=None)


def run(args: argparse.Namespace) -> int:
    try:
        params = minikv.SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
        )
        engine = minikv.Engine(minikv.load(args.model))
        deltas = engine.stream(args.prompt, params)
    except ValueError as error:
        print(markup.wrapped(str(error), width=markup.terminal_width()), file=sys.stderr)
        return 2
    print(args.prompt, end="", flush=True)
    tokens, started = 0, perf_counter()
    try:
        for delta in deltas:
            tokens += len(delta.token_ids)
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print()
    if sys.stdout.isatty():
        rate = tokens / (perf_counter() - started)
        other = "" if args.temperature else "; another text: --temperature 0.8"
        print(f"\n{tokens} tokens, {rate:,.0f} per second{other}", file=sys.stderr)
    return 0
