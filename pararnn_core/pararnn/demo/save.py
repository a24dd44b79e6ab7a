"""What a run leaves on disk: the model, the numbers of every step, the sample, and the plot where it can be drawn."""

from __future__ import annotations

import csv
from dataclasses import astuple, fields
from pathlib import Path

from pararnn.demo.plot import save_plot
from pararnn.demo.train import StepLog, Training


def save_all(
    folder: Path, training: Training, sample: bytes, *, order_0: float, order_1: float, held_out: float
) -> dict[str, Path]:
    """Paths by what they hold; no 'plot' where matplotlib is not installed."""
    files = {"model": folder / "model.npz", "numbers": folder / "training.csv", "sample": folder / "sample.txt"}
    training.model.save(files["model"])
    save_numbers(files["numbers"], training.log)
    files["sample"].write_bytes(sample)
    plot = folder / "training.png"
    if training.log and save_plot(plot, training.log, order_0=order_0, order_1=order_1, held_out=held_out):
        files["plot"] = plot
    return files


def save_numbers(path: Path, log: list[StepLog]) -> None:
    """One line a step, an empty cell where held-out text was not looked at."""
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(field.name for field in fields(StepLog))
        writer.writerows(astuple(entry) for entry in log)
