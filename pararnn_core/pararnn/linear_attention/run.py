"""Carries out a checked call in one of its forms, or hands it to a backend's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from array_api_compat import device

from pararnn.arrays import Array, cast, namespace_name, quiet
from pararnn.errors import BackendUnavailableError
from pararnn.linear_attention import windows
from pararnn.linear_attention.chunked import Diagonal
from pararnn.linear_attention.inputs import SHORT, Call, refuse_growth
from pararnn.linear_attention.log_form import log_run, refuse_signs
from pararnn.linear_attention.rank_one import RankOne
from pararnn.linear_attention.recurrent import diagonal_loop, rank_one_loop
from pararnn.linear_attention.scores import Decays

if TYPE_CHECKING:
    from pararnn.backend import Backend


def run_diagonal(call: Call, *, exclusive: bool, bonus: Array | None) -> tuple[Array, Array]:
    """Outputs (B, T, H, V) and final states of a diagonal recurrence; `bonus` is (H, K)."""
    xp = call.xp
    _refuse_growth(call, "log_decay")
    backend = kernel_of(call)
    if backend is not None:
        return backend.diagonal_recurrence(call, exclusive=exclusive, bonus=bonus)
    form = _chosen(call)
    with quiet(xp):
        if form in ("chunk", "subchunk"):

            def halved(part: Call) -> tuple[Array, Array]:
                problem = diagonal_of(part, exclusive=exclusive, bonus=bonus)
                out, final = problem.run()
                return problem.frame.join(xp, out), final

            def anchored(part: Call) -> tuple[Array, Array]:
                return windows.mild(part, exclusive, bonus) or halved(part)

            if _has_windows(call):
                return windows.run_in_windows(call, anchored if form == "chunk" else halved)
            out, final = halved(call)
            return cast(xp, out, call.dtype), final
        q, k, v = call.queries, call.worked("k"), call.worked("v")
        g = call.worked("log_decay") if "log_decay" in call.arrays else None
        wide = None if bonus is None else cast(xp, bonus, call.work_dtype)
        if form == "log":
            if call.offsets is not None:
                raise ValueError(f"{call.what}: form='log' takes no packed sequences; use form='chunk'")
            refuse_signs(call.what, xp, k, v, call.initial)
            g = xp.zeros_like(k[..., :1]) if g is None else g
            out, final = log_run(xp, q, k, v, g, call.initial, exclusive=exclusive, bonus=wide)
        else:
            out, final = diagonal_loop(xp, q, k, v, g, call.initial, call.offsets, exclusive=exclusive, bonus=wide)
        return cast(xp, out, call.dtype), final


def run_rank_one(call: Call) -> tuple[Array, Array]:
    """Outputs (B, T, H, V) and final states of a rank-one recurrence."""
    xp = call.xp
    _refuse_growth(call, "w")
    if call.form == "log":
        raise ValueError(f"{call.what}: form='log' needs terms above zero, and a rank-one update has none; use 'chunk'")
    backend = kernel_of(call)
    if backend is not None:
        return backend.rank_one_recurrence(call)
    form = _chosen(call)
    with quiet(xp):
        if form in ("chunk", "subchunk"):

            def halved(part: Call) -> tuple[Array, Array]:
                problem = rank_one_of(part)
                out, final = problem.run()
                return problem.frame.join(xp, out), final

            if _has_windows(call):
                return windows.run_in_windows(call, halved)
            out, final = halved(call)
            return cast(xp, out, call.dtype), final
        w, k, v, a, b = (call.worked(name) for name in ("w", "k", "v", "a", "b"))
        out, final = rank_one_loop(xp, call.queries, w, k, v, a, b, call.initial, call.offsets)
        return cast(xp, out, call.dtype), final


def _has_windows(call: Call) -> bool:
    return namespace_name(call.xp) == "numpy" and call.offsets is None and call.time > 0


def _chosen(call: Call) -> str:
    """The array form of a call, by its shape alone."""
    if call.form != "auto":
        return call.form
    return "recurrent" if call.offsets is None and call.time <= SHORT else "chunk"


def kernel_of(call: Call) -> Backend | None:
    """The backend whose kernel runs the call: the one asked for, or with form="auto" one on an accelerator.

    Raises:
        BackendUnavailableError: a kernel was asked for, and none takes the call.
    """
    if call.form != "kernel" and (call.form != "auto" or namespace_name(call.xp) != "torch" or on_processor(call)):
        return None
    from pararnn.registry import backends

    refusals = []
    for name, backend in backends().items():
        refusal = backend if isinstance(backend, str) else backend.refuses_recurrence(call)
        refusal = refusal or backend.probe()  # type: ignore[union-attr]
        if refusal is None:
            return backend  # type: ignore[return-value]
        refusals.append(f"{name}: {refusal}")
    if call.form == "auto":
        return None
    raise BackendUnavailableError(f"{call.what}: no kernel runs this; " + "; ".join(refusals))


def on_processor(call: Call) -> bool:
    return "cpu" in str(device(call.initial))


def diagonal_of(call: Call, *, exclusive: bool, bonus: Array | None) -> Diagonal:
    """The call in chunks."""
    xp, frame = call.xp, call.frame
    k = frame.split(xp, call.worked("k"))
    if "log_decay" in call.arrays:
        g = frame.split(xp, call.worked("log_decay"))
    else:
        g = xp.zeros((*k.shape[:-1], 1), dtype=k.dtype, device=device(k))
    return Diagonal(
        xp,
        frame,
        frame.split(xp, call.queries),
        k,
        frame.split(xp, call.worked("v")),
        Decays(xp, g, call.base),
        call.initial,
        exclusive,
        None if bonus is None else cast(xp, bonus, call.work_dtype)[:, None, None, :],
    )


def pull_back_rank_one(call: Call, given: Array, last: Array) -> list[Array]:
    """Cotangents of the call's arguments in their dtypes, and of the initial state, by the adjoint in chunks."""
    xp = call.xp
    with quiet(xp):
        problem = rank_one_of(call)
        of_first, *rest, of_initial = problem.pull_back(problem.frame.split(xp, given), last)
        found = zip(call.arrays.values(), (of_first * call.scale, *rest), strict=True)
        return [*(cast(xp, problem.frame.join(xp, x), like.dtype) for like, x in found), of_initial]


def rank_one_of(call: Call) -> RankOne:
    """The call in chunks."""
    xp, frame = call.xp, call.frame
    k, v, a, b, w = (frame.split(xp, call.worked(name)) for name in ("k", "v", "a", "b", "w"))
    r = frame.split(xp, call.queries)
    return RankOne(xp, frame, r, k, v, a, b, Decays(xp, w, call.base), call.initial)


def _refuse_growth(call: Call, name: str) -> None:
    if name in call.arrays:
        refuse_growth(call.what, name, call.xp, call.arrays[name])
