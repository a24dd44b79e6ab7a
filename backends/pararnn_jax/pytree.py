"""Cells as pytrees: the arrays are leaves, everything else is part of the structure."""

from __future__ import annotations

from typing import Any

import jax

from pararnn.cells.base import ChannelwiseCell

_known: set[type] = set()


def register_cell(kind: type) -> None:
    """Registers a cell's class with JAX, once."""
    if kind not in _known:
        _known.add(kind)
        jax.tree_util.register_pytree_with_keys(kind, _flatten_with_keys, _unflattener(kind), _flatten)


def _structure(cell: ChannelwiseCell) -> tuple[Any, ...]:
    """Hashable and comparable: array names, and everything that is no array."""
    rest = sorted((name, value) for name, value in vars(cell).items() if name != "arrays")
    return tuple(cell.arrays), tuple(rest)


def _flatten(cell: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(cell.arrays.values()), _structure(cell)


def _flatten_with_keys(cell: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    keyed = tuple((jax.tree_util.GetAttrKey(name), a) for name, a in cell.arrays.items())
    return keyed, _structure(cell)


def _unflattener(kind: type) -> Any:
    def unflatten(structure: tuple[Any, ...], leaves: Any) -> ChannelwiseCell:
        # No checks: JAX puts placeholders where arrays were.
        names, rest = structure
        new: ChannelwiseCell = object.__new__(kind)
        new.__dict__.update(rest, arrays=dict(zip(names, leaves, strict=True)))
        return new

    return unflatten
