"""Copies of whole blocks, against a plain loop."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from paged_case import DEVICE, DTYPES, bad

from minikv_kernels.block_copy import CHUNK, copy_blocks

pytestmark = pytest.mark.usefixtures("quick_interpreter")


def make_pool(num_blocks, block=(3, 2, 2, 5), num_layers=2, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return torch.randn(num_layers, num_blocks, *block).to(DEVICE, dtype)


def assert_copied(source, target, pairs):
    """What a plain loop does, and nothing else is touched."""
    before, expected = source.clone(), target.clone()
    for from_block, to_block in pairs.tolist():
        expected[:, to_block] = source[:, from_block]
    written = target.clone()
    copy_blocks(source, written, pairs)
    torch.testing.assert_close(written, expected, rtol=0, atol=0)
    torch.testing.assert_close(source, before, rtol=0, atol=0)


def test_within_one_pool():
    pool = make_pool(6)
    expected = pool.clone()
    expected[:, [1, 5, 0]] = pool[:, [2, 2, 4]]  # one block may be read twice
    copy_blocks(pool, pool, torch.tensor([[2, 1], [2, 5], [4, 0]]))
    torch.testing.assert_close(pool, expected, rtol=0, atol=0)


def test_a_block_of_several_chunks():
    block = (16, 2, 3, 64)
    assert CHUNK < 16 * 2 * 3 * 64 < 2 * CHUNK
    assert_copied(make_pool(3, block), make_pool(4, block, seed=1), torch.tensor([[1, 3]]))


def test_offsets_past_32_bits():
    # As in test_08_kernels: address space, not memory.
    num_blocks = 2**30 // (16 * 2 * 64) + 1
    pool = torch.empty(2, num_blocks, 16, 2, 1, 64, dtype=torch.float16, device=DEVICE)
    pool[:, -1] = torch.randn(2, 16, 2, 1, 64).to(DEVICE)
    copy_blocks(pool, pool, torch.tensor([[num_blocks - 1, 0]]))
    torch.testing.assert_close(pool[:, 0], pool[:, -1], rtol=0, atol=0)


@settings(max_examples=20)
@given(data=st.data())
def test_any_pairs(data):
    targets = data.draw(st.lists(st.integers(0, 5), unique=True, max_size=6))
    pairs = [[data.draw(st.integers(0, 3)), block] for block in targets]
    block = tuple(data.draw(st.integers(1, 4)) for _ in range(4))
    block = (block[0], 2, *block[2:])
    index = data.draw(st.sampled_from([torch.int32, torch.int64]))
    pairs = torch.tensor(pairs, dtype=index).view(-1, 2)
    dtype = data.draw(st.sampled_from(DTYPES))
    pools = make_pool(4, block, dtype=dtype), make_pool(6, block, dtype=dtype, seed=1)
    assert_copied(*pools, pairs)
    assert_copied(*pools, pairs.to(DEVICE))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        bad("source", r"source has shape \(4, 3, 2, 2, 5\)", source=torch.zeros(4, 3, 2, 2, 5)),
        bad("layers", r"target has shape .*except for", target=torch.zeros(1, 4, 3, 2, 2, 5)),
        bad("block", r"target has shape .*except for", target=torch.zeros(2, 4, 4, 2, 2, 5)),
        bad("flat", r"target has shape", target=torch.zeros(4, 3, 2, 2, 5)),
        bad("pairs", r"pairs has shape \(2,\): want \(P, 2\)", pairs=torch.tensor([0, 1])),
        bad("dtype", r"source is torch.int8", source=torch.zeros(2, 4, 3, 2, 2, 5).char()),
        bad("dtypes", r"target is torch.float16", target=torch.zeros(2, 4, 3, 2, 2, 5).half()),
        bad("index", r"pairs is torch.float32: want int", pairs=torch.zeros(1, 2)),
        bad(
            "device", r"target is on meta: .* use KVStore.copy_to",
            target=torch.zeros(2, 4, 3, 2, 2, 5, device="meta"),
        ),
        bad("pairs' device", r"pairs is on meta", pairs=torch.zeros(1, 2, device="meta").int()),
        bad("strides", r"source has strides", source=torch.zeros(2, 8, 3, 2, 2, 5)[:, ::2]),
        bad("from", r"block 4 of source: want 0 to 3", pairs=torch.tensor([[4, 0]])),
        bad("to", r"block -1 of target: want 0 to 5", pairs=torch.tensor([[0, -1]])),
        bad("twice", r"writes block 3 twice", pairs=torch.tensor([[0, 3], [1, 3]])),
    ],
)  # fmt: skip
def test_bad_arguments(changes, message):
    good = dict(source=make_pool(4), target=make_pool(6), pairs=torch.tensor([[0, 1]]))
    arguments = good | {
        name: tensor if tensor.is_meta or name == "pairs" else tensor.to(DEVICE)
        for name, tensor in changes.items()
    }
    with pytest.raises(ValueError, match=message):
        copy_blocks(**arguments)


@pytest.mark.parametrize("pairs", [[[0, 1], [1, 2]], [[1, 2], [0, 1]], [[3, 3]]])
def test_a_block_that_is_read_and_written(pairs):
    pool = make_pool(4)
    with pytest.raises(ValueError, match=r"reads and writes block \d, and programs run in any"):
        copy_blocks(pool, pool, torch.tensor(pairs))
    copy_blocks(pool, make_pool(4, seed=1), torch.tensor(pairs))  # two pools: nothing to fear
