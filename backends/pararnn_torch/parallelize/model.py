"""parallelize: a recurrent module, or the recurrent modules inside a model, exchanged for their parallel twins."""

from __future__ import annotations

from collections import OrderedDict
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from pararnn.config import NewtonConfig
from pararnn_torch.parallelize.modules import PARALLEL, ParallelLayers, parallel_layers
from pararnn_torch.parallelize.step_cells import STEP_CELLS, CellOverTime


def parallelize(module: nn.Module, *, config: NewtonConfig | None = None) -> nn.Module:
    """The same network with its recurrent layers run in parallel over time.

    ::

        parallelize(m)(x) = m(x),   ∂ parallelize(m)(x) = ∂ m(x)      up to rounding

    Takes an ``nn.GRU``, ``nn.LSTM`` (with ``proj_size`` as well) or ``nn.RNN`` (tanh or relu) with any number of
    layers, both directions, dropout, with and without biases; or any model that contains some. What comes back has the
    same parameter objects (nothing is copied: train either, both change), the same forward (``PackedSequence``, ``h0``,
    unbatched input included), the same ``state_dict``; its recurrent modules carry ``last_stats``. The module that was
    given stays as it was.

    An ``nn.GRUCell``, ``nn.LSTMCell`` or ``nn.RNNCell`` computes one step, so that the loop is in the caller's code:
    given by itself it becomes a module that takes the whole sequence (:class:`CellOverTime`); inside a model it is
    left alone.

    Args:
        config: how the layers are solved; see NewtonConfig.

    Raises:
        TypeError: something that is no nn.Module, or of a kind that cannot be taken apart; the message says what to do.
        ValueError: nothing in it to run in parallel.

    Source: torch.nn documents the equations of each layer.

    >>> import torch
    >>> gru = torch.nn.GRU(4, 8, num_layers=2, batch_first=True)
    >>> fast = parallelize(gru)
    >>> x = torch.randn(2, 300, 4)
    >>> torch.allclose(fast(x)[0], gru(x)[0], atol=1e-5)
    True
    >>> fast.weight_hh_l0 is gru.weight_hh_l0
    True
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"parallelize: wanted a torch.nn.Module, got {type(module).__name__}")
    if config is not None and not isinstance(config, NewtonConfig):
        raise TypeError(f"parallelize: config must be a NewtonConfig, got {type(config).__name__}")
    config = NewtonConfig() if config is None else config
    if type(module) in STEP_CELLS:
        return CellOverTime(module, config)
    twins: dict[int, nn.Module] = {}
    stepped, subclassed = [], []
    for name, part in module.named_modules():
        _check_kind(name, part)
        if isinstance(part, ParallelLayers) or type(part) in PARALLEL:
            assert isinstance(part, nn.RNNBase)
            twins[id(part)] = parallel_layers(part, config)
        elif isinstance(part, STEP_CELLS):
            stepped.append(name)
        elif isinstance(part, nn.RNNBase):
            subclassed.append(f"{name or 'the module'} ({type(part).__name__})")
    if subclassed:
        raise TypeError(
            f"parallelize: {', '.join(subclassed)}: a subclass of torch.nn's layer may compute something else; use "
            "nn.GRU, nn.LSTM or nn.RNN itself"
        )
    if not twins:
        hint = (
            f"; {', '.join(stepped)} computes single steps in a loop of yours: parallelize the cell itself and call it "
            "with the whole sequence"
            if stepped
            else ""
        )
        raise ValueError(f"parallelize: found no nn.GRU, nn.LSTM or nn.RNN in {type(module).__name__}{hint}")
    if id(module) in twins:
        return twins[id(module)]
    return _Copier(module, twins).top


def _check_kind(name: str, part: nn.Module) -> None:
    where = f"{name or 'the module'} ({type(part).__name__})"
    if isinstance(part, torch.jit.ScriptModule):
        raise TypeError(f"parallelize: {where} is compiled by torch.jit; parallelize the model it was made from")
    if isinstance(part, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(f"parallelize: {where} wraps a model; parallelize the model, then wrap it")
    if type(part).__name__ == "OptimizedModule":
        raise TypeError(f"parallelize: {where} is compiled; parallelize the model, then torch.compile it")
    if isinstance(part, nn.RNNBase) and parametrize.is_parametrized(part):
        raise TypeError(f"parallelize: {where} is parametrized; parallelize it first, then parametrize the result")


class _Copier:
    """A model's modules again, each an object of its own that shares all tensors, with some exchanged.

    Of their own, because training mode, hooks and exchanged submodules must not reach the model that was given.
    """

    def __init__(self, model: nn.Module, twins: dict[int, nn.Module]) -> None:
        self.made = dict(twins)
        rest = [part for part in model.modules() if id(part) not in twins]
        for part in rest:
            self.made[id(part)] = object.__new__(type(part))
        for part in rest:
            new = self.made[id(part)]
            # All at once: a module's own way of setting attributes is for fresh ones.
            new.__dict__.update({name: self._shared(value) for name, value in part.__dict__.items()})
        self.top = self.made[id(model)]

    def _shared(self, value: Any) -> Any:
        """The value itself, with modules of the model in it replaced by their new ones; containers are made anew."""
        if isinstance(value, nn.Module):
            return self.made.get(id(value), value)
        if isinstance(value, MethodType) and id(value.__self__) in self.made:
            return MethodType(value.__func__, self.made[id(value.__self__)])
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self._shared(entry)) for key, entry in value.items())
        if type(value) in (list, tuple, set):
            return type(value)(self._shared(entry) for entry in value)
        return value
