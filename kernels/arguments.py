"""Checks of arguments, shared by the functions that launch the kernels."""

import torch

from minikv_kernels.mode import INTERPRETED

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INDICES = (torch.int32, torch.int64)


def check_runnable(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if kernels are compiled here and `tensor` is not on a CUDA device."""
    if not INTERPRETED and not tensor.is_cuda:
        raise ValueError(
            f"{name} is on {tensor.device}: compiled kernels need CUDA tensors. Set "
            "TRITON_INTERPRET=1 before Python starts to interpret them on the CPU"
        )


def check_paged(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    window: int | None,
) -> None:
    """Raise ValueError, naming the argument, for anything that a paged kernel could not read.

    Block ids and context lengths are checked on the CPU only: to check the contents of GPU
    memory, one would have to wait for the device.
    """
    if q.dim() != 3 or 0 in q.shape[1:]:
        raise ValueError(f"q has shape {tuple(q.shape)}: want (T, num_heads, head_dim)")
    if kv.dim() != 5 or kv.shape[2] != 2 or kv.shape[4] != q.shape[2] or 0 in kv.shape:
        raise ValueError(
            f"kv has shape {tuple(kv.shape)}: want (num_blocks, block_size, 2, num_kv_heads, "
            f"head_dim), with the head_dim of q, {q.shape[2]}"
        )
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}: want float32, float16 or bfloat16")
    if kv.dtype != q.dtype:
        raise ValueError(f"kv is {kv.dtype}: want the dtype of q, {q.dtype}")
    if kv.device != q.device:
        raise ValueError(f"kv is on {kv.device}: want the device of q, {q.device}")
    if not kv.is_contiguous():
        raise ValueError(f"kv has strides {kv.stride()}: want it contiguous")
    check_contexts(q, kv.shape[0], kv.shape[1], kv.shape[3], block_tables, context_lens, window)


def check_contexts(
    q: torch.Tensor,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    window: int | None,
) -> None:
    """The part of `check_paged` that does not depend on how K and V are stored."""
    if q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} heads: want a multiple of kv's {num_kv_heads} KV heads, so that "
            "each KV head serves equally many query heads"
        )
    if q.shape[2] > 256:
        raise ValueError(f"q has head_dim {q.shape[2]}: want at most 256")
    if block_tables.dim() != 2:
        raise ValueError(
            f"block_tables has shape {tuple(block_tables.shape)}: want (num_seqs, num_blocks)"
        )
    check_rows("context_lens", context_lens, len(block_tables), "one length per block table")
    check_indices("block_tables", block_tables, q)
    check_indices("context_lens", context_lens, q)

    if len(q) and not q[0].is_contiguous():
        raise ValueError(
            f"q has strides {q.stride()}: want each row contiguous, the last two strides "
            f"{q.shape[2]} and 1; call .contiguous()"
        )
    if block_tables.stride(1) != 1 and block_tables.shape[1] > 1:
        raise ValueError(f"block_tables has strides {block_tables.stride()}: want rows contiguous")
    if not context_lens.is_contiguous():
        raise ValueError(f"context_lens has strides {context_lens.stride()}: want it contiguous")
    if window is not None and window < 1:
        raise ValueError(f"window was {window}: want at least 1 token, or None for no window")
    if q.device.type == "cpu":
        _check_contents(num_blocks, block_size, block_tables, context_lens)


def check_queries(q: torch.Tensor, context_lens: torch.Tensor, query_start: torch.Tensor) -> None:
    """Raise ValueError unless `query_start` cuts q into chunks, each within its context."""
    check_rows("query_start", query_start, len(context_lens) + 1, "one border more than sequences")
    check_indices("query_start", query_start, q)
    if not query_start.is_contiguous():
        raise ValueError(f"query_start has strides {query_start.stride()}: want it contiguous")
    if q.device.type != "cpu":
        return
    first, last, queries = int(query_start[0]), int(query_start[-1]), query_start.diff()
    if first < 0 or last > len(q) or (queries < 0).any():
        raise ValueError(
            f"query_start is {query_start.tolist()}: want non-decreasing borders between 0 "
            f"and the {len(q)} rows of q"
        )
    if (queries > context_lens).any() and (queries > 1).any():
        row = int((queries - context_lens).argmax())
        raise ValueError(
            f"context_lens has {int(context_lens[row])} for {int(queries[row])} queries: want it "
            "to include them"
        )


def check_rows(name: str, tensor: torch.Tensor, size: int, what: str) -> None:
    """Raise ValueError unless `tensor` has shape (size,)."""
    if tensor.shape != (size,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: want {what}, ({size},)")


def check_indices(name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    """Raise ValueError unless `tensor` is int32 or int64 and on the device of q."""
    if tensor.dtype not in INDICES:
        raise ValueError(f"{name} is {tensor.dtype}: want int32 or int64")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}: want the device of q, {q.device}")


def check_out(out: torch.Tensor | None, q: torch.Tensor) -> None:
    """Raise ValueError unless `out` is None or a contiguous tensor like q."""
    if out is None:
        return
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}: want that of q, "
            f"{tuple(q.shape)} {q.dtype} on {q.device}"
        )
    if not out.is_contiguous():
        raise ValueError(f"out has strides {out.stride()}: want it contiguous")


def _check_contents(num_blocks, block_size, block_tables, context_lens) -> None:
    if len(context_lens) == 0:
        return
    if int(context_lens.min()) < 0:
        raise ValueError(f"context_lens has {int(context_lens.min())}: want 0 or more")
    held, longest = block_tables.shape[1] * block_size, int(context_lens.max())
    if longest > held:
        raise ValueError(
            f"context_lens has {longest}: want at most the {held} tokens that a block table "
            f"holds ({block_tables.shape[1]} blocks of {block_size})"
        )
    used = torch.arange(held).expand(len(context_lens), held) < context_lens[:, None]
    used = used[:, ::block_size]  # (S, B): blocks that hold a token of the context
    bad = block_tables[used & ((block_tables < 0) | (block_tables >= num_blocks))]
    if len(bad):
        raise ValueError(f"block_tables names block {int(bad[0])}: want 0 to {num_blocks - 1}")
