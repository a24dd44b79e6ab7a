"""What training in several processes asks of a model: its residuals, and the model inside its wrappers."""

from __future__ import annotations

import math

from torch import nn

from pararnn_torch.layer import CellLayer


def unwrap_distributed(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DistributedDataParallel, FullyShardedDataParallel and torch.compile.

    >>> import torch
    >>> inner = torch.nn.Linear(2, 2)
    >>> unwrap_distributed(torch.nn.DataParallel(inner)) is inner
    True
    """
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in _WRAPPERS:
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


# By name: importing FSDP to ask for its type would load all of torch.distributed.
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def last_newton_residuals(model: nn.Module) -> list[float]:
    """The residual of each recurrent layer's last forward, in the model's order; NaN for one that has not run.

    >>> import torch
    >>> from pararnn import ParaGRU, ParaRNN
    >>> rnn = ParaRNN(ParaGRU(3, 4, seed=0), num_layers=2)
    >>> out = rnn(torch.zeros(1, 5, 3))
    >>> last_newton_residuals(torch.nn.Sequential(rnn))
    [0.0, 0.0]
    """
    layers = [m for m in unwrap_distributed(model).modules() if isinstance(m, CellLayer)]
    return [math.nan if layer.last_stats is None else float(layer.last_stats.max_residual) for layer in layers]
