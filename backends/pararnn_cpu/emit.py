"""What the printers share: a function under construction, its arguments, loops, and addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llvmlite import ir

from pararnn_cpu.vector_math import VectorMath

I64 = ir.IntType(64)
CACHE_LINE = 64


@dataclass(frozen=True)
class Machine:
    """What of the processor decides the code: fused multiply-add, and the bytes and number of vector registers."""

    fma: bool
    vector_bytes: int
    registers: int


class Place(NamedTuple):
    """An address, and the bytes from one row to the next."""

    base: Any
    stride: Any


@dataclass
class Turn:
    """One turn of a loop: its index, the values carried into it, and (set by its body) those carried out.

    After the loop, `values` are those that the last turn left.
    """

    index: Any
    values: list[Any]
    carried: list[Any] = field(default_factory=list)


class Code:
    """``void run(int64 *args)`` under construction; `b` builds at the current place."""

    def __init__(self, machine: Machine, double: bool) -> None:
        self.machine, self.double, self.item = machine, double, 8 if double else 4
        self.module = ir.Module("pararnn")
        kind = ir.FunctionType(ir.VoidType(), [I64.as_pointer()])
        self.function = ir.Function(self.module, kind, "run")
        entry = self.function.append_basic_block("entry")
        body = self.function.append_basic_block("body")
        self.entry = ir.IRBuilder(entry)
        self.leave = self.entry.branch(body)
        self.b = ir.IRBuilder(body)
        self.known: dict[int, Any] = {}

    def argument(self, index: int) -> Any:
        """args[index], read once at the top of the function."""
        if index not in self.known:
            self.entry.position_before(self.leave)
            place = self.entry.gep(self.function.args[0], [ir.Constant(I64, index)])
            self.known[index] = self.entry.load(place)
        return self.known[index]

    def vectors(self, width: int) -> VectorMath:
        return VectorMath(self.b, self.module, width, self.double, self.machine.fma)

    def load(self, address: Any) -> Any:
        """The number at an integer address."""
        kind = ir.DoubleType() if self.double else ir.FloatType()
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()))

    def prefetch(self, address: Any, width: int, writes: bool) -> None:
        """Fetches `width` numbers into cache; an address outside every array is ignored."""
        byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        name = "llvm.prefetch.p0"
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        near, data = ir.Constant(i32, 3), ir.Constant(i32, 1)
        for offset in range(0, width * self.item, CACHE_LINE):
            place = self.b.inttoptr(self.b.add(address, ir.Constant(I64, offset)), byte)
            self.b.call(function, [place, ir.Constant(i32, int(writes)), near, data])

    def least(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def most(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.icmp_signed(">", x, y), x, y)

    @contextmanager
    def loop(self, name: str, start: Any, stop: Any, step: Any = 1, carried: Sequence[Any] = ()) -> Iterator[Turn]:
        """for index in range(start, stop, step), where a turn that would run past `stop` is not taken."""
        b, before = self.b, self.b.block
        head, body, after = (self.function.append_basic_block(f"{name}_{part}") for part in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64)
        index.add_incoming(start, before)
        values = []
        for value in carried:
            phi = b.phi(value.type)
            phi.add_incoming(value, before)
            values.append(phi)
        following = b.add(index, ir.Constant(I64, step) if isinstance(step, int) else step)
        b.cbranch(b.icmp_signed("<=", following, stop), body, after)
        b.position_at_end(body)
        turn = Turn(index, values)
        yield turn
        index.add_incoming(following, b.block)
        for phi, value in zip(values, turn.carried, strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)

    def finish(self) -> str:
        """LLVM source of the whole function."""
        self.b.ret_void()
        return str(self.module)
