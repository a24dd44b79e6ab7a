"""Runs a program's instructions on JAX values while they are traced; what JAX differentiates stays finite."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pararnn.graph import Program


@jax.custom_jvp
def smooth_sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)), whose derivative is right where exp(-x) overflows."""
    return 1.0 / (jnp.exp(-x) + 1.0)


@smooth_sigmoid.defjvp
def _sigmoid_jvp(primals: Any, tangents: Any) -> Any:
    s = smooth_sigmoid(primals[0])
    return s, s * (1.0 - s) * tangents[0]


class _Namespace:
    """jax.numpy for a cell's own step, with the sigmoid above."""

    smooth_sigmoid = staticmethod(smooth_sigmoid)

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)


namespace = _Namespace()

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "neg": operator.neg,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "sigmoid": smooth_sigmoid,
}


def evaluate(program: Program, *operands: Any) -> tuple[Any, ...]:
    """The outputs of `program`; an output that does not depend on the operands is a number."""
    values: dict[str, Any] = dict(zip(program.inputs, operands, strict=True))
    for instruction in program.instructions:
        function = _FUNCTIONS.get(instruction.op) or getattr(jnp, instruction.op)
        args = [values[a] if isinstance(a, str) else a for a in instruction.args]
        values[instruction.target] = function(*args)
    return tuple(values[o] if isinstance(o, str) else o for o in program.outputs)
