"""Peers of `bench decode` that run in a process of their own, because their threads would slow down
those of the other contenders, and be slowed down by them.

CTranslate2 (`pip install ctranslate2`) reads a folder in the form of `transformers` and wants a
tokenizer in it. It gets one whose words are numbers, and is given and asked for token ids alone.

OpenVINO GenAI (`pip install openvino-genai gguf`) has continuous batching over paged K and V. It
gets the weights in llama.cpp's format. That may hold them in 16 bits only, which is exact for
weights that have no more.
"""

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from timeit import timeit
from typing import Any

import torch

import minikv
from minikv.course.bench.llama_cpp import write_gguf

Prompts = Sequence[Sequence[int]]
GONE = "is not installed: pip install {}"
_loaded: list[Any] = []  # in the other process
_fastest: dict[int, Any] = {}


@contextlib.contextmanager
def ctranslate2(config: minikv.ModelConfig, peer: Any, *_: int) -> Iterator[Callable]:
    """generate(prompts, max_tokens) -> the new tokens of each, with the weights of `peer`, a model
    of `transformers`, in float32 on torch's number of threads or on one. Raises ValueError where it
    is not installed."""
    if importlib.util.find_spec("ctranslate2") is None:
        raise ValueError(GONE.format("ctranslate2"))
    from ctranslate2.converters import TransformersConverter

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "transformers"), str(Path(folder, "ctranslate2"))
        peer.save_pretrained(source)
        _tokenizer(peer.config.vocab_size).save_pretrained(source)
        TransformersConverter(str(source)).convert(target)
        with _process(_load_ctranslate2, target) as run:
            yield lambda prompts, max_tokens: run(_run_ctranslate2, prompts, max_tokens)


@contextlib.contextmanager
def openvino(
    config: minikv.ModelConfig, peer: Any, batch: int, num_tokens: int
) -> Iterator[Callable]:
    """The same, with room for K and V of so many sequences of `num_tokens`."""
    if importlib.util.find_spec("openvino_genai") is None:
        raise ValueError(GONE.format("openvino-genai gguf"))
    with tempfile.TemporaryDirectory() as folder:
        write_gguf(config, peer.state_dict(), Path(folder, "model.gguf"), f16=True)
        gigabytes = -(-batch * num_tokens * config.kv_bytes_per_token(torch.float32) // 2**30)
        with _process(_load_openvino, folder, gigabytes) as run:
            yield lambda prompts, max_tokens: run(_run_openvino, prompts, max_tokens)


@contextlib.contextmanager
def _process(load: Callable, *model: Any) -> Iterator[Callable]:
    """run(function, …) calls it in another process, which has called `load` with the model and the
    number of threads."""
    arguments = *model, torch.get_num_threads()
    with ProcessPoolExecutor(1, get_context("spawn"), load, arguments) as process:
        yield lambda *call: process.submit(*call).result()


def _load_ctranslate2(folder: str, threads: int) -> None:
    import ctranslate2

    for number in {1, threads}:
        made = ctranslate2.Generator(folder, compute_type="float32", intra_threads=number)
        _loaded.append(made)


def _run_ctranslate2(prompts: Prompts, max_tokens: int) -> list[list[int]]:
    """On the number of threads that is faster for as many prompts: in a small model its threads
    may wait for each other longer than they compute."""

    def run(generator: Any) -> list[list[int]]:
        found = generator.generate_batch(
            [[str(token) for token in prompt] for prompt in prompts],
            max_length=max_tokens, min_length=max_tokens, sampling_topk=1, end_token=[],
            include_prompt_in_result=False,
        )  # fmt: skip
        return [list(one.sequences_ids[0]) for one in found]

    if len(prompts) not in _fastest:
        seconds = [timeit(partial(run, one), number=2) for one in _loaded]
        _fastest[len(prompts)] = _loaded[seconds.index(min(seconds))]
    return run(_fastest[len(prompts)])


def _tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({str(i): i for i in range(vocab_size)}, unk_token="0")
    special: Any = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special)


def _load_openvino(folder: str, gigabytes: int, threads: int) -> None:
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


def _run_openvino(prompts: Prompts, max_tokens: int) -> list[list[int]]:
    import openvino
    import openvino_genai as genai

    config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
    config.set_eos_token_id(0)  # it wants one, and goes on past it
    ids = [openvino.Tensor(torch.tensor([prompt]).numpy()) for prompt in prompts]
    found = _loaded[0].generate(ids, [config] * len(prompts))
    return [list(one.m_generation_ids[0]) for one in found]
