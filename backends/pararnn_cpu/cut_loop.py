"""The forward loop cut into segments that run side by side, where few lanes would leave vectors and cores empty.

Every segment starts from a warm-up over the steps before it. Where all segments meet bit for bit, which is tested, each
has started from the state in which the one before it ended, and the result is the time loop's own; from the first joint
that does not meet, the time loop takes over. No tangents and no tolerance: a network that forgets within a warm-up
gains, any other has lost a fraction of its time. A gradient gains nothing by it, because one step of its loop does not
wait for the long part of the step before.
"""

from __future__ import annotations

import numpy as np

from pararnn.problem import Problem
from pararnn.programs import programs_of
from pararnn_cpu.cut import Cut
from pararnn_cpu.engine import Operands, aligned, run_loop
from pararnn_cpu.time_loop import Parts

WARMUP = 64


def run_forward(problem: Problem, cut: Cut) -> tuple[np.ndarray, int]:
    """States (B, T, …), and how many steps had to be run again."""
    parts = Parts(problem, 0)
    batch, time, _, width = problem.shape
    length, segments = cut.length, cut.segments
    inputs = np.asarray(problem.x, dtype=parts.work)
    states = aligned(problem.state_shape, parts.work)
    slots = problem.slots_of(states)

    def run(carry: list[np.ndarray], first: int, steps: int, segments: int = 1) -> None:
        """Carries, by slot (B·segments, D), through `steps` steps from step `first` of each segment on."""
        kept = [s[:, first:] for s in slots]
        operands = Operands(carry, (), parts.params, kept, (), (), inputs[:, first:], segments, length, steps)
        run_loop(programs_of(problem.cell).advance, [operands], projection=parts.projection)

    # At the end of every segment, for the next; its states are written over in the next run.
    warm = [np.zeros((batch * segments, width), parts.work) for _ in slots]
    run(warm, length - WARMUP, WARMUP, segments)
    starts, ends = [], []
    for start, after in zip(parts.start(), warm, strict=True):
        grid = after.reshape(batch, segments, width)
        starts.append(np.concatenate([start[:, None], grid[:, :-1]], axis=1))
        ends.append(starts[-1].reshape(after.shape).copy())
    run(ends, 0, length, segments)
    ended = [e.reshape(batch, segments, width) for e in ends]
    right = _right_segments(starts, ended)
    resume = right * length
    if resume < time:
        run([np.ascontiguousarray(e[:, right - 1]) for e in ended], resume, time - resume)
    return states.astype(problem.dtype, copy=False), 0 if right == segments else time - resume


def _right_segments(starts: list[np.ndarray], ends: list[np.ndarray]) -> int:
    """How many segments, from the first on, start where the one before ended, bit for bit (NaN equals NaN)."""
    meet = np.ones(starts[0].shape[1], bool)
    for start, end in zip(starts, ends, strict=True):
        this, following = end[:, :-1], start[:, 1:]
        meet[1:] &= ((this == following) | (np.isnan(this) & np.isnan(following))).all(axis=(0, 2))
    return int(np.argmin(meet)) if not meet.all() else len(meet)
