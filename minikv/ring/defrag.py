"""Defragmentation: data from the back fills the holes in front.

llama.cpp needed it while a batch had to lie in one run of cells and attention read up to the last
used cell. It has been removed since K and V are written by index (August 2025), to any free cells.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minikv.ring.cache import RingCache
from minikv.ring.cells import FREE


class Move(NamedTuple):
    """Cells source … source + length - 1 go to target … target + length - 1, all of them free."""

    source: int
    target: int
    length: int


def plan_moves(is_used: Sequence[bool]) -> list[Move]:
    """The moves after which all used cells lie in front, in runs as long as they can be.

    With u used cells, the holes are the free cells before u and the data to be moved are the
    used cells from u on: equally many. Both are taken in order, so neighbours stay neighbours.
    """
    end = sum(is_used)
    holes = [i for i in range(end) if not is_used[i]]
    data = [i for i in range(end, len(is_used)) if is_used[i]]
    moves: list[Move] = []
    for source, target in zip(data, holes, strict=True):
        last = moves[-1] if moves else Move(-1, -1, 0)
        if (source, target) == (last.source + last.length, last.target + last.length):
            moves[-1] = last._replace(length=last.length + 1)
        else:
            moves.append(Move(source, target, 1))
    return moves


def defragment(cache: RingCache) -> int:
    """Close the holes in front; returns how many cells moved. A pending shift moves with its cell.
    No logit changes."""
    moves = plan_moves([position != FREE for position in cache.positions])
    for source, target, length in moves:
        from_, to = slice(source, source + length), slice(target, target + length)
        cache.k[:, to], cache.v[:, to] = cache.k[:, from_], cache.v[:, from_]
        for i in range(length):
            cache.move_cell(source + i, target + i)
    cache.head = cache.positions.index(FREE) if cache.num_free > 0 else 0
    return sum(move.length for move in moves)
