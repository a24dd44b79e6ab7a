"""The frame that all scans share: first step, tree or loop over the others, dtypes in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .associative import cut, split_first, tree_states

Array = Any
Element = tuple[Array, Array]


def all_states(
    xp: Any,
    compose: Callable[[Element, Element], Element],
    apply: Callable[[Array, Element], Array],
    element: Element,
    initial: Array | None,
    *,
    dtypes: tuple[Any, Any],
    method: str,
    reverse: bool,
    axis: int,
) -> Array:
    """Run ``s_t = apply(s_{t-1}, e_t)`` over time, for elements made of a factor and a term.

    The first state is made on its own: ``apply(initial, e_0)``, or the term of ``e_0`` alone where there is
    no state before it. So no neutral start is ever multiplied by data, and the tree composes only what
    follows. ``element`` is (factor, term) with equal lengths along ``axis``; ``initial`` lacks that axis.
    """
    shape, (result, work) = element[1].shape, dtypes
    if 0 in shape:
        return xp.astype(element[1], result, copy=True)
    element = tuple(xp.astype(part, work, copy=False) for part in element)
    first, rest = split_first(element, axis, reverse)
    if initial is None:
        start = first[1]
    else:
        start = apply(xp.expand_dims(xp.astype(initial, work, copy=False), axis=axis), first)
    if method == "seq":
        states = _walk(xp, apply, rest, start, axis=axis, reverse=reverse)
    else:

        def act(state: tuple[Array], part: Element) -> tuple[Array]:
            return (apply(state[0], part),)

        (states,) = tree_states(xp, compose, act, rest, (start,), axis=axis, reverse=reverse)
    return xp.astype(states, result, copy=shape[axis] == 1)  # one state may be a view of the input


def _walk(xp: Any, apply: Callable, elements: Element, start: Array, *, axis: int, reverse: bool) -> Array:
    """Make the states one after the other: the definition, and the check on the tree."""
    n = elements[0].shape[axis]
    states = [start]
    for t in range(n - 1, -1, -1) if reverse else range(n):
        states.append(apply(states[-1], cut(elements, slice(t, t + 1), axis)))
    return xp.concat(states[::-1] if reverse else states, axis=axis)
