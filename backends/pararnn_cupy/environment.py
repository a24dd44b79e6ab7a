"""Whether CuPy can compile and run kernels here, said in a sentence."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

# Distributions that bring CuPy for one major version of CUDA, and the extra that installs each.
WHEELS = {"cupy-cuda11x": 11, "cupy-cuda12x": 12, "cupy-cuda13x": 13}
DRIVERS = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")


def driver_version() -> int | None:
    """The CUDA version that the installed driver supports, 13000 for 13.0; None without a driver."""
    for name in DRIVERS:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        found = ctypes.c_int(0)
        if library.cuDriverGetVersion(ctypes.byref(found)) == 0:
            return found.value
    return None


def wheel() -> tuple[str, int] | None:
    """The installed CuPy wheel and the CUDA major version that it is for; None for another build of CuPy."""
    for name, major in WHEELS.items():
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return name, major
    return None


@lru_cache(maxsize=1)
def environment_sentence() -> str | None:
    """None if kernels can be compiled and run, else what is missing and how to get it.

    The questions that need no import come first, so that nobody without a card waits for CuPy.
    """
    driver = driver_version()
    if find_spec("cupy") is None:
        major = 12 if driver is not None and driver < 13000 else 13
        return f"cupy is not installed; pip install 'pararnn[cupy{major}]'"
    if driver is None:
        return "there is no NVIDIA driver; CuPy needs one and a CUDA card"
    built = wheel()
    if built is not None and driver // 1000 < built[1]:
        name, major = built
        instead = f"pip uninstall {name}; pip install 'pararnn[cupy12]', or update the driver"
        return f"{name} needs a driver for CUDA {major}, and this one is for CUDA {driver // 1000}; {instead}"
    try:
        import cupy
    except Exception as error:
        return f"cupy does not import ({type(error).__name__}: {error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"CUDA does not start ({error})"
    if count == 0:
        return "no CUDA device is visible; look at CUDA_VISIBLE_DEVICES"
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        wanted = built[1] if built is not None else driver // 1000
        return (
            f"NVRTC, which compiles the kernels, cannot be loaded ({type(error).__name__}: {error}); "
            f"pip install 'cupy-cuda{wanted}x[ctk]', or install the CUDA toolkit {wanted}"
        )
    return None
