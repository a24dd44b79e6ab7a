"""ParaMinLSTM: an LSTM whose gates see the input only and sum to one, so that the recurrence is linear."""

from __future__ import annotations

from typing import Any

from pararnn.cells.base import ChannelwiseCell
from pararnn.functions import log_sigmoid, sigmoid


class ParaMinLSTM(ChannelwiseCell):
    """Minimal LSTM with normalised gates.

    ::

        f = σ(f_x)    i = σ(i_x)    h' = f/(f + i) h + i/(f + i) n_x

    with (f_x, i_x, n_x) = W_x x + b. The quotients are taken in logarithms, so both gates may be shut. Linear in h: one
    correction is exact. One slot, diagonal Jacobian f/(f + i). Source: Feng et al. 2024 (arXiv 2410.01201), section
    3.2.

    >>> import numpy as np, pararnn
    >>> pararnn.newton_apply(ParaMinLSTM(4, 8, seed=0), np.ones((2, 10, 4), dtype=np.float32)).shape
    (2, 10, 8)
    """

    slots = ("h",)
    gates = ("f", "i", "n")

    def step(self, xp: Any, h: Any, f: Any, i: Any, n: Any) -> tuple[Any, ...]:
        odds = log_sigmoid(xp, f) - log_sigmoid(xp, i)
        return (sigmoid(xp, odds) * h + sigmoid(xp, -odds) * n,)
