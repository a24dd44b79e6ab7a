"""A pinned count is an order: exactly K iterations of the published method, or K corrections of the segments.

Off the fixed point nothing corrects a faulty scan, so these checks see what an agreement test cannot.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pararnn import NewtonStats
from pararnn_conformance import reference
from pararnn_conformance.case import CELLS, Case, loop_states, numbers
from pararnn_conformance.expect import error_of, expect, expect_agreement, expect_same_bits, loose_solves_allowed
from pararnn_conformance.registration import check
from pararnn_conformance.target import Target

OFF: dict[str, Any] = {"residual_fail": None, "residual_atol": None}
# Public coordinates and no Picard start, so that every cell starts where the reference does.
PLAIN: dict[str, Any] = {**OFF, "coords": "native"}
TOL = {"float32": 2e-4, "float64": 1e-9}
FEW = {"cell": ("ParaGRU", "Echo"), "dtype": ("float32",)}


def _options(cell: str, **more: Any) -> dict[str, Any]:
    picard: dict[str, Any] = {"picard_iters": 0, "picard_adapt": False} if cell == "ParaSLSTM" else {}
    return {**PLAIN, **picard, **more}


def _loose(cell: str, dtype: str, time: int) -> Case:
    """Slow to forget, so that K iterations are far from enough and every joint matters."""
    return Case(cell, dtype, time, coarse=True, regime="gentle" if cell == "ParaSLSTM" else "long")


@check("P11 O01 O02", cell=CELLS, dtype=("float32", "float64"), count=(0, 1), few={**FEW, "count": (1,)})
def per_step(target: Target, cell: str, dtype: str, count: int) -> None:
    """max_iters=K is the K-th iterate of the published method, also far from the solution."""
    case = _loose(cell, dtype, 33)
    host, x, h0 = numbers(case)
    wanted = reference.public(host, reference.per_step_newton(host, x, h0, count))
    with loose_solves_allowed():
        mine = target.run(case, **_options(cell, max_iters=count))
    expect(error_of(host, wanted, loop_states(case)) > 1e-3, "the case is no test: the iterate is right")
    expect_agreement(host, mine, wanted, TOL[dtype], f"iterate {count}")


@check("P11 O01", cell=CELLS, dtype=("float32", "float64"), count=(0, 1), few={**FEW, "count": (1,)})
def corrections(target: Target, cell: str, dtype: str, count: int) -> None:
    """segment_len=L, max_iters=K is K corrections of the segment starts, from zero starts."""
    case = _loose(cell, dtype, 48)
    host, x, h0 = numbers(case)
    wanted = reference.public(host, reference.shooting(host, x, h0, 8, count))
    with loose_solves_allowed():
        mine = target.run(case, **_options(cell, max_iters=count, segment_len=8, warmup=0))
    expect(error_of(host, wanted, loop_states(case)) > 1e-3, "the case is no test: the iterate is right")
    expect_agreement(host, mine, wanted, TOL[dtype], f"after {count} corrections")


@check("P10", cell=CELLS, regime=("long", "strong"), few={"cell": ("ParaGRU", "Echo")})
def exact_prefix(target: Target, cell: str, regime: str) -> None:
    """After K corrections the first K+1 segments are the time loop's, bit for bit."""
    target.needs_comparable_bits("float32")
    case = Case(cell, time=64, width=16, regime=regime, coarse=True)
    loop = target.run(case, segment_len=case.time)
    for count in (0, 1, 3):
        with loose_solves_allowed():
            mine = target.run(case, **_options(cell, max_iters=count, segment_len=8, warmup=0))
        good = 8 * (count + 1)
        expect_same_bits(mine[:, :good], loop[:, :good], f"the first {count + 1} segments after {count} corrections")


@check("P11", cell=CELLS, few={"cell": ("ParaGRU",)})
def by_table(target: Target, cell: str) -> None:
    """newton_iters_by_t pins the entry of the largest key ≤ T."""
    case = _loose(cell, "float32", 33)
    with loose_solves_allowed():
        direct = target.run(case, **_options(cell, max_iters=2))
        looked_up = target.run(case, **_options(cell, newton_iters_by_t={1: 0, 32: 2, 64: 5}))
    expect_same_bits(looked_up, direct, "by table and pinned")


@check("P11", cell=CELLS, tile=("assoc", "seq"), few={"cell": ("Echo",)})
def scan_forms(target: Target, cell: str, tile: str) -> None:
    """The tree and the loop form of the scan give the same iterate."""
    case = _loose(cell, "float64", 33)
    host, x, h0 = numbers(case)
    wanted = reference.public(host, reference.per_step_newton(host, x, h0, 1))
    with loose_solves_allowed():
        mine = target.run(case, **_options(cell, max_iters=1, scan_tile=tile))
    expect_agreement(host, mine, wanted, TOL["float64"], tile)


@check("P04 P11", cell=CELLS, few={"cell": ("ParaGRU",)})
def early_stop(target: Target, cell: str) -> None:
    """A pinned solve stops at `residual_atol`, never makes more than K iterations, and counts what it made."""
    case = Case(cell)
    stats = NewtonStats()
    options: dict[str, Any] = {} if cell != "ParaSLSTM" else {"picard_adapt": False}
    target.run(case, stats=stats, max_iters=40, residual_atol=1e-4, **options)
    expect(0 < stats.iters < 40 and stats.max_residual < 1e-4, f"{stats.iters} iterations to {stats.max_residual:.1e}")
    with loose_solves_allowed():
        target.run(case, stats=stats, max_iters=2, residual_fail=None, residual_atol=None, **options)
    expect(stats.iters == 2 and stats.path == "per-step", f"{stats.iters} iterations on {stats.path}")


@check("P10 P12", cell=CELLS, few={"cell": ("ParaGRU",)})
def enough(target: Target, cell: str) -> None:
    """With iterations to spare the published method agrees with the time loop."""
    case = Case(cell)
    mine = target.run(case, max_iters=12)
    expect_agreement(numbers(case).cell, mine, loop_states(case), 1e-4)


@check("P11", cell=CELLS, omega=(0.5, 1.0), few={"cell": ("ParaGRU",)})
def relaxation(target: Target, cell: str, omega: float) -> None:
    """One relaxed iteration moves by omega times the Newton step."""
    case = _loose(cell, "float32", 33)
    host, x, h0 = numbers(case)
    before = reference.public(host, reference.per_step_newton(host, x, h0, 0))
    after = reference.public(host, reference.per_step_newton(host, x, h0, 1))
    with loose_solves_allowed():
        mine = target.run(case, **_options(cell, max_iters=1, omega=omega))
    expect_agreement(host, mine, before + omega * (after - before), TOL["float32"])
    expect(np.any(after != before), "the case is no test: nothing moves")
