"""Autocast, half precision, gradient scaling and checkpointing leave a solve what it is (O48, O49, P41)."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from pararnn import NewtonConfig, ParaGRU, ParaLSTM, ParaRNN, ParaSLSTM, newton_apply, sequential_apply  # noqa: E402
from pararnn import verify_agreement as verify  # noqa: E402
from torch_support import tensors  # noqa: E402

HALF = (torch.bfloat16, torch.float16)


def module(kind=ParaLSTM, **options):
    torch.manual_seed(0)
    return ParaRNN(kind(3, 5, seed=0), num_layers=2, **options)


def x_of(time=65):
    return torch.randn(2, time, 3, generator=torch.Generator().manual_seed(1))


def gradients(run, rnn, x):
    rnn.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in rnn.parameters())]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("mode", ["train", "eval", "sequential"])
def test_O48_P41_autocast_does_not_change_the_solve(mode, dtype):
    rnn, x = module(solver="sequential" if mode == "sequential" else "auto").train(mode != "eval"), x_of()

    def under_autocast(x):
        with torch.autocast("cpu", dtype):
            return rnn(x)

    found, wanted = gradients(under_autocast, rnn, x), gradients(rnn, rnn, x)
    assert {g.dtype for g in found} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", HALF)
def test_O48_what_autocast_made_of_the_input_is_undone(dtype):
    rnn, x = module(), x_of()
    before = torch.nn.Linear(3, 3)
    with torch.autocast("cpu", dtype):
        made = before(x)
        assert made.dtype == dtype
        y = rnn(made)
        assert y.dtype == torch.float32
    y.sum().backward()
    assert before.weight.grad.dtype == torch.float32 and before.weight.grad.isfinite().all()
    assert torch.equal(y, rnn(made.float()))
    with pytest.raises(TypeError, match=r"module is torch\.float32"):
        rnn(made)


@pytest.mark.parametrize("dtype", HALF)
def test_O48_the_functions_too(dtype):
    cell, x, h0 = tensors(ParaGRU, 40, dtype=torch.float32)
    for run in (newton_apply, sequential_apply):
        with torch.autocast("cpu", dtype):
            given = x.detach().to(dtype)
            found = run(cell, given, h0=h0)
            report = verify(cell, x, h0=h0)
        assert found.dtype == torch.float32 and torch.equal(found, run(cell, given.float(), h0=h0))
        assert report.ok and report.max_rel < 1e-5


@pytest.mark.parametrize("start", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_O48_h0_of_any_floating_dtype(start):
    rnn, x = module(ParaGRU, hidden_layout="pytorch", return_hidden=True), x_of()
    h0 = (0.5 * torch.ones(2, 2, 5)).to(start).requires_grad_()
    for outside in (contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        with outside:
            y, end = rnn(x, h0)
        assert y.dtype == end.dtype == torch.float32
        y.sum().backward()
        assert h0.grad.dtype == start and h0.grad.isfinite().all()
        assert torch.equal(rnn(x, end)[0], rnn(x, end.detach())[0])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_O49_checkpointing_gives_the_same_gradients(reentrant, recompute):
    rnn, x = module(ParaSLSTM, config=NewtonConfig(segment_len=8, recompute=recompute)), x_of(20)
    before = x.clone()
    wanted = gradients(rnn, rnn, x)
    for outside in (contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)):

        def again(x, outside=outside):
            with outside:
                return checkpoint(rnn, x, use_reentrant=reentrant)

        assert all(torch.equal(a, b) for a, b in zip(gradients(again, rnn, x), wanted, strict=True))
    assert torch.equal(x, before)


def test_a_gradient_scaler_trains():
    rnn, x = module(), x_of()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(rnn.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = (rnn(x) - 0.2).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and scaler.get_scale() == 2.0**12


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float16, 1e-2), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("kind", [ParaGRU, ParaLSTM, ParaSLSTM])
def test_P01_P41_half_training_is_by_to_dtype(kind, dtype, allowed):
    rnn = ParaRNN(kind(3, 5, seed=0)).to(dtype)
    assert verify(rnn, x_of(200).to(dtype)).max_rel < allowed
    y = rnn(x_of(200).to(dtype))
    assert y.dtype == dtype
    y.sum().backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in rnn.parameters())
