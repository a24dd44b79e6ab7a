"""Cells that are linear in a matrix state: every state by an exact scan in chunks, and its adjoint.

A state is read with all unit vectors at once: each becomes a head of its own that shares everything but r.
"""

from __future__ import annotations

import math
from typing import Any

from pararnn.adjoint import Gradients
from pararnn.arrays import Array, Namespace, cast, epsilon
from pararnn.cells.rwkv7 import SHORTEST_KEY, ParaRWKV7, attend, gate, rank_one, unit_key
from pararnn.problem import Problem
from pararnn.stats import NewtonStats

REASON = "the recurrence is linear in its state: one exact scan in chunks, without iterations"


def solve_linear(problem: Problem) -> tuple[Array, NewtonStats]:
    """States (B, T, H, d, d) and stats."""
    xp, cell = problem.xp, _cell_of(problem)
    batch, time, _, _ = problem.shape
    if batch and time:
        arguments, r, initial = _unit_reads(problem, cell.operands(xp, problem.x))
        out, _ = attend(arguments, r, initial)
        states = _by_heads(xp, cell, out, batch, time)
    else:
        states = xp.zeros(problem.state_shape, dtype=problem.work_dtype, device=problem.device)
    return cast(xp, states, problem.dtype), solved_linearly(problem.work_dtype, time)


def solved_linearly(dtype: Any, time: int) -> NewtonStats:
    """What there is to say about a scan."""
    return NewtonStats(
        path="scan",
        segment_len=max(time, 1),
        segments=1,
        windows=1,
        passes=1,
        max_residual=0.0,
        # Nothing is approximated, but the sums are taken in another order than the loop's.
        agreement_estimate=epsilon(dtype) * math.sqrt(max(time, 1)),
        converged=True,
        reason=REASON,
    )


def pull_back_linear(problem: Problem, states: Array, cotangent: Array) -> Gradients:
    """Gradients of Σ cotangent · states."""
    from pararnn.linear_attention import rwkv7_vjp

    xp, cell = problem.xp, _cell_of(problem)
    batch, time, features, width = problem.shape
    given = cell.operands(xp, problem.x)
    arguments, r, initial = _unit_reads(problem, given)
    heads, d = cell.n_heads, cell.d_head
    _, pullback = rwkv7_vjp(r, **arguments, initial_state=initial, output_final_state=True)
    by_key = xp.matrix_transpose(cast(xp, cotangent, problem.work_dtype))
    found = pullback(xp.reshape(by_key, (batch, time, heads * d, d)))
    # All reads share their arguments.
    shared = {name: xp.sum(xp.reshape(found[name], (batch, time, heads, d, d)), axis=3) for name in arguments}
    start = xp.sum(xp.reshape(found["initial_state"], (batch, heads, d, d, d)), axis=2)
    gates = xp.stack([_gate_cotangents(xp, given, shared)[name] for name in cell.gates], axis=2)
    flat = xp.reshape(gates, (batch * time, len(cell.gates) * width))
    weight = cast(xp, cell.W_x.weight, problem.work_dtype)
    rows = xp.reshape(cast(xp, problem.x, problem.work_dtype), (batch * time, features))
    params = {"W_x.weight": xp.matrix_transpose(flat) @ rows, "W_x.bias": xp.sum(flat, axis=0)}
    return Gradients(
        cast(xp, xp.reshape(flat @ weight, (batch, time, features)), problem.dtype),
        {name: cast(xp, value, cell.dtype) for name, value in params.items()},
        cast(xp, xp.matrix_transpose(start), problem.dtype),
    )


def describe_linear(problem: Problem) -> dict[str, object]:
    """What `explain` shows."""
    return {"path": "scan", "segment_len": max(problem.shape[1], 1), "segments": 1, "passes": 1, "reason": REASON}


def _cell_of(problem: Problem) -> ParaRWKV7:
    assert isinstance(problem.cell, ParaRWKV7)
    return problem.cell


def _unit_reads(problem: Problem, given: dict[str, Array]) -> tuple[dict[str, Array], Array, Array]:
    """The arguments of `rwkv7` for H·d heads, of which head (h, j) reads row j of the state of head h."""
    xp, cell = problem.xp, _cell_of(problem)
    batch, time, _, _ = problem.shape
    heads, d = cell.n_heads, cell.d_head

    def repeated(a: Array, axis: int) -> Array:
        shape = (*a.shape[:axis], d, *a.shape[axis:])
        whole = xp.broadcast_to(xp.expand_dims(a, axis=axis), shape)
        return xp.reshape(whole, (*a.shape[: axis - 1], heads * d, *a.shape[axis:]))

    unit = xp.eye(d, dtype=problem.work_dtype, device=problem.device)
    r = xp.reshape(xp.broadcast_to(unit, (batch, time, heads, d, d)), (batch, time, heads * d, d))
    start = xp.matrix_transpose(problem.start()[0])
    return {name: repeated(a, 3) for name, a in rank_one(xp, given).items()}, r, repeated(start, 2)


def _by_heads(xp: Namespace, cell: ParaRWKV7, out: Array, batch: int, time: int) -> Array:
    """Reads (B, T, H·d, d) as states with values before keys."""
    return xp.matrix_transpose(xp.reshape(out, (batch, time, cell.n_heads, cell.d_head, cell.d_head)))


def _gate_cotangents(xp: Namespace, given: dict[str, Array], of: dict[str, Any]) -> dict[str, Array]:
    """The adjoint of `rank_one`."""
    kappa, a = given["kappa"], gate(xp, given["a"])
    unit = unit_key(xp, kappa)
    squared = xp.sum(kappa * kappa, axis=-1, keepdims=True)
    longer = squared > SHORTEST_KEY**2
    length = xp.sqrt(xp.where(longer, squared, xp.full_like(squared, SHORTEST_KEY**2)))
    of_unit = a * of["b"] - of["a"]
    along = unit * xp.sum(unit * of_unit, axis=-1, keepdims=True)
    return {
        "w": gate(xp, -given["w"]) * of["w"],
        "a": unit * of["b"] * a * (1.0 - a),
        "kappa": (of_unit - xp.where(longer, along, xp.zeros_like(along))) / length,
        "v": of["v"],
        "k": of["k"],
        "r": xp.zeros_like(of["k"]),
    }
