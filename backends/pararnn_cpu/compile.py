"""LLVM source to a callable: compiled once, kept in memory and in a cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from pararnn_cpu.emit import Machine

_LIBRARY = ("exp", "expm1", "log", "log1p", "tanh", "sin", "cos", "pow")
_lock = threading.RLock()
# Execution engines own their code: dropping one would unmap it.
_engines: list[llvm.ExecutionEngine] = []


@lru_cache(maxsize=1)
def _target() -> llvm.TargetMachine:
    """The host's own code generator, with the C library's functions made known to it."""
    if hasattr(llvm, "initialize") and tuple(map(int, llvmlite.__version__.split(".")[:2])) < (0, 45):
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    library = ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
    for name in _LIBRARY:
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        llvm.add_symbol(name, address)
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
    )


@lru_cache(maxsize=1)
def machine() -> Machine:
    """What the printers must know of this processor."""
    has = llvm.get_host_cpu_features().get
    if llvm.get_process_triple().startswith(("aarch64", "arm64")):
        return Machine(fma=True, vector_bytes=16, registers=32)
    if has("avx512f"):
        return Machine(fma=True, vector_bytes=64, registers=32)
    return Machine(fma=bool(has("fma")), vector_bytes=32 if has("avx") else 16, registers=16)


def cache_folder() -> Path:
    """Where compiled code is kept between runs; PARARNN_CACHE_DIR chooses another place."""
    chosen = os.environ.get("PARARNN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return base / "pararnn"


def compiled(source: str) -> Callable[[int], None]:
    """The function ``run`` of `source`, taking the address of its argument array. Releases the interpreter lock."""
    with _lock:
        target = _target()
        key = "\n".join([source, llvmlite.__version__, target.triple, llvm.get_host_cpu_name(),
                         llvm.get_host_cpu_features().flatten()])  # fmt: skip
        path = cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()}.o"
        try:
            code = path.read_bytes()
        except OSError:
            module = llvm.parse_assembly(source)
            module.verify()
            code = target.emit_object(module)
            _keep(path, code)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        _engines.append(engine)
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("run"))


def _keep(path: Path, code: bytes) -> None:
    """Writes the cache entry in one step, so that no other process sees half of it; a full disk is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        pass
