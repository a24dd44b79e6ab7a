"""The whole CUDA source for one cell and dtype: generated functions between hand-written templates."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from pararnn.arrays import epsilon
from pararnn.programs import StepPrograms
from pararnn.segments import SMALLEST_SCALE
from pararnn_cupy.print_cuda import body, function, number, places

# Instructions in one turn of a loop over rows: more is loaded ahead where a row is short, and compile time stays low.
STATEMENTS = 240
MOST_AHEAD = 8
# How each dtype is stored, and computed in.
STORED = {"float64": "double", "float32": "float", "float16": "half_bits", "bfloat16": "brain_bits"}


@cache
def template(name: str) -> str:
    """A hand-written part."""
    return files("pararnn_cupy").joinpath(name).read_text(encoding="utf-8")


def cuda_source(programs: StepPrograms, dtype: str) -> str:
    """The text that NVRTC, nvcc or, with a shim for the CUDA words, a C++ compiler translates.

    >>> from pararnn import ParaTanh
    >>> from pararnn.programs import programs_of
    >>> "hyperbolic_tangent(t1)" in cuda_source(programs_of(ParaTanh(1, 1)), "float16")
    True
    """
    wide = dtype == "float64"
    work = "float64" if wide else "float32"
    head = [
        f"#define WORK_IS_DOUBLE {int(wide)}",
        # A state that is stored as it is computed shows when a rerun has met it.
        f"#define STORED_AS_COMPUTED {int(dtype in ('float64', 'float32'))}",
        template("arithmetic.cu"),
        f"typedef {STORED[dtype]} store_t;",
        f"#define SMALLEST_SCALE {number(SMALLEST_SCALE[work])}",
        f"#define ROUNDING {number(epsilon_of(work))}",
        *_sizes(programs),
    ]
    return "\n".join([*head, *_functions(programs), template("forward.cu"), template("backward.cu")])


def epsilon_of(work: str) -> float:
    import numpy as np

    return epsilon(np.dtype(work))


def _rows(*operations: int) -> int:
    return max(1, min(MOST_AHEAD, STATEMENTS // max(1, sum(operations))))


def _sizes(programs: StepPrograms) -> list[str]:
    gates, params, marks = len(programs.gates), len(programs.param_names), programs.marks
    plain = len(programs.advance.program.instructions)
    back = len(programs.back_propagate.program.instructions)
    values = {
        "SLOTS": programs.size,
        "GATES": gates,
        # Gates and what a step is told besides; what a step draws on, whose cotangents are written row by row.
        "ROWS": len(programs.gate_names),
        "DRAWN": gates + len(programs.start_names),
        "PARAMS": params,
        # An array needs an element, used or not.
        "PARAM_PLACES": max(1, params),
        "ENTRIES": len(programs.m.flat),
        # Of a segment's adjoint map: its shift, and whether a start cuts it off.
        "OFFSETS": programs.size + len(programs.cut_names),
        # Rows loaded ahead of their use.
        "AHEAD": _rows(plain, 2 * gates),
        "AHEAD_BACK": min(4, _rows(back, 2 * (gates + 2 * programs.size))),
    }
    told = {"HAS_HEAD": marks.head, "HAS_STARTS": bool(programs.start_names), "HAS_HOLD": marks.hold}
    return [
        *(f"#define {name} {int(value)}" for name, value in told.items()),
        *(f"constexpr int {name} = {value};" for name, value in values.items()),
    ]


def _functions(programs: StepPrograms) -> list[str]:
    """Everything about the cell that the templates call."""
    slots = programs.slots
    s = places("s", programs.prev_names)
    g = places("g", programs.gate_names)
    p = places("p", programs.param_names)
    m = places("m", programs.m.flat)
    n = places("n", programs.n.flat)
    grows = places("w", [f"G_{i}_{j}" for i, j in programs.m.where])
    c = places("c", [f"c_{k}" for k in slots])
    b = places("b", [f"b_{k}" for k in slots])
    joined = places("b", [*(f"b_{k}" for k in slots), *programs.cut_names])
    v = places("v", [f"v_{k}" for k in slots])
    drawn = len(programs.gates) + len(programs.start_names)
    step = {"g": "ROWS", "p": "PARAM_PLACES"}
    of = [*s.values()]
    parts = [
        function("advance", {"s": "=SLOTS", **step}, body(programs.advance.program, {**s, **g, **p}, of)),
        function(
            "advance_tangent",
            {"s": "=SLOTS", "m": "=ENTRIES", "w": "=ENTRIES", **step},
            body(
                programs.advance_tangent.program,
                {**s, **m, **grows, **g, **p},
                [*of, *m.values(), *grows.values()],
            ),
        ),
        function(
            "adjoint_map_step",
            {"n": "=ENTRIES", "b": "=OFFSETS", "s": "SLOTS", "c": "SLOTS", **step},
            body(
                programs.adjoint_map_step.program, {**n, **joined, **s, **g, **c, **p}, [*n.values(), *joined.values()]
            ),
        ),
        function(
            "adjoint_joint",
            {"v": "=SLOTS", "n": "ENTRIES", "b": "OFFSETS"},
            body(programs.adjoint_joints.program, {**v, **n, **joined}, [*v.values()]),
        ),
        function(
            "back_propagate_step",
            {"b": "=SLOTS", "o": "=DRAWN", "a": "=PARAM_PLACES", "s": "SLOTS", "c": "SLOTS", **step},
            body(
                programs.back_propagate.program,
                {**b, **s, **g, **c, **p},
                [*b.values(), *(f"o[{k}]" for k in range(drawn)), *(f"a[{k}]" for k in range(len(p)))],
            ),
        ),
        _identity("identity", programs.m.where),
        _identity("adjoint_identity", programs.n.where),
        _through(programs),
        _correct(programs),
        _box(programs),
        _measured(programs),
    ]
    return parts


def _identity(name: str, where: list[tuple[int, int]]) -> str:
    lines = [f"m[{k}] = {number(1.0 if i == j else 0.0)};" for k, (i, j) in enumerate(where)]
    return function(name, {"m": "=ENTRIES"}, lines)


def _through(programs: StepPrograms) -> str:
    """What magnitudes at a segment's start can become inside it."""
    lines = []
    for row in range(programs.size):
        terms = [f"w[{k}] * v[{j}]" for k, (i, j) in enumerate(programs.m.where) if i == row]
        lines.append(f"out[{row}] = {' + '.join(terms) or number(0.0)};")
    return function("through", {"out": "=SLOTS", "w": "ENTRIES", "v": "SLOTS"}, lines)


def _correct(programs: StepPrograms) -> str:
    names: dict[str, str] = {}
    for array, letter in (("d", "d"), ("n", "n"), ("e", "e"), ("b", "b"), ("f", "f"), ("lo", "lo"), ("hi", "hi")):
        names |= places(array, [f"{letter}_{slot}" for slot in programs.slots])
    outputs = [f"{array}[{k}]" for array in ("d", "n", "start") for k in range(programs.size)]
    lines = body(programs.correct.program, {**names, **places("m", programs.m.flat)}, outputs)
    parameters = {"d": "=SLOTS", "n": "=SLOTS", "start": "=SLOTS", "m": "ENTRIES"}
    return function("correct", {**parameters, **dict.fromkeys(("e", "b", "f", "lo", "hi"), "SLOTS")}, lines)


def _box(programs: StepPrograms) -> str:
    """The interval that attracts each slot, or everything; its hull with the true start is never left."""
    lines = []
    for k, bound in enumerate(programs.bounds):
        low, high = ("-infinity()", "infinity()") if bound is None else map(number, bound)
        lines += [f"lo[{k}] = smaller(first[{k}], {low});", f"hi[{k}] = larger(first[{k}], {high});"]
    return function("box", {"lo": "=SLOTS", "hi": "=SLOTS", "first": "SLOTS"}, lines)


def _measured(programs: StepPrograms) -> str:
    """The scale of each slot: its size, or 1 where it is a logarithm."""
    lines = [
        f"scale[{k}] = {number(1.0) if log else f'larger(z[{k}], SMALLEST_SCALE)'};"
        for k, log in enumerate(programs.logarithmic)
    ]
    return function("measure", {"scale": "=SLOTS", "z": "SLOTS"}, lines)
