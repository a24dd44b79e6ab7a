"""Linear attention: every form, library and gradient equals the loop over time, at any decay (P60–P64)."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from pararnn.linear_attention import (
    gla,
    gla_vjp,
    linear_attention,
    mamba2,
    retention,
    rwkv6,
    rwkv6_vjp,
    rwkv7,
    rwkv7_vjp,
    scores,
    states,
    windows,
)

INF = float("inf")
VJP = {gla: gla_vjp, rwkv6: rwkv6_vjp, rwkv7: rwkv7_vjp}
KINDS = list(VJP)
NAMES = {
    gla: ("q", "k", "v", "log_decay"),
    rwkv6: ("r", "k", "v", "log_decay", "u"),
    rwkv7: ("r", "w", "k", "v", "a", "b"),
}
FORMS = {
    "chunk": {"form": "chunk", "chunk": 16},
    "blocks": {"form": "chunk", "chunk": 32, "subchunk": 2},
    "subchunk": {"form": "subchunk", "chunk": 32, "subchunk": 8},
    "one level": {"form": "subchunk", "chunk": 16, "subchunk": 16},
    "long": {"form": "chunk", "chunk": 128},
}


def inputs(kind, time, *, batch=2, heads=3, keys=5, values=7, decay="mild", seed=0, dtype=np.float64):
    """The arguments of `kind` by position, and an initial state."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal((batch, time, heads, *shape))

    g = -0.3 * np.abs(normal(keys))
    if decay == "mixed":  # from exactly one to exactly zero in one head
        g = np.where(rng.random(g.shape) < 0.2, -(10.0 ** rng.uniform(0, 4, g.shape)), g)
        g = np.where(rng.random(g.shape) < 0.1, -INF, g)
        g = np.where(rng.random(g.shape) < 0.1, 0.0, g)
    elif not isinstance(decay, str):
        g = np.full_like(g, decay)
    q, k, v = normal(keys), normal(keys), normal(values)
    if kind is rwkv7:
        a = normal(keys)
        a /= np.linalg.norm(a, axis=-1, keepdims=True)
        args = (q, g, k, v, -a, a * rng.uniform(0, 1, a.shape))
    else:
        args = (q, k, v, g) if kind is gla else (q, k, v, g, rng.standard_normal((heads, keys)))
    state = rng.standard_normal((batch, heads, keys, values))
    return tuple(x.astype(dtype) for x in args), state.astype(dtype)


def oracle(kind, args, state, given, last, **options):
    """Outputs, final state and all gradients of the loop over time, by torch's autograd in float64."""
    torch = pytest.importorskip("torch")
    leaves = [torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in (*args, state)]
    out, final = kind(*leaves[:-1], initial_state=leaves[-1], output_final_state=True, form="recurrent", **options)
    loss = (out * torch.tensor(given)).sum() + (final * torch.tensor(last)).sum()
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    names = (*NAMES[kind], "initial_state")
    return out.detach().numpy(), final.detach().numpy(), dict(zip(names, (g.numpy() for g in grads), strict=True))


def cotangents(kind, args, state, seed=9):
    rng = np.random.default_rng(seed)
    values = state.shape[-1]
    return rng.standard_normal((*args[0].shape[:-1], values)), rng.standard_normal(state.shape)


def gap(got, wanted):
    """The largest difference relative to the largest value that float32 holds; both must be finite."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape and np.isfinite(got).all() and np.isfinite(wanted).all()
    return float(np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-30)) if got.size else 0.0


def check(kind, args, state, tolerance, options, wanted=None, **shared):
    """Outputs, state and hand-written gradients of one form against the oracle."""
    given, last = cotangents(kind, args, state)
    out, final, grads = wanted or oracle(kind, args, state, given, last, **shared)
    (got, end), pullback = VJP[kind](*args, initial_state=state, output_final_state=True, **options, **shared)
    assert gap(got, out) < tolerance and gap(end, final) < tolerance
    found = pullback(given.astype(got.dtype), last=last.astype(end.dtype))
    assert sorted(found) == sorted(grads)
    for name in grads:
        assert gap(found[name], grads[name]) < tolerance, name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", ["mild", "mixed"])
def test_every_form_equals_the_loop_with_all_gradients(kind, form, decay):
    """P61, P62, P64: K ≠ V, neither a power of two, T no multiple of the chunk; the adjoint is exact."""
    args, state = inputs(kind, 45, decay=decay)
    check(kind, args, state, 1e-12, FORMS[form])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("time", [0, 1, 2, 3, 15, 16, 17, 63, 65, 100])
def test_any_length_and_its_final_state(kind, time):
    """The tail chunk's state is the loop's for every T, also shorter than a chunk, also empty."""
    args, state = inputs(kind, time, heads=1)
    check(kind, args, state, 1e-12, {"form": "chunk", "chunk": 16})
    out, final = kind(*args, initial_state=state, output_final_state=True)
    assert out.shape == (2, time, 1, 7) and final.shape == state.shape


@pytest.mark.parametrize("kind", KINDS)
def test_no_batch_and_no_state(kind):
    args, _ = inputs(kind, 20, batch=0, heads=2)
    for form in ("recurrent", "chunk", "subchunk"):
        out, final = kind(*args, form=form, output_final_state=True)
        assert out.shape == (0, 20, 2, 7) and final.shape == (0, 2, 5, 7)
    args, _ = inputs(kind, 20, heads=2)
    out, final = kind(*args)
    assert final is None and gap(out, kind(*args, form="recurrent")[0]) < 1e-13


@pytest.mark.parametrize("kind", [gla, rwkv6])
def test_every_pair_of_chunk_and_subchunk_has_one_gradient(kind):
    for time, heads in ((40, 1), (200, 1)):
        args, state = inputs(kind, time, batch=1, heads=heads, decay="mixed")
        wanted = oracle(kind, args, state, *cotangents(kind, args, state))
        for chunk, subchunk in itertools.product((16, 32, 64, 128, 256), (16, 64, 256)):
            options = {"form": "subchunk", "chunk": chunk, "subchunk": subchunk}
            if subchunk > chunk:
                with pytest.raises(ValueError, match="must not exceed"):
                    kind(*args, **options)
            else:
                check(kind, args, state, 1e-12, options, wanted)
    for wrong in (12, 0, 1.0, True):
        with pytest.raises(ValueError, match="power of two"):
            kind(*args, chunk=wrong)


STEADY = [0.0, -0.0, -1e-30, -0.01, -1.0, -2.5, -3.0, -5.0, -10.0, -50.0, -200.0, -1e4, -1e30, -INF, "mixed"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", STEADY)
def test_float32_is_stable_at_any_decay(kind, decay):
    """P62, P63: agreement 1e-5 with the float64 loop in outputs, state and every gradient, nothing clamped."""
    args, state = inputs(kind, 150, batch=1, heads=2, decay=decay, dtype=np.float32, seed=3)
    for options in ({"form": "chunk"}, {"form": "subchunk", "chunk": 128, "subchunk": 16}):
        with np.errstate(all="raise"):
            check(kind, args, state, 1e-5, options)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_stored_in_half_and_computed_in_float32(kind):
    torch = pytest.importorskip("torch")
    for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        args, state = inputs(kind, 100, batch=1, heads=2, decay="mixed", seed=4)
        half = [torch.tensor(x).to(dtype).requires_grad_() for x in args]
        start = torch.tensor(state, dtype=torch.float32, requires_grad=True)
        given, last = cotangents(kind, args, state)
        given = torch.tensor(given).to(dtype)
        wanted = oracle(kind, [x.detach().double().numpy() for x in half], start.detach().numpy(),
                        given.double().numpy(), last)  # fmt: skip
        for form in ("recurrent", "chunk", "subchunk"):
            out, final = kind(*half, initial_state=start, output_final_state=True, form=form)
            assert out.dtype == dtype and final.dtype == torch.float32
            assert gap(out.detach().double(), wanted[0]) < tolerance
            assert gap(final.detach().double(), wanted[1]) < 1e-5
            loss = (out * given).sum(dtype=torch.float32) + (final * torch.tensor(last, dtype=torch.float32)).sum()
            for name, got in zip(wanted[2], torch.autograd.grad(loss, [*half, start]), strict=True):
                assert gap(got.double(), wanted[2][name]) < tolerance, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["recurrent", "chunk", "subchunk"])
def test_torch_differentiates_every_form(kind, form):
    """Reverse mode without a NaN at decays of exactly zero, and second derivatives."""
    torch = pytest.importorskip("torch")
    args, state = inputs(kind, 21, decay="mixed")
    given, last = cotangents(kind, args, state)
    out, final, grads = oracle(kind, args, state, given, last)
    leaves = [torch.tensor(x, requires_grad=True) for x in (*args, state)]
    got, end = kind(*leaves[:-1], initial_state=leaves[-1], output_final_state=True, form=form, chunk=8)
    found = torch.autograd.grad((got * torch.tensor(given)).sum() + (end * torch.tensor(last)).sum(), leaves)
    assert gap(got.detach(), out) < 1e-12 and gap(end.detach(), final) < 1e-12
    for (name, wanted), g in zip(grads.items(), found, strict=True):
        assert gap(g, wanted) < 1e-12, name
    small, start = inputs(kind, 5, batch=1, heads=1, keys=2, values=2)
    leaves = [torch.tensor(x, requires_grad=True) for x in (*small, start)]
    run = lambda *x: kind(*x[:-1], initial_state=x[-1], form=form, chunk=4)[0]  # noqa: E731
    if form != "recurrent":
        torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["recurrent", "chunk", "subchunk"])
def test_jax_under_jit_with_gradients(kind, form):
    """P60: no data-dependent Python, one compiled function, gradients finite at decays of exactly zero."""
    jax = pytest.importorskip("jax")
    time = 5 if form == "recurrent" else 21  # a compiled loop is unrolled
    args, state = inputs(kind, time, batch=1, heads=2, decay="mixed", dtype=np.float32)
    given, last = (x.astype(np.float32) for x in cotangents(kind, args, state))
    out, final, grads = oracle(kind, args, state, given.astype(np.float64), last.astype(np.float64))

    def loss(*x):
        got, end = kind(*x[:-1], initial_state=x[-1], output_final_state=True, form=form, chunk=8)
        return (got * given).sum() + (end * last).sum(), (got, end)

    numbers = tuple(range(len(args) + 1))
    found, (got, end) = jax.jit(jax.grad(loss, argnums=numbers, has_aux=True))(*map(jax.numpy.asarray, (*args, state)))
    assert gap(got, out) < 1e-5 and gap(end, final) < 1e-5
    for (name, wanted), g in zip(grads.items(), found, strict=True):
        assert gap(g, wanted) < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
def test_array_api_strict_has_the_same_numbers(kind):
    xp = pytest.importorskip("array_api_strict")
    args, state = inputs(kind, 37, decay="mixed")
    offsets = [0, 5, 5, 37]
    for options in ({}, {"cu_seqlens": offsets}):
        if options:
            args, state = tuple(x[:1] if x.ndim == 4 else x for x in args), np.concatenate([state, state])[:3]
        given, last = cotangents(kind, args, state)
        for form in ("recurrent", "chunk", "subchunk"):
            pairs = []
            for ns in (np, xp):
                (o, s), pullback = VJP[kind](
                    *(ns.asarray(x) for x in args), initial_state=ns.asarray(state), output_final_state=True,
                    form=form, chunk=8, **options,
                )  # fmt: skip
                grads = pullback(ns.asarray(given), last=ns.asarray(last))
                assert all(type(x) is type(ns.asarray(0.0)) or ns is np for x in (o, s, *grads.values()))
                pairs.append([np.asarray(x) for x in (o, s, *grads.values())])
            for a, b in zip(*pairs, strict=True):
                assert gap(a, b) < 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_each_run_alone(kind):
    """P43: states, gradients, empty sequences; what one sequence holds, a NaN even, never reaches another."""
    offsets = [0, 7, 7, 30, 31, 60, 60]
    args, _ = inputs(kind, 60, batch=1)
    state = np.random.default_rng(5).standard_normal((6, 3, 5, 7))
    for form in ("chunk", "subchunk"):
        check(kind, args, state, 1e-12, {"form": form, "chunk": 8}, cu_seqlens=np.asarray(offsets))
    whole, final = kind(*args, initial_state=state, output_final_state=True, cu_seqlens=offsets, chunk=16)
    for n, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        alone = tuple(x[:, begin:end] if x.ndim == 4 else x for x in args)
        out, last = kind(*alone, initial_state=state[n : n + 1], output_final_state=True, form="recurrent")
        assert gap(whole[:, begin:end], out) < 1e-12 and gap(final[n : n + 1], last) < 1e-12
    sick = tuple(x.copy() for x in args)
    sick[2][0, 10] = np.nan
    out, last = kind(*sick, initial_state=state, output_final_state=True, cu_seqlens=offsets, chunk=8)
    assert np.isnan(out[0, 10:30]).any() and np.isnan(last[2]).any()
    np.testing.assert_array_equal(out[0, :7], kind(*args, initial_state=state, cu_seqlens=offsets, chunk=8)[0][0, :7])
    assert np.isfinite(out[0, 30:]).all() and np.isfinite(last[3:]).all()


@pytest.mark.parametrize("kind", [gla])
def test_packed_sequences_through_the_tree_of_jax(kind):
    jax = pytest.importorskip("jax")
    offsets = [0, 7, 7, 22, 23, 40]
    args, _ = inputs(kind, 40, batch=1, dtype=np.float32)
    state = np.random.default_rng(5).standard_normal((5, 3, 5, 7)).astype(np.float32)
    given, last = (x.astype(np.float32) for x in cotangents(kind, args, state))

    def loss(*x):
        got, end = kind(*x[:-1], initial_state=x[-1], output_final_state=True, cu_seqlens=offsets, chunk=8)
        return (got * given).sum() + (end * last).sum(), (got, end)

    out, final, grads = oracle(kind, args, state, given.astype(float), last.astype(float), cu_seqlens=offsets)
    numbers = tuple(range(len(args) + 1))
    found, (got, end) = jax.jit(jax.grad(loss, argnums=numbers, has_aux=True))(*map(jax.numpy.asarray, (*args, state)))
    assert gap(got, out) < 1e-5 and gap(end, final) < 1e-5
    for (name, wanted), g in zip(grads.items(), found, strict=True):
        assert gap(g, wanted) < 1e-5, name
    # The hand-written adjoint goes through the reversed tree.
    pull = lambda *x: VJP[kind](*x[:-1], initial_state=x[-1], cu_seqlens=offsets, chunk=8)[1](given, last=last)  # noqa: E731
    given, last = jax.numpy.asarray(given), jax.numpy.asarray(last)
    for name, got in jax.jit(pull)(*map(jax.numpy.asarray, (*args, state))).items():
        assert gap(got, grads[name]) < 1e-5, name
    with pytest.raises(TypeError, match="traces it"):
        jax.jit(lambda c: kind(*args, cu_seqlens=c)[0])(jax.numpy.asarray(offsets))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [(64,) * 4, (1, 255), (63, 65, 128), (1,) * 40])
def test_pieces_with_a_carried_state_equal_one_call(kind, pieces):
    time = sum(pieces)
    args, state = inputs(kind, time, batch=1, heads=2)
    whole, final = kind(*args, initial_state=state, output_final_state=True)
    begin, outs = 0, []
    for length in pieces:
        part = tuple(x[:, begin : begin + length] if x.ndim == 4 else x for x in args)
        out, state = kind(*part, initial_state=state, output_final_state=True)
        outs.append(out)
        begin += length
    assert gap(np.concatenate(outs, axis=1), whole) < 1e-12 and gap(state, final) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_reaches_an_earlier_segment_through_the_state(kind):
    """A loss on the second segment, or on the final state alone, has its whole gradient on the first."""
    args, state = inputs(kind, 16, batch=1, heads=2)
    given, last = cotangents(kind, args, state)
    given[:, :8] = 0.0
    _, pullback = VJP[kind](*args, initial_state=state, chunk=4)
    whole = pullback(given, last=last)
    first = tuple(x[:, :8] if x.ndim == 4 else x for x in args)
    second = tuple(x[:, 8:] if x.ndim == 4 else x for x in args)
    (_, middle), back_first = VJP[kind](*first, initial_state=state, output_final_state=True, chunk=4)
    _, back_second = VJP[kind](*second, initial_state=middle, chunk=4)
    later = back_second(given[:, 8:], last=last)
    earlier = back_first(last=later["initial_state"])
    for name in ("k", "v"):
        assert np.abs(earlier[name]).max() > 0.1
        assert gap(np.concatenate([earlier[name], later[name]], axis=1), whole[name]) < 1e-12
    assert gap(earlier["initial_state"], whole["initial_state"]) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_the_adjoint_is_the_transpose_of_the_derivative(kind):
    """Central differences along random directions of every argument."""
    args, state = inputs(kind, 19, batch=1, heads=1)
    given, last = cotangents(kind, args, state)
    (_, _), pullback = VJP[kind](*args, initial_state=state, chunk=8)
    grads = pullback(given, last=last)
    rng, h = np.random.default_rng(1), 1e-5
    ways = [rng.standard_normal(x.shape) for x in (*args, state)]

    def loss(sign):
        moved = [x + sign * h * d for x, d in zip((*args, state), ways, strict=True)]
        out, final = kind(*moved[:-1], initial_state=moved[-1], output_final_state=True, chunk=8)
        return (out * given).sum() + (final * last).sum()

    wanted = sum((grads[n] * d).sum() for n, d in zip((*NAMES[kind], "initial_state"), ways, strict=True))
    assert (loss(1) - loss(-1)) / (2 * h) == pytest.approx(wanted, rel=1e-7)


def fixed(g, dtype=np.float32):
    """q, k, v of sines (1, 64, 1, 4 or 3) and a log decay."""
    t, i, j = np.arange(64)[:, None], np.arange(4), np.arange(3)
    arrays = np.sin(0.3 * t + i), np.cos(0.2 * t - i), np.sin(0.1 * t + 0.5 * j), np.broadcast_to(g, (64, 4))
    return tuple(x[None, :, None, :].astype(dtype) for x in arrays)


FORMS_64 = [
    {"form": "recurrent"},
    {"form": "chunk"},
    {"form": "subchunk"},
    {"form": "subchunk", "chunk": 128, "subchunk": 16},
]


@pytest.mark.parametrize("options", FORMS_64)
def test_values_known_from_elsewhere(options):
    """Strong decay at one anchor, a decay of one, a hard reset, and a strong decay at each sub-chunk's first row."""

    def run(g, index=63):
        out, state = gla(*fixed(g), scale=1.0, output_final_state=True, **options)
        return out[0, index, 0], state[0, 0]

    out, state = run(-5.0)
    np.testing.assert_allclose(out, [0.001998, 0.054786, 0.094161], atol=1e-6)
    np.testing.assert_allclose(state[0], [0.016244, 0.496537, 0.855261], atol=1e-6)
    for zero in (0.0, -0.0, -1e-30):
        np.testing.assert_allclose(run(zero)[0], [0.001944, 0.049804, 0.085471], atol=2e-5)
    for reset in (-INF, -1e30):
        g = np.full((64, 4), -0.1)
        g[10] = reset
        np.testing.assert_allclose(run(g)[0], [3.082659, -0.093733, -3.247176], atol=1e-5)
    r, k, v, g = fixed(-0.01)
    g = g.copy()
    g[:, ::16] = -200.0
    u = np.asarray([[0.5, -0.3, 1.0, 0.0]], dtype=np.float32)
    out, state = rwkv6(r, k, v, g, u, output_final_state=True, **options)
    np.testing.assert_allclose(out[0, 0, 0], [0, -0.246806, -0.433186], atol=1e-6)
    np.testing.assert_allclose(out[0, 63, 0], [9.65679, 3.667155, -3.220328], atol=2e-5)
    np.testing.assert_allclose(state[0, 0, 0], [2.507163, 4.129059, 4.740018], atol=1e-5)
    check(rwkv6, (r, k, v, g, u), np.zeros((1, 1, 4, 3), np.float32), 1e-5, options)


@pytest.mark.parametrize("form", ["recurrent", "chunk", "subchunk"])
def test_a_reset_has_no_gradient_and_hides_no_nan(form):
    q, k, v, g = fixed(-0.1, np.float64)
    g = g.copy()
    g[:, 10] = -INF
    _, pullback = gla_vjp(q, k, v, g, form=form)
    grads = pullback(np.ones((1, 64, 1, 3)))
    assert (grads["log_decay"][:, 10] == 0.0).all() and all(np.isfinite(x).all() for x in grads.values())
    v = v.copy()
    v[0, 40, 0, 1] = np.nan
    out, _ = gla(q, k, v, g, form=form)
    assert np.isnan(out[0, 40:, 0, 1]).all() and np.isfinite(out[0, :, 0, [0, 2]]).all()


def test_the_thread_case_of_a_decay_floor():
    """P63: chunk 128, sub-chunk 16, decays at 0.05 and below it: the same numbers as the loop, with no floor."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 300, 2, 16)).astype(np.float32) for _ in range(3))
    decay = rng.uniform(0.05, 1.0, (1, 300, 2, 16)).astype(np.float32)
    for low in (0.05, 1e-6, 0.0):
        with np.errstate(divide="ignore"):
            g = np.log(np.where(rng.random(decay.shape) < 0.5, np.float32(low), decay))
        state = np.zeros((1, 2, 16, 16), np.float32)
        check(gla, (q, k, v, g), state, 1e-5, {"form": "subchunk", "chunk": 128, "subchunk": 16})


def test_sums_are_accumulated_in_float32():
    torch = pytest.importorskip("torch")
    ones = torch.ones((1, 4096, 1, 1), dtype=torch.bfloat16)
    out, state = gla(ones, ones, ones, 0 * ones, output_final_state=True)
    assert abs(float(out[0, -1]) - 4096) <= 16 and float(state) == 4096.0
    state = None
    for _ in range(1000):
        _, state = gla(*(ones[:, :1],) * 3, 0 * ones[:, :1], initial_state=state, output_final_state=True)
    assert float(state) == 1000.0
    large, small = torch.full((1, 1, 1, 1), 300.0, dtype=torch.float16), torch.full((1, 1, 1, 1), 1e-3)
    for form in ("recurrent", "chunk"):
        assert float(gla(small.half(), large, large, 0 * large, form=form)[0]) == pytest.approx(90, rel=1e-3)


def test_log_form():
    """It equals the loop where signs allow logarithms, beyond the range of the dtype too, and is refused elsewhere."""
    torch = pytest.importorskip("torch")
    for kind in (gla, rwkv6):
        args, state = inputs(kind, 33)
        args = (args[0], np.abs(args[1]) + 0.01, np.abs(args[2]) + 0.01, *args[3:])
        state = np.abs(state)
        state[0, 0] = 0.0
        given, last = cotangents(kind, args, state)
        out, final, grads = oracle(kind, args, state, given, last)
        leaves = [torch.tensor(x, requires_grad=True) for x in (*args, state)]
        got, end = kind(*leaves[:-1], initial_state=leaves[-1], output_final_state=True, form="log")
        found = torch.autograd.grad((got * torch.tensor(given)).sum() + (end * torch.tensor(last)).sum(), leaves[:-1])
        assert gap(got.detach(), out) < 1e-12 and gap(end.detach(), final) < 1e-12
        for name, g in zip(grads, found, strict=False):
            assert gap(g, grads[name]) < 1e-12
        with pytest.raises(ValueError, match="k > 0"):
            kind(args[0], -args[1], *args[2:], form="log")
    with pytest.raises(ValueError, match="form='log'"):
        rwkv7(*inputs(rwkv7, 4)[0], form="log")
    one = np.ones((1, 60, 1, 1), np.float32)
    tiny = one * np.float32(1e-30)
    out, _ = gla(one * np.float32(1e30), tiny, tiny, 0 * one, scale=1.0, form="log")
    assert out[0, 0, 0, 0] == 0.0 and np.isfinite(out).all()


@pytest.mark.parametrize("options", [{"form": "recurrent"}, {"form": "chunk"}, {"form": "subchunk"}])
def test_special_cases(options):
    """Plain attention, retention and Mamba-2 against a sum over all pairs of times."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 50, 3, n)) for n in (5, 5, 7))
    lag = np.arange(50)[:, None] - np.arange(50)
    scores = np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(5)
    causal = np.where(lag >= 0, scores, 0.0)
    assert gap(linear_attention(q, k, v, **options)[0], np.einsum("bhts,bshv->bthv", causal, v)) < 1e-12
    gamma = 1.0 - 2.0 ** (-5.0 - np.arange(3))
    decayed = causal * gamma[:, None, None] ** np.maximum(lag, 0)
    assert gap(retention(q, k, v, **options)[0], np.einsum("bhts,bshv->bthv", decayed, v)) < 1e-12
    assert gap(retention(q, k, v, log_decay=np.log(gamma), **options)[0], retention(q, k, v, **options)[0]) < 1e-12
    dt, a, d = rng.uniform(0.1, 1.0, (2, 50, 3)), -rng.uniform(0.1, 2.0, 3), rng.standard_normal(3)
    total = np.cumsum(dt * a, axis=1)
    factor = np.exp(np.minimum(total[:, :, None] - total[:, None], 0.0)).transpose(0, 3, 1, 2)
    wanted = np.einsum("bhts,bshv->bthv", causal * np.sqrt(5) * factor, dt[..., None] * v) + d[:, None] * v
    assert gap(mamba2(v, dt, a, k, q, d=d, **options)[0], wanted) < 1e-12
    _, state = inputs(gla, 1)
    check(gla, (q, k, v, -rng.uniform(0, 3, (2, 50, 3, 1))), state, 1e-12, options)


def test_delta_rule_with_equal_keys_is_inverted_stably():
    """All keys alike: the powers of the chunk's matrix reach 10¹⁸, and the result is the last value."""
    time = 128
    key = np.zeros((1, time, 1, 4), np.float32)
    key[..., 1] = 1.0
    v = np.random.default_rng(0).standard_normal((1, time, 1, 3)).astype(np.float32)
    for chunk in (64, 128):
        out, _ = rwkv7(key, 0 * key, key, v, -key, key, form="chunk", chunk=chunk)
        assert gap(out, v) < 2e-6


def test_key_first_layout():
    zero, read = np.zeros((1, 1, 1, 2)), np.asarray([[[[1.0, 0.0]]]])
    state = np.asarray([[[[0.0, 1.0], [0.0, 0.0]]]])
    for form in ("recurrent", "chunk", "subchunk"):
        out, _ = rwkv7(read, zero, zero, zero, zero, zero, initial_state=state, form=form)
        assert out.ravel().tolist() == [0.0, 1.0]
    args, state = inputs(rwkv7, 4)
    with pytest.raises(ValueError, match="keys before values"):
        rwkv7(*args, initial_state=state.swapaxes(-1, -2))


@pytest.mark.parametrize("kind", KINDS)
def test_misuse_is_refused_before_any_work(kind):
    args, state = inputs(kind, 12)
    at = NAMES[kind].index("w" if kind is rwkv7 else "log_decay")
    grown = list(args)
    grown[at] = 1 / (1 + np.exp(-args[at]))
    with pytest.raises(ValueError, match="≤ 0"):
        kind(*grown)
    with pytest.raises(TypeError):
        kind(*args[:-1])
    with pytest.raises(ValueError, match="must be"):
        kind(args[0][..., :-1], *args[1:])
    with pytest.raises(ValueError, match="form must be one of"):
        kind(*args, form="fast")
    with pytest.raises(TypeError, match="must be floating"):
        kind(args[0].astype(np.int64), *args[1:])
    with pytest.raises(ValueError, match="batch of 1"):
        kind(*args, cu_seqlens=[0, 12])
    alone = tuple(x[:1] if x.ndim == 4 else x for x in args)
    for wrong in ([0, 5], [0, 8, 5, 12], [1, 12]):
        with pytest.raises(ValueError, match="must rise from 0"):
            kind(*alone, cu_seqlens=wrong)
    with pytest.raises(ValueError, match="integers"):
        kind(*alone, cu_seqlens=[0.0, 12.0])
    with pytest.raises(ValueError, match=r"\(S, H, K, V\)"):
        kind(*alone, cu_seqlens=[0, 6, 12], initial_state=state[:1])
    with pytest.raises(ValueError, match="pass a cotangent"):
        VJP[kind](*args)[1]()
    with pytest.raises(ValueError, match="cotangent must be"):
        VJP[kind](*args)[1](state)
    swapped = tuple(x.swapaxes(1, 2) if x.ndim == 4 else np.ones((12, 5)) for x in args)
    with pytest.warns(UserWarning, match="time before heads"):
        kind(*swapped)


def test_inputs_are_left_as_they_are_and_strides_do_not_matter():
    """P42."""
    for kind in KINDS:
        args, state = inputs(kind, 30)
        copies = [x.copy() for x in (*args, state)]
        strided = [np.asfortranarray(x) for x in args]
        (out, _), pullback = VJP[kind](*args, initial_state=state)
        pullback(np.ones_like(out))
        for x, y in zip((*args, state), copies, strict=True):
            np.testing.assert_array_equal(x, y)
        assert gap(kind(*strided, initial_state=state)[0], out) < 1e-12


@pytest.mark.filterwarnings("ignore:Dynamo detected")
def test_torch_traces_and_maps_the_chunk_form():
    """P40's kind: one graph without a break, and vmap."""
    torch = pytest.importorskip("torch")
    for kind in (gla, rwkv7):
        tensors = [torch.tensor(x) for x in inputs(kind, 40, batch=1, heads=2)[0]]
        traced = torch.compile(lambda *x, kind=kind: kind(*x)[0], backend="eager", fullgraph=True)
        assert gap(traced(*tensors), kind(*tensors)[0]) < 1e-13
    args, _ = inputs(gla, 40)
    tensors = [torch.tensor(x) for x in args]
    mapped = torch.func.vmap(lambda *x: gla(*x, form="chunk")[0])(*(torch.stack([x, 0.5 * x]) for x in tensors))
    assert gap(mapped[0], gla(*args, form="chunk")[0]) < 1e-13
    assert gap(mapped[1], gla(*(0.5 * x for x in args), form="chunk")[0]) < 1e-13


def test_long_decays_lose_no_digits_to_what_came_before():
    """A mild decay keeps its digits behind a strong one: no difference of cumulative sums is taken."""
    time = 60
    g = np.full((1, time, 1, 1), -0.013, np.float32)
    g[0, 3] = -1e4
    one = np.ones((1, time, 1, 1), np.float32)
    wanted = gla(*(x.astype(np.float64) for x in (one, one, one, g)), scale=1.0, form="recurrent")[0]
    for options in ({"form": "chunk"}, {"form": "subchunk", "chunk": 64, "subchunk": 64}):
        assert gap(gla(one, one, one, g, scale=1.0, **options)[0], wanted) < 1e-6


def test_nothing_heavy_is_imported():
    code = "import sys, pararnn.linear_attention; print([m for m in ('torch', 'jax', 'triton') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("kind", [gla, rwkv6])
@pytest.mark.parametrize("shared", [False, True])
def test_windows_of_numpy_choose_by_their_decays(kind, shared, monkeypatch):
    """Mild windows take one anchor a chunk, the others are halved; both are the loop's, up to their border."""
    monkeypatch.setattr(windows, "ENTRIES", 1 << 9)
    anchored = []
    mild = windows.mild

    def watched(*call):
        found = mild(*call)
        anchored.append(found is not None)
        return found

    monkeypatch.setattr(windows, "mild", watched)
    args, state = inputs(kind, 640, batch=2, heads=2, dtype=np.float32)
    g = args[3][..., :1] if shared else args[3]
    g = g.copy()
    g[:, :128] = -windows.MILD / 16.001  # just inside
    g[:, 128:256] = -windows.MILD / 15.9
    g[:, 300], g[:, 400] = -INF, -300.0
    args = (*args[:3], g, *args[4:])
    wide = [x.astype(np.float64) for x in (*args, state)]
    wanted, final = kind(*wide[:-1], initial_state=wide[-1], form="recurrent", output_final_state=True)
    with np.errstate(all="raise"):
        out, last = kind(*args, initial_state=state, form="chunk", chunk=16, output_final_state=True)
    assert anchored == [True, True, False, False, False, True, False, True, True, True]
    assert gap(out, wanted) < 1e-5 and gap(last, final) < 1e-5
    sick = tuple(x.copy() for x in args)
    sick[3][0, 70, 1, 0] = np.nan
    assert np.isnan(kind(*sick, form="chunk", chunk=16)[0][0, 71:, 1]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", ["mild", "mixed"])
def test_the_way_of_accelerators_on_numpy(kind, decay, monkeypatch):
    """The tree over chunks, and small levels as masked products, with and without packed sequences."""
    for module in (scores, states):
        monkeypatch.setattr(module, "prefers_breadth", lambda xp, like: True)
    for options in ({"chunk": 8}, {"chunk": 64}, {"chunk": 32, "subchunk": 4}):
        args, state = inputs(kind, 75, decay=decay)
        check(kind, args, state, 1e-12, options)
        args, _ = inputs(kind, 75, batch=1, decay=decay)
        state = np.random.default_rng(5).standard_normal((4, 3, 5, 7))
        check(kind, args, state, 1e-12, options, cu_seqlens=[0, 20, 20, 51, 75])


def test_a_wrong_shape_is_told_the_right_one():
    q = np.zeros((2, 5, 1, 8))
    with pytest.raises(ValueError, match=r"log_decay must be \(B, T, H, K or 1\) = \(2, 5, 1, 8 or 1\) to go with k"):
        gla(q, q, q, q[..., :3])
