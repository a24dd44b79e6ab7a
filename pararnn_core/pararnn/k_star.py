"""K*(T): how many Newton iterations agree with the time loop, measured per cell and length.

For settings in which the amount of work must not depend on values (compilers, graph capture). The tables hold for
weights near their initialisation; the default solver measures its own convergence and does not need them.
"""

from __future__ import annotations

from typing import Any

from pararnn.config import LIBRARY_NEWTON_ITERS, iterations_from

# Smallest K that agrees within 1e-4 (float32, worst of 3 seeds, L = 1), plus one; made by benchmarks/k_star.py.
# A length that a table does not reach has no count that agrees (float32 itself is the limit there).
K_STAR: dict[str, dict[int, int]] = {
    "ParaGRU": {64: 4, 1024: 4, 16384: 4, 131072: 4},
    "ParaLSTM": {64: 4, 1024: 4, 16384: 4, 131072: 4},
    "ParaSLSTM": {64: 4, 1024: 4, 16384: 10},
    "ParaTanh": {64: 3, 1024: 3, 16384: 3, 131072: 3},
}


def auto_newton_iters(cell: Any, time: int) -> int:
    """The measured iteration count for `cell` at length `time`, one spare included.

    Cells without a table get 3, the count of the published kernels.

    Raises:
        ValueError: `time` is negative.

    >>> from pararnn import ParaGRU
    >>> auto_newton_iters(ParaGRU(2, 3), 1024) >= 1
    True
    """
    if time < 0:
        raise ValueError(f"auto_newton_iters: time must be at least 0, got {time}")
    table = K_STAR.get(type(cell).__name__)
    return LIBRARY_NEWTON_ITERS if table is None else iterations_from(table, time)
