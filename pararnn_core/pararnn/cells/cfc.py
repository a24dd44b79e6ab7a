"""ParaCfC: a closed-form continuous-time cell whose leak knows how much time a step stands for."""

from __future__ import annotations

from typing import Any

from pararnn.cells.base import ChannelwiseCell
from pararnn.functions import sigmoid, softplus

_LEAKS = ("exponential", "sigmoid")
# The least Δt that the sigmoid leak sees.
SHORTEST = 1e-4


class ParaCfC(ChannelwiseCell):
    """Closed-form continuous-time unit with diagonal recurrent weights.

    ::

        a = exp(-softplus(f_x) Δt)    n = tanh(c_x + u h)    h' = a h + (1 - a) n

    with (f_x, c_x) = W_x x + b. This is the solution after Δt of dh/dt = softplus(f_x) (n - h) with n held: a step
    without duration changes nothing, and one of any duration stays between h and n. Δt is the drive ``dt``, 1 unless
    given: a number, (B,) or (B, T). One slot, diagonal Jacobian a + (1 - a)(1 - n²) u, |h| ≤ 1 once it is. Source:
    Hasani et al. 2022 (arXiv 2106.13898), eqs. 2–10, with diagonal recurrent weights.

    Args:
        leak: 'exponential' as above; 'sigmoid' is a = σ(-softplus(f_x) max(Δt, 1e-4)), which is at most ½ and so
            forgets half of the state even when no time passes.

    >>> import numpy as np, pararnn
    >>> cell, x = ParaCfC(4, 8, seed=0), np.ones((2, 10, 4), dtype=np.float32)
    >>> pararnn.newton_apply(cell, x, dt=0.5).shape
    (2, 10, 8)
    >>> h0 = np.full((2, 8), 0.7, dtype=np.float32)
    >>> bool(np.all(pararnn.newton_apply(cell, x, h0=h0, dt=0.0) == h0[:, None, :]))
    True
    """

    slots = ("h",)
    gates = ("f", "c", "dt")
    drives = {"dt": 1.0}
    params = ("u",)
    bounds = {"h": (-1.0, 1.0)}
    options = ("leak",)
    leak: str

    def __init__(
        self, input_size: int | None = None, hidden_size: int | None = None, *, leak: str = "exponential",
        **keywords: Any,
    ) -> None:  # fmt: skip
        if leak not in _LEAKS:
            raise ValueError(f"ParaCfC: leak must be one of {_LEAKS}, got {leak!r}")
        self.leak = leak
        super().__init__(input_size, hidden_size, **keywords)

    def check_drive(self, name: str, least: float) -> None:
        if not least >= 0.0:
            raise ValueError(f"ParaCfC: {name} must be at least 0, got {least!r}")

    def step(self, xp: Any, h: Any, f: Any, c: Any, dt: Any, u: Any) -> tuple[Any, ...]:
        rate, n = softplus(xp, f), xp.tanh(c + u * h)
        if self.leak == "sigmoid":
            a = sigmoid(xp, -(rate * xp.clip(dt, SHORTEST, None)))
            return (a * h + (1.0 - a) * n,)
        spent = -(rate * dt)
        return (xp.exp(spent) * h - xp.expm1(spent) * n,)
