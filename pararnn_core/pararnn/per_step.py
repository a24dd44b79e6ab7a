"""Newton with one unknown per time step: the published algorithm, for a pinned number of iterations.

::

    r_t = f(h_{t-1}, x_t) - h_t,   δ_t = J_t δ_{t-1} + r_t,   h_t ← h_t + ω δ_t

from h_t = f(0, x_t) (f(h0, x_0) at t = 0). Source: Lim et al. 2024 (DEER, arXiv 2309.12252), eq. 6; ParaRNN
(arXiv 2510.21450), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from pararnn.arrays import Array, Namespace, cast, epsilon, quiet
from pararnn.cells.base import ChannelwiseCell
from pararnn.engine import ArrayEngine
from pararnn.graph import array_function
from pararnn.lyapunov import largest_exponent
from pararnn.picard import frozen_gate_states, published_sweeps
from pararnn.problem import Problem
from pararnn.programs import StepPrograms, programs_of
from pararnn.scans import scan_block, scan_diag
from pararnn.solve import check_structure, picard_sweeps, solve_cell_of, tolerance
from pararnn.stats import NewtonStats

RETRIES = (1, 3, 5)


def solve_per_step(problem: Problem, engine: ArrayEngine, iterations: int) -> tuple[Array, NewtonStats]:
    """At most `iterations` Newton iterations on all time steps of a window at once; stats carry the final estimate.

    One window holds the whole sequence, or ``chunk_len`` steps.
    """
    xp, config = problem.xp, problem.config
    cell = solve_cell_of(problem.cell, config)
    batch, time, _, _ = problem.shape
    chunk = min(config.chunk_len or time, time)
    stats = NewtonStats(
        path="per-step",
        segment_len=1,
        segments=chunk,
        max_residual=0.0,
        agreement_estimate=0.0,
        exact=cell is problem.cell,
        reason=f"{iterations} iterations on every time step were asked for",
    )
    pieces: list[Array] = []
    h0, error = problem.h0, None
    with quiet(xp):
        for first in range(0, time if batch else 0, max(chunk, 1)):
            span = slice(first, min(first + chunk, time))
            guess = None if problem.guess is None else problem.guess[:, span, ...]
            window = StepEquations(replace(problem, x=problem.x[:, span, :], h0=h0, guess=guess), cell, error)
            _solve_window(window, iterations)
            public = cell.decode(xp, *window.states)
            rows = public[0] if len(public) == 1 else xp.stack(public, axis=2)
            h0, error = rows[:, -1, ...], window.end_error
            pieces.append(cast(xp, rows, problem.dtype))
            _add(stats, window.stats)
    if pieces:
        out = pieces[0] if len(pieces) == 1 else xp.concat(pieces, axis=1)
        stats.later(lyapunov=lambda: largest_exponent(problem, out, engine))
    else:
        out = xp.zeros(problem.state_shape, dtype=problem.dtype, device=problem.device)
    stats.converged = stats.agreement_estimate <= tolerance(config, problem)
    return out, stats


def _add(whole: NewtonStats, part: NewtonStats) -> None:
    """Adds a window's stats to the sequence's; a NaN stays."""
    whole.windows += 1
    whole.iters, whole.passes = max(whole.iters, part.iters), max(whole.passes, part.passes)
    whole.picard_iters = max(whole.picard_iters, part.picard_iters)
    whole.residual_history += part.residual_history
    whole.max_residual = _larger(whole.max_residual, part.max_residual)
    whole.agreement_estimate = _larger(whole.agreement_estimate, part.agreement_estimate)
    whole.exact = whole.exact and part.exact


def _larger(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _solve_window(window: StepEquations, iterations: int) -> None:
    """Newton from the window's first guess, tried again with more Picard sweeps while the residual stays high."""
    sweeps, retries = planned_sweeps(window.problem)
    window.iterate(iterations, sweeps)
    for more in retries:
        if not window.stats.max_residual <= window.problem.config.picard_retry_atol:
            window.iterate(iterations, more)


def planned_sweeps(problem: Problem) -> tuple[int, tuple[int, ...]]:
    """Picard sweeps before Newton, and the larger numbers of them to try while the residual stays high."""
    config, cell = problem.config, problem.cell
    sweeps = picard_sweeps(cell, config)
    if not cell.solve_cell().picard_start or problem.guess is not None:
        return 0, ()
    if config.picard_iters is None:
        sweeps = published_sweeps(problem.shape[1])
    adapt = config.picard_iters is None if config.picard_adapt is None else config.picard_adapt
    return sweeps, tuple(more for more in RETRIES if more > sweeps) if adapt else ()


class StepEquations:
    """The equations r(h) = 0 of one stretch of time, on slots (B, T, D), and their approximate solution.

    `error` is the estimated error of the state before it by slot (B, D), or None where that state is exact.
    """

    states: list[Array]
    end_error: list[Array]
    stats: NewtonStats

    def __init__(self, problem: Problem, cell: ChannelwiseCell, error: list[Array] | None) -> None:
        xp = self.xp = problem.xp
        self.cell, self.problem, self.error = cell, problem, error
        self.programs: StepPrograms = programs_of(cell, diagonal=check_structure(problem.cell, problem.config))
        loop = self.programs.step_and_jacobians
        self.evaluate: Callable[..., tuple[Array, ...]] = array_function(xp, loop.program, loop.compiled)
        self.params = cell.recurrent(xp, problem.work_dtype)
        weight, bias = (cast(xp, a, problem.work_dtype) for a in cell.W_x)
        batch, time, _, width = problem.shape
        projected = cast(xp, problem.x, problem.work_dtype) @ xp.matrix_transpose(weight) + bias
        split = xp.reshape(projected, (batch, time, len(cell.gates), width))
        self.gates = [split[:, :, g, :] for g in range(len(cell.gates))]
        self.start = list(cell.encode(xp, *problem.start()))

    def previous(self, states: list[Array]) -> list[Array]:
        """The states one step earlier."""
        xp = self.xp
        return [
            xp.concat([xp.expand_dims(first, axis=1), s[:, :-1, :]], axis=1)
            for first, s in zip(self.start, states, strict=True)
        ]

    def first_guess(self, sweeps: int) -> list[Array]:
        xp, problem = self.xp, self.problem
        if problem.guess is not None:
            return list(self.cell.encode(xp, *problem.slots_of(cast(xp, problem.guess, problem.work_dtype))))
        if sweeps:
            return frozen_gate_states(problem, self.cell, self.gates, self.params, sweeps)
        zeros = [xp.zeros_like(self.gates[0])] * problem.cell.state_slots
        blank = list(self.cell.encode(xp, *zeros))
        previous = [
            xp.concat([xp.expand_dims(first, axis=1), z[:, 1:, :]], axis=1)
            for first, z in zip(self.start, blank, strict=True)
        ]
        return list(self.cell.step(xp, *previous, *self.gates, *self.params))

    def evaluate_at(self, states: list[Array]) -> tuple[Array, list[Array], list[list[Array]]]:
        """max|r|, r by slot, and J by entry."""
        xp, programs = self.xp, self.programs
        out = self.evaluate(xp, *self.previous(states), *self.gates, *self.params)
        full = [_spread(xp, value, states[0]) for value in out]
        # Equal infinities (an empty memory in log coordinates) leave no residual.
        residual = [
            xp.where(new == s, xp.zeros_like(s), new - s) for new, s in zip(full[: programs.size], states, strict=True)
        ]
        largest = xp.max(xp.stack([xp.max(xp.abs(r)) for r in residual]))
        zero = xp.zeros_like(states[0])
        table = dict(zip(programs.j.where, full[programs.size :], strict=True))
        size = range(programs.size)
        return largest, residual, [[table.get((i, j), zero) for j in size] for i in size]

    def correction(
        self, residual: list[Array], jac: list[list[Array]], initial: list[Array] | None = None
    ) -> list[Array]:
        """δ by slot, from `initial` before the first step."""
        xp, method = self.xp, self.problem.config.scan_tile
        if len(residual) == 1:
            first = None if initial is None else initial[0]
            return [scan_diag(jac[0][0], residual[0], initial=first, method=method)]
        whole = xp.stack([xp.stack(row, axis=2) for row in jac], axis=2)
        first = None if initial is None else xp.stack(initial, axis=1)
        delta = scan_block(whole, xp.stack(residual, axis=2), initial=first, method=method)
        return [delta[:, :, s, :] for s in range(len(residual))]

    def iterate(self, iterations: int, sweeps: int) -> None:
        """At most `iterations` iterations from the guess of `sweeps` sweeps; fills `states`, `end_error`, `stats`."""
        xp, config = self.xp, self.problem.config
        states, omega, made, history = self.first_guess(sweeps), float(config.omega), 0, []
        while True:
            found, residual, jac = self.evaluate_at(states)
            largest = float(found)
            history.append(largest)
            if made == iterations or (config.residual_atol is not None and largest < config.residual_atol):
                break
            delta = self.correction(residual, jac)
            states = [s + (d if omega == 1.0 else omega * d) for s, d in zip(states, delta, strict=True)]
            made += 1
        # The next correction is the first-order estimate of the error that is left, with what came in.
        left = self.correction(residual, jac, self.error)
        estimate = 0.0
        for s, d, log in zip(states, left, self.programs.logarithmic, strict=True):
            size = xp.where(xp.abs(s) < float("inf"), xp.abs(s), xp.zeros_like(s))
            scale = 1.0 if log else max(float(xp.max(size)), 1e-30)
            estimate = _larger(estimate, float(xp.max(xp.abs(d))) / scale)
        if self.cell is not self.problem.cell:
            # In other coordinates every step rounds differently from the loop, and such steps add up.
            estimate += epsilon(states[0].dtype) * math.sqrt(states[0].shape[1])
        self.states, self.end_error = states, [d[:, -1, :] for d in left]
        self.stats = NewtonStats(
            max_residual=largest,
            iters=made,
            picard_iters=sweeps,
            residual_history=tuple(history),
            passes=made + 1,
            agreement_estimate=estimate,
            exact=largest == 0.0,
        )


def _spread(xp: Namespace, value: Array | float, like: Array) -> Array:
    return xp.full_like(like, value) if isinstance(value, float) else xp.broadcast_to(value, like.shape)
