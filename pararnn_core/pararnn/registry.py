"""The registry: finds backends through entry points, and picks one in a documented order."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from pararnn.backend import Backend, refuse_packed
from pararnn.empty import NothingToDo
from pararnn.errors import BackendUnavailableError
from pararnn.front import FRONTS, Front
from pararnn.problem import Problem
from pararnn.solve import check_structure, picard_sweeps, solve_cell_of

GROUP = "pararnn.backends"
# Names that the described system used for the path without kernels.
_ALIASES = {"eager": "array"}


_RESERVED = ("auto", *_ALIASES)


@dataclass(frozen=True)
class Choice:
    """The backend that runs a problem, and why each one before it does not."""

    backend: Backend
    refusals: dict[str, str]


def _lacks(backend: object) -> str | None:
    """What keeps an object from being a backend, or None."""
    for wanted in ("name", "probe", "accepts", "newton", "pull_back", "describe"):
        if not hasattr(backend, wanted):
            return f"{type(backend).__name__} has no {wanted}; derive from pararnn.Backend"
    return None


@lru_cache(maxsize=1)
def _found() -> dict[str, Backend | str]:
    """Every backend by name; one whose import fails is kept as the sentence that says so."""
    found: dict[str, Backend | str] = {"array": Backend()}
    for entry in entry_points(group=GROUP):
        try:
            backend = entry.load()
            lacks = _lacks(backend)
            found[entry.name] = f"it is no backend: {lacks}" if lacks else backend
            if not lacks:
                _install_front(backend)
        except Exception as error:
            found[entry.name] = f"it could not be imported: {type(error).__name__}: {error}"
    return found


def _install_front(backend: Backend) -> None:
    """Lets a backend's front stand before solves on its library's arrays; the first one found keeps its place."""
    front: Front | None = getattr(backend, "front", None)
    if front is not None:
        for package in front.packages:
            FRONTS.setdefault(package, front)


_registered: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Adds a backend for this process, as an installed entry point would for every process.

    Raises:
        TypeError: what was given lacks a part of a Backend.
        ValueError: its name is 'auto' or 'eager', which mean something else.

    >>> class Mine(Backend):
    ...     name, priority = "mine", -1
    >>> register_backend(Mine())
    >>> "mine" in backends()
    True
    """
    if lacks := _lacks(backend):
        raise TypeError(f"register_backend: {lacks}")
    if backend.name in _RESERVED:
        raise ValueError(f"register_backend: the name {backend.name!r} has a meaning of its own; choose another")
    _registered[backend.name] = backend
    _install_front(backend)


def backends() -> dict[str, Backend | str]:
    """All known backends by name, in the order in which ``auto`` asks them (highest priority, then name).

    A backend whose import failed is there as the sentence that says so.

    >>> [name for name in backends() if name in ("array", "numpy")]
    ['numpy', 'array']
    """
    known = {**_found(), **_registered}
    return dict(sorted(known.items(), key=lambda item: (-getattr(item[1], "priority", 0), item[0])))


def _refusal(backend: Backend | str, problem: Problem) -> str | None:
    if isinstance(backend, str):
        return backend
    return (
        backend.probe()
        or _other_family(backend, problem)
        or refuse_packed(backend, problem)
        or backend.accepts(problem)
    )


def _other_family(backend: Backend, problem: Problem) -> str | None:
    """A backend is asked only about cells of a kind that it solves."""
    if problem.cell.family in getattr(backend, "families", ("channelwise",)):
        return None
    name = type(problem.cell).__name__
    if problem.cell.family == "linear":
        return f"it solves channelwise cells, and {name} has a matrix as its state"
    return f"it solves channelwise cells, and {name} multiplies by a matrix at every step"


def _choice(backend: Backend, problem: Problem, refusals: dict[str, str]) -> Choice:
    batch, time, _, _ = problem.shape
    return Choice(backend if batch and time else NothingToDo(backend.name), refusals)


def choose(problem: Problem) -> Choice:
    """The backend for `problem`.

    A named backend is an order: if it cannot run, that is an error with its sentence. ``auto`` takes the first that
    can, highest priority first; the array backend comes last and runs on every library.

    Raises:
        ValueError: no backend of that name, or a Jacobian structure that the cell does not have.
        BackendUnavailableError: the named backend cannot run here.
        TypeError: the named backend does not take this problem, or an option needs a backend that is not here or a
            cell of another kind.
    """
    # Orders that the cell itself cannot follow are refused whoever would run it.
    solve_cell_of(problem.cell, problem.config)
    check_structure(problem.cell, problem.config)
    picard_sweeps(problem.cell, problem.config)
    known = backends()
    wanted = _ALIASES.get(problem.config.scan_backend, problem.config.scan_backend)
    if wanted != "auto":
        if wanted not in known:
            names = ", ".join(["auto", *known, *_ALIASES])
            raise ValueError(f"scan_backend={problem.config.scan_backend!r} is not known here; choose from {names}")
        backend = known[wanted]
        absent = backend if isinstance(backend, str) else backend.probe()
        if absent is not None:
            raise BackendUnavailableError(f"scan_backend={wanted!r} cannot run here: {absent}")
        assert not isinstance(backend, str)
        sentence = _other_family(backend, problem) or refuse_packed(backend, problem) or backend.accepts(problem)
        if sentence is not None:
            raise TypeError(f"scan_backend={wanted!r} cannot solve this: {sentence}")
        return _choice(backend, problem, {})
    refusals: dict[str, str] = {}
    for name, backend in known.items():
        sentence = _refusal(backend, problem)
        if sentence is None:
            assert not isinstance(backend, str)
            return _choice(backend, problem, refusals)
        refusals[name] = sentence
    raise TypeError("no backend takes this problem: " + "; ".join(f"{n}: {s}" for n, s in refusals.items()))


def decoder_of(cell: Any, ref: Any) -> Backend | None:
    """The backend with the highest priority that decodes `cell` in a kernel of its own, if any."""
    for backend in backends().values():
        decodes = getattr(backend, "decodes", None)
        if decodes is not None and decodes(cell, ref):
            assert isinstance(backend, Backend)
            return backend
    return None


def offered(name: str) -> Any:
    """The object behind a public name that some backend offers.

    Raises:
        AttributeError: no backend offers it.
        ImportError: it needs a library that is not installed; the message says which.
    """
    for label, backend in backends().items():
        target = getattr(backend, "offers", {}).get(name)
        if target is None:
            continue
        module, _, attribute = target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise ImportError(
                f"pararnn.{name} needs {error.name}, which is not installed: pip install 'pararnn[{label}]'",
                name=error.name,
            ) from error
    raise AttributeError(f"module 'pararnn' has no attribute {name!r}")


def offered_names(prefix: str = "") -> list[str]:
    """The names that backends offer and that begin with `prefix`."""
    every = (name for backend in backends().values() for name in getattr(backend, "offers", {}))
    return sorted({name for name in every if name.startswith(prefix)})
