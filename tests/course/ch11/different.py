"""Chapter 11: correct solutions, written differently from the reference."""

DIFFERENT = {
    "11.1": {
        "blocks_needed": """
def blocks_needed(num_tokens, block_size):
    return len(range(0, num_tokens, block_size))
""",
    },
}
