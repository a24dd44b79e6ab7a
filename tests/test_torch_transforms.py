"""O50: vmap, grad and jacrev over newton_apply are right; forward mode and second derivatives are refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap  # noqa: E402

from pararnn import NewtonConfig, ParaGRU, ParaLSTM, ParaRNN, ParaSLSTM, newton_apply, sequential_apply  # noqa: E402
from support import CELLS  # noqa: E402
from torch_support import tensors, worst  # noqa: E402

N = 3


def batches(x):
    """N variations of x along a new first axis."""
    return torch.stack([x * (1.0 + 0.3 * n) for n in range(N)])


@pytest.mark.parametrize("kind", CELLS)
def test_vmap_over_the_input_over_the_start_and_over_both(kind):
    cell, x, h0 = tensors(kind, 12, tracked=False)
    xs, starts = batches(x), batches(h0)

    def run(x, h0):
        return newton_apply(cell, x, NewtonConfig(segment_len=4), h0=h0)

    for dims in ((0, None), (None, 0), (0, 0)):
        given = (x if dims[0] is None else xs, h0 if dims[1] is None else starts)
        wanted = [run(*(a if d is None else a[n] for a, d in zip(given, dims, strict=True))) for n in range(N)]
        assert worst([vmap(run, in_dims=dims)(*given)], [torch.stack(wanted)]) < 1e-10
    moved = vmap(run, in_dims=(2, None), out_dims=1)(xs.movedim(0, 2), h0)
    assert worst([moved.movedim(1, 0)], [vmap(run, in_dims=(0, None))(xs, h0)]) < 1e-10


def test_vmap_over_parameters_is_an_ensemble():
    cell, x, _ = tensors(ParaLSTM, 12, tracked=False)
    many = {name: batches(a) for name, a in cell.arrays.items()}

    def run(arrays, x):
        return newton_apply(cell.replace(**arrays), x)

    wanted = [run({name: a[n] for name, a in many.items()}, x) for n in range(N)]
    assert worst([vmap(run, in_dims=(0, None))(many, x)], [torch.stack(wanted)]) < 1e-10


def test_nested_vmap():
    cell, x, _ = tensors(ParaGRU, 6, tracked=False)
    xs = batches(batches(x))
    found = vmap(vmap(lambda x: newton_apply(cell, x)))(xs)
    assert worst([found], [newton_apply(cell, xs.flatten(0, 2)).unflatten(0, xs.shape[:3])]) < 1e-10


@pytest.mark.parametrize("kind", CELLS)
def test_grad_and_per_sample_grad(kind):
    cell, x, h0 = tensors(kind, 12, tracked=False)
    arrays, xs = dict(cell.arrays), batches(x)

    def loss(run):
        return lambda arrays, x, h0: (run(cell.replace(**arrays), x, h0=h0) ** 2).sum()

    every = tuple(range(3))
    found = grad(loss(newton_apply), argnums=every)(arrays, x, h0)
    wanted = grad(loss(sequential_apply), argnums=every)(arrays, x, h0)
    assert worst([*found[0].values(), *found[1:]], [*wanted[0].values(), *wanted[1:]]) < 1e-9
    found = vmap(grad(loss(newton_apply), argnums=every), in_dims=(None, 0, None))(arrays, xs, h0)
    each = [grad(loss(sequential_apply), argnums=every)(arrays, x, h0) for x in xs]
    for name in arrays:
        assert worst([found[0][name]], [torch.stack([e[0][name] for e in each])]) < 1e-9
    assert worst(found[1:], [torch.stack([e[k] for e in each]) for k in (1, 2)]) < 1e-9


def test_jacrev_and_vjp():
    cell, x, _ = tensors(ParaSLSTM, 4, tracked=False, batch=1)
    found = jacrev(lambda x: newton_apply(cell, x)[:, -1])(x)
    wanted = jacrev(lambda x: sequential_apply(cell, x)[:, -1])(x)
    assert worst([found], [wanted]) < 1e-9
    states, pullback = vjp(lambda x: newton_apply(cell, x), x)
    assert worst(pullback(torch.ones_like(states)), [grad(lambda x: sequential_apply(cell, x).sum())(x)]) < 1e-9


def test_functional_call_gives_per_sample_gradients_of_a_module():
    rnn = ParaRNN(ParaGRU(3, 4, dtype=torch.float64, seed=0), num_layers=2)
    parameters = dict(rnn.named_parameters())
    xs = torch.randn(N, 2, 10, 3, dtype=torch.float64)

    def loss(parameters, x):
        return functional_call(rnn, parameters, (x,)).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, xs)
    for n, x in enumerate(xs):
        rnn.zero_grad()
        rnn(x).square().sum().backward()
        assert worst([g[n] for g in found.values()], [p.grad for p in rnn.parameters()]) < 1e-9


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: jvp(f, (x,), (x,)),
        lambda f, x: jacfwd(f)(x),
        lambda f, x: hessian(lambda x: f(x).sum())(x),
        lambda f, x: grad(lambda x: grad(lambda x: f(x).sum())(x).square().sum())(x),
        lambda f, x: vmap(jacfwd(f))(x[None]),
    ],
    ids=["jvp", "jacfwd", "hessian", "grad of grad", "vmap of jacfwd"],
)
def test_forward_mode_and_second_derivatives_are_refused_and_the_loop_has_them(transform):
    cell, x, _ = tensors(ParaGRU, 4, tracked=False, batch=1)
    with pytest.raises(RuntimeError, match="sequential_apply"):
        transform(lambda x: newton_apply(cell, x), x)
    transform(lambda x: sequential_apply(cell, x), x)


def test_a_tangent_is_not_dropped_silently():
    cell, x, _ = tensors(ParaGRU, 4, tracked=False)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match="sequential_apply"):
            newton_apply(cell, dual)
        assert torch.autograd.forward_ad.unpack_dual(sequential_apply(cell, dual)).tangent is not None


def test_the_loop_is_mapped_too_and_its_forward_mode_agrees_with_its_reverse_mode():
    cell, x, h0 = tensors(ParaSLSTM, 5, tracked=False)
    found = vmap(lambda x, h0: sequential_apply(cell, x, h0))(batches(x), batches(h0))
    wanted = [sequential_apply(cell, x, h0) for x, h0 in zip(batches(x), batches(h0), strict=True)]
    assert worst([found], [torch.stack(wanted)]) < 1e-12
    (forward, reverse) = (j(lambda x: sequential_apply(cell, x)[:, -1])(x) for j in (jacfwd, jacrev))
    assert worst([forward], [reverse]) < 1e-10
