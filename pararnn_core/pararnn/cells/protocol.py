"""RNNCell: what the solvers require of a cell, as a protocol, and a check that says what is missing."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from pararnn.arrays import quiet, resolve_namespace
from pararnn.cells.base import ChannelwiseCell


@runtime_checkable
class RNNCell(Protocol):
    """A recurrent cell: its width ``d_h``, its state's shape, and one ``step``.

    >>> from pararnn import ParaGRU
    >>> isinstance(ParaGRU(2, 3), RNNCell)
    True
    """

    @property
    def d_h(self) -> int: ...

    @property
    def state_shape(self) -> tuple[int, ...]: ...

    def step(self, xp: Any, *operands: Any) -> tuple[Any, ...]: ...


def check_cell(cell: Any) -> None:
    """Raises TypeError with the reason if `cell` cannot be solved.

    Traces the step, compares the traced program with the step itself on random numbers, and checks that declared
    bounds hold.

    >>> from pararnn import ParaGRU
    >>> check_cell(ParaGRU(2, 3))
    """
    from pararnn.graph import Program, compile_array
    from pararnn.programs import StepPrograms

    if not isinstance(cell, ChannelwiseCell):
        missing = [n for n in ("slots", "gates", "params", "step", "arrays") if not hasattr(cell, n)]
        raise TypeError(
            f"check_cell: {type(cell).__name__} is not a ChannelwiseCell"
            + (f" (it lacks {', '.join(missing)})" if missing else "")
            + "; derive from pararnn.ChannelwiseCell and write its step"
        )
    if cell.family == "mixing":
        from pararnn.mixing.check import check_mixing_cell

        check_mixing_cell(cell)
        return
    if len(set(cell.operand_names)) != len(cell.operand_names):
        raise TypeError(f"check_cell: slots, gates and params share a name in {cell.operand_names}")
    if tuple(cell.drives) != tuple(cell.gates[len(cell.gates) - len(cell.drives) :]):
        raise TypeError(f"check_cell: the drives {tuple(cell.drives)} must be the last of the gates {cell.gates}")
    if cell.hidden not in cell.slots:
        raise TypeError(
            f"check_cell: hidden={cell.hidden!r} is not one of the slots {cell.slots}; set hidden to the slot that a "
            "layer passes on"
        )
    programs = StepPrograms(cell)
    traced = compile_array(Program([*programs.prev_names, *programs.gate_names, *programs.param_names], programs.new))
    # The step is the same line in every library, so NumPy stands for all of them.
    xp = resolve_namespace(None)
    rng = np.random.default_rng(0)
    operands = [0.4 + 0.5 * rng.random(7) for _ in cell.operand_names]
    direct = cell.step(xp, *operands)
    for name, a, b in zip(cell.slots, direct, traced(xp, *operands), strict=True):
        if tuple(a.shape) != (7,):
            raise TypeError(f"check_cell: slot {name} came back with shape {tuple(a.shape)} for operands of shape (7,)")
        if not np.all(np.abs(a - b) <= 1e-12 * (1.0 + np.abs(a))):
            raise TypeError(
                f"check_cell: slot {name} of the traced step differs from the step itself; a step must not depend on "
                "anything but its operands and the names in `options`"
            )
    _check_bounds(cell, rng)


def _check_bounds(cell: ChannelwiseCell, rng: np.random.Generator) -> None:
    """A slot that starts inside its declared interval must stay there, whatever the other operands are."""
    xp, count = resolve_namespace(None), 1000
    if unknown := set(cell.bounds) - set(cell.slots):
        raise TypeError(f"check_cell: bounds name {sorted(unknown)}, which are not among the slots {cell.slots}")
    slots = []
    for name in cell.slots:
        low, high = cell.bounds.get(name, (-3.0, 3.0))
        slots.append(rng.uniform(low, high, count))
    cap = cell.max_recurrent_norm
    gates = [3.0 * rng.standard_normal(count) for _ in cell.gates]
    # What is given step by step is a duration or the like, which a cell may refuse below zero.
    gates = [np.abs(g) if name in cell.drives else g for name, g in zip(cell.gates, gates, strict=True)]
    params = [rng.standard_normal(count) for _ in cell.params]
    params = params if cap is None else [np.clip(p, -cap, cap) for p in params]
    with quiet(xp):
        new = cell.step(xp, *slots, *gates, *params)
    for name, value in zip(cell.slots, new, strict=True):
        if name not in cell.bounds:
            continue
        low, high = cell.bounds[name]
        room = 1e-9 * max(abs(low), abs(high))
        if np.any(value < low - room) or np.any(value > high + room):
            raise TypeError(
                f"check_cell: slot {name} left its declared bounds {cell.bounds[name]} in one step, to "
                f"[{np.nanmin(value):.3g}, {np.nanmax(value):.3g}]; correct `bounds`, on which the solver projects"
            )
