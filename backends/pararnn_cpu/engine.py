"""Runs loop programs as compiled code, on threads over the batch and blocks of lanes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pararnn.engine import Costs, LoopResult
from pararnn.programs import LoopProgram
from pararnn_cpu.compile import compiled, has_fma
from pararnn_cpu.print_llvm import print_llvm, widths
from pararnn_cpu.threads import run_all, thread_count
from pararnn_numpy.engine import UfuncEngine

# Operations below which a second thread costs more than it brings.
WORTH_A_THREAD = 200_000


def kernel(loop: LoopProgram, keep: int, double: bool, exact: bool) -> Callable[[int], None]:
    """The compiled loop, made on first use."""
    key = f"llvm keep={keep} double={double} exact={exact}"
    if key not in loop.compiled:
        loop.compiled[key] = compiled(print_llvm(loop, keep, double=double, exact=exact, fma=has_fma()))
    return loop.compiled[key]


def run_kernel(
    loop: LoopProgram,
    *,
    carry: Sequence[np.ndarray],
    rows: Sequence[np.ndarray],
    consts: Sequence[np.ndarray],
    carry_out: Sequence[np.ndarray],
    kept: Sequence[np.ndarray] = (),
    stored: Sequence[np.ndarray] = (),
    totals: Sequence[np.ndarray] = (),
    reverse: bool = False,
    exact: bool = False,
) -> None:
    """Runs `loop` on arrays whose last axis is contiguous: rows (B, T, D), carries and totals (B, D), consts (D,)."""
    shape = next(a.shape for a in (*rows, *kept, *stored))
    batch, steps, lanes = shape
    if not batch or not lanes:
        return
    dtype = rows[0].dtype
    double = dtype == np.float64
    operands: list[int] = []
    held = []
    for group, axes in ((carry, 2), (rows, 3), (consts, 1), (carry_out, 2), (kept, 3), (stored, 3), (totals, 2)):
        for a in group:
            if lanes > 1 and a.strides[-1] != a.itemsize or a.dtype != dtype:
                a = np.ascontiguousarray(a, dtype=dtype)
                held.append(a)
            by_batch = a.strides[0] if axes > 1 and a.shape[0] > 1 else 0
            operands += [a.ctypes.data, by_batch, a.strides[1] if axes == 3 else 0]
    run = kernel(loop, len(kept), double, exact)
    first, step = (steps - 1, -1) if reverse else (0, 1)
    tasks = []
    for (b0, b1), (j0, j1) in _pieces(batch, steps, lanes, len(loop.program.instructions), widths(double)[0]):
        args = np.array([b0, b1, j0, j1, steps, first, step, *operands], dtype=np.int64)
        held.append(args)
        tasks.append(functools.partial(run, args.ctypes.data))
    run_all(tasks)


def _pieces(
    batch: int, steps: int, lanes: int, operations: int, width: int
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Batch and lane ranges, about one for each thread."""
    work = batch * steps * lanes * operations
    wanted = min(thread_count(), max(1, work // WORTH_A_THREAD))
    if batch >= wanted:
        edges = [batch * k // wanted for k in range(wanted + 1)]
        return [((a, b), (0, lanes)) for a, b in zip(edges, edges[1:], strict=False)]
    # Whole vectors per piece, so that only the last one has a remainder.
    vectors = -(-lanes // width)
    cuts = min(vectors, -(-wanted // batch))
    edges = [min(lanes, width * (vectors * k // cuts)) for k in range(cuts + 1)]
    return [((b, b + 1), (x, y)) for b in range(batch) for x, y in zip(edges, edges[1:], strict=False)]


class CompiledEngine(UfuncEngine):
    """The NumPy engine with its loops compiled."""

    name = "cpu"
    costs = Costs(overhead_us=0.004, simple_ns=0.02, heavy_ns=0.25)

    def __init__(self, xp: Any, exact: bool = False) -> None:
        super().__init__(xp)
        self.exact = exact

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
        length, lanes = rows[0].shape
        dtype = rows[0].dtype
        kept = [np.empty((length + 1, lanes), dtype) for _ in range(keep)]
        for whole, first in zip(kept, carry, strict=False):
            whole[length if reverse else 0] = first
        end = [np.array(c, dtype=dtype) for c in carry]
        stored = [np.empty((length, lanes), dtype) for _ in range(loop.stored)]
        totals = [np.zeros(lanes, dtype) for _ in range(loop.totals)]
        if length and lanes:
            written = slice(0, length) if reverse else slice(1, length + 1)
            run_kernel(
                loop,
                carry=[np.ascontiguousarray(c)[None] for c in carry],
                rows=[r[None] for r in rows],
                consts=consts,
                carry_out=[e[None] for e in end],
                kept=[k[None, written] for k in kept],
                stored=[s[None] for s in stored],
                totals=[t[None] for t in totals],
                reverse=reverse,
                exact=self.exact,
            )
        return LoopResult(end, kept, stored, totals)
