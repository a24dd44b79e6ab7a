"""explain: what would run a problem, why, and what it would cost in memory, without running it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pararnn.arrays import Array, dtype_name
from pararnn.config import NewtonConfig
from pararnn.drives import with_drives
from pararnn.front import front_of
from pararnn.problem import make_problem
from pararnn.registry import choose


@dataclass(frozen=True)
class Explanation:
    """The choice for one problem; printing it gives the text.

    Attributes:
        backend, path, segment_len, segments, reason: what would run and why; as in NewtonStats.
        passes: passes that are usually enough.
        result_bytes: of the states that come back.
        working_bytes: of gate inputs and states of one window, while solving.
        refusals: by name of each backend that was asked before, the sentence in which it declined.
    """

    backend: str
    path: str
    segment_len: int
    segments: int
    passes: int
    reason: str
    result_bytes: int
    working_bytes: int
    refusals: dict[str, str]

    def __str__(self) -> str:
        where = self.path
        if self.path == "segments":
            where = f"segments of {self.segment_len} steps, {self.segments} at a time"
        states, working = self.result_bytes / 2**20, self.working_bytes / 2**20
        lines = [
            f"backend  {self.backend}",
            f"path     {where}; {self.passes} pass{'es' if self.passes > 1 else ''} expected",
            f"because  {self.reason}",
            f"memory   {states:.1f} MiB of states, about {working:.1f} MiB while solving",
        ]
        lines += [f"not      {name}: {sentence}" for name, sentence in self.refusals.items()]
        return "\n".join(lines)

    __repr__ = __str__


def explain(
    cell: Any,
    x: Array,
    config: NewtonConfig | None = None,
    *,
    h0: Array | None = None,
    cu_seqlens: Any = None,
    reset: Array | None = None,
    mask: Array | None = None,
    **drives: Any,
) -> Explanation:
    """Which backend and path `newton_apply` would take for this problem, in a few sentences.

    Raises:
        As newton_apply, for input that does not fit.

    >>> import numpy as np
    >>> from pararnn import ParaGRU
    >>> explain(ParaGRU(2, 3, seed=0), np.ones((1, 5, 2), dtype=np.float32)).path
    'sequential'
    """
    cell, x = with_drives("explain", cell, x, drives)
    problem = make_problem("explain", cell, x, h0, config, cu_seqlens=cu_seqlens, reset=reset, mask=mask)
    front = front_of(x)
    if front is not None:
        # As in the solve itself, which no autograd watches.
        problem = front.untracked(problem)
    choice = choose(problem)
    plan: dict[str, Any] = dict(choice.backend.describe(problem))
    batch, time, _, width = problem.shape
    item = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}[dtype_name(problem.dtype)]
    work = max(item, 4)
    steps = min(time, int(plan["segment_len"]) * int(plan["segments"]))
    rows = len(cell.gates) + 2 * cell.state_slots
    return Explanation(
        backend=choice.backend.name,
        result_bytes=batch * time * width * cell.state_slots * item,
        working_bytes=batch * steps * (width * rows + problem.shape[2]) * work,
        refusals=choice.refusals,
        **plan,
    )
