"""The recurrence of RWKV-7, a decay and a rank-one update, and its gradient."""

from __future__ import annotations

from typing import Any

from pararnn.arrays import Array
from pararnn.linear_attention.gated import Pullback, Result, cotangents_of, with_initial
from pararnn.linear_attention.inputs import Call, checked
from pararnn.linear_attention.run import pull_back_rank_one, run_rank_one


def rwkv7(
    r: Array,
    w: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    form: str = "auto",
    chunk: int | None = None,
    subchunk: int | None = None,
    cu_seqlens: Any = None,
) -> Result:
    """The recurrence of RWKV-7: rows decay, and a rank-one update replaces what a key has stored.

    ::

        S_t = (diag(exp(w_t)) + b_t a_tᵀ) S_{t-1} + k_t v_tᵀ,      o_t = scale · S_tᵀ r_t

    In the published model a = -κ̂ and b = κ̂ ⊙ a', with κ̂ of length one and a' in (0, 1). With w = 0 and such a, b it is
    the delta rule.

    Args:
        r, k, a, b: (B, T, H, K).
        w: (B, T, H, K), the *logarithm* of the decay, ≤ 0.
        v: (B, T, H, V).
        scale: on r; 1 if None.
        form: "recurrent", "chunk", "subchunk" or "auto"; see gla.
        initial_state, output_final_state, chunk, subchunk, cu_seqlens: as gla takes them; a state is (…, H, K, V), keys
            before values.

    Returns, raises: as gla.

    Source: Peng et al. 2025 (arXiv 2503.14456), eq. 17, transposed to keys before values.

    >>> import numpy as np
    >>> zero, read = np.zeros((1, 1, 1, 2)), np.asarray([[[[1.0, 0.0]]]])
    >>> state = np.asarray([[[[0.0, 1.0], [0.0, 0.0]]]])
    >>> rwkv7(read, zero, zero, zero, zero, zero, initial_state=state)[0].ravel().tolist()
    [0.0, 1.0]
    """
    call = _call("rwkv7", r, w, k, v, a, b, scale, initial_state, form, chunk, subchunk, cu_seqlens)
    out, final = run_rank_one(call)
    return out, final if output_final_state else None


def rwkv7_vjp(
    r: Array,
    w: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    form: str = "auto",
    chunk: int | None = None,
    subchunk: int | None = None,
    cu_seqlens: Any = None,
) -> tuple[Result, Pullback]:
    """rwkv7, and a function from cotangents to the gradients of its arguments; see gla_vjp.

    Source: Peng et al. 2025 (arXiv 2503.14456), eq. 17, differentiated in its chunk form.

    >>> import numpy as np
    >>> ones = np.ones((1, 3, 1, 1))
    >>> _, pullback = rwkv7_vjp(ones, 0.0 * ones, ones, ones, 0.0 * ones, ones)
    >>> pullback(ones)["a"].ravel().tolist()
    [0.0, 2.0, 2.0]
    """
    call = _call("rwkv7_vjp", r, w, k, v, a, b, scale, initial_state, form, chunk, subchunk, cu_seqlens)
    out, final = run_rank_one(call)

    def pullback(cotangent: Array | None = None, *, last: Array | None = None) -> dict[str, Array]:
        *grads, of_initial = pull_back_rank_one(call, *cotangents_of(call, out, final, cotangent, last))
        return dict(zip(call.arrays, grads, strict=True)) | with_initial(call, of_initial)

    return (out, final if output_final_state else None), pullback


def _call(
    what: str, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array, scale: float | None,
    initial_state: Array | None, form: str, chunk: int | None, subchunk: int | None, cu_seqlens: Any,
) -> Call:  # fmt: skip
    return checked(
        what,
        {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b},
        widths={"r": "K", "w": "K", "k": "K", "v": "V", "a": "K", "b": "K"},
        scale=scale,
        default_scale=1.0,
        initial_state=initial_state,
        form=form,
        chunk=chunk,
        subchunk=subchunk,
        cu_seqlens=cu_seqlens,
    )
