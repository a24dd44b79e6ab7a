"""Run by test_cuda_source.py under the sanitizers: every cell on the kernels, forward and backward, as JSON lines.

`python cuda_host_cells.py` checks all cells; `python cuda_host_cells.py past-the-end` makes one kernel write past an
array, which the sanitizer has to stop.
"""

from __future__ import annotations

import json
import sys

import numpy as np

import pararnn
from cuda_host import SANITIZED, HostBackend, HostCard
from pararnn import ChannelwiseCell, NewtonConfig, NewtonStats, newton_vjp, register_backend, sequential_apply
from pararnn.programs import programs_of
from pararnn_cupy.launch import run_forward
from pararnn_cupy.layout import Layout
from support import error_of, start_for


class Everything(ChannelwiseCell):
    """Each operation that a step may use, in two slots that depend on each other."""

    slots, gates, params, hidden = ("a", "b"), ("u", "v"), ("p", "q"), "b"

    def step(self, xp, a, b, u, v, p, q):
        near = xp.where(u < v, xp.sin(a), xp.cos(a)) + xp.where(u <= 0.5, 0.1, -0.1) * xp.sign(v)
        near = near + xp.where(u > 2.0, 0.2, 0.0) + xp.where(v >= 2.0, 0.0, 0.2) + xp.where(v == 0.0, 1.0, 0.0)
        grown = xp.log1p(xp.abs(b)) + xp.expm1(-xp.abs(u)) - xp.log(1.5 + v * v) / xp.sqrt(2.0 + u * u)
        a = 0.3 * xp.tanh(p * a + near) - 0.1 * (v * v) ** 1.5 / (1.0 + xp.exp(v))
        twice = p * b + p * b
        b = 0.2 * xp.logaddexp(grown, twice) - xp.minimum(q * b, xp.maximum(0.1 * a, -0.5)) + 0.1 / (1.0 + xp.exp(-a))
        return -a, b


def cells() -> list[type[ChannelwiseCell]]:
    """Ours whose steps are elementwise, and Everything."""
    named = (getattr(pararnn.cells, name) for name in sorted(dir(pararnn.cells)))
    kinds = [k for k in named if isinstance(k, type) and hasattr(k, "slots")]
    return [*(k for k in kinds if k.family == "channelwise"), Everything]


def check(kind: type[ChannelwiseCell], dtype: str, length: int | None, packed: bool = False) -> dict[str, object]:
    """Errors of states and gradients of one solve; 23 steps, 3 features and 5 channels are no multiples of anything.

    Packed: one row of documents that start from states of their own, with resets and padding.
    """
    cell = kind(3, 5, seed=0)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1 if packed else 2, 23, 3)).astype(np.float32)
    h0 = start_for(cell, 4 if packed else 2)
    packing: dict[str, object] = {}
    if packed:
        packing = {
            "cu_seqlens": [0, 9, 9, 12, 23],
            "reset": rng.random((1, 23)) > 0.9,
            "mask": rng.random((1, 23)) > 0.2,
        }
    wide, wide_x, wide_h0 = cell.to(dtype=np.dtype("float64")), x.astype(np.float64), h0.astype(np.float64)
    mine, given = cell.to(dtype=np.dtype(dtype)), x.astype(dtype)
    stats = NewtonStats()
    config = NewtonConfig(scan_backend=HostBackend.name, segment_len=length, warmup=2 if length else None)
    states, pullback = newton_vjp(mine, given, config, h0, stats=stats, **packing)
    true, true_pullback = newton_vjp(wide, wide_x, NewtonConfig(scan_backend="array"), wide_h0, **packing)
    seed = np.random.default_rng(5).standard_normal(true.shape)
    found, expected = pullback(seed.astype(dtype)), true_pullback(seed)
    worst = 0.0
    pairs = [(found.x, expected.x), (found.h0, expected.h0)]
    pairs += [(found.params[name], value) for name, value in expected.params.items()]
    for a, b in pairs:
        worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)))
    return {
        "cell": kind.__name__, "dtype": dtype, "length": length, "states": error_of(cell, states, true),
        "loop": error_of(cell, states, sequential_apply(mine, given, h0, **packing)), "gradients": worst,
        "converged": stats.converged, "path": stats.path,
    }  # fmt: skip


def brain_floats() -> dict[str, object]:
    """bfloat16, which NumPy lacks, as its bits; against a loop that reads the same rounded gate inputs."""
    programs = programs_of(pararnn.ParaGRU(1, 1))
    rng = np.random.default_rng(0)
    gates = rng.standard_normal((2, 23, 3, 5)).astype(np.float32)
    bits = (gates.view(np.uint32) >> 16).astype(np.uint16)
    params = 0.5 * rng.standard_normal((3, 5)).astype(np.float32)
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    card = HostCard(programs, "bfloat16", SANITIZED)
    out, _, _ = run_forward(
        card, programs, "bfloat16", bits, None, None, params, None, Layout(7, 4, 2, 32, 4), 1e-3, 5e-3
    )
    plain, _, _ = run_forward(
        HostCard(programs, "float32", SANITIZED), programs, "float32", exact, None, None, params, None,
        Layout(23, 1, 0, 32, 1), 1e-3, 5e-3,
    )  # fmt: skip
    states = (out.astype(np.uint32) << 16).view(np.float32)
    return {"cell": "ParaGRU", "dtype": "bfloat16", "length": 7, "loop": float(np.abs(states - plain).max())}


def past_the_end() -> None:
    """Says that there are more steps than there is memory for."""
    programs = programs_of(pararnn.ParaTanh(1, 1))
    card = HostCard(programs, "float32", SANITIZED)
    gates, params = np.zeros((1, 8, 1, 4), np.float32), np.zeros((1, 4), np.float32)
    states = np.zeros((1, 6, 1, 4), np.float32)
    per_channel = np.zeros((1, 4), np.float32), *np.zeros((2, 1, 4), np.int32)
    arrays = map(card.address, (gates, None, None, params, None, None, None, states, *per_channel))
    card.launch("time_loop", 4, 32, (*arrays, 1, 8, 4))


if __name__ == "__main__":
    if sys.argv[1:] == ["past-the-end"]:
        past_the_end()
    else:
        register_backend(HostBackend(SANITIZED))
        jobs = [(kind, "float32", length) for kind in cells() for length in (None, 7)]
        jobs += [(pararnn.ParaLSTM, dtype, length) for dtype in ("float16", "float64") for length in (None, 7)]
        jobs += [(pararnn.ParaLSTM, "float32", length, True) for length in (None, 7)]
        for job in jobs:
            print(json.dumps(check(*job)), flush=True)
        print(json.dumps(brain_floats()), flush=True)
