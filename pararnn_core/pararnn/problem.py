"""A problem: one cell on one input, checked once, before any work is done."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import array_api_compat

from pararnn.arrays import FLOATS, Array, Namespace, cast, common_namespace, compute_dtype, dtype_name
from pararnn.cells.base import ChannelwiseCell
from pararnn.config import NewtonConfig
from pararnn.front import adopted
from pararnn.packing import Packing, make_packing
from pararnn.programs import Marks


@dataclass(frozen=True)
class Problem:
    """Everything a backend needs; shapes are B, T, I from ``x`` and D from the cell.

    A packed problem says by ``head`` (B, T), int32, before which steps the state starts anew: -1 for none, else the
    row of ``starts`` (N, …) that is loaded, zeros where there is none. ``places`` (N,) says where each row is loaded:
    the flat index b·T + t, or -1. ``hold`` (B, T) is true where a step is padding, which leaves the state as it is.
    ``documents`` is the number of documents with ``cu_seqlens``, whose starting states ``starts`` then begins with.
    """

    cell: ChannelwiseCell
    x: Array
    h0: Array | None
    config: NewtonConfig
    guess: Array | None
    xp: Namespace
    head: Array | None = None
    starts: Array | None = None
    places: Array | None = None
    hold: Array | None = None
    documents: int | None = None
    offsets: Array | None = None
    # Set where a gradient will be asked for: a backend may leave here what its adjoint would have to compute again,
    # under a key that tells one solve from another. Whoever finds nothing computes it.
    kept: dict[Any, Any] | None = None

    @property
    def packed(self) -> bool:
        """Whether a step needs to know more than its inputs."""
        return self.head is not None or self.hold is not None

    @property
    def marks(self) -> Marks:
        """What the step programs of this problem are told."""
        return Marks(self.head is not None, self.head is not None and self.starts is not None, self.hold is not None)

    def with_starts(self) -> Problem:
        """The same problem with rows of zeros for the documents' starts, so that their gradient can be asked for."""
        if self.documents is None or self.starts is not None:
            return self
        assert self.places is not None
        shape = (int(self.places.shape[0]), *self.cell.state_shape)
        return replace(self, starts=self.xp.zeros(shape, dtype=self.dtype, device=self.device))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, time, features = self.x.shape
        return int(batch), int(time), int(features), self.cell.d_h

    @property
    def dtype(self) -> Any:
        """The dtype of input and result."""
        return self.x.dtype

    @property
    def work_dtype(self) -> Any:
        """The dtype of the arithmetic."""
        return compute_dtype(self.xp, self.x.dtype)

    @property
    def device(self) -> Any:
        """Where new arrays go; None, the library's own choice, where the input is spread over several devices."""
        found = array_api_compat.device(self.x)
        return None if hasattr(found, "device_set") else found

    @property
    def state_shape(self) -> tuple[int, ...]:
        batch, time, _, _ = self.shape
        return (batch, time, *self.cell.state_shape)

    def start(self) -> list[Array]:
        """The public slots before the first step, each (B, D), in the work dtype."""
        xp, batch = self.xp, self.shape[0]
        if self.h0 is None:
            shape = self.cell.state_shape[self.cell.state_slots > 1 :]
            zero = xp.zeros((batch, *shape), dtype=self.work_dtype, device=self.device)
            return [zero] * self.cell.state_slots
        h0 = cast(xp, self.h0, self.work_dtype)
        return [h0] if self.cell.state_slots == 1 else [h0[:, s, ...] for s in range(self.cell.state_slots)]

    def slots_of(self, states: Array) -> list[Array]:
        """A state array's slots, each (B, T, D)."""
        return [states] if self.cell.state_slots == 1 else [states[:, :, s, ...] for s in range(self.cell.state_slots)]


def check_given(what: str, label: str, array: Array | None, wanted: tuple[int, ...]) -> None:
    """Refuses an optional array of another shape, or one that is not floating."""
    if array is None:
        return
    if tuple(array.shape) != wanted:
        raise ValueError(f"{what}: {label} must have shape {wanted}, got {tuple(array.shape)}")
    if dtype_name(array.dtype) not in FLOATS:
        raise TypeError(f"{what}: {label} must be floating, got {dtype_name(array.dtype)}")


def make_problem(
    what: str,
    cell: Any,
    x: Array,
    h0: Array | None = None,
    config: NewtonConfig | None = None,
    guess: Array | None = None,
    *,
    cu_seqlens: Any = None,
    reset: Any = None,
    mask: Any = None,
) -> Problem:
    """A checked problem; every refusal says what was wanted, what came and what to do."""
    config = NewtonConfig() if config is None else config
    if not isinstance(config, NewtonConfig):
        raise TypeError(f"{what}: config must be a NewtonConfig, got {type(config).__name__}")
    if not isinstance(cell, ChannelwiseCell):
        raise TypeError(
            f"{what}: cell must be a ChannelwiseCell (ParaGRU, ParaLSTM, ParaSLSTM, ParaTanh or your own subclass), "
            f"got {type(cell).__name__}"
        )
    x, h0, guess = adopted(x), adopted(h0), adopted(guess)
    xp = check_input(what, cell, x, h0=h0, guess=guess)
    if not cell.is_driven:
        raise TypeError(f"{what}: {type(cell).__name__} needs its per-step input {', '.join(cell.drives)}")
    batch, time = int(x.shape[0]), int(x.shape[1])
    packing = make_packing(what, xp, x, adopted(cu_seqlens), adopted(reset), adopted(mask))
    count = batch if packing.documents is None else packing.documents
    check_given(what, "h0", h0, (count, *cell.state_shape))
    check_given(what, "guess", guess, (batch, time, *cell.state_shape))
    if h0 is not None:
        cell.check_h0(xp, h0)
    return _packed(Problem(cell, x, h0, config, guess, xp), packing)


def _packed(problem: Problem, packing: Packing) -> Problem:
    """The problem with its packing, the starting states where the solvers look for them, and padding without values."""
    xp, h0 = problem.xp, problem.h0
    if packing.documents is not None:
        starts = h0
        assert packing.places is not None
        if starts is not None and packing.places.shape[0] > packing.documents:
            starts = xp.concat([starts, xp.zeros_like(starts[:1, ...])])
        problem = replace(problem, h0=None, starts=starts)
    if packing.hold is not None:
        # A gradient would multiply what stands there, NaN perhaps, with zero.
        x = xp.where(xp.expand_dims(packing.hold, axis=2), xp.zeros_like(problem.x), problem.x)
        problem = replace(problem, x=x)
    return replace(
        problem,
        head=packing.head,
        places=packing.places,
        hold=packing.hold,
        documents=packing.documents,
        offsets=packing.offsets,
    )


def check_input(what: str, cell: ChannelwiseCell, x: Array, **others: Array | None) -> Namespace:
    """The namespace of a call's arrays; refuses an `x` that the cell cannot read."""
    if x is None:
        raise TypeError(f"{what}: x must be an array (NumPy, torch, JAX, CuPy, …), got NoneType")
    xp = common_namespace(what, x=x, **others, **{"the cell's W_x.weight": cell.W_x.weight})
    if x.ndim != 3:
        raise ValueError(f"{what}: x must have 3 axes (B, T, I), got shape {tuple(x.shape)}; add a batch axis of 1")
    name = dtype_name(x.dtype)
    if name not in FLOATS:
        raise TypeError(f"{what}: x must be floating ({', '.join(FLOATS)}), got {name}; cast or embed it first")
    if x.dtype != cell.dtype:
        raise TypeError(
            f"{what}: x is {name} but the cell is {dtype_name(cell.dtype)}; use cell.to(dtype=x.dtype) or cast x"
        )
    if x.shape[2] != cell.d_in:
        raise ValueError(f"{what}: the cell takes {cell.d_in} features, got x of shape {tuple(x.shape)}")
    return xp
