"""Sequences as they come: documents packed into one row, episodes that start anew, padding; and their final states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import array_api_compat
import numpy as np

from pararnn.arrays import Array, Namespace, cast, dtype_name, is_array, namespace_name


@dataclass(frozen=True)
class Packing:
    """Where states start anew and which steps are padding, as a problem carries it.

    Attributes:
        head: (B, T) int32. The row of ``starts`` from which the state before this step is loaded, -1 for none.
        places: by row of ``starts``, the flat index b·T + t of the step that loads it, -1 if none does.
        hold: (B, T), true where a step is padding.
        documents: N, with ``cu_seqlens``; then ``starts`` begins with the documents' starting states.
        offsets: ``cu_seqlens`` in the library and on the device of x.
    """

    head: Array | None = None
    places: Array | None = None
    hold: Array | None = None
    documents: int | None = None
    offsets: Array | None = None


def given_packing(**packing: Any) -> dict[str, Any]:
    """What of cu_seqlens, reset and mask was given."""
    return {name: value for name, value in packing.items() if value is not None}


def make_packing(what: str, xp: Namespace, x: Array, cu_seqlens: Any, reset: Any, mask: Any) -> Packing:
    """The packing of a public call's arguments, or a refusal that says what was wanted.

    A stack of layers makes it once and gives it to each as ``cu_seqlens``.
    """
    if isinstance(cu_seqlens, Packing):
        return cu_seqlens
    batch, time = int(x.shape[0]), int(x.shape[1])
    where = array_api_compat.device(x)
    head = places = offsets = documents = None
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(
                f"{what}: cu_seqlens packs documents into one row, so x must be (1, total, I), got {tuple(x.shape)}; "
                "concatenate the rows along time, or mark where states start anew with reset"
            )
        offsets = checked_offsets(what, cu_seqlens, time)
        if isinstance(offsets, np.ndarray):
            documents = offsets.shape[0] - 1
            filled = offsets[1:] > offsets[:-1]
            numbers = np.full((1, time), -1, np.int32)
            numbers[0, offsets[:-1][filled]] = np.flatnonzero(filled)
            head = xp.asarray(numbers, device=where)
            places = xp.asarray(np.where(filled, offsets[:-1], -1), device=where)
            offsets = xp.asarray(offsets, device=where)
        else:
            # A transformation traces the offsets: they are used as they are.
            documents = int(offsets.shape[0]) - 1
            steps = xp.arange(time, dtype=offsets.dtype)
            of = xp.searchsorted(offsets, steps, side="right") - 1
            begins = xp.take(offsets, of) == steps
            head = xp.astype(xp.where(begins, of, -xp.ones_like(of)), xp.int32)[None, :]
            places = xp.where(offsets[1:] > offsets[:-1], offsets[:-1], -xp.ones_like(offsets[1:]))
    if reset is not None:
        again = checked_mask(what, "reset", xp, x, reset)
        zero = xp.zeros((batch, time), dtype=xp.int32, device=where)
        if head is None:
            head = xp.where(again, zero, zero - 1)
        else:
            assert documents is not None and places is not None
            # The row behind the documents' holds zeros.
            head = xp.where(again, zero + documents, head)
            places = xp.concat([places, -xp.ones_like(places[:1])])
    hold = None if mask is None else ~checked_mask(what, "mask", xp, x, mask)
    return Packing(head, places, hold, documents, offsets)


def checked_mask(what: str, label: str, xp: Namespace, x: Array, given: Any) -> Array:
    """A (B, T) mask of truth values in x's library and on its device."""
    wanted = tuple(x.shape[:2])
    if not is_array(given):
        given = np.asarray(given)
    if tuple(given.shape) != wanted:
        raise ValueError(f"{what}: {label} must have the shape (B, T) = {wanted}, got {tuple(given.shape)}")
    if dtype_name(given.dtype) != "bool":
        raise TypeError(
            f"{what}: {label} must hold truth values, got {dtype_name(given.dtype)}; write {label} != 0 for numbers"
        )
    own = array_api_compat.array_namespace(given)
    if namespace_name(own) != namespace_name(xp):
        if not isinstance(given, np.ndarray):
            raise TypeError(
                f"{what}: {label} must be an array of {namespace_name(xp)}'s or NumPy's, got {namespace_name(own)}'s"
            )
        return xp.asarray(given, device=array_api_compat.device(x))
    here, there = array_api_compat.device(given), array_api_compat.device(x)
    if here is not None and there is not None and str(here) != str(there):
        raise ValueError(f"{what}: {label} is on {here} and x on {there}; move it there")
    return given


def checked_offsets(what: str, given: Any, time: int) -> np.ndarray | Array:
    """``cu_seqlens`` as int64 on the host, checked; or as it is, where a transformation traces it.

    Offsets on a device are read once, which waits for the device; a list or host array spares that.
    """
    rule = f"{what}: cu_seqlens must be [0, end of document 1, …, {time}], whole numbers that never decrease"
    if isinstance(given, (list, tuple)):
        values = list(given)
        if any(isinstance(v, bool) or not hasattr(v, "__index__") for v in values):
            raise TypeError(f"{rule}; got {_shown(values)}")
    elif is_array(given):
        name = dtype_name(given.dtype)
        if name not in ("int32", "int64", "uint32", "uint64"):
            raise TypeError(f"{rule}, as integers of 32 or 64 bits; got {name}")
        if given.ndim != 1:
            raise ValueError(f"{rule}; got shape {tuple(given.shape)}")
        try:
            values = given.tolist() if hasattr(given, "tolist") else [int(v) for v in given]
        except TypeError:
            if given.shape[0] < 2:
                raise ValueError(f"{rule}; got {given.shape[0]} of them") from None
            return given
    else:
        raise TypeError(f"{rule}, as a list, tuple or array; got {type(given).__name__}")
    if len(values) < 2 or values[0] != 0 or values[-1] != time or any(b < a for a, b in _pairs(values)):
        raise ValueError(f"{rule}; got {_shown(values)}")
    return np.array([int(v) for v in values], dtype=np.int64)


def _pairs(values: Sequence[Any]) -> Any:
    return zip(values, values[1:], strict=False)


def _shown(values: Sequence[Any]) -> str:
    return repr(values) if len(values) <= 8 else f"[{', '.join(map(repr, values[:6]))}, …, {values[-1]!r}]"


def final_states(states: Array, cu_seqlens: Any = None, *, h0: Array | None = None) -> Array:
    """The last state of every sequence, or with ``cu_seqlens`` of every document packed into the row.

    ::

        out_n = states[end_n - 1];   h0_n (or 0) for a document without a step

    Args:
        states: (B, T, …) as newton_apply returns them; (1, total, …) with ``cu_seqlens``.
        cu_seqlens: the offsets that the states were computed with.
        h0: the starting states that they were computed from; what an empty document ends with.

    Returns:
        (B, …) or (N, …), in the library, dtype and device of `states`. On tensors autograd goes through.

    Raises:
        TypeError, ValueError: as newton_apply for malformed offsets; an h0 of another shape.

    >>> import numpy as np
    >>> states = np.arange(5.0).reshape(1, 5, 1)
    >>> final_states(states, [0, 2, 2, 5]).tolist()
    [[1.0], [0.0], [4.0]]
    """
    if not is_array(states):
        raise TypeError(f"final_states: states must be an array, got {type(states).__name__}")
    xp = array_api_compat.array_namespace(states)
    if states.ndim < 3:
        raise ValueError(f"final_states: states must be (B, T, …), got shape {tuple(states.shape)}")
    packing = make_packing("final_states", xp, states, cu_seqlens, None, None)
    count = int(states.shape[0]) if packing.documents is None else packing.documents
    wanted = (count, *(int(n) for n in states.shape[2:]))
    if h0 is not None and tuple(h0.shape) != wanted:
        raise ValueError(f"final_states: h0 must have shape {wanted}, got {tuple(h0.shape)}")
    if h0 is None:
        empty = xp.zeros(wanted, dtype=states.dtype, device=array_api_compat.device(states))
    else:
        empty = cast(xp, h0, states.dtype)
    if int(states.shape[1]) == 0:
        return empty
    if packing.offsets is None:
        return states[:, -1, ...]
    begin, end = packing.offsets[:-1], packing.offsets[1:]
    last = xp.take(states[0, ...], xp.where(end > begin, end - 1, xp.zeros_like(end)), axis=0)
    return xp.where(xp.reshape(end > begin, (-1,) + (1,) * (states.ndim - 2)), last, empty)


def spread_last(xp: Namespace, offsets: Array, time: int, last: Array) -> tuple[Array, Array]:
    """A cotangent (N, …) of the documents' final states as one of all states (1, T, …), and what empty ones' h0 get."""
    begin, end = offsets[:-1], offsets[1:]
    filled = xp.reshape(end > begin, (-1,) + (1,) * (last.ndim - 1))
    given = xp.where(filled, xp.zeros_like(last), last)
    if not time:
        return xp.zeros((1, 0, *last.shape[1:]), dtype=last.dtype, device=array_api_compat.device(last)), given
    steps = xp.arange(1, time + 1, dtype=offsets.dtype, device=array_api_compat.device(last))
    # Of documents that end at the same place the first one is not empty.
    of = xp.searchsorted(end, steps, side="left")
    ends = xp.reshape(xp.take(end, of) == steps, (-1,) + (1,) * (last.ndim - 1))
    rows = xp.where(ends, xp.take(last, of, axis=0), xp.zeros_like(last[:1, ...]))
    return xp.expand_dims(rows, axis=0), given
