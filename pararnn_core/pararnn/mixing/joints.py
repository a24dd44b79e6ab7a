"""Joints: finds the segment starts at which all segments fit together, or says of which sequences it cannot.

::

    s_0 given,   s_{c+1} = F_c(s_c)

is iterated with s'_{c+1} = F_c(s_c) + m_c (s'_c - s_c), where m_c is the running product of the true diagonal of the
steps' Jacobians: it carries slow memory that stays in its channel (an LSTM's c), and costs no product. The adjoint is
the same problem, travelled from the right.

How far the starts are from the true ones is not read off the mismatches r_c = F_c(s_c) - s_{c+1} alone: a network that
does not forget adds them up, one that amplifies blows them up. The first wrong start is wrong by its mismatch, and
from there the error is carried by what the segments really do, which is measured: g_c = |ΔF_c| / |Δs_c| between two
passes (between warm-up and pass at first). The estimate is the recurrence E_{c+1} = g_c E_c + |r_c|.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pararnn.arrays import Array, Namespace, epsilon, namespace_name, same_bits

DEFAULT_MAX_PASSES = 24
# Passes over which the mismatch must have halved; trained networks stall for two or three before they settle.
PATIENCE = 4


@dataclass(frozen=True)
class JointSettings:
    """`tol` is aimed at, `accept` is taken where rounding keeps the estimate above; both relative to a slot's scale."""

    tol: float
    accept: float
    max_passes: int
    # A pinned number of corrections: no test, no finish; each is relaxed by omega, and they end early at the residual.
    corrections: int | None = None
    omega: float = 1.0
    residual_atol: float | None = None
    bounds: Sequence[tuple[float, float] | None] = ()
    logarithmic: Sequence[bool] = ()
    # Where slots have no scale of their own, as cotangents do not.
    one_scale: bool = False


@dataclass
class Settled:
    """What came of it, by sequence: whether the joints fit, and the estimated error within and at the end."""

    settled: np.ndarray
    error: np.ndarray
    end_error: np.ndarray
    passes: int = 0
    corrections: int = 0
    history: list[float] = field(default_factory=list)
    # log of the measured growth per segment, mean over the segments; the largest of any sequence.
    growth: float = float("nan")
    gave_up: str = ""


@dataclass(frozen=True)
class Measured:
    """Norms after a pass, on the host and relative to the slots' scales.

    `mismatch` (B, C-1) at the joints; `moved_start` and `moved_end` (B, C), how far starts and ends have moved since
    the pass before; `growth` (B, C), what the warm-up says about g, None where it says nothing.
    """

    mismatch: np.ndarray
    moved_start: np.ndarray | None = None
    moved_end: np.ndarray | None = None
    growth: np.ndarray | None = None


class Joints(Protocol):
    """The array side of `settle`: holds starts, ends and diagonals of all segments."""

    # Below this a moved start is rounding, and says nothing about growth.
    floor: float

    def begin(self) -> Measured:
        """The first pass."""
        ...

    def again(self, keep: np.ndarray) -> Measured | None:
        """Corrects the starts of the sequences not in `keep` and runs what changed; None where nothing did."""
        ...


def settle(joints: Joints, settings: JointSettings, error: np.ndarray) -> Settled:
    """Passes until the joints fit, or until it is plain that they will not.

    Args:
        error: estimated error of the first starts, by sequence.
    """
    batch = len(error)
    measured = joints.begin()
    out = Settled(np.zeros(batch, bool), np.full(batch, np.inf), np.zeros(batch), passes=1)
    unknown = np.full((batch, measured.mismatch.shape[1] + 1), np.inf)
    growth = unknown if measured.growth is None else measured.growth
    while True:
        norms = measured.mismatch
        if measured.moved_start is not None and measured.moved_end is not None:
            seen = measured.moved_start > joints.floor
            # What overflowed gives NaN, which no test accepts.
            with np.errstate(invalid="ignore"):
                growth = np.where(seen, measured.moved_end / np.where(seen, measured.moved_start, 1.0), growth)
        within, at_end = _carried(norms, growth, error)
        worst = float(np.max(norms, initial=0.0))
        out.history.append(worst)
        out.error, out.end_error = within, at_end
        done = np.zeros(batch, bool)
        if settings.corrections is not None:
            small = settings.residual_atol is not None and worst < settings.residual_atol
            if small or out.corrections == settings.corrections:
                break
        else:
            done = within <= settings.tol
            past = out.history[-1 - PATIENCE] if len(out.history) > PATIENCE else math.inf
            stalled = not worst <= 0.5 * past
            ended = stalled or out.passes >= settings.max_passes
            if ended:
                done = done | (within <= settings.accept)
            out.settled = done
            if bool(np.all(done)):
                break
            if ended:
                out.gave_up = f"its joints were still {worst:.1e} apart after {out.passes} passes"
                if stalled:
                    out.gave_up += (
                        f", of which the last {PATIENCE} did not halve the gap: it neither forgets nor remembers "
                        "channel by channel"
                    )
                break
        again = joints.again(done)
        out.corrections += 1
        if again is None:
            # Nothing moves any more: what is left is what this arithmetic cannot tell apart.
            out.settled = done | (within <= settings.accept)
            out.gave_up = "" if bool(np.all(out.settled)) else "its starts stopped moving before the joints fitted"
            break
        out.passes += 1
        measured = again
    if growth.shape[1] > 1:
        with np.errstate(divide="ignore", invalid="ignore"):
            out.growth = float(np.max(np.mean(np.log(np.maximum(growth[:, :-1], 1e-30)), axis=1)))
    return out


# run(rows, starts) runs the segments in `rows` (None for all) from `starts` and gives their ends, and their diagonals
# unless those are to be had, for all segments at once, from another function when a correction first needs them.
Run = Callable[[Array | None, list[Array]], tuple[list[Array], list[Array] | None]]
# gain(mismatches, scales): how much of a difference at a segment's start is left at its end, (B, C).
Gain = Callable[[list[Array], list[float]], np.ndarray]


class ArrayJoints:
    """Joints with array-API calls; only segments whose start changed are run again.

    Args:
        first, starts: the exact first start (B, …) and the guessed others (B, C-1, …), by slot.
        entries: (row, column) of each diagonal that a run gives back.
        diagonals: gives the diagonals of the first pass, which most networks never need.
        gain: from the first mismatches and the scales, a first measurement of g.
    """

    def __init__(
        self,
        xp: Namespace,
        first: list[Array],
        starts: list[Array],
        run: Run,
        entries: Sequence[tuple[int, int]],
        settings: JointSettings,
        diagonals: Callable[[], list[Array]],
        gain: Gain | None = None,
    ) -> None:
        self.diagonals = diagonals
        self.xp, self.run, self.entries, self.settings, self.gain = xp, run, entries, settings, gain
        self.s = [xp.concat([xp.expand_dims(f, axis=1), g], axis=1) for f, g in zip(first, starts, strict=True)]
        self.e: list[Array] = []
        self.m: list[Array] = []
        self.boxes = _boxes(xp, first, settings.bounds)
        self.batch, self.count = int(self.s[0].shape[0]), int(self.s[0].shape[1])
        self.floor = 200.0 * epsilon(first[0].dtype)

    def begin(self) -> Measured:
        xp = self.xp
        ends, _ = self.run(None, [_flat(xp, a) for a in self.s])
        self.e = self._split(ends)
        scale = self._scales()
        gaps = self._gaps()
        growth = None if self.gain is None else self.gain(gaps, scale)
        return Measured(_host(xp, _norm(xp, gaps, scale)), growth=growth)

    def again(self, keep: np.ndarray) -> Measured | None:
        xp, batch, count = self.xp, self.batch, self.count
        old_s, old_e = self.s, self.e
        if not self.m:
            self.m = self._split(self.diagonals())
        new = _corrected(xp, self.s, self.e, self.m, self.entries, self.boxes)
        if self.settings.omega != 1.0:
            new = [a + self.settings.omega * gap(xp, b, a) for a, b in zip(old_s, new, strict=True)]
        where = _device(new[0])
        moved = xp.zeros((batch, count), dtype=xp.bool, device=where)
        for a, b in zip(new, old_s, strict=True):
            moved = moved | xp.any(xp.reshape(~same_bits(xp, a, b), (batch, count, -1)), axis=2)
        changed = _host_bool(xp, moved) & ~keep[:, None]
        rows = np.flatnonzero(changed.reshape(-1))
        if not len(rows):
            return None
        if len(rows) == batch * count:
            ends, diagonal = self.run(None, [_flat(xp, a) for a in new])
            self.s, self.e = new, self._split(ends)
            self.m = self.m if diagonal is None else self._split(diagonal)
        else:
            index, mask = xp.asarray(rows, device=where), xp.asarray(changed, device=where)
            ends, diagonal = self.run(index, [xp.take(_flat(xp, a), index, axis=0) for a in new])
            self.s = [xp.where(_spread(xp, mask, a), b, a) for a, b in zip(old_s, new, strict=True)]
            # Copies, because what the ends were is compared with what they are.
            flat = [xp.asarray(_flat(xp, a), copy=True) for a in old_e]
            self.e = self._split([put_rows(xp, a, index, b) for a, b in zip(flat, ends, strict=True)])
            if diagonal is not None:
                flat = [_flat(xp, a) for a in self.m]
                self.m = self._split([put_rows(xp, a, index, b) for a, b in zip(flat, diagonal, strict=True)])
        scale = self._scales()
        return Measured(
            _host(xp, _norm(xp, self._gaps(), scale)),
            _host(xp, _norm(xp, [gap(xp, a, b) for a, b in zip(self.s, old_s, strict=True)], scale)),
            _host(xp, _norm(xp, [gap(xp, a, b) for a, b in zip(self.e, old_e, strict=True)], scale)),
        )

    def _gaps(self) -> list[Array]:
        return [gap(self.xp, a[:, :-1, ...], b[:, 1:, ...]) for a, b in zip(self.e, self.s, strict=True)]

    def _scales(self) -> list[float]:
        return _scales(self.xp, [*zip(self.s, self.e, strict=True)], self.settings)

    def _split(self, parts: list[Array]) -> list[Array]:
        return [self.xp.reshape(a, (self.batch, self.count, *a.shape[1:])) for a in parts]


def warmup_gain(
    xp: Namespace, apart: list[Array], mismatch: list[Array], scale: Sequence[float], stretch: float
) -> np.ndarray:
    """`warmup_ratio` of arrays (B, C-1, …) by slot."""
    return warmup_ratio(_host(xp, _norm(xp, apart, scale)), _host(xp, _norm(xp, mismatch, scale)), stretch)


def warmup_ratio(before: np.ndarray, after: np.ndarray, stretch: float) -> np.ndarray:
    """How much of a difference at the warm-up's beginning is left at its end, (B, C); a segment is `stretch` as long.

    `before` (B, C-1) is how far pass and warm-up were apart where the latter began, `after` how far at the joint.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # From an infinite distance (a logarithm of nothing) everything looks near.
        g = np.where(after == 0.0, 0.0, np.where(np.isinf(before), np.inf, after / before))
        # Over the whole segment a growing network grows more.
        g = np.where(g > 1.0, g**stretch, g)
    g = np.where(np.isnan(g), np.inf, g)
    # The last segment is compared with nothing; it is taken to do as the others do.
    return np.concatenate([g, np.max(g, axis=1, keepdims=True, initial=0.0)], axis=1)


def _carried(norms: np.ndarray, growth: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest estimated error within the segments, and that at the end, by sequence.

    In plain numbers, which for the few joints of a sequence take a tenth of NumPy's time.
    """
    within, at_end = [], []
    for mismatches, gains, first in zip(norms.tolist(), growth.tolist(), error.tolist(), strict=True):
        at = worst = first
        mismatches.append(0.0)
        for mismatch, gain in zip(mismatches, gains, strict=True):
            # Within a segment the error may swell before it ends smaller; exact starts stay exact.
            carried = gain * at if at else 0.0
            if carried > worst or carried != carried:
                worst = carried
            at = carried + mismatch
            if at > worst or at != at:
                worst = at
        within.append(math.inf if worst != worst else worst)
        at_end.append(math.inf if at != at else at)
    return np.asarray(within), np.asarray(at_end)


def _corrected(
    xp: Namespace, s: list[Array], e: list[Array], m: list[Array], entries: Sequence[tuple[int, int]],
    boxes: list[tuple[Array, Array] | None],
) -> list[Array]:  # fmt: skip
    """The guarded correction: δ_{c+1} = r_c + m_c δ_c, projected on the box; where it is not finite, the end itself."""
    count = int(s[0].shape[1])
    delta = [xp.zeros_like(a[:, 0, ...]) for a in s]
    columns: list[list[Array]] = [[a[:, 0, ...]] for a in s]
    for c in range(count - 1):
        new_delta = []
        for i in range(len(s)):
            end, old = e[i][:, c, ...], s[i][:, c + 1, ...]
            wanted = end
            for (row, column), factor in zip(entries, m, strict=True):
                if row == i:
                    d = delta[column]
                    # An exact start stays exact even where the tangent has overflowed.
                    wanted = wanted + xp.where(d == 0.0, xp.zeros_like(d), factor[:, c, ...] * d)
            if (box := boxes[i]) is not None:
                wanted = xp.minimum(xp.maximum(wanted, box[0]), box[1])
            start = xp.where(xp.isfinite(wanted), wanted, end)
            columns[i].append(start)
            gap = start - old
            new_delta.append(xp.where(same_bits(xp, start, old), xp.zeros_like(gap), gap))
        delta = new_delta
    return [xp.stack(column, axis=1) for column in columns]


def _boxes(
    xp: Namespace, first: list[Array], bounds: Sequence[tuple[float, float] | None]
) -> list[tuple[Array, Array] | None]:
    """Where a bounded slot can be, given where it starts."""
    out: list[tuple[Array, Array] | None] = []
    for k, a in enumerate(first):
        bound = bounds[k] if k < len(bounds) else None
        if bound is None:
            out.append(None)
            continue
        low, high = (xp.full_like(a[:1, ...], b) for b in bound)
        # A start outside pulls every channel with it, through the products.
        out.append((xp.minimum(low, xp.min(a)), xp.maximum(high, xp.max(a))))
    return out


def _scales(xp: Namespace, pairs: list[tuple[Array, Array]], settings: JointSettings) -> list[float]:
    scales = []
    for k, pair in enumerate(pairs):
        if settings.logarithmic and settings.logarithmic[k]:
            scales.append(1.0)
            continue
        sizes = [xp.max(xp.where(xp.isfinite(a), xp.abs(a), xp.zeros_like(a))) for a in pair]
        scales.append(max(float(v) for v in sizes) or 1.0)
    return [max(scales)] * len(scales) if settings.one_scale else scales


def gap(xp: Namespace, a: Array, b: Array) -> Array:
    return xp.where(same_bits(xp, a, b), xp.zeros_like(a), a - b)


def _norm(xp: Namespace, parts: list[Array], scale: Sequence[float]) -> Array:
    """The largest entry of any slot and channel relative to the slot's scale, (B, C)."""
    total = None
    for part, size in zip(parts, scale, strict=True):
        batch, count = part.shape[:2]
        if count == 0:
            return xp.zeros((batch, 0), dtype=part.dtype, device=_device(part))
        flat = xp.abs(xp.reshape(part, (batch, count, -1)))
        flat = xp.where(xp.isnan(flat), xp.full_like(flat, float("inf")), flat)
        largest = xp.max(flat, axis=2) / size
        total = largest if total is None else xp.maximum(total, largest)
    return total


def _device(a: Array) -> Any:
    from array_api_compat import device

    return device(a)


def _spread(xp: Namespace, mask: Array, like: Array) -> Array:
    return xp.reshape(mask, (*mask.shape, *([1] * (like.ndim - 2))))


def _flat(xp: Namespace, a: Array) -> Array:
    """(B, C, …) as (B·C, …)."""
    return xp.reshape(a, (int(a.shape[0]) * int(a.shape[1]), *a.shape[2:]))


def put_rows(xp: Namespace, whole: Array, index: Array, part: Array) -> Array:
    """`whole` with the rows in `index` replaced; it may be changed in place."""
    if namespace_name(xp) == "jax":
        return whole.at[index].set(part)
    if namespace_name(xp) == "array_api_strict":
        for k in range(int(index.shape[0])):
            whole[int(index[k]), ...] = part[k, ...]
        return whole
    whole[index] = part
    return whole


def _host(xp: Namespace, a: Array) -> np.ndarray:
    """A small array as float64 on the host, where the decisions are taken."""
    if hasattr(a, "detach"):
        return a.detach().cpu().double().numpy()
    if hasattr(a, "get"):
        return a.get().astype(np.float64)
    host = np.from_dlpack(a) if namespace_name(xp) == "array_api_strict" else np.asarray(a)
    return host.astype(np.float64)


def _host_bool(xp: Namespace, a: Array) -> np.ndarray:
    return _host(xp, xp.astype(a, xp.float32)) > 0.0
