"""Writes the speed tables of README.md from the saved results: `python benchmarks/readme_table.py [--check]`.

Reads results/cpu_*.json (made by cpu.py) and results/gpu_*.json (made by gpu_channelwise.py), those that are there, and
replaces what stands between the two marks in README.md. `--check` writes nothing and fails if that is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- speed: written by benchmarks/readme_table.py -->", "<!-- end of speed -->"

# Columns of a GPU row that are ours, and what a column of anybody else's is called.
OURS = ("floor_ms", "ours_ms", "called_ms", "graph_ms", "products_ms")
PEERS = {"loop_ms": "one-kernel time loop", "cudnn_ms": "cuDNN, dense GRU"}

Row = dict[str, Any]


def load(name: str) -> tuple[Row, list[Row]] | None:
    """The run's header and rows, or None."""
    path = HERE / "results" / f"{name}.json"
    if not path.is_file():
        return None
    saved = json.loads(path.read_text(encoding="utf-8"))
    return saved["run"], saved["rows"]


def table(head: Iterable[str], rows: Iterable[Iterable[str]], words: int = 1) -> list[str]:
    """Markdown; the first `words` columns are text, the others are numbers."""
    head = list(head)
    lines = [head, ["---"] * words + ["---:"] * (len(head) - words), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def ms(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def times(value: float) -> str:
    return f"{value:.0f}×" if value >= 10 else f"{value:.1f}×"


def where(run: Row) -> str:
    return f"{run['processor']}, {run['cores']} cores, Python {run['python']}, NumPy {run['numpy']}, {run['date']}"


def cpu_runs() -> list[tuple[Row, list[Row]]]:
    """One run per backend, NumPy's first: the whole one, with what it lacks taken from the quick one."""
    names = {path.stem.removesuffix("_quick") for path in (HERE / "results").glob("cpu_*.json")}
    found = []
    for name in sorted(names, key=lambda n: (n != "cpu_numpy", n)):
        whole, quick = load(name), load(f"{name}_quick")
        if whole is None or quick is None:
            found += [one for one in (whole, quick) if one]
            continue
        measured = {row["cell"] for row in headline(whole[1])}
        found.append((whole[0], whole[1] + [row for row in headline(quick[1]) if row["cell"] not in measured]))
    return found


def headline(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "train_x" in row]


def cpu_lines() -> list[str]:
    lines: list[str] = []
    for run, rows in cpu_runs():
        shown = headline(rows)
        if not shown:
            continue
        batch, time, width = (shown[0][letter] for letter in "BTD")
        lines += [
            f"**Backend `{run['backend']}`** against the NumPy time loop of the same cell, float32, B={batch}, "
            f"T={time:,}, D={width}, milliseconds ({where(run)}):",
            "",
        ]
        lines += table(
            ("cell", "path", "loop", "pararnn", "", "loop, with gradient", "pararnn, with gradient", ""),
            (
                (
                    row["cell"], path_of(row), ms(row["loop_ms"]), ms(row["ours_ms"]), times(row["forward_x"]),
                    ms(row["loop_train_ms"]), ms(row["ours_train_ms"]), times(row["train_x"]),
                )
                for row in shown
            ),
            words=2,
        )  # fmt: skip
        lines += ["", *grid_lines(run, rows)]
    return lines


def path_of(row: Row) -> str:
    return "time loop" if row["path"] == "sequential" else f"segments, L={row['L']}"


def grid_lines(run: Row, rows: list[Row]) -> list[str]:
    """Forward speed over shapes, to show where there is little or nothing to gain."""
    shapes = [row for row in rows if "forward_x" in row and "train_x" not in row]
    if not shapes:
        return []
    lengths = sorted({row["T"] for row in shapes})
    lines = [
        f"Forward speed of `{run['backend']}` over the NumPy loop at other shapes (*italic*: it ran as one time loop):",
        "",
    ]
    body = []
    for cell in dict.fromkeys(row["cell"] for row in shapes):
        for batch, width in sorted({(row["B"], row["D"]) for row in shapes if row["cell"] == cell}):
            cells = []
            for length in lengths:
                wanted = (cell, batch, length, width)
                here = [row for row in shapes if (row["cell"], row["B"], row["T"], row["D"]) == wanted]
                text = times(here[0]["forward_x"]) if here else "–"
                cells.append(f"*{text}*" if here and here[0]["path"] == "sequential" else text)
            body.append((f"{cell}, B={batch}, D={width}", *cells))
    lines += table(("", *(f"T={length:,}" for length in lengths)), body)
    peaks = [row for row in rows if "ratio" in row]
    if peaks:
        listed = ", ".join(f"{row['cell']} {row['ratio']:.1f}×" for row in peaks)
        shape = f"T={peaks[0]['T']:,}, D={peaks[0]['D']}"
        lines += ["", f"Peak memory of a training step at {shape}, over the bytes of inputs and states: {listed}."]
    return [*lines, ""]


def gpu_rows(key: str) -> tuple[Row, list[Row]] | None:
    """The rows that have `key`, of all runs on a card; a row measured twice is the later run's."""
    runs = [run for path in (HERE / "results").glob("gpu_*.json") if (run := load(path.stem))]
    runs = [run for run in runs if any(key in row for row in run[1])]
    # Of one day the run with a file of its own counts as the later one.
    runs.sort(key=lambda run: (run[0]["date"], -len(run[1])))
    found = {
        (row["cell"], row["B"], row["T"], row["D"], row.get("dtype")): row
        for _, rows in runs
        for row in rows
        if key in row
    }
    return (runs[-1][0], list(found.values())) if runs else None


def gpu_lines() -> list[str]:
    lines: list[str] = []
    if saved := gpu_rows("floor_ms"):
        run, kernels = saved
        others = [key for key in dict.fromkeys(k for row in kernels for k in row) if key.endswith("_ms")]
        others = [key for key in others if key not in OURS and any(row.get(key) for row in kernels)]
        lines += [
            f"**Backend `triton`**, forward, gate inputs given, under graph replay, milliseconds ({run['card']}, torch "
            f"{run['torch']}, {run['date']}). The floor is the time to read the gate inputs and write the states once "
            f"at the copy bandwidth of the same run, {run['copy_tb_s']:.1f} TB/s; the error is against float64:",
            "",
        ]
        lines += table(
            ("cell, B, T, D", "dtype", "floor", "pararnn", "error", *(PEERS.get(k, k[:-3]) for k in others)),
            (
                (
                    f"{row['cell']} {row['B']}, {row['T']:,}, {row['D']}", row["dtype"], ms(row["floor_ms"]),
                    ms(row["ours_ms"]), f"{row['error']:.0e}", *(ms(row[k]) if row.get(k) else "–" for k in others),
                )
                for row in kernels
            ),
            words=2,
        )  # fmt: skip
        host = [row["host_us"] for row in kernels if row.get("host_us")]
        notes = [f"Without a graph the host spends {min(host):.0f} to {max(host):.0f} µs on a call."] if host else []
        if "cudnn_ms" in others:
            notes.append("A dense GRU is another network, with a matrix product in every step: no like for like.")
        lines += ["", " ".join(notes)]
        lines.append("")
    if saved := gpu_rows("products_ms"):
        run, layers = saved
        lines += [
            "A whole layer, forward and backward, milliseconds under graph replay, beside its matrix products alone "
            f"({run['card']}, {run['date']}):",
            "",
        ]
        lines += table(
            ("cell, B, T, D", "pararnn", "products alone", "peak GB"),
            (
                (
                    f"{row['cell']} {row['B']}, {row['T']:,}, {row['D']}", ms(row.get("graph_ms", row["ours_ms"])),
                    ms(row["products_ms"]), f"{row['peak_gb']:.2f}",
                )
                for row in layers
            ),
        )  # fmt: skip
        lines.append("")
    return lines


def rewritten(text: str) -> str:
    """README with fresh tables."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md must hold the marks {BEGIN} and {END}")
    return "\n".join([before + begin, "", *cpu_lines(), *gpu_lines()]) + end + after


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if README.md is stale, and write nothing")
    options = parser.parse_args(arguments)
    text = README.read_text(encoding="utf-8")
    fresh = rewritten(text)
    if options.check:
        if fresh != text:
            print("README.md is stale: run `python benchmarks/readme_table.py`", file=sys.stderr)
        return int(fresh != text)
    README.write_text(fresh, encoding="utf-8")
    print("README.md", "rewritten" if fresh != text else "is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
