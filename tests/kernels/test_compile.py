"""Every kernel, compiled for four GPUs without having one: what the interpreter lets through.

Compiler and interpreter do not share a process, so this file is also the program that
compiles: `TRITON_INTERPRET=0 python tests/kernels/test_compile.py 90` prints what came out.
"""

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache

import pytest
import torch

if __name__ != "__main__" and importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton here (it is for Linux)", allow_module_level=True)

from minikv_kernels import (
    block_copy,
    cache_write,
    codes_attention,
    codes_write,
    paged_decode,
    paged_prefill,
    settings,
    splits,
)
from minikv_kernels.arguments import DTYPES
from minikv_kernels.codes import NAMES, Codes

import triton  # isort: skip  after kernels, which settles the interpreter

# Shared memory that one program may have, in KiB: CUDA's tuning guides for Ampere, Ada, Hopper
# and Blackwell, section "Occupancy". An SM has 1 KiB more, and keeps 1 KiB for each program.
LIMITS = {80: 163, 89: 99, 90: 227, 100: 227}
REGISTERS = 65536  # 32-bit ones of an SM, the same guides
# sm_89 has the least, so each head dim whose tiles are of another shape is compiled for it: 32 has
# the tiles of 64, narrower. For the others, some. The largest first: see `Reduction`.
HEAD_DIMS = {89: (256, 128, 64), 90: (256, 128, 64)}
# Products in float32 are made without tensor cores, on sm_80 as on sm_89 and on sm_100 as on sm_90,
# each time with at least as much memory. Above 64, tiles get shorter: the first and the last.
FLOAT32_HEAD_DIMS = {89: (256,), 90: (64,)}
# The tiles of codes are the same on all GPUs: every format is compiled where memory is least, and
# the one with the most code where instructions differ, there with a head dim that compiles in half
# the time. sm_80 has the instructions of sm_89, and sm_90 is given odd shapes of codes below.
CODES = {89: NAMES, 100: ("int4",)}
CODES_HEAD_DIM = {89: 128, 100: 64}
KV_HEADS = 8


# ── The program ───────────────────────────────────────────────────────────────────────────


OF_CODES = ("codes_decode_kernel", "codes_prefill_kernel")


def resources(cubin: bytes) -> dict[str, int]:
    """{"REG": registers of a thread, "STACK": bytes of it that are not in registers, ...}"""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def summary(result: dict) -> dict:
    """What `compiled.Compiler` notes, with facts from the machine text."""
    ptx, cubin = result.pop("ptx"), bytes.fromhex(result.pop("cubin"))
    products = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
    return result | resources(cubin) | {
        "tf32": ".tf32" in ptx,
        "products": [name for name in products if name in ptx],
        # bytes that a thread copies at once, behind its back: K and V, block ids
        "copies": [int(n, 0) for n in re.findall(r"cp\.async\.c[ag]\..*\], (\w+)", ptx)],
    }  # fmt: skip


def launch_attention(head_dim=64, group=4, dtype=torch.bfloat16, num_seqs=16, index=torch.int64,
                     block_size=16, window=None):  # fmt: skip
    """Decode, its reduction and prefill. Tables are wide, so that splits are possible."""
    heads = KV_HEADS * group
    q = torch.zeros(num_seqs, heads, head_dim, dtype=dtype)
    kv = torch.zeros(1, block_size, 2, KV_HEADS, head_dim, dtype=dtype)
    tables = torch.zeros(num_seqs, 4096, dtype=index)
    lens = torch.ones(num_seqs, dtype=index)
    start = torch.arange(num_seqs + 1, dtype=index)
    scratch = splits.make_scratch(heads, KV_HEADS, head_dim, q.device)
    paged_decode.paged_decode(q, kv, tables, lens, window, scratch=scratch)
    paged_prefill.paged_prefill(q, kv, tables, lens, start, window)


def launch_codes(name, head_dim=128, group=4, dtype=torch.bfloat16, block_size=16, window=None):
    """What a step over codes launches: the write, decode and prefill."""
    rows = KV_HEADS, block_size
    low, width = name == "int4", head_dim // 2 if name == "int4" else head_dim
    kind = {"float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}
    code = torch.zeros(1, *rows, width, dtype=kind.get(name, torch.uint8))
    ends = {}
    if low:
        k_end = torch.zeros(1, KV_HEADS, head_dim, dtype=torch.bfloat16)
        v_end = torch.zeros(1, *rows, max(1, head_dim // 32), dtype=torch.bfloat16)
        ends = dict(k_scale=k_end, k_low=k_end, v_scale=v_end, v_low=v_end)
    elif name in ("int8", "fp8"):
        end = torch.zeros(1, *rows, dtype=torch.bfloat16)
        ends = dict(k_scale=end, v_scale=end)
    codes = Codes(name, code, code, **ends)
    q = torch.zeros(16, KV_HEADS * group, head_dim, dtype=dtype)
    k, keys = q[:, :KV_HEADS].contiguous(), torch.zeros(4, *rows, head_dim, dtype=dtype)
    index = torch.zeros(16, dtype=torch.int64)
    own = codes_attention.FloatKeys(k, keys, index) if low else None
    closing = torch.zeros(1, 3, dtype=torch.int64)
    codes_write.write_codes(k, k, codes, index, *((keys, index, closing) if low else ()))
    tables, lens, start = torch.zeros(16, 4096, dtype=torch.int64), index + 1, torch.arange(17)
    codes_attention.codes_decode(q, codes, tables, lens, own, window)
    codes_attention.codes_prefill(q, codes, tables, lens, start, own, window)


def compile_all(arch):
    """Compile all that can be chosen for this GPU, and print a line: the list of results."""
    from minikv.course.chapters.ch08_triton_paged_attention.compiled import (
        Compiler,  # refuses to be imported by an interpreter
    )

    class Reduction(Compiler):
        """Compiles what joins splits, once for each way that it is called."""

        def launch(self, *arguments, **constants):
            for one in self.results:
                if one["kernel"] == self.kernel.__name__ and all(
                    one[name] == constants[name] for name in ("WINDOW", "SEQS")
                ):
                    return
            super().launch(*arguments, **constants)

    results = []
    modules = (
        paged_decode, splits, paged_prefill, block_copy, cache_write, codes_write, codes_attention,
    )  # fmt: skip
    for module in modules:
        module.check_runnable = lambda name, tensor: None  # nothing runs: CPU tensors will do
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            kernel = getattr(module, name)  # or what stands for it since the last `arch`
            kernel = kernel.kernel if isinstance(kernel, Compiler) else kernel
            kind = Reduction if module is splits else Compiler
            setattr(module, name, kind(kernel, arch, results))
    settings.capability = lambda device: arch
    for head_dim in HEAD_DIMS.get(arch, (128, 64)):
        launch_attention(head_dim)
    for head_dim in FLOAT32_HEAD_DIMS.get(arch, ()):
        launch_attention(head_dim, dtype=torch.float32)
    for name in CODES.get(arch, ()):
        launch_codes(name, CODES_HEAD_DIM[arch])
    if arch == 90:  # what has little to do with the GPU, once
        launch_attention(8, 71, torch.float16, 1, torch.int32, block_size=5, window=100)
        launch_attention(group=17, num_seqs=300, window=1, block_size=256)
        launch_codes("int4", 20, 3, torch.float32, 5, window=9)
        launch_codes("int4", 256, 1, torch.float16, 256)
        launch_codes("int8", 96, 17, torch.float16, 1, window=1)
    every = itertools.product(DTYPES, (torch.int32, torch.int64))
    for dtype, index in every if arch == 90 else [(torch.bfloat16, torch.int64)]:
        pool = torch.zeros(2, 2, 16, 2, 2, 20, dtype=dtype)
        block_copy.copy_blocks(pool, pool, torch.tensor([[0, 1]], dtype=index))
        token, slots = torch.zeros(1, 2, 20, dtype=dtype), torch.zeros(1, dtype=index)
        cache_write.write_cache(token, token, pool[0], slots)
    print(json.dumps([summary(result) for result in results]))


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
    sys.exit()


# ── The tests ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """`compiled(arch)`: what came out, a list of dicts."""
    folder = str(tmp_path_factory.mktemp("triton"))
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

    @cache
    def get(arch):
        line = [sys.executable, __file__, str(arch)]
        done = subprocess.run(line, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return get


# Notebook 08 compiles decode, and more in its checks. 90 alone is given odd shapes here, too.
pytestmark = pytest.mark.thorough
on_every_gpu = pytest.mark.parametrize("arch", (100, 90, 80, 89))


@on_every_gpu
def test_every_kernel_compiles_and_fits_into_shared_memory(compiled, arch):
    results = compiled(arch)
    for result in results:
        # Without tensor cores it takes as much everywhere, and has to fit where there is least.
        limit = min(LIMITS.values()) if result["type"] == "*fp32" else LIMITS[arch]
        assert result["shared"] <= limit * 1024, result
    every = {
        "paged_decode_kernel", "join_splits_kernel", "paged_prefill_kernel",
        "copy_blocks_kernel", "cache_write_kernel",
    }  # fmt: skip
    if arch != 80:
        every |= {*OF_CODES, "write_codes_kernel", "close_blocks_kernel"}
    assert {result["kernel"] for result in results} == every


def goals(results, kernel):
    """The kernel's results for the shapes that the goals are set for: 32 and 8 heads, 16 bits."""
    found = [
        result for result in results if result["kernel"] == kernel and result["type"] == "*bf16"
        and result["HEAD_DIM"] in (64, 128) and result["GROUP"] == 4
    ]  # fmt: skip
    assert {result["HEAD_DIM"] for result in found} == {64, 128}
    return found


@on_every_gpu
def test_products_are_done_where_they_should_be(compiled, arch):
    attention = ("paged_decode_kernel", "paged_prefill_kernel")
    for result in compiled(arch):
        assert not result["tf32"], result
        on_tensor_cores = result["kernel"] in (*attention, *OF_CODES) and result["type"] != "*fp32"
        assert bool(result["products"]) == on_tensor_cores, result
    # Each GPU's own products for the 128 rows of prefill; decode has too few rows for them.
    unit = {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(arch, "mma.sync")
    for kernel, products in zip(attention, (["mma.sync"], [unit]), strict=True):
        for result in goals(compiled(arch), kernel):
            assert result["products"] == products, result


@on_every_gpu
@pytest.mark.parametrize("kernel", ["paged_decode_kernel", "paged_prefill_kernel"])
def test_k_and_v_are_on_their_way_while_a_tile_is_computed(compiled, arch, kernel):
    for result in goals(compiled(arch), kernel):
        width = result["PACK"] * result["HEAD_DIM"] if "PACK" in result else result["HEAD_DIM"]
        tiles = (result["num_stages"] - 1) // 2  # see settings.Setting
        assert tiles >= 2, result
        # 16 bytes at a time: before each loop so many tiles, and one in it. Prefill has two loops.
        threads, loops = 32 * result["num_warps"], 1 if "PACK" in result else 2
        each = 2 * result["TILE"] * width * 2 // (16 * threads)
        assert result["copies"].count(16) >= loops * (tiles + 1) * each, result
        assert set(result["copies"]) == {8, 16}, result  # 8: block ids


@on_every_gpu
def test_nothing_spills(compiled, arch):
    for result in compiled(arch):
        if result["kernel"] in OF_CODES:  # their tiles are not tuned to a GPU yet
            assert result["STACK"] <= 512, result
        elif result["kernel"] not in ("paged_decode_kernel", "paged_prefill_kernel"):
            assert result["STACK"] == 0, result
    for kernel in ("paged_decode_kernel", "paged_prefill_kernel"):
        for result in goals(compiled(arch), kernel):
            # The largest tiles need every register: some Triton may be out by a few.
            assert result["STACK"] <= 32, result


@on_every_gpu
def test_enough_is_read_at_a_time(compiled, arch):
    # Little's law: an SM of a fast GPU has to have some 40 KiB under way to read at full speed
    # (4.8 TB/s over 132 SMs, 1 microsecond from asking to getting), one of sm_89 some 8.
    for result in goals(compiled(arch), "paged_decode_kernel"):
        assert result["PACK"] * result["HEAD_DIM"] * 2 == 512  # what a warp loads at once
        registers = 32 * result["num_warps"] * (-(-result["REG"] // 8) * 8)
        memory = (LIMITS[arch] + 1) * 1024 // (result["shared"] + 1024)
        programs = min(memory, REGISTERS // registers)
        tile = 2 * result["TILE"] * 512  # bytes
        under_way = programs * (result["num_stages"] - 1) // 2 * tile
        assert under_way >= (64 if arch == 89 else 128) * 1024, result
        if arch == 90:
            assert 2 * programs == settings.PROGRAMS_PER_SM


def test_copies_need_no_shared_memory(compiled):
    for result in compiled(100):
        if result["kernel"] in ("copy_blocks_kernel", "cache_write_kernel"):
            assert result["shared"] == 0
