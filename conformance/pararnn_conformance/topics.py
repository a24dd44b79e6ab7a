"""The topic files; importing them registers their checks."""

from pararnn_conformance import (
    agreement,
    gradients,
    hard_regimes,
    honesty,
    laws,
    lengths,
    memory,
    pinned,
    quiet,
    refusals,
    zoo,
)

__all__ = [
    "agreement",
    "gradients",
    "hard_regimes",
    "honesty",
    "laws",
    "lengths",
    "memory",
    "pinned",
    "quiet",
    "refusals",
    "zoo",
]
