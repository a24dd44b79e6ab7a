"""MixingCell: a cell whose recurrence multiplies by a matrix, dense or one per head."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from pararnn.arrays import Array, Namespace, cast
from pararnn.cells.base import ChannelwiseCell

# What `step` is given to multiply with: mix(source, *names) gives back one array per name.
Mix = Callable[..., tuple[Any, ...]]


class MixingCell(ChannelwiseCell):
    """A recurrent cell in which channels see each other through products with stored matrices.

    A subclass says in ``products`` which stored matrix delivers which products, and writes ``step`` with elementwise
    operations and with ``mix``::

        slot' = step(xp, mix, *slots, *gates, *params)
        u_name = mix(source, name, …):   u_name[i] = Σ_j R_name[i, j] source[j] + b_name[i]

    where ``source`` is a slot or made of what the step knows by then. Sizes, arrays and the input projection are those
    of a ChannelwiseCell. A matrix is stored as (k·D, D), or (H, k·D/H, D/H) for H heads, with the rows of its k
    products one after the other; a bias of its products, if there is one, as (k·D,).

    Args:
        n_heads: H; None for one dense matrix. The width must be divisible by it.
        others: as for ChannelwiseCell; ``max_recurrent_norm`` clamps the entries of the matrices, by default not.

    Raises:
        ValueError: a number of heads that does not divide the width.

    >>> class Elman(MixingCell):
    ...     slots, gates, products = ("h",), ("u",), {"R": ("m",)}
    ...     def step(self, xp, mix, h, u):
    ...         (m,) = mix(h, "m")
    ...         return (xp.tanh(m + u),)
    >>> Elman(3, 4, seed=0).R.shape, Elman(3, 4, n_heads=2).R.shape
    ((4, 4), (2, 2, 2))
    """

    family = "mixing"
    # Stored matrix -> the names of its products; stored bias -> the names that it is added to.
    products: ClassVar[dict[str, tuple[str, ...]]] = {}
    options: ClassVar[tuple[str, ...]] = ("n_heads",)
    biases: ClassVar[dict[str, tuple[str, ...]]] = {}
    default_max_recurrent_norm: ClassVar[float | None] = None
    n_heads: int | None

    def __init__(
        self, input_size: int | None = None, hidden_size: int | None = None, *, n_heads: int | None = None,
        **keywords: Any,
    ) -> None:  # fmt: skip
        if n_heads is not None and (isinstance(n_heads, bool) or not isinstance(n_heads, (int, np.integer))):
            raise TypeError(f"{type(self).__name__}: n_heads must be a whole number, got {n_heads!r}")
        self.n_heads = None if n_heads is None else int(n_heads)
        super().__init__(input_size, hidden_size, **keywords)

    def head_shape(self, n_h: int) -> tuple[tuple[int, ...], int]:
        """The leading axis of the matrices, () or (H,), and the width that one of them mixes."""
        if self.n_heads is None:
            return (), n_h
        if self.n_heads < 1 or n_h % self.n_heads:
            raise ValueError(
                f"{type(self).__name__}: n_heads={self.n_heads} must divide hidden_size={n_h}; choose a divisor"
            )
        return (self.n_heads,), n_h // self.n_heads

    def initial_arrays(self, rng: np.random.Generator, n_in: int, n_h: int) -> dict[str, np.ndarray]:
        """Everything uniform in ±1/sqrt(D), as in torch.nn's recurrent layers."""
        heads, width = self.head_shape(n_h)
        made = super().initial_arrays(rng, n_in, n_h)
        bound = 1.0 / math.sqrt(n_h)
        for name, products in self.products.items():
            made[name] = rng.uniform(-bound, bound, (*heads, len(products) * width, width))
        for name, products in self.biases.items():
            made[name] = rng.uniform(-bound, bound, len(products) * n_h)
        for name in ("W_x.weight", "W_x.bias"):
            made[name] = rng.uniform(-bound, bound, made[name].shape)
        return made

    @property
    def product_names(self) -> tuple[str, ...]:
        return tuple(name for names in self.products.values() for name in names)

    @property
    def operand_names(self) -> tuple[str, ...]:
        return ("mix", *super().operand_names)

    @property
    def jac_structure(self) -> str:
        return "dense" if self.n_heads is None else "head"

    @property
    def row_layout(self) -> tuple[int, int, int]:
        """Rows of one state, channels in a row, and how many of them a product mixes."""
        return 1, self.d_h, self.head_shape(self.d_h)[1]

    def step_work(self) -> Any:
        """What the cost model knows about a step."""
        from pararnn.mixing.plan import work_of

        return work_of(self)

    def rows(self, problem: Any) -> Any:
        """What runs the step and its derivatives on many states at once."""
        from pararnn.mixing.rows import Rows

        return Rows(problem, self)

    # What the solvers ask about the matrices; products are taken as `source @ block`.

    def block(self, xp: Namespace, dtype: Any, name: str) -> Array:
        """The matrix of one product as the step sees it: (D, D), or (H, D/H, D/H), input axis first."""
        return xp.matrix_transpose(self._rows(xp, dtype, name))

    def _rows(self, xp: Namespace, dtype: Any, name: str) -> Array:
        stored = self._stored_with(name)
        position = self.products[stored].index(name)
        matrix = self.clamped(xp, dtype, stored)
        width = int(matrix.shape[-1])
        return matrix[..., position * width : (position + 1) * width, :]

    def _stored_with(self, name: str) -> str:
        for stored, names in self.products.items():
            if name in names:
                return stored
        raise ValueError(f"{type(self).__name__} has no product {name!r}; its products are {self.product_names}")

    def clamped(self, xp: Namespace, dtype: Any, stored: str) -> Array:
        """A stored matrix with its entries clamped, in `dtype`."""
        matrix, cap = cast(xp, self.arrays[stored], dtype), self.max_recurrent_norm
        return matrix if cap is None else xp.clip(matrix, -cap, cap)

    def clamp_masks(self, xp: Namespace, dtype: Any) -> dict[str, Array]:
        """As in every cell, for the matrices alone: a bias is not clamped."""
        masks = super().clamp_masks(xp, dtype)
        return {name: xp.ones_like(mask) if name in self.biases else mask for name, mask in masks.items()}

    def offset(self, xp: Namespace, dtype: Any, name: str) -> Array | None:
        """The bias of one product, (D,), or None."""
        for stored, names in self.biases.items():
            if name in names and stored in self.arrays:
                k = names.index(name)
                return cast(xp, self.arrays[stored], dtype)[k * self.d_h : (k + 1) * self.d_h]
        return None

    def matrix_gradients(self, xp: Namespace, blocks: dict[str, Array], offsets: dict[str, Array]) -> dict[str, Array]:
        """Cotangents of the stored arrays from those of `block` and `offset` by product."""
        out = {}
        for stored, names in self.products.items():
            out[stored] = xp.concat([xp.matrix_transpose(blocks[name]) for name in names], axis=-2)
        for stored, names in self.biases.items():
            if stored in self.arrays:
                out[stored] = xp.concat([offsets[name] for name in names])
        return out

    def mixer(self, xp: Namespace, dtype: Any) -> Mix:
        """`mix` on arrays whose last axis is D."""
        made: dict[tuple[str, ...], tuple[Array, Array | None]] = {}

        def mix(source: Array, *names: str) -> tuple[Array, ...]:
            if names not in made:
                made[names] = self.joined(xp, dtype, names)
            return multiply(xp, source, len(names), *made[names])

        return mix

    def joined(self, xp: Namespace, dtype: Any, names: tuple[str, ...]) -> tuple[Array, Array | None]:
        """The matrices of several products side by side, (D, k·D) or (H, D/H, k·D/H), and their biases (k·D,)."""
        stored = self._stored_with(names[0])
        if type(self).block is MixingCell.block and self.products[stored] == names:
            # All products of one array: its transpose as it is, and its bias if that serves the same products.
            matrix = xp.matrix_transpose(self.clamped(xp, dtype, stored))
            biases = [b for b, served in self.biases.items() if b in self.arrays and set(served) & set(names)]
            if not biases:
                return matrix, None
            if len(biases) == 1 and self.biases[biases[0]] == names:
                return matrix, cast(xp, self.arrays[biases[0]], dtype)
        blocks = [self.block(xp, dtype, name) for name in names]
        matrix = blocks[0] if len(blocks) == 1 else xp.concat(blocks, axis=-1)
        offsets = [self.offset(xp, dtype, name) for name in names]
        if all(o is None for o in offsets):
            return matrix, None
        none = xp.zeros((self.d_h,), dtype=dtype, device=self.device)
        return matrix, xp.concat([none if o is None else o for o in offsets])

    # The input side; a cell whose gates are not W_x x + b cut into blocks overrides both.

    def gate_inputs(self, xp: Namespace, x: Array, weight: Array, bias: Array) -> list[Array]:
        """Each gate on inputs x (B, W, I), as (B, W, D), or broadcastable to a slot's shape."""
        batch, time, features = x.shape
        made = xp.reshape(x, (batch * time, features)) @ xp.matrix_transpose(weight)
        made += bias
        made = xp.reshape(made, (batch, time, len(self.gates), self.d_h))
        return [made[:, :, g, :] for g in range(len(self.gates))]

    def gate_cotangents(self, xp: Namespace, x: Array, weight: Array, gates: list[Array]) -> tuple[Array, Array, Array]:
        """Cotangents of x, W_x and its bias from those of `gate_inputs`, each (B, W, D)."""
        batch, time, features = x.shape
        flat = xp.reshape(xp.stack(gates, axis=2), (batch * time, len(gates) * self.d_h))
        rows = xp.reshape(x, (batch * time, features))
        d_x = xp.reshape(flat @ weight, (batch, time, features))
        return d_x, xp.matrix_transpose(flat) @ rows, xp.sum(flat, axis=0)


def check_mix(owner: str, mix: str, n_heads: int | None) -> None:
    """Refuses a mix that there is not, and a number of heads where there are none."""
    if mix not in ("diag", "head", "dense"):
        raise ValueError(f"{owner}: mix must be 'diag', 'head' or 'dense', got {mix!r}")
    if mix == "head" and n_heads is None:
        raise ValueError(f"{owner}: mix='head' needs n_heads, a divisor of hidden_size")
    if mix == "head":
        warnings.warn(
            f"{owner}(mix='head') multiplies by a matrix at every step, which costs more than mix='diag'; it is solved "
            "over segments of time, as the dense one",
            UserWarning,
            stacklevel=3,
        )
    if mix != "head" and n_heads is not None:
        raise ValueError(f"{owner}: n_heads={n_heads} needs mix='head', got mix={mix!r}")


def orthogonal(rng: np.random.Generator, shape: tuple[int, ...], gain: float) -> np.ndarray:
    """Square matrices (…, d, d), each a uniformly random orthogonal one times `gain`."""
    q, r = np.linalg.qr(rng.standard_normal(shape))
    return gain * q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[..., None, :]


def multiply(xp: Namespace, source: Array, count: int, matrix: Array, offset: Array | None) -> tuple[Array, ...]:
    """The `count` products of `source` (…, D) with matrices that stand side by side, each (…, D)."""
    shape, width = tuple(source.shape), int(source.shape[-1])
    rows = xp.reshape(source, (-1, width))
    if matrix.ndim == 2:
        made = rows @ matrix
    else:
        heads, inner, outer = matrix.shape
        split = xp.permute_dims(xp.reshape(rows, (-1, heads, inner)), (1, 0, 2)) @ matrix
        split = xp.reshape(split, (heads, -1, count, outer // count))
        made = xp.reshape(xp.permute_dims(split, (1, 2, 0, 3)), (-1, count * width))
    if offset is not None:
        made += offset
    return tuple(xp.reshape(made[:, k * width : (k + 1) * width], shape) for k in range(count))


def multiply_back(xp: Namespace, cotangents: list[Array], matrix: Array) -> Array:
    """The cotangent of `multiply`'s source from those of its products."""
    shape, width = tuple(cotangents[0].shape), int(cotangents[0].shape[-1])
    joined = [xp.reshape(c, (-1, width)) for c in cotangents]
    if matrix.ndim == 2:
        flat = joined[0] if len(joined) == 1 else xp.concat(joined, axis=1)
        return xp.reshape(flat @ xp.matrix_transpose(matrix), shape)
    heads = matrix.shape[0]
    flat = xp.concat([xp.reshape(c, (-1, heads, width // heads)) for c in joined], axis=2)
    back = xp.permute_dims(flat, (1, 0, 2)) @ xp.matrix_transpose(matrix)
    return xp.reshape(xp.permute_dims(back, (1, 0, 2)), shape)


def weight_cotangents(xp: Namespace, source: Array, cotangents: list[Array], matrix: Array) -> list[Array]:
    """The cotangents of `multiply`'s matrices, (D, D) or (H, D/H, D/H) each, summed over all rows."""
    width = int(source.shape[-1])
    rows = xp.reshape(source, (-1, width))
    if matrix.ndim == 2:
        return [xp.matrix_transpose(rows) @ xp.reshape(c, (-1, width)) for c in cotangents]
    heads, inner, _ = matrix.shape
    left = xp.permute_dims(xp.reshape(rows, (-1, heads, inner)), (1, 2, 0))
    return [left @ xp.permute_dims(xp.reshape(c, (-1, heads, inner)), (1, 0, 2)) for c in cotangents]
