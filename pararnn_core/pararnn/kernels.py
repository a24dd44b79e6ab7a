"""pararnn.kernels: whether fused kernels can run here, asked of the backend that has them."""

from __future__ import annotations

from typing import Any

_PREFIX = "kernels."


def __getattr__(name: str) -> Any:
    """``check_triton_environment``, ``require_fused_triton``, …, loaded on first use."""
    if name.startswith("_"):
        raise AttributeError(f"module 'pararnn.kernels' has no attribute {name!r}")
    from pararnn.registry import offered

    try:
        found = offered(_PREFIX + name)
    except AttributeError:
        raise AttributeError(f"module 'pararnn.kernels' has no attribute {name!r}") from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    from pararnn.registry import offered_names

    return sorted({*globals(), *(name.removeprefix(_PREFIX) for name in offered_names(_PREFIX))})
