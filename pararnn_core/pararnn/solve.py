"""The default solve of a whole sequence: plan, windows one after the other, and the report."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from pararnn.arrays import Array, dtype_name, epsilon, quiet
from pararnn.cells.base import ChannelwiseCell
from pararnn.config import NewtonConfig
from pararnn.engine import ArrayEngine
from pararnn.layout import Window, gate_rows, input_rows, times_of
from pararnn.lyapunov import largest_exponent
from pararnn.plan import Plan, make_plan
from pararnn.problem import Problem
from pararnn.programs import programs_of
from pararnn.segments import DEFAULT_MAX_PASSES, Settings, WindowSolver
from pararnn.stats import NewtonStats

WindowSolverKind = TypeVar("WindowSolverKind", bound=WindowSolver)

# Relative accuracy of the joint test. A tenth of the public agreement, because gradients amplify a state's error.
DEFAULT_TOL = {"float64": 1e-11, "float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-3}


def solve_cell_of(cell: ChannelwiseCell, config: NewtonConfig) -> ChannelwiseCell:
    """The cell in the coordinates that `config.coords` asks for."""
    if config.coords == "native":
        return cell
    chosen = cell.solve_cell()
    if config.coords == "log" and chosen is cell:
        raise TypeError(
            f"coords='log': {type(cell).__name__} has no log coordinates (ParaSLSTM has); use coords='auto'"
        )
    return chosen


def check_structure(cell: ChannelwiseCell, config: NewtonConfig) -> bool:
    """Whether tangents keep the diagonal only; refuses a structure that the cell does not have."""
    wanted, own = config.jac_structure, cell.jac_structure
    if wanted is None or wanted == own:
        return False
    if wanted == "diag":
        return True
    others = "" if own == "diag" else " or 'diag'"
    raise ValueError(
        f"jac_structure={wanted!r}: {type(cell).__name__} has a '{own}' Jacobian; use None, '{own}'{others}"
    )


def picard_sweeps(cell: ChannelwiseCell, config: NewtonConfig) -> int:
    """Picard sweeps before the first pass; refuses an order to a cell that has none."""
    offered = cell.solve_cell().picard_start
    if config.picard_iters and not offered:
        raise TypeError(
            f"picard_iters={config.picard_iters}: {type(cell).__name__} has no Picard start (ParaSLSTM has); "
            "use None or 0"
        )
    if config.picard_iters is not None:
        return config.picard_iters
    return 1 if offered else 0


def tolerance(config: NewtonConfig, problem: Problem) -> float:
    return float(config.tol) if config.tol is not None else DEFAULT_TOL[dtype_name(problem.dtype)]


def plan_for(problem: Problem, engine: ArrayEngine) -> Plan:
    """The path that `solve` takes for this problem."""
    config = problem.config
    cell = solve_cell_of(problem.cell, config)
    programs = programs_of(cell, diagonal=check_structure(problem.cell, config), marks=problem.marks)
    batch, time, _, width = problem.shape
    return make_plan(
        programs,
        engine.costs,
        time=min(time, config.chunk_len or time),
        lanes=batch * width,
        item=8 if dtype_name(problem.work_dtype) == "float64" else 4,
        segment_len=config.segment_len,
        warmup=config.warmup,
        long_memory=cell.long_memory,
    )


def _windows(plan: Plan, problem: Problem) -> list[Window]:
    """All windows of the sequence; chunk_len, if set, also ends a window."""
    batch, time, _, width = problem.shape
    chunk = problem.config.chunk_len or max(time, 1)
    return [
        Window(first + begin, length, count, batch, width)
        for first in range(0, time, chunk)
        for begin, length, count in plan.windows(min(chunk, time - first))
    ]


def solve(problem: Problem, engine: ArrayEngine) -> tuple[Array, NewtonStats]:
    """States (B, T, …) and what was done."""
    plan = plan_for(problem, engine)
    states, stats, estimate = _solve_with(problem, engine, plan)
    if problem.config.pinned(problem.shape[1]) is None and not stats.converged and estimate is not None:
        # An error accepted in one window outgrew the tolerance in a later one, or what would not settle has to be
        # finished in public coordinates, of which the solver's are only a rounding away at each step. The channels
        # concerned take the time loop's states, the others keep theirs bit for bit.
        xp, (batch, time, _, width) = problem.xp, problem.shape
        loop = replace(plan, path="sequential", segment_len=time, segments=1)
        walked, again, _ = _solve_with(problem, engine, loop)
        kept = estimate <= 5.0 * tolerance(problem.config, problem)
        shape = (batch, *([1] * (len(problem.state_shape) - 2)), width)
        states = xp.where(xp.reshape(kept, shape), states, walked)
        stats.agreement_estimate = float(xp.max(xp.where(kept, estimate, xp.zeros_like(estimate))))
        stats.converged, stats.passes = True, stats.passes + 1
        stats.exact = stats.agreement_estimate == 0.0 and again.exact
        stats.walked = 1.0
        stats.reason = "the segments did not all settle within the tolerance, so the sequence was walked as well"
        if bool(xp.all(~kept)):
            stats.path, stats.exact = "sequential", again.exact
    if problem.shape[0] and problem.shape[1]:
        stats.later(lyapunov=lambda: largest_exponent(problem, states, engine))
    return states, stats


def solver_for(problem: Problem, engine: ArrayEngine, plan: Plan, kind: type[WindowSolverKind]) -> WindowSolverKind:
    """The solver of the problem's windows, in the coordinates and with the tolerances that its configuration means."""
    config = problem.config
    # The time loop needs no better coordinates, and in the public ones it is the oracle bit for bit.
    exact = config.exact or problem.packed
    as_is = plan.path == "sequential" or exact
    cell = problem.cell if as_is else solve_cell_of(problem.cell, config)
    programs = programs_of(cell, diagonal=check_structure(problem.cell, config), marks=problem.marks)
    sweeps = picard_sweeps(problem.cell, config)
    tol = tolerance(config, problem)
    settings = Settings(
        tol=tol,
        # Rounding that no evaluation order avoids may add to the tolerance, well inside the public agreement.
        accept=5.0 * tol,
        # A tolerance is met by a whole channel, so what one document holds would show in the last bits of another; and
        # padding behind a joint would move the state by what the joint leaves open.
        exact=exact,
        warmup=config.warmup,
        max_passes=config.max_passes or DEFAULT_MAX_PASSES,
        corrections=config.pinned(problem.shape[1]),
        omega=float(config.omega),
    )
    public = cell is problem.cell
    picard = bool(sweeps) and cell.picard_start and problem.guess is None
    return kind(engine, cell, programs, settings, picard, public)


def _solve_with(problem: Problem, engine: ArrayEngine, plan: Plan) -> tuple[Array, NewtonStats, Array | None]:
    """States, what was done, and the estimated error by channel (B·D,), None where all is the time loop's."""
    xp = problem.xp
    solver = solver_for(problem, engine, plan, WindowSolver)
    cell, public, accept = solver.cell, solver.public, solver.settings.accept
    stats = NewtonStats(
        path=plan.path, segment_len=plan.segment_len, segments=plan.segments, reason=plan.reason, max_residual=0.0
    )
    batch, time, _, _ = problem.shape
    worst: Array | float = 0.0
    with quiet(xp):
        params = [xp.tile(p, (batch,)) for p in cell.recurrent(xp, problem.work_dtype)]
        first = problem.start()
        start = [xp.reshape(s, (-1,)) for s in cell.encode(xp, *first)]
        zero = [xp.reshape(s, (-1,)) for s in cell.encode(xp, *(xp.zeros_like(s) for s in first))]
        guess = None if problem.guess is None else guess_slots(problem, cell)
        writer = engine.writer(problem.state_shape, problem.dtype, problem.x)
        error: list[Array] | None = None
        history: list[float] = []
        walked = 0.0
        for window in _windows(plan, problem):
            gates = gate_rows(problem, window, input_rows(problem, window))
            starts = None if guess is None else guessed_starts(xp, guess, window)
            result = solver.solve(window, gates, params, start, error, zero, starts)
            start, error = result.end, result.error
            rows = cell.decode(xp, *(s[1:, :] for s in result.states))
            writer.write(window.start, [times_of(xp, r, window) for r in rows])
            if result.estimate is not None:
                worst = xp.maximum(worst + xp.zeros_like(result.estimate), result.estimate)
            report = result.report
            stats.windows += 1
            stats.passes = max(stats.passes, report.passes)
            stats.iters = max(stats.iters, report.corrections)
            stats.max_residual = max(stats.max_residual, report.mismatch)
            walked += report.walked * (window.stop - window.start)
            history += report.history
        states = writer.finish()
    stats.picard_iters = int(solver.picard and plan.path == "segments")
    stats.residual_history = tuple(history)
    stats.walked = walked / time if time else 0.0
    stats.exact = isinstance(worst, float) and public and engine.repeats_bits(start[0])
    stats.agreement_estimate = 0.0 if isinstance(worst, float) else float(xp.max(worst))
    if not stats.exact:
        # Joints that match where a function's bits depend on its place: the loop may still differ by rounding.
        stats.agreement_estimate = max(stats.agreement_estimate, 4.0 * epsilon(start[0].dtype))
    stats.converged = stats.agreement_estimate <= accept
    return states, stats, None if isinstance(worst, float) else worst


def guess_slots(problem: Problem, cell: ChannelwiseCell) -> list[Array]:
    """A caller's guess in solve coordinates, by slot (B, T, D)."""
    from pararnn.arrays import cast

    slots = problem.slots_of(cast(problem.xp, problem.guess, problem.work_dtype))
    return list(cell.encode(problem.xp, *slots))


def guessed_starts(xp, guess: list[Array], window: Window) -> list[Array]:
    """The guessed states just before segments 1 … C-1, by slot ((C-1)·B·D,)."""
    picked = []
    for g in guess:
        steps = [g[:, window.start + c * window.length - 1, :] for c in range(1, window.segments)]
        picked.append(xp.reshape(xp.stack(steps), (-1,)) if steps else xp.reshape(g[:, :0, :], (-1,)))
    return picked
