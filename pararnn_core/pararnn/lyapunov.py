"""The largest finite-time Lyapunov exponent of a trajectory: does the network forget, latch or amplify?"""

from __future__ import annotations

import math

from pararnn.arrays import Array, quiet
from pararnn.engine import ArrayEngine
from pararnn.layout import Window, gate_rows, input_rows, rows_of
from pararnn.problem import Problem
from pararnn.programs import programs_of

# Short enough that a product of Jacobians neither overflows nor vanishes in float32 for ordinary networks.
STEPS = 32


def largest_exponent(problem: Problem, states: Array, engine: ArrayEngine) -> float:
    """log of the growth of a small disturbance, per step, in the channel where it grows most.

    ::

        λ = (1/T) log ‖J_{T-1} … J_0 v‖ / ‖v‖

    Negative: the network forgets and segments settle at once. Near zero: long memory. Positive: chaos, where no
    parallel method helps. Source: Gonzalez et al. 2025 (arXiv 2508.16817), section 3.
    """
    xp = problem.xp
    programs = programs_of(problem.cell, marks=problem.marks)
    batch, time, _, width = problem.shape
    length = min(STEPS, time)
    with quiet(xp):
        window = Window(0, length, time // length, batch, width)
        gates = gate_rows(problem, window, input_rows(problem, window))
        params = [xp.tile(p, (batch * window.segments,)) for p in problem.cell.recurrent(xp, problem.work_dtype)]
        starts = []
        for slot, first in zip(problem.slots_of(states), problem.start(), strict=True):
            slot = xp.astype(slot, problem.work_dtype, copy=False)
            ends = rows_of(xp, slot[:, : window.stop, :], window)[-1, : (window.segments - 1) * window.channels]
            starts.append(xp.concat([xp.reshape(first, (-1,)), ends]))
        one, zero = xp.ones_like(starts[0]), xp.zeros_like(starts[0])
        identity = [one if i == j else zero for i, j in programs.m.where]
        out = engine.loop(programs.advance_tangent, [*starts, *identity, *identity], gates, params)
        grid = (window.segments, window.channels)
        entries = [xp.reshape(a, grid) for a in out.carry[programs.size : programs.size + len(identity)]]
        vector = [xp.ones_like(entries[0][0, :])] * programs.size
        total, counted = xp.zeros_like(vector[0]), xp.zeros_like(vector[0])
        for c in range(window.segments):
            moved = [xp.zeros_like(total)] * programs.size
            for (i, j), entry in zip(programs.m.where, entries, strict=True):
                moved[i] = moved[i] + entry[c, :] * vector[j]
            size = sum((xp.abs(v) for v in moved[1:]), xp.abs(moved[0]))
            # Where a segment has forgotten everything, any direction serves to go on.
            gone = size == 0.0
            if problem.head is None:
                total, counted = total + xp.log(size), counted + window.length
            else:
                # A new start forgets by decree, which says nothing of the network.
                total = total + xp.where(gone, xp.zeros_like(size), xp.log(size))
                counted = counted + xp.where(gone, xp.zeros_like(size), xp.full_like(size, float(window.length)))
            vector = [xp.where(gone, xp.ones_like(v), v / xp.where(gone, xp.ones_like(size), size)) for v in moved]
        exponent = float(xp.max(total / counted))
    return exponent if not math.isnan(exponent) else math.nan
