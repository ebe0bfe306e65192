"""Chapter 03: which published figures are right, and what five processes leave behind."""

import math
from dataclasses import replace
from itertools import combinations

from minikv.course.chapters.ch03_kv_memory.memory import (
    ContiguousMemory,
    decode_ceiling,
    kv_bytes_per_token,
    llama_parameters,
    shape_of,
)
from minikv.course.chapters.ch03_kv_memory.published import BANDWIDTH, CLAIMS, CONFIGS


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
    shapes = {name.partition("/")[2]: shape_of(config) for name, config in CONFIGS.items()}
    llama_70b = shapes["Meta-Llama-3-70B"]
    with_mha = replace(llama_70b, num_kv_heads=llama_70b.num_heads)
    vision = kv_bytes_per_token(shapes["Llama-3.2-11B-Vision"])
    figures = {
        "7B 4K": 4096 * kv_bytes_per_token(shapes["Llama-2-7b-hf"]),
        "70B 32K": 32 * 1024 * kv_bytes_per_token(llama_70b),
        "70B 8K GQA": 8 * 1024 * kv_bytes_per_token(llama_70b),
        "70B 8K MHA": 8 * 1024 * kv_bytes_per_token(with_mha),
        "1B token": kv_bytes_per_token(shapes["Llama-3.2-1B"]),
        "3B token": kv_bytes_per_token(shapes["Llama-3.2-3B"]),
        "11B token": vision,
        "11B 4 x 128K": 4 * 128 * 1024 * vision,
    }
    judged = {
        key: (figure, "right" if abs(figure / CLAIMS[key].said - 1) <= 0.1 else "wrong")
        for key, figure in figures.items()
    }
    weights = 2 * llama_parameters(CONFIGS["meta-llama/Llama-3.2-1B"])
    one = decode_ceiling(weights, BANDWIDTH)
    judged["1B speed"] = (one, "impossible" if CLAIMS["1B speed"].said > one else "possible")
    judged["1B batch"] = (math.ceil(CLAIMS["1B speed"].said / one), "possible")
    return judged


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

    def after(leaving: tuple[int, ...]) -> ContiguousMemory:
        memory = ContiguousMemory(20)
        starts = [memory.allocate(4) for _ in range(5)]
        for index in leaving:
            memory.release(starts[index])
        return memory

    def fits(leaving: tuple[int, ...]) -> bool:
        return after(leaving).largest_hole >= 5

    everyone = [who for count in range(6) for who in combinations(range(5), count)]
    return {
        "free": after((1, 3)).num_free,
        "largest": after((1, 3)).largest_hole,
        "pairs": sum(map(fits, combinations(range(5), 2))),
        "triples": sum(map(fits, combinations(range(5), 3))),
        "most": max(after(leaving).num_free for leaving in everyone if not fits(leaving)),
    }
