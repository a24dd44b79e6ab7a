"""newton_apply and sequential_apply on JAX arrays: pure functions of the cell, the input and the start."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pararnn.adjoint import Gradients
from pararnn.arrays import Array, cast
from pararnn.cells.base import ChannelwiseCell
from pararnn.config import NewtonConfig
from pararnn.linear_cells import solve_linear
from pararnn.newton import checked_problem, run_newton
from pararnn.problem import Problem, make_problem
from pararnn.registry import choose
from pararnn.sequential import run_sequential
from pararnn.stats import NewtonStats
from pararnn_jax import adjoint
from pararnn_jax.evaluate import namespace
from pararnn_jax.pytree import register_cell
from pararnn_jax.report import Report, stats_of
from pararnn_jax.solve import solve
from pararnn_jax.time_loop import joined, time_loop

NAME = "jax"


def newton_apply(
    cell: Any,
    x: Array,
    config: NewtonConfig | None = None,
    *,
    h0: Array | None = None,
    guess: Array | None = None,
    stats: NewtonStats | None = None,
    **packing: Any,
) -> Array:
    """pararnn.newton_apply on JAX arrays, traced or not."""
    problem = checked_problem("newton_apply", cell, x, config, h0, guess, stats, **packing)
    if not _is_traced(problem):
        return run_newton(problem, stats)
    if stats is not None:
        raise TypeError(
            "newton_apply: a traced solve has no values to fill stats with; give stats= to a call outside of JAX's "
            "transformations"
        )
    if problem.cell.family == "linear" and not problem.packed:
        # Plain array code without a value to ask for; JAX differentiates it as it is.
        return solve_linear(problem)[0]
    choice = choose(problem)
    if choice.backend.name != NAME:
        why = choice.refusals.get(NAME, f"scan_backend={problem.config.scan_backend!r} was asked for")
        raise TypeError(
            f"newton_apply: under JAX's transformations only the backend 'jax' runs, others ask arrays for their "
            f"values; here {why}. sequential_apply can be traced"
        )
    cell = known_to_jax(cell)
    return _differentiable(problem.config, cell, problem.x, problem.h0, guess, problem.starts, _marks(problem))


def sequential_apply(cell: Any, x: Array, h0: Array | None = None, **packing: Any) -> Array:
    """pararnn.sequential_apply on JAX arrays: a `lax.scan` that JAX differentiates in either mode, and again."""
    problem = make_problem("sequential_apply", cell, x, h0, **packing)
    if problem.cell.family == "linear" or (problem.packed and problem.cell.family != "channelwise"):
        return run_sequential(replace(problem, xp=namespace))
    return _loop(known_to_jax(cell), problem.x, problem.h0, problem.starts, _marks(problem))


def solve_now(problem: Problem) -> tuple[Array, NewtonStats]:
    """The solve of a checked problem, and its stats."""
    states, report = _solved(
        problem.config, known_to_jax(problem.cell), problem.x, problem.h0, problem.guess, problem.starts,
        _marks(problem),
    )  # fmt: skip
    return states, stats_of(problem, states, report, NAME)


def pull_back_now(problem: Problem, states: Array, cotangent: Array) -> Gradients:
    """Gradients of Σ cotangent · states."""
    cell, x, h0, starts = _pulled_back(
        problem.config, known_to_jax(problem.cell), problem.x, problem.h0, problem.starts, _marks(problem), states,
        cotangent,
    )  # fmt: skip
    return Gradients(x, dict(cell.arrays), h0, starts=starts)


Marks = dict[str, Array]


def _marks(problem: Problem) -> Marks:
    """What a packed problem has besides its starts: integers and truth values, of which nothing is differentiated."""
    every = {name: getattr(problem, name) for name in ("head", "places", "hold")}
    return {name: a for name, a in every.items() if a is not None}


def _is_traced(problem: Problem) -> bool:
    given = (problem.x, problem.h0, problem.guess, problem.starts, *problem.cell.arrays.values())
    given += tuple(_marks(problem).values())
    return any(isinstance(a, jax.core.Tracer) for a in given)


def known_to_jax(cell: ChannelwiseCell) -> ChannelwiseCell:
    """The cell, its class known to JAX."""
    register_cell(type(cell))
    return cell


@jax.jit
def _loop(cell: ChannelwiseCell, x: Array, h0: Array | None, starts: Array | None, marks: Marks) -> Array:
    problem = Problem(cell, x, h0, NewtonConfig(), None, jnp, starts=starts, **marks)
    if not problem.shape[0] or not problem.shape[1]:
        return jnp.zeros(problem.state_shape, problem.dtype)
    return joined(problem, time_loop(problem))


@partial(jax.jit, static_argnums=0)
def _solved(
    config: NewtonConfig, cell: ChannelwiseCell, x: Array, h0: Array | None, guess: Array | None,
    starts: Array | None, marks: Marks,
) -> tuple[Array, Report]:  # fmt: skip
    return solve(Problem(cell, x, h0, config, guess, jnp, starts=starts, **marks))


@partial(jax.jit, static_argnums=0)
def _pulled_back(
    config: NewtonConfig, cell: ChannelwiseCell, x: Array, h0: Array | None, starts: Array | None, marks: Marks,
    states: Array, cotangent: Array,
) -> tuple[ChannelwiseCell, Array, Array, Array | None]:  # fmt: skip
    problem = Problem(cell, x, h0, config, None, jnp, starts=starts, **marks)
    found = adjoint.pull_back(problem, states, cotangent)
    grads = cell._copy(cell.max_recurrent_norm, {name: found.params[name] for name in cell.arrays})
    return grads, found.x, found.h0, found.starts


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(
    config: NewtonConfig, cell: ChannelwiseCell, x: Array, h0: Array | None, guess: Array | None,
    starts: Array | None, marks: Marks,
) -> Array:  # fmt: skip
    """The states, with the adjoint as their derivative."""
    problem = Problem(cell, x, h0, config, guess, jnp)
    if not problem.shape[0] or not problem.shape[1]:
        return jnp.zeros(problem.state_shape, problem.dtype)
    return _solved(config, cell, x, h0, guess, starts, marks)[0]


def _forward(
    config: NewtonConfig, cell: Any, x: Array, h0: Array | None, guess: Array | None, starts: Array | None, marks: Marks
) -> tuple[Array, Any]:
    # Through the differentiable function, so that the gradient can itself be differentiated.
    states = _differentiable(config, cell, x, h0, guess, starts, marks)
    # A guess only says where to start; where it leads does not depend on it.
    kept = (None, guess) if config.recompute else (states, None)
    return states, (cell, x, h0, starts, marks, *kept, None if guess is None else jnp.zeros_like(guess))


def _backward(config: NewtonConfig, kept: Any, cotangent: Array) -> tuple[Any, ...]:
    cell, x, h0, starts, marks, states, guess, none = kept
    if not x.shape[0] or not x.shape[1]:
        blank = jax.tree.map(jnp.zeros_like, (cell, x, h0))
        return *blank, none, jax.tree.map(jnp.zeros_like, starts), None
    if states is None:
        states = _differentiable(config, cell, x, h0, guess, starts, marks)
    found = _pulled_back(config, cell, x, h0, starts, marks, states, cotangent)
    cell_grad, x_grad, h0_grad, starts_grad = found
    h0_grad, starts_grad = (
        None if a is None else cast(jnp, g, a.dtype) for a, g in ((h0, h0_grad), (starts, starts_grad))
    )
    return cell_grad, x_grad, h0_grad, none, starts_grad, None


_differentiable.defvjp(_forward, _backward)
