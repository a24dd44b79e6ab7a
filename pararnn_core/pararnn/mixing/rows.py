"""Rows: one mixing cell's step, its tangent and its cotangent on many states at once, with array-API calls.

A row is one state: of one sequence in one segment. Arrays of a row lead with the row axis, (N, D); bulk arrays hold
all steps of all rows, (N, L, D).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pararnn.arrays import Array, cast
from pararnn.cells.mixing import MixingCell, multiply, multiply_back, weight_cotangents
from pararnn.graph import array_function
from pararnn.mixing.trace import Stage, mix_programs_of
from pararnn.problem import Problem


class Rows:
    """The step of `cell` for a problem's arrays; `cell` may be in solve coordinates."""

    def __init__(self, problem: Problem, cell: MixingCell) -> None:
        xp = self.xp = problem.xp
        dtype = problem.work_dtype
        self.cell, self.programs = cell, mix_programs_of(cell)
        self.size = self.programs.size
        self.entries = self.programs.m.where
        self.bounds, self.logarithmic = self.programs.bounds, self.programs.logarithmic
        self.weight, self.bias = (cast(xp, a, dtype) for a in cell.W_x)
        self.params = cell.recurrent(xp, dtype)
        self.matrices = [cell.joined(xp, dtype, stage.names) for stage in self.programs.stages]
        self.diagonals = [
            _matrix_diagonal(xp, cell.block(xp, dtype, name)) for stage in self.programs.stages for name in stage.names
        ]

    def function(self, program: Any) -> Any:
        """A program as a function of arrays, compiled once for all problems."""
        return array_function(self.xp, program, self.programs.compiled.setdefault(f"program {id(program)}", {}))

    def _call(self, program: Any, like: Array, *operands: Array) -> list[Array]:
        xp = self.xp
        out = []
        for value in self.function(program)(xp, *operands):
            if isinstance(value, float):
                value = xp.full_like(like, value)
            out.append(value if value.shape == like.shape else xp.broadcast_to(value, like.shape))
        return out

    def gates(self, x: Array) -> list[Array]:
        """The gate inputs of x (B, W, I)."""
        return self.cell.gate_inputs(self.xp, x, self.weight, self.bias)

    def products(self, slots: Sequence[Array], gates: Sequence[Array]) -> list[Array]:
        """The products of all stages, one after the other."""
        products: list[Array] = []
        for stage, (matrix, offset) in zip(self.programs.stages, self.matrices, strict=True):
            source = self.source(stage, slots, gates, products)
            products += multiply(self.xp, source, len(stage.names), matrix, offset)
        return products

    def source(self, stage: Stage, slots: Sequence[Array], gates: Sequence[Array], products: Sequence[Array]) -> Array:
        """What a stage multiplies; of the products, only those of earlier stages are read."""
        if stage.slot is not None:
            return slots[stage.slot]
        stand_in = [slots[0]] * (len(self.programs.mixed_names) - len(products))
        return self._call(stage.program, slots[0], *slots, *gates, *products, *stand_in, *self.params)[0]

    def step(self, slots: Sequence[Array], gates: Sequence[Array]) -> list[Array]:
        products = self.products(slots, gates)
        return self._call(self.programs.advance, slots[0], *slots, *gates, *products, *self.params)

    def step_tangent(
        self, slots: Sequence[Array], tangent: Sequence[Array], gates: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        """The new slots, and the entries of the running product of the step's true diagonal."""
        products = self.products(slots, gates)
        out = self._call(
            self.programs.advance_tangent, slots[0],
            *slots, *tangent, *gates, *products, *self.params, *self.diagonals,
        )  # fmt: skip
        return out[: self.size], out[self.size :]

    def identity(self, like: Array) -> list[Array]:
        """The entries of the product of no steps."""
        one, zero = self.xp.ones_like(like), self.xp.zeros_like(like)
        return [one if i == j else zero for i, j in self.entries]

    # The cotangent side.

    def tape(self, slots: Sequence[Array], gates: Sequence[Array]) -> list[Array]:
        """What `back` reads of each step besides cotangents: previous slots, gates, products; all steps at once."""
        products = self.products(slots, gates)
        return [*slots, *gates, *products]

    def back(self, tape: Sequence[Array], cotangents: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        """The cotangents of the previous slots, and of gates, params and products (to be stored)."""
        size, count = self.size, len(self.programs.gate_names)
        like = cotangents[0]
        slots: list[Array | None] = [None] * size
        gates: list[Array | None] = [None] * count
        params: list[Array | None] = [None] * len(self.params)
        mixed: dict[str, Array] = {}

        def gather(k: int, *cotangent: Array) -> None:
            part = self.programs.back[k]
            found = self._call(part.program, like, *tape, *self.params, *cotangent)
            for (kind, key), value in zip(part.outputs, found, strict=True):
                if kind == "slot":
                    slots[key] = value if slots[key] is None else slots[key] + value
                elif kind == "gate":
                    gates[key] = value if gates[key] is None else gates[key] + value
                elif kind == "param":
                    params[key] = value if params[key] is None else params[key] + value
                else:
                    mixed[key] = value if key not in mixed else mixed[key] + value

        gather(0, *cotangents)
        stages = self.programs.stages
        for k in range(len(stages) - 1, -1, -1):
            stage = stages[k]
            moved = multiply_back(self.xp, [mixed[name] for name in stage.names], self.matrices[k][0])
            if stage.slot is not None:
                before = slots[stage.slot]
                slots[stage.slot] = moved if before is None else before + moved
            else:
                gather(len(stages) - k, moved)
        zero = self.xp.zeros_like(like)
        stored = [*gates, *params, *(mixed[name] for stage in stages for name in stage.names)]
        return [zero if s is None else s for s in slots], [zero if s is None else s for s in stored]

    def diagonal(self, tape: Sequence[Array]) -> list[Array]:
        """The entries of the step's true diagonal, for all steps of a tape."""
        return self._call(self.programs.diagonal, tape[0], *tape, *self.params, *self.diagonals)

    def leaf_cotangents(self, tape: Sequence[Array], stored: Sequence[Array]) -> dict[str, Array]:
        """Cotangents of params and recurrent arrays as the step sees them, summed over all steps, by stored name."""
        xp, size, count = self.xp, self.size, len(self.programs.gate_names)
        slots, gates, products = tape[:size], tape[size : size + count], tape[size + count :]
        first = count + len(self.params)
        out = {name: _summed(xp, d) for name, d in zip(self.cell.params, stored[count:first], strict=True)}
        blocks: dict[str, Array] = {}
        offsets: dict[str, Array] = {}
        for stage, (matrix, _) in zip(self.programs.stages, self.matrices, strict=True):
            own = list(stored[first : first + len(stage.names)])
            first += len(stage.names)
            source = self.source(stage, slots, gates, products[: first - count - len(self.params) - len(stage.names)])
            blocks |= zip(stage.names, weight_cotangents(xp, source, own, matrix), strict=True)
            offsets |= {name: _summed(xp, d) for name, d in zip(stage.names, own, strict=True)}
        return out | self.cell.matrix_gradients(xp, blocks, offsets)


def _summed(xp: Any, a: Array) -> Array:
    return xp.sum(xp.reshape(a, (-1, a.shape[-1])), axis=0)


def running_product(rows: Any, tape: Sequence[Array]) -> list[Array]:
    """The product of the true diagonals of all steps of a tape (N, L, …), later ones to the left, by row."""
    size, where = rows.size, rows.entries
    steps = rows.diagonal(tape)
    total = rows.identity(tape[0][:, 0, ...])
    for l in range(int(tape[0].shape[1])):
        now = dict(zip(where, (s[:, l, ...] for s in steps), strict=True))
        past = dict(zip(where, total, strict=True))
        total = [sum(now[i, k] * past[k, j] for k in range(size) if (i, k) in now and (k, j) in past) for i, j in where]
    return total


def _matrix_diagonal(xp: Any, block: Array) -> Array:
    """The diagonal of a matrix (D, D), or of one per head, as (D,)."""
    width = int(block.shape[-1])
    eye = xp.eye(width, dtype=block.dtype, device=getattr(block, "device", None))
    return xp.reshape(xp.sum(block * eye, axis=-1), (-1,))
