"""The cost model: how long a loop takes on an engine, and from that the path, the segments and the windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from pararnn.engine import HEAVY, Costs
from pararnn.programs import LoopProgram, StepPrograms

# Segments are taken only where the model sees at least this gain, because a loop is exact by construction.
MARGIN = 1.25
SEGMENT_LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
DEFAULT_WARMUP = 64


def kernel_reason(length: int, segments: int, passes: int) -> str:
    """Why a problem is laid over a graphics card as it is, for :func:`pararnn.explain`."""
    if segments == 1:
        return "one kernel loops over time: the channels keep the memory busy, or the sequence is short"
    return f"segments of {length} fill the chip; up to {passes} launches, ended early on the device"


class Windows:
    """What a plan's segments make of a sequence: windows of `segments` segments, each of `segment_len` steps."""

    segment_len: int
    segments: int

    def windows(self, time: int) -> Iterator[tuple[int, int, int]]:
        """(first step, L, C) of each window; what is left over at the end is one short segment of its own."""
        start = 0
        while start < time:
            length = min(self.segment_len, time - start)
            count = min(self.segments, (time - start) // length)
            yield start, length, count
            start += length * count


@dataclass(frozen=True)
class Plan(Windows):
    """Segments of `segment_len` steps (T for the time loop), `segments` of them in a window, and why."""

    path: str
    segment_len: int
    segments: int
    reason: str
    predicted_us: float


def _operations(loop: LoopProgram) -> tuple[int, int, int]:
    """Simple and heavy operations of one row, and array calls; counted once, kept with the program."""
    if "operations" not in loop.compiled:
        heavy = sum(i.op in HEAVY for i in loop.program.instructions)
        simple = len(loop.program.instructions) - heavy
        # A sigmoid is four array operations, everything else about one.
        calls = simple + heavy + 3 * sum(i.op == "sigmoid" for i in loop.program.instructions)
        loop.compiled["operations"] = simple, heavy, calls
    return loop.compiled["operations"]


def step_us(loop: LoopProgram, lanes: int, costs: Costs) -> float:
    """Predicted microseconds of one row of `loop` on `lanes` lanes."""
    simple, heavy, calls = _operations(loop)
    return costs.row_us + calls * costs.overhead_us + lanes * 1e-3 * (simple * costs.simple_ns + heavy * costs.heavy_ns)


@lru_cache(maxsize=1024)
def fitting_length(time: int, wanted: int) -> int:
    """A segment length near `wanted` that leaves few steps over."""
    low, high = max(1, wanted * 7 // 8), max(1, wanted * 9 // 8)
    return min(range(low, min(high, time) + 1), key=lambda l: (time % l, abs(l - wanted)), default=wanted)


def window_segments(length: int, lanes: int, row_arrays: int, item: int, time: int, budget: int) -> int:
    """How many segments fit into one window's memory of `budget` bytes, at least one."""
    bytes_each = max(1, length * lanes * row_arrays * item)
    return max(1, min(time // length, budget // bytes_each))


def make_plan(
    programs: StepPrograms,
    costs: Costs,
    *,
    time: int,
    lanes: int,
    item: int,
    segment_len: int | None,
    warmup: int | None,
    long_memory: bool,
    backward: bool = False,
) -> Plan:
    """The cheapest predicted way through `time` steps of `lanes` independent channels (B·D)."""
    row_arrays = len(programs.gate_names) + 2 * programs.size
    if backward:
        # The sweeps hold Jacobian entries and the gates' cotangents too.
        row_arrays += len(programs.gate_names) + programs.size + len(programs.j.flat)
    if time <= 1 or (segment_len is not None and segment_len >= time):
        return Plan("sequential", max(time, 1), 1, "one segment covers the whole sequence", 0.0)
    if segment_len is not None:
        count = window_segments(segment_len, lanes, row_arrays, item, time, costs.window_bytes)
        return Plan("segments", segment_len, count, f"segment_len={segment_len} was asked for", 0.0)
    loop_us = time * step_us(programs.adjoint if backward else programs.advance, lanes, costs)
    if long_memory and not backward:
        length = max(1, min(time, costs.window_bytes // max(1, lanes * row_arrays * item)))
        reason = "the cell remembers by design, too long for segments to settle within rounding"
        return Plan("sequential", length, 1, reason, loop_us)
    best = Plan("sequential", time, 1, "", loop_us)
    for wanted in SEGMENT_LENGTHS:
        if wanted * 3 > time:
            break
        length = fitting_length(time, wanted)
        count = window_segments(length, lanes, row_arrays, item, time, costs.window_bytes)
        if count < 2:
            continue
        predicted = _segments_us(programs, costs, time, length, count, lanes, warmup, backward)
        if predicted < best.predicted_us:
            best = Plan("segments", length, count, "", predicted)
    if best.path == "segments" and best.predicted_us * MARGIN < loop_us:
        reason = f"segments of {best.segment_len} are predicted {loop_us / best.predicted_us:.1f}x faster than the loop"
        return Plan("segments", best.segment_len, best.segments, reason, best.predicted_us)
    gain = f"{loop_us / best.predicted_us:.2f}x" if best.path == "segments" else "no gain"
    reason = f"{time} steps of {lanes} channels run fastest as one loop: segments would bring {gain}"
    length = max(1, min(time, costs.window_bytes // max(1, lanes * row_arrays * item)))
    return Plan("sequential", length, 1, reason, loop_us)


def _segments_us(
    programs: StepPrograms,
    costs: Costs,
    time: int,
    length: int,
    count: int,
    lanes: int,
    warmup: int | None,
    backward: bool,
) -> float:
    """Predicted microseconds of all windows of `count` segments."""
    wide = count * lanes
    if backward:
        per_row = step_us(programs.adjoint_affine, wide, costs) + step_us(programs.adjoint, wide, costs)
        per_joint = step_us(programs.adjoint_joints, lanes, costs)
        one = length * per_row + count * per_joint
    else:
        plain = step_us(programs.advance, wide, costs)
        tangent = step_us(programs.advance_tangent, wide, costs)
        per_joint = step_us(programs.correct, lanes, costs)
        before = min(length, DEFAULT_WARMUP if warmup is None else warmup)
        # After a full warm-up most channels need the plain pass only; after a short one all need tangents, twice.
        extra = 0.5 if before >= DEFAULT_WARMUP else 2.0
        one = before * plain + length * (plain + extra * tangent) + (1.0 + extra) * count * per_joint
    moved = len(programs.gate_names) + programs.size
    one += length * wide * moved * 1e-3 * costs.layout_ns + costs.window_us
    windows = time / (length * count)
    leftover = (time % length) * step_us(programs.advance, lanes, costs)
    return windows * one + leftover
