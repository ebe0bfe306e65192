"""CTranslate2 on the weights of a benchmark: `pip install ctranslate2`. It runs in a process of its
own, because its threads would slow down those of the other contenders, and be slowed down by them.

It reads a folder in the form of `transformers` and wants a tokenizer in it. It gets one whose words
are numbers, and is given and asked for token ids alone.
"""

import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

GONE = "--peer ctranslate2: it is not installed; run `pip install ctranslate2`"


@contextmanager
def generator(peer: Any) -> Iterator[Any]:
    """generate(prompts, max_tokens) -> the new tokens of each, by CTranslate2 with the weights of
    `peer`, a model of `transformers`, in float32 on torch's number of threads. Raises ValueError
    where it is not installed."""
    if importlib.util.find_spec("ctranslate2") is None:
        raise ValueError(GONE)
    import ctranslate2

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "transformers"), str(Path(folder, "ctranslate2"))
        peer.save_pretrained(source)
        _tokenizer(peer.config.vocab_size).save_pretrained(source)
        ctranslate2.converters.TransformersConverter(str(source)).convert(target)
        model = target, torch.get_num_threads()
        with ProcessPoolExecutor(1, get_context("spawn"), _load, model) as process:
            yield lambda prompts, max_tokens: process.submit(_run, prompts, max_tokens).result()


_loaded: list[Any] = []  # in the other process


def _load(folder: str, threads: int) -> None:
    import ctranslate2

    _loaded.append(ctranslate2.Generator(folder, compute_type="float32", intra_threads=threads))


def _run(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    found = _loaded[0].generate_batch(
        [[str(token) for token in prompt] for prompt in prompts],
        max_length=max_tokens, min_length=max_tokens, sampling_topk=1, end_token=[],
        include_prompt_in_result=False,
    )  # fmt: skip
    return [list(one.sequences_ids[0]) for one in found]


def _tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({str(i): i for i in range(vocab_size)}, unk_token="0")
    special: Any = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special)
