"""Decoding a step at a time: equal to the run at once, in place where asked, and nobody else's state touched."""

from __future__ import annotations

import array_api_strict
import numpy as np
import pytest

import pararnn
from pararnn import (
    ParaCfC,
    ParaGRU,
    ParaLSTM,
    ParaRNN,
    ParaSLSTM,
    StockGRU,
    StockLSTM,
    can_decode_step,
    decode_step,
    decode_wx,
    newton_apply,
    sequential_apply,
)
from support import CELLS, error_of, problem, start_for

torch = pytest.importorskip("torch")


def on(kind_of_array, a):
    return {"numpy": lambda: a, "torch": lambda: torch.from_numpy(a), "strict": lambda: array_api_strict.asarray(a)}[
        kind_of_array
    ]()


def back(a):
    return a.detach().numpy() if isinstance(a, torch.Tensor) else np.from_dlpack(a)


def cell_on(cell, library):
    return cell.to({"numpy": np, "torch": torch, "strict": array_api_strict}[library])


@pytest.mark.parametrize("library", ["numpy", "torch", "strict"])
@pytest.mark.parametrize("kind", [*CELLS, StockGRU, StockLSTM])
def test_steps_equal_the_sequence(kind, library):
    """P51 and case O14: with and without wx, from zero, positive and negative states."""
    cell, x = problem(kind, 7, dtype=np.float64) if kind in CELLS else _stock(kind)
    mine = cell_on(cell, library)
    for h0 in (
        np.zeros((2, *cell.state_shape)),
        start_for(cell, 2) if kind in CELLS else -0.3 * np.ones((2, *cell.state_shape)),
    ):
        wanted = sequential_apply(cell, x, h0)
        assert error_of(cell, newton_apply(cell, x, h0=h0), wanted) < 1e-10
        first = second = on(library, h0)
        for t in range(7):
            step = on(library, np.ascontiguousarray(x[:, t]))
            first = decode_step(mine, first, step)
            second = decode_step(mine, second, wx=decode_wx(mine, step))
            assert error_of(cell, back(first)[:, None], wanted[:, t : t + 1]) < 1e-12
            np.testing.assert_allclose(back(second), back(first), atol=1e-14)
        assert not can_decode_step(mine, first)


def _stock(kind):
    return kind(3, 5, seed=0, dtype=np.float64), np.random.default_rng(1).standard_normal((2, 7, 3))


@pytest.mark.parametrize("batch", [1, 2])
def test_ranks(batch):
    """Case O15: (B, I) gives (B, …), (B, 1, I) gives (B, 1, …); a batch of one is no step of one."""
    for kind in CELLS:
        cell, x = problem(kind, 1, batch=batch)
        state = start_for(cell, batch)
        flat, row = decode_step(cell, state, x[:, 0]), decode_step(cell, state, x)
        assert flat.shape == state.shape and row.shape == (batch, 1, *cell.state_shape)
        np.testing.assert_array_equal(row[:, 0], flat)
        assert decode_wx(cell, x[:, 0]).shape == (batch, len(cell.gates) * 5)
        assert decode_wx(cell, x).shape == (batch, 1, len(cell.gates) * 5)
        again = decode_step(cell, state, wx=decode_wx(cell, x))
        np.testing.assert_array_equal(again, row)


def test_per_step_inputs():
    cell, x = problem(ParaCfC, 4)
    dt = np.array([[0.1, 2.0, 0.0, 1.0], [1.0, 0.5, 3.0, 0.2]], dtype=np.float32)
    state, wanted = np.zeros((2, 5), np.float32), sequential_apply(cell, x, dt=dt)
    for t in range(4):
        state = decode_step(cell, state, x[:, t], dt=dt[:, t])
        np.testing.assert_allclose(state, wanted[:, t], atol=1e-6)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_in_place(library):
    """Outputs may be given, and may be the state itself; nothing else is written."""
    for kind in CELLS:
        cell, x = problem(kind, 1, batch=3)
        mine, state = cell_on(cell, library), start_for(cell, 3)
        wanted = decode_step(cell, state, x[:, 0])
        own, step = on(library, state.copy()), on(library, x[:, 0].copy())
        wx = on(library, np.empty((3, len(cell.gates) * 5), np.float32))
        assert decode_wx(mine, step, out=wx) is wx
        assert decode_step(mine, own, wx=wx, out=own) is own
        np.testing.assert_allclose(back(own), wanted, atol=1e-6)
        np.testing.assert_array_equal(back(step), x[:, 0])


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_a_pool_advances_in_place(library, dtype):
    """Case O27: every dtype, a slice of a larger cache; rows that are not named keep every bit, NaN included."""
    for kind in (ParaGRU, ParaLSTM, ParaSLSTM):
        cell, x = problem(kind, 5, batch=3, dtype=np.dtype(dtype))
        mine = cell_on(cell, library)
        cache = np.full((8, 2, *cell.state_shape), np.nan, dtype=dtype)
        cache[[6, 1, 4], 1] = 0.0
        before = cache.copy()
        pool = on(library, cache)[:, 1]
        alone = on(library, np.zeros((3, *cell.state_shape), dtype))
        table = on(library, np.array([6, 1, 4]))
        for t in range(5):
            step = on(library, np.ascontiguousarray(x[:, t]))
            got = decode_step(mine, pool, step, block_table=table)
            alone = decode_step(mine, alone, step)
            np.testing.assert_array_equal(back(got), back(alone))
            np.testing.assert_array_equal(cache[[6, 1, 4], 1], back(alone))
        cache[[6, 1, 4], 1] = before[[6, 1, 4], 1]
        np.testing.assert_array_equal(cache, before)


def test_rows_without_a_request_read_and_write_nothing():
    cell, x = problem(ParaLSTM, 1, batch=3)
    pool = np.full((4, *cell.state_shape), np.nan, np.float32)
    pool[2] = 0.1
    before = pool.copy()
    out = decode_step(cell, pool, x[:, 0], block_table=np.array([-1, 2, -5]))
    assert np.isfinite(out).all() and np.isnan(pool[[0, 1, 3]]).all()
    np.testing.assert_array_equal(pool[2], out[1])
    assert (pool[2] != before[2]).any()
    fresh = decode_step(cell, np.zeros((1, *cell.state_shape), np.float32), x[:1, 0])
    np.testing.assert_allclose(out[0], fresh[0], atol=1e-6)


def test_float32_states_of_a_half_cell_keep_small_changes():
    """Case O43: a thousand steps in bfloat16 with the state in float32 follow the float32 cell."""
    cell = ParaGRU(3, 5, seed=0, dtype=torch.bfloat16)
    x = torch.full((1, 3), 0.01, dtype=torch.bfloat16)
    state, wide = torch.zeros(1, 5), torch.zeros(1, 5)
    exact = cell.to(dtype=torch.float32)
    for _ in range(1000):
        state, wide = decode_step(cell, state, x), decode_step(exact, wide, x.float())
    assert state.dtype == torch.float32 and float((state - wide).abs().max()) < 1e-6


def test_the_same_bits_every_time():
    """Case O16: ten steps from a fresh state, repeated between allocations full of NaN."""
    cell, x = problem(ParaLSTM, 10)
    mine, runs = cell.to(torch), []
    for _ in range(20):
        poison = torch.full((1 << 16,), torch.nan)
        del poison
        state = torch.zeros(2, *cell.state_shape)
        for t in range(10):
            state = decode_step(mine, state, torch.from_numpy(x[:, t].copy()))
        runs.append(state)
    assert all(torch.equal(r, runs[0]) for r in runs)


def test_gradients_go_through_a_step():
    cell, x = problem(ParaLSTM, 3, dtype=np.float64)
    mine = cell.to(torch)
    mine = mine.replace(**{n: a.requires_grad_() for n, a in mine.arrays.items()})
    x = torch.from_numpy(x).requires_grad_()
    state = torch.zeros(2, *cell.state_shape, dtype=torch.float64)
    for t in range(3):
        state = decode_step(mine, state, x[:, t])
    found = torch.autograd.grad(state.square().sum(), [x, *mine.arrays.values()])
    wanted = torch.autograd.grad(newton_apply(mine, x)[:, -1].square().sum(), [x, *mine.arrays.values()])
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-12)
    with pytest.raises(RuntimeError, match="out and block_table write in place"):
        decode_step(mine, state.detach(), x[:, 0], out=torch.empty_like(state))


def test_what_does_not_fit_is_refused():
    cell, x = problem(ParaLSTM, 1)
    state, step = np.zeros((2, 2, 5), np.float32), x[:, 0]
    for call, error, sentence in [
        (lambda: decode_step(cell, state), ValueError, "give x, or wx"),
        (lambda: decode_step(cell, state, step, wx=step), ValueError, "not both"),
        (lambda: decode_step(cell, state, x.repeat(2, axis=1)), ValueError, r"must be \(B, F\) or \(B, 1, F\)"),
        (lambda: decode_step(cell, state[:1], step), ValueError, r"state must have shape \(2, 2, 5\), got \(1, 2, 5\)"),
        (lambda: decode_step(cell, state.astype("float64"), step), TypeError, "state must be float32, got float64"),
        (lambda: decode_step(cell, None, step), TypeError, "zeros start a sequence"),
        (lambda: decode_step(cell, state, step[:, :2]), ValueError, "takes 3 features"),
        (lambda: decode_step(cell, state, wx=step), ValueError, "wx must have 15 columns, got 3"),
        (lambda: decode_step(cell, state, step, dt=1.0), TypeError, "no per-step input dt"),
        (lambda: decode_step(cell, state, step, out=np.empty((2, 5))), ValueError, "out must be float32"),
        (lambda: decode_step(cell, state, step, out=np.empty((4, 2, 5), np.float32)[::2]), ValueError, "contiguous"),
        (lambda: decode_step(cell, state, step, block_table=np.array([0.0, 1.0])), TypeError, "int32 or int64"),
        (lambda: decode_step(cell, state, step, block_table=[0.5, 1.0]), TypeError, "must hold whole numbers"),
        (lambda: decode_step(cell, state, step, block_table=[True, False]), TypeError, "must hold whole numbers"),
        (lambda: decode_step(cell, state, step, block_table=np.array([0])), ValueError, r"shape \(2,\), got \(1,\)"),
        (lambda: decode_step(cell, state, step, block_table=np.array([0, 2])), ValueError, "state 2 of a pool of 2"),
        (
            lambda: decode_step(cell, state, step, block_table=np.array([1, 1])),
            ValueError,
            "two rows .* the same state",
        ),
        (lambda: decode_step(cell, state[:, 0], step, block_table=np.array([0, 1])), ValueError, r"must be \(C, …\)"),
        (lambda: decode_step("cell", state, step), TypeError, "cell must be a cell"),
        (lambda: decode_wx(cell, [1.0]), TypeError, "must be an array, got list"),
        (lambda: can_decode_step(cell, 3), TypeError, "ref must be an array"),
        (lambda: can_decode_step("cell", step), TypeError, "must be a cell"),
        (lambda: decode_step(ParaCfC(3, 5), state[:, 0], wx=np.zeros((2, 4), np.float32), dt=1.0), TypeError, "give x"),
    ]:
        with pytest.raises(error, match=sentence):
            call()
    strict = cell.to(array_api_strict)
    given = array_api_strict.asarray(step)
    pool = array_api_strict.asarray(state)
    with pytest.raises(TypeError, match="cannot be written in place"):
        decode_step(strict, pool, given, out=pool)
    with pytest.raises(TypeError, match="gather the rows, step, and put them back"):
        decode_step(strict, pool, given, block_table=array_api_strict.asarray([0, 1]))


def test_one_step_of_a_module_in_evaluation_carries_the_state():
    """P50: prefill, then a step at a time through the module."""
    torch.manual_seed(0)
    rnn = ParaRNN(ParaLSTM(3, 5, seed=0), num_layers=2, return_hidden=True, hidden_layout="pytorch").eval()
    x = torch.randn(2, 9, 3)
    with torch.no_grad():
        whole, _ = rnn(x)
        y, state = rnn(x[:, :4])
        rows = [y]
        for t in range(4, 9):
            y, state = rnn(x[:, t : t + 1], state)
            rows.append(y)
    assert torch.allclose(torch.cat(rows, dim=1), whole, atol=1e-6)


def test_names():
    for name in ("decode_step", "decode_wx", "can_decode_step"):
        assert name in pararnn.__all__


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_projection_may_be_written_over_its_input(library):
    cell = cell_on(ParaGRU(12, 4, seed=0, dtype=np.float64), library)
    x = on(library, np.random.default_rng(0).standard_normal((3, 12)))
    wanted = back(decode_wx(cell, x)).copy()
    assert np.allclose(back(decode_wx(cell, x, out=x)), wanted, rtol=1e-12, atol=1e-12)
