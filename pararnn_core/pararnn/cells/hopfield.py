"""ParaHopfield: attention over stored patterns as a recurrence, with matrices that the input makes at every step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from pararnn.arrays import Array, Namespace, cast
from pararnn.cells.mixing import Mix, MixingCell


class ParaHopfield(MixingCell):
    """A modern Hopfield network whose patterns come from the input.

    ::

        a = softmax(β K_t h)    h' = V_t a

    with K_t and V_t, (D, D) each, from W_x x + b, whose rows are K's and then V's entries. One slot, dense Jacobian
    V (diag(a) - a aᵀ) β K. Source: Ramsauer et al. 2021 (arXiv 2008.02217), eq. 3, as a recurrence.

    Args:
        beta: β; 1/sqrt(D) if None.

    Raises:
        ValueError: β is not a positive number.

    Warns:
        UserWarning: D above 32, where W_x with its 2·D² rows costs more than all the rest.

    >>> import numpy as np, pararnn
    >>> cell = ParaHopfield(3, 4, seed=0)
    >>> pararnn.newton_apply(cell, np.ones((2, 10, 3), dtype=np.float32)).shape
    (2, 10, 4)
    """

    slots = ("h",)
    gates = ("K", "V")
    options = ("n_heads", "beta")
    beta: float

    def __init__(
        self, input_size: int | None = None, hidden_size: int | None = None, *, beta: float | None = None,
        **keywords: Any,
    ) -> None:  # fmt: skip
        width = hidden_size if hidden_size is not None else keywords.get("d_h")
        if beta is None:
            beta = 1.0 / math.sqrt(width) if isinstance(width, (int, np.integer)) and width > 0 else 1.0
        if isinstance(beta, (bool, str)) or not (beta > 0.0 and math.isfinite(beta)):
            raise ValueError(f"ParaHopfield: beta must be a positive number, got {beta!r}")
        self.beta = float(beta)
        super().__init__(input_size, hidden_size, **keywords)
        if self.d_h > 32:
            warnings.warn(
                f"ParaHopfield: hidden_size={self.d_h} makes an input projection of {2 * self.d_h**2} rows; it is "
                "meant for at most 32",
                UserWarning,
                stacklevel=2,
            )

    def initial_arrays(self, rng: np.random.Generator, n_in: int, n_h: int) -> dict[str, np.ndarray]:
        """W_x uniform in ±1/sqrt(I), bias 0."""
        bound = 1.0 / math.sqrt(n_in)
        return {"W_x.weight": rng.uniform(-bound, bound, (2 * n_h * n_h, n_in)), "W_x.bias": np.zeros(2 * n_h * n_h)}

    def gate_inputs(self, xp: Namespace, x: Array, weight: Array, bias: Array) -> list[Array]:
        batch, time, features = x.shape
        made = xp.reshape(x, (batch * time, features)) @ xp.matrix_transpose(weight) + bias
        made = xp.reshape(made, (batch, time, 2, self.d_h, self.d_h))
        return [made[:, :, 0, ...], made[:, :, 1, ...]]

    def gate_cotangents(self, xp: Namespace, x: Array, weight: Array, gates: list[Array]) -> tuple[Array, Array, Array]:
        batch, time, features = x.shape
        flat = xp.reshape(xp.stack(gates, axis=2), (batch * time, -1))
        rows = xp.reshape(x, (batch * time, features))
        d_x = xp.reshape(flat @ weight, (batch, time, features))
        return d_x, xp.matrix_transpose(flat) @ rows, xp.sum(flat, axis=0)

    def step(self, xp: Any, mix: Mix, h: Any, K: Any, V: Any) -> tuple[Any, ...]:
        a = _softmax(xp, self.beta * _times(xp, K, h))
        return (_times(xp, V, a),)

    def rows(self, problem: Any) -> Any:
        return HopfieldRows(problem, self)

    def step_work(self) -> Any:
        from pararnn.mixing.plan import StepWork

        width = self.d_h
        return StepWork(width, width, 2, 2, 12, 1, 12 + 2 * width, 1, 2 * width + 2)


class HopfieldRows:
    """The step, its true diagonal and its cotangent on many states at once, as `pararnn.mixing.rows.Rows`."""

    size, entries = 1, [(0, 0)]
    logarithmic = [False]

    def __init__(self, problem: Any, cell: ParaHopfield) -> None:
        self.xp, self.cell = problem.xp, cell
        self.bounds = [None]
        self.weight, self.bias = (cast(self.xp, a, problem.work_dtype) for a in cell.W_x)

    def gates(self, x: Array) -> list[Array]:
        return self.cell.gate_inputs(self.xp, x, self.weight, self.bias)

    def step(self, slots: Sequence[Array], gates: Sequence[Array]) -> list[Array]:
        return list(self.cell.step(self.xp, None, *slots, *gates))  # type: ignore[arg-type]

    def step_tangent(
        self, slots: Sequence[Array], tangent: Sequence[Array], gates: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        return self.step(slots, gates), [self.diagonal([*slots, *gates])[0] * tangent[0]]

    def identity(self, like: Array) -> list[Array]:
        return [self.xp.ones_like(like)]

    def tape(self, slots: Sequence[Array], gates: Sequence[Array]) -> list[Array]:
        return [*slots, *gates]

    def diagonal(self, tape: Sequence[Array]) -> list[Array]:
        """β (Σ_j V_ij a_j K_ji - h'_i Σ_j a_j K_ji)."""
        xp, (h, K, V) = self.xp, tape
        a = _softmax(xp, self.cell.beta * _times(xp, K, h))
        weighted = xp.expand_dims(a, axis=-1) * K
        both = xp.sum(V * xp.matrix_transpose(weighted), axis=-1)
        return [self.cell.beta * (both - _times(xp, V, a) * xp.sum(weighted, axis=-2))]

    def back(self, tape: Sequence[Array], cotangents: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        xp, (h, K, V), (mu,) = self.xp, tape, cotangents
        a = _softmax(xp, self.cell.beta * _times(xp, K, h))
        d_a = _times(xp, xp.matrix_transpose(V), mu)
        d_p = self.cell.beta * a * (d_a - xp.sum(a * d_a, axis=-1, keepdims=True))
        d_h = _times(xp, xp.matrix_transpose(K), d_p)
        return [d_h], [_outer(xp, d_p, h), _outer(xp, mu, a)]

    def leaf_cotangents(self, tape: Sequence[Array], stored: Sequence[Array]) -> dict[str, Array]:
        return {}


def _times(xp: Namespace, matrix: Array, vector: Array) -> Array:
    return (matrix @ xp.expand_dims(vector, axis=-1))[..., 0]


def _outer(xp: Namespace, a: Array, b: Array) -> Array:
    return xp.expand_dims(a, axis=-1) * xp.expand_dims(b, axis=-2)


def _softmax(xp: Namespace, p: Array) -> Array:
    e = xp.exp(p - xp.max(p, axis=-1, keepdims=True))
    return e / xp.sum(e, axis=-1, keepdims=True)
