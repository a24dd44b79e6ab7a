"""Hard networks: large weights without a clamp, long memory, chaos, latches. A solve is right or it is the time loop.

In a chaotic network two orders of evaluation part ways, so results are compared with the backend's own time loop, and
each single step with the recurrence in float64: the result must be *a* trajectory of the cell.
"""

from __future__ import annotations

import numpy as np

from pararnn import NewtonStats, default_agreement_atol
from pararnn_conformance import reference
from pararnn_conformance.case import CELLS, Case, loop_states, numbers
from pararnn_conformance.expect import expect, expect_agreement, expect_same_bits
from pararnn_conformance.registration import check
from pararnn_conformance.target import Target

DTYPES = ("float32", "float64")
# (T, L): the cost model's choice; many segments; three, of which only the last one's start is in doubt, because the
# warm-up before the second is the first itself; two and a short last one.
SHAPES = ((300, None), (300, 16), (96, 32), (129, 64))
REGIMES = ("strong", "wild", "long", "latch")
FEW = {"cell": ("ParaGRU", "Echo"), "regime": ("strong",), "shape": ((300, 16),)}


def _case(cell: str, dtype: str, regime: str, time: int) -> Case:
    return Case(cell, dtype, time, width=16, regime=regime, coarse=True)


def _step_error(case: Case, states: np.ndarray) -> float:
    """How far the states are from being a trajectory: the largest residual, relative to each slot's scale."""
    cell, x, h0 = numbers(case)
    wide = reference.with_slots(cell, states.astype(np.float64))
    gap = np.abs(reference.residual(cell, x, h0, wide))
    scale = np.max(np.abs(wide), axis=(0, 1, 3), keepdims=True)
    return float(np.max(gap / np.maximum(scale, 1e-30)))


@check("P01 P07 O09", cell=CELLS, dtype=DTYPES, regime=REGIMES, shape=SHAPES, few=FEW)
def trajectory(target: Target, cell: str, dtype: str, regime: str, shape: tuple[int, int | None]) -> None:
    """The states obey the recurrence at every step, joints included, and the solve says that it converged."""
    case = _case(cell, dtype, regime, shape[0])
    stats = NewtonStats()
    mine = target.run(case, stats=stats, segment_len=shape[1])
    expect(stats.converged, f"not converged, estimate {stats.agreement_estimate:.2e}")
    error, allowed = _step_error(case, mine), default_agreement_atol(np.dtype(dtype))
    expect(error <= allowed, f"a step is off by {error:.2e}, allowed {allowed:.0e}")


@check("P01 O09", cell=CELLS, dtype=DTYPES, regime=REGIMES, shape=SHAPES, few=FEW)
def own_loop(target: Target, cell: str, dtype: str, regime: str, shape: tuple[int, int | None]) -> None:
    """Segments agree with the backend's own time loop, also where errors grow without bound."""
    case = _case(cell, dtype, regime, shape[0])
    mine, loop = target.run(case, segment_len=shape[1]), target.run(case, segment_len=shape[0])
    expect_agreement(numbers(case).cell, mine, loop, default_agreement_atol(np.dtype(dtype)))


@check("P01", cell=CELLS, dtype=DTYPES, few={"cell": ("ParaGRU",)})
def long_memory(target: Target, cell: str, dtype: str) -> None:
    """A network that forgets slowly, from no warm-up at all, against the oracle."""
    case = _case(cell, dtype, "long", 1000)
    mine = target.run(case, segment_len=50, warmup=0)
    expect_agreement(numbers(case).cell, mine, loop_states(case), default_agreement_atol(np.dtype(dtype)))


@check("P07 O09", cell=CELLS, dtype=DTYPES, regime=(*REGIMES, "gentle"), shape=SHAPES[1:], few=FEW)
def exact(target: Target, cell: str, dtype: str, regime: str, shape: tuple[int, int]) -> None:
    """exact=True gives the backend's own time loop bit for bit, and says so."""
    target.needs_comparable_bits(dtype)
    case = _case(cell, dtype, regime, shape[0])
    stats = NewtonStats()
    mine = target.run(case, stats=stats, segment_len=shape[1], exact=True)
    expect(stats.exact and stats.converged, f"exact={stats.exact}, converged={stats.converged}")
    expect_same_bits(mine, target.run(case, segment_len=shape[0]), "against the time loop")
