"""torch.nn's recurrent weights as the arrays of a stock cell, and one solve with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pararnn.cells.mixing import MixingCell
from pararnn.cells.stock import StockGRU, StockLSTM, StockRNN
from pararnn.config import NewtonConfig
from pararnn.newton import newton_apply
from pararnn.stats import NewtonStats
from pararnn_torch.compiled import compiled_solve

# By the mode that torch.nn gives its modules.
_KINDS: dict[str, tuple[type[MixingCell], dict[str, Any]]] = {
    "GRU": (StockGRU, {}),
    "LSTM": (StockLSTM, {}),
    "RNN_TANH": (StockRNN, {"nonlinearity": "tanh"}),
    "RNN_RELU": (StockRNN, {"nonlinearity": "relu"}),
}


def kind_of(mode: str, input_size: int, hidden_size: int) -> MixingCell:
    """The stock cell of that mode and size, without arrays. Made beforehand, because no compiler follows the making."""
    kind, options = _KINDS[mode]
    cell = kind(1, 1, **options)
    blank = cell._copy(cell.max_recurrent_norm, {})
    blank._set(input_size, hidden_size, cell.max_recurrent_norm, {})
    assert isinstance(blank, MixingCell)
    return blank


@dataclass(frozen=True, eq=False)
class Weights:
    """What torch.nn keeps for one layer and direction; the biases are None with bias=False, ``hr`` without projection.

    ih (G·D, I), hh (G·D, D or P), b_ih and b_hh (G·D,), hr (P, D). ``kind`` is the stock cell without arrays.
    """

    kind: MixingCell
    ih: torch.Tensor
    hh: torch.Tensor
    b_ih: torch.Tensor | None = None
    b_hh: torch.Tensor | None = None
    hr: torch.Tensor | None = None

    def arrays(self) -> dict[str, torch.Tensor]:
        """The arrays of the stock cell.

        A projection h = W_hr u is taken into the recurrent matrix: R h = (R W_hr) u, so that the cell's state is u.
        """
        bias = self.ih.new_zeros(self.ih.shape[0]) if self.b_ih is None else self.b_ih
        made = {"W_x.weight": self.ih, "W_x.bias": bias, "R": self.hh if self.hr is None else self.hh @ self.hr}
        return made if self.b_hh is None else {**made, "b_h": self.b_hh}

    def first_lstm_step(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(c, u) after one step on x (B, I) from a projected h (B, P), of which no u is known."""
        gates = torch.nn.functional.linear(x, self.ih, self.b_ih) + torch.nn.functional.linear(h, self.hh, self.b_hh)
        i, f, g, o = gates.chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return c, o.sigmoid() * c.tanh()


@dataclass(frozen=True, eq=False)
class Orders:
    """How a module has its layers solved: its configuration, its ticket in compiled graphs, and a list for reports."""

    config: NewtonConfig
    ticket: str
    reports: list[NewtonStats] = field(default_factory=list)


def solve(weights: Weights, x: torch.Tensor, h0: torch.Tensor | None, orders: Orders) -> torch.Tensor:
    """The states (B, T, D) or, of an LSTM, (B, T, 2, D) with c before h."""
    arrays, kind = weights.arrays(), weights.kind
    if torch.compiler.is_compiling():
        return compiled_solve(kind, arrays, x, orders.config, h0=h0, ticket=orders.ticket)
    orders.reports.append(NewtonStats())
    cell = kind._copy(kind.max_recurrent_norm, arrays)
    return newton_apply(cell, x, orders.config, h0=h0, stats=orders.reports[-1])


def run(
    weights: Weights, x: torch.Tensor, start: tuple[torch.Tensor, ...] | None, orders: Orders
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The outputs (B, T, D or P) and the cell states (B, T, D) of an LSTM, from (h,) or (h, c) or zeros."""
    if weights.kind.state_slots == 1:
        return solve(weights, x, None if start is None else start[0], orders), None
    if start is None or weights.hr is None:
        h0 = None if start is None else torch.stack((start[1], start[0]), dim=1)
        states = solve(weights, x, h0, orders)
    else:
        first = torch.stack(weights.first_lstm_step(x[:, 0], *start), dim=1)
        states = torch.cat((first[:, None], solve(weights, x[:, 1:], first, orders)), dim=1)
    out = states[:, :, 1]
    if weights.hr is not None:
        out = torch.nn.functional.linear(out, weights.hr)
    return out, states[:, :, 0]
