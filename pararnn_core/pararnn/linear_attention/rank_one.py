"""The chunk form of a decay with a rank-one update, and its hand-written adjoint.

With u_t = a_tᵀ S_{t-1}, a step is S_t = diag(e^{w_t}) S_{t-1} + k_t v_tᵀ + b_t u_tᵀ: a diagonal recurrence with two
keys, one of whose values depends on the state. Inside a chunk, in matrices over its steps::

    U   = (I - A_ab)⁻¹ (A_ak V + (a e^{↑}) S_c)  =  U₀ + W S_c
    O   = (r e^{↑}) S_c + A_rk V + A_rb U
    S_{c+1} = (diag(e^{Σ}) + (b e^{↓})ᵀ W) S_c + (k e^{↓})ᵀ V + (b e^{↓})ᵀ U₀  =  M_c S_c + N_c

so that a chunk is one K × K map, and a scan of those maps is parallel over any length. A_ab is strictly lower
triangular; I - A_ab is inverted by halves, which is as stable as substitution. Source: Bischof and Van Loan 1987 (WY
products); Yang et al. 2024 (arXiv 2406.06484) for the delta rule; Peng et al. 2025 (arXiv 2503.14456) for RWKV-7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from array_api_compat import device

from pararnn.arrays import Array, Namespace
from pararnn.linear_attention.frame import Frame
from pararnn.linear_attention.scores import Decays, Outside, scores, scores_adjoint
from pararnn.linear_attention.states import chunk_states


class _Parts(NamedTuple):
    """The scores A_rk, A_rb, A_ak; (I - A_ab)⁻¹; r e^{↑}, a e^{↑}, k e^{↓}, b e^{↓}; W, U₀; M and N of every chunk."""

    rk: Array
    rb: Array
    ak: Array
    inverse: Array
    queries: Array
    reads: Array
    keys: Array
    writes: Array
    w: Array
    u0: Array
    maps: Array
    shifts: Array


@dataclass(frozen=True)
class RankOne:
    """A rank-one recurrence cut into chunks: everything (B, H, N, C, ·)."""

    xp: Namespace
    frame: Frame
    r: Array
    k: Array
    v: Array
    a: Array
    b: Array
    decays: Decays
    initial: Array

    def _parts(self) -> _Parts:
        """Everything about the chunks that does not depend on a state."""
        xp, top = self.xp, self.decays.top
        (rk, rb), (ak, ab) = scores(self.decays, [(self.r, False), (self.a, True)], [self.k, self.b])
        inverse = inverse_of_unit_lower(xp, ab)
        queries, reads = self.r * top.upto, self.a * top.before
        keys, writes = self.k * top.after, self.b * top.after
        w, u0 = inverse @ reads, inverse @ (ak @ self.v)
        eye = xp.eye(self.k.shape[-1], dtype=self.k.dtype, device=device(self.k))
        # Not a product with the identity: a decay that is NaN must not reach other channels.
        whole = xp.matrix_transpose(top.whole)
        diagonal = xp.where(eye > 0.0, whole, xp.zeros_like(whole))
        transposed = xp.matrix_transpose(writes)
        shifts = xp.matrix_transpose(keys) @ self.v + transposed @ u0
        return _Parts(rk, rb, ak, inverse, queries, reads, keys, writes, w, u0, diagonal + transposed @ w, shifts)

    def run(self) -> tuple[Array, Array]:
        """Outputs (B, H, N, C, V) and final states."""
        parts = self._parts()
        starts, final = chunk_states(self.xp, parts.maps, parts.shifts, self.initial, self.frame)
        return parts.queries @ starts + parts.rk @ self.v + parts.rb @ (parts.w @ starts + parts.u0), final

    def pull_back(self, given: Array, last: Array) -> tuple[Array, ...]:
        """Cotangents of r, w, k, v, a, b and the initial state, from those of the outputs and the final states."""
        xp, top = self.xp, self.decays.top
        t = xp.matrix_transpose
        rk, rb, ak, inverse, queries, reads, keys, writes, w, u0, maps, shifts = self._parts()
        starts, _ = chunk_states(xp, maps, shifts, self.initial, self.frame)
        u = w @ starts + u0
        of_u = t(rb) @ given
        ends, of_initial = chunk_states(xp, t(maps), t(queries) @ given + t(w) @ of_u, last, self.frame, reverse=True)
        of_map = ends @ t(starts)
        of_w, of_u0 = of_u @ t(starts) + writes @ of_map, of_u + writes @ ends
        of_reads, of_values = t(inverse) @ of_w, t(inverse) @ of_u0
        of_v = t(rk) @ given + keys @ ends + t(ak) @ of_values
        of_queries, of_keys = given @ t(starts), self.v @ t(ends)
        of_writes = w @ t(of_map) + u0 @ t(ends)
        cotangents = [
            [given @ t(self.v), given @ t(u)],
            [of_values @ t(self.v), of_reads @ t(w) + of_values @ t(u0)],
        ]
        own = xp.sum(ends * starts, axis=-1, keepdims=True)
        outside = Outside(
            upto=of_queries * queries,
            before=of_reads * reads,
            after=of_keys * keys + of_writes * writes,
            whole=t(own) * top.whole,
        )
        (of_r, of_a), (of_k, of_b), of_g = scores_adjoint(
            self.decays, [(self.r, False), (self.a, True)], [self.k, self.b], cotangents, outside
        )
        return (
            of_r + of_queries * top.upto,
            of_g,
            of_k + of_keys * top.after,
            of_v,
            of_a + of_reads * top.before,
            of_b + of_writes * top.after,
            of_initial,
        )


def inverse_of_unit_lower(xp: Namespace, a: Array) -> Array:
    """(I - a)⁻¹ for a strictly lower triangular (…, C, C), C a power of two.

    The inverse of two halves joined is the two inverses and, below the border, X₂₂ a₂₁ X₁₁. The sum of powers of `a`,
    which is the same matrix, cancels catastrophically: its terms can be 10¹⁸ where the result is below one.
    """
    chunk = a.shape[-1]
    out = xp.expand_dims(xp.ones_like(a[..., :1]), axis=-1)
    size = 1
    while size < chunk:
        pairs = xp.reshape(out, (*out.shape[:-3], chunk // (2 * size), 2, size, size))
        upper, lower = pairs[..., 0, :, :], pairs[..., 1, :, :]
        count = chunk // (2 * size)
        starts = [2 * n * size for n in range(count)]
        block = xp.stack([a[..., n + size : n + 2 * size, n : n + size] for n in starts], axis=-3)
        first = xp.concat([upper, xp.zeros_like(upper)], axis=-1)
        out = xp.concat([first, xp.concat([lower @ block @ upper, lower], axis=-1)], axis=-2)
        size *= 2
    return out[..., 0, :, :]
