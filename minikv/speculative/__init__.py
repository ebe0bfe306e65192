"""Speculative decoding: guess the next tokens, and verify all of them in one step.

    a plan ──> drafts for its decodes ──> one batch of more rows ──> the target's token at each row
                                                                               │
    blocks given back  <── drafts that were wrong  <── kept while equal  <─────┘

A step over eight tokens takes little longer than a step over one. So a right guess of the next
seven tokens gives eight for little more than the price of one, and a wrong guess costs time but
never a token: what is written is always the target's own choice (`acceptance`).

Read in this order: acceptance, text, decide, drafters, head, draft_model, verify, loop.
"""

from collections.abc import Callable
from functools import partial

from minikv.backend import MakeBackend
from minikv.config import EngineConfig
from minikv.language_model import LanguageModel
from minikv.runner import Runner
from minikv.speculative.acceptance import keep_equal, rejection_sample
from minikv.speculative.decide import Account, Chances, Costs, how_many
from minikv.speculative.draft_model import DRAFT_MODELS, ModelDrafter, draft_model_of
from minikv.speculative.drafters import Drafter, NgramDrafter, Proposal, SuffixDrafter
from minikv.speculative.head import HEADS, HeadDrafter
from minikv.speculative.loop import Speculation, SpeculativeLoop

__all__ = [
    "DRAFT_MODELS",
    "HEADS",
    "Account",
    "Chances",
    "Costs",
    "Drafter",
    "HeadDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "Proposal",
    "Speculation",
    "SpeculativeLoop",
    "SuffixDrafter",
    "how_many",
    "keep_equal",
    "rejection_sample",
    "speculate",
]


def speculate(
    lm: LanguageModel, runner: Runner, config: EngineConfig, attention: MakeBackend
) -> SpeculativeLoop:
    """The loop that `config.speculative` asks for. `attention`: of a draft model. Raises ValueError
    on a GPU, where the engine runs ahead instead."""
    if runner.transformer.device.type != "cpu":
        raise ValueError(
            f"speculative: drafts are verified on a CPU only, and the model is on "
            f"{runner.transformer.device}; leave it at 'off'"
        )
    drafter: Drafter = config.speculative
    if isinstance(drafter, str):
        make: dict[str, Callable[[], Drafter]] = {
            "ngram": NgramDrafter, "suffix": SuffixDrafter, "head": partial(HeadDrafter, lm),
            "model": lambda: ModelDrafter(draft_model_of(lm, config), config, attention),
        }  # fmt: skip
        drafter = make[drafter]()
    return SpeculativeLoop(drafter, runner.attention.on_one_thread)
