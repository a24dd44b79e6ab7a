"""A packed problem as a batch of its documents, each a row of its own, for solvers that know nothing of packing.

Rows are as long as the longest document; what stands behind a document's end never reaches it, because time runs one
way. Nothing is shared between documents, so none can leak into another. Padding steps are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pararnn.adjoint import Gradients
from pararnn.arrays import Array, cast
from pararnn.problem import Problem
from pararnn.stats import NewtonStats


@dataclass(frozen=True)
class _Rows:
    """R documents of at most M steps. Flat places count b·T + t in the packed problem and r·M + k in the batch.

    ``take`` (R·M,): where each step of the batch comes from. ``there`` (R·M,): whether it is one. ``back`` (B·T,): the
    step of the batch whose state a packed step shows, or R·M + r where that is the start of row r. ``start`` (R,): the
    row of [zero, h0 …, starts …] from which a document starts.
    """

    count: int
    length: int
    take: np.ndarray
    there: np.ndarray
    back: np.ndarray
    start: np.ndarray


def solve_apart(problem: Problem, solve: Callable[[Problem], tuple[Array, NewtonStats]]) -> tuple[Array, NewtonStats]:
    """The states of a packed problem by `solve`, which is given its documents as a batch."""
    rows = _rows_of(problem)
    states, stats = solve(_batch(problem, rows))
    return _packed_again(problem, rows, states), stats


def pull_back_apart(
    problem: Problem, pull_back: Callable[[Problem, Array, Array], Gradients], states: Array, cotangent: Array
) -> Gradients:
    """The gradients of a packed problem by `pull_back`, which is given its documents as a batch."""
    xp, rows = problem.xp, _rows_of(problem)
    given = _collected(problem, cast(xp, cotangent, problem.work_dtype))
    found = pull_back(_batch(problem, rows), _gathered(problem, rows, states), _gathered(problem, rows, given))
    batch, time, features, _ = problem.shape
    flat = xp.reshape(found.x, (rows.count * rows.length, features))
    flat = xp.concat([flat, xp.zeros_like(xp.reshape(found.x[:, :1, :], (rows.count, features)))])
    x = xp.reshape(xp.take(flat, _index(problem, rows.back), axis=0), (batch, time, features))
    if problem.hold is not None:
        x = xp.where(xp.expand_dims(problem.hold, axis=2), xp.zeros_like(x), x)
    h0, starts = _start_gradients(problem, rows, found.h0, given)
    return Gradients(x, found.params, h0, starts=starts)


def _start_gradients(problem: Problem, rows: _Rows, found: Array, given: Array) -> tuple[Array, Array | None]:
    """The gradients of h0 and of starts; a start that is shown by padding steps gets their cotangents too."""
    xp, cell = problem.xp, problem.cell
    batch, time, _, _ = problem.shape
    shown = np.full(rows.count, -1)
    places = np.flatnonzero(rows.back >= rows.count * rows.length)
    # Collected cotangents stand at the first of the padding steps.
    shown[rows.back[places[::-1]] - rows.count * rows.length] = places[::-1]
    flat = xp.reshape(given, (batch * time, *cell.state_shape))
    direct = xp.take(flat, _index(problem, np.maximum(shown, 0)), axis=0)
    has = xp.reshape(_index(problem, shown >= 0), (-1,) + (1,) * len(cell.state_shape))
    whole = cast(xp, found, problem.work_dtype) + xp.where(has, direct, xp.zeros_like(direct))
    whole = xp.concat([whole, xp.zeros_like(whole[:1, ...])])

    def of(first: int, count: int) -> Array:
        row = np.full(count, rows.count)
        mine = (rows.start >= first) & (rows.start < first + count)
        row[rows.start[mine] - first] = np.flatnonzero(mine)
        return cast(xp, xp.take(whole, _index(problem, row), axis=0), problem.dtype)

    starts = None if problem.starts is None else of(1 + batch, int(problem.starts.shape[0]))
    return of(1, batch), starts


def _collected(problem: Problem, cotangent: Array) -> Array:
    """Cotangents of padding steps added to the step whose state they show, by doubling: log2(T) rounds."""
    if problem.hold is None:
        return cotangent
    xp = problem.xp
    time = problem.shape[1]
    joined = problem.hold if problem.head is None else problem.hold & (problem.head < 0)
    axes = (1,) * len(problem.cell.state_shape)

    def ahead(a: Array, steps: int) -> Array:
        return xp.concat([a[:, steps:, ...], xp.zeros_like(a[:, :steps, ...])], axis=1)

    # total_t: over `reach` steps from t on; linked_t: the `reach` steps after t all show the state of t.
    total, linked, reach = cotangent, ahead(joined, 1), 1
    while reach < time:
        more = ahead(total, reach)
        total = total + xp.where(xp.reshape(linked, (*linked.shape, *axes)), more, xp.zeros_like(more))
        linked, reach = linked & ahead(linked, reach), 2 * reach
    return total


def _rows_of(problem: Problem) -> _Rows:
    """Where the documents of a packed problem lie; reads its marks, which waits for a device."""
    batch, time, _, _ = problem.shape
    head = np.full((batch, time), -1) if problem.head is None else _host(problem.head)
    hold = np.zeros((batch, time), bool) if problem.hold is None else _host(problem.hold)
    begins = head >= 0
    begins[:, 0] = True
    number = np.cumsum(begins.reshape(-1)) - 1
    first = np.flatnonzero(begins.reshape(-1))
    count = first.shape[0]
    loaded = head.reshape(-1)[first]
    own = 1 + first // time
    start = np.where(loaded < 0, own, 0 if problem.starts is None else 1 + batch + loaded)
    steps = ~hold.reshape(-1)
    before = np.cumsum(steps) - steps
    # The step's number within its document, padding not counted.
    within = before - before[first][number]
    length = max(1, int(np.max(within + steps)))
    take, there = np.zeros(count * length, np.int64), np.zeros(count * length, bool)
    at = (number * length + within)[steps]
    take[at], there[at] = np.flatnonzero(steps), True
    shown = np.where(steps, within, within - 1)
    back = np.where(shown < 0, count * length + number, number * length + shown)
    return _Rows(count, length, take, there, back, start)


def _host(a: Array) -> np.ndarray:
    return np.array(a.tolist() if hasattr(a, "tolist") else np.from_dlpack(a))


def _index(problem: Problem, a: np.ndarray) -> Array:
    return problem.xp.asarray(a, device=problem.device)


def _gathered(problem: Problem, rows: _Rows, a: Array) -> Array:
    """(B, T, …) as (R, M, …), zero behind each document's end."""
    xp, rest = problem.xp, tuple(a.shape[2:])
    picked = xp.take(xp.reshape(a, (-1, *rest)), _index(problem, rows.take), axis=0)
    there = xp.reshape(_index(problem, rows.there), (-1,) + (1,) * len(rest))
    return xp.reshape(xp.where(there, picked, xp.zeros_like(picked)), (rows.count, rows.length, *rest))


def _start_rows(problem: Problem, rows: _Rows) -> Array:
    """The starting state of every document, (R, …)."""
    xp, shape = problem.xp, problem.cell.state_shape
    batch = problem.shape[0]
    zeros = xp.zeros((1 + batch, *shape), dtype=problem.dtype, device=problem.device)
    given = [zeros] if problem.h0 is None else [zeros[:1, ...], cast(xp, problem.h0, problem.dtype)]
    if problem.starts is not None:
        given.append(cast(xp, problem.starts, problem.dtype))
    return xp.take(xp.concat(given), _index(problem, rows.start), axis=0)


def _batch(problem: Problem, rows: _Rows) -> Problem:
    """The documents as a batch, with nothing packed."""
    return replace(
        problem,
        x=_gathered(problem, rows, problem.x),
        h0=_start_rows(problem, rows),
        guess=None if problem.guess is None else _gathered(problem, rows, problem.guess),
        head=None,
        starts=None,
        places=None,
        hold=None,
        documents=None,
        offsets=None,
    )


def _packed_again(problem: Problem, rows: _Rows, states: Array) -> Array:
    """(R, M, …) as (B, T, …)."""
    xp, rest = problem.xp, tuple(states.shape[2:])
    flat = xp.reshape(states, (-1, *rest))
    if problem.hold is not None:
        flat = xp.concat([flat, cast(xp, _start_rows(problem, rows), states.dtype)])
    batch, time, _, _ = problem.shape
    return xp.reshape(xp.take(flat, _index(problem, rows.back), axis=0), (batch, time, *rest))
