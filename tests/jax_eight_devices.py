"""Run by test_jax_sharding.py in a process of its own, with eight virtual CPU devices; prints what it has shown."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pararnn import ChannelwiseCell, NewtonConfig, ParaGRU, ParaLSTM, newton_apply, sequential_apply
from pararnn_jax import newton_apply_over_time

DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES), ("time",))


class Chaotic(ChannelwiseCell):
    slots, gates, params = ("h",), ("u",), ("a",)

    def step(self, xp, h, u, a):
        return (xp.sin(9.0 * h + u) + 0.0 * a,)


def given(kind, steps, batch=2, width=4):
    cell = kind(2, width, seed=0, xp=jnp)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(batch, steps, 2)).astype("float32"))
    return cell, x, 0.1 * jnp.ones((batch, *cell.state_shape))


def near(mine, true, tol):
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(true), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tol * max(np.abs(b).max(), 1e-30), (np.abs(a - b).max(), np.abs(b).max())


def loss(apply, **options):
    def run(cell, x, h0):
        states = apply(cell, x, h0=h0, **options)
        return jnp.sum(jnp.sin(2.0 * states)), states

    return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))


def over_time(kind, config):
    cell, x, h0 = given(kind, 8 * 15)
    there = jax.device_put(x, NamedSharding(MESH, PartitionSpec(None, "time")))
    (value, states), grads = loss(newton_apply_over_time, mesh=MESH, config=config)(cell, there, h0)
    (truth, loop), true_grads = loss(sequential_apply)(cell, x, h0)
    near((value, states), (truth, loop), 1e-5)
    near(grads, true_grads, 5e-5)
    assert states.sharding.spec == PartitionSpec(None, "time") == grads[1].sharding.spec
    print("over time:", kind.__name__, config.segment_len)


def chaos():
    cell, x, h0 = given(Chaotic, 8 * 10)
    states = newton_apply_over_time(cell, x, mesh=MESH, h0=h0)
    near(states, sequential_apply(cell, x, h0), 1e-4)
    print("chaos is walked across devices")


def memory():
    """What a device needs for the gradient falls as one over their number."""
    cell, x, _ = given(ParaGRU, 8 * 1024, width=32)

    def bytes_on(count):
        mesh = Mesh(np.array(DEVICES[:count]), ("time",))
        here = NamedSharding(mesh, PartitionSpec(None, "time"))

        def run(cell, x):
            return jnp.sum(newton_apply_over_time(cell, x, NewtonConfig(segment_len=64), mesh=mesh) ** 2)

        compiled = jax.jit(jax.grad(run), in_shardings=(NamedSharding(mesh, PartitionSpec()), here)).lower(cell, x)
        return compiled.compile().memory_analysis().temp_size_in_bytes

    two, eight = bytes_on(2), bytes_on(8)
    assert eight < two / 3.0, (two, eight)
    print("memory per device falls:", two, eight)


def batch_and_channels():
    """Batch and channels by placing the arrays: the compiler does the rest, and outside of jit it is the same."""
    mesh = Mesh(np.array(DEVICES).reshape(2, 4), ("data", "model"))
    cell, x, h0 = given(ParaGRU, 40, batch=4, width=8)

    def put(a, *spec):
        return jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))

    there = cell.replace(**{n: put(a, "model") for n, a in cell.arrays.items()})
    config = NewtonConfig(segment_len=8)
    (value, states), grads = loss(newton_apply, config=config)(there, put(x, "data"), put(h0, "data", "model"))
    (truth, loop), true_grads = loss(sequential_apply)(cell, x, h0)
    near((value, states), (truth, loop), 1e-5)
    near(grads, true_grads, 5e-5)
    near(newton_apply(there, put(x, "data"), config, h0=put(h0, "data", "model")), loop, 1e-5)
    print("batch and channels")


def refusals():
    cell, x, _ = given(ParaGRU, 8 * 10)
    for wrong, options, words in (
        (ValueError, {"x": x[:, :79]}, "multiple of the 8 devices"),
        (ValueError, {"config": NewtonConfig(segment_len=4)}, "must divide the 10 steps"),
        (TypeError, {"axis": "space"}, "none named 'space'"),
        (TypeError, {"config": NewtonConfig(max_iters=3)}, "cannot be followed across devices"),
    ):
        try:
            newton_apply_over_time(cell, **{"x": x, "mesh": MESH, **options})
        except wrong as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
    print("refusals")


if __name__ == "__main__":
    assert len(DEVICES) == 8
    refusals()
    over_time(ParaGRU, NewtonConfig(segment_len=5))
    over_time(ParaLSTM, NewtonConfig())
    chaos()
    memory()
    batch_and_channels()
