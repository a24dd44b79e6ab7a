"""Whether Triton can run here, said in a sentence, and the functions of pararnn.kernels that raise it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pararnn.errors import BackendUnavailableError
from pararnn_triton.interpreter import interpreting

# Versions on which the conformance suite has run.
OLDEST, BELOW = (3, 4), (4, 0)

_INSTEAD = "scan_backend='eager' runs on PyTorch's own operations"


@lru_cache(maxsize=1)
def environment_sentence() -> str | None:
    """None if kernels can be built and run, else what is missing. Builds nothing and wakes no device."""
    try:
        import torch
    except Exception as error:
        return f"torch does not import ({type(error).__name__}: {error}); pip install 'pararnn[triton]'"
    try:
        import triton
    except Exception as error:
        return f"triton does not import ({type(error).__name__}: {error}); pip install 'pararnn[triton]'"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not OLDEST <= version < BELOW:
        wanted = f"{OLDEST[0]}.{OLDEST[1]} to below {BELOW[0]}.{BELOW[1]}"
        return f"triton {triton.__version__} is not among the versions tested ({wanted})"
    if interpreting():
        return None
    if not torch.cuda.is_available():
        return "no CUDA device is visible to torch"
    return None


# By device: what came of the test kernel.
_tried: dict[Any, str | None] = {}


def device_sentence(device: Any) -> str | None:
    """None if a test kernel runs on `device`, else what went wrong; built on first use only."""
    if device not in _tried:
        import torch

        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # The test reads its result back, which a capture forbids; a kernel that fails to build says so itself.
            return None
        from pararnn_triton.smoke import smoke

        _tried[device] = smoke(device)
    return _tried[device]


def check_triton_environment() -> None:
    """Checks that generated kernels can run here: the version of Triton, a CUDA device, and a test kernel.

    The test kernel (a masked load and an associative scan) is built on the first call in a process. A solve makes the
    same checks by itself; before a long run, this says early what would be missing.

    Raises:
        BackendUnavailableError: with a sentence that says what is missing and what to do.

    >>> from pararnn import BackendUnavailableError
    >>> try:
    ...     check_triton_environment()
    ... except BackendUnavailableError as error:
    ...     assert "scan_backend='eager'" in str(error)
    """
    sentence = environment_sentence()
    if sentence is None:
        import torch

        where = torch.device("cpu") if interpreting() else torch.device("cuda", torch.cuda.current_device())
        sentence = device_sentence(where)
    if sentence is not None:
        raise BackendUnavailableError(f"Triton kernels cannot run here: {sentence}; {_INSTEAD}")


def require_fused_triton() -> None:
    """The same checks under the name by which callers ask before they launch a fused kernel.

    Raises:
        BackendUnavailableError: as check_triton_environment.
    """
    check_triton_environment()


def is_fused_dtype_supported(dtype: Any, device: Any) -> bool:
    """Whether the kernels take tensors of this dtype on this device.

    float32 and float16 on any CUDA device, bfloat16 from compute capability 8.0 on. `device` is that of the tensor,
    because cards of one machine may differ; its number alone will do.

    >>> import torch
    >>> is_fused_dtype_supported(torch.float64, "cuda"), is_fused_dtype_supported(torch.float32, "cpu")
    (False, False)
    """
    import torch

    where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if where.type != "cuda" or dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    if not torch.cuda.is_available():
        return False
    return dtype != torch.bfloat16 or torch.cuda.get_device_capability(where)[0] >= 8
