"""NewtonStats: what a solve did and how far its result can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Later:
    """A value that is computed when it is first asked for."""

    measure: Callable[[], Any]


@dataclass
class NewtonStats:
    """Filled in place by a solve; pass one as ``stats=`` to read it afterwards.

    Attributes:
        max_residual: max|f(h_{t-1}, x_t) - h_t|; for segments the largest mismatch at a joint.
        iters: Newton corrections made (the most of any window).
        scan_backend: the backend that ran.
        picard_iters: Picard sweeps made before Newton.
        residual_history: max_residual before each correction, where it was computed.
        path: 'sequential', 'segments', 'per-step', or 'scan' for a recurrence that is linear in its state.
        segment_len, segments: L, and how many segments a window had.
        windows: stretches of time solved one after the other.
        passes: passes over the segments, the writing pass included (the most of any window).
        walked: share of (segment, channel) pairs that the exact finish had to re-run in order.
        agreement_estimate: estimated largest error against the time loop, relative to each slot's scale.
        exact: all joints matched bit for bit (or one loop ran), so the result is that of this backend's own time loop.
            `sequential_apply` may still differ by rounding: its projection W_x x is blocked differently, and another
            backend's exp rounds differently.
        converged: the estimate met the tolerance (always true for ``max_iters=None``).
        lyapunov: largest finite-time Lyapunov exponent of any channel, per step; computed when first read.
        reason: one sentence on why this path was taken.

    >>> import numpy as np, pararnn
    >>> stats = NewtonStats()
    >>> h = pararnn.newton_apply(pararnn.ParaTanh(1, 2, seed=0), np.ones((1, 9, 1), dtype=np.float32), stats=stats)
    >>> stats.converged, stats.lyapunov < 0.0
    (True, True)
    """

    max_residual: float = math.nan
    iters: int = 0
    scan_backend: str = ""
    picard_iters: int = 0
    residual_history: tuple[float, ...] = ()
    path: str = ""
    segment_len: int = 0
    segments: int = 0
    windows: int = 0
    passes: int = 0
    walked: float = 0.0
    agreement_estimate: float = math.nan
    exact: bool = False
    converged: bool = False
    reason: str = ""
    lyapunov: float = math.nan

    @classmethod
    def of_loop(cls, backend: str, time: int, reason: str) -> NewtonStats:
        """The report of one exact loop over `time` steps."""
        return cls(
            path="sequential",
            scan_backend=backend,
            max_residual=0.0,
            segment_len=time,
            segments=1,
            windows=1,
            passes=1,
            agreement_estimate=0.0,
            exact=True,
            converged=True,
            reason=reason,
        )

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if isinstance(value, Later):
            value = value.measure()
            object.__setattr__(self, name, value)
        return value

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and sent to other processes: numbers only, so what was put off is computed now."""
        return {name: getattr(self, name) for name in self.__dict__}

    def later(self, **measures: Callable[[], Any]) -> None:
        """Has fields computed when somebody first reads them, so that a solve need not wait for its device."""
        for name, measure in measures.items():
            object.__setattr__(self, name, Later(measure))

    def fill(self, other: NewtonStats) -> None:
        """Takes over every field of `other`."""
        self.__dict__.update(other.__dict__)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings for a log; the Lyapunov exponent only if somebody has read it already."""
        known = not isinstance(self.__dict__["lyapunov"], Later)
        return {name: getattr(self, name) if name != "lyapunov" or known else None for name in self.__dict__}
