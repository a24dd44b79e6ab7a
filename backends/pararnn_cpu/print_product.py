"""Prints matrix products whose sums stay in registers: a few rows at a time against one vector of columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from pararnn_cpu.emit import I64, Code, Machine, Place
from pararnn_cpu.vector_math import VectorMath

# Terms after which partial sums go back to memory, so that the rows of the matrix are still in cache for the next rows
# of the result.
DEPTH = 256


class Factors(NamedTuple):
    """left[r, k] (numbers, with bytes from one k to the next) and right[k] (vectors), for k < depth."""

    left: Place
    by_depth: Any
    right: Place
    depth: Any


def row_block(machine: Machine, width: int, item: int) -> int:
    """Rows whose sums fit into the registers beside one vector of the matrix and one factor."""
    each = max(1, width * item // machine.vector_bytes)
    return max(1, min(8, (machine.registers - each - 1) // each))


def emit_product_rows(
    code: Code,
    math: VectorMath,
    count: Any,
    factors: Factors,
    out: Place,
    start: Callable[[Any], Any],
    mask: Any | None = None,
    right_mask: Any | None = None,
) -> None:
    """out[r] = start(address of out[r]) + Σ_k left[r, k] · right[k], for r < count.

    The sum runs in the order of k in every lane, so its bits depend on neither the block nor the width.
    """
    b = code.b

    def rows(first: Any, number: int) -> None:
        index = [b.add(first, ir.Constant(I64, r)) for r in range(number)]
        bases = [b.add(factors.left.base, b.mul(r, factors.left.stride)) for r in index]
        places = [b.add(out.base, b.mul(r, out.stride)) for r in index]
        begin = [start(p) for p in places]
        with code.loop("depth", ir.Constant(I64, 0), factors.depth, carried=begin) as k:
            vector = math.load(b.add(factors.right.base, b.mul(k.index, factors.right.stride)), right_mask)
            along = b.mul(k.index, factors.by_depth)
            k.carried = [
                math.fma(math.splat(code.load(b.add(base, along))), vector, total)
                for base, total in zip(bases, k.values, strict=True)
            ]
        for value, place in zip(k.values, places, strict=True):
            math.store(value, place, mask)

    block = row_block(code.machine, math.width, code.item)
    with code.loop("rows", ir.Constant(I64, 0), count, block) as many:
        rows(many.index, block)
    if block > 1:
        with code.loop("row", many.index, count) as one:
            rows(one.index, 1)


def print_product(width: int, full: bool, tail: bool, double: bool, add: bool, machine: Machine) -> str:
    """LLVM source of ``void run(int64 *args)`` for out = left · right, or with `add` out += left · right.

    Arguments: number of rows; block range of columns; columns; depth; address, row stride and depth stride of left;
    address, depth stride and block stride of right; address and row stride of out. Strides in bytes. The columns
    behind the last ones of right must be readable unless `add` is set.
    """
    code = Code(machine, double)
    b, math = code.b, code.vectors(width)
    count, first, stop, columns, depth = (code.argument(k) for k in range(5))
    left, by_row, by_depth, right, by_row_right, by_block, out, by_row_out = (code.argument(k) for k in range(5, 13))
    zero = ir.Constant(I64, 0)

    def columns_of(block: Any, part: Any, terms: Any, mask: Any | None) -> None:
        factors = Factors(
            Place(b.add(left, b.mul(part, by_depth)), by_row),
            by_depth,
            Place(b.add(b.add(right, b.mul(part, by_row_right)), b.mul(block, by_block)), by_row_right),
            terms,
        )
        place = Place(b.add(out, b.mul(block, ir.Constant(I64, width * code.item))), by_row_out)

        def begin(address: Any) -> Any:
            return math.load(address, mask) if add else math.const(0.0)

        emit_product_rows(code, math, count, factors, place, begin, mask, mask if add else None)

    whole = code.least(stop, b.sdiv(columns, ir.Constant(I64, width)))

    def all_columns(part: Any, terms: Any) -> None:
        if full:
            with code.loop("blocks", first, whole) as block:
                columns_of(block.index, part, terms, None)
        if tail:
            with code.loop("tail", code.most(first, whole), stop) as block:
                left_over = b.sub(columns, b.mul(block.index, ir.Constant(I64, width)))
                columns_of(block.index, part, terms, math.first_lanes(left_over))

    if add:
        past = b.add(depth, ir.Constant(I64, DEPTH - 1))
        with code.loop("parts", zero, past, DEPTH) as part:
            all_columns(part.index, code.least(ir.Constant(I64, DEPTH), b.sub(depth, part.index)))
    else:
        all_columns(zero, depth)
    return code.finish()
