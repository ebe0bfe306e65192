"""What arithmetic gives for the published claims, as it is and with each of the mistakes."""

from collections.abc import Mapping
from dataclasses import replace
from html import escape

from minikv.course.chapters.ch03_kv_memory.memory import (
    decode_ceiling,
    kv_bytes_per_token,
    llama_parameters,
    shape_of,
)
from minikv.course.chapters.ch03_kv_memory.published import BANDWIDTH, CLAIMS, CONFIGS, MISTAKES

TOKENS = {"7B 4K": 4 * 1024, "70B 8K": 8 * 1024}  # of the other claims: 1


def figure(key: str, mistake: str | None = None) -> float:
    """What arithmetic gives for a claim, if this mistake is made; for the speed, the ceiling of
    one stream."""
    config = CONFIGS[CLAIMS[key].model]
    if key == "1B speed":
        return decode_ceiling(2 * llama_parameters(config), BANDWIDTH)
    shape = shape_of(config)
    changes = {
        "query heads": {"num_kv_heads": shape.num_heads},
        "groups of four": {"num_kv_heads": shape.num_heads // 4},
        "another depth": {"num_kv_heads": shape.num_heads // 4, "num_layers": 64},
        "hidden size": {"head_dim": config.get("text_config", config)["hidden_size"]},
    }
    each = kv_bytes_per_token(replace(shape, **changes.get(mistake or "", {})))
    return TOKENS.get(key, 1) * each * {"only keys": 0.5, "fp32": 2}.get(mistake or "", 1)


def as_table(judged: Mapping[str, str | None]) -> str:
    """HTML, folded: each claim, what arithmetic gives, the mistake and what comes of it."""
    rows = [("the claim", "arithmetic gives", "the mistake", "and with it")]
    for key, mistake in judged.items():
        is_speed = key == "1B speed"
        size, unit = (1, "tokens per second for one stream") if is_speed else (1e9, "GB")
        with_it = "–"
        if mistake and not is_speed:
            with_it = f"{figure(key, mistake) / size:,.1f} {unit}"
        found = f"{figure(key) / size:,.1f} {unit}"
        rows.append((CLAIMS[key].words, found, MISTAKES.get(mistake or "", "–"), with_it))
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<details><summary>The figures</summary><table>{table}</table></details>"
