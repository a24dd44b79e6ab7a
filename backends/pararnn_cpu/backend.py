"""CpuBackend: problems on NumPy arrays and CPU torch tensors, run as compiled time loops or segments."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec

from pararnn.adjoint import Gradients
from pararnn.arrays import Array, namespace_name
from pararnn.backend import Backend
from pararnn.engine import ArrayEngine
from pararnn.errors import BackendUnavailableError
from pararnn.lyapunov import largest_exponent
from pararnn.plan import Plan, step_us
from pararnn.problem import Problem
from pararnn.programs import programs_of
from pararnn.solve import plan_for
from pararnn.stats import NewtonStats
from pararnn_cpu.cut import CUT, Cut, cut_of
from pararnn_cpu.views import back_to_caller, numpy_problem, refuse_arrays, view
from pararnn_numpy.engine import UfuncEngine

# Predicted microseconds without compiled loops from which `auto` takes them: a run of a few milliseconds soon pays for
# the tenth of a second that compiling takes, and what is shorter is mostly run once. It depends on nothing but the
# problem, so that the same call always gives the same bits.
WORTH_COMPILING_US = 5000.0


class CpuBackend(Backend):
    """Compiled loops. ``exact`` calls the C library's functions instead of vectorised ones (slower)."""

    packs = True

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.name = "cpu_exact" if exact else "cpu"
        # Never taken by `auto` where it is the slower twin.
        self.priority = -10 if exact else 20

    def probe(self) -> str | None:
        return _absent()

    def accepts(self, problem: Problem) -> str | None:
        sentence = refuse_arrays(problem) or super().accepts(problem)
        if sentence is not None:
            return sentence
        if problem.config.scan_backend == "auto" and (small := self._not_worth_it(problem)):
            return small
        try:
            import llvmlite.binding  # noqa: F401
        except Exception as error:
            sentence = f"llvmlite does not import ({type(error).__name__}: {error}); pip install 'pararnn[cpu]'"
            if problem.config.scan_backend == "auto":
                return sentence
            raise BackendUnavailableError(f"scan_backend={self.name!r} cannot run here: {sentence}") from error
        return None

    def _not_worth_it(self, problem: Problem) -> str | None:
        plain = namespace_name(problem.xp) == "numpy"
        other = UfuncEngine(problem.xp) if plain else ArrayEngine(problem.xp)
        batch, time, _, width = problem.shape
        us = time * step_us(programs_of(problem.cell, marks=problem.marks).advance, batch * width, other.costs)
        if us >= WORTH_COMPILING_US:
            # Segments may be faster than the loop.
            free = problem.config.replace(segment_len=None, chunk_len=None)
            us = plan_for(replace(problem, config=free), other).predicted_us
        if us >= WORTH_COMPILING_US:
            return None
        library = "NumPy" if plain else "torch"
        return f"this problem takes {library} about {us / 1000:.2g} ms; compiling would not pay"

    def engine(self, problem: Problem) -> ArrayEngine:
        from pararnn_cpu.engine import CompiledEngine

        return CompiledEngine(problem.xp, self.exact)

    def newton(self, problem: Problem) -> tuple[Array, NewtonStats]:
        problem, give = numpy_problem(problem)
        cut = self._cut(problem)
        plan = None if cut else self._loop_plan(problem)
        if cut is None and plan is None:
            states, stats = super().newton(problem)
            return give(states), stats
        from pararnn_cpu import cut_loop, time_loop

        _, time, _, _ = problem.shape
        stats = NewtonStats.of_loop(self.name, time, plan.reason if plan else CUT)
        if cut is None:
            states = time_loop.run_forward(problem, self.exact)
        else:
            states, again = cut_loop.run_forward(problem, cut)
            stats.path, stats.segment_len, stats.segments = "segments", cut.length, cut.segments
            stats.walked = again / time
        stats.later(lyapunov=lambda: largest_exponent(problem, states, self.engine(problem)))
        return give(states), stats

    def pull_back(self, problem: Problem, states: Array, cotangent: Array) -> Gradients:
        from pararnn_cpu.time_loop import run_backward

        # A gradient is linear and has one result, whichever way the states were found.
        problem, give = numpy_problem(problem)
        return back_to_caller(run_backward(problem, view(states), view(cotangent), self.exact), give)

    def describe(self, problem: Problem) -> dict[str, object]:
        found = super().describe(problem)
        if cut := self._cut(problem):
            found.update(path="segments", segment_len=cut.length, segments=cut.segments, passes=1, reason=CUT)
        return found

    def _cut(self, problem: Problem) -> Cut | None:
        """How the compiled loop is cut into segments, None if it is not."""
        config = problem.config
        if self.exact or problem.packed or not _free(problem):
            return None
        if config.segment_len is not None or config.chunk_len is not None:
            return None
        return cut_of(problem)

    def _loop_plan(self, problem: Problem) -> Plan | None:
        """The plan if the compiled time loop is the way, else None."""
        if not _free(problem):
            return None
        plan = plan_for(problem, self.engine(problem))
        return plan if plan.path == "sequential" else None


@lru_cache(maxsize=1)
def _absent() -> str | None:
    """Found, not imported: most problems that `auto` asks about end up elsewhere."""
    try:
        found = find_spec("llvmlite")
    except Exception as error:
        return f"llvmlite cannot be looked up ({type(error).__name__}: {error}); pip install 'pararnn[cpu]'"
    return None if found else "llvmlite is not installed; pip install 'pararnn[cpu]'"


def _free(problem: Problem) -> bool:
    """Whether no number of iterations and no guess was given."""
    return problem.config.pinned(problem.shape[1]) is None and problem.guess is None
