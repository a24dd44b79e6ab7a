"""What coordinates and a Picard start do for a pinned sLSTM: iterations until 1e-4, per step, worst of three seeds.

`python benchmarks/slstm_start.py` prints the table of docs/cells.md.
"""

from __future__ import annotations

import itertools
import logging
import warnings

import numpy as np

from pararnn import NewtonConfig, NewtonStats, NotConvergedWarning, ParaSLSTM, newton_apply
from pararnn.verify import compare

SEEDS, MOST = (0, 1, 2), 20
TIMES = (512, 8192)


def iterations(cell, x, oracle, coords: str, sweeps: int) -> int | None:
    """Each further iteration starts where the last ended."""
    states = None
    for k in range(MOST + 1):
        config = NewtonConfig(
            max_iters=min(k, 1), coords=coords, picard_iters=sweeps if states is None else None, picard_adapt=False,
            residual_atol=None, residual_fail=None, scan_backend="numpy",
        )  # fmt: skip
        states = newton_apply(cell, x, config, guess=states)
        if compare(cell, states, oracle, NewtonStats()).ok:
            return k
    return None


def main() -> None:
    warnings.simplefilter("ignore", NotConvergedWarning)
    warnings.simplefilter("ignore", RuntimeWarning)
    logging.getLogger("pararnn").setLevel(logging.ERROR)
    print("| forget gate | coordinates | T | no start | 1 sweep | 3 sweeps |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for gate, coords, time in itertools.product(("exponential", "sigmoid"), ("native", "log"), TIMES):
        line = []
        for sweeps in (0, 1, 3):
            found = []
            for seed in SEEDS:
                cell = ParaSLSTM(16, 16, seed=seed, forget_gate=gate)
                x = np.random.default_rng(seed + 100).standard_normal((1, time, 16), dtype=np.float32)
                oracle = newton_apply(cell, x, NewtonConfig(scan_backend="numpy", segment_len=time))
                found.append(iterations(cell, x, oracle, coords, sweeps))
            line.append("-" if None in found else str(max(found)))
        print(f"| {gate} | {coords} | {time:,} | {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main()
