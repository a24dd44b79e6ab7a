"""Every channelwise cell at T = 131,072, B = 1 on a CUDA card: parallel, as one sequential kernel, and a Python loop.

`python benchmarks/gpu_zoo.py` prints the copy bandwidth's floor, the kernels under graph replay, one plain newton_apply
(projection included), and a plain loop in torch calls (timed on 512 steps), each behind a check against the time loop.
Saves results/zoo_speed.json; `--plot` draws docs/zoo-speed.svg from it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time as clock
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, header, save

CELLS = (
    "ParaGRU", "ParaLSTM", "ParaSLSTM", "ParaTanh", "ParaNLRU", "ParaCfC", "ParaTitans", "ParaMinGRU", "ParaMinLSTM",
    "ParaLRU", "ParaS5", "ParaLEM", "ParaUnICORNN",
)  # fmt: skip
TIME, FEATURES, LOOP_STEPS = 131_072, 64, 512


def measure(options) -> None:
    import torch
    from gpu_channelwise import copy_bandwidth

    bandwidth = copy_bandwidth()
    head = header(card=torch.cuda.get_device_name(), torch=torch.__version__, copy_tb_s=bandwidth / 1e12)
    print(" | ".join(f"{k} {v}" for k, v in head.items()), flush=True)
    rows = []
    if options.rwkv7:
        rows.append(rwkv7_row(options.time))
        print(" ".join(f"{k} {v}" for k, v in rows[-1].items()), flush=True)
    for width in options.widths:
        for name in options.cells:
            try:
                row = row_of(name, width, options.time, bandwidth)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            rows.append(row)
            print(
                f"{name:13} D={width:4} L={row['L']:6} floor {row['floor_ms']:.3f} ours {row['ours_ms']:.3f} ms "
                f"call {row['call_ms']:.3f} loop kernel {row['kernel_loop_ms']:.2f} torch loop "
                f"{row['python_loop_ms'] / 1e3:.1f} s  err {row['error']:.1e} est {row['estimate']:.1e} "
                f"{'ok' if row['ok'] else 'DISAGREES'} compile {row['compile_s']} s",
                flush=True,
            )
            save(options.save, head, rows)
    save(options.save, head, rows)


def row_of(name: str, width: int, time: int, bandwidth: float) -> dict:
    import torch
    from gpu_channelwise import called_ms, replayed_ms

    import pararnn
    from pararnn import NewtonConfig, NewtonStats, newton_apply
    from pararnn.drives import with_drives
    from pararnn.problem import make_problem
    from pararnn.programs import programs_of
    from pararnn.verify import compare
    from pararnn_triton.backend import _gates, _params, _shape
    from pararnn_triton.launch import run_forward
    from pararnn_triton.shape import Shape

    torch.manual_seed(0)
    cell = getattr(pararnn, name)(FEATURES, width, seed=0, xp=torch, device="cuda")
    x = torch.randn(1, time, FEATURES, device="cuda")
    began = clock.perf_counter()
    full, joined = with_drives("gpu_zoo", cell, x, {})
    problem = make_problem("gpu_zoo", full, joined, None, NewtonConfig(scan_backend="triton"))
    programs, gates, params = programs_of(full), _gates(problem), _params(problem)
    chosen, loop = _shape(problem), Shape(time, 1, 0, 32, 1, 1)

    def solve(shape):
        return run_forward(programs, gates, None, params, shape, 1e-5, 5e-5)

    states, estimate = solve(chosen)
    oracle, _ = solve(loop)
    torch.cuda.synchronize()
    compiled = round(clock.perf_counter() - began, 1)
    if len(full.slots) == 1:
        states, oracle = states[:, :, 0], oracle[:, :, 0]
    report = compare(full, states, oracle, NewtonStats())
    moved = 4 * gates.numel() * (1 + len(full.slots) / len(full.gates))
    call_ms, host_us = called_ms(lambda: newton_apply(cell, x), 10)
    return {
        "cell": name, "T": time, "D": width, "L": chosen.length, "C": chosen.segments, "error": report.max_rel,
        "estimate": float(estimate.max()), "ok": report.ok, "compile_s": compiled, "floor_ms": moved / bandwidth * 1e3,
        "ours_ms": replayed_ms(lambda: solve(chosen)), "kernel_loop_ms": called_ms(lambda: solve(loop), 2)[0],
        "call_ms": call_ms, "host_us": host_us, "python_loop_ms": python_loop_ms(full, gates) * time / LOOP_STEPS,
    }  # fmt: skip


def rwkv7_row(time: int, heads: int = 1, d: int = 16) -> dict:
    """RWKV-7 from input to output: projection, scan and readout, and the same with the gradient."""
    import torch
    from gpu_channelwise import called_ms, replayed_ms

    from pararnn import ParaRNN, ParaRWKV7

    torch.manual_seed(0)
    cell = ParaRWKV7(FEATURES, n_heads=heads, d_head=d, seed=0, xp=torch, device="cuda")
    x = torch.randn(1, time, FEATURES, device="cuda")
    y, short = cell.scan_apply(x), x[:, :2048].cpu().double()
    wide = cell.to(device="cpu", dtype=torch.float64)
    true = wide.scan_apply(short, form="recurrent")
    error = float((y[:, :2048].cpu().double() - true).abs().max() / true.abs().max())
    # The last steps again, from the state before them.
    _, state = cell.scan_apply(x[:, :-2048], return_state=True)
    tail = wide.scan_apply(x[:, -2048:].cpu().double(), state.cpu().double(), form="recurrent")
    error = max(error, float((y[:, -2048:].cpu().double() - tail).abs().max() / tail.abs().max()))
    row = {"cell": f"ParaRWKV7 {heads}x{d}", "T": time, "error": error, "ok": error <= 1e-4}
    row["call_ms"], row["host_us"] = called_ms(lambda: cell.scan_apply(x), 10)
    row["graph_ms"] = replayed_ms(lambda: cell.scan_apply(x))
    rnn = ParaRNN(cell)

    def train() -> None:
        rnn(x).square().mean().backward()

    row["train_ms"], _ = called_ms(train, 3)
    row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return row


def python_loop_ms(cell, gates) -> float:
    """LOOP_STEPS steps of the cell's own step in torch calls."""
    import torch

    params = cell.recurrent(torch, torch.float32)
    state = tuple(torch.zeros_like(gates[:, 0, 0]) for _ in cell.slots)
    torch.cuda.synchronize()
    for _ in range(2):
        now, begin = state, clock.perf_counter()
        for t in range(LOOP_STEPS):
            now = cell.step(torch, *now, *gates[:, t].unbind(1), *params)
        torch.cuda.synchronize()
        spent = clock.perf_counter() - begin
    return spent * 1e3


def plot() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "pararnn", "font.size": 8})
    stored = json.loads((RESULTS / "zoo_speed.json").read_text())
    rows = [r for r in stored["rows"] if r.get("D") == 256 and r["ok"]]
    figure, ax = plt.subplots(figsize=(8, 0.34 * len(rows) + 1.2))
    at = range(len(rows))
    for column, label, colour in (
        ("ours_ms", "parallel", "tab:blue"),
        ("kernel_loop_ms", "one kernel that loops over time", "tab:orange"),
        ("python_loop_ms", "loop in torch calls", "tab:gray"),
    ):
        ax.plot([r[column] for r in rows], at, "o", color=colour, label=label)
    ax.plot([r["floor_ms"] for r in rows], at, "|", color="black", label="memory traffic alone", markersize=10)
    ax.set_yticks(list(at), [r["cell"] for r in rows])
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xlabel(f"milliseconds, T = 131,072, B = 1, D = 256, float32, {stored['run']['card']}")
    ax.grid(alpha=0.3)
    ax.legend()
    figure.tight_layout()
    figure.savefig(Path(__file__).parent.parent / "docs/zoo-speed.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--cells", nargs="*", default=CELLS)
    parser.add_argument("--widths", nargs="*", type=int, default=[256, 32])
    parser.add_argument("--time", type=int, default=TIME)
    parser.add_argument("--rwkv7", action="store_true", help="RWKV-7 first")
    parser.add_argument("--save", default="zoo_speed", help="name of the results file")
    options = parser.parse_args()
    if options.plot:
        plot()
    else:
        measure(options)


if __name__ == "__main__":
    main()
