"""Newton with one unknown per time step: the published algorithm, for a pinned number of iterations.

::

    r_t = f(h_{t-1}, x_t) - h_t,   δ_t = J_t δ_{t-1} + r_t,   h_t ← h_t + ω δ_t

from h_t = f(0, x_t) (f(h0, x_0) at t = 0). Source: Lim et al. 2024 (DEER, arXiv 2309.12252), eq. 6; ParaRNN
(arXiv 2510.21450), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pararnn.arrays import Array, Namespace, cast, quiet
from pararnn.cells.base import ChannelwiseCell
from pararnn.engine import ArrayEngine
from pararnn.graph import compile_array
from pararnn.lyapunov import largest_exponent
from pararnn.picard import frozen_gate_states, published_sweeps
from pararnn.problem import Problem
from pararnn.programs import StepPrograms, programs_of
from pararnn.scans import scan_block, scan_diag
from pararnn.solve import check_structure, picard_sweeps, solve_cell_of, tolerance
from pararnn.stats import NewtonStats

_RETRIES = (1, 3, 5)


def solve_per_step(problem: Problem, engine: ArrayEngine, iterations: int) -> tuple[Array, NewtonStats]:
    """At most `iterations` Newton iterations on all T states at once; stats carry the final estimate."""
    xp, config = problem.xp, problem.config
    cell = solve_cell_of(problem.cell, config)
    system = _System(problem, cell)
    sweeps = picard_sweeps(problem.cell, config)
    offered = problem.cell.solve_cell().picard_start
    if offered and config.picard_iters is None:
        sweeps = published_sweeps(problem.shape[1])
    adapt = config.picard_adapt
    if adapt is None:
        adapt = config.picard_iters is None
    with quiet(xp):
        states, stats = _iterate(problem, system, iterations, sweeps)
        if adapt and offered:
            for more in _RETRIES:
                if more <= sweeps or stats.max_residual <= config.picard_retry_atol:
                    continue
                states, stats = _iterate(problem, system, iterations, more)
        public = cell.decode(xp, *states)
    rows = public[0] if len(public) == 1 else xp.stack(public, axis=2)
    out = cast(xp, rows, problem.dtype)
    stats.converged = stats.agreement_estimate <= tolerance(config, problem)
    stats._lyapunov = (lambda: largest_exponent(problem, out, engine)) if out.shape[0] and out.shape[1] else math.nan
    return out, stats


class _System:
    """The equations r(h) = 0 of one problem, on slots (B, T, D)."""

    def __init__(self, problem: Problem, cell: ChannelwiseCell) -> None:
        xp = self.xp = problem.xp
        self.cell, self.problem = cell, problem
        self.programs: StepPrograms = programs_of(cell, diagonal=check_structure(problem.cell, problem.config))
        loop = self.programs.step_and_jacobians
        if "array" not in loop.compiled:
            loop.compiled["array"] = compile_array(loop.program)
        self.evaluate: Callable[..., tuple[Array, ...]] = loop.compiled["array"]
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

    def residual_and_correction(self, states: list[Array], method: str) -> tuple[float, list[Array]]:
        """max|r| and δ by slot."""
        xp, programs = self.xp, self.programs
        out = self.evaluate(xp, *self.previous(states), *self.gates, *self.params)
        shape = states[0].shape
        full = [_spread(xp, value, states[0], shape) for value in out]
        # Equal infinities (an empty memory in log coordinates) leave no residual.
        residual = [
            xp.where(new == s, xp.zeros_like(s), new - s)
            for new, s in zip(full[: programs.size], states, strict=True)
        ]
        largest = max(float(xp.max(xp.abs(r))) for r in residual)
        entries = full[programs.size :]
        if programs.size == 1:
            jac = entries[0] if entries else xp.zeros_like(states[0])
            return largest, [scan_diag(jac, residual[0], method=method)]
        zero = xp.zeros_like(states[0])
        table = dict(zip(programs.j.where, entries, strict=True))
        rows = [
            xp.stack([table.get((i, j), zero) for j in range(programs.size)], axis=2) for i in range(programs.size)
        ]
        delta = scan_block(xp.stack(rows, axis=2), xp.stack(residual, axis=2), method=method)
        return largest, [delta[:, :, s, :] for s in range(programs.size)]


def _spread(xp: Namespace, value: Array | float, like: Array, shape: tuple[int, ...]) -> Array:
    return xp.full_like(like, value) if isinstance(value, float) else xp.broadcast_to(value, shape)


def _iterate(problem: Problem, system: _System, iterations: int, sweeps: int) -> tuple[list[Array], NewtonStats]:
    xp, config = problem.xp, problem.config
    batch, time, _, _ = problem.shape
    stats = NewtonStats(
        path="per-step",
        segment_len=1,
        segments=time,
        windows=1,
        picard_iters=sweeps,
        reason=f"{iterations} iterations on every time step were asked for",
    )
    states = system.first_guess(sweeps)
    if not batch or not time:
        stats.max_residual = stats.agreement_estimate = 0.0
        stats.exact = True
        return states, stats
    history = []
    while True:
        residual, delta = system.residual_and_correction(states, config.scan_tile)
        history.append(residual)
        small = config.residual_atol is not None and residual < config.residual_atol
        if stats.iters == iterations or small:
            break
        omega = float(config.omega)
        states = [s + (d if omega == 1.0 else omega * d) for s, d in zip(states, delta, strict=True)]
        stats.iters += 1
    stats.max_residual, stats.residual_history = residual, tuple(history)
    stats.passes = stats.iters + 1
    # The next correction is the first-order estimate of the error that is left.
    worst = 0.0
    for s, d in zip(states, delta, strict=True):
        size = xp.where(xp.abs(s) < float("inf"), xp.abs(s), xp.zeros_like(s))
        scale = max(float(xp.max(size)), 1e-30)
        left = float(xp.max(xp.abs(d))) / scale
        worst = left if math.isnan(left) else max(worst, left)
        if math.isnan(worst):
            break
    stats.agreement_estimate = worst
    stats.exact = residual == 0.0
    return states, stats
