"""How a problem is laid over the GPU: segments, warm-up, threads in a block, launches."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Launches of a solve over segments: a plain pass, a rerun of what did not match, and passes with tangents. Those that
# find nothing to do end at once, and the last one finishes exactly.
DEFAULT_PASSES = 6
FEWEST_PASSES = 3


@dataclass(frozen=True)
class Layout:
    """`segments` of `length` steps after `warmup` steps each; `block` threads in a block; at most `passes` launches."""

    length: int
    segments: int
    warmup: int
    block: int
    passes: int


def block_of(threads: int) -> int:
    """Threads in a block: one warp while there are fewer warps than a card has schedulers, then more."""
    return 32 if threads <= 32_768 else 64 if threads <= 131_072 else 128


def choose_layout(
    batch: int, time: int, width: int, *, segment_len: int | None, warmup: int | None, passes: int, long_memory: bool
) -> Layout:
    """The layout for (B, T, D), from times measured on an H200 (benchmarks/gpu_cupy.py)."""
    lanes = batch * width
    loop = Layout(max(time, 1), 1, 0, block_of(lanes), 1)
    if segment_len is None:
        # With this many channels the plain loop already keeps the memory busy; short ones end before a join would.
        if lanes >= 32_768 or time <= 128 or long_memory:
            return loop
        # Short segments wait for their warm-up and long ones for each other; in between lies 64 for 2^20 lanes and
        # steps, growing with the root of their number.
        segment_len = min(512, max(64, 1 << int(math.log2(64.0 * math.sqrt(time * lanes / 2**20)))))
    if segment_len >= time:
        return loop
    segments = -(-time // segment_len)
    ahead = min(segment_len, 64) if warmup is None else min(segment_len, warmup)
    return Layout(segment_len, segments, ahead, block_of(lanes * segments), max(FEWEST_PASSES, passes))
