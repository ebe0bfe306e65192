"""What single tokens stand for: their bytes, their text, and their places in a longer text.

A token alone does not decode to what it adds to a text: a part of a character would be U+FFFD, and
some tokenizers leave out a blank before the first token. So this goes by the tokenizer's decoder.
"""

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence

from tokenizers import Tokenizer

# GPT-2's way to write each byte as a character that can be seen.
_SEEN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _SEEN]
ALPHABET = {chr(byte): byte for byte in _SEEN} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


class Spelling:
    """How a tokenizer spells its tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._added = tokenizer, tokenizer.get_added_tokens_decoder()
        decoder = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b""
        self._is_byte_level = b'"ByteLevel"' in decoder
        self._has_bytes = b'"ByteFallback"' in decoder
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """What it adds to a text, those of a special token included. An id without a token, which
        a model may have, adds nothing."""
        if token_id not in self._known:
            self._known[token_id] = self._spell(token_id)
        return self._known[token_id]

    def text_of(self, token_id: int) -> str:
        """As text. That of a part of a character is "bytes:\\\\xf0\\\\x9f", as OpenAI's is."""
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def is_special(self, token_id: int) -> bool:
        """Whether texts leave it out."""
        return token_id in self._added and self._added[token_id].special

    def alone(self, token_id: int) -> bytes:
        """What it is as the first token of a text: perhaps without a blank."""
        text = self._tokenizer.decode([token_id])
        return self.bytes_of(token_id) if "\ufffd" in text else text.encode()

    def places(self, token_ids: Sequence[int], width: int) -> list[int]:
        """Where the tokens of a whole text begin in it, that has `width` characters. A special
        token has a place in it if somebody wrote it, and none if the tokenizer added it."""
        for shows_special in (False, True):
            places = Places(self, shows_special=shows_special)
            found = [places.take(token_id) for token_id in token_ids]
            if places.end == width:
                break
        return [max(0, width - places.end + place) for place in found]

    def _spell(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].content.encode()
        if self._is_byte_level and all(one in ALPHABET for one in token):
            return bytes(ALPHABET[one] for one in token)
        if self._has_bytes and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        once, twice = (self._tokenizer.decode([token_id] * number) for number in (1, 2))
        return twice[len(once) :].encode()  # behind another, so with its blank


class Places:
    """Where tokens begin in a text, in characters, one after the other. Those that share a
    character share a place."""

    def __init__(self, spelling: Spelling, end: int = 0, shows_special: bool = False):
        self._spelling, self._shows_special = spelling, shows_special
        self.end = end  # of the characters so far
        self._is_first = True
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def take(self, token_id: int) -> int:
        """The place of the next token."""
        begin = self.end
        if self._shows_special or not self._spelling.is_special(token_id):
            spell = self._spelling.alone if self._is_first else self._spelling.bytes_of
            self.end += len(self._decoder.decode(spell(token_id)))
            self._is_first = False
        return begin
