"""Documents of a cell that mixes channels, in its generated kernels: each a row of the batch, none leaking."""

from __future__ import annotations

import pytest

from card_support import DEVICE, torch
from pararnn import NewtonConfig, NewtonStats, StockGRU, StockLSTM, newton_vjp, sequential_apply


@pytest.mark.parametrize("kind", [StockGRU, StockLSTM])
def test_mixing_documents_equal_the_loop(kind):
    """P43, with a poisoned neighbour."""
    cell = kind(3, 4, seed=0, xp=torch, device=DEVICE)
    generator, offsets = torch.Generator().manual_seed(0), [0, 0, 9, 9, 24]
    x = torch.randn(1, 24, 3, generator=generator).to(DEVICE)
    h0 = 0.3 * torch.randn(4, *cell.state_shape, generator=generator).to(DEVICE)
    stats = NewtonStats()
    states, pullback = newton_vjp(cell, x, NewtonConfig(scan_backend="triton"), h0, cu_seqlens=offsets, stats=stats)
    torch.testing.assert_close(states, sequential_apply(cell, x, h0, cu_seqlens=offsets), atol=3e-6, rtol=1e-5)
    assert stats.scan_backend == "triton"
    _, reference = newton_vjp(cell, x, NewtonConfig(scan_backend="array"), h0, cu_seqlens=offsets)
    mine, true = pullback(states, last=h0), reference(states, last=h0)
    torch.testing.assert_close(mine.x, true.x, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(mine.h0, true.h0, atol=1e-5, rtol=1e-4)
    x[:, :9] = torch.nan
    again, _ = newton_vjp(cell, x, NewtonConfig(scan_backend="triton"), h0, cu_seqlens=offsets)
    assert torch.equal(again[:, 9:], states[:, 9:]) and torch.isnan(again[:, :9]).all()
