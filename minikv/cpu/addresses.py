"""Kernels that are called at their address, and so are compiled apart from their callers.

Numba copies a kernel into each kernel that calls it by name, and compiles the copy again. A call
at an address is a call of what is there already. So a step is compiled once for all ways to keep
K and V: its program knows them only as numbers in memory, which what it calls can read.
"""

from typing import Any

import numpy as np
from numba import typeof, types
from numba.core import cgutils
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import NativeValue, intrinsic, models, register_model, unbox


class Packed:
    """An array, or a tuple of arrays, numbers and such tuples, as an argument of kernels: the
    address of its numbers, in the form that Numba has for them. (A number of less than 8 bytes can
    only be the last.) A kernel reads a field of a NamedTuple when it names it, while a NamedTuple
    itself is handed over whole: as 300 numbers, if it is what a step works on."""

    def __init__(self, value: Any):
        self.value, self.words = value, np.array(_words(value), np.int64)
        self.address, self._numba_type_ = self.words.ctypes.data, _InMemory(typeof(value))


def _words(value: Any) -> list[int]:
    if isinstance(value, tuple):
        return [word for one in value for word in _words(one)]
    if not isinstance(value, np.ndarray):
        return [int.from_bytes(np.asarray(value).tobytes(), "little")]
    owners = [0, 0]  # none: no references are counted
    sizes = [value.size, value.itemsize, value.ctypes.data]
    return [*owners, *sizes, *value.shape, *value.strides]


class _InMemory(types.Type):
    """The type of a packed value of this kind."""

    def __init__(self, kind: types.Type):
        super().__init__(f"InMemory({kind})")
        self.kind = kind


register_model(_InMemory)(models.OpaqueModel)  # an address


@unbox(_InMemory)
def _address(kind, value, c):
    number = c.pyapi.object_getattr_string(value, "address")
    address = c.pyapi.long_as_voidptr(number)
    c.pyapi.decref(number)
    return NativeValue(address)


@infer_getattr
class _Fields(AttributeTemplate):
    key = _InMemory

    def generic_resolve(self, value, name):
        return value.kind[value.kind.fields.index(name)]


@lower_getattr_generic(_InMemory)
def _field(context, builder, kind, address, name):
    place = kind.kind.fields.index(name)
    pointer = builder.bitcast(address, context.get_data_type(kind.kind).as_pointer())
    at = cgutils.gep_inbounds(builder, pointer, 0, place)
    return context.unpack_value(builder, kind.kind[place], at)


@intrinsic
def unpacked(typing, value):
    """The value that was packed."""

    def generate(context, builder, signature, args):
        kind = value.kind
        pointer = context.get_data_type(kind).as_pointer()
        return context.unpack_value(builder, kind, builder.bitcast(args[0], pointer))

    return value.kind(value), generate


def address_of(compiled: Any, *args: Any) -> int:
    """Where the code of a kernel begins, for arguments like these. It is compiled now, or read from
    disk."""
    kinds = tuple(map(typeof, args))
    compiled.compile(kinds)
    found = compiled.overloads[kinds]
    return found.library.get_pointer_to_function(found.fndesc.llvm_func_name)


@intrinsic
def call(typing, address, arguments):
    """Call the kernel at this address. It returns nothing, and the arguments, a tuple, have exactly
    the types that it was compiled for, or an address in the place of what was packed."""

    def generate(context, builder, signature, args):
        kinds, convention = signature.args[1].types, context.call_conv
        kind = convention.get_function_type(types.none, kinds).as_pointer()
        code, values = builder.inttoptr(args[0], kind), cgutils.unpack_tuple(builder, args[1])
        status, _ = convention.call_function(builder, code, types.none, kinds, values)
        with builder.if_then(status.is_error, likely=False):
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.none(types.int64, arguments), generate
