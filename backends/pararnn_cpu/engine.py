"""Runs loop programs as compiled code, on threads over the batch and blocks of lanes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pararnn.engine import Costs, LoopResult
from pararnn.programs import LoopProgram
from pararnn_cpu.compile import Compiled, compiled, machine
from pararnn_cpu.emit import CACHE_LINE
from pararnn_cpu.print_llvm import PREFETCH, TILE, Form, print_loop
from pararnn_cpu.threads import run_all, shares, thread_count
from pararnn_numpy.engine import UfuncEngine

# Operations (one lane each) below which a second thread costs more than it brings.
WORTH_A_THREAD = 1_000_000
# Vector registers side by side in a block of lanes, so that the chain of one hides behind the other's; and the time
# that one block of twice the width takes.
VECTORS_PER_BLOCK = 2
COST_OF_DOUBLE = 1.7
# Lanes of a block where a library is called lane by lane.
LIBRARY_LANES = 8


def vector_shape(entries: int, lanes: int, double: bool, library: bool) -> tuple[int, int]:
    """Numbers in a vector and entries that share it; both powers of two, and best for all threads together."""
    piece = 1 << max(0, lanes - 1).bit_length()
    most = LIBRARY_LANES if library else VECTORS_PER_BLOCK * machine().vector_bytes // (8 if double else 4)
    if piece < most and entries > 1:
        # Entries are laid out as if they were lanes of one.
        width = _width(1, entries * piece, most, library)
        return width, max(1, width // piece)
    return _width(entries, lanes, most, library), 1


def _width(entries: int, lanes: int, most: int, library: bool) -> int:
    full = 1 << max(0, lanes - 1).bit_length()
    if library or full <= most:
        return min(most, full)
    threads = thread_count()

    def turns(width: int) -> int:
        return -(-entries * -(-lanes // width) // threads)

    return 2 * most if turns(2 * most) * COST_OF_DOUBLE < turns(most) else most


def product_width(columns: int, dtype: Any) -> int:
    """Columns of a matrix product that are made at a time."""
    most = VECTORS_PER_BLOCK * machine().vector_bytes // np.dtype(dtype).itemsize
    return min(most, 1 << max(0, columns - 1).bit_length())


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An empty array that begins at a cache line: no vector straddles two, and no two threads write into one."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + CACHE_LINE, np.uint8)
    begin = -raw.ctypes.data % CACHE_LINE
    return raw[begin : begin + size].view(dtype).reshape(shape)


def blocks_of(matrix: np.ndarray, width: int) -> np.ndarray:
    """(…, N, K) as (blocks, …, K, width), blocks of `width` of the N with zeros behind the last."""
    *front, count, depth = matrix.shape
    out = aligned((-(-count // width), *front, depth, width), matrix.dtype)
    if count % width:
        out[-1] = 0.0
    for k, block in enumerate(out):
        part = matrix[..., k * width : (k + 1) * width, :]
        block[..., : part.shape[-2]] = np.swapaxes(part, -1, -2)
    return out


@dataclass
class Operands:
    """Arrays of one run: rows, kept and stored (B, T, D), consts (D,), inputs (B, T, I); carries and totals (B·C, D).

    Every sequence is cut into C = `segments`, which are run side by side: `steps` rows each, from one `segment_rows`
    to the next, with a carry of its own each. Carries and totals are read, and written back. All arrays are of one
    dtype, and except for the inputs and with more than one lane, their last axis has unit stride.
    """

    carry: Sequence[np.ndarray]
    rows: Sequence[np.ndarray]
    consts: Sequence[np.ndarray]
    kept: Sequence[np.ndarray] = ()
    stored: Sequence[np.ndarray] = ()
    totals: Sequence[np.ndarray] = ()
    inputs: np.ndarray | None = None
    segments: int = 1
    segment_rows: int = 0
    steps: int | None = None

    @property
    def example(self) -> np.ndarray:
        return next(a for a in (*self.rows, *self.kept, *self.stored))

    @property
    def count(self) -> int:
        return self.example.shape[1] if self.steps is None else self.steps

    def table(self) -> list[int]:
        """Address and strides of each, in the order of the printed code."""
        inputs = () if self.inputs is None else (self.inputs,)
        groups = ((self.carry, 2), (self.rows, 3), (self.consts, 1), (self.kept, 3), (self.stored, 3), (self.totals, 2))
        out: list[int] = []
        for group, axes in (*groups, (inputs, 3)):
            for a in group:
                # An axis of one row may have any stride.
                by_batch = a.strides[0] if axes > 1 and a.shape[0] > 1 else 0
                out += [a.ctypes.data, by_batch, a.strides[1] if axes == 3 else 0]
        return out


@dataclass(frozen=True)
class Projection:
    """Makes rows start … stop of a loop from its inputs, as W x + b; weights (G, D, I), bias (G, D)."""

    weights: np.ndarray
    bias: np.ndarray
    start: int

    @property
    def gates(self) -> int:
        return int(self.bias.shape[0])

    def packed(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Weights and bias in blocks of `width` lanes, as the printed code reads them."""
        return blocks_of(self.weights, width), blocks_of(self.bias[..., None], width)


def lanes_first(a: np.ndarray, dtype: Any) -> np.ndarray:
    """`a` in `dtype` with unit stride along its last axis; itself if it has that already."""
    if a.dtype == dtype and (a.shape[-1] <= 1 or a.strides[-1] == a.itemsize) and a.flags.aligned:
        return a
    return np.ascontiguousarray(a, dtype=dtype)


def run_loop(
    loop: LoopProgram,
    parts: Sequence[Operands],
    *,
    projection: Projection | None = None,
    reverse: bool = False,
    add_stored: bool = False,
    exact: bool = False,
) -> None:
    """Runs `loop` over all rows of the first part, then over those of the next, and so on."""
    example = parts[0].example
    entries, lanes = example.shape[0] * parts[0].segments, example.shape[2]
    double = example.dtype == np.float64
    width, shared = vector_shape(entries, lanes, double, exact)
    form = Form(
        width=width,
        full=shared == 1 and lanes >= width,
        tail=shared == 1 and lanes % width > 0,
        double=double,
        exact=exact,
        entries=shared,
        lanes=lanes if shared > 1 else 0,
        keep=len(parts[0].kept),
        projected=(0, 0) if projection is None else (projection.start, projection.start + projection.gates),
        add_stored=add_stored,
    )
    run = _kernel(loop, form)
    packed = None if projection is None else projection.packed(width // shared)
    tables = [part.table() for part in parts]
    held: list[np.ndarray] = []
    tasks = []
    work = entries * sum(part.count for part in parts) * lanes * len(loop.program.instructions)
    for pieces in rectangles(-(-entries // shared), -(-lanes // width), work // WORTH_A_THREAD):
        scratch = aligned((TILE * form.gates * width,), example.dtype)
        held.append(scratch)
        addresses = []
        for part, table in zip(parts, tables, strict=True):
            cut = (lanes, entries, part.segments, part.segment_rows, part.count)
            order = (part.count - 1, -1) if reverse else (0, 1)
            made = [0] * 5
            if packed is not None and part.inputs is not None:
                made = [a.ctypes.data for a in (scratch, *packed)]
                made += [part.inputs.shape[2], part.inputs.strides[2]]
            for piece in pieces:
                args = np.array([*piece, *cut, *order, *made, *_pace(lanes, form), *table], dtype=np.int64)
                held.append(args)
                addresses.append(args.ctypes.data)
        tasks.append(functools.partial(run_each, run, addresses))
    run_all(tasks)


def _pace(lanes: int, form: Form) -> tuple[int, int]:
    """Rows that are run for all lanes before the next ones, and rows ahead that are fetched into cache.

    Measured: rows far apart in memory push each other out of the cache, and the processor does not guess the way
    through narrow ones.
    """
    if form.gates:
        return TILE, PREFETCH
    return max(2, min(TILE, 4096 // lanes)), PREFETCH if lanes <= 1024 else 0


def run_each(run: Compiled, addresses: Sequence[int]) -> None:
    """Calls compiled code on one argument array after the other."""
    for address in addresses:
        run(address)


def _kernel(loop: LoopProgram, form: Form) -> Compiled:
    """The compiled loop, made on first use."""
    key = f"cpu {form}"
    if key not in loop.compiled:
        loop.compiled[key] = compiled(print_loop(loop, form, machine()))
    return loop.compiled[key]


def rectangles(groups: int, blocks: int, most: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """What each of at most `most` threads does of groups × blocks: a few (first group, stop, first block, stop)."""
    for begin, end in shares(groups * blocks, most):
        (g, p), (g_end, p_end) = divmod(begin, blocks), divmod(end, blocks)
        if g == g_end:
            yield [(g, g + 1, p, p_end)]
            continue
        out = [(g, g + 1, p, blocks)] if p else []
        g += bool(p)
        if g < g_end:
            out.append((g, g_end, 0, blocks))
        if p_end:
            out.append((g_end, g_end + 1, 0, p_end))
        yield out


class CompiledEngine(UfuncEngine):
    """The NumPy engine with its loops compiled."""

    name = "cpu"
    costs = Costs(overhead_us=0.0023, simple_ns=0.05, heavy_ns=0.45, layout_ns=4.0, window_us=200.0)

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
            operands = Operands(
                carry=[e[None] for e in end],
                rows=[lanes_first(r, dtype)[None] for r in rows],
                consts=[lanes_first(c, dtype) for c in consts],
                kept=[k[None, written] for k in kept],
                stored=[s[None] for s in stored],
                totals=[t[None] for t in totals],
            )
            run_loop(loop, [operands], reverse=reverse, exact=self.exact)
        return LoopResult(end, kept, stored, totals)
