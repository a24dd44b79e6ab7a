"""Prints matrix products whose sums stay in registers: a few rows at a time against one vector of columns."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from llvmlite import ir

from pararnn_cpu.emit import I64, Code, Machine, Place
from pararnn_cpu.vector_math import VectorMath

# Rows, or with sums in memory terms, that are done for all columns before the next ones, so that they stay in cache; a
# multiple of the rows of a block.
TILE = 240


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


class ProductHeader(IntEnum):
    """The argument array of a product. Strides are in bytes."""

    FIRST_BATCH = 0
    STOP_BATCH = 1
    ROWS = 2
    COLUMNS = 3
    DEPTH = 4
    # left[b, r, k], right[b, k] by blocks of columns, and out[b, r].
    LEFT = 5
    LEFT_BATCH = 6
    LEFT_ROW = 7
    LEFT_DEPTH = 8
    RIGHT = 9
    RIGHT_BATCH = 10
    RIGHT_DEPTH = 11
    RIGHT_BLOCK = 12
    OUT = 13
    OUT_BATCH = 14
    OUT_ROW = 15


def print_product(width: int, full: bool, tail: bool, double: bool, add: bool, machine: Machine) -> str:
    """LLVM source of ``void run(int64 *args)`` for out[b] = left[b] · right[b], or with `add` out[b] += …

    Without `add`, the columns behind the last ones of right must be readable.
    """
    code = Code(machine, double)
    b, math, zero = code.b, code.vectors(width), ir.Constant(I64, 0)
    at = {name: code.argument(name) for name in ProductHeader}
    rows, depth, columns = at[ProductHeader.ROWS], at[ProductHeader.DEPTH], at[ProductHeader.COLUMNS]
    size = ir.Constant(I64, width)
    whole = b.sdiv(columns, size)

    def columns_of(batch: Any, block: Any, first: tuple[Any, Any], count: tuple[Any, Any], mask: Any | None) -> None:
        """Rows and terms from `first` on, of one block of columns."""
        row, term = first
        left = b.add(at[ProductHeader.LEFT], b.mul(batch, at[ProductHeader.LEFT_BATCH]))
        left = b.add(left, b.mul(row, at[ProductHeader.LEFT_ROW]))
        right = b.add(at[ProductHeader.RIGHT], b.mul(batch, at[ProductHeader.RIGHT_BATCH]))
        right = b.add(right, b.mul(block, at[ProductHeader.RIGHT_BLOCK]))
        out = b.add(at[ProductHeader.OUT], b.mul(batch, at[ProductHeader.OUT_BATCH]))
        out = b.add(
            b.add(out, b.mul(row, at[ProductHeader.OUT_ROW])), b.mul(block, ir.Constant(I64, width * code.item))
        )
        factors = Factors(
            Place(b.add(left, b.mul(term, at[ProductHeader.LEFT_DEPTH])), at[ProductHeader.LEFT_ROW]),
            at[ProductHeader.LEFT_DEPTH],
            Place(b.add(right, b.mul(term, at[ProductHeader.RIGHT_DEPTH])), at[ProductHeader.RIGHT_DEPTH]),
            count[1],
        )

        def begin(address: Any) -> Any:
            return math.load(address, mask) if add else math.const(0.0)

        place = Place(out, at[ProductHeader.OUT_ROW])
        emit_product_rows(code, math, count[0], factors, place, begin, mask, mask if add else None)

    with code.loop("batch", at[ProductHeader.FIRST_BATCH], at[ProductHeader.STOP_BATCH]) as batch:
        extent = depth if add else rows
        with code.loop("tiles", zero, b.add(extent, ir.Constant(I64, TILE - 1)), TILE) as tile:
            part = code.least(ir.Constant(I64, TILE), b.sub(extent, tile.index))
            first, count = ((zero, tile.index), (rows, part)) if add else ((tile.index, zero), (part, depth))
            if full:
                with code.loop("blocks", zero, whole) as block:
                    columns_of(batch.index, block.index, first, count, None)
            if tail:
                left_over = b.sub(columns, b.mul(whole, size))
                columns_of(batch.index, whole, first, count, math.first_lanes(left_over))
    return code.finish()
