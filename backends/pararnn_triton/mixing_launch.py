"""Mixing cells on CUDA: one kernel per step, product included; all of a pass captured as one CUDA graph per shape."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton

from pararnn.cells.mixing import MixingCell
from pararnn.mixing.joints import Measured, warmup_ratio
from pararnn.mixing.trace import MixPrograms
from pararnn_triton.launch import OPTIONS, module_from
from pararnn_triton.mixing_check import check_step
from pararnn_triton.mixing_source import mixing_source

# Rows and channels of a program's tile, largest first: the first with which the programs fill the chip is taken. Tiles
# of 32 and 64 rows gave wrong products or went out of bounds on an H200 (Triton 3.6), though not in the interpreter.
TILES = ((16, 32), (16, 16))
ENOUGH_PROGRAMS = 120
# Terms of a product that a program loads at a time, and its warps; channels of a program that joins.
DEPTH, WARPS, JOINT_BLOCK = 64, 4, 64
# Steps of one graph of the plain loop.
WALK = 256
# Buffers and graphs that stay for the next call of the same shape: of how many shapes, and bytes of all together.
KEPT_SHAPES, KEPT_BYTES = 8, 4 * 2**30


def module_of(programs: MixPrograms) -> Any:
    if "triton" not in programs.compiled:
        programs.compiled["triton"] = module_from(mixing_source(programs))
    return programs.compiled["triton"]


class Board:
    """The buffers of one problem's shape, all of whose graphs read and write the same addresses."""

    def __init__(
        self, programs: MixPrograms, batch: int, time: int, width: int, heads: int, dtype: torch.dtype, device: Any
    ) -> None:
        self.programs, self.module = programs, module_of(programs)
        self.batch, self.time, self.width, self.heads = batch, time, width, heads
        self.device, self.dtype = device, dtype
        self.size, self.count = programs.size, len(programs.mixed_names)
        kind: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.kind = kind
        inner = width // heads
        matrix = (width, self.count * width) if heads == 1 else (heads, inner, self.count * inner)
        self.matrix = torch.empty(matrix, **kind)
        self.transposed = torch.empty((heads, self.count * inner, inner), **kind)
        self.bias = torch.zeros(self.count * width, **kind)
        self.diagonals = torch.empty((self.count, width), **kind)
        self.gates = torch.empty((batch, time, len(programs.gate_names), width), dtype=dtype, device=device)
        self.states = torch.empty((batch, time, self.size, width), dtype=dtype, device=device)
        # The first step of what a graph runs.
        self.begin = torch.zeros(1, dtype=torch.int32, device=device)
        self.h0 = torch.zeros((self.size, batch, width), **kind)
        self.blank = torch.zeros((self.size, width), **kind)
        limits = [(-math.inf, math.inf) if bound is None else bound for bound in programs.bounds]
        self.own_box, self.box = (torch.tensor(limits, **kind) for _ in range(2))
        self.no_box = torch.tensor([(-math.inf, math.inf)] * self.size, **kind)
        self.filled = False
        self.spans: dict[tuple[Any, ...], Any] = {}
        self.backward: dict[str, torch.Tensor] = {}

    @property
    def bytes_at_most(self) -> int:
        """Of the buffers that are as long as the sequence, the adjoint's included."""
        columns = 2 * len(self.programs.gate_names) + 2 * self.count + 2 * self.size
        return 4 * self.batch * self.time * self.width * columns

    def for_backward(self) -> None:
        """The buffers that only the adjoint needs."""
        if not self.backward:
            shape = (self.batch, self.time)
            self.backward = {
                "products": torch.empty((*shape, self.count, self.width), **self.kind),
                "given": torch.empty((*shape, self.size, self.width), **self.kind),
                "d_gates": torch.empty((*shape, len(self.programs.gate_names), self.width), **self.kind),
                "d_products": torch.empty((*shape, self.count, self.width), **self.kind),
            }

    def span(self, length: int, count: int, warmup: int, leftward: bool) -> Span:
        key = (length, count, warmup, leftward, torch.backends.cuda.matmul.allow_tf32)
        if key not in self.spans:
            self.spans[key] = Span(self, length, count, warmup, leftward)
        return self.spans[key]


_boards: OrderedDict[tuple[Any, ...], Board] = OrderedDict()


def board_for(
    cell: MixingCell, programs: MixPrograms, batch: int, time: int, dtype: torch.dtype, device: torch.device
) -> Board:
    """The board of a shape, from the last calls or new; a stream has its own, because streams run side by side."""
    stream = 0 if device.type != "cuda" else torch.cuda.current_stream(device).cuda_stream
    key = (id(programs), batch, time, cell.d_h, cell.n_heads, dtype, str(device), stream)
    if key in _boards:
        _boards.move_to_end(key)
        return _boards[key]
    board = Board(programs, batch, time, cell.d_h, cell.n_heads or 1, dtype, device)
    _boards[key] = board
    while len(_boards) > KEPT_SHAPES or sum(b.bytes_at_most for b in _boards.values()) > KEPT_BYTES:
        # The one that was used longest ago; the caller holds its own as long as it needs it.
        _boards.popitem(last=False)
    return board


class Span:
    """C segments of L steps from ``board.begin`` on (one for a plain loop); cotangents travel them leftward."""

    def __init__(self, board: Board, length: int, count: int, warmup: int, leftward: bool) -> None:
        self.board, self.length, self.count, self.leftward = board, length, count, leftward
        self.warmup = min(warmup, length - 1)
        rows = self.rows = board.batch * count
        kind, size, width = board.kind, board.size, board.width
        self.slots = torch.zeros((size, rows, width), **kind)
        self.starts, self.ends = torch.zeros_like(self.slots), torch.zeros_like(self.slots)
        self.old_starts, self.old_ends = torch.zeros_like(self.slots), torch.zeros_like(self.slots)
        self.seen = torch.zeros_like(self.slots)
        self.entries = torch.zeros((len(board.programs.m.flat), rows, width), **kind)
        self.inner = width // board.heads
        # What the next step multiplies, and where it leaves what the one after it multiplies: they change places.
        self.other = torch.zeros_like(self.slots)
        self.mixed = torch.zeros((board.heads, rows, board.count * self.inner), **kind)
        self.mixed_after = torch.zeros_like(self.mixed)
        self.report = torch.empty((board.batch, count, size, 5), **kind)
        self.blank = torch.zeros_like(board.blank) if leftward else board.blank
        self.source = board.programs.stages[0].slot
        self.tile = self._tile()
        self.grid = (triton.cdiv(rows, self.tile[0]), board.heads * triton.cdiv(self.inner, self.tile[1]))
        # Products of float32 parts keep its accuracy, but not an infinity, with which a plain loop may have to go on.
        allowed = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
        self.precision = "ieee" if count == 1 else allowed
        self.graphs: dict[str, Any] = {}

    def _tile(self) -> tuple[int, int]:
        for tile in TILES:
            programs = triton.cdiv(self.rows, tile[0]) * self.board.heads * triton.cdiv(self.inner, tile[1])
            if programs >= ENOUGH_PROGRAMS:
                return tile
        return TILES[-1]

    # One step of all rows, as a launch.

    def _forward(self, l: int, *, tangent: bool, store: bool, first: bool) -> None:
        board = self.board
        board.module.step[self.grid](
            board.gates, board.matrix, board.bias, board.diagonals, self.slots, self.other, self.entries, board.states,
            board.begin, self.rows, board.time, board.width, self.length, self.count, l,
            self.inner, *self.tile, DEPTH, self.precision, self.leftward, tangent, store, first,
            num_warps=WARPS, **OPTIONS,
        )  # fmt: skip
        self.slots, self.other = self.other, self.slots

    def _back(self, l: int, *, tangent: bool, store: bool, first: bool) -> None:
        board, more = self.board, self.board.backward
        board.module.back[self.grid](
            board.gates, board.transposed, more["products"], board.states, board.h0, more["given"], board.diagonals,
            self.slots, self.entries, self.mixed, self.mixed_after, more["d_gates"], more["d_products"],
            board.begin, self.rows, board.time, board.width, self.length, self.count, l,
            self.inner, *self.tile, DEPTH, self.precision, self.leftward, tangent, store, first,
            num_warps=WARPS, **OPTIONS,
        )  # fmt: skip
        self.mixed, self.mixed_after = self.mixed_after, self.mixed

    def _steps(self, order: range, *, tangent: bool, store: bool, look: int | None = None) -> None:
        one = self._back if self.leftward else self._forward
        for k, l in enumerate(order):
            if l == look:
                self._keep(self.seen)
            one(l, tangent=tangent, store=store, first=k == 0)

    def _keep(self, target: torch.Tensor) -> None:
        """Where the slots stand: leftward, what the last step's products move is still to be added."""
        target.copy_(self.slots)
        if self.leftward:
            moved = torch.bmm(self.mixed, self.board.transposed).transpose(0, 1)
            target[self.source].add_(moved.reshape(self.rows, self.board.width))

    def _pass(self, look: int | None) -> None:
        self.slots.copy_(self.starts)
        steps = range(self.length)
        self.mixed.zero_()
        self._steps(steps[::-1] if self.leftward else steps, tangent=self.count > 1, store=True, look=look)
        self._keep(self.ends)

    def _measured(self, again: bool) -> None:
        board = self.board
        board.module.measure[(self.rows, board.size)](
            self.starts, self.ends, self.old_starts, self.old_ends, self.seen, self.blank, self.report,
            self.rows, board.width, self.count,
            min(1024, triton.next_power_of_2(board.width)), again, num_warps=4, **OPTIONS,
        )  # fmt: skip

    # What is captured. The first start of each sequence is in `starts` before.

    def _begin(self) -> None:
        shape = (self.board.size, self.board.batch, self.count, self.board.width)
        self.slots.view(shape).copy_(self.blank[:, None, None, :].expand(shape))
        self.mixed.zero_()
        warm = range(self.warmup)[::-1] if self.leftward else range(self.length - self.warmup, self.length)
        self._steps(warm, tangent=False, store=False)
        self._keep(self.ends)
        self.starts.view(shape)[:, :, 1:].copy_(self.ends.view(shape)[:, :, :-1])
        self._pass(warm[0] if len(warm) else None)
        self._measured(again=False)

    def _again(self) -> None:
        board = self.board
        self.old_starts.copy_(self.starts)
        self.old_ends.copy_(self.ends)
        blocks = triton.cdiv(board.width, JOINT_BLOCK)
        board.module.correct[(board.batch * blocks,)](
            self.starts, self.ends, self.entries,
            board.no_box if self.leftward else board.box, self.rows, board.width, self.count,
            JOINT_BLOCK, self.leftward, num_warps=2, **OPTIONS,
        )  # fmt: skip
        self._pass(None)
        self._measured(again=True)

    def _walk(self) -> None:
        self._pass(None)
        # The next run of this graph goes on where this one ended.
        self.starts.copy_(self.ends)
        self.board.begin.add_(-self.length if self.leftward else self.length)

    def replay(self, name: str) -> None:
        """Runs one of the three, captured when it first runs."""
        work: Callable[[], None] = getattr(self, name)
        if self.board.device.type != "cuda":
            work()
            return
        if name not in self.graphs:
            if not self.graphs:
                check_step(self)
            # A first run compiles the kernels and lets the product choose its own; what it changed is put back.
            kept = (self.starts, self.ends, self.entries, self.board.begin)
            before = [a.clone() for a in kept]
            side = torch.cuda.Stream(self.board.device)
            side.wait_stream(torch.cuda.current_stream(self.board.device))
            with torch.cuda.stream(side):
                work()
            torch.cuda.current_stream(self.board.device).wait_stream(side)
            for target, value in zip(kept, before, strict=True):
                target.copy_(value)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            self.graphs[name] = graph
        self.graphs[name].replay()


class GraphJoints:
    """The joints of one span, whose passes are graphs; every pass runs all segments, which costs no more."""

    floor = 200.0 * 2.0**-23

    def __init__(self, span: Span, logarithmic: list[bool], one_scale: bool) -> None:
        self.span, self.logarithmic, self.one_scale = span, logarithmic, one_scale

    def begin(self) -> Measured:
        self.span.replay("_begin")
        mismatch, _, _, apart = self._read()
        if not self.span.warmup:
            return Measured(mismatch)
        stretch = self.span.length / self.span.warmup
        return Measured(mismatch, growth=warmup_ratio(apart[:, :-1], mismatch, stretch))

    def again(self, keep: np.ndarray) -> Measured:
        self.span.replay("_again")
        mismatch, start, end, _ = self._read()
        return Measured(mismatch, start, end)

    def _read(self) -> list[np.ndarray]:
        report = self.span.report.cpu().numpy().astype(np.float64)
        scale = report[..., 0].max(axis=(0, 1))
        scale = np.where(self.logarithmic, 1.0, np.where(scale == 0.0, 1.0, scale))
        if self.one_scale:
            scale = np.full_like(scale, scale.max())
        norms = (report[..., 1:] / scale[:, None]).max(axis=2)
        return [norms[:, :-1, 0], norms[..., 1], norms[..., 2], norms[..., 3]]
