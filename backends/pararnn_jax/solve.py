"""A whole solve as one traced function: path, chunks, windows, and the time loop for what does not settle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pararnn.arrays import Array
from pararnn.backend import pinned_per_step
from pararnn.layout import Window, gate_rows, input_rows, times_of
from pararnn.plan import Plan
from pararnn.problem import Problem
from pararnn.solve import guess_slots, guessed_starts, plan_for, solver_for
from pararnn_jax.engine import JaxEngine
from pararnn_jax.per_step import solve_per_step
from pararnn_jax.report import Report, report_of
from pararnn_jax.segments import TracedSolver
from pararnn_jax.time_loop import joined, time_loop


def solve(problem: Problem) -> tuple[Array, Report]:
    """States (B, T, …) and what was done; nothing here asks for a value."""
    pinned = pinned_per_step(problem)
    if pinned is not None:
        slots, report = solve_per_step(problem, pinned)
    else:
        engine = JaxEngine(problem)
        plan = plan_for(problem, engine)
        if plan.path == "sequential" and problem.config.pinned(problem.shape[1]) is None:
            return joined(problem, _loop(problem, engine)), report_of(problem.work_dtype)
        slots, report = _by_segments(problem, engine, plan)
    states = joined(problem, slots)
    fail = problem.config.residual_fail
    if problem.config.pinned(problem.shape[1]) is not None and fail is not None:
        # A traced program cannot raise: what the gate would refuse is no number.
        states = jnp.where(report.residual <= fail, states, jnp.nan)
    return states, report


class _Carried(NamedTuple):
    """What passes from chunk to chunk: slots before it, their error, both in solve coordinates as (m,)."""

    start: list[Array]
    error: list[Array]


def _loop(problem: Problem, engine: JaxEngine) -> list[Array]:
    """The time loop, chunk by chunk."""

    def run(part: Problem, start: list[Array]) -> tuple[list[Array], list[Array], None]:
        slots = time_loop(part, start, engine.unroll)
        return [s[:, -1, :] for s in slots], slots, None

    _, slots, _ = by_chunks(problem, problem.start(), run)
    return slots


def by_chunks(
    problem: Problem, carry: Any, run: Callable[[Problem, Any], tuple[Any, list[Array], Any]]
) -> tuple[Any, list[Array], list[Any]]:
    """Runs ``run(part, carry)`` on every chunk_len steps: the last carry, slots of the whole, and reports.

    Full chunks are one `lax.scan`, so the program does not grow with their number; their reports come stacked.
    """
    batch, time, _, _ = problem.shape
    chunk = min(problem.config.chunk_len or time, time)
    full, pieces, reports = time // chunk, [], []

    def part(first: Any, steps: int) -> Problem:
        def cut(a: Array) -> Array:
            return lax.dynamic_slice_in_dim(a, first, steps, axis=1)

        guess, head, hold = (None if a is None else cut(a) for a in (problem.guess, problem.head, problem.hold))
        return replace(problem, x=cut(problem.x), guess=guess, h0=None, head=head, hold=hold)

    if full == 1:
        carry, slots, report = run(part(0, chunk) if chunk < time else problem, carry)
        pieces.append(slots)
        reports.append(jax.tree.map(lambda a: a[None], report))
    else:

        def body(now: Any, c: Array) -> tuple[Any, Any]:
            new, slots, report = run(part(c * chunk, chunk), now)
            return new, (slots, report)

        carry, (stacked, report) = lax.scan(body, carry, jnp.arange(full))
        pieces.append([jnp.moveaxis(s, 0, 1).reshape((batch, full * chunk, -1)) for s in stacked])
        reports.append(report)
    if full * chunk < time:
        carry, slots, report = run(part(full * chunk, time - full * chunk), carry)
        pieces.append(slots)
        reports.append(jax.tree.map(lambda a: a[None], report))
    whole = pieces[0] if len(pieces) == 1 else [jnp.concatenate(p, axis=1) for p in zip(*pieces, strict=True)]
    return carry, whole, reports


def _by_segments(problem: Problem, engine: JaxEngine, plan: Plan) -> tuple[list[Array], Report]:
    solver = solver_for(problem, engine, plan, TracedSolver)
    cell, (batch, _, _, _) = solver.cell, problem.shape
    params = [jnp.tile(p, (batch,)) for p in cell.recurrent(jnp, problem.work_dtype)]
    first = problem.start()
    start = [s.reshape((-1,)) for s in cell.encode(jnp, *first)]
    zero = [s.reshape((-1,)) for s in cell.encode(jnp, *(jnp.zeros_like(s) for s in first))]

    def run(part: Problem, carried: _Carried) -> tuple[_Carried, list[Array], Any]:
        start, error = carried
        guess = None if part.guess is None else guess_slots(part, cell)
        pieces, found = [], []
        for begin, length, count in plan.windows(part.shape[1]):
            window = Window(begin, length, count, batch, cell.d_h)
            gates = gate_rows(part, window, input_rows(part, window))
            starts = None if guess is None else guessed_starts(jnp, guess, window)
            result = solver.run(window, gates, params, start, error, zero, starts)
            start, error = result.end, result.error
            pieces.append([times_of(jnp, r, window) for r in cell.decode(jnp, *result.rows)])
            found.append((result.estimate, result.passes, result.corrections, result.mismatch))
        slots = [p[0] if len(p) == 1 else jnp.concatenate(p, axis=1) for p in zip(*pieces, strict=True)]
        report = [jnp.max(jnp.stack(list(column)), axis=0) for column in zip(*found, strict=True)]
        return _Carried(start, error), slots, report

    none = _Carried(start, [jnp.zeros_like(s) for s in start])
    _, slots, reports = by_chunks(problem, none, run)
    columns = [jnp.concatenate(list(column)) for column in zip(*reports, strict=True)]
    estimate, passes, corrections, mismatch = (jnp.max(column, axis=0) for column in columns)
    if solver.settings.corrections is not None:
        return slots, report_of(problem.work_dtype, mismatch, corrections, passes, jnp.max(estimate))
    # An error accepted in one window may have outgrown the tolerance in a later one; what never settled is infinite.
    kept = estimate <= solver.settings.accept
    grid = kept.reshape((batch, 1, cell.d_h))

    def finish(slots: list[Array]) -> list[Array]:
        loop = time_loop(problem, unroll=engine.unroll)
        return [jnp.where(grid, s, w) for s, w in zip(slots, loop, strict=True)]

    slots = lax.cond(jnp.all(kept), lambda slots: slots, finish, slots)
    left = jnp.max(jnp.where(kept, estimate, 0.0))
    walked = jnp.mean(jnp.where(kept, 0.0, 1.0))
    passes = passes + jnp.any(~kept)
    return slots, report_of(problem.work_dtype, mismatch, corrections, passes, left, walked)
