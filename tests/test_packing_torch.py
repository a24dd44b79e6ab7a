"""Packing, resets, padding and carried states on tensors: autograd, ParaRNN, compilation, checkpointing."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import _dynamo  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from pararnn import (  # noqa: E402
    NewtonConfig,
    ParaGRU,
    ParaLSTM,
    ParaRNN,
    ParaSLSTM,
    StockLSTM,
    final_states,
    newton_apply,
    sequential_apply,
)
from support import CELLS, start_for  # noqa: E402
from torch_support import gradients, leaves, tensors, worst  # noqa: E402

CU = [0, 0, 13, 13, 40, 61, 61]


def packed(kind, **options):
    cell, x, _ = tensors(kind, CU[-1], batch=1, **options)
    h0 = torch.from_numpy(start_for(kind(3, 5, dtype="float64"), len(CU) - 1))
    return cell, x, h0.requires_grad_() if x.requires_grad else h0


@pytest.mark.parametrize("config", [None, NewtonConfig(segment_len=8), NewtonConfig(segment_len=8, recompute=True)])
@pytest.mark.parametrize("kind", [*CELLS, StockLSTM])
def test_gradients_equal_the_loop_s(kind, config):
    """P43 and case O64: offsets, resets and padding together, with autograd through the solve and through the loop."""
    if kind is StockLSTM and config is not None:
        config = NewtonConfig(recompute=config.recompute)
    cell, x, h0 = packed(kind) if kind is not StockLSTM else _stock()
    rng = np.random.default_rng(1)
    reset, mask = torch.from_numpy(rng.random((1, CU[-1])) < 0.1), torch.from_numpy(rng.random((1, CU[-1])) < 0.8)
    for told in ({}, {"reset": reset}, {"mask": mask}, {"reset": reset, "mask": mask}):
        told = {"cu_seqlens": torch.tensor(CU, dtype=torch.int32), **told}

        def run(solve, told=told):
            states = solve(h0=h0, **told)
            whole = torch.cat([states.flatten(), final_states(states, CU, h0=h0).flatten()])
            return gradients(whole, leaves(cell, x, h0))

        mine = run(lambda **kw: newton_apply(cell, x, config, **kw))
        true = run(lambda h0, **kw: sequential_apply(cell, x, h0, **kw))
        assert worst(mine, true) < 1e-9, told


def _stock():
    cell = StockLSTM(3, 5, seed=0, dtype=torch.float64)
    cell = cell.replace(**{name: a.requires_grad_() for name, a in cell.arrays.items()})
    x = torch.randn(1, CU[-1], 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return cell, x, 0.3 * torch.ones(len(CU) - 1, *cell.state_shape, dtype=torch.float64).requires_grad_()


def test_a_poisoned_document_leaves_the_others_gradients_alone():
    """P43: no NaN reaches another document's x or h0, in the solve and in the loop."""
    cell, x, h0 = packed(ParaLSTM)
    bad = x.detach().clone()
    bad[:, 0:13] = torch.nan
    bad.requires_grad_()
    for apply in (newton_apply, sequential_apply):

        def solve(z, apply=apply):
            return apply(cell, z, h0=h0, cu_seqlens=CU)

        clean = torch.autograd.grad(solve(x)[:, 13:].square().sum(), [x, h0])
        found = torch.autograd.grad(solve(bad)[:, 13:].square().sum(), [bad, h0])
        assert torch.equal(found[0][:, 13:], clean[0][:, 13:])
        assert torch.equal(found[1][3:], clean[1][3:])


def test_padding_may_hold_anything():
    """Case O35: what stands at padding reaches no gradient, in the solve and in the loop."""
    cell, x, _ = packed(ParaGRU)
    mask = torch.ones(1, CU[-1], dtype=torch.bool)
    mask[:, 50:] = False
    bad = x.detach().clone()
    bad[:, 50:] = torch.nan
    bad.requires_grad_()
    for solve in (newton_apply, sequential_apply):
        states = solve(cell, bad, mask=mask)
        for g in torch.autograd.grad(states.sum(), [bad, *cell.arrays.values()]):
            assert torch.isfinite(g).all()
        assert torch.equal(states[:, 50:], states[:, 49:50].expand(1, 11, 5))


def stack(kind=ParaLSTM, **options):
    torch.manual_seed(0)
    return ParaRNN(kind(3, 5, seed=0, dtype=torch.float64), num_layers=2, return_hidden=True, **options)


@pytest.mark.parametrize("kind", [ParaGRU, ParaLSTM, ParaSLSTM])
@pytest.mark.parametrize("layout", ["paper", "pytorch"])
def test_a_stack_keeps_documents_apart(kind, layout):
    """Case O28: every layer knows the borders; the hidden state is the documents'; training and evaluation agree."""
    rnn = stack(kind, hidden_layout=layout)
    x = torch.randn(1, CU[-1], 3, dtype=torch.float64)
    y, hidden = rnn(x, cu_seqlens=CU)
    for n, (a, b) in enumerate(zip(CU, CU[1:], strict=False)):
        alone, last = rnn(x[:, a:b])
        assert torch.allclose(y[:, a:b], alone, atol=1e-12)
        mine, own = (h if isinstance(h, tuple) else (h,) for h in (hidden, last))
        for p, q in zip(mine, own, strict=True):
            p, q = (p[:, n], q[:, 0]) if layout == "pytorch" else (p[n], q[0])
            assert torch.allclose(p, q, atol=1e-12)
    with torch.no_grad():
        again, _ = rnn.eval()(x, cu_seqlens=torch.tensor(CU))
    assert torch.allclose(again, y, atol=1e-12)
    assert rnn.verify_agreement(x, cu_seqlens=CU).ok


def test_time_first_masks_are_time_first():
    rnn, x = stack(ParaGRU), torch.randn(2, 9, 3, dtype=torch.float64)
    reset, mask = torch.rand(2, 9) < 0.3, torch.rand(2, 9) < 0.7
    first = stack(ParaGRU, batch_first=False)
    first.load_state_dict(rnn.state_dict())
    y, _ = rnn(x, reset=reset, mask=mask)
    z, _ = first(x.transpose(0, 1), reset=reset.T, mask=mask.T)
    assert torch.equal(y, z.transpose(0, 1))


def test_documents_have_their_own_starts():
    rnn = stack(ParaLSTM)
    h0 = [0.1 * torch.randn(6, 2, 5, dtype=torch.float64), None]
    x = torch.randn(1, CU[-1], 3, dtype=torch.float64)
    y, _ = rnn(x, h0, CU)
    alone, _ = rnn(x[:, 13:40], [h0[0][3:4], None])
    assert torch.allclose(y[:, 13:40], alone, atol=1e-12)
    with pytest.raises(ValueError, match=r"h0 must have shape \(6, 2, 5\), got \(1, 2, 5\)"):
        rnn(x, [h0[0][:1], None], CU)


@pytest.mark.parametrize("kind", ["offsets", "masks"])
def test_compiled(kind):
    """P40: one graph, which takes new offsets and masks without being made again."""
    _dynamo.reset()
    rnn = stack(ParaGRU, config=NewtonConfig(segment_len=8))
    run = torch.compile(rnn, backend="aot_eager", fullgraph=True)
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(1, 30, 3, dtype=torch.float64, generator=generator)
        if kind == "offsets":
            told = {"cu_seqlens": torch.tensor([0, 5 + seed, 5 + seed, 30])}
        else:
            told = {"reset": torch.rand(1, 30, generator=generator) < 0.1, "mask": torch.rand(1, 30) < 0.9}
        (y, h), (z, g) = run(x, **told), rnn(x, **told)
        assert torch.equal(y, z) and torch.equal(h, g)
        mine, true = (torch.autograd.grad(a.sum() + b.sum(), rnn.parameters()) for a, b in ((y, h), (z, g)))
        assert worst(mine, true) < 1e-12


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_keeps_the_borders(reentrant):
    """Case O49."""
    rnn = stack()
    x = torch.randn(1, 20, 3, dtype=torch.float64, requires_grad=True)
    before = x.detach().clone()
    plain = torch.autograd.grad(rnn(x, cu_seqlens=[0, 7, 20])[0].square().sum(), x)[0]
    y = checkpoint(lambda z: rnn(z, cu_seqlens=[0, 7, 20])[0], x, use_reentrant=reentrant)
    y.square().sum().backward()
    assert torch.allclose(x.grad, plain, atol=1e-14) and torch.equal(x.detach(), before)


def test_vmap_over_packed_sequences_is_refused():
    cell, x, _ = packed(ParaGRU, tracked=False)
    with pytest.raises(TypeError, match="vmap does not go over packed sequences"):
        torch.vmap(lambda z: newton_apply(cell, z, cu_seqlens=CU))(x[None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    cell, x, h0 = packed(ParaLSTM, dtype=dtype, tracked=False)
    states = newton_apply(cell, x, h0=h0.to(dtype), cu_seqlens=CU)
    oracle = sequential_apply(cell, x, h0.to(dtype), cu_seqlens=CU)
    assert states.dtype == dtype and float((states - oracle).abs().max()) < 1e-2
    assert final_states(states, CU, h0=h0).dtype == dtype


# --- carried states ------


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("pieces", [[64] * 4, [1, 255], [63, 65, 128], [0, 200, 56]])
def test_any_split_of_a_sequence_equals_one_call(kind, pieces):
    """Case O13 and O24: states, the last state, and gradients across the splits."""
    cell, x, h0 = tensors(kind, 256)
    whole = newton_apply(cell, x, h0=h0)
    state, parts = h0, []
    for piece in x.split(pieces, dim=1):
        parts.append(newton_apply(cell, piece, NewtonConfig(segment_len=16), h0=state))
        state = final_states(parts[-1], h0=state)
    split = torch.cat(parts, dim=1)
    assert torch.allclose(split, whole, atol=1e-10)
    assert torch.equal(state, split[:, -1])
    assert worst(gradients(split, leaves(cell, x, h0)), gradients(whole, leaves(cell, x, h0))) < 1e-8


def test_splitting_packed_rows_carries_documents_over():
    """A document cut by the end of a row goes on in the next one, from the state that the first row left it in."""
    cell, x, _ = tensors(ParaLSTM, 40, batch=1)
    whole = newton_apply(cell, x, cu_seqlens=[0, 10, 40])
    first = newton_apply(cell, x[:, :25], cu_seqlens=[0, 10, 25])
    carried = final_states(first, [0, 10, 25])[1:]
    second = newton_apply(cell, x[:, 25:], h0=carried, cu_seqlens=[0, 15])
    joined = torch.cat([first, second], dim=1)
    assert torch.allclose(joined, whole, atol=1e-12)
    assert worst(gradients(joined, [x]), gradients(whole, [x])) < 1e-10


def test_detaching_the_state_cuts_the_gradient():
    """Case O24: truncated back-propagation; with the state carried as it is the gradient goes through."""
    cell, x, _ = tensors(ParaGRU, 16)
    for cut in (False, True):
        state = newton_apply(cell, x[:, :8])[:, -1]
        later = newton_apply(cell, x[:, 8:], h0=state.detach() if cut else state)
        found = torch.autograd.grad(later.sum(), x)[0]
        assert bool(found[:, :8].any()) is not cut and bool(found[:, 8:].any())
    whole = torch.autograd.grad(newton_apply(cell, x)[:, 8:].sum(), x)[0]
    state = newton_apply(cell, x[:, :8])[:, -1]
    through = torch.autograd.grad(newton_apply(cell, x[:, 8:], h0=state).sum(), x)[0]
    assert torch.allclose(through, whole, atol=1e-12)


def test_a_module_carries_its_own_hidden_state():
    """Case O13 for a stack: the hidden state that comes out goes in."""
    rnn = stack(ParaLSTM, hidden_layout="pytorch")
    x = torch.randn(2, 50, 3, dtype=torch.float64)
    whole, end = rnn(x)
    first, state = rnn(x[:, :17])
    second, last = rnn(x[:, 17:], state)
    assert torch.allclose(torch.cat([first, second], dim=1), whole, atol=1e-12)
    for p, q in zip(last, end, strict=True):
        assert torch.allclose(p, q, atol=1e-12)
