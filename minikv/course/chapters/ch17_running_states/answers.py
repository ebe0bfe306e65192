"""Chapter 17: the reference of an exercise that the engine does not have."""

from minikv.course.chapters.ch17_running_states.published import MODELS, Layers


def states_on_paper() -> dict[str, float]:
    """What states cost, and what a hit is worth, from four config files: see `MODELS`.
    Matrices are float32; everything else has 2 bytes a number. The last 3 inputs of each channel
    count. Nothing is rounded, but "block".

    "Qwen3-Next", "Qwen3.5 4B", "Kimi Linear", "Nemotron-H 8B": at how many tokens does one
        attention layer of this model keep as many bytes as one of its linear layers?

    The others are of Qwen3.5 4B, whose 32 layers are linear or attend.

    "block": vLLM makes blocks so large that what one attention layer keeps of a block is at least
        as large as the state of one linear layer, in steps of 16 tokens. How many tokens is that?
    "interval": with a copy of all states every so many tokens, copies take as many bytes as K and V
        of all layers that attend.
    "short": the cache holds a prefix of 256 tokens: its K and V, and one copy. How many tokens does
        a hit save for each MiB (2^20 bytes) that is held?
    "long": the same for a prefix of 65,536 tokens.
    "attention": the same for a prefix of any length, if all 32 layers attended.
    """

    def state(m: Layers) -> int:  # bytes, of one linear layer
        return 4 * m.matrices * m.rows * m.columns + 2 * 3 * m.channels

    found = {name: state(m) / (2 * m.cached) for name, m in MODELS.items()}
    m = MODELS["Qwen3.5 4B"]
    copy, per_token = m.linear * state(m), m.attention * 2 * m.cached
    return found | {
        "block": -(-state(m) // (2 * m.cached * 16)) * 16,
        "interval": copy / per_token,
        "short": 256 * 2**20 / (copy + 256 * per_token),
        "long": 65_536 * 2**20 / (copy + 65_536 * per_token),
        "attention": 2**20 / ((m.linear + m.attention) * 2 * m.cached),
    }
