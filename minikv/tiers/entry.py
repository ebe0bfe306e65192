"""A block outside the engine: its bytes, and all that is needed to refuse a wrong one.

    magic 8 | identity 32 | name 32 | number of bytes 8 | checksum 16 | bytes of K and V

A database or another machine may return a wrong entry, an old one or half of one. `unpack` raises
EntryError for everything that is not, bit for bit, what `pack` made for this name and this
identity.
"""

import hashlib
import hmac
import struct

MAGIC = b"minikvB1"  # the last character is the version of this format
HEAD = struct.Struct("<8s32s32sQ16s")


class EntryError(ValueError):
    """An entry that is not what was asked for. The message says what differs."""


def pack(identity: bytes, name: bytes, data: bytes) -> bytes:
    """The entry of a block."""
    return HEAD.pack(MAGIC, identity, name, len(data), _checksum(identity, name, data)) + data


def unpack(entry: bytes, identity: bytes, name: bytes, num_bytes: int) -> memoryview:
    """The `num_bytes` bytes of the block `name`. Raises EntryError for another or damaged entry."""
    if len(entry) < HEAD.size:
        raise EntryError(f"it has {len(entry)} bytes, and a header alone has {HEAD.size}")
    magic, its_identity, its_name, length, checksum = HEAD.unpack_from(entry)
    if magic != MAGIC:
        raise EntryError(f"it begins with {magic!r}, and must begin with {MAGIC!r}")
    if its_identity != identity:
        raise EntryError("it was computed by another model, or stored in another layout")
    if its_name != name:
        raise EntryError("it is another block's")
    data = memoryview(entry)[HEAD.size :]
    if not length == len(data) == num_bytes:
        raise EntryError(
            f"it has {len(data)} bytes, its header says {length}, a block has {num_bytes}"
        )
    if not hmac.compare_digest(checksum, _checksum(identity, name, data)):
        raise EntryError("the checksum is wrong")
    return data


def _checksum(identity: bytes, name: bytes, data: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(identity + name, digest_size=16)
    digest.update(data)
    return digest.digest()
