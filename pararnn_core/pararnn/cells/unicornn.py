"""ParaUnICORNN: independent undamped oscillators, which neither forget nor explode."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pararnn.cells.base import ChannelwiseCell
from pararnn.functions import sigmoid


class ParaUnICORNN(ChannelwiseCell):
    """Undamped independent controlled oscillatory network.

    ::

        q = Δt σ(c)
        z' = z - q (tanh(w h + v_x) + α h)
        h' = h + q z'

    with v_x = W_x x + b: a symplectic Euler step of a driven oscillator, so volumes in (h, z) are kept and the largest
    Lyapunov exponent is near 0, which is the hardest case for any parallel method. Slots (z, h), a 2×2 Jacobian of
    determinant 1 per channel. Source: Rusch & Mishra 2021 (arXiv 2103.05487), eq. 3: w starts uniform in (0, 1), c in
    (-0.1, 0.1).

    Args:
        step_size: Δt, positive. alpha: α ≥ 0, the spring.

    >>> import numpy as np, pararnn
    >>> pararnn.newton_apply(ParaUnICORNN(4, 8, seed=0), np.ones((2, 10, 4), dtype=np.float32)).shape
    (2, 10, 2, 8)
    """

    slots = ("z", "h")
    gates = ("v",)
    params = ("w", "c")
    default_max_recurrent_norm = None
    long_memory = True
    oscillates = True
    options = ("step_size", "alpha")
    step_size: float
    alpha: float

    def __init__(
        self, input_size: int | None = None, hidden_size: int | None = None, *, step_size: float = 0.1,
        alpha: float = 1.0, **keywords: Any,
    ) -> None:  # fmt: skip
        if not (step_size > 0.0 and math.isfinite(step_size)):
            raise ValueError(f"ParaUnICORNN: step_size must be a positive number, got {step_size!r}")
        if not (alpha >= 0.0 and math.isfinite(alpha)):
            raise ValueError(f"ParaUnICORNN: alpha must be at least 0, got {alpha!r}")
        self.step_size, self.alpha = float(step_size), float(alpha)
        super().__init__(input_size, hidden_size, **keywords)

    def initial_arrays(self, rng: np.random.Generator, n_in: int, n_h: int) -> dict[str, np.ndarray]:
        """w uniform in (0, 1), c in (-0.1, 0.1); W_x as every cell's."""
        made = super().initial_arrays(rng, n_in, n_h)
        made["w"], made["c"] = rng.random(n_h), rng.uniform(-0.1, 0.1, n_h)
        return made

    def step(self, xp: Any, z: Any, h: Any, v: Any, w: Any, c: Any) -> tuple[Any, ...]:
        q = self.step_size * sigmoid(xp, c)
        z = z - q * (xp.tanh(w * h + v) + self.alpha * h)
        return z, h + q * z
