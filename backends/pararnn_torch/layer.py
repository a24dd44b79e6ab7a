"""CellLayer: a cell's arrays as parameters of a module, and the cell made of them again for each forward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from pararnn.cells.base import ChannelwiseCell
from pararnn.config import NewtonConfig
from pararnn.decode import decode_step
from pararnn.drives import with_drives
from pararnn.linear_cells import solved_linearly
from pararnn.newton import newton_apply
from pararnn.registry import decoder_of
from pararnn.sequential import sequential_apply
from pararnn.stats import NewtonStats
from pararnn_torch.apply import apart, is_tracked
from pararnn_torch.compiled import SEQUENTIAL, compiled_solve, ticket_for
from pararnn_torch.drives import joined_drives


class InputProjection(nn.Module):
    """W_x and its bias. No nn.Linear, so that nothing that swaps the forward of linear layers believes it is used."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}"


class CellLayer(nn.Module):
    """One recurrent layer: (B, T, I) to its states (B, T, …).

    The parameters carry the names of the cell's arrays: ``W_x.weight``, ``W_x.bias``, ``a_z``, … ``cell`` is the
    frozen cell of their present values, whoever set them: an optimiser in place, ``functional_call``, a
    parametrization.
    """

    def __init__(self, cell: ChannelwiseCell) -> None:
        super().__init__()
        # Class, sizes and options; the arrays are parameters.
        self.kind = cell._copy(cell.max_recurrent_norm, {})
        self.names = tuple(cell.arrays)
        # What a solve sees once the drives are among the features.
        self.driven_kind = self.kind._copy(cell.max_recurrent_norm, {})
        self.driven_kind.__dict__["input_size"] = cell.d_in + len(cell.drives)
        made = {name: _parameter(a) for name, a in cell.arrays.items()}
        self.W_x = InputProjection(made.pop("W_x.weight"), made.pop("W_x.bias"))
        for name, parameter in made.items():
            self.register_parameter(name, parameter)
        self.last_stats: NewtonStats | None = None
        self._ticket = ticket_for(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy listens for itself.
        self._ticket = ticket_for(self)

    def arrays(self) -> dict[str, torch.Tensor]:
        """The present values, by the names of the cell's arrays."""
        return {name: getattr(*self._place(name)) for name in self.names}

    def _place(self, name: str) -> tuple[nn.Module, str]:
        """Where an array is kept: the module and its attribute."""
        return (self.W_x, name[4:]) if name.startswith("W_x.") else (self, name)

    @property
    def cell(self) -> ChannelwiseCell:
        """The cell with the present values of the parameters."""
        return self.kind._copy(self.kind.max_recurrent_norm, self.arrays())

    @property
    def dtype(self) -> torch.dtype:
        return self.W_x.weight.dtype

    def forward(
        self,
        x: torch.Tensor,
        h0: torch.Tensor | None = None,
        config: NewtonConfig | None = None,
        packing: Mapping[str, Any] = MappingProxyType({}),
        **drives: Any,
    ) -> torch.Tensor:
        """The states; in parallel with a configuration, as a time loop without one."""
        if torch.compiler.is_compiling():
            return self._compiled(x, h0, config, packing, drives)
        cell, x = with_drives("ParaRNN", self.cell, x, drives)
        stats = NewtonStats()
        if config is not None:
            states = newton_apply(cell, x, config, h0=h0, stats=stats, **packing)
        else:
            states = _time_loop(cell, x, h0, stats, packing)
        self.heard(stats)
        return states

    def passed_on(self, states: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What the next layer reads, from the states and this layer's input."""
        kind = self.kind
        if kind.family == "linear":
            rows = kind.d_h * (len(kind.gates) - 1)
            r = nn.functional.linear(x, self.W_x.weight[rows:], self.W_x.bias[rows:])
            return (states @ r.unflatten(-1, kind.state_shape[:2]).unsqueeze(-1)).flatten(-3)
        return states if kind.state_slots == 1 else states[:, :, kind.hidden_slot]

    def scan(
        self, x: torch.Tensor, h0: torch.Tensor | None, config: NewtonConfig | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and last state of a cell that is linear in its state, without the states between."""
        stats, cell = NewtonStats(), self.cell
        with apart(x.device):
            y, end = cell.scan_apply(x, h0, return_state=True, form="recurrent" if config is None else "auto")
        stats.fill(solved_linearly(x.dtype, int(x.shape[1])))
        self.heard(stats)
        return y, end

    def _compiled(
        self,
        x: torch.Tensor,
        h0: torch.Tensor | None,
        config: NewtonConfig | None,
        packing: Mapping[str, Any],
        drives: dict[str, Any],
    ) -> torch.Tensor:
        wanted = SEQUENTIAL if config is None else config
        arrays, x = joined_drives(self.kind, self.arrays(), x, drives)
        return compiled_solve(self.driven_kind, arrays, x, wanted, h0=h0, ticket=self._ticket, **packing)

    def heard(self, stats: NewtonStats) -> None:
        """Keeps what a solve reports."""
        # The exponent would be computed from the states, and keep them alive until the next call.
        stats.lyapunov = math.nan
        self.last_stats = stats

    def reset_parameters(self) -> None:
        """Fresh values from torch's random numbers."""
        fresh = initial_values(self.kind, self.kind.d_in, self.kind.d_h)
        with torch.no_grad():
            for name, old in self.arrays().items():
                value = torch.as_tensor(fresh[name]).to(old)
                if isinstance(old, nn.Parameter):
                    old.copy_(value)
                else:
                    # Behind a parametrization, which knows what to do with a value that is set.
                    setattr(*self._place(name), value)

    def extra_repr(self) -> str:
        kind = self.kind
        options = "".join(f", {name}={getattr(kind, name)}" for name in kind.options)
        return f"{type(kind).__name__}({kind.d_in}, {kind.d_h}, max_recurrent_norm={kind.max_recurrent_norm}{options})"


def _time_loop(
    cell: ChannelwiseCell, x: torch.Tensor, h0: torch.Tensor | None, stats: NewtonStats, packing: Mapping[str, Any]
) -> torch.Tensor:
    """The time loop: torch's own operations where autograd watches, else whatever the backend runs loops with."""
    if is_tracked(x, h0, *cell.arrays.values()):
        stats.fill(_EXACT)
        return sequential_apply(cell, x, h0, **packing)
    decoder = decoder_of(cell, x) if x.ndim == 3 and x.shape[1] == 1 and not packing else None
    if decoder is not None and (h0 is None or tuple(h0.shape) == (x.shape[0], *cell.state_shape)):
        state = x.new_zeros((x.shape[0], *cell.state_shape)) if h0 is None else h0
        stats.fill(replace(_EXACT, scan_backend=decoder.name, reason="one step, in the decode kernel"))
        return decode_step(cell, state, x).to(x.dtype)
    whole = NewtonConfig(segment_len=max(1, x.shape[1]) if x.ndim == 3 else None)
    return newton_apply(cell, x, whole, h0=h0, stats=stats, **packing)


# Of any number of steps.
_EXACT = NewtonStats.of_loop("torch", 0, "the time loop in torch's own operations, which autograd follows")


def _parameter(a: Any) -> nn.Parameter:
    """A parameter of the caller's is shared; any other tensor is copied, because a cell is a value."""
    return a if isinstance(a, nn.Parameter) else nn.Parameter(a.detach().clone(memory_format=torch.contiguous_format))


def initial_values(kind: ChannelwiseCell, d_in: int, d_h: int) -> dict[str, np.ndarray]:
    """The cell's own initialisation, drawn so that ``torch.manual_seed`` decides it."""
    seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    return kind.initial_arrays(np.random.default_rng(seed), d_in, d_h)
