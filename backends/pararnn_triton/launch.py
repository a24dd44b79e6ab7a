"""Generated Triton source to kernels, and the launches of a solve and its gradient."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pararnn.programs import StepPrograms
from pararnn_triton import device_math
from pararnn_triton.backward_source import backward_source
from pararnn_triton.forward_source import forward_source, work_size
from pararnn_triton.interpreter import interpreting, patch
from pararnn_triton.shape import Shape

patch()

EPSILON = 2.0**-23
# Fused multiply-adds would round differently from kernel to kernel, and joints could not match bit for bit.
OPTIONS = {"enable_fp_fusion": False}


@lru_cache(maxsize=256)
def module_from(source: str) -> ModuleType:
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
        programs.compiled["triton"] = module_from(forward_source(programs) + "\n\n" + backward_source(programs))
    return programs.compiled["triton"]


class Launches:
    """The launches of one kernel layout, past Triton's own argument handling once a like call was compiled.

    That handling takes longer on the host than these kernels on the device, so what it would find out on every call
    is found out on the first: one object stands for one layout, one kind of tensors and one alignment of addresses.
    """

    def __init__(self, grid: int, warps: int, numbers: tuple[int | float, ...], steps: list[tuple[Any, ...]]) -> None:
        self.grid, self.warps, self.numbers = grid, warps, numbers
        # Of each launch its kernel and constants, and once it was compiled what starts it.
        self.steps = steps
        self.runners: list[Any] = []

    def __call__(self, *tensors: torch.Tensor) -> None:
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(*tensors)
        if not self.runners:
            return self._compile(tensors)
        stream = triton.runtime.driver.active.get_current_stream(device.index)
        # As numbers, because the driver would be asked about each tensor whether its address is valid.
        addresses = [t.data_ptr() for t in tensors]
        for runner, rest in self.runners:
            runner(*addresses, *rest, stream=stream)

    def _compile(self, tensors: tuple[torch.Tensor, ...]) -> None:
        runners = []
        for kernel, *constants in self.steps:
            rest = (*self.numbers, *constants)
            compiled = kernel[(self.grid,)](*tensors, *rest, num_warps=self.warps, **OPTIONS)
            if not interpreting():
                runners.append((compiled[(self.grid, 1, 1)], rest))
        self.runners = runners


# Layouts that are remembered in one place; beyond that the oldest go.
REMEMBERED = 256


def remembered(known: dict[Any, Launches], key: Any, make: Callable[[], Launches]) -> Launches:
    """The launches of a layout, made when it is first met."""
    found = known.get(key)
    if found is None:
        if len(known) >= REMEMBERED:
            known.pop(next(iter(known)))
        found = known[key] = make()
    return found


def _of_cell(programs: StepPrograms) -> dict[Any, Launches]:
    """Where the launches of one cell are remembered."""
    return programs.compiled.setdefault("triton launches", {})


def _aligned(*tensors: torch.Tensor) -> tuple[bool, ...]:
    """Which addresses are multiples of 16: Triton compiles another kernel for each combination."""
    return tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)


class Told(NamedTuple):
    """What steps are told besides their inputs, where the programs ask for it.

    Heads (B, T) in int32, the starting states (N, S, D) in float32 of which the first `documents` want a gradient, and
    padding (B, T) in uint8.
    """

    head: torch.Tensor | None = None
    fresh: torch.Tensor | None = None
    hold: torch.Tensor | None = None
    documents: int = 0

    def tensors(self, nothing: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(nothing if t is None else t for t in (self.head, self.fresh, self.hold))


NOTHING = Told()


def run_forward(
    programs: StepPrograms,
    gates: torch.Tensor,
    h0: torch.Tensor | None,
    params: torch.Tensor,
    shape: Shape,
    tol: float,
    accept: float,
    told: Told = NOTHING,
) -> tuple[torch.Tensor, torch.Tensor]:
    """States (B, T, S, D) in the gates' dtype, and the estimated error by channel (B, D) (zeros where exact)."""
    batch, time, _, width = gates.shape
    device, many = gates.device, shape.segments > 1
    half = int(gates.dtype != torch.float32)
    states = torch.empty((batch, time, programs.size, width), dtype=gates.dtype, device=device)
    if many:
        count = work_size(programs, batch, width, shape, bool(half))
        work = torch.empty(count, dtype=torch.float32, device=device)
        estimate = torch.empty((batch, width), dtype=torch.float32, device=device)
    else:
        work = estimate = torch.zeros((batch, width), dtype=torch.float32, device=device)
    given = (gates, gates if h0 is None else h0, params, *told.tensors(gates))

    def make() -> Launches:
        forward = kernels(programs).forward
        last = shape.passes - 1
        return Launches(
            batch * shape.segments * triton.cdiv(width, shape.block),
            shape.warps,
            (batch, time, width, shape.length, shape.segments, shape.warmup, tol, accept),
            [
                (forward, EPSILON, shape.block, min(k, 3), k == last, many, h0 is not None, half)
                for k in range(shape.passes)
            ],
        )

    key = (gates.shape, gates.dtype, device, h0 is None, shape, tol, accept, _aligned(*given))
    remembered(_of_cell(programs), key, make)(*given, states, work, estimate)
    return states, estimate


def run_backward(
    programs: StepPrograms,
    gates: torch.Tensor,
    h0: torch.Tensor | None,
    params: torch.Tensor,
    states: torch.Tensor,
    cotangent: torch.Tensor,
    shape: Shape,
    told: Told = NOTHING,
    *,
    overwrite: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Cotangents of the gate inputs (B, T, G, D), the params (P, D), h0 (B, S, D) and the starts (N, S, D).

    With `overwrite` those of the gate inputs take the gate inputs' place: the last sweep reads a row before it writes
    it.
    """
    batch, time, _, width = gates.shape
    size, segments, many = programs.size, shape.segments, shape.segments > 1
    kind: dict[str, Any] = {"dtype": torch.float32, "device": gates.device}
    grid = batch * segments * triton.cdiv(width, shape.block)
    grad_gates = gates if overwrite else torch.empty_like(gates)
    grad_h0 = torch.empty((batch, size, width), **kind)
    # Partial sums by segment, added up in a fixed order: atomics would make the gradient depend on timing.
    grad_params = torch.empty((len(programs.params), batch * segments, width), **kind)
    # A start that no step loads keeps its zero.
    grad_fresh = None if told.fresh is None else torch.zeros_like(told.fresh)
    numbers = (batch, time, width, shape.length, segments)
    constants = (shape.block, h0 is not None)
    common = (gates, gates if h0 is None else h0, params, *told.tensors(gates), states, cotangent)
    key = (gates.shape, gates.dtype, gates.device, h0 is None, shape, told.documents, _aligned(*common))
    futures = grad_h0
    if many:
        maps = torch.empty((len(programs.n.flat) + size + len(programs.cut_names), batch, segments, width), **kind)
        futures = torch.empty((size, batch, segments, width), **kind)
        counters = torch.zeros(batch * triton.cdiv(width, shape.block), dtype=torch.int32, device=gates.device)
        remembered(
            _of_cell(programs),
            ("adjoint_maps", *key),
            lambda: Launches(grid, shape.warps, numbers, [(kernels(programs).adjoint_maps, *constants)]),
        )(*common, maps, futures, grad_h0, counters)
    remembered(
        _of_cell(programs),
        ("back_propagate", *key),
        lambda: Launches(
            grid, shape.warps, (*numbers, told.documents), [(kernels(programs).back_propagate, *constants, many)]
        ),
    )(*common, futures, grad_h0, grad_gates, grad_params, grad_h0 if grad_fresh is None else grad_fresh)
    return grad_gates, grad_params.sum(dim=1), grad_h0, grad_fresh
