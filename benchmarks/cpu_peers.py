"""Other people's compiled time loops, for cpu.py: `python benchmarks/cpu_peers.py LIBRARY CELL B T D I SECONDS`.

Prints one line of JSON. In a process of its own each, because their threads spin between calls and would take the cores
from what is timed next. The loops are what one writes by hand: one matrix product for all inputs, then the cell's own
step, scanned by `jax.lax.scan` under `jax.jit`, or unrolled for a few steps under `torch.compile` and called for one
stretch of time after the other.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from cpu import problem
from timing import best_of

from pararnn import sequential_apply

# Steps of a compiled torch function; its compile time grows with them, a minute or so for these.
STEPS = 32


def checked(states: np.ndarray, cell, x) -> float:
    """The largest difference from the NumPy loop; raises if the peer computes something else."""
    true = sequential_apply(cell, x)
    error = float(np.max(np.abs(states - true)) / np.max(np.abs(true)))
    if not error < 1e-3:
        raise SystemExit(f"correctness gate: the peer is off by {error}")
    return error


def jax_scan(cell, x, cotangent, budget: float) -> dict:
    import jax
    import jax.numpy as jnp

    gates, width, slots = len(cell.gates), cell.d_h, cell.state_slots
    arrays = {name: jnp.asarray(a) for name, a in cell.arrays.items()}
    bound = cell.max_recurrent_norm

    def states(arrays, x):
        batch, steps, _ = x.shape
        pre = (x @ arrays["W_x.weight"].T + arrays["W_x.bias"]).reshape(batch, steps, gates, width)
        like = cell._copy(bound, arrays)
        params = like.recurrent(jnp, x.dtype)

        def step(carry, now):
            new = cell.step(jnp, *carry, *(now[:, g] for g in range(gates)), *params)
            return new, new[0] if slots == 1 else jnp.stack(new, axis=1)

        start = tuple(jnp.zeros((batch, width), x.dtype) for _ in range(slots))
        _, rows = jax.lax.scan(step, start, jnp.moveaxis(pre, 1, 0))
        return jnp.moveaxis(rows, 0, 1)

    forward = jax.jit(states)
    given, seed = jnp.asarray(x), jnp.asarray(cotangent)
    train = jax.jit(jax.value_and_grad(lambda arrays, x: jnp.sum(states(arrays, x) * seed), argnums=(0, 1)))
    error = checked(np.asarray(forward(arrays, given)), cell, x)
    return {
        "library": f"jax {jax.__version__}",
        "error": error,
        "ms": best_of(lambda: forward(arrays, given).block_until_ready(), budget_s=budget)["min"] * 1e3,
        "train_ms": best_of(lambda: jax.block_until_ready(train(arrays, given)), budget_s=budget)["min"] * 1e3,
    }


def torch_compiled(cell, x, cotangent, budget: float) -> dict:
    import torch

    gates, width, slots = len(cell.gates), cell.d_h, cell.state_slots
    moved = cell.to(torch)
    params = moved.recurrent(torch, torch.float32)
    weight, bias = moved.W_x
    given = torch.from_numpy(x)

    def stretch(state, pre):
        rows = []
        for t in range(STEPS):
            state = cell.step(torch, *state, *(pre[:, t, g] for g in range(gates)), *params)
            rows.append(state[0] if slots == 1 else torch.stack(state, 1))
        return state, torch.stack(rows, 1)

    compiled = torch.compile(stretch, dynamic=False)

    def forward():
        with torch.no_grad():
            batch, steps, _ = given.shape
            pre = (given @ weight.T + bias).reshape(batch, steps, gates, width)
            state = tuple(torch.zeros(batch, width) for _ in range(slots))
            rows = []
            for t in range(0, steps, STEPS):
                state, part = compiled(state, pre[:, t : t + STEPS])
                rows.append(part)
            return torch.cat(rows, 1)

    begin = time.perf_counter()
    error = checked(forward().numpy(), cell, x)
    took = time.perf_counter() - begin
    figure = best_of(forward, budget_s=budget)["min"] * 1e3
    return {"library": f"torch {torch.__version__}", "error": error, "compile_s": took, "ms": figure}


def main() -> None:
    library, kind, *sizes, seconds = sys.argv[1:]
    batch, steps, width, features = map(int, sizes)
    warnings.simplefilter("ignore")
    cell, x = problem(kind, batch, steps, width, features)
    cotangent = np.random.default_rng(2).standard_normal((batch, steps, *cell.state_shape), dtype=np.float32)
    run = {"jax": jax_scan, "torch": torch_compiled}[library]
    print(json.dumps(run(cell, x, cotangent, float(seconds))))


if __name__ == "__main__":
    main()
