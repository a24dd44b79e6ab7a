"""ParaNLRU: a leaky average of a tanh that sees the state, with a gate that sees the input only."""

from __future__ import annotations

from typing import Any

from pararnn.cells.base import ChannelwiseCell
from pararnn.functions import sigmoid


class ParaNLRU(ChannelwiseCell):
    """Nonlinear recurrent unit with an input-driven leak.

    ::

        a = σ(a_x)    n = tanh(c_x + u h)    h' = a h + (1 - a) n

    with (a_x, c_x) = W_x x + b. One slot, diagonal Jacobian a + (1 - a)(1 - n²) u, |h| ≤ 1 once it is. Source: the
    gated leaky unit of Mozer 1992 ("Induction of multiscale temporal structure") with a learned leak, in the diagonal
    form of ParaRNN (arXiv 2510.21450).

    >>> import numpy as np, pararnn
    >>> pararnn.newton_apply(ParaNLRU(4, 8, seed=0), np.ones((2, 10, 4), dtype=np.float32)).shape
    (2, 10, 8)
    """

    slots = ("h",)
    gates = ("a", "c")
    params = ("u",)
    bounds = {"h": (-1.0, 1.0)}

    def step(self, xp: Any, h: Any, a: Any, c: Any, u: Any) -> tuple[Any, ...]:
        a = sigmoid(xp, a)
        return (a * h + (1.0 - a) * xp.tanh(c + u * h),)
