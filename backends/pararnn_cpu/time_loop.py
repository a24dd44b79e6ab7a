"""The compiled time loop, forward and backward, on arrays in their public layout: nothing is copied or transposed."""

from __future__ import annotations

import numpy as np

from pararnn.adjoint import Gradients, collect_gradients
from pararnn.plan import WINDOW_BYTES
from pararnn.problem import Problem
from pararnn.programs import programs_of
from pararnn_cpu.engine import run_kernel


def _windows(problem: Problem, arrays: int) -> list[slice]:
    """Stretches of time whose gate inputs stay within a window's memory."""
    batch, time, _, width = problem.shape
    item = np.dtype(problem.work_dtype).itemsize
    steps = max(1, WINDOW_BYTES // max(1, batch * width * arrays * item))
    return [slice(t, min(time, t + steps)) for t in range(0, time, steps)]


def _projected(problem: Problem, inputs: np.ndarray) -> np.ndarray:
    """Gate inputs (B, steps, G, D) of inputs (B, steps, I), by one matrix product."""
    batch, steps, features = inputs.shape
    weight, bias = (np.asarray(a, dtype=problem.work_dtype) for a in problem.cell.W_x)
    flat = inputs.reshape(-1, features) @ weight.T
    flat += bias
    return flat.reshape(batch, steps, len(problem.cell.gates), problem.cell.d_h)


def _slots(problem: Problem, states: np.ndarray) -> list[np.ndarray]:
    return [states] if states.ndim == 3 else [states[:, :, s] for s in range(problem.cell.state_slots)]


def run_forward(problem: Problem, exact: bool) -> np.ndarray:
    """States (B, T, …) in the dtype of the input."""
    cell, work = problem.cell, problem.work_dtype
    loop = programs_of(cell).advance
    states = np.empty(problem.state_shape, work)
    params = [np.ascontiguousarray(p) for p in cell.recurrent(problem.xp, work)]
    carry = [np.ascontiguousarray(s) for s in problem.start()]
    for part in _windows(problem, len(cell.gates)):
        gates = _projected(problem, np.asarray(problem.x[:, part], dtype=work))
        end = [np.empty_like(c) for c in carry]
        run_kernel(
            loop,
            carry=carry,
            rows=[gates[:, :, g] for g in range(len(cell.gates))],
            consts=params,
            carry_out=end,
            kept=[s[:, part] for s in _slots(problem, states)],
            exact=exact,
        )
        carry = end
    return states.astype(problem.dtype, copy=False)


def run_backward(problem: Problem, states: np.ndarray, cotangent: np.ndarray, exact: bool) -> Gradients:
    """Gradients by one reverse loop."""
    cell, work, xp = problem.cell, problem.work_dtype, problem.xp
    batch, _, features, width = problem.shape
    programs = programs_of(cell)
    loop, count = programs.back_propagate, len(cell.gates)
    params = [np.ascontiguousarray(p) for p in cell.recurrent(xp, work)]
    weight = np.asarray(cell.W_x.weight, dtype=work)
    slots, given = (_slots(problem, np.asarray(a, dtype=work)) for a in (states, cotangent))
    future = [np.zeros((batch, width), work) for _ in slots]
    sums = [np.zeros((batch, width), work) for _ in params]
    d_x = np.empty(problem.x.shape, problem.dtype)
    d_weight, d_bias = np.zeros_like(weight), np.zeros(count * width, work)
    for part in reversed(_windows(problem, 2 * count)):
        inputs = np.asarray(problem.x[:, part], dtype=work)
        gates = _projected(problem, inputs)
        d_gates = np.empty_like(gates)
        # The state before the window is not in the states' array for the very first step.
        pieces = [(part, part.start - 1, part.stop - 1)]
        if not part.start:
            pieces = [(slice(1, part.stop), 0, part.stop - 1), (slice(0, 1), None, None)]
        for steps, before, until in pieces:
            if steps.start == steps.stop:
                continue
            local = slice(steps.start - part.start, steps.stop - part.start)
            if before is None:
                previous = [np.ascontiguousarray(s)[:, None] for s in problem.start()]
            else:
                previous = [s[:, before:until] for s in slots]
            end, added = [np.empty_like(f) for f in future], [np.empty_like(s) for s in sums]
            run_kernel(
                loop,
                carry=future,
                rows=[*previous, *(gates[:, local, g] for g in range(count)), *(c[:, steps] for c in given)],
                consts=params,
                carry_out=end,
                stored=[d_gates[:, local, g] for g in range(count)],
                totals=added,
                reverse=True,
                exact=exact,
            )
            future = end
            for total, more in zip(sums, added, strict=True):
                total += more
        flat = d_gates.reshape(-1, count * width)
        d_x[:, part] = (flat @ weight).reshape(batch, -1, features)
        d_weight += flat.T @ inputs.reshape(-1, features)
        d_bias += flat.sum(axis=0)
    grads = collect_gradients(problem, [s.sum(axis=0) for s in sums], d_weight, d_bias)
    h0 = future[0] if len(future) == 1 else np.stack(future, axis=1)
    return Gradients(d_x, grads, h0.astype(problem.dtype, copy=False))
