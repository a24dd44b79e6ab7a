"""The solve of a mixing cell: segments as rows of one matrix product, their joints settled, or the time loop."""

from __future__ import annotations

import math

import numpy as np

from pararnn.arrays import Array, cast, epsilon, quiet
from pararnn.mixing.joints import (
    DEFAULT_MAX_PASSES,
    ArrayJoints,
    Gain,
    JointSettings,
    Settled,
    gap,
    put_rows,
    settle,
    warmup_gain,
)
from pararnn.mixing.plan import MixPlan, plan_mixing
from pararnn.mixing.rows import Rows, running_product
from pararnn.problem import Problem
from pararnn.sequential import run_sequential
from pararnn.solve import solve_cell_of, tolerance
from pararnn.stats import NewtonStats


def solve_mixing(problem: Problem) -> tuple[Array, NewtonStats]:
    """States (B, T, …) and what was done."""
    xp = problem.xp
    plan = plan_mixing(problem)
    stats = NewtonStats(
        path=plan.path, segment_len=plan.segment_len, segments=plan.segments, reason=plan.reason, max_residual=0.0
    )
    if plan.path == "sequential":
        return _walked(problem, stats), stats
    with quiet(xp):
        states, settled = _by_segments(problem, plan, stats)
    if settled is None or bool(np.all(settled)):
        return states, stats
    # What does not settle is the time loop's, from the first step on: a later start would have to be exact.
    spent, why, left = stats.passes, stats.reason, stats.agreement_estimate
    walked = _walked(problem, stats)
    stats.passes, stats.walked = spent + 1, 1.0
    stats.reason = f"the sequence was walked after all, because {why}"
    if not bool(np.any(settled)):
        return walked, stats
    kept = xp.asarray(settled, device=problem.device)
    states = xp.where(xp.reshape(kept, (len(settled), *([1] * (len(problem.state_shape) - 1)))), states, walked)
    stats.path, stats.exact, stats.agreement_estimate = "segments", False, left
    return states, stats


def _walked(problem: Problem, stats: NewtonStats) -> Array:
    stats.path, stats.exact, stats.converged = "sequential", True, True
    stats.agreement_estimate, stats.max_residual = 0.0, 0.0
    stats.windows, stats.walked = max(stats.windows, 1), 0.0
    stats.passes = max(stats.passes, 1)
    return run_sequential(problem)


def _by_segments(problem: Problem, plan: MixPlan, stats: NewtonStats) -> tuple[Array, np.ndarray | None]:
    """The states by segments, and by sequence whether they are to be trusted (None: asked for as they are)."""
    xp, config = problem.xp, problem.config
    cell = solve_cell_of(problem.cell, config)
    rows = cell.rows(problem)
    tol = tolerance(config, problem)
    batch, time, _, _ = problem.shape
    pinned = config.pinned(time)
    settings = JointSettings(
        tol=tol,
        accept=5.0 * tol,
        max_passes=config.max_passes or plan.max_passes or DEFAULT_MAX_PASSES,
        corrections=pinned,
        omega=1.0 if pinned is None else float(config.omega),
        residual_atol=config.residual_atol,
        bounds=rows.bounds,
        logarithmic=rows.logarithmic,
    )
    start = list(cell.encode(xp, *problem.start()))
    blank = list(cell.encode(xp, *(xp.zeros_like(s) for s in problem.start())))
    guess = None
    if problem.guess is not None:
        guess = list(cell.encode(xp, *problem.slots_of(cast(xp, problem.guess, problem.work_dtype))))
    error, worst = np.zeros(batch), np.zeros(batch)
    settled = np.ones(batch, bool)
    pieces: list[list[Array]] = []
    history: list[float] = []
    growths: list[float] = []
    for first, length, count in plan.windows(time):
        x = cast(xp, problem.x[:, first : first + length * count, :], problem.work_dtype)
        window = SegmentRun(xp, rows, rows.gates(x), batch, count, length)
        if count == 1:
            # A rest shorter than a segment: the loop itself.
            ends = window.walk(start)
            out = Settled(np.ones(batch, bool), error, error)
        else:
            measure: Gain | None = None
            if guess is None:
                starts, measure = window.warmed(plan.warmup, blank, start)
            else:
                at = [first + c * length - 1 for c in range(1, count)]
                starts = [xp.stack([g[:, t, ...] for t in at], axis=1) for g in guess]
            joints = ArrayJoints(xp, start, starts, window.run, rows.entries, settings, window.diagonals, measure)
            out = settle(joints, settings, error)
            ends = window.ends()
        start, error = ends, out.end_error
        settled &= out.settled
        history += out.history
        stats.windows += 1
        stats.passes = max(stats.passes, out.passes)
        stats.iters = max(stats.iters, out.corrections)
        stats.max_residual = max(stats.max_residual, out.history[-1] if out.history else 0.0)
        worst = np.where(settled, np.fmax(worst, out.error), 0.0)
        if not math.isnan(out.growth):
            growths.append(out.growth / length)
        if pinned is None and not bool(np.all(settled)):
            stats.reason = out.gave_up
            if not bool(np.any(settled)):
                return problem.x, settled
        pieces.append(window.states())
    public = [cell.decode(xp, *piece) for piece in pieces]
    joined = [p[0] if len(p) == 1 else xp.stack(list(p), axis=2) for p in public]
    states = joined[0] if len(joined) == 1 else xp.concat(joined, axis=1)
    stats.residual_history = tuple(history)
    stats.lyapunov = max(growths, default=math.nan)
    # Rows of another number are not multiplied in the same order, so the loop may differ by rounding throughout.
    stats.exact = False
    stats.agreement_estimate = max(float(np.max(worst)), 4.0 * epsilon(problem.work_dtype))
    stats.converged = stats.agreement_estimate <= settings.accept
    return cast(xp, states, problem.dtype), None if pinned is not None else settled


class SegmentRun:
    """One window of C segments of L steps: runs rows of it, and keeps the states of the last run of each."""

    def __init__(self, xp, rows: Rows, gates: list[Array], batch: int, count: int, length: int) -> None:
        self.xp, self.rows = xp, rows
        self.batch, self.count, self.length = batch, count, length
        # Rows are ordered (B, C), so that this is a view of the layout in time.
        self.gates = [xp.reshape(g, (batch * count, length, *g.shape[2:])) for g in gates]
        self.kept: list[Array] = []
        # The states before each step, after the first pass.
        self.before: list[Array] = []

    def at(self, l: int, index: Array | None) -> list[Array]:
        now = [g[:, l, ...] for g in self.gates]
        return now if index is None else [self.xp.take(g, index, axis=0) for g in now]

    def run(self, index: Array | None, starts: list[Array]) -> tuple[list[Array], list[Array] | None]:
        """The first pass without diagonals; what has to run again is likely to be corrected again."""
        xp, slots = self.xp, starts
        first = not self.kept
        tangent = self.rows.identity(starts[0])
        columns: list[list[Array]] = [[s] for s in slots] if first else [[] for _ in slots]
        for l in range(self.length):
            if first:
                slots = self.rows.step(slots, self.at(l, index))
            else:
                slots, tangent = self.rows.step_tangent(slots, tangent, self.at(l, index))
            for column, value in zip(columns, slots, strict=True):
                column.append(value)
        made = [xp.stack(column, axis=1) for column in columns]
        if first:
            self.before = [a[:, :-1, ...] for a in made]
            self.kept = [a[:, 1:, ...] for a in made]
            return slots, None
        self.before = []
        if index is None:
            self.kept = made
        else:
            self.kept = [put_rows(xp, a, index, b) for a, b in zip(self.kept, made, strict=True)]
        return slots, tangent

    def diagonals(self) -> list[Array]:
        """The diagonals of the first pass, from its states."""
        return running_product(self.rows, self.rows.tape(self.before, self.gates))

    def walk(self, slots: list[Array]) -> list[Array]:
        """The plain loop over the window, whose one segment is the whole of it."""
        columns: list[list[Array]] = [[] for _ in slots]
        for l in range(self.length):
            slots = self.rows.step(slots, self.at(l, None))
            for column, value in zip(columns, slots, strict=True):
                column.append(value)
        self.kept = [self.xp.stack(column, axis=1) for column in columns]
        return slots

    def warmed(self, steps: int, blank: list[Array], first: list[Array]) -> tuple[list[Array], Gain]:
        """Starts (B, C-1, …) after `steps` plain steps from nothing, and the gain that the mismatches will show."""
        xp, steps = self.xp, min(steps, self.length)
        shape = (self.batch, self.count)

        def spread(a: Array) -> Array:
            wide = xp.broadcast_to(xp.expand_dims(a, axis=1), (*shape, *a.shape[1:]))
            return xp.reshape(wide, (shape[0] * shape[1], *a.shape[1:]))

        slots = [spread(a) for a in blank]
        if steps == self.length:
            # The whole segment is run, so the first one can be run from where it truly starts.
            slots = [
                xp.reshape(
                    xp.concat([xp.expand_dims(f, axis=1), xp.reshape(a, (*shape, *f.shape[1:]))[:, 1:, ...]], axis=1),
                    a.shape,
                )
                for f, a in zip(first, slots, strict=True)
            ]
        began = slots
        for l in range(self.length - steps, self.length):
            slots = self.rows.step(slots, self.at(l, None))
        starts = [xp.reshape(a, (*shape, *a.shape[1:]))[:, :-1, ...] for a in slots]

        def gain(mismatch: list[Array], scale: list[float]) -> np.ndarray:
            """How far the pass and the warm-up are apart at the end, against how far they were at its beginning."""
            l = self.length - steps
            if l:
                true = [k[:, l - 1, ...] for k in self.kept]
            else:
                ends = [xp.reshape(k[:, -1, ...], (*shape, *k.shape[2:]))[:, :-1, ...] for k in self.kept]
                true = [
                    xp.reshape(xp.concat([xp.expand_dims(f, axis=1), e], axis=1), (shape[0] * shape[1], *f.shape[1:]))
                    for f, e in zip(first, ends, strict=True)
                ]
            apart = [xp.reshape(gap(xp, a, b), (*shape, *a.shape[1:])) for a, b in zip(true, began, strict=True)]
            apart = [a[:, :-1, ...] for a in apart]
            return warmup_gain(xp, apart, mismatch, scale, self.length / max(steps, 1))

        return starts, gain

    def ends(self) -> list[Array]:
        return [self.xp.reshape(k, (self.batch, -1, *k.shape[2:]))[:, -1, ...] for k in self.kept]

    def states(self) -> list[Array]:
        """The window's slots (B, W, …)."""
        return [self.xp.reshape(k, (self.batch, self.count * self.length, *k.shape[2:])) for k in self.kept]


def describe_mixing(problem: Problem) -> dict[str, object]:
    return plan_mixing(problem).described()
