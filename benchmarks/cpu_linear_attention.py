"""Linear attention on a CPU: the chunk forms against the loop over time, and the error of each form against the decay.

    python benchmarks/cpu_linear_attention.py [--picture docs/decay-error.svg]

Writes benchmarks/results/cpu_linear_attention.json and prints tables. All in NumPy, float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from timing import best_of, header, save

from pararnn.linear_attention import gla, gla_vjp, rwkv6, rwkv7

DECAYS = np.round(np.geomspace(0.01, 1e4, 37), 4)


def inputs(time: int, heads: int, width: int) -> dict[str, tuple[Any, ...]]:
    rng = np.random.default_rng(0)

    def normal() -> np.ndarray:
        return rng.standard_normal((1, time, heads, width)).astype(np.float32)

    q, k, v, a = normal(), normal(), normal(), normal()
    g = -0.1 * np.abs(normal())
    a /= np.linalg.norm(a, axis=-1, keepdims=True)
    return {
        "gla": (q, k, v, g),
        "rwkv6": (q, k, v, g, normal()[0, 0]),
        "rwkv7": (q, g, k / 8, v, -a, a * rng.uniform(size=a.shape).astype(np.float32)),
    }


def speed() -> list[dict[str, Any]]:
    """Milliseconds of the loop and of the chunk form at T = 16,384."""
    rows = []
    for heads, width in ((1, 16), (1, 32), (1, 64), (4, 64)):
        for name, args in inputs(16384, heads, width).items():
            function = {"gla": gla, "rwkv6": rwkv6, "rwkv7": rwkv7}[name]
            row: dict[str, Any] = {"kind": name, "T": 16384, "H": heads, "K": width}
            row["loop_ms"] = 1e3 * best_of(lambda: function(*args, form="recurrent"), least=2)["min"]  # noqa: B023
            row["chunk_ms"] = 1e3 * best_of(lambda: function(*args, form="chunk"))["min"]  # noqa: B023
            rows.append(row)
            print(
                f"{name:6} H={heads} K=V={width:3}  loop {row['loop_ms']:7.1f} ms  chunk {row['chunk_ms']:6.1f} ms  "
                f"{row['loop_ms'] / row['chunk_ms']:5.1f} times",
                flush=True,
            )
    return rows


def one_anchor(q: Any, k: Any, v: Any, g: Any) -> np.ndarray:
    """The textbook chunk of 64: queries times e^b, keys divided by it, as one product."""
    with np.errstate(all="ignore"):
        b = np.cumsum(g, axis=1)
        scores = np.einsum("bthk,bshk->bhts", q * np.exp(b), k / np.exp(b))
        return np.einsum("bhts,bshv->bthv", np.where(np.tri(q.shape[1]) > 0, scores, 0), v)


def differences(q: Any, k: Any, v: Any, g: Any) -> np.ndarray:
    """Pairs decayed by exp(b_i - b_j), a difference of cumulative sums."""
    with np.errstate(all="ignore"):
        b = np.cumsum(g, axis=1)
        factor = np.exp(np.minimum(b[:, :, None] - b[:, None], 0))
        scores = np.einsum("bthk,bshk,btshk->bhts", q, k, factor)
        return np.einsum("bhts,bshv->bthv", np.where(np.tri(q.shape[1]) > 0, scores, 0), v)


WAYS: dict[str, Callable[..., np.ndarray]] = {
    "quotient": one_anchor,
    "quotient, log decay clamped at -3, chunks of 16": lambda *x: np.concatenate(list(_clamped(*x)), axis=1),
    "difference of cumulative sums": differences,
    "ours, by halves": lambda *x: gla(*x, scale=1.0, form="chunk", chunk=64)[0],
    "ours, sub-chunks of 16": lambda *x: gla(*x, scale=1.0, form="subchunk", chunk=64)[0],
}


def _clamped(q: Any, k: Any, v: Any, g: Any) -> Any:
    """Chunks of 16 by the quotient with a floor under the log decay, which keeps it in range, and a carried state."""
    g = np.maximum(g, np.float32(-3.0))
    state = np.zeros((1, q.shape[2], q.shape[3], v.shape[3]), np.float32)
    for t in range(0, q.shape[1], 16):
        part = [x[:, t : t + 16] for x in (q, k, v, g)]
        b = np.cumsum(part[3], axis=1)
        inter = np.einsum("bthk,bhkv->bthv", part[0] * np.exp(b), state)
        yield one_anchor(*part) + inter
        decayed = part[1] * np.exp(b[:, -1:] - b)
        state = np.exp(b[:, -1])[..., None] * state + np.einsum("bthk,bthv->bhkv", decayed, part[2])


def errors() -> list[dict[str, Any]]:
    """The largest error over the largest value, for mild decays with a strong one of each size at every eighth step."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 64, 2, 16)).astype(np.float32) for _ in range(3))
    rows = []
    for strength in DECAYS:
        g = -0.05 * rng.uniform(size=q.shape).astype(np.float32)
        g[:, 3::8] = -strength
        wide = [x.astype(np.float64) for x in (q, k, v, g)]
        truth = gla(*wide, scale=1.0, form="recurrent")[0]
        row: dict[str, Any] = {"log_decay": -float(strength)}
        for name, run in WAYS.items():
            out = run(q, k, v, g)
            row[name] = float(np.abs(out - truth).max() / np.abs(truth).max()) if np.isfinite(out).all() else None
        given = rng.standard_normal(truth.shape)
        exact = gla_vjp(*wide, scale=1.0)[1](given)
        found = gla_vjp(q, k, v, g, scale=1.0)[1](given.astype(np.float32))
        row["ours, worst gradient"] = max(
            float(np.abs(found[n] - exact[n]).max() / np.abs(exact[n]).max()) for n in exact
        )
        rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "pararnn"
    figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    top = 30.0
    for name, style in zip((*WAYS, "ours, worst gradient"), ("C3-", "C1-", "C4-", "C0-", "C2--", "C0:"), strict=True):
        values = [top if row[name] is None else row[name] for row in rows]
        axes.plot([-row["log_decay"] for row in rows], values, style, label=name, linewidth=1.6)
    axes.axhline(top, color="0.6", linewidth=0.8)
    axes.text(0.011, top * 1.2, "inf or NaN", color="0.4", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="size of the log decay at every eighth step", ylim=(3e-8, 200))
    axes.set_ylabel("largest error / largest value")
    axes.legend(fontsize=7.5, loc="center left", bbox_to_anchor=(0.0, 0.53))
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--picture", help="where to draw the errors")
    parser.add_argument("--no-speed", action="store_true")
    given = parser.parse_args()
    table = errors()
    for row in table[:: max(1, len(table) // 9)]:
        print({k: v if v is None else float(f"{v:.2g}") for k, v in row.items()})
    if given.picture:
        draw(table, given.picture)
    if not given.no_speed:
        print(save("cpu_linear_attention", header(), speed() + table))
