"""Counts the corrections that a solve needs, by segment length and network: `python benchmarks/corrections.py`.

The smallest K whose result agrees with the time loop within 1e-4 (float32, worst channel of 2 x 64, worst of 3 seeds,
T = 2048), from zero starts without a warm-up. L = 1 is one unknown per time step. Saves results/corrections.json; the
table in docs/how-it-works.md is from it.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from timing import header, save

from pararnn import (
    NewtonConfig,
    NewtonStats,
    NotConvergedWarning,
    ParaGRU,
    ParaLSTM,
    newton_apply,
    sequential_apply,
)
from pararnn.verify import compare

TIME, BATCH, WIDTH, SEEDS, MOST = 2048, 2, 64, (0, 1, 2), 40
LENGTHS = (1, 64, 256)


def network(kind, weights, inputs, seed, bias=0.0):
    """A cell with recurrent weights N(0, weights²), and gate inputs N(bias, inputs²); the bias is the first gate's."""
    rng = np.random.default_rng(seed)
    gates = len(kind.gates)
    cell = kind(gates * WIDTH, WIDTH, seed=seed, max_recurrent_norm=None)
    new = {name: (weights * rng.standard_normal(WIDTH)).astype(np.float32) for name in cell.params}
    # Every gate of every channel reads an input of its own.
    first = np.where(np.arange(gates * WIDTH) < WIDTH, bias, 0.0).astype(np.float32)
    cell = cell.replace(W_x_weight=inputs * np.eye(gates * WIDTH, dtype=np.float32), W_x_bias=first, **new)
    return cell, rng.standard_normal((BATCH, TIME, gates * WIDTH), dtype=np.float32)


NETWORKS = {
    "GRU near its initialisation": (ParaGRU, 0.125, 1.0),
    "GRU, recurrent weights N(0, 1)": (ParaGRU, 1.0, 1.0),
    "GRU, weights and inputs three times that": (ParaGRU, 3.0, 3.0),
    "LSTM, forget bias +5": (ParaLSTM, 0.125, 1.0, 5.0),
}


def smallest(cell, x, oracle, length: int) -> int | None:
    for count in range(MOST + 1):
        config = NewtonConfig(
            max_iters=count, segment_len=length, warmup=0, residual_atol=None, residual_fail=None, scan_backend="numpy"
        )
        if compare(cell, newton_apply(cell, x, config), oracle, NewtonStats()).ok:
            return count
    return None


def main() -> None:
    warnings.simplefilter("ignore", NotConvergedWarning)
    logging.getLogger("pararnn").setLevel(logging.ERROR)
    head, rows = header(T=TIME, channels=BATCH * WIDTH), []
    print(" | ".join(f"{k} {v}" for k, v in head.items()))
    for name, (kind, weights, inputs, *bias) in NETWORKS.items():
        for length in LENGTHS:
            found = []
            for seed in SEEDS:
                cell, x = network(kind, weights, inputs, seed, *bias)
                found.append(smallest(cell, x, sequential_apply(cell, x), length))
            rows.append({"network": name, "L": length, "corrections": found})
            print(f"{name:42} L={length:<4} {found}", flush=True)
    print("saved", save("corrections", head, rows).name)


if __name__ == "__main__":
    main()
