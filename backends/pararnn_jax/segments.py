"""Newton over segments as one traced program: the core's passes and tests, with masks where the core picks channels.

A channel that has settled keeps the states of the pass in which it did; all lanes run until the last one settles or is
given up. What is given up is marked, and the whole solve lets the time loop finish it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pararnn.arrays import Array, Namespace, same_bits
from pararnn.layout import Window
from pararnn.segments import PATIENCE, Tangents, WindowSolver


class Traced(NamedTuple):
    """What one window leaves; by slot, m = B·D channels."""

    # (L, C·m) after each step; (m,) at the end and its estimated error, zero where it is the time loop's.
    rows: list[Array]
    end: list[Array]
    error: list[Array]
    # (m,): estimated error relative to scale, infinite where the time loop must finish.
    estimate: Array
    passes: Array
    corrections: Array
    mismatch: Array


@dataclass
class _Pass(Tangents):
    """A pass with tangents that keeps the states after each step only.

    `starts` are those before the first step of the segments that are run here; `shared` makes lanes of all segments
    from lanes of these.
    """

    starts: list[Array]
    shared: Callable[[Array], Array]

    @property
    def steps(self) -> int:
        return int(self.states[0].shape[0])

    @property
    def ends(self) -> list[Array]:
        return [self.shared(s[-1, :]) for s in self.states]

    def sizes(self, xp: Namespace, first: int = 0) -> list[Array]:
        inside = super().sizes(xp)
        if not first:
            inside = [xp.maximum(s, _finite(b)) for s, b in zip(inside, self.starts, strict=True)]
        return [self.shared(s) for s in inside]


class TracedSolver(WindowSolver):
    """`WindowSolver` whose decisions are arrays, so that it can be traced, mapped and compiled.

    Starts, ends and everything at the joints are lanes of all segments; gates and states may be those of some of them,
    which run here (see `sharding`).
    """

    def _here(self, lanes: Array) -> Array:
        """The lanes of the segments that run here."""
        return lanes

    def _shared(self, lanes: Array) -> Array:
        """The lanes of all segments, from those of the segments that run here."""
        return lanes

    def run(
        self,
        window: Window,
        gates: list[Array],
        params: list[Array],
        start: list[Array],
        error: list[Array],
        zero: list[Array],
        guess: list[Array] | None = None,
    ) -> Traced:
        """One window; the arguments are those of `solve`, but `error` is always given."""
        if window.segments == 1:
            return self._one(window, gates, params, start, error)
        wide = [self._here(jnp.tile(p, (window.segments,))) for p in params]
        if guess is None:
            guess = self._first_starts(window, gates, wide, start, zero)
        starts = [jnp.concatenate([s, g]) for s, g in zip(start, guess, strict=True)]
        if self.settings.corrections is not None:
            return self._ordered(window, gates, wide, starts, error, self.settings.corrections)
        return self._until_settled(window, gates, wide, starts, error)

    def _advance_tangent(self, gates: list[Array], wide: list[Array], starts: list[Array]) -> Tangents:
        programs, size = self.programs, self.programs.size
        starts = [self._here(s) for s in starts]
        one, none = jnp.ones_like(starts[0]), jnp.zeros_like(starts[0])
        identity = [one if i == j else none for i, j in programs.m.where]
        scan: Any = self.engine
        out = scan.scan(programs.advance_tangent, [*starts, *identity, *identity], gates, wide, keep=size)
        entries = len(identity)
        found = [self._shared(a) for a in out.carry[size:]]
        return _Pass(out.kept, found[:entries], found[entries:], starts, self._shared)

    def _picard_starts(self, window: Window, gates: list[Array], wide: list[Array], start: list[Array]) -> list[Array]:
        m, count, cell = window.channels, window.segments, self.cell
        dropped = [jnp.zeros_like(p) for p in wide]
        alone = self.engine.loop(self.programs.advance, cell.empty(jnp, gates[0][0, :]), gates, dropped).carry
        joints = [alone, [jnp.sum(g, axis=0) for g in gates], [g[-1, :] for g in gates]]
        joints = [[self._shared(a).reshape((count, m))[: count - 1] for a in part] for part in joints]

        def join(state: list[Array], row: list[list[Array]]) -> tuple[list[Array], list[Array]]:
            new = list(cell.frozen_join(jnp, state, *row))
            return new, new

        _, starts = lax.scan(join, list(start), joints)
        return [s.reshape((-1,)) for s in starts]

    def _plain(self, gates: list[Array], wide: list[Array], starts: list[Array]) -> list[Array]:
        scan: Any = self.engine
        starts = [self._here(s) for s in starts]
        return scan.scan(self.programs.advance, starts, gates, wide, keep=self.programs.size).kept

    def _one(
        self, window: Window, gates: list[Array], params: list[Array], start: list[Array], error: list[Array]
    ) -> Traced:
        """The time loop; tangents where an error that came in must be followed, or rounding in other coordinates."""

        def plain(_: Any) -> tuple[Any, ...]:
            none = jnp.zeros_like(start[0])
            return self._plain(gates, params, start), [none] * len(start), none

        def followed(_: Any) -> tuple[Any, ...]:
            tangents = self._advance_tangent(gates, params, start)
            found = self._correct(tangents, start, 1, window.channels, error)
            if self.public:
                found = self._only_where_wrong(found, error)
            return tangents.states, found.end_error, found.estimate

        if self.public:
            wrong = jnp.any(jnp.stack([jnp.any(e != 0.0) for e in error]))
            rows, left, estimate = lax.cond(wrong, followed, plain, None)
        else:
            rows, left, estimate = followed(None)
        none = jnp.zeros((), rows[0].dtype)
        return Traced(rows, [r[-1, :] for r in rows], left, estimate, jnp.asarray(1), jnp.asarray(0), none)

    def _gaps(self, rows: list[Array], starts: list[Array], count: int, m: int) -> tuple[Array, Array]:
        """By channel: whether all joints match bit for bit, and the largest finite gap at one, (m,)."""
        lanes, match, gap = (count - 1) * m, jnp.asarray(True), jnp.zeros((), rows[0].dtype)
        for r, s in zip(rows, starts, strict=True):
            end = self._shared(r[-1, :])[:lanes]
            match = match & same_bits(jnp, end, s[m:])
            gap = jnp.maximum(gap, _finite(end - s[m:]))
        return jnp.all(match.reshape((count - 1, m)), axis=0), jnp.max(gap.reshape((count - 1, m)), axis=0)

    def _until_settled(
        self, window: Window, gates: list[Array], wide: list[Array], starts: list[Array], error: list[Array]
    ) -> Traced:
        settings, m, count = self.settings, window.channels, window.segments
        none = jnp.zeros_like(starts[0][:m])
        trusted = jnp.ones(none.shape, bool)
        for e in error:
            trusted = trusted & (e == 0.0)
        if self.public and not self.picard:
            # A plain pass is enough wherever the network forgets within a warm-up.
            rows, passes = self._plain(gates, wide, starts), jnp.asarray(1)
            match, _ = self._gaps(rows, starts, count, m)
            unsettled = ~(match & trusted)
        else:
            rows, passes = [jnp.zeros_like(gates[0])] * len(starts), jnp.asarray(0)
            unsettled = jnp.ones(none.shape, bool)

        def body(now: _Loop) -> _Loop:
            tangents = self._advance_tangent(gates, wide, now.starts)
            found = self._correct(tangents, now.starts, count, m, error)
            match, gap = self._gaps(tangents.states, now.starts, count, m)
            exact = match & trusted if self.public else jnp.zeros_like(match)
            done = exact
            if not settings.exact:
                done = exact | ((found.unsettled <= settings.tol) & (found.estimate <= settings.accept))
            better = found.unsettled < 0.5 * now.best
            stalled = jnp.where(better, 0, now.stalled + 1)
            passes = now.passes + 1
            give_up = ~done & ((stalled >= PATIENCE) | (passes >= settings.max_passes))
            leave = now.open & (done | give_up)
            # What leaves, accepted or not, hands over the states of this pass.
            lanes = self._here(jnp.tile(leave, (count,)))
            inexact = done & ~exact
            estimate = jnp.where(give_up, jnp.inf, jnp.where(inexact, found.estimate, none))
            still = now.open & ~leave
            return _Loop(
                found.starts,
                [jnp.where(lanes, new, old) for new, old in zip(tangents.states, now.rows, strict=True)],
                [
                    jnp.where(leave, jnp.where(inexact, e, none), old)
                    for e, old in zip(found.end_error, now.error, strict=True)
                ],
                jnp.where(leave, estimate.astype(none.dtype), now.estimate),
                still,
                jnp.where(better, found.unsettled, now.best),
                stalled,
                passes,
                now.corrections + jnp.any(still),
                jnp.maximum(now.mismatch, jnp.max(jnp.where(leave & done, gap, none))),
            )

        first = _Loop(
            starts,
            rows,
            [none] * len(starts),
            none,
            unsettled,
            jnp.full_like(none, jnp.inf),
            jnp.zeros(none.shape, int),
            passes,
            jnp.zeros_like(passes),
            jnp.zeros((), none.dtype),
        )
        last = lax.while_loop(lambda now: jnp.any(now.open), body, first)
        end = [self._shared(r[-1, :])[(count - 1) * m :] for r in last.rows]
        return Traced(last.rows, end, last.error, last.estimate, last.passes, last.corrections, last.mismatch)

    def _ordered(
        self,
        window: Window,
        gates: list[Array],
        wide: list[Array],
        starts: list[Array],
        error: list[Array],
        corrections: int,
    ) -> Traced:
        """Exactly `corrections` corrections, then the pass that writes; nothing is accepted early or finished."""
        m, count, omega = window.channels, window.segments, self.settings.omega

        def corrected(_: Any, starts: list[Array]) -> list[Array]:
            new = self._correct(self._advance_tangent(gates, wide, starts), starts, count, m, error).starts
            return new if omega == 1.0 else [s + omega * (n - s) for s, n in zip(starts, new, strict=True)]

        starts = lax.fori_loop(0, corrections, corrected, starts)
        tangents = self._advance_tangent(gates, wide, starts)
        found = self._correct(tangents, starts, count, m, error)
        _, gap = self._gaps(tangents.states, starts, count, m)
        end = [r[-1, (count - 1) * m :] for r in tangents.states]
        passes, made = jnp.asarray(corrections + 1), jnp.asarray(corrections)
        return Traced(tangents.states, end, found.end_error, found.estimate, passes, made, jnp.max(gap))


class _Loop(NamedTuple):
    """What passes from pass to pass."""

    starts: list[Array]
    rows: list[Array]
    error: list[Array]
    estimate: Array
    open: Array
    best: Array
    stalled: Array
    passes: Array
    corrections: Array
    mismatch: Array


def _finite(values: Array) -> Array:
    """Magnitudes, zero where they are not finite."""
    size = jnp.abs(values)
    return jnp.where(size < jnp.inf, size, 0.0)
