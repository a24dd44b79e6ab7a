"""See pararnn.solvers; the solver itself is pararnn.newton_apply."""

from pararnn.newton import newton_apply, newton_vjp

__all__ = ["newton_apply", "newton_vjp"]
