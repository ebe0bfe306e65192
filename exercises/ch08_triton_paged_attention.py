"""Triton kernels, each the one before plus one idea: from adding two vectors to attention
over blocks, with grouped heads and split contexts.

Below each kernel that you write is the function that Python calls: it allocates the output and
starts the programs. A check always runs your kernels in Triton's interpreter, on a machine with a
GPU too, so that a wrong one ends in a sentence and not in a crash; then it compiles them for a
GPU, which works without one. To try them yourself, import `minikv_kernels` before anything else:
without a GPU that turns the interpreter on.

Write what raises NotImplementedError, fix what is marked as broken; the rest is given.
Then check("08.1") in the notebook, or in a terminal: python -m minikv check 08.1
"""

import functools

import torch
import triton
import triton.language as tl


# ── 08.1 A tile for each program ──────────────────────────────────────────────────
@triton.jit
def add_kernel(x, y, out, size, TILE: tl.constexpr):
    """out[i] = x[i] + y[i] for i < size; each program does TILE of them.

    x, y, out: pointers to arrays of `size` elements, all of one type, which may be any. Program p
    does TILE elements from p * TILE on. Three programs of 4 for arrays of 10:

        element     0 1 2 3 | 4 5 6 7 | 8 9 . .
        program     0         1         2
        mask        T T T T | T T T T | T T F F

    What the mask leaves out is neither read nor written.
    """
    raise NotImplementedError("Exercise 08.1: add_kernel")


def add(x: torch.Tensor, y: torch.Tensor, tile: int = 4) -> torch.Tensor:
    """x + y, both (size,) and contiguous. `tile` is a power of two, as `tl.arange` demands."""
    out = torch.empty_like(x)
    grid = (triton.cdiv(len(x), tile),)  # the number of programs
    add_kernel[grid](x, y, out, len(x), TILE=tile)
    return out


# ── 08.2 A running softmax ────────────────────────────────────────────────────────
@triton.jit
def attend_kernel(q, k, v, out, context, scale, HEAD_DIM: tl.constexpr, TILE: tl.constexpr):
    """out = softmax(scale * q k^T) v, by one program that holds TILE keys at a time.

    Each key and value is read once, and only `out` is written.
    q, out: (HEAD_DIM,). k, v: (context, HEAD_DIM), contiguous, so key j begins at j * HEAD_DIM.
    From tile to tile three things are carried: the largest score so far, the sum of
    exp(score - top), and the sum of exp(score - top) v. Powers of 2 work as well, if the scores
    are multiplied by log2(e). Keys from `context` on do not exist: they are not read, and their
    weight is 0.
    """
    raise NotImplementedError("Exercise 08.2: attend_kernel")


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: int = 4) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v of one query and head: q (D,); k, v (L, D); returns (D,).

    All float32 and contiguous, L at least 1; D and `tile` are powers of two.
    """
    out = torch.empty_like(q)
    attend_kernel[(1,)](q, k, v, out, len(k), len(q) ** -0.5, HEAD_DIM=len(q), TILE=tile)
    return out


# ── 08.3 Through the block table ──────────────────────────────────────────────────
@triton.jit
def decode_kernel(
    q, kv, block_tables, context_lens, out, width, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Program (s, h): query head h of sequence s, over the blocks of that sequence.

    q, out: (S, HEADS, HEAD_DIM). kv: (num_blocks, BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM), K of a slot
    before its V. block_tables: (S, width); only the blocks that a context needs are looked up.
    context_lens: (S,), the tokens each query sees. All contiguous. A tile is one block (or several,
    of at most 32 tokens), and each program reads K and V of a token once. Heads of a group lie
    side by side: with 4 query and 2 KV heads, heads 0 and 1 read KV head 0.
    """
    raise NotImplementedError("Exercise 08.3: decode_kernel")


def decode(
    q: torch.Tensor, kv: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
) -> torch.Tensor:
    """One query for each of S sequences over its cached tokens, through its block table.

    q (S, H, D) float32; kv (num_blocks, block_size, 2, K, D) float32 of one layer; block_tables
    (S, B) and context_lens (S,) int64, lengths at least 1; returns (S, H, D). H is a multiple of
    K; D and the block size are powers of two.
    """
    q = q.contiguous()
    (num_seqs, heads, dim), (_, block_size, _, kv_heads, _) = q.shape, kv.shape
    out = torch.empty_like(q)
    decode_kernel[(num_seqs, heads)](
        q, kv, block_tables, context_lens, out, block_tables.stride(0), dim**-0.5,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK_SIZE=block_size,
    )  # fmt: skip
    return out


# ── 08.4 A group in one product ───────────────────────────────────────────────────
@triton.jit
def packed_kernel(
    q, kv, block_tables, context_lens, out, width, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Program (s, g): all GROUP query heads of sequence s that read KV head g.

    Tensors as in `decode_kernel`, with KV_HEADS * GROUP query heads; group g has the heads from
    g * GROUP on. They are the rows of one matrix, so a block is read once for all of them; their
    scores are one `tl.dot`, and so is their weighted sum of V, both with
    input_precision="ieee". ROWS is at least GROUP; the rows past GROUP are padding and are
    neither read nor written.
    """
    raise NotImplementedError("Exercise 08.4: packed_kernel")


def decode_packed(
    q: torch.Tensor, kv: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
) -> torch.Tensor:
    """`decode` with one program per sequence and KV head. D and the block size are at least 16."""
    q = q.contiguous()
    (num_seqs, heads, dim), (_, block_size, _, kv_heads, _) = q.shape, kv.shape
    group = heads // kv_heads
    out = torch.empty_like(q)
    packed_kernel[(num_seqs, kv_heads)](
        q, kv, block_tables, context_lens, out, block_tables.stride(0), dim**-0.5,
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=dim, BLOCK_SIZE=block_size,
        ROWS=max(16, triton.next_power_of_2(group)),
    )  # fmt: skip
    return out


# ── 08.5 Split and join ───────────────────────────────────────────────────────────
@triton.jit
def split_kernel(
    q, kv, block_tables, context_lens, partial, lse, width, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (s, g, i): split i of what program (s, g) of `packed_kernel` does.

    Of a sequence's n blocks each split takes at most n / SPLITS, rounded up, and each block belongs
    to one split: to which is up to you. Some splits may be shorter, or empty.

    partial: (S, KV_HEADS * GROUP, SPLITS, HEAD_DIM), the output over this split's tokens alone.
    lse: (S, KV_HEADS * GROUP, SPLITS), the logarithm of the sum of exp(score) over them. Every
    split writes both. An empty one writes 0 and -inf, or a logarithm so small that it weighs 0.
    """
    raise NotImplementedError("Exercise 08.5: split_kernel")


# ── 08.5 Split and join ───────────────────────────────────────────────────────────
@triton.jit
def join_kernel(partial, lse, out, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Program r: joins the splits of row r, where the rows are the query heads of all sequences.

    partial: (rows, SPLITS, HEAD_DIM); lse: (rows, SPLITS); out: (rows, HEAD_DIM). A split's weight
    is its share of the sum of exp(score), which is the softmax of lse.
    """
    raise NotImplementedError("Exercise 08.5: join_kernel")


def decode_split(
    q: torch.Tensor, kv: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor,
    splits: int = 4,
) -> torch.Tensor:  # fmt: skip
    """`decode_packed`, with each context split among `splits` programs, a power of two."""
    q = q.contiguous()
    (num_seqs, heads, dim), (_, block_size, _, kv_heads, _) = q.shape, kv.shape
    group = heads // kv_heads
    out = torch.empty_like(q)
    partial = torch.empty(num_seqs, heads, splits, dim, device=q.device)
    lse = torch.empty(num_seqs, heads, splits, device=q.device)
    split_kernel[(num_seqs, kv_heads, splits)](
        q, kv, block_tables, context_lens, partial, lse, block_tables.stride(0), dim**-0.5,
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=dim, BLOCK_SIZE=block_size,
        ROWS=max(16, triton.next_power_of_2(group)), SPLITS=splits,
    )  # fmt: skip
    join_kernel[(num_seqs * heads,)](partial, lse, out, HEAD_DIM=dim, SPLITS=splits)
    return out


# ── 08.6 Right on this machine: broken, fix it ────────────────────────────────────
@triton.jit
def gather_kernel(
    kv, block_tables, starts, out, width, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Program (s, i): copies the tokens of block i of sequence s, and no more, to `out`.

    kv: (num_blocks, BLOCK_SIZE, ROW), K and V of a token are one row. block_tables: (S, width).
    starts: (S + 1,); the tokens of sequence s are the rows starts[s] to starts[s + 1] of `out`,
    which is (starts[S], ROW). Programs past the end of a sequence have nothing to do.
    """
    sequence, i = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + sequence)
    context = tl.load(starts + sequence + 1) - start
    position = i * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)  # (BLOCK_SIZE,)
    held = position < tl.cdiv(context, BLOCK_SIZE) * BLOCK_SIZE
    block = tl.load(block_tables + sequence * width + i)
    slot = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    column = tl.arange(0, ROW)
    rows = tl.load(kv + slot[:, None] * ROW + column[None, :], mask=held[:, None])
    tl.store(out + (start + position)[:, None] * ROW + column[None, :], rows, mask=held[:, None])


def gather(
    kv: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
) -> torch.Tensor:
    """K and V of all tokens of all sequences, packed, one sequence after another.

    kv (num_blocks, block_size, 2, K, D); block_tables (S, B) and context_lens (S,) int64;
    returns (tokens, 2, K, D).
    """
    starts = torch.nn.functional.pad(context_lens.cumsum(0), (1, 0))  # (S + 1,)
    out = torch.empty(int(starts[-1]), *kv.shape[2:], device=kv.device)
    gather_kernel[tuple(block_tables.shape)](
        kv, block_tables, starts, out, block_tables.stride(0),
        ROW=kv[0, 0].numel(), BLOCK_SIZE=kv.shape[1],
    )  # fmt: skip
    return out


class CapturedDecode:
    """A decode step as a CUDA graph keeps it: the same launch, on the same tensors, every time.

    A graph is a recording of addresses. So the inputs of a step are copied into tensors that
    were allocated once, before the recording is replayed; it would not notice another tensor in
    their place. On a CPU, a function with fixed arguments behaves the same way.
    """

    def __init__(self, kv: torch.Tensor, num_heads: int, max_seqs: int, max_blocks: int):
        """kv (num_blocks, block_size, 2, K, D); at most `max_seqs` sequences of `max_blocks`
        blocks. A row that no sequence uses has a context of 1 token, of block 0."""
        _, block_size, _, kv_heads, dim = kv.shape
        self.q = torch.zeros(max_seqs, num_heads, dim, device=kv.device)
        self.block_tables = torch.zeros(max_seqs, max_blocks, dtype=torch.int64, device=kv.device)
        self.context_lens = torch.ones(max_seqs, dtype=torch.int64, device=kv.device)
        self.out = torch.zeros_like(self.q)
        self.graph = functools.partial(
            decode_kernel[(max_seqs, num_heads)],
            self.q, kv, self.block_tables, self.context_lens, self.out, max_blocks, dim**-0.5,
            HEADS=num_heads, KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK_SIZE=block_size,
        )  # fmt: skip

    # ── 08.6 Right on this machine: broken, fix it ────────────────────────────────
    def replay(
        self, q: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
    ) -> torch.Tensor:
        """`decode(q, kv, block_tables, context_lens)` by the recording: (S, num_heads, D).

        q (S, num_heads, D); block_tables (S, B); context_lens (S,); S and B as of this step, at
        most those of `__init__`.
        """
        num_seqs, width = block_tables.shape
        self.q[:num_seqs] = q
        # One token further: the same sequences as before, so their tables are in place.
        if not torch.equal(context_lens, self.context_lens[:num_seqs] + 1):
            self.block_tables[:num_seqs, :width] = block_tables
        self.context_lens[:num_seqs] = context_lens
        self.context_lens[num_seqs:] = 1
        self.graph()
        return self.out[:num_seqs]
