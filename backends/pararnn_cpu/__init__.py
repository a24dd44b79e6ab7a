"""The CPU backend: loops compiled by LLVM from the same graph that every other backend prints."""

from __future__ import annotations

from pararnn_cpu.backend import CpuBackend

backend = CpuBackend()
exact_backend = CpuBackend(exact=True)

__all__ = ["CpuBackend", "backend", "exact_backend"]
