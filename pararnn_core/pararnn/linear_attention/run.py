"""Carries out a checked call in one of its forms, or hands it to a backend's kernels."""

from __future__ import annotations

from array_api_compat import device

from pararnn.arrays import Array, cast, quiet
from pararnn.linear_attention.chunked import Diagonal
from pararnn.linear_attention.inputs import SHORT, Call, refuse_growth
from pararnn.linear_attention.log_form import log_run, refuse_signs
from pararnn.linear_attention.rank_one import RankOne
from pararnn.linear_attention.recurrent import diagonal_loop, rank_one_loop
from pararnn.linear_attention.scores import Decays


def run_diagonal(call: Call, *, exclusive: bool, bonus: Array | None) -> tuple[Array, Array]:
    """Outputs (B, T, H, V) and final states of a diagonal recurrence; `bonus` is (H, K)."""
    xp = call.xp
    _refuse_growth(call, "log_decay")
    form = call.form
    if form == "auto":
        form = "recurrent" if call.offsets is None and call.time <= SHORT else "chunk"
    with quiet(xp):
        if form in ("chunk", "subchunk"):
            problem = diagonal_of(call, exclusive=exclusive, bonus=bonus)
            out, final = problem.run()
            return cast(xp, problem.frame.join(xp, out), call.dtype), final
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
    form = call.form
    if form == "auto":
        form = "recurrent" if call.offsets is None and call.time <= SHORT else "chunk"
    with quiet(xp):
        if form in ("chunk", "subchunk"):
            problem = rank_one_of(call)
            out, final = problem.run()
            return cast(xp, problem.frame.join(xp, out), call.dtype), final
        w, k, v, a, b = (call.worked(name) for name in ("w", "k", "v", "a", "b"))
        out, final = rank_one_loop(xp, call.queries, w, k, v, a, b, call.initial, call.offsets)
        return cast(xp, out, call.dtype), final


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


def rank_one_of(call: Call) -> RankOne:
    """The call in chunks."""
    xp, frame = call.xp, call.frame
    k, v, a, b, w = (frame.split(xp, call.worked(name)) for name in ("k", "v", "a", "b", "w"))
    r = frame.split(xp, call.queries)
    return RankOne(xp, frame, r, k, v, a, b, Decays(xp, w, call.base), call.initial)


def _refuse_growth(call: Call, name: str) -> None:
    if name in call.arrays:
        refuse_growth(call.what, name, call.xp, call.arrays[name])
