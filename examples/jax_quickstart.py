"""A diagonal GRU trained with optax in JAX on a value it must remember for 500 steps."""

import jax
import jax.numpy as jnp
import optax

from pararnn import ParaGRU, newton_apply

STEPS, WIDTH = 500, 32


def batch(key):
    """A mark at a random early step; the class is the sign of the value that stands beside it."""
    where, value = jax.random.split(key)
    at = jax.random.randint(where, (32,), 0, STEPS // 4)
    values = jax.random.normal(value, (32, STEPS))
    marks = jax.nn.one_hot(at, STEPS)
    return jnp.stack([values * marks, marks], axis=2), jnp.take_along_axis(values, at[:, None], axis=1)[:, 0] > 0.0


def loss(model, x, label):
    cell, head = model
    score = newton_apply(cell, x)[:, -1] @ head
    return optax.sigmoid_binary_cross_entropy(score, label).mean()


cell = ParaGRU(2, WIDTH, seed=0, xp=jnp)
# Gates that are shut keep the state: a start that remembers.
cell = cell.replace(**{"W_x.bias": cell.W_x.bias.at[:WIDTH].set(-4.0)})
model = (cell, jnp.zeros(WIDTH))
optimiser = optax.adam(2e-2)
state = optimiser.init(model)


@jax.jit
def step(model, state, key):
    value, grads = jax.value_and_grad(loss)(model, *batch(key))
    updates, state = optimiser.update(grads, state)
    return optax.apply_updates(model, updates), state, value


for n, key in enumerate(jax.random.split(jax.random.key(0), 151)):
    model, state, value = step(model, state, key)
    if n % 50 == 0:
        print(f"step {n}: loss {value:.3f}")
