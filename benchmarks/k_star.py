"""Measures K*(T): the smallest iteration count whose result agrees with the time loop, per cell and length.

`python benchmarks/k_star.py` prints the table that `pararnn.k_star.K_STAR` holds (measured value plus one spare) and
saves results/k_star.json. Weights at initialisation, inputs N(0, 1), float32, L = 1, worst of three seeds.
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
    ParaSLSTM,
    ParaTanh,
    newton_apply,
    sequential_apply,
)
from pararnn.verify import compare

LENGTHS = (64, 1024, 16384, 131072)
SEEDS = (0, 1, 2)
WIDTH, FEATURES, MOST = 16, 16, 12


def smallest(cell, x, oracle) -> int:
    for iterations in range(MOST + 1):
        config = NewtonConfig(max_iters=iterations, residual_atol=None, residual_fail=None, picard_adapt=False)
        report = compare(cell, newton_apply(cell, x, config), oracle, NewtonStats())
        if report.ok:
            return iterations
    return MOST + 1


def main() -> None:
    warnings.simplefilter("ignore", NotConvergedWarning)
    logging.getLogger("pararnn").setLevel(logging.ERROR)
    head = header(width=WIDTH, features=FEATURES)
    print(" | ".join(f"{k} {v}" for k, v in head.items()))
    rows = []
    for kind in (ParaGRU, ParaLSTM, ParaSLSTM, ParaTanh):
        table = {}
        for time in LENGTHS:
            found = []
            for seed in SEEDS:
                cell = kind(FEATURES, WIDTH, seed=seed)
                x = np.random.default_rng(seed + 100).standard_normal((1, time, FEATURES), dtype=np.float32)
                found.append(smallest(cell, x, sequential_apply(cell, x)))
            # A length at which no count agrees gets no entry.
            if max(found) <= MOST:
                table[time] = max(found) + 1
            rows.append({"cell": kind.__name__, "T": time, "k_star": found, "table": table.get(time)})
        print(f'    "{kind.__name__}": {table},', flush=True)
    print("saved", save("k_star", head, rows).name)


if __name__ == "__main__":
    main()
