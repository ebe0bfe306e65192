"""For models in float32 on a CPU: the engine's step, compiled for this machine by Numba.

Importing it needs Numba, so `minikv.assembly` does that only for an engine that can use it.
"""

from minikv.cpu.attention import FEW, CpuAttention
from minikv.cpu.step import Program, can_compile
from minikv.cpu.tiles import LANES

__all__ = ["FEW", "LANES", "CpuAttention", "Program", "can_compile"]
