"""The demo's choices, checked before any work."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from pararnn.config import NewtonConfig
from pararnn.demo.errors import DemoError
from pararnn.demo.model import CELLS
from pararnn.drives import with_drives
from pararnn.problem import make_problem
from pararnn.registry import choose

# Small enough for a test or an impatient reader: a few seconds, and a loss that falls.
QUICK: dict[str, Any] = {"steps": 30, "length": 4096, "width": 32, "features": 16, "window": 256, "sample": 120}


@dataclass(frozen=True)
class Settings:
    """What one run of the demo does.

    Attributes:
        file: text to learn; None takes the sources of Python's standard library.
        steps: training steps.
        length: T of the run that is timed both ways.
        out: folder for the model, the numbers and the plot.
        backend: 'auto' or a backend's name.
        cell: 'gru', 'lstm', 'slstm' or 'tanh'.
        seed: of the weights, the training windows and the sample.
        width, features: D and I of the model.
        batch, window: sequences in a training step, and the bytes that each predicts.
        learning_rate: Adam's, at its highest.
        check_every: steps between two looks at held-out text.
        sample, temperature: bytes of text to make up; below 1 the likelier ones are preferred.

    Raises:
        DemoError: a choice outside its range, or a backend that cannot run this.
    """

    file: str | os.PathLike[str] | None = None
    steps: int = 300
    length: int = 65_536
    out: str | os.PathLike[str] = "pararnn-demo"
    backend: str = "auto"
    cell: str = "gru"
    seed: int = 0
    width: int = 128
    features: int = 32
    batch: int = 2
    window: int = 2048
    learning_rate: float = 2e-2
    check_every: int = 10
    sample: int = 400
    temperature: float = 0.7

    def __post_init__(self) -> None:
        if self.cell not in CELLS:
            raise DemoError(f"cell must be one of {', '.join(CELLS)}, got {self.cell!r}")
        for name in ("steps", "length", "width", "features", "batch", "window", "check_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise DemoError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("seed", "sample"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise DemoError(f"{name} must be a whole number of at least 0, got {value!r}")
        for name in ("learning_rate", "temperature"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise DemoError(f"{name} must be a positive number, got {getattr(self, name)!r}")
        self._check_backend()

    def _check_backend(self) -> None:
        """Asks the registry now: an order that cannot be followed must not cost a minute first."""
        cell, x = CELLS[self.cell](1, 1, seed=0), np.zeros((1, 1, 1), dtype=np.float32)
        try:
            choose(make_problem("demo", *with_drives("demo", cell, x, {}), None, self.config))
        except (TypeError, ValueError, RuntimeError) as error:
            raise DemoError(str(error)) from None

    @property
    def config(self) -> NewtonConfig:
        return NewtonConfig(scan_backend=self.backend)

    @property
    def text_needed(self) -> int:
        """Bytes below which a run makes no sense: half of four windows stay for training."""
        return max(self.length, 4 * (self.window + 1))

    def folder(self) -> Path:
        """The output folder, made if it is not there."""
        out = Path(self.out)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DemoError(f"cannot make the output folder {out}: {error.strerror}") from None
        return out


def make_settings(*, quick: bool = False, **choices: Any) -> Settings:
    """Settings from what was chosen; `quick` lowers what was not."""
    unknown = sorted(set(choices) - {field.name for field in fields(Settings)})
    if unknown:
        raise TypeError(f"the demo has no setting {', '.join(unknown)}")
    return Settings(**{**(QUICK if quick else {}), **choices})
