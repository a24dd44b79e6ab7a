"""ParaS5: a diagonal state space in continuous time, discretised exactly for steps of any duration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pararnn.cells.base import ChannelwiseCell


class ParaS5(ChannelwiseCell):
    """Diagonal state space model with a complex number per channel.

    ::

        λ = -exp(a) + i b    Δ = exp(δ) Δt
        s' = exp(λ Δ) s + (exp(λ Δ) - 1)/λ (b_re + i b_im)          zero-order hold

    with (b_re, b_im) = W_x x + b and the complex state s in the slots (h, im): h is its real part, which a layer passes
    on. Δt is the drive ``dt``, 1 unless given: a number, (B,) or (B, T). Linear: one correction is exact. A 2×2
    Jacobian per channel. Source: Smith et al. 2022 (arXiv 2208.04933), eq. 6, with the poles -1/2 + iπn of S4D-Lin
    (arXiv 2206.11893).

    >>> import numpy as np, pararnn
    >>> cell, x = ParaS5(4, 8, seed=0), np.ones((2, 10, 4), dtype=np.float32)
    >>> pararnn.newton_apply(cell, x, dt=0.5).shape
    (2, 10, 2, 8)
    """

    slots = ("h", "im")
    gates = ("b_re", "b_im", "dt")
    drives = {"dt": 1.0}
    params = ("a", "b", "delta")
    default_max_recurrent_norm = None
    oscillates = True

    def initial_arrays(self, rng: np.random.Generator, n_in: int, n_h: int) -> dict[str, np.ndarray]:
        """λ = -1/2 + iπn, Δ log-uniform in [1e-3, 1e-1]; W_x as every cell's."""
        made = super().initial_arrays(rng, n_in, n_h)
        made["a"] = np.full(n_h, math.log(0.5))
        made["b"] = math.pi * np.arange(n_h)
        made["delta"] = rng.uniform(math.log(1e-3), math.log(1e-1), n_h)
        return made

    def check_drive(self, name: str, least: float) -> None:
        if not least >= 0.0:
            raise ValueError(f"ParaS5: {name} must be at least 0, got {least!r}")

    def step(
        self, xp: Any, h: Any, im: Any, b_re: Any, b_im: Any, dt: Any, a: Any, b: Any, delta: Any
    ) -> tuple[Any, ...]:
        damping, span = xp.exp(a), xp.exp(delta) * dt
        decay, half = -(damping * span), xp.sin(0.5 * (b * span))
        size, sine = xp.exp(decay), xp.sin(b * span)
        cosine = 1.0 - 2.0 * (half * half)
        # exp(λΔ) - 1 without the cancellation that a short step would suffer.
        p, q = xp.expm1(decay) * cosine - 2.0 * (half * half), size * sine
        scale = 1.0 / (damping * damping + b * b)
        gain_re, gain_im = scale * (b * q - damping * p), -(scale * (damping * q + b * p))
        return (
            size * cosine * h - size * sine * im + (gain_re * b_re - gain_im * b_im),
            size * sine * h + size * cosine * im + (gain_im * b_re + gain_re * b_im),
        )
