"""CpuBackend: problems on NumPy arrays and CPU torch tensors, run as compiled time loops or segments."""

from __future__ import annotations

from pararnn.adjoint import Gradients
from pararnn.arrays import Array, namespace_name
from pararnn.backend import Backend
from pararnn.engine import ArrayEngine
from pararnn.lyapunov import largest_exponent
from pararnn.plan import Plan
from pararnn.problem import Problem
from pararnn.solve import plan_for
from pararnn.stats import NewtonStats


class CpuBackend(Backend):
    """Compiled loops. ``exact`` calls the C library's functions instead of vectorised ones (slower)."""

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.name = "cpu_exact" if exact else "cpu"
        # Never taken by `auto` where it is the slower twin.
        self.priority = -10 if exact else 20

    def probe(self) -> str | None:
        try:
            import llvmlite.binding  # noqa: F401
        except Exception as error:
            return f"llvmlite does not import ({type(error).__name__}: {error}); pip install 'pararnn[cpu]'"
        return None

    def accepts(self, problem: Problem) -> str | None:
        if namespace_name(problem.xp) != "numpy":
            return f"it takes NumPy arrays, and these are {namespace_name(problem.xp)}'s"
        return super().accepts(problem)

    def engine(self, problem: Problem) -> ArrayEngine:
        from pararnn_cpu.engine import CompiledEngine

        return CompiledEngine(problem.xp, self.exact)

    def newton(self, problem: Problem) -> tuple[Array, NewtonStats]:
        from pararnn_cpu.time_loop import run_forward

        plan = self._loop_plan(problem)
        if plan is None:
            return super().newton(problem)
        states = run_forward(problem, self.exact)
        _, time, _, _ = problem.shape
        stats = NewtonStats(
            max_residual=0.0,
            scan_backend=self.name,
            path="sequential",
            segment_len=time,
            segments=1,
            windows=1,
            passes=1,
            agreement_estimate=0.0,
            exact=True,
            converged=True,
            reason=plan.reason,
        )
        stats.later(lyapunov=lambda: largest_exponent(problem, states, self.engine(problem)))
        return states, stats

    def pull_back(self, problem: Problem, states: Array, cotangent: Array) -> Gradients:
        from pararnn_cpu.time_loop import run_backward

        if self._loop_plan(problem) is None:
            return super().pull_back(problem, states, cotangent)
        return run_backward(problem, states, cotangent, self.exact)

    def _loop_plan(self, problem: Problem) -> Plan | None:
        """The plan if the compiled time loop is the way, else None."""
        config = problem.config
        if config.max_iters is not None or config.newton_iters_by_t is not None or problem.guess is not None:
            return None
        plan = plan_for(problem, self.engine(problem))
        return plan if plan.path == "sequential" else None
