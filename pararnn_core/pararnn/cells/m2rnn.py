"""ParaM2RNN: a matrix state, each of whose rows is mixed by the same matrix."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pararnn.arrays import Array, Namespace
from pararnn.cells.mixing import Mix, MixingCell
from pararnn.functions import sigmoid


class ParaM2RNN(MixingCell):
    """A nonlinear recurrence on a matrix H of shape (K, V).

    ::

        Z = tanh(H W + k vᵀ)    f = σ(f_x)    H' = f H + (1 - f) Z

    with (k, v, f_x) = W_x x + b of K, V and 1 numbers. The rows of H see each other only through the input, so the
    Jacobian splits into one V×V block per row, and a state is K rows of one product. |H| ≤ 1 once it is. Source: the
    M²RNN of Mishra et al. 2026, without heads.

    Args:
        input_size: I (also ``d_in``). k_dim, v_dim: K and V.
        others: as for MixingCell.

    Raises:
        TypeError, ValueError: a size that is missing or below one.

    >>> import numpy as np, pararnn
    >>> cell = ParaM2RNN(3, k_dim=2, v_dim=4, seed=0)
    >>> pararnn.newton_apply(cell, np.ones((2, 10, 3), dtype=np.float32)).shape
    (2, 10, 2, 4)
    """

    slots = ("h",)
    gates = ("u", "f")
    products = {"W": ("w",)}
    bounds = {"h": (-1.0, 1.0)}
    options = ("n_heads", "k_dim", "v_dim")
    k_dim: int
    v_dim: int

    def __init__(
        self, input_size: int | None = None, hidden_size: int | None = None, *, k_dim: int | None = None,
        v_dim: int | None = None, **keywords: Any,
    ) -> None:  # fmt: skip
        for name, value in (("k_dim", k_dim), ("v_dim", v_dim)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"ParaM2RNN needs {name}, a whole number of at least 1; got {value!r}")
            if value < 1:
                raise ValueError(f"ParaM2RNN: {name} must be at least 1, got {value}")
        assert k_dim is not None and v_dim is not None
        self.k_dim, self.v_dim = int(k_dim), int(v_dim)
        if hidden_size not in (None, self.k_dim * self.v_dim):
            raise ValueError(f"ParaM2RNN: hidden_size={hidden_size} is not k_dim·v_dim={self.k_dim * self.v_dim}")
        super().__init__(input_size, self.k_dim * self.v_dim, **keywords)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.k_dim, self.v_dim)

    @property
    def row_layout(self) -> tuple[int, int, int]:
        return self.k_dim, self.v_dim, self.v_dim

    def initial_arrays(self, rng: np.random.Generator, n_in: int, n_h: int) -> dict[str, np.ndarray]:
        """W the identity; W_x uniform in ±sqrt(6/(I + K + V + 1)), bias 0."""
        count = self.k_dim + self.v_dim + 1
        bound = math.sqrt(6.0 / (n_in + count))
        return {
            "W": np.eye(self.v_dim),
            "W_x.weight": rng.uniform(-bound, bound, (count, n_in)),
            "W_x.bias": np.zeros(count),
        }

    def block(self, xp: Namespace, dtype: Any, name: str) -> Array:
        return self.clamped(xp, dtype, "W")

    def matrix_gradients(self, xp: Namespace, blocks: dict[str, Array], offsets: dict[str, Array]) -> dict[str, Array]:
        return {"W": blocks["w"]}

    def gate_inputs(self, xp: Namespace, x: Array, weight: Array, bias: Array) -> list[Array]:
        k, v, f = self._split(xp, x @ xp.matrix_transpose(weight) + bias)
        return [xp.expand_dims(k, axis=-1) * xp.expand_dims(v, axis=-2), xp.expand_dims(f, axis=-1)]

    def _split(self, xp: Namespace, made: Array) -> tuple[Array, Array, Array]:
        k, v = self.k_dim, self.v_dim
        return made[..., :k], made[..., k : k + v], made[..., k + v :]

    def gate_cotangents(self, xp: Namespace, x: Array, weight: Array, gates: list[Array]) -> tuple[Array, Array, Array]:
        batch, time, features = x.shape
        # The outer product's factors are made again.
        k, v, _ = self._split(xp, x @ xp.matrix_transpose(weight) + self._bias(xp, x.dtype))
        d_k = xp.sum(gates[0] * xp.expand_dims(v, axis=-2), axis=-1)
        d_v = xp.sum(gates[0] * xp.expand_dims(k, axis=-1), axis=-2)
        d_f = xp.sum(gates[1], axis=-1)
        flat = xp.reshape(xp.concat([d_k, d_v, d_f], axis=-1), (batch * time, -1))
        rows = xp.reshape(x, (batch * time, features))
        d_x = xp.reshape(flat @ weight, (batch, time, features))
        return d_x, xp.matrix_transpose(flat) @ rows, xp.sum(flat, axis=0)

    def _bias(self, xp: Namespace, dtype: Any) -> Array:
        return xp.astype(self.W_x.bias, dtype, copy=False)

    def step(self, xp: Any, mix: Mix, h: Any, u: Any, f: Any) -> tuple[Any, ...]:
        (w,) = mix(h, "w")
        f = sigmoid(xp, f)
        return (f * h + (1.0 - f) * xp.tanh(w + u),)
