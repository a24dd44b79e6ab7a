"""The compiled time loop, forward and backward, on arrays in their public layout: nothing is copied or transposed."""

from __future__ import annotations

import math

import numpy as np

from pararnn.adjoint import Gradients, collect_gradients
from pararnn.arrays import dtype_name
from pararnn.problem import Problem
from pararnn.programs import programs_of
from pararnn_cpu.engine import Operands, Projection, lanes_first, run_loop
from pararnn_cpu.product import add_products, multiply

# Bytes of the arrays that live for one stretch of time only, converted inputs and cotangents of the gates: they stay in
# cache until the products that read them.
STRETCH_BYTES = 2 * 2**20


def _work(problem: Problem) -> np.dtype:
    """The dtype of the arithmetic, in the machine's own byte order."""
    return np.dtype(dtype_name(problem.work_dtype))


def _stretches(problem: Problem, numbers: int, item: int) -> list[slice]:
    """Time cut so that `numbers` per batch and step stay within STRETCH_BYTES."""
    batch, time, _, _ = problem.shape
    steps = max(1, STRETCH_BYTES // max(1, batch * numbers * item))
    return [slice(t, min(time, t + steps)) for t in range(0, time, steps)]


def _projection(problem: Problem, work: np.dtype, start: int) -> Projection:
    shape = (len(problem.cell.gates), problem.cell.d_h)
    weight, bias = (np.asarray(a, dtype=work) for a in problem.cell.W_x)
    return Projection(weight.reshape(*shape, -1), bias.reshape(shape), start)


def _params(problem: Problem, work: np.dtype) -> list[np.ndarray]:
    return [lanes_first(p, work) for p in problem.cell.recurrent(problem.xp, problem.work_dtype)]


def _start(problem: Problem, work: np.dtype) -> list[np.ndarray]:
    """The slots before the first step, in arrays that may be written."""
    return [np.array(s, dtype=work, order="C") for s in problem.start()]


def run_forward(problem: Problem, exact: bool) -> np.ndarray:
    """States (B, T, …) in the dtype of the input."""
    work = _work(problem)
    states = np.empty(problem.state_shape, work)
    params, carry, projection = _params(problem, work), _start(problem, work), _projection(problem, work, 0)
    whole = problem.x.dtype == work
    parts = [slice(0, problem.shape[1])] if whole else _stretches(problem, problem.shape[2], work.itemsize)
    for part in parts:
        inputs = np.asarray(problem.x[:, part], dtype=work)
        kept = [s[:, part] for s in problem.slots_of(states)]
        operands = Operands(carry=carry, rows=(), consts=params, kept=kept, inputs=inputs)
        run_loop(programs_of(problem.cell).advance, [operands], projection=projection, exact=exact)
    return states.astype(problem.dtype, copy=False)


def run_backward(problem: Problem, states: np.ndarray, cotangent: np.ndarray, exact: bool) -> Gradients:
    """Gradients by one reverse loop."""
    cell, work = problem.cell, _work(problem)
    batch, _, features, width = problem.shape
    gates, size = len(cell.gates), cell.state_slots
    params, projection = _params(problem, work), _projection(problem, work, size)
    weight = np.asarray(cell.W_x.weight, dtype=work)
    slots, given = (problem.slots_of(np.asarray(a, dtype=work)) for a in (states, cotangent))
    future = [np.zeros((batch, width), work) for _ in range(size)]
    sums = [np.zeros((batch, width), work) for _ in range(len(params) + gates)]
    d_x, d_weight = np.empty(problem.x.shape, work), np.zeros((gates * width, features), work)
    stretches = _stretches(problem, gates * width + features, work.itemsize)
    # One buffer for all: fresh memory has to be cleared by the system, page by page.
    buffer = np.empty(batch * max((s.stop - s.start for s in stretches), default=0) * gates * width, work)
    for part in reversed(stretches):
        inputs = lanes_first(problem.x[:, part], work)
        shape = (batch, part.stop - part.start, gates, width)
        d_gates = buffer[: math.prod(shape)].reshape(shape)

        def operands(steps: slice, previous: list[np.ndarray], part: slice = part, d_gates: np.ndarray = d_gates,
                     inputs: np.ndarray = inputs) -> Operands:  # fmt: skip
            local = slice(steps.start - part.start, steps.stop - part.start)
            rows = [lanes_first(r, work) for r in (*previous, *(c[:, steps] for c in given))]
            stored = [d_gates[:, local, g] for g in range(gates)]
            return Operands(future, rows, params, (), stored, sums, inputs[:, local])

        # The state before the very first step is not among the states.
        first = max(part.start, 1)
        runs = [operands(slice(first, part.stop), [s[:, first - 1 : part.stop - 1] for s in slots])]
        if not part.start:
            runs.append(operands(slice(0, 1), [s[:, None] for s in _start(problem, work)]))
        run_loop(
            programs_of(cell).back_propagate, runs, projection=projection, reverse=True, add_stored=True, exact=exact
        )
        flat = d_gates.reshape(batch, part.stop - part.start, gates * width)
        multiply(flat, weight, d_x[:, part])
        add_products(flat.transpose(0, 2, 1), inputs, d_weight)
    totals = [s.sum(axis=0) for s in sums]
    d_bias = np.concatenate(totals[len(params) :])
    grads = collect_gradients(problem, totals[: len(params)], d_weight, d_bias)
    h0 = future[0] if size == 1 else np.stack(future, axis=1)
    return Gradients(d_x.astype(problem.dtype, copy=False), grads, h0.astype(problem.dtype, copy=False))
