"""Mixing cells through the generated kernels: on a CUDA card as they are, elsewhere in Triton's interpreter."""

from __future__ import annotations

import pytest

from card_support import DEVICE, torch
from pararnn import (
    NewtonConfig,
    NewtonStats,
    ParaGRU,
    StockGRU,
    StockLSTM,
    StockRNN,
    newton_apply,
    newton_vjp,
    sequential_apply,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def relative(mine, true) -> float:
    mine, true = mine.detach().double(), true.detach().double()
    return float((mine - true).abs().max() / true.abs().max().clamp(min=1e-30))


def compare(cell, time: int, config: NewtonConfig):
    """Errors of states and gradients against the loop in float64, and the stats."""
    torch.manual_seed(0)
    x = torch.randn(2, time, cell.d_in, device=DEVICE)
    h0 = 0.3 * torch.randn(2, *cell.state_shape, device=DEVICE)
    stats = NewtonStats()
    states, pull_back = newton_vjp(cell, x, config, h0, stats=stats)
    whole = NewtonConfig(scan_backend="torch", segment_len=time)
    wanted, pull_back_wanted = newton_vjp(cell.to(dtype=torch.float64), x.double(), whole, h0.double())
    cotangent = torch.randn_like(wanted)
    found, true = pull_back(cotangent.float()), pull_back_wanted(cotangent)
    pairs = [(found.x, true.x), (found.h0, true.h0), *((found.params[n], true.params[n]) for n in true.params)]
    return relative(states, wanted), max(relative(a, b) for a, b in pairs), stats


@pytest.mark.parametrize(
    "kind, heads, times",
    [(StockGRU, None, 1.0), (StockLSTM, None, 3.0), (StockRNN, None, 3.0), (StockLSTM, 2, 1.0)],
)
def test_segments_and_their_gradients(kind, heads, times):
    """Lengths that segments do not divide, networks that need corrections, heads too narrow for a fused product."""
    cell = kind(3, 8, seed=0, xp=torch, device=DEVICE, n_heads=heads)
    cell = cell.replace(R=times * cell.R)
    error, gradient_error, stats = compare(cell, 43, NewtonConfig(scan_backend="triton", segment_len=12))
    assert stats.path == "segments" and stats.converged and error < 2e-5 and gradient_error < 2e-4


def test_what_does_not_settle_is_walked():
    """A network that amplifies ends in the time loop of the same kernels, bit for bit."""
    cell = StockRNN(3, 8, seed=0, xp=torch, device=DEVICE)
    cell = cell.replace(R=8.0 * cell.R)
    x, stats = torch.randn(1, 60, 3, device=DEVICE), NewtonStats()
    found = newton_apply(cell, x, NewtonConfig(scan_backend="triton", segment_len=10, max_passes=2), stats=stats)
    assert stats.path == "sequential" and stats.walked == 1.0 and "walked" in stats.reason
    loop = newton_apply(cell, x, NewtonConfig(scan_backend="triton", segment_len=60))
    assert torch.equal(found, loop)


def test_buffers_are_used_again_without_a_trace():
    """Results stay what they were when the same shape is solved again with other weights, and without a bias."""
    x = torch.randn(1, 30, 3, device=DEVICE)
    config = NewtonConfig(scan_backend="triton", segment_len=8)
    cells = [StockGRU(3, 4, seed=k, xp=torch, device=DEVICE) for k in range(2)]
    bare = cells[1].replace(b_h=torch.zeros_like(cells[1].b_h))
    results = [newton_apply(cell, x, config) for cell in (*cells, bare)]
    for cell, result in zip((*cells, bare), results, strict=True):
        assert relative(result, sequential_apply(cell, x)) < 1e-5


def test_what_the_kernels_leave_to_others():
    x = torch.randn(1, 30, 3, device=DEVICE)
    two_stages = ParaGRU(3, 4, mix="dense", seed=0, xp=torch, device=DEVICE)
    with pytest.raises(TypeError, match="one product of one slot"):
        newton_apply(two_stages, x, NewtonConfig(scan_backend="triton"))
    with pytest.raises(TypeError, match="options of the array solver"):
        stock = StockGRU(3, 4, seed=0, xp=torch, device=DEVICE)
        newton_apply(stock, x, NewtonConfig(scan_backend="triton", max_iters=2))


def test_packed_documents_do_not_see_each_other():
    cell = StockGRU(3, 4, seed=0, xp=torch, device=DEVICE)
    cell = cell.replace(**{n: a.requires_grad_() for n, a in cell.arrays.items()})
    x, cuts = torch.randn(1, 41, 3, device=DEVICE), [0, 11, 12, 41]
    config = NewtonConfig(scan_backend="triton", segment_len=7)
    packed = newton_apply(cell, x, config, cu_seqlens=torch.tensor(cuts, device=DEVICE))
    alone = torch.cat([sequential_apply(cell, x[:, a:b]) for a, b in zip(cuts, cuts[1:], strict=False)], dim=1)
    assert relative(packed, alone) < 1e-5
    arrays = list(cell.arrays.values())
    for a, b in zip(*(torch.autograd.grad(h.square().sum(), arrays) for h in (packed, alone)), strict=True):
        assert relative(a, b) < 1e-4


@pytest.mark.parametrize("kind, heads", [(StockGRU, None), (StockLSTM, 2)])
@pytest.mark.parametrize("leftward", [False, True])
def test_a_kernel_that_computes_something_else_is_found_out(kind, heads, leftward, monkeypatch):
    """A step is checked before it is captured: the right one passes, one with another matrix or tile does not."""
    from pararnn_triton import mixing_check, mixing_launch

    cell = kind(3, 8, seed=0, xp=torch, device=DEVICE, n_heads=heads)
    x = torch.randn(2, 20, 3, device=DEVICE)
    mixing_launch._boards.clear()
    states, pull_back = newton_vjp(cell, x, NewtonConfig(scan_backend="triton", segment_len=5))
    pull_back(torch.ones_like(states))
    (board,) = mixing_launch._boards.values()
    spans = [span for span in board.spans.values() if span.leftward == leftward and span.count > 1]
    assert spans
    for span in spans:
        board.begin.zero_()
        mixing_check.check_step(span)
        name = "transposed" if leftward else "matrix"
        right = getattr(board, name)
        # What the kernel is given differs in one number from what the check is given.
        wrong = right.clone()
        wrong.view(-1)[3] += 0.5
        launch = type(span)._back if leftward else type(span)._forward

        def off(self, *arguments, launch=launch, name=name, wrong=wrong, right=right, **options):
            setattr(self.board, name, wrong)
            launch(self, *arguments, **options)
            setattr(self.board, name, right)

        with monkeypatch.context() as patch:
            patch.setattr(type(span), "_back" if leftward else "_forward", off)
            with pytest.raises(mixing_check.KernelsDisagree, match="off by"):
                mixing_check.check_step(span)


def test_auto_goes_on_without_kernels_that_disagree_and_an_order_does_not(monkeypatch):
    from pararnn.errors import BackendUnavailableError
    from pararnn.problem import make_problem
    from pararnn_triton import mixing_check, mixing_solve
    from pararnn_triton.backend import TritonBackend

    def disagree(*_):
        raise mixing_check.KernelsDisagree("the generated step is off")

    monkeypatch.setattr(mixing_solve, "solve_mixing_on_cuda", disagree)
    cell = StockGRU(3, 8, seed=0, xp=torch, device=DEVICE)
    x = torch.randn(2, 20, 3, device=DEVICE)
    states, stats = TritonBackend().newton(make_problem("newton_apply", cell, x, None, NewtonConfig(), None))
    assert relative(states, sequential_apply(cell, x)) < 1e-5 and "off" in stats.reason
    with pytest.raises(BackendUnavailableError, match="off"):
        newton_apply(cell, x, NewtonConfig(scan_backend="triton"))
