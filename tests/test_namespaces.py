"""Every array library gets the same numbers as NumPy, in its own arrays, dtype and device."""

from __future__ import annotations

import contextlib
import importlib
import warnings

import numpy as np
import pytest

import pararnn.front
from pararnn import (
    NewtonConfig,
    NewtonStats,
    ParaGRU,
    ParaSLSTM,
    ParaTanh,
    check_cell,
    explain,
    newton_apply,
    newton_vjp,
    sequential_apply,
    verify_agreement,
)
from support import CELLS, error_of, problem, start_for

pytestmark = pytest.mark.filterwarnings("ignore::pararnn.NotConvergedWarning")
TIME = 23
WAYS = {
    "auto": NewtonConfig(),
    "segments": NewtonConfig(segment_len=6),
    "exact": NewtonConfig(segment_len=6, warmup=2, exact=True),
    "pinned": NewtonConfig(max_iters=5, residual_atol=None),
    "pinned segments": NewtonConfig(max_iters=3, segment_len=6),
    "windows": NewtonConfig(segment_len=4, chunk_len=10),
    "pinned windows": NewtonConfig(max_iters=5, residual_atol=None, chunk_len=10),
}
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


class Library:
    """One array library: how its arrays are made, read and recognised."""

    def __init__(self, name, device=None):
        module = pytest.importorskip(name.partition(".")[0], reason=f"{name} is not installed")
        self.name, self.module = name, module
        self.xp = importlib.import_module("jax.numpy") if name == "jax" else module
        self.device = None if device is None else module.Device(device)

    def array(self, values):
        values = np.array(values)
        if self.name == "torch":
            return self.module.from_numpy(values)
        return self.xp.asarray(values) if self.device is None else self.xp.asarray(values, device=self.device)

    def numpy(self, array):
        """The values, after a check that the array is this library's, on the device that was asked for."""
        assert type(array) is type(self.array(np.zeros(1))), f"{self.name} gave a {type(array)}"
        if self.device is not None:
            assert array.device == self.device
            array = array.to_device(self.module.Device("CPU_DEVICE"))
        return np.asarray(array)

    def cell(self, cell):
        return cell.to(self.xp, device=self.device)


@contextlib.contextmanager
def jax_bits(wide):
    jax = pytest.importorskip("jax")
    switch = getattr(jax, "enable_x64", None)
    if switch is None or not callable(switch):
        from jax.experimental import enable_x64 as switch
    with switch(wide):
        yield


def check_everything(library, kind, dtype, ways=WAYS):
    """All public runs of one cell in one library against NumPy."""
    cell, x = problem(kind, TIME, dtype=dtype)
    h0 = start_for(cell, 2)
    there, given, start = library.cell(cell), library.array(x), library.array(h0)
    name, tolerance = np.dtype(dtype).name, TOLERANCE[np.dtype(dtype).name]
    wanted = sequential_apply(cell, x, h0=h0)

    def same(got, want, factor=1.0):
        values = library.numpy(got)
        assert values.dtype == np.dtype(dtype)
        assert error_of(cell, values, want) < factor * tolerance

    loop = sequential_apply(there, given, h0=start)
    same(loop, wanted)
    for config in ways.values():
        stats = NewtonStats()
        same(newton_apply(there, given, config, h0=start, stats=stats), wanted)
        assert stats.converged and stats.agreement_estimate >= 0.0
        assert stats.lyapunov == pytest.approx(-1.0, abs=1.5)
    config = list(ways.values())[-1]
    states, pullback = newton_vjp(there, given, config, start)
    cotangent = np.random.default_rng(0).standard_normal(states.shape).astype(dtype)
    grads = pullback(library.array(cotangent), last=library.array(cotangent[:, 0]))
    _, reference = newton_vjp(cell, x, NewtonConfig(scan_backend="numpy"), h0)
    truth = reference(cotangent, last=cotangent[:, 0])
    for got, want in [
        (grads.x, truth.x),
        (grads.h0, truth.h0),
        *((grads.params[n], truth.params[n]) for n in truth.params),
    ]:
        values, scale = library.numpy(got), np.abs(want).max() or 1.0
        assert values.dtype == np.dtype(dtype) and values.shape == want.shape
        assert np.abs(values - want).max() < 20 * tolerance * scale
    report = verify_agreement(there, given, config=config, h0=start)
    assert report.ok and report.dtype == name and report.device == str(getattr(given, "device", ""))
    assert explain(there, given, config, h0=start).backend == report.backend


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy(kind, dtype):
    check_everything(Library("numpy"), kind, dtype)


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("device", [None, "device1"])
def test_O53_array_api_strict_allows_nothing_beyond_the_standard(kind, dtype, device):
    """Its second device refuses to mix with the first: a constant made without a device would show."""
    check_everything(Library("array_api_strict", device), kind, dtype)


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_torch(kind, dtype):
    check_everything(Library("torch"), kind, dtype)


# JAX compiles each operation for each shape, so its everyday run takes a part; `-m slow` takes all.


def test_jax_with_its_default_of_32_bits():
    with jax_bits(False):
        check_everything(Library("jax"), ParaGRU, np.float32, {"segments": WAYS["segments"]})
        cell, x = problem(ParaGRU, TIME)
        library = Library("jax")
        with pytest.raises(TypeError, match=r"reference='float64'.*jax_enable_x64"):
            verify_agreement(library.cell(cell), library.array(x), reference="float64")


def test_jax_with_64_bits():
    with jax_bits(True):
        library, (cell, x) = Library("jax"), problem(ParaTanh, TIME, dtype=np.float64)
        for config in (WAYS["pinned"], WAYS["auto"]):
            got = library.numpy(newton_apply(library.cell(cell), library.array(x), config))
            assert got.dtype == np.float64 and error_of(cell, got, sequential_apply(cell, x)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("wide", [False, True])
def test_jax_everything(kind, wide):
    with jax_bits(wide):
        for dtype in (np.float32, np.float64) if wide else (np.float32,):
            check_everything(Library("jax"), kind, dtype)


# --- half precision ------


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_P01_half_precision_of_torch_stays_within_its_band(kind, name):
    torch = pytest.importorskip("torch")
    half = getattr(torch, name)
    cell, x = problem(kind, 300)
    there, given = cell.to(torch).to(dtype=half), torch.from_numpy(x).to(half)
    for config in (NewtonConfig(), NewtonConfig(segment_len=17), NewtonConfig(max_iters=8)):
        states = newton_apply(there, given, config)
        assert states.dtype == half and sequential_apply(there, given).dtype == half
        report = verify_agreement(there, given, config=config)
        assert report.ok and report.atol == 1e-2 and report.dtype == name
        assert verify_agreement(there, given, config=config, reference="float64").ok, "computed in float32"
    states, pullback = newton_vjp(there, given)
    grads = pullback(last=torch.ones_like(states[:, -1]))
    assert {a.dtype for a in (grads.x, grads.h0, *grads.params.values())} == {half}
    assert all(torch.isfinite(a).all() for a in (grads.x, *grads.params.values()))


# --- libraries that differentiate ------


@pytest.mark.parametrize("kind", CELLS)
def test_the_time_loop_of_torch_is_differentiable_and_agrees_with_the_adjoint(kind):
    torch = pytest.importorskip("torch")
    cell, x = problem(kind, TIME, dtype=np.float64)
    there, given = cell.to(torch), torch.from_numpy(x).requires_grad_()
    leaves = {name: a.clone().requires_grad_() for name, a in there.arrays.items()}
    watched = there.replace(**{name.replace(".", "_"): a for name, a in leaves.items()})
    h0 = torch.from_numpy(start_for(cell, 2)).requires_grad_()
    states = sequential_apply(watched, given, h0=h0)
    cotangent = torch.from_numpy(np.random.default_rng(0).standard_normal(states.shape))
    states.backward(cotangent)
    _, pullback = newton_vjp(there, given.detach(), NewtonConfig(segment_len=6), h0.detach())
    grads = pullback(cotangent)
    for got, want in [(grads.x, given.grad), (grads.h0, h0.grad), *((grads.params[n], leaves[n].grad) for n in leaves)]:
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


def test_tensors_that_require_grad_are_differentiated_or_refused_but_never_cut_off():
    torch = pytest.importorskip("torch")
    cell, x = problem(ParaGRU, TIME, dtype=np.float64)
    there, given = cell.to(torch), torch.from_numpy(x)
    weight = there.a_z.clone().requires_grad_()
    watching = [(there, given.clone().requires_grad_()), (there.replace(a_z=weight), given)]
    if pararnn.front.front_of(given) is None:
        for module, tensor in watching:
            with pytest.raises(TypeError, match=r"require grad.*newton_vjp"):
                newton_apply(module, tensor)
        return
    _, pullback = newton_vjp(there, given)
    truth = pullback(torch.ones(2, TIME, 5, dtype=torch.float64))
    for (module, tensor), leaf, want in (
        (watching[0], watching[0][1], truth.x),
        (watching[1], weight, truth.params["a_z"]),
    ):
        newton_apply(module, tensor).sum().backward()
        torch.testing.assert_close(leaf.grad, want, rtol=1e-8, atol=1e-10)


def test_a_jax_transformation_may_trace_the_time_loop():
    """Tracers are on no device and have no value: neither may be needed where the loop does not need it."""
    with jax_bits(False):
        jax = pytest.importorskip("jax")
        jnp = importlib.import_module("jax.numpy")
        cell, x = problem(ParaTanh, 5)
        there, given = cell.to(jnp), jnp.asarray(x)
        loop = sequential_apply(there, given)
        traced = jax.jit(lambda a: sequential_apply(there, a))(given)
        np.testing.assert_allclose(np.asarray(traced), np.asarray(loop), atol=1e-6)

        def loss(weight, a):
            return (sequential_apply(there.replace(a=weight), a) ** 2).sum()

        slope = jax.grad(loss)(there.a, given)
        states, pullback = newton_vjp(cell, x)
        np.testing.assert_allclose(np.asarray(slope), pullback(2.0 * states).params["a"], rtol=1e-4, atol=1e-5)


# --- warnings ------


@pytest.mark.parametrize("name", ["numpy", "array_api_strict", "torch"])
@pytest.mark.parametrize("kind", CELLS)
def test_O60_saturated_gates_raise_no_warning_in_any_library(name, kind):
    library = Library(name)
    cell, x = problem(kind, 10, width=8)
    x = np.where(x > 0.0, np.float32(1e3), np.float32(-1e3))
    there, given = library.cell(cell), library.array(x)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        before = np.geterr()
        for config in (NewtonConfig(), NewtonConfig(segment_len=3), NewtonConfig(max_iters=4, residual_fail=None)):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=pararnn.NotConvergedWarning)
                states = newton_apply(there, given, config)
            assert np.isfinite(library.numpy(states)).all()
        states, pullback = newton_vjp(there, given)
        grads = pullback(library.array(np.ones(states.shape, np.float32)))
        sequential_apply(there, given)
        assert verify_agreement(there, given).ok
        check_cell(there)
        assert np.geterr() == before
    assert all(np.isfinite(library.numpy(a)).all() for a in (grads.x, grads.h0, *grads.params.values()))


def test_a_cell_says_where_its_arrays_are():
    for name in ("torch", "array_api_strict"):
        library = Library(name)
        text = repr(ParaSLSTM(3, 5, xp=library.xp, seed=0))
        assert name in text and "float32" in text and "ParaSLSTM(input_size=3, hidden_size=5" in text
