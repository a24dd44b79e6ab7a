"""The compiled time loop, forward and backward, on arrays in their public layout: nothing is copied or transposed."""

from __future__ import annotations

import contextlib
import math

import numpy as np

from pararnn.adjoint import Gradients, collect_gradients, starts_gradient
from pararnn.arrays import dtype_name
from pararnn.problem import Problem
from pararnn.programs import Marks, programs_of
from pararnn_cpu.engine import Operands, Projection, aligned, lanes_first, run_loop
from pararnn_cpu.product import add_products, multiply

# Bytes of the arrays that live for one stretch of time only, converted inputs and cotangents of the gates: they stay in
# cache until the products that read them.
STRETCH_BYTES = 8 * 2**20


# Buffers kept for the next gradient, because the system clears fresh memory page by page: at most two, of one stretch
# each. Appending and popping are atomic, so threads may share them.
_spare: list[np.ndarray] = []


def _borrow(size: int) -> np.ndarray:
    """`size` bytes of memory, if possible of an earlier gradient's."""
    with contextlib.suppress(IndexError):
        buffer = _spare.pop()
        if size <= buffer.nbytes:
            return buffer
    return aligned((size,), np.uint8)


def _give_back(buffer: np.ndarray) -> None:
    if buffer.nbytes <= STRETCH_BYTES and len(_spare) < 2:
        _spare.append(buffer)


class Parts:
    """A problem's arrays as the loops want them; `work` is the dtype of the arithmetic, in native byte order."""

    def __init__(self, problem: Problem, first_gate: int) -> None:
        cell = problem.cell
        self.problem = problem
        self.work = np.dtype(dtype_name(problem.work_dtype))
        self.params = [lanes_first(p, self.work) for p in cell.recurrent(problem.xp, problem.work_dtype)]
        weight, bias = (np.asarray(a, dtype=self.work) for a in cell.W_x)
        shape = (len(cell.gates), cell.d_h)
        self.weight = weight
        self.projection = Projection(weight.reshape(*shape, -1), bias.reshape(shape), first_gate)
        # Documents are runs of their own, one after the other; where resets come in, the step has to choose its start.
        places = problem.places
        self.by_documents = places is not None and problem.documents == places.shape[0]
        self.told = Marks(hold=problem.hold is not None) if self.by_documents else problem.marks
        self.programs = programs_of(cell, marks=self.told)

    def sequences(self) -> list[tuple[int, int, list[np.ndarray]]]:
        """First step, end, and the slots before it, to be written over: the whole of time, or each document."""
        problem = self.problem
        if not self.by_documents:
            return [(0, problem.shape[1], self.start())]
        assert problem.offsets is not None and problem.documents is not None
        shape = (problem.documents, problem.cell.state_slots, problem.cell.d_h)
        starts = np.zeros(shape, self.work)
        if problem.starts is not None:
            starts[...] = np.asarray(problem.starts).reshape(shape)
        ends = problem.offsets.tolist()
        return [
            (begin, end, [starts[n, None, s] for s in range(shape[1])])
            for n, (begin, end) in enumerate(zip(ends, ends[1:], strict=False))
        ]

    def start(self) -> list[np.ndarray]:
        """The slots before the first step, in arrays that may be written."""
        return [np.array(s, dtype=self.work, order="C") for s in self.problem.start()]

    def marks(self, steps: slice) -> list[np.ndarray]:
        """Heads, the starts that they load, and padding, of some steps, each (B, steps, D)."""
        problem, rows = self.problem, []
        batch, count, width = problem.shape[0], steps.stop - steps.start, problem.cell.d_h

        def spread(a: np.ndarray) -> np.ndarray:
            out = np.empty((batch, count, width), self.work)
            out[...] = a[:, steps, None]
            return out

        if self.told.head:
            assert problem.head is not None
            rows.append(spread(problem.head >= 0))
            if problem.starts is not None:
                starts = np.asarray(problem.starts, dtype=self.work).reshape(-1, problem.cell.state_slots, width)
                which = np.maximum(problem.head[:, steps], 0)
                rows += [np.take(starts[:, s], which, axis=0) for s in range(problem.cell.state_slots)]
        if problem.hold is not None:
            rows.append(spread(problem.hold))
        return rows

    def stretches(self, numbers: int) -> list[slice]:
        """Time cut so that `numbers` per batch and step stay within STRETCH_BYTES."""
        batch, time, _, _ = self.problem.shape
        steps = max(1, STRETCH_BYTES // max(1, batch * numbers * self.work.itemsize))
        return [slice(t, min(time, t + steps)) for t in range(0, time, steps)]


def run_forward(problem: Problem, exact: bool) -> np.ndarray:
    """States (B, T, …) in the dtype of the input."""
    parts = Parts(problem, 0)
    states = aligned(problem.state_shape, parts.work)
    programs, slots, sequences = parts.programs, problem.slots_of(states), parts.sequences()
    told = len(programs.gate_names) - len(programs.gates)
    whole = problem.x.dtype == parts.work and not told
    copied = problem.shape[2] + told * problem.cell.d_h
    for part in [slice(0, problem.shape[1])] if whole else parts.stretches(copied):
        inputs, marks, runs = np.asarray(problem.x[:, part], dtype=parts.work), parts.marks(part), []
        for begin, end, carry in sequences:
            steps = slice(max(begin, part.start), min(end, part.stop))
            if steps.start < steps.stop:
                local = slice(steps.start - part.start, steps.stop - part.start)
                kept, rows = [s[:, steps] for s in slots], [m[:, local] for m in marks]
                runs.append(Operands(carry, rows, parts.params, kept, inputs=inputs[:, local]))
        run_loop(programs.advance, runs, projection=parts.projection, exact=exact)
    return states.astype(problem.dtype, copy=False)


def run_backward(problem: Problem, states: np.ndarray, cotangent: np.ndarray, exact: bool) -> Gradients:
    """Gradients by one reverse loop, and for each stretch of it the products that need the gates' cotangents."""
    cell, size = problem.cell, problem.cell.state_slots
    parts = Parts(problem, size)
    batch, _, features, width = problem.shape
    gates, work = len(cell.gates), parts.work
    programs, sequences = parts.programs, parts.sequences()
    loop, drawn = programs.back_propagate, gates + len(programs.start_names)
    slots, given = (problem.slots_of(np.asarray(a, dtype=work)) for a in (states, cotangent))
    futures = [[np.zeros((batch, width), work) for _ in range(size)] for _ in sequences]
    sums = [np.zeros((batch, width), work) for _ in range(len(parts.params) + drawn)]
    begun = [np.empty((batch, problem.shape[1], width), work) for _ in programs.start_names]
    d_x, d_weight = aligned(problem.x.shape, work), np.zeros((gates * width, features), work)
    stretches = parts.stretches(gates * width + features)
    buffer = _borrow(batch * max((s.stop - s.start for s in stretches), default=0) * gates * width * work.itemsize)
    for part in reversed(stretches):
        inputs = lanes_first(problem.x[:, part], work)
        shape = (batch, part.stop - part.start, gates, width)
        d_gates = buffer[: math.prod(shape) * work.itemsize].view(work).reshape(shape)
        marks = parts.marks(part)
        pieces = []
        for (begin, end, start), future in zip(reversed(sequences), reversed(futures), strict=True):
            # The state before a sequence's first step is not among the states.
            first, stop = max(begin + 1, part.start), min(end, part.stop)
            if first < stop:
                pieces.append((slice(first, stop), [s[:, first - 1 : stop - 1] for s in slots], future))
            if part.start <= begin < stop:
                pieces.append((slice(begin, begin + 1), [s[:, None] for s in start], future))
        runs = []
        for steps, previous, future in pieces:
            local = slice(steps.start - part.start, steps.stop - part.start)
            told = [m[:, local] for m in marks]
            rows = [lanes_first(r, work) for r in (*previous, *told, *(c[:, steps] for c in given))]
            stored = [d_gates[:, local, g] for g in range(gates)] + [b[:, steps] for b in begun]
            runs.append(Operands(future, rows, parts.params, (), stored, sums, inputs[:, local]))
        run_loop(loop, runs, projection=parts.projection, reverse=True, add_stored=True, exact=exact)
        flat = d_gates.reshape(batch, part.stop - part.start, gates * width)
        multiply(flat, parts.weight, d_x[:, part])
        add_products(flat.transpose(0, 2, 1), inputs, d_weight)
    _give_back(buffer)
    totals = [s.sum(axis=0) for s in sums]
    count = len(parts.params)
    grads = collect_gradients(problem, totals[:count], d_weight, np.concatenate(totals[count : count + gates]))
    starts = starts_gradient(problem, begun) if begun else None
    if parts.by_documents:
        found = np.stack([np.concatenate(future) for future in futures]).reshape(-1, *cell.state_shape)
        starts = found.astype(problem.dtype, copy=False)
        futures = [[np.zeros((batch, width), work) for _ in range(size)]]
    (future,) = futures
    h0 = future[0] if size == 1 else np.stack(future, axis=1)
    return Gradients(d_x.astype(problem.dtype, copy=False), grads, h0.astype(problem.dtype, copy=False), starts=starts)
