"""The measured iteration counts, under the name that the described system gives them."""

from pararnn.k_star import K_STAR, auto_newton_iters
from pararnn.k_star_tables import MEASURED

__all__ = ["K_STAR", "MEASURED", "auto_newton_iters"]
