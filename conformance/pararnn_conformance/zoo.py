"""The other cells, each with what it may do differently: linear steps, slots that rotate, no forgetting, uneven time.

Cells with drives come here with the drives among their features.
"""

from __future__ import annotations

import warnings

import numpy as np

from pararnn import NewtonStats, NotConvergedWarning, default_agreement_atol
from pararnn_conformance import reference
from pararnn_conformance.case import ZOO, Case, cotangent, loop_states, numbers, wide_gradients, wide_states
from pararnn_conformance.expect import error_of, expect, expect_agreement, expect_near
from pararnn_conformance.registration import check
from pararnn_conformance.target import Target

CELLS = tuple(ZOO)
DTYPES = ("float32", "float64")
FEW = {"cell": ("ParaCfC", "ParaLRU")}
# Of the zoo's cells these are linear in their state: one correction is exact.
LINEAR = ("ParaLRU", "ParaMinGRU", "ParaMinLSTM", "ParaS5")
GRADIENT_TOL = {"float32": 2e-4, "float64": 1e-9}


@check("P01 P20", cell=CELLS, dtype=DTYPES, segment=(None, 4, 16), few={**FEW, "segment": (4,)})
def forward(target: Target, cell: str, dtype: str, segment: int | None) -> None:
    """The states equal the time loop's, in the dtype's own loop and in float64."""
    case = Case(cell, dtype, time=65)
    mine = target.run(case, segment_len=segment)
    host, atol = numbers(case).cell, default_agreement_atol(np.dtype(dtype))
    expect_agreement(host, mine, loop_states(case), atol)
    expect_agreement(host, mine.astype(np.float64), wide_states(case), atol)


@check("O22 O23", cell=CELLS, dtype=DTYPES, segment=(None, 16), few={**FEW, "segment": (16,)})
def gradient(target: Target, cell: str, dtype: str, segment: int | None) -> None:
    """The gradients of x, h0 and every parameter equal those of back-propagation through a float64 loop."""
    case = Case(cell, dtype, time=65)
    given = target.give(case)
    _, pullback = target.vjp(given.cell, given.x, given.h0, segment_len=segment)
    found = target.gradients(pullback(target.array(cotangent(case), dtype)))
    wanted = wide_gradients(case)
    expect(set(found) == set(wanted), f"gradients of {sorted(found)}, wanted {sorted(wanted)}")
    for name, true in wanted.items():
        expect_near(found[name], true, GRADIENT_TOL[dtype], name)


@check("P01 P41", cell=CELLS, dtype=("float16", "bfloat16"), few=FEW)
def half(target: Target, cell: str, dtype: str) -> None:
    """Half precision is stored in half and computed in float32: the result is the float32 loop's, rounded once."""
    case = Case(cell, dtype)
    step = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    expect_agreement(numbers(case).cell, target.run(case).astype(np.float32), loop_states(case), step, "one rounding")


@check("P51 O13", cell=CELLS, few=FEW)
def split(target: Target, cell: str) -> None:
    """Pieces with the state carried from one to the next equal one call."""
    case = Case(cell, time=190)
    given = target.give(case)
    state, rows, begin = given.h0, [], 0
    for length in (63, 1, 126):
        piece = target.apply(given.cell, given.x[:, begin : begin + length, ...], state)
        state = target.array(piece[:, -1].astype(np.float64), case.dtype)
        rows.append(piece)
        begin += length
    atol = default_agreement_atol(np.float32)
    expect_agreement(numbers(case).cell, np.concatenate(rows, axis=1), loop_states(case), atol)


@check("P01 P07 O09", cell=CELLS, dtype=DTYPES, regime=("strong", "wild", "long"), shape=((300, 16), (129, 64)),
       few={**FEW, "shape": ((129, 64),)})  # fmt: skip
def trajectory(target: Target, cell: str, dtype: str, regime: str, shape: tuple[int, int]) -> None:
    """With large weights and inputs the states obey the recurrence at every step, and the solve says it converged."""
    case = Case(cell, dtype, shape[0], width=16, regime=regime, coarse=True)
    stats = NewtonStats()
    mine = target.run(case, stats=stats, segment_len=shape[1])
    expect(stats.converged, f"not converged, estimate {stats.agreement_estimate:.2e}")
    host, x, h0 = numbers(case)
    states = reference.with_slots(host, mine.astype(np.float64))
    gap = np.abs(reference.residual(host, x, h0, states))
    error = float(np.max(gap / np.maximum(np.max(np.abs(states), axis=(0, 1, 3), keepdims=True), 1e-30)))
    allowed = default_agreement_atol(np.dtype(dtype))
    expect(error <= allowed, f"a step is off by {error:.2e}, allowed {allowed:.0e}")


@check("P07 O07", cell=CELLS, regime=("gentle", "strong", "long"), few=FEW)
def converged_means_right(target: Target, cell: str, regime: str) -> None:
    """Over pinned counts and segment lengths: where a solve says converged, its true error is within the agreement."""
    case = Case(cell, time=128, width=16, regime=regime, coarse=True)
    loop = target.run(case, segment_len=case.time)
    for length, count in ((1, 1), (1, 3), (1, 8), (16, 0), (16, 1), (16, 3)):
        stats = NewtonStats()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotConvergedWarning)
            mine = target.run(
                case, stats=stats, segment_len=length, max_iters=count, residual_fail=None, residual_atol=None
            )
        error = error_of(numbers(case).cell, mine, loop)
        said = f"L={length}, K={count}: error {error:.1e} reported as converged"
        expect(not stats.converged or error <= 1e-4, said)


@check("P10", cell=LINEAR, segment=(1, 16), few={"cell": ("ParaLRU",), "segment": (16,)})
def one_correction(target: Target, cell: str, segment: int) -> None:
    """A linear recurrence is solved by one correction, per step and in segments."""
    case = Case(cell, "float64", time=200, regime="long")
    mine = target.run(case, segment_len=segment, max_iters=1, residual_atol=None)
    expect_agreement(numbers(case).cell, mine, loop_states(case), default_agreement_atol(np.float64))
