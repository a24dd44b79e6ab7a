"""Gradients obey what defines them: other ways to differentiate, the adjoint identity, linearity."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from pararnn import sequential_apply
from pararnn_conformance.case import CELLS, Case, cotangent, numbers, wide_gradients
from pararnn_conformance.expect import Refused, expect, expect_near, expect_same_bits
from pararnn_conformance.lengths import GRADIENT_TOL
from pararnn_conformance.registration import check
from pararnn_conformance.target import Target

JOINTS: dict[str, Any] = {"segment_len": 4}
FEW = {"cell": ("Echo",)}


def _gradients(target: Target, case: Case, **options: object) -> dict[str, np.ndarray]:
    given = target.give(case)
    _, pullback = target.vjp(given.cell, given.x, given.h0, **(options or JOINTS))
    return target.gradients(pullback(target.array(cotangent(case), case.dtype)))


def _by_torch(case: Case) -> dict[str, np.ndarray]:
    """torch's automatic differentiation of the time loop, in float64."""
    import torch

    host, x, h0 = numbers(case)
    leaves = {"x": x, "h0": h0, **host.arrays}
    made = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in leaves.items()}
    cell = host.to(torch).replace(**{name: made[name] for name in host.arrays})
    loss = (sequential_apply(cell, made["x"], made["h0"]) * torch.tensor(cotangent(case))).sum()
    found = torch.autograd.grad(loss, list(made.values()))
    return {name: g.numpy() for name, g in zip(made, found, strict=True)}


@check("O22 O23", cell=CELLS, few=FEW)
def automatic_differentiation(target: Target, cell: str) -> None:
    """The gradients equal torch's automatic differentiation of the time loop."""
    if importlib.util.find_spec("torch") is None:
        raise Refused("torch, which gives the reference, is not installed")
    case = Case(cell)
    found = _gradients(target, case)
    for name, true in _by_torch(case).items():
        expect_near(found[name], true, GRADIENT_TOL[case.dtype], name)


@check("O23", cell=CELLS, dtype=("float32", "float64"), few=FEW)
def adjoint_identity(target: Target, cell: str, dtype: str) -> None:
    """<g, J v> = <Jᵀ g, v> for a random direction v, with J v from finite differences of the solve itself."""
    case = Case(cell, dtype, time=40)
    host, x, h0 = numbers(case)
    rng = np.random.default_rng(7)
    assert h0 is not None
    point = {"x": x, "h0": h0, **host.arrays}
    direction = {name: rng.standard_normal(value.shape) for name, value in point.items()}
    if cell == "ParaSLSTM":
        # The normaliser and the stabiliser of a start are large and only their combination matters.
        direction["h0"][:, 1:3] *= 0.1
    size = {"float32": 1e-3, "float64": 1e-5}[dtype]

    def at(step: float) -> np.ndarray:
        moved = {name: target.array(value + step * direction[name], dtype) for name, value in point.items()}
        arrays = {name: moved[name] for name in host.arrays}
        states = target.apply(target.cell(host, dtype).replace(**arrays), moved["x"], moved["h0"], **JOINTS)
        return states.astype(np.float64)

    weights = cotangent(case)
    pushed = float(np.sum(weights * (at(size) - at(-size)))) / (2.0 * size)
    found = _gradients(target, case)
    pulled = sum(float(np.sum(found[name].astype(np.float64) * direction[name])) for name in point)
    # Relative to the size of the terms, because their sum may cancel.
    scale = max(float(np.sqrt(np.sum((found[n].astype(np.float64) * direction[n]) ** 2))) for n in point)
    gap = abs(pushed - pulled) / scale
    expect(gap <= {"float32": 2e-2, "float64": 1e-6}[dtype], f"<g, Jv> = {pushed:.8g}, <Jᵀg, v> = {pulled:.8g}")


@check("O22", cell=CELLS, few=FEW)
def final_state_only(target: Target, cell: str) -> None:
    """A cotangent for the last state alone, for all states, or for both: they add up."""
    case = Case(cell)
    given = target.give(case)
    _, pullback = target.vjp(given.cell, given.x, given.h0, **JOINTS)
    whole = cotangent(case)
    last_only = np.zeros_like(whole)
    last_only[:, -1] = whole[:, -1]
    last = target.array(whole[:, -1], case.dtype)
    short = target.gradients(pullback(last=last))
    spelled = target.gradients(pullback(target.array(last_only, case.dtype)))
    rest = target.gradients(pullback(target.array(whole - last_only, case.dtype), last=last))
    both = target.gradients(pullback(target.array(whole, case.dtype)))
    for name in short:
        expect_near(short[name], spelled[name], 1e-6, f"{name} for the last state")
        expect_near(rest[name], both[name], 1e-6, f"{name} for all states")


@check("O07", cell=CELLS, few=FEW)
def linear(target: Target, cell: str) -> None:
    """The pullback is linear, repeatable, zero at zero, and leaves the cotangent as it was."""
    case = Case(cell)
    given = target.give(case)
    _, pullback = target.vjp(given.cell, given.x, given.h0, **JOINTS)
    one = cotangent(case)
    two = cotangent(case.but(seed=11))
    handed = target.array(one, case.dtype)
    first = target.gradients(pullback(handed))
    again = target.gradients(pullback(handed))
    other = target.gradients(pullback(target.array(two, case.dtype)))
    mixed = target.gradients(pullback(target.array(2.0 * one - 0.5 * two, case.dtype)))
    zero = target.gradients(pullback(target.array(np.zeros_like(one), case.dtype)))
    expect_same_bits(target.host(handed).astype(np.float64), one, "the cotangent handed in")
    for name in first:
        expect_same_bits(first[name], again[name], f"{name} of a second call")
        expect_near(mixed[name], 2.0 * first[name].astype(np.float64) - 0.5 * other[name], 1e-4, name)
        expect(not np.any(zero[name]), f"{name} of a zero cotangent is not 0")
        expect(np.any(first[name]), f"{name} is all zero")


@check("P30 O49", cell=CELLS, few=FEW)
def recompute(target: Target, cell: str) -> None:
    """Keeping no states gives the same gradients."""
    case = Case(cell)
    kept, again = _gradients(target, case, **JOINTS), _gradients(target, case, **JOINTS, recompute=True)
    for name in kept:
        expect_near(again[name], kept[name].astype(np.float64), 1e-6, name)


@check("P05", cell=CELLS, regime=("clamped", "long"), few={"cell": ()})
def regimes(target: Target, cell: str, regime: str) -> None:
    """Beyond the clamp a parameter's gradient is exactly 0; a long memory carries gradients across many joints."""
    case = Case(cell, time=300, regime=regime)
    found = _gradients(target, case, segment_len=16)
    host = numbers(case).cell
    for name, true in wide_gradients(case).items():
        expect_near(found[name], true, 5.0 * GRADIENT_TOL[case.dtype], name)
        if regime == "clamped" and not name.startswith("W_x.") and name in host.arrays:
            beyond = np.abs(host.arrays[name]) > host.max_recurrent_norm
            expect(np.any(beyond) and not np.any(found[name][beyond]), f"{name} moves beyond the clamp")
