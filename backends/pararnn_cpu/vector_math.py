"""exp, tanh, log and their kin as vector instructions: no library calls, no branches.

Short polynomials after range reduction, accurate to 4 units in the last place and usually 1 (a test measures it). NaN
stays NaN, infinities and denormal results are right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

_F32, _F64, _I32, _I64 = ir.FloatType(), ir.DoubleType(), ir.IntType(32), ir.IntType(64)

LOG2_E = 1.4426950408889634
INF = float("inf")
# Beyond it tanh is 1, long before exp(2x) grows too large.
TANH_ONE = 40.0


@dataclass(frozen=True)
class Numbers:
    """What the functions know of a precision.

    Attributes:
        exp_tail: minimax fit of (exp(r) - 1 - r) / r² for |r| ≤ ln(2)/2.
        log_tail: of (log((1+s)/(1-s))/s - 2) / s² in s², for √½ ≤ (1+s)/(1-s) ≤ √2.
        ln2: ln(2) as a sum whose first term has few bits, so that its product with an exponent is exact.
        mantissa, bias: bits of the mantissa, and the exponent of 1.
        exp_zero, exp_infinite: below the first exp is 0, above the second it is infinite.
        sigmoid_zero, sigmoid_one: outside these, exp(-x) is infinite, or nothing beside 1.
        smallest: the smallest normal number.
        sqrt_half: the bits of √½.
    """

    exp_tail: tuple[float, ...]
    log_tail: tuple[float, ...]
    ln2: tuple[float, float]
    mantissa: int
    bias: int
    exp_zero: float
    exp_infinite: float
    sigmoid_zero: float
    sigmoid_one: float
    smallest: float
    sqrt_half: int

    @property
    def rounder(self) -> float:
        """Added to a number below 2^(mantissa-1), it leaves the nearest integer in the low bits of the sum."""
        return 1.5 * 2.0**self.mantissa

    @property
    def rounder_bits(self) -> int:
        return (self.bias + self.mantissa << self.mantissa) + (1 << self.mantissa - 1)


SINGLE = Numbers(
    exp_tail=(0.49999997, 0.16666546, 0.04166744, 0.008366251, 0.001387028),
    log_tail=(0.66666667, 0.40000122, 0.28550779, 0.23331614),
    ln2=(0.693359375, -2.12194440e-4),
    mantissa=23,
    bias=127,
    exp_zero=-104.0,
    exp_infinite=89.0,
    sigmoid_zero=-88.37,
    sigmoid_one=80.0,
    smallest=2.0**-126,
    sqrt_half=0x3F3504F3,
)
DOUBLE = Numbers(
    exp_tail=(
        0.5, 0.16666666666666667453, 0.041666666666624127873, 0.0083333333333300618325, 0.0013888888917213716901,
        0.00019841269863053616878, 0.000024801521295954375131, 2.7557268459997064772e-6, 2.762008844540974816e-7,
        2.5100385495510319077e-8,
    ),
    log_tail=(
        0.66666666666666697077, 0.39999999999898890514, 0.28571428626253837606, 0.22222211089379496214,
        0.181828924325368712, 0.15331611722055007897, 0.14617807153417324815,
    ),
    ln2=(0.693147180369123816490, 1.90821492927058770002e-10),
    mantissa=52,
    bias=1023,
    exp_zero=-746.0,
    exp_infinite=710.0,
    sigmoid_zero=-709.43,
    sigmoid_one=700.0,
    smallest=2.0**-1022,
    sqrt_half=0x3FE6A09E667F3BCD,
)  # fmt: skip


class VectorMath:
    """Emits the functions for one vector width and element type into an IR builder."""

    def __init__(self, builder: ir.IRBuilder, module: ir.Module, width: int, double: bool, fma: bool) -> None:
        self.b, self.module, self.width, self.double, self.has_fma = builder, module, width, double, fma
        self.scalar = _F64 if double else _F32
        self.numbers = DOUBLE if double else SINGLE
        self.vector = ir.VectorType(self.scalar, width)
        self.integers = ir.VectorType(_I64 if double else _I32, width)

    def const(self, value: float) -> ir.Constant:
        return ir.Constant(self.vector, [ir.Constant(self.scalar, value)] * self.width)

    def int_const(self, value: int) -> ir.Constant:
        kind = _I64 if self.double else _I32
        return ir.Constant(self.integers, [ir.Constant(kind, value)] * self.width)

    def call(self, name: str, *args: Any) -> Any:
        """An LLVM intrinsic on vectors, such as fabs."""
        suffix = f"v{self.width}f{64 if self.double else 32}"
        kind = ir.FunctionType(self.vector, [self.vector] * len(args))
        full = f"llvm.{name}.{suffix}"
        found = self.module.globals.get(full) or ir.Function(self.module, kind, full)
        return self.b.call(found, list(args))

    def fma(self, a: Any, x: Any, c: Any) -> Any:
        if self.has_fma:
            return self.call("fma", a, x, c)
        return self.b.fadd(self.b.fmul(a, x), c)

    def joined(self, parts: list[Any]) -> Any:
        """Vectors of equal width, one after the other."""
        while len(parts) > 1:
            width = parts[0].type.count
            both = ir.Constant(ir.VectorType(_I32, 2 * width), [ir.Constant(_I32, k) for k in range(2 * width)])
            parts = [self.b.shuffle_vector(x, y, both) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def split(self, value: Any, count: int) -> list[Any]:
        """A vector in `count` equal parts."""
        if count == 1:
            return [value]
        width = self.width // count
        order = [[ir.Constant(_I32, part * width + k) for k in range(width)] for part in range(count)]
        return [self.b.shuffle_vector(value, value, ir.Constant(ir.VectorType(_I32, width), o)) for o in order]

    def splat(self, scalar: Any) -> Any:
        """A number in every lane."""
        one = self.b.insert_element(ir.Constant(self.vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
        order = ir.Constant(ir.VectorType(_I32, self.width), [ir.Constant(_I32, 0)] * self.width)
        return self.b.shuffle_vector(one, ir.Constant(self.vector, ir.Undefined), order)

    def first_lanes(self, count: Any) -> Any:
        """The mask of the first `count` lanes."""
        kind = ir.VectorType(_I32, self.width)
        lanes = ir.Constant(kind, [ir.Constant(_I32, k) for k in range(self.width)])
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), self.b.trunc(count, _I32), ir.Constant(_I32, 0))
        order = ir.Constant(kind, [ir.Constant(_I32, 0)] * self.width)
        return self.b.icmp_signed("<", lanes, self.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), order))

    def load(self, address: Any, mask: Any | None = None) -> Any:
        """The vector at an integer address; lanes outside the mask are 0, and their memory is not touched."""
        place = self.b.inttoptr(address, self.vector.as_pointer())
        item = 8 if self.double else 4
        if mask is not None:
            return self._masked("load", self.vector, place, ir.Constant(_I32, item), mask, self.const(0.0))
        value = self.b.load(place)
        value.align = item
        return value

    def store(self, value: Any, address: Any, mask: Any | None = None) -> None:
        place = self.b.inttoptr(address, self.vector.as_pointer())
        item = 8 if self.double else 4
        if mask is not None:
            self._masked("store", ir.VoidType(), value, place, ir.Constant(_I32, item), mask)
        else:
            self.b.store(value, place).align = item

    def _masked(self, name: str, result: Any, *args: Any) -> Any:
        full = f"llvm.masked.{name}.v{self.width}f{64 if self.double else 32}.p0"
        kind = ir.FunctionType(result, [a.type for a in args])
        found = self.module.globals.get(full) or ir.Function(self.module, kind, full)
        return self.b.call(found, list(args))

    def polynomial(self, coefficients: tuple[float, ...], x: Any) -> Any:
        """Σ coefficients[k] x^k, by halves: in a time loop it is the longest chain of operations that counts."""
        terms: list[Any] = [self.const(c) for c in coefficients]
        while len(terms) > 1:
            pairs = zip(terms[::2], terms[1::2], strict=False)
            terms = [self.fma(high, x, low) for low, high in pairs] + terms[len(terms) & ~1 :]
            x = self.b.fmul(x, x)
        return terms[0]

    def select(self, condition: Any, yes: Any, no: Any) -> Any:
        return self.b.select(condition, yes, no)

    def by_library(self, name: str, *args: Any) -> Any:
        """The C library's function in double precision, lane by lane."""
        kind = ir.FunctionType(_F64, [_F64] * len(args))
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        out: Any = ir.Constant(self.vector, ir.Undefined)
        for k in range(self.width):
            place = ir.Constant(_I32, k)
            lanes = [self.b.extract_element(x, place) for x in args]
            wide = lanes if self.double else [self.b.fpext(lane, _F64) for lane in lanes]
            value = self.b.call(function, wide)
            out = self.b.insert_element(out, value if self.double else self.b.fptrunc(value, _F32), place)
        return out

    def _reduced(self, x: Any, scaled: Any) -> tuple[Any, Any]:
        """For x, and x·log2(e) rounded to an integer n by adding the rounder: exp(x - n·ln 2) - 1, and n's bits."""
        b = self.b
        n = b.fsub(scaled, self.const(self.numbers.rounder))
        for part in self.numbers.ln2:
            x = self.fma(n, self.const(-part), x)
        return self.fma(b.fmul(x, x), self.polynomial(self.numbers.exp_tail, x), x), b.bitcast(scaled, self.integers)

    def _rounded(self, x: Any, factor: float) -> Any:
        """x·factor to the nearest integer, plus the rounder."""
        return self.fma(x, self.const(factor), self.const(self.numbers.rounder))

    def _power_of_two(self, integer: Any) -> Any:
        """2^n, where it is a normal number, for an integer vector whose low bits hold n."""
        mantissa, bias = self.numbers.mantissa, self.numbers.bias
        exponent = self.b.add(self.b.shl(integer, self.int_const(mantissa)), self.int_const(bias << mantissa))
        return self.b.bitcast(exponent, self.vector)

    def exp(self, x: Any) -> Any:
        b, numbers = self.b, self.numbers
        q, bits = self._reduced(x, self._rounded(x, LOG2_E))
        # Two factors, because 2^n alone may be denormal or infinite where the result is not.
        n = b.sub(bits, self.int_const(numbers.rounder_bits))
        half = b.ashr(n, self.int_const(1))
        first = self._power_of_two(half)
        y = b.fmul(self.fma(q, first, first), self._power_of_two(b.sub(n, half)))
        # Limits are put in last: the comparisons then wait for nothing.
        y = self.select(b.fcmp_ordered(">", x, self.const(numbers.exp_infinite)), self.const(INF), y)
        return self.select(b.fcmp_ordered("<", x, self.const(numbers.exp_zero)), self.const(0.0), y)

    def sigmoid(self, x: Any) -> Any:
        """1 / (exp(-x) + 1)."""
        b, numbers = self.b, self.numbers
        q, bits = self._reduced(b.fneg(x), self._rounded(x, -LOG2_E))
        scale = self._power_of_two(bits)
        y = b.fdiv(self.const(1.0), b.fadd(self.fma(q, scale, scale), self.const(1.0)))
        y = self.select(b.fcmp_ordered("<", x, self.const(numbers.sigmoid_zero)), self.const(0.0), y)
        return self.select(b.fcmp_ordered(">", x, self.const(numbers.sigmoid_one)), self.const(1.0), y)

    def tanh(self, x: Any) -> Any:
        """e / (e + 2) with e = exp(2|x|) - 1, which loses nothing near 0."""
        b = self.b
        size = self.call("fabs", x)
        q, bits = self._reduced(b.fadd(size, size), self._rounded(size, 2.0 * LOG2_E))
        scale = self._power_of_two(bits)
        e = self.fma(q, scale, b.fsub(scale, self.const(1.0)))
        y = b.fdiv(e, b.fadd(e, self.const(2.0)))
        y = self.select(b.fcmp_ordered(">", size, self.const(TANH_ONE)), self.const(1.0), y)
        return self.call("copysign", y, x)

    def log(self, x: Any) -> Any:
        """k·ln 2 + log(1 + f), by s = f / (2 + f)."""
        b, numbers = self.b, self.numbers
        mantissa = self.int_const(numbers.mantissa)
        tiny = b.fcmp_ordered("<", x, self.const(numbers.smallest))
        bits = b.bitcast(self.select(tiny, b.fmul(x, self.const(2.0**64)), x), self.integers)
        # The exponent that leaves a number between √½ and √2.
        exponent = b.ashr(b.sub(bits, self.int_const(numbers.sqrt_half)), mantissa)
        f = b.fsub(b.bitcast(b.sub(bits, b.shl(exponent, mantissa)), self.vector), self.const(1.0))
        k = b.sitofp(exponent, self.vector)
        k = self.select(tiny, b.fsub(k, self.const(64.0)), k)
        s = b.fdiv(f, b.fadd(f, self.const(2.0)))
        square, half = b.fmul(s, s), b.fmul(b.fmul(f, f), self.const(0.5))
        tail = self.fma(square, self.polynomial(numbers.log_tail, square), half)
        high, low = numbers.ln2
        tail = self.fma(s, tail, b.fmul(k, self.const(low)))
        y = self.fma(k, self.const(high), b.fsub(f, b.fsub(half, tail)))
        # NaN and +inf are their own logarithm, zero's is -inf, and a negative number has none.
        y = self.select(b.fcmp_unordered("uno", x, x), x, y)
        y = self.select(b.fcmp_ordered("==", x, self.const(INF)), x, y)
        y = self.select(b.fcmp_ordered("==", x, self.const(0.0)), self.const(-INF), y)
        return self.select(b.fcmp_ordered("<", x, self.const(0.0)), self.const(float("nan")), y)

    def log1p(self, x: Any) -> Any:
        b = self.b
        u = b.fadd(x, self.const(1.0))
        # What the sum rounded away, put back by the first derivative; where it lost everything log1p(x) is x.
        lost = b.fdiv(b.fsub(x, b.fsub(u, self.const(1.0))), u)
        y = b.fadd(self.log(u), lost)
        y = self.select(b.fcmp_ordered("==", u, self.const(1.0)), x, y)
        y = self.select(b.fcmp_ordered("==", x, self.const(-1.0)), self.const(-INF), y)
        return self.select(b.fcmp_ordered("==", u, self.const(INF)), u, y)


def operations(math: VectorMath, exact: bool) -> dict[str, Callable[..., Any]]:
    """How to emit each operation of the expression graph."""
    b = math.b

    def elementary(name: str) -> Callable[[Any], Any]:
        return (lambda x: math.by_library(name, x)) if exact else getattr(math, name)

    exp, tanh, log, log1p = map(elementary, ("exp", "tanh", "log", "log1p"))

    def sigmoid(x: Any) -> Any:
        one = math.const(1.0)
        return b.fdiv(one, b.fadd(exp(b.fneg(x)), one))

    def extreme(comparison: str) -> Callable[[Any, Any], Any]:
        def pick(x: Any, y: Any) -> Any:
            # Ordered comparisons are false for a NaN, which then must win from either side.
            best = b.select(b.fcmp_unordered(comparison, x, y), x, y)
            return b.select(b.fcmp_unordered("uno", y, y), y, best)

        return pick

    def logaddexp(x: Any, y: Any) -> Any:
        # Equal infinities have no difference.
        gap = b.select(b.fcmp_ordered("==", x, y), math.const(0.0), b.fsub(x, y))
        return b.fadd(extreme(">")(x, y), log1p(exp(b.fneg(math.call("fabs", gap)))))

    def sign(x: Any) -> Any:
        zero = math.const(0.0)
        up = b.select(b.fcmp_ordered(">", x, zero), math.const(1.0), x)
        return b.select(b.fcmp_ordered("<", x, zero), math.const(-1.0), up)

    def compare(symbol: str) -> Callable[[Any, Any], Any]:
        return lambda x, y: b.fcmp_ordered(symbol, x, y)

    return {
        "add": b.fadd,
        "sub": b.fsub,
        "mul": b.fmul,
        "div": b.fdiv,
        "neg": b.fneg,
        "pow": lambda x, y: math.by_library("pow", x, y),
        "exp": exp,
        "expm1": lambda x: math.by_library("expm1", x),
        "log": log,
        "log1p": log1p,
        "sqrt": lambda x: math.call("sqrt", x),
        "tanh": tanh,
        "sigmoid": sigmoid if exact else math.sigmoid,
        "sin": lambda x: math.by_library("sin", x),
        "cos": lambda x: math.by_library("cos", x),
        "abs": lambda x: math.call("fabs", x),
        "sign": sign,
        "logaddexp": logaddexp,
        "maximum": extreme(">"),
        "minimum": extreme("<"),
        "less": compare("<"),
        "less_equal": compare("<="),
        "greater": compare(">"),
        "greater_equal": compare(">="),
        "equal": compare("=="),
        "where": b.select,
    }
