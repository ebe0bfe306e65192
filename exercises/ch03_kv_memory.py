"""KV memory: what a token costs, which published figures are wrong, what reserving wastes.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("03.1") in the notebook, or in a terminal: python -m minikv check 03.1
"""

from collections.abc import Callable

from minikv.course.chapters.ch03_kv_memory.given import Shape, SlotUse
from minikv.course.workloads.workload import Length


# ── 03.1 Bytes per token ──────────────────────────────────────────────────────────
def kv_bytes_per_token(shape: Shape, bytes_per_number: int = 2) -> int:
    """Bytes that one cached token takes, in all layers together.

    `shape` has num_layers, num_heads (query heads), num_kv_heads, head_dim and latent_dim.
    With MHA, GQA and MQA each KV head keeps a key and a value of `head_dim` numbers, in each
    layer. Multi-head latent attention (latent_dim > 0) keeps one vector of `latent_dim` numbers
    in each layer, from which all heads compute both keys and values. Every number takes
    `bytes_per_number` bytes.

    3 layers, 8 query heads on 2 KV heads, head dim 4, fp16:

        kv_bytes_per_token(Shape(3, 8, 2, 4)) == 96
        kv_bytes_per_token(Shape(3, 8, 8, 4, latent_dim=10)) == 60
    """
    raise NotImplementedError("Exercise 03.1: kv_bytes_per_token")


# ── 03.2 A config, read wrongly: broken, fix it ───────────────────────────────────
def shape_of(config: dict) -> Shape:
    """The shape that a published config.json describes.

    - A model of text and images has its language model under "text_config".
    - Without "num_key_value_heads" (or with null), every query head has a KV head of its own.
    - "head_dim", or "v_head_dim" in DeepSeek's configs, may be missing or null, too. Then the
      query heads share "hidden_size" evenly. The head dim is an int, as all five numbers are.
    - Multi-head latent attention keeps "kv_lora_rank" numbers and a key of "qk_rope_head_dim"
      numbers that carries the position. In other models these are missing or null.
    """
    text = config.get("text_config", config)
    heads = text["num_attention_heads"]
    kv_heads = heads // 4  # four query heads share a KV head
    head_dim = text.get("head_dim") or text.get("v_head_dim") or text["hidden_size"]
    latent = text["kv_lora_rank"] + text["qk_rope_head_dim"] if text.get("kv_lora_rank") else 0
    return Shape(text["num_hidden_layers"], heads, kv_heads, head_dim, latent)


# ── 03.3 Published claims ─────────────────────────────────────────────────────────
def decode_ceiling(
    weight_bytes: float, bandwidth: float, batch: int = 1, kv_bytes: float = 0
) -> float:
    """Tokens per second that decode cannot exceed, all `batch` sequences together.

    A decode step gives each sequence one token. It reads the weights once, whatever the batch,
    and each sequence's own K and V, `kv_bytes` each. `bandwidth` is in bytes per second.

    Weights of 10 bytes, 3 sequences of 5 bytes each, 100 bytes per second: a step reads 25 bytes,
    so there are 4 steps per second, 12 tokens.
    """
    raise NotImplementedError("Exercise 03.3: decode_ceiling")


# ── 03.3 Published claims ─────────────────────────────────────────────────────────
def judge_claims() -> dict[str, str | None]:
    """Which mistake is behind each of CLAIMS: one of MISTAKES by name, or None if it is right.

    For memory: None if the claim is within 10 % of what arithmetic gives, with two bytes per
    number and K = 1,024 tokens. Otherwise the one mistake that gives the claimed figure (again
    within 10 %).

    For the speed: None if the ceiling of one stream, in bf16 and with its K and V not counted, is
    at least the claim.

    CLAIMS and MISTAKES are in minikv/course/chapters/ch03_kv_memory/published.py; the notebook
    prints both. Returns

        {"7B 4K": …, "70B 8K": …, "1B speed": …}
    """
    raise NotImplementedError("Exercise 03.3: judge_claims")


# ── 03.4 Slots used, reserved, lost ───────────────────────────────────────────────
def slots_at(reserved: int, prompt: int, output: int, step: int) -> SlotUse:
    """How a request uses its `reserved` slots after step `step` of its life.

    Step 1 is the prefill: it stores the prompt and gives the first output token. Each later step
    stores the newest token and gives the next. Step `output` gives the last, which is never
    stored. Raises ValueError if the request needs more slots than it has.

    2,048 slots, a prompt of 7, 4 output tokens:

        step 1    SlotUse(used=7, future=3, internal=2038)
        step 2    SlotUse(used=8, future=2, internal=2038)
        step 4    SlotUse(used=10, future=0, internal=2038)
    """
    raise NotImplementedError("Exercise 03.4: slots_at")


# ── 03.4 Slots used, reserved, lost ───────────────────────────────────────────────
def shares_over_lives(lengths: list[Length], reserve: Callable[[Length], int]) -> list[float]:
    """Of all slots that these requests hold, in every step of every life: the shares that are
    used, held for the future, and never used. They add up to 1.

    Each `length` has a `prompt` and an `output`, in tokens; `reserve` is a function, and
    `reserve(length)` is the number of slots that such a request gets. A life has the steps 1 to
    `output`. Long requests count for more, because they hold their slots for longer.

    Two requests with 4 slots each, of 1 + 2 and of 3 + 1 tokens, hold 4 slots in 3 steps. Used:
    1 and 2 by the first, 3 by the other, of 12. For the future: 1. Never: 2 + 2 + 1.

        shares_over_lives([Length(1, 2), Length(3, 1)], lambda length: 4) == [6/12, 1/12, 5/12]
    """
    raise NotImplementedError("Exercise 03.4: shares_over_lives")
