"""The cost model of mixing cells: how long a step of N rows takes, and from that segments, warm-up and windows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from pararnn.arrays import dtype_name, namespace_name
from pararnn.cells.mixing import MixingCell
from pararnn.graph import Program
from pararnn.mixing.trace import mix_programs_of
from pararnn.plan import MARGIN, Windows, fitting_length
from pararnn.problem import Problem

DEFAULT_WARMUP = 64
SEGMENT_LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
# Bytes of gate inputs, states and what a pass keeps of them that one window may hold.
WINDOW_BYTES = 384 * 2**20
HEAVY = frozenset({"exp", "expm1", "log", "log1p", "tanh", "sigmoid", "sin", "cos", "pow", "logaddexp"})


@dataclass(frozen=True)
class MixCosts:
    """Microseconds per array call, nanoseconds per element and call, and products per microsecond."""

    call_us: float
    simple_ns: float
    heavy_ns: float
    # Multiplications and additions per microsecond with many rows, and bytes of a matrix read per microsecond with few.
    flops_us: float
    bytes_us: float

    def step_us(self, work: StepWork, rows: int, item: int, *, tangent: bool) -> float:
        """Predicted time of one step of `rows` rows."""
        simple, heavy = (work.tangent_simple, work.tangent_heavy) if tangent else (work.simple, work.heavy)
        elements = rows * work.width * 1e-3 * (simple * self.simple_ns + heavy * self.heavy_ns) * item / 4
        return (simple + heavy + 3 * work.stages) * self.call_us + elements + self.product_us(work, rows, item)

    def product_us(self, work: StepWork, rows: int, item: int) -> float:
        """Predicted time of a step's matrix products alone."""
        mixed = work.inner * work.width * work.products
        return max(2.0 * rows * mixed / self.flops_us, item * mixed / self.bytes_us)


@dataclass(frozen=True)
class StepWork:
    """What one step of one row costs: elementwise operations, products of `inner` channels, row arrays in a window."""

    width: int
    inner: int
    products: int
    stages: int
    simple: int
    heavy: int
    tangent_simple: int
    tangent_heavy: int
    arrays: int


def work_of(cell: MixingCell) -> StepWork:
    """The work of a traced step."""
    programs = mix_programs_of(cell)
    _, width, inner = cell.row_layout

    def count(program: Program) -> tuple[int, int]:
        heavy = sum(i.op in HEAVY for i in program.instructions)
        return len(program.instructions) - heavy + 3 * sum(i.op == "sigmoid" for i in program.instructions), heavy

    return StepWork(
        width, inner, len(programs.mixed_names), len(programs.stages), *count(programs.advance),
        *count(programs.advance_tangent), len(programs.gate_names) + 2 * programs.size,
    )  # fmt: skip


_COSTS = {
    "numpy": MixCosts(1.0, 0.25, 2.0, 60_000.0, 8_000.0),
    "torch": MixCosts(3.0, 0.25, 0.6, 60_000.0, 12_000.0),
    # On a card, with a step's elementwise part in one launch.
    "cupy": MixCosts(1.5, 0.001, 0.002, 20_000_000.0, 2_000_000.0),
}


@dataclass(frozen=True)
class MixPlan(Windows):
    """Segments of `segment_len` steps, `segments` of them in a window, after `warmup` plain steps; and why."""

    path: str
    segment_len: int
    segments: int
    warmup: int
    max_passes: int | None
    reason: str
    # Of the whole forward; NaN where nothing was compared.
    predicted_us: float = math.nan

    def described(self) -> dict[str, object]:
        """What :func:`pararnn.explain` shows."""
        return {
            "path": self.path,
            "segment_len": self.segment_len,
            "segments": self.segments,
            "passes": 1 if self.path == "sequential" else 2,
            "reason": self.reason,
        }


def costs_of(problem: Problem) -> MixCosts:
    return _COSTS.get(namespace_name(problem.xp), _COSTS["numpy"])


def plan_mixing(problem: Problem, *, backward: bool = False) -> MixPlan:
    """The cheapest predicted way through a problem."""
    config, cell = problem.config, problem.cell
    batch, time, _, _ = problem.shape
    limit = min(time, config.chunk_len or time)
    item = 8 if dtype_name(problem.work_dtype) == "float64" else 4
    mixing = cast(MixingCell, cell.solve_cell())
    work, rows = mixing.step_work(), batch * mixing.row_layout[0]
    # The adjoint holds products and the cotangents of gates and products too.
    per_step = rows * work.width * item * (work.arrays * (2 if backward else 1) + 2 * work.products * backward)
    wanted = config.segment_len
    pinned = config.pinned(time)
    if wanted is None and pinned is not None:
        wanted = min(DEFAULT_WARMUP, max(1, time // 2))
    warmup = DEFAULT_WARMUP if config.warmup is None else config.warmup
    if time <= 1 or (wanted is not None and wanted >= time):
        return MixPlan("sequential", max(time, 1), 1, 0, None, "one segment covers the whole sequence")
    if config.exact:
        why = "exact=True was asked for, and only the loop multiplies in the loop's order"
        return MixPlan("sequential", time, 1, 0, None, why)
    if wanted is not None:
        count = max(1, min(limit // wanted, WINDOW_BYTES // max(1, wanted * per_step)))
        why = f"segment_len={wanted} was asked for" if config.segment_len else f"{pinned} corrections were asked for"
        return MixPlan("segments", wanted, count, min(warmup, wanted), config.max_passes, why)
    costs = costs_of(problem)
    loop = time * costs.step_us(work, rows, item, tangent=False)
    best: tuple[float, MixPlan] | None = None
    for length in SEGMENT_LENGTHS:
        if 3 * length > limit:
            break
        length = fitting_length(limit, length)
        count = max(1, min(limit // length, WINDOW_BYTES // max(1, length * per_step)))
        if count < 2:
            continue
        plain = costs.step_us(work, rows * count, item, tangent=False)
        tangent = costs.step_us(work, rows * count, item, tangent=True)
        before = min(warmup, length)
        once = length * tangent + count * 12 * mixing.state_slots * costs.call_us
        # One pass where a network forgets within the warm-up; trained ones need more.
        predicted = (limit / (length * count)) * ((before + length) * plain + 0.5 * once)
        predicted += (limit % length) * costs.step_us(work, rows, item, tangent=False)
        predicted *= time / limit
        most = max(3, min(24, int(loop / max(1e-9, (time / (length * count)) * once))))
        if best is None or predicted < best[0]:
            best = predicted, MixPlan(
                "segments", length, count, before, most,
                f"segments of {length} turn {time} matrix-vector products into {length} products of {count * batch} "
                f"rows: predicted {loop / predicted:.1f}x faster than the loop", predicted,
            )  # fmt: skip
    if best is not None and best[0] * MARGIN < loop:
        return best[1]
    gain = f"{loop / best[0]:.2f}x" if best is not None else "no gain"
    return MixPlan(
        "sequential", time, 1, 0, None,
        f"{time} steps of {batch} sequences run fastest as one loop: segments would bring {gain}", loop,
    )  # fmt: skip
