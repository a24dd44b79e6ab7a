"""ParallelGRU, ParallelLSTM, ParallelRNN: torch.nn's layers with their own weights and a forward parallel in time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from pararnn.cells.mixing import MixingCell
from pararnn.config import NewtonConfig
from pararnn.stats import NewtonStats
from pararnn_torch.apply import apart, autocasts, is_tracked
from pararnn_torch.compiled import ticket_for
from pararnn_torch.parallelize.native import NativeChoice
from pararnn_torch.parallelize.packed import Lengths
from pararnn_torch.parallelize.weights import Orders, Weights, kind_of, run
from pararnn_torch.rnn import worst

Starts = tuple[torch.Tensor, ...]


class ParallelLayers(nn.RNNBase):
    """The forward of a torch.nn recurrent module, parallel in time.

    Everything else is the torch.nn class's: parameters, their names, ``state_dict``, initialisation, printing.

    Attributes:
        config: how the layers are solved; see NewtonConfig.
        last_stats: NewtonStats of the last forward, of each number the one to worry about among all layers and
            directions; None before the first.
    """

    config: NewtonConfig
    _reports: list[NewtonStats]
    # The stock cells of the first layer and of those above it.
    _kinds: tuple[MixingCell, MixingCell]
    _ticket: str

    def __init__(self, *args: Any, config: NewtonConfig | None = None, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._set_up(NewtonConfig() if config is None else config)

    @classmethod
    def sharing(cls, module: nn.RNNBase, config: NewtonConfig) -> ParallelLayers:
        """The module with this forward: its very parameters, its hooks, its mode."""
        new = cls.__new__(cls)
        # One level deep, so that what is registered, replaced or switched on one module leaves the other alone.
        new.__dict__.update({name: _own(value) for name, value in module.__dict__.items()})
        new._set_up(config)
        return new

    def _set_up(self, config: NewtonConfig) -> None:
        self.config, self._reports = config, []
        above = (self.proj_size or self.hidden_size) * (2 if self.bidirectional else 1)
        first, upper = (kind_of(self.mode, features, self.hidden_size) for features in (self.input_size, above))
        self._kinds = (first, upper)
        self._ticket = ticket_for(self)
        self._choice = NativeChoice()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy listens for itself.
        self._ticket = ticket_for(self)

    @property
    def last_stats(self) -> NewtonStats | None:
        """Of the last forward; None before the first."""
        # When somebody asks, and not before: reading numbers may have to wait for a device.
        found = self._reports
        return found[0] if len(found) == 1 else worst(found) if found else None

    def heard(self, stats: NewtonStats) -> None:
        """Keeps what a solve reports."""
        self._keep([stats])

    def _keep(self, reports: list[NewtonStats]) -> None:
        for stats in reports:
            # The exponent would be computed from the states, and keep them alive until the next call.
            stats.lyapunov = math.nan
        self._reports = reports

    def forward(self, input: Any, hx: Any = None) -> Any:  # type: ignore[override]
        """As torch.nn's: the output and the last state, of a tensor (T, B, I), (B, T, I), (T, I) or a PackedSequence.

        Raises:
            TypeError, ValueError, RuntimeError: what torch.nn refuses.
        """
        if isinstance(input, PackedSequence):
            return self._packed(input, hx)
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"{self._name}: input must be a tensor or a PackedSequence, got {type(input).__name__}")
        if input.dim() not in (2, 3):
            raise ValueError(f"{self._name}: input must have 2 axes (T, I) or 3, got shape {tuple(input.shape)}")
        starts = self._starts(hx)
        if input.dim() == 3:
            time_axis, batch_axis = (1, 0) if self.batch_first else (0, 1)
            x = input if self.batch_first else input.transpose(0, 1)
            wanted = 3
        else:
            time_axis, batch_axis = 0, None
            x, wanted = input[None], 2
        if starts is not None:
            if any(s.dim() != wanted for s in starts):
                got = ", ".join(str(tuple(s.shape)) for s in starts)
                raise RuntimeError(
                    f"{self._name}: for an input of {input.dim()} axes hx must have {wanted} axes, got {got}"
                )
            starts = starts if batch_axis is not None else tuple(s[:, None] for s in starts)
        if not input.shape[time_axis]:
            raise RuntimeError(f"{self._name}: the sequence must have at least one step, got {tuple(input.shape)}")
        self._check(x, starts)
        if why := self._why_native(x, starts):
            return self._native(why, x.shape[1], input, hx)
        out, ends = self._run(x, starts, None)
        if batch_axis is None:
            return out[0], self._outgoing(tuple(e[:, 0] for e in ends))
        if not self.batch_first:
            # Contiguous like torch.nn's, because callers take views of it.
            out = out.transpose(0, 1).contiguous()
        return out, self._outgoing(ends)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _packed(self, input: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
        data, batch_sizes, order, back = input
        lengths = Lengths(batch_sizes, data.device)
        starts = self._starts(hx)
        if starts is not None and order is not None:
            starts = tuple(s.index_select(1, order) for s in starts)
        x = lengths.padded(data)
        self._check(x, starts)
        if why := self._why_native(x, starts):
            return self._native(why, x.shape[1], input, hx)
        out, ends = self._run(x, starts, lengths)
        if back is not None:
            ends = tuple(e.index_select(1, back) for e in ends)
        return PackedSequence(lengths.packed(out), batch_sizes, order, back), self._outgoing(ends)

    def _starts(self, hx: Any) -> Starts | None:
        """The starting states, (h,) or (h, c)."""
        if hx is None:
            return None
        lstm = self.mode == "LSTM"
        starts = tuple(hx) if lstm and isinstance(hx, (tuple, list)) else (hx,)
        if len(starts) != (2 if lstm else 1) or not all(isinstance(s, torch.Tensor) for s in starts):
            wanted = "a pair of tensors (h_0, c_0)" if lstm else "a tensor h_0"
            raise TypeError(f"{self._name}: hx must be {wanted}, got {type(hx).__name__}")
        return starts

    def _outgoing(self, ends: Starts) -> Any:
        return ends if self.mode == "LSTM" else ends[0]

    def _check(self, x: torch.Tensor, starts: Starts | None) -> None:
        """Sizes and dtypes, before any work."""
        dtype = self._weights(0, False).ih.dtype
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"{self._name}: input is {x.dtype} but the weights are {dtype}; cast one of them")
        if x.shape[2] != self.input_size:
            raise RuntimeError(
                f"{self._name}: the last axis of input must be input_size={self.input_size}, got {x.shape[2]}"
            )
        directions = 2 if self.bidirectional else 1
        sizes = (self.proj_size or self.hidden_size, self.hidden_size)
        for label, start, size in zip(("h_0", "c_0"), starts or (), sizes, strict=False):
            wanted = (self.num_layers * directions, x.shape[0], size)
            if tuple(start.shape) != wanted:
                raise RuntimeError(f"{self._name}: {label} must have shape {wanted}, got {tuple(start.shape)}")
            if start.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
                raise ValueError(f"{self._name}: {label} is {start.dtype} but input is {x.dtype}; cast one of them")

    def _weights(self, layer: int, backward: bool) -> Weights:
        """The present values, whoever set them: an optimiser, functional_call, a parametrization."""
        end = f"_l{layer}{'_reverse' if backward else ''}"
        return Weights(
            self._kinds[1 if layer else 0],
            getattr(self, f"weight_ih{end}"),
            getattr(self, f"weight_hh{end}"),
            getattr(self, f"bias_ih{end}") if self.bias else None,
            getattr(self, f"bias_hh{end}") if self.bias else None,
            getattr(self, f"weight_hr{end}") if self.proj_size else None,
        )

    def _why_native(self, x: torch.Tensor, starts: Starts | None) -> str | None:
        """The reason to leave this forward to torch.nn's own loop, or None."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return None
        tracked = is_tracked(x, *(starts or ()), *self.parameters())
        return self._choice.why_native(self.mode, self._weights(0, False), x.shape[:2], self.config, tracked)

    def _native(self, why: str, time: int, input: Any, hx: Any) -> Any:
        """torch.nn's own forward, like ours in the dtype of the weights whatever autocast says."""
        weight = self._weights(0, False).ih
        self.heard(NewtonStats.of_loop("torch.nn", time, why))
        if autocasts(weight.device):
            input, hx = input.to(weight.dtype), _cast(hx, weight.dtype)
        with apart(weight.device):
            return super().forward(input, hx)

    def _run(self, x: torch.Tensor, starts: Starts | None, lengths: Lengths | None) -> tuple[torch.Tensor, Starts]:
        """The output (B, T, ·) on x (B, T, I), and the last states, each (layers·directions, B, ·)."""
        orders = Orders(self.config, self._ticket)
        ends: list[Starts] = []
        for layer in range(self.num_layers):
            sides = []
            for backward in (False, True) if self.bidirectional else (False,):
                start = None if starts is None else tuple(s[len(ends)] for s in starts)
                y, end = self._direction(self._weights(layer, backward), backward, x, start, lengths, orders)
                sides.append(y)
                ends.append(end)
            x = sides[0] if len(sides) == 1 else torch.cat(sides, dim=2)
            if self.dropout and self.training and layer + 1 < self.num_layers:
                x = self._dropped(x, lengths)
        if orders.reports:
            # Compiled solves report by themselves, one by one.
            self._keep(orders.reports)
            if x.device.type == "cpu" and any(stats.walked == 1.0 for stats in orders.reports):
                self._choice.rest()
        return x, tuple(torch.stack(each) for each in zip(*ends, strict=True))

    def _direction(
        self,
        weights: Weights,
        backward: bool,
        x: torch.Tensor,
        start: Starts | None,
        lengths: Lengths | None,
        orders: Orders,
    ) -> tuple[torch.Tensor, Starts]:
        """One layer in one direction: its outputs in order of time, and its last state."""
        if backward:
            x = x.flip(1) if lengths is None else lengths.flipped(x)
        if lengths is not None and self.mode == "RNN_RELU":
            out, end = self._each_length(weights, x, start, lengths, orders)
        else:
            out, cells = run(weights, x, start, orders)
            whole = (out,) if cells is None else (out, cells)
            end = tuple(s[:, -1] if lengths is None else lengths.ends(s) for s in whole)
        if backward:
            out = out.flip(1) if lengths is None else lengths.flipped(out)
        return out, end

    def _each_length(
        self, weights: Weights, x: torch.Tensor, start: Starts | None, lengths: Lengths, orders: Orders
    ) -> tuple[torch.Tensor, Starts]:
        """Sequences of one length at a time: an unbounded state could overflow in padding, and its gradient be NaN."""
        outs, ends = [], []
        for first, stop, length in lengths.runs():
            part = None if start is None else (start[0][first:stop],)
            out, _ = run(weights, x[first:stop, :length], part, orders)
            outs.append(nn.functional.pad(out, (0, 0, 0, lengths.longest - length)))
            ends.append(out[:, -1])
        return torch.cat(outs), (torch.cat(ends),)

    def _dropped(self, y: torch.Tensor, lengths: Lengths | None) -> torch.Tensor:
        """Dropout over the entries in torch.nn's order, so that on the CPU one seed drops what torch.nn would drop."""
        if lengths is not None:
            return lengths.padded(nn.functional.dropout(lengths.packed(y), self.dropout))
        in_time = y.transpose(0, 1).contiguous()
        return nn.functional.dropout(in_time, self.dropout).transpose(0, 1)


class ParallelGRU(ParallelLayers, nn.GRU):
    """torch.nn.GRU, parallel in time; made by :func:`pararnn.parallelize`."""


class ParallelLSTM(ParallelLayers, nn.LSTM):
    """torch.nn.LSTM with or without projections, parallel in time; made by :func:`pararnn.parallelize`."""


class ParallelRNN(ParallelLayers, nn.RNN):
    """torch.nn.RNN with tanh or relu, parallel in time; made by :func:`pararnn.parallelize`."""


PARALLEL: dict[type, type[ParallelLayers]] = {nn.GRU: ParallelGRU, nn.LSTM: ParallelLSTM, nn.RNN: ParallelRNN}


def parallel_layers(module: nn.RNNBase, config: NewtonConfig) -> ParallelLayers:
    """The module's parallel twin; one that is a twin already gets the new configuration."""
    kind = type(module) if isinstance(module, ParallelLayers) else PARALLEL[type(module)]
    return kind.sharing(module, config)


def _cast(hx: Any, dtype: torch.dtype) -> Any:
    return hx.to(dtype) if isinstance(hx, torch.Tensor) else hx and tuple(h.to(dtype) for h in hx)


def _own(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, list, set)) else value
