"""Rung 15 of the ladder and of the running table."""

import json
from time import perf_counter
from urllib.request import Request, urlopen

from minikv.course.workloads.running_table import Run
from minikv.language_model import LanguageModel

IDEA = "an engine behind an address, for clients that are slow, leave, or come all at once"


def run_served(lm: LanguageModel, prompt_ids: list[int], max_tokens: int) -> Run:
    """One request, as on rung 04, asked for by a client over HTTP."""
    from minikv.course.chapters.ch15_serving.given import server

    body = {"prompt": prompt_ids, "max_tokens": max_tokens, "ignore_eos": True}
    with server(lm, prefix_cache=False, attention="torch") as (url, loop):
        started = perf_counter()
        request = Request(f"{url}/completions", json.dumps(body).encode(), method="POST")
        with urlopen(request, timeout=60) as answer:
            [choice] = json.load(answer)["choices"]
        seconds = perf_counter() - started
        size = loop.engine.config.block_size
        kept = round(loop.engine.store.bytes_per_token)
    stored = range(len(prompt_ids), len(prompt_ids) + max_tokens - 1)  # tokens, step by step
    reserved = sum(-(-tokens // size) * size for tokens in stored)
    wasted = 1 - sum(stored) / reserved if reserved else None
    return Run(choice["token_ids"], seconds, kept, wasted)


RUNS = {"one request, over HTTP": run_served}
