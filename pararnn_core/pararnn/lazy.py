"""Modules whose names are offered by backends and loaded on first use, so that importing them costs nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def offered_module(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of pararnn.<name>, whose names backends offer as "<name>.…"."""
    prefix = module.rpartition(".")[2] + "."

    def getattr_(name: str) -> Any:
        absent = f"module {module!r} has no attribute {name!r}"
        if name.startswith("_"):
            raise AttributeError(absent)
        from pararnn.registry import offered

        try:
            found = offered(prefix + name)
        except AttributeError:
            raise AttributeError(absent) from None
        setattr(sys.modules[module], name, found)
        return found

    def dir_() -> list[str]:
        from pararnn.registry import offered_names

        own = vars(sys.modules[module])
        return sorted({*own, *(name.removeprefix(prefix) for name in offered_names(prefix))})

    return getattr_, dir_
