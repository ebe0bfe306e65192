"""The innermost parts of attention over int4, in vectors. Those of other formats are in
`minikv.cpu.tiles`.

Scales and zero points have 16 bits in memory. They become floats in registers, beside the codes
that they belong to, so no intermediate result goes through memory.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minikv.cpu.tiles import (
    HEADS,
    INDEX,
    LANES,
    SHORT,
    VECTOR,
    _add,
    _array,
    _choose,
    _empty_sum,
    _in_all_lanes,
    _load,
    _move,
    _reader,
    _shape,
    _store,
    dots,
)


@intrinsic
def dot_by_channel(typing, q, first, num_heads, codes, begin, stride, count, scale, low, out, to):
    """`dot_rows` for keys low + scale code, with a scale and a low (D,) for each channel."""

    def generate(context, builder, signature, args):
        def reader_of(part):
            return lambda at: _widened(builder, _move(builder, part.data, at))

        ends = (reader_of(_array(context, builder, signature, args, i)) for i in (7, 8))
        dots(context, builder, signature, args, *ends)
        return context.get_dummy_value()

    number = types.int64
    arguments = q, number, number, codes, number, number, number, scale, low, out, number
    return types.none(*arguments), generate


@intrinsic
def add_by_token(
    typing, weights, at, first, num_heads, codes, begin, stride, count, scale, low, out
):
    """`add_rows` for values low + scale code, with a scale and a low for each group of channels.

    weights (H, any); scale and low (count or more, groups), their row t for row t of the codes. A
    group is a multiple of LANES.
    """

    def generate(context, builder, signature, args):
        weights, codes, scale, low, out = (
            _array(context, builder, signature, args, i) for i in (0, 4, 8, 9, 10)
        )
        size, width = _shape(builder, out)[1], _shape(builder, weights)[1]
        groups = _shape(builder, scale)[1]
        read = _reader(builder, types.uint8, size)
        group, half = builder.udiv(size, groups), builder.udiv(size, INDEX(2))
        out_at = _move(builder, out.data, args[2], size)
        weights_at = _move(builder, _move(builder, weights.data, args[2], width), args[1])
        codes_at = _move(builder, codes.data, args[5])

        def add(heads: int, first_piece, num_pieces: int) -> None:
            """If there are several pieces, all belong to the groups of the first one."""
            pieces = [builder.add(first_piece, INDEX(i)) for i in range(num_pieces)]
            places = [place for piece in pieces for place in read.places(piece)]
            targets = [
                [_move(builder, _move(builder, out_at, INDEX(h), size), at) for at in places]
                for h in range(heads)
            ]
            numbers_of = [builder.udiv(at, group) for at in read.places(first_piece)]
            sums = [[_empty_sum(builder) for _ in places] for _ in range(heads)]
            with cgutils.for_range(builder, args[7]) as loop:
                row = _move(builder, codes_at, loop.index, args[6])
                ends_at = builder.mul(loop.index, groups)
                steps, bases = (
                    [_widened_lanes(builder, _move(builder, part.data, builder.add(ends_at, n)))
                     for n in numbers_of]
                    for part in (scale, low)
                )  # fmt: skip
                values = [
                    builder.fadd(
                        builder.fmul(codes, step, flags=("contract",)), base, flags=("contract",)
                    )
                    for piece in pieces
                    for codes, step, base in zip(read(row, piece), steps, bases, strict=True)
                ]
                for h in range(heads):
                    factor = _in_all_lanes(
                        builder,
                        _move(builder, _move(builder, weights_at, INDEX(h), width), loop.index),
                    )
                    for one, value in zip(sums[h], values, strict=True):
                        _add(builder, one, factor, value)
            for h in range(heads):
                for one, target in zip(sums[h], targets[h], strict=True):
                    total = builder.fadd(_load(builder, target), builder.load(one))
                    _store(builder, total, target)

        def add_all(heads: int) -> None:
            uneven = builder.or_(builder.urem(group, INDEX(2 * LANES)), builder.urem(half, group))
            is_even = builder.icmp_unsigned("==", uneven, INDEX(0))
            pairs = builder.select(is_even, builder.udiv(read.num_pieces, INDEX(2)), INDEX(0))
            with cgutils.for_range(builder, pairs) as loop:
                add(heads, builder.mul(loop.index, INDEX(2)), 2)
            rest = builder.sub(read.num_pieces, builder.mul(pairs, INDEX(2)))
            with cgutils.for_range(builder, rest) as loop:
                add(heads, builder.sub(read.num_pieces, builder.add(loop.index, INDEX(1))), 1)

        _choose(builder, args[3], range(1, HEADS + 1), add_all)
        return context.get_dummy_value()

    number = types.int64
    arguments = weights, number, number, number, codes, number, number, number, scale, low, out
    return types.none(*arguments), generate


def _widened(builder, address):
    """16 bfloat16 as floats: each is the upper half of one."""
    wide = ir.VectorType(SHORT, LANES)
    bits = builder.zext(_load(builder, address, address.type.pointee), wide)
    return builder.bitcast(builder.shl(bits, wide([16] * LANES)), VECTOR)


def _widened_lanes(builder, address):
    """One bfloat16 as a float in all lanes."""
    bits = builder.shl(builder.zext(builder.load(address), SHORT), SHORT(16))
    empty = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(empty, builder.bitcast(bits, ir.FloatType()), SHORT(0))
    return builder.shuffle_vector(first, empty, ir.VectorType(SHORT, LANES)([0] * LANES))
