"""The Triton kernels: compiled where there is a CUDA device, interpreted elsewhere."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from paged_case import DEVICE, DTYPES, bad

from minikv_kernels.cache_write import write_cache, write_cache_reference

pytestmark = pytest.mark.usefixtures("quick_interpreter")
POISON = -12345.0  # every dtype holds it, if roughly; randn never gives it


def run_python(code, **environment):
    """Run `code` in a fresh Python with exactly this TRITON_INTERPRET, or none."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code], env=env | environment, capture_output=True, text=True
    )


def make_batch(num_tokens, num_kv_heads, head_dim, num_blocks, block_size, dtype=torch.float32):
    torch.manual_seed(num_tokens)
    k, v = torch.randn(2, num_tokens, num_kv_heads, head_dim, device=DEVICE).to(dtype)
    kv = torch.full((num_blocks, block_size, 2, num_kv_heads, head_dim), POISON, device=DEVICE)
    return k, v, kv.to(dtype)


def assert_written(k, v, kv, slots):
    """`write_cache` and the reference both do what a plain loop does, and nothing else."""
    expected = kv.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, position = divmod(slot, kv.shape[1])
            expected[block, position, 0] = k[token]
            expected[block, position, 1] = v[token]
    for write in (write_cache, write_cache_reference):
        written = kv.clone()
        write(k, v, written, slots)
        torch.testing.assert_close(written, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size"), [(2, 64, 16), (1, 1, 1), (3, 20, 5), (8, 128, 4)]
)
def test_writes_its_slots_and_no_others(num_kv_heads, head_dim, block_size, slot_dtype, dtype):
    k, v, kv = make_batch(5, num_kv_heads, head_dim, 8, block_size, dtype)
    slots = torch.tensor([7, 0, 3, 5, 1], dtype=slot_dtype, device=DEVICE)
    assert_written(k, v, kv, slots)


def test_rows_of_a_fused_projection():
    # (T, query + key + value), cut into its parts: rows lie apart, k and v differently so.
    qkv = torch.randn(6, 32 + 16 + 16, device=DEVICE)
    k = qkv[:, 32:48].view(6, 2, 8)
    v = qkv[::2, 48:].repeat_interleave(2, dim=0).view(6, 2, 8)
    kv = torch.full((4, 4, 2, 2, 8), POISON, device=DEVICE)
    assert k.stride(0) != v.stride(0)
    assert_written(k, v, kv, torch.tensor([15, 4, 9, -1, 0, 2], device=DEVICE))


def test_one_row_for_every_token():
    k = torch.randn(1, 2, 8, device=DEVICE).expand(3, 2, 8)
    kv = torch.full((2, 4, 2, 2, 8), POISON, device=DEVICE)
    assert_written(k, k, kv, torch.tensor([1, 6, 3], device=DEVICE))


def test_a_layer_of_a_larger_pool():
    k, v, _ = make_batch(2, 2, 8, 1, 1)
    pool = torch.full((3, 4, 4, 2, 2, 8), POISON, device=DEVICE)
    write_cache(k, v, pool[1], torch.tensor([0, 15], device=DEVICE))
    assert (pool[[0, 2]] == POISON).all()
    torch.testing.assert_close(pool[1, 3, 3, 1], v[1], rtol=0, atol=0)


def test_offsets_past_32_bits():
    # 2**31 float16 elements and a little more. On a CPU the pages are never touched,
    # so that this costs address space and not memory.
    k, v, _ = make_batch(2, 1, 64, 1, 1, torch.float16)
    num_blocks = 2**31 // (16 * 2 * 64) + 1
    kv = torch.empty(num_blocks, 16, 2, 1, 64, dtype=torch.float16, device=DEVICE)
    last = num_blocks * 16 - 1
    write_cache(k, v, kv, torch.tensor([last, 3], dtype=torch.int32, device=DEVICE))
    torch.testing.assert_close(kv[-1, -1], torch.stack((k[0], v[0])), rtol=0, atol=0)
    torch.testing.assert_close(kv[0, 3], torch.stack((k[1], v[1])), rtol=0, atol=0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_scatter_equals_the_reference(data):
    num_blocks, block_size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    num_slots = num_blocks * block_size
    used = data.draw(st.lists(st.integers(0, num_slots - 1), unique=True, max_size=12))
    skipped = data.draw(st.lists(st.integers(-5, -1), max_size=3))
    slots = data.draw(st.permutations(used + skipped))
    slots = torch.tensor(slots, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    k, v, kv = make_batch(
        len(slots),
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 33)),
        num_blocks,
        block_size,
        data.draw(st.sampled_from(DTYPES)),
    )
    assert_written(k, v, kv, slots.to(DEVICE))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        bad("k flat", r"k has shape \(3, 16\): want \(T, num_kv_heads", k=torch.zeros(3, 16)),
        bad("k empty rows", r"k has shape \(3, 0, 8\)", k=torch.zeros(3, 0, 8)),
        bad("v shape", r"v has shape \(2, 2, 8\): want .* \(3, 2, 8\)", v=torch.zeros(2, 2, 8)),
        bad("kv flat", r"kv has shape \(16, 2, 2, 8\): want", kv=torch.zeros(16, 2, 2, 8)),
        bad("kv heads", r"kv has shape .* 2, 2, 8\)$", kv=torch.zeros(4, 4, 2, 4, 8)),
        bad("kv without V", r"kv has shape .* 2, 2, 8\)$", kv=torch.zeros(4, 4, 1, 2, 8)),
        bad("slots shape", r"slot_mapping has shape \(4,\).* \(3,\)", slot_mapping=torch.arange(4)),
        bad("slots 2-d", r"slot_mapping has shape", slot_mapping=torch.zeros(3, 1).long()),
        bad("k dtype", r"k is torch.float64: want float32, ", k=torch.zeros(3, 2, 8).double()),
        bad("v dtype", r"v is torch.float16: want .* torch.float32", v=torch.zeros(3, 2, 8).half()),
        bad("kv dtype", r"kv is torch.bfloat16", kv=torch.zeros(4, 4, 2, 2, 8).bfloat16()),
        bad("slots dtype", r"slot_mapping is torch.int16", slot_mapping=torch.arange(3).short()),
        bad("v device", r"v is on meta: want .* of k", v=torch.zeros(3, 2, 8, device="meta")),
        bad("slots device", r"slot_mapping is on", slot_mapping=torch.arange(3).to("meta")),
        bad("k rows", r"k has strides \(16, 1, 2\)", k=torch.zeros(3, 8, 2).transpose(1, 2)),
        bad("v rows", r"v has strides \(32, 16, 2\)", v=torch.zeros(3, 2, 16)[..., ::2]),
        bad("kv strides", r"kv has strides", kv=torch.zeros(4, 8, 2, 2, 8)[:, ::2]),
        bad("slots strides", r"slot_mapping has strides", slot_mapping=torch.arange(6)[::2]),
    ],
)
@pytest.mark.parametrize("write", [write_cache, write_cache_reference])
def test_bad_arguments(write, changes, message):
    good = {
        "k": torch.zeros(3, 2, 8),
        "v": torch.zeros(3, 2, 8),
        "kv": torch.full((4, 4, 2, 2, 8), POISON),
        "slot_mapping": torch.arange(3),
    }
    arguments = {
        name: tensor if tensor.is_meta else tensor.to(DEVICE)
        for name, tensor in (good | changes).items()
    }
    with pytest.raises(ValueError, match=message):
        write(**arguments)
    assert "kv" in changes or (arguments["kv"] == POISON).all()


@pytest.mark.parametrize("write", [write_cache, write_cache_reference])
def test_a_slot_past_the_pool(write):
    kv = torch.zeros(2, 4, 2, 2, 8)
    with pytest.raises(ValueError, match=r"slot 8: want less than the pool's 8 slots"):
        write(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), kv, torch.tensor([8]))


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_import_stays_light_and_that_of_the_kernels_settles_the_interpreter():
    heavy = "transformers matplotlib ipywidgets IPython triton huggingface_hub minikv_kernels"
    code = f"""import os, sys, minikv
print([m for m in {heavy.split()} if m in sys.modules])
import minikv_kernels.mode as m; print(m.INTERPRETED, os.environ['TRITON_INTERPRET'])"""
    assert run_python(code, **NO_GPU).stdout == "[]\nTrue 1\n"


@pytest.mark.thorough
def test_compiled_kernels_refuse_cpu_tensors():
    code = (
        "import os, torch\n"
        "from minikv_kernels.cache_write import write_cache\n"
        "from minikv_kernels.mode import INTERPRETED\n"
        "print(INTERPRETED, os.environ['TRITON_INTERPRET'])\n"
        "x = torch.zeros(1, 1, 8)\n"
        "write_cache(x, x, torch.zeros(1, 1, 2, 1, 8), torch.zeros(1, dtype=torch.int64))\n"
    )
    result = run_python(code, **NO_GPU, TRITON_INTERPRET="0")
    assert result.stdout == "False 0\n"
    assert "ValueError: k is on cpu: compiled kernels need CUDA tensors" in result.stderr


@pytest.mark.thorough
def test_import_says_when_triton_came_first():
    result = run_python("import triton, minikv_kernels.mode", **NO_GPU)
    assert "ImportError: triton was imported before minikv_kernels" in result.stderr
    fine = run_python("import triton, minikv_kernels.mode", **NO_GPU, TRITON_INTERPRET="1")
    assert fine.returncode == 0, fine.stderr


@pytest.mark.thorough
def test_they_say_what_to_do_without_triton():
    result = run_python("import sys; sys.modules['triton'] = None; import minikv_kernels.mode")
    assert "ImportError: minikv_kernels needs Triton, which exists for Linux only" in result.stderr
