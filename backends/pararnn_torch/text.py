"""A cell's kind and a configuration as text, because a custom operator takes tensors, numbers and strings only.

Writing happens while a compiler traces, so it uses nothing that Dynamo cannot follow; reading happens when it runs.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from pararnn.cells.base import ChannelwiseCell
from pararnn.config import NewtonConfig

_FIELDS = tuple(f.name for f in dataclasses.fields(NewtonConfig) if f.name != "newton_iters_by_t")
_CUT = "\x1f"


def cell_text(cell: ChannelwiseCell, names: Iterable[str]) -> str:
    """Class, sizes, clamp, options and the names of the arrays of a cell."""
    kind = type(cell)
    options = [f"{name}={_fixed(getattr(cell, name))!r}" for name in kind.options]
    numbers = [f"{_fixed(n)!r}" for n in (kind.serial, cell.input_size, cell.hidden_size, cell.max_recurrent_norm)]
    return _CUT.join([kind.__module__, kind.__qualname__, *numbers, ",".join(names), *options])


def _fixed(value: Any) -> Any:
    """A number as this number: one that Dynamo has seen change it would make a symbol, which has no text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) else value


def config_text(config: NewtonConfig) -> str:
    """Every field of a configuration."""
    table = config.newton_iters_by_t
    entries = [] if table is None else [f"{_fixed(time)}:{_fixed(count)}" for time, count in table.items()]
    fields = [f"{name}={_fixed(getattr(config, name))!r}" for name in _FIELDS]
    return _CUT.join([*fields, "newton_iters_by_t={" + ",".join(entries) + "}"])


@lru_cache(maxsize=256)
def read_cell(text: str) -> tuple[ChannelwiseCell, tuple[str, ...]]:
    """A cell of that kind without arrays, and the names of the arrays in order."""
    module, qualname, serial, d_in, d_h, cap, names, *options = text.split(_CUT)
    cell = object.__new__(_class_of(module, qualname, int(serial)))
    cell.__dict__.update(_pairs(options))
    cell._set(int(d_in), int(d_h), _value(cap), {})
    return cell, tuple(names.split(","))


@lru_cache(maxsize=256)
def read_config(text: str) -> NewtonConfig:
    fields = _pairs(text.split(_CUT))
    return NewtonConfig(**{**fields, "newton_iters_by_t": fields["newton_iters_by_t"] or None})


def _pairs(items: list[str]) -> dict[str, Any]:
    return {name: _value(value) for name, _, value in (item.partition("=") for item in items)}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    try:
        return float(text)
    except ValueError:
        raise TypeError(
            f"torch.compile: the value {text} cannot be handed to a compiled solve; options of a cell and fields of a "
            "NewtonConfig must be plain numbers, strings, True, False or None"
        ) from None


def _class_of(module: str, qualname: str, serial: int) -> type[ChannelwiseCell]:
    """The class of that name; of several (a notebook defines it again) the one that was meant."""
    named = [k for k in _kinds(ChannelwiseCell) if (k.__module__, k.__qualname__) == (module, qualname)]
    exact = [k for k in named if k.serial == serial]
    if len(named) == 1 or exact:
        return (exact or named)[0]
    # A graph that was saved may come before the import of its cells.
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _kinds(kind: type[ChannelwiseCell]) -> list[type[ChannelwiseCell]]:
    """All classes below `kind`."""
    direct = kind.__subclasses__()
    return [*direct, *(below for k in direct for below in _kinds(k))]
