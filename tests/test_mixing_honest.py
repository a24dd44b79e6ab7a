"""The joint test on networks that do not forget: never a wrong answer, whatever the path."""

from __future__ import annotations

import numpy as np
import pytest

from pararnn import NewtonConfig, NewtonStats, StockGRU, StockLSTM, StockRNN, newton_apply, newton_vjp, sequential_apply

T, D = 700, 24


def orthogonal(seed=3):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((D, D)))[0]


def radius(rho, seed=4):
    matrix = np.random.default_rng(seed).standard_normal((D, D))
    return matrix * rho / np.abs(np.linalg.eigvals(matrix)).max()


def biased(kind, gate, by, times=1.0):
    cell = kind(4, D, seed=2, dtype=np.float64)
    cell = cell.replace(**{n: times * a for n, a in cell.arrays.items()})
    bias = cell.b_h.copy()
    bias[gate * D : (gate + 1) * D] += by
    return cell.replace(b_h=bias)


def rnn(matrix, **options):
    return StockRNN(4, D, seed=1, dtype=np.float64, **options).replace(R=matrix)


# name -> cell, scale of the input, steps after which the input is silent (a copy task keeps what it saw)
NETWORKS = {
    "radius 0.9": (lambda: rnn(radius(0.9)), 0.05, None),
    "radius 1.1": (lambda: rnn(radius(1.1)), 0.05, None),
    "radius 1.5": (lambda: rnn(radius(1.5)), 1.0, None),
    "orthogonal": (lambda: rnn(orthogonal()), 0.01, None),
    "orthogonal, nearly linear": (lambda: rnn(orthogonal()), 1e-4, 40),
    "orthogonal, relu": (lambda: rnn(orthogonal(), nonlinearity="relu"), 0.01, None),
    "gru weights x3": (lambda: biased(StockGRU, 1, 0.0, 3.0), 1.0, None),
    "lstm weights x3": (lambda: biased(StockLSTM, 1, 0.0, 3.0), 1.0, None),
    "gru weights x8": (lambda: biased(StockGRU, 1, 0.0, 8.0), 1.0, None),
    "lstm forget +3": (lambda: biased(StockLSTM, 1, 3.0), 1.0, None),
    "lstm forget +3, copy": (lambda: biased(StockLSTM, 1, 3.0), 1.0, 20),
    "lstm forget +8, copy": (lambda: biased(StockLSTM, 1, 8.0), 1.0, 20),
    "gru update +5, copy": (lambda: biased(StockGRU, 1, 5.0), 1.0, 20),
    "gru update +12": (lambda: biased(StockGRU, 1, 12.0), 1.0, None),
}


def problem(name, dtype):
    make, scale, silent = NETWORKS[name]
    x = scale * np.random.default_rng(7).standard_normal((2, T, 4))
    if silent is not None:
        x[:, silent:] = 0.0
    return make().to(dtype=dtype), x.astype(dtype)


def error_of(found, loop, slots):
    by_slot = [(found, loop)] if slots == 1 else [(found[:, :, s], loop[:, :, s]) for s in range(slots)]
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in by_slot)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_right_or_the_loop(name, dtype):
    """P01: within the tolerance of the loop, and the estimate tells the error; what cannot settle says it walked."""
    cell, x = problem(name, dtype)
    stats = NewtonStats()
    found = newton_apply(cell, x, NewtonConfig(segment_len=64), stats=stats)
    loop = sequential_apply(cell, x)
    error = error_of(found, loop, cell.state_slots)
    assert stats.converged
    if stats.path == "sequential":
        assert np.array_equal(found, loop) and "walked" in stats.reason
    else:
        assert error <= (5e-5 if dtype == np.float32 else 5e-11)
        # What the estimate cannot see is how the loop itself rounds.
        assert error <= 3.0 * stats.agreement_estimate + (4e-6 if dtype == np.float32 else 1e-14)


@pytest.mark.parametrize("name", NETWORKS)
def test_right_gradients_or_the_loops(name):
    """The adjoint's joints are tested like the states'; against one segment, which has none."""
    cell, x = problem(name, np.float64)
    states, by_segments = newton_vjp(cell, x[:, :300], NewtonConfig(segment_len=30))
    _, by_loop = newton_vjp(cell, x[:, :300], NewtonConfig(segment_len=300))
    cotangent = np.random.default_rng(8).standard_normal(states.shape)
    found, wanted = by_segments(cotangent), by_loop(cotangent)
    for a, b in ((found.x, wanted.x), *((found.params[n], wanted.params[n]) for n in wanted.params)):
        # States by segments are within 1e-11 of the loop's; what amplifies errors amplifies that one too.
        assert np.abs(a - b).max() <= 1e-8 * np.abs(b).max() + 1e-300


def test_sequences_are_judged_each_by_itself():
    """A sequence that settles keeps its segments where its neighbour in the batch does not."""
    cell, x = problem("gru update +12", np.float64)
    x[0] = 0.0
    alone, both = NewtonStats(), NewtonStats()
    config = NewtonConfig(segment_len=50, max_passes=3)
    first = newton_apply(cell, x[:1], config, stats=alone)
    joined = newton_apply(cell, x, config, stats=both)
    assert np.abs(joined[:1] - first).max() < 1e-10
    assert np.abs(joined - sequential_apply(cell, x)).max() < 1e-10


def test_a_start_outside_the_box_is_not_projected_away():
    """|h0| > 1 is allowed: the guard's box grows with it."""
    cell, x = problem("gru update +5, copy", np.float64)
    h0 = np.full((2, D), 3.0)
    found = newton_apply(cell, x, NewtonConfig(segment_len=20), h0=h0)
    assert np.abs(found - sequential_apply(cell, x, h0)).max() < 1e-10


def test_not_a_number_stays_where_the_loop_has_it():
    """A NaN in the input reaches exactly the states that it reaches in the loop."""
    cell, x = problem("lstm weights x3", np.float32)
    x[0, 333, 1] = np.nan
    found, loop = newton_apply(cell, x, NewtonConfig(segment_len=40)), sequential_apply(cell, x)
    assert np.array_equal(np.isnan(found), np.isnan(loop)) and np.isnan(found).any()


@pytest.mark.filterwarnings("ignore::pararnn.NotConvergedWarning")
def test_pinned_corrections_are_an_order():
    """max_iters=K makes K corrections over segments, without a test and without a finish, and says how far it is."""
    cell, x = problem("lstm forget +3", np.float64)
    errors = []
    for k in (0, 2, 6):
        stats = NewtonStats()
        config = NewtonConfig(max_iters=k, segment_len=64, residual_fail=None)
        found = newton_apply(cell, x, config, stats=stats)
        assert stats.iters == k and stats.path == "segments"
        errors.append(error_of(found, sequential_apply(cell, x), 2))
    assert errors[0] > 5.0 * errors[1] > 5.0 * errors[2]


def test_a_good_guess_saves_passes():
    cell, x = problem("gru update +5, copy", np.float64)
    cold, warm = NewtonStats(), NewtonStats()
    config = NewtonConfig(segment_len=64)
    states = newton_apply(cell, x, config, stats=cold)
    again = newton_apply(cell, x, config, guess=states, stats=warm)
    assert warm.passes < cold.passes and np.abs(again - states).max() < 1e-10


@pytest.mark.filterwarnings("ignore::pararnn.NotConvergedWarning")
def test_a_pinned_solve_obeys_omega_and_ends_at_its_residual():
    cell, x = problem("gru update +5, copy", np.float64)
    common = {"max_iters": 20, "segment_len": 64, "residual_fail": None}
    early, relaxed = NewtonStats(), NewtonStats()
    newton_apply(cell, x, NewtonConfig(residual_atol=1e-3, **common), stats=early)
    assert early.iters < 20 and early.residual_history[-1] < 1e-3 <= early.residual_history[-2]
    newton_apply(cell, x, NewtonConfig(residual_atol=1e-3, omega=0.5, **common), stats=relaxed)
    assert relaxed.iters > early.iters


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_a_network_trained_to_remember(kind):
    """Trained here to tell at the end the sign of what it saw at the start: right at many times that length."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer, make = {"gru": (torch.nn.GRU, StockGRU), "lstm": (torch.nn.LSTM, StockLSTM)}[kind]
    module, head = layer(4, D, batch_first=True), torch.nn.Linear(D, 1)
    with torch.no_grad():
        # The gate that keeps starts half open to the past.
        module.bias_hh_l0[D : 2 * D] += 1.5
    optimiser = torch.optim.Adam([*module.parameters(), *head.parameters()], 1e-2)
    losses = []
    for step in range(240):
        # What lies between grows as it learns.
        x = 0.2 * torch.randn(32, 8 + step // 8, 4)
        sign = torch.sign(torch.randn(32))
        x[:, 0, 0] = 2.0 * sign
        loss = torch.nn.functional.softplus(-sign * head(module(x)[0][:, -1])[:, 0]).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    # It has learnt something that lasts: chance is 0.69.
    assert losses[-1] < 0.3
    cell = make(4, D, seed=0, dtype=np.float64)
    names = {"W_x.weight": "weight_ih_l0", "W_x.bias": "bias_ih_l0", "R": "weight_hh_l0", "b_h": "bias_hh_l0"}
    cell = cell.replace(**{ours: getattr(module, v).detach().double().numpy() for ours, v in names.items()})
    x = 0.2 * np.random.default_rng(1).standard_normal((2, T, 4))
    x[:, 0, 0] = (2.0, -2.0)
    for dtype in (np.float32, np.float64):
        stats = NewtonStats()
        small, given = cell.to(dtype=dtype), x.astype(dtype)
        found = newton_apply(small, given, NewtonConfig(segment_len=50), stats=stats)
        error = error_of(found, sequential_apply(small, given), cell.state_slots)
        assert stats.converged and error <= (5e-5 if dtype == np.float32 else 5e-11)
