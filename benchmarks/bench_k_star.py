"""K*(T), the fewest corrections that agree with the time loop: every cell, fresh and trained, per step and in segments.

`python benchmarks/bench_k_star.py` measures and saves results/bench_k_star.json. `--write` turns that file into the
tables that the library ships (pararnn/k_star_tables.py) and the plot docs/k-star.svg. `--device cuda` solves on a card.

Agreement is 1e-4 of each slot's scale (float32) against the time loop. Per step (L = 1) a correction is one iteration
of the published algorithm; in segments L is what the graphics backend chooses for 256 channels. Fresh weights read
N(0, 1); trained ones, of a byte model after some steps, read the text that they learned.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time as clock
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, header, save

import pararnn
from pararnn import NewtonConfig, NewtonStats, NotConvergedWarning, newton_apply
from pararnn.demo.adam import Adam, clip, rate_at
from pararnn.demo.model import ByteModel
from pararnn.demo.text import load_text
from pararnn.verify import compare
from pararnn_triton.shape import choose_shape

ROOT = Path(__file__).parent.parent
CELLS = (
    "ParaGRU", "ParaLSTM", "ParaSLSTM", "ParaTanh", "ParaNLRU", "ParaCfC", "ParaTitans", "ParaMinGRU", "ParaMinLSTM",
    "ParaLRU", "ParaS5", "ParaLEM", "ParaUnICORNN",
)  # fmt: skip
# Cells that multiply by matrices: `--mixing` measures these instead, into a file of their own.
MIXING = ("StockGRU", "StockLSTM", "ParaHopfield", "ParaM2RNN")
LENGTHS = (32, 128, 512, 2048, 8192, 32768, 131072)
SEEDS = (0, 1, 2)
FEATURES, MOST = 16, 12
BATCH, WINDOW = 8, 256


def segment_length(cell, time: int) -> int:
    """L of the graphics backend at 256 channels; the whole length where it runs one loop."""
    shape = choose_shape(1, time, 256, segment_len=None, warmup=None, passes=4, long_memory=cell.long_memory)
    return min(shape.length, time)


def fresh(name: str, width: int, seed: int):
    """A new cell; those whose input makes matrices are narrow."""
    if name == "ParaM2RNN":
        return pararnn.ParaM2RNN(FEATURES, k_dim=4, v_dim=4, seed=seed)
    return getattr(pararnn, name)(FEATURES, min(width, 8) if name == "ParaHopfield" else width, seed=seed)


def loop_backend(cell) -> str:
    """Who runs loops fast."""
    return "cpu" if cell.family == "channelwise" else "numpy"


def trained(name: str, cell, seed: int, steps: int, text):
    """A cell after `steps` steps of a byte model, and the embeddings that it reads."""
    width = cell.d_h
    rng = np.random.default_rng(seed)
    symbols = 256
    model = ByteModel(
        name, cell, rng.standard_normal((symbols, FEATURES)).astype(np.float32),
        (0.1 * rng.standard_normal((symbols, width)) / math.sqrt(width)).astype(np.float32),
        np.zeros(symbols, dtype=np.float32),
    )  # fmt: skip
    adam, bits = Adam(), []
    for step in range(steps):
        starts = rng.integers(0, text.size - WINDOW - 1, BATCH)
        window = np.stack([text[s : s + WINDOW + 1] for s in starts])
        loss, gradient = model.loss_and_gradient(window, NewtonConfig(scan_backend=loop_backend(cell)))
        gradient, _ = clip(gradient, 1.0)
        model = model.replace(adam.step(model.arrays, gradient, rate_at(step, steps, 1e-2)))
        bits.append(loss)
    return model.cell, model.embedding, bits[0], float(np.mean(bits[-10:]))


class Solver:
    """Pinned solves of one problem on one device, compared with the loop."""

    def __init__(self, cell, x, device: str) -> None:
        time = x.shape[1]
        self.cell, self.time = cell, time
        self.oracle = newton_apply(cell, x, NewtonConfig(scan_backend=loop_backend(cell), segment_len=time))
        self.here, self.x, self.backend = cell, x, "numpy"
        if device != "cpu":
            import torch

            self.here, self.x, self.backend = cell.to(torch, device), torch.from_numpy(x).to(device), "array"

    def _judge(self, states, stats: NewtonStats) -> tuple[float, float]:
        """The true error and the estimate."""
        host = states if isinstance(states, np.ndarray) else states.cpu().numpy()
        return compare(self.cell, host, self.oracle, stats).max_rel, stats.agreement_estimate

    def per_step(self) -> tuple[int | None, list[float], list[float]]:
        """K* of the published iteration: each further one starts where the last ended."""
        states, errors, estimates = None, [], []
        for k in range(MOST + 1):
            config = NewtonConfig(
                max_iters=min(k, 1), residual_atol=None, residual_fail=None, picard_adapt=False,
                scan_backend=self.backend,
            )  # fmt: skip
            stats = NewtonStats()
            states = newton_apply(self.here, self.x, config, guess=states, stats=stats)
            error, estimate = self._judge(states, stats)
            errors.append(error)
            estimates.append(estimate)
            if error <= 1e-4 or not error < 1e30:
                break
        return (len(errors) - 1 if errors[-1] <= 1e-4 else None), errors, estimates

    def segments(self, length: int) -> tuple[int | None, list[float], list[float]]:
        """K* of corrections of segment starts."""
        errors, estimates = [], []
        for k in range(MOST + 1):
            config = NewtonConfig(max_iters=k, residual_fail=None, segment_len=length, scan_backend=self.backend)
            stats = NewtonStats()
            error, estimate = self._judge(newton_apply(self.here, self.x, config, stats=stats), stats)
            errors.append(error)
            estimates.append(estimate)
            if error <= 1e-4:
                return k, errors, estimates
        return None, errors, estimates


def measure(options) -> None:
    warnings.simplefilter("ignore", NotConvergedWarning)
    # Iterations that run away are part of the measurement.
    warnings.simplefilter("ignore", RuntimeWarning)
    logging.getLogger("pararnn").setLevel(logging.ERROR)
    head = header(width=options.width, features=FEATURES, device=options.device, steps=options.steps)
    print(" | ".join(f"{k} {v}" for k, v in head.items()), flush=True)
    text = load_text(None, needed=2**20, held_out=1000).train
    rows, began = [], clock.perf_counter()
    for name in options.cells or (MIXING if options.mixing else CELLS):
        for seed in options.seeds:
            made = fresh(name, options.width, seed)
            problems = [("initial", made, None)]
            # A byte model reads vectors, not matrices.
            if options.steps and len(made.state_shape) <= 2 and name != "ParaM2RNN":
                cell, embedding, first, last = trained(name, made, seed, options.steps, text)
                rows.append({"cell": name, "seed": seed, "bits_before": first, "bits_after": last})
                problems.append(("trained", cell, embedding))
            for (weights, cell, embedding), time in ((p, t) for p in problems for t in options.lengths):
                rng = np.random.default_rng(seed + 100)
                if embedding is None:
                    x = rng.standard_normal((1, time, FEATURES), dtype=np.float32)
                else:
                    x = embedding[text[None, 1000 * seed : 1000 * seed + time]]
                solver, length = Solver(cell, x, options.device), segment_length(cell, time)
                for path in (1, length):
                    if path == time:
                        # One segment is the loop itself.
                        k, errors, estimates = 0, [0.0], [0.0]
                    else:
                        one = path == 1 and cell.family == "channelwise"
                        k, errors, estimates = solver.per_step() if one else solver.segments(path)
                    rows.append({
                        "cell": name, "weights": weights, "T": time, "L": 1 if path == 1 else "auto", "steps": path,
                        "seed": seed, "k": k, "errors": short(errors), "estimates": short(estimates),
                    })  # fmt: skip
        head["seconds"] = round(clock.perf_counter() - began, 1)
        if not options.dry:
            save(options.save + "_mixing" * options.mixing, head, rows)
        show(rows, name, options)


def short(values) -> list[float]:
    """Three digits are enough to plot."""
    return [float(f"{value:.3g}") for value in values]


def worst(rows, name: str, weights: str, path, time: int) -> int | None:
    """The largest K* over seeds; None where one of them found none, -1 where nothing was measured."""
    found = [
        r["k"] for r in rows
        if (r["cell"], r.get("weights"), r.get("T"), r.get("L")) == (name, weights, time, path)
    ]  # fmt: skip
    return -1 if not found else None if None in found else max(found)


def show(rows, name: str, options) -> None:
    bits = [r for r in rows if r["cell"] == name and "bits_after" in r]
    text = f", {bits[0]['bits_before']:.2f} to {np.mean([b['bits_after'] for b in bits]):.2f} bits/byte" if bits else ""
    print(f"{name}{text}")
    for weights in ("initial", "trained"):
        for path in (1, "auto"):
            line = [worst(rows, name, weights, path, time) for time in options.lengths]
            if -1 not in line:
                cells = " ".join(f"{'-' if k is None else k:>4}" for k in line)
                print(f"  {weights:8} L={path!s:5}{cells}", flush=True)


def write(options) -> None:
    """The tables and the plot from the saved results."""
    files = [RESULTS / f"{options.save}{end}.json" for end in ("", "_mixing")]
    rows = [row for path in files if path.exists() for row in json.loads(path.read_text())["rows"]]
    names = list(dict.fromkeys(r["cell"] for r in rows))
    times = sorted({r["T"] for r in rows if "T" in r})
    tables = {}
    for weights in ("initial", "trained"):
        for path in (1, "auto"):
            table = {}
            for name in names:
                found = {t: worst(rows, name, weights, path, t) for t in times}
                # A length at which no count agrees gets no entry, nor one that was not measured.
                table[name] = {t: k for t, k in found.items() if k is not None and k >= 0}
            tables[weights, path] = {name: entries for name, entries in table.items() if entries}
    lines = [
        '"""K*(T) as measured by benchmarks/bench_k_star.py, which writes this file: worst of the seeds, no spare."""',
        "",
        "from __future__ import annotations",
        "",
        "# By weights and by L ('auto': segments), then by cell and T. A missing T has no count that agrees.",
        "MEASURED: dict[tuple[str, str], dict[str, dict[int, int]]] = {",
    ]
    for (weights, path), table in tables.items():
        lines.append(f'    ("{weights}", "{path}"): {{')
        lines += [f'        "{name}": {entries},' for name, entries in table.items()]
        lines.append("    },")
    lines += ["}", ""]
    (ROOT / "pararnn_core/pararnn/k_star_tables.py").write_text("\n".join(lines))
    plot(names, times, tables)


def plot(names, times, tables) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "pararnn", "font.size": 8})
    columns = 4
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(10, 1.9 * lines), sharex=True, sharey=True, squeeze=False)
    styles = {1: "o-", "auto": "s--"}
    for name, ax in zip(names, axes.flat, strict=False):
        for weights, colour in (("initial", "tab:blue"), ("trained", "tab:orange")):
            for path, style in styles.items():
                entries = tables[weights, path].get(name, {})
                at = [t for t in times if t in entries]
                label = f"{weights}, {'per step' if path == 1 else 'segments'}"
                ax.plot(at, [entries[t] for t in at], style, color=colour, label=label, markersize=3, linewidth=1)
        ax.set_title(name, fontsize=9)
        ax.set_xscale("log", base=2)
        ax.set_xticks(times[::2])
        ax.set_ylim(-0.5, MOST + 0.5)
        ax.grid(alpha=0.3)
    for ax in list(axes.flat)[len(names) :]:
        ax.axis("off")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=4)
    figure.supylabel("K*: corrections until 1e-4")
    figure.supxlabel("T")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(ROOT / "docs/k-star.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="tables and plot from the saved results")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--steps", type=int, default=150, help="training steps; 0: fresh weights only")
    parser.add_argument("--cells", nargs="*", default=())
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--mixing", action="store_true", help="the cells that multiply by matrices")
    parser.add_argument("--save", default="bench_k_star", help="name of the results file")
    parser.add_argument("--dry", action="store_true", help="save nothing")
    options = parser.parse_args()
    if options.write:
        write(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
