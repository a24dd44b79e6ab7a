"""Finite data raises no floating-point warning, and the caller's error state stays as it was."""

from __future__ import annotations

import warnings

import numpy as np

from pararnn_conformance.case import CELLS, Case, cotangent, numbers
from pararnn_conformance.expect import expect
from pararnn_conformance.registration import check
from pararnn_conformance.target import Target


@check("O60", cell=CELLS, width=(16, 64), segment=(None, 4), few={"cell": ("Echo",), "segment": (4,)})
def large_inputs(target: Target, cell: str, width: int, segment: int | None) -> None:
    """x = ±1e3 with every warning an error: finite states and gradients."""
    case = Case(cell, time=10, width=width)
    given = target.give(case)
    x = target.array(1e3 * np.sign(numbers(case).x), case.dtype)
    seed = target.array(cotangent(case), case.dtype)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        states, pullback = target.vjp(given.cell, x, given.h0, segment_len=segment)
        found = target.gradients(pullback(seed))
        expect(np.geterr() == {key: "raise" for key in np.geterr()}, f"the error state is now {np.geterr()}")
    expect(np.all(np.isfinite(target.host(states))), "states are not finite")
    for name, value in found.items():
        expect(np.all(np.isfinite(value)), f"the gradient of {name} is not finite")
