"""Between the public layout (B, T, …) and a window's rows (L, C·B·D), where row l holds step l of every segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pararnn.arrays import Array, Namespace, cast
from pararnn.problem import Problem


@dataclass(frozen=True)
class Window:
    """C segments of L steps from time `start`; lanes are ordered (C, B, D), so one segment is one block."""

    start: int
    length: int
    segments: int
    batch: int
    width: int

    @property
    def channels(self) -> int:
        return self.batch * self.width

    @property
    def stop(self) -> int:
        return self.start + self.length * self.segments


def rows_of(xp: Namespace, a: Array, window: Window) -> Array:
    """(B, window, F) as (L, C·B·F)."""
    batch, _, features = a.shape
    split = xp.reshape(a, (batch, window.segments, window.length, features))
    return xp.reshape(xp.permute_dims(split, (2, 1, 0, 3)), (window.length, -1))


def times_of(xp: Namespace, rows: Array, window: Window) -> Array:
    """(L, C·B·F) as (B, window, F)."""
    split = xp.reshape(rows, (window.length, window.segments, window.batch, -1))
    return xp.reshape(xp.permute_dims(split, (2, 1, 0, 3)), (window.batch, window.length * window.segments, -1))


def input_rows(problem: Problem, window: Window) -> Array:
    """The window's inputs as (L·C·B, I), in the work dtype."""
    xp = problem.xp
    part = cast(xp, problem.x[:, window.start : window.stop, :], problem.work_dtype)
    return xp.reshape(rows_of(xp, part, window), (-1, problem.cell.d_in))


def gate_rows(problem: Problem, window: Window, inputs: Array) -> list[Array]:
    """What a step reads, each as (L, C·B·D): the gates' projections W_g x + b_g, and the problem's marks."""
    xp, cell, width = problem.xp, problem.cell, window.width
    weight, bias = (cast(xp, a, problem.work_dtype) for a in cell.W_x)
    rows = []
    for g in range(len(cell.gates)):
        part = slice(g * width, (g + 1) * width)
        made = inputs @ xp.matrix_transpose(weight[part, :])
        made += bias[part]
        rows.append(xp.reshape(made, (window.length, -1)))
    return rows + mark_rows(problem, window)


def mark_rows(problem: Problem, window: Window) -> list[Array]:
    """Heads, the starts that they load, and padding, as rows (L, C·B·D) in the order of the programs."""
    xp, rows = problem.xp, []
    batch, steps = window.batch, window.stop - window.start

    def spread(a: Array) -> Array:
        return rows_of(xp, xp.broadcast_to(cast(xp, a, problem.work_dtype), (batch, steps, window.width)), window)

    if problem.head is not None:
        head = problem.head[:, window.start : window.stop]
        rows.append(spread(xp.expand_dims(head >= 0, axis=2)))
        if problem.starts is not None:
            which = xp.reshape(xp.where(head < 0, xp.zeros_like(head), head), (-1,))
            loaded = xp.take(cast(xp, problem.starts, problem.work_dtype), which, axis=0)
            slots = xp.reshape(loaded, (batch, steps, problem.cell.state_slots, window.width))
            rows += [spread(slots[:, :, s, :]) for s in range(problem.cell.state_slots)]
    if problem.hold is not None:
        rows.append(spread(xp.expand_dims(problem.hold[:, window.start : window.stop], axis=2)))
    return rows


def lanes_of(xp: Namespace, per_channel: Sequence[Array], window: Window, repeat_batch: bool = True) -> list[Array]:
    """Each (D,) vector repeated for every segment and sequence, as (C·B·D,)."""
    times = window.segments * (window.batch if repeat_batch else 1)
    return [xp.tile(a, (times,)) for a in per_channel]
