"""The recurrence of a diagonal decay in logarithms, for keys and values above zero.

::

    L_t = logaddexp(g_t + L_{t-1}, log k_t + log v_t),      S_t = exp(L_t)

A state below the smallest or above the largest float of its dtype is still held. It keeps all T states, so it is for
narrow heads. Source: Heinsen 2023 (arXiv 2311.06281), with the scan in place of its quotient of sums.
"""

from __future__ import annotations

from pararnn.arrays import Array, Namespace, known
from pararnn.scans.associative import tree_states


def log_states(xp: Namespace, k: Array, v: Array, g: Array, initial: Array) -> Array:
    """log S before the first step and after each, (B, T + 1, H, K, V)."""
    terms = xp.expand_dims(xp.log(k), axis=-1) + xp.expand_dims(xp.log(v), axis=-2)
    maps = xp.broadcast_to(xp.expand_dims(g, axis=-1), (*k.shape, 1))
    none = initial == 0.0
    start = xp.where(none, xp.full_like(initial, -float("inf")), xp.log(xp.where(none, xp.ones_like(initial), initial)))

    def compose(early, late):
        return late[0] + early[0], _log_sum(xp, late[0] + early[1], late[1])

    def apply(state, element):
        return (_log_sum(xp, element[0] + state[0], element[1]),)

    (every,) = tree_states(xp, compose, apply, (maps, terms), (xp.expand_dims(start, axis=1),), axis=1)
    return every


def _log_sum(xp: Namespace, a: Array, b: Array) -> Array:
    """log(e^a + e^b), also in its gradient where a is -∞; b is finite."""
    empty = a == -float("inf")
    return xp.where(empty, b, xp.logaddexp(xp.where(empty, b, a), b))


def log_run(
    xp: Namespace, q: Array, k: Array, v: Array, g: Array, initial: Array, *, exclusive: bool, bonus: Array | None
) -> tuple[Array, Array]:
    """Outputs (B, T, H, V) and final states (B, H, K, V)."""
    every = xp.exp(log_states(xp, k, v, g, initial))
    read = every[:, :-1, ...] if exclusive else every[:, 1:, ...]
    out = (xp.expand_dims(q, axis=-2) @ read)[..., 0, :]
    if bonus is not None:
        out = out + xp.sum(q * bonus * k, axis=-1, keepdims=True) * v
    return out, every[:, -1, ...]


def refuse_signs(what: str, xp: Namespace, k: Array, v: Array, initial: Array) -> None:
    """Refuses what has no logarithm, where the values can be read."""
    for name, wanted, wrong in (
        ("k", "> 0", _smallest(xp, k) <= 0.0),
        ("v", "> 0", _smallest(xp, v) <= 0.0),
        ("initial_state", "≥ 0", _smallest(xp, initial) < 0.0),
    ):
        if known(wrong):
            raise ValueError(f"{what}: form='log' needs {name} {wanted}; these signs have no logarithm, use 'chunk'")


def _smallest(xp: Namespace, a: Array) -> Array:
    """The smallest entry, or one where there is none."""
    size = 1
    for n in a.shape:
        size *= n
    return xp.min(a) if size else xp.ones((), dtype=a.dtype)
