"""ParaGRU: the gated recurrent unit with diagonal recurrent weights."""

from __future__ import annotations

from typing import Any

from pararnn.cells.base import ChannelwiseCell
from pararnn.functions import sigmoid


class ParaGRU(ChannelwiseCell):
    """Gated recurrent unit whose recurrent weights are one number per channel.

    ::

        z = σ(a_z h + z_x)    r = σ(a_r h + r_x)    n = tanh(a_n (r h) + n_x)
        h' = (1 - z) h + z n

    with (z_x, r_x, n_x) = W_x x + b. Here z opens for the *new* value, the reverse of torch.nn.GRU. One slot, diagonal
    Jacobian, |h| ≤ 1 once it is. Source: Cho et al. 2014 (arXiv 1406.1078), eqs. 5–8, with diagonal recurrent matrices
    as in ParaRNN (arXiv 2510.21450), appendix.

    >>> import numpy as np, pararnn
    >>> cell = ParaGRU(4, 8, seed=0)
    >>> h = pararnn.newton_apply(cell, np.ones((2, 10, 4), dtype=np.float32))
    >>> h.shape
    (2, 10, 8)
    """

    slots = ("h",)
    gates = ("z", "r", "n")
    params = ("a_z", "a_r", "a_n")
    bounds = {"h": (-1.0, 1.0)}

    def step(self, xp: Any, h: Any, z: Any, r: Any, n: Any, a_z: Any, a_r: Any, a_n: Any) -> tuple[Any, ...]:
        z = sigmoid(xp, a_z * h + z)
        r = sigmoid(xp, a_r * h + r)
        n = xp.tanh(a_n * (r * h) + n)
        return ((1.0 - z) * h + z * n,)
