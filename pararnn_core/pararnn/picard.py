"""The Picard start: the recurrence with its hidden-state feedback frozen, solved by exact scans.

With R h frozen to a known trajectory the sLSTM is max-plus in m, a sum of exponentials in n and affine in c/n, so
three scans solve it. Sweep one freezes h at zero (the recurrent weights are dropped), each further sweep at the h of
the sweep before. Source: ParaRNN-style frozen-gate start; the max-plus form keeps the digits that a cumulative sum
loses, and the logarithm of n keeps what would underflow.
"""

from __future__ import annotations

from typing import Any

from pararnn.arrays import Array, Namespace
from pararnn.cells.base import ChannelwiseCell
from pararnn.cells.slstm import ParaSLSTM
from pararnn.functions import sigmoid
from pararnn.problem import Problem
from pararnn.scans import associative_scan, scan_diag, scan_max_plus


def published_sweeps(time: int) -> int:
    """Sweeps by length where none were asked for: 1 up to T=64, 3 up to 2048, then 5."""
    return 1 if time <= 64 else 3 if time <= 2048 else 5


def frozen_gate_states(
    problem: Problem, cell: ChannelwiseCell, gates: list[Array], params: list[Array], sweeps: int
) -> list[Array]:
    """States after `sweeps` Picard sweeps, by slot (B, T, D), in the coordinates of `cell`."""
    assert isinstance(problem.cell, ParaSLSTM)
    xp = problem.xp
    inner: Any = problem.cell.solve_cell()
    u0, l0, m0, h0 = inner.encode(xp, *problem.start())
    if inner.stabiliser_start == "input":
        # Nothing stored: the first input gate takes over.
        m0 = xp.where(l0 > -float("inf"), m0, l0)
    before = xp.zeros_like(gates[0])
    for _ in range(sweeps):
        i, f, z, o = inner.frozen_gates(xp, [g + r * before for g, r in zip(gates, params, strict=True)])
        m = scan_max_plus(f, i, initial=m0)
        l = _log_of_sums(xp, f, i, l0 + m0) - m
        kept = f + _one_earlier(xp, m, m0) - m + _one_earlier(xp, l, l0)
        share = sigmoid(xp, i - m - kept)
        u = scan_diag(1.0 - share, share * xp.tanh(z), initial=u0)
        h = inner.read(xp, u, l, o)
        before = _one_earlier(xp, h, h0)
    states = [u, l, m, h]
    return list(inner.decode(xp, *states)) if cell is problem.cell else states


def _one_earlier(xp: Namespace, rows: Array, first: Array) -> Array:
    """(B, T, D) moved down by one step, with (B, D) in front."""
    return xp.concat([xp.expand_dims(first, axis=1), rows[:, :-1, :]], axis=1)


def _log_of_sums(xp: Namespace, shift: Array, gain: Array, initial: Array) -> Array:
    """N_t = log(exp(shift_t + N_{t-1}) + exp(gain_t))."""

    def join(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
        return left[0] + right[0], xp.logaddexp(left[1] + right[0], right[1])

    moved, made = associative_scan(join, (shift, gain), axis=1)
    return xp.logaddexp(moved + xp.expand_dims(initial, axis=1), made)
