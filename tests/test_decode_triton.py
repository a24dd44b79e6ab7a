"""The generated decode kernel: on a CUDA card as it is, elsewhere in Triton's interpreter on small shapes."""

from __future__ import annotations

import numpy as np
import pytest

from card_support import DEVICE, ON_CARD, torch
from pararnn import (
    ParaGRU,
    ParaLSTM,
    ParaRNN,
    ParaSLSTM,
    ParaTanh,
    can_decode_step,
    decode_step,
    decode_wx,
    sequential_apply,
)
from pararnn_triton.decode import PROJECT_ROWS

CELLS = (ParaGRU, ParaLSTM, ParaSLSTM, ParaTanh)


def made(kind, batch, time=5, dtype=torch.float32, width=5, features=3):
    cell = kind(features, width, seed=0, xp=torch, device=DEVICE, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    return cell, torch.randn(batch, time, features, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("batch", "dtype"),
    [(1, torch.float32), (3, torch.float32), (6, torch.float32), (2, torch.float16), (6, torch.bfloat16)],
)
@pytest.mark.parametrize("kind", CELLS)
def test_steps_equal_the_sequence(kind, batch, dtype):
    """P50, P51: with the projection in the kernel (few rows) and before it, from a state in float32."""
    cell, x = made(kind, batch, dtype=dtype)
    assert can_decode_step(cell, x)
    wide = cell.to(dtype=torch.float32)
    wanted = sequential_apply(wide, x.float())
    first = second = torch.zeros(batch, *cell.state_shape, device=DEVICE)
    for t in range(5):
        first = decode_step(cell, first, x[:, t])
        second = decode_step(cell, second, wx=decode_wx(cell, x[:, t]))
        torch.testing.assert_close(second, wanted[:, t], atol=3e-6, rtol=1e-5)
        # A product of many rows leaves the gate inputs in half precision, as in a run over the whole sequence.
        rounded = dtype != torch.float32 and batch > PROJECT_ROWS
        torch.testing.assert_close(first, wanted[:, t], atol=2e-2 if rounded else 3e-6, rtol=2e-2 if rounded else 1e-5)
    stored = decode_step(cell, wanted[:, 3].to(dtype), x[:, 4])
    assert stored.dtype == dtype
    torch.testing.assert_close(stored.float(), wanted[:, 4], atol=2e-2 if dtype != torch.float32 else 3e-6, rtol=2e-2)


def test_wide_cells_use_several_programs():
    cell, x = made(ParaLSTM, 2, time=1, width=150, features=70)
    state = torch.zeros(2, *cell.state_shape, device=DEVICE)
    wanted = sequential_apply(cell, x)[:, 0]
    torch.testing.assert_close(decode_step(cell, state, x[:, 0]), wanted, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(decode_step(cell, state, wx=decode_wx(cell, x[:, 0])), wanted, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", CELLS)
def test_a_pool_advances_in_place(kind):
    """Case O27 and P51: a slice of a larger cache; poisoned pages keep every bit; an output may be given besides."""
    cell, x = made(kind, 3)
    cache = torch.full((8, 2, *cell.state_shape), torch.nan, device=DEVICE)
    named = [6, 1, 4]
    cache[named, 1] = 0.0
    pool, table = cache[:, 1], torch.tensor(named, device=DEVICE)
    state, out = torch.zeros(3, *cell.state_shape, device=DEVICE), torch.empty(3, *cell.state_shape, device=DEVICE)
    for t in range(5):
        wx = decode_wx(cell, x[:, t])
        assert decode_step(cell, pool, wx=wx, block_table=table, out=out) is out
        state = decode_step(cell, state, wx=wx)
        assert torch.equal(out, state) and torch.equal(pool[named], state)
    assert int(torch.isnan(cache).sum()) == (16 - 3) * state[0].numel()


def test_rows_without_a_request_read_and_write_nothing():
    cell, x = made(ParaLSTM, 3)
    pool = torch.full((4, *cell.state_shape), torch.nan, device=DEVICE)
    pool[2] = 0.1
    out = decode_step(cell, pool, x[:, 0], block_table=torch.tensor([-1, 2, -5], device=DEVICE))
    assert torch.isfinite(out).all() and torch.isnan(pool[[0, 1, 3]]).all() and torch.equal(pool[2], out[1])


def test_the_clamp_is_the_cell_s():
    """Recurrent weights are clamped in the kernel, to the cell's own bound or not at all; NaN stays."""
    for cap in (0.5, None):
        cell, x = made(ParaGRU, 2, time=1)
        cell = cell.replace(max_recurrent_norm=cap, a_z=10.0 * torch.ones(5, device=DEVICE))
        state = 0.5 * torch.ones(2, 5, device=DEVICE)
        wanted = sequential_apply(cell, x, state)[:, 0]
        torch.testing.assert_close(decode_step(cell, state, x[:, 0]), wanted, atol=3e-6, rtol=1e-5)
    cell = cell.replace(a_z=torch.full((5,), torch.nan, device=DEVICE))
    assert torch.isnan(decode_step(cell, state, x[:, 0])).all()


def test_a_module_in_evaluation_takes_the_kernel():
    """P50: one step of `.eval()`."""
    torch.manual_seed(0)
    rnn = ParaRNN(ParaLSTM(3, 5, seed=0), num_layers=2, return_hidden=True, hidden_layout="pytorch").eval().to(DEVICE)
    x = torch.randn(2, 5, 3).to(DEVICE)
    with torch.no_grad():
        whole, _ = rnn(x)
        y, state = rnn(x[:, :2])
        for t in range(2, 5):
            y, state = rnn(x[:, t : t + 1], state)
    assert rnn.last_stats.scan_backend == "triton" and "decode kernel" in rnn.last_stats.reason
    torch.testing.assert_close(y[:, 0], whole[:, -1], atol=3e-6, rtol=1e-5)


@pytest.mark.skipif(not ON_CARD, reason="CUDA graphs need a card")
def test_a_step_is_captured_in_a_graph_and_allocates_nothing():
    """P51: pinned buffers; new inputs by copying into them."""
    cell, x = made(ParaSLSTM, 2)
    state = torch.zeros(2, *cell.state_shape, device=DEVICE)
    wx, step = torch.empty(2, len(cell.gates) * 5, device=DEVICE), x[:, 0].clone()
    decode_step(cell, state.clone(), wx=decode_wx(cell, step, out=wx), out=torch.empty_like(state))
    torch.cuda.synchronize()
    held, graph = torch.cuda.memory_allocated(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_step(cell, state, wx=wx, out=state)
    assert torch.cuda.memory_allocated() == held
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # The matrix library may allocate a workspace here, once.
        decode_wx(cell, step, out=wx)
        decode_step(cell, state, wx=wx, out=state)
    state.zero_()
    for t in range(5):
        step.copy_(x[:, t])
        graph.replay()
    torch.testing.assert_close(state, sequential_apply(cell, x)[:, -1], atol=3e-6, rtol=1e-5)


def test_the_same_bits_every_time():
    """Case O16."""
    cell, x = made(ParaSLSTM, 2)
    runs = []
    for _ in range(5):
        state = torch.zeros(2, *cell.state_shape, device=DEVICE)
        for t in range(5):
            state = decode_step(cell, state, x[:, t])
        runs.append(np.asarray(state.cpu()))
    assert all((r == runs[0]).all() for r in runs)
