"""How time is cut into chunks: padding, packed sequences, and the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import device

from pararnn.arrays import Array, Namespace


@dataclass(frozen=True)
class Frame:
    """N chunks of C steps that hold B sequences, or one packed row of several.

    Every sequence begins at a chunk of its own and is filled up with steps that change nothing: q, k, v are zero and
    the log decay is zero. An empty sequence still has one chunk, so that its final state is its initial one.

    Attributes:
        time: T.
        chunk: C.
        count: N.
        gather: for packed input, the time of each of the N·C slots (T where it is filled up); else None.
        scatter: for packed input, the slot of each time.
        first: for packed input, the sequence that begins at each chunk, or -1.
        last: for packed input, the last chunk of each sequence.
    """

    time: int
    chunk: int
    count: int
    gather: np.ndarray | None = None
    scatter: np.ndarray | None = None
    first: np.ndarray | None = None
    last: np.ndarray | None = None

    def split(self, xp: Namespace, x: Array) -> Array:
        """(B, T, H, K) to (B, H, N, C, K)."""
        batch, _, heads, width = x.shape
        spare = 1 if self.gather is not None else self.count * self.chunk - self.time
        if spare:
            zeros = xp.zeros((batch, spare, heads, width), dtype=x.dtype, device=device(x))
            x = xp.concat([x, zeros], axis=1)
        if self.gather is not None:
            x = xp.take(x, xp.asarray(self.gather, device=device(x)), axis=1)
        x = xp.reshape(x, (batch, self.count, self.chunk, heads, width))
        return xp.permute_dims(x, (0, 3, 1, 2, 4))

    def join(self, xp: Namespace, y: Array) -> Array:
        """(B, H, N, C, V) to (B, T, H, V)."""
        batch, heads, _, _, width = y.shape
        y = xp.permute_dims(y, (0, 2, 3, 1, 4))
        y = xp.reshape(y, (batch, self.count * self.chunk, heads, width))
        if self.scatter is not None:
            return xp.take(y, xp.asarray(self.scatter, device=device(y)), axis=1)
        return y[:, : self.time, :, :]


def frame_of(time: int, chunk: int, offsets: np.ndarray | None) -> Frame:
    """The frame for T steps, or for sequences packed at `offsets` (S + 1,)."""
    if offsets is None:
        return Frame(time, chunk, max(1, -(-time // chunk)))
    lengths = np.diff(offsets)
    counts = np.maximum(1, -(-lengths // chunk))
    begins = np.cumsum(counts) - counts
    count = int(counts.sum())
    inside = np.arange(time) - np.repeat(offsets[:-1], lengths)
    scatter = np.repeat(begins * chunk, lengths) + inside
    gather = np.full(count * chunk, time)
    gather[scatter] = np.arange(time)
    first = np.full(count, -1)
    first[begins] = np.arange(len(lengths))
    return Frame(time, chunk, count, gather, scatter, first, begins + counts - 1)


def offsets_of(what: str, cu_seqlens: Any, batch: int, time: int) -> np.ndarray | None:
    """cu_seqlens as host integers, checked."""
    if cu_seqlens is None:
        return None
    try:
        values = cu_seqlens.cpu() if hasattr(cu_seqlens, "cpu") else cu_seqlens
        values = values.get() if type(values).__module__.startswith("cupy") else values
        offsets = np.asarray(values)
    except Exception as error:
        raise TypeError(
            f"{what}: cu_seqlens must be known when the call is made, and this {type(cu_seqlens).__name__} has no "
            "values (a transformation traces it); pass a list or a NumPy array, or keep it static"
        ) from error
    if offsets.ndim != 1 or offsets.size < 2 or offsets.dtype.kind not in "iu":
        raise ValueError(f"{what}: cu_seqlens must be integers (sequences + 1,), got {offsets.dtype} {offsets.shape}")
    offsets = offsets.astype(np.int64)
    if batch != 1:
        raise ValueError(f"{what}: packed sequences need a batch of 1, got {batch}; concatenate them along time")
    if offsets[0] != 0 or offsets[-1] != time or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"{what}: cu_seqlens must rise from 0 to T={time}, got {offsets[0]} … {offsets[-1]}"
            + (" with a fall between" if (np.diff(offsets) < 0).any() else "")
        )
    return offsets
