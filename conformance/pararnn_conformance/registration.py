"""The decorator that registers a check, and the instances that a check spans."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Instance:
    """One check with one set of arguments; `quick` instances make up the short suite for slow libraries."""

    name: str
    function: Callable[..., None]
    arguments: dict[str, Any]
    shows: str
    quick: bool

    def run(self, target: Any) -> None:
        self.function(target, **self.arguments)

    @property
    def idea(self) -> str:
        return (self.function.__doc__ or "").strip().splitlines()[0]


_instances: list[Instance] = []


def check(
    shows: str = "", *, few: Mapping[str, Sequence[Any]] | None = None, **grid: Sequence[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function ``f(target, **arguments)`` for every combination of the `grid`'s values.

    Args:
        shows: the promises (P01 …) and cases (O13 …) that the check shows.
        few: what the quick suite takes of the grid; of a parameter not named here, its first value.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        topic = function.__module__.rsplit(".", 1)[-1]
        chosen = {name: tuple((few or {}).get(name, tuple(values)[:1])) for name, values in grid.items()}
        for values in itertools.product(*grid.values()):
            arguments = dict(zip(grid, values, strict=True))
            label = "-".join(str(v) for v in values)
            name = f"{topic}.{function.__name__}" + (f"[{label}]" if label else "")
            quick = all(value in chosen[key] for key, value in arguments.items())
            _instances.append(Instance(name, function, arguments, shows, quick))
        return function

    return register


def instances(*, only: str = "", quick: bool = False) -> list[Instance]:
    """All registered instances whose name contains `only`, topic by topic."""
    importlib.import_module("pararnn_conformance.topics")
    return [i for i in _instances if only in i.name and (i.quick or not quick)]
