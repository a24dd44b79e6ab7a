"""The NumPy backend: the array solver with loops printed as in-place ufuncs. Runs on any CPU."""

from __future__ import annotations

from pararnn.arrays import namespace_name
from pararnn.backend import Backend
from pararnn.engine import ArrayEngine
from pararnn.problem import Problem
from pararnn_numpy.engine import UfuncEngine


class NumpyBackend(Backend):
    """Problems on NumPy arrays."""

    name = "numpy"
    priority = 10

    def accepts(self, problem: Problem) -> str | None:
        if namespace_name(problem.xp) != "numpy":
            return f"it takes NumPy arrays, and these are {namespace_name(problem.xp)}'s"
        return super().accepts(problem)

    def engine(self, problem: Problem) -> ArrayEngine:
        return UfuncEngine(problem.xp)


backend = NumpyBackend()

__all__ = ["NumpyBackend", "backend"]
