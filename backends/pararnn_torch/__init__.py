"""The PyTorch front: modules, autograd and compilation around whatever backend runs. Importing it imports no torch."""

from __future__ import annotations

from typing import Any

from pararnn_torch.backend import TorchBackend

backend = TorchBackend()

__all__ = ["TorchBackend", "backend"]


def __getattr__(name: str) -> Any:
    """What :attr:`TorchBackend.offers` lists, loaded on first use."""
    if name not in backend.offers:
        raise AttributeError(f"module 'pararnn_torch' has no attribute {name!r}")
    from pararnn.registry import offered

    return offered(name)
