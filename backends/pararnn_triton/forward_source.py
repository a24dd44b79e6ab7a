"""The forward kernel: one template for every cell, filled by printing the cell's programs.

One program (thread block) runs one segment of `BD` channels, in stages, each a launch that ends at once where nothing
is left to do. Stage 0 guesses the start by warm-up steps and runs the plain steps. In stage 1 a segment whose start is
not, bit for bit, the end before it runs again from that end until it meets what is stored; if all do, every joint of
the channel block matches and it is done. Later stages run what is open with tangents. The program of a channel block
that arrives last joins its segments: it tests the joints, corrects the starts, and says whether more is needed; on the
last launch it walks, in order and exactly, what is still open. With one segment the kernel is the plain time loop.
Nothing waits for the host.
"""

from __future__ import annotations

from pararnn.programs import StepPrograms
from pararnn_triton.print_triton import (
    Rows,
    at,
    indent,
    input_loads,
    input_rows,
    rows_at_once,
    running_loop,
    statements,
)
from pararnn_triton.shape import Shape

# Rows loaded ahead of their use, in the time loop and in the loop over joints.
GROUP, JOINT_GROUP, RERUN_GROUP = 4, 8, 4
# Half-precision states do not tell whether a run has met them, so the first one leaves its own every so many rows.
MARK_EVERY = 32

_HEAD = """@triton.jit(do_not_specialize=["T", "L", "C", "W"])
def forward(gates, h0, weights, head_rows, fresh, hold_rows, states, work, estimate,
            B, T, D: tl.constexpr, L, C, W, tol, accept, EPS: tl.constexpr, BD: tl.constexpr, STAGE: tl.constexpr,
            LAST: tl.constexpr, MANY: tl.constexpr, HAS_H0: tl.constexpr, HALF: tl.constexpr):
    blocks = tl.cdiv(D, BD)
    pid = tl.program_id(0)
    block = pid % blocks
    c = (pid // blocks) % C
    b = (pid // blocks // C).to(tl.int64)
    lane = block * BD + tl.arange(0, BD)
    mask = lane < D
    group = b * blocks + block
    begin = c * L
    stop = tl.minimum(begin + L, T)
    # What the segments exchange: rows (B, C, D) of starts, ends, M, G, sizes and marks, then flags.
    joints = C.to(tl.int64) * B * D
    per_segment = L // {mark_every}
    starts = work
    ends = starts + {size} * joints
    prods = ends + {size} * joints
    grows = prods + {entries} * joints
    sizes = grows + {entries} * joints
    marks = sizes + {size} * joints
    counters = marks + {size} * joints * per_segment * HALF
    opened = counters + B * blocks
    dirty = opened + B * blocks
"""


def work_size(programs: StepPrograms, batch: int, width: int, shape: Shape, half: bool) -> int:
    """Numbers in float32 that the kernel's `work` holds."""
    size, entries = programs.size, len(programs.m.flat)
    rows = 3 * size + 2 * entries + (size * (shape.length // MARK_EVERY) if half else 0)
    return batch * (shape.segments * width * rows + -(-width // shape.block) * (shape.segments + 2))


def forward_source(programs: StepPrograms) -> str:
    """Triton source of the kernel ``forward`` for one cell."""
    size = programs.size
    prev = programs.prev_names
    m_names, g_names = programs.m.flat, [f"G_{i}_{j}" for i, j in programs.m.where]
    z_names = [f"z_{s}" for s in programs.slots]
    lines: list[str] = []
    lines += [
        f"{p} = tl.load(weights + {k} * D + lane, mask=mask, other=0.0)" for k, p in enumerate(programs.param_names)
    ]

    gate_loads = input_loads(programs)

    def joint(array: str, k: int, row: str) -> str:
        return f"{array} + (({k} * B + b) * C + {row}) * D + lane"

    ins, outs = input_rows(programs), Rows("states", size)

    def store_states(off: int) -> list[str]:
        return [f"tl.store({outs.at(s, off)}, {name}, mask=mask)" for s, name in enumerate(prev)]

    advance = statements(programs.advance.program, prev)
    grow = statements(programs.advance_tangent.program, [*prev, *m_names, *g_names])
    measure = [f"{z} = maximum({z}, tl.abs({s}))" for z, s in zip(z_names, prev, strict=True)]

    # The start: the true one for segment 0, warm-up for the others on the first launch, the joined one afterwards.
    first = [f"{name} = tl.zeros([BD], tl.float32)" for name in prev]
    from_h0 = [
        f"{name} = tl.load(h0 + (b * {size} + {s}) * D + lane, mask=mask, other=0.0).to(tl.float32)"
        for s, name in enumerate(prev)
    ]
    first += ["if HAS_H0:", "    if c == 0:", *indent(from_h0, 2)]
    warm = ["ahead = tl.where(c > 0, tl.minimum(W, begin), 0)"]
    # The segment before reads these rows again soon.
    soon = [(n, text.replace("other=0.0)", "other=0.0, eviction_policy='evict_last')")) for n, text in gate_loads]
    warm += running_loop(
        soon, lambda row, off: advance, first="begin - ahead", count="ahead", step=1, group=GROUP, along=[ins]
    )
    warm += [f"tl.store({joint('starts', s, 'c')}, {name}, mask=mask)" for s, name in enumerate(prev)]
    first += ["if MANY:", *indent(warm)]
    lines += [
        "run = 1.0",
        "if STAGE > 1:",
        "    if tl.load(opened + group) == 0.0:",
        "        return",
        "if STAGE > 2:",
        "    run = tl.load(dirty + (b * C + c) * blocks + block)",
        "if STAGE == 0:",
        *indent(first),
        "else:",
        *indent([f"{name} = tl.load({joint('starts', s, 'c')}, mask=mask, other=0.0)" for s, name in enumerate(prev)]),
    ]

    # The pass.
    one = "tl.full([BD], 1.0, tl.float32)"
    ready = [
        f"{n} = {one if i == j else 'tl.zeros([BD], tl.float32)'}"
        for n, (i, j) in zip(m_names, programs.m.where, strict=True)
    ]
    ready += [f"{g} = tl.abs({n})" for g, n in zip(g_names, m_names, strict=True)]
    # Sizes are those of the results: a start far outside what follows must not make errors look small.
    ready += [f"{z} = tl.zeros([BD], tl.float32)" for z in z_names]
    run_tangent = ready + running_loop(
        gate_loads,
        lambda row, off: [*grow, *measure, *store_states(off)],
        first="begin",
        count="(stop - begin)",
        step=1,
        group=GROUP,
        along=[ins, outs],
    )
    for array, names in (("ends", prev), ("prods", m_names), ("grows", g_names), ("sizes", z_names)):
        run_tangent += [f"tl.store({joint(array, k, 'c')}, {n}, mask=mask)" for k, n in enumerate(names)]

    def mark(k: int, row: str) -> str:
        return f"marks + ((({k} * B + b) * C + c) * per_segment + ({row} - begin) // {MARK_EVERY}) * D + lane"

    def leave_mark(row: str) -> list[str]:
        due = f"mask & (({row} - begin) % {MARK_EVERY} == {MARK_EVERY - 1})"
        store = [f"    tl.store({mark(k, row)}, {name}, mask=due)" for k, name in enumerate(prev)]
        return ["if MANY and HALF:", f"    due = {due}", *store]

    plain = running_loop(
        gate_loads,
        lambda row, off: [*advance, *store_states(off), *leave_mark(row)],
        first="begin",
        count="(stop - begin)",
        step=1,
        group=GROUP,
        along=[ins, outs],
    )
    plain_ends = [f"tl.store({joint('ends', k, 'c')}, {n}, mask=mask)" for k, n in enumerate(prev)]
    # Before any launch reads them.
    plain_ends += [
        "if c == 0:",
        "    tl.store(counters + group, 0.0)",
        "    tl.store(opened + group, 0.0)",
        "    tl.store(estimate + b * D + lane, tl.zeros([BD], tl.float32), mask=mask)",
    ]
    again = _settle(programs, joint, advance, mark)
    lines += ["if STAGE == 0:", *indent(plain), "    if MANY:", *indent(plain_ends, 2)]
    lines += ["elif STAGE == 1:", *indent(again), "elif run != 0.0:", *indent(run_tangent)]

    joins = _join(programs, joint, advance, m_names, g_names, z_names)
    lines += [
        "if STAGE > 1:",
        "    tl.debug_barrier()",
        "    arrived = tl.atomic_add(counters + group, 1.0, sem='acq_rel')",
        "    if arrived == C - 1:",
        "        tl.store(counters + group, 0.0)",
        *indent(joins, 2),
    ]
    head = _HEAD.format(size=size, entries=len(m_names), mark_every=MARK_EVERY)
    return head + "\n".join(indent(lines)) + "\n"


def _unlike(pairs: list[tuple[str, str]], where: str) -> list[str]:
    """Sets `apart` to 1 in lanes where a pair differs, two NaNs being alike; elsewhere to 0."""
    lines = ["apart = tl.zeros([BD], tl.int32)"]
    for mine, other in pairs:
        alike = f"(({mine} == {other}) | (({mine} != {mine}) & ({other} != {other})))"
        lines.append(f"apart = tl.where({alike} | ~({where}), apart, 1)")
    return lines


def _settle(programs, joint, advance, mark) -> list[str]:
    """Stage 1: where start and the end before differ, from that end until what is stored is met.

    Ends are read and not written, so the segments need not wait for each other. A run that meets what is stored has
    the stored end; another says that its channel block is open.
    """
    prev = programs.prev_names
    before = [f"tl.load({joint('ends', k, '(c - 1)')}, mask=mask & (c > 0), other=0.0)" for k in range(len(prev))]
    lines = [f"true_{k} = {load}" for k, load in enumerate(before)]
    lines += _unlike([(p, f"true_{k}") for k, p in enumerate(prev)], "mask & (c > 0)")
    lines.append("running = tl.max(apart, axis=0)")
    rerun = [f"{p} = true_{k}" for k, p in enumerate(prev)]
    rerun += [f"tl.store({joint('starts', k, 'c')}, {p}, mask=mask)" for k, p in enumerate(prev)]
    rerun += ["row = begin", "finish = stop", *_rerun(programs, advance, mark)]
    check = [f"end_{k} = tl.load({joint('ends', k, 'c')}, mask=mask, other=0.0)" for k in range(len(prev))]
    check += _unlike([(p, f"end_{k}") for k, p in enumerate(prev)], "mask")
    check += ["if tl.max(apart, axis=0) != 0:", "    tl.store(opened + group, 1.0)"]
    return [*lines, "if running != 0:", *indent(rerun), "    if running != 0:", *indent(check, 2)]


def _rerun(programs, advance, mark=None) -> list[str]:
    """From `row` to `finish`, or until the states are, bit for bit, those stored already (then `running` is 0).

    In half precision the comparison is with the marks of the first run, where they are given and hold.
    """
    prev = programs.prev_names
    ins, outs = input_rows(programs), Rows("states", programs.size)
    count = rows_at_once(len(advance) + 4 * len(prev) + len(programs.gate_names), RERUN_GROUP)
    # A group may not step over a mark.
    count = 1 << (count.bit_length() - 1)
    group = []
    for u in range(count):
        group.append(f"ok{u} = mask & (row + {u} < finish)")
        group += [f"next{u}_{g} = {at(text, f'(row + {u})', u, f'ok{u}')}" for g, text in input_loads(programs)]
    last = count - 1
    # A state that has met the stored one follows it ever after, so the last row of the group decides.
    for k in range(len(prev)):
        place = outs.at(k, last)
        group.append(f"old_{k} = tl.load({place}, mask=ok{last}, other=0.0, cache_modifier='.cg').to(tl.float32)")
    for u in range(count):
        group += [f"{g} = next{u}_{g}" for g in programs.gate_names]
        group += [f"past_{k} = {p}" for k, p in enumerate(prev)]
        group += advance
        group += [f"{p} = tl.where(row + {u} < finish, {p}, past_{k})" for k, p in enumerate(prev)]
        group += [f"tl.store({outs.at(k, u)}, {p}, mask=ok{u})" for k, p in enumerate(prev)]
    met = _unlike([(p, f"old_{k}") for k, p in enumerate(prev)], "mask")
    group += [ins.move(count), outs.move(count), f"row += {count}", "if not HALF:"]
    # Past the end there is nothing to be met.
    group += indent([*met, "running = tl.where(row <= finish, tl.max(apart, axis=0), running)"])
    if mark is not None:
        group.append("else:")
        at_mark = [f"old_{k} = tl.load({mark(k, '(row - 1)')}, mask=mask, other=0.0)" for k in range(len(prev))]
        at_mark += [*met, "running = tl.max(apart, axis=0)"]
        group += [f"    if ((row - begin) % {MARK_EVERY} == 0) & (row <= finish):", *indent(at_mark, 2)]
    return [ins.begin("row"), outs.begin("row"), "while (row < finish) & (running != 0):", *indent(group)]


def _join(programs, joint, advance, m_names, g_names, z_names) -> list[str]:
    """Tests the joints, corrects the starts, and on the last launch finishes exactly."""
    slots = programs.slots
    fresh = ", cache_modifier='.cg'"
    loads = [(n, f"tl.load({joint('prods', k, 'ROW')}, mask=OK, other=0.0{fresh})") for k, n in enumerate(m_names)]
    loads += [(n, f"tl.load({joint('grows', k, 'ROW')}, mask=OK, other=0.0{fresh})") for k, n in enumerate(g_names)]
    loads += [(n, f"tl.load({joint('sizes', k, 'ROW')}, mask=OK, other=0.0{fresh})") for k, n in enumerate(z_names)]
    loads += [(f"e_{s}", f"tl.load({joint('ends', k, 'ROW')}, mask=OK, other=0.0{fresh})") for k, s in enumerate(slots)]
    loads += [
        (f"b_{s}", f"tl.load({joint('starts', k, '(ROW + 1)')}, mask=OK & (ROW + 1 < C), other=0.0{fresh})")
        for k, s in enumerate(slots)
    ]
    zero = "tl.zeros([BD], tl.float32)"
    start = [f"{letter}_{s} = {zero}" for letter in ("d", "n", "worst", "moved") for s in slots]
    start += [f"scale_{s} = tl.full([BD], 1e-36, tl.float32)" for s in slots]
    start += ["exact = mask"]
    for k, (s, bound) in enumerate(zip(slots, programs.bounds, strict=True)):
        if bound is not None:
            start.append(f"first_{s} = tl.load({joint('starts', k, '0')}, mask=mask, other=0.0{fresh})")
            start.append(f"lo_{s} = tl.minimum(first_{s}, {bound[0]})")
            start.append(f"hi_{s} = tl.maximum(first_{s}, {bound[1]})")

    def weighted(i: int, term: str) -> str:
        parts = [
            f"{g} * {term.format(slots[j])}" for g, (row, j) in zip(g_names, programs.m.where, strict=True) if row == i
        ]
        return " + ".join(parts)

    new = [f"w_{s}" for s in slots]

    def body(row: str, off: int) -> list[str]:
        lines = []
        for i, s in enumerate(slots):
            # After the last segment stands its own end.
            lines.append(f"b_{s} = tl.where({row} + 1 < C, b_{s}, e_{s})")
            lines.append(f"exact = exact & ((b_{s} == e_{s}) | ((b_{s} != b_{s}) & (e_{s} != e_{s})))")
            lines.append(f"scale_{s} = maximum(scale_{s}, z_{s})")
            lines.append(f"f_{s} = EPS * maximum(z_{s}, {weighted(i, 'z_{}')})")
        for i, s in enumerate(slots):
            lines.append(f"moved_{s} = maximum(moved_{s}, {weighted(i, 'tl.abs(d_{})')})")
            lines.append(f"worst_{s} = maximum(worst_{s}, {weighted(i, '(tl.abs(d_{0}) + n_{0})')} + f_{s})")
        lines += statements(programs.correct.program, [*(f"d_{s}" for s in slots), *(f"n_{s}" for s in slots), *new])
        write = ["changed = tl.zeros([BD], tl.float32)"]
        for k, s in enumerate(slots):
            write.append(f"changed = tl.where(w_{s} != b_{s}, 1.0, changed)")
            write.append(f"tl.store({joint('starts', k, f'({row} + 1)')}, w_{s}, mask=mask)")
        write.append("changed = tl.where(mask, changed, 0.0)")
        write.append(f"tl.store(dirty + (b * C + {row} + 1) * blocks + block, tl.max(changed, axis=0))")
        return [*lines, "if not LAST:", f"    if {row} + 1 < C:", *indent(write, 2)]

    scan = start + running_loop(loads, body, first="0", count="C", step=1, group=JOINT_GROUP)
    scan += ["good = mask", "error = tl.zeros([BD], tl.float32)"]
    for s in slots:
        scan.append(f"good = good & (moved_{s} <= tol * scale_{s}) & (worst_{s} <= accept * scale_{s})")
        scan.append(f"error = maximum(error, worst_{s} / scale_{s})")
    scan += [
        "error = tl.where(exact, 0.0, error)",
        "any_open = tl.max(tl.where(mask & ~(good | exact), 1.0, 0.0), axis=0)",
        "tl.store(opened + group, any_open)",
        "tl.store(dirty + b * C * blocks + block, 0.0)",
    ]
    scan += ["if LAST:", "    if any_open != 0.0:", *indent(_walk(programs, joint, advance), 2)]
    scan.append("tl.store(estimate + b * D + lane, error, mask=mask)")
    return scan


def _walk(programs, joint, advance) -> list[str]:
    """The exact finish: segments in order, re-run from the true start until they meet what is stored already."""
    slots, prev = programs.slots, programs.prev_names
    fresh = ", cache_modifier='.cg'"
    lines = [f"{p} = tl.load({joint('starts', k, '0')}, mask=mask, other=0.0{fresh})" for k, p in enumerate(prev)]
    here = [f"old_{k} = tl.load({joint('starts', k, 'cc')}, mask=mask, other=0.0{fresh})" for k in range(len(prev))]
    here += [f"e_{s} = tl.load({joint('ends', k, 'cc')}, mask=mask, other=0.0{fresh})" for k, s in enumerate(slots)]
    here += _unlike([(p, f"old_{k}") for k, p in enumerate(prev)], "mask")
    here += [
        "running = tl.max(apart, axis=0)",
        "row = cc * L",
        "finish = tl.minimum(row + L, T)",
        *_rerun(programs, advance),
    ]
    # Met before the end, or never apart: the stored end is the true one.
    here += [f"{p} = tl.where(running == 0, e_{s}, {p})" for s, p in zip(slots, prev, strict=True)]
    lines += ["running = 0", "row = 0", "for cc in range(0, C):", *indent(here)]
    lines.append("error = tl.zeros([BD], tl.float32)")
    return lines
