"""ParaTanh: the plain recurrent cell, one tanh per channel."""

from __future__ import annotations

from typing import Any

from pararnn.cells.base import ChannelwiseCell


class ParaTanh(ChannelwiseCell):
    """Elman's network with one recurrent number per channel.

    ::

        h' = tanh(a h + u_x),    u_x = W_x x + b

    One slot, diagonal Jacobian. Source: Elman 1990, "Finding structure in time", with a diagonal recurrent matrix.

    >>> import numpy as np, pararnn
    >>> pararnn.newton_apply(ParaTanh(4, 8, seed=0), np.ones((2, 10, 4), dtype=np.float32)).shape
    (2, 10, 8)
    """

    slots = ("h",)
    gates = ("u",)
    params = ("a",)
    bounds = {"h": (-1.0, 1.0)}

    def step(self, xp: Any, h: Any, u: Any, a: Any) -> tuple[Any, ...]:
        return (xp.tanh(a * h + u),)
