"""Chapter 12: what its notebook and checks are given. No exercise is answered here."""

from collections.abc import Callable

import torch

import minikv
from minikv.blocks import BlockPool
from minikv.checkpoint import read_weights
from minikv.errors import OutOfBlocks
from minikv.model import Transformer
from minikv.tiers.moves import Place, demote

Names = dict[str, "File"]


class EvictingPool(BlockPool):
    """A pool that makes room by itself: `make_room()` is called if a block is asked for and none
    is free."""

    def __init__(self, num_blocks: int, make_room: Callable[[], None]):
        super().__init__(num_blocks)
        self.make_room = make_room

    def allocate(self) -> int:
        if self.num_free == 0:
            self.make_room()
        return super().allocate()


class SmallMachine:
    """A device and a host of a few blocks, in which texts stand for K and V.

    The oldest block of the device goes to the host if the device has no room, and the oldest block
    of the host is forgotten if the host has none. A block that others hold, too, stays.
    """

    def __init__(self, num_device: int, num_host: int):
        self.device = EvictingPool(num_device, self._make_room_on_device)
        self.host = EvictingPool(num_host, self._make_room_on_host)
        self.device_texts, self.host_texts = [""] * num_device, [""] * num_host
        self.places: dict[str, Place] = {}  # by text, the oldest first

    def put(self, text: str, device: bool = False, host: bool = False) -> Place:
        """A new block with a copy on the device, on the host, or on both."""
        place = self.places[text] = Place()
        if device:
            place.device = self.device.allocate()
            self.device_texts[place.device] = text
        if host:
            place.host = self.host.allocate()
            self.host_texts[place.host] = text
        return place

    def down(self, device_block: int, host_block: int) -> None:
        self.host_texts[host_block] = self.device_texts[device_block]

    def up(self, host_block: int, device_block: int) -> None:
        self.device_texts[device_block] = self.host_texts[host_block]

    def _make_room_on_device(self) -> None:
        for place in self.places.values():
            if place.device is not None and self.device.ref_count(place.device) == 1:
                try:
                    demote(place, self.device, self.host, self.down)
                except OutOfBlocks:  # nowhere to put it: forgotten
                    self.device.release(place.device)
                    place.device = None
                return

    def _make_room_on_host(self) -> None:
        for place in self.places.values():
            if place.host is not None and self.host.ref_count(place.host) == 1:
                self.host.release(place.host)
                place.host = None
                return


class File:
    """What is read of a file now, and what a crash may leave of it."""

    def __init__(self) -> None:
        self.content = b""
        self.after_crash = {b""}


class Interrupted(BaseException):
    """As KeyboardInterrupt is: no OSError, and no Exception."""


class CrashingFolder:
    """A folder on a simulated disk, for `save`. It knows what every crash could leave behind.

    A content is on the disk after `sync`, the names after `sync_folder`. Before that, a crash may
    leave some, all or nothing of a content; and the names as they were at any moment since the last
    `sync_folder`.

    files: what is on the disk at the beginning. fails: (operation, error) for one that raises; a
    `write` that fails has written half.
    """

    def __init__(
        self, files: dict[str, bytes], fails: tuple[str, type[BaseException]] | None = None
    ):
        self.names: Names = {}
        for name, content in files.items():
            self.names[name] = file = File()
            file.content, file.after_crash = content, {content}
        self.may_be: list[Names] = [dict(self.names)]  # the names that a crash may leave
        self.fails = fails
        self.steps: list[tuple[str, dict[str, set[bytes | None]]]] = []

    def write(self, name: str, data: bytes) -> None:
        file = self.names.get(name)
        if file is None:
            file = self.names[name] = File()
            self.may_be.append(dict(self.names))
        failing = self.fails is not None and self.fails[0] == "write"
        file.content = data[: len(data) // 2] if failing else data
        file.after_crash |= {b"", data[: len(data) // 2], file.content}
        self._done("write", name)

    def sync(self, name: str) -> None:
        file = self._file(name)
        file.after_crash = {file.content}
        self._done("sync", name)

    def rename(self, old: str, new: str) -> None:
        if self.fails is None or self.fails[0] != "rename":
            self._file(old)
            self.names[new] = self.names.pop(old)
            self.may_be.append(dict(self.names))
        self._done("rename", f"{old} to {new}")

    def sync_folder(self) -> None:
        if self.fails is None or self.fails[0] != "sync_folder":
            self.may_be = [dict(self.names)]
        self._done("sync_folder", "")

    def remove(self, name: str) -> None:
        if self.names.pop(name, None) is not None:
            self.may_be.append(dict(self.names))
        self._done("remove", name)

    def left_by_a_crash(self, name: str) -> set[bytes | None]:
        """All that could be found under this name after a crash now; None: no such file."""
        left: set[bytes | None] = set()
        for names in self.may_be:
            left |= names[name].after_crash if name in names else {None}
        return left

    def _file(self, name: str) -> File:
        if name not in self.names:
            raise FileNotFoundError(name)
        return self.names[name]

    def _done(self, operation: str, what: str) -> None:
        seen = {name for names in self.may_be for name in names}
        left = {name: self.left_by_a_crash(name) for name in seen}
        self.steps.append((f"{operation} {what}".strip(), left))
        if self.fails is not None and self.fails[0] == operation:
            raise self.fails[1](f"{operation} failed")


def evict_all(engine: minikv.Engine) -> None:
    """Let every block leave the device that no running request holds."""
    assert engine.cache is not None
    engine.cache.evict(engine.config.num_blocks)


def prefixes(text: str) -> list[str]:
    """The names of a text's blocks, one letter each: "ABC" has A, AB and ABC."""
    return [text[: end + 1] for end in range(len(text))]


def with_heads_reversed(lm: minikv.LanguageModel) -> minikv.LanguageModel:
    """tinypy with its KV heads listed in the opposite order, as another converter might list them:
    in every layer the rows of k, v and q, and the columns of the output projection. It computes the
    same logits, up to rounding; K and V of its heads have changed places."""
    heads, width = lm.config.num_kv_heads, lm.config.hidden_size
    weights = dict(read_weights(minikv.BUNDLED["tinypy"]))
    for name, weight in weights.items():
        if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
            weights[name] = weight.view(heads, -1, width).flip(0).reshape(weight.shape)
        elif "o_proj" in name:
            weights[name] = weight.view(width, heads, -1).flip(1).reshape(weight.shape)
    transformer = Transformer(lm.config, weights, torch.device("cpu"), lm.dtype)
    return minikv.LanguageModel("tinypy, heads reversed", transformer, lm.tokenizer)
