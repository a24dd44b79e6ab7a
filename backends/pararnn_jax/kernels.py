"""One Pallas kernel for every loop program, forward or reverse: the whole loop in one launch, lanes side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pararnn.arrays import Array
from pararnn.programs import LoopProgram
from pararnn_jax.evaluate import evaluate

# Lanes of one program of the grid: a power of two, one lane to a thread.
WIDEST, NARROWEST = 128, 32


def lanes_per_block(lanes: int) -> int:
    """The largest power of two up to WIDEST that divides `lanes`."""
    return min(WIDEST, lanes & -lanes)


def refusal(loop: LoopProgram, like: Array) -> str | None:
    """None if the kernel of `loop` can be built for lanes like `like` here, else a sentence."""
    lanes = int(like.shape[0])
    if lanes_per_block(lanes) < NARROWEST:
        return f"{lanes} lanes are no multiple of {NARROWEST}, as a Pallas kernel needs them"
    key = f"jax kernel {like.dtype}"
    if key not in loop.compiled:
        loop.compiled[key] = _probe(loop, like.dtype)
    return loop.compiled[key]


def _probe(loop: LoopProgram, dtype: Any) -> str | None:
    """Compiles the kernel on a few rows: whether Pallas can lower this step is known to Pallas only."""
    lane, row = jax.ShapeDtypeStruct((NARROWEST,), dtype), jax.ShapeDtypeStruct((2, NARROWEST), dtype)

    def run(carry: list[Array], rows: list[Array], consts: list[Array]) -> Any:
        return launch(loop, carry, rows, consts, False, loop.carry, False)

    try:
        jax.jit(run).lower([lane] * loop.carry, [row] * loop.rows, [lane] * loop.consts).compile()
    except Exception as error:
        return f"Pallas cannot build its kernel: {type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def launch(
    loop: LoopProgram,
    carry: Sequence[Array],
    rows: Sequence[Array],
    consts: Sequence[Array],
    reverse: bool,
    keep: int,
    interpret: bool,
) -> tuple[list[Array], list[Array], list[Array], list[Array]]:
    """The last carry (n,), kept carries and stored rows (L, n), and totals (n,), by one kernel."""
    from jax.experimental import pallas as pl

    (lanes,), dtype, length = carry[0].shape, carry[0].dtype, int(rows[0].shape[0])
    width = lanes if interpret else lanes_per_block(lanes)
    middle = loop.carry + loop.stored

    def kernel(*refs: Any) -> None:
        cut = iter(refs)

        def take(count: int) -> list[Any]:
            return [next(cut) for _ in range(count)]

        carry_in, row_in, const_in = take(loop.carry), take(loop.rows), take(loop.consts)
        last, kept, stored, totals = take(loop.carry), take(keep), take(loop.stored), take(loop.totals)
        fixed = [ref[...] for ref in const_in]

        def body(i: Any, state: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            l = length - 1 - i if reverse else i
            now, sums = state
            found = evaluate(loop.program, *now, *(ref[l, :] for ref in row_in), *fixed)
            out = [jnp.broadcast_to(jnp.asarray(value, dtype), (width,)) for value in found]
            for ref, value in zip([*kept, *stored], [*out[:keep], *out[loop.carry : middle]], strict=True):
                ref[l, :] = value
            return out[: loop.carry], [a + b for a, b in zip(sums, out[middle:], strict=True)]

        none = jnp.zeros((width,), dtype)
        end, sums = lax.fori_loop(0, length, body, ([ref[...] for ref in carry_in], [none] * loop.totals))
        for ref, value in zip([*last, *totals], [*end, *sums], strict=True):
            ref[...] = value

    lane = pl.BlockSpec((width,), lambda i: (i,))
    column = pl.BlockSpec((length, width), lambda i: (0, i))
    one, many = jax.ShapeDtypeStruct((lanes,), dtype), jax.ShapeDtypeStruct((length, lanes), dtype)
    wide = keep + loop.stored
    out = pl.pallas_call(
        kernel,
        grid=(lanes // width,),
        in_specs=[lane] * loop.carry + [column] * loop.rows + [lane] * loop.consts,
        out_specs=[lane] * loop.carry + [column] * wide + [lane] * loop.totals,
        out_shape=[one] * loop.carry + [many] * wide + [one] * loop.totals,
        interpret=interpret,
        **({} if interpret else {"compiler_params": _triton(width)}),
    )(*carry, *rows, *consts)
    places = [loop.carry, keep, loop.stored, loop.totals]
    stops = [sum(places[: n + 1]) for n in range(4)]
    first, second, third, fourth = (list(out[stop - size : stop]) for stop, size in zip(stops, places, strict=True))
    return first, second, third, fourth


def _triton(width: int) -> Any:
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=max(1, width // 32), num_stages=1)
