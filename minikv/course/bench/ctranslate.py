"""CTranslate2 on the weights of a benchmark: `pip install ctranslate2`.

It reads a folder in the form of `transformers` and wants a tokenizer in it. It gets one whose words
are numbers, and is given and asked for token ids alone.
"""

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

GONE = "--peer ctranslate2: it is not installed; run `pip install ctranslate2`"


def generator(peer: Any) -> Callable[..., list[list[int]]]:
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
        threads = torch.get_num_threads()
        model = ctranslate2.Generator(target, compute_type="float32", intra_threads=threads)

    def generate(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        found = model.generate_batch(
            [[str(token) for token in prompt] for prompt in prompts],
            max_length=max_tokens, min_length=max_tokens, sampling_topk=1, end_token=[],
            include_prompt_in_result=False,
        )  # fmt: skip
        return [list(one.sequences_ids[0]) for one in found]

    return generate


def _tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({str(i): i for i in range(vocab_size)}, unk_token="0")
    special: Any = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special)
