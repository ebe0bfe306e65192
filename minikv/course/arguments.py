"""What several commands take as an argument."""

import argparse


def positive(text: str) -> int:
    """An argument of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, was {text!r}")
    return int(text)
