"""Every kernel, compiled for four GPUs without having one: what the interpreter lets through.

Compiler and interpreter do not share a process, so this file is also the program that
compiles: `TRITON_INTERPRET=0 python tests/test_08_compile.py 90` prints what came out.
"""

import importlib.util
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

if __name__ != "__main__" and importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton here (it is for Linux)", allow_module_level=True)

from kernels import block_copy, cache_write, paged_decode, paged_prefill, settings
from kernels.checks import DTYPES

# Shared memory that one program may have, in KiB: CUDA's tuning guides for Ampere, Ada, Hopper
# and Blackwell, section "Occupancy".
LIMITS = {80: 163, 89: 99, 90: 227, 100: 227}
# sm_89 has the least, so all head dims are compiled for it; for the others, some.
HEAD_DIMS = {89: (32, 64, 96, 128, 256)}
FLOAT32_HEAD_DIMS = {89: (32, 64, 128, 256)}
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


# ── The program ───────────────────────────────────────────────────────────────────────────


class Compiler:
    """Stands in for a kernel: compiles it for what a launch would, and notes the result."""

    def __init__(self, kernel, arch, results):
        self.kernel, self.arch, self.results = kernel, arch, results

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments, num_warps=4, num_stages=3, **constants):
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile

        signature, attributes = dict.fromkeys(self.kernel.arg_names, "constexpr"), {}
        divisible = [["tt.divisibility", 16]]
        for place, (name, value) in enumerate(
            zip(self.kernel.arg_names, arguments, strict=False)
        ):  # as Triton specialises a launch: 1 is a constant, multiples of 16 are known to be
            if isinstance(value, torch.Tensor):
                signature[name], attributes[(place,)] = f"*{TYPES[value.dtype]}", divisible
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif value == 1:
                constants[name] = 1
            else:
                signature[name] = "i32" if value < 2**31 else "i64"
                if value % 16 == 0:
                    attributes[(place,)] = divisible
        compiled = compile(
            ASTSource(self.kernel, signature, constants, attributes),
            target=GPUTarget("cuda", self.arch, 32),
            options=dict(num_warps=num_warps, num_stages=num_stages),
        )
        assert compiled.asm["cubin"]
        result = {"kernel": self.kernel.__name__, "shared": compiled.metadata.shared}
        names = ("HEAD_DIM", "PAD", "ROWS", "TILE", "GROUP", "SEQS", "WINDOW", "BLOCK_SIZE")
        result |= {name: constants[name] for name in names if name in constants}
        result |= {"type": next(iter(signature.values())), "num_stages": num_stages}
        ptx = compiled.asm["ptx"]
        result["tf32"] = ".tf32" in ptx
        result["tensor_cores"] = any(op in ptx for op in ("mma.sync", "wgmma", "tcgen05.mma"))
        self.results.append(result)


def launch_attention(head_dim=64, group=4, dtype=torch.bfloat16, num_seqs=16, index=torch.int64,
                     block_size=16, window=None, chosen=None):  # fmt: skip
    """Decode, its reduction and prefill. Tables are wide, so that splits are possible."""
    heads = 2 * group
    q = torch.zeros(num_seqs, heads, head_dim, dtype=dtype)
    kv = torch.zeros(1, block_size, 2, 2, head_dim, dtype=dtype)
    tables = torch.zeros(num_seqs, 4096, dtype=index)
    lens = torch.ones(num_seqs, dtype=index)
    start = torch.arange(num_seqs + 1, dtype=index)
    for kernel in ("decode", "prefill") if chosen is None else chosen:
        setting = chosen and chosen[kernel]
        if kernel == "decode":
            scratch = paged_decode.make_scratch(heads, 2, head_dim, q.device)
            paged_decode.paged_decode(q, kv, tables, lens, window, scratch=scratch, setting=setting)
        else:
            paged_prefill.paged_prefill(q, kv, tables, lens, start, window, setting=setting)


def compile_all(arch):
    """Compile all that can be chosen for this GPU, and print a line of JSON about each."""
    results = []
    for module in (paged_decode, paged_prefill, block_copy, cache_write):
        module.check_runnable = lambda name, tensor: None  # nothing runs: CPU tensors will do
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, Compiler(getattr(module, name), arch, results))
    settings.capability = lambda device: arch
    for head_dim in HEAD_DIMS.get(arch, (128, 256)):
        launch_attention(head_dim)
    for head_dim in FLOAT32_HEAD_DIMS.get(arch, (128,)):
        launch_attention(head_dim, dtype=torch.float32)
    for (kernel, pad, itemsize, capability), setting in settings.TUNED.items():
        if capability == arch:
            dtype = torch.float32 if itemsize == 4 else torch.bfloat16
            launch_attention(pad, dtype=dtype, chosen={kernel: setting})
    if arch == 90:  # what has little to do with the GPU, once
        launch_attention(8, dtype=torch.float16, index=torch.int32, block_size=5, num_seqs=1)
        launch_attention(group=71, window=100, block_size=1)
        launch_attention(group=17, num_seqs=300, window=1, block_size=256)
    for dtype, index in itertools.product(DTYPES, (torch.int32, torch.int64)):
        pool = torch.zeros(2, 2, 16, 2, 2, 20, dtype=dtype)
        block_copy.copy_blocks(pool, pool, torch.tensor([[0, 1]], dtype=index))
        token, slots = torch.zeros(1, 2, 20, dtype=dtype), torch.zeros(1, dtype=index)
        cache_write.write_cache(token, token, pool[0], slots)
    print("\n".join(json.dumps(result) for result in results))


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
    sys.exit()


# ── The tests ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """`compiled(arch)`: what came out, a list of dicts. All four GPUs are compiled for at once."""
    cache = str(tmp_path_factory.mktemp("triton"))
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    programs = {
        arch: subprocess.Popen([sys.executable, __file__, str(arch)], **pipe) for arch in LIMITS
    }
    results = {}

    def get(arch):
        if arch not in results:
            out, error = programs[arch].communicate()
            assert programs[arch].returncode == 0, error
            results[arch] = [json.loads(line) for line in out.splitlines()]
        return results[arch]

    yield get
    for program in programs.values():
        program.kill()
        program.wait()


on_every_gpu = pytest.mark.parametrize("arch", LIMITS)


@on_every_gpu
def test_every_kernel_compiles_and_fits_into_shared_memory(compiled, arch):
    results = compiled(arch)
    for result in results:
        assert result["shared"] <= LIMITS[arch] * 1024, result
    assert {result["kernel"] for result in results} == {
        "paged_decode_kernel", "join_splits_kernel", "paged_prefill_kernel",
        "copy_blocks_kernel", "cache_write_kernel",
    }  # fmt: skip


@on_every_gpu
def test_products_are_done_where_they_should_be(compiled, arch):
    for result in compiled(arch):
        if result["kernel"] in ("paged_decode_kernel", "paged_prefill_kernel"):
            assert result["tensor_cores"] == (result["type"] != "*fp32"), result
            assert not result["tf32"], result


def test_copies_need_no_shared_memory(compiled):
    for result in compiled(90):
        if result["kernel"] in ("copy_blocks_kernel", "cache_write_kernel"):
            assert result["shared"] == 0
