"""JaxBackend: the solver as one traced program, and the front that makes it differentiable."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from pararnn.adjoint import Gradients
from pararnn.arrays import Array, namespace_name
from pararnn.backend import Backend, pinned_per_step
from pararnn.engine import ArrayEngine
from pararnn.front import Front
from pararnn.problem import Problem
from pararnn.stats import NewtonStats


class JaxFront(Front):
    """The front for JAX arrays and tracers; JAX itself is imported with the first of them, not with this package."""

    packages = ("jax", "jaxlib")
    packs = True

    def newton_apply(
        self, cell: Any, x: Array, config: Any, *, h0: Any, guess: Any, stats: Any, **packing: Any
    ) -> Array:
        from pararnn_jax.apply import newton_apply

        return newton_apply(cell, x, config, h0=h0, guess=guess, stats=stats, **packing)

    def sequential_apply(self, cell: Any, x: Array, h0: Any, **packing: Any) -> Array:
        from pararnn_jax.apply import sequential_apply

        return sequential_apply(cell, x, h0, **packing)

    def meet(self, kind: type) -> None:
        from pararnn_jax.pytree import register_cell

        register_cell(kind)


@lru_cache(maxsize=1)
def _has_jax() -> bool:
    return find_spec("jax") is not None


class JaxBackend(Backend):
    """Problems on JAX arrays of any platform, traced or not."""

    name = "jax"
    # Above the plain array backend, which asks arrays for their values and runs one operation after the other.
    priority = 1
    front = JaxFront()
    packs = True
    offers: Mapping[str, str] = MappingProxyType(
        {"newton_apply_over_time": "pararnn_jax.sharding:newton_apply_over_time"}
    )

    def probe(self) -> str | None:
        return None if _has_jax() else "jax is not installed; pip install 'pararnn[jax]'"

    def accepts(self, problem: Problem) -> str | None:
        if namespace_name(problem.xp) != "jax":
            return f"it takes JAX arrays, and these are {namespace_name(problem.xp)}'s"
        if problem.packed and pinned_per_step(problem) is not None:
            return "it does not pin an iteration count on every time step of packed sequences; the array backend does"
        return super().accepts(problem)

    def engine(self, problem: Problem) -> ArrayEngine:
        from pararnn_jax.engine import JaxEngine

        return JaxEngine(problem)

    def newton(self, problem: Problem) -> tuple[Array, NewtonStats]:
        from pararnn_jax.apply import solve_now

        return solve_now(problem)

    def pull_back(self, problem: Problem, states: Array, cotangent: Array) -> Gradients:
        from pararnn_jax.apply import pull_back_now

        return pull_back_now(problem, states, cotangent)

    def example_namespace(self) -> Any:
        """The namespace in which the conformance suite hands it arrays."""
        import jax.numpy

        return jax.numpy
