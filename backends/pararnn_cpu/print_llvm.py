"""Prints a loop program as LLVM code: lanes as explicit vectors, carries in registers along the time loop.

Explicit vectors rather than a loop for an optimiser to vectorise: the optimiser must first prove that a dozen arrays
do not overlap, and gives up. No fast-math flag is set, so two programs that share an operation get the same bits,
whatever the width of their vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir

from pararnn.programs import LoopProgram
from pararnn_cpu.emit import I64, Code, Machine, Place
from pararnn_cpu.print_product import Factors, emit_product_rows
from pararnn_cpu.vector_math import operations

# Fields before the operands in the argument array: batch range, block range, lanes, steps, first row, row step (1 or
# -1); then, for projected rows, the addresses of a scratch buffer, of the packed weights and of the bias, the number
# of features and the bytes from one to the next.
HEADER = 13
# Fields of an operand: address, and strides of batch and time in bytes.
FIELDS = 3
# Steps whose projections are made at once: few enough to stay in the first cache, a multiple of the rows that the
# matrix product works on at a time.
TILE = 48
# Rows ahead that are fetched into cache: the processor does not guess the way through narrow columns of large arrays.
PREFETCH = 16


def _same(value: Any, _: Any) -> Any:
    return value


@dataclass(frozen=True)
class Form:
    """What decides the code beside the program.

    Attributes:
        width: lanes of a vector. full, tail: whether there are blocks of `width` lanes, and a last one with fewer.
        double: float64 instead of float32. exact: elementary functions by the C library.
        keep: carries that are written after each step, at that step's row.
        projected: (start, stop) of the rows that are made from inputs x as W x + b instead of being read.
        add_stored: stored values are added up as well, after the program's own totals.
    """

    width: int
    full: bool
    tail: bool
    double: bool
    exact: bool
    keep: int = 0
    projected: tuple[int, int] = (0, 0)
    add_stored: bool = False

    @property
    def gates(self) -> int:
        return self.projected[1] - self.projected[0]


def print_loop(loop: LoopProgram, form: Form, machine: Machine) -> str:
    """LLVM source of ``void run(int64 *args)``.

    Operands follow the header in the order carry, rows that are read, consts, kept, stored, totals, and x if rows are
    projected. Carries and totals are read at the start and written back at the end.
    """
    code = Code(machine, form.double)
    lanes, width = code.argument(4), ir.Constant(I64, form.width)
    with code.loop("batch", code.argument(0), code.argument(1)) as batch:
        first, stop = code.argument(2), code.argument(3)
        whole = code.least(stop, code.b.sdiv(lanes, width))
        if form.full:
            with code.loop("blocks", first, whole) as block:
                _Block(code, loop, form, batch.index, block.index, None).emit()
        if form.tail:
            # The last block, if it belongs to this piece of the work.
            with code.loop("tail", code.most(first, whole), stop) as block:
                left = code.b.sub(lanes, code.b.mul(block.index, width))
                _Block(code, loop, form, batch.index, block.index, left).emit()
    return code.finish()


class _Block:
    """All steps of one block of lanes; `left` is how many of them there are, None for a full block."""

    def __init__(self, code: Code, loop: LoopProgram, form: Form, batch: Any, block: Any, left: Any | None) -> None:
        self.code, self.loop, self.form, self.block = code, loop, form, block
        self.math = code.vectors(form.width)
        self.operations = operations(self.math, form.exact)
        self.mask = None if left is None else self.math.first_lanes(left)
        totals = loop.totals + (loop.stored if form.add_stored else 0)
        counts = (loop.carry, loop.rows - form.gates, loop.consts, form.keep, loop.stored, totals, min(1, form.gates))
        shift = self.times(block, form.width * code.item)
        groups: list[list[Place]] = []
        position = HEADER
        for kind, count in enumerate(counts):
            group = []
            for _ in range(count):
                address, by_batch, by_time = (code.argument(position + f) for f in range(FIELDS))
                base = code.b.add(address, code.b.mul(batch, by_batch))
                # Every lane reads all features of x.
                group.append(Place(base if kind == 6 else code.b.add(base, shift), by_time))
                position += FIELDS
            groups.append(group)
        self.carry, self.rows, self.consts, self.kept, self.stored, self.totals, self.inputs = groups

    def times(self, value: Any, factor: int) -> Any:
        return self.code.b.mul(value, ir.Constant(I64, factor))

    def at(self, place: Place, row: Any) -> Any:
        return self.code.b.add(place.base, self.code.b.mul(row, place.stride))

    def emit(self) -> None:
        code, math = self.code, self.math
        self.fixed = [math.load(p.base, self.mask) for p in self.consts]
        values = [math.load(p.base, self.mask) for p in (*self.carry, *self.totals)]
        if self.form.gates:
            values = self.tiles(values)
        else:
            values = self.steps(code.argument(6), code.argument(5), values, lambda _: [])
        for value, place in zip(values, [*self.carry, *self.totals], strict=True):
            math.store(value, place.base, self.mask)

    def tiles(self, values: Sequence[Any]) -> list[Any]:
        """The steps in tiles, each after the projections it needs."""
        code, form = self.code, self.form
        b, steps, by_row = code.b, code.argument(5), code.argument(7)
        scratch, weights, bias, features, by_feature = (code.argument(k) for k in range(8, 13))
        vector, (x,) = form.width * code.item, self.inputs
        by_step = ir.Constant(I64, form.gates * vector)
        past = b.add(steps, ir.Constant(I64, TILE - 1))
        with code.loop("tiles", ir.Constant(I64, 0), past, TILE, values) as tile:
            count = code.least(ir.Constant(I64, TILE), b.sub(steps, tile.index))
            first = b.add(code.argument(6), b.mul(tile.index, by_row))
            with code.loop("gates", ir.Constant(I64, 0), ir.Constant(I64, form.gates)) as gate:
                which = b.add(self.times(self.block, form.gates), gate.index)
                start = self.math.load(b.add(bias, self.times(which, vector)))
                factors = Factors(
                    Place(self.at(x, first), b.mul(by_row, x.stride)),
                    by_feature,
                    Place(b.add(weights, self.times(b.mul(which, features), vector)), ir.Constant(I64, vector)),
                    features,
                )
                out = Place(b.add(scratch, self.times(gate.index, vector)), by_step)
                emit_product_rows(code, self.math, count, factors, out, partial(_same, start))

            def projected(step: Any) -> list[Any]:
                base = b.add(scratch, b.mul(step, by_step))
                return [self.math.load(b.add(base, ir.Constant(I64, g * vector))) for g in range(form.gates)]

            tile.carried = self.steps(first, count, tile.values, projected)
        return tile.values

    def steps(self, first: Any, count: Any, values: Sequence[Any], projected: Callable[[Any], list[Any]]) -> list[Any]:
        """`count` steps from row `first` on; returns the carries and totals after them."""
        code, math, mask, form = self.code, self.math, self.mask, self.form
        with code.loop("steps", ir.Constant(I64, 0), count, carried=values) as step:
            row = code.b.add(first, code.b.mul(step.index, code.argument(7)))
            later = code.b.add(row, self.times(code.argument(7), PREFETCH))
            for writes, places in ((False, self.rows), (True, (*self.kept, *self.stored))):
                for place in places:
                    code.prefetch(self.at(place, later), form.width, writes)
            read = [math.load(self.at(p, row), mask) for p in self.rows]
            read[form.projected[0] : form.projected[0]] = projected(step.index)
            new, stores, totals = self.step(step.values, read)
            for value, place in zip([*new[: form.keep], *stores], [*self.kept, *self.stored], strict=True):
                math.store(value, self.at(place, row), mask)
            step.carried = [*new, *totals]
        return step.values

    def step(self, carried: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """The program itself: new carries, stored values and new totals."""
        loop = self.loop
        names = loop.program.inputs
        values: dict[str, Any] = dict(zip(names, [*carried[: loop.carry], *rows, *self.fixed], strict=True))

        def operand(name: str | float) -> Any:
            return values[name] if isinstance(name, str) else self.math.const(name)

        for instruction in loop.program.instructions:
            values[instruction.target] = self.operations[instruction.op](*(operand(a) for a in instruction.args))
        results = [operand(name) for name in loop.program.outputs]
        new, rest = results[: loop.carry], results[loop.carry :]
        stores, terms = rest[: loop.stored], rest[loop.stored :]
        if self.form.add_stored:
            terms = [*terms, *stores]
        totals = [self.code.b.fadd(a, t) for a, t in zip(carried[loop.carry :], terms, strict=True)]
        return new, stores, totals
