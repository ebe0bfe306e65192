"""What the compiler makes of a kernel, for a GPU that need not be there.

Compiler and interpreter do not share a process. `decode` compiles in one of its own, whatever
this one does; in a process with TRITON_INTERPRET=0 a `Compiler` can take any kernel's place.
"""

import json
import os
import subprocess
import sys
import tempfile

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

import minikv_kernels.paged_decode as paged_decode
import minikv_kernels.splits as splits

TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.int32: "i32", torch.int64: "i64", torch.bool: "i1", torch.int8: "i8", torch.uint8: "u8",
}  # fmt: skip


class Compiler:
    """Stands in for a kernel: a launch compiles it for those arguments, and notes the result.

    results: gets a dict for each launch: kernel (its name), shared (bytes of shared memory a
        program needs), type (of its first argument), ptx (text), cubin (hex text), num_warps,
        num_stages, and the constants of the launch.
    """

    def __init__(self, kernel, arch: int, results: list[dict]):
        self.kernel, self.arch, self.results = kernel, arch, results

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments, num_warps: int = 4, num_stages: int = 3, **constants) -> None:
        signature, attributes = dict.fromkeys(self.kernel.arg_names, "constexpr"), {}
        for place, (parameter, value) in enumerate(
            zip(self.kernel.params, arguments, strict=False)
        ):  # as Triton specialises a launch: 1 is a constant, multiples of 16 are known to be
            name, known = parameter.name, not parameter.do_not_specialize
            aligned = known and not parameter.do_not_specialize_on_alignment
            if isinstance(value, torch.Tensor):
                signature[name] = f"*{TYPES[value.dtype]}"
            elif isinstance(value, float):
                signature[name], aligned = "fp32", False
            elif value == 1 and known:
                constants[name], aligned = 1, False
            else:
                signature[name] = "i32" if value < 2**31 else "i64"
                aligned = aligned and value % 16 == 0
            if aligned:
                attributes[(place,)] = [["tt.divisibility", 16]]
        compiled = compile(
            ASTSource(self.kernel, signature, constants, attributes),
            target=GPUTarget("cuda", self.arch, 32),
            options=dict(num_warps=num_warps, num_stages=num_stages),
        )
        self.results.append(
            constants
            | {
                "kernel": self.kernel.__name__, "type": next(iter(signature.values())),
                "shared": compiled.metadata.shared, "ptx": compiled.asm["ptx"],
                "cubin": compiled.asm["cubin"].hex(),
                "num_warps": num_warps, "num_stages": num_stages,
            }
        )  # fmt: skip


def decode(
    arch: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int = 16,
    num_seqs: int = 16,
) -> list[dict]:  # fmt: skip
    """The decode kernel in bfloat16 and its reduction, compiled for sm_<arch> in a process of
    its own: what `Compiler` notes about each, the decode kernel first. Raises RuntimeError with
    what the compiler says."""
    sizes = [arch, num_heads, num_kv_heads, head_dim, block_size, num_seqs]
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        done = subprocess.run(
            [sys.executable, "-m", __name__, *map(str, sizes)],
            env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the compiler failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def _decode_here(arch, num_heads, num_kv_heads, head_dim, block_size, num_seqs) -> list[dict]:
    results: list[dict] = []
    paged_decode.check_runnable = lambda name, tensor: None  # nothing runs: CPU tensors will do
    paged_decode.settings.capability = lambda device: arch
    for module, name in ((paged_decode, "paged_decode_kernel"), (splits, "join_splits_kernel")):
        setattr(module, name, Compiler(getattr(module, name), arch, results))
    q = torch.zeros(num_seqs, num_heads, head_dim, dtype=torch.bfloat16)
    kv = torch.zeros(1, block_size, 2, num_kv_heads, head_dim, dtype=torch.bfloat16)
    tables = torch.zeros(num_seqs, 4096, dtype=torch.int64)  # wide: splits are possible
    lens = torch.ones(num_seqs, dtype=torch.int64)
    paged_decode.paged_decode(q, kv, tables, lens)
    return results


if __name__ == "__main__":
    json.dump(_decode_here(*map(int, sys.argv[1:])), sys.stdout)
