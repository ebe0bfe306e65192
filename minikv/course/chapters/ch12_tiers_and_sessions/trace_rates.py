"""What two tiers find in Mooncake's trace of conversations, computed once and stored.

`TraceRates(path)` computes it again from the file, which is not part of this project:
github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl.
"""

from minikv.course.chapters.ch07_radix_prefix_cache.block_ids import ids_of_trace
from minikv.course.chapters.ch12_tiers_and_sessions.tier_rates import (
    TierRates,
    WriteBack,
    rates_by_tier,
)
from minikv.course.pictures import style
from minikv.course.workloads.workload import read_trace

DEVICES, TIMES = (1_000, 3_000, 10_000, 50_000), (0, 10, 100)  # blocks; the host's size by these
STORED = {  # (device, host): shares found on the device, found on the host, written, fetched
    (1_000, 0): (0.0445, 0.0000, 0.0000, 0.0000),
    (1_000, 10_000): (0.0445, 0.1767, 0.9521, 0.1767),
    (1_000, 100_000): (0.0445, 0.3192, 0.9521, 0.3192),
    (3_000, 0): (0.0653, 0.0000, 0.0000, 0.0000),
    (3_000, 30_000): (0.0653, 0.2699, 0.9246, 0.2699),
    (10_000, 0): (0.2116, 0.0000, 0.0000, 0.0000),
    (10_000, 100_000): (0.2116, 0.1528, 0.7542, 0.1528),
    (50_000, 0): (0.3546, 0.0000, 0.0000, 0.0000),
}
STORED_MOST = 0.366  # found by a cache without limit, as chapter 07 says


class TraceRates:
    """Shares of all blocks asked for, by sizes of device and host, with write-back."""

    def __init__(self, path: str | None = None):
        self.rates = {sizes: TierRates(*shares) for sizes, shares in STORED.items()}
        self.most = STORED_MOST  # that any cache can find
        self.caption = "Blocks of 512 tokens; computed once from the trace and stored."
        if path is not None:
            streams = ids_of_trace(read_trace(path))
            self.rates = {sizes: rates_by_tier(streams, WriteBack, *sizes) for sizes in self.rates}
            self.most = 1 - len(set().union(*streams)) / sum(map(len, streams))
            self.caption = f"Blocks of 512 tokens; computed from {path}."

    def picture(self) -> style.Picture:
        """What both tiers find together, over the size of the device, for each size of the host."""
        device = DEVICES[0]
        alone, behind = (self.rates[device, times * device].together for times in (0, 10))
        title = (
            f"A device of {device:,} blocks finds {alone:.1%}; "
            f"with a host of ten times its size, {behind:.1%}"
        )
        figure, axes = style.new_axes(
            title, "blocks of the device (512 tokens each)", "found (% of all)", 3.2
        )
        told = []
        for times, mark, color in zip(TIMES, ("s--", "o-", "D-."), (0, 4, 5), strict=True):
            sizes = [size for size in DEVICES if (size, times * size) in self.rates]
            values = [100 * self.rates[size, times * size].together for size in sizes]
            label = f"host {times} times as large" if times else "no host"
            axes.plot(sizes, values, mark, color=style.PALETTE[color], label=label, markersize=5)
            told += [f"{label}, {size:,}: {v:.1f}" for size, v in zip(sizes, values, strict=True)]
        limit = f"a cache without limit: {self.most:.1%}"
        axes.axhline(100 * self.most, color=style.FAINT, linewidth=0.8, linestyle=":")
        axes.text(DEVICES[0], 104 * self.most, limit, fontsize=8, color=style.INK)
        axes.set_xscale("log")
        axes.set_xticks(DEVICES, [f"{size:,}" for size in DEVICES])
        axes.xaxis.minorticks_off()
        axes.set_ylim(0, 118 * self.most)
        axes.legend(frameon=False, fontsize=8)
        alt = f"Found in both tiers, in per cent. {title}. {'; '.join([*told, limit])}."
        return style.Picture(figure, alt, self.caption)
