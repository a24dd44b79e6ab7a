"""The JAX front and backend: pure functions that jit, vmap, grad and shard. Importing it imports no JAX."""

from __future__ import annotations

from typing import Any

from pararnn_jax.backend import JaxBackend

backend = JaxBackend()

__all__ = ["JaxBackend", "backend"]


def __getattr__(name: str) -> Any:
    """What :attr:`JaxBackend.offers` lists, loaded on first use."""
    if name not in backend.offers:
        raise AttributeError(f"module 'pararnn_jax' has no attribute {name!r}")
    from pararnn.registry import offered

    return offered(name)
