"""Names under which the described system keeps its iteration counts; the counts are those of pararnn.k_star."""

from pararnn.config import LIBRARY_NEWTON_ITERS
from pararnn.k_star import K_STAR, auto_newton_iters

__all__ = ["K_STAR", "LIBRARY_NEWTON_ITERS", "auto_newton_iters"]
