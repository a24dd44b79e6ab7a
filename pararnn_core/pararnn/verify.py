"""verify_agreement: one batch run both ways, compared slot by slot relative to the slot's scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from array_api_compat import device

from pararnn.arrays import Array, cast, dtype_name, has_float64, namespace_name, quiet, same_bits
from pararnn.config import NewtonConfig
from pararnn.drives import with_drives
from pararnn.errors import AgreementError
from pararnn.front import front_of
from pararnn.packing import given_packing
from pararnn.problem import make_problem
from pararnn.stats import NewtonStats

_ATOL = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}


def default_agreement_atol(dtype: Any) -> float:
    """The documented agreement τ of a dtype: 1e-10 (float64), 1e-4 (float32), 1e-2 (half).

    Raises:
        TypeError: the dtype is not one of these.

    >>> import numpy as np
    >>> default_agreement_atol(np.float32)
    0.0001
    """
    name = dtype_name(dtype)
    if name not in _ATOL:
        raise TypeError(f"default_agreement_atol: wanted one of {', '.join(_ATOL)}, got {dtype!r}")
    return _ATOL[name]


@dataclass(frozen=True)
class AgreementReport:
    """How far the parallel run is from the sequential one.

    Attributes:
        ok: every slot's relative error is within ``atol`` (plus ``rtol`` of the reference, elementwise).
        max_abs, max_rel, mean_abs: over all slots; ``max_rel`` is relative to each slot's scale, never to a single
            value near zero.
        slots: relative error by slot name.
        worst: slot, batch, time and channel of the largest relative error.
        atol, rtol, reference: what was asked for; reference is 'same' (the dtype's own loop) or 'float64'.
        shape, dtype, device: of the states.
        newton_iters, max_residual, estimate, exact, path: from the solve's stats.
    """

    ok: bool
    max_abs: float
    max_rel: float
    mean_abs: float
    atol: float
    rtol: float
    reference: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    slots: dict[str, float]
    worst: dict[str, Any]
    newton_iters: int
    max_residual: float
    estimate: float
    exact: bool
    path: str
    backend: str

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, to paste into a report."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        verdict = "agrees" if self.ok else "DISAGREES"
        slots = ", ".join(f"{name} {value:.2e}" for name, value in self.slots.items())
        return (
            f"{verdict}: relative error {self.max_rel:.2e} (allowed {self.atol:.0e}; {slots}), "
            f"max_abs {self.max_abs:.2e}, estimate {self.estimate:.1e}{' exact' if self.exact else ''}, "
            f"{self.path} on {self.backend}, {self.dtype} {self.shape}"
        )


def verify_agreement(
    module: Any,
    x: Array,
    *,
    config: NewtonConfig | None = None,
    h0: Array | None = None,
    atol: float | None = None,
    rtol: float = 0.0,
    reference: str = "same",
    raise_on_fail: bool = False,
    cu_seqlens: Any = None,
    reset: Array | None = None,
    mask: Array | None = None,
    **drives: Any,
) -> AgreementReport:
    """Runs one batch in parallel and as a time loop, and reports how far they are apart.

    ::

        error_s = max|h_s - ĥ_s| / max|ĥ_s|   for each slot s;   ok: every error_s ≤ atol

    Where the loop is not finite, the parallel run must be not finite in the same places.

    Args:
        module: a ChannelwiseCell, a ParaRNN, or a module that holds one as ``rnn``.
        x, config, h0, cu_seqlens, reset, mask: as for newton_apply.
        atol, rtol: allowed error; atol defaults to default_agreement_atol(x.dtype).
        reference: 'same' compares with the loop in x's dtype, 'float64' with the loop in float64.
        raise_on_fail: AgreementError (with ``.report``) instead of a report that is not ok.
        drives: per-step inputs of cells that have them, as for newton_apply.

    Raises:
        TypeError, ValueError: as newton_apply; also for a module that is no cell and no ParaRNN, and for
            reference='float64' where the library has no float64.
        AgreementError: see raise_on_fail.

    >>> import numpy as np
    >>> from pararnn import ParaGRU
    >>> verify_agreement(ParaGRU(2, 3, seed=0), np.ones((1, 100, 2), dtype=np.float32)).ok
    True
    """
    own = getattr(getattr(module, "rnn", module), "verify_agreement", None)
    packing = given_packing(cu_seqlens=cu_seqlens, reset=reset, mask=mask)
    if own is not None and not isinstance(module, type):
        report = own(x, config=config, h0=h0, atol=atol, rtol=rtol, reference=reference, **packing, **drives)
    elif hasattr(module, "slots"):
        report = verify_layers(
            [module], x, config, [h0], atol=atol, rtol=rtol, reference=reference, **packing, **drives
        )
    else:
        raise TypeError(f"verify_agreement: wanted a ChannelwiseCell or a ParaRNN, got {type(module).__name__}")
    if raise_on_fail and not report.ok:
        raise AgreementError(f"verify_agreement: {report}", report)
    return report


def verify_layers(
    cells: Sequence[Any],
    x: Array,
    config: NewtonConfig | None,
    starts: Sequence[Array | None],
    *,
    atol: float | None = None,
    rtol: float = 0.0,
    reference: str = "same",
    cu_seqlens: Any = None,
    reset: Array | None = None,
    mask: Array | None = None,
    **drives: Any,
) -> AgreementReport:
    """The report for cells of which each reads the hidden slot of the one before, once in parallel, once as loops."""
    from pararnn.newton import newton_apply
    from pararnn.sequential import sequential_apply

    if reference not in ("same", "float64"):
        raise ValueError(f"verify_agreement: reference must be 'same' or 'float64', got {reference!r}")
    packing = given_packing(cu_seqlens=cu_seqlens, reset=reset, mask=mask)
    reports, given = [], x
    for kind, h0 in zip(cells, starts, strict=True):
        own = {name: value for name, value in drives.items() if len(cells) == 1 or name in kind.drives}
        cell, joined = with_drives("verify_agreement", kind, x, own)
        # Checked here, so that a refusal names the function that was called, and cut off from autograd.
        problem = make_problem("verify_agreement", cell, joined, h0, config, **packing)
        front = front_of(x)
        if front is not None:
            problem = front.untracked(problem)
        if given is x:
            given = problem.x
        else:
            given = with_drives("verify_agreement", kind.to(dtype=given.dtype), given, own)[1]
        stats = NewtonStats()
        start = problem.h0 if problem.starts is None else problem.starts[: problem.documents, ...]
        parallel = newton_apply(problem.cell, problem.x, config, h0=start, stats=stats, **packing)
        true_cell = problem.cell
        if reference == "float64":
            xp = problem.xp
            if not has_float64(xp):
                raise TypeError(
                    f"verify_agreement: reference='float64' needs float64, which {namespace_name(xp)} has switched off "
                    "here (JAX: jax.config.update('jax_enable_x64', True)); use reference='same'"
                )
            true_cell, given = true_cell.to(dtype=xp.float64), cast(xp, given, xp.float64)
            start = None if start is None else cast(xp, start, xp.float64)
        oracle = sequential_apply(true_cell, given, h0=start, **packing)
        reports.append(compare(cell, parallel, oracle, stats, atol=atol, rtol=rtol, reference=reference))
        x, given = passed_on(cell, parallel, problem.x), passed_on(true_cell, oracle, given)
    return reports[0] if len(reports) == 1 else _joined(reports)


def passed_on(cell: Any, states: Array, x: Array) -> Array:
    """What the next layer reads."""
    if cell.family == "linear":
        return cell.readout(cell.xp, states, x)
    return states if cell.state_slots == 1 else states[:, :, cell.hidden_slot, :]


def _joined(reports: list[AgreementReport]) -> AgreementReport:
    """One report for several layers: that of the worst one, with every layer's slots."""
    layer = max(range(len(reports)), key=lambda k: reports[k].max_rel)
    return dataclasses.replace(
        reports[layer],
        ok=all(r.ok for r in reports),
        max_abs=max(r.max_abs for r in reports),
        mean_abs=sum(r.mean_abs for r in reports) / len(reports),
        slots={f"{k}.{name}": error for k, r in enumerate(reports) for name, error in r.slots.items()},
        worst={"layer": layer, **reports[layer].worst},
        newton_iters=max(r.newton_iters for r in reports),
        max_residual=max(r.max_residual for r in reports),
        estimate=max(r.estimate for r in reports),
        exact=all(r.exact for r in reports),
    )


def compare(
    cell: Any,
    parallel: Array,
    oracle: Array,
    stats: NewtonStats,
    *,
    atol: float | None = None,
    rtol: float = 0.0,
    reference: str = "same",
) -> AgreementReport:
    """The report for two state arrays of `cell`."""
    xp = cell.xp
    allowed = default_agreement_atol(parallel.dtype) if atol is None else float(atol)
    wide = oracle.dtype if dtype_name(oracle.dtype) == "float64" else xp.float32
    slots: dict[str, float] = {}
    worst: dict[str, Any] = {}
    ok, max_abs, total, count = True, 0.0, 0.0, 0
    for s, name in enumerate(cell.slots):
        mine = cast(xp, parallel if len(cell.slots) == 1 else parallel[:, :, s, :], wide)
        true = cast(xp, oracle if len(cell.slots) == 1 else oracle[:, :, s, :], wide)
        # A matrix state counts as its entries.
        mine, true = (xp.reshape(a, (*a.shape[:2], -1)) if a.ndim > 3 else a for a in (mine, true))
        if not math.prod(true.shape):
            slots[name] = 0.0
            continue
        size = xp.abs(xp.where(xp.isfinite(true), true, xp.zeros_like(true)))
        scale = float(xp.max(size)) or 1.0
        with quiet(xp):
            # Equal bits, equal infinities and NaN in the same place agree; any other non-finite value does not.
            gap = xp.where(same_bits(xp, mine, true), xp.zeros_like(true), xp.abs(mine - true))
        gap = xp.where(xp.isnan(gap), xp.full_like(gap, float("inf")), gap)
        slots[name] = float(xp.max(gap)) / scale
        ok = ok and bool(xp.all(gap <= allowed * scale + rtol * size))
        max_abs = max(max_abs, float(xp.max(gap)))
        total, count = total + float(xp.sum(gap)), count + math.prod(true.shape)
        if slots[name] >= max(slots.values()):
            flat = int(xp.argmax(xp.reshape(gap, (-1,))))
            time, width = int(true.shape[1]), math.prod(true.shape[2:])
            worst = {
                "slot": name,
                "batch": flat // (time * width),
                "time": flat // width % time,
                "channel": flat % width,
            }
    return AgreementReport(
        ok=ok,
        max_abs=max_abs,
        max_rel=max(slots.values(), default=0.0),
        mean_abs=total / count if count else 0.0,
        atol=allowed,
        rtol=rtol,
        reference=reference,
        shape=tuple(int(n) for n in parallel.shape),
        dtype=dtype_name(parallel.dtype),
        device=str(device(parallel)),
        slots=slots,
        worst=worst,
        newton_iters=stats.iters,
        max_residual=stats.max_residual,
        estimate=stats.agreement_estimate,
        exact=stats.exact,
        path=stats.path,
        backend=stats.scan_backend,
    )
