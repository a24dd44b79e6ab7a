"""ParaRNN: recurrent layers as an nn.Module, trained in parallel over time and evaluated as a time loop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from array_api_compat import array_namespace
from torch import nn

from pararnn.arrays import namespace_name
from pararnn.cells.base import ChannelwiseCell
from pararnn.config import NewtonConfig
from pararnn.errors import AgreementError
from pararnn.packing import Packing, given_packing, make_packing
from pararnn.stats import NewtonStats
from pararnn.verify import AgreementReport, verify_layers
from pararnn_torch.apply import apart, autocasts
from pararnn_torch.layer import CellLayer, initial_values

# What the printed form leaves out.
_USUAL = {"solver": "auto", "batch_first": True, "hidden_layout": "paper", "dropout": 0.0, "return_hidden": False}
_SOLVERS = ("auto", "newton", "sequential")
_LAYOUTS = ("paper", "pytorch")


class ParaRNN(nn.Module):
    """A stack of recurrent layers.

    In training mode the layers are solved in parallel over time, in evaluation mode they run as a time loop; the
    results agree. Gradients reach the input, every parameter and ``h0``.

    Args:
        cell: a cell, whose arrays become parameters (converted if they are not tensors; copied unless they are
            parameters already), or a list of cells, one for each layer.
        num_layers: with one cell, how many layers; the ones above the first are fresh cells of its class and options
            that read the hidden state of the one below.
        config: how the layers are solved; see NewtonConfig.
        return_hidden: also return the last state.
        output_hidden: False returns all slots of the last layer's states, (B, T, S, D), instead of the hidden slot.
        solver: 'auto' follows training mode; 'newton' and 'sequential' are orders.
        batch_first: x and the output are (B, T, ·), else (T, B, ·).
        hidden_layout: 'paper' or 'pytorch', see Shapes.
        dropout: share of the hidden state dropped between layers while training.
        device, dtype: where the parameters live; as in the cell if None.

    Shapes:
        x (B, T, I); output (B, T, D). Per-step inputs of cells that have them are given by name, as ``dt`` (B, T) of
        ParaCfC, and reach every layer whose cell has them; time comes first in them where it does in x.

        'paper': h0 is a state of the layer, (B, D) or (B, S, D) with the slots in the cell's order; with several
        layers a list of states, one for each layer, where None stands for zeros. The returned hidden state is the
        last layer's.

        'pytorch': h0 and the returned hidden state have all layers, as torch.nn has them: (layers, B, D), and for
        cells of several slots a tuple of such tensors, the hidden slot first: (h, c) for ParaLSTM, (h, c, n, m) for
        ParaSLSTM.

    Attributes:
        layers: the layers; ``layers[k].cell`` is the frozen cell of the present parameters.
        last_stats: NewtonStats of the last forward; with several layers the worst of each field (and
            ``layers[k].last_stats`` for each).

    Raises:
        TypeError, ValueError: arguments, or input, that do not fit.

    >>> from pararnn import ParaGRU
    >>> rnn = ParaRNN(ParaGRU(3, 8, seed=0), num_layers=2)
    >>> y = rnn(torch.zeros(4, 100, 3))
    >>> y.shape, rnn.last_stats.converged
    (torch.Size([4, 100, 8]), True)
    >>> [name for name, _ in rnn.named_parameters()][:3]
    ['layers.0.a_z', 'layers.0.a_r', 'layers.0.a_n']
    """

    def __init__(
        self,
        cell: ChannelwiseCell | Sequence[ChannelwiseCell],
        *,
        num_layers: int = 1,
        config: NewtonConfig | None = None,
        return_hidden: bool = False,
        output_hidden: bool | None = None,
        solver: str = "auto",
        batch_first: bool = True,
        hidden_layout: str = "paper",
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if solver not in _SOLVERS:
            raise ValueError(f"ParaRNN: solver must be one of {_SOLVERS}, got {solver!r}")
        if hidden_layout not in _LAYOUTS:
            raise ValueError(f"ParaRNN: hidden_layout must be one of {_LAYOUTS}, got {hidden_layout!r}")
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0.0 <= dropout <= 1.0:
            raise ValueError(f"ParaRNN: dropout must be a number from 0 to 1, got {dropout!r}")
        if config is not None and not isinstance(config, NewtonConfig):
            raise TypeError(f"ParaRNN: config must be a NewtonConfig, got {type(config).__name__}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"ParaRNN: dtype must be a floating torch dtype, got {dtype!r}")
        cells = [_as_torch(c, device, dtype) for c in _cells(cell, num_layers)]
        while isinstance(cell, ChannelwiseCell) and len(cells) < num_layers:
            cells.append(_stacked(cells[0]))
        for below, above in zip(cells, cells[1:], strict=False):
            if above.d_in != below.d_h:
                raise ValueError(
                    f"ParaRNN: a layer of {above.d_in} input features cannot read one of {below.d_h} channels; "
                    "give each cell the width of the one before it"
                )
        if hidden_layout == "pytorch" and len({(c.slots, c.d_h) for c in cells}) > 1:
            raise ValueError("ParaRNN: hidden_layout='pytorch' stacks the layers' states, so all need the same shape")
        self.layers = nn.ModuleList([CellLayer(c) for c in cells])
        self.num_layers = len(cells)
        self.config = NewtonConfig() if config is None else config
        self.return_hidden, self.output_hidden = bool(return_hidden), output_hidden
        self.solver, self.batch_first, self.hidden_layout = solver, bool(batch_first), hidden_layout
        self.dropout = float(dropout)
        self._agreement_checked = False

    def _stack(self) -> list[CellLayer]:
        return cast(list[CellLayer], list(self.layers))

    @property
    def last_stats(self) -> NewtonStats | None:
        """Of the last forward; None before the first."""
        found = [layer.last_stats for layer in self._stack() if layer.last_stats is not None]
        return found[0] if len(found) == 1 else worst(found) if found else None

    def forward(
        self,
        x: torch.Tensor,
        h0: Any = None,
        cu_seqlens: Any = None,
        *,
        reset: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        **drives: Any,
    ) -> Any:
        """The output (B, T, D), or the output and the hidden state.

        ``cu_seqlens`` packs documents into x (1, T, I): each starts anew, h0 and the hidden state are the documents'
        (N in the place of B). ``reset`` (B, T) is true where an episode begins, ``mask`` false at padding; both are
        (T, B) without ``batch_first``. See pararnn.newton_apply.
        """
        x = self._input(x)
        starts = self._starts(h0)
        drives = self._drives(drives)
        packing = self._packing(x, cu_seqlens, reset, mask)
        parallel = self.solver == "newton" or (self.solver == "auto" and self.training)
        if parallel and self.config.verify_first_step:
            self._check_first(x, starts, {**packing, **drives})
        config = replace(self.config, verify_first_step=False) if parallel else None
        ends, y = [], x
        for k, (layer, start) in enumerate(zip(self._stack(), starts, strict=True)):
            own = {name: value for name, value in drives.items() if name in layer.kind.drives}
            whole = packing or (self.output_hidden is False and k + 1 == self.num_layers)
            if layer.kind.family == "linear" and not whole and not torch.compiler.is_compiling():
                y, end = layer.scan(y, start, config)
                ends.append(end)
            else:
                states = layer(y, start, config, packing, **own)
                if self.return_hidden:
                    ends.append(_ends(states, packing.get("cu_seqlens"), start))
                y = layer.passed_on(states, y)
            if self.dropout and self.training and k + 1 < self.num_layers:
                y = nn.functional.dropout(y, self.dropout)
        out = states if self.output_hidden is False else y
        if not self.batch_first:
            out = out.transpose(0, 1)
        return (out, self._outgoing(ends)) if self.return_hidden else out

    def _packing(self, x: torch.Tensor, cu_seqlens: Any, reset: Any, mask: Any) -> dict[str, Any]:
        """What a layer is told of packing; checked and brought to the device once for all layers."""
        if not self.batch_first:
            reset, mask = (m.transpose(0, 1) if isinstance(m, torch.Tensor) else m for m in (reset, mask))
        if torch.compiler.is_compiling() or (cu_seqlens is None and reset is None and mask is None):
            return given_packing(cu_seqlens=cu_seqlens, reset=reset, mask=mask)
        return {"cu_seqlens": make_packing("ParaRNN", array_namespace(x), x, cu_seqlens, reset, mask)}

    def _input(self, x: Any) -> torch.Tensor:
        """x as (B, T, I) in the module's dtype, or a refusal."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"ParaRNN: x must be a torch tensor, got {type(x).__name__}")
        if x.ndim != 3:
            axes = "(B, T, I)" if self.batch_first else "(T, B, I)"
            raise ValueError(f"ParaRNN: x must have 3 axes {axes}, got shape {tuple(x.shape)}")
        first = self._stack()[0]
        if x.shape[2] != first.kind.d_in:
            raise ValueError(f"ParaRNN: the first layer takes {first.kind.d_in} features, got shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"ParaRNN: x must be floating, got {x.dtype}; cast or embed it first")
        if x.dtype != first.dtype:
            # The module's dtype rules (P41): what autocast made of the input is undone, anything else is a mistake.
            if not autocasts(x.device):
                raise TypeError(f"ParaRNN: x is {x.dtype} but the module is {first.dtype}; use module.to(x.dtype)")
            x = x.to(first.dtype)
        return x if self.batch_first else x.transpose(0, 1)

    def _drives(self, given: dict[str, Any]) -> dict[str, Any]:
        """Per-step inputs, each for all layers that take it, batch first; refused if none does."""
        for name in given:
            if not any(name in layer.kind.drives for layer in self._stack()):
                raise TypeError(f"ParaRNN: no layer takes a per-step input {name!r}")
        if self.batch_first:
            return given
        timed = {name for name, value in given.items() if isinstance(value, torch.Tensor) and value.ndim == 2}
        return {name: value.T if name in timed else value for name, value in given.items()}

    def _starts(self, h0: Any) -> list[torch.Tensor | None]:
        """A starting state in the cell's own layout for each layer."""
        if h0 is None:
            return [None] * self.num_layers
        if not isinstance(h0, (torch.Tensor, list, tuple)):
            raise TypeError(f"ParaRNN: h0 must be a tensor, or a list or tuple of tensors, got {type(h0).__name__}")
        starts = self._from_pytorch(h0) if self.hidden_layout == "pytorch" else self._from_paper(h0)
        if starts is None:
            raise ValueError(f"ParaRNN: h0 must be {self._wanted_h0()}, got {_shapes(h0)}")
        return starts

    def _from_paper(self, h0: Any) -> list[torch.Tensor | None] | None:
        axes = 1 + len(self._stack()[0].kind.state_shape)
        if isinstance(h0, torch.Tensor):
            if self.num_layers == 1 and h0.ndim == axes:
                return [h0]
            return list(h0.unbind(0)) if h0.ndim == axes + 1 and h0.shape[0] == self.num_layers else None
        fits = len(h0) == self.num_layers and all(s is None or isinstance(s, torch.Tensor) for s in h0)
        return list(h0) if fits else None

    def _from_pytorch(self, h0: Any) -> list[torch.Tensor | None] | None:
        kind = self._stack()[0].kind
        parts = [h0] if isinstance(h0, torch.Tensor) else h0
        axes = {p.ndim if isinstance(p, torch.Tensor) and p.shape[0:1] == (self.num_layers,) else 0 for p in parts}
        if len(parts) != kind.state_slots or axes != {3}:
            return None
        if kind.state_slots == 1:
            return list(parts[0].unbind(0))
        by_slot = dict(zip(_hidden_first(kind), parts, strict=True))
        return list(torch.stack([by_slot[s] for s in range(kind.state_slots)], dim=2).unbind(0))

    def _wanted_h0(self) -> str:
        kind = self._stack()[0].kind
        if self.hidden_layout == "pytorch":
            one = f"({self.num_layers}, B, {kind.d_h})"
            names = ", ".join(kind.slots[s] for s in _hidden_first(kind))
            return f"a tensor {one}" if kind.state_slots == 1 else f"a tuple ({names}) of tensors {one}"
        state = f"({', '.join(['B', *map(str, kind.state_shape)])})"
        return f"a tensor {state}" if self.num_layers == 1 else f"a list of {self.num_layers} states {state} or None"

    def _outgoing(self, ends: list[torch.Tensor]) -> Any:
        if self.hidden_layout == "paper":
            return ends[-1]
        kind = self._stack()[0].kind
        if kind.state_slots == 1:
            return torch.stack(ends)
        whole = torch.stack(ends)
        return tuple(whole[:, :, s] for s in _hidden_first(kind))

    def _check_first(self, x: torch.Tensor, starts: list[torch.Tensor | None], told: dict[str, Any]) -> None:
        """Once, the whole stack both ways; AgreementError where they differ (P03)."""
        if self._agreement_checked or torch.compiler.is_compiling():
            return
        report = self._verify(x, self.config, starts, **told)
        if not report.ok:
            raise AgreementError(f"ParaRNN, first parallel forward: {report}", report)
        self._agreement_checked = True

    def _verify(
        self, x: torch.Tensor, config: NewtonConfig, starts: list[torch.Tensor | None], **options: Any
    ) -> AgreementReport:
        plain = replace(config, verify_first_step=False)
        with torch.no_grad(), apart(x.device):
            return verify_layers([layer.cell for layer in self._stack()], x, plain, starts, **options)

    def verify_agreement(
        self,
        x: torch.Tensor,
        *,
        config: NewtonConfig | None = None,
        h0: Any = None,
        cu_seqlens: Any = None,
        reset: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        **options: Any,
    ) -> AgreementReport:
        """What :func:`pararnn.verify_agreement` does with a ParaRNN: all layers, in parallel and as time loops.

        Uses the module's own configuration unless one is given; ``h0`` and the packing as for forward.
        """
        wanted, x = self.config if config is None else config, self._input(x)
        packing = self._packing(x, cu_seqlens, reset, mask)
        return self._verify(x, wanted, self._starts(h0), **packing, **options)

    def reset_agreement_check(self) -> None:
        """Has ``verify_first_step`` check the next parallel forward again."""
        self._agreement_checked = False

    def reset_parameters(self) -> None:
        """Fresh parameters, drawn from torch's random numbers."""
        for layer in self._stack():
            layer.reset_parameters()

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={getattr(self, k)!r}" for k, usual in _USUAL.items() if getattr(self, k) != usual)


def _ends(states: torch.Tensor, cu_seqlens: Any, start: torch.Tensor | None) -> torch.Tensor:
    """Final states by sequence or document, in operations that a compiler may trace."""
    offsets = cu_seqlens.offsets if isinstance(cu_seqlens, Packing) else cu_seqlens
    count = states.shape[0] if offsets is None else len(offsets) - 1
    empty = states.new_zeros((count, *states.shape[2:])) if start is None else start.to(states.dtype)
    if not states.shape[1]:
        return empty
    if offsets is None:
        return states[:, -1]
    offsets = torch.as_tensor(offsets, device=states.device)
    begin, end = offsets[:-1], offsets[1:]
    last = states[0].index_select(0, (end - 1).clamp_min(0))
    return torch.where((end > begin).reshape(-1, *(1,) * (states.ndim - 2)), last, empty)


def _cells(cell: Any, num_layers: int) -> list[ChannelwiseCell]:
    """The cells that were given, each checked."""
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f"ParaRNN: num_layers must be a whole number of at least 1, got {num_layers!r}")
    given = [cell] if isinstance(cell, ChannelwiseCell) else cell
    if not isinstance(given, (list, tuple)) or not all(isinstance(c, ChannelwiseCell) for c in given):
        raise TypeError(f"ParaRNN: wanted a cell or a list of cells (ParaGRU, ParaLSTM, …), got {type(cell).__name__}")
    if not given:
        raise ValueError("ParaRNN: the list of cells is empty")
    if given is cell and num_layers not in (1, len(given)):
        raise ValueError(f"ParaRNN: num_layers={num_layers} contradicts a list of {len(given)} cells; leave it out")
    return list(given)


def _as_torch(cell: ChannelwiseCell, device: Any, dtype: torch.dtype | None) -> ChannelwiseCell:
    if namespace_name(cell.xp) == "torch":
        return cell if device is None and dtype is None else cell.to(device=device, dtype=dtype)
    return cell.to(torch, device, dtype)


def _stacked(cell: ChannelwiseCell) -> ChannelwiseCell:
    """A fresh cell of the same class and options that reads a layer of its own width."""
    weight = cell.W_x.weight
    values = initial_values(cell, cell.d_h, cell.d_h)
    arrays = {name: torch.as_tensor(values[name]).to(weight.device, weight.dtype) for name in cell.arrays}
    new = cell._copy(cell.max_recurrent_norm, arrays)
    new._set(cell.d_h, cell.d_h, cell.max_recurrent_norm, arrays)
    return new


def _hidden_first(kind: ChannelwiseCell) -> list[int]:
    """The slots in torch.nn's order: what a layer passes on, then what it keeps to itself."""
    first = kind.hidden_slot
    return [first, *(s for s in range(kind.state_slots) if s != first)]


def _shapes(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {', '.join(_shapes(v) for v in value) or 'nothing'}"
    return type(value).__name__


def worst(stats: list[NewtonStats]) -> NewtonStats:
    """One report for several layers: of each number the one to worry about."""
    return replace(
        stats[-1],
        max_residual=_largest(s.max_residual for s in stats),
        iters=max(s.iters for s in stats),
        picard_iters=max(s.picard_iters for s in stats),
        windows=max(s.windows for s in stats),
        passes=max(s.passes for s in stats),
        walked=max(s.walked for s in stats),
        agreement_estimate=_largest(s.agreement_estimate for s in stats),
        exact=all(s.exact for s in stats),
        converged=all(s.converged for s in stats),
    )


def _largest(values: Iterable[float]) -> float:
    """The largest, or NaN if there is one."""
    listed = list(values)
    return math.nan if any(math.isnan(v) for v in listed) else max(listed)
