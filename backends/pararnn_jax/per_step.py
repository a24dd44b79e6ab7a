"""The published algorithm, one unknown per time step, as a traced loop of at most K iterations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from pararnn.arrays import Array, epsilon
from pararnn.per_step import StepEquations, planned_sweeps
from pararnn.problem import Problem
from pararnn.solve import solve_cell_of
from pararnn_jax.report import Report, report_of


def solve_per_step(problem: Problem, iterations: int) -> tuple[list[Array], Report]:
    """Public slots (B, T, D) after at most `iterations` Newton iterations on all time steps of a chunk at once."""
    from pararnn_jax.solve import by_chunks

    cell = solve_cell_of(problem.cell, problem.config)

    def run(part: Problem, carried: tuple[Array, list[Array]]) -> tuple[Any, list[Array], Report]:
        h0, error = carried
        equations = _Traced(replace(part, h0=h0), cell, error)
        report = equations.solve(iterations)
        public = list(cell.decode(jnp, *equations.states))
        last = [s[:, -1, :] for s in public]
        h0 = last[0] if len(last) == 1 else jnp.stack(last, axis=1)
        return (h0, equations.end_error), public, report

    start = problem.start()
    h0 = start[0] if len(start) == 1 else jnp.stack(start, axis=1)
    none = [jnp.zeros_like(s) for s in cell.encode(jnp, *start)]
    _, slots, reports = by_chunks(problem, (h0, none), run)
    return slots, Report(*(jnp.max(jnp.concatenate(list(column)), axis=0) for column in zip(*reports, strict=True)))


class _Traced(StepEquations):
    """`StepEquations` whose stopping rules are arrays."""

    def solve(self, iterations: int) -> Report:
        """Newton from the first guess, tried again with more Picard sweeps while the residual stays high."""
        sweeps, retries = planned_sweeps(self.problem)
        found = self._attempt(iterations, sweeps)
        for more in retries:
            low = found[2].residual <= self.problem.config.picard_retry_atol
            again = lambda _, more=more: self._attempt(iterations, more)  # noqa: E731
            found = lax.cond(low, lambda found: found, again, found)
        self.states, self.end_error, report = found
        return report

    def _attempt(self, iterations: int, sweeps: int) -> tuple[list[Array], list[Array], Report]:
        config, omega = self.problem.config, float(self.problem.config.omega)

        # What was found at the states goes along with them: it tests them, and makes the next correction.
        def wanted(now: tuple[Array, list[Array], tuple[Any, ...]]) -> Array:
            made, _, (largest, _, _) = now
            go = made < iterations
            return go if config.residual_atol is None else go & ~(largest < config.residual_atol)

        def body(now: tuple[Array, list[Array], tuple[Any, ...]]) -> tuple[Array, list[Array], tuple[Any, ...]]:
            made, states, (_, residual, jac) = now
            delta = self.correction(residual, jac)
            states = [s + (d if omega == 1.0 else omega * d) for s, d in zip(states, delta, strict=True)]
            return made + 1, states, self.evaluate_at(states)

        states = self.first_guess(sweeps)
        made, states, found = lax.while_loop(wanted, body, (jnp.asarray(0), states, self.evaluate_at(states)))
        largest, residual, jac = found
        # The next correction is the first-order estimate of the error that is left, with what came in.
        left = self.correction(residual, jac, self.error)
        estimate = jnp.zeros((), states[0].dtype)
        for s, d, log in zip(states, left, self.programs.logarithmic, strict=True):
            size = jnp.where(jnp.abs(s) < jnp.inf, jnp.abs(s), 0.0)
            scale = 1.0 if log else jnp.maximum(jnp.max(size), 1e-30)
            estimate = jnp.maximum(estimate, jnp.max(jnp.abs(d)) / scale)
        if self.cell is not self.problem.cell:
            # In other coordinates every step rounds differently from the loop, and such steps add up.
            estimate = estimate + epsilon(states[0].dtype) * math.sqrt(states[0].shape[1])
        report = report_of(states[0].dtype, largest, made, made + 1, estimate, sweeps=sweeps)
        return states, [d[:, -1, :] for d in left], report
