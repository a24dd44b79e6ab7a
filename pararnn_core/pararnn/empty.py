"""Problems without a step or without a sequence: the same answer on every backend."""

from __future__ import annotations

from pararnn.adjoint import Gradients
from pararnn.arrays import Array
from pararnn.backend import Backend
from pararnn.problem import Problem
from pararnn.stats import NewtonStats


class NothingToDo(Backend):
    """Stands in for the backend `name` where B or T is zero."""

    def __init__(self, name: str) -> None:
        self.name = name

    def newton(self, problem: Problem) -> tuple[Array, NewtonStats]:
        states = problem.xp.zeros(problem.state_shape, dtype=problem.dtype, device=problem.device)
        return states, NewtonStats(
            max_residual=0.0,
            scan_backend=self.name,
            path="sequential",
            agreement_estimate=0.0,
            exact=True,
            converged=True,
            reason="there is nothing to do",
        )

    def describe(self, problem: Problem) -> dict[str, object]:
        return {"path": "sequential", "segment_len": 0, "segments": 0, "passes": 0, "reason": "there is nothing to do"}

    def pull_back(self, problem: Problem, states: Array, cotangent: Array) -> Gradients:
        xp, cell = problem.xp, problem.cell
        h0 = xp.zeros((problem.shape[0], *cell.state_shape), dtype=problem.dtype, device=problem.device)
        starts = None if problem.starts is None else xp.zeros_like(problem.starts)
        params = {n: xp.zeros_like(a) for n, a in cell.arrays.items()}
        return Gradients(xp.zeros_like(problem.x), params, h0, starts=starts)
