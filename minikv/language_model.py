"""A transformer with its tokenizer: what `minikv.load` gives, and what an engine serves."""

from collections.abc import Sequence
from typing import Protocol

import torch
from tokenizers import Tokenizer

from minikv.errors import CheckpointError, require_ids, require_text
from minikv.model import Transformer
from minikv.oracle import generate_naively


class Cache(Protocol):
    """What keeps K and V between calls: `ConcatCache`, `PreallocatedCache`."""

    @property
    def num_tokens(self) -> int: ...

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor): ...


class LanguageModel:
    """A transformer with its tokenizer: text in, logits or text out."""

    def __init__(self, name: str, transformer: Transformer, tokenizer: Tokenizer | None):
        self.name, self.transformer, self.tokenizer = name, transformer, tokenizer
        self.config = transformer.config
        self.device, self.dtype = transformer.device, transformer.dtype
        byte = None if tokenizer is None else tokenizer.token_to_id("<0xFF>")  # in no character
        self._broken = [byte] if byte is not None and self.text_of([byte]) == "\ufffd" else []

    def encode(self, text: str) -> list[int]:
        """Text to token ids, with the start token if the checkpoint's tokenizer adds one."""
        try:
            return self._tokenizer_or_raise().encode(require_text("text", text)).ids
        except BaseException as error:
            if isinstance(error, Exception | KeyboardInterrupt | SystemExit):
                raise
            raise ValueError(f"text: the tokenizer of {self.name} has given up: {error}") from None

    def decode(self, token_ids: Sequence[int], is_open: bool = False) -> str:
        """Token ids to text; special tokens are left out. `is_open`: others will follow, so what
        they may change of the end is U+FFFD."""
        return self.text_of(self._ids(token_ids), is_open)

    def text_of(self, ids: list[int], is_open: bool = False) -> str:
        """As `decode`, of ids that need not be checked.

        An open end is half a character, which any tokenizer turns into U+FFFD. The tokenizers of
        Llama 2 and Gemma have a token for each byte, and turn a whole run of such tokens into
        U+FFFD if a single byte is wrong. So a wrong byte behind the ids shows an open run.
        """
        end = self._broken if is_open else []
        text = self._tokenizer_or_raise().decode([*ids, *end] if end else ids)
        return text.removesuffix("\ufffd") if end else text

    def _tokenizer_or_raise(self) -> Tokenizer:
        if self.tokenizer is None:
            raise CheckpointError(f"{self.name} has no tokenizer.json: pass token ids, not text")
        return self.tokenizer

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], cache: Cache | None = None) -> torch.Tensor:
        """Logits after every token: (T, vocab_size) float32.

        Without a cache, naive attention over these tokens: the oracle. With one
        (`ConcatCache`, `PreallocatedCache`), they are the tokens that follow those
        already in it.
        """
        start = 0 if cache is None else cache.num_tokens
        attend = self.transformer.attend_naively if cache is None else cache.attend
        ids = torch.tensor(self._ids(token_ids), device=self.device)
        positions = torch.arange(start, start + len(ids), device=self.device)
        hidden = self.transformer.forward(ids, positions, attend)
        return self.transformer.logits(hidden).float()

    def generate_naively(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Exactly `max_tokens` greedy tokens by the oracle, `minikv.oracle`; only the new ones."""
        return generate_naively(self.logits, self._ids(token_ids), max_tokens)

    def _ids(self, token_ids: Sequence[int]) -> list[int]:
        return require_ids("token_ids", token_ids, self.config.vocab_size)
