"""Kernels that are called at their address, and so are compiled apart from their callers.

Numba copies a kernel into each kernel that calls it by name, and compiles the copy again. A call
at an address is a call of what is there already. So a step is compiled once for all ways to keep
K and V: its program knows them only as numbers in memory, which what it calls can read.
"""

from typing import Any

import numpy as np
from numba import typeof, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model


class Packed(types.Type):
    """The type of an argument that says what `unpacked` finds in memory, and takes no room."""

    def __init__(self, kind: types.Type):
        super().__init__(f"Packed({kind})")
        self.kind = kind


@register_model(Packed)
class _Nothing(models.StructModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, [])


def packed(value: Any) -> np.ndarray:
    """An array, or a tuple of arrays and such tuples, in the form that Numba has for it. The arrays
    must outlive their description: it does not keep them."""
    return np.array(_words(value), np.int64)


def _words(value: Any) -> list[int]:
    if isinstance(value, tuple):
        return [word for one in value for word in _words(one)]
    owners = [0, 0]  # none: no references are counted
    sizes = [value.size, value.itemsize, value.ctypes.data]
    return [*owners, *sizes, *value.shape, *value.strides]


@intrinsic
def unpacked(typing, kind, words):
    """The value that `packed` turned into words, of the kind that the caller was compiled for."""

    def generate(context, builder, signature, args):
        address = context.make_array(signature.args[1])(context, builder, args[1]).data
        pointer = context.get_data_type(kind.kind).as_pointer()
        return context.unpack_value(builder, kind.kind, builder.bitcast(address, pointer))

    return kind.kind(kind, words), generate


def address_of(compiled: Any, packed_kind: Any, *args: Any) -> int:
    """Where the code of a kernel begins, for a packed value like `packed_kind` and arguments like
    these. It is compiled now, or read from disk."""
    kinds = Packed(typeof(packed_kind)), *map(typeof, args)
    compiled.compile(kinds)
    found = compiled.overloads[kinds]
    return found.library.get_pointer_to_function(found.fndesc.llvm_func_name)


@intrinsic
def call(typing, address, arguments):
    """Call the kernel at this address. It returns nothing, and the arguments, a tuple, have exactly
    the types that it was compiled for."""

    def generate(context, builder, signature, args):
        kinds, convention = signature.args[1].types, context.call_conv
        kind = convention.get_function_type(types.none, kinds).as_pointer()
        code, values = builder.inttoptr(args[0], kind), cgutils.unpack_tuple(builder, args[1])
        status, _ = convention.call_function(builder, code, types.none, kinds, values)
        with builder.if_then(status.is_error, likely=False):
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.none(types.int64, arguments), generate
