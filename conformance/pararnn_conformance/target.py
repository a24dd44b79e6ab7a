"""A target: a backend, and the library and device in which it is given its arrays."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pararnn import Backend, Gradients, NewtonConfig, NewtonStats, backends, newton_apply, newton_vjp
from pararnn.arrays import dtype_name, namespace_name, resolve_namespace
from pararnn.cells import ChannelwiseCell
from pararnn.problem import make_problem
from pararnn_conformance.case import Case, numbers
from pararnn_conformance.expect import Refused


class NotTested(Exception):
    """A backend cannot run here; the message is its sentence."""


@dataclass(frozen=True)
class Given:
    """A case in the target's own arrays."""

    case: Case
    cell: ChannelwiseCell
    x: Any
    h0: Any


class Target:
    """What a check is given: makes arrays and runs problems on one backend, by name.

    A backend gets NumPy arrays unless it has a method ``example_namespace()``, which returns the namespace in which it
    wants them, or a pair of namespace and device.

    Args:
        name: a registered backend; ``name@module`` gives it arrays of another library, as in ``array@jax.numpy``.

    Raises:
        NotTested: the backend is not registered, could not be imported, or says that it cannot run.
    """

    def __init__(self, name: str) -> None:
        self.label = name
        self.name, _, module = name.partition("@")
        known = backends()
        if self.name not in known:
            raise NotTested(f"no backend of this name is registered; there are {', '.join(known)}")
        backend = known[self.name]
        absent = backend if isinstance(backend, str) else backend.probe()
        if absent is not None:
            raise NotTested(absent)
        assert not isinstance(backend, str)
        self.backend: Backend = backend
        wanted: Any = None
        if module:
            try:
                wanted = importlib.import_module(module)
            except ImportError as error:
                raise NotTested(f"{module} could not be imported: {error}") from error
        elif hasattr(backend, "example_namespace"):
            try:
                wanted = backend.example_namespace()
            except Exception as error:
                raise NotTested(f"its example_namespace() raised {type(error).__name__}: {error}") from error
        namespace, self.device = wanted if isinstance(wanted, tuple) else (wanted, None)
        self.xp: Any = resolve_namespace(namespace)

    # Arrays.

    def array(self, values: np.ndarray, dtype: str) -> Any:
        """A fresh array of the target's library."""
        if not hasattr(self.xp, dtype):
            raise Refused(f"{namespace_name(self.xp)} has no {dtype}")
        host = np.array(values, dtype="float32" if dtype == "bfloat16" else dtype, order="C")
        made = self.xp.asarray(host, device=self.device) if self.device is not None else self.xp.asarray(host)
        if dtype == "bfloat16":
            made = self.xp.astype(made, self.xp.bfloat16)
        if dtype_name(made.dtype) != dtype:
            raise Refused(f"{namespace_name(self.xp)} makes {dtype_name(made.dtype)} of {dtype}")
        return made

    def host(self, array: Any) -> np.ndarray:
        """The values in NumPy, none of them changed; bfloat16 becomes float32."""
        if dtype_name(array.dtype) == "bfloat16":
            array = self.xp.astype(array, self.xp.float32)
        if hasattr(array, "detach"):
            return array.detach().cpu().numpy()
        return array.get() if hasattr(array, "get") else np.asarray(array)

    def cell(self, cell: ChannelwiseCell, dtype: str) -> ChannelwiseCell:
        """A NumPy cell with its arrays made by `array`."""
        made = {name: self.array(a, dtype) for name, a in cell.arrays.items()}
        like = cell.to(dtype=np.dtype("float32" if dtype == "bfloat16" else dtype))
        return like.to(self.xp, self.device, getattr(self.xp, dtype)).replace(**made)

    def give(self, case: Case) -> Given:
        cell, x, h0 = numbers(case)
        start = None if h0 is None else self.array(h0, case.dtype)
        return Given(case, self.cell(cell, case.dtype), self.array(x, case.dtype), start)

    def needs_comparable_bits(self, dtype: str) -> None:
        """Refused where the library computes the same number differently at another place of an array.

        Some vectorise the body of a loop and not its end; bits then depend on how many channels run together, and no
        two ways through the same steps can be compared bit for bit.
        """
        values = np.linspace(0.1, 9.0, 160)
        for name in ("exp", "log", "tanh"):
            function = getattr(self.xp, name)
            whole = self.host(function(self.array(values, dtype)))
            for first, stop in ((0, 1), (0, 80), (1, 34), (5, 12), (32, 160)):
                part = self.host(function(self.array(values[first:stop], dtype)))
                if np.any(part != whole[first:stop]):
                    raise Refused(f"{namespace_name(self.xp)}'s {name} gives other bits at another place of an array")

    # Problems.

    def config(self, **options: Any) -> NewtonConfig:
        return NewtonConfig(scan_backend=self.name, **options)

    def ask(self, cell: ChannelwiseCell, x: Any, h0: Any, config: NewtonConfig) -> None:
        """Refused, with the backend's sentence, where it does not take this problem."""
        sentence = self.backend.accepts(make_problem("conformance", cell, x, h0, config))
        if sentence is not None:
            raise Refused(sentence)

    def apply(
        self, cell: ChannelwiseCell, x: Any, h0: Any = None, *, stats: NewtonStats | None = None, guess: Any = None,
        **options: Any,
    ) -> np.ndarray:  # fmt: skip
        """newton_apply on this backend; the states on the host."""
        config = self.config(**options)
        self.ask(cell, x, h0, config)
        return self.host(newton_apply(cell, x, config, h0=h0, guess=guess, stats=stats))

    def run(self, case: Case, *, stats: NewtonStats | None = None, **options: Any) -> np.ndarray:
        """newton_apply on a case."""
        given = self.give(case)
        return self.apply(given.cell, given.x, given.h0, stats=stats, **options)

    def vjp(
        self, cell: ChannelwiseCell, x: Any, h0: Any = None, *, stats: NewtonStats | None = None, **options: Any
    ) -> tuple[Any, Callable[..., Gradients]]:
        """newton_vjp on this backend, in the target's own arrays."""
        config = self.config(**options)
        self.ask(cell, x, h0, config)
        return newton_vjp(cell, x, config, h0, stats=stats)

    def gradients(self, found: Gradients) -> dict[str, np.ndarray]:
        """Gradients on the host under one set of names: 'x', 'h0' and the stored arrays."""
        named = {"x": found.x, "h0": found.h0, **found.params}
        return {name: self.host(value) for name, value in named.items()}
