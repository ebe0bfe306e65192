"""The same weights with a longer table of positions, or with sliding windows."""

import copy
import dataclasses

from minikv.errors import require_int
from minikv.language_model import LanguageModel
from minikv.model import rope_table


def with_config(
    lm: LanguageModel, max_context: int | None = None, window: int | None = None
) -> LanguageModel:
    """The model with RoPE's table for `max_context` positions and, for every layer, `window`.

    None leaves each as it is. The weights are shared. The model can then compute positions beyond
    those that it was trained on, but may be bad at them.
    """
    config = lm.config
    if max_context is not None:
        require_int("max_context", max_context, 1)
        config = dataclasses.replace(config, max_context=max_context)
    if window is not None:
        windows = (require_int("window", window, 1),) * config.num_layers
        config = dataclasses.replace(config, windows=windows)
    transformer = copy.copy(lm.transformer)
    transformer.config = config
    transformer.rope_table = rope_table(config).to(lm.device, lm.dtype)
    return LanguageModel(lm.name, transformer, lm.tokenizer)
