"""The CuPy kernels beside Triton's, on the same tensors in one run: `python benchmarks/gpu_cupy.py`.

For each row of the GRU table: the error against a float64 loop, milliseconds under graph replay and as plain calls,
microseconds of the host. `--tune` tries layouts. Saves results/gpu_cupy.json.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time as clock
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_channelwise import ACCEPT, LAYERS, SHAPES, TOL, called_ms, copy_bandwidth, error_of, problem, replayed_ms
from timing import header, save

from pararnn import NewtonConfig, ParaGRU, ParaLSTM, ParaSLSTM, newton_vjp
from pararnn.arrays import resolve_namespace
from pararnn.programs import programs_of
from pararnn_cupy.card import CudaCard
from pararnn_cupy.launch import run_forward
from pararnn_cupy.layout import DEFAULT_PASSES, Layout, block_of, choose_layout
from pararnn_triton.launch import run_forward as triton_forward
from pararnn_triton.shape import choose_shape

XP = resolve_namespace(torch)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
# Beside Triton, each is timed several times in turn, because clocks drift.
TURNS = 3


def solver(programs, gates, params, layout: Layout):
    name = str(gates.dtype).removeprefix("torch.")

    def run():
        with CudaCard(programs, gates.dtype, XP, gates.device) as card:
            return run_forward(card, programs, name, gates, None, None, params, None, layout, TOL, ACCEPT)

    return run


def row_of(kind, shape, bandwidth: float, dtype=torch.float32, layout: Layout | None = None, beside: bool = True):
    """One row, or None where the kernel is wrong."""
    batch, time, width = shape
    cell, params, gates = problem(kind, batch, time, width, dtype)
    programs = programs_of(cell)
    chosen = layout or choose_layout(
        batch, time, width, segment_len=None, warmup=None, passes=DEFAULT_PASSES, long_memory=False
    )
    run = solver(programs, gates, params, chosen)
    states, estimate, _ = run()
    error = error_of(cell, params, gates, states)
    if not error <= LIMITS[dtype]:
        print(f"  {kind.__name__} {shape} {chosen}: error {error:.1e} against float64 is too large")
        return None
    moved = gates.numel() * gates.element_size() * (1 + len(cell.slots) / len(cell.gates))
    row = {
        "cell": kind.__name__, "B": batch, "T": time, "D": width, "dtype": str(dtype)[6:], "error": error,
        "L": chosen.length, "C": chosen.segments, "W": chosen.warmup, "block": chosen.block,
        "inexact": float((estimate > 0).float().mean()), "floor_ms": moved / bandwidth * 1e3,
    }  # fmt: skip
    if not beside:
        return row | {"cupy_ms": replayed_ms(run)}
    other = choose_shape(batch, time, width, segment_len=None, warmup=None, passes=4, long_memory=False)
    runs = {"cupy": run, "triton": lambda: triton_forward(programs, gates, None, params, other, TOL, ACCEPT)}
    for name in [*runs] * TURNS:
        row[f"{name}_ms"] = min(row.get(f"{name}_ms", float("inf")), replayed_ms(runs[name]))
    for name, each in runs.items():
        row[f"{name}_call_ms"], row[f"{name}_host_us"] = called_ms(each)
    return row


def show(row) -> None:
    text = (
        f"{row['cell']:9}{row['B']:3}{row['T']:7}{row['D']:5} {row['dtype']:8} floor {row['floor_ms']:.4f} "
        f"cupy {row['cupy_ms']:.4f} L={row['L']} C={row['C']} W={row['W']} block {row['block']} "
        f"err {row['error']:.0e} inexact {row['inexact']:.3f}"
    )
    if "triton_ms" in row:
        text += (
            f" triton {row['triton_ms']:.4f} ratio {row['cupy_ms'] / row['triton_ms']:.2f} "
            f"host {row['cupy_host_us']:.0f}/{row['triton_host_us']:.0f} us"
        )
    print(text, flush=True)


def layer_row(kind, batch: int, time: int, width: int):
    """Forward and backward of a whole layer under graph replay, with each backend."""
    torch.manual_seed(0)
    cell = kind(width, width, seed=0, xp=torch, device="cuda")
    x = torch.randn(batch, time, width, device="cuda")
    g = torch.randn((batch, time, *cell.state_shape), device="cuda")
    row = {"cell": kind.__name__, "B": batch, "T": time, "D": width}
    for name in ("cupy", "triton"):

        def step(config=NewtonConfig(scan_backend=name)):  # noqa: B008 (one for each turn of the loop)
            return newton_vjp(cell, x, config)[1](g)

        step()
        row[f"{name}_layer_ms"] = replayed_ms(step, 10)
    print(
        f"layer {row['cell']:9}{(batch, time, width)} cupy {row['cupy_layer_ms']:.3f} triton "
        f"{row['triton_layer_ms']:.3f} ratio {row['cupy_layer_ms'] / row['triton_layer_ms']:.2f}",
        flush=True,
    )
    return row


def tune(bandwidth: float, shapes) -> None:
    for shape in shapes:
        batch, time, width = shape
        lanes = batch * width
        layouts = []
        if time <= 20_000:
            layouts += [Layout(time, 1, 0, block, 1) for block in (32, 64, 128)]
        if lanes < 65_536:
            for length, warm in itertools.product((32, 64, 128, 256, 512), (32, 64)):
                if 2 * length <= time and warm <= length:
                    segments = -(-time // length)
                    layouts += [Layout(length, segments, warm, block_of(lanes * segments), DEFAULT_PASSES)]
        rows = [row_of(ParaGRU, shape, bandwidth, layout=layout, beside=False) for layout in layouts]
        for row in sorted(filter(None, rows), key=lambda r: r["cupy_ms"])[:6]:
            show(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)))
    parser.add_argument("--layers", type=int, nargs="*", default=range(len(LAYERS)))
    options = parser.parse_args()
    began = clock.perf_counter()
    import cupy

    bandwidth = copy_bandwidth()
    head = header(
        card=torch.cuda.get_device_name(), torch=torch.__version__, cupy=cupy.__version__,
        copy_tb_s=bandwidth / 1e12,
    )  # fmt: skip
    print(" | ".join(f"{k} {v}" for k, v in head.items()), flush=True)
    shapes = [SHAPES[k] for k in options.shapes]
    if options.tune:
        tune(bandwidth, shapes)
        return
    rows = []
    for shape, dtype in itertools.product(shapes, (torch.float32, torch.bfloat16)):
        if dtype == torch.float32 or shape[0] * shape[1] * shape[2] >= 2**25:
            row = row_of(ParaGRU, shape, bandwidth, dtype)
            if row:
                rows.append(row)
                show(row)
    head["seconds"] = round(clock.perf_counter() - began, 1)
    save("gpu_cupy", head, rows)
    for index, kind in itertools.product(options.layers, (ParaGRU, ParaLSTM, ParaSLSTM)):
        rows.append(layer_row(kind, *LAYERS[index]))
        head["seconds"] = round(clock.perf_counter() - began, 1)
        save("gpu_cupy", head, rows)


if __name__ == "__main__":
    main()
