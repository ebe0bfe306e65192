"""The parts of a block in a store of any format, and their bytes."""

from collections.abc import Sequence as Seq

import torch

from minikv.groups import GroupedStore
from minikv.paged import KVStore
from minikv.tiers.identity import bytes_of


def parts_of(store: KVStore) -> dict[str, torch.Tensor]:
    """Everything that a store keeps of a block, by name: tensors (num_layers, num_blocks, …).
    Raises ValueError for a store of which blocks give back what is behind a window."""
    if isinstance(store, GroupedStore):
        raise ValueError(
            "kv_groups: the layers with a window have given back earlier K and V, so blocks cannot "
            "be taken out or put in; make this engine with EngineConfig(kv_groups='one')"
        )
    return store.parts


def drop_open(store: KVStore, block_id: int) -> None:
    """Call before a block is filled from outside: drops keys that an earlier holder left
    waiting."""
    if store.open is not None:
        store.open.drop(block_id)


def read_block(store: KVStore, block_id: int) -> bytes:
    """The bytes of a block: all its parts, one after the other."""
    return b"".join(bytes_of(part[:, block_id]) for part in parts_of(store).values())


def read_blocks(store: KVStore, block_ids: Seq[int]) -> list[bytes]:
    """`read_block` of several blocks, all at once, which matters on a GPU."""
    index = torch.tensor(block_ids, dtype=torch.int64)
    parts = [
        part.view(torch.uint8).index_select(1, index.to(part.device)).cpu()
        for part in parts_of(store).values()
    ]
    return [b"".join(bytes_of(part[:, i]) for part in parts) for i in range(len(block_ids))]


def write_block(store: KVStore, block_id: int, data: memoryview) -> None:
    """Fill a block of a store on a CPU with the bytes that `read_block` gave."""
    drop_open(store, block_id)
    flat, start = torch.frombuffer(bytearray(data), dtype=torch.uint8), 0
    for part in parts_of(store).values():
        block = part[:, block_id]
        end = start + block.numel() * block.element_size()
        block.copy_(flat[start:end].view(part.dtype).view(block.shape))
        start = end
