"""The adjoint as scans: the step is evaluated again inside the sweep, so no Jacobian is ever stored.

::

    μ_t = g_t + ν_t,   ν_{t-1} = J_tᵀ μ_t

By segments a first sweep makes each segment's affine map ν ↦ N ν + b, the joints are joined from right to left, and a
second sweep collects the cotangents of gates and parameters. Source: ParaRNN (arXiv 2510.21450), eq. 2.6.
"""

from __future__ import annotations

import jax.numpy as jnp

from pararnn.adjoint import Gradients, collect_gradients, previous_rows, starts_gradient
from pararnn.arrays import Array, cast, dtype_name
from pararnn.layout import Window, gate_rows, input_rows, lanes_of, rows_of, times_of
from pararnn.plan import make_plan
from pararnn.problem import Problem
from pararnn.programs import programs_of
from pararnn_jax.engine import JaxEngine


def pull_back(problem: Problem, states: Array, cotangent: Array) -> Gradients:
    """Gradients of Σ cotangent · states for a solved trajectory; everything in public coordinates."""
    cell, work = problem.cell, problem.work_dtype
    engine, programs = JaxEngine(problem), programs_of(cell, marks=problem.marks)
    batch, time, features, width = problem.shape
    plan = make_plan(
        programs,
        engine.costs,
        time=time,
        lanes=batch * width,
        item=8 if dtype_name(work) == "float64" else 4,
        segment_len=problem.config.segment_len if problem.config.segment_len != 1 else None,
        warmup=None,
        long_memory=False,
        backward=True,
    )
    weight = cast(jnp, cell.W_x.weight, work)
    slots, cotangents = problem.slots_of(states), problem.slots_of(cotangent)
    future = [jnp.zeros((batch * width,), work) for _ in cell.slots]
    sums = [jnp.zeros((width,), work) for _ in cell.params]
    weight_sum, bias_sum = jnp.zeros((len(cell.gates) * width, features), work), jnp.zeros(weight.shape[:1], work)
    pieces: list[Array] = []
    begun: list[list[Array]] = [[] for _ in programs.start_names]
    for begin, length, count in reversed(list(plan.windows(time))):
        window = Window(begin, length, count, batch, width)
        inputs = input_rows(problem, window)
        params = lanes_of(jnp, cell.recurrent(jnp, work), window)
        given = [rows_of(jnp, cast(jnp, c[:, begin : window.stop, :], work), window) for c in cotangents]
        rows = [*previous_rows(problem, slots, window), *gate_rows(problem, window, inputs), *given]
        ends = future
        if count > 1:
            ends, before = _by_joints(engine, programs, window, rows, params, future)
        swept = engine.scan(programs.back_propagate, ends, rows, params, reverse=True)
        future = swept.carry if count == 1 else before
        sums = [s + jnp.sum(t.reshape((-1, width)), axis=0) for s, t in zip(sums, swept.totals, strict=True)]
        # (L·C·B, G·D): one product for all gates.
        drawn, started = swept.stored[: len(cell.gates)], swept.stored[len(cell.gates) :]
        for column, s in zip(begun, started, strict=True):
            column.insert(0, times_of(jnp, s, window))
        gates = jnp.stack([g.reshape((-1, width)) for g in drawn], axis=1).reshape((-1, weight.shape[0]))
        weight_sum, bias_sum = weight_sum + gates.T @ inputs, bias_sum + jnp.sum(gates, axis=0)
        pieces.insert(0, times_of(jnp, (gates @ weight).reshape((length, -1)), window))
    x_grad = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)
    h0 = [v.reshape((batch, width)) for v in future]
    h0_grad = h0[0] if len(h0) == 1 else jnp.stack(h0, axis=1)
    grads = collect_gradients(problem, sums, weight_sum, bias_sum)
    starts = starts_gradient(problem, [jnp.concatenate(column, axis=1) for column in begun]) if begun else None
    return Gradients(cast(jnp, x_grad, problem.dtype), grads, cast(jnp, h0_grad, problem.dtype), starts=starts)


def _by_joints(
    engine: JaxEngine, programs, window: Window, rows: list[Array], params: list[Array], future: list[Array]
) -> tuple[list[Array], list[Array]]:
    """ν after each segment by slot (C·m,), and before the window (m,)."""
    one, none = jnp.ones_like(params[0] if params else rows[0][0]), jnp.zeros_like(rows[0][0])
    carry = [one if i == j else none for i, j in programs.n.where] + [none] * (programs.size + len(programs.cut_names))
    maps = engine.scan(programs.adjoint_map_step, carry, rows, params, reverse=True).carry
    grid = (window.segments, window.channels)
    out = engine.scan(
        programs.adjoint_joints, future, [a.reshape(grid) for a in maps], [], reverse=True, keep=programs.size
    )
    # Row c of what is kept is ν before segment c, which is ν after segment c-1.
    ends = [jnp.concatenate([k[1:, :].reshape((-1,)), f]) for k, f in zip(out.kept, future, strict=True)]
    return ends, out.carry
