"""Names of blocks: a name says which K and V a block has, and not where it lies.

    name of a block = SHA-256(name of the block before it, its tokens)
    name of a root  = SHA-256(identity, salt)

So equal names mean equal tokens from the very first one on, under the same salt, computed by the
same weights and stored in the same way. A name is 32 bytes, the same in every process: it can be a
key on the host, on a disk, and on another machine. The idea is that of vLLM's hash-chained blocks.
The hash is cryptographic, because a tenant who found a collision could read another's prefix.
"""

import hashlib
import json
import struct
from collections.abc import Hashable, Sequence as Seq

Name = bytes


def identity_of(facts: dict[str, str]) -> bytes:
    """32 bytes for what K and V depend on besides the tokens: model, dtypes, layout, version.

    Equal facts give equal bytes, in whatever order they are listed and in every process. Facts that
    differ in any name or value give other bytes, and nobody can find two that do not.
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def root_name(identity: bytes, salt: Hashable = None) -> bytes | None:
    """The name that a salt's first blocks hang from. None for a salt without a fixed spelling:
    only None, strings, bytes, numbers and tuples of these are the same in every process."""
    spelled = spell(salt)
    if spelled is None:
        return None
    return hashlib.sha256(b"root" + identity + spelled.encode()).digest()


def spell(salt: Hashable) -> str | None:
    """A text that no other salt has, the same in every process.

    Salts are None, strings, bytes, integers, booleans, floats, and tuples of these. "1", 1, 1.0 and
    True are four salts. Anything else has no text that is the same in every process: None. That
    includes an instance of a subclass of these types, such as a member of an enum: its class
    decides what it prints.
    """
    if type(salt) is tuple:
        parts = [spell(one) for one in salt]
        known = [part for part in parts if part is not None]
        return f"({','.join(known)})" if len(known) == len(parts) else None
    if salt is None or type(salt) in (str, bytes, int, bool, float):
        return f"{type(salt).__name__}:{salt!r}"
    return None


def block_name(parent: bytes, token_ids: Seq[int]) -> bytes:
    """The name of the block that holds these tokens and follows `parent`: 32 bytes.

    Token ids are from 0 up to 2**31, and a block may have any number of them. Equal tokens after an
    equal parent have an equal name in every process, and nobody can find others that have it.
    """
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()


def block_names(root: bytes, token_ids: Seq[int], block_size: int) -> list[bytes]:
    """The names of the whole blocks of a prefix, first block first."""
    names, name = [], root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        name = block_name(name, token_ids[start : start + block_size])
        names.append(name)
    return names


def name_new(
    names: dict[int, Name], identity: bytes, salt: Hashable, token_ids: Seq[int],
    block_ids: Seq[int], block_size: int,
) -> Seq[int]:  # fmt: skip
    """Add to `names` those of a prefix's blocks that have none yet; returns these blocks. They are
    the last blocks, because a name depends on the name before it."""
    first = len(block_ids)
    while first > 0 and block_ids[first - 1] not in names:
        first -= 1
    name = root_name(identity, salt) if first == 0 else names[block_ids[first - 1]]
    if name is None:
        return ()
    for index in range(first, len(block_ids)):
        name = block_name(name, token_ids[index * block_size : (index + 1) * block_size])
        names[block_ids[index]] = name
    return block_ids[first:]
