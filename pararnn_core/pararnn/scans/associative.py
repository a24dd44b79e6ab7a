"""Scans by a tree: every prefix of an associative operation in O(T) work and O(log T) depth.

The tree here is the odd-even one: join neighbours, solve the half-length problem, and step once from its
results to the entries in between. It works for any length, and it is written for an *action*: elements that
act on a state. Prefix sums and products are the special case in which the state is an element itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .checks import namespace_of, normalised_axis

Array = Any
Arrays = tuple[Array, ...]

__all__ = ["associative_scan"]


def associative_scan(
    combine: Callable[[Arrays, Arrays], Arrays],
    elements: Arrays,
    *,
    axis: int,
    reverse: bool = False,
) -> Arrays:
    """Give all running combinations of a sequence under an associative operation.

    With ``e_t`` the element at time t (one slice from each array of the tuple)::

        p_0 = e_0,        p_t = combine(p_{t-1}, e_t)          reverse=False
        p_{T-1} = e_{T-1},  p_t = combine(p_{t+1}, e_t)        reverse=True

    So the first operand is always what has been gathered so far and the second is what comes next on the
    walk; the operation need not commute. A tree evaluates this in O(T) work and O(log T) depth, for every T.

    Parameters
    ----------
    combine : callable
        Takes two tuples of arrays and gives one, slice by slice along ``axis``: it is called with many slices
        at once, and must treat each on its own. It has to be associative.
    elements : tuple of arrays
        Arrays of one namespace with the same length T along ``axis``; the other axes and the dtypes are free.
    axis : int
        The axis of time, the same number for all arrays; it may be negative if all have as many axes.
    reverse : bool
        Walk from the last element to the first.

    Returns
    -------
    tuple of arrays
        The prefixes, shaped like ``elements`` (T = 0 and T = 1 give the elements back, as copies).

    Raises
    ------
    TypeError
        Arrays of different namespaces, or something that is no array.
    ValueError
        No arrays, different lengths along ``axis``, or an axis that an array does not have.

    Notes
    -----
    Source: G. E. Blelloch, "Prefix sums and their applications", CMU-CS-90-190, 1990.

    Examples
    --------
    >>> import numpy as np
    >>> def join(left, right):  # the maps v -> a v + b, left applied first
    ...     return right[0] * left[0], right[0] * left[1] + right[1]
    >>> a, b = np.asarray([1.0, 1.5, 0.8, 2.0]), np.asarray([1.0, -1.0, 0.5, 2.0])
    >>> print(associative_scan(join, (a, b), axis=0)[1])
    [1.  0.5 0.9 3.8]
    """
    elements = tuple(elements)
    if not elements:
        raise ValueError("associative_scan wants at least one array in elements; the tuple is empty.")
    xp = namespace_of("associative_scan", **{f"elements[{i}]": array for i, array in enumerate(elements)})
    positions = {normalised_axis("associative_scan", axis, array.ndim) for array in elements}
    if len(positions) > 1:
        raise ValueError(
            "associative_scan wants axis to name the same position in every array; a negative axis does not "
            f"for arrays of {', '.join(str(array.ndim) for array in elements)} axes. "
            "Pass it as a positive number."
        )
    axis = positions.pop()
    lengths = [array.shape[axis] for array in elements]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"associative_scan wants one length along axis {axis}; the arrays have lengths {lengths}."
        )
    if lengths[0] < 2:
        return tuple(xp.astype(array, array.dtype, copy=True) for array in elements)
    first, rest = split_first(elements, axis, reverse)
    return tree_states(xp, combine, combine, rest, first, axis=axis, reverse=reverse)


def tree_states(
    xp: Any,
    compose: Callable[[Arrays, Arrays], Arrays],
    apply: Callable[[Arrays, Arrays], Arrays],
    elements: Arrays,
    start: Arrays,
    *,
    axis: int,
    reverse: bool = False,
) -> Arrays:
    """Give all states that a sequence of n elements makes out of a start, the start included, by a tree.

    ``s_{-1} = start`` and ``s_t = apply(s_{t-1}, e_t)``; ``compose(e, f)`` is the element that acts as e and
    then f. Only elements are composed and only states are applied to, so a state costs what a state costs: a
    dense affine scan needs T matrix products in all and otherwise matrix times vector. ``start`` has length
    one along ``axis``, and the result has n + 1 entries there: the start first, or last where ``reverse``
    walks down from the end.
    """
    n = elements[0].shape[axis]
    if n == 0:
        return start
    paired, half = n - n % 2, (n + 1) // 2
    if reverse:  # the walk begins at the upper end, so a leftover element is the lowest one
        early, late = slice(n - paired + 1, n, 2), slice(n - paired, n, 2)
        lone, before = slice((n - 1) % 2, n, 2), slice(n // 2 + 1 - half, n // 2 + 1)
    else:
        early, late = slice(0, paired, 2), slice(1, paired, 2)
        lone, before = slice(0, n, 2), slice(0, half)
    outer = start  # every second state
    if n > 1:
        joined = compose(cut(elements, early, axis), cut(elements, late, axis))
        outer = tree_states(xp, compose, apply, joined, start, axis=axis, reverse=reverse)
        del joined
    inner = apply(cut(outer, before, axis), cut(elements, lone, axis))
    return tuple(_interleave(xp, o, i, axis, reverse) for o, i in zip(outer, inner, strict=True))


def cut(arrays: Arrays, part: slice, axis: int) -> Arrays:
    """Take the same stretch along one axis from every array."""
    return tuple(array[(slice(None),) * axis + (part, ...)] for array in arrays)


def split_first(arrays: Arrays, axis: int, reverse: bool) -> tuple[Arrays, Arrays]:
    """Part the entry with which the walk begins (kept as a length of one) from the others."""
    n = arrays[0].shape[axis]
    first, rest = (slice(n - 1, n), slice(0, n - 1)) if reverse else (slice(0, 1), slice(1, n))
    return cut(arrays, first, axis), cut(arrays, rest, axis)


def _interleave(xp: Any, outer: Array, inner: Array, axis: int, reverse: bool) -> Array:
    """Merge outer states, which hold the start, with inner ones; each inner state follows an outer one."""
    k = inner.shape[axis]
    spare = outer.shape[axis] - k  # 1 where the walk ends on an outer state, else 0
    (paired,) = cut((outer,), slice(spare, None) if reverse else slice(0, k), axis)
    both = xp.stack((inner, paired) if reverse else (paired, inner), axis=axis + 1)
    merged = xp.reshape(both, (*inner.shape[:axis], 2 * k, *inner.shape[axis + 1 :]))
    if not spare:
        return merged
    (last,) = cut((outer,), slice(0, 1) if reverse else slice(k, None), axis)
    return xp.concat((last, merged) if reverse else (merged, last), axis=axis)
