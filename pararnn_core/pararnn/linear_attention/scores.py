"""The decayed scores inside a chunk, and their gradient, with no exponent above what the recurrence itself has.

::

    A_ij = Σ_K q_i k_j exp(g_{j+1} + … + g_i),          j ≤ i     (inclusive)
    A_ij = Σ_K q_i k_j exp(g_{j+1} + … + g_{i-1}),      j < i     (exclusive)

The chunk is halved again and again. A block of rows in a right half and columns in the left half beside it is a plain
matrix product, since its exponent splits at the border between the halves: the rows carry the decay since the border,
the columns the decay up to it. For log decays ≤ 0 both factors are ≤ 1. Every exponent is a *sum* of log decays over a
stretch of time, built by adding stretches. Cumulative sums are never subtracted from each other: their difference
loses all digits behind one strong decay, and is NaN behind a decay of exactly zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from array_api_compat import device

from pararnn.arrays import Array, Namespace
from pararnn.linear_attention.states import prefers_breadth

# Up to so many rows, levels are joined into one block.
SMALL = 16
# A query and whether its stretch of decay ends before its own step.
Query = tuple[Array, bool]


@dataclass
class Stretches:
    """Sums of log decays over the blocks of one size: arrays (…, C, K') with K' = K, or 1 for one decay per head.

    Attributes:
        size: steps in a block.
        upto: from the block's start through the step.
        before: from the block's start, without the step.
        after: behind the step, to the block's end.
        whole: the block's sum, (…, C / size, K').
    """

    size: int
    upto: Array
    before: Array
    after: Array
    whole: Array


def halves(xp: Namespace, x: Array, size: int) -> tuple[Array, Array]:
    """The left and the right halves of blocks of 2·size rows, (…, C / 2size, size, K) each."""
    x = xp.reshape(x, (*x.shape[:-2], x.shape[-2] // (2 * size), 2, size, x.shape[-1]))
    return x[..., 0, :, :], x[..., 1, :, :]


def whole_of(xp: Namespace, left: Array, right: Array) -> Array:
    """The rows (…, C, K) of which `left` and `right` are the halves."""
    both = xp.stack([left, right], axis=-3)
    *front, count, _, size, width = both.shape
    return xp.reshape(both, (*front, 2 * count * size, width))


class Decays:
    """The decays inside chunks of C steps, from log decays g (…, C, K')."""

    def __init__(self, xp: Namespace, g: Array, base: int) -> None:
        self.xp, self.g, self.base, self.chunk = xp, g, base, g.shape[-2]
        none = xp.zeros_like(g)
        self.levels = [Stretches(1, g, none, none, g)]
        while self.levels[-1].size < self.chunk:
            self.levels.append(self._doubled(self.levels[-1]))
        last = self.levels[-1]
        # The stretches of the whole chunk as factors: the decay to a step, to before it, behind it, over all.
        factors = (xp.exp(last.upto), xp.exp(last.before), xp.exp(last.after), xp.exp(last.whole))
        self.top = Stretches(self.chunk, *factors)
        # Rows of the blocks inside which the small levels are whole products with the other halves masked. On a matrix
        # unit a product of a few rows costs as much as one of sixteen, and there would be many more of them; on a
        # processor the halves are half the memory traffic.
        small = SMALL if base == 1 and prefers_breadth(xp, g) else 1
        self.block = max(base, min(small, self.chunk))
        self.small = [level for level in self.levels if base <= level.size < self.block]
        # The levels above, at which two halves meet in a product of their own.
        self.steps = [level for level in self.levels if self.block <= level.size < self.chunk]
        self.pairwise = self._pairwise() if base > 1 else None

    def _doubled(self, level: Stretches) -> Stretches:
        xp, size = self.xp, level.size
        left, right = (xp.expand_dims(w[..., 0, :], axis=-2) for w in halves(xp, level.whole, 1))
        upto, before, after = (halves(xp, x, size) for x in (level.upto, level.before, level.after))
        return Stretches(
            2 * size,
            whole_of(xp, upto[0], upto[1] + left),
            whole_of(xp, before[0], before[1] + left),
            whole_of(xp, after[0] + right, after[1]),
            (left + right)[..., 0, :],
        )

    def rights(self, level: Stretches, rows: int) -> Array:
        """(rows, 1), true in right halves."""
        steps = self.xp.arange(rows, device=device(self.g))
        return self.xp.reshape((steps // level.size) % 2 == 1, (rows, 1))

    def here(self, level: Stretches) -> Array:
        """(block, block), true for a row in a right half and a column in the left half beside it."""
        xp = self.xp
        right = self.rights(level, self.block)
        steps = xp.arange(self.block, device=device(self.g)) // (2 * level.size)
        beside = xp.reshape(steps, (-1, 1)) == xp.reshape(steps, (1, -1))
        return beside & right & ~xp.matrix_transpose(right)

    def rows(self, x: Array) -> Array:
        """(…, C, K) as blocks (…, C / block, block, K)."""
        return self.xp.reshape(x, (*x.shape[:-2], self.chunk // self.block, self.block, x.shape[-1]))

    def _pairwise(self) -> Array:
        """exp(g_{j+1} + … + g_i) for i ≥ j and zero above, (…, C / base, base, base, K')."""
        xp = self.xp
        g = xp.reshape(self.g, (*self.g.shape[:-2], self.chunk // self.base, self.base, 1, self.g.shape[-1]))
        inside = self._triangle(-1)
        terms = xp.where(inside, g, xp.zeros_like(g))
        return xp.where(self._triangle(0), xp.exp(xp.cumulative_sum(terms, axis=-3)), xp.zeros_like(terms))

    def _triangle(self, offset: int) -> Array:
        """(base, base, 1), true where j ≤ i + offset."""
        xp = self.xp
        rows = xp.arange(self.base, device=device(self.g))
        return xp.reshape(rows, (1, -1, 1)) <= xp.reshape(rows, (-1, 1, 1)) + offset

    def between(self, exclusive: bool) -> Array:
        """The pairwise decays for queries of one kind."""
        xp, inclusive = self.xp, self.pairwise
        assert inclusive is not None
        if not exclusive:
            return inclusive
        return xp.concat([xp.zeros_like(inclusive[..., :1, :, :]), inclusive[..., :-1, :, :]], axis=-3)


def _shared(decays: Decays, keys: Sequence[Array]) -> bool:
    """Whether one decay serves several channels, so that it can be put on the scores afterwards."""
    return decays.g.shape[-1] == 1 and keys[0].shape[-1] != 1


def _kernels(decays: Decays) -> tuple[Array, Array]:
    """The decay of every pair of steps (…, C, C), inclusive and exclusive, for decays shared by all channels."""
    ones = decays.xp.ones_like(decays.g)
    (inclusive,), (exclusive,) = scores(decays, [(ones, False), (ones, True)], [ones])
    return inclusive, exclusive


def scores(decays: Decays, queries: Sequence[Query], keys: Sequence[Array]) -> list[list[Array]]:
    """A (…, C, C) for every query and key; zero above the diagonal, and on it for exclusive queries."""
    xp = decays.xp
    if _shared(decays, keys):
        kernels = _kernels(decays)
        return [[q @ xp.matrix_transpose(k) * kernels[exclusive] for k in keys] for q, exclusive in queries]
    out = [[_base_block(decays, q, exclusive, k) for k in keys] for q, exclusive in queries]
    for level in decays.small:
        columns = [_block_left(decays, level, k) for k in keys]
        for i, (q, exclusive) in enumerate(queries):
            rows = _block_right(decays, level, q, exclusive)
            for j, column in enumerate(columns):
                product = rows @ xp.matrix_transpose(column)
                out[i][j] = out[i][j] + xp.where(decays.here(level), product, xp.zeros_like(product))
    for level in decays.steps:
        lefts = [_left(xp, level, k)[0] for k in keys]
        for i, (q, exclusive) in enumerate(queries):
            rows = _right(xp, level, q, exclusive)[0]
            for j, columns in enumerate(lefts):
                upper, lower = _blocks(xp, out[i][j])
                block = rows @ xp.matrix_transpose(columns)
                first = xp.concat([upper, xp.zeros_like(block)], axis=-1)
                out[i][j] = xp.concat([first, xp.concat([block, lower], axis=-1)], axis=-2)
    return [[a[..., 0, :, :] for a in row] for row in out]


def _blocks(xp: Namespace, a: Array) -> tuple[Array, Array]:
    """Every second of the diagonal blocks (…, n, s, s)."""
    a = xp.reshape(a, (*a.shape[:-3], a.shape[-3] // 2, 2, *a.shape[-2:]))
    return a[..., 0, :, :], a[..., 1, :, :]


def _block_factor(decays: Decays, level: Stretches, exclusive: bool) -> Array:
    """The decays of right rows up to them and of left ones behind them, by blocks."""
    xp = decays.xp
    right = decays.rights(level, decays.chunk)
    return decays.rows(xp.exp(xp.where(right, level.before if exclusive else level.upto, level.after)))


def _block_left(decays: Decays, level: Stretches, k: Array) -> Array:
    k = decays.rows(k)
    return decays.xp.where(
        decays.rights(level, decays.block), decays.xp.zeros_like(k), k * _block_factor(decays, level, False)
    )


def _block_right(decays: Decays, level: Stretches, q: Array, exclusive: bool) -> Array:
    q = decays.rows(q)
    return decays.xp.where(
        decays.rights(level, decays.block), q * _block_factor(decays, level, exclusive), decays.xp.zeros_like(q)
    )


def _left(xp: Namespace, level: Stretches, k: Array) -> tuple[Array, Array]:
    """Left keys with the decay behind them, and that decay."""
    factor = xp.exp(halves(xp, level.after, level.size)[0])
    return halves(xp, k, level.size)[0] * factor, factor


def _right(xp: Namespace, level: Stretches, q: Array, exclusive: bool) -> tuple[Array, Array]:
    """Right queries with the decay up to them, and that decay."""
    factor = xp.exp(halves(xp, level.before if exclusive else level.upto, level.size)[1])
    return halves(xp, q, level.size)[1] * factor, factor


def _base_rows(decays: Decays, x: Array) -> Array:
    return decays.xp.reshape(x, (*x.shape[:-2], decays.chunk // decays.base, decays.base, x.shape[-1]))


def _base_block(decays: Decays, q: Array, exclusive: bool, k: Array) -> Array:
    """The diagonal blocks (…, C / base, base, base): pair by pair."""
    xp = decays.xp
    if decays.base == 1:
        own = decays.rows(xp.zeros_like(q[..., :1]) if exclusive else xp.sum(q * k, axis=-1, keepdims=True))
        return xp.where(_identity(decays), own, xp.zeros_like(own))
    rows, columns = xp.expand_dims(_base_rows(decays, q), axis=-2), xp.expand_dims(_base_rows(decays, k), axis=-3)
    return xp.sum(rows * columns * decays.between(exclusive), axis=-1)


@dataclass
class Outside:
    """Cotangents of the whole chunk's stretches that reach the decays by other ways than the scores; None is zero."""

    upto: Array | None = None
    before: Array | None = None
    after: Array | None = None
    whole: Array | None = None


def scores_adjoint(
    decays: Decays,
    queries: Sequence[Query],
    keys: Sequence[Array],
    cotangents: Sequence[Sequence[Array]],
    outside: Outside,
) -> tuple[list[Array], list[Array], Array]:
    """Cotangents of the queries, of the keys, and of g, from those of the scores and of the chunk's stretches."""
    xp = decays.xp
    if _shared(decays, keys):
        return _shared_adjoint(decays, queries, keys, cotangents, outside)
    zero = xp.zeros_like(decays.g)
    of_queries = [xp.zeros_like(q) for q, _ in queries]
    of_keys = [xp.zeros_like(k) for k in keys]
    upto, before, after = (zero if x is None else x for x in (outside.upto, outside.before, outside.after))
    whole = xp.zeros_like(decays.levels[-1].whole) if outside.whole is None else outside.whole
    for level in reversed(decays.levels[:-1]):
        size = level.size
        # A right half's stretches hold the left half's sum, and the other way round.
        rows = xp.sum(halves(xp, upto + before, size)[1], axis=-2)
        columns = xp.sum(halves(xp, after, size)[0], axis=-2)
        both = xp.stack([whole + rows, whole + columns], axis=-2)
        whole = xp.reshape(both, (*both.shape[:-3], 2 * both.shape[-3], both.shape[-1]))
        if size < decays.base:
            continue
        if size < decays.block:
            columns, here = [_block_left(decays, level, k) for k in keys], decays.here(level)
            for i, (q, exclusive) in enumerate(queries):
                row, factor = _block_right(decays, level, q, exclusive), _block_factor(decays, level, exclusive)
                for j, column in enumerate(columns):
                    given = _diagonal_blocks(xp, cotangents[i][j], decays.block)
                    given = xp.where(here, given, xp.zeros_like(given))
                    of_row, of_column = given @ column, xp.matrix_transpose(given) @ row
                    of_queries[i] = of_queries[i] + xp.reshape(of_row * factor, q.shape)
                    behind = _block_factor(decays, level, False) if exclusive else factor
                    of_keys[j] = of_keys[j] + xp.reshape(of_column * behind, q.shape)
                    part = xp.reshape(of_row * row, q.shape)
                    upto, before = (upto, before + part) if exclusive else (upto + part, before)
                    after = after + xp.reshape(of_column * column, q.shape)
            continue
        lefts = [_left(xp, level, k) for k in keys]
        of_lefts = [xp.zeros_like(left) for left, _ in lefts]
        for i, (q, exclusive) in enumerate(queries):
            right, factor = _right(xp, level, q, exclusive)
            of_right = xp.zeros_like(right)
            for j, (left, _) in enumerate(lefts):
                block = _off_diagonal(xp, cotangents[i][j], size)
                of_right = of_right + block @ left
                of_lefts[j] = of_lefts[j] + xp.matrix_transpose(block) @ right
            of_queries[i] = of_queries[i] + _placed(xp, of_right * factor, right=True)
            part = _placed(xp, of_right * right, right=True)
            upto, before = (upto, before + part) if exclusive else (upto + part, before)
        for j, (left, factor) in enumerate(lefts):
            of_keys[j] = of_keys[j] + _placed(xp, of_lefts[j] * factor, right=False)
            after = after + _placed(xp, of_lefts[j] * left, right=False)
    of_g = upto + whole
    for i, (q, exclusive) in enumerate(queries):
        for j, k in enumerate(keys):
            found = _base_adjoint(decays, q, exclusive, k, cotangents[i][j])
            if found is not None:
                of_queries[i], of_keys[j] = of_queries[i] + found[0], of_keys[j] + found[1]
                of_g = of_g if found[2] is None else of_g + found[2]
    return of_queries, of_keys, of_g


def _shared_adjoint(
    decays: Decays,
    queries: Sequence[Query],
    keys: Sequence[Array],
    cotangents: Sequence[Sequence[Array]],
    outside: Outside,
) -> tuple[list[Array], list[Array], Array]:
    xp = decays.xp
    kernels = _kernels(decays)
    of_queries, of_keys = [xp.zeros_like(q) for q, _ in queries], [xp.zeros_like(k) for k in keys]
    of_kernels = [xp.zeros_like(kernels[0]), xp.zeros_like(kernels[1])]
    for i, (q, exclusive) in enumerate(queries):
        for j, k in enumerate(keys):
            plain = cotangents[i][j] * kernels[exclusive]
            of_queries[i] = of_queries[i] + plain @ k
            of_keys[j] = of_keys[j] + xp.matrix_transpose(plain) @ q
            of_kernels[exclusive] = of_kernels[exclusive] + cotangents[i][j] * (q @ xp.matrix_transpose(k))
    ones = xp.ones_like(decays.g)
    both = [(ones, False), (ones, True)]
    _, _, of_g = scores_adjoint(decays, both, [ones], [[c] for c in of_kernels], outside)
    return of_queries, of_keys, of_g


def _off_diagonal(xp: Namespace, a: Array, size: int) -> Array:
    """The blocks (…, C / 2size, size, size) right of a border in rows and left of it in columns."""
    count = a.shape[-1] // (2 * size)
    blocks = [a[..., (2 * n + 1) * size : (2 * n + 2) * size, 2 * n * size : (2 * n + 1) * size] for n in range(count)]
    return xp.stack(blocks, axis=-3)


def _placed(xp: Namespace, half: Array, *, right: bool) -> Array:
    """Rows of all blocks, zero in the other half."""
    none = xp.zeros_like(half)
    return whole_of(xp, none, half) if right else whole_of(xp, half, none)


def _base_adjoint(
    decays: Decays, q: Array, exclusive: bool, k: Array, cotangent: Array
) -> tuple[Array, Array, Array | None] | None:
    """What the diagonal blocks give to q, k and g."""
    xp, base = decays.xp, decays.base
    if base == 1:
        if exclusive:
            return None
        own = _diagonal(xp, cotangent)
        return own * k, own * q, None
    given = xp.expand_dims(_diagonal_blocks(xp, cotangent, base), axis=-1)
    decayed = given * decays.between(exclusive)
    rows, columns = xp.expand_dims(_base_rows(decays, q), axis=-2), xp.expand_dims(_base_rows(decays, k), axis=-3)
    of_q = xp.reshape(xp.sum(decayed * columns, axis=-2), q.shape)
    of_k = xp.reshape(xp.sum(decayed * rows, axis=-3), k.shape)
    of_sums = decayed * rows * columns
    if decays.g.shape[-1] == 1:
        of_sums = xp.sum(of_sums, axis=-1, keepdims=True)
    if exclusive:
        of_sums = xp.concat([of_sums[..., 1:, :, :], xp.zeros_like(of_sums[..., :1, :, :])], axis=-3)
    # Step l lies in the stretch of every i ≥ l and j < l.
    later = xp.flip(xp.cumulative_sum(xp.flip(of_sums, axis=-3), axis=-3), axis=-3)
    of_g = xp.sum(xp.where(decays._triangle(-1), later, xp.zeros_like(later)), axis=-2)
    return of_q, of_k, xp.reshape(of_g, decays.g.shape)


def _diagonal_blocks(xp: Namespace, a: Array, size: int) -> Array:
    """The blocks (…, C / size, size, size) on the diagonal."""
    return xp.stack([a[..., n : n + size, n : n + size] for n in range(0, a.shape[-1], size)], axis=-3)


def _identity(decays: Decays) -> Array:
    """(block, block), true on the diagonal."""
    return decays.xp.eye(decays.block, device=device(decays.g)) > 0.0


def _diagonal(xp: Namespace, a: Array) -> Array:
    """The diagonal of (…, C, C) as a column (…, C, 1)."""
    eye = xp.eye(a.shape[-1], dtype=a.dtype, device=device(a))
    return xp.sum(a * eye, axis=-1, keepdims=True)
