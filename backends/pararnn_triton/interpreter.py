"""Keeps Triton's interpreter working with NumPy 2.4 and later, which no longer turn one-element arrays into numbers."""

from __future__ import annotations

import os


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def patch() -> None:
    """Has the interpreter take loop bounds out of their arrays; does nothing where kernels are compiled."""
    if not interpreting():
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor
    if getattr(original, "by_pararnn", False):
        return

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.by_pararnn = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched
