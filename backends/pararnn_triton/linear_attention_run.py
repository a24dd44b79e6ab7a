"""Launches of the linear-attention kernels, as a differentiable function of torch tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch.autograd.function import once_differentiable

from pararnn.linear_attention.frame import frame_of
from pararnn.linear_attention.inputs import Call
from pararnn.linear_attention.run import pull_back_rank_one
from pararnn.linear_attention.states import chunk_states
from pararnn_triton import linear_attention_kernels as kernels
from pararnn_triton.launch import Launches, remembered

# Steps in a chunk, how often it can be halved, and chunks that a scan takes at once.
CHUNK, LEVELS, ROWS = 64, 6, 32


_known: dict[Any, Launches] = {}


def start(
    kernel: Any, grid: int, warps: int, tensors: tuple[Any, ...], numbers: tuple[Any, ...], *constants: Any
) -> None:
    """Launches a kernel, past Triton's own argument handling once a call of this layout was compiled."""
    kinds = tuple((x.dtype, x.data_ptr() % 16 == 0) for x in tensors)
    key = (kernel, grid, warps, numbers, constants, kinds, tensors[0].device)
    remembered(_known, key, lambda: Launches(grid, warps, numbers, [(kernel, *constants)]))(*tensors)


@dataclass(frozen=True)
class Sizes:
    """A launch's numbers and compile-time choices."""

    batch: int
    time: int
    heads: int
    keys: int
    values: int
    channels: int
    scale: float
    exclusive: bool
    bonus: bool
    precision: str

    @property
    def chunks(self) -> int:
        return -(-self.time // CHUNK)

    @property
    def grid(self) -> int:
        return self.batch * self.heads * self.chunks

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.time, self.chunks, self.heads, self.keys, self.values, self.channels

    @property
    def whole(self) -> tuple[Any, ...]:
        """The numbers and constants of a kernel that goes through all levels of a chunk."""
        numbers = (self.scale, *self.numbers)
        return numbers, self.exclusive, self.bonus, self.shared, self.precision, LEVELS, *self.tiles

    @property
    def shared(self) -> bool:
        """Whether one decay serves several channels."""
        return self.channels == 1 and self.keys != 1

    @property
    def tiles(self) -> tuple[int, int, int]:
        """C, BK, BV."""
        keys, values = (max(16, triton.next_power_of_2(n)) for n in (self.keys, self.values))
        return CHUNK, keys, min(values, 64)

    def empty_states(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.batch * self.heads, self.chunks, self.keys, self.values)
        return torch.empty(shape, dtype=torch.float32, device=like.device)


def products(sizes: Sizes, x: Any, y: Any, g: Any, shifts: Any, wholes: Any, from_start: bool) -> None:
    start(
        kernels.chunk_products,
        sizes.grid,
        4,
        (x, y, g, shifts, wholes),
        sizes.numbers,
        from_start,
        sizes.exclusive,
        sizes.shared,
        sizes.precision,
        *sizes.tiles,
    )


def scan(sizes: Sizes, shifts: Any, wholes: Any, initial: Any, reverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The states before all chunks, and the last."""
    befores, final = torch.empty_like(shifts), torch.empty_like(initial)
    block = 32
    blocks = -(-sizes.keys * sizes.values // block)
    numbers = (sizes.chunks, sizes.keys, sizes.values, blocks)
    start(
        kernels.scan_chunks,
        sizes.batch * sizes.heads * blocks,
        4,
        (shifts, wholes, initial, befores, final),
        numbers,
        reverse,
        ROWS,
        block,
    )
    return befores, final


class DiagonalRecurrence(torch.autograd.Function):
    """(sizes, q, k, v, g, u, initial) to (o, final state); u is g where there is no bonus."""

    @staticmethod
    def forward(ctx: Any, sizes: Sizes, q: Any, k: Any, v: Any, g: Any, u: Any, initial: Any) -> Any:
        q, k, v, g, u, initial = (x.contiguous() for x in (q, k, v, g, u, initial))
        out = torch.empty_like(v)
        shifts = sizes.empty_states(q)
        wholes = torch.empty(shifts.shape[:-1], dtype=torch.float32, device=q.device)
        products(sizes, k, v, g, shifts, wholes, False)
        befores, final = scan(sizes, shifts, wholes, initial, False)
        start(
            kernels.outputs,
            sizes.grid,
            4,
            (q, k, v, g, u, befores, out),
            *sizes.whole,
        )
        ctx.sizes = sizes
        ctx.save_for_backward(q, k, v, g, u, befores, wholes)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Any, last: Any) -> Any:
        q, k, v, g, u, befores, wholes = ctx.saved_tensors
        sizes = ctx.sizes
        given, last = given.contiguous(), last.contiguous()
        shifts = sizes.empty_states(q)
        products(sizes, q, given, g, shifts, wholes, True)
        if sizes.scale != 1.0:
            shifts *= sizes.scale
        afters, of_initial = scan(sizes, shifts, wholes, last, True)
        of_q, of_k, of_v, of_g = (torch.empty_like(x) for x in (q, k, v, g))
        of_u = torch.empty_like(wholes) if sizes.bonus else wholes
        tensors = (q, k, v, g, u, befores, afters, wholes, given, of_q, of_k, of_v, of_g, of_u)
        start(
            kernels.gradients,
            sizes.grid,
            8,
            tensors,
            *sizes.whole,
        )
        of_bonus = None
        if sizes.bonus:
            by_head = of_u.reshape(sizes.batch, sizes.heads, sizes.chunks, sizes.keys)
            of_bonus = by_head.sum(dim=(0, 2)).to(u.dtype)
        return None, of_q, of_k, of_v, of_g, of_bonus, of_initial


def diagonal_recurrence(call: Call, *, exclusive: bool, bonus: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final state; float32 operands are multiplied in three tf32 products, half ones in one."""
    q, k, v, g = call.arrays.values()
    batch, time, heads, keys = k.shape
    exact = any(x.dtype == torch.float32 for x in (q, k, v))
    sizes = Sizes(
        batch, time, heads, keys, v.shape[-1], g.shape[-1], call.scale, exclusive, bonus is not None,
        "tf32x3" if exact else "tf32",
    )  # fmt: skip
    return DiagonalRecurrence.apply(sizes, q, k, v, g, g if bonus is None else bonus, call.initial)


class RankOneRecurrence(torch.autograd.Function):
    """(call, r, w, k, v, a, b, initial) to (o, final state): a kernel forward, the hand-written adjoint back."""

    @staticmethod
    def forward(ctx: Any, call: Call, *arrays: Any) -> Any:
        ctx.call = call
        ctx.save_for_backward(*arrays)
        *operands, initial = (x.contiguous() for x in arrays)
        r, _, k, v, a, b = operands
        batch, time, heads, keys = k.shape
        values, chunks = v.shape[-1], -(-time // CHUNK)
        exact = any(x.dtype == torch.float32 for x in (r, k, v, a, b))
        kind: dict[str, Any] = {"dtype": torch.float32, "device": r.device}
        front = (batch, heads, chunks)
        maps, shifts = torch.empty((*front, keys, keys), **kind), torch.empty((*front, keys, values), **kind)
        reads, parts = torch.empty((*front, CHUNK, keys), **kind), torch.empty((*front, CHUNK, values), **kind)
        wide, high = (max(16, triton.next_power_of_2(n)) for n in (keys, values))
        tensors = (*operands, maps, shifts, reads, parts)
        start(
            kernels.rank_one_chunks,
            batch * heads * chunks,
            8,
            tensors,
            (call.scale, time, chunks, heads, keys, values),
            "tf32x3" if exact else "tf32",
            LEVELS,
            CHUNK,
            wide,
            min(high, 64),
        )
        frame = frame_of(time, CHUNK, None)
        starts, final = chunk_states(call.xp, maps, shifts, initial, frame)
        whole = (parts + reads @ starts).permute(0, 2, 3, 1, 4).reshape(batch, chunks * CHUNK, heads, values)
        return whole[:, :time].to(v.dtype), final.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Any, last: Any) -> Any:
        *arrays, initial = ctx.saved_tensors
        call = replace(ctx.call, arrays=dict(zip(ctx.call.arrays, arrays, strict=True)), initial=initial)
        *grads, of_initial = pull_back_rank_one(call, given.float(), last)
        return None, *grads, of_initial


def rank_one_recurrence(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final state."""
    # The recipe keeps no tensor alive; what backward needs is saved by autograd.
    recipe = replace(call, arrays=dict.fromkeys(call.arrays), initial=None)
    return RankOneRecurrence.apply(recipe, *call.arrays.values(), call.initial)
