"""TritonBackend: channelwise problems on CUDA tensors, one generated kernel forward and two backward."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import array_api_compat

from pararnn.adjoint import Gradients, collect_gradients
from pararnn.apart import pull_back_apart, solve_apart
from pararnn.arrays import Array, dtype_name, namespace_name
from pararnn.backend import Backend
from pararnn.engine import ArrayEngine
from pararnn.errors import BackendUnavailableError
from pararnn.linear_attention.inputs import Call
from pararnn.lyapunov import largest_exponent
from pararnn.plan import kernel_reason
from pararnn.problem import Problem
from pararnn.programs import programs_of
from pararnn.solve import check_structure, tolerance
from pararnn.stats import NewtonStats
from pararnn_triton.environment import device_sentence, environment_sentence
from pararnn_triton.interpreter import interpreting
from pararnn_triton.shape import Shape, choose_shape

# Launches of the forward kernel: a plain pass, a second one where joints differ, one with tangents, and one from
# corrected starts that also finishes.
DEFAULT_PASSES = 4


# Of pararnn.kernels.
_FUNCTIONS = ("check_triton_environment", "require_fused_triton", "is_fused_dtype_supported")


def _refuse_if_named(problem: Problem, error: Exception) -> None:
    """Only `auto` may go on without the kernels."""
    if problem.config.scan_backend != "auto":
        raise BackendUnavailableError(f"scan_backend='triton' cannot run here: {error}") from error


class TritonBackend(Backend):
    """Segments with corrections on the device, or one time loop in a kernel where channels fill the chip."""

    name = "triton"
    priority = 40
    offers: Mapping[str, str] = MappingProxyType(
        {f"kernels.{name}": f"pararnn_triton.environment:{name}" for name in _FUNCTIONS}
    )
    packs = True
    families = ("channelwise", "mixing")

    def probe(self) -> str | None:
        return environment_sentence()

    def accepts(self, problem: Problem) -> str | None:
        if namespace_name(problem.xp) != "torch":
            return f"it takes torch tensors, and these are {namespace_name(problem.xp)}'s"
        if problem.x.device.type != "cuda" and not interpreting():
            return f"it takes CUDA tensors, and these are on {problem.x.device}"
        if interpreting() and problem.config.scan_backend == "auto":
            return "Triton's interpreter is on (TRITON_INTERPRET), which is for tests; it has to be named"
        name = dtype_name(problem.dtype)
        if name == "float64":
            return "its kernels compute in float32; float64 runs on the array backend"
        if name == "bfloat16" and problem.x.device.type == "cuda":
            import torch

            major, minor = torch.cuda.get_device_capability(problem.x.device)
            if major < 8:
                return f"bfloat16 needs compute capability 8.0, this card has {major}.{minor}; use float16 or float32"
        if problem.cell.family == "mixing":
            from pararnn_triton.mixing_solve import refusal

            return refusal(problem) or super().accepts(problem)
        config = problem.config
        if config.pinned(problem.shape[1]) is not None:
            return "it solves over segments; a pinned iteration count on every time step runs on the array backend"
        # A guess only says where to start, and these kernels start by steps of their own.
        if config.coords == "log" or check_structure(problem.cell, config):
            return "coords='log' and a diagonal jac_structure for coupled slots are options of the array solver"
        return super().accepts(problem) or (None if interpreting() else device_sentence(problem.x.device))

    def refuses_recurrence(self, call: Call) -> str | None:
        if namespace_name(call.xp) != "torch":
            return f"it takes torch tensors, and these are {namespace_name(call.xp)}'s"
        import torch

        key, value = call.arrays["k"], call.arrays["v"]
        if key.device.type != "cuda" and not (interpreting() and call.form == "kernel"):
            return f"it takes CUDA tensors, and these are on {key.device}"
        if torch.compiler.is_compiling() or any(_wrapped(a) for a in call.arrays.values()):
            return "a transformation or a compiler traces these tensors; the chunk form is what they can look into"
        if any(dtype_name(a.dtype) == "float64" for a in (*call.arrays.values(), call.initial)):
            return "its kernels compute in float32; float64 runs in the chunk form"
        if "w" in call.arrays and call.form == "auto":
            return "its kernel for a rank-one update has to be named, because no card has timed it yet"
        if call.offsets is not None:
            return "it takes no packed sequences; the chunk form does"
        if not key.numel() or not value.numel():
            return "there is nothing to compute"
        full = any(dtype_name(a.dtype) == "float32" for name, a in call.arrays.items() if name != "log_decay")
        widest = 64 if full or "w" in call.arrays else 128
        if key.shape[-1] > widest:
            return f"it holds keys of up to {widest} channels here, and these have {key.shape[-1]}"
        return None

    def diagonal_recurrence(self, call: Call, *, exclusive: bool, bonus: Array | None) -> tuple[Array, Array]:
        from pararnn_triton.linear_attention_run import diagonal_recurrence

        return diagonal_recurrence(call, exclusive=exclusive, bonus=bonus)

    def rank_one_recurrence(self, call: Call) -> tuple[Array, Array]:
        from pararnn_triton.linear_attention_run import rank_one_recurrence

        return rank_one_recurrence(call)

    def example_namespace(self):
        """Where the conformance suite should make its arrays for this backend."""
        import torch

        return torch, "cpu" if interpreting() else "cuda"

    def newton(self, problem: Problem) -> tuple[Array, NewtonStats]:
        if problem.cell.family == "mixing":
            from pararnn_triton.mixing_check import KernelsDisagree
            from pararnn_triton.mixing_solve import solve_mixing_on_cuda

            try:
                if problem.packed:
                    states, stats = solve_apart(problem, solve_mixing_on_cuda)
                else:
                    states, stats = solve_mixing_on_cuda(problem)
                stats.scan_backend = self.name
            except KernelsDisagree as error:
                _refuse_if_named(problem, error)
                states, stats = Backend().newton(problem)
                stats.reason += f"; not by kernels, because {error}"
            return states, stats
        from pararnn_triton.launch import run_forward

        shape = _shape(problem)
        # No bit of a document may depend on its neighbours, so packed problems end with joints that match exactly.
        tol = 0.0 if problem.packed or problem.config.exact else tolerance(problem.config, problem)
        batch, time, _, _ = problem.shape
        stats = NewtonStats(
            scan_backend=self.name,
            path="segments" if shape.segments > 1 else "sequential",
            segment_len=shape.length,
            segments=shape.segments,
            windows=1,
            passes=shape.passes,
            iters=shape.passes - 1,
            reason=kernel_reason(shape.length, shape.segments, shape.passes),
        )
        if not batch or not time:
            stats.max_residual = stats.agreement_estimate = 0.0
            stats.exact = stats.converged = True
            return problem.xp.zeros(problem.state_shape, dtype=problem.dtype, device=problem.device), stats
        accept = 5.0 * tol
        programs, gates = programs_of(problem.cell, marks=problem.marks), _gates(problem)
        states, estimate = run_forward(
            programs, gates, _h0(problem), _params(problem), shape, tol, accept, _told(problem)
        )
        states = states[:, :, 0, :] if problem.cell.state_slots == 1 else states
        if problem.kept is not None:
            # One product in three of a training step.
            problem.kept["gates", states.data_ptr()] = gates
        # Read only when asked for: reading waits for the device.
        stats.later(
            agreement_estimate=lambda: float(estimate.max()),
            max_residual=lambda: float(estimate.max()),
            exact=lambda: not bool((estimate != 0).any()),
            converged=lambda: bool((estimate <= accept).all()),
            lyapunov=lambda: largest_exponent(problem, states, ArrayEngine(problem.xp)),
        )
        return states, stats

    def pull_back(self, problem: Problem, states: Array, cotangent: Array) -> Gradients:
        if problem.cell.family == "mixing":
            from pararnn_triton.mixing_check import KernelsDisagree
            from pararnn_triton.mixing_solve import pull_back_mixing_on_cuda

            try:
                if problem.packed:
                    return pull_back_apart(problem, pull_back_mixing_on_cuda, states, cotangent)
                return pull_back_mixing_on_cuda(problem, states, cotangent)
            except KernelsDisagree as error:
                _refuse_if_named(problem, error)
                return Backend().pull_back(problem, states, cotangent)
        from pararnn_triton.launch import run_backward

        cell = problem.cell
        batch, time, features, width = problem.shape
        slots = (batch, time, cell.state_slots, width)
        # Taken away, because they are overwritten; a second gradient of the same solve makes them again.
        gates = None if problem.kept is None else problem.kept.pop(("gates", states.data_ptr()), None)
        d_gates, d_params, d_h0, d_starts = run_backward(
            programs_of(cell, marks=problem.marks),
            _gates(problem) if gates is None else gates,
            _h0(problem),
            _params(problem),
            states.reshape(slots).contiguous(),
            cotangent.reshape(slots).to(problem.dtype).contiguous(),
            _shape(problem, backward=True),
            _told(problem),
            overwrite=True,
        )
        flat = d_gates.reshape(batch * time, -1)
        d_x = (flat @ cell.W_x.weight).reshape(batch, time, features)
        d_weight = flat.T @ problem.x.reshape(batch * time, features)
        grads = collect_gradients(problem, list(d_params), d_weight, flat.sum(dim=0))
        d_h0 = d_h0.reshape(batch, *cell.state_shape).to(problem.dtype)
        if d_starts is not None:
            d_starts = d_starts.reshape(-1, *cell.state_shape).to(problem.dtype)
        return Gradients(d_x, grads, d_h0, starts=d_starts)

    def decodes(self, cell: Any, ref: Array) -> bool:
        if namespace_name(array_api_compat.array_namespace(ref)) != "torch" or cell.family != "channelwise":
            return False
        if ref.device.type != "cuda" and not interpreting():
            return False
        name = dtype_name(cell.dtype)
        if name == "bfloat16" and ref.device.type == "cuda" and _before_bfloat16(ref.device):
            return False
        return name != "float64" and self.probe() is None

    def decode(
        self, cell: Any, state: Array, given: Array, projected: bool, out: Array | None, table: Array | None
    ) -> Array:
        from pararnn_triton.decode import decode

        return decode(cell, state, given, projected, out, table)

    def describe(self, problem: Problem) -> dict[str, object]:
        if problem.cell.family == "mixing":
            from pararnn_triton.mixing_solve import describe_mixing_on_cuda

            return describe_mixing_on_cuda(problem)
        shape = _shape(problem)
        return {
            "path": "segments" if shape.segments > 1 else "sequential",
            "segment_len": shape.length,
            "segments": shape.segments,
            "passes": shape.passes,
            "reason": kernel_reason(shape.length, shape.segments, shape.passes),
        }


def _before_bfloat16(device: Any) -> bool:
    import torch

    return torch.cuda.get_device_capability(device) < (8, 0)


def _shape(problem: Problem, *, backward: bool = False) -> Shape:
    batch, time, _, width = problem.shape
    config = problem.config
    return choose_shape(
        batch,
        time,
        width,
        segment_len=config.segment_len,
        warmup=config.warmup,
        passes=config.max_passes or DEFAULT_PASSES,
        # Backwards the segments are affine maps, which join exactly however long the cell remembers.
        long_memory=problem.cell.long_memory and not backward,
        half=dtype_name(problem.dtype) != "float32",
    )


def _gates(problem: Problem):
    """The gate inputs (B, T, G, D) in the dtype of the input."""
    import torch

    batch, time, _, width = problem.shape
    projected = torch.nn.functional.linear(problem.x, *problem.cell.W_x)
    return projected.reshape(batch, time, len(problem.cell.gates), width)


def _params(problem: Problem):
    """The clamped params (P, D) in float32."""
    import torch

    values = problem.cell.recurrent(problem.xp, torch.float32)
    return torch.stack(values) if values else problem.x.new_zeros((1, problem.cell.d_h), dtype=torch.float32)


def _told(problem: Problem):
    """Heads, starts and padding as the kernels read them."""
    import torch

    from pararnn_triton.launch import NOTHING, Told

    if not problem.packed:
        return NOTHING
    head, starts, hold, cell = problem.head, problem.starts, problem.hold, problem.cell
    if starts is not None:
        starts = starts.to(torch.float32).reshape(-1, cell.state_slots, cell.d_h).contiguous()
    return Told(
        None if head is None else head.contiguous(),
        starts,
        None if hold is None else hold.contiguous().view(torch.uint8),
        problem.documents or 0,
    )


def _h0(problem: Problem):
    import torch

    if problem.h0 is None:
        return None
    batch, _, _, width = problem.shape
    return problem.h0.to(torch.float32).reshape(batch, problem.cell.state_slots, width).contiguous()


def _wrapped(tensor: Array) -> bool:
    import torch

    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)
