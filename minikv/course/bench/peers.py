"""The same weights on both sides: an engine's model, and the `transformers` model beside it."""

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import minikv
from minikv.course.bench.harness import random_ids
from minikv.language_model import LanguageModel

SHAPES: dict[str, dict[str, Any]] = {  # made here, with random weights
    "random-8m": dict(
        hidden_size=256, intermediate_size=688, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=4096, max_position_embeddings=2048,
        tie_word_embeddings=False,
    ),
    # Of https://huggingface.co/HuggingFaceTB/SmolLM2-135M/blob/main/config.json
    "random-135m": dict(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, max_position_embeddings=8192,
        tie_word_embeddings=True, rope_theta=100_000.0, rms_norm_eps=1e-5,
    ),
}  # fmt: skip
MODELS = ("tinypy", "random-8m")


def load_pair(name: str, dtype: torch.dtype = torch.float32):
    """`tinypy`, one of `SHAPES` or a checkpoint folder: (LanguageModel, transformers model), on the
    CPU. Random weights have so few bits that both formats of 16 bits hold them exactly."""
    # Imported here: it takes seconds, and only two of the benchmarks need it.
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as theirs

    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(minikv.BUNDLED.get(name, name))
        if name in SHAPES:
            folder = Path(scratch)
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(**SHAPES[name]))
            model.bfloat16().half().save_pretrained(folder)
        lm = minikv.load(folder, dtype=dtype)
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    # Both sides go on past the end token, so both compute the same number of tokens.
    peer.generation_config.eos_token_id = None
    peer.generation_config.pad_token_id = 0
    return lm, peer


@torch.inference_mode()
def generate(peer, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy tokens from `transformers`: one batch with its cache, padded on the left."""
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in prompts])  # (S, P)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    output = peer.generate(
        padded, attention_mask=mask, do_sample=False, use_cache=True, max_new_tokens=max_tokens
    )
    return output[:, width:].tolist()


@contextmanager
def generate_batch(
    config: minikv.ModelConfig, peer: Any, batch: int, num_tokens: int
) -> Iterator[Callable]:
    """generate(prompts, max_tokens) -> the new tokens of each, by continuous batching over paged K
    and V in `transformers`, with room for so many sequences of `num_tokens`."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    pages = ContinuousBatchingConfig(max_batch_tokens=2048)
    pages.num_blocks = batch * -(-num_tokens // pages.page_size)
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    # What `generate_batch` does, without the tenths of a second that starting and ending it take.
    with peer.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=pages, block=True
    ) as manager:

        def generate(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
            ids = manager.add_requests(inputs=prompts, max_new_tokens=max_tokens)
            found: dict[str, list[int]] = {}
            while len(found) < len(ids):
                if (one := manager.get_result(timeout=1)) is not None and one.is_finished():
                    found[one.request_id] = list(one.generated_tokens)
                elif not manager.is_running():
                    raise RuntimeError("transformers has ended its thread")
            return [found[name] for name in ids]

        yield generate


def random_prompts(lm: LanguageModel, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Prompts without a common prefix."""
    draw = random.Random(seed)
    return [random_ids(lm, draw, length) for length in lengths]


def engine_for(lm: LanguageModel, lengths: Sequence[int], **settings: Any) -> minikv.Engine:
    """With room for requests of so many tokens, prompt and answer, all at once. `settings`: further
    ones of EngineConfig."""
    config = minikv.EngineConfig(
        num_blocks=max(512, sum(-(-length // 16) for length in lengths)),
        max_num_seqs=max(64, len(lengths)),
        max_batch_tokens=max(2048, len(lengths)),
        **settings,
    )
    return minikv.Engine(lm, config)


def ours(engine: minikv.Engine, prompts: Sequence[Sequence[int]], params) -> list[list[int]]:
    """The engine's tokens; `params` for all prompts, or one for each."""
    return [list(output.token_ids) for output in engine.generate(prompts, params)]


def count_differing(results: Mapping[str, list[list[list[int]]]], peer: str) -> str:
    """How many rows, of those of all runs, are not the same tokens as minikv's."""
    pairs = zip(chain(*results["minikv"]), chain(*results[peer]), strict=True)
    same = [one == other for one, other in pairs]
    return f"{same.count(False)} of {len(same)}"
