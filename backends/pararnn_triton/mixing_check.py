"""One step of the mixing kernels beside the same step in array code, before a pass of theirs is first captured.

The joints of segments cannot tell a kernel that computes another recurrence, because every segment would agree on it;
and a compiler may go wrong for one card, tile or depth of a product alone. So each shape is checked once, on its own
buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import array_api_compat.torch as xp
import torch

from pararnn.arrays import quiet
from pararnn.graph import compile_array

if TYPE_CHECKING:
    from pararnn_triton.mixing_launch import Span

# Relative to the largest value; products of tf32 parts, where the user allows them, keep three digits.
ALLOWED, ALLOWED_TF32 = 1e-4, 2e-2
# Beyond this float32 overflows where float64 does not.
LARGE = 1e30


class KernelsDisagree(RuntimeError):
    """The generated kernels do not compute the cell's step on this card; the message says how far they are off."""


def check_step(span: Span) -> None:
    """Raises KernelsDisagree if a step of the span's kernel differs from the cell's step."""
    found, wanted = _backward(span) if span.leftward else _forward(span)
    allowed = ALLOWED_TF32 if span.precision == "tf32" else ALLOWED
    for mine, true in zip(found, wanted, strict=True):
        plain = torch.isfinite(true) & (true.abs() < LARGE)
        true = torch.where(plain, true, torch.zeros_like(true))
        apart = torch.where(plain, (mine.double() - true).abs(), torch.zeros_like(true))
        off = float((apart / true.abs().max().clamp(min=1e-6)).max())
        if not off <= allowed:
            raise KernelsDisagree(
                f"the generated {'adjoint' if span.leftward else 'step'} of {span.rows} rows is off by {off:.1e} on "
                f"{span.board.device} (tile {span.tile}); scan_backend='torch' runs without these kernels"
            )


def _random(like: torch.Tensor) -> torch.Tensor:
    maker = torch.Generator(device=like.device).manual_seed(0)
    return 0.1 + 0.8 * torch.rand(like.shape, generator=maker, device=like.device, dtype=like.dtype)


def _places(span: Span) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence and time of each row's first step."""
    row = torch.arange(span.rows, device=span.board.device)
    c = row % span.count
    if span.leftward:
        c = span.count - 1 - c
    return row // span.count, span.board.begin.long() + c * span.length


def _by_product(span: Span, joined: torch.Tensor) -> list[torch.Tensor]:
    """(H, N, K·D/H) as K arrays (N, D)."""
    parts = joined.reshape(span.board.heads, span.rows, span.board.count, span.inner)
    return [parts[:, :, k].transpose(0, 1).reshape(span.rows, -1) for k in range(span.board.count)]


def _forward(span: Span) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    board = span.board
    slots = _random(span.slots)
    span.slots.copy_(slots)
    span._forward(0, tangent=False, store=False, first=True)
    found = list(span.slots)
    wide = slots.double()
    left = wide[span.source].reshape(span.rows, board.heads, span.inner).transpose(0, 1)
    products = _by_product(span, torch.bmm(left, board.matrix.double().view(board.heads, span.inner, -1)))
    bias = board.bias.double().view(board.count, -1)
    sequence, time = _places(span)
    gates = board.gates[sequence, time].double().unbind(1)
    with quiet(xp):
        step = compile_array(board.programs.advance)
        wanted = step(xp, *wide, *gates, *(p + b for p, b in zip(products, bias, strict=True)))
    return found, [torch.as_tensor(w).broadcast_to(found[0].shape) for w in wanted]


def _backward(span: Span) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    board, more = span.board, span.board.backward
    cotangents, mixed = _random(span.slots), _random(span.mixed)
    span.slots.copy_(cotangents)
    span.mixed.copy_(mixed)
    span._back(0, tangent=False, store=False, first=False)
    found = [*span.slots, *_by_product(span, span.mixed)]
    moved = torch.bmm(mixed.double(), board.transposed.double()).transpose(0, 1).reshape(span.rows, -1)
    sequence, time = _places(span)
    wide = list(cotangents.double() + more["given"][sequence, time].double().transpose(0, 1))
    source = cast(int, span.source)
    wide[source] = wide[source] + moved
    past = board.states[sequence, (time - 1).clamp(min=0)].double().transpose(0, 1)
    before = torch.where((time == 0)[None, :, None], board.h0[:, sequence].double(), past)
    gates = board.gates[sequence, time].double().unbind(1)
    products = more["products"][sequence, time].double().unbind(1)
    part = board.programs.back[0]
    with quiet(xp):
        made = compile_array(part.program)(xp, *before, *gates, *products, *wide)
    known = dict(zip(part.outputs, made, strict=True))
    labels: list[tuple[str, Any]] = [("slot", k) for k in range(board.size)]
    labels += [("mixed", name.removeprefix("u_")) for name in board.programs.mixed_names]
    zero = torch.zeros_like(wide[0])
    return found, [torch.as_tensor(known.get(label, zero)) + zero for label in labels]
