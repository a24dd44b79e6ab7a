"""The time loop as one `lax.scan`: the oracle, which JAX differentiates, and the path where a loop is fastest."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from pararnn.arrays import Array, cast
from pararnn.layout import Window, gate_rows, input_rows, lanes_of, times_of
from pararnn.problem import Problem
from pararnn_jax.evaluate import namespace


def time_loop(problem: Problem, start: list[Array] | None = None, unroll: int = 1) -> list[Array]:
    """The public slots after each step, (B, T, D) each in the work dtype, from the cell's own step."""
    cell, (batch, time, _, width) = problem.cell, problem.shape
    if cell.family == "mixing":
        return _mixing_loop(problem, unroll)
    window = Window(0, time, 1, batch, width)
    gates = gate_rows(problem, window, input_rows(problem, window))
    params = lanes_of(jnp, cell.recurrent(jnp, problem.work_dtype), window)
    first = tuple(s.reshape((-1,)) for s in (problem.start() if start is None else start))

    marks, count = problem.marks, len(cell.gates)

    def body(state: tuple[Array, ...], row: list[Array]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        if marks.head:
            fresh = row[count + 1 : count + 1 + len(state)] if marks.starts else [jnp.zeros_like(s) for s in state]
            state = tuple(jnp.where(row[count] > 0.5, f, s) for f, s in zip(fresh, state, strict=True))
        made = cell.step(namespace, *state, *row[:count], *params)
        new = tuple(cast(jnp, s, problem.work_dtype) for s in made)
        if marks.hold:
            new = tuple(jnp.where(row[-1] > 0.5, s, n) for s, n in zip(state, new, strict=True))
        return new, new

    _, rows = lax.scan(body, first, gates, unroll=unroll)
    return [times_of(jnp, r, window) for r in rows]


def joined(problem: Problem, slots: list[Array]) -> Array:
    """Slots (B, T, D) as the result's array."""
    whole = slots[0] if len(slots) == 1 else jnp.stack(slots, axis=2)
    return cast(jnp, whole, problem.dtype)


def _mixing_loop(problem: Problem, unroll: int) -> list[Array]:
    """The loop of a cell whose step multiplies by matrices: one product with the batch at every step."""
    cell: Any = problem.cell
    work = problem.work_dtype
    weight, bias = (cast(jnp, a, work) for a in cell.W_x)
    params = cell.recurrent(jnp, work)
    inputs = [jnp.moveaxis(g, 1, 0) for g in cell.gate_inputs(jnp, cast(jnp, problem.x, work), weight, bias)]

    def body(state: tuple[Array, ...], row: list[Array]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        # Made anew in every trace of this function, because it remembers what it has made of the matrices.
        mix = cell.mixer(jnp, work)
        new = tuple(cast(jnp, s, work) for s in cell.step(namespace, mix, *state, *row, *params))
        return new, new

    _, rows = lax.scan(body, tuple(problem.start()), inputs, unroll=unroll)
    return [jnp.moveaxis(r, 0, 1) for r in rows]
