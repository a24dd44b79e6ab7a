"""vmap over a solve: the mapped axis is more batch where parameters are shared, else there is one solve for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def mapped_solve(
    run: Callable[..., torch.Tensor], count: int, operands: Sequence[Any], dims: Sequence[int | None]
) -> torch.Tensor:
    """The states (N, B, T, …) of ``run(x, h0, guess, *arrays)`` with some operands mapped over N."""
    if any(d is not None for d in dims[3:]):
        return torch.stack([run(*picked(operands, dims, n)) for n in range(count)])
    return unfolded(run(*folded(operands[:3], dims[:3], count), *operands[3:]), count)


def picked(operands: Sequence[Any], dims: Sequence[int | None], n: int) -> list[Any]:
    """Sample n of everything that is mapped."""
    return [a if d is None else a.select(d, n) for a, d in zip(operands, dims, strict=True)]


def folded(operands: Sequence[Any], dims: Sequence[int | None], count: int) -> list[Any]:
    """The mapped axis as part of the batch axis: (N·B, …)."""
    whole = []
    for a, d in zip(operands, dims, strict=True):
        if a is not None:
            a = a.expand(count, *a.shape) if d is None else a.movedim(d, 0)
            a = a.reshape(count * a.shape[1], *a.shape[2:])
        whole.append(a)
    return whole


def unfolded(a: torch.Tensor, count: int) -> torch.Tensor:
    return a.reshape(count, a.shape[0] // count, *a.shape[1:])
