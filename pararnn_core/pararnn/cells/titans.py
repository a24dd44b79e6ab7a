"""ParaTitans: a memory of one number per channel that learns by a gradient step at every time step."""

from __future__ import annotations

from typing import Any

import numpy as np

from pararnn.cells.base import ChannelwiseCell
from pararnn.functions import sigmoid, softplus


class ParaTitans(ChannelwiseCell):
    """Test-time memory, one scalar map v ≈ h k per channel, with a forget gate and a nonlinear term.

    ::

        α = σ(α_x)    θ = softplus(θ_x)    η = θ / (1 + θ k²)
        h' = (1 - α) h - η (h k - v) k + u tanh(n_x + r h)

    with (α_x, θ_x, k, v, n_x) = W_x x + b; the bias of θ_x starts at -1. η k² < 1 whatever k is, so the memory term
    contracts: it is the implicit gradient step, the minimiser of (h'k - v)² / 2 + (h' - h)² / 2θ. One slot, diagonal
    Jacobian (1 - α) - η k² + u r (1 - tanh²). Source: Behrouz et al. 2024 (arXiv 2501.00663), section 3.1, one number
    per channel, without momentum.

    Args:
        normalised: False takes the explicit step, η = θ, which has no lower bound on its slope: for θ k² > 2 - α the
            *recurrence itself* explodes, in the time loop too.

    >>> import numpy as np, pararnn
    >>> x = 4.0 * np.random.default_rng(0).standard_normal((1, 500, 8))
    >>> size = lambda cell: float(np.abs(pararnn.sequential_apply(cell, x)).max())
    >>> size(ParaTitans(8, 8, seed=0, dtype=np.float64)) < 10.0
    True
    >>> size(ParaTitans(8, 8, seed=0, dtype=np.float64, normalised=False)) > 1e6
    True
    """

    slots = ("h",)
    gates = ("alpha", "theta", "k", "v", "n")
    params = ("u", "r")
    options = ("normalised",)
    normalised: bool

    def __init__(
        self, input_size: int | None = None, hidden_size: int | None = None, *, normalised: bool = True,
        **keywords: Any,
    ) -> None:  # fmt: skip
        if not isinstance(normalised, (bool, np.bool_)):
            raise ValueError(f"ParaTitans: normalised must be True or False, got {normalised!r}")
        self.normalised = bool(normalised)
        super().__init__(input_size, hidden_size, **keywords)

    def initial_arrays(self, rng: np.random.Generator, n_in: int, n_h: int) -> dict[str, np.ndarray]:
        """As every cell's, with the bias of θ_x at -1."""
        made = super().initial_arrays(rng, n_in, n_h)
        made["W_x.bias"][n_h : 2 * n_h] = -1.0
        return made

    def step(
        self, xp: Any, h: Any, alpha: Any, theta: Any, k: Any, v: Any, n: Any, u: Any, r: Any
    ) -> tuple[Any, ...]:
        pull = softplus(xp, theta) * k
        if self.normalised:
            pull = pull / (1.0 + pull * k)
        return ((1.0 - sigmoid(xp, alpha)) * h - pull * (h * k - v) + u * xp.tanh(n + r * h),)
