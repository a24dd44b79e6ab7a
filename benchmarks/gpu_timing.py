"""Times on a CUDA card: under graph replay, and of plain calls."""

from __future__ import annotations

import time as clock

import torch


def replayed_ms(run, repeats: int = 40) -> float:
    """Milliseconds of one run under graph replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    for _ in range(20):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def called_ms(run, repeats: int = 30) -> tuple[float, float]:
    """Milliseconds of one plain call on the device, and microseconds that the host spends in it."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    first = clock.perf_counter()
    for _ in range(repeats):
        run()
    host = (clock.perf_counter() - first) / repeats * 1e6
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats, host
