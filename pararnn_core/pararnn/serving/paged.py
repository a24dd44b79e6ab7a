"""paged_apply: prompts and single tokens of many requests in one call, from pages and back to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pararnn.arrays import Array, cast
from pararnn.config import NewtonConfig
from pararnn.decode import decode_step
from pararnn.front import unwatched
from pararnn.newton import newton_apply
from pararnn.packing import checked_offsets, final_states
from pararnn.registry import decoder_of
from pararnn.sequential import sequential_apply
from pararnn.serving.pool import PagedStatePool
from pararnn.verify import passed_on

SOLVERS = ("newton", "sequential")


def paged_apply(
    pool: PagedStatePool,
    slot_ids: Sequence[int],
    x: Array,
    *,
    cu_seqlens: Any = None,
    solver: str = "newton",
    config: NewtonConfig | None = None,
) -> Array:
    """The hidden states of the next tokens of some requests; their pages then hold the states after them.

    Pieces of prompts, of any length and cut anywhere, and single tokens of running requests go together: a request is
    a document of the packed row. What a request gives does not depend on the others, and equals one run over all its
    tokens.

    Args:
        pool: where the states are; its model is what runs.
        slot_ids: a slot for each sequence of the batch, or each document.
        x: (B, T, I), or with `cu_seqlens` (1, total, I); a document may be empty, and then leaves its page alone.
        solver: 'newton' in parallel over time, or 'sequential'. Where every request brings one token, both step.
        config: for 'newton'.

    Returns:
        What the last layer passes on: (B, T, D) or (1, total, D). No gradient goes through it.

    Raises:
        KeyError, ValueError: slots that are not allocated, are stale, or come twice; a number of slots that is not
            that of the sequences. Nothing is written then.
        TypeError, ValueError: as newton_apply.

    >>> import numpy as np
    >>> from pararnn import ParaGRU, PagedStatePool
    >>> pool = PagedStatePool(ParaGRU(2, 3, seed=0), capacity=4)
    >>> a, b = pool.allocate(2)
    >>> x = np.ones((1, 5, 2), dtype=np.float32)
    >>> paged_apply(pool, [a, b], x, cu_seqlens=[0, 4, 5]).shape, pool.tokens(a), pool.tokens(b)
    ((1, 5, 3), 4, 1)
    """
    slots, counts = checked_call("paged_apply", pool, slot_ids, x, cu_seqlens, solver)
    with unwatched(x):
        y, ends = run_layers(pool, list(range(len(pool.states))), slots, x, cu_seqlens, solver, config, counts)
        write_back(pool, slots, ends)
    pool.advance(slots, counts)
    return y


def checked_call(
    what: str, pool: PagedStatePool, slot_ids: Sequence[int], x: Array, cu_seqlens: Any, solver: str
) -> tuple[list[int], list[int]]:
    """The slots, and how many tokens each gets."""
    if not isinstance(pool, PagedStatePool):
        raise TypeError(f"{what}: pool must be a PagedStatePool, got {type(pool).__name__}")
    if solver not in SOLVERS:
        raise ValueError(f"{what}: solver must be one of {SOLVERS}, got {solver!r}")
    if getattr(x, "ndim", None) != 3:
        raise ValueError(f"{what}: x must be (B, T, I), got {getattr(x, 'shape', type(x).__name__)}")
    slots = pool.checked(slot_ids)
    batch, time = int(x.shape[0]), int(x.shape[1])
    counts = [time] * batch
    if cu_seqlens is not None:
        offsets = checked_offsets(what, cu_seqlens, time).tolist()
        counts = [b - a for a, b in zip(offsets, offsets[1:], strict=False)]
    if len(slots) != len(counts):
        raise ValueError(f"{what}: {len(counts)} sequences came with {len(slots)} slots; give one for each")
    return slots, counts


def run_layers(
    pool: PagedStatePool,
    layers: list[int],
    slots: list[int],
    x: Array,
    cu_seqlens: Any,
    solver: str,
    config: NewtonConfig | None,
    counts: list[int],
) -> tuple[Array, list[tuple[int, Array | None]]]:
    """What some layers make of x, and the states to be written to their pages (None where that is done already)."""
    cells, y, ends = pool.cells, x, []
    for layer in layers:
        cell = cells[layer]
        states: Array
        if all(count == 1 for count in counts) and cell.family != "linear":
            y, end = _stepped(pool, layer, cell, slots, y, packed=cu_seqlens is not None)
        else:
            h0 = cast(pool.xp, pool.states[layer][slots, ...], y.dtype)
            if solver == "newton":
                states = newton_apply(cell, y, config, h0=h0, cu_seqlens=cu_seqlens)
            else:
                states = sequential_apply(cell, y, h0, cu_seqlens=cu_seqlens)
            end, y = final_states(states, cu_seqlens, h0=h0), passed_on(cell, states, y)
            # A request without a token keeps its page bit for bit.
            end = _kept(pool, layer, slots, counts, end)
        ends.append((layer, end))
    return y, ends


def _stepped(
    pool: PagedStatePool, layer: int, cell: Any, slots: list[int], y: Array, packed: bool
) -> tuple[Array, Array | None]:
    """One token for every request."""
    xp, states = pool.xp, pool.states[layer]
    row = y[0, ...] if packed else y[:, 0, :]
    if decoder_of(cell, states) is not None:
        # Its kernel reads and writes the pages where they are.
        new, end = decode_step(cell, states, row, block_table=slots), None
    else:
        new = end = decode_step(cell, states[slots, ...], row)
    out = cast(xp, new, y.dtype)
    out = out if cell.state_slots == 1 else out[:, cell.hidden_slot, ...]
    return (out[None, ...] if packed else out[:, None, ...]), end


def _kept(pool: PagedStatePool, layer: int, slots: list[int], counts: list[int], end: Array) -> Array:
    own = pool.states[layer]
    end = cast(pool.xp, end, own.dtype)
    if all(counts):
        return end
    for n, count in enumerate(counts):
        if not count:
            end[n, ...] = own[slots[n], ...]
    return end


def write_back(pool: PagedStatePool, slots: list[int], ends: list[tuple[int, Array | None]]) -> None:
    """Writes what run_layers has left to write, after all layers have run."""
    for layer, end in ends:
        if end is not None and slots:
            own = pool.states[layer]
            own[slots, ...] = cast(pool.xp, end, own.dtype)
