"""The solve as an autograd function: forward runs the chosen backend, backward its adjoint.

Both run on detached tensors, so a backend needs to know nothing of autograd. The gradient is a function of its own
whose derivative is refused, so that second derivatives are an error and never silently wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pararnn.adjoint import Gradients
from pararnn.cells.base import ChannelwiseCell
from pararnn.config import NewtonConfig
from pararnn.newton import run_newton
from pararnn.problem import Problem
from pararnn.registry import choose
from pararnn.stats import NewtonStats
from pararnn_torch.apply import apart
from pararnn_torch.mapped import folded, mapped_solve, picked, unfolded

ONLY_FIRST = (
    "newton_apply gives first derivatives in reverse mode only; take second and forward-mode derivatives through "
    "sequential_apply (ParaRNN: solver='sequential'), a plain loop that torch differentiates as often as you like"
)


@dataclass(frozen=True, eq=False)
class Recipe:
    """What a solve needs besides its tensors."""

    cell: ChannelwiseCell
    names: tuple[str, ...]
    config: NewtonConfig
    xp: Any
    stats: NewtonStats | None = None
    # What a packed problem has besides, all of it integers and truth values; its starts come in the place of h0.
    packing: Mapping[str, Any] = field(default_factory=dict)
    # Of the backend, for the gradient (see Problem.kept).
    kept: dict[Any, Any] = field(default_factory=dict)

    def problem(
        self,
        x: torch.Tensor,
        h0: torch.Tensor | None,
        guess: torch.Tensor | None,
        arrays: Sequence[torch.Tensor],
    ) -> Problem:
        """The problem on these tensors, none of them watched by autograd."""
        of_documents = self.packing.get("documents") is not None
        named = {name: a.detach() for name, a in zip(self.names, arrays, strict=True)}
        cell = self.cell._copy(self.cell.max_recurrent_norm, named)
        h0 = None if h0 is None else h0.detach()
        guess = None if guess is None else guess.detach()
        start, starts = (None, h0) if of_documents else (h0, None)
        kept = None if self.config.recompute else self.kept
        return Problem(cell, x.detach(), start, self.config, guess, self.xp, starts=starts, kept=kept, **self.packing)


def without_arrays(cell: ChannelwiseCell) -> ChannelwiseCell:
    """The cell's class, sizes and options, so that a recipe keeps no tensor alive."""
    return cell._copy(cell.max_recurrent_norm, {})


def tracked_solve(problem: Problem, stats: NewtonStats | None) -> torch.Tensor:
    """The states of `problem` as a differentiable function of x, h0 and the cell's arrays."""
    cell = problem.cell
    packing: dict[str, Any] = {}
    if problem.packed:
        packing = {name: getattr(problem, name) for name in ("head", "places", "hold", "documents", "offsets")}
    recipe = Recipe(without_arrays(cell), tuple(cell.arrays), problem.config, problem.xp, stats, packing)
    start = problem.h0 if problem.documents is None else problem.starts
    return _Solve.apply(recipe, problem.x, start, problem.guess, *cell.arrays.values())


def refuse_mapped_packing(packed: bool) -> None:
    if packed:
        raise TypeError(
            "newton_apply: vmap does not go over packed sequences (cu_seqlens, reset, mask); give all of them at once, "
            "as more documents or more rows of the batch"
        )


def solved(problem: Problem, stats: NewtonStats | None = None) -> torch.Tensor:
    """The states of a problem on watched-by-nobody tensors, outside autocast."""
    with torch.no_grad(), apart(problem.device):
        return run_newton(problem, stats)


def pulled_back(problem: Problem, states: torch.Tensor, cotangent: torch.Tensor) -> Gradients:
    """The adjoint of the backend that solves `problem`, outside autocast."""
    with torch.no_grad(), apart(problem.device):
        return choose(problem).backend.pull_back(problem, states.detach(), cotangent.detach())


class _Solve(torch.autograd.Function):
    """(recipe, x, h0, guess, *arrays) to states."""

    @staticmethod
    def forward(recipe: Recipe, x: Any, h0: Any, guess: Any, *arrays: Any) -> torch.Tensor:
        return solved(recipe.problem(x, h0, guess, arrays), recipe.stats)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.recipe, x, h0, guess, *arrays = inputs
        # A guess only says where to start; where it leads does not depend on it.
        recompute = ctx.recipe.config.recompute
        ctx.save_for_backward(x, h0, guess if recompute else None, None if recompute else output, *arrays)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        x, h0, guess, states, *arrays = ctx.saved_tensors
        _, for_x, for_h0, _, *for_arrays = ctx.needs_input_grad
        wanted = (for_x, for_h0, *for_arrays)
        found = iter(_PullBack.apply(ctx.recipe, wanted, cotangents[0], states, x, h0, guess, *arrays))
        grad_x, grad_h0, *grads = (next(found) if is_wanted else None for is_wanted in wanted)
        return None, grad_x, grad_h0, None, *grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(ONLY_FIRST)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], recipe: Recipe, x: Any, h0: Any, guess: Any, *arrays: Any) -> Any:
        refuse_mapped_packing(bool(recipe.packing))
        run = partial(_Solve.apply, recipe)
        return mapped_solve(run, info.batch_size, (x, h0, guess, *arrays), dims[1:]), 0


class _PullBack(torch.autograd.Function):
    """(recipe, wanted, cotangent, states, x, h0, guess, *arrays) to the wanted gradients, in the inputs' order."""

    @staticmethod
    def forward(
        recipe: Recipe, wanted: tuple[bool, ...], cotangent: Any, states: Any, x: Any, h0: Any, guess: Any, *arrays: Any
    ) -> tuple[torch.Tensor, ...]:
        problem = recipe.problem(x, h0, guess, arrays)
        found = pulled_back(problem, solved(problem) if states is None else states, cotangent)
        started = found.h0 if problem.documents is None else found.starts
        every = (found.x, started, *(found.params[name] for name in recipe.names))
        like = (x, h0, *arrays)
        return tuple(g.to(a.dtype) for g, a, is_wanted in zip(every, like, wanted, strict=True) if is_wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise RuntimeError(ONLY_FIRST)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(ONLY_FIRST)

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], recipe: Recipe, wanted: tuple[bool, ...], *operands: Any
    ) -> tuple[Any, Any]:
        _, _, *dims_in = dims
        count = info.batch_size
        refuse_mapped_packing(bool(recipe.packing))
        if any(wanted[2:]) or any(d is not None for d in dims_in[5:]):
            # A gradient of the parameters is a sum over the batch, so every sample needs its own.
            each = [_PullBack.apply(recipe, wanted, *picked(operands, dims_in, n)) for n in range(count)]
            return tuple(torch.stack(column) for column in zip(*each, strict=True)), (0,) * sum(wanted)
        front = folded(operands[:5], dims_in[:5], count)
        found = _PullBack.apply(recipe, wanted, *front, *operands[5:])
        return tuple(unfolded(g, count) for g in found), (0,) * sum(wanted)
