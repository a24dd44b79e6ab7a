"""The time loop cut into segments that run side by side, where few lanes would leave vectors and cores empty.

Every segment starts from a warm-up over the steps before it. Where all segments meet bit for bit, which is tested, each
has started from the state in which the one before it ended, and the result is the time loop's own; from the first joint
that does not meet, the time loop takes over. No tangents and no tolerance: a network that forgets within a warm-up
gains, any other has lost one pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pararnn.adjoint import Gradients
from pararnn.problem import Problem
from pararnn.programs import programs_of
from pararnn_cpu.engine import Operands, lanes_first, run_loop
from pararnn_cpu.time_loop import Parts, gradients_from

WARMUP = 64
# Lanes that occupy the vectors of several cores. Not the number of this machine's: sums over segments must have the
# same bits everywhere.
LANES = 512
# Steps that a segment must have for its warm-up to be a small price: for so few lanes that a vector is mostly empty,
# and for more.
FEW, SHORT, LONG = 16, 128, 1024
# Bytes of the gates' cotangents, which a cut gradient holds for the whole sequence.
MOST_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Cut:
    """C segments of L steps; what does not fill a segment is left over at the end."""

    segments: int
    length: int

    @property
    def stop(self) -> int:
        return self.segments * self.length


def cut_of(problem: Problem) -> Cut | None:
    """How to cut a problem, by its shape alone; None if the plain loop is better."""
    batch, time, _, width = problem.shape
    if problem.cell.solve_cell().picard_start or not batch:
        return None
    shortest = SHORT if batch * width <= FEW else LONG
    segments = min(LANES // (batch << (width - 1).bit_length()), time // shortest)
    return Cut(segments, time // segments) if segments > 1 else None


def run_forward(problem: Problem, cut: Cut) -> tuple[np.ndarray, int]:
    """States (B, T, …), and the steps that had to be run again."""
    parts = Parts(problem, 0)
    batch, time, _, width = problem.shape
    length, segments = cut.length, cut.segments
    inputs = np.asarray(problem.x, dtype=parts.work)
    states = np.empty(problem.state_shape, parts.work)
    slots = problem.slots_of(states)
    loop = programs_of(problem.cell).advance

    def run(carry: list[np.ndarray], first: int, steps: int, segments: int = 1) -> None:
        kept = [s[:, first:] for s in slots]
        operands = Operands(carry, (), parts.params, kept, (), (), inputs[:, first:], segments, length, steps)
        run_loop(loop, [operands], projection=parts.projection)

    # Written over in the next run: the warm-up's states, at the end of the segment before.
    warm = [np.zeros((batch * segments, width), parts.work) for _ in slots]
    run(warm, length - WARMUP, WARMUP, segments)
    starts = [_shifted(w, s, batch) for w, s in zip(warm, parts.start(), strict=True)]
    ends = [s.copy() for s in starts]
    run(ends, 0, length, segments)
    met = _first_gap(starts, ends, batch, segments)
    resume = cut.stop if met is None else (met + 1) * length
    if resume < time:
        last = [np.ascontiguousarray(_grid(e, batch)[:, resume // length - 1]) for e in ends]
        run(last, resume, time - resume)
    return states.astype(problem.dtype, copy=False), 0 if met is None else time - resume


def run_backward(problem: Problem, states: np.ndarray, cotangent: np.ndarray, cut: Cut) -> Gradients | None:
    """Gradients by a reverse loop over the segments, or None if they do not meet."""
    cell, size = problem.cell, problem.cell.state_slots
    parts = Parts(problem, size)
    batch, time, _, width = problem.shape
    gates, length, segments = len(cell.gates), cut.length, cut.segments
    shape = (batch, time, gates, width)
    if math.prod(shape) * parts.work.itemsize > MOST_BYTES:
        return None
    d_gates, inputs = np.empty(shape, parts.work), lanes_first(problem.x, parts.work)
    slots, given = (problem.slots_of(np.asarray(a, dtype=parts.work)) for a in (states, cotangent))
    before = [np.concatenate([s[:, None], t[:, :-1]], axis=1) for s, t in zip(parts.start(), slots, strict=True)]
    rows = [lanes_first(r, parts.work) for r in (*before, *given)]
    loop, count = programs_of(cell).back_propagate, len(parts.params) + gates

    def run(carry: list[np.ndarray], first: int, steps: int, segments: int = 1) -> list[np.ndarray]:
        sums = [np.zeros((batch * segments, width), parts.work) for _ in range(count)]
        stored = [d_gates[:, first:, g] for g in range(gates)]
        here = [r[:, first:] for r in rows]
        operands = Operands(carry, here, parts.params, (), stored, sums, inputs[:, first:], segments, length, steps)
        run_loop(loop, [operands], projection=parts.projection, reverse=True, add_stored=True)
        return sums

    def zeros(entries: int) -> list[np.ndarray]:
        return [np.zeros((entries, width), parts.work) for _ in range(size)]

    end = zeros(batch)
    left_over = run(end, cut.stop, time - cut.stop) if cut.stop < time else []
    warm = zeros(batch * segments)
    run(warm, 0, WARMUP, segments)
    # What comes from the future, last segment first: the one after it warmed up backwards.
    starts = [_shifted(w, e, batch, back=True) for w, e in zip(warm, end, strict=True)]
    ends = [s.copy() for s in starts]
    sums = run(ends, 0, length, segments)
    if _first_gap(ends, starts, batch, segments) is not None:
        return None
    if left_over:
        sums = [np.concatenate([s, more]) for s, more in zip(sums, left_over, strict=True)]
    future = [np.ascontiguousarray(_grid(e, batch)[:, 0]) for e in ends]
    return gradients_from(problem, parts, [(slice(0, time), inputs, d_gates)], sums, future)


def _grid(entries: np.ndarray, batch: int) -> np.ndarray:
    """(B·C, D) as (B, C, D)."""
    return entries.reshape(batch, -1, entries.shape[-1])


def _shifted(entries: np.ndarray, edge: np.ndarray, batch: int, back: bool = False) -> np.ndarray:
    """(B·C, D) moved on by one segment (or back), with `edge` (B, D) in the place that falls free."""
    grid = _grid(entries, batch)
    pieces = [grid[:, 1:], edge[:, None]] if back else [edge[:, None], grid[:, :-1]]
    return np.concatenate(pieces, axis=1).reshape(entries.shape)


def _first_gap(starts: list[np.ndarray], ends: list[np.ndarray], batch: int, segments: int) -> int | None:
    """The first segment whose end is not the next one's start, bit for bit (NaN equals NaN)."""
    gap = np.zeros(segments - 1, bool)
    for start, end in zip(starts, ends, strict=True):
        this, following = _grid(end, batch)[:, :-1], _grid(start, batch)[:, 1:]
        gap |= ~((this == following) | (np.isnan(this) & np.isnan(following))).all(axis=(0, 2))
    return int(np.argmax(gap)) if gap.any() else None
