"""Prints a loop program as one Python loop of NumPy ufuncs with ``out=`` buffers.

The arithmetic is that of the array-API form, operation by operation, so results are the same bits; what is saved is
the memory that each operation would allocate and the Python call per step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pararnn.graph.print_array import number
from pararnn.programs import LoopProgram

_UFUNCS = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "pow": "power",
    "neg": "negative",
    "exp": "exp",
    "expm1": "expm1",
    "log": "log",
    "log1p": "log1p",
    "sqrt": "sqrt",
    "tanh": "tanh",
    "sin": "sin",
    "cos": "cos",
    "abs": "absolute",
    "sign": "sign",
    "maximum": "maximum",
    "minimum": "minimum",
    "logaddexp": "logaddexp",
    "less": "less",
    "less_equal": "less_equal",
    "greater": "greater",
    "greater_equal": "greater_equal",
    "equal": "equal",
}
_GO_BACK = frozenset({"where", "logaddexp"})


class _Buffers:
    """Names for buffers, given out and taken back while the code is printed."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.count = prefix, 0
        self.free: list[str] = []

    def take(self) -> str:
        if self.free:
            return self.free.pop()
        self.count += 1
        return f"{self.prefix}{self.count - 1}"


def print_ufuncs(loop: LoopProgram) -> str:
    """Python source of ``run(order, carry, rows, consts, kept, stored, totals, shift, shape, dtype)``."""
    program = loop.program
    carry = program.inputs[: loop.carry]
    rows = program.inputs[loop.carry : loop.carry + loop.rows]
    consts = program.inputs[loop.carry + loop.rows :]
    floats, flags = _Buffers("b"), _Buffers("q")
    place: dict[str, str] = {}
    body: list[str] = []
    conditions = program.conditions
    # An output that is written once, straight to where it is wanted, needs no copy.
    target_of: dict[str, str] = {}
    for k in range(loop.stored):
        name = program.outputs[loop.carry + k]
        if isinstance(name, str) and name not in program.inputs and name not in target_of:
            target_of[name] = f"w{k}"

    def ref(value: str | float) -> str:
        return place.get(value, value) if isinstance(value, str) else number(value)

    def give_back(names: tuple[str, ...]) -> None:
        for name in names:
            if place.get(name, "-")[0] in "bq":
                (flags if name in conditions else floats).free.append(place[name])

    for instruction, frees in zip(program.instructions, program.last_uses(), strict=True):
        args = [ref(a) for a in instruction.args]
        pool = flags if instruction.target in conditions else floats
        # An elementwise ufunc may write onto an operand that nobody reads again. An operation printed as several
        # ufuncs that go back to their operands may not.
        if instruction.op not in _GO_BACK:
            give_back(frees)
        where = target_of.get(instruction.target) or pool.take()
        place[instruction.target] = where
        if instruction.op == "sigmoid":
            body += [
                f"np.negative({args[0]}, out={where})",
                f"np.exp({where}, out={where})",
                f"np.add({where}, 1.0, out={where})",
                f"np.divide(1.0, {where}, out={where})",
            ]
        elif instruction.op == "logaddexp":
            # NumPy's own is a scalar loop; this is the same function from vectorised pieces.
            spare = floats.take()
            body += [
                f"np.subtract({args[0]}, {args[1]}, out={spare})",
                f"np.maximum({args[0]}, {args[1]}, out={where})",
                f"np.absolute({spare}, out={spare})",
                f"np.negative({spare}, out={spare})",
                f"np.exp({spare}, out={spare})",
                f"np.log1p({spare}, out={spare})",
                f"np.add({where}, {spare}, out={where})",
            ]
            floats.free.append(spare)
        elif instruction.op == "where":
            body += [f"np.copyto({where}, {args[2]})", f"np.copyto({where}, {args[1]}, where={args[0]})"]
        else:
            body.append(f"np.{_UFUNCS[instruction.op]}({', '.join(args)}, out={where})")
        if instruction.op in _GO_BACK:
            give_back(frees)

    tail: list[str] = []
    for k in range(loop.stored):
        value = ref(program.outputs[loop.carry + k])
        if value != f"w{k}":
            tail.append(f"w{k}[...] = {value}")
    for k in range(loop.totals):
        tail.append(f"a{k} += {ref(program.outputs[loop.carry + loop.stored + k])}")
    # All new carries are written before any is read again: first into the spare buffers, then names swap.
    for k in range(loop.carry):
        tail.append(f"np.copyto(y{k}, {ref(program.outputs[k])})")
    return _assemble(loop, carry, rows, consts, floats.count, flags.count, body, tail)


def _assemble(
    loop: LoopProgram,
    carry: tuple[str, ...],
    rows: tuple[str, ...],
    consts: tuple[str, ...],
    floats: int,
    flags: int,
    body: list[str],
    tail: list[str],
) -> str:
    def unpack(names: list[str] | tuple[str, ...], value: str) -> list[str]:
        return [f"({', '.join(names)},) = {value}"] if names else []

    head = [
        *unpack(consts, "consts"),
        *unpack([f"R_{r}" for r in rows], "rows"),
        *unpack([f"W{k}" for k in range(loop.stored)], "stored"),
        *unpack([f"a{k}" for k in range(loop.totals)], "totals"),
        *(f"b{k} = np.empty(shape, dtype)" for k in range(floats)),
        *(f"q{k} = np.empty(shape, bool)" for k in range(flags)),
        *(f"{name} = np.array(carry[{k}])" for k, name in enumerate(carry)),
        *(f"z{k} = np.empty(shape, dtype)" for k in range(len(carry))),
        "kept_count = len(kept)",
    ]
    step = [f"{name} = R_{name}[l]" for name in rows]
    step += [f"w{k} = W{k}[l]" for k in range(loop.stored)]
    step += [f"y{k} = kept[{k}][l + shift] if {k} < kept_count else z{k}" for k in range(len(carry))]
    step += body + tail
    # A carry that is not kept swaps with its spare buffer; a kept one moves on to the row just written.
    step += [f"{name}, z{k} = y{k}, ({name} if {k} >= kept_count else z{k})" for k, name in enumerate(carry)]
    lines = ["def run(order, carry, rows, consts, kept, stored, totals, shift, shape, dtype):"]
    lines += [f"    {line}" for line in head]
    lines += ["    for l in order:"]
    lines += [f"        {line}" for line in step] or ["        pass"]
    lines += [f"    return ({''.join(name + ', ' for name in carry)})"]
    return "\n".join(lines) + "\n"


def compile_ufuncs(loop: LoopProgram) -> Callable[..., Any]:
    """The function that :func:`print_ufuncs` describes."""
    scope: dict[str, Any] = {"np": np}
    exec(compile(print_ufuncs(loop), "<pararnn numpy program>", "exec"), scope)
    return scope["run"]
