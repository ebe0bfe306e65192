"""What only a CPU in float32 uses: the engine's step, compiled for this machine by Numba.

The core imports nothing of this until an engine on a CPU is made; without Numba it never does.
"""
