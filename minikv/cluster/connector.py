"""How K and V, and the messages about them, get from one worker to another.

The calls have the names of vLLM's KV connectors, and are made at the same moments:

    prefill side (Sender)                   decode side (Receiver)
    save_kv_layer   a layer's attention     start_load_kv   blocks are allocated: let this peer
                    has run: its blocks                     write into them
                    may leave
    get_finished    which saves have ended  receive         "layer": these blocks are there

Both sides register their memory once (`register_kv_caches`) and send messages. No call waits: what
cannot be sent at once has failed, and the receiver computes what has failed.

`LocalConnector` connects workers within one process. `zmq_connector` and `nixl_connector` connect
processes, on one machine or on many.
"""

import hashlib
import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

import minikv
from minikv.engine import Engine
from minikv.paged import KVStore
from minikv.tiers import Name, bytes_of, identity_of, model_fingerprint, parts_of

log = logging.getLogger("minikv.cluster")
MISSING = '{} is not installed: pip install "minikv[distributed]"'


@dataclass(frozen=True)
class Message:
    """One message about one request. `body` must be possible in JSON."""

    kind: str
    sender: str  # the address for an answer
    ticket: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    data: bytes | None = None  # K and V, if the transport sends them as messages


@dataclass(frozen=True)
class Save:
    """Some blocks of one layer that are to be written into a peer's blocks."""

    number: int  # names it in `get_finished`
    peer: str
    layer: int
    block_ids: list[int]  # ours
    target: Any  # what the peer's `start_load_kv` returned
    first: int  # they are to become the target's blocks `first`, `first` + 1, …
    notice: Message  # reaches the peer after them


class Mail(Protocol):
    """Only messages: all that a front needs."""

    address: str  # changes with every restart

    def send(self, peer: str, message: Message) -> bool:
        """Send without waiting. Returns False if it is not sent; after True it may still be
        lost."""
        ...

    def receive(self) -> list[Message]:
        """The messages that have come since the last call."""
        ...

    def forget(self, peer: str) -> None:
        """The peer is given up: what was to be sent to it is dropped, and from now on nothing of it
        changes our memory, unless `grace` says otherwise. A later `start_load_kv` begins anew with
        it."""
        ...

    def close(self) -> None: ...


class Sender(Mail, Protocol):
    """The prefill side."""

    def register_kv_caches(self, store: KVStore) -> None:
        """Name the memory that is read from."""
        ...

    def save_kv_layer(self, save: Save) -> None:
        """Begin to write blocks into the peer's. Never raises: `get_finished` reports failures."""
        ...

    def get_finished(self) -> list[tuple[int, bool]]:
        """(number, went well) of the saves that have ended since the last call. They do not read
        our blocks any more."""
        ...


class Receiver(Mail, Protocol):
    """The decode side."""

    grace: float  # seconds for which a peer that we forgot may still write; 0: it cannot

    def register_kv_caches(self, store: KVStore) -> None:
        """Name the memory that is written to."""
        ...

    def start_load_kv(self, peer: str, block_ids: list[int]) -> Any:
        """Let a peer write into these blocks; returns, for JSON, what the peer has to know."""
        ...


# ── Pieces: one layer of one block ────────────────────────────────────────────


def identity_for(engine: Engine) -> bytes:
    """32 bytes for what K and V depend on besides the tokens. Two workers hand over only if theirs
    are equal."""
    parts = parts_of(engine.store).items()
    facts = {
        "course": minikv.__version__,
        "what": "hand-over",
        "model": model_fingerprint(engine.runner.transformer),
        "kv_dtype": engine.config.kv_dtype,
        "layout": str([(name, str(one.dtype), (len(one), *one.shape[2:])) for name, one in parts]),
    }
    return identity_of(facts)


def views(store: KVStore, layer: int, block_id: int) -> list[memoryview]:
    """The bytes of one layer of a block, part by part, without a copy."""
    return [bytes_of(part[layer, block_id]) for part in parts_of(store).values()]


def digest(identity: bytes, name: Name, layer: int, pieces: Seq[memoryview | bytes]) -> str:
    """The checksum of one layer of the block `name`, over what it is and its bytes."""
    hashed = hashlib.blake2b(identity + name + layer.to_bytes(4, "little"), digest_size=16)
    for piece in pieces:
        hashed.update(piece)
    return hashed.hexdigest()


def fill(store: KVStore, layer: int, block_id: int, data: memoryview | bytes) -> None:
    """Write one layer of a block from its bytes."""
    flat, start = torch.frombuffer(bytearray(data), dtype=torch.uint8), 0
    for part in parts_of(store).values():
        piece = part[layer, block_id]
        end = start + piece.numel() * piece.element_size()
        piece.copy_(flat[start:end].view(part.dtype).view(piece.shape))
        start = end


# ── Within one process ────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Parcel:
    """A message on its way, or blocks with the message that follows them."""

    receiver: str
    message: Message
    save: Save | None = None


class LocalNetwork:
    """Connects workers of one process. Blocks are copied when they are delivered, from the sender's
    memory as it is then into the receiver's, as one-sided RDMA does without either processor.

    Delivers at once. A test overrides `carry` to deliver later, in another order, or never.
    """

    def __init__(self) -> None:
        self.ends: dict[str, LocalConnector] = {}

    def connect(self, address: str) -> "LocalConnector":
        """A new end of the network. Raises ValueError if the address is in use."""
        if address in self.ends:
            raise ValueError(f"address: {address!r} is in use")
        self.ends[address] = LocalConnector(self, address)
        return self.ends[address]

    def carry(self, parcel: Parcel) -> None:
        """Begin to carry a parcel."""
        self.deliver(parcel)

    def deliver(self, parcel: Parcel) -> None:
        """Let a parcel arrive. Nothing arrives at a dead worker, nor do blocks from a sender that
        was given up; that sender learns that the save has failed."""
        end, save = self.ends.get(parcel.receiver), parcel.save
        arrives = end is not None
        if save is not None:
            arrives = end is not None and self._write(end, parcel.message.sender, save)
            sender = self.ends.get(parcel.message.sender)
            if sender is not None:
                sender.ended.append((save.number, arrives))
        if arrives and end is not None:
            end.inbox.append(parcel.message)

    def _write(self, end: "LocalConnector", sender: str, save: Save) -> bool:
        source = self.ends.get(sender)
        if source is None or end.keys.get(sender) != save.target["key"]:
            return False
        into = save.target["block_ids"][save.first : save.first + len(save.block_ids)]
        pairs = zip(parts_of(source.store).values(), parts_of(end.store).values(), strict=True)
        for mine, theirs in pairs:
            theirs[save.layer, into] = mine[save.layer, save.block_ids]
        return True


class LocalConnector:
    """One end of a LocalNetwork."""

    store: KVStore
    grace = 0.0

    def __init__(self, network: LocalNetwork, address: str):
        self.network, self.address = network, address
        self.inbox: list[Message] = []
        self.ended: list[tuple[int, bool]] = []
        self.keys: dict[str, int] = {}  # by peer: what it must show to write
        self._num_keys = 0

    def register_kv_caches(self, store: KVStore) -> None:
        self.store = store

    def send(self, peer: str, message: Message) -> bool:
        self.network.carry(Parcel(peer, message))
        return True

    def receive(self) -> list[Message]:
        messages, self.inbox = self.inbox, []
        return messages

    def start_load_kv(self, peer: str, block_ids: list[int]) -> Any:
        if peer not in self.keys:
            self._num_keys += 1
            self.keys[peer] = self._num_keys
        return {"key": self.keys[peer], "block_ids": block_ids}

    def save_kv_layer(self, save: Save) -> None:
        self.network.carry(Parcel(save.peer, save.notice, save))

    def get_finished(self) -> list[tuple[int, bool]]:
        ended, self.ended = self.ended, []
        return ended

    def forget(self, peer: str) -> None:
        self.keys.pop(peer, None)

    def close(self) -> None:
        self.network.ends.pop(self.address, None)
