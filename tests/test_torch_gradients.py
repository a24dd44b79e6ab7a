"""newton_apply on tensors: gradients reach x, the cell's arrays and h0, and equal those of the time loop."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import pararnn.registry  # noqa: E402
from pararnn import (  # noqa: E402
    Backend,
    ChannelwiseCell,
    NewtonConfig,
    NewtonDivergenceError,
    NewtonStats,
    ParaGRU,
    ParaLSTM,
    ParaSLSTM,
    ParaTanh,
    explain,
    newton_apply,
    newton_vjp,
    sequential_apply,
    verify_agreement,
)
from support import CELLS  # noqa: E402
from torch_support import (  # noqa: E402
    gradients,
    leaves,
    loop_gradients,
    parallel_gradients,
    tensors,
    weights_like,
    worst,
)

WAYS = {
    "auto": NewtonConfig(),
    "torch": NewtonConfig(scan_backend="torch", segment_len=16),
    "array": NewtonConfig(scan_backend="array", segment_len=16),
    "windows": NewtonConfig(segment_len=8, chunk_len=40),
    "exact": NewtonConfig(segment_len=16, exact=True),
    "recompute": NewtonConfig(segment_len=16, recompute=True),
    "pinned": NewtonConfig(max_iters=30, residual_atol=None),
}


# --- agreement with autograd through the loop ------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CELLS)
def test_gradients_equal_autograd_through_the_time_loop(kind, way):
    cell, x, h0 = tensors(kind, 100)
    assert worst(parallel_gradients(cell, x, h0, WAYS[way]), loop_gradients(cell, x, h0)) < 1e-9


@pytest.mark.parametrize("kind", CELLS)
def test_gradients_pass_gradcheck(kind):
    cell, x, h0 = tensors(kind, 3, batch=1, features=2, width=2)
    config = NewtonConfig(segment_len=2, exact=True)
    names = list(cell.arrays)

    def run(x, h0, *arrays):
        return newton_apply(cell.replace(**dict(zip(names, arrays, strict=True))), x, config, h0=h0)

    assert torch.autograd.gradcheck(run, (x, h0, *cell.arrays.values()))


def test_a_cell_of_one_s_own_is_differentiated_too():
    class Leaky(ChannelwiseCell):
        slots, gates, params = ("h",), ("u",), ("a", "b")

        def step(self, xp, h, u, a, b):
            return (0.9 * h + 0.1 * xp.tanh(a * h + u) * xp.exp(-b * b),)

    cell, x, h0 = tensors(Leaky, 60)
    assert worst(parallel_gradients(cell, x, h0, NewtonConfig(segment_len=8)), loop_gradients(cell, x, h0)) < 1e-9


def test_O22_a_loss_on_the_final_state_alone():
    cell, x, h0 = tensors(ParaLSTM, 50)
    found = torch.autograd.grad(newton_apply(cell, x, h0=h0)[:, -1].sum(), leaves(cell, x, h0))
    wanted = torch.autograd.grad(sequential_apply(cell, x, h0)[:, -1].sum(), leaves(cell, x, h0))
    assert worst(found, wanted) < 1e-9


@pytest.mark.parametrize("kind", CELLS)
def test_O24_the_gradient_crosses_from_one_call_into_the_next(kind):
    cell, x, _ = tensors(kind, 16)
    states = newton_apply(cell, x)
    wanted = gradients(states[:, 8:], leaves(cell, x))
    first = newton_apply(cell, x[:, :8])
    second = newton_apply(cell, x[:, 8:], h0=first[:, -1])
    assert worst(gradients(second, leaves(cell, x)), wanted) < 1e-9
    cut = newton_apply(cell, x[:, 8:], h0=first[:, -1].detach())
    assert not gradients(cut, [x])[0][:, :8].any()


@pytest.mark.parametrize("h0_given", [False, True])
@pytest.mark.parametrize("config", [None, NewtonConfig(segment_len=4), NewtonConfig(recompute=True)])
def test_O64_a_gradient_for_exactly_what_requires_one(h0_given, config):
    """Each input alone, with every optional argument set and unset."""
    for guessed in (False, True):
        for stats in (None, NewtonStats()):
            for chosen in ("x", "h0", "a_z", "W_x.weight", "W_x.bias"):
                cell, x, h0 = tensors(ParaGRU, 9, tracked=False)
                if chosen == "h0" and not h0_given:
                    continue
                leaf = {"x": x, "h0": h0, **cell.arrays}[chosen].requires_grad_()
                guess = torch.zeros(2, 9, 5, dtype=torch.float64) if guessed else None
                start = h0 if h0_given else None
                states = newton_apply(cell, x, config, h0=start, guess=guess, stats=stats)
                states.sum().backward()
                others = [a for a in (x, h0, *cell.arrays.values()) if a is not leaf]
                assert leaf.grad is not None and all(a.grad is None and not a.requires_grad for a in others)
                (wanted,) = torch.autograd.grad(sequential_apply(cell, x, start).sum(), leaf)
                assert worst([leaf.grad], [wanted]) < 1e-9


def test_what_needs_no_gradient_gets_no_graph():
    cell, x, h0 = tensors(ParaGRU, 20, tracked=False)
    assert not newton_apply(cell, x, h0=h0).requires_grad
    with torch.no_grad():
        assert not newton_apply(cell, x.requires_grad_(), h0=h0).requires_grad
    with torch.inference_mode():
        newton_apply(cell, torch.ones(1, 4, 3, dtype=torch.float64))


def test_a_cotangent_may_lie_anyhow_in_memory():
    """P42: expanded, transposed and strided cotangents and inputs."""
    cell, x, _ = tensors(ParaLSTM, 30)
    turned = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    sliced = torch.cat([x.detach(), x.detach()], dim=2)[:, :, :3].requires_grad_()
    wanted = torch.autograd.grad(newton_apply(cell, x).sum(), x)
    for given in (turned, sliced):
        assert worst(torch.autograd.grad(newton_apply(cell, given).sum(), given), wanted) < 1e-12
    states = newton_apply(cell, x)
    strange = weights_like(states).transpose(0, 1).contiguous().transpose(0, 1)
    found = torch.autograd.grad(states, x, strange, retain_graph=True)
    assert worst(found, torch.autograd.grad(states, x, strange.contiguous())) < 1e-12


def test_gradients_of_half_precision_come_in_half():
    for dtype, allowed in ((torch.float16, 1e-2), (torch.bfloat16, 5e-2)):
        cell, x, h0 = tensors(ParaGRU, 60, dtype=dtype)
        found = parallel_gradients(cell, x, h0)
        assert {g.dtype for g in found} == {dtype}
        wide = [a.detach().double().requires_grad_() for a in leaves(cell, x, h0)]
        true = cell.to(dtype=torch.float64).replace(**dict(zip(cell.arrays, wide[2:], strict=True)))
        wanted = gradients(sequential_apply(true, wide[0], wide[1]), wide)
        assert worst([g.double() for g in found], wanted) < allowed


def test_h0_of_another_floating_dtype_gets_its_gradient_in_that_dtype():
    cell, x, h0 = tensors(ParaGRU, 10, dtype=torch.float32)
    start = h0.detach().double().requires_grad_()
    (found,) = torch.autograd.grad(newton_apply(cell, x, h0=start).sum(), start)
    (wanted,) = torch.autograd.grad(sequential_apply(cell, x, h0).sum(), h0)
    assert found.dtype == torch.float64 and torch.allclose(found.float(), wanted, atol=1e-5)


@pytest.mark.parametrize("kind", CELLS)
def test_a_gate_that_is_shut_for_good_has_no_NaN_in_its_gradient(kind):
    """In the loop as well, where the derivative of 1 / (1 + exp(-x)) would be 0 · inf."""
    cell, x, _ = tensors(kind, 10, dtype=torch.float32, tracked=False)
    x = (1e3 * x.sign()).requires_grad_()
    for run in (newton_apply, sequential_apply):
        assert torch.autograd.grad(run(cell, x).sum(), x)[0].isfinite().all()


def test_changed_inputs_between_forward_and_backward_are_noticed():
    cell, x, _ = tensors(ParaGRU, 10)
    states = newton_apply(cell, x)
    with torch.no_grad():
        cell.arrays["a_z"].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        states.sum().backward()


def test_the_inputs_are_not_written_to():
    cell, x, h0 = tensors(ParaSLSTM, 40)
    before = [a.detach().clone() for a in leaves(cell, x, h0)]
    parallel_gradients(cell, x, h0, NewtonConfig(segment_len=8))
    assert all(torch.equal(a, b) for a, b in zip(leaves(cell, x, h0), before, strict=True))


# --- which backend runs, and what it reports ------


class Counting(Backend):
    """The array backend, counting what is asked of it and of what tensors."""

    name, priority = "counting", 1000

    def __init__(self):
        self.solves = self.adjoints = 0

    def newton(self, problem):
        self.solves += 1
        assert not torch.is_grad_enabled() or not problem.x.requires_grad
        assert not any(a.requires_grad for a in (problem.x, *problem.cell.arrays.values()))
        return super().newton(problem)

    def pull_back(self, problem, states, cotangent):
        self.adjoints += 1
        assert not states.requires_grad and not cotangent.requires_grad
        return super().pull_back(problem, states, cotangent)


@pytest.fixture
def counting(monkeypatch):
    backend = Counting()
    monkeypatch.setitem(pararnn.registry._registered, "counting", backend)
    return backend


def test_the_chosen_backend_solves_and_pulls_back_on_tensors_that_nobody_watches(counting):
    cell, x, h0 = tensors(ParaGRU, 30)
    stats = NewtonStats()
    states = newton_apply(cell, x, h0=h0, stats=stats)
    assert stats.scan_backend == "counting" and (counting.solves, counting.adjoints) == (1, 0)
    states.sum().backward()
    assert (counting.solves, counting.adjoints) == (1, 1)


def test_explain_names_the_backend_that_will_run(counting):
    cell, x, h0 = tensors(ParaGRU, 30)
    assert explain(cell, x, h0=h0).backend == "counting"
    assert explain(cell, x).refusals == explain(cell, x.detach()).refusals


def test_P30_recompute_keeps_no_states_and_solves_again(counting):
    cell, x, _ = tensors(ParaGRU, 30)

    def saved(config):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
            states = newton_apply(cell, x, config)
        return states, kept

    states, kept = saved(NewtonConfig())
    assert any(t.shape == states.shape for t in kept)
    states, kept = saved(NewtonConfig(recompute=True))
    assert not any(t.shape == states.shape for t in kept)
    solves = counting.solves
    states.sum().backward()
    assert counting.solves == solves + 1


def test_P05_a_diverged_solve_raises_before_there_is_a_gradient():
    cell, x, _ = tensors(ParaGRU, 200, scale=30.0)
    wild = cell.replace(max_recurrent_norm=None, **{n: 8.0 * a for n, a in cell.arrays.items()})
    config = NewtonConfig(max_iters=1, residual_atol=None, residual_fail=1e-3)
    with pytest.raises(NewtonDivergenceError):
        newton_apply(wild, x, config)
    assert x.grad is None


def test_newton_vjp_and_verify_agreement_do_not_mind_tensors_that_want_gradients():
    """P02."""
    cell, x, h0 = tensors(ParaLSTM, 40)
    states, pullback = newton_vjp(cell, x, h0=h0)
    found = pullback(weights_like(states))
    assert not states.requires_grad
    assert worst([found.x, found.h0, *(found.params[n] for n in cell.arrays)], loop_gradients(cell, x, h0)) < 1e-9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = verify_agreement(cell, x, h0=h0, config=NewtonConfig(max_iters=9, residual_atol=None))
    assert report.ok and report.to_dict()["ok"]


def test_cells_are_made_of_tensors_where_the_arguments_say_so():
    assert ParaGRU(2, 3, dtype=torch.bfloat16).dtype is torch.bfloat16
    assert ParaGRU(2, 3, device=torch.device("cpu")).device.type == "cpu"
    assert ParaTanh(2, 3, device="meta").device.type == "meta"
    assert isinstance(ParaGRU(2, 3, device="cpu").W_x.weight, np.ndarray)
    same = ParaGRU(2, 3, seed=4).W_x.weight
    assert np.array_equal(ParaGRU(2, 3, seed=4, dtype=torch.float32).W_x.weight.numpy(), same)


# --- what is refused ------


def second_derivatives(cell, x):
    (first,) = torch.autograd.grad(newton_apply(cell, x).sum(), x, create_graph=True)
    return first


def test_O10_a_second_derivative_is_refused_and_never_wrong():
    cell, x, h0 = tensors(ParaGRU, 5, features=3, width=3)
    for leaf in (x, *cell.arrays.values()):
        with pytest.raises(RuntimeError, match="sequential_apply"):
            torch.autograd.grad((second_derivatives(cell, x) ** 2).sum(), leaf)
    states = newton_apply(cell, x, h0=h0)
    cotangent = weights_like(states).requires_grad_()
    (first,) = torch.autograd.grad(states, h0, cotangent, create_graph=True)
    with pytest.raises(RuntimeError, match="sequential_apply"):
        torch.autograd.grad(first.sum(), cotangent)
    with pytest.raises(RuntimeError, match="sequential_apply"):
        torch.autograd.gradgradcheck(lambda x: newton_apply(cell, x), x)


def test_O10_the_time_loop_has_second_derivatives():
    cell, x, h0 = tensors(ParaSLSTM, 3, batch=1, features=2, width=2)
    assert torch.autograd.gradgradcheck(lambda x, h0: sequential_apply(cell, x, h0), (x, h0))


def test_tensors_and_other_arrays_do_not_mix():
    cell, x, _ = tensors(ParaGRU, 5)
    for given in ((cell, x.detach().numpy()), (cell.to(np), x)):
        with pytest.raises(TypeError, match="one library"):
            newton_apply(*given)
    with pytest.raises(TypeError, match="float32 but the cell is float64"):
        newton_apply(cell, x.float())
    with pytest.raises(ValueError, match="3 axes"):
        newton_apply(cell, x[0])
    with pytest.raises(TypeError, match="ChannelwiseCell"):
        newton_apply(torch.nn.Linear(3, 5), x)
    with pytest.raises(TypeError, match="verify_first_step"):
        newton_apply(cell, x, NewtonConfig(verify_first_step=True))
    with pytest.raises(TypeError, match="NewtonStats"):
        newton_apply(cell, x, stats={})
