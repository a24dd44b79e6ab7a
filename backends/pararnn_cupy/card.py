"""CuPy's part: compiling a source once, and launching it on the device and stream of the arrays."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pararnn.arrays import Array, Namespace, dtype_name, namespace_name
from pararnn.programs import StepPrograms
from pararnn_cupy.source import cuda_source

# Fused multiply-adds of the compiler's own choice would round differently from kernel to kernel, and joints could not
# match bit for bit; the source says where it wants one.
OPTIONS = ("--std=c++17", "--fmad=false")


@lru_cache(maxsize=256)
def _module(source: str) -> Any:
    import cupy

    return cupy.RawModule(code=source, options=OPTIONS, backend="nvrtc")


class Kernels:
    """The kernels of one cell and dtype, loaded on each device when they are first launched there."""

    def __init__(self, programs: StepPrograms, dtype: str) -> None:
        self.module = _module(cuda_source(programs, dtype))
        self.loaded: dict[tuple[int, str], Any] = {}

    def get(self, device: int, name: str) -> Any:
        """The function on the device, which must be the current one."""
        key = (device, name)
        if key not in self.loaded:
            self.loaded[key] = self.module.get_function(name).kernel
        return self.loaded[key]


def kernels_of(programs: StepPrograms, dtype: str) -> Kernels:
    compiled = programs.compiled.setdefault("cupy", {})
    if dtype not in compiled:
        compiled[dtype] = Kernels(programs, dtype)
    return compiled[dtype]


# How the driver is told that parameters come as one block of memory: pairs of a word and an address, and an end.
_POINTER, _SIZE, _END = 1, 2, 0


class CudaCard:
    """Memory from the arrays' own library, launches on the stream that this library is using."""

    def __init__(self, programs: StepPrograms, dtype: Any, xp: Namespace, device: Any) -> None:
        import cupy

        self.xp, self.device = xp, device
        # CuPy's namespace has no bfloat16 of its own, so the arrays' dtype is kept as it came.
        self.dtypes = {dtype_name(dtype): dtype}
        self.kernels = kernels_of(programs, dtype_name(dtype))
        self.driver = cupy.cuda.driver
        if namespace_name(xp) == "torch":
            import torch

            self.context, self.number = cupy.cuda.Device(device.index), device.index
            self.stream = torch.cuda.current_stream(device).cuda_stream
        else:
            self.context, self.number = device, device.id
            with self.context:
                self.stream = cupy.cuda.get_current_stream().ptr

    def __enter__(self) -> CudaCard:
        self.context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.context.__exit__(*error)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        kind = self.dtypes[dtype] if dtype in self.dtypes else getattr(self.xp, dtype)
        return self.xp.empty(shape, dtype=kind, device=self.device)

    def address(self, array: Array | None) -> int:
        if array is None:
            return 0
        return array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr

    def launch(self, kernel: str, threads: int, block: int, arguments: Sequence[int | float]) -> None:
        # Packed here, because CuPy makes an object of every parameter, which takes longer than the kernels.
        layout = "".join("d" if isinstance(a, float) else "q" for a in arguments)
        packed = struct.pack(layout, *arguments)
        size = ctypes.c_size_t(len(packed))
        place = ctypes.cast(ctypes.c_char_p(packed), ctypes.c_void_p).value
        extra = (ctypes.c_void_p * 5)(_POINTER, place, _SIZE, ctypes.addressof(size), _END)
        self.driver.launchKernel(
            self.kernels.get(self.number, kernel).ptr,
            -(-threads // block), 1, 1, block, 1, 1, 0, self.stream, 0, ctypes.addressof(extra),
        )  # fmt: skip
