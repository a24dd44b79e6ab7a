"""Writes the packing matrix of docs/packing.md: what each backend says about packed problems of each family of cells.

    python docs/make_packing_matrix.py          # rewrites the table
    python docs/make_packing_matrix.py --check  # fails if the page has another one
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from pararnn import ParaGRU, ParaRWKV7, StockGRU, backends
from pararnn.backend import Backend, refuse_packed
from pararnn.problem import make_problem

PAGE = Path(__file__).with_name("packing.md")
BEGIN, END = "<!-- packing matrix -->\n", "<!-- end of the packing matrix -->\n"
FAMILIES = {
    "channelwise": ParaGRU(2, 4, seed=0),
    "mixing": StockGRU(2, 4, seed=0),
    "linear": ParaRWKV7(2, 4, n_heads=1, seed=0),
}
# Backends that ship with the library, in the order in which `auto` asks them; others are the reader's own.
OURS = ("triton", "cupy", "jax", "cpu", "numpy", "torch", "array")


def table() -> str:
    """The matrix as Markdown."""
    x = np.zeros((1, 4, 2), np.float32)
    lines = [f"| backend | {' | '.join(FAMILIES)} |", f"| --- | {' | '.join('---' for _ in FAMILIES)} |"]
    known = backends()
    for name in OURS:
        backend = known.get(name)
        if not isinstance(backend, Backend):
            raise SystemExit(f"the backend {name} is not installed here: {backend}")
        cells = []
        for family, cell in FAMILIES.items():
            problem = make_problem("packing matrix", cell, x, cu_seqlens=[0, 1, 4])
            takes = family in backend.families and refuse_packed(backend, problem) is None
            way = "yes" if family == "channelwise" else "a row for each document"
            cells.append(way if takes else "–")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    new = table()
    if "--check" in sys.argv[1:]:
        raise SystemExit(0 if old == new else f"docs/packing.md has another table; run {Path(__file__).name}\n{new}")
    PAGE.write_text(before + BEGIN + new + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
