"""StockCfC: the closed-form continuous-time cell as published, with dense weights and a backbone."""

from __future__ import annotations

from typing import Any

import numpy as np

from pararnn.cells.mixing import Mix, MixingCell
from pararnn.functions import sigmoid

_MODES = ("default", "pure", "no_gate")
_ACTIVATIONS = ("lecun_tanh", "tanh", "silu", "relu")


class StockCfC(MixingCell):
    """Closed-form continuous-time cell.

    ::

        a = φ(W_x x + b + R h)                          the backbone; further layers a ← φ(R_k a + b_k)
        ff1, ff2, t_a, t_b = R_out a + b_out
        h' = (1 - t) tanh(ff1) + t tanh(ff2),   t = σ(t_a Δt + t_b)          mode 'default'
        h' = tanh(ff1) + t tanh(ff2)                                          mode 'no_gate'
        h' = A - A exp(-Δt (|w_τ| + |ff1|)) ff1                               mode 'pure'

    Without a backbone ff1, … are W_x x + b + R h themselves. The backbone is as wide as the state. Δt is the drive
    ``dt``, 1 unless given: a number, (B,) or (B, T). One slot, dense Jacobian. Source: Hasani et al. 2022 (arXiv
    2106.13898), eqs. 9–10, with the modes and names of the package `ncps`.

    Args:
        mode: see above.
        backbone_layers: 0 or more.
        backbone_activation: φ: 'lecun_tanh' is 1.7159 tanh(0.666 ·); 'tanh', 'silu', 'relu'.

    >>> import numpy as np, pararnn
    >>> cell = StockCfC(4, 8, seed=0)
    >>> pararnn.newton_apply(cell, np.ones((2, 10, 4), dtype=np.float32), dt=0.5).shape
    (2, 10, 8)
    """

    slots = ("h",)
    drives = {"dt": 1.0}
    options = ("n_heads", "mode", "backbone_layers", "backbone_activation")
    mode: str
    backbone_layers: int
    backbone_activation: str

    def __init__(
        self, input_size: int | None = None, hidden_size: int | None = None, *, mode: str = "default",
        backbone_layers: int = 1, backbone_activation: str = "lecun_tanh", **keywords: Any,
    ) -> None:  # fmt: skip
        for name, value, allowed in (
            ("mode", mode, _MODES),
            ("backbone_activation", backbone_activation, _ACTIVATIONS),
        ):
            if value not in allowed:
                raise ValueError(f"StockCfC: {name} must be one of {allowed}, got {value!r}")
        if isinstance(backbone_layers, bool) or not isinstance(backbone_layers, int) or backbone_layers < 0:
            raise ValueError(f"StockCfC: backbone_layers must be a whole number of at least 0, got {backbone_layers!r}")
        self.mode, self.backbone_layers, self.backbone_activation = mode, backbone_layers, backbone_activation
        super().__init__(input_size, hidden_size, **keywords)

    # What the tables of other cells say once is here a matter of the options.

    @property
    def heads(self) -> tuple[str, ...]:
        """What the last layer delivers."""
        return ("ff1",) if self.mode == "pure" else ("ff1", "ff2", "t_a", "t_b")

    @property
    def gates(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*(("a0",) if self.backbone_layers else self.heads), "dt")

    @property
    def params(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("w_tau", "A") if self.mode == "pure" else ()

    @property
    def products(self) -> dict[str, tuple[str, ...]]:  # type: ignore[override]
        if not self.backbone_layers:
            return {"R": self.heads}
        inner: dict[str, tuple[str, ...]] = {f"R_{k}": (f"a{k}",) for k in range(1, self.backbone_layers)}
        return {"R": ("a0",), **inner, "R_out": self.heads}

    @property
    def biases(self) -> dict[str, tuple[str, ...]]:  # type: ignore[override]
        return {name.replace("R_", "b_"): made for name, made in self.products.items() if name != "R"}

    def initial_arrays(self, rng: np.random.Generator, n_in: int, n_h: int) -> dict[str, np.ndarray]:
        """As every mixing cell's; A starts at 1 and w_τ at 0."""
        made = super().initial_arrays(rng, n_in, n_h)
        if self.mode == "pure":
            made["w_tau"], made["A"] = np.zeros(n_h), np.ones(n_h)
        return made

    def step(self, xp: Any, mix: Mix, h: Any, *rest: Any) -> tuple[Any, ...]:
        given = dict(zip((*self.gates, *self.params), rest, strict=True))
        if self.backbone_layers:
            (back,) = mix(h, "a0")
            a = self.activate(xp, given["a0"] + back)
            for k in range(1, self.backbone_layers):
                (u,) = mix(a, f"a{k}")
                a = self.activate(xp, u)
            made = mix(a, *self.heads)
        else:
            made = tuple(given[name] + u for name, u in zip(self.heads, mix(h, *self.heads), strict=True))
        if self.mode == "pure":
            (ff1,), scale = made, given["A"]
            return (scale - scale * xp.exp(-(given["dt"] * (xp.abs(given["w_tau"]) + xp.abs(ff1)))) * ff1,)
        ff1, ff2, t_a, t_b = made
        t = sigmoid(xp, t_a * given["dt"] + t_b)
        kept = xp.tanh(ff1) if self.mode == "no_gate" else (1.0 - t) * xp.tanh(ff1)
        return (kept + t * xp.tanh(ff2),)

    def activate(self, xp: Any, u: Any) -> Any:
        """φ."""
        if self.backbone_activation == "relu":
            return xp.where(u <= 0.0, 0.0, u)
        if self.backbone_activation == "silu":
            return u * sigmoid(xp, u)
        return xp.tanh(u) if self.backbone_activation == "tanh" else 1.7159 * xp.tanh(0.666 * u)
