"""The generated Triton kernels: on a CUDA card as they are, elsewhere in Triton's interpreter on small shapes."""

from __future__ import annotations

import numpy as np
import pytest

from card_support import DEVICE, ON_CARD, torch
from pararnn import (
    BackendUnavailableError,
    ChannelwiseCell,
    NewtonConfig,
    NewtonStats,
    ParaGRU,
    ParaLSTM,
    ParaSLSTM,
    ParaTanh,
    explain,
    newton_apply,
    newton_vjp,
    sequential_apply,
)
from pararnn.problem import make_problem
from pararnn_triton import TritonBackend


class Leaky(ChannelwiseCell):
    """A user's cell with two slots that depend on each other one way."""

    slots, gates, params, hidden = ("h", "y"), ("u", "k"), ("a", "w"), "y"

    def step(self, xp, h, y, u, k, a, w):
        h = 0.8 * h + 0.2 * xp.tanh(a * y + u)
        return h, xp.maximum(0.9 * y, xp.exp(-(k * k)) * h) - w * y / (1.0 + xp.abs(y))


def scaled(cell, factor: float):
    """The cell without its clamp and with recurrent weights `factor` times as large."""
    grown = {n: a * factor for n, a in cell.arrays.items() if not n.startswith("W_x")}
    return cell.replace(max_recurrent_norm=None, **grown)


def inputs(batch: int, time: int, features: int = 3, seed: int = 1):
    x = np.random.default_rng(seed).standard_normal((batch, time, features)).astype(np.float32)
    return torch.from_numpy(x).to(DEVICE)


def relative(mine, true) -> float:
    return float((mine.double() - true.double()).abs().max() / true.double().abs().max())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", [ParaGRU, ParaLSTM, ParaTanh, ParaSLSTM, Leaky])
@pytest.mark.parametrize("length", [None, 16])
def test_forward_and_gradients_equal_the_time_loop(kind, length):
    """P01 and the adjoint, for every cell, as one loop and as segments that do not divide T."""
    if kind is ParaSLSTM and length:
        pytest.skip("sLSTM runs as one loop on this backend: its long memory does not settle by segments")
    cell = kind(3, 5, seed=0, xp=torch, device=DEVICE)
    x = inputs(2, 45)
    h0 = 0.3 * torch.rand(2, *cell.state_shape, device=DEVICE)
    config = NewtonConfig(scan_backend="triton", segment_len=length)
    stats = NewtonStats()
    states, pullback = newton_vjp(cell, x, config, h0, stats=stats)
    assert relative(states, sequential_apply(cell, x, h0)) < 2e-6
    assert stats.converged and stats.path == ("segments" if length else "sequential")
    wide = cell.to(dtype=torch.float64)
    reference, wide_pullback = newton_vjp(wide, x.double(), NewtonConfig(scan_backend="array"), h0.double())
    g = torch.from_numpy(np.random.default_rng(5).standard_normal(reference.shape)).to(DEVICE)
    mine, true = pullback(g.float()), wide_pullback(g)
    assert relative(mine.x, true.x) < 1e-4
    assert relative(mine.h0, true.h0) < 1e-4
    for name, value in true.params.items():
        assert relative(mine.params[name], value) < 1e-4, name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("passes", [3, 4])
def test_what_does_not_settle_is_walked_exactly(passes):
    """O09: large weights, warm-up too short; the result is still the time loop's."""
    cell = scaled(ParaGRU(3, 6, seed=0, xp=torch, device=DEVICE), 12.0)
    x = 3.0 * inputs(1, 60)
    stats = NewtonStats()
    config = NewtonConfig(scan_backend="triton", segment_len=8, warmup=2, max_passes=passes)
    states = newton_apply(cell, x, config, stats=stats)
    loop = newton_apply(cell, x, NewtonConfig(scan_backend="triton"))
    assert float((states - loop).abs().max()) < 1e-5
    assert stats.converged


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_nan_stays_where_the_loop_has_it():
    """O08: steps before the NaN are right, those after it are NaN, other sequences are untouched bit for bit."""
    cell = ParaGRU(3, 4, seed=0, xp=torch, device=DEVICE)
    x = inputs(2, 40)
    config = NewtonConfig(scan_backend="triton", segment_len=8, warmup=8)
    clean = newton_apply(cell, x, config)
    x[0, 13, 0] = float("nan")
    states = newton_apply(cell, x, config)
    assert torch.equal(states[1], clean[1])
    assert torch.equal(states[0, :13], clean[0, :13])
    assert bool(states[0, 13:].isnan().all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_half_precision_is_computed_in_single():
    """P21: fp16 storage, fp32 algebra."""
    cell = ParaGRU(3, 4, seed=0, xp=torch, device=DEVICE)
    x = inputs(1, 30)
    half = newton_apply(cell.to(dtype=torch.float16), x.half(), NewtonConfig(scan_backend="triton", segment_len=8))
    assert half.dtype == torch.float16
    assert relative(half, sequential_apply(cell, x)) < 5e-3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_meets_the_first_run_at_its_marks(dtype):
    """O09: a warm-up of one step leaves every joint open; the second run stops early and the result is the loop's."""
    cell = ParaGRU(3, 4, seed=0, xp=torch, device=DEVICE).to(dtype=dtype)
    x = inputs(1, 200).to(dtype)
    stats = NewtonStats()
    config = NewtonConfig(scan_backend="triton", segment_len=72, warmup=1)
    states = newton_apply(cell, x, config, stats=stats)
    assert torch.equal(states, newton_apply(cell, x, NewtonConfig(scan_backend="triton", segment_len=200)))
    assert stats.exact


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradients_of_a_long_memory_run_over_segments():
    """sLSTM's forward is one loop, but its gradient's segments are affine maps and join however long it remembers."""
    cell, x = ParaSLSTM(3, 4, seed=0, xp=torch, device=DEVICE), inputs(1, 37)
    config = NewtonConfig(scan_backend="triton", segment_len=37)
    states, pullback = newton_vjp(cell, x, config)
    g = torch.randn(states.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    loop = pullback(g)
    problem = make_problem("test", cell, x, None, config.replace(segment_len=16))
    segments = TritonBackend().pull_back(problem, states, g)
    assert relative(segments.x, loop.x) < 1e-5 and relative(segments.h0, loop.h0) < 1e-5
    for name, value in loop.params.items():
        assert relative(segments.params[name], value) < 1e-5, name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("recompute", [False, True])
def test_a_gradient_can_be_asked_for_again(recompute):
    """What the forward run leaves for the gradient is used up by the first; the second is the same, bit for bit."""
    cell, x = ParaGRU(3, 4, seed=0, xp=torch, device=DEVICE), inputs(2, 20)
    states, pullback = newton_vjp(cell, x, NewtonConfig(scan_backend="triton", recompute=recompute))
    g = torch.randn_like(states)
    first, second = pullback(g), pullback(g)
    assert torch.equal(first.x, second.x)
    assert all(torch.equal(value, second.params[name]) for name, value in first.params.items())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradients_of_several_solves_under_one_vmap_do_not_meet():
    """Samples with parameters of their own share a recipe, and still each gets its own gradient."""
    cell = ParaGRU(3, 4, seed=0, xp=torch, device=DEVICE)
    x, weights = inputs(3, 12), torch.stack([cell.arrays["a_z"] * k for k in (0.5, 1.0, 1.5)])
    config = NewtonConfig(scan_backend="triton")

    def loss(a_z, row):
        return newton_apply(cell.replace(a_z=a_z), row[None], config).square().sum()

    grads = torch.func.vmap(torch.func.grad(loss))(weights, x)
    for k in range(3):
        assert relative(grads[k], torch.func.grad(loss)(weights[k], x[k])) < 1e-5


def packings():
    """Names and what is passed: documents with starting states and an empty one, and episodes with padding."""
    reset = np.zeros((2, 45), bool)
    reset[0, [0, 16, 30]], reset[1, 44] = True, True
    mask = np.ones((2, 45), bool)
    mask[0, 20:24], mask[1, :3] = False, False
    cuts = np.zeros((1, 90), bool)
    cuts[0, [13, 70]] = True
    return {
        "documents": (1, 90, {"cu_seqlens": [0, 13, 13, 48, 49, 90]}),
        "documents and resets": (1, 90, {"cu_seqlens": [0, 13, 13, 48, 49, 90], "reset": cuts}),
        "episodes and padding": (2, 45, {"reset": reset, "mask": mask}),
    }


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "length", "name"),
    [(ParaGRU, length, name) for length in (None, 16) for name in packings()] + [(Leaky, 24, "documents and resets")],
)
def test_packing_is_part_of_the_kernels(kind, length, name):
    """P43: forward and every gradient, the documents' starts included, equal those of the array backend in float64."""
    batch, time, packing = packings()[name]
    cell, x = kind(3, 5, seed=0, xp=torch, device=DEVICE), inputs(batch, time)
    h0 = 0.3 * torch.rand(5 if "cu_seqlens" in packing else batch, *cell.state_shape, device=DEVICE)
    config = NewtonConfig(scan_backend="triton", segment_len=length, warmup=5 if length else None)
    states, pullback = newton_vjp(cell, x, config, h0, **packing)
    wide = cell.to(dtype=torch.float64)
    reference, wide_pullback = newton_vjp(wide, x.double(), NewtonConfig(scan_backend="array"), h0.double(), **packing)
    assert relative(states, reference) < 2e-6
    loop = newton_apply(cell, x, NewtonConfig(scan_backend="triton", segment_len=time), h0=h0, **packing)
    assert torch.equal(states, loop)
    g = torch.from_numpy(np.random.default_rng(5).standard_normal(reference.shape)).to(DEVICE)
    mine, true = pullback(g.float()), wide_pullback(g)
    assert relative(mine.x, true.x) < 1e-4
    assert mine.h0.shape == h0.shape and relative(mine.h0, true.h0) < 1e-4
    for label, value in true.params.items():
        assert relative(mine.params[label], value) < 1e-4, label


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("length", [None, 8])
def test_a_nan_does_not_reach_the_next_document(length):
    """O08 and O28: neither the states after a head nor the gradients before it see the NaN beyond it."""
    cell, x = ParaGRU(3, 4, seed=0, xp=torch, device=DEVICE), inputs(1, 40)
    x[0, 13, 0] = float("nan")
    config = NewtonConfig(scan_backend="triton", segment_len=length)
    states, pullback = newton_vjp(cell, x, config, cu_seqlens=[0, 10, 20, 40])
    bad = states.isnan().any(dim=2)[0]
    assert bool(bad[13:20].all()) and not bool(bad[:13].any()) and not bool(bad[20:].any())
    grad = pullback(torch.ones_like(states)).x[0].isnan().any(dim=1)
    assert not bool(grad[:10].any()) and not bool(grad[20:].any())


def test_non_contiguous_input_and_empty_axes():
    """P42 and O52."""
    cell = ParaGRU(3, 4, seed=0, xp=torch, device=DEVICE)
    config = NewtonConfig(scan_backend="triton")
    x = inputs(4, 20)
    assert torch.equal(newton_apply(cell, x[::2], config), newton_apply(cell, x[::2].contiguous(), config))
    assert newton_apply(cell, x[:, :0], config).shape == (4, 0, 4)
    assert newton_apply(cell, x[:0], config).shape == (0, 20, 4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_exact_means_the_loop_bit_for_bit_and_a_guess_changes_nothing():
    """O57: what an option may not change, it does not."""
    cell, x = scaled(ParaGRU(3, 6, seed=0, xp=torch, device=DEVICE), 4.0), inputs(1, 60)
    loop = newton_apply(cell, x, NewtonConfig(scan_backend="triton", segment_len=60))
    config = NewtonConfig(scan_backend="triton", segment_len=16, warmup=2, exact=True)
    stats = NewtonStats()
    assert torch.equal(newton_apply(cell, x, config, guess=torch.full_like(loop, 0.9), stats=stats), loop)
    assert stats.exact


def test_refusals_are_sentences():
    cell = ParaGRU(3, 4, seed=0, xp=torch, device=DEVICE)
    x = inputs(1, 5)
    with pytest.raises(TypeError, match="float32"):
        newton_apply(cell.to(dtype=torch.float64), x.double(), NewtonConfig(scan_backend="triton"))
    with pytest.raises(TypeError, match="pinned"):
        newton_apply(cell, x, NewtonConfig(scan_backend="triton", max_iters=2))
    with pytest.raises(TypeError, match="torch tensors"):
        newton_apply(ParaGRU(3, 4, seed=0), np.ones((1, 5, 3), np.float32), NewtonConfig(scan_backend="triton"))


@pytest.mark.skipif(ON_CARD, reason="only where kernels are interpreted")
def test_auto_leaves_the_interpreter_to_tests():
    text = str(explain(ParaGRU(3, 4, seed=0, xp=torch), inputs(1, 5)))
    assert "not      triton" in text and "interpreter" in text


def test_a_foreign_triton_is_an_error_only_where_it_was_named(monkeypatch):
    """P22: a version outside the tested range gives a sentence; `auto` goes elsewhere."""
    import triton

    from pararnn_triton.environment import environment_sentence

    cell, x = ParaGRU(3, 4, seed=0, xp=torch, device=DEVICE), inputs(1, 5)
    monkeypatch.setattr(triton, "__version__", "2.9.1")
    environment_sentence.cache_clear()
    try:
        with pytest.raises(BackendUnavailableError, match=r"2\.9\.1"):
            newton_apply(cell, x, NewtonConfig(scan_backend="triton"))
        assert explain(cell, x).backend != "triton"
    finally:
        environment_sentence.cache_clear()


def test_the_environment_can_be_checked_before_a_run(monkeypatch):
    """P22: version, then a test kernel, once; a failure is a sentence that names the other path."""
    from pararnn import kernels
    from pararnn_triton import environment, smoke

    environment._tried.clear()
    kernels.check_triton_environment()
    kernels.require_fused_triton()
    assert len(environment._tried) == 1
    environment._tried.clear()
    monkeypatch.setattr(smoke, "running_sum", {(1,): lambda *_, **__: None})
    with pytest.raises(BackendUnavailableError, match=r"wrong sums.*scan_backend='eager'"):
        kernels.require_fused_triton()
    environment._tried.clear()
    monkeypatch.undo()
    monkeypatch.setattr(environment, "environment_sentence", lambda: "triton 2.0 is not among the versions tested")
    with pytest.raises(BackendUnavailableError, match=r"2\.0.*eager"):
        kernels.check_triton_environment()
    assert not kernels.is_fused_dtype_supported(torch.float64, "cuda")
    assert kernels.is_fused_dtype_supported(torch.float16, 0) == ON_CARD
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kernels.nothing  # noqa: B018
    assert "check_triton_environment" in dir(kernels)
