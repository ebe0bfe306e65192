"""The ring cache, llama.cpp's way to keep K and V: one fixed buffer of cells and no blocks.

    cache = RingCache(lm.config, num_cells=256)
    new = generate_with_ring(lm, cache, lm.encode("def fib(n):"), max_tokens=1000, n_keep=4)

Read in this order: cells, attention, shift, cache, defrag, generate, window, sinks, self_extend,
context. The engine does not use it.
"""

from minikv.ring.attention import attention_scores, in_window, masked_attention, merged_attention
from minikv.ring.cache import RingCache
from minikv.ring.cells import ALL, FREE, PADDING, Cells, OutOfCells
from minikv.ring.context import with_config
from minikv.ring.defrag import Move, defragment, plan_moves
from minikv.ring.generate import (
    context_shift,
    generate_in_parallel,
    generate_with_ring,
    greedy,
    make_room,
)
from minikv.ring.self_extend import SelfExtendCache, SelfExtendRing
from minikv.ring.shift import turn
from minikv.ring.sinks import SinkCache
from minikv.ring.window import RollingCache

__all__ = [
    "ALL", "FREE", "PADDING", "Cells", "Move", "OutOfCells", "RingCache", "RollingCache",
    "SelfExtendCache", "SelfExtendRing", "SinkCache", "attention_scores", "context_shift",
    "defragment", "generate_in_parallel", "generate_with_ring", "greedy", "in_window", "make_room",
    "masked_attention", "merged_attention", "plan_moves", "turn", "with_config",
]  # fmt: skip
