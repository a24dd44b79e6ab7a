"""CupyBackend: channelwise problems on CUDA memory, with kernels that CuPy compiles from generated CUDA C++."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from pararnn.adjoint import Gradients, collect_gradients
from pararnn.arrays import Array, cast, dtype_name, namespace_name, quiet
from pararnn.backend import Backend
from pararnn.engine import ArrayEngine
from pararnn.lyapunov import largest_exponent
from pararnn.plan import kernel_reason
from pararnn.problem import Problem
from pararnn.programs import StepPrograms, programs_of
from pararnn.solve import tolerance
from pararnn.stats import NewtonStats
from pararnn_cupy.environment import environment_sentence
from pararnn_cupy.front import NumbaFront
from pararnn_cupy.launch import NOTHING, Card, Told, run_backward, run_forward
from pararnn_cupy.layout import DEFAULT_PASSES, Layout, choose_layout

# Offsets within a group of rows are 32-bit numbers inside the kernels; everything else is 64-bit.
WIDEST = 2**31 // 64


class CupyBackend(Backend):
    """Segments with corrections on the device, or one time loop in a kernel where channels fill the chip.

    ``auto`` takes it for CuPy arrays. Named, it also takes CUDA tensors of PyTorch, in place and on PyTorch's stream,
    and NumPy arrays, which it copies to the current device and back.
    """

    name = "cupy"
    priority = 35
    front = NumbaFront()
    families = ("channelwise", "mixing")
    packs = True

    def probe(self) -> str | None:
        return environment_sentence()

    def accepts(self, problem: Problem) -> str | None:
        return self._accepts_arrays(problem) or self._accepts_options(problem)

    def _accepts_arrays(self, problem: Problem) -> str | None:
        library, named = namespace_name(problem.xp), problem.config.scan_backend == self.name
        if library == "cupy" or (library == "numpy" and named):
            return None
        if library != "torch":
            return f"it takes CuPy arrays, and these are {library}'s"
        if problem.device.type != "cuda":
            return f"it takes CUDA memory, and these tensors are on {problem.device}"
        return None if named else "it takes CuPy arrays by itself, and tensors where scan_backend='cupy' names it"

    def _accepts_options(self, problem: Problem) -> str | None:
        config, (_, time, _, width) = problem.config, problem.shape
        if problem.cell.family == "mixing":
            # Solved by the core: its products are CuPy's, and its elementwise programs are fused kernels.
            if namespace_name(problem.xp) == "torch":
                return "it solves cells that mix channels on CuPy arrays only"
            return super().accepts(problem)
        if config.pinned(time) is not None:
            return "it solves over segments; a pinned iteration count on every time step runs on the array backend"
        if config.coords == "log" or config.jac_structure is not None:
            return "coords='log' and jac_structure are options of the array solver"
        if width * max(len(problem.cell.gates), 1) > WIDEST:
            return f"its kernels take at most {WIDEST:,} gate inputs a step, and this cell has more"
        return super().accepts(problem)

    def example_namespace(self) -> Any:
        """Where the conformance suite should make its arrays for this backend."""
        import cupy

        return cupy

    def card(self, problem: Problem) -> Card:
        """The memory and the stream of the problem's arrays, and the kernels of its cell."""
        from pararnn_cupy.card import CudaCard

        # In public coordinates, where matching joints mean the time loop's states.
        return CudaCard(_programs(problem), problem.dtype, problem.xp, problem.device)

    def newton(self, problem: Problem) -> tuple[Array, NewtonStats]:
        if self._is_on_host(problem):
            states, stats = self.newton(_on_device(problem))
            return states.get(), stats
        if problem.cell.family == "mixing":
            with _current(problem):
                return super().newton(problem)
        layout, config = _layout(problem), problem.config
        # An exact solve accepts no error, so what does not match is walked.
        tol = -1.0 if config.exact else tolerance(config, problem)
        accept = 5.0 * tol
        with quiet(problem.xp), self.card(problem) as card:
            gates = _gates(problem)
            states, estimate, counts = run_forward(
                card, _programs(problem), dtype_name(problem.dtype), gates, *_operands(problem), _guess(problem),
                layout, tol, accept, _told(problem),
            )  # fmt: skip
        states = states[:, :, 0, :] if problem.cell.state_slots == 1 else states
        if problem.kept is not None:
            # One product in four of a training step.
            problem.kept["gates", card.address(states)] = gates
        xp, lanes = problem.xp, problem.shape[0] * problem.shape[3] * layout.segments
        stats = NewtonStats(
            scan_backend=self.name,
            path="segments" if layout.segments > 1 else "sequential",
            segment_len=layout.length,
            segments=layout.segments,
            windows=1,
            reason=kernel_reason(layout.length, layout.segments, layout.passes),
        )

        def later(measure: Callable[[], Any]) -> Callable[[], Any]:
            def measured() -> Any:
                with _current(problem):
                    return measure()

            return measured

        # Read only when asked for: reading waits for the device.
        stats.later(
            agreement_estimate=later(lambda: float(xp.max(estimate))),
            max_residual=later(lambda: float(xp.max(estimate))),
            exact=later(lambda: not bool(xp.any(estimate != 0))),
            converged=later(lambda: bool(xp.all(estimate <= max(accept, 0.0)))),
            walked=later(lambda: float(xp.sum(counts[0, ...])) / lanes),
            passes=later(lambda: min(layout.passes, 2) + int(xp.max(counts[1, ...]))),
            iters=later(lambda: max(0, int(xp.max(counts[1, ...])) - 1)),
            lyapunov=later(lambda: largest_exponent(problem, states, ArrayEngine(xp))),
        )
        return states, stats

    def pull_back(self, problem: Problem, states: Array, cotangent: Array) -> Gradients:
        if self._is_on_host(problem):
            import cupy

            found = self.pull_back(_on_device(problem), cupy.asarray(states), cupy.asarray(cotangent))
            starts = None if found.starts is None else found.starts.get()
            by_name = {name: a.get() for name, a in found.params.items()}
            return Gradients(found.x.get(), by_name, found.h0.get(), starts=starts)
        if problem.cell.family == "mixing":
            with _current(problem):
                return super().pull_back(problem, states, cotangent)
        xp, cell = problem.xp, problem.cell
        batch, time, features, width = problem.shape
        slots = (batch, time, cell.state_slots, width)
        whole = _contiguous(xp, xp.reshape(states, slots))
        given = _contiguous(xp, xp.reshape(cast(xp, cotangent, problem.dtype), slots))
        with quiet(xp), self.card(problem) as card:
            told = _told(problem)
            if told.starts is not None:
                # A start that no step loads keeps its zero.
                told = told._replace(grad_starts=xp.zeros_like(told.starts))
            # Taken away, because their cotangents overwrite them; a second gradient makes them again.
            gates = None if problem.kept is None else problem.kept.pop(("gates", card.address(whole)), None)
            d_gates, sums, d_h0 = run_backward(
                card, _programs(problem), dtype_name(problem.dtype), _gates(problem) if gates is None else gates,
                *_operands(problem), whole, given,
                _layout(problem, backward=True), told,
            )  # fmt: skip
            totals = xp.sum(sums, axis=1)
            count = len(cell.params)
            flat = xp.reshape(d_gates, (batch * time, len(cell.gates) * width))
            d_x = xp.reshape(flat @ cell.W_x.weight, (batch, time, features))
            d_weight = xp.matrix_transpose(flat) @ xp.reshape(problem.x, (batch * time, features))
            params = [totals[k, :] for k in range(count)]
            grads = collect_gradients(problem, params, d_weight, xp.reshape(totals[count:, :], (-1,)))
            h0 = cast(xp, xp.reshape(d_h0, (batch, *cell.state_shape)), problem.dtype)
            d_starts = told.grad_starts
            if d_starts is not None:
                d_starts = cast(xp, xp.reshape(d_starts, (-1, *cell.state_shape)), problem.dtype)
            return Gradients(d_x, grads, h0, starts=d_starts)

    def describe(self, problem: Problem) -> dict[str, object]:
        if problem.cell.family == "mixing":
            return super().describe(problem)
        layout = _layout(problem)
        reason = kernel_reason(layout.length, layout.segments, layout.passes)
        if self._is_on_host(problem):
            reason += "; NumPy arrays are copied to the current device and back, because this backend was named"
        return {
            "path": "segments" if layout.segments > 1 else "sequential",
            "segment_len": layout.length,
            "segments": layout.segments,
            "passes": min(layout.passes, 2),
            "reason": reason,
        }

    def _is_on_host(self, problem: Problem) -> bool:
        return namespace_name(problem.xp) == "numpy"


def _current(problem: Problem) -> AbstractContextManager[Any]:
    """Makes the device of CuPy arrays the current one: elsewhere CuPy reaches their memory from afar, and says so."""
    return problem.device if namespace_name(problem.xp) == "cupy" else nullcontext()


def _on_device(problem: Problem) -> Problem:
    """The problem in CuPy arrays on the current device."""
    import cupy

    from pararnn.arrays import resolve_namespace

    xp = resolve_namespace(cupy)
    names = ("x", "h0", "guess", "head", "starts", "places", "hold", "offsets")
    moved: dict[str, Any] = {n: cupy.asarray(a) for n in names if (a := getattr(problem, n)) is not None}
    return replace(problem, cell=problem.cell.to(xp), xp=xp, kept=None, **moved)


def _programs(problem: Problem) -> StepPrograms:
    return programs_of(problem.cell, marks=problem.marks)


def _layout(problem: Problem, *, backward: bool = False) -> Layout:
    """The layout of the solve, or of the gradient, which is linear and so runs over segments however long memory is."""
    batch, time, _, width = problem.shape
    config = problem.config
    return choose_layout(
        batch,
        time,
        width,
        segment_len=_whole(config.segment_len),
        warmup=_whole(config.warmup),
        passes=_whole(config.max_passes) or DEFAULT_PASSES,
        long_memory=not backward and problem.cell.solve_cell().picard_start,
    )


def _whole(value: Any) -> int | None:
    """Python's own integer: options may be NumPy scalars, which have a width."""
    return None if value is None else int(value)


def _guess(problem: Problem) -> Array | None:
    """The caller's guess (B, T, S, D) in the work dtype."""
    if problem.guess is None:
        return None
    batch, time, _, width = problem.shape
    whole = problem.xp.reshape(problem.guess, (batch, time, problem.cell.state_slots, width))
    return _contiguous(problem.xp, cast(problem.xp, whole, problem.work_dtype))


def _told(problem: Problem) -> Told:
    """Heads, starts and padding as the kernels read them."""
    if not problem.packed:
        return NOTHING
    xp, cell, starts = problem.xp, problem.cell, problem.starts
    if starts is not None:
        rows = xp.reshape(cast(xp, starts, problem.work_dtype), (-1, cell.state_slots, cell.d_h))
        starts = _contiguous(xp, rows)
    head = None if problem.head is None else _contiguous(xp, cast(xp, problem.head, xp.int32))
    hold = None if problem.hold is None else _contiguous(xp, problem.hold)
    return Told(head, starts, hold, problem.documents or 0)


def _contiguous(xp: Any, a: Array) -> Array:
    return a.contiguous() if namespace_name(xp) == "torch" else xp.asarray(a, order="C")


def _gates(problem: Problem) -> Array:
    """Gate inputs (B, T, G, D) without their bias, in the input's dtype."""
    xp, cell = problem.xp, problem.cell
    batch, time, features, width = problem.shape
    gates = xp.reshape(problem.x, (batch * time, features)) @ xp.matrix_transpose(cell.W_x.weight)
    return _contiguous(xp, xp.reshape(gates, (batch, time, len(cell.gates), width)))


def _operands(problem: Problem) -> tuple[Array, Array | None, Array]:
    """Bias, h0 and params in the work dtype."""
    xp, cell = problem.xp, problem.cell
    batch, _, _, width = problem.shape
    work = problem.work_dtype
    values = cell.recurrent(xp, work)
    params = xp.stack(values) if values else xp.zeros((1, width), dtype=work, device=problem.device)
    h0 = None
    if problem.h0 is not None:
        h0 = _contiguous(xp, xp.reshape(cast(xp, problem.h0, work), (batch, cell.state_slots, width)))
    return _contiguous(xp, cast(xp, cell.W_x.bias, work)), h0, _contiguous(xp, params)
