"""How a problem is laid over the GPU: segments, warm-up, channels per program, launches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """`segments` of `length` steps; `block` channels per program of `warps` warps; at most `passes` launches."""

    length: int
    segments: int
    warmup: int
    block: int
    warps: int
    passes: int


def choose_shape(
    batch: int,
    time: int,
    width: int,
    *,
    segment_len: int | None,
    warmup: int | None,
    passes: int,
    long_memory: bool,
    half: bool = False,
) -> Shape:
    """The layout for (B, T, D), from times measured on an H200 (benchmarks/gpu_channelwise.py)."""
    lanes = batch * width
    if half and lanes >= 2048:
        # Two channels a thread: half as many loads for the same bytes in flight.
        block, warps = 64, 1
    else:
        block, warps = (32, 1) if lanes <= 32768 else (64, 1) if lanes <= 65536 else (128, 4)
    loop = Shape(max(time, 1), 1, 0, block, warps, 1)
    if segment_len is None:
        # With this many channels the plain loop already keeps the memory busy; short ones end before a join would.
        if lanes >= 32768 or time <= 256 or long_memory:
            return loop
        # About 131,072 threads hide the latency of memory without more joints than needed.
        segment_len = min(512, max(64, -(-time * lanes // 131_072)))
        segment_len = -(-segment_len // 8) * 8
    if segment_len >= time:
        return loop
    return Shape(
        segment_len,
        -(-time // segment_len),
        min(segment_len, 48) if warmup is None else warmup,
        block,
        warps,
        # The first two launches only compare; what they leave open needs a third that finishes.
        max(3, passes),
    )
