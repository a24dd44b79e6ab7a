"""Packing, resets and padding on JAX arrays: as NumPy's, under jit and grad, with offsets that are traced."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from pararnn import NewtonConfig, ParaGRU, ParaLSTM, ParaSLSTM, StockGRU, newton_apply, newton_vjp, sequential_apply  # noqa: E402
from support import problem, start_for  # noqa: E402

CU = [0, 0, 13, 13, 40, 61, 61]


def packed(kind):
    cell, x = problem(kind, CU[-1], batch=1)
    return cell, x, start_for(cell, len(CU) - 1)


def close(got, wanted, atol=2e-5):
    np.testing.assert_allclose(np.asarray(got), wanted, atol=atol * max(1.0, float(np.abs(wanted).max())))


@pytest.mark.parametrize(
    ("kind", "config"),
    [(ParaGRU, None), (ParaLSTM, NewtonConfig(segment_len=8, chunk_len=40)), (ParaSLSTM, None)],
)
def test_states_and_gradients_under_jit(kind, config):
    """P43 and case O51: jit(grad) with traced offsets and masks equals NumPy."""
    cell, x, h0 = packed(kind)
    mine, rng = cell.to(jnp), np.random.default_rng(1)
    reset, mask = rng.random((1, CU[-1])) < 0.1, rng.random((1, CU[-1])) < 0.8
    told = {"reset": reset, "mask": mask}
    states, pullback = newton_vjp(cell, x, NewtonConfig(scan_backend="numpy"), h0, cu_seqlens=CU, **told)
    g = rng.standard_normal(states.shape).astype(np.float32)
    wanted = pullback(g)
    traced = {name: jnp.asarray(a) for name, a in told.items()}

    def run(cell, x, h0, offsets, told, g=g):
        states = newton_apply(cell, x, config, h0=h0, cu_seqlens=offsets, **told)
        return (states * g).sum(), states

    both = jax.jit(jax.grad(run, argnums=(0, 1, 2), has_aux=True))
    (d_cell, d_x, d_h0), got = both(mine, x, h0, jnp.asarray(CU, dtype=jnp.int32), traced)
    close(got, states)
    close(d_x, wanted.x)
    close(d_h0, wanted.h0)
    for name, value in wanted.params.items():
        close(d_cell.arrays[name], value)
    loop = sequential_apply(mine, jnp.asarray(x), jnp.asarray(h0), cu_seqlens=jnp.asarray(CU), **traced)
    close(loop, states)


def test_no_bit_of_a_document_depends_on_its_neighbours():
    cell, x, h0 = packed(ParaLSTM)
    mine = cell.to(jnp)
    for config in (NewtonConfig(segment_len=8),):

        @jax.jit
        def run(x, g, config=config):
            states, pull = jax.vjp(lambda x: newton_apply(mine, x, config, h0=jnp.asarray(h0), cu_seqlens=CU), x)
            return states, pull(g)[0]

        g = np.random.default_rng(0).standard_normal((1, CU[-1], *cell.state_shape)).astype(np.float32)
        bad, bad_g = x.copy(), g.copy()
        for span in (slice(0, 13), slice(40, 61)):
            bad[:, span], bad_g[:, span] = np.nan, np.nan
        (states, d_x), (again, found) = run(x, g), run(bad, bad_g)
        np.testing.assert_array_equal(again[:, 13:40], states[:, 13:40])
        np.testing.assert_array_equal(found[:, 13:40], d_x[:, 13:40])


def test_what_cannot_be_traced_says_so():
    cell, x, _ = packed(ParaGRU)
    mine = cell.to(jnp)
    pinned = NewtonConfig(max_iters=3, segment_len=1)
    with pytest.raises(TypeError, match="pin an iteration count on every time step of packed sequences"):
        jax.jit(lambda x: newton_apply(mine, x, pinned, cu_seqlens=CU))(x)
    stock = StockGRU(3, 5, seed=0, xp=jnp)
    with pytest.raises(TypeError, match="under JAX's transformations only the backend 'jax' runs"):
        jax.jit(lambda x: newton_apply(stock, x, cu_seqlens=CU))(x)
    # Outside of a transformation both run.
    assert newton_apply(stock, jnp.asarray(x), cu_seqlens=CU).shape == (1, 61, 5)
    assert newton_apply(mine, jnp.asarray(x), pinned, cu_seqlens=CU).shape == (1, 61, 5)
