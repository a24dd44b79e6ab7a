"""Stock nn.GRU and nn.LSTM in parallel over time on a CPU, in fp32: `python benchmarks/cpu_stock_rnn.py`.

For tensors against torch's own layer, for NumPy arrays against the time loop, behind an agreement gate. Weights are
fresh; ``--remember B`` raises the forget (update) gate's bias by B, which costs passes. Saves
results/cpu_stock_rnn.json.
"""

from __future__ import annotations

import argparse
import sys
import time as clock
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from timing import best_of, header, save

import pararnn
from pararnn import NewtonConfig, NewtonStats, StockGRU, StockLSTM

KINDS = {"gru": (nn.GRU, StockGRU), "lstm": (nn.LSTM, StockLSTM)}
NAMES = {"W_x.weight": "weight_ih_l0", "W_x.bias": "bias_ih_l0", "R": "weight_hh_l0", "b_h": "bias_hh_l0"}
SHAPES = ((1, 16384, 256), (1, 16384, 64), (8, 2048, 256))
# Steps of NumPy's loop that are timed; it takes the same for each.
TIMED_STEPS = 2048


def hidden(cell, states):
    return states if cell.state_slots == 1 else states[:, :, cell.hidden_slot]


def measure(kind: str, shape: tuple[int, int, int], remember: float) -> dict:
    _, time, width = shape
    torch.manual_seed(0)
    layer, make = KINDS[kind]
    module, x = layer(width, width, batch_first=True), torch.randn(shape)
    with torch.no_grad():
        module.bias_hh_l0[width : 2 * width] += remember
    cell = make(width, width, xp=torch, seed=0).replace(**{k: getattr(module, v).detach() for k, v in NAMES.items()})
    row: dict = {"kind": kind, "shape": list(shape), "remember": remember}
    stats, config = NewtonStats(), NewtonConfig()
    with torch.no_grad():
        theirs = module(x)[0]
        row["torch_s"] = best_of(lambda: module(x), least=2)["min"]
        row["torch_ours_s"] = best_of(lambda: pararnn.newton_apply(cell, x, config, stats=stats), least=2)["min"]
        ours = hidden(cell, pararnn.newton_apply(cell, x, config))
    row["error"] = float((ours - theirs).abs().max() / theirs.abs().max())
    row.update(path=stats.path, segment_len=stats.segment_len, passes=stats.passes, reason=stats.reason)
    plain, array = cell.to(np), x.numpy()
    row["numpy_ours_s"] = best_of(lambda: pararnn.newton_apply(plain, array, config, stats=stats), least=2)["min"]
    steps, begin = min(TIMED_STEPS, time), clock.perf_counter()
    pararnn.sequential_apply(plain, array[:, :steps])
    row["numpy_loop_s"] = (clock.perf_counter() - begin) * time / steps
    numpy_states = hidden(plain, pararnn.newton_apply(plain, array, config))
    row["numpy_error"] = float(np.abs(numpy_states - theirs.numpy()).max() / theirs.abs().max())
    row.update(numpy_path=stats.path, numpy_segment_len=stats.segment_len)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--remember", type=float, nargs="+", default=[0.0])
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))), help="which of SHAPES")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for kind in KINDS:
        for shape in (SHAPES[k] for k in options.shapes):
            for remember in options.remember:
                row = measure(kind, shape, remember)
                rows.append(row)
                agreed = max(row["error"], row["numpy_error"]) <= 1e-4
                print(
                    f"{kind:4s} {shape!s:17s} +{remember:g} {'ok ' if agreed else 'BAD'} err {row['error']:.0e} | "
                    f"torch {row['torch_s']:.3f} s, ours {row['torch_ours_s']:.3f} s: "
                    f"{row['torch_s'] / row['torch_ours_s']:.1f}x ({row['path']}, L {row['segment_len']}, "
                    f"{row['passes']} passes) | NumPy loop {row['numpy_loop_s']:.3f} s, ours "
                    f"{row['numpy_ours_s']:.3f} s: {row['numpy_loop_s'] / row['numpy_ours_s']:.1f}x",
                    flush=True,
                )
    save("cpu_stock_rnn", header(threads=options.threads), rows)


if __name__ == "__main__":
    main()
