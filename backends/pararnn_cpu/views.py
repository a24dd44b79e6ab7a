"""A problem on CPU tensors seen as one on NumPy arrays, in the same memory; and results the other way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pararnn.adjoint import Gradients
from pararnn.arrays import Array, dtype_name, namespace_name, resolve_namespace
from pararnn.problem import Problem


def refuse_arrays(problem: Problem) -> str | None:
    """Why the problem's arrays cannot be seen as NumPy's, if so."""
    library = namespace_name(problem.xp)
    if library == "numpy":
        return None
    if library != "torch":
        return f"it takes NumPy arrays and CPU tensors, and these are {library}'s"
    if problem.device.type != "cpu":
        return f"it takes tensors on the CPU, and these are on {problem.device}"
    if any(a.requires_grad for a in (problem.x, problem.h0, *problem.cell.arrays.values()) if a is not None):
        return "its loops are outside autograd, and these tensors require grad"
    return None


def view(a: Array) -> Any:
    """`a` as a NumPy array in the same memory; bfloat16, which NumPy lacks, as a float32 copy."""
    if a is None or isinstance(a, np.ndarray):
        return a
    return (a.float() if dtype_name(a.dtype) == "bfloat16" else a).numpy(force=True)


def numpy_problem(problem: Problem) -> tuple[Problem, Callable[[np.ndarray], Array]]:
    """The problem on NumPy arrays, and what makes an array of its results one of the caller's."""
    if namespace_name(problem.xp) == "numpy":
        return problem, lambda a: a
    import torch

    cell = problem.cell
    arrays = {name: view(a) for name, a in cell.arrays.items()}
    seen = replace(
        problem,
        cell=cell._copy(cell.max_recurrent_norm, arrays),
        x=view(problem.x),
        h0=view(problem.h0),
        guess=view(problem.guess),
        xp=resolve_namespace(None),
        head=view(problem.head),
        starts=view(problem.starts),
        places=view(problem.places),
        hold=view(problem.hold),
        offsets=view(problem.offsets),
    )
    return seen, lambda a: torch.from_numpy(a).to(problem.dtype)


def back_to_caller(grads: Gradients, give: Callable[[np.ndarray], Array]) -> Gradients:
    starts = None if grads.starts is None else give(grads.starts)
    return Gradients(give(grads.x), {name: give(a) for name, a in grads.params.items()}, give(grads.h0), starts=starts)
