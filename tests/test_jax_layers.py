"""The Flax nnx and Equinox layers: trained by optax as a byte model on real text, they learn what the loop learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pararnn import NewtonConfig, ParaGRU, ParaLSTM, newton_apply, sequential_apply

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
optax = pytest.importorskip("optax")

STEPS, BATCH, LENGTH, WIDTH = 40, 4, 65, 32
CONFIG = NewtonConfig(segment_len=16)


def batches():
    """Pieces of the project's own README as bytes (BATCH, LENGTH)."""
    text = np.frombuffer(Path(__file__).parents[1].joinpath("README.md").read_bytes(), np.uint8)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        begin = rng.integers(0, text.size - LENGTH, size=BATCH)
        yield jnp.asarray(np.stack([text[b : b + LENGTH] for b in begin]).astype(np.int32))


def small(rng, *shape):
    return jnp.asarray(rng.normal(size=shape).astype("float32") / np.sqrt(shape[0]))


def cross_entropy(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def expect_learned(losses):
    """From the uniform guess over 256 bytes (5.5 nats) to less than what byte frequencies alone soon give."""
    assert all(np.isfinite(losses)) and losses[0] > 5.0
    assert np.mean(losses[-5:]) < 3.6, losses


def test_equinox_trains_a_byte_model():
    eqx = pytest.importorskip("equinox")
    from pararnn_jax.equinox import RNN

    class Model(eqx.Module):
        table: jax.Array
        rnn: RNN
        head: jax.Array

        def __call__(self, tokens):
            return self.rnn(self.table[tokens]) @ self.head

    rng = np.random.default_rng(0)
    cell = ParaGRU(WIDTH, WIDTH, seed=0, xp=jnp)
    model = Model(small(rng, 256, WIDTH) * 16.0, RNN(cell, CONFIG), small(rng, WIDTH, 256))
    optimiser = optax.adam(2e-2)
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, tokens):
        loss, grads = eqx.filter_value_and_grad(lambda m: cross_entropy(m(tokens[:, :-1]), tokens[:, 1:]))(model)
        updates, state = optimiser.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for tokens in batches():
        model, state, loss = step(model, state, tokens)
        losses.append(float(loss))
    expect_learned(losses)
    x = model.table[tokens]
    np.testing.assert_allclose(model.rnn(x), sequential_apply(model.rnn.cell, x), atol=1e-4)


def test_flax_nnx_trains_a_byte_model():
    nnx = pytest.importorskip("flax.nnx")
    from pararnn_jax.nnx import RNN

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(256, WIDTH, rngs=rngs)
            self.rnn = RNN(ParaLSTM(WIDTH, WIDTH, seed=0, xp=jnp), CONFIG)
            self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

        def __call__(self, tokens):
            return self.head(self.rnn(4.0 * self.table(tokens)))

    model = Model(nnx.Rngs(0))
    optimiser = nnx.Optimizer(model, optax.adam(2e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimiser, tokens):
        loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(tokens[:, :-1]), tokens[:, 1:]))(model)
        optimiser.update(model, grads)
        return loss

    before = np.asarray(model.rnn.cell.W_x.weight)
    losses = [float(step(model, optimiser, tokens)) for tokens in batches()]
    expect_learned(losses)
    cell = model.rnn.cell
    assert np.abs(np.asarray(cell.W_x.weight) - before).max() > 1e-3
    x = jnp.ones((1, 9, WIDTH))
    np.testing.assert_array_equal(model.rnn(x), newton_apply(cell, x, CONFIG)[:, :, cell.hidden_slot])
