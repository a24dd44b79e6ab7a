"""Newton over segments (multiple shooting): the default solver, for one window of time.

The unknowns are the states at the segment starts. A pass runs every segment with the cell's own steps; the end of one
must meet the start of the next. Where they meet bit for bit, the result *is* the time loop's. Where they do not, the
tangents of the pass say how to move the starts and how large the error can be; what does not settle is walked in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from array_api_compat import device

from pararnn.arrays import Array, Namespace, dtype_name, epsilon, same_bits
from pararnn.cells.base import ChannelwiseCell
from pararnn.engine import ArrayEngine
from pararnn.layout import Window
from pararnn.plan import DEFAULT_WARMUP
from pararnn.programs import StepPrograms

DEFAULT_MAX_PASSES = 12
# A channel whose estimate has not halved in this many passes is walked: early passes may stall before the fall begins.
PATIENCE = 3
# How much larger an error may be in public slots than in the solver's, relative to scale: in c = u exp(l) the error of
# u counts where exp(l) is large, even if u is small there. The soak test measures it.
DECODING = 4.0
# Scale below which a channel counts as zero when accuracy is relative: near the smallest normal number.
SMALLEST_SCALE = {"float32": 1e-36, "float64": 1e-300}


@dataclass(frozen=True)
class Settings:
    """What the solver needs to know from a configuration."""

    # What the joints must meet, and what they may leave once the rounding of any evaluation order is added.
    tol: float
    accept: float
    exact: bool
    warmup: int | None
    max_passes: int
    # A pinned number of corrections: no test, no exact finish.
    corrections: int | None = None
    omega: float = 1.0


@dataclass
class WindowReport:
    """What happened in one window."""

    passes: int = 0
    corrections: int = 0
    mismatch: float = 0.0
    walked: float = 0.0
    history: list[float] = field(default_factory=list)


@dataclass
class WindowResult:
    """States by slot as (L+1, C·m), row 0 the segment starts; the end state and its error by slot as (m,)."""

    states: list[Array]
    end: list[Array]
    # Estimated error of the end state, absolute; and the largest one anywhere, relative to scale. None: all exact.
    error: list[Array] | None
    estimate: Array | None
    report: WindowReport


class WindowSolver:
    """Solves windows with one engine; all arrays are lanes as in `layout.Window`, states in solve coordinates."""

    def __init__(
        self,
        engine: ArrayEngine,
        cell: ChannelwiseCell,
        programs: StepPrograms,
        settings: Settings,
        picard: bool,
        public: bool,
    ) -> None:
        self.engine, self.cell, self.programs, self.settings = engine, cell, programs, settings
        # Whether starts come from the frozen-gate scan, and whether the coordinates are the cell's public ones: only
        # then do matching joints make the result the oracle's bit for bit.
        self.picard, self.public = picard, public
        self.xp: Namespace = engine.xp

    def solve(
        self,
        window: Window,
        gates: list[Array],
        params: list[Array],
        start: list[Array],
        error: list[Array] | None,
        zero: list[Array],
        guess: list[Array] | None = None,
    ) -> WindowResult:
        """One window.

        Args:
            gates: by gate (L, C·m). params: by param (m,). start: by slot (m,), the state before the window.
            error: estimated error of `start` by slot, or None where it is exactly the time loop's.
            zero: by slot (m,), the state from which a warm-up starts.
            guess: by slot ((C-1)·m,), starts of segments 1 … C-1, instead of a warm-up.
        """
        if window.segments == 1:
            return self._one_segment(window, gates, params, start, error)
        xp, m, count = self.xp, window.channels, window.segments
        wide = [xp.tile(p, (count,)) for p in params]
        report = WindowReport()
        if guess is None:
            guess = self._first_starts(window, gates, wide, start, zero)
        starts = [xp.concat([s, g]) for s, g in zip(start, guess, strict=True)]
        if self.settings.corrections is not None:
            return self._pinned(window, gates, wide, starts, error, self.settings.corrections, report)

        none = xp.zeros_like(start[0])
        states: list[Array] | None = None
        index = xp.arange(m, device=device(none))
        if self.public and not self.picard:
            # A plain pass is enough wherever the network forgets within a warm-up.
            states = self.engine.loop(self.programs.advance, starts, gates, wide, keep=self.programs.size).kept
            report.passes = 1
            unsettled = xp.any(~self._joints_match(states, count, m), axis=0)
            for e in error or []:
                unsettled = unsettled | (e != 0.0)
            index = xp.nonzero(unsettled)[0]
        # Arrays of their own: an engine may put into them in place.
        settled = _Settled(states, [xp.zeros_like(none) for _ in start], xp.zeros_like(none))
        if int(index.shape[0]):
            self._settle(window, gates, params, starts, index, error, settled, report)
        assert settled.states is not None
        end = [s[-1, (count - 1) * m :] for s in settled.states]
        if not bool(xp.any(settled.estimate != 0.0)):
            return WindowResult(settled.states, end, None, None, report)
        return WindowResult(settled.states, end, settled.errors, settled.estimate, report)

    def _one_segment(
        self, window: Window, gates: list[Array], params: list[Array], start: list[Array], error: list[Array] | None
    ) -> WindowResult:
        """The time loop; tangents where an error that came in must be followed, or rounding in other coordinates."""
        report = WindowReport(passes=1)
        if error is None and self.public:
            out = self.engine.loop(self.programs.advance, start, gates, params, keep=self.programs.size)
            return WindowResult(out.kept, out.carry, None, None, report)
        xp, tangents = self.xp, self._advance_tangent(gates, params, start)
        if error is None:
            error = [xp.zeros_like(s) for s in start]
        found = self._correct(tangents, start, 1, window.channels, error)
        if self.public:
            found = self._only_where_wrong(found, error)
        end = [s[-1, :] for s in tangents.states]
        return WindowResult(tangents.states, end, found.end_error, found.estimate, report)

    def _first_starts(
        self, window: Window, gates: list[Array], wide: list[Array], start: list[Array], zero: list[Array]
    ) -> list[Array]:
        """Starts of segments 1 … C-1 by slot, from a warm-up over the steps just before each."""
        xp, m, count, length = self.xp, window.channels, window.segments, window.length
        if self.picard:
            return self._picard_starts(window, gates, wide, start)
        begin = [xp.tile(z, (count - 1,)) for z in zero]
        steps = min(length, DEFAULT_WARMUP if self.settings.warmup is None else self.settings.warmup)
        if steps == 0:
            return begin
        if steps == length:
            # The warm-up of segment 1 is then segment 0 itself, from its true start.
            begin = [xp.concat([s, b[m:]]) for s, b in zip(start, begin, strict=True)]
        lanes = (count - 1) * m
        rows = [g[length - steps :, :lanes] for g in gates]
        return self.engine.loop(self.programs.advance, begin, rows, [p[:lanes] for p in wide]).carry

    def _picard_starts(self, window: Window, gates: list[Array], wide: list[Array], start: list[Array]) -> list[Array]:
        """Starts solved exactly with the recurrent weights dropped (gates frozen at h = 0), by slot ((C-1)·m,).

        Without feedback a segment's effect is what it does alone, joined to what is remembered through it.
        """
        xp, m, count, cell = self.xp, window.channels, window.segments, self.cell
        lanes = (count - 1) * m
        rows = [g[:, :lanes] for g in gates]
        empty = cell.empty(xp, rows[0][0, :])
        dropped = [xp.zeros_like(p[:lanes]) for p in wide]
        alone = self.engine.loop(self.programs.advance, empty, rows, dropped).carry
        rows = cell.frozen_gates(xp, rows)
        sums, last = [xp.sum(r, axis=0) for r in rows], [r[-1, :] for r in rows]
        state, starts = tuple(start), []
        for c in range(count - 1):
            part = slice(c * m, (c + 1) * m)
            state = cell.frozen_join(
                xp, state, [a[part] for a in alone], [s[part] for s in sums], [r[part] for r in last]
            )
            starts.append(state)
        return [xp.concat(list(column)) for column in zip(*starts, strict=True)]

    def _advance_tangent(self, gates: list[Array], wide: list[Array], starts: list[Array]) -> Tangents:
        xp, programs, size = self.xp, self.programs, self.programs.size
        one, zero = xp.ones_like(starts[0]), xp.zeros_like(starts[0])
        identity = [one if i == j else zero for i, j in programs.m.where]
        out = self.engine.loop(programs.advance_tangent, [*starts, *identity, *identity], gates, wide, keep=size)
        entries = len(identity)
        return Tangents(out.kept, out.carry[size : size + entries], out.carry[size + entries :])

    def _joints_match(self, states: list[Array], count: int, m: int) -> Array:
        """(C-1, m): every slot of a segment's end equals the next segment's start."""
        lanes = (count - 1) * m
        match = same_bits(self.xp, states[0][-1, :lanes], states[0][0, m:])
        for s in states[1:]:
            match = match & same_bits(self.xp, s[-1, :lanes], s[0, m:])
        return self.xp.reshape(match, (count - 1, m))

    def _mismatch(self, states: list[Array], count: int, m: int) -> float:
        """Largest finite gap at a joint."""
        xp, lanes, worst = self.xp, (count - 1) * m, 0.0
        for s in states:
            gap = xp.abs(s[-1, :lanes] - s[0, m:])
            gap = xp.where(gap < float("inf"), gap, xp.zeros_like(gap))
            worst = max(worst, float(xp.max(gap)))
        return worst

    def _correct(
        self, tangents: Tangents, starts: list[Array], count: int, m: int, error: list[Array] | None
    ) -> Correction:
        """The guarded correction of all starts, and what it says about the error of this pass.

        The correction δ of a start is also the estimate of its error; G carries it to the worst place inside the
        segment, and a floor of rounding travels with it.
        """
        xp, programs, grid = self.xp, self.programs, (count, m)
        ends = tangents.ends
        largest: list[list[tuple[int, Array]]] = [[] for _ in starts]
        for (i, j), g in zip(programs.m.where, tangents.largest, strict=True):
            largest[i].append((j, xp.reshape(g, grid)))
        # Rounding is relative to how large a slot is inside the segment where it happens. In coordinates that are not
        # the loop's own every step rounds differently from the loop, and such steps add up like a random walk.
        unit = epsilon(starts[0].dtype) * (1.0 if self.public else math.sqrt(tangents.steps))
        sizes = [xp.reshape(s, grid) for s in tangents.sizes(xp)]
        # The scale is that of the results: a start far outside what follows must not make errors look small.
        results = [xp.reshape(s, grid) for s in tangents.sizes(xp, first=1)]
        smallest = SMALLEST_SCALE[dtype_name(starts[0].dtype)]
        floors = []
        for row, own in zip(largest, sizes, strict=True):
            inside = sum((g * sizes[j] for j, g in row[1:]), row[0][1] * sizes[row[0][0]])
            floors.append(unit * xp.maximum(inside, own))
        boxes = []
        for bound, s in zip(programs.bounds, starts, strict=True):
            if bound is not None:
                # The interval attracts, so its hull with the true start is never left.
                boxes += [xp.minimum(s[:m], xp.full_like(s[:m], bound[0]))]
                boxes += [xp.maximum(s[:m], xp.full_like(s[:m], bound[1]))]
        scales = [
            xp.ones_like(s[0, :]) if log else xp.maximum(xp.max(s, axis=0), xp.full_like(s[0, :], smallest))
            for s, log in zip(results, programs.logarithmic, strict=True)
        ]
        none = xp.zeros_like(starts[0][:m])
        # After the last segment stands its own end, so that the last δ and ν are the end state's.
        following = [xp.concat([s[m:], e[(count - 1) * m :]]) for s, e in zip(starts, ends, strict=True)]
        out = self.engine.loop(
            programs.correct,
            [none] * programs.size + ([none] * programs.size if error is None else error),
            [xp.reshape(a, grid) for a in (*tangents.product, *ends, *following)] + floors,
            boxes,
            keep=2 * programs.size,
        )
        shift = [xp.abs(d) for d in out.kept[: programs.size]]
        reach = [d + n for d, n in zip(shift, out.kept[programs.size :], strict=True)]
        estimate = unsettled = none
        for row, floor, scale in zip(largest, floors, scales, strict=True):
            inside = sum((g * reach[j][:count, :] for j, g in row), floor)
            estimate = xp.maximum(estimate, xp.max(inside, axis=0) / scale)
            moved = sum((g * shift[j][:count, :] for j, g in row[1:]), row[0][1] * shift[row[0][0]][:count, :])
            unsettled = xp.maximum(unsettled, xp.max(moved, axis=0) / scale)
        new = [
            xp.concat([s[:m], xp.reshape(n[: count - 1, :], (-1,))]) for s, n in zip(starts, out.stored, strict=True)
        ]
        if not self.public:
            # Rounding has its own allowance above; the factor is for what a further pass would remove.
            estimate, unsettled = estimate + (DECODING - 1.0) * unsettled, DECODING * unsettled
        return Correction(new, estimate, unsettled, [r[count, :] for r in reach])

    def _only_where_wrong(self, found: Correction, error: list[Array]) -> Correction:
        """One segment run from its true start is the time loop, whatever its tangents say."""
        xp = self.xp
        wrong = error[0] != 0.0
        for e in error[1:]:
            wrong = wrong | (e != 0.0)
        none = xp.zeros_like(found.estimate)
        found.estimate = xp.where(wrong, found.estimate, none)
        found.end_error = [xp.where(wrong, e, none) for e in found.end_error]
        return found

    def _settle(
        self,
        window: Window,
        gates: list[Array],
        params: list[Array],
        starts: list[Array],
        index: Array,
        error: list[Array] | None,
        settled: _Settled,
        report: WindowReport,
    ) -> None:
        """Passes with tangents over the channels in `index` until each is accepted, or handed to the exact finish."""
        xp, m, count = self.xp, window.channels, window.segments
        if int(index.shape[0]) < m:
            starts = [self._take(s, count, index) for s in starts]
        best = xp.full_like(xp.take(settled.estimate, index), float("inf"))
        stalled = xp.zeros_like(best)
        walked: list[Array] = []
        while int(index.shape[0]):
            all_channels = int(index.shape[0]) == m
            here = gates if all_channels else [self.engine.take(g, count, index) for g in gates]
            wide = [xp.tile(p if all_channels else xp.take(p, index), (count,)) for p in params]
            incoming = None if error is None else [xp.take(e, index) for e in error]
            size = int(index.shape[0])
            tangents = self._advance_tangent(here, wide, starts)
            found = self._correct(tangents, starts, count, size, incoming)
            estimate = found.estimate
            report.passes += 1
            exact = xp.all(self._joints_match(tangents.states, count, size), axis=0)
            for e in incoming or []:
                exact = exact & (e == 0.0)
            if not self.public:
                exact = xp.zeros_like(exact)
            done = exact
            if not self.settings.exact:
                done = exact | ((found.unsettled <= self.settings.tol) & (estimate <= self.settings.accept))
            finite = estimate < float("inf")
            report.history.append(float(xp.max(xp.where(finite, estimate, xp.zeros_like(estimate)))))
            better = found.unsettled < 0.5 * best
            best = xp.where(better, found.unsettled, best)
            stalled = xp.where(better, xp.zeros_like(stalled), stalled + 1.0)
            give_up = ~done & ((stalled >= PATIENCE) | (report.passes >= self.settings.max_passes))
            # Channels that leave, accepted or not, hand over the states of this pass.
            leave = xp.nonzero(done | give_up)[0]
            if int(leave.shape[0]):
                chosen = xp.take(index, leave)
                parts = [self.engine.take(s, count, leave) for s in tangents.states]
                settled.states = self._put_states(settled.states, parts, count, m, chosen)
                keep_error = done & ~exact
                gone = xp.where(keep_error, estimate, xp.zeros_like(estimate))
                settled.estimate = self._put(settled.estimate, chosen, xp.take(gone, leave))
                for slot, e in enumerate(found.end_error):
                    kept = xp.take(xp.where(keep_error, e, xp.zeros_like(e)), leave)
                    settled.errors[slot] = self._put(settled.errors[slot], chosen, kept)
                accepted = xp.nonzero(done)[0]
                if int(accepted.shape[0]):
                    inside = [self.engine.take(s, count, accepted) for s in tangents.states]
                    report.mismatch = max(report.mismatch, self._mismatch(inside, count, int(accepted.shape[0])))
                walked.append(xp.take(index, xp.nonzero(give_up)[0]))
            stay = xp.nonzero(~(done | give_up))[0]
            if int(stay.shape[0]):
                report.corrections += 1
            index = xp.take(index, stay)
            best, stalled = xp.take(best, stay), xp.take(stalled, stay)
            starts = [self._take(s, count, stay) for s in found.starts]
        channels = xp.concat(walked) if walked else index
        if int(channels.shape[0]) and not self.public:
            never = xp.full_like(xp.take(settled.estimate, channels), float("inf"))
            settled.estimate = self._put(settled.estimate, channels, never)
        elif int(channels.shape[0]):
            self._walk(window, gates, params, channels, error, settled, report)

    def _take(self, lanes: Array, count: int, index: Array) -> Array:
        return self.engine.take(self.xp.reshape(lanes, (1, -1)), count, index)[0, :]

    def _put(self, channels: Array, index: Array, part: Array) -> Array:
        xp = self.xp
        return self.engine.put(xp.reshape(channels, (1, -1)), 1, index, xp.reshape(part, (1, -1)))[0, :]

    def _put_states(
        self, states: list[Array] | None, parts: list[Array], count: int, m: int, index: Array
    ) -> list[Array]:
        if states is None:
            if int(index.shape[0]) == m:
                return parts
            shape = (parts[0].shape[0], count * m)
            states = [self.xp.zeros(shape, dtype=p.dtype, device=device(p)) for p in parts]
        return [self.engine.put(s, count, index, p) for s, p in zip(states, parts, strict=True)]

    def _walk(
        self,
        window: Window,
        gates: list[Array],
        params: list[Array],
        index: Array,
        error: list[Array] | None,
        settled: _Settled,
        report: WindowReport,
    ) -> None:
        """The exact finish: in order of time, re-running a segment only if its true start is not the one it had.

        Reuse is bit for bit; segments that are merely near would be wrong by order one in a chaotic network.
        """
        xp, m, count, size = self.xp, window.channels, window.segments, self.programs.size
        assert settled.states is not None
        channels = int(index.shape[0])
        here = [self.engine.take(g, count, index) for g in gates]
        narrow = [xp.take(p, index) for p in params]
        taken = [self.engine.take(s, count, index) for s in settled.states]
        state = [s[0, :channels] for s in taken]
        incoming = None if error is None else [xp.take(e, index) for e in error]
        followed = incoming is not None and any(bool(xp.any(e != 0.0)) for e in incoming)
        estimate = xp.zeros_like(narrow[0] if narrow else state[0])
        pieces: list[list[Array]] = [[] for _ in taken]
        rerun = 0
        for c in range(count):
            lanes = slice(c * channels, (c + 1) * channels)
            part = [s[:, lanes] for s in taken]
            rows = [g[:, lanes] for g in here]
            if followed and incoming is not None:
                # An earlier window left an error: it must be followed through the tangents.
                tangents = self._advance_tangent(rows, narrow, state)
                found = self._only_where_wrong(self._correct(tangents, state, 1, channels, incoming), incoming)
                estimate, incoming = xp.maximum(estimate, found.estimate), found.end_error
                part, rerun = tangents.states, rerun + channels
            else:
                moved = ~same_bits(xp, part[0][0, :], state[0])
                for slot in range(1, size):
                    moved = moved | ~same_bits(xp, part[slot][0, :], state[slot])
                open_lanes = xp.nonzero(moved)[0]
                if int(open_lanes.shape[0]):
                    fresh = self.engine.loop(
                        self.programs.advance,
                        [xp.take(s, open_lanes) for s in state],
                        [xp.take(r, open_lanes, axis=1) for r in rows],
                        [xp.take(p, open_lanes) for p in narrow],
                        keep=size,
                    ).kept
                    part = [self.engine.put(p, 1, open_lanes, f) for p, f in zip(part, fresh, strict=True)]
                    rerun += int(open_lanes.shape[0])
            for column, p in zip(pieces, part, strict=True):
                column.append(p)
            state = [p[-1, :] for p in part]
        whole = [xp.concat(column, axis=1) for column in pieces]
        settled.states = self._put_states(settled.states, whole, count, m, index)
        if followed and incoming is not None:
            settled.estimate = self._put(settled.estimate, index, estimate)
            settled.errors = [self._put(s, index, e) for s, e in zip(settled.errors, incoming, strict=True)]
        report.walked += rerun / (count * m)

    def _pinned(
        self,
        window: Window,
        gates: list[Array],
        wide: list[Array],
        starts: list[Array],
        error: list[Array] | None,
        corrections: int,
        report: WindowReport,
    ) -> WindowResult:
        """Exactly `corrections` corrections, then the pass that writes; nothing is accepted early or finished."""
        m, count = window.channels, window.segments
        for k in range(corrections + 1):
            tangents = self._advance_tangent(gates, wide, starts)
            found = self._correct(tangents, starts, count, m, error)
            report.passes += 1
            report.history.append(self._mismatch(tangents.states, count, m))
            if k < corrections:
                omega = self.settings.omega
                new = found.starts
                starts = new if omega == 1.0 else [s + omega * (n - s) for s, n in zip(starts, new, strict=True)]
        report.corrections = corrections
        report.mismatch = report.history[-1]
        end = [s[-1, (count - 1) * m :] for s in tangents.states]
        return WindowResult(tangents.states, end, found.end_error, found.estimate, report)


@dataclass
class Tangents:
    """A pass with tangents: states (L+1, n) by slot, and by entry the product M and the largest G, (n,)."""

    states: list[Array]
    product: list[Array]
    largest: list[Array]

    @property
    def steps(self) -> int:
        return int(self.states[0].shape[0]) - 1

    @property
    def ends(self) -> list[Array]:
        return [s[-1, ...] for s in self.states]

    def sizes(self, xp: Namespace, first: int = 0) -> list[Array]:
        """By slot the largest finite magnitude from row `first` on, (n,)."""
        return [_largest_finite(xp, s[first:, :]) for s in self.states]


@dataclass
class Correction:
    """New starts by slot (C·m,); the pass's error relative to scale, all of it and the part that a further pass would
    remove, (m,); and the error of the end state by slot (m,)."""

    starts: list[Array]
    estimate: Array
    unsettled: Array
    end_error: list[Array]


@dataclass
class _Settled:
    """What is final so far, over all channels of the window."""

    states: list[Array] | None
    errors: list[Array]
    estimate: Array


def _largest_finite(xp: Namespace, rows: Array) -> Array:
    """The largest finite magnitude in each column of (L, n)."""
    size = xp.abs(rows)
    return xp.max(xp.where(size < float("inf"), size, xp.zeros_like(size)), axis=0)
