"""Copy whole blocks of K and V, all layers in one launch: copy-on-write, and moves of blocks.

A block of one layer is one contiguous piece of memory (`minikv.paged.KVStore`), so the cost
of a copy is the bytes that it moves.
"""

import torch
import triton
import triton.language as tl

from minikv_kernels.arguments import DTYPES, INDICES, check_runnable

CHUNK = 4096  # elements that one program copies


@triton.jit
def copy_blocks_kernel(
    source, target, pairs, source_layer, target_layer, SIZE: tl.constexpr, CHUNK: tl.constexpr
):
    """One program per pair (axis 0), layer and chunk of a block's SIZE elements."""
    pair, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # 64 bits before any product: a pool of all layers soon has 2**31 elements.
    from_block = tl.load(pairs + 2 * pair).to(tl.int64)
    to_block = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    element = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    mask = element < SIZE
    value = tl.load(source + layer * source_layer + from_block * SIZE + element, mask=mask)
    tl.store(target + layer * target_layer + to_block * SIZE + element, value, mask=mask)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy block pairs[i, 0] of `source` to block pairs[i, 1] of `target`, in every layer.

    source, target: (num_layers, num_blocks, block_size, 2, num_kv_heads, head_dim), contiguous,
        float32, float16 or bfloat16, on one device. They may have different numbers of blocks,
        and may be one and the same tensor.
    pairs: (P, 2), int32 or int64, contiguous; on the CPU or on the pools' device.

    The programs run in any order. So no two pairs may write the same block, and within one pool no
    pair may read a block that another one writes: that takes two calls. (`KVStore.copy_to` reads
    everything before it writes, so it has no such limit.) Pairs on the CPU are checked for this and
    for their range, then sent to the device. For pairs on a GPU the caller must ensure both,
    because a check would wait for the device.

    Moves 2 * P * num_layers * block_size * 2 * num_kv_heads * head_dim * itemsize bytes (read
    and written) and the pairs. Raises ValueError that names the argument.
    """
    _check(source, target, pairs)
    check_runnable("source", source)
    if len(pairs) == 0:
        return
    size = source[0, 0].numel()
    grid = (len(pairs), len(source), triton.cdiv(size, CHUNK))
    pairs = pairs.to(source.device, non_blocking=True)
    copy_blocks_kernel[grid](
        source, target, pairs, source.stride(0), target.stride(0),
        SIZE=size, CHUNK=min(CHUNK, triton.next_power_of_2(size)),
    )  # fmt: skip


def copy_blocks_reference(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """`copy_blocks` in PyTorch: same arguments, same errors, any device."""
    _check(source, target, pairs)
    from_blocks, to_blocks = pairs.to(source.device).long().unbind(1)
    target[:, to_blocks] = source[:, from_blocks]


def _check(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    if source.dim() != 6 or source.shape[3] != 2 or 0 in source.shape:
        raise ValueError(
            f"source has shape {tuple(source.shape)}: want (num_layers, num_blocks, block_size, "
            "2, num_kv_heads, head_dim)"
        )
    wanted = (source.shape[0], -1, *source.shape[2:])
    if target.dim() != 6 or (target.shape[0], -1, *target.shape[2:]) != wanted:
        raise ValueError(
            f"target has shape {tuple(target.shape)}: want that of source, "
            f"{tuple(source.shape)}, except for the number of blocks"
        )
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs has shape {tuple(pairs.shape)}: want (P, 2), rows (from, to)")
    if source.dtype not in DTYPES:
        raise ValueError(f"source is {source.dtype}: want float32, float16 or bfloat16")
    if target.dtype != source.dtype:
        raise ValueError(f"target is {target.dtype}: want the dtype of source, {source.dtype}")
    if pairs.dtype not in INDICES:
        raise ValueError(f"pairs is {pairs.dtype}: want int32 or int64")
    if target.device != source.device:
        raise ValueError(
            f"target is on {target.device}: want the device of source, {source.device}; between "
            "devices use KVStore.copy_to"
        )
    if pairs.device.type != "cpu" and pairs.device != source.device:
        raise ValueError(f"pairs is on {pairs.device}: want the CPU or {source.device}")
    for name, tensor in (("source", source), ("target", target), ("pairs", pairs)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: want it contiguous")
    if pairs.device.type == "cpu":
        _check_pairs(source, target, pairs.tolist())


def _check_pairs(source: torch.Tensor, target: torch.Tensor, pairs: list[list[int]]) -> None:
    read, written = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
    for name, blocks, pool in (("source", read, source), ("target", written, target)):
        for block in blocks:
            if not 0 <= block < pool.shape[1]:
                raise ValueError(
                    f"pairs names block {block} of {name}: want 0 to {pool.shape[1] - 1}"
                )
    if len(written) < len(pairs):
        twice = next(b for b in written if sum(pair[1] == b for pair in pairs) > 1)
        raise ValueError(f"pairs writes block {twice} twice: want each block written once")
    both = read & written
    if both and source.data_ptr() == target.data_ptr():
        raise ValueError(
            f"pairs reads and writes block {min(both)}, and programs run in any order: make two "
            "calls, first with the pairs that read it, then with those that write it"
        )
