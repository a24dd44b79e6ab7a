"""ParaMinGRU: a gated unit whose gates see the input only, so that the recurrence is linear."""

from __future__ import annotations

from typing import Any

from pararnn.cells.base import ChannelwiseCell
from pararnn.functions import sigmoid


class ParaMinGRU(ChannelwiseCell):
    """Minimal GRU.

    ::

        z = σ(z_x)    h' = (1 - z) h + z n_x

    with (z_x, n_x) = W_x x + b. Linear in h: one correction is exact. One slot, diagonal Jacobian 1 - z. Source: Feng
    et al. 2024 (arXiv 2410.01201), section 3.1.

    >>> import numpy as np, pararnn
    >>> pararnn.newton_apply(ParaMinGRU(4, 8, seed=0), np.ones((2, 10, 4), dtype=np.float32)).shape
    (2, 10, 8)
    """

    slots = ("h",)
    gates = ("z", "n")

    def step(self, xp: Any, h: Any, z: Any, n: Any) -> tuple[Any, ...]:
        z = sigmoid(xp, z)
        return ((1.0 - z) * h + z * n,)
