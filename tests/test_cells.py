"""Cells: their equations against formulas written out here, their parameters, and what a user's own cell may do."""

from __future__ import annotations

import copy
import inspect
import math
import pickle

import numpy as np
import pytest

from pararnn import (
    ChannelwiseCell,
    NewtonConfig,
    ParaGRU,
    ParaLSTM,
    ParaSLSTM,
    ParaTanh,
    RNNCell,
    UntraceableError,
    check_cell,
    explain,
    newton_apply,
    newton_vjp,
    sequential_apply,
    verify_agreement,
)
from pararnn.functions import log_sigmoid, sigmoid, softplus
from support import CELLS, error_of, problem, solve, start_for, strong

# --- the equations, from the reference, in plain NumPy ------


def logistic(x):
    return 1.0 / (1.0 + np.exp(-x))


def by_hand(cell, x, h0=None):
    """The states (B, T, S, D) by the reference's formulas, gate by gate as it writes them."""
    weight, bias = np.asarray(cell.W_x.weight), np.asarray(cell.W_x.bias)
    cap = math.inf if cell.max_recurrent_norm is None else cell.max_recurrent_norm
    p = {name: np.clip(np.asarray(a), -cap, cap) for name, a in cell.arrays.items() if not name.startswith("W_x")}
    batch, time, _ = x.shape
    state = np.zeros((batch, cell.state_slots, cell.d_h)) if h0 is None else h0.reshape(batch, -1, cell.d_h)
    out = []
    for t in range(time):
        u = np.split(x[:, t] @ weight.T + bias, len(cell.gates), axis=1)
        s = [state[:, k] for k in range(cell.state_slots)]
        if isinstance(cell, ParaGRU):
            (h,) = s
            z = logistic(p["a_z"] * h + u[0])
            r = logistic(p["a_r"] * h + u[1])
            n = np.tanh(p["a_n"] * (r * h) + u[2])
            new = [(1 - z) * h + z * n]
        elif isinstance(cell, ParaLSTM):
            c, h = s
            f = logistic(p["a_f"] * h + p["c_f"] * c + u[0])
            z = np.tanh(p["a_z"] * h + u[1])
            c = f * c + (1 - f) * z
            o = logistic(p["a_o"] * h + p["c_o"] * c + u[2])
            new = [c, o * np.tanh(c)]
        elif isinstance(cell, ParaSLSTM):
            c, n, m, h = s
            i, f, z, o = (p["R"][k] * h + u[k] for k in range(4))
            top = np.maximum(f + m, i)
            gain, keep = np.exp(i - top), np.exp(f + m - top)
            n, c = keep * n + gain, keep * c + gain * np.tanh(z)
            new = [c, n, top, logistic(o) * c / (n + cell.eps)]
        else:
            (h,) = s
            new = [np.tanh(p["a"] * h + u[0])]
        state = np.stack(new, axis=1)
        out.append(state)
    return np.stack(out, axis=1)


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("cap", ["default", None, 0.1])
@pytest.mark.parametrize("given", [False, True])
def test_every_cell_follows_the_reference_s_equations(kind, cap, given):
    cell, x = strong(kind, 57, 1.0, dtype=np.float64, features=4, width=6, scale=1.5)
    cell = cell.replace(max_recurrent_norm=0.5 if cap == "default" else cap)
    bias = 0.5 * np.random.default_rng(9).standard_normal(cell.W_x.bias.shape)
    cell = cell.replace(W_x_bias=bias)
    h0 = start_for(cell, 2) if given else None
    wanted = by_hand(cell, x, h0)
    wanted = wanted[:, :, 0] if cell.state_slots == 1 else wanted
    for run in (sequential_apply, newton_apply):
        np.testing.assert_allclose(run(cell, x, h0=h0), wanted, rtol=1e-12, atol=1e-12)
    assert error_of(cell, newton_apply(cell, x, NewtonConfig(segment_len=8), h0=h0), wanted) < 1e-10


def test_z_opens_for_the_new_value_in_the_gru():
    """The reverse of torch.nn.GRU."""
    cell = ParaGRU(1, 1, dtype=np.float64, seed=0)
    zero = {name: np.zeros(1) for name in ("a_z", "a_r", "a_n")}
    for z, wanted in ((30.0, np.tanh(0.3)), (-30.0, 0.9)):
        open_or_shut = cell.replace(W_x_weight=np.zeros((3, 1)), W_x_bias=np.asarray([z, 0.0, 0.3]), **zero)
        got = sequential_apply(open_or_shut, np.zeros((1, 1, 1)), h0=np.full((1, 1), 0.9))
        np.testing.assert_allclose(got, wanted, rtol=1e-9)


def test_the_lstm_peeps_at_the_new_c():
    cell = ParaLSTM(1, 1, dtype=np.float64, max_recurrent_norm=None, seed=0)
    zero = {name: np.zeros(1) for name in ("a_f", "a_z", "a_o", "c_f")}
    cell = cell.replace(
        W_x_weight=np.zeros((3, 1)), W_x_bias=np.asarray([-40.0, 0.7, 0.0]), c_o=np.asarray([5.0]), **zero
    )
    c, h = sequential_apply(cell, np.zeros((1, 1, 1)), h0=np.full((1, 2, 1), -0.9))[0, 0, :, 0]
    assert c == pytest.approx(np.tanh(0.7)) and h == pytest.approx(logistic(5.0 * c) * np.tanh(c))


def test_the_documented_slots_gates_and_parameters():
    table = {
        ParaGRU: (("h",), ("z", "r", "n"), {"a_z", "a_r", "a_n"}, 0),
        ParaLSTM: (("c", "h"), ("f", "z", "o"), {"a_f", "a_z", "a_o", "c_f", "c_o"}, 1),
        ParaSLSTM: (("c", "n", "m", "h"), ("i", "f", "z", "o"), {"R"}, 3),
        ParaTanh: (("h",), ("u",), {"a"}, 0),
    }
    for kind, (slots, gates, recurrent, hidden) in table.items():
        cell = kind(3, 7, seed=0)
        assert (cell.slots, cell.gates, cell.hidden_slot) == (slots, gates, hidden)
        assert set(cell.state_dict()) == recurrent | {"W_x.weight", "W_x.bias"}
        assert cell.W_x.weight.shape == (len(gates) * 7, 3) and cell.W_x.bias.shape == (len(gates) * 7,)
        for name in recurrent:
            assert cell.arrays[name].shape == ((4, 7) if name == "R" else (7,))
        assert cell.state_shape == ((7,) if len(slots) == 1 else (len(slots), 7))
        assert (cell.d_in, cell.d_h, cell.input_size, cell.hidden_size) == (3, 7, 3, 7)
        assert cell.max_recurrent_norm == 0.5 and cell.dtype == np.float32
        assert isinstance(cell, RNNCell) and isinstance(cell, ChannelwiseCell)
    cell = ParaSLSTM(3, 7, seed=0)
    for k, name in enumerate(("r_i", "r_f", "r_z", "r_o")):
        np.testing.assert_array_equal(getattr(cell, name), cell.R[k])


# --- initialisation ------


@pytest.mark.parametrize("kind", CELLS)
def test_initial_numbers_have_the_documented_distribution(kind):
    """Recurrent vectors N(0, 1/sqrt(numel)), where numel is 4·d_h for R; weight U(±1/sqrt(d_in)); bias zero."""
    cell = kind(16, 5000, seed=1, dtype=np.float64)
    for name, a in cell.arrays.items():
        if name == "W_x.bias":
            assert not a.any()
        elif name == "W_x.weight":
            bound = 0.25
            assert np.abs(a).max() <= bound and np.abs(a).max() > 0.999 * bound
            assert np.mean(a) == pytest.approx(0.0, abs=0.002) and np.std(a) == pytest.approx(bound / 3**0.5, rel=0.01)
        else:
            deviation = 1.0 / math.sqrt(a.size)
            assert np.mean(a) == pytest.approx(0.0, abs=5 * deviation / math.sqrt(a.size))
            assert np.std(a) == pytest.approx(deviation, rel=0.05)
            assert 3.0 * deviation < np.abs(a).max() < 6.0 * deviation, "a Gaussian has tails"


@pytest.mark.parametrize("kind", CELLS)
def test_one_seed_gives_the_same_numbers_everywhere(kind):
    cell = kind(3, 5, seed=7, dtype=np.float64)
    for other in (kind(3, 5, seed=7, dtype=np.float64), kind(d_in=3, d_h=5, seed=7, dtype=np.float64)):
        for name, a in cell.arrays.items():
            np.testing.assert_array_equal(other.arrays[name], a)
    assert not np.array_equal(kind(3, 5, seed=8).W_x.weight, kind(3, 5, seed=7).W_x.weight)
    assert not np.array_equal(kind(3, 5).W_x.weight, kind(3, 5).W_x.weight), "without a seed, fresh numbers"
    narrow = kind(3, 5, seed=7)
    for name, a in narrow.arrays.items():
        np.testing.assert_array_equal(a, cell.arrays[name].astype(np.float32))
    for library in ("torch", "array_api_strict"):
        xp = pytest.importorskip(library)
        there = kind(3, 5, seed=7, xp=xp, dtype=xp.float64)
        assert there.xp is not cell.xp
        for name, a in there.arrays.items():
            np.testing.assert_array_equal(np.asarray(a), cell.arrays[name])


@pytest.mark.parametrize("kind", CELLS)
def test_the_two_names_of_a_size(kind):
    for cell in (
        kind(3, 5),
        kind(input_size=3, hidden_size=5),
        kind(d_in=3, d_h=5),
        kind(3, d_h=5),
        kind(3, 5, d_in=3),
    ):
        assert (cell.d_in, cell.d_h) == (3, 5)
    for sizes in ({"input_size": 3, "d_in": 4, "d_h": 5}, {"d_in": 3, "d_h": 5, "hidden_size": 6}):
        with pytest.raises(ValueError, match="differ"):
            kind(**sizes)
    for sizes in ({}, {"d_in": 3}, {"d_h": 5}):
        with pytest.raises(TypeError, match=f"{kind.__name__} needs"):
            kind(**sizes)


@pytest.mark.parametrize("cap", [0, -0.5, math.nan, math.inf, "big", True, np.ones(2)])
def test_a_clamp_that_is_no_positive_number_is_refused(cap):
    with pytest.raises(ValueError, match="max_recurrent_norm"):
        ParaGRU(3, 5, max_recurrent_norm=cap)
    with pytest.raises(ValueError, match="max_recurrent_norm"):
        ParaGRU(3, 5).replace(max_recurrent_norm=cap)


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, bool])
def test_a_dtype_that_is_not_floating_is_refused(dtype):
    with pytest.raises(TypeError, match="dtype must be one of"):
        ParaGRU(3, 5, dtype=dtype)
    with pytest.raises(TypeError, match="namespace"):
        ParaGRU(3, 5, xp=3)


def test_eps_of_the_slstm_is_checked_and_used():
    for eps in (0.0, -1e-6, math.nan, math.inf):
        with pytest.raises(ValueError, match="eps"):
            ParaSLSTM(3, 5, eps=eps)
    x = np.ones((1, 20, 3))
    runs = [newton_apply(ParaSLSTM(3, 5, eps=e, seed=0, dtype=np.float64), x) for e in (1e-6, 1e-6, 0.5)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert np.abs(runs[0][:, :, 3] - runs[2][:, :, 3]).max() > 1e-2, "two options, two traces"
    wanted = by_hand(ParaSLSTM(3, 5, eps=0.5, seed=0, dtype=np.float64), x)
    for config in (NewtonConfig(), NewtonConfig(segment_len=4), NewtonConfig(max_iters=9, residual_atol=None)):
        cell = ParaSLSTM(3, 5, eps=0.5, seed=0, dtype=np.float64)
        assert error_of(cell, newton_apply(cell, x, config), wanted) < 1e-10


# --- the clamp ------


@pytest.mark.parametrize("kind", CELLS)
def test_the_clamp_acts_on_what_the_step_sees_and_cuts_the_gradient_outside(kind):
    cell, x = strong(kind, 20, 1.0, dtype=np.float64)
    stored = {name: a.copy() for name, a in cell.arrays.items()}
    capped = cell.replace(max_recurrent_norm=0.5)
    inside = {n: np.clip(a, -0.5, 0.5) for n, a in stored.items() if not n.startswith("W_x")}
    np.testing.assert_array_equal(sequential_apply(capped, x), sequential_apply(cell.replace(**inside), x))
    states, pullback = newton_vjp(capped, x)
    got = pullback(np.ones_like(states)).params
    states, pullback = newton_vjp(cell.replace(**inside), x)
    free = pullback(np.ones_like(states)).params
    seen = 0
    for name in inside:
        outside = np.abs(stored[name]) > 0.5
        np.testing.assert_allclose(got[name], np.where(outside, 0.0, free[name]), rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(capped.arrays[name], stored[name])
        assert np.all(free[name][outside] != 0.0), "the cut must have something to cut"
        seen += outside.sum()
    assert seen
    edge = cell.replace(max_recurrent_norm=0.5, **{n: np.full_like(a, 0.5) for n, a in inside.items()})
    states, pullback = newton_vjp(edge, x)
    assert all(pullback(np.ones_like(states)).params[n].any() for n in inside), "on the edge the gradient passes"


# --- immutability, copies, conversions ------


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_is_immutable(kind):
    cell = kind(3, 5, seed=0)
    for name in ("max_recurrent_norm", "input_size", next(iter(cell.arrays)), "arrays", "anything"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(cell, name, 1)
    with pytest.raises(AttributeError, match="no attribute 'W_h'"):
        cell.W_h  # noqa: B018
    assert not hasattr(cell, "weight_hh_l0")


@pytest.mark.parametrize("kind", CELLS)
def test_replace_exchanges_arrays_and_checks_them(kind):
    cell, x = problem(kind, 12)
    name = next(iter(cell.arrays))
    other = cell.replace(**{name: -cell.arrays[name]}, W_x_bias=np.ones_like(cell.W_x.bias))
    np.testing.assert_array_equal(other.arrays[name], -cell.arrays[name])
    assert not cell.W_x.bias.any() and other.W_x.bias.all() and type(other) is kind
    assert np.abs(sequential_apply(other, x) - sequential_apply(cell, x)).max() > 1e-3
    same = cell.replace(**{"W_x.weight": cell.W_x.weight})
    np.testing.assert_array_equal(newton_apply(same, x), newton_apply(cell, x))
    with pytest.raises(TypeError, match="no array 'W_h'"):
        cell.replace(W_h=np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="wanted shape"):
        cell.replace(W_x_bias=np.zeros(4, np.float32))
    with pytest.raises(TypeError, match="wanted float32"):
        cell.replace(W_x_bias=np.zeros(cell.W_x.bias.shape))
    with pytest.raises(TypeError, match="must be an array"):
        cell.replace(W_x_bias=[0.0] * cell.W_x.bias.size)


@pytest.mark.parametrize("kind", CELLS)
def test_O57_copies_work_and_follow_their_own_weights(kind):
    cell, x = strong(kind, 30, 1.0)
    if kind is ParaSLSTM:
        cell = ParaSLSTM(3, 5, eps=1e-3, seed=0)
    wanted = newton_apply(cell, x)  # a first use, so that whatever is cached is there
    newton_vjp(cell, x)[1](np.ones_like(wanted))
    for twin in (copy.copy(cell), copy.deepcopy(cell), pickle.loads(pickle.dumps(cell)), cell.replace(), cell.to()):
        assert type(twin) is kind and twin is not cell and repr(twin) == repr(cell)
        np.testing.assert_array_equal(newton_apply(twin, x), wanted)
    deep = copy.deepcopy(cell)
    for a in deep.arrays.values():
        a *= 0.5  # an optimiser that steps in place
    assert not np.array_equal(newton_apply(deep, x), wanted)
    np.testing.assert_array_equal(newton_apply(cell, x), wanted)
    fresh = kind(3, 5, seed=99, max_recurrent_norm=cell.max_recurrent_norm)
    assert not np.array_equal(newton_apply(fresh, x), wanted)
    loaded = fresh.replace(**{name.replace(".", "_"): a for name, a in cell.state_dict().items()})
    if kind is not ParaSLSTM:  # eps is no array
        np.testing.assert_array_equal(newton_apply(loaded, x), wanted)


@pytest.mark.parametrize("kind", CELLS)
def test_in_place_steps_between_calls_are_seen(kind):
    cell, x = strong(kind, 30, 0.4)
    first = newton_apply(cell, x, NewtonConfig(segment_len=8))
    for a in cell.arrays.values():
        a += 0.1
    second = newton_apply(cell, x, NewtonConfig(segment_len=8))
    assert error_of(cell, second, sequential_apply(cell, x)) < 1e-4 < error_of(cell, first, second)


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("library", ["torch", "array_api_strict", "jax"])
def test_to_converts_and_comes_back(kind, library):
    module = pytest.importorskip(library)
    xp = pytest.importorskip("jax.numpy") if library == "jax" else module
    cell = kind(3, 5, seed=0, max_recurrent_norm=0.3)
    there = cell.to(xp)
    assert there.max_recurrent_norm == 0.3 and type(there) is kind and there.xp is not cell.xp
    assert there.dtype == xp.float32
    back = there.to(np)
    for name, a in cell.arrays.items():
        np.testing.assert_array_equal(back.arrays[name], a)
        assert back.arrays[name].dtype == np.float32
    half = there.to(dtype=xp.float16) if library == "torch" else None
    if half is not None:
        assert half.dtype == xp.float16 and half.to(np).dtype == np.float16
        assert there.to(device="meta").device.type == "meta"


def test_to_changes_the_dtype():
    cell = ParaLSTM(3, 5, seed=0)
    assert {a.dtype for a in cell.to(dtype=np.float64).arrays.values()} == {np.dtype(np.float64)}
    assert cell.to(dtype=np.float64).dtype == np.float64 and cell.dtype == np.float32


# --- states ------


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("time", [1, 3, 40])
def test_no_h0_is_an_h0_of_zeros(kind, time):
    cell, x = problem(kind, time)
    zero = np.zeros((2, *cell.state_shape), np.float32)
    for config in (NewtonConfig(), NewtonConfig(segment_len=7), NewtonConfig(max_iters=3)):
        np.testing.assert_array_equal(newton_apply(cell, x, config), newton_apply(cell, x, config, h0=zero))
    np.testing.assert_array_equal(sequential_apply(cell, x), sequential_apply(cell, x, h0=zero))


@pytest.mark.parametrize("kind", CELLS)
def test_declared_bounds_hold_for_the_public_states(kind):
    cell, x = strong(kind, 400, 10.0, scale=3.0, dtype=np.float64)
    states = sequential_apply(cell, x)
    for k, name in enumerate(cell.slots):
        if name in cell.bounds:
            slot = states if cell.state_slots == 1 else states[:, :, k]
            low, high = cell.bounds[name]
            assert low <= slot.min() and slot.max() <= high
    hidden = states if cell.state_slots == 1 else states[:, :, cell.hidden_slot]
    assert np.abs(hidden).max() <= 1.0


def test_a_start_outside_the_bounds_is_not_projected_away():
    cell, x = problem(ParaGRU, 60, dtype=np.float64, scale=0.1)
    cell = cell.replace(W_x_bias=np.concatenate([np.full(5, -4.0), np.zeros(10)]))
    h0 = np.full((2, 5), 7.0)
    wanted = sequential_apply(cell, x, h0=h0)
    assert wanted[:, 30].min() > 1.0, "the start must be felt beyond the first segments"
    for config in (NewtonConfig(segment_len=10), NewtonConfig(segment_len=10, warmup=0, exact=True)):
        assert error_of(cell, newton_apply(cell, x, config, h0=h0), wanted) < 1e-10


def test_an_slstm_start_with_more_in_c_than_in_n_is_not_projected_away():
    """h is then larger than one for as long as the memory lasts; a projected joint must not pass for a settled one."""
    cell = ParaSLSTM(1, 1, dtype=np.float64, seed=0)
    bias = np.asarray([0.0, 3.0, 0.0, 3.0])
    cell = cell.replace(R=np.full((4, 1), 0.5), W_x_weight=np.zeros((4, 1)), W_x_bias=bias)
    h0 = np.reshape([2.0, 1.0, 0.0, 0.0], (1, 4, 1))
    x = np.zeros((1, 60, 1))
    wanted = sequential_apply(cell, x, h0=h0)
    assert wanted[0, -1, 3, 0] > 1.5
    for config in (
        NewtonConfig(scan_backend="numpy", segment_len=10),
        NewtonConfig(scan_backend="numpy", segment_len=30),
    ):
        got, stats = solve(cell, x, config, h0=h0)
        assert stats.converged and error_of(cell, got, wanted) < 1e-10
        assert stats.max_residual < 1e-9, "what is left at the joints"


def test_the_solve_coordinates_of_the_slstm_are_the_same_recurrence():
    """encode after decode is the identity, and a step commutes with them."""
    cell, x = strong(ParaSLSTM, 30, 0.7, dtype=np.float64)
    inner, xp = cell.solve_cell(), np
    assert inner is not cell and inner.slots == ("u", "l", "m", "h") and inner.solve_cell().slots == inner.slots
    public = [sequential_apply(cell, x)[:, :, k] for k in range(4)]
    again = inner.decode(xp, *inner.encode(xp, *public))
    for a, b in zip(again, public, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-300)
    rng = np.random.default_rng(0)
    gates = [rng.standard_normal(public[0].shape) for _ in cell.gates]
    params = cell.recurrent(xp, np.float64)
    outside = cell.step(xp, *public, *gates, *params)
    inside = inner.decode(xp, *inner.step(xp, *inner.encode(xp, *public), *gates, *params))
    for a, b in zip(inside, outside, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    for kind in (ParaGRU, ParaLSTM, ParaTanh):
        assert kind(2, 3).solve_cell().slots == kind.slots


@pytest.mark.parametrize("kind", CELLS)
def test_the_public_cell_s_coordinates_are_its_own(kind):
    """encode and decode belong to the cell that the solver works on; the public cell's must change nothing."""
    cell, x = problem(kind, 10)
    states = sequential_apply(cell, x)
    slots = [states] if cell.state_slots == 1 else [states[:, :, k] for k in range(cell.state_slots)]
    for a, b, c in zip(slots, cell.encode(np, *slots), cell.decode(np, *slots), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


# --- O42: exponential gates ------


def held(dtype, i, f=0.0, z=None, o=1.0, xp=np):
    """An sLSTM with one channel per number in `i`, its pre-activations held by biases, and an input of no weight."""
    i = np.asarray(i, np.float64)
    width = i.size
    z = np.full(width, 0.5) if z is None else np.asarray(z, np.float64)
    cell = ParaSLSTM(1, width, seed=0, dtype=dtype, xp=xp)
    bias = np.concatenate([i, np.full(width, f), z, np.full(width, o)])
    zero = {"R": 0.0 * cell.R, "W_x_weight": 0.0 * cell.W_x.weight}
    return cell.replace(W_x_bias=cell.xp.asarray(bias, dtype=cell.dtype), **zero)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("time", [1, 5, 300])
def test_O42_large_and_very_negative_input_gates(dtype, time):
    """Held at i=100 … -50 the cell forgets nothing it should not: h tends to σ(o) tanh(z) where memory is new."""
    tolerance = 2e-3 if dtype is np.float16 else 2e-6  # eps in the denominator takes a millionth
    x = np.zeros((1, time, 1), dtype)
    cell = held(dtype, [100.0, 200.0], z=[0.5, -0.5])
    wanted = np.asarray([0.5, -0.5])  # the case states c/n with its tanh and σ applied outside
    wanted = logistic(1.0) * np.tanh(wanted)
    for config in (NewtonConfig(), NewtonConfig(segment_len=40), NewtonConfig(max_iters=3)):
        h = newton_apply(cell, x, config)[0, :, 3]
        assert np.isfinite(h).all()
        np.testing.assert_allclose(h, np.broadcast_to(wanted, h.shape), atol=tolerance)
    for i in (-50.0, -1000.0):
        cell = held(dtype, [i, i, i], z=[0.5, -0.5, 0.9])
        loop = sequential_apply(cell, x)
        assert np.isfinite(loop).all()
        # The stabiliser starts at 0, so exp(i) is far below eps and the output is zero, not tanh(z).
        np.testing.assert_allclose(loop[0, :, 3], 0.0, atol=1e-6)
        for config in (NewtonConfig(), NewtonConfig(segment_len=40), NewtonConfig(max_iters=3)):
            got = newton_apply(cell, x, config)
            assert np.isfinite(got).all()
            np.testing.assert_allclose(got, loop, atol=1e-6)


def test_O42_a_start_with_a_lower_stabiliser_gives_the_memory_to_the_first_input():
    cell, x = held(np.float64, [-1000.0]), np.zeros((1, 20, 1))
    h0 = np.zeros((1, 4, 1))
    h0[:, 2] = -1e9
    for run in (sequential_apply, newton_apply, lambda *a, **k: newton_apply(*a, NewtonConfig(segment_len=6), **k)):
        np.testing.assert_allclose(run(cell, x, h0=h0)[0, :, 3, 0], logistic(1.0) * np.tanh(0.5), rtol=1e-5)


@pytest.mark.parametrize("f", [-1000.0, -5.0, 0.0, 5.0, 300.0])
def test_O42_any_forget_gate_stays_finite_and_agrees(f):
    rng = np.random.default_rng(0)
    for dtype, tolerance in ((np.float32, 1e-4), (np.float64, 1e-10)):
        cell = held(dtype, [-80.0, 0.0, 80.0], f=f)
        cell = cell.replace(W_x_weight=rng.standard_normal(cell.W_x.weight.shape).astype(dtype))
        x = rng.standard_normal((2, 150, 1)).astype(dtype)
        loop = sequential_apply(cell, x)
        assert np.isfinite(loop).all()
        for config in (NewtonConfig(), NewtonConfig(segment_len=16), NewtonConfig(segment_len=16, coords="native")):
            got, stats = solve(cell, x, config)
            assert stats.converged and error_of(cell, got, loop) < tolerance


# --- a cell of one's own ------


class Leaky(ChannelwiseCell):
    """Ten lines: a leaky integrator with a gate and a slow second slot."""

    slots = ("v", "h")
    gates = ("u", "g")
    params = ("a", "w")
    options = ("rate",)
    rate = 0.9

    def step(self, xp, v, h, u, g, a, w):
        v = self.rate * v + (1.0 - self.rate) * xp.tanh(a * h + u)
        return v, v * sigmoid(xp, w * v + g)


class NoMemory(ChannelwiseCell):
    slots, gates = ("h",), ("u",)

    def step(self, xp, h, u):
        return (xp.sin(u),)


class Counter(ChannelwiseCell):
    slots, gates, params = ("h",), ("u",), ()

    def step(self, xp, h, u):
        return (h + 1.0,)


def gradients_by_differences(cell, x, h0, cotangent, step=1e-6):
    """Central differences of Σ cotangent · states through the time loop, for a few entries of everything."""
    rng = np.random.default_rng(0)

    def loss(cell, x, h0):
        return float((cotangent * sequential_apply(cell, x, h0=h0)).sum())

    for name, a in {**cell.arrays, "x": x, "h0": h0}.items():
        for _ in range(3):
            place = tuple(rng.integers(0, n) for n in a.shape)
            values = []
            for sign in (1.0, -1.0):
                moved = a.copy()
                moved[place] += sign * step
                changed = {"x": x, "h0": h0, name: moved} if name in ("x", "h0") else {"x": x, "h0": h0}
                other = cell if name in ("x", "h0") else cell.replace(**{name: moved})
                values.append(loss(other, changed["x"], changed["h0"]))
            yield name, place, (values[0] - values[1]) / (2.0 * step)


@pytest.mark.parametrize("kind", [*CELLS, Leaky, NoMemory])
@pytest.mark.parametrize("time", [1, 2, 13, 33])
def test_gradients_equal_central_differences(kind, time):
    cell, x = problem(kind, time, dtype=np.float64, cap=0.5)
    h0 = start_for(cell, 2)
    for config in (NewtonConfig(), NewtonConfig(segment_len=5), NewtonConfig(scan_backend="array", segment_len=6)):
        states, pullback = newton_vjp(cell, x, config, h0)
        cotangent = np.random.default_rng(4).standard_normal(states.shape)
        grads = pullback(cotangent)
        found = {**grads.params, "x": grads.x, "h0": grads.h0}
        for name, place, wanted in gradients_by_differences(cell, x, h0, cotangent):
            assert found[name][place] == pytest.approx(wanted, rel=1e-5, abs=1e-7), (name, place)


@pytest.mark.parametrize("kind", [Leaky, NoMemory, Counter])
def test_a_cell_of_ones_own_is_checked_solved_explained_and_verified(kind):
    check_cell(kind(3, 5))
    for dtype in (np.float32, np.float64):
        cell, x = problem(kind, 301, dtype=dtype)
        assert kind.__name__ in repr(cell) and cell.state_shape == ((2, 5) if kind is Leaky else (5,))
        for config in (NewtonConfig(), NewtonConfig(segment_len=17), NewtonConfig(max_iters=6, residual_atol=None)):
            assert verify_agreement(cell, x, config=config).ok
        assert explain(cell, x).backend
    if kind is Leaky:
        assert len(inspect.getsource(kind.step).splitlines()) <= 4
        assert cell.jac_structure == "block2"


def test_options_are_part_of_the_trace():
    class Slow(Leaky):
        rate = 0.99

    fast, x = problem(Leaky, 40, dtype=np.float64)
    slow, _ = problem(Slow, 40, dtype=np.float64)
    for cell in (fast, slow, fast):
        assert error_of(cell, newton_apply(cell, x, NewtonConfig(segment_len=7)), sequential_apply(cell, x)) < 1e-10


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("cumsum", "cumsum"),
        ("matmul", "matmul"),
        ("xp.matmul", "matmul"),
        ("mean", "mean"),
        ("roll", "roll"),
        ("index", "index"),
        ("if", "where"),
        ("attribute", "shape"),
        ("method", "sum"),
    ],
)
def test_an_operation_that_cannot_be_traced_is_named_and_the_loop_still_works(what, named):
    mixing = np.random.default_rng(0).standard_normal((5, 5)) / 5.0

    class Mixing(ChannelwiseCell):
        slots, gates, params = ("h",), ("u",), ("a",)

        def step(self, xp, h, u, a):
            if what == "if":
                bool(abs(u if not isinstance(u, np.ndarray) else u.sum()) > 0.0)
                mixed = h
            else:
                mixed = {
                    "cumsum": lambda: 0.1 * xp.cumsum(h, -1),
                    "matmul": lambda: h @ mixing,
                    "xp.matmul": lambda: xp.matmul(h, mixing),
                    "mean": lambda: xp.mean(h, axis=-1, keepdims=True) + 0.0 * h,
                    "roll": lambda: 0.5 * xp.roll(h, 1, axis=-1),
                    "index": lambda: 0.5 * h[..., ::-1],
                    "attribute": lambda: h * (1.0 / h.shape[-1]),
                    "method": lambda: h / (1.0 + h.sum() ** 2),
                }[what]()
            return (xp.tanh(a * mixed + u),)

    cell, x = problem(Mixing, 9, dtype=np.float64)
    h, wanted = np.zeros((2, 5)), []
    for t in range(9):
        u = x[:, t] @ cell.W_x.weight.T + cell.W_x.bias
        (h,) = cell.step(np, h, u, np.clip(cell.a, -0.5, 0.5))
        wanted.append(h)
    np.testing.assert_allclose(sequential_apply(cell, x), np.stack(wanted, 1), rtol=1e-12)
    for run in (newton_apply, newton_vjp, explain, lambda *a: check_cell(a[0])):
        with pytest.raises(UntraceableError, match=named):
            run(cell, x)


def check_fails(kind, sentence):
    with pytest.raises(TypeError, match=sentence):
        check_cell(kind(3, 5, seed=0))


def test_check_cell_says_what_is_wrong():
    with pytest.raises(TypeError, match=r"is not a ChannelwiseCell.*lacks slots"):
        check_cell(object())
    with pytest.raises(TypeError, match="not a ChannelwiseCell"):
        check_cell(ParaGRU)
    with pytest.raises(UntraceableError, match="elementwise"):
        check_cell(type("C", (NoMemory,), {"step": lambda self, xp, h, u: (xp.fft(h),)})(3, 5))
    check_fails(type("C", (NoMemory,), {"gates": ("h",)}), "share a name")
    check_fails(type("C", (NoMemory,), {"hidden": "y"}), "hidden='y'")
    check_fails(type("C", (NoMemory,), {"bounds": {"y": (0.0, 1.0)}}), r"bounds name \['y'\]")
    check_fails(type("C", (NoMemory,), {"bounds": {"h": (0.0, 1.0)}}), "left its declared bounds")
    check_cell(type("C", (NoMemory,), {"bounds": {"h": (-1.0, 1.0)}})(3, 5))
    check_fails(
        type("C", (NoMemory,), {"step": lambda self, xp, h, u: xp.sin(u)}), "must return a tuple of its 1 new slot"
    )
    check_fails(type("C", (NoMemory,), {"step": lambda self, xp, h, u: (u, u)}), "got 2 values")
    check_fails(type("C", (NoMemory,), {"step": lambda self, xp, h, u: (None,)}), "got NoneType")
    moody = iter(range(99))
    check_fails(
        type("C", (NoMemory,), {"step": lambda self, xp, h, u: (u * float(next(moody)),)}), "differs from the step"
    )
    with pytest.raises(NotImplementedError, match=r"step\(self, xp, h, u\)"):
        check_cell(type("C", (ChannelwiseCell,), {"slots": ("h",), "gates": ("u",)})(3, 5))
    for kind in CELLS:
        check_cell(kind(3, 5))
        check_cell(kind(3, 5, max_recurrent_norm=None).solve_cell())


def test_check_cell_works_on_cells_of_every_library():
    for library in ("torch", "array_api_strict", "jax"):
        pytest.importorskip(library)
        xp = pytest.importorskip("jax.numpy" if library == "jax" else library)
        check_cell(ParaLSTM(3, 5, xp=xp))


# --- functions ------


def test_sigmoid_softplus_and_log_sigmoid_keep_their_precision_in_the_tails():
    x = np.asarray([-1000.0, -40.0, -1.0, 0.0, 1.0, 40.0, 1000.0])
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(sigmoid(np, x), [0.0, math.exp(-40.0), *logistic(x[2:])], rtol=1e-13)
        np.testing.assert_allclose(
            softplus(np, x), [0.0, math.exp(-40.0), *np.log1p(np.exp(x[2:6])), 1000.0], rtol=1e-13
        )
        np.testing.assert_allclose(log_sigmoid(np, x), -softplus(np, -x), rtol=1e-13)
        assert log_sigmoid(np, x)[0] == -1000.0 and np.isfinite(log_sigmoid(np, x)).all()
