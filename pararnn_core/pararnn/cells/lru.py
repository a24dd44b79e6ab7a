"""ParaLRU: a linear recurrence with a complex number per channel, kept as its real and imaginary part."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pararnn.cells.base import ChannelwiseCell


class ParaLRU(ChannelwiseCell):
    """Linear recurrent unit.

    ::

        λ = exp(-exp(ν) + i exp(θ))    s' = λ s + exp(γ) (b_re + i b_im)

    with (b_re, b_im) = W_x x + b and the complex state s in the slots (h, im): h is its real part, which a layer passes
    on. |λ| < 1 for every ν. Linear: one correction is exact. A 2×2 Jacobian per channel, |λ| times a rotation. Source:
    Orvieto et al. 2023 (arXiv 2303.06349), section 3: |λ| starts uniform on a ring, γ at log √(1 - |λ|²).

    Args:
        r_min, r_max: the ring on which λ starts, 0 ≤ r_min < r_max ≤ 1.
        max_phase: the largest angle of λ at the start, in (0, 2π].

    >>> import numpy as np, pararnn
    >>> pararnn.newton_apply(ParaLRU(4, 8, seed=0), np.ones((2, 10, 4), dtype=np.float32)).shape
    (2, 10, 2, 8)
    """

    slots = ("h", "im")
    gates = ("b_re", "b_im")
    params = ("nu", "theta", "gamma")
    default_max_recurrent_norm = None
    oscillates = True
    options = ("r_min", "r_max", "max_phase")
    r_min: float
    r_max: float
    max_phase: float

    def __init__(
        self, input_size: int | None = None, hidden_size: int | None = None, *, r_min: float = 0.9,
        r_max: float = 0.999, max_phase: float = 2.0 * math.pi, **keywords: Any,
    ) -> None:  # fmt: skip
        if not 0.0 <= r_min < r_max <= 1.0:
            raise ValueError(f"ParaLRU: wanted 0 <= r_min < r_max <= 1, got r_min={r_min!r}, r_max={r_max!r}")
        if not 0.0 < max_phase <= 2.0 * math.pi:
            raise ValueError(f"ParaLRU: max_phase must lie in (0, 2π], got {max_phase!r}")
        self.r_min, self.r_max, self.max_phase = float(r_min), float(r_max), float(max_phase)
        super().__init__(input_size, hidden_size, **keywords)

    def initial_arrays(self, rng: np.random.Generator, n_in: int, n_h: int) -> dict[str, np.ndarray]:
        """λ uniform on the ring, γ so that a white input makes a state of its own size; W_x as every cell's."""
        made = super().initial_arrays(rng, n_in, n_h)
        # 1 - u lies in (0, 1], so that neither logarithm meets 0.
        squared = self.r_min**2 + (1.0 - rng.random(n_h)) * (self.r_max**2 - self.r_min**2)
        squared = np.minimum(squared, 1.0 - 1e-12)
        made["nu"] = np.log(-0.5 * np.log(squared))
        made["theta"] = np.log(self.max_phase * (1.0 - rng.random(n_h)))
        made["gamma"] = 0.5 * np.log1p(-squared)
        return made

    def step(
        self, xp: Any, h: Any, im: Any, b_re: Any, b_im: Any, nu: Any, theta: Any, gamma: Any
    ) -> tuple[Any, ...]:
        size, angle, gain = xp.exp(-xp.exp(nu)), xp.exp(theta), xp.exp(gamma)
        c, s = size * xp.cos(angle), size * xp.sin(angle)
        return c * h - s * im + gain * b_re, s * h + c * im + gain * b_im
