"""Speed of the channelwise kernels on a CUDA card, behind a correctness gate: `python benchmarks/gpu_channelwise.py`.

Prints, in one run: the copy bandwidth, the floor (gate inputs read once, states written once), our kernels under graph
replay and as plain calls, cuDNN's dense GRU, and the plain one-kernel time loop; with `--pararnn-torch FOLDER` and
`--apple FILE` those kernels at the same shapes (see gpu_peers.py). `--tune` tries layouts. Saves
results/gpu_channelwise.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time as clock
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import called_ms, replayed_ms
from timing import header, save

from pararnn import NewtonConfig, ParaGRU, ParaLSTM, ParaSLSTM, newton_vjp
from pararnn.programs import programs_of
from pararnn_triton.launch import run_forward
from pararnn_triton.shape import Shape, choose_shape

SHAPES = ((8, 256, 256), (8, 2048, 256), (8, 16384, 256), (1, 131072, 256), (1, 16384, 64), (64, 2048, 1024))
BARS = dict(zip(SHAPES, (0.03, 0.05, 0.25, 0.25, 0.04, 0.80), strict=True))
LAYERS = ((8, 2048, 256), (16, 4096, 1024))
TOL, ACCEPT = 1e-5, 5e-5
DEVICE = "cuda"


def copy_bandwidth() -> float:
    """Bytes per second read plus written by a large device copy."""
    a = torch.empty(2**30, dtype=torch.float32, device=DEVICE)
    b = torch.empty_like(a)
    ms = replayed_ms(lambda: torch.mul(a, 1.0, out=b))
    return 2 * a.numel() * 4 / (ms * 1e-3)


def problem(kind, batch: int, time: int, width: int, dtype=torch.float32):
    """Gate inputs N(0, 1) and recurrent weights 0.5 N(0, 1), without a clamp."""
    torch.manual_seed(0)
    cell = kind(4, width, seed=0, xp=torch, device=DEVICE, max_recurrent_norm=None)
    params = 0.5 * torch.randn(len(cell.params), width, device=DEVICE)
    gates = torch.randn(batch, time, len(cell.gates), width, device=DEVICE).to(dtype)
    return cell, params, gates


def loop_in_float64(cell, params, gates):
    """The time loop in float64, every step one call of the cell's own step under a graph-free loop."""
    wide, p = gates.double(), params.double()
    state = tuple(torch.zeros_like(wide[:, 0, 0]) for _ in cell.slots)
    out = torch.empty((*gates.shape[:2], len(cell.slots), gates.shape[3]), dtype=torch.float64, device=DEVICE)
    for t in range(gates.shape[1]):
        state = cell.step(torch, *state, *wide[:, t].unbind(1), *p)
        for s, value in enumerate(state):
            out[:, t, s] = value
    return out


def check(cell, params, gates, shape: Shape) -> float:
    """Largest error of a solve with this layout against float64."""
    states, _ = run_forward(programs_of(cell), gates, None, params, shape, TOL, ACCEPT)
    return error_of(cell, params, gates, states)


def error_of(cell, params, gates, states, steps: int = 512) -> float:
    """Largest error against float64 over the first `steps` steps and, where T allows, of a window at the end."""
    some = slice(0, 2)
    true = loop_in_float64(cell, params, gates[some, :steps])
    worst = float((states[some, :steps].double() - true).abs().max())
    if gates.shape[1] > 2 * steps:
        # The last steps again, from the computed state before them.
        first = gates.shape[1] - steps
        wide, p = gates[some, first:].double(), params.double()
        state = tuple(states[some, first - 1, s].double() for s in range(len(cell.slots)))
        for t in range(steps):
            state = cell.step(torch, *state, *wide[:, t].unbind(1), *p)
            for s, value in enumerate(state):
                worst = (
                    max(worst, float((states[some, first + t, s].double() - value).abs().max()))
                    if t % 64 == 63
                    else worst
                )
    return worst


def kernel_row(
    kind, batch: int, time: int, width: int, bandwidth: float, shape: Shape | None = None, dtype=torch.float32
):
    cell, params, gates = problem(kind, batch, time, width, dtype)
    programs = programs_of(cell)
    free: dict = {"segment_len": None, "warmup": None, "passes": 4, "long_memory": False}
    chosen = shape or choose_shape(batch, time, width, **free, half=dtype != torch.float32)
    error = check(cell, params, gates, chosen)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    if not error <= limit:
        print(f"  {kind.__name__} {(batch, time, width)} {chosen}: error {error:.1e} against float64 is above {limit}")
        return None
    run = lambda: run_forward(programs, gates, None, params, chosen, TOL, ACCEPT)  # noqa: E731
    moved = gates.numel() * gates.element_size() * (1 + len(cell.slots) / len(cell.gates))
    _, estimate = run()
    row = {
        "cell": kind.__name__, "B": batch, "T": time, "D": width, "dtype": str(dtype)[6:], "error": error,
        "L": chosen.length, "C": chosen.segments, "W": chosen.warmup, "BD": chosen.block, "warps": chosen.warps,
        "passes": chosen.passes, "inexact": float((estimate > 0).float().mean()),
        "floor_ms": moved / bandwidth * 1e3, "ours_ms": replayed_ms(run),
    }  # fmt: skip
    row["called_ms"], row["host_us"] = called_ms(run)
    return row


def cudnn_ms(batch: int, time: int, width: int) -> float | None:
    try:
        gru = torch.nn.GRU(width, width, batch_first=True, device=DEVICE)
        x = torch.randn(batch, time, width, device=DEVICE)
        with torch.no_grad():
            return called_ms(lambda: gru(x), 3)[0]
    except RuntimeError:
        return None


def add_peers(rows: list[dict], library: str, path: str) -> None:
    """Adds a peer's milliseconds to the rows in float32, measured in a process of its own."""
    mine = {f"{row['B']},{row['T']},{row['D']}": row for row in rows if row["dtype"] == "float32"}
    command = [sys.executable, str(Path(__file__).with_name("gpu_peers.py")), library, path, *mine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        print(f"{library}: left out: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
        return
    for found in json.loads(done.stdout.splitlines()[-1]):
        row = mine[found["shape"]]
        if "ms" in found:
            row[f"{library}_ms"], row[f"{library}_error"] = found["ms"], found.get("error")
        print(library, found, f"ours {row['ours_ms']:.4f}", flush=True)


def show(row) -> None:
    bar = BARS.get((row["B"], row["T"], row["D"]), float("nan"))
    extra = "".join(f" {k[:-3]} {row[k]:.3f}" for k in ("loop_ms", "cudnn_ms") if row.get(k))
    print(
        f"{row['cell']:9}{row['B']:3}{row['T']:7}{row['D']:5} {row['dtype']:8} floor {row['floor_ms']:.4f} ours "
        f"{row['ours_ms']:.4f} bar {bar:.2f} call {row['called_ms']:.4f} "
        f"host {row['host_us']:.0f}us err {row['error']:.0e} "
        f"L={row['L']} C={row['C']} W={row['W']} BD={row['BD']}/{row['warps']} inexact {row['inexact']:.3f}{extra}",
        flush=True,
    )


def layer_row(kind, batch: int, time: int, width: int):
    """Forward and backward of a whole layer, its projection products alone, and the peak memory of the step."""
    torch.manual_seed(0)
    cell = kind(width, width, seed=0, xp=torch, device=DEVICE)
    x = torch.randn(batch, time, width, device=DEVICE)
    g = torch.randn((batch, time, *cell.state_shape), device=DEVICE)
    config = NewtonConfig(scan_backend="triton")

    def step():
        _, pullback = newton_vjp(cell, x, config)
        return pullback(g)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 1e9
    row = {"cell": kind.__name__, "B": batch, "T": time, "D": width, "peak_gb": peak}
    row["ours_ms"], row["host_us"] = called_ms(step, 10)
    row["graph_ms"] = replayed_ms(step)
    weight, bias = cell.W_x
    flat = torch.randn(batch * time, weight.shape[0], device=DEVICE)

    def products():
        torch.nn.functional.linear(x, weight, bias)
        flat @ weight
        flat.T @ x.reshape(batch * time, width)

    row["products_ms"] = replayed_ms(products)
    return row


def tune(bandwidth: float, shapes) -> None:
    for batch, time, width in shapes:
        rows = []
        lanes = batch * width
        lengths = [l for l in (64, 128, 256, 512) if l * 2 <= time]
        options = (
            [Shape(time, 1, 0, block, warps, 1) for block, warps in ((32, 1), (64, 2), (128, 4))] if time < 4096 else []
        )
        if lanes < 65536:
            for length, warm, (block, warps) in itertools.product(lengths, (32, 64), ((32, 1),)):
                if warm <= length:
                    options.append(Shape(length, -(-time // length), warm, block, warps, 4))
        for shape in options:
            if shape.segments == 1 and time > 20000:
                continue
            try:
                row = kernel_row(ParaGRU, batch, time, width, bandwidth, shape)
            except Exception as error:
                print("  failed", shape, type(error).__name__, str(error)[:200])
                continue
            if row:
                rows.append(row)
        rows.sort(key=lambda r: r["ours_ms"])
        for row in rows[:6]:
            show(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument(
        "--shapes", type=int, nargs="*", default=range(len(SHAPES)), help="which shapes; none: layers only"
    )
    parser.add_argument("--save", default="gpu_channelwise", help="name of the results file")
    parser.add_argument("--pararnn-torch", metavar="FOLDER", help="where to import that package from")
    parser.add_argument("--apple", metavar="FILE", help="a built library of ml-pararnn's CUDA parts")
    parser.add_argument("--no-layers", action="store_true", help="kernels only")
    options = parser.parse_args()
    began = clock.perf_counter()
    bandwidth = copy_bandwidth()
    head = header(card=torch.cuda.get_device_name(), torch=torch.__version__, copy_tb_s=bandwidth / 1e12)
    print(" | ".join(f"{k} {v}" for k, v in head.items()), flush=True)
    shapes = [SHAPES[k] for k in options.shapes]
    if options.tune:
        tune(bandwidth, shapes)
        return
    rows = []
    for batch, time, width in shapes:
        row = kernel_row(ParaGRU, batch, time, width, bandwidth)
        if row is None:
            continue
        if time <= 20000:
            loop = kernel_row(ParaGRU, batch, time, width, bandwidth, Shape(time, 1, 0, 32, 1, 1))
            row["loop_ms"] = loop["ours_ms"] if loop else None
        row["cudnn_ms"] = cudnn_ms(batch, time, width) if time <= 20000 and width <= 256 else None
        rows.append(row)
        show(row)
    for batch, time, width in shapes:
        if batch * time * width >= 2**25:
            row = kernel_row(ParaGRU, batch, time, width, bandwidth, dtype=torch.bfloat16)
            if row:
                rows.append(row)
                show(row)
    for library, path in (("torch", options.pararnn_torch), ("apple", options.apple)):
        if path and rows:
            add_peers(rows, library, path)
    head["seconds"] = round(clock.perf_counter() - began, 1)
    save(options.save, head, rows)
    if options.no_layers:
        return
    for (batch, time, width), kind in itertools.product(LAYERS, (ParaGRU, ParaLSTM, ParaSLSTM)):
        row = layer_row(kind, batch, time, width)
        rows.append(row)
        print(
            f"layer {row['cell']:9}{(batch, time, width)} f+b {row['ours_ms']:.3f} ms (graph {row['graph_ms']:.3f}), "
            f"products alone {row['products_ms']:.3f}, ratio {row['graph_ms'] / row['products_ms']:.2f}, "
            f"peak {row['peak_gb']:.2f} GB, host {row['host_us']:.0f}us",
            flush=True,
        )
        save(options.save, head, rows)


if __name__ == "__main__":
    main()
