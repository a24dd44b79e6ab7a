"""Prints a program as array-API calls: the form that runs on every namespace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pararnn.arrays import Namespace, namespace_name
from pararnn.graph.program import Instruction, Program

_OPERATORS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "pow": "{0} ** {1}",
    "neg": "-{0}",
    "less": "{0} < {1}",
    "less_equal": "{0} <= {1}",
    "greater": "{0} > {1}",
    "greater_equal": "{0} >= {1}",
    "equal": "{0} == {1}",
    "sigmoid": "1.0 / (xp.exp(-{0}) + 1.0)",
}


def number(value: float) -> str:
    """A Python literal for `value`, infinities and NaN included."""
    text = repr(value)
    return f"float('{text}')" if "inf" in text or "nan" in text else text


def _line(instruction: Instruction, conditions: frozenset[str]) -> str:
    # Functions of the standard take arrays, so a number beside an array is first made one like it; the
    # operators take numbers as they are.
    args = [a if isinstance(a, str) else number(a) for a in instruction.args]
    if instruction.op in _OPERATORS:
        return f"{instruction.target} = {_OPERATORS[instruction.op].format(*args)}"
    arrays = [a for a in instruction.args if isinstance(a, str)]
    like = next((a for a in arrays if a not in conditions), None)
    if like is not None:
        args = [a if isinstance(a, str) else f"xp.full_like({like}, {number(a)})" for a in instruction.args]
    elif instruction.op == "where":
        # Both branches are numbers: their array takes its dtype and shape from the program's first input.
        args = [args[0], *(f"xp.zeros_like(first) + {a}" for a in args[1:])]
    return f"{instruction.target} = xp.{instruction.op}({', '.join(args)})"


def print_array(program: Program, name: str = "program") -> str:
    """Python source of ``name(xp, *inputs)`` that returns the tuple of outputs."""
    lines = [f"def {name}(xp, {', '.join(program.inputs)}):"]
    if program.inputs:
        lines.append(f"    first = {program.inputs[0]}")
    lines += [f"    {_line(i, program.conditions)}" for i in program.instructions]
    outputs = [o if isinstance(o, str) else number(o) for o in program.outputs]
    lines.append(f"    return ({''.join(o + ', ' for o in outputs)})")
    return "\n".join(lines) + "\n"


def compile_array(program: Program) -> Callable[..., tuple[Any, ...]]:
    """The function that :func:`print_array` describes."""
    scope: dict[str, Any] = {}
    exec(compile(print_array(program), "<pararnn array program>", "exec"), scope)
    return scope["program"]


# How a program becomes a function of arrays of a library, where one kernel can do what would be many calls; by the
# library's name, put there by backends.
FUSED: dict[str, Callable[[Program], Callable[..., tuple[Any, ...]]]] = {}


def array_function(xp: Namespace, program: Program, compiled: dict[str, Any]) -> Callable[..., tuple[Any, ...]]:
    """`program` as a function of ``(xp, *inputs)``, made once for each kind of library and kept in `compiled`."""
    library = namespace_name(xp)
    key = f"array {library}" if library in FUSED else "array"
    if key not in compiled:
        compiled[key] = FUSED.get(library, compile_array)(program)
    return compiled[key]
