"""The expression graph: what it traces, its derivatives, and the programs it prints."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pararnn import ChannelwiseCell, NewtonConfig, ParaGRU, UntraceableError, newton_apply, sequential_apply
from pararnn.engine import ArrayEngine
from pararnn.functions import log_sigmoid, sigmoid, softplus
from pararnn.graph import (
    Graph,
    Program,
    SymbolicNamespace,
    add,
    compile_array,
    jacobian,
    mul,
    neg,
    print_array,
    pullback,
    pushforward,
)
from pararnn.graph.derivative import PARTIALS
from pararnn.graph.expr import ARITY, CONDITIONS
from pararnn.programs import StepPrograms, loop_program
from pararnn_numpy.engine import UfuncEngine
from support import CELLS, problem

# Real operands at which each operation is smooth; a kink has its own test.
POINTS = np.asarray([-2.3, -0.7, -0.05, 0.11, 0.6, 1.9])
POSITIVE = {"log": 1, "sqrt": 1, "log1p": 1, "pow": 1}
KINKS = ("abs", "sign", "maximum", "minimum")

# The functions again, for complex numbers, written out here.
COMPLEX = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: np.exp(b * np.log(a)),
    "neg": lambda a: -a,
    "exp": np.exp,
    "expm1": lambda a: np.exp(a) - 1.0,
    "log": np.log,
    "log1p": lambda a: np.log(1.0 + a),
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sigmoid": lambda a: 1.0 / (1.0 + np.exp(-a)),
    "sin": np.sin,
    "cos": np.cos,
    "logaddexp": lambda a, b: np.log(np.exp(a) + np.exp(b)),
    "maximum": lambda a, b: np.where(a.real > b.real, a, b),
    "minimum": lambda a, b: np.where(a.real < b.real, a, b),
    "abs": lambda a: np.where(a.real < 0.0, -a, a),
    "sign": lambda a: np.sign(a.real) + 0.0 * a,
}


def inputs(count):
    graph = Graph()
    return graph, [graph.input(name) for name in "abcdefg"[:count]]


def value(outputs, names, *numbers, xp=np):
    """The outputs on arrays, as the printed program computes them; numbers become arrays."""
    shape = np.broadcast_shapes(*(np.shape(n) for n in numbers)) if numbers else ()
    with np.errstate(all="ignore"):
        found = compile_array(Program(names, outputs))(xp, *(np.asarray(n, np.float64) for n in numbers))
    return [np.broadcast_to(np.asarray(f, np.float64), shape) for f in found]


def operands(op):
    """All combinations of the points for an operation, positive where it needs that."""
    points = np.abs(POINTS) + 0.1 if op in POSITIVE else POINTS
    grids = np.meshgrid(*[points, POINTS + 0.013][: ARITY[op]], indexing="ij")
    return [g.ravel() for g in grids]


SMOOTH = sorted(set(ARITY) - CONDITIONS - {"where"})


# --- derivatives of every operation ------


@pytest.mark.parametrize("op", SMOOTH)
def test_each_derivative_equals_the_complex_step(op):
    graph, symbols = inputs(ARITY[op])
    node = graph.apply(op, *symbols)
    at = operands(op)
    names = [s.value for s in symbols]
    for k in range(len(symbols)):
        moved = [a + 1e-30j if j == k else a + 0j for j, a in enumerate(at)]
        wanted = COMPLEX[op](*moved).imag / 1e-30
        (entry,) = jacobian([node], [symbols[k]])[0]
        np.testing.assert_allclose(value([entry], names, *at)[0], wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("op", SMOOTH)
def test_each_derivative_equals_central_differences_of_the_printed_program(op):
    graph, symbols = inputs(ARITY[op])
    node, names, at = graph.apply(op, *symbols), [s.value for s in symbols], operands(op)
    for k, step in enumerate([1e-6] * len(symbols)):
        high, low = (
            value([node], names, *[a + sign * step if j == k else a for j, a in enumerate(at)])[0] for sign in (1, -1)
        )
        (entry,) = jacobian([node], [symbols[k]])[0]
        np.testing.assert_allclose(value([entry], names, *at)[0], (high - low) / (2 * step), rtol=1e-6, atol=1e-8)


def test_the_table_of_derivatives_covers_every_operation():
    assert set(PARTIALS) == set(ARITY) - CONDITIONS
    assert set(COMPLEX) == set(SMOOTH), "a new operation needs a formula here"


@pytest.mark.parametrize(
    ("op", "at", "slopes"),
    [
        ("maximum", (2.0, 1.0), (1.0, 0.0)),
        ("maximum", (1.0, 2.0), (0.0, 1.0)),
        ("maximum", (1.5, 1.5), (0.5, 0.5)),
        ("minimum", (2.0, 1.0), (0.0, 1.0)),
        ("minimum", (1.0, 2.0), (1.0, 0.0)),
        ("minimum", (-1.5, -1.5), (0.5, 0.5)),
        ("abs", (3.0,), (1.0,)),
        ("abs", (-3.0,), (-1.0,)),
        ("abs", (0.0,), (0.0,)),
        ("sign", (0.0,), (0.0,)),
    ],
)
def test_a_kink_has_the_slope_of_its_side_and_the_mean_on_a_tie(op, at, slopes):
    graph, symbols = inputs(ARITY[op])
    node = graph.apply(op, *symbols)
    names = [s.value for s in symbols]
    entries = jacobian([node], symbols)[0]
    assert [float(v) for v in value(entries, names, *at)] == list(slopes)
    back = pullback([node], [graph.const(1.0)], symbols)
    assert [float(v) for v in value(back, names, *at)] == list(slopes)


def test_slopes_of_a_maximum_add_up_to_one_even_at_infinity():
    graph, (a, b) = inputs(2)
    entries = jacobian([graph.apply("maximum", a, b)], [a, b])[0]
    for x, y in ((math.inf, 1.0), (1.0, math.inf), (-math.inf, 1.0), (1.0, -math.inf)):
        first, second = (float(v) for v in value(entries, ["a", "b"], x, y))
        assert (first, second) == ((1.0, 0.0) if x > y else (0.0, 1.0))


@pytest.mark.parametrize("condition", sorted(CONDITIONS))
def test_where_follows_the_branch_that_was_taken(condition):
    graph, (a, b, c) = inputs(3)
    node = graph.apply("where", graph.apply(condition, a, b), graph.apply("mul", a, c), graph.apply("exp", c))
    entries = jacobian([node], [a, b, c])[0]
    compare = {
        "less": np.less, "less_equal": np.less_equal, "greater": np.greater,
        "greater_equal": np.greater_equal, "equal": np.equal,
    }[condition]  # fmt: skip
    at = np.asarray([1.0, 2.0, 2.0]), np.asarray([2.0, 1.0, 2.0]), np.asarray([0.3, 0.4, 0.5])
    taken = compare(at[0], at[1])
    found = value([node, *entries], ["a", "b", "c"], *at)
    np.testing.assert_allclose(found[0], np.where(taken, at[0] * at[2], np.exp(at[2])))
    np.testing.assert_allclose(found[1], np.where(taken, at[2], 0.0))
    assert not found[2].any()
    np.testing.assert_allclose(found[3], np.where(taken, at[0], np.exp(at[2])))


def test_a_branch_that_was_not_taken_leaves_no_trace_even_where_it_is_infinite():
    """0 · inf: the classic NaN of a guarded logarithm's derivative."""
    graph, (a,) = inputs(1)
    guarded = graph.apply("where", a > 0.0, graph.apply("log", a), graph.const(0.0))
    for entry in (jacobian([guarded], [a])[0][0], pushforward([guarded], [a], [graph.const(1.0)])[0]):
        np.testing.assert_array_equal(value([entry], ["a"], np.asarray([2.0, 0.0, -1.0]))[0], [0.5, 0.0, 0.0])


def test_a_constant_power_needs_no_logarithm():
    _, (a,) = inputs(1)
    cube = a**3.0
    np.testing.assert_allclose(value(jacobian([cube], [a])[0], ["a"], [-2.0, 0.0, 2.0])[0], [12.0, 0.0, 12.0])
    square = a**2
    assert square.op == "mul", "x² is x·x, as NumPy computes it"
    np.testing.assert_allclose(value(jacobian([square], [a])[0], ["a"], [-2.0, 0.0])[0], [-4.0, 0.0])
    root = a**0.5
    np.testing.assert_allclose(value(jacobian([root], [a])[0], ["a"], [4.0])[0], [0.25])
    base = 2.0**a
    np.testing.assert_allclose(value(jacobian([base], [a])[0], ["a"], [3.0])[0], [8.0 * math.log(2.0)])


def test_derivatives_of_gates_do_not_overflow():
    graph, (a,) = inputs(1)
    xp = SymbolicNamespace(graph)
    at = np.asarray([-1e4, -800.0, 800.0, 1e4])
    for function, wanted in (
        (sigmoid, [0.0] * 4),
        (softplus, [0.0, 0.0, 1.0, 1.0]),
        (log_sigmoid, [1.0, 1.0, 0.0, 0.0]),
        (lambda xp, x: xp.tanh(x), [0.0] * 4),
    ):
        np.testing.assert_array_equal(value(jacobian([function(xp, a)], [a])[0], ["a"], at)[0], wanted)


# --- random expressions ------

SAFE_UNARY = ("neg", "tanh", "sigmoid", "sin", "cos", "abs", "exp")
SAFE_BINARY = ("add", "sub", "mul", "maximum", "minimum", "logaddexp")


@st.composite
def expressions(draw, count=3):
    """A few outputs over three symbols, bounded so that nothing overflows."""
    graph, symbols = inputs(count)
    pool = [*symbols, graph.const(draw(st.sampled_from([0.5, -1.25, 2.0])))]
    for _ in range(draw(st.integers(1, 12))):
        pick = [pool[draw(st.integers(0, len(pool) - 1))] for _ in range(3)]
        kind = draw(st.sampled_from([*SAFE_UNARY, *SAFE_BINARY, "where", "div"]))
        if kind == "where":
            pool.append(graph.apply("where", pick[0] < pick[1], pick[1], pick[2]))
        elif kind == "div":
            pool.append(pick[0] / (2.5 + graph.apply("sin", pick[1])))
        elif kind in SAFE_UNARY:
            # A bounded operand, so that repeated exponentials stay finite.
            pool.append(graph.apply(kind, graph.apply("tanh", pick[0]) if kind == "exp" else pick[0]))
        else:
            pool.append(graph.apply(kind, *pick[:2]))
    outputs = [pool[draw(st.integers(0, len(pool) - 1))], pool[-1]]
    return graph, symbols, outputs


@settings(max_examples=150, deadline=None)
@given(data=expressions(), seed=st.integers(0, 10**6))
def test_pushing_forward_and_pulling_back_are_transposes(data, seed):
    """⟨c, J v⟩ = ⟨Jᵀ c, v⟩, and J's entries say the same."""
    graph, symbols, outputs = data
    rng = np.random.default_rng(seed)
    names = [s.value for s in symbols]
    at = [rng.normal(size=9) for _ in symbols]
    v = [graph.input(f"v{k}") for k in range(3)]
    c = [graph.input(f"c{k}") for k in range(2)]
    pushed, pulled = pushforward(outputs, symbols, v), pullback(outputs, c, symbols)
    entries = jacobian(outputs, symbols)
    seeds = [rng.normal(size=9) for _ in range(5)]
    all_names = [*names, "v0", "v1", "v2", "c0", "c1"]
    jv, jtc = value(pushed, all_names, *at, *seeds), value(pulled, all_names, *at, *seeds)
    left = sum(s * j for s, j in zip(seeds[3:], jv, strict=True))
    right = sum(s * j for s, j in zip(seeds[:3], jtc, strict=True))
    size = 1.0 + sum(np.abs(s * j) for s, j in zip(seeds[:3], jtc, strict=True))
    np.testing.assert_allclose(left / size, right / size, atol=1e-12)
    table = [value(row, names, *at) for row in entries]
    for k in range(2):
        np.testing.assert_allclose(jv[k] / size, sum(table[k][j] * seeds[j] for j in range(3)) / size, atol=1e-11)


@settings(max_examples=100, deadline=None)
@given(data=expressions(), seed=st.integers(0, 10**6))
def test_derivatives_of_random_expressions_equal_differences_where_they_are_smooth(data, seed):
    _, symbols, outputs = data
    rng = np.random.default_rng(seed)
    names, at, step = [s.value for s in symbols], [rng.normal(size=7) for _ in symbols], 1e-5
    for k, symbol in enumerate(symbols):
        near = {
            move: value(outputs, names, *[a + move * step if j == k else a for j, a in enumerate(at)])
            for move in (-2, -1, 0, 1, 2)
        }
        for row, output in enumerate(range(len(outputs))):
            entry = value([jacobian(outputs, [symbol])[row][0]], names, *at)[0]
            slope = (near[1][output] - near[-1][output]) / (2 * step)
            wider = (near[2][output] - near[-2][output]) / (4 * step)
            smooth = np.abs(slope - wider) <= 1e-6 * (1.0 + np.abs(slope))  # a kink nearby shows as a disagreement
            np.testing.assert_allclose(entry[smooth], slope[smooth], rtol=1e-4, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(data=expressions(), seed=st.integers(0, 10**6))
def test_every_engine_computes_a_program_alike(data, seed):
    """Rows without a carry, through the array-API printer and through the in-place one."""
    graph, symbols, outputs = data
    rng = np.random.default_rng(seed)
    names = [s.value for s in symbols]
    kept = [graph.apply("add", o, symbols[0]) for o in outputs]  # an output that is an operand needs no operation
    loop = loop_program(
        graph, carry=[], rows=names[:2], consts=names[2:], new=[], stored=[*outputs, *kept], totals=kept
    )
    rows, const = [rng.normal(size=(11, 6)) for _ in range(2)], [rng.normal(size=6)]
    want = value([*outputs, *kept], names, *rows, *const)
    for engine in (ArrayEngine(np), UfuncEngine(np)):
        out = engine.loop(loop, [], rows, const)
        for got, wanted in zip(out.stored, want, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-13)
        for got, wanted in zip(out.totals, want[2:], strict=True):
            np.testing.assert_allclose(got, wanted.sum(axis=0), rtol=1e-10, atol=1e-10)


@settings(max_examples=100, deadline=None)
@given(data=expressions(), seed=st.integers(0, 10**6), reverse=st.booleans(), keep=st.integers(0, 2))
def test_every_engine_carries_a_program_alike(data, seed, reverse, keep):
    graph, symbols, outputs = data
    rng = np.random.default_rng(seed)
    names = [s.value for s in symbols]
    # tanh keeps the carry bounded; the second carry also swaps places with the first.
    new = [graph.apply("tanh", outputs[0]), graph.apply("tanh", graph.apply("add", outputs[1], symbols[0]))]
    loop = loop_program(graph, carry=names[:2], rows=names[2:], consts=[], new=new, stored=[outputs[1], symbols[1]])
    carry, rows = [rng.normal(size=5) for _ in range(2)], [rng.normal(size=(8, 5))]
    state, kept, stored = list(carry), [[c] for c in carry], [[], []]
    for l in reversed(range(8)) if reverse else range(8):
        found = value([*new, outputs[1], symbols[1]], names, *state, rows[0][l])
        state = found[:2]
        for column, s in zip(kept, state, strict=True):
            column.append(s)
        for column, s in zip(stored, found[2:], strict=True):
            column.append(s)
    order = slice(None, None, -1) if reverse else slice(None)
    for engine in (ArrayEngine(np), UfuncEngine(np)):
        out = engine.loop(loop, carry, rows, [], reverse=reverse, keep=keep)
        assert len(out.kept) == keep
        for got, wanted in zip(out.carry, state, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-12)
        for got, wanted in zip(out.kept, kept, strict=False):
            np.testing.assert_allclose(got, np.stack(wanted)[order], rtol=1e-10, atol=1e-12)
        for got, wanted in zip(out.stored, stored, strict=True):
            np.testing.assert_allclose(got, np.stack(wanted)[order], rtol=1e-10, atol=1e-12)


# --- structure ------


def test_equal_operations_are_one_node():
    graph, (a, b) = inputs(2)
    assert (a + b) is (a + b) and (a + b) is not (b + a), "the step's own order is kept"
    assert graph.const(1) is graph.const(1.0) and graph.const(0.0) is not graph.const(-0.0)
    shared = graph.apply("tanh", a)
    program = Program(["a", "b"], [shared * shared + shared, shared * b])
    assert [i.op for i in program.instructions].count("tanh") == 1
    assert len(program.instructions) == 4


def test_a_jacobian_shares_the_forward_s_work():
    """Of a GRU's step with its derivative no transcendental is computed twice."""
    programs = StepPrograms(ParaGRU(2, 3))
    step = [i.op for i in programs.advance.program.instructions]
    both = [i.op for i in programs.step_and_jacobians.program.instructions]
    for op in ("tanh", "sigmoid"):
        assert both.count(op) == step.count(op) > 0


@pytest.mark.parametrize(
    ("build", "zeros"),
    [
        (lambda xp, a, b: (a + 1.0, b * 2.0), [(0, 1), (1, 0)]),
        (lambda xp, a, b: (xp.sign(a) + b, xp.where(a < 0.0, 1.0, 2.0)), [(0, 0), (1, 0), (1, 1)]),
        (lambda xp, a, b: (a * 0.0 + b, b - b), [(0, 0)]),
        (lambda xp, a, b: (xp.tanh(a * b), a), [(1, 1)]),
    ],
)
def test_an_entry_that_is_always_zero_is_the_constant_zero(build, zeros):
    graph, symbols = inputs(2)
    entries = jacobian(list(build(SymbolicNamespace(graph), *symbols)), symbols)
    for i in range(2):
        for j in range(2):
            structural = entries[i][j].is_number(0.0)
            assert structural or (i, j) not in zeros, (i, j)
    assert all(e.is_number(0.0) for e in jacobian([graph.const(3.0)], symbols)[0])
    assert all(e.is_number(0.0) for e in pullback([graph.const(3.0)], [symbols[0]], symbols))


def test_the_simplifier_keeps_values():
    graph, (a, b) = inputs(2)
    zero, one, minus, two = (graph.const(v) for v in (0.0, 1.0, -1.0, 2.0))
    assert add(a, zero) is a and add(zero, a) is a and mul(a, one) is a and mul(one, a) is a
    assert mul(a, zero).is_number(0.0) and mul(two, two).is_number(4.0) and add(two, one).is_number(3.0)
    assert neg(neg(a)) is a and neg(two).is_number(-2.0) and mul(minus, a) is neg(a)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 5))
    terms = {
        add(a, neg(b)): x - y, add(neg(a), b): y - x, mul(neg(a), b): -x * y, mul(neg(a), neg(b)): x * y,
        add(neg(a), neg(b)): -x - y, mul(minus, neg(b)): y,
    }  # fmt: skip
    for node, wanted in terms.items():
        np.testing.assert_allclose(value([node], ["a", "b"], x, y)[0], wanted, rtol=1e-15)


# --- printing ------


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_forward_program_has_the_bits_of_the_step(kind, dtype):
    """On the same arrays, both printers must do the step's own arithmetic in its own order."""
    for cell in (kind(2, 3, seed=0), kind(2, 3, seed=0).solve_cell()):
        programs = StepPrograms(cell)
        rng = np.random.default_rng(0)
        carry, gates, params = (
            [(3.0 * rng.standard_normal(997)).astype(dtype) for _ in range(n)]
            for n in (programs.size, len(programs.gates), len(programs.params))
        )
        with np.errstate(all="ignore"):
            wanted = cell.step(np, *carry, *gates, *params)
            for engine in (ArrayEngine(np), UfuncEngine(np)):
                out = engine.loop(programs.advance, carry, [g[None] for g in gates], params, keep=programs.size)
                printed_alike = "l" not in cell.slots or type(engine) is ArrayEngine  # see print_ufuncs on logaddexp
                for got, kept, want in zip(out.carry, out.kept, wanted, strict=True):
                    assert got.dtype == dtype
                    if printed_alike:
                        np.testing.assert_array_equal(got, want)
                    np.testing.assert_allclose(got, want, rtol=1e-5 if dtype is np.float32 else 1e-13, atol=1e-13)
                    np.testing.assert_array_equal(kept[1], got)


def test_constants_of_every_kind_can_be_printed():
    graph, (a, b) = inputs(2)
    xp = SymbolicNamespace(graph)
    outputs = [
        xp.where(a < b, 1.0, -math.inf),
        xp.where(a < b, a, math.inf),
        xp.maximum(a, -math.inf),
        xp.maximum(0.25, a),
        xp.minimum(a, math.inf),
        xp.where(a == b, a, 1e-300),
        xp.clip(a, -1.0, 1.0),
        xp.clip(a, None, 0.5),
        xp.clip(a, -0.5),
        graph.const(3.0),
        graph.const(-0.0),
        a,
        xp.logaddexp(a, 0.0),
        2.0**a,
        xp.pi * a,
        xp.square(a) + xp.reciprocal(b) - xp.absolute(a) * xp.negative(b),
        a - np.float32(0.5),
        np.float64(2.0) / b,
        np.float64(0.5) * a,
        np.asarray(2.0) + a,
        xp.subtract(a, 1) * xp.multiply(a, 2) / xp.divide(b, 3) + xp.add(a, b) + xp.pow(b, 2),
        +a,
        abs(a),
    ]
    x, y = np.asarray([-2.0, 0.5, 1.0]), np.asarray([1.0, 0.5, 0.25])
    wanted = [
        np.where(x < y, 1.0, -np.inf), np.where(x < y, x, np.inf), x, np.maximum(0.25, x), x,
        np.where(x == y, x, 1e-300), np.clip(x, -1, 1), np.minimum(x, 0.5), np.maximum(x, -0.5),
        3.0 + 0 * x, -0.0 * np.abs(x), x, np.logaddexp(x, 0.0), 2.0**x, np.pi * x,
        x * x + 1 / y + np.abs(x) * y, x - 0.5, 2.0 / y, 0.5 * x, 2.0 + x,
        (x - 1) * (x * 2) / (y / 3) + (x + y) + y**2, x, np.abs(x),
    ]  # fmt: skip
    for got, want in zip(value(outputs, ["a", "b"], x, y), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-15)
    loop = loop_program(graph, carry=[], rows=["a", "b"], consts=[], new=[], stored=outputs)
    for engine in (ArrayEngine(np), UfuncEngine(np)):
        with np.errstate(all="ignore"):
            stored = engine.loop(loop, [], [x[None], y[None]], []).stored
        for got, want in zip(stored, wanted, strict=True):
            np.testing.assert_allclose(got[0], want, rtol=1e-14)


def test_printed_source_reads_like_the_step_and_a_program_names_what_it_lacks():
    graph, (a, b) = inputs(2)
    text = print_array(Program(["a", "b"], [sigmoid(SymbolicNamespace(graph), a) * b]), name="gate")
    assert text.startswith("def gate(xp, a, b):") and "1.0 / (xp.exp(-a) + 1.0)" in text and "t0 * b" in text
    with pytest.raises(KeyError, match="'b'"):
        Program(["a"], [a + b])
    with pytest.raises(ValueError, match="carries 1"):
        loop_program(graph, carry=["a"], rows=[], consts=[], new=[])
    program = Program(["a", "b"], [a + b, (a + b) * b])
    assert program.last_uses() == [(), ()] and program.conditions == frozenset()
    assert Program(["a", "b"], [graph.apply("where", a < b, a, b)]).conditions == {"t0"}
    assert Program(["a", "b"], [(a + b) * b]).last_uses() == [(), ("t0",)]


# --- refusals ------


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda xp, a: bool(a), "xp.where"),
        (lambda xp, a: 1.0 if a > 0 else 0.0, "xp.where"),
        (lambda xp, a: a > 0 and a < 1, "xp.where"),
        (lambda xp, a: not a, "xp.where"),
        (lambda xp, a: max(a, 0.0), "xp.where"),
        (lambda xp, a: float(a), "float"),
        (lambda xp, a: int(a), r"int\(\)"),
        (lambda xp, a: range(a), r"int\(\)"),
        (lambda xp, a: a[0], "index"),
        (lambda xp, a: a[..., None], "index"),
        (lambda xp, a: list(a), "iterated"),
        (lambda xp, a: [x for x in a], "iterated"),
        (lambda xp, a: len(a), r"len\(\)"),
        (lambda xp, a: a @ a, "matmul"),
        (lambda xp, a: np.ones((3, 3)) @ a, "matmul"),
        (lambda xp, a: xp.matmul(a, a), "xp.matmul"),
        (lambda xp, a: xp.cumulative_sum(a), "xp.cumulative_sum"),
        (lambda xp, a: xp.linalg.norm(a), "xp.linalg"),
        (lambda xp, a: xp.erf(a), "xp.erf.*elementwise.*sequential_apply"),
        (lambda xp, a: xp.sub(a, a), "xp.sub"),
        (lambda xp, a: a.sum(), "'sum'"),
        (lambda xp, a: a.shape, "'shape'"),
        (lambda xp, a: a != 0.0, "!="),
        (lambda xp, a: (a > 0.0) & (a < 1.0), "&"),
        (lambda xp, a: (a > 0.0) | (a < 1.0), r"\|"),
        (lambda xp, a: ~(a > 0.0), "~"),
        (lambda xp, a: a % 2.0, "%"),
        (lambda xp, a: a // 2.0, "//"),
        (lambda xp, a: xp.tanh(a, a), "takes 1"),
        (lambda xp, a: xp.maximum(a), "takes 2"),
        (lambda xp, a: xp.where(True, a, a), "bool"),
        (lambda xp, a: a * np.ones(3), "ndarray"),
        (lambda xp, a: a + "1", "str"),
        (lambda xp, a: a + None, "NoneType"),
        (lambda xp, a: a + 1j, "complex"),
        (lambda xp, a: a + Graph().input("b"), "two different traces"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_name(use, sentence):
    graph, (a,) = inputs(1)
    with pytest.raises(UntraceableError, match=sentence):
        use(SymbolicNamespace(graph), a)


def test_numpy_functions_do_not_swallow_a_symbol():
    _, (a,) = inputs(1)
    functions = ((np.tanh, "xp.tanh"), (np.exp, "xp.exp"), (np.absolute, "xp.abs"), (np.add.reduce, "xp.add"))
    for function, name in functions:
        with pytest.raises(UntraceableError, match=name):
            function(a)
    assert np.float64(2.0) * a is 2.0 * a and np.float32(2.0) - a is 2.0 - a and np.float64(3.0) / a is 3.0 / a
    assert (np.float64(1.0) < a).op == "less" and (np.float64(2.0) ** a).op == "pow"


def test_a_comparison_with_two_equal_signs_is_a_condition():
    class Reset(ChannelwiseCell):
        """Forgets where the gate is exactly zero."""

        slots, gates, params = ("h",), ("u",), ("a",)

        def step(self, xp, h, u, a):
            return (xp.where(u == 0.0, 0.0 * h, xp.tanh(a * h + u)),)

    cell, x = problem(Reset, 40)
    x[:, 10] = 0.0
    states = sequential_apply(cell, x)
    assert not states[:, 10].any() and states[:, 9].any()
    np.testing.assert_allclose(newton_apply(cell, x, NewtonConfig(segment_len=7)), states, atol=1e-5)
    _, (a, b) = inputs(2)
    assert (a == b).op == "equal" and a in {a} and hash(a) != hash(b)


def test_tracing_needs_no_warning_filters():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in CELLS:
            StepPrograms(kind(2, 3))
