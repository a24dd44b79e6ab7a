"""Affine recurrences ``y_t = J_t y_{t-1} + r_t`` over time, for diagonal, small-block and dense ``J_t``.

One scheme serves the three: an affine map followed by another is affine again,

    (J_l, r_l) then (J_r, r_r)  =  (J_r J_l,  J_r r_l + r_r),

and this does not commute. A structure only says how its Jacobians multiply each other and act on a state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .checks import check_method, dtypes_of, namespace_of, normalised_axis
from .recurrence import all_states

Array = Any

__all__ = [
    "reverse_scan_block2",
    "reverse_scan_block4",
    "reverse_scan_dense",
    "reverse_scan_diag",
    "scan_block",
    "scan_block2",
    "scan_block4",
    "scan_dense",
    "scan_diag",
]


class Structure(NamedTuple):
    """How the Jacobians of one shape multiply (later, earlier) and act (jac, state)."""

    multiply: Callable[[Any, Array, Array], Array]
    act: Callable[[Any, Array, Array], Array]


def scan_diag(
    jac: Array,
    residual: Array,
    *,
    initial: Array | None = None,
    reverse: bool = False,
    axis: int = 1,
    method: str = "assoc",
) -> Array:
    """Solve a channelwise linear recurrence for all times at once.

    ::

        y_t = jac_t * y_{t-1} + residual_t,   y_{-1} = initial      reverse=False
        y_t = jac_t * y_{t+1} + residual_t,   y_T    = initial      reverse=True

    Reversed, ``jac`` is still read at the *same* t as ``residual``. The adjoint of the forward recurrence
    uses ``J_{t+1}`` instead: pass ``jac`` moved down by one step (its first entry dropped, anything
    appended).

    Parameters
    ----------
    jac : array
        Shape of ``residual``, or one that broadcasts to it (axes of length one stay so inside the tree).
    residual : array, usually (B, T, D)
        Any shape that has time on ``axis``.
    initial : array, optional
        The state before the walk begins, shaped like ``residual`` without ``axis`` or broadcasting to that;
        cast to the result's dtype. None means zero, and then the factor of the first step is not read at all:
        an infinity or NaN there has nothing to act on.
    reverse : bool
        Walk from the last time to the first.
    axis : int
        Where time is.
    method : {"assoc", "seq"}
        A tree of O(T) work and O(log T) depth, or the plain loop.

    Returns
    -------
    array
        ``y``, shaped like ``residual``, of dtype ``result_type(jac, residual)``. float16 and bfloat16 results
        are computed in float32. Empty inputs give empty results. The inputs are left as they are.

    Raises
    ------
    TypeError
        Arrays from different libraries, or integer or boolean dtypes.
    ValueError
        Shapes that do not fit, an axis that is not there, or an unknown method.

    Notes
    -----
    A NaN that is read at time t makes every later state of its channel NaN and changes no earlier one. The
    tree multiplies Jacobians before it meets a state. Where their product over a stretch leaves the dtype's
    range, it can therefore give an infinity or NaN for a state that the loop still holds, or NaN for one
    that the loop makes infinite; ``method="seq"`` is free of this. No quotient is formed, so vanishing
    products do no harm.

    Source: G. E. Blelloch, "Prefix sums and their applications", CMU-CS-90-190, 1990, section on recurrences.

    Examples
    --------
    >>> import numpy as np
    >>> a = np.asarray([1.0, 1.5, 0.8, 2.0])
    >>> b = np.asarray([1.0, -1.0, 0.5, 2.0])
    >>> print(scan_diag(a, b, axis=0))
    [1.  0.5 0.9 3.8]
    >>> print(scan_diag(a, b, axis=0, reverse=True))
    [3.15 2.15 2.1  2.  ]
    """
    name = "scan_diag"
    xp, dtypes = _prepared(name, jac, residual, initial, method)
    axis = normalised_axis(name, axis, residual.ndim)
    jac = _spread(name, "jac", jac, residual.shape)
    if jac.shape[axis] != residual.shape[axis]:  # one factor for all times
        jac = xp.broadcast_to(jac, (*jac.shape[:axis], residual.shape[axis], *jac.shape[axis + 1 :]))
    if initial is not None:
        initial = _spread(name, "initial", initial, residual.shape[:axis] + residual.shape[axis + 1 :])
    return _solve(xp, DIAG, jac, residual, initial, dtypes, method, reverse, axis)


def scan_block(
    jac: Array,
    residual: Array,
    *,
    initial: Array | None = None,
    reverse: bool = False,
    method: str = "assoc",
) -> Array:
    """Solve a linear recurrence whose channels each hold S coupled slots.

    ::

        y_t[s] = sum_k jac_t[s, k] * y_{t-1}[k] + residual_t[s],   y_{-1} = initial

    elementwise over channels; with ``reverse=True`` ``y_{t+1}`` takes the place of ``y_{t-1}`` and ``y_T`` is
    ``initial``, with ``jac`` read at the same t (see :func:`scan_diag`, also for ``method`` and the limits of
    range). The adjoint needs the transpose over the two slot axes besides the move by one step.

    Parameters
    ----------
    jac : array (B, T, S_out, S_in, D)
    residual : array (B, T, S, D)
    initial : array (B, S, D), optional
        None means zero, and the first step's ``jac`` is then not read.
    reverse : bool
    method : {"assoc", "seq"}

    Returns
    -------
    array (B, T, S, D)
        Of dtype ``result_type(jac, residual)``; half precision is computed in float32.

    Raises
    ------
    TypeError
        Arrays from different libraries, or integer or boolean dtypes.
    ValueError
        Shapes that do not fit, or an unknown method.

    Notes
    -----
    The sums over slots are written out (meant for S = 2, 3, 4), so a NaN stays in its channel.

    Source: G. E. Blelloch, "Prefix sums and their applications", CMU-CS-90-190, 1990, section on recurrences.

    Examples
    --------
    >>> import numpy as np
    >>> jac = np.reshape(np.asarray([[1.0, 1.0], [1.0, 0.0]] * 6), (1, 6, 2, 2, 1))  # Fibonacci's step
    >>> y = scan_block(jac, np.zeros((1, 6, 2, 1)), initial=np.asarray([[[1.0], [0.0]]]))
    >>> print(y[0, :, 0, 0])
    [ 1.  2.  3.  5.  8. 13.]
    """
    return _scan_block("scan_block", None, jac, residual, initial, reverse, method)


def scan_block2(
    jac: Array,
    residual: Array,
    *,
    initial: Array | None = None,
    reverse: bool = False,
    method: str = "assoc",
) -> Array:
    """Solve a recurrence of two slots per channel: :func:`scan_block`, with a ValueError for any other S.

    ``y_t[s] = sum_k jac_t[s, k] * y_{t-1}[k] + residual_t[s]`` with jac (B, T, 2, 2, D) and
    residual (B, T, 2, D); dtypes, errors and source as for :func:`scan_block`.

    Examples
    --------
    >>> import numpy as np
    >>> turn = np.reshape(np.asarray([[0.0, -1.0], [1.0, 0.0]] * 3), (1, 3, 2, 2, 1))
    >>> y = scan_block2(turn, np.ones((1, 3, 2, 1)))
    >>> print(y[0, :, :, 0].tolist())
    [[1.0, 1.0], [0.0, 2.0], [-1.0, 1.0]]
    """
    return _scan_block("scan_block2", 2, jac, residual, initial, reverse, method)


def scan_block4(
    jac: Array,
    residual: Array,
    *,
    initial: Array | None = None,
    reverse: bool = False,
    method: str = "assoc",
) -> Array:
    """Solve a recurrence of four slots per channel: :func:`scan_block`, with a ValueError for any other S.

    ``y_t[s] = sum_k jac_t[s, k] * y_{t-1}[k] + residual_t[s]`` with jac (B, T, 4, 4, D) and
    residual (B, T, 4, D); dtypes, errors and source as for :func:`scan_block`.

    Examples
    --------
    >>> import numpy as np
    >>> shift = np.reshape(np.stack([np.eye(4, k=-1)] * 3), (1, 3, 4, 4, 1))  # slot s takes slot s - 1
    >>> start = np.reshape(np.arange(1.0, 5.0), (1, 4, 1))
    >>> y = scan_block4(shift, np.zeros((1, 3, 4, 1)), initial=start)
    >>> print(y[0, :, :, 0].tolist())
    [[0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 1.0, 2.0], [0.0, 0.0, 0.0, 1.0]]
    """
    return _scan_block("scan_block4", 4, jac, residual, initial, reverse, method)


def scan_dense(
    jac: Array,
    residual: Array,
    *,
    initial: Array | None = None,
    reverse: bool = False,
    method: str = "assoc",
) -> Array:
    """Solve a linear recurrence with a full matrix per step.

    ::

        y_t = jac_t @ y_{t-1} + residual_t,   y_{-1} = initial

    With ``reverse=True`` ``y_{t+1}`` takes the place of ``y_{t-1}`` and ``y_T`` is ``initial``, with ``jac``
    read at the same t (see :func:`scan_diag`, also for ``method`` and the limits of range).

    Parameters
    ----------
    jac : array (B, T, N_out, N_in)
    residual : array (B, T, N)
    initial : array (B, N), optional
        None means zero, and the first step's ``jac`` is then not read.
    reverse : bool
    method : {"assoc", "seq"}
        The tree makes about T products of two N x N matrices; the loop makes none and only applies them.

    Returns
    -------
    array (B, T, N)
        Of dtype ``result_type(jac, residual)``; half precision is computed in float32.

    Raises
    ------
    TypeError
        Arrays from different libraries, or integer or boolean dtypes.
    ValueError
        Shapes that do not fit, or an unknown method.

    Notes
    -----
    Source: G. E. Blelloch, "Prefix sums and their applications", CMU-CS-90-190, 1990, section on recurrences.

    Examples
    --------
    >>> import numpy as np
    >>> jac = np.asarray([[[[1.0, 1.0], [0.0, 1.0]]] * 4])  # position gains velocity
    >>> kick = np.asarray([[[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, -1.0]]])
    >>> print(scan_dense(jac, kick)[0].tolist())
    [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [3.0, 0.0]]
    """
    name = "scan_dense"
    xp, dtypes = _prepared(name, jac, residual, initial, method)
    if residual.ndim != 3 or tuple(jac.shape) != (*residual.shape, residual.shape[-1]):
        raise ValueError(
            f"{name} wants jac (B, T, N, N) and residual (B, T, N); "
            f"came jac {tuple(jac.shape)} and residual {tuple(residual.shape)}."
        )
    _check_initial(name, initial, residual.shape)
    return _solve(xp, DENSE, jac, residual, initial, dtypes, method, reverse, 1)


def reverse_scan_diag(
    jac: Array, residual: Array, *, initial: Array | None = None, axis: int = 1, method: str = "assoc"
) -> Array:
    """Solve ``y_t = jac_t * y_{t+1} + residual_t``: :func:`scan_diag` with ``reverse=True``.

    Shapes, dtypes, errors and source as there; ``initial`` is ``y_T``.

    Examples
    --------
    >>> import numpy as np
    >>> print(reverse_scan_diag(np.full((3,), 0.5), np.ones(3), axis=0))
    [1.75 1.5  1.  ]
    """
    return scan_diag(jac, residual, initial=initial, reverse=True, axis=axis, method=method)


def reverse_scan_block2(
    jac: Array, residual: Array, *, initial: Array | None = None, method: str = "assoc"
) -> Array:
    """Solve the two-slot recurrence from the end, ``y_t = jac_t y_{t+1} + residual_t``.

    This is :func:`scan_block2` with ``reverse=True``; shapes, dtypes, errors and source as there.

    Examples
    --------
    >>> import numpy as np
    >>> turn = np.reshape(np.asarray([[0.0, -1.0], [1.0, 0.0]] * 3), (1, 3, 2, 2, 1))
    >>> print(reverse_scan_block2(turn, np.ones((1, 3, 2, 1)))[0, :, :, 0].tolist())
    [[-1.0, 1.0], [0.0, 2.0], [1.0, 1.0]]
    """
    return scan_block2(jac, residual, initial=initial, reverse=True, method=method)


def reverse_scan_block4(
    jac: Array, residual: Array, *, initial: Array | None = None, method: str = "assoc"
) -> Array:
    """Solve the four-slot recurrence from the end, ``y_t = jac_t y_{t+1} + residual_t``.

    This is :func:`scan_block4` with ``reverse=True``; shapes, dtypes, errors and source as there.

    Examples
    --------
    >>> import numpy as np
    >>> shift = np.reshape(np.stack([np.eye(4, k=-1)] * 2), (1, 2, 4, 4, 1))
    >>> start = np.reshape(np.arange(1.0, 5.0), (1, 4, 1))
    >>> y = reverse_scan_block4(shift, np.zeros((1, 2, 4, 1)), initial=start)
    >>> print(y[0, :, :, 0].tolist())
    [[0.0, 0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0]]
    """
    return scan_block4(jac, residual, initial=initial, reverse=True, method=method)


def reverse_scan_dense(
    jac: Array, residual: Array, *, initial: Array | None = None, method: str = "assoc"
) -> Array:
    """Solve ``y_t = jac_t @ y_{t+1} + residual_t``: :func:`scan_dense` with ``reverse=True``.

    Shapes, dtypes, errors and source as there; ``initial`` is ``y_T``.

    Examples
    --------
    >>> import numpy as np
    >>> jac = np.asarray([[[[1.0, 1.0], [0.0, 1.0]]] * 3])
    >>> print(reverse_scan_dense(jac, np.zeros((1, 3, 2)), initial=np.asarray([[0.0, 1.0]]))[0].tolist())
    [[3.0, 1.0], [2.0, 1.0], [1.0, 1.0]]
    """
    return scan_dense(jac, residual, initial=initial, reverse=True, method=method)


def _scan_block(
    name: str,
    slots: int | None,
    jac: Array,
    residual: Array,
    initial: Array | None,
    reverse: bool,
    method: str,
) -> Array:
    xp, dtypes = _prepared(name, jac, residual, initial, method)
    shape = tuple(residual.shape)
    fits = residual.ndim == 4 and tuple(jac.shape) == (*shape[:3], shape[2], shape[3])
    if not fits or slots not in (None, shape[2]):
        s = "S" if slots is None else slots
        raise ValueError(
            f"{name} wants jac (B, T, {s}, {s}, D) and residual (B, T, {s}, D); "
            f"came jac {tuple(jac.shape)} and residual {shape}."
        )
    _check_initial(name, initial, shape)
    return _solve(xp, BLOCK, jac, residual, initial, dtypes, method, reverse, 1)


def _prepared(
    name: str, jac: Array, residual: Array, initial: Array | None, method: str
) -> tuple[Any, tuple[Any, Any]]:
    check_method(name, method)
    xp = namespace_of(name, jac=jac, residual=residual, initial=initial)
    return xp, dtypes_of(name, xp, jac=jac, residual=residual, initial=initial)


def _check_initial(name: str, initial: Array | None, shape: tuple[int, ...]) -> None:
    wanted = (shape[0], *shape[2:])
    if initial is not None and tuple(initial.shape) != wanted:
        raise ValueError(
            f"{name} wants initial of shape {wanted} for residual {tuple(shape)}; "
            f"came {tuple(initial.shape)}."
        )


def _spread(name: str, which: str, array: Array, shape: tuple[int, ...]) -> Array:
    """Give an array as many axes as `shape` has, after checking that it broadcasts to that shape."""
    came = tuple(array.shape)
    padded = (1,) * (len(shape) - len(came)) + came
    if len(padded) != len(shape) or any(c not in (1, s) for c, s in zip(padded, shape, strict=True)):
        raise ValueError(f"{name} wants {which} of a shape that broadcasts to {tuple(shape)}; came {came}.")
    return array[(None,) * (len(shape) - len(came)) + (...,)]


def _solve(
    xp: Any,
    structure: Structure,
    jac: Array,
    residual: Array,
    initial: Array | None,
    dtypes: tuple[Any, Any],
    method: str,
    reverse: bool,
    axis: int,
) -> Array:
    """Run one affine recurrence of any structure."""

    def apply(state: Array, element: tuple[Array, Array]) -> Array:
        return structure.act(xp, element[0], state) + element[1]

    def compose(early: tuple[Array, Array], late: tuple[Array, Array]) -> tuple[Array, Array]:
        return structure.multiply(xp, late[0], early[0]), apply(early[1], late)

    return all_states(
        xp,
        compose,
        apply,
        (jac, residual),
        initial,
        dtypes=dtypes,
        method=method,
        reverse=reverse,
        axis=axis,
    )


def _times(xp: Any, left: Array, right: Array) -> Array:
    return left * right


def _block_multiply(xp: Any, late: Array, early: Array) -> Array:
    total = late[..., :, 0:1, :] * early[..., 0:1, :, :]
    for s in range(1, early.shape[-2]):
        total = total + late[..., :, s : s + 1, :] * early[..., s : s + 1, :, :]
    return total


def _block_act(xp: Any, jac: Array, state: Array) -> Array:
    total = jac[..., 0, :] * state[..., 0:1, :]
    for s in range(1, state.shape[-2]):
        total = total + jac[..., s, :] * state[..., s : s + 1, :]
    return total


def _dense_multiply(xp: Any, late: Array, early: Array) -> Array:
    return xp.matmul(late, early)


def _dense_act(xp: Any, jac: Array, state: Array) -> Array:
    return xp.matmul(jac, state[..., None])[..., 0]


DIAG = Structure(_times, _times)
BLOCK = Structure(_block_multiply, _block_act)
DENSE = Structure(_dense_multiply, _dense_act)
