"""Linear attention with a diagonal decay: gla, rwkv6, and what is a special case of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from array_api_compat import device

from pararnn.arrays import Array, cast, common_namespace, dtype_name, quiet
from pararnn.linear_attention.inputs import Call, checked
from pararnn.linear_attention.run import diagonal_of, run_diagonal

Result = tuple[Array, Array | None]
Pullback = Callable[..., dict[str, Array]]


def gla(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    form: str = "auto",
    chunk: int | None = None,
    subchunk: int | None = None,
    cu_seqlens: Any = None,
) -> Result:
    """Gated linear attention: a matrix state whose rows decay, read by a query.

    ::

        S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ,      o_t = scale · S_tᵀ q_t

    The decay is exact from 0 to -∞ in any mixture: there is no clamp, no epsilon, and no quotient.

    Args:
        q, k: (B, T, H, K), floating; any B, T ≥ 0. Half precision is stored in half and computed in float32.
        v: (B, T, H, V).
        log_decay: g, (B, T, H, K) for a decay in each channel, or (B, T, H, 1) for one in each head; ≤ 0, -∞ resets.
        scale: on the queries; K^-½ if None.
        initial_state: (B, H, K, V), or (S, H, K, V) for S packed sequences; zeros if None.
        output_final_state: whether the state after the last step is wanted.
        form: "recurrent" (a loop over time), "chunk" (chunks cut into halves), "subchunk" (the pairs inside a subchunk
            decayed one by one), "log" (logarithms; k, v > 0), "kernel" (a backend's), or "auto".
        chunk, subchunk: rows, powers of two; 64 (32 on NumPy), and 16 for form="subchunk", if None.
        cu_seqlens: (S + 1,) integers 0 … T: sequences packed along T into a batch of one.

    Returns:
        o (B, T, H, V) in v's dtype, and the final state, shaped like the initial one, in float32 (float64 if an input
        is), or None. Library and device are the inputs'. A call with T = 1 on the last state decodes one token.

    Raises:
        TypeError, ValueError: input that does not fit, before any work. A log decay above zero is refused where its
            values can be read at once (NumPy, torch on a CPU); elsewhere the state grows, as defined.

    Source: Yang et al. 2023 (arXiv 2312.06635), eq. 3.

    >>> import numpy as np
    >>> ones = np.ones((1, 4, 1, 1))
    >>> o, state = gla(ones, ones, ones, 0.0 * ones, output_final_state=True)
    >>> o.ravel().tolist(), state.shape
    ([1.0, 2.0, 3.0, 4.0], (1, 1, 1, 1))
    """
    call = _gla_call("gla", q, k, v, log_decay, scale, initial_state, form, chunk, subchunk, cu_seqlens)
    out, final = run_diagonal(call, exclusive=False, bonus=None)
    return out, final if output_final_state else None


def gla_vjp(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    form: str = "auto",
    chunk: int | None = None,
    subchunk: int | None = None,
    cu_seqlens: Any = None,
) -> tuple[Result, Pullback]:
    """gla, and a function from cotangents to the gradients of its arguments, for libraries without autograd.

    ::

        λ_t = scale · q_t ∂o_tᵀ + diag(exp(g_{t+1})) λ_{t+1}
        ∂k_t = λ_t v_t,      ∂g_t = Σ_V λ_t ⊙ diag(exp(g_t)) S_{t-1}

    over chunks, by a hand-written adjoint. The pullback takes ``cotangent`` (B, T, H, V) for o, or ``last`` for the
    final state, or both, and gives a dictionary by argument name, with ``initial_state`` if one was given. It may be
    called repeatedly. The arguments are gla's.

    Raises:
        As gla; the pullback raises ValueError for a cotangent of another shape.

    Source: Yang et al. 2023 (arXiv 2312.06635), section 4; here every exponent is a sum of log decays.

    >>> import numpy as np
    >>> ones = np.ones((1, 3, 1, 1))
    >>> (o, _), pullback = gla_vjp(ones, ones, ones, 0.0 * ones)
    >>> pullback(ones)["log_decay"].ravel().tolist()
    [0.0, 2.0, 2.0]
    """
    call = _gla_call("gla_vjp", q, k, v, log_decay, scale, initial_state, form, chunk, subchunk, cu_seqlens)
    out, final = run_diagonal(call, exclusive=False, bonus=None)
    return (out, final if output_final_state else None), _pullback(call, out, final, exclusive=False, bonus=None)


def _gla_call(
    what: str, q: Array, k: Array, v: Array, log_decay: Array, scale: float | None, initial_state: Array | None,
    form: str, chunk: int | None, subchunk: int | None, cu_seqlens: Any,
) -> Call:  # fmt: skip
    return checked(
        what,
        {"q": q, "k": k, "v": v, "log_decay": log_decay},
        widths={"q": "K", "k": "K", "v": "V", "log_decay": "K or 1"},
        scale=scale,
        default_scale=None,
        initial_state=initial_state,
        form=form,
        chunk=chunk,
        subchunk=subchunk,
        cu_seqlens=cu_seqlens,
    )


def rwkv6(
    r: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    u: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    form: str = "auto",
    chunk: int | None = None,
    subchunk: int | None = None,
    cu_seqlens: Any = None,
) -> Result:
    """The recurrence of RWKV-6: the state is read before its update, and the current token has a bonus.

    ::

        o_t = scale · (S_{t-1} + diag(u) k_t v_tᵀ)ᵀ r_t,      S_t = diag(exp(w_t)) S_{t-1} + k_t v_tᵀ

    Args:
        r, k: (B, T, H, K).
        v: (B, T, H, V).
        log_decay: w, (B, T, H, K), ≤ 0: the logarithm of the decay, -exp(…) in the published model.
        u: (H, K).
        scale: on r; 1 if None.
        initial_state, output_final_state, form, chunk, subchunk, cu_seqlens: as gla takes them.

    Returns, raises: as gla.

    Source: Peng et al. 2024 (arXiv 2404.05892), eq. 19.

    >>> import numpy as np
    >>> ones = np.ones((1, 4, 1, 1))
    >>> o, _ = rwkv6(ones, ones, ones, 0.0 * ones, 0.5 * ones[0, 0])
    >>> o.ravel().tolist()
    [0.5, 1.5, 2.5, 3.5]
    """
    call = _rwkv6_call("rwkv6", r, k, v, log_decay, u, scale, initial_state, form, chunk, subchunk, cu_seqlens)
    out, final = run_diagonal(call, exclusive=True, bonus=u)
    return out, final if output_final_state else None


def rwkv6_vjp(
    r: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    u: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    form: str = "auto",
    chunk: int | None = None,
    subchunk: int | None = None,
    cu_seqlens: Any = None,
) -> tuple[Result, Pullback]:
    """rwkv6, and a function from cotangents to the gradients of its arguments; see gla_vjp.

    Source: Peng et al. 2024 (arXiv 2404.05892), eq. 19, differentiated.

    >>> import numpy as np
    >>> ones = np.ones((1, 3, 1, 1))
    >>> _, pullback = rwkv6_vjp(ones, ones, ones, 0.0 * ones, ones[0, 0])
    >>> pullback(ones)["u"].tolist()
    [[3.0]]
    """
    call = _rwkv6_call("rwkv6_vjp", r, k, v, log_decay, u, scale, initial_state, form, chunk, subchunk, cu_seqlens)
    out, final = run_diagonal(call, exclusive=True, bonus=u)
    return (out, final if output_final_state else None), _pullback(call, out, final, exclusive=True, bonus=u)


def _rwkv6_call(
    what: str, r: Array, k: Array, v: Array, log_decay: Array, u: Array, scale: float | None,
    initial_state: Array | None, form: str, chunk: int | None, subchunk: int | None, cu_seqlens: Any,
) -> Call:  # fmt: skip
    common_namespace(what, k=k, u=u)
    call = checked(
        what,
        {"r": r, "k": k, "v": v, "log_decay": log_decay},
        widths={"r": "K", "k": "K", "v": "V", "log_decay": "K or 1"},
        scale=scale,
        default_scale=1.0,
        initial_state=initial_state,
        form=form,
        chunk=chunk,
        subchunk=subchunk,
        cu_seqlens=cu_seqlens,
    )
    if tuple(u.shape) != (k.shape[2], k.shape[3]):
        raise ValueError(f"{what}: u must be (H, K) = {(k.shape[2], k.shape[3])}, got {tuple(u.shape)}")
    return call


def _pullback(call: Call, out: Array, final: Array, *, exclusive: bool, bonus: Array | None) -> Pullback:
    """The adjoint of a diagonal recurrence in chunks, whichever form ran forward."""

    def pullback(cotangent: Array | None = None, *, last: Array | None = None) -> dict[str, Array]:
        xp = call.xp
        given, end = cotangents_of(call, out, final, cotangent, last)
        with quiet(xp):
            problem = diagonal_of(call, exclusive=exclusive, bonus=bonus)
            of_q, of_k, of_v, of_g, of_initial, of_bonus = problem.pull_back(problem.frame.split(xp, given), end)
            names = [*call.arrays]
            grads = {names[0]: of_q * call.scale, "k": of_k, "v": of_v}
            if "log_decay" in call.arrays:
                grads["log_decay"] = of_g
            grads = {n: cast(xp, problem.frame.join(xp, x), call.arrays[n].dtype) for n, x in grads.items()}
            if bonus is not None:
                grads["u"] = cast(xp, of_bonus, bonus.dtype)
        return grads | with_initial(call, of_initial)

    return pullback


def with_initial(call: Call, of_initial: Array) -> dict[str, Array]:
    """The initial state's gradient, if there was one to have it."""
    return {"initial_state": cast(call.xp, of_initial, call.initial_dtype)} if call.initial_dtype is not None else {}


def cotangents_of(
    call: Call, out: Array, final: Array, cotangent: Array | None, last: Array | None
) -> tuple[Array, Array]:
    """Both cotangents in the dtype of the work, zeros for one that is not given."""
    xp = call.xp
    if cotangent is None and last is None:
        raise ValueError("pullback: pass a cotangent for the outputs, or last= for the final state")
    found = []
    for name, given, like in (("cotangent", cotangent, out), ("last", last, final)):
        if given is None:
            found.append(xp.zeros(like.shape, dtype=call.work_dtype, device=device(like)))
            continue
        common_namespace("pullback", **{name: given, "out": like})
        if tuple(given.shape) != tuple(like.shape):
            raise ValueError(f"pullback: {name} must be {tuple(like.shape)}, got {tuple(given.shape)}")
        found.append(cast(xp, given, call.work_dtype))
    return found[0], found[1]


def linear_attention(
    q: Array, k: Array, v: Array, *, scale: float | None = None, initial_state: Array | None = None, **options: Any
) -> Result:
    """Plain linear attention, a sum over the past without decay.

    ::

        S_t = S_{t-1} + k_t v_tᵀ,      o_t = scale · S_tᵀ q_t

    Shapes, options and errors are gla's, with log_decay = 0.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), eq. 10, without its normaliser.

    >>> import numpy as np
    >>> ones = np.ones((1, 3, 1, 1))
    >>> linear_attention(ones, ones, ones)[0].ravel().tolist()
    [1.0, 2.0, 3.0]
    """
    xp = common_namespace("linear_attention", q=q, k=k, v=v)
    zero = xp.zeros((*k.shape[:-1], 1), dtype=k.dtype, device=device(k))
    return gla(q, k, v, zero, scale=scale, initial_state=initial_state, **options)


def retention(
    q: Array,
    k: Array,
    v: Array,
    *,
    log_decay: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    **options: Any,
) -> Result:
    """Retention (RetNet): one fixed decay for each head.

    ::

        S_t = γ_h S_{t-1} + k_t v_tᵀ,      o_t = scale · S_tᵀ q_t,      γ_h = 1 - 2^(-5-h) unless given

    Args:
        q, k, v: as gla takes them, rotated beforehand if the model rotates.
        log_decay: (H,), the logarithms of γ.

    Other arguments, results and errors are gla's.

    Source: Sun et al. 2023 (arXiv 2307.08621), eq. 6 and 8.

    >>> import numpy as np
    >>> ones = np.ones((1, 2, 1, 1))
    >>> retention(ones, ones, ones)[0].ravel().tolist()
    [1.0, 1.96875]
    """
    xp = common_namespace("retention", q=q, k=k, v=v, log_decay=log_decay)
    heads = k.shape[2] if k.ndim == 4 else 0
    work = xp.float64 if dtype_name(k.dtype) == "float64" else xp.float32
    if log_decay is None:
        log_decay = xp.asarray([math.log1p(-(2.0 ** (-5 - h))) for h in range(heads)], dtype=work, device=device(k))
    if tuple(log_decay.shape) != (heads,):
        raise ValueError(f"retention: log_decay must be (H,) = ({heads},), got {tuple(log_decay.shape)}")
    decay = xp.broadcast_to(xp.reshape(log_decay, (1, 1, heads, 1)), (*k.shape[:3], 1))
    return gla(q, k, v, decay, scale=scale, initial_state=initial_state, **options)


def mamba2(
    x: Array,
    dt: Array,
    a: Array,
    b: Array,
    c: Array,
    *,
    d: Array | None = None,
    initial_state: Array | None = None,
    **options: Any,
) -> Result:
    """The recurrence of Mamba-2: one data-dependent decay for each head.

    ::

        S_t = exp(dt_t a_h) S_{t-1} + b_t (dt_t x_t)ᵀ,      y_t = S_tᵀ c_t + d_h x_t

    Args:
        x: (B, T, H, V).
        dt: (B, T, H), the step sizes, > 0 (after softplus).
        a: (H,), < 0.
        b, c: (B, T, H, K).
        d: (H,), the skip; none if None.

    Other arguments, results and errors are gla's, with scale = 1.

    Source: Dao and Gu 2024 (arXiv 2405.21060), eq. 16 and section 6.

    >>> import numpy as np
    >>> one = np.ones((1, 2, 1, 1))
    >>> y, _ = mamba2(one, one[..., 0], -one[0, 0, 0], one, one)
    >>> bool(np.allclose(y.ravel(), [1.0, 1.0 + np.exp(-1.0)]))
    True
    """
    xp = common_namespace("mamba2", x=x, dt=dt, a=a, b=b, c=c, d=d)
    if x.ndim != 4 or tuple(dt.shape) != tuple(x.shape[:3]):
        raise ValueError(f"mamba2: x must be (B, T, H, V) and dt (B, T, H), got {tuple(x.shape)} and {tuple(dt.shape)}")
    for name, given in (("a", a), ("d", d)):
        if given is not None and tuple(given.shape) != (x.shape[2],):
            raise ValueError(f"mamba2: {name} must be (H,) = ({x.shape[2]},), got {tuple(given.shape)}")
    step = xp.expand_dims(dt, axis=-1)
    decay = step * xp.reshape(a, (1, 1, -1, 1))
    y, final = gla(c, b, step * x, decay, scale=1.0, initial_state=initial_state, **options)
    return (y if d is None else y + xp.reshape(d, (1, 1, -1, 1)) * x), final
