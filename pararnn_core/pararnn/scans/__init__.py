"""Scans over time, in O(log T) depth, on arrays of any array-API library.

``scan_diag``, ``scan_block`` and ``scan_dense`` solve ``y_t = J_t y_{t-1} + r_t``; ``scan_max_plus`` solves
``m_t = max(shift_t + m_{t-1}, floor_t)``; ``associative_scan`` takes an operation of your own.
"""

from .affine import (
    reverse_scan_block2,
    reverse_scan_block4,
    reverse_scan_dense,
    reverse_scan_diag,
    scan_block,
    scan_block2,
    scan_block4,
    scan_dense,
    scan_diag,
)
from .associative import associative_scan
from .max_plus import scan_max_plus

__all__ = [
    "associative_scan",
    "reverse_scan_block2",
    "reverse_scan_block4",
    "reverse_scan_dense",
    "reverse_scan_diag",
    "scan_block",
    "scan_block2",
    "scan_block4",
    "scan_dense",
    "scan_diag",
    "scan_max_plus",
]
