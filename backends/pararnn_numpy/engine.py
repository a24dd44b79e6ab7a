"""Runs loop programs as NumPy ufuncs that write into reused buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pararnn.engine import ArrayEngine, Costs, LoopResult
from pararnn.programs import LoopProgram
from pararnn_numpy.print_ufuncs import compile_ufuncs

# Rows of a loop without a carry are independent: they are run in blocks of about this many elements, which stay in
# cache, instead of one by one.
BLOCK = 8192


class UfuncEngine(ArrayEngine):
    """The array engine with its temporaries, kept rows and results in place."""

    name = "numpy"
    costs = Costs(overhead_us=0.7, simple_ns=0.2, heavy_ns=0.6)

    def loop(
        self,
        loop: LoopProgram,
        carry: Sequence[np.ndarray],
        rows: Sequence[np.ndarray],
        consts: Sequence[np.ndarray],
        *,
        reverse: bool = False,
        keep: int = 0,
    ) -> LoopResult:
        if "numpy" not in loop.compiled:
            loop.compiled["numpy"] = compile_ufuncs(loop)
        run = loop.compiled["numpy"]
        length, lanes = rows[0].shape
        dtype = rows[0].dtype
        stored = [np.empty((length, lanes), dtype) for _ in range(loop.stored)]
        totals = [np.zeros(lanes, dtype) for _ in range(loop.totals)]
        if not loop.carry:
            self._blocks(run, rows, consts, stored, totals, length, lanes, dtype)
            return LoopResult([], [], stored, totals)
        kept = [np.empty((length + 1, lanes), dtype) for _ in range(keep)]
        for whole, first in zip(kept, carry, strict=False):
            whole[length if reverse else 0] = first
        order = range(length - 1, -1, -1) if reverse else range(length)
        end = run(order, carry, rows, consts, kept, stored, totals, 0 if reverse else 1, (lanes,), dtype)
        return LoopResult(list(end), kept, stored, totals)

    def _blocks(
        self,
        run: Any,
        rows: Sequence[np.ndarray],
        consts: Sequence[np.ndarray],
        stored: list[np.ndarray],
        totals: list[np.ndarray],
        length: int,
        lanes: int,
        dtype: Any,
    ) -> None:
        high = max(1, BLOCK // max(1, lanes))
        full = length // high
        # One call for all full blocks, seen as rows of a (blocks, high, lanes) array, and one for what is left.
        for first, count, height in ((0, full, high), (full * high, 1 if length % high else 0, length - full * high)):
            if not count:
                continue
            part = slice(first, first + count * height)

            def grouped(a: np.ndarray, part: slice = part, count: int = count, height: int = height) -> np.ndarray:
                return a[part].reshape(count, height, lanes)

            sums = [np.zeros((height, lanes), dtype) for _ in totals]
            run(
                range(count),
                (),
                [grouped(r) for r in rows],
                consts,
                (),
                [grouped(s) for s in stored],
                sums,
                0,
                (height, lanes),
                dtype,
            )
            for total, block in zip(totals, sums, strict=True):
                total += block.sum(axis=0)

    def put(self, rows: np.ndarray, segments: int, index: np.ndarray, part: np.ndarray) -> np.ndarray:
        length, lanes = rows.shape
        whole = rows.reshape(length, segments, lanes // segments)
        whole[:, :, index] = part.reshape(length, segments, -1)
        return rows

    def writer(self, shape: tuple[int, ...], dtype: Any, like: np.ndarray) -> InPlaceWriter:
        return InPlaceWriter(shape, dtype)


class InPlaceWriter:
    """Writes windows straight into the result."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.out = np.empty(shape, dtype)

    def write(self, start: int, slots: list[np.ndarray]) -> None:
        steps = slots[0].shape[1]
        if self.out.ndim == 3:
            self.out[:, start : start + steps] = slots[0]
            return
        for s, slot in enumerate(slots):
            self.out[:, start : start + steps, s] = slot

    def finish(self) -> np.ndarray:
        return self.out
