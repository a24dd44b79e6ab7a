"""The Pallas kernel, interpreted on the CPU: the same loop as lax.scan's, whichever program and direction."""

from __future__ import annotations

import numpy as np
import pytest

from pararnn import NewtonConfig, ParaGRU, ParaLSTM, ParaSLSTM, newton_apply, sequential_apply
from pararnn.problem import make_problem
from pararnn.programs import programs_of

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
engine_module = pytest.importorskip("pararnn_jax.engine")
kernels = pytest.importorskip("pararnn_jax.kernels")


def engines(cell):
    problem = make_problem("test", cell, jnp.zeros((1, 4, cell.d_in)))
    plain, kernel = engine_module.JaxEngine(problem), engine_module.JaxEngine(problem)
    kernel.kernels = "interpret"
    return plain, kernel


@pytest.mark.parametrize("kind", [ParaGRU, ParaLSTM])
@pytest.mark.parametrize(
    ("name", "reverse"),
    [("advance", False), ("advance_tangent", False), ("adjoint_map_step", True), ("back_propagate", True)],
)
def test_every_program_runs_as_the_scan_does(kind, name, reverse):
    cell = kind(2, 3, seed=0, xp=jnp)
    loop = getattr(programs_of(cell), name)
    rng = np.random.default_rng(0)

    def some(count, *shape):
        return [jnp.asarray(rng.normal(size=shape).astype("float32")) for _ in range(count)]

    operands = some(loop.carry, 6), some(loop.rows, 11, 6), some(loop.consts, 6)
    plain, kernel = (e.scan(loop, *operands, reverse=reverse, keep=cell.state_slots) for e in engines(cell))
    for mine, true in zip(jax.tree.leaves(vars(kernel)), jax.tree.leaves(vars(plain)), strict=True):
        np.testing.assert_allclose(mine, true, rtol=2e-5, atol=2e-6)


def test_a_whole_solve_and_its_derivatives_run_on_kernels(monkeypatch):
    """Under jit, vmap, grad and grad of grad."""
    monkeypatch.setattr(engine_module, "kernels_for", lambda platform: "interpret")
    cell = ParaGRU(2, 3, seed=0, xp=jnp)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 1, 29, 2)).astype("float32"))
    # Its own settings, so that no program compiled without kernels is taken.
    config = NewtonConfig(segment_len=7, max_passes=9)

    def penalty(apply, *more):
        inner = jax.grad(lambda x: jnp.sum(apply(cell, x, *more) ** 2))
        return jax.vmap(jax.value_and_grad(lambda x: jnp.sum(inner(x) ** 2)))(x)

    assert "pallas_call" in str(jax.make_jaxpr(lambda x: newton_apply(cell, x, config))(x[0]))
    for mine, true in zip(penalty(newton_apply, config), penalty(sequential_apply), strict=True):
        np.testing.assert_allclose(mine, true, rtol=2e-4, atol=2e-5)


def test_lanes_that_fill_no_warp_are_refused_in_a_sentence():
    loop = programs_of(ParaSLSTM(2, 3, seed=0)).advance
    assert "no multiple of 32" in kernels.refusal(loop, jnp.zeros(48 + 1))
    assert [kernels.lanes_per_block(n) for n in (32, 96, 640, 4096)] == [32, 32, 128, 128]


def test_a_step_that_pallas_cannot_lower_is_a_sentence_and_the_scan_runs():
    """On a CPU no kernel can be compiled, which is one reason among others."""
    if jax.default_backend() != "cpu":
        pytest.skip("there is a device that may compile it")
    cell = ParaGRU(2, 32, seed=0, xp=jnp)
    assert "Pallas cannot build" in kernels.refusal(programs_of(cell).advance, jnp.zeros(64))
    _, engine = engines(cell)
    engine.kernels = True
    loop = programs_of(cell).advance
    out = engine.scan(loop, [jnp.zeros(64)], [jnp.ones((3, 64))] * 3, [jnp.ones(64)] * 3, keep=1)
    assert out.kept[0].shape == (3, 64)
