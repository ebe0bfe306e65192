"""For models in float32 on a CPU: the engine's step, compiled for this machine by Numba.

Importing it needs Numba, so `minikv.machine` does that only for an engine that can use it.
"""

from minikv.cpu.addresses import unpacked
from minikv.cpu.attention import CompiledSteps, CpuAttention
from minikv.cpu.compiler import apart
from minikv.cpu.kernels import answer, attend, dims_of, layer_of, write_new
from minikv.cpu.step import Crowd, Program, can_compile, on_one_thread, room_for
from minikv.cpu.tiles import LANES

__all__ = [
    "LANES", "CompiledSteps", "CpuAttention", "Crowd", "Program", "answer", "apart", "attend",
    "can_compile", "dims_of", "layer_of", "on_one_thread", "room_for", "unpacked", "write_new",
]  # fmt: skip
