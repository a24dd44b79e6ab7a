"""Where torch.nn's own loop is the fastest right way through a layer, and why: predicted, not tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pararnn.config import NewtonConfig
from pararnn.mixing.plan import costs_of, plan_mixing
from pararnn.newton import checked_problem
from pararnn.registry import choose
from pararnn_torch.parallelize.weights import Weights

# Microseconds that torch.nn's loop on a CPU spends on a step beside its product, without and with a gradient. Measured
# at one sequence of 16 channels, torch 2.13; the LSTM in float32 without projections is oneDNN's.
_STEP_US = {"GRU": (11.0, 180.0), "LSTM": (10.0, 200.0), "RNN_TANH": (4.0, 70.0), "RNN_RELU": (4.0, 70.0)}
_ONEDNN_LSTM_US = (1.0, 4.0)
# Its products against those of a loop in array calls.
_ONEDNN_PRODUCTS = 0.6
_ELEMENT_US = 0.01
# A gradient multiplies twice more; ours also runs its passes over again.
_PRODUCTS_WITH_GRADIENT, _OURS_WITH_GRADIENT = 3.0, 3.5


# How much faster segments must be predicted to be: trained networks take more passes than fresh ones.
_MARGIN = 1.5
# Calls that are left to torch.nn's loop after segments did not settle; training may have changed the network by then.
_REST = 16


class NativeChoice:
    """One module's choices, made once for each shape."""

    def __init__(self) -> None:
        self._reasons: dict[Any, str | None] = {}
        self._resting = 0

    def rest(self) -> None:
        """To be called when a sequence had to be walked after all, which torch.nn's loop does faster."""
        self._resting = _REST

    def why_native(
        self, mode: str, weights: Weights, shape: Sequence[int], config: NewtonConfig, tracked: bool
    ) -> str | None:
        """The reason for torch.nn's own loop on an input of `shape` (B, T), or None."""
        batch, time = shape
        if _ordered(config, time):
            return None
        key = (batch, time, tracked, weights.ih.dtype, weights.ih.device, config)
        if key not in self._reasons:
            if len(self._reasons) >= 256:
                self._reasons.clear()
            self._reasons[key] = _reason(mode, weights, batch, time, config, tracked)
        if self._reasons[key] is None and self._resting and weights.ih.device.type == "cpu":
            self._resting -= 1
            return f"segments did not settle lately, and are tried again after {self._resting} more calls"
        return self._reasons[key]


def _ordered(config: NewtonConfig, time: int) -> bool:
    """Whether the caller has said how to solve, which is not ours to change."""
    said = (config.segment_len, config.chunk_len, config.pinned(time))
    return config.scan_backend != "auto" or config.exact or any(order is not None for order in said)


def _reason(mode: str, weights: Weights, batch: int, time: int, config: NewtonConfig, tracked: bool) -> str | None:
    arrays = {name: a.detach() for name, a in weights.arrays().items()}
    cell = weights.kind._copy(weights.kind.max_recurrent_norm, arrays)
    # Sizes alone decide, so one number stands for the whole input.
    x = weights.ih.detach().new_zeros((1, 1, 1)).expand(batch, time, weights.ih.shape[1])
    problem = checked_problem("parallelize", cell, x, config, None)
    if choose(problem).backend.name != "torch":
        # Kernels, whose own plan is the better judge.
        return None
    plan = plan_mixing(problem)
    if plan.path == "sequential":
        return f"torch.nn's own loop is the fastest one here: {plan.reason}"
    if x.device.type != "cpu":
        return None
    work, by_onednn = weights.kind.step_work(), _by_onednn(mode, weights)
    plain, with_gradient = _ONEDNN_LSTM_US if by_onednn else _STEP_US[mode]
    products = costs_of(problem).product_us(work, batch, x.element_size()) * (_ONEDNN_PRODUCTS if by_onednn else 1.0)
    step = with_gradient + _PRODUCTS_WITH_GRADIENT * products if tracked else plain + products
    native = time * (step + _ELEMENT_US * batch * work.width)
    ours = plan.predicted_us * (_OURS_WITH_GRADIENT if tracked else 1.0)
    if native > _MARGIN * ours:
        return None
    return f"torch.nn's own loop is predicted to take {native / 1e3:.1f} ms, segments {ours / 1e3:.1f} ms at best"


def _by_onednn(mode: str, weights: Weights) -> bool:
    plain = mode == "LSTM" and weights.ih.dtype == torch.float32 and weights.hr is None
    return plain and torch.backends.mkldnn.is_available()
