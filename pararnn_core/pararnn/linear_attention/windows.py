"""The chunk form on NumPy: window by window, so that everything stays in the processor's caches.

NumPy has the values at hand, so a window whose decays are mild takes a shorter way than halving: with b the sum of log
decays from the chunk's start, the scores are (q e^{b}) (k e^{-b})ᵀ, one product. That is right only while e^{-b} stays
in range and b keeps its digits: |b| ≤ 16 bounds the factor by 9e6 and the rounding of a score by 2e-6 of it in float32.
A window with more decay in it is halved like anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pararnn.arrays import Array
from pararnn.linear_attention.inputs import Call

# Entries of an array that a window holds, and the largest sum of log decays in a chunk with one anchor.
ENTRIES = 1 << 16
MILD = 16.0


def run_in_windows(call: Call, run: Callable[[Call], tuple[Array, Array]]) -> tuple[Array, Array]:
    """Outputs and final states of a NumPy call without packed sequences, one window after the other."""
    batch, time, heads, keys = call.arrays["k"].shape
    values = call.arrays["v"].shape[-1]
    rows = max(1, batch * heads * max(keys, values))
    length = max(4 * call.chunk, 1 << (max(1, ENTRIES // rows) - 1).bit_length())
    out = np.empty((batch, time, heads, values), dtype=call.dtype)
    state = call.initial
    for begin in range(0, time, length):
        stop = min(begin + length, time)
        part = replace(call, arrays={n: a[:, begin:stop] for n, a in call.arrays.items()}, initial=state)
        out[:, begin:stop], state = run(part)
    return out, state


def mild(call: Call, exclusive: bool, bonus: Array | None) -> tuple[Array, Array] | None:
    """The window with one anchor for each chunk, or None where its decays are too strong for that."""
    k, v = call.worked("k"), call.worked("v")
    batch, time, heads, _ = k.shape
    g = call.worked("log_decay")
    chunk = min(call.chunk, 32)
    count = time // chunk
    if not count or time % chunk:
        return None

    def split(x: Array) -> Array:
        return x.reshape(batch, count, chunk, heads, x.shape[-1]).transpose(0, 3, 1, 2, 4)

    # A product with ones is eight times as fast as cumsum. Infinities make it NaN, which fails the comparison.
    sums = np.tri(chunk, dtype=g.dtype) @ split(g)
    if not sums[..., -1, :].min(initial=0.0) >= -MILD:
        return None
    decay = np.exp(sums)
    q, k, v = split(call.queries), split(k), split(v)
    if exclusive:
        rows = q.copy()
        rows[..., 1:, :] *= decay[..., :-1, :]
    else:
        rows = q * decay
    columns = k * np.exp(-sums)
    scores = rows @ columns.swapaxes(-1, -2)
    scores *= np.tri(chunk, k=-1 if exclusive else 0, dtype=scores.dtype)
    if bonus is not None:
        step = np.arange(chunk)
        scores[..., step, step] = (q * bonus.astype(q.dtype)[:, None, None, :] * k).sum(axis=-1)
    whole = decay[..., -1, :, None]
    shifts = columns.swapaxes(-1, -2) @ v
    shifts *= whole
    starts, state = np.empty_like(shifts), call.initial
    for c in range(count):
        starts[:, :, c] = state
        state = whole[:, :, c] * state
        state += shifts[:, :, c]
    out = scores @ v
    out += rows @ starts
    return out.transpose(0, 2, 3, 1, 4).reshape(batch, time, heads, v.shape[-1]), state
