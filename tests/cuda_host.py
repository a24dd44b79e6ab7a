"""The generated CUDA kernels on the CPU: compiled by a C++ compiler with a shim, on NumPy arrays."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from pararnn.arrays import dtype_name, namespace_name
from pararnn.programs import StepPrograms, programs_of
from pararnn_cupy import CupyBackend
from pararnn_cupy.source import cuda_source

COMPILER = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
SHIM = Path(__file__).with_name("cuda_host.h")
SANITIZED = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
_KERNEL = re.compile(r'extern "C" __global__ void (\w+)\(([^)]*)\)')
_BUILT = tempfile.TemporaryDirectory(prefix="cuda-host-")


def host_source(text: str) -> str:
    """The source between the shim and, for each kernel, a function that runs all threads of a launch."""
    parts = [f'#include "{SHIM}"', text]
    for name, parameters in _KERNEL.findall(text):
        words = ", ".join(p.split()[-1].lstrip("*") for p in parameters.split(","))
        parts.append(
            f'extern "C" void run_{name}(long long blocks, long long threads, {parameters})\n'
            "{\n    blockDim.x = (unsigned int)threads;\n"
            "    for (long long i = 0; i < blocks; i++)\n        for (long long j = 0; j < threads; j++)\n        {\n"
            f"            blockIdx.x = (unsigned int)i;\n            threadIdx.x = (unsigned int)j;\n"
            f"            {name}({words});\n        }}\n}}\n"
        )
    return "\n".join(parts)


@lru_cache(maxsize=64)
def library(text: str, options: tuple[str, ...]) -> ctypes.CDLL:
    """The compiled source; refuses to go on without a compiler or past a warning that matters."""
    assert COMPILER is not None
    name = hashlib.sha256(repr((text, options)).encode()).hexdigest()[:16]
    source, target = Path(_BUILT.name, f"{name}.cpp"), Path(_BUILT.name, f"{name}.so")
    source.write_text(host_source(text))
    common = ("-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Werror", "-Wno-unknown-pragmas")
    # A kernel need not use every helper of the templates.
    quiet = ("-Wno-unused-function", "-Wno-unused-but-set-parameter", "-Wno-maybe-uninitialized")
    done = subprocess.run(
        [COMPILER, *common, *quiet, *options, "-o", str(target), str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(target))


class HostElementwise:
    """What cupy.ElementwiseKernel does, on NumPy arrays."""

    def __init__(self, given: str, made: str, text: str, name: str, *, preamble: str, **keywords: Any) -> None:
        self.made = [word.split() for word in made.split(", ")]
        kind = {"float32": "float", "float64": "double"}[self.made[0][0]]
        lines = [f"const {kind} &{w.split()[1]} = given[{k}][i];" for k, w in enumerate(given.split(", "))]
        lines += [f"{kind} &{w} = made[{k}][i];" for k, (_, w) in enumerate(self.made)]
        loop = "\n".join(lines) + "\n" + text
        head = f'extern "C" void {name}(long long n, const {kind} **given, {kind} **made)'
        self.run = library(f"{preamble}\n{head}\n{{ for (long long i = 0; i < n; i++) {{\n{loop}\n}} }}\n", ())[name]
        self.launches = 0

    def __call__(self, *given: np.ndarray) -> tuple[np.ndarray, ...]:
        whole = [np.ascontiguousarray(a) for a in np.broadcast_arrays(*given)]
        results = [np.full(whole[0].shape, np.nan, kind) for kind, _ in self.made]
        tables = [(ctypes.c_void_p * len(group))(*(a.ctypes.data for a in group)) for group in (whole, results)]
        self.run(ctypes.c_longlong(whole[0].size), *tables)
        self.launches += 1
        return tuple(results)


class HostCard:
    """NumPy memory, full of NaN so that what is read before it is written shows."""

    def __init__(self, programs: StepPrograms, dtype: str, options: tuple[str, ...] = ()) -> None:
        self.library = library(cuda_source(programs, dtype), options)

    def __enter__(self) -> HostCard:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        if dtype.startswith("float"):
            return np.full(shape, np.nan, dtype=dtype)
        return np.full(shape, 0x55, dtype={"bfloat16": "uint16"}.get(dtype, dtype))

    def address(self, array: np.ndarray | None) -> int:
        if array is None:
            return 0
        assert array.flags.c_contiguous
        return array.ctypes.data

    def launch(self, kernel: str, threads: int, block: int, arguments: Sequence[int | float]) -> None:
        kinds = [ctypes.c_double if isinstance(a, float) else ctypes.c_longlong for a in arguments]
        run = getattr(self.library, f"run_{kernel}")
        run.argtypes, run.restype = [ctypes.c_longlong] * 2 + kinds, None
        run(-(-threads // block), block, *arguments)


class HostBackend(CupyBackend):
    """The CuPy backend with everything as it is, except that memory and launches are the CPU's."""

    name = "cupy_on_host"
    priority = -10

    def __init__(self, options: tuple[str, ...] = ()) -> None:
        self.options = options

    def probe(self) -> str | None:
        return None if COMPILER else "there is no C++ compiler"

    def _accepts_arrays(self, problem: Any) -> str | None:
        return None if namespace_name(problem.xp) == "numpy" else "it takes NumPy arrays"

    def _is_on_host(self, problem: Any) -> bool:
        return False

    def example_namespace(self) -> Any:
        return np

    def card(self, problem: Any) -> HostCard:
        return HostCard(programs_of(problem.cell, marks=problem.marks), dtype_name(problem.dtype), self.options)


def sanitized_environment() -> dict[str, str]:
    """For a Python process that loads libraries built with SANITIZED: the sanitizer has to be there first."""
    assert COMPILER is not None
    runtime = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    # Python frees nothing at its end, and its own memory pools would hide what is read past an array.
    return {
        **os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip


if __name__ == "__main__":
    # python cuda_host.py [--sanitized] [conformance arguments]: the conformance suite on the kernels, on the CPU.
    from pararnn import register_backend
    from pararnn_conformance.__main__ import main

    arguments = sys.argv[1:]
    sanitized = "--sanitized" in arguments
    register_backend(HostBackend(SANITIZED if sanitized else ()))
    sys.exit(main([HostBackend.name, *(a for a in arguments if a != "--sanitized")]))
