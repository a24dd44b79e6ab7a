"""LLVM source to a callable: compiled once, kept in memory and in a cache folder."""

from __future__ import annotations

import contextlib
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

# What printed code may call: functions of the C library, and what Windows wants of functions with large frames.
_LIBRARY = ("exp", "expm1", "log", "log1p", "tanh", "sin", "cos", "pow", "__chkstk")
# Takes the address of an argument array.
Compiled = Callable[[int], None]
_lock = threading.RLock()
# Execution engines own their code: dropping one would unmap it.
_engines: list[llvm.ExecutionEngine] = []


def _forget_lock() -> None:
    """In a forked child: whoever held the lock is not here to give it back."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


@lru_cache(maxsize=1)
def _target() -> llvm.TargetMachine:
    """The host's own code generator, with the C library's functions made known to it."""
    if tuple(map(int, llvmlite.__version__.split(".")[:2])) < (0, 45):
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    libraries = [ctypes.CDLL(n) for n in ("ucrtbase", "ntdll")] if sys.platform == "win32" else [ctypes.CDLL(None)]
    for name in _LIBRARY:
        for library in libraries:
            with contextlib.suppress(AttributeError):
                llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
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
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "pararnn"


def compiled(source: str) -> Compiled:
    """The function ``run`` of `source`, taking the address of its argument array. Releases the interpreter lock."""
    with _lock:
        target = _target()
        key = (source, llvmlite.__version__, target.triple, llvm.get_host_cpu_name(),
               llvm.get_host_cpu_features().flatten())  # fmt: skip
        name = f"{hashlib.sha256(repr(key).encode()).hexdigest()}.o"
        code = _kept(name)
        if code is None:
            module = llvm.parse_assembly(source)
            module.verify()
            code = target.emit_object(module)
            _keep(name, code)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        _engines.append(engine)
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("run"))


def _checksum(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()


def _kept(name: str) -> bytes | None:
    """The cache entry of this name, if it is there and whole: the checksum of the code, and the code."""
    try:
        entry = (cache_folder() / name).read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    size = len(_checksum(b""))
    return entry[size:] if _checksum(entry[size:]) == entry[:size] else None


def _keep(name: str, code: bytes) -> None:
    """Writes a cache entry in one step, so that no other process sees half of it; where it cannot, that is no error."""
    temporary = None
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            temporary = file.name
            file.write(_checksum(code) + code)
        os.replace(temporary, folder / name)
    except (OSError, RuntimeError):
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
