"""What a call of linear attention is, checked before any work."""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import device

from pararnn.arrays import (
    FLOATS,
    Array,
    Namespace,
    cast,
    common_namespace,
    compute_dtype,
    dtype_name,
    known,
    namespace_name,
)
from pararnn.linear_attention.frame import Frame, frame_of, offsets_of

FORMS = ("auto", "recurrent", "chunk", "subchunk", "log", "kernel")
# Up to here a loop over time needs no more operations than the chunks do.
SHORT = 8
# Rows of a chunk. Twice as many double the work inside chunks and halve that on states, which NumPy does quickly.
CHUNK, NUMPY_CHUNK = 64, 32
SUBCHUNK = 16


@dataclass(frozen=True)
class Call:
    """A checked call: the arrays in their own dtype, and everything that is decided from shapes and options.

    Attributes:
        arrays: by argument name, (B, T, H, K or V), in the order of the function's arguments.
        initial: (B, H, K, V), or (S, H, K, V) for S packed sequences, in the dtype of the work.
        initial_dtype: the dtype it was given in, or None if it was not given.
        offsets: the packed sequences' borders, or None.
        form: what was asked for.
        chunk, base: rows of a chunk, and of the blocks whose pairs are decayed one by one.
    """

    what: str
    xp: Namespace
    arrays: dict[str, Array]
    initial: Array
    initial_dtype: Any
    offsets: np.ndarray | None
    form: str
    chunk: int
    base: int
    scale: float

    @property
    def frame(self) -> Frame:
        return frame_of(self.time, self.chunk, self.offsets)

    @property
    def time(self) -> int:
        return next(iter(self.arrays.values())).shape[1]

    @property
    def dtype(self) -> Any:
        """The dtype of the result."""
        return self.arrays["v"].dtype

    @property
    def work_dtype(self) -> Any:
        return self.initial.dtype

    def worked(self, name: str) -> Array:
        """An argument in the dtype of the work."""
        return cast(self.xp, self.arrays[name], self.work_dtype)

    @property
    def queries(self) -> Array:
        """The first argument, times the scale, in the dtype of the work."""
        q = self.worked(next(iter(self.arrays)))
        return q if self.scale == 1.0 else q * self.scale


def checked(
    what: str,
    arrays: dict[str, Array],
    *,
    widths: dict[str, str],
    scale: float | None,
    default_scale: float | None,
    initial_state: Array | None,
    form: str,
    chunk: int | None,
    subchunk: int | None,
    cu_seqlens: Any,
) -> Call:
    """The call, or an error that says what was wanted; `widths` names each argument's last axis: K, V, or 'K or 1'."""
    xp = common_namespace(what, **arrays, initial_state=initial_state)
    for name, a in arrays.items():
        if a.ndim != 4:
            raise ValueError(f"{what}: {name} must be (B, T, H, {widths[name]}), got {tuple(a.shape)}")
        if dtype_name(a.dtype) not in FLOATS:
            raise TypeError(f"{what}: {name} must be floating ({', '.join(FLOATS)}), got {dtype_name(a.dtype)}")
    names = list(arrays)
    key, value = arrays["k"], arrays["v"]
    sizes = {"K": key.shape[-1], "V": value.shape[-1]}
    for name in names:
        a, width = arrays[name], widths[name]
        allowed = {sizes[w] if w in sizes else 1 for w in width.split(" or ")}
        if tuple(a.shape[:3]) != tuple(key.shape[:3]) or a.shape[-1] not in allowed:
            sizes_wanted = ", ".join([*map(str, key.shape[:3]), " or ".join(map(str, sorted(allowed, reverse=True)))])
            raise ValueError(
                f"{what}: {name} must be (B, T, H, {width}) = ({sizes_wanted}) to go with "
                f"k {tuple(key.shape)}, got {tuple(a.shape)}"
            )
    batch, time, heads, keys = key.shape
    values = sizes["V"]
    if 1 < time < heads:
        warnings.warn(
            f"{what}: T={time} is less than H={heads}; the layout is (B, T, H, K), time before heads",
            UserWarning,
            stacklevel=4,
        )
    offsets = offsets_of(what, cu_seqlens, batch, time)
    rows, letter = (batch, "B") if offsets is None else (len(offsets) - 1, "S")
    work = compute_dtype(xp, _widest(arrays, initial_state))
    if initial_state is None:
        initial = xp.zeros((rows, heads, keys, values), dtype=work, device=device(key))
    else:
        wanted = (rows, heads, keys, values)
        if tuple(initial_state.shape) != wanted:
            raise ValueError(
                f"{what}: initial_state must be ({letter}, H, K, V) = {wanted}, keys before values, "
                f"got {tuple(initial_state.shape)}"
            )
        if dtype_name(initial_state.dtype) not in FLOATS:
            raise TypeError(f"{what}: initial_state must be floating, got {dtype_name(initial_state.dtype)}")
        initial = cast(xp, initial_state, work)
    if form not in FORMS:
        raise ValueError(f"{what}: form must be one of {', '.join(FORMS)}, got {form!r}")
    usual = NUMPY_CHUNK if namespace_name(xp) == "numpy" else CHUNK
    chunk, base = _sizes(what, form, chunk, subchunk, time, usual)
    if scale is None:
        scale = (1.0 / math.sqrt(keys) if keys else 1.0) if default_scale is None else default_scale
    given = None if initial_state is None else initial_state.dtype
    return Call(what, xp, arrays, initial, given, offsets, form, chunk, base, float(scale))


def _widest(arrays: dict[str, Array], initial: Array | None) -> Any:
    """float64 if anything is, else float32."""
    every = [*arrays.values(), *([] if initial is None else [initial])]
    for name in ("float64", "float32"):
        for a in every:
            if dtype_name(a.dtype) == name:
                return a.dtype
    return every[0].dtype


def _sizes(what: str, form: str, chunk: int | None, subchunk: int | None, time: int, usual: int) -> tuple[int, int]:
    for name, size in (("chunk", chunk), ("subchunk", subchunk)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1 or size & (size - 1)):
            raise ValueError(f"{what}: {name} must be a power of two, got {size!r}; a chunk is cut into halves")
    if chunk is None:
        chunk = min(usual, 1 << max(0, time - 1).bit_length()) if subchunk is None else max(usual, subchunk)
    if form != "subchunk":
        return chunk, 1 if subchunk is None else _within(what, subchunk, chunk)
    return chunk, min(SUBCHUNK, chunk) if subchunk is None else _within(what, subchunk, chunk)


def _within(what: str, subchunk: int, chunk: int) -> int:
    if subchunk > chunk:
        raise ValueError(f"{what}: subchunk={subchunk} must not exceed chunk={chunk}")
    return subchunk


# A log decay that rounding has left a little above zero is no mistake.
ABOVE_ZERO = 1e-6


def refuse_growth(what: str, name: str, xp: Namespace, g: Array) -> None:
    """Refuses a log decay above zero, where its values can be read without waiting for a device or a tracer."""
    if not _readable(xp, g):
        return
    # A NaN is not refused: it goes through and shows in the result.
    if known(xp.any(g > ABOVE_ZERO)):
        largest = float(xp.max(xp.where(xp.isnan(g), xp.zeros_like(g), g)))
        raise ValueError(
            f"{what}: {name} must be ≤ 0, and its largest entry is {largest:.3g}; it is the logarithm of a decay in "
            "[0, 1], so pass log(decay) or logsigmoid of a gate"
        )


def _readable(xp: Namespace, g: Array) -> bool:
    library = namespace_name(xp)
    if library == "torch":
        return str(device(g)) == "cpu" and not sys.modules["torch"].compiler.is_compiling()
    return library in ("numpy", "array_api_strict")
