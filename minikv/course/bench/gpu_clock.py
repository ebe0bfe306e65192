"""How a GPU is timed, and the two rates that everything is compared with.

Work on a GPU is only queued by the call that starts it, so it is timed by events that the
device itself notes between two pieces of work.
"""

import math
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median
from typing import Any

import torch

import minikv

SECONDS = 0.05  # a timing goes on for so long …
CALLS = 5, 1000  # … but for so many calls at least, and at most
COPIED = 2**30  # bytes of one copy
SIDE = 8192  # of the square matrices of the product

Work = Callable[[], None]


class CudaClock:
    """Times work on the current CUDA device. `l2_bytes`: what its L2 cache holds.

    Raises ValueError, naming `command`, where there is no such device, or where
    TRITON_INTERPRET keeps the kernels off it.
    """

    def __init__(self, command: str):
        if not torch.cuda.is_available():
            raise ValueError(
                f"{command}: needs a CUDA GPU to measure on, and torch {torch.__version__} "
                "finds none here"
            )
        from minikv_kernels.mode import INTERPRETED  # not before: without Triton it raises

        if INTERPRETED:
            raise ValueError(f"{command}: TRITON_INTERPRET is set; unset it to measure the GPU")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size

    def require_memory(self, needed: int) -> None:
        """Raise ValueError where fewer bytes than that are free."""
        free, _ = torch.cuda.mem_get_info(self.device)
        if free < needed:
            raise ValueError(
                f"the GPU has {free / 1e9:.1f} GB free, and this takes {needed / 1e9:.1f} GB"
            )

    def captured(self, work: Work) -> Work:
        """The replay of a CUDA graph of `work`, which runs before it, so that all is compiled."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def seconds(self, work: Work) -> float:
        """Of one call of `work`, which queues something: the median over many."""
        work()  # warm-up
        [once] = self._seconds_each(work, 1)
        least, most = CALLS
        return median(self._seconds_each(work, min(max(least, math.ceil(SECONDS / once)), most)))

    def _seconds_each(self, work: Work, calls: int) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for begin, end in pairs:
            begin.record()
            work()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]


class Copy:
    """The rate of a large copy within the device's memory: what moving bytes can reach."""

    def __init__(self, values: torch.Tensor):
        """`values`: random, at least twice COPIED bytes, or the copies are smaller. Two sources
        take turns, so that none is read from the L2 cache."""
        elements = min(COPIED // values.itemsize, len(values) // 2)
        self.sources = values[: 2 * elements].view(2, elements)
        self.target = torch.empty_like(self.sources[0])
        self.bytes = 2 * self.sources.nbytes  # read and written

    def work(self) -> None:
        for source in self.sources:
            self.target.copy_(source)

    def rate(self, clock: CudaClock) -> float:
        """Bytes per second."""
        return self.bytes / clock.seconds(self.work)


class Product:
    """The rate of a large matrix product x W^T: what arithmetic can reach."""

    def __init__(self, values: torch.Tensor):
        """`values`: random, at least 2 SIDE² numbers, or the matrices are smaller."""
        side = min(SIDE, math.isqrt(len(values) // 2))
        self.x, self.weight = values[: 2 * side * side].view(2, side, side)
        self.out = torch.empty_like(self.x)
        self.flops = 2 * side**3

    def work(self) -> None:
        torch.mm(self.x, self.weight.T, out=self.out)

    def rate(self, clock: CudaClock) -> float:
        """Floating-point operations per second."""
        return self.flops / clock.seconds(self.work)


def random_values(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normally distributed numbers, seeded: (numel,). Zeros would be kinder to the hardware."""
    values = torch.empty(numel, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for piece in values.split(2**28):
        piece.normal_(generator=generator)
    return values


def where() -> dict[str, Any]:
    """The machine with its versions, and the date: without them a figure says nothing."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "machine": {
            "gpu": device.name,
            "capability": f"{device.major}.{device.minor}",
            "memory_bytes": device.total_memory,
            "l2_bytes": device.L2_cache_size,
            "multiprocessors": device.multi_processor_count,
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "minikv": minikv.__version__,
            **{name: version(name) for name in ("triton", "transformers")},
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return found.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
