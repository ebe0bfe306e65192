"""Chapter 17: references of exercises that the engine does not have."""


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """How many blocks of `block_size` tokens hold `num_tokens` tokens, at least 0.

    Worked example: 7 tokens in blocks of 4 need 2.
    """
    return -(-num_tokens // block_size)
