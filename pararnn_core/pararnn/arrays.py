"""What the core asks of an array library beyond the standard: which one it is, its dtypes, its quirks."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from functools import lru_cache
from typing import Any

import array_api_compat
import numpy as np

Array = Any
Namespace = Any


def is_array(value: Any) -> bool:
    return array_api_compat.is_array_api_obj(value)


def namespace_name(xp: Namespace) -> str:
    """The library behind a namespace: 'numpy', 'torch', 'jax', 'cupy', 'array_api_strict', …"""
    name = xp.__name__.removeprefix("array_api_compat.")
    return name.split(".")[0]


def resolve_namespace(xp: Namespace | None) -> Namespace:
    """`xp` as an array-API namespace; None is NumPy, and raw numpy/torch/cupy modules are accepted."""
    if xp is None:
        import array_api_compat.numpy as numpy_namespace

        return numpy_namespace
    if getattr(xp, "__name__", "") == "numpy":
        return resolve_namespace(None)
    if hasattr(xp, "__array_api_version__"):
        return xp
    for make in (lambda: xp.zeros(0), lambda: xp.empty(0)):
        with contextlib.suppress(Exception):
            return array_api_compat.array_namespace(make())
    raise TypeError(f"xp: wanted an array namespace such as numpy or torch, got {xp!r}")


# Device names that no other library uses.
_TORCH_DEVICES = ("cuda", "mps", "xpu", "meta")


def implied_namespace(device: Any, dtype: Any) -> Namespace | None:
    """The library that a device or dtype can only belong to, or None if either leaves it open."""
    by_type = any(type(given).__module__.partition(".")[0] == "torch" for given in (device, dtype))
    by_name = isinstance(device, str) and device.partition(":")[0] in _TORCH_DEVICES
    return importlib.import_module("torch") if by_type or by_name else None


def common_namespace(what: str, **arrays: Array | None) -> Namespace:
    """The one namespace of all given arrays; a mixture is a TypeError that names each."""
    given = {name: a for name, a in arrays.items() if a is not None}
    names: dict[str, Namespace] = {}
    for name, a in given.items():
        if not is_array(a):
            raise TypeError(
                f"{what}: {name} must be an array (NumPy, torch, JAX, CuPy, …), got {type(a).__name__}; "
                "convert it first, for instance with numpy.asarray"
            )
        names[name] = array_api_compat.array_namespace(a)
    found = {namespace_name(xp) for xp in names.values()}
    if len(found) > 1:
        listing = ", ".join(f"{n} is {namespace_name(xp)}" for n, xp in names.items())
        raise TypeError(f"{what}: all arrays must come from one library, but {listing}; convert them to one")
    # An array that a JAX transformation traces is on no device yet, and one that is sharded is on several.
    found_on = {n: array_api_compat.device(a) for n, a in given.items()}
    devices = {n: d for n, d in found_on.items() if d is not None and not hasattr(d, "device_set")}
    if len(set(map(str, devices.values()))) > 1:
        listing = ", ".join(f"{n} on {d}" for n, d in devices.items())
        raise ValueError(f"{what}: all arrays must be on one device, but {listing}; move them to one")
    return next(iter(names.values()))


def dtype_name(dtype: Any) -> str:
    """'float32', 'bfloat16', … for a dtype of any library."""
    kind: Any = type(dtype)
    return _dtype_name(kind, dtype)


@lru_cache(maxsize=64)
def _dtype_name(kind: type, dtype: Any) -> str:
    # The kind comes first in the cache's key, so that dtypes of two libraries are never compared with each other.
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return name.rsplit(".", 1)[-1]


FLOATS = ("float64", "float32", "float16", "bfloat16")


def has_float64(xp: Namespace) -> bool:
    """Whether arrays of `xp` can be float64; JAX gives float32 instead unless told otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dtype_name(xp.zeros(0, dtype=xp.float64).dtype) == "float64"


def compute_dtype(xp: Namespace, dtype: Any) -> Any:
    """The dtype in which a solve works: half precision is stored in half and computed in float32."""
    return xp.float32 if dtype_name(dtype) in ("float16", "bfloat16") else dtype


def epsilon(dtype: Any) -> float:
    """Spacing of 1.0 in `dtype`."""
    return {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype_name(dtype)]


def cast(xp: Namespace, a: Array, dtype: Any) -> Array:
    """`a` in `dtype`, without a copy where it has it already."""
    return a if a.dtype == dtype else xp.astype(a, dtype)


def quiet(xp: Namespace) -> contextlib.AbstractContextManager[Any]:
    """Silences floating-point warnings of libraries that raise them; results carry their own inf and NaN.

    A saturated gate overflows inside exp and still has the right limit, so such warnings would cry wolf, and a
    caller who turns warnings into errors must be able to run finite data.
    """
    through_numpy = namespace_name(xp) in ("numpy", "array_api_strict")
    return np.errstate(all="ignore") if through_numpy else contextlib.nullcontext()


def known(flag: Array) -> bool:
    """Whether a one-element array is known to be true; one that a transformation traces has no value to know."""
    try:
        return bool(flag)
    except (TypeError, RuntimeError):
        return False


def on_host(a: Array) -> bool:
    """Whether the array's values are in the host's memory, so that looking at them waits for no device."""
    place = array_api_compat.device(a)
    kind = getattr(place, "type", None) or getattr(place, "platform", None) or str(place)
    return kind == "cpu" or namespace_name(array_api_compat.array_namespace(a)) in ("numpy", "array_api_strict")


def same_bits(xp: Namespace, a: Array, b: Array) -> Array:
    """Elementwise: equal, or both NaN. (Zeros of either sign count as equal.)"""
    return (a == b) | (xp.isnan(a) & xp.isnan(b))
