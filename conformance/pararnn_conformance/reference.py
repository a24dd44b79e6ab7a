"""The references: plain loops over time in NumPy float64, which share nothing with the solvers but the cell's step.

Inside this file states are always (B, T, S, D). Derivatives of a step come from complex steps, exact to rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_TINY = 1e-30


class _Complex:
    """NumPy with what it lacks for complex steps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def logaddexp(a: Any, b: Any) -> Any:
        high = np.where(np.real(a) >= np.real(b), a, b)
        return high + np.log1p(np.exp(np.where(np.real(a) >= np.real(b), b, a) - high))


_COMPLEX = _Complex()


def public(cell: Any, states: np.ndarray) -> np.ndarray:
    """(B, T, S, D) as the library shapes it: without the slot axis for one slot."""
    return states[:, :, 0] if len(cell.slots) == 1 else states


def with_slots(cell: Any, states: np.ndarray) -> np.ndarray:
    """The opposite of `public`."""
    return states[:, :, None] if len(cell.slots) == 1 else states


def gates(cell: Any, x: np.ndarray) -> np.ndarray:
    """W_x x + b as (B, T, G, D)."""
    made = np.einsum("bti,oi->bto", x, cell.W_x.weight) + cell.W_x.bias
    return made.reshape(*x.shape[:2], len(cell.gates), cell.d_h)


def recurrent(cell: Any) -> list[np.ndarray]:
    """The parameters as the step sees them."""
    cap = cell.max_recurrent_norm
    values = [np.asarray(getattr(cell, name)) for name in cell.params]
    return values if cap is None else [np.clip(v, -cap, cap) for v in values]


def start(cell: Any, x: np.ndarray, h0: np.ndarray | None) -> np.ndarray:
    """The state before the first step as (B, S, D)."""
    shape = (x.shape[0], len(cell.slots), cell.d_h)
    return np.zeros(shape) if h0 is None else np.reshape(h0, shape)


def step(cell: Any, before: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """One step on (…, S, D) and (…, G, D), any leading axes."""
    slots = [before[..., s, :] for s in range(before.shape[-2])]
    given = [inputs[..., g, :] for g in range(inputs.shape[-2])]
    with np.errstate(all="ignore"):
        return np.stack(np.broadcast_arrays(*cell.step(np, *slots, *given, *recurrent(cell))), axis=-2)


def states(cell: Any, x: np.ndarray, h0: np.ndarray | None) -> np.ndarray:
    """The recurrence, one step after the other."""
    inputs, now = gates(cell, x), start(cell, x, h0)
    out = np.empty((x.shape[0], x.shape[1], *now.shape[1:]))
    for t in range(x.shape[1]):
        out[:, t] = now = step(cell, now, inputs[:, t])
    return out


def before(cell: Any, x: np.ndarray, h0: np.ndarray | None, trajectory: np.ndarray) -> np.ndarray:
    """The states one step earlier."""
    first = start(cell, x, h0)[:, None]
    return np.concatenate([first, trajectory], axis=1)[:, : x.shape[1]]


def residual(cell: Any, x: np.ndarray, h0: np.ndarray | None, trajectory: np.ndarray) -> np.ndarray:
    """f(h_{t-1}, x_t) - h_t for any trajectory, (B, T, S, D)."""
    return step(cell, before(cell, x, h0, trajectory), gates(cell, x)) - trajectory


def partials(cell: Any, previous: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """d slot / d operand as (…, S, S+G+P, D), for operands in the order slots, gates, params."""
    operands = [previous[..., s, :] for s in range(previous.shape[-2])]
    operands += [inputs[..., g, :] for g in range(inputs.shape[-2])]
    operands += [np.broadcast_to(p, operands[0].shape) for p in recurrent(cell)]
    columns = []
    for k in range(len(operands)):
        moved = [a + _TINY * 1j if j == k else a for j, a in enumerate(operands)]
        with np.errstate(all="ignore"):
            new = np.broadcast_arrays(*cell.step(_COMPLEX, *moved))
        columns.append(np.stack([np.imag(v) / _TINY for v in new], axis=-2))
    return np.stack(columns, axis=-2)


def gradients(cell: Any, x: np.ndarray, h0: np.ndarray | None, cotangent: np.ndarray) -> dict[str, np.ndarray]:
    """Back-propagation through time, step by step: 'x', 'h0' and every stored array of the cell."""
    trajectory = states(cell, x, h0)
    slots, count = len(cell.slots), len(cell.gates)
    slopes = partials(cell, before(cell, x, h0, trajectory), gates(cell, x))
    given = with_slots(cell, cotangent)
    future = np.zeros((x.shape[0], slots, cell.d_h))
    leaves = np.zeros((*x.shape[:2], slopes.shape[3], cell.d_h))
    for t in range(x.shape[1] - 1, -1, -1):
        now = future + given[:, t]
        leaves[:, t] = np.einsum("bsd,bskd->bkd", now, slopes[:, t])
        future = leaves[:, t, :slots]
    at_gates = leaves[:, :, slots : slots + count].reshape(*x.shape[:2], count * cell.d_h)
    sums = leaves[:, :, slots + count :].sum(axis=(0, 1))
    found = {
        "x": np.einsum("bto,oi->bti", at_gates, cell.W_x.weight),
        "h0": future[:, 0] if slots == 1 else future,
        "W_x.weight": np.einsum("bto,bti->oi", at_gates, x),
        "W_x.bias": at_gates.sum(axis=(0, 1)),
    }
    by_name = dict(zip(cell.params, sums, strict=True))
    for name, value in cell.arrays.items():
        if name.startswith("W_x."):
            continue
        rows = cell.stacked.get(name)
        inside = 1.0 if cell.max_recurrent_norm is None else np.abs(value) <= cell.max_recurrent_norm
        found[name] = (by_name[name] if rows is None else np.stack([by_name[r] for r in rows])) * inside
    return found


def per_step_newton(cell: Any, x: np.ndarray, h0: np.ndarray | None, iterations: int) -> np.ndarray:
    """The published iteration: all T states unknown, from f(0, x_t), δ_t = J_t δ_{t-1} + r_t, h_t += δ_t."""
    inputs, slots = gates(cell, x), len(cell.slots)
    zeros = np.zeros((x.shape[0], x.shape[1], slots, cell.d_h))
    guess = step(cell, before(cell, x, h0, zeros), inputs)
    for _ in range(iterations):
        previous = before(cell, x, h0, guess)
        slopes = partials(cell, previous, inputs)[..., :slots, :]
        gap = step(cell, previous, inputs) - guess
        move = np.zeros((x.shape[0], slots, cell.d_h))
        for t in range(x.shape[1]):
            move = np.einsum("bskd,bkd->bsd", slopes[:, t], move) + gap[:, t]
            guess[:, t] += move
    return guess


def shooting(cell: Any, x: np.ndarray, h0: np.ndarray | None, length: int, corrections: int) -> np.ndarray:
    """Newton on the segment starts, zero at first: run each segment, correct the starts at the joints, run again.

    Starts of bounded slots are moved back into their interval, widened to hold the true start.
    """
    inputs, slots, first = gates(cell, x), len(cell.slots), start(cell, x, h0)
    begins = list(range(0, x.shape[1], length))
    starts = [first] + [np.zeros_like(first) for _ in begins[1:]]
    low, high = first.copy(), first.copy()
    for s, slot in enumerate(cell.slots):
        bound = cell.bounds.get(slot, (-np.inf, np.inf))
        low[:, s], high[:, s] = np.minimum(low[:, s], bound[0]), np.maximum(high[:, s], bound[1])
    for turn in range(corrections + 1):
        out = np.empty((x.shape[0], x.shape[1], slots, cell.d_h))
        ends, maps = [], []
        for begin, now in zip(begins, starts, strict=True):
            product = np.broadcast_to(np.eye(slots)[None, :, :, None], (x.shape[0], slots, slots, cell.d_h))
            for t in range(begin, min(begin + length, x.shape[1])):
                slopes = partials(cell, now, inputs[:, t])[..., :slots, :]
                product = np.einsum("bskd,bkjd->bsjd", slopes, product)
                out[:, t] = now = step(cell, now, inputs[:, t])
            ends.append(now)
            maps.append(product)
        if turn == corrections:
            return out
        move, moved = np.zeros_like(first), [first]
        for c in range(len(begins) - 1):
            new = ends[c] + np.einsum("bskd,bkd->bsd", maps[c], move)
            new = np.clip(new, low, high)
            move = new - starts[c + 1]
            moved.append(new)
        starts = moved
    raise AssertionError("unreachable")
