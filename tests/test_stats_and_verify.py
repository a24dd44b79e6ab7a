"""What a solve says about itself, and the oracle that checks it: stats, reports, errors, explanations."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import warnings

import numpy as np
import pytest

from pararnn import (
    AgreementError,
    AgreementReport,
    ChannelwiseCell,
    NewtonConfig,
    NewtonDivergenceError,
    NewtonStats,
    NotConvergedWarning,
    ParaGRU,
    ParaLSTM,
    ParaSLSTM,
    ParaTanh,
    default_agreement_atol,
    explain,
    newton_apply,
    newton_vjp,
    sequential_apply,
    verify_agreement,
)
from pararnn.verify import compare
from support import CELLS, error_of, problem, solve, start_for, strong

quiet = pytest.mark.filterwarnings("ignore::pararnn.NotConvergedWarning")


# --- NewtonStats ------

STATS = {
    "max_residual", "iters", "scan_backend", "picard_iters", "residual_history", "path", "segment_len", "segments",
    "windows", "passes", "walked", "agreement_estimate", "exact", "converged", "reason", "lyapunov",
}  # fmt: skip


def test_fresh_stats_claim_nothing():
    stats = NewtonStats()
    assert math.isnan(stats.max_residual) and math.isnan(stats.agreement_estimate) and math.isnan(stats.lyapunov)
    assert (stats.iters, stats.scan_backend, stats.picard_iters, stats.residual_history) == (0, "", 0, ())
    assert not stats.converged and not stats.exact


@quiet
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize(
    "config",
    [NewtonConfig(), NewtonConfig(segment_len=7), NewtonConfig(max_iters=2), NewtonConfig(chunk_len=9)],
    ids=str,
)
def test_stats_are_filled_in_place_and_are_plain_values(kind, config):
    cell, x = problem(kind, 40)
    stats = NewtonStats()
    handle = stats
    newton_apply(cell, x, config, stats=stats)
    assert handle is stats and stats.path in ("sequential", "segments", "per-step") and stats.scan_backend
    record = stats.to_dict()
    assert set(record) == STATS and record["lyapunov"] is None
    assert math.isfinite(stats.lyapunov) and stats.to_dict()["lyapunov"] == stats.lyapunov
    again = json.loads(json.dumps(stats.to_dict()))
    assert again["iters"] == stats.iters and tuple(again["residual_history"]) == stats.residual_history
    for name, value in record.items():
        assert type(value) in (int, float, bool, str, tuple, type(None)), (name, type(value))
    assert stats.windows >= 1 and stats.passes >= 1 and 0.0 <= stats.walked <= 1.0 and stats.reason


@pytest.mark.parametrize(
    "way", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["copy", "deep", "pickle"]
)
def test_O57_stats_can_be_copied_and_sent_before_and_after_the_exponent_is_known(way):
    cell, x = problem(ParaGRU, 40)
    _, stats = solve(cell, x)
    twin = way(stats)
    assert twin.lyapunov == stats.lyapunov and twin.to_dict() == stats.to_dict()
    assert way(stats) == stats


@pytest.mark.usefixtures("numpy_solver")
def test_P07_every_forward_carries_an_estimate():
    for kind in CELLS:
        for config in (NewtonConfig(), NewtonConfig(segment_len=7), NewtonConfig(max_iters=9, residual_atol=None)):
            cell, x = problem(kind, 60)
            got, stats = solve(cell, x, config)
            assert stats.agreement_estimate >= 0.0 and stats.converged
            assert error_of(cell, got, sequential_apply(cell, x)) <= 3.0 * stats.agreement_estimate + 1e-5


@quiet
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("size", [0.3, 1.0, 3.0])
@pytest.mark.usefixtures("numpy_solver")
def test_the_estimate_of_a_loose_solve_is_honest(kind, size):
    """Stopped too early on purpose: it may not be called converged, and the estimate is of the error's order."""
    cell, x = strong(kind, 300, size, dtype=np.float64)
    wanted = sequential_apply(cell, x)
    for config in (NewtonConfig(max_iters=1, residual_fail=None), NewtonConfig(max_iters=0, segment_len=10, warmup=1)):
        got, stats = solve(cell, x, config.replace(residual_fail=None))
        error = error_of(cell, got, wanted)
        if error > 1e-8:
            assert not stats.converged and not stats.exact
            assert stats.agreement_estimate > 0.1 * min(error, 1.0) or math.isnan(stats.agreement_estimate)
        if stats.converged:
            assert error < 1e-10


# --- exact ------


def rounded(cell, x):
    """Weights and inputs on a coarse grid, so that every order of summing the projection gives the same bits."""
    weight = np.round(cell.W_x.weight * 64.0) / 64.0
    bias = np.round(cell.W_x.bias * 64.0) / 64.0
    return cell.replace(W_x_weight=weight, W_x_bias=bias), np.round(x * 8.0) / 8.0


EXACT_WAYS = {
    "auto": NewtonConfig(exact=True),
    "segments": NewtonConfig(segment_len=120, warmup=120),
    "exact": NewtonConfig(segment_len=9, exact=True, warmup=2),
    "windows": NewtonConfig(segment_len=12, chunk_len=50, exact=True),
    "loop": NewtonConfig(segment_len=1000),
    "array": NewtonConfig(segment_len=12, scan_backend="array", exact=True),
}


@pytest.mark.parametrize("kind", [ParaGRU, ParaLSTM, ParaTanh])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("way", EXACT_WAYS)
@pytest.mark.usefixtures("numpy_solver")
def test_P07_exact_means_the_bits_of_the_time_loop_on_equal_gate_inputs(kind, dtype, way):
    seen = 0
    for seed in range(4):
        for make, size in ((problem, None), (strong, 0.7), (strong, 4.0)):
            more = {} if size is None else {"size": size}
            cell, x = make(kind, 241, dtype=dtype, seed=seed, width=6, **more)
            cell, x = rounded(cell, x)
            h0 = start_for(cell, 2) if seed % 2 else None
            got, stats = solve(cell, x, EXACT_WAYS[way], h0=h0)
            assert stats.converged
            if stats.exact:
                seen += 1
                np.testing.assert_array_equal(got, sequential_apply(cell, x, h0=h0))
                assert stats.agreement_estimate == 0.0 and stats.max_residual == 0.0
    assert seen >= (1 if way == "segments" else 12)


@pytest.mark.parametrize("kind", [ParaGRU, ParaLSTM, ParaTanh])
@pytest.mark.usefixtures("numpy_solver")
def test_P07_exact_is_a_rounding_of_the_input_projection_away_at_most(kind):
    """One matrix product rounds as its shape has it, so that the gate inputs may differ in their last bits."""
    rng = np.random.default_rng(0)
    for seed in range(12):
        batch, time, features, width = (int(rng.integers(1, n)) for n in (5, 150, 70, 40))
        dtype = (np.float32, np.float64)[seed % 2]
        cell, x = strong(kind, time, 1.0, seed=seed, batch=batch, features=features, width=width, dtype=dtype)
        for config in (NewtonConfig(), NewtonConfig(segment_len=13, exact=True)):
            got, stats = solve(cell, x, config)
            assert stats.exact
            assert error_of(cell, got, sequential_apply(cell, x)) < (1e-4 if dtype is np.float32 else 1e-12)


@pytest.mark.usefixtures("numpy_solver")
def test_the_slstm_in_log_coordinates_never_claims_to_be_exact():
    cell, x = problem(ParaSLSTM, 120)
    got, stats = solve(cell, x, NewtonConfig(segment_len=12))
    assert stats.path == "segments" and not stats.exact and stats.converged
    assert 0.0 < error_of(cell, got, sequential_apply(cell, x)) < 1e-4
    got, stats = solve(cell, x, NewtonConfig(segment_len=12, exact=True))
    assert stats.exact, "asked for it, it walks"
    assert error_of(cell, got, sequential_apply(cell, x)) < 1e-6


@pytest.mark.usefixtures("numpy_solver")
@pytest.mark.usefixtures("numpy_solver")
@pytest.mark.parametrize("length", [12, 100, 119, 120])
def test_what_is_not_exact_has_an_estimate_above_zero(length):
    """Also where each window holds a single segment: other coordinates round otherwise."""
    cell, x = problem(ParaSLSTM, 120)
    got, stats = solve(cell, x, NewtonConfig(segment_len=length))
    error = error_of(cell, got, sequential_apply(cell, x))
    assert stats.exact == (error == 0.0) and stats.agreement_estimate >= 0.1 * error


def test_a_pinned_solve_is_exact_only_where_the_residual_vanishes():
    cell, x = rounded(*problem(ParaTanh, 60))
    got, stats = solve(cell, x, NewtonConfig(max_iters=12, residual_atol=None))
    assert stats.exact == (stats.max_residual == 0.0)
    if stats.exact:
        np.testing.assert_array_equal(got, sequential_apply(cell, x))
    _, stats = solve(*problem(ParaSLSTM, 60), NewtonConfig(max_iters=30, residual_atol=None))
    assert not stats.exact, "log coordinates are a rounding away"


# --- chaos, latches, memory ------


class Linear(ChannelwiseCell):
    slots, gates, params = ("h",), ("u",), ("a",)

    def step(self, xp, h, u, a):
        return (a * h + u,)


class Parabola(ChannelwiseCell):
    """h' = 1 - a h²: chaotic with exponent log 2 at a = 2."""

    slots, gates, params, bounds = ("h",), ("u",), ("a",), {"h": (-1.0, 1.0)}

    def step(self, xp, h, u, a):
        return (1.0 - a * h * h + 0.0 * u,)


class Rotation(ChannelwiseCell):
    """A rotation by a fixed angle, shrunk by `a`: two coupled slots whose exponent is log|a|."""

    slots, gates, params = ("p", "h"), ("u",), ("a",)

    def step(self, xp, p, h, u, a):
        return a * (0.6 * p - 0.8 * h) + u, a * (0.8 * p + 0.6 * h)


def with_parameter(kind, a, dtype=np.float64):
    a = np.atleast_1d(np.asarray(a, dtype))
    return kind(1, a.size, dtype=dtype, max_recurrent_norm=None, seed=0).replace(a=a)


@pytest.mark.parametrize("time", [1, 5, 31, 32, 33, 100, 1001])
@pytest.mark.parametrize("a", [0.3, -0.7, 0.9, 1.0, 1.05])
def test_the_exponent_of_a_linear_cell_is_log_a(time, a):
    cell, x = with_parameter(Linear, [a, 0.1]), np.random.default_rng(0).standard_normal((2, time, 1))
    for config in (NewtonConfig(), NewtonConfig(segment_len=10), NewtonConfig(max_iters=1, residual_fail=None)):
        _, stats = solve(cell, x, config)
        assert stats.lyapunov == pytest.approx(math.log(abs(a)), abs=1e-12), "the largest of all channels"


def test_the_exponent_of_coupled_slots_is_that_of_their_norm():
    for a in (0.5, 0.99):
        _, stats = solve(with_parameter(Rotation, a), np.zeros((1, 3000, 1)))
        assert stats.lyapunov == pytest.approx(math.log(a), abs=1e-3)


def test_a_cell_that_forgets_everything_has_the_exponent_minus_infinity():
    _, stats = solve(with_parameter(Linear, 0.0), np.ones((1, 70, 1)))
    assert stats.lyapunov == -math.inf


@pytest.mark.usefixtures("numpy_solver")
def test_chaos_is_recognised_walked_and_still_right():
    cell, x, h0 = with_parameter(Parabola, 2.0), np.zeros((1, 4000, 1)), np.full((1, 1), 0.3)
    got, stats = solve(cell, x, NewtonConfig(segment_len=50), h0=h0)
    assert stats.lyapunov == pytest.approx(math.log(2.0), abs=0.01)
    assert stats.walked > 0.9 and stats.exact and stats.converged and stats.passes < 12, "it gives up early"
    np.testing.assert_array_equal(got, sequential_apply(cell, x, h0=h0))
    calm = with_parameter(Parabola, 0.5)
    _, stats = solve(calm, x, NewtonConfig(segment_len=50), h0=h0)
    assert stats.lyapunov < -0.2 and stats.walked == 0.0


@pytest.mark.usefixtures("numpy_solver")
def test_a_latch_forgets_its_neighbourhood_but_not_its_side():
    """Strongly contracting, yet the end of a segment depends on the basin that its start lies in: it is walked."""
    cell, x = problem(ParaTanh, 900, width=64, cap=None, scale=0.1)
    cell = cell.replace(a=np.random.default_rng(0).uniform(-15.0, 15.0, 64).astype(np.float32))
    got, stats = solve(cell, x, NewtonConfig(segment_len=30))
    assert stats.lyapunov < 0.0 and 0.1 < stats.walked < 0.9 and stats.converged
    assert error_of(cell, got, sequential_apply(cell, x)) < 1e-4


# --- errors and warnings ------


def test_a_divergence_error_carries_the_stats_through_a_pickle():
    cell, x = problem(ParaGRU, 50)
    with pytest.raises(NewtonDivergenceError, match=r"residual .* after 1 iterations") as caught:
        newton_apply(cell, x, NewtonConfig(max_iters=1, residual_fail=1e-6))
    error = caught.value
    assert isinstance(error, RuntimeError) and error.stats.iters == 1 and error.stats.max_residual > 1e-6
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert str(twin) == str(error) and twin.stats.to_dict() == error.stats.to_dict()
    stats = NewtonStats()
    with pytest.raises(NewtonDivergenceError):
        newton_apply(cell, x, NewtonConfig(max_iters=1, residual_fail=1e-6), stats=stats)
    assert stats.iters == 1, "the caller's own stats are filled as well"
    assert NewtonDivergenceError("only words").stats is None


def test_a_pinned_solve_that_misses_tau_warns_with_its_estimate():
    cell, x = problem(ParaGRU, 50)
    for run in (newton_apply, newton_vjp):
        with pytest.warns(NotConvergedWarning, match=r"estimated error .* after 1 pinned"):
            run(cell, x, NewtonConfig(max_iters=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for config in (None, NewtonConfig(max_iters=5), NewtonConfig(max_iters=3, segment_len=10)):
            newton_apply(cell, x, config)


# --- verify_agreement ------

REPORT = {
    "ok", "max_abs", "max_rel", "mean_abs", "atol", "rtol", "reference", "shape", "dtype", "device", "slots", "worst",
    "newton_iters", "max_residual", "estimate", "exact", "path", "backend",
}  # fmt: skip


@quiet
@pytest.mark.parametrize("kind", CELLS)
def test_P02_the_report_says_what_was_compared(kind):
    cell, x = problem(kind, 40)
    for config in (None, NewtonConfig(max_iters=3), NewtonConfig(max_iters=1), NewtonConfig(segment_len=9)):
        report = verify_agreement(cell, x, config=config)
        got, want = newton_apply(cell, x, config), sequential_apply(cell, x)
        assert isinstance(report, AgreementReport) and dataclasses.is_dataclass(report)
        assert set(report.to_dict()) == REPORT and json.loads(json.dumps(report.to_dict()))["ok"] is report.ok
        assert report.max_abs == pytest.approx(np.abs(got - want).max(), rel=1e-6, abs=1e-12)
        assert report.mean_abs == pytest.approx(np.abs(got - want).mean(), rel=1e-4, abs=1e-12)
        assert (
            report.max_rel == max(report.slots.values()) == pytest.approx(error_of(cell, got, want), rel=1e-5, abs=1e-9)
        )
        assert set(report.slots) == set(cell.slots) and report.ok == (report.max_rel <= 1e-4)
        assert (report.shape, report.dtype, report.device) == (got.shape, "float32", "cpu")
        assert report.atol == 1e-4 and report.rtol == 0.0 and report.reference == "same"
        assert report.backend and report.path and report.estimate >= 0.0
        assert str(report).startswith("agrees" if report.ok else "DISAGREES") and "float32" in str(report)
        with pytest.raises(dataclasses.FrozenInstanceError):
            report.ok = True


def test_P02_raise_on_fail_raises_with_the_report():
    cell, x = problem(ParaLSTM, 40)
    config = NewtonConfig(max_iters=1)
    with pytest.warns(NotConvergedWarning), pytest.raises(AgreementError, match="DISAGREES") as caught:
        verify_agreement(cell, x, config=config, raise_on_fail=True)
    report = caught.value.report
    assert not report.ok and report.newton_iters == 1
    twin = pickle.loads(pickle.dumps(caught.value))
    assert twin.report == report and str(twin) == str(caught.value)
    assert verify_agreement(cell, x, raise_on_fail=True).ok
    with pytest.warns(NotConvergedWarning):
        assert verify_agreement(cell, x, config=config, atol=1.0).ok, "the band is the caller's"


def compared(cell, want, changes, **options):
    """The report for the oracle `want` and a copy of it with some entries moved."""
    got = want.copy()
    for place, value in changes.items():
        got[place] = value
    return compare(cell, got, want, NewtonStats(), **options)


def test_the_worst_place_is_found():
    cell, x = problem(ParaSLSTM, 30, batch=3)
    want = sequential_apply(cell, x)
    report = compared(cell, want, {(2, 17, 1, 4): want[2, 17, 1, 4] + 5.0, (0, 3, 3, 0): want[0, 3, 3, 0] + 1e-3})
    assert report.worst == {"slot": "n", "batch": 2, "time": 17, "channel": 4} and not report.ok
    assert report.slots["h"] > 1e-4 and report.slots["c"] == report.slots["m"] == 0.0
    cell, x = problem(ParaGRU, 30, batch=3)
    want = sequential_apply(cell, x)
    report = compared(cell, want, {(1, 29, 2): want[1, 29, 2] - 1.0})
    assert report.worst == {"slot": "h", "batch": 1, "time": 29, "channel": 2}
    assert all(type(v) in (int, str) for v in report.worst.values())


def test_each_slot_is_measured_by_its_own_scale():
    """An error of 1e-3 matters for h and not for a stabiliser of 1e4 (finding 4 of the reference)."""
    cell, x = problem(ParaSLSTM, 30)
    want = sequential_apply(cell, x)
    want[:, :, 2] *= 1e4
    place = (0, 3, 2, 1)
    assert compared(cell, want, {place: want[place] + 1e-3}).ok
    place = (0, 3, 3, 1)
    assert not compared(cell, want, {place: want[place] + 1e-3}).ok
    # Relative to the slot's largest value, never to a single value near zero.
    want[0, 5, 3, 2] = 1e-12
    report = compared(cell, want, {(0, 5, 3, 2): 2e-12})
    assert report.ok and report.max_rel < 1e-9


def test_rtol_adds_to_the_band_elementwise():
    cell, _ = problem(ParaGRU, 30)
    want = np.ones((2, 30, 5), np.float32)
    want[0] = 1e-3
    large, small = {(1, 2, 3): 1.0 + 5e-4}, {(0, 2, 3): 1e-3 + 5e-4}
    assert not compared(cell, want, large).ok and compared(cell, want, large, rtol=1e-3).ok
    assert not compared(cell, want, small, rtol=1e-3).ok


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_agree_only_in_their_own_place(bad):
    cell, x = problem(ParaGRU, 10)
    want = sequential_apply(cell, x)
    with np.errstate(all="raise"):
        assert not compared(cell, want, {(0, 4, 1): bad}).ok
        assert compared(cell, want, {(0, 4, 1): bad}).max_abs == np.inf
        lost = want.copy()
        lost[0, 4, 1] = bad
        assert compared(cell, lost, {}).ok and compared(cell, lost, {}).max_abs == 0.0
        assert not compared(cell, lost, {(0, 4, 1): 0.5}).ok
        assert not compared(cell, lost, {(0, 4, 1): -bad if np.isinf(bad) else np.inf}).ok


@pytest.mark.parametrize("kind", CELLS)
def test_the_float64_reference_judges_both(kind):
    cell, x = problem(kind, 200)
    h0 = start_for(cell, 2)
    wide = cell.to(dtype=np.float64)
    truth = sequential_apply(wide, x.astype(np.float64), h0=h0.astype(np.float64))
    report = verify_agreement(cell, x, h0=h0, reference="float64")
    assert report.ok and report.reference == "float64" and report.dtype == "float32" and report.atol == 1e-4
    assert 0.0 < report.max_rel == pytest.approx(error_of(cell, newton_apply(cell, x, h0=h0), truth), rel=1e-3)
    assert verify_agreement(cell, x, h0=h0).max_rel <= report.max_rel + 1e-5
    with pytest.raises(ValueError, match="reference must be 'same' or 'float64'"):
        verify_agreement(cell, x, reference="float32")


def test_h0_is_part_of_the_comparison():
    cell, x = problem(ParaLSTM, 40)
    h0 = start_for(cell, 2)
    report = verify_agreement(cell, x, h0=h0, config=NewtonConfig(segment_len=8))
    assert report.ok and report.shape == (2, 40, 2, 5)
    wrong = compare(cell, newton_apply(cell, x), sequential_apply(cell, x, h0=h0), NewtonStats())
    assert not wrong.ok and wrong.worst["time"] == 0


def test_P01_the_bands_by_dtype():
    for dtype, band in ((np.float64, 1e-10), (np.float32, 1e-4), (np.float16, 1e-2), (np.dtype("f4"), 1e-4)):
        assert default_agreement_atol(dtype) == band
    torch = pytest.importorskip("torch")
    assert default_agreement_atol(torch.bfloat16) == 1e-2 and default_agreement_atol(torch.float32) == 1e-4
    for wrong in (np.int32, complex, bool, "text", torch.int8):
        with pytest.raises(TypeError, match="float64, float32"):
            default_agreement_atol(wrong)


# --- explain ------

SHAPES = [(1, 1, 3, 2), (1, 40, 3, 5), (1, 3000, 3, 4), (2, 1001, 2, 16), (4, 700, 3, 200), (1, 4097, 2, 1)]
CONFIGS = [
    NewtonConfig(),
    NewtonConfig(segment_len=16),
    NewtonConfig(segment_len=10**6),
    NewtonConfig(max_iters=3, residual_fail=None),
    NewtonConfig(max_iters=2, segment_len=30, residual_fail=None),
    NewtonConfig(newton_iters_by_t={1: 1, 1000: 2}, residual_fail=None),
    NewtonConfig(chunk_len=500),
    NewtonConfig(scan_backend="array", segment_len=64),
]


@quiet
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_explain_predicts_the_path_that_the_stats_report(kind, config):
    for batch, time, features, width in SHAPES:
        cell, x = problem(kind, time, batch=batch, features=features, width=width)
        told = explain(cell, x, config)
        _, stats = solve(cell, x, config)
        if "was walked" in stats.reason:
            continue  # what no plan can foresee
        assert (told.backend, told.path) == (stats.scan_backend, stats.path)
        if stats.path == "segments":
            assert (told.segment_len, told.segments) == (stats.segment_len, stats.segments)
        pinned = config.max_iters is not None or config.newton_iters_by_t is not None
        if pinned and stats.path != "sequential":
            assert stats.passes <= told.passes
        assert told.reason and 1 <= told.passes <= 13
        item = 4 * cell.state_slots
        assert told.result_bytes == batch * time * width * item and told.working_bytes > 0


@pytest.mark.usefixtures("numpy_solver")
def test_the_explanation_reads_well_and_names_who_was_passed_over():
    cell, x = problem(ParaGRU, 3000, batch=1, width=4)
    told = explain(cell, x)
    text = str(told)
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["backend", "path", "because", "memory"]
    assert told.backend == "numpy" and f"segments of {told.segment_len} steps" in text and "2 passes expected" in text
    assert "predicted" in text and "MiB" in text and repr(told) == text
    torch = pytest.importorskip("torch")
    told = explain(cell.to(torch), torch.from_numpy(x))
    assert told.backend == "array" and "not      numpy: it takes NumPy arrays, and these are torch's" in str(told)
    assert told.refusals["numpy"] in str(told)
    single = str(explain(cell, x[:, :1]))
    assert "1 pass expected" in single and "sequential" in single


def test_explain_does_no_solving(monkeypatch):
    import pararnn.engine
    from pararnn_numpy.engine import UfuncEngine

    def never(*args, **keywords):
        raise AssertionError("explain must not run a loop")

    monkeypatch.setattr(pararnn.engine.ArrayEngine, "loop", never)
    monkeypatch.setattr(UfuncEngine, "loop", never)
    cell, x = problem(ParaGRU, 3000)
    assert explain(cell, x, NewtonConfig(scan_backend="numpy")).path
