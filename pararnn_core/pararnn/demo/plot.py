"""The plot of a training run: the loss above, what the solver did below."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pararnn.demo.train import StepLog

TRAIN, HELD_OUT, SOLVER, QUIET = "#9db8d9", "#1f4e8c", "#b5541c", "#555555"
# Under words that may lie on points.
PATCH = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.0}


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
    loss.plot(*zip(*looked, strict=True), "o-", color=HELD_OUT, markersize=3, label="held-out text")
    for value, dashes, name in (
        (order_0, "--", "order 0: only how frequent each byte is"),
        (order_1, ":", "order 1: the byte before is known"),
    ):
        loss.axhline(value, color=QUIET, linewidth=1.1, linestyle=dashes, label=f"{name}, {value:.2f}")
    loss.set_ylabel("loss (bits/byte)")
    loss.set_ylim(0.0, min(8.5, max(bits.max(), order_0) + 0.4))
    loss.legend(frameon=False, loc="upper right", fontsize=9)
    loss.set_title(f"Byte model after {len(log)} steps: {held_out:.2f} bits/byte on held-out text", fontsize=11)

    passes.step(steps, [entry.passes for entry in log], where="mid", color=SOLVER, linewidth=1.0)
    passes.set_ylabel("passes\nper solve")
    passes.set_ylim(0.0, max(entry.passes for entry in log) + 1.0)
    passes.yaxis.set_major_locator(MaxNLocator(4, integer=True))

    found = np.array([entry.joint_mismatch for entry in log])
    open_joints = found > 0.0
    if open_joints.any():
        mismatch.semilogy(steps[open_joints], found[open_joints], ".", color=SOLVER, markersize=4)
        note = f"in {1.0 - open_joints.mean():.0%} of the steps it is 0: bit for bit, not drawn"
    else:
        mismatch.set_yticks([])
        loops = all(entry.path == "sequential" for entry in log)
        note = "none: every solve ran as one time loop" if loops else "0 in every step: all joints match bit for bit"
    if not open_joints.all():
        mismatch.annotate(
            note, (1.0, 0.0), xycoords="axes fraction", xytext=(-4, 5), textcoords="offset points", ha="right",
            fontsize=9, color=QUIET, bbox=PATCH,
        )  # fmt: skip
    mismatch.set_ylabel("joint\nmismatch")
    mismatch.set_xlabel("training step")
    for axes in (loss, passes, mismatch):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.align_ylabels()
    figure.savefig(path, dpi=140)
    return True
