"""The Triton kernels of gla and rwkv6, on a CUDA card or in Triton's interpreter on small shapes."""

from __future__ import annotations

import numpy as np
import pytest

from card_support import DEVICE, ON_CARD, torch
from pararnn import BackendUnavailableError
from pararnn.linear_attention import gla, rwkv6, rwkv7
from test_linear_attention import cotangents, gap, inputs, oracle


def on_device(x, dtype=torch.float32):
    return torch.tensor(np.asarray(x), device=DEVICE).to(dtype).requires_grad_()


def check(kind, args, state, tolerance, dtype=torch.float32, **options):
    """Outputs, final state and every gradient of the kernel against the loop in float64."""
    leaves = [on_device(x, dtype) for x in args] + [on_device(state)]
    given, last = cotangents(kind, args, state)
    given = torch.tensor(given, device=DEVICE).to(dtype)
    wide = [x.detach().cpu().double().numpy() for x in leaves]
    out, final, grads = oracle(kind, wide[:-1], wide[-1], given.cpu().double().numpy(), last, **options)
    got, end = kind(*leaves[:-1], initial_state=leaves[-1], output_final_state=True, form="kernel", **options)
    assert got.dtype == dtype and end.dtype == torch.float32
    pairs = [(got, out), (end, final)]
    found = torch.autograd.grad([got, end], leaves, [given, torch.tensor(last, device=DEVICE).float()])
    pairs += zip(found, grads.values(), strict=True)
    for mine, true in pairs:
        assert gap(mine.detach().cpu().double(), true) < tolerance


@pytest.mark.parametrize("kind", [gla, rwkv6, rwkv7])
@pytest.mark.parametrize("decay", ["mild", "mixed", -5.0, 0.0])
def test_kernels_equal_the_loop_with_all_gradients(kind, decay):
    """P61, P62: K ≠ V, neither a power of two, T no multiple of 64, decays from one to exactly zero."""
    args, state = inputs(kind, 100, batch=1, heads=2, decay=decay)
    check(kind, args, state, 1e-5, scale=0.7)


@pytest.mark.parametrize("kind", [gla, rwkv6])
def test_one_decay_for_a_head(kind):
    args, state = inputs(kind, 70, batch=2, heads=1, keys=16, values=20)
    args = (*args[:3], args[3][..., :1], *args[4:])
    check(kind, args, state, 1e-5)


@pytest.mark.parametrize("time", [1, 64, 65])
def test_any_length(time):
    args, state = inputs(gla, time, batch=1, heads=1, decay="mixed")
    check(gla, args, state, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    if not ON_CARD and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter rounds bfloat16 stores otherwise")
    args, state = inputs(gla, 70, batch=1, heads=1, decay="mixed")
    check(gla, args, state, 1e-2, dtype)


def test_a_nan_reaches_the_result_and_no_other_head():
    args, _ = inputs(gla, 70, batch=1, heads=2)
    args[2][0, 3, 1] = np.nan
    out, _ = gla(*(on_device(x).detach() for x in args), form="kernel")
    assert out[0, 3:, 1].isnan().all() and out[0, :, 0].isfinite().all()


def test_what_kernels_do_not_take_is_refused_with_reasons():
    args, _ = inputs(gla, 20, batch=1)
    with pytest.raises(BackendUnavailableError, match="compute in float32"):
        gla(*(on_device(x, torch.float64) for x in args), form="kernel")
    with pytest.raises(BackendUnavailableError, match="packed"):
        gla(*(on_device(x) for x in args), form="kernel", cu_seqlens=[0, 20])
    with pytest.raises(BackendUnavailableError, match="torch tensors"):
        gla(*args, form="kernel")
    with pytest.raises(BackendUnavailableError, match="up to 64 channels"):
        rwkv7(*(on_device(x) for x in inputs(rwkv7, 20, keys=65)[0]), form="kernel")


def test_second_derivatives_are_refused_not_wrong():
    args, _ = inputs(gla, 20, batch=1, heads=1)
    leaves = [on_device(x) for x in args]
    out, _ = gla(*leaves, form="kernel")
    (grad,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.sum(), leaves[1])


@pytest.mark.skipif(not ON_CARD, reason="needs a CUDA card")
@pytest.mark.parametrize("kind", [gla, rwkv6])
@pytest.mark.parametrize("shape", [(1, 5000, 4, 64, 64), (65538, 32, 1, 16, 16), (3, 300, 2, 40, 100)])
def test_large_grids_and_the_same_bits_every_time(kind, shape):
    batch, time, heads, keys, values = shape
    torch.manual_seed(0)
    q, k = (torch.randn(batch, time, heads, keys, device="cuda") for _ in range(2))
    v, g = torch.randn(batch, time, heads, values, device="cuda"), -torch.rand(batch, time, heads, keys, device="cuda")
    more = [] if kind is gla else [torch.randn(heads, keys, device="cuda")]
    leaves = [x.requires_grad_() for x in (q, k, v, g, *more)]
    out, final = kind(*leaves, output_final_state=True, form="kernel")
    truth, state = kind(*leaves, output_final_state=True, form="chunk")
    assert gap(out.detach().cpu(), truth.detach().cpu()) < 1e-5
    assert gap(final.detach().cpu(), state.detach().cpu()) < 1e-5
    grads = torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)
    for mine, true in zip(grads, torch.autograd.grad(truth.square().sum(), leaves), strict=True):
        assert gap(mine.cpu(), true.cpu()) < 3e-5
    for _ in range(5):
        assert torch.equal(kind(*leaves, form="kernel")[0], out)
        again = torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, grads, strict=True))
