"""The backward kernels: one template for every cell.

``adjoint_maps`` sweeps each segment backwards from an unknown cotangent ν as an affine map, and the last program of a
channel block to arrive joins the maps from right to left. ``back_propagate`` then sweeps once more with the right ν,
writing the cotangents of the gate inputs and adding up those of the parameters.
"""

from __future__ import annotations

from pararnn.programs import StepPrograms
from pararnn_triton.forward_source import JOINT_GROUP
from pararnn_triton.print_triton import Rows, indent, input_loads, input_rows, running_loop, statements

GROUP = 4

_ARGUMENTS = "gates, h0, weights, head_rows, fresh, hold_rows, states, cotangent"
_PLACE = """    blocks = tl.cdiv(D, BD)
    pid = tl.program_id(0)
    block = pid % blocks
    c = (pid // blocks) % C
    b = (pid // blocks // C).to(tl.int64)
    lane = block * BD + tl.arange(0, BD)
    mask = lane < D
    group = b * blocks + block
    begin = c * L
    stop = tl.minimum(begin + L, T)
"""


def _operands(programs: StepPrograms) -> tuple[list[str], list[tuple[str, str]], list[str], list[Rows]]:
    """Statements before the loop, its loads, those that begin each row, and the arrays that it runs along."""
    size = programs.size
    before = [
        f"{p} = tl.load(weights + {k} * D + lane, mask=mask, other=0.0)" for k, p in enumerate(programs.param_names)
    ]
    before += [f"h0_{k} = tl.zeros([BD], tl.float32)" for k in range(size)]
    before.append("if HAS_H0:")
    before += [
        f"    h0_{k} = tl.load(h0 + (b * {size} + {k}) * D + lane, mask=mask, other=0.0).to(tl.float32)"
        for k in range(size)
    ]
    loads = input_loads(programs)
    states, cotangent = Rows("states", size), Rows("cotangent", size)
    loads += [(name, states.load(k, "OK & (ROW > 0)", behind=1)) for k, name in enumerate(programs.prev_names)]
    loads += [(f"c_{s}", cotangent.load(k)) for k, s in enumerate(programs.slots)]
    begin_row = [f"{name} = tl.where(row == 0, h0_{k}, {name})" for k, name in enumerate(programs.prev_names)]
    return before, loads, begin_row, [input_rows(programs), states, cotangent]


def backward_source(programs: StepPrograms) -> str:
    """Triton source of both kernels for one cell."""
    return _maps(programs) + "\n\n" + _sweep(programs)


def _maps(programs: StepPrograms) -> str:
    size, slots = programs.size, programs.slots
    before, loads, begin_row, along = _operands(programs)
    n_names, b_names = programs.n.flat, [*(f"b_{s}" for s in slots), *programs.cut_names]
    lines = list(before)
    for name, (i, j) in zip(n_names, programs.n.where, strict=True):
        lines.append(f"{name} = {'tl.full([BD], 1.0, tl.float32)' if i == j else 'tl.zeros([BD], tl.float32)'}")
    lines += [f"{name} = tl.zeros([BD], tl.float32)" for name in b_names]
    step = statements(programs.adjoint_map_step.program, [*n_names, *b_names])
    lines += running_loop(
        loads,
        lambda row, off: [*begin_row, *step],
        first="(stop - 1)",
        count="(stop - begin)",
        step=-1,
        group=GROUP,
        along=along,
    )

    def joint(k: int, row: str) -> str:
        return f"maps + (({k} * B + b) * C + {row}) * D + lane"

    lines += [f"tl.store({joint(k, 'c')}, {n}, mask=mask)" for k, n in enumerate([*n_names, *b_names])]
    fresh = ", cache_modifier='.cg'"
    joint_loads = [
        (n, f"tl.load({joint(k, 'ROW')}, mask=OK, other=0.0{fresh})") for k, n in enumerate([*n_names, *b_names])
    ]
    v_names = [f"v_{s}" for s in slots]

    def body(row: str, off: int) -> list[str]:
        store = [
            f"tl.store(futures + (({k} * B + b) * C + {row}) * D + lane, {v}, mask=mask)" for k, v in enumerate(v_names)
        ]
        return [*store, *statements(programs.adjoint_joints.program, v_names)]

    scan = [f"{v} = tl.zeros([BD], tl.float32)" for v in v_names]
    scan += running_loop(joint_loads, body, first="(C - 1)", count="C", step=-1, group=JOINT_GROUP)
    scan += [f"tl.store(grad_h0 + (b * {size} + {k}) * D + lane, {v}, mask=mask)" for k, v in enumerate(v_names)]
    scan.append("tl.store(counters + group, 0)")
    lines += [
        "tl.debug_barrier()",
        "arrived = tl.atomic_add(counters + group, 1, sem='acq_rel')",
        "if arrived == C - 1:",
        *indent(scan),
    ]
    head = (
        '@triton.jit(do_not_specialize=["T", "L", "C"])\n'
        f"def adjoint_maps({_ARGUMENTS}, maps, futures, grad_h0, counters,\n"
        "                 B, T, D: tl.constexpr, L, C, BD: tl.constexpr, HAS_H0: tl.constexpr):\n"
    )
    return head + _PLACE + "\n".join(indent(lines)) + "\n"


def _sweep(programs: StepPrograms) -> str:
    size, slots, gates = programs.size, programs.slots, programs.gates
    before, loads, begin_row, along = _operands(programs)
    carry = [f"b_{s}" for s in slots]
    outputs = [f"o_{g}" for g in gates]
    grads = Rows("grad_gates", len(gates))
    begun = [f"o_{s}" for s in programs.start_names]
    added = [f"a_{p}" for p in programs.param_names]
    sums = [f"sum_{p}" for p in programs.param_names]
    lines = list(before)
    lines += [f"{name} = tl.zeros([BD], tl.float32)" for name in (*carry, *sums)]
    known = [
        f"{name} = tl.load(futures + (({k} * B + b) * C + c) * D + lane, mask=mask, other=0.0)"
        for k, name in enumerate(carry)
    ]
    lines += ["if MANY:", *indent(known)]
    step = statements(programs.back_propagate.program, [*carry, *outputs, *begun, *added])
    step += [f"{s} += {a}" for s, a in zip(sums, added, strict=True)]

    def body(row: str, off: int) -> list[str]:
        store = [f"tl.store({grads.at(k, off)}, {o}, mask=mask)" for k, o in enumerate(outputs)]
        if begun:
            # Each start is loaded by one step; the rows behind the documents' are shared and want no gradient.
            store += [
                f"number = start_number(head_rows, b * T + {row}, lane, mask)",
                "wanted = mask & (number >= 0) & (number < F)",
            ]
        store += [
            f"tl.store(grad_fresh + (number * {size} + {k}) * D + lane, {o}, mask=wanted)" for k, o in enumerate(begun)
        ]
        return [*begin_row, *step, *store]

    lines += running_loop(
        loads, body, first="(stop - 1)", count="(stop - begin)", step=-1, group=GROUP, along=[*along, grads]
    )
    lines += [f"tl.store(grad_params + (({k} * B + b) * C + c) * D + lane, {s}, mask=mask)" for k, s in enumerate(sums)]
    lines.append("if not MANY:")
    lines += [f"    tl.store(grad_h0 + (b * {size} + {k}) * D + lane, {v}, mask=mask)" for k, v in enumerate(carry)]
    head = (
        '@triton.jit(do_not_specialize=["T", "L", "C", "F"])\n'
        f"def back_propagate({_ARGUMENTS}, futures, grad_h0, grad_gates, grad_params, grad_fresh,\n"
        "                   B, T, D: tl.constexpr, L, C, F,\n"
        "                   BD: tl.constexpr, HAS_H0: tl.constexpr, MANY: tl.constexpr):\n"
    )
    return head + _PLACE + "\n".join(indent(lines)) + "\n"
