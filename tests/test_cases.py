"""Faults that users of other libraries met, by their number in the collected cases, as tests of the core on NumPy."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest

from pararnn import (
    ChannelwiseCell,
    NewtonConfig,
    NewtonDivergenceError,
    NotConvergedWarning,
    ParaGRU,
    ParaLSTM,
    ParaSLSTM,
    ParaTanh,
    newton_apply,
    newton_vjp,
    sequential_apply,
    verify_agreement,
)
from support import CELLS, error_of, problem, solve, start_for, strong

WAYS = {
    "auto": NewtonConfig(),
    "numpy": NewtonConfig(scan_backend="numpy"),
    "segments": NewtonConfig(segment_len=64),
    "short segments": NewtonConfig(segment_len=7, warmup=3),
    "exact": NewtonConfig(segment_len=31, exact=True),
}
F64 = NewtonConfig(max_iters=20, residual_atol=None)


class Linear(ChannelwiseCell):
    """h' = a h + b, where a comes in as a gate: the scan of the cases."""

    slots, gates = ("h",), ("a", "b")

    def step(self, xp, h, a, b):
        return (a * h + b,)


class Decay(ChannelwiseCell):
    """h' = a h + b, where a is a parameter."""

    slots, gates, params = ("h",), ("b",), ("a",)

    def step(self, xp, h, b, a):
        return (a * h + b,)


def linear(a, b, h0=None):
    """The cell, its input (1, T, 2) and start that make the recurrence h_t = a_t h_{t-1} + b_t."""
    a, b = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64))
    cell = Linear(2, 1, dtype=np.float64, seed=0).replace(W_x_weight=np.eye(2))
    start = None if h0 is None else np.full((1, 1), h0, np.float64)
    return cell, np.stack([a, b], axis=-1)[None], start


def bptt(cell, x, cotangent, h0=None, step=1e-6):
    """Derivatives of Σ cotangent · states by x, by central differences."""
    out = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        moved = []
        for sign in (1.0, -1.0):
            there = x.copy()
            there[place] += sign * step
            moved.append((cotangent * sequential_apply(cell, there, h0=h0)).sum())
        out[place] = (moved[0] - moved[1]) / (2.0 * step)
    return out


# --- A1: scan and Newton core ------


@pytest.mark.parametrize("way", WAYS)
def test_O01_O02_the_order_of_operands_forward_and_reversed(way):
    a, b = [1.0, 1.5, 0.8, 2.0], [1.0, -1.0, 0.5, 2.0]
    cell, x, _ = linear(a, b)
    np.testing.assert_allclose(newton_apply(cell, x, WAYS[way])[0, :, 0], [1.0, 0.5, 0.9, 3.8], rtol=1e-12)
    for tiles in (2, 4, 8, 33, 250):
        cell, x, _ = linear(np.tile(a, tiles)[: 4 * tiles - 1] * 0.6, np.tile(b, tiles)[: 4 * tiles - 1])
        got, wanted = newton_apply(cell, x, WAYS[way]), sequential_apply(cell, x)
        np.testing.assert_allclose(got, wanted, rtol=1e-9)
        # The gradient by b is the reverse scan with the factor of the step after.
        states, pullback = newton_vjp(cell, x, WAYS[way])
        cotangent = np.random.default_rng(0).standard_normal(states.shape)
        mu, after = np.zeros_like(states), 0.0
        for t in range(states.shape[1] - 1, -1, -1):
            after = cotangent[0, t, 0] + (x[0, t + 1, 0] * after if t + 1 < states.shape[1] else 0.0)
            mu[0, t, 0] = after
        np.testing.assert_allclose(pullback(cotangent).x[..., 1], mu[..., 0], rtol=1e-9)


@pytest.mark.parametrize("time", range(1, 41))
def test_O03_odd_lengths_reversed(time):
    cell, x, _ = linear(np.ones(time), np.arange(time))
    _, pullback = newton_vjp(cell, x, NewtonConfig(segment_len=3))
    got = pullback(np.arange(time, dtype=np.float64).reshape(1, time, 1)).x[0, :, 1]
    np.testing.assert_array_equal(got, np.cumsum(np.arange(time)[::-1])[::-1])
    if time == 9:
        np.testing.assert_array_equal(got, [36, 36, 35, 33, 30, 26, 21, 15, 8])


@pytest.mark.parametrize("time", [1, 2, 3, 31, 33, 63, 65, 127, 1000])
def test_O04_no_length_or_width_is_special(time):
    for width in (1, 2, 5, 7, 96, 130):
        for kind in (ParaGRU, ParaLSTM):
            cell, x = problem(kind, time, batch=1, width=width, dtype=np.float64)
            wanted = sequential_apply(cell, x)
            for config in (NewtonConfig(), NewtonConfig(segment_len=16), F64):
                assert error_of(cell, newton_apply(cell, x, config), wanted) < 1e-10


@pytest.mark.parametrize("time", [65535, 65537])
def test_O04_O47_lengths_around_two_to_the_sixteen(time):
    cell, x = problem(ParaGRU, time, batch=1, width=2)
    wanted = sequential_apply(cell, x)
    for config in (NewtonConfig(), NewtonConfig(segment_len=256), NewtonConfig(max_iters=4)):
        assert error_of(cell, newton_apply(cell, x, config), wanted) < 1e-5
    states, pullback = newton_vjp(cell, x)
    assert np.isfinite(pullback(np.ones_like(states)).x).all()


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "time"), [(1, 65536), (1, 70001), (65536, 2), (65537, 3)])
def test_O47_large_axes(batch, time):
    cell, x = problem(ParaGRU, time, batch=batch, width=2)
    for config in (NewtonConfig(), NewtonConfig(segment_len=2 if time < 9 else 300)):
        assert error_of(cell, newton_apply(cell, x, config), sequential_apply(cell, x)) < 1e-5


@pytest.mark.parametrize("time", [31, 32, 33, 63, 64, 65, 127, 129, 255, 257, 511, 1023, 2049])
def test_O05_integers_stay_exact(time):
    cell, x, _ = linear(np.ones(time), np.ones(time))
    for config in WAYS.values():
        np.testing.assert_array_equal(newton_apply(cell, x, config)[0, :, 0], np.arange(1, time + 1))


def test_O06_a_vanishing_product_is_not_divided_by():
    cell, x, _ = linear(np.full(64, 1e-3), np.ones(64))
    narrow, single = cell.to(dtype=np.float32), x.astype(np.float32)
    wanted = sequential_apply(cell, x)[0, :, 0]
    for config in (*WAYS.values(), NewtonConfig(max_iters=3)):
        states, pullback = newton_vjp(narrow, single, config)
        np.testing.assert_allclose(states[0, :, 0], wanted, rtol=1e-6)
        assert np.isfinite(pullback(np.ones_like(states)).x).all()


def test_O07_too_few_iterations_are_never_silent():
    cell, x = problem(ParaGRU, 200, width=8, features=8, dtype=np.float64)
    cell = cell.replace(max_recurrent_norm=None, **{n: 5.0 * cell.arrays[n] for n in ("a_z", "a_r", "a_n")})
    for k in (1, 0):
        config = NewtonConfig(max_iters=k, residual_fail=None)
        with pytest.warns(NotConvergedWarning, match="estimated error"):
            got, stats = solve(cell, x, config)
        assert not stats.converged and stats.max_residual > 1e-3 and stats.agreement_estimate > 1e-3
        assert error_of(cell, got, sequential_apply(cell, x)) > 1e-4
        with pytest.warns(NotConvergedWarning):
            report = verify_agreement(cell, x, config=config)
        assert not report.ok and report.max_residual == stats.max_residual
        with pytest.warns(NotConvergedWarning):
            states, pullback = newton_vjp(cell, x, config)
        grads = pullback(np.ones_like(states))
        assert all(np.abs(a).max() > 0.0 for a in (grads.x, grads.h0, *grads.params.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verify_agreement(cell, x).ok


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize(
    "config",
    [
        NewtonConfig(),
        NewtonConfig(scan_backend="numpy"),
        NewtonConfig(segment_len=4),
        NewtonConfig(segment_len=4, exact=True, warmup=0),
        NewtonConfig(segment_len=3, max_passes=1),
        NewtonConfig(chunk_len=6, segment_len=2),
        NewtonConfig(max_iters=0, residual_fail=None),
        NewtonConfig(max_iters=4, residual_fail=None),
        NewtonConfig(max_iters=4, residual_fail=None, residual_atol=None, scan_tile="seq"),
        NewtonConfig(max_iters=2, segment_len=4, residual_fail=None),
        NewtonConfig(max_iters=4, residual_fail=None, chunk_len=6),
        NewtonConfig(newton_iters_by_t={1: 3}, residual_fail=None),
    ],
    ids=range(12),
)
@pytest.mark.filterwarnings("ignore::pararnn.NotConvergedWarning")
def test_O08_a_residual_that_is_never_a_number(kind, config):
    cell, x = problem(kind, 16, width=4, dtype=np.float64)
    x[0, 5, 0] = np.nan
    wanted = sequential_apply(cell, x)
    got, stats = solve(cell, x, config)
    assert np.isfinite(got[0, :5]).all() and np.isnan(got[0, 5]).all() and np.isnan(wanted[0, 5:]).all()
    pinned = config.max_iters is not None or config.newton_iters_by_t is not None
    assert stats.converged is not pinned or not np.isnan(stats.agreement_estimate)
    if config.max_iters != 0:  # the first guess knows nothing of earlier steps
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
        assert error_of(cell, got, wanted) < (1e-2 if pinned else 1e-10)
    states, pullback = newton_vjp(cell, x, config)
    grads = pullback(np.ones_like(states))
    assert np.isfinite(grads.x[1]).all(), "the other sequence is not touched"
    if pinned and config.segment_len is None:
        with pytest.raises(NewtonDivergenceError, match="nan"):
            newton_apply(cell, x, config.replace(residual_fail=1.0))


class Chaotic(ChannelwiseCell):
    """Two channels' worth of tanh in two slots, W = 3·N(0,1)/sqrt(2)-like: sensitive to its start."""

    slots, gates, params = ("p", "h"), ("u", "v"), ("a", "b", "c", "d")

    def step(self, xp, p, h, u, v, a, b, c, d):
        return xp.tanh(a * p + b * h + u), xp.tanh(c * p + d * h + v)


@pytest.mark.parametrize("kind", [ParaGRU, ParaLSTM, ParaTanh, Chaotic])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_O09_sensitive_dynamics_agree_or_say_that_they_do_not(kind, dtype):
    for seed in range(3):
        cell, x = strong(kind, 512, 3.0, seed=seed, batch=1, width=32, dtype=dtype, scale=0.3)
        # Coarse numbers, whose products are exact: with other gate inputs a chaotic network is another network.
        cell = cell.replace(W_x_weight=np.round(cell.W_x.weight * 64.0) / 64.0)
        x = np.round(x * 8.0) / 8.0
        wanted = sequential_apply(cell, x)
        tau = 1e-4 if dtype is np.float32 else 1e-10
        for config in (NewtonConfig(segment_len=16), NewtonConfig(segment_len=64), NewtonConfig(segment_len=33)):
            got, stats = solve(cell, x, config.replace(scan_backend="numpy"))
            assert stats.converged and error_of(cell, got, wanted) < tau, (seed, config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got, stats = solve(cell, x, NewtonConfig(max_iters=5, residual_fail=None, scan_backend="numpy"))
        assert not stats.converged or error_of(cell, got, wanted) < tau


def test_O09_newton_needs_at_most_T_iterations():
    cell, x = strong(ParaTanh, 40, 3.0, dtype=np.float64, scale=0.3)
    got, stats = solve(cell, x, NewtonConfig(max_iters=40, residual_atol=1e-12, scan_tile="seq", residual_fail=None))
    assert stats.iters <= 40 and error_of(cell, got, sequential_apply(cell, x)) < 1e-9


# --- A2: state, step by step and chunk by chunk ------


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize(
    "pieces", [[64] * 4, [1, 255], [255, 1], [63, 65, 128], [0, 256], [100, 0, 156], [1] * 256], ids=len
)
def test_O13_a_call_in_pieces_with_carried_state_is_one_call(kind, pieces):
    cell, x = problem(kind, 256, dtype=np.float64)
    start = start_for(cell, 2)
    whole = sequential_apply(cell, x, h0=start)
    for config in (NewtonConfig(), NewtonConfig(segment_len=24)) if len(pieces) < 99 else (NewtonConfig(),):
        h0, got, place = start, [], 0
        for length in pieces:
            part = newton_apply(cell, x[:, place : place + length], config, h0=h0)
            got.append(part)
            place += length
            h0 = part[:, -1] if length else h0
        assert error_of(cell, np.concatenate(got, axis=1), whole) < 1e-10
        assert error_of(cell, h0, whole[:, -1]) < 1e-10


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("value", [0.5, -0.5, 0.0])
def test_O14_three_steps_from_a_start_of_either_sign(kind, value):
    cell, x = problem(kind, 3, width=4, dtype=np.float64)
    h0 = np.full((2, *cell.state_shape), value)
    if kind is ParaSLSTM:
        h0[:, 1] = abs(value)
    state, steps = h0, []
    for t in range(3):
        state = sequential_apply(cell, x[:, t : t + 1], h0=state)[:, 0]
        steps.append(state)
    for config in (NewtonConfig(), NewtonConfig(segment_len=1), NewtonConfig(segment_len=2), F64):
        np.testing.assert_allclose(newton_apply(cell, x, config, h0=h0), np.stack(steps, axis=1), rtol=1e-9, atol=1e-12)
    if value == 0.0:
        np.testing.assert_array_equal(newton_apply(cell, x, h0=h0), newton_apply(cell, x))


@pytest.mark.parametrize("kind", CELLS)
def test_O15_ranks_are_kept_and_one_is_not_confused_with_the_other(kind):
    cell, _ = problem(kind, 1)
    for batch, time in ((1, 1), (1, 2), (2, 1)):
        x = np.ones((batch, time, 3), np.float32)
        for run in (newton_apply, sequential_apply):
            assert run(cell, x).shape == (batch, time, *cell.state_shape)
            for wrong in (x[:, 0], x[0], x[:, :, None]):
                with pytest.raises(ValueError, match="3 axes"):
                    run(cell, wrong)
        with pytest.raises(ValueError, match="h0 must have shape"):
            newton_apply(cell, x, h0=np.zeros((batch, 1, *cell.state_shape), np.float32))


@pytest.mark.parametrize("kind", CELLS)
def test_O16_O58_the_same_call_gives_the_same_bits(kind):
    """Also after memory full of NaN was handed back to the allocator."""
    cell, x = strong(kind, 300, 1.0, width=9)
    for config in (*WAYS.values(), NewtonConfig(max_iters=3, residual_fail=None, residual_atol=None)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotConvergedWarning)
            states, pullback = newton_vjp(cell, x, config)
            grads = pullback(np.ones_like(states))
            for _ in range(3):
                waste = [np.full(s, np.nan, np.float32) for s in (states.shape, (301, 64, 18), (1, 99_999))]
                del waste
                again, back = newton_vjp(cell, x, config)
                np.testing.assert_array_equal(again, states)
                more = back(np.ones_like(states))
                np.testing.assert_array_equal(more.x, grads.x)
                for name, value in grads.params.items():
                    np.testing.assert_array_equal(more.params[name], value)


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("time", [255, 257, 300])
def test_O18_gradients_off_the_segment_length_with_a_gate_bias(kind, time):
    cell, x = problem(kind, time, width=4, dtype=np.float64)
    cell = cell.replace(W_x_bias=np.ones_like(cell.W_x.bias))
    grads = {}
    for name, config in {
        "loop": NewtonConfig(segment_len=time),
        "256": NewtonConfig(segment_len=256),
        "64": NewtonConfig(segment_len=64),
        "auto": NewtonConfig(),
    }.items():
        states, pullback = newton_vjp(cell, x, config)
        grads[name] = pullback(2.0 * states)
        assert np.isfinite(grads[name].x).all()
    for name in ("256", "64", "auto"):
        np.testing.assert_allclose(grads[name].x, grads["loop"].x, rtol=1e-7, atol=1e-9)
        for key, value in grads["loop"].params.items():
            np.testing.assert_allclose(grads[name].params[key], value, rtol=1e-7, atol=1e-7)


def test_O22_a_loss_on_the_final_state_alone():
    a = [0.5, 0.2, 0.9, 0.7, 0.3]
    cell, x, h0 = linear(a, np.zeros(5), 2.0)
    for config in WAYS.values():
        _, pullback = newton_vjp(cell, x, config, h0)
        assert pullback(last=np.ones((1, 1))).h0 == pytest.approx(0.0189)
    for kind in CELLS:
        cell, x = problem(kind, 21, width=2, features=2, dtype=np.float64)
        states, pullback = newton_vjp(cell, x, NewtonConfig(segment_len=6))
        last = np.random.default_rng(0).standard_normal(states[:, -1].shape)
        cotangent = np.zeros_like(states)
        cotangent[:, -1] = last
        only, whole = pullback(last=last), pullback(cotangent)
        np.testing.assert_allclose(only.x, whole.x, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(only.x, bptt(cell, x, cotangent), rtol=1e-4, atol=1e-7)
        both = pullback(cotangent, last=last)
        np.testing.assert_allclose(both.x, 2.0 * only.x, rtol=1e-12, atol=1e-14)


def test_O23_the_start_s_gradient_depends_on_no_flag():
    a, b, gy = [0.5, 0.2, 0.9, 0.7, 0.3], [1.0, -2.0, 0.5, 3.0, -1.0], [1.0, 0.5, -1.0, 2.0, 1.0]
    cell, x, h0 = linear(a, b, 2.0)
    cotangent = np.reshape(gy, (1, 5, 1))
    for config in (*WAYS.values(), NewtonConfig(recompute=True), NewtonConfig(segment_len=2, recompute=True)):
        _, pullback = newton_vjp(cell, x, config, h0)
        for more in ({}, {"last": np.zeros((1, 1))}):
            grads = pullback(cotangent, **more)
            assert grads.h0 == pytest.approx(0.6049)
            np.testing.assert_allclose(grads.x[0, :, 0], [2.4196, 2.098, -0.976, -2.162, 2.342], rtol=1e-9)


@pytest.mark.parametrize("kind", CELLS)
def test_O24_the_gradient_crosses_a_segment_border_of_the_user(kind):
    cell, x = problem(kind, 16, dtype=np.float64)
    states, pullback = newton_vjp(cell, x)
    cotangent = np.random.default_rng(0).standard_normal(states.shape)
    cotangent[:, :8] = 0.0
    whole = pullback(cotangent)
    first, first_back = newton_vjp(cell, x[:, :8])
    _, second_back = newton_vjp(cell, x[:, 8:], h0=first[:, -1])
    second = second_back(cotangent[:, 8:])
    carried = first_back(last=second.h0)
    np.testing.assert_allclose(np.concatenate([carried.x, second.x], axis=1), whole.x, rtol=1e-9, atol=1e-12)
    for name, value in whole.params.items():
        np.testing.assert_allclose(carried.params[name] + second.params[name], value, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(carried.h0, whole.h0, rtol=1e-9, atol=1e-12)
    assert np.abs(carried.x).max() > 1e-3
    detached = first_back(np.zeros_like(first))
    assert not detached.x.any() and not any(a.any() for a in detached.params.values())


def test_O35_a_zero_input_is_an_ordinary_step():
    for kind in CELLS:
        cell, x = problem(kind, 9, dtype=np.float64)
        cell = cell.replace(W_x_bias=np.random.default_rng(0).standard_normal(cell.W_x.bias.shape))
        x[:, 4] = 0.0
        states = newton_apply(cell, x, NewtonConfig(segment_len=3))
        step = sequential_apply(cell, np.zeros((2, 1, 3)), h0=states[:, 3])
        np.testing.assert_allclose(states[:, 4], step[:, 0], rtol=1e-10, atol=1e-13)
        assert np.abs(states[:, 4] - states[:, 3]).max() > 1e-3, "it moves the state through its biases"


# --- A4: numerics ------


@pytest.mark.parametrize("kind", CELLS)
def test_O41_a_NaN_in_one_gate_stays_in_its_channel(kind):
    for gate in range(len(kind.gates)):
        cell, x = problem(kind, 30, features=1, width=4, dtype=np.float64)
        weight = np.array(cell.W_x.weight)
        weight[gate * 4 + 1] = np.nan
        cell = cell.replace(W_x_weight=weight)
        x[:, :2] = 0.5
        wanted = sequential_apply(cell, x)
        spoilt = [k for k in range(4) if np.isnan(wanted[..., k]).any()]
        assert spoilt == [1]
        for config in (NewtonConfig(), NewtonConfig(segment_len=7), NewtonConfig(segment_len=7, coords="native")):
            got = newton_apply(cell, x, config)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
            assert error_of(cell, got, wanted) < 1e-10


def test_O41_infinity_that_is_finite_again_is_infinity():
    cell = Decay(1, 1, dtype=np.float64, seed=0).replace(W_x_weight=np.ones((1, 1)), a=np.full(1, 0.5))
    x = np.reshape([1.0, 2.0, np.inf, 1.0, -3.0, 0.0], (1, 6, 1))
    for config in (*WAYS.values(), NewtonConfig(segment_len=2)):
        np.testing.assert_array_equal(newton_apply(cell, x, config)[0, :, 0], [1.0, 2.5, *[np.inf] * 4])


def test_O42_the_numbers_of_the_case():
    """c/n of the held sLSTM is tanh(z); the case's own numbers are c/n for a linear z and an open output gate."""
    x = np.zeros((1, 50, 1))
    for f in (0.0, 4.0):
        cell = ParaSLSTM(1, 3, dtype=np.float64, seed=0)
        z = np.arctanh([0.5, -0.5, 0.9])
        bias = np.concatenate([[100.0, 200.0, 60.0], np.full(3, f), z, np.full(3, 40.0)])
        cell = cell.replace(R=0.0 * cell.R, W_x_weight=0.0 * cell.W_x.weight, W_x_bias=bias)
        for config in (NewtonConfig(), NewtonConfig(segment_len=8), NewtonConfig(max_iters=3)):
            h = newton_apply(cell, x, config)[0, :, 3]
            np.testing.assert_allclose(h, np.broadcast_to([0.5, -0.5, 0.9], h.shape), rtol=2e-6)


# --- A5: frameworks and sizes ------


@pytest.mark.parametrize("sizes", [(2, 0, 4), (0, 5, 4), (0, 0, 4)], ids=str)
@pytest.mark.parametrize("kind", CELLS)
def test_O52_nothing_in_nothing_out(kind, sizes):
    """test_inputs.py walks every path; this is the case as it was met."""
    cell, _ = problem(kind, 1, features=4)
    x, h0 = np.zeros(sizes, np.float32), np.ones((sizes[0], *cell.state_shape), np.float32)
    states, pullback = newton_vjp(cell, x, h0=h0)
    grads = pullback(np.zeros_like(states), last=2.0 * h0)
    assert states.shape == (*sizes[:2], *cell.state_shape) and not any(a.any() for a in grads.params.values())
    np.testing.assert_array_equal(grads.h0, 2.0 * h0)


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("width", [16, 64])
def test_O60_saturated_gates_warn_about_nothing(kind, width):
    cell, _ = problem(kind, 1, width=width)
    rng = np.random.default_rng(0)
    for x in (np.full((2, 10, 3), 1e3), np.full((2, 10, 3), -1e3), rng.choice([-1e3, 1e3], (2, 10, 3))):
        x = x.astype(np.float32)
        with warnings.catch_warnings(), np.errstate(all="raise"):
            warnings.simplefilter("error")
            before = np.geterr()
            wanted = sequential_apply(cell, x)
            assert np.isfinite(wanted).all()
            for config in (
                NewtonConfig(),
                NewtonConfig(scan_backend="numpy", segment_len=3),
                NewtonConfig(scan_backend="array", segment_len=4, warmup=0),
                NewtonConfig(segment_len=3, coords="native"),
                NewtonConfig(max_iters=10, residual_fail=None),
                NewtonConfig(max_iters=3, segment_len=3, residual_fail=None),
            ):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", NotConvergedWarning)
                    got, stats = solve(cell, x, config)
                    assert np.isfinite(got).all()
                    assert not stats.converged or error_of(cell, got, wanted) < 1e-5
                    stats.to_dict(), stats.lyapunov, str(stats)
                    states, pullback = newton_vjp(cell, x, config)
                    grads = pullback(np.ones_like(states))
                assert all(np.isfinite(a).all() for a in (grads.x, grads.h0, *grads.params.values()))
                assert np.geterr() == before


@pytest.mark.parametrize("kind", CELLS)
def test_O64_every_optional_argument_of_a_gradient_set_and_unset(kind):
    cell, x = problem(kind, 14, dtype=np.float64)
    h0 = start_for(cell, 2)
    shape = (2, 14, *cell.state_shape)
    rng = np.random.default_rng(0)
    cotangent, last = rng.standard_normal(shape), rng.standard_normal((2, *cell.state_shape))
    names = set(cell.arrays)
    for start, config, given in itertools.product(
        (None, h0),
        (None, NewtonConfig(segment_len=4), NewtonConfig(recompute=True), F64),
        ({"cotangent": cotangent}, {"last": last}, {"cotangent": cotangent, "last": last}),
    ):
        _, pullback = newton_vjp(cell, x, config, start)
        grads = pullback(**given)
        assert set(grads.params) == names and grads.x.shape == x.shape and grads.h0.shape == h0.shape
        assert all(grads.params[n].shape == cell.arrays[n].shape for n in names)
        assert grads.h0.any() and grads.x.any() and all(grads.params[n].any() for n in names)
