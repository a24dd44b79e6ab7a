"""The launches of a solve and of its gradient, on the arrays of any library whose memory kernels can reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pararnn.arrays import Array
from pararnn.programs import StepPrograms
from pararnn_cupy.layout import Layout


class Card(Protocol):
    """Memory and launches for the arrays of one call, while it is entered: their library, device and stream."""

    def __enter__(self) -> Card: ...

    def __exit__(self, *error: object) -> None: ...

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Fresh memory."""

    def address(self, array: Array | None) -> int:
        """Where an array's memory begins; 0 for None."""

    def launch(self, kernel: str, threads: int, block: int, arguments: Sequence[int | float]) -> None:
        """Puts a kernel of this call's cell in the stream. All its parameters are 8 bytes wide."""


class Told(NamedTuple):
    """What steps are told besides their inputs, where the programs ask for it.

    Heads (B, T) in int32; the starts that they load, (N, S, D) in the work dtype, of which the first `documents` want a
    gradient, with the memory for it; padding (B, T), one byte each.
    """

    head: Array | None = None
    starts: Array | None = None
    hold: Array | None = None
    documents: int = 0
    grad_starts: Array | None = None


NOTHING = Told()


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
    told: Told = NOTHING,
) -> tuple[Array, Array, Array]:
    """The states, the estimated errors, and how many segments were walked.

    Args:
        gates: (B, T, G, D), contiguous, in `dtype`. bias: (G·D,). h0: (B, S, D). params: (P, D). guess: states
            (B, T, S, D) to start segments from, instead of a warm-up. All but the gates are in the work dtype, which
            is float32 for half precision.

    Returns:
        states (B, T, S, D) in `dtype`; by channel (B, D) the error relative to scale, zero where exact;
        (2, B, D) how many segments were walked, and passes with tangents made.
    """
    batch, time, _, width = gates.shape
    size, entries, segments = programs.size, len(programs.m.flat), layout.segments
    work = work_name(dtype)
    states = card.empty((batch, time, size, width), dtype)
    estimate = card.empty((batch, width), work)
    counts = card.empty((4, batch, width), "int32")
    given = tuple(map(card.address, (gates, bias, h0, params, *told[:3])))
    written, errors = card.address(states), card.address(estimate)
    walked, rounds, opened, counters = (card.address(counts) + 4 * k * batch * width for k in range(4))
    if segments == 1:
        card.launch(
            "time_loop", batch * width, layout.block, (*given, written, errors, walked, rounds, batch, time, width)
        )
        return states, estimate, counts[:2, ...]
    # One allocation for everything that the segments exchange.
    lengths = (size, size, size, size, entries, entries)
    exchange = card.empty((sum(lengths), batch, segments, width), work)
    step = batch * segments * width * (8 if work == "float64" else 4)
    starts, ends, new_ends, sizes, prods, grows = (
        card.address(exchange) + step * sum(lengths[:k]) for k in range(len(lengths))
    )
    stale_flags = card.empty((batch, segments, width), "uint8")
    stale = card.address(stale_flags)
    threads = batch * segments * width
    shape = (batch, time, width, layout.length, segments)
    card.launch(
        "plain_pass", threads, layout.block,
        (*given, card.address(guess), written, starts, ends, opened, counters, errors, walked, rounds, *shape,
         layout.warmup),
    )  # fmt: skip
    inputs = (*given[:2], *given[3:])
    card.launch("rerun_pass", threads, layout.block, (*inputs, written, starts, ends, new_ends, opened, *shape))
    for k in range(2, layout.passes):
        card.launch(
            "tangent_pass", threads, layout.block,
            (*inputs, written, starts, ends, new_ends, prods, grows, sizes, stale, opened, counters, errors, walked,
             rounds, *shape, int(k == 2), int(k == layout.passes - 1), float(tol), float(accept)),
        )  # fmt: skip
    return states, estimate, counts[:2, ...]


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
    told: Told = NOTHING,
) -> tuple[Array, Array, Array]:
    """Cotangents of the gate inputs in their place, of the params and the bias by segment, and of h0.

    Args:
        gates, bias, h0, params: as in run_forward; the cotangents of the gates overwrite them.
        states, cotangent: (B, T, S, D), contiguous, in `dtype`.

    Returns:
        (B, T, G, D) in `dtype`; (P + G, B·C, D) and (B, S, D) in the work dtype.
    """
    batch, time, count, width = gates.shape
    size, segments, work = programs.size, layout.segments, work_name(dtype)
    threads = batch * segments * width
    shape = (batch, time, width, layout.length, segments)
    given = tuple(map(card.address, (gates, bias, h0, params, *told[:3], states, cotangent)))
    grad_h0 = card.empty((batch, size, width), work)
    sums = card.empty((len(programs.params) + count, batch * segments, width), work)
    out = tuple(map(card.address, (grad_h0, gates, sums, told.grad_starts)))
    futures = 0
    if segments > 1:
        entries, shift = len(programs.n.flat), size + len(programs.cut_names)
        exchange = card.empty((entries + shift + size, batch, segments, width), work)
        step = threads * (8 if work == "float64" else 4)
        maps = card.address(exchange)
        offsets, futures = maps + step * entries, maps + step * (entries + shift)
        card.launch("adjoint_maps", threads, layout.block, (*given, maps, offsets, *shape))
        card.launch("join_maps", batch * width, 32, (maps, offsets, futures, out[0], batch, width, segments))
    card.launch("back_propagate", threads, layout.block, (*given, futures, *out, *shape, told.documents))
    return gates, sums, grad_h0


def work_name(dtype: str) -> str:
    """The dtype of the arithmetic for arrays of `dtype`."""
    return "float64" if dtype == "float64" else "float32"
