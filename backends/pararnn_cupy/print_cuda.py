"""Prints a program's instructions as a CUDA C++ function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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


def _fused(instruction: Instruction, products: Mapping[str, tuple[str | float, ...]], ref: Callable[..., str]):
    """A sum with a product in it as one rounding, or None.

    The rule looks at the operation alone, so every program that holds the operation rounds it alike, and what two
    kernels compute in common has the same bits. The compiler's own fusing, which depends on what else stands in a
    kernel, is switched off.
    """
    if instruction.op not in ("add", "sub"):
        return None
    a, b = instruction.args
    sign = "" if instruction.op == "add" else "-"
    for product, other, lead, tail in ((a, b, "", sign), (b, a, sign, "")):
        if isinstance(product, str) and product in products and isinstance(other, str):
            x, y = products[product]
            return f"fused({lead}{ref(x)}, {ref(y)}, {tail}{ref(other)})"
    return None


def body(program: Program, inputs: Mapping[str, str], outputs: Sequence[str]) -> list[str]:
    """Statements that compute `outputs` (assignable expressions) from the program's inputs.

    `inputs` says what each input is called. All results are computed before any is assigned, so an output may be an
    input.
    """

    def ref(value: str | float) -> str:
        return inputs.get(value, value) if isinstance(value, str) else number(value)

    products = {i.target: i.args for i in program.instructions if i.op == "mul"}
    texts = {i.target: _fused(i, products, ref) for i in program.instructions}
    # Products that went into sums are computed only if somebody else reads them.
    read = {value for value in program.outputs if isinstance(value, str)}
    for i in program.instructions:
        absorbed = next((a for a in i.args if a in products), None) if texts[i.target] else None
        read.update(a for a in i.args if isinstance(a, str) and a != absorbed)
    lines = []
    for i in program.instructions:
        if i.target in read:
            kind = "bool" if i.op in CONDITIONS else "work_t"
            lines.append(f"const {kind} {i.target} = {texts[i.target] or _FORMS[i.op].format(*map(ref, i.args))};")
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
