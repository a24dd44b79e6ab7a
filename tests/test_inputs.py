"""Bad input gets one clear error before any work; good input, however it lies in memory, is never written to."""

from __future__ import annotations

import inspect
import warnings
from concurrent.futures import ThreadPoolExecutor

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
    explain,
    newton_apply,
    newton_vjp,
    sequential_apply,
    verify_agreement,
)
from support import CELLS, error_of, problem, solve, start_for, strong

ENTRIES = (newton_apply, newton_vjp, sequential_apply, explain, verify_agreement)
SOLVERS = (newton_apply, newton_vjp)
WAYS = {
    "auto": NewtonConfig(),
    "segments": NewtonConfig(segment_len=6),
    "exact": NewtonConfig(segment_len=6, exact=True, warmup=0),
    "windows": NewtonConfig(segment_len=4, chunk_len=13),
    "pinned": NewtonConfig(max_iters=4, residual_fail=None, residual_atol=None),
    "pinned segments": NewtonConfig(max_iters=2, segment_len=6, residual_fail=None),
    "array": NewtonConfig(segment_len=6, scan_backend="array"),
}
pytestmark = pytest.mark.filterwarnings("ignore::pararnn.NotConvergedWarning")


class Untouched(ChannelwiseCell):
    """A cell that must not run: input is checked before any work."""

    slots, gates, params = ("h",), ("u",), ("a",)

    def step(self, xp, h, u, a):
        raise AssertionError("work was done before the input was checked")


@pytest.fixture
def cell():
    return Untouched(3, 5, seed=0)


def x_of(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


# --- x ------


@pytest.mark.parametrize("run", ENTRIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("x", "error", "sentence"),
    [
        (x_of(4, 3), ValueError, r"3 axes \(B, T, I\).*\(4, 3\)"),
        (x_of(3), ValueError, r"3 axes"),
        (x_of(1, 2, 4, 3), ValueError, r"3 axes"),
        (np.float32(1.0).reshape(()), ValueError, r"3 axes"),
        (x_of(2, 4, 2), ValueError, r"takes 3 features.*\(2, 4, 2\)"),
        (x_of(2, 4, 0), ValueError, r"takes 3 features.*\(2, 4, 0\)"),
        (x_of(2, 4, 3, dtype=np.int64), TypeError, r"floating.*int64"),
        (x_of(2, 4, 3, dtype=np.uint8), TypeError, r"floating.*uint8"),
        (x_of(2, 4, 3, dtype=bool), TypeError, r"floating.*bool"),
        (x_of(2, 4, 3, dtype=np.complex64), TypeError, r"floating.*complex64"),
        (x_of(2, 4, 3, dtype=object), TypeError, r"floating.*object"),
        (x_of(2, 4, 3, dtype=np.float64), TypeError, r"float64 but the cell is float32.*to\(dtype"),
        (x_of(2, 4, 3, dtype=np.float16), TypeError, r"float16 but the cell is float32"),
        ([[[1.0, 2.0, 3.0]]], TypeError, r"x must be an array.*list"),
        (None, TypeError, r"x must be an array.*NoneType"),
        (3.0, TypeError, r"x must be an array.*float"),
    ],
    ids=lambda v: str(getattr(v, "shape", "")) + str(getattr(v, "dtype", "")) or None,
)
def test_x_of_another_rank_width_or_dtype_is_refused(cell, run, x, error, sentence):
    with pytest.raises(error, match=sentence):
        run(cell, x)


@pytest.mark.parametrize("run", ENTRIES, ids=lambda f: f.__name__)
def test_what_is_no_cell_is_refused(run):
    for not_a_cell in ("gru", None, ParaGRU, lambda x: x, {"slots": ("h",)}):
        with pytest.raises(TypeError, match="ChannelwiseCell"):
            run(not_a_cell, x_of(1, 4, 3))


@pytest.mark.parametrize("run", [newton_apply, newton_vjp, explain], ids=lambda f: f.__name__)
def test_a_config_of_another_type_is_refused(cell, run):
    for config in ({"max_iters": 3}, 3, NewtonConfig, "auto"):
        with pytest.raises(TypeError, match="NewtonConfig"):
            run(cell, x_of(1, 4, 3), config)


@pytest.mark.parametrize("run", SOLVERS, ids=lambda f: f.__name__)
def test_stats_of_another_type_are_refused_before_any_work(cell, run):
    with pytest.raises(TypeError, match="NewtonStats"):
        run(cell, x_of(1, 4, 3), stats={})


# --- h0 and guess ------


@pytest.mark.parametrize("run", ENTRIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", CELLS)
def test_h0_of_another_shape_or_dtype_is_refused(run, kind):
    cell, x = problem(kind, 4)
    good = np.zeros((2, *cell.state_shape), np.float32)
    wrong = [
        good[0],
        good[:1],
        good[..., :-1],
        good[:, None],
        np.zeros((2, 3, 5, 5), np.float32),
        np.float32(0).reshape(()),
    ]
    for h0 in wrong:
        with pytest.raises(ValueError, match=r"h0 must have shape"):
            run(cell, x, h0=h0)
    for h0 in (good.astype(int), good.astype(bool), good.astype(complex)):
        with pytest.raises(TypeError, match=r"h0 must be floating"):
            run(cell, x, h0=h0)
    with pytest.raises(TypeError, match=r"h0 must be an array"):
        run(cell, x, h0=0.0)
    run(cell, x, h0=good.astype(np.float64))  # cast to the dtype of the computation, as documented


@pytest.mark.parametrize("run", ENTRIES, ids=lambda f: f.__name__)
def test_an_sLSTM_start_that_no_run_reaches_is_refused(run):
    cell, x = problem(ParaSLSTM, 4)
    for c, n in ((0.5, -0.1), (0.5, 0.0), (0.0, -1.0)):
        h0 = np.zeros((2, 4, 5), np.float32)
        h0[1, 0, 2], h0[1, 1, 2] = c, n
        with pytest.raises(ValueError, match=r"n >= 0"):
            run(cell, x, h0=h0)


@pytest.mark.parametrize("kind", CELLS)
def test_a_guess_of_another_shape_or_dtype_is_refused_and_a_good_one_changes_no_result(kind):
    cell, x = problem(kind, 30, dtype=np.float64)
    wanted = sequential_apply(cell, x)
    for guess in (wanted[:, :-1], wanted[:1], wanted[..., :3], wanted[:, 0]):
        with pytest.raises(ValueError, match="guess must have shape"):
            newton_apply(cell, x, guess=guess)
    with pytest.raises(TypeError, match="guess must be floating"):
        newton_apply(cell, x, guess=wanted.astype(int))
    wild = np.random.default_rng(0).standard_normal(wanted.shape)
    if kind is ParaSLSTM:
        wild[:, :, 1] = np.abs(wild[:, :, 1])
    for guess in (wanted, wild, 0.0 * wanted, wanted.astype(np.float32)):
        for config in (
            NewtonConfig(segment_len=7),
            NewtonConfig(segment_len=7, chunk_len=15),
            NewtonConfig(segment_len=30),
        ):
            got, stats = solve(cell, x, config, guess=guess)
            assert stats.converged and error_of(cell, got, wanted) < 1e-10
    _, far = solve(cell, x, NewtonConfig(segment_len=7), guess=wild)
    _, near = solve(cell, x, NewtonConfig(segment_len=7), guess=wanted)
    assert near.passes < far.passes, "a guess at the solution must save passes"


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_a_guess_that_is_no_number_costs_time_and_nothing_else(kind, bad):
    cell, x = problem(kind, 60, dtype=np.float64)
    wanted = sequential_apply(cell, x)
    for more in ({}, {"exact": True}, {"chunk_len": 20}):
        config = NewtonConfig(segment_len=7, **more)
        with np.errstate(all="raise"):
            got, stats = solve(cell, x, config, guess=np.full_like(wanted, bad))
        assert stats.converged and error_of(cell, got, wanted) < 1e-10


# --- libraries and devices ------


def test_arrays_of_two_libraries_are_refused_by_name():
    torch = pytest.importorskip("torch")
    strict = pytest.importorskip("array_api_strict")
    cell, x = Untouched(3, 5, seed=0), x_of(2, 4, 3)
    for run in ENTRIES:
        with pytest.raises(TypeError, match=r"x is torch.*numpy"):
            run(cell, torch.ones(2, 4, 3))
        with pytest.raises(TypeError, match=r"h0 is torch"):
            run(cell, x, h0=torch.zeros(2, 5))
        with pytest.raises(TypeError, match=r"x is array_api_strict"):
            run(cell, strict.asarray(x))
    with pytest.raises(TypeError, match=r"guess is torch"):
        newton_apply(cell, x, guess=torch.zeros(2, 4, 5))
    with pytest.raises(TypeError, match="torch"):
        cell.replace(a=torch.zeros(5))


def test_arrays_on_two_devices_are_refused():
    torch = pytest.importorskip("torch")
    strict = pytest.importorskip("array_api_strict")
    cell = Untouched(3, 5, seed=0, xp=torch)
    for run in ENTRIES:
        with pytest.raises(ValueError, match=r"one device.*x on meta"):
            run(cell, torch.ones(2, 4, 3, device="meta"))
        with pytest.raises(ValueError, match=r"one device.*h0 on meta"):
            run(cell, torch.ones(2, 4, 3), h0=torch.zeros(2, 5, device="meta"))
    cell, elsewhere = Untouched(3, 5, seed=0, xp=strict), strict.Device("device1")
    with pytest.raises(ValueError, match="one device"):
        newton_apply(cell, strict.ones((2, 4, 3), dtype=strict.float32, device=elsewhere))


# --- cotangents ------


@pytest.mark.parametrize("kind", CELLS)
def test_a_cotangent_of_another_shape_kind_or_library_is_refused(kind):
    cell, x = problem(kind, 6)
    states, pullback = newton_vjp(cell, x)
    with pytest.raises(TypeError, match="give the states' cotangent"):
        pullback()
    for wrong in (states[:1], states[:, :-1], states[..., :-1], states[:, 0]):
        with pytest.raises(ValueError, match="cotangent must have shape"):
            pullback(wrong)
    for wrong in (states, states[:1, 0], states[:, 0, ..., :-1]):
        with pytest.raises(ValueError, match="last must have shape"):
            pullback(last=wrong)
    with pytest.raises(TypeError, match="cotangent must be an array"):
        pullback([1.0])
    with pytest.raises(TypeError, match="cotangent must be floating"):
        pullback(states.astype(np.complex64))
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="torch"):
        pullback(torch.ones(states.shape))


# --- what is given stays as it was ------


def frozen(array):
    array = np.array(array)
    array.setflags(write=False)
    return array


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("way", WAYS)
def test_no_array_of_the_caller_is_written_to_or_handed_back(kind, way):
    cell, x = problem(kind, 40)
    arrays = {name: frozen(a) for name, a in cell.arrays.items()}
    cell = cell.replace(**{name.replace(".", "_"): a for name, a in arrays.items()})
    x, h0 = frozen(x), frozen(start_for(cell, 2))
    guess = frozen(sequential_apply(cell, x, h0=h0))
    given = {"x": x, "h0": h0, "guess": guess, **cell.arrays}
    before = {name: a.copy() for name, a in given.items()}
    states, _ = solve(cell, x, WAYS[way], h0=h0, guess=guess)
    again, pullback = newton_vjp(cell, x, WAYS[way], h0)
    cotangent, last = frozen(np.ones_like(again)), frozen(np.ones_like(h0))
    kept = again.copy()
    grads = pullback(cotangent, last=last)
    loop = sequential_apply(cell, x, h0=h0)
    for name, a in given.items():
        np.testing.assert_array_equal(a, before[name], err_msg=name)
    np.testing.assert_array_equal(again, kept)
    np.testing.assert_array_equal(cotangent, 1.0)
    made = {"states": states, "loop": loop, "x": grads.x, "h0": grads.h0, **grads.params}
    for name, a in made.items():
        assert a.flags.writeable, name
        for other in (*given.values(), cotangent, last):
            assert not np.shares_memory(a, other), name


@pytest.mark.parametrize("kind", CELLS)
def test_results_of_two_calls_are_their_own(kind):
    cell, x = problem(kind, 40)
    for config in WAYS.values():
        first = newton_apply(cell, x, config)
        kept = first.copy()
        second = newton_apply(cell, 2.0 * x, config)
        assert not np.shares_memory(first, second)
        np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize("kind", CELLS)
def test_the_pullback_may_be_called_again_and_forgets_nothing(kind):
    cell, x = problem(kind, 40)
    states, pullback = newton_vjp(cell, x, NewtonConfig(segment_len=9))
    ones = np.ones_like(states)
    first, other, second = pullback(ones), pullback(2.0 * ones), pullback(ones)
    np.testing.assert_array_equal(first.x, second.x)
    np.testing.assert_allclose(other.x, 2.0 * first.x, rtol=1e-5, atol=1e-6)


# --- dtypes ------


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("way", WAYS)
def test_half_is_stored_in_half_and_computed_in_float32(kind, way):
    cell, x = problem(kind, 40, dtype=np.float16)
    h0, config = start_for(cell, 2), WAYS[way].replace(tol=1e-5)
    states, pullback = newton_vjp(cell, x, config, h0)
    assert states.dtype == np.float16 and sequential_apply(cell, x).dtype == np.float16
    wide, wide_x = cell.to(dtype=np.float32), x.astype(np.float32)
    same = newton_apply(wide, wide_x, config, h0=h0.astype(np.float32))
    np.testing.assert_array_equal(states, same.astype(np.float16))
    loop = sequential_apply(wide, wide_x, h0=h0.astype(np.float32))
    np.testing.assert_array_equal(sequential_apply(cell, x, h0=h0), loop.astype(np.float16))
    grads = pullback(np.ones_like(states))
    assert {a.dtype for a in (grads.x, grads.h0, *grads.params.values())} == {np.dtype(np.float16)}
    _, wide_pullback = newton_vjp(wide, wide_x, h0=h0.astype(np.float32))
    reference = wide_pullback(np.ones(states.shape, np.float32))
    for name, value in reference.params.items():
        scale = np.abs(value).max() or 1.0
        assert np.abs(grads.params[name] - value).max() < 1e-2 * scale, name


def test_O53_numpy_scalars_as_options_do_not_promote():
    for kind in CELLS:
        cell, x = problem(kind, 40)
        more = {"residual_fail": np.float64(1.0)}
        for config in (
            NewtonConfig(tol=np.float64(1e-6), segment_len=np.int64(8), warmup=np.int32(4)),
            NewtonConfig(max_iters=np.int64(5), omega=np.float64(0.9), residual_atol=np.float64(1e-6), **more),
            NewtonConfig(max_iters=np.int64(2), segment_len=np.int64(8), omega=np.float64(0.9), **more),
        ):
            assert newton_apply(cell, x, config).dtype == np.float32
        capped = kind(3, 5, max_recurrent_norm=np.float64(0.5), seed=np.int64(0))
        assert newton_apply(capped, x).dtype == sequential_apply(capped, x).dtype == np.float32
    cell = ParaSLSTM(3, 5, eps=np.float64(1e-6), seed=0)
    assert sequential_apply(cell, x).dtype == np.float32


def test_a_float64_h0_does_not_promote_a_float32_run():
    for kind in CELLS:
        cell, x = problem(kind, 20)
        h0 = start_for(cell, 2)
        for config in WAYS.values():
            wide, narrow = (newton_apply(cell, x, config, h0=h) for h in (h0.astype(np.float64), h0))
            assert wide.dtype == np.float32
            np.testing.assert_array_equal(wide, narrow)
        assert sequential_apply(cell, x, h0=h0.astype(np.float64)).dtype == np.float32


# --- empty axes ------


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize(("batch", "time"), [(2, 0), (0, 5), (0, 0), (0, 100)])
@pytest.mark.parametrize("way", WAYS)
def test_O52_empty_axes_give_empty_results_and_zero_gradients(kind, batch, time, way):
    cell, _ = problem(kind, 1)
    x, h0 = np.zeros((batch, time, 3), np.float32), np.full((batch, *cell.state_shape), 0.5, np.float32)
    shape = (batch, time, *cell.state_shape)
    assert sequential_apply(cell, x, h0=h0).shape == shape
    states, stats = solve(cell, x, WAYS[way], h0=h0)
    assert states.shape == shape and states.dtype == np.float32
    assert stats.converged and stats.agreement_estimate == 0.0 and np.isnan(stats.lyapunov)
    states, pullback = newton_vjp(cell, x, WAYS[way], h0)
    grads = pullback(np.ones_like(states))
    assert grads.x.shape == x.shape and grads.h0.shape == h0.shape
    assert not grads.h0.any()
    for name, value in grads.params.items():
        assert value.shape == cell.arrays[name].shape and not value.any(), name
    # The final state of no steps is h0, so its cotangent is h0's.
    np.testing.assert_array_equal(pullback(last=3.0 * h0).h0, 3.0 * h0 if time == 0 else np.zeros_like(h0))
    assert verify_agreement(cell, x, config=WAYS[way], h0=h0).ok
    assert str(explain(cell, x, WAYS[way], h0=h0))


@pytest.mark.parametrize("kind", CELLS)
def test_sizes_below_one_are_refused(kind):
    for sizes in ((0, 3), (3, 0), (-1, 3), (3, 2.5), ("3", 3), (True, 3), (3, None)):
        with pytest.raises((ValueError, TypeError), match=kind.__name__):
            kind(*sizes)


# --- values that are not numbers ------


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("way", WAYS)
def test_a_bad_number_spoils_what_comes_after_it_as_in_the_loop(kind, bad, way):
    cell, x = problem(kind, 33, dtype=np.float64)
    x[1, 20, 1] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        wanted = sequential_apply(cell, x)
        got, stats = solve(cell, x, WAYS[way])
    tolerance = 1e-4 if way.startswith("pinned") else 1e-10
    for batch, until in ((0, 33), (1, 20)):
        assert error_of(cell, got[batch : batch + 1, :until], wanted[batch : batch + 1, :until]) < tolerance
    if way.startswith("pinned"):
        assert not np.isfinite(got[1, 20:]).all() or np.isfinite(wanted).all()
        assert np.isfinite(wanted).all() or not stats.converged
    else:
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
        assert stats.converged


@pytest.mark.parametrize("kind", [ParaGRU, ParaLSTM, ParaTanh])
def test_a_bad_h0_spoils_its_own_channel_only(kind):
    cell, x = problem(kind, 40)
    h0 = start_for(cell, 2)
    h0[1, ..., 2] = np.nan
    wanted = sequential_apply(cell, x, h0=h0)
    for config in (NewtonConfig(), NewtonConfig(segment_len=7), NewtonConfig(segment_len=7, exact=True)):
        got = newton_apply(cell, x, config, h0=h0)
        assert error_of(cell, got, wanted) < 1e-5
        assert np.isnan(got[1, :, ..., 2]).all() and np.isnan(got).sum() == np.isnan(got[1, :, ..., 2]).size


# --- the caller's surroundings ------


def test_calls_from_several_threads_do_not_disturb_each_other():
    jobs = [(*problem(kind, 200, seed=seed), WAYS[way]) for kind in CELLS for seed in range(2) for way in WAYS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = [newton_apply(cell, x, config) for cell, x, config in jobs]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda job: newton_apply(*job), jobs * 2))
    for got, wanted in zip(together, alone * 2, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_the_callers_error_state_is_kept_even_when_a_solve_raises():
    cell, x = strong(ParaGRU, 50, 3.0)
    for state in ("raise", "warn", "ignore"):
        with np.errstate(all=state):
            before = np.geterr()
            newton_apply(cell, x, NewtonConfig(segment_len=8))
            with pytest.raises(RuntimeError):
                newton_apply(cell, x, NewtonConfig(max_iters=1, residual_fail=1e-6))
            with pytest.raises(ValueError, match="features"):
                newton_apply(cell, x[..., :1])
            assert np.geterr() == before


def test_keywords_cannot_be_given_by_place():
    """h0 by place would be taken for another argument in the described system's signature."""
    cell, x = problem(ParaGRU, 4)
    with pytest.raises(TypeError):
        newton_apply(cell, x, None, np.zeros((2, 5), np.float32))
    assert list(inspect.signature(newton_apply).parameters)[:3] == ["cell", "x", "config"]
    stats = NewtonStats()
    newton_apply(cell, x, stats=stats)
    assert stats.path
