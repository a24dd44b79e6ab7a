"""ParaSLSTM: exponential gates with a normaliser and a stabiliser, diagonal recurrent weights."""

from __future__ import annotations

import math
from typing import Any

from pararnn.arrays import Array, Namespace, known
from pararnn.cells.base import ChannelwiseCell
from pararnn.functions import sigmoid


class ParaSLSTM(ChannelwiseCell):
    """Scalar-memory LSTM with exponential input and forget gates.

    ::

        g = R_g h + g_x  for g in (i, f, z, o)
        m' = max(f + m, i)                       stabiliser
        i* = exp(i - m')    f* = exp(f + m - m')
        n' = f* n + i*      c' = f* c + i* tanh(z)
        h' = σ(o) c' / (n' + eps)

    with (i_x, f_x, z_x, o_x) = W_x x + b. Slots (c, n, m, h), all zero at the start, so the stabiliser starts at 0.
    ``R`` has shape (4, D). The output does not change when m moves by s and c, n are scaled by exp(-s) (up to eps),
    so the solver works in u = c/n, ℓ = log n, m, h, where u is bounded and nothing is divided by a small n; the
    states that come back are the public ones. Source: Beck et al. 2024 (arXiv 2405.04517), eqs. 8–17.

    Args:
        eps: added to n' before the division.

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
    options = ("eps",)
    eps: float

    def __init__(
        self, input_size: int | None = None, hidden_size: int | None = None, *, eps: float = 1e-6, **keywords: Any
    ) -> None:
        if not (eps > 0.0 and math.isfinite(eps)):
            raise ValueError(f"ParaSLSTM: eps must be a positive number, got {eps!r}")
        self.eps = float(eps)
        super().__init__(input_size, hidden_size, **keywords)

    def step(
        self, xp: Any, c: Any, n: Any, m: Any, h: Any, i: Any, f: Any, z: Any, o: Any,
        r_i: Any, r_f: Any, r_z: Any, r_o: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        i, f = r_i * h + i, r_f * h + f + m
        m = xp.maximum(f, i)
        i, f = xp.exp(i - m), xp.exp(f - m)
        n = f * n + i
        c = f * c + i * xp.tanh(r_z * h + z)
        return c, n, m, sigmoid(xp, r_o * h + o) * c / (n + self.eps)

    def solve_cell(self) -> ChannelwiseCell:
        new = object.__new__(_SLSTMInLogCoordinates)
        new.__dict__.update(self.__dict__)
        return new

    def check_h0(self, xp: Namespace, h0: Array) -> None:
        c, n = h0[:, 0, ...], h0[:, 1, ...]
        if known(xp.any((n < 0.0) | ((n == 0.0) & (c != 0.0)))):
            raise ValueError(
                "ParaSLSTM: h0 must have n >= 0, and c = 0 wherever n = 0 (c/n is the cell's memory); got a state that "
                "no run of the cell reaches"
            )


class _SLSTMInLogCoordinates(ParaSLSTM):
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
        i, f = r_i * h + i, r_f * h + f + m
        m = xp.maximum(f, i)
        # log of the two terms of n': what is kept and what is new.
        kept, new = f - m + l, i - m
        l = xp.logaddexp(kept, new)
        share = sigmoid(xp, new - kept)
        u = (1.0 - share) * u + share * xp.tanh(r_z * h + z)
        # n / (n + eps) as a gate: exp never overflows and the limit n -> 0 is 0.
        return u, l, m, sigmoid(xp, r_o * h + o) * u * sigmoid(xp, l - math.log(self.eps))

    def encode(self, xp: Namespace, c: Array, n: Array, m: Array, h: Array) -> tuple[Array, ...]:
        empty = n == 0.0
        u = xp.where(empty, xp.zeros_like(c), c / xp.where(empty, xp.ones_like(n), n))
        return u, xp.log(n), m, h

    def decode(self, xp: Namespace, u: Array, l: Array, m: Array, h: Array) -> tuple[Array, ...]:
        n = xp.exp(l)
        return u * n, n, m, h

    def empty(self, xp: Namespace, like: Array) -> tuple[Array, ...]:
        """A state that remembers nothing: no mass, and a stabiliser below every gate."""
        none, never = xp.zeros_like(like), xp.full_like(like, -float("inf"))
        return none, never, never, none

    def frozen_join(
        self, xp: Namespace, before: list[Array], alone: list[Array], sums: list[Array], last: list[Array]
    ) -> tuple[Array, ...]:
        """The state after a segment with its recurrent weights dropped.

        Args:
            before: the slots before the segment. alone: the slots after it from an empty state.
            sums, last: each gate summed over the segment, and at its last step.
        """
        u, l, m, _ = before
        moved = m + sums[1]
        top = xp.maximum(moved, alone[2])
        kept, new = moved - top + l, alone[2] - top + alone[1]
        share = sigmoid(xp, new - kept)
        u, l = (1.0 - share) * u + share * alone[0], xp.logaddexp(kept, new)
        return u, l, top, sigmoid(xp, last[3]) * u * sigmoid(xp, l - math.log(self.eps))
