"""pararnn: nonlinear recurrent networks, run and trained in parallel over time."""

from pararnn.adjoint import Gradients
from pararnn.backend import Backend
from pararnn.cells import ChannelwiseCell, ParaGRU, ParaLSTM, ParaSLSTM, ParaTanh, RNNCell, check_cell
from pararnn.config import NewtonConfig, compile_safe_config
from pararnn.errors import (
    AgreementError,
    BackendUnavailableError,
    NewtonDivergenceError,
    NotConvergedWarning,
    UntraceableError,
)
from pararnn.explain import Explanation, explain
from pararnn.k_star import auto_newton_iters
from pararnn.newton import newton_apply, newton_vjp
from pararnn.registry import backends, register_backend
from pararnn.sequential import sequential_apply
from pararnn.stats import NewtonStats
from pararnn.verify import AgreementReport, default_agreement_atol, verify_agreement

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "AgreementReport",
    "Backend",
    "BackendUnavailableError",
    "ChannelwiseCell",
    "Explanation",
    "Gradients",
    "NewtonConfig",
    "NewtonDivergenceError",
    "NewtonStats",
    "NotConvergedWarning",
    "ParaGRU",
    "ParaLSTM",
    "ParaSLSTM",
    "ParaTanh",
    "RNNCell",
    "UntraceableError",
    "auto_newton_iters",
    "backends",
    "check_cell",
    "compile_safe_config",
    "default_agreement_atol",
    "explain",
    "newton_apply",
    "newton_vjp",
    "register_backend",
    "sequential_apply",
    "verify_agreement",
]
