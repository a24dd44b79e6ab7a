"""The oracle: the plain time loop, written to be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pararnn.arrays import Array, cast, quiet
from pararnn.drives import with_drives
from pararnn.front import front_of, told
from pararnn.problem import Problem, make_problem

# Steps whose gate inputs are projected at once: one matrix product instead of many small ones, bounded memory.
PROJECTED_STEPS = 4096


def sequential_apply(
    cell: Any,
    x: Array,
    h0: Array | None = None,
    *,
    cu_seqlens: Any = None,
    reset: Array | None = None,
    mask: Array | None = None,
    **drives: Any,
) -> Array:
    """The states of `cell` on `x`, one step after the other.

    ::

        h_t = f(h_{t-1}, W_x x_t + b),   t = 0 … T-1,   h_{-1} = h0 or 0

    Everything else in this library is measured against this loop.

    Args:
        cell: a ChannelwiseCell, its arrays of the same library and dtype as `x`.
        x: (B, T, I), floating. Half precision is computed in float32 and returned in half.
        h0: (B, D), or (B, S, D) for S slots; zeros if None. Cast to the dtype of the computation.
        drives: per-step inputs of cells that have them, as to newton_apply.
        cu_seqlens, reset, mask: as for newton_apply.

    Returns:
        (B, T, D) for one slot, (B, T, S, D) for S slots, in x's library, dtype and device.

    Raises:
        TypeError: an integer or foreign array, or a cell of another dtype.
        ValueError: a shape that does not fit.

    >>> import numpy as np
    >>> from pararnn import ParaGRU
    >>> sequential_apply(ParaGRU(2, 3, seed=0), np.zeros((1, 4, 2), dtype=np.float32)).shape
    (1, 4, 3)
    """
    cell, x = with_drives("sequential_apply", cell, x, drives)
    front = front_of(x)
    if front is not None:
        return front.sequential_apply(cell, x, h0, **told(front, cu_seqlens=cu_seqlens, reset=reset, mask=mask))
    return run_sequential(make_problem("sequential_apply", cell, x, h0, cu_seqlens=cu_seqlens, reset=reset, mask=mask))


def run_sequential(problem: Problem) -> Array:
    """The loop itself, on a checked problem."""
    xp, cell = problem.xp, problem.cell
    batch, time, _, width = problem.shape
    params = cell.recurrent(xp, problem.work_dtype)
    weight, bias = (cast(xp, a, problem.work_dtype) for a in cell.W_x)
    state = tuple(problem.start())
    if cell.family == "mixing":
        return _run_mixing(problem, weight, bias, params, state)
    rows = []
    with quiet(xp):
        for t in range(time):
            if t % PROJECTED_STEPS == 0:
                block = cast(xp, problem.x[:, t : min(t + PROJECTED_STEPS, time), :], problem.work_dtype)
                split = (batch, block.shape[1], len(cell.gates), width)
                gates = xp.reshape(block @ xp.matrix_transpose(weight) + bias, split)
            now = gates[:, t % PROJECTED_STEPS, :, :]
            inputs = [now[:, g, :] for g in range(len(cell.gates))]
            state = stepped(problem, t, state, lambda *s: cell.step(xp, *s, *inputs, *params))  # noqa: B023
            rows.append(state[0] if len(state) == 1 else xp.stack(state, axis=1))
    if not rows:
        return xp.zeros(problem.state_shape, dtype=problem.dtype, device=problem.device)
    return cast(xp, xp.stack(rows, axis=1), problem.dtype)


def _run_mixing(problem: Problem, weight: Array, bias: Array, params: list[Array], state: tuple[Array, ...]) -> Array:
    """The loop of a cell whose step multiplies by matrices."""
    xp, cell, time = problem.xp, problem.cell, problem.shape[1]
    mix = cell.mixer(xp, problem.work_dtype)
    rows = []
    with quiet(xp):
        for t in range(time):
            if t % PROJECTED_STEPS == 0:
                block = cast(xp, problem.x[:, t : min(t + PROJECTED_STEPS, time), :], problem.work_dtype)
                gates = cell.gate_inputs(xp, block, weight, bias)
            now = [g[:, t % PROJECTED_STEPS, ...] for g in gates]
            state = stepped(problem, t, state, lambda *s: cell.step(xp, mix, *s, *now, *params))  # noqa: B023
            rows.append(state[0] if len(state) == 1 else xp.stack(state, axis=1))
    if not rows:
        return xp.zeros(problem.state_shape, dtype=problem.dtype, device=problem.device)
    return cast(xp, xp.stack(rows, axis=1), problem.dtype)


def stepped(
    problem: Problem, t: int, state: tuple[Array, ...], step: Callable[..., tuple[Array, ...]]
) -> tuple[Array, ...]:
    """The state after step t, where sequences may start anew before it, or be padding."""
    xp = problem.xp
    if problem.head is not None:
        state = begun(problem, t, state)
    new = step(*state)
    if problem.hold is None:
        return new
    return tuple(xp.where(_flag(problem.hold[:, t], n), old, n) for old, n in zip(state, new, strict=True))


def begun(problem: Problem, t: int, state: tuple[Array, ...]) -> tuple[Array, ...]:
    """The state before step t, with the sequences that start anew there at their start."""
    xp = problem.xp
    assert problem.head is not None
    head = problem.head[:, t]
    fresh = [xp.zeros_like(s) for s in state]
    if problem.starts is not None:
        loaded = xp.take(problem.starts, xp.where(head < 0, xp.zeros_like(head), head), axis=0)
        loaded = cast(xp, loaded, problem.work_dtype)
        fresh = [loaded] if len(state) == 1 else [loaded[:, s, ...] for s in range(len(state))]
    return tuple(xp.where(_flag(head >= 0, s), f, s) for f, s in zip(fresh, state, strict=True))


def _flag(by_row: Array, like: Array) -> Array:
    """(B,) with as many axes as `like`."""
    return by_row[(..., *(None,) * (like.ndim - 1))]
