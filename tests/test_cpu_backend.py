"""Compiled loops give what the array path gives: every program, cell, operation, layout, thread and process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from pararnn import (
    BackendUnavailableError,
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
)
from pararnn.arrays import resolve_namespace
from pararnn.engine import ArrayEngine
from pararnn.functions import log_sigmoid, sigmoid, softplus
from pararnn.graph.expr import ARITY, CONDITIONS
from pararnn.problem import make_problem
from pararnn.programs import LoopProgram, StepPrograms, programs_of
from pararnn.registry import backends
from pararnn_cpu import cut, cut_loop, time_loop
from pararnn_cpu.engine import CompiledEngine
from pararnn_cpu.product import add_products, multiply
from pararnn_cpu.threads import run_all, shares, thread_count
from support import CELLS, error_of, problem, solve, start_for, strong

XP = resolve_namespace(None)
CPU = NewtonConfig(scan_backend="cpu")
CLOSE = {"float32": 3e-5, "float64": 1e-12}
LOOPS = [
    name for name, value in vars(StepPrograms).items()
    if "LoopProgram" in str(getattr(getattr(value, "func", None), "__annotations__", {}).get("return", ""))
]  # fmt: skip


class Everything(ChannelwiseCell):
    """A cell with every operation that a step may use."""

    slots = ("h", "g")
    gates = ("u", "v")
    params = ("a", "b")

    def step(self, xp, h, g, u, v, a, b):
        s = sigmoid(xp, a * h + u) + 0.1 * softplus(xp, v) + 0.01 * log_sigmoid(xp, u)
        t = xp.tanh(b * g + v) - xp.exp(-xp.abs(u)) / (1.5 + xp.cos(h))
        p = xp.sqrt(1.0 + t * t) * xp.log(2.0 + s * s) + xp.log1p(s * s) - xp.expm1(-t * t) + (1.0 + s * s) ** 0.3
        q = xp.where(h > g, xp.sin(p), xp.sign(v) * 0.5) + xp.where(h <= 0.1, u, -v) + xp.where(g < u, 0.1, s)
        q = q + xp.where(u >= v, t, 0.0) + xp.where(u == v, 1.0, 0.0)
        h = xp.minimum(xp.maximum(0.3 * q, -1.0), 1.0)
        return h, 0.5 * xp.tanh(xp.logaddexp(h, g))


def compiled_programs():
    return [(kind, name) for kind in (*CELLS, Everything) for name in LOOPS]


def operands(loop: LoopProgram, lanes, steps, dtype, seed=0):
    """Random arrays for a loop; slots like sLSTM's n are positive anyway, so nothing is."""
    rng = np.random.default_rng(seed)

    def make(*shape):
        return rng.uniform(0.1, 0.9, shape).astype(dtype)

    carry = [make(lanes) for _ in range(loop.carry)]
    rows = [make(steps, lanes) - 0.3 for _ in range(loop.rows)]
    return carry, [r.astype(dtype) for r in rows], [make(lanes) - 0.5 for _ in range(loop.consts)]


def same_results(mine, true, close):
    for name in ("carry", "kept", "stored", "totals"):
        ours, theirs = getattr(mine, name), getattr(true, name)
        assert len(ours) == len(theirs), name
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape, name
            scale = max(1.0, float(np.max(np.abs(b), initial=0.0)))
            np.testing.assert_allclose(a.astype(np.float64), b, rtol=0, atol=close * scale, err_msg=name)


def run_both(loop, lanes, steps, dtype, reverse=False, keep=0, exact=False):
    """The compiled loop, and the array engine in float64 on the same numbers."""
    given = operands(loop, lanes, steps, dtype)
    wide = [[a.astype(np.float64) for a in group] for group in given]
    keep = min(keep, loop.carry)
    mine = CompiledEngine(XP, exact).loop(loop, *given, reverse=reverse, keep=keep)
    with np.errstate(all="ignore"):
        true = ArrayEngine(XP).loop(loop, *wide, reverse=reverse, keep=keep)
    return mine, true


def test_all_loops_are_known():
    assert {"advance", "advance_tangent", "correct", "back_propagate", "adjoint"} <= set(LOOPS)
    used = {i.op for name in LOOPS for i in getattr(programs_of(Everything(1, 1)), name).program.instructions}
    assert used >= set(ARITY), set(ARITY) - used


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("kind", "name"), compiled_programs())
def test_loops(kind, name, dtype):
    """Every program of every cell, forward and in reverse, with full and partial vectors."""
    loop = getattr(programs_of(kind(2, 3)), name)
    for lanes, steps, reverse, keep in ((70, 5, False, loop.carry), (5, 30, True, loop.carry), (1, 3, False, 0)):
        mine, true = run_both(loop, lanes, steps, dtype, reverse, keep)
        same_results(mine, true, CLOSE[dtype])


@pytest.mark.parametrize("lanes", range(1, 71))
def test_every_number_of_lanes(lanes):
    """Vectors of every width, full, partial and shared; what lies beside an array stays as it was."""
    programs = programs_of(ParaGRU(2, 3))
    for loop, reverse in ((programs.advance, False), (programs.back_propagate, True)):
        mine, true = run_both(loop, lanes, 4, "float32", reverse, keep=1)
        same_results(mine, true, CLOSE["float32"])
    cell, x = problem(ParaGRU, 30, batch=3, width=lanes, features=2)
    assert error_of(cell, newton_apply(cell, x, CPU), sequential_apply(cell, x)) < 1e-6


def test_exact_mode():
    """The C library's functions: float32 results are the float64 ones, rounded at each step."""
    for kind in (*CELLS, Everything):
        for lanes in (1, 3, 8, 21):
            mine, true = run_both(programs_of(kind(2, 3)).advance, lanes, 6, "float32", keep=1, exact=True)
            same_results(mine, true, 1e-6)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_few_rows(steps):
    """No row, one and two, in both directions."""
    loop = programs_of(ParaLSTM(2, 3)).advance
    for reverse in (False, True):
        given = operands(loop, 9, steps, "float32")
        mine = CompiledEngine(XP).loop(loop, *given, reverse=reverse, keep=2)
        assert [k.shape for k in mine.kept] == [(steps + 1, 9)] * 2
        if steps:
            same_results(mine, ArrayEngine(XP).loop(loop, *given, reverse=reverse, keep=2), 1e-6)
        else:
            np.testing.assert_array_equal(mine.carry[0], given[0][0])


def test_results_share_nothing_with_operands():
    loop = programs_of(ParaGRU(2, 3)).advance
    carry, rows, consts = operands(loop, 40, 7, "float32")
    before = [a.copy() for a in (*carry, *rows, *consts)]
    CompiledEngine(XP).loop(loop, carry, rows, consts, keep=1)
    for a, b in zip((*carry, *rows, *consts), before, strict=True):
        np.testing.assert_array_equal(a, b)


# Whole problems.


def gradients(cell, x, cotangent, backend="cpu", h0=None):
    _, pullback = newton_vjp(cell, x, NewtonConfig(scan_backend=backend), h0)
    found = pullback(cotangent)
    return {"x": found.x, "h0": found.h0, **found.params}


def wide_gradients(cell, x, cotangent, h0=None):
    """The array path's gradients in float64."""
    h0 = None if h0 is None else h0.astype(np.float64)
    return gradients(cell.to(dtype=np.float64), x.astype(np.float64), cotangent.astype(np.float64), "array", h0)


def near(mine, true, close):
    for name, value in true.items():
        scale = float(np.max(np.abs(value), initial=0.0)) or 1.0
        error = float(np.max(np.abs(np.asarray(mine[name], np.float64) - value), initial=0.0))
        assert error <= close * scale, f"{name}: {error:.2e} of {scale:.2e}"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", [*CELLS, Everything])
def test_states_and_gradients(kind, dtype):
    """newton_apply and newton_vjp against the oracle, with and without a start."""
    for batch, time, width, features in ((1, 1, 1, 1), (2, 2, 3, 1), (3, 100, 5, 4), (1, 61, 70, 33), (17, 40, 2, 3)):
        cell, x = problem(kind, time, batch=batch, width=width, features=features, dtype=np.dtype(dtype))
        for h0 in (None, start_for(cell, batch)):
            states, stats = solve(cell, x, CPU, h0=h0)
            assert stats.scan_backend == "cpu" and stats.exact
            assert error_of(cell, states, sequential_apply(cell, x, h0)) < {"float32": 3e-6, "float64": 1e-13}[dtype]
            cotangent = np.random.default_rng(5).standard_normal(states.shape).astype(dtype)
            near(
                gradients(cell, x, cotangent, h0=h0),
                wide_gradients(cell, x, cotangent, h0),
                {"float32": 2e-5, "float64": 1e-11}[dtype],
            )


def test_gradient_by_finite_differences():
    """The directional derivative in float64, by differences."""
    rng = np.random.default_rng(0)
    for kind in CELLS:
        cell, x = problem(kind, 50, dtype=np.float64)
        states, pullback = newton_vjp(cell, x, CPU)
        cotangent = rng.standard_normal(states.shape)
        found, step = pullback(cotangent), 1e-6
        towards = {name: rng.standard_normal(a.shape) for name, a in cell.arrays.items()}
        d_x = rng.standard_normal(x.shape)

        def value(t, cell=cell, x=x, d_x=d_x, towards=towards, cotangent=cotangent):
            moved = cell.replace(**{name: a + t * towards[name] for name, a in cell.arrays.items()})
            return float(np.sum(newton_apply(moved, x + t * d_x, CPU) * cotangent))

        numeric = (value(step) - value(-step)) / (2 * step)
        analytic = np.sum(found.x * d_x) + sum(np.sum(found.params[n] * towards[n]) for n in towards)
        assert abs(numeric - analytic) < 1e-6 * max(1.0, abs(analytic))


def test_long_gradient_in_stretches(monkeypatch):
    """A gradient in many stretches of time is the same as in one."""
    cell, x = problem(ParaLSTM, 700, width=6)
    cotangent = np.random.default_rng(1).standard_normal((2, 700, 2, 6)).astype(np.float32)
    whole = gradients(cell, x, cotangent)
    monkeypatch.setattr(time_loop, "STRETCH_BYTES", 5000)
    near(gradients(cell, x, cotangent), {n: v.astype(np.float64) for n, v in whole.items()}, 1e-5)


@pytest.mark.parametrize("how", ["fortran", "reversed", "read-only", "broadcast", "strided", "unaligned"])
def test_layouts(how):
    """Inputs in any layout and alignment; nothing is written into them."""
    cell, x = problem(ParaLSTM, 90, features=7, width=12)
    if how == "broadcast":
        x = np.broadcast_to(x[:1], x.shape)
    cotangent = np.random.default_rng(1).standard_normal((2, 90, 2, 12)).astype(np.float32)
    h0 = start_for(cell, 2)
    plain = np.ascontiguousarray(x)

    def laid(a):
        if how == "fortran":
            return np.asfortranarray(a)
        if how == "reversed":
            return np.ascontiguousarray(a[..., ::-1])[..., ::-1]
        if how == "strided":
            wide = np.repeat(a, 3, axis=-1)[..., ::3]
            return wide if a.ndim == 1 else np.repeat(wide, 2, axis=0)[::2]
        if how == "unaligned":
            raw = np.zeros(a.nbytes + 1, np.uint8)
            view = raw[1:].view(a.dtype).reshape(a.shape)
            view[...] = a
            return view
        if how == "read-only":
            a = a.copy()
            a.flags.writeable = False
        return a

    odd = cell._copy(cell.max_recurrent_norm, {name: laid(a) for name, a in cell.arrays.items()})
    given = x if how == "broadcast" else laid(x)
    before = given.copy()
    states = newton_apply(odd, given, CPU, h0=laid(h0))
    np.testing.assert_array_equal(states, newton_apply(cell, plain, CPU, h0=h0))
    mine, true = gradients(odd, given, laid(cotangent), h0=laid(h0)), gradients(cell, plain, cotangent, h0=h0)
    for name, value in true.items():
        np.testing.assert_array_equal(mine[name], value, err_msg=name)
    np.testing.assert_array_equal(given, before)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-42])
@pytest.mark.parametrize("kind", CELLS)
def test_extreme_inputs(kind, value):
    """Where the oracle has NaN so have we, elsewhere we agree; other sequences and earlier steps are untouched."""
    cell, x = problem(kind, 40)
    x[0, 20, 1] = value
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = newton_apply(cell, x, CPU)
        true = sequential_apply(cell, x)
    with np.errstate(invalid="ignore"):
        assert error_of(cell, mine, true) < 1e-5
    clean = newton_apply(cell, np.where(np.isfinite(x), x, 0.0).astype(np.float32), CPU)
    np.testing.assert_array_equal(mine[0, :20], clean[0, :20])
    np.testing.assert_array_equal(mine[1], clean[1])


def test_half_precision():
    """Stored in half, computed in float32: the float32 loop's result, rounded once."""
    for kind in CELLS:
        cell, x = problem(kind, 3000, batch=1, features=70, dtype=np.float16)
        wide = sequential_apply(cell.to(dtype=np.float32), x.astype(np.float32))
        mine = newton_apply(cell, x, CPU)
        assert mine.dtype == np.float16
        assert error_of(cell, mine, wide) < 2.0**-10
        cotangent = np.full(mine.shape, 0.01, np.float16)
        found = gradients(cell, x, cotangent)
        assert {a.dtype for a in found.values()} == {np.dtype(np.float16)}
        near(found, wide_gradients(cell, x, cotangent), 2e-3)


def test_empty():
    """No sequences, no steps."""
    for batch, time in ((0, 5), (3, 0), (0, 0)):
        cell, x = problem(ParaLSTM, time, batch=batch)
        states, pullback = newton_vjp(cell, x, CPU)
        assert states.shape == (batch, time, 2, 5)
        found = pullback(states)
        assert found.x.shape == x.shape and found.h0.shape == (batch, 2, 5)
        assert not any(np.any(a) for a in found.params.values())


def test_products():
    """The two matrix products against NumPy's, in all sorts of shapes."""
    rng = np.random.default_rng(0)
    for dtype, close in ((np.float32, 1e-5), (np.float64, 1e-13)):
        for batch, rows, depth, columns in (
            (1, 1, 1, 1),
            (2, 7, 5, 3),
            (3, 50, 300, 33),
            (1, 13, 700, 64),
            (0, 4, 4, 4),
        ):
            left = rng.standard_normal((batch, rows, depth)).astype(dtype)
            right = rng.standard_normal((depth, columns)).astype(dtype)
            out = np.full((batch, rows, columns), np.nan, dtype)
            multiply(left, right, out)
            np.testing.assert_allclose(out, left @ right, atol=close * depth)
            tall = rng.standard_normal((batch, depth, columns)).astype(dtype)
            total = rng.standard_normal((rows, columns)).astype(dtype)
            wanted = total + np.einsum("brk,bkn->rn", left, tall)
            add_products(left, tall, total)
            np.testing.assert_allclose(total, wanted, atol=close * depth)


# Segments of the compiled loop.


@pytest.mark.parametrize("kind", [ParaTanh, ParaGRU, ParaLSTM])
def test_cut_loop_is_the_loop(kind):
    """Segments that meet give the plain loop bit for bit; so do those that do not, through the time loop."""
    for batch, width, size in ((1, 1, 0.5), (2, 3, 0.5), (1, 4, 3.0)):
        cell, x = strong(kind, 20011, size, batch=batch, width=width, features=2)
        given = make_problem("test", cell, x, start_for(cell, batch), CPU)
        plan = cut.cut_of(given) or cut.Cut(100, 200)
        states, again = cut_loop.run_forward(given, plan)
        np.testing.assert_array_equal(states, time_loop.run_forward(given, exact=False))
        assert again == 0 or size > 1.0


def test_cut_loop_finishes_what_does_not_meet():
    """A cell that never forgets: only the first segment is right, the rest is walked, and nothing is wrong."""

    class Counts(ChannelwiseCell):
        slots, gates, params = ("h",), ("u",), ()

        def step(self, xp, h, u):
            return (h + u,)

    x = np.random.default_rng(0).standard_normal((1, 20000, 1)).astype(np.float32)
    cell = Counts(1, 2, seed=0)
    states, stats = solve(cell, x, CPU)
    assert stats.path == "segments" and stats.exact and stats.walked > 0.9
    given = make_problem("test", cell, x, None, CPU)
    np.testing.assert_array_equal(states, time_loop.run_forward(given, exact=False))


def test_cut_is_reported():
    cell, x = problem(ParaGRU, 20000, batch=1, width=2)
    _, stats = solve(cell, x, CPU)
    found = explain(cell, x, CPU)
    assert (found.path, found.segment_len, found.segments) == ("segments", stats.segment_len, stats.segments)
    assert found.reason == stats.reason and stats.walked == 0.0
    _, ordered = solve(cell, x, CPU.replace(segment_len=20000))
    assert ordered.path == "sequential"


# Choice.


def test_auto_takes_it_where_compiling_pays():
    """A problem of a few milliseconds is compiled, a shorter one refused; the same call always runs the same way."""
    cell, x = problem(ParaGRU, 20000, batch=1, width=20)
    assert explain(cell, x).backend == "cpu"
    short = explain(cell, x[:, :50])
    assert short.backend == "numpy"
    assert "compiling would not pay" in short.refusals["cpu"] and " ms;" in short.refusals["cpu"]
    assert explain(cell, x[:, :50], CPU).backend == "cpu"
    newton_apply(cell, x[:, :50], CPU)
    assert explain(cell, x[:, :50]).backend == "numpy"
    # A given segment length says nothing about whether compiling pays.
    assert explain(cell, x, NewtonConfig(segment_len=64)).backend == "cpu"


def test_other_arrays_are_refused():
    array_api_strict = pytest.importorskip("array_api_strict")
    cell = ParaGRU(2, 3, xp=array_api_strict, seed=0)
    x = array_api_strict.zeros((1, 4, 2))
    with pytest.raises(TypeError, match="NumPy arrays and CPU tensors"):
        newton_apply(cell, x.astype(array_api_strict.float32) if hasattr(x, "astype") else
                     array_api_strict.astype(x, array_api_strict.float32), CPU)  # fmt: skip


def in_subprocess(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_llvmlite_is_imported_only_when_used():
    code = """
import sys, numpy as np, pararnn
from pararnn import ParaGRU, NewtonConfig, newton_apply, explain
cell, x = ParaGRU(2, 3, seed=0), np.ones((1, 30, 2), np.float32)
newton_apply(cell, x); explain(cell, x); newton_apply(cell, x, NewtonConfig(scan_backend="numpy"))
print("llvmlite" in sys.modules)
newton_apply(cell, x, NewtonConfig(scan_backend="cpu"))
print("llvmlite" in sys.modules)
"""
    assert in_subprocess(code).split() == ["False", "True"]


BLOCKER = """
import sys, numpy as np, pararnn
from importlib.abc import MetaPathFinder
class Block(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {what!r}:
            raise {error}("not on this machine")
sys.meta_path.insert(0, Block())
from pararnn import BackendUnavailableError, NewtonConfig, ParaGRU, explain, newton_apply
cell, x = ParaGRU(2, 20, seed=0), np.ones((1, 20000, 2), np.float32)
found = explain(cell, x)
print(found.backend, "|", found.refusals["cpu"])
newton_apply(cell, x[:, :100])
try:
    newton_apply(cell, x, NewtonConfig(scan_backend="cpu"))
except BackendUnavailableError as error:
    print(error)
"""


@pytest.mark.parametrize(("what", "error"), [("llvmlite.binding", "OSError"), ("llvmlite", "ModuleNotFoundError")])
def test_broken_llvmlite_leaves_numpy(what, error):
    """A library that does not load: NumPy runs, explain says why, and naming the backend is an error."""
    first, second = in_subprocess(BLOCKER.format(what=what, error=error)).strip().splitlines()
    assert first.startswith("numpy |") and "not on this machine" in first and "pararnn[cpu]" in first
    assert "cannot run here" in second and "not on this machine" in second


def test_absent_llvmlite_leaves_numpy():
    code = BLOCKER.format(what="-", error="-").replace(
        "from pararnn import",
        "import pararnn_cpu\nsys.modules['pararnn_cpu.backend'].find_spec = lambda name: None\nfrom pararnn import",
        1,
    )
    first, second = in_subprocess(code).strip().splitlines()
    assert first == "numpy | llvmlite is not installed; pip install 'pararnn[cpu]'"
    assert "llvmlite is not installed" in second


def test_named_backend_without_llvmlite(monkeypatch):
    """The sentence of a library that fails on import reaches the caller as the documented error."""
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    cell, x = problem(ParaGRU, 5)
    with pytest.raises(BackendUnavailableError, match="llvmlite does not import"):
        newton_apply(cell, x, CPU)


# Threads and processes.


def many_threads(monkeypatch, count):
    monkeypatch.setenv("PARARNN_NUM_THREADS", str(count))


def test_thread_count(monkeypatch):
    """PARARNN_NUM_THREADS, then OMP_NUM_THREADS, then the cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert thread_count() == 3
    monkeypatch.setenv("PARARNN_NUM_THREADS", "2")
    assert thread_count() == 2
    for useless in ("", "0", "many", "-1"):
        monkeypatch.setenv("PARARNN_NUM_THREADS", useless)
        assert thread_count() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert thread_count() >= 1
    many_threads(monkeypatch, 4)
    assert shares(10, 100) == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert shares(3, 2) == [(0, 1), (1, 3)] and shares(0, 0) == [(0, 0)]


@pytest.mark.parametrize("shape", [(1, 3000, 70), (5, 1500, 40), (3, 2000, 3), (1, 20000, 2), (9, 800, 1)])
def test_bits_do_not_depend_on_threads(shape, monkeypatch):
    """One to seven threads: states and gradients bit for bit the same."""
    batch, time, width = shape
    for kind in (ParaGRU, ParaSLSTM):
        cell, x = problem(kind, time, batch=batch, width=width, features=5)
        cotangent = np.random.default_rng(1).standard_normal((batch, time, *cell.state_shape)).astype(np.float32)
        first = None
        for count in (1, 2, 3, 7):
            many_threads(monkeypatch, count)
            found = {"states": newton_apply(cell, x, CPU), **gradients(cell, x, cotangent)}
            first = first or found
            for name, value in first.items():
                np.testing.assert_array_equal(found[name], value, err_msg=f"{name}, {count} threads")


def test_errors_in_tasks_reach_the_caller():
    done = []

    def fails():
        raise ZeroDivisionError("in a task")

    for tasks in ([fails, lambda: done.append(1)], [lambda: done.append(1), fails], [fails]):
        with pytest.raises(ZeroDivisionError):
            run_all(tasks)
    assert len(done) == 2
    run_all([])


def test_calls_from_many_threads(monkeypatch):
    """Eight Python threads at once, each with its own problem: everyone gets their own result."""
    many_threads(monkeypatch, 3)
    problems = [problem(ParaGRU, 2000 + k, batch=1 + k % 3, width=20 + k, seed=k) for k in range(8)]
    wanted = [sequential_apply(cell, x) for cell, x in problems]
    errors = []

    def work(k):
        try:
            for _ in range(5):
                cell, x = problems[k]
                assert error_of(cell, newton_apply(cell, x, CPU), wanted[k]) < 1e-5
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


FORK = """
import multiprocessing, numpy as np, warnings
from pararnn import NewtonConfig, ParaGRU, newton_apply, sequential_apply
warnings.simplefilter("ignore")
CPU = NewtonConfig(scan_backend="cpu")
cell, x = ParaGRU(2, 77, seed=0), np.random.default_rng(0).standard_normal((1, 3000, 2)).astype(np.float32)
def child(queue):
    queue.put(newton_apply(cell, x, CPU))
if {used}:
    newton_apply(cell, x, CPU)
context = multiprocessing.get_context("fork")
queue = context.Queue()
children = [context.Process(target=child, args=(queue,)) for _ in range(2)]
for process in children:
    process.start()
results = [queue.get(timeout=120) for _ in children]
for process in children:
    process.join(timeout=120)
    assert process.exitcode == 0
for states in (*results, newton_apply(cell, x, CPU)):
    assert np.abs(states - sequential_apply(cell, x)).max() < 1e-5
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("used", [True, False])
def test_after_fork(used, tmp_path):
    """A forked child runs with threads of its own, whether the parent had compiled and used some before or not."""
    # In a process of its own: other libraries' threads make forking here a hazard.
    in_subprocess(FORK.format(used=used), PARARNN_NUM_THREADS="3", PARARNN_CACHE_DIR=str(tmp_path))


# The cache.

ONE_RUN = """
import numpy as np, time
from pararnn import NewtonConfig, ParaGRU, newton_apply, sequential_apply
cell, x = ParaGRU(2, 5, seed=0), np.random.default_rng(0).standard_normal((2, 50, 2)).astype(np.float32)
begin = time.perf_counter()
mine = newton_apply(cell, x, NewtonConfig(scan_backend="cpu"))
took = time.perf_counter() - begin
assert np.abs(mine - sequential_apply(cell, x)).max() < 1e-6
print(took)
"""


def test_cache_is_kept_and_survives_damage(tmp_path):
    """Written once, read again; truncated, scrambled and empty entries are compiled anew."""
    assert float(in_subprocess(ONE_RUN, PARARNN_CACHE_DIR=str(tmp_path))) < 10.0
    (entry,) = tmp_path.iterdir()
    good, stamp = entry.read_bytes(), entry.stat().st_mtime_ns
    in_subprocess(ONE_RUN, PARARNN_CACHE_DIR=str(tmp_path))
    assert entry.stat().st_mtime_ns == stamp
    for bad in (good[: len(good) // 2], b"", good[:40] + b"\\x00" * 100 + good[140:], b"x" * 5000):
        entry.write_bytes(bad)
        in_subprocess(ONE_RUN, PARARNN_CACHE_DIR=str(tmp_path))
        assert entry.read_bytes() == good
    assert list(tmp_path.iterdir()) == [entry]


def test_cache_folder_that_cannot_be_written(tmp_path):
    """A file where the folder should be: everything runs, nothing is kept."""
    taken = tmp_path / "taken"
    taken.write_text("a file")
    in_subprocess(ONE_RUN, PARARNN_CACHE_DIR=str(taken))
    in_subprocess(ONE_RUN, PARARNN_CACHE_DIR=str(taken / "below"))
    assert taken.read_text() == "a file"


def test_two_processes_compile_at_once(tmp_path):
    command = [sys.executable, "-c", ONE_RUN]
    environment = {**os.environ, "PARARNN_CACHE_DIR": str(tmp_path)}
    running = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for _ in range(3)]
    for process in running:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    assert len(list(tmp_path.iterdir())) == 1


OTHER_PROCESSOR = """
import llvmlite.binding as llvm, numpy as np
import pararnn_cpu.compile as c
from pararnn_cpu.emit import Machine
host, other = c._target(), Machine(fma={fma}, vector_bytes={bytes}, registers=16)
target = llvm.Target.from_default_triple().create_target_machine(cpu={cpu!r}, features="", opt=3, jit=True)
c._target, c.machine = lambda: target, lambda: other
from pararnn import *
for kind in (ParaGRU, ParaLSTM, ParaSLSTM):
    for batch, width, features in ((1, 1, 1), (3, 5, 2), (1, 37, 9), (2, 64, 33)):
        cell = kind(features, width, seed=0)
        x = np.random.default_rng(0).standard_normal((batch, 40, features)).astype(np.float32)
        states, pullback = newton_vjp(cell, x, NewtonConfig(scan_backend="cpu"))
        assert np.abs(states - sequential_apply(cell, x)).max() < 1e-5
        wide, reference = newton_vjp(cell, x, NewtonConfig(scan_backend="array"))
        mine, true = pullback(np.ones_like(states)), reference(np.ones_like(wide))
        for a, b in ((mine.x, true.x), *((mine.params[n], true.params[n]) for n in true.params)):
            assert np.abs(a - b).max() <= 1e-4 * np.abs(b).max()
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the processors are x86-64 ones")
@pytest.mark.parametrize("processor", [("x86-64", False, 16), ("haswell", True, 32)])
def test_code_for_other_processors(processor, tmp_path):
    """Code for narrower vectors, without fused multiply-add and masked loads, is right too."""
    import llvmlite.binding as llvm

    cpu, fma, vector_bytes = processor
    if fma and not llvm.get_host_cpu_features().get("avx2"):
        pytest.skip("this processor has no AVX2")
    # A folder of its own: the cache goes by the processor, which here is a pretence.
    in_subprocess(OTHER_PROCESSOR.format(cpu=cpu, fma=fma, bytes=vector_bytes), PARARNN_CACHE_DIR=str(tmp_path))


# CPU tensors.


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", [ParaGRU, ParaSLSTM])
def test_tensors(kind, dtype, torch):
    """States and gradients of CPU tensors, as of NumPy arrays; half precision in its own dtype."""
    kind_of = getattr(torch, dtype)
    cell = kind(3, 5, seed=0, xp=torch, dtype=kind_of)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 60, 3))).to(kind_of)
    stats = NewtonStats()
    states = newton_apply(cell, x, CPU, stats=stats)
    assert states.dtype == kind_of and stats.scan_backend == "cpu" and stats.lyapunov < 1.0
    true = sequential_apply(cell, x)
    unit = {"float64": 1e-13, "float32": 1e-6, "float16": 2.0**-9, "bfloat16": 2.0**-6}[dtype]
    assert error_of(cell, states.double().numpy(), true.double().numpy()) < unit
    _, pullback = newton_vjp(cell, x, CPU)
    found = pullback(torch.ones_like(states), last=torch.ones_like(states[:, -1]))
    _, reference = newton_vjp(cell, x, NewtonConfig(scan_backend="array"))
    wanted = reference(torch.ones_like(states), last=torch.ones_like(states[:, -1]))
    for name, mine, theirs in (
        ("x", found.x, wanted.x),
        ("h0", found.h0, wanted.h0),
        *((n, found.params[n], wanted.params[n]) for n in wanted.params),
    ):
        assert mine.dtype == kind_of and mine.shape == theirs.shape, name
        gap = (mine.double() - theirs.double()).abs().max() / theirs.double().abs().max()
        assert gap < 20 * unit, name


def test_tensors_are_not_copied(torch):
    """Views go in, and what comes out is the memory that the loop wrote."""
    from pararnn_cpu.views import numpy_problem

    cell = ParaGRU(3, 5, seed=0, xp=torch)
    x = torch.randn(2, 60, 3)
    seen, give = numpy_problem(make_problem("test", cell, x, None, CPU))
    assert np.shares_memory(seen.x, x.numpy())
    assert all(np.shares_memory(a, cell.arrays[n].numpy()) for n, a in seen.cell.arrays.items())
    made = np.zeros((2, 3), np.float32)
    assert np.shares_memory(give(made).numpy(), made)


def test_autograd_runs_through_it(torch):
    """torch's own gradient of a loss on states from this backend, against autograd through the plain loop."""
    cell = ParaLSTM(3, 5, seed=0, xp=torch, dtype=torch.float64)
    leaves = {name: a.clone().requires_grad_() for name, a in cell.arrays.items()}
    tracked = cell.replace(**leaves)
    x = torch.randn(2, 40, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 40, 2, 5, dtype=torch.float64)
    every = [x, *leaves.values()]
    mine = torch.autograd.grad((newton_apply(tracked, x, CPU) * weight).sum(), every)
    true = torch.autograd.grad((sequential_apply(tracked, x) * weight).sum(), every)
    for a, b in zip(mine, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_tensors_that_require_grad_are_refused(torch):
    """The backend itself is outside autograd and says so."""
    cell, x = ParaGRU(3, 5, seed=0, xp=torch), torch.randn(2, 60, 3, requires_grad=True)
    known = backends()["cpu"]
    assert "require grad" in known.accepts(make_problem("test", cell, x, None, CPU))
    assert known.accepts(make_problem("test", cell, x.detach(), None, CPU)) is None


def test_conditions_are_no_results():
    """Comparisons only ever feed `where`: the printers rely on it."""
    for kind in (*CELLS, Everything):
        for name in LOOPS:
            program = getattr(programs_of(kind(1, 1)), name).program
            made = {i.target for i in program.instructions if i.op in CONDITIONS}
            assert not made & set(program.outputs)
