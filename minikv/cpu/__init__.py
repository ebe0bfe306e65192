"""For models in float32 or bfloat16 on a CPU: the engine's step, compiled here by Numba.

Importing it needs Numba, so `minikv.machine` does that only for an engine that can use it.
"""

from minikv.cpu.addresses import unpacked
from minikv.cpu.attention import CompiledSteps, CpuAttention
from minikv.cpu.compiler import apart, part
from minikv.cpu.kernels import (
    answer,
    attend,
    attend_decode,
    dims_of,
    exp,
    layer_of,
    norm_heads,
    rotate,
    write_new,
)  # fmt: skip
from minikv.cpu.step import (
    Crowd,
    Program,
    can_compile,
    norm_weight,
    on_one_thread,
    plain,
    room_for,
)  # fmt: skip
from minikv.cpu.tiles import LANES

__all__ = [
    "LANES", "CompiledSteps", "CpuAttention", "Crowd", "Program", "answer", "apart", "attend",
    "attend_decode", "can_compile", "dims_of", "exp", "layer_of", "norm_heads", "norm_weight",
    "on_one_thread", "part", "plain", "room_for", "rotate", "unpacked", "write_new",
]  # fmt: skip
