"""CellOverTime: the loop over an nn.GRUCell, nn.LSTMCell or nn.RNNCell as one module, parallel in time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from pararnn.config import NewtonConfig
from pararnn.stats import NewtonStats
from pararnn_torch.compiled import ticket_for
from pararnn_torch.parallelize.weights import Orders, Weights, kind_of, run

NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
STEP_CELLS = (nn.GRUCell, nn.LSTMCell, nn.RNNCell)


class CellOverTime(nn.Module):
    """What a loop over the time axis with a torch.nn cell computes.

    ::

        h_t = cell(x_t, h_{t-1}),   t = 0 … T-1

    The parameters are the cell's own, by its names (``weight_ih``, …), so one ``state_dict`` fits both.

    Shapes:
        x (B, T, I) or (T, I); h0 as the cell takes it: (B, D), of an LSTM a pair (h, c) of those.

        Returns the outputs (B, T, D) and the last state as the cell gives it.

    Raises:
        TypeError: no such cell.

    >>> loop = CellOverTime(nn.GRUCell(3, 8))
    >>> y, h = loop(torch.zeros(4, 100, 3))
    >>> y.shape, h.shape
    (torch.Size([4, 100, 8]), torch.Size([4, 8]))
    """

    def __init__(self, cell: nn.Module, config: NewtonConfig | None = None) -> None:
        super().__init__()
        if type(cell) not in STEP_CELLS:
            raise TypeError(f"CellOverTime: wanted an nn.GRUCell, nn.LSTMCell or nn.RNNCell, got {type(cell).__name__}")
        assert isinstance(cell, STEP_CELLS)
        self.mode = cell.nonlinearity if isinstance(cell, nn.RNNCell) else ""
        self.mode = f"RNN_{self.mode.upper()}" if self.mode else "GRU" if isinstance(cell, nn.GRUCell) else "LSTM"
        self.input_size, self.hidden_size, self.bias = cell.input_size, cell.hidden_size, cell.bias
        self._kind = kind_of(self.mode, cell.input_size, cell.hidden_size)
        for name in NAMES:
            self.register_parameter(name, getattr(cell, name))
        self.config = NewtonConfig() if config is None else config
        self.last_stats: NewtonStats | None = None
        self.train(cell.training)
        self._ticket = ticket_for(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy listens for itself.
        self._ticket = ticket_for(self)

    def heard(self, stats: NewtonStats) -> None:
        """Keeps what a solve reports."""
        # The exponent would be computed from the states, and keep them alive until the next call.
        stats.lyapunov = math.nan
        self.last_stats = stats

    def forward(self, x: torch.Tensor, h0: Any = None) -> tuple[torch.Tensor, Any]:
        """The outputs and the last state."""
        if not isinstance(x, torch.Tensor) or x.dim() not in (2, 3) or not x.shape[-2]:
            got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(f"CellOverTime: x must be a tensor (B, T, I) or (T, I) with T ≥ 1, got {got}")
        lstm, whole = self.mode == "LSTM", x.dim() == 3
        starts = None
        if h0 is not None:
            starts = tuple(h0) if lstm and isinstance(h0, (tuple, list)) else (h0,)
            wanted = (x.shape[0], self.hidden_size) if whole else (self.hidden_size,)
            shapes = [tuple(s.shape) if isinstance(s, torch.Tensor) else type(s).__name__ for s in starts]
            if shapes != [wanted] * (2 if lstm else 1):
                pair = "a pair (h, c) of tensors" if lstm else "a tensor"
                raise ValueError(f"CellOverTime: h0 must be {pair} of shape {wanted}, got {shapes}")
            starts = starts if whole else tuple(s[None] for s in starts)
        orders = Orders(self.config, self._ticket)
        weights = Weights(self._kind, *(getattr(self, name) for name in NAMES))
        out, cells = run(weights, x if whole else x[None], starts, orders)
        if orders.reports:
            self.heard(orders.reports[-1])
        ends = tuple(s[:, -1] for s in ((out,) if cells is None else (out, cells)))
        if not whole:
            out, ends = out[0], tuple(e[0] for e in ends)
        return out, ends if lstm else ends[0]

    def extra_repr(self) -> str:
        return f"{self.mode}, {self.input_size}, {self.hidden_size}, bias={self.bias}"
