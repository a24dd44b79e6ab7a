"""The scans of `pararnn.scans` against plain time loops, the collected hard cases, and the laws of scans."""

from __future__ import annotations

import contextlib
import doctest
import functools
import importlib
import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pararnn.scans as scans
from pararnn.scans import (
    associative_scan,
    reverse_scan_block2,
    reverse_scan_block4,
    reverse_scan_dense,
    reverse_scan_diag,
    scan_block,
    scan_block2,
    scan_block4,
    scan_dense,
    scan_diag,
    scan_max_plus,
)

LENGTHS = (0, 1, 2, 3, 4, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000)
LIBRARIES = ("numpy", "array_api_strict", "torch", "jax")
STRUCTURES = ("diag", "block2", "block3", "block4", "dense3", "max_plus")
METHODS = ("assoc", "seq")
A4, B4 = np.asarray([1.0, 1.5, 0.8, 2.0]), np.asarray([1.0, -1.0, 0.5, 2.0])  # the data of O01 and O02


# --- libraries ----------------------------------------------------------------------------------------------


class Library:
    """One array library: how its arrays are made and read."""

    def __init__(self, name):
        module = {"numpy": "numpy", "array_api_strict": "array_api_strict", "torch": "torch", "jax": "jax"}[
            name
        ]
        self.name = name
        self.module = pytest.importorskip(
            module, reason=f"{name} is not installed, so nothing can be run on it"
        )
        self.xp = importlib.import_module("jax.numpy") if name == "jax" else self.module

    def array(self, values):
        if values is None:
            return None
        values = np.array(values)  # a copy: a library may share memory
        return self.module.from_numpy(values) if self.name == "torch" else self.xp.asarray(values)

    def some(self, all_of_them, few):
        """JAX compiles every operation anew for every shape, so its everyday run takes a few sizes only."""
        return few if self.name == "jax" else all_of_them

    def numpy(self, array):
        assert type(array) is type(self.array(np.zeros(1))), f"{self.name} gave a {type(array)}"
        return np.asarray(array)


@pytest.fixture(params=LIBRARIES)
def lib(request):
    library = Library(request.param)
    with contextlib.ExitStack() as stack:
        if request.param == "jax":
            import jax

            switch = getattr(jax, "enable_x64", None)
            if switch is None or not callable(switch):
                from jax.experimental import enable_x64 as switch
            stack.enter_context(switch(True))
        yield library


# --- the definition, as plain loops -------------------------------------------------------------------------


def walk(step, factor, term, initial, reverse, axis=1):
    """The recurrence as it is written down, one time after the other, in the precision of the arguments."""
    factor, term = np.moveaxis(factor, axis, 0), np.moveaxis(term, axis, 0)
    out = np.zeros(term.shape, np.result_type(factor, term))
    state = initial
    for t in reversed(range(len(term))) if reverse else range(len(term)):
        state = term[t] if state is None else step(factor[t], state, term[t])
        out[t] = state
    return np.moveaxis(out, 0, axis)


STEPS = {
    "diag": lambda j, y, r: j * y + r,
    "block": lambda j, y, r: np.einsum("boid,bid->bod", j, y) + r,
    "dense": lambda j, y, r: np.einsum("boi,bi->bo", j, y) + r,
    "max_plus": lambda s, m, f: np.maximum(s + m, f),
}
SCANS = {"diag": scan_diag, "block": scan_block, "dense": scan_dense, "max_plus": scan_max_plus}


def kind_of(structure):
    return structure.rstrip("0123456789")


@functools.cache
def problem(structure, t, d, seed=0, b=2):
    """Random (factor, term, initial) of a structure; `d` channels (a dense matrix has 3 rows and none)."""
    rng = np.random.default_rng([seed, t, d, STRUCTURES.index(structure)])
    size = int(structure[-1]) if structure[-1].isdigit() else 1
    if structure in ("diag", "max_plus"):
        shapes = (b, t, d), (b, t, d), (b, d)
    elif kind_of(structure) == "block":
        shapes = (b, t, size, size, d), (b, t, size, d), (b, size, d)
    else:
        shapes = (b, t, size, size), (b, t, size), (b, size)
    factor, term, initial = (rng.uniform(-1.0, 1.0, shape) for shape in shapes)
    if structure == "max_plus":
        factor = factor - 0.2
    else:
        factor = factor * 1.4 / size**0.5
    return factor, term, initial


@functools.cache
def expected(structure, t, d, with_initial, reverse):
    factor, term, initial = problem(structure, t, d)
    return walk(STEPS[kind_of(structure)], factor, term, initial if with_initial else None, reverse)


def close(actual, wanted, tol=1e-10, note=""):
    assert actual.shape == wanted.shape, note
    assert actual.dtype == wanted.dtype, note
    scale = np.max(np.abs(wanted), initial=1e-300)
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=tol * scale, err_msg=note)


# --- every scan against its loop ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_equals_the_plain_loop(lib, structure, reverse, method):
    few = (0, 1, 2, 3, 4, 7, 8, 33, 129) if structure == "diag" else (0, 1, 2, 9, 33)
    compare_with_the_loop(lib, structure, reverse, method, lib.some(LENGTHS, few), lib.some((1, 3), (3,)))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("lib", ["jax"], indirect=True)
def test_equals_the_plain_loop_at_every_length_on_jax(lib, structure, reverse, method):
    compare_with_the_loop(lib, structure, reverse, method, LENGTHS, (1, 3))


def compare_with_the_loop(lib, structure, reverse, method, lengths, channels):
    scan = SCANS[kind_of(structure)]
    for t in lengths:
        for d in channels:
            if d == 1 and structure == "dense3":
                continue  # dense problems have no channels
            given_arrays = problem(structure, t, d)
            factor, term, initial = map(lib.array, given_arrays)
            for start in (None, initial):
                got = lib.numpy(scan(factor, term, initial=start, reverse=reverse, method=method))
                note = f"T={t} D={d} initial={'given' if start is not None else None}"
                close(got, expected(structure, t, d, start is not None, reverse), note=note)
            for mine, before in zip((factor, term, initial), given_arrays, strict=True):
                np.testing.assert_array_equal(lib.numpy(mine), before, err_msg=f"T={t}: an input was changed")


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_under_jit(structure, reverse):
    jax = pytest.importorskip("jax", reason="jax is not installed, so nothing can be traced by it")
    scan = SCANS[kind_of(structure)]
    run = jax.jit(functools.partial(scan, reverse=reverse))
    for t in (0, 1, 2, 7, 33):
        factor, term, initial = (jax.numpy.asarray(a, dtype="float32") for a in problem(structure, t, 3))
        for start in (None, initial):
            want = expected(structure, t, 3, start is not None, reverse).astype("f4")
            close(np.asarray(run(factor, term, initial=start)), want, tol=1e-5, note=f"T={t}")


@pytest.mark.parametrize(
    ("named", "general"),
    [
        (reverse_scan_diag, scan_diag),
        (reverse_scan_block2, scan_block2),
        (reverse_scan_block4, scan_block4),
        (reverse_scan_dense, scan_dense),
    ],
)
def test_reverse_names(named, general):
    structure = named.__name__.removeprefix("reverse_scan_").replace("dense", "dense3")
    factor, term, initial = problem(structure, 9, 3)
    for method in METHODS:
        got = named(factor, term, initial=initial, method=method)
        close(got, expected(structure, 9, 3, True, True))
        np.testing.assert_array_equal(
            got, general(factor, term, initial=initial, reverse=True, method=method)
        )
    assert not np.allclose(got, general(factor, term, initial=initial))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_time_on_any_axis(lib, axis, reverse):
    factor, term, _ = problem("diag", 5, 7, b=6)
    initial = np.random.default_rng(1).normal(size=np.delete(term.shape, axis))
    for scan, kind in ((scan_diag, "diag"), (scan_max_plus, "max_plus")):
        want = walk(STEPS[kind], factor, term, initial, reverse, axis)
        for method in METHODS:
            got = scan(
                *map(lib.array, (factor, term)),
                initial=lib.array(initial),
                axis=axis,
                reverse=reverse,
                method=method,
            )
            close(lib.numpy(got), want)


@pytest.mark.parametrize(
    "shape", [(7, 3), (1, 7, 3), (2, 7, 1), (1, 7, 1), (2, 1, 3), (1, 1, 3), (3,), (), (1, 1, 1)]
)
def test_jac_broadcasts_to_residual(lib, shape):
    rng = np.random.default_rng(2)
    jac, residual, initial = rng.normal(size=shape), rng.normal(size=(2, 7, 3)), rng.normal(size=3)
    full = np.broadcast_to(jac, residual.shape)
    for reverse in (False, True):
        want = walk(STEPS["diag"], full, residual, np.broadcast_to(initial, (2, 3)), reverse)
        for method in METHODS:
            got = scan_diag(
                lib.array(jac),
                lib.array(residual),
                initial=lib.array(initial),
                reverse=reverse,
                method=method,
            )
            close(lib.numpy(got), want)


def test_adjoint_by_shifting():
    """The adjoint's J_{t+1} is had by moving jac down by one step, as the documentation says."""
    factor, term, _ = problem("diag", 33, 3)
    cotangent = np.random.default_rng(3).normal(size=term.shape)
    moved = np.concatenate(
        [factor[:, 1:], np.full_like(factor[:, :1], np.nan)], axis=1
    )  # the last one is not read
    by_scan = scan_diag(moved, cotangent, reverse=True)
    tangent = np.random.default_rng(4).normal(size=term.shape)
    pushed = scan_diag(factor, tangent)
    np.testing.assert_allclose(np.sum(by_scan * tangent), np.sum(cotangent * pushed), rtol=1e-12)


# --- the generic scan ---------------------------------------------------------------------------------------


def join_matrices(xp):
    return lambda left, right: (xp.matmul(left[0], right[0]),)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_generic_scan_of_an_operation_that_does_not_commute(lib, reverse):
    """Products of matrices in the order of the walk, and a free axis before time."""
    for t in LENGTHS[:-1]:
        m = np.random.default_rng(t).normal(size=(2, t, 3, 3)) / 1.5
        want = np.zeros_like(m)
        gathered = None
        for i in reversed(range(t)) if reverse else range(t):
            gathered = m[:, i] if gathered is None else gathered @ m[:, i]
            want[:, i] = gathered
        (got,) = associative_scan(join_matrices(lib.xp), (lib.array(m),), axis=1, reverse=reverse)
        np.testing.assert_allclose(lib.numpy(got), want, rtol=1e-9, atol=1e-12, err_msg=f"T={t}")


def test_generic_scan_does_linear_work():
    """Fewer than two combinations an element, whatever T, and about two rounds of calls per doubling."""
    for t in (1, 2, 3, 64, 65, 1000, 1023):
        lengths = []

        def add(left, right, lengths=lengths):
            lengths.append(left[0].shape[0])
            return (left[0] + right[0],)

        (got,) = associative_scan(add, (np.ones(t),), axis=0)
        np.testing.assert_array_equal(got, np.arange(1.0, t + 1))
        assert sum(lengths) <= 2 * t
        assert len(lengths) <= 2 * t.bit_length()


def test_generic_scan_of_arrays_with_different_shapes_and_dtypes():
    flags = np.asarray([False, False, True, False, True])
    values = np.arange(10, dtype=np.int64).reshape(5, 2)

    def restart(left, right):  # a sum that starts anew at every flag
        return left[0] | right[0], np.where(right[0][:, None], right[1], left[1] + right[1])

    for reverse, want in (
        (False, [[0, 1], [2, 4], [4, 5], [10, 12], [8, 9]]),
        (True, [[6, 9], [6, 8], [4, 5], [14, 16], [8, 9]]),
    ):
        seen, sums = associative_scan(restart, (flags, values), axis=0, reverse=reverse)
        assert (seen.dtype, sums.dtype) == (np.bool_, np.int64)
        np.testing.assert_array_equal(sums, want)


def test_generic_scan_refuses():
    def first(left, right):
        return left

    with pytest.raises(ValueError, match="at least one array"):
        associative_scan(first, (), axis=0)
    with pytest.raises(ValueError, match=r"lengths \[3, 4\]"):
        associative_scan(first, (np.ones(3), np.ones(4)), axis=0)
    with pytest.raises(ValueError, match="axis 1 of an array with 1 axes"):
        associative_scan(first, (np.ones((3, 3)), np.ones(3)), axis=1)
    with pytest.raises(ValueError, match="positive number"):
        associative_scan(first, (np.ones((3, 3)), np.ones(3)), axis=-1)
    with pytest.raises(TypeError, match=r"elements\[1\] is a list"):
        associative_scan(first, (np.ones(3), [1.0, 2.0, 3.0]), axis=0)
    kept = np.ones(1)
    (copy,) = associative_scan(first, (kept,), axis=0)
    assert not np.shares_memory(copy, kept)


# --- the collected cases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_o01_operands_are_not_swapped(lib, method):
    for dtype, tol in ((np.float32, 1e-5), (np.float64, 1e-12)):
        for t in lib.some((4, 8, 16, 32, 33, 64, 128, 129, 1024), (4, 8, 33, 64)):
            for d in lib.some((1, 3, 128), (3,)):
                a, b = (np.tile(v.astype(dtype), t // 4 + 1)[None, :t, None].repeat(d, 2) for v in (A4, B4))
                with np.errstate(
                    over="ignore"
                ):  # at T = 1024 the values grow out of float32: infinity, and no NaN
                    got = lib.numpy(scan_diag(lib.array(a), lib.array(b), method=method))
                    want = walk(STEPS["diag"], a.astype("f8"), b.astype("f8"), None, False).astype(dtype)
                if t == 4:
                    np.testing.assert_allclose(got[0, :, 0], [1.0, 0.5, 0.9, 3.8], rtol=tol)
                np.testing.assert_allclose(got, want, rtol=tol, err_msg=f"T={t} D={d}")


def test_o01_swapped_operands_would_be_seen():
    """The same tree with its operands exchanged gives other values: the case above can fail."""

    def swapped(left, right):
        return right[0] * left[0], left[0] * right[1] + left[1]

    wrong = associative_scan(swapped, (A4, B4), axis=0)[1]
    assert np.max(np.abs(wrong - [1.0, 0.5, 0.9, 3.8])) > 0.5


@pytest.mark.parametrize("method", METHODS)
def test_o02_reverse_reads_jac_at_the_same_time(lib, method):
    for t in lib.some((4, 8, 16, 32, 33, 64, 128, 129, 1024), (4, 8, 33, 64)):
        a, b = (np.tile(v, t // 4 + 1)[None, :t, None] for v in (A4, B4))
        got = lib.numpy(scan_diag(lib.array(a), lib.array(b), reverse=True, method=method))
        if t == 4:
            np.testing.assert_allclose(got[0, :, 0], [3.15, 2.15, 2.1, 2.0], rtol=1e-14)
        close(got, walk(STEPS["diag"], a, b, None, True), note=f"T={t}")


def test_o03_odd_lengths_on_every_axis_under_reverse(lib):
    """`db` for a = 1 is the reversed running sum of the cotangent."""
    row = lib.numpy(
        scan_diag(*map(lib.array, (np.ones((2, 9)), np.tile(np.arange(9.0), (2, 1)))), reverse=True)
    )
    np.testing.assert_array_equal(row, [[36, 36, 35, 33, 30, 26, 21, 15, 8]] * 2)
    for t in lib.some(range(1, 41), (1, 2, 3, 9, 21)):
        for axis in (0, 1, 2):
            shape = [2, 2, 2]
            shape[axis] = t
            b = np.arange(float(np.prod(shape))).reshape(shape)
            got = lib.numpy(scan_diag(lib.array(np.ones(shape)), lib.array(b), axis=axis, reverse=True))
            np.testing.assert_array_equal(
                got, np.flip(np.cumsum(np.flip(b, axis), axis), axis), err_msg=f"T={t}"
            )


def test_o03_gradient_by_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed, so it cannot differentiate")
    a = torch.ones(2, 9, dtype=torch.float64)
    b = torch.arange(9.0, dtype=torch.float64).repeat(2, 1).requires_grad_()
    scan_diag(a, b).backward(torch.arange(9.0, dtype=torch.float64).repeat(2, 1))
    np.testing.assert_array_equal(b.grad.numpy(), [[36, 36, 35, 33, 30, 26, 21, 15, 8]] * 2)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_by_torch(structure):
    """Every input's gradient, against central differences."""
    torch = pytest.importorskip("torch", reason="torch is not installed, so it cannot differentiate")
    arrays = [torch.from_numpy(a.copy()).requires_grad_() for a in problem(structure, 5, 2)]
    for reverse in (False, True):

        def run(jac, term, initial, reverse=reverse):
            return SCANS[kind_of(structure)](jac, term, initial=initial, reverse=reverse)

        assert torch.autograd.gradcheck(run, arrays)


@pytest.mark.parametrize("t", [1, 2, 3, 31, 33, 63, 65, 127, 1000, 65535, 65537])
def test_o04_any_length(t):
    for d in (1, 2, 5, 7, 96, 130):
        if t > 1000 and d > 2:
            continue
        factor, term, _ = problem("diag", t, d, b=1)
        for reverse in (False, True):
            close(scan_diag(factor, term, reverse=reverse), walk(STEPS["diag"], factor, term, None, reverse))
    problem.cache_clear()


@pytest.mark.parametrize("method", METHODS)
def test_o05_counting_is_exact_at_every_length(lib, method):
    for t in lib.some((31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 511, 1023, 2049), (31, 33, 64)):
        for d in lib.some((1, 4), (4,)):
            ones = lib.array(np.ones((1, t, d), np.float32))
            count = np.tile(np.arange(1, t + 1, dtype=np.float32)[None, :, None], (1, 1, d))
            for reverse in (False, True):
                got = lib.numpy(scan_diag(ones, ones, reverse=reverse, method=method))
                np.testing.assert_array_equal(
                    got, count[:, ::-1] if reverse else count, err_msg=f"T={t} D={d}"
                )
                assert got.dtype == np.float32


def test_o06_vanishing_products_are_not_divided_by(lib):
    a, b = np.full((1, 64, 1), 1e-3, np.float32), np.ones((1, 64, 1), np.float32)
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        got = lib.numpy(scan_diag(lib.array(a), lib.array(b)))
    np.testing.assert_allclose(got[0, :3, 0], [1.0, 1.001, 1.001001], rtol=1e-6)
    np.testing.assert_allclose(got[0, 3:, 0], 1.001001, rtol=1e-6)


def test_o06_gradients_are_finite():
    torch = pytest.importorskip("torch", reason="torch is not installed, so it cannot differentiate")
    a = torch.full((1, 64, 1), 1e-3).requires_grad_()
    b = torch.ones(1, 64, 1).requires_grad_()
    scan_diag(a, b).sum().backward()
    np.testing.assert_allclose(b.grad.numpy()[0, :-3, 0], 1.001001, rtol=1e-6)
    np.testing.assert_allclose(a.grad.numpy()[0, 5:-5, 0], 1.001001**2, rtol=1e-5)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("scan", [scan_diag, scan_max_plus])
def test_o12_memory_is_a_small_multiple_of_the_input(scan, reverse):
    rng = np.random.default_rng(5)
    factor, term = (rng.uniform(-1.0, 1.0, (65536, 16)).astype(np.float32) for _ in range(2))
    tracemalloc.start()
    try:
        out = scan(factor, term, axis=0, reverse=reverse)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert out.nbytes <= peak  # the measurement saw the arrays
    assert peak <= 2 * (factor.nbytes + term.nbytes)


@pytest.mark.parametrize("method", METHODS)
def test_o41_nan_is_kept_in_its_channel(lib, method):
    for structure in STRUCTURES:
        scan = SCANS[kind_of(structure)]
        for t in (9, 65):
            factor, term, initial = problem(structure, t, 3)
            clean = lib.numpy(
                scan(*map(lib.array, (factor, term)), initial=lib.array(initial), method=method)
            )
            for which in (0, 1):
                poisoned = [factor.copy(), term.copy()]
                poisoned[which][0, 2, ..., 1] = np.nan
                got = lib.numpy(scan(*map(lib.array, poisoned), initial=lib.array(initial), method=method))
                note = f"{structure} T={t}, NaN in {'factor' if which == 0 else 'term'}"
                np.testing.assert_array_equal(got[:, :2], clean[:, :2], err_msg=note)
                np.testing.assert_array_equal(got[1], clean[1], err_msg=note)
                mine = got[0, 2:] if structure == "dense3" else got[0, 2:, ..., 1]
                assert np.all(np.any(np.isnan(mine.reshape(t - 2, -1)), axis=1)), note
                assert np.all(np.isnan(mine[1:])), note  # coupled slots all have it one step later
                if structure != "dense3":
                    np.testing.assert_array_equal(got[..., [0, 2]], clean[..., [0, 2]], err_msg=note)


@pytest.mark.parametrize("method", METHODS)
def test_o41_nan_in_the_initial_state(lib, method):
    for structure in ("diag", "max_plus"):
        factor, term, initial = problem(structure, 33, 3)
        initial = initial.copy()
        initial[1, 2] = np.nan
        start = lib.array(initial)
        got = lib.numpy(SCANS[structure](*map(lib.array, (factor, term)), initial=start, method=method))
        want = np.zeros(got.shape, bool)
        want[1, :, 2] = True
        np.testing.assert_array_equal(np.isnan(got), want)


@pytest.mark.parametrize("method", METHODS)
def test_o41_infinity_stays_infinity(lib, method):
    for t in lib.some((5, 33, 200), (5, 33)):
        a, b = np.full((1, t, 2), 0.5), np.ones((1, t, 2))
        b[0, 2, 0] = np.inf
        got = lib.numpy(scan_diag(lib.array(a), lib.array(b), method=method))
        assert np.all(got[0, 2:, 0] == np.inf)
        assert np.all(np.isfinite(got[0, :2])) and np.all(np.isfinite(got[..., 1]))
        got = lib.numpy(scan_max_plus(lib.array(a), lib.array(b), method=method))
        assert np.all(got[0, 2:, 0] == np.inf) and np.all(np.isfinite(got[..., 1]))
        got = lib.numpy(
            scan_diag(
                lib.array(a),
                lib.array(np.ones_like(b)),
                method=method,
                initial=lib.array(np.asarray([[np.inf, 1.0]])),
            )
        )
        assert np.all(got[0, :, 0] == np.inf) and np.all(np.isfinite(got[..., 1]))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_the_first_factor_is_not_read_without_an_initial_state(lib, method, reverse):
    for structure in STRUCTURES:
        factor, term, _ = problem(structure, 9, 3)
        for junk in (np.inf, np.nan):
            spoiled = factor.copy()
            spoiled[:, 8 if reverse else 0] = junk
            got = SCANS[kind_of(structure)](*map(lib.array, (spoiled, term)), reverse=reverse, method=method)
            close(lib.numpy(got), expected(structure, 9, 3, False, reverse), note=structure)


@pytest.mark.parametrize("method", METHODS)
def test_a_zero_factor_forgets(lib, method):
    """After a factor of zero the states are those of a sequence begun there, whatever came before."""
    for structure in ("diag", "block2", "dense3"):
        factor, term, initial = (a.copy() for a in problem(structure, 33, 3))
        factor[:, 13] = 0.0
        term[:, :13] *= 1e100
        run = functools.partial(SCANS[kind_of(structure)], method=method)
        got = lib.numpy(run(*map(lib.array, (factor, term)), initial=lib.array(initial)))
        assert np.max(np.abs(got[:, :13])) > 1e99
        alone = walk(STEPS[kind_of(structure)], factor[:, 13:], term[:, 13:], None, False)
        close(got[:, 13:], alone, note=structure)


@pytest.mark.parametrize("method", METHODS)
def test_o52_zero_size_axes(lib, method):
    for b, t, d in ((2, 0, 4), (0, 5, 4), (0, 0, 4), (2, 5, 0)):

        def zeros(*shape):
            return lib.array(np.zeros(shape, np.float32))

        for reverse in (False, True):
            for start in (False, True):
                options = {"reverse": reverse, "method": method}
                for scan, factor, shape in (
                    (scan_diag, (b, t, d), (b, t, d)),
                    (scan_max_plus, (b, t, d), (b, t, d)),
                    (scan_block, (b, t, 3, 3, d), (b, t, 3, d)),
                    (scan_dense, (b, t, d, d), (b, t, d)),
                ):
                    initial = zeros(shape[0], *shape[2:]) if start else None
                    got = lib.numpy(scan(zeros(*factor), zeros(*shape), initial=initial, **options))
                    assert got.shape == shape and got.dtype == np.float32


def test_o63_operands_of_different_dtype(lib):
    rng = np.random.default_rng(6)
    pairs = [
        ("f4", "f4", "f4"),
        ("f4", "f8", "f8"),
        ("f8", "f4", "f8"),
        ("c8", "f4", "c8"),
        ("c16", "f8", "c16"),
    ]
    if lib.name != "array_api_strict":
        pairs += [("f2", "f2", "f2"), ("f2", "f4", "f4")]
    t = lib.some(33, 5)
    for left, right, result in pairs:
        for d in (1, 5):
            a = (
                rng.uniform(-1, 1, (2, t, d)) + (1j * rng.uniform(-1, 1, (2, t, d)) if left[0] == "c" else 0)
            ) / 2
            a, b = a.astype(left), rng.uniform(-1, 1, (2, t, d)).astype(right)
            wide = "c16" if left[0] == "c" else "f8"
            want = walk(STEPS["diag"], a.astype(wide), b.astype(wide), None, False)
            got = lib.numpy(scan_diag(lib.array(a), lib.array(b)))
            close(got, want.astype(result), tol={"f2": 1e-3, "f8": 1e-12, "c16": 1e-12}.get(result, 1e-6))


def bfloat16_arrays(name, *arrays):
    """The arrays in bfloat16, and a function that reads a result back as float32."""
    if name == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        return (
            [torch.from_numpy(a).to(torch.bfloat16) for a in arrays],
            torch.bfloat16,
            lambda y: y.float().numpy(),
        )
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy and JAX have bfloat16 from ml_dtypes")
    if name == "jax":
        jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
        return (
            [jnp.asarray(a, dtype=jnp.bfloat16) for a in arrays],
            jnp.bfloat16,
            lambda y: np.asarray(y, np.float32),
        )
    return [a.astype(ml_dtypes.bfloat16) for a in arrays], ml_dtypes.bfloat16, lambda y: y.astype(np.float32)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_o63_half_precision_sums_in_float32(name, method):
    """A running sum of ones stops at 256 when it is summed in bfloat16; here each count is rounded once."""
    t = 300
    counts = np.arange(1, t + 1, dtype=np.float32).reshape(1, t, 1)
    (a, want), dtype, read = bfloat16_arrays(name, np.ones_like(counts), counts)
    assert not np.array_equal(read(want), counts)
    for scan, factor, term in (
        (scan_diag, a, a),
        (scan_max_plus, a, a),
        (scan_block, a[:, :, None, None], a[:, :, None]),
        (scan_dense, a[..., None], a),
    ):
        run = functools.partial(scan, method=method)
        if name == "jax" and method == "assoc":
            run = importlib.import_module("jax").jit(run)  # one compilation, not one for every operation
        out = run(factor, term)
        assert out.dtype == dtype
        np.testing.assert_array_equal(read(out).reshape(-1), read(want).reshape(-1))


def test_o63_float32_jacobian_with_bfloat16_residual():
    for name in ("numpy", "torch", "jax"):
        values = np.full((1, 9, 1), 0.5, np.float32)
        (half,), _, _ = bfloat16_arrays(name, values)
        single = Library(name).array(values)
        got = np.asarray(scan_diag(single, half))
        assert got.dtype == np.float32
        np.testing.assert_allclose(got[0, :, 0], 1 - 0.5 ** np.arange(1, 10), rtol=1e-6)


# --- max-plus -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_max_plus_with_infinities_makes_no_nan(lib, method, reverse):
    """All triples of {-inf, -1, 0, 2, inf} among shifts and floors, against a loop in which -inf absorbs."""

    def step(shift, state, floor):
        with np.errstate(invalid="ignore"):
            moved = np.where((shift == -np.inf) | (state == -np.inf), -np.inf, shift + state)
        return np.maximum(moved, floor)

    values = np.asarray([-np.inf, -1.0, 0.0, 2.0, np.inf])
    rng = np.random.default_rng(7)
    for t in lib.some((2, 3, 8, 33), (2, 8)):
        shift, floor = rng.choice(values, (2, 1, t, 400))
        initial = rng.choice(values, (1, 400))
        for start in (None, initial):
            want = walk(step, shift, floor, start, reverse)
            got = scan_max_plus(
                *map(lib.array, (shift, floor)), initial=lib.array(start), reverse=reverse, method=method
            )
            np.testing.assert_array_equal(lib.numpy(got), want)
            assert not np.any(np.isnan(want))


def test_max_plus_equals_the_ieee_loop_wherever_that_makes_no_nan():
    values = np.asarray([-np.inf, -1.0, 0.0, 2.0, np.inf])
    shift, floor = np.random.default_rng(8).choice(values, (2, 1, 17, 2000))
    with np.errstate(invalid="ignore"):
        plain = walk(STEPS["max_plus"], shift, floor, np.full((1, 2000), -np.inf), False)
    fine = ~np.any(np.isnan(plain), axis=1)[0]
    assert 50 < np.sum(fine) < 1950
    np.testing.assert_array_equal(scan_max_plus(shift, floor)[..., fine], plain[..., fine])


def test_max_plus_initial_none_is_minus_infinity():
    shift, floor, _ = problem("max_plus", 33, 3)
    for reverse in (False, True):
        for method in METHODS:
            run = functools.partial(scan_max_plus, shift, floor, reverse=reverse, method=method)
            np.testing.assert_array_equal(run(), run(initial=np.full((2, 3), -np.inf)))


# --- laws ---------------------------------------------------------------------------------------------------


cases = st.tuples(
    st.sampled_from(STRUCTURES),
    st.integers(1, 40),
    st.integers(0, 10**6),
    st.booleans(),
    st.sampled_from(METHODS),
)


@settings(max_examples=60, deadline=None)
@given(cases, st.data())
def test_law_a_split_with_the_state_carried_equals_one_scan(case, data):
    structure, t, seed, reverse, method = case
    cut = data.draw(st.integers(0, t))
    factor, term, initial = problem.__wrapped__(structure, t, 2, seed)
    run = functools.partial(SCANS[kind_of(structure)], reverse=reverse, method=method)
    whole = run(factor, term, initial=initial)
    if reverse:
        late = run(factor[:, cut:], term[:, cut:], initial=initial)
        early = run(factor[:, :cut], term[:, :cut], initial=late[:, 0] if cut < t else initial)
    else:
        early = run(factor[:, :cut], term[:, :cut], initial=initial)
        late = run(factor[:, cut:], term[:, cut:], initial=early[:, -1] if cut > 0 else initial)
    close(np.concatenate([early, late], axis=1), whole)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_law_reversing_time_reverses_the_scan(case):
    structure, t, seed, _, method = case
    factor, term, initial = problem.__wrapped__(structure, t, 2, seed)
    run = functools.partial(SCANS[kind_of(structure)], initial=initial, method=method)
    backwards = run(np.flip(factor, 1), np.flip(term, 1))
    np.testing.assert_array_equal(run(factor, term, reverse=True), np.flip(backwards, 1))


@settings(max_examples=60, deadline=None)
@given(cases, st.floats(-3, 3), st.floats(-3, 3))
def test_law_linear_in_residual_and_initial(case, p, q):
    structure, t, seed, reverse, method = case
    factor, term, initial = problem.__wrapped__(structure, t, 2, seed)
    rng = np.random.default_rng(seed)
    other, other_initial = rng.normal(size=term.shape), rng.normal(size=initial.shape)
    if structure == "max_plus":  # linear there means: commutes with max and with adding a constant
        run = functools.partial(scan_max_plus, factor, reverse=reverse, method=method)
        joined = run(np.maximum(term + p, other + q), initial=np.maximum(initial + p, other_initial + q))
        apart = np.maximum(run(term, initial=initial) + p, run(other, initial=other_initial) + q)
        np.testing.assert_allclose(joined, apart, rtol=0, atol=1e-12)
        return
    run = functools.partial(SCANS[kind_of(structure)], factor, reverse=reverse, method=method)
    first, second = run(term, initial=initial), run(other, initial=other_initial)
    joined = run(p * term + q * other, initial=p * initial + q * other_initial)
    scale = 1 + np.max(np.abs(first)) + np.max(np.abs(second))
    np.testing.assert_allclose(joined, p * first + q * second, rtol=0, atol=1e-11 * scale)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(0, 10**6), st.booleans())
def test_law_all_structures_say_the_same(t, seed, reverse):
    """A block scan is a dense scan channel by channel, and a diagonal one is a block scan of one slot."""
    factor, term, initial = problem.__wrapped__("block3", t, 2, seed)
    block = scan_block(factor, term, initial=initial, reverse=reverse)
    for d in range(2):
        dense = scan_dense(factor[..., d], term[..., d], initial=initial[..., d], reverse=reverse)
        close(dense, block[..., d])
    one = scan_block(factor[:, :, :1, :1], term[:, :, :1], initial=initial[:, :1], reverse=reverse)
    diag = scan_diag(factor[:, :, 0, 0], term[:, :, 0], initial=initial[:, 0], reverse=reverse)
    close(one[:, :, 0], diag)


# --- what is refused, and what is left alone ----------------------------------------------------------------


def test_shapes_that_do_not_fit_are_named():
    z = np.zeros
    for call, words in (
        (lambda: scan_diag(z((2, 5, 3)), z((2, 4, 3))), ["jac", "(2, 5, 3)", "(2, 4, 3)"]),
        (lambda: scan_diag(z((2, 4, 3)), z((1, 4, 3))), ["(2, 4, 3)", "(1, 4, 3)"]),
        (lambda: scan_diag(z((1, 1, 4, 3)), z((1, 4, 3))), ["(1, 1, 4, 3)", "(1, 4, 3)"]),
        (lambda: scan_diag(z((2, 4, 3)), z((2, 4, 3)), initial=z((2, 4))), ["initial", "(2, 3)", "(2, 4)"]),
        (lambda: scan_diag(z((4, 3)), z((4, 3)), axis=2), ["axis 2", "2 axes"]),
        (lambda: scan_block(z((2, 5, 2, 3, 4)), z((2, 5, 2, 4))), ["(2, 5, 2, 3, 4)", "(2, 5, 2, 4)"]),
        (lambda: scan_block(z((2, 5, 2, 2, 4)), z((2, 5, 3, 4))), ["(2, 5, 2, 2, 4)", "(2, 5, 3, 4)"]),
        (lambda: scan_block2(z((2, 5, 3, 3, 4)), z((2, 5, 3, 4))), ["scan_block2", "(B, T, 2, 2, D)"]),
        (lambda: scan_block4(z((2, 5, 2, 2, 4)), z((2, 5, 2, 4))), ["scan_block4", "(B, T, 4, 4, D)"]),
        (lambda: scan_block(z((2, 5, 2, 2, 4)), z((2, 5, 2, 4)), initial=z((2, 4))), ["(2, 2, 4)", "(2, 4)"]),
        (lambda: scan_dense(z((2, 5, 3)), z((2, 5, 3))), ["(B, T, N, N)", "(2, 5, 3)"]),
        (lambda: scan_dense(z((2, 5, 3, 4)), z((2, 5, 3))), ["(2, 5, 3, 4)", "(2, 5, 3)"]),
        (lambda: scan_dense(z((2, 5, 3, 3)), z((2, 5, 3)), initial=z((3,))), ["(2, 3)", "(3,)"]),
        (lambda: scan_max_plus(z((2, 5, 3)), z((5, 3))), ["shift (2, 5, 3)", "floor (5, 3)"]),
        (lambda: scan_max_plus(z((2, 5, 3)), z((2, 5, 3)), initial=z((5, 3))), ["(2, 3)", "(5, 3)"]),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        for word in words:
            assert word in str(caught.value)


def test_integers_are_refused(lib):
    floats, ints = lib.array(np.ones((2, 4, 3))), lib.array(np.ones((2, 4, 3), np.int64))
    for scan in (scan_diag, scan_max_plus):
        for jac, residual, initial in (
            (ints, floats, None),
            (floats, ints, None),
            (ints, ints, None),
            (floats, floats, ints[:, 0, :]),
        ):
            with pytest.raises(TypeError, match="int64"):
                scan(jac, residual, initial=initial)
    with pytest.raises(TypeError, match="bool"):
        scan_dense(lib.array(np.ones((2, 4, 3, 3), bool)), floats)


def test_complex_where_it_has_no_meaning():
    real, imaginary = np.ones((1, 4, 3)), np.ones((1, 4, 3), complex)
    with pytest.raises(TypeError, match="real floating"):
        scan_max_plus(imaginary, imaginary)
    with pytest.raises(TypeError, match="real initial"):
        scan_diag(real, real, initial=imaginary[:, 0])
    assert scan_diag(real, imaginary).dtype == complex


def test_mixed_libraries_are_refused(lib):
    strict = pytest.importorskip("array_api_strict", reason="array_api_strict is not installed")
    mine = lib.array(np.ones((2, 4, 3)))
    other = np.ones((2, 4, 3)) if lib.name == "array_api_strict" else strict.asarray(np.ones((2, 4, 3)))
    foreign = "numpy" if lib.name == "array_api_strict" else "array_api_strict"
    for call in (
        lambda: scan_diag(mine, other),
        lambda: scan_diag(other, mine),
        lambda: scan_diag(mine, mine, initial=other[:, 0, :]),
        lambda: scan_max_plus(mine, other),
        lambda: associative_scan(lambda left, right: left, (mine, other), axis=1),
    ):
        with pytest.raises(TypeError, match="one library") as caught:
            call()
        assert foreign in str(caught.value) and lib.name in str(caught.value)
    with pytest.raises(TypeError, match="residual is a list"):
        scan_diag(mine, [[[1.0]]])
    with pytest.raises(TypeError, match="initial is a float"):
        scan_diag(mine, mine, initial=0.0)


def test_unknown_method_is_refused():
    ones = np.ones((1, 4, 3))
    for call in (
        lambda: scan_diag(ones, ones, method="blelloch"),
        lambda: scan_max_plus(ones, ones, method="blelloch"),
        lambda: scan_block(ones[..., None, None], ones[..., None], method="blelloch"),
        lambda: scan_dense(ones[..., None], ones, method="blelloch"),
    ):
        with pytest.raises(ValueError, match=r"'assoc'.*'seq'.*'blelloch'"):
            call()


def test_initial_is_cast_and_does_not_widen_the_result(lib):
    factor, term, initial = problem("diag", 9, 3)
    got = scan_diag(*(lib.array(a.astype("f4")) for a in (factor, term)), initial=lib.array(initial))
    close(lib.numpy(got), expected("diag", 9, 3, True, False).astype("f4"), tol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_results_do_not_share_memory_with_inputs(structure, method):
    for t in (1, 2, 3):
        arrays = problem(structure, t, 3)
        for reverse in (False, True):
            for initial in (None, arrays[2]):
                out = SCANS[kind_of(structure)](*arrays[:2], initial=initial, reverse=reverse, method=method)
                assert not any(np.shares_memory(out, array) for array in arrays)


def test_finite_data_raises_no_warning():
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for structure in STRUCTURES:
            factor, term, initial = problem(structure, 33, 3)
            for method in METHODS:
                out = SCANS[kind_of(structure)](factor, term, initial=initial, method=method)
                assert np.all(np.isfinite(out))
        shift = np.asarray([0.0, np.inf, -np.inf, np.inf])
        out = scan_max_plus(shift, np.full(4, -np.inf), initial=np.asarray(1.0), axis=0)
        np.testing.assert_array_equal(out, [1.0, np.inf, -np.inf, -np.inf])


@pytest.mark.parametrize("module", ["affine", "associative", "max_plus"])
def test_examples_in_the_documentation(module):
    result = doctest.testmod(importlib.import_module(f"pararnn.scans.{module}"))
    assert result.attempted > 0 and result.failed == 0


def test_everything_public_is_documented_with_an_example():
    for name in scans.__all__:
        assert ">>> " in getattr(scans, name).__doc__, name
