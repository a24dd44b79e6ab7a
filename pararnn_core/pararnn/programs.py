"""The programs that solve a cell: its step, tangents and cotangents, each as straight-line code.

All are derived from one trace of ``cell.step``. A :class:`LoopProgram` says how an engine runs the code along
time: some operands are carried from step to step, some are read row by row, some stay constant; some results are
written row by row, some are added up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from pararnn.cells.base import ChannelwiseCell
from pararnn.errors import UntraceableError
from pararnn.graph import Expr, Graph, Program, SymbolicNamespace, add, jacobian, mul, pullback, pushforward


@dataclass(frozen=True, eq=False)
class LoopProgram:
    """A program to be run once per row.

    Operands come in the order carry, rows, consts. Outputs come in the order new carry, stored, totals.
    """

    program: Program
    carry: int
    rows: int
    consts: int
    stored: int = 0
    totals: int = 0
    # Engines keep their compiled form here, by engine name.
    compiled: dict[str, Any] = field(default_factory=dict, repr=False)


def loop_program(
    graph: Graph,
    *,
    carry: Sequence[str],
    rows: Sequence[str],
    consts: Sequence[str],
    new: Sequence[Expr],
    stored: Sequence[Expr] = (),
    totals: Sequence[Expr] = (),
) -> LoopProgram:
    if len(new) != len(carry):
        raise ValueError(f"a loop carries {len(carry)} values but its step gives back {len(new)}")
    program = Program([*carry, *rows, *consts], [*new, *stored, *totals])
    return LoopProgram(program, len(carry), len(rows), len(consts), len(stored), len(totals))


@dataclass(frozen=True)
class Marks:
    """What a step may be told besides its inputs, each by one more row operand.

    ``head``: the state starts anew before this step, from zero or, with ``starts``, from rows that are given.
    ``hold``: the step is padding and leaves the state as it is.
    """

    head: bool = False
    starts: bool = False
    hold: bool = False


class Entry:
    """Names for the entries of an S×S matrix that are not structurally zero."""

    def __init__(self, letter: str, matrix: Sequence[Sequence[Expr]]) -> None:
        self.names = [
            [None if e.is_number(0.0) else f"{letter}_{i}_{j}" for j, e in enumerate(row)]
            for i, row in enumerate(matrix)
        ]

    @property
    def flat(self) -> list[str]:
        return [n for row in self.names for n in row if n is not None]

    @property
    def where(self) -> list[tuple[int, int]]:
        return [(i, j) for i, row in enumerate(self.names) for j, n in enumerate(row) if n is not None]

    def symbols(self, graph: Graph) -> list[list[Expr]]:
        return [[graph.const(0.0) if n is None else graph.input(n) for n in row] for row in self.names]


def matrix_product(a: Sequence[Sequence[Expr]], b: Sequence[Sequence[Expr]]) -> list[list[Expr]]:
    zero = a[0][0].graph.const(0.0)
    rows = []
    for row in a:
        line = []
        for j in range(len(b[0])):
            total = zero
            for k, factor in enumerate(row):
                total = add(total, mul(factor, b[k][j]))
            line.append(total)
        rows.append(line)
    return rows


def _transposed(a: Sequence[Sequence[Expr]]) -> list[list[Expr]]:
    return [list(row) for row in zip(*a, strict=True)]


def reachable(pattern: list[list[bool]]) -> list[list[bool]]:
    """Pattern of every product of matrices with this pattern (identity included)."""
    size = len(pattern)
    closed = [[pattern[i][j] or i == j for j in range(size)] for i in range(size)]
    for k in range(size):
        for i in range(size):
            for j in range(size):
                closed[i][j] = closed[i][j] or (closed[i][k] and closed[k][j])
    return closed


class StepPrograms:
    """Everything derived from one cell's step; `diagonal` keeps only the Jacobian's true diagonal in tangents.

    With `marks` the step chooses by more rows (`gate_names` beyond the gates): whether the state before it is the one
    carried or a new start, and whether the one after it is the old one. Choosing, not multiplying by zero: whatever a
    document holds, NaN included, never reaches the next one, nor its cotangent the one before.
    """

    def __init__(self, cell: ChannelwiseCell, diagonal: bool = False, marks: Marks | None = None) -> None:
        self.graph = graph = Graph()
        self.diagonal = diagonal
        self.marks = marks = Marks() if marks is None else marks
        # Whole kernels that a backend made from these programs, by backend name.
        self.compiled: dict[str, Any] = {}
        self.slots, self.gates, self.params = cell.slots, cell.gates, cell.params
        # A start from outside the box would be projected on it.
        self.bounds = [None if marks.starts else cell.bounds.get(s) for s in cell.slots]
        self.oscillates = cell.oscillates and len(cell.slots) == 2
        self.logarithmic = [s in cell.logarithmic for s in cell.slots]
        self.size = len(self.slots)
        self.prev = [graph.input(f"s_{s}") for s in self.slots]
        gates = [graph.input(f"g_{g}") for g in self.gates]
        params = [graph.input(f"p_{p}") for p in self.params]
        half, zero = graph.const(0.5), graph.const(0.0)
        self.start_names = [f"start_{s}" for s in self.slots] if marks.starts else []
        self.head = graph.apply("greater", graph.input("head"), half) if marks.head else None
        self.hold = graph.apply("greater", graph.input("hold"), half) if marks.hold else None
        # The state that the step itself sees, and what the step makes of it.
        self.seen = self.prev
        if self.head is not None:
            fresh = [graph.input(n) for n in self.start_names] or [zero] * self.size
            self.seen = [graph.apply("where", self.head, f, p) for f, p in zip(fresh, self.prev, strict=True)]
        new = cell.step(SymbolicNamespace(graph), *self.seen, *gates, *params)
        if not isinstance(new, tuple) or len(new) != self.size:
            got = f"{len(new)} values" if isinstance(new, tuple) else type(new).__name__
            raise UntraceableError(
                f"{type(cell).__name__}.step must return a tuple of its {self.size} new slot(s) "
                f"({', '.join(self.slots)}), got {got}"
            )
        self.stepped = [graph.lift(value, f"{type(cell).__name__}.step") for value in new]
        self.new = self._held(self.seen, self.stepped)
        self.leaves = [*gates, *params]
        self.jac = jacobian(self.stepped, self.seen)
        if diagonal:
            self.jac = [[e if i == j else zero for j, e in enumerate(row)] for i, row in enumerate(self.jac)]
        pattern = reachable([[not e.is_number(0.0) for e in row] for row in self.jac])
        one = graph.const(1.0)
        # Names of the entries of the running product M, of its transpose N, and of the Jacobian J.
        product = [[one if yes else zero for yes in row] for row in pattern]
        self.m = Entry("M", product)
        self.n = Entry("N", _transposed(product))
        self.j = Entry("J", self.jac)
        heads, holds = ["head"] if marks.head else [], ["hold"] if marks.hold else []
        self.condition_names = [*heads, *holds]
        # The rows that a step reads: the gates, and what it is told besides.
        self.gate_names = [*(f"g_{g}" for g in self.gates), *heads, *self.start_names, *holds]
        # Whether a start was passed, so that no cotangent may come through from the right.
        self.cut_names = ["cut"] if marks.head else []
        self.param_names = [f"p_{p}" for p in self.params]
        self.prev_names = [f"s_{s}" for s in self.slots]

    def _held(self, kept: Sequence[Expr], moved: Sequence[Expr]) -> list[Expr]:
        """`moved`, or where the step is padding `kept`."""
        if self.hold is None:
            return list(moved)
        return [self.graph.apply("where", self.hold, k, m) for k, m in zip(kept, moved, strict=True)]

    def _without(self, condition: Expr | None, values: Sequence[Expr]) -> list[Expr]:
        """Zero where `condition` holds."""
        if condition is None:
            return list(values)
        zero = self.graph.const(0.0)
        return [v if v.is_number(0.0) else self.graph.apply("where", condition, zero, v) for v in values]

    def _pulled(self, mu: Sequence[Expr]) -> tuple[list[Expr], list[Expr], list[Expr]]:
        """The cotangents of the state before, of gates and starts, and of the params, from that of the state after."""
        back = pullback(self.stepped, mu, [*self.seen, *self.leaves])
        seen = self._held(mu, back[: self.size])
        leaves = self._without(self.hold, back[self.size :])
        count = len(self.gates)
        drawn = leaves[:count]
        if self.head is not None and self.start_names:
            zero = self.graph.const(0.0)
            drawn += [self.graph.apply("where", self.head, s, zero) for s in seen]
        return self._without(self.head, seen), drawn, leaves[count:]

    @cached_property
    def advance(self) -> LoopProgram:
        """carry slots; rows gates; consts params."""
        return loop_program(
            self.graph, carry=self.prev_names, rows=self.gate_names, consts=self.param_names, new=self.new
        )

    @cached_property
    def advance_tangent(self) -> LoopProgram:
        """carry slots, M, and G = the largest |M| so far; rows gates; consts params."""
        g = self.graph
        grown = self._grown(self.m.symbols(g))
        new_m = [grown[i][j] for i, j in self.m.where]
        largest = [f"G_{i}_{j}" for i, j in self.m.where]
        new_g = [g.apply("maximum", g.input(name), g.apply("abs", m)) for name, m in zip(largest, new_m, strict=True)]
        return loop_program(
            g,
            carry=[*self.prev_names, *self.m.flat, *largest],
            rows=self.gate_names,
            consts=self.param_names,
            new=[*self.new, *new_m, *new_g],
        )

    def _grown(self, product: list[list[Expr]]) -> list[list[Expr]]:
        """J·M, each column pushed through the step: fewer operations than forming J first."""
        if self.diagonal:
            grown = matrix_product(self.jac, product)
        else:
            grown = _transposed([pushforward(self.stepped, self.seen, column) for column in _transposed(product)])
        return [self._without(self.head, self._held(old, new)) for old, new in zip(product, grown, strict=True)]

    @cached_property
    def correct(self) -> LoopProgram:
        """The guarded correction, one row per segment.

        carry δ (correction of the segment's start) and ν (rounding that reaches it); rows M, end states e, the next
        segment's start s, a rounding floor, and for bounded slots the box; stores the next segment's new start.
        """
        g, size = self.graph, self.size
        delta = [f"d_{s}" for s in self.slots]
        noise = [f"n_{s}" for s in self.slots]
        ends = [f"e_{s}" for s in self.slots]
        starts = [f"b_{s}" for s in self.slots]
        floors = [f"f_{s}" for s in self.slots]
        boxes = [(f"lo_{s}", f"hi_{s}") for s, b in zip(self.slots, self.bounds, strict=True) if b is not None]
        zero = g.const(0.0)
        m = self.m.symbols(g)
        new_delta, new_noise, new_start = [], [], []
        carried = self._carried_noise(m, [g.input(n) for n in noise], [g.input(f) for f in floors])
        for i, slot in enumerate(self.slots):
            end, old = g.input(ends[i]), g.input(starts[i])
            moved, spread = zero, carried[i]
            for k in range(size):
                if m[i][k].is_number(0.0):
                    continue
                d = g.input(delta[k])
                # An exact start stays exact even where the tangent has overflowed: 0 * inf must be 0 here.
                term = g.apply("where", g.apply("equal", d, zero), zero, g.apply("mul", m[i][k], d))
                moved = add(moved, term)
            start = wanted = add(end, moved)
            if self.bounds[i] is not None:
                start = g.apply("maximum", g.apply("minimum", start, g.input(f"hi_{slot}")), g.input(f"lo_{slot}"))
            finite = g.apply("equal", g.apply("sub", start, start), zero)
            start = g.apply("where", finite, start, end)
            same = g.apply("equal", start, old)
            # What a guard took away is an error of this pass like any other: a box that is not the true one must show.
            held = g.apply("equal", start, wanted)
            spread = add(spread, g.apply("where", held, zero, g.apply("abs", g.apply("sub", wanted, start))))
            new_start.append(start)
            new_delta.append(g.apply("where", same, zero, g.apply("sub", start, old)))
            new_noise.append(spread)
        return loop_program(
            g,
            carry=[*delta, *noise],
            rows=[*self.m.flat, *ends, *starts, *floors],
            consts=[name for box in boxes for name in box],
            new=[*new_delta, *new_noise],
            stored=new_start,
        )

    def _carried_noise(self, m: list[list[Expr]], noise: list[Expr], floors: list[Expr]) -> list[Expr]:
        """Rounding at the end of a segment from that at its start: |M| ν + φ, or a bound of its length."""
        g, carried = self.graph, []
        for row, floor in zip(m, floors, strict=True):
            spread = floor
            for entry, n in zip(row, noise, strict=True):
                if not entry.is_number(0.0):
                    spread = add(spread, mul(g.apply("abs", entry), n))
            carried.append(spread)
        if not self.oscillates:
            return carried
        # |M v| ≤ σ |v| with the largest singular value σ. A vector of this length with equal parts stands for all.
        length = g.apply("add", g.apply("mul", self._norm(m), self._length(noise)), self._length(floors))
        tighter = g.apply("less", length, self._length(carried))
        part = g.apply("mul", length, g.const(math.sqrt(0.5)))
        return [g.apply("where", tighter, part, spread) for spread in carried]

    def _length(self, pair: list[Expr]) -> Expr:
        """√(a² + b²) of two numbers that are not negative, without overflow or underflow."""
        g, zero, one = self.graph, self.graph.const(0.0), self.graph.const(1.0)
        high, low = g.apply("maximum", *pair), g.apply("minimum", *pair)
        ratio = g.apply("div", low, g.apply("where", g.apply("equal", high, zero), one, high))
        return g.apply("mul", high, g.apply("sqrt", g.apply("add", one, g.apply("mul", ratio, ratio))))

    def _norm(self, m: list[list[Expr]]) -> Expr:
        """The largest singular value of a 2×2 matrix."""
        g, ((a, b), (c, d)) = self.graph, m
        total = add(add(mul(a, a), mul(b, b)), add(mul(c, c), mul(d, d)))
        twice = mul(g.const(2.0), g.apply("sub", mul(a, d), mul(b, c)))
        gap = g.apply("mul", g.apply("sub", total, twice), g.apply("add", total, twice))
        root = g.apply("sqrt", g.apply("maximum", gap, g.const(0.0)))
        return g.apply("sqrt", g.apply("mul", g.const(0.5), g.apply("add", total, root)))

    @cached_property
    def jacobians(self) -> LoopProgram:
        """rows previous slots, gates; consts params; stores J of the step itself, whatever the marks."""
        return loop_program(
            self.graph,
            carry=[],
            rows=[*self.prev_names, *self.gate_names],
            consts=self.param_names,
            new=[],
            stored=[self.jac[i][j] for i, j in self.j.where],
        )

    @cached_property
    def step_and_jacobians(self) -> LoopProgram:
        """rows previous slots, gates; consts params; stores the new slots and J."""
        return loop_program(
            self.graph,
            carry=[],
            rows=[*self.prev_names, *self.gate_names],
            consts=self.param_names,
            new=[],
            stored=[*self.new, *(self.jac[i][j] for i, j in self.j.where)],
        )

    def _sweep(self, columns: list[list[Expr]]) -> list[list[Expr]]:
        """Jᵀ times each column vector, with J's entries as symbols; nothing passes a head, padding passes all."""
        transposed = _transposed(self.j.symbols(self.graph))
        swept = _transposed(matrix_product(transposed, _transposed(columns)))
        return [self._without(self.head, self._held(old, new)) for old, new in zip(columns, swept, strict=True)]

    def _cut(self) -> list[Expr]:
        """Whether a head has been passed, as 1 or 0."""
        if self.head is None:
            return []
        return [self.graph.apply("where", self.head, self.graph.const(1.0), self.graph.input("cut"))]

    @cached_property
    def adjoint_affine(self) -> LoopProgram:
        """Reverse sweep of a segment as an affine map ν ↦ N ν + b: carry N, b (and cut); rows J (and conditions), g."""
        g = self.graph
        carry_b = [f"b_{s}" for s in self.slots]
        rows_g = [f"c_{s}" for s in self.slots]
        n_columns = _transposed(self.n.symbols(g))
        b_column = [add(g.input(b), g.input(c)) for b, c in zip(carry_b, rows_g, strict=True)]
        swept = self._sweep([*n_columns, b_column])
        new_n = _transposed(swept[:-1])
        return loop_program(
            g,
            carry=[*self.n.flat, *carry_b, *self.cut_names],
            rows=[*self.j.flat, *self.condition_names, *rows_g],
            consts=[],
            new=[*(new_n[i][j] for i, j in self.n.where), *swept[-1], *self._cut()],
        )

    @cached_property
    def adjoint_map_step(self) -> LoopProgram:
        """As adjoint_affine, but from the step itself: rows previous slots, gates, g; consts params."""
        g = self.graph
        carry_b = [f"b_{s}" for s in self.slots]
        rows_g = [f"c_{s}" for s in self.slots]
        columns = _transposed(self.n.symbols(g))
        swept = [self._pulled(column)[0] for column in columns]
        mu = [add(g.input(b), g.input(c)) for b, c in zip(carry_b, rows_g, strict=True)]
        new_n = _transposed(swept)
        return loop_program(
            g,
            carry=[*self.n.flat, *carry_b, *self.cut_names],
            rows=[*self.prev_names, *self.gate_names, *rows_g],
            consts=self.param_names,
            new=[*(new_n[i][j] for i, j in self.n.where), *self._pulled(mu)[0], *self._cut()],
        )

    @cached_property
    def adjoint_joints(self) -> LoopProgram:
        """Across segments, right to left: carry ν; rows N, b (and cut); ν becomes N ν + b, or b behind a head."""
        g = self.graph
        ends = [g.input(f"v_{s}") for s in self.slots]
        rows_b = [f"b_{s}" for s in self.slots]
        moved = [row[0] for row in matrix_product(self.n.symbols(g), [[v] for v in ends])]
        if self.head is not None:
            cut = g.apply("greater", g.input("cut"), g.const(0.5))
            moved = self._without(cut, moved)
        return loop_program(
            g,
            carry=[v.value for v in ends],
            rows=[*self.n.flat, *rows_b, *self.cut_names],
            consts=[],
            new=[add(m, g.input(b)) for m, b in zip(moved, rows_b, strict=True)],
        )

    @cached_property
    def adjoint(self) -> LoopProgram:
        """Reverse sweep: carry ν (cotangent from the future); rows J (and conditions), g; stores μ = g + ν."""
        g = self.graph
        carry = [f"b_{s}" for s in self.slots]
        rows_g = [f"c_{s}" for s in self.slots]
        mu = [add(g.input(b), g.input(c)) for b, c in zip(carry, rows_g, strict=True)]
        return loop_program(
            g,
            carry=carry,
            rows=[*self.j.flat, *self.condition_names, *rows_g],
            consts=[],
            new=self._sweep([mu])[0],
            stored=mu,
        )

    @cached_property
    def leaf_cotangents(self) -> LoopProgram:
        """rows previous slots, gates, μ; consts params; stores gate (and start) cotangents, adds up those of params."""
        g = self.graph
        mu = [f"u_{s}" for s in self.slots]
        _, drawn, totals = self._pulled([g.input(name) for name in mu])
        return loop_program(
            g,
            carry=[],
            rows=[*self.prev_names, *self.gate_names, *mu],
            consts=self.param_names,
            new=[],
            stored=drawn,
            totals=totals,
        )

    @cached_property
    def back_propagate(self) -> LoopProgram:
        """The whole adjoint of the time loop in one reverse sweep.

        carry ν; rows previous slots, gates, g; consts params; stores gate (and start) cotangents, adds up those of
        params.
        """
        g = self.graph
        carry = [f"b_{s}" for s in self.slots]
        rows_g = [f"c_{s}" for s in self.slots]
        mu = [add(g.input(b), g.input(c)) for b, c in zip(carry, rows_g, strict=True)]
        before, drawn, totals = self._pulled(mu)
        return loop_program(
            g,
            carry=carry,
            rows=[*self.prev_names, *self.gate_names, *rows_g],
            consts=self.param_names,
            new=before,
            stored=drawn,
            totals=totals,
        )


_traced: WeakKeyDictionary[type, dict[tuple[Any, ...], StepPrograms]] = WeakKeyDictionary()
_tracing = Lock()


def programs_of(cell: ChannelwiseCell, *, diagonal: bool = False, marks: Marks | None = None) -> StepPrograms:
    """The programs of a cell's class and options, traced on first use."""
    marks = Marks() if marks is None else marks
    key = (diagonal, marks, *(getattr(cell, name) for name in cell.options))
    with _tracing:
        known = _traced.setdefault(type(cell), {})
        if key not in known:
            known[key] = StepPrograms(cell, diagonal, marks)
        return known[key]
