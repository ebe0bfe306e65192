"""What several commands take as an argument."""

import argparse

import torch

from minikv.checkpoint import DTYPES


def positive(text: str) -> int:
    """An argument of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, was {text!r}")
    return int(text)


def dtype(text: str) -> torch.dtype:
    """An argument that names what weights are loaded as."""
    names = {str(one).removeprefix("torch."): one for one in DTYPES}
    if text not in names:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(names)}, was {text!r}")
    return names[text]
