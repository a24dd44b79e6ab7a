"""ParaGRU: the gated recurrent unit with diagonal recurrent weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from pararnn.arrays import Array, Namespace
from pararnn.cells.base import ChannelwiseCell
from pararnn.cells.mixing import Mix, MixingCell, check_mix, orthogonal
from pararnn.functions import sigmoid


class ParaGRU(ChannelwiseCell):
    """Gated recurrent unit whose recurrent weights are one number per channel.

    ::

        z = σ(a_z h + z_x)    r = σ(a_r h + r_x)    n = tanh(a_n (r h) + n_x)
        h' = (1 - z) h + z n

    with (z_x, r_x, n_x) = W_x x + b. Here z opens for the *new* value, the reverse of torch.nn.GRU. One slot, diagonal
    Jacobian, |h| ≤ 1 once it is. Source: Cho et al. 2014 (arXiv 1406.1078), eqs. 5–8, with diagonal recurrent matrices
    as in ParaRNN (arXiv 2510.21450), appendix.

    Args:
        mix: 'diag' for the above; 'head' or 'dense' makes the recurrent weights matrices, one for each of ``n_heads``
            heads or one for all channels: see MixedGRU, which is then what comes back.
        others: as for ChannelwiseCell.

    Raises:
        ValueError: another mix, or n_heads that does not fit it.

    >>> import numpy as np, pararnn
    >>> cell = ParaGRU(4, 8, seed=0)
    >>> h = pararnn.newton_apply(cell, np.ones((2, 10, 4), dtype=np.float32))
    >>> h.shape
    (2, 10, 8)
    """

    slots = ("h",)
    gates = ("z", "r", "n")
    params = ("a_z", "a_r", "a_n")
    bounds = {"h": (-1.0, 1.0)}

    def __new__(cls, *sizes: Any, mix: str = "diag", n_heads: int | None = None, **keywords: Any) -> Any:
        check_mix(cls.__name__, mix, n_heads)
        if mix == "diag":
            return super().__new__(cls)
        return MixedGRU(*sizes, n_heads=n_heads, **keywords)

    def __init__(self, *sizes: Any, mix: str = "diag", n_heads: int | None = None, **keywords: Any) -> None:
        super().__init__(*sizes, **keywords)

    def step(self, xp: Any, h: Any, z: Any, r: Any, n: Any, a_z: Any, a_r: Any, a_n: Any) -> tuple[Any, ...]:
        z = sigmoid(xp, a_z * h + z)
        r = sigmoid(xp, a_r * h + r)
        n = xp.tanh(a_n * (r * h) + n)
        return ((1.0 - z) * h + z * n,)


class MixedGRU(MixingCell):
    """ParaGRU with recurrent matrices: what ``ParaGRU(mix='head' | 'dense')`` makes.

    ::

        z = σ(h A_z + z_x)    r = σ(h A_r + r_x)    n = tanh((r h) A_n + n_x)
        h' = (1 - z) h + z n

    per head, with A_z, A_r, A_n of shape (H, D/H, D/H), or (D, D) without heads, input axis first. The reset comes
    before its product, so a step takes two products one after the other. Source: Cho et al. 2014 (arXiv 1406.1078),
    eqs. 5–8.

    >>> from pararnn import ParaGRU
    >>> ParaGRU(4, 8, mix="dense", seed=0).A_z.shape
    (8, 8)
    """

    slots = ("h",)
    gates = ("z", "r", "n")
    products = {"A_z": ("z",), "A_r": ("r",), "A_n": ("n",)}
    bounds = {"h": (-1.0, 1.0)}

    def initial_arrays(self, rng: np.random.Generator, n_in: int, n_h: int) -> dict[str, np.ndarray]:
        """Matrices orthogonal with gain 0.25; W_x uniform in ±1/sqrt(I), bias 0."""
        heads, width = self.head_shape(n_h)
        made = ChannelwiseCell.initial_arrays(self, rng, n_in, n_h)
        return {name: orthogonal(rng, (*heads, width, width), 0.25) for name in self.products} | made

    def block(self, xp: Namespace, dtype: Any, name: str) -> Array:
        return self.clamped(xp, dtype, f"A_{name}")

    def matrix_gradients(self, xp: Namespace, blocks: dict[str, Array], offsets: dict[str, Array]) -> dict[str, Array]:
        return {f"A_{name}": block for name, block in blocks.items()}

    def step(self, xp: Any, mix: Mix, h: Any, z: Any, r: Any, n: Any) -> tuple[Any, ...]:
        z_h, r_h = mix(h, "z", "r")
        z = sigmoid(xp, z_h + z)
        r = sigmoid(xp, r_h + r)
        (n_h,) = mix(r * h, "n")
        return ((1.0 - z) * h + z * xp.tanh(n_h + n),)
