"""MixedSLSTM: ParaSLSTM whose recurrent weights are matrices, one per head or one for all channels."""

from __future__ import annotations

from typing import Any

import numpy as np

from pararnn.arrays import Array, Namespace
from pararnn.cells.base import ChannelwiseCell
from pararnn.cells.mixing import Mix, MixingCell, orthogonal
from pararnn.cells.slstm import SLSTMEquations, SLSTMLogEquations

_GATES = ("i", "f", "z", "o")


class MixedSLSTM(SLSTMEquations, MixingCell):
    """ParaSLSTM with recurrent matrices: what ``ParaSLSTM(mix='head' | 'dense')`` makes.

    The equations of ParaSLSTM with g = R_g h + g_x for a matrix R_g of each gate. Heads: ``R_head`` (4, H, D/H, D/H),
    output axis first, entries clamped to ±0.5 unless max_recurrent_norm says otherwise. Dense: ``R_dense`` (4·D, D),
    not clamped. Source: Beck et al. 2024 (arXiv 2405.04517), section 2.2.

    >>> import warnings
    >>> from pararnn import ParaSLSTM
    >>> with warnings.catch_warnings(action="ignore"):
    ...     cell = ParaSLSTM(4, 8, mix="head", n_heads=2, seed=0)
    >>> cell.R_head.shape
    (4, 2, 4, 4)
    """

    slots = ("c", "n", "m", "h")
    gates = _GATES
    products = {"R": _GATES}
    options = ("n_heads", "eps", "forget_gate", "stabiliser_start")

    def __init__(
        self, input_size: int | None = None, hidden_size: int | None = None, *, n_heads: int | None = None,
        eps: float = 1e-6, forget_gate: str = "exponential", stabiliser_start: str = "zero",
        max_recurrent_norm: float | str | None = "default", **keywords: Any,
    ) -> None:  # fmt: skip
        self.set_options("ParaSLSTM", eps, forget_gate, stabiliser_start)
        if isinstance(max_recurrent_norm, str) and max_recurrent_norm == "default":
            max_recurrent_norm = None if n_heads is None else 0.5
        super().__init__(input_size, hidden_size, n_heads=n_heads, max_recurrent_norm=max_recurrent_norm, **keywords)

    @property
    def stored(self) -> str:
        return "R_dense" if self.n_heads is None else "R_head"

    def initial_arrays(self, rng: np.random.Generator, n_in: int, n_h: int) -> dict[str, np.ndarray]:
        """Matrices orthogonal with gain 0.25 per head, uniform in ±1/sqrt(D) if dense; W_x as in every cell."""
        heads, width = self.head_shape(n_h)
        made = ChannelwiseCell.initial_arrays(self, rng, n_in, n_h)
        if self.n_heads is None:
            bound = 1.0 / np.sqrt(n_h)
            return {"R_dense": rng.uniform(-bound, bound, (4 * n_h, n_h))} | made
        return {"R_head": orthogonal(rng, (4, *heads, width, width), 0.25)} | made

    def block(self, xp: Namespace, dtype: Any, name: str) -> Array:
        matrix, k, width = self.clamped(xp, dtype, self.stored), _GATES.index(name), self.d_h
        rows = matrix[k * width : (k + 1) * width, :] if self.n_heads is None else matrix[k, ...]
        return xp.matrix_transpose(rows)

    def matrix_gradients(self, xp: Namespace, blocks: dict[str, Array], offsets: dict[str, Array]) -> dict[str, Array]:
        rows = [xp.matrix_transpose(blocks[name]) for name in _GATES]
        return {self.stored: xp.concat(rows) if self.n_heads is None else xp.stack(rows)}

    def step(
        self, xp: Any, mix: Mix, c: Any, n: Any, m: Any, h: Any, i: Any, f: Any, z: Any, o: Any
    ) -> tuple[Any, ...]:
        i_h, f_h, z_h, o_h = mix(h, *_GATES)
        return self.advance(xp, c, n, m, i_h + i, f_h + f, z_h + z, o_h + o)

    def solve_cell(self) -> ChannelwiseCell:
        new = object.__new__(_MixedInLogCoordinates)
        new.__dict__.update(self.__dict__)
        return new


class _MixedInLogCoordinates(SLSTMLogEquations, MixedSLSTM):
    """The same recurrence for u = c/n and ℓ = log n: what the solver iterates on."""

    slots = ("u", "l", "m", "h")
    bounds = {"u": (-1.0, 1.0)}
    logarithmic = ("l",)
