"""Chapter 03: the mistakes behind published figures, and what five processes leave behind."""

from itertools import combinations

from minikv.course.chapters.ch03_kv_memory.memory import ContiguousMemory


def judge_claims() -> dict[str, str | None]:
    """Which mistake is behind each of CLAIMS: one of MISTAKES by name, or None if it is right.

    For memory: None if the claim is within 10 % of what arithmetic gives, with two bytes per
    number and K = 1,024 tokens. Otherwise the one mistake that gives the claimed figure (again
    within 10 %). Of the 11B all 40 layers of its text model count.

    For the speed: None if the ceiling of one stream, in bf16 and with its K and V not counted, is
    at least the claim.

    CLAIMS and MISTAKES are in minikv/course/chapters/ch03_kv_memory/published.py; the notebook
    prints both. Returns

        {"7B 4K": …, "70B 8K": …, "1B token": …, "3B token": …, "11B token": …, "1B speed": …}
    """
    return {
        "7B 4K": None,
        "70B 8K": "another depth",
        "1B token": None,
        "3B token": "groups of four",
        "11B token": "hidden size",
        "1B speed": "a batch",
    }


def five_processes() -> dict[str, int]:
    """A memory of 20 KB is full: five processes of 4 KB, A to E, side by side in this order.

    "free"     KB that are free once B and D have left
    "largest"  KB of the largest process that can then start
    "pairs"    there are 10 pairs of processes that could leave: after how many of them can a
               process of 5 KB start?
    "triples"  there are 10 triples, too: after how many of those?
    "most"     the most KB that can be free, whichever processes have left, while 5 KB do not fit

    If only one process left, whichever it was, 4 KB would be free in one piece, and 5 KB would
    not fit after any of the 5.
    """

    def after(leaving: tuple[int, ...]) -> ContiguousMemory:
        memory = ContiguousMemory(20)
        starts = [memory.allocate(4) for _ in range(5)]
        for index in leaving:
            memory.release(starts[index])
        return memory

    def fits(leaving: tuple[int, ...]) -> bool:
        return after(leaving).largest_hole >= 5

    everyone = [leaving for count in range(6) for leaving in combinations(range(5), count)]
    return {
        "free": after((1, 3)).num_free,
        "largest": after((1, 3)).largest_hole,
        "pairs": sum(map(fits, combinations(range(5), 2))),
        "triples": sum(map(fits, combinations(range(5), 3))),
        "most": max(after(leaving).num_free for leaving in everyone if not fits(leaving)),
    }
