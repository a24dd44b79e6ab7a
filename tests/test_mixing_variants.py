"""Head, dense, Hopfield and matrix-state cells: equations, parallel against loop, gradients, refusals."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import pararnn
from pararnn import (
    MixingCell,
    NewtonConfig,
    NewtonStats,
    ParaGRU,
    ParaHopfield,
    ParaM2RNN,
    ParaSLSTM,
    StockLSTM,
    UntraceableError,
    newton_apply,
    newton_vjp,
    sequential_apply,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*mix='head':UserWarning")


class Own(MixingCell):
    """A user's cell: two stages, a channelwise param, a product used in the source of another."""

    slots, gates, params = ("h", "y"), ("u", "v"), ("a",)
    products = {"P": ("p",), "Q": ("q", "s")}
    biases = {"b": ("q",)}

    def step(self, xp, mix, h, y, u, v, a):
        (p,) = mix(h, "p")
        q, s = mix(xp.tanh(p) * y, "q", "s")
        y = 0.5 * y + xp.tanh(a * q + v)
        return xp.tanh(u + s + 0.3 * y), y


CELLS = {
    "gru dense": lambda **k: ParaGRU(4, 12, mix="dense", **k),
    "gru head": lambda **k: ParaGRU(4, 12, mix="head", n_heads=3, **k),
    "slstm dense": lambda **k: ParaSLSTM(4, 8, mix="dense", **k),
    "slstm head": lambda **k: ParaSLSTM(4, 12, mix="head", n_heads=3, **k),
    "slstm sigmoid": lambda **k: ParaSLSTM(
        4, 12, mix="head", n_heads=3, forget_gate="sigmoid", stabiliser_start="input", **k
    ),
    "hopfield": lambda **k: ParaHopfield(4, 6, beta=3.0, **k),
    "m2rnn": lambda **k: ParaM2RNN(4, k_dim=3, v_dim=5, **k),
    "lstm head": lambda **k: StockLSTM(4, 12, n_heads=2, **k),
    "own": lambda **k: Own(4, 7, **k),
}


def inputs(shape, seed=0, dtype=np.float64, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def sigmoid(v):
    return 1.0 / (1.0 + np.exp(-v))


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_segments_give_the_loops_states(name, dtype):
    cell, x = CELLS[name](seed=0, dtype=dtype), inputs((2, 203, 4), 1, dtype, 2.0)
    stats = NewtonStats()
    found = newton_apply(cell, x, NewtonConfig(segment_len=24), stats=stats)
    loop = sequential_apply(cell, x)
    assert stats.converged and stats.passes >= 1
    scale = np.abs(loop).max(axis=(0, 1, 3), keepdims=True) if cell.state_slots > 1 else np.abs(loop).max()
    assert np.max(np.abs(found - loop) / scale) <= (1e-10 if dtype == np.float64 else 1e-4)


@pytest.mark.parametrize("name", CELLS)
def test_gradients_are_those_of_back_propagation(name):
    torch = pytest.importorskip("torch")
    cell, x = CELLS[name](seed=0, dtype=np.float64), inputs((2, 71, 4), 2)
    states, pull_back = newton_vjp(cell, x, NewtonConfig(segment_len=16))
    cotangent = inputs(states.shape, 3)
    grads = pull_back(cotangent)
    watched = cell.to(torch)
    watched = watched.replace(**{n: a.requires_grad_() for n, a in watched.arrays.items()})
    t_x = torch.tensor(x, requires_grad=True)
    (sequential_apply(watched, t_x) * torch.as_tensor(cotangent)).sum().backward()
    for found, wanted in ((grads.x, t_x.grad), *((grads.params[n], a.grad) for n, a in watched.arrays.items())):
        assert np.abs(found - wanted.numpy()).max() <= 1e-10 * max(1.0, float(wanted.abs().max()))


def test_head_gru_is_the_described_one():
    """One step by hand: per head, h @ A with the input axis first, the reset before its product."""
    cell, x, h = ParaGRU(3, 6, mix="head", n_heads=2, seed=4, dtype=np.float64), inputs((1, 1, 3)), inputs((1, 6), 5)
    z_x, r_x, n_x = (x[:, 0] @ cell.W_x.weight.T + cell.W_x.bias).reshape(3, 1, 6)

    def product(v, a):
        return np.concatenate([v[:, 3 * k : 3 * k + 3] @ a[k] for k in range(2)], axis=1)

    z, r = sigmoid(product(h, cell.A_z) + z_x), sigmoid(product(h, cell.A_r) + r_x)
    wanted = (1 - z) * h + z * np.tanh(product(r * h, cell.A_n) + n_x)
    assert np.abs(newton_apply(cell, x, h0=h)[:, 0] - wanted).max() < 1e-14


def test_hopfield_and_m2rnn_are_the_described_ones():
    cell, x, h = ParaHopfield(3, 4, seed=4, dtype=np.float64), inputs((1, 1, 3)), inputs((1, 4), 5)
    K, V = (x[:, 0] @ cell.W_x.weight.T + cell.W_x.bias).reshape(2, 4, 4)
    a = np.exp(0.5 * K @ h[0])
    assert np.abs(newton_apply(cell, x, h0=h)[0, 0] - V @ (a / a.sum())).max() < 1e-14
    matrix, start = ParaM2RNN(3, k_dim=2, v_dim=3, seed=4, dtype=np.float64), inputs((1, 2, 3), 6)
    made = (x[0, 0] @ matrix.W_x.weight.T)[None]
    k, v, f = made[:, :2], made[:, 2:5], sigmoid(made[:, 5:])
    wanted = f * start[0] + (1 - f) * np.tanh(start[0] @ matrix.W + k.T @ v)
    assert np.abs(newton_apply(matrix, x, h0=start)[0, 0] - wanted).max() < 1e-14


def test_the_head_matrices_are_one_block_diagonal_dense_matrix():
    """Heads are a restriction of the dense cell, with the same numbers."""
    head = ParaGRU(3, 8, mix="head", n_heads=2, seed=1, dtype=np.float64)
    dense = ParaGRU(3, 8, mix="dense", seed=1, dtype=np.float64)
    blocks = {n: np.zeros((8, 8)) for n in ("A_z", "A_r", "A_n")}
    for n, block in blocks.items():
        for k in range(2):
            block[4 * k : 4 * k + 4, 4 * k : 4 * k + 4] = head.arrays[n][k]
    projection = {n: head.arrays[n] for n in ("W_x.weight", "W_x.bias")}
    dense, x = dense.replace(**blocks, **projection), inputs((2, 100, 3))
    assert np.abs(newton_apply(head, x) - newton_apply(dense, x)).max() < 1e-10


@pytest.mark.parametrize("name", CELLS)
def test_cells_are_values(name):
    """Copies, pickles, dtypes: the same numbers come out."""
    cell, x = CELLS[name](seed=0), inputs((1, 30, 4), dtype=np.float32)
    wanted = sequential_apply(cell, x)
    for other in (copy.deepcopy(cell), pickle.loads(pickle.dumps(cell)), cell.replace()):
        assert np.array_equal(sequential_apply(other, x), wanted)
    assert newton_apply(cell.to(dtype=np.float16), x.astype(np.float16)).dtype == np.float16


def test_refusals():
    with pytest.raises(ValueError, match="needs n_heads"):
        ParaGRU(3, 4, mix="head")
    with pytest.raises(ValueError, match="needs mix='head'"):
        ParaGRU(3, 4, n_heads=2)
    with pytest.raises(ValueError, match="must be 'diag', 'head' or 'dense'"):
        ParaSLSTM(3, 4, mix="full")
    with pytest.raises(ValueError, match="must divide"):
        ParaGRU(3, 4, mix="head", n_heads=3)
    with pytest.raises(ValueError, match="beta"):
        ParaHopfield(3, 4, beta=0.0)
    with pytest.raises(ValueError, match="at least 1"):
        ParaM2RNN(3, k_dim=0, v_dim=2)
    with pytest.raises(TypeError, match="needs v_dim"):
        ParaM2RNN(3, k_dim=2)


def test_warnings_of_the_dear_ones():
    with pytest.warns(UserWarning, match="costs more than mix='diag'"):
        ParaGRU(3, 4, mix="head", n_heads=2)
    with pytest.warns(UserWarning, match="at most 32"):
        ParaHopfield(2, 33)


def test_a_product_that_is_not_there_or_is_taken_twice():
    class Wrong(MixingCell):
        slots, gates, products = ("h",), ("u",), {"R": ("m",)}

        def step(self, xp, mix, h, u):
            return (mix(h, "other")[0] + u,)

    class Twice(Wrong):
        def step(self, xp, mix, h, u):
            return (mix(h, "m")[0] + mix(h + u, "m")[0],)

    class Never(Wrong):
        def step(self, xp, mix, h, u):
            return (h + u,)

    for kind, why in ((Wrong, "no product"), (Twice, "taken twice"), (Never, "never uses")):
        with pytest.raises(UntraceableError, match=why):
            newton_apply(kind(2, 3, seed=0), inputs((1, 9, 2), dtype=np.float32))


def test_in_a_layer():
    """ParaRNN takes mixing cells like any other: forward, gradient, second layer."""
    torch = pytest.importorskip("torch")
    layer = pararnn.ParaRNN(ParaGRU(4, 6, mix="dense", seed=0, dtype=torch.float64), num_layers=2)
    x = torch.as_tensor(inputs((2, 40, 4))).requires_grad_()
    layer(x).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in layer.parameters())


@pytest.mark.parametrize("library", ["array_api_strict", "jax.numpy", "torch"])
@pytest.mark.parametrize("name", ["gru head", "m2rnn"])
def test_every_library_gives_numpys_numbers(library, name):
    """States and gradients on other libraries' arrays, in place."""
    xp = pytest.importorskip(library)
    cell, x = CELLS[name](seed=0), inputs((2, 25, 4), dtype=np.float32)
    config = NewtonConfig(segment_len=8)
    states, pull_back = newton_vjp(cell, x, config)
    cotangent = inputs(states.shape, 3, np.float32)
    theirs, pull_back_theirs = newton_vjp(cell.to(xp), xp.asarray(x), config)
    assert type(theirs) is type(xp.asarray(x))
    found, wanted = pull_back_theirs(xp.asarray(cotangent)), pull_back(cotangent)
    pairs = [(theirs, states), (found.x, wanted.x), *((found.params[n], wanted.params[n]) for n in wanted.params)]
    for a, b in pairs:
        assert np.abs(np.from_dlpack(a) - b).max() <= 1e-4 * max(1.0, np.abs(b).max())


def test_exact_is_the_loop_itself():
    cell, x = CELLS["gru dense"](seed=0), inputs((2, 90, 4), dtype=np.float32)
    stats = NewtonStats()
    found = newton_apply(cell, x, NewtonConfig(exact=True), stats=stats)
    assert stats.exact and np.array_equal(found, sequential_apply(cell, x))


@pytest.mark.parametrize("name", CELLS)
def test_check_cell_passes_them(name):
    pararnn.check_cell(CELLS[name](seed=0))


def test_check_cell_finds_what_is_wrong():
    class Unbounded(Own):
        bounds = {"y": (-1.0, 1.0)}

    class Hidden(Own):
        hidden = "z"

    calls = []

    class Moody(Own):
        def step(self, xp, mix, h, y, u, v, a):
            calls.append(xp)
            return super().step(xp, mix, h, y, u, v + float(len(calls)), a)

    for kind, why in ((Unbounded, "left its declared bounds"), (Hidden, "hidden"), (Moody, "differs from the step")):
        with pytest.raises(TypeError, match=why):
            pararnn.check_cell(kind(4, 5, seed=0))
