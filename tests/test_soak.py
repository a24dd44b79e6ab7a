"""A soak: random problems of the solver study's regimes; what is called converged must be right.

A result counts as right where it is within the public tolerance τ of the float64 time loop, by channel and slot,
relative to what the slot reaches in that channel. Where the time loop of the same dtype is itself off by more than τ/2,
a result may be off by twice as much as that loop. Where that loop is off by more than 100 τ (chaotic channels, latches
that tip), float64 is no judge of the solver, and the loop of the same dtype takes its place. The inputs are the gates
themselves (an identity for the input projection), so that both see the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from pararnn import (
    NewtonConfig,
    NewtonStats,
    ParaGRU,
    ParaLSTM,
    ParaSLSTM,
    ParaTanh,
    default_agreement_atol,
    newton_apply,
    sequential_apply,
)
from support import CELLS

# Below this a slot's scale in a channel counts as zero.
SMALLEST_SCALE = 1e-6


def spread(low, high):
    return lambda rng, size: rng.uniform(low, high, size)


def normal(size_of):
    return lambda rng, size: size_of * rng.standard_normal(size)


# By regime: recurrent weights, size of the pre-activations, and the bias of the gate that keeps or replaces.
REGIMES = {
    ParaGRU: {
        "init": (normal(0.11), 1.0, lambda n: -np.linspace(0.0, 1.0, n)),
        "slow": (normal(0.11), 1.0, lambda n: np.full(n, -5.0)),
        "short": (normal(0.11), 1.0, lambda n: np.full(n, 2.0)),
        "a1": (normal(1.0), 1.0, np.zeros),
        "L3": (normal(3.0), 3.0, np.zeros),
        "L10": (normal(10.0), 3.0, np.zeros),
    },
    ParaLSTM: {
        "init": (normal(0.11), 1.0, np.ones),
        "slow": (normal(0.11), 1.0, lambda n: np.full(n, 5.0)),
        "short": (normal(0.11), 1.0, lambda n: np.full(n, -2.0)),
        "a1": (normal(1.0), 1.0, np.zeros),
        "L3": (normal(3.0), 3.0, np.zeros),
        "L10": (normal(10.0), 3.0, np.zeros),
    },
    ParaSLSTM: {
        "init": (normal(0.11), 1.0, lambda n: np.linspace(3.0, 6.0, n)),
        "slow": (normal(0.11), 0.1, lambda n: np.full(n, -0.01)),
        "short": (normal(0.11), 1.0, np.zeros),
        "forget": (normal(0.11), 1.0, lambda n: -np.linspace(0.5, 6.0, n)),
        "a1": (normal(1.0), 1.0, np.zeros),
        "L3": (normal(3.0), 3.0, np.zeros),
        "L10": (normal(10.0), 3.0, np.zeros),
    },
    ParaTanh: {
        "u0.9": (spread(-0.9, 0.9), 1.0, np.zeros),
        "u1.5": (spread(-1.5, 1.5), 1.0, np.zeros),
        "u1.5weak": (spread(-1.5, 1.5), 0.1, np.zeros),
        "L3": (spread(-4.5, 4.5), 3.0, np.zeros),
        "L10": (spread(-15.0, 15.0), 3.0, np.zeros),
    },
}
KEEPING_GATE = {ParaGRU: "z", ParaLSTM: "f", ParaSLSTM: "f", ParaTanh: "u"}


def draw(kind, regime, rng, *, batch, time, width, dtype):
    """A cell and its gate inputs; each of the batch × width channels is a problem with an input of its own."""
    recurrent, size, bias_of = REGIMES[kind][regime]
    gates = len(kind.gates)
    cell = kind(gates * width, width, dtype=dtype, max_recurrent_norm=None, seed=0)
    arrays = {n: recurrent(rng, a.shape).astype(dtype) for n, a in cell.arrays.items() if not n.startswith("W_x")}
    place = kind.gates.index(KEEPING_GATE[kind]) * width
    bias = np.zeros(gates * width)
    bias[place : place + width] = bias_of(width)
    cell = cell.replace(W_x_weight=np.eye(gates * width, dtype=dtype), W_x_bias=bias.astype(dtype), **arrays)
    x = size * rng.standard_normal((batch, time, gates * width))
    h0 = None
    if rng.random() < 0.3:
        h0 = rng.uniform(-1.0, 1.0, (batch, *cell.state_shape))
        if kind is ParaSLSTM:  # one that a run could have reached: c is n times an average of tanh
            h0[:, 1] = 0.1 + np.abs(h0[:, 1])
            h0[:, 0] *= h0[:, 1]
        h0 = h0.astype(dtype)
    return cell, x.astype(dtype), h0


def errors(got, wanted):
    """The largest error of each slot in each channel, relative to what the slot reaches there: (B, S, D)."""
    if got.ndim == 3:
        got, wanted = got[:, :, None], wanted[:, :, None]
    wanted = wanted.astype(np.float64)
    scale = np.maximum(np.abs(wanted).max(axis=1), SMALLEST_SCALE)
    return np.abs(got.astype(np.float64) - wanted).max(axis=1) / scale


@dataclass
class Tally:
    """What a soak found."""

    problems: int = 0
    by_float64: int = 0
    walked: list[float] = field(default_factory=list)
    worst: float = 0.0
    where: str = ""

    def __str__(self) -> str:
        share = self.by_float64 / max(1, self.problems)
        return (
            f"{self.problems} problems, worst error {self.worst:.3f} of what is allowed ({self.where}); "
            f"{share:.0%} judged by float64, walked {np.mean(self.walked):.1%} on average"
        )


def soak(kind, *, problems, batch, longest, seed):
    """Runs `problems` sequences and returns the tally; a wrong result that is called converged fails at once."""
    rng, tally = np.random.default_rng(seed), Tally()
    regimes = list(REGIMES[kind])
    for number in range(-(-problems // batch)):
        regime = regimes[number % len(regimes)]
        dtype = (np.float32, np.float64)[number // len(regimes) % 2]
        time, width = int(rng.integers(130, longest)), int(rng.integers(1, 9))
        length = None if rng.random() < 0.25 else int(rng.integers(16, 257))
        cell, x, h0 = draw(kind, regime, rng, batch=batch, time=time, width=width, dtype=dtype)
        stats = NewtonStats()
        config = NewtonConfig(scan_backend="numpy", segment_len=length)
        got = newton_apply(cell, x, config, h0=h0, stats=stats)
        label = f"{regime}, {np.dtype(dtype).name}, T={time}, D={width}, L={length}, round {number}"
        assert stats.converged, f"the default solver always finishes: {label}"
        loop = sequential_apply(cell, x, h0=h0)
        truth = loop
        if dtype is np.float32:
            start = None if h0 is None else h0.astype(np.float64)
            truth = sequential_apply(cell.to(dtype=np.float64), x.astype(np.float64), h0=start)
        tau = default_agreement_atol(dtype)
        own = errors(loop, truth)
        judged = own <= 100.0 * tau
        ratio = np.where(judged, errors(got, truth) / np.maximum(tau, 2.0 * own), errors(got, loop) / tau)
        tally.problems += batch
        tally.by_float64 += int(judged.all(axis=(1, 2)).sum())
        tally.walked.append(stats.walked)
        if not ratio.max() <= tally.worst:
            tally.worst, tally.where = float(ratio.max()), label
        assert ratio.max() <= 1.0, (
            f"called converged, and wrong by {ratio.max():.3g} times what is allowed: {label}\n{stats}"
        )
        if stats.exact:
            np.testing.assert_array_equal(got, loop, err_msg=f"called exact, and not the loop: {label}")
    return tally


@pytest.mark.parametrize("kind", CELLS)
def test_the_estimate_of_a_loose_solve_is_of_the_error_s_size(kind):
    """One channel at a time, so that the estimate is of this channel, and in the public slots' own units."""
    rng, seen = np.random.default_rng(7), 0
    for regime in REGIMES[kind]:
        for _ in range(20):
            cell, x, h0 = draw(kind, regime, rng, batch=1, time=500, width=1, dtype=np.float64)
            stats = NewtonStats()
            length = int(rng.integers(16, 60))
            config = NewtonConfig(scan_backend="numpy", segment_len=length, tol=1e-3, warmup=4)
            got = newton_apply(cell, x, config, h0=h0, stats=stats)
            error = float(errors(got, sequential_apply(cell, x, h0=h0)).max())
            assert error <= 3.0 * stats.agreement_estimate + 1e-11, (regime, length, error, stats)
            assert stats.agreement_estimate <= 5e-3
            seen += not stats.exact
    assert seen > 30


@pytest.mark.parametrize("kind", CELLS)
def test_what_converged_is_right(kind, record_property):
    tally = soak(kind, problems=120, batch=4, longest=700, seed=11)
    record_property("soak", str(tally))
    print(kind.__name__, tally)
    assert tally.problems >= 120 and tally.by_float64 > 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", CELLS)
def test_what_converged_is_right_in_2000_problems(kind, record_property):
    tally = soak(kind, problems=2000, batch=10, longest=2100, seed=12)
    record_property("soak", str(tally))
    print(kind.__name__, tally)
    assert tally.problems >= 2000 and tally.by_float64 > 1000
