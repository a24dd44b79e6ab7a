"""K*(T): how many Newton iterations agree with the time loop, measured per cell and length.

For settings in which the amount of work must not depend on values (compilers, graph capture). The tables hold for the
weights that they were measured with; the default solver measures its own convergence and does not need them.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from pararnn.config import LIBRARY_NEWTON_ITERS, iterations_from
from pararnn.k_star_tables import MEASURED

WEIGHTS = ("initial", "trained")


def _with_spare(table: dict[int, int]) -> dict[int, int]:
    """One more than measured, and never less than at a shorter length."""
    return dict(zip(table, accumulate((k + 1 for k in table.values()), max), strict=True))


# Per step (L = 1), with the spare. A length that a table does not reach has no count that agrees (rounding in float32
# is the limit there). A recurrence that is linear in a matrix state needs no iteration.
_TABLES: dict[str, dict[str, dict[int, int]]] = {
    weights: {name: _with_spare(table) for name, table in MEASURED[weights, "1"].items()} | {"ParaRWKV7": {1: 0}}
    for weights in WEIGHTS
}
K_STAR: dict[str, dict[int, int]] = _TABLES["initial"]


def auto_newton_iters(cell: Any, time: int, *, weights: str = "initial") -> int:
    """The measured iteration count for `cell` at length `time`, one spare included.

    Cells without a table get 3, the count of the published kernels.

    Args:
        weights: 'initial', or 'trained' for what a byte model of each cell needed after 150 steps.

    Raises:
        ValueError: `time` is negative, or `weights` is neither.

    >>> from pararnn import ParaGRU
    >>> auto_newton_iters(ParaGRU(2, 3), 1024)
    4
    """
    if time < 0:
        raise ValueError(f"auto_newton_iters: time must be at least 0, got {time}")
    if weights not in WEIGHTS:
        raise ValueError(f"auto_newton_iters: weights must be one of {WEIGHTS}, got {weights!r}")
    table = _TABLES[weights].get(type(cell).__name__)
    return LIBRARY_NEWTON_ITERS if table is None else iterations_from(table, time)
