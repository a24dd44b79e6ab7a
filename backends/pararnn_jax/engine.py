"""The engine in JAX: a loop program is one `lax.scan`, whatever the number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pararnn.arrays import Array
from pararnn.engine import ArrayEngine, Costs, LoopResult
from pararnn.problem import Problem
from pararnn.programs import LoopProgram
from pararnn_jax import kernels
from pararnn_jax.evaluate import evaluate

# XLA plans memory for the whole program, so a window holds all of time.
_ALL = 2**62
# Measured: XLA's CPU loop costs next to nothing per step, a GPU's a launch. On a CPU segments must save milliseconds,
# because their program takes seconds longer to compile.
CPU = Costs(
    overhead_us=0.0, simple_ns=0.1, heavy_ns=0.6, layout_ns=1.0, window_us=5000.0, row_us=0.1, window_bytes=_ALL
)
ACCELERATOR = Costs(overhead_us=0.0, simple_ns=0.0005, heavy_ns=0.002, window_us=50.0, row_us=4.0, window_bytes=_ALL)


def platform_of(*arrays: Any) -> str:
    """'cpu', 'gpu' or 'tpu': where the arrays are, or where JAX would put what is still being traced."""
    for a in arrays:
        if isinstance(a, jax.Array) and not isinstance(a, jax.core.Tracer):
            return next(iter(a.devices())).platform
    return jax.default_backend()


def kernels_for(platform: str) -> bool | str:
    """Whether to run loops as Pallas kernels on `platform`."""
    return platform == "gpu"


class JaxEngine(ArrayEngine):
    """Loops as scans; the number of operations in the traced program does not depend on the number of steps."""

    name = "jax"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.xp)
        platform = platform_of(problem.x, problem.cell.W_x.weight)
        self.costs = CPU if platform == "cpu" else ACCELERATOR
        # Several steps in one launch where launches are what a step costs.
        self.unroll = 2 if platform == "cpu" else 8
        # Whether loops are Pallas kernels where Pallas can build them; "interpret" runs them without a GPU.
        self.kernels: bool | str = kernels_for(platform)

    def repeats_bits(self, like: Array) -> bool:
        # An array that is sharded is on no one device.
        return super().repeats_bits(jnp.zeros((), like.dtype))

    def function(self, loop: LoopProgram) -> Any:
        return lambda xp, *operands: evaluate(loop.program, *operands)

    def loop(
        self,
        loop: LoopProgram,
        carry: Sequence[Array],
        rows: Sequence[Array],
        consts: Sequence[Array],
        *,
        reverse: bool = False,
        keep: int = 0,
    ) -> LoopResult:
        if not loop.carry:
            return super().loop(loop, carry, rows, consts)
        out = self.scan(loop, carry, rows, consts, reverse=reverse, keep=keep)
        if keep:
            # Where the carry started stands at the end that the sweep left from.
            xp, first = self.xp, [xp_row(c) for c in carry[:keep]]
            pairs = zip(first, out.kept, strict=True)
            out.kept = [xp.concat([k, f] if reverse else [f, k]) for f, k in pairs]
        return out

    def scan(
        self,
        loop: LoopProgram,
        carry: Sequence[Array],
        rows: Sequence[Array],
        consts: Sequence[Array],
        *,
        reverse: bool = False,
        keep: int = 0,
    ) -> LoopResult:
        """As `loop`, but row l of what is kept is the carry after step l: (L, n), without where it started."""
        interpret = self.kernels == "interpret"
        if interpret or (self.kernels and kernels.refusal(loop, carry[0]) is None):
            return LoopResult(*_kernel_scan((loop, reverse, keep, interpret), list(carry), list(rows), list(consts)))
        return LoopResult(*_plain_scan((loop, reverse, keep, self.unroll), list(carry), list(rows), list(consts)))


Columns = tuple[list[Array], list[Array], list[Array], list[Array]]


def _plain_scan(setting: tuple[Any, ...], carry: list[Array], rows: list[Array], consts: list[Array]) -> Columns:
    """A loop program as `lax.scan`, on every platform."""
    loop, reverse, keep, unroll = setting
    middle, example = loop.carry + loop.stored, carry[0]

    def body(state: tuple[list[Array], list[Array]], row: list[Array]) -> tuple[Any, Any]:
        now, sums = state
        found = evaluate(loop.program, *now, *row, *consts)
        out = [jnp.broadcast_to(jnp.asarray(value, example.dtype), example.shape) for value in found]
        new = out[: loop.carry]
        added = [a + b for a, b in zip(sums, out[middle:], strict=True)]
        return (new, added), (new[:keep], out[loop.carry : middle])

    none = [jnp.zeros_like(example)] * loop.totals
    (last, totals), (kept, stored) = lax.scan(body, (carry, none), rows, reverse=reverse, unroll=unroll)
    return last, kept, stored, totals


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _kernel_scan(setting: tuple[Any, ...], carry: list[Array], rows: list[Array], consts: list[Array]) -> Columns:
    """The same as one kernel."""
    loop, reverse, keep, interpret = setting
    return kernels.launch(loop, carry, rows, consts, reverse, keep, interpret)


@_kernel_scan.defjvp
def _kernel_scan_jvp(setting: tuple[Any, ...], primals: Any, tangents: Any) -> Any:
    # A gradient that is differentiated again goes through the scan, which JAX knows how to differentiate.
    loop, reverse, keep, _ = setting
    return jax.jvp(partial(_plain_scan, (loop, reverse, keep, 1)), primals, tangents)


def xp_row(lanes: Array) -> Array:
    """(n,) as a row (1, n)."""
    return lanes.reshape((1, -1))
