"""What `gpu_kernels` times: attention over random blocks, in regions that take turns.

One pool of random values serves every case. Its blocks are dealt out in random order to
block tables, of several regions that have no block in common: between two launches on
one region, the others have been through the L2 cache, and nothing of it is left there.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minikv_kernels.paged_decode import paged_decode, paged_decode_reference
from minikv_kernels.paged_prefill import paged_prefill
from minikv_kernels.splits import make_scratch

DTYPE = torch.bfloat16
SPARE = 1.25  # a pool has so many times the blocks that are dealt out
LAUNCHES = 16  # in one go: a graph of one short launch would time the start of the graph
ROWS = 4  # of each region's output, compared with the reference
TOLERANCE = 0.01  # ‖out − reference‖ / ‖reference‖, bfloat16


@dataclass(frozen=True)
class Case:
    """A batch of decodes, each at the end of its context; or the prefill of one prompt."""

    head_dim: int
    lens: tuple[int, ...]  # tokens of each context
    block_size: int = 16
    prefill: bool = False
    num_heads: int = 32
    num_kv_heads: int = 8

    def __post_init__(self):
        if self.prefill and len(self.lens) != 1:
            raise ValueError(f"lens: a prefill is of one prompt here, was {self.lens}")

    @property
    def block_shape(self) -> tuple[int, ...]:
        return (self.block_size, 2, self.num_kv_heads, self.head_dim)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one launch must read."""
        return sum(self.lens) * 2 * self.num_kv_heads * self.head_dim * DTYPE.itemsize

    @property
    def prefill_flops(self) -> float:
        """Two products, each a multiplication and an addition; a query sees half the keys."""
        [length] = self.lens
        return 2 * 2 * length * length / 2 * self.num_heads * self.head_dim

    def num_regions(self, l2_bytes: int) -> int:
        """So many that all others together are at least twice the L2 cache."""
        return 1 + math.ceil(2 * l2_bytes / self.kv_bytes)

    def num_blocks(self, l2_bytes: int) -> int:
        """Of the pool."""
        dealt = sum(-(-length // self.block_size) for length in self.lens)
        return math.ceil(SPARE * self.num_regions(l2_bytes) * dealt)

    def num_values(self, l2_bytes: int) -> int:
        """Numbers in the pool."""
        return self.num_blocks(l2_bytes) * math.prod(self.block_shape)


class Workload:
    """A case on a device: `run` launches it on one region after the other."""

    def __init__(self, case: Case, values: torch.Tensor, l2_bytes: int):
        """`values`: at least `case.num_values` random numbers, which become the pool."""
        self.case, device = case, values.device
        regions, num_blocks = case.num_regions(l2_bytes), case.num_blocks(l2_bytes)
        self.kv = values[: case.num_values(l2_bytes)].view(num_blocks, *case.block_shape)
        self.tables = deal(case, regions, num_blocks).to(device)  # (R, S, B)
        self.lens = torch.tensor(case.lens, device=device)
        queries = sum(case.lens) if case.prefill else len(case.lens)
        self.start = torch.tensor([0, queries], device=device)
        generator = torch.Generator(device).manual_seed(1)
        shape = (regions, queries, case.num_heads, case.head_dim)
        self.q = torch.randn(shape, dtype=DTYPE, device=device, generator=generator)
        self.out = torch.empty_like(self.q)
        self.scratch = make_scratch(case.num_heads, case.num_kv_heads, case.head_dim, device)
        self.laps = math.ceil(LAUNCHES / regions)

    @property
    def launches(self) -> int:
        """In one call of `run`."""
        return self.laps * len(self.tables)

    def run(self) -> None:
        for _ in range(self.laps):
            for region in range(len(self.tables)):
                self.launch(region)

    def launch(self, region: int) -> None:
        q, out, tables = self.q[region], self.out[region], self.tables[region]
        if self.case.prefill:
            paged_prefill(q, self.kv, tables, self.lens, self.start, None, out)
        else:
            paged_decode(q, self.kv, tables, self.lens, None, out, self.scratch)

    def poison(self) -> None:
        self.out.fill_(float("nan"))

    def check(self) -> float:
        """The largest error of any region, after `poison` and launches. Raises RuntimeError if
        a number was not written, or rows differ from the reference."""
        errors = []
        for region, (q, out, tables) in enumerate(zip(self.q, self.out, self.tables, strict=True)):
            if not torch.isfinite(out).all():
                raise RuntimeError(f"{self.case}: region {region} has numbers not written")
            rows = torch.linspace(0, len(q) - 1, ROWS, device=q.device).long()
            if self.case.prefill:  # a query sees the keys up to its own, as a decode there would
                tables, lens = tables.expand(ROWS, -1), rows + 1
            else:
                tables, lens = tables[rows], self.lens[rows]
            expected = paged_decode_reference(q[rows], self.kv, tables, lens).float()
            error = float((out[rows].float() - expected).norm() / expected.norm())
            if not error <= TOLERANCE:
                raise RuntimeError(f"{self.case}: region {region} is wrong by {error:.2g}")
            errors.append(error)
        return max(errors)


class Contiguous:
    """The same attention by torch's own kernel, K and V of each sequence in one piece: as many
    bytes in as many regions, contexts of one length."""

    def __init__(self, workload: Workload, values: torch.Tensor):
        case, regions = workload.case, len(workload.tables)
        self.causal, self.laps = case.prefill, workload.laps
        shape = (regions, 2, len(case.lens), case.num_kv_heads, case.lens[0], case.head_dim)
        self.kv = values[: math.prod(shape)].view(shape)
        q = workload.q  # (R, T, H, D)
        # (R, S, H, queries, D)
        self.q = q.transpose(1, 2)[:, None] if case.prefill else q[:, :, :, None]

    def run(self) -> None:
        for _ in range(self.laps):
            for q, (k, v) in zip(self.q, self.kv, strict=True):
                F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)


def deal(case: Case, regions: int, num_blocks: int) -> torch.Tensor:
    """Block tables of all regions, (R, S, B): no block twice, in random order. Places past a
    context hold -1, which no kernel may read."""
    needed = [-(-length // case.block_size) for length in case.lens]
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2))
    tables = torch.full((regions, len(needed), max(needed)), -1)
    hands = iter(order.split_with_sizes([*needed * regions, num_blocks - regions * sum(needed)]))
    for region in tables:
        for row, count in zip(region, needed, strict=True):
            row[:count] = next(hands)
    return tables


def skewed(total: int, num_seqs: int) -> tuple[int, ...]:
    """Lengths that sum to `total`, the i-th longest about 1/i of the longest, shuffled."""
    weights = [1 / place for place in range(1, num_seqs + 1)]
    lens = [int(total * weight / sum(weights)) for weight in weights]
    lens[0] += total - sum(lens)
    order = torch.randperm(num_seqs, generator=torch.Generator().manual_seed(3)).tolist()
    return tuple(lens[place] for place in order)
