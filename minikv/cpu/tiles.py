"""Products in vectors: the innermost parts of `kernels.matmul` and of attention.

Numba's loops become SIMD only if the compiler sees how, and it keeps few sums in registers. LLVM,
the compiler under Numba, can be told both, so small programs are written for it directly. All
take numbers 16 at a time, and keep a tile of results in registers until everything has been added
to it.

    tile        rows of x times panels of a weight
    dot_rows    queries times keys
    add_rows    the weighted sum of values
    ask_for     nothing but a hint: rows that will be read soon

A weight lies in *panels* of 16 outputs, input by input, so that lanes need not be added up at the
end:

    weight (O, I)  ->  panels (O / 16, I, 16)

Weights may be bfloat16, the upper half of a float. Two inputs then share a word of 32 bits, so that
a load gives 32 of them, and one operation turns 16 into floats. Keys and values may be codes: what
is read 16 at a time is turned into floats in registers.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload

LANES = 16
# The largest tiles whose sums and operands fit the processor's registers: AVX-512 has 32 registers
# of 16 numbers, others have at least 16 of 8, or 32 of 4.
HAS_AVX512 = "+avx512f" in cpu_target.target_context.codegen()._tm_features
ROWS, PANELS = (12, 2) if HAS_AVX512 else (6, 1)
PAIRED_ROWS = 8 if HAS_AVX512 else 4  # if two inputs share a word: both numbers of x are operands
KEYS, HEADS = (8, 2) if HAS_AVX512 else (4, 1)

INDEX, SHORT = ir.IntType(64), ir.IntType(32)
VECTOR = ir.VectorType(ir.FloatType(), LANES)


def in_panels(weight: np.ndarray) -> np.ndarray:
    """weight (O, I) float32 -> (panels, I, LANES), the last panels filled up with zeros. Or that of
    bfloat16, uint16, -> (panels, I / 2, LANES) uint32: input 2 i is in the lower halves."""
    if weight.dtype == np.uint16:
        weight = np.ascontiguousarray(weight).view(np.uint32)
    if rest := -len(weight) % (PANELS * LANES):
        weight = np.pad(weight, ((0, rest), (0, 0)))
    return np.ascontiguousarray(weight.reshape(-1, LANES, weight.shape[1]).transpose(0, 2, 1))


def from_panels(panels: np.ndarray) -> np.ndarray:
    """What `in_panels` laid out, with the zeros at the end."""
    weight = np.ascontiguousarray(panels.transpose(0, 2, 1)).reshape(-1, panels.shape[1])
    return weight.view(np.uint16) if panels.dtype == np.uint32 else weight


def rows_of(panels):
    """How many rows `tile` takes at most."""
    raise NotImplementedError  # compiled code has a number in its place


@overload(rows_of)
def _rows_of(panels):
    count = PAIRED_ROWS if panels.dtype == types.uint32 else ROWS
    return lambda panels: count


@intrinsic
def tile(typing, x, row, num_rows, panels, panel, soon, out):
    """out[:num_rows] = x[row : row + num_rows] times PANELS panels, from number `panel` on.
    Meanwhile it asks for panel number `soon`, and if there are few rows for all PANELS from there.

    x (T, I), panels (any, I, LANES) or with two inputs in a word (see `in_panels`), out (ROWS,
    PANELS * LANES); num_rows is 1 to `rows_of(panels)`.
    """

    def generate(context, builder, signature, args):
        x, panels, out = (_array(context, builder, signature, args, i) for i in (0, 3, 6))
        size, length = _shape(builder, x)[1], _shape(builder, panels)[1]
        x_at = _move(builder, x.data, args[1], size)

        def panels_at(number) -> list:
            first = _move(builder, panels.data, number, INDEX(LANES), length)
            return [_move(builder, first, INDEX(p * LANES), length) for p in range(PANELS)]

        inputs = 2 if signature.args[3].dtype == types.uint32 else 1  # in a word

        def multiply(rows: int) -> None:
            row_at = [_move(builder, x_at, INDEX(row), size) for row in range(rows)]
            begins, soon = panels_at(args[4]), panels_at(args[5])
            sums = [[_empty_sum(builder) for _ in begins] for _ in row_at]
            with cgutils.for_range(builder, length) as loop:
                for at in soon[: PANELS if rows <= PAIRED_ROWS else 1]:
                    _ask(builder, _move(builder, at, loop.index, INDEX(LANES)))
                places = [_move(builder, at, loop.index, INDEX(LANES)) for at in begins]
                words = [_load(builder, at, at.type.pointee) for at in places]
                for i in range(inputs):
                    weights = [_half(builder, one, i) if inputs > 1 else one for one in words]
                    place = builder.add(builder.mul(loop.index, INDEX(inputs)), INDEX(i))
                    for at, of_row in zip(row_at, sums, strict=True):
                        value = _in_all_lanes(builder, _move(builder, at, place))
                        for weight, one in zip(weights, of_row, strict=True):
                            _add(builder, one, value, weight)
            for i, one in enumerate(one for of_row in sums for one in of_row):
                _store(builder, builder.load(one), _move(builder, out.data, INDEX(i * LANES)))

        _choose(builder, args[2], range(1, (ROWS if inputs == 1 else PAIRED_ROWS) + 1), multiply)
        return context.get_dummy_value()

    number = types.int64
    return types.none(x, number, number, panels, number, number, out), generate


@intrinsic
def dot_rows(typing, q, first, num_heads, codes, begin, stride, count, out, to):
    """out[first + h, to + t] = q[first + h] . row t of the codes, for h < num_heads, t < count.

    q (H, D); num_heads is 1 to HEADS. Row t is D numbers at codes.flat[begin + t * stride]. Up to
    KEYS - 1 numbers behind the last of `out` are overwritten. D is a multiple of LANES, for int4 of
    2 LANES.
    """

    def generate(context, builder, signature, args):
        dots(context, builder, signature, args)
        return context.get_dummy_value()

    number = types.int64
    arguments = q, number, number, codes, number, number, number, out, number
    return types.none(*arguments), generate


def dots(context, builder, signature, args, scales=None, lows=None) -> None:
    """The program of `dot_rows`. scales(at) and lows(at) give 16 numbers from channel `at` on, for
    keys low + scale code: q . k = q . low + (q scale) . code. The sums begin as q . low, lane by
    lane."""
    q, codes, out = (_array(context, builder, signature, args, i) for i in (0, 3, len(args) - 2))
    size, width = _shape(builder, q)[1], _shape(builder, out)[1]
    read = _reader(builder, signature.args[3].dtype, size)
    q_at = _move(builder, q.data, args[1], size)
    out_at = _move(builder, _move(builder, out.data, args[1], width), args[-1])
    codes_at, last = _move(builder, codes.data, args[4]), builder.sub(args[6], INDEX(1))
    num_tiles = builder.udiv(builder.add(args[6], INDEX(KEYS - 1)), INDEX(KEYS))

    def multiply(heads: int) -> None:
        heads_at = [_move(builder, q_at, INDEX(h), size) for h in range(heads)]
        bases = [_empty_sum(builder) for _ in heads_at] if lows else []
        if lows:
            with cgutils.for_range(builder, builder.udiv(size, INDEX(LANES))) as loop:
                at = builder.mul(loop.index, INDEX(LANES))
                numbers = lows(at)
                for of_head, base in zip(heads_at, bases, strict=True):
                    _add(builder, base, _load(builder, _move(builder, of_head, at)), numbers)
        with cgutils.for_range(builder, num_tiles) as loop:
            key = builder.mul(loop.index, INDEX(KEYS))
            rows = [  # behind the last row the last one again
                _move(builder, codes_at, _least(builder, builder.add(key, INDEX(i)), last), args[5])
                for i in range(KEYS)
            ]
            sums = [[_empty_sum(builder) for _ in rows] for _ in heads_at]
            for base, of_head in zip(bases, sums, strict=False):
                for one in of_head:
                    builder.store(builder.load(base), one)
            with cgutils.for_range(builder, read.num_pieces) as piece:
                places = read.places(piece.index)
                steps = [scales(at) for at in places] if scales else []
                queries = [
                    [_load(builder, _move(builder, of_head, at)) for at in places]
                    for of_head in heads_at
                ]
                if scales:
                    queries = [list(map(builder.fmul, of_head, steps)) for of_head in queries]
                for i, row in enumerate(rows):
                    for j, numbers in enumerate(read(row, piece.index)):
                        for h in range(heads):
                            _add(builder, sums[h][i], queries[h][j], numbers)
            for h in range(heads):
                found = _sum_lanes(builder, [builder.load(one) for one in sums[h]])
                at = _move(builder, _move(builder, out_at, INDEX(h), width), key)
                _store(builder, found, at)

    _choose(builder, args[2], range(1, HEADS + 1), multiply)


@intrinsic
def add_rows(typing, weights, at, first, num_heads, codes, begin, stride, count, out):
    """out[first + h] += the sum of weights[first + h, at + t] * row t of the codes, t < count.

    out (H, D), weights (H, any); the rest is as in `dot_rows`.
    """

    def generate(context, builder, signature, args):
        weights, codes, out = (_array(context, builder, signature, args, i) for i in (0, 4, 8))
        size, width = _shape(builder, out)[1], _shape(builder, weights)[1]
        read = _reader(builder, signature.args[4].dtype, size)
        out_at = _move(builder, out.data, args[2], size)
        weights_at = _move(builder, _move(builder, weights.data, args[2], width), args[1])
        codes_at, several = _move(builder, codes.data, args[5]), 4 // read.factor

        def add(heads: int, first_piece, num_pieces: int) -> None:
            pieces = [builder.add(first_piece, INDEX(i)) for i in range(num_pieces)]
            places = [place for piece in pieces for place in read.places(piece)]
            targets = [
                [_move(builder, _move(builder, out_at, INDEX(h), size), at) for at in places]
                for h in range(heads)
            ]
            factors = [_move(builder, weights_at, INDEX(h), width) for h in range(heads)]
            sums = [[_empty_sum(builder) for _ in places] for _ in range(heads)]
            with cgutils.for_range(builder, args[7]) as loop:
                row = _move(builder, codes_at, loop.index, args[6])
                numbers = [one for piece in pieces for one in read(row, piece)]
                for of_head, at in zip(sums, factors, strict=True):
                    factor = _in_all_lanes(builder, _move(builder, at, loop.index))
                    for one, values in zip(of_head, numbers, strict=True):
                        _add(builder, one, factor, values)
            for h in range(heads):
                for one, target in zip(sums[h], targets[h], strict=True):
                    total = builder.fadd(_load(builder, target), builder.load(one))
                    _store(builder, total, target)

        def add_all(heads: int) -> None:
            tiles = builder.udiv(read.num_pieces, INDEX(several))
            with cgutils.for_range(builder, tiles) as loop:
                add(heads, builder.mul(loop.index, INDEX(several)), several)
            rest = builder.urem(read.num_pieces, INDEX(several))
            with cgutils.for_range(builder, rest) as loop:
                add(heads, builder.sub(read.num_pieces, builder.add(loop.index, INDEX(1))), 1)

        _choose(builder, args[3], range(1, HEADS + 1), add_all)
        return context.get_dummy_value()

    number = types.int64
    arguments = weights, number, number, number, codes, number, number, number, out
    return types.none(*arguments), generate


@intrinsic
def ask_for(typing, codes, begin, stride, count, size):
    """Ask the memory for `count` rows of `size` codes, of which row t begins at codes.flat[begin +
    t * stride], to be in the second cache when they are read."""

    def generate(context, builder, signature, args):
        codes = _array(context, builder, signature, args, 0)
        per_line = LINE // context.get_abi_sizeof(codes.data.type.pointee)
        lines = builder.udiv(builder.add(args[4], INDEX(per_line - 1)), INDEX(per_line))
        codes_at = _move(builder, codes.data, args[1])
        with cgutils.for_range(builder, args[3]) as row:
            row_at = _move(builder, codes_at, row.index, args[2])
            with cgutils.for_range(builder, lines) as line:
                _ask(builder, _move(builder, row_at, line.index, INDEX(per_line)))
        return context.get_dummy_value()

    number = types.int64
    return types.none(codes, number, number, number, number), generate


LINE = 64  # bytes that memory gives at a time


# ── Codes ─────────────────────────────────────────────────────────────────────


class _reader:
    """Reads rows of `size` numbers in pieces. A piece is one load, and one or two vectors of
    floats: in int4 a byte has channel i and channel i + size / 2."""

    def __init__(self, builder, dtype, size):
        self.builder, self.dtype, self.size = builder, dtype, size
        self.factor = 2 if dtype == types.uint8 else 1
        self.num_pieces = builder.udiv(size, INDEX(LANES * self.factor))

    def places(self, piece) -> list:
        """At which channels the vectors of a piece begin."""
        first = self.builder.mul(piece, INDEX(LANES))
        half = self.builder.udiv(self.size, INDEX(2))
        return [first, self.builder.add(first, half)][: self.factor]

    def __call__(self, row, piece) -> list:
        """The vectors of a piece of the row at this address."""
        builder, wide = self.builder, ir.VectorType(SHORT, LANES)
        at = _move(builder, row, piece, INDEX(LANES))
        if self.dtype == types.float32:
            return [_load(builder, at)]
        codes = _load(builder, at, row.type.pointee)
        if self.dtype == types.uint16:  # bfloat16: the upper half of a float
            bits = builder.shl(builder.zext(codes, wide), wide([16] * LANES))
            return [builder.bitcast(bits, VECTOR)]
        if self.dtype == types.int8:
            return [builder.sitofp(builder.sext(codes, wide), VECTOR)]
        codes = builder.zext(codes, wide)
        low, high = builder.and_(codes, wide([15] * LANES)), builder.lshr(codes, wide([4] * LANES))
        return [builder.sitofp(one, VECTOR) for one in (low, high)]


# ── What the three programs are written in ────────────────────────────────────


def _array(context, builder, signature, args, i: int):
    return context.make_array(signature.args[i])(context, builder, args[i])


def _shape(builder, array) -> list:
    return cgutils.unpack_tuple(builder, array.shape)


def _move(builder, address, *factors):
    """The address of the element that lies the product of the factors further on."""
    steps = factors[0]
    for factor in factors[1:]:
        steps = builder.mul(steps, factor)
    return builder.gep(address, [steps])


def _ask(builder, address) -> None:
    """Ask for the line at this address, to be in the second cache when it is read."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, SHORT, SHORT, SHORT])
    hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, second_cache, data = SHORT(0), SHORT(2), SHORT(1)
    builder.call(hint, [builder.bitcast(address, byte), read, second_cache, data])


def _least(builder, a, b):
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def _choose(builder, number, numbers: range, emit: Callable[[int], None]) -> None:
    """Emit a branch for each of the numbers; the one that `number` names runs."""
    end = builder.append_basic_block("end")
    switch = builder.switch(number, end)
    for n in numbers:
        block = builder.append_basic_block(f"for_{n}")
        switch.add_case(INDEX(n), block)
        builder.position_at_end(block)
        emit(n)
        builder.branch(end)
    builder.position_at_end(end)


def _empty_sum(builder):
    """A variable, which becomes a register."""
    one = cgutils.alloca_once(builder, VECTOR)
    builder.store(VECTOR([0.0] * LANES), one)
    return one


def _add(builder, one, a, b) -> None:
    """one += a * b, in one operation where the processor has it."""
    product = builder.fmul(a, b, flags=("contract",))
    builder.store(builder.fadd(product, builder.load(one), flags=("contract",)), one)


def _load(builder, address, kind=None):
    """16 numbers, at any address."""
    kind = ir.VectorType(kind or ir.FloatType(), LANES)
    vector = builder.load(builder.bitcast(address, kind.as_pointer()))
    vector.align = 1
    return vector


def _half(builder, words, i: int):
    """The floats whose upper halves are the lower (i = 0) or upper halves of 16 words."""
    kind = words.type
    if i == 0:
        bits = builder.shl(words, kind([16] * LANES))
    else:
        bits = builder.and_(words, kind([0xFFFF0000] * LANES))
    return builder.bitcast(bits, VECTOR)


def _store(builder, vector, address) -> None:
    stored = builder.store(vector, builder.bitcast(address, vector.type.as_pointer()))
    stored.align = 4


def _in_all_lanes(builder, address):
    value, empty = builder.load(address), ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(empty, value, SHORT(0))
    return builder.shuffle_vector(first, empty, ir.VectorType(SHORT, LANES)([0] * LANES))


def _sum_lanes(builder, vectors: list):
    """The sum of each vector's lanes, in a vector with one lane per vector.

    A round turns two vectors into one: the first vector's lanes are added in pairs and fill its
    first half, the second vector's fill the other. After log2(16) rounds each lane is a sum of 16.
    """
    parts = 1  # how many of the given vectors one vector has lanes of
    shuffle = partial(ir.VectorType, SHORT)
    while vectors[0].type.count > parts:
        count = vectors[0].type.count
        length = count // parts  # lanes of a part
        pairs = list(zip(vectors[::2], vectors[1::2], strict=False)) or [(vectors[0], vectors[0])]
        taken = 2 * parts if len(vectors) > 1 else parts
        begins = [i * length for i in range(taken)]
        half = range(length // 2)
        lower = [begin + i for begin in begins for i in half]
        upper = [begin + length // 2 + i for begin in begins for i in half]
        vectors = [
            builder.fadd(
                builder.shuffle_vector(a, b, shuffle(len(lower))(lower)),
                builder.shuffle_vector(a, b, shuffle(len(upper))(upper)),
            )
            for a, b in pairs
        ]
        parts = taken
    return vectors[0]
