"""ParaRWKV7: a matrix memory with a decay and a rank-one update, linear in its state."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from pararnn.arrays import Array, Namespace, cast, compute_dtype
from pararnn.cells.base import ChannelwiseCell, resolve_sizes
from pararnn.functions import log_sigmoid

# The least length by which a key is divided.
SHORTEST_KEY = 1e-6


class ParaRWKV7(ChannelwiseCell):
    """The time mixing of RWKV-7 for H heads of width d, each a d×d matrix S.

    ::

        w = σ(w_x)    a = σ(a_x)    κ̂ = κ_x / max(|κ_x|, 1e-6)
        S' = S diag(w) - (S κ̂)(a ⊙ κ̂)ᵀ + v_x k_xᵀ        y = S' r_x

    with (w_x, a_x, κ_x, v_x, k_x, r_x) = W_x x + b, each (H, d). Rows of S are values, columns keys. Linear in S: an
    exact scan without any iteration, in chunks (:func:`pararnn.linear_attention.rwkv7`). `newton_apply` gives the
    states (B, T, H, d, d), `scan_apply` and ParaRNN the output y (B, T, H·d). States are large: for long T prefer slim
    heads, such as ``n_heads=1, d_head=16``. Source: Peng et al. 2025 (arXiv 2503.14456), eqs. 9–17.

    Args:
        input_size: I. hidden_size: H·d; may be left out where d_head is given.
        n_heads, d_head: H and d.

    Raises:
        TypeError: neither hidden_size nor d_head. ValueError: sizes that contradict each other.

    >>> import numpy as np, pararnn
    >>> cell, x = ParaRWKV7(4, n_heads=2, d_head=3, seed=0), np.ones((2, 10, 4), dtype=np.float32)
    >>> pararnn.newton_apply(cell, x).shape, cell.scan_apply(x).shape
    ((2, 10, 2, 3, 3), (2, 10, 6))
    """

    slots = ("S",)
    gates = ("w", "a", "kappa", "v", "k", "r")
    hidden = "S"
    family = "linear"
    options = ("n_heads",)
    default_max_recurrent_norm = None
    n_heads: int

    def __init__(
        self, input_size: int | None = None, hidden_size: int | None = None, *, n_heads: int = 1,
        d_head: int | None = None, d_in: int | None = None, d_h: int | None = None, **keywords: Any,
    ) -> None:  # fmt: skip
        if hidden_size is None and d_h is None and d_head is None:
            raise TypeError("ParaRWKV7 needs d_head, or hidden_size (or d_h)")
        for name, value in (("n_heads", n_heads), ("d_head", 1 if d_head is None else d_head)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"ParaRWKV7: {name} must be a whole number of at least 1, got {value!r}")
        if hidden_size is None and d_h is None:
            hidden_size = int(n_heads) * int(d_head or 1)
        _, width = resolve_sizes("ParaRWKV7", input_size, hidden_size, d_in, d_h)
        if width % n_heads or (d_head is not None and d_head * n_heads != width):
            wanted = f"n_heads={n_heads}" + ("" if d_head is None else f" times d_head={d_head}")
            raise ValueError(f"ParaRWKV7: {wanted} does not make hidden_size={width}")
        self.n_heads = int(n_heads)
        super().__init__(input_size, hidden_size, d_in=d_in, d_h=d_h, **keywords)

    @property
    def d_head(self) -> int:
        return self.d_h // self.n_heads

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.n_heads, self.d_head, self.d_head)

    @property
    def jac_structure(self) -> str:
        return "linear"

    def step(
        self, xp: Namespace, S: Array, w: Array, a: Array, kappa: Array, v: Array, k: Array, r: Array
    ) -> tuple[Array, ...]:
        """S (…, H, d, d) and gates (…, H·d) to the new S."""
        w, a, kappa, v, k = (self._heads(xp, g) for g in (w, a, kappa, v, k))
        unit = unit_key(xp, kappa)
        stored = xp.sum(S * xp.expand_dims(unit, axis=-2), axis=-1)
        kept = S * xp.expand_dims(gate(xp, w), axis=-2) - _outer(xp, stored, gate(xp, a) * unit)
        return (kept + _outer(xp, v, k),)

    def _heads(self, xp: Namespace, gate: Array) -> Array:
        return xp.reshape(gate, (*gate.shape[:-1], self.n_heads, self.d_head))

    def operands(self, xp: Namespace, x: Array) -> dict[str, Array]:
        """What W_x delivers, by gate (B, T, H, d), in the dtype of the computation."""
        work = compute_dtype(xp, x.dtype)
        weight, bias = (cast(xp, array, work) for array in self.W_x)
        made = cast(xp, x, work) @ xp.matrix_transpose(weight) + bias
        split = xp.reshape(made, (*x.shape[:2], len(self.gates), self.n_heads, self.d_head))
        return {name: split[:, :, g, ...] for g, name in enumerate(self.gates)}

    def scan_apply(
        self, x: Array, s0: Array | None = None, *, return_state: bool = False, form: str = "auto"
    ) -> Any:
        """The output y (B, T, H·d), and with `return_state` the last state (B, H, d, d).

        Args:
            x: (B, T, I). s0: (B, H, d, d); zeros if None.
            form: 'recurrent', 'chunk', 'subchunk' or 'auto', as of :func:`pararnn.linear_attention.rwkv7`.
        """
        from pararnn.problem import make_problem

        xp = make_problem("scan_apply", self, x, s0).xp
        given = self.operands(xp, x)
        initial = None if s0 is None else xp.matrix_transpose(cast(xp, s0, given["w"].dtype))
        y, last = attend(rank_one(xp, given), given["r"], initial, form)
        y = cast(xp, xp.reshape(y, (*x.shape[:2], self.d_h)), x.dtype)
        return (y, cast(xp, xp.matrix_transpose(last), x.dtype)) if return_state else y

    def readout(self, xp: Namespace, states: Array, x: Array) -> Array:
        """y from the states (B, T, H, d, d) and the input."""
        r = self.operands(xp, x)["r"]
        y = xp.sum(cast(xp, states, r.dtype) * xp.expand_dims(r, axis=-2), axis=-1)
        return cast(xp, xp.reshape(y, (*x.shape[:2], self.d_h)), x.dtype)


def gate(xp: Namespace, x: Array) -> Array:
    """σ in a form whose derivative any library finds, however far the gate is shut."""
    return xp.exp(log_sigmoid(xp, x))


def unit_key(xp: Namespace, kappa: Array) -> Array:
    """κ̂, and 0 for κ = 0, with finite derivatives there."""
    squared = xp.sum(kappa * kappa, axis=-1, keepdims=True)
    return kappa / xp.sqrt(xp.where(squared > SHORTEST_KEY**2, squared, xp.full_like(squared, SHORTEST_KEY**2)))


def _outer(xp: Namespace, rows: Array, columns: Array) -> Array:
    return xp.expand_dims(rows, axis=-1) * xp.expand_dims(columns, axis=-2)


def rank_one(xp: Namespace, given: dict[str, Array]) -> dict[str, Array]:
    """The arguments of `rwkv7` besides r, from what W_x delivers."""
    unit = unit_key(xp, given["kappa"])
    return {
        "w": log_sigmoid(xp, given["w"]), "k": given["k"], "v": given["v"], "a": -unit,
        "b": gate(xp, given["a"]) * unit,
    }  # fmt: skip


def attend(
    arguments: dict[str, Array], r: Array, initial: Array | None, form: str = "auto"
) -> tuple[Array, Array]:
    """Output and final state of `rwkv7`, keys before values."""
    from pararnn.linear_attention import rwkv7

    with warnings.catch_warnings():
        # Short sequences of many heads are meant here.
        warnings.simplefilter("ignore", UserWarning)
        out, last = rwkv7(r, **arguments, initial_state=initial, output_final_state=True, form=form)
    assert last is not None
    return out, last
