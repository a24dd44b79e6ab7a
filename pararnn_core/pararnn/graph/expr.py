"""Nodes of the expression graph: immutable elementwise operations, shared by construction.

A cell's ``step`` is run once on symbols. Each operation makes a node; asking twice for the same
operation of the same nodes gives the same node, so shared subexpressions are computed once wherever the
graph is printed. Nodes made by the cell's own code are never rewritten: a printed program does the
arithmetic of ``step`` in the order in which ``step`` wrote it, which is what makes its bits equal the
oracle's. Only derivatives are simplified, through :func:`add`, :func:`mul` and :func:`neg`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pararnn.errors import UntraceableError

# Operations a printer must know, with their number of operands. `where` takes a condition first;
# the comparisons give conditions.
ARITY: dict[str, int] = {
    "add": 2,
    "sub": 2,
    "mul": 2,
    "div": 2,
    "pow": 2,
    "neg": 1,
    "exp": 1,
    "expm1": 1,
    "log": 1,
    "log1p": 1,
    "sqrt": 1,
    "tanh": 1,
    "sigmoid": 1,
    "sin": 1,
    "cos": 1,
    "abs": 1,
    "sign": 1,
    "logaddexp": 2,
    "maximum": 2,
    "minimum": 2,
    "less": 2,
    "less_equal": 2,
    "greater": 2,
    "greater_equal": 2,
    "equal": 2,
    "where": 3,
}

CONDITIONS = frozenset({"less", "less_equal", "greater", "greater_equal", "equal"})


class Graph:
    """Owns the nodes of one traced function and hands out each distinct node once."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[Any, ...], Expr] = {}

    def _intern(self, op: str, args: tuple[Expr, ...], value: Any) -> Expr:
        # repr() keeps 0.0 and -0.0 apart, which == does not.
        key = (op, tuple(id(a) for a in args), repr(value))
        node = self._nodes.get(key)
        if node is None:
            node = Expr(self, op, args, value)
            self._nodes[key] = node
        return node

    def input(self, name: str) -> Expr:
        """The symbol called `name`."""
        return self._intern("input", (), name)

    def const(self, value: float) -> Expr:
        """The real number `value`."""
        return self._intern("const", (), float(value))

    def apply(self, op: str, *args: Expr) -> Expr:
        """The node for operation `op` of `args`, exactly as written."""
        return self._intern(op, args, None)

    def lift(self, value: Any, op: str) -> Expr:
        """`value` as a node of this graph; numbers become constants."""
        if isinstance(value, Expr):
            if value.graph is not self:
                raise UntraceableError(f"{op}: operands come from two different traces; make all of them in one step")
            return value
        if isinstance(value, bool) or not hasattr(value, "__float__") or getattr(value, "ndim", 0) != 0:
            raise UntraceableError(
                f"{op}: wanted symbols of this step or real numbers, got {type(value).__name__}; "
                "declare arrays as the cell's params so that the trace can see them"
            )
        return self.const(float(value))


def _binary(op: str) -> Callable[[Expr, Any], Expr]:
    def method(self: Expr, other: Any) -> Expr:
        return self.graph.apply(op, self, self.graph.lift(other, op))

    return method


def _reflected(op: str) -> Callable[[Expr, Any], Expr]:
    def method(self: Expr, other: Any) -> Expr:
        return self.graph.apply(op, self.graph.lift(other, op), self)

    return method


# What NumPy calls the operators of its own scalars.
_NUMPY_OPERATORS = {
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "power": "pow",
    "less": "less",
    "less_equal": "less_equal",
    "greater": "greater",
    "greater_equal": "greater_equal",
    "equal": "equal",
}
# Functions whose name in the standard is another.
_NUMPY_NAMES = {"absolute": "abs"}

_ELEMENTWISE = "a channelwise step may use elementwise operations only"


def _refused(what: str, instead: str) -> Callable[..., Any]:
    def method(self: Expr, *others: Any) -> Any:
        raise UntraceableError(f"{what} of a symbol cannot be traced; {instead}")

    return method


class Expr:
    """One node: an operation, its operands, and for symbols and constants the name or number."""

    __slots__ = ("args", "graph", "op", "value")

    def __init__(self, graph: Graph, op: str, args: tuple[Expr, ...], value: Any) -> None:
        self.graph = graph
        self.op = op
        self.args = args
        self.value = value

    __add__ = _binary("add")
    __radd__ = _reflected("add")
    __sub__ = _binary("sub")
    __rsub__ = _reflected("sub")
    __mul__ = _binary("mul")
    __rmul__ = _reflected("mul")
    __truediv__ = _binary("div")
    __rtruediv__ = _reflected("div")
    __lt__ = _binary("less")
    __le__ = _binary("less_equal")
    __gt__ = _binary("greater")
    __ge__ = _binary("greater_equal")

    # A comparison like the others: `==` between symbols is a condition, never a Python truth value.
    __eq__ = _binary("equal")  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **keywords: Any) -> Any:
        """A NumPy number with a symbol is arithmetic like any other; NumPy's functions are not the step's."""
        op = _NUMPY_OPERATORS.get(ufunc.__name__)
        if op is None or method != "__call__" or keywords:
            name = _NUMPY_NAMES.get(ufunc.__name__, ufunc.__name__)
            raise UntraceableError(
                f"np.{ufunc.__name__} of a symbol cannot be traced; use xp.{name}, of the namespace that step is given"
            )
        return self.graph.apply(op, *(self.graph.lift(value, op) for value in operands))

    def __pow__(self, other: Any) -> Expr:
        if not isinstance(other, Expr) and other == 2:
            return self.graph.apply("mul", self, self)
        return self.graph.apply("pow", self, self.graph.lift(other, "pow"))

    def __rpow__(self, other: Any) -> Expr:
        return self.graph.apply("pow", self.graph.lift(other, "pow"), self)

    def __neg__(self) -> Expr:
        return self.graph.apply("neg", self)

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return self.graph.apply("abs", self)

    def __bool__(self) -> bool:
        raise UntraceableError(
            f"the value of '{self.op}' is not known while a step is traced, so `if`, `and`, `or` and `while` cannot "
            "depend on it; use xp.where(condition, a, b)"
        )

    def __float__(self) -> float:
        raise UntraceableError(f"float() of '{self.op}' is not known while a step is traced; keep it symbolic")

    def __iter__(self) -> Any:
        raise UntraceableError("a symbol stands for one value per channel and cannot be iterated over")

    def __getitem__(self, index: Any) -> Any:
        raise UntraceableError(
            "a channelwise step cannot index its operands: no channel sees another, and the leading axes are free"
        )

    def __matmul__(self, other: Any) -> Any:
        raise UntraceableError("matmul mixes channels; a channelwise step may use elementwise operations only")

    __rmatmul__ = __matmul__

    __ne__ = _refused("!=", "use xp.where(a == b, ...)")  # type: ignore[assignment]
    __and__ = __rand__ = _refused("&", "nest two xp.where")
    __or__ = __ror__ = _refused("|", "nest two xp.where")
    __xor__ = __rxor__ = _refused("^", "nest two xp.where")
    __invert__ = _refused("~", "swap the branches of xp.where")
    __mod__ = __rmod__ = _refused("%", _ELEMENTWISE)
    __floordiv__ = __rfloordiv__ = _refused("//", _ELEMENTWISE)
    __len__ = _refused("len()", "the leading axes are free")
    __int__ = __index__ = _refused("int()", "keep it symbolic")

    def __getattr__(self, name: str) -> Any:
        # Names with underscores are protocols that others ask for and can do without.
        if name.startswith("__"):
            raise AttributeError(name)
        raise UntraceableError(f"a symbol has no attribute {name!r} while a step is traced; {_ELEMENTWISE}")

    @property
    def is_const(self) -> bool:
        return self.op == "const"

    def is_number(self, number: float) -> bool:
        """Whether this node is the constant `number`."""
        return self.op == "const" and self.value == number

    def __repr__(self) -> str:
        if self.op in ("input", "const"):
            return str(self.value)
        return f"{self.op}({', '.join(map(repr, self.args))})"


def add(a: Expr, b: Expr) -> Expr:
    """a + b for derivatives: a zero term vanishes, numbers fold."""
    if a.is_number(0.0):
        return b
    if b.is_number(0.0):
        return a
    if a.is_const and b.is_const:
        return a.graph.const(a.value + b.value)
    if b.op == "neg":
        return a.graph.apply("sub", a, b.args[0])
    if a.op == "neg":
        return a.graph.apply("sub", b, a.args[0])
    return a.graph.apply("add", a, b)


def neg(a: Expr) -> Expr:
    """-a for derivatives."""
    if a.is_const:
        return a.graph.const(-a.value)
    if a.op == "neg":
        return a.args[0]
    return a.graph.apply("neg", a)


def mul(a: Expr, b: Expr) -> Expr:
    """a * b for derivatives: a structural zero stays zero, factors of one vanish, signs move outward."""
    if a.is_number(0.0) or b.is_number(0.0):
        return a.graph.const(0.0)
    if a.is_const and b.is_const:
        return a.graph.const(a.value * b.value)
    for one, other in ((a, b), (b, a)):
        if one.is_number(1.0):
            return other
        if one.is_number(-1.0):
            return neg(other)
        if one.op == "neg":
            return neg(mul(one.args[0], other))
    return a.graph.apply("mul", a, b)
