"""The demo's text: Python's own standard library, or a file, as bytes, with its last part held out."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pararnn.demo.errors import DemoError

SYMBOLS = 256
# Enough for a few hundred steps without a repeat, and read in no time.
STANDARD_LIBRARY_BYTES = 2_000_000
# Of the held-out part, what a loss is taken on.
HELD_OUT = 65_536


@dataclass(frozen=True)
class Text:
    """Bytes as uint8 arrays; the model never trains on ``held_out``."""

    source: str
    train: np.ndarray
    held_out: np.ndarray

    @property
    def size(self) -> int:
        return self.train.size + self.held_out.size


def load_text(file: str | os.PathLike[str] | None, *, needed: int, held_out: int) -> Text:
    """The text of `file`, or the standard library's, cut into a training part and a held-out part.

    The held-out part is the last tenth, or `held_out` bytes where that is more, but never over half.

    Raises:
        DemoError: no such file, fewer than `needed` bytes, or an interpreter without its sources.
    """
    raw, source = _standard_library() if file is None else _from_file(Path(file))
    if len(raw) < needed:
        raise DemoError(
            f"the text has {len(raw):,} bytes and this run needs {needed:,}; give a longer text with --file, a "
            "smaller --length, or --quick"
        )
    data = np.frombuffer(raw, dtype=np.uint8)
    last = min(max(data.size // 10, held_out), data.size // 2)
    return Text(source, data[:-last], data[-last:])


def _from_file(path: Path) -> tuple[bytes, str]:
    if not path.is_file():
        raise DemoError(f"there is no file {path}; --file takes the path of any text to learn")
    try:
        return path.read_bytes(), path.name
    except OSError as error:
        raise DemoError(f"cannot read {path}: {error.strerror}") from None


def _standard_library() -> tuple[bytes, str]:
    """Sources of top-level modules in alphabetical order, up to STANDARD_LIBRARY_BYTES."""
    for folder in (Path(sysconfig.get_path("stdlib")), Path(os.__file__).parent):
        # Names with an underscore are generated for this build and hold paths of the machine that made it.
        files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
        if files:
            break
    else:
        raise DemoError("this Python came without the sources of its standard library; give a text with --file")
    raw = b""
    for path in files:
        raw += path.read_bytes()
        if len(raw) >= STANDARD_LIBRARY_BYTES:
            break
    return raw[:STANDARD_LIBRARY_BYTES], "Python's standard library"


def order_0_bits(text: np.ndarray) -> float:
    """Bits per byte of the best code that knows how frequent each byte is and nothing else.

    >>> order_0_bits(np.frombuffer(b"abab", dtype=np.uint8))
    1.0
    """
    share = np.bincount(text, minlength=SYMBOLS) / text.size
    share = share[share > 0.0]
    return float(-np.sum(share * np.log2(share)))


def order_1_bits(train: np.ndarray, text: np.ndarray) -> float:
    """Bits per byte of `text` under pair counts of `train`: what one byte of memory brings."""
    pairs = np.bincount(train[:-1].astype(np.intp) * SYMBOLS + train[1:], minlength=SYMBOLS * SYMBOLS)
    # A pair never seen still needs a code; a twentieth of a count is near the best for program text.
    counts = pairs.reshape(SYMBOLS, SYMBOLS) + 0.05
    share = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.mean(np.log2(share[text[:-1], text[1:]])))
