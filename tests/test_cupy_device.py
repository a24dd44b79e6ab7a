"""The CuPy backend on a CUDA card; elsewhere each test is skipped with what is missing."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pararnn import (
    NewtonConfig,
    NewtonStats,
    ParaGRU,
    backends,
    explain,
    newton_apply,
    newton_vjp,
    sequential_apply,
    verify_agreement,
)
from support import CELLS, CLOSE, error_of, problem, start_for, strong

known = backends()["cupy"]
missing = known if isinstance(known, str) else known.probe()
if missing:
    pytest.skip(f"the CuPy backend cannot run here: {missing}", allow_module_level=True)

import cupy as cp  # noqa: E402

NAMED = NewtonConfig(scan_backend="cupy")
SEGMENTS = NewtonConfig(scan_backend="cupy", segment_len=16)


def on_card(cell, x, *more):
    """The same problem in CuPy arrays."""
    return cell.to(cp), cp.asarray(x), *(cp.asarray(a) for a in more)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("length", [None, 16])
def test_forward_and_gradients_equal_the_time_loop(kind, dtype, length):
    """P01 for every cell and dtype, as one loop and as segments that do not divide T; gradients against float64."""
    cell, x = problem(kind, 77, dtype=dtype, width=37)
    h0 = start_for(cell, 2)
    mine, given, start = on_card(cell, x, h0)
    config = NewtonConfig(scan_backend="cupy", segment_len=length)
    stats = NewtonStats()
    states, pullback = newton_vjp(mine, given, config, start, stats=stats)
    assert isinstance(states, cp.ndarray) and states.dtype == dtype and stats.converged
    name = np.dtype(dtype).name
    assert error_of(cell, states.get(), sequential_apply(cell, x, h0)) <= CLOSE[name]
    wide = cell.to(dtype=np.float64)
    seed = np.random.default_rng(5).standard_normal(states.shape)
    _, true = newton_vjp(wide, x.astype(np.float64), NewtonConfig(scan_backend="array"), h0.astype(np.float64))
    expected, found = true(seed), pullback(cp.asarray(seed.astype(dtype)))
    band = {"float64": 1e-11, "float32": 1e-4, "float16": 3e-3}[name]
    # Both read states rounded to halves, which matters most where the normaliser of an sLSTM is small.
    _, by_array = newton_vjp(cell, x, NewtonConfig(scan_backend="array"), h0)
    other = by_array(seed.astype(dtype))
    for label, value in {"x": found.x, "h0": found.h0, **found.params}.items():
        reference = {"x": expected.x, "h0": expected.h0, **expected.params}[label]
        inherent = np.abs({"x": other.x, "h0": other.h0, **other.params}[label] - reference).max()
        assert np.abs(value.get() - reference).max() <= max(band * np.abs(reference).max(), 1.2 * inherent), label


def test_auto_takes_it_for_cupy_arrays():
    cell, x = on_card(*problem(ParaGRU, 40))
    assert explain(cell, x).backend == "cupy"
    assert verify_agreement(cell, x).ok


def test_what_needs_the_array_solver_still_runs_on_cupy_arrays():
    """A pinned count is refused by name and solved by `auto`."""
    cell, x = on_card(*problem(ParaGRU, 40))
    pinned = newton_apply(cell, x, NewtonConfig(max_iters=6))
    cp.testing.assert_allclose(pinned, sequential_apply(cell, x), atol=1e-5)
    with pytest.raises(TypeError, match="pinned"):
        newton_apply(cell, x, NewtonConfig(scan_backend="cupy", max_iters=6))


def test_a_mixing_cell_is_one_product_and_one_kernel_a_step():
    """Stock GRU: products by CuPy, the elementwise part fused."""
    from pararnn import StockGRU

    cell = StockGRU(3, 24, seed=0)
    x = np.random.default_rng(0).standard_normal((2, 300, 3)).astype(np.float32)
    mine, given = on_card(cell, x)
    stats = NewtonStats()
    states, pullback = newton_vjp(mine, given, SEGMENTS, stats=stats)
    loop, true = newton_vjp(cell, x, NewtonConfig(scan_backend="array"))
    cp.testing.assert_allclose(states, loop, atol=2e-5)
    assert stats.path == "segments" and stats.scan_backend == "cupy"
    found, expected = pullback(cp.ones_like(states)), true(np.ones_like(loop))
    for name, value in {"x": expected.x, **expected.params}.items():
        mine_too = {"x": found.x, **found.params}[name].get()
        assert np.abs(mine_too - value).max() <= 1e-3 * np.abs(value).max(), name


def test_linear_attention_on_cupy_arrays():
    from pararnn.linear_attention import gla

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 70, 2, 8)).astype(np.float32) for _ in range(3))
    decay = -rng.uniform(0.0, 2.0, (1, 70, 2, 8)).astype(np.float32)
    host, card = gla(q, k, v, decay), gla(*map(cp.asarray, (q, k, v, decay)))
    cp.testing.assert_allclose(card[0], host[0], atol=1e-4)


def test_chaos_is_walked_to_the_time_loop_bit_for_bit():
    """O09: nothing settles, and the result is still the loop's."""
    cell, x = on_card(*strong(ParaGRU, 300, 40.0))
    stats = NewtonStats()
    config = NewtonConfig(scan_backend="cupy", segment_len=16, warmup=4, exact=True)
    states = newton_apply(cell, x, config, stats=stats)
    assert stats.walked > 0.0 and stats.converged and stats.exact
    cp.testing.assert_array_equal(states, newton_apply(cell, x, NewtonConfig(scan_backend="cupy", segment_len=300)))


def test_the_current_stream_is_used():
    """A launch on another stream would read x before the slow kernel in front of it has written it."""
    cell, x = on_card(*problem(ParaGRU, 200, width=64))
    expected = newton_apply(cell, x, SEGMENTS)
    slow = cp.RawKernel(
        'extern "C" __global__ void slow(long long t) { long long a = clock64(); while (clock64() - a < t) {} }', "slow"
    )
    stream = cp.cuda.Stream(non_blocking=True)
    late = cp.full_like(x, cp.nan)
    cp.cuda.Device().synchronize()
    with stream:
        slow((1,), (1,), (50_000_000,))
        late[...] = x
        states = newton_apply(cell, late, SEGMENTS)
    stream.synchronize()
    cp.testing.assert_array_equal(states, expected)


def test_numba_device_arrays_are_taken_without_a_copy():
    cuda = pytest.importorskip("numba.cuda", reason="Numba is not installed")
    if not cuda.is_available():
        pytest.skip("Numba finds no card")
    host = problem(ParaGRU, 50)
    cell, x = on_card(*host)
    given = cuda.to_device(host[1])
    assert cp.asarray(given).data.ptr == given.__cuda_array_interface__["data"][0]
    cp.testing.assert_array_equal(newton_apply(cell, given, SEGMENTS), newton_apply(cell, x, SEGMENTS))
    cp.testing.assert_array_equal(sequential_apply(cell, given), sequential_apply(cell, x))
    states, pullback = newton_vjp(cell, given, SEGMENTS)
    seed = cuda.to_device(np.ones(states.shape, np.float32))
    cp.testing.assert_array_equal(pullback(seed).x, newton_vjp(cell, x, SEGMENTS)[1](cp.ones_like(states)).x)


def test_torch_tensors_stay_tensors_with_gradients():
    """Named for CUDA tensors: in place, on torch's stream, through autograd."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no card")
    cell, x = problem(ParaGRU, 90, width=33)
    mine, given = cell.to(torch, "cuda"), torch.from_numpy(x).cuda().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        states = newton_apply(mine, given, SEGMENTS)
        states.square().sum().backward()
    stream.synchronize()
    assert states.device.type == "cuda"
    assert error_of(cell, states.detach().cpu().numpy(), sequential_apply(cell, x)) <= 1e-5
    loop, pullback = newton_vjp(cell, x, NewtonConfig(scan_backend="array"))
    np.testing.assert_allclose(given.grad.cpu().numpy(), pullback(2.0 * loop).x, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_halves_of_torch(name):
    """P21: stored in half, computed in float32."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no card")
    cell, x = problem(ParaGRU, 90, width=33)
    kind = getattr(torch, name)
    mine, given = cell.to(torch, "cuda", kind), torch.from_numpy(x).cuda().to(kind)
    states = newton_apply(mine, given, SEGMENTS)
    assert states.dtype == kind
    reference = sequential_apply(mine.to(dtype=torch.float32), given.float())
    assert error_of(cell, states.float().cpu().numpy(), reference.cpu().numpy()) <= CLOSE[name]


def test_bfloat16_of_cupy():
    """P21: the dtype that ml_dtypes gives to CuPy."""
    kind = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed").bfloat16
    cell, x = problem(ParaGRU, 90, width=33)
    mine, given = cell.to(cp).to(dtype=cp.dtype(kind)), cp.asarray(x).astype(kind)
    states, pullback = newton_vjp(mine, given, SEGMENTS)
    assert states.dtype == kind
    exact = mine.to(dtype=cp.dtype("float32")), given.astype(cp.float32)
    assert error_of(cell, states.astype(cp.float32).get(), sequential_apply(*exact).get()) <= CLOSE["bfloat16"]
    found = pullback(cp.ones_like(states)).x
    true = newton_vjp(*exact)[1](cp.ones(states.shape, cp.float32)).x
    assert found.dtype == kind and float(abs(found.astype(cp.float32) - true).max() / abs(true).max()) <= 2e-2


def test_the_quick_start_runs(capsys):
    page = (Path(__file__).parent.parent / "docs" / "cupy.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/cupy.md", "exec"), {})
    assert "backend  cupy" in capsys.readouterr().out


def test_numpy_arrays_are_copied_there_and_back_where_it_is_named():
    cell, x = problem(ParaGRU, 90)
    stats = NewtonStats()
    states, pullback = newton_vjp(cell, x, SEGMENTS, start_for(cell, 2), stats=stats)
    assert isinstance(states, np.ndarray) and stats.scan_backend == "cupy"
    assert error_of(cell, states, sequential_apply(cell, x, start_for(cell, 2))) <= 1e-5
    assert isinstance(pullback(np.ones_like(states)).x, np.ndarray)
    assert explain(cell, x).backend != "cupy"


def test_strided_input_and_a_cell_there_and_back():
    """P42."""
    cell, x = on_card(*problem(ParaGRU, 40, batch=6))
    part = cp.asfortranarray(x)[::-2, ::2, ::-1]
    cp.testing.assert_array_equal(newton_apply(cell, part, SEGMENTS), newton_apply(cell, part.copy(), SEGMENTS))
    back = cell.to(np)
    for name, array in back.arrays.items():
        np.testing.assert_array_equal(array, cell.arrays[name].get())


def test_offsets_beyond_32_bits():
    """More than 2^31 gate inputs; the last sequence is as it is alone."""
    free, _ = cp.cuda.runtime.memGetInfo()
    if free < 40 * 2**30:
        pytest.skip("needs 40 GB of free device memory")
    cell = ParaGRU(1, 1024, seed=0).to(cp)
    x = cp.random.default_rng(0).standard_normal((90, 8192, 1), dtype=cp.float32)
    assert 3 * x.size * 1024 > 2**31
    states = newton_apply(cell, x, NAMED)
    cp.testing.assert_array_equal(
        states[-1:], newton_apply(cell, x[-1:], NewtonConfig(scan_backend="cupy", segment_len=8192))
    )
    del states
    cp.get_default_memory_pool().free_all_blocks()


@pytest.mark.skipif(cp.cuda.runtime.getDeviceCount() < 2, reason="needs two cards")
def test_arrays_on_the_second_card():
    host = problem(ParaGRU, 60)
    with cp.cuda.Device(1):
        cell, x = on_card(*host)
    states = newton_apply(cell, x, SEGMENTS)
    assert states.device.id == 1
    assert error_of(host[0], states.get(), sequential_apply(*host)) <= 1e-5
