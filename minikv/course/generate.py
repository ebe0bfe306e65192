"""`python -m minikv generate "def fib("`: text as the engine makes it.

With --chat and an instruct model, a conversation in the model's own template,
line by line. Control-C ends an answer, at the prompt it ends the conversation,
and so does Control-D.
"""

import argparse
import io
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from threading import Event
from time import perf_counter
from typing import Any

import torch

import minikv
from minikv.course.arguments import dtype
from minikv.course.reports import markup
from minikv.validation import Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    defaults = minikv.SamplingParams()
    parser.add_argument("prompt", nargs="?", help="with --chat, what you say first")
    parser.add_argument("--chat", action="store_true", help="talk with the model, turn after turn")
    parser.add_argument("--model", default="tinypy", help="bundled name, folder or hub id")
    parser.add_argument(
        "--dtype", type=dtype, default=torch.float32,
        help="of the weights: float32 (default), float16 or bfloat16",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=int, help="default: 128; with --chat, as many as there is room for"
    )
    parser.add_argument("--temperature", type=float, default=defaults.temperature)
    parser.add_argument("--top-k", type=int, default=defaults.top_k)
    parser.add_argument("--top-p", type=float, default=defaults.top_p)
    parser.add_argument("--seed", type=int, default=None)


def run(args: argparse.Namespace) -> int:
    try:
        params = minikv.SamplingParams(
            max_tokens=128 if args.max_tokens is None else args.max_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
        )
        if args.chat:
            return chat(args, params)
        if args.prompt is None:
            raise ValueError("prompt: give a text to continue, or --chat")
        engine = minikv.Engine(minikv.load(args.model, dtype=args.dtype))
        answer(engine, args.prompt, params, args.prompt)
    except ValueError as error:
        complain(error)
        return 2
    return 0


def complain(error: ValueError) -> None:
    print(markup.wrapped(str(error), width=markup.terminal_width()), file=sys.stderr)


def answer(
    engine: minikv.Engine, prompt: Prompt, params: minikv.SamplingParams, before: str = ""
) -> str:
    """Print the text that continues a prompt, behind the one `before`, as it comes; return it."""
    text, tokens, started, stats = "", 0, perf_counter(), engine.stats()
    with on_control_c() as asked, suppress(KeyboardInterrupt):
        deltas = engine.stream(prompt, params)  # raises here what cannot run
        print(before, end="", flush=True)
        for delta in deltas:
            tokens += len(delta.token_ids)
            text += delta.text
            print(delta.text, end="", flush=True)
            if asked.is_set():
                break
        del deltas  # which aborts the request
    print()
    if sys.stdout.isatty():
        rate, now = tokens / (perf_counter() - started), engine.stats()
        more = "" if params.temperature else "; another text: --temperature 0.8"
        if found := now.hit_tokens - stats.hit_tokens:
            asked_for = now.looked_up_tokens - stats.looked_up_tokens
            more = f"; {found} of {asked_for} prompt tokens were cached"
        print(f"\n{tokens} tokens, {rate:,.0f} per second{more}", file=sys.stderr)
    return text


@contextmanager
def on_control_c() -> Iterator[Event]:
    """Set by Control-C, so that the step under way may end: an interrupted one costs the engine
    all K and V that it has cached. A second Control-C interrupts."""
    asked = Event()

    def ask(*_: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


# ── A conversation ────────────────────────────────────────────────────────────


def chat(args: argparse.Namespace, params: minikv.SamplingParams) -> int:
    """Each turn sends all that was said. The K and V of what an earlier turn has computed are found
    in the prefix cache. Raises ValueError for a model that is not for chats."""
    import jinja2  # noqa: F401  for the template's process, which could not say that it is missing

    from minikv.serving.chat import ChatTemplate

    instead = "take an instruct model, or leave out --chat"
    with closing(ChatTemplate(args.model, instead)) as template:
        template.render([{"role": "user", "content": "x"}])  # raises if there is none
        lm = minikv.load(args.model, dtype=args.dtype)
        if lm.tokenizer is None:
            raise ValueError(f"--chat: {args.model} has no tokenizer.json; {instead}")
        engine = minikv.Engine(lm)
        most = min(lm.config.max_context, engine.config.num_blocks * engine.config.block_size)
        params = replace(params, stop=template.find_ends(lm.tokenizer))
        messages: list[dict[str, str]] = []
        for line in lines(args.prompt):
            messages.append({"role": "user", "content": line})
            try:
                said = template.render(messages)
                prompt = lm.tokenizer.encode(said, add_special_tokens=False).ids
                room = max(1, most - len(prompt)) if args.max_tokens is None else args.max_tokens
                text = answer(engine, prompt, replace(params, max_tokens=room))
                messages.append({"role": "assistant", "content": text})
            except ValueError as error:  # mostly: too long
                complain(error)
                print("What was said is forgotten; the next line begins anew.", file=sys.stderr)
                messages.clear()
    return 0


def lines(first: str | None) -> Iterator[str]:
    """What the user says, until the end of the input or Control-C."""
    if first is not None:
        yield first
    with suppress(ImportError):  # there is none on Windows
        import readline  # noqa: F401  which gives `input` its keys
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    asks = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            if line := input(asks).strip():
                yield line
    print()
