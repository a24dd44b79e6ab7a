"""Prints a loop program as LLVM code: lanes as explicit vectors, carries in registers along the whole time loop.

Explicit vectors rather than a loop for an optimiser to vectorise: the optimiser must first prove that a dozen arrays
do not overlap, and gives up. No fast-math flag is set, so two programs that share an operation get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from pararnn.programs import LoopProgram
from pararnn_cpu.vector_math import VectorMath, operations

_I64 = ir.IntType(64)
# Fields before the operands in the argument array: batch range, lane range, steps, first row, row step (1 or -1).
HEADER = 7
# Fields of an operand: address, and strides of batch and time in bytes.
FIELDS = 3


def widths(double: bool) -> tuple[int, ...]:
    """Lanes per vector: wide for throughput, then narrower for what is left over."""
    return (16, 4, 1) if double else (32, 8, 1)


def print_llvm(loop: LoopProgram, keep: int, *, double: bool, exact: bool, fma: bool) -> str:
    """LLVM source of ``void run(int64 *args)``.

    Operands follow the header in the order carry in, rows, consts, carry out, kept, stored, totals. A kept carry is
    written after each step at that step's row.
    """
    module = ir.Module("pararnn")
    kind = ir.FunctionType(ir.VoidType(), [_I64.as_pointer()])
    function = ir.Function(module, kind, "run")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    counts = (loop.carry, loop.rows, loop.consts, loop.carry, keep, loop.stored, loop.totals)
    read = _Arguments(builder, function.args[0])
    batch = _Loop(builder, function, "batch", read.header(0), read.header(1))
    start: Any = read.header(2)
    for width in widths(double):
        start = _emit_width(builder, function, module, loop, counts, read, batch.index, start, width, double, exact, fma)
    batch.close()
    builder.ret_void()
    return str(module)


class _Arguments:
    """Reads the argument array once, at the top of the function."""

    def __init__(self, builder: ir.IRBuilder, array: Any) -> None:
        self.builder, self.array, self.known = builder, array, {}
        self.block = builder.block

    def at(self, index: int) -> Any:
        if index not in self.known:
            with self.builder.goto_block(self.block):
                place = self.builder.gep(self.array, [ir.Constant(_I64, index)])
                self.known[index] = self.builder.load(place)
        return self.known[index]

    def header(self, index: int) -> Any:
        return self.at(index)

    def operand(self, index: int) -> tuple[Any, Any, Any]:
        first = HEADER + FIELDS * index
        return self.at(first), self.at(first + 1), self.at(first + 2)


class _Loop:
    """for index in range(start, stop, step), with values carried from turn to turn."""

    def __init__(
        self,
        builder: ir.IRBuilder,
        function: Any,
        name: str,
        start: Any,
        stop: Any,
        step: int = 1,
        carried: Sequence[Any] = (),
    ) -> None:
        self.builder = builder
        before = builder.block
        self.head = function.append_basic_block(f"{name}_head")
        body = function.append_basic_block(f"{name}_body")
        self.after = function.append_basic_block(f"{name}_after")
        builder.branch(self.head)
        builder.position_at_end(self.head)
        self.index = builder.phi(_I64)
        self.index.add_incoming(start, before)
        self.values = []
        for value in carried:
            phi = builder.phi(value.type)
            phi.add_incoming(value, before)
            self.values.append(phi)
        self.step = ir.Constant(_I64, step)
        # A turn that would run past `stop` is not taken.
        builder.cbranch(builder.icmp_signed("<=", builder.add(self.index, self.step), stop), body, self.after)
        builder.position_at_end(body)

    def close(self, carried: Sequence[Any] = ()) -> None:
        following = self.builder.add(self.index, self.step)
        self.index.add_incoming(following, self.builder.block)
        for phi, value in zip(self.values, carried, strict=True):
            phi.add_incoming(value, self.builder.block)
        self.builder.branch(self.head)
        self.builder.position_at_end(self.after)


def _emit_width(
    builder: ir.IRBuilder,
    function: Any,
    module: ir.Module,
    loop: LoopProgram,
    counts: Sequence[int],
    read: _Arguments,
    batch: Any,
    start: Any,
    width: int,
    double: bool,
    exact: bool,
    fma: bool,
) -> Any:
    """All full vectors of `width` lanes from lane `start` on; returns the first lane not done."""
    math = VectorMath(builder, module, width, double, fma)
    emit = operations(math, exact)
    item = 8 if double else 4
    lanes = _Loop(builder, function, f"lanes{width}", start, read.header(3), width)
    shift = builder.mul(lanes.index, ir.Constant(_I64, item))
    groups: list[list[tuple[Any, Any]]] = []
    position = 0
    for count in counts:
        group = []
        for k in range(position, position + count):
            address, by_batch, by_time = read.operand(k)
            base = builder.add(builder.add(address, builder.mul(batch, by_batch)), shift)
            group.append((base, by_time))
        groups.append(group)
        position += count
    carry_in, rows, consts, carry_out, kept, stored, totals = groups

    def load(address: Any) -> Any:
        value = builder.load(builder.inttoptr(address, math.vector.as_pointer()))
        value.align = item
        return value

    def store(value: Any, address: Any) -> None:
        builder.store(value, builder.inttoptr(address, math.vector.as_pointer())).align = item

    fixed = [load(base) for base, _ in consts]
    first = [load(base) for base, _ in carry_in] + [math.const(0.0)] * len(totals)
    steps = _Loop(builder, function, f"steps{width}", ir.Constant(_I64, 0), read.header(4), 1, first)
    row = builder.add(read.header(5), builder.mul(steps.index, read.header(6)))

    def at_row(operand: tuple[Any, Any]) -> Any:
        base, by_time = operand
        return builder.add(base, builder.mul(row, by_time))

    names = loop.program.inputs
    values: dict[str, Any] = dict(
        zip(names, [*steps.values[: loop.carry], *(load(at_row(r)) for r in rows), *fixed], strict=True)
    )

    def operand_of(name: str | float) -> Any:
        return values[name] if isinstance(name, str) else math.const(name)

    for instruction in loop.program.instructions:
        operation: Callable[..., Any] = emit[instruction.op]
        values[instruction.target] = operation(*(operand_of(a) for a in instruction.args))
    results = [operand_of(name) for name in loop.program.outputs]
    new, rest = results[: loop.carry], results[loop.carry :]
    for value, place in zip(new, kept, strict=False):
        store(value, at_row(place))
    for value, place in zip(rest, stored, strict=False):
        store(value, at_row(place))
    added = [builder.fadd(a, b) for a, b in zip(steps.values[loop.carry :], rest[loop.stored :], strict=True)]
    steps.close([*new, *added])
    for value, (base, _) in zip(steps.values, [*carry_out, *totals], strict=True):
        store(value, base)
    lanes.close()
    return lanes.index
