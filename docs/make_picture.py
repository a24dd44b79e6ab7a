"""Draws docs/segments.svg from a real solve: segments with wrong starts, their joints, and the corrections.

`python docs/make_picture.py [FILE]`; needs matplotlib. One channel of a ParaGRU, cut into segments that all start from
zero (no warm-up, so that there is something to see). Every curve is checked against the library before it is drawn.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import numpy as np
from matplotlib import rcParams
from matplotlib.figure import Figure

from pararnn import NewtonConfig, ParaGRU, newton_apply, sequential_apply
from pararnn.engine import ArrayEngine
from pararnn.programs import programs_of

LENGTH, COUNT = 40, 6
# Corrections before each pass that is drawn.
DRAWN = (0, 1, 3)
LOOP, JOINT, INK, QUIET = "#b8bcc2", "#c8371f", "#222222", "#666666"
SEGMENTS = ("#1f5fa8", "#2a8f7a")


def problem() -> tuple[ParaGRU, np.ndarray]:
    """A cell with one channel that remembers for about as long as a segment, and a slow input with some noise."""
    cell = ParaGRU(1, 1, dtype=np.float64, max_recurrent_norm=None)
    cell = cell.replace(
        a_z=np.array([0.8]),
        a_r=np.array([0.5]),
        a_n=np.array([1.3]),
        W_x_weight=np.array([[0.0], [0.0], [1.0]]),
        W_x_bias=np.array([-2.9, 1.0, 0.0]),
    )
    time = np.arange(LENGTH * COUNT)
    slow = 0.55 * np.sin(2 * np.pi * time / 150.0 + 0.4) + 0.25 * np.sin(2 * np.pi * time / 47.0)
    noise = 0.5 * np.random.default_rng(3).standard_normal(time.size)
    return cell, (slow + noise)[None, :, None]


def run_pass(cell: ParaGRU, x: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All segments at once from `starts`: states (L+1, C), the starts in row 0, and the tangents M (C,)."""
    programs, (weight, bias) = programs_of(cell), cell.W_x
    gates = (x[0] @ weight.T + bias).reshape(COUNT, LENGTH, 3).transpose(2, 1, 0)
    one = np.ones(COUNT)
    params = [one * p for p in cell.recurrent(cell.xp, cell.dtype)]
    out = ArrayEngine(cell.xp).loop(programs.advance_tangent, [starts, one, one], list(gates), params, keep=1)
    return out.kept[0], out.carry[1]


def correct(states: np.ndarray, tangents: np.ndarray) -> np.ndarray:
    """s'_{c+1} = e_c + M_c (s'_c - s_c), from the exact s'_0 = s_0."""
    old, ends = states[0], states[-1]
    new = old.copy()
    for c in range(COUNT - 1):
        new[c + 1] = ends[c] + tangents[c] * (new[c] - old[c])
    return new


def solve(cell: ParaGRU, x: np.ndarray) -> list[np.ndarray]:
    """The states of every pass, each equal to what the library gives for that many corrections."""
    starts, passes = np.zeros(COUNT), []
    for k in range(max(DRAWN) + 1):
        states, tangents = run_pass(cell, x, starts)
        config = NewtonConfig(
            segment_len=LENGTH, warmup=0, max_iters=k, residual_fail=None, scan_backend="array", tol=1.0
        )
        library = newton_apply(cell, x, config)
        np.testing.assert_allclose(states[1:].T.ravel(), library.ravel(), rtol=0.0, atol=1e-12)
        passes.append(states)
        starts = correct(states, tangents)
    return passes


def draw(path: Path) -> None:
    # The first passes are wrong by intention.
    logging.getLogger("pararnn").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rcParams.update({"svg.hashsalt": "pararnn", "font.family": "DejaVu Sans", "svg.fonttype": "path"})
    cell, x = problem()
    loop = np.concatenate([[0.0], sequential_apply(cell, x).ravel()])
    passes = solve(cell, x)
    time = np.arange(loop.size)
    figure = Figure(figsize=(9.0, 6.4), layout="constrained", facecolor="white")
    panels = figure.subplots(len(DRAWN), 1, sharex=True, sharey=True)
    titles = (
        "1   Run all segments at once, from guessed starts",
        "2   Correct the starts: the joints say by how much",
        "3   Again, until the joints meet: this is the time loop",
    )
    for k, axes, title in zip(DRAWN, panels, titles, strict=True):
        states = passes[k]
        axes.plot(time, loop, color=LOOP, linewidth=5.0, solid_capstyle="round", label="time loop, step by step")
        gaps = np.abs(states[0, 1:] - states[-1, :-1])
        for c in range(COUNT):
            place = np.arange(LENGTH + 1) + c * LENGTH
            color = SEGMENTS[c % 2]
            axes.plot(place, states[:, c], color=color, linewidth=1.6, label="segments" if c == 0 else None)
            axes.plot(place[0], states[0, c], "o", color=color, markersize=5, zorder=4)
        for c in range(1, COUNT):
            axes.axvline(c * LENGTH, color="#e4e6e9", linewidth=1.0, zorder=0)
            if gaps[c - 1] > 0.01:
                axes.plot(
                    [c * LENGTH] * 2, [states[-1, c - 1], states[0, c]], color=JOINT, linewidth=2.4, zorder=3,
                    label="mismatch at a joint" if c == 1 else None,
                )  # fmt: skip
        axes.set_title(title, loc="left", fontsize=11, color=INK)
        error = np.abs(states[1:].T.ravel() - loop[1:]).max()
        done = f"{k} correction{'s' if k > 1 else ''}: " if k else ""
        note = f"{done}largest mismatch {_short(gaps.max())}, error {_short(error)}"
        axes.set_title(note, loc="right", fontsize=9.5, color=QUIET)
        axes.set_ylabel("state h")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(-2, loop.size + 1)
        axes.set_yticks((-0.4, 0.0, 0.4, 0.8))
    panels[0].legend(loc="upper center", bbox_to_anchor=(0.565, 1.0), frameon=False, fontsize=9.5)
    panels[-1].set_xticks(np.arange(COUNT + 1) * LENGTH)
    panels[-1].set_xlabel(f"time step (one channel of a GRU; {COUNT} segments of {LENGTH} steps)")
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def _short(value: float) -> str:
    """0.62, or 3e-05."""
    return f"{value:.2f}" if value >= 0.005 else f"{value:.0e}".replace("e-0", "e-")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("segments.svg")
    draw(target)
    print("saved", target)
