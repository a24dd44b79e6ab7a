"""A cell as a user would write one: two coupled slots, no declared bounds, ten lines."""

from __future__ import annotations

from typing import Any

from pararnn.cells import ChannelwiseCell
from pararnn.functions import sigmoid


class Echo(ChannelwiseCell):
    """A fast slot driven by the input and inhibited by a slow one, which follows it."""

    slots, hidden = ("fast", "slow"), "fast"
    gates, params = ("u", "k"), ("a", "b")

    def step(self, xp: Any, fast: Any, slow: Any, u: Any, k: Any, a: Any, b: Any) -> tuple[Any, ...]:
        keep = sigmoid(xp, k + b * slow)
        new = xp.tanh(a * fast - 1.5 * slow + u)
        return keep * fast + (1.0 - keep) * new, slow + 0.25 * (new - slow)
