"""check_cell for mixing cells: the traced step against the step itself, and the declared bounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from pararnn.arrays import quiet, resolve_namespace
from pararnn.drives import with_drives
from pararnn.problem import make_problem

# States that are compared; enough to reach both sides of a kink.
STATES = 200


def check_mixing_cell(cell: Any) -> None:
    """Raises TypeError with the reason if `cell` cannot be solved."""
    names = [*cell.slots, *cell.gates, *cell.params]
    if len(set(names)) != len(names):
        raise TypeError(f"check_cell: slots, gates and params share a name in {tuple(names)}")
    if cell.hidden not in cell.slots:
        raise TypeError(
            f"check_cell: hidden={cell.hidden!r} is not one of the slots {cell.slots}; set hidden to the slot that a "
            "layer passes on"
        )
    if unknown := set(cell.bounds) - set(cell.slots):
        raise TypeError(f"check_cell: bounds name {sorted(unknown)}, which are not among the slots {cell.slots}")
    xp, rng = resolve_namespace(None), np.random.default_rng(0)
    double = cell.to(xp, dtype=np.float64)
    x = 2.0 * rng.standard_normal((STATES, 1, double.d_in))
    double, x = with_drives("check_cell", double, x, {})
    rows = double.rows(make_problem("check_cell", double, x))
    gates = [g[:, 0, ...] for g in rows.gates(x)]
    shape = double.state_shape if double.state_slots == 1 else double.state_shape[1:]
    ranges = [cell.bounds.get(name, (0.1, 2.0)) for name in cell.slots]
    slots = [rng.uniform(low, high, size=(STATES, *shape)) for low, high in ranges]
    with quiet(xp):
        direct = double.step(xp, double.mixer(xp, np.float64), *slots, *gates, *double.recurrent(xp, np.float64))
        traced = rows.step(slots, gates)
    for name, a, b in zip(cell.slots, direct, traced, strict=True):
        if a.shape != slots[0].shape:
            raise TypeError(f"check_cell: slot {name} came back with shape {a.shape} for states of {slots[0].shape}")
        if not np.all(np.abs(a - b) <= 1e-12 * (1.0 + np.abs(a))):
            raise TypeError(
                f"check_cell: slot {name} of the traced step differs from the step itself; a step must not depend on "
                "anything but its operands and the names in `options`"
            )
        low, high = cell.bounds.get(name, (-np.inf, np.inf))
        if np.any(a < low - 1e-9) or np.any(a > high + 1e-9):
            raise TypeError(
                f"check_cell: slot {name} left its declared bounds {cell.bounds[name]} in one step, to "
                f"[{np.min(a):.3g}, {np.max(a):.3g}]; correct `bounds`, on which the solver projects"
            )
