"""Drives: per-step inputs that all channels of a cell share, such as the time a step stands for.

A drive is a gate that W_x does not deliver. It becomes one more feature of the input and one more block of W_x, with
weight 1 on that feature and 0 on all others, so that solvers and backends see a cell and an input like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import array_api_compat

from pararnn.adjoint import Gradients
from pararnn.arrays import Array, Namespace, cast, common_namespace, dtype_name, is_array, known
from pararnn.cells.base import ChannelwiseCell
from pararnn.front import adopted, front_of
from pararnn.problem import check_input


def with_drives(what: str, cell: Any, x: Array, given: Mapping[str, Any]) -> tuple[Any, Array]:
    """The cell and the input with drives among the features; both as they are for a cell that has none.

    Args:
        given: by name a number, () or (B,) or (B, T); what is missing or None takes the cell's default.

    Raises:
        TypeError: a name that is not one of the cell's drives, or a value that is no number and no floating array.
        ValueError: a shape that does not fit, or a value that the cell refuses.
    """
    wanted: Mapping[str, float] = getattr(cell, "drives", {})
    unknown = [name for name in given if name not in wanted]
    if unknown:
        has = f"it takes {', '.join(wanted)}" if wanted else "it takes none"
        raise TypeError(f"{what}: {type(cell).__name__} has no per-step input {', '.join(unknown)}; {has}")
    if not wanted or (cell.is_driven and not given):
        return cell, x
    if cell.is_driven:
        raise TypeError(f"{what}: this cell already reads {', '.join(wanted)} from x; leave them out")
    x = adopted(x)
    front = front_of(x)
    joined = None if front is None else front.joined_drives(cell, x, given)
    if joined is not None:
        return joined
    xp = check_input(what, cell, x)
    columns = [
        _column(what, cell, xp, x, name, default if given.get(name) is None else given[name])
        for name, default in wanted.items()
    ]
    weight, bias = _projection(xp, len(cell.gates), cell.d_h, *cell.W_x)
    return cell.driven(weight, bias), xp.concat([x, *columns], axis=2)


def _projection(xp: Namespace, gates: int, width: int, weight: Array, bias: Array) -> tuple[Array, Array]:
    """W_x and its bias with a block for each gate that they lack, which hands on a feature of its own."""
    kind = {"dtype": weight.dtype, "device": array_api_compat.device(weight)}
    rows, features = weight.shape
    count = gates - rows // width
    blocks = [xp.concat([weight, xp.zeros((rows, count), **kind)], axis=1)]
    for k in range(count):
        line = [xp.zeros((width, features + k), **kind), xp.ones((width, 1), **kind)]
        blocks.append(xp.concat([*line, xp.zeros((width, count - 1 - k), **kind)], axis=1))
    return xp.concat(blocks, axis=0), xp.concat([bias, xp.zeros((count * width,), **kind)])


def _column(what: str, cell: ChannelwiseCell, xp: Namespace, x: Array, name: str, value: Any) -> Array:
    """A drive as a feature (B, T, 1) of x's dtype."""
    batch, time = int(x.shape[0]), int(x.shape[1])
    where = array_api_compat.device(x)
    if not is_array(value):
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise TypeError(f"{what}: {name} must be a number or an array, got {type(value).__name__}")
        cell.check_drive(name, float(value))
        return xp.full((batch, time, 1), float(value), dtype=x.dtype, device=where)
    common_namespace(what, x=x, **{name: value})
    if not xp.isdtype(value.dtype, "real floating"):
        raise TypeError(f"{what}: {name} must be floating, got {dtype_name(value.dtype)}")
    shape = tuple(value.shape)
    if shape not in ((), (batch,), (batch, time)):
        raise ValueError(
            f"{what}: {name} must be a number, ({batch},) for B or ({batch}, {time}) for (B, T), got shape {shape}"
        )
    # On an accelerator, asking for a value would wait for the device.
    if str(where).startswith("cpu") and batch and time and known(xp.any(value < 0.0)):
        cell.check_drive(name, float(xp.min(value)))
    grown = xp.reshape(value, shape + (1,) * (3 - len(shape)))
    return xp.broadcast_to(cast(xp, grown, x.dtype), (batch, time, 1))


def split_drives(cell: ChannelwiseCell, grads: Gradients) -> Gradients:
    """Gradients of the cell with its drives among the features, as those of `cell` itself and of the drives."""
    rows, features = cell.W_x.weight.shape
    params = dict(grads.params)
    params["W_x.weight"] = params["W_x.weight"][:rows, :features]
    params["W_x.bias"] = params["W_x.bias"][:rows]
    found = {name: grads.x[:, :, features + k] for k, name in enumerate(cell.drives)}
    return replace(grads, x=grads.x[:, :, :features], params=params, drives=found)
