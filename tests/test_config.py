"""NewtonConfig: each field changes a solve in the way it says, or is refused by a sentence that names it."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import pickle
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pararnn.per_step
from pararnn import (
    ChannelwiseCell,
    NewtonConfig,
    NewtonDivergenceError,
    NewtonStats,
    NotConvergedWarning,
    ParaGRU,
    ParaLSTM,
    ParaRWKV7,
    ParaSLSTM,
    ParaTanh,
    auto_newton_iters,
    compile_safe_config,
    default_agreement_atol,
    explain,
    newton_apply,
    newton_vjp,
    sequential_apply,
    verify_agreement,
)
from pararnn.k_star import K_STAR
from support import CELLS, CLOSE, error_of, problem, solve, strong

pytestmark = [
    pytest.mark.filterwarnings("ignore::pararnn.NotConvergedWarning"),
    pytest.mark.usefixtures("numpy_solver"),
]

nan, inf = math.nan, math.inf


def pinned(k, **more):
    """A pinned solve that neither stops early nor raises."""
    return NewtonConfig(max_iters=k, residual_atol=None, residual_fail=None, **more)


# --- validation ------

BAD = [
    *[("max_iters", v) for v in (-1, 2.5, True, "3", nan)],
    *[("omega", v) for v in (0, 0.0, -0.5, 2.0001, nan, inf, "1", 1j, True, np.ones(1), None)],
    *[("tol", v) for v in (0, -1e-6, nan, inf, "small", True, np.ones(2))],
    *[("residual_atol", v) for v in (-1e-9, nan, inf)],
    *[("residual_fail", v) for v in (0, -1.0, nan, inf)],
    *[("picard_retry_atol", v) for v in (0, -1.0, nan, None)],
    *[("picard_iters", v) for v in (-1, 1.0, False)],
    *[("picard_adapt", v) for v in ("yes", 1)],
    *[("chunk_len", v) for v in (0, -3, 2.0)],
    *[("segment_len", v) for v in (0, -3, 2.0)],
    *[("warmup", v) for v in (-1, 0.5)],
    *[("max_passes", v) for v in (0, 1.5)],
    *[("jacobian", v) for v in ("numeric", None)],
    *[("jac_structure", v) for v in ("banded", "", ["diag"])],
    *[("coords", v) for v in ("polar", None)],
    *[("scan_tile", v) for v in ("blelloch", None)],
    *[("scan_backend", v) for v in ("", None, 3)],
    *[("newton_iters_by_t", v) for v in ({}, [(1, 2)], {0: 2}, {64: -1}, {64: 2.5}, {"64": 2})],
    *[(name, v) for name in ("recompute", "exact", "verify_first_step") for v in (1, "no", None)],
    *[(name, 1) for name in ("fused_time_loop", "fused_early_exit")],
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda v: str(v))
def test_a_value_out_of_range_is_refused_by_its_field_s_name(field, value):
    with pytest.raises(ValueError, match=field):
        NewtonConfig(**{field: value})
    with pytest.raises(ValueError, match=field):
        NewtonConfig().replace(**{field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"newton_iters_by_t": {64: 2}, "max_iters": 3},
        {"fused_window_len": 64},
        {"fused_window_len": 48, "fused_time_loop": True},
        {"fused_time_loop": True, "chunk_len": 64},
        {"exact": True, "max_iters": 3},
        {"exact": True, "newton_iters_by_t": {64: 2}},
    ],
    ids=str,
)
def test_contradictions_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        NewtonConfig(**fields)


def test_numpy_scalars_are_numbers():
    config = NewtonConfig(max_iters=np.int64(3), omega=np.float32(0.5), residual_atol=np.float64(1e-6))
    assert (config.max_iters, config.omega) == (3, 0.5)
    assert NewtonConfig(tol=np.float64(1e-6), segment_len=np.int32(64), exact=np.True_).segment_len == 64


def test_a_config_is_frozen_copied_compared_and_hashed_by_value():
    table = {64: 2, 1024: 3}
    config = NewtonConfig(newton_iters_by_t=table, tol=1e-6)
    twin = pickle.loads(pickle.dumps(config))
    assert twin == config and hash(twin) == hash(config) and {config: 1}[twin] == 1
    assert config != config.replace(tol=1e-7) and config.replace(tol=1e-7).newton_iters_by_t == table
    table[1024] = 30
    assert config.newton_iters_by_t == {64: 2, 1024: 3}, "the caller's table is his own"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.tol = 1.0


def test_the_defaults_that_the_documentation_states():
    config = NewtonConfig()
    assert config.max_iters is None and config.omega == 1.0 and config.scan_backend == "auto"
    assert config.residual_atol == 1e-5 and config.residual_fail == 1.0 and config.picard_retry_atol == 1e-3


def test_every_field_is_shown_to_work_below():
    """A field without a test of its own in this file is a promise that nobody checks."""
    source = Path(__file__).read_text(encoding="utf-8")
    for field in dataclasses.fields(NewtonConfig):
        assert source.count(field.name) >= 2, field.name


# --- how many iterations ------


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("k", [0, 1, 3])
def test_P11_max_iters_pins_the_count(kind, k):
    cell, x = problem(kind, 37)
    _, stats = solve(cell, x, pinned(k))
    assert (stats.path, stats.iters, stats.passes, len(stats.residual_history)) == ("per-step", k, k + 1, k + 1)
    _, stats = solve(cell, x, pinned(k, segment_len=8))
    assert (stats.path, stats.iters, stats.passes, stats.segment_len) == ("segments", k, k + 1, 8)


@pytest.mark.parametrize("kind", CELLS)
def test_max_iters_0_gives_the_first_guess_and_says_that_it_is_one(kind):
    cell, x = problem(kind, 19)
    got, stats = solve(cell, x, pinned(0, picard_iters=0 if kind is ParaSLSTM else None))
    zero = np.zeros((19, 1, *cell.state_shape), x.dtype)
    alone = np.concatenate(
        [sequential_apply(cell, x[:, t : t + 1], h0=zero[t].repeat(2, 0)) for t in range(19)], axis=1
    )
    if kind is ParaSLSTM:  # the solve's coordinates start from an empty memory, where the stabiliser is free
        got, alone = got[:, :, 3], alone[:, :, 3]
    np.testing.assert_allclose(got, alone, rtol=1e-5, atol=1e-6)
    assert not stats.converged and stats.agreement_estimate > 1e-3


def test_P11_newton_iters_by_t_takes_the_largest_key_below_T():
    cell, x = problem(ParaGRU, 100)
    table = {1: 1, 30: 2, 64: 4, 1024: 9}
    for time, k in ((1, 1), (29, 1), (30, 2), (63, 2), (64, 4), (100, 4)):
        config = NewtonConfig(newton_iters_by_t=table, residual_atol=None)
        _, stats = solve(cell, x[:, :time], config)
        assert stats.iters == k, time
        assert explain(cell, x[:, :time], config).passes == k + 1, "explain must read the table too"
    _, stats = solve(cell, x[:, :5], NewtonConfig(newton_iters_by_t={64: 2}, residual_atol=None))
    assert stats.iters == 2, "below every key the smallest one holds"


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("time", [64, 1000])
def test_P10_K_star_agrees_within_tau_and_is_tight_enough(kind, time):
    cell, x = problem(kind, time)
    k = auto_newton_iters(cell, time)
    assert isinstance(k, int) and 1 <= k <= 12
    assert verify_agreement(cell, x, config=NewtonConfig(max_iters=k)).ok
    assert not verify_agreement(cell, x, config=pinned(0, picard_adapt=False)).ok


def test_K_star_tables_are_whole_and_refuse_a_negative_length():
    assert auto_newton_iters(ParaGRU(2, 3), 0) >= 1
    for name, table in K_STAR.items():
        assert all(isinstance(t, int) and isinstance(k, int) and t >= 1 and k >= 0 for t, k in table.items()), name
    with pytest.raises(ValueError, match="time"):
        auto_newton_iters(ParaGRU(2, 3), -1)
    with pytest.raises(ValueError, match="weights"):
        auto_newton_iters(ParaGRU(2, 3), 5, weights="best")


def test_P10_K_star_through_131072():
    """Measured: 0 for RWKV-7, an exact scan; at most 2 with segments, for every cell at initial weights."""
    from pararnn.solvers.newton.k_star import MEASURED

    assert auto_newton_iters(ParaRWKV7(2, d_head=2), 131072) == 0
    assert all(table for tables in MEASURED.values() for table in tables.values())
    assert auto_newton_iters(ParaGRU(2, 3), 131072, weights="trained") > auto_newton_iters(ParaGRU(2, 3), 131072)
    for name, table in MEASURED["initial", "auto"].items():
        # Cells that multiply by matrices are measured up to shorter lengths, on a CPU.
        reached = {"StockGRU": 8192, "ParaHopfield": 2048, "ParaM2RNN": 2048}.get(name, 131072)
        assert max(table) == reached and max(table.values()) <= 2, name


def test_compile_safe_config_needs_no_value_from_the_device():
    config = compile_safe_config(scan_backend="array")
    assert (config.max_iters, config.scan_backend, config.picard_adapt) == (3, "array", False)
    assert config.residual_atol is None and config.residual_fail is None
    for kind in CELLS:
        cell, x = problem(kind, 23)
        _, stats = solve(cell, x, config)
        assert stats.iters == 3 and stats.scan_backend == "array"


# --- a pinned solve's update and its gates ------


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("omega", [0.25, 1.5, 2.0])
def test_omega_scales_the_update(kind, omega):
    cell, x = problem(kind, 21, dtype=np.float64)
    more = {"coords": "native", "picard_iters": 1, "picard_adapt": False} if kind is ParaSLSTM else {}
    guess, full = newton_apply(cell, x, pinned(0, **more)), newton_apply(cell, x, pinned(1, **more))
    relaxed = newton_apply(cell, x, pinned(1, omega=omega, **more))
    np.testing.assert_allclose(relaxed, guess + omega * (full - guess), rtol=1e-9, atol=1e-12)


def test_omega_scales_the_update_of_segment_starts():
    cell, x = problem(ParaTanh, 21, dtype=np.float64)
    runs = {w: newton_apply(cell, x, pinned(1, segment_len=7, warmup=0, omega=w)) for w in (1e-6, 0.5, 1.0)}
    guess = newton_apply(cell, x, pinned(0, segment_len=7, warmup=0))
    np.testing.assert_allclose(runs[1e-6], guess, atol=1e-6)
    assert np.abs(runs[0.5] - guess).max() > 1e-3 and np.abs(runs[0.5] - runs[1.0]).max() > 1e-3


def test_residual_atol_stops_a_pinned_solve_early():
    cell, x = problem(ParaGRU, 50)
    _, never = solve(cell, x, NewtonConfig(max_iters=12, residual_atol=None))
    _, early = solve(cell, x, NewtonConfig(max_iters=12, residual_atol=1e-5))
    _, late = solve(cell, x, NewtonConfig(max_iters=12, residual_atol=1e-2))
    assert never.iters == 12 and early.iters < 6 and late.iters < early.iters
    assert early.max_residual < 1e-5 <= early.residual_history[-2]


def test_P04_the_residual_warns_from_1e_3_and_raises_above_residual_fail(caplog):
    cell, x = problem(ParaGRU, 50)
    with caplog.at_level(logging.WARNING, logger="pararnn"):
        _, fine = solve(cell, x, NewtonConfig(max_iters=3))
        assert not caplog.records and fine.max_residual < 1e-3
        _, high = solve(cell, x, NewtonConfig(max_iters=1))
        assert 1e-3 < high.max_residual < 1.0
        assert "newton_residual_high" in caplog.text
    with pytest.raises(NewtonDivergenceError, match="residual") as caught:
        newton_apply(cell, x, NewtonConfig(max_iters=1, residual_fail=1e-3))
    assert caught.value.stats.max_residual == high.max_residual and caught.value.stats.iters == 1
    newton_apply(cell, x, NewtonConfig(max_iters=1, residual_fail=None))


def test_P04_agreement_and_residual_are_two_thresholds():
    """A residual below its gate can go with states far outside τ: both signals exist, and they differ."""
    cell, x = strong(ParaGRU, 500, 1.0, width=32)
    with pytest.warns(NotConvergedWarning, match="estimated error"):
        _, stats = solve(cell, x, NewtonConfig(max_iters=3, residual_fail=1e9))
    assert stats.agreement_estimate > default_agreement_atol(np.float32) and not stats.converged
    report = verify_agreement(cell, x, config=NewtonConfig(max_iters=3, residual_fail=None))
    assert not report.ok and report.atol == 1e-4 != NewtonConfig().residual_fail


def test_P04_a_residual_that_is_not_a_number_raises_too():
    cell, x = problem(ParaGRU, 20)
    x[0, 7, 0] = nan
    with pytest.raises(NewtonDivergenceError):
        newton_apply(cell, x, NewtonConfig(max_iters=3))
    for more in ({}, {"segment_len": 6}):
        with pytest.warns(NotConvergedWarning):
            _, stats = solve(cell, x, NewtonConfig(max_iters=3, residual_fail=None, **more))
        assert not stats.converged and math.isnan(stats.agreement_estimate)


def test_a_not_a_number_in_one_slot_is_not_hidden_by_the_others():
    """Python's max drops a NaN that does not come first."""

    class Gated(ChannelwiseCell):
        slots, gates, params = ("c", "h"), ("u", "o"), ("a",)

        def step(self, xp, c, h, u, o, a):
            c = xp.tanh(a * c + u)
            return c, o * c

    cell, x = problem(Gated, 12)
    bias = np.array(cell.W_x.bias)
    bias[cell.d_h] = nan
    cell = cell.replace(W_x_bias=bias)
    states, stats = solve(cell, x, NewtonConfig(max_iters=0, residual_fail=None))
    assert np.isfinite(states[:, :, 0]).all() and np.isnan(states[:, :, 1, 0]).all()
    assert math.isnan(stats.max_residual) and not stats.converged
    with pytest.raises(NewtonDivergenceError):
        newton_apply(cell, x, NewtonConfig(max_iters=0))


def test_P05_a_diverged_solve_raises_before_any_gradient():
    cell, x = strong(ParaGRU, 400, 3.0, width=16)
    with pytest.raises(NewtonDivergenceError):
        newton_vjp(cell, x, NewtonConfig(max_iters=2, residual_fail=0.1))


# --- the Jacobian and the coordinates ------


@pytest.mark.parametrize("kind", CELLS)
def test_jacobian_analytic_is_what_auto_takes(kind):
    cell, x = problem(kind, 30)
    for more in ({"max_iters": 2}, {"segment_len": 7}):
        auto, analytic = (newton_apply(cell, x, NewtonConfig(jacobian=j, **more)) for j in ("auto", "analytic"))
        np.testing.assert_array_equal(auto, analytic)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"jacobian": "autograd"}, "no automatic differentiation"),
        ({"scan_tile": "thomas"}, "scan_tile='thomas'"),
        ({"scan_tile": "thomas2"}, "scan_tile='thomas2'"),
        ({"scan_tile": "thomas4"}, "scan_tile='thomas4'"),
        ({"fused_time_loop": True}, "no fused time loop"),
        ({"fused_time_loop": True, "fused_window_len": 64}, "no fused time loop"),
        ({"fused_early_exit": True}, "no fused early exit"),
    ],
    ids=str,
)
def test_orders_to_fused_kernels_are_refused_where_there_are_none(fields, sentence):
    cell, x = problem(ParaSLSTM, 9)
    for run in (newton_apply, newton_vjp, explain):
        for name in ("auto", "numpy", "array", "eager"):
            with pytest.raises(TypeError, match=sentence):
                run(cell, x, NewtonConfig(scan_backend=name, **fields))


@pytest.mark.parametrize(
    ("kind", "own"), [(ParaGRU, "diag"), (ParaTanh, "diag"), (ParaLSTM, "block2"), (ParaSLSTM, "block4")]
)
def test_jac_structure_takes_the_cell_s_own_and_diag_and_refuses_the_rest(kind, own):
    cell, x = problem(kind, 30)
    assert cell.jac_structure == own
    for more in ({"max_iters": 2}, {"segment_len": 7}):
        free = newton_apply(cell, x, NewtonConfig(**more))
        np.testing.assert_array_equal(newton_apply(cell, x, NewtonConfig(jac_structure=own, **more)), free)
        for other in {"block2", "block4", "head", "dense"} - {own}:
            with pytest.raises(ValueError, match=f"jac_structure='{other}'.*{kind.__name__}"):
                newton_apply(cell, x, NewtonConfig(jac_structure=other, **more))


def test_jac_structure_diag_keeps_the_true_diagonal_and_still_converges():
    cell, x = problem(ParaLSTM, 60)
    wanted = sequential_apply(cell, x)
    full, whole = solve(cell, x, pinned(4))
    some, part = solve(cell, x, pinned(4, jac_structure="diag"))
    assert part.max_residual > 10 * whole.max_residual, "without the off-diagonal entries it is no Newton step"
    many, _ = solve(cell, x, pinned(25, jac_structure="diag"))
    assert error_of(cell, full, wanted) < 1e-5 < error_of(cell, some, wanted)
    assert error_of(cell, many, wanted) < 1e-5
    segments, stats = solve(cell, x, NewtonConfig(jac_structure="diag", segment_len=10))
    assert stats.converged and error_of(cell, segments, wanted) < 1e-4


@pytest.mark.parametrize("kind", [ParaGRU, ParaLSTM, ParaTanh])
def test_coords_log_and_picard_iters_are_refused_to_cells_without_them(kind):
    cell, x = problem(kind, 9)
    for more in ({}, {"max_iters": 2}, {"segment_len": 4}):
        with pytest.raises(TypeError, match=r"coords='log'.*ParaSLSTM"):
            newton_apply(cell, x, NewtonConfig(coords="log", **more))
        with pytest.raises(TypeError, match=r"picard_iters=1.*ParaSLSTM"):
            newton_apply(cell, x, NewtonConfig(picard_iters=1, **more))
        newton_apply(cell, x, NewtonConfig(picard_iters=0, **more))
        newton_apply(cell, x, NewtonConfig(coords="native", **more))


def test_coords_choose_the_unknowns_of_an_sLSTM_solve():
    cell, x = problem(ParaSLSTM, 40, dtype=np.float64)
    wanted = sequential_apply(cell, x)
    _, auto = solve(cell, x, pinned(2))
    _, log = solve(cell, x, pinned(2, coords="log"))
    _, native = solve(cell, x, pinned(2, coords="native"))
    assert auto.residual_history == log.residual_history != native.residual_history
    for coords in ("auto", "log", "native"):
        for more in ({"segment_len": 7}, {"segment_len": 40}, {"max_iters": 9}, {"max_iters": 9, "segment_len": 9}):
            got, stats = solve(cell, x, NewtonConfig(coords=coords, residual_atol=None, **more))
            assert stats.converged and error_of(cell, got, wanted) < CLOSE["float64"], (coords, more)


def test_P12_picard_iters_lower_the_first_residual_of_an_sLSTM():
    cell, x = problem(ParaSLSTM, 200, cap=None)
    first = []
    for sweeps in (0, 1, 2, 3, 5):
        _, stats = solve(cell, x, pinned(0, picard_iters=sweeps, picard_adapt=False))
        assert stats.picard_iters == sweeps
        first.append(stats.max_residual)
    assert first == sorted(first, reverse=True) and first[-1] < 1e-2 * first[0]


def test_picard_iters_start_the_segments_of_an_sLSTM():
    cell, x = problem(ParaSLSTM, 200)
    _, without = solve(cell, x, NewtonConfig(segment_len=20, picard_iters=0, warmup=0))
    _, one = solve(cell, x, NewtonConfig(segment_len=20, picard_iters=1, warmup=0))
    assert (without.picard_iters, one.picard_iters) == (0, 1)
    assert one.passes < without.passes


def test_picard_iters_are_not_counted_where_a_guess_was_given():
    cell, x = problem(ParaSLSTM, 30)
    wanted = sequential_apply(cell, x)
    _, stats = solve(cell, x, NewtonConfig(max_iters=1), guess=wanted)
    assert stats.picard_iters == 0 and stats.residual_history[0] < 1e-5


def test_picard_adapt_retries_while_the_residual_is_above_picard_retry_atol():
    cell, x = problem(ParaSLSTM, 60, cap=None, scale=2.0)
    fixed = pinned(0, picard_iters=1)
    _, once = solve(cell, x, fixed)
    assert once.picard_iters == 1 and once.max_residual > 1e-3, "an order of one sweep is not retried"
    _, retried = solve(cell, x, fixed.replace(picard_adapt=True))
    assert retried.picard_iters == 5 and retried.max_residual < once.max_residual
    _, content = solve(cell, x, fixed.replace(picard_adapt=True, picard_retry_atol=10.0))
    assert content.picard_iters == 1
    _, own = solve(cell, x, pinned(0))
    assert own.picard_iters == 5, "left to the cell, it adapts"
    _, never = solve(cell, x, pinned(0, picard_adapt=False))
    assert never.picard_iters == 1


# --- the default solver's fields ------


@pytest.mark.parametrize("kind", CELLS)
def test_segment_len_is_the_number_of_steps_in_a_segment(kind):
    cell, x = problem(kind, 100)
    wanted = sequential_apply(cell, x)
    for length in (1, 2, 7, 32, 99, 100, 1000):
        got, stats = solve(cell, x, NewtonConfig(segment_len=length))
        if "was walked" not in stats.reason:
            assert (stats.path, stats.segment_len) == ("sequential" if length >= 100 else "segments", min(length, 100))
        assert stats.converged and error_of(cell, got, wanted) < CLOSE["float32"], length


def test_warmup_guesses_the_segment_starts():
    cell, x = problem(ParaTanh, 300)
    _, none = solve(cell, x, NewtonConfig(segment_len=60, warmup=0))
    _, some = solve(cell, x, NewtonConfig(segment_len=60, warmup=4))
    _, all_of_it = solve(cell, x, NewtonConfig(segment_len=60, warmup=60))
    assert none.iters >= 1 and none.residual_history[0] > some.residual_history[0] > 1e-4
    assert all_of_it.passes == 1 and all_of_it.iters == 0 and all_of_it.exact, "the network forgets within 60 steps"
    _, default = solve(cell, x, NewtonConfig(segment_len=60))
    assert default.exact and default.passes == 1


def test_tol_is_the_accuracy_of_the_joint_test():
    cell, x = strong(ParaGRU, 600, 0.3, dtype=np.float64)
    cell = cell.replace(W_x_bias=np.concatenate([np.full(5, -4.0), np.zeros(10)]))  # a memory of many steps
    wanted, seen = sequential_apply(cell, x), []
    for tol in (1e-2, 1e-5, 1e-9):
        got, stats = solve(cell, x, NewtonConfig(segment_len=30, warmup=8, tol=tol))
        error = error_of(cell, got, wanted)
        assert stats.converged and error <= tol and stats.agreement_estimate <= 5 * tol
        seen.append((stats.passes, error))
    assert seen[0][0] < seen[2][0] and seen[0][1] > seen[1][1] > seen[2][1], seen


@pytest.mark.parametrize("kind", CELLS)
def test_P07_exact_makes_every_joint_match(kind):
    cell, x = strong(kind, 300, 0.8, scale=1.5)
    loose, free = solve(cell, x, NewtonConfig(segment_len=16, tol=1e-2))
    _, stats = solve(cell, x, NewtonConfig(segment_len=16, tol=1e-2, exact=True))
    assert stats.exact and stats.agreement_estimate == 0.0 and stats.max_residual == 0.0 and stats.converged
    assert free.agreement_estimate >= 0.0 and free.converged
    assert error_of(cell, loose, sequential_apply(cell, x)) < 1e-1


def test_max_passes_hands_the_rest_to_the_walk():
    cell, x = strong(ParaGRU, 400, 1.0, width=16, seed=4)
    config = NewtonConfig(segment_len=8, warmup=0)
    _, free = solve(cell, x, config)
    states, one = solve(cell, x, config.replace(max_passes=1))
    _, two = solve(cell, x, config.replace(max_passes=3))
    assert one.passes <= 2 and one.walked > two.walked >= free.walked
    assert one.converged and error_of(cell, states, sequential_apply(cell, x)) < CLOSE["float32"]


@pytest.mark.parametrize("kind", CELLS)
def test_chunk_len_solves_windows_one_after_the_other(kind):
    cell, x = problem(kind, 100, dtype=np.float64)
    wanted = sequential_apply(cell, x)
    nine = {"max_iters": 9, "residual_atol": None}
    for more in ({"segment_len": 5}, nine, {**nine, "segment_len": 5}, {}):
        whole, once = solve(cell, x, NewtonConfig(**more))
        for chunk, windows in ((100, 1), (1000, 1), (30, 4), (1, 100)):
            got, stats = solve(cell, x, NewtonConfig(chunk_len=chunk, **more))
            assert stats.windows >= windows and (windows > 1 or stats.windows == once.windows), (more, chunk)
            assert stats.converged and error_of(cell, got, wanted) < CLOSE["float64"], (more, chunk)
        assert error_of(cell, whole, wanted) < CLOSE["float64"]


def test_chunk_len_carries_the_error_of_a_pinned_window_into_the_next_estimate():
    """A window that starts from a wrong state solves its own equations well and is wrong all the same."""
    cell, x = problem(ParaTanh, 40, cap=None, scale=0.01)
    cell = cell.replace(a=np.full(5, 0.999, np.float32))
    wanted = sequential_apply(cell, x)
    got, stats = solve(cell, x, NewtonConfig(max_iters=0, residual_fail=None, chunk_len=2))
    assert error_of(cell, got, wanted) > 0.1
    assert stats.agreement_estimate > 0.5 * error_of(cell, got, wanted) and not stats.converged


def test_scan_tile_chooses_the_linear_scan_of_a_pinned_solve(monkeypatch):
    used = []
    for name in ("scan_diag", "scan_block"):
        whole = getattr(pararnn.per_step, name)
        monkeypatch.setattr(
            pararnn.per_step, name, lambda *a, whole=whole, **k: (used.append(k["method"]), whole(*a, **k))[1]
        )
    for kind in (ParaGRU, ParaLSTM):
        cell, x = problem(kind, 77)
        tree = newton_apply(cell, x, NewtonConfig(max_iters=3))
        assert set(used) == {"assoc"}
        used.clear()
        loop = newton_apply(cell, x, NewtonConfig(max_iters=3, scan_tile="seq"))
        assert set(used) == {"seq"}
        used.clear()
        assert error_of(cell, tree, loop) < 1e-5


# --- memory, the first step, the backend ------


@pytest.mark.parametrize("kind", CELLS)
def test_P30_recompute_keeps_no_states_and_gives_the_same_gradient(kind):
    cell, x = problem(kind, 50)
    grads, alive = {}, {}
    for recompute in (False, True):
        states, pullback = newton_vjp(cell, x, NewtonConfig(recompute=recompute, segment_len=10))
        cotangent, watch = np.ones_like(states), weakref.ref(states)
        del states
        gc.collect()
        alive[recompute] = watch() is not None
        grads[recompute] = pullback(cotangent)
    assert alive == {False: True, True: False}
    for name, value in grads[False].params.items():
        np.testing.assert_array_equal(grads[True].params[name], value)
    np.testing.assert_array_equal(grads[True].x, grads[False].x)


def test_verify_first_step_belongs_to_a_module_that_remembers():
    cell, x = problem(ParaGRU, 9)
    for run in (newton_apply, newton_vjp):
        with pytest.raises(TypeError, match=r"verify_first_step.*ParaRNN"):
            run(cell, x, NewtonConfig(verify_first_step=True))


def test_scan_backend_names_who_runs():
    cell, x = problem(ParaGRU, 40)
    for asked, ran in (("auto", "numpy"), ("numpy", "numpy"), ("array", "array"), ("eager", "array")):
        for more in ({}, {"segment_len": 8}, {"max_iters": 2}):
            _, stats = solve(cell, x, NewtonConfig(scan_backend=asked, **more))
            assert stats.scan_backend == ran
    for run in (newton_apply, newton_vjp, explain):
        with pytest.raises(ValueError, match=r"scan_backend='cuda9'.*auto.*numpy"):
            run(cell, x, NewtonConfig(scan_backend="cuda9"))


# --- promises ------


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("time", [1, 2, 65, 300])
def test_P01_the_parallel_run_equals_the_loop_within_tau(kind, time):
    for dtype in (np.float32, np.float64, np.float16):
        cell, x = problem(kind, time, dtype=dtype)
        for config in (None, NewtonConfig(segment_len=13), pinned(8)):
            report = verify_agreement(cell, x, config=config)
            assert report.ok and report.atol == default_agreement_atol(dtype), (dtype, config)


@pytest.mark.parametrize("kind", CELLS)
def test_P42_memory_layout_does_not_change_the_result(kind):
    cell, x = problem(kind, 83, batch=3)
    padded = np.full((3, 2 * 83, 7), 9.0, np.float32)
    padded[:, ::2, 1:4] = x
    views = {
        "strided": padded[:, ::2, 1:4],
        "Fortran": np.asfortranarray(x),
        "backwards": np.ascontiguousarray(x[:, ::-1])[:, ::-1],
        "time first": np.ascontiguousarray(np.moveaxis(x, 1, 0)).transpose(1, 0, 2),
        "unaligned": np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape),
    }
    # Gradients amplify the rounding of another order of summation in the projection, so they too are compared.
    for config in (NewtonConfig(), NewtonConfig(segment_len=11), NewtonConfig(max_iters=4)):
        wanted, pullback = newton_vjp(cell, x, config)
        gradient = pullback(np.ones_like(wanted))
        for name, view in views.items():
            np.testing.assert_array_equal(view, x)
            got, back = newton_vjp(cell, view, config)
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5, err_msg=name)
            np.testing.assert_allclose(back(np.ones_like(got)).x, gradient.x, rtol=1e-3, atol=1e-4, err_msg=name)
            np.testing.assert_allclose(sequential_apply(cell, view), sequential_apply(cell, x), rtol=1e-5, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(CELLS),
    time=st.integers(0, 60),
    batch=st.integers(1, 3),
    seed=st.integers(0, 9),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "segment_len": st.integers(1, 70),
            "warmup": st.integers(0, 70),
            "tol": st.sampled_from([1e-3, 1e-6, 1e-12]),
            "exact": st.booleans(),
            "max_passes": st.integers(1, 4),
            "chunk_len": st.integers(1, 70),
            "scan_backend": st.sampled_from(["numpy", "array"]),
            "coords": st.sampled_from(["auto", "native"]),
        },
    ),
)
def test_P01_every_combination_of_the_default_solver_s_fields_is_right_or_the_loop(kind, time, batch, seed, fields):
    cell, x = problem(kind, time, batch=batch, seed=seed, dtype=np.float64)
    got, stats = solve(cell, x, NewtonConfig(**fields))
    assert stats.converged
    assert error_of(cell, got, sequential_apply(cell, x)) <= 10 * fields.get("tol", 1e-11) + 1e-12
    if fields.get("exact"):
        assert stats.exact


def test_a_pinned_solve_that_is_not_right_warns_once_and_by_name():
    cell, x = problem(ParaGRU, 50)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        newton_apply(cell, x, NewtonConfig(max_iters=1))
    assert [w.category for w in caught] == [NotConvergedWarning]
    assert "1 pinned iterations" in str(caught[0].message) and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stats = NewtonStats()
        newton_apply(cell, x, NewtonConfig(max_iters=6), stats=stats)
    assert stats.converged
