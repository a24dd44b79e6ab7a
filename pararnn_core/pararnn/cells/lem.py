"""ParaLEM: two states that move at learned speeds of their own, for memories on many time scales."""

from __future__ import annotations

from typing import Any

from pararnn.cells.base import ChannelwiseCell
from pararnn.functions import sigmoid


class ParaLEM(ChannelwiseCell):
    """Long expressive memory with diagonal recurrent weights.

    ::

        p = Δt σ(a_p h + p_x)    q = Δt σ(a_q h + q_x)
        z' = (1 - p) z + p tanh(a_z h + z_x)
        h' = (1 - q) h + q tanh(a_h z' + h_x)

    with (p_x, q_x, z_x, h_x) = W_x x + b. Slots (z, h), a 2×2 Jacobian per channel, |z|, |h| ≤ 1 once they are. Source:
    Rusch et al. 2022 (arXiv 2110.04744), eq. 3, with diagonal recurrent matrices.

    Args:
        step_size: Δt in (0, 1]; small ones remember for long.

    >>> import numpy as np, pararnn
    >>> pararnn.newton_apply(ParaLEM(4, 8, seed=0), np.ones((2, 10, 4), dtype=np.float32)).shape
    (2, 10, 2, 8)
    """

    slots = ("z", "h")
    gates = ("p", "q", "z_x", "h_x")
    params = ("a_p", "a_q", "a_z", "a_h")
    bounds = {"z": (-1.0, 1.0), "h": (-1.0, 1.0)}
    options = ("step_size",)
    step_size: float

    def __init__(
        self, input_size: int | None = None, hidden_size: int | None = None, *, step_size: float = 1.0, **keywords: Any
    ) -> None:
        if not 0.0 < step_size <= 1.0:
            raise ValueError(f"ParaLEM: step_size must lie in (0, 1], got {step_size!r}")
        self.step_size = float(step_size)
        super().__init__(input_size, hidden_size, **keywords)

    def step(
        self, xp: Any, z: Any, h: Any, p: Any, q: Any, z_x: Any, h_x: Any, a_p: Any, a_q: Any, a_z: Any, a_h: Any
    ) -> tuple[Any, ...]:
        p = self.step_size * sigmoid(xp, a_p * h + p)
        q = self.step_size * sigmoid(xp, a_q * h + q)
        z = (1.0 - p) * z + p * xp.tanh(a_z * h + z_x)
        return z, (1.0 - q) * h + q * xp.tanh(a_h * z + h_x)
