"""One step in one kernel: the projection where the batch is small, the cell's step, and the pool of states in place."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton

from pararnn.cells.base import ChannelwiseCell
from pararnn.programs import StepPrograms, programs_of
from pararnn_triton.launch import OPTIONS, module_from
from pararnn_triton.print_triton import indent, statements

# Up to so many rows every program reads its rows of W_x again from the cache; beyond, a matrix product is faster.
PROJECT_ROWS = 4
# Channels of a program with and without the projection, and features read at a time.
PROJECT_BLOCK, STEP_BLOCK, FEATURES = 4, 128, 512


def decode(
    cell: ChannelwiseCell,
    state: torch.Tensor,
    given: torch.Tensor,
    projected: bool,
    out: torch.Tensor | None,
    table: torch.Tensor | None,
) -> torch.Tensor:
    """The new state (B, …); see pararnn.decode_step. Allocates nothing where `out` is given and the input projected."""
    batch, width = given.shape[0], cell.d_h
    project = not projected and batch <= PROJECT_ROWS
    if not projected and not project:
        given = torch.nn.functional.linear(given, *cell.W_x)
    given = given if given.stride(-1) == 1 else given.contiguous()
    if state.stride()[1:] != state.new_empty((0, *state.shape[1:])).stride()[1:]:
        if table is not None:
            raise ValueError("decode_step: each state of a pool must be contiguous; the pool itself need not")
        state = state.contiguous()
    new = torch.empty((batch, *cell.state_shape), dtype=state.dtype, device=state.device) if out is None else out
    weight, bias = cell.W_x
    weight = weight.contiguous() if project else given
    cap = cell.max_recurrent_norm
    params = [getattr(cell, name).contiguous() for name in cell.params]
    block = min(PROJECT_BLOCK if project else STEP_BLOCK, triton.next_power_of_2(width))
    features = min(FEATURES, triton.next_power_of_2(cell.d_in)) if project else 1
    kernel = _kernel(programs_of(cell))
    grid = (batch * triton.cdiv(width, block),)
    with torch.cuda.device(state.device) if state.is_cuda else contextlib.nullcontext():
        kernel[grid](
            state, new, given, weight, bias if project else given, given if table is None else table, *params,
            width, cell.d_in, state.stride(0), given.stride(0), 0.0 if cap is None else float(cap),
            block, features, project, table is not None, cap is not None, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return new


def _kernel(programs: StepPrograms) -> Any:
    """The kernel of one cell, made on first use."""
    if "triton decode" not in programs.compiled:
        programs.compiled["triton decode"] = module_from(decode_source(programs)).decode_step
    return programs.compiled["triton decode"]


def decode_source(programs: StepPrograms) -> str:
    """Triton source of a cell's step."""
    size, gates, prev = programs.size, programs.gate_names, programs.prev_names
    names = [f"{p}_ptr" for p in programs.param_names]
    lines = [
        "blocks = tl.cdiv(D, BD)",
        "pid = tl.program_id(0)",
        "b = (pid // blocks).to(tl.int64)",
        "lane = (pid % blocks) * BD + tl.arange(0, BD)",
        "mask = lane < D",
        "live = mask",
        "row = b",
        "if TABLE:",
        "    row = tl.load(table + b).to(tl.int64)",
        # A row without a request reads nobody's state and writes none.
        "    live = mask & (row >= 0)",
    ]
    for name, pointer in zip(programs.param_names, names, strict=True):
        lines.append(f"{name} = tl.load({pointer} + lane, mask=mask, other=0.0).to(tl.float32)")
        lines += [
            "if CAPPED:",
            f"    {name} = tl.where({name} > cap, cap, {name})",
            f"    {name} = tl.where({name} < -cap, -cap, {name})",
        ]
    wide = "tl.arange(0, BI)"
    project = [f"sum_{g} = tl.zeros([BD, BI], tl.float32)" for g in gates]
    project.append("for first in range(0, I, BI):")
    inner = [
        f"feature = first + {wide}",
        "read = feature < I",
        "value = tl.load(given + b * given_stride + feature, mask=read, other=0.0).to(tl.float32)[None, :]",
        "both = mask[:, None] & read[None, :]",
    ]
    for k, g in enumerate(gates):
        inner.append(f"place = ({k} * D + lane).to(tl.int64)[:, None] * I + feature[None, :]")
        inner.append(f"sum_{g} += tl.load(weight + place, mask=both, other=0.0).to(tl.float32) * value")
    project += indent(inner)
    project += [
        f"{g} = tl.sum(sum_{g}, axis=1) + tl.load(bias + {k} * D + lane, mask=mask, other=0.0).to(tl.float32)"
        for k, g in enumerate(gates)
    ]
    read = [
        f"{g} = tl.load(given + b * given_stride + {k} * D + lane, mask=mask, other=0.0).to(tl.float32)"
        for k, g in enumerate(gates)
    ]
    lines += ["if PROJECT:", *indent(project), "else:", *indent(read)]
    lines += [
        f"{p} = tl.load(state + row * state_stride + {k} * D + lane, mask=live, other=0.0).to(tl.float32)"
        for k, p in enumerate(prev)
    ]
    lines += statements(programs.advance.program, prev)
    lines.append("if TABLE:")
    lines += [f"    tl.store(state + row * state_stride + {k} * D + lane, {p}, mask=live)" for k, p in enumerate(prev)]
    lines += [f"tl.store(new + (b * {size} + {k}) * D + lane, {p}, mask=mask)" for k, p in enumerate(prev)]
    pointers = ", ".join(["state, new, given, weight, bias, table", *names])
    head = (
        "@triton.jit\n"
        f"def decode_step({pointers}, D, I, state_stride, given_stride, cap,\n"
        "                BD: tl.constexpr, BI: tl.constexpr, PROJECT: tl.constexpr, TABLE: tl.constexpr,\n"
        "                CAPPED: tl.constexpr):\n"
    )
    return head + "\n".join(indent(lines)) + "\n"
