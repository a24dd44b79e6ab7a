"""ParaRWKV7: its equations step by step, the scan against them, gradients, readout, and layers of it."""

from __future__ import annotations

import numpy as np
import pytest

from pararnn import (
    NewtonConfig,
    NewtonStats,
    ParaGRU,
    ParaRWKV7,
    explain,
    newton_apply,
    newton_vjp,
    sequential_apply,
    verify_agreement,
)
from support import error_of

SIZES = [(1, 4), (2, 3), (3, 1)]


def made(heads, d, *, dtype=np.float64, time=90, batch=2, scale=1.0):
    rng = np.random.default_rng(1)
    cell = ParaRWKV7(5, n_heads=heads, d_head=d, seed=0, dtype=dtype)
    cell = cell.replace(W_x_bias=(0.3 * rng.standard_normal(cell.W_x.bias.shape)).astype(dtype))
    x = (scale * rng.standard_normal((batch, time, 5))).astype(dtype)
    return cell, x, rng.standard_normal((batch, heads, d, d)).astype(dtype)


def by_hand(cell, x, s0):
    """S' = S (diag(w) - κ̂ (a ⊙ κ̂)ᵀ) + v kᵀ and y = S' r, one head and one step at a time."""
    heads, d = cell.n_heads, cell.d_head
    states, outputs = np.zeros((*x.shape[:2], heads, d, d)), np.zeros((*x.shape[:2], heads * d))
    for b in range(x.shape[0]):
        S = s0[b].copy()
        for t in range(x.shape[1]):
            w, a, kappa, v, k, r = (cell.W_x.weight @ x[b, t] + cell.W_x.bias).reshape(6, heads, d)
            for h in range(heads):
                decay, rate = 1 / (1 + np.exp(-w[h])), 1 / (1 + np.exp(-a[h]))
                unit = kappa[h] / max(np.linalg.norm(kappa[h]), 1e-6)
                S[h] = S[h] @ (np.diag(decay) - np.outer(unit, rate * unit)) + np.outer(v[h], k[h])
                outputs[b, t, h * d : (h + 1) * d] = S[h] @ r[h]
            states[b, t] = S
    return states, outputs


@pytest.mark.parametrize(("heads", "d"), SIZES)
@pytest.mark.parametrize("given", [False, True])
def test_the_published_equations(heads, d, given):
    cell, x, s0 = made(heads, d)
    states, outputs = by_hand(cell, x, s0 if given else np.zeros_like(s0))
    start = s0 if given else None
    stats = NewtonStats()
    for got in (sequential_apply(cell, x, start), newton_apply(cell, x, h0=start, stats=stats)):
        np.testing.assert_allclose(got, states, rtol=1e-10, atol=1e-12)
    assert stats.path == "scan" and stats.iters == 0 and stats.converged
    for form in ("recurrent", "chunk", "subchunk", "auto"):
        y, last = cell.scan_apply(x, start, return_state=True, form=form)
        np.testing.assert_allclose(y, outputs, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(last, states[:, -1], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(cell.readout(cell.xp, states, x), outputs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("heads", "d"), SIZES)
def test_gradients_of_everything(heads, d):
    """Finite differences along random directions."""
    cell, x, s0 = made(heads, d, time=30)
    rng = np.random.default_rng(2)
    states, pullback = newton_vjp(cell, x, h0=s0)
    weights, step = rng.standard_normal(states.shape), 1e-6
    grads = pullback(weights)
    for label, found in {"x": grads.x, "h0": grads.h0, **grads.params}.items():
        way, ends = rng.standard_normal(found.shape), []
        for sign in (step, -step):
            moved = cell.replace(**{label: cell.arrays[label] + sign * way}) if label in cell.arrays else cell
            start = s0 + sign * way if label == "h0" else s0
            ends.append(np.sum(weights * sequential_apply(moved, x + sign * way if label == "x" else x, start)))
        assert np.sum(found * way) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6, abs=1e-6), label


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("time", [1, 2, 65, 300])
def test_agreement_at_every_length(dtype, time):
    """P01 P10: K* is 0."""
    cell, x, s0 = made(2, 4, dtype=dtype, time=time)
    report = verify_agreement(cell, x, h0=s0)
    assert report.ok and report.newton_iters == 0
    assert verify_agreement(cell, x, h0=s0, reference="float64").ok
    assert newton_apply(cell, x, h0=s0).dtype == dtype


def test_a_long_sequence_may_be_cut():
    cell, x, s0 = made(1, 4, time=700)
    whole = newton_apply(cell, x, h0=s0)
    head = newton_apply(cell, x[:, :333], h0=s0)
    tail = newton_apply(cell, x[:, 333:], h0=head[:, -1])
    assert error_of(cell, np.concatenate([head, tail], axis=1)[..., 0], whole[..., 0]) < 1e-11
    y, state = cell.scan_apply(x[:, :333], s0, return_state=True)
    rest = cell.scan_apply(x[:, 333:], state)
    np.testing.assert_allclose(np.concatenate([y, rest], axis=1), cell.scan_apply(x, s0), rtol=1e-9, atol=1e-11)


def test_shut_gates_and_empty_keys_are_finite():
    cell, x, s0 = made(2, 3, time=20)
    bias = cell.W_x.bias.reshape(6, 6).copy()
    bias[0], bias[1, :3], bias[1, 3:] = -800.0, -800.0, 800.0
    weight = cell.W_x.weight.copy().reshape(6, 6, 5)
    weight[2], bias[2] = 0.0, 0.0
    cell = cell.replace(W_x_weight=weight.reshape(36, 5), W_x_bias=bias.reshape(-1))
    states, pullback = newton_vjp(cell, x, h0=s0)
    np.testing.assert_allclose(states, sequential_apply(cell, x, s0), rtol=1e-10, atol=1e-12)
    grads = pullback(np.ones_like(states))
    assert all(np.all(np.isfinite(g)) for g in (grads.x, grads.h0, *grads.params.values()))


def test_sizes_are_checked():
    assert ParaRWKV7(4, 12, n_heads=3).d_head == 4
    assert ParaRWKV7(4, n_heads=3, d_head=4).d_h == 12 and ParaRWKV7(d_in=4, d_h=12).state_shape == (1, 12, 12)
    with pytest.raises(TypeError, match="needs d_head"):
        ParaRWKV7(4)
    for options in ({"n_heads": 5}, {"n_heads": 3, "d_head": 5}):
        with pytest.raises(ValueError, match="does not make hidden_size=12"):
            ParaRWKV7(4, 12, **options)
    for options in ({"n_heads": 0, "d_head": 2}, {"d_head": 0}, {"n_heads": True, "d_head": 2}):
        with pytest.raises(ValueError, match="whole number"):
            ParaRWKV7(4, **options)
    cell, x, s0 = made(2, 3)
    with pytest.raises(ValueError, match="h0 must have shape"):
        newton_apply(cell, x, h0=s0[:, 0])
    with pytest.raises((TypeError, ValueError), match="matrix as its state"):
        newton_apply(cell, x, NewtonConfig(scan_backend="cpu"))
    assert explain(cell, x).path == "scan"


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5)])
def test_problems_without_steps_or_sequences(shape):
    """O52."""
    cell, _, _ = made(2, 3)
    states, pullback = newton_vjp(cell, np.zeros(shape))
    assert states.shape == (*shape[:2], 2, 3, 3) and pullback(np.zeros_like(states)).x.shape == shape
    assert cell.scan_apply(np.zeros(shape)).shape == (*shape[:2], 6)


class TestParaRNN:
    @pytest.mark.parametrize("layers", [1, 3])
    def test_layers_pass_on_what_is_read(self, layers):
        torch = pytest.importorskip("torch")
        from pararnn import ParaRNN

        cell, x, _ = made(2, 3)
        rnn = ParaRNN(cell, num_layers=layers, return_hidden=True)
        wanted = x
        for layer in rnn.layers:
            arrays = {name: a.detach().numpy() for name, a in layer.cell.arrays.items()}
            full = ParaRWKV7(wanted.shape[2], n_heads=2, d_head=3, dtype=np.float64).replace(**arrays)
            states, wanted = by_hand(full, wanted, np.zeros((2, 2, 3, 3)))
        tx = torch.from_numpy(x)
        for train in (True, False):
            y, last = rnn.train(train)(tx)
            np.testing.assert_allclose(y.detach().numpy(), wanted, rtol=1e-9, atol=1e-11)
            np.testing.assert_allclose(last.detach().numpy(), states[:, -1], rtol=1e-9, atol=1e-11)
        assert rnn.last_stats.converged and rnn.verify_agreement(tx).ok
        raw = ParaRNN(cell, output_hidden=False)(tx)
        assert raw.shape == (2, 90, 2, 3, 3)

    def test_gradients_are_those_of_the_loop(self):
        torch = pytest.importorskip("torch")
        from pararnn import ParaRNN

        cell, x, s0 = made(2, 3, time=40)
        rnn = ParaRNN([ParaGRU(5, 5, seed=0, dtype=np.float64), cell])
        tx, start = torch.from_numpy(x), torch.from_numpy(s0)
        found = []
        for train in (True, False):
            rnn.train(train).zero_grad()
            rnn(tx, h0=[None, start]).square().sum().backward()
            found.append([p.grad.clone() for p in rnn.parameters()])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)

    def test_autograd_through_the_states(self):
        torch = pytest.importorskip("torch")
        cell, x, s0 = made(2, 3, time=40)
        there = cell.to(torch)
        there = there.replace(**{name: a.requires_grad_() for name, a in there.arrays.items()})
        tx, start = torch.from_numpy(x).requires_grad_(), torch.from_numpy(s0).requires_grad_()
        leaves = [tx, start, *there.arrays.values()]
        one = torch.autograd.grad(newton_apply(there, tx, h0=start).square().sum(), leaves)
        two = torch.autograd.grad(sequential_apply(there, tx, start).square().sum(), leaves)
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)

    def test_compiled(self):
        torch = pytest.importorskip("torch")
        from pararnn import ParaRNN, compile_safe_config

        cell, x, _ = made(2, 3, dtype=np.float32, time=40)
        rnn = ParaRNN(cell, num_layers=2, config=compile_safe_config())
        torch.compiler.reset()
        whole = torch.compile(rnn, backend="eager", fullgraph=True)
        tx = torch.from_numpy(x)
        torch.testing.assert_close(whole(tx), rnn(tx), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("library", ["torch", "array_api_strict"])
def test_other_libraries(library):
    xp = pytest.importorskip(library)
    cell, x, s0 = made(2, 3)
    got = newton_apply(cell.to(xp), xp.asarray(x), h0=xp.asarray(s0))
    np.testing.assert_allclose(np.asarray(got), newton_apply(cell, x, h0=s0), rtol=1e-9, atol=1e-11)


def test_packed_documents_are_solved_apart():
    """P43: as in every cell, a document's result does not depend on its neighbours."""
    cell, x, s0 = made(2, 3, time=60, batch=1)
    cuts, starts = [0, 25, 25, 60], np.concatenate([s0, 2.0 * s0, -s0])
    got = newton_apply(cell, x, h0=starts, cu_seqlens=cuts)
    for n, (first, stop) in enumerate(zip(cuts, cuts[1:], strict=False)):
        alone = newton_apply(cell, x[:, first:stop], h0=starts[n : n + 1])
        np.testing.assert_allclose(got[:, first:stop], alone, rtol=1e-10, atol=1e-12)
    grads = newton_vjp(cell, x, h0=starts, cu_seqlens=cuts)[1](np.ones_like(got))
    assert grads.h0.shape == starts.shape and np.all(np.isfinite(grads.x))


def test_jax_jits_and_differentiates_it():
    jax = pytest.importorskip("jax")
    cell, x, s0 = made(1, 2, dtype=np.float32, time=11)
    there, jx, js = cell.to(jax.numpy), jax.numpy.asarray(x), jax.numpy.asarray(s0)
    states = newton_apply(cell, x, h0=s0)
    grads = newton_vjp(cell, x, h0=s0)[1](np.ones_like(states))

    @jax.jit
    def both(x):
        return newton_apply(there, x, h0=js), jax.grad(lambda x: newton_apply(there, x, h0=js).sum())(x)

    got, slopes = both(jx)
    np.testing.assert_allclose(got, states, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(slopes, grads.x, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(sequential_apply(there, jx, js), states, rtol=1e-4, atol=1e-5)
