"""What goes first: other policies than `pinned`."""

from minikv.radix import Node
from minikv.retention.retaining import Policy, Rank, RetainingCache, pinned


def by_age(cache: RetainingCache, leaf: Node) -> Rank:
    """The least recently used goes first."""
    return Rank(0.0, cache.last_use[leaf])


def time_to_live(seconds: float) -> Policy:
    """Leaves that were not used for `seconds` go first; within both halves, by age."""
    return lambda cache, leaf: Rank(cache.last_use[leaf] + seconds, cache.last_use[leaf])


def whole_conversations(cache: RetainingCache, leaf: Node) -> Rank:
    """As `pinned`, but of two leaves the one goes first whose side was not used for longer, where
    their paths part: first all that shares nothing with what is in use, then its oldest branch."""
    uses, node = [], leaf
    while node.parent is not None:
        uses.append(cache.last_use[node])
        node = node.parent
    return Rank(cache.pins.get(leaf, 0.0), uses[::-1])


POLICIES: dict[str | None, Policy] = {"pinned": pinned, "conversations": whole_conversations}
