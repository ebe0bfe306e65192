"""Hit rates of two tiers: prompts as the ids of their blocks, as in chapter 07, and no model.

    streams = ids_of_jobs(conversations(lm, 200, turns=6, real_answers=False))
    write_back = rates_by_tier(streams, WriteBack, device=500, host=5000)
    write_back.device, write_back.host          # shares of all blocks asked for

In each prompt the blocks up to the first one that no tier has are hits. Then all of them are on
the device, used from the last to the first, so that a prompt loses its end before its beginning.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from minikv.course.chapters.ch07_radix_prefix_cache.block_ids import Ids

Lru = OrderedDict[int, None]  # ids, the least recently used first


class WriteBack:
    """Each block is in one tier: evicted from the device it goes to the host, and fetched from the
    host it leaves it."""

    def __init__(self, device: int, host: int):
        self.device_blocks, self.host_blocks = device, host
        self.device: Lru = OrderedDict()
        self.host: Lru = OrderedDict()
        self.written = self.fetched = 0  # blocks, down and up

    def serve(self, ids: Ids) -> tuple[int, int]:
        """How many blocks are found on the device, and how many on the host."""
        found = [0, 0]
        for id_ in ids:
            if id_ in self.device:
                found[0] += 1
            elif id_ in self.host:
                found[1] += 1
            else:
                break
        self.fetched += found[1]
        for id_ in reversed(ids):
            self._use(id_)
        return found[0], found[1]

    def _use(self, id_: int) -> None:
        if id_ not in self.device:
            self.host.pop(id_, None)
            if len(self.device) == self.device_blocks:
                self._keep(self.device.popitem(last=False)[0])
        self.device[id_] = None
        self.device.move_to_end(id_)

    def _keep(self, id_: int) -> None:
        """Write a block to the host."""
        if self.host_blocks == 0:
            return
        if len(self.host) == self.host_blocks:
            self.host.popitem(last=False)
        self.host[id_] = None
        self.written += 1


class WriteThrough(WriteBack):
    """The host has every block as soon as it is there; the device drops what it evicts."""

    def _use(self, id_: int) -> None:
        if id_ in self.host:
            self.host.move_to_end(id_)
        else:
            self._keep(id_)
        if id_ not in self.device and len(self.device) == self.device_blocks:
            self.device.popitem(last=False)
        self.device[id_] = None
        self.device.move_to_end(id_)


class TierRates(NamedTuple):
    """Shares of all blocks that were asked for."""

    device: float
    host: float
    written: float  # to the host
    fetched: float  # from it

    @property
    def together(self) -> float:
        return self.device + self.host


def rates_by_tier(
    streams: Sequence[Ids], kind: type[WriteBack], device: int, host: int
) -> TierRates:
    """Serve all prompts from empty tiers; sizes are in blocks."""
    tiers = kind(device, host)
    found = [tiers.serve(ids) for ids in streams]
    total = sum(map(len, streams))
    on_device, on_host = (sum(part) / total for part in zip(*found, strict=True))
    return TierRates(on_device, on_host, tiers.written / total, tiers.fetched / total)
