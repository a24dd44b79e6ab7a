"""Adam with gradient clipping, over a dictionary of arrays."""

from __future__ import annotations

import math

import numpy as np

from pararnn.demo.model import Arrays


class Adam:
    """Moves every array against its gradient, scaled by the running size of that gradient.

    Source: Kingma and Ba 2015 (arXiv 1412.6980), algorithm 1.
    """

    def __init__(self, beta_1: float = 0.9, beta_2: float = 0.99, eps: float = 1e-8) -> None:
        self.beta_1, self.beta_2, self.eps = beta_1, beta_2, eps
        self.steps = 0
        self.mean: Arrays = {}
        self.square: Arrays = {}

    def step(self, arrays: Arrays, gradient: Arrays, rate: float) -> Arrays:
        """New arrays; the given ones are left alone."""
        self.steps += 1
        # Both averages start at zero and are too small by a known factor at first.
        rate *= math.sqrt(1.0 - self.beta_2**self.steps) / (1.0 - self.beta_1**self.steps)
        moved: Arrays = {}
        for name, array in arrays.items():
            g = gradient[name]
            m, v = self.mean.get(name, np.zeros_like(g)), self.square.get(name, np.zeros_like(g))
            self.mean[name] = m = self.beta_1 * m + (1.0 - self.beta_1) * g
            self.square[name] = v = self.beta_2 * v + (1.0 - self.beta_2) * g * g
            moved[name] = array - rate * m / (np.sqrt(v) + self.eps)
        return moved


def clip(gradient: Arrays, largest: float) -> tuple[Arrays, float]:
    """The gradient, scaled down to norm `largest` where it is longer, and the norm that it had."""
    norm = math.sqrt(sum(float(np.vdot(g, g)) for g in gradient.values()))
    if not norm > largest:
        return gradient, norm
    return {name: g * (largest / norm) for name, g in gradient.items()}, norm


def rate_at(step: int, steps: int, highest: float) -> float:
    """The learning rate of one step: a short rise, then half a cosine down to a twentieth."""
    rise = min(1.0, (step + 1) / 10)
    return highest * rise * (0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * step / steps)))
