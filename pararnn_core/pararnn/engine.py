"""The engine: one primitive, `loop`, that runs a program once per row along time.

The solver and the adjoint are written in terms of it. This form uses array-API calls only and runs on every
namespace; a backend that compiles loops replaces it and inherits everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from array_api_compat import device

from pararnn.arrays import Array, Namespace
from pararnn.graph import array_function
from pararnn.programs import LoopProgram


@dataclass(frozen=True)
class Costs:
    """Microseconds per operation and nanoseconds per element, for choosing a path; measured by benchmarks/cpu.py.

    Where the loop itself is fast, what segments need besides counts: `layout_ns` for each number of gates and states
    that is brought into a window's layout and back, and `window_us` for each window. A compiler that fuses a whole row
    pays `row_us` once for it instead of `overhead_us` for every operation, and may want windows of another size.
    """

    overhead_us: float
    simple_ns: float
    heavy_ns: float
    layout_ns: float = 0.0
    window_us: float = 0.0
    row_us: float = 0.0
    # Of gate inputs and states that one window may hold; windows keep memory flat as T grows.
    window_bytes: int = 48 * 2**20


# Operations that cost several times an addition.
HEAVY = frozenset({"exp", "expm1", "log", "log1p", "tanh", "sigmoid", "sin", "cos", "pow", "logaddexp", "where"})


@dataclass
class LoopResult:
    """What a loop leaves: the last carry, the kept carries (L+1, n), stored rows (L, n) and totals (n,)."""

    carry: list[Array]
    kept: list[Array]
    stored: list[Array]
    totals: list[Array]


class ArrayEngine:
    """Runs loop programs with array-API calls; each operand is a flat lane vector (n,) or rows (L, n)."""

    name = "array"
    costs = Costs(overhead_us=4.0, simple_ns=0.3, heavy_ns=1.5)

    def __init__(self, xp: Namespace) -> None:
        self.xp = xp

    def repeats_bits(self, like: Array) -> bool:
        """Whether a function of the same number has the same bits wherever in an array it stands.

        Where a library's vector code and its code for the rest differ in the last bit, matching joints do not make a
        result the time loop's bit for bit.
        """
        key = (type(self), self.xp.__name__, str(like.dtype), str(device(like)))
        if key not in _repeats:
            same = self.xp.full((67,), 0.3137, dtype=like.dtype, device=device(like))
            results = [f(same) for f in (self.xp.exp, self.xp.tanh, self.xp.log)]
            _repeats[key] = all(bool(self.xp.all(r == r[0])) for r in results)
        return _repeats[key]

    def function(self, loop: LoopProgram) -> Any:
        return array_function(self.xp, loop.program, loop.compiled)

    def loop(
        self,
        loop: LoopProgram,
        carry: Sequence[Array],
        rows: Sequence[Array],
        consts: Sequence[Array],
        *,
        reverse: bool = False,
        keep: int = 0,
    ) -> LoopResult:
        """Runs `loop` for l = 0 … L-1, or L-1 … 0 with ``reverse``.

        The first `keep` carries are kept: row l before step l and row L at the end (reversed: row l+1 before step l
        and row 0 at the end).
        """
        xp, step = self.xp, self.function(loop)
        length = int(rows[0].shape[0])
        state = list(carry)
        if not loop.carry:
            out = step(xp, *rows, *consts)
            stored = [self._like(value, rows[0]) for value in out[: loop.stored]]
            totals = [xp.sum(self._like(value, rows[0]), axis=0) for value in out[loop.stored :]]
            return LoopResult([], [], stored, totals)
        kept: list[list[Array]] = [[c] for c in state[:keep]]
        stored_rows: list[list[Array]] = [[] for _ in range(loop.stored)]
        sums: list[Array] | None = None
        for l in range(length - 1, -1, -1) if reverse else range(length):
            out = step(xp, *state, *(r[l, ...] for r in rows), *consts)
            state = [self._like(value, carry[0]) for value in out[: loop.carry]]
            for column, value in zip(kept, state, strict=False):
                column.append(value)
            middle = loop.carry + loop.stored
            for column, value in zip(stored_rows, out[loop.carry : middle], strict=True):
                column.append(self._like(value, carry[0]))
            added = out[middle:]
            sums = list(added) if sums is None else [a + b for a, b in zip(sums, added, strict=True)]
        totals = [self._like(value, carry[0]) for value in sums or [0.0] * loop.totals]
        return LoopResult(
            state,
            [self._stack(column, reverse) for column in kept],
            [self._stack(column, reverse) if column else rows[0][:0, ...] for column in stored_rows],
            totals,
        )

    def _stack(self, column: list[Array], reverse: bool) -> Array:
        return self.xp.stack(column[::-1] if reverse else column)

    def _like(self, value: Any, example: Array) -> Array:
        """A result as an array of `example`'s shape; derivatives may be plain numbers or lack the row axis."""
        xp = self.xp
        if isinstance(value, float):
            return xp.full_like(example, value)
        if value.shape != example.shape:
            return xp.broadcast_to(value, example.shape)
        return value

    def take(self, rows: Array, segments: int, index: Array) -> Array:
        """The lanes of the channels in `index`, of rows (L, C·m) laid out as (L, C, m)."""
        xp = self.xp
        length, lanes = rows.shape
        picked = xp.take(xp.reshape(rows, (length, segments, lanes // segments)), index, axis=2)
        return xp.reshape(picked, (length, segments * int(index.shape[0])))

    def put(self, rows: Array, segments: int, index: Array, part: Array) -> Array:
        """`rows` with the lanes of the channels in `index` replaced by `part`; the result replaces `rows`."""
        xp = self.xp
        length, lanes = rows.shape
        channels, count = lanes // segments, int(index.shape[0])
        whole = xp.reshape(rows, (length, segments, channels))
        both = xp.concat([whole, xp.reshape(part, (length, segments, count))], axis=2)
        # For each channel, where its lane now stands in `both`.
        place = xp.arange(channels, device=device(rows))
        hit = xp.astype(xp.reshape(place, (channels, 1)) == xp.reshape(index, (1, count)), place.dtype)
        new = xp.arange(channels, channels + count, device=device(rows))
        moved = xp.sum(hit * xp.reshape(new, (1, count)), axis=1)
        place = xp.where(xp.any(hit > 0, axis=1), moved, place)
        return xp.reshape(xp.take(both, place, axis=2), (length, lanes))

    def writer(self, shape: tuple[int, ...], dtype: Any, like: Array) -> StateWriter:
        return Writer(self.xp, shape, dtype, like)


_repeats: dict[tuple[Any, ...], bool] = {}


class StateWriter(Protocol):
    """Takes the windows of a result in any order and gives back the whole."""

    def write(self, start: int, slots: list[Array]) -> None: ...

    def finish(self) -> Array: ...


class Writer:
    """Collects pieces of a state array along time, in any order, and joins them."""

    def __init__(self, xp: Namespace, shape: tuple[int, ...], dtype: Any, like: Array) -> None:
        self.xp, self.shape, self.dtype, self.like = xp, shape, dtype, like
        self.pieces: list[tuple[int, Array]] = []

    def write(self, start: int, slots: list[Array]) -> None:
        """Slots (B, steps, D) of the steps from `start` on."""
        piece = slots[0] if len(slots) == 1 and len(self.shape) == 3 else self.xp.stack(slots, axis=2)
        self.pieces.append((start, self.xp.astype(piece, self.dtype, copy=False)))

    def finish(self) -> Array:
        if not self.pieces:
            return self.xp.zeros(self.shape, dtype=self.dtype, device=device(self.like))
        ordered = [piece for _, piece in sorted(self.pieces, key=lambda item: item[0])]
        return ordered[0] if len(ordered) == 1 else self.xp.concat(ordered, axis=1)
