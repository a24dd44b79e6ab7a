"""JAX: one pure function under every transformation, equal to the time loop, with the loop's gradient."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pararnn import (
    ChannelwiseCell,
    NewtonConfig,
    NewtonStats,
    ParaGRU,
    ParaLSTM,
    ParaSLSTM,
    ParaTanh,
    StockGRU,
    explain,
    newton_apply,
    newton_vjp,
    sequential_apply,
)

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

TIME = 45
SEGMENTS = NewtonConfig(segment_len=16)


def given(kind=ParaGRU, steps=TIME, batch=2, width=3, scale=1.0, **options):
    cell = kind(2, width, seed=0, xp=jnp, **options)
    x = np.random.default_rng(1).normal(size=(batch, steps, 2)).astype("float32") * scale
    return cell, jnp.asarray(x)


def gap(mine, true):
    """The largest difference of any leaf, relative to the leaf's size."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(true), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst = max(worst, float(np.abs(a - b).max()) / max(float(np.abs(b).max()), 1e-30))
    return worst


def loss(apply, *options):
    return lambda cell, x: jnp.sum(jnp.sin(3.0 * apply(cell, x, *options)))


@pytest.mark.parametrize("kind", [ParaGRU, ParaLSTM, ParaSLSTM, ParaTanh])
def test_a_jitted_solve_and_its_gradient_are_the_time_loops(kind):
    """P01 P02: states and gradients of segments, compiled, against a scan that JAX itself differentiates."""
    cell, x = given(kind)
    value = jax.jit(jax.value_and_grad(loss(newton_apply, SEGMENTS), argnums=(0, 1)))(cell, x)
    truth = jax.value_and_grad(loss(sequential_apply), argnums=(0, 1))(cell, x)
    # In log coordinates sLSTM agrees to the public tolerance, elsewhere to the solver's.
    assert gap(value, truth) < (1e-4 if kind is ParaSLSTM else 2e-5)


def test_the_gradient_is_newton_vjps_and_reaches_the_start():
    cell, x = given(ParaLSTM)
    h0 = 0.3 * jnp.ones((2, 2, 3))
    states, back = jax.vjp(lambda c, x, h: newton_apply(c, x, SEGMENTS, h0=h), cell, x, h0)
    cotangent = jnp.cos(states)
    cell_grad, x_grad, h0_grad = back(cotangent)
    _, pullback = newton_vjp(cell, x, h0=h0)
    truth = pullback(cotangent)
    assert gap([cell_grad.arrays, x_grad, h0_grad], [truth.params, truth.x, truth.h0]) < 2e-5


@pytest.mark.parametrize("options", [{}, {"segment_len": 16}], ids=["loop", "segments"])
def test_vmap_over_inputs_and_parameters(options):
    """Every member of an ensemble takes its own passes: one of them latches, which must not change the others."""
    config = NewtonConfig(**options)
    cell, x = given(max_recurrent_norm=None)
    cells = jax.tree.map(lambda a: jnp.stack([a, 2.0 * a, 9.0 * a]), cell)
    xs = jnp.stack([x, -x, 3.0 * x])
    run = jax.vmap(jax.value_and_grad(loss(newton_apply, config), argnums=(0, 1)))
    one_by_one = [
        jax.value_and_grad(loss(sequential_apply), argnums=(0, 1))(jax.tree.map(lambda a, n=n: a[n], cells), xs[n])
        for n in range(3)
    ]
    truth = jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one)
    assert gap(run(cells, xs), truth) < 1e-4


def test_what_does_not_settle_is_finished_by_the_loop_inside_the_program():
    """P03: a chaotic cell on segments, under jit; the result is the loop's, and stats say so outside of jit."""

    class Chaotic(ChannelwiseCell):
        slots, gates, params = ("h",), ("u",), ("a",)

        def step(self, xp, h, u, a):
            return (xp.sin(9.0 * h + u) + 0.0 * a,)

    cell, x = given(Chaotic, steps=200)
    config = NewtonConfig(segment_len=20)
    truth = sequential_apply(cell, x)
    stats = NewtonStats()
    np.testing.assert_array_equal(newton_apply(cell, x, config, stats=stats), truth)
    np.testing.assert_array_equal(jax.jit(lambda c, x: newton_apply(c, x, config))(cell, x), truth)
    assert stats.walked > 0.0 and stats.converged and "walked" in stats.reason


def test_exact_accepts_joints_that_match_bit_for_bit_only():
    cell, x = given(scale=3.0, max_recurrent_norm=None)
    cell = cell.replace(a_z=4.0 * cell.a_z, a_n=4.0 * cell.a_n)
    stats = NewtonStats()
    states = newton_apply(cell, x, NewtonConfig(segment_len=8, exact=True), stats=stats)
    # Up to the bits that XLA gives a function at another place of a vector.
    np.testing.assert_allclose(states, newton_apply(cell, x, NewtonConfig(segment_len=TIME)), atol=1e-6)
    assert stats.agreement_estimate <= 4.0 * 2.0**-23


@pytest.mark.parametrize("options", [{"chunk_len": 13}, {"chunk_len": 20, "segment_len": 5}], ids=["loop", "segments"])
def test_chunks_carry_the_state(options):
    """P12: windows one after the other are a scan, and give what one window gives."""
    cell, x = given(ParaSLSTM)
    states = jax.jit(lambda c, x: newton_apply(c, x, NewtonConfig(**options)))(cell, x)
    np.testing.assert_allclose(states, sequential_apply(cell, x), atol=1e-4, rtol=1e-4)


def test_splitting_a_sequence():
    cell, x = given(ParaLSTM)
    whole = newton_apply(cell, x)
    first = newton_apply(cell, x[:, :17])
    second = newton_apply(cell, x[:, 17:], h0=first[:, -1])
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"segment_len": 16}], ids=["loop", "segments"])
def test_second_derivatives_are_right(options):
    """O10: a gradient penalty, reverse over reverse."""
    cell, x = given(steps=20)

    def penalty(apply, *more):
        inner = jax.grad(lambda x: jnp.sum(apply(cell, x, *more) ** 2))
        return jax.grad(lambda x: jnp.sum(inner(x) ** 2))(x)

    assert gap(penalty(newton_apply, NewtonConfig(**options)), penalty(sequential_apply)) < 1e-5


def test_forward_mode_is_refused_by_the_solve_and_right_on_the_loop():
    cell, x = given(steps=9)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: newton_apply(cell, x), (x,), (x,))
    _, tangent = jax.jvp(lambda x: sequential_apply(cell, x), (x,), (jnp.ones_like(x),))
    step = 1e-2
    ends = [sequential_apply(cell, x + s * step) for s in (1.0, -1.0)]
    np.testing.assert_allclose(tangent, (ends[0] - ends[1]) / (2.0 * step), atol=1e-3)


def test_checkify_eval_shape_donation_and_a_scan_over_layers():
    checkify = pytest.importorskip("jax.experimental.checkify")
    cell, x = given()

    def apply(cell, x):
        return newton_apply(cell, x, SEGMENTS)

    truth = sequential_apply(cell, x)
    assert jax.eval_shape(apply, cell, x).shape == truth.shape
    error, states = jax.jit(checkify.checkify(apply, errors=checkify.float_checks))(cell, x)
    assert error.get() is None
    np.testing.assert_allclose(states, truth, atol=1e-5)
    square, start = given(width=2)
    donated = jax.jit(apply, donate_argnums=1)(square, start + 0.0)
    np.testing.assert_allclose(donated, sequential_apply(square, start), atol=1e-5)
    layers = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a, -a]), square)
    deep, _ = jax.lax.scan(lambda h, layer: (apply(layer, h), None), start, layers)
    by_hand = start
    for n in range(3):
        by_hand = sequential_apply(jax.tree.map(lambda a, n=n: a[n], layers), by_hand)
    np.testing.assert_allclose(deep, by_hand, atol=1e-5)


def test_a_cell_is_a_pytree_that_keeps_its_options():
    cell, _ = given(ParaSLSTM, eps=1e-4, max_recurrent_norm=0.25)
    leaves, structure = jax.tree.flatten(cell)
    again = jax.tree.unflatten(structure, leaves)
    assert again.eps == 1e-4 and again.max_recurrent_norm == 0.25 and type(again) is ParaSLSTM
    assert structure == jax.tree.structure(jax.tree.map(lambda a: 2.0 * a, cell))
    assert structure != jax.tree.structure(cell.replace(max_recurrent_norm=None))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(cell)]
    assert ".R" in paths
    assert "no arrays" in repr(jax.tree.map(jnp.shape, cell))


def test_classes_defined_later_are_pytrees_too():
    """A user's class, and a NumPy cell converted or unpickled, need no registration by hand."""

    class Mine(ParaTanh):
        pass

    moved = Mine(2, 3, seed=0).to(jnp)
    doubled = jax.jit(lambda c: jax.tree.map(lambda a: 2.0 * a, c))(moved)
    assert type(doubled) is Mine
    np.testing.assert_array_equal(doubled.a, 2.0 * moved.a)


def test_half_precision_is_computed_in_float32():
    """P41"""
    cell, x = given()
    half, rough = cell.to(dtype=jnp.bfloat16), x.astype(jnp.bfloat16)
    states, grad = jax.value_and_grad(lambda x: newton_apply(half, x, SEGMENTS).astype(jnp.float32).sum())(rough)
    assert grad.dtype == jnp.bfloat16
    wide = half.to(dtype=jnp.float32)
    truth = sequential_apply(wide, rough.astype(jnp.float32))
    np.testing.assert_allclose(
        newton_apply(half, rough).astype(jnp.float32), truth.astype(jnp.bfloat16).astype(jnp.float32)
    )
    assert abs(float(states) - float(truth.sum())) < 2.0


def test_tokens_upstream_and_weak_types():
    """The gradient reaches an embedding under integer tokens; a weakly typed input is a float like any other."""
    cell, _ = given()
    table, tokens = jnp.linspace(-1.0, 1.0, 10).reshape(5, 2), jnp.asarray([[0, 3, 1, 4, 4, 2]])
    slope = jax.grad(lambda t: jnp.sum(newton_apply(cell, t[tokens]) ** 2))(table)
    assert gap(slope, jax.grad(lambda t: jnp.sum(sequential_apply(cell, t[tokens]) ** 2))(table)) < 1e-5
    weak = jax.jit(lambda s: newton_apply(cell, jnp.broadcast_to(s, (1, 4, 2))))(1.0)
    np.testing.assert_allclose(weak, sequential_apply(cell, jnp.ones((1, 4, 2))), atol=1e-6)
    with pytest.raises(TypeError, match="must be floating"):
        jax.jit(lambda t: newton_apply(cell, t))(jnp.zeros((1, 4, 2), int))


def test_a_traced_call_refuses_what_it_cannot_do():
    cell, x = given()
    with pytest.raises(TypeError, match="no values to fill stats"):
        jax.jit(lambda x: newton_apply(cell, x, stats=NewtonStats()))(x)
    with pytest.raises(TypeError, match="only the backend 'jax' runs"):
        jax.jit(lambda x: newton_apply(cell, x, NewtonConfig(scan_backend="array")))(x)


def test_newton_vjp_may_be_traced_but_its_stats_have_no_values():
    cell, x = given()
    stats = NewtonStats()
    run = jax.jit(lambda x: newton_vjp(cell, x, SEGMENTS, stats=stats)[1](jnp.ones((2, TIME, 3))).x)
    assert gap(run(x), jax.grad(lambda x: jnp.sum(sequential_apply(cell, x)))(x)) < 1e-5
    with pytest.raises(TypeError, match="part of a traced JAX program"):
        _ = stats.converged


def test_a_pinned_solve_that_fails_under_jit_is_no_number():
    """O07: where an error cannot be raised, the result must not look like one."""
    cell, x = given(max_recurrent_norm=None)
    cell = cell.replace(**{n: 30.0 * cell.arrays[n] for n in ("a_z", "a_r", "a_n")})
    config = NewtonConfig(max_iters=1, residual_fail=1e-6)
    assert bool(jnp.all(jnp.isnan(jax.jit(lambda x: newton_apply(cell, x, config))(x))))
    enough = NewtonConfig(max_iters=TIME, residual_atol=None)
    np.testing.assert_allclose(
        jax.jit(lambda x: newton_apply(cell, x, enough))(x), sequential_apply(cell, x), atol=1e-5
    )


def test_nan_goes_where_the_loop_takes_it():
    """O08"""
    cell, x = given()
    x = x.at[0, 20, 0].set(jnp.nan)
    states = jax.jit(lambda x: newton_apply(cell, x, SEGMENTS))(x)
    truth = sequential_apply(cell, x)
    np.testing.assert_array_equal(jnp.isnan(states), jnp.isnan(truth))
    np.testing.assert_allclose(states[0, :20], truth[0, :20], atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 5, 2), (2, 0, 2)])
def test_empty_problems_have_empty_gradients(shape):
    cell, _ = given()
    x = jnp.zeros(shape)
    slope, x_slope = jax.jit(jax.grad(loss(newton_apply), argnums=(0, 1)))(cell, x)
    assert x_slope.shape == shape and all(not np.any(a) for a in jax.tree.leaves(slope))


def test_float64_under_x64():
    with jax.enable_x64(True):
        cell = ParaGRU(2, 3, seed=0, xp=jnp, dtype=jnp.float64)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(1, TIME, 2)))
        value = jax.jit(jax.value_and_grad(loss(newton_apply, SEGMENTS), argnums=(0, 1)))(cell, x)
        assert value[0].dtype == jnp.float64
        assert gap(value, jax.value_and_grad(loss(sequential_apply), argnums=(0, 1))(cell, x)) < 1e-10


def test_the_program_does_not_grow_with_time():
    """O11: no loop over T is unrolled, forward or backward, whichever path is taken."""
    cell = ParaGRU(2, 3, seed=0, xp=jnp)

    def size(steps, config):
        slope = jax.grad(loss(newton_apply, config))
        return len(str(jax.make_jaxpr(slope)(cell, jnp.zeros((1, steps, 2)))))

    # Lengths that both leave some steps over, which are a segment of their own.
    for config in (NewtonConfig(segment_len=128), NewtonConfig(chunk_len=500, segment_len=128)):
        assert size(50_030, config) < 1.1 * size(1_130, config)
    assert size(50_000, NewtonConfig(segment_len=50_000)) < 1.2 * size(1_024, NewtonConfig(segment_len=1_024))


@pytest.mark.slow
def test_compile_time_does_not_grow_with_time():
    """O11: forward and gradient at T = 50,000 within twice T = 1,024."""
    cell = ParaGRU(2, 8, seed=0, xp=jnp)

    def seconds(steps):
        run = jax.jit(jax.value_and_grad(loss(newton_apply)))
        lowered = run.lower(cell, jnp.zeros((1, steps, 2)))
        begin = time.perf_counter()
        lowered.compile()
        return time.perf_counter() - begin

    seconds(512)
    assert min(seconds(50_000) for _ in range(2)) < 2.0 * max(seconds(1_024) for _ in range(2))


def test_the_loop_of_a_mixing_cell_is_one_scan():
    """Its program has the same size at every length; states and gradients are NumPy's and newton_vjp's."""
    cell = StockGRU(2, 3, seed=0)
    x = np.random.default_rng(0).normal(size=(2, 7, 2)).astype("float32")
    there, given = cell.to(jnp), jnp.asarray(x)
    run = jax.jit(jax.value_and_grad(loss(sequential_apply), argnums=(0, 1)))
    value, (cell_grad, x_grad) = run(there, given)
    states, pullback = newton_vjp(cell, x)
    truth = pullback(3.0 * np.cos(3.0 * states))
    assert gap(value, np.sin(3.0 * states).sum()) < 1e-5
    assert gap([cell_grad.arrays, x_grad], [truth.params, truth.x]) < 1e-4
    sizes = [len(str(jax.make_jaxpr(sequential_apply)(there, jnp.zeros((1, t, 2))))) for t in (1_000, 100_000)]
    assert sizes[1] < 1.1 * sizes[0]
    with pytest.raises(TypeError, match="multiplies by a matrix"):
        jax.jit(newton_apply)(there, given)


def test_explain_names_the_backend_and_pays_for_nothing():
    cell, x = given()
    found = explain(cell, x)
    assert found.backend == "jax" and found.path == "sequential"
