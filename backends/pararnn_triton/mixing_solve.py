"""Mixing cells on CUDA: the plan, the solve and its gradient, in terms of captured passes."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import torch

from pararnn.adjoint import Gradients
from pararnn.apart import pull_back_apart, solve_apart
from pararnn.cells.mixing import MixingCell, multiply
from pararnn.config import NewtonConfig
from pararnn.mixing.joints import JointSettings, settle
from pararnn.mixing.plan import MixPlan
from pararnn.mixing.trace import mix_programs_of
from pararnn.plan import MARGIN, fitting_length
from pararnn.problem import Problem
from pararnn.solve import solve_cell_of, tolerance
from pararnn.stats import NewtonStats
from pararnn_triton.mixing_launch import WALK, Board, GraphJoints, board_for

# Steps before each segment, and passes before what does not settle is walked: a pass costs a small part of a loop.
WARMUP, MAX_PASSES = 48, 24
# Channels of all rows with which a step fills the chip, from where on it takes longer.
FULL = 256 * 256
# Bytes of gates, states and cotangents that the buffers of one call may take.
MOST_BYTES = 64 * 2**30


def refusal(problem: Problem) -> str | None:
    """What keeps these kernels from a mixing problem, or None."""
    cell, config = cast(MixingCell, problem.cell), problem.config
    programs = mix_programs_of(cast(MixingCell, solve_cell_of(cell, config)))
    if len(programs.stages) != 1 or programs.stages[0].slot is None or programs.param_names:
        return "its kernels take one product of one slot per step; other recurrences run on the array backend"
    if type(cell).gate_inputs is not MixingCell.gate_inputs:
        return "its kernels take gates W_x x + b; other inputs run on the array backend"
    if config.pinned(problem.shape[1]) is not None or problem.guess is not None or config.exact:
        return "a pinned iteration count, a guess and exact are options of the array solver"
    batch, time, _, width = problem.shape
    if 4 * batch * time * width * (4 * len(programs.gate_names) + 3 * programs.size) > MOST_BYTES:
        return "its buffers would not fit; the array backend walks windows"
    return None


def plan(problem: Problem) -> MixPlan:
    """Segments by measured times on an H200: a step costs the same for 8 rows as for some hundreds."""
    config: NewtonConfig = problem.config
    batch, time, _, _ = problem.shape
    warmup = WARMUP if config.warmup is None else config.warmup
    wanted = config.segment_len
    if time <= 1 or (wanted is not None and wanted >= time) or (wanted is None and time < 64):
        return MixPlan("sequential", max(time, 1), 1, 0, None, "one segment covers the whole sequence")
    if wanted is None:
        # Wide products cost more than many steps once they fill the chip.
        wanted = min(max(32, time // 16), max(64, int(math.sqrt(batch * time) / 2)), 256)
        wanted = fitting_length(time, min(wanted, time // 2))
        rows, width = batch * (time // wanted), problem.cell.d_h
        if (wanted + min(warmup, wanted - 1)) * _step_cost(rows, width) * MARGIN > time * _step_cost(batch, width):
            why = f"{batch} sequences fill the chip by themselves: {time} steps run fastest as one loop"
            return MixPlan("sequential", time, 1, 0, None, why)
        why = f"{time} steps as {wanted} products of {rows} rows, captured in one graph"
    else:
        why = f"segment_len={wanted} was asked for"
    return MixPlan("segments", wanted, time // wanted, min(warmup, wanted - 1), config.max_passes or MAX_PASSES, why)


def _step_cost(rows: int, width: int) -> float:
    """A step of so many rows, in units of one that does not fill the chip."""
    return max(1.0, rows * width / FULL)


def _settings(problem: Problem, chosen: MixPlan, tol: float, accept: float) -> JointSettings:
    return JointSettings(tol=tol, accept=accept, max_passes=chosen.max_passes or MAX_PASSES)


def _filled(problem: Problem, cell: MixingCell) -> Board:
    """The board of the problem's shape with the cell's numbers on it."""
    programs = mix_programs_of(cell)
    batch, time, _, width = problem.shape
    board = board_for(cell, programs, batch, time, problem.dtype, problem.x.device)
    matrix, offset = cell.joined(problem.xp, torch.float32, programs.stages[0].names)
    if not board.filled:
        nothing = torch.zeros((1, width), **board.kind)
        board.blank.copy_(torch.cat(list(cell.encode(problem.xp, *[nothing] * board.size))))
        board.filled = True
    board.matrix.copy_(matrix)
    board.transposed.copy_(matrix.transpose(-1, -2))
    if offset is None:
        board.bias.zero_()
    else:
        board.bias.copy_(offset)
    heads, inner, count = board.heads, width // board.heads, board.count
    own = board.matrix.view(heads, inner, count, inner).diagonal(dim1=1, dim2=3)
    board.diagonals.view(count, heads, inner).copy_(own.transpose(0, 1))
    flat = board.gates.view(batch * time, -1)
    torch.addmm(cell.W_x.bias, problem.x.reshape(batch * time, -1), cell.W_x.weight.t(), out=flat)
    return board


def solve_mixing_on_cuda(problem: Problem) -> tuple[torch.Tensor, NewtonStats]:
    """States (B, T, …) and what was done."""
    if problem.packed:
        return solve_apart(problem, solve_mixing_on_cuda)
    chosen = plan(problem)
    xp = problem.xp
    cell = cast(MixingCell, solve_cell_of(problem.cell, problem.config) if chosen.path == "segments" else problem.cell)
    stats = NewtonStats(
        path=chosen.path, segment_len=chosen.segment_len, segments=chosen.segments, reason=chosen.reason,
        windows=1, max_residual=0.0,
    )  # fmt: skip
    board = _filled(problem, cell)
    start = list(cell.encode(xp, *problem.start()))
    if chosen.path == "sequential":
        _walk(board, start, 0, problem.shape[1])
        return _result(problem, cell, board), _as_loop(stats, 0)
    tol = tolerance(problem.config, problem)
    _set_box(problem, board, start)
    span = board.span(chosen.segment_len, chosen.segments, chosen.warmup, False)
    board.begin.zero_()
    shape = (board.size, board.batch, chosen.segments, board.width)
    span.starts.view(shape)[:, :, 0].copy_(torch.stack(start))
    joints = GraphJoints(span, board.programs.logarithmic, one_scale=False)
    out = settle(joints, _settings(problem, chosen, tol, 5.0 * tol), np.zeros(board.batch))
    stats.passes, stats.iters = out.passes, out.corrections
    stats.max_residual, stats.residual_history = out.history[-1], tuple(out.history)
    stats.lyapunov = out.growth / chosen.segment_len
    if bool(np.all(out.settled)):
        done = chosen.segment_len * chosen.segments
        _walk(board, list(span.ends.view(shape)[:, :, -1]), done, problem.shape[1] - done)
        estimate = float(np.max(out.error))
        stats.agreement_estimate, stats.converged = max(estimate, 2.0**-21), True
        return _result(problem, cell, board), stats
    found = _result(problem, cell, board) if bool(np.any(out.settled)) else None
    # The time loop in public coordinates, for the sequences that did not settle.
    cell = cast(MixingCell, problem.cell)
    board = _filled(problem, cell)
    _walk(board, problem.start(), 0, problem.shape[1])
    walked = _result(problem, cell, board)
    stats.reason = f"the sequence was walked after all, because {out.gave_up}"
    if found is None:
        return walked, _as_loop(stats, out.passes)
    kept = torch.as_tensor(out.settled, device=walked.device).view(-1, *([1] * (walked.ndim - 1)))
    stats.passes, stats.walked, stats.converged = out.passes + 1, 1.0, True
    stats.agreement_estimate = max(float(np.max(out.error[out.settled])), 2.0**-21)
    return torch.where(kept, found, walked), stats


def _as_loop(stats: NewtonStats, spent: int) -> NewtonStats:
    stats.path, stats.exact, stats.converged = "sequential", True, True
    stats.agreement_estimate = stats.max_residual = 0.0
    stats.passes, stats.walked = spent + 1, float(spent > 0)
    return stats


def _set_box(problem: Problem, board: Board, start: list[torch.Tensor]) -> None:
    """Where bounded slots can be: their bounds, and beyond them as far as the sequences start."""
    board.box.copy_(board.own_box)
    if problem.h0 is not None:
        for limits, first in zip(board.box, start, strict=True):
            limits[0].clamp_(max=first.amin())
            limits[1].clamp_(min=first.amax())


def _walk(board: Board, start: list[torch.Tensor], first: int, steps: int) -> None:
    """The plain loop over `steps` steps from `first` on."""
    board.begin.fill_(first)
    slots = torch.stack(start)
    while steps:
        length = min(WALK, steps)
        span = board.span(length, 1, 0, False)
        span.starts.copy_(slots)
        for _ in range(steps // length):
            span.replay("_walk")
        slots, steps = span.starts, steps % length


def _result(problem: Problem, cell: MixingCell, board: Board) -> torch.Tensor:
    """The public states; a copy, because the board is used again."""
    public = cell.decode(problem.xp, *(board.states[:, :, k] for k in range(board.size)))
    out = torch.stack(list(public), dim=2) if len(public) > 1 else public[0].clone()
    return out.to(problem.dtype)


def pull_back_mixing_on_cuda(problem: Problem, states: torch.Tensor, cotangent: torch.Tensor) -> Gradients:
    """Gradients of Σ cotangent · states for a solved trajectory."""
    if problem.packed:
        return pull_back_apart(problem, pull_back_mixing_on_cuda, states, cotangent)
    cell = cast(MixingCell, problem.cell)
    batch, time, features, width = problem.shape
    board = _filled(problem, cell)
    board.for_backward()
    slots = (batch, time, board.size, width)
    board.states.copy_(states.reshape(slots))
    more = board.backward
    more["given"].copy_(cotangent.reshape(slots))
    start = torch.stack(problem.start())
    board.h0.copy_(start)
    source = cast(int, board.programs.stages[0].slot)
    before = torch.cat([start[source][:, None], states.reshape(slots)[:, :-1, source].float()], dim=1)
    before = before.reshape(batch * time, width)
    if board.heads == 1:
        torch.addmm(board.bias, before, board.matrix, out=more["products"].view(batch * time, -1))
    else:
        made = multiply(problem.xp, before, board.count, board.matrix, board.bias)
        for k, product in enumerate(made):
            more["products"][:, :, k].copy_(product.view(batch, time, width))

    chosen = plan(problem)
    future = _swept(problem, chosen, board) if chosen.path == "segments" else None
    if future is None:
        future = _walk_back(board, torch.zeros_like(start), time, time)

    d_gates = more["d_gates"].view(batch * time, -1)
    d_x = d_gates.to(problem.dtype) @ cell.W_x.weight
    d_weight = d_gates.t() @ problem.x.reshape(batch * time, features).float()
    d_products = more["d_products"].view(batch * time, board.count, width)
    names = board.programs.stages[0].names
    blocks, offsets = {}, {}
    heads, inner = board.heads, width // board.heads
    if heads == 1:
        joined = (before.t() @ d_products.view(batch * time, -1)).view(1, width, board.count, width)
    else:
        left = before.view(-1, heads, inner).permute(1, 2, 0)
        right = d_products.view(-1, board.count, heads, inner).permute(2, 0, 1, 3)
        joined = torch.bmm(left, right.reshape(heads, -1, board.count * inner))
        joined = joined.view(heads, inner, board.count, inner)
    sums = d_products.sum(dim=0)
    for k, name in enumerate(names):
        block = joined[:, :, k]
        blocks[name], offsets[name] = (block[0] if cell.n_heads is None else block), sums[k]
    masks = cell.clamp_masks(problem.xp, torch.float32)
    params = {n: v * masks[n] for n, v in cell.matrix_gradients(problem.xp, blocks, offsets).items()}
    params["W_x.weight"], params["W_x.bias"] = d_weight, d_gates.sum(dim=0)
    params = {name: params[name].to(cell.dtype) for name in cell.arrays}
    h0 = future[0] if board.size == 1 else future.transpose(0, 1)
    return Gradients(d_x.view(batch, time, features), params, h0.to(problem.dtype).clone())


def _swept(problem: Problem, chosen: MixPlan, board: Board) -> torch.Tensor | None:
    """ν before the first step, (S, B, D), by segments; None where their joints do not settle."""
    time = problem.shape[1]
    done = chosen.segment_len * chosen.segments
    zero = torch.zeros_like(board.h0)
    future = _walk_back(board, zero, time, time - done)
    board.begin.zero_()
    span = board.span(chosen.segment_len, chosen.segments, chosen.warmup, True)
    shape = (board.size, board.batch, chosen.segments, board.width)
    span.starts.view(shape)[:, :, 0].copy_(future)
    tol = tolerance(problem.config, problem)
    joints = GraphJoints(span, [False] * board.size, one_scale=True)
    out = settle(joints, _settings(problem, chosen, tol, 5.0 * tol), np.zeros(board.batch))
    return span.ends.view(shape)[:, :, -1] if bool(np.all(out.settled)) else None


def _walk_back(board: Board, future: torch.Tensor, stop: int, steps: int) -> torch.Tensor:
    """The plain reverse sweep over the `steps` steps that end before `stop`."""
    nu = future
    while steps:
        length = min(WALK, steps)
        span = board.span(length, 1, 0, True)
        span.starts.copy_(nu)
        board.begin.fill_(stop - length)
        for _ in range(steps // length):
            span.replay("_walk")
        stop -= steps // length * length
        nu, steps = span.starts, steps % length
    return nu


def describe_mixing_on_cuda(problem: Problem) -> dict[str, object]:
    return plan(problem).described()
