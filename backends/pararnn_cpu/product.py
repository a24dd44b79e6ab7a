"""Matrix products as compiled code, on this backend's own threads.

NumPy's would do, but its threads spin for a while after each product and so take the cores from our loops, and the
bits of its sums may depend on how many there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from pararnn_cpu.compile import compiled, machine
from pararnn_cpu.engine import WORTH_A_THREAD, blocks_of, product_width, run_each
from pararnn_cpu.print_product import print_product
from pararnn_cpu.threads import run_all, shares


def multiply(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """out[b] = left[b] @ right, for left (B, R, K), right (K, N) and out (B, R, N), the last axis of unit stride."""
    batch, rows, depth = left.shape
    columns = right.shape[1]
    width = product_width(columns, right.dtype)
    packed = blocks_of(right.T, width)
    blocks = packed.shape[0]
    run = _kernel(width, columns, right.dtype == np.float64, False)
    tasks, held = [], []
    for begin, end in shares(batch * rows, batch * rows * depth * columns // WORTH_A_THREAD):
        addresses = []
        while begin < end:
            b, first = divmod(begin, rows)
            count = min(rows - first, end - begin)
            a, to = left[b, first:], out[b, first:]
            args = np.array(
                [count, 0, blocks, columns, depth, a.ctypes.data, a.strides[0], a.strides[1], packed.ctypes.data,
                 packed.strides[1], packed.strides[0], to.ctypes.data, to.strides[0]],
                dtype=np.int64,
            )  # fmt: skip
            held.append(args)
            addresses.append(args.ctypes.data)
            begin += count
        tasks.append(functools.partial(run_each, run, addresses))
    run_all(tasks)


def add_products(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """out += Σ_b left[b] @ right[b], for left (B, R, K), right (B, K, N) with unit stride along N, and out (R, N)."""
    batch, rows, depth = left.shape
    columns = right.shape[2]
    width = product_width(columns, right.dtype)
    run = _kernel(width, columns, right.dtype == np.float64, True)
    tasks, held = [], []
    for begin, end in shares(rows, batch * rows * depth * columns // WORTH_A_THREAD):
        addresses = []
        for b in range(batch):
            a, matrix, to = left[b, begin:], right[b], out[begin:]
            args = np.array(
                [end - begin, 0, -(-columns // width), columns, depth, a.ctypes.data, a.strides[0], a.strides[1],
                 matrix.ctypes.data, matrix.strides[0], width * out.itemsize, to.ctypes.data, to.strides[0]],
                dtype=np.int64,
            )  # fmt: skip
            held.append(args)
            addresses.append(args.ctypes.data)
        tasks.append(functools.partial(run_each, run, addresses))
    run_all(tasks)


@lru_cache(maxsize=64)
def _made(width: int, full: bool, tail: bool, double: bool, add: bool) -> Callable[[int], None]:
    return compiled(print_product(width, full, tail, double, add, machine()))


def _kernel(width: int, columns: int, double: bool, add: bool) -> Callable[[int], None]:
    return _made(width, columns >= width, columns % width > 0, double, add)
