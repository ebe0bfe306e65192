"""How large the tiles are and how many warps work on them, for each GPU and head dim.

A table, and not `@triton.autotune`: a tuner would run inside the first steps of an
engine, could pick differently every time, and does not exist in the interpreter.
`python -m kernels.tune` measures on your GPU and prints the lines for TUNED.
"""

from typing import NamedTuple

import torch
import triton

MIN_SPLIT = 128  # tokens: a split shorter than this is not worth its reduction
PROGRAMS_PER_SM = 4  # decode programs that the splits of a batch may add up to


class Setting(NamedTuple):
    """Sizes of one kernel. `rows` and `tile` are powers of two, at least 16 (`tl.dot`)."""

    rows: int  # rows of q in one dot product; raised to the GQA group if that is larger
    tile: int  # keys in one iteration
    num_warps: int
    # Iterations under way at once. A tile's block ids are loaded before its K and V can be, and
    # each of the two waits takes half of them: 3 hold one tile of K and V, 5 hold two.
    num_stages: int


# (kernel, padded head_dim, itemsize, compute capability) -> the fastest one measured. Nothing has
# been measured on a GPU yet, so every size in use is the untuned guess of `default`.
TUNED: dict[tuple[str, int, int, int], Setting] = {}


def choose(kernel: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> Setting:
    """The setting of "decode" or "prefill": a measured one if there is one, else a guess."""
    pad = padded(head_dim)
    key = (kernel, pad, dtype.itemsize, capability(device))
    return TUNED.get(key) or default(kernel, pad, dtype.itemsize)


def default(kernel: str, pad: int, itemsize: int) -> Setting:
    """Not measured on a GPU yet. Small enough for the 99 KiB of shared memory that a program
    has on sm_89, the least of the GPUs that the tests compile for."""
    row = pad * itemsize  # bytes
    if kernel == "decode":
        return Setting(16, 64 if row <= 128 else 32 if row <= 512 else 16, 4, 5)
    if itemsize == 4:  # without tensor cores: products made of registers, many instructions
        return Setting(16, 16, 4, 3)
    return Setting(64 if pad > 128 else 128, 32 if pad > 128 else 64, 4 if pad <= 64 else 8, 3)


def padded(head_dim: int) -> int:
    """The columns of a tile: a power of two, at least the 16 that `tl.dot` wants."""
    return max(16, triton.next_power_of_2(head_dim))


def rows_for(setting: Setting, group: int) -> int:
    """Rows of a tile that holds at least one whole GQA group."""
    return max(setting.rows, triton.next_power_of_2(group))


def capability(device: torch.device) -> int:
    """80, 90, ...; 0 in the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def num_programs(device: torch.device) -> int:
    """How many decode programs fill the device. The interpreter has no size; 64 lets it split."""
    if device.type != "cuda":
        return 64
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
