"""OpenVINO GenAI on the weights of a benchmark: `pip install openvino-genai gguf`. Its continuous
batching runs over paged K and V, in a process of its own, as CTranslate2 does, and for its reasons.

It gets the weights in llama.cpp's format. That may hold them in 16 bits only, which is exact for
weights that have no more.
"""

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import minikv
from minikv.course.bench.llama_cpp import write_gguf

GONE = "--peer openvino needs two packages more: pip install openvino-genai gguf"


@contextlib.contextmanager
def generator(config: minikv.ModelConfig, state: dict, num_tokens: int) -> Iterator[Any]:
    """generate(prompts, max_tokens) -> the new tokens of each, in float32 on torch's number of
    threads, with room for K and V of `num_tokens`. Raises ValueError if a package is missing."""
    if importlib.util.find_spec("openvino_genai") is None:
        raise ValueError(GONE)
    with tempfile.TemporaryDirectory() as folder:
        write_gguf(config, state, Path(folder, "model.gguf"), f16=True)
        gigabytes = -(-num_tokens * config.kv_bytes_per_token(torch.float32) // 2**30)
        model = folder, gigabytes, torch.get_num_threads()
        with ProcessPoolExecutor(1, get_context("spawn"), _load, model) as process:
            yield lambda prompts, max_tokens: process.submit(_run, prompts, max_tokens).result()


_loaded: list[Any] = []  # in the other process


def _load(folder: str, gigabytes: int, threads: int) -> None:
    import openvino_genai as genai

    # This writes the model in OpenVINO's own format, which is what is wanted of it. Version 2026.4
    # then fails to compile what it has read, and again from files if a tokenizer is among them.
    with contextlib.suppress(RuntimeError):
        genai.LLMPipeline(Path(folder, "model.gguf"), "CPU", enable_save_ov_model=True)
    for file in Path(folder).iterdir():
        if file.stem != "openvino_model":
            file.unlink()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens = gigabytes, 2048
    precise = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    properties = precise | {"INFERENCE_NUM_THREADS": threads}
    _loaded.append(genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties))


def _run(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    import openvino
    import openvino_genai as genai

    config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
    config.set_eos_token_id(0)  # it wants one, and goes on past it
    ids = [openvino.Tensor(torch.tensor([prompt]).numpy()) for prompt in prompts]
    found = _loaded[0].generate(ids, [config] * len(prompts))
    return [list(one.m_generation_ids[0]) for one in found]
