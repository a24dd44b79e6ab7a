"""The adjoint: gradients of a solved trajectory, by segments that need exactly one correction.

::

    μ_t = g_t + ν_t,   ν_{t-1} = J_tᵀ μ_t

is linear, so a segment's reverse sweep is an affine map ν ↦ N ν + b. All maps are swept at once, joined from right to
left, and swept once more with the right ν. Source: ParaRNN (arXiv 2510.21450), eq. 2.6; here over segments.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from array_api_compat import device

from pararnn.arrays import Array, cast, dtype_name, quiet
from pararnn.engine import ArrayEngine
from pararnn.layout import Window, gate_rows, input_rows, lanes_of, rows_of, times_of
from pararnn.plan import make_plan
from pararnn.problem import Problem
from pararnn.programs import programs_of


@dataclass(frozen=True)
class Gradients:
    """Cotangents of everything a solve reads.

    Attributes:
        x: (B, T, I).
        params: by stored array name ('a_z', 'R', 'W_x.weight', 'W_x.bias', …), shaped like the arrays.
        h0: (B, D) or (B, S, D); with ``cu_seqlens`` those of the documents, (N, …).
        drives: by name, (B, T); empty for cells without.
        starts: of the problem's own rows of starting states, where it has any.
    """

    x: Array
    params: dict[str, Array]
    h0: Array
    drives: dict[str, Array] = field(default_factory=dict)
    starts: Array | None = None


def pull_back(problem: Problem, engine: ArrayEngine, states: Array, cotangent: Array) -> Gradients:
    """Gradients of Σ cotangent · states for a solved trajectory; everything in public coordinates."""
    xp, cell = problem.xp, problem.cell
    programs = programs_of(cell, marks=problem.marks)
    batch, time, features, width = problem.shape
    item = 8 if dtype_name(problem.work_dtype) == "float64" else 4
    plan = make_plan(
        programs,
        engine.costs,
        time=time,
        lanes=batch * width,
        item=item,
        segment_len=problem.config.segment_len if problem.config.segment_len != 1 else None,
        warmup=None,
        long_memory=False,
        backward=True,
    )
    windows = [Window(begin, length, count, batch, width) for begin, length, count in plan.windows(time)]
    kind = {"dtype": problem.work_dtype, "device": device(problem.x)}
    weight = cast(xp, cell.W_x.weight, problem.work_dtype)
    with quiet(xp):
        narrow = cell.recurrent(xp, problem.work_dtype)
        future = [xp.zeros((batch * width,), **kind) for _ in cell.slots]
        sums = [xp.zeros((width,), **kind) for _ in cell.params]
        weight_sums = [xp.zeros((width, features), **kind) for _ in cell.gates]
        bias_sums = [xp.zeros((width,), **kind) for _ in cell.gates]
        writer = engine.writer((batch, time, features), problem.dtype, problem.x)
        begun = [engine.writer((batch, time, width), problem.work_dtype, problem.x) for _ in programs.start_names]
        slots = problem.slots_of(states)
        cotangents = problem.slots_of(cotangent)
        for window in reversed(windows):
            inputs = input_rows(problem, window)
            gates = gate_rows(problem, window, inputs)
            params = lanes_of(xp, narrow, window)
            previous = previous_rows(problem, slots, window)
            given = [
                rows_of(xp, cast(xp, c[:, window.start : window.stop, :], problem.work_dtype), window)
                for c in cotangents
            ]
            future, mu = _sweep(engine, programs, window, previous, gates, params, given, future)
            leaves = engine.loop(programs.leaf_cotangents, [], [*previous, *gates, *mu], params)
            sums = [s + _per_channel(xp, t, width) for s, t in zip(sums, leaves.totals, strict=True)]
            x_rows = None
            for g, rows in enumerate(leaves.stored[: len(cell.gates)]):
                flat = xp.reshape(rows, (-1, width))
                part = flat @ weight[g * width : (g + 1) * width, :]
                x_rows = part if x_rows is None else x_rows + part
                weight_sums[g] = weight_sums[g] + xp.matrix_transpose(flat) @ inputs
                bias_sums[g] = bias_sums[g] + xp.sum(flat, axis=0)
            writer.write(window.start, [times_of(xp, xp.reshape(x_rows, (window.length, -1)), window)])
            for start, rows in zip(begun, leaves.stored[len(cell.gates) :], strict=True):
                start.write(window.start, [times_of(xp, rows, window)])
        grads = collect_gradients(problem, sums, xp.concat(weight_sums), xp.concat(bias_sums))
        h0 = [xp.reshape(v, (batch, width)) for v in future]
        h0_grad = h0[0] if len(h0) == 1 else xp.stack(h0, axis=1)
        starts = starts_gradient(problem, [w.finish() for w in begun]) if begun else None
    return Gradients(writer.finish(), grads, cast(xp, h0_grad, problem.dtype), starts=starts)


def starts_gradient(problem: Problem, begun: list[Array]) -> Array:
    """The gradient of ``problem.starts`` from the cotangents at every step's start, by slot (B, T, D)."""
    xp, places = problem.xp, problem.places
    assert places is not None and problem.head is not None
    # A start that no step loads (an empty document's, or one that a reset took the place of) has no gradient.
    at = xp.where(places < 0, xp.zeros_like(places), places)
    number = xp.astype(xp.arange(places.shape[0], device=device(places)), problem.head.dtype)
    loaded = (places >= 0) & (xp.take(xp.reshape(problem.head, (-1,)), at) == number)
    slots = [xp.take(xp.reshape(rows, (-1, problem.cell.d_h)), at, axis=0) for rows in begun]
    slots = [xp.where(xp.expand_dims(loaded, axis=1), s, xp.zeros_like(s)) for s in slots]
    return cast(xp, slots[0] if len(slots) == 1 else xp.stack(slots, axis=1), problem.dtype)


def previous_rows(problem: Problem, slots: list[Array], window: Window) -> list[Array]:
    """The states one step earlier, by slot (L, C·m)."""
    xp, rows = problem.xp, []
    for slot, first in zip(slots, problem.start(), strict=True):
        if window.start:
            part = cast(xp, slot[:, window.start - 1 : window.stop - 1, :], problem.work_dtype)
        else:
            tail = cast(xp, slot[:, : window.stop - 1, :], problem.work_dtype)
            part = xp.concat([xp.expand_dims(first, axis=1), tail], axis=1)
        rows.append(rows_of(xp, part, window))
    return rows


def _sweep(
    engine: ArrayEngine,
    programs,
    window: Window,
    previous: list[Array],
    gates: list[Array],
    params: list[Array],
    given: list[Array],
    future: list[Array],
) -> tuple[list[Array], list[Array]]:
    """ν before the window by slot (m,), and μ by slot (L, C·m)."""
    xp = engine.xp
    jac = engine.loop(programs.jacobians, [], [*previous, *gates], params).stored
    jac += [rows for name, rows in zip(programs.gate_names, gates, strict=True) if name in programs.condition_names]
    if window.segments == 1:
        out = engine.loop(programs.adjoint, future, [*jac, *given], [], reverse=True)
        return out.carry, out.stored
    one, zero = xp.ones_like(given[0][0, :]), xp.zeros_like(given[0][0, :])
    carry = [one if i == j else zero for i, j in programs.n.where] + [zero] * (programs.size + len(programs.cut_names))
    maps = engine.loop(programs.adjoint_affine, carry, [*jac, *given], [], reverse=True).carry
    grid = (window.segments, window.channels)
    joined = engine.loop(
        programs.adjoint_joints, future, [xp.reshape(a, grid) for a in maps], [], reverse=True, keep=programs.size
    )
    ends = [xp.reshape(v[1:, :], (-1,)) for v in joined.kept]
    out = engine.loop(programs.adjoint, ends, [*jac, *given], [], reverse=True)
    return joined.carry, out.stored


def _per_channel(xp, lanes: Array, width: int) -> Array:
    return xp.sum(xp.reshape(lanes, (-1, width)), axis=0)


def collect_gradients(problem: Problem, sums: list[Array], weight: Array, bias: Array) -> dict[str, Array]:
    """Cotangents by stored array, from those of the clamped params and of W_x; the clamp's mask is applied here."""
    xp, cell = problem.xp, problem.cell
    by_name = dict(zip(cell.params, sums, strict=True))
    stacked = {row for rows in cell.stacked.values() for row in rows}
    out = {name: by_name[name] for name in cell.params if name not in stacked}
    for name, rows in cell.stacked.items():
        out[name] = xp.stack([by_name[row] for row in rows])
    masks = cell.clamp_masks(xp, problem.work_dtype)
    out = {name: value * masks[name] for name, value in out.items()}
    out["W_x.weight"], out["W_x.bias"] = weight, bias
    return {name: cast(xp, value, cell.dtype) for name, value in out.items()}
