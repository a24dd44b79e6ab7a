"""The cells beyond GRU, LSTM and sLSTM: equations written out here, what is special about each, every way to run."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest

from pararnn import (
    NewtonConfig,
    NewtonStats,
    ParaCfC,
    ParaLEM,
    ParaLRU,
    ParaMinGRU,
    ParaMinLSTM,
    ParaNLRU,
    ParaS5,
    ParaSLSTM,
    ParaTitans,
    ParaUnICORNN,
    check_cell,
    default_agreement_atol,
    explain,
    newton_apply,
    newton_vjp,
    sequential_apply,
    verify_agreement,
)
from support import error_of, problem, start_for, strong

LINEAR = (ParaMinGRU, ParaMinLSTM, ParaLRU, ParaS5)
ZOO = (ParaNLRU, ParaCfC, ParaTitans, ParaLEM, ParaUnICORNN, *LINEAR)
OPTIONS = [
    (ParaCfC, {"leak": "sigmoid"}),
    (ParaTitans, {"normalised": False}),
    (ParaLRU, {"r_min": 0.2, "r_max": 0.7, "max_phase": 0.5}),
    (ParaLEM, {"step_size": 0.25}),
    (ParaUnICORNN, {"step_size": 0.3, "alpha": 4.0}),
]
EVERY = [*((kind, {}) for kind in ZOO), *OPTIONS]


def logistic(x):
    return 1.0 / (1.0 + np.exp(-x))


def softplus(x):
    return np.log1p(np.exp(x))


def new_state(cell, state, u, p, dt=1.0):
    """One step by the published formulas: state and gate inputs by name, in float64."""
    if isinstance(cell, ParaNLRU):
        a = logistic(u["a"])
        return {"h": a * state["h"] + (1 - a) * np.tanh(u["c"] + p["u"] * state["h"])}
    if isinstance(cell, ParaCfC):
        rate = softplus(u["f"])
        a = np.exp(-rate * dt) if cell.leak == "exponential" else logistic(-rate * max(dt, 1e-4))
        return {"h": a * state["h"] + (1 - a) * np.tanh(u["c"] + p["u"] * state["h"])}
    if isinstance(cell, ParaTitans):
        h, k, theta = state["h"], u["k"], softplus(u["theta"])
        if cell.normalised:
            theta = theta / (1 + theta * k**2)
        kept = (1 - logistic(u["alpha"])) * h
        return {"h": kept - theta * (h * k - u["v"]) * k + p["u"] * np.tanh(u["n"] + p["r"] * h)}
    if isinstance(cell, ParaMinGRU):
        z = logistic(u["z"])
        return {"h": (1 - z) * state["h"] + z * u["n"]}
    if isinstance(cell, ParaMinLSTM):
        f, i = logistic(u["f"]), logistic(u["i"])
        return {"h": f / (f + i) * state["h"] + i / (f + i) * u["n"]}
    if isinstance(cell, (ParaLRU, ParaS5)):
        b = u["b_re"] + 1j * u["b_im"]
        if isinstance(cell, ParaLRU):
            pole, gain = np.exp(-np.exp(p["nu"]) + 1j * np.exp(p["theta"])), np.exp(p["gamma"])
        else:
            root = -np.exp(p["a"]) + 1j * p["b"]
            pole = np.exp(root * np.exp(p["delta"]) * dt)
            gain = (pole - 1) / root
        new = pole * (state["h"] + 1j * state["im"]) + gain * b
        return {"h": new.real, "im": new.imag}
    if isinstance(cell, ParaLEM):
        speed_z = cell.step_size * logistic(p["a_p"] * state["h"] + u["p"])
        speed_h = cell.step_size * logistic(p["a_q"] * state["h"] + u["q"])
        z = (1 - speed_z) * state["z"] + speed_z * np.tanh(p["a_z"] * state["h"] + u["z_x"])
        return {"z": z, "h": (1 - speed_h) * state["h"] + speed_h * np.tanh(p["a_h"] * z + u["h_x"])}
    assert isinstance(cell, ParaUnICORNN)
    speed = cell.step_size * logistic(p["c"])
    z = state["z"] - speed * (np.tanh(p["w"] * state["h"] + u["v"]) + cell.alpha * state["h"])
    return {"z": z, "h": state["h"] + speed * z}


def by_hand(cell, x, h0=None):
    """The states as the library shapes them."""
    cap = math.inf if cell.max_recurrent_norm is None else cell.max_recurrent_norm
    p = {name: np.clip(a, -cap, cap) for name, a in cell.arrays.items() if not name.startswith("W_x")}
    gates = [g for g in cell.gates if g not in cell.drives]
    start = np.zeros((x.shape[0], len(cell.slots), cell.d_h)) if h0 is None else h0.reshape(x.shape[0], -1, cell.d_h)
    state, out = {name: start[:, k] for k, name in enumerate(cell.slots)}, []
    for t in range(x.shape[1]):
        made = np.split(x[:, t] @ cell.W_x.weight.T + cell.W_x.bias, len(gates), axis=1)
        state = new_state(cell, state, dict(zip(gates, made, strict=True)), p)
        out.append(np.stack([state[name] for name in cell.slots], axis=1))
    whole = np.stack(out, axis=1)
    return whole[:, :, 0] if len(cell.slots) == 1 else whole


def made(kind, options, time=57, dtype=np.float64, seed=0, scale=1.0, batch=2):
    rng = np.random.default_rng(seed + 1)
    cell = kind(4, 6, seed=seed, dtype=dtype, **options)
    cell = cell.replace(W_x_bias=(cell.W_x.bias + 0.3 * rng.standard_normal(cell.W_x.bias.shape)).astype(dtype))
    return cell, (scale * rng.standard_normal((batch, time, 4))).astype(dtype)


@pytest.mark.parametrize(("kind", "options"), EVERY)
@pytest.mark.parametrize("given", [False, True])
def test_every_cell_follows_its_published_equations(kind, options, given):
    cell, x = made(kind, options)
    check_cell(cell)
    h0 = start_for(cell, 2) if given else None
    wanted = by_hand(cell, x, h0)
    for run in (sequential_apply, newton_apply):
        np.testing.assert_allclose(run(cell, x, h0=h0), wanted, rtol=1e-11, atol=1e-12)
    for config in (NewtonConfig(segment_len=8), NewtonConfig(max_iters=12, residual_atol=None)):
        assert error_of(cell, newton_apply(cell, x, config, h0=h0), wanted) < 1e-10


@pytest.mark.parametrize(("kind", "options"), EVERY)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_single_and_half_precision_agree_with_float64(kind, options, dtype):
    """P01: float16 states are the float32 loop's, rounded once."""
    cell, x = made(kind, options, dtype=dtype)
    wide = by_hand(cell.to(dtype=np.float64), x.astype(np.float64))
    got = newton_apply(cell, x, NewtonConfig(segment_len=8))
    assert got.dtype == dtype and error_of(cell, got, wide) < default_agreement_atol(dtype)
    assert verify_agreement(cell, x).ok


@pytest.mark.parametrize(("kind", "options"), EVERY)
def test_the_gradient_is_that_of_the_loop(kind, options):
    """Finite differences along random directions, through segments."""
    cell, x = made(kind, options, time=41)
    h0 = start_for(cell, 2)
    rng = np.random.default_rng(8)
    states, pullback = newton_vjp(cell, x, NewtonConfig(segment_len=8), h0)
    weights = rng.standard_normal(states.shape)
    grads = pullback(weights)
    step = 1e-6
    for label, found in {"x": grads.x, "h0": grads.h0, **grads.params}.items():
        way, ends = rng.standard_normal(found.shape), []
        for sign in (step, -step):
            moved = cell.replace(**{label: cell.arrays[label] + sign * way}) if label in cell.arrays else cell
            at = x + sign * way if label == "x" else x
            ends.append(np.sum(weights * sequential_apply(moved, at, h0 + sign * way if label == "h0" else h0)))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert np.sum(found * way) == pytest.approx(slope, rel=1e-5, abs=1e-6 * max(1.0, abs(ends[0]))), label


@pytest.mark.parametrize("kind", ZOO)
@pytest.mark.parametrize("size", [1.0, 3.0])
def test_large_weights_and_inputs(kind, size):
    """O09: right whatever the weights are; what does not settle is walked."""
    cell, x = strong(kind, 300, size, dtype=np.float64, width=8, scale=size)
    wanted = sequential_apply(cell, x)
    assert np.all(np.isfinite(wanted))
    for length in (16, 64):
        stats = NewtonStats()
        got = newton_apply(cell, x, NewtonConfig(segment_len=length), stats=stats)
        assert stats.converged and error_of(cell, got, wanted) < 1e-10


@pytest.mark.parametrize("kind", LINEAR)
def test_a_linear_recurrence_needs_one_correction(kind):
    cell, x = made(kind, {}, time=300)
    wanted = by_hand(cell, x)
    for length in (1, 16):
        config = NewtonConfig(max_iters=1, segment_len=length, residual_atol=None)
        assert error_of(cell, newton_apply(cell, x, config), wanted) < 1e-11
    stats = NewtonStats()
    newton_apply(cell, x, NewtonConfig(segment_len=16), stats=stats)
    assert stats.converged and stats.iters <= 1 and stats.walked == 0.0


@pytest.mark.parametrize("kind", ZOO)
def test_initial_numbers_and_clamps(kind):
    """Common: W_x uniform in ±1/√I, bias 0; recurrent vectors N(0, 1/√D) where the cell says nothing else."""
    cell = kind(16, 4000, seed=1, dtype=np.float64)
    assert np.abs(cell.W_x.weight).max() <= 0.25 and np.std(cell.W_x.weight) == pytest.approx(0.25 / 3**0.5, rel=0.01)
    bias, count = cell.W_x.bias.copy(), 4000
    if kind is ParaTitans:
        np.testing.assert_array_equal(bias[count : 2 * count], -1.0)
        bias[count : 2 * count] = 0.0
    assert not bias.any()
    unclamped = kind in (ParaLRU, ParaS5, ParaUnICORNN)
    assert cell.max_recurrent_norm == (None if unclamped else 0.5)
    if kind in (ParaNLRU, ParaCfC, ParaTitans, ParaLEM):
        for name in cell.params:
            assert np.std(cell.arrays[name]) == pytest.approx(1.0 / math.sqrt(count), rel=0.06)


@pytest.mark.parametrize(("kind", "options"), EVERY)
def test_copies_keep_the_options(kind, options):
    cell, x = made(kind, options)
    wanted = newton_apply(cell, x)
    for twin in (copy.deepcopy(cell), pickle.loads(pickle.dumps(cell)), cell.replace(), cell.to(dtype=np.float64)):
        assert all(getattr(twin, name) == getattr(cell, name) for name in cell.options)
        np.testing.assert_array_equal(newton_apply(twin, x), wanted)
    if options:
        assert np.abs(newton_apply(made(kind, {})[0], x) - wanted).max() > 1e-3, "the option must change something"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ParaCfC, {"leak": "tanh"}),
        (ParaTitans, {"normalised": 2}),
        (ParaLRU, {"r_min": 0.9, "r_max": 0.9}),
        (ParaLRU, {"r_max": 1.1}),
        (ParaLRU, {"max_phase": 7.0}),
        (ParaLEM, {"step_size": 0.0}),
        (ParaLEM, {"step_size": 1.5}),
        (ParaUnICORNN, {"step_size": math.nan}),
        (ParaUnICORNN, {"alpha": -1.0}),
        (ParaSLSTM, {"forget_gate": "relu"}),
        (ParaSLSTM, {"stabiliser_start": "one"}),
        (ParaSLSTM, {"eps": 0.0}),
        (ParaSLSTM, {"eps": -1.0, "stabiliser_start": "input"}),
    ],
)
def test_options_that_make_no_sense_are_refused(kind, options):
    with pytest.raises(ValueError, match=next(iter(options)).partition("_")[0]):
        kind(3, 4, **options)


# --- what is special about each ------


class TestCfC:
    def test_a_step_without_duration_changes_nothing(self):
        """The described sigmoid leak keeps at most half of the state, however short the step."""
        cell, x = made(ParaCfC, {})
        h0 = start_for(cell, 2)
        held = newton_apply(cell, x, h0=h0, dt=0.0)
        np.testing.assert_array_equal(held, np.broadcast_to(h0[:, None], held.shape))
        short = newton_apply(cell, x[:, :1], h0=h0, dt=1e-6)[:, 0]
        assert np.abs(short - h0).max() < 1e-5
        old, _ = made(ParaCfC, {"leak": "sigmoid"})
        assert np.abs(newton_apply(old, x[:, :1], h0=h0, dt=0.0)[:, 0]).max() < 0.51 * np.abs(h0).max() + 0.5

    def test_two_steps_of_half_the_duration_are_one_step_where_nothing_feeds_back(self):
        cell, x = made(ParaCfC, {}, time=1)
        cell = cell.replace(u=np.zeros(6))
        whole = newton_apply(cell, x, dt=1.4)[:, -1]
        halves = newton_apply(cell, np.repeat(x, 2, axis=1), dt=0.7)[:, -1]
        np.testing.assert_allclose(halves, whole, rtol=1e-12)

    def test_padding_with_no_time_leaves_the_state(self):
        """A sequence padded by steps with Δt = 0 ends in the state in which it ended."""
        cell, x = made(ParaCfC, {}, time=60)
        dt = np.ones((2, 60))
        dt[0, 35:] = 0.0
        padded = newton_apply(cell, x, NewtonConfig(segment_len=8), dt=dt)
        np.testing.assert_allclose(padded[0, 34:], np.broadcast_to(padded[0, 34], (26, 6)), rtol=1e-10)


class TestTitans:
    def test_it_is_stable_whatever_the_keys_are(self):
        """With the explicit step the time loop itself explodes, at inputs of size 4."""
        for scale in (1.0, 4.0, 100.0):
            cell, x = made(ParaTitans, {}, time=512, scale=scale)
            assert np.abs(sequential_apply(cell, x)).max() < 30.0 * max(1.0, scale)
        with np.errstate(all="ignore"):
            cell, x = made(ParaTitans, {"normalised": False}, time=512, scale=4.0)
            assert np.abs(sequential_apply(cell, x)).max() > 1e10

    def test_the_step_is_the_proximal_one(self):
        """Without forgetting and nonlinearity h' minimises (h'k - v)²/2 + (h' - h)²/2θ."""
        cell, x = made(ParaTitans, {}, time=1)
        gates = (x[:, 0] @ cell.W_x.weight.T + cell.W_x.bias).reshape(2, 5, 6)
        gates[:, 0] = -60.0
        theta, k, v, h = softplus(gates[:, 1]), gates[:, 2], gates[:, 3], np.full((2, 6), 0.4)
        (new,) = cell.step(np, h, *gates.transpose(1, 0, 2), np.zeros(6), np.zeros(6))
        slope = (new * k - v) * k + (new - h) / theta
        np.testing.assert_allclose(slope, 0.0, atol=1e-13)


class TestMinLSTM:
    def test_gates_that_are_both_shut_still_share(self):
        """f/(f + i) = 0/0 in float32 where it is taken as written."""
        cell = ParaMinLSTM(1, 1, seed=0)
        for f, i, wanted in ((-200.0, -200.0, 0.5), (-300.0, -200.0, 0.0), (-200.0, -300.0, 1.0), (90.0, 90.0, 0.5)):
            bias = np.asarray([f, i, 0.0], dtype=np.float32)
            shut = cell.replace(W_x_weight=np.zeros((3, 1), np.float32), W_x_bias=bias)
            got = newton_apply(shut, np.zeros((1, 1, 1), np.float32), h0=np.ones((1, 1), np.float32))
            assert float(got[0, 0, 0]) == pytest.approx(wanted, abs=1e-6)


class TestDiagonalStateSpaces:
    def test_lru_starts_on_its_ring(self):
        cell = ParaLRU(2, 5000, r_min=0.3, r_max=0.8, max_phase=1.0, seed=0, dtype=np.float64)
        size = np.exp(-np.exp(cell.nu))
        assert 0.3 <= size.min() < 0.31 and 0.79 < size.max() <= 0.8
        assert np.mean(size**2) == pytest.approx((0.3**2 + 0.8**2) / 2, rel=0.01), "uniform by area"
        assert 0.0 < np.exp(cell.theta).min() and np.exp(cell.theta).max() <= 1.0
        np.testing.assert_allclose(np.exp(2 * cell.gamma), 1 - size**2, rtol=1e-9)
        whole = ParaLRU(2, 50, r_min=0.0, r_max=1.0, seed=0)
        assert all(np.all(np.isfinite(a)) for a in whole.arrays.values())

    def test_s5_is_exact_for_any_step(self):
        """Many short steps under a constant input are one long step."""
        cell, x = made(ParaS5, {}, time=1)
        whole = newton_apply(cell, x, dt=2.0)[:, -1]
        many = newton_apply(cell, np.repeat(x, 50, axis=1), dt=0.04)[:, -1]
        np.testing.assert_allclose(many, whole, rtol=1e-9, atol=1e-12)

    def test_s5_keeps_its_digits_for_short_steps(self):
        cell, x = made(ParaS5, {}, time=1)
        narrow = cell.to(dtype=np.float32)
        wide, dt = narrow.to(dtype=np.float64), np.float32(1e-4)
        got = newton_apply(narrow, x.astype(np.float32), dt=float(dt))
        true = newton_apply(wide, x.astype(np.float32).astype(np.float64), dt=float(dt))
        np.testing.assert_allclose(got[:, :, 0], true[:, :, 0], rtol=2e-5)


    @pytest.mark.parametrize("kind", [ParaLRU, ParaS5])
    @pytest.mark.parametrize("length", [64, 512])
    def test_rounding_of_a_rotation_does_not_grow_with_every_segment(self, kind, length):
        """Part by part its bound grows by √2 a segment, and nothing would ever be accepted in float32."""
        cell, x = made(kind, {}, time=8192, dtype=np.float32, batch=1)
        stats = NewtonStats()
        got = newton_apply(cell, x, NewtonConfig(segment_len=length, scan_backend="numpy"), stats=stats)
        assert stats.walked == 0.0 and stats.passes <= 3 and stats.agreement_estimate < 5e-5
        loop = newton_apply(cell, x, NewtonConfig(segment_len=8192, scan_backend="numpy"))
        assert error_of(cell, got, loop) < 4.0 * stats.agreement_estimate < 1e-4


class TestUnICORNN:
    def test_it_keeps_volume(self):
        """The determinant of each step's Jacobian is 1, so the exponents of the two slots sum to zero."""
        cell, x = made(ParaUnICORNN, {}, time=1)
        state = np.random.default_rng(0).standard_normal((2, 2, 6))
        eps = 1e-6
        columns = [
            (newton_apply(cell, x, h0=state + d) - newton_apply(cell, x, h0=state - d))[:, 0] / (2 * eps)
            for d in (eps * np.eye(2)[k][None, :, None] for k in range(2))
        ]
        det = columns[0][:, 0] * columns[1][:, 1] - columns[0][:, 1] * columns[1][:, 0]
        np.testing.assert_allclose(det, 1.0, atol=1e-8)

    def test_one_loop_is_the_plan_unless_segments_are_asked_for(self):
        cell, x = made(ParaUnICORNN, {}, time=5000)
        told = explain(cell, x)
        assert told.path == "sequential" and "remembers by design" in told.reason
        assert explain(cell, x, NewtonConfig(segment_len=64)).path == "segments"


class TestSLSTM:
    """The conventions of xLSTM and FlashRNN as options."""

    CONVENTION = {"forget_gate": "sigmoid", "stabiliser_start": "input", "eps": 0.0}

    def by_hand(self, cell, x, h0=None):
        """The published form: log σ(f), m := i while nothing is stored, h = o c / n."""
        state = np.zeros((4, x.shape[0], cell.d_h)) if h0 is None else np.moveaxis(h0, 1, 0)
        c, n, m, h = state
        out = []
        for t in range(x.shape[1]):
            i, f, z, o = np.split(x[:, t] @ cell.W_x.weight.T + cell.W_x.bias, 4, axis=1)
            i, f, z, o = (g + r * h for g, r in zip((i, f, z, o), np.clip(cell.R, -0.5, 0.5), strict=True))
            kept = m - np.log1p(np.exp(-f))
            new = np.where(n == 0.0, i, np.maximum(i, kept))
            gain, keep = np.minimum(np.exp(i - new), 1.0), np.minimum(np.exp(kept - new), 1.0)
            c, n, m = keep * c + gain * np.tanh(z), keep * n + gain, new
            h = logistic(o) * c / n
            out.append(np.stack([c, n, m, h], axis=1))
        return np.stack(out, axis=1)

    @pytest.mark.parametrize("scale", [1.0, 8.0])
    @pytest.mark.parametrize("given", [False, True])
    def test_the_published_convention(self, scale, given):
        cell, x = made(ParaSLSTM, self.CONVENTION, time=200, scale=scale)
        check_cell(cell)
        h0 = start_for(cell, 2) if given else None
        wanted = self.by_hand(cell, x, h0)
        assert np.all(wanted[:, :, 1] > (0.0 if given else 1.0 - 1e-12))
        np.testing.assert_allclose(sequential_apply(cell, x, h0), wanted, rtol=1e-11, atol=1e-12)
        for config in (NewtonConfig(), NewtonConfig(segment_len=32), NewtonConfig(segment_len=32, coords="native")):
            assert error_of(cell, newton_apply(cell, x, config, h0=h0), wanted) < 1e-10
        config = NewtonConfig(max_iters=12, residual_atol=None)
        assert error_of(cell, newton_apply(cell, x, config, h0=h0), wanted) < 1e-10

    def test_it_is_the_reference_implementation_s(self):
        torch = pytest.importorskip("torch")
        reference = pytest.importorskip("xlstm.blocks.slstm.src.vanilla.slstm")
        cell, x = made(ParaSLSTM, self.CONVENTION, time=100, scale=2.0)
        got = newton_apply(cell, x)
        weight, bias, r = (torch.from_numpy(a) for a in (*cell.W_x, np.clip(cell.R, -0.5, 0.5)))
        state = torch.zeros(4, 2, 6, dtype=torch.float64)
        for t in range(100):
            inputs = torch.from_numpy(x[:, t]) @ weight.T
            back = (r[None] * state[0][:, None]).reshape(2, -1)
            state, _ = reference.slstm_forward_pointwise(inputs, back, bias[None], state, {})
            for slot, k in enumerate((1, 2, 3, 0)):
                np.testing.assert_allclose(got[:, t, slot], state[k].numpy(), rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("forget_gate", ["exponential", "sigmoid"])
    @pytest.mark.parametrize("start", ["zero", "input"])
    def test_every_combination_solves_and_differentiates(self, forget_gate, start):
        cell, x = made(ParaSLSTM, {"forget_gate": forget_gate, "stabiliser_start": start}, time=150, scale=3.0)
        wanted = sequential_apply(cell, x)
        for config in (NewtonConfig(segment_len=16), NewtonConfig(max_iters=15, residual_atol=None)):
            assert error_of(cell, newton_apply(cell, x, config), wanted) < 1e-10
        rng = np.random.default_rng(2)
        weights, way = rng.standard_normal(wanted.shape), rng.standard_normal(x.shape)
        found = newton_vjp(cell, x, NewtonConfig(segment_len=16))[1](weights)
        eps = 1e-6
        ends = [np.sum(weights * sequential_apply(cell, x + s * way)) for s in (eps, -eps)]
        assert np.sum(found.x * way) == pytest.approx((ends[0] - ends[1]) / (2 * eps), rel=1e-5)

    def test_a_first_gate_far_below_the_old_stabiliser(self):
        """exp(f + m - i) of the first step overflows, and what it would be multiplied with is 0."""
        cell = ParaSLSTM(1, 1, seed=0, **self.CONVENTION)
        bias = np.asarray([-500.0, 5.0, 0.7, 0.0], dtype=np.float32)
        cell = cell.replace(W_x_weight=np.zeros((4, 1), np.float32), W_x_bias=bias, R=np.zeros((4, 1), np.float32))
        x = np.zeros((1, 3, 1), np.float32)
        states, pullback = newton_vjp(cell, x)
        np.testing.assert_allclose(states[0, :, 3, 0], 0.5 * np.tanh(0.7), rtol=1e-5)
        assert all(np.all(np.isfinite(g)) for g in pullback(np.ones_like(states)).params.values())


# --- in a module ------


class TestParaRNN:
    @pytest.mark.parametrize(("kind", "options"), EVERY)
    @pytest.mark.parametrize("layers", [1, 3])
    def test_stacks_of_one_cell(self, kind, options, layers):
        """P50: training runs in parallel, evaluation as a loop, and they agree; options reach every layer."""
        torch = pytest.importorskip("torch")
        from pararnn import ParaRNN

        cell, x = made(kind, options, dtype=np.float32)
        rnn = ParaRNN(cell, num_layers=layers, return_hidden=True)
        assert [layer.kind.d_in for layer in rnn.layers] == [4] + [6] * (layers - 1)
        assert all(getattr(layer.kind, n) == getattr(cell, n) for layer in rnn.layers for n in cell.options)
        tx = torch.from_numpy(x)
        y, last = rnn(tx)
        z, end = rnn.eval()(tx)
        assert y.shape == (2, 57, 6) and last.shape == (2, *cell.state_shape)
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(last, end, rtol=1e-4, atol=1e-4)
        rnn.train()(tx)[0].square().mean().backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in rnn.parameters())

    def test_a_list_of_all_of_them(self):
        torch = pytest.importorskip("torch")
        from pararnn import ParaRNN

        cells = [kind(6, 6, seed=k, dtype=np.float64) for k, kind in enumerate(ZOO)]
        x = np.random.default_rng(0).standard_normal((2, 40, 6))
        wanted = x
        for cell in cells:
            states = sequential_apply(cell, wanted)
            wanted = states if cell.state_slots == 1 else states[:, :, cell.hidden_slot]
        got = ParaRNN(cells)(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-11)

    @pytest.mark.parametrize("kind", [k for k in ZOO if k not in (ParaNLRU, ParaMinGRU)])
    def test_compiled(self, kind):
        torch = pytest.importorskip("torch")
        from pararnn import ParaRNN, compile_safe_config

        cell, x = made(kind, {}, dtype=np.float32)
        rnn = ParaRNN(cell, config=compile_safe_config(max_iters=8))
        tx = torch.from_numpy(x)
        torch.compiler.reset()
        whole = torch.compile(rnn, backend="eager", fullgraph=True)
        torch.testing.assert_close(whole(tx), rnn(tx), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ZOO)
def test_problems_without_steps_or_sequences(kind):
    """O52."""
    cell, _ = problem(kind, 3)
    for shape in ((0, 5, 3), (2, 0, 3)):
        states, pullback = newton_vjp(cell, np.zeros(shape, np.float32))
        assert states.shape == (*shape[:2], *cell.state_shape)
        assert pullback(np.zeros_like(states)).x.shape == shape
