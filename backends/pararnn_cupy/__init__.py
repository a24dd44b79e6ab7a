"""The CuPy backend: CUDA kernels generated from a cell's step, for CuPy arrays and what shares memory with them."""

from __future__ import annotations

from pararnn.graph import FUSED
from pararnn_cupy.backend import CupyBackend
from pararnn_cupy.fused import fused_function

backend = CupyBackend()
# Whichever backend solves a problem in CuPy arrays, its programs run as one kernel each.
FUSED["cupy"] = fused_function

__all__ = ["CupyBackend", "backend"]
