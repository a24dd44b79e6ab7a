"""NewtonConfig: every choice a solve leaves to its caller, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

LIBRARY_NEWTON_ITERS = 3

_JACOBIANS = ("auto", "analytic", "autograd")
_STRUCTURES = (None, "diag", "block2", "block4", "head", "dense")
_COORDS = ("auto", "native", "log")
_TILES = ("assoc", "seq", "thomas", "thomas2", "thomas4")
_WINDOWS = (None, 32, 64, 128)


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"NewtonConfig: {name} must be a whole number of at least {least}, got {value!r}")


def _real(value: Any) -> float:
    """`value` as a float, or NaN if it is no real number."""
    good = not isinstance(value, (bool, str)) and hasattr(value, "__float__") and not getattr(value, "ndim", 0)
    return float(value) if good else math.nan


def _positive(name: str, value: Any, *, zero: bool = False) -> None:
    number = _real(value)
    if not (number >= 0.0 if zero else number > 0.0) or math.isinf(number):
        raise ValueError(f"NewtonConfig: {name} must be a finite number {'≥' if zero else '>'} 0, got {value!r}")


@dataclass(frozen=True)
class NewtonConfig:
    """How a solve is done; the defaults are right for training and inference alike.

    Attributes:
        max_iters: None (default) iterates until the joints pass the agreement test and finishes exactly if they do
            not. A number K is an order: exactly K Newton iterations at most, one unknown per time step, with the
            residual gates below.
        segment_len: L. None lets a cost model choose; 1 is the published algorithm; T is the time loop.
        warmup: plain steps run before each segment to guess its start; None means min(L, 64).
        tol: relative accuracy of the joint test; None means 1e-5 (float32), 1e-11 (float64), 1e-3 (half).
        exact: accept only joints that match bit for bit, so that the result is the time loop's.
        max_passes: passes over the segments before what is open is walked in order; None means up to 12, fewer when
            the estimate stops falling.
        omega: relaxation of a pinned solve's update, in (0, 2].
        scan_backend: 'auto', or the name of a registered backend, which is an order. 'eager' means the array path.
        jacobian: 'auto' or 'analytic' (from the traced step). 'autograd' needs a front end with autodiff.
        jac_structure: None takes the cell's; 'diag' on a cell with several slots keeps the true diagonal only.
        residual_atol: a pinned solve stops when max|f(h)-h| falls below; None never stops early.
        residual_fail: NewtonDivergenceError above this residual, or when it is not finite; None never raises.
        coords: 'auto' takes the cell's solve coordinates; 'log' demands them; 'native' iterates on the public slots.
        chunk_len: solve windows of this many steps one after the other, carrying the state.
        picard_iters: Picard sweeps before Newton, for cells that offer them; None lets the cell decide.
        picard_adapt: retry a pinned solve with more Picard sweeps (1, 3, 5) while its residual is above
            picard_retry_atol; None means: if picard_iters was left to the cell.
        picard_retry_atol: see picard_adapt.
        newton_iters_by_t: {T: K}; pins K by the largest key ≤ T. Needs max_iters=None.
        scan_tile: 'assoc' (tree) or 'seq' (loop) for a pinned solve's linear scan; 'thomas…' need a fused backend.
        fused_time_loop, fused_window_len, fused_early_exit: orders to a fused backend; others refuse them.
        recompute: newton_vjp keeps no states and solves again when the gradient is asked for.
        verify_first_step: a ParaRNN compares its first parallel forward with the time loop.

    Raises:
        ValueError: a field outside its range, or two that contradict each other.

    >>> NewtonConfig(max_iters=3).max_iters
    3
    >>> NewtonConfig(omega=0)
    Traceback (most recent call last):
    ValueError: NewtonConfig: omega must lie in (0, 2], got 0
    """

    max_iters: int | None = None
    omega: float = 1.0
    scan_backend: str = "auto"
    jacobian: str = "auto"
    jac_structure: str | None = None
    residual_atol: float | None = 1e-5
    residual_fail: float | None = 1.0
    coords: str = "auto"
    chunk_len: int | None = None
    picard_iters: int | None = None
    picard_adapt: bool | None = None
    picard_retry_atol: float = 1e-3
    newton_iters_by_t: Mapping[int, int] | None = None
    scan_tile: str = "assoc"
    fused_time_loop: bool = False
    fused_window_len: int | None = None
    recompute: bool = False
    fused_early_exit: bool = False
    verify_first_step: bool = False
    segment_len: int | None = None
    warmup: int | None = None
    tol: float | None = None
    exact: bool = False
    max_passes: int | None = None

    def __post_init__(self) -> None:
        if self.max_iters is not None:
            _whole("max_iters", self.max_iters, 0)
        least_values = {"chunk_len": 1, "picard_iters": 0, "segment_len": 1, "warmup": 0, "max_passes": 1}
        for name, least in least_values.items():
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), least)
        if not 0.0 < _real(self.omega) <= 2.0:
            raise ValueError(f"NewtonConfig: omega must lie in (0, 2], got {self.omega!r}")
        for name in ("fused_time_loop", "recompute", "fused_early_exit", "verify_first_step", "exact"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise ValueError(f"NewtonConfig: {name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.picard_adapt, (bool, np.bool_, type(None))):
            raise ValueError(f"NewtonConfig: picard_adapt must be True, False or None, got {self.picard_adapt!r}")
        for name in ("residual_atol", "residual_fail", "tol"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name), zero=name == "residual_atol")
        _positive("picard_retry_atol", self.picard_retry_atol)
        for name, allowed in (
            ("jacobian", _JACOBIANS),
            ("jac_structure", _STRUCTURES),
            ("coords", _COORDS),
            ("scan_tile", _TILES),
            ("fused_window_len", _WINDOWS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"NewtonConfig: {name} must be one of {allowed}, got {getattr(self, name)!r}")
        if not isinstance(self.scan_backend, str) or not self.scan_backend:
            got = repr(self.scan_backend)
            raise ValueError(f"NewtonConfig: scan_backend must be 'auto' or a backend's name, got {got}")
        if self.newton_iters_by_t is not None:
            self._check_table(self.newton_iters_by_t)
            # A copy, so that the caller's table can change without changing a frozen configuration.
            object.__setattr__(self, "newton_iters_by_t", dict(self.newton_iters_by_t))
        if self.fused_window_len is not None and not self.fused_time_loop:
            raise ValueError("NewtonConfig: fused_window_len needs fused_time_loop=True")
        if self.fused_time_loop and self.chunk_len is not None:
            raise ValueError("NewtonConfig: fused_time_loop and chunk_len both cut time into windows; give one")
        if self.exact and (self.max_iters is not None or self.newton_iters_by_t is not None):
            raise ValueError("NewtonConfig: exact=True cannot be promised by a pinned number of iterations; give one")

    def _check_table(self, table: Mapping[int, int]) -> None:
        if self.max_iters is not None:
            raise ValueError("NewtonConfig: newton_iters_by_t needs max_iters=None; a pinned count would override it")
        if not isinstance(table, Mapping) or not table:
            raise ValueError(f"NewtonConfig: newton_iters_by_t must be a non-empty {{T: K}}, got {table!r}")
        for key, value in table.items():
            _whole("a T in newton_iters_by_t", key, 1)
            _whole("a K in newton_iters_by_t", value, 0)

    def __hash__(self) -> int:
        # A table is no key of its own; configurations are, for compilers that cache by them.
        values = (getattr(self, f.name) for f in dataclasses.fields(self))
        return hash(tuple(tuple(sorted(v.items())) if isinstance(v, Mapping) else v for v in values))

    def pinned(self, time: int) -> int | None:
        """The iteration count that was ordered for length `time`; None where the solver decides.

        >>> NewtonConfig(newton_iters_by_t={1: 2, 1000: 4}).pinned(999)
        2
        """
        if self.newton_iters_by_t is not None:
            return iterations_from(self.newton_iters_by_t, time)
        return self.max_iters

    def replace(self, **changes: Any) -> NewtonConfig:
        """A copy with some fields changed.

        >>> NewtonConfig().replace(segment_len=64).segment_len
        64
        """
        return dataclasses.replace(self, **changes)


def iterations_from(table: Mapping[int, int], time: int) -> int:
    """The entry of the largest T not above `time`, or of the smallest T there is.

    >>> iterations_from({64: 2, 1024: 3}, 500)
    2
    """
    below = [key for key in table if key <= time]
    return int(table[max(below) if below else min(table)])


def compile_safe_config(*, scan_backend: str = "auto", max_iters: int = LIBRARY_NEWTON_ITERS) -> NewtonConfig:
    """A configuration whose amount of work depends on nothing but shapes, for compilers and graph capture.

    A fixed number of iterations, no early stop, no retry, and no error that would need a value from the device.

    >>> compile_safe_config().residual_fail is None
    True
    """
    return NewtonConfig(
        max_iters=max_iters, residual_atol=None, residual_fail=None, picard_adapt=False, scan_backend=scan_backend
    )
