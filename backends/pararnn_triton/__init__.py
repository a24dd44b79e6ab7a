"""The Triton backend: kernels generated from a cell's step, for CUDA tensors."""

from __future__ import annotations

from pararnn_triton.backend import TritonBackend

backend = TritonBackend()

__all__ = ["TritonBackend", "backend"]
