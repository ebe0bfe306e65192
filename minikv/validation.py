"""What is asked of the engine, checked before anything is queued or changed.

Every ValueError begins with the name of the argument.
"""

from collections.abc import Iterable, Sequence as Seq
from numbers import Integral
from typing import Any

from minikv.blocks import blocks_for
from minikv.config import EngineConfig
from minikv.errors import require_ids, require_text
from minikv.language_model import LanguageModel
from minikv.sampling import SamplingParams
from minikv.sequence import Request

Prompt = str | Seq[int]


def check_params(params: Any) -> SamplingParams:
    """`params`, or the defaults for None. Raises ValueError for anything else."""
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params: must be SamplingParams, was {params!r}")
    return params


def pair_up(prompts: Any, params: Any) -> Iterable[tuple[Prompt, SamplingParams]]:
    """What `Engine.generate` takes, as one pair per prompt. Each is checked when it is queued."""
    if not isinstance(prompts, Seq):
        raise ValueError(f"prompts: must be a list of texts or token ids, was {prompts!r}")
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
        prompts = [prompts]
    if not isinstance(params, Seq):
        params = [params] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"params: {len(params)} for {len(prompts)} prompts")
    return zip(prompts, params, strict=True)


def make_request(
    request_id: int, prompt: Prompt, params: Any, lm: LanguageModel, config: EngineConfig
) -> Request:
    """A request that can run, as `Engine.add_request` promises: its tokens fit the context and the
    pool together with `max_tokens` more."""
    params = check_params(params)
    ids = lm.encode(require_text("prompt", prompt)) if isinstance(prompt, str) else prompt
    ids = require_ids("prompt", ids, lm.config.vocab_size)
    if not ids:
        raise ValueError("prompt: is empty; give at least one token")
    total = len(ids) + params.max_tokens
    asked = f"a prompt of {len(ids)} tokens and max_tokens={params.max_tokens} make {total} tokens"
    if total > lm.config.max_context:
        raise ValueError(f"{asked}; the model's context is {lm.config.max_context}")
    needed = blocks_for(total, config.block_size)
    if needed > config.num_blocks:
        raise ValueError(
            f"{asked}, {needed} blocks of {config.block_size}; the pool has "
            f"{config.num_blocks}: raise num_blocks or lower max_tokens"
        )
    if lm.tokenizer is None and any(isinstance(item, str) for item in params.stop):
        raise ValueError(f"stop: strings need a tokenizer, and {lm.name} has none; use token ids")
    if params.n > config.max_num_seqs:
        raise ValueError(f"n: {params.n} samples do not fit max_num_seqs={config.max_num_seqs}")
    request = Request(request_id, ids, params, lm.config.eos_ids)
    if lm.tokenizer is not None and request.longest_stop > 0:  # of special tokens there is no text
        added = lm.tokenizer.get_added_tokens_decoder()
        request.stop_ids |= {i for i, a in added.items() if a.special and a.content in params.stop}
    return request
