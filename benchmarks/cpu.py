"""Speed on a CPU against the NumPy time loop, behind a correctness gate: `python benchmarks/cpu.py [--quick]`.

Prints a table and saves results/cpu_BACKEND.json. A row's figures are printed only after forward and gradient agree
with the loop's in that very run. With `--backend cpu`, also against other people's compiled loops, and against the time
that memory and the elementary functions alone would take; `--markdown` prints the tables of docs/cpu.md from the saved
file.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import loop_baseline
from timing import RESULTS, best_of, header, save

from pararnn import NewtonConfig, NewtonStats, ParaGRU, ParaLSTM, ParaSLSTM, newton_apply, newton_vjp
from pararnn.verify import compare

# State values above which the loop's rows, its stacked result and ours do not fit into 24 GB together.
LARGEST = 1.2e9
CELLS = {"GRU": ParaGRU, "LSTM": ParaLSTM, "sLSTM": ParaSLSTM}


def problem(kind: str, batch: int, time: int, width: int, features: int):
    cell = CELLS[kind](features, width, seed=0)
    x = np.random.default_rng(1).standard_normal((batch, time, features), dtype=np.float32)
    return cell, x


def forward_gate(cell, x, config: NewtonConfig) -> tuple[NewtonStats, float]:
    """Raises unless the states equal the loop's; returns stats and the largest relative error."""
    stats = NewtonStats()
    states = newton_apply(cell, x, config, stats=stats)
    oracle = loop_baseline.forward(cell, x)
    step = max(1, 2**24 // max(1, states[:, 0].size))
    worst = 0.0
    for first in range(0, x.shape[1], step):
        report = compare(cell, states[:, first : first + step], oracle[:, first : first + step], stats)
        if not report.ok:
            raise SystemExit(f"correctness gate: {report}")
        worst = max(worst, report.max_rel)
    return stats, worst


def gradient_gate(cell, x, config: NewtonConfig, cotangent) -> float:
    """Raises unless the gradients equal the loop's; returns the largest relative error."""
    _, pullback = newton_vjp(cell, x, config)
    _, d_x, d_weight, _, _ = loop_baseline.forward_and_backward(cell, x, cotangent)
    grads = pullback(cotangent)
    errors = [
        float(np.max(np.abs(mine - true)) / np.max(np.abs(true)))
        for mine, true in ((grads.x, d_x), (grads.params["W_x.weight"], d_weight))
    ]
    if max(errors) > 1e-3:
        raise SystemExit(f"correctness gate: gradients differ by {errors} (x, W_x)")
    return max(errors)


def measure(kind, batch, time, width, features, backend, budget, both=True):
    cell, x = problem(kind, batch, time, width, features)
    config = NewtonConfig(scan_backend=backend)
    stats, error = forward_gate(cell, x, config)
    gc.collect()
    row = {
        "cell": kind, "B": batch, "T": time, "D": width, "I": features, "backend": stats.scan_backend,
        "path": stats.path, "L": stats.segment_len, "passes": stats.passes, "exact": stats.exact,
        "error": error,
    }  # fmt: skip
    row["loop_ms"] = best_of(lambda: loop_baseline.forward(cell, x), budget_s=budget)["min"] * 1e3
    row["ours_ms"] = best_of(lambda: newton_apply(cell, x, config), budget_s=budget)["min"] * 1e3
    row["forward_x"] = row["loop_ms"] / row["ours_ms"]
    if both:
        cotangent = np.random.default_rng(2).standard_normal((batch, time, *cell.state_shape), dtype=np.float32)
        row["grad_error"] = gradient_gate(cell, x, config, cotangent)

        def train():
            _, pullback = newton_vjp(cell, x, config)
            pullback(cotangent)

        row["loop_train_ms"] = (
            best_of(lambda: loop_baseline.forward_and_backward(cell, x, cotangent), budget_s=budget, least=2)["min"]
            * 1e3
        )
        row["ours_train_ms"] = best_of(train, budget_s=budget)["min"] * 1e3
        row["train_x"] = row["loop_train_ms"] / row["ours_train_ms"]
    gc.collect()
    return row


def show(row) -> None:
    train = (
        f"{row['loop_train_ms']:9.1f} {row['ours_train_ms']:9.1f} {row['train_x']:6.1f}x" if "train_x" in row else ""
    )
    print(
        f"{row['cell']:6}{row['B']:4}{row['T']:8}{row['D']:5}{row['I']:4}  {row['path']:10} L={row['L']:<6} "
        f"{row['loop_ms']:9.1f} {row['ours_ms']:9.1f} {row['forward_x']:6.1f}x {train}  err {row['error']:.0e}"
        f"{' exact' if row['exact'] else ''}",
        flush=True,
    )


def memory(kind: str, time: int, width: int, backend: str) -> dict:
    """Peak bytes of one training step over the bytes of inputs and states."""
    cell, x = problem(kind, 1, time, width, width)
    states = newton_apply(cell, x[:, :1000], NewtonConfig(scan_backend=backend))
    cotangent = np.ones((1, time, *states.shape[2:]), dtype=np.float32)
    gc.collect()
    tracemalloc.start()
    states, pullback = newton_vjp(cell, x, NewtonConfig(scan_backend=backend))
    pullback(cotangent)
    peak = tracemalloc.get_traced_memory()[1] + x.nbytes + cotangent.nbytes
    tracemalloc.stop()
    return {"cell": kind, "T": time, "D": width, "peak_bytes": peak, "ratio": peak / (x.nbytes + states.nbytes)}


# Seconds after which a peer that has not finished (compiling, mostly) is left out.
PEER_LIMIT = 300


def peers(row: dict, budget: float) -> None:
    """Adds the figures of other compiled loops at a row's shape, each made in a process of its own."""
    sizes = [str(row[letter]) for letter in "BTDI"]
    for library in ("jax", "torch"):
        command = [
            sys.executable,
            str(Path(__file__).with_name("cpu_peers.py")),
            library,
            row["cell"],
            *sizes,
            str(budget),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_LIMIT)
        except subprocess.TimeoutExpired:
            print(f"       {library}: left out, not done after {PEER_LIMIT} s")
            continue
        if done.returncode:
            print(f"       {library}: left out: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        row[library] = found
        figures = f"{found['ms']:9.1f} {found['ms'] / row['ours_ms']:6.1f}x"
        if "train_ms" in found:
            figures += f" {found['train_ms']:9.1f} {found['train_ms'] / row['ours_train_ms']:6.1f}x"
        compiled = f", compiled in {found['compile_s']:.0f} s" if "compile_s" in found else ""
        print(f"       {found['library'] + compiled:32} {figures}", flush=True)


def parts(row: dict, budget: float) -> None:
    """Adds what a forward call is made of: the loop on given gate inputs, and the projection, which ours contains."""
    from pararnn_cpu.product import multiply

    cell, x = problem(row["cell"], row["B"], row["T"], row["D"], row["I"])
    weight = np.ascontiguousarray(cell.W_x.weight.T)
    gates = np.empty((*x.shape[:2], weight.shape[1]), np.float32)
    row["projection_ms"] = best_of(lambda: multiply(x, weight, gates), budget_s=budget)["min"] * 1e3
    row["loop_only_ms"] = best_of(given_gates(cell, gates), budget_s=budget)["min"] * 1e3
    print(f"       of ours: projection alone {row['projection_ms']:.2f}, loop on given gates {row['loop_only_ms']:.2f}")


def given_gates(cell, gates):
    """The compiled loop alone, on gate inputs (B, T, G·D) that are there already."""
    from pararnn.programs import programs_of
    from pararnn_cpu.engine import Operands, run_loop

    batch, time, _ = gates.shape
    width, slots = cell.d_h, cell.state_slots
    states = np.empty((batch, time, slots, width), np.float32)
    split = gates.reshape(batch, time, -1, width)
    rows = [split[:, :, g] for g in range(len(cell.gates))]

    def run():
        carry = [np.zeros((batch, width), np.float32) for _ in range(slots)]
        kept = [states[:, :, s] for s in range(slots)]
        run_loop(programs_of(cell).advance, [Operands(carry, rows, cell.recurrent(np, np.float32), kept)])

    return run


def copy_bandwidth() -> float:
    """Bytes a second, read and written, by a copy on all threads."""
    from pararnn_cpu.threads import run_all, shares

    source, target = np.ones(2**26, np.float32), np.zeros(2**26, np.float32)
    cuts = shares(source.size, source.size)
    tasks = [lambda a=a, b=b: np.copyto(target[a:b], source[a:b]) for a, b in cuts]
    return 2 * source.nbytes / best_of(lambda: run_all(tasks), budget_s=1.0)["min"]


def functions_ns(cell) -> float:
    """Nanoseconds per channel and step of the cell's exp, tanh and sigmoid alone, on all threads, data in cache."""
    from pararnn.arrays import resolve_namespace
    from pararnn.graph import Graph
    from pararnn.programs import loop_program, programs_of
    from pararnn_cpu.engine import CompiledEngine

    graph = Graph()
    x = graph.input("x")
    heavy = [i.op for i in programs_of(cell).advance.program.instructions if i.op in ("exp", "tanh", "sigmoid")]
    # Of different arguments, or there would be only one of each.
    values = [graph.apply(op, graph.apply("add", x, graph.const(k / 8))) for k, op in enumerate(heavy)]
    total = values[0]
    for value in values[1:]:
        total = graph.apply("add", total, value)
    loop = loop_program(graph, carry=[], rows=["x"], consts=[], new=[], stored=[total])
    rows = np.random.default_rng(0).standard_normal((64, 8192)).astype(np.float32)
    engine = CompiledEngine(resolve_namespace(None))
    return best_of(lambda: engine.loop(loop, [], [rows], []), budget_s=1.0, most=300)["min"] / rows.size * 1e9


def floor(kind: str, batch: int, time: int, width: int, features: int, bandwidth: float, budget: float) -> dict:
    """A large problem beside the larger of two floors: its memory traffic, and its elementary functions."""
    cell, x = problem(kind, batch, time, width, features)
    count = batch * time * width
    row = {"cell": kind, "B": batch, "T": time, "D": width, "I": features, "bandwidth_gb_s": bandwidth / 1e9}
    row["memory_ms"] = count * 4 * (len(cell.gates) + cell.state_slots) / bandwidth * 1e3
    row["functions_ms"] = count * functions_ns(cell) * 1e-6
    row["floor_ms"] = max(row["memory_ms"], row["functions_ms"])
    gates = np.random.default_rng(0).standard_normal((batch, time, len(cell.gates) * width), dtype=np.float32)
    row["given_ms"] = best_of(given_gates(cell, gates), budget_s=budget)["min"] * 1e3
    del gates
    config = NewtonConfig(scan_backend="cpu")
    row["whole_ms"] = best_of(lambda: newton_apply(cell, x, config), budget_s=budget)["min"] * 1e3
    over = row["given_ms"] / row["floor_ms"]
    print(
        f"{kind:6}{batch:4}{time:8}{width:5}      floor {row['floor_ms']:.1f} (memory {row['memory_ms']:.1f}, "
        f"functions {row['functions_ms']:.1f}), loop on given gates {row['given_ms']:.1f}, {over:.2f}x; "
        f"whole call from {features} features {row['whole_ms']:.1f}",
        flush=True,
    )
    gc.collect()
    return row


def markdown(path: Path) -> str:
    """The tables of docs/cpu.md."""
    saved = json.loads(path.read_text(encoding="utf-8"))
    run, rows = saved["run"], saved["rows"]
    names = ("cell, features", "pararnn", "NumPy loop", "`jax.lax.scan`", "`torch.compile`")
    head = [*names, "pararnn, with gradient", "NumPy loop", "`jax.lax.scan`"]
    lines = [
        "Milliseconds, and how many times as long the others take; float32, B=1, T=16,384, D=64 "
        f"({run['processor']}, {run['cores']} cores, {run['date']}):",
        "",
        f"| {' | '.join(head)} |",
        f"| --- |{' ---: |' * (len(head) - 1)}",
    ]

    def against(row: dict, other: float | None, own: str) -> str:
        return f"{other:.1f} ({other / row[own]:.0f}×)" if other else "–"

    for row in [r for r in rows if "train_x" in r]:
        for one in (row, row.get("narrow")):
            if one is None:
                continue
            jax, torch = one.get("jax", {}), one.get("torch", {})
            cells = [
                f"{row['cell']}, I={one['I']}", f"{one['ours_ms']:.2f}", against(one, one["loop_ms"], "ours_ms"),
                against(one, jax.get("ms"), "ours_ms"), against(one, torch.get("ms"), "ours_ms"),
                f"{one['ours_train_ms']:.1f}", against(one, one["loop_train_ms"], "ours_train_ms"),
                against(one, jax.get("train_ms"), "ours_train_ms"),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    floors = [r for r in rows if "floor_ms" in r]
    if floors:
        one = floors[0]
        lines += [
            "",
            f"The loop on given gate inputs at (B,T,D) = ({one['B']}, {one['T']:,}, {one['D']}), beside what its "
            f"memory traffic ({one['bandwidth_gb_s']:.0f} GB/s) and its exp, tanh and sigmoid alone would take, "
            "milliseconds:",
            "",
            f"| cell | memory | functions | pararnn | over the larger | whole call, I={one['I']} |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for row in floors:
            cells = [f"{row[key]:.0f}" for key in ("memory_ms", "functions_ms", "given_ms")]
            over = f"{row['given_ms'] / row['floor_ms']:.2f}×"
            lines.append(f"| {row['cell']} | {' | '.join(cells)} | {over} | {row['whole_ms']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the headline shape only")
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds per timed figure")
    parser.add_argument("--cells", nargs="*", default=list(CELLS))
    parser.add_argument("--no-peers", action="store_true", help="leave out other people's compiled loops")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/cpu.md from the saved run")
    options = parser.parse_args()
    if options.markdown:
        print(markdown(RESULTS / ("cpu_cpu_quick.json" if options.quick else "cpu_cpu.json")))
        return
    compiled = options.backend == "cpu"
    head = header(backend=options.backend)
    print(" | ".join(f"{k} {v}" for k, v in head.items()))
    print(
        f"{'cell':6}{'B':>4}{'T':>8}{'D':>5}{'I':>4}  {'path':18} {'loop ms':>9} {'ours ms':>9} {'':7} "
        f"{'loop f+b':>9} {'ours f+b':>9}"
    )
    rows = []
    for kind in options.cells:
        rows.append(measure(kind, 1, 16384, 64, 64, options.backend, options.budget))
        show(rows[-1])
        if compiled:
            parts(rows[-1], options.budget)
            # With few features the projection no longer takes most of the time.
            rows[-1]["narrow"] = measure(kind, 1, 16384, 64, 16, options.backend, options.budget)
            show(rows[-1]["narrow"])
            for row in () if options.no_peers else (rows[-1], rows[-1]["narrow"]):
                peers(row, options.budget)
    if compiled:
        bandwidth = copy_bandwidth()
        rows += [floor(kind, 8, 16384, 256, 16, bandwidth, options.budget) for kind in options.cells]
    if not options.quick:
        for kind in options.cells:
            for batch in (1, 16):
                for width in (16, 256):
                    for time in (64, 1024, 16384, 131072):
                        if batch * time * width * CELLS[kind](1, 1).state_slots > LARGEST:
                            print(f"{kind:6}{batch:4}{time:8}{width:5}  left out: loop and result need over 16 GB")
                            continue
                        budget = 0.5 if time * batch * width > 2**24 else options.budget
                        rows.append(measure(kind, batch, time, width, 16, options.backend, budget, both=False))
                        show(rows[-1])
        for kind in options.cells:
            rows.append(memory(kind, 131072, 64, options.backend))
            print(f"{kind}: peak of a training step at T=131072, D=64: {rows[-1]['ratio']:.2f}x inputs and states")
    print(
        "saved",
        save(f"cpu_{options.backend}" + ("_quick" if options.quick else ""), head, rows).relative_to(Path.cwd()),
    )


if __name__ == "__main__":
    main()
