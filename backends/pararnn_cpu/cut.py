"""Whether the forward loop is cut into segments that run side by side, and how."""

from __future__ import annotations

from dataclasses import dataclass

from pararnn.problem import Problem
from pararnn_cpu.threads import thread_count

CUT = (
    "few channels: segments of the compiled loop run side by side, each from a warm-up, and are kept where they meet "
    "bit for bit"
)
# Where cutting gains, measured: up to so many lanes for a core, sequences and features (a projection of many features
# takes all the time there is), and from so many steps on.
FEW_LANES, FEW_SEQUENCES, FEW_FEATURES, LEAST_TIME = 4, 2, 16, 16384
# Lanes of all segments together, which fill the vectors of several cores; and steps that a segment has at least.
LANES, LEAST_STEPS = 512, 128


@dataclass(frozen=True)
class Cut:
    """C segments of L steps; what does not fill a segment is left over at the end."""

    segments: int
    length: int


def cut_of(problem: Problem) -> Cut | None:
    """How to cut a problem; None if the plain loop is better."""
    batch, time, features, width = problem.shape
    if time < LEAST_TIME or features > FEW_FEATURES or not 0 < batch <= FEW_SEQUENCES:
        return None
    if batch * width > FEW_LANES * thread_count():
        return None
    # Long memory by design never meets.
    if problem.cell.long_memory:
        return None
    segments = min(LANES // (batch << (width - 1).bit_length()), time // LEAST_STEPS)
    return Cut(segments, time // segments) if segments > 1 else None
