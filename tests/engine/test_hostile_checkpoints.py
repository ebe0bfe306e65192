"""Checkpoints that nobody should load: each ends in one sentence that names the file."""

import json
import os
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import minikv
from minikv.errors import CheckpointError

FILES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")
STRANGE = (  # values that a config's key may have
    None, True, -1, 0, 2**31, 10**30, 1e308, -0.5, "", "64", "\ud800", [], [[]], {}, {"a": 1},
    [None],
)  # fmt: skip


@pytest.fixture
def folder(checkpoint, tmp_path):
    shutil.copytree(checkpoint("llama").folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def refused(folder, file, more=""):
    with pytest.raises(CheckpointError) as error:
        minikv.load(folder)
    said = str(error.value)
    assert file in said and more in said and len(said.splitlines()) == 1 and len(said) < 1000


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
@pytest.mark.parametrize("file", FILES)
def test_what_is_no_file(folder, file, kind):
    path = folder / file
    path.unlink(missing_ok=True)
    {"pipe": os.mkfifo, "folder": os.mkdir, "socket": make_socket}[kind](path)
    refused(folder, file, "not a file")


def make_socket(path):
    import socket

    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"vocab_size": %s}' % ("9" * 10_000)]
)
@pytest.mark.parametrize("file", FILES[:2])
def test_json_without_end(folder, file, text):
    (folder / file).write_text(text)
    refused(folder, file, "not valid json")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_are_not_finite(folder, number, dtype):
    state = {name: one.to(dtype) for name, one in load_file(folder / FILES[3]).items()}
    name = random.Random(str((number, dtype))).choice(list(state))
    state[name].view(-1)[-1] = number
    save_file(state, folder / FILES[3])
    refused(folder, FILES[3], f"{name} has NaN or infinity")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool])
def test_weights_that_are_no_floats(folder, dtype):
    state = load_file(folder / FILES[3])
    name = "model.norm.weight"
    save_file(state | {name: state[name].to(dtype)}, folder / FILES[3])
    refused(folder, FILES[3], f"{name} is {dtype}")


def test_large_finite_weights_are_loaded(folder):
    state = load_file(folder / FILES[3])
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = torch.full_like(state[name], 1e37)  # their sum is infinite
    save_file(state, folder / FILES[3])
    minikv.load(folder)


def test_any_value_of_any_key_loads_or_is_refused(folder):
    """A model that loads has the tensors that its config asks for, so it can compute."""
    file = folder / FILES[0]
    raw = json.loads(file.read_text())
    for key in raw | minikv.checkpoint.DEFAULTS:
        for value in STRANGE:
            file.write_text(json.dumps(raw | {key: value}))
            try:
                lm = minikv.load(folder)
            except CheckpointError as error:
                assert len(str(error).splitlines()) == 1
            else:
                assert lm.logits([1, 2, 3]).shape == (3, lm.config.vocab_size), (key, value)


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffc"])
def test_half_a_pair_is_no_text(checkpoint, text):
    lm = checkpoint("tinypy").lm
    with pytest.raises(ValueError, match=r"^prompt: character \d is .*, which is no text"):
        minikv.Engine(lm).add_request(text)
    with pytest.raises(ValueError, match=r"^text: character \d is"):
        lm.encode(text)
