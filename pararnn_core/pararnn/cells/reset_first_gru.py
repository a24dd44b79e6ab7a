"""ResetFirstGRU: the gated recurrent unit whose reset gate acts before the recurrent product."""

from __future__ import annotations

from typing import Any

from pararnn.cells.mixing import Mix, MixingCell
from pararnn.functions import sigmoid


class ResetFirstGRU(MixingCell):
    """The gated recurrent unit as it was first published; Keras calls it ``reset_after=False``.

    ::

        r = σ(r_x + R_r h)    z = σ(z_x + R_z h)    n = tanh(n_x + R_n (r h))
        h' = (1 - z) n + z h

    with (r_x, z_x, n_x) = W_x x + b. Two products a step, one after the other, so a step takes longer than a
    :class:`StockGRU`'s. ``R`` (3·D, D) has the rows of R_r, R_z, R_n. |h| ≤ 1 once it is. Source: Cho et al. 2014
    (arXiv 1406.1078), equations 5 to 8, with z and 1 - z exchanged.

    >>> import numpy as np, pararnn
    >>> cell = ResetFirstGRU(4, 8, seed=0)
    >>> pararnn.newton_apply(cell, np.ones((2, 10, 4), dtype=np.float32)).shape
    (2, 10, 8)
    """

    slots = ("h",)
    gates = ("r", "z", "n")
    products = {"R": ("r", "z", "n")}
    bounds = {"h": (-1.0, 1.0)}

    def step(self, xp: Any, mix: Mix, h: Any, r: Any, z: Any, n: Any) -> tuple[Any, ...]:
        r_h, z_h = mix(h, "r", "z")
        r = sigmoid(xp, r + r_h)
        z = sigmoid(xp, z + z_h)
        (n_h,) = mix(r * h, "n")
        return ((1.0 - z) * xp.tanh(n + n_h) + z * h,)
