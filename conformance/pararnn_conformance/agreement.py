"""Every option, size and starting point gives the time loop's states."""

from __future__ import annotations

from typing import Any

import numpy as np

from pararnn import NewtonStats, default_agreement_atol, newton_apply, sequential_apply, verify_agreement
from pararnn_conformance.case import CELLS, Case, cotangent, loop_states, numbers, wide_gradients, wide_states
from pararnn_conformance.expect import expect, expect_agreement, expect_near, expect_same_bits
from pararnn_conformance.registration import check
from pararnn_conformance.target import Target

T = 65
OPTIONS: dict[str, dict[str, Any]] = {
    "time-loop": {"segment_len": T},
    "L=2": {"segment_len": 2},
    "L=32": {"segment_len": 32},
    "L=64": {"segment_len": 64},
    "no-warmup": {"segment_len": 16, "warmup": 0},
    "one-pass": {"segment_len": 16, "warmup": 0, "max_passes": 1},
    "exact": {"segment_len": 16, "exact": True},
    "windows": {"chunk_len": 17},
    "windows-of-segments": {"chunk_len": 24, "segment_len": 8},
    "diagonal": {"segment_len": 16, "jac_structure": "diag"},
    "native": {"segment_len": 16, "coords": "native"},
    "numpy-scalar": {"segment_len": np.int64(16), "tol": np.float64(1e-6)},
}


@check("P01 P11 O53", cell=CELLS, option=tuple(OPTIONS), few={"cell": ("Echo",), "option": ("windows-of-segments",)})
def options(target: Target, cell: str, option: str) -> None:
    """No option that leaves the iteration count open changes the result."""
    case = Case(cell, time=T)
    mine = target.run(case, **OPTIONS[option])
    expect_agreement(numbers(case).cell, mine, loop_states(case), default_agreement_atol(np.float32))


@check("O04", cell=CELLS, sizes=((1, 1, 1), (1, 2, 7), (3, 7, 1), (2, 130, 4)), few={"cell": ()})
def sizes(target: Target, cell: str, sizes: tuple[int, int, int]) -> None:
    """Odd batches, widths and numbers of features, states and gradients."""
    batch, width, features = sizes
    case = Case(cell, time=50, batch=batch, width=width, features=features)
    given = target.give(case)
    states, pullback = target.vjp(given.cell, given.x, given.h0, segment_len=16)
    host = numbers(case).cell
    expect_agreement(host, target.host(states), loop_states(case), default_agreement_atol(np.float32))
    found = target.gradients(pullback(target.array(cotangent(case), case.dtype)))
    for name, true in wide_gradients(case).items():
        expect_near(found[name], true, 2e-4, name)


@check("P02 P08", cell=CELLS, reference=("same", "float64"))
def report(target: Target, cell: str, reference: str) -> None:
    """verify_agreement on this backend reports ok, and against which loop."""
    given = target.give(Case(cell, time=100))
    config = target.config()
    target.ask(given.cell, given.x, given.h0, config)
    if reference == "float64":
        target.array(np.zeros(1), "float64")  # Refused where the library has none
    found = verify_agreement(given.cell, given.x, config=config, h0=given.h0, reference=reference)
    expect(found.ok, str(found))
    expect(found.reference == reference and found.backend == target.name, str(found.to_dict()))


@check("O53", cell=CELLS, few={"cell": ("Echo",)})
def oracle(target: Target, cell: str) -> None:
    """sequential_apply on the target's own arrays equals the suite's loop."""
    case = Case(cell, time=9)
    given = target.give(case)
    target.ask(given.cell, given.x, given.h0, target.config())
    mine = target.host(sequential_apply(given.cell, given.x, given.h0))
    expect_agreement(numbers(case).cell, mine, wide_states(case), 1e-5)


@check("O14", cell=CELLS, value=(0.5, -0.5, 0.0), few={"cell": ("Echo",)})
def start(target: Target, cell: str, value: float) -> None:
    """Any starting state is continued as the step itself would; zeros are the same as none."""
    case = Case(cell, time=3, width=4, start=False)
    host, x, _ = numbers(case)
    given = target.give(case)
    h0 = np.full((case.batch, *host.state_shape), value)
    if cell == "ParaSLSTM":
        h0[:, 1, :] = abs(value)  # a normaliser is never negative
    mine = target.apply(given.cell, given.x, target.array(h0, case.dtype))
    now, rows = h0.astype(np.float32), []
    for t in range(3):
        one = sequential_apply(host.to(dtype=np.float32), x[:, t : t + 1].astype(np.float32), now)
        now = one[:, 0]
        rows.append(one)
    expect_agreement(host, mine, np.concatenate(rows, axis=1), 1e-5)
    if value == 0.0:
        expect_same_bits(mine, target.apply(given.cell, given.x), "h0 of zeros against none")


@check("O57", cell=CELLS, guess=("true", "garbage", "nan"), few={"cell": ("Echo",), "guess": ("garbage",)})
def guesses(target: Target, cell: str, guess: str) -> None:
    """A guess may be good, bad or NaN; the result is the time loop's."""
    case = Case(cell)
    given = target.give(case)
    true = loop_states(case)
    rng = np.random.default_rng(5)
    made = {"true": true, "garbage": 30.0 * rng.standard_normal(true.shape), "nan": np.full(true.shape, np.nan)}
    values = made[guess]
    if cell == "ParaSLSTM" and guess == "garbage":
        values[:, :, 1] = np.abs(values[:, :, 1])
    offered = target.array(values, case.dtype)
    mine = target.apply(given.cell, given.x, given.h0, guess=offered, segment_len=16)
    expect_agreement(numbers(case).cell, mine, true, default_agreement_atol(np.float32))


@check("P01 P41 O43", cell=CELLS, dtype=("float16", "bfloat16"), few={"cell": ("ParaGRU",)})
def half_precision(target: Target, cell: str, dtype: str) -> None:
    """Half precision is stored in half and computed in float32: the result is the float32 loop's, rounded once."""
    case = Case(cell, dtype)
    given = target.give(case)
    config = target.config()
    target.ask(given.cell, given.x, given.h0, config)
    states = newton_apply(given.cell, given.x, config, h0=given.h0)
    expect(states.dtype == given.x.dtype, f"states are {states.dtype}, x is {given.x.dtype}")
    true = loop_states(case)
    step = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    expect_agreement(numbers(case).cell, target.host(states).astype(np.float32), true, step, "one rounding")


@check("P01 O42")
def exponential_gates(target: Target) -> None:
    """sLSTM with gates that overflow exp: the stabiliser keeps h right; a gate that never opens leaves h at 0."""
    width = 3
    case = Case("ParaSLSTM", time=3, batch=1, width=width, features=4, start=False)
    host = numbers(case).cell
    weight = np.kron(np.eye(4), np.ones((width, 1)))  # each gate reads one feature
    host = host.replace(R=np.zeros((4, width)), **{"W_x.weight": weight, "W_x.bias": np.zeros(4 * width)})
    cell = target.cell(host, "float32")
    values = np.asarray([0.5, -0.5, 0.9])
    x = np.stack([[100.0, 200.0, -50.0], np.zeros(3), np.arctanh(values), np.full(3, 40.0)], axis=-1)[None]

    def h_of(inputs: np.ndarray) -> np.ndarray:
        return target.apply(cell, target.array(inputs, "float32"))[0, :, 3]

    expect_near(h_of(x), np.repeat([[0.5], [-0.5], [-0.5]], width, axis=1), 1e-5, "h")
    shut = np.stack([np.full(3, -1000.0), np.zeros(3), np.full(3, 0.5), np.full(3, 40.0)], axis=-1)[None]
    expect_near(h_of(shut), np.zeros((3, width)), 1e-5, "h of a shut gate")


@check("P07", cell=CELLS, few={"cell": ("ParaGRU",)})
def statistics(target: Target, cell: str) -> None:
    """NewtonStats says what ran, in plain values, and is filled by both entry points."""
    case = Case(cell)
    given = target.give(case)
    for how in ("apply", "vjp"):
        stats = NewtonStats()
        getattr(target, how)(given.cell, given.x, given.h0, stats=stats, segment_len=16)
        expect(stats.scan_backend == target.name, f"{how}: scan_backend is {stats.scan_backend!r}")
        expect(stats.path in ("sequential", "segments", "per-step"), f"{how}: path is {stats.path!r}")
        expect(stats.agreement_estimate >= 0.0 and stats.max_residual >= 0.0, f"{how}: {stats.to_dict()}")
        expect(stats.passes >= 1 and stats.windows >= 1 and stats.reason, f"{how}: {stats.to_dict()}")
        plain = (int, float, str, bool, tuple, type(None))
        odd = {k: type(v).__name__ for k, v in stats.to_dict().items() if not isinstance(v, plain)}
        expect(not odd, f"{how}: not plain values: {odd}")
