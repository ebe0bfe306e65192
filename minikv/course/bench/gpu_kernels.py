"""What `bench gpu` times of the kernels, each with the bytes that it must move.

Attention reads random blocks, in regions that take turns: the block tables of two regions have no
block in common, so between two launches on one region the others have been through the L2 cache,
and nothing of it is left there.
"""

import math
from dataclasses import dataclass

import torch

from minikv.course.bench.gpu_clock import DTYPE, CudaClock
from minikv_kernels.codes import Codes
from minikv_kernels.codes_attention import codes_decode
from minikv_kernels.paged_decode import paged_decode, paged_decode_reference
from minikv_kernels.paged_prefill import paged_prefill
from minikv_kernels.splits import make_scratch

SPARE = 1.25  # a pool has so many times the blocks that are dealt out
LAUNCHES = 16  # in one go: a graph of one short launch would time the start of the graph
ROWS = 4  # of each region's output, compared with the reference
DECODE = {  # (head dim, context): by batch, a goal: % of the copy's rate
    (64, 4096): {8: 50, 16: 70, 24: 70, 32: 70, 48: 70, 64: 80},
    (64, 8192): {16: 70, 24: 70, 32: 70, 48: 70, 64: 85},
    (128, 4096): {16: 70, 24: 70, 32: 70, 48: 70, 64: 87},
    (128, 8192): {1: 40, 16: 70, 24: 70, 32: 70, 48: 70, 64: 88},
}
FULL = "decode, head dim 64, batch 64, context 4k"
SKEWED, COARSE = f"{FULL}, skewed lengths", f"{FULL}, blocks of 256"
OVER = {SKEWED: (FULL, 1.25), FULL: (COARSE, 1.05)}  # takes at most so many times as long
TOLERANCE = 0.01  # ‖out − reference‖ / ‖reference‖, bfloat16


@dataclass(frozen=True)
class Case:
    """A batch of decodes, each at the end of its context; or the prefill of one prompt."""

    head_dim: int
    lens: tuple[int, ...]  # tokens of each context; of a prefill one
    kind: str = "decode"  # over bfloat16; "int8" for a decode over codes; "prefill"
    block_size: int = 16
    num_heads: int = 32
    num_kv_heads: int = 8

    @property
    def num_queries(self) -> int:
        return sum(self.lens) if self.kind == "prefill" else len(self.lens)

    @property
    def num_bytes(self) -> int:
        """Bytes that one launch must move: K and V of each token once, queries and outputs."""
        # A row of codes has a scale in bfloat16.
        row = self.head_dim + 2 if self.kind == "int8" else 2 * self.head_dim
        kv = sum(self.lens) * 2 * self.num_kv_heads * row
        return kv + 2 * self.num_queries * self.num_heads * self.head_dim * DTYPE.itemsize

    @property
    def num_flops(self) -> int:
        """Of a prefill, whose limit they are: two products, each a multiplication and an addition;
        on average a query sees half the keys. 0 for a decode, whose limit is the bytes."""
        if self.kind != "prefill":
            return 0
        [length] = self.lens
        return 2 * length * length * self.num_heads * self.head_dim

    def num_regions(self, l2_bytes: int) -> int:
        """So many that all others together are at least twice the L2 cache."""
        return 1 + math.ceil(2 * l2_bytes / self.num_bytes)

    def num_blocks(self, l2_bytes: int) -> int:
        """Of the pool."""
        dealt = sum(-(-length // self.block_size) for length in self.lens)
        return math.ceil(SPARE * self.num_regions(l2_bytes) * dealt)

    def needed_bytes(self, l2_bytes: int) -> int:
        """Of memory, about."""
        return math.ceil(2 * SPARE * self.num_regions(l2_bytes) * self.num_bytes)

    def work(self, clock: CudaClock) -> "Attention":
        return Attention(self, clock.device, clock.l2_bytes)


class Attention:
    """A case on a device: `run` launches it `launches` times, on one region after the other."""

    def __init__(self, case: Case, device: torch.device, l2_bytes: int):
        self.case, regions = case, case.num_regions(l2_bytes)
        num_blocks = case.num_blocks(l2_bytes)
        self.tables = deal(case, regions, num_blocks).to(device)  # (R, S, B)
        self.lens = torch.tensor(case.lens, device=device)
        self.start = torch.tensor([0, case.num_queries], device=device)
        shape = (num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
        if case.kind == "int8":
            self.pair = torch.randint(-127, 128, (2, *shape), dtype=torch.int8, device=device)
            self.scales = torch.rand(2, *shape[:3], device=device).to(DTYPE)
            self.codes = Codes("int8", *self.pair, *self.scales)
        else:
            pool = (num_blocks, case.block_size, 2, case.num_kv_heads, case.head_dim)
            self.kv = torch.randn(pool, dtype=DTYPE, device=device)
        queries = (regions, case.num_queries, case.num_heads, case.head_dim)
        self.q = torch.randn(queries, dtype=DTYPE, device=device)
        self.out = torch.empty_like(self.q)
        self.scratch = make_scratch(case.num_heads, case.num_kv_heads, case.head_dim, device)
        self.launches = math.ceil(LAUNCHES / regions) * regions

    def run(self) -> None:
        for i in range(self.launches):
            region = i % len(self.tables)
            q, out, tables = self.q[region], self.out[region], self.tables[region]
            if self.case.kind == "prefill":
                paged_prefill(q, self.kv, tables, self.lens, self.start, None, out)
            elif self.case.kind == "int8":
                codes_decode(q, self.codes, tables, self.lens, None, None, out, self.scratch)
            else:
                paged_decode(q, self.kv, tables, self.lens, None, out, self.scratch)

    def poison(self) -> None:
        self.out.fill_(float("nan"))

    def check(self) -> None:
        """After `poison` and `run`: raises RuntimeError if a number was not written, or if rows
        differ from the reference."""
        for region, (q, out, tables) in enumerate(zip(self.q, self.out, self.tables, strict=True)):
            if not torch.isfinite(out).all():
                raise RuntimeError(f"{self.case}: region {region} has numbers not written")
            rows = torch.linspace(0, len(q) - 1, ROWS, device=q.device).long()
            if self.case.kind == "prefill":  # a query sees what a decode in its place would see
                tables, lens = tables.expand(ROWS, -1), rows + 1
            else:
                tables, lens = tables[rows], self.lens[rows]
            used, places = tables.clamp(min=0).unique(return_inverse=True)
            expected = paged_decode_reference(q[rows].float(), self._kv(used), places, lens)
            error = float((out[rows].float() - expected).norm() / expected.norm())
            if not error <= TOLERANCE:
                raise RuntimeError(f"{self.case}: region {region} is wrong by {error:.2g}")

    def _kv(self, blocks: torch.Tensor) -> torch.Tensor:
        """K and V of these blocks: (blocks, block_size, 2, num_kv_heads, head_dim), float32."""
        if self.case.kind != "int8":
            return self.kv[blocks].float()
        both = self.pair[:, blocks].float() * self.scales[:, blocks, ..., None]
        return both.permute(1, 3, 0, 2, 4).contiguous()


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


CASES: dict[str, tuple[Case, float | None]] = {  # and a goal, % of its limit
    **{
        f"decode, head dim {head_dim}, batch {batch}, context {context // 1024}k": (
            Case(head_dim, (context,) * batch), goal,
        )
        for (head_dim, context), goals in DECODE.items()
        for batch, goal in goals.items()
    },
    SKEWED: (Case(64, skewed(64 * 4096, 64)), None),
    COARSE: (Case(64, (4096,) * 64, block_size=256), None),
    "decode, head dim 128, batch 64, context 4k, int8": (Case(128, (4096,) * 64, "int8"), None),
    "prefill, head dim 128, 8k": (Case(128, (8192,), "prefill"), 45),
}  # fmt: skip
