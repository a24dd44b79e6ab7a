"""The training loop: random windows, one parallel solve and its adjoint a step, a log of both."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pararnn.demo.adam import Adam, clip, rate_at
from pararnn.demo.model import ByteModel
from pararnn.demo.settings import Settings
from pararnn.demo.text import HELD_OUT, Text
from pararnn.stats import NewtonStats

LARGEST_GRADIENT = 1.0
# Held-out text looked at during training: pieces from all over it, because one place is easier than another.
LOOK_PIECES, LOOK_BYTES = 8, 1024
# Steps between two lines where a bar would only fill a log.
LINE_EVERY = 50


@dataclass(frozen=True)
class StepLog:
    """One training step: its loss, and how its solve went."""

    step: int
    bits: float
    held_out_bits: float | None
    passes: int
    corrections: int
    joint_mismatch: float
    estimate: float
    path: str
    segment_len: int
    gradient_norm: float
    seconds: float


@dataclass
class Training:
    """What training left behind; up to the last whole step where it was interrupted."""

    model: ByteModel
    log: list[StepLog] = field(default_factory=list)
    interrupted: bool = False
    seconds: float = 0.0


def windows(text: np.ndarray, settings: Settings) -> Iterator[np.ndarray]:
    """Endless (B, T+1) cuts of the text at random places."""
    rng = np.random.default_rng(settings.seed)
    size = settings.window + 1
    while True:
        starts = rng.integers(0, text.size - size + 1, settings.batch)
        yield np.stack([text[start : start + size] for start in starts])


def spread(text: np.ndarray, pieces: int, size: int) -> np.ndarray:
    """(B, size+1) evenly spaced cuts; fewer or shorter where the text is short."""
    size = min(size, text.size - 1)
    starts = np.linspace(0, text.size - size - 1, min(pieces, text.size // size)).astype(int)
    return np.stack([text[start : start + size + 1] for start in starts])


def train(model: ByteModel, text: Text, settings: Settings, say: Callable[[str], Any] = print) -> Training:
    """Trains for ``settings.steps`` steps, or until Ctrl-C, which ends it between two steps' results."""
    done, adam, begin = Training(model), Adam(), time.perf_counter()
    look = spread(text.held_out[: HELD_OUT + 1], LOOK_PIECES, LOOK_BYTES)
    cuts = windows(text.train, settings)
    try:
        with _progress(settings, say) as show:
            for step in range(settings.steps):
                started = time.perf_counter()
                stats = NewtonStats()
                bits, gradient = done.model.loss_and_gradient(next(cuts), settings.config, stats)
                gradient, norm = clip(gradient, LARGEST_GRADIENT)
                rate = rate_at(step, settings.steps, settings.learning_rate)
                done.model = done.model.replace(adam.step(done.model.arrays, gradient, rate))
                seconds = time.perf_counter() - started
                last = step + 1 == settings.steps
                held_out = None
                if step == 0 or last or (step + 1) % settings.check_every == 0:
                    held_out = done.model.evaluate(look, settings.config)
                entry = StepLog(
                    step + 1, bits, held_out, stats.passes, stats.iters, stats.max_residual, stats.agreement_estimate,
                    stats.path, stats.segment_len, norm, seconds,
                )  # fmt: skip
                done.log.append(entry)
                show(entry)
    except KeyboardInterrupt:
        done.interrupted = True
    done.seconds = time.perf_counter() - begin
    return done


@contextmanager
def _progress(settings: Settings, say: Callable[[str], Any]) -> Iterator[Callable[[StepLog], None]]:
    """A bar on a terminal; in a log, where a bar would fill pages, a line now and then."""
    if not sys.stderr.isatty():

        def line(entry: StepLog) -> None:
            if entry.step == 1 or entry.step % LINE_EVERY == 0 or entry.step == settings.steps:
                say(_line(entry))

        yield line
        return
    from tqdm import tqdm

    with tqdm(total=settings.steps, unit="step", mininterval=0.2, dynamic_ncols=True) as bar:
        seen = ""

        def show(entry: StepLog) -> None:
            nonlocal seen
            if entry.held_out_bits is not None:
                seen = f"{entry.held_out_bits:.2f}"
            bar.set_postfix_str(f"{entry.bits:.2f} bits/byte, held out {seen}", refresh=False)
            bar.update()

        yield show


def _line(entry: StepLog) -> str:
    held_out = f", held out {entry.held_out_bits:.2f}" if entry.held_out_bits is not None else ""
    solve = f"{entry.passes} pass{'es' * (entry.passes != 1)}, joint mismatch {entry.joint_mismatch:.0e}"
    return f"step {entry.step:5}   {entry.bits:.2f} bits/byte{held_out}   {entry.seconds * 1e3:.0f} ms, {solve}"
