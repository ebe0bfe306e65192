"""How large the tiles are and how many warps work on them, for each GPU and head dim.

Given instead of found by `@triton.autotune`, because a tuner would run within the first steps of an
engine, might choose differently every time, and does not exist in the interpreter. Nothing has been
measured on a GPU yet: the sizes come from the compiler's output and from what fits into registers
and shared memory. To try others, pass `setting` to a kernel.
"""

import math
from typing import NamedTuple

import torch
import triton

MIN_SPLIT = 128  # tokens: a split shorter than this is not worth its reduction
# Decode programs that the splits of a batch may add up to: three, for which an SM of sm_90 has
# shared memory at a time, and three more, so that an SM that finishes early has work.
PROGRAMS_PER_SM = 6


class Setting(NamedTuple):
    """Sizes of one kernel. `rows` and `tile` are powers of two, at least the 16 that a tensor core
    multiplies at once."""

    rows: int  # rows of q in one dot product; raised to the GQA group if that is larger
    tile: int  # keys in one iteration
    num_warps: int
    # Iterations under way at once. A tile's block ids must be loaded before its K and V, and each
    # of the two waits takes half of the stages: 3 stages hold one tile of K and V, 5 two, 7 three.
    # With one stage, nothing is loaded while a tile is computed.
    num_stages: int
    columns: int = 0  # decode: KV heads side by side, as many as fit (`packed`); 0 for one


def choose(kernel: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> Setting:
    """The setting of "decode", "prefill", "codes_decode" or "codes_prefill".

    A program has 227 KiB of shared memory on sm_90 and sm_100, 163 on sm_80, 99 on sm_89 and, by
    assumption, on any other.
    """
    pad, itemsize, gpu = padded(head_dim), dtype.itemsize, capability(device)
    # Tiles of codes are smaller: codes, scales and floats of a tile share the registers.
    if kernel == "codes_decode":
        return Setting(16, max(16, min(32, 4096 // pad)), 4, 3)
    if kernel == "codes_prefill":
        return Setting(64 if pad <= 128 and itemsize == 2 else 16, 32 if pad <= 128 else 16, 4, 3)
    if kernel == "decode" and itemsize == 2:
        # 256 columns are 512 bytes of a token: what a warp loads at once. 32 tokens of K and V,
        # twice, and three such programs on an SM of sm_90: 192 KiB, half of it under way.
        return Setting(16, 32 if gpu in (80, 90, 100) else 16, 4, 5, 256)
    if kernel == "decode":
        return Setting(16, max(16, min(64, 4096 // pad)), 4, 5)
    if itemsize == 4:  # without tensor cores: products made of registers, many instructions
        return Setting(16, 16, 4, 3)
    if pad <= 64:
        return Setting(128, 64, 8, 5)
    if pad == 128:
        return Setting(128, {90: 128, 100: 64}.get(gpu, 32), 8, 5)
    return Setting(128, 32, 8, 5) if gpu in (90, 100) else Setting(64, 16, 8, 5)


def padded(head_dim: int) -> int:
    """The columns of a tile: a power of two, at least the 16 that `tl.dot` wants."""
    return max(16, triton.next_power_of_2(head_dim))


def packed(setting: Setting, head_dim: int, num_kv_heads: int, group: int) -> int:
    """KV heads that one decode program serves: a power of two that divides their number. Their
    query heads fit into the rows, and their K into the columns."""
    most = max(1, min(setting.rows // group, setting.columns // head_dim))
    return math.gcd(num_kv_heads, 2 ** (most.bit_length() - 1))


def rows_for(setting: Setting, group: int) -> int:
    """Rows of a tile that holds at least one whole GQA group."""
    return max(setting.rows, triton.next_power_of_2(group))


def lanes(num_seqs: int) -> int:
    """Room to count sequences: a power of two, and at least 32, one for each lane of a warp, so
    that the compiler runs for few batch sizes."""
    return max(32, triton.next_power_of_2(num_seqs))


def capability(device: torch.device) -> int:
    """80, 90, ...; 0 in the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def num_programs(device: torch.device) -> int:
    """How many decode programs fill the device. In the interpreter 64, so that it splits, too."""
    if device.type != "cuda":
        return 64
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
