"""What a backend is: a name, two questions it answers in a sentence, and the solves it does better.

The base class is itself the array backend, which runs on every namespace; a backend inherits whatever it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pararnn.adjoint import Gradients, pull_back
from pararnn.apart import pull_back_apart, solve_apart
from pararnn.arrays import Array
from pararnn.engine import ArrayEngine
from pararnn.front import Front
from pararnn.linear_cells import describe_linear, pull_back_linear, solve_linear
from pararnn.mixing import describe_mixing, pull_back_mixing, solve_mixing
from pararnn.per_step import solve_per_step
from pararnn.problem import Problem
from pararnn.solve import plan_for, solve
from pararnn.stats import NewtonStats

if TYPE_CHECKING:
    from pararnn.linear_attention.inputs import Call


class Backend:
    """Runs problems with array-API calls, on the arrays' own library and device.

    A subclass sets ``name`` and ``priority`` (``auto`` asks the highest first) and overrides what it is good at:
    usually only :meth:`engine`, which the solver and the adjoint are written in terms of. See
    ``docs/add-a-backend.md``.

    >>> Backend().name, Backend().probe() is None
    ('array', True)
    """

    name = "array"
    priority = 0
    # What its array library takes part in, if anything: autograd, transformations, compilers.
    front: Front | None = None
    # Whether it solves packed problems (head, starts, hold). None: if it runs them with the solver and the adjoint of
    # this class, which do.
    packs: bool | None = None
    # Public names that need it, loaded on first use from "module:object": {"ParaRNN": "my_package.layers:ParaRNN"}.
    offers: Mapping[str, str] = MappingProxyType({})

    @property
    def families(self) -> tuple[str, ...]:
        """The kinds of cell that it solves; a backend with a solve of its own says so if it takes more than these."""
        own = type(self).newton is not Backend.newton
        return ("channelwise",) if own else ("channelwise", "mixing", "linear")

    def probe(self) -> str | None:
        """None if this backend can run here, else a sentence that says what is missing."""
        return None

    def accepts(self, problem: Problem) -> str | None:
        """None if this backend can solve `problem`, else a sentence that says why not."""
        return refuse_fused(self.name, problem)

    def engine(self, problem: Problem) -> ArrayEngine:
        """The engine that runs the loops of this problem."""
        return ArrayEngine(problem.xp)

    def newton(self, problem: Problem) -> tuple[Array, NewtonStats]:
        """States (B, T, …) and stats."""
        if problem.cell.family == "mixing":
            states, stats = solve_apart(problem, solve_mixing) if problem.packed else solve_mixing(problem)
            stats.scan_backend = self.name
            return states, stats
        if problem.cell.family == "linear":
            states, stats = solve_apart(problem, solve_linear) if problem.packed else solve_linear(problem)
            stats.scan_backend = self.name
            return states, stats
        engine, pinned = self.engine(problem), pinned_per_step(problem)
        if pinned is not None and problem.packed:
            # A scan over single steps multiplies with zero at a head, and 0 · NaN would pass it.
            states, stats = solve_apart(problem, lambda p: solve_per_step(p, engine, pinned))
        elif pinned is not None:
            states, stats = solve_per_step(problem, engine, pinned)
        else:
            states, stats = solve(problem, engine)
        stats.scan_backend = self.name
        return states, stats

    def pull_back(self, problem: Problem, states: Array, cotangent: Array) -> Gradients:
        """Gradients of Σ cotangent · states."""
        if problem.cell.family == "mixing":
            if problem.packed:
                return pull_back_apart(problem, pull_back_mixing, states, cotangent)
            return pull_back_mixing(problem, states, cotangent)
        if problem.cell.family == "linear":
            if problem.packed:
                return pull_back_apart(problem, pull_back_linear, states, cotangent)
            return pull_back_linear(problem, states, cotangent)
        return pull_back(problem, self.engine(problem), states, cotangent)

    def refuses_recurrence(self, call: Call) -> str | None:
        """None if it has a kernel for this call of linear attention, else a sentence that says why not."""
        return "it has no kernels for linear attention"

    def diagonal_recurrence(self, call: Call, *, exclusive: bool, bonus: Array | None) -> tuple[Array, Array]:
        """Outputs (B, T, H, V) and final states of a call that was not refused, see linear_attention.run."""
        raise NotImplementedError

    def decodes(self, cell: Any, ref: Array) -> bool:
        """Whether :meth:`decode` runs one step of `cell` in a kernel of its own on arrays like `ref`."""
        return False

    def decode(
        self, cell: Any, state: Array, given: Array, projected: bool, out: Array | None, table: Array | None
    ) -> Array:
        """One step, all checked: state (B, …) or a pool (C, …), given (B, I) or its projection; see decode_step."""
        raise NotImplementedError

    def rank_one_recurrence(self, call: Call) -> tuple[Array, Array]:
        """The same for a recurrence with a rank-one update."""
        raise NotImplementedError

    def describe(self, problem: Problem) -> dict[str, object]:
        """What :func:`pararnn.explain` shows: path, segment_len, segments, passes, reason."""
        if problem.cell.family == "mixing":
            return describe_mixing(problem)
        if problem.cell.family == "linear":
            return describe_linear(problem)
        config, pinned = problem.config, pinned_per_step(problem)
        if pinned is not None:
            return {
                "path": "per-step",
                "segment_len": 1,
                "segments": problem.shape[1],
                "passes": pinned + 1,
                "reason": f"{pinned} iterations on every time step were asked for",
            }
        plan = plan_for(problem, self.engine(problem))
        likely = 1 if plan.path == "sequential" else 3 if problem.cell.solve_cell().picard_start else 2
        return {
            "path": plan.path,
            "segment_len": plan.segment_len,
            "segments": plan.segments,
            "passes": likely if (k := config.pinned(problem.shape[1])) is None else k + 1,
            "reason": plan.reason,
        }


def refuse_packed(backend: Backend, problem: Problem) -> str | None:
    """A backend that does not know of packing would run one document into the next."""
    if not problem.packed:
        return None
    packs = getattr(backend, "packs", None)
    if packs is None:
        kind = type(backend)
        inherited = getattr(kind, "newton", None) is Backend.newton
        packs = inherited and getattr(kind, "pull_back", None) is Backend.pull_back
    return None if packs else "it does not take packed sequences (cu_seqlens, reset, mask)"


def pinned_per_step(problem: Problem) -> int | None:
    """The iteration count if the published algorithm was ordered, one unknown per time step; else None."""
    config = problem.config
    return config.pinned(problem.shape[1]) if config.segment_len in (None, 1) else None


def refuse_fused(name: str, problem: Problem) -> str | None:
    """Orders that only a fused kernel can follow are refused, not ignored."""
    config = problem.config
    if config.fused_time_loop:
        return f"{name} has no fused time loop; drop fused_time_loop (chunk_len=… walks windows on every backend)"
    if config.fused_early_exit:
        return f"{name} has no fused early exit; drop fused_early_exit (residual_atol stops a pinned solve early)"
    if config.scan_tile.startswith("thomas"):
        return f"{name} has no scan_tile={config.scan_tile!r}; use 'assoc' or 'seq'"
    if config.jacobian == "autograd":
        return f"{name} has no automatic differentiation; use jacobian='analytic', which is derived from the step"
    return None
