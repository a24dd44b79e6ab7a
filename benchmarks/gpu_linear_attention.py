"""Linear attention on a GPU: kernels, chunk forms in plain torch and in JAX under jit, and fla where it is installed.

    python benchmarks/gpu_linear_attention.py [--json FILE] [--only torch|jax] [--ways kernel,fla,chunk] [--kinds gla,…]

bfloat16, H=4, K=V=64; forward, and forward with backward, in milliseconds: the median of many runs, each awaited.
Errors are those of the same kind of input against the time loop in float64 at T=512.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

SHAPES = [(8, 2048), (1, 16384), (1, 131072)]
HEADS, WIDTH = 4, 64


def timed(run: Callable[[], Any], wait: Callable[[Any], Any], budget: float = 0.5) -> float:
    """Milliseconds a call, the median after three to warm up."""
    for _ in range(3):
        wait(run())
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - began < budget and len(times) < 200):
        start = time.perf_counter()
        wait(run())
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def torch_rows(kinds: list[str], only_ways: list[str]) -> list[dict[str, Any]]:
    import torch

    from pararnn.linear_attention import gla, rwkv6, rwkv7

    rows = []

    def arrays(kind: str, batch: int, length: int, dtype: Any = torch.bfloat16) -> list[Any]:
        torch.manual_seed(0)
        size = (batch, length, HEADS, WIDTH)
        normal = lambda: torch.randn(size, device="cuda", dtype=torch.float32)  # noqa: E731
        q, k, v = normal(), normal(), normal()
        g = torch.nn.functional.logsigmoid(normal()) / 4
        if kind == "rwkv7":
            a = torch.nn.functional.normalize(normal(), dim=-1)
            return [x.to(dtype) for x in (q, g, k / 8, v, -a, a * torch.rand(size, device="cuda"))]
        u = torch.randn(HEADS, WIDTH, device="cuda")
        return [x.to(dtype) for x in ((q, k, v, g) if kind == "gla" else (q, k, v, g, u))]

    ways: list[tuple[str, str, Callable[..., Any]]] = [
        ("gla", "kernel", lambda *x: gla(*x, form="kernel")[0]),
        ("gla", "chunk (torch)", lambda *x: gla(*x, form="chunk")[0]),
        ("rwkv6", "kernel", lambda *x: rwkv6(*x, form="kernel")[0]),
        ("rwkv6", "chunk (torch)", lambda *x: rwkv6(*x, form="chunk")[0]),
        ("rwkv7", "kernel", lambda *x: rwkv7(*x, form="kernel")[0]),
        ("rwkv7", "chunk (torch)", lambda *x: rwkv7(*x, form="chunk")[0]),
    ]
    try:
        from fla.ops.gla import chunk_gla
        from fla.ops.rwkv6 import chunk_rwkv6
        from fla.ops.rwkv7 import chunk_rwkv7

        ways += [
            ("gla", "fla", lambda q, k, v, g: chunk_gla(q, k, v, g)[0]),
            ("rwkv6", "fla", lambda r, k, v, w, u: chunk_rwkv6(r, k, v, w, u, scale=1.0)[0]),
            ("rwkv7", "fla", lambda r, w, k, v, a, b: chunk_rwkv7(r, w, k, v, a, b, scale=1.0)[0]),
        ]
    except Exception as error:
        print(f"fla is not there: {type(error).__name__}: {error}")
    loops = {"gla": gla, "rwkv6": rwkv6, "rwkv7": rwkv7}

    def wait(_: Any) -> None:
        torch.cuda.synchronize()

    for kind, way, run in ways:
        if kind not in kinds or way.split()[0] not in only_ways:
            continue
        small = arrays(kind, 1, 512)
        truth = loops[kind](*(x.double() for x in small), form="recurrent")[0]
        try:
            error = float((run(*small).double() - truth).abs().max() / truth.abs().max())
        except Exception as failure:
            print(f"{kind} {way}: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
            continue
        for batch, length in SHAPES:
            row: dict[str, Any] = {"kind": kind, "way": way, "B": batch, "T": length, "error": error}
            try:
                args = arrays(kind, batch, length)
                with torch.no_grad():
                    row["forward_ms"] = timed(lambda: run(*args), wait)  # noqa: B023
                torch.cuda.reset_peak_memory_stats()
                leaves = [x.requires_grad_() for x in args]
                given = torch.randn_like(args[3 if kind == "rwkv7" else 2])

                def both() -> Any:
                    return torch.autograd.grad(run(*leaves), leaves, given)  # noqa: B023

                row["both_ms"] = timed(both, wait)
                row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            except Exception as failure:
                row["failure"] = f"{type(failure).__name__}: {str(failure)[:200]}"
            rows.append(row)
            show(row)
    return rows


def jax_rows(kinds: list[str]) -> list[dict[str, Any]]:
    import jax
    import jax.numpy as jnp

    from pararnn.linear_attention import gla, rwkv6, rwkv7

    rows = []
    for kind, function in (("gla", gla), ("rwkv6", rwkv6), ("rwkv7", rwkv7)):
        if kind not in kinds:
            continue
        for batch, length in SHAPES:
            keys = jax.random.split(jax.random.key(0), 7)
            size = (batch, length, HEADS, WIDTH)
            q, k, v, g, a = (jax.random.normal(key, size) for key in keys[:5])
            g = jax.nn.log_sigmoid(g) / 4
            a = a / jnp.linalg.norm(a, axis=-1, keepdims=True)
            if kind == "rwkv7":
                args = (q, g, k / 8, v, -a, a * jax.random.uniform(keys[5], size))
            else:
                args = (q, k, v, g) + ((jax.random.normal(keys[6], (HEADS, WIDTH)),) if kind == "rwkv6" else ())
            args = tuple(x.astype(jnp.bfloat16) for x in args)
            row: dict[str, Any] = {"kind": kind, "way": "chunk (jax.jit)", "B": batch, "T": length}
            try:
                forward = jax.jit(lambda *x: function(*x, form="chunk")[0])  # noqa: B023
                row["forward_ms"] = timed(lambda: forward(*args), jax.block_until_ready)  # noqa: B023
                loss = lambda *x: function(*x, form="chunk")[0].astype(jnp.float32).sum()  # noqa: B023, E731
                both = jax.jit(jax.grad(loss, argnums=tuple(range(len(args)))))
                row["both_ms"] = timed(lambda: both(*args), jax.block_until_ready)  # noqa: B023
            except Exception as failure:
                row["failure"] = f"{type(failure).__name__}: {str(failure)[:200]}"
            rows.append(row)
            show(row)
    return rows


def show(row: dict[str, Any]) -> None:
    parts = [f"{row['kind']:6} {row['way']:16} ({row['B']}, {row['T']:6})"]
    parts += [f"{name} {row[name]:.3g}" for name in ("forward_ms", "both_ms", "peak_gib", "error") if name in row]
    print("  ".join([*parts, row.get("failure", "")]), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--only", choices=["torch", "jax"])
    parser.add_argument("--ways", default="kernel,fla,chunk")
    parser.add_argument("--kinds", default="gla,rwkv6,rwkv7")
    given = parser.parse_args()
    kinds = given.kinds.split(",")
    found = [] if given.only == "jax" else torch_rows(kinds, given.ways.split(","))
    found += [] if given.only == "torch" else jax_rows(kinds)
    if given.json:
        with open(given.json, "w") as file:
            json.dump(found, file, indent=1)
