"""A front: the part of a solve in which an array library itself takes part, found by the library of the input."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from pararnn.arrays import Array
from pararnn.packing import given_packing

if TYPE_CHECKING:
    from pararnn.config import NewtonConfig
    from pararnn.problem import Problem
    from pararnn.stats import NewtonStats


class Front:
    """Stands before the solve for the arrays of one library: its autograd, its transformations, its compiler.

    Which backend then runs is another matter: a front runs the problem with ``run_newton``, which chooses. A backend
    sets ``front`` to bring one along. Every method takes what the public function of its name takes.
    """

    # Top-level packages that define the library's array types.
    packages: tuple[str, ...] = ()
    # Whether its functions also take cu_seqlens, reset and mask, by these names.
    packs = False

    def newton_apply(
        self,
        cell: Any,
        x: Array,
        config: NewtonConfig | None,
        *,
        h0: Array | None,
        guess: Array | None,
        stats: NewtonStats | None,
    ) -> Array:
        raise NotImplementedError

    def sequential_apply(self, cell: Any, x: Array, h0: Array | None) -> Array:
        raise NotImplementedError

    def adopt(self, array: Any) -> Array:
        """`array` itself, or for a library without array functions the same memory as an array that has them."""
        return array

    def meet(self, kind: type) -> None:
        """Told of a cell's class when a cell of it first has arrays of the library."""

    def watches(self, *arrays: Array) -> bool:
        """Whether somebody must know how a result depends on these arrays."""
        return False

    def unwatched(self) -> AbstractContextManager[Any]:
        """A context in which nobody watches."""
        return nullcontext()

    def smooth(self, xp: Any) -> Any:
        """`xp`, with functions whose derivative the library's autograd can follow everywhere."""
        return xp

    def joined_drives(self, cell: Any, x: Array, given: Mapping[str, Any]) -> tuple[Any, Array] | None:
        """The cell and the input with drives among the features, where a compiler must not look into the core."""
        return None

    def untracked(self, problem: Problem) -> Problem:
        """The same numbers, cut off from automatic differentiation."""
        return problem


def told(front: Front, **packing: Any) -> dict[str, Any]:
    """What of cu_seqlens, reset and mask was given, for a front that takes them.

    Raises:
        TypeError: the front does not.
    """
    given = given_packing(**packing)
    if given and not front.packs:
        raise TypeError(
            f"{type(front).__name__} does not take {', '.join(given)} yet; run each sequence by itself, or as NumPy "
            "arrays"
        )
    return given


# By package; filled when backends are found or registered.
FRONTS: dict[str, Front] = {}


def front_of(x: Any) -> Front | None:
    """The front for the library of `x`, if it has one."""
    # An import and not a call: a compiler that traces this function runs it instead of looking inside.
    import pararnn.find_backends  # noqa: F401

    return FRONTS.get(type(x).__module__.partition(".")[0])


def unwatched(x: Any) -> AbstractContextManager[Any]:
    """A context in which the library of `x` follows no gradients."""
    front = front_of(x)
    return nullcontext() if front is None else front.unwatched()


def adopted(array: Any) -> Any:
    """An argument as the core can use it; see :meth:`Front.adopt`."""
    front = front_of(array)
    return array if front is None else front.adopt(array)
