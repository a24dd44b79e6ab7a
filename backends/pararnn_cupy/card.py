"""CuPy's part: compiling a source once, and launching it on the device and stream of the arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pararnn.arrays import Array, Namespace, namespace_name
from pararnn.programs import StepPrograms
from pararnn_cupy.launch import Argument, addresses
from pararnn_cupy.source import cuda_source

# Fused multiply-adds of the compiler's own choice would round differently from kernel to kernel, and joints could not
# match bit for bit; the source says where it wants one.
OPTIONS = ("--std=c++17", "--fmad=false")


@lru_cache(maxsize=256)
def _module(source: str) -> Any:
    import cupy

    return cupy.RawModule(code=source, options=OPTIONS, backend="nvrtc")


class Kernels:
    """The kernels of one cell and dtype; CuPy loads them on each device when they are first launched there."""

    def __init__(self, programs: StepPrograms, dtype: str) -> None:
        self.module = _module(cuda_source(programs, dtype))
        self.by_name: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        if name not in self.by_name:
            self.by_name[name] = self.module.get_function(name)
        return self.by_name[name]


def kernels_of(programs: StepPrograms, dtype: str) -> Kernels:
    compiled = programs.compiled.setdefault("cupy", {})
    if dtype not in compiled:
        compiled[dtype] = Kernels(programs, dtype)
    return compiled[dtype]


class CudaCard:
    """Memory from the arrays' own library, launches through CuPy on the stream that this library is using."""

    def __init__(self, programs: StepPrograms, dtype: str, xp: Namespace, device: Any) -> None:
        import cupy

        self.xp, self.device = xp, device
        self.kernels = kernels_of(programs, dtype)
        if namespace_name(xp) == "torch":
            import torch

            self.context = cupy.cuda.Device(device.index)
            self.stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream)
            self.pointer = lambda a: a.data_ptr()
        else:
            self.context = device
            with self.context:
                self.stream = cupy.cuda.get_current_stream()
            self.pointer = lambda a: a.data.ptr

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        with self.context:
            return self.xp.empty(shape, dtype=getattr(self.xp, dtype), device=self.device)

    def launch(self, kernel: str, threads: int, block: int, arguments: Sequence[Argument]) -> None:
        with self.context:
            self.kernels.get(kernel).kernel(
                (-(-threads // block), 1, 1), (block, 1, 1), addresses(arguments, self.pointer), 0, self.stream
            )
