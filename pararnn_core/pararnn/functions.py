"""Gate functions that the array API standard lacks, for arrays of any namespace and for symbols."""

from __future__ import annotations

from typing import Any

from pararnn.graph.expr import Expr


def sigmoid(xp: Any, x: Any) -> Any:
    """The logistic function 1 / (1 + exp(-x)).

    This form keeps full relative precision where the gate is nearly shut, which a form through tanh loses;
    a gate that leaks 1e-6 a step matters over a million steps.

    >>> import numpy as np
    >>> float(sigmoid(np, np.asarray(0.0)))
    0.5
    """
    if isinstance(x, Expr):
        return x.graph.apply("sigmoid", x)
    # A library's front may bring one whose derivative survives exp(-x) = inf, where 0 · inf would make it NaN.
    smooth = getattr(xp, "smooth_sigmoid", None)
    return 1.0 / (xp.exp(-x) + 1.0) if smooth is None else smooth(x)


def softplus(xp: Any, x: Any) -> Any:
    """log(1 + exp(x)), without overflow.

    >>> import numpy as np
    >>> float(softplus(np, np.asarray(1000.0)))
    1000.0
    """
    return xp.logaddexp(x, x * 0.0)


def log_sigmoid(xp: Any, x: Any) -> Any:
    """log(sigmoid(x)) = -softplus(-x), without underflow.

    >>> import numpy as np
    >>> float(log_sigmoid(np, np.asarray(-1000.0)))
    -1000.0
    """
    return -softplus(xp, -x)
