"""ChannelwiseCell: a cell is its mathematics in one `step`, plus the arrays that the step reads."""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar, NamedTuple

import array_api_compat
import numpy as np

from pararnn.arrays import (
    FLOATS,
    Array,
    Namespace,
    cast,
    common_namespace,
    dtype_name,
    implied_namespace,
    is_array,
    namespace_name,
    resolve_namespace,
)
from pararnn.front import front_of


class Projection(NamedTuple):
    """The input projection W_x: ``weight`` (G·D, I) and ``bias`` (G·D,), gates one after the other."""

    weight: Array
    bias: Array


def resolve_sizes(
    owner: str, input_size: int | None, hidden_size: int | None, d_in: int | None, d_h: int | None
) -> tuple[int, int]:
    """The two sizes from either pair of names; giving both with different values is an error."""
    sizes = []
    for long_name, long, short_name, short in (
        ("input_size", input_size, "d_in", d_in),
        ("hidden_size", hidden_size, "d_h", d_h),
    ):
        if long is not None and short is not None and long != short:
            raise ValueError(f"{owner}: {long_name}={long} and {short_name}={short} differ; give one of them")
        size = long if long is not None else short
        if size is None:
            raise TypeError(f"{owner} needs {long_name} (or {short_name})")
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"{owner}: {long_name} must be a whole number of at least 1, got {size!r}")
        sizes.append(int(size))
    return sizes[0], sizes[1]


def check_cap(owner: str, cap: Any) -> None:
    """Refuses a max_recurrent_norm that is no positive number and not None."""
    good = not isinstance(cap, (bool, str)) and hasattr(cap, "__float__") and not getattr(cap, "ndim", 0)
    if cap is not None and not (good and cap > 0 and math.isfinite(cap)):
        raise ValueError(f"{owner}: max_recurrent_norm must be a positive number or None, got {cap!r}")


_SERIALS = itertools.count(1)


class ChannelwiseCell:
    """A recurrent cell in which no channel sees another inside the recurrence.

    A subclass names its state ``slots``, its ``gates`` (what the input projection ``W_x x + b`` delivers per
    channel), its recurrent ``params`` (one number per channel each), and writes ``step``::

        slot' = step(xp, *slots, *gates, *params)

    with elementwise operations of the array API standard. Everything else — the time loop, the parallel solve, the
    gradient, every backend's kernels — is derived from it.

    Arrays: ``x`` (B, T, I); states (B, T, D) for one slot, (B, T, S, D) for S slots.

    Args:
        input_size, hidden_size: I and D (also ``d_in``, ``d_h``).
        max_recurrent_norm: the step sees each recurrent parameter clamped to ±this; None turns the clamp off. The
            stored parameter is not clamped.
        xp, device, dtype, seed: where and how the arrays are made; NumPy float32 by default. A dtype or device of
            PyTorch's (``torch.float32``, ``"cuda"``) makes tensors without ``xp``. The numbers for one seed are the
            same in every namespace.

    Raises:
        TypeError: a size is missing, or the dtype is not a real floating one.
        ValueError: a size below one, or two names that disagree.

    >>> import numpy as np
    >>> class Leaky(ChannelwiseCell):
    ...     slots, gates, params = ("h",), ("u",), ("a",)
    ...     def step(self, xp, h, u, a):
    ...         return (0.9 * h + 0.1 * xp.tanh(a * h + u),)
    >>> Leaky(3, 5, seed=0)
    Leaky(input_size=3, hidden_size=5, max_recurrent_norm=0.5, float32, numpy)
    """

    # 'channelwise', or 'mixing' where the step multiplies by matrices.
    family: ClassVar[str] = "channelwise"
    input_size: int
    hidden_size: int
    max_recurrent_norm: float | None
    arrays: dict[str, Array]

    slots: ClassVar[tuple[str, ...]]
    gates: ClassVar[tuple[str, ...]]
    params: ClassVar[tuple[str, ...]] = ()
    # Stored arrays that hold several params as rows, e.g. {"R": ("r_i", "r_f")} for an R of shape (2, D).
    stacked: ClassVar[dict[str, tuple[str, ...]]] = {}
    # The last gates, if W_x does not deliver them: per-step inputs that all channels share, with their defaults.
    drives: ClassVar[dict[str, float]] = {}
    # Slots whose value never leaves an interval, whatever the input: {"h": (-1.0, 1.0)}. The solver projects on it.
    bounds: ClassVar[dict[str, tuple[float, float]]] = {}
    # Slots whose error counts as it is, not relative to their size: logarithms of what is public.
    logarithmic: ClassVar[tuple[str, ...]] = ()
    # The slot that a layer passes on.
    hidden: ClassVar[str] = "h"
    # Numbers that `step` reads from self (none of them an array); part of what a trace depends on.
    options: ClassVar[tuple[str, ...]] = ()
    # Default clamp of the recurrent params.
    default_max_recurrent_norm: ClassVar[float | None] = 0.5
    # Whether a solve should start from the exact scan with the recurrent weights dropped (long memory by design).
    picard_start: ClassVar[bool] = False
    # Whether the cell never forgets by design, so that where nothing else was asked for one time loop is the best plan.
    long_memory: ClassVar[bool] = False
    # Whether its two slots are the parts of one oscillation, as of a complex number, and of like size: rounding in them
    # is then bounded by their common length, which a rotation keeps, and not part by part, which would grow with each.
    oscillates: ClassVar[bool] = False
    # Tells apart classes of one name (a notebook defines the same class again and again).
    serial: ClassVar[int] = 0

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.serial = next(_SERIALS)

    def __init__(
        self,
        input_size: int | None = None,
        hidden_size: int | None = None,
        *,
        d_in: int | None = None,
        d_h: int | None = None,
        max_recurrent_norm: float | str | None = "default",
        xp: Namespace | None = None,
        device: Any = None,
        dtype: Any = None,
        seed: int | None = None,
    ) -> None:
        name = type(self).__name__
        n_in, n_h = resolve_sizes(name, input_size, hidden_size, d_in, d_h)
        default = isinstance(max_recurrent_norm, str) and max_recurrent_norm == "default"
        cap: Any = self.default_max_recurrent_norm if default else max_recurrent_norm
        check_cap(name, cap)
        xp = resolve_namespace(implied_namespace(device, dtype) if xp is None else xp)
        dtype = xp.float32 if dtype is None else dtype
        if dtype_name(dtype) not in FLOATS:
            raise TypeError(f"{name}: dtype must be one of {', '.join(FLOATS)}, got {dtype_name(dtype)}")
        made = self.initial_arrays(np.random.default_rng(seed), n_in, n_h)
        arrays = {key: cast(xp, xp.asarray(value, device=device), dtype) for key, value in made.items()}
        self._set(n_in, n_h, cap, arrays)
        self._announce()

    def _announce(self) -> None:
        """Lets the library of the arrays meet this class, if it has a front."""
        first = next(iter(self.arrays.values()), None)
        if first is not None and not isinstance(first, np.ndarray) and (front := front_of(first)) is not None:
            front.meet(type(self))

    def _set(self, n_in: int, n_h: int, cap: Any, arrays: dict[str, Array]) -> None:
        values = self.__dict__
        values.update(input_size=n_in, hidden_size=n_h, max_recurrent_norm=cap, arrays=arrays)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.options and "arrays" not in self.__dict__:
            # A subclass's __init__ sets its options before it calls this one's.
            self.__dict__[name] = value
            return
        raise AttributeError(f"{type(self).__name__} is immutable; make a changed copy with replace({name}=…)")

    def initial_arrays(self, rng: np.random.Generator, n_in: int, n_h: int) -> dict[str, np.ndarray]:
        """Fresh float64 arrays: recurrent vectors N(0, 1/sqrt(numel)), W_x uniform ±1/sqrt(I), bias 0."""
        made: dict[str, np.ndarray] = {}
        members = {row for names in self.stacked.values() for row in names}
        for name in self.params:
            if name not in members:
                made[name] = rng.standard_normal(n_h) / math.sqrt(n_h)
        for name, stack in self.stacked.items():
            shape = (len(stack), n_h)
            made[name] = rng.standard_normal(shape) / math.sqrt(math.prod(shape))
        bound = 1.0 / math.sqrt(n_in)
        rows = (len(self.gates) - len(self.drives)) * n_h
        made["W_x.weight"] = rng.uniform(-bound, bound, (rows, n_in))
        made["W_x.bias"] = np.zeros(rows)
        return made

    def step(self, xp: Namespace, *operands: Any) -> tuple[Any, ...]:
        """One time step on operands of any shape: ``slots``, ``gates``, ``params`` in this order."""
        raise NotImplementedError(f"{type(self).__name__} must define step(self, xp, {', '.join(self.operand_names)})")

    # What the solvers ask of a cell.

    @property
    def operand_names(self) -> tuple[str, ...]:
        return (*self.slots, *self.gates, *self.params)

    @property
    def d_in(self) -> int:
        return self.input_size

    @property
    def d_h(self) -> int:
        return self.hidden_size

    @property
    def state_slots(self) -> int:
        return len(self.slots)

    @property
    def hidden_slot(self) -> int:
        return self.slots.index(self.hidden)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of one sequence's state: (D,) or (S, D)."""
        return (self.d_h,) if self.state_slots == 1 else (self.state_slots, self.d_h)

    @property
    def jac_structure(self) -> str:
        """'diag' for one slot, 'blockS' for S slots: the Jacobian is S×S in each channel."""
        return "diag" if self.state_slots == 1 else f"block{self.state_slots}"

    @property
    def W_x(self) -> Projection:
        return Projection(self.arrays["W_x.weight"], self.arrays["W_x.bias"])

    @property
    def xp(self) -> Namespace:
        return array_api_compat.array_namespace(self.W_x.weight)

    @property
    def dtype(self) -> Any:
        return self.W_x.weight.dtype

    @property
    def device(self) -> Any:
        return array_api_compat.device(self.W_x.weight)

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that are not set: the stored arrays, and rows of stacked ones.
        arrays = self.__dict__.get("arrays", {})
        if name in arrays:
            return arrays[name]
        for stored, rows in type(self).stacked.items():
            if name in rows and stored in arrays:
                return arrays[stored][rows.index(name), :]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def recurrent(self, xp: Namespace, dtype: Any) -> list[Array]:
        """The params as the step sees them: clamped, in `dtype`, each (D,)."""
        cap = self.max_recurrent_norm
        values = []
        for name in self.params:
            a = cast(xp, getattr(self, name), dtype)
            values.append(a if cap is None else xp.clip(a, -cap, cap))
        return values

    def clamp_masks(self, xp: Namespace, dtype: Any) -> dict[str, Array]:
        """Per stored array, 1 where the clamp lets the gradient through and 0 where it cuts it."""
        cap = self.max_recurrent_norm
        stored = [n for n in self.arrays if not n.startswith("W_x.")]
        if cap is None:
            return {n: xp.ones_like(self.arrays[n], dtype=dtype) for n in stored}
        return {n: cast(xp, xp.abs(self.arrays[n]) <= cap, dtype) for n in stored}

    def replace(self, *, max_recurrent_norm: Any = "same", **arrays: Array) -> ChannelwiseCell:
        """A copy with some arrays exchanged (``W_x.weight`` is written ``W_x_weight`` or given by ``**{...}``)."""
        merged = dict(self.arrays)
        for name, value in arrays.items():
            key = name.replace("W_x_", "W_x.")
            if key not in merged:
                raise TypeError(f"{type(self).__name__} has no array {name!r}; it has {', '.join(merged)}")
            common_namespace(type(self).__name__, **{f"the cell's {key}": merged[key], f"the new {key}": value})
            if tuple(value.shape) != tuple(merged[key].shape):
                raise ValueError(f"{key}: wanted shape {tuple(merged[key].shape)}, got {tuple(value.shape)}")
            if value.dtype != self.dtype:
                raise TypeError(
                    f"{key}: wanted {dtype_name(self.dtype)} like the cell's other arrays, got "
                    f"{dtype_name(value.dtype)}; cast it, or the whole cell with to(dtype=…)"
                )
            merged[key] = value
        same = isinstance(max_recurrent_norm, str) and max_recurrent_norm == "same"
        cap = self.max_recurrent_norm if same else max_recurrent_norm
        check_cap(type(self).__name__, cap)
        return self._copy(cap, merged)

    def _copy(self, cap: Any, arrays: dict[str, Array]) -> ChannelwiseCell:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._set(self.d_in, self.d_h, cap, arrays)
        return new

    def to(self, xp: Namespace | None = None, device: Any = None, dtype: Any = None) -> ChannelwiseCell:
        """The same cell with its arrays in another namespace, device or dtype."""
        target = self.xp if xp is None else resolve_namespace(xp)
        moved = {}
        for name, a in self.arrays.items():
            if target is not self.xp:
                if hasattr(a, "detach"):
                    # A tensor, which may be on a GPU and may be watched by autograd.
                    host = a.detach().cpu().numpy()
                elif array_api_compat.is_cupy_array(a):
                    host = a.get()
                else:
                    host = np.from_dlpack(a) if hasattr(a, "__dlpack__") else np.asarray(a)
                a = target.asarray(host, device=device, copy=True)
            elif device is not None:
                a = array_api_compat.to_device(a, device)
            moved[name] = a if dtype is None else cast(target, a, dtype)
        new = self._copy(self.max_recurrent_norm, moved)
        new._announce()
        return new

    def state_dict(self) -> dict[str, Array]:
        """The stored arrays by name."""
        return dict(self.arrays)

    # Drives.

    @property
    def is_driven(self) -> bool:
        """Whether W_x delivers every gate: always, but for a cell that still has to be given its drives."""
        return not self.drives or int(self.W_x.weight.shape[0]) == len(self.gates) * self.d_h

    def driven(self, weight: Array, bias: Array) -> ChannelwiseCell:
        """The cell that reads its drives from its last features, by a W_x that hands them on."""
        new = self._copy(self.max_recurrent_norm, {**self.arrays, "W_x.weight": weight, "W_x.bias": bias})
        new.__dict__["input_size"] = int(weight.shape[1])
        return new

    def check_drive(self, name: str, least: float) -> None:
        """Refuses a drive whose least value is one for which the cell's equations make no sense."""

    # Subclasses with better coordinates for the solve override these three together.

    def solve_cell(self) -> ChannelwiseCell:
        """The cell in the coordinates in which the solver works; itself unless a subclass knows better ones."""
        return self

    def encode(self, xp: Namespace, *public: Array) -> tuple[Array, ...]:
        """Public slots to solve slots."""
        return public

    def decode(self, xp: Namespace, *solve: Array) -> tuple[Array, ...]:
        """Solve slots to public slots."""
        return solve

    def check_h0(self, xp: Namespace, h0: Array) -> None:
        """Refuses a starting state that the cell's equations cannot continue from."""

    def __repr__(self) -> str:
        cap = self.max_recurrent_norm
        # In the place of its arrays a cell may hold whatever a library maps over them, or nothing.
        arrays = is_array(self.arrays.get("W_x.weight"))
        held = f"{dtype_name(self.dtype)}, {namespace_name(self.xp)}" if arrays else "no arrays"
        return (
            f"{type(self).__name__}(input_size={self.d_in}, hidden_size={self.d_h}, max_recurrent_norm={cap}, "
            f"{held})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), dict(self.__dict__))


def _restore(kind: type[ChannelwiseCell], values: dict[str, Any]) -> ChannelwiseCell:
    new = object.__new__(kind)
    new.__dict__.update(values)
    new._announce()
    return new
