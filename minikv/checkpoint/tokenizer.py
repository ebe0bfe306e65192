"""tokenizer.json, and what other files say of its special tokens."""

import re
from pathlib import Path
from time import thread_time

from tokenizers import Tokenizer

from minikv.checkpoint.files import read_json, require_file
from minikv.errors import CheckpointError, require_text

QUICK = 0.25  # seconds of processor time for some thousand characters: usually a hundredth of it
# What templates know by name.
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
           "mask_token")  # fmt: skip


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
    for part in (tokenizer.normalizer, tokenizer.pre_tokenizer):
        if part is not None and re.search(r"\)\??[+*{]", part.__getstate__().decode()):
            _require_quick(file, tokenizer)  # a group that is repeated: in few published ones
    return tokenizer


def _require_quick(file: Path, tokenizer: Tokenizer) -> None:
    """Raises CheckpointError for a tokenizer that searches a short text for ever: (a+)+$ takes
    twice as long for each further a. So the text is runs of each character, longer and longer."""
    for length in (8, 12, 16, 20, 24):
        characters = (*map(chr, range(32, 127)), "\n", "é", "中")
        text, before = "\0".join(one * length for one in characters), thread_time()
        try:
            tokenizer.encode(text)
            is_quick = thread_time() - before < QUICK
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic: the library has given up
            is_quick = False
        if not is_quick:
            raise CheckpointError(
                f"{file}: a regular expression in it takes more than {QUICK} s for a text of "
                f"{len(text)} characters: it would keep everybody waiting"
            )


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
