"""Generated Triton source to kernels, and the launches of a solve and its gradient."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from pararnn.programs import StepPrograms
from pararnn_triton import device_math
from pararnn_triton.backward_source import backward_source
from pararnn_triton.forward_source import forward_source
from pararnn_triton.interpreter import interpreting, patch
from pararnn_triton.shape import Shape

patch()

EPSILON = 2.0**-23
# Fused multiply-adds would round differently from kernel to kernel, and joints could not match bit for bit.
_OPTIONS = {"enable_fp_fusion": False}


@lru_cache(maxsize=256)
def _module(source: str) -> ModuleType:
    """A module made from `source`; Triton reads a kernel's text back through linecache."""
    name = f"<pararnn {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = ModuleType(name)
    scope = module.__dict__
    scope.update({n: v for n, v in vars(device_math).items() if not n.startswith("_")}, triton=triton, tl=tl)
    exec(compile(source, name, "exec"), scope)
    return module


def kernels(programs: StepPrograms) -> ModuleType:
    """The module with ``forward``, ``adjoint_maps`` and ``back_propagate`` of one cell."""
    if "triton" not in programs.compiled:
        programs.compiled["triton"] = _module(forward_source(programs) + "\n\n" + backward_source(programs))
    return programs.compiled["triton"]


class Launcher:
    """Launches kernels on one set of arguments, past Triton's own argument handling once a like launch was compiled.

    That handling takes longer on the host than these kernels on the device. What Triton specialises a kernel on is in
    the key: types, the alignment of addresses, and of the numbers whether each is 1 or divisible by 16.
    """

    def __init__(self, grid: int, warps: int, tensors: Sequence[torch.Tensor], numbers: Sequence[int | float]) -> None:
        self.grid, self.warps, self.arguments = grid, warps, (*tensors, *numbers)
        self.device = tensors[0].device
        self.key = (
            warps,
            self.device,
            *((t.dtype, t.data_ptr() % 16 == 0) for t in tensors),
            *((n == 1, n % 16 == 0, n < 2**31) for n in numbers if isinstance(n, int)),
        )

    def __call__(self, kernel: Any, *constants: Any) -> None:
        key = (kernel, constants, self.key)
        compiled = _compiled.get(key)
        if compiled is None:
            compiled = kernel[(self.grid,)](*self.arguments, *constants, num_warps=self.warps, **_OPTIONS)
            if not interpreting():
                _compiled[key] = compiled
        elif self.device.index == torch.cuda.current_device():
            compiled[(self.grid, 1, 1)](*self.arguments, *constants)
        else:
            with torch.cuda.device(self.device):
                compiled[(self.grid, 1, 1)](*self.arguments, *constants)


_compiled: dict[tuple[Any, ...], Any] = {}


def run_forward(
    programs: StepPrograms,
    gates: torch.Tensor,
    h0: torch.Tensor | None,
    params: torch.Tensor,
    shape: Shape,
    tol: float,
    accept: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """States (B, T, S, D) in the gates' dtype, and the estimated error by channel (B, D) (zeros where exact)."""
    batch, time, _, width = gates.shape
    size, segments = programs.size, shape.segments
    states = torch.empty((batch, time, size, width), dtype=gates.dtype, device=gates.device)
    many = segments > 1
    estimate = (torch.empty if many else torch.zeros)((batch, width), dtype=torch.float32, device=gates.device)
    entries = len(programs.m.flat)
    blocks = triton.cdiv(width, shape.block)
    if many:
        # One allocation for everything that the segments exchange.
        counts = (size, size, entries, entries, size)
        exchange = torch.empty((sum(counts), batch, segments, width), dtype=torch.float32, device=gates.device)
        starts, ends, prods, grows, sizes = exchange.split(counts)
        counters = torch.zeros(batch * blocks, dtype=torch.int32, device=gates.device)
        flags = torch.empty(batch * blocks * (segments + 1), dtype=torch.int32, device=gates.device)
        opened, dirty = flags.split((batch * blocks, batch * blocks * segments))
    else:
        starts = ends = prods = grows = sizes = estimate
        counters = opened = dirty = estimate
    launch = Launcher(
        batch * segments * blocks,
        shape.warps,
        (gates, gates if h0 is None else h0, params, states, starts, ends, prods, grows, sizes, counters, dirty, opened,
         estimate),
        (batch, time, width, shape.length, segments, shape.warmup, tol, accept),
    )  # fmt: skip
    forward = kernels(programs).forward
    for k in range(shape.passes):
        last = k == shape.passes - 1
        launch(forward, EPSILON, shape.block, min(k, 2), last, many, h0 is not None, gates.dtype == torch.float32)
    return states, estimate


def run_backward(
    programs: StepPrograms,
    gates: torch.Tensor,
    h0: torch.Tensor | None,
    params: torch.Tensor,
    states: torch.Tensor,
    cotangent: torch.Tensor,
    shape: Shape,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cotangents of the gate inputs (B, T, G, D), of the params (P, D) and of h0 (B, S, D)."""
    batch, time, _, width = gates.shape
    size, segments = programs.size, shape.segments
    kind: dict[str, Any] = {"dtype": torch.float32, "device": gates.device}
    blocks = triton.cdiv(width, shape.block)
    grad_gates = torch.empty_like(gates)
    grad_h0 = torch.empty((batch, size, width), **kind)
    # Partial sums by segment, added up in a fixed order: atomics would make the gradient depend on timing.
    grad_params = torch.empty((len(programs.params), batch * segments, width), **kind)
    grid = batch * segments * blocks
    module = kernels(programs)
    common = (gates, gates if h0 is None else h0, params, states, cotangent)
    sizes = (batch, time, width, shape.length, segments)
    many = segments > 1
    futures = grad_h0
    if many:
        maps = torch.empty((len(programs.n.flat) + size, batch, segments, width), **kind)
        futures = torch.empty((size, batch, segments, width), **kind)
        counters = torch.zeros(batch * blocks, dtype=torch.int32, device=gates.device)
        launch = Launcher(grid, shape.warps, (*common, maps, futures, grad_h0, counters), sizes)
        launch(module.adjoint_maps, shape.block, h0 is not None)
    launch = Launcher(grid, shape.warps, (*common, futures, grad_h0, grad_gates, grad_params), sizes)
    launch(module.back_propagate, shape.block, h0 is not None, many)
    return grad_gates, grad_params.sum(dim=1), grad_h0
