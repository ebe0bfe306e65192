"""KV memory: what a token costs, which published figures are wrong, what reserving wastes.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("03.1") in the notebook, or in a terminal: python -m minikv check 03.1
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

from minikv.course.chapters.ch03_kv_memory.memory import NoHole, Shape, SlotUse, llama_parameters
from minikv.course.chapters.ch03_kv_memory.published import BANDWIDTH, CLAIMS, CONFIGS
from minikv.course.measure.workload import Length


# ── 03.1 Bytes a token ────────────────────────────────────────────────────────────
def kv_bytes_per_token(shape: Shape, bytes_per_number: int = 2) -> int:
    """Bytes that one cached token takes, in all layers together.

    `shape` has num_layers, num_heads (query heads), num_kv_heads, head_dim and latent_dim.
    With MHA, GQA and MQA each KV head keeps a key and a value of `head_dim` numbers, in each
    layer. Multi-head latent attention (latent_dim > 0) keeps `latent_dim` numbers in each
    layer, once: no heads, and one vector that both keys and values are computed from. Every
    number takes `bytes_per_number` bytes.

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
      query heads share "hidden_size" evenly. It is a whole number, as all five are.
    - Multi-head latent attention keeps "kv_lora_rank" numbers and, beside them, a key of
      "qk_rope_head_dim" numbers that carries the position. Elsewhere these are missing or null.
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
    """Tokens a second that decode cannot exceed, all `batch` sequences together.

    A decode step gives each sequence one token. It reads the weights once, whatever the batch,
    and each sequence's own K and V, `kv_bytes` of it. `bandwidth` in bytes a second.

    Weights of 10 bytes, 3 sequences of 5 bytes each, 100 bytes a second: a step reads 25 bytes,
    so there are 4 steps a second, 12 tokens.
    """
    raise NotImplementedError("Exercise 03.3: decode_ceiling")


# ── 03.3 Published claims ─────────────────────────────────────────────────────────
def judge_claims() -> dict[str, tuple[float, str]]:
    """The figure that arithmetic gives for each of CLAIMS, and what the claim is.

    Memory in bytes, two bytes a number (fp16, bf16), K = 1,024 tokens:

    "7B 4K"         one context of 4,096 tokens of Llama-2-7B
    "70B 32K"       one context of 32K tokens of a Llama of 70B, with its 8 KV heads
    "70B 8K GQA"    one context of 8K tokens of Llama-3-70B, as it is
    "70B 8K MHA"    the same, had every query head a KV head of its own
    "1B token"      one token of Llama-3.2-1B
    "3B token"      one token of Llama-3.2-3B
    "11B token"     one token of Llama-3.2-11B-Vision, all 40 layers of its text model counted
    "11B 4 x 128K"  four contexts of 128K tokens of that model
        "right" if the claim and your figure are within 10 % of each other, else "wrong"
    "1B speed"      the tokens a second that one stream of Llama-3.2-1B in bf16 cannot exceed at
                    BANDWIDTH, its K and V not counted: "impossible" if the claim is more
    "1B batch"      the smallest batch with which the claim is not impossible: "possible"

    CONFIGS holds config.json by hub id, CLAIMS[key].said is the claim in the same units. Use the
    other functions of this file and llama_parameters; while this one is checked, the others are
    the reference's. Returns

        {"7B 4K": (bytes, "right" or "wrong"), …, "1B speed": (tokens a second, "impossible" or
        "possible"), "1B batch": (sequences, "possible")}
    """
    raise NotImplementedError("Exercise 03.3: judge_claims")


# ── 03.4 Used, for the future, never ──────────────────────────────────────────────
def slots_at(reserved: int, prompt: int, output: int, step: int) -> SlotUse:
    """The slots of a request with `reserved` of them, as they are after step `step` of its life.

    Step 1 is the prefill: it stores the prompt and gives the first output token. Each later step
    stores the newest token and gives the next. Step `output` gives the last, which is never
    stored. Raises ValueError if the request needs more slots than it has.

    2,048 slots, a prompt of 7, 4 output tokens:

        step 1    SlotUse(used=7, future=3, internal=2038)
        step 2    SlotUse(used=8, future=2, internal=2038)
        step 4    SlotUse(used=10, future=0, internal=2038)
    """
    raise NotImplementedError("Exercise 03.4: slots_at")


# ── 03.4 Used, for the future, never ──────────────────────────────────────────────
def shares_over_lives(lengths: list[Length], reserve: Callable[[Length], int]) -> list[float]:
    """Of all the slots that these requests hold, in every step of every life: the shares that
    are used, held for the future, and never used. They add up to 1.

    Each `length` has a `prompt` and an `output`, in tokens; `reserve` is a function, and
    `reserve(length)` says how many slots such a request gets. A life has the steps 1 to `output`.
    Long requests count for more: they hold their slots for longer.

    Two requests with 4 slots each, of 1 + 2 and of 3 + 1 tokens, hold 4 slots in 3 steps. Used:
    1 and 2 by the first, 3 by the other, of 12. For the future: 1. Never: 2 + 2 + 1.

        shares_over_lives([Length(1, 2), Length(3, 1)], lambda length: 4) == [6/12, 1/12, 5/12]
    """
    raise NotImplementedError("Exercise 03.4: shares_over_lives")


# ── 03.5 Five processes ───────────────────────────────────────────────────────────
def five_processes() -> dict[str, int]:
    """A memory of 20 KB is full: five processes of 4 KB, A to E, side by side in this order.

    "free"     KB that are free once B and D have left
    "largest"  KB of the largest process that can then start
    "pairs"    there are 10 pairs of processes that could leave: after how many of them can a
               process of 5 KB start?
    "triples"  there are 10 triples, too: after how many of those?
    "most"     the most KB that can be free, whoever has left, while 5 KB do not fit

    Had one process left in place of two, whoever it was, 4 KB would be free in one piece, and
    5 KB would not fit after any of the 5.
    """
    raise NotImplementedError("Exercise 03.5: five_processes")


class ContiguousMemory:
    """Memory of `size` units, handed out in contiguous pieces by first fit.

    `holes` are the free pieces, (start, size), in the order of their addresses. No two of them
    touch: neighbours are one hole. `pieces` are those handed out, start: size.
    """

    def __init__(self, size: int):
        self.size = size
        self.holes: list[tuple[int, int]] = [(0, size)]
        self.pieces: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return sum(size for _, size in self.holes)

    @property
    def largest_hole(self) -> int:
        return max((size for _, size in self.holes), default=0)

    # ── 03.6 First fit, and holes that merge ──────────────────────────────────────
    def allocate(self, size: int) -> int:
        """Take `size` units, at least 1, from the beginning of the first hole that has them; what
        is left of the hole stays one. Returns where the piece starts. Raises
        NoHole(size, largest_hole, num_free) if no hole is large enough, and changes nothing then.

        In a memory of 10: allocate(4) is 0, allocate(3) is 4, and `holes` are [(7, 3)].
        """
        raise NotImplementedError("Exercise 03.6: ContiguousMemory.allocate")

    # ── 03.6 First fit, and holes that merge ──────────────────────────────────────
    def release(self, start: int) -> None:
        """Give back the piece that starts there. It becomes one hole with the holes that it
        touches, before it and behind it. Raises ValueError if no piece starts there, and changes
        nothing then.

        Then, in the same memory: release(0) makes `holes` [(0, 4), (7, 3)], and release(4)
        makes them [(0, 10)].
        """
        raise NotImplementedError("Exercise 03.6: ContiguousMemory.release")
