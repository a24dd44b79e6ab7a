"""The whole demo in order: text, both ways, training, both ways again, sample, files."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pararnn
from pararnn.demo.both_ways import BothWays, run_both_ways
from pararnn.demo.generate import generate, readable
from pararnn.demo.model import ByteModel
from pararnn.demo.save import save_all
from pararnn.demo.settings import Settings, make_settings
from pararnn.demo.text import HELD_OUT, load_text, order_0_bits, order_1_bits
from pararnn.demo.train import StepLog, train


@dataclass(frozen=True)
class DemoResult:
    """The demo's numbers.

    Attributes:
        settings: what was run.
        order_0, order_1: bits per byte of held-out text that a model must beat: knowing how frequent each byte is,
            and knowing the byte before.
        fresh, trained: the timed sequence both ways, before and after training.
        log: one entry a training step.
        held_out_bits: the trained model's loss on held-out text.
        sample: text made up by the trained model.
        interrupted: training was ended by Ctrl-C.
        files: what was saved where; 'plot' only where matplotlib is installed.
        seconds: of the whole run.
    """

    settings: Settings
    order_0: float
    order_1: float
    fresh: BothWays
    trained: BothWays
    log: list[StepLog]
    held_out_bits: float
    sample: bytes
    interrupted: bool
    files: dict[str, Path]
    seconds: float

    @property
    def losses(self) -> list[float]:
        """Bits per byte of every training step."""
        return [entry.bits for entry in self.log]


def run(settings: Settings | None = None, *, say: Callable[[str], Any] = print, **choices: Any) -> DemoResult:
    """Runs the demo and tells about it, line by line, through `say`.

    Args:
        settings: all choices, or give them by name: see Settings, and ``quick=True`` for a run of a few seconds.
        say: called with each line of the account; ``lambda line: None`` keeps quiet.

    Raises:
        DemoError: a choice that cannot be followed, before any work.
    """
    begin = time.perf_counter()
    if settings is None:
        settings = make_settings(**choices)
    elif choices:
        raise TypeError("run: give settings or choices by name, not both")
    text = load_text(settings.file, needed=settings.text_needed, held_out=settings.window + 1)
    folder = settings.folder()
    held_out = text.held_out[: HELD_OUT + 1]
    order_0, order_1 = order_0_bits(held_out), order_1_bits(text.train, held_out)
    model = ByteModel.fresh(settings.cell, features=settings.features, width=settings.width, seed=settings.seed)
    count = sum(array.size for array in model.arrays.values())
    say(f"pararnn {pararnn.__version__} demo")
    say(f"text        {text.source}: {text.size:,} bytes, the last {text.held_out.size:,} held out")
    say(f"model       {type(model.cell).__name__}, {settings.width} channels, {count:,} numbers, float32")

    sequence = np.concatenate([text.train, text.held_out])[None, : settings.length]
    say("")
    say(f"One sequence of {settings.length:,} steps, fresh weights")
    fresh = _both_ways(model, sequence, settings, say)

    say("")
    say(f"Training: {settings.steps} steps of {settings.batch} x {settings.window:,} bytes")
    say(f"to beat     {order_0:.2f} bits/byte: order-0 entropy, each byte by its frequency alone")
    say(f"            {order_1:.2f} bits/byte: order 1, the byte before is known")
    training = train(model, text, settings, say)
    model, log = training.model, training.log
    if training.interrupted:
        say(f"stopped by you after {len(log)} of {settings.steps} steps; what was learned is kept")
    final = model.evaluate(held_out[None, :], settings.config)
    trend = f"training loss {log[0].bits:.2f} -> {np.mean([e.bits for e in log[-20:]]):.2f}, " if log else ""
    say(f"result      {trend}held-out text {final:.2f} bits/byte ({_verdict(final, order_0, order_1)})")
    if log:
        say(f"speed       {training.seconds:.1f} s, {_training_speed(log, settings):,.0f} bytes/s")

    say("")
    say(f"The same {settings.length:,} steps, {'trained' if log else 'untrained'} weights")
    trained = _both_ways(model, sequence, settings, say)

    sample = generate(model, settings.sample, temperature=settings.temperature, seed=settings.seed)
    say("")
    say(f"A sample of {settings.sample} bytes at temperature {settings.temperature:g}")
    for line in readable(sample).splitlines():
        say(f"  | {line}")
    files = save_all(folder, training, sample, order_0=order_0, order_1=order_1, held_out=final)
    seconds = time.perf_counter() - begin
    say("")
    if "plot" not in files and log:
        say("no plot     matplotlib is not installed: pip install pararnn[plot] gives it; the CSV has its numbers")
    say(f"saved       {', '.join(f'{what} {path}' for what, path in files.items())}")
    say(f"took        {seconds:.0f} s")
    return DemoResult(
        settings, order_0, order_1, fresh, trained, log, final, sample, training.interrupted, files, seconds
    )


def _both_ways(model: ByteModel, sequence: np.ndarray, settings: Settings, say: Callable[[str], Any]) -> BothWays:
    both = run_both_ways(model.cell, model.embed(sequence), settings.config)
    for line in both.lines():
        say(line)
    return both


def _training_speed(log: list[StepLog], settings: Settings) -> float:
    return len(log) * settings.batch * settings.window / sum(entry.seconds for entry in log)


def _verdict(bits: float, order_0: float, order_1: float) -> str:
    if bits < order_1:
        return "better than order 1"
    return "better than order 0" if bits < order_0 else "not yet better than order 0"
