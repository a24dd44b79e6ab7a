"""StockGRU, StockLSTM, StockRNN: the recurrences of torch.nn, with dense recurrent matrices."""

from __future__ import annotations

from typing import Any

from pararnn.cells.mixing import Mix, MixingCell
from pararnn.functions import sigmoid


class StockGRU(MixingCell):
    """The gated recurrent unit as torch.nn.GRU computes it.

    ::

        r = σ(r_x + R_r h + b_r)    z = σ(z_x + R_z h + b_z)    n = tanh(n_x + r (R_n h + b_n))
        h' = (1 - z) n + z h

    with (r_x, z_x, n_x) = W_x x + b. ``W_x.weight``, ``W_x.bias``, ``R``, ``b_h`` are torch's weight_ih (3·D, I),
    bias_ih (3·D,), weight_hh (3·D, D) and bias_hh (3·D,). |h| ≤ 1 once it is. Source: Cho et al. 2014 (arXiv
    1406.1078), with the reset after the product as in cuDNN.

    >>> import numpy as np, pararnn
    >>> cell = StockGRU(4, 8, seed=0)
    >>> pararnn.newton_apply(cell, np.ones((2, 10, 4), dtype=np.float32)).shape
    (2, 10, 8)
    """

    slots = ("h",)
    gates = ("r", "z", "n")
    products = {"R": ("r", "z", "n")}
    biases = {"b_h": ("r", "z", "n")}
    bounds = {"h": (-1.0, 1.0)}

    def step(self, xp: Any, mix: Mix, h: Any, r: Any, z: Any, n: Any) -> tuple[Any, ...]:
        r_h, z_h, n_h = mix(h, "r", "z", "n")
        r = sigmoid(xp, r + r_h)
        z = sigmoid(xp, z + z_h)
        n = xp.tanh(n + r * n_h)
        return ((1.0 - z) * n + z * h,)


class StockLSTM(MixingCell):
    """Long short-term memory as torch.nn.LSTM computes it.

    ::

        g = g_x + R_g h + b_g  for g in (i, f, g, o)
        c' = σ(f) c + σ(i) tanh(g)    h' = σ(o) tanh(c')

    with (i_x, f_x, g_x, o_x) = W_x x + b. Slots (c, h). ``W_x.weight``, ``W_x.bias``, ``R``, ``b_h`` are torch's
    weight_ih (4·D, I), bias_ih, weight_hh (4·D, D) and bias_hh. Source: Hochreiter and Schmidhuber 1997, with the
    forget gate of Gers et al. 2000.

    >>> import numpy as np, pararnn
    >>> cell = StockLSTM(4, 8, seed=0)
    >>> pararnn.newton_apply(cell, np.ones((2, 10, 4), dtype=np.float32)).shape
    (2, 10, 2, 8)
    """

    slots = ("c", "h")
    gates = ("i", "f", "g", "o")
    products = {"R": ("i", "f", "g", "o")}
    biases = {"b_h": ("i", "f", "g", "o")}

    def step(self, xp: Any, mix: Mix, c: Any, h: Any, i: Any, f: Any, g: Any, o: Any) -> tuple[Any, ...]:
        i_h, f_h, g_h, o_h = mix(h, "i", "f", "g", "o")
        c = sigmoid(xp, f + f_h) * c + sigmoid(xp, i + i_h) * xp.tanh(g + g_h)
        return c, sigmoid(xp, o + o_h) * xp.tanh(c)


class StockRNN(MixingCell):
    """The Elman network as torch.nn.RNN computes it.

    ::

        h' = φ(u_x + R h + b),   φ = tanh or max(·, 0)

    with u_x = W_x x + b. ``W_x.weight``, ``W_x.bias``, ``R``, ``b_h`` are torch's weight_ih (D, I), bias_ih, weight_hh
    (D, D) and bias_hh. Source: Elman 1990.

    Args:
        nonlinearity: 'tanh' or 'relu'.

    Raises:
        ValueError: another nonlinearity.

    >>> import numpy as np, pararnn
    >>> cell = StockRNN(4, 8, nonlinearity="relu", seed=0)
    >>> pararnn.newton_apply(cell, np.ones((2, 10, 4), dtype=np.float32)).shape
    (2, 10, 8)
    """

    slots = ("h",)
    gates = ("u",)
    products = {"R": ("u",)}
    biases = {"b_h": ("u",)}
    options = ("n_heads", "nonlinearity")
    nonlinearity: str

    def __init__(
        self, input_size: int | None = None, hidden_size: int | None = None, *, nonlinearity: str = "tanh",
        **keywords: Any,
    ) -> None:  # fmt: skip
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"StockRNN: nonlinearity must be 'tanh' or 'relu', got {nonlinearity!r}")
        self.nonlinearity = nonlinearity
        super().__init__(input_size, hidden_size, **keywords)

    def step(self, xp: Any, mix: Mix, h: Any, u: Any) -> tuple[Any, ...]:
        (u_h,) = mix(h, "u")
        u = u + u_h
        # Not a maximum: at 0 the slope is 0, as in torch, and NaN stays NaN.
        return (xp.tanh(u) if self.nonlinearity == "tanh" else xp.where(u <= 0.0, 0.0, u),)
