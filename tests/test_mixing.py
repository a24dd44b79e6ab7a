"""Mixing cells: torch's own recurrences reproduced, segments against the loop, gradients against back-propagation."""

from __future__ import annotations

import numpy as np
import pytest

import pararnn
from pararnn import NewtonConfig, NewtonStats, StockGRU, StockLSTM, StockRNN, newton_apply, newton_vjp, sequential_apply

torch = pytest.importorskip("torch")

STOCK = {
    "gru": (StockGRU, {}, torch.nn.GRU, {}),
    "lstm": (StockLSTM, {}, torch.nn.LSTM, {}),
    "tanh": (StockRNN, {}, torch.nn.RNN, {}),
    "relu": (StockRNN, {"nonlinearity": "relu"}, torch.nn.RNN, {"nonlinearity": "relu"}),
}
TORCH_NAMES = {"W_x.weight": "weight_ih_l0", "W_x.bias": "bias_ih_l0", "R": "weight_hh_l0", "b_h": "bias_hh_l0"}


def make(kind: str, n_in: int, width: int, **options):
    cls, own, _, _ = STOCK[kind]
    return cls(n_in, width, **own, **options)


def inputs(shape, seed=0, dtype=np.float64, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def hidden(cell, states):
    return states if cell.state_slots == 1 else states[:, :, cell.hidden_slot, :]


@pytest.mark.parametrize("kind", STOCK)
def test_the_loop_is_torchs_own(kind):
    cell, x = make(kind, 5, 12, seed=0, dtype=np.float64), inputs((2, 57, 5))
    _, _, theirs, options = STOCK[kind]
    module = theirs(5, 12, batch_first=True, dtype=torch.float64, **options)
    with torch.no_grad():
        for ours, name in TORCH_NAMES.items():
            getattr(module, name).copy_(torch.as_tensor(cell.arrays[ours]))
        wanted = module(torch.as_tensor(x))[0].numpy()
    assert np.abs(hidden(cell, sequential_apply(cell, x)) - wanted).max() < 1e-14


@pytest.mark.parametrize("kind", STOCK)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_segments_give_the_loops_states(kind, dtype):
    cell, x = make(kind, 3, 17, seed=1, dtype=dtype), inputs((3, 331, 3), 1, dtype)
    h0 = inputs((3, *cell.state_shape), 2, dtype, 0.3)
    stats = NewtonStats()
    found = newton_apply(cell, x, NewtonConfig(segment_len=48), h0=h0, stats=stats)
    loop = sequential_apply(cell, x, h0)
    assert stats.path == "segments" and stats.converged
    assert np.abs(found - loop).max() <= (1e-10 if dtype == np.float64 else 1e-5) * np.abs(loop).max()
    assert np.abs(found - loop).max() / np.abs(loop).max() <= 3.0 * stats.agreement_estimate


@pytest.mark.parametrize("kind", STOCK)
@pytest.mark.parametrize("segment_len", [29, 211])
def test_gradients_are_those_of_back_propagation(kind, segment_len):
    """The adjoint by segments (211 steps: by the loop) equals torch's gradient through the time loop in fp64."""
    cell, x = make(kind, 3, 9, seed=2, dtype=np.float64), inputs((2, 211, 3), 3)
    h0 = inputs((2, *cell.state_shape), 4, scale=0.3)
    states, pull_back = newton_vjp(cell, x, NewtonConfig(segment_len=segment_len), h0)
    cotangent = inputs(states.shape, 5)
    grads = pull_back(cotangent)
    watched = cell.to(torch)
    watched = watched.replace(**{name: a.requires_grad_() for name, a in watched.arrays.items()})
    t_x, t_h0 = torch.tensor(x, requires_grad=True), torch.tensor(h0, requires_grad=True)
    (sequential_apply(watched, t_x, t_h0) * torch.as_tensor(cotangent)).sum().backward()
    for found, wanted in (
        (grads.x, t_x.grad),
        (grads.h0, t_h0.grad),
        *((grads.params[name], a.grad) for name, a in watched.arrays.items()),
    ):
        assert np.abs(found - wanted.numpy()).max() <= 1e-10 * max(1.0, float(wanted.abs().max()))


def test_autograd_reaches_everything():
    """newton_apply on tensors: the same gradients as the tracked loop."""
    cell = make("gru", 3, 8, seed=0, dtype=torch.float64)
    x = torch.as_tensor(inputs((2, 90, 3)))
    found = []
    for apply in (sequential_apply, lambda c, x: newton_apply(c, x, NewtonConfig(segment_len=16))):
        watched = cell.replace(**{name: a.clone().requires_grad_() for name, a in cell.arrays.items()})
        t_x = x.clone().requires_grad_()
        apply(watched, t_x).square().sum().backward()
        found.append([t_x.grad, *(a.grad for a in watched.arrays.values())])
    for a, b in zip(*found, strict=True):
        assert float((a - b).abs().max()) <= 1e-10 * float(a.abs().max())


@pytest.mark.parametrize("kind", STOCK)
def test_cutting_a_sequence_changes_nothing(kind):
    cell, x = make(kind, 3, 8, seed=3, dtype=np.float64), inputs((2, 150, 3), 6)
    config = NewtonConfig(segment_len=20)
    whole = newton_apply(cell, x, config)
    first = newton_apply(cell, x[:, :67], config)
    rest = newton_apply(cell, x[:, 67:], config, h0=first[:, -1])
    assert np.abs(np.concatenate([first, rest], axis=1) - whole).max() < 1e-10


def test_public_calls_know_mixing_cells():
    cell, x = make("gru", 3, 8, seed=0), inputs((1, 70, 3), dtype=np.float32)
    assert pararnn.verify_agreement(cell, x, config=NewtonConfig(segment_len=16)).ok
    assert pararnn.explain(cell, x, NewtonConfig(segment_len=16)).path == "segments"
    assert "matrix" in str(pararnn.explain(cell, x).refusals["cpu"])
    with pytest.raises(TypeError, match="channelwise cells"):
        newton_apply(cell, x, NewtonConfig(scan_backend="cpu"))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 1, 3)])
def test_sequences_without_work(shape):
    cell, x = make("lstm", 3, 4, seed=0), inputs(shape, dtype=np.float32)
    states, pull_back = newton_vjp(cell, x)
    grads = pull_back(np.ones_like(states))
    assert states.shape == (*shape[:2], 2, 4)
    assert grads.x.shape == shape and grads.params["R"].shape == cell.R.shape
    assert np.array_equal(states, sequential_apply(cell, x))


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_windows_carry_the_state(kind, monkeypatch):
    """Where memory allows a few segments at a time, windows follow one another, forward and back."""
    from pararnn.mixing import plan

    monkeypatch.setattr(plan, "WINDOW_BYTES", 100_000)
    cell, x = make(kind, 4, 16, seed=0, dtype=np.float64), inputs((2, 601, 4))
    stats = NewtonStats()
    states, by_windows = newton_vjp(cell, x, NewtonConfig(segment_len=32), stats=stats)
    loop, by_loop = newton_vjp(cell, x, NewtonConfig(segment_len=601))
    cotangent = inputs(loop.shape, 1)
    found, wanted = by_windows(cotangent), by_loop(cotangent)
    assert stats.windows > 2 and np.abs(states - loop).max() < 1e-10
    for a, b in ((found.x, wanted.x), *((found.params[n], wanted.params[n]) for n in wanted.params)):
        assert np.abs(a - b).max() <= 1e-10 * np.abs(b).max()
