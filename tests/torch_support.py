"""Small problems on tensors, and their gradients both ways, for the tests of the torch front."""

from __future__ import annotations

import torch

from pararnn import newton_apply, sequential_apply
from support import problem, start_for


def tensors(kind, time, *, dtype=torch.float64, tracked=True, **options):
    """A cell of tensors, x and h0; with `tracked`, all of them leaves that want gradients."""
    cell, x = problem(kind, time, dtype="float64", **options)
    h0 = torch.from_numpy(start_for(cell, x.shape[0])).to(dtype)
    cell = cell.to(torch).to(dtype=dtype)
    x = torch.from_numpy(x).to(dtype)
    if tracked:
        cell = cell.replace(**{name: a.requires_grad_() for name, a in cell.arrays.items()})
        x.requires_grad_()
        h0.requires_grad_()
    return cell, x, h0


def leaves(cell, x, h0=None):
    return [x, *([] if h0 is None else [h0]), *cell.arrays.values()]


def weights_like(states, seed=0):
    """A cotangent without structure."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(states.shape, generator=generator, dtype=torch.float64).to(states.dtype)


def gradients(states, inputs, **options):
    """Gradients of a weighted sum of `states`."""
    return torch.autograd.grad((states * weights_like(states)).sum(), inputs, **options)


def loop_gradients(cell, x, h0=None):
    """What torch's autograd makes of the time loop."""
    return gradients(sequential_apply(cell, x, h0), leaves(cell, x, h0))


def parallel_gradients(cell, x, h0=None, config=None, **keywords):
    return gradients(newton_apply(cell, x, config, h0=h0, **keywords), leaves(cell, x, h0))


def worst(found, wanted):
    """The largest difference between two lists of tensors, relative to each tensor's scale."""
    gaps = []
    for a, b in zip(found, wanted, strict=True):
        a, b = a.detach(), b.detach()
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.numel():
            gaps.append(float((a - b).abs().max() / b.abs().max().clamp_min(1e-6)))
    return max(gaps, default=0.0)
