"""Drives: per-step inputs that all channels share, such as the Δt of ParaCfC, in every call that takes a cell."""

from __future__ import annotations

import numpy as np
import pytest

from pararnn import (
    ChannelwiseCell,
    NewtonConfig,
    ParaCfC,
    ParaGRU,
    ParaS5,
    check_cell,
    explain,
    newton_apply,
    newton_vjp,
    sequential_apply,
    verify_agreement,
)
from pararnn.drives import with_drives
from support import error_of

DRIVEN = (ParaCfC, ParaS5)
TIMES = 37


def driven(kind, dtype=np.float64, seed=0, **options):
    rng = np.random.default_rng(seed)
    cell = kind(3, 5, seed=seed, dtype=dtype, **options)
    x = rng.standard_normal((2, TIMES, 3)).astype(dtype)
    return cell, x, rng.exponential(1.0, (2, TIMES)).astype(dtype)


class Twice(ChannelwiseCell):
    """Two drives with defaults of their own."""

    slots, gates, params = ("h",), ("u", "fast", "slow"), ("a",)
    drives = {"fast": 0.5, "slow": 2.0}

    def step(self, xp, h, u, fast, slow, a):
        return (xp.tanh(a * h + fast * u) + xp.tanh(slow),)


def by_hand(cell, x, *drives):
    weight, bias = cell.W_x
    h, out = np.zeros((2, 5)), []
    for t in range(x.shape[1]):
        u = x[:, t] @ weight.T + bias
        gates = [u[:, k * 5 : (k + 1) * 5] for k in range(u.shape[1] // 5)]
        (h,) = cell.step(np, h, *gates, *(d[:, t, None] for d in drives), *cell.recurrent(np, np.float64))
        out.append(h)
    return np.stack(out, axis=1)


def test_each_drive_reaches_every_channel_at_its_own_step():
    cell, x, dt = driven(ParaCfC)
    np.testing.assert_allclose(sequential_apply(cell, x, dt=dt), by_hand(cell, x, dt), rtol=1e-13)
    twice, _, other = driven(Twice)
    check_cell(twice)
    wanted = by_hand(twice, x, dt, other[::-1])
    np.testing.assert_allclose(newton_apply(twice, x, fast=dt, slow=other[::-1]), wanted, rtol=1e-12)
    wanted = by_hand(twice, x, dt, np.full((2, TIMES), 2.0))
    np.testing.assert_allclose(newton_apply(twice, x, fast=dt), wanted, rtol=1e-12)


@pytest.mark.parametrize("kind", DRIVEN)
def test_the_shapes_of_a_drive(kind):
    cell, x, dt = driven(kind)
    column = dt[:, 3].copy()
    for given, whole in (
        (0.7, np.full((2, TIMES), 0.7)),
        (np.asarray(0.7), np.full((2, TIMES), 0.7)),
        (column, np.repeat(column[:, None], TIMES, axis=1)),
        (None, np.ones((2, TIMES))),
    ):
        np.testing.assert_array_equal(newton_apply(cell, x, dt=given), newton_apply(cell, x, dt=whole))
    np.testing.assert_array_equal(newton_apply(cell, x), newton_apply(cell, x, dt=1.0))


@pytest.mark.parametrize("kind", DRIVEN)
@pytest.mark.parametrize(
    "config", [NewtonConfig(), NewtonConfig(segment_len=8), NewtonConfig(max_iters=9, residual_atol=None)]
)
def test_parallel_and_loop_agree_with_uneven_steps(kind, config):
    cell, x, dt = driven(kind)
    wanted = sequential_apply(cell, x, dt=dt)
    assert error_of(cell, newton_apply(cell, x, config, dt=dt), wanted) < 1e-10
    assert verify_agreement(cell, x, config=config, dt=dt).ok
    assert explain(cell, x, config, dt=dt).path == explain(cell, x, config).path


@pytest.mark.parametrize("kind", [*DRIVEN, Twice])
def test_gradients_of_the_drive_and_of_everything_else(kind):
    """Against finite differences along a random direction in each array, and of the shape of what was given."""
    cell, x, dt = driven(kind)
    name = next(iter(cell.drives))
    rng = np.random.default_rng(5)
    states, pullback = newton_vjp(cell, x, NewtonConfig(segment_len=8), **{name: dt})
    weights = rng.standard_normal(states.shape)
    grads = pullback(weights)
    assert set(grads.drives) == set(cell.drives) and grads.drives[name].shape == (2, TIMES)
    assert grads.x.shape == x.shape and {n: a.shape for n, a in grads.params.items()} == {
        n: a.shape for n, a in cell.arrays.items()
    }

    def loss(cell, x, dt):
        return float(np.sum(weights * sequential_apply(cell, x, **{name: dt})))

    step = 1e-6
    for label, found in {"x": grads.x, name: grads.drives[name], **grads.params}.items():
        way = rng.standard_normal(found.shape)
        ends = []
        for sign in (step, -step):
            if label == "x":
                ends.append(loss(cell, x + sign * way, dt))
            elif label == name:
                ends.append(loss(cell, x, dt + sign * way))
            else:
                ends.append(loss(cell.replace(**{label: cell.arrays[label] + sign * way}), x, dt))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert np.sum(found * way) == pytest.approx(slope, rel=2e-6, abs=1e-6), label


@pytest.mark.parametrize("kind", DRIVEN)
def test_a_driven_sequence_may_be_cut_anywhere(kind):
    cell, x, dt = driven(kind)
    whole = newton_apply(cell, x, dt=dt)
    head = newton_apply(cell, x[:, :14], dt=dt[:, :14])
    tail = newton_apply(cell, x[:, 14:], h0=head[:, -1], dt=dt[:, 14:])
    np.testing.assert_allclose(np.concatenate([head, tail], axis=1), whole, rtol=1e-12, atol=1e-12)


def test_what_does_not_fit_is_refused():
    cell, x, dt = driven(ParaCfC)
    with pytest.raises(TypeError, match="ParaGRU has no per-step input dt; it takes none"):
        newton_apply(ParaGRU(3, 5, dtype=np.float64), x, dt=dt)
    with pytest.raises(TypeError, match="no per-step input d_t; it takes dt"):
        sequential_apply(cell, x, d_t=1.0)
    for bad in (dt[:1], dt[:, :-1], dt[0], dt[..., None]):
        with pytest.raises(ValueError, match=r"\(2,\) for B or \(2, 37\) for \(B, T\)"):
            newton_apply(cell, x, dt=bad)
    for bad in (True, "1", [1.0, 2.0], np.ones(2, dtype=int)):
        with pytest.raises(TypeError, match="dt must be"):
            newton_apply(cell, x, dt=bad)
    for bad in (-0.5, np.where(dt == dt.max(), -dt, dt)):
        with pytest.raises(ValueError, match="dt must be at least 0"):
            newton_apply(cell, x, dt=bad)
    with pytest.raises(ValueError, match="the cell takes 3 features"):
        newton_apply(cell, x[..., :2], dt=dt)
    with pytest.raises(TypeError, match="already reads dt from x"):
        newton_apply(*with_drives("newton_apply", cell, x, {}), dt=dt)


def test_drives_must_be_the_last_gates():
    class Mixed(Twice):
        gates = ("fast", "slow", "u")

    with pytest.raises(TypeError, match="must be the last of the gates"):
        check_cell(Mixed(3, 5))


@pytest.mark.parametrize("library", ["torch", "array_api_strict"])
@pytest.mark.parametrize("kind", DRIVEN)
def test_drives_in_other_libraries(library, kind):
    xp = pytest.importorskip(library)
    cell, x, dt = driven(kind)
    wanted = sequential_apply(cell, x, dt=dt)
    for given in (dt, dt[:, 0].copy(), 0.5):
        wanted = sequential_apply(cell, x, dt=given)
        there = given if isinstance(given, float) else xp.asarray(given)
        got = newton_apply(cell.to(xp), xp.asarray(x), NewtonConfig(segment_len=8), dt=there)
        np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-11, atol=1e-12)


class TestTorch:
    @pytest.mark.parametrize("kind", DRIVEN)
    def test_autograd_reaches_the_drive(self, kind):
        torch = pytest.importorskip("torch")
        cell, x, dt = driven(kind)
        grads = newton_vjp(cell, x, dt=dt)[1](np.ones_like(sequential_apply(cell, x, dt=dt)))
        there = cell.to(torch)
        there = there.replace(**{name: a.requires_grad_() for name, a in there.arrays.items()})
        tx, tdt = torch.from_numpy(x).requires_grad_(), torch.from_numpy(dt).requires_grad_()
        for run in (newton_apply, sequential_apply):
            found = torch.autograd.grad(run(there, tx, dt=tdt).sum(), [tx, tdt, *there.arrays.values()])
            wanted = [grads.x, grads.drives["dt"], *(grads.params[name] for name in cell.arrays)]
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_allclose(a.numpy(), b, rtol=1e-9, atol=1e-11)

    @pytest.mark.parametrize("batch_first", [True, False])
    def test_every_layer_of_a_stack_gets_the_times(self, batch_first):
        torch = pytest.importorskip("torch")
        from pararnn import ParaRNN

        cell, x, dt = driven(ParaCfC)
        rnn = ParaRNN([ParaGRU(3, 3, seed=1, dtype=np.float64), cell, ParaCfC(5, 4, seed=2, dtype=np.float64)])
        rnn.batch_first = batch_first
        first = sequential_apply(ParaGRU(3, 3, seed=1, dtype=np.float64), x)
        second = sequential_apply(cell, first, dt=dt)
        wanted = sequential_apply(ParaCfC(5, 4, seed=2, dtype=np.float64), second, dt=dt)
        tx, tdt = torch.from_numpy(x), torch.from_numpy(dt)
        for train in (True, False):
            rnn.train(train)
            got = rnn(tx, dt=tdt) if batch_first else rnn(tx.transpose(0, 1), dt=tdt.T).transpose(0, 1)
            np.testing.assert_allclose(got.detach().numpy(), wanted, rtol=1e-10, atol=1e-12)
        with pytest.raises(TypeError, match="no layer takes a per-step input 'time'"):
            rnn(tx, time=tdt)
        stacked = ParaRNN(cell, num_layers=3)
        assert [layer.cell.W_x.weight.shape for layer in stacked.layers] == [(10, 3), (10, 5), (10, 5)]
        assert stacked(tx, dt=tdt).shape == (2, TIMES, 5) and stacked.verify_agreement(tx, dt=tdt).ok

    def test_compiled_with_times(self):
        torch = pytest.importorskip("torch")
        from pararnn import ParaRNN, compile_safe_config

        cell, x, dt = driven(ParaCfC)
        rnn = ParaRNN(cell, num_layers=2, config=compile_safe_config(max_iters=6))
        tx, tdt = torch.from_numpy(x), torch.from_numpy(dt)
        torch.compiler.reset()
        whole = torch.compile(rnn, backend="eager", fullgraph=True)
        torch.testing.assert_close(whole(tx, dt=tdt), rnn(tx, dt=tdt))
        torch.testing.assert_close(whole(tx), rnn(tx))

    def test_a_compiled_function_with_times(self):
        """P40."""
        torch = pytest.importorskip("torch")
        from pararnn import compile_safe_config

        cell, x, dt = driven(ParaCfC)
        there, tx, tdt = cell.to(torch), torch.from_numpy(x), torch.from_numpy(dt)
        torch.compiler.reset()

        def run(x, dt):
            return newton_apply(there, x, compile_safe_config(max_iters=6), dt=dt)

        whole = torch.compile(run, backend="eager", fullgraph=True)
        torch.testing.assert_close(whole(tx, tdt), run(tx, tdt))
