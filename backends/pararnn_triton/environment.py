"""Whether Triton can run here, said in a sentence."""

from __future__ import annotations

from functools import lru_cache

from pararnn_triton.interpreter import interpreting

# Versions on which the conformance suite has run.
OLDEST, BELOW = (3, 4), (4, 0)


@lru_cache(maxsize=1)
def environment_sentence() -> str | None:
    """None if kernels can be built and run, else what is missing."""
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
