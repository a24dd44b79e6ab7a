"""Seeded faults: for each, the check of the conformance suite that catches it, and that passes without the fault.

The forward solve corrects itself: a faulty correction at the joints costs passes but not the result, because what does
not settle is walked. Such faults have to be caught where nothing corrects them: in gradients and in pinned iterates.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from pararnn import Gradients, register_backend, registry
from pararnn.programs import programs_of
from pararnn.scans.associative import tree_states
from pararnn_conformance import Target, failure_of, instances
from pararnn_numpy import NumpyBackend
from pararnn_numpy.engine import UfuncEngine

solve = importlib.import_module("pararnn.solve")
adjoint = importlib.import_module("pararnn.adjoint")
segments = importlib.import_module("pararnn.segments")


# --- faults of an engine: one of the derived programs is run wrongly --------------------------------------------------


class FaultyEngine(UfuncEngine):
    """An engine that knows which program it is asked to run."""

    def __init__(self, problem):
        super().__init__(problem.xp)
        cell = problem.cell
        self.programs = [programs_of(cell), programs_of(cell.solve_cell())]

    def owner(self, loop, name):
        """The programs of which `loop` is the one called `name`, or None."""
        return next((p for p in self.programs if getattr(p, name) is loop), None)


def transposed(where, entries):
    """The entries of an S×S matrix in the order of `where`, as those of its transpose."""
    by_place = dict(zip(where, entries, strict=True))
    return [by_place.get((j, i), np.zeros_like(entries[0])) for i, j in where]


class SwappedAtTheAdjointsJoints(FaultyEngine):
    """The maps of the segments are applied from the wrong side where they are joined."""

    def loop(self, loop, carry, rows, consts, **options):
        owner = self.owner(loop, "adjoint_joints")
        if owner:
            count = len(owner.n.where)
            rows = [*transposed(owner.n.where, rows[:count]), *rows[count:]]
        return super().loop(loop, carry, rows, consts, **options)


class SwappedInTheAdjointsSweep(FaultyEngine):
    """A segment's map is built as N Jᵀ instead of Jᵀ N."""

    def loop(self, loop, carry, rows, consts, **options):
        owner = self.owner(loop, "adjoint_affine")
        out = super().loop(loop, carry, rows, consts, **options)
        if owner:
            size, lanes = owner.size, rows[0].shape[1]
            product = np.broadcast_to(np.eye(size)[:, :, None], (size, size, lanes))
            for l in range(rows[0].shape[0] - 1, -1, -1):
                jac = np.zeros((size, size, lanes))
                for place, entry in zip(owner.j.where, rows, strict=False):
                    jac[place] = entry[l]
                product = np.einsum("ikn,jkn->ijn", product, jac)
            for k, place in enumerate(owner.n.where):
                out.carry[k] = product[place].astype(rows[0].dtype)
        return out


class SwappedCorrection(FaultyEngine):
    """The correction of the segment starts uses the transposed tangent."""

    def loop(self, loop, carry, rows, consts, **options):
        owner = self.owner(loop, "correct")
        if owner:
            count = len(owner.m.where)
            rows = [*transposed(owner.m.where, rows[:count]), *rows[count:]]
        return super().loop(loop, carry, rows, consts, **options)


class AdjointForgetsTheFuture(FaultyEngine):
    """What later windows hand back is dropped."""

    def loop(self, loop, carry, rows, consts, **options):
        if self.owner(loop, "adjoint_joints"):
            carry = [np.zeros_like(c) for c in carry]
        return super().loop(loop, carry, rows, consts, **options)


class AdjointOffByOneJoint(FaultyEngine):
    """Each segment's sweep starts from its right neighbour's cotangent."""

    def loop(self, loop, carry, rows, consts, **options):
        out = super().loop(loop, carry, rows, consts, **options)
        if self.owner(loop, "adjoint_joints"):
            out.kept = [np.concatenate([k[1:], k[-1:]]) for k in out.kept]
        return out


class NaNMadeZero(FaultyEngine):
    """NaN is cleaned away."""

    def loop(self, loop, carry, rows, consts, **options):
        out = super().loop(loop, carry, rows, consts, **options)
        for part in (out.carry, out.kept, out.stored, out.totals):
            part[:] = [np.nan_to_num(a) for a in part]
        return out


class CotangentOfTheWrongSign(FaultyEngine):
    """The first gate's cotangent comes back negated."""

    def loop(self, loop, carry, rows, consts, **options):
        out = super().loop(loop, carry, rows, consts, **options)
        if self.owner(loop, "leaf_cotangents"):
            out.stored[0] = -out.stored[0]
        return out


class CotangentWithoutOneTerm(FaultyEngine):
    """The last parameter's cotangent misses the last row."""

    def loop(self, loop, carry, rows, consts, **options):
        out = super().loop(loop, carry, rows, consts, **options)
        if self.owner(loop, "leaf_cotangents"):
            short = super().loop(loop, carry, [r[:-1] for r in rows], consts, **options)
            out.totals[-1] = short.totals[-1]
        return out


class SharedScale(FaultyEngine):
    """Every sequence sees a little of all others: 0 times their sum, which is NaN if one of them is."""

    def loop(self, loop, carry, rows, consts, **options):
        rows = [r + 0.0 * np.sum(r, axis=1, keepdims=True) for r in rows]
        return super().loop(loop, carry, rows, consts, **options)


# --- faults of a backend: the problem is read, kept or reported wrongly ----------------------------------------------


class Twin(NumpyBackend):
    """The NumPy backend under another name; `kind` is its engine."""

    name, priority = "twin", -1
    kind: Callable[[Any], Any] = staticmethod(lambda problem: UfuncEngine(problem.xp))

    def engine(self, problem):
        return self.kind(problem)


class StartIgnored(Twin):
    """h0 is taken for zeros."""

    def newton(self, problem):
        return super().newton(replace(problem, h0=None))


class StartsGradientTruncated(Twin):
    """The gradient stops at the start of a call."""

    def pull_back(self, problem, states, cotangent):
        found = super().pull_back(problem, states, cotangent)
        return Gradients(found.x, found.params, np.zeros_like(found.h0))


class AlwaysConverged(Twin):
    """The stats say what everyone wants to hear."""

    def newton(self, problem):
        states, stats = super().newton(problem)
        stats.converged, stats.agreement_estimate = True, 0.0
        return states, stats


class AlwaysExact(Twin):
    """Every result is called exact."""

    def newton(self, problem):
        states, stats = super().newton(problem)
        stats.exact = True
        return states, stats


class StridesIgnored(Twin):
    """x is read as if its memory were contiguous."""

    def newton(self, problem):
        x = problem.x
        start = np.ndarray((x.size,), x.dtype, x.base, offset=address(x) - address(x.base)) if x.base is not None else x
        return super().newton(replace(problem, x=np.reshape(start, x.shape)))


def address(a):
    return a.__array_interface__["data"][0]


class InputOverwritten(Twin):
    """x serves as scratch memory."""

    def newton(self, problem):
        out = super().newton(problem)
        if problem.x.flags.writeable:
            problem.x[...] = 0.0
        return out


class WeightsKept(Twin):
    """The first cell of a class is the one that is used ever after."""

    def __init__(self):
        self.seen = {}

    def newton(self, problem):
        arrays = {name: np.array(a) for name, a in problem.cell.arrays.items()}
        first = self.seen.setdefault((type(problem.cell), problem.cell.dtype), arrays)
        return super().newton(replace(problem, cell=problem.cell.replace(**first)))


class MemoryNotCleared(Twin):
    """Rounding that depends on what was there before."""

    def __init__(self):
        self.calls = 0

    def newton(self, problem):
        states, stats = super().newton(problem)
        self.calls += 1
        return states * (1.0 + 1e-6 * (self.calls % 2)), stats


# --- faults of the core, put in its place by monkeypatching -----------------------------------------------------------


def everywhere(monkeypatch, old, new):
    """Replaces a function in every module of the core that holds it by name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("pararnn."):
            for attribute, value in list(vars(module).items()):
                if value is old:
                    monkeypatch.setattr(module, attribute, new)


def scan_with_swapped_operands(monkeypatch):
    """The tree joins two neighbours in the wrong order."""

    def faulty(xp, compose, *rest, **options):
        return tree_states(xp, lambda early, late: compose(late, early), *rest, **options)

    everywhere(monkeypatch, tree_states, faulty)


def window_drops_the_carry(monkeypatch):
    """Every window starts from zeros."""
    whole = segments.WindowSolver.solve

    def faulty(self, *arguments, **options):
        result = whole(self, *arguments, **options)
        return replace(result, end=[np.zeros_like(e) for e in result.end])

    monkeypatch.setattr(segments.WindowSolver, "solve", faulty)


def last_joint_untested(monkeypatch):
    """The test of the joints stops one joint early."""
    whole = segments.WindowSolver._joints_match

    def faulty(self, *arguments, **options):
        match = whole(self, *arguments, **options)
        match[-1] = True
        return match

    monkeypatch.setattr(segments.WindowSolver, "_joints_match", faulty)


def previous_state_off_by_one(monkeypatch):
    """The adjoint linearises about h_t where it should about h_{t-1}."""
    whole = adjoint.previous_rows

    def faulty(*arguments, **options):
        return [np.concatenate([r[1:], r[-1:]]) for r in whole(*arguments, **options)]

    monkeypatch.setattr(adjoint, "previous_rows", faulty)


def clamp_not_differentiated(monkeypatch):
    """Gradients pass where the clamp is flat."""

    def faulty(self, xp, dtype):
        return {n: xp.ones_like(a, dtype=dtype) for n, a in self.arrays.items() if not n.startswith("W_x.")}

    monkeypatch.setattr("pararnn.ChannelwiseCell.clamp_masks", faulty)


@dataclass(frozen=True)
class Fault:
    """A seeded fault, the checks that catch it, and those that cannot see it."""

    seed: Any
    caught_by: tuple[str, ...]
    unseen_by: tuple[str, ...] = ()


# A default solve's states and gradients, with joints and a short last segment.
FORWARD = "lengths.forward[Echo-float64-65-segments]"
GRADIENT = "lengths.gradient[Echo-float64-65-segments]"
PINNED = "pinned.corrections[Echo-float64-1]"

FAULTS = [
    Fault(SwappedAtTheAdjointsJoints, (GRADIENT, "gradients.adjoint_identity[Echo-float64]"), (FORWARD,)),
    Fault(SwappedInTheAdjointsSweep, (GRADIENT, "gradients.automatic_differentiation[Echo]"), (FORWARD,)),
    Fault(SwappedCorrection, (PINNED,), (FORWARD, GRADIENT)),
    Fault(scan_with_swapped_operands, ("pinned.per_step[Echo-float64-1]", "pinned.scan_forms[Echo-assoc]"), (FORWARD,)),
    Fault(window_drops_the_carry, (FORWARD, "laws.windows[Echo-16-8]", "laws.windows[ParaGRU-16-None]")),
    Fault(AdjointForgetsTheFuture, (GRADIENT,), (FORWARD,)),
    Fault(StartIgnored, ("laws.split[Echo-4x64]", "agreement.start[Echo-0.5]", "laws.shift[Echo-1]")),
    Fault(StartsGradientTruncated, ("laws.split_gradients[Echo-4x64]",), (FORWARD,)),
    Fault(AdjointOffByOneJoint, (GRADIENT, "gradients.regimes[Echo-long]"), (FORWARD,)),
    Fault(last_joint_untested, ("hard_regimes.trajectory[Echo-float64-long-(96, 32)]",)),
    Fault(previous_state_off_by_one, ("lengths.gradient[Echo-float64-65-auto]", GRADIENT), (FORWARD,)),
    Fault(NaNMadeZero, ("laws.not_finite[Echo-None-nan]", "laws.not_finite[Echo-4-nan]"), (FORWARD, GRADIENT)),
    Fault(CotangentOfTheWrongSign, ("lengths.gradient[ParaTanh-float32-1-auto]", GRADIENT), (FORWARD,)),
    Fault(CotangentWithoutOneTerm, ("lengths.gradient[ParaGRU-float32-65-auto]", GRADIENT), (FORWARD,)),
    Fault(clamp_not_differentiated, ("gradients.regimes[ParaGRU-clamped]",), (FORWARD,)),
    Fault(SharedScale, ("laws.poisoned_neighbour[Echo-None]",), (FORWARD, GRADIENT)),
    Fault(AlwaysConverged, ("honesty.loose[Echo-one-iteration]", "honesty.converged_means_right[Echo-float32-strong]")),
    Fault(AlwaysExact, ("honesty.loose[ParaGRU-no-correction]",), (FORWARD,)),
    Fault(StridesIgnored, ("memory.layouts[Echo-strided-None]", "memory.layouts[Echo-backward-None]"), (FORWARD,)),
    Fault(InputOverwritten, ("memory.layouts[Echo-surrounded-None]", "memory.layouts[Echo-fortran-None]"), (FORWARD,)),
    Fault(WeightsKept, ("memory.no_stale_weights[Echo]",), (FORWARD,)),
    Fault(MemoryNotCleared, ("memory.repeatable[Echo-None]",), ("lengths.forward[Echo-float32-65-segments]",)),
]


@pytest.fixture
def twin(monkeypatch):
    """A target on the twin backend of a class, registered for one test."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    def make(backend):
        register_backend(backend)
        return Target("twin")

    return make


def failures(target, names):
    """Why each of these checks fails; None where it passes."""
    by_name = {i.name: i for i in instances()}
    return {name: failure_of(by_name[name], target) for name in names}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.seed.__name__)
def test_a_seeded_fault_is_caught(fault, twin, monkeypatch):
    names = (*fault.caught_by, *fault.unseen_by)
    assert failures(twin(Twin()), names) == dict.fromkeys(names), "the twin without the fault must pass"
    backend = Twin()
    if not isinstance(fault.seed, type):
        fault.seed(monkeypatch)
    elif issubclass(fault.seed, FaultyEngine):
        backend.kind = fault.seed
    else:
        backend = fault.seed()
    found = failures(twin(backend), names)
    assert [name for name in fault.caught_by if found[name] is None] == [], "not caught"
    assert {name: found[name] for name in fault.unseen_by if found[name] is not None} == {}
