"""verify_linear_draft: a row of guessed tokens checked in one parallel run (greedy speculative decoding)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import array_api_compat

from pararnn.arrays import Array, dtype_name
from pararnn.config import NewtonConfig
from pararnn.front import unwatched
from pararnn.newton import newton_apply
from pararnn.sequential import sequential_apply
from pararnn.serving.paged import SOLVERS
from pararnn.serving.pool import cells_of


@dataclass(frozen=True)
class LinearDraftResult:
    """What became of a draft.

    Attributes:
        n_accepted: (B,) how many of the K guesses the model would have made itself, from the first on.
        hidden: by layer (B, …), the states after the accepted guesses; what decoding goes on from.
        bonus_ids: (B,) the model's own token behind the accepted ones.
        logits: (B, K + 1, V), before the draft and after each guess.
    """

    n_accepted: Array
    hidden: list[Array]
    bonus_ids: Array
    logits: Array


def verify_linear_draft(
    model: Any,
    draft_x: Array,
    draft_ids: Array,
    readout: Callable[[Array], Array],
    *,
    h0: Any = None,
    solver: str = "newton",
    config: NewtonConfig | None = None,
) -> LinearDraftResult:
    """How many of K guessed tokens a greedy model would have produced, found in one run over all of them.

    ::

        n = the first k with argmax readout(h_k) ≠ id_k;   h_k = the state after k guesses

    The result is what decoding one token at a time gives.

    Args:
        model: a cell, a list of cells, or a ParaRNN.
        draft_x: (B, K, I), the inputs that stand for the guesses (their embeddings).
        draft_ids: (B, K), the guesses.
        readout: from what the last layer passes on (…, D) to logits (…, V).
        h0: by layer the state (B, …) before the draft (for one layer it may stand by itself); zeros if None.
        solver: 'newton' or 'sequential'.

    Raises:
        TypeError, ValueError: as newton_apply; ids that are no integers of the shape (B, K).

    >>> import numpy as np
    >>> from pararnn import ParaGRU
    >>> cell, x = ParaGRU(2, 4, seed=0), np.ones((1, 3, 2), dtype=np.float32)
    >>> result = verify_linear_draft(cell, x, np.zeros((1, 3), dtype=int), lambda h: -h)
    >>> result.logits.shape, result.hidden[0].shape
    ((1, 4, 4), (1, 4))
    """
    what = "verify_linear_draft"
    cells = cells_of(what, model)
    if solver not in SOLVERS:
        raise ValueError(f"{what}: solver must be one of {SOLVERS}, got {solver!r}")
    if any(c.family == "linear" for c in cells):
        raise TypeError(f"{what}: {type(cells[-1]).__name__} reads out with its input, so a state alone has no logits")
    if getattr(draft_x, "ndim", None) != 3:
        raise ValueError(f"{what}: draft_x must be (B, K, I), got {getattr(draft_x, 'shape', type(draft_x).__name__)}")
    batch, count = int(draft_x.shape[0]), int(draft_x.shape[1])
    if tuple(draft_ids.shape) != (batch, count) or "int" not in dtype_name(draft_ids.dtype):
        raise ValueError(
            f"{what}: draft_ids must be integers of shape {(batch, count)}, got {dtype_name(draft_ids.dtype)} "
            f"{tuple(draft_ids.shape)}"
        )
    xp = array_api_compat.array_namespace(draft_x)
    starts = _starts(what, xp, cells, h0, draft_x)
    with unwatched(draft_x):
        y, every = draft_x, []
        for cell, start in zip(cells, starts, strict=True):
            if solver == "newton":
                states = newton_apply(cell, y, config, h0=start)
            else:
                states = sequential_apply(cell, y, start)
            whole = xp.concat([xp.expand_dims(xp.astype(start, states.dtype), axis=1), states], axis=1)
            every.append(whole)
            whole = whole if cell.state_slots == 1 else whole[:, :, cell.hidden_slot, ...]
            y = whole[:, 1:, ...]
        logits = readout(whole)
        own = xp.argmax(logits, axis=2)
        right = xp.astype(own[:, :count] == xp.astype(draft_ids, own.dtype), own.dtype)
        accepted = xp.sum(xp.cumulative_prod(right, axis=1), axis=1) if count else xp.zeros_like(own[:, 0])
        # The row's number counts in the flat array of all states.
        place = xp.arange(batch, dtype=accepted.dtype, device=array_api_compat.device(draft_x)) * (count + 1) + accepted
        hidden = [xp.take(xp.reshape(s, (batch * (count + 1), *s.shape[2:])), place, axis=0) for s in every]
        bonus = xp.take(xp.reshape(own, (-1,)), place)
    return LinearDraftResult(accepted, hidden, bonus, logits)


def _starts(what: str, xp: Any, cells: Sequence[Any], h0: Any, x: Array) -> list[Array]:
    if h0 is None:
        h0 = [None] * len(cells)
    elif not isinstance(h0, (list, tuple)):
        h0 = [h0]
    if len(h0) != len(cells):
        raise ValueError(f"{what}: h0 must have a state for each of {len(cells)} layers, got {len(h0)}")
    where = array_api_compat.device(x)
    return [
        xp.zeros((x.shape[0], *cell.state_shape), dtype=x.dtype, device=where) if state is None else state
        for cell, state in zip(cells, h0, strict=True)
    ]
