"""What the scans accept: one namespace, floating dtypes, a known method, an axis that exists."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

Array = Any

METHODS = ("assoc", "seq")


def namespace_of(function: str, **arrays: Array | None) -> Any:
    """Give the one namespace that all arrays come from (None is left out), or say why there is none."""
    spaces = {}
    for name, array in arrays.items():
        if array is None:
            continue
        try:
            spaces[name] = array_namespace(array)
        except TypeError:
            raise TypeError(
                f"{function} wants arrays of one array-API library; {name} is a {type(array).__name__}. "
                "Make it an array of the same library as the others first."
            ) from None
    if len({id(space) for space in spaces.values()}) > 1:
        came = ", ".join(
            f"{name} from {space.__name__.removeprefix('array_api_compat.')}"
            for name, space in spaces.items()
        )
        raise TypeError(
            f"{function} wants all its arrays from one library; came {came}. "
            "Convert them to one library first."
        )
    return next(iter(spaces.values()))


def dtypes_of(function: str, xp: Any, *, real: bool = False, **arrays: Array | None) -> tuple[Any, Any]:
    """Give (result dtype, dtype to compute in) after checking that every array is floating.

    The first two arrays decide the result; further ones (the initial state) are cast to it. Half precision is
    computed in float32.
    """
    given = {name: array.dtype for name, array in arrays.items() if array is not None}
    kinds = "real floating" if real else ("real floating", "complex floating")
    for name, dtype in given.items():
        if not (_is_half(dtype) or xp.isdtype(dtype, kinds)):
            wanted = "real floating-point arrays" if real else "floating-point arrays"
            raise TypeError(
                f"{function} wants {wanted}; {name} has dtype {dtype}. "
                f"Cast it first, for example with xp.astype({name}, xp.float32)."
            )
    result = xp.result_type(*list(given.values())[:2])
    if not real and "initial" in given and not xp.isdtype(result, "complex floating"):
        if not _is_half(given["initial"]) and xp.isdtype(given["initial"], "complex floating"):
            raise TypeError(
                f"{function} wants a real initial state where jac and residual are real; initial has dtype "
                f"{given['initial']}. Cast residual to a complex dtype to get complex states."
            )
    return result, xp.float32 if _is_half(result) else result


def check_method(function: str, method: str) -> None:
    """Refuse a method that is neither the tree nor the loop."""
    if method not in METHODS:
        raise ValueError(
            f"{function} knows method='assoc' (a tree) and method='seq' (a plain loop); came {method!r}."
        )


def normalised_axis(function: str, axis: int, ndim: int) -> int:
    """Give the axis counted from the front."""
    if not -ndim <= axis < ndim:
        raise ValueError(f"{function} was asked to scan axis {axis} of an array with {ndim} axes.")
    return axis % ndim


def _is_half(dtype: Any) -> bool:
    # By name: the standard has no half types, and NumPy's bfloat16 (from ml_dtypes) belongs to no kind.
    return str(dtype).rpartition(".")[2] in ("float16", "bfloat16")
