"""The text that tinypy is trained on, and the text that it has never seen."""

import hashlib
import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Tests are not prose, `encodings` is tables, `pydoc_data` is generated text.
SKIPPED_FOLDERS = {
    "site-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data",
}  # fmt: skip


class Corpus(NamedTuple):
    train: list[str]
    held_out: list[str]


@cache
def read_corpus() -> Corpus:
    """The standard library's modules, split into training and held-out text.

    A top-level module or package is held out as a whole when the first byte of
    the SHA-256 of its name is below 14: a rule that nobody tuned and that holds
    for every Python version.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    corpus = Corpus([], [])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(parts) or parts[0].startswith("_sysconfigdata"):
            continue
        name = parts[0].removesuffix(".py")
        held_out = hashlib.sha256(name.encode()).digest()[0] < 14
        text = path.read_text(encoding="utf-8", errors="ignore")
        (corpus.held_out if held_out else corpus.train).append(text)
    return corpus
