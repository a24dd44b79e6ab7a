"""Mixing cells in parallel over time: segments are rows of one matrix product."""

from pararnn.mixing.adjoint import pull_back_mixing
from pararnn.mixing.solve import describe_mixing, solve_mixing

__all__ = ["describe_mixing", "pull_back_mixing", "solve_mixing"]
