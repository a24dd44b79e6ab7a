"""Every length works: empty, one step, around the sizes of tiles and segments, and long."""

from __future__ import annotations

from typing import Any

import numpy as np

from pararnn import NewtonStats, default_agreement_atol
from pararnn_conformance.case import CELLS, Case, cotangent, loop_states, numbers, wide_gradients
from pararnn_conformance.expect import expect, expect_agreement, expect_near
from pararnn_conformance.registration import check
from pararnn_conformance.target import Target

LENGTHS = (0, 1, 2, 63, 64, 65, 1000)
LONG = 16384
DTYPES = ("float32", "float64")
# Gradients against float64 back-propagation, relative to the largest entry of each array.
GRADIENT_TOL = {"float32": 2e-4, "float64": 1e-9}
# 'auto' is what users get; 'segments' forces many joints at every length that has room for them, and a short last
# segment.
PATHS: dict[str, dict[str, Any]] = {"auto": {}, "segments": {"segment_len": 4}}
FEW = {"cell": ("ParaGRU", "Echo"), "time": (0, 65), "path": ("segments",)}


@check("P01 P20 O04 O05 O20", cell=CELLS, dtype=DTYPES, time=LENGTHS, path=tuple(PATHS), few=FEW)
def forward(target: Target, cell: str, dtype: str, time: int, path: str) -> None:
    """The states equal the time loop's."""
    case = Case(cell, dtype, time)
    stats = NewtonStats()
    mine = target.run(case, stats=stats, **PATHS[path])
    expect(stats.converged, f"a solve without a pinned count ended at estimate {stats.agreement_estimate}")
    expect_agreement(numbers(case).cell, mine, loop_states(case), default_agreement_atol(np.dtype(dtype)))


@check("O04 O18 O20 O23", cell=CELLS, dtype=DTYPES, time=LENGTHS, path=tuple(PATHS), few=FEW)
def gradient(target: Target, cell: str, dtype: str, time: int, path: str) -> None:
    """The gradients of x, h0 and every parameter equal those of back-propagation through a float64 loop."""
    case = Case(cell, dtype, time)
    given = target.give(case)
    _, pullback = target.vjp(given.cell, given.x, given.h0, **PATHS[path])
    found = target.gradients(pullback(target.array(cotangent(case), dtype)))
    wanted = wide_gradients(case)
    expect(set(found) == set(wanted), f"gradients of {sorted(found)}, wanted {sorted(wanted)}")
    for name, true in wanted.items():
        expect_near(found[name], true, GRADIENT_TOL[dtype], name)


@check("P10 O04", cell=CELLS, dtype=("float32",), few={"cell": ()})
def long(target: Target, cell: str, dtype: str) -> None:
    """A long sequence: states and gradients."""
    case = Case(cell, dtype, LONG, batch=1, width=3)
    given = target.give(case)
    states, pullback = target.vjp(given.cell, given.x, given.h0)
    atol = default_agreement_atol(np.dtype(dtype))
    expect_agreement(numbers(case).cell, target.host(states), loop_states(case), atol)
    found = target.gradients(pullback(target.array(cotangent(case), dtype)))
    for name, true in wide_gradients(case).items():
        expect_near(found[name], true, 10.0 * GRADIENT_TOL[dtype], name)


@check("O52", cell=CELLS, batch_time=((0, 5), (0, 0), (2, 0)), few={"cell": ("ParaGRU",)})
def empty(target: Target, cell: str, batch_time: tuple[int, int]) -> None:
    """Nothing in, nothing out: matching shapes, parameter gradients exactly 0, and h0 passes its cotangent through."""
    case = Case(cell, time=batch_time[1], batch=batch_time[0])
    given = target.give(case)
    host = numbers(case).cell
    states, pullback = target.vjp(given.cell, given.x, given.h0)
    expect(tuple(states.shape) == (*batch_time[:2], *host.state_shape), f"states of shape {tuple(states.shape)}")
    last = np.full((case.batch, *host.state_shape), 2.0)
    found = target.gradients(pullback(states, last=target.array(last, case.dtype)))
    expect(found["x"].shape == given.x.shape, f"gradient of x of shape {found['x'].shape}")
    for name in host.arrays:
        expect(not np.any(found[name]), f"gradient of {name} is not 0")
    if case.time == 0:
        expect_near(found["h0"], last, 0.0, "h0, which is the final state of an empty sequence")
