"""Write the K and V of a step's tokens into their slots of the paged pool.

After vLLM's `reshape_and_cache`: the slot of each new token is given, so one program per
token copies one row of K and one row of V. The cost is the bytes moved.
"""

import torch
import triton
import triton.language as tl

from minikv_kernels.arguments import DTYPES, INDICES, check_runnable


@triton.jit
def cache_write_kernel(
    k, v, kv, slot_mapping, k_stride, v_stride, ROW: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per token: rows of ROW = num_kv_heads * head_dim elements, ROW <= BLOCK."""
    # 64 bits before any product: 2**31 elements are a pool of only 4 GiB in float16.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    column = tl.arange(0, BLOCK)
    # Read whatever the slot is, so that only the writing waits for it.
    new_k = tl.load(k + token * k_stride + column, mask=column < ROW)
    new_v = tl.load(v + token * v_stride + column, mask=column < ROW)
    mask = (column < ROW) & (slot >= 0)
    row = kv + slot * (2 * ROW) + column
    tl.store(row, new_k, mask=mask)
    tl.store(row + ROW, new_v, mask=mask)


def write_cache(
    k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write `k[t]` and `v[t]` into slot `slot_mapping[t]` of one layer's pool, in place.

    k, v: (T, num_kv_heads, head_dim), float32, float16 or bfloat16. Rows may lie apart,
        as slices of one fused projection do; each row is contiguous.
    kv: (num_blocks, block_size, 2, num_kv_heads, head_dim), contiguous, dtype of k. Slot s
        is position s % block_size of block s // block_size: K first, then V.
    slot_mapping: (T,), int32 or int64, contiguous. A negative slot is skipped (padding). Two
        tokens must not share a slot: programs run in any order, so either may win.

    All on one CUDA device, or on any device in the interpreter. Moves
    4 * T * num_kv_heads * head_dim * itemsize bytes (K and V, read and written; a skipped token
    is only read) and T * slot_mapping.itemsize.

    Raises ValueError that names the argument. Slots past the pool are checked on the CPU only,
    because on a GPU the check would wait for the device; there the caller must prevent them.
    """
    _check(k, v, kv, slot_mapping)
    check_runnable("k", k)
    num_tokens, num_kv_heads, head_dim = k.shape
    row = num_kv_heads * head_dim
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(row)
    cache_write_kernel[(num_tokens,)](
        k, v, kv, slot_mapping, k.stride(0), v.stride(0), ROW=row, BLOCK=block,
        num_warps=min(max(block * k.itemsize // 512, 1), 4),  # of 32 lanes, 16 bytes each
    )  # fmt: skip


def write_cache_reference(
    k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`write_cache` in PyTorch: same arguments, same errors, any device."""
    _check(k, v, kv, slot_mapping)
    written = slot_mapping >= 0
    slots = kv.flatten(0, 1)  # (num_slots, 2, num_kv_heads, head_dim)
    slots[slot_mapping[written].long()] = torch.stack((k, v), dim=1)[written]


def _check(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    if k.dim() != 3 or 0 in k.shape[1:]:
        raise ValueError(f"k has shape {tuple(k.shape)}: want (T, num_kv_heads, head_dim)")
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}: want that of k, {tuple(k.shape)}")
    if kv.dim() != 5 or kv.shape[2:] != (2, *k.shape[1:]):
        raise ValueError(
            f"kv has shape {tuple(kv.shape)}: want (num_blocks, block_size, 2, num_kv_heads, "
            f"head_dim), for this k (num_blocks, block_size, 2, {k.shape[1]}, {k.shape[2]})"
        )
    if slot_mapping.shape != k.shape[:1]:
        raise ValueError(
            f"slot_mapping has shape {tuple(slot_mapping.shape)}: want one slot per token of k, "
            f"({k.shape[0]},)"
        )

    if k.dtype not in DTYPES:
        raise ValueError(f"k is {k.dtype}: want float32, float16 or bfloat16")
    for name, tensor in (("v", v), ("kv", kv)):
        if tensor.dtype != k.dtype:
            raise ValueError(f"{name} is {tensor.dtype}: want the dtype of k, {k.dtype}")
    if slot_mapping.dtype not in INDICES:
        raise ValueError(f"slot_mapping is {slot_mapping.dtype}: want int32 or int64")

    for name, tensor in (("v", v), ("kv", kv), ("slot_mapping", slot_mapping)):
        if tensor.device != k.device:
            raise ValueError(f"{name} is on {tensor.device}: want the device of k, {k.device}")

    for name, tensor in (("k", k), ("v", v)):
        if not tensor[:1].is_contiguous():
            raise ValueError(
                f"{name} has strides {tensor.stride()}: want each row contiguous, the last two "
                f"strides {k.shape[2]} and 1; call .contiguous()"
            )
    for name, tensor in (("kv", kv), ("slot_mapping", slot_mapping)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: want it contiguous")

    num_slots = kv.shape[0] * kv.shape[1]
    if k.device.type == "cpu" and len(slot_mapping) and int(slot_mapping.max()) >= num_slots:
        raise ValueError(
            f"slot_mapping names slot {int(slot_mapping.max())}: want less than the pool's "
            f"{num_slots} slots ({kv.shape[0]} blocks of {kv.shape[1]})"
        )
