"""TorchBackend: the array solver on torch tensors of any device, taken where no kernel backend does."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from pararnn.arrays import Array, namespace_name
from pararnn.backend import Backend
from pararnn.engine import ArrayEngine, Costs
from pararnn.front import Front
from pararnn.problem import Problem


class TorchFront(Front):
    """The front for tensors; torch itself is imported with the first tensor, not with this package."""

    packages = ("torch",)
    packs = True

    def newton_apply(
        self, cell: Any, x: Array, config: Any, *, h0: Any, guess: Any, stats: Any, **packing: Any
    ) -> Array:
        from pararnn_torch.apply import newton_apply

        return newton_apply(cell, x, config, h0=h0, guess=guess, stats=stats, **packing)

    def sequential_apply(self, cell: Any, x: Array, h0: Any, **packing: Any) -> Array:
        from pararnn_torch.apply import sequential_apply

        return sequential_apply(cell, x, h0, **packing)

    def watches(self, *arrays: Array) -> bool:
        from pararnn_torch.apply import is_tracked

        return is_tracked(*arrays)

    def unwatched(self) -> Any:
        import torch

        return torch.no_grad()

    def smooth(self, xp: Any) -> Any:
        from pararnn_torch.apply import Differentiable

        return Differentiable(xp)

    def joined_drives(self, cell: Any, x: Array, given: Mapping[str, Any]) -> tuple[Any, Array] | None:
        import torch

        if not torch.compiler.is_compiling():
            return None
        from pararnn_torch.drives import joined_drives

        arrays, joined = joined_drives(cell, cell.arrays, x, given)
        return cell.driven(arrays["W_x.weight"], arrays["W_x.bias"]), joined

    def untracked(self, problem: Problem) -> Problem:
        from pararnn_torch.apply import untracked

        return untracked(problem)


class TorchEngine(ArrayEngine):
    """The array engine, with what an operation costs on the tensor's device."""

    name = "torch"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.xp)
        if problem.device.type != "cpu":
            # A launch costs more than a call on the CPU, an element next to nothing.
            self.costs = Costs(overhead_us=8.0, simple_ns=0.004, heavy_ns=0.008)


@lru_cache(maxsize=1)
def _has_torch() -> bool:
    # Asked before each solve, and looking for a package reads folders.
    return find_spec("torch") is not None


class TorchBackend(Backend):
    """Problems on torch tensors: CPU, CUDA, MPS and whatever else torch runs on."""

    name = "torch"
    # Above the plain array backend, below every backend with loops or kernels of its own.
    priority = 1
    front = TorchFront()
    offers: Mapping[str, str] = MappingProxyType(
        {
            "ParaRNN": "pararnn_torch.rnn:ParaRNN",
            "parallelize": "pararnn_torch.parallelize:parallelize",
            "distributed.last_newton_residuals": "pararnn_torch.distributed:last_newton_residuals",
            "distributed.unwrap_distributed": "pararnn_torch.distributed:unwrap_distributed",
        }
    )

    def probe(self) -> str | None:
        return None if _has_torch() else "torch is not installed; pip install 'pararnn[torch]'"

    def accepts(self, problem: Problem) -> str | None:
        if namespace_name(problem.xp) != "torch":
            return f"it takes torch tensors, and these are {namespace_name(problem.xp)}'s"
        return super().accepts(problem)

    def engine(self, problem: Problem) -> ArrayEngine:
        return TorchEngine(problem)

    def example_namespace(self) -> Any:
        """The namespace in which the conformance suite hands it arrays."""
        import torch

        return torch
