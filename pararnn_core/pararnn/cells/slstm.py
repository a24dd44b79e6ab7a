"""ParaSLSTM: exponential gates with a normaliser and a stabiliser, diagonal recurrent weights."""

from __future__ import annotations

import math
from typing import Any

from pararnn.arrays import Array, Namespace, known, on_host
from pararnn.cells.base import ChannelwiseCell
from pararnn.cells.mixing import check_mix
from pararnn.functions import log_sigmoid, sigmoid

_FORGET_GATES = ("exponential", "sigmoid")
_STARTS = ("zero", "input")
# Any logarithm above this is that of a number; below it is only -inf, that of 0.
_NOTHING = -1e30


class SLSTMEquations:
    """The recurrence for preactivations that already hold what h contributes, whatever multiplies h."""

    eps: float
    forget_gate: str
    stabiliser_start: str

    def set_options(self, owner: str, eps: float, forget_gate: str, stabiliser_start: str) -> None:
        """Checks and keeps the options that the equations read."""
        if forget_gate not in _FORGET_GATES:
            raise ValueError(f"{owner}: forget_gate must be one of {_FORGET_GATES}, got {forget_gate!r}")
        if stabiliser_start not in _STARTS:
            raise ValueError(f"{owner}: stabiliser_start must be one of {_STARTS}, got {stabiliser_start!r}")
        if not ((eps > 0.0 or (eps == 0.0 and stabiliser_start == "input")) and math.isfinite(eps)):
            raise ValueError(f"{owner}: eps must be a positive number, or 0 with stabiliser_start='input', got {eps!r}")
        self.eps, self.forget_gate, self.stabiliser_start = float(eps), forget_gate, stabiliser_start

    def advance(self, xp: Any, c: Any, n: Any, m: Any, i: Any, f: Any, z: Any, o: Any) -> tuple[Any, ...]:
        f = self.forget(xp, f) + m
        if self.stabiliser_start == "input":
            stored = n > 0.0
            m = xp.where(stored, xp.maximum(f, i), i)
            f = xp.where(stored, f - m, _NOTHING)
        else:
            m = xp.maximum(f, i)
            f = f - m
        i, f = xp.exp(i - m), xp.exp(f)
        n = f * n + i
        c = f * c + i * xp.tanh(z)
        return c, n, m, sigmoid(xp, o) * c / (n + self.eps)

    def forget(self, xp: Any, f: Any) -> Any:
        """The logarithm of the forget gate from its preactivation."""
        return f if self.forget_gate == "exponential" else log_sigmoid(xp, f)

    def check_h0(self, xp: Namespace, h0: Array) -> None:
        # On a device the check would wait for it; there such a state becomes NaN where it cannot be followed.
        if not on_host(h0):
            return
        c, n = h0[:, 0, ...], h0[:, 1, ...]
        if known(xp.any((n < 0.0) | ((n == 0.0) & (c != 0.0)))):
            raise ValueError(
                "ParaSLSTM: h0 must have n >= 0, and c = 0 wherever n = 0 (c/n is the cell's memory); got a state that "
                "no run of the cell reaches"
            )


class SLSTMLogEquations(SLSTMEquations):
    """The same recurrence for u = c/n and ℓ = log n: what the solver iterates on."""

    def advance(self, xp: Any, u: Any, l: Any, m: Any, i: Any, f: Any, z: Any, o: Any) -> tuple[Any, ...]:
        f = self.forget(xp, f) + m
        m = xp.maximum(f, i)
        if self.stabiliser_start == "input":
            m = xp.where(l > _NOTHING, m, i)
        # log of the two terms of n': what is kept and what is new.
        kept, new = f - m + l, i - m
        l = xp.logaddexp(kept, new)
        share = sigmoid(xp, new - kept)
        u = (1.0 - share) * u + share * xp.tanh(z)
        return u, l, m, self.read(xp, u, l, o)

    def read(self, xp: Any, u: Any, l: Any, o: Any) -> Any:
        """The output σ(o) u n / (n + eps)."""
        gate = sigmoid(xp, o) * u
        # n / (n + eps) as a gate: exp never overflows and the limit n -> 0 is 0.
        return gate * sigmoid(xp, l - math.log(self.eps)) if self.eps else gate

    def encode(self, xp: Namespace, c: Array, n: Array, m: Array, h: Array) -> tuple[Array, ...]:
        empty = n == 0.0
        # Memory without mass is no state of the cell (see check_h0) and has no coordinates.
        none = xp.where(c == 0.0, xp.zeros_like(c), xp.full_like(c, math.nan))
        u = xp.where(empty, none, c / xp.where(empty, xp.ones_like(n), n))
        return u, xp.log(n), m, h

    def decode(self, xp: Namespace, u: Array, l: Array, m: Array, h: Array) -> tuple[Array, ...]:
        n = xp.exp(l)
        return u * n, n, m, h


class ParaSLSTM(SLSTMEquations, ChannelwiseCell):
    """Scalar-memory LSTM with exponential input and forget gates.

    ::

        g = R_g h + g_x  for g in (i, f, z, o)
        m' = max(f + m, i)                       stabiliser
        i* = exp(i - m')    f* = exp(f + m - m')
        n' = f* n + i*      c' = f* c + i* tanh(z)
        h' = σ(o) c' / (n' + eps)

    with (i_x, f_x, z_x, o_x) = W_x x + b. Slots (c, n, m, h), all zero at the start, so the stabiliser starts at 0.
    With ``forget_gate="sigmoid", stabiliser_start="input", eps=0.0`` it is the cell of xLSTM and FlashRNN.
    ``R`` has shape (4, D). The output does not change when m moves by s and c, n are scaled by exp(-s) (up to eps),
    so the solver works in u = c/n, ℓ = log n, m, h, where u is bounded and nothing is divided by a small n; the
    states that come back are the public ones. Source: Beck et al. 2024 (arXiv 2405.04517), eqs. 8–17.

    Args:
        eps: added to n' before the division; 0 is allowed where the stabiliser starts with the input gate, because
            n' ≥ 1 then.
        forget_gate: 'exponential' as above; 'sigmoid' puts log σ(f) in the place of f, so that nothing is ever kept
            whole.
        stabiliser_start: 'zero' as above; with 'input', m' = i wherever nothing is stored yet (n = 0), whatever m is.

    >>> import numpy as np, pararnn
    >>> cell = ParaSLSTM(4, 8, seed=0)
    >>> pararnn.newton_apply(cell, np.ones((2, 10, 4), dtype=np.float32)).shape
    (2, 10, 4, 8)
    """

    slots = ("c", "n", "m", "h")
    gates = ("i", "f", "z", "o")
    params = ("r_i", "r_f", "r_z", "r_o")
    long_memory = True
    stacked = {"R": ("r_i", "r_f", "r_z", "r_o")}
    options = ("eps", "forget_gate", "stabiliser_start")

    def __new__(cls, *sizes: Any, mix: str = "diag", n_heads: int | None = None, **keywords: Any) -> Any:
        check_mix(cls.__name__, mix, n_heads)
        if mix == "diag":
            return super().__new__(cls)
        from pararnn.cells.slstm_mixed import MixedSLSTM

        return MixedSLSTM(*sizes, n_heads=n_heads, **keywords)

    def __init__(
        self, input_size: int | None = None, hidden_size: int | None = None, *, eps: float = 1e-6,
        forget_gate: str = "exponential", stabiliser_start: str = "zero", mix: str = "diag",
        n_heads: int | None = None, **keywords: Any,
    ) -> None:  # fmt: skip
        self.set_options("ParaSLSTM", eps, forget_gate, stabiliser_start)
        super().__init__(input_size, hidden_size, **keywords)

    def step(
        self, xp: Any, c: Any, n: Any, m: Any, h: Any, i: Any, f: Any, z: Any, o: Any,
        r_i: Any, r_f: Any, r_z: Any, r_o: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        return self.advance(xp, c, n, m, r_i * h + i, r_f * h + f, r_z * h + z, r_o * h + o)

    def solve_cell(self) -> ChannelwiseCell:
        new = object.__new__(_SLSTMInLogCoordinates)
        new.__dict__.update(self.__dict__)
        return new


class _SLSTMInLogCoordinates(SLSTMLogEquations, ParaSLSTM):
    """The same recurrence for u = c/n and ℓ = log n: what the solver iterates on."""

    slots = ("u", "l", "m", "h")
    # Not h: it follows u, which may start beyond 1 where h does not.
    bounds = {"u": (-1.0, 1.0)}
    logarithmic = ("l",)
    picard_start = True

    def step(
        self, xp: Any, u: Any, l: Any, m: Any, h: Any, i: Any, f: Any, z: Any, o: Any,
        r_i: Any, r_f: Any, r_z: Any, r_o: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        return self.advance(xp, u, l, m, r_i * h + i, r_f * h + f, r_z * h + z, r_o * h + o)

    def empty(self, xp: Namespace, like: Array) -> tuple[Array, ...]:
        """A state that remembers nothing: no mass, and a stabiliser below every gate."""
        none, never = xp.zeros_like(like), xp.full_like(like, -float("inf"))
        return none, never, never, none

    def frozen_gates(self, xp: Namespace, rows: list[Array]) -> list[Array]:
        """The gates with the forget gate as the logarithm of what it keeps."""
        return [rows[0], self.forget(xp, rows[1]), *rows[2:]]

    def frozen_join(
        self, xp: Namespace, before: list[Array], alone: list[Array], sums: list[Array], last: list[Array]
    ) -> tuple[Array, ...]:
        """The state after a segment with its recurrent weights dropped.

        Args:
            before: the slots before the segment. alone: the slots after it from an empty state.
            sums, last: each gate, as `frozen_gates` gives it, summed over the segment, and at its last step.
        """
        u, l, m, _ = before
        moved = m + sums[1]
        if self.stabiliser_start == "input":
            moved = xp.where(l > _NOTHING, moved, l)
        top = xp.maximum(moved, alone[2])
        kept, new = moved - top + l, alone[2] - top + alone[1]
        share = sigmoid(xp, new - kept)
        u, l = (1.0 - share) * u + share * alone[0], xp.logaddexp(kept, new)
        return u, l, top, self.read(xp, u, l, last[3])
