"""What a solve says about itself is true: a loose solve says so, and 'converged' is never said in vain."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from pararnn import NewtonDivergenceError, NewtonStats, NotConvergedWarning, default_agreement_atol, explain
from pararnn_conformance import reference
from pararnn_conformance.case import CELLS, Case, loop_states, numbers
from pararnn_conformance.expect import error_of, expect, expect_error, loose_solves_allowed
from pararnn_conformance.registration import check
from pararnn_conformance.target import Target

LOOSE: dict[str, dict[str, Any]] = {
    "one-iteration": {"max_iters": 1},
    "no-iteration": {"max_iters": 0},
    "no-correction": {"segment_len": 32, "max_iters": 0, "warmup": 0},
    "no-correction-L=8": {"segment_len": 8, "max_iters": 0, "warmup": 0},
    "by-table": {"newton_iters_by_t": {1: 0}},
}
OFF: dict[str, Any] = {"residual_fail": None, "residual_atol": None}
FEW = {"cell": ("ParaGRU", "Echo")}


def _loose(cell: str, time: int = 200) -> Case:
    """Large weights where a cell forgets, slow gates where it has a gate to keep with: one step is never enough."""
    return Case(cell, time=time, width=8, regime="strong" if cell in ("ParaGRU", "ParaTanh") else "long")


@check("P04 P07 O07", cell=CELLS, order=tuple(LOOSE), few=FEW)
def loose(target: Target, cell: str, order: str) -> None:
    """Too few iterations are reported as not converged, with a warning that names the estimate."""
    case = _loose(cell)
    options = LOOSE[order] if cell != "ParaSLSTM" else {**LOOSE[order], "picard_iters": 0, "picard_adapt": False}
    stats = NewtonStats()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = target.run(case, stats=stats, **{**OFF, **options})
    error = error_of(numbers(case).cell, mine, loop_states(case))
    expect(error > default_agreement_atol(np.float32), f"the case is no test: its error is {error:.1e}")
    expect(not stats.converged, f"error {error:.1e} reported as converged, estimate {stats.agreement_estimate:.1e}")
    expect(not stats.exact, f"error {error:.1e} reported as exact")
    expect(any(issubclass(w.category, NotConvergedWarning) for w in caught), "no NotConvergedWarning")


@check("P07 O07 O09", cell=CELLS, dtype=("float32", "float64"), regime=("gentle", "strong", "wild", "long"),
       few={"cell": ("Echo",)})  # fmt: skip
def converged_means_right(target: Target, cell: str, dtype: str, regime: str) -> None:
    """Over pinned counts and segment lengths: where a solve says converged, its true error is within the agreement."""
    allowed, wrong = default_agreement_atol(np.dtype(dtype)), []
    for seed in (0, 1):
        case = Case(cell, dtype, time=128, width=16, regime=regime, seed=seed, coarse=True)
        host = numbers(case).cell
        loop = target.run(case, segment_len=case.time)
        for length in (1, 16):
            for count in (0, 1, 3, 8):
                stats = NewtonStats()
                with loose_solves_allowed():
                    mine = target.run(case, stats=stats, max_iters=count, segment_len=length, **OFF)
                error = error_of(host, mine, loop)
                if (stats.converged or stats.exact) and not error <= allowed:
                    wrong.append(f"seed {seed}, L={length}, K={count}: {error:.1e} ({stats.agreement_estimate:.1e})")
    expect(not wrong, f"said to have converged: {'; '.join(wrong)}")


@check("P07", cell=CELLS, tol=(1e-2, 1e-3), few=FEW)
def loose_tolerance(target: Target, cell: str, tol: float) -> None:
    """A loose `tol` is kept: the true error stays within a few times of it."""
    case = _loose(cell)
    stats = NewtonStats()
    mine = target.run(case, stats=stats, segment_len=16, warmup=0, tol=tol)
    error = error_of(numbers(case).cell, mine, loop_states(case))
    expect(stats.converged and error <= 10.0 * tol, f"tol={tol:g}: error {error:.1e}, converged={stats.converged}")


@check("P04 P05 O07", cell=CELLS, how=("apply", "vjp"), few=FEW)
def gate(target: Target, cell: str, how: str) -> None:
    """Above `residual_fail` a pinned solve raises, with its stats, before a state or a gradient can be used."""
    case = _loose(cell)
    given = target.give(case)
    options: dict[str, Any] = {"max_iters": 0, "residual_fail": 1e-6, "residual_atol": None}
    if cell == "ParaSLSTM":
        options.update(picard_iters=0, picard_adapt=False)
    try:
        getattr(target, how)(given.cell, given.x, given.h0, **options)
    except NewtonDivergenceError as error:
        expect(error.stats is not None and error.stats.max_residual > 1e-6, f"stats: {error.stats}")
        return
    raise AssertionError("a residual far above residual_fail went through")


@check("P05 O08", cell=CELLS)
def gate_refuses_nan(target: Target, cell: str) -> None:
    """A pinned solve that is not finite raises, whatever the thresholds are."""
    case = Case(cell)
    _, x, _ = numbers(case)
    given = target.give(case)
    poisoned = x.copy()
    poisoned[0, 5, 0] = np.nan
    handed = target.array(poisoned, case.dtype)
    with expect_error(NewtonDivergenceError, "residual", "NaN"):
        target.apply(given.cell, handed, given.h0, max_iters=3, residual_fail=1e6)


@check("P04 P06", cell=CELLS, count=(0, 2), few=FEW)
def residual(target: Target, cell: str, count: int) -> None:
    """stats.max_residual of a pinned solve is max|f(h_{t-1}, x_t) - h_t| of what came back."""
    case = _loose(cell, 50)
    host, x, h0 = numbers(case)
    stats = NewtonStats()
    options: dict[str, Any] = {"max_iters": count, **OFF}
    if cell == "ParaSLSTM":
        options.update(coords="native", picard_iters=0, picard_adapt=False)
    with loose_solves_allowed():
        mine = target.run(case, stats=stats, **options)
    gap = reference.residual(host, x, h0, reference.with_slots(host, mine.astype(np.float64)))
    true = float(np.max(np.abs(gap)))
    told = stats.max_residual
    expect(abs(told - true) <= 1e-3 * true + 1e-6, f"max_residual {told:.3g}, it is {true:.3g}")


@check("P07", value=(0.5, -0.9, 1.2))
def lyapunov(target: Target, value: float) -> None:
    """h' = tanh(a h) at rest grows by |a| a step, and the exponent says so: log|a|."""
    case = Case("ParaTanh", time=96, start=False)
    host = numbers(case).cell
    arrays = {"a": np.full(case.width, value), "W_x.bias": np.zeros(case.width)}
    cell = target.cell(host.replace(max_recurrent_norm=None, **arrays), case.dtype)
    stats = NewtonStats()
    target.apply(cell, target.array(np.zeros_like(numbers(case).x), case.dtype), stats=stats)
    expect(abs(stats.lyapunov - math.log(abs(value))) <= 1e-3, f"{stats.lyapunov}, wanted {math.log(abs(value)):.4f}")


@check("P07", cell=CELLS, segment=(None, 16), few=FEW)
def explained(target: Target, cell: str, segment: int | None) -> None:
    """explain names the backend and the path that then runs, unless the solve had to fall back on walking."""
    case = Case(cell)
    given = target.give(case)
    config = target.config(segment_len=segment)
    target.ask(given.cell, given.x, given.h0, config)
    told = explain(given.cell, given.x, config, h0=given.h0)
    stats = NewtonStats()
    target.apply(given.cell, given.x, given.h0, stats=stats, segment_len=segment)
    expect(told.backend == target.name, f"told {told.backend!r}")
    expect(told.path == stats.path or stats.walked > 0.0, f"told {told.path!r}, ran {stats.path!r}")
    expect(told.reason and str(told), "no reason given")
