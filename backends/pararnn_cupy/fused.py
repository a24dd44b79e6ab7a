"""A program as one elementwise kernel on CuPy arrays, where the array printer would launch one for each operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pararnn.arrays import dtype_name
from pararnn.graph import Program, compile_array
from pararnn_cupy.print_cuda import body
from pararnn_cupy.source import template

# As in the time loop's kernels: the source says where it wants a product and a sum in one rounding.
OPTIONS = ("--std=c++17", "--fmad=false")


def elementwise_text(program: Program) -> tuple[tuple[str, ...], tuple[int, ...], str]:
    """The inputs that are read, which outputs are computed, and the statements."""
    made = tuple(k for k, value in enumerate(program.outputs) if value not in program.inputs and isinstance(value, str))
    part = Program.__new__(Program)
    part.inputs, part.instructions = program.inputs, program.instructions
    part.outputs = tuple(program.outputs[k] for k in made)
    lines = body(part, {name: f"in_{name}" for name in program.inputs}, [f"result{k}" for k in made])
    read = {a for i in program.instructions for a in i.args}
    return tuple(name for name in program.inputs if name in read), made, "\n".join(lines)


def fused_function(program: Program) -> Callable[..., tuple[Any, ...]]:
    """The function that ``pararnn.graph.compile_array`` makes, in one launch; outputs have all inputs' common shape."""
    read, made, text = elementwise_text(program)
    places = [program.inputs.index(name) for name in read]
    kernels: dict[str, Any] = {}
    plain = compile_array(program)

    def kernel(dtype: str) -> Any:
        import cupy

        return cupy.ElementwiseKernel(
            ", ".join(f"{dtype} in_{name}" for name in read),
            ", ".join(f"{dtype} result{k}" for k in made),
            text,
            "pararnn_program",
            preamble=f"#define WORK_IS_DOUBLE {int(dtype == 'float64')}\n{template('arithmetic.cu')}",
            return_tuple=True,
            options=OPTIONS,
        )

    def run(xp: Any, *operands: Any) -> tuple[Any, ...]:
        given = [operands[k] for k in places]
        names = {dtype_name(a.dtype) for a in given}
        if len(names) != 1 or not made or not names <= {"float32", "float64"}:
            return plain(xp, *operands)
        (dtype,) = names
        if dtype not in kernels:
            kernels[dtype] = kernel(dtype)
        with given[0].device:
            results = dict(zip(made, kernels[dtype](*given), strict=True))
        by_name = dict(zip(program.inputs, operands, strict=True))
        return tuple(
            results[k] if k in results else by_name[value] if isinstance(value, str) else value
            for k, value in enumerate(program.outputs)
        )

    return run
