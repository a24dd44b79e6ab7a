"""Pages of state: whoever comes and goes, a request gets what it would get alone, and nobody reads another's page."""

from __future__ import annotations

import array_api_strict
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pararnn import (
    BlockStackPool,
    PagedStatePool,
    ParaGRU,
    ParaLSTM,
    ParaRNN,
    ParaRWKV7,
    ParaSLSTM,
    StockGRU,
    paged_apply,
    sequential_apply,
    verify_linear_draft,
)

torch = pytest.importorskip("torch")

LENGTH, FEATURES, WIDTH = 30, 3, 4


def layers(kinds=(ParaLSTM, ParaGRU), library=np):
    cells = [kinds[0](FEATURES, WIDTH, seed=0)]
    cells += [kind(WIDTH, WIDTH, seed=k + 1) for k, kind in enumerate(kinds[1:])]
    return [c if library is np else c.to(library) for c in cells]


def prompts(count, seed=0):
    return np.random.default_rng(seed).standard_normal((count, LENGTH, FEATURES)).astype(np.float32)


def alone(cells, x):
    """What one uninterrupted run of a request gives, and its states."""
    y, ends = x[None], []
    for cell in cells:
        states = sequential_apply(cell, y)
        ends.append(states[0])
        y = states if cell.state_slots == 1 else states[:, :, cell.hidden_slot]
    return y[0], ends


class Server:
    """Requests over a pool: arrivals, pieces of prompts and single tokens in one call, evictions, reloads."""

    def __init__(self, cells, x, to_array, **options):
        self.cells, self.x, self.to_array = cells, x, to_array
        self.pool = PagedStatePool(cells, **options)
        for states in self.pool.states:
            # Whoever reads a page that was not handed out to him would get NaN.
            states[...] = float("nan")
        self.where: dict[int, tuple[str, int]] = {}
        self.done = dict.fromkeys(range(len(x)), 0)
        self.out: dict[int, list] = {r: [] for r in range(len(x))}

    def arrive(self, r):
        if r not in self.where and self.pool.available:
            (slot,) = self.pool.allocate()
            self.where[r] = ("device", slot)

    def evict(self, r):
        if self.where.get(r, ("",))[0] == "device" and len(self.pool._host) < self.pool.host_capacity:
            (page,) = self.pool.offload([self.where[r][1]])
            self.where[r] = ("host", page)

    def reload(self, r):
        if self.where.get(r, ("",))[0] == "host" and self.pool.available:
            (slot,) = self.pool.reload([self.where[r][1]])
            self.where[r] = ("device", slot)

    def leave(self, r):
        place, number = self.where.pop(r, ("", 0))
        if place == "device":
            self.pool.free([number])
        elif place == "host":
            self.pool.free_host([number])
        if place:
            self.done[r], self.out[r] = 0, []

    def step(self, counts, solver):
        running = [r for r, (place, _) in self.where.items() if place == "device" and r in counts]
        if not running:
            return
        pieces, offsets = [], [0]
        for r in running:
            stop = min(LENGTH, self.done[r] + counts[r])
            pieces.append(self.x[r, self.done[r] : stop])
            offsets.append(offsets[-1] + stop - self.done[r])
        slots = [self.where[r][1] for r in running]
        y = paged_apply(
            self.pool, slots, self.to_array(np.concatenate(pieces)[None]), cu_seqlens=offsets, solver=solver
        )
        y = np.asarray(y)[0]
        for n, r in enumerate(running):
            self.out[r].append(y[offsets[n] : offsets[n + 1]])
            self.done[r] += offsets[n + 1] - offsets[n]
            assert self.pool.tokens(slots[n]) == self.done[r]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["arrive", "evict", "reload", "leave"]), st.integers(0, 4)),
        st.tuples(
            st.just("step"),
            st.dictionaries(st.integers(0, 4), st.sampled_from([0, 1, 1, 1, 2, 7, 13]), max_size=5),
            st.sampled_from(["newton", "sequential"]),
        ),
        st.tuples(st.just("step"), st.just(dict.fromkeys(range(5), 1)), st.just("newton")),
    ),
    min_size=10,
    max_size=40,
)


@pytest.mark.parametrize("library", [np, torch])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(actions=ACTIONS)
def test_requests_get_what_they_would_get_alone(library, actions):
    """Arrivals, departures, evictions and reloads in any order; pages of others are poison (P51, case O66)."""
    x = prompts(5)
    server = Server(
        layers(library=library), x, np.asarray if library is np else torch.from_numpy, capacity=3, host_capacity=2
    )
    for action, *rest in [("arrive", 0), ("arrive", 1), *actions]:
        getattr(server, action)(*rest)
    for r, parts in server.out.items():
        if r in server.where and parts:
            wanted, ends = alone(layers(), x[r])
            got = np.concatenate(parts)
            np.testing.assert_allclose(got, wanted[: len(got)], atol=3e-6)
            place, number = server.where[r]
            if place == "device" and len(got):
                for states, end in zip(server.pool.gather([number]), ends, strict=True):
                    np.testing.assert_allclose(np.asarray(states)[0], end[len(got) - 1], atol=3e-6)


@pytest.mark.parametrize("kinds", [(ParaSLSTM,), (StockGRU, ParaGRU), (ParaGRU, ParaRWKV7)])
def test_every_kind_of_cell(kinds):
    """Prefill in pieces that are cut anywhere, one of them empty, then decode (case O66)."""
    if ParaRWKV7 in kinds:
        cells = [ParaGRU(FEATURES, WIDTH, seed=0), ParaRWKV7(WIDTH, WIDTH, seed=1, n_heads=1)]
    else:
        cells = layers(kinds)
    x = prompts(2)
    pool = PagedStatePool(cells, capacity=5)
    pool.allocate(1)
    slots = pool.allocate(2)
    whole = PagedStatePool(cells, capacity=2)
    wanted = paged_apply(whole, whole.allocate(2), x, solver="sequential")
    rows, first = [[], []], [0, 0]
    for counts in ([11, 4], [0, 9], [12, 0], [1, 1], [6, 16]):
        parts = [x[r, first[r] : first[r] + counts[r]] for r in range(2)]
        y = paged_apply(pool, slots, np.concatenate(parts)[None], cu_seqlens=[0, counts[0], sum(counts)])
        rows[0].append(y[0, : counts[0]])
        rows[1].append(y[0, counts[0] :])
        first = [first[0] + counts[0], first[1] + counts[1]]
    for r in range(2):
        np.testing.assert_allclose(np.concatenate(rows[r]), wanted[r], atol=3e-6)
    assert [pool.tokens(s) for s in slots] == [30, 30]
    for mine, own in zip(pool.gather(slots), whole.gather([0, 1]), strict=True):
        np.testing.assert_allclose(mine, own, atol=3e-6)


def test_a_module_is_served():
    """A ParaRNN's layers with their present parameters; no gradient is kept."""
    torch.manual_seed(0)
    rnn = ParaRNN(ParaLSTM(FEATURES, WIDTH, seed=0), num_layers=2)
    pool = PagedStatePool(rnn, capacity=4)
    x = torch.from_numpy(prompts(2))
    slots = pool.allocate(2)
    got = torch.cat([paged_apply(pool, slots, x[:, :9]), paged_apply(pool, slots, x[:, 9:])], dim=1)
    assert not got.requires_grad
    assert torch.allclose(got, rnn(x), atol=3e-6)
    with torch.no_grad():
        for p in rnn.parameters():
            p.zero_()
    pool.free(slots)
    assert not paged_apply(pool, pool.allocate(2), x).any()


def test_pages_run_out_whole_or_not_at_all():
    pool = PagedStatePool(ParaGRU(2, 3, seed=0), capacity=3, host_capacity=1)
    a, b = pool.allocate(2)
    with pytest.raises(RuntimeError, match=r"paged cache OOM: 2 pages were wanted and 1 of 3 are free"):
        pool.allocate(2)
    assert pool.available == 1
    with pytest.raises(RuntimeError, match=r"paged cache OOM: 2 pages of the host were wanted and 1 of 1"):
        pool.offload([a, b])
    (page,) = pool.offload([a])
    c, d = pool.allocate(2)
    with pytest.raises(RuntimeError, match="paged cache OOM"):
        pool.reload([page])
    pool.free([c])
    (again,) = pool.reload([page])
    with pytest.raises(KeyError, match="page 0 of the host is not in use"):
        pool.free_host([page])
    pool.free([again, b, d])
    assert pool.available == 3


def test_stale_and_foreign_slots_are_refused():
    """A slot that was freed does not become its next owner's."""
    pool = PagedStatePool(ParaGRU(2, 3, seed=0), capacity=2, host_capacity=2)
    (mine,) = pool.allocate()
    pool.free([mine])
    (other,) = pool.allocate()
    assert int(other) == int(mine)
    x = np.ones((1, 1, 2), np.float32)
    before = pool.gather([other])[0]
    for call in (
        lambda: pool.free([mine]),
        lambda: pool.gather([mine]),
        lambda: pool.offload([mine]),
        lambda: pool.tokens(mine),
        lambda: paged_apply(pool, [mine], x),
    ):
        with pytest.raises(KeyError, match="stale: it was freed and has another owner now"):
            call()
    with pytest.raises(KeyError, match="slot 1 is not allocated"):
        paged_apply(pool, [1], x)
    with pytest.raises(ValueError, match="the same slot comes twice"):
        paged_apply(pool, [other, other], np.ones((2, 1, 2), np.float32))
    np.testing.assert_array_equal(pool.gather([other])[0], before)
    pages = pool.offload([other])
    with pytest.raises(ValueError, match="the same page comes twice"):
        pool.reload(pages * 2)


def test_a_call_that_fails_writes_nothing():
    cells = layers()
    pool = PagedStatePool(cells, capacity=2)
    slots = pool.allocate(2)
    paged_apply(pool, slots, prompts(2))
    before = pool.gather(slots)
    for call, error, sentence in [
        (lambda: paged_apply(pool, slots, prompts(1)), ValueError, "1 sequences came with 2 slots"),
        (lambda: paged_apply(pool, slots, prompts(2), solver="magic"), ValueError, "solver must be one of"),
        (lambda: paged_apply(pool, slots, prompts(2)[..., :2]), ValueError, "takes 3 features"),
        (lambda: paged_apply(pool, slots, prompts(1), cu_seqlens=[0, 7, 31]), ValueError, "cu_seqlens must be"),
        (lambda: paged_apply(cells, slots, prompts(2)), TypeError, "pool must be a PagedStatePool"),
        (lambda: paged_apply(pool, slots, prompts(2)[0]), ValueError, r"x must be \(B, T, I\)"),
        (lambda: pool.scatter(slots, before[:1]), ValueError, "wanted states of 2 layers, got 1"),
        (lambda: pool.scatter(slots, [b[:1] for b in before]), ValueError, "must have shape"),
        (lambda: pool.allocate(-1), ValueError, "whole number of pages"),
        (lambda: PagedStatePool(cells, 0), ValueError, "capacity must be a whole number of at least 1"),
        (lambda: PagedStatePool("model", 1), TypeError, "model must be a cell, a list of cells, or a ParaRNN"),
        (lambda: PagedStatePool(layers(library=array_api_strict), 1), TypeError, "written in place"),
    ]:
        with pytest.raises(error, match=sentence):
            call()
    for mine, old in zip(pool.gather(slots), before, strict=True):
        np.testing.assert_array_equal(mine, old)


def test_allocators_may_be_one_s_own():
    class Highest:
        def __init__(self):
            self.pages = {0, 1, 2, 3}

        def allocate(self, count):
            if count > len(self.pages):
                return None
            taken = sorted(self.pages)[-count:]
            self.pages -= set(taken)
            return taken

        def free(self, pages):
            self.pages |= set(pages)

    pool = PagedStatePool(ParaGRU(2, 3), 4, allocator=Highest())
    assert [int(s) for s in pool.allocate(2)] == [2, 3]


# --- stacks of blocks ------


class Block:
    """A residual block around a recurrence."""

    def __init__(self, cell):
        self.rnn = cell

    def forward_hidden(self, h, run):
        return h + run(2.0 * h)


def test_a_stack_of_blocks():
    cells = [ParaSLSTM(WIDTH, WIDTH, seed=0), ParaLSTM(WIDTH, WIDTH, seed=1)]
    pool = BlockStackPool([Block(c) for c in cells], capacity=3, host_capacity=1)
    h = np.random.default_rng(0).standard_normal((2, 12, WIDTH)).astype(np.float32)
    slots = pool.allocate(2)
    parts = [pool.forward_hidden(h[:, :5], slots), pool.forward_hidden(h[:, 5:6], slots)]
    slots = [*pool.reload(pool.offload(slots[:1])), slots[1]]
    parts.append(pool.forward_hidden(h[:, 6:], slots, solver="sequential"))
    wanted = h
    for cell in cells:
        wanted = wanted + sequential_apply(cell, 2.0 * wanted)[:, :, cell.hidden_slot]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), wanted, atol=3e-6)
    assert pool.tokens(slots[0]) == 12

    class Silent(Block):
        def forward_hidden(self, h, run):
            return h

    silent = BlockStackPool([Silent(cells[0])], capacity=1)
    with pytest.raises(RuntimeError, match="Silent called run 0 times, wanted once"):
        silent.forward_hidden(h[:1], silent.allocate())


def test_buffers_of_somebody_else():
    cells = [ParaGRU(WIDTH, WIDTH, seed=0), ParaLSTM(WIDTH, WIDTH, seed=1)]
    pool = BlockStackPool(cells, capacity=1)
    cache = [np.zeros((6, *c.state_shape), np.float32) for c in cells]
    pool.bind_external(cache)
    h = np.ones((2, 3, WIDTH), np.float32)
    y = pool.forward_hidden(h, [4, 2])
    assert cache[0][4].any() and cache[1][2].any() and not cache[0][[0, 1, 3, 5]].any()
    np.testing.assert_array_equal(y[0], y[1])
    with pytest.raises(RuntimeError, match="pages are in use"):
        pool.bind_external(cache)
    fresh = BlockStackPool(cells, capacity=1)
    with pytest.raises(ValueError, match="buffers of 2 layers, got 1"):
        fresh.bind_external(cache[:1])
    with pytest.raises(ValueError, match=r"wanted \(C, …\)"):
        fresh.bind_external(cache[::-1])


# --- speculative decoding ------


@pytest.mark.parametrize("solver", ["newton", "sequential"])
@pytest.mark.parametrize("library", [np, torch, array_api_strict])
def test_a_draft_is_checked_as_if_decoded(solver, library):
    """Greedy decoding a token at a time gives the same tokens and the same state."""
    rng = np.random.default_rng(0)
    cells, vocabulary, count = layers(), 5, 6
    table = rng.standard_normal((vocabulary, FEATURES)).astype(np.float32)
    head = rng.standard_normal((WIDTH, vocabulary)).astype(np.float32)
    start = [0.5 * rng.standard_normal((4, *c.state_shape)).astype(np.float32) for c in cells]

    def run(ids, b):
        """Logits before and after each token, and the states."""
        y, whole = table[ids][None], []
        for cell, h0 in zip(cells, start, strict=True):
            states = np.concatenate([h0[b : b + 1, None], sequential_apply(cell, y, h0[b : b + 1])], axis=1)
            whole.append(states[0])
            hidden = states if cell.state_slots == 1 else states[:, :, cell.hidden_slot]
            y = hidden[:, 1:]
        return hidden[0] @ head, whole

    drafts, wanted = [], []
    for b in range(4):
        ids = []
        for _ in range(count):
            ids.append(int(np.argmax(run(ids, b)[0][-1])))
        if b < 3:
            # Wrong at once, in the middle, at the end; the last row is right throughout.
            wrong = (0, 3, count - 1)[b]
            ids[wrong] = (ids[wrong] + 1) % vocabulary
        drafts.append(ids)
        wanted.append((0, 3, count - 1, count)[b])
    drafts = np.array(drafts)

    def own(a):
        return library.asarray(a)

    mine = [c if library is np else c.to(library) for c in cells]
    found = verify_linear_draft(
        mine, own(table[drafts]), own(drafts), lambda h: h @ own(head), h0=[own(s) for s in start], solver=solver
    )
    assert [int(n) for n in found.n_accepted] == wanted
    for b in range(4):
        logits, whole = run(drafts[b].tolist(), b)
        np.testing.assert_allclose(np.asarray(found.logits[b, ...]), logits, atol=1e-5)
        assert int(found.bonus_ids[b]) == int(np.argmax(logits[wanted[b]]))
        for layer, states in enumerate(whole):
            np.testing.assert_allclose(np.asarray(found.hidden[layer][b, ...]), states[wanted[b]], atol=1e-6)


def test_drafts_that_do_not_fit_are_refused():
    cell, x, ids = ParaGRU(2, 4, seed=0), np.ones((1, 3, 2), np.float32), np.zeros((1, 3), int)
    for call, error, sentence in [
        (lambda: verify_linear_draft(cell, x[0], ids, np.copy), ValueError, r"draft_x must be \(B, K, I\)"),
        (lambda: verify_linear_draft(cell, x, ids[:, :2], np.copy), ValueError, r"integers of shape \(1, 3\)"),
        (lambda: verify_linear_draft(cell, x, 1.0 * ids, np.copy), ValueError, "must be integers"),
        (lambda: verify_linear_draft(cell, x, ids, np.copy, solver="x"), ValueError, "solver must be one of"),
        (lambda: verify_linear_draft(cell, x, ids, np.copy, h0=[None, None]), ValueError, "each of 1 layers, got 2"),
        (
            lambda: verify_linear_draft(ParaRWKV7(2, 4, n_heads=1), x, ids, np.copy),
            TypeError,
            "reads out with its input",
        ),
    ]:
        with pytest.raises(error, match=sentence):
            call()
    empty = verify_linear_draft(cell, x[:, :0], ids[:, :0], np.copy)
    assert int(empty.n_accepted[0]) == 0 and empty.logits.shape == (1, 1, 4) and not empty.hidden[0].any()
