"""Functions that Triton's language lacks or that would differ between kernels, in float32."""

import triton
import triton.language as tl


@triton.jit
def start_number(head, row, lane, ok):
    """The row of starting states that a step loads before it, or -1, in every lane."""
    return tl.load(head + row + lane * 0, mask=ok, other=-1).to(tl.int64)


@triton.jit
def fresh_start(head, fresh, row, lane, ok, slots, slot, width):
    """One slot of the starting state that a step loads; 0 where it loads none."""
    number = start_number(head, row, lane, ok)
    return tl.load(fresh + (number * slots + slot) * width + lane, mask=ok & (number >= 0), other=0.0)


@triton.jit
def reciprocal(x):
    """1 / x for x ≥ 1 in two instructions; a division takes about ten."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)): full relative precision where the gate is nearly shut."""
    return reciprocal(1.0 + tl.exp2(-1.4426950408889634 * x))


@triton.jit
def tanh(x):
    """A polynomial near zero, where 1 - 2 / (exp(2|x|) + 1) would lose its relative precision."""
    square = x * x
    tail = tl.fma(square, 0.002528503, -0.008527936)
    tail = tl.fma(tail, square, 0.021818874)
    tail = tl.fma(tail, square, -0.053964745)
    tail = tl.fma(tail, square, 0.13333325)
    tail = tl.fma(tail, square, -0.33333334)
    near = tl.fma(x * square, tail, x)
    # exp2 of a large argument is infinite and of a very negative one zero: both give the right limit.
    far = tl.fma(reciprocal(1.0 + tl.exp2(2.8853900817779268 * x)), -2.0, 1.0)
    return tl.where(tl.abs(x) < 0.55, near, far)


@triton.jit
def log1p(x):
    """log(1 + x) with what the sum rounded away put back."""
    u = 1.0 + x
    y = tl.log(u) + (x - (u - 1.0)) / u
    return tl.where(u == 1.0, x, tl.where(x == -1.0, -float("inf"), tl.where(u == float("inf"), u, y)))


@triton.jit
def expm1(x):
    """exp(x) - 1 by tanh(x/2), which keeps small arguments exact."""
    t = tanh(0.5 * x)
    return tl.where(tl.abs(x) < 0.5, 2.0 * t / (1.0 - t), tl.exp(x) - 1.0)


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def logaddexp(a, b):
    gap = tl.where(a == b, 0.0, a - b)
    return maximum(a, b) + log1p(tl.exp(-tl.abs(gap)))


@triton.jit
def sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, x))


@triton.jit
def power(a, b):
    """a ** b for a > 0; 0 and negative bases as the C library has them for whole exponents."""
    whole = tl.floor(b) == b
    odd = tl.floor(0.5 * b) * 2.0 != b
    size = tl.exp(b * tl.log(tl.abs(a)))
    signed = tl.where((a < 0.0) & odd, -size, size)
    return tl.where(b == 0.0, 1.0, tl.where((a < 0.0) & (whole == 0), float("nan"), signed))
