"""from_weights: each library's trained weights give what that library itself computes; what does not fit is refused."""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import pytest

import pararnn
from pararnn import (
    NewtonConfig,
    NewtonStats,
    ResetFirstGRU,
    StockGRU,
    StockLSTM,
    StockRNN,
    from_weights,
    newton_apply,
    newton_vjp,
    sequential_apply,
)

BATCH, TIME, FEATURES, WIDTH = 2, 37, 3, 6


def needs(library):
    return pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed")


def inputs(seed=0, shape=(BATCH, TIME, FEATURES)):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def filled(tree, seed=1):
    """The same tree with every array drawn anew, so that a bias left out or put on another gate shows."""
    rng = np.random.default_rng(seed)
    if isinstance(tree, dict):
        return {name: filled(value, seed + 7 * k + 1) for k, (name, value) in enumerate(tree.items())}
    return rng.normal(0.0, 0.4, tree.shape).astype(np.float32)


def outputs(cell, x):
    """What a layer passes on, by the loop, after making sure that the parallel run agrees."""
    loop = sequential_apply(cell, x)
    stats = NewtonStats()
    states = newton_apply(cell, x, NewtonConfig(segment_len=8), stats=stats)
    assert stats.converged and np.abs(np.asarray(states) - np.asarray(loop)).max() < 1e-5
    return np.asarray(loop if cell.state_slots == 1 else loop[:, :, cell.hidden_slot, :])


def same(found, wanted):
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 2e-6


# PyTorch


@needs("torch")
@pytest.mark.parametrize("name", ["GRU", "LSTM", "RNN", "relu"])
@pytest.mark.parametrize("bias", [True, False])
def test_torch_layers(name, bias):
    import torch

    options = {"nonlinearity": "relu"} if name == "relu" else {}
    kind = getattr(torch.nn, "RNN" if name == "relu" else name)
    torch.manual_seed(0)
    module = kind(FEATURES, WIDTH, num_layers=2, bidirectional=True, batch_first=True, bias=bias, **options)
    weights = {f"net.rnn.{key}": value.detach().numpy() for key, value in module.state_dict().items()}
    x = inputs()
    wanted = module(torch.from_numpy(x))[0].detach().numpy()
    for layer in range(2):
        sides = []
        for reverse in (False, True):
            cell = from_weights(weights, prefix="net.rnn", layer=layer, reverse=reverse, **options)
            step = -1 if reverse else 1
            sides.append(outputs(cell, x[:, ::step])[:, ::step])
        x = np.concatenate(sides, axis=2)
    same(x, wanted)


@needs("torch")
@pytest.mark.parametrize("name", ["GRUCell", "LSTMCell", "RNNCell"])
def test_torch_cells_give_tensors_that_autograd_follows(name):
    import torch

    torch.manual_seed(0)
    module = getattr(torch.nn, name)(FEATURES, WIDTH)
    cell = from_weights(dict(module.named_parameters()))
    x = torch.from_numpy(inputs())
    state, rows = None, []
    for t in range(TIME):
        state = module(x[:, t], state)
        rows.append(state[0] if name == "LSTMCell" else state)
    wanted = torch.stack(rows, dim=1)
    found = newton_apply(cell, x)
    found = found if cell.state_slots == 1 else found[:, :, cell.hidden_slot]
    same(found.detach().numpy(), wanted.detach().numpy())
    ours = torch.autograd.grad(found.square().sum(), list(module.parameters()))
    theirs = torch.autograd.grad(wanted.square().sum(), list(module.parameters()))
    assert all((a - b).abs().max() < 1e-4 * (1.0 + b.abs().max()) for a, b in zip(ours, theirs, strict=True))


# Flax


def flax_loop(cell, params, x):
    """What flax's own cell computes, step by step."""
    import jax

    carry, rows = cell.initialize_carry(jax.random.key(0), x[:, 0].shape), []
    for t in range(x.shape[1]):
        carry, y = cell.apply({"params": params}, carry, x[:, t])
        rows.append(np.asarray(y))
    return np.stack(rows, axis=1)


@needs("flax")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("GRUCell", StockGRU), ("LSTMCell", StockLSTM), ("OptimizedLSTMCell", StockLSTM), ("SimpleCell", StockRNN)],
)
def test_flax_linen(name, kind):
    import jax
    from flax import linen

    x, cell = inputs(), getattr(linen, name)(features=WIDTH)
    carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
    params = filled(cell.init(jax.random.key(0), carry, x[:, 0])["params"])
    made = from_weights({"params": params}, prefix="params")
    assert type(made) is kind and (made.d_in, made.d_h) == (FEATURES, WIDTH)
    same(outputs(made, x), flax_loop(cell, params, x))


@needs("flax")
@pytest.mark.parametrize("name", ["GRUCell", "LSTMCell", "OptimizedLSTMCell", "SimpleCell"])
def test_flax_nnx(name):
    import jax
    import jax.numpy as jnp
    from flax import nnx

    x, cell = inputs(), getattr(nnx, name)(FEATURES, WIDTH, rngs=nnx.Rngs(0))
    weights = filled(nnx.to_pure_dict(nnx.state(cell, nnx.Param)))
    nnx.update(cell, jax.tree.map(jnp.asarray, weights))
    carry, rows = cell.initialize_carry(x[:, 0].shape, nnx.Rngs(0)), []
    for t in range(TIME):
        carry, y = cell(carry, x[:, t])
        rows.append(np.asarray(y))
    wanted = np.stack(rows, axis=1)
    same(outputs(from_weights(weights), x), wanted)
    of_jax = from_weights(nnx.to_pure_dict(nnx.state(cell, nnx.Param)))
    states = newton_apply(of_jax, jnp.asarray(x))
    same(np.asarray(states if of_jax.state_slots == 1 else states[:, :, of_jax.hidden_slot]), wanted)


# Equinox


@needs("equinox")
@pytest.mark.parametrize("name", ["GRUCell", "LSTMCell"])
@pytest.mark.parametrize("bias", [True, False])
def test_equinox(name, bias):
    import equinox
    import jax

    x = inputs()
    cell = getattr(equinox.nn, name)(FEATURES, WIDTH, use_bias=bias, key=jax.random.key(3))
    state = np.zeros((BATCH, WIDTH), np.float32)
    state, rows = (state, state) if name == "LSTMCell" else state, []
    for t in range(TIME):
        state = jax.vmap(cell)(x[:, t], state)
        rows.append(np.asarray(state[0] if name == "LSTMCell" else state))
    weights = {key: np.asarray(a) if hasattr(a, "shape") else a for key, a in vars(cell).items()}
    same(outputs(from_weights(weights), x), np.stack(rows, axis=1))


# Keras


@pytest.fixture(scope="module")
def keras():
    if find_spec("keras") is None:
        pytest.skip("keras is not installed")
    for backend in ("torch", "jax"):
        if find_spec(backend) is not None:
            os.environ.setdefault("KERAS_BACKEND", backend)
            break
    return pytest.importorskip("keras")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's own
@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("GRU", {"reset_after": True}, StockGRU),
        ("GRU", {"reset_after": False}, ResetFirstGRU),
        ("LSTM", {}, StockLSTM),
        ("SimpleRNN", {}, StockRNN),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_keras(keras, name, options, kind, bias):
    x = inputs()
    layer = getattr(keras.layers, name)(WIDTH, return_sequences=True, use_bias=bias, **options)
    layer.build(x.shape)
    rng = np.random.default_rng(4)
    weights = [rng.normal(0.0, 0.4, a.shape).astype(np.float32) for a in layer.get_weights()]
    layer.set_weights(weights)
    wanted = keras.ops.convert_to_numpy(layer(x))
    made = from_weights(weights, **({} if bias else options))
    assert type(made) is kind
    same(outputs(made, x), wanted)
    named = dict(zip(("kernel", "recurrent_kernel", "bias"), weights, strict=False))
    same(outputs(from_weights({"gru_cell": named}, prefix="gru_cell", **({} if bias else options)), x), wanted)


# The cell that Keras's reset_after=False needs.


def test_reset_first_gru_is_its_equations():
    cell = ResetFirstGRU(FEATURES, WIDTH, seed=0, dtype=np.float64)
    x = inputs().astype(np.float64)
    R, (weight, bias) = cell.arrays["R"], cell.W_x
    h, rows = np.zeros((BATCH, WIDTH)), []
    for t in range(TIME):
        g = x[:, t] @ weight.T + bias
        r, z = (1.0 / (1.0 + np.exp(-(g[:, k : k + WIDTH] + h @ R[k : k + WIDTH].T))) for k in (0, WIDTH))
        n = np.tanh(g[:, 2 * WIDTH :] + (r * h) @ R[2 * WIDTH :].T)
        h = (1.0 - z) * n + z * h
        rows.append(h)
    assert np.abs(sequential_apply(cell, x) - np.stack(rows, axis=1)).max() < 1e-13


def test_reset_first_gru_gradients_are_finite_differences():
    cell = ResetFirstGRU(FEATURES, WIDTH, seed=0, dtype=np.float64)
    x = inputs().astype(np.float64)
    config = NewtonConfig(segment_len=8)
    states, pullback = newton_vjp(cell, x, config)
    weights = np.random.default_rng(2).standard_normal(states.shape)
    found = pullback(weights)
    rng, step = np.random.default_rng(3), 1e-6
    for name in ("R", "W_x.weight", "W_x.bias"):
        way = rng.standard_normal(cell.arrays[name].shape)
        ends = [
            float((weights * sequential_apply(cell.replace(**{name: cell.arrays[name] + s * way}), x)).sum())
            for s in (step, -step)
        ]
        wanted = (ends[0] - ends[1]) / (2.0 * step)
        assert abs(float((found.params[name] * way).sum()) - wanted) < 1e-6 * max(1.0, abs(wanted))


# Refusals


def torch_like(rows, width=4, features=5, **more):
    rng = np.random.default_rng(0)
    return {
        "weight_ih_l0": rng.standard_normal((rows, features)),
        "weight_hh_l0": rng.standard_normal((rows, width)),
        **more,
    }


@pytest.mark.parametrize(
    ("weights", "options", "error", "sentence"),
    [
        (torch_like(8), {}, ValueError, "8 recurrent rows for 4 channels"),
        (torch_like(16, weight_hr_l0=np.zeros((2, 4))), {}, ValueError, "projections"),
        (torch_like(12), {"layer": 1}, ValueError, "weight_ih_l1 is missing"),
        (torch_like(12), {"reverse": True}, ValueError, "weight_ih_l0_reverse is missing"),
        (torch_like(12, bias_ih_l0=np.zeros(4)), {}, ValueError, r"must be \(12,\)"),
        (torch_like(12, bias_ih_l0=np.zeros(12, np.float32)), {}, TypeError, "one dtype"),
        ({**torch_like(12), "head_weight": np.zeros((2, 4))}, {}, ValueError, "prefix="),
        (torch_like(12), {"prefix": "rnn"}, ValueError, "below 'rnn'"),
        (torch_like(4), {"nonlinearity": "gelu"}, ValueError, "nonlinearity"),
        ({"a": np.zeros((3, 3))}, {}, ValueError, "PyTorch's, Flax's, Equinox's or Keras's"),
        ({"ir": {"kernel": np.zeros((3, 4))}}, {}, ValueError, "are not the parts of a Flax"),
        ([np.zeros((5, 12)), np.zeros((4, 12))], {}, ValueError, "reset_after"),
        ([np.zeros((5, 12)), np.zeros((4, 12)), np.zeros(12)], {"reset_after": True}, ValueError, r"\(12,\)"),
        ([np.zeros((5, 12)), np.zeros((4, 12)), np.zeros((2, 9))], {}, ValueError, "12 columns"),
        ([np.zeros((5, 12))], {}, ValueError, "3|entries"),
        (3, {}, TypeError, "int"),
        ({}, {}, ValueError, "no arrays"),
        ({"weight_ih": np.zeros((8, 5)), "weight_hh": np.zeros((8, 2)), "bias_n": np.zeros(2)}, {}, ValueError, "GRU"),
    ],
)
def test_what_does_not_fit_is_refused(weights, options, error, sentence):
    with pytest.raises(error, match=sentence):
        from_weights(weights, **options)


def test_from_weights_is_public():
    assert "from_weights" in pararnn.__all__ and "ResetFirstGRU" in pararnn.__all__
