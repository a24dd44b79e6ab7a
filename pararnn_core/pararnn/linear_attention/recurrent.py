"""The time loops: what every other form has to equal, and how a token is decoded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pararnn.arrays import Array, Namespace


def diagonal_loop(
    xp: Namespace,
    q: Array,
    k: Array,
    v: Array,
    g: Array | None,
    initial: Array,
    offsets: np.ndarray | None,
    *,
    exclusive: bool,
    bonus: Array | None,
) -> tuple[Array, Array]:
    """S_t = diag(e^{g_t}) S_{t-1} + k_t v_tᵀ; o_t = q_tᵀ S_t, or q_tᵀ (S_{t-1} + diag(u) k_t v_tᵀ) if exclusive."""
    decay = None if g is None else xp.expand_dims(xp.exp(g), axis=-1)
    columns, rows = xp.expand_dims(k, axis=-1), xp.expand_dims(v, axis=-2)
    queries = xp.expand_dims(q, axis=-2)
    extra = None if bonus is None else xp.expand_dims(bonus, axis=-1)

    def step(t: int, state: Array) -> tuple[Array, Array]:
        new = columns[:, t, ...] * rows[:, t, ...]
        read = state if extra is None else state + extra * new
        state = (state if decay is None else decay[:, t, ...] * state) + new
        out = queries[:, t, ...] @ (read if exclusive else state)
        return out[..., 0, :], state

    return walk(xp, step, q.shape[1], v, initial, offsets)


def rank_one_loop(
    xp: Namespace,
    r: Array,
    w: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    initial: Array,
    offsets: np.ndarray | None,
) -> tuple[Array, Array]:
    """S_t = (diag(e^{w_t}) + b_t a_tᵀ) S_{t-1} + k_t v_tᵀ; o_t = r_tᵀ S_t."""
    decay = xp.expand_dims(xp.exp(w), axis=-1)
    columns, rows = xp.expand_dims(k, axis=-1), xp.expand_dims(v, axis=-2)
    queries, read, write = xp.expand_dims(r, axis=-2), xp.expand_dims(a, axis=-2), xp.expand_dims(b, axis=-1)

    def step(t: int, state: Array) -> tuple[Array, Array]:
        new = write[:, t, ...] * (read[:, t, ...] @ state) + columns[:, t, ...] * rows[:, t, ...]
        state = decay[:, t, ...] * state + new
        return (queries[:, t, ...] @ state)[..., 0, :], state

    return walk(xp, step, r.shape[1], v, initial, offsets)


def walk(
    xp: Namespace,
    step: Callable[[int, Array], tuple[Array, Array]],
    time: int,
    like: Array,
    initial: Array,
    offsets: np.ndarray | None,
) -> tuple[Array, Array]:
    """Outputs (B, T, H, V) and final states of a loop over time that starts anew at every packed sequence."""
    outputs, finals = [], []
    state = initial
    borders = [0, time] if offsets is None else offsets.tolist()
    for n, (begin, end) in enumerate(zip(borders, borders[1:], strict=False)):
        if offsets is not None:
            state = initial[n : n + 1, ...]
        for t in range(begin, end):
            out, state = step(t, state)
            outputs.append(out)
        finals.append(state)
    whole = xp.stack(outputs, axis=1) if outputs else xp.zeros_like(like)
    return whole, finals[0] if offsets is None else xp.concat(finals)
