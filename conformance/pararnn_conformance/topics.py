"""The topic files, in the order in which their checks run; importing them registers the checks."""

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
)

topics = (lengths, agreement, gradients, laws, memory, hard_regimes, honesty, pinned, quiet, refusals)

__all__ = ["topics"]
