"""The kernels of a mixing cell: a step with its product, its cotangent, and what joins segments.

A row is one state of one sequence in one segment; slots are kept as (S, N, D) in float32, N = B·C, so that a slot is
the left side of a product. A program makes a tile of rows and channels: it multiplies the rows, whole, with its
channels' part of the matrix, and goes on with what is elementwise while the products are in registers. What it
multiplies was written by other programs one launch before, so slots (leftward: cotangents of products) have two buffers
that change places. Gates, states and cotangents stay in their layout in time, (B, T, …): a row's step l is at
``time[0] + c·L + l``, where c counts segments from the left, or from the right as the adjoint travels.
"""

from __future__ import annotations

from typing import Any

from pararnn.mixing.trace import MixPrograms
from pararnn_triton.print_triton import indent, running_loop, statements

JOINT_GROUP = 8
TILE = "[BM, BN]"

_TILE = """    blocks = tl.cdiv(INNER, BN)
    head = tl.program_id(1) // blocks
    lane = tl.program_id(1) % blocks * BN + tl.arange(0, BN)
    n = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    d = (head * INNER + lane)[None, :]
    mask = (n < N) & (lane < INNER)[None, :]
    index = n * D + d
    c = n % C
    if LEFTWARD:
        c = C - 1 - c
    t = tl.load(time) + c * L + l
    row = (n // C).to(tl.int64) * T + t
"""


def _products(left: str, right: str, names: list[str], depth: str) -> list[str]:
    """Sums over `depth` terms of what stands at `left` and `right`, which may name the product {k}, term I and J."""
    lines = [f"{name} = tl.zeros({TILE}, tl.float32)" for name in names]
    inner = [
        "term = first + tl.arange(0, BK)",
        f"among = term < {depth}",
        f"block = tl.load({left}, mask=(n < N) & among[None, :], other=0.0)",
    ]
    for k, name in enumerate(names):
        inner.append(f"part = tl.load({right.format(k=k)}, mask=among[:, None] & (lane < INNER)[None, :], other=0.0)")
        inner.append(f"{name} = tl.dot(block, part, {name}, input_precision=PRECISION)")
    return [*lines, f"for first in range(0, {depth}, BK):", *indent(inner)]


def mixing_source(programs: MixPrograms) -> str:
    """Triton source of ``step``, ``back``, ``correct`` and ``measure`` for one cell with one product stage."""
    return "\n\n".join([_step(programs), _back(programs), _correct(programs), _MEASURE])


def _gate_loads(programs: MixPrograms) -> list[str]:
    count = len(programs.gate_names)
    return [
        f"{g} = tl.load(gates + (row * {count} + {k}) * D + d, mask=mask, other=0.0).to(tl.float32)"
        for k, g in enumerate(programs.gate_names)
    ]


def _diagonals(programs: MixPrograms) -> list[str]:
    return [
        f"{r} = tl.load(diagonals + {k} * D + d, mask=mask, other=0.0)" for k, r in enumerate(programs.diagonal_names)
    ]


def _identity(programs: MixPrograms) -> list[str]:
    return [
        f"{name} = tl.full({TILE}, {float(i == j)}, tl.float32)"
        for name, (i, j) in zip(programs.m.flat, programs.m.where, strict=True)
    ]


def _entry_loads(programs: MixPrograms) -> list[str]:
    loads = [f"{m} = tl.load(entries + {k} * N * D + index, mask=mask)" for k, m in enumerate(programs.m.flat)]
    return ["if FIRST:", *indent(_identity(programs)), "else:", *indent(loads)]


def _step(programs: MixPrograms) -> str:
    prev, size, source = programs.prev_names, programs.size, programs.stages[0].slot
    lines = _products(
        f"before + ({source} * N + n) * D + head * INNER + term[None, :]",
        "matrix + (head * INNER + term[:, None]) * (K * INNER) + {k} * INNER + lane[None, :]",
        programs.mixed_names,
        "INNER",
    )
    lines += [
        f"{u} = {u} + tl.load(bias + {k} * D + d, mask=mask, other=0.0)" for k, u in enumerate(programs.mixed_names)
    ]
    lines += _gate_loads(programs)
    lines += [f"{s} = tl.load(before + {k} * N * D + index, mask=mask, other=0.0)" for k, s in enumerate(prev)]
    tangent = [
        *_entry_loads(programs),
        *_diagonals(programs),
        *statements(programs.advance_tangent, [*prev, *programs.m.flat], shape=TILE),
        *(f"tl.store(entries + {k} * N * D + index, {m}, mask=mask)" for k, m in enumerate(programs.m.flat)),
    ]
    lines += ["if TANGENT:", *indent(tangent), "else:", *indent(statements(programs.advance, prev, shape=TILE))]
    lines += [f"tl.store(after + {k} * N * D + index, {s}, mask=mask)" for k, s in enumerate(prev)]
    stores = [f"tl.store(states + (row * {size} + {k}) * D + d, {s}, mask=mask)" for k, s in enumerate(prev)]
    lines += ["if STORE:", *indent(stores)]
    head = (
        '@triton.jit(do_not_specialize=["l"])\n'
        "def step(gates, matrix, bias, diagonals, before, after, entries, states, time, N, T, D, L, C, l,\n"
        "         INNER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,\n"
        "         LEFTWARD: tl.constexpr, TANGENT: tl.constexpr, STORE: tl.constexpr, FIRST: tl.constexpr):\n"
        f"    K: tl.constexpr = {len(programs.mixed_names)}\n"
    )
    return head + _TILE + "\n".join(indent(lines)) + "\n"


def _back(programs: MixPrograms) -> str:
    size, gates, mixed = programs.size, len(programs.gate_names), programs.mixed_names
    part = programs.back[0]
    moved = _products(
        "before + (head * N + n) * (K * INNER) + term[None, :]",
        "transposed + (head * K * INNER + term[:, None]) * INNER + lane[None, :]",
        ["moved"],
        "K * INNER",
    )
    lines = ["if not FIRST:", *indent(moved), *_gate_loads(programs)]
    lines += [f"{u} = tl.load(products + (row * K + {k}) * D + d, mask=mask, other=0.0)" for k, u in enumerate(mixed)]
    lines.append("inside = mask & (t > 0)")
    lines.append("outside = mask & (t == 0)")
    for k, s in enumerate(programs.prev_names):
        past = f"tl.load(states + ((row - 1) * {size} + {k}) * D + d, mask=inside, other=0.0)"
        lines.append(f"{s} = {past}.to(tl.float32)")
        lines.append(f"{s} = {s} + tl.load(h0 + ({k} * (N // C) + n // C) * D + d, mask=outside, other=0.0)")
    cotangents = [f"c_{s}" for s in programs.slots]
    source = programs.stages[0].slot
    for k, name in enumerate(cotangents):
        lines.append(f"{name} = tl.load(slots + {k} * N * D + index, mask=mask, other=0.0)")
        if k == source:
            lines.append("if not FIRST:")
            lines.append(f"    {name} = {name} + moved")
        lines.append(
            f"{name} = {name} + tl.load(given + (row * {size} + {k}) * D + d, mask=mask, other=0.0).to(tl.float32)"
        )
    names: dict[tuple[str, Any], str] = {("slot", k): f"v_{k}" for k in range(size)}
    names |= {("gate", k): f"w_{k}" for k in range(gates)}
    names |= {("mixed", u.removeprefix("u_")): f"x_{k}" for k, u in enumerate(mixed)}
    lines += [f"{name} = tl.zeros({TILE}, tl.float32)" for name in names.values()]
    # Entries are read and written before the cotangents take over.
    tangent = [
        *_entry_loads(programs),
        *_diagonals(programs),
        *statements(programs.diagonal_back, programs.m.flat, shape=TILE),
        *(f"tl.store(entries + {k} * N * D + index, {m}, mask=mask)" for k, m in enumerate(programs.m.flat)),
    ]
    lines += ["if TANGENT:", *indent(tangent)]
    lines += statements(part.program, [names[label] for label in part.outputs], shape=TILE)
    lines += [f"tl.store(slots + {k} * N * D + index, v_{k}, mask=mask)" for k in range(size)]
    lines.append("at = (head * N + n) * (K * INNER) + lane[None, :]")
    lines += [f"tl.store(after + at + {k} * INNER, x_{k}, mask=mask)" for k in range(len(mixed))]
    stores = [f"tl.store(d_gates + (row * {gates} + {k}) * D + d, w_{k}, mask=mask)" for k in range(gates)]
    stores += [f"tl.store(d_products + (row * K + {k}) * D + d, x_{k}, mask=mask)" for k in range(len(mixed))]
    lines += ["if STORE:", *indent(stores)]
    head = (
        '@triton.jit(do_not_specialize=["l"])\n'
        "def back(gates, transposed, products, states, h0, given, diagonals, slots, entries, before, after,\n"
        "         d_gates, d_products, time, N, T, D, L, C, l,\n"
        "         INNER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,\n"
        "         LEFTWARD: tl.constexpr, TANGENT: tl.constexpr, STORE: tl.constexpr, FIRST: tl.constexpr):\n"
        f"    K: tl.constexpr = {len(mixed)}\n"
    )
    return head + _TILE + "\n".join(indent(lines)) + "\n"


def _correct(programs: MixPrograms) -> str:
    """One program takes BD channels of one sequence through its joints, in the order in which they are travelled."""
    size, where = programs.size, programs.m.where

    def at(array: str, k: int, row: str) -> str:
        return f"tl.load({array} + ({k} * N + b * C + {row}) * D + d, mask=OK, other=0.0)"

    loads = [(f"e{k}", at("ends", k, "ROW")) for k in range(size)]
    loads += [(f"s{k}", at("starts", k, "(ROW + 1)")) for k in range(size)]
    loads += [(f"m{k}", at("entries", k, "ROW")) for k in range(len(where))]

    def body(row: str, off: int) -> list[str]:
        lines = []
        for i in range(size):
            lines.append(f"w{i} = e{i}")
            for k, pair in enumerate(where):
                for flipped, (r, c) in ((False, pair), (True, pair[::-1])):
                    if r == i:
                        # An exact start stays exact even where the tangent has overflowed.
                        term = f"w{i} + tl.where(d{c} == 0.0, 0.0, m{k} * d{c})"
                        lines.append(f"if LEFTWARD == {flipped}:")
                        lines.append(f"    w{i} = {term}")
            lines.append(f"w{i} = minimum(maximum(w{i}, low{i}), high{i})")
            lines.append(f"w{i} = tl.where(w{i} - w{i} == 0.0, w{i}, e{i})")
        for i in range(size):
            lines.append(f"d{i} = tl.where((w{i} == s{i}) | ((w{i} != w{i}) & (s{i} != s{i})), 0.0, w{i} - s{i})")
            lines.append(f"tl.store(starts + ({i} * N + b * C + {row} + 1) * D + d, w{i}, mask=mask)")
        return lines

    lines = [f"d{i} = tl.zeros([BD], tl.float32)" for i in range(size)]
    for i in range(size):
        lines += [f"low{i} = tl.load(box + {2 * i})", f"high{i} = tl.load(box + {2 * i + 1})"]
    lines += running_loop(loads, body, first="0", count="C - 1", step=1, group=JOINT_GROUP)
    head = (
        "@triton.jit\n"
        "def correct(starts, ends, entries, box, N, D, C, BD: tl.constexpr, LEFTWARD: tl.constexpr):\n"
        "    blocks = tl.cdiv(D, BD)\n"
        "    b = tl.program_id(0) // blocks\n"
        "    d = tl.program_id(0) % blocks * BD + tl.arange(0, BD)\n"
        "    mask = d < D\n"
    )
    return head + "\n".join(indent(lines)) + "\n"


# Per row and slot: size, mismatch at the joint after it, how far start and end moved, and warm-up against pass.
_MEASURE = """@triton.jit
def gap(a, b):
    apart = tl.where((a == b) | ((a != a) & (b != b)), 0.0, tl.abs(a - b))
    return tl.where(apart == apart, apart, float("inf"))


@triton.jit
def measure(starts, ends, old_starts, old_ends, seen, blank, report, N, D, C, BD: tl.constexpr, AGAIN: tl.constexpr):
    n, k = tl.program_id(0), tl.program_id(1)
    size = tl.zeros([BD], tl.float32)
    joint, moved_start, moved_end, before = size, size, size, size
    base = (k * N + n) * D
    joined = n % C < C - 1
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        mask = d < D
        s = tl.load(starts + base + d, mask=mask, other=0.0)
        e = tl.load(ends + base + d, mask=mask, other=0.0)
        following = tl.load(starts + base + D + d, mask=mask & joined, other=0.0)
        size = tl.maximum(size, tl.where(s - s == 0.0, tl.abs(s), 0.0))
        size = tl.maximum(size, tl.where(e - e == 0.0, tl.abs(e), 0.0))
        joint = tl.maximum(joint, tl.where(mask & joined, gap(e, following), 0.0))
        if AGAIN:
            moved_start = tl.maximum(moved_start, gap(s, tl.load(old_starts + base + d, mask=mask, other=0.0)))
            moved_end = tl.maximum(moved_end, gap(e, tl.load(old_ends + base + d, mask=mask, other=0.0)))
        else:
            began = tl.load(blank + k * D + d, mask=mask, other=0.0)
            before = tl.maximum(before, gap(tl.load(seen + base + d, mask=mask, other=0.0), began))
    at = report + (n * tl.num_programs(1) + k) * 5
    tl.store(at, tl.max(size, axis=0))
    tl.store(at + 1, tl.max(joint, axis=0))
    tl.store(at + 2, tl.max(moved_start, axis=0))
    tl.store(at + 3, tl.max(moved_end, axis=0))
    tl.store(at + 4, tl.max(before, axis=0))
"""
