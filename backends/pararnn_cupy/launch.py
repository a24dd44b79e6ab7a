"""The launches of a solve and of its gradient, on the arrays of any library whose memory kernels can reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pararnn.arrays import Array
from pararnn.programs import StepPrograms
from pararnn_cupy.layout import Layout

Argument = Array | int | float | None


class Card(Protocol):
    """Memory and launches for the arrays of one call: their library, device and stream."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Fresh memory."""

    def launch(self, kernel: str, threads: int, block: int, arguments: Sequence[Argument]) -> None:
        """Puts a kernel of this call's cell in the stream; arrays are passed as addresses, None as no address."""


def run_forward(
    card: Card,
    programs: StepPrograms,
    dtype: str,
    gates: Array,
    bias: Array | None,
    h0: Array | None,
    params: Array,
    guess: Array | None,
    layout: Layout,
    tol: float,
    accept: float,
) -> tuple[Array, Array, Array]:
    """The states, the estimated errors, and how many segments were walked.

    Args:
        gates: (B, T, G, D), contiguous, in `dtype`. bias: (G·D,). h0: (B, S, D). params: (P, D). guess: states
            (B, T, S, D) to start segments from, instead of a warm-up. All but the gates are in the work dtype, which
            is float32 for half precision.

    Returns:
        states (B, T, S, D) in `dtype`; by channel (B, D) the error relative to scale, zero where exact, and a count.
    """
    batch, time, _, width = gates.shape
    size, entries, segments = programs.size, len(programs.m.flat), layout.segments
    work = work_name(dtype)
    states = card.empty((batch, time, size, width), dtype)
    estimate = card.empty((batch, width), work)
    walked = card.empty((batch, width), "int32")
    given = (gates, bias, h0, params)
    if segments == 1:
        card.launch("time_loop", batch * width, layout.block, (*given, states, estimate, walked, batch, time, width))
        return states, estimate, walked

    def joints(count: int) -> Array:
        return card.empty((count, batch, segments, width), work)

    starts, ends, new_ends, sizes = (joints(size) for _ in range(4))
    prods, grows = joints(entries), joints(entries)
    stale = card.empty((batch, segments, width), "uint8")
    opened, counters = (card.empty((batch, width), "int32") for _ in range(2))
    threads = batch * segments * width
    shape = (batch, time, width, layout.length, segments)
    card.launch(
        "plain_pass", threads, layout.block,
        (*given, guess, states, starts, ends, opened, counters, estimate, walked, *shape, layout.warmup),
    )  # fmt: skip
    inputs = (gates, bias, params)
    card.launch("rerun_pass", threads, layout.block, (*inputs, states, starts, ends, new_ends, opened, *shape))
    for k in range(2, layout.passes):
        card.launch(
            "tangent_pass", threads, layout.block,
            (*inputs, states, starts, ends, new_ends, prods, grows, sizes, stale, opened, counters, estimate, walked,
             *shape, int(k == 2), int(k == layout.passes - 1), tol, accept),
        )  # fmt: skip
    return states, estimate, walked


def run_backward(
    card: Card,
    programs: StepPrograms,
    dtype: str,
    gates: Array,
    bias: Array | None,
    h0: Array | None,
    params: Array,
    states: Array,
    cotangent: Array,
    layout: Layout,
) -> tuple[Array, Array, Array]:
    """Cotangents of the gate inputs, of the params and the bias by segment, and of h0.

    Args:
        gates, bias, h0, params: as in run_forward. states, cotangent: (B, T, S, D), contiguous, in `dtype`.

    Returns:
        (B, T, G, D) in `dtype`; (P + G, B·C, D) and (B, S, D) in the work dtype.
    """
    batch, time, count, width = gates.shape
    size, segments, work = programs.size, layout.segments, work_name(dtype)
    threads = batch * segments * width
    shape = (batch, time, width, layout.length, segments)
    given = (gates, bias, h0, params, states, cotangent)
    grad_gates = card.empty(tuple(gates.shape), dtype)
    grad_h0 = card.empty((batch, size, width), work)
    sums = card.empty((len(programs.params) + count, batch * segments, width), work)
    futures = None
    if segments > 1:
        maps = card.empty((len(programs.n.flat), batch, segments, width), work)
        offsets, futures = (card.empty((size, batch, segments, width), work) for _ in range(2))
        card.launch("adjoint_maps", threads, layout.block, (*given, maps, offsets, *shape))
        card.launch("join_maps", batch * width, 32, (maps, offsets, futures, grad_h0, batch, width, segments))
    card.launch("back_propagate", threads, layout.block, (*given, futures, grad_h0, grad_gates, sums, *shape))
    return grad_gates, sums, grad_h0


def work_name(dtype: str) -> str:
    """The dtype of the arithmetic for arrays of `dtype`."""
    return "float64" if dtype == "float64" else "float32"


def addresses(arguments: Sequence[Argument], pointer: Any) -> tuple[int | float, ...]:
    """What a kernel is given for `arguments`."""
    plain = (int, float)
    return tuple(a if isinstance(a, plain) else 0 if a is None else pointer(a) for a in arguments)
