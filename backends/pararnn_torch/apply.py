"""newton_apply and sequential_apply on tensors: which of the compiled, the tracked and the plain way a call takes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch

from pararnn.config import NewtonConfig
from pararnn.newton import checked_problem, run_newton
from pararnn.problem import Problem, make_problem
from pararnn.sequential import run_sequential
from pararnn.stats import NewtonStats


def newton_apply(
    cell: Any,
    x: torch.Tensor,
    config: NewtonConfig | None = None,
    *,
    h0: torch.Tensor | None = None,
    guess: torch.Tensor | None = None,
    stats: NewtonStats | None = None,
    **packing: Any,
) -> torch.Tensor:
    """pararnn.newton_apply on tensors, with gradients for x, the cell's arrays and h0."""
    if torch.compiler.is_compiling():
        from pararnn_torch.compiled import compiled_solve

        wanted = NewtonConfig() if config is None else config
        return compiled_solve(cell, cell.arrays, x, wanted, h0=h0, guess=guess, **packing)
    x = as_cell(cell, x)
    problem = checked_problem("newton_apply", cell, x, config, h0, guess, stats, **packing)
    if is_tracked(x, h0, *cell.arrays.values()):
        from pararnn_torch.autograd import tracked_solve

        return tracked_solve(problem, stats)
    with apart(problem.device):
        return run_newton(untracked(problem), stats)


def sequential_apply(cell: Any, x: torch.Tensor, h0: torch.Tensor | None = None, **packing: Any) -> torch.Tensor:
    """pararnn.sequential_apply on tensors: a plain loop that autograd follows, however often it differentiates."""
    if torch.compiler.is_compiling():
        from pararnn_torch.compiled import SEQUENTIAL, compiled_solve

        return compiled_solve(cell, cell.arrays, x, SEQUENTIAL, h0=h0, **packing)
    x = as_cell(cell, x)
    problem = make_problem("sequential_apply", cell, x, h0, **packing)
    if is_tracked(x, h0, *cell.arrays.values()):
        if not problem.shape[1]:
            # A loop without a step touches nothing, and autograd would not find its way back.
            return newton_apply(cell, x, h0=h0, **packing)
        problem = replace(problem, xp=Differentiable(problem.xp))
    with apart(problem.device):
        return run_sequential(problem)


class Differentiable:
    """torch's namespace with a sigmoid that autograd can follow into a shut gate."""

    smooth_sigmoid = staticmethod(torch.sigmoid)

    def __init__(self, xp: Any) -> None:
        self._xp = xp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._xp, name)


def as_cell(cell: Any, x: Any) -> Any:
    """`x` in the cell's dtype where autocast may have changed it; elsewhere a difference is the caller's to mend."""
    if isinstance(x, torch.Tensor) and autocasts(x.device) and x.is_floating_point():
        dtype = getattr(cell, "dtype", x.dtype)
        return x.to(dtype) if isinstance(dtype, torch.dtype) else x
    return x


def autocasts(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def apart(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Out of reach of autocast: a solve runs in its module's dtype (P41)."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else contextlib.nullcontext()


def untracked(problem: Problem) -> Problem:
    """The problem on tensors that autograd does not watch."""
    cell = problem.cell
    given = (problem.x, problem.h0, problem.guess, problem.starts, *cell.arrays.values())
    if not any(a is not None and a.requires_grad for a in given):
        return problem
    arrays = {name: a.detach() for name, a in cell.arrays.items()}
    return replace(
        problem,
        cell=cell._copy(cell.max_recurrent_norm, arrays),
        x=problem.x.detach(),
        h0=None if problem.h0 is None else problem.h0.detach(),
        guess=None if problem.guess is None else problem.guess.detach(),
        starts=None if problem.starts is None else problem.starts.detach(),
    )


def is_tracked(*tensors: torch.Tensor | None) -> bool:
    """Whether somebody must know how the states depend on the tensors: autograd, torch.func, forward mode."""
    # No public question tells whether a torch.func transform or a forward-mode level is being run.
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in tensors)
