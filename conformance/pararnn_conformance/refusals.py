"""What cannot run is refused at once, in a sentence that says what to do; nothing is ignored or silently switched."""

from __future__ import annotations

import contextlib
import importlib

import numpy as np

from pararnn import NewtonConfig, newton_apply
from pararnn.problem import make_problem
from pararnn_conformance.case import CELLS, Case, numbers
from pararnn_conformance.expect import Refused, expect, expect_agreement, expect_error
from pararnn_conformance.registration import check
from pararnn_conformance.target import Target


@check("P22")
def answers(target: Target) -> None:
    """probe() and accepts() answer None or a sentence, and do so again when asked again."""
    given = target.give(Case("ParaGRU"))
    problem = make_problem("conformance", given.cell, given.x, given.h0, target.config())
    for what, answer in (("probe", target.backend.probe), ("accepts", lambda: target.backend.accepts(problem))):
        first = answer()
        expect(first is None or (isinstance(first, str) and len(first) > 10), f"{what}() gave {first!r}")
        expect(answer() == first, f"{what}() changed its mind")


@check("P22")
def unknown_name(target: Target) -> None:
    """A backend that does not exist is an error that lists those that do."""
    given = target.give(Case("ParaGRU"))
    with expect_error(ValueError, target.name, "an unknown backend"):
        newton_apply(given.cell, given.x, NewtonConfig(scan_backend="nonsense"), h0=given.h0)


@check("P21", order=("fused_time_loop", "fused_early_exit", "scan_tile", "jacobian"))
def orders(target: Target, order: str) -> None:
    """An order that only some backends can follow is followed or refused by name, never ignored."""
    values = {"fused_time_loop": True, "fused_early_exit": True, "scan_tile": "thomas", "jacobian": "autograd"}
    case = Case("ParaGRU")
    given = target.give(case)
    config = target.config(**{order: values[order]})
    problem = make_problem("conformance", given.cell, given.x, given.h0, config)
    sentence = target.backend.accepts(problem)
    if sentence is None:
        return
    expect(order in sentence, f"the refusal does not name {order}: {sentence}")
    with expect_error(TypeError, order, "a refused order"):
        newton_apply(given.cell, given.x, config, h0=given.h0)


@check("O31 O53", what=("rank", "features", "integers", "dtype", "h0-shape", "h0-integers", "foreign", "list", "guess"))
def input_that_does_not_fit(target: Target, what: str) -> None:
    """A wrong shape, dtype or library is named before any work."""
    case = Case("ParaLSTM")
    given = target.give(case)
    xp, x, h0 = target.xp, given.x, given.h0
    config = target.config()
    foreign = _foreign(x)
    calls = {
        "rank": (ValueError, "3 axes", (x[0, ...], h0, None)),
        "features": (ValueError, "3 features", (x[:, :, :2], h0, None)),
        "integers": (TypeError, "int32", (xp.astype(x, xp.int32), h0, None)),
        "dtype": (TypeError, "float16", (target.array(numbers(case).x, "float16"), h0, None)),
        "h0-shape": (ValueError, "h0", (x, h0[:, 0, :], None)),
        "h0-integers": (TypeError, "h0", (x, xp.astype(h0, xp.int32), None)),
        "foreign": (TypeError, "one library", (foreign, h0, None)),
        "list": (TypeError, "array", ([[[1.0, 2.0, 3.0]]], None, None)),
        "guess": (ValueError, "guess", (x, h0, x)),
    }
    kind, words, (handed, start, guess) = calls[what]
    with expect_error(kind, words, what):
        newton_apply(given.cell, handed, config, h0=start, guess=guess)


def _foreign(x: object) -> object:
    """An array of some other library than x's."""
    if not isinstance(x, np.ndarray):
        return np.zeros((2, 65, 3), np.float32)
    for name in ("array_api_strict", "torch", "jax.numpy"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).zeros((2, 65, 3))
    raise Refused("no other array library is installed")


@check("O14")
def impossible_start(target: Target) -> None:
    """sLSTM refuses a start whose normaliser is negative, or zero under a memory."""
    case = Case("ParaSLSTM")
    given = target.give(case)
    h0 = numbers(case).h0
    assert h0 is not None
    for value in (-1.0, 0.0):
        wrong = h0.copy()
        wrong[:, 1] = value
        with expect_error(ValueError, "h0", f"n = {value}"):
            target.apply(given.cell, given.x, target.array(wrong, case.dtype))


@check("O44", cell=CELLS, dtype=("float64",), few={"cell": ()})
def mixed_start(target: Target, cell: str, dtype: str) -> None:
    """A start of another floating dtype is cast; the result keeps x's dtype."""
    case = Case(cell)
    given = target.give(case)
    h0 = numbers(case).h0
    assert h0 is not None
    wide = target.array(h0, dtype)
    mixed = target.apply(given.cell, given.x, wide)
    expect(mixed.dtype == np.float32, f"states are {mixed.dtype}")
    expect_agreement(numbers(case).cell, mixed, target.apply(given.cell, given.x, given.h0), 1e-6)
