"""A program: the nodes that some outputs need, in the order in which a printer writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pararnn.graph.derivative import topological
from pararnn.graph.expr import CONDITIONS, Expr


@dataclass(frozen=True)
class Instruction:
    """target = op(args); an argument is a name, or a number."""

    target: str
    op: str
    args: tuple[str | float, ...]


class Program:
    """Straight-line code for `outputs` as a function of the named `inputs`, in that order."""

    def __init__(self, inputs: Sequence[str], outputs: Sequence[Expr]) -> None:
        names: dict[int, str | float] = {}
        instructions: list[Instruction] = []
        for node in topological(outputs):
            if node.op == "input":
                if node.value not in inputs:
                    raise KeyError(f"the outputs need the symbol '{node.value}', which is not among {list(inputs)}")
                names[id(node)] = node.value
            elif node.op == "const":
                names[id(node)] = node.value
            else:
                target = f"t{len(instructions)}"
                names[id(node)] = target
                instructions.append(Instruction(target, node.op, tuple(names[id(a)] for a in node.args)))
        self.inputs = tuple(inputs)
        self.outputs = tuple(names[id(out)] for out in outputs)
        self.instructions = tuple(instructions)

    @property
    def conditions(self) -> frozenset[str]:
        """Targets that hold truth values."""
        return frozenset(i.target for i in self.instructions if i.op in CONDITIONS)

    def last_uses(self) -> list[tuple[str, ...]]:
        """For each instruction, the targets that nobody reads after it (a printer may reuse their memory)."""
        kept = {name for name in self.outputs if isinstance(name, str)} | set(self.inputs)
        seen: set[str] = set()
        frees: list[tuple[str, ...]] = []
        for instruction in reversed(self.instructions):
            names = dict.fromkeys(a for a in instruction.args if isinstance(a, str))
            frees.append(tuple(a for a in names if a not in seen and a not in kept))
            seen.update(names)
        return frees[::-1]
