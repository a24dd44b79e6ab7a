"""CpuBackend: problems on NumPy arrays and CPU torch tensors, run as compiled time loops or segments."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from pararnn.adjoint import Gradients
from pararnn.arrays import Array, namespace_name
from pararnn.backend import Backend
from pararnn.engine import ArrayEngine
from pararnn.errors import BackendUnavailableError
from pararnn.lyapunov import largest_exponent
from pararnn.plan import Plan
from pararnn.problem import Problem
from pararnn.solve import plan_for
from pararnn.stats import NewtonStats
from pararnn_cpu.views import back_to_caller, numpy_problem, refuse_arrays, view
from pararnn_numpy.engine import UfuncEngine

# Predicted microseconds without compiled loops from which `auto` takes them: a run of a few milliseconds soon pays for
# the tenth of a second that compiling takes, and what is shorter is mostly run once. It depends on nothing but the
# problem, so that the same call always gives the same bits.
WORTH_COMPILING_US = 5000.0

CUT = (
    "few channels: segments of the compiled loop run side by side, each from a warm-up, and are kept where they meet "
    "bit for bit"
)


class CpuBackend(Backend):
    """Compiled loops. ``exact`` calls the C library's functions instead of vectorised ones (slower)."""

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.name = "cpu_exact" if exact else "cpu"
        # Never taken by `auto` where it is the slower twin.
        self.priority = -10 if exact else 20

    def probe(self) -> str | None:
        # Found, not imported: most problems that `auto` asks about end up elsewhere.
        if find_spec("llvmlite") is None:
            return "llvmlite is not installed; pip install 'pararnn[cpu]'"
        return None

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
        plan = self._loop_plan(problem)
        if plan is None:
            states, stats = super().newton(problem)
        else:
            states, stats = self._time_loop(problem, plan)
        return give(states), stats

    def _time_loop(self, problem: Problem, plan: Plan) -> tuple[Array, NewtonStats]:
        from pararnn_cpu import cut_loop, time_loop

        _, time, _, _ = problem.shape
        cut, again = self._cut(problem), 0
        if cut is None:
            states = time_loop.run_forward(problem, self.exact)
        else:
            states, again = cut_loop.run_forward(problem, cut)
        stats = NewtonStats(
            max_residual=0.0,
            scan_backend=self.name,
            path="sequential" if cut is None else "segments",
            segment_len=time if cut is None else cut.length,
            segments=1 if cut is None else cut.segments,
            windows=1,
            passes=1,
            walked=again / max(1, time),
            agreement_estimate=0.0,
            exact=True,
            converged=True,
            reason=plan.reason if cut is None else CUT,
        )
        stats.later(lyapunov=lambda: largest_exponent(problem, states, self.engine(problem)))
        return states, stats

    def pull_back(self, problem: Problem, states: Array, cotangent: Array) -> Gradients:
        from pararnn_cpu.time_loop import run_backward

        problem, give = numpy_problem(problem)
        states, cotangent = view(states), view(cotangent)
        if self._loop_plan(problem) is None:
            return back_to_caller(super().pull_back(problem, states, cotangent), give)
        return back_to_caller(run_backward(problem, states, cotangent, self.exact), give)

    def describe(self, problem: Problem) -> dict[str, object]:
        found = super().describe(problem)
        cut = self._cut(problem) if self._loop_plan(problem) is not None else None
        if cut is not None:
            found.update(path="segments", segment_len=cut.length, segments=cut.segments, reason=CUT)
        return found

    def _cut(self, problem: Problem) -> Any:
        """How the compiled loop is cut into segments, None if it is not."""
        config = problem.config
        if self.exact or config.segment_len is not None or config.chunk_len is not None:
            return None
        from pararnn_cpu.cut_loop import cut_of

        return cut_of(problem)

    def _loop_plan(self, problem: Problem) -> Plan | None:
        """The plan if the compiled time loop is the way, else None."""
        config = problem.config
        if config.max_iters is not None or config.newton_iters_by_t is not None or problem.guess is not None:
            return None
        plan = plan_for(problem, self.engine(problem))
        return plan if plan.path == "sequential" else None
