"""The recurrence ``m_t = max(shift_t + m_{t-1}, floor_t)``: an affine recurrence in the tropical semiring.

There "plus" is the maximum, "times" is the sum, and minus infinity is the zero. Its zero absorbs everything,
plus infinity too; arithmetic by IEEE rules does not know that and would make a NaN of their sum.
"""

from __future__ import annotations

from typing import Any

from .checks import check_method, dtypes_of, namespace_of, normalised_axis
from .recurrence import all_states

Array = Any

__all__ = ["scan_max_plus"]


def scan_max_plus(
    shift: Array,
    floor: Array,
    *,
    initial: Array | None = None,
    reverse: bool = False,
    axis: int = 1,
    method: str = "assoc",
) -> Array:
    """Solve a running maximum that is shifted at every step, for all times at once.

    ::

        m_t = max(shift_t + m_{t-1}, floor_t),   m_{-1} = initial      reverse=False
        m_t = max(shift_t + m_{t+1}, floor_t),   m_T    = initial      reverse=True

    Parameters
    ----------
    shift, floor : arrays of one shape, usually (B, T, D)
        Time is on ``axis``.
    initial : array, optional
        The state before the walk begins, shaped like ``floor`` without ``axis``; cast to the result's dtype.
        None means minus infinity: the first state is the first ``floor``, and the first ``shift`` is not
        read.
    reverse : bool
        Walk from the last time to the first; ``shift`` is read at the same t as ``floor``.
    axis : int
        Where time is.
    method : {"assoc", "seq"}
        A tree of O(T) work and O(log T) depth, or the plain loop.

    Returns
    -------
    array
        ``m``, shaped like ``floor``, of dtype ``result_type(shift, floor)``; float16 and bfloat16 are
        computed in float32. Empty inputs give empty results. The inputs are left as they are.

    Raises
    ------
    TypeError
        Arrays from different libraries, or dtypes that are not real floating.
    ValueError
        Shapes that do not fit, an axis that is not there, or an unknown method.

    Notes
    -----
    A NaN that is read makes every later state of its channel NaN. Without one no NaN is made: minus infinity
    plus plus infinity is minus infinity here, so a shift of minus infinity forgets any state, and a state of
    minus infinity is raised by no shift.

    Source: the max-plus (tropical) semiring, scanned as in G. E. Blelloch, "Prefix sums and their
    applications", CMU-CS-90-190, 1990.

    Examples
    --------
    >>> import numpy as np
    >>> shift = np.asarray([0.0, -1.0, -1.0, -1.0, -1.0])
    >>> floor = np.asarray([0.0, 3.0, 0.0, 0.0, 5.0])
    >>> print(scan_max_plus(shift, floor, axis=0))
    [0. 3. 2. 1. 5.]
    """
    name = "scan_max_plus"
    check_method(name, method)
    xp = namespace_of(name, shift=shift, floor=floor, initial=initial)
    dtypes = dtypes_of(name, xp, real=True, shift=shift, floor=floor, initial=initial)
    if tuple(shift.shape) != tuple(floor.shape):
        raise ValueError(
            f"{name} wants shift and floor of one shape; came shift {tuple(shift.shape)} and "
            f"floor {tuple(floor.shape)}."
        )
    axis = normalised_axis(name, axis, floor.ndim)
    wanted = tuple(floor.shape[:axis]) + tuple(floor.shape[axis + 1 :])
    if initial is not None and tuple(initial.shape) != wanted:
        raise ValueError(
            f"{name} wants initial of shape {wanted} for floor {tuple(floor.shape)}; "
            f"came {tuple(initial.shape)}."
        )

    def apply(state: Array, element: tuple[Array, Array]) -> Array:
        return xp.maximum(_tropical_times(xp, element[0], state), element[1])

    def compose(early: tuple[Array, Array], late: tuple[Array, Array]) -> tuple[Array, Array]:
        return _tropical_times(xp, late[0], early[0]), apply(early[1], late)

    return all_states(
        xp,
        compose,
        apply,
        (shift, floor),
        initial,
        dtypes=dtypes,
        method=method,
        reverse=reverse,
        axis=axis,
    )


def _tropical_times(xp: Any, a: Array, b: Array) -> Array:
    """Add, with minus infinity absorbing plus infinity; a NaN stays one.

    Opposed infinities are replaced before the sum, so that no invalid operation is carried out.
    """
    opposed = xp.isinf(a) & (a == -b)
    lower = xp.minimum(a, b)
    return xp.where(opposed, lower, a) + xp.where(opposed, lower, b)
