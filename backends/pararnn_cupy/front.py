"""Numba's device arrays in place of x, h0 and guess: taken over without a copy, as the CuPy arrays that they can be."""

from __future__ import annotations

from typing import Any

from pararnn.arrays import Array
from pararnn.front import Front


class NumbaFront(Front):
    """Arrays that say where on the device they lie (``__cuda_array_interface__``) and can do nothing else."""

    packages = ("numba", "numba_cuda")

    def adopt(self, array: Any) -> Array:
        import cupy

        # CuPy waits for the stream that the array names, and shares its memory.
        return cupy.asarray(array)

    def newton_apply(self, cell: Any, x: Any, config: Any, *, h0: Any, guess: Any, stats: Any) -> Array:
        from pararnn.newton import newton_apply

        return newton_apply(cell, self.adopt(x), config, h0=h0, guess=guess, stats=stats)

    def sequential_apply(self, cell: Any, x: Any, h0: Any) -> Array:
        from pararnn.sequential import sequential_apply

        return sequential_apply(cell, self.adopt(x), h0)
