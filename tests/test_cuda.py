"""PyTorch on a CUDA card: no step waits for the device, graphs capture whole steps, offsets go beyond 32 bits."""

from __future__ import annotations

import contextlib
import warnings

import pytest

torch = pytest.importorskip("torch", reason="the tensors are torch's")
if not torch.cuda.is_available():
    pytest.skip("no CUDA card is visible to torch", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from pararnn import (  # noqa: E402
    NewtonConfig,
    NewtonStats,
    ParaGRU,
    ParaLSTM,
    ParaRNN,
    ParaSLSTM,
    compile_safe_config,
    kernels,
    newton_apply,
    sequential_apply,
)
from pararnn.programs import programs_of  # noqa: E402
from pararnn_triton.launch import run_backward, run_forward  # noqa: E402
from pararnn_triton.shape import choose_shape  # noqa: E402

CELLS = (ParaGRU, ParaLSTM, ParaSLSTM)


@contextlib.contextmanager
def no_waiting():
    """Inside, whatever waits for the device is an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # torch warns that the mode does not see every wait.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def model_of(kind, width=64, **options):
    torch.manual_seed(0)
    return ParaRNN(kind(16, width, seed=0), num_layers=2, device="cuda", **options).train()


def step_of(model, x, h0=None):
    model.zero_grad(set_to_none=False)
    y = model(x, h0)
    (y * y).mean().backward()
    return y


@pytest.mark.parametrize("with_h0", [False, True])
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("time", [200, 1999])
def test_a_training_step_does_not_wait_for_the_device(kind, with_h0, time):
    """Forward, backward and an optimiser's step, one loop and segments, with a starting state and without."""
    model, x = model_of(kind), torch.randn(3, time, 16, device="cuda")
    h0 = [torch.rand(3, *model.layers[0].kind.state_shape, device="cuda") for _ in range(2)] if with_h0 else None
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    for turn in range(3):
        # The first step compiles.
        with no_waiting() if turn else contextlib.nullcontext():
            step_of(model, x, h0)
            optimiser.step()
    assert model.last_stats.scan_backend == "triton" and model.last_stats.converged


@pytest.mark.parametrize("kind", CELLS)
def test_a_graph_captures_forward_and_backward(kind):
    """Replays on new input give what plain calls give, bit for bit, gradients included."""
    model, x = model_of(kind), torch.randn(2, 999, 16, device="cuda")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step_of(model, x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step_of(model, x)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        graph.replay()
        captured, grads = y.clone(), [p.grad.clone() for p in model.parameters()]
        plain = step_of(model, x)
        assert torch.equal(captured, plain)
        for mine, (name, p) in zip(grads, model.named_parameters(), strict=True):
            assert torch.equal(mine, p.grad), name


def test_eager_cells_are_captured_with_a_fixed_count():
    """What no kernel is generated for runs on torch's operations, with a count that no value decides."""
    cell = ParaGRU(4, 8, seed=0, xp=torch, device="cuda", dtype=torch.float64)
    x = torch.randn(2, 300, 4, device="cuda", dtype=torch.float64)
    config = compile_safe_config()
    run = lambda: newton_apply(cell, x, config)  # noqa: E731
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, run())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_stream_has_its_own_workspace(dtype):
    """Solves that run at the same time on several streams do not meet."""
    cell = ParaGRU(4, 32, seed=0, xp=torch, device="cuda", dtype=dtype)
    inputs = [torch.randn(2, 3000, 4, device="cuda", dtype=dtype) for _ in range(6)]
    alone = [newton_apply(cell, x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(newton_apply(cell, x))
    torch.cuda.synchronize()
    assert all(torch.equal(y, alone[k % len(alone)]) for k, y in enumerate(found))


def test_gradients_have_the_same_bits_every_time():
    model, x = model_of(ParaLSTM), torch.randn(4, 2000, 16, device="cuda")
    first = [step_of(model, x), *(p.grad.clone() for p in model.parameters())]
    again = [step_of(model, x), *(p.grad for p in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 96, 40])
def test_half_precision_segments_equal_their_own_loop(dtype, width):
    """O09 in half storage: the second run stops at marks, and what it leaves is the time loop's bit for bit."""
    cell = ParaGRU(4, width, seed=0, xp=torch, device="cuda").to(dtype=dtype)
    x = torch.randn(32, 700, 4, device="cuda", dtype=dtype)
    stats = NewtonStats()
    states = newton_apply(cell, x, NewtonConfig(segment_len=100, warmup=2), stats=stats)
    assert stats.exact and torch.equal(states, newton_apply(cell, x, NewtonConfig(segment_len=700)))


def test_long_sequences():
    """T > 65,536 in one row and in many segments."""
    cell = ParaGRU(2, 8, seed=0, xp=torch, device="cuda")
    x = torch.randn(1, 200_000, 2, device="cuda")
    stats = NewtonStats()
    states = newton_apply(cell, x, stats=stats)
    assert stats.segments > 1
    tail = newton_apply(cell, x[:, -3000:], NewtonConfig(segment_len=3000), h0=states[:, -3001])
    assert float((tail - states[:, -3000:]).abs().max()) < 2e-6


def test_offsets_beyond_31_bits():
    """B·T·G·D of more than 2**31 numbers, forward and backward: the last sequence is what it is alone."""
    batch, time, width = 5, 2**17 + 5, 1100
    free, _ = torch.cuda.mem_get_info()
    bytes_needed = batch * time * width * 4 * (3 + 1 + 1 + 3 + 1)
    if free < bytes_needed:
        pytest.skip(f"needs {bytes_needed / 1e9:.0f} GB of device memory, {free / 1e9:.0f} are free")
    cell = ParaGRU(2, width, seed=0, xp=torch, device="cuda")
    assert batch * time * width * 3 > 2**31
    programs, params = programs_of(cell), torch.stack(cell.recurrent(torch, torch.float32))
    torch.manual_seed(0)
    gates = torch.randn(batch, time, 3, width, device="cuda")
    shape = choose_shape(batch, time, width, segment_len=None, warmup=None, passes=4, long_memory=False)
    assert shape.segments > 1
    states, estimate = run_forward(programs, gates, None, params, shape, 1e-5, 5e-5)
    alone, _ = run_forward(programs, gates[-1:], None, params, shape, 1e-5, 5e-5)
    assert float(estimate.max()) < 5e-5
    assert float((states[-1] - alone[0]).abs().max()) < 1e-5
    cotangent = torch.zeros_like(states)
    cotangent[-1, -1] = 1.0
    grad, _, _, _ = run_backward(programs, gates, None, params, states, cotangent, shape)
    one, _, _, _ = run_backward(programs, gates[-1:], None, params, alone, cotangent[-1:], shape)
    assert float((grad[-1] - one[0]).abs().max()) < 1e-5 and float(grad[-1, -1].abs().max()) > 0.0
    assert not bool(grad[:-1].any())


def test_the_environment_is_fit_and_auto_takes_the_kernels():
    """P22."""
    kernels.check_triton_environment()
    kernels.require_fused_triton()
    assert kernels.is_fused_dtype_supported(torch.float32, 0)
    stats = NewtonStats()
    cell = ParaGRU(2, 4, seed=0, xp=torch, device="cuda")
    newton_apply(cell, torch.randn(1, 10, 2, device="cuda"), stats=stats)
    assert stats.scan_backend == "triton"


def test_a_state_that_no_run_reaches_is_nan_and_not_waited_for():
    """sLSTM's starting state is looked at on the host only; on a card memory without mass becomes NaN by itself."""
    cell = ParaSLSTM(2, 4, seed=0, xp=torch, device="cuda")
    h0 = torch.zeros(1, 4, 4, device="cuda")
    h0[0, 0] = 1.0
    x = torch.randn(1, 20, 2, device="cuda")
    with no_waiting():
        encoded = cell.solve_cell().encode(torch, *h0.unbind(1))
        loop = sequential_apply(cell, x, h0)
    assert bool(encoded[0].isnan().all()) and loop.shape == (1, 20, 4, 4)
