"""newton_apply and newton_vjp: the parallel run of a cell, and its gradient."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pararnn.adjoint import Gradients
from pararnn.arrays import Array, cast, common_namespace
from pararnn.config import NewtonConfig
from pararnn.drives import split_drives, with_drives
from pararnn.errors import NewtonDivergenceError, NotConvergedWarning
from pararnn.front import adopted, front_of, told
from pararnn.packing import spread_last
from pararnn.problem import Problem, check_given, make_problem
from pararnn.registry import choose
from pararnn.stats import NewtonStats
from pararnn.verify import default_agreement_atol

logger = logging.getLogger("pararnn")

# A residual that deserves a line in the log, well below the one that raises.
RESIDUAL_WARN = 1e-3


def newton_apply(
    cell: Any,
    x: Array,
    config: NewtonConfig | None = None,
    *,
    h0: Array | None = None,
    guess: Array | None = None,
    stats: NewtonStats | None = None,
    cu_seqlens: Any = None,
    reset: Array | None = None,
    mask: Array | None = None,
    **drives: Any,
) -> Array:
    """The states of `cell` on `x`, computed in parallel over time and equal to the time loop's.

    ::

        h_t = f(h_{t-1}, W_x x_t + b),   t = 0 … T-1,   h_{-1} = h0 or 0

    Newton's method on the states at segment starts; what does not settle is finished exactly, so the result is right
    for chaotic networks too (at the time loop's speed). See ``docs/how-it-works.md``.

    On PyTorch tensors autograd works as usual, and on JAX arrays ``jax.grad``: gradients reach x, the cell's arrays and
    h0 (see ``docs/pytorch.md``, ``docs/jax.md``). Elsewhere newton_vjp gives them.

    Args:
        cell: a ChannelwiseCell, its arrays of the same library and dtype as `x`.
        x: (B, T, I), floating; any B, T ≥ 0. Half precision is computed in float32 and returned in half.
        config: see NewtonConfig. ``max_iters=K`` pins the published algorithm with K iterations.
        h0: (B, D), or (B, S, D) for S slots; zeros if None.
        guess: (B, T, …) like the result: states to start from, for instance those of a similar input.
        stats: filled with what was done and how far to trust it.
        cu_seqlens: offsets [0, end of document 1, …, T] of N documents that follow one another in x (1, T, I); every
            document starts anew, from its row of an h0 (N, …). A list, tuple or array of integers; a document may be
            empty. See ``docs/packing.md``, final_states, and the two that follow.
        reset: (B, T), true where the state is zero again before the step (an episode begins).
        mask: (B, T), false where a step is padding: the state stays as it is.
        drives: per-step inputs of cells that have them, as ``dt`` of ParaCfC: a number, (B,) or (B, T).

    Returns:
        (B, T, D) for one slot, (B, T, S, D) for S slots, in x's library, dtype and device.

    Raises:
        TypeError, ValueError: input that does not fit, before any work.
        NewtonDivergenceError: a pinned solve ended above ``residual_fail`` or non-finite.
        BackendUnavailableError: the named backend cannot run here.

    Source: Lim et al. 2024 (arXiv 2309.12252), eq. 6, generalised to segments (multiple shooting).

    >>> import numpy as np
    >>> from pararnn import NewtonStats, ParaGRU, sequential_apply
    >>> cell, x = ParaGRU(3, 4, seed=0), np.random.default_rng(0).normal(size=(1, 1000, 3)).astype(np.float32)
    >>> stats = NewtonStats()
    >>> h = newton_apply(cell, x, stats=stats)
    >>> bool(np.abs(h - sequential_apply(cell, x)).max() < 1e-5), stats.converged
    (True, True)
    """
    cell, x = with_drives("newton_apply", cell, x, drives)
    front = front_of(x)
    if front is not None:
        packing = told(front, cu_seqlens=cu_seqlens, reset=reset, mask=mask)
        return front.newton_apply(cell, x, config, h0=h0, guess=guess, stats=stats, **packing)
    problem = checked_problem(
        "newton_apply", cell, x, config, h0, guess, stats, cu_seqlens=cu_seqlens, reset=reset, mask=mask
    )
    if getattr(x, "requires_grad", False) or any(getattr(a, "requires_grad", False) for a in cell.arrays.values()):
        raise TypeError(
            "newton_apply: these tensors require grad, and the array path has no autograd; "
            "take gradients with newton_vjp, or detach the tensors"
        )
    return run_newton(problem, stats)


def checked_problem(
    what: str,
    cell: Any,
    x: Array,
    config: NewtonConfig | None,
    h0: Array | None,
    guess: Array | None = None,
    stats: NewtonStats | None = None,
    **packing: Any,
) -> Problem:
    """The problem of a public call, refused here if anything about it does not fit."""
    problem = make_problem(what, cell, x, h0, config, guess, **packing)
    if stats is not None and not isinstance(stats, NewtonStats):
        raise TypeError(f"{what}: stats must be a NewtonStats to be filled, got {type(stats).__name__}")
    if problem.config.verify_first_step:
        raise TypeError(
            f"{what}: verify_first_step=True needs a module that remembers its first call (ParaRNN); "
            "call verify_agreement once instead"
        )
    return problem


def run_newton(problem: Problem, stats: NewtonStats | None = None) -> Array:
    """A checked problem through its backend, with the residual gates of a pinned solve."""
    states, found = choose(problem).backend.newton(problem)
    if stats is not None:
        stats.fill(found)
    if problem.config.pinned(problem.shape[1]) is not None:
        _gate(problem, found)
    return states


def _gate(problem: Problem, stats: NewtonStats) -> None:
    """A pinned solve's gates: an error above residual_fail, a warning where the result is not the time loop's."""
    fail, residual = problem.config.residual_fail, stats.max_residual
    if fail is not None and not residual <= fail:
        raise NewtonDivergenceError(
            f"newton_apply: residual {residual:.3g} after {stats.iters} iterations (residual_fail={fail}); leave "
            "max_iters=None for the solver that finishes exactly, or give more iterations, or for ParaSLSTM more "
            "picard_iters",
            stats,
        )
    if not residual <= RESIDUAL_WARN:
        logger.warning("newton_residual_high: %.3g after %d iterations", residual, stats.iters)
    agreed = default_agreement_atol(problem.dtype)
    if not stats.agreement_estimate <= agreed and not math.isinf(agreed):
        warnings.warn(
            f"newton_apply: estimated error {stats.agreement_estimate:.3g} after {stats.iters} pinned iterations "
            f"exceeds {agreed:g}; leave max_iters=None to have the solve finish",
            NotConvergedWarning,
            stacklevel=4,
        )


def newton_vjp(
    cell: Any,
    x: Array,
    config: NewtonConfig | None = None,
    h0: Array | None = None,
    *,
    stats: NewtonStats | None = None,
    cu_seqlens: Any = None,
    reset: Array | None = None,
    mask: Array | None = None,
    **drives: Any,
) -> tuple[Array, Callable[..., Gradients]]:
    """The states of `cell` on `x`, and a function from their cotangent to gradients of x, parameters and h0.

    ::

        μ_t = g_t + J_{t+1}ᵀ μ_{t+1};   ∂/∂θ = Σ_t (∂f_t/∂θ)ᵀ μ_t

    For libraries without automatic differentiation. The pullback takes ``cotangent`` (B, T, …) for the states, or
    ``last`` (B, …) for the final state only, or both, and returns :class:`Gradients`. It may be called repeatedly.
    ``config.recompute=True`` keeps no states for it and solves again. With ``cu_seqlens`` ``last`` and the gradient of
    h0 are (N, …), by document. Drives are given as to newton_apply.

    Raises:
        As newton_apply; the pullback raises ValueError for a cotangent of another shape.

    Source: ParaRNN (arXiv 2510.21450), eq. 2.6.

    >>> import numpy as np
    >>> from pararnn import ParaGRU
    >>> x = np.ones((1, 6, 2), dtype=np.float32)
    >>> h, pullback = newton_vjp(ParaGRU(2, 3, seed=0), x)
    >>> grads = pullback(np.ones_like(h))
    >>> grads.x.shape, sorted(grads.params)
    ((1, 6, 2), ['W_x.bias', 'W_x.weight', 'a_n', 'a_r', 'a_z'])
    """
    given = cell
    cell, x = with_drives("newton_vjp", cell, x, drives)
    problem = checked_problem(
        "newton_vjp", cell, x, config, h0, stats=stats, cu_seqlens=cu_seqlens, reset=reset, mask=mask
    )
    front = front_of(problem.x)
    if front is not None:
        # The caller asks for the gradient; an array library that watches would only get in the way.
        problem = front.untracked(problem)
    if not problem.config.recompute:
        problem = replace(problem, kept={})
    # A gradient needs a state at the fixed point; a solve that gave up must not hand one out.
    states = run_newton(problem, stats)
    kept = None if problem.config.recompute else states

    def pullback(cotangent: Array | None = None, *, last: Array | None = None) -> Gradients:
        total, straight = _whole_cotangent(problem, cotangent, last)
        solved = run_newton(problem) if kept is None else kept
        grads = choose(problem).backend.pull_back(replace(problem, guess=None).with_starts(), solved, total)
        if problem.documents is not None:
            assert grads.starts is not None
            grads = replace(grads, h0=grads.starts[: problem.documents, ...], starts=None)
        grads = grads if given is cell else split_drives(given, grads)
        # Without a step the final state is h0 itself.
        return grads if straight is None else replace(grads, h0=grads.h0 + cast(problem.xp, straight, grads.h0.dtype))

    return states, pullback


def _whole_cotangent(problem: Problem, cotangent: Array | None, last: Array | None) -> tuple[Array, Array | None]:
    """The cotangent of all states, with that of the last ones added in; and what goes to h0 without a step."""
    xp, cotangent, last = problem.xp, adopted(cotangent), adopted(last)
    ends = problem.shape[0] if problem.documents is None else problem.documents
    if cotangent is None and last is None:
        raise TypeError("pullback: give the states' cotangent, or last= for the final state's, or both")
    common_namespace("pullback", x=problem.x, cotangent=cotangent, last=last)
    check_given("pullback", "cotangent", cotangent, problem.state_shape)
    check_given("pullback", "last", last, (ends, *problem.cell.state_shape))
    if last is None:
        assert cotangent is not None
        return cotangent, None
    if problem.documents is not None:
        rows, straight = spread_last(xp, problem.offsets, problem.shape[1], cast(xp, last, problem.work_dtype))
        return rows if cotangent is None else rows + cast(xp, cotangent, problem.work_dtype), straight
    if problem.shape[1] == 0:
        none = xp.zeros(problem.state_shape, dtype=problem.work_dtype, device=problem.device)
        return none if cotangent is None else cotangent, last
    tail = xp.expand_dims(cast(xp, last, problem.work_dtype), axis=1)
    if cotangent is None:
        front = xp.zeros(
            (problem.shape[0], problem.shape[1] - 1, *problem.cell.state_shape),
            dtype=problem.work_dtype,
            device=problem.device,
        )
        return xp.concat([front, tail], axis=1), None
    given = cast(xp, cotangent, problem.work_dtype)
    return xp.concat([given[:, :-1, ...], given[:, -1:, ...] + tail], axis=1), None
