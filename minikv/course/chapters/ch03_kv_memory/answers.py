"""Chapter 03: the mistakes behind published figures."""


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
    return {
        "7B 4K": None,
        "70B 8K": "another depth",
        "1B speed": "a batch",
    }
