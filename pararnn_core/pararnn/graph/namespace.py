"""The array namespace that a step sees while it is traced: elementwise functions that make nodes."""

from __future__ import annotations

import math
from typing import Any

from pararnn.errors import UntraceableError
from pararnn.graph.expr import ARITY, Expr, Graph

# Array API names whose node has another name.
_RENAMED = {
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "negative": "neg",
    "pow": "pow",
    "absolute": "abs",
}
_OPERATORS_ONLY = {"sub", "mul", "div", "neg"}
KNOWN = tuple(sorted((set(ARITY) - _OPERATORS_ONLY) | set(_RENAMED) | {"square", "reciprocal", "clip"}))


class SymbolicNamespace:
    """Stands in for ``xp`` in ``cell.step(xp, ...)``; an unknown function is refused by name."""

    pi, e, inf, nan = math.pi, math.e, math.inf, math.nan

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __getattr__(self, name: str) -> Any:
        op = _RENAMED.get(name, name)
        if op not in ARITY or (name == op and op in _OPERATORS_ONLY):
            raise UntraceableError(
                f"xp.{name} cannot be traced: a channelwise step is made of elementwise operations "
                f"({', '.join(KNOWN)} and the arithmetic operators); write it with those, or run the cell on the "
                "array path with sequential_apply"
            )

        def function(*args: Any) -> Expr:
            if len(args) != ARITY[op]:
                raise UntraceableError(f"xp.{name} takes {ARITY[op]} arrays, got {len(args)}")
            return self.graph.apply(op, *(self.graph.lift(a, f"xp.{name}") for a in args))

        return function

    def square(self, x: Any) -> Expr:
        x = self.graph.lift(x, "xp.square")
        return self.graph.apply("mul", x, x)

    def reciprocal(self, x: Any) -> Expr:
        return self.graph.apply("div", self.graph.const(1.0), self.graph.lift(x, "xp.reciprocal"))

    def clip(self, x: Any, min: Any = None, max: Any = None) -> Expr:
        node = self.graph.lift(x, "xp.clip")
        if min is not None:
            node = self.graph.apply("maximum", node, self.graph.lift(min, "xp.clip"))
        if max is not None:
            node = self.graph.apply("minimum", node, self.graph.lift(max, "xp.clip"))
        return node
