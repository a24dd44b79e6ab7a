"""BlockStackPool: one slot for a request in a stack of blocks, of which each keeps the state of its own recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pararnn.arrays import Array
from pararnn.config import NewtonConfig
from pararnn.front import unwatched
from pararnn.serving.paged import checked_call, run_layers, write_back
from pararnn.serving.pool import PagedStatePool, cells_of


class BlockStackPool(PagedStatePool):
    """A PagedStatePool for blocks that wrap a recurrence in more: norms, projections, residual paths.

    Args:
        blocks: each a cell or ParaRNN, or an object with ``rnn`` (a cell or ParaRNN) and
            ``forward_hidden(h, run)``, which returns what the block makes of h and calls ``run(x)`` once where the
            recurrence stands; ``run`` gives what the recurrence passes on.
        capacity, host_capacity, …: as for PagedStatePool.

    >>> from pararnn import ParaGRU
    >>> pool = BlockStackPool([ParaGRU(3, 3, seed=0), ParaGRU(3, 3, seed=1)], capacity=2)
    >>> len(pool.states)
    2
    """

    def __init__(self, blocks: Sequence[Any], capacity: int, **options: Any) -> None:
        super().__init__(list(blocks), capacity, **options)
        self.blocks = list(blocks)
        self._layers, first = [], 0
        for block in self.blocks:
            count = len(cells_of(type(self).__name__, block))
            self._layers.append(list(range(first, first + count)))
            first += count

    def bind_external(self, layer_states: Sequence[Array], mark_used: bool = True) -> None:
        """Uses buffers (C, …) that somebody else owns, such as an engine's cache, in place of its own.

        With `mark_used` every page counts as allocated: the owner of the buffers hands them out.

        Raises:
            ValueError: a number of layers or a shape that does not fit.
            RuntimeError: pages are in use.
        """
        if self._used or self._host:
            raise RuntimeError("bind_external: pages are in use; free them before the buffers are exchanged")
        if len(layer_states) != len(self.states):
            raise ValueError(f"bind_external: wanted buffers of {len(self.states)} layers, got {len(layer_states)}")
        for given, own in zip(layer_states, self.states, strict=True):
            if tuple(given.shape[1:]) != tuple(own.shape[1:]) or given.shape[0] != layer_states[0].shape[0]:
                raise ValueError(f"bind_external: wanted (C, …) with … = {own.shape[1:]}, got {tuple(given.shape)}")
        capacity = int(layer_states[0].shape[0])
        fresh = PagedStatePool(self.model, capacity, host_capacity=self.host_capacity)
        self.capacity, self._allocator, self._generation = capacity, fresh._allocator, fresh._generation
        self.states = list(layer_states)
        if mark_used:
            self._hand_out(capacity)

    def forward_hidden(
        self,
        h: Array,
        slot_ids: Sequence[int],
        *,
        cu_seqlens: Any = None,
        solver: str = "newton",
        config: NewtonConfig | None = None,
    ) -> Array:
        """What the stack makes of h (B, T, I) or (1, total, I); the pages then hold the states after it.

        Raises:
            As paged_apply; RuntimeError for a block that does not run its recurrence exactly once.
        """
        slots, counts = checked_call("forward_hidden", self, slot_ids, h, cu_seqlens, solver)
        ends: list[tuple[int, Array | None]] = []
        with unwatched(h):
            for block, layers in zip(self.blocks, self._layers, strict=True):
                calls = 0

                def run(x: Array, layers: list[int] = layers) -> Array:
                    nonlocal calls
                    calls += 1
                    y, made = run_layers(self, layers, slots, x, cu_seqlens, solver, config, counts)
                    ends.extend(made)
                    return y

                h = block.forward_hidden(h, run) if hasattr(block, "forward_hidden") else run(h)
                if calls != 1:
                    raise RuntimeError(f"forward_hidden: {type(block).__name__} called run {calls} times, wanted once")
            write_back(self, slots, ends)
        self.advance(slots, counts)
        return h
