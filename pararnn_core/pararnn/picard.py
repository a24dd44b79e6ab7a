"""The Picard start: the recurrence with its hidden-state feedback frozen, solved by exact scans.

With R h frozen to a known trajectory the sLSTM is max-plus in m and affine in n and c, so three scans solve it. Sweep
one freezes h at zero (the recurrent weights are dropped), each further sweep at the h of the sweep before.
Source: ParaRNN-style frozen-gate start; the max-plus form keeps the digits that a cumulative sum loses.
"""

from __future__ import annotations

from pararnn.arrays import Array
from pararnn.cells.base import ChannelwiseCell
from pararnn.cells.slstm import ParaSLSTM
from pararnn.functions import sigmoid
from pararnn.problem import Problem
from pararnn.scans import scan_diag, scan_max_plus


def published_sweeps(time: int) -> int:
    """Sweeps by length where none were asked for: 1 up to T=64, 3 up to 2048, then 5."""
    return 1 if time <= 64 else 3 if time <= 2048 else 5


def frozen_gate_states(
    problem: Problem, cell: ChannelwiseCell, gates: list[Array], params: list[Array], sweeps: int
) -> list[Array]:
    """States after `sweeps` Picard sweeps, by slot (B, T, D), in the coordinates of `cell`."""
    assert isinstance(problem.cell, ParaSLSTM)
    xp = problem.xp
    c0, n0, m0, h0 = problem.start()
    before = xp.zeros_like(gates[0])
    for _ in range(sweeps):
        i, f, z, o = (g + r * before for g, r in zip(gates, params, strict=True))
        m = scan_max_plus(f, i, initial=m0)
        m_before = xp.concat([xp.expand_dims(m0, axis=1), m[:, :-1, :]], axis=1)
        keep, new = xp.exp(f + m_before - m), xp.exp(i - m)
        n = scan_diag(keep, new, initial=n0)
        c = scan_diag(keep, new * xp.tanh(z), initial=c0)
        h = sigmoid(xp, o) * c / (n + problem.cell.eps)
        before = xp.concat([xp.expand_dims(h0, axis=1), h[:, :-1, :]], axis=1)
    return list(cell.encode(xp, c, n, m, h))
