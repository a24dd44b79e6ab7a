"""Laws of a recurrence: it can be split and carried, looks only back, and its sequences and channels are strangers."""

from __future__ import annotations

from typing import Any

import numpy as np

from pararnn import default_agreement_atol, sequential_apply
from pararnn_conformance.case import CELLS, Case, cotangent, loop_states, numbers
from pararnn_conformance.expect import expect, expect_agreement, expect_near, expect_same_bits
from pararnn_conformance.registration import check
from pararnn_conformance.target import Target

ATOL = default_agreement_atol(np.float32)
SPLITS = {"4x64": [64] * 4, "1+255": [1, 255], "63+65+128": [63, 65, 128], "256x1": [1] * 256}
FEW = {"cell": ("Echo",)}


@check("P51 O13 O15", cell=CELLS, split=tuple(SPLITS), few={"cell": ("Echo",), "split": ("63+65+128",)})
def split(target: Target, cell: str, split: str) -> None:
    """Pieces with the state carried from one to the next equal one call."""
    case = Case(cell, time=256)
    given = target.give(case)
    state, rows, begin = given.h0, [], 0
    for length in SPLITS[split]:
        piece = target.apply(given.cell, given.x[:, begin : begin + length, ...], state)
        state = target.array(piece[:, -1].astype(np.float64), case.dtype)
        rows.append(piece)
        begin += length
    expect_agreement(numbers(case).cell, np.concatenate(rows, axis=1), loop_states(case), ATOL)


@check("O13 O24", cell=CELLS, split=("4x64", "1+255", "63+65+128"), few={"cell": ("Echo",), "split": ("63+65+128",)})
def split_gradients(target: Target, cell: str, split: str) -> None:
    """Gradients of pieces, carried from right to left through h0, equal those of one call."""
    case = Case(cell, time=256)
    given = target.give(case)
    _, pullback = target.vjp(given.cell, given.x, given.h0)
    whole = target.gradients(pullback(target.array(cotangent(case), case.dtype)))
    state, pulls, begin = given.h0, [], 0
    for length in SPLITS[split]:
        states, pull = target.vjp(given.cell, given.x[:, begin : begin + length, ...], state)
        state = states[:, -1, ...]
        pulls.append((begin, begin + length, pull))
        begin += length
    carried: Any = None
    pieces: list[np.ndarray] = []
    sums: dict[str, np.ndarray] = {}
    for first, stop, pull in reversed(pulls):
        found = pull(target.array(cotangent(case)[:, first:stop], case.dtype), last=carried)
        carried = found.h0
        here = target.gradients(found)
        pieces.insert(0, here["x"])
        for name in numbers(case).cell.arrays:
            sums[name] = sums.get(name, np.zeros(())) + here[name].astype(np.float64)
    joined = {"x": np.concatenate(pieces, axis=1), "h0": target.host(carried), **sums}
    for name, value in joined.items():
        expect_near(value, whole[name].astype(np.float64), 1e-4, name)


@check("O13 O17", cell=CELLS, chunk=(1, 16, 100), segment=(None, 8),
       few={"cell": ("Echo",), "chunk": (16,), "segment": (8,)})  # fmt: skip
def windows(target: Target, cell: str, chunk: int, segment: int | None) -> None:
    """Windows of chunk_len steps hand the state on, in a network that remembers."""
    case = Case(cell, time=120, regime="long")
    mine = target.run(case, chunk_len=chunk, segment_len=segment)
    expect_agreement(numbers(case).cell, mine, loop_states(case), ATOL)


@check("O36", cell=CELLS, shift=(1, 37), few=FEW)
def shift(target: Target, cell: str, shift: int) -> None:
    """Time has no origin: the tail alone, from the state before it, gives the tail of the whole."""
    case = Case(cell, time=100)
    given = target.give(case)
    whole = target.apply(given.cell, given.x, given.h0, segment_len=16)
    state = target.array(whole[:, shift - 1].astype(np.float64), case.dtype)
    tail = target.apply(given.cell, given.x[:, shift:, ...], state, segment_len=16)
    expect_agreement(numbers(case).cell, tail, whole[:, shift:], ATOL)


@check("O28", cell=CELLS, segment=(None, 4), few={"cell": ("Echo",), "segment": (4,)})
def causal(target: Target, cell: str, segment: int | None) -> None:
    """States before a changed step do not move; a cotangent at one step reaches no later input."""
    case = Case(cell, time=100)
    host, x, _ = numbers(case)
    given = target.give(case)
    changed = x.copy()
    changed[:, 60:] += 5.0
    first = target.apply(given.cell, given.x, given.h0, segment_len=segment)
    other = target.apply(given.cell, target.array(changed, case.dtype), given.h0, segment_len=segment)
    expect_agreement(host, other[:, :60], first[:, :60], ATOL)
    expect(np.any(other[:, 60] != first[:, 60]), "a changed input changed nothing")
    seed = np.zeros_like(cotangent(case))
    seed[:, 59] = 1.0
    _, pullback = target.vjp(given.cell, given.x, given.h0, segment_len=segment)
    found = target.gradients(pullback(target.array(seed, case.dtype)))["x"]
    expect(not np.any(found[:, 60:]) and np.any(found[:, 59]), "the gradient looks into the future")


@check("O08 O41", cell=CELLS, segment=(None, 4), value=(np.nan, np.inf, -np.inf),
       few={"cell": ("Echo",), "segment": (4,)})  # fmt: skip
def not_finite(target: Target, cell: str, segment: int | None, value: float) -> None:
    """NaN or inf at a step: before it the states are right, from it on they are what the time loop gives."""
    case = Case(cell, time=100)
    host, x, h0 = numbers(case)
    poisoned = x.copy()
    poisoned[0, 55, 0] = value
    given = target.give(case)
    mine = target.apply(given.cell, target.array(poisoned, case.dtype), given.h0, segment_len=segment)
    assert h0 is not None
    true = sequential_apply(host.to(dtype=np.float32), poisoned.astype(np.float32), h0.astype(np.float32))
    expect(np.all(np.isfinite(mine[:, :55])), "states before the poisoned step are not finite")
    if np.isnan(value):
        expect(np.all(np.isnan(true[0, 55])) and np.all(np.isnan(mine[0, 55])), "NaN was swallowed")
    expect_agreement(host, mine, true, ATOL)


@check("O34 O41", cell=CELLS, segment=(None, 4, 16), few={"cell": ("Echo",), "segment": (4,)})
def poisoned_neighbour(target: Target, cell: str, segment: int | None) -> None:
    """A NaN sequence leaves the others of its batch unchanged, bit for bit, in states and gradients."""
    case = Case(cell, time=100, batch=3)
    _, x, _ = numbers(case)
    given = target.give(case)
    poisoned = x.copy()
    poisoned[1, 40] = np.nan
    results = []
    for values in (x, poisoned):
        states, pullback = target.vjp(given.cell, target.array(values, case.dtype), given.h0, segment_len=segment)
        found = target.gradients(pullback(target.array(cotangent(case), case.dtype)))
        results.append((target.host(states), found["x"], found["h0"]))
    for what, clean, dirty in zip(("states", "gradient of x", "gradient of h0"), *results, strict=True):
        expect_same_bits(dirty[[0, 2]], clean[[0, 2]], f"{what} of the other sequences")


@check("O41", cell=CELLS, segment=(None, 4, 16), few={"cell": ("Echo",), "segment": (4,)})
def poisoned_channel(target: Target, cell: str, segment: int | None) -> None:
    """A NaN weight in one channel leaves the other channels unchanged, bit for bit."""
    case = Case(cell, time=100)
    host = numbers(case).cell
    given = target.give(case)
    broken = dict(host.arrays)
    name = next(n for n in broken if not n.startswith("W_x."))
    broken[name] = broken[name].copy()
    broken[name][..., 2] = np.nan
    clean = target.apply(given.cell, given.x, given.h0, segment_len=segment)
    mine = target.apply(target.cell(host.replace(**broken), case.dtype), given.x, given.h0, segment_len=segment)
    others = [0, 1, 3, 4]
    expect(np.any(np.isnan(mine[..., 2])), "a NaN weight was swallowed")
    expect_same_bits(mine[..., others], clean[..., others], "the other channels")


@check("O34", cell=CELLS, few=FEW)
def alone(target: Target, cell: str) -> None:
    """A sequence gives the same alone, in a batch, and at another place of the batch."""
    case = Case(cell, batch=3)
    host, x, h0 = numbers(case)
    assert h0 is not None
    given = target.give(case)
    together = target.apply(given.cell, given.x, given.h0)
    order = [2, 0, 1]
    turned = target.apply(given.cell, target.array(x[order], case.dtype), target.array(h0[order], case.dtype))
    single = target.apply(given.cell, target.array(x[1:2], case.dtype), target.array(h0[1:2], case.dtype))
    expect_agreement(host, turned, together[order], ATOL, "another order")
    expect_agreement(host, single, together[1:2], ATOL, "alone")
