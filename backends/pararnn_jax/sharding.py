"""A solve sharded over time: every device holds T/N steps, and only what stands at joints goes between devices.

A pass runs each device's segments; their ends, M_c and sizes are gathered, a few numbers per segment and channel, and
every device makes the same correction of all starts. The gradient joins the segments' affine maps in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from pararnn.adjoint import collect_gradients, previous_rows
from pararnn.arrays import Array, cast
from pararnn.config import NewtonConfig
from pararnn.layout import Window, gate_rows, input_rows, lanes_of, rows_of, times_of
from pararnn.newton import checked_problem
from pararnn.plan import DEFAULT_WARMUP, Plan
from pararnn.problem import Problem
from pararnn.programs import programs_of
from pararnn.solve import solver_for
from pararnn_jax.apply import known_to_jax
from pararnn_jax.engine import JaxEngine
from pararnn_jax.segments import TracedSolver
from pararnn_jax.time_loop import joined, time_loop

# Steps of a segment where nothing else was asked for.
USUAL_LENGTH = 128


@dataclass(frozen=True)
class _Layout:
    """How time lies on the devices: the mesh's axis, its size N, and the segment length L."""

    mesh: Mesh
    axis: str
    devices: int
    length: int

    def map(self, run: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        # What is gathered is the same on every device, which the checker of replication cannot see.
        return jax.shard_map(run, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)

    @property
    def timed(self) -> PartitionSpec:
        return PartitionSpec(None, self.axis)


def newton_apply_over_time(
    cell: Any,
    x: Array,
    config: NewtonConfig | None = None,
    *,
    mesh: Mesh,
    axis: str = "time",
    h0: Array | None = None,
) -> Array:
    """`newton_apply` with the time axis of `x` and of the result sharded over the devices of a mesh axis.

    ::

        device d holds x[:, d·T/N : (d+1)·T/N]; between devices go e_c, M_c (forward) and N_c, b_c (backward)

    Works under jit and grad; the gradient of x stays sharded, those of the cell and of h0 are on every device.

    Args:
        cell: a ChannelwiseCell of JAX arrays. x: (B, T, I), T a multiple of the axis's size N.
        config: ``segment_len`` must divide T/N; ``exact``, ``tol``, ``max_passes``, ``warmup`` as in newton_apply.
        mesh, axis: the mesh and the name of its axis.
        h0: (B, D) or (B, S, D); zeros if None.

    Raises:
        ValueError: T is no multiple of N, or segment_len does not divide T/N.
        TypeError: the mesh has no such axis; a pinned number of iterations, or chunk_len.

    Source: multiple shooting as in Bellen and Zennaro 1989, "Parallel algorithms for initial value problems".
    """
    what = "newton_apply_over_time"
    problem = checked_problem(what, cell, x, config, h0)
    if axis not in mesh.shape:
        raise TypeError(f"{what}: the mesh has the axes {', '.join(map(str, mesh.shape))}, and none named {axis!r}")
    batch, time, _, _ = problem.shape
    if problem.config.pinned(time) is not None or problem.config.chunk_len is not None:
        raise TypeError(f"{what}: max_iters and chunk_len cannot be followed across devices; leave them at None")
    devices = int(mesh.shape[axis])
    if time % devices:
        raise ValueError(f"{what}: T={time} must be a multiple of the {devices} devices of {axis!r}; pad the sequence")
    if not batch or not time:
        return jnp.zeros(problem.state_shape, problem.dtype)
    layout = _Layout(mesh, axis, devices, _length(what, problem.config.segment_len, time // devices))
    return _over_time(layout, problem.config, known_to_jax(cell), x, h0)


def _length(what: str, wanted: int | None, steps: int) -> int:
    if wanted is None:
        # The longest that leaves nothing over; few divisors leave one segment for each device.
        fitting = [l for l in range(1, min(steps, USUAL_LENGTH) + 1) if steps % l == 0]
        return fitting[-1] if fitting[-1] * 4 >= min(steps, USUAL_LENGTH) else steps
    if steps % wanted:
        raise ValueError(f"{what}: segment_len={wanted} must divide the {steps} steps that each device holds")
    return wanted


class _SharedSolver(TracedSolver):
    """Runs the segments of its device, and knows the starts and joints of all."""

    layout: _Layout

    def _here(self, lanes: Array) -> Array:
        size = lanes.shape[0] // self.layout.devices
        return lax.dynamic_slice_in_dim(lanes, lax.axis_index(self.layout.axis) * size, size)

    def _shared(self, lanes: Array) -> Array:
        return lax.all_gather(lanes, self.layout.axis, tiled=True)

    def _first_starts(
        self, window: Window, gates: list[Array], wide: list[Array], start: list[Array], zero: list[Array]
    ) -> list[Array]:
        if self.picard:
            return self._picard_starts(window, gates, wide, start)
        m, count, length = window.channels, window.segments, window.length
        warmup = self.settings.warmup
        steps = min(length, DEFAULT_WARMUP if warmup is None else warmup)
        begin = [jnp.tile(z, (count,)) for z in zero]
        if steps == length:
            # The warm-up of segment 1 is then segment 0 itself, from its true start.
            begin = [jnp.concatenate([s, b[m:]]) for s, b in zip(start, begin, strict=True)]
        if steps:
            rows = [g[length - steps :, :] for g in gates]
            here = [self._here(b) for b in begin]
            begin = [self._shared(s) for s in self.engine.loop(self.programs.advance, here, rows, wide).carry]
        return [b[: (count - 1) * m] for b in begin]


def _solve_here(layout: _Layout, config: NewtonConfig, cell: Any, x: Array, h0: Array | None) -> Array:
    """This device's states; x is this device's part, everything else the same on all."""
    problem = Problem(cell, x, h0, config, None, jnp)
    engine = JaxEngine(problem)
    batch, steps, _, width = problem.shape
    length, count = layout.length, layout.devices * (steps // layout.length)
    solver = solver_for(problem, engine, Plan("segments", length, count, "", 0.0), _SharedSolver)
    solver.layout = layout
    # The window of this device's rows; the solver's counts all segments.
    local = Window(0, length, steps // length, batch, width)
    gates = gate_rows(problem, local, input_rows(problem, local))
    params = [jnp.tile(p, (batch,)) for p in solver.cell.recurrent(jnp, problem.work_dtype)]
    first = problem.start()
    start = [s.reshape((-1,)) for s in solver.cell.encode(jnp, *first)]
    zero = [s.reshape((-1,)) for s in solver.cell.encode(jnp, *(jnp.zeros_like(s) for s in first))]
    error = [jnp.zeros_like(s) for s in start]
    if count == 1:
        return joined(problem, time_loop(problem))
    found = solver.run(replace(local, segments=count), gates, params, start, error, zero)
    slots = [times_of(jnp, r, local) for r in solver.cell.decode(jnp, *found.rows)]
    kept = found.estimate <= solver.settings.accept
    grid = kept.reshape((batch, 1, width))

    def finish(slots: list[Array]) -> list[Array]:
        return [jnp.where(grid, s, w) for s, w in zip(slots, _loop_in_turn(layout, problem, engine), strict=True)]

    return joined(problem, lax.cond(jnp.all(kept), lambda slots: slots, finish, slots))


def _loop_in_turn(layout: _Layout, problem: Problem, engine: JaxEngine) -> list[Array]:
    """The time loop, one device after the other."""
    me = lax.axis_index(layout.axis)

    def turn(d: Any, state: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        start, slots = state
        new = time_loop(problem, start, engine.unroll)
        slots = [jnp.where(me == d, n, s) for n, s in zip(new, slots, strict=True)]
        ends = [lax.psum(jnp.where(me == d, n[:, -1, :], 0.0), layout.axis) for n in new]
        return ends, slots

    batch, steps, _, width = problem.shape
    none = [jnp.zeros((batch, steps, width), problem.work_dtype)] * problem.cell.state_slots
    return lax.fori_loop(0, layout.devices, turn, (problem.start(), none))[1]


def _pull_back_here(
    layout: _Layout, config: NewtonConfig, cell: Any, x: Array, h0: Array | None, states: Array, cotangent: Array
) -> tuple[Any, Array, Array]:
    """Gradients of the cell (summed over devices), of this device's x, and of h0."""
    axis = layout.axis
    me, last = lax.axis_index(axis), layout.devices - 1
    problem = Problem(cell, x, h0, config, None, jnp)
    engine, programs, kind = JaxEngine(problem), programs_of(cell), problem.work_dtype
    batch, steps, _, width = problem.shape
    count, m = steps // layout.length, batch * width
    window = Window(0, layout.length, count, batch, width)
    # The state before this device's first step is the last one of the device before it.
    ends = lax.ppermute(states[:, -1, ...], axis, [(d, d + 1) for d in range(last)])
    start = problem.start()
    first = start[0] if len(start) == 1 else jnp.stack(start, axis=1)
    before = jnp.where(me == 0, first, cast(jnp, ends, kind))
    inputs = input_rows(problem, window)
    params = lanes_of(jnp, cell.recurrent(jnp, kind), window)
    given = [rows_of(jnp, cast(jnp, c, kind), window) for c in problem.slots_of(cotangent)]
    rows = [
        *previous_rows(replace(problem, h0=before), problem.slots_of(states), window),
        *gate_rows(problem, window, inputs),
        *given,
    ]
    none, one = jnp.zeros_like(given[0][0]), jnp.ones_like(given[0][0])
    carry = [one if i == j else none for i, j in programs.n.where] + [none] * programs.size
    maps = engine.scan(programs.adjoint_map_step, carry, rows, params, reverse=True).carry
    every = [lax.all_gather(a.reshape((count, m)), axis, tiled=True) for a in maps]
    future = [jnp.zeros((m,), kind)] * programs.size
    out = engine.scan(programs.adjoint_joints, future, every, [], reverse=True, keep=programs.size)
    after = [jnp.concatenate([k[1:, :], f[None]]) for k, f in zip(out.kept, future, strict=True)]
    mine = [lax.dynamic_slice_in_dim(a, me * count, count).reshape((-1,)) for a in after]
    swept = engine.scan(programs.back_propagate, mine, rows, params, reverse=True)
    weight = cast(jnp, cell.W_x.weight, kind)
    gates = jnp.stack([g.reshape((-1, width)) for g in swept.stored], axis=1).reshape((-1, weight.shape[0]))
    sums = [jnp.sum(t.reshape((-1, width)), axis=0) for t in swept.totals]
    sums, weight_sum, bias_sum = lax.psum((sums, gates.T @ inputs, jnp.sum(gates, axis=0)), axis)
    x_grad = times_of(jnp, (gates @ weight).reshape((layout.length, -1)), window)
    grads = collect_gradients(problem, sums, weight_sum, bias_sum)
    h0_grad = [v.reshape((batch, width)) for v in out.carry]
    whole = h0_grad[0] if len(h0_grad) == 1 else jnp.stack(h0_grad, axis=1)
    cell_grad = cell._copy(cell.max_recurrent_norm, {name: grads[name] for name in cell.arrays})
    return cell_grad, cast(jnp, x_grad, problem.dtype), cast(jnp, whole, problem.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _over_time(layout: _Layout, config: NewtonConfig, cell: Any, x: Array, h0: Array | None) -> Array:
    """The states, with the adjoint across devices as their derivative."""
    everywhere = PartitionSpec()
    run = layout.map(partial(_solve_here, layout, config), (everywhere, layout.timed, everywhere), layout.timed)
    return jax.jit(run)(cell, x, h0)


def _forward(layout: _Layout, config: NewtonConfig, cell: Any, x: Array, h0: Array | None) -> tuple[Array, Any]:
    states = _over_time(layout, config, cell, x, h0)
    return states, (cell, x, h0, None if config.recompute else states)


def _backward(layout: _Layout, config: NewtonConfig, kept: Any, cotangent: Array) -> tuple[Any, ...]:
    cell, x, h0, states = kept
    if states is None:
        states = _over_time(layout, config, cell, x, h0)
    everywhere, timed = PartitionSpec(), layout.timed
    run = layout.map(
        partial(_pull_back_here, layout, config),
        (everywhere, timed, everywhere, timed, timed),
        (everywhere, timed, everywhere),
    )
    cell_grad, x_grad, h0_grad = jax.jit(run)(cell, x, h0, states, cotangent)
    return cell_grad, x_grad, None if h0 is None else cast(jnp, h0_grad, h0.dtype)


_over_time.defvjp(_forward, _backward)
