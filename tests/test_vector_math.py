"""The vectorised functions stay within 4 units in the last place, and keep NaN, infinities and denormals."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from pararnn.arrays import resolve_namespace
from pararnn.graph import Graph
from pararnn.programs import loop_program
from pararnn_cpu.engine import CompiledEngine

MOST_ULP = 4.0
INF, NAN = np.inf, np.nan
TRUTH = {
    "exp": np.exp,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
}
# exp(-x) overflows below, and with it the form 1 / (exp(-x) + 1) that NumPy's path has too: what is left there is 0.
SIGMOID_FROM = {"float32": -88.37, "float64": -709.43}
# On x86 the reference for float64 has 11 bits more; elsewhere long double may be double.
WIDER = {"float32": np.float64, "float64": np.longdouble}


def run(op, *arrays, exact=False):
    """One operation of the expression graph, compiled."""
    graph = Graph()
    names = [f"x{k}" for k in range(len(arrays))]
    stored = [graph.apply(op, *(graph.input(n) for n in names))]
    loop = loop_program(graph, carry=[], rows=names, consts=[], new=[], stored=stored)
    engine = CompiledEngine(resolve_namespace(None), exact)
    return engine.loop(loop, [], [a[None] for a in arrays], []).stored[0][0]


def sample(dtype, seed=0):
    """About a million numbers: any bits whatever, the range in which functions bend, and edges."""
    rng = np.random.default_rng(seed)
    bits = {"float32": np.uint32, "float64": np.uint64}[dtype]
    any_bits = rng.integers(0, np.iinfo(bits).max, 500_000, dtype=bits, endpoint=True).view(dtype)
    reach = {"float32": 110.0, "float64": 760.0}[dtype]
    info = np.finfo(dtype)
    edges = [0.0, 1.0, info.max, info.tiny, info.smallest_subnormal, info.eps, reach, INF]
    edges += [np.nextafter(dtype_type(dtype)(e), dtype_type(dtype)(t)) for e in (1.0, info.tiny) for t in (0.0, 2.0)]
    edges += [88.72, 88.73, 103.9, 104.1, 87.33, 88.37, 709.78, 709.79, 745.1, 745.2, 708.4, 709.43, 80.0, 700.0, 40.0]
    return np.concatenate(
        [
            any_bits,
            np.linspace(-reach, reach, 250_000).astype(dtype),
            np.linspace(-3.0, 3.0, 250_000).astype(dtype),
            np.array([*edges, *(-e for e in edges), NAN], dtype),
        ]
    )


def dtype_type(dtype):
    return np.dtype(dtype).type


def ulps(got, truth):
    """Distance from the true value in units of the last place of the true value."""
    rounded = truth.astype(got.dtype)
    finite = np.isfinite(rounded)
    unit = np.spacing(np.abs(np.where(finite, rounded, 1.0)))
    with np.errstate(all="ignore"):
        error = np.abs(got.astype(truth.dtype) - truth) / unit
    same = (np.isnan(got) & np.isnan(rounded)) | (got == rounded)
    return np.where(finite, np.nan_to_num(error, nan=INF), np.where(same, 0.0, INF)).astype(np.float64)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", TRUTH)
def test_accuracy(op, dtype):
    """Within 4 ulp of the true value, everywhere."""
    x = sample(dtype)
    got, truth = run(op, x), TRUTH[op](x.astype(WIDER[dtype]))
    error = ulps(got, truth)
    if op == "sigmoid":
        error = np.where(x >= SIGMOID_FROM[dtype], error, 0.0)
        assert np.all(got[x < SIGMOID_FROM[dtype]] == 0.0)
    worst = int(np.argmax(error))
    assert error[worst] <= MOST_ULP, f"{op}({x[worst]!r}) = {got[worst]!r}, off by {error[worst]:.2f} ulp"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logaddexp(dtype):
    """Within 4 ulp of the larger operand: where the two cancel to nothing, no form does better."""
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(0, 30, 200_000), rng.normal(0, 1, 200_000), [INF, -INF, INF, NAN, 1.0, -INF]])
    y = np.concatenate([rng.normal(0, 30, 200_000), rng.normal(0, 1, 200_000), [INF, -INF, -INF, 0.0, NAN, 2.0]])
    x, y = x.astype(dtype), y.astype(dtype)
    got, truth = run("logaddexp", x, y), np.logaddexp(x.astype(WIDER[dtype]), y.astype(WIDER[dtype]))
    finite = np.isfinite(truth) & np.isfinite(x) & np.isfinite(y)
    unit = np.spacing(np.maximum(np.maximum(np.abs(x), np.abs(y)), 1.0)[finite])
    assert np.max(np.abs(got.astype(truth.dtype) - truth)[finite] / unit) <= MOST_ULP
    np.testing.assert_array_equal(got[~finite], truth[~finite].astype(dtype))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("op", TRUTH)
def test_exact_mode_is_the_c_library(op):
    """exact: double precision inside, so single precision is rounded once or twice, never worse."""
    x = sample("float32", seed=2)[::10]
    error = ulps(run(op, x, exact=True), TRUTH[op](x.astype(np.float64)))
    if op == "sigmoid":
        error = np.where(x >= SIGMOID_FROM["float32"], error, 0.0)
        assert np.max(error) <= 2.0  # three roundings of its own
    else:
        assert np.max(error) <= 0.5000001


@pytest.mark.parametrize("op", ["exp", "tanh", "sigmoid", "sin"])
def test_bits_do_not_depend_on_the_place(op):
    """A number's result does not depend on its lane, or on how many lanes there are."""
    x = np.random.default_rng(3).normal(0, 4, 133).astype(np.float32)
    whole = run(op, x)
    for lanes in (1, 2, 3, 5, 8, 13, 31, 32, 33, 64, 65, 127):
        np.testing.assert_array_equal(run(op, np.ascontiguousarray(x[-lanes:])), whole[-lanes:])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_selection_and_sign_follow_numpy(dtype):
    """NaN wins from either side; comparisons with NaN are false; signs and infinities as NumPy has them."""
    edge = np.array([0.0, -0.0, 1.0, -2.5, INF, -INF, NAN, np.finfo(dtype).smallest_subnormal], dtype)
    x, y = (a.ravel().copy() for a in np.meshgrid(edge, edge))
    for op in ("maximum", "minimum", "add", "subtract", "multiply", "divide"):
        ours = {"subtract": "sub", "multiply": "mul", "divide": "div"}.get(op, op)
        np.testing.assert_array_equal(run(ours, x, y), getattr(np, op)(x, y))
    for op in ("sign", "abs", "negative"):
        np.testing.assert_array_equal(run({"negative": "neg"}.get(op, op), x), getattr(np, op)(x))
    graph = Graph()
    a, b = graph.input("a"), graph.input("b")
    ones, zeros = graph.const(1.0), graph.const(0.0)
    for op in ("less", "less_equal", "greater", "greater_equal", "equal"):
        stored = [graph.apply("where", graph.apply(op, a, b), ones, zeros)]
        loop = loop_program(graph, carry=[], rows=["a", "b"], consts=[], new=[], stored=stored)
        got = CompiledEngine(resolve_namespace(None)).loop(loop, [], [x[None], y[None]], []).stored[0][0]
        np.testing.assert_array_equal(got, getattr(np, op)(x, y).astype(dtype))
