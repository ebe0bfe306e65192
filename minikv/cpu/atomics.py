"""Reads and writes that several threads may do to one number at the same time.

Numba has them for GPUs only. The compiler under it, LLVM, has them for every processor, so each
function here emits a few of its instructions. All are sequentially consistent: what a thread wrote
before such a call is visible to another thread after a call that has read its result.
"""

import os

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

ORDER = "seq_cst"

# Let another thread have this core, if one waits for it.
give_way = types.ExternalFunction(
    "SwitchToThread" if os.name == "nt" else "sched_yield", types.int32()
)


def _address(context, builder, signature, args):
    """Of array[index], an array of int64 in one dimension."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return cgutils.get_item_pointer(context, builder, signature.args[0], array, [args[1]])


@intrinsic
def atomic_load(typing, array, index):
    """array[index]."""

    def generate(context, builder, signature, args):
        return builder.load_atomic(_address(context, builder, signature, args), ORDER, 8)

    return types.int64(array, types.int64), generate


@intrinsic
def atomic_store(typing, array, index, value):
    """array[index] = value."""

    def generate(context, builder, signature, args):
        address = _address(context, builder, signature, args)
        builder.store_atomic(args[2], address, ORDER, 8)
        return context.get_dummy_value()

    return types.none(array, types.int64, types.int64), generate


@intrinsic
def atomic_add(typing, array, index, value):
    """array[index] += value. Returns what was there before."""

    def generate(context, builder, signature, args):
        address = _address(context, builder, signature, args)
        return builder.atomic_rmw("add", address, args[2], ORDER)

    return types.int64(array, types.int64, types.int64), generate


@intrinsic
def atomic_swap(typing, array, index, expected, value):
    """array[index] = value, if `expected` is still there. Returns whether it was."""

    def generate(context, builder, signature, args):
        address = _address(context, builder, signature, args)
        pair = builder.cmpxchg(address, args[2], args[3], ORDER, ORDER)
        return builder.extract_value(pair, 1)

    return types.boolean(array, types.int64, types.int64, types.int64), generate
