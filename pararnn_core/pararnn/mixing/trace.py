"""The programs of a mixing cell: what is elementwise before, between and after its products, and its derivatives."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from pararnn.cells.mixing import MixingCell
from pararnn.errors import UntraceableError
from pararnn.graph import Expr, Graph, Program, SymbolicNamespace, mul, pullback, pushforward
from pararnn.programs import Entry, matrix_product, reachable


@dataclass(frozen=True)
class Stage:
    """One product: its source (a slot's position, or a program) and the names that it delivers."""

    source: Expr
    names: tuple[str, ...]
    # The slot that is the source, if the source is nothing but a slot.
    slot: int | None
    program: Program


@dataclass(frozen=True)
class BackStage:
    """The pullback of one elementwise part: of the step's end (after all products) or of a stage's source.

    `outputs` says what each result is a cotangent of: ("slot", k), ("gate", k), ("mixed", name) or ("param", k).
    """

    program: Program
    outputs: tuple[tuple[str, Any], ...]


@dataclass
class MixPrograms:
    """Everything derived from one mixing cell's step.

    Operand names: ``s_`` slots, ``g_`` gates, ``u_`` products, ``p_`` params, ``r_`` the diagonal of a product's
    matrix, ``M_i_j`` entries of the running product of the step's true diagonal.
    """

    slots: tuple[str, ...]
    prev_names: list[str]
    gate_names: list[str]
    mixed_names: list[str]
    param_names: list[str]
    diagonal_names: list[str]
    stages: list[Stage]
    m: Entry
    bounds: list[tuple[float, float] | None]
    logarithmic: list[bool]
    # [*slots, *gates, *mixed, *params] -> new slots.
    advance: Program
    # [*slots, *M, *gates, *mixed, *params, *diagonals] -> new slots and M.
    advance_tangent: Program
    # [*slots, *gates, *mixed, *params, *diagonals] -> the true diagonal's entries, in the order of m.where.
    diagonal: Program
    back: list[BackStage]
    # As `diagonal`, times the running product's transpose: [*slots, *gates, *mixed, *params, *diagonals, *N] -> N,
    # whose entries are those of M with row and column exchanged, in the order of M.
    diagonal_back: Program
    compiled: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        return len(self.slots)


def trace(cell: MixingCell) -> MixPrograms:
    graph = Graph()
    prev = [graph.input(f"s_{s}") for s in cell.slots]
    gates = [graph.input(f"g_{g}") for g in cell.gates]
    params = [graph.input(f"p_{p}") for p in cell.params]
    parts: list[tuple[Expr, tuple[str, ...]]] = []
    owner = type(cell).__name__

    def mix(source: Any, *names: str) -> tuple[Expr, ...]:
        known = [name for _, done in parts for name in done]
        for name in names:
            if name not in cell.product_names:
                raise UntraceableError(f"{owner}.step: mix has no product {name!r}; it has {cell.product_names}")
            if name in known:
                raise UntraceableError(f"{owner}.step: the product {name!r} is taken twice; name a product for each")
        parts.append((graph.lift(source, f"{owner}.step: mix"), names))
        return tuple(graph.input(f"u_{name}") for name in names)

    made = cell.step(SymbolicNamespace(graph), mix, *prev, *gates, *params)
    if not isinstance(made, tuple) or len(made) != len(prev):
        raise UntraceableError(f"{owner}.step must return a tuple of its {len(prev)} new slot(s), {cell.slots}")
    new = [graph.lift(value, f"{owner}.step") for value in made]
    taken = [name for _, names in parts for name in names]
    if missing := [name for name in cell.product_names if name not in taken]:
        raise UntraceableError(f"{owner}.step never uses the products {missing}; take them out of `products`")

    names = {
        "prev": [f"s_{s}" for s in cell.slots],
        "gates": [f"g_{g}" for g in cell.gates],
        "mixed": [f"u_{name}" for name in taken],
        "params": [f"p_{p}" for p in cell.params],
        "diagonals": [f"r_{name}" for name in taken],
    }
    plain = [*names["prev"], *names["gates"], *names["mixed"], *names["params"]]
    stages = []
    for source, products in parts:
        slot = next((k for k, s in enumerate(prev) if s is source), None)
        stages.append(Stage(source, products, slot, Program(plain, [source])))

    # The true diagonal: what a channel's own state does to it, through every product's own diagonal entry.
    zero, one = graph.const(0.0), graph.const(1.0)
    columns = []
    for wrt in prev:
        inputs: list[Expr] = list(prev)
        seeds: list[Expr] = [one if s is wrt else zero for s in prev]
        for source, products in parts:
            (moved,) = pushforward([source], inputs, seeds)
            for name in products:
                inputs.append(graph.input(f"u_{name}"))
                seeds.append(mul(graph.input(f"r_{name}"), moved))
        columns.append(pushforward(new, inputs, seeds))
    jac = [[column[i] for column in columns] for i in range(len(new))]
    pattern = reachable([[not e.is_number(0.0) for e in row] for row in jac])
    m = Entry("M", [[one if yes else zero for yes in row] for row in pattern])
    grown = matrix_product(jac, m.symbols(graph))

    transposed = [[jac[j][i] for j in range(len(new))] for i in range(len(new))]
    symbols = [[m.symbols(graph)[j][i] for j in range(len(new))] for i in range(len(new))]
    shrunk = matrix_product(transposed, symbols)
    back = [_back(plain, new, [f"c_{s}" for s in cell.slots], prev, gates, taken, params, graph)]
    for position in range(len(parts) - 1, -1, -1):
        source, _ = parts[position]
        before = [name for _, done in parts[:position] for name in done]
        back.append(_back(plain, [source], ["c_source"], prev, gates, before, params, graph))
    return MixPrograms(
        slots=tuple(cell.slots),
        prev_names=names["prev"],
        gate_names=names["gates"],
        mixed_names=names["mixed"],
        param_names=names["params"],
        diagonal_names=names["diagonals"],
        stages=stages,
        m=m,
        bounds=[cell.bounds.get(s) for s in cell.slots],
        logarithmic=[s in cell.logarithmic for s in cell.slots],
        advance=Program(plain, new),
        advance_tangent=Program(
            [*names["prev"], *m.flat, *names["gates"], *names["mixed"], *names["params"], *names["diagonals"]],
            [*new, *(grown[i][j] for i, j in m.where)],
        ),
        diagonal=Program([*plain, *names["diagonals"]], [jac[i][j] for i, j in m.where]),
        back=back,
        diagonal_back=Program([*plain, *names["diagonals"], *m.flat], [shrunk[j][i] for i, j in m.where]),
    )


def _back(
    plain: list[str], outputs: list[Expr], cotangents: list[str], prev: list[Expr], gates: list[Expr],
    mixed: list[str], params: list[Expr], graph: Graph,
) -> BackStage:  # fmt: skip
    wrt = [*prev, *gates, *(graph.input(f"u_{name}") for name in mixed), *params]
    labels: list[tuple[str, Any]] = [
        *(("slot", k) for k in range(len(prev))),
        *(("gate", k) for k in range(len(gates))),
        *(("mixed", name) for name in mixed),
        *(("param", k) for k in range(len(params))),
    ]
    found = pullback(outputs, [graph.input(c) for c in cotangents], wrt)
    live = [(label, e) for label, e in zip(labels, found, strict=True) if not e.is_number(0.0)]
    return BackStage(Program([*plain, *cotangents], [e for _, e in live]), tuple(label for label, _ in live))


_traced: WeakKeyDictionary[type, dict[tuple[Any, ...], MixPrograms]] = WeakKeyDictionary()
_tracing = Lock()


def mix_programs_of(cell: MixingCell) -> MixPrograms:
    """The programs of a cell's class and options, traced on first use."""
    key = tuple(getattr(cell, name) for name in cell.options)
    with _tracing:
        known = _traced.setdefault(type(cell), {})
        if key not in known:
            known[key] = trace(cell)
        return known[key]
