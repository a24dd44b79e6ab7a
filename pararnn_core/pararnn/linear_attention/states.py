"""The states at chunk starts: a scan over chunks, each of which acts on the state as an affine map.

::

    S_{c+1} = M_c S_c + N_c,        M_c diagonal (K,) or dense (K, K)

The same scan, run from the last chunk to the first with the transposed maps, is its adjoint.
"""

from __future__ import annotations

import numpy as np
from array_api_compat import device

from pararnn.arrays import Array, Namespace, namespace_name
from pararnn.linear_attention.frame import Frame
from pararnn.scans.associative import tree_states


def chunk_states(
    xp: Namespace, maps: Array, shifts: Array, initial: Array, frame: Frame, *, reverse: bool = False
) -> tuple[Array, Array]:
    """The state before every chunk (B, H, N, K, V), and after the last chunk of each sequence (B or S, H, K, V).

    `maps` is (B, H, N, K, 1) for diagonal maps or (B, H, N, K, K), `shifts` (B, H, N, K, V), `initial` (B or S, H, K,
    V). With `reverse`, "before" means later in time, and `initial` is what comes after the last chunks.
    """
    if prefers_breadth(xp, shifts):
        return _tree(xp, maps, shifts, initial, frame, reverse)
    return _loop(xp, maps, shifts, initial, frame, reverse)


def prefers_breadth(xp: Namespace, like: Array) -> bool:
    """Whether launches or tracing cost more than the work itself: few large operations, then, instead of many small."""
    name = namespace_name(xp)
    return name == "jax" or (name in ("torch", "cupy") and "cpu" not in str(device(like)))


def _act(xp: Namespace, maps: Array, state: Array) -> Array:
    return maps * state if maps.shape[-1] == 1 else maps @ state


def _entries(frame: Frame, reverse: bool) -> tuple[list[int], list[int]]:
    """By chunk: the sequence that the walk enters there, and the one it leaves there, or -1."""
    assert frame.first is not None and frame.last is not None
    left = np.full(frame.count, -1)
    left[frame.last] = np.arange(len(frame.last))
    enter, leave = frame.first.tolist(), left.tolist()
    return (leave, enter) if reverse else (enter, leave)


def _loop(
    xp: Namespace, maps: Array, shifts: Array, initial: Array, frame: Frame, reverse: bool
) -> tuple[Array, Array]:
    state, before, after = initial, [], []
    packed = frame.first is not None
    enter, leave = _entries(frame, reverse) if packed else ([], [])
    order = range(frame.count)
    for c in reversed(order) if reverse else order:
        if packed and enter[c] >= 0:
            state = initial[enter[c] : enter[c] + 1, ...]
        before.append(state)
        state = _act(xp, maps[:, :, c, :, :], state) + shifts[:, :, c, :, :]
        if packed and leave[c] >= 0:
            after.append(state)
    if reverse:
        before.reverse()
        after.reverse()
    return xp.stack(before, axis=2), xp.concat(after) if packed else state


def _tree(
    xp: Namespace, maps: Array, shifts: Array, initial: Array, frame: Frame, reverse: bool
) -> tuple[Array, Array]:
    if frame.first is None:

        def compose(early, late):
            return _act(xp, late[0], early[0]), _act(xp, late[0], early[1]) + late[1]

        def apply(state, element):
            return (_act(xp, element[0], state[0]) + element[1],)

        start = (xp.expand_dims(initial, axis=2),)
        (every,) = tree_states(xp, compose, apply, (maps, shifts), start, axis=2, reverse=reverse)
        if reverse:
            return every[:, :, 1:, :, :], every[:, :, 0, :, :]
        return every[:, :, :-1, :, :], every[:, :, -1, :, :]
    # A chunk where the walk enters a sequence forgets what was before it: nothing, not even a NaN, may cross.
    enter, leave = _entries(frame, reverse)
    where = device(shifts)
    chosen = xp.take(initial, xp.asarray(np.maximum(enter, 0), device=where), axis=0)
    chosen = xp.expand_dims(xp.permute_dims(chosen, (1, 0, 2, 3)), axis=0)
    fresh = xp.reshape(xp.asarray(np.asarray(enter) >= 0, device=where), (1, 1, -1, 1, 1))
    shifts = xp.where(fresh, _act(xp, maps, chosen) + shifts, shifts)

    def compose_packed(early, late):
        joined = xp.where(late[2], late[1], _act(xp, late[0], early[1]) + late[1])
        return _act(xp, late[0], early[0]), joined, early[2] | late[2]

    def apply_packed(state, element):
        return (xp.where(element[2], element[1], _act(xp, element[0], state[0]) + element[1]),)

    start = (xp.zeros_like(shifts[:, :, :1, :, :]),)
    (every,) = tree_states(xp, compose_packed, apply_packed, (maps, shifts, fresh), start, axis=2, reverse=reverse)
    before = every[:, :, 1:, :, :] if reverse else every[:, :, :-1, :, :]
    after = every[:, :, :-1, :, :] if reverse else every[:, :, 1:, :, :]
    ends = [c for c, s in sorted(enumerate(leave), key=lambda pair: pair[1]) if s >= 0]
    final = xp.take(after, xp.asarray(np.asarray(ends), device=where), axis=2)
    final = xp.permute_dims(final[0, ...], (1, 0, 2, 3))
    return xp.where(fresh, chosen, before), final
