"""Linear recurrences with a matrix state, in plain array code, stable at any decay.

``gla``, ``rwkv6`` and ``rwkv7``, and the special cases ``linear_attention``, ``retention`` and ``mamba2``; each gives
``(output, final state or None)``. ``gla_vjp``, ``rwkv6_vjp`` and ``rwkv7_vjp`` also give a pullback, for libraries
without autograd. Arrays are (B, T, H, K or V), states (B, H, K, V). See ``docs/linear-attention.md``.
"""

from .gated import gla, gla_vjp, linear_attention, mamba2, retention, rwkv6, rwkv6_vjp
from .rwkv7 import rwkv7, rwkv7_vjp

__all__ = [
    "gla",
    "gla_vjp",
    "linear_attention",
    "mamba2",
    "retention",
    "rwkv6",
    "rwkv6_vjp",
    "rwkv7",
    "rwkv7_vjp",
]
