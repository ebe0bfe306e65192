"""Text to tokens and back, with tokenizers of every kind that checkpoints bring."""

import json
import shutil

import pytest
from tokenizers import Tokenizer

import minikv


@pytest.mark.parametrize(
    "setting",
    [
        {"truncation": {"max_length": 8, "stride": 0, "strategy": "LongestFirst",
                        "direction": "Right"}},
        {"padding": {"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None,
                     "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}},
    ],
    ids=["truncation", "padding"],
)  # fmt: skip
def test_a_tokenizer_neither_cuts_nor_fills_up(tinypy, tmp_path, setting):
    """Whatever its file says: a prompt is what was sent."""
    shutil.copytree(tinypy.folder, tmp_path, dirs_exist_ok=True)
    file, text = tmp_path / "tokenizer.json", "def area(width, height):\n    return width * height"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | setting))
    by_itself = Tokenizer.from_file(str(file)).encode(text).ids
    lm = minikv.load(tmp_path)
    assert len(by_itself) != len(lm.encode(text))  # the file does say so
    assert lm.encode(text) == tinypy.lm.encode(text)
