"""The solve and its gradient as custom operators: what torch.compile and torch.export put into a graph.

An operator is opaque to the compiler, so neither the length of the sequence nor the number of iterations shows in the
graph, and any backend may run inside. Shapes come from the fakes, gradients from the registered backward.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pararnn.config import NewtonConfig
from pararnn.newton import checked_problem, run_newton
from pararnn.problem import Problem
from pararnn.registry import choose
from pararnn.stats import NewtonStats
from pararnn_torch.apply import apart, untracked
from pararnn_torch.autograd import ONLY_FIRST, pulled_back, refuse_mapped_packing
from pararnn_torch.mapped import mapped_solve, picked
from pararnn_torch.text import cell_text, config_text, read_cell, read_config

# In place of a configuration's text: the time loop.
SEQUENTIAL = "sequential"

# Layers that want to know what an operator did, by ticket; a graph holds the ticket only.
_LISTENERS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def ticket_for(layer: Any) -> str:
    """A ticket; an operator that is given it sets the layer's ``last_stats``."""
    # Counted, not random: the same script makes the same graphs, and finds them in the compiler's cache.
    ticket = f"{next(_numbers)}"
    _LISTENERS[ticket] = layer
    return ticket


def compiled_solve(
    cell: Any,
    arrays: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    config: NewtonConfig | str,
    *,
    h0: torch.Tensor | None = None,
    guess: torch.Tensor | None = None,
    ticket: str = "",
    cu_seqlens: Any = None,
    reset: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator call for a solve of `cell`'s kind with these arrays; Dynamo traces this function."""
    if not isinstance(arrays["W_x.weight"], torch.Tensor):
        raise TypeError("newton_apply: x is a tensor but the cell is not made of tensors; use cell.to(torch)")
    # Under autocast the input may come in another dtype than the cell's, in which the solve runs.
    dtype = arrays["W_x.weight"].dtype
    if x.dtype != dtype and torch.is_autocast_enabled(x.device.type):
        x = x.to(dtype)
    text = config if isinstance(config, str) else config_text(config)
    if isinstance(cu_seqlens, (list, tuple)):
        cu_seqlens = torch.tensor(cu_seqlens)
    told = (cu_seqlens, reset, mask)
    return torch.ops.pararnn.solve(x, h0, guess, list(arrays.values()), cell_text(cell, arrays), text, ticket, *told)


def _problem(
    x: torch.Tensor,
    h0: torch.Tensor | None,
    guess: torch.Tensor | None,
    arrays: Sequence[torch.Tensor],
    cell: str,
    config: str,
    told: Sequence[torch.Tensor | None],
) -> Problem:
    """The checked problem, which nothing watches."""
    packing: dict[str, Any] = dict(zip(("cu_seqlens", "reset", "mask"), told, strict=True))
    blank, names = read_cell(cell)
    full = blank._copy(blank.max_recurrent_norm, dict(zip(names, arrays, strict=True)))
    if config == SEQUENTIAL:
        wanted = NewtonConfig(segment_len=max(1, x.shape[1]) if x.ndim == 3 else None)
    else:
        wanted = read_config(config)
    return untracked(checked_problem("newton_apply", full, x, wanted, h0, guess, **packing))


def _run(problem: Problem, stats: NewtonStats | None = None) -> torch.Tensor:
    """The states; a compile-safe configuration asks for no value from the device, so there are no gates."""
    config = problem.config
    with torch.no_grad(), apart(problem.device):
        if config.residual_atol is not None or config.residual_fail is not None:
            return run_newton(problem, stats)
        states, found = choose(problem).backend.newton(problem)
    if stats is not None:
        stats.fill(found)
    return states


@torch.library.custom_op(
    "pararnn::solve",
    mutates_args=(),
    schema="(Tensor x, Tensor? h0, Tensor? guess, Tensor[] arrays, str cell, str config, str ticket, "
    "Tensor? cu_seqlens, Tensor? reset, Tensor? mask) -> Tensor",
)
def solve(
    x: torch.Tensor,
    h0: torch.Tensor | None,
    guess: torch.Tensor | None,
    arrays: Sequence[torch.Tensor],
    cell: str,
    config: str,
    ticket: str,
    cu_seqlens: torch.Tensor | None = None,
    reset: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The states of a cell of kind `cell` with these arrays."""
    problem = _problem(x, h0, guess, arrays, cell, config, (cu_seqlens, reset, mask))
    stats = NewtonStats()
    states = _run(problem, stats)
    if (listener := _LISTENERS.get(ticket)) is not None:
        listener.heard(stats)
    return states.contiguous()


@solve.register_fake
def _(
    x: torch.Tensor,
    h0: torch.Tensor | None,
    guess: torch.Tensor | None,
    arrays: Sequence[torch.Tensor],
    cell: str,
    config: str,
    ticket: str,
    cu_seqlens: torch.Tensor | None = None,
    reset: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    if x.ndim != 3:
        raise ValueError(f"newton_apply: x must have 3 axes (B, T, I), got shape {tuple(x.shape)}")
    blank, _names = read_cell(cell)
    return x.new_empty((x.shape[0], x.shape[1], *blank.state_shape))


@torch.library.custom_op(
    "pararnn::pull_back",
    mutates_args=(),
    schema="(Tensor cotangent, Tensor? states, Tensor x, Tensor? h0, Tensor? guess, Tensor[] arrays, str cell, "
    "str config, Tensor? cu_seqlens, Tensor? reset, Tensor? mask) -> Tensor[]",
)
def pull_back(
    cotangent: torch.Tensor,
    states: torch.Tensor | None,
    x: torch.Tensor,
    h0: torch.Tensor | None,
    guess: torch.Tensor | None,
    arrays: Sequence[torch.Tensor],
    cell: str,
    config: str,
    cu_seqlens: torch.Tensor | None = None,
    reset: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Gradients of x, h0 and the arrays; where there is no h0, something empty stands for its gradient."""
    problem = _problem(x, h0, guess, arrays, cell, config, (cu_seqlens, reset, mask))
    if config == SEQUENTIAL:
        # Whoever ran the loop, the adjoint of its states may run over segments.
        problem = replace(problem, config=NewtonConfig())
    found = pulled_back(problem, _run(problem) if states is None else states, cotangent)
    started = found.h0 if problem.documents is None or found.starts is None else found.starts[: problem.documents]
    grads = [found.x, x.new_empty(0) if h0 is None else started, *(found.params[name] for name in problem.cell.arrays)]
    return [g.to(a.dtype).contiguous() for g, a in zip(grads, (x, x if h0 is None else h0, *arrays), strict=True)]


@pull_back.register_fake
def _(
    cotangent: torch.Tensor,
    states: torch.Tensor | None,
    x: torch.Tensor,
    h0: torch.Tensor | None,
    guess: torch.Tensor | None,
    arrays: Sequence[torch.Tensor],
    cell: str,
    config: str,
    cu_seqlens: torch.Tensor | None = None,
    reset: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    return [a.new_empty(a.shape) for a in (x, x.new_empty(0) if h0 is None else h0, *arrays)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, h0, guess, arrays, ctx.cell, ctx.config, _ticket, *told = inputs
    recompute = ctx.config != SEQUENTIAL and read_config(ctx.config).recompute
    ctx.save_for_backward(x, h0, guess if recompute else None, None if recompute else output, *told, *arrays)


def _backward(ctx: Any, cotangent: torch.Tensor) -> tuple[Any, ...]:
    x, h0, guess, states, cu_seqlens, reset, mask, *arrays = ctx.saved_tensors
    grad_x, grad_h0, *grads = torch.ops.pararnn.pull_back(
        cotangent, states, x, h0, guess, arrays, ctx.cell, ctx.config, cu_seqlens, reset, mask
    )
    return grad_x, None if h0 is None else grad_h0, None, grads, *(None,) * 6


def _refuse(ctx: Any, *cotangents: Any) -> Any:
    raise RuntimeError(ONLY_FIRST)


solve.register_autograd(_backward, setup_context=_keep)
pull_back.register_autograd(_refuse)


def _solve_mapped(info: Any, dims: Any, x: Any, h0: Any, guess: Any, arrays: Any, *rest: Any) -> tuple[Any, int]:
    texts, told = rest[:3], rest[3:]
    refuse_mapped_packing(any(a is not None for a in told))
    operands, dims_in = (x, h0, guess, *arrays), (*dims[:3], *dims[3])

    def run(x: Any, h0: Any, guess: Any, *arrays: Any) -> torch.Tensor:
        return torch.ops.pararnn.solve(x, h0, guess, list(arrays), *texts, None, None, None)

    return mapped_solve(run, info.batch_size, operands, dims_in), 0


def _pull_back_mapped(
    info: Any, dims: Any, cotangent: Any, states: Any, x: Any, h0: Any, guess: Any, arrays: Any, *rest: Any
) -> tuple[Any, Any]:
    texts, told = rest[:2], rest[2:]
    refuse_mapped_packing(any(a is not None for a in told))
    operands, dims_in = (cotangent, states, x, h0, guess, *arrays), (*dims[:5], *dims[5])
    each = []
    for n in range(info.batch_size):
        *front, last = [*picked(operands, dims_in, n)[:5], picked(operands, dims_in, n)[5:]]
        each.append(torch.ops.pararnn.pull_back(*front, last, *texts, None, None, None))
    found = [torch.stack(column) for column in zip(*each, strict=True)]
    return found, [0] * len(found)


if hasattr(solve, "register_vmap"):
    # From torch 2.5 on.
    solve.register_vmap(_solve_mapped)
    pull_back.register_vmap(_pull_back_mapped)
