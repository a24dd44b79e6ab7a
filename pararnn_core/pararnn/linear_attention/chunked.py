"""The chunk form of a diagonal decay, and its hand-written adjoint.

With the decays to a step, behind it, and over all of a chunk written e^{↑}, e^{↓}, e^{Σ}::

    o   = A v + (q e^{↑}) S_c                      A: the decayed scores, see scores.py
    S_{c+1} = e^{Σ} S_c + (k e^{↓})ᵀ v

Both lines are matrix products over all chunks at once; only the second, read as a recurrence of the chunks' states, is
a scan. Source: Yang et al. 2023 (arXiv 2312.06635), section 4; the halving inside chunks is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from pararnn.arrays import Array, Namespace
from pararnn.linear_attention.frame import Frame
from pararnn.linear_attention.scores import Decays, Outside, scores, scores_adjoint
from pararnn.linear_attention.states import chunk_states


@dataclass(frozen=True)
class Diagonal:
    """A diagonal recurrence cut into chunks: everything (B, H, N, C, ·); ``bonus`` is (H, 1, 1, K) or None."""

    xp: Namespace
    frame: Frame
    q: Array
    k: Array
    v: Array
    decays: Decays
    initial: Array
    exclusive: bool
    bonus: Array | None

    def run(self) -> tuple[Array, Array]:
        """Outputs (B, H, N, C, V) and final states."""
        xp, top = self.xp, self.decays.top
        starts, final = self.starts()
        rows = self.q * (top.before if self.exclusive else top.upto)
        out = self.attention() @ self.v + rows @ starts
        if self.bonus is not None:
            out = out + xp.sum(self.q * self.bonus * self.k, axis=-1, keepdims=True) * self.v
        return out, final

    def attention(self) -> Array:
        """The scores (B, H, N, C, C)."""
        return scores(self.decays, [(self.q, self.exclusive)], [self.k])[0][0]

    def starts(self) -> tuple[Array, Array]:
        """The state before every chunk, and the final ones."""
        xp, top = self.xp, self.decays.top
        shifts = xp.matrix_transpose(self.k * top.after) @ self.v
        return chunk_states(xp, self.maps(), shifts, self.initial, self.frame)

    def maps(self) -> Array:
        """What each chunk does to a state, (B, H, N, K, 1)."""
        xp, whole = self.xp, self.xp.matrix_transpose(self.decays.top.whole)
        shape = (*whole.shape[:-2], self.k.shape[-1], 1)
        return whole if tuple(whole.shape) == shape else xp.broadcast_to(whole, shape)

    def pull_back(self, given: Array, last: Array) -> tuple[Array, Array, Array, Array, Array, Array | None]:
        """Cotangents of q, k, v, g, the initial state and the bonus, from those of the outputs and the final states."""
        xp, top, exclusive = self.xp, self.decays.top, self.exclusive
        starts, _ = self.starts()
        to = top.before if exclusive else top.upto
        rows, columns = self.q * to, self.k * top.after
        ends, of_initial = chunk_states(
            xp, self.maps(), xp.matrix_transpose(rows) @ given, last, self.frame, reverse=True
        )
        of_scores = given @ xp.matrix_transpose(self.v)
        of_v = xp.matrix_transpose(self.attention()) @ given + columns @ ends
        of_rows = given @ xp.matrix_transpose(starts)
        of_columns = self.v @ xp.matrix_transpose(ends)
        of_whole = xp.matrix_transpose(xp.sum(ends * starts, axis=-1, keepdims=True)) * top.whole

        def shared(x: Array) -> Array:
            """Summed over channels where they share one decay."""
            return xp.sum(x, axis=-1, keepdims=True) if top.whole.shape[-1] != x.shape[-1] else x

        of_to = shared(of_rows * rows)
        outside = Outside(
            upto=None if exclusive else of_to,
            before=of_to if exclusive else None,
            after=shared(of_columns * columns),
            whole=shared(of_whole),
        )
        (of_q,), (of_k,), of_g = scores_adjoint(self.decays, [(self.q, exclusive)], [self.k], [[of_scores]], outside)
        of_q, of_k, of_bonus = of_q + of_rows * to, of_k + of_columns * top.after, None
        if self.bonus is not None:
            own = xp.sum(given * self.v, axis=-1, keepdims=True)
            of_v = of_v + xp.sum(self.q * self.bonus * self.k, axis=-1, keepdims=True) * given
            of_q, of_k = of_q + own * self.bonus * self.k, of_k + own * self.bonus * self.q
            of_bonus = xp.sum(own * self.q * self.k, axis=(0, 2, 3))
        return of_q, of_k, of_v, of_g, of_initial, of_bonus
