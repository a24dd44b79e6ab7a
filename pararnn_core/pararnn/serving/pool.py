"""PagedStatePool: the states of many requests, one page each in buffers that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import array_api_compat

from pararnn.arrays import Array, cast, dtype_name, namespace_name
from pararnn.cells.base import ChannelwiseCell

# Libraries whose arrays can be written in place.
_WRITABLE = ("numpy", "torch", "cupy")


class Slot(int):
    """A page's number, which knows for which of its owners it was handed out."""

    generation: int

    def __new__(cls, number: int, generation: int) -> Slot:
        made = super().__new__(cls, number)
        made.generation = generation
        return made

    def __repr__(self) -> str:
        return f"Slot({int(self)}, generation={self.generation})"


class FreeList:
    """Hands out page numbers, the one freed last first. Another object with these two methods may stand in for it."""

    def __init__(self, capacity: int) -> None:
        self._free = list(range(capacity - 1, -1, -1))

    def allocate(self, count: int) -> list[int] | None:
        """`count` numbers, or None if there are not so many."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def free(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)


class PagedStatePool:
    """One page of recurrent state for each request and layer.

    A request's whole memory is one page a layer, whatever its length. Pages are zeroed when they are handed out, so
    nobody reads what another request left. ``tokens(slot)`` is the number of tokens that the page's state covers.

    Args:
        model: a cell, a list of cells, or a ParaRNN.
        capacity: pages.
        host_capacity: pages in the host's memory, to which idle requests may be moved.
        allocator, host_allocator: objects like :class:`FreeList` that hand out the numbers.
        dtype: of the buffers; the cells' own if None. float32 keeps what half precision would lose between calls.

    Attributes:
        states: by layer (C, …); what decode_step takes as the pool, with the slots as its ``block_table``.

    Raises:
        TypeError, ValueError: no cells, or a capacity that is no number of pages.
        RuntimeError: (allocate, offload, reload) there are not enough pages: "paged cache OOM". Nothing has changed.
        KeyError: a slot that is not allocated, or was freed and handed out again since.
        ValueError: the same slot twice in one call.

    >>> from pararnn import ParaGRU
    >>> pool = PagedStatePool(ParaGRU(2, 3), capacity=4, host_capacity=4)
    >>> a, b = pool.allocate(2)
    >>> pages = pool.offload([a])
    >>> pool.free([b])
    >>> len(pool.reload(pages)), pool.available
    (1, 3)
    """

    def __init__(
        self,
        model: Any,
        capacity: int,
        *,
        host_capacity: int = 0,
        allocator: Any = None,
        host_allocator: Any = None,
        dtype: Any = None,
    ) -> None:
        name = type(self).__name__
        self.model = model
        cells = self.cells
        for label, pages, least in (("capacity", capacity, 1), ("host_capacity", host_capacity, 0)):
            if isinstance(pages, bool) or not isinstance(pages, int) or pages < least:
                raise ValueError(f"{name}: {label} must be a whole number of at least {least}, got {pages!r}")
        self.xp = cells[0].xp
        if namespace_name(self.xp) not in _WRITABLE:
            raise TypeError(
                f"{name}: pages are written in place, which {namespace_name(self.xp)} arrays do not allow; keep the "
                "states that decode_step returns instead"
            )
        self.capacity, self.host_capacity = capacity, host_capacity
        self.states: list[Array] = [
            self.xp.zeros((capacity, *c.state_shape), dtype=c.dtype if dtype is None else dtype, device=c.device)
            for c in cells
        ]
        self._allocator = FreeList(capacity) if allocator is None else allocator
        self._host_allocator = FreeList(host_capacity) if host_allocator is None else host_allocator
        self._generation = [0] * capacity
        # Tokens covered, by page in use.
        self._used: dict[int, int] = {}
        self._host: dict[int, tuple[list[Array], int]] = {}

    @property
    def cells(self) -> list[ChannelwiseCell]:
        """The layers' cells with their present parameters."""
        return cells_of(type(self).__name__, self.model)

    @property
    def available(self) -> int:
        """Pages that are not in use."""
        return self.capacity - len(self._used)

    def allocate(self, count: int = 1) -> list[Slot]:
        """`count` slots with states of zero, all or none."""
        slots = self._hand_out(count)
        self._write(slots, [self.xp.zeros_like(s[: len(slots), ...]) for s in self.states])
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Takes slots back; whoever still holds one of them is refused."""
        slots = self.checked(slots)
        for slot in slots:
            del self._used[slot]
            self._generation[slot] += 1
        self._allocator.free([int(s) for s in slots])

    def offload(self, slots: Sequence[int]) -> list[int]:
        """Moves the states of slots to the host and frees them; gives back the numbers of the host's pages."""
        slots = self.checked(slots)
        pages = self._host_allocator.allocate(len(slots))
        if pages is None:
            free = self.host_capacity - len(self._host)
            raise RuntimeError(
                f"paged cache OOM: {len(slots)} pages of the host were wanted and {free} of {self.host_capacity} are "
                "free; free_host some, or give a larger host_capacity"
            )
        whole = [array_api_compat.to_device(s, "cpu") for s in self.gather(slots)]
        for n, (page, slot) in enumerate(zip(pages, slots, strict=True)):
            self._host[page] = ([s[n : n + 1, ...] for s in whole], self._used[slot])
        self.free(slots)
        return list(pages)

    def reload(self, pages: Sequence[int]) -> list[Slot]:
        """Brings states back from the host, into new slots; the host's pages are free again."""
        pages = self._checked_pages(pages)
        slots = self._hand_out(len(pages))
        held = [self._host.pop(page) for page in pages]
        for layer, states in enumerate(self.states):
            rows = [parts[layer] for parts, _ in held]
            if rows:
                whole = rows[0] if len(rows) == 1 else array_api_compat.array_namespace(rows[0]).concat(rows)
                states[_index(slots), ...] = self.xp.asarray(whole, device=array_api_compat.device(states))
        for slot, (_, tokens) in zip(slots, held, strict=True):
            self._used[slot] = tokens
        self._host_allocator.free(pages)
        return slots

    def free_host(self, pages: Sequence[int]) -> None:
        """Drops what was moved to the host."""
        pages = self._checked_pages(pages)
        for page in pages:
            del self._host[page]
        self._host_allocator.free(pages)

    def gather(self, slots: Sequence[int]) -> list[Array]:
        """Copies of the states by layer, (n, …)."""
        index = _index(self.checked(slots))
        return [s[index, ...] for s in self.states]

    def scatter(self, slots: Sequence[int], states: Sequence[Array]) -> None:
        """Overwrites the states of slots, by layer (n, …)."""
        slots = self.checked(slots)
        if len(states) != len(self.states):
            raise ValueError(f"scatter: wanted states of {len(self.states)} layers, got {len(states)}")
        for given, own in zip(states, self.states, strict=True):
            wanted = (len(slots), *own.shape[1:])
            if tuple(given.shape) != wanted:
                raise ValueError(f"scatter: a layer's states must have shape {wanted}, got {tuple(given.shape)}")
        self._write(slots, states)

    def tokens(self, slot: int) -> int:
        """How many tokens the state of a slot covers."""
        return self._used[self.checked([slot])[0]]

    def advance(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Notes that the states of slots cover so many tokens more."""
        for slot, count in zip(self.checked(slots), counts, strict=True):
            self._used[slot] += int(count)

    def checked(self, slots: Sequence[int]) -> list[int]:
        """Slots as numbers; refuses what is not allocated, was handed to somebody else since, or comes twice."""
        if hasattr(slots, "tolist"):
            slots = slots.tolist()
        numbers = []
        for slot in slots:
            number = int(slot)
            if number not in self._used:
                raise KeyError(f"slot {number} is not allocated")
            if isinstance(slot, Slot) and slot.generation != self._generation[number]:
                raise KeyError(f"slot {number} is stale: it was freed and has another owner now")
            numbers.append(number)
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"the same slot comes twice: {numbers}")
        return numbers

    def _hand_out(self, count: int) -> list[Slot]:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"allocate: wanted a whole number of pages, got {count!r}")
        pages = self._allocator.allocate(count)
        if pages is None:
            raise RuntimeError(
                f"paged cache OOM: {count} pages were wanted and {self.available} of {self.capacity} are free; free or "
                "offload some requests, or give a larger capacity"
            )
        for page in pages:
            self._used[page] = 0
        return [Slot(page, self._generation[page]) for page in pages]

    def _checked_pages(self, pages: Sequence[int]) -> list[int]:
        numbers = [int(page) for page in pages]
        for page in numbers:
            if page not in self._host:
                raise KeyError(f"page {page} of the host is not in use")
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"the same page comes twice: {numbers}")
        return numbers

    def _write(self, slots: Sequence[int], states: Sequence[Array]) -> None:
        if slots:
            for own, given in zip(self.states, states, strict=True):
                own[_index(slots), ...] = cast(self.xp, given, own.dtype)

    def __repr__(self) -> str:
        kinds = ", ".join(f"{dtype_name(s.dtype)} {tuple(s.shape[1:])}" for s in self.states)
        return f"{type(self).__name__}({len(self._used)} of {self.capacity} pages in use; {kinds})"


def cells_of(what: str, model: Any) -> list[ChannelwiseCell]:
    """The cells of a model: a cell, a list of cells, or a module with ``layers`` (ParaRNN) or ``rnn``."""
    if isinstance(model, ChannelwiseCell):
        return [model]
    if isinstance(model, (list, tuple)):
        cells = [c for part in model for c in cells_of(what, part)]
        if cells:
            return cells
    inner = getattr(model, "rnn", None)
    if inner is not None:
        return cells_of(what, inner)
    layers = getattr(model, "layers", None)
    if layers is not None and all(hasattr(layer, "cell") for layer in layers):
        return [layer.cell for layer in layers]
    raise TypeError(f"{what}: model must be a cell, a list of cells, or a ParaRNN, got {type(model).__name__}")


def _index(slots: Sequence[int]) -> list[int]:
    return [int(s) for s in slots]
