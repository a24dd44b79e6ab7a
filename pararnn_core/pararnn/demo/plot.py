"""The plot of a training run: the loss above, what the solver did below."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pararnn.demo.train import StepLog

TRAIN, HELD_OUT, SOLVER, QUIET = "#9db8d9", "#1f4e8c", "#b5541c", "#666666"


def save_plot(path: Path, log: list[StepLog], *, order_0: float, order_1: float, held_out: float) -> bool:
    """Writes the PNG; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return False
    steps = np.array([entry.step for entry in log])
    bits = np.array([entry.bits for entry in log])
    looked = [(entry.step, entry.held_out_bits) for entry in log if entry.held_out_bits is not None]
    figure = Figure(figsize=(8.0, 6.5), layout="constrained")
    loss, passes, mismatch = figure.subplots(3, 1, sharex=True, height_ratios=(3.2, 1.0, 1.4))

    loss.plot(steps, bits, color=TRAIN, linewidth=1.0, label="training window")
    loss.plot(*zip(*looked, strict=True), "o-", color=HELD_OUT, markersize=4, label="held-out text")
    for value, name in ((order_0, "order 0: how frequent each byte is"), (order_1, "order 1: the byte before is known")):
        loss.axhline(value, color=QUIET, linewidth=0.9, linestyle="--")
        loss.annotate(
            f"{name}, {value:.2f}", (1.0, value), xycoords=("axes fraction", "data"), xytext=(-4, 3),
            textcoords="offset points", ha="right", va="bottom", fontsize=9, color=QUIET,
        )  # fmt: skip
    loss.set_ylabel("loss (bits/byte)")
    loss.set_ylim(0.0, min(8.5, max(bits.max(), order_0) + 0.4))
    loss.legend(frameon=False, loc="upper right")
    loss.set_title(f"Byte model trained through time in parallel: {held_out:.2f} bits/byte on held-out text", fontsize=11)

    passes.step(steps, [entry.passes for entry in log], where="mid", color=SOLVER, linewidth=1.0)
    passes.set_ylabel("passes\nper solve")
    passes.set_ylim(0.0, max(entry.passes for entry in log) + 1.0)
    passes.yaxis.set_major_locator(MaxNLocator(4, integer=True))

    found = np.array([entry.joint_mismatch for entry in log])
    open_joints = found > 0.0
    if open_joints.any():
        mismatch.semilogy(steps[open_joints], found[open_joints], ".", color=SOLVER, markersize=4)
    note = f"{1.0 - open_joints.mean():.0%} of the solves match bit for bit (0, not drawn)"
    if not open_joints.all():
        mismatch.annotate(note, (0.99, 0.06), xycoords="axes fraction", ha="right", fontsize=9, color=QUIET)
    mismatch.set_ylabel("joint\nmismatch")
    mismatch.set_xlabel("training step")
    for axes in (loss, passes, mismatch):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.align_ylabels()
    figure.savefig(path, dpi=140)
    return True
