"""Measure the settings of the kernels on this GPU, and print lines for `kernels.settings.TUNED`.

python -m kernels.tune            # head dims 64 and 128, 16 and 32 bits
python -m kernels.tune 96 256     # others
"""

import argparse
import itertools
import sys

import torch
import triton

from kernels import settings
from kernels.mode import INTERPRETED
from kernels.paged_decode import make_scratch, paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.settings import Setting

KV_HEADS, GROUP, BLOCK_SIZE, CONTEXT = 8, 4, 16, 4096
NUM_SEQS = {"decode": 16, "prefill": 1}
CANDIDATES = {
    "decode": list(itertools.product((16,), (16, 32, 64, 128), (2, 4, 8), (3, 5, 7))),
    "prefill": list(itertools.product((16, 64, 128), (16, 32, 64, 128), (4, 8), (2, 3, 5))),
}


def workload(kernel: str, head_dim: int, dtype: torch.dtype):
    """A function of a setting that runs the kernel once: a batch of decodes in the middle of
    their contexts, or the second half of a long prompt."""
    torch.manual_seed(0)
    num_seqs, blocks = NUM_SEQS[kernel], CONTEXT // BLOCK_SIZE
    pool = (num_seqs * blocks, BLOCK_SIZE, 2, KV_HEADS, head_dim)
    kv = torch.randn(pool, device="cuda", dtype=dtype)
    tables = torch.randperm(len(kv), device="cuda").view(num_seqs, blocks)
    lens = torch.full((num_seqs,), CONTEXT, device="cuda")
    heads = KV_HEADS * GROUP
    if kernel == "decode":
        q = torch.randn(num_seqs, heads, head_dim, device="cuda", dtype=dtype)
        out, scratch = torch.empty_like(q), make_scratch(heads, KV_HEADS, head_dim, q.device)
        return lambda setting: paged_decode(q, kv, tables, lens, None, out, scratch, setting)
    q = torch.randn(CONTEXT // 2, heads, head_dim, device="cuda", dtype=dtype)
    out, start = torch.empty_like(q), torch.tensor([0, len(q)], device="cuda")
    return lambda setting: paged_prefill(q, kv, tables, lens, start, None, out, setting)


def measure(run, setting: Setting, expected: torch.Tensor) -> float:
    """Median time in milliseconds with a cold L2 cache; infinity if it does not run here."""
    try:
        out = run(setting)
    except triton.runtime.errors.OutOfResources:
        return float("inf")
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    return triton.testing.do_bench(lambda: run(setting), return_mode="median")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.tune", description=__doc__)
    parser.add_argument("head_dims", type=int, nargs="*", default=[64, 128])
    arguments = parser.parse_args()
    if INTERPRETED or not torch.cuda.is_available():
        sys.exit("kernels.tune: needs a CUDA device to measure on, and there is none here")
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"# {torch.cuda.get_device_name(device)}, triton {triton.__version__}, "
          f"torch {torch.__version__}")  # fmt: skip
    for kernel, head_dim in itertools.product(CANDIDATES, arguments.head_dims):
        for dtype in (torch.bfloat16, torch.float32):
            pad = settings.padded(head_dim)
            guess = settings.default(kernel, pad, dtype.itemsize)
            run = workload(kernel, head_dim, dtype)
            expected = run(guess).clone()
            candidates = dict.fromkeys([guess, *(Setting(*sizes) for sizes in CANDIDATES[kernel])])
            times = {setting: measure(run, setting, expected) for setting in candidates}
            best = min(times, key=times.get)
            key = (kernel, pad, dtype.itemsize, settings.capability(device))
            print(f"    {key}: {best},  # {times[best]:.4f} ms, untuned {times[guess]:.4f} ms")


if __name__ == "__main__":
    main()
