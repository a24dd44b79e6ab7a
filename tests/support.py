"""Small problems and comparisons that several test files share."""

from __future__ import annotations

import numpy as np

from pararnn import NewtonStats, ParaGRU, ParaLSTM, ParaSLSTM, ParaTanh, newton_apply

CELLS = (ParaGRU, ParaLSTM, ParaSLSTM, ParaTanh)
# A float64 result may differ from the oracle by the rounding of another order of evaluation.
CLOSE = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}


def problem(kind, time, *, batch=2, features=3, width=5, dtype=np.float32, seed=0, scale=1.0, cap="default"):
    """A cell of `kind` and an input (B, T, I) for it, in NumPy."""
    cell = kind(features, width, seed=seed, dtype=dtype, max_recurrent_norm=cap)
    x = scale * np.random.default_rng(seed + 1).standard_normal((batch, time, features))
    return cell, x.astype(dtype)


def strong(kind, time, size, *, seed=0, **options):
    """The same with recurrent weights N(0, size²) and no clamp."""
    cell, x = problem(kind, time, seed=seed, cap=None, **options)
    rng = np.random.default_rng(seed + 2)
    names = [n for n in cell.arrays if not n.startswith("W_x.")]
    new = {n: (size * rng.standard_normal(cell.arrays[n].shape)).astype(cell.dtype) for n in names}
    return cell.replace(**new), x


def start_for(cell, batch, seed=3):
    """A starting state (B, …) of either sign that the cell could have reached."""
    h0 = 0.4 * np.random.default_rng(seed).uniform(-1.0, 1.0, (batch, *cell.state_shape))
    if isinstance(cell, ParaSLSTM):
        h0[:, 1] = 0.5 + np.abs(h0[:, 1])
    return h0.astype(cell.dtype)


def solve(cell, x, config=None, **keywords):
    """States and stats."""
    stats = NewtonStats()
    return newton_apply(cell, x, config, stats=stats, **keywords), stats


def error_of(cell, got, wanted):
    """The largest error of any slot relative to that slot's scale, in float64; NaN must stand in the same places."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    axis = got.ndim - 2
    slots = [(got, wanted)]
    if cell.state_slots > 1:
        slots = [(np.take(got, s, axis), np.take(wanted, s, axis)) for s in range(cell.state_slots)]
    worst = 0.0
    for a, b in slots:
        if a.size:
            gap, scale = np.nan_to_num(np.abs(a - b)), np.nanmax(np.abs(b), initial=0.0) or 1.0
            worst = max(worst, float(gap.max() / scale))
    return worst
