"""pararnn.kernels: whether fused kernels can run here, asked of the backend that has them."""

from __future__ import annotations

from pararnn.lazy import offered_module

__getattr__, __dir__ = offered_module(__name__)
