"""A tiny kernel that shows whether Triton can build and run anything here: a masked load and an associative scan."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from pararnn_triton.interpreter import patch

patch()


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def running_sum(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(out + at, tl.associative_scan(value, 0, _add), mask=at < n)


def smoke(device: torch.device) -> str | None:
    """None if the kernel gives the right sums on `device`, else what went wrong. Waits for the device."""
    x = torch.arange(1.0, 12.0, device=device)
    out = torch.zeros_like(x)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            running_sum[(1,)](x, out, 11, BLOCK=16)
        right = bool(torch.equal(out, x.cumsum(0)))
    except Exception as error:
        return f"a test kernel does not build or run ({type(error).__name__}: {error})"
    return None if right else "a test kernel gave wrong sums"
