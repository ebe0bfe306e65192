"""Paged decode and prefill: against naive attention over K and V that were never paged."""

from collections import Counter

import pytest
import torch
from helpers import meet_contexts, meets
from hypothesis import given, settings, strategies as st
from paged_case import DEVICE, DTYPES, SMALL, Paged, bad, count
from thorough import thorough_after

import minikv_kernels.settings
from minikv_kernels.paged_decode import paged_decode, paged_decode_reference
from minikv_kernels.paged_prefill import paged_prefill, paged_prefill_reference
from minikv_kernels.settings import Setting
from minikv_kernels.splits import CHUNK, make_scratch

pytestmark = pytest.mark.usefixtures("quick_interpreter")


@pytest.fixture
def short_splits(monkeypatch):
    """Splits of 16 tokens and more, so that short contexts are split too."""
    monkeypatch.setattr(minikv_kernels.settings, "MIN_SPLIT", 16)


# ── Both kernels: shapes and types ────────────────────────────────────────────────────────


@pytest.mark.usual(head_dim=64, dtype=torch.float32)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", thorough_after(4, [64, 8, 96, 256, 32, 128]))
def test_head_dims(head_dim, dtype):
    paged = Paged([21, 4], head_dim=head_dim, dtype=dtype, kv_heads=1)
    paged.assert_equal(paged.decode(setting=None))
    chunks = Paged([21, 9], [3, 9], head_dim=head_dim, dtype=dtype, kv_heads=1)
    chunks.assert_equal(chunks.prefill(setting=None))


@pytest.mark.parametrize(
    ("kv_heads", "group"), thorough_after(3, [(2, 3), (1, 16), (2, 17), (1, 71), (3, 1), (1, 1)])
)
def test_groups(kv_heads, group):
    paged = Paged([18, 1], kv_heads=kv_heads, group=group)
    paged.assert_equal(paged.decode())
    chunks = Paged([18, 1], [5, 1], kv_heads=kv_heads, group=group)
    chunks.assert_equal(chunks.prefill())


@pytest.mark.usual(block_size=5, tile=16)
@pytest.mark.parametrize("block_size", thorough_after(2, [5, 16, 1, 48, 2, 256]))
@pytest.mark.parametrize("tile", [16, 64])
def test_tiles_and_blocks_need_not_fit(block_size, tile):
    setting = Setting(16, tile, 4, 2)
    paged = Paged([1, 49, 96], block_size=block_size, kv_heads=1)
    paged.assert_equal(paged.decode(setting=setting))
    chunks = Paged([1, 49, 96], [1, 20, 3], block_size=block_size, kv_heads=1)
    chunks.assert_equal(chunks.prefill(setting=setting))


@pytest.mark.parametrize("window", thorough_after(1, [5, 1, 40, 16, 1000]))
def test_windows(window, short_splits):
    lens = [1, 16, 70]
    paged = Paged(lens, block_size=5)
    paged.assert_equal(paged.decode(window, rows=4), window)
    chunks = Paged(lens, [1, 9, 30], block_size=5)
    chunks.assert_equal(chunks.prefill(window), window)
    # More queries than keys in a tile: the later ones see nothing of the first tile.
    chunks.assert_equal(chunks.prefill(window, Setting(64, 16, 4, 2)), window)


@pytest.mark.parametrize("poison", thorough_after(1, [float("nan"), float("inf"), -60000.0]))
@pytest.mark.parametrize("dtype", thorough_after(1, DTYPES), ids=str)
def test_nothing_else_is_read(dtype, poison, short_splits):
    paged = Paged([3, 33, 65], dtype=dtype, poison=poison, kv_heads=1)
    paged.assert_equal(paged.decode(rows=4))
    chunks = Paged([3, 33], [2, 18], dtype=dtype, poison=poison, kv_heads=1)
    chunks.assert_equal(chunks.prefill())


def test_rows_may_lie_apart():
    paged = Paged([9, 20, 33], index=torch.int32)
    tables = torch.full((3, 40), 2**30, dtype=torch.int32, device=DEVICE)
    tables[:, : paged.tables.shape[1]] = paged.tables
    qkv = torch.full((3, 2, *paged.q.shape[1:]), float("nan"), device=DEVICE)
    qkv[:, 0] = paged.q
    q, tables = qkv[:, 0], tables[:, : paged.tables.shape[1]]
    assert not q.is_contiguous() and not tables.is_contiguous()
    paged.assert_equal(paged_decode(q, paged.kv, tables, paged.lens))
    paged.assert_equal(paged_prefill(q, paged.kv, tables, paged.lens, paged.start))


def test_offsets_past_32_bits():
    # 2**31 float16 elements and a little more. On a CPU the pages are never touched,
    # so that this costs address space and not memory.
    small = Paged([20], dtype=torch.float16, head_dim=64, kv_heads=1, block_size=16)
    num_blocks = 2**31 // (16 * 2 * 64) + 2
    kv = torch.empty(num_blocks, 16, 2, 1, 64, dtype=torch.float16, device=DEVICE)
    tables = torch.tensor([[num_blocks - 1, 1]], dtype=torch.int32, device=DEVICE)
    kv[tables[0].long()] = small.kv[small.tables[0, :2]]
    small.assert_equal(paged_decode(small.q, kv, tables, small.lens))
    small.assert_equal(paged_prefill(small.q, kv, tables, small.lens, small.start))


def test_references_equal_naive_attention():
    paged = Paged([0, 1, 16, 33], [0, 1, 7, 33], group=3, block_size=5)
    arguments = (paged.q, paged.kv, paged.tables, paged.lens)
    for window in (None, 6):
        out = paged_prefill_reference(*arguments, paged.start, window)
        torch.testing.assert_close(out, paged.expected(window), rtol=0, atol=0)
    paged = Paged([0, 1, 33])
    out = paged_decode_reference(paged.q, paged.kv, paged.tables, paged.lens, 6)
    torch.testing.assert_close(out, paged.expected(6), rtol=0, atol=0)


# ── Decode: KV heads side by side ─────────────────────────────────────────────────────────


PACKED = [  # (KV heads, group, head dim, columns, of which so many KV heads are made)
    (4, 2, 16, 64, 4),
    (4, 2, 16, 63, 2),  # not three: four must be divided
    (6, 1, 20, 256, 2),
    (8, 4, 8, 256, 4),  # four groups of four fill the 16 rows
    (4, 5, 8, 256, 2),  # 15 would fit into the rows, but not three KV heads into four
    (2, 16, 8, 256, 1),
    (2, 17, 8, 256, 1),
    (3, 1, 8, 256, 1),
    (2, 1, 16, 0, 1),
]


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "columns", "pack"), thorough_after(2, PACKED)
)
def test_kv_heads_side_by_side(kv_heads, group, head_dim, columns, pack, short_splits):
    setting = Setting(16, 16, 4, 5, columns)
    assert minikv_kernels.settings.packed(setting, head_dim, kv_heads, group) == pack
    paged = Paged([1, 40, 0, 97], kv_heads=kv_heads, group=group, head_dim=head_dim, block_size=5)
    paged.assert_equal(paged.decode(setting=setting, rows=5))
    paged.assert_equal(paged.decode(11, setting=setting), 11)


# ── Decode: splits ────────────────────────────────────────────────────────────────────────


def test_the_example_in_the_docstring():
    counts, owners = count([768, 96, 512], rows=6)
    assert counts == [3, 1, 2]
    assert owners[:6] == [[0, 0], [0, 1], [0, 2], [1, 0], [2, 0], [2, 1]]
    assert all(sequence >= 3 for sequence, _ in owners[6:])  # programs with nothing to do


def test_a_window_needs_fewer_splits():
    assert count([4096, 100], rows=16)[0] == [15, 1]
    assert count([4096, 100], rows=16, window=300)[0] == [2, 1]


@settings(max_examples=20)
@given(lens=st.lists(st.integers(0, 5000), min_size=1, max_size=6), rows=st.integers(1, 15))
def test_splits_fit_into_grid_and_scratch(lens, rows):
    counts, owners = count(lens, rows)
    assert sum(n for n in counts if n > 1) <= rows
    assert sum(n > 1 for n in counts) <= rows // 2
    share = max(sum(lens) / rows, minikv_kernels.settings.MIN_SPLIT)
    for n, length in zip(counts, lens, strict=True):
        assert n == 1 or 1 < n <= length // minikv_kernels.settings.MIN_SPLIT
        assert length / n < 2 * (share + 1)  # no program has much longer to read than the others
    expected = [[row, split] for row, n in enumerate(counts) for split in range(n)]
    assert owners[: len(expected)] == expected
    assert all(sequence >= len(lens) for sequence, _ in owners[len(expected) :])


@pytest.mark.parametrize("rows", thorough_after(1, [3, 1, 8, 2, 40]))
@pytest.mark.parametrize("lens", thorough_after(2, [[40, 300, 7], [90, 0, 91, 90, 16], [300]]))
def test_splits(lens, rows, short_splits):
    paged = Paged(lens, kv_heads=1, group=3, block_size=7)
    paged.assert_equal(paged.decode(rows=rows))


def test_a_split_may_be_empty(short_splits):
    # 5 tiles of 16 in 4 splits: two tiles each, and none is left for the last.
    paged = Paged([80], kv_heads=1)
    assert count([80], rows=4)[0] == [4]
    paged.assert_equal(paged.decode(rows=4))


def test_more_splits_than_one_chunk_of_the_reduction(short_splits):
    paged = Paged([16 * (CHUNK + 3)], kv_heads=1, group=1)
    assert count([len(paged.dense[0])], rows=CHUNK + 3)[0][0] > CHUNK
    paged.assert_equal(paged.decode(rows=CHUNK + 3))


def test_large_scores_in_other_splits(short_splits):
    # The running maximum of one split is far above that of another: no overflow, no NaN.
    paged = Paged([64], kv_heads=1, group=2)
    k = paged.dense[0][:, 0]
    k[:32] *= 300
    block, position = torch.arange(64) // 4, torch.arange(64) % 4
    paged.kv[paged.tables[0, block.to(DEVICE)], position.to(DEVICE), 0] = k
    paged.assert_equal(paged.decode(rows=4))


def test_a_context_that_grows_in_the_same_tensors(short_splits):
    # What a captured graph does: same tensors, same grid, other lengths.
    paged = Paged([96, 96], kv_heads=1)
    whole, scratch = paged.dense, paged.scratch(rows=5)
    for lens in ([1, 96], [17, 50], [96, 96], [0, 33]):
        paged.lens.copy_(torch.tensor(lens))
        paged.dense = [tokens[:n] for tokens, n in zip(whole, lens, strict=True)]
        out = paged_decode(paged.q, paged.kv, paged.tables, paged.lens, scratch=scratch)
        paged.assert_equal(out)


def test_padding_of_a_batch_is_zero():
    paged = Paged([0, 5, 0])
    for out in (paged.decode(), paged.prefill()):
        assert (out[[0, 2]] == 0).all()
        paged.assert_equal(out)


def test_no_sequences():
    paged = Paged([])
    assert paged.decode().shape == (0, 4, 16)
    assert paged.prefill().shape == (0, 4, 16)


def any_shape(draw) -> dict:
    """What a `Paged` may be but for its lengths."""
    return dict(
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([3, 1, 5, 2])),
        head_dim=draw(st.integers(1, 40)),
        block_size=draw(st.integers(1, 20)),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 9)),
    )


MET = Counter()


@meets(MET, {
    "other lengths": 4, "several blocks": 6, "a block that is not full": 5, "groups of heads": 4,
    "a window that hides": 4,
})  # fmt: skip
@settings(max_examples=12)
@given(data=st.data())
def test_any_decode(data):
    draw = data.draw
    lens = draw(st.lists(st.integers(0, 200), min_size=1, max_size=4))
    paged = Paged(lens, **(shape := any_shape(draw)))
    window, rows = draw(st.sampled_from([5, None, 40, 1])), draw(st.integers(1, 6))
    meet_contexts(MET, lens, None, shape["block_size"], shape["group"], window)
    setting = SMALL._replace(columns=draw(st.sampled_from([0, 64])))
    paged.assert_equal(paged.decode(window, rows, setting), window)


# ── Prefill: chunks ───────────────────────────────────────────────────────────────────────


@pytest.mark.usual(chunks=[17], dtype=torch.float32)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lens", "chunks"),
    [
        ([1], [1]),
        ([40], [40]),  # a prompt, nothing cached
        ([40], [17]),  # a chunk after a prefix
        ([5, 33, 20, 1], [1, 33, 4, 1]),  # decodes and chunks mixed
        ([12, 0, 12], [12, 0, 3]),  # a sequence without queries
    ],
)
def test_chunks(lens, chunks, dtype):
    paged = Paged(lens, chunks, dtype=dtype, block_size=5)
    paged.assert_equal(paged.prefill())


@pytest.mark.parametrize("rows", thorough_after(1, [16, 64, 128]))
def test_rows_of_a_tile(rows):
    paged = Paged([70, 9], [50, 9], group=3)
    paged.assert_equal(paged.prefill(setting=Setting(rows, 32, 4, 2)))


def test_rows_of_no_sequence_are_left_alone():
    paged = Paged([20, 8, 9], [6, 2, 3])
    out = torch.full_like(paged.q, -7.0)
    paged_prefill(paged.q, paged.kv, paged.tables[1:2], paged.lens[1:2], paged.start[1:3], out=out)
    assert (out[:6] == -7).all() and (out[8:] == -7).all()
    torch.testing.assert_close(out[6:8], paged.expected()[6:8])


@meets(MET, {
    "other lengths": 3, "several blocks": 5, "a block that is not full": 5, "groups of heads": 5,
    "a window that hides": 4, "a chunk after a prefix": 5,
})  # fmt: skip
@settings(max_examples=12)
@given(data=st.data())
def test_any_prefill(data):
    draw = data.draw
    lens = draw(st.lists(st.integers(0, 60), min_size=1, max_size=4))
    chunks = [draw(st.integers(0, n)) for n in lens]
    paged = Paged(lens, chunks, **(shape := any_shape(draw)))
    window = draw(st.sampled_from([5, None, 30, 1]))
    meet_contexts(MET, lens, chunks, shape["block_size"], shape["group"], window)
    paged.assert_equal(paged.prefill(window), window)


# ── Bad arguments ─────────────────────────────────────────────────────────────────────────


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


BAD = [
    bad("q flat", r"q has shape \(3, 16\): want \(T, num_heads", q=zeros(3, 16)),
    bad("q empty", r"q has shape \(3, 0, 8\)", q=zeros(3, 0, 8)),
    bad("kv flat", r"kv has shape \(8, 2, 2, 8\): want \(num_blocks", kv=zeros(8, 2, 2, 8)),
    bad("kv dim", r"kv has shape .* head_dim of q, 8", kv=zeros(4, 4, 2, 2, 16)),
    bad("kv without V", r"kv has shape", kv=zeros(4, 4, 1, 2, 8)),
    bad("kv empty", r"kv has shape", kv=zeros(0, 4, 2, 2, 8)),
    bad("heads", r"q has 4 heads: want a multiple of kv's 3", kv=zeros(4, 4, 2, 3, 8)),
    bad(
        "head dim", r"q has head_dim 512: want at most 256",
        q=zeros(3, 4, 512), kv=zeros(4, 4, 2, 2, 512),
    ),
    bad("tables", r"block_tables has shape \(3,\): want \(num", block_tables=zeros(3).int()),
    bad("lens", r"context_lens has shape \(2,\): want .* \(3,\)", context_lens=torch.ones(2).int()),
    bad("q dtype", r"q is torch.float64: want float32, ", q=zeros(3, 4, 8).double()),
    bad("kv dtype", r"kv is torch.float16: want .* torch.float32", kv=zeros(4, 4, 2, 2, 8).half()),
    bad("tables dtype", r"block_tables is torch.int16", block_tables=zeros(3, 2).short()),
    bad("lens dtype", r"context_lens is torch.float32", context_lens=torch.ones(3)),
    bad("kv device", r"kv is on meta: want .* q", kv=zeros(4, 4, 2, 2, 8, device="meta")),
    bad(
        "tables device", r"block_tables is on meta",
        block_tables=zeros(3, 2, dtype=torch.int32, device="meta"),
    ),
    bad("q rows", r"q has strides \(32, 1, 4\)", q=zeros(3, 8, 4).transpose(1, 2)),
    bad("tables strides", r"block_tables has strides", block_tables=zeros(2, 3).int().T),
    bad("kv strides", r"kv has strides", kv=zeros(4, 8, 2, 2, 8)[:, ::2]),
    bad("lens strides", r"context_lens has strides", context_lens=torch.ones(6).int()[::2]),
    bad("window", r"window was 0: want at least 1", window=0),
]  # fmt: skip
CONTENTS = [
    bad("negative", r"context_lens has -1: want 0", context_lens=torch.tensor([1, -1, 1])),
    bad("long", r"context_lens has 9: want at most the 8 .*2 blocks of 4", context_lens=[1, 9, 1]),
    bad("block", r"block_tables names block 4: want 0 to 3", block_tables=[[0, 9], [4, 9], [1, 9]]),
    bad("hole", r"block_tables names block -1", block_tables=[[0, -1]] * 3, context_lens=[1, 1, 5]),
]
ONLY_DECODE = [bad("row", r"context_lens has shape \(3,\): want one .* \(2,\)", q=zeros(2, 4, 8))]
ONLY_PREFILL = [
    bad("borders", r"query_start has shape \(3,\): want .* \(4,\)", query_start=zeros(3).int()),
    bad("dtype", r"query_start is torch.float32", query_start=zeros(4)),
    bad("strides", r"query_start has strides", query_start=zeros(8).int()[::2]),
    bad("falls", r"query_start is \[0, 2, 1, 3\]: want", query_start=torch.tensor([0, 2, 1, 3])),
    bad("far", r"query_start is .*the 3 rows of q", query_start=torch.tensor([0, 1, 2, 4])),
    bad(
        "chunk", r"context_lens has 1 for 2 queries: want it to include them",
        query_start=torch.tensor([0, 2, 3, 3]),
    ),
]  # fmt: skip
OUT = [
    bad("shape", r"out is \(3, 4, 4\)", out=zeros(3, 4, 4)),
    bad("dtype", r"out is .* torch.float16 .*: want that of q", out=zeros(3, 4, 8).half()),
    bad("strides", r"out has strides", out=zeros(3, 8, 8)[:, ::2]),
]


def refuse(function, changes, message, **more):
    good = dict(
        q=zeros(3, 4, 8), kv=zeros(4, 4, 2, 2, 8), block_tables=zeros(3, 2, dtype=torch.int64),
        context_lens=torch.ones(3, dtype=torch.int64), **more,
    )  # fmt: skip
    arguments = {}
    for name, value in (good | changes).items():
        value = torch.tensor(value) if isinstance(value, list) else value
        moves = isinstance(value, torch.Tensor) and not value.is_meta
        arguments[name] = value.to(DEVICE) if moves else value
    with pytest.raises(ValueError, match=message):
        function(**arguments)


on_the_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="contents of GPU memory are not looked at")
DECODE, PREFILL = [paged_decode, paged_decode_reference], [paged_prefill, paged_prefill_reference]


@pytest.mark.parametrize(("changes", "message"), BAD + ONLY_DECODE)
@pytest.mark.parametrize("function", DECODE)
def test_bad_arguments_of_decode(function, changes, message):
    refuse(function, changes, message)


@pytest.mark.parametrize(("changes", "message"), BAD + ONLY_PREFILL[:3])
@pytest.mark.parametrize("function", PREFILL)
def test_bad_arguments_of_prefill(function, changes, message):
    refuse(function, changes, message, query_start=torch.arange(4, device=DEVICE))


@on_the_cpu
@pytest.mark.parametrize(("changes", "message"), CONTENTS)
def test_bad_contents(changes, message):
    refuse(paged_decode, changes, message)


@on_the_cpu
@pytest.mark.parametrize(("changes", "message"), CONTENTS + ONLY_PREFILL[3:])
def test_bad_contents_of_prefill(changes, message):
    refuse(paged_prefill, changes, message, query_start=torch.arange(4))


@pytest.mark.parametrize(("changes", "message"), OUT)
def test_bad_out(changes, message):
    refuse(paged_decode, changes, message)
    refuse(paged_prefill, changes, message, query_start=torch.arange(4, device=DEVICE))


def test_bad_scratch():
    scratch = make_scratch(4, 2, 16, torch.device(DEVICE))
    refuse(paged_decode, {"scratch": scratch}, r"scratch is for .* \(4, 16\) .*want \(4, 8\)")
    with pytest.raises(ValueError, match=r"rows was 0: want at least 1"):
        make_scratch(4, 2, 16, torch.device(DEVICE), rows=0)
