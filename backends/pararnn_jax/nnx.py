"""A recurrent layer as a Flax nnx module: a cell's arrays are its parameters."""

from __future__ import annotations

from typing import Any

from flax import nnx

from pararnn.arrays import Array
from pararnn.cells.base import ChannelwiseCell
from pararnn.config import NewtonConfig
from pararnn.newton import newton_apply


class RNN(nnx.Module):
    """What a cell makes of a sequence, as an nnx layer.

    ::

        y_t = hidden(h_t),   h = newton_apply(cell, x)

    Args:
        cell: a ChannelwiseCell of JAX arrays; each of its arrays becomes an ``nnx.Param`` of the layer, a dot in its
            name an underscore (``W_x_weight``).
        config: see NewtonConfig.

    Called with x (B, T, I) and maybe h0 (B, D) or (B, S, D) it gives (B, T, D), the slot that a layer passes on;
    ``states`` gives all slots.

    >>> import jax.numpy as jnp
    >>> from pararnn import ParaGRU
    >>> RNN(ParaGRU(3, 4, seed=0, xp=jnp))(jnp.ones((2, 5, 3))).shape
    (2, 5, 4)
    """

    def __init__(self, cell: ChannelwiseCell, config: NewtonConfig | None = None) -> None:
        self.names = tuple(cell.arrays)
        self.blank = cell._copy(cell.max_recurrent_norm, {})
        self.config = config
        for name, a in cell.arrays.items():
            setattr(self, name.replace(".", "_"), nnx.Param(a))

    @property
    def cell(self) -> ChannelwiseCell:
        """The cell with the parameters' present values."""
        values = {name: getattr(self, name.replace(".", "_"))[...] for name in self.names}
        return self.blank._copy(self.blank.max_recurrent_norm, values)

    def states(self, x: Array, h0: Array | None = None) -> Array:
        """(B, T, D), or (B, T, S, D) for S slots."""
        return newton_apply(self.cell, x, self.config, h0=h0)

    def __call__(self, x: Array, h0: Array | None = None) -> Any:
        states = self.states(x, h0)
        return states if self.blank.state_slots == 1 else states[:, :, self.blank.hidden_slot, :]
