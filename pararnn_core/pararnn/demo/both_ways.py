"""One sequence as a time loop and in parallel: the speed of each, and how far they agree."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from pararnn.cells import ChannelwiseCell
from pararnn.config import NewtonConfig
from pararnn.newton import newton_apply
from pararnn.sequential import sequential_apply
from pararnn.stats import NewtonStats
from pararnn.verify import AgreementReport, compare

# The best of a few, because one stray interruption would decide who wins; the loop is long and gets fewer.
REPEATS, LOOP_REPEATS = 3, 2


@dataclass(frozen=True)
class BothWays:
    """Seconds of the time loop and of the parallel run, their agreement, and the solver's own account."""

    batch: int
    length: int
    loop_s: float
    parallel_s: float
    report: AgreementReport
    stats: NewtonStats

    @property
    def speedup(self) -> float:
        return self.loop_s / self.parallel_s

    def speed(self) -> list[str]:
        """One line for each of the two runs."""
        steps = self.batch * self.length
        return [
            f"time loop   {self.loop_s * 1e3:9,.1f} ms {steps / self.loop_s:12,.0f} steps/s   (sequential_apply)",
            f"pararnn     {self.parallel_s * 1e3:9,.1f} ms {steps / self.parallel_s:12,.0f} steps/s"
            f"   (newton_apply) {self.speedup:.1f}x",
        ]

    def lines(self) -> list[str]:
        """The whole account."""
        report, stats = self.report, self.stats
        verdict = "agrees" if report.ok else "DISAGREES"
        slots = f" ({_listing(report.slots)})" if len(report.slots) > 1 else ""
        settled = "converged" if stats.converged else "NOT CONVERGED"
        own = f"{settled}, estimates its own error at {stats.agreement_estimate:.1e}"
        if stats.exact:
            own = "exact: all joints match bit for bit" if stats.path == "segments" else "exact: no joints"
        return [
            *self.speed(),
            f"agreement   {verdict}: relative error {report.max_rel:.1e}{slots}, allowed {report.atol:.0e}",
            f"solver      {own}",
            f"path        {describe(stats)}",
            f"memory      {_memory(stats.lyapunov)}",
        ]


def describe(stats: NewtonStats) -> str:
    """The path in a phrase."""
    if stats.path != "segments":
        path = {"sequential": "one time loop", "per-step": "one unknown per time step"}.get(stats.path, stats.path)
        return f"{path}, on {stats.scan_backend}"
    walked = f", {stats.walked:.1%} walked in order" if stats.walked else ""
    return (
        f"{stats.segments} segments of {stats.segment_len} steps at a time, {stats.windows} "
        f"window{'s' * (stats.windows != 1)}, {stats.passes} pass{'es' * (stats.passes != 1)}{walked}, "
        f"on {stats.scan_backend}"
    )


def _memory(exponent: float) -> str:
    """The largest Lyapunov exponent of any channel, in words."""
    if not math.isfinite(exponent):
        return "every channel forgets all within a few steps" if exponent < 0.0 else f"Lyapunov exponent {exponent}"
    if exponent < 0.0:
        steps = math.ceil(-1.0 / exponent)
        return f"a disturbance shrinks e-fold in {steps:,} steps or fewer (Lyapunov exponent {exponent:+.1e} a step)"
    return f"a disturbance does not fade (Lyapunov exponent {exponent:+.1e} a step)"


def _listing(slots: dict[str, float]) -> str:
    return ", ".join(f"{name} {error:.1e}" for name, error in slots.items())


def run_both_ways(
    cell: ChannelwiseCell, x: np.ndarray, config: NewtonConfig | None = None, *, atol: float | None = None
) -> BothWays:
    """Runs `cell` on `x` (B, T, I) both ways; `atol` as for verify_agreement."""
    # What is done once in a process (tracing the step, measuring the machine) belongs to no run.
    newton_apply(cell, x[:, : max(1, x.shape[1] // 8)], config)
    stats, parallel_s, loop_s = NewtonStats(), math.inf, math.inf
    for _ in range(REPEATS):
        begin = time.perf_counter()
        parallel = newton_apply(cell, x, config, stats=stats)
        parallel_s = min(parallel_s, time.perf_counter() - begin)
    for _ in range(LOOP_REPEATS):
        begin = time.perf_counter()
        loop = sequential_apply(cell, x)
        loop_s = min(loop_s, time.perf_counter() - begin)
    report = compare(cell, parallel, loop, stats, atol=atol)
    return BothWays(int(x.shape[0]), int(x.shape[1]), loop_s, parallel_s, report, stats)
