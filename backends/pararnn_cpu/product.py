"""Matrix products as compiled code, on this backend's own threads.

NumPy's would do, but its threads spin for a while after each product and so take the cores from our loops, and the
bits of its sums may depend on how many there are.
"""

from __future__ import annotations

import functools
from functools import lru_cache

import numpy as np

from pararnn_cpu.compile import Compiled, compiled, machine
from pararnn_cpu.engine import WORTH_A_THREAD, blocks_of, product_width, rectangles, run_each
from pararnn_cpu.print_product import print_product
from pararnn_cpu.threads import run_all


def multiply(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """out[b] = left[b] @ right, for left (B, R, K), right (K, N) and out (B, R, N), the last axis of unit stride."""
    batch, rows, depth = left.shape
    packed = blocks_of(right.T, product_width(right.shape[1], right.dtype))
    by_right = (0, packed.strides[1], packed.strides[0])
    _run(left, packed, by_right, out, (batch, rows, right.shape[1], depth), add=False)


def add_products(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """out += Σ_b left[b] @ right[b], for left (B, R, K), right (B, K, N) with unit stride along N, and out (R, N)."""
    batch, rows, depth = left.shape
    columns = right.shape[2]
    by_right = (right.strides[0], right.strides[1], product_width(columns, right.dtype) * right.itemsize)
    _run(left, right, by_right, out, (batch, rows, columns, depth), add=True)


def _run(
    left: np.ndarray,
    right: np.ndarray,
    by_right: tuple[int, int, int],
    out: np.ndarray,
    sizes: tuple[int, int, int, int],
    add: bool,
) -> None:
    batch, rows, columns, depth = sizes
    run = _kernel(product_width(columns, out.dtype), columns, out.dtype == np.float64, add)
    by_out = (0, out.strides[0]) if add else out.strides[:2]
    tasks, held = [], []
    # Rows of a sum over the batch are each one thread's alone.
    cut = (1, rows) if add else (batch, rows)
    for pieces in rectangles(*cut, batch * rows * depth * columns // WORTH_A_THREAD):
        addresses = []
        for b, b_end, r, r_end in pieces:
            batches = (0, batch) if add else (b, b_end)
            args = np.array(
                [*batches, r_end - r, columns, depth, left.ctypes.data + r * left.strides[1], *left.strides,
                 right.ctypes.data, *by_right, out.ctypes.data + r * by_out[1], *by_out],
                dtype=np.int64,
            )  # fmt: skip
            held.append(args)
            addresses.append(args.ctypes.data)
        tasks.append(functools.partial(run_each, run, addresses))
    run_all(tasks)


def _kernel(width: int, columns: int, double: bool, add: bool) -> Compiled:
    return _made(width, columns >= width, columns % width > 0, double, add)


@lru_cache(maxsize=64)
def _made(width: int, full: bool, tail: bool, double: bool, add: bool) -> Compiled:
    return compiled(print_product(width, full, tail, double, add, machine()))
