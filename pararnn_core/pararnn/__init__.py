"""pararnn: nonlinear recurrent networks, run and trained in parallel over time."""

from typing import Any

from pararnn import distributed, kernels, linear_attention
from pararnn.adjoint import Gradients
from pararnn.backend import Backend
from pararnn.cells import (
    ChannelwiseCell,
    MixingCell,
    ParaCfC,
    ParaGRU,
    ParaHopfield,
    ParaLEM,
    ParaLRU,
    ParaLSTM,
    ParaM2RNN,
    ParaMinGRU,
    ParaMinLSTM,
    ParaNLRU,
    ParaRWKV7,
    ParaS5,
    ParaSLSTM,
    ParaTanh,
    ParaTitans,
    ParaUnICORNN,
    ResetFirstGRU,
    RNNCell,
    StockCfC,
    StockGRU,
    StockLSTM,
    StockRNN,
    check_cell,
)
from pararnn.config import NewtonConfig, compile_safe_config
from pararnn.decode import can_decode_step, decode_step, decode_wx
from pararnn.errors import (
    AgreementError,
    BackendUnavailableError,
    NewtonDivergenceError,
    NotConvergedWarning,
    UntraceableError,
)
from pararnn.explain import Explanation, explain
from pararnn.from_weights import from_weights
from pararnn.k_star import auto_newton_iters
from pararnn.newton import newton_apply, newton_vjp
from pararnn.packing import final_states
from pararnn.registry import backends, register_backend
from pararnn.sequential import sequential_apply
from pararnn.serving import (
    BlockStackPool,
    LinearDraftResult,
    PagedStatePool,
    paged_apply,
    verify_linear_draft,
)
from pararnn.stats import NewtonStats
from pararnn.verify import AgreementReport, default_agreement_atol, verify_agreement

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "AgreementReport",
    "Backend",
    "BackendUnavailableError",
    "BlockStackPool",
    "ChannelwiseCell",
    "Explanation",
    "Gradients",
    "LinearDraftResult",
    "MixingCell",
    "NewtonConfig",
    "NewtonDivergenceError",
    "NewtonStats",
    "NotConvergedWarning",
    "PagedStatePool",
    "ParaCfC",
    "ParaGRU",
    "ParaHopfield",
    "ParaLEM",
    "ParaLRU",
    "ParaLSTM",
    "ParaM2RNN",
    "ParaMinGRU",
    "ParaMinLSTM",
    "ParaNLRU",
    "ParaRWKV7",
    "ParaS5",
    "ParaSLSTM",
    "ParaTanh",
    "ParaTitans",
    "ParaUnICORNN",
    "RNNCell",
    "ResetFirstGRU",
    "StockCfC",
    "StockGRU",
    "StockLSTM",
    "StockRNN",
    "UntraceableError",
    "auto_newton_iters",
    "backends",
    "can_decode_step",
    "check_cell",
    "compile_safe_config",
    "decode_step",
    "decode_wx",
    "default_agreement_atol",
    "distributed",
    "explain",
    "final_states",
    "from_weights",
    "kernels",
    "linear_attention",
    "newton_apply",
    "newton_vjp",
    "paged_apply",
    "register_backend",
    "sequential_apply",
    "verify_agreement",
    "verify_linear_draft",
]


def __getattr__(name: str) -> Any:
    """Names that need an array library beyond NumPy (``ParaRNN``, …), loaded on first use."""
    if name.startswith("_"):
        raise AttributeError(f"module 'pararnn' has no attribute {name!r}")
    from pararnn.registry import offered

    found = offered(name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    from pararnn.registry import offered_names

    return sorted({*globals(), *(name for name in offered_names() if "." not in name)})
