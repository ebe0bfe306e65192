"""tokenizer.json, and what other files say of its special tokens."""

from pathlib import Path

from tokenizers import Tokenizer

from minikv.checkpoint.files import read_json, require_file
from minikv.errors import CheckpointError

# What templates know by name.
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
           "mask_token")  # fmt: skip


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """tokenizer.json, or None where there is none. A text is never cut or filled up, whatever the
    file says of truncation and padding: the engine says what is too long."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    require_file(file)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{file}: damaged ({error}); fetch it again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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
    return {name: one for name, one in texts.items() if isinstance(one, str)}
