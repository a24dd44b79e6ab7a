"""A recurrent layer as an Equinox module: the cell is a pytree already, so it is simply a field."""

from __future__ import annotations

from typing import Any

import equinox

from pararnn.arrays import Array
from pararnn.cells.base import ChannelwiseCell
from pararnn.config import NewtonConfig
from pararnn.newton import newton_apply


class RNN(equinox.Module):
    """What a cell makes of a sequence, as an Equinox layer.

    ::

        y_t = hidden(h_t),   h = newton_apply(cell, x)

    Called with x (B, T, I) and maybe h0 (B, D) or (B, S, D) it gives (B, T, D), the slot that a layer passes on;
    ``states`` gives all slots. Cells and configurations are as in newton_apply.

    >>> import jax.numpy as jnp
    >>> from pararnn import ParaGRU
    >>> RNN(ParaGRU(3, 4, seed=0, xp=jnp))(jnp.ones((2, 5, 3))).shape
    (2, 5, 4)
    """

    cell: ChannelwiseCell
    config: NewtonConfig | None = equinox.field(static=True, default=None)

    def states(self, x: Array, h0: Array | None = None) -> Array:
        """(B, T, D), or (B, T, S, D) for S slots."""
        return newton_apply(self.cell, x, self.config, h0=h0)

    def __call__(self, x: Array, h0: Array | None = None) -> Any:
        states = self.states(x, h0)
        return states if self.cell.state_slots == 1 else states[:, :, self.cell.hidden_slot, :]
