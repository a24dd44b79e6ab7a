"""Speed on a CPU against the NumPy time loop, behind a correctness gate: `python benchmarks/cpu.py [--quick]`.

Prints a table and saves results/cpu.json. A row's figures are printed only after forward and gradient agree with the
loop's in that very run.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tracemalloc
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import loop_baseline
from timing import best_of, header, save

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
        f"{row['cell']:6}{row['B']:4}{row['T']:8}{row['D']:5}  {row['path']:10} L={row['L']:<6} "
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the headline shape only")
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds per timed figure")
    parser.add_argument("--cells", nargs="*", default=list(CELLS))
    options = parser.parse_args()
    head = header(backend=options.backend)
    print(" | ".join(f"{k} {v}" for k, v in head.items()))
    print(
        f"{'cell':6}{'B':>4}{'T':>8}{'D':>5}  {'path':18} {'loop ms':>9} {'ours ms':>9} {'':7} "
        f"{'loop f+b':>9} {'ours f+b':>9}"
    )
    rows = []
    for kind in options.cells:
        rows.append(measure(kind, 1, 16384, 64, 64, options.backend, options.budget))
        show(rows[-1])
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
