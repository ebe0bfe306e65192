"""How a GPU is timed, and the two rates that everything on it is compared with.

Work on a GPU is only queued by the call that starts it, so it is timed by events that the
device itself notes between two pieces of work.
"""

import gc
import math
from collections.abc import Callable
from statistics import median

import torch

SECONDS = 0.05  # a timing goes on for so long …
CALLS = 5, 1000  # … but for so many calls at least, and at most
COPIED = 2**30  # bytes of one copy
SIDE = 8192  # of the square matrices of the product
DTYPE = torch.bfloat16

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

    def free_bytes(self) -> int:
        """What can be allocated on the device."""
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

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

    def __init__(self, device: torch.device):
        # Two sources take turns, so that none is read from the L2 cache. Zeros would be kinder
        # to the hardware.
        self.sources = torch.randn(2, COPIED // DTYPE.itemsize, dtype=DTYPE, device=device)
        self.target = torch.empty_like(self.sources[0])
        self.num_bytes = 2 * self.sources.nbytes  # read and written

    def run(self) -> None:
        for source in self.sources:
            self.target.copy_(source)

    def rate(self, clock: CudaClock) -> float:
        """Bytes per second."""
        return self.num_bytes / clock.seconds(self.run)


class Product:
    """The rate of a large matrix product x W^T: what arithmetic can reach."""

    def __init__(self, device: torch.device):
        self.x, self.weight = torch.randn(2, SIDE, SIDE, dtype=DTYPE, device=device)
        self.out = torch.empty_like(self.x)
        self.num_flops = 2 * SIDE**3

    def run(self) -> None:
        torch.mm(self.x, self.weight.T, out=self.out)

    def rate(self, clock: CudaClock) -> float:
        """Floating-point operations per second."""
        return self.num_flops / clock.seconds(self.run)
