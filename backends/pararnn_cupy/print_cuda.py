"""Prints a program's instructions as a CUDA C++ function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pararnn.graph import Instruction, Program
from pararnn.graph.expr import CONDITIONS

# Functions with names of their own are in arithmetic.cu.
_FORMS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "pow": "power({0}, {1})",
    "exp": "exponential({0})",
    "expm1": "exponential_minus_one({0})",
    "log": "logarithm({0})",
    "log1p": "logarithm_of_one_plus({0})",
    "sqrt": "square_root({0})",
    "tanh": "hyperbolic_tangent({0})",
    "sigmoid": "sigmoid({0})",
    "sin": "sine({0})",
    "cos": "cosine({0})",
    "abs": "magnitude({0})",
    "sign": "sign({0})",
    "logaddexp": "log_add_exp({0}, {1})",
    "maximum": "larger({0}, {1})",
    "minimum": "smaller({0}, {1})",
    "less": "{0} < {1}",
    "less_equal": "{0} <= {1}",
    "greater": "{0} > {1}",
    "greater_equal": "{0} >= {1}",
    "equal": "{0} == {1}",
    "where": "{0} ? {1} : {2}",
}


def number(value: float) -> str:
    """A constant of the arithmetic's type."""
    text = repr(float(value))
    if text == "nan":
        return "not_a_number()"
    if text.endswith("inf"):
        return "-infinity()" if text[0] == "-" else "infinity()"
    return f"work_t({text})"


def _absorbed(instruction: Instruction, products: Mapping[str, tuple[str | float, ...]]) -> int | None:
    """Which operand of a sum is a product that is rounded together with it, or None.

    The rule looks at the operation alone, so every program that holds the operation rounds it alike, and what two
    kernels compute in common has the same bits. The compiler's own fusing, which depends on what else stands in a
    kernel, is switched off.
    """
    if instruction.op in ("add", "sub") and all(isinstance(a, str) for a in instruction.args):
        return next((k for k, a in enumerate(instruction.args) if a in products), None)
    return None


def body(program: Program, inputs: Mapping[str, str], outputs: Sequence[str]) -> list[str]:
    """Statements that compute `outputs` (assignable expressions) from the program's inputs.

    `inputs` says what each input is called. All results are computed before any is assigned, so an output may be an
    input.
    """

    def ref(value: str | float) -> str:
        return inputs.get(value, value) if isinstance(value, str) else number(value)

    products = {i.target: i.args for i in program.instructions if i.op == "mul"}
    absorbed = {i.target: _absorbed(i, products) for i in program.instructions}
    # Products that went into sums are computed only if somebody else reads them.
    read = {value for value in program.outputs if isinstance(value, str)}
    for i in program.instructions:
        read.update(a for k, a in enumerate(i.args) if isinstance(a, str) and k != absorbed[i.target])
    lines = []
    for i in program.instructions:
        if i.target not in read:
            continue
        place = absorbed[i.target]
        if place is None:
            text = _FORMS[i.op].format(*map(ref, i.args))
        else:
            # x - y z is (-y) z + x, and y z - x is y z + (-x).
            minus = ["-", ""] if i.op == "sub" else ["", ""]
            lead, tail = minus if place == 1 else minus[::-1]
            x, y = products[str(i.args[place])]
            text = f"fused({lead}{ref(x)}, {ref(y)}, {tail}{ref(i.args[1 - place])})"
        lines.append(f"const {'bool' if i.op in CONDITIONS else 'work_t'} {i.target} = {text};")
    lines += [f"const work_t out{k} = {ref(value)};" for k, value in enumerate(program.outputs)]
    lines += [f"{name} = out{k};" for k, name in enumerate(outputs)]
    if len(outputs) != len(program.outputs):
        raise ValueError(f"a program with {len(program.outputs)} results was given {len(outputs)} places for them")
    return lines


def function(name: str, parameters: Mapping[str, str], lines: Sequence[str]) -> str:
    """A device function; `parameters` gives the length of each array, and a leading '=' those that are written."""
    arguments = ", ".join(
        f"{'' if size.startswith('=') else 'const '}work_t (&{array})[{size.removeprefix('=')}]"
        for array, size in parameters.items()
    )
    text = "\n".join(f"    {line}" for line in lines)
    return f"__device__ __forceinline__ void {name}({arguments})\n{{\n{text}\n}}\n"


def places(array: str, names: Sequence[str]) -> dict[str, str]:
    """The elements of an array by the names of the values that they hold."""
    return {name: f"{array}[{k}]" for k, name in enumerate(names)}
