"""The CuPy backend: CUDA kernels generated from a cell's step, for CuPy arrays and what shares memory with them."""

from __future__ import annotations

from pararnn_cupy.backend import CupyBackend

backend = CupyBackend()

__all__ = ["CupyBackend", "backend"]
