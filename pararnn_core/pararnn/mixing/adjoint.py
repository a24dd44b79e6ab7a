"""The adjoint of a mixing cell: segments travelled from the right, their joints settled like the states'.

::

    μ_t = g_t + ν_t,   ν_{t-1} = J_tᵀ μ_t

The products of all steps are known from the states, so one large product recomputes them; a reverse step is one
elementwise program and one product with the transposed matrix. Gradients of the matrices are one product over all
rows. Source: ParaRNN (arXiv 2510.21450), eq. 2.6; here over segments.
"""

from __future__ import annotations

import numpy as np

from pararnn.adjoint import Gradients
from pararnn.arrays import Array, cast, quiet
from pararnn.mixing.joints import DEFAULT_MAX_PASSES, ArrayJoints, Gain, JointSettings, put_rows, settle, warmup_gain
from pararnn.mixing.plan import plan_mixing
from pararnn.mixing.rows import Rows, running_product
from pararnn.problem import Problem
from pararnn.solve import tolerance


def pull_back_mixing(problem: Problem, states: Array, cotangent: Array) -> Gradients:
    """Gradients of Σ cotangent · states for a solved trajectory; everything in public coordinates."""
    plan = plan_mixing(problem, backward=True)
    with quiet(problem.xp):
        if plan.path == "segments":
            found = _swept(problem, states, cotangent, list(plan.windows(problem.shape[1])), plan.warmup)
            if found is not None:
                return found
        length = max(1, min(problem.shape[1], plan.segment_len if plan.path == "segments" else 1024))
        windows = [(first, min(length, problem.shape[1] - first), 1) for first in range(0, problem.shape[1], length)]
        found = _swept(problem, states, cotangent, windows, 0)
    assert found is not None, "one segment at a time has no joints"
    return found


def _swept(
    problem: Problem, states: Array, cotangent: Array, windows: list[tuple[int, int, int]], warmup: int
) -> Gradients | None:
    """The gradients by these windows, or None where the joints of one do not settle."""
    xp, cell = problem.xp, problem.cell
    batch = problem.shape[0]
    rows = cell.rows(problem)
    tol = tolerance(problem.config, problem) if problem.config.pinned(problem.shape[1]) is None else 1e-5
    tol = min(tol, 1e-12) if str(problem.work_dtype).endswith("64") else tol
    settings = JointSettings(tol=0.1 * tol, accept=tol, max_passes=DEFAULT_MAX_PASSES, one_scale=True)
    entries = [(j, i) for i, j in rows.entries]
    work = problem.work_dtype
    slots = problem.slots_of(states)
    cotangents = problem.slots_of(cotangent)
    first = problem.start()
    future = [xp.zeros_like(s) for s in first]
    error = np.zeros(batch)
    x_parts: list[Array] = []
    sums: dict[str, Array] = {}
    weight_sum: Array | None = None
    bias_sum: Array | None = None
    for begin, length, count in reversed(windows):
        stop = begin + length * count
        x = cast(xp, problem.x[:, begin:stop, :], work)
        before = [_before(problem, s, f, begin, stop) for s, f in zip(slots, first, strict=True)]
        gates = rows.gates(x)
        tape = rows.tape(before, gates)
        given = [cast(xp, c[:, begin:stop, ...], work) for c in cotangents]
        sweep = _Sweep(xp, rows, tape, given, batch, count, length)
        if count == 1:
            future, _ = sweep.run(None, future)
        else:
            starts, gain = sweep.warmed(warmup, future)
            joints = ArrayJoints(xp, future, starts, sweep.run, entries, settings, sweep.diagonals, gain)
            out = settle(joints, settings, error)
            if not bool(np.all(out.settled)):
                return None
            error = out.end_error
            future = sweep.ends()
        stored = sweep.stored()
        n_gates = len(gates)
        d_gates = [_unbroadcast(xp, d, g) for d, g in zip(stored[:n_gates], gates, strict=True)]
        d_x, d_weight, d_bias = cell.gate_cotangents(xp, x, rows.weight, d_gates)
        x_parts.append(d_x)
        weight_sum = d_weight if weight_sum is None else weight_sum + d_weight
        bias_sum = d_bias if bias_sum is None else bias_sum + d_bias
        for name, value in rows.leaf_cotangents(tape, stored).items():
            sums[name] = value if name not in sums else sums[name] + value
    masks = cell.clamp_masks(xp, work)
    params = {name: value * masks[name] for name, value in sums.items()}
    params["W_x.weight"], params["W_x.bias"] = weight_sum, bias_sum
    params = {name: cast(xp, params[name], cell.dtype) for name in cell.arrays}
    h0 = future[0] if len(future) == 1 else xp.stack(future, axis=1)
    d_x = x_parts[0] if len(x_parts) == 1 else xp.concat(x_parts[::-1], axis=1)
    return Gradients(cast(xp, d_x, problem.dtype), params, cast(xp, h0, problem.dtype))


def _before(problem: Problem, slot: Array, first: Array, begin: int, stop: int) -> Array:
    """A slot one step earlier, (B, W, …)."""
    xp, work = problem.xp, problem.work_dtype
    if begin:
        return cast(xp, slot[:, begin - 1 : stop - 1, ...], work)
    return xp.concat([xp.expand_dims(first, axis=1), cast(xp, slot[:, : stop - 1, ...], work)], axis=1)


def _unbroadcast(xp, cotangent: Array, like: Array) -> Array:
    """The cotangent of a gate that was broadcast to a slot's shape."""
    axes = tuple(k for k, (a, b) in enumerate(zip(cotangent.shape, like.shape, strict=True)) if a != b)
    return xp.sum(cotangent, axis=axes, keepdims=True) if axes else cotangent


class _Sweep:
    """The reverse sweeps of one window. Segments are counted from the right, as they are travelled."""

    def __init__(
        self, xp, rows: Rows, tape: list[Array], given: list[Array], batch: int, count: int, length: int
    ) -> None:
        self.xp, self.rows = xp, rows
        self.batch, self.count, self.length = batch, count, length
        self.tape, self.given = self._travelled(tape), self._travelled(given)
        self.kept: list[Array] = []
        self.last: list[Array] = []
        # The first pass's cotangents where the warm-up began, to measure what the steps between make of a difference.
        self.seen_at = -1
        self.seen: list[Array] = []

    def _travelled(self, arrays: list[Array]) -> list[Array]:
        """(B, W, …) as rows (B·C, L, …), the last segment first."""
        xp = self.xp
        out = []
        for a in arrays:
            split = xp.reshape(a, (self.batch, self.count, self.length, *a.shape[2:]))
            split = split if self.count == 1 else xp.flip(split, axis=1)
            out.append(xp.reshape(split, (self.batch * self.count, self.length, *a.shape[2:])))
        return out

    def _at(self, arrays: list[Array], l: int, index: Array | None) -> list[Array]:
        now = [a[:, l, ...] for a in arrays]
        return now if index is None else [self.xp.take(a, index, axis=0) for a in now]

    def run(self, index: Array | None, starts: list[Array]) -> tuple[list[Array], list[Array] | None]:
        xp, nu = self.xp, starts
        columns: list[list[Array]] | None = None
        for l in range(self.length - 1, -1, -1):
            if index is None and l == self.seen_at:
                self.seen = nu
            mu = [n + g for n, g in zip(nu, self._at(self.given, l, index), strict=True)]
            nu, stored = self.rows.back(self._at(self.tape, l, index), mu)
            columns = columns or [[] for _ in stored]
            for column, value in zip(columns, stored, strict=True):
                column.append(value)
        made = [xp.stack(column[::-1], axis=1) for column in columns or []]
        if index is None:
            self.kept, self.last = made, nu
        else:
            self.kept = [put_rows(xp, a, index, b) for a, b in zip(self.kept, made, strict=True)]
            self.last = [put_rows(xp, a, index, b) for a, b in zip(self.last, nu, strict=True)]
        return nu, None

    def diagonals(self) -> list[Array]:
        """Of all segments; those of the transposed Jacobians are the same numbers, and no sweep changes them."""
        return running_product(self.rows, self.tape)

    def warmed(self, steps: int, future: list[Array]) -> tuple[list[Array], Gain]:
        """Starts (B, C-1, …) after the sweep of the first `steps` steps of the segment to the right, from nothing."""
        xp, steps = self.xp, max(1, min(steps, self.length))
        rows = self.batch * self.count
        nu = [xp.zeros((rows, *f.shape[1:]), dtype=f.dtype, device=getattr(f, "device", None)) for f in future]
        for l in range(steps - 1, -1, -1):
            mu = [n + g for n, g in zip(nu, self._at(self.given, l, None), strict=True)]
            nu, _ = self.rows.back(self._at(self.tape, l, None), mu)
        self.seen_at = steps - 1

        def split(a: Array) -> Array:
            return xp.reshape(a, (self.batch, self.count, *a.shape[1:]))[:, :-1, ...]

        def gain(mismatch: list[Array], scale: list[float]) -> np.ndarray:
            return warmup_gain(xp, [split(a) for a in self.seen], mismatch, scale, self.length / steps)

        return [split(n) for n in nu], gain

    def ends(self) -> list[Array]:
        return [self.xp.reshape(v, (self.batch, self.count, *v.shape[1:]))[:, -1, ...] for v in self.last]

    def stored(self) -> list[Array]:
        """What the last sweeps stored, (B, W, …) in time."""
        xp = self.xp
        out = []
        for a in self.kept:
            split = xp.reshape(a, (self.batch, self.count, self.length, *a.shape[2:]))
            split = split if self.count == 1 else xp.flip(split, axis=1)
            out.append(xp.reshape(split, (self.batch, self.count * self.length, *a.shape[2:])))
        return out
