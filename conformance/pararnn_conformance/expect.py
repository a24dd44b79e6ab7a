"""What a check says when something is not as promised."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from pararnn.errors import NotConvergedWarning
from pararnn.stats import NewtonStats
from pararnn.verify import compare


class Refused(Exception):
    """A backend does not take this problem, or its library has no such dtype; the message is its sentence."""


def expect(condition: Any, message: str) -> None:
    """An assertion that `python -O` keeps."""
    if not condition:
        raise AssertionError(message)


def error_of(cell: Any, mine: np.ndarray, true: np.ndarray) -> float:
    """The largest error of any slot, relative to the slot's scale; infinite where NaN and inf do not match."""
    with np.errstate(all="ignore"):
        return compare(cell, mine, true, NewtonStats()).max_rel


def expect_agreement(cell: Any, mine: np.ndarray, true: np.ndarray, atol: float, what: str = "") -> None:
    """Every slot within `atol`, relative to its scale; non-finite values in the same places."""
    expect(mine.shape == true.shape, f"{what}: shape {mine.shape}, wanted {true.shape}")
    with np.errstate(all="ignore"):
        report = compare(cell, mine, true, NewtonStats(), atol=atol)
    slots = ", ".join(f"{name} {value:.2e}" for name, value in report.slots.items())
    expect(report.ok, f"{what}: relative error {slots}; allowed {atol:.0e}; worst at {report.worst}")


def expect_near(mine: np.ndarray, true: np.ndarray, tol: float, what: str) -> None:
    """Within `tol`, relative to the largest magnitude of `true`."""
    expect(mine.shape == true.shape, f"{what}: shape {mine.shape}, wanted {true.shape}")
    if not true.size:
        return
    scale = max(float(np.max(np.abs(true))), 1e-30)
    gap = float(np.max(np.abs(np.asarray(mine, np.float64) - true))) / scale
    expect(gap <= tol, f"{what}: relative error {gap:.2e}, allowed {tol:.0e}")


def expect_same_bits(mine: np.ndarray, other: np.ndarray, what: str) -> None:
    """The same values everywhere, NaN in the same places."""
    expect(mine.shape == other.shape, f"{what}: shape {mine.shape}, wanted {other.shape}")
    differ = ~((mine == other) | (np.isnan(mine) & np.isnan(other)))
    count = int(np.count_nonzero(differ))
    where = [int(i) for i in np.argwhere(differ)[0]] if count else []
    expect(not count, f"{what}: {count} of {differ.size} values differ, the first at {where}")


@contextlib.contextmanager
def expect_error(kinds: type[BaseException] | tuple[type[BaseException], ...], words: str, what: str) -> Iterator[None]:
    """The block must raise one of `kinds`, with `words` in its message."""
    try:
        yield
    except kinds as error:
        expect(words in str(error), f"{what}: the message lacks {words!r}: {error}")
        return
    except Refused:
        raise
    except Exception as error:
        raise AssertionError(f"{what}: raised {type(error).__name__}: {error}") from error
    raise AssertionError(f"{what}: was accepted")


@contextlib.contextmanager
def loose_solves_allowed() -> Iterator[None]:
    """Silences the warning about a pinned solve that stops early, where that is what the check is after."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        yield
