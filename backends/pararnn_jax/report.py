"""What a traced solve says about itself: numbers on the device, and NewtonStats that read them when asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pararnn.arrays import Array, epsilon
from pararnn.backend import pinned_per_step
from pararnn.lyapunov import largest_exponent
from pararnn.problem import Problem
from pararnn.solve import plan_for, solver_for, tolerance
from pararnn.stats import NewtonStats
from pararnn_jax.engine import JaxEngine
from pararnn_jax.segments import TracedSolver

TRACED = (
    "this solve is part of a traced JAX program, where NewtonStats have no values; read them outside of JAX's "
    "transformations, or run a pinned solve with residual_fail=None through newton_apply"
)
WALKED = "the segments did not all settle within the tolerance, so the sequence was walked as well"


class Report(NamedTuple):
    """Scalars on the device; `walked` is the share of channels that the time loop finished."""

    residual: Array
    corrections: Array
    passes: Array
    estimate: Array
    walked: Array
    sweeps: Array


def report_of(
    dtype: Any,
    residual: Any = 0.0,
    corrections: Any = 0,
    passes: Any = 1,
    estimate: Any = 0.0,
    walked: Any = 0.0,
    sweeps: Any = 0,
) -> Report:
    """A report of numbers and arrays; the defaults are those of a time loop."""
    whole = [jnp.asarray(a, int) for a in (corrections, passes, sweeps)]
    real = [jnp.asarray(a, dtype) for a in (residual, estimate, walked)]
    return Report(real[0], whole[0], whole[1], real[1], real[2], whole[2])


def _no_value() -> Any:
    raise TypeError(TRACED)


def stats_of(problem: Problem, states: Array, report: Report, name: str) -> NewtonStats:
    """The stats of a solve; what is on the device is waited for when it is first read."""
    engine, config = JaxEngine(problem), problem.config
    time = problem.shape[1]
    if isinstance(states, jax.core.Tracer):
        stats = NewtonStats(scan_backend=name)
        stats.later(**{field.name: _no_value for field in fields(NewtonStats) if field.name != "scan_backend"})
        return stats
    pinned = pinned_per_step(problem)
    chunk = min(config.chunk_len or time, time)
    stats = NewtonStats(scan_backend=name)
    if pinned is None:
        plan = plan_for(problem, engine)
        solver = solver_for(problem, engine, plan, TracedSolver)
        public, native = solver.public, engine.repeats_bits(states)
        stats.path, stats.segment_len, stats.segments, stats.reason = (
            plan.path, plan.segment_len, plan.segments, plan.reason,
        )  # fmt: skip
        sizes = [min(chunk, time - first) for first in range(0, time, chunk)]
        stats.windows = sum(len(list(plan.windows(size))) for size in sizes)
        stats.picard_iters = int(solver.picard and plan.path == "segments")
    else:
        public, native = problem.cell.solve_cell() is problem.cell or config.coords == "native", True
        stats.path, stats.segment_len, stats.segments, stats.windows = "per-step", 1, chunk, -(-time // chunk)
        stats.reason = f"{pinned} iterations on every time step were asked for"
        stats.later(picard_iters=lambda: int(report.sweeps))
    rounding = 4.0 * epsilon(jnp.float64 if states.dtype == jnp.float64 else jnp.float32)

    def exact() -> bool:
        measured = float(report.residual) if pinned is not None else float(report.estimate)
        return public and native and measured == 0.0

    def estimate() -> float:
        found = float(report.estimate)
        # Joints that match where a function's bits depend on its place: the loop may still differ by rounding.
        return found if exact() or math.isnan(found) or pinned is not None else max(found, rounding)

    accept = tolerance(config, problem) * (1.0 if pinned is not None else 5.0)
    later: dict[str, Callable[[], Any]] = {
        "max_residual": lambda: float(report.residual),
        "iters": lambda: int(report.corrections),
        "passes": lambda: int(report.passes),
        "walked": lambda: float(report.walked),
        "exact": exact,
        "agreement_estimate": estimate,
        "converged": lambda: bool(estimate() <= accept),
        "residual_history": lambda: (float(report.residual),),
        "lyapunov": lambda: largest_exponent(problem, states, engine),
    }
    if stats.path == "segments" and config.pinned(time) is None:
        planned, why = stats.path, stats.reason
        later["path"] = lambda: "sequential" if float(report.walked) == 1.0 else planned
        later["reason"] = lambda: WALKED if float(report.walked) else why
    stats.later(**later)
    return stats
