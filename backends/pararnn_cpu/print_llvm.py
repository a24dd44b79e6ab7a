"""Prints a loop program as LLVM code: lanes as explicit vectors, carries in registers along the time loop.

Explicit vectors rather than a loop for an optimiser to vectorise: the optimiser must first prove that a dozen arrays
do not overlap, and gives up. No fast-math flag is set, so two programs that share an operation get the same bits,
whatever the width of their vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir

from pararnn.programs import LoopProgram
from pararnn_cpu.emit import I64, Code, Machine, Place
from pararnn_cpu.print_product import Factors, emit_product_rows
from pararnn_cpu.vector_math import operations

# Fields of an operand: address, and strides of batch and time in bytes.
FIELDS = 3
# The most steps that are run for all lanes before the next ones, so that their projections stay in the first cache; a
# multiple of the rows that the matrix product works on at a time.
TILE = 24
PREFETCH = 8


class Header(IntEnum):
    """The argument array before the operands."""

    FIRST_GROUP = 0
    STOP_GROUP = 1
    FIRST_BLOCK = 2
    STOP_BLOCK = 3
    LANES = 4
    # Entries of all groups together, segments of one sequence, and rows from one segment to the next.
    ENTRIES = 5
    SEGMENTS = 6
    SEGMENT_ROWS = 7
    STEPS = 8
    FIRST_ROW = 9
    # 1 or -1.
    ROW_STEP = 10
    # For projected rows: addresses of a buffer, of the packed weights and of the packed bias; I, and bytes from one
    # feature to the next.
    SCRATCH = 11
    WEIGHTS = 12
    BIAS = 13
    FEATURES = 14
    BY_FEATURE = 15
    # Rows of a tile, and rows ahead to prefetch.
    TILE = 16
    PREFETCH = 17
    SIZE = 18


@dataclass(frozen=True)
class Form:
    """What decides the code beside the program.

    An entry is one sequence, or one of the segments into which every sequence is cut. Where its lanes are too few to
    fill a vector, several entries share one.

    Attributes:
        width: numbers in a vector.
        full, tail: whether an entry has blocks of `width` lanes, and a last one with fewer.
        double: float64 instead of float32. exact: elementary functions by the C library.
        entries: how many entries share a vector; each then has width // entries of its numbers.
        lanes: lanes of an entry that shares its vector, else 0.
        keep: carries that are written after each step, at that step's row.
        projected: (start, stop) of the rows that are made from inputs x as W x + b instead of being read.
        add_stored: stored values are added up as well, after the program's own totals.
    """

    width: int
    full: bool
    tail: bool
    double: bool
    exact: bool
    entries: int = 1
    lanes: int = 0
    keep: int = 0
    projected: tuple[int, int] = (0, 0)
    add_stored: bool = False

    @property
    def gates(self) -> int:
        return self.projected[1] - self.projected[0]


def print_loop(loop: LoopProgram, form: Form, machine: Machine) -> str:
    """LLVM source of ``void run(int64 *args)``.

    Operands follow the header in the order carry, rows that are read, consts, kept, stored, totals, and x if rows are
    projected. Carries and totals have one row for each entry; they are read at the start and written back at the end.
    """
    code = Code(machine, form.double)
    steps, by_row = code.argument(Header.STEPS), code.argument(Header.ROW_STEP)
    rows = code.argument(Header.TILE)
    past = code.b.add(steps, code.b.sub(rows, ir.Constant(I64, 1)))
    with code.loop("groups", code.argument(Header.FIRST_GROUP), code.argument(Header.STOP_GROUP)) as group:
        # All lanes for a stretch of time, then the next stretch: rows are read as they lie in memory.
        with code.loop("tiles", ir.Constant(I64, 0), past, rows) as tile:
            first = code.b.add(code.argument(Header.FIRST_ROW), code.b.mul(tile.index, by_row))
            count = code.least(rows, code.b.sub(steps, tile.index))
            for block in _blocks(code, loop, form, group.index):
                block.emit(first, count)
    return code.finish()


def _blocks(code: Code, loop: LoopProgram, form: Form, group: Any) -> Iterator[_Block]:
    """A vector that several entries share, or the full blocks of one entry and the last one; each inside its loop."""
    lanes, width = code.argument(Header.LANES), ir.Constant(I64, form.width)
    first, stop = code.argument(Header.FIRST_BLOCK), code.argument(Header.STOP_BLOCK)
    whole = code.least(stop, code.b.sdiv(lanes, width))
    if form.entries > 1:
        yield _Block(code, loop, form, group, ir.Constant(I64, 0), lanes)
    if form.full:
        with code.loop("blocks", first, whole) as block:
            yield _Block(code, loop, form, group, block.index, None)
    if form.tail:
        # The last block, if it belongs to this piece of the work.
        with code.loop("tail", code.most(first, whole), stop) as block:
            left = code.b.sub(lanes, code.b.mul(block.index, width))
            yield _Block(code, loop, form, group, block.index, left)


class _Operand(NamedTuple):
    """Addresses of row 0 in each entry of the vector, and bytes from one row to the next."""

    bases: list[Any]
    stride: Any


class _Block:
    """All steps of one vector of lanes; `left` is how many of them there are, None if all."""

    def __init__(self, code: Code, loop: LoopProgram, form: Form, group: Any, block: Any, left: Any | None) -> None:
        self.code, self.loop, self.form, self.group, self.block = code, loop, form, group, block
        # A vector is made of pieces, one for each of its entries.
        self.math, self.piece = code.vectors(form.width), code.vectors(form.width // form.entries)
        self.operations = operations(self.math, form.exact)
        self.mask = None if left is None or form.lanes == self.piece.width else self.piece.first_lanes(left)
        self.position = int(Header.SIZE)
        totals = loop.totals + (loop.stored if form.add_stored else 0)
        entries = [self.entry(ir.Constant(I64, e)) for e in range(form.entries)]
        shift = self.times(block, form.width * code.item)
        self.carry = self.operands(loop.carry, entries, shift, rows=False)
        self.rows = self.operands(loop.rows - form.gates, entries, shift)
        self.consts = self.operands(loop.consts, entries, shift, rows=False)
        self.kept = self.operands(form.keep, entries, shift)
        self.stored = self.operands(loop.stored, entries, shift)
        self.totals = self.operands(totals, entries, shift, rows=False)

    def times(self, value: Any, factor: int) -> Any:
        return self.code.b.mul(value, ir.Constant(I64, factor))

    def entry(self, within: Any) -> Any:
        """The number of an entry of this vector; those past the last do once more, to the same effect, what it does."""
        last = self.code.b.sub(self.code.argument(Header.ENTRIES), ir.Constant(I64, 1))
        return self.code.least(self.code.b.add(self.times(self.group, self.form.entries), within), last)

    def base(self, position: int, entry: Any, rows: bool) -> Any:
        """The address of row 0 of an entry: of its segment of a sequence, or of its row where there is one for each."""
        b, (address, by_batch, by_time) = self.code.b, (self.code.argument(position + k) for k in range(FIELDS))
        if not rows:
            return b.add(address, b.mul(entry, by_batch))
        segments = self.code.argument(Header.SEGMENTS)
        sequence = b.add(address, b.mul(b.sdiv(entry, segments), by_batch))
        return b.add(sequence, b.mul(b.srem(entry, segments), b.mul(self.code.argument(Header.SEGMENT_ROWS), by_time)))

    def operands(self, count: int, entries: Sequence[Any], shift: Any, rows: bool = True) -> list[_Operand]:
        """The next `count` operands."""
        found = []
        for _ in range(count):
            bases = [self.code.b.add(self.base(self.position, e, rows), shift) for e in entries]
            found.append(_Operand(bases, self.code.argument(self.position + 2)))
            self.position += FIELDS
        return found

    def load(self, operand: _Operand, row: Any | None = None) -> Any:
        b = self.code.b
        offset = ir.Constant(I64, 0) if row is None else b.mul(row, operand.stride)
        return self.math.joined([self.piece.load(b.add(base, offset), self.mask) for base in operand.bases])

    def store(self, value: Any, operand: _Operand, row: Any | None = None) -> None:
        b = self.code.b
        offset = ir.Constant(I64, 0) if row is None else b.mul(row, operand.stride)
        for part, base in zip(self.math.split(value, len(operand.bases)), operand.bases, strict=True):
            self.piece.store(part, b.add(base, offset), self.mask)

    def emit(self, first: Any, count: Any) -> None:
        """`count` steps from row `first` on."""
        code, form = self.code, self.form
        self.fixed = [self.load(operand) for operand in self.consts]
        values = [self.load(operand) for operand in (*self.carry, *self.totals)]
        if form.gates:
            with code.loop("entries", ir.Constant(I64, 0), ir.Constant(I64, form.entries)) as entry:
                self.project(first, count, entry.index)
        values = self.steps(first, count, values)
        for value, operand in zip(values, [*self.carry, *self.totals], strict=True):
            self.store(value, operand)

    @property
    def by_step(self) -> Any:
        """Bytes from one step to the next in the buffer of projections."""
        return ir.Constant(I64, self.form.gates * self.form.width * self.code.item)

    def project(self, first: Any, count: Any, within: Any) -> None:
        """The gates of one entry for `count` steps from row `first` on, into the buffer."""
        code, form, b = self.code, self.form, self.code.b
        features, by_row = code.argument(Header.FEATURES), code.argument(Header.ROW_STEP)
        by_time = code.argument(self.position + 2)
        x = b.add(self.base(self.position, self.entry(within), True), b.mul(first, by_time))
        piece = self.piece.width * code.item
        with code.loop("gates", ir.Constant(I64, 0), ir.Constant(I64, form.gates)) as gate:
            which = b.add(self.times(self.block, form.gates), gate.index)
            start = self.piece.load(b.add(code.argument(Header.BIAS), self.times(which, piece)))
            matrix = b.add(code.argument(Header.WEIGHTS), self.times(b.mul(which, features), piece))
            factors = Factors(
                Place(x, b.mul(by_row, by_time)),
                code.argument(Header.BY_FEATURE),
                Place(matrix, ir.Constant(I64, piece)),
                features,
            )
            place = b.add(self.times(gate.index, form.width * code.item), self.times(within, piece))
            out = Place(b.add(code.argument(Header.SCRATCH), place), self.by_step)
            emit_product_rows(code, self.piece, count, factors, out, partial(_same, start))

    def projected(self, step: Any) -> list[Any]:
        """The gates of a step, from the buffer."""
        b, vector = self.code.b, self.form.width * self.code.item
        if not self.form.gates:
            return []
        base = b.add(self.code.argument(Header.SCRATCH), b.mul(step, self.by_step))
        return [self.math.load(b.add(base, ir.Constant(I64, g * vector))) for g in range(self.form.gates)]

    def steps(self, first: Any, count: Any, values: Sequence[Any]) -> list[Any]:
        """The steps' loop; returns the carries and totals after it."""
        code, b, form = self.code, self.code.b, self.form
        by_row = code.argument(Header.ROW_STEP)
        with code.loop("steps", ir.Constant(I64, 0), count, carried=values) as step:
            row = b.add(first, b.mul(step.index, by_row))
            if form.entries == 1:
                self.prefetch(b.add(row, b.mul(by_row, code.argument(Header.PREFETCH))))
            read = [self.load(operand, row) for operand in self.rows]
            read[form.projected[0] : form.projected[0]] = self.projected(step.index)
            new, stores, totals = self.step(step.values, read)
            for value, operand in zip([*new[: form.keep], *stores], [*self.kept, *self.stored], strict=True):
                self.store(value, operand, row)
            step.carried = [*new, *totals]
        return step.values

    def prefetch(self, row: Any) -> None:
        for writes, operands in ((False, self.rows), (True, (*self.kept, *self.stored))):
            for operand in operands:
                address = self.code.b.add(operand.bases[0], self.code.b.mul(row, operand.stride))
                self.code.prefetch(address, self.form.width, writes)

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


def _same(value: Any, _: Any) -> Any:
    return value
