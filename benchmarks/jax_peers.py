"""Diagonal GRU in JAX against its peers in one run: lax.scan, Newton per step, DEER, quasi-DEER.

    python benchmarks/jax_peers.py [--deer PATH] [--elk PATH] [--quick]

PATH is a checkout of machine-discovery/deer or lindermanlab/elk; nothing of them is contained here, and without one
its rows are left out. Every contender gets the same cell, input and loss under `jax.jit`, at the highest precision of
matrix products; errors are relative to a NumPy loop in float64. A contender that fails has a row that says how.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from timing import best_of, header, save

from pararnn import NewtonConfig, ParaGRU, newton_apply, newton_vjp

# DEER's published setting, wider ones, and long sequences alone: batch, steps, features, width.
SHAPES = ((16, 10_000, 2, 32), (16, 10_000, 2, 64), (16, 10_000, 2, 256), (1, 16_384, 64, 64), (1, 131_072, 16, 64))
QUICK = ((2, 4_096, 2, 32),)
# Bytes of one copy of the dense Jacobians beyond which a method that makes them is not tried.
DENSE_LIMIT = {"cpu": 2**28, "gpu": 2**33}
Contender = Callable[[ParaGRU, Any], Any]


def one_step(cell: ParaGRU) -> Callable[..., Any]:
    """h' = step(h, x, params) of one sequence, as the peers want it; params is the cell."""

    def step(h, x, cell):
        z, r, n = (x @ cell.W_x.weight.T + cell.W_x.bias).reshape(3, cell.d_h)
        return cell.step(jnp, h, z, r, n, *cell.recurrent(jnp, h.dtype))[0]

    return step


def loop(cell, x):
    """The time loop as one writes it by hand: one product for all inputs, then a scan."""
    batch, steps, _ = x.shape
    gates = jnp.moveaxis(x @ cell.W_x.weight.T + cell.W_x.bias, 1, 0).reshape(steps, batch, 3, cell.d_h)
    params = cell.recurrent(jnp, x.dtype)

    def body(h, g):
        h = cell.step(jnp, h, g[:, 0], g[:, 1], g[:, 2], *params)[0]
        return h, h

    return jnp.moveaxis(jax.lax.scan(body, jnp.zeros((batch, cell.d_h), x.dtype), gates)[1], 0, 1)


def newton_per_step(cell, x):
    """The published algorithm with lax.associative_scan and a diagonal Jacobian, to the agreement of the others."""
    return newton_apply(cell, x, NewtonConfig(max_iters=50, residual_atol=1e-6, residual_fail=None))


def deer(path: Path) -> Contender:
    # Its package imports solvers of differential equations that are not needed here.
    package = types.ModuleType("deer")
    package.__path__ = [str(path / "deer")]
    sys.modules["deer"] = package
    seq1d = importlib.import_module("deer.fseq1d").seq1d

    def run(cell, x):
        step, start = one_step(cell), jnp.zeros(cell.d_h, x.dtype)
        return jax.vmap(lambda row: seq1d(step, start, row, cell).value)(x)

    return run


def quasi_deer(path: Path) -> Contender:
    sys.path.insert(0, str(path))
    if importlib.util.find_spec("flax") is None:
        # It imports two activations that it does not use.
        for name in ("flax", "flax.linen", "flax.linen.activation"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["flax.linen.activation"].__dict__.update(sigmoid=jax.nn.sigmoid, tanh=jnp.tanh)
    module = importlib.import_module("elk.algs.deer")

    class Names:
        """jax.numpy as it was when that code was written."""

        def __getattr__(self, name):
            return getattr(jnp, name)

        @staticmethod
        def clip(a, a_min=None, a_max=None):
            return jnp.minimum(jnp.maximum(a, a_min), a_max)

    module.jnp = Names()

    def run(cell, x):
        step, start = one_step(cell), jnp.zeros(cell.d_h, x.dtype)

        def solve(row):
            return module.seq1d(step, start, row, cell, quasi=True)[0]

        return jax.vmap(solve)(x)

    return run


def numbers(shape: tuple[int, ...]) -> tuple[ParaGRU, np.ndarray, np.ndarray]:
    """The cell in NumPy, its input, and the cotangent of the states."""
    batch, steps, features, width = shape
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, steps, features)).astype(np.float32)
    return ParaGRU(features, width, seed=0), x, rng.normal(size=(batch, steps, width)).astype(np.float32)


@lru_cache(maxsize=1)
def truth(shape: tuple[int, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """States and parameter gradients of the time loop in float64."""
    cell, x, cotangent = numbers(shape)
    wide = cell.to(dtype=np.dtype("float64"))
    states, pullback = newton_vjp(wide, x.astype(np.float64), NewtonConfig(segment_len=x.shape[1]))
    return states, pullback(cotangent.astype(np.float64)).params


def relative(mine: Any, true: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(mine, np.float64) - true)) / np.max(np.abs(true)))


def measure(name: str, run: Contender, shape: tuple[int, ...], budget: float) -> dict[str, Any]:
    host, x, cotangent = numbers(shape)
    cell, there, weights = host.to(jnp), jnp.asarray(x), jnp.asarray(cotangent)
    forward = jax.jit(run)
    both = jax.jit(jax.value_and_grad(lambda c, x, w: jnp.sum(run(c, x) * w), argnums=(0, 1)))
    row: dict[str, Any] = {"shape": list(shape), "contender": name}
    states, params = truth(shape)
    try:
        row["error"] = relative(forward(cell, there), states)
        grads = both(cell, there, weights)[1][0]
        row["gradient_error"] = max(relative(grads.arrays[n], params[n]) for n in params)
        row["forward_ms"] = 1e3 * best_of(lambda: jax.block_until_ready(forward(cell, there)), budget_s=budget)["min"]
        row["both_ms"] = (
            1e3 * best_of(lambda: jax.block_until_ready(both(cell, there, weights)), budget_s=budget)["min"]
        )
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--deer", type=Path, help="a checkout of machine-discovery/deer")
    parser.add_argument("--elk", type=Path, help="a checkout of lindermanlab/elk")
    parser.add_argument("--quick", action="store_true", help="one small shape")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for each timing")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    options = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    platform = jax.default_backend()
    contenders: dict[str, Contender] = {"pararnn": newton_apply, "lax.scan": loop, "Newton per step": newton_per_step}
    if options.elk:
        contenders["quasi-DEER (elk)"] = quasi_deer(options.elk)
    if options.deer:
        contenders["DEER"] = deer(options.deer)
    rows = []
    for shape in QUICK if options.quick else SHAPES[: options.shapes]:
        print(f"\nB, T, I, D = {shape}")
        batch, steps, _, width = shape
        for name, run in contenders.items():
            if name == "DEER" and batch * steps * width * width * 4 > DENSE_LIMIT.get(platform, 2**31):
                row: dict[str, Any] = {"shape": list(shape), "contender": name, "failed": "dense Jacobians too large"}
            else:
                row = measure(name, run, shape, options.budget)
            rows.append(row)
            if "failed" in row:
                print(f"  {name:18s} {row['failed']}", flush=True)
                continue
            print(
                f"  {name:18s} forward {row['forward_ms']:9.3f} ms   with gradient {row['both_ms']:9.3f} ms   "
                f"error {row['error']:.1e}   gradient {row['gradient_error']:.1e}",
                flush=True,
            )
    name = "jax_peers" if platform == "cpu" else f"jax_peers_{platform}"
    print(save(name, header(jax=jax.__version__, device=str(jax.devices()[0].device_kind)), rows))


if __name__ == "__main__":
    main()
