"""One engine run on whatever stands in the reference's places: the reader's parts, all at once.

Short of blocks on purpose, so that every part is needed: requests wait, are preempted and come
back; samples share blocks and copy on their first write; prefixes are found, split and evicted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import minikv
from minikv.course.chapters.ch04_paged_blocks import answers as ch04
from minikv.course.chapters.ch04_paged_blocks.block_by_block import DecodesTogether

SYSTEM = 'class Stack:\n    """Last in, first out."""\n\n    def __init__(self):\n'
QUESTIONS = ("        self.items = []\n", "        self.size = 0\n", "        super().__init__()\n")
TEXT, TEXT_TOKENS = "import os\n\ndef list_files(path):\n    for name in", 40
BEAM_PROMPT, BEAM_WIDTH, BEAM_TOKENS = "for i in range(", 3, 8

# What of the reader's an engine runs on.
PARTS = {
    "BlockPool": "minikv.blocks:BlockPool",
    "BlockTable": "minikv.blocks:BlockTable",
    "slot_mapping": f"{ch04.__name__}:slot_mapping",
    "blockwise_attention": "minikv.paged:blockwise_attention",
    "batched_attention": f"{ch04.__name__}:batched_attention",
    "next_beams": "minikv.beam:next_beams",
    "Scheduler": "minikv.scheduler:Scheduler",
    "RadixCache": "minikv.radix:RadixCache",
    "Loop": "minikv.engine:Loop",
    "Engine": "minikv.engine:Engine",
}
ATTENTION = ("slot_mapping", "blockwise_attention", "batched_attention")


@dataclass(frozen=True)
class Job:
    prompt_ids: list[int]
    params: minikv.SamplingParams


@dataclass(frozen=True)
class Expected:
    """What must come out: computed before any part is exchanged."""

    jobs: list[Job]
    token_ids: list[list[int]]  # the oracle's, one list a job
    beams: list[list[int]]  # the reference's, best first


def expect(lm: minikv.LanguageModel) -> Expected:
    """The workload, and the answers of naive attention and of the reference's beam search."""

    def job(text: str, max_tokens: int, **more) -> Job:
        params = minikv.SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)
        return Job(lm.encode(text), params)

    jobs = [job("import os\n", 24), job("def fib(n):", 24), job("while True:\n", 24)]
    jobs += [job(SYSTEM + question, 16) for question in QUESTIONS]
    jobs += [jobs[-1], job(SYSTEM + QUESTIONS[1], 20, n=3)]
    jobs += [job(SYSTEM + QUESTIONS[2], 12, cache_salt="tenant"), job("class Queue:", 30)]
    written: dict[tuple[int, ...], list[int]] = {}  # each prompt once, and its longest answer
    for one in sorted(jobs, key=lambda one: -one.params.max_tokens):
        if tuple(one.prompt_ids) not in written:
            answer = lm.generate_naively(one.prompt_ids, one.params.max_tokens)
            written[tuple(one.prompt_ids)] = answer
    oracle = [written[tuple(one.prompt_ids)][: one.params.max_tokens] for one in jobs]
    beams = minikv.Engine(lm).beam_search(BEAM_PROMPT, BEAM_WIDTH, BEAM_TOKENS)
    return Expected(jobs, oracle, [list(beam.token_ids) for beam in beams])


def expect_text(lm: minikv.LanguageModel) -> list[int]:
    """The oracle's tokens after TEXT. Call it before any part is swapped."""
    return lm.generate_naively(lm.encode(TEXT), TEXT_TOKENS)


def write(lm: minikv.LanguageModel, expected: list[int]) -> dict[str, Any]:
    """A text by an engine on whatever stands in the reference's places, and how long it took."""

    def generate() -> list[int]:
        params = minikv.SamplingParams(max_tokens=TEXT_TOKENS, ignore_eos=True)
        return list(engine.generate(TEXT, params)[0].token_ids)

    engine = engine_of_parts(lm, ch04.batched_attention, num_blocks=32, block_size=4)
    return _written(lm, expected, generate)


def write_naively(lm: minikv.LanguageModel, expected: list[int]) -> dict[str, Any]:
    """The same text by naive attention, for a reader whose parts do not make an engine yet."""
    prompt_ids = lm.encode(TEXT)
    return _written(lm, expected, lambda: lm.generate_naively(prompt_ids, TEXT_TOKENS))


def _written(lm, expected: list[int], generate: Callable[[], list[int]]) -> dict[str, Any]:
    started = perf_counter()
    token_ids = generate()
    return {
        "text": TEXT + lm.decode(token_ids),
        "tokens": len(token_ids),
        "seconds": perf_counter() - started,
        "same": token_ids == expected,
    }


def run(lm: minikv.LanguageModel, expected: Expected, decode: Callable | None = None) -> str:
    """Serve the workload twice, by recompute and by swap; returns what was done, with figures.

    `decode`: a function of a later chapter that attends for all decodes of a step. Two requests
    are served once more by it, a few tokens each: an interpreted kernel is slow.

    Raises AssertionError for other tokens than expected, a broken invariant, or a lost block.
    """
    done = []
    for preemption in ("recompute", "swap"):
        engine = engine_of_parts(
            lm, ch04.batched_attention, num_blocks=24, block_size=4, preemption=preemption,
            host_blocks=24 if preemption == "swap" else 0,
        )  # fmt: skip
        ids = [engine.add_request(job.prompt_ids, job.params) for job in expected.jobs]
        outputs: dict[int, minikv.RequestOutput] = {}
        while engine.has_unfinished:
            outputs |= {output.request_id: output for output in engine.step()}
            engine.check()
        for request_id, token_ids in zip(ids, expected.token_ids, strict=True):
            for sample in outputs[request_id].samples:
                if list(sample.token_ids) != token_ids:
                    raise AssertionError(
                        f"{preemption}, request {request_id}: {list(sample.token_ids)}, "
                        f"the oracle: {token_ids}"
                    )
        stats = engine.stats()
        if preemption == "swap":
            beams = engine.beam_search(BEAM_PROMPT, BEAM_WIDTH, BEAM_TOKENS)
            if [list(beam.token_ids) for beam in beams] != expected.beams:
                raise AssertionError("beam search gives other tokens than the reference")
        if engine.cache is not None:
            engine.cache.clear()
        if engine.pool.num_free != engine.pool.num_blocks:
            lost = engine.pool.num_blocks - engine.pool.num_free
            raise AssertionError(f"{lost} blocks are still held when everybody is gone")
        how = f"{stats.preemptions} preemptions by {preemption}"
        if preemption == "swap":
            how = f"{stats.preemptions} preemptions, {stats.swaps_out} by {preemption}"
        done.append(f"{how} and {stats.hit_rate:.0%} of the prompt tokens found in the cache")
    if decode is not None:
        decode_by(decode, lm, expected)
        done[-1] += f"; then decodes by your `{decode.__name__}`"
    return (
        f"{len(expected.jobs)} requests in a pool of {engine.config.num_blocks} blocks of "
        f"{engine.config.block_size}, twice, and a beam search: the oracle's tokens; "
        f"{done[0]}, then {done[1]}."
    )


def engine_of_parts(lm: minikv.LanguageModel, attend_all: Callable, **config) -> minikv.Engine:
    """An engine on whatever stands in the reference's places, its decodes by `attend_all`."""
    small = minikv.EngineConfig(max_num_seqs=8, max_batch_tokens=64, min_prefix_tokens=4, **config)
    return minikv.Engine(lm, small, **parts_in_place(attend_all))


def parts_in_place(attend_all: Callable | None = None) -> dict[str, Any]:
    """What an engine takes, of what stands in the reference's places now."""
    return {
        "block_pool": minikv.BlockPool,
        "block_table": minikv.BlockTable,
        "prefix_cache": minikv.RadixCache,
        "scheduler": minikv.Scheduler,
        "attention": partial(
            DecodesTogether,
            attend_all=attend_all or ch04.batched_attention,
            attend_one=minikv.paged.blockwise_attention,
            slot_mapping=ch04.slot_mapping,
        ),
    }


def decode_by(decode: Callable, lm: minikv.LanguageModel, expected: Expected) -> None:
    """Two of the requests, a few tokens each. Raises AssertionError for other tokens."""
    engine, new = engine_of_parts(lm, decode, num_blocks=16, block_size=16), 4
    params = minikv.SamplingParams(max_tokens=new, ignore_eos=True)
    outputs = engine.generate([job.prompt_ids for job in expected.jobs[:2]], params)
    for output, token_ids in zip(outputs, expected.token_ids, strict=False):
        if list(output.token_ids) != token_ids[:new]:
            raise AssertionError(
                f"by {decode.__name__}: {list(output.token_ids)}, the oracle: {token_ids[:new]}"
            )
