"""Arrays of any layout give the same result, and are only read; nothing outside them is read either."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from pararnn import default_agreement_atol, sequential_apply
from pararnn_conformance.case import CELLS, Case, cotangent, loop_states, numbers, wide_gradients
from pararnn_conformance.expect import Refused, expect, expect_agreement, expect_near, expect_same_bits
from pararnn_conformance.registration import check
from pararnn_conformance.target import Target

ATOL = default_agreement_atol(np.float32)


def _strided(target: Target, values: np.ndarray, dtype: str) -> Any:
    """Every second element of a larger array whose other elements are NaN."""
    big = np.full([2 * n for n in values.shape], np.nan)
    part = (slice(None, None, 2),) * values.ndim
    big[part] = values
    return target.array(big, dtype)[part]


def _surrounded(target: Target, values: np.ndarray, dtype: str) -> Any:
    """A block inside a larger array of NaN: whoever reads past an edge finds NaN."""
    big = np.full([n + 6 for n in values.shape], np.nan)
    part = tuple(slice(3, 3 + n) for n in values.shape)
    big[part] = values
    return target.array(big, dtype)[part]


def _backward(target: Target, values: np.ndarray, dtype: str) -> Any:
    """Negative strides, or a flipped copy where the library has no such view."""
    part = (slice(None, None, -1),) * values.ndim
    made = target.array(values[part], dtype)
    try:
        return made[part]
    except ValueError:
        return target.xp.flip(made)


def _fortran(target: Target, values: np.ndarray, dtype: str) -> Any:
    """The first axis is the fastest in memory."""
    axes = tuple(range(values.ndim))[::-1]
    return target.xp.permute_dims(target.array(np.transpose(values), dtype), axes)


def _read_only(target: Target, values: np.ndarray, dtype: str) -> Any:
    """Writing raises, where the library knows such arrays."""
    made = target.array(values, dtype)
    with contextlib.suppress(AttributeError):
        made.flags.writeable = False
    return made


def _unaligned(target: Target, values: np.ndarray, dtype: str) -> Any:
    """Starts one element into its buffer, so not at an address that wide loads like."""
    flat = target.array(np.concatenate([[np.nan], values.ravel()]), dtype)
    return target.xp.reshape(flat[1:], values.shape)


LAYOUTS: dict[str, Callable[[Target, np.ndarray, str], Any]] = {
    "strided": _strided,
    "surrounded": _surrounded,
    "backward": _backward,
    "fortran": _fortran,
    "read-only": _read_only,
    "unaligned": _unaligned,
}


@check("P42 O49 O53 O55", cell=CELLS, layout=tuple(LAYOUTS), segment=(None, 4),
       few={"cell": ("Echo",), "layout": ("strided", "surrounded", "fortran"), "segment": (4,)})  # fmt: skip
def layouts(target: Target, cell: str, layout: str, segment: int | None) -> None:
    """x, h0, every weight and the cotangent in this layout: same states, same gradients, inputs untouched."""
    case = Case(cell)
    host, x, h0 = numbers(case)
    assert h0 is not None
    plain = {"x": x, "h0": h0, "cotangent": cotangent(case), **host.arrays}
    laid = {name: LAYOUTS[layout](target, values, case.dtype) for name, values in plain.items()}
    arrays = {name: laid[name] for name in host.arrays}
    mine = target.give(case).cell.replace(**arrays)
    states, pullback = target.vjp(mine, laid["x"], laid["h0"], segment_len=segment)
    expect_agreement(host, target.host(states), loop_states(case), ATOL, "states")
    found = target.gradients(pullback(laid["cotangent"]))
    for name, true in wide_gradients(case).items():
        expect_near(found[name], true, 2e-4, f"gradient of {name}")
    for name, values in plain.items():
        expect_same_bits(target.host(laid[name]).astype(np.float64), values, f"{name} after the call")


@check("O27 P42", cell=CELLS, few={"cell": ("Echo",)})
def one_row_for_all(target: Target, cell: str) -> None:
    """A batch made by broadcasting one sequence, which occupies the memory of one."""
    case = Case(cell)
    host, x, h0 = numbers(case)
    assert h0 is not None
    given = target.give(case)
    wide = target.xp.broadcast_to(target.array(x[:1], case.dtype), x.shape)
    start = target.xp.broadcast_to(target.array(h0[:1], case.dtype), h0.shape)
    mine = target.apply(given.cell, wide, start)
    true = loop_states(case)[:1]
    expect_agreement(host, mine, np.repeat(true, case.batch, axis=0), ATOL)


@check("O16 O58", cell=CELLS, segment=(None, 4), few={"cell": ("Echo",), "segment": (4,)})
def repeatable(target: Target, cell: str, segment: int | None) -> None:
    """The same call gives the same bits, whatever freed memory holds."""
    case = Case(cell, regime="strong")
    given = target.give(case)
    seed = target.array(cotangent(case), case.dtype)
    first: dict[str, np.ndarray] = {}
    for turn in range(4):
        states, pullback = target.vjp(given.cell, given.x, given.h0, segment_len=segment)
        found = {"states": target.host(states), **target.gradients(pullback(seed))}
        for name, value in found.items():
            expect_same_bits(value, first.setdefault(name, value.copy()), f"{name} of call {turn}")
        del states, pullback, found
        for size in (64, 4096, 2**18):
            garbage = target.array(np.full(size, np.nan), case.dtype)
            del garbage


@check("O57", cell=CELLS, few={"cell": ("Echo",)})
def no_stale_weights(target: Target, cell: str) -> None:
    """Weights that were exchanged, or written in place, are the ones used by the next call."""
    old, new = Case(cell), Case(cell, seed=3)
    given = target.give(old)
    target.apply(given.cell, given.x, given.h0, segment_len=16)
    host, arrays = numbers(new).cell, numbers(new).cell.arrays
    fresh = host.replace(**arrays)
    _, x, h0 = numbers(old)
    assert h0 is not None
    true = sequential_apply(fresh.to(dtype=np.float32), x.astype(np.float32), h0.astype(np.float32))
    exchanged = given.cell.replace(**{name: target.array(a, old.dtype) for name, a in arrays.items()})
    mine = target.apply(exchanged, given.x, given.h0, segment_len=16)
    expect_agreement(host, mine, true, ATOL, "exchanged")
    for name, value in arrays.items():
        try:
            given.cell.arrays[name][...] = target.array(value, old.dtype)
        except TypeError:
            return  # a library whose arrays cannot be written into
    mine = target.apply(given.cell, given.x, given.h0, segment_len=16)
    expect_agreement(host, mine, true, ATOL, "written in place")


@check("O49", cell=CELLS, few={"cell": ("Echo",)})
def own_memory(target: Target, cell: str) -> None:
    """Results do not share memory with inputs or with each other."""
    case = Case(cell, time=1)
    given = target.give(case)
    states, pullback = target.vjp(given.cell, given.x, given.h0)
    if not isinstance(states, np.ndarray):
        raise Refused("only NumPy tells whether arrays share memory")
    seed = target.array(cotangent(case), case.dtype)
    found = pullback(seed)
    inputs = [given.x, given.h0, seed, *given.cell.arrays.values()]
    results = {"states": states, "x": found.x, "h0": found.h0, **found.params}
    for name, mine in results.items():
        others = [*inputs, *(r for n, r in results.items() if n != name)]
        expect(not any(np.shares_memory(mine, other) for other in others), f"{name} shares memory")
