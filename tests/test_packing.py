"""Packed documents, episode resets and padding: each document is what it is alone, whatever stands beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import array_api_strict
import numpy as np
import pytest

from pararnn import (
    Backend,
    NewtonConfig,
    NewtonStats,
    ParaGRU,
    ParaLSTM,
    explain,
    final_states,
    newton_apply,
    newton_vjp,
    register_backend,
    sequential_apply,
    verify_agreement,
)
from support import CELLS, error_of, problem, start_for

CU = [0, 0, 13, 13, 60, 97, 97]
DOCUMENTS = [(n, slice(a, b)) for n, (a, b) in enumerate(zip(CU, CU[1:], strict=False))]
BACKENDS = ("array", "numpy", "cpu")
PATHS = (
    {},
    {"segment_len": 16},
    {"segment_len": 7, "warmup": 3},
    {"chunk_len": 23, "segment_len": 5},
    {"segment_len": 16, "max_iters": 4},
    {"max_iters": 40, "residual_atol": None},
)


def packed(kind, dtype=np.float64, seed=0):
    """A cell, x (1, 97, I) and h0 of the six documents of `CU`, two of them empty."""
    cell, x = problem(kind, CU[-1], batch=1, dtype=dtype, seed=seed)
    return cell, x, start_for(cell, len(CU) - 1)


def cotangent_like(states, seed=5):
    return np.random.default_rng(seed).standard_normal(states.shape).astype(states.dtype)


def relative(got, wanted):
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    return float(np.abs(got - wanted).max(initial=0.0) / max(np.abs(wanted).max(initial=0.0), 1e-3))


@pytest.mark.filterwarnings("ignore::pararnn.NotConvergedWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", CELLS)
def test_documents_equal_separate_runs_with_gradients(kind, backend):
    """P43: states, final states, and gradients of x, h0 and parameters, on every path (cases O28, O31)."""
    cell, x, h0 = packed(kind)
    g, last = cotangent_like(np.empty((1, CU[-1], *cell.state_shape))), cotangent_like(h0, 6)
    alone, params = [], None
    for n, span in DOCUMENTS:
        states, pull = newton_vjp(cell, x[:, span], NewtonConfig(scan_backend="array"), h0[n : n + 1])
        found = pull(g[:, span], last=last[n : n + 1])
        alone.append((states, found))
        params = found.params if params is None else {k: v + found.params[k] for k, v in params.items()}
    for path in PATHS:
        config, stats = NewtonConfig(scan_backend=backend, **path), NewtonStats()
        states, pull = newton_vjp(cell, x, config, h0, cu_seqlens=CU, stats=stats)
        found, ends = pull(g, last=last), final_states(states, CU, h0=h0)
        assert stats.converged, path
        assert found.h0.shape == ends.shape == h0.shape
        for (n, span), (own, grads) in zip(DOCUMENTS, alone, strict=True):
            assert error_of(cell, states[:, span], own) < 1e-12, (path, n)
            np.testing.assert_array_equal(ends[n], states[0, span.stop - 1] if own.shape[1] else h0[n])
            assert relative(found.x[:, span], grads.x) < 1e-11, (path, n)
            assert relative(found.h0[n : n + 1], grads.h0) < 1e-11, (path, n)
        for name, total in params.items():
            assert relative(found.params[name], total) < 1e-11, (path, name)
    oracle = sequential_apply(cell, x, h0, cu_seqlens=CU)
    assert error_of(cell, states, oracle) < 1e-12
    assert verify_agreement(cell, x, h0=h0, cu_seqlens=CU, reference="float64").ok


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("path", PATHS[:4])
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_no_bit_of_a_document_depends_on_its_neighbours(backend, path, poison):
    """P43, cases O28 and O35: forward and backward, whatever a neighbour and its cotangent hold."""
    cell, x, h0 = packed(ParaLSTM, np.float32)
    config = NewtonConfig(scan_backend=backend, **path)
    states, pull = newton_vjp(cell, x, config, h0, cu_seqlens=CU)
    g = cotangent_like(states)
    clean = pull(g)
    bad, bad_h0, bad_g = x.copy(), h0.copy(), g.copy()
    for n in (1, 4):
        bad[:, DOCUMENTS[n][1]], bad_g[:, DOCUMENTS[n][1]], bad_h0[n] = poison, poison, poison
    again, pull = newton_vjp(cell, bad, config, bad_h0, cu_seqlens=CU)
    found = pull(bad_g)
    middle = DOCUMENTS[3][1]
    np.testing.assert_array_equal(again[:, middle], states[:, middle])
    np.testing.assert_array_equal(found.x[:, middle], clean.x[:, middle])
    np.testing.assert_array_equal(found.h0[3], clean.h0[3])
    oracle = sequential_apply(cell, bad, bad_h0, cu_seqlens=CU)[:, middle]
    np.testing.assert_allclose(oracle, states[:, middle], atol=1e-6)
    if poison != poison:
        assert np.isnan(again[:, DOCUMENTS[1][1]]).all() and np.isnan(found.params["W_x.weight"]).all()


@pytest.mark.filterwarnings("ignore::pararnn.NotConvergedWarning")
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_pinned_solve_keeps_documents_apart(poison):
    """The published algorithm runs its scans over each document by itself."""
    cell, x, h0 = packed(ParaGRU, np.float32)
    config = NewtonConfig(max_iters=3, residual_fail=None)
    states = newton_apply(cell, x, config, h0=h0, cu_seqlens=CU)
    x = x.copy()
    x[:, DOCUMENTS[1][1]] = poison
    again = newton_apply(cell, x, config, h0=h0, cu_seqlens=CU)
    np.testing.assert_array_equal(again[:, 13:], states[:, 13:])


def rows_alone(cell, x, h0, reset):
    """Every episode by itself: (row, span, states)."""
    out = []
    for b in range(x.shape[0]):
        edges = sorted({0, x.shape[1], *np.flatnonzero(reset[b]).tolist()})
        for first, stop in zip(edges, edges[1:], strict=False):
            start = h0[b : b + 1] if first == 0 and not reset[b, 0] else None
            out.append((b, slice(first, stop), sequential_apply(cell, x[b : b + 1, first:stop], start)))
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", CELLS)
def test_resets_start_every_slot_anew_before_their_step(kind, backend):
    """Case O36: episodes of a batch; a reset at the first step drops h0 there, and only there."""
    cell, x = problem(kind, 41, batch=3, dtype=np.float64)
    h0, reset = start_for(cell, 3), np.random.default_rng(2).random((3, 41)) < 0.1
    reset[:, 0] = [True, False, False]
    reset[2] = False
    for path in PATHS[:4]:
        states, pull = newton_vjp(cell, x, NewtonConfig(scan_backend=backend, **path), h0, reset=reset)
        for b, span, own in rows_alone(cell, x, h0, reset):
            assert error_of(cell, states[b : b + 1, span], own) < 1e-12, (path, b, span)
        found = pull(cotangent_like(states))
        assert not found.h0[0].any() and found.h0[1].any() and found.h0[2].any()
    assert verify_agreement(cell, x, h0=h0, reset=reset).exact


def test_a_reset_at_step_three_is_two_documents():
    """Case O36, as written."""
    for kind in CELLS:
        cell, x = problem(kind, 6, batch=1)
        reset = np.array([[False, False, False, True, False, False]])
        by_reset, by_offsets = newton_apply(cell, x, reset=reset), newton_apply(cell, x, cu_seqlens=[0, 3, 6])
        np.testing.assert_array_equal(by_reset, by_offsets)
        np.testing.assert_array_equal(by_reset[:, 3:], newton_apply(cell, x[:, 3:]))


def test_resets_inside_documents():
    """A reset takes the place of a document's own start, and its h0 then gets no gradient."""
    cell, x, h0 = packed(ParaLSTM)
    reset = np.zeros((1, CU[-1]), bool)
    reset[0, [5, 13, 70]] = True
    states, pull = newton_vjp(cell, x, h0=h0, cu_seqlens=CU, reset=reset)
    for first, stop, start in [(0, 5, h0[1:2]), (5, 13, None), (13, 60, None), (60, 70, h0[4:5]), (70, 97, None)]:
        assert error_of(cell, states[:, first:stop], sequential_apply(cell, x[:, first:stop], start)) < 1e-12
    found = pull(cotangent_like(states))
    assert found.h0.shape == h0.shape and not found.h0[3].any() and found.h0[4].any()


@pytest.mark.filterwarnings("ignore::pararnn.NotConvergedWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("path", [*PATHS[:4], PATHS[5]])
def test_padding_leaves_the_state_untouched(backend, path):
    """Case O35: padding anywhere, NaN in it; the same states and gradients as without it; a zero input is a step."""
    for kind in CELLS:
        cell, x = problem(kind, 30, batch=2, dtype=np.float64)
        x[:, 4] = 0.0
        h0, mask = start_for(cell, 2), np.random.default_rng(4).random((2, 44)) < 0.7
        for row in mask:
            row[:] = False
            row[np.random.default_rng(7).permutation(44)[:30]] = True
        wide = np.full((2, 44, x.shape[2]), np.nan)
        wide[mask] = x.reshape(60, -1)
        config = NewtonConfig(scan_backend=backend, **path)
        states, pull = newton_vjp(cell, wide, config, h0, mask=mask)
        plain, pull_plain = newton_vjp(cell, x, NewtonConfig(scan_backend="array"), h0)
        assert error_of(cell, states[mask].reshape(plain.shape), plain) < 1e-12
        before = np.concatenate([h0[:, None], states[:, :-1]], axis=1)
        np.testing.assert_array_equal(states[~mask], before[~mask])
        g = cotangent_like(states)
        # What padding shows is the state before it, so its cotangent goes there.
        total, later = g.copy(), np.zeros_like(h0)
        for t in range(43, -1, -1):
            total[:, t] += later
            hold = ~mask[:, t].reshape(2, *([1] * (h0.ndim - 1)))
            later = np.where(hold, total[:, t], 0.0)
        found, wanted = pull(g), pull_plain(total[mask].reshape(plain.shape))
        assert relative(found.x[mask].reshape(x.shape), wanted.x) < 1e-11
        assert not found.x[~mask].any()
        assert relative(found.h0, wanted.h0 + later) < 1e-11
        for name, value in wanted.params.items():
            assert relative(found.params[name], value) < 1e-11


def test_padding_does_not_move_document_borders():
    """Case O29: an all-ones mask changes nothing; a mask and borders are both obeyed."""
    cell, x, h0 = packed(ParaGRU, np.float32)
    plain = newton_apply(cell, x, h0=h0, cu_seqlens=CU)
    ones = np.ones((1, CU[-1]), bool)
    np.testing.assert_array_equal(newton_apply(cell, x, h0=h0, cu_seqlens=CU, mask=ones), plain)
    mask = ones.copy()
    mask[0, 10:15] = False
    states = newton_apply(cell, x, h0=h0, cu_seqlens=CU, mask=mask)
    np.testing.assert_array_equal(states[0, 13:15], np.broadcast_to(h0[3], (2, 5)))
    np.testing.assert_array_equal(states[0, 10:13], np.broadcast_to(states[0, 9], (3, 5)))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([0, 12, 8, 16], ValueError),
        ([0, 8], ValueError),
        ([1, 16], ValueError),
        ([0, 20], ValueError),
        ([], ValueError),
        ([0], ValueError),
        ([0, 16.0], TypeError),
        ([False, 16], TypeError),
        (np.array([0.0, 16.0]), TypeError),
        (np.array([[0, 16]]), ValueError),
        (np.array([0, 16], np.int16), TypeError),
        ({0, 16}, TypeError),
        ("016", TypeError),
    ],
)
def test_malformed_offsets_are_refused_before_any_work(given, error):
    """Case O30."""
    cell, x = problem(ParaGRU, 16, batch=1)
    for call in (newton_apply, sequential_apply, explain, verify_agreement):
        with pytest.raises(error, match=r"cu_seqlens must be \[0, end of document 1, …, 16\].*got"):
            call(cell, x, cu_seqlens=given)


def test_what_does_not_fit_is_refused():
    cell, x = problem(ParaGRU, 16, batch=2)
    with pytest.raises(ValueError, match=r"x must be \(1, total, I\), got \(2, 16, 3\)"):
        newton_apply(cell, x, cu_seqlens=[0, 16])
    with pytest.raises(ValueError, match=r"reset must have the shape \(B, T\) = \(2, 16\), got \(16,\)"):
        newton_apply(cell, x, reset=np.zeros(16, bool))
    with pytest.raises(TypeError, match=r"mask must hold truth values, got float64; write mask != 0"):
        newton_apply(cell, x, mask=np.ones((2, 16)))
    with pytest.raises(ValueError, match=r"h0 must have shape \(2, 5\), got \(1, 5\)"):
        newton_apply(cell, x[:1], h0=np.zeros((1, 5), np.float32), cu_seqlens=[0, 3, 16])
    with pytest.raises(ValueError, match=r"last must have shape \(2, 5\), got \(1, 5\)"):
        newton_vjp(cell, x[:1], cu_seqlens=[0, 3, 16])[1](last=np.zeros((1, 5), np.float32))
    with pytest.raises(ValueError, match=r"final_states: h0 must have shape \(2, 5\)"):
        final_states(np.zeros((1, 16, 5)), [0, 3, 16], h0=np.zeros((1, 5)))


@pytest.mark.parametrize("form", [list, tuple, "int32", "int64", "uint32", "uint64"])
def test_offsets_of_every_kind(form):
    """Case O31."""
    cell, x, h0 = packed(ParaGRU, np.float32)
    given = np.array(CU, dtype=form) if isinstance(form, str) else form(CU)
    wanted = newton_apply(cell, x, h0=h0, cu_seqlens=CU)
    np.testing.assert_array_equal(newton_apply(cell, x, h0=h0, cu_seqlens=given), wanted)


def test_offsets_edited_in_place_are_read_again():
    """Case O32: nothing is remembered by the identity of the offsets."""
    cell, x = problem(ParaGRU, 20, batch=1)
    offsets = np.array([0, 5, 20])
    first = newton_apply(cell, x, cu_seqlens=offsets)
    offsets[1] = 9
    second = newton_apply(cell, x, cu_seqlens=offsets)
    np.testing.assert_array_equal(second, newton_apply(cell, x, cu_seqlens=[0, 9, 20]))
    assert (second != first).any()


def test_only_empty_documents():
    """Case O52: without a step the final states are h0, and so is their gradient."""
    cell, x = problem(ParaLSTM, 0, batch=1)
    h0 = start_for(cell, 3)
    states, pull = newton_vjp(cell, x, None, h0, cu_seqlens=[0, 0, 0, 0])
    assert states.shape == (1, 0, 2, 5)
    np.testing.assert_array_equal(final_states(states, [0, 0, 0, 0], h0=h0), h0)
    found = pull(last=h0)
    np.testing.assert_array_equal(found.h0, h0)
    assert not any(a.any() for a in found.params.values())


def test_finite_differences_of_document_starts():
    cell, x, h0 = packed(ParaLSTM)
    g, last = cotangent_like(np.empty((1, CU[-1], *cell.state_shape))), cotangent_like(h0, 6)

    def loss(start):
        states = newton_apply(cell, x, h0=start, cu_seqlens=CU)
        return float((g * states).sum() + (last * final_states(states, CU, h0=start)).sum())

    found = newton_vjp(cell, x, None, h0, cu_seqlens=CU)[1](g, last=last).h0
    direction = cotangent_like(h0, 9)
    step = 1e-6
    slope = (loss(h0 + step * direction) - loss(h0 - step * direction)) / (2 * step)
    assert abs(slope - float((found * direction).sum())) < 1e-7 * abs(slope)


@pytest.mark.parametrize("kind", CELLS)
def test_strict_arrays(kind):
    """The whole of it in array-API calls alone."""
    xp = array_api_strict
    cell, x, h0 = packed(kind)
    mine = cell.to(xp)
    mask = np.random.default_rng(1).random((1, CU[-1])) < 0.8
    reset = np.random.default_rng(2).random((1, CU[-1])) < 0.1
    told = {"cu_seqlens": CU, "reset": reset, "mask": mask}
    given = {**told, "cu_seqlens": xp.asarray(CU), "reset": xp.asarray(reset)}
    wanted, pull = newton_vjp(cell, x, NewtonConfig(scan_backend="array", segment_len=8), h0, **told)
    got, mine_pull = newton_vjp(mine, xp.asarray(x), NewtonConfig(segment_len=8), xp.asarray(h0), **given)
    assert error_of(cell, np.from_dlpack(got), wanted) < 1e-12
    g = cotangent_like(wanted)
    found, true = mine_pull(xp.asarray(g), last=xp.asarray(h0)), pull(g, last=h0)
    assert relative(np.from_dlpack(found.x), true.x) < 1e-11 and relative(np.from_dlpack(found.h0), true.h0) < 1e-11


def test_a_backend_that_does_not_pack_is_passed_over_or_refuses():
    """P43: never one document quietly run into the next."""

    class Old(Backend):
        name, priority = "old", 1000

        def newton(self, problem):
            raise AssertionError("asked to solve what it does not know of")

    register_backend(Old())
    try:
        cell, x = problem(ParaGRU, 8, batch=1)
        found = explain(cell, x, cu_seqlens=[0, 3, 8])
        assert found.backend != "old" and "does not take packed sequences" in found.refusals["old"]
        assert newton_apply(cell, x, cu_seqlens=[0, 3, 8]).shape == (1, 8, 5)
        with pytest.raises(TypeError, match="scan_backend='old' cannot solve this: it does not take packed"):
            newton_apply(cell, x, NewtonConfig(scan_backend="old"), mask=np.ones((1, 8), bool))
    finally:
        Old.priority = -1000


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_stored_dtypes(dtype):
    cell, x, h0 = packed(ParaLSTM, np.dtype(dtype))
    for backend in BACKENDS:
        states = newton_apply(cell, x, NewtonConfig(scan_backend=backend, segment_len=16), h0=h0, cu_seqlens=CU)
        oracle = sequential_apply(cell, x, h0, cu_seqlens=CU)
        assert states.dtype == oracle.dtype == np.dtype(dtype)
        assert error_of(cell, states, oracle) < {"float16": 1e-2, "float32": 1e-5}[dtype]


def test_the_exponent_is_the_network_s_and_not_the_packing_s():
    cell, x = problem(ParaGRU, 640, batch=1)
    plain, many = NewtonStats(), NewtonStats()
    newton_apply(cell, x, stats=plain)
    newton_apply(cell, x, stats=many, cu_seqlens=[0, 10, 300, 640])
    assert np.isfinite(many.lyapunov) and abs(many.lyapunov - plain.lyapunov) < 0.2 * abs(plain.lyapunov)


def test_the_packing_matrix_of_the_page_is_what_backends_say():
    """P43: docs/packing.md, written by docs/make_packing_matrix.py."""
    script = Path(__file__).resolve().parent.parent / "docs" / "make_packing_matrix.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
