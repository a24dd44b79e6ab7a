"""Prints a program's instructions as Triton statements, and loops whose loads run ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pararnn.graph import Instruction, Program
from pararnn.programs import StepPrograms

_FORMS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "pow": "power({0} + 0.0, {1} + 0.0)",
    "exp": "tl.exp({0})",
    "expm1": "expm1({0})",
    "log": "tl.log({0})",
    "log1p": "log1p({0})",
    "sqrt": "tl.sqrt({0})",
    "tanh": "tanh({0})",
    "sigmoid": "sigmoid({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "abs": "tl.abs({0})",
    "sign": "sign({0})",
    "logaddexp": "logaddexp({0}, {1})",
    "maximum": "maximum({0}, {1})",
    "minimum": "minimum({0}, {1})",
    "less": "{0} < {1}",
    "less_equal": "{0} <= {1}",
    "greater": "{0} > {1}",
    "greater_equal": "{0} >= {1}",
    "equal": "{0} == {1}",
    "where": "tl.where({0}, {1}, {2})",
}


# Statements that one turn of a loop may hold: compile time grows faster than the text.
STATEMENTS = 200


def _number(value: float) -> str:
    text = repr(value)
    return f'float("{text}")' if "inf" in text or "nan" in text else text


def _fused(
    instruction: Instruction, products: dict[str, tuple[str | float, ...]], ref: Callable[..., str], shape: str
) -> str | None:
    """A sum with a product in it as one rounding.

    The rule looks at the operation alone, so every program that holds the operation rounds it alike, and what two
    kernels compute in common has the same bits. The compiler's own fusing, which depends on what else is in a kernel,
    is switched off.
    """
    if instruction.op not in ("add", "sub"):
        return None
    a, b = instruction.args
    sign = "" if instruction.op == "add" else "-"
    for product, other, lead, tail in ((a, b, "", sign), (b, a, sign, "")):
        if isinstance(product, str) and product in products and isinstance(other, str):
            x, y = products[product]
            if isinstance(x, float):
                x, y = y, x
            return f"tl.fma({lead}{ref(x)}, {_array(ref(y), y, shape)}, {tail}{ref(other)})"
    return None


def _array(text: str, value: str | float, shape: str) -> str:
    return text if isinstance(value, str) else f"tl.full({shape}, {text}, tl.float32)"


def statements(
    program: Program, outputs: Sequence[str], inputs: dict[str, str] | None = None, shape: str = "[BD]"
) -> list[str]:
    """Assignments that compute `outputs` (variable names) from the program's inputs, blocks of the given shape.

    `inputs` renames inputs to other variables. Every output is assigned last, so an output may share a name with an
    input: all are computed before any is overwritten.
    """
    renamed = inputs or {}

    def ref(value: str | float) -> str:
        if not isinstance(value, str):
            return _number(value)
        return renamed.get(value, value)

    products = {i.target: i.args for i in program.instructions if i.op == "mul"}
    lines = [
        f"{i.target} = {_fused(i, products, ref, shape) or _FORMS[i.op].format(*map(ref, i.args))}"
        for i in program.instructions
    ]
    pairs = [(name, ref(value)) for name, value in zip(outputs, program.outputs, strict=True)]
    pairs = [(name, value) for name, value in pairs if name != value]
    targets = {name for name, _ in pairs}
    # A value that is itself about to be overwritten is set aside first.
    for k, (name, value) in enumerate(pairs):
        if value in targets:
            lines.append(f"keep{k} = {value}")
            pairs[k] = (name, f"keep{k}")
    for name, value in pairs:
        is_number = not value.isidentifier()
        lines.append(f"{name} = tl.full({shape}, {value}, tl.float32)" if is_number else f"{name} = {value}")
    return lines


@dataclass(frozen=True)
class Rows:
    """An array (B, T, `columns`, D) that a loop over time reads or writes, by an address that moves along.

    Working out an address from a row's number takes more instructions than a step's arithmetic.
    """

    array: str
    columns: int

    @property
    def address(self) -> str:
        """The variable that holds the address of the loop's present row."""
        return f"at_{self.array}"

    def begin(self, row: str) -> str:
        return f"{self.address} = {self.array} + (b * T + {row}) * {self.columns} * D + lane"

    def move(self, rows: int) -> str:
        return f"{self.address} += {rows * self.columns} * D"

    def at(self, column: int, off: int | str = 0) -> str:
        """The address `off` rows further on."""
        return f"{self.address} + ({off} * {self.columns} + {column}) * D"

    def load(self, column: int, ok: str = "OK", behind: int = 0) -> str:
        """A load expression in OFF and OK, of the row `behind` rows earlier."""
        off = f"(OFF - {behind})" if behind else "OFF"
        return f"tl.load({self.at(column, off)}, mask={ok}, other=0.0).to(tl.float32)"


def input_rows(programs: StepPrograms) -> Rows:
    """The gate inputs."""
    return Rows("gates", len(programs.gates))


def input_loads(programs: StepPrograms) -> list[tuple[str, str]]:
    """What a step reads besides states, as (variable, load expression): gates, heads, starts, padding."""
    place, marks, rows = "b * T + ROW", programs.marks, input_rows(programs)
    loads = [(f"g_{g}", rows.load(k)) for k, g in enumerate(programs.gates)]
    if marks.head:
        loads.append(("head", f"tl.where(start_number(head_rows, {place}, lane, OK) >= 0, 1.0, 0.0)"))
    loads += [
        (name, f"fresh_start(head_rows, fresh, {place}, lane, OK, {programs.size}, {s}, D)")
        for s, name in enumerate(programs.start_names)
    ]
    if marks.hold:
        loads.append(("hold", f"tl.load(hold_rows + {place} + lane * 0, mask=OK, other=0).to(tl.float32)"))
    return loads


def at(load: str, row: str, off: int, ok: str) -> str:
    """A load expression for one row, `off` rows from where addresses stand, in the lanes that are `ok`."""
    return load.replace("ROW", row).replace("OFF", str(off)).replace("OK", ok)


def rows_at_once(operations: int, most: int) -> int:
    """How many rows of a loop to print side by side, at most `most`; fewer where a row is long."""
    return max(1, min(most, STATEMENTS // max(1, operations)))


def indent(lines: Sequence[str], depth: int = 1) -> list[str]:
    return ["    " * depth + line for line in lines]


def running_loop(
    loads: Sequence[tuple[str, str]],
    body: Callable[[str, int], list[str]],
    *,
    first: str,
    count: str,
    step: int,
    group: int,
    along: Sequence[Rows] = (),
) -> list[str]:
    """A loop over `count` rows from `first` on, forwards (step 1) or backwards (-1).

    `loads` are (variable, load expression in ROW, OFF and OK) pairs. They are issued a whole group of rows before the
    group that uses them, so that the latency of memory hides behind the arithmetic of a group. `group` rows make a
    group, fewer where rows are long. `body` gives the statements for one row, whose number is in the named variable and
    which lies the given number of rows from the present addresses of `along`.
    """
    group = rows_at_once(len(body("row", 0)) + 2 * len(loads), group)

    def issue(prefix: str, row: str, off: int, ok: str) -> list[str]:
        return [f"{prefix}{name} = {at(text, row, off, ok)}" for name, text in loads]

    sign = "+" if step > 0 else "-"
    lines = [f"whole = ({count}) // {group}", *(rows.begin(f"({first})") for rows in along)]
    for u in range(group):
        lines += issue(f"next{u}_", f"(({first}) {sign} {u})", step * u, "(mask & (whole > 0))")
    lines.append("for turn in range(0, whole):")
    inner = [
        f"{name} = next{u}_{name[len(f'now{u}_') :]}"
        for u in range(group)
        for name in (f"now{u}_{n}" for n, _ in loads)
    ]
    inner.append(f"base = ({first}) {sign} turn * {group}")
    for u in range(group):
        ahead = group + u
        inner += issue(f"next{u}_", f"(base {sign} {ahead})", step * ahead, "(mask & (turn + 1 < whole))")
    for u in range(group):
        inner += [f"{name} = now{u}_{name}" for name, _ in loads]
        inner.append(f"row = base {sign} {u}")
        inner += body("row", step * u)
    inner += [rows.move(step * group) for rows in along]
    lines += indent(inner)
    lines.append(f"for rest in range(whole * {group}, {count}):")
    inner = [f"row = ({first}) {sign} rest"]
    inner += issue("", "row", 0, "mask")
    inner += body("row", 0)
    inner += [rows.move(step) for rows in along]
    return lines + indent(inner)
