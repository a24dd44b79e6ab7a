"""ParaLSTM: coupled input and forget gates, peepholes, diagonal recurrent weights."""

from __future__ import annotations

from typing import Any

from pararnn.cells.base import ChannelwiseCell
from pararnn.functions import sigmoid


class ParaLSTM(ChannelwiseCell):
    """Long short-term memory with one gate for both input and forgetting, and an output peephole on the new c.

    ::

        f = σ(a_f h + c_f c + f_x)     z = tanh(a_z h + z_x)
        c' = f c + (1 - f) z
        o = σ(a_o h + c_o c' + o_x)    h' = o tanh(c')

    with (f_x, z_x, o_x) = W_x x + b. Slots (c, h), a 2×2 Jacobian per channel, |c| ≤ 1 once it is. Source: Greff et al.
    2017 (arXiv 1503.04069), variants CIFG and peepholes, with diagonal recurrent matrices as in ParaRNN
    (arXiv 2510.21450), appendix.

    >>> import numpy as np, pararnn
    >>> cell = ParaLSTM(4, 8, seed=0)
    >>> pararnn.newton_apply(cell, np.ones((2, 10, 4), dtype=np.float32)).shape
    (2, 10, 2, 8)
    """

    slots = ("c", "h")
    gates = ("f", "z", "o")
    params = ("a_f", "a_z", "a_o", "c_f", "c_o")
    bounds = {"c": (-1.0, 1.0), "h": (-1.0, 1.0)}

    def step(
        self, xp: Any, c: Any, h: Any, f: Any, z: Any, o: Any, a_f: Any, a_z: Any, a_o: Any, c_f: Any, c_o: Any
    ) -> tuple[Any, ...]:
        f = sigmoid(xp, a_f * h + c_f * c + f)
        z = xp.tanh(a_z * h + z)
        c = f * c + (1.0 - f) * z
        o = sigmoid(xp, a_o * h + c_o * c + o)
        return c, o * xp.tanh(c)
