"""Drives joined to an input while Dynamo traces: plain tensor operations, and nothing that looks at a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pararnn.cells.base import ChannelwiseCell


def joined_drives(
    kind: ChannelwiseCell, arrays: dict[str, torch.Tensor], x: torch.Tensor, given: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The arrays and the input of the driven cell, as :func:`pararnn.drives.with_drives` makes them."""
    columns = []
    for name, default in kind.drives.items():
        value = given.get(name)
        value = torch.as_tensor(default if value is None else value, dtype=x.dtype, device=x.device)
        if value.ndim:
            value = value.reshape(*value.shape, *([1] * (3 - value.ndim)))
        columns.append(value.expand(x.shape[0], x.shape[1], 1))
    if not columns:
        return arrays, x
    weight, bias, count = arrays["W_x.weight"], arrays["W_x.bias"], len(columns)
    passed = torch.eye(count, dtype=weight.dtype, device=weight.device).repeat_interleave(kind.d_h, dim=0)
    below = torch.cat([weight.new_zeros(count * kind.d_h, weight.shape[1]), passed], dim=1)
    whole = torch.cat([torch.cat([weight, weight.new_zeros(weight.shape[0], count)], dim=1), below])
    joined = {"W_x.weight": whole, "W_x.bias": torch.cat([bias, bias.new_zeros(count * kind.d_h)])}
    return {**arrays, **joined}, torch.cat([x, *columns], dim=2)
