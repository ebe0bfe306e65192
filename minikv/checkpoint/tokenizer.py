"""tokenizer.json, and what other files say of its special tokens."""

import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from time import thread_time
from typing import Any

from tokenizers import Tokenizer

from minikv.checkpoint.files import read_json, require_file
from minikv.errors import CheckpointError, require_text

# Of texts that regular expressions are tried on, in characters. Short ones come first: even what
# takes for ever ends in seconds there.
LENGTHS = (8, 16, 32, 125, 500, 4000)
TOO_LONG = 40  # times as long as for a text of all kinds of characters
KINDS = "aA0 \n.'-é中"  # of characters, to an expression
ALL = "".join(map(chr, range(32, 127))) + "\n\té中"
# What templates know by name.
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
           "mask_token")  # fmt: skip
quick: set[bytes] = set()  # settings of parts with expressions, once they are tried


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """tokenizer.json, or None where there is none. A text is never cut or filled up, whatever the
    file says of truncation and padding: the engine says what is too long. Raises CheckpointError
    for a damaged file, and for one whose regular expressions take for ever."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    require_file(file)
    try:
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing more precise, or panics
        said = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{file}: damaged ({said}); fetch it again") from None
    if folder.parent != Path(__file__).parents[1] / "models":  # ours was tried before
        _require_quick(file, tokenizer)
    return tokenizer


def _require_quick(file: Path, tokenizer: Tokenizer) -> None:
    """Raises CheckpointError for regular expressions that take for ever.

    (a+)+$ takes twice as long for each further a, and [ab]+x takes n^2 steps for n of them. So each
    part with expressions is tried on what it may stumble over, again and again. Everything else
    comes behind, so what it looks for is in the text, but not where it looks.
    """
    for part, search in (
        (tokenizer.normalizer, lambda text: tokenizer.normalizer.normalize_str(text)),
        (tokenizer.pre_tokenizer, lambda text: tokenizer.pre_tokenizer.pre_tokenize_str(text)),
        (tokenizer.decoder, lambda text: tokenizer.decoder.decode([text])),
    ):
        settings = part.__getstate__() if part is not None else b"{}"
        patterns = "\n".join(_patterns(json.loads(settings)))
        if not patterns or settings in quick:
            continue
        most = TOO_LONG * min(1e-3, max(5e-4, _seconds(search, ALL)))  # on any machine
        rest = "\0" + ALL + patterns.replace("\\n", "\n").replace("\\r", "\r")
        for length, piece in product(LENGTHS, _pieces(patterns)):
            text = piece * (length // len(piece)) + rest
            if _seconds(search, text) > most and min(_seconds(search, text) for _ in "12") > most:
                raise CheckpointError(
                    f"{file}: a regular expression in it takes {TOO_LONG} times as long as it may "
                    f"for {length} characters of {piece * 3!r}…: a long prompt would keep "
                    "everybody waiting; use another tokenizer.json"
                )
        quick.add(settings)


def _patterns(raw: Any) -> Iterator[str]:
    """Every regular expression in the settings of a part."""
    for key, value in raw.items() if isinstance(raw, dict) else enumerate(raw):
        if key == "Regex":
            yield value
        elif isinstance(value, dict | list):
            yield from _patterns(value)


def _pieces(patterns: str) -> list[str]:
    """What may be repeated: characters of each kind and those that are named, pairs of kinds, and
    words that are named."""
    words = re.findall(r"\w{2,20}", re.sub(r"\\.", " ", patterns))
    pairs = map("".join, product(KINDS, repeat=2))
    return list(dict.fromkeys((*KINDS, *sorted(set(patterns)), *pairs, *words[:20])))


def _seconds(search: Callable[[str], Any], text: str) -> float:
    """Processor time of a search; infinity if the library gives it up, by a panic."""
    before = thread_time()
    try:
        search(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        return math.inf
    return thread_time() - before


def read_special_tokens(folder: Path) -> dict[str, str]:
    """The text of each special token that has a name, by its name: {"eos_token": "</s>", …}. A
    token is written as text, or as an object that has it. As `transformers` reads them: an older
    checkpoint, without a list of added tokens, keeps them in a file of their own."""
    file, older = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    said = read_json(file) if file.is_file() else {}
    if "added_tokens_decoder" not in said and older.is_file():
        said |= read_json(older)
    texts = {name: said.get(name) for name in SPECIAL}
    texts = {
        name: one.get("content") if isinstance(one, dict) else one for name, one in texts.items()
    }
    try:
        return {n: require_text(n, one) for n, one in texts.items() if isinstance(one, str)}
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None
