"""For models in float32 on a CPU: the engine's step, compiled for this machine by Numba.

The core imports `choice` to choose a backend, and the rest only for an engine that can use it.
"""
