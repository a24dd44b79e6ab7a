"""pararnn.distributed: what training in several processes needs, for the array library that offers it."""

from __future__ import annotations

from typing import Any

_PREFIX = "distributed."


def __getattr__(name: str) -> Any:
    """``last_newton_residuals``, ``unwrap_distributed``, …, loaded on first use."""
    if name.startswith("_"):
        raise AttributeError(f"module 'pararnn.distributed' has no attribute {name!r}")
    from pararnn.registry import offered

    try:
        found = offered(_PREFIX + name)
    except AttributeError:
        raise AttributeError(f"module 'pararnn.distributed' has no attribute {name!r}") from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    from pararnn.registry import offered_names

    return sorted({*globals(), *(name.removeprefix(_PREFIX) for name in offered_names(_PREFIX))})
