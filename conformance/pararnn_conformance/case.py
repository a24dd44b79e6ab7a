"""Cases: a cell, its input and its starting state, made from a recipe; the same numbers for every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from pararnn import (
    ChannelwiseCell,
    ParaCfC,
    ParaGRU,
    ParaLEM,
    ParaLRU,
    ParaLSTM,
    ParaMinGRU,
    ParaMinLSTM,
    ParaNLRU,
    ParaS5,
    ParaSLSTM,
    ParaTanh,
    ParaTitans,
    ParaUnICORNN,
    sequential_apply,
)
from pararnn.drives import with_drives
from pararnn_conformance import reference
from pararnn_conformance.own_cell import Echo

KINDS: dict[str, Callable[..., ChannelwiseCell]] = {
    "ParaGRU": ParaGRU,
    "ParaLSTM": ParaLSTM,
    "ParaSLSTM": ParaSLSTM,
    "ParaTanh": ParaTanh,
    "Echo": Echo,
}
CELLS = tuple(KINDS)
# Cells beyond those that every check runs on; the topic `zoo` has theirs.
ZOO: dict[str, Callable[..., ChannelwiseCell]] = {
    kind.__name__: kind
    for kind in (
        ParaCfC, ParaLEM, ParaLRU, ParaMinGRU, ParaMinLSTM, ParaNLRU, ParaS5, ParaTitans, ParaUnICORNN,
    )
}  # fmt: skip
# What keeps the state of each cell for long: the gate whose bias to move, and by how much. Others do so as they are.
_MEMORY = {
    "ParaGRU": ("z", -5.0), "ParaLSTM": ("f", 5.0), "ParaSLSTM": ("i", -5.0), "Echo": ("k", 5.0),
    "ParaCfC": ("f", -5.0), "ParaLEM": ("q", -5.0), "ParaMinGRU": ("z", -5.0), "ParaMinLSTM": ("i", -5.0),
    "ParaNLRU": ("a", 5.0), "ParaTitans": ("alpha", -5.0),
}  # fmt: skip


class Numbers(NamedTuple):
    """The case in NumPy float64, each number exactly one of the case's dtype; h0 None where the case has none."""

    cell: ChannelwiseCell
    x: np.ndarray
    h0: np.ndarray | None


@dataclass(frozen=True)
class Case:
    """A recipe.

    Attributes:
        regime: 'gentle' (initial weights, clamped by default); 'clamped' (weights 3·N(0,1), most of them beyond the
            clamp); 'strong' (the same without a clamp); 'wild' (and inputs three times as large); 'long' (gates that
            keep the state); 'latch' (recurrent weights uniform in ±15).
        coarse: inputs and input weights are multiples of 1/32, so that gate inputs are exact in every order of
            evaluation and results can be compared bit for bit.
        start: whether there is an h0.
    """

    kind: str
    dtype: str = "float32"
    time: int = 65
    batch: int = 2
    width: int = 5
    features: int = 3
    regime: str = "gentle"
    seed: int = 0
    coarse: bool = False
    start: bool = True

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values, each rounded to `dtype`."""
    if dtype == "bfloat16":
        bits = np.asarray(values, np.float32).view(np.uint32) + np.uint32(0x8000)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    return np.asarray(values).astype(dtype).astype(np.float64)


@lru_cache(maxsize=512)
def numbers(case: Case) -> Numbers:
    """The case's arrays. They are shared: do not write into them."""
    rng = np.random.default_rng(case.seed + 1)
    make = KINDS.get(case.kind) or ZOO[case.kind]
    cell = make(case.features, case.width, dtype=np.float64, seed=case.seed)
    arrays = dict(cell.arrays)
    if case.coarse:
        arrays["W_x.weight"] = np.round(32.0 * arrays["W_x.weight"]) / 32.0
    recurrent = [name for name in arrays if not name.startswith("W_x.")]
    cap = cell.max_recurrent_norm if case.regime in ("gentle", "long", "clamped") else None
    if case.regime in ("clamped", "strong", "wild"):
        arrays.update({name: 3.0 * rng.standard_normal(arrays[name].shape) for name in recurrent})
    elif case.regime == "latch":
        arrays.update({name: rng.uniform(-15.0, 15.0, arrays[name].shape) for name in recurrent})
    elif case.regime == "long":
        if case.kind == "ParaTanh":
            arrays["a"], cap = 1.0 - 0.02 * rng.random(case.width), None
            arrays["W_x.weight"] = arrays["W_x.weight"] / 64.0
        elif case.kind in _MEMORY:
            gate, shift = _MEMORY[case.kind]
            place = cell.gates.index(gate) * case.width
            bias = np.zeros_like(arrays["W_x.bias"])
            bias[place : place + case.width] = shift
            arrays["W_x.bias"] = bias
    if case.regime == "gentle" and not case.coarse:
        arrays["W_x.bias"] = 0.2 * rng.standard_normal(arrays["W_x.bias"].shape)
    x = rng.standard_normal((case.batch, case.time, case.features)) * (3.0 if case.regime == "wild" else 1.0)
    if case.coarse:
        x = np.round(32.0 * x) / 32.0
    h0 = _start(cell, rng, case.batch) if case.start else None
    cell = cell.replace(max_recurrent_norm=cap, **{name: rounded(a, case.dtype) for name, a in arrays.items()})
    x = rounded(x, case.dtype)
    # Steps of uneven duration; from here on one more feature of a cell like any other.
    drives = {name: rounded(rng.exponential(1.0, x.shape[:2]), case.dtype) for name in cell.drives}
    cell, x = with_drives("conformance", cell, x, drives)
    return Numbers(cell, x, None if h0 is None else rounded(h0, case.dtype))


def _start(cell: ChannelwiseCell, rng: np.random.Generator, batch: int) -> np.ndarray:
    """A starting state of either sign that the cell could have reached."""
    h0 = 0.4 * rng.uniform(-1.0, 1.0, (batch, *cell.state_shape))
    if isinstance(cell, ParaSLSTM):
        h0[:, 1, :] = 0.5 + np.abs(h0[:, 1, :])
    return h0


def work_dtype(dtype: str) -> str:
    """The dtype in which a problem of `dtype` is computed."""
    return "float64" if dtype == "float64" else "float32"


@lru_cache(maxsize=512)
def loop_states(case: Case) -> np.ndarray:
    """The oracle: `sequential_apply` on the host, in the dtype of the computation, (B, T, …)."""
    cell, x, h0 = numbers(case)
    dtype = np.dtype(work_dtype(case.dtype))
    return sequential_apply(cell.to(dtype=dtype), x.astype(dtype), None if h0 is None else h0.astype(dtype))


@lru_cache(maxsize=512)
def wide_states(case: Case) -> np.ndarray:
    """The suite's own loop in float64, (B, T, …)."""
    cell, x, h0 = numbers(case)
    return reference.public(cell, reference.states(cell, x, h0))


@lru_cache(maxsize=512)
def cotangent(case: Case) -> np.ndarray:
    """A random cotangent of the states, in float64 numbers of the case's dtype."""
    rng = np.random.default_rng(case.seed + 2)
    cell, x, _ = numbers(case)
    return rounded(rng.standard_normal((*x.shape[:2], *cell.state_shape)), case.dtype)


@lru_cache(maxsize=512)
def wide_gradients(case: Case) -> dict[str, np.ndarray]:
    """Back-propagation through time in float64 for `cotangent(case)`: 'x', 'h0' and the stored arrays."""
    cell, x, h0 = numbers(case)
    return reference.gradients(cell, x, h0, cotangent(case))
