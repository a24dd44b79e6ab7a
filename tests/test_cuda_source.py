"""The generated CUDA sources without a card: compiled by nvcc where it is, and run on the CPU against the oracle."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import pararnn.registry
from cuda_host import COMPILER, HostBackend, HostCard, HostElementwise, sanitized_environment
from cuda_host_cells import cells
from pararnn import (
    BackendUnavailableError,
    NewtonConfig,
    ParaGRU,
    ParaLSTM,
    ParaSLSTM,
    ParaTanh,
    backends,
    explain,
    newton_apply,
    newton_vjp,
    sequential_apply,
)
from pararnn.graph import Graph, Program, compile_array
from pararnn.problem import make_problem
from pararnn.programs import programs_of
from pararnn_conformance.runner import run_all
from pararnn_cupy import CupyBackend, environment
from pararnn_cupy.fused import fused_function
from pararnn_cupy.layout import choose_layout
from pararnn_cupy.print_cuda import body, number
from pararnn_cupy.source import STORED, cuda_source
from support import CELLS, error_of, problem, solve, start_for, strong

NVCC = shutil.which("nvcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (g++, clang++ or c++) on the path")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc on the path")
HERE = Path(__file__).parent
TIGHT = {np.float32: {"rtol": 1e-5, "atol": 2e-6}, np.float64: {"rtol": 1e-13, "atol": 1e-15}}


@pytest.fixture
def host(monkeypatch):
    """The kernels on the CPU, registered for one test."""
    monkeypatch.setattr(pararnn.registry, "_registered", {HostBackend.name: HostBackend()})


def on_host(**options):
    return NewtonConfig(scan_backend=HostBackend.name, **options)


# What a program looks like.


def lines_of(make) -> list[str]:
    g = Graph()
    out = make(*(g.input(name) for name in "xyz"))
    return body(Program("xyz", [out]), {name: name for name in "xyz"}, ["r"])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x, y, z: x * y + z, "fused(x, y, z)"),
        (lambda x, y, z: z + x * y, "fused(x, y, z)"),
        (lambda x, y, z: x * y - z, "fused(x, y, -z)"),
        (lambda x, y, z: z - x * y, "fused(-x, y, z)"),
        (lambda x, y, z: x * 2.0 + z, "fused(x, work_t(2.0), z)"),
        (lambda x, y, z: x * y + x * z, "fused(x, y, t1)"),
    ],
)
def test_a_product_in_a_sum_is_rounded_with_it(make, text):
    """The rule looks at the operation alone, so that all kernels of a cell round it alike."""
    lines = lines_of(make)
    assert f"= {text};" in lines[-3]
    assert not any(" t0 =" in line for line in lines), "the product alone is computed by nobody"


def test_a_sum_of_a_product_with_itself_keeps_the_product():
    lines = lines_of(lambda x, y, z: x * y + x * y)
    assert lines[:2] == ["const work_t t0 = x * y;", "const work_t t1 = fused(x, y, t0);"]


def test_numbers_keep_their_bits_and_what_is_no_number_has_a_name():
    assert number(0.1) == "work_t(0.1)" and number(-1e-300) == "work_t(-1e-300)"
    assert [number(v) for v in (np.inf, -np.inf, np.nan)] == ["infinity()", "-infinity()", "not_a_number()"]


def test_results_are_computed_before_any_is_overwritten():
    g = Graph()
    x, y = g.input("x"), g.input("y")
    assert body(Program("xy", [y, x]), {"x": "s[0]", "y": "s[1]"}, ["s[0]", "s[1]"]) == [
        "const work_t out0 = s[1];",
        "const work_t out1 = s[0];",
        "s[0] = out0;",
        "s[1] = out1;",
    ]


# Compiled.


def compile_with_nvcc(kind, dtype, folder) -> None:
    source = folder / "kernels.cu"
    source.write_text(cuda_source(programs_of(kind(2, 3)), dtype))
    # The oldest cards that every supported toolkit still knows.
    command = [NVCC, "-ptx", "-std=c++17", "--fmad=false", "-arch=compute_75", "-Werror", "all-warnings"]
    done = subprocess.run([*command, "-o", str(folder / "out.ptx"), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


@needs_nvcc
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nvcc_compiles_a_cell_without_a_warning(dtype, tmp_path):
    compile_with_nvcc(ParaLSTM, dtype, tmp_path)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("kind", cells())
def test_nvcc_compiles_every_cell_without_a_warning(kind, dtype, tmp_path):
    compile_with_nvcc(kind, dtype, tmp_path)


# On the CPU, under the sanitizers.


def sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / "cuda_host_cells.py"), *arguments],
        capture_output=True, text=True, env=sanitized_environment(), timeout=300,
    )  # fmt: skip


@needs_compiler
def test_every_cell_is_the_time_loop_under_the_sanitizers():
    """P01 and the adjoint for every cell, one segment and several: no read or write outside an array, no undefined
    operation, and the oracle's numbers."""
    done = sanitized()
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {f["cell"] for f in found} >= {"ParaGRU", "ParaLSTM", "ParaSLSTM", "ParaTanh", "Everything"}
    assert {f["dtype"] for f in found} == set(STORED)
    for f in found:
        # A tenth of the public agreement for float32, which is what the solver promises of itself.
        limit = {"float64": 1e-13, "float32": 1e-5, "float16": 2e-3, "bfloat16": 5e-3}[f["dtype"]]
        assert f["loop"] <= limit, f
        assert f.get("gradients", 0.0) <= 2.0 * limit, f
        assert f.get("converged", True), f


@needs_compiler
def test_the_sanitizers_would_notice():
    done = sanitized("past-the-end")
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr


# On the CPU, the laws.


@needs_compiler
@pytest.mark.usefixtures("host")
def test_conformance_on_the_host():
    """The short suite; tests/cuda_host.py runs the whole."""
    assert run_all([HostBackend.name], [HostBackend.name], quick=True) == 0


@needs_compiler
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [1, 5, 16, 60])
def test_an_exact_solve_is_the_kernels_own_time_loop_bit_for_bit(kind, dtype, length):
    """O09: chaotic weights, where no correction settles; what is merely near would be wrong by order one."""
    cell, x = strong(kind, 61, 6.0, dtype=dtype)
    h0 = start_for(cell, 2)
    loop, _ = solve(cell, x, on_host(segment_len=61), h0=h0)
    states, stats = solve(cell, x, on_host(segment_len=length, warmup=1, exact=True), h0=h0)
    np.testing.assert_array_equal(states, loop)
    assert stats.exact and stats.converged and stats.path == "segments"


@needs_compiler
@pytest.mark.usefixtures("host")
def test_what_is_claimed_exact_is_exact_and_what_is_estimated_is_within():
    """P07: over weights from forgetful to chaotic, by channel."""
    kinds = {"exact": 0, "estimated": 0, "walked": 0}
    for kind, size in ((ParaTanh, 0.3), (ParaLSTM, 0.3), (ParaLSTM, 2.0), (ParaLSTM, 4.0), (ParaGRU, 20.0)):
        for seed in range(4):
            cell, x = strong(kind, 90, size, seed=seed)
            loop, _ = solve(cell, x, on_host(segment_len=90))
            states, stats = solve(cell, x, on_host(segment_len=10, warmup=4))
            error = error_of(cell, states, loop)
            assert stats.converged and error <= max(stats.agreement_estimate, 0.0)
            if stats.exact:
                np.testing.assert_array_equal(states, loop)
            kinds["exact"] += stats.exact
            kinds["estimated"] += not stats.exact
            kinds["walked"] += stats.walked > 0.0
    assert all(kinds.values()), f"each way out must be taken by some problem: {kinds}"


@needs_compiler
@pytest.mark.usefixtures("host")
def test_long_memory_is_corrected_and_not_walked():
    """Forget gates near one: a warm-up says nothing, one correction says all."""
    cell, x = problem(ParaLSTM, 400)
    bias = cell.W_x.bias.copy()
    gate = cell.gates.index("f")
    bias[5 * gate : 5 * (gate + 1)] = 6.0
    cell = cell.replace(W_x_bias=bias)
    states, stats = solve(cell, x, on_host(segment_len=40, warmup=8))
    assert error_of(cell, states, sequential_apply(cell, x)) <= 1e-4
    assert stats.converged and stats.walked == 0.0 and not stats.exact
    # A plain pass, a rerun, and up to four with tangents, one more than corrections.
    assert 4 <= stats.passes <= 6 and stats.iters == stats.passes - 3


@needs_compiler
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("length", [None, 8])
def test_a_nan_stays_where_the_loop_has_it(dtype, length):
    """O08: the steps before it and the other sequences are untouched bit for bit."""
    cell, x = problem(ParaGRU, 40, dtype=dtype)
    clean = newton_apply(cell, x, on_host(segment_len=length))
    x[0, 13, 0] = np.nan
    states, stats = solve(cell, x, on_host(segment_len=length))
    np.testing.assert_array_equal(states[1], clean[1])
    np.testing.assert_array_equal(states[0, :13], clean[0, :13])
    assert np.isnan(states[0, 13:]).all()
    assert stats.exact


@needs_compiler
@pytest.mark.usefixtures("host")
def test_an_overflow_is_the_loop_s_infinity():
    """A forget gate far above one: no estimate may hide behind an infinite scale."""
    cell, x = problem(ParaSLSTM, 50)
    x[:, 20:30] *= 1e20
    loop, _ = solve(cell, x, on_host(segment_len=50))
    states, stats = solve(cell, x, on_host(segment_len=8))
    np.testing.assert_array_equal(states, loop)
    assert stats.converged


@needs_compiler
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("guess", ["true", "zeros", "nan"])
def test_a_guess_changes_the_work_and_not_the_result(guess):
    cell, x = problem(ParaGRU, 90)
    loop, _ = solve(cell, x, on_host(segment_len=90))
    start = {"true": loop, "zeros": np.zeros_like(loop), "nan": np.full_like(loop, np.nan)}[guess]
    states, stats = solve(cell, x, on_host(segment_len=30), guess=start)
    assert error_of(cell, states, loop) <= 1e-5 and stats.converged
    assert stats.exact or guess != "true"


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_rounded_to_nearest_and_even(dtype):
    """P21: a cell that hands its input on; widened exactly, narrowed once, NaN and infinity kept."""
    from pararnn import ChannelwiseCell

    class Scaled(ChannelwiseCell):
        slots, gates, params = ("h",), ("u",), ("a",)

        def step(self, xp, h, u, a):
            return (0.0 * h + a * u,)

    bits = np.random.default_rng(0).integers(0, 2**16, 3000, dtype=np.uint16)
    bits[:4] = 0, 0x8000, 1, 0x0400
    factor = np.float32(1.0 / 3.0)
    if dtype == "float16":
        wide = bits.view(np.float16).astype(np.float32)
    else:
        wide = (bits.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        product = (factor * wide).astype(np.float32)
        if dtype == "float16":
            rounded = product.astype(np.float16).astype(np.float32)
        else:
            words = product.view(np.uint32).astype(np.uint64)
            words = (words + 0x7FFF + ((words >> 16) & 1)) >> 16 << 16
            rounded = np.where(np.isnan(product), product, words.astype(np.uint32).view(np.float32))
    card = HostCard(programs_of(Scaled(1, 1)), dtype)
    lanes = bits.size
    gates = bits.view(np.float16) if dtype == "float16" else bits
    states = np.zeros((1, 1, 1, lanes), gates.dtype)
    params = np.full((1, lanes), factor)
    left = np.zeros((1, lanes), np.float32), *np.zeros((2, 1, lanes), np.int32)
    arrays = map(card.address, (gates, None, None, params, None, None, None, states, *left))
    card.launch("time_loop", lanes, 32, (*arrays, 1, 1, lanes))
    got = states.ravel()
    got = got.astype(np.float32) if dtype == "float16" else (got.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(got, rounded)


@needs_compiler
@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("length", [None, 7])
@pytest.mark.parametrize("told", [("cu_seqlens", "h0"), ("reset",), ("mask",), ("cu_seqlens", "h0", "reset", "mask")])
def test_documents_resets_and_padding_are_read_by_the_step(kind, length, told):
    """P43: states and gradients against the array solver in float64; documents of every length, two of them empty."""
    cell, x = problem(kind, 61, batch=1)
    rng = np.random.default_rng(7)
    every = {"cu_seqlens": [0, 0, 9, 9, 30, 31, 61], "h0": start_for(cell, 6), "reset": rng.random((1, 61)) > 0.9,
             "mask": rng.random((1, 61)) > 0.2}  # fmt: skip
    given = {name: every[name] for name in told}
    states, pullback = newton_vjp(cell, x, on_host(segment_len=length, warmup=3 if length else None), **given)
    wide = {name: a.astype(np.float64) if name == "h0" else a for name, a in given.items()}
    precise, wide_x = cell.to(dtype=np.dtype("float64")), x.astype(np.float64)
    true, true_pullback = newton_vjp(precise, wide_x, NewtonConfig(scan_backend="array"), **wide)
    assert error_of(cell, states, true) <= 1e-5
    seed = rng.standard_normal(states.shape)
    found, expected = pullback(seed.astype(np.float32)), true_pullback(seed)
    pairs = {"x": (found.x, expected.x), "h0": (found.h0, expected.h0)}
    pairs |= {name: (found.params[name], value) for name, value in expected.params.items()}
    for name, (a, b) in pairs.items():
        assert a.shape == b.shape and np.abs(a - b).max() <= 1e-5 * np.abs(b).max(), name


class OnCard(np.ndarray):
    """An array whose device can be entered, as CuPy's can."""

    device = nullcontext()


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["advance", "advance_tangent", "correct", "jacobians", "back_propagate"])
def test_a_program_is_one_launch_and_gives_what_the_array_printer_gives(monkeypatch, name, dtype):
    """Rows (4, 6) with params (6,), as mixing cells and pinned solves call it."""
    made = []

    def kernel(*parts, **keywords):
        made.append(HostElementwise(*parts, **keywords))
        return made[-1]

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ElementwiseKernel=kernel))
    program = getattr(programs_of(ParaLSTM(1, 1)), name).program
    rng = np.random.default_rng(0)
    shapes = [(6,) if n.startswith(("p_", "lo_", "hi_")) else (4, 6) for n in program.inputs]
    operands = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    wanted = compile_array(program)(np, *operands)
    found = fused_function(program)(np, *(a.view(OnCard) for a in operands))
    assert [k.launches for k in made] == [1]
    for a, b in zip(found, wanted, strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_allclose(np.broadcast_to(a, (4, 6)), np.broadcast_to(b, (4, 6)), **TIGHT[dtype])


def test_programs_on_mixed_or_foreign_dtypes_go_operation_by_operation():
    g = Graph()
    x, y = g.input("x"), g.input("y")
    run = fused_function(Program("xy", [x + y, x, g.const(2.0)]))
    out = run(np, np.ones(3, np.float32), np.ones(3))
    np.testing.assert_array_equal(out[0], np.full(3, 2.0))
    assert out[2] == 2.0


# The backend's questions.


def test_the_layout_covers_the_sequence_once():
    for batch, time, width in ((8, 2048, 256), (1, 131_072, 256), (1, 16_384, 64), (3, 1001, 7)):
        layout = choose_layout(batch, time, width, segment_len=None, warmup=None, passes=4, long_memory=False)
        assert (layout.segments - 1) * layout.length < time <= layout.segments * layout.length
        assert layout.warmup <= layout.length and layout.passes >= 3
    for full in ((64, 2048, 1024), (8, 128, 256)):
        assert choose_layout(*full, segment_len=None, warmup=None, passes=4, long_memory=False).segments == 1
    assert choose_layout(1, 9999, 64, segment_len=None, warmup=None, passes=4, long_memory=True).segments == 1


@pytest.mark.parametrize(
    ("spec", "driver", "wheel", "wanted"),
    [
        (None, None, None, r"not installed; pip install 'pararnn\[cupy13\]'"),
        (None, 12040, None, r"not installed; pip install 'pararnn\[cupy12\]'"),
        (object(), None, None, "no NVIDIA driver"),
        (object(), 12080, ("cupy-cuda13x", 13), "driver for CUDA 13, and this one is for CUDA 12"),
    ],
)
def test_the_probe_says_what_is_missing(monkeypatch, spec, driver, wheel, wanted):
    monkeypatch.setattr(environment, "find_spec", lambda name: spec)
    monkeypatch.setattr(environment, "driver_version", lambda: driver)
    monkeypatch.setattr(environment, "wheel", lambda: wheel)
    environment.environment_sentence.cache_clear()
    try:
        sentence = CupyBackend().probe()
        assert sentence is not None
        with pytest.raises(BackendUnavailableError, match=wanted):
            newton_apply(*problem(ParaGRU, 5), NewtonConfig(scan_backend="cupy"))
    finally:
        environment.environment_sentence.cache_clear()


@pytest.mark.parametrize(
    ("broken", "wanted"),
    [("import", "does not import"), ("start", "CUDA does not start"), ("none", "CUDA_VISIBLE_DEVICES"),
     ("nvrtc", "NVRTC")],
)  # fmt: skip
def test_the_probe_asks_cupy_itself(monkeypatch, broken, wanted):
    """A driver is there, and something behind it is not."""

    def fails():
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    count = {"start": fails, "none": lambda: 0}.get(broken, lambda: 1)
    nvrtc = SimpleNamespace(getVersion=fails if broken == "nvrtc" else lambda: (13, 0))
    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=count), nvrtc=nvrtc))
    monkeypatch.setitem(sys.modules, "cupy", None if broken == "import" else fake)
    monkeypatch.setattr(environment, "find_spec", lambda name: object())
    monkeypatch.setattr(environment, "driver_version", lambda: 13000)
    monkeypatch.setattr(environment, "wheel", lambda: ("cupy-cuda13x", 13))
    environment.environment_sentence.cache_clear()
    try:
        assert wanted in str(environment.environment_sentence())
    finally:
        environment.environment_sentence.cache_clear()


def test_refusals_are_sentences(monkeypatch):
    """Arrays of another library, and orders that belong to the array solver."""
    backend = CupyBackend()
    cell, x = problem(ParaGRU, 5)

    def refusal(**options):
        return backend.accepts(make_problem("test", cell, x, None, NewtonConfig(**options)))

    assert "CuPy arrays" in refusal()
    assert refusal(scan_backend="cupy") is None
    assert "pinned" in refusal(scan_backend="cupy", max_iters=2)
    assert "jac_structure" in refusal(scan_backend="cupy", jac_structure="diag")
    monkeypatch.setattr(sys.modules["pararnn_cupy.backend"], "WIDEST", 14)
    assert "gate inputs a step" in str(refusal(scan_backend="cupy"))


def test_auto_passes_it_over_with_a_sentence():
    assert backends()["cupy"].priority == 35
    assert explain(*problem(ParaGRU, 5)).refusals["cupy"]
