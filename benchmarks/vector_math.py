"""Accuracy of the compiled elementary functions: `python benchmarks/vector_math.py`.

Prints the table of docs/cpu.md and saves results/vector_math.json: the largest error over a million numbers of all
magnitudes (those of tests/test_vector_math.py), in units in the last place of the true value.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from timing import header, save

from test_vector_math import SIGMOID_FROM, TRUTH, WIDER, run, sample, ulps


def worst(op: str, dtype: str) -> tuple[float, float]:
    """The largest error, and where."""
    x = sample(dtype)
    with np.errstate(all="ignore"):
        error = ulps(run(op, x), TRUTH[op](x.astype(WIDER[dtype])))
    if op == "sigmoid":
        error = np.where(x >= SIGMOID_FROM[dtype], error, 0.0)
    place = int(np.argmax(error))
    return float(error[place]), float(x[place])


def main() -> None:
    head = header()
    print(" | ".join(f"{k} {v}" for k, v in head.items()))
    print("| function | float32 | float64 |\n| --- | ---: | ---: |")
    rows = []
    for op in TRUTH:
        found = {dtype: worst(op, dtype) for dtype in WIDER}
        rows.append({"function": op, **{dtype: {"ulp": e, "at": x} for dtype, (e, x) in found.items()}})
        print(f"| {op} | {found['float32'][0]:.1f} | {found['float64'][0]:.1f} |", flush=True)
    print("saved", save("vector_math", head, rows).name)


if __name__ == "__main__":
    main()
